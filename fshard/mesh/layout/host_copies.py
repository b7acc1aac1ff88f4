"""Reads of a device's tensors by the host: it waits where it reads, for their copies alone.

    compute  ── x to host ──●── ...     the host waits for ● when it reads

There is no pool: torch keeps freed pinned memory, and reuses it only after the copies that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def is_on_host(x: Tensor) -> bool:
    """Return True if a tensor takes no accelerator memory."""
    return x.device.type in ("cpu", "meta")


def host_like(x: Tensor) -> Tensor:
    """Return an empty tensor in host memory, pinned if x is on a GPU."""
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)


def start_read(
    xs: Sequence[Tensor], into: Sequence[Tensor] | None = None
) -> Callable[[], list[Tensor]]:
    """Start copying tensors to the host; return a function that waits for the copies.

    It returns them: tensors in `into`, if given, and otherwise new ones.
    """
    if into is not None:
        copies = [*into]
    else:
        copies = [x if is_on_host(x) else host_like(x) for x in xs]
    for x, copy in zip(xs, copies, strict=True):
        if x is not copy:
            copy.copy_(x, non_blocking=True)

    # After all copies: an event waits for what was queued before it, not for later work.
    devices = {x.device for x in xs if not is_on_host(x)}
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def read() -> list[Tensor]:
        for event in events:
            event.synchronize()
        return copies

    return read
