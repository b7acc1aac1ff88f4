"""A ring of messages in memory shared by two processes: one writer, one reader, no system calls.

    words      HEAD  bytes written so far  TAIL  bytes read so far   ASLEEP  the reader sleeps   CLOSED  the writer left
               RECEIVED  messages of `send` that `recv` has returned so far
    records    key, address, size, stamp, and the bytes themselves where the address is INSIDE

A record is published by the one write that advances HEAD, after it has been written: x86 makes writes visible in that
order. Before a reader sleeps it sets ASLEEP and then makes all processors complete their writes (membarrier), so a
later writer sees that it must wake the reader.
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
"""Offsets of the words, each in its own cache line."""
_RECORDS = 4096
_RECORD = struct.Struct("=QQQQ")
_GRAIN = _RECORD.size
_SKIP = (1 << 64) - 1
_MEMBARRIER, _FENCE, _REGISTER = 324, 2, 4


class RingMessage(NamedTuple):
    """A record that has been read: an address (or INSIDE, or READ), a size, a stamp, and the address of bytes inside."""

    address: int
    size: int
    stamp: int
    inside: int
    copy: Any = None  # the memory of these bytes, once they have left the ring


class Ring:
    """One end's view of a ring. Its user holds the lock of its `Peers`."""

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, _RECORDS + SIZE)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + _RECORDS
        self.words = memoryview(self._memory).cast("Q")
        self._position = 0


class RingWriter(Ring):
    """The end that writes messages."""

    def __init__(self, file: int, wake: Callable[[], None]) -> None:
        super().__init__(file)
        self._wake, self._tail = wake, 0

    def put(self, key: int, address: int, size: int, stamp: int, source: int | None = None) -> bool:
        """Write a message, with the bytes at the address `source` inside; return False if there is no space."""
        position, length = (
            self._position,
            _GRAIN if source is None else _GRAIN + (size + _GRAIN - 1 & -_GRAIN),
        )
        offset = position & SIZE - 1
        if length > SIZE - offset:  # records are contiguous: the rest of the ring is skipped
            position += SIZE - offset
        if position + length - self._tail > SIZE:
            self._tail = self.words[TAIL]
            if position + length - self._tail > SIZE:
                return False
        if position != self._position:
            _RECORD.pack_into(self._memory, _RECORDS + offset, _SKIP, 0, 0, 0)
            offset = 0
        _RECORD.pack_into(self._memory, _RECORDS + offset, key, address, size, stamp)
        if source is not None:
            ctypes.memmove(self._base + offset + _GRAIN, source, size)
        self._position = self.words[HEAD] = position + length
        if self.words[ASLEEP]:
            self._wake()
        return True

    @property
    def is_roomy(self) -> bool:
        """True if at least half of the ring is free."""
        return self._position - self.words[TAIL] < SIZE // 2

    def close(self) -> None:
        """Announce the end: nothing more is sent, and announced memory must no longer be read."""
        self.words[CLOSED] = 1


class RingReader(Ring):
    """The end that reads messages."""

    _last_record: tuple[int, int] | None = None

    def __init__(self, file: int) -> None:
        super().__init__(file)
        self.inbox: dict[int, RingMessage] = {}

    def receive_until(self, key: int | None) -> bool:
        """Move received messages to the inbox, up to the one with this key; return True if that one is there.

        Its bytes stay in the ring until the next read, since they are used immediately.
        """
        inbox = self.inbox
        while key not in inbox:
            position = self._leave_last_record()
            if self.words[HEAD] == position:
                return False
            offset = position & SIZE - 1
            number, address, size, stamp = _RECORD.unpack_from(self._memory, _RECORDS + offset)
            if number == _SKIP:
                self._position = self.words[TAIL] = position + SIZE - offset
                continue
            length = _GRAIN + (size + _GRAIN - 1 & -_GRAIN if address == INSIDE else 0)
            inbox[number] = RingMessage(address, size, stamp, self._base + offset + _GRAIN)
            self._last_record = number, length
        return True

    def _leave_last_record(self) -> int:
        """Leave the last record, with a copy of its bytes if they have not been taken; return where the next one is."""
        if self._last_record is not None:
            (key, length), self._last_record = self._last_record, None
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
        return self.words[HEAD] != self._position + (
            self._last_record[1] if self._last_record is not None else 0
        )

    @property
    def is_closed(self) -> bool:
        """True if the other end has left."""
        return self.words[CLOSED] != 0


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
