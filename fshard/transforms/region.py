"""What a rematerialised function keeps, operation by operation: results are noted in forward, handed out again later.

An operation is known by its number among those that count.  For "dots" that are matrix products and convolutions.  For
names it is every operation under a recording grad mode: what runs inside an autograd Function, collectives among them,
is not counted, since on virtual devices the last to arrive computes for all, and who that is may change.

    forward    %0 = mm    %1 = sin    %2 = view(%1)    name(%2, "a")       keep {1: %1}: the operation that made the memory
    again      %0 = mm    %1 = kept[1]                 ...

A result that was changed in place since it was kept is computed again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_aten: Any = torch.ops.aten
DOTS = frozenset(
    getattr(_aten, op).default
    for op in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "convolution", "_scaled_mm")
)


class Kept(NamedTuple):
    """A kept result: an alias of it and its version when it was kept, or a copy on the host."""

    value: Tensor
    version: int | None
    device: torch.device

    def get(self) -> Tensor | None:
        """Return the result, or None if it has been written to."""
        if self.version is None:
            return self.value.to(self.device)
        return _alias(self.value) if self.value._version == self.version else None


class Made(NamedTuple):
    """Which operation made some memory, and how its result lies in it.

    The weak reference lets the memory go, but nothing else will have its name.
    """

    memory: StorageWeakRef
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class Region:
    """What one call of a rematerialised function keeps: dots if `names` is None; on the host if asked."""

    names: frozenset[str] | None
    host: bool
    kept: dict[int, Kept] = field(default_factory=dict[int, Kept])

    def counts(self, op: Any) -> bool:
        """Return whether an operation has a number."""
        return op in DOTS if self.names is None else torch.is_grad_enabled()

    def keep(self, number: int, x: Tensor) -> None:
        """Keep a result."""
        if self.host and not is_on_host(x):
            self.kept[number] = Kept(x.detach().to("cpu"), None, x.device)
        else:
            self.kept[number] = Kept(_alias(x), x._version, x.device)


class Keeping(TorchDispatchMode):
    """The forward of a region."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region
        self._number = 0
        self._makers: dict[int, Made] = {}

    def __enter__(self) -> Any:
        _open.regions = (*_open.regions, self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _open.regions = _open.regions[:-1]
        self._makers = {}
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._region.counts(func):
            if self._region.names is None:
                self._region.keep(self._number, result)
            elif isinstance(result, Tensor):
                self._note(result, args)
            self._number += 1
        return result

    def _note(self, result: Tensor, args: tuple[Any, ...]) -> None:
        if result.layout != torch.strided:
            return
        memory = _memory(result)
        if not any(isinstance(x, Tensor) and _memory(x) == memory for x in args):  # else it is a view, or in place
            lies = tuple(result.shape), result.stride(), int(result.storage_offset())
            self._makers[memory] = Made(StorageWeakRef(result.untyped_storage()), self._number, *lies)

    def mark(self, x: Tensor, label: str) -> None:
        """Keep what made x, if its name is one of the region's."""
        made = self._makers.get(_memory(x)) if self._region.names and label in self._region.names else None
        if made is not None:
            with torch.no_grad():  # so that these two are not counted
                self._region.keep(made.number, x.detach().as_strided(made.size, made.stride, made.offset))


class Replaying(TorchDispatchMode):
    """A region's function, run again."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region
        self._number = 0

    def __enter__(self) -> Any:
        self._number = 0
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._region.counts(func):
            kept = self._region.kept.get(self._number)
            self._number += 1
            value = None if kept is None else kept.get()
            if value is not None:
                return value
        return func(*args, **(kwargs or {}))


class _Open(threading.local):
    """The regions whose forward runs in this thread, from the outside in."""

    regions: tuple[Keeping, ...] = ()


_open = _Open()


def mark(x: Tensor, label: str) -> None:
    """Tell the regions around of a value's name."""
    for region in _open.regions:
        region.mark(x, label)


def is_on_host(x: Tensor) -> bool:
    """Return whether a tensor takes no memory of an accelerator."""
    return x.device.type in ("cpu", "meta")


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata if x.layout == torch.strided else 0  # pyright: ignore[reportPrivateUsage]


def _alias(x: Tensor) -> Tensor:
    """Return another tensor of the same memory and version, below autograd."""
    with _C._SetExcludeDispatchKeyGuard(_C.DispatchKey.ADInplaceOrView, False):  # which shares the version
        return x.detach()
