"""Sets of devices as arithmetic: a first device and steps along some axes of the mesh.

The devices that hold one shard of a tensor differ along the axes that do not shard it, so they form
a box of the mesh. A box is two or three numbers of any size, and is printed without enumerating it:
a mesh of 65,536 devices costs no more than one of 8.

    mesh data=2, model=4    along "model", from 4     Devices(4, ((1, 4),))             4-7
      0 1 2 3               along "data", from 1      Devices(1, ((4, 2),))             1,5
      4 5 6 7               along both                Devices(0, ((4, 2), (1, 4)))      0-7
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from fshard.mesh.layout import Mesh, arithmetic

_MOST = 4  # runs or summands that are printed; of more the first two and the last


@dataclass(frozen=True)
class Devices:
    """A box of a mesh.

    Args:
        first: the lowest device.
        steps: (stride, size) of each axis along which it extends, major to minor.

    >>> list(Devices(1, ((4, 2), (1, 2))))
    [1, 2, 5, 6]
    """

    first: int
    steps: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """Number of devices."""
        return prod(size for _, size in self.steps)

    def device(self, index: int) -> int:
        """Return the device at an index in ascending order."""
        coordinates = arithmetic.unravel(index, [size for _, size in self.steps])
        device = self.first
        for coordinate, (stride, _) in zip(coordinates, self.steps, strict=True):
            device += coordinate * stride
        return device

    def __iter__(self) -> Iterator[int]:
        return (self.device(index) for index in range(self.count))


def box(mesh: Mesh, axes: Collection[str], first: int) -> Devices:
    """Return the devices that differ from `first`, at 0 along `axes`, along these axes only.

    >>> box(Mesh((("data", 2), ("model", 4)), "virtual", "cpu"), ("data",), 1)
    Devices(first=1, steps=((4, 2),))
    """
    strides = arithmetic.strides([size for _, size in mesh.axes])
    steps: list[tuple[int, int]] = []
    for (name, size), stride in zip(mesh.axes, strides, strict=True):
        if name in axes and size > 1:
            steps.append((stride, size))
    return Devices(first, tuple(steps))


def elided(count: int, most: int, first: int = 2) -> tuple[int | None, ...]:
    """Return the indices 0 .. count-1, or, of more than `most`, the first ones, None and the last.

    >>> elided(3, 4), elided(100, 4)
    ((0, 1, 2), (0, 1, None, 99))
    """
    if count <= most:
        return tuple(range(count))
    return (*range(first), None, count - 1)


def listed(devices: Devices, numbers: Sequence[int] | None = None) -> str:
    """Write devices as numbers and runs of numbers.

    `numbers`: of all devices in the world, if they are not 0, 1, 2, ...

    >>> listed(Devices(0, ((8, 2), (1, 4)))), listed(Devices(0, ((2, 64),)))
    ('0-3,8-11', '0,2,…,126')
    >>> listed(Devices(0, ((1, 2),)), numbers=(5, 3))
    '5,3'
    """
    if numbers is not None:
        return ",".join(_numbered(devices, numbers))
    # The minor axes without holes are one run: each steps over all devices of those below it.
    length = 1
    steps = list(devices.steps)
    while steps and steps[-1][0] == length:
        length *= steps.pop()[1]

    starts = Devices(devices.first, tuple(steps))
    runs: list[str] = []
    for index in elided(starts.count, _MOST):
        runs.append("…" if index is None else _run(starts.device(index), length))
    return ",".join(runs)


def summed(devices: Devices, numbers: Sequence[int] | None = None) -> str:
    """Write devices as the sum of their values; for `numbers` see `listed`.

    >>> summed(Devices(4, ((1, 2),))), summed(Devices(0, ((1, 16),)))
    ('4+5', '0+1+…+15')
    """
    return "+".join(_numbered(devices, numbers))


def _numbered(devices: Devices, numbers: Sequence[int] | None) -> list[str]:
    """Return the numbers of devices as texts, the first ones and the last if there are many."""
    texts: list[str] = []
    for index in elided(devices.count, _MOST):
        if index is None:
            texts.append("…")
            continue
        device = devices.device(index)
        texts.append(str(device if numbers is None else numbers[device]))
    return texts


def _run(start: int, length: int) -> str:
    if length <= 2:
        return ",".join(str(start + step) for step in range(length))
    return f"{start}-{start + length - 1}"
