"""A decode step with a cache of keys and values, tensor parallel on two devices, against plain torch.

    python benchmarks/decode.py                      a Llama of 4 layers, hidden 512, batch 8, cache 128 (bar: 3)
    python benchmarks/decode.py --hidden 256 --batch 4
    python benchmarks/decode.py --processes          on two processes, beside virtual devices
    python benchmarks/decode.py --cold               each rollout begins with a longer cache: all shapes are new

One token a row in each step, and the cache grows by it, so that each step has other shapes than the last. A rollout is 8 steps.
"arrays" is the module of one device on sharded arrays, "shard_map" the same on local tensors with collectives. Each first
makes the tokens and logits of plain torch. Rollouts take turns; the median of the ratios counts. One thread of torch each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import interleaved
from torch import Tensor
from torch.nn import functional as F

import fshard as fs
from fshard import P
from fshard.mesh.layout.tree import map_leaves
from fshard.testing.processes import run_processes

TOKENS = 8
"""Steps of a rollout."""
COLUMNS = ("q", "k", "v", "gate", "up")
ROWS = ("out", "down")
Params = dict[str, Tensor]
Cache = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """The sizes of the model and of its inputs."""

    hidden: int = 512
    heads: int = 8
    layers: int = 4
    words: int = 4096
    batch: int = 8
    cache: int = 128

    @property
    def inner(self) -> int:
        """Hidden units of a block."""
        return self.hidden * 8 // 3 // 32 * 32

    def params(self) -> Params:
        """Return the parameters by name."""
        draw = torch.Generator().manual_seed(0)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=draw) / columns**0.5

        params = {"words": matrix(self.words, self.hidden), "head": matrix(self.words, self.hidden)}
        for layer in range(self.layers):
            for name in ("q", "k", "v", "out"):
                params[f"{layer}.{name}"] = matrix(self.hidden, self.hidden)
            for name in ("gate", "up"):
                params[f"{layer}.{name}"] = matrix(self.inner, self.hidden)
            params[f"{layer}.down"] = matrix(self.hidden, self.inner)
        return params

    def caches(self, length: int) -> list[Cache]:
        """Return a cache of some tokens for each layer."""
        draw = torch.Generator().manual_seed(length)
        shape = (self.batch, self.heads, length, self.hidden // self.heads)
        caches: list[Cache] = []
        for _ in range(self.layers):
            caches.append({name: torch.randn(shape, generator=draw) for name in ("k", "v")})
        return caches


@dataclass(frozen=True)
class Linears:
    """The products of a model: by columns, by rows after them, and the logits of all words."""

    column: Callable[[Tensor, Tensor], Tensor] = F.linear
    row: Callable[[Tensor, Tensor], Tensor] = F.linear
    gather: Callable[[Tensor], Tensor] = lambda x: x


def decode_step(
    size: Size, linears: Linears, params: Params, caches: list[Cache], ids: Tensor
) -> tuple[Tensor, list[Cache]]:
    """Return the logits of the next token of each row, and the caches with this one."""
    x = F.embedding(ids[:, None], params["words"])
    new_caches: list[Cache] = []
    for layer, cache in enumerate(caches):
        weights = {name: params[f"{layer}.{name}"] for name in (*COLUMNS, *ROWS)}
        h = F.rms_norm(x, (size.hidden,))
        heads: list[Tensor] = []
        for name in ("q", "k", "v"):
            projected = linears.column(h, weights[name])
            heads.append(projected.unflatten(-1, (-1, size.hidden // size.heads)).transpose(1, 2))
        q, k, v = heads
        k = torch.cat([cache["k"], k], 2)
        v = torch.cat([cache["v"], v], 2)
        new_caches.append({"k": k, "v": v})
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + linears.row(y.transpose(1, 2).flatten(2), weights["out"])

        h = F.rms_norm(x, (size.hidden,))
        gated = F.silu(linears.column(h, weights["gate"])) * linears.column(h, weights["up"])
        x = x + linears.row(gated, weights["down"])
    logits = linears.column(F.rms_norm(x, (size.hidden,)), params["head"])
    return linears.gather(logits), new_caches


def rollout(step: Callable[..., Any], params: Any, caches: Any, ids: Any) -> Any:
    """Return the greedy tokens of some steps."""
    tokens: list[Any] = []
    for _ in range(TOKENS):
        logits, caches = step(params, caches, ids)
        ids = logits[:, 0].argmax(-1)
        tokens.append(ids)
    return torch.stack(tokens)


# -- two devices -----------------------------------------------------------------------------------


def spec_of(name: str) -> P:
    """Return the spec of a parameter: sharded by rows of the matrix, by columns, or replicated."""
    kind = name.rpartition(".")[2]
    if kind in COLUMNS or kind == "head":
        return P("model")
    if kind in ROWS:
        return P(None, "model")
    return P()


class TwoDevices:
    """The model on a mesh of two devices, and its rollouts in two ways."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.mesh = fs.make_mesh({"model": 2})
        self.params = size.params()
        specs = {name: spec_of(name) for name in self.params}
        self.sharded = fs.device_put(self.params, map_leaves(self._layout, specs))
        self.cache_specs = [{"k": P(None, "model"), "v": P(None, "model")}] * size.layers
        local = Linears(
            column=lambda x, w: fs.tensor.column(x, w, "model"),
            row=lambda x, w: fs.tensor.row(x, w, "model"),
            gather=lambda x: fs.all_gather(x, "model", dim=-1),
        )
        self.mapped = fs.shard_map(
            lambda params, caches, ids: decode_step(size, local, params, caches, ids),
            mesh=self.mesh,
            in_specs=(specs, self.cache_specs, P()),
            out_specs=(P(), self.cache_specs),
        )

    def _layout(self, spec: P) -> fs.Layout:
        return fs.Layout(self.mesh, spec)

    def plain_step(self, params: Any, caches: Any, ids: Any) -> Any:
        """Take a step of one device."""
        return decode_step(self.size, Linears(), params, caches, ids)

    def array_step(self, params: Any, caches: Any, ids: Any) -> Any:
        """Take the same step on arrays; the tokens stay replicated."""
        with fs.array.equal_tensors():
            logits, caches = self.plain_step(params, caches, ids)
        return fs.array.constrain(logits, P()), caches

    def rollouts(self, length: int) -> dict[str, Callable[[], Any]]:
        """Return a rollout of each way, from caches of a length."""
        ids = torch.arange(self.size.batch)
        caches = self.size.caches(length)
        layouts = map_leaves(self._layout, self.cache_specs)
        sharded = fs.device_put(caches, layouts), fs.device_put(ids, self._layout(P()))
        return {
            "plain": lambda: rollout(self.plain_step, self.params, caches, ids),
            "arrays": lambda: rollout(self.array_step, self.sharded, *sharded),
            "shard_map": lambda: rollout(self.mapped, self.sharded, *sharded),
        }


@torch.no_grad()
def ratios(size: Size, rounds: int, *, is_cold: bool) -> dict[str, tuple[float, float]]:
    """Return milliseconds a token, and the ratio to plain torch, of each way."""
    torch.set_num_threads(1)
    devices = TwoDevices(size)
    calls = devices.rollouts(size.cache)
    expected = calls["plain"]()
    for name in ("arrays", "shard_map"):
        actual = fs.unshard(calls[name]())
        assert torch.equal(actual, expected), f"{name} has other tokens than plain torch"

    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        if is_cold:
            calls = devices.rollouts(size.cache + (number + 1) * TOKENS)
        times = interleaved(calls, 1, warm_up=0 if is_cold else 1)
        for name, (time,) in times.items():
            seconds[name].append(time)

    result: dict[str, tuple[float, float]] = {}
    for name, row in seconds.items():
        pairs = zip(row, seconds["plain"], strict=True)
        ratio = median([ours / plain for ours, plain in pairs])
        result[name] = median(row) / TOKENS * 1000, ratio
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cold", action="store_true", help="all shapes of a rollout are new")
    parser.add_argument("--processes", action="store_true", help="on two processes, too")
    options = parser.parse_args()
    size = Size(hidden=options.hidden, batch=options.batch)

    columns = ("devices", "way", "ms a token", "of plain torch")
    table = Table(*columns, title=f"decode, hidden {size.hidden}, batch {size.batch} (bar: 3)")
    rows = {"virtual": ratios(size, options.rounds, is_cold=options.cold)}
    if options.processes:
        (rows["processes"], _) = run_processes(
            ratios, 2, size, options.rounds, is_cold=options.cold
        )
    for kind, ways in rows.items():
        for name, (milliseconds, ratio) in ways.items():
            table.add_row(kind, name, f"{milliseconds:.2f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
