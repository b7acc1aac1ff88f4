"""The process runtime: one process per device, over torch.distributed.

Groups are those of torch's `DeviceMesh`, so a mesh can be passed to torch and back. A group gets
its transport when it is made: shared memory if all its processes are of one machine, else gloo, or
NCCL. A collective packs its tensors, starts the transport, and unpacks the results.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fshard.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    LostProcessError,
    MeshError,
    MismatchError,
)
from fshard.mesh.collectives.moves import unreceived_text
from fshard.mesh.layout import Mesh
from fshard.mesh.layout.packing import cast, split
from fshard.mesh.runtimes.abstract import Done
from fshard.mesh.runtimes.call import CALL, CallInfo
from fshard.mesh.runtimes.gloo import Gloo
from fshard.mesh.runtimes.interface import gloo_connects_late
from fshard.mesh.runtimes.launchers import ProcessInfo, meet_again, meet_all, time_limit
from fshard.mesh.runtimes.nccl import HangWatch, Nccl
from fshard.mesh.runtimes.process_group import GroupTransport
from fshard.mesh.runtimes.thread_state import random_state, set_random_state
from fshard.mesh.runtimes.transport import Transport, Works
from fshard.mesh.runtimes.watch import Watch, open_store, publish_leaving, watching
from fshard.mesh.shared_memory.alive import ProcessId, this_process
from fshard.mesh.shared_memory.meet import all_gather, file_system_id, meet
from fshard.mesh.shared_memory.peers import Peers
from fshard.mesh.shared_memory.transport import SharedMemory
from fshard.mesh.spmd.scope import MessageCount, MessageCounts
from fshard.source import call_site

if TYPE_CHECKING:
    from fshard.mesh.collectives.moves import Purpose, Wired
    from fshard.mesh.layout.mesh import Runtime
    from fshard.mesh.spmd.scope import Group, Pending, Scope
    from fshard.source import Site

_C10D: Any = dist.distributed_c10d
_NEVER_SENT = (1 << 20) - 1
"""A tag that no message has: see Note [Tags]."""

Finish = Callable[["Sequence[Pending]"], "list[tuple[Tensor, ...]]"]
"""Returns the results of calls, once the device has them."""
SentMessage = tuple[CallInfo, tuple[Tensor, ...]]
"""A message of a process to itself."""


@dataclass
class ProcessState:
    """The world that this process has joined.

    There is one, since torch.distributed has one default group.

    Args:
        world: the world of processes, None before `join` and after `leave`.
        meshes: torch's meshes of meshes of that world, whose groups collectives use.
        joined: the number of worlds that this process has joined before.
        process: the number of the process that joined: a fork of it must not leave.
        has_made_groups: whether `join` has made torch's default group, or the program.
    """

    world: ProcessWorld | None = None
    meshes: dict[Mesh, DeviceMesh] = field(default_factory=dict["Mesh", DeviceMesh])
    joined: int = 0
    process: int | None = None
    has_made_groups: bool = False


_state = ProcessState()


def world_number() -> int:
    """Return the number of the world of processes: 0, unless this process has left others."""
    return _state.joined


def has_ended(rank: int) -> bool:
    """Return True if another process of this machine has ended."""
    world = _state.world
    return world is not None and world.has_gone(rank)


def staying() -> Callable[[], bool]:
    """Return a function that returns False once this process has joined another world."""
    if _state.world is None:
        return lambda: True
    world = ref(_state.world)  # so that its groups end when it is left
    return lambda: _state.world is None or _state.world is world()


class ProcessWorld:
    """The world of processes, seen from this one."""

    has_values = True
    runtime: Runtime = "process"

    def __init__(
        self,
        timeout: timedelta,
        device_type: str,
        raise_if_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = dist.get_rank()
        self.timeout = timeout
        # Such as {"cpu": "gloo", "cuda": "nccl"}, which torch writes as "cpu:gloo,cuda:nccl".
        backends = dict([pair.split(":") for pair in dist.get_backend_config().split(",")])
        self.device_type = device_type if device_type in backends else next(iter(backends))
        self.backend = backends[self.device_type]
        # gloo sends tensors of GPUs from copies in host memory.
        self._staged = self.backend == "gloo"
        self.peers = Peers({}, timeout)
        if self._staged:
            self.peers = meet(timeout, raise_if_lost)
        rows = all_gather([*this_process(), file_system_id()])
        self.processes = [ProcessId(machine, pid, start) for machine, pid, start, _ in rows]
        # Of each process, to reshard between meshes: replicas on the receiver's machine send.
        self.machines = [process.machine for process in self.processes]
        self.file_systems = [files for *_, files in rows]
        self.scopes: dict[object, Scope] = {}
        self.message_counts: MessageCounts = defaultdict(MessageCount)
        # Without a reference to this world, which these refer to.
        self.has_gone = partial(_has_gone, self.peers, self.processes, self.rank)
        self._works = Works(timeout, self.has_gone)
        # By the members of a group: its transport, that for host tensors beside it, torch's group.
        self._transports: dict[tuple[int, ...], Transport] = {}
        self._hosts: dict[tuple[int, ...], Transport] = {}
        self._groups: dict[tuple[int, ...], Any] = {}
        # By sender and receiver.
        self._routes: dict[tuple[int, int], Nccl] = {}
        # Of groups that have a queue beside the computation: its transport, and its stream.
        self._beside: dict[tuple[int, ...], tuple[Nccl, Any]] = {}
        self._to_itself: dict[tuple[int, ...], deque[SentMessage]] = defaultdict(deque)
        self.has_failed = False
        self._hang_watch: HangWatch | None = None
        if not self._staged and self.device_type != "cpu":
            stream = torch.get_device_module(self.device_type).current_stream()
            self._hang_watch = HangWatch(self._works, stream, open_store())
        self._watch: Watch | None = None
        if watching():
            self._watch = Watch(self.rank, timeout, self.has_gone, self._works.advance)

    @staticmethod
    def of(mesh: Mesh) -> ProcessWorld:
        """Return the world of a mesh; `make_mesh` joined it."""
        world = _state.world
        if mesh.world != _state.joined:
            raise MeshError(
                f"{mesh} was made before processes were lost or joined, and its arrays are on "
                "others. Make meshes and arrays again, in the function of fs.elastic."
            )
        if world is not None and world._works.error is not None:
            world._works.raise_error()
        if world is None or not dist.is_initialized():
            raise MeshError(
                f"{mesh} has no processes: call fs.make_mesh in every process, under torchrun."
            )
        return world

    def device(self, mesh: Mesh) -> int:
        """Return this process's device number in the parent of `mesh`."""
        if mesh.numbers is None:
            return self.rank
        if self.rank not in mesh.numbers:
            raise MeshError(
                f"Process {self.rank} is not part of {mesh}, whose processes are {mesh.numbers}. "
                "Make the mesh on each process: fs.make_mesh(..., devices=...) gives each its side "
                "of it."
            )
        return mesh.numbers.index(self.rank)

    def current(self) -> ProcessWorld:
        """Return itself: the processes of a world do not come and go."""
        return self

    def represents(self, axes: tuple[str, ...]) -> bool:
        """Return False: each device has a process."""
        return False

    # -- collectives -------------------------------------------------------------------------------

    def start(
        self,
        move: Wired,
        xs: tuple[Tensor, ...],
        group: Group,
        site: Site,
        purpose: Purpose = "values",
        dtype: torch.dtype | None = None,
    ) -> Pending:
        """Pack the tensors, and start the group's transport."""
        n = group.size
        if n == 1:
            if dtype is not None:
                xs = tuple(cast(xs, [dtype] * len(xs)))
            return Done(tuple([move.meaning([x])[0].clone() for x in xs]))
        call = CallInfo(move, xs, group, site, purpose, dtype=dtype)
        verify = None
        if self._watch is not None:
            # Under FSHARD_CHECK=1, publish the call, and compare it with those of the others.
            meeting = self._watch.start(
                group, call.signature, site, purpose, has_one_line=move.has_one_line
            )
            verify = partial(self._watch.meet, meeting)
            has_group = self._staged and group.members in self._transports
            if not self.are_near(group.members) and not has_group:
                # Now, not before the wait: calls have no tags on NCCL, and a group is made by all
                # of its members together.
                verify()
                verify = None

        device = xs[0].device
        if self._staged and device.type != "cpu":
            xs = tuple([x.cpu() for x in xs])
        transport = self.transport(group, device)
        packed = [move.pack(x, n) for x in xs]
        widths = [x.shape[-1] for x in packed]
        shapes = [x.shape for x in xs]
        unpack = partial(_unpack_results, move, shapes, device, widths, n)
        del xs  # they may be freed before the result is there
        return transport.start(transport.collective(move, packed, call), call, unpack, verify)

    def agree(self, call: str, group: Group, site: Site) -> None:
        """Raise on all processes of a group unless all make this call (FSHARD_CHECK=1 only)."""
        if self._watch is not None and group.size > 1:
            self._watch.meet(self._watch.start(group, call, site))

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
        """Send tensors as one buffer, which is kept alive until it is sent."""
        call = CallInfo(None, xs, group, site, purpose, is_send=True, number=number)
        if self._watch is not None:
            self._watch.sent(call, to)
        if to == group.index:
            copies = tuple([x.detach().clone() for x in xs])
            self._to_itself[group.members].append((call, copies))
            return
        if self._staged and not xs[0].is_cpu:
            xs = tuple([x.cpu() for x in xs])
        transport, index = self._transport_of_message(group, to, xs[0].device, is_send=True)
        transport.start(transport.send(xs, index, call), call)

    def receive(
        self,
        likes: tuple[Tensor, ...],
        group: Group,
        source: int,
        site: Site,
        purpose: Purpose = "values",
        number: int | None = None,
    ) -> Pending:
        """Start receiving tensors like these, as one buffer."""
        call = CallInfo(None, likes, group, site, purpose, number=number)
        verify = None if self._watch is None else partial(self._watch.expect, call, source)
        if source == group.index:
            if verify is not None:
                verify()
            return Done(self._receive_from_itself(call))
        size = sum([like.numel() for like in likes])
        device = "cpu" if self._staged else likes[0].device
        make = partial(torch.empty, size, dtype=likes[0].dtype, device=device)
        transport, index = self._transport_of_message(group, source, likes[0].device)
        if verify is not None and transport.blocks_in_receive(index):
            # Now, not before the wait: without a sender the start itself does not end.
            verify()
            verify = None
        unpack = partial(_split_message, likes)
        return transport.start(transport.receive(make, index, call), call, unpack, verify)

    def listen(
        self, like: Tensor, group: Group, source: int, arrived: SimpleQueue[tuple[int, Any]]
    ) -> None:
        """Receive a message of the device at index `source` in a thread.

        Put the index and the tensor, or the error, into a queue. With one queue for several
        sources, the first message to arrive is the first in it.
        """
        call = CallInfo(None, (like,), group, call_site(), "values")
        # Its sender counts it among the messages of this route, so that both ends agree later.
        ends = group.number_of(source), group.number
        self.message_counts[group.members, *ends, False].add(call.site)
        transport, index = self._transport_of_message(group, source, like.device)
        make = partial(torch.empty, like.numel(), dtype=like.dtype, device=like.device)
        work = transport.start(transport.receive(make, index, call), call)

        def wait() -> None:
            try:
                result: Any = work.wait()[0].view(like.shape)
                if self._watch is not None:
                    self._watch.expect(call, source)
            except BaseException as error:
                result = error
                if isinstance(transport, Gloo):
                    # A time-out closes gloo's connections: else others wait for this process.
                    with suppress(RuntimeError):
                        never = transport.pg.recv_anysource([torch.empty(1)], 0)
                        never.wait(timedelta(milliseconds=1))
            arrived.put((source, result))

        Thread(target=wait, name="fshard-listener", daemon=True).start()

    def _transport_of_message(
        self, group: Group, peer: int, device: torch.device, *, is_send: bool = False
    ) -> tuple[Transport, int]:
        """Return the transport of a message on a device, and the index of its other end in it."""
        if self._staged or device.type != self.device_type:
            return self.transport(group, device), peer
        rank = group.members[peer]
        if is_send:
            return self._route(self.rank, rank), 1
        return self._route(rank, self.rank), 0

    # Note [A route has a group]
    # NCCL ignores tags: two ranks have one queue for all that they send and receive. A device starts to
    # receive ahead of its computation. In one queue that would block its next send, which the other
    # end may need first:
    #
    #     rank 0   recv B0 (ahead), send F0           F0 is behind B0
    #     rank 1   recv F0, send B0                   B0 needs F0
    #
    # So the messages of one rank to one other, a route, have a group of these two. Its queue has
    # messages of one direction, and both ends start them in the same order. The group is not bound to
    # a device, as those of collectives are: its first message connects it, if there ever is one.
    def _route(self, sender: int, receiver: int) -> Nccl:
        """Return the transport of messages from one rank to another; the first makes it."""
        ends = sender, receiver
        if ends not in self._routes:
            pg = self.make_group(ends, "messages", backend=self.backend)
            self._routes[ends] = Nccl(self._works, pg, ends.index(self.rank), 2)
        return self._routes[ends]

    def _receive_from_itself(self, call: CallInfo) -> tuple[Tensor, ...]:
        sent = self._to_itself[call.group.members]
        if not sent:
            raise DeadlockError(
                f"process {self.rank} waits for {call} from itself, but has sent none."
            )
        sender, xs = sent.popleft()
        if (sender.stamp ^ call.stamp) & CALL:
            raise MismatchError(
                f"process {self.rank} expects {call} from itself, but has sent {sender}."
                + call.advice(call.purpose, sender.purpose)
            )
        return xs

    # -- leaving -----------------------------------------------------------------------------------

    def report_failure(self, group: Group, error: BaseException) -> None:
        """Leave a group in which others may wait for this process."""
        self.has_failed = True
        if group.size == 1 or not self.are_near(group.members):
            return
        # As a mismatch, whose text the next call of this process on the group has.
        if not isinstance(error, MismatchError | LostProcessError | CollectiveTimeoutError):
            text = f"process {self.rank} has failed: {type(error).__name__}: {error}"
            error = MismatchError(text)
        self.transport(group).fail(error)

    # Note [Waiting for peers at the end]
    # A process must not close its links while others need them: a peer copies long messages from
    # this one's memory, and an ended process would be a lost one. So `finish` waits until each
    # message was received, at most for the time limit. A message that a process has left without is
    # an error of the program: that of the sender. After a failure nothing is waited for, since the
    # others may never receive; where no socket closes visibly (NCCL) the failure is published in
    # the store. Hangs are watched for until the device has ended, since to destroy groups waits for
    # it too. Last all references are cleared: torch closes a connection with the last reference to
    # it.
    def finish(self, waiting: bool, keeps_store: bool) -> None:
        """End all calls; `waiting` for them, and raising if a sent message was never received.

        Raise the error that has ended all groups as well, unless a call has. `keeps_store`: the
        store stays when this process has left.
        """
        works = self._works
        calls: list[CallInfo] = []
        if waiting and works.error is None:
            for messages in self._to_itself.values():
                calls += [call for call, _ in messages]
            calls += works.finish_sends() + self.peers.unreceived()
            if self._hang_watch is not None and not calls:
                self._hang_watch.finish()
        if keeps_store:
            publish_leaving()
        if self._watch is not None:
            self._watch.finished(keeps_store=keeps_store)

        if self._hang_watch is not None:
            self._hang_watch.stop()

        has_new_error = not self.has_failed and bool(calls)
        self.has_failed |= not waiting or works.error is not None or bool(calls)
        # In an elastic run the others look for a loss themselves; and the store may be stopped.
        if self.has_failed and self._hang_watch is not None and not keeps_store:
            text = f"Process {self.rank} has failed: look for its own error."
            self._hang_watch.publish(text)
        self.peers.close()
        if not waiting:
            self._close_connections()

        # A connection closes with the last reference to it, and graphs still refer to this world.
        self._routes.clear()
        self._beside.clear()
        self._to_itself.clear()
        works.in_progress.clear()
        self._transports.clear()
        self._hosts.clear()
        self._groups.clear()
        self.scopes.clear()
        if waiting and not works.has_raised_error:
            works.raise_error()
        if has_new_error:
            lines = sorted({str(call) for call in calls})
            raise MismatchError(unreceived_text(lines, [call.purpose for call in calls]))

    def is_joined(self) -> bool:
        """Return True unless the program has destroyed the groups itself."""
        return dist.is_initialized() or self._works.error is not None

    def _close_connections(self) -> None:
        """Close the connections of gloo, so that the others do not wait for this process.

        gloo closes them with the last reference to a group, and the traceback of an error may have
        one. It also closes them when a wait has ended without a message.
        """
        if gloo_connects_late():
            return  # there is no call that connects no one
        groups = {dist.group.WORLD, *self._groups.values()}
        for transport in self._hosts.values():
            if isinstance(transport, Gloo):
                groups.add(transport.pg)
        for pg in groups:
            if pg is None or pg.size() == 1 or torch.device("cpu") not in pg._device_types:
                continue
            with suppress(RuntimeError):
                never = pg.recv_anysource([torch.empty(1)], _NEVER_SENT)
                never.wait(timedelta(milliseconds=1))

    def end_groups(self, keeps_store: bool) -> None:
        """Destroy torch's groups, unless they are gone; abort them after a failure."""
        if dist.is_initialized():
            # NCCL would wait in calls that the other processes may never make.
            if self.has_failed and self.backend != "gloo":
                _C10D._abort_process_group()
            else:
                dist.destroy_process_group()
        needs_store = self.rank == 0 and not keeps_store
        if self.has_failed and self._hang_watch is not None and needs_store:
            self._hang_watch.linger()

    def watch_losses(self, find_loss: Callable[[], str]) -> None:
        """Let the watch for hangs, where there is one, look for lost processes by a function."""
        if self._hang_watch is not None:
            self._hang_watch.find_loss = find_loss

    # -- groups ------------------------------------------------------------------------------------

    def transport(self, group: Group, device: torch.device | None = None) -> Transport:
        """Return the transport of a group for tensors on a device; the first call makes it."""
        members = group.members  # several groups may share the processes
        if not self._staged and device is not None and device.type != self.device_type:
            return self._host_transport(members)
        transport = self._transports.get(members)
        if transport is None:
            if not self.are_near(members):
                return self.add(members, self.axis_group(members))
            transport = self._transports[members] = SharedMemory(
                self._works, self.peers, members, self.rank
            )
        return transport

    @contextmanager
    def attempt(self, mesh: Mesh, name: str, failure: Callable[[], str]) -> Generator[None]:
        """Run a block whose collectives on a mesh may fail and leave the links open.

        That holds for the processes of one machine: see Note [Attempts leave links open]. A group
        of torch.distributed is lost, and none beside it.

        Args:
            mesh: all of it.
            name: of its own, equal on all processes.
            failure: returns why it has failed, or "".
        """
        members = mesh.devices
        usual = self._transports.get(members)
        if mesh.size > 1 and self._staged and self.are_near(members):
            self._transports[members] = SharedMemory(
                self._works, self.peers, members, self.rank, name, failure
            )
        watched = self._watch.attempt(name, failure) if self._watch else nullcontext()
        try:
            with watched:
                yield
        finally:
            if usual is not None:
                self._transports[members] = usual
            elif mesh.size > 1 and self.are_near(members):
                self._transports.pop(members, None)

    # Note [Copies beside the computation]
    # A copy of the state to another device takes as long as many collectives of a step. In the queue
    # of these, the first one of the next step would wait for it. So copies have a communicator of
    # their own, and a stream of their own, which waits for what the device had been given before:
    #
    #     computation    step 1, stage ──●   step 2 ...              step 3 ...
    #     copies                         └── send, receive ──●
    #     host           save 1, step 2 ...                  save 2: waits for ●
    #
    # All processes start a copy at one place of the program, as they start collectives, and it waits
    # for nothing that is started later.
    @contextmanager
    def beside(self, members: tuple[int, ...]) -> Generator[Finish | None]:
        """Run a block whose collectives of a group run beside the computation.

        Yield a function that returns the results of such calls, once the device has done them, and
        all that it had been given before. It raises if the groups were aborted meanwhile. Yield
        None where the host waits for each call, or there is none.
        """
        watch = self._hang_watch
        if watch is None or len(members) == 1:
            yield None
            return

        device = torch.get_device_module(self.device_type)
        if members not in self._beside:
            pg = self.make_group(members, "copies", backend=self.backend)
            transport = Nccl(self._works, pg, members.index(self.rank), len(members))
            self._beside[members] = transport, device.Stream()
        transport, stream = self._beside[members]
        stream.wait_stream(device.current_stream())

        def finish(calls: Sequence[Pending]) -> list[tuple[Tensor, ...]]:
            # On their own stream. If the computation waited for them, the allocator would keep
            # their memory until it had done all that it has been given by now.
            with device.stream(stream):
                results = [call.wait() for call in calls]
                watch.wait(stream.record_event())
            return results

        usual = self._transports.pop(members, None)
        self._transports[members] = transport
        try:
            with device.stream(stream):
                yield finish
        finally:
            del self._transports[members]
            if usual is not None:
                self._transports[members] = usual

    def _host_transport(self, members: tuple[int, ...]) -> Transport:
        """Return the transport for tensors in host memory, of a group whose backend is for GPUs."""
        if members not in self._hosts:
            pg = self.axis_group(members)
            if torch.device("cpu") not in pg._device_types:
                pg = self.make_group(members, "host", backend="gloo")
            self._hosts[members] = Gloo(self._works, pg, members.index(self.rank), len(members))
        return self._hosts[members]

    def add(self, members: tuple[int, ...], pg: Any) -> Transport:
        """Use a group of torch.distributed that this process is in."""
        transport = self._transports.get(members)
        if isinstance(transport, GroupTransport) and transport.pg is pg:
            return transport  # another would number its messages from 0 again
        self._groups[members] = pg
        kind = Gloo if self._staged else Nccl
        self._transports[members] = transport = kind(
            self._works, pg, members.index(self.rank), len(members)
        )
        if not self._staged:
            # A first call that some members do not make, such as a batch of messages, would hang.
            dist.all_reduce(torch.zeros(1, device=self.device_type), group=pg)
        return transport

    def axis_group(self, members: tuple[int, ...]) -> Any:
        """Return the group of torch.distributed along an axis; the first call makes it."""
        pg = self._groups.get(members)
        if pg is None:
            is_world = members == tuple(range(dist.get_world_size()))
            pg = dist.group.WORLD if is_world else self.make_group(members, "axis")
            self._groups[members] = pg
        return pg

    def make_group(self, members: tuple[int, ...], purpose: str, backend: str | None = None) -> Any:
        """Make a group of torch.distributed, in its members alone.

        Bind its GPU, which connects NCCL at once, unless a backend is named or it is of one process.
        The group's name depends on members and purpose.
        `dist.new_group` hashes the number of groups that a process is in, which may differ among
        them, and lets all processes divide the world's NCCL communicator, if a GPU is bound.
        """
        world: Any = dist.group.WORLD
        gpu = world.bound_device_id
        device = gpu if backend is None and len(members) > 1 else None
        text = f"fshard {purpose} {members}"
        name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        world.bound_device_id = None
        try:
            pg, _ = _C10D._new_process_group_helper(
                len(members),
                members.index(self.rank),
                [*members],
                dist.get_backend() if backend is None else backend,
                _C10D._get_default_store(),
                name,
                timeout=self.timeout,
                device_id=device,
            )
        finally:
            world.bound_device_id = gpu
        _C10D._world.pg_group_ranks[pg] = {rank: index for index, rank in enumerate(members)}
        return pg

    def are_near(self, members: tuple[int, ...]) -> bool:
        """Return True if all these processes are on this machine."""
        return self.peers.by_rank.keys() >= {*members} - {self.rank}

    def is_near(self, mesh: Mesh) -> bool:
        """Return True if all processes of a mesh and of its parent are on this machine."""
        return self.are_near(mesh.devices)


def _has_gone(peers: Peers, processes: Sequence[ProcessId], caller: int, rank: int) -> bool:
    """Return True if another process of the caller's machine has ended, or left its world."""
    if peers.has_gone(rank):
        return True
    machine = processes[rank].machine
    is_here = machine == processes[caller].machine != 0
    return is_here and processes[rank].has_ended


def _unpack_results(
    move: Wired,
    shapes: list[torch.Size],
    device: torch.device,
    widths: list[int],
    n: int,
    rows: Tensor | Sequence[Tensor],
    into: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:
    """Return the results of a collective from its rows.

    These are of each tensor, or of all in one buffer, with these widths and perhaps padding.
    """
    if isinstance(rows, Tensor):
        rows = rows.to(device)  # from the host, if it was sent from there: before it is split
        if len(widths) == 1:
            rows = [rows]
        elif move.keeps_rows:
            rows = split(rows, widths, into)
        else:
            rows = rows[..., : sum(widths)].split(widths, dim=-1)
    elif device.type != rows[0].device.type:
        rows = [row.to(device) for row in rows]
    pairs = zip(rows, shapes, strict=True)
    return tuple([move.unpack(row, shape, n) for row, shape in pairs])


def _split_message(
    likes: tuple[Tensor, ...], flat: Tensor, into: Sequence[Tensor] | None
) -> tuple[Tensor, ...]:
    """Return the tensors of a message that was received as one buffer."""
    if not likes[0].is_cpu:
        flat = flat.to(likes[0].device)
    if len(likes) == 1:
        return (flat.view(likes[0].shape),)
    pairs = zip(flat.split([like.numel() for like in likes]), likes, strict=True)
    return tuple([x.view(like.shape) for x, like in pairs])


def everyone() -> Mesh | None:
    """Return a mesh of all processes; None before a mesh has joined them."""
    world = _state.world
    if world is None:
        return None
    axes = (("device", dist.get_world_size()),)
    return Mesh(axes, "process", world.device_type, world=world_number())


def machines_of(mesh: Mesh) -> tuple[int, ...]:
    """Return a number of the machine of each device of a mesh; virtual devices are on one."""
    if mesh.runtime != "process":
        return (0,) * mesh.size
    machines = ProcessWorld.of(mesh).machines
    return tuple([machines[rank] for rank in mesh.devices])


def share_files(mesh: Mesh) -> bool:
    """Return True if all processes of a mesh are on one machine, and see the same files."""
    world = ProcessWorld.of(mesh)
    places = {(world.machines[rank], world.file_systems[rank]) for rank in mesh.devices}
    return len(places) == 1 and 0 not in places.pop()


def beside_computation(mesh: Mesh) -> AbstractContextManager[Finish | None]:
    """Let collectives of all devices of a mesh run beside the computation: see `beside`."""
    if mesh.runtime != "process":
        return nullcontext()
    return ProcessWorld.of(mesh).beside(mesh.devices)


def watch_losses(find_loss: Callable[[], str]) -> None:
    """Let the watch for hangs, where there is one, look for lost processes by a function."""
    if _state.world is not None:
        _state.world.watch_losses(find_loss)


# -- joining and leaving ---------------------------------------------------------------------------


def join(device_type: str, timeout: float | None) -> ProcessWorld:
    """Join the world of processes, or return the one that this process is in."""
    if _state.world is not None and dist.is_initialized():
        if device_type == "cuda" and _state.world.device_type == "cpu":
            raise MeshError(
                'device must be "cpu"; got "cuda" after a mesh of CPUs. '
                "Make the mesh of GPUs first."
            )
        return _state.world
    limit = time_limit(timeout)
    has_groups = dist.is_initialized()
    if not has_groups:
        # torch.func.grad imports it, and then it would keep the group.
        import_module("torch.distributed.nn.functional")
        meet_all(device_type, limit)
    _note_joined(has_made_groups=not has_groups)
    if not has_groups:
        _share_random_state(device_type)
    _state.world = ProcessWorld(limit, device_type)
    return _state.world


def join_again(
    device_type: str,
    info: ProcessInfo,
    store: Any,
    limit: timedelta,
    connect_limit: timedelta,
    raise_if_lost: Callable[[], None],
) -> None:
    """Join a world of processes that have left another one; the random state stays.

    If that fails, the process is in no world.

    Args:
        device_type: of the world.
        info: the rank of this process among them.
        store: a new one, in which they meet.
        limit: of their calls.
        connect_limit: of their connection. Nothing else ends it if one of them ends meanwhile.
        raise_if_lost: raises if one of them has ended; called while this process waits for them.
    """
    import_module("torch.distributed.nn.functional")  # as in `join`
    _state.joined += 1
    _note_joined(has_made_groups=True)
    try:
        meet_again(device_type, info, store, connect_limit)
        _C10D._set_pg_timeout(limit)
        _state.world = ProcessWorld(limit, device_type, raise_if_lost)
    except BaseException:
        if dist.is_initialized():
            _C10D._abort_process_group()
        raise


def _note_joined(*, has_made_groups: bool) -> None:
    if _state.process is None:
        atexit.register(_leave_at_exit)
    _state.process = os.getpid()
    _state.has_made_groups = has_made_groups


def leave(*, waiting: bool = True, keeps_store: bool = False) -> None:
    """Leave the world of processes, if it was joined here.

    By default, wait until others receive messages, or raise. `keeps_store`: the store stays when
    this process has left, so it need not wait until the others have read what it publishes.
    """
    world = _state.world
    _state.world = None
    _state.meshes = {}
    if world is None or not world.is_joined():
        return
    try:
        world.finish(waiting, keeps_store)
    finally:
        world.end_groups(keeps_store)


def _leave_at_exit() -> None:
    if os.getpid() != _state.process:
        return  # a fork of the process that joined
    if not _state.has_made_groups and dist.is_initialized():
        return  # the program has made the groups; they were not aborted
    has_failed = hasattr(sys, "last_value")  # then others may never receive anything
    try:
        leave(waiting=not has_failed)
    except BaseException:
        # Python would write it, and end with exit code 0: to a launcher all would be well.
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _share_random_state(device_type: str) -> None:
    """Begin with the random states of process 0, as virtual devices begin with their caller's.

    Else `torch.randn(...)` given as a global value would be another value in every process.
    """
    for kind in dict.fromkeys(("cpu", device_type)):
        state = random_state(kind)  # in host memory
        dist.broadcast(state, 0)
        set_random_state(kind, state)


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """Return torch's DeviceMesh for a mesh, made once; collectives use its groups."""
    torch_mesh = _state.meshes.get(mesh)
    if torch_mesh is not None:
        return torch_mesh

    if mesh.parent is not None:
        torch_mesh = device_mesh(mesh.root)[mesh.axis_names]
    else:
        torch_mesh = _new_device_mesh(mesh)
    use_groups(mesh, torch_mesh)
    return torch_mesh


def _new_device_mesh(mesh: Mesh) -> DeviceMesh:
    """Make torch's mesh of all processes, of a group for each axis through this one."""
    world = ProcessWorld.of(mesh)
    ranks = mesh.devices
    device = world.device(mesh)
    groups: list[Any] = []
    for size, stride in mesh.steps.values():
        first = device - device // stride % size * stride  # the device with coordinate 0
        groups.append(world.axis_group(ranks[first::stride][:size]))
    grid = torch.tensor(ranks).reshape(tuple(mesh.shape.values()))
    return DeviceMesh.from_group(groups, mesh.device_type, grid, mesh_dim_names=mesh.axis_names)


def use_groups(mesh: Mesh, torch_mesh: DeviceMesh) -> None:
    """Use the groups of a DeviceMesh for the axes of a mesh."""
    _state.meshes[mesh] = torch_mesh
    world = ProcessWorld.of(mesh)
    for axis in mesh.axis_names:
        pg: Any = torch_mesh.get_group(axis)
        if not isinstance(pg, dist.ProcessGroup):
            continue
        members = tuple(dist.get_process_group_ranks(pg))
        if world.are_near(members):
            continue  # they use shared memory

        world.add(members, pg)
