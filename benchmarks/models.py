"""What is trained: models, each written once as plain functions and as an nn.Module that holds the same, and how.

A model is a row of *units*: functions (params, x, batch) -> x, of which the first gets the inputs and the last returns
the loss.  A unit's parameters are those whose names begin with its own: "blocks.0" has "blocks.0.attn.qkv".

    compute        GPT: 6 blocks, d 256, 8 heads, vocabulary 1024, 8 sequences of 128 tokens for each process
    communication  MLP: 4 blocks of 512 -> 4096 -> 512, 1 sequence of 32 vectors for each process
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RATE, DECAY, BETAS, EPSILON = (
    3e-4,
    1e-2,
    (0.9, 0.999),
    1e-8,
)  # AdamW's: torch's defaults but for the rate
SEED, BATCHES = 0, 4

Params = dict[str, Tensor]
Batch = dict[str, Tensor]
Unit = Callable[[Params, Tensor, Batch], Tensor]
Shapes = dict[str, tuple[int, ...]]
Step = Callable[[int], Tensor]
"""Train on batch `index`; return the loss before the step, on this process's part or on the global batch."""


class Model(NamedTuple):
    """Its units in order, its parameters from a seed, a process's part of batch `index`, and its loss in JAX."""

    units: dict[str, Unit]
    init: Callable[[int], Params]
    batch: Callable[[int, int], Batch]  # (index, process)
    loss_in_jax: Callable[[dict[str, Any], dict[str, Any]], Any]

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Return the mean loss: an ordinary function for one device."""
        x = batch["inputs"]
        for name, unit in self.units.items():
            x = unit(part(params, name), x, batch)
        return x


def part(params: Params, unit: str) -> Params:
    """Return the parameters of a unit under their short names.

    >>> part({"head.w": torch.ones(1), "embed.tokens": torch.ones(2)}, "head")
    {'w': tensor([1.])}
    """
    return {
        name.removeprefix(f"{unit}."): leaf
        for name, leaf in params.items()
        if name.startswith(f"{unit}.")
    }


def _drawn(shapes: Shapes, seed: int) -> Params:
    """Draw matrices with columns of unit length or so; scales (named "scale") are ones, other vectors zeros."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.full(shape, float(name.endswith("scale")))
        return torch.randn(shape, generator=generator) / shape[1] ** 0.5

    return {name: draw(name, shape) for name, shape in shapes.items()}


def _generator(index: int, process: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * process + index)


@dataclass(frozen=True)
class Gpt:
    """A GPT of some size: embeddings, blocks of causal attention and a small MLP, a head."""

    width: int = 256
    heads: int = 8
    depth: int = 6
    vocabulary: int = 1024
    length: int = 128
    sequences: int = 8

    def model(self) -> Model:
        """Return it as a model."""
        blocks = {f"blocks.{layer}": self._block for layer in range(self.depth)}
        return Model(
            {"embed": self._embed, **blocks, "head": self._head},
            self._init,
            self._batch,
            self._loss_in_jax,
        )

    def _embed(self, p: Params, tokens: Tensor, batch: Batch) -> Tensor:
        return F.embedding(tokens, p["tokens"]) + p["positions"]  # (batch, seq, width)

    def _block(self, p: Params, x: Tensor, batch: Batch) -> Tensor:
        y = F.layer_norm(x, (self.width,), p["norm1.scale"], p["norm1.shift"])
        qkv = F.linear(y, p["attn.qkv"], p["attn.qkv_bias"]).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq, head_width)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(y, p["attn.out"], p["attn.out_bias"])
        y = F.layer_norm(x, (self.width,), p["norm2.scale"], p["norm2.shift"])
        return x + F.linear(
            F.gelu(F.linear(y, p["mlp.up"], p["mlp.up_bias"])), p["mlp.down"], p["mlp.down_bias"]
        )

    def _head(self, p: Params, x: Tensor, batch: Batch) -> Tensor:
        x = F.layer_norm(x, (self.width,), p["norm.scale"], p["norm.shift"])
        return F.cross_entropy(F.linear(x, p["w"]).flatten(0, 1), batch["targets"].flatten())

    def _init(self, seed: int) -> Params:
        d = self.width
        block: Shapes = {
            "norm1.scale": (d,),
            "norm1.shift": (d,),
            "attn.qkv": (3 * d, d),
            "attn.qkv_bias": (3 * d,),
            "attn.out": (d, d),
            "attn.out_bias": (d,),
            "norm2.scale": (d,),
            "norm2.shift": (d,),
            "mlp.up": (4 * d, d),
            "mlp.up_bias": (4 * d,),
            "mlp.down": (d, 4 * d),
            "mlp.down_bias": (d,),
        }
        shapes: Shapes = {
            "embed.tokens": (self.vocabulary, d),
            "embed.positions": (self.length, d),
            **{
                f"blocks.{layer}.{name}": shape
                for layer in range(self.depth)
                for name, shape in block.items()
            },
            "head.norm.scale": (d,),
            "head.norm.shift": (d,),
            "head.w": (self.vocabulary, d),
        }
        return _drawn(shapes, seed)

    def _batch(self, index: int, process: int) -> Batch:
        """Text of a kind that can be learnt: the next token is the last one plus a step that is the sequence's own."""
        generator = _generator(index, process)
        first = torch.randint(self.vocabulary, (self.sequences, 1), generator=generator)
        pace = torch.randint(1, 4, (self.sequences, 1), generator=generator)
        text = (first + pace * torch.arange(self.length + 1)) % self.vocabulary
        return {"inputs": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}

    def _loss_in_jax(self, p: dict[str, Any], batch: dict[str, Any]) -> Any:
        import jax
        import jax.numpy as jnp

        def norm(x: Any, name: str) -> Any:
            x = x - x.mean(-1, keepdims=True)
            return (
                x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.scale"]
                + p[f"{name}.shift"]
            )

        def linear(x: Any, name: str) -> Any:
            return x @ p[name].T + p[f"{name}_bias"]

        x = p["embed.tokens"][batch["inputs"]] + p["embed.positions"]
        for at in (f"blocks.{layer}" for layer in range(self.depth)):
            qkv = linear(norm(x, f"{at}.norm1"), f"{at}.attn.qkv").reshape(
                *x.shape[:2], 3, self.heads, -1
            )
            q, k, v = (
                qkv[:, :, which] for which in range(3)
            )  # each (batch, seq, heads, head_width)
            x = x + linear(
                jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape),
                f"{at}.attn.out",
            )
            y = jax.nn.gelu(linear(norm(x, f"{at}.norm2"), f"{at}.mlp.up"), approximate=False)
            x = x + linear(y, f"{at}.mlp.down")
        logits = norm(x, "head.norm") @ p["head.w"].T
        return -jnp.take_along_axis(
            jax.nn.log_softmax(logits), batch["targets"][..., None], -1
        ).mean()


@dataclass(frozen=True)
class Mlp:
    """Wide blocks on narrow vectors: many parameters, little to compute with each."""

    narrow: int = 512
    wide: int = 4096
    depth: int = 4
    rows: int = 32

    def model(self) -> Model:
        """Return it as a model."""
        blocks = {f"blocks.{layer}": self._block for layer in range(self.depth)}
        return Model({**blocks, "head": self._head}, self._init, self._batch, self._loss_in_jax)

    def _block(self, p: Params, x: Tensor, batch: Batch) -> Tensor:
        return x + F.linear(F.gelu(F.linear(x, p["up"], p["up_bias"])), p["down"], p["down_bias"])

    def _head(self, p: Params, x: Tensor, batch: Batch) -> Tensor:
        return F.mse_loss(F.linear(x, p["w"]), batch["targets"])

    def _init(self, seed: int) -> Params:
        block: Shapes = {
            "up": (self.wide, self.narrow),
            "up_bias": (self.wide,),
            "down": (self.narrow, self.wide),
            "down_bias": (self.narrow,),
        }
        blocks = {
            f"blocks.{layer}.{name}": shape
            for layer in range(self.depth)
            for name, shape in block.items()
        }
        return _drawn({**blocks, "head.w": (self.narrow, self.narrow)}, seed)

    def _batch(self, index: int, process: int) -> Batch:
        x = torch.randn(1, self.rows, self.narrow, generator=_generator(index, process))
        return {"inputs": x, "targets": x.roll(1, dims=-1)}

    def _loss_in_jax(self, p: dict[str, Any], batch: dict[str, Any]) -> Any:
        import jax

        x = batch["inputs"]
        for at in (f"blocks.{layer}" for layer in range(self.depth)):
            y = jax.nn.gelu(x @ p[f"{at}.up"].T + p[f"{at}.up_bias"], approximate=False)
            x = x + y @ p[f"{at}.down"].T + p[f"{at}.down_bias"]
        return ((x @ p["head.w"].T - batch["targets"]) ** 2).mean()


WORKLOADS = {"compute": Gpt().model(), "communication": Mlp().model()}


class UnitModule(nn.Module):
    """One unit with its parameters."""

    def __init__(self, unit: Unit, params: Params) -> None:
        super().__init__()
        self.unit, self.names = unit, {name: name.replace(".", "_") for name in params}
        for name, leaf in params.items():
            self.register_parameter(self.names[name], nn.Parameter(leaf))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the unit."""
        return self.unit({name: getattr(self, own) for name, own in self.names.items()}, x, batch)


class Module(nn.Module):
    """A model as a module, for torch's own data parallelism: `module(batch)` is its loss."""

    def __init__(self, model: Model, seed: int) -> None:
        super().__init__()
        params = model.init(seed)
        self.units = nn.ModuleList(
            [UnitModule(unit, part(params, name)) for name, unit in model.units.items()]
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss."""
        x = batch["inputs"]
        for unit in self.units:
            x = unit(x, batch)
        return x
