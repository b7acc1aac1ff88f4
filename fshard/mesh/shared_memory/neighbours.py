"""The processes of one machine: messages through shared memory, tensors copied from the sender's memory.

gloo sends everything over loopback TCP, with its own threads. Processes of one machine need neither. A short message
in a ring (see `rings`) contains a small tensor or the address of a large one; the receiver then copies it from the
sender's memory (process_vm_readv), once, and confirms it.

    process 0                                        process 1
    "x is at 0x7f.., 8 MB"     ------------------>   copies it
    may modify x again         <------------------   "read"

Every message has a stamp of its call, so processes in different calls detect it. A process that waits, for a message
or for space in a ring, receives what all others send meanwhile, and advances all that is in progress. It yields the
processor between looks, and then sleeps until a byte arrives in a Unix socket, one for each pair. The sockets of a
process that ends, or leaves the world, close, which ends the waits of the others.

A pool recycles large host buffers. A new buffer of 32 MB costs more in page faults than the message it is for (5 times
adding into a mapped one). The pool keeps the storages it has returned, and returns one again when it has no other
reference.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from math import prod
from pathlib import Path
from threading import RLock
from typing import Any, NoReturn, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from fshard.errors import MismatchError
from fshard.mesh.collectives.moves import PURPOSES, uneven
from fshard.mesh.runtimes.link import CallInfo, line_of
from fshard.mesh.shared_memory import rings
from fshard.mesh.shared_memory.rings import ASLEEP, RECEIVED, Putter, Taker

INLINE = 256 << 10
"""Bytes up to which a tensor is sent inline: one more copy, but no wait until it has been read."""
GLANCES = 400
"""Number of checks for a message, yielding the CPU in between, before sleeping: waking up takes longer."""
MAX_SLEEP = 0.1
"""Maximal seconds to sleep before the time limit is checked."""
MAX_SPANS = 1024
"""Spans of memory that the system reads in one call."""


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Neighbour:
    """Another process of this machine; its messages are in `inbox`, by key, until they are received."""

    def __init__(self, rank: int, pid: int, end: socket.socket, libc: Any) -> None:
        self.rank, self.pid, self.socket, self._libc = rank, pid, end, libc
        end.setblocking(True)  # whatever the default: with a time-out of Python's, flags are not heeded
        mine = rings.made()
        socket.send_fds(end, [b"ring"], [mine])
        _, (theirs,), _, _ = socket.recv_fds(end, 4, 1)
        self.outgoing, self.incoming = Putter(mine, self._wake), Taker(theirs)
        for number in (mine, theirs):
            os.close(number)
        self.offer, self.look, self.inbox = self.outgoing.put, self.incoming.look, self.incoming.inbox
        self.gone, self._parted = False, cast("str | None", None)
        self.sent, self.calls = 0, deque[CallInfo](maxlen=16)

    def _has_gone(self, *message: Any) -> NoReturn:
        raise self.lost()

    def _wake(self) -> None:
        with suppress(OSError):  # it has ended, or has enough wake-ups
            self.socket.send(b"!", socket.MSG_DONTWAIT)

    def check_alive(self) -> None:
        """Drain its wake-ups; detect that it has ended or left."""
        try:
            while not self.gone:
                self.gone = not self.socket.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            self.gone = True
        self.offer = self._has_gone

    def read(self, into: int, address: int, size: int) -> None:
        """Copy memory of the other process."""
        done = 0
        while done < size:
            here, there = _Span(into + done, size - done), _Span(address + done, size - done)
            got = self._libc.process_vm_readv(self.pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if got <= 0:
                raise self._unreadable(ctypes.get_errno())
            done += got
        if self.incoming.closed:
            raise self.lost()

    def read_all(self, here: Sequence[int], there: Sequence[int], sizes: Sequence[int]) -> None:
        """Copy many spans of memory of the other process, from the addresses `there` to `here`."""
        spans = list(zip(here, there, sizes, strict=True))
        for first in range(0, len(spans), MAX_SPANS):
            some = spans[first : first + MAX_SPANS]
            ours = array("q", [number for into, _, size in some for number in (into, size)])
            theirs = array("q", [number for _, address, size in some for number in (address, size)])
            vectors = ours.buffer_info()[0], len(some), theirs.buffer_info()[0], len(some)
            if self._libc.process_vm_readv(self.pid, *vectors, 0) != sum(sizes[first : first + MAX_SPANS]):
                for into, address, size in some:  # too much for one call
                    self.read(into, address, size)
        if self.incoming.closed:
            raise self.lost()

    def _unreadable(self, code: int) -> RuntimeError:
        """Return the reason why memory cannot be read: an ending process loses its memory shortly before its sockets."""
        until = time.monotonic() + 1
        while not self.gone and time.monotonic() < until:
            self.check_alive()
            time.sleep(0.001)
        failure = f"reading the memory of process {self.rank} failed: {os.strerror(code)}; FSHARD_DIRECT=0 avoids it"
        return self.lost() if self.gone else RuntimeError(failure)

    def close(self, error: BaseException | None = None) -> None:
        """Take leave, because of an error perhaps."""
        if self._parted is None and isinstance(error, MismatchError):
            self._parted, self.look = str(error), lambda key: False  # later messages belong to another call
        self.outgoing.close()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.gone, self.offer = True, self._has_gone

    def lost(self) -> RuntimeError:
        """Return the error for a neighbour that has ended, or that this process has left."""
        if self._parted is not None:
            return MismatchError(
                "The processes of this group have parted, and the group is lost: start them again. What parted them: "
                f"{self._parted}"
            )
        return RuntimeError(f"Connection closed by process {self.rank}")


def mismatch(call: CallInfo, peer: Neighbour, stamp: int) -> MismatchError:
    """Return the error for a neighbour in another call."""
    mine, others = PURPOSES[call.stamp & 3], PURPOSES[stamp & 3]
    return MismatchError(
        f"{call}: process {peer.rank} makes another call at {line_of(stamp, call)}, or on another shape, dtype or tree. "
        "Every process of a group must call the same collectives in the same order and line, on equal shapes, dtypes and "
        f"trees; run with FSHARD_CHECK=1 to see both calls. FSHARD_LINES=0 permits other lines.{uneven(mine, others)}"
    )


Need = tuple[Neighbour, int]
"""A message to receive: its sender and key."""


class Neighbours:
    """All other processes of this machine, by rank."""

    def __init__(self, known: Mapping[int, Neighbour], timeout: timedelta, libc: Any = None) -> None:
        self.known, self.timeout, self._libc, self._sleepers = known, timeout.total_seconds(), libc, 0
        self.lock = RLock()  # held by the thread that receives, or steps a wire
        if known:
            this = ref(self)
            os.register_at_fork(after_in_child=lambda: _close_sockets(this()))

    def press(self, to: Neighbour, message: tuple[int, ...]) -> None:
        """Send when there is space; receive meanwhile, since the others may wait for the same."""
        until = time.monotonic() + self.timeout
        while not to.offer(*message):
            self._sleep(0.001)
            if to.gone:
                raise to.lost()
            if time.monotonic() > until:
                raise RuntimeError(f"Timed out sending to process {to.rank}")

    def wait(self, needs: Sequence[Need], advance: Callable[[], bool]) -> None:
        """Wait for messages; advance whatever else is in progress, since others may wait for that."""
        until, glances = 0.0, GLANCES
        for peer, key in needs:
            while not self.look(peer, key):
                if peer.gone and not self.look(peer, key):
                    raise peer.lost()
                if advance():
                    continue
                if glances:
                    glances -= 1
                    os.sched_yield()
                    continue
                now = time.monotonic()
                until = until or now + self.timeout
                if now > until:
                    raise RuntimeError(f"Timed out waiting for process {peer.rank}")
                self._sleep(MAX_SLEEP)

    def look(self, peer: Neighbour, key: int) -> bool:
        """Return True if a message has arrived."""
        with self.lock:
            return peer.look(key)

    def _sleep(self, seconds: float) -> None:
        """Sleep until a message arrives; receive what all others have sent."""
        self._announce_sleep(1)
        try:
            self._poll(seconds)
        finally:
            self._announce_sleep(-1)
        with self.lock:
            for peer in self.known.values():
                peer.check_alive()
                peer.look(None)

    def _announce_sleep(self, more: int) -> None:
        """Count the threads that sleep, and let writers know if there are any."""
        with self.lock:
            self._sleepers += more
            for peer in self.known.values():
                peer.incoming.words[ASLEEP] = self._sleepers

    def _poll(self, seconds: float) -> None:
        """Wait until a socket is readable, unless a message arrived before the others could see that this one sleeps."""
        rings.fence(self._libc)
        sockets = select.poll()  # one per thread: several may sleep
        for peer in self.known.values():
            if not peer.gone:
                sockets.register(peer.socket.fileno(), select.POLLIN)
        if not any(peer.incoming.is_filled for peer in self.known.values()):
            sockets.poll(seconds * 1e3)

    def has_gone(self, rank: int) -> bool:
        """Return True if a process is a neighbour and has ended."""
        peer = self.known.get(rank)
        if peer is None:
            return False
        peer.check_alive()
        return peer.gone

    def unreceived(self) -> list[CallInfo]:
        """Announce that this process receives no more, and return its messages that others leave without."""
        calls, until = list[CallInfo](), time.monotonic() + self.timeout
        for peer in self.known.values():
            peer.outgoing.close()
        for peer in self.known.values():
            words = peer.outgoing.words
            while not (gone := peer.gone or peer.incoming.closed) and words[RECEIVED] < peer.sent:
                if time.monotonic() > until:
                    break
                self._sleep(0.001)
            if gone and (count := peer.sent - words[RECEIVED]):
                calls += [*peer.calls][-count:]
        return calls

    def close(self) -> None:
        """Leave all others."""
        for one in self.known.values():
            one.close()
            one.socket.close()


def _close_sockets(neighbours: Neighbours | None) -> None:
    """Close the sockets in a child of this process: else the others would not notice when this one ends."""
    for one in neighbours.known.values() if neighbours is not None else ():
        one.socket.close()
        one.gone = True


# -- finding them -----------------------------------------------------------------------------------------------


def meet(timeout: timedelta) -> Neighbours:
    """Find the other processes of this machine; a collective of the world.

    Returns none if one of them may not read the memory of another.
    """
    rank, libc = dist.get_rank(), _libc()
    token = torch.tensor([secrets.randbits(62)])  # a process that can read this can read this process's memory
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        table = _shared([_machine() if libc is not None else 0, os.getpid(), int(token), token.data_ptr()])
        names = [f"\0fshard-{pid}-{secret}" for _, pid, secret, _ in table]
        near = [other for other, row in enumerate(table) if row[0] == table[rank][0] != 0]
        if near:
            listener.bind(names[rank])
            listener.listen(len(near))
            listener.settimeout(timeout.total_seconds())
        able = len(near) > 1 and _readable(libc, table[near[near.index(rank) - 1]])
        verdicts = _shared([able])  # from now on, all listen
        if not near or not all(verdicts[other][0] for other in near):
            return Neighbours({}, timeout)
        ends: dict[int, socket.socket] = {}
        for other in near:
            if other > rank:
                ends[table[other][1]] = end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                end.connect(names[other])
        awaited = {table[other][1] for other in near if other < rank}
        while awaited:
            end, _ = listener.accept()
            pid, _, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if pid in awaited:  # any process may connect
                awaited.remove(pid)
                ends[pid] = end
    known = {other: Neighbour(other, table[other][1], ends[table[other][1]], libc) for other in near if other != rank}
    return Neighbours(known, timeout, libc)


def _shared(mine: list[int]) -> list[list[int]]:
    """All-gather a row of numbers among all processes of the world."""
    row = torch.tensor(mine, dtype=torch.int64)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [one.tolist() for one in rows]


def _readable(libc: Any, row: list[int]) -> bool:
    into = ctypes.c_int64(0)
    here, there = _Span(ctypes.addressof(into), 8), _Span(row[3], 8)
    got = libc.process_vm_readv(row[1], ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return got == 8 and into.value == row[2]


def _libc() -> Any:
    """Return the C library if it can read other processes' memory and is to do so."""
    if sys.platform != "linux" or os.environ.get("FSHARD_DIRECT", "1") == "0":
        return None
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv") or not rings.are_supported(libc):
        return None
    word = ctypes.c_ulong
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.process_vm_readv.argtypes = [ctypes.c_int, ctypes.c_void_p, word, ctypes.c_void_p, word, word]
    _let_siblings_read(libc)
    return libc


def _let_siblings_read(libc: Any) -> None:
    """Where Yama lets only parents read (ptrace_scope 1), let the user's other processes read this one's memory."""
    with suppress(OSError):
        if Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip() == "1":
            set_ptracer, any_process = 0x59616D61, ctypes.c_ulong(-1)
            libc.prctl(set_ptracer, any_process, 0, 0, 0)


def _machine() -> int:
    """Return a number that is equal for the processes that can meet: on one machine, in one container, of one user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net", "user")]
    except OSError:
        return 0
    return 1 + zlib.crc32(repr((boot, spaces, os.getuid())).encode())


SMALLEST = 256 << 10
"""Bytes from which on a buffer is pooled: the C library returns larger ones to the system."""
LARGEST_POOL = 1 << 30
"""Bytes that the pool may keep."""

_use_count: Any = torch._C._storage_Use_Count  # pyright: ignore[reportPrivateUsage]
_pool: list[torch.UntypedStorage] = []
_lock = threading.Lock()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor, in recycled memory if an idle buffer has that size."""
    size = prod(shape) * dtype.itemsize
    if size < SMALLEST:
        return torch.empty(shape, dtype=dtype, device="cpu")
    fresh: Any = torch.empty(0, dtype=dtype, device="cpu")  # torch's stub of set_ has no shape argument
    with _lock:
        storage = next((kept for kept in _pool if kept.nbytes() == size and _idle(kept)), None)
        if storage is None:
            storage = torch.UntypedStorage(size)
            _make_room(size)
            _pool.append(storage)
        return fresh.set_(storage, 0, shape)


def _idle(storage: torch.UntypedStorage) -> bool:
    return _use_count(storage._cdata) == 1  # pyright: ignore[reportPrivateUsage]


def _make_room(size: int) -> None:
    """Free idle buffers of other sizes, oldest first; stop tracking busy ones if that is not enough."""
    while _pool and sum(kept.nbytes() for kept in _pool) + size > LARGEST_POOL:
        place = next((place for place, kept in enumerate(_pool) if _idle(kept)), 0)
        del _pool[place]
