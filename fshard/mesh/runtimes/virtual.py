"""The virtual runtime: a thread per device, of which exactly one runs at a time.

The running thread has the *baton*. In a collective it adds its tensors; the last device of the
group to arrive computes the result for all, by the move's definition on lists, and continues. A
device that must wait wakes the next one that can run. So a run is deterministic, including the
order of prints and random draws, and needs no locks. A deadlock is detected immediately: no device
can run.

    device 0   F--psum.............===F         F start, = running again with the result,
    device 1      F--psum........==F            . waiting
    device 2         F--psum====F  (last to arrive: computes, continues)

Each device has its own random state: see Note [Baton and random states].
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from fshard.errors import (
    DeadlockError,
    LostProcessError,
    MismatchError,
    PromiseError,
    ScopeError,
)
from fshard.mesh.collectives.moves import (
    AWAITED_COTANGENTS,
    Purpose,
    describe,
    named,
    uneven,
    uneven_messages,
    unreceived_text,
)
from fshard.mesh.layout import dtype_name, shortened
from fshard.mesh.layout.packing import cast
from fshard.mesh.runtimes.abstract import Done, OneProcessWorld
from fshard.mesh.runtimes.device_threads import DeviceThreads, Stopped
from fshard.mesh.runtimes.thread_state import (
    ThreadState,
    has_open_modes,
    process_wide_state,
    random_state,
    set_random_state,
)
from fshard.mesh.spmd.moments import Killed, dead
from fshard.mesh.spmd.scope import MessageCount, MessageCounts, here

if TYPE_CHECKING:
    from fshard.mesh.collectives.moves import Wired
    from fshard.mesh.layout.mesh import Mesh, Runtime
    from fshard.mesh.spmd.scope import Group
    from fshard.source import Site

Signature = tuple[tuple[torch.Size, torch.dtype], ...]


class VirtualCall(NamedTuple):
    """A collective as one device of a group calls it; all must agree on it."""

    move: Wired
    signature: Signature
    axes: tuple[str, ...]
    purpose: Purpose
    leaves: tuple[str, ...]
    numbers: tuple[int, ...] | None = None
    """Of the devices of the group, if its mesh has some devices."""

    def text_at(self, site: Site) -> str:
        """Describe the call of a device at a line."""
        name = named(describe(self.move), self.purpose)
        axes = ", ".join([f'"{axis}"' for axis in self.axes])
        if self.numbers is not None:
            axes += f" of devices {shortened(self.numbers)}"
        values = _describe_values(self.signature)
        return f"{name} over {axes} of {values}{site.given} at {site}"


@dataclass(slots=True)
class CollectiveSlot:
    """One collective of one group, filling up as its devices arrive.

    Args:
        call: the collective, as the first device calls it.
        group: that of the first device.
        values: the tensors of each index that has arrived.
        sites: the line of each index that has arrived.
        waiting: the devices to wake when the results are there.
        results: the results of each index, once all have arrived.
    """

    call: VirtualCall
    group: Group
    values: dict[int, tuple[Tensor, ...]] = field(default_factory=dict[int, tuple[Tensor, ...]])
    sites: dict[int, Site] = field(default_factory=dict[int, "Site"])
    waiting: list[int] = field(default_factory=list[int])
    results: list[tuple[Tensor, ...]] | None = None


@dataclass(slots=True)
class Arrival:
    """One device's contribution to a slot: the result of `start`."""

    world: VirtualWorld
    slot: CollectiveSlot
    group: Group

    def wait(self, into: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
        """Park until the collective is complete, and return this device's results."""
        while self.slot.results is None:
            thread = self.world.thread_of(self.group)
            self.slot.waiting.append(thread)
            self.world.park(thread, self)
        index = self.group.index
        results = self.slot.results[index]
        self.slot.results[index] = ()  # the slot outlives the last use of these tensors
        return results

    def __str__(self) -> str:
        return self.slot.call.text_at(self.slot.sites[self.group.index])


@dataclass(slots=True)
class Parcel:
    """One message's receiving end.

    `number` is that of the message whose cotangents are expected. The other device has counted it,
    or will, in `count`.
    """

    world: VirtualWorld
    group: Group
    route: tuple[int, int]
    device: int
    likes: tuple[Tensor, ...]
    site: Site
    purpose: Purpose
    number: int | None
    count: MessageCount | None

    def __str__(self) -> str:
        sender = self.world.name(self.route[0])
        values = named(_describe_values(_signature(self.likes)), self.purpose, self.number)
        message = ""
        if self.count is not None and self.number is not None:
            receive_site = self.count.site_of(self.number)
            if receive_site is not None:
                message = f" (received at {receive_site})"
        return f"recv of {values}{self.site.given}{message} from {sender} at {self.site}"

    def wait(self, into: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
        """Park until the message is there; raise unless it is the one expected."""
        world = self.world
        while not world.mail[self.route]:
            world.listening[self.route] = self.device
            world.park(self.device, self)

        message = world.mail[self.route].popleft()
        expected = (_signature(self.likes), self.purpose, self.number, self.site.leaves)
        signature = _signature(message.tensors)
        actual = (signature, message.purpose, message.number, message.site.leaves)
        if actual != expected:
            raise MismatchError(
                f"{world.name(self.device)} expects {self}, but received {message}."
                + uneven_messages(self.purpose, message.purpose)
            )
        return message.tensors


class VirtualMessage(NamedTuple):
    """A message between virtual devices: its tensors, its group, its sender and its purpose.

    `number` is that of the message whose cotangents it has, `send_site` the line where the other
    device has sent that message.
    """

    tensors: tuple[Tensor, ...]
    group: Group
    purpose: Purpose
    number: int | None
    send_site: Site | None
    sender: str
    site: Site

    def __str__(self) -> str:
        values = named(_describe_values(_signature(self.tensors)), self.purpose, self.number)
        message = "" if self.send_site is None else f" (sent at {self.send_site})"
        return f"{values}{self.site.given}{message} sent by {self.sender} at {self.site}"


# Note [Baton and random states]
# Exactly one thread of a run is awake. It gives the baton to another one in two places: `park`,
# where a device must wait, and `_finish_device`. So the state of a run needs no lock, but only the
# thread with the baton may change it, and the baton must not be given twice:
#
#     device 0   runs   park(0): wake(1) ......... awake again: runs on
#     device 1          ....... runs   park(1): wake(0) ..............
#
# torch's default generator is one for all threads. So the generator has the state of the device
# with the baton: `park` saves the state of its device before it wakes another, and sets it again
# when it is awake. All devices begin with one state, so that `torch.randn(...)` is one global value
# on all of them until they seed differently, as for equally seeded processes.
#
#     generator    device 0: r0 -> r1     device 1: r0 -> r1     device 0: r1 -> r2
#
# The caller continues with the state of device 0, as a process does.
#
# Two Python threads may run virtual devices at the same time, on meshes of their own: each run has
# its own baton. But they share the generator, which one of them may set while a device of the other
# one draws: then devices that must draw alike would not. So the guide permits draws in one of them.
# A lock around each run would deadlock where one run waits for the other, by a queue of the user's.


# Note [Loss of a virtual device]
# `fs.testing.kill` ends a device as SIGKILL ends a process. Its thread unwinds by `Killed`, which
# runs no more of the program. The others find out as processes do: where they wait for a collective
# or a message on a mesh that has the dead device, or start one, each raises `LostProcessError` in
# its own thread. Who catches it continues in the same run, on meshes of survivors. So what was on
# its way on meshes that are broken is dropped: it would meet the messages of later meshes.
#
#     device 0   psum......LostProcessError              caught: psum over (0, 2) ...
#     device 1        Killed
#     device 2                          LostProcessError   caught: psum over (0, 2)
#
# The caller of the run gets the error, unless each survivor has caught it.


class VirtualWorld(OneProcessWorld):
    """The threads of one run and their shared state."""

    has_values = True
    runtime: Runtime = "virtual"
    _threads: DeviceThreads

    def __init__(self, mesh: Mesh) -> None:
        if dead and not dead.keys().isdisjoint(mesh.devices):
            raise lost_error(mesh)
        self.mesh = mesh
        self.message_counts: MessageCounts = defaultdict(MessageCount)
        self.mail: dict[tuple[int, int], deque[VirtualMessage]] = defaultdict(deque)
        self.listening: dict[tuple[int, int], int] = {}  # the devices that wait for a message
        self._slots: dict[object, deque[CollectiveSlot]] = defaultdict(deque)
        self._ready = deque(range(1, mesh.size))  # the next device to run; device 0 begins
        self._status: list[Arrival | Parcel | str] = ["has not started"] * mesh.size
        self._unfinished = dict.fromkeys(range(mesh.size))  # a set in order
        self._random: list[Tensor] = []
        self._failure: tuple[int, BaseException] | None = None
        self._stopping = False
        self._is_over = False
        # See Note [Loss of a virtual device].
        self._has_lost = False
        self._informed: set[int] = set()  # the threads that have raised for the loss
        # The threads by the numbers of their devices in the world; None if they are equal.
        self._threads_by_number: dict[int, int] | None = None
        if mesh.numbers is not None:
            pairs = [(number, thread) for thread, number in enumerate(mesh.numbers)]
            self._threads_by_number = dict(pairs)

    def has_devices_of(self, mesh: Mesh) -> bool:
        """Return True if the devices of a mesh are devices of this run.

        A mesh that numbers no devices is one of the run only if it has as many: else it is of
        virtual devices of its own.
        """
        if mesh.numbers is None:
            return mesh.has_devices_of(self.mesh)
        return {*mesh.numbers} <= {*self.mesh.devices}

    def thread_of(self, group: Group) -> int:
        """Return the thread of the calling device of a group."""
        return self._thread(group.number)

    def _thread(self, number: int) -> int:
        """Return the thread of the device with a number in the world."""
        if self._threads_by_number is None:
            return number
        return self._threads_by_number[number]

    def represents(self, axes: tuple[str, ...]) -> bool:
        """Return False: each device has a thread."""
        return False

    # -- the run -----------------------------------------------------------------------------------

    def run(
        self, body: Callable[[int], Any], random: Tensor | None = None, *, keep: bool = True
    ) -> list[Any]:
        """Run `body(device)` on every device and return the results.

        Raise the error of the first device that fails.

        Args:
            body: the program of a device.
            random: the random state of an earlier run, with which devices begin then; the caller's
                is unchanged. By default they begin with the caller's, who continues with that of
                device 0: see Note [Baton and random states].
            keep: let the threads stay for the next run.
        """
        if self.mesh.size == 1:
            return [self._run_single_device(body, random)]

        kind = self.mesh.device_type
        state = ThreadState.capture(kind)
        contexts = [copy_context() for _ in range(self.mesh.size)]
        random_before = random_state(kind)
        begin = random_before if random is None else random
        self._random = [begin] * self.mesh.size
        threads = DeviceThreads.idle() if keep else DeviceThreads()
        self._threads = threads
        program = [body]
        results: list[Any] = [None] * self.mesh.size

        def run_device(device: int) -> None:
            try:
                if dead and self.mesh.devices[device] in dead:
                    raise Killed
                if not self._stopping:
                    set_random_state(kind, self._random[device])
                    self._status[device] = "is running"
                    undo = state.set()
                    try:
                        results[device] = contexts[device].run(program[0], device)
                    finally:
                        undo()
                        if has_open_modes():
                            threads.reusable = False
                    if device == 0:
                        self._random[0] = random_state(kind)
            except Killed:
                self._lose_devices()
            except BaseException as error:
                self._stop_with_error(device, error)
            self._finish_device(device)

        try:
            with process_wide_state:
                threads.run(device_names(self.mesh), run_device, stop=self._stop, keep=keep)
        finally:
            self._is_over = True
        set_random_state(kind, self._random[0] if random is None else random_before)

        if self._failure is not None or self._has_lost:
            self._raise_failure()
        self._check_nothing_left()
        # A thread that is about to sleep may still have `run_device`, and with it these lists.
        returned = [*results]
        results.clear()
        program.clear()
        return returned

    def _run_single_device(self, body: Callable[[int], Any], random: Tensor | None) -> Any:
        """Run a single device in the caller's own thread, with all its processors."""
        kind = self.mesh.device_type
        random_before = random_state(kind) if random is not None else None
        self._ready.clear()
        try:
            with (
                process_wide_state,
                torch.autograd.set_multithreading_enabled(False),
                torch.set_grad_enabled(torch.is_grad_enabled()),
            ):
                if random is not None:
                    set_random_state(kind, random)
                result = body(0)
        except Killed:
            raise lost_error(self.mesh) from None
        except Exception as error:
            self._raise_error_of(0, error)
        finally:
            self._is_over = True
            if random_before is not None:
                set_random_state(kind, random_before)
        self._check_nothing_left()
        return result

    def _raise_failure(self) -> None:
        """Raise the first error of a device, or its loss, unless survivors have caught it."""
        failure = self._failure
        # Tensors in the frames of the error may hold this world by their graph, where Python finds
        # no cycles: so this must not hold the error.
        self._failure = None
        if failure is not None:
            self._raise_error_of(*failure)
        if not self._has_recovered():
            raise lost_error(self.mesh)

    def _raise_error_of(self, device: int, error: BaseException) -> NoReturn:
        # These errors name the devices themselves.
        named = DeadlockError | LostProcessError | MismatchError | PromiseError
        if not isinstance(error, named):
            error.add_note(f"raised on {self.name(device)} of {self.mesh}")
        if "Nested forward mode AD" in str(error):
            error.add_note(
                "torch has one forward-mode level per process, and the devices share it: use "
                "torch.func.jvp, jacfwd or hessian"
            )
        raise error

    def _stop_with_error(self, device: int, error: BaseException) -> None:
        if self._failure is None and not isinstance(error, Stopped):
            self._failure = (device, error)
        self._stop()

    def _stop(self) -> None:
        """Let every device unwind when it is woken."""
        self._stopping = True

    # -- lost devices ------------------------------------------------------------------------------

    def _lose_devices(self) -> None:
        """Wake the devices that wait on a mesh with a dead one, and drop what is under way there.

        See Note [Loss of a virtual device].
        """
        self._has_lost = True
        for device in self._unfinished:
            if device not in self._ready and self._waits_in_vain(device):
                self._ready.append(device)

        for slots in self._slots.values():
            intact_slots = [slot for slot in slots if not self._is_broken(slot.group)]
            slots.clear()
            slots.extend(intact_slots)
        for messages in self.mail.values():
            intact_messages = [x for x in messages if not self._is_broken(x.group)]
            messages.clear()
            messages.extend(intact_messages)
        for route, device in [*self.listening.items()]:
            if self._waits_in_vain(device):
                del self.listening[route]
        self.message_counts.clear()  # both ends may have counted other messages of a broken mesh

    def _waits_in_vain(self, device: int) -> bool:
        """Return True if a device waits for a collective or a message on a broken mesh."""
        pending = self._status[device]
        return isinstance(pending, Arrival | Parcel) and self._is_broken(pending.group)

    def _is_broken(self, group: Group) -> bool:
        """Return True if the mesh of a group has a dead device."""
        numbers = self.mesh.devices if group.numbers is None else group.numbers
        return not dead.keys().isdisjoint(numbers)

    def _validate_loss(self, group: Group) -> None:
        """Raise in the calling device if it, or another device of its mesh, was killed."""
        if group.number in dead:
            raise Killed
        if self._is_broken(group):
            self._informed.add(self.thread_of(group))
            raise lost_error(self.mesh)

    def _has_recovered(self) -> bool:
        """Return True if there are survivors, and each has raised for the loss."""
        threads = enumerate(self.mesh.devices)
        survivors = {thread for thread, number in threads if number not in dead}
        return bool(survivors) and survivors <= self._informed

    # -- the baton ---------------------------------------------------------------------------------

    def park(self, device: int, pending: Arrival | Parcel) -> None:
        """Wake the next device, and sleep until this one is woken.

        The order is that of Note [Baton and random states].
        """
        if self._has_lost:
            self._validate_loss(pending.group)
        self._status[device] = pending
        if not self._ready:
            raise self._deadlock_error()
        self._random[device] = random_state(self.mesh.device_type)
        self._threads.wake(self._ready.popleft())
        self._threads.sleep(device)
        if self._stopping:
            raise Stopped
        set_random_state(self.mesh.device_type, self._random[device])
        self._status[device] = "is running"
        if self._has_lost:
            self._validate_loss(pending.group)

    def _finish_device(self, device: int) -> None:
        """Wake the next device, or end the run if this was the last one.

        If the run is stopped, the devices unwind one after another.
        """
        self._status[device] = "has finished"
        del self._unfinished[device]
        if not self._unfinished:
            self._threads.finish()
            return
        if not self._ready and not self._stopping:
            self._stop_with_error(device, self._deadlock_error())
        if self._stopping:
            self._threads.wake(next(iter(self._unfinished)))
        else:
            self._threads.wake(self._ready.popleft())

    def _deadlock_error(self) -> DeadlockError:
        lines: list[tuple[str, str]] = []
        advice = ""
        for device, status in enumerate(self._status):
            text = status if isinstance(status, str) else f"waits in {status}"
            lines.append((self.name(device), text))
            if isinstance(status, Parcel) and status.purpose == "cotangents":
                advice = AWAITED_COTANGENTS
        return DeadlockError(
            f"No device of {self.mesh} can go on: {len(self._unfinished)} of {self.mesh.size} "
            f"wait, the others have finished.\n{_table_of_devices(lines)}\n"
            f"Every device of a group must call the same collectives in the same order.{advice}"
        )

    # -- collectives -------------------------------------------------------------------------------

    def current(self) -> VirtualWorld:
        """Return the run that the calling thread is a device of.

        A gradient may be taken in a later run than its forward, and then has collectives there.
        """
        scope = here()
        if scope is not None and isinstance(scope.world, VirtualWorld):
            return scope.world
        # During the run there may be no scope either: autograd changes threads in deeply nested
        # checkpoints, while the baton stays.
        if self._is_over:
            raise ScopeError(
                "A collective of a virtual mesh was differentiated outside the function that "
                "called it. Take the gradient inside, or pass the tensors through shard_map's "
                "arguments and results."
            )
        return self

    def start(
        self,
        move: Wired,
        xs: tuple[Tensor, ...],
        group: Group,
        site: Site,
        purpose: Purpose = "values",
        dtype: torch.dtype | None = None,
    ) -> Arrival | Done:
        """Add this device's tensors to a collective; the last device of the group computes it."""
        if self._stopping:
            raise Stopped
        if self._has_lost:
            self._validate_loss(group)
        if dtype is not None:
            xs = tuple(cast(xs, [dtype] * len(xs)))
        if group.size == 1:
            return Done(tuple([move.meaning([x])[0].clone() for x in xs]))

        # Devices may start several collectives before they wait, so a group may have several slots.
        index = group.index
        slots = self._slots[group.key]
        numbers = None if group.numbers is None else group.members
        call = VirtualCall(move, _signature(xs), group.axes, purpose, site.leaves, numbers)
        slot = next((slot for slot in slots if index not in slot.values), None)
        if slot is None:
            slot = CollectiveSlot(call, group)
            slots.append(slot)
        elif call != slot.call:
            self._raise_mismatch(slot, call, group, site)
        else:
            scope = here()
            if scope is not None and scope.checked and site not in slot.sites.values():
                self._raise_mismatch(slot, call, group, site)

        slot.values[index] = xs
        slot.sites[index] = site
        if len(slot.values) == group.size:
            slots.remove(slot)
            slot.results = _compute_results(slot)
            slot.values = {}  # arguments must not live as long as results
            self._ready.extend(slot.waiting)
        return Arrival(self, slot, group)

    def _raise_mismatch(
        self, slot: CollectiveSlot, call: VirtualCall, group: Group, site: Site
    ) -> NoReturn:
        lines = [(self.thread_of(group), call.text_at(site))]
        for index in slot.values:
            thread = self._thread(group.members[index])
            lines.append((thread, slot.call.text_at(slot.sites[index])))
        table = _table_of_devices([(self.name(device), text) for device, text in sorted(lines)])
        hint = ""
        if call == slot.call:
            hint = " Only the lines differ: if that is meant, check=False."
        raise MismatchError(
            f"The devices of one group of {self.mesh} met in one collective with different calls.\n"
            f"{table}\nEvery device of a group must call the same collectives in the same order, "
            f"on equal shapes, dtypes and trees.{hint}{uneven(call.purpose, slot.call.purpose)}"
        )

    # -- messages ----------------------------------------------------------------------------------

    def send(
        self,
        xs: tuple[Tensor, ...],
        group: Group,
        to: int,
        site: Site,
        purpose: Purpose = "values",
        number: int | None = None,
    ) -> None:
        """Put copies into the mail; the sender runs on."""
        if self._stopping:
            raise Stopped
        if self._has_lost:
            self._validate_loss(group)
        sender = self.thread_of(group)
        route = (sender, self._thread(group.members[to]))
        copies = tuple([x.detach().clone() for x in xs])
        send_site = None if number is None else _count_of_peer(group, to, "sent").site_of(number)
        message = VirtualMessage(copies, group, purpose, number, send_site, self.name(sender), site)
        self.mail[route].append(message)
        if route in self.listening:
            self._ready.append(self.listening.pop(route))

    def receive(
        self,
        likes: tuple[Tensor, ...],
        group: Group,
        source: int,
        site: Site,
        purpose: Purpose = "values",
        number: int | None = None,
    ) -> Parcel:
        """Request the next message of the device at index `source`."""
        if self._stopping:
            raise Stopped
        if self._has_lost:
            self._validate_loss(group)
        receiver = self.thread_of(group)
        route = (self._thread(group.members[source]), receiver)
        count = None if number is None else _count_of_peer(group, source, "received")
        return Parcel(self, group, route, receiver, likes, site, purpose, number, count)

    def _check_nothing_left(self) -> None:
        lines: set[str] = set()
        for slots in self._slots.values():
            for slot in slots:
                lines.update([slot.call.text_at(site) for site in slot.sites.values()])
        if lines:
            raise MismatchError(
                "Collectives were started, but not by all devices of their group:\n  "
                + "\n  ".join(sorted(lines))
            )

        unreceived: list[VirtualMessage] = []
        for messages in self.mail.values():
            unreceived += messages
        if unreceived:
            purposes: list[Purpose] = [message.purpose for message in unreceived]
            raise MismatchError(unreceived_text([*map(str, unreceived)], purposes))

    # -- words -------------------------------------------------------------------------------------

    def name(self, device: int) -> str:
        """Return a device's coordinates, for messages and as the name of its thread."""
        return device_names(self.mesh)[device]


@lru_cache(maxsize=64)
def device_names(mesh: Mesh) -> list[str]:
    """Return each device's coordinates in words: `device (data=0, model=1)`."""
    names: list[str] = []
    for device in range(mesh.size):
        coordinates = mesh.coordinates(device).items()
        text = ", ".join([f"{axis}={coordinate}" for axis, coordinate in coordinates])
        names.append(f"device ({text})")
    return names


def lost_error(mesh: Mesh) -> LostProcessError:
    """Return the error of a mesh with devices that were killed."""
    names = device_names(mesh)
    texts: list[str] = []
    for device, number in enumerate(mesh.devices):
        if number in dead:
            texts.append(f"{names[device]}, number {number}, was killed at {dead[number]}")
    return LostProcessError(
        f"{mesh} has lost devices: {'; '.join(texts)}. Go on with a mesh without them.",
        lost=tuple(sorted(dead)),
    )


def _table_of_devices(lines: list[tuple[str, str]]) -> str:
    """Write a line per device; equal consecutive lines are merged, first to last."""
    merged: list[tuple[str, str, str]] = []
    for name, text in lines:
        first = name
        if merged and merged[-1][2] == text:
            first, _, _ = merged.pop()
        merged.append((first, name, text))

    rows: list[str] = []
    for first, last, text in merged:
        names = first if first == last else f"{first} to {last}"
        rows.append(f"  {names}: {text}")
    return "\n".join(rows)


def _count_of_peer(group: Group, peer: int, end: Literal["sent", "received"]) -> MessageCount:
    """Return the count of the messages that the device at an index has sent here, or received.

    It is in the world of the forward, which may be that of an earlier run.
    """
    local = group.number
    remote = group.number_of(peer)
    route = (remote, local) if end == "sent" else (local, remote)
    return group.world.message_counts[group.members, *route, end == "sent"]


def _signature(xs: tuple[Tensor, ...]) -> Signature:
    return tuple([(x.shape, x.dtype) for x in xs])


def _describe_values(signature: Signature) -> str:
    return ", ".join([f"{dtype_name(dtype)}{list(shape)}" for shape, dtype in signature])


def _compute_results(slot: CollectiveSlot) -> list[tuple[Tensor, ...]]:
    """Compute the results of every device, in tensors that share no memory with any argument.

    Results that occur twice or are arguments are copied. On the CPU the copy is lazy, until one of
    the two is written to.
    """
    columns: list[list[Tensor]] = []
    # Autograd does not record this, since a collective is one node of its graph on each device.
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
        for number in range(len(slot.call.signature)):
            arguments = [slot.values[index][number] for index in range(slot.group.size)]
            seen = {*map(id, arguments)}
            column: list[Tensor] = []
            for result in slot.call.move.meaning(arguments):
                column.append(result.clone() if id(result) in seen else result)
                seen.add(id(result))
            columns.append(column)
    return list(zip(*columns, strict=True))
