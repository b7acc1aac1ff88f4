"""A small inference engine: layers of one rank of tensor parallelism, which load as vLLM's do.

Each parameter has a `weight_loader(param, loaded, shard)`, and a model's `load_weights` finds the
parameter and the shard of each name in a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Rank:
    """One rank of some."""

    rank: int
    size: int

    def slice(self, x: Tensor, dim: int, parts: int = 1) -> Tensor:
        """Return this rank's slice of a tensor along a dim."""
        size = x.shape[dim] // self.size
        return x.narrow(dim, self.rank * size, size)


class Layer(nn.Module):
    """A layer with one weight, and perhaps a bias, that load by `load_shard`."""

    def __init__(self, rank: Rank, *shape: int, bias: bool = False) -> None:
        super().__init__()
        self.rank = rank
        self.weight = nn.Parameter(torch.zeros(shape), requires_grad=False)
        self.weight.weight_loader = self.load_shard
        if bias:
            self.bias = nn.Parameter(torch.zeros(shape[0]), requires_grad=False)
            self.bias.weight_loader = self.load_shard

    def load_shard(self, param: Tensor, loaded: Tensor, shard: Any = None) -> None:
        param.data.copy_(loaded)


class RowParallel(Layer):
    """Columns are sharded; the bias is replicated."""

    def __init__(self, rank: Rank, rows: int, columns: int, bias: bool = False) -> None:
        super().__init__(rank, rows, columns // rank.size, bias=bias)

    def load_shard(self, param: Tensor, loaded: Tensor, shard: Any = None) -> None:
        if param.ndim == 2:
            loaded = self.rank.slice(loaded, 1)
        assert param.shape == loaded.shape
        param.data.copy_(loaded)


class MergedColumnParallel(Layer):
    """Several matrices beside each other, of each the rows of this rank."""

    def __init__(self, rank: Rank, rows: Sequence[int], columns: int, bias: bool = False) -> None:
        self.rows = [count // rank.size for count in rows]
        super().__init__(rank, sum(self.rows), columns, bias=bias)

    def load_shard(self, param: Tensor, loaded: Tensor, shard: Any = None) -> None:
        if shard is None:  # all matrices, fused
            full_rows = [count * self.rank.size for count in self.rows]
            for index, matrix in enumerate(loaded.split(full_rows)):
                self.load_shard(param, matrix, index)
            return
        offset = sum(self.rows[:shard])
        target = param.data.narrow(0, offset, self.rows[shard])
        target.copy_(self.rank.slice(loaded, 0))


class QKVParallel(Layer):
    """Queries, keys and values beside each other; where ranks are more than heads, copies of them."""

    def __init__(
        self, rank: Rank, hidden: int, head: int, heads: int, kv_heads: int, bias: bool = False
    ) -> None:
        self.copies = max(1, rank.size // kv_heads)
        self.sizes = {
            "q": heads // rank.size * head,
            "k": max(1, kv_heads // rank.size) * head,
            "v": max(1, kv_heads // rank.size) * head,
        }
        self.full_sizes = [heads * head, kv_heads * head, kv_heads * head]
        super().__init__(rank, sum(self.sizes.values()), hidden, bias=bias)

    def load_shard(self, param: Tensor, loaded: Tensor, shard: Any = None) -> None:
        if shard is None:
            for name, matrix in zip("qkv", loaded.split(self.full_sizes), strict=True):
                self.load_shard(param, matrix, name)
            return
        size = self.sizes[shard]
        offset = sum(self.sizes[name] for name in "qkv"[: "qkv".index(shard)])
        copies = 1 if shard == "q" else self.copies
        begin = self.rank.rank // copies * size
        param.data.narrow(0, offset, size).copy_(loaded.narrow(0, begin, size))


class VocabParallel(Layer):
    """An embedding whose rows are padded to a multiple, then sharded; missing rows are zero."""

    def __init__(self, rank: Rank, vocabulary: int, hidden: int, multiple: int = 8) -> None:
        padded = -(-vocabulary // multiple) * multiple
        self.count = padded // rank.size
        super().__init__(rank, self.count, hidden)

    def load_shard(self, param: Tensor, loaded: Tensor, shard: Any = None) -> None:
        rows = loaded[self.rank.rank * self.count :][: self.count]
        param[: rows.shape[0]].data.copy_(rows)
        param[rows.shape[0] :].data.fill_(0)


class FusedExperts(nn.Module):
    """The experts of a layer as two stacks, w13 and w2, sharded in their inner dim."""

    def __init__(self, rank: Rank, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.rank = rank
        self.inner = inner // rank.size
        self.w13_weight = nn.Parameter(torch.zeros(experts, 2 * self.inner, hidden), False)
        self.w2_weight = nn.Parameter(torch.zeros(experts, hidden, self.inner), False)
        self.w13_weight.weight_loader = self.load_expert
        self.w2_weight.weight_loader = self.load_expert

    def load_expert(self, param: Tensor, loaded: Tensor, shard: Any = None) -> None:
        if shard == "w13":  # experts fused already: (experts, 2 inner, hidden)
            for expert, (gate, up) in enumerate(x.chunk(2) for x in loaded.unbind()):
                self.load_expert(param, gate, ("w1", expert))
                self.load_expert(param, up, ("w3", expert))
            return
        if shard == "w2":
            param.data.copy_(self.rank.slice(loaded, 2))
            return
        kind, expert = shard
        row = param.data[expert]
        if kind == "w2":
            row.copy_(self.rank.slice(loaded, 1))
        else:
            offset = 0 if kind == "w1" else self.inner
            row.narrow(0, offset, self.inner).copy_(self.rank.slice(loaded, 0))


@dataclass(frozen=True)
class Rule:
    """Names of a checkpoint by a regular expression, the parameter, and the shard of it."""

    pattern: str
    parameter: str
    shard: Callable[[re.Match[str]], Any] = lambda match: None


class Engine(nn.Module):
    """The parameters of a decoder, and the loader of a family's checkpoint.

    Args:
        top: layers beside the blocks.
        block: the layers of each block; the engine has one.
        rules: for names of the checkpoint; the first that matches.
        before: what happens to a weight before its shard is loaded.
        skipped: a regular expression of names that the loader drops.
    """

    def __init__(
        self,
        top: dict[str, nn.Module],
        block: dict[str, nn.Module],
        rules: Sequence[Rule],
        before: Callable[[str, Tensor], Tensor] = lambda name, x: x,
        skipped: str = "-",
    ) -> None:
        super().__init__()
        self.top = nn.ModuleDict(top)
        self.block = nn.ModuleDict(block)
        self.rules = rules
        self.before = before
        self.skipped = skipped
        # A parameter of torch's layers has no loader.
        for param in self.parameters():
            param.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        params = dict(self.named_parameters())
        loaded: set[str] = set()
        for name, x in weights:
            if re.fullmatch(self.skipped, name):
                continue
            target, shard = self.target_of(name)
            param = params[target]
            load_shard = getattr(param, "weight_loader", default_loader)
            load_shard(param, self.before(name, x), shard)
            loaded.add(target)
        return loaded

    def target_of(self, name: str) -> tuple[str, Any]:
        for rule in self.rules:
            match = re.fullmatch(rule.pattern, name)
            if match:
                return match.expand(rule.parameter), rule.shard(match)
        raise KeyError(name)


def default_loader(param: Tensor, loaded: Tensor, shard: Any = None) -> None:
    assert param.shape == loaded.shape, (param.shape, loaded.shape)
    param.data.copy_(loaded)
