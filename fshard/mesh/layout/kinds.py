"""Memory kinds: the memory that a shard is stored in.

    "device"    that of the mesh's device
    "host"      that of the host; page-locked beside a GPU
    "disk"      a file that is mapped into memory

Meshes of CPUs and abstract meshes have one memory for all kinds, so a table has the kind of each
storage that is not "device". Beside a GPU, tensors of the CPU are in host memory: what is computed
is on the mesh's device (`compute_device`), wherever its shards are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from fshard.mesh.layout.counting import Memory, counting, counting_by
from fshard.mesh.layout.mesh import Mesh, run_defaults

makers: dict[Memory, Callable[[Sequence[int], torch.dtype], Tensor]] = {}
"""Functions that make a tensor on disk, or in host memory beside a GPU.

They are set by `fshard.memory`, which is above this package.
"""
_kinds: WeakKeyDictionary[torch.UntypedStorage, Memory] = WeakKeyDictionary()


def compute_device(mesh: Mesh) -> torch.device:
    """Return the device that computes for a mesh: of GPUs, the calling thread's current one.

    Never that of a shard, which may be in host memory or on disk.

    >>> compute_device(Mesh((("data", 2),), "virtual", "cpu"))
    device(type='cpu')
    """
    if mesh.device_type == "cuda":
        # With its index: a device without one is unequal to that of each tensor on it.
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def memory_of(x: Tensor, device_type: str | None = None) -> Memory:
    """Return the memory kind of a dense tensor, beside the devices of a mesh of this type.

    Without a type, they are those of `fs.use_mesh`, else GPUs once the process uses one.

    >>> memory_of(torch.ones(2)), memory_of(empty_in("host", (2,), torch.float32, "cpu"))
    ('device', 'host')
    """
    if x.device.type not in ("cpu", "meta"):
        return "device"
    # Most programs have no storage in the table: they spare the search.
    if _kinds:
        while is_functorch_wrapped_tensor(x):
            x = get_unwrapped(x)  # a tensor of a transform of torch.func has no storage of its own
        kind = _kinds.get(x.untyped_storage())
        if kind is not None:
            return kind
    if device_type is None:
        mesh = run_defaults().mesh
        if mesh is not None:
            device_type = mesh.device_type
        elif torch.cuda.is_initialized():
            device_type = "cuda"
    is_beside_gpu = x.device.type == "cpu" and device_type == "cuda"
    return "host" if is_beside_gpu else "device"


def mark_memory(x: Tensor, memory: Memory) -> Tensor:
    """Record the memory kind of a new tensor, and return it."""
    if memory != "device":
        _kinds[x.untyped_storage()] = memory
    for counter in counting().counters:
        counter.claim(x, kind=memory)
    return x


def owned_by(device: int) -> AbstractContextManager[None]:
    """Count the storages made in the block, outside of any device's scope, for a device."""
    current = counting()
    if not current.counters:
        return nullcontext()
    return counting_by(replace(current, owner=device))


def _made_in(memory: Memory) -> AbstractContextManager[None]:
    """Count the storages made in the block in a memory.

    Else they would count as the device's until `mark_memory`, and could exceed its limit.
    """
    current = counting()
    if not current.counters:
        return nullcontext()
    return counting_by(replace(current, memory=memory))


def _has_maker(memory: Memory, device_type: str) -> bool:
    """Return True if tensors in a memory of a device of this type are not made by torch."""
    if memory not in makers or device_type == "meta":
        return False
    # The host memory of a CPU is its device memory, which torch allocates.
    return memory != "host" or device_type == "cuda"


def empty_in(memory: Memory, shape: Sequence[int], dtype: torch.dtype, device_type: str) -> Tensor:
    """Return an uninitialised tensor in a memory of a device of this type."""
    with _made_in(memory):
        if _has_maker(memory, device_type):
            return mark_memory(makers[memory](shape, dtype), memory)
        return mark_memory(torch.empty(tuple(shape), dtype=dtype, device=device_type), memory)


def copy_in(memory: Memory, x: Tensor, device_type: str) -> Tensor:
    """Return a contiguous copy in a memory of a device of this type."""
    if _has_maker(memory, device_type) or x.device.type != device_type:
        return empty_in(memory, x.shape, x.dtype, device_type).copy_(x)
    with _made_in(memory):
        return mark_memory(x.clone(memory_format=torch.contiguous_format), memory)
