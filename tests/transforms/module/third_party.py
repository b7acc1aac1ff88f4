"""Models of timm, diffusers, torchrec and transformers, made small.

`tests/third_party.txt` says how these packages are installed: beside the environment, in a folder
that stands on the path only while a model is made or called, so that all else is as without them.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

PLACE = Path(sys.prefix) / "third-party"
HOW = f"python -m pip install --no-deps --target {PLACE} -r tests/third_party.txt"
_kept = []


@contextmanager
def reachable(name: str) -> Iterator[None]:
    """Import a module, and let others of its package be imported; skip where that is missing."""
    sys.path.append(str(PLACE))
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # all of them warn of each other while they are imported
            try:
                _declare_what_torchvision_lacks()
                import_module(name)
            except ModuleNotFoundError as error:  # what is there and does not load is a failure
                pytest.skip(f"{error.name} is missing, which {name} needs: {HOW}")
        yield
    finally:
        sys.path.remove(str(PLACE))


def _declare_what_torchvision_lacks() -> None:
    """Declare two operators that torchvision looks up as it is imported, where its own library does
    not load.

    It does not on a torch without CUDA.  No model calls them; timm imports torchvision, and so does
    diffusers. A torchvision that is imported already, or whose library loads, has them, and must
    not get them twice.
    """
    if _kept or "torchvision" in sys.modules:
        return
    torchvision = find_spec("torchvision")
    if torchvision is None or torchvision.origin is None:
        return
    for file in sorted(Path(torchvision.origin).parent.glob("_C*.so")):
        with suppress(OSError):
            torch.ops.load_library(file)
    missing = [name for name in ("nms", "qnms") if not hasattr(torch.ops.torchvision, name)]
    if missing:
        library = torch.library.Library("torchvision", "FRAGMENT")
        _kept.append(library)
        for name in missing:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def convit_base() -> nn.Module:
    """Return a vision transformer: two blocks that look near them first, and one that looks
    everywhere.
    """
    import timm

    small = {
        "img_size": 6,
        "patch_size": 2,
        "embed_dim": 2,
        "num_heads": 4,
        "depth": 3,
        "local_up_to_layer": 2,
    }
    return timm.create_model("convit_base", pretrained=False, num_classes=5, **small)


def vqmodel() -> nn.Module:
    """Return an autoencoder whose code is one of 8 vectors at each place, with attention in the
    middle.
    """
    from diffusers import VQModel

    return VQModel(block_out_channels=(4,), norm_num_groups=2, num_vq_embeddings=8, sample_size=6)


def tables():
    """Return tables of embeddings for three features; two of these share one."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(
            name="words", embedding_dim=4, num_embeddings=11, feature_names=["title", "text"]
        ),
        EmbeddingBagConfig(
            name="places", embedding_dim=4, num_embeddings=7, feature_names=["place"]
        ),
    ]
    return EmbeddingBagCollection(tables=configs)


def dlrm() -> nn.Module:
    from torchrec.models.dlrm import DLRM

    return DLRM(
        tables(), dense_in_features=3, dense_arch_layer_sizes=[5, 4], over_arch_layer_sizes=[5, 1]
    )


def deepfm() -> nn.Module:
    from torchrec.models.deepfm import SimpleDeepFMNN

    return SimpleDeepFMNN(3, tables(), hidden_layer_size=5, deep_fm_dimension=3)


def gpt2() -> nn.Module:
    """Return a model with two heads, of language and of choices."""
    import transformers

    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    no_dropout = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "summary_first_dropout": 0.0,
    }
    return transformers.GPT2DoubleHeadsModel(transformers.GPT2Config(**sizes, **no_dropout))


def token_ids(x: torch.Tensor) -> torch.Tensor:
    """Return two choices of six tokens for each sample."""
    return (x.repeat_interleave(2, 1) * 7).long().abs()[:, None].repeat(1, 2, 1) % 20


def pictures(x: torch.Tensor) -> torch.Tensor:
    """Return a picture for each sample."""
    wave = torch.linspace(0, 3, 36, dtype=x.dtype).view(6, 6).cos()
    return x[:, :, None, None].sin() * wave  # (samples, 3, 6, 6)


def features(x: torch.Tensor):
    """Return bags of indices for each sample and feature, of as many as the sample says: none at
    all in some.
    """
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    lengths = (x.abs() * 2).long().t().reshape(
        -1
    ) % 4  # (features * samples,), all samples of a feature first
    starts = (x.exp() * 9).long().t().reshape(-1)
    values = torch.cat(
        [
            (start + 3 * torch.arange(n)) % 7
            for start, n in zip(starts, lengths.tolist(), strict=True)
        ]
    )
    return KeyedJaggedTensor.from_lengths_sync(
        keys=["title", "text", "place"], values=values, lengths=lengths
    )


class OfTensors(nn.Module):
    """A model of torchrec that makes the object which it is given in its forward, of tensors that
    can be cut.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x, features(x))
