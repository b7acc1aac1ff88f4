"""`ShardLists`: shards with their gradients and state as lists, the arguments of torch's kernels.

leaf      0 (two shards)     1 (plain)
params    p0a    p0b         p1
grads     g0a    g0b         g1
steps     t0     t0          t1
state     m0a    m0b         m1         ...

torch's fused kernels, one pass over memory for a full optimizer step, read tensors as flat arrays:
every shard and its state must be contiguous, on a device that has the kernels, in a dtype that they
support. On the CPU, torch's fused SGD is wrong in half precision. The ends of an array are computed
by other instructions than its middle, so fused bits depend on the sharding; foreach bits do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
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
        """Take leaves apart into their shards.

        Args:
            leaves: the parameters before the step.
            grads: their gradients.
            columns: the leaves of "params", "step" and each slot, which are written.
        """
        counts = [len(leaf.shards) if isinstance(leaf, Sharded) else 1 for leaf in leaves]
        params = _shards_in(columns["params"], counts)
        shards_of_grads: list[Tensor] = []
        for g, p in zip(_shards_in(grads, counts), params, strict=True):
            shards_of_grads.append(g if g.dtype is p.dtype else g.to(p.dtype))
        state: dict[str, list[Tensor]] = {}
        for name, column in columns.items():
            if name not in ("params", "step"):
                state[name] = _shards_in(column, counts)
        steps = _repeated(numbers_of(columns["step"]), counts)
        return ShardLists(_repeated(leaves, counts), params, shards_of_grads, steps, state)

    @staticmethod
    def of_pairs(pairs: Sequence[tuple[Leaf, Leaf]]) -> ShardLists:
        """Return the shards of leaves beside those of others, as parameters with gradients."""
        leaves: list[Leaf] = []
        params: list[Tensor] = []
        grads: list[Tensor] = []
        for leaf, other in pairs:
            shards = shards_of(leaf)
            leaves += [leaf] * len(shards)
            params += shards
            grads += shards_of(other)
        return ShardLists(leaves, params, grads, [0.0] * len(leaves), {})

    def only(self, indices: Sequence[int]) -> ShardLists:
        """Return some of the shards."""

        def taken(column: list[Any]) -> list[Any]:
            return [column[i] for i in indices]

        return ShardLists(
            leaves=taken(self.leaves),
            params=taken(self.params),
            grads=taken(self.grads),
            steps=taken(self.steps),
            state={name: taken(column) for name, column in self.state.items()},
        )

    def nonempty(self) -> ShardLists:
        """Return the shards that have elements, or a number of state.

        Others are those of other stages' devices.
        """

        def has_number(i: int) -> bool:
            slots = [column[i] for column in self.state.values()]
            return any(x is not None and x.ndim == 0 for x in slots)

        indices = [i for i, param in enumerate(self.params) if param.numel() or has_number(i)]
        return self if len(indices) == len(self.params) else self.only(indices)

    def fetched(self) -> Iterator[ShardLists]:
        """Yield the shards in groups whose state is in the memory of the update.

        All at once, if it is there.
        """
        offload = current_offload()
        if offload is None:
            yield self
            return
        # The shards of a leaf follow each other; a leaf is in one group with all of them.
        leaves: list[Leaf] = []
        rows_of_leaf: list[list[int]] = []
        for row, leaf in enumerate(self.leaves):
            if not leaves or leaf is not leaves[-1]:
                leaves.append(leaf)
                rows_of_leaf.append([])
            rows_of_leaf[-1].append(row)

        bytes_of_leaves = [_local_bytes(leaf) * (1 + len(self.state)) for leaf in leaves]
        rows: list[list[int]] = []  # of each group
        for group in groups_of(bytes_of_leaves):
            rows.append([*chain.from_iterable([rows_of_leaf[i] for i in group])])
        devices: list[int] = []
        for leaf in leaves:
            devices += [device for _, device in shards_and_devices(leaf)]
        columns = [self.params, *self.state.values()]
        for indices, (params, *slots) in streamed(columns, devices, rows, offload):
            state = dict(zip(self.state, slots, strict=True))
            yield replace(self.only(indices), params=params, state=state)

    def split(self, parts: Callable[[Tensor], Sequence[Tensor]]) -> ShardLists:
        """Return views of the parts of each tensor, with those of its gradient and state."""
        counts = [len(parts(param)) for param in self.params]

        def views(column: list[Tensor]) -> list[Tensor]:
            return list(chain.from_iterable(map(parts, column)))

        return ShardLists(
            leaves=_repeated(self.leaves, counts),
            params=views(self.params),
            grads=views(self.grads),
            steps=_repeated(self.steps, counts),
            state={name: views(column) for name, column in self.state.items()},
        )

    def real(self) -> ShardLists:
        """Return complex shards as shards of real numbers, in the same memory."""
        if not self.params[0].is_complex():
            return self

        def as_real(column: list[Tensor]) -> list[Tensor]:
            return list(map(torch.view_as_real, column))

        grads = [grad.resolve_conj() for grad in self.grads]  # no view is of conjugated numbers
        state = {name: as_real(column) for name, column in self.state.items()}
        return replace(self, params=as_real(self.params), grads=as_real(grads), state=state)

    def by_kind(self) -> Iterator[ShardLists]:
        """Yield the shards of each device and dtype: the arguments of one foreach kernel."""
        indices: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, param in enumerate(self.params):
            indices.setdefault((param.device, param.dtype), []).append(i)
        if len(indices) == 1:
            yield self
            return
        for indices_of_kind in indices.values():
            yield self.only(indices_of_kind)


def _repeated(column: list[Any], counts: Sequence[int]) -> list[Any]:
    """Return each item as many times as its count."""
    if all(count == 1 for count in counts):
        return column
    results: list[Any] = []
    for x, count in zip(column, counts, strict=True):
        results += [x] * count
    return results


def _shards_in(column: list[Leaf], counts: Sequence[int]) -> list[Any]:
    """Return the shards of leaves; for a leaf that is None as many times None as its count."""
    if all(count == 1 for count in counts):  # by far the most common: without a call for each
        return [leaf.shards[0] if isinstance(leaf, Sharded) else leaf for leaf in column]
    results: list[Any] = []
    for leaf, count in zip(column, counts, strict=True):
        results += [None] * count if leaf is None else shards_of(leaf)
    return results


def _local_bytes(leaf: Leaf) -> int:
    """Return the bytes of the largest shard of a leaf, about: the same number on all devices."""
    nbytes = prod(leaf.shape) * leaf.dtype.itemsize
    if not isinstance(leaf, Sharded):
        return nbytes
    return nbytes // prod([leaf.mesh.shape[axis] for axis in leaf.spec.split_axes])


def numbers_of(counts: list[Tensor]) -> list[float]:
    """Return the values of counts; most are one tensor, which is read once."""
    numbers: dict[int, float] = {}
    for count in counts:
        if id(count) not in numbers:
            numbers[id(count)] = count.item()
    return [numbers[id(count)] for count in counts]


# -- rules -----------------------------------------------------------------------------------------

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
    """Return a rule that uses a fused kernel where it can (None) or must (True).

    None if not wanted (False).
    """

    def chosen(shards: ShardLists, lr: float) -> None:
        shards = shards.nonempty()
        if not shards.params:
            return
        if has_fused(shards):
            fused(replace(shards, grads=[grad.contiguous() for grad in shards.grads]), lr)
        elif wanted:
            raise OptimizerError(
                "fused=True needs contiguous parameters of a dtype that the kernel is right for; "
                f"got {shards.params[0].dtype} on {shards.params[0].device}. Leave fused=None."
            )
        else:
            rule(shards, lr)

    return None if wanted is False else each_kind(chosen)


def has_fused(shards: ShardLists) -> bool:
    """Return True if a fused kernel can write these shards of one kind."""
    first = shards.params[0]
    if first.dtype not in _FUSED.get(first.device.type, ()):
        return False
    tensors = list(chain(shards.params, *shards.state.values()))
    has_one_dtype = {x.dtype for x in tensors} == {first.dtype}
    return has_one_dtype and all(map(Tensor.is_contiguous, tensors))


def step_tensors(shards: ShardLists) -> list[Tensor]:
    """Return each shard's count of steps for the kernels.

    On the shard's device, one tensor for each count.
    """
    device = shards.params[0].device
    counts: dict[float, Tensor] = {}
    for t in {*shards.steps}:
        counts[t] = torch.full((), t, dtype=torch.float32, device=device)
    return [counts[t] for t in shards.steps]
