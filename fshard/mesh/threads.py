"""One thread for the sums of reproducible mode: torch cuts a large sum among its threads, and their number changes bits."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(wanted: bool) -> Generator[None]:
    """Compute with one intra-op thread for a while, as virtual devices always do.

    >>> before = torch.get_num_threads()
    >>> with one_thread(True):
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    before = torch.get_num_threads()
    if not wanted or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
