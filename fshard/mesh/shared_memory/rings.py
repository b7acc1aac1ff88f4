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
from typing import Any

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

Message = tuple[int, int, int, int | bytes]
"""An address (or INSIDE, or READ), a size, a stamp; and the bytes inside, or their offset in the ring."""


class Ring:
    """One end's view of a ring. Its user holds the lock of its `Neighbours`."""

    def __init__(self, number: int) -> None:
        self._memory = mmap.mmap(number, _RECORDS + SIZE)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + _RECORDS
        self.words = memoryview(self._memory).cast("Q")
        self._at = 0


class Putter(Ring):
    """The end that puts messages."""

    def __init__(self, number: int, wake: Callable[[], None]) -> None:
        super().__init__(number)
        self._wake, self._taken = wake, 0

    def put(self, key: int, address: int, size: int, stamp: int, bytes_at: int | None = None) -> bool:
        """Write a message, with the bytes at `bytes_at` inside; return False if there is no space."""
        at, need = self._at, _GRAIN if bytes_at is None else _GRAIN + (size + _GRAIN - 1 & -_GRAIN)
        place = at & SIZE - 1
        if need > SIZE - place:  # records are contiguous: the rest of the ring is skipped
            at += SIZE - place
        if at + need - self._taken > SIZE:
            self._taken = self.words[TAIL]
            if at + need - self._taken > SIZE:
                return False
        if at != self._at:
            _RECORD.pack_into(self._memory, _RECORDS + place, _SKIP, 0, 0, 0)
            place = 0
        _RECORD.pack_into(self._memory, _RECORDS + place, key, address, size, stamp)
        if bytes_at is not None:
            ctypes.memmove(self._base + place + _GRAIN, bytes_at, size)
        self._at = self.words[HEAD] = at + need
        if self.words[ASLEEP]:
            self._wake()
        return True

    @property
    def roomy(self) -> bool:
        """True if at least half of the ring is free."""
        return self._at - self.words[TAIL] < SIZE // 2

    def close(self) -> None:
        """Announce the end: nothing more is sent, and announced memory must no longer be read."""
        self.words[CLOSED] = 1


class Taker(Ring):
    """The end that takes messages."""

    _last: tuple[int, int] | None = None

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.inbox: dict[int, Message] = {}

    def look(self, key: int | None) -> bool:
        """Move received messages to the inbox, up to the one with this key; return True if that one is there.

        Its bytes stay in the ring until the next read, since they are used immediately.
        """
        inbox = self.inbox
        while key not in inbox:
            at = self._passed()
            if self.words[HEAD] == at:
                return False
            place = at & SIZE - 1
            found, address, size, stamp = _RECORD.unpack_from(self._memory, _RECORDS + place)
            if found == _SKIP:
                self._at = self.words[TAIL] = at + SIZE - place
                continue
            need = _GRAIN + (size + _GRAIN - 1 & -_GRAIN if address == INSIDE else 0)
            inbox[found] = address, size, stamp, self._base + place + _GRAIN
            self._last = found, need
        return True

    def _passed(self) -> int:
        """Leave the last record, with a copy of its bytes if they have not been taken; return where the next one is."""
        if self._last is not None:
            (key, need), self._last = self._last, None
            message = self.inbox.get(key)
            if message is not None and message[0] == INSIDE:
                address, size, stamp, where = message
                self.inbox[key] = address, size, stamp, ctypes.string_at(where, size)
            self._at += need
            self.words[TAIL] = self._at
        return self._at

    @property
    def is_filled(self) -> bool:
        """True if the ring has a message that is not in the inbox."""
        return self.words[HEAD] != self._at + (self._last[1] if self._last is not None else 0)

    @property
    def closed(self) -> bool:
        """True if the other end has left."""
        return self.words[CLOSED] != 0


def made() -> int:
    """Return the file descriptor of a new ring."""
    number = os.memfd_create("fshard")
    os.ftruncate(number, _RECORDS + SIZE)
    return number


def are_supported(libc: Any) -> bool:
    """Return True if rings work on this machine, and register this process for memory barriers."""
    if platform.machine() != "x86_64" or not hasattr(os, "memfd_create"):
        return False
    try:
        os.close(made())
    except OSError:
        return False
    return libc.syscall(_MEMBARRIER, _REGISTER, 0, 0) == 0


def fence(libc: Any) -> None:
    """Wait until all processors have completed their writes."""
    libc.syscall(_MEMBARRIER, _FENCE, 0, 0)
