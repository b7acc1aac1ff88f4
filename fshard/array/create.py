"""Make arrays on a mesh: constants and random draws, which are the same numbers on any mesh.

A random array is drawn in full on every device, from a generator that all of them share, and cut to shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fshard.array.communicate import in_loss, in_zigzag_order, spec_like
from fshard.array.rules import compose
from fshard.errors import LayoutError
from fshard.mesh.layout import Layout, as_layout
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
    layout, shape = as_layout(layout), tuple(size)
    layout = layout.on(resolve_mesh(layout.mesh))
    layout.check(shape, "the array")
    if layout.spec.unreduced:
        raise LayoutError(f"layout must not be unreduced for a given value; got {layout.spec}.")
    shapes = [layout.local_shape(shape, device) for device in local_devices(layout.mesh)]
    device_type = layout.mesh.device_type
    return Sharded(
        shape,
        layout,
        tuple(
            torch.full(local_shape, value, dtype=dtype, device=device_type)
            for local_shape in shapes
        ),
    )


def zeros(*size: Any, layout: Layout, dtype: DType = None) -> Sharded:
    """Return an array of zeros."""
    return full(_shape_of(size), 0, layout=layout, dtype=dtype or torch.get_default_dtype())


def ones(*size: Any, layout: Layout, dtype: DType = None) -> Sharded:
    """Return an array of ones."""
    return full(_shape_of(size), 1, layout=layout, dtype=dtype or torch.get_default_dtype())


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
    return _drawn(
        _shape_of(size),
        layout,
        partial(torch.Tensor.normal_, generator=generator),
        generator,
        dtype,
    )


def rand(
    *size: Any, layout: Layout, generator: torch.Generator | None = None, dtype: DType = None
) -> Sharded:
    """Return an array of uniform draws from [0, 1): those of torch.rand, on any mesh."""
    return _drawn(
        _shape_of(size),
        layout,
        partial(torch.Tensor.uniform_, generator=generator),
        generator,
        dtype,
    )


def bernoulli_like(x: Sharded, shape: Sequence[int], p: float) -> Sharded:
    """Return an array of 0 and 1 with the dtype of x, sharded like x in the dims where the shapes are equal."""
    return _drawn(
        shape, Layout(x.mesh, spec_like(x, shape)), lambda y: y.bernoulli_(p), None, x.dtype
    )


def _shape_of(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)


def _drawn(
    shape: Sequence[int], layout: Layout, draw: Callable[[Any], Any], generator: Any, dtype: DType
) -> Sharded:
    """Draw an array in full, and keep the shards of the devices held here."""
    layout = as_layout(layout)
    array = zeros(shape, layout=layout, dtype=dtype)
    if array.mesh.runtime != "abstract":
        if (
            array.mesh.runtime == "process" and not in_loss()
        ):  # all devices of a step draw by one key
            state = (generator or torch.default_generator).get_state()
            compare_inputs("fs.array", array.mesh, {"the state of the random generator": (state,)})
        values = draw(torch.empty(array.shape, dtype=array.dtype))
        for dim, axes in enumerate(() if layout.spec.is_flat else array.spec.dims(array.ndim)):
            values = in_zigzag_order(values, array.mesh, axes, dim)
        for device, shard in zip(local_devices(array.mesh), array.shards, strict=True):
            if shard.numel():
                shard.copy_(shard_of(values, array.layout, device))
    return array


def _like(
    make: Callable[..., Any], x: Any, *values: Any, size: Any = None, dtype: Any = None, requires_grad: bool = False,
    device: Any = None, generator: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Make an array on the mesh of x; dims are sharded like those of x that have the same length."""
    x = x.to(device=device)  # raises for another device
    shape = x.shape if size is None else _shape_of(size)
    more = {} if generator is None else {"generator": generator}
    y = make(
        shape, *values, layout=Layout(x.mesh, spec_like(x, shape)), dtype=dtype or x.dtype, **more
    )
    return y.requires_grad_() if requires_grad else y


for _make in (zeros, ones, full, randn, rand):
    compose(f"{_make.__name__}_like")(partial(_like, _make))
compose("empty_like")(partial(_like, zeros))
for _names, _make in {"new_zeros new_empty": zeros, "new_ones": ones}.items():
    compose(_names)(
        lambda x, *size, _make=_make, **more: _like(_make, x, size=more.pop("size", size), **more)
    )
compose("new_full")(
    lambda x, size, fill_value, **more: _like(full, x, fill_value, size=(size,), **more)
)
compose("new_tensor")(
    partial(_like, lambda _, data, layout, dtype: spread(torch.tensor(data, dtype=dtype), layout))
)
compose("zero")(lambda x: x.masked_fill(torch.tensor(True), 0))
compose("copy")(
    lambda x, source, non_blocking=False: torch.where(torch.tensor(True), source.to(x.dtype), x)
)
compose("type_as")(lambda x, like: x.to(like.dtype))
