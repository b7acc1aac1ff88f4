"""A call between processes: a collective or a message, as text for errors, and as a stamp.

Every message between processes carries the stamp of its call, so a process that receives bytes of
another call raises, instead of computing with them: see Note [Stamps].
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fshard.errors import MismatchError
from fshard.mesh.collectives.moves import (
    PURPOSES,
    Purpose,
    Wired,
    describe,
    named,
    uneven,
    uneven_messages,
)
from fshard.source import Site

if TYPE_CHECKING:
    from fshard.mesh.spmd.scope import Group

# Note [Stamps]
# A stamp is a call in 64 bits. Two processes compare the stamps of a message that one sends and the
# other receives. The lower half is equal on all processes of a call. The upper half differs where a
# message is sent in one line and received in another; an error names the other line by it.
#
#     bits    63 .. 48         47 .. 32      31 .. 2               1, 0
#             hash of file     line          hash of the call      purpose
#
# The hash of the call covers move, dtype, shapes, axes and leaves. That of a collective also covers
# the line, since all processes must call it in one line (unless FSHARD_LINES=0 permits others). The
# file is hashed without its folder, which may differ between machines. Over gloo the lowest bits of
# a stamp are part of the tag: see `process_group`.
#
# The hash of cotangents is combined with the number of their message by XOR: messages of equal
# shapes, of which the numbers differ, differ in the lowest bits for sure.

CALL = (1 << 32) - 1
"""Bits of a stamp that are equal on all processes of a call."""

_PURPOSE = 3
"""Bits of a stamp that are the index of the purpose: there are three purposes."""


class CallInfo:
    """A collective, or a message (`move` is None)."""

    # Calls are recorded until long after their end, for errors, so they refer to no tensors.
    __slots__ = (
        "_shapes",
        "_stamp",
        "dtype",
        "group",
        "is_send",
        "meeting",
        "move",
        "number",
        "purpose",
        "site",
    )

    meeting: tuple[str, tuple[int, ...]]
    """On groups of torch.distributed: a name of the call on all its processes, and their ranks."""

    def __init__(
        self,
        move: Wired | None,
        xs: tuple[Tensor, ...],
        group: Group,
        site: Site,
        purpose: Purpose = "values",
        *,
        is_send: bool = False,
        dtype: torch.dtype | None = None,
        number: int | None = None,
    ) -> None:
        self.move = move
        self.group = group
        self.site = site
        self.purpose: Purpose = purpose
        self.is_send = is_send
        self.number = number  # of the message whose cotangents these are
        self.dtype = dtype or xs[0].dtype  # in which they are sent
        self._shapes = tuple([x.shape for x in xs])
        self._stamp: int | None = None

    def __str__(self) -> str:
        return f"{self.signature} (processes {list(self.group.members)}) at {self.site}"

    @property
    def signature(self) -> str:
        """The call in words, without its line."""
        name = "a message" if self.move is None else describe(self.move)
        dtype = str(self.dtype).removeprefix("torch.")
        shapes = ", ".join([f"{dtype}{list(shape)}" for shape in self._shapes])
        axes = "+".join(self.group.axes)
        name = named(name, self.purpose, self.number)
        return f"{name} of {shapes}{self.site.given} over {axes}"

    @property
    def has_one_line(self) -> bool:
        """True if all processes must make it in one line; a message has a line at each end."""
        return self.move is not None and self.move.has_one_line and compares_lines()

    @property
    def stamp(self) -> int:
        """The call in 64 bits: see Note [Stamps]."""
        if self._stamp is None:
            stamp = _stamp(self.move, self.dtype, self._shapes, self.group.axes, self.site)
            if self.number is not None:
                stamp ^= self.number << 2 & CALL
            self._stamp = stamp | PURPOSES.index(self.purpose)
        return self._stamp

    @property
    def advice(self) -> Callable[[Purpose, Purpose], str]:
        """The function that returns advice for calls that differ, from their purposes."""
        return uneven_messages if self.move is None else uneven

    def mismatch(self, rank: int, stamp: int) -> MismatchError:
        """Return the error for a process that makes a call with another stamp."""
        line = line_of(stamp, self)
        hint = self.advice(self.purpose, PURPOSES[stamp & _PURPOSE])
        return MismatchError(
            f"{self}: process {rank} makes another call at {line}, or on another shape, dtype or "
            "tree. Every process of a group must call the same collectives in the same order and "
            "line, on equal shapes, dtypes and trees; run with FSHARD_CHECK=1 to see both calls. "
            f"FSHARD_LINES=0 permits other lines.{hint}"
        )


@lru_cache(maxsize=4096)
def _stamp(
    move: Wired | None,
    dtype: torch.dtype,
    shapes: tuple[torch.Size, ...],
    axes: tuple[str, ...],
    site: Site,
) -> int:
    """Return the stamp of a call without its purpose.

    Cached, since each step makes the same calls again.
    """
    line = _hash_file(site.file) << 16 | site.line & 0xFFFF
    is_line_shared = (
        move is not None and move.has_one_line and compares_lines()
    )  # a message has a line at each end
    shared_line = line if is_line_shared else None
    text = f"{move} {dtype} {shapes} {axes} {site.leaves} {shared_line}"
    return line << 32 | zlib.crc32(text.encode()) & ~_PURPOSE


def compares_lines() -> bool:
    """Return True if all processes of a collective must call it in one source line."""
    if os.environ.get("FSHARD_LINES", "1") == "0":
        return False
    return os.environ.get("FSHARD_CHECK") != "shapes"


def line_of(stamp: int, call: CallInfo) -> str:
    """Return the source line of a stamp that another process made; `call` is the local one.

    A stamp has the hash of a file's name. The name is found among the file of the local call and
    those of all imported modules.
    """
    hash_of_file = stamp >> 48
    line = stamp >> 32 & 0xFFFF
    files = [call.site.file]
    for module in [*sys.modules.values()]:  # a copy: a lazy module may import others meanwhile
        files.append(getattr(module, "__file__", None) or "")
    for file in files:
        if _hash_file(file) == hash_of_file:
            return f"{os.path.basename(file)}:{line}"
    return f"another file:{line}"


def _hash_file(file: str) -> int:
    return zlib.crc32(os.path.basename(file).encode()) & 0xFFFF
