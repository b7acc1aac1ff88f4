"""Run one function on every device of the caller.

Code runs either *outside* a mesh, for all its devices (a notebook with a virtual mesh), or *as* one
device (a process under torchrun, a thread of `run`, the body of a `shard_map`). `run_on_devices`
hides the difference, so everything built on it is one program on all runtimes.

On an abstract mesh tensors have no values. Tensors that a function creates lose their values
immediately, captured ones where they meet a tensor without values (`Valueless`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors  # pyright: ignore[reportPrivateUsage]

from fshard.errors import LayoutError, MeshError
from fshard.mesh.collectives.autograd import LinearMap, Tensors, apply
from fshard.mesh.collectives.ledger import uncounted
from fshard.mesh.layout import Mesh, flatten, require_mesh, unflatten
from fshard.mesh.layout.array_methods import ArrayMethods
from fshard.mesh.layout.counting import without_counters
from fshard.mesh.runtimes.abstract import AbstractWorld, representative
from fshard.mesh.runtimes.process import ProcessWorld
from fshard.mesh.runtimes.virtual import VirtualWorld, lost_error
from fshard.mesh.runtimes.watch import watching
from fshard.mesh.spmd.moments import Killed, Phase, reach_as
from fshard.mesh.spmd.scope import Scope, entered, here, require
from fshard.source import call_site
from fshard.uncompiled import uncompiled

Result = TypeVar("Result")


def inside(mesh: Mesh) -> Scope | None:
    """Return the scope in which the caller is a device of `mesh`; None outside.

    A scope of another mesh counts, if it numbers the same devices.
    """
    scope = here()
    is_inside = (
        scope is not None and scope.mesh.runtime == mesh.runtime and scope.mesh.has_devices_of(mesh)
    )
    return scope if is_inside else None


def run_around(mesh: Mesh) -> Scope | None:
    """Return the caller's scope, if it is of a virtual run that has the devices of `mesh`."""
    scope = here()
    if scope is None or mesh.runtime != "virtual":
        return None
    world = scope.world
    has_devices = isinstance(world, VirtualWorld) and world.has_devices_of(mesh)
    return scope if has_devices else None


def resolve_mesh(mesh: Mesh) -> Mesh:
    """Return the mesh to run on, for a mesh that may be some axes of another.

    Inside a `shard_map` it is the caller's row along these axes, elsewhere the entire mesh.
    """
    if mesh.parent is None:
        return mesh
    scope = inside(mesh)
    if scope is not None and scope.mapped:
        return mesh
    return mesh.root


def is_outside(mesh: Mesh) -> bool:
    """Return True if the caller runs all devices of a virtual mesh, and so has all shards."""
    if mesh.runtime != "virtual":
        return False
    if here() is None:  # as most often
        return True
    return inside(mesh) is None and run_around(mesh) is None


def device_of(mesh: Mesh) -> int:
    """Return the caller's device number in the mesh that `mesh` was sliced from."""
    scope = inside(mesh)
    if scope is not None:
        return scope.device
    if mesh.runtime == "process":
        return ProcessWorld.of(mesh).device(mesh)
    outer = run_around(mesh)
    if outer is not None:
        return _device_of_number(mesh, outer.number)
    current = representative()
    return 0 if current is None else current.device


def _device_of_number(mesh: Mesh, number: int) -> int:
    """Return the device of a mesh that has a number in the world; raise if there is none."""
    if number not in mesh.devices:
        raise MeshError(
            f"device {number} runs code on {mesh}, but is none of its devices, {mesh.devices}. "
            "Make the mesh in the function of fs.run, where fs.make_mesh(..., devices=...) gives "
            "each device its side of it."
        )
    return mesh.devices.index(number)


def local_devices(mesh: Mesh) -> tuple[int, ...]:
    """Return the numbers, in `mesh`, of the devices whose shards the caller holds."""
    if is_outside(mesh):
        return tuple(range(mesh.size))
    return (mesh.local_index(device_of(mesh)),)


def reach_on(mesh: Mesh, phase: Phase, devices: Iterable[int] | None = None) -> None:
    """Notify the listeners that all devices of the caller have reached a phase together.

    `devices` are their numbers in the mesh; by default all that the caller has. Outside of a run no
    thread is that of a killed device, so `LostProcessError` is raised at once.
    """
    if not is_outside(mesh):
        reach_as(mesh.devices[device_of(mesh)], phase, mesh.runtime)
        return
    mesh = mesh if mesh.parent is None else mesh.first_row
    try:
        for device in range(mesh.size) if devices is None else devices:
            reach_as(mesh.devices[device], phase, mesh.runtime)
    except Killed:
        raise lost_error(mesh) from None


def agree(mesh: Mesh, call: str) -> None:
    """Under `FSHARD_CHECK=1`, raise on all processes of a mesh unless all make this call."""
    if mesh.runtime != "process" or not watching():
        return
    site = call_site()

    def on_device(device: int) -> None:
        group = require(call).group(mesh.axis_names, call)
        ProcessWorld.of(mesh).agree(call, group, site)

    run_on_devices(mesh, on_device)


def run_on_devices(
    mesh: Mesh,
    body: Callable[[int], Result],
    *,
    mapped: tuple[str, ...] = (),
    checked: bool = False,
    random: Tensor | None = None,
    keep: bool = True,
) -> list[Result]:
    """Run `body(device)` on every device of the caller, each in its scope; return their results.

    `random` is the initial random state of virtual devices (default: the caller's). With `keep`,
    threads stay for reuse.
    """
    if not is_outside(mesh):
        with as_one_device(mesh, mapped=mapped, checked=checked) as scope:
            return [body(mesh.local_index(scope.device))]

    # From outside, the devices along some axes of a mesh are a mesh of their own.
    alone = mesh if mesh.parent is None else mesh.first_row
    virtual = VirtualWorld(alone)

    def on_thread(device: int) -> Any:
        mark(alone.devices[device])
        scope = Scope(virtual, alone, device, mapped=mapped, checked=checked)
        with entered(scope):  # (3)
            return body(device)

    return virtual.run(on_thread, random, keep=keep)


@contextmanager
def as_one_device(
    mesh: Mesh, *, mapped: tuple[str, ...] = (), checked: bool = False
) -> Generator[Scope]:
    """Enter the scope of the one device that the caller is.

    It is a process, a virtual device, or any device of an abstract mesh. The scope is made once for
    each world or outer scope.
    """
    outer = inside(mesh)
    around = _scope_around(mesh) if outer is None and here() is not None else None
    if outer is not None:
        world = outer.world
        scopes = outer.inner
    elif around is not None:
        world = around.world
        scopes = around.inner
    else:
        world = ProcessWorld.of(mesh) if mesh.runtime == "process" else _ABSTRACT
        scopes = world.scopes

    device = device_of(mesh)
    key = mesh, device, mapped, checked
    scope = scopes.get(key)
    if scope is None:
        if len(scopes) >= 512:  # a bound, for programs that make many meshes
            scopes.clear()
        scope = Scope(world, mesh, device, outer, mapped=mapped, checked=checked)
        scopes[key] = scope

    is_outermost_abstract = mesh.runtime == "abstract" and outer is None
    valueless = _on_shapes(mesh) if is_outermost_abstract else nullcontext()
    with entered(scope), valueless:
        yield scope


def _scope_around(mesh: Mesh) -> Scope | None:
    """Return the scope of the virtual run that has the devices of a mesh; raise in a `shard_map`.

    There the axes of the caller's mesh can be named, which number other devices.
    """
    scope = require(f"a function on {mesh}")
    around = run_around(mesh)
    is_of_same_world = around is not None or scope.mesh.runtime == mesh.runtime == "process"
    is_elsewhere = not mesh.is_member or not scope.mesh.is_member
    if scope.mapped and (is_of_same_world or is_elsewhere):
        raise MeshError(
            f"{mesh} has other devices than {scope.mesh}, in whose shard_map or loss function it "
            "is used. Use it outside: what the function needs is an argument of it."
        )
    return around


@contextmanager
def _on_shapes(mesh: Mesh) -> Generator[None]:
    """Run a block on tensors without values; what is of other devices is not counted here."""
    with Valueless():
        if mesh.is_member:
            yield
        else:
            with uncounted(), without_counters():
                yield


_ABSTRACT = AbstractWorld()


MARK = "fshard: device "


def mark(device: int) -> None:
    """Mark this thread as a device's in the profiler's trace, if one is being recorded."""
    if getattr(profiler, "_is_profiler_enabled", True):
        with profiler.record_function(f"{MARK}{device}"):
            pass


@uncompiled
def run(
    main: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    check: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run `main(*args, **kwargs)` as each device of the mesh, as torchrun would.

    Return the results of local devices. Some axes of a mesh run on the entire mesh; the default is
    that of `fs.use_mesh`. With `check`, values that collectives promise to be equal are compared.

    >>> import fshard as fs
    >>> def main(greeting):
    ...     return f"{greeting} from {fs.axis_index('data')} of {fs.axis_size('data')}"
    >>> run(main, "hello", mesh=fs.make_mesh({"data": 2}))
    ['hello from 0 of 2', 'hello from 1 of 2']
    """
    mesh = require_mesh("fs.run", mesh)
    if not callable(main):
        raise TypeError(
            f"fs.run: main must be a function, called as each device; got {type(main).__name__}."
        )
    error = error_of_deferred("main", main)
    if error:
        raise TypeError(f"fs.run: {error}")

    def run_main(device: int) -> Any:
        result = main(*args, **kwargs)
        # A generator that `main` makes inside is found only by its result.
        if isinstance(result, Generator | AsyncGenerator | Coroutine):
            kind = type(result).__name__
            if isinstance(result, Coroutine):
                result.close()  # else Python warns that it was not awaited
            raise TypeError(
                f"fs.run: main must return values; got a {kind}, whose body would run outside of "
                "the devices. Run it in main: return list(...), or asyncio.run(...)."
            )
        return result

    return run_on_devices(resolve_mesh(mesh), run_main, checked=check, keep=False)


def error_of_deferred(name: str, f: Any) -> str:
    """Return the error of a function whose call runs nothing; "" for another.

    Such are generator functions and coroutine functions.
    """
    # The checks of `inspect` look at functions: of another object, at the method that is called.
    called = f.func if isinstance(f, partial) else f
    if not isinstance(called, FunctionType | MethodType | type):
        called = getattr(called, "__call__", called)  # noqa: B004

    if isgeneratorfunction(called) or isasyncgenfunction(called):
        kind = "a generator function"
        fix = "Return a list instead of yielding"
    elif iscoroutinefunction(called):
        kind = "a coroutine function"
        fix = "Call asyncio.run in a plain function"
    else:
        return ""
    return (
        f"{name} must be a function that returns its result; got {_name_of(f)}, {kind}, whose body "
        f"would run outside of the devices. {fix}."
    )


def _name_of(f: Any) -> str:
    inner = f.func if isinstance(f, partial) else f
    return getattr(inner, "__qualname__", type(inner).__name__)


_CONSTRUCTORS: frozenset[Any] = frozenset(_device_constructors())


class Valueless(TorchFunctionMode):
    """Make all tensors without values, and let those that meet such a tensor forget theirs."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # A generator of the CPU or of CUDA draws no tensor without values.
        options = {name: value for name, value in kwargs.items() if name != "generator"}
        if func in _CONSTRUCTORS:
            return func(*args, **options | {"device": "meta"})

        arguments: Any = (args, options)
        leaves, structure = flatten(arguments)
        tensors = [x for x in leaves if isinstance(x, Tensor | ArrayMethods)]
        if not any(isinstance(x, ArrayMethods) or x.is_meta for x in tensors):
            return func(*args, **kwargs)
        if len(tensors) > 1:
            leaves = [without_values(x) if isinstance(x, Tensor) else x for x in leaves]
            args, options = unflatten(structure, leaves)

        if func is scaled_dot_product_attention:
            func = attention_without_values
        try:
            return func(*args, **options)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if "meta" not in str(error):
                raise
            name = getattr(func, "__name__", func)
            raise LayoutError(
                f"{name} at {call_site()} needs the value of a tensor of shape "
                f"{tuple(tensors[0].shape)}, {_reason_without_values()}"
            ) from error


def _reason_without_values() -> str:
    """Return why tensors of the calling code have no values, and what to do."""
    scope = here()
    if scope is None or scope.mesh.is_member:
        return "but on an abstract mesh tensors have none. Run this on a virtual mesh."
    return (
        f"but this process is none of {scope.mesh.grid}, and runs the function on shapes. Call it "
        "where mesh.is_member, or let it look at no values."
    )


def attention_without_values(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with the kernel that CPUs have for it.

    For tensors without values torch calls one that needs more memory, which would be counted.
    """
    xs = query, key, value
    if not _have_fused_attention(xs, attn_mask, dropout_p, enable_gqa):
        return scaled_dot_product_attention(
            *xs, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(*xs, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _have_fused_attention(
    xs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    dropout_p: float,
    enable_gqa: bool,
) -> bool:
    """Return True if CPUs have a fused kernel for the attention of query, key and value."""
    if not all(type(x) is Tensor for x in xs):  # arrays have rules for torch's own function
        return False
    query = xs[0]
    if query.ndim != 4 or not query.is_floating_point() or dropout_p or enable_gqa:
        return False
    if not all(x.numel() and x.stride(-1) == 1 for x in xs):
        return False
    shapes = {(*x.shape[:2], x.shape[-1]) for x in xs}  # batch, heads, features
    if len(shapes) > 1:
        return False
    return mask is None or not (mask.requires_grad or mask.dtype == torch.bool)


def without_values(x: Tensor, mesh: Mesh | None = None) -> Tensor:
    """Return a tensor that is like this one, without values, on a mesh or in its scope."""
    if x.is_meta:
        return x
    scope = here()
    if mesh is None and scope is not None:
        mesh = scope.mesh
    is_member = mesh is None or mesh.is_member
    (result,) = apply(Forget(is_member), (x,))
    return result


@dataclass(frozen=True)
class Forget(LinearMap):
    """Return a tensor without values; a gradient of what had values raises, or there is none.

    It raises on a mesh that is abstract for all. Outside of a mesh (not `is_member`) the gradient
    is none, as that of a tensor that no device here has used.
    """

    is_member: bool = True

    def run(self, xs: Tensors) -> Tensors:
        return tuple([x.to("meta") for x in xs])

    def transposed(self) -> LinearMap:
        return _ForgottenGradient(self.is_member)


@dataclass(frozen=True)
class _ForgottenGradient(LinearMap):
    is_member: bool

    def run(self, xs: Tensors) -> Any:
        if not self.is_member:
            return (None,) * len(xs)
        raise LayoutError(
            f"A gradient of shape {tuple(xs[0].shape)} is needed for a tensor with values, but on "
            "an abstract mesh it has none. Give the mesh meta tensors: "
            'x.detach().to("meta").requires_grad_().'
        )
