"""`Cells`: shards with their gradients and state as lists, the arguments of torch's kernels; and rules that write
them.

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
from typing import Any

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.mesh.layout.sharded import Sharded
from fshard.optim.leaves import Leaf


@dataclass(frozen=True)
class Cells:
    """Shards with their gradients and state.

    Args:
        owners: the leaf that each is a shard of, before the step.
        params: the shards, written in place.
        grads: their gradients, of the same dtype, read only.
        steps: number of steps of each, this one included.
        state: the slots, written in place; None for a slot that a leaf does not have.
    """

    owners: list[Leaf]
    params: list[Tensor]
    grads: list[Tensor]
    steps: list[float]
    state: dict[str, list[Tensor]]

    def only(self, places: Sequence[int]) -> Cells:
        """Return some of the cells."""

        def taken(column: list[Any]) -> list[Any]:
            return [column[place] for place in places]

        owners, params, grads, steps = map(taken, (self.owners, self.params, self.grads, self.steps))
        return Cells(owners, params, grads, steps, {name: taken(column) for name, column in self.state.items()})

    def filled(self) -> Cells:
        """Return the cells that have elements: empty ones are stored by other devices, such as those of other stages."""
        some = [place for place, param in enumerate(self.params) if param.numel()]
        return self if len(some) == len(self.params) else self.only(some)

    def real(self) -> Cells:
        """Return complex cells as cells of real numbers, in the same memory."""
        if not self.params[0].is_complex():
            return self
        return replace(
            self,
            params=list(map(torch.view_as_real, self.params)),
            grads=[torch.view_as_real(grad.resolve_conj()) for grad in self.grads],
            state={name: list(map(torch.view_as_real, column)) for name, column in self.state.items()},
        )

    def kinds(self) -> Iterator[Cells]:
        """Yield the cells of each device and dtype: the arguments of one foreach kernel."""
        kinds = [(param.device, param.dtype) for param in self.params]
        if len(different := dict.fromkeys(kinds)) == 1:
            return iter((self,))
        return (self.only([place for place, own in enumerate(kinds) if own == kind]) for kind in different)


def cells_of(
    moved: list[int], owners: list[Leaf], params: list[Leaf], grads: list[Leaf], columns: dict[str, list[Leaf]]
) -> Cells:
    """Go down from some leaves, by number, to their shards.  `columns` are the leaves of "step" and of each slot."""
    sizes = [len(x.shards) if isinstance(x := owners[i], Sharded) else 1 for i in moved]
    single = not any(size != 1 for size in sizes)

    def repeated(column: list[Any]) -> list[Any]:
        return column if single else [x for x, size in zip(column, sizes, strict=True) for _ in range(size)]

    def shards(column: list[Leaf]) -> list[Any]:
        some = [column[i] for i in moved]
        if single:
            return [x.shards[0] if isinstance(x, Sharded) else x for x in some]
        each = zip(some, sizes, strict=True)
        return [x for leaf, size in each for x in (leaf.shards if isinstance(leaf, Sharded) else (leaf,) * size)]

    written = shards(params)
    return Cells(
        owners=repeated([owners[i] for i in moved]),
        params=written,
        grads=[g if g.dtype is p.dtype else g.to(p.dtype) for g, p in zip(shards(grads), written, strict=True)],
        steps=repeated(numbers_of([columns["step"][i] for i in moved])),
        state={name: shards(column) for name, column in columns.items() if name != "step"},
    )


def numbers_of(counts: list[Tensor]) -> list[float]:
    """Return the values of counts; most are one tensor, which is read once."""
    found = {id(count): count.item() for count in {id(count): count for count in counts}.values()}
    return [found[id(count)] for count in counts]


# -- rules ------------------------------------------------------------------------------------------------------------

Rule = Callable[[Cells, float], None]
"""Write the next parameters and state into cells, at a learning rate."""

_FULL = (torch.float32, torch.float64)
_FUSED = {"cpu": _FULL, "cuda": (*_FULL, torch.float16, torch.bfloat16)}


def each_kind(rule: Rule, *, complex_as_real: bool = True) -> Rule:
    """Return an elementwise rule that is given cells of one device and dtype at a time."""

    def by_kind(cells: Cells, lr: float) -> None:
        for kind in cells.kinds():
            rule(kind.real() if complex_as_real else kind, lr)

    return by_kind


def fused_or(fused: Rule, rule: Rule, wanted: bool | None) -> Rule | None:
    """Return a rule that uses a fused kernel where it can (None) or must (True); None if not wanted (False)."""
    if wanted is False:
        return None

    def chosen(cells: Cells, lr: float) -> None:
        for kind in cells.kinds():
            if not (filled := kind.filled()).params:
                continue
            kind = filled.real()
            if has_fused(kind):
                fused(replace(kind, grads=[grad.contiguous() for grad in kind.grads]), lr)
            elif wanted:
                raise OptimizerError(
                    f"fused=True needs contiguous parameters of a dtype that the kernel is right for; got "
                    f"{kind.params[0].dtype} on {kind.params[0].device}. Leave fused=None."
                )
            else:
                rule(kind, lr)

    return chosen


def has_fused(cells: Cells) -> bool:
    """Return True if a fused kernel can write these cells of one kind."""
    dtype = cells.params[0].dtype
    return dtype in _FUSED.get(cells.params[0].device.type, ()) and all(
        x.dtype is dtype and x.is_contiguous() for column in (cells.params, *cells.state.values()) for x in column
    )


def step_tensors(cells: Cells) -> list[Tensor]:
    """Return each cell's count of steps as the kernels want it: on the cell's device, one tensor for each count."""
    made = {t: torch.full((), t, dtype=torch.float32, device=cells.params[0].device) for t in set(cells.steps)}
    return [made[t] for t in cells.steps]
