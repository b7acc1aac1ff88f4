"""Slices that count for nothing: whoever adds up over devices by himself has to leave them out.

A device without samples computes on a neighbour's, only to take its part in collectives.  What it finds is left out of
all sums and means that a step makes; what is summed inside of a loss function (`sync_batchnorm`) asks here.
"""

from __future__ import annotations

import threading


class _Here(threading.local):
    idle: bool = False


_here = _Here()


def is_idle() -> bool:
    """Return whether the calling device computes on a slice that counts for nothing."""
    return _here.idle


class idling:
    """Say for a while whether the calling device computes for nothing.

    >>> with idling(True):
    ...     is_idle()
    True
    """

    __slots__ = ("_before", "_idle")

    def __init__(self, idle: bool) -> None:
        self._idle = idle

    def __enter__(self) -> None:
        self._before, _here.idle = _here.idle, self._idle

    def __exit__(self, *_: object) -> None:
        _here.idle = self._before
