"""`start`: copies between memory kinds, made while the device computes.

    a GPU's memory and the host's   by a stream for each direction
    else, of processes              by one helper thread, in the order of the starts
    else                            at once

Copies of one transfer start and end together. The compute stream waits for what is copied to the
device, the host for all else. Source and target must not be written to before that, nor the source
before `release`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.memory import disk
from fshard.memory.kinds import note_move
from fshard.memory.pool import Stress, current_stress, poison, stress
from fshard.mesh.collectives.ledger import active
from fshard.mesh.layout import Memory, Runtime
from fshard.mesh.layout.host_copies import copy_stream, is_on_host

__all__ = ["UNDER_WAY", "Link", "Transfer", "start", "stress"]

UNDER_WAY = 1 << 26
"""Bytes of each direction that are under way, unless two transfers have more.

64 MiB take milliseconds, a hundred times as long as the start of a copy, so more would not be
faster. Of two transfers one runs while the next one is started.
"""


class Transfer:
    """Copies under way.

    Args:
        targets: of the copies.
        wait: waits for them, or makes them, and raises their error.
        release: waits until the sources may be written to, or freed; by default it is `wait`.
    """

    def __init__(
        self,
        targets: Sequence[Tensor],
        wait: Callable[[], object] = tuple,
        release: Callable[[], object] | None = None,
    ) -> None:
        self._targets = [*targets]
        self._wait = wait
        self._release = release or wait

    def wait(self) -> list[Tensor]:
        """Wait until the targets have their values, and return them."""
        self._wait()
        return self._targets

    def release(self) -> None:
        """Wait until the sources may be written to or freed: on a GPU its stream, else the host."""
        self._release()


class Link(NamedTuple):
    """The way of a transfer: from one memory to another, of a device of a mesh of some runtime."""

    source: Memory
    target: Memory
    runtime: Runtime = "virtual"
    device: int = 0


def start(sources: Sequence[Tensor], targets: Sequence[Tensor], link: Link) -> Transfer:
    """Start copying tensors into others of their shapes and dtypes.

    The ledger counts the bytes; between disk and device they pass through the host.

    >>> start([torch.ones(2)], [torch.empty(2)], Link("host", "device")).wait()
    [tensor([1., 1.])]
    """
    path = _PATHS.get((link.source, link.target), (link.source, link.target))
    for source, target in zip(sources, targets, strict=True):
        _validate(source, target)
        for ledger in active():
            for hop in pairwise(path):
                ledger.record_move(link.device, *hop, source.nbytes)
        note_move(link.source, link.target, source.nbytes)

    sources = [source.detach() for source in sources]
    targets = [target.detach() for target in targets]
    tensors = [*sources, *targets]
    mode = current_stress()
    if any([x.is_meta for x in tensors]):
        return Transfer(targets)
    if mode.poison:
        for target in targets:
            poison(target)
        if mode.rate is None:
            return Transfer(targets, _once(partial(_copy_all, sources, targets)))

    is_on_disk = any([disk.is_on_disk(x) for x in tensors])
    places = {is_on_host(x) for x in tensors}
    if len(places) == 2 and not is_on_disk:
        return _start_on_stream(sources, targets)
    if link.runtime == "process" or mode.rate is not None:
        return _start_in_thread(sources, targets, link, mode)
    _copy_all(sources, targets)
    return Transfer(targets)


def _validate(source: Tensor, target: Tensor) -> None:
    if source.shape != target.shape or source.dtype != target.dtype:
        raise ValueError(
            f"start: target must have the shape and dtype of source, {tuple(source.shape)} and "
            f"{source.dtype}; got {tuple(target.shape)} and {target.dtype}. "
            "Make it with torch.empty_like."
        )


def _copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        disk.copy(source, target)


def _once(call: Callable[[], object]) -> Callable[[], None]:
    """Return a function that makes a call the first time: later, sources may have other values."""
    calls = [call]

    def run() -> None:
        while calls:
            calls.pop()()

    return run


_PATHS: dict[tuple[Memory, Memory], tuple[Memory, ...]] = {
    ("disk", "device"): ("disk", "host", "device"),
    ("device", "disk"): ("device", "host", "disk"),
}
"""Copies that pass through another memory, for the ledger."""


# -- copies under way ----------------------------------------------------------------------------


class _Copies:
    """The copies of one transfer while they are under way.

    Args:
        nbytes: of the tensors.
        is_done: returns True once the copies have ended.
        pass_by: waits until the device's tensors may be written to, or freed.
        on_device, on_host: tensors whose memory must stay until then, and until the copies are
            done.
    """

    def __init__(
        self,
        nbytes: int,
        is_done: Callable[[], bool],
        pass_by: Callable[[], object],
        on_device: Sequence[Tensor] = (),
        on_host: Sequence[Tensor] = (),
    ) -> None:
        self.nbytes = nbytes
        self.is_done = is_done
        self.is_released = False
        self._pass_by = pass_by
        self._on_device = on_device
        self._on_host = on_host

    def release(self) -> None:
        """Wait until the device's tensors may be written to, and free them."""
        if not self.is_released:
            self._pass_by()
            self.is_released = True
            self._on_device = ()

    def end(self) -> None:
        """Free all tensors: the host has waited for the copies."""
        self.is_released = True
        self._on_device = self._on_host = ()


Direction = tuple[object, ...]


class _Queue:
    """The copies under way in one direction, in the order of their starts.

    `lock` is held while the oldest ones are waited for: others that start copies in this direction
    wait for room, too.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.copies = deque[_Copies]()


_under_way: defaultdict[Direction, _Queue] = defaultdict(_Queue)


# Note [The device waits for room]
# The host starts copies long before the device makes them. Tensors of a copy must stay until then,
# so without a limit the host would fill the device's memory. It must not wait for room either: it
# would no longer be ahead, and the device would idle between kernels. So the compute stream waits
# for the oldest copy, in the device's order of work, and the host frees its tensors at once: their
# memory is next used by work of that stream, after the wait. `record_stream` would keep it until
# the copy has really ended, and all that the host starts meanwhile would need more.
def _add(direction: Direction, copies: _Copies) -> None:
    """Add copies to those under way in a direction; release the oldest ones if these are too many.

    See Note [The device waits for room].
    """
    queue = _under_way[direction]
    with queue.lock:
        while queue.copies and queue.copies[0].is_done():
            queue.copies.popleft()
        held = [other for other in queue.copies if not other.is_released]
        total = sum([other.nbytes for other in held])
        while len(held) > 1 and total + copies.nbytes > UNDER_WAY:
            oldest = held.pop(0)
            oldest.release()
            total -= oldest.nbytes
        queue.copies.append(copies)


def _start_in_thread(
    sources: Sequence[Tensor], targets: Sequence[Tensor], link: Link, mode: Stress
) -> Transfer:
    on_gpu = [x for x in (*sources, *targets) if not is_on_host(x)]
    nbytes = sum([source.nbytes for source in sources])
    ready = None  # when the device has computed the sources, and no longer uses the targets
    if on_gpu:
        ready = torch.cuda.current_stream(on_gpu[0].device).record_event()

    def run() -> None:
        if mode.rate is not None:
            time.sleep(nbytes / mode.rate)
        if ready is None:
            _copy_all(sources, targets)
            return
        stream = copy_stream(on_gpu[0].device, f"{link.source} to {link.target}")
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            _copy_all(sources, targets)
        stream.synchronize()

    future = _helper(os.getpid()).submit(run)
    # A fork starts without copies: its parent's end in a thread that it has not.
    direction = os.getpid(), link.source, link.target
    _add(direction, _Copies(nbytes, future.done, future.exception))
    return Transfer(targets, future.result)


@lru_cache(maxsize=1)
def _helper(process: int) -> ThreadPoolExecutor:
    """Return the helper thread of a process; a fork has none of its parent's."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"fshard transfers {process}")


def _start_on_stream(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Transfer:
    to_device = is_on_host(sources[0])
    on_device, on_host = (targets, sources) if to_device else (sources, targets)
    device = on_device[0].device
    name = "to device" if to_device else "to host"
    compute = torch.cuda.current_stream(device)
    stream = copy_stream(device, name)
    stream.wait_stream(compute)
    with torch.cuda.stream(stream):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        event = stream.record_event()

    # Of the stream that was current at the start, whose memory this is, as a rule.
    pass_by = partial(compute.wait_event, event)
    nbytes = sum([source.nbytes for source in sources])
    copies = _Copies(nbytes, event.query, pass_by, on_device, on_host)
    _add((device, name), copies)

    def wait_on_host() -> None:
        event.synchronize()
        copies.end()

    def wait_on_device() -> None:
        copies.release()
        current = torch.cuda.current_stream(device)
        if current != compute:
            current.wait_event(event)

    if to_device:
        return Transfer(targets, wait_on_device)
    return Transfer(targets, wait_on_host, copies.release)
