"""A ring of messages in memory shared by two processes: one writer, one reader, no system calls.

    words      HEAD      bytes written so far
               TAIL      bytes read so far
               ASLEEP    the number of threads of the reader that sleep
               CLOSED    DONE or FAILED once the writer has left
               RECEIVED  messages of `send` that `recv` has returned so far
    records    key, address, size, stamp; then the bytes themselves, where the address is INSIDE

Both ends count bytes without end; the place of a byte is its number modulo SIZE. Here A, B and C
with 64 bytes each were written to a ring of SIZE 256, and A was read before C was written:

    0                96               192        256
    | C              | B              | skipped  |        HEAD 352, TAIL 96

A record is published by the one write that advances HEAD, after it has been written: x86 makes
writes visible in that order.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

SIZE = 1 << 20
"""Bytes of records; a power of two."""
INSIDE, READ = 0, 1
"""Values of a record's address: the bytes are inside; or, as a reply, they have been read."""

HEAD, TAIL, ASLEEP, CLOSED, RECEIVED = 0, 8, 16, 24, 32
"""Indices of the words of 8 bytes: each has a cache line of 64 bytes of its own."""
DONE, FAILED = 1, 2
"""Values of CLOSED: the writer has made all its calls, or has left because of an error."""
_RECORDS = 4096
"""Offset of the records: the words have a page of their own."""
_RECORD = struct.Struct("=QQQQ")
_GRAIN = _RECORD.size
"""Records begin at multiples of their own size, so one always fits before the end of the ring."""
_SKIP = (1 << 64) - 1
"""The key of a record that fills the end of the ring."""
_MEMBARRIER, _FENCE, _REGISTER = 324, 2, 4
"""The system call membarrier, its commands GLOBAL_EXPEDITED and REGISTER_GLOBAL_EXPEDITED.

The barrier holds for all processes that have registered.
"""


class RingMessage(NamedTuple):
    """A record that has been read.

    Args:
        address: of the bytes in the writer's memory, or INSIDE, or READ.
        size: number of bytes.
        stamp: of the call, see Note [Stamps].
        inside: the address of bytes inside.
        copy: the memory of these bytes, once they have left the ring.
    """

    address: int
    size: int
    stamp: int
    inside: int
    copy: Any = None


class Ring:
    """One end's view of a ring. Its user holds the lock of its `Peers`."""

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, _RECORDS + SIZE)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + _RECORDS
        self.words = memoryview(self._memory).cast("Q")
        self._position = 0


# Note [Sleeping readers]
# A reader that sleeps is woken by a byte in a socket, which costs the writer a system call, so it
# sends one only if it must. No wake-up is lost if both write first and look then:
#
#     reader    ASLEEP = 1, fence, look at HEAD, sleep if it is unchanged
#     writer    advance HEAD, look at ASLEEP, wake the reader if it is set
#
# A processor may delay a write beyond a later read. The fence (membarrier) makes all processors
# complete their writes, so the writer needs none: either the reader sees HEAD, or the writer
# ASLEEP.


class RingWriter(Ring):
    """The end that writes messages."""

    def __init__(self, file: int, wake: Callable[[], None]) -> None:
        super().__init__(file)
        self._wake = wake
        self._tail = 0  # TAIL when it was last needed

    def put(self, key: int, address: int, size: int, stamp: int, source: int | None = None) -> bool:
        """Write a message, with the bytes at the address `source` inside.

        Return False if there is no space.
        """
        length = _GRAIN
        if source is not None:
            length += -(-size // _GRAIN) * _GRAIN
        position = self._position
        offset = position & SIZE - 1
        is_wrapped = length > SIZE - offset  # a record is contiguous, so the ring's end is skipped
        if is_wrapped:
            position += SIZE - offset
        end = position + length
        if end - self._tail > SIZE:
            self._tail = self.words[TAIL]
            if end - self._tail > SIZE:
                return False

        if is_wrapped:
            _RECORD.pack_into(self._memory, _RECORDS + offset, _SKIP, 0, 0, 0)
            offset = 0
        _RECORD.pack_into(self._memory, _RECORDS + offset, key, address, size, stamp)
        if source is not None:
            ctypes.memmove(self._base + offset + _GRAIN, source, size)
        self._position = end
        self.words[HEAD] = end
        if self.words[ASLEEP]:  # after HEAD: see Note [Sleeping readers]
            self._wake()
        return True

    @property
    def is_roomy(self) -> bool:
        """True if at least half of the ring is free."""
        return self._position - self.words[TAIL] < SIZE // 2

    def close(self, how: int) -> None:
        """Announce the end: nothing more is sent, and announced memory must no longer be read.

        `how` is DONE or FAILED; the first announcement counts.
        """
        self.words[CLOSED] = self.words[CLOSED] or how


class RingReader(Ring):
    """The end that reads messages."""

    _last_record: tuple[int, int] | None = None  # key and length

    def __init__(self, file: int) -> None:
        super().__init__(file)
        self.inbox: dict[int, RingMessage] = {}

    def receive_until(self, key: int | None) -> bool:
        """Move received messages to the inbox, up to the one with this key.

        Return True if that one is there. Its bytes stay in the ring until the next read, since they
        are used immediately.
        """
        inbox = self.inbox
        while key not in inbox:
            position = self._leave_last_record()
            if self.words[HEAD] == position:
                return False
            offset = position & SIZE - 1
            record = _RECORD.unpack_from(self._memory, _RECORDS + offset)
            record_key, address, size, stamp = record
            if record_key == _SKIP:
                self._position = self.words[TAIL] = position + SIZE - offset
                continue
            length = _GRAIN
            if address == INSIDE:
                length += -(-size // _GRAIN) * _GRAIN
            inbox[record_key] = RingMessage(address, size, stamp, self._base + offset + _GRAIN)
            self._last_record = (record_key, length)
        return True

    def _leave_last_record(self) -> int:
        """Give the space of the last record back; return the position of the next one.

        If its bytes have not been taken, its message gets a copy of them.
        """
        if self._last_record is not None:
            key, length = self._last_record
            self._last_record = None
            message = self.inbox.get(key)
            if message is not None and message.address == INSIDE:
                copy = (ctypes.c_char * message.size)()
                ctypes.memmove(copy, message.inside, message.size)
                self.inbox[key] = message._replace(inside=ctypes.addressof(copy), copy=copy)
            self._position += length
            self.words[TAIL] = self._position
        return self._position

    @property
    def is_filled(self) -> bool:
        """True if the ring has a message that is not in the inbox."""
        position = self._position
        if self._last_record is not None:
            _, length = self._last_record
            position += length
        return self.words[HEAD] != position

    @property
    def is_closed(self) -> bool:
        """True if the other end has left."""
        return self.words[CLOSED] != 0

    @property
    def is_done(self) -> bool:
        """True if the other end has left after all its calls."""
        return self.words[CLOSED] == DONE


def new_ring() -> int:
    """Return the file descriptor of a new ring."""
    file = os.memfd_create("fshard")
    os.ftruncate(file, _RECORDS + SIZE)
    return file


def are_supported(libc: Any) -> bool:
    """Return True if rings work on this machine, and register this process for memory barriers."""
    if platform.machine() != "x86_64" or not hasattr(os, "memfd_create"):
        return False
    try:
        os.close(new_ring())
    except OSError:
        return False
    return libc.syscall(_MEMBARRIER, _REGISTER, 0, 0) == 0


def fence(libc: Any) -> None:
    """Wait until all processors have completed their writes."""
    libc.syscall(_MEMBARRIER, _FENCE, 0, 0)
