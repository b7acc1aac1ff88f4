"""`elastic`: a function that trains, and continues on other devices when some are lost or join.

The function is the loop that continues from a checkpoint. Here the checkpoint is in the memory of
the devices, and of each step.

    devices 0 1 2 3    train(run)    step 1, save, step 2, save, step 3 ... device 2 is lost
    devices 0 1 3      train(run)    restore: step 2    step 3, save, ...
    devices 0 1 3 4    train(run)    restore: ...       after a save: device 4 has joined

A step is a transaction that `save` ends: see Note [Transactions].
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import update_wrapper
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from fshard.checkpoint.folder import Checkpoints
from fshard.checkpoint.random import RandomState
from fshard.checkpoint.restore import RenamedSource, restore_from
from fshard.checkpoint.snapshot import as_device_of
from fshard.errors import CheckpointError, LostProcessError, LostStateError, MeshError
from fshard.mesh.layout import Memory, Mesh, PyTree, use_mesh
from fshard.mesh.layout.make import choose_device_type
from fshard.mesh.reshard.between import mesh_of_numbers
from fshard.mesh.runtimes.launchers import launched
from fshard.mesh.spmd.run import device_of, is_outside
from fshard.mesh.spmd.scope import here
from fshard.recovery.copies import RANDOM, TREE, Copies, Found
from fshard.recovery.crew import (
    Crew,
    MakeMesh,
    NewDevices,
    ProcessCrew,
    VirtualCrew,
    largest_mesh,
)
from fshard.recovery.members import Members
from fshard.recovery.source import SharesInMemory
from fshard.transforms.options import integer, must_be, one_of

Result = TypeVar("Result")


MEETING = "meeting"
"""The folder, in that of the checkpoints, in which processes meet."""


class Regroup(BaseException):
    """Leaves the function after a save, so that other devices can take part.

    It is no `Exception`, which the function might handle.
    """


class ElasticGeneration(NamedTuple):
    """The run of the function on the devices of one generation, for its protocol.

    Args:
        devices: the names of the devices that the function ran on.
        lost: names of devices that were lost before.
        step: of the version that it began with; None: it began from the start.
        source: of that version: "memory", "checkpoint", or "" without one.
        seconds: from the loss to the call of the function.
    """

    devices: tuple[int, ...]
    lost: tuple[int, ...]
    step: int | None
    source: str
    seconds: float


class ElasticRun:
    """The run of a function on the devices of one generation: a checkpoint in their memory.

    It has the methods of `fs.Checkpoints`, also for `booster.save` and `booster.load`.

    Args:
        mesh: of the devices.
        names: of the devices in the run, in mesh order.
        copies: what is in their memory.
        crew: all devices that are there.
        found: the version that the generation begins with.
        folder: where it saves too.
        every: `save` keeps the steps that this divides.
    """

    def __init__(
        self,
        mesh: Mesh,
        names: tuple[int, ...],
        copies: Copies,
        crew: Crew,
        found: Found | None,
        folder: Checkpoints | None,
        every: int,
    ) -> None:
        self.mesh = mesh
        self.names = names
        self._copies = copies
        self._crew = crew
        self._found = found
        self._folder = folder
        self._folders: dict[int, Checkpoints] = {}  # by device, since each waits for its own saves
        self._every = every
        self._has_restored = False
        self._first_step = self.latest
        self._last_steps: dict[int, int] = {}  # that each device has saved

    def __repr__(self) -> str:
        return f"ElasticRun on {self.mesh}, latest={self.latest}"

    @property
    def latest(self) -> int | None:
        """The step of the last version, to go on from; None if the run begins from the start."""
        if self._copies.last_step is not None:
            return self._copies.last_step
        if self._found is not None:
            return self._found.step
        return None if self._folder is None else self._folder.latest

    @property
    def origin(self) -> str:
        """The place of the last version: "memory", "checkpoint", or "" without one."""
        if self._copies.last_step is not None or self._found is not None:
            return "memory"
        return "" if self.latest is None else "checkpoint"

    def restore(
        self,
        target: PyTree = None,
        *,
        only: Any = None,
        rename: Any = None,
        strict: bool = True,
        cast: bool = False,
    ) -> Any:
        """Return the last version, in the layouts of a target: see `fs.restore`.

        Random generators get their states of a version in memory too; those of a folder are in the
        tree, if it has an `fs.RandomState`. All devices of the mesh call it.
        """
        self._has_restored = True
        version = self._last_version()
        if version is None:
            if self._folder is None:
                raise CheckpointError(
                    "run.restore: nothing was saved yet. Call it if run.latest is not None."
                )
            return self._folder.restore(target, only=only, rename=rename, strict=strict, cast=cast)

        with torch.no_grad(), as_device_of(self.mesh):
            source = self._source(version)
            part = RenamedSource(RenamedSource(source, TREE), only, rename)
            tree = restore_from(part, "run.restore", target, strict=strict, cast=cast)
            restore_from(RenamedSource(source, RANDOM), "run.restore", RandomState())
        return tree

    def _last_version(self) -> Found | None:
        """Return what was saved last in this generation, or what it began with."""
        return self._copies.last_saved() or self._found

    def _source(self, version: Found) -> SharesInMemory:
        """Return a version as a source: devices of the mesh read together, unless one has all."""
        has_all = len(version.shares) == len(version.holders)
        # One process may have all shares, but others read its own.
        if has_all and self.mesh.runtime == "virtual":
            return SharesInMemory(version.index, version.shares, {}, None)
        meeting = mesh_of_numbers(self.mesh.devices, self.mesh)
        return SharesInMemory(version.index, version.shares, version.holders, meeting)

    def save(
        self,
        step: int,
        tree: PyTree,
        *,
        wait: bool = False,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep a tree, as the end of a step: the run continues from here when devices are lost.

        All devices of the mesh call it. With `folder`, that saves the tree too, as often as it
        does. Devices that have come take part from here on: then the function is called again.

        Args:
            step: the number of the step.
            tree: of arrays, numbers, strings and objects with a `state_dict`: see `fs.save`.
            wait: for the folder: see `Checkpoints.save`.
            metrics: for the folder.
        """
        errors = integer("step", step, 0)
        if errors:
            raise ValueError(f"run.save: {errors[0]}.")
        if self._found is not None and not self._has_restored:
            raise CheckpointError(
                f"run.save: the function must restore before it saves, since run.latest is "
                f"{self.latest}; got no call of run.restore or booster.load. Else it would begin "
                "from the start after each loss."
            )

        device = self._device()
        last = self._last_steps.get(device, self._first_step)
        if last is not None and step <= last:
            raise CheckpointError(
                f"run.save: step must be greater than that of the last version, {last}; got {step}. "
                "Continue to count from the tree that run.restore returns, and count a step before "
                "it is saved."
            )
        self._last_steps[device] = step
        if step % self._every == 0:
            has_joiners = self._copies.save(step, tree, flag=self._crew.has_joiners())
            self._found = None  # its memory is that of a third version
        else:
            self._copies.complete()
            has_joiners = False
        if self._folder is not None:
            self._folder_here(self._folder).save(step, tree, wait=wait, metrics=metrics)
        if has_joiners:
            self._copies.complete_everywhere()
            if self._folder is not None:
                self._folder_here(self._folder).wait()
            raise Regroup

    def _folder_here(self, folder: Checkpoints) -> Checkpoints:
        """Return the folder of the calling device, or of all if the caller runs them."""
        device = self._device()
        if device not in self._folders:
            self._folders[device] = folder.reopened()
        return self._folders[device]

    def _device(self) -> int:
        """Return the calling device; 0 if the caller runs all."""
        return 0 if is_outside(self.mesh) else device_of(self.mesh)

    def settle(self) -> None:
        """Wait for saves in the background; raise their errors."""
        for folder in self._folders.values():
            folder.wait()


# Note [Transactions]
# A loss may leave an update half written on one device and not begun on another, and no device can
# know how far the others have come. So all that the function has computed since the last `save` is
# dropped, with the function itself, and the next generation begins from shares that were copied when
# all devices had reached the same `save`.
#
#     device 0    save 4    step 5: update is done         dropped         save 4    step 5
#     device 1    save 4    step 5: update is half done    dropped         save 4    step 5
#     device 2    save 4    step 5: lost


# Note [Errors beside a loss]
# A lost process shows in many errors: of a collective, of the store, of a checkpoint that it had a
# share of, of another library's group. So each error while a process is lost counts as the loss. An
# error of the program is raised again by the function, and then nothing is lost beside it. One that
# all processes raise is no loss: a process that has left by its own error is not counted.
#
# An error of waiting without a loss, such as a deadlock of the program, would be repeated for ever.
# So it is raised if the next generation has the same processes.


class Elastic(Generic[Result]):
    """A function that continues when devices are lost or join: see `fs.elastic`.

    generations: those of the last call.
    """

    def __init__(
        self,
        function: Callable[..., Result],
        make_mesh: MakeMesh,
        *,
        copies: int,
        every: int,
        folder: Checkpoints | None,
        memory: Memory,
        devices: int | None,
        timeout: float | None,
    ) -> None:
        update_wrapper(self, function)
        self.generations: list[ElasticGeneration] = []
        self._function = function
        self._make_mesh = make_mesh
        self._copies = copies
        self._every = every
        self._folder = folder
        self._memory: Memory = memory
        self._devices = devices
        self._timeout = timeout
        self._new_devices = NewDevices()

    def grow(self, count: int) -> None:
        """Let more virtual devices take part from the next save on.

        The function may call it. More processes are started from outside.
        """
        if launched():
            raise MeshError(
                "grow: the devices must be virtual; got processes. To add processes, start more: "
                "fshard run --elastic, with the same folder."
            )
        errors = integer("count", count)
        if errors:
            raise ValueError(f"grow: {errors[0]}.")
        self._new_devices.count += count

    def __call__(self, *args: Any, **kwargs: Any) -> Result | None:
        """Call the function, again and again, until it returns; return its result.

        On processes that are not part of the mesh, which wait for a change, it is None.
        """
        if here() is not None:
            raise MeshError(
                "fs.elastic: the decorated function must be called outside of fs.run; got a call "
                "on one device. Call it alone, and in it fs.run(main, run, mesh=run.mesh)."
            )
        self.generations = []
        crew = self._first_crew()
        if crew is None:
            return None  # the run has ended before this process was taken up
        copies = Copies(self._copies, self._memory)
        reset_random = RandomState().now()
        run: ElasticRun | None = None
        unsettled: ElasticRun | None = None  # before a loss: it may still save in the background
        lost: tuple[int, ...] = ()
        noticed = time.monotonic()
        while True:
            loss: BaseException | None = None
            try:
                run = self._next_run(crew, copies, run)
                seconds = time.monotonic() - noticed
                generation = ElasticGeneration(run.names, lost, run.latest, run.origin, seconds)
                self.generations.append(generation)
                if run.latest is None:
                    # Its first generation may have drawn: from the start it must draw the same.
                    reset_random()
                if not run.mesh.is_member:
                    if not crew.wait():
                        return None
                    raise Regroup
                with use_mesh(run.mesh):
                    result = self._function(run, *args, **kwargs)
                run.settle()
                _end(unsettled)
                crew.end()
                return result
            except Regroup:
                pass
            except BaseException as error:
                is_stop = not isinstance(error, Exception)  # such as Ctrl-C
                if is_stop or not crew.is_loss(error):
                    crew.leave()
                    raise
                _end(unsettled)
                unsettled = run
                # The frames that it has left still have the parameters of this generation.
                traceback.clear_frames(error.__traceback__)
                loss = error.with_traceback(None)  # see Note [Errors beside a loss]

            noticed = time.monotonic()
            before = crew.names
            crew = crew.regroup(loss)
            if loss is not None and crew.names == before:
                crew.leave()
                raise loss
            lost = tuple([name for name in before if name not in crew.names])
            copies.drop(lost)

    def _first_crew(self) -> Crew | None:
        """Return the devices that begin; None if this process has waited to join until the end."""
        folder = None if self._folder is None else self._folder.path / MEETING
        can_join = folder is not None and folder.is_dir() and Members.runs_in(folder)
        if launched() or can_join:
            device_type = choose_device_type("process", None)
            members = Members.meet(folder, device_type, self._timeout)
            return None if members is None else ProcessCrew(members)
        if self._devices is None:
            raise MeshError(
                "fs.elastic: devices must be the number of virtual devices, as no processes were "
                "started together; got None. Processes: fshard run --elastic --processes 4 file.py."
            )
        self._new_devices.next_name = self._devices
        return VirtualCrew(0, tuple(range(self._devices)), self._new_devices)

    def _find(
        self, crew: Crew, copies: Copies, mesh: Mesh, last_run: ElasticRun | None
    ) -> Found | None:
        """Find the version to go on from; None: that of the folder, or the run begins from the start."""
        found: Found | None = None
        try:
            found = crew.find(copies, mesh)
        except LostStateError:
            if self._folder is None:
                raise
        if found is None:
            _end(last_run)
        return found

    def _next_run(self, crew: Crew, copies: Copies, last_run: ElasticRun | None) -> ElasticRun:
        """Return the run of the next generation, which continues from a version."""
        mesh = largest_mesh(self._make_mesh, crew.numbers)
        found = self._find(crew, copies, mesh, last_run)
        names = tuple([crew.names[crew.numbers.index(number)] for number in mesh.devices])
        copies.begin(crew.generation, mesh, names, None if found is None else found.key)
        return ElasticRun(mesh, names, copies, crew, found, self._folder, self._every)


def _end(run: ElasticRun | None) -> None:
    """End the saves of a run that has lost devices: what they were part of ends by an error."""
    if run is not None:
        with suppress(CheckpointError, LostProcessError):
            run.settle()


def elastic(
    make_mesh: MakeMesh,
    *,
    copies: int = 1,
    every: int = 1,
    folder: Checkpoints | None = None,
    memory: Memory = "device",
    devices: int | None = None,
    timeout: float | None = None,
) -> Callable[[Callable[..., Result]], Elastic[Result]]:
    """Decorate a function that trains: it continues, in the same processes, when some are lost.

    The function is a loop that continues from a checkpoint, `train(run)`: `run.latest`,
    `run.restore` and `run.save` are those of an `fs.Checkpoints`. After a loss it is called again,
    on the mesh that `make_mesh` makes of the devices that are left, and continues from the last
    `run.save`. A torch-style loop calls `fs.run(main, run, mesh=run.mesh)` in it, and in `main`
    `booster.load(run, ...)` and `booster.save(run, ...)`.

    In reproducible mode it ends with the bits of a run that lost nothing, on meshes that divide
    the same `slices`. Return None for others: `if 8 % len(devices) != 0: return None`.

    Args:
        make_mesh: a function from the numbers of the devices that are there to a mesh of them,
            `fs.make_mesh(..., devices=devices)`. Where it raises a MeshError or returns None, it is
            called with fewer; the others wait.
        copies: the number of other devices that keep the share of each, at most all. So many
            neighbours may be lost at once. With 0 the run continues from the folder.
        every: `run.save` keeps the steps that this divides, and the others are repeated.
        folder: `run.save` saves there too, and the run continues from it if too many were lost.
            Processes that are started later with it take part after the next `run.save`. It has the
            tree alone: put an `fs.RandomState()` in it if steps draw numbers. A save that a loss
            interrupts is not made again.
        memory: of the copies, "device" or "host".
        devices: the number of virtual devices, where no processes were started together: so one
            program runs on both.
        timeout: seconds until a process that lives and does not answer is taken for lost. Default:
            the environment variable FSHARD_TIMEOUT, or 600.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> def make_mesh(devices):
    ...     return fs.make_mesh({"data": len(devices)}, devices=devices)
    >>> @elastic(make_mesh, devices=4)
    ... def train(run):
    ...     w = fs.device_put(torch.zeros(4), fs.Layout(run.mesh, P.flat("data")))
    ...     kept = {"w": w, "steps": 0}
    ...     if run.latest is not None:
    ...         kept = run.restore(kept)
    ...     while kept["steps"] < 6:
    ...         kept = {"w": kept["w"] + 1, "steps": kept["steps"] + 1}
    ...         run.save(kept["steps"], kept)
    ...     return fs.unshard(kept["w"])
    >>> with fs.testing.kill(2, at=("copy", 3)):
    ...     train()
    tensor([6., 6., 6., 6.])
    >>> for generation in train.generations:
    ...     print(generation.devices, generation.step)
    (0, 1, 2, 3) None
    (0, 1, 3) 3
    """

    if not callable(make_mesh):
        raise TypeError(f"fs.elastic: make_mesh must be a function; got {make_mesh!r}.")
    errors = integer("copies", copies, 0) + integer("every", every)
    errors += one_of("memory", memory, "device", "host")
    if folder is not None:
        is_folder = isinstance(folder, Checkpoints)
        errors += must_be("folder", "an fs.Checkpoints", folder, is_folder)
    if devices is not None:
        errors += integer("devices", devices)
    if timeout is not None:
        errors += must_be("timeout", "seconds > 0", timeout, timeout > 0)
    if errors:
        raise ValueError(f"fs.elastic: {'; '.join(errors)}.")

    def decorate(function: Callable[..., Result] | None = None) -> Elastic[Result]:
        if not callable(function):
            raise TypeError(
                "fs.elastic: it must decorate a function that trains; got "
                f"{function!r}. Write @fs.elastic(make_mesh) above it."
            )
        return Elastic(
            function,
            make_mesh,
            copies=copies,
            every=every,
            folder=folder,
            memory=memory,
            devices=devices,
            timeout=timeout,
        )

    return decorate
