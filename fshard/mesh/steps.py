"""What one device does to have its shards in another layout: the steps of `plan`, taken with collectives.

Leaves that stand at the same kind of step take it together, as one collective for each dtype; but large ones travel alone,
because laying them out in one buffer would cost more than a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fshard.mesh.arithmetic import chunk, flat_range
from fshard.mesh.differentiate import Bound, Tensors, apply
from fshard.mesh.layout import Layout
from fshard.mesh.moves import AllGather, AllToAll, Alone, Move, Permute, Psum, PsumScatter, Summand, Take
from fshard.mesh.plan import Kind, Step, plan
from fshard.mesh.scope import Scope, require
from fshard.mesh.spec import P
from fshard.source import Site

LARGE = 1 << 20
"""Bytes from which on a leaf travels alone."""

_MOVES: dict[Kind, Callable[[Step], Move]] = {
    "slice": lambda step: Take(step.dim),
    "summand": lambda step: Summand(),
    "psum": lambda step: Psum(),
    "psum_scatter": lambda step: PsumScatter(step.dim),
    "all_gather": lambda step: AllGather(step.dim, replicated=True),
    "all_to_all": lambda step: AllToAll(step.other, step.dim),
    "ppermute": lambda step: Permute(step.pairs),
    "flat_slice": lambda step: Take(0),
    "flat_scatter": lambda step: PsumScatter(0),
    "flat_gather": lambda step: AllGather(0, replicated=True),
    "flat_ppermute": lambda step: Permute(step.pairs),
}


class Way(NamedTuple):
    """The steps of one leaf, and the shape of the whole."""

    steps: tuple[Step, ...]
    shape: tuple[int, ...]


def steps_between(before: Layout, after: Layout, shape: tuple[int, ...]) -> tuple[Step, ...]:
    """Return the cheapest steps from one layout to another on the same mesh."""
    return plan(_spec(before), _spec(after), shape, after.mesh.axes)


def _spec(layout: Layout) -> P:
    """Return the spec without the shape that a flat one may carry, which says nothing about where things lie."""
    spec = layout.spec
    return spec if spec.shape is None else P.flat(*(spec.flat_axes or ()), unreduced=spec.unreduced)


def convert(x: Tensor, before: Layout, after: Layout, shape: tuple[int, ...], site: Site) -> Tensor:
    """Return one device's shard in another layout on the same mesh.  From a replicated one, nothing is sent."""
    return take_steps(x, steps_between(before, after, shape), shape, site)


def take_steps(x: Tensor, steps: tuple[Step, ...], shape: tuple[int, ...], site: Site) -> Tensor:
    """Take the steps of a plan on one device, whose shard is `x`."""
    return go([x], [Way(steps, shape)], site)()[0] if steps else x


def wire_of(step: Step) -> Move | None:
    """Return the move that sends something in a step."""
    move = None if step.kind == "reshape" else _MOVES[step.kind](step)
    return None if isinstance(move, Alone) else move


def go(xs: Sequence[Tensor], ways: Sequence[Way], site: Site, *, ahead: bool = False) -> Callable[[], list[Tensor]]:
    """Go all ways, together where that can be; return what gives the results.

    With `ahead`, the last collectives are only started, where autograd has no part in them.
    """
    scope, results = require("fs.reshard"), list(xs)
    finishes: list[Callable[[], None]] = []
    for turn in range(max((len(way.steps) for way in ways), default=0)):
        together: dict[tuple[Move, tuple[str, ...], torch.dtype, int], list[int]] = {}
        for place, way in enumerate(ways):
            if turn < len(way.steps):
                step = way.steps[turn]
                if step.kind == "reshape":
                    results[place] = _reshaped(results[place], step, way.shape, scope)
                else:
                    x, move = results[place], _MOVES[step.kind](step)
                    alone = place if x.nbytes >= LARGE else -1
                    together.setdefault((move, step.axes, x.dtype, alone), []).append(place)
        for (move, axes, _, _), places in together.items():
            bound = Bound(move, scope.group(axes, "fs.reshard"), site)
            now = [(ways[place].steps[turn], ways[place].shape) for place in places]
            given = tuple(
                _before(results[place], step, shape, scope) for place, (step, shape) in zip(places, now, strict=True)
            )
            last = all(turn + 1 == len(ways[place].steps) for place in places)
            if ahead and last and not isinstance(move, Alone):
                finishes.append(_later(bound.start(given).wait, results, places, now, scope))
            else:
                _put(results, places, apply(bound, given), now, scope)

    def finish() -> list[Tensor]:
        for one in finishes:
            one()
        return results

    return finish


def _later(
    wait: Callable[[], Tensors],
    results: list[Tensor],
    places: list[int],
    now: list[tuple[Step, tuple[int, ...]]],
    scope: Scope,
) -> Callable[[], None]:
    return lambda: _put(results, places, wait(), now, scope)


def _put(
    results: list[Tensor], places: list[int], ys: Tensors, now: list[tuple[Step, tuple[int, ...]]], scope: Scope
) -> None:
    for place, y, (step, shape) in zip(places, ys, now, strict=True):
        results[place] = _after(y, step, shape, scope)


def _reshaped(x: Tensor, step: Step, shape: tuple[int, ...], scope: Scope) -> Tensor:
    if step.after.flat is not None:
        return x.reshape(-1)
    size = scope.group(step.axes, "fs.reshard").size if step.axes else 1
    return x.reshape((shape[0] // size, *shape[1:]) if size > 1 else shape)


def _before(x: Tensor, step: Step, shape: tuple[int, ...], scope: Scope) -> Tensor:
    """Fill what is flat up to even ranges, for the way."""
    if not step.kind.startswith("flat_"):
        return x
    if step.kind == "flat_gather":
        return _padded(x, chunk(prod(shape), scope.group(step.axes, "fs.reshard").size))
    target = scope.group(step.after.flat or (), "fs.reshard")
    each = chunk(prod(shape), target.size)
    return _padded(x, each if step.kind == "flat_ppermute" else each * target.size)


def _after(y: Tensor, step: Step, shape: tuple[int, ...], scope: Scope) -> Tensor:
    """Trim what was filled up."""
    if not step.kind.startswith("flat_"):
        return y
    total = prod(shape)
    if step.kind == "flat_gather":
        return (y if y.numel() == total else y[:total]).reshape(shape)
    target = scope.group(step.after.flat or (), "fs.reshard")
    start, stop = flat_range(total, target.size, target.index)
    return y if y.numel() == stop - start else y[: stop - start]


def _padded(x: Tensor, length: int) -> Tensor:
    """Flatten, and fill up with zeros to a length."""
    flat = x.reshape(-1)
    return flat if flat.numel() == length else pad(flat, (0, length - flat.numel()))
