"""Make arrays on a mesh: constants and random draws, which are the same numbers on any mesh.

A random array is drawn in full on every device, from a generator that all of them share, and cut to
shards:

    generator ─ draw ─> [0.3 1.2 0.7 2.1] on every device ─ cut ─> [0.3 1.2] and [0.7 2.1]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fshard.array.communicate import in_loss, in_zigzag_order, spec_like, with_spec
from fshard.array.rules import compose
from fshard.errors import LayoutError
from fshard.mesh.layout import Layout, Mesh, P, as_layout
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import shard_of, spread
from fshard.mesh.spmd.global_inputs import compare_inputs
from fshard.mesh.spmd.run import local_devices, resolve_mesh

DType = torch.dtype | None


def full(size: Sequence[int], value: complex, *, layout: Layout, dtype: DType = None) -> Sharded:
    """Return an array filled with one value.

    >>> import fshard as fs
    >>> x = fs.array.full((4, 2), 1.5, layout=fs.Layout(fs.make_mesh({"data": 2}), fs.P("data")))
    >>> fs.typeof(x), float(x.sum())
    (f32[4@data, 2], 12.0)
    """
    shape = tuple(size)
    layout = as_layout(layout)
    mesh = resolve_mesh(layout.mesh)
    layout = layout.on(mesh)
    layout.check(shape, "the array")
    if layout.spec.unreduced:
        raise LayoutError(f"layout must not be unreduced for a given value; got {layout.spec}.")

    shards: list[torch.Tensor] = []
    for device in local_devices(layout.mesh):
        local_shape = layout.local_shape(shape, device)
        shards.append(torch.full(local_shape, value, dtype=dtype, device=layout.mesh.device_type))
    return Sharded(shape, layout, tuple(shards))


def zeros(*size: Any, layout: Layout, dtype: DType = None) -> Sharded:
    """Return an array of zeros."""
    return full(_shape_of(size), 0, layout=layout, dtype=dtype or torch.get_default_dtype())


def ones(*size: Any, layout: Layout, dtype: DType = None) -> Sharded:
    """Return an array of ones."""
    return full(_shape_of(size), 1, layout=layout, dtype=dtype or torch.get_default_dtype())


def _shape_of(size: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the shape of `zeros(4, 2)` or `zeros((4, 2))`."""
    if len(size) == 1 and not isinstance(size[0], int):
        return tuple(size[0])
    return tuple(size)


# Random draws.


def randn(
    *size: Any, layout: Layout, generator: torch.Generator | None = None, dtype: DType = None
) -> Sharded:
    """Return an array of normal draws: those of torch.randn, on any mesh.

    >>> import torch, fshard as fs
    >>> layout = fs.Layout(fs.make_mesh({"data": 2}), fs.P("data"))
    >>> x = fs.array.randn(4, layout=layout, generator=torch.Generator().manual_seed(0))
    >>> torch.equal(fs.unshard(x), torch.randn(4, generator=torch.Generator().manual_seed(0)))
    True
    """
    draw = partial(torch.Tensor.normal_, generator=generator)
    return _drawn(_shape_of(size), layout, draw, generator, dtype)


def rand(
    *size: Any, layout: Layout, generator: torch.Generator | None = None, dtype: DType = None
) -> Sharded:
    """Return an array of uniform draws from [0, 1): those of torch.rand, on any mesh."""
    draw = partial(torch.Tensor.uniform_, generator=generator)
    return _drawn(_shape_of(size), layout, draw, generator, dtype)


def bernoulli_like(x: Sharded, shape: Sequence[int], p: float, *, dtype: DType) -> Sharded:
    """Return an array of 0 and 1, sharded like x in dims of equal length."""
    layout = Layout(x.mesh, spec_like(x, shape))
    return _drawn(shape, layout, lambda y: y.bernoulli_(p), None, dtype)


def _drawn(
    shape: Sequence[int], layout: Layout, draw: Callable[[Any], Any], generator: Any, dtype: DType
) -> Sharded:
    """Draw an array in full, and keep the shards of the devices held here."""
    layout = as_layout(layout)
    array = zeros(shape, layout=layout, dtype=dtype)
    mesh = array.mesh
    if mesh.runtime == "abstract" and mesh.is_member:
        return array
    if array.is_local:
        _validate_equal_generators(mesh, generator or torch.default_generator)
    # Outside of the mesh too, so that all processes draw the same numbers later.
    values = draw(torch.empty(array.shape, dtype=array.dtype))
    if not array.is_local:
        return array
    if not layout.spec.is_flat:
        for dim, axes in enumerate(array.spec.dims(array.ndim)):
            values = in_zigzag_order(values, mesh, axes, dim)
    for device, shard in zip(local_devices(mesh), array.shards, strict=True):
        if shard.numel():
            shard.copy_(shard_of(values, array.layout, device))
    return array


def _validate_equal_generators(mesh: Mesh, generator: torch.Generator) -> None:
    """Raise unless the generators of all devices have one state."""
    if not in_loss():  # all devices of a step draw by one key
        states = {"the state of the random generator": (generator.get_state(),)}
        compare_inputs("fs.array", mesh, states)


@compose("multinomial")
def _multinomial(
    x: Sharded, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Sharded:
    """Draw from rows of probabilities: as one device does, so devices that share a row agree."""
    full = with_spec(x, P(), "multinomial")
    # Outside of a virtual mesh the shards are equal, and one draw is for all devices.
    rows = full.shards[0]
    _validate_equal_generators(x.mesh, generator or _default_generator(rows.device))
    drawn = torch.multinomial(rows, num_samples, replacement, generator=generator)
    return with_spec(spread(drawn, full.layout), spec_like(x, drawn.shape), "multinomial")


def _default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that draws for tensors on a device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator


# Rows of functions that make an array like another one.


def _like(
    make: Callable[..., Any], x: Any, *values: Any, size: Any = None, dtype: Any = None,
    requires_grad: bool = False, device: Any = None, generator: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Make an array on the mesh of x, sharded like x in dims of equal length."""
    x = x.to(device=device)  # raises for another device
    shape = x.shape if size is None else _shape_of(size)
    layout = Layout(x.mesh, spec_like(x, shape))
    options = {} if generator is None else {"generator": generator}
    y = make(shape, *values, layout=layout, dtype=dtype or x.dtype, **options)
    return y.requires_grad_() if requires_grad else y


def _new(make: Callable[..., Any], x: Any, *size: Any, **kwargs: Any) -> Any:
    """Make an array of another size on the mesh of x: `x.new_zeros(4, 2)`."""
    size = kwargs.pop("size", size)
    return _like(make, x, size=size, **kwargs)


def _of_values(shape: Any, values: Any, layout: Layout, dtype: DType) -> Sharded:
    return spread(torch.tensor(values, dtype=dtype), layout)


compose("zeros_like empty_like")(partial(_like, zeros))
compose("ones_like")(partial(_like, ones))
compose("full_like")(partial(_like, full))
compose("randn_like")(partial(_like, randn))
compose("rand_like")(partial(_like, rand))
compose("new_zeros new_empty")(partial(_new, zeros))
compose("new_ones")(partial(_new, ones))
compose("new_tensor")(partial(_like, _of_values))


@compose("new_full")
def _new_full(x: Any, size: Any, fill_value: Any, **kwargs: Any) -> Any:
    return _like(full, x, fill_value, size=(size,), **kwargs)


# Rows of functions that are called in place: `x.zero_()`, `x.copy_(y)`.


@compose("zero")
def _zero(x: Any) -> Any:
    """Replace all elements by 0, infinite ones and nan too."""
    return x.masked_fill(torch.tensor(True), 0)


@compose("copy")
def _copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    """Replace all elements by those of another array, which broadcasts."""
    return torch.where(torch.tensor(True), source.to(x.dtype), x)


@compose("type_as")
def _type_as(x: Any, like: Any) -> Any:
    return x.to(like.dtype)
