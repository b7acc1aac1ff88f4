"""`LazyParam`: a parameter as a tensor without memory.

Its unit is all-gathered when an operation uses it.

It has shape, dtype and device, and modules accept it. Its values are used in one of two ways:

    torch.f(h, x)       __torch_function__    f runs on the unsharded tensors, and gradients go to their unit (`_UseUnit`)
    f called in C++     __torch_dispatch__    f gets h itself, and gradients go to h's own node (`_LazyParams`)

The second is for autograd Functions, custom operators and torch.func, which ignore a tensor's
class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.errors import LayoutError, ModuleError, ScopeError
from fshard.mesh.spmd.scope import here
from fshard.transforms.fsdp.plans import ParamPlan
from fshard.transforms.fsdp.units import StepContext, Unit, versions_of
from fshard.transforms.module.replica import NO_GRADS, TRAINED_IS_FIXED
from fshard.transforms.patterns import titled

Runtime = Any
"""A `ParamRuntime`, whose module imports this one."""
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

    runtime: Runtime
    unit: Unit
    position: int
    plan: ParamPlan
    is_in_array: bool = False
    """It is a shard of an array: see `tensor/run.py`.

    Otherwise a sharded one is for its layer alone.
    """
    _is_param = True
    """Makes isinstance(x, nn.Parameter) true."""

    @staticmethod
    def of(runtime: Runtime, unit: Unit, position: int) -> LazyParam:
        """Return the lazy parameter at a position in a unit."""
        plan = unit.plan.params[position]
        dtype = unit.context.options.used_in(plan.dtype)
        device = unit.context.device
        param = _T._make_wrapper_subclass(LazyParam, plan.shape, dtype=dtype, device=device)
        param.runtime = runtime
        param.unit = unit
        param.position = position
        param.plan = plan
        return param

    @property
    def step(self) -> StepContext:
        """The step that it belongs to."""
        return self.unit.context

    def unshard(self) -> Tensor:
        """Return the unsharded tensor."""
        if torch.compiler.is_compiling() or _compiler():
            raise LayoutError(_COMPILED)
        self._validate_device()
        if self.runtime.state == "closed":
            raise ScopeError(
                f"{titled(self.plan.path)} is a parameter of a step that is over: it was kept from "
                "inside a loss function. Return what is needed of it with has_aux=True, or take it "
                "from the parameters that the step returns."
            )
        if self.plan.used.entries and not self.is_in_array:
            self._validate_in_loss()
        return self.runtime.use(self.unit, self.position)

    def _validate_device(self) -> None:
        """Raise if the parameter belongs to another device."""
        scope, own_scope = here(), self.unit.context.scope
        if scope is None or scope.device == own_scope.device or scope.mesh is not own_scope.mesh:
            return
        raise ModuleError(
            f"device {scope.device} of {scope.mesh} uses {self._subject} of device "
            f"{own_scope.device}: virtual devices are threads, and share the module that "
            "torch.func.functional_call writes to. Write apply, params, buffers = "
            "fs.functionalize(module), or fs.with_unsharded_params around the call."
        )

    def _validate_in_loss(self) -> None:
        """Raise if a shard is used outside of the model.

        What devices compute of theirs would not be added up.
        """
        scope = here()
        if scope is not None and not scope.varying_axes:
            raise ModuleError(
                f"{titled(self.plan.path)} must be used in the model's forward only, since each "
                f"device has a shard of it, {self.plan.used}; got an operation in the loop. Compute "
                "a penalty in the forward, with fs.psum over these axes, or take the optimizer's "
                "weight decay."
            )

    @property
    def _subject(self) -> str:
        """Its name in a sentence."""
        path = self.plan.path
        return f"the parameter {titled(path)}" if path else titled(path)

    def raise_written(self, *arguments: Any) -> None:
        """Raise: a forward writes to a parameter."""
        raise ModuleError(f"a forward writes to {self._subject}. {WRITES}")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in KNOWN:
            with _C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _CONSTANTS:
            return _CONSTANTS[func]
        if func in _ATTRIBUTE_FUNCTIONS and type(args[0]) is LazyParam:
            return _ATTRIBUTE_FUNCTIONS[func](*args, **kwargs)
        if not kwargs:
            return func(*unsharded(args))  # (3)
        return func(*unsharded(args), **unsharded(kwargs))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Autograd has recorded the operation already, with the lazy parameter.
        with torch.no_grad():
            return func(*unsharded(args), **unsharded(kwargs or {}))

    def __hash__(self) -> int:
        self._validate_device()  # functional_call reads it before it calls the module
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyParam({str(self.dtype).removeprefix('torch.')}{list(self.shape)})"


def _read_grad(param: LazyParam) -> None:
    """Return None, as `.grad` of a parameter in a forward.

    Raises once there are gradients, which are sharded.
    """
    if any(param.runtime.reducer.used) and param.requires_grad:
        raise ModuleError(NO_GRADS)


def _write_grad(param: LazyParam, grad: Tensor | None = None) -> None:
    """Raise: a gradient would not be used; but None, where there is none, changes nothing."""
    if grad is not None or any(param.runtime.reducer.used):
        raise ModuleError(NO_GRADS)


def _read_data(param: LazyParam) -> Tensor:
    """Return `.data`, a detached tensor.

    It shares the version counter, so writes to it are found.
    """
    return param.unshard().detach()


def _set_requires_grad(param: LazyParam, requires_grad: bool = True) -> LazyParam:
    if requires_grad != param.requires_grad:
        raise ModuleError(TRAINED_IS_FIXED)
    return param


_ATTRIBUTE_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _T.grad.__get__: _read_grad,
    _T.grad.__set__: _write_grad,
    _T.grad.__delete__: _write_grad,
    _T.data.__get__: _read_data,
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
        items: list[Any] = []
        for item in x:
            # Without a further call: this runs for each argument of each operation.
            if type(item) is LazyParam:
                items.append(item.unshard())
            else:
                items.append(unsharded(item))
        return kind(items)
    if kind is dict:
        return {key: unsharded(value) for key, value in x.items()}
    return x
