"""A model of torchtitan, trained and certified under every stage of ZeRO.

    python examples/recipes/titan.py                               two virtual devices
    python examples/recipes/titan.py --model llama3 --devices 4

The model is built as torchtitan builds it, from its registry, and is a plain module: torchtitan's
`parallelize_fn` is not called. A training script of torchtitan's own is certified as it is:
`fshard certify --run` (see the guide).
"""

import argparse
import sys
from importlib import import_module
from types import ModuleType

import torch
from torch import nn
from torch.nn import functional as F

import fshard as fs

VOCABULARY, LENGTH = 128, 16


class Absent(ModuleType):
    """A module of which nothing is used: one that needs a GPU, or data sets."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"Config": type("Config", (), {})})


class CausalAttention(nn.Module):
    """Attention of torch in the place of FlexAttention, which has no backward on CPUs."""

    def forward(self, q, k, v, *, attention_masks, scale=None, enable_gqa=False):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (batch, heads, tokens, head)
        options = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def new_model(name):
    """Return torchtitan's debug model of a family, of two layers."""
    for missing in ("distributed.minimal_async_ep.kernels", "trainer"):
        sys.modules.setdefault(f"torchtitan.{missing}", Absent(missing))
    config = import_module(f"torchtitan.models.{name}").model_registry("debugmodel").model
    config.layers = config.layers[:2]
    config.vocab_size = VOCABULARY
    config.tok_embeddings.num_embeddings = VOCABULARY
    config.lm_head.out_features = VOCABULARY
    torch.manual_seed(0)
    model = config.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    for layer in model.layers.values():
        layer.attention.inner_attention = CausalAttention()
    return model


def main():
    args = options()
    mesh = fs.make_mesh({"data": args.devices})
    model = new_model(args.model)
    apply, params, buffers = fs.functionalize(model)

    def loss_fn(params, batch):
        inputs = {"positions": batch["positions"], "attention_masks": None}
        scores, _ = apply(params, buffers, batch["tokens"], **inputs)
        return F.cross_entropy(scores.flatten(0, 1).float(), batch["labels"].flatten())

    tokens = torch.randint(VOCABULARY, (4, LENGTH + 1))
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "positions": torch.arange(LENGTH).expand(4, LENGTH),
    }
    certificate = fs.testing.certify(
        loss_fn, params, batch, fs.optim.adamw(1e-3), mesh=mesh, steps=2, stages=args.stages
    )
    print(certificate.check())


def options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama3")
    parser.add_argument("--devices", type=int, default=2, help="virtual ones")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], help="of ZeRO")
    return parser.parse_args()


if __name__ == "__main__":
    main()
