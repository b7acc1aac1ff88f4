"""A call between processes: a collective or a message, as text for errors, and as a stamp that its messages carry."""

from __future__ import annotations

import os
import sys
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fshard.errors import MismatchError
from fshard.mesh.collectives.moves import PURPOSES, Purpose, Wired, describe, named, uneven
from fshard.source import Site

if TYPE_CHECKING:
    from fshard.mesh.spmd.scope import Group

CALL = (1 << 32) - 1
"""Bits of a stamp that are equal on all processes of a call."""


class CallInfo:
    """A collective, or a message (`move` is None)."""

    __slots__ = (
        "_dtype",
        "_shapes",
        "_stamp",
        "group",
        "is_send",
        "meeting",
        "move",
        "purpose",
        "site",
    )
    meeting: tuple[
        str, tuple[int, ...]
    ]  # on groups of torch.distributed: its name on all processes, and their ranks

    def __init__(
        self,
        move: Wired | None,
        xs: tuple[Tensor, ...],
        group: Group,
        site: Site,
        purpose: Purpose = "values",
        *,
        is_send: bool = False,
    ) -> None:
        self.move, self.group, self.site, self.is_send = move, group, site, is_send
        self.purpose: Purpose = purpose
        self._dtype, self._shapes = xs[0].dtype, tuple([x.shape for x in xs])
        self._stamp: int | None = None

    def __str__(self) -> str:
        return f"{self.signature} (processes {list(self.group.members)}) at {self.site}"

    @property
    def signature(self) -> str:
        """The call in words, without its line."""
        name = named(describe(self.move) if self.move is not None else "a message", self.purpose)
        dtype = str(self._dtype).removeprefix("torch.")
        shapes = ", ".join(f"{dtype}{list(shape)}" for shape in self._shapes)
        return f"{name} of {shapes}{self.site.given} over {'+'.join(self.group.axes)}"

    @property
    def stamp(self) -> int:
        """The call in 64 bits: a hash of the file's name, the line, a hash of the call, its purpose (16, 16, 30, 2)."""
        if self._stamp is None:
            stamp = _stamp(self.move, self._dtype, self._shapes, self.group.axes, self.site)
            self._stamp = stamp | PURPOSES.index(self.purpose)
        return self._stamp

    def mismatch(self, rank: int, stamp: int) -> MismatchError:
        """Return the error for a process that makes a call with another stamp."""
        return MismatchError(
            f"{self}: process {rank} makes another call at {line_of(stamp, self)}, or on another shape, dtype or tree. Every "
            "process of a group must call the same collectives in the same order and line, on equal shapes, dtypes and trees; "
            "run with FSHARD_CHECK=1 to see both calls. FSHARD_LINES=0 permits other lines."
            f"{uneven(PURPOSES[self.stamp & 3], PURPOSES[stamp & 3])}"
        )


@lru_cache(maxsize=4096)
def _stamp(
    move: Wired | None,
    dtype: torch.dtype,
    shapes: tuple[torch.Size, ...],
    axes: tuple[str, ...],
    site: Site,
) -> int:
    line = _hash_file(site.file) << 16 | site.line & 0xFFFF
    shared_line = (
        line if move is not None and compares_lines() else None
    )  # a message has a line at each end
    call = zlib.crc32(f"{move} {dtype} {shapes} {axes} {site.leaves} {shared_line}".encode())
    return line << 32 | call & ~3


def compares_lines() -> bool:
    """Return True if all processes of a collective must call it in one source line."""
    return os.environ.get("FSHARD_LINES", "1") != "0" and os.environ.get("FSHARD_CHECK") != "shapes"


def line_of(stamp: int, call: CallInfo) -> str:
    """Return the source line of a stamp that another process made; `call` is the local one."""
    files = (
        call.site.file,
        *[getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]],
    )
    name = next(
        (os.path.basename(file) for file in files if _hash_file(file) == stamp >> 48),
        "another file",
    )
    return f"{name}:{stamp >> 32 & 0xFFFF}"


def _hash_file(file: str) -> int:
    """Hash the name of a file without its folder, which may differ between machines."""
    return zlib.crc32(os.path.basename(file).encode()) & 0xFFFF
