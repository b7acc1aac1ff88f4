"""Run an operation on global arrays: look up its row, choose layouts, send, compute on each device.

Everything that depends only on shapes, dtypes and layouts is a `CachedCall`, cached.

    y = x @ w    (1) the row of "matmul" in TABLE; a composition runs as operations of its own
                 (2) its rule on meta tensors of the global shapes, and `choose`: a CachedCall
                 (3) transfer each input, then torch's own function on each device's shards
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
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

from fshard.array.choose import LayoutChoice, choose
from fshard.array.communicate import in_loss, transfer, validate_explicit, with_spec
from fshard.array.mode import ArrayMode, array_mode
from fshard.array.rules import (
    TABLE,
    LabelledOperation,
    LocalContext,
    LocalProgram,
    Row,
    Rule,
    arrays_in,
    describe,
    map_arrays,
)
from fshard.errors import LayoutError, MeshError
from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.layout.arithmetic import ravel
from fshard.mesh.layout.counting import without_counters
from fshard.mesh.layout.sharded import Sharded, typeof
from fshard.mesh.reshard.device_put import shares_memory, spread
from fshard.mesh.reshard.varying import enter_loss, leave_loss
from fshard.mesh.spmd.run import local_devices
from fshard.source import call_site
from fshard.uncompiled import uncompiled

DIRECT: dict[str, Callable[..., Any]] = {}
"""Functions that are no operations on values: attributes, autograd, conversions.

They are called with the arrays.
"""
_apply: Any = Function.apply
APPLY = _apply.__func__.__code__
"""The code of `torch.autograd.Function.apply`."""
_torch_c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_is_forward_mode_on = _torch_c._is_fwd_grad_enabled
_RENAMED = {
    "__rtruediv__": "rdiv",
    "__rdiv__": "rdiv",
    "__bool__": "to bool",
    "__float__": "to float",
    "__int__": "to int",
    "__index__": "to index",
    "__complex__": "to complex",
}
"""Methods whose names, without underscores, are those of other operations: `float` casts."""


def constrain(x: Sharded, spec: P) -> Sharded:
    """Pin the layout of an array; its gradient gets it too. Communicates also within `explicit`.

    The result of one that has the layout already is a view, as `x.detach()` is: after a change of
    x in place, take it again.

    >>> import fshard as fs
    >>> x = fs.array.ones(4, 4, layout=fs.Layout(fs.make_mesh({"data": 2}), fs.P("data")))
    >>> fs.typeof(fs.array.constrain(x, fs.P(None, "data")))
    f32[4, 4@data]
    """
    if not isinstance(x, Sharded) or not isinstance(spec, P):
        types = f"{type(x).__name__} and {type(spec).__name__}"
        raise LayoutError(f"constrain takes an array and a P; got {types}.")
    Layout(x.mesh, spec).check(x.shape, "constrain: the array")
    y = with_spec(x, spec, "constrain", is_explicit=True)
    if not transformed() and shares_memory(x, y):
        y.viewed = (x, x.version, "constrain", ())
    return y


class CachedCall(NamedTuple):
    """An operation on arrays of given shapes, dtypes and layouts.

    Args:
        name: of its row in the table.
        func: torch's function.
        operation: the labels of its inputs and results.
        choice: the layouts of its inputs and results.
        shapes: of the results.
        rebuild: builds torch's result from several arrays; None for a single one.
        local: the program of one device; None for torch's function.
        contexts: for each device that has run a local program. Threads of virtual devices share
            the call.
        is_free: inputs are used as they are.
        is_local: nothing is sent. In a loss function, where every value is varying, inputs are used
            as they are.
        is_view: the result is a view of the input.
        is_varying: it was planned in a loss function.
        is_same: torch returns the argument itself, as `float` does for float32.
    """

    name: str
    func: Any
    operation: LabelledOperation
    choice: LayoutChoice
    shapes: tuple[tuple[int, ...], ...]
    rebuild: Any
    local: LocalProgram | None
    contexts: dict[int, LocalContext]
    is_free: bool
    is_local: bool
    is_view: bool
    is_varying: bool
    is_same: bool


_calls: dict[Any, CachedCall] = {}
MAX_CALLS = 16384
"""The most calls that are cached, as of caches of keys and values, which grow with each token."""


_OTHER_ARGUMENTS = """batch_norm binary_cross_entropy_with_logits cosine_embedding_loss embedding
hinge_embedding_loss instance_norm kl_div margin_ranking_loss poisson_nll_loss
triplet_margin_loss"""
"""Functions of torch whose arguments differ from those of torch.nn.functional's."""

_OTHER_FUNCTIONS: dict[str, Any] = {"functional.unfold": F.unfold}
"""Functions that share the name of another one, but not its arguments."""
for _name in _OTHER_ARGUMENTS.split():
    _OTHER_FUNCTIONS[f"torch.{_name}"] = getattr(torch, _name)
_NAMES_OF_OTHERS = {func: name for name, func in _OTHER_FUNCTIONS.items()}

_getter = lru_cache(maxsize=4096)(attrgetter)
"""Returns the function that reads an attribute. Keys of calls have it, so it is made only once."""


@lru_cache(maxsize=4096)
def name_of(func: Any) -> str:
    """Return the name of a torch function in the table.

    It is add for torch.add, Tensor.add and Tensor.__iadd__, and .T for x.T.
    """
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
    if direct is not None:
        result = direct(*args, **kwargs)
        if result is not NotImplemented:
            return result

    if isinstance(func, str):
        func = _getter(func)
    # torch runs an autograd Function's forward without forward mode: see Note [Functions of torch].
    if not _is_forward_mode_on() and not torch.is_inference_mode_enabled():
        _validate_no_function()

    mode = array_mode()
    key = [func]  # not its name: functions of one name may order arguments in other ways
    arrays = list[Sharded]()
    is_known = _describe(args, key, arrays) and (not kwargs or _describe(kwargs, key, arrays))
    if is_known:
        call = _calls.get(tuple(key))
        if call is not None:
            return _run(call, arrays, args, kwargs, mode)
    return _first_run(name, func, args, kwargs, mode)


# Note [Functions of torch]
# `Function.apply` takes an array for a constant: its forward computes, and no backward is recorded.
# It cannot be overridden for arrays. But a forward runs with forward-mode derivatives switched off,
# which `torch.no_grad` does not do. So only the operations of a forward look for the frame of
# `apply`, and for arrays among its arguments.
def _validate_no_function() -> None:
    """Raise within a `torch.autograd.Function` of arrays, if an argument needs a gradient."""
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
        f"{title} must get tensors, since it is a torch.autograd.Function; got arrays, at "
        f"{call_site()}, whose gradient would be lost. Write fs.array.custom_function(forward, "
        "backward), in operations on arrays; or call it on local tensors in fs.shard_map."
    )


def _first_run(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: ArrayMode
) -> Any:
    """Run an operation that has no cached call: by its row; without one by a plan, if it allows."""
    args = map_arrays(leave_loss, args)
    kwargs = map_arrays(leave_loss, kwargs)
    fallback = mode.observer if mode.plan is None else mode.plan
    is_write = name.endswith("_") or name == "setitem" or "out" in kwargs or "inplace" in kwargs
    if fallback is None or is_write:
        return _run_by_row(name, func, args, kwargs, mode)
    try:
        return _run_by_row(name, func, args, kwargs, mode)
    except Exception as error:
        if not fallback.runs_unsharded(name, error):
            raise
    return fallback.run_operation(name, func, args, kwargs)


def _run_by_row(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: ArrayMode
) -> Any:
    """Run an operation by its row of the table: by the composition, else by the rule."""
    operands = arrays_in(args, kwargs)
    if mode.plan is not None and _meets_meta(operands):
        # A stage runs the modules before its own blocks for their shapes alone.
        return func(*map_arrays(_as_meta, args), **map_arrays(_as_meta, kwargs))

    row = TABLE.get(name)
    if row is None and name.endswith("_") and name[:-1] in TABLE:
        return _run_in_place(name, args, kwargs, mode)
    if not args and next(iter(kwargs)) == "input":  # torch's name of the first argument
        args = (kwargs.pop("input"),)
    if kwargs.pop("inplace", False):
        return write(args[0], operate(func, args, kwargs), name)
    if "out" in kwargs and kwargs["out"] is None:
        del kwargs["out"]
    if name == "custom_function_call":  # a torch.autograd.Function under torch.func
        raise _has_own_backward(args[0].__name__)
    if row is None or "out" in kwargs:
        written = "(out=)" if "out" in kwargs else ""
        raise _no_row(f"{resolve_name(func) or name}{written}", args, kwargs)

    args, kwargs = _on_mesh(name, args, kwargs, mode)
    if row.compose is not None:
        result = row.compose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if row.rule is None:
        raise _no_row(name, args, kwargs)
    return _run_rule(name, func, row, args, kwargs, mode)


def _run_rule(
    name: str, func: Any, row: Row, args: tuple[Any, ...], kwargs: dict[str, Any], mode: ArrayMode
) -> Any:
    """Run an operation by the rule of its row, and cache the call if its arguments have a key."""
    key = [func]
    arrays = list[Sharded]()
    is_known = _describe(args, key, arrays) and _describe(kwargs, key, arrays)
    # The key of plain tensors that are arrays by now may be known.
    call = _calls.get(tuple(key)) if is_known else None
    if call is not None:
        return _run(call, arrays, args, kwargs, mode)

    arrays = arrays_in(args, kwargs)  # all of them: `_describe` stops at the first without a key
    call = _plan(name, func, row, arrays, args, kwargs)
    if is_known:
        if len(_calls) >= MAX_CALLS:
            _calls.clear()
        _calls[tuple(key)] = call
    return _run(call, arrays, args, kwargs, mode)


def _meets_meta(operands: Sequence[Sharded | Tensor]) -> bool:
    """Return True if arrays of a mesh with values meet a tensor without."""
    mesh = next(x.mesh for x in operands if isinstance(x, Sharded))
    if mesh.device_type == "meta":
        return False
    return any(isinstance(x, Tensor) and x.is_meta for x in operands)


def _run_in_place(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], mode: ArrayMode) -> Any:
    """Run the operation that returns a new array, and write its result: add for add_."""
    pure_name = name[:-1]
    pure = None
    for owner in (Tensor, torch.nn.functional, torch):
        pure = getattr(owner, pure_name, None)
        if pure is not None:
            break
    if pure is None:
        value = _first_run(pure_name, None, args, kwargs, mode)
    else:
        value = operate(pure, args, kwargs)
    return write(args[0], value, name)


def _no_row(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayoutError:
    """Return the error of an operation that the table lacks, or lacks for these arguments."""
    types = ", ".join(str(typeof(x)) for x in arrays_in(args, kwargs) if isinstance(x, Sharded))
    if name in _OTHER_FUNCTIONS:
        return LayoutError(
            f"{name} is no operation on arrays; got {types}, at {call_site()}. Write "
            f"torch.nn.functional.{name.removeprefix('torch.')}, whose arguments have another "
            "order."
        )
    return LayoutError(
        f"{name} is no operation on arrays with these arguments; got {types}, at {call_site()}. "
        "Compute it on local tensors in fs.shard_map, after fs.array.constrain(x, P(...)) for dims "
        "that every device needs in full; or on the full tensor, fs.unshard(x)."
    )


def write(x: Any, value: Any, name: str) -> Any:
    """Give an array new values, as an in-place operation does."""
    if type(x) is Tensor and array_mode().has_equal_tensors:
        if isinstance(value, Sharded) and value.shape == x.shape:
            full = with_spec(value, P(), name)
            return x.copy_(full.shards[0])  # as all other shards, where there are several

    if not isinstance(x, Sharded) or not isinstance(value, Sharded):
        raise _cannot_write(name, x, value)
    if torch.can_cast(value.dtype, x.dtype):
        value = value.to(x.dtype)
    if value.shape != x.shape or value.dtype != x.dtype:
        raise _cannot_write(name, x, value)

    value = with_spec(value, x.spec, name, is_explicit=True)
    if x.viewed is not None:
        _write_viewed(x, value, name)
    _replace_values(x, value, name)
    x.version += 1
    return x


def _cannot_write(name: str, x: Any, value: Any) -> LayoutError:
    """Return the error of values that do not fit an array."""
    return LayoutError(
        f"{name} cannot write {value!r} into {x!r}. Assign the result of the operation instead."
    )


def _replace_values(x: Sharded, value: Sharded, name: str) -> None:
    """Write the shards of a value into those of an array, or exchange them."""
    old = x.shards[0]
    is_recorded = torch.is_grad_enabled() and (value.shards[0].requires_grad or old.requires_grad)
    if is_recorded and old.is_leaf and old.requires_grad:
        raise RuntimeError(
            f"a leaf array that requires grad is used in the in-place operation {name}."
        )

    if is_recorded or old.is_inference():
        # A view is cloned, since its base may be written in place.
        x.shards = tuple([y.clone() if y._is_view() else y for y in value.shards])
        return

    copies = [y.clone() for y in value.shards]  # shards of replicas may share memory
    with torch.no_grad():
        for shard, y in zip(x.shards, copies, strict=True):
            shard.copy_(y)


def _write_viewed(x: Sharded, value: Sharded, name: str) -> None:
    """Write the new values of a view to its array.

    The view is one of an index, or the array without its gradient.
    """
    array, _, view, args = x.viewed
    if view == "getitem":
        operate(Tensor.__setitem__, (array, args[1], value), {})
    elif view in ("detach", ".data"):
        with torch.no_grad():
            write(array, value, name)
    else:
        raise LayoutError(
            f"{name} must write to an array, to x[index] or to x.detach(); got {x!r}, a view of "
            f"another array by {view}. Write to that array, or to x.clone()."
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
    """Append the arrays and the parts of a key of arguments; return False if one has none."""
    arg: Any
    for arg in arguments.items() if type(arguments) is dict else arguments:
        kind = type(arg)
        if kind is Sharded:
            if arg.viewed is not None:
                arg.check_view()
            arrays.append(arg)
            # The cached call keeps this layout, which keeps the shared one: no other gets its id.
            key += (arg.shape, id(arg.layout.shared), arg.shards[0].dtype)
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
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], mode: ArrayMode
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replicate 0-d tensors; raise for other plain tensors, and for arrays of several meshes."""
    meshes: dict[Mesh, None] = {}  # a set in order
    for x in arrays_in(args, kwargs):
        if isinstance(x, Sharded):
            meshes[x.mesh] = None
    mesh, *others = meshes
    if others:
        raise MeshError(
            f"{name}: arrays must be on one mesh; got {mesh} and {others[0]}. Use fs.device_put."
        )

    def check_or_replicate(x: Any) -> Any:
        if isinstance(x, Sharded):
            x.check()
            return x
        is_equal = mode.has_equal_tensors and (not x.requires_grad or mode.is_planned)
        if x.ndim and not is_equal:
            raise LayoutError(
                f"{name}: a plain tensor of shape {tuple(x.shape)} meets arrays on {mesh}. Put it "
                "on the mesh: fs.device_put(x, fs.Layout(mesh, P())); or call what makes it, such "
                "as generate, in `with fs.array.equal_tensors():`. In shard_map, pass the array as "
                "an argument, or take array.local."
            )
        if mesh.is_varying:
            x = enter_loss(x, mesh)
        return spread(x, Layout(mesh))

    return map_arrays(check_or_replicate, args), map_arrays(check_or_replicate, kwargs)


def _as_meta(x: Sharded | Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


# A call.


def _plan(
    name: str, func: Any, row: Row, arrays: list[Sharded], args: Any, kwargs: dict[str, Any]
) -> CachedCall:
    """Apply the rule to the global shapes and choose layouts."""
    mesh = arrays[0].mesh
    # No device runs this. Nor is it there when a recomputation runs the operation again, so that
    # `remat` must not number it.
    with torch.no_grad(), without_counters():
        meta_args = map_arrays(_as_meta, args)
        meta_kwargs = map_arrays(_as_meta, kwargs)
        meta_result = func(*meta_args, **meta_kwargs)
        is_single = isinstance(meta_result, Tensor)
        results = arrays_in(meta_result if is_single else [*meta_result])
        make_rule = cast("Callable[..., Rule]", row.rule)
        rule = make_rule(results, *meta_args, **meta_kwargs)

    operation = describe(rule, arrays, results)
    choice = choose(operation, mesh)

    rebuild = None
    if not is_single:
        # A named tuple of torch takes one sequence, as `tuple` does.
        rebuild = type(meta_result)
    return CachedCall(
        name=name,
        func=func,
        operation=operation,
        choice=choice,
        shapes=tuple(tuple(y.shape) for y in results),
        rebuild=rebuild,
        local=rule.local,
        contexts={},
        is_free=all(x.is_free for x in choice.transfers),
        is_local=all(x.moves == () for x in choice.transfers),
        is_view=row.is_view and len(arrays) == 1,
        is_varying=mesh.is_varying,
        is_same=bool(meta_args) and meta_result is meta_args[0],
    )


def _context_of(call: CachedCall, device: int) -> LocalContext:
    """Return the context of a device for the local program of a call."""
    if device in call.contexts:
        return call.contexts[device]

    mesh = call.choice.layouts[0].mesh
    coordinates = mesh.coordinates(device)
    positions: dict[str, tuple[int, int]] = {}
    for label, axes in call.choice.labels.items():
        sizes = [mesh.shape[axis] for axis in axes]
        index = ravel([coordinates[axis] for axis in axes], sizes)
        positions[label] = index, prod(sizes)

    shapes: list[tuple[int, ...]] = []
    for layout, shape in zip(call.choice.layouts, call.shapes, strict=True):
        spec = P(*layout.spec.entries)  # an unreduced result has the shape of a replicated one
        shapes.append(Layout(mesh, spec).local_shape(shape, device))
    # Threads of several devices may compute it: all of them use the first one's.
    return call.contexts.setdefault(device, LocalContext(tuple(shapes), positions))


def _run(
    call: CachedCall,
    arrays: list[Sharded],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: ArrayMode,
) -> Any:
    """Compute on the shards of every device held here."""
    if call.is_varying and not in_loss():  # an array of a loss function, used in the loop around it
        return _first_run(call.name, call.func, args, kwargs, mode)
    if call.is_same:
        return arrays[0]

    if call.is_free or (call.is_local and in_loss()):
        columns = [x.shards for x in arrays]
    else:
        if mode.explicit_axes:
            validate_explicit(call.name, arrays, call.choice.transfers)
        pairs = zip(arrays, call.choice.transfers, strict=True)
        columns = [transfer(x, to, call.name) for x, to in pairs]

    outputs = _run_on_shards(call, arrays[0].mesh, columns, args, kwargs)
    columns = [tuple(outputs)] if call.rebuild is None else zip(*outputs, strict=True)
    fields = zip(call.shapes, call.choice.layouts, columns, strict=True)
    results = [Sharded(*field) for field in fields]

    if call.is_view:
        for y in results:
            y.viewed = (arrays[0], arrays[0].version, call.name, args)
    is_unreduced = bool(call.choice.layouts[0].spec.unreduced)
    if is_unreduced and mode.plan is not None and mode.plan.reduces_at_once:
        results = [with_spec(y, y.spec.replace(unreduced=None), call.name) for y in results]
    if mode.observer is not None:
        mode.observer(call, arrays, args, results)
    return results[0] if call.rebuild is None else call.rebuild(results)


def _run_on_shards(
    call: CachedCall,
    mesh: Mesh,
    columns: Sequence[Sequence[Tensor]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Any]:
    """Call torch's function, or the local program, on the shards of each device."""
    func, local = call.func, call.local
    devices = local_devices(mesh) if local is not None else ()
    outputs = list[Any]()
    for number, shards in enumerate(zip(*columns, strict=True)):
        local_shards = iter(shards)
        local_args = list[Any]()
        for x in args:
            kind = type(x)
            if kind is Sharded:
                local_args.append(next(local_shards))
            elif kind in _ATOMS:
                local_args.append(x)
            else:
                local_args.append(_replaced(x, local_shards))
        if kwargs:
            named = {name: _replaced(x, local_shards) for name, x in kwargs.items()}
        else:
            named = kwargs

        if local is None:
            outputs.append(func(*local_args, **named))
        else:
            context = _context_of(call, devices[number])
            outputs.append(local(context, func, tuple(local_args), named))
    return outputs


def _replaced(argument: Any, shards: Iterator[Tensor]) -> Any:
    """Return an argument with the next shards in place of its arrays."""
    return map_arrays(lambda _: next(shards), argument)
