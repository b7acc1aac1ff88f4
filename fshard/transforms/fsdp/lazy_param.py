"""`LazyParam`: a parameter as a tensor without memory, whose unit is all-gathered when an operation uses it.

It has shape, dtype and device, and modules accept it. Its values are used in one of two ways:

    torch.f(h, x)       __torch_function__    f runs on the unsharded tensors, and gradients go to their unit (`_UseUnit`)
    f called in C++     __torch_dispatch__    f gets h itself, and gradients go to h's own node (`_LazyParams`)

The second is for autograd Functions, custom operators and torch.func, which ignore a tensor's class.

Saved-tensor hooks replace each saved view of an unsharded parameter by its index in the unit, so that the memory can
be freed; the backward unshards the unit again. Steps whose loss function calls torch.func go without: see Note
[torch.func refuses saved-tensor hooks].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fshard.errors import LayoutError, ModuleError, ScopeError
from fshard.mesh.spmd.scope import here
from fshard.transforms.fsdp.plans import versions_of
from fshard.transforms.fsdp.units import USE_NODES, LazyUnit
from fshard.transforms.module.replica import NO_GRADS, TRAINED_IS_FIXED
from fshard.transforms.patterns import titled

_compiler: Any = torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined]
"""Returns the callback of torch.compile for this frame, None outside of it."""
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_T: Any = Tensor
_ATTRIBUTES = (
    "device", "dtype", "is_cpu", "is_cuda", "is_meta", "is_nested", "is_sparse", "itemsize", "layout", "nbytes", "ndim",
    "requires_grad", "shape",
)  # fmt: skip
_METHODS = (
    _T.__len__,
    _T.dim,
    _T.element_size,
    _T.get_device,
    _T.is_complex,
    _T.is_floating_point,
    _T.nelement,
    _T.numel,
    _T.size,
)
KNOWN = frozenset((*(getattr(_T, name).__get__ for name in _ATTRIBUTES), *_METHODS))
"""The functions that a lazy parameter answers without being unsharded."""
_CONSTANTS = {_T.grad_fn.__get__: None, _T.is_leaf.__get__: True}
"""Attributes whose value is the same for all parameters."""

_COMPILED = (
    "torch.compile cannot trace a parameter that is gathered when it is used. Compile a block of a boosted model in place, "
    "block.compile(); else the entire loss function, or a part that is called with unsharded parameters: "
    "fs.with_unsharded_params(torch.compile(fn))."
)
WRITES = (
    "Declare a frozen parameter that the forward updates as a buffer, fs.functionalize(module, buffers=...), or update it "
    "between steps: in the params of a functional loop; of a boosted model by model.load_state_dict, or by its shards, as for "
    "clamping or an average: with booster.parameters(model) as shards."
)


class LazyParam(Tensor):
    """A parameter inside a loss function: the one at `position` of its unit."""

    unit: LazyUnit
    position: int
    is_in_array: bool = False
    """It is a shard of an array: see `tensor/run.py`. Else one that is sharded is for its layer alone."""
    _is_param = True
    """Makes isinstance(x, nn.Parameter) true."""

    @staticmethod
    def of(unit: LazyUnit, position: int) -> LazyParam:
        """Return the lazy parameter at a position in a unit."""
        plan = unit.plans[position]
        dtype = unit.runtime.options.used_in(plan.dtype)
        param = _T._make_wrapper_subclass(
            LazyParam, plan.shape, dtype=dtype, device=unit.shards[position].device
        )
        param.unit, param.position = unit, position
        return param

    def unshard(self) -> Tensor:
        """Return the unsharded tensor."""
        unit, runtime = self.unit, self.unit.runtime
        if unit.outputs is None or here() is not runtime.scope:
            if torch.compiler.is_compiling() or _compiler():
                raise LayoutError(_COMPILED)
            self._check_device()
            if runtime.state == "closed":
                raise ScopeError(
                    f"{self._path} is a parameter of a step that is over: it was kept from inside a loss function. Return what "
                    "is needed of it with has_aux=True, or take it from the parameters that the step returns."
                )
            if not self.is_in_array and unit.plans[self.position].used.entries:
                self._check_in_loss()
        x = unit.pre_forward()[self.position]
        return (
            unit.use_once(x, self.position)
            if runtime.options.reproducible and x.requires_grad
            else x
        )

    @property
    def step(self) -> Any:
        """The runtime of the step that it belongs to."""
        return self.unit.runtime

    def raise_written(self, *arguments: Any) -> None:
        """Raise: a forward writes to a parameter."""
        raise ModuleError(f"a forward writes to {self._subject}. {WRITES}")

    @property
    def _path(self) -> str:
        return titled(self.unit.plans[self.position].path)

    @property
    def _subject(self) -> str:
        path = self.unit.plans[self.position].path
        return f"the parameter {titled(path)}" if path else titled(path)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in KNOWN:
            with _C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _CONSTANTS:
            return _CONSTANTS[func]
        if func in _ATTRIBUTE_FUNCTIONS and type(args[0]) is LazyParam:
            return _ATTRIBUTE_FUNCTIONS[func](*args, **(kwargs or {}))
        return func(*unsharded(args), **(unsharded(kwargs) if kwargs else {}))  # (3)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch.no_grad():
            return func(*unsharded(args), **(unsharded(kwargs) if kwargs else {}))

    def _check_device(self) -> None:
        """Raise if the parameter belongs to another device."""
        runtime, scope = self.unit.runtime, here()
        if (
            scope is not None
            and scope.device != runtime.scope.device
            and scope.mesh is runtime.scope.mesh
        ):
            raise ModuleError(
                f"device {scope.device} of {scope.mesh} uses {self._subject} of device {runtime.scope.device}: "
                "virtual devices are threads, and share the module that torch.func.functional_call writes to. Write "
                "apply, params, buffers = fs.functionalize(module), or fs.with_unsharded_params around the call."
            )

    def _check_in_loss(self) -> None:
        """Raise if a shard is used outside of the model: what devices compute of theirs would not be added up."""
        scope = here()
        if scope is not None and not scope.own:
            raise ModuleError(
                f"{self._path} must be used in the model's forward only, since each device has a shard of it, "
                f"{self.unit.plans[self.position].used}; got an operation in the loop. Compute a penalty in the forward, "
                "with fs.psum over these axes, or take the optimizer's weight decay."
            )

    def __hash__(self) -> int:
        self._check_device()  # functional_call reads it before it calls the module
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyParam({str(self.dtype).removeprefix('torch.')}{list(self.shape)})"


def _read_grad(param: LazyParam) -> None:
    """Return None, as `.grad` of a parameter in a forward; raise once there are gradients, which are sharded."""
    if any(param.step.reductions.used) and param.requires_grad:
        raise ModuleError(NO_GRADS)


def _write_grad(param: LazyParam, grad: Tensor | None = None) -> None:
    """Raise: a gradient would not be used; but None, where there is none, changes nothing."""
    if grad is not None or any(param.step.reductions.used):
        raise ModuleError(NO_GRADS)


def _set_requires_grad(param: LazyParam, requires_grad: bool = True) -> LazyParam:
    if requires_grad != param.requires_grad:
        raise ModuleError(TRAINED_IS_FIXED)
    return param


_ATTRIBUTE_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _T.grad.__get__: _read_grad,
    _T.grad.__set__: _write_grad,
    _T.grad.__delete__: _write_grad,
    _T.data.__get__: lambda param: (
        param.unshard().detach()
    ),  # it shares the version counter, so writes are detected
    _T.data.__set__: LazyParam.raise_written,
    _T.requires_grad.__set__: _set_requires_grad,
    _T.requires_grad_: _set_requires_grad,
}
"""The functions of `.grad`, `.data` and `.requires_grad`."""


def lazy_versions(xs: Sequence[Tensor]) -> list[int]:
    """Return the version counters of lazy parameters, without unsharding them."""
    with _C.DisableTorchFunctionSubclass():
        return versions_of(xs)


def unsharded(x: Any) -> Any:
    """Replace lazy parameters by unsharded tensors in the arguments of a torch function."""
    kind = type(x)
    if kind is LazyParam:
        return x.unshard()
    if kind is tuple or kind is list:
        items = list[Any]()
        for item in x:  # a loop: most arguments are plain tensors or lazy parameters
            items.append(item.unshard() if type(item) is LazyParam else unsharded(item))
        return kind(items)
    if kind is dict:
        return {key: unsharded(value) for key, value in x.items()}
    return x


class _LazyParams(Function):
    """Forward: the lazy parameters of a step. Backward: their own cotangents are added to those of their units."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, runtime: Any) -> tuple[Tensor, ...]:
        ctx.runtime = weakref.ref(runtime)
        ctx.set_materialize_grads(False)
        lazy_params = [
            LazyParam.of(unit, position)
            for unit in runtime.units
            for position in range(len(unit.plans))
        ]
        ctx.mark_non_differentiable(
            *(x for x in lazy_params if not x.unit.plans[x.position].trained)
        )
        return tuple(lazy_params)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[None, None]:
        runtime: Any = ctx.runtime()
        start = 0
        for unit in runtime.units:
            stop = start + len(unit.indices)
            runtime.reductions.receive_separately(unit, gs[start:stop])
            start = stop
        return None, None


PARAM_NODES = (*USE_NODES, cast("Any", _LazyParams)._backward_cls)
"""The autograd nodes by which a loss depends on parameters."""


def lazy_params_of(runtime: Any) -> tuple[Tensor, ...]:
    """Return the lazy parameters of all units, in their order."""
    return _LazyParams.apply(runtime.anchor, runtime)  # type: ignore[no-any-return]


_torch: Any = torch
_hooks: Any = torch._C._autograd  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


class _SavedView(NamedTuple):
    """A view of a parameter of a unit, saved without its memory."""

    unit: LazyUnit
    position: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


class _Storage(NamedTuple):
    """The storage of an unsharded parameter; while this exists, no other storage gets the same address."""

    unit: LazyUnit
    position: int
    dtype: torch.dtype
    itself: StorageWeakRef


class SavedTensors:
    """Saved-tensor hooks that keep unsharded parameters out of autograd's graph.

    Args:
        is_needed: True if any unit is resharded.
    """

    def __init__(self, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._storages: dict[int, _Storage] = {}

    def register(self, unit: LazyUnit) -> None:
        """Register the storages of an unsharded unit."""
        for position, x in enumerate(unit.values if self._is_needed else ()):
            self._storages[_storage_address(x)] = _Storage(
                unit, position, x.dtype, StorageWeakRef(x.untyped_storage())
            )

    def clear(self) -> None:
        """End a slice."""
        self._storages.clear()

    def watch(self) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        return saved_tensors_hooks(self._pack, self._unpack) if self._is_needed else nullcontext()

    def _pack(self, x: Tensor) -> Any:
        if type(x) is LazyParam:
            return x
        storage = self._storages.get(_storage_address(x))
        if storage is None or x.dtype != storage.dtype:
            return (
                x.detach() if x.requires_grad else x
            )  # an output saved by its own operation would be a cycle
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
        if not isinstance(saved, _SavedView):
            return saved
        x = saved.unit.pre_backward()[saved.position].as_strided(
            saved.size, saved.stride, saved.offset
        )
        x = x.conj() if saved.conj else x
        return _torch._neg_view(x) if saved.neg else x


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
