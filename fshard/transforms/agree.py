"""Agreements of devices: one order of reductions, the same all-gathers, the same inputs, the axes of a loss.

Gradients become complete in an order that may depend on the data, and some never do where a branch skips them. So
units are reduced in an order that all devices agree on: a unit before its turn waits, one that is missing after the
backward is reduced as zeros, and one outside the agreed order is reduced last.

    turns       head  blocks[1]  blocks[0]            agreed in the first step: device 0's order of use, reversed
    device 0    head  blocks[0]              ->       head  blocks[1] = 0  blocks[0]
    device 1    head  blocks[1]              ->       head  blocks[1]      blocks[0] = 0

All this is exchanged between hosts: no accelerator is waited for.

A loss function may call collectives. Every value in it is varying, and the objective is the mean of all devices' losses,
weighted by their parts of the batch, as a function of all devices' values:

    mean over all devices of    f(z_d, psum(z))          each device's parameters, with equal numbers
           │                       │     └ backward: psum of all cotangents        │
           └ 1/n to each           └ backward: its own                             └ backward: gradients summed over all

The devices are those along the batch's axes, and those along any other axis over which the loss function of some device
calls a collective or, in the first step, `axis_index`. Along all other axes devices compute the same.

Some collectives raise, since their result would differ on other meshes (`sync_batchnorm` weights devices by samples):

    5 samples on 2 devices      fs.pmean is no mean over samples: [0 1] and [2 3 4] have equal weights
    3 samples on 4 devices      one device computes on a neighbour's sample, which a sum would count twice
    reproducible mode           a slice sees only the slices that other devices compute concurrently
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from fshard.mesh.collectives.autograd import Bound
from fshard.mesh.collectives.moves import Psum
from fshard.mesh.layout import Mesh, as_written
from fshard.mesh.spmd.scope import Group, Notice, Scope
from fshard.source import Site, call_site
from fshard.transforms.batch import Batch


def summed(rows: tuple[Tensor, ...], group: Group | None, site: Site) -> tuple[Tensor, ...]:
    """Sum rows of numbers over devices, all rows in one collective; a single device has the sums already."""
    if group is None or group.size == 1:
        return rows
    psum = Bound(Psum(), group, site).run
    return psum(rows) if len({row.device for row in rows}) == 1 else tuple(psum((row,))[0] for row in rows)


def on_host(numbers: Sequence[float], near: torch.device) -> Tensor:
    """Return a row of numbers in the memory of the host; without values, where devices have none."""
    return torch.tensor(numbers, dtype=torch.float64, device=near if near.type == "meta" else "cpu")


def agreed_turns(used: Sequence[int], count: int, group: Group | None, site: Site, near: torch.device) -> list[int]:
    """Return the order in which `count` units are reduced, from the units that each device has used, in order.

    The first device's order, reversed; then units that only other devices used.
    """
    first, users = [0.0] * count, [0.0] * count  # first use on device 0; devices that used it
    for place, number in enumerate(used):
        first[number] = 0.0 if group is not None and group.index else 1.0 + place
        users[number] = 1.0
    (found,) = summed((on_host([*first, *users], near),), group, site)
    if found.is_meta:
        return list(reversed(used))
    first, users = found.view(2, count).tolist()
    used = [number for number in range(count) if users[number]]
    return sorted(used, key=lambda number: -first[number])


def marks(*numbers: object) -> list[float]:
    """Return numbers whose sums over devices show whether all devices had the same: see `unlike`.

    >>> here, there = marks([0, 1], "x"), marks([1, 0], "x")
    >>> unlike([a + b for a, b in zip(here, here)]), unlike([a + b for a, b in zip(here, there)])
    ([], [0])
    """
    found = [mark(one) for one in numbers]
    return [1.0, *found, *(each**2 for each in found)]


def mark(numbers: object) -> float:
    """Return a hash of 20 bits."""
    return float(zlib.crc32(repr(numbers).encode()) % (1 << 20)) if numbers else 0.0


def unlike(sums: Sequence[float]) -> list[int]:
    """Return the indices of values that differ between devices, from the sums of their marks."""
    n, *rest = sums
    firsts, squares = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    return [place for place, (first, square) in enumerate(zip(firsts, squares, strict=True)) if first**2 != n * square]


def gathered(mesh: Mesh, units: Mapping[int, Sequence[int]], words: Sequence[str]) -> str:
    """Return which units each device has all-gathered, empty if several have gathered the same; `words` describe units.

    >>> import fshard as fs
    >>> gathered(fs.make_mesh({"data": 2}), {0: [0, 1], 1: [0]}, ["head (head.w)", "tail (tail.w)"])
    '(data=0) has gathered head (head.w), then tail (tail.w); (data=1) has gathered head (head.w). An all-gather ...'
    """
    if len(units) > 1 and len({*map(tuple, units.values())}) == 1:
        return ""
    found = [
        f"{name_of(mesh, device)} has gathered {', then '.join(words[number] for number in numbers) or 'nothing'}"
        for device, numbers in units.items()
    ]
    return f"{'; '.join(found)}. {CURE}"


def name_of(mesh: Mesh, device: int) -> str:
    """Return a device's coordinates."""
    return f"({', '.join(f'{axis}={at}' for axis, at in mesh.coordinates(device).items())})"


CURE = (
    "An all-gather needs all devices. Let each of them call the part with the parameters, and branch inside: "
    "fs.with_unsharded_params(part, keep=True); or put them into a unit that all devices use: fs.fsdp(axis, unit=...)."
)


NOT_HEARD = ("fs.pvary", "fs.axis_size")
"""Calls that need no communication."""
_INDEX = "fs.axis_index"
"""A call that sends nothing: it counts in the first step, in which devices agree, but not for one device in a later one."""


class CollectiveRecord:
    """The collectives that one device's loss function calls in a step; `objection` may reject them.

    `along`: axes beside the batch's that were used, local ones always; `mixed`: whether a collective used both kinds.
    """

    def __init__(self, batch: Batch, objection: Notice | None, local: tuple[str, ...] = ()) -> None:
        self._sizes, self._cut, self._objection = batch.mesh.shape, frozenset(batch.axes), objection
        self.along = tuple([axis for axis, n in self._sizes.items() if n > 1 and axis in local]) if local else ()
        self._indexed = set[str]()
        self.mixed = False

    def notice(self, what: str, group: Group) -> None:
        """Record a collective over the axes of a group, unless it is rejected."""
        if self._objection is not None:
            self._objection(what, group)
        if what in NOT_HEARD:
            return
        if what == _INDEX:
            self._indexed |= {*group.axes}
            return
        self.mixed |= not self._cut.isdisjoint(group.axes)
        if new := {axis for axis in group.axes if self._sizes.get(axis, 1) > 1} - self._cut - {*self.along}:
            self._add(new)

    def agree(self, scope: Scope, known: tuple[str, ...] | None, near: torch.device, site: Site) -> None:
        """Have the axes over which any device called a collective; `known` are those of an earlier step."""
        if known is not None:
            self._add({*known})
            return
        others = [axis for axis, size in self._sizes.items() if size > 1 and axis not in self._cut]
        if others:
            group = scope.group(tuple(axis for axis, size in self._sizes.items() if size > 1), "value_and_grad")
            used = {*self.along, *self._indexed}
            (found,) = summed((on_host([float(axis in used) for axis in others], near),), group, site)
            if not found.is_meta:
                self._add({axis for axis, times in zip(others, found.tolist(), strict=True) if times})

    def _add(self, axes: set[str]) -> None:
        self.along = tuple(axis for axis in self._sizes if axis in axes or axis in self.along)

    @property
    def many(self) -> int:
        """Number of devices along those axes, which have the same samples."""
        return prod(self._sizes[axis] for axis in self.along)


_HARMLESS = ("fs.pvary", "fs.pmax", "fs.pmin", "fs.axis_index", "fs.axis_size", "sync_batchnorm")
"""Collectives that a sample which is there twice does not change."""


def objection(batch: Batch, count: int, *, reproducible: bool) -> Notice | None:
    """Return a function that raises if a loss function calls a wrong collective; None if all are right.

    `count` is the number of slices that each device takes.
    """
    cut = batch.cut
    slices = 0 if cut is None else cut.parts * count
    if not reproducible and (cut is None or cut.length % slices == 0):
        return None
    axes = frozenset(batch.axes if cut is None or reproducible else cut.axes)

    def object_to(what: str, group: Group) -> None:
        if axes.isdisjoint(group.axes) or what in NOT_HEARD:
            return
        if reproducible:
            raise ValueError(
                f"{what} over {as_written(group.axes)} in the loss function, at {call_site()}: with reproducible=True a "
                "slice of the batch must be computed independently, so that it does not depend on the mesh. Use its own "
                "samples only, or leave reproducible=True out."
            )
        if group.size == 1 or what in _HARMLESS or cut is None or (cut.length >= slices and what != "fs.pmean"):
            return
        raise ValueError(
            f"{what} in the loss function: the {cut.length} samples of the batch are cut into {slices} slices, which are not "
            f"of one size, or some without samples, and all would count alike. Give batches of a multiple of {slices}."
        )

    return object_to
