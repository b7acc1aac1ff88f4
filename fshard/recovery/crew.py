"""The devices that take part in an elastic run: virtual ones, or processes.

Devices have names in the run, numbers that they keep: 0, 1, 2, ... at the start, and the next ones
for devices that come later. A *crew* is those of one generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fshard.errors import CollectiveTimeoutError, LostProcessError, MeshError
from fshard.mesh.layout import Mesh
from fshard.mesh.runtimes import process
from fshard.mesh.spmd import moments
from fshard.recovery.copies import Copies, Found, Shelf
from fshard.recovery.members import Members
from fshard.recovery.survey import find_here, find_together

MakeMesh = Callable[[Sequence[int]], Mesh | None]
"""A function from the numbers of the devices that are there to a mesh of some or all of them."""


class Crew(Protocol):
    """The devices of one generation, as `fs.elastic` needs them."""

    @property
    def generation(self) -> int:
        """The number of the generation, equal on all devices."""
        ...

    @property
    def names(self) -> tuple[int, ...]:
        """The names of the devices."""
        ...

    @property
    def numbers(self) -> tuple[int, ...]:
        """Their numbers for `make_mesh`, in the same order."""
        ...

    def is_loss(self, error: BaseException) -> bool:
        """Return True if an error is that of the loss of a device."""
        ...

    def has_joiners(self) -> bool:
        """Return True if other devices want to take part."""
        ...

    def find(self, copies: Copies, mesh: Mesh) -> Found | None:
        """Find the version that a generation on a mesh begins with; None if nothing was saved."""
        ...

    def wait(self) -> bool:
        """Wait outside of the mesh for a change of devices; return False if the run has ended."""
        ...

    def regroup(self, error: BaseException | None) -> Crew:
        """Return the next generation, after a loss, or with those that want to take part."""
        ...

    def end(self) -> None:
        """End the run, once all devices of the mesh have come to its end."""
        ...

    def leave(self) -> None:
        """Leave the others, because of an error here."""
        ...


@dataclass
class NewDevices:
    """The virtual devices that are to join a run, of all its generations.

    Args:
        count: their number.
        next_name: the name of the first of them.
    """

    count: int = 0
    next_name: int = 0

    def take(self) -> tuple[int, ...]:
        """Return the names of all, which join now."""
        names = range(self.next_name, self.next_name + self.count)
        self.next_name += self.count
        self.count = 0
        return tuple(names)


class VirtualCrew:
    """Virtual devices."""

    def __init__(self, generation: int, names: tuple[int, ...], new: NewDevices) -> None:
        self.generation = generation
        self.names = names
        self._new = new

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.names

    def is_loss(self, error: BaseException) -> bool:
        return not _lost_by(error).isdisjoint(self.names)

    def has_joiners(self) -> bool:
        return self._new.count > 0

    def regroup(self, error: BaseException | None) -> VirtualCrew:
        lost = _lost_by(error)
        for name in lost:
            moments.dead.pop(name, None)  # from now on the number may be of another mesh's device
        names = tuple([name for name in self.names if name not in lost])
        if error is None:
            names += self._new.take()
        if not names:
            raise LostProcessError("fs.elastic: all devices were lost.")
        return VirtualCrew(self.generation + 1, names, self._new)

    def find(self, copies: Copies, mesh: Mesh) -> Found | None:
        return find_here(copies.shelves)

    def wait(self) -> bool:
        raise AssertionError("the caller has all virtual devices")

    def end(self) -> None:
        lost = tuple([name for name in self.names if name in moments.dead])
        if lost:
            raise LostProcessError(
                f"The function has returned after the loss of device {lost[0]}, whose error it has "
                "handled.",
                lost=lost,
            )
        self._new.count = 0  # those that are too late do not take part in the next run

    def leave(self) -> None:
        self._new.count = 0


class ProcessCrew:
    """Processes: see `members`."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._busy: list[int] = []
        """The names of the devices of the mesh."""

    @property
    def generation(self) -> int:
        return self._members.generation

    @property
    def names(self) -> tuple[int, ...]:
        return self._members.numbers

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(range(len(self.names)))

    def is_loss(self, error: BaseException) -> bool:
        for cause in _causes(error):
            if isinstance(cause, LostProcessError | CollectiveTimeoutError):
                return True
        # Whatever has failed beside a process that is dead, has failed because of that.
        return self._members.has_dead()

    def has_joiners(self) -> bool:
        return self._members.has_joiners()

    def find(self, copies: Copies, mesh: Mesh) -> Found | None:
        self._busy = [self.names[number] for number in mesh.devices]
        world = process.everyone()
        assert world is not None
        name = self._members.number
        shelf = copies.shelves.setdefault(name, Shelf())
        return find_together(world, name, shelf, mesh.devices)

    def wait(self) -> bool:
        return self._members.wait_for_change(self._busy) == "regroup"

    def regroup(self, error: BaseException | None) -> ProcessCrew:
        return ProcessCrew(self._members.regroup())

    def end(self) -> None:
        self._members.finish(self._busy)

    def leave(self) -> None:
        self._members.leave()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that the program has handled when it raised it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _lost_by(error: BaseException | None) -> set[int]:
    """Return the numbers of the devices whose loss has caused an error."""
    lost: set[int] = set()
    for cause in _causes(error):
        if isinstance(cause, LostProcessError):
            lost.update(cause.lost)
    return lost


def largest_mesh(make_mesh: MakeMesh, numbers: Sequence[int]) -> Mesh:
    """Return the mesh of as many devices as a function makes one of.

    An error of the function may be meant, as of an odd number of devices, or a mistake. So the first
    one is raised if no number will do: that of all devices.
    """
    first_error: MeshError | None = None
    for count in range(len(numbers), 0, -1):
        try:
            mesh = make_mesh(tuple(numbers[:count]))
        except MeshError as error:
            first_error = first_error or error
            continue
        if mesh is None:
            continue
        if not isinstance(mesh, Mesh) or not {*mesh.devices} <= {*numbers}:
            raise TypeError(
                "fs.elastic: make_mesh must return a mesh of devices that it is given, "
                f"fs.make_mesh(..., devices=devices), or None; got {mesh!r} for {tuple(numbers)}."
            )
        return mesh
    if first_error is not None:
        first_error.add_note(
            f"fs.elastic: make_mesh has made no mesh of {len(numbers)} devices, nor of fewer."
        )
    raise first_error or MeshError(
        f"fs.elastic: make_mesh must return a mesh of some devices; got None for {len(numbers)} "
        "and each smaller number."
    )
