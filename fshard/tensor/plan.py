"""`tensor_parallel`: a plan of which layers of a model are sharded, found by following dims through it.

    column   the dim that a layer produces is sharded: heads, hidden units      P(axis) of a (out, in) weight
    row      the layer that sums over that dim; its result is a partial sum     P(None, axis)
    words    a table of words, and the layer that scores them: rows by words    P(axis)

The model runs unchanged: inside a step its parameters are arrays of the devices along the axes, and each operation is
done on their shards (`fshard.array`). So any plan computes the same; a good one sends little.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fshard.array.communicate import state
from fshard.array.dispatch import constrain
from fshard.errors import LayoutError
from fshard.mesh.layout import Layout, Mesh, P, flatten, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.scope import here
from fshard.tensor.follow import Product, follow
from fshard.tensor.joined import Joined
from fshard.transforms.module.functionalize import module_function

Style = Literal["column", "row", "words"]


@dataclass(frozen=True)
class LayerPlan:
    """How one weight is sharded.

    Args:
        weight: its name.
        style: column, row or words.
        dim: of the weight, which is sharded.
        parts: lengths of the parts of a fused weight along that dim, each of which is sharded.
        shared: the largest number of devices that can share the dim.
        why: in words.
    """

    weight: str
    style: Style
    dim: int
    parts: tuple[int, ...]
    shared: int
    why: str


@dataclass(frozen=True)
class Plan:
    """The plan of a model: see `tensor_parallel`.

    Args:
        axis: the mesh axis that layers are sharded over.
        layers: the plan of each sharded weight.
        shapes: of all parameters.
        biases: the weight of each bias that is sharded with it.
        replicated: weights of linear layers that are not sharded, and why.
    """

    axis: str
    layers: Mapping[str, LayerPlan]
    shapes: Mapping[str, tuple[int, ...]]
    biases: Mapping[str, str]
    replicated: Mapping[str, str]
    dtype: torch.dtype = field(default=torch.float32, repr=False)

    @property
    def rules(self) -> dict[str, P]:
        """The spec of every parameter along the axis, for `fs.fsdp("data", within=plan.rules)`."""
        return {name: self._spec(name) for name in self.shapes}

    def _spec(self, name: str) -> P:
        layer, dim = self._layer(name)
        return P() if layer is None else P(*[None] * dim, self.axis)

    def _layer(self, name: str) -> tuple[LayerPlan | None, int]:
        """Return the plan of a parameter or of the weight of a bias, and the dim that is sharded."""
        layer = self.layers.get(self.biases.get(name, name))
        return layer, 0 if layer is None or name in self.biases else layer.dim

    def __str__(self) -> str:
        rows = [(x.weight, x.style, " + ".join(map(str, x.parts)), x.why) for x in self.layers.values()]
        rows += [(name, "", "", why) for name, why in self.replicated.items()]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = ["  ".join(f"{text:{width}}" for text, width in zip(row, (*widths, 0), strict=True)) for row in rows]
        return "\n".join([f'sharded over "{self.axis}"; all other parameters are replicated', *map(str.rstrip, lines)])

    def check_sizes(self, size: int) -> None:
        """Raise with all layers that this number of devices cannot share."""
        wrong = [f"{x.weight} is shared by at most {x.shared}" for x in self.layers.values() if x.shared % size]
        if wrong:
            raise LayoutError(
                f'{size} devices along "{self.axis}" must divide the heads and widths of all sharded layers; '
                f"{'; '.join(wrong)}. Plan for this size: fs.tensor_parallel(..., size={size})."
            )

    # Running a model.

    def functionalize(
        self, module: nn.Module, **options: Any
    ) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
        """Return what `fs.functionalize` does; parts of a fused weight are leaves of their own."""
        if {name: tuple(x.shape) for name, x in module.named_parameters()} != self.shapes:
            raise LayoutError(
                f"functionalize: plan must be made for {type(module).__name__}; got one of another model."
            )
        apply, params, buffers = module_function(module, in_place=False, **options)

        def apply_sharded(params: Mapping[str, Any], buffers: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
            mesh = self._mesh()
            if mesh is None:
                return apply({name: self._joined(name, x) for name, x in params.items()}, buffers, *args, **kwargs)
            arrays = {name: self._arrays(name, x, mesh) for name, x in params.items()}
            with _running():
                return apply(arrays, buffers, *self._inputs(args, mesh), **self._inputs(kwargs, mesh))

        return apply_sharded, {name: self._parts(name, x) for name, x in params.items()}, buffers

    def _mesh(self) -> Mesh | None:
        """Return the devices along the axis; None outside of a step, where the model runs on full tensors."""
        scope = here()
        if scope is None or self.axis not in scope.mesh.axis_names:
            return None
        return scope.mesh[self.axis]

    def _parts(self, name: str, x: Tensor) -> Any:
        layer, dim = self._layer(name)
        if layer is None or len(layer.parts) < 2:
            return x
        return tuple(
            part.detach().clone().requires_grad_()
            if x.requires_grad
            else nn.Parameter(part.clone(), requires_grad=False)
            for part in x.detach().split(layer.parts, dim)
        )

    def _joined(self, name: str, x: Any) -> Any:
        return torch.cat(x, self._layer(name)[1]) if isinstance(x, tuple) else x

    def _arrays(self, name: str, x: Any, mesh: Mesh) -> Any:
        layer, dim = self._layer(name)
        shape, spec = self.shapes[name], self._spec(name)
        if layer is None or len(layer.parts) < 2:
            return self._array(name, x, shape, spec, mesh)
        shapes = [(*shape[:dim], length, *shape[dim + 1 :]) for length in layer.parts]
        arrays = [self._array(name, own, shape, spec, mesh) for own, shape in zip(x, shapes, strict=True)]
        return Joined(arrays, dim)

    def _array(self, name: str, x: Tensor, shape: tuple[int, ...], spec: P, mesh: Mesh) -> Sharded:
        """Return the array of which a device has its shard."""
        layout = Layout(mesh, spec)
        size = mesh.shape[self.axis]
        local = tuple(n // size if spec.dims(len(shape))[dim] else n for dim, n in enumerate(shape))
        if tuple(x.shape) != local:
            self.check_sizes(size)
            raise LayoutError(
                f"{name} must have the shape {local} of a device's shard of {shape}; got {tuple(x.shape)}. Shard it by "
                f'plan.rules, and give local="{self.axis}" to the step.'
            )
        array = Sharded(shape, layout, (x,))
        if (step := getattr(x, "step", None)) is not None:
            array.step = step  # pyright: ignore[reportAttributeAccessIssue]  # as functionalize reads it
        return array

    def _inputs(self, given: Any, mesh: Mesh) -> Any:
        leaves, structure = flatten(given)
        arrays = [Sharded(tuple(x.shape), Layout(mesh), (x,)) if isinstance(x, Tensor) else x for x in leaves]
        return unflatten(structure, arrays)

    def full(self, x: Any) -> Any:
        """Return a result of the model as a tensor, the same on all devices along the axis."""
        return constrain(x, P()).local if isinstance(x, Sharded) else x

    def cross_entropy(self, logits: Any, labels: Tensor, **options: Any) -> Tensor:
        """Return the cross-entropy of (..., classes) logits and (...) labels; sharded logits stay sharded."""
        if isinstance(logits, Sharded):
            labels = self._inputs(labels, logits.mesh)
        with _running():
            return self.full(F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options))


@contextmanager
def _running() -> Generator[None]:
    """Let plain tensors count as equal on all devices, and reduce the result of a row at once."""
    before = state.constants, state.reduces
    state.constants = state.reduces = True
    try:
        yield
    finally:
        state.constants, state.reduces = before


def tensor_parallel(
    model: nn.Module,
    *,
    axis: str,
    sample: Any,
    size: int | None = None,
    rules: Mapping[str, Style] | None = None,
) -> Plan:
    """Plan how the layers of a model are sharded over a mesh axis.

    The model runs once on a sample, and the dim that each linear layer produces is followed to the layer that sums over
    it: such a pair is sharded, by columns and by rows; all else stays replicated.

    Args:
        model: any module of linear layers; attention by `scaled_dot_product_attention` or written out.
        axis: the mesh axis.
        sample: its arguments: a dict of keywords, a tuple, or one tensor.
        size: the number of devices along the axis; layers that it does not divide stay replicated. By default a step
            raises for these.
    """
    args, kwargs = (
        ((), sample) if isinstance(sample, Mapping) else (sample if isinstance(sample, tuple) else (sample,), {})
    )
    products = follow(model, args, kwargs)
    shapes = {name: tuple(x.shape) for name, x in model.named_parameters()}
    layers, replicated = _decide(products, shapes, size)
    biases = {
        p.bias: name for name, p in products.items() if p.bias and name in layers and layers[name].style == "column"
    }
    return Plan(axis, layers, shapes, biases, replicated, next(model.parameters()).dtype)


def _decide(
    products: Mapping[str, Product], shapes: Mapping[str, tuple[int, ...]], size: int | None
) -> tuple[dict[str, LayerPlan], dict[str, str]]:
    """Return the plan of each sharded weight, and why others are replicated."""
    columns, rows = dict[str, str](), dict[str, list[str]]()
    for name, product in products.items():
        producers = sorted({piece.weight for origin in product.inputs for piece in origin})
        if not producers or not all(product.inputs) or any(one in rows or products[one].needed for one in producers):
            continue
        fitting = [one for one in producers if size is None or products[one].length % size == 0]
        if fitting:
            rows[name] = producers
            columns.update(dict.fromkeys(fitting, f"{_short(name)} sums over what it produces"))
    layers, replicated = dict[str, LayerPlan](), dict[str, str]()
    for name, product in products.items():
        shared, out = product.length, product.out
        if name in rows:
            shared = _shared(products[one].length for one in rows[name] if one in columns)
            why = f"it sums over what {', '.join(map(_short, rows[name]))} produce"
            layers[name] = LayerPlan(name, "row", product.summed, (shapes[name][product.summed],), shared, why)
        elif name in columns:
            layers[name] = LayerPlan(name, "column", out, _parts(product, shapes[name][out]), shared, columns[name])
        elif (
            product.kind == "linear"
            and product.is_output
            and not product.needed
            and (size is None or shared % size == 0)
        ):
            weight = name.removesuffix(" (linear)")
            layers[weight] = LayerPlan(
                weight, "words", out, (shapes[weight][out],), shared, "the model returns its scores"
            )
        elif product.kind == "linear":
            replicated[name] = (
                f"{product.needed[0]} needs all that it produces" if product.needed else "no layer sums over it"
            )
    return layers, replicated


def _short(name: str) -> str:
    return ".".join(name.split(".")[-3:-1])


def _shared(lengths: Any) -> int:
    found = 0
    for length in lengths:
        found = torch.tensor(found).gcd(torch.tensor(length)).item()
    return int(found)


def _parts(product: Product, length: int) -> tuple[int, ...]:
    """Return the lengths of the parts of a weight: one, unless all of it is split."""
    ranges = sorted(product.parts)
    if not ranges or ranges[0][0] or ranges[-1][1] != length or any(a[1] != b[0] for a, b in pairwise(ranges)):
        return (length,)
    return tuple(stop - start for start, stop in ranges)
