"""Copies between the host and a GPU, for which nothing waits before their values are used.

    read      compute   ── x to host ──●── ...       the host waits for ● when it reads
    upload    copies    ── x to device ──●           the compute stream waits for ●, the host does not

There is no pool: torch keeps freed pinned memory, and reuses it only after the copies that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

GPUS = ("cuda",)
"""Types of devices that have memory and streams of their own."""


def is_on_host(x: Tensor) -> bool:
    """Return True if a tensor takes no accelerator memory."""
    return x.device.type in ("cpu", "meta")


def pinned_like(x: Tensor) -> Tensor:
    """Return an empty tensor in pinned host memory."""
    return torch.empty_like(x, device="cpu", pin_memory=True)


@lru_cache
def copy_stream(device: torch.device, name: str) -> torch.cuda.Stream:
    """Return a GPU's stream for copies of a kind, whose order is that of their starts."""
    return torch.cuda.Stream(device)


def upload(x: Tensor) -> Tensor:
    """Return a copy of a tensor of the host on the current GPU; the host does not wait for it.

    The tensor may be written to at once.
    """
    # From pageable memory, `x.to("cuda")` would make the host wait for all that the stream has to
    # do. The caller's tensor may be pinned, but then it could not be written to.
    staging = pinned_like(x)
    staging.copy_(x)

    compute = torch.cuda.current_stream()
    stream = copy_stream(compute.device, "upload")
    with torch.cuda.stream(stream):
        # In memory of this stream: that of the compute stream may be in use by what the stream has
        # still to do, so that the copy would have to wait for it.
        copy = torch.empty_like(staging, device=compute.device)
        copy.copy_(staging, non_blocking=True)
        event = stream.record_event()
    compute.wait_event(event)
    copy.record_stream(compute)  # else later uploads may get the memory while it is in use
    return copy


def compute_event(device: torch.device) -> Any:
    """Return the event after which a GPU has done what its current stream has been given."""
    return torch.cuda.current_stream(device).record_event()


def start_read(
    xs: Sequence[Tensor], into: Sequence[Tensor] | None = None
) -> Callable[[], list[Tensor]]:
    """Start copying tensors to the host; return a function that waits for the copies.

    It returns them: tensors in `into`, if given, and otherwise new ones.
    """
    if into is not None:
        copies = [*into]
    else:
        copies = [x if is_on_host(x) else pinned_like(x) for x in xs]

    # On the compute stream, since the caller may write to the tensors right after this call. On
    # another stream the copies would run beside what follows, and beside these writes too.
    for x, copy in zip(xs, copies, strict=True):
        if x is copy:
            continue
        if is_on_host(x) and not is_on_host(copy):
            # From pageable memory the host might wait for the stream; and the caller may write to
            # pinned memory before the copy.
            staging = pinned_like(x)
            copy.copy_(staging.copy_(x), non_blocking=True)
        else:
            copy.copy_(x, non_blocking=True)

    # After all copies: an event waits for what was queued before it, not for later work.
    devices = {x.device for x in xs if not is_on_host(x)}
    events = [compute_event(device) for device in devices]

    def read() -> list[Tensor]:
        for event in events:
            event.synchronize()
        return copies

    return read
