"""Run an operation on global arrays: look up its row, choose layouts, send what is needed, compute on each device.

Everything that depends only on shapes, dtypes and layouts is a `CachedCall`, cached.

    y = x @ w    (1) the row of "matmul" in TABLE; a composition runs as operations of its own
                 (2) its rule on meta tensors of the global shapes, and `choose`: a CachedCall
                 (3) transfer each input, then torch's own function on each device's shards
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional as F
from torch.overrides import resolve_name

from fshard.ambient import ambient, setting
from fshard.array.choose import LayoutChoice, choose
from fshard.array.communicate import in_loss, raise_implicit, transfer, with_spec
from fshard.array.rules import (
    TABLE,
    LabelledOperation,
    LocalProgram,
    Row,
    Rule,
    Where,
    arrays_in,
    describe,
    map_arrays,
)
from fshard.errors import LayoutError, MeshError
from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout import Layout, P
from fshard.mesh.layout.arithmetic import ravel
from fshard.mesh.layout.sharded import Sharded, typeof
from fshard.mesh.reshard.device_put import shares_memory, spread
from fshard.mesh.reshard.varying import enter_loss, leave_loss
from fshard.mesh.spmd.run import local_devices
from fshard.source import call_site
from fshard.uncompiled import uncompiled

DIRECT: dict[str, Callable[..., Any]] = {}
"""Functions that are no operations on values: attributes, autograd, conversions. Called with the arrays."""
_apply: Any = Function.apply
APPLY = _apply.__func__.__code__
"""The code of `torch.autograd.Function.apply`."""
_is_forward_mode_on: Any = torch._C._is_fwd_grad_enabled  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
_RENAMED = {
    "__rtruediv__": "rdiv",
    "__rdiv__": "rdiv",
    **{f"__{name}__": f"to {name}" for name in ("bool", "float", "int", "index", "complex")},
}


def explicit() -> setting:
    """Raise where an operation would communicate; communicate by `fs.reshard` or `fs.array.constrain` alone."""
    return setting(explicit=True)


def constrain(x: Sharded, spec: P) -> Sharded:
    """Pin the layout of an array; its gradient gets it too. Communicates also within `explicit`.

    The result of one that has the layout already is a view, as `x.detach()` is: after a change of x in place, take it again.

    >>> import fshard as fs
    >>> x = fs.array.ones(4, 4, layout=fs.Layout(fs.make_mesh({"data": 2}), fs.P("data")))
    >>> fs.typeof(fs.array.constrain(x, fs.P(None, "data")))
    f32[4, 4@data]
    """
    if not isinstance(x, Sharded) or not isinstance(spec, P):
        raise LayoutError(
            f"constrain takes an array and a P; got {type(x).__name__} and {type(spec).__name__}."
        )
    Layout(x.mesh, spec).check(x.shape, "constrain: the array")
    y = with_spec(x, spec, "constrain", is_explicit=True)
    if not transformed() and shares_memory(x, y):
        y.viewed = (x, x.version, "constrain", ())
    return y


class CachedCall(NamedTuple):
    """An operation on arrays of given shapes, dtypes and layouts."""

    name: str
    func: Any
    operation: LabelledOperation
    choice: LayoutChoice
    shapes: tuple[tuple[int, ...], ...]
    rebuild: Any
    """Builds torch's result from several arrays; None for a single one."""
    local: LocalProgram | None
    where: dict[int, Where]
    """For each device that has run a local program; those of a virtual mesh may be threads, which share the call."""
    is_free: bool
    is_local: bool
    """Nothing is sent, and in a loss function, where every value is varying, nothing is converted either."""
    is_view: bool
    is_varying: bool  # it was planned in a loss function
    is_same: bool  # torch returns the argument itself, as `float` does for float32


_calls: dict[Any, CachedCall] = {}
MAX_CALLS = 16384


_OTHER_ARGUMENTS = (
    *("batch_norm", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "embedding"),
    *("hinge_embedding_loss", "instance_norm", "kl_div", "margin_ranking_loss"),
    *("poisson_nll_loss", "triplet_margin_loss"),
)
"""Names of functions of torch whose arguments are not those of the function of torch.nn.functional."""
_OTHER_FUNCTIONS: dict[str, Any] = {
    f"torch.{name}": getattr(torch, name) for name in _OTHER_ARGUMENTS
}
_OTHER_FUNCTIONS["functional.unfold"] = F.unfold
"""Functions that share the name of another one, but not its arguments."""
_NAMES_OF_OTHERS = {func: name for name, func in _OTHER_FUNCTIONS.items()}
_getter = lru_cache(maxsize=4096)(attrgetter)
"""Returns the function that reads an attribute; the same one again, since it is part of the keys of calls."""


@lru_cache(maxsize=4096)
def name_of(func: Any) -> str:
    """Return the name of a torch function in the table: add for torch.add, Tensor.add and Tensor.__iadd__; .T for x.T."""
    if isinstance(func, str):
        return f".{func}"
    if func in _NAMES_OF_OTHERS:
        return _NAMES_OF_OTHERS[func]
    name: str = getattr(func, "__name__", "") or ""
    return _RENAMED.get(name) or name.removeprefix("__").removesuffix("__")


@uncompiled
def operate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one of torch's functions on arguments that contain arrays."""
    name = name_of(func)
    direct = DIRECT.get(name)
    if direct is not None and (result := direct(*args, **kwargs)) is not NotImplemented:
        return result
    if isinstance(func, str):
        func = _getter(func)
    if not _is_forward_mode_on() and not torch.is_inference_mode_enabled():
        _validate_no_function()
    key, arrays = [func], list[Sharded]()  # functions of one name may order arguments in other ways
    is_known = _describe(args, key, arrays) and (not kwargs or _describe(kwargs, key, arrays))
    call = _calls.get(tuple(key)) if is_known else None
    if call is not None:
        return _run(call, arrays, args, kwargs)
    return _first_run(name, func, args, kwargs)


# Note [Functions of torch]
# `Function.apply` takes an array for a constant: its forward computes, and no backward is recorded. It cannot be
# overridden for arrays. But a forward runs with forward-mode derivatives switched off, which `torch.no_grad` does not do,
# so only the operations of a forward look for the frame of `apply`, and for arrays among its arguments.
def _validate_no_function() -> None:
    """Raise within a `torch.autograd.Function` that was given arrays, if an argument needs a gradient."""
    frame: FrameType | None = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while (frame := function_frame(frame)) is not None:
        arguments = (*frame.f_locals["args"], *frame.f_locals["kwargs"].values())
        has_arrays = any(isinstance(x, Sharded) for x in arguments)
        tensors = [x for x in arguments if isinstance(x, Sharded | Tensor)]
        if has_arrays and any(x.requires_grad for x in tensors):
            raise _has_own_backward(frame.f_locals["cls"].__name__)
        frame = frame.f_back


def function_frame(frame: FrameType | None) -> FrameType | None:
    """Return the next frame, from this one outwards, of a call of a `torch.autograd.Function`."""
    while frame is not None and frame.f_code is not APPLY:
        frame = frame.f_back
    return frame


def _has_own_backward(title: str) -> LayoutError:
    """Return the error of a function of tensors whose backward arrays would not call."""
    if title == "CheckpointFunction":
        return LayoutError(
            "checkpoint of arrays must not be reentrant; got use_reentrant=True. Write "
            "torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)."
        )
    return LayoutError(
        f"{title} must get tensors, since it is a torch.autograd.Function; got arrays, at {call_site()}, whose gradient "
        "would be lost. Write fs.array.custom_function(forward, backward), in operations on arrays; or call it on "
        "local tensors in fs.shard_map."
    )


def _first_run(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that has no cached call: by its row; without one by a plan, if that allows it."""
    args, kwargs = map_arrays(leave_loss, args), map_arrays(leave_loss, kwargs)
    plan = ambient.observer if ambient.plan is None else ambient.plan
    is_write = name.endswith("_") or name == "setitem" or "out" in kwargs or "inplace" in kwargs
    if plan is None or is_write:
        return _run_by_row(name, func, args, kwargs)
    try:
        return _run_by_row(name, func, args, kwargs)
    except Exception as error:
        if not plan.runs_unsharded(name, error):
            raise
    return plan.run_operation(name, func, args, kwargs)


def _run_by_row(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    row, operands = TABLE.get(name), arrays_in(args, kwargs)
    mesh = next(x.mesh for x in operands if isinstance(x, Sharded))
    if (
        ambient.plan is not None
        and mesh.device_type != "meta"
        and any(isinstance(x, Tensor) and x.is_meta for x in operands)
    ):
        return func(
            *map_arrays(_as_meta, args), **map_arrays(_as_meta, kwargs)
        )  # of a stage, before its blocks
    if row is None and name.endswith("_") and name[:-1] in TABLE:
        pure = next(
            (
                getattr(o, name[:-1])
                for o in (Tensor, torch.nn.functional, torch)
                if hasattr(o, name[:-1])
            ),
            None,
        )
        value = operate(pure, args, kwargs) if pure else _first_run(name[:-1], None, args, kwargs)
        return write(args[0], value, name)
    if kwargs.pop("inplace", False):
        return write(args[0], operate(func, args, kwargs), name)
    kwargs = {
        name: value for name, value in kwargs.items() if not (name == "out" and value is None)
    }
    if name == "custom_function_call":  # a torch.autograd.Function under torch.func
        raise _has_own_backward(args[0].__name__)
    if row is None or "out" in kwargs:
        raise _no_row(
            f"{resolve_name(func) or name}{'(out=)' if 'out' in kwargs else ''}", args, kwargs
        )
    args, kwargs = _on_mesh(name, args, kwargs)
    if row.compose is not None:
        result = row.compose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if row.rule is None:
        raise _no_row(name, args, kwargs)
    key, arrays = [func], list[Sharded]()
    is_known = _describe(args, key, arrays) and _describe(kwargs, key, arrays)
    arrays = arrays_in(args, kwargs)
    call = _plan(name, func, row, arrays, args, kwargs)
    if is_known and len(_calls) < MAX_CALLS:
        _calls[tuple(key)] = call
    return _run(call, arrays, args, kwargs)


def _no_row(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayoutError:
    """Return the error of an operation that the table does not have, or not with these arguments."""
    types = ", ".join(str(typeof(x)) for x in arrays_in(args, kwargs) if isinstance(x, Sharded))
    if name in _OTHER_FUNCTIONS:
        return LayoutError(
            f"{name} is no operation on arrays; got {types}, at {call_site()}. Write torch.nn.functional."
            f"{name.removeprefix('torch.')}, whose arguments have another order."
        )
    return LayoutError(
        f"{name} is no operation on arrays with these arguments; got {types}, at {call_site()}. Compute it on local "
        "tensors in fs.shard_map, after fs.array.constrain(x, P(...)) for dims that every device needs in full; or on "
        "the full tensor, fs.unshard(x)."
    )


def write(x: Any, value: Any, name: str) -> Any:
    """Give an array new values, as an in-place operation does."""
    is_constant = type(x) is Tensor and ambient.constants
    if is_constant and isinstance(value, Sharded) and value.shape == x.shape:
        return x.copy_(with_spec(value, P(), name).local)  # it is equal on all devices
    if (
        isinstance(x, Sharded)
        and isinstance(value, Sharded)
        and torch.can_cast(value.dtype, x.dtype)
    ):
        value = value.to(x.dtype)
    if (
        not isinstance(x, Sharded)
        or not isinstance(value, Sharded)
        or value.shape != x.shape
        or value.dtype != x.dtype
    ):
        raise LayoutError(
            f"{name} cannot write {value!r} into {x!r}. Assign the result of the operation instead."
        )
    value, old = with_spec(value, x.spec, name, is_explicit=True), x.shards[0]
    if x.viewed is not None:
        _write_viewed(x, value, name)
    records = torch.is_grad_enabled() and (value.shards[0].requires_grad or old.requires_grad)
    if records and old.is_leaf and old.requires_grad:
        raise RuntimeError(
            f"a leaf array that requires grad is used in the in-place operation {name}."
        )
    if records or old.is_inference():
        x.shards = tuple(
            [y.clone() if y._is_view() else y for y in value.shards]
        )  # which may be written in place
    else:
        copies = [y.clone() for y in value.shards]  # shards of replicas may share memory
        with torch.no_grad():
            for shard, y in zip(x.shards, copies, strict=True):
                shard.copy_(y)
    x.version += 1
    return x


def _write_viewed(x: Sharded, value: Sharded, name: str) -> None:
    """Write the new values of a view to its array: of an index, and of the array without its gradient."""
    array, _, view, args = x.viewed
    if view == "getitem":
        operate(Tensor.__setitem__, (array, args[1], value), {})
    elif view in ("detach", ".data"):
        with torch.no_grad():
            write(array, value, name)
    else:
        view_error = (
            f"got {x!r}, a view of another array by {view}. Write to that array, or to x.clone()"
        )
        raise LayoutError(
            f"{name} must write to an array, to x[index] or to x.detach(); {view_error}."
        )
    x.viewed = (array, array.version, view, args)


# Arguments.


_ATOMS = {
    *(int, float, bool, str, complex, type(None), type(...)),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout),
}
"""Types of arguments that are part of the key of a call."""
_CONTAINERS = {tuple, list, dict, torch.Size}


def _describe(arguments: Any, key: list[Any], arrays: list[Sharded]) -> bool:
    """Append the arrays and the parts of a key of arguments; False if an argument has none."""
    arg: Any
    for arg in arguments.items() if type(arguments) is dict else arguments:
        kind = type(arg)
        if kind is Sharded:
            if arg.viewed is not None:
                arg.check_view()
            arrays.append(arg)
            key += (arg.shape, id(arg.layout), arg.shards[0].dtype)  # the call keeps the layout
        elif kind in _ATOMS:
            key += (kind, arg)
        elif kind is slice or kind in _CONTAINERS:
            parts = (arg.start, arg.stop, arg.step) if kind is slice else arg
            key += (kind, len(parts))
            if not _describe(parts, key, arrays):
                return False
        else:
            return False
    return True


def _on_mesh(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replicate 0-d tensors; raise for other plain tensors, and for arrays of several meshes."""
    meshes = list(dict.fromkeys(x.mesh for x in arrays_in(args, kwargs) if isinstance(x, Sharded)))
    mesh = meshes[0]
    if len(meshes) > 1:
        raise MeshError(
            f"{name}: arrays must be on one mesh; got {mesh} and {meshes[1]}. Use fs.device_put."
        )

    def check_or_replicate(x: Any) -> Any:
        if isinstance(x, Sharded):
            x.check()
            return x
        is_equal = ambient.constants and (not x.requires_grad or _is_planned())
        if x.ndim and not is_equal:
            raise LayoutError(
                f"{name}: a plain tensor of shape {tuple(x.shape)} meets arrays on {mesh}. Put it on the mesh: "
                "fs.device_put(x, fs.Layout(mesh, P())). In shard_map, pass the array as an argument, or take array.local."
            )
        if mesh.is_varying:
            x = enter_loss(x, mesh)
        return spread(x, Layout(mesh))

    return map_arrays(check_or_replicate, args), map_arrays(check_or_replicate, kwargs)


def _is_planned() -> bool:
    """Return True in the forward of a planned module, where a plain tensor is equal on all devices."""
    return ambient.plan is not None or ambient.observer is not None


def _as_meta(x: Sharded | Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


# A call.


def _plan(
    name: str, func: Any, row: Row, arrays: list[Sharded], args: Any, kwargs: dict[str, Any]
) -> CachedCall:
    """Apply the rule to the global shapes and choose layouts."""
    mesh = arrays[0].mesh
    with torch.no_grad(), setting(counters=()):  # no device runs this
        meta_args, named = map_arrays(_as_meta, args), map_arrays(_as_meta, kwargs)
        meta_result = func(*meta_args, **named)
    results = arrays_in(meta_result if isinstance(meta_result, Tensor) else [*meta_result])
    rule = cast("Callable[..., Rule]", row.rule)(results, *meta_args, **named)
    operation = describe(rule, arrays, results)
    choice = choose(operation, mesh)
    shapes = tuple(tuple(y.shape) for y in results)
    is_free, is_local = (
        all(x.is_free for x in choice.transfers),
        all(x.moves == () for x in choice.transfers),
    )
    rebuild = (
        None
        if isinstance(meta_result, Tensor)
        else tuple
        if type(meta_result) is tuple
        else type(meta_result)
    )
    is_view, is_same = row.is_view and len(arrays) == 1, meta_result is (*meta_args, None)[0]
    return CachedCall(
        name,
        func,
        operation,
        choice,
        shapes,
        rebuild,
        rule.local,
        {},
        is_free,
        is_local,
        is_view,
        mesh.is_varying,
        is_same,
    )


def _where(call: CachedCall, device: int) -> Where:
    """Return what the local program of a device needs to know."""
    if device in call.where:
        return call.where[device]
    choice, shapes, mesh = call.choice, call.shapes, call.choice.layouts[0].mesh
    coordinates = mesh.coordinates(device)
    sizes = {label: [mesh.shape[axis] for axis in axes] for label, axes in choice.labels.items()}
    positions = {
        label: (ravel([coordinates[axis] for axis in axes], sizes[label]), prod(sizes[label]))
        for label, axes in choice.labels.items()
    }
    specs = [P(*layout.spec.entries) for layout in choice.layouts]
    local = [
        Layout(mesh, spec).local_shape(shape, device)
        for spec, shape in zip(specs, shapes, strict=True)
    ]
    return call.where.setdefault(device, Where(tuple(local), positions))


def _run(
    call: CachedCall, arrays: list[Sharded], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute on the shards of every device held here."""
    if call.is_varying and not in_loss():  # an array of a loss function, used in the loop around it
        return _first_run(call.name, call.func, args, kwargs)
    if call.is_same:
        return arrays[0]
    if call.is_free or (call.is_local and in_loss()):
        columns = [x.shards for x in arrays]
    elif ambient.explicit and call.choice.bytes:
        raise_implicit(call.name, arrays, call.choice.transfers)
    else:
        columns = [
            transfer(x, to, call.name) for x, to in zip(arrays, call.choice.transfers, strict=True)
        ]
    func, local, outputs = call.func, call.local, list[Any]()
    devices = local_devices(arrays[0].mesh) if local is not None else ()
    for number, shards in enumerate(zip(*columns, strict=True)):
        local_shards = iter(shards)
        local_args = [
            next(local_shards)
            if type(x) is Sharded
            else x
            if type(x) in _ATOMS
            else _replaced(x, local_shards)
            for x in args
        ]
        named = (
            {name: _replaced(x, local_shards) for name, x in kwargs.items()} if kwargs else kwargs
        )
        outputs.append(
            func(*local_args, **named)
            if local is None
            else local(_where(call, devices[number]), func, tuple(local_args), named)
        )
    columns = [tuple(outputs)] if call.rebuild is None else zip(*outputs, strict=True)
    results = [
        Sharded(*fields) for fields in zip(call.shapes, call.choice.layouts, columns, strict=True)
    ]
    if call.is_view:
        for y in results:
            y.viewed = (arrays[0], arrays[0].version, call.name, args)
    if ambient.reduces and call.choice.layouts[0].spec.unreduced:
        results = [with_spec(y, y.spec.replace(unreduced=None), call.name) for y in results]
    if ambient.observer is not None:
        ambient.observer(call, arrays, args, results)
    return results[0] if call.rebuild is None else call.rebuild(results)


def _replaced(argument: Any, shards: Iterator[Tensor]) -> Any:
    return map_arrays(lambda _: next(shards), argument)
