"""Units in autograd: the nodes by which a loss depends on parameters, and how they are saved.

    anchor ──> _UseUnit ──> all unsharded parameters of a unit ──(_UseOnce)──> operations ──> loss
    anchor ──> _LazyParams ──> lazy parameters ──> operations in C++ ──> loss

The backward of a `_UseUnit` runs right after the backwards of the operations that used the unit, so
the unit is resharded and reduced while autograd continues with earlier units.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fshard.mesh.collectives.autograd import transformed
from fshard.transforms.fsdp.lazy_param import LazyParam, Runtime
from fshard.transforms.fsdp.plans import Gradients
from fshard.transforms.fsdp.units import Unit

_torch: Any = torch
_hooks: Any = torch._C._autograd  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


# -- nodes ----------------------------------------


# Note [The anchor makes autograd call units]
# Autograd records a Function only if an input requires a gradient, and runs its backward only on
# the way to an input whose gradient is requested. Shards are no inputs: their gradients are reduced
# in the background, not returned. So each use of units has one scalar input, the anchor of the
# step, and a backward requests its gradient, which is None. It runs all nodes that lead to units,
# and no other: `.grad` of other leaves stays as it is, unless they are requested too.


class _UseUnit(Function):
    """Forward: the all-gather of a unit.  Backward: the reduction of its gradients.

    See Note [The anchor makes autograd call units].
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, runtime: Runtime, unit: Unit) -> tuple[Tensor, ...]:
        ctx.runtime = runtime
        ctx.unit = unit
        # Else None, the gradient of a parameter that was not used, would be zeros: memory, and
        # `used` would be wrong.
        ctx.set_materialize_grads(False)
        # A Function must not return an object that it has from elsewhere: autograd would make the
        # unit's own values part of the graph. The detached ones share their version counters, so
        # writes to them are found.
        outputs = [x.detach() for x in runtime.wait_for_unshard(unit)]
        frozen = [x for x, plan in zip(outputs, unit.plan.params, strict=True) if not plan.trained]
        ctx.mark_non_differentiable(*frozen)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[None, None, None]:
        ctx.runtime.post_backward(ctx.unit, gs)
        return None, None, None


class _UseOnce(Function):
    """One use of one parameter, in reproducible mode.

    Backward: its cotangent is received separately.

    Autograd adds up the cotangents of all uses of a `_UseUnit`, and a unit that was resharded in
    between has several, so the order of additions would depend on when units are resharded.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, runtime: Runtime, unit: Unit, position: int) -> Tensor:
        ctx.runtime = runtime
        ctx.unit = unit
        ctx.position = position
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[None, None, None, None]:
        row: Gradients = [None] * len(ctx.unit.plan.indices)
        (row[ctx.position],) = gs
        ctx.runtime.receive_separately(ctx.unit, row)
        return None, None, None, None


class _LazyParams(Function):
    """Forward: the lazy parameters of a step.

    Backward: their own cotangents are added to those of their units.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, runtime: Runtime) -> tuple[Tensor, ...]:
        # A weak reference: the runtime holds the lazy parameters, these hold their node, and
        # Python's collector does not see that cycle.
        ctx.runtime = weakref.ref(runtime)
        ctx.set_materialize_grads(False)
        lazy_params: list[LazyParam] = []
        for unit in runtime.units:
            for position in range(len(unit.plan.params)):
                lazy_params.append(LazyParam.of(runtime, unit, position))
        ctx.mark_non_differentiable(*[x for x in lazy_params if not x.plan.trained])
        return tuple(lazy_params)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[None, None]:
        runtime = ctx.runtime()
        start = 0
        for unit in runtime.units:
            stop = start + len(unit.plan.indices)
            runtime.receive_separately(unit, gs[start:stop])
            start = stop
        return None, None


_PARAM_FUNCTIONS: tuple[Any, ...] = (_UseUnit, _UseOnce, _LazyParams)
PARAM_NODES: tuple[Any, ...] = tuple(function._backward_cls for function in _PARAM_FUNCTIONS)
"""The autograd nodes by which a loss depends on parameters."""


def use_unit(runtime: Runtime, unit: Unit) -> tuple[Tensor, ...]:
    """Return all parameters of a unit for one use, recorded by autograd."""
    return _UseUnit.apply(runtime.anchor, runtime, unit)  # type: ignore[return-value]


def use_once(runtime: Runtime, unit: Unit, x: Tensor, position: int) -> Tensor:
    """Return one parameter for one operation, whose cotangent is received separately."""
    with outside_transforms():
        return _UseOnce.apply(x, runtime, unit, position)  # type: ignore[no-any-return]


def lazy_params_of(runtime: Runtime) -> tuple[Tensor, ...]:
    """Return the lazy parameters of all units, in their order."""
    return _LazyParams.apply(runtime.anchor, runtime)  # type: ignore[no-any-return]


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context outside of torch.func's transforms, which parameters do not belong to."""
    return temporarily_clear_interpreter_stack() if transformed() else nullcontext()


# -- saved tensors ----------------------------------------


class _SavedView(NamedTuple):
    """A view of a parameter of a unit, saved without its memory."""

    unit: Unit
    position: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool


class _Storage(NamedTuple):
    """The storage of an unsharded parameter.

    See Note [Saved parameters are found by their storage].
    """

    unit: Unit
    position: int
    dtype: torch.dtype
    itself: StorageWeakRef


# Note [Saved parameters are found by their storage]
# Operations save parameters and views of them, such as w.t(), and hooks get nothing but the
# tensor. So unsharded parameters are registered by the address of their storage, which all
# their views share. The address of a freed storage may be given to another one; each entry has a
# weak reference, which keeps the address taken until the slice ends. A view in another dtype, as of
# view_as_real, is saved as it is: `as_strided` of the parameter does not make it.


class SavedTensors:
    """Saved-tensor hooks that keep unsharded parameters out of autograd's graph.

    So their memory can be freed.

    Args:
        is_needed: True if any unit is resharded.
        unshard: returns the parameters of a unit in a backward.
    """

    def __init__(self, *, is_needed: bool, unshard: Callable[[Unit], Sequence[Tensor]]) -> None:
        self._is_needed = is_needed
        self._unshard = unshard
        self._storages: dict[int, _Storage] = {}

    def register(self, unit: Unit) -> None:
        """Register the storages of an unsharded unit.

        See Note [Saved parameters are found by their storage].
        """
        if not self._is_needed:
            return
        for position, x in enumerate(unit.values):
            reference = StorageWeakRef(x.untyped_storage())
            self._storages[_storage_address(x)] = _Storage(unit, position, x.dtype, reference)

    def clear(self) -> None:
        """End a slice."""
        self._storages.clear()

    def watch(self) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        return saved_tensors_hooks(self._pack, self._unpack) if self._is_needed else nullcontext()

    def _pack(self, x: Tensor) -> Any:
        """Return a saved tensor, or a view of a parameter without its memory."""
        if type(x) is LazyParam:
            return x
        storage = self._storages.get(_storage_address(x))
        if storage is None or x.dtype != storage.dtype:
            # An output that is saved by its own operation, as of exp, would hold the node that
            # holds it.
            return x.detach() if x.requires_grad else x
        return _SavedView(  # (5)
            storage.unit,
            storage.position,
            x.size(),
            x.stride(),
            int(x.storage_offset()),
            x.is_conj(),
            x.is_neg(),
        )

    def _unpack(self, saved: Any) -> Tensor:
        """Return the saved tensor; its unit is unsharded again if it was freed."""
        if not isinstance(saved, _SavedView):
            return saved
        param = self._unshard(saved.unit)[saved.position]
        x = param.as_strided(saved.size, saved.stride, saved.offset)
        if saved.is_conj:
            x = x.conj()
        if saved.is_neg:
            x = _torch._neg_view(x)
        return x


@contextmanager
def unwatched() -> Generator[None]:
    """Remove all saved-tensor hooks within the context."""
    before: list[Any] = []
    while (hooks := _hooks._top_saved_tensors_default_hooks(False)) is not None:
        before.append(hooks)
        _hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(before):
            _hooks._push_saved_tensors_default_hooks(*hooks)


def _storage_address(x: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
