"""The process runtime: one process per device, over torch.distributed.

Groups are those of torch's `DeviceMesh`, so a mesh can be passed to torch and back. Tensors of one dtype share a
buffer. The wire formats are one table per kind of link: `direct.WIRES` between processes of one machine, `gloo.WIRES`
between machines, `native.WIRES` for NCCL.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fshard.errors import CollectiveTimeoutError, DeadlockError, LostProcessError, MeshError, MismatchError
from fshard.mesh.collectives.moves import uneven
from fshard.mesh.runtimes import gloo, native
from fshard.mesh.runtimes.abstract import Done
from fshard.mesh.runtimes.launchers import meet_all, time_limit
from fshard.mesh.runtimes.link import CALL, CallInfo, GroupLink, Link, NcclLink
from fshard.mesh.runtimes.message_links import MessageLinks
from fshard.mesh.runtimes.operations import Operations
from fshard.mesh.runtimes.thread_state import random_state, set_random_state
from fshard.mesh.runtimes.watch import Watch, open_store, watching
from fshard.mesh.shared_memory import large
from fshard.mesh.shared_memory.direct import Direct
from fshard.mesh.shared_memory.neighbours import Neighbours, meet
from fshard.source import call_site

if TYPE_CHECKING:
    from fshard.mesh.collectives.moves import Purpose, Wired
    from fshard.mesh.layout.mesh import Mesh
    from fshard.mesh.spmd.scope import Group, Pending, Scope
    from fshard.source import Site

_C10D: Any = dist.distributed_c10d
_state: dict[str, Any] = {"world": None, "meshes": {}, "process": None}


def has_ended(rank: int) -> bool:
    """Return True if another process of this machine, over a direct link, has ended."""
    world: ProcessWorld | None = _state["world"]
    return world is not None and world._neighbours.has_gone(rank)  # pyright: ignore[reportPrivateUsage]  # of this module


class ProcessWorld:
    """The world of processes, seen from this one."""

    has_values = True

    def __init__(self, timeout: timedelta, device_type: str) -> None:
        self.rank = dist.get_rank()
        self.timeout = timeout
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        self.device_type = device_type if device_type in backends else next(iter(backends))
        self.backend = backends[self.device_type]
        self._staged = self.backend == "gloo"  # tensors of GPUs are sent from copies in host memory
        self._wires = gloo.WIRES if self._staged else native.WIRES
        self._neighbours = meet(timeout) if self._staged else Neighbours({}, timeout)
        self.scopes: dict[object, Scope] = {}
        self._operations = Operations(timeout)
        self._links: dict[tuple[int, ...], Link] = {}
        self._hosts: dict[tuple[int, ...], Link] = {}
        self._groups: dict[tuple[int, ...], Any] = {}
        self._messages: MessageLinks | None = None
        self._has_left, self._store = Event(), open_store()
        if not self._staged and self.device_type == "cuda":
            context = torch.cuda.current_stream(), self._store, self._has_left
            Thread(target=self._operations.end_hangs, args=context, name="fshard-hangs", daemon=True).start()
        if not self._staged:
            make_unbound = partial(self.make_group, tuple(range(dist.get_world_size())), backend=self.backend)
            self._messages = MessageLinks(self.rank, self.device_type, make_unbound)
        self.has_failed = False
        self._to_itself: dict[tuple[int, ...], deque[tuple[CallInfo, tuple[Tensor, ...]]]] = defaultdict(deque)
        self._watch: Watch | None = None
        if watching():
            self._watch = Watch(self.rank, timeout, self._neighbours.has_gone, self._operations.advance)

    @staticmethod
    def of(mesh: Mesh) -> ProcessWorld:
        """Return the world of a mesh; `make_mesh` joined it."""
        world = _state["world"]
        if world is not None and world._operations.error is not None:
            raise world._operations.error
        if world is None or not dist.is_initialized():
            raise MeshError(f"{mesh} has no processes: call fs.make_mesh in every process, under torchrun.")
        return world

    def device(self, mesh: Mesh) -> int:
        """Return this process's device number in the parent of `mesh`."""
        if mesh.ranks is None:
            return self.rank
        if self.rank not in mesh.ranks:
            raise MeshError(f"Process {self.rank} is not part of {mesh}, whose processes are {mesh.ranks}.")
        return mesh.ranks.index(self.rank)

    def current(self) -> ProcessWorld:
        """Return itself: processes do not come and go."""
        return self

    # -- collectives --------------------------------------------------------------------------------------------

    def start(
        self, move: Wired, xs: tuple[Tensor, ...], group: Group, site: Site, purpose: Purpose = "values"
    ) -> Pending:
        """Start the move's wire: on tensors in their own memory, or packed into one buffer."""
        n = group.size
        if n == 1:
            return Done(tuple(move.meaning([x])[0].clone() for x in xs))
        verify = self._verification(call := CallInfo(move, xs, group, site, purpose))
        if len(xs) > 1 and large.suits(move, xs):
            link = self.link(group)
            if isinstance(link, Direct) and xs[0].is_cpu and len(xs) <= large.MAX_TENSORS:
                results = large.empty_results(move, xs, n)
                wire = link.begin_many(move, xs, results, call)
                return self._operations.start(link, wire, call, lambda _: results, verify)
        packed = [move.pack(x, n) for x in xs]
        widths = [one.shape[-1] for one in packed]
        device = packed[0].device
        link = self.link(group) if self._staged or device.type == self.device_type else self.host_link(group)
        if len(xs) == 1:
            buffer = packed[0].contiguous()
        elif move.wire == "gather" and isinstance(link, NcclLink):
            buffer = packed[0].new_empty(n, sum(widths))  # gathered in place
            torch.cat(packed, out=buffer[group.index])
        else:
            buffer = torch.cat(packed, dim=-1)
        wire = link.begin(move, buffer.cpu() if self._staged else buffer, call)
        unpack = partial(_unpack, move, [x.shape for x in xs], device, widths, n)  # so `xs` may be freed
        return self._operations.start(link, wire, call, unpack, verify)

    def _verification(self, call: CallInfo) -> Callable[[], None] | None:
        """Under FSHARD_CHECK=1, publish a collective; return the check that the others start the same, if it is still
        to be made.
        """
        if self._watch is None:
            return None
        meeting, members = self._watch.start(call.group, call.signature, call.site, call.purpose), call.group.members
        if self.near(members) or (self._staged and members in self._links):
            return partial(self._watch.meet, meeting)
        self._watch.meet(meeting)  # calls have no tags on NCCL, and to make a group all must come
        return None

    def agree(self, call: str, group: Group, site: Site) -> None:
        """Raise on all processes of a group unless all make this call (FSHARD_CHECK=1 only)."""
        if self._watch is not None and group.size > 1:
            self._watch.meet(self._watch.start(group, call, site))

    # -- messages -----------------------------------------------------------------------------------------------

    def send(self, xs: tuple[Tensor, ...], group: Group, to: int, site: Site, purpose: Purpose = "values") -> None:
        """Send tensors as one buffer, which is kept alive until it is sent."""
        call = CallInfo(None, xs, group, site, purpose, is_send=True)
        if self._watch is not None:
            self._watch.sent(call, to)
        if to == group.index:
            self._to_itself[group.members].append((call, tuple(x.detach().clone() for x in xs)))
            return
        if self._staged and not xs[0].is_cpu:
            xs = tuple(x.cpu() for x in xs)
        link, index = self._message_link(group, to, xs[0].device, is_send=True)
        self._operations.start(link, link.send(xs, index, call), call)

    def receive(
        self, likes: tuple[Tensor, ...], group: Group, source: int, site: Site, purpose: Purpose = "values"
    ) -> Pending:
        """Start receiving tensors like these, as one buffer."""
        call = CallInfo(None, likes, group, site, purpose)
        verify = None if self._watch is None else partial(self._watch.expect, call, source)
        if source == group.index:
            if verify is not None:
                verify()
            return Done(self._from_itself(call))
        size, device = sum([like.numel() for like in likes]), "cpu" if self._staged else likes[0].device
        make = partial(torch.empty, size, dtype=likes[0].dtype, device=device)
        link, index = self._message_link(group, source, likes[0].device)
        return self._operations.start(link, link.receive(make, index, call), call, partial(_split, likes), verify)

    def listen(self, like: Tensor, group: Group, source: int, arrived: SimpleQueue[tuple[int, Any]]) -> None:
        """Receive a message of the device at index `source` in a thread; put the index and the tensor, or the error, into a
        queue. With one queue for several sources, the first message to arrive is the first in it.
        """
        call = CallInfo(None, (like,), group, call_site(), "values")
        link, index = self._message_link(group, source, like.device)
        make = partial(torch.empty, like.numel(), dtype=like.dtype, device=like.device)
        operation = self._operations.start(link, link.receive(make, index, call), call)

        def wait() -> None:
            try:
                result: Any = operation.wait()[0].view(like.shape)
                if self._watch is not None:
                    self._watch.expect(call, source)
            except BaseException as error:
                result = error
                if isinstance(
                    link, GroupLink
                ):  # a time-out closes gloo's connections: else others wait for this process
                    with suppress(RuntimeError):
                        link.pg.recv_anysource([torch.empty(1)], 0).wait(timedelta(milliseconds=1))
            arrived.put((source, result))

        Thread(target=wait, name="fshard-listener", daemon=True).start()

    def connect(self, members: Sequence[int], pairs: Iterable[tuple[int, int]]) -> None:
        """Connect pairs of members, given as indices, where a first message would block the sender: on NCCL."""
        if self._messages is not None:
            self._messages.connect(members, pairs)

    def _message_link(
        self, group: Group, peer: int, device: torch.device, *, is_send: bool = False
    ) -> tuple[Link, int]:
        """Return the link of a message in the memory of a device, and the index of its other end in the link."""
        if self._messages is not None and device.type == self.device_type:
            rank = group.members[peer]
            return self._messages.link(*((self.rank, rank) if is_send else (rank, self.rank))), rank
        return self.link(group) if self._staged else self.host_link(group), peer

    def _from_itself(self, call: CallInfo) -> tuple[Tensor, ...]:
        sent = self._to_itself[call.group.members]
        if not sent:
            raise DeadlockError(f"process {self.rank} waits for {call} from itself, but has sent none.")
        sender, xs = sent.popleft()
        if (sender.stamp ^ call.stamp) & CALL:
            raise MismatchError(
                f"process {self.rank} expects {call} from itself, but has sent {sender}."
                + uneven(call.purpose, sender.purpose)
            )
        return xs

    # -- leaving ------------------------------------------------------------------------------------------------

    def part(self, group: Group, error: BaseException) -> None:
        """Leave a group in which others may wait for this process."""
        self.has_failed = True
        if group.size > 1 and self.near(group.members):
            known = isinstance(error, MismatchError | LostProcessError | CollectiveTimeoutError)
            failed = f"process {self.rank} has failed: {type(error).__name__}: {error}"
            self.link(group).fail(error if known else MismatchError(failed))

    def finish(self, waiting: bool) -> None:
        """End all calls; `waiting` for sent messages to arrive, and raising if some never will."""
        calls = [call for messages in self._to_itself.values() for call, _ in messages] if waiting else []
        if waiting:
            calls += self._operations.finish_sends() + self._neighbours.unreceived()
        if self._watch is not None:
            self._watch.finished()
        self._has_left.set()
        self.has_failed |= not waiting
        if self.has_failed and not self._staged:
            with suppress(RuntimeError):  # the process with the store has failed
                self._store.compare_set("failure", "", f"Process {self.rank} has failed: look for its own error.")
        self._neighbours.close()
        self._messages = None
        groups = (self._links, self._hosts, self._groups)
        for held in (self._to_itself, self._operations.in_progress, *groups, self.scopes):
            held.clear()  # a connection closes with the last reference to it, and graphs still refer to this world
        if calls and not self.has_failed:
            self.has_failed = True
            raise MismatchError("\n  ".join(["Messages were sent but never received:", *sorted({*map(str, calls)})]))

    # -- groups -------------------------------------------------------------------------------------------------

    def link(self, group: Group) -> Link:
        """Return the group as the backend sees it; the first call creates it."""
        members = group.members
        found = self._links.get(members)  # looked up by the processes, which several groups may share
        if found is None:
            if self.near(members):
                found = self._links[members] = Direct(self._neighbours, members, self.rank)
            else:
                found = self.add(members, self.axis_group(members))
        return found

    def host_link(self, group: Group) -> Link:
        """Return the group for tensors in host memory, where the group's own backend is for GPUs."""
        members = group.members
        if members not in self._hosts:
            pg = self.axis_group(members)
            if torch.device("cpu") not in pg._device_types:
                pg = self.make_group(members, "host", backend="gloo")
            self._hosts[members] = GroupLink(pg, members.index(self.rank), len(members), gloo.WIRES)
        return self._hosts[members]

    def add(self, members: tuple[int, ...], pg: Any) -> Link:
        """Use a group of torch.distributed that this process is in."""
        link = self._links.get(members)
        if isinstance(link, GroupLink) and link.pg is pg:
            return link  # another would number its messages from 0 again
        self._groups[members] = pg
        kind = GroupLink if self._staged else NcclLink
        self._links[members] = link = kind(pg, members.index(self.rank), len(members), self._wires)
        if not self._staged:
            # A first call that some members do not make, such as a batch of messages, would hang.
            dist.all_reduce(torch.zeros(1, device=self.device_type), group=pg)
        return link

    def axis_group(self, members: tuple[int, ...]) -> Any:
        """Return the group of torch.distributed along an axis; the first call makes it."""
        if members not in self._groups:
            is_world = members == tuple(range(dist.get_world_size()))
            self._groups[members] = dist.group.WORLD if is_world else self.make_group(members, "axis")
        return self._groups[members]

    def make_group(self, members: tuple[int, ...], purpose: str, backend: str | None = None) -> Any:
        """Make a group of torch.distributed, in its members alone; bind its GPU, unless a backend is named.

        Its name depends on members and purpose. `dist.new_group` hashes the number of groups that a process is in,
        which may differ among them, and lets all processes divide the world's NCCL communicator, if a GPU is bound.
        """
        world: Any = dist.group.WORLD
        gpu, world.bound_device_id = world.bound_device_id, None
        backend, device = (backend, None) if backend is not None else (dist.get_backend(), gpu)
        name = hashlib.sha1(f"fshard {purpose} {members}".encode(), usedforsecurity=False).hexdigest()
        n, index, store = len(members), members.index(self.rank), _C10D._get_default_store()
        try:
            pg, _ = _C10D._new_process_group_helper(
                n, index, [*members], backend, store, name, timeout=self.timeout, device_id=device
            )
        finally:
            world.bound_device_id = gpu
        _C10D._world.pg_group_ranks[pg] = {rank: index for index, rank in enumerate(members)}
        return pg

    def near(self, members: tuple[int, ...]) -> bool:
        """Return True if all these processes are on this machine."""
        return self._neighbours.known.keys() >= {*members} - {self.rank}

    def is_near(self, mesh: Mesh) -> bool:
        """Return True if all processes of a mesh and of its parent are on this machine."""
        return self.near(mesh.ranks or tuple(range(mesh.root_size)))


def _unpack(
    move: Wired, shapes: list[torch.Size], device: torch.device, widths: list[int], n: int, rows: Tensor
) -> tuple[Tensor, ...]:
    """Return the results of a collective on tensors that were packed into one buffer, in rows of these widths."""
    rows = rows.to(device)
    if len(shapes) == 1:
        return (move.unpack(rows, shapes[0], n),)
    parts = zip(rows.split(widths, dim=-1), shapes, strict=True)
    return tuple([move.unpack(part, shape, n) for part, shape in parts])


def _split(likes: tuple[Tensor, ...], flat: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors of a message that was received as one buffer."""
    if not likes[0].is_cpu:
        flat = flat.to(likes[0].device)
    if len(likes) == 1:
        return (flat.view(likes[0].shape),)
    parts = flat.split([like.numel() for like in likes])
    return tuple([part.view(like.shape) for part, like in zip(parts, likes, strict=True)])


# -- joining and leaving ----------------------------------------------------------------------------------------


def join(device_type: str, timeout: float | None) -> ProcessWorld:
    """Join the world of processes, or return the one that this process is in."""
    if _state["world"] is not None and dist.is_initialized():
        if device_type == "cuda" and _state["world"].device_type == "cpu":
            raise MeshError('device must be "cpu"; got "cuda" after a mesh of CPUs. Make the mesh of GPUs first.')
        return _state["world"]
    limit = time_limit(timeout)
    if not dist.is_initialized():
        import_module("torch.distributed.nn.functional")  # torch.func.grad imports it, and then it would keep the group
        meet_all(device_type, limit)
        _state["process"] = os.getpid()
        atexit.register(_leave_at_exit)
        _share_random_state(device_type)
    world = _state["world"] = ProcessWorld(limit, device_type)
    return world


def leave(*, waiting: bool = True) -> None:
    """Leave the world of processes, if it was joined here; by default, wait until others receive messages, or raise."""
    world, _state["world"], _state["meshes"] = _state["world"], None, {}
    if world is not None and dist.is_initialized():
        try:
            world.finish(waiting)
        finally:
            hangs = world.has_failed and world.backend != "gloo"  # in calls that the others may never make
            (_C10D._abort_process_group if hangs else dist.destroy_process_group)()


def _leave_at_exit() -> None:
    if os.getpid() == _state["process"]:  # else this is a fork of the process that joined
        leave(waiting=not hasattr(sys, "last_value"))  # after an error the others may never receive anything


def _share_random_state(device_type: str) -> None:
    """Begin with the random states of process 0 everywhere, as virtual devices begin with their caller's.

    Else `torch.randn(...)` given as a global value would be another value in every process.
    """
    for kind in dict.fromkeys(("cpu", device_type)):
        state = random_state(kind)  # in host memory
        dist.broadcast(state, 0)
        set_random_state(kind, state)


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """Return torch's DeviceMesh for a mesh, made once; its groups are the ones that collectives use."""
    found = _state["meshes"].get(mesh)
    if found is None:
        if mesh.parent is not None:
            root = type(mesh)(mesh.parent, mesh.runtime, mesh.device_type, None, mesh.ranks)
            found = device_mesh(root)[mesh.axis_names]
        else:
            world, ranks = ProcessWorld.of(mesh), mesh.ranks or tuple(range(mesh.size))
            device = world.device(mesh)
            groups = [
                world.axis_group(ranks[device - device // stride % size * stride :: stride][:size])
                for size, stride in mesh.steps.values()
            ]
            grid = torch.tensor(ranks).reshape(tuple(mesh.shape.values()))
            found = DeviceMesh.from_group(groups, mesh.device_type, grid, mesh_dim_names=mesh.axis_names)
        use_groups(mesh, found)
    return found


def use_groups(mesh: Mesh, known: DeviceMesh) -> None:
    """Use the groups of a DeviceMesh for the axes of a mesh."""
    _state["meshes"][mesh] = known
    world = ProcessWorld.of(mesh)
    for axis in mesh.axis_names:
        pg: Any = known.get_group(axis)
        if isinstance(pg, dist.ProcessGroup) and not world.near(members := tuple(dist.get_process_group_ranks(pg))):
            world.add(members, pg)
            n = len(members)
            world.connect(members, {(i, (i + step) % n) for i in range(n) for step in (1, -1)})  # a ring
