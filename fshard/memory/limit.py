"""`limit`: count every storage of every device, by kind and purpose, and raise beyond a limit.

    operation ──> its new storages ──> blocks ──> totals of (device, kind) ──> MemoryLimitError
                        └─ weak references: a block is freed with its storage

Each virtual device is counted by itself, and a process or the device of an abstract mesh too. A
storage that belongs to no device, such as a global batch, counts on all of them. Temporary memory
inside of torch's kernels is not counted.

On CPUs, a result is in the memory of its operation's arguments, and arguments in two memories
raise, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fshard.memory.attention import fused_attention
from fshard.memory.usage import MemoryBlock, MemoryUsage
from fshard.mesh.layout import Memory, dtype_name, is_dense
from fshard.mesh.layout.counting import Purpose, counting, counting_by
from fshard.mesh.layout.kinds import memory_of
from fshard.mesh.runtimes.buffers import open_limits
from fshard.mesh.spmd.scope import here
from fshard.source import Site, call_site

_ops: Any = torch.ops.aten
_ACROSS = {
    _ops.copy_.default,
    _ops._foreach_copy_.default,
    _ops._to_copy.default,
    _ops.set_.source_Tensor,
    _ops.index.Tensor,
    _ops.index_put.default,
    _ops.index_put_.default,
}
"""The operations whose arguments may be in several memories."""
# By getattr, since torch's stub takes it for a method of three arguments.
_PLAIN = getattr(Tensor, "__torch_dispatch__")  # noqa: B009


class CountStorages(TorchDispatchMode):
    """Counts the storages of the operations that run while it is open: a `StorageCounter`."""

    def __init__(self, usage: MemoryUsage) -> None:
        super().__init__()
        self.usage = usage

    # -- operations ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            return NotImplemented  # a subclass, whose own operations count
        if self not in counting().counters:
            return func(*args, **kwargs)

        self.usage.free_dead()
        inputs = [(x, self._of_argument(x)) for x in _tensors((*args, *kwargs.values()))]
        kinds = {block.kind for x, block in inputs if x.ndim}  # numbers are on the host anyway
        if len(kinds) > 1 and func not in _ACROSS:
            raise _mixed(func, inputs)

        result = func(*args, **kwargs)
        self.usage.free_dead()  # the operation may have freed storages: it has its own arguments
        if self.usage.timeline:
            flops = flop_registry.get(func.overloadpacket)
            if flops is not None:
                self.usage.timeline[-1].flops += flops(*args, **kwargs, out_val=result)

        # Of an operation on lists, such as _foreach_add, each result is like its own argument.
        outputs = [*_tensors((result,))]
        has_list = bool(args) and isinstance(args[0], list | tuple)
        is_of_lists = has_list and len(args[0]) == len(outputs) <= len(inputs)
        for index, y in enumerate(outputs):
            sources = inputs[index : index + 1] if is_of_lists else inputs
            self._count_result(func, y, sources)
        return result

    def _of_argument(self, x: Tensor) -> MemoryBlock:
        """Return the block of an argument, a new one if it is from before the limit."""
        block = self.usage.find(x.untyped_storage())
        if block is None:
            block = self._add_new(x, _memory_of(x), None, None)
            block.is_adopted = True
            return block

        if block.is_adopted:
            scope = here()
            if scope is not None and block.device not in (None, scope.number):
                # Several devices use it.
                self.usage.change(block, None, block.kind, block.purpose)
        return block

    def _count_result(
        self, func: Any, y: Tensor, sources: Sequence[tuple[Tensor, MemoryBlock]]
    ) -> None:
        """Count a result: in the memory, on the device and for the purpose of the arguments."""
        storage = y.untyped_storage()
        block = self.usage.find(storage)
        if block is not None:
            self.usage.resize(block, storage.nbytes())
            return
        if y.is_meta and func is _ops._to_copy.default:
            source, source_block = sources[0]
            if not source.is_meta:
                # An abstract mesh drops the values of an argument, which counts as the same block.
                self.usage.share(storage, source_block)
                return

        # The argument that the result is most like: not a number, if another is on its device.
        near = [block for x, block in sources if x.ndim and x.is_cuda == y.is_cuda]
        near += [block for x, block in sources if not x.ndim and x.is_cuda == y.is_cuda]
        like = near[0] if near else None
        kind = counting().memory
        if kind is None:
            kind = _memory_of(y) if like is None else like.kind
        devices = {block.device for _, block in sources} - {None}
        device = devices.pop() if len(devices) == 1 else None
        self._add_new(y, kind, device, like)

    # -- what is no result of an operation -------------------------------------------------------

    def claim(
        self,
        x: Tensor,
        device: int | None = None,
        kind: Memory | None = None,
        purpose: Purpose | None = None,
    ) -> None:
        """Count the storage of a tensor; change the device, kind and purpose it is counted for."""
        if type(x) not in (Tensor, Parameter) or not is_dense(x):
            return
        self.usage.free_dead()
        block = self.usage.find(x.untyped_storage())
        if block is None:
            block = self._add_new(x, kind or _memory_of(x), device, None, purpose)
            block.is_adopted = device is None
            return

        self.usage.resize(block, x.untyped_storage().nbytes())
        if device is None:
            device = block.device
        elif block.device != device and not block.is_adopted:
            device = None  # several devices have it
        block.is_adopted = False
        self.usage.change(block, device, kind or block.kind, purpose or block.purpose)

    def reserve(self, delivery: object, xs: Sequence[Tensor], count: int) -> None:
        """Count bytes that are to be delivered, until they are or the delivery is freed."""
        self.usage.free_dead()
        source, *_ = [self._of_argument(x) for x in xs]
        self.usage.add(delivery, self._block(count, source.kind, source.device, source))

    def deliver(self, delivery: object, results: Sequence[Tensor]) -> None:
        """Count the storages of the results in place of what was reserved."""
        self.usage.free_dead()
        if self.usage.find(delivery) is None:
            return  # the limit has ended since it was reserved
        reserved = self.usage.take(delivery)
        for y in results:
            storage = y.untyped_storage()
            if self.usage.find(storage) is None:
                address = self.usage.new_address()
                block = replace(reserved, size=storage.nbytes(), address=address, users=1)
                self.usage.add(storage, block)

    def mark(self, name: str) -> None:
        """Begin an entry in the timeline: a use of a unit, or the update."""
        self.usage.mark(name)

    def note_move(self, source: Memory, target: Memory, count: int) -> None:
        """Count the bytes of a copy in the current entry of the timeline, if it has begun."""
        if self.usage.timeline:
            self.usage.timeline[-1].moved[source, target] += count

    def note_kept(self, name: str, count: int) -> None:
        """Count the bytes of a named activation that is saved on the device."""
        self.usage.keep(name, count)

    def _block(
        self,
        size: int,
        kind: Memory,
        device: int | None,
        source: MemoryBlock | None,
        purpose: Purpose | None = None,
    ) -> MemoryBlock:
        """Return a block of the device that runs, for the current purpose or that of its source."""
        current = counting()
        purpose = purpose or current.purpose
        if purpose is None:
            purpose = "other" if source is None else source.purpose

        scope = here()
        if scope is not None:
            device = scope.number
        elif current.owner is not None:
            device = current.owner
        site = self._site(current.site)
        return MemoryBlock(size, kind, purpose, device, site, self.usage.new_address())

    def _site(self, default: Site | None) -> Site:
        """Return the line of the program that allocates."""
        return call_site(default)

    def _add_new(
        self,
        x: Tensor,
        kind: Memory,
        device: int | None,
        source: MemoryBlock | None,
        purpose: Purpose | None = None,
    ) -> MemoryBlock:
        storage = x.untyped_storage()
        return self.usage.add(storage, self._block(storage.nbytes(), kind, device, source, purpose))


def _memory_of(x: Tensor) -> Memory:
    """Return the memory kind of a tensor, beside the devices of the mesh that the caller runs on."""
    scope = here()
    return memory_of(x, None if scope is None else scope.mesh.device_type)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the dense tensors of arguments."""
    for value in values:
        if isinstance(value, Tensor):
            if is_dense(value):
                yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mixed(func: Any, inputs: Sequence[tuple[Tensor, MemoryBlock]]) -> RuntimeError:
    """Return the error of an operation on tensors in several memories."""
    tensors = ", ".join(
        f"{dtype_name(x.dtype)}{list(x.shape)} in {block.kind} memory" for x, block in inputs
    )
    return RuntimeError(
        f"{func} at {call_site()} must have all tensors in one memory; got {tensors}. Copy one: "
        'fs.reshard(x, x.layout.with_memory("device")).'
    )


@contextmanager
def limit(
    *, device: int | None = None, host: int | None = None, disk: int | None = None
) -> Generator[MemoryUsage]:
    """Count every storage of every device inside the block, and raise beyond a limit.

    Args:
        device, host, disk: the most bytes that each device may have in this memory; None counts
            only.

    An allocation beyond a limit raises a `MemoryLimitError` with the largest holders. What a
    collective delivers counts for its receiver, from its start; storages from before the block
    count from their first use in it. Operations outside of the block cost nothing; inside, each
    costs some microseconds. It counts in the calling thread and those of its devices.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 4})
    >>> with fs.memory.limit(device=100) as used:  # 64 bytes, and 16 on each device
    ...     params = fs.shard_params({"w": torch.ones(16)}, fs.fsdp("data"), mesh=mesh)
    >>> used.peak(), used.peak("device", "parameters"), used.peak("host")
    (80, 16, 0)
    >>> with fs.memory.limit(device=100):
    ...     torch.ones(16) + torch.ones(16)
    Traceback (most recent call last):
    fshard.errors.MemoryLimitError: memory.limit: device memory must be at most 100 bytes per
    device; got 128 with 64 more ...
    """
    limits: dict[Memory, int | None] = {"device": device, "host": host, "disk": disk}
    errors: list[str] = []
    for kind, size in limits.items():
        if size is not None and (type(size) is not int or size < 0):
            errors.append(f"{kind}={size!r}")
    if errors:
        raise ValueError(
            f"memory.limit: a limit must be a number of bytes, or None; got {', '.join(errors)}."
        )

    used = MemoryUsage(limits)
    with counted(used, CountStorages(used)):
        yield used


@contextmanager
def counted(used: MemoryUsage, counter: CountStorages) -> Generator[None]:
    """Let a counter count inside the block; then close its count."""
    open_limits.append(used)
    current = counting()
    counters = (*current.counters, counter)
    try:
        with counting_by(replace(current, counters=counters)), counter, fused_attention():
            yield
    finally:
        open_limits.remove(used)
        used.close()


def open_usages() -> list[MemoryUsage]:
    """Return the usage of each limit around the caller."""
    return [counter.usage for counter in counting().counters if isinstance(counter, CountStorages)]
