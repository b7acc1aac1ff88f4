"""`ShardLists`: shards with their gradients and state as lists, the arguments of torch's kernels.

leaf      0 (two shards)     1 (plain)
params    p0a    p0b         p1
grads     g0a    g0b         g1
steps     t0     t0          t1
state     m0a    m0b         m1         ...

torch's fused kernels, one pass over memory for a full optimizer step, read tensors as flat arrays: every shard and its
state must be contiguous, on a device that has the kernels, in a dtype that they support. On the CPU, torch's fused SGD
is wrong in half precision. The ends of an array are computed by other instructions than its middle, so fused bits
depend on the sharding; foreach bits do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.memory.state import current_offload, groups_of, shards_and_devices, streamed
from fshard.mesh.layout.sharded import Sharded
from fshard.optim.leaves import Leaf, shards_of


@dataclass(frozen=True)
class ShardLists:
    """Shards with their gradients and state.

    Args:
        leaves: the leaf that each is a shard of, before the step.
        params: the shards, written in place.
        grads: their gradients, of the same dtype, read only.
        steps: number of steps of each, this one included.
        state: the slots, written in place; None for a slot that a leaf does not have.
    """

    leaves: list[Leaf]
    params: list[Tensor]
    grads: list[Tensor]
    steps: list[float]
    state: dict[str, list[Tensor]]

    @staticmethod
    def of(leaves: list[Leaf], grads: list[Leaf], columns: dict[str, list[Leaf]]) -> ShardLists:
        """Take leaves apart into their shards. `columns` are the leaves of "params", "step" and each slot."""
        counts = [len(leaf.shards) if isinstance(leaf, Sharded) else 1 for leaf in leaves]
        is_single = all(count == 1 for count in counts)

        def repeated(column: list[Any]) -> list[Any]:
            return (
                column
                if is_single
                else [x for x, n in zip(column, counts, strict=True) for _ in range(n)]
            )

        def shards(column: list[Leaf]) -> list[Any]:
            if is_single:
                return [x.shards[0] if isinstance(x, Sharded) else x for x in column]
            return [
                x
                for leaf, n in zip(column, counts, strict=True)
                for x in (shards_of(leaf) or (None,) * n)
            ]

        written = shards(columns["params"])
        return ShardLists(
            leaves=repeated(leaves),
            params=written,
            grads=[
                g if g.dtype is p.dtype else g.to(p.dtype)
                for g, p in zip(shards(grads), written, strict=True)
            ],
            steps=repeated(numbers_of(columns["step"])),
            state={
                name: shards(column)
                for name, column in columns.items()
                if name not in ("params", "step")
            },
        )

    @staticmethod
    def of_pairs(pairs: Sequence[tuple[Leaf, Leaf]]) -> ShardLists:
        """Return the shards of leaves beside those of others, as parameters with gradients."""
        columns = [
            (leaf, *shards)
            for leaf, x in pairs
            for shards in zip(shards_of(leaf), shards_of(x), strict=True)
        ]
        leaves, params, grads = ([column[i] for column in columns] for i in range(3))
        return ShardLists(leaves, params, grads, [0.0] * len(leaves), {})

    def only(self, indices: Sequence[int]) -> ShardLists:
        """Return some of the shards."""

        def taken(column: list[Any]) -> list[Any]:
            return [column[i] for i in indices]

        leaves, params, grads, steps = map(
            taken, (self.leaves, self.params, self.grads, self.steps)
        )
        return ShardLists(
            leaves,
            params,
            grads,
            steps,
            {name: taken(column) for name, column in self.state.items()},
        )

    def nonempty(self) -> ShardLists:
        """Return the shards that have elements, or a number of state; others are those of other stages' devices."""

        def has_number(i: int) -> bool:
            return any(
                column[i] is not None and column[i].ndim == 0 for column in self.state.values()
            )

        some = [i for i, param in enumerate(self.params) if param.numel() or has_number(i)]
        return self if len(some) == len(self.params) else self.only(some)

    def fetched(self) -> Iterator[ShardLists]:
        """Yield the shards in groups whose state is in the memory of the update: all at once, if it is there."""
        offload = current_offload()
        if offload is None:
            yield self
            return
        starts = [
            i for i, leaf in enumerate(self.leaves) if not i or leaf is not self.leaves[i - 1]
        ]
        spans = [range(*pair) for pair in pairwise([*starts, len(self.leaves)])]
        groups = groups_of([_local_bytes(self.leaves[i]) * (1 + len(self.state)) for i in starts])
        rows = [[row for i in group for row in spans[i]] for group in groups]
        devices = [device for i in starts for _, device in shards_and_devices(self.leaves[i])]
        for chosen, (params, *slots) in streamed(
            [self.params, *self.state.values()], devices, rows, offload
        ):
            yield replace(
                self.only(chosen), params=params, state=dict(zip(self.state, slots, strict=True))
            )

    def split(self, parts: Callable[[Tensor], Sequence[Tensor]]) -> ShardLists:
        """Return views of the parts of each tensor, with those of its gradient and state."""
        counts = [len(parts(param)) for param in self.params]

        def repeated(column: list[Any]) -> list[Any]:
            return [x for x, count in zip(column, counts, strict=True) for _ in range(count)]

        def views(column: list[Tensor]) -> list[Tensor]:
            return [part for x in column for part in parts(x)]

        state = {name: views(column) for name, column in self.state.items()}
        return ShardLists(
            repeated(self.leaves),
            views(self.params),
            views(self.grads),
            repeated(self.steps),
            state,
        )

    def real(self) -> ShardLists:
        """Return complex shards as shards of real numbers, in the same memory."""
        if not self.params[0].is_complex():
            return self
        return replace(
            self,
            params=list(map(torch.view_as_real, self.params)),
            grads=[torch.view_as_real(grad.resolve_conj()) for grad in self.grads],
            state={
                name: list(map(torch.view_as_real, column)) for name, column in self.state.items()
            },
        )

    def by_kind(self) -> Iterator[ShardLists]:
        """Yield the shards of each device and dtype: the arguments of one foreach kernel."""
        kinds = [(param.device, param.dtype) for param in self.params]
        if len(different := dict.fromkeys(kinds)) == 1:
            return iter((self,))
        return (
            self.only([i for i, pair in enumerate(kinds) if pair == kind]) for kind in different
        )


def _local_bytes(leaf: Leaf) -> int:
    """Return the bytes of the largest shard of a leaf, about: the same number on all devices."""
    parts = (
        prod(leaf.mesh.shape[axis] for axis in leaf.spec.split_axes)
        if isinstance(leaf, Sharded)
        else 1
    )
    return prod(leaf.shape) * leaf.dtype.itemsize // parts


def numbers_of(counts: list[Tensor]) -> list[float]:
    """Return the values of counts; most are one tensor, which is read once."""
    numbers = {id(count): count.item() for count in {id(count): count for count in counts}.values()}
    return [numbers[id(count)] for count in counts]


# -- rules ------------------------------------------------------------------------------------------------------------

Rule = Callable[[ShardLists, float], None]
"""Write the next parameters and state into shards, at a learning rate."""

_FULL = (torch.float32, torch.float64)
_FUSED = {"cpu": _FULL, "meta": _FULL, "cuda": (*_FULL, torch.float16, torch.bfloat16)}


def each_kind(rule: Rule, *, complex_as_real: bool = True) -> Rule:
    """Return an elementwise rule that is given shards of one device and dtype at a time."""

    def by_kind(shards: ShardLists, lr: float) -> None:
        for kind in shards.by_kind():
            rule(kind.real() if complex_as_real else kind, lr)

    return by_kind


def fused_or(fused: Rule, rule: Rule, wanted: bool | None) -> Rule | None:
    """Return a rule that uses a fused kernel where it can (None) or must (True); None if not wanted (False)."""

    def chosen(shards: ShardLists, lr: float) -> None:
        shards = shards.nonempty()
        if not shards.params:
            return
        if has_fused(shards):
            fused(replace(shards, grads=[grad.contiguous() for grad in shards.grads]), lr)
        elif wanted:
            raise OptimizerError(
                f"fused=True needs contiguous parameters of a dtype that the kernel is right for; got "
                f"{shards.params[0].dtype} on {shards.params[0].device}. Leave fused=None."
            )
        else:
            rule(shards, lr)

    return None if wanted is False else each_kind(chosen)


def has_fused(shards: ShardLists) -> bool:
    """Return True if a fused kernel can write these shards of one kind."""
    dtype = shards.params[0].dtype
    tensors = [x for column in (shards.params, *shards.state.values()) for x in column]
    is_supported = dtype in _FUSED.get(shards.params[0].device.type, ())
    return (
        is_supported
        and {x.dtype for x in tensors} == {dtype}
        and all(map(Tensor.is_contiguous, tensors))
    )


def step_tensors(shards: ShardLists) -> list[Tensor]:
    """Return each shard's count of steps as the kernels want it: on the shard's device, one tensor for each count."""
    counts = {
        t: torch.full((), t, dtype=torch.float32, device=shards.params[0].device)
        for t in set(shards.steps)
    }
    return [counts[t] for t in shards.steps]
