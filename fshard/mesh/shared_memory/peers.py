"""The other processes of this machine: messages through rings, tensors from the sender's memory.

gloo sends everything over loopback TCP, with its own threads. Processes of one machine need
neither. A short message in a ring (see `rings`) contains a small tensor or the address of a large
one. The receiver then copies it from the sender's memory (process_vm_readv), once, and confirms it.

    process 0                                        process 1
    "x is at 0x7f.., 8 MB"     ------------------>   copies it
    may modify x again         <------------------   "read"

A process that waits, for a message or for space in a ring, receives what all others send meanwhile,
and advances all that is in progress. It yields the processor between checks, and then sleeps until
a byte arrives in a Unix socket, one for each pair. The sockets of a process that ends, or leaves
the world, close, which ends the waits of the others.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import RLock
from typing import Any
from weakref import ref

from fshard.errors import MismatchError
from fshard.mesh.runtimes.call import CallInfo
from fshard.mesh.runtimes.transport import ENDED
from fshard.mesh.shared_memory import rings
from fshard.mesh.shared_memory.rings import ASLEEP, DONE, FAILED, RECEIVED, RingReader, RingWriter

SPIN = 0.001
"""Seconds of checks for a message before sleeping: waking up takes longer.

Not a number of checks: on a loaded machine each yield of the processor takes as long as the turns
of others, and hundreds of them seconds.
"""
MAX_SLEEP = 0.1
"""Maximal seconds to sleep before the time limit is checked."""
MAX_SPANS = 1024
"""Spans of memory that the system fills in one call."""

Span = tuple[int, int]
"""Address and size of memory, in bytes."""


class Peer:
    """Another process of this machine."""

    def __init__(self, rank: int, pid: int, end: socket.socket, libc: Any) -> None:
        self.rank = rank
        self.pid = pid
        self.socket = end
        self._libc = libc
        self.is_gone = False
        self.sent = 0  # messages of `send`
        self.calls = deque[CallInfo](maxlen=16)  # the last of them, for errors
        self._mismatch = ""  # the error that parted the processes

        # Blocking whatever the default: a socket with a time-out of Python's ignores MSG_DONTWAIT.
        end.setblocking(True)
        outgoing = rings.new_ring()
        socket.send_fds(end, [b"ring"], [outgoing])
        _, files, _, _ = socket.recv_fds(end, 4, 1)
        if not files:
            os.close(outgoing)
            raise RuntimeError(f"Connection closed by process {rank}")
        (incoming,) = files
        self.outgoing = RingWriter(outgoing, self._wake)
        self.incoming = RingReader(incoming)
        for file in (outgoing, incoming):
            os.close(file)

    def _wake(self) -> None:
        with suppress(OSError):  # it has ended, or has enough wake-ups
            self.socket.send(b"!", socket.MSG_DONTWAIT)

    @property
    def has_left(self) -> bool:
        """True if the other process has ended, or left the world."""
        return self.is_gone or self.incoming.is_closed

    def put(self, key: int, address: int, size: int, stamp: int, source: int | None = None) -> bool:
        """Write a message to its ring; return False if there is no space."""
        if self.is_gone:
            raise self.lost()
        return self.outgoing.put(key, address, size, stamp, source)

    def receive_until(self, key: int | None) -> bool:
        """Receive up to the message with this key; return True if it is there.

        After a mismatch later messages belong to another call.
        """
        return not self._mismatch and self.incoming.receive_until(key)

    def check_alive(self) -> None:
        """Drain its wake-ups; detect that it has ended or left."""
        try:
            while not self.is_gone:
                received = self.socket.recv(1, socket.MSG_DONTWAIT)
                self.is_gone = not received
        except BlockingIOError:
            return
        except OSError:
            self.is_gone = True

    def read(self, address: int, spans: Sequence[Span]) -> None:
        """Copy consecutive memory of the other process to spans of this one's.

        The system may copy less than a call requests, at most 2 GB: the next call copies the rest.
        """
        while spans:
            target = array("q")
            for span in spans[:MAX_SPANS]:
                target.extend(span)
            size = sum(target[1::2])
            count = 0
            if size:
                source = array("q", [address, size])
                targets, sources = target.buffer_info()[0], source.buffer_info()[0]
                count = self._libc.process_vm_readv(
                    self.pid, targets, len(target) // 2, sources, 1, 0
                )
                if count <= 0:
                    raise self._read_error(ctypes.get_errno())
            address += count
            spans = _skip_bytes(spans, count) if count < size else spans[MAX_SPANS:]
        # A process that has left may have freed this memory before it was copied: see `close`.
        if self.incoming.is_closed:
            raise self.lost()

    def _read_error(self, code: int) -> RuntimeError:
        """Return the reason why memory cannot be read.

        A process that ends loses its memory shortly before its sockets close.
        """
        deadline = time.monotonic() + 1
        while not self.is_gone and time.monotonic() < deadline:
            self.check_alive()
            time.sleep(0.001)
        if self.is_gone:
            return self.lost()
        return RuntimeError(
            f"reading the memory of process {self.rank} failed: {os.strerror(code)}; "
            "FSHARD_DIRECT=0 avoids it"
        )

    def close(self, error: BaseException | None = None) -> None:
        """Leave the other process, normally or because of an error.

        From then on it must not read memory that this process has offered.
        """
        if isinstance(error, MismatchError):
            self._mismatch = self._mismatch or str(error)
        self.outgoing.close(FAILED)
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.is_gone = True

    def lost(self) -> RuntimeError:
        """Return the error for a process that has ended, or that this one has left."""
        if self._mismatch:
            return MismatchError(
                "The processes of this group have parted, and the group is lost: start them again. "
                f"What parted them: {self._mismatch}"
            )
        if self.incoming.is_done:
            return RuntimeError(f"process {self.rank} {ENDED}")
        return RuntimeError(f"Connection closed by process {self.rank}")


def _skip_bytes(spans: Sequence[Span], count: int) -> list[Span]:
    """Return spans without their first `count` bytes."""
    remaining: list[Span] = []
    for address, size in spans:
        skipped = min(count, size)
        count -= skipped
        if size > skipped:
            remaining.append((address + skipped, size - skipped))
    return remaining


Need = tuple[Peer, int]
"""A message to receive: its sender and key."""


class Peers:
    """All other processes of this machine, by rank."""

    def __init__(self, by_rank: Mapping[int, Peer], timeout: timedelta, libc: Any = None) -> None:
        self.by_rank = by_rank
        self.timeout = timeout.total_seconds()
        # Held by the thread that receives, or steps a wire: see Note [Order of locks]. A step that
        # waits for space in a ring receives, so a thread may take it twice.
        self.lock = RLock()
        self._libc = libc
        self._sleepers = 0
        if by_rank:
            this = ref(self)
            os.register_at_fork(after_in_child=lambda: _close_sockets(this()))

    def put(self, to: Peer, *message: int) -> None:
        """Write a message, when there is space; receive meanwhile.

        The others may wait for space, too: without receiving, all would wait for each other.
        """
        deadline = 0.0
        while not to.put(*message):
            if not deadline:
                deadline = time.monotonic() + self.timeout
            self._sleep(0.001)
            if time.monotonic() > deadline:
                raise RuntimeError(f"Timed out sending to process {to.rank}")

    def wait(self, needs: Sequence[Need], advance: Callable[[], bool]) -> None:
        """Wait for messages; advance all else in progress, since others may wait for that."""
        begin = spin_begin = 0.0
        for peer, key in needs:
            while not self.has_arrived(peer, key):
                # Again, since what a process has sent before its end is received.
                if peer.is_gone and not self.has_arrived(peer, key):
                    raise peer.lost()

                clock = time.monotonic()
                if not begin:
                    begin = spin_begin = clock
                if clock - begin > self.timeout:
                    raise RuntimeError(f"Timed out waiting for process {peer.rank}")
                if advance():
                    spin_begin = clock
                elif clock - spin_begin < SPIN:
                    os.sched_yield()
                else:
                    self._sleep(MAX_SLEEP)  # which looks whether peers have ended

    def has_arrived(self, peer: Peer, key: int) -> bool:
        """Return True if a message has arrived."""
        with self.lock:
            return peer.receive_until(key)

    def _sleep(self, seconds: float) -> None:
        """Sleep until a message arrives; receive what all others have sent.

        The order is that of Note [Sleeping readers].
        """
        self._announce_sleep(1)
        rings.fence(self._libc)
        try:
            sockets = select.poll()  # one per thread: several may sleep
            for peer in self.by_rank.values():
                if not peer.is_gone:
                    sockets.register(peer.socket.fileno(), select.POLLIN)
            if not any(peer.incoming.is_filled for peer in self.by_rank.values()):
                sockets.poll(seconds * 1e3)
        finally:
            self._announce_sleep(-1)
        with self.lock:
            for peer in self.by_rank.values():
                peer.check_alive()
                peer.receive_until(None)

    def _announce_sleep(self, change: int) -> None:
        """Count the threads that sleep, and publish their number to writers."""
        with self.lock:
            self._sleepers += change
            for peer in self.by_rank.values():
                peer.incoming.words[ASLEEP] = self._sleepers

    def has_gone(self, rank: int) -> bool:
        """Return True if a process is a peer and has ended."""
        peer = self.by_rank.get(rank)
        if peer is None:
            return False
        peer.check_alive()
        return peer.is_gone

    def unreceived(self) -> list[CallInfo]:
        """Announce that this process receives no more, and wait until its messages are received.

        Return those that other processes leave without.
        """
        deadline = time.monotonic() + self.timeout
        for peer in self.by_rank.values():
            peer.outgoing.close(DONE)

        calls: list[CallInfo] = []
        for peer in self.by_rank.values():
            words = peer.outgoing.words
            while not peer.has_left and words[RECEIVED] < peer.sent:
                if time.monotonic() > deadline:
                    break
                self._sleep(0.001)
            count = peer.sent - words[RECEIVED]
            if peer.has_left and count:
                calls += [*peer.calls][-count:]
        return calls

    def close(self) -> None:
        """Leave all others."""
        for peer in self.by_rank.values():
            peer.close()
            peer.socket.close()


def _close_sockets(peers: Peers | None) -> None:
    """Close the sockets in a child of this process.

    With them open, the others would not notice when this process ends.
    """
    if peers is None:
        return
    for peer in peers.by_rank.values():
        peer.socket.close()
        peer.is_gone = True
