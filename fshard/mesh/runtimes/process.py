"""The process runtime: one process per device, over torch.distributed.

Groups are those of torch's `DeviceMesh`, so a mesh can be passed to torch and back. Tensors of one dtype share a
buffer. The wire formats are one table per kind of link: `direct.WIRES` between processes of one machine, `gloo.WIRES`
between machines, `native.WIRES` for NCCL.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fshard.errors import CollectiveTimeoutError, DeadlockError, LostProcessError, MeshError, MismatchError
from fshard.mesh.collectives.moves import Purpose, describe, named, purpose, uneven
from fshard.mesh.runtimes import gloo, native
from fshard.mesh.runtimes.abstract import Done
from fshard.mesh.runtimes.helper import Departing
from fshard.mesh.runtimes.link import Departed, GroupLink, Link, What, shapes_of
from fshard.mesh.runtimes.place import meet_all
from fshard.mesh.runtimes.running import Awaited, Running, UnderWay, explain, go_on
from fshard.mesh.runtimes.watch import Watch, watching
from fshard.mesh.shared_memory import apart
from fshard.mesh.shared_memory.direct import Direct, TransferTurn
from fshard.mesh.shared_memory.fast_path import FastPath, MessageLane
from fshard.mesh.shared_memory.neighbours import Neighbours, meet

if TYPE_CHECKING:
    from fshard.mesh.collectives.moves import Wired
    from fshard.mesh.layout.mesh import Mesh
    from fshard.mesh.spmd.scope import Group, Pending, Scope
    from fshard.source import Site

_state: dict[str, Any] = {"world": None, "meshes": {}, "process": None}


class Unpacking:
    """A collective in progress on tensors in one buffer, of these widths."""

    __slots__ = ("_move", "_n", "_running", "_widths", "_xs")

    def __init__(self, running: Running, move: Wired, xs: tuple[Tensor, ...], widths: list[int], n: int) -> None:
        self._running, self._move, self._xs, self._widths, self._n = running, move, xs, widths, n

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for it, and take it apart."""
        rows, xs, unpack, n = self._running.wait(), self._xs, self._move.unpack, self._n
        if rows.is_cpu and not xs[0].is_cpu:
            rows = rows.to(xs[0].device)
        if len(xs) == 1:
            return (unpack(rows, xs[0].shape, n),)
        return tuple([unpack(part, x.shape, n) for part, x in zip(rows.split(self._widths, dim=-1), xs, strict=True)])


class Apart:
    """A collective in progress on tensors in their own memory; its results are other tensors."""

    __slots__ = ("_into", "_running")

    def __init__(self, running: Running, into: tuple[Tensor, ...]) -> None:
        self._running, self._into = running, into

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for it."""
        self._running.wait()
        return self._into


class Several:
    """Several collectives of one call in progress: which results belong to which tensor."""

    __slots__ = ("_places", "_under_way")

    def __init__(self, under_way: Sequence[Pending], places: Sequence[Sequence[int]]) -> None:
        self._under_way, self._places = under_way, places

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for all, and put the results in order."""
        found = dict[int, Tensor]()
        for one, places in zip(self._under_way, self._places, strict=True):
            found.update(zip(places, one.wait(), strict=True))
        return tuple([found[place] for place in range(len(found))])


class Receiving:
    """A message in progress; under FSHARD_CHECK=1 its waiter first checks that it is the expected one."""

    __slots__ = ("_awaited", "_likes", "_look")

    def __init__(self, awaited: Awaited, likes: tuple[Tensor, ...], look: Callable[[], None] | None) -> None:
        self._awaited, self._likes, self._look = awaited, likes, look

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for it, and take it apart."""
        if self._look is not None:
            self._look()
        flat, likes = self._awaited.wait(), self._likes
        if not likes[0].is_cpu:
            flat = flat.to(likes[0].device)
        if len(likes) == 1:
            return (flat.view(likes[0].shape),)
        parts = flat.split([like.numel() for like in likes])
        return tuple([part.view(like.shape) for part, like in zip(parts, likes, strict=True)])


_KEPT = 16 << 20
"""Bytes up to which the C library keeps freed memory: glibc keeps blocks up to the largest one freed so far.

Otherwise each result of 1 MB is new pages, which takes as long as the collective. (glibc ignores blocks above 32 MB.)
"""


class ProcessWorld:
    """The world of processes, seen from this one."""

    has_values = True
    has_fast_paths = True

    def __init__(self, timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.timeout = timeout
        self.backend = dist.get_backend()
        self._wires = native.WIRES if self.backend == "nccl" else gloo.WIRES
        self._neighbours = meet(timeout) if self.backend == "gloo" else Neighbours({}, timeout)
        self._staged = self.backend != "nccl"
        self.scopes: dict[object, Scope] = {}
        self._under_way: UnderWay = {}
        self._links: dict[tuple[int, ...], Link] = {}
        self._hosts: dict[tuple[int, ...], Link] = {}
        self._outgoing: list[Departed] = []
        self._to_itself: dict[tuple[int, ...], deque[tuple[Site, Purpose, tuple[Tensor, ...]]]] = defaultdict(deque)
        self._watch = self._new_watch() if watching() else None
        torch.empty(_KEPT, dtype=torch.uint8)  # freed immediately

    def _new_watch(self) -> Watch:
        return Watch(self.rank, self.timeout, self._neighbours.has_gone, partial(go_on, self._under_way))

    @staticmethod
    def of(mesh: Mesh) -> ProcessWorld:
        """Return the world of a mesh; `make_mesh` joined it."""
        world = _state["world"]
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
        self, move: Wired, xs: tuple[Tensor, ...], group: Group, site: Site, into: tuple[Tensor, ...] | None = None
    ) -> Pending:
        """Start the move's wire on tensors in their own memory, or packed into one buffer (large ones: one each)."""
        n = group.size
        if n == 1:
            return Done(tuple(move.meaning([x])[0].clone() for x in xs))
        if into is not None or (len(xs) > 1 and apart.suits(move, xs)):
            link = self.link(group)
            if isinstance(link, Direct) and xs[0].is_cpu and len(xs) <= apart.MANY:
                into = apart.room(move, xs, n) if into is None else into
                what, meet = self._what(move, xs, group, site)
                wire = apart.wire(TransferTurn(link, link.number(), what), move, xs, into)
                return Apart(Running(link, wire, self.timeout, what, self._under_way, meet), into)
        large = [place for place, x in enumerate(xs) if x.nbytes >= apart.LARGE] if len(xs) > 1 else []
        if large:
            small = [place for place in range(len(xs)) if place not in large]
            places = [*([small] if small else []), *([place] for place in large)]
            alone = [self._start(move, tuple([xs[place] for place in some]), group, site) for some in places]
            return Several(alone, places)
        return self._start(move, xs, group, site)

    def _start(self, move: Wired, xs: tuple[Tensor, ...], group: Group, site: Site) -> Unpacking:
        n, widths = group.size, list[int]()
        what, meet = self._what(move, xs, group, site)
        if len(xs) == 1:
            buffer = move.pack(xs[0], n)
        else:
            packed = [move.pack(x, n) for x in xs]
            widths = [one.shape[-1] for one in packed]
            buffer = torch.cat(packed, dim=-1)
        if self._staged and not buffer.is_cpu:
            buffer = buffer.cpu()
        buffer = buffer.contiguous()
        link = self.link(group) if self._staged or not buffer.is_cpu else self.host_link(group)
        running = Running(link, link.begin(move, buffer, what), self.timeout, what, self._under_way, meet)
        return Unpacking(running, move, xs, widths, n)

    def _what(
        self, move: Wired, xs: tuple[Tensor, ...], group: Group, site: Site
    ) -> tuple[What, Callable[[], None] | None]:
        """Return the number of the call and, under FSHARD_CHECK=1, the check that all processes make it."""
        meet = None if self._watch is None else self._watched(self._watch, move, xs, group, site)
        return What(move, xs, group, site), meet

    def _watched(
        self, watch: Watch, move: Wired, xs: tuple[Tensor, ...], group: Group, site: Site
    ) -> Callable[[], None] | None:
        """Publish a collective; return the check that the others start the same, if it is still to be made."""
        meeting = watch.start(group, f"{named(describe(move), purpose())} of {shapes_of(xs)}{site.given}", site)
        if self.near(group.members) or (self._staged and group.members in self._links):
            return partial(watch.meet, meeting)
        watch.meet(meeting)  # calls have no tags on NCCL, and to make a group all have to come
        return None

    def agree(self, call: str, group: Group, site: Site) -> None:
        """Raise on all processes of a group unless all make this call (FSHARD_CHECK=1 only)."""
        if self._watch is not None and group.size > 1:
            self._watch.meet(self._watch.start(group, call, site))

    def fast_path(self, move: Wired, group: Group, x: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Return the fast path for tensors like this one: only on one machine and without FSHARD_CHECK=1."""
        if group.size == 1 or self._watch is not None or not self.near(group.members):
            return None
        link = self.link(group)
        assert isinstance(link, Direct)
        return FastPath(move, group, x, link, self.timeout, self._under_way).take

    # -- messages -----------------------------------------------------------------------------------------------

    def lane(self, like: Tensor, group: Group, place: int, site: Site) -> MessageLane | None:
        """Return the fast path for messages like this one: only on one machine and without FSHARD_CHECK=1."""
        if place == group.index or self._watch is not None or not like.is_cpu or not self.near(group.members):
            return None
        link = self.link(group)
        assert isinstance(link, Direct)
        return MessageLane(like, group, place, site, link, self.timeout, self._under_way)

    def send(self, xs: tuple[Tensor, ...], group: Group, to: int, site: Site) -> None:
        """Send tensors as one buffer, which is kept alive until it is sent."""
        if self._outgoing:
            self._outgoing = [one for one in self._outgoing if not one.work.is_completed()]
        if self._watch is not None:
            self._watch.sent(group, to, named(shapes_of(xs), purpose()) + site.given, site)
        if to == group.index:
            self._to_itself[group.members].append((site, purpose(), tuple(x.detach().clone() for x in xs)))
            return
        if self._staged and not xs[0].is_cpu:
            xs = tuple(x.cpu() for x in xs)
        what = What(None, xs, group, site)
        try:
            departed = self.link(group).send(xs, to, what)
        except RuntimeError as error:
            explain(error, self.timeout, what)
        if departed is not None:
            self._outgoing.append(departed)

    def finish(self, waiting: bool) -> None:
        """End all calls; `waiting` for sent messages to arrive, which needs this process."""
        for departed in self._outgoing if waiting else ():
            with suppress(RuntimeError):  # of a receiver that is no more
                departed.work.wait(self.timeout)
        if self._watch is not None:
            self._watch.finished()
        self._neighbours.close()
        for held in (self._outgoing, self._to_itself, self._under_way, self._links, self._hosts, self.scopes):
            held.clear()  # a connection closes with the last reference to it, and graphs still refer to this world

    def receive(self, likes: tuple[Tensor, ...], group: Group, source: int, site: Site) -> Receiving | Done:
        """Start receiving tensors like these, as one buffer."""
        look = None
        if self._watch is not None:
            expected = named(shapes_of(likes), purpose()) + site.given
            look = partial(self._watch.expect, group, source, expected, site)
        if source == group.index:
            if look is not None:
                look()
            return Done(self._from_itself(likes, group, site))
        size, device = sum([like.numel() for like in likes]), "cpu" if self._staged else likes[0].device
        make = partial(torch.empty, size, dtype=likes[0].dtype, device=device)
        what = What(None, likes, group, site)
        return Receiving(Awaited(self.link(group), make, source, self.timeout, what, self._under_way), likes, look)

    def part(self, group: Group, error: BaseException) -> None:
        """Leave a group in which others may wait for this process."""
        if group.size > 1 and self.near(group.members):
            known = isinstance(error, MismatchError | LostProcessError | CollectiveTimeoutError)
            failed = f"process {self.rank} has failed: {type(error).__name__}: {error}"
            self.link(group).broken(error if known else MismatchError(failed))

    def _from_itself(self, likes: tuple[Tensor, ...], group: Group, site: Site) -> tuple[Tensor, ...]:
        sent, what = self._to_itself[group.members], What(None, likes, group, site)
        if not sent:
            raise DeadlockError(f"process {self.rank} waits for {what} from itself, but has sent none.")
        sender, meant, xs = sent.popleft()
        if (shapes_of(xs), meant, sender.leaves) != (shapes_of(likes), what.purpose, site.leaves):
            raise MismatchError(
                f"process {self.rank} expects {what} from itself, but has sent {named(shapes_of(xs), meant)}{sender.given}."
                + uneven(what.purpose, meant)
            )
        return xs

    # -- groups -------------------------------------------------------------------------------------------------

    def link(self, group: Group) -> Link:
        """Return the group as the backend sees it; the first call creates it."""
        members = group.members
        found = self._links.get(members)  # looked up by the processes, which several groups may share
        if found is None:
            if self.near(members):
                found = self._links[members] = Direct(self._neighbours, members, self.rank)
            elif members == tuple(range(dist.get_world_size())):
                found = self.add(members, dist.group.WORLD)
            else:
                found = self.add(
                    members, dist.new_group(list(members), use_local_synchronization=True, sort_ranks=False)
                )
        return found

    def host_link(self, group: Group) -> Link:
        """Return the group for tensors in host memory, where the group's own backend is for GPUs."""
        members = group.members
        if members not in self._hosts:
            pg: Any = dist.new_group(list(members), backend="gloo", use_local_synchronization=True, sort_ranks=False)
            self._hosts[members] = GroupLink(pg, members.index(self.rank), len(members), gloo.WIRES, Departing())
            calm_gloo_threads()
        return self._hosts[members]

    def add(self, members: tuple[int, ...], pg: Any) -> Link:
        """Remember a group of torch.distributed that this process is in."""
        departing = Departing() if self.backend == "gloo" else None
        self._links[members] = link = GroupLink(pg, members.index(self.rank), len(members), self._wires, departing)
        if self.backend == "gloo":
            calm_gloo_threads()
        return link

    def near(self, members: tuple[int, ...]) -> bool:
        """Return True if all these processes are on this machine."""
        return self._neighbours.known.keys() >= {*members} - {self.rank}

    def is_near(self, mesh: Mesh) -> bool:
        """Return True if all processes of a mesh and of its parent are on this machine."""
        return self.near(mesh.ranks or tuple(range(mesh.root_size)))


# -- joining and leaving ----------------------------------------------------------------------------------------


def join(device_type: str, timeout: float | None) -> ProcessWorld:
    """Join the world of processes, or return the one that this process is in."""
    if _state["world"] is not None and dist.is_initialized():
        return _state["world"]
    limit = timedelta(seconds=timeout if timeout is not None else float(os.environ.get("FSHARD_TIMEOUT", "600")))
    if not dist.is_initialized():
        import_module("torch.distributed.nn.functional")  # torch.func.grad imports it, and then it would keep the group
        meet_all(device_type, limit)
        _state["process"] = os.getpid()
        atexit.register(_leave_at_exit)
        _share_random_state()
    world = _state["world"] = ProcessWorld(limit)
    calm_gloo_threads()
    return world


def leave(*, waiting: bool = True) -> None:
    """Leave the world of processes, if it was joined here; by default, once the messages sent have been received."""
    if _state["world"] is not None and dist.is_initialized():
        _state["world"].finish(waiting)
        dist.destroy_process_group()
    _state["world"], _state["meshes"] = None, {}


def _leave_at_exit() -> None:
    if os.getpid() == _state["process"]:  # else this is a fork of the process that joined
        leave(waiting=not hasattr(sys, "last_value"))  # after an error the others may never receive anything


def _share_random_state() -> None:
    """Begin with the random state of process 0 everywhere, as virtual devices begin with their caller's.

    Else `torch.randn(...)` given as a global value would be another value in every process.
    """
    state = torch.default_generator.get_state()
    state = state.cuda() if dist.get_backend() == "nccl" else state
    dist.broadcast(state, 0)
    torch.default_generator.set_state(state.cpu())


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """Return torch's DeviceMesh for a mesh, made once; its groups are the ones that collectives use."""
    found = _state["meshes"].get(mesh)
    if found is None:
        if mesh.parent is not None:
            root = type(mesh)(mesh.parent, mesh.runtime, mesh.device_type, None, mesh.ranks)
            found = device_mesh(root)[mesh.axis_names]
        elif mesh.ranks is None:
            found = init_device_mesh(mesh.device_type, tuple(mesh.shape.values()), mesh_dim_names=mesh.axis_names)
        else:
            grid = torch.tensor(mesh.ranks).reshape(tuple(mesh.shape.values()))
            found = DeviceMesh(mesh.device_type, grid, mesh_dim_names=mesh.axis_names)
        remember(mesh, found)
    return found


def remember(mesh: Mesh, known: DeviceMesh) -> None:
    """Use the groups of a DeviceMesh for the axes of a mesh."""
    _state["meshes"][mesh] = known
    world = ProcessWorld.of(mesh)
    for axis in mesh.axis_names:
        pg: Any = known.get_group(axis)
        if isinstance(pg, dist.ProcessGroup) and not world.near(members := tuple(dist.get_process_group_ranks(pg))):
            world.add(members, pg)


@lru_cache(maxsize=1)
def _may_calm() -> bool:
    return sys.platform == "linux" and hasattr(os, "sched_setscheduler") and os.environ.get("FSHARD_CALM", "1") != "0"


def calm_gloo_threads() -> None:
    """Schedule gloo's polling threads as batch work, so that they do not preempt the threads they wait for.

    gloo's event loop polls while another thread of the process holds what it needs; if that thread was preempted, both
    lose a scheduler tick (4 ms for a message of 0.1 ms). Only this process's gloo threads are changed; FSHARD_CALM=0
    disables it.
    """
    if not _may_calm():
        return
    for thread in Path("/proc/self/task").iterdir():
        try:
            if (thread / "comm").read_text().startswith("gloo_tcp"):
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
        except OSError:  # the thread has ended, or the system forbids it
            continue
