"""What all devices have to do alike: reduce units in one order, gather the same ones, and start from the same things.

Gradients become complete in an order that may depend on the data, and some never do where a branch has left them out.  So
units are reduced in turns that all devices agree on: a unit whose turn has not come waits, one that is missing after the
backward is reduced as zeros, and one that nobody has counted on comes last.

    turns       head  blocks[1]  blocks[0]            agreed in the first step: how device 0 used them, backwards
    device 0    head  blocks[0]              ->       head  blocks[1] = 0  blocks[0]
    device 1    head  blocks[1]              ->       head  blocks[1]      blocks[0] = 0

A gather is for all devices by nature: where they differ, it can only be said who wanted what.  So it is with the shapes of
the whole batch, the key of random draws and parameters that lie whole, which nothing but the user's program makes equal
on processes (see `origin`).

All this is known on the host and asked of other hosts: no accelerator is waited for.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fshard.mesh.differentiate import Bound
from fshard.mesh.mesh import Mesh
from fshard.mesh.moves import Psum
from fshard.mesh.scope import Group
from fshard.source import Site


def summed(rows: tuple[Tensor, ...], group: Group | None, site: Site) -> tuple[Tensor, ...]:
    """Return the sums of the devices' rows of numbers, of all rows in one memory at once; a device alone has them already."""
    if group is None or group.size == 1:
        return rows
    psum = Bound(Psum(), group, site).run
    return psum(rows) if len({row.device for row in rows}) == 1 else tuple(psum((row,))[0] for row in rows)


def on_host(numbers: Sequence[float], near: torch.device) -> Tensor:
    """Return a row of numbers in the memory of the host; without values, where devices have none."""
    return torch.tensor(numbers, dtype=torch.float64, device=near if near.type == "meta" else "cpu")


def agreed_turns(used: Sequence[int], count: int, group: Group | None, site: Site, near: torch.device) -> list[int]:
    """Return the order in which `count` units are reduced, from those that each device has used, in its order.

    That of the first device, backwards; then what only others have used.
    """
    first, users = [0.0] * count, [0.0] * count  # when the first device used a unit, from 1 on; how many have
    for place, number in enumerate(used):
        first[number] = 0.0 if group is not None and group.index else 1.0 + place
        users[number] = 1.0
    (found,) = summed((on_host([*first, *users], near),), group, site)
    if found.is_meta:
        return list(reversed(used))
    first, users = found.view(2, count).tolist()
    used = [number for number in range(count) if users[number]]
    return sorted(used, key=lambda number: -first[number])


def marks(*told: object) -> list[float]:
    """Return numbers whose sums over devices tell whether all have told the same: see `unlike`.

    >>> here, there = marks([0, 1], "x"), marks([1, 0], "x")
    >>> unlike([a + b for a, b in zip(here, here)]), unlike([a + b for a, b in zip(here, there)])
    ([], [0])
    """
    found = [mark(one) for one in told]
    return [1.0, *found, *(each**2 for each in found)]


def mark(told: object) -> float:
    """Return a number of 20 bits that stands for something."""
    return float(zlib.crc32(repr(told).encode()) % (1 << 20)) if told else 0.0


def unlike(sums: Sequence[float]) -> list[int]:
    """Return the places of what devices differ in, from the sums of their marks."""
    n, *rest = sums
    firsts, squares = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    return [place for place, (first, square) in enumerate(zip(firsts, squares, strict=True)) if first**2 != n * square]


def exchanged(own: Sequence[int], group: Group, site: Site) -> dict[int, list[int]]:
    """Return every device's list of numbers, by the device's number in the mesh."""
    lengths = torch.zeros(group.size, dtype=torch.float64)
    lengths[group.index] = len(own)
    counts = [int(length) for length in summed((lengths,), group, site)[0].tolist()]
    rows = torch.zeros(group.size, max(counts), dtype=torch.float64)
    rows[group.index, : len(own)] = torch.tensor(own, dtype=torch.float64)
    found = summed((rows.flatten(),), group, site)[0].view_as(rows).tolist()
    return {
        group.member(index): [int(number) for number in row[:count]]
        for index, (row, count) in enumerate(zip(found, counts, strict=True))
    }


def disagreement(mesh: Mesh, gathered: Mapping[int, Sequence[int]], words: Sequence[str]) -> str:
    """Say where devices have gathered different units, nothing where they have not; `words` describe the units.

    >>> import fshard as fs
    >>> disagreement(fs.make_mesh({"data": 2}), {0: [0, 1], 1: [0]}, ["head (head.w)", "tail (tail.w)"])
    '(data=0) has gathered tail (tail.w), (data=1) has not. A gather takes all devices. ...'
    """
    if len(gathered) == 1:  # a process, which knows nothing of the others
        ((device, numbers),) = gathered.items()
        here = ", then ".join(words[number] for number in numbers)
        return f"{name_of(mesh, device)} has gathered {here}. {CURE}" if numbers else ""
    shared = min(map(len, gathered.values()))
    start = next((at for at in range(shared) if len({one[at] for one in gathered.values()}) > 1), shared)
    found: dict[int, list[str]] = {}
    for device, one in gathered.items():
        found.setdefault(one[start] if start < len(one) else -1, []).append(name_of(mesh, device))
    if len(found) == 1:
        return ""
    parts = [
        f"{' and '.join(devices)} {'has' if len(devices) == 1 else 'have'} "
        + ("not" if number < 0 else f"gathered {words[number]}")
        for number, devices in sorted(found.items(), key=lambda item: (item[0] < 0, item[0]))
    ]
    return f"{', '.join(parts)}. {CURE}"


def name_of(mesh: Mesh, device: int) -> str:
    """Return a device's place along all axes."""
    return f"({', '.join(f'{axis}={at}' for axis, at in mesh.coordinates(device).items())})"


CURE = (
    "A gather takes all devices. Let each of them call the part that needs it, marked fs.gathered(part, keep=True), and branch "
    "inside; or put it into a unit that all use: fs.fsdp(axis, unit=...)."
)
