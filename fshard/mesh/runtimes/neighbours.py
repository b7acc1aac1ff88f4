"""The processes of one machine: words between them go through sockets, bytes are copied from where they lie.

gloo sends everything over loopback TCP, by threads of its own.  Neighbours need neither.  A short message over a Unix
socket holds a small tensor, or says where a large one lies; then the receiver copies it straight out of the sender's
memory (process_vm_readv), once, and says that it has.

    process 0                                        process 1
    "x lies at 0x7f.., 8 MB"   ------------------>   copies it
    may change x again         <------------------   "read"

Every message bears a stamp of the call that it belongs to, so processes that are in different calls find out.  Nobody
waits for a socket to take a message while another waits for the same: who cannot send first takes in what has arrived.
A process that ends, or leaves the world, closes its sockets, and whoever waits for it is told.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import socket
import struct
import sys
import time
import zlib
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

INLINE = 64 << 10
"""Bytes up to which a tensor travels in the message itself."""
GLANCES = 20
"""How often to look for a message, letting others run in between, before sleeping until it comes."""
SLICE = 0.1
"""Seconds to sleep at most before looking at the clock."""

INSIDE, READ = 0, 1
"""What a message says instead of an address: the tensor is inside; or, as an answer, it has been read."""

Message = tuple[int, int, int, bytes]
"""An address (or INSIDE, or READ), a size, a stamp; and all that came, which begins with the tensor if it is inside."""

_TRAILER = struct.Struct("=QQQQ")
_LONGEST = INLINE + _TRAILER.size
_LARGEST_READ = 1 << 30
_NOTHING = memoryview(b"")


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Neighbour:
    """Another process of this machine; `all` are all of them, by rank."""

    def __init__(self, rank: int, pid: int, end: socket.socket, libc: Any, others: dict[int, Neighbour]) -> None:
        self.rank, self.pid, self._socket, self._libc, self._all = rank, pid, end, libc, others
        self._inbox: dict[int, Message] = {}
        self._lock = Lock()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(SLICE * 1e6)))

    def post(self, key: int, address: int, size: int, stamp: int, timeout: float) -> None:
        """Send where a tensor lies (or READ)."""
        self._send([_TRAILER.pack(key, address, size, stamp)], timeout)

    def post_inside(self, key: int, address: int, size: int, stamp: int, timeout: float) -> None:
        """Send a small tensor itself."""
        tensor = (ctypes.c_char * size).from_address(address) if size else _NOTHING
        self._send([tensor, _TRAILER.pack(key, INSIDE, size, stamp)], timeout)

    def _send(self, message: list[Any], timeout: float) -> None:
        until = 0.0
        while True:
            try:
                self._socket.sendmsg(message, (), socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                pass
            except OSError as error:
                raise self._gone() from error
            for other in self._all.values():  # who may be waiting for us to take in what it sends
                other.take_in()
            select.select([], [self._socket], [], SLICE)
            until = self._checked(until, timeout)

    def _checked(self, until: float, timeout: float) -> float:
        """Return when to give up, set at the first look at the clock; or give up."""
        now = time.monotonic()
        if until and now > until:
            raise RuntimeError(f"Timed out waiting for process {self.rank}")
        return until or now + timeout

    def take(self, key: int, timeout: float) -> Message:
        """Wait for the message with this key; others that come meanwhile are kept."""
        until, glances = 0.0, GLANCES
        while True:
            with self._lock:
                found = self._inbox.pop(key, None) or self._look(key, socket.MSG_DONTWAIT if glances else 0)
            if found is not None:
                return found
            if glances:
                glances -= 1
                os.sched_yield()
                continue
            until = self._checked(until, timeout)

    def came(self, key: int) -> bool:
        """Return whether the message with this key has come, and forget it."""
        with self._lock:
            return (self._inbox.pop(key, None) or self._look(key, socket.MSG_DONTWAIT)) is not None

    def take_in(self) -> None:
        """Keep all messages that have come."""
        with self._lock:
            while self._look(None, socket.MSG_DONTWAIT) is not None:
                pass

    def _look(self, key: int | None, flags: int) -> Message | None:
        """Receive messages until the one with this key (None: the next), or until nothing comes; keep the others."""
        while True:
            try:
                text = self._socket.recv(_LONGEST, flags)
            except BlockingIOError:
                return None
            except ConnectionResetError:  # it has gone without reading all; what it sent before can still be had
                continue
            except OSError as error:
                raise self._gone() from error
            if not text:
                raise self._gone()
            found, address, size, stamp = _TRAILER.unpack_from(text, len(text) - _TRAILER.size)
            message = address, size, stamp, text
            if found == key:
                return message
            self._inbox[found] = message
            if key is None:
                return message

    def read(self, into: int, address: int, size: int) -> None:
        """Copy memory of the other process."""
        done = 0
        while done < size:
            count = min(size - done, _LARGEST_READ)
            here, there = _Span(into + done, count), _Span(address + done, count)
            got = self._libc.process_vm_readv(self.pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if got <= 0:
                reason = os.strerror(ctypes.get_errno())
                self.take_in()  # which raises if the process has gone
                raise RuntimeError(
                    f"reading the memory of process {self.rank} failed: {reason}; FSHARD_DIRECT=0 avoids it"
                )
            done += got

    def close(self) -> None:
        """Take leave."""
        with suppress(OSError, RuntimeError):
            self.take_in()
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _gone(self) -> RuntimeError:
        return RuntimeError(f"Connection closed by process {self.rank}")


# -- finding them -----------------------------------------------------------------------------------------------


def meet(timeout: timedelta) -> dict[int, Neighbour]:
    """Find the other processes of this machine, as all processes of the world do at this time.

    There are none if one of them may not read the memory of another.
    """
    rank, libc = dist.get_rank(), _libc()
    token = torch.tensor([secrets.randbits(62)])  # whoever can read it here can read this process's memory
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        table = _shared([_machine() if libc is not None else 0, os.getpid(), int(token), token.data_ptr()])
        near = [other for other, row in enumerate(table) if row[0] == table[rank][0] != 0]
        if near:
            listener.bind(_name(table[rank]))
            listener.listen(len(near))
            listener.settimeout(timeout.total_seconds())
        able = len(near) > 1 and _readable(libc, table[near[near.index(rank) - 1]])
        verdicts = _shared([able])  # from now on, all listen
        if not near or not all(verdicts[other][0] for other in near):
            return {}
        ends = {table[other][1]: _connected(table[other]) for other in near if other > rank}
        while len(ends) < len(near) - 1:
            end, _ = listener.accept()
            pid, _, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            ends[pid] = end
    found: dict[int, Neighbour] = {}
    for other in near:
        if other != rank:
            found[other] = Neighbour(other, table[other][1], ends[table[other][1]], libc, found)
    return found


def _shared(mine: list[int]) -> list[list[int]]:
    """Give a row of numbers to all processes of the world, and return everybody's."""
    row = torch.tensor(mine, dtype=torch.int64)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [one.tolist() for one in rows]


def _name(row: list[int]) -> str:
    return f"\0fshard-{row[1]}-{row[2]}"


def _connected(row: list[int]) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.connect(_name(row))
    return end


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
    if not hasattr(libc, "process_vm_readv"):
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
