"""Follow dims through a model: which linear layer produces the dim that another one sums over.

The model runs once, on arrays that nothing shards. The rule of each operation names which dims of
its results are dims of its inputs. So each dim carries the weights that produced it, through views,
attention and elementwise operations, until an operation needs all of it:

    h = up(x)                  the last dim of h has the origin {up.weight}
    h = gelu(h)                of the same label, so the origin is carried on
    y = down(h)                down.weight sums over it: the pair (up, down); y has {down.weight}
    y.softmax(-1)              needs all that down.weight produces
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.array.algebra import PRODUCTS
from fshard.array.dispatch import APPLY, function_frame, operate
from fshard.array.mode import observed_by
from fshard.array.modules import shard_module
from fshard.array.rules import Rule, arrays_in, describe
from fshard.errors import LayoutError
from fshard.mesh.layout import Layout, Mesh, flatten, unflatten
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import spread
from fshard.pipeline.split.valueless import ValuelessMode
from fshard.randomness import keyed_random
from fshard.source import call_site, locate
from fshard.tensor.joined import ranges_of
from fshard.tensor.unsharded import run_operation, run_unsharded
from fshard.transforms.module.lazy import without_memory

USE_MODULE = (
    "Call what arrays lack in a small module of its own, which then runs on unsharded tensors."
)
EXPERTS = "each device has experts of its own, and gets all tokens"
_NO_GRAD = "does not require grad"
"""A part of torch's error of a forward that differentiates, and finds no graph."""
_tensor: Any = Tensor
_IS_META = _tensor.is_meta.__get__
_PRODUCT_NAMES = frozenset(name for names in PRODUCTS for name in names.split())


class DimRange(NamedTuple):
    """A range of the dim that a weight produces; `stop` is None for all of it.

    `weight` is a key of `Products`.
    """

    weight: str
    start: int = 0
    stop: int | None = None


Origin = frozenset[DimRange]
NOTHING: Origin = frozenset()


@dataclass
class Product:
    """A weight that is multiplied: a linear layer, or an embedding.

    Args:
        weight: the name of the parameter.
        kind: "linear", or "embedding" for a table that is looked up.
        out: the dim of the weight that the result has.
        summed: the dim of the weight that is summed over, or looked up.
        inputs: the ranges that reach it, in each use.
        needed: operations that need all of the dim that it produces.
        length: the largest number of devices that can share what it produces.
        parts: the ranges that its result is split into, if the weight is fused.
        is_output: it produces a dim of the model's output.
        is_looked_up: a table, at indices that are inputs of the model or computed from them: no
            table of positions.
        bias: the parameter that is added to its result.
    """

    weight: str
    kind: str
    out: int
    summed: int
    inputs: list[Origin] = field(default_factory=list[Origin])
    needed: list[str] = field(default_factory=list[str])
    length: int = 0
    parts: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    is_output: bool = False
    is_looked_up: bool = False
    bias: str | None = None


Products = dict[str, Product]
"""By the name of their weight. A tied weight, which is a table and a linear layer, is two products:
the one that is used later has the key "name (linear)" or "name (embedding)"."""


def follow(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], experts: Collection[str] = ()
) -> tuple[Products, dict[str, str], dict[str, str]]:
    """Run a model on a sample; return its products, and what runs unsharded, with the reason.

    What runs unsharded is found by running the model again after each error. These are modules, by
    their path: the innermost one around the operation that raised. If that is the model itself, of
    path "", it gets integers as plain tensors. If a module raises that runs so already, the
    operations in its own forward run unsharded, by their name.

    The layers of `experts` are not run: they return their first argument.
    """
    unsharded = dict.fromkeys(experts, EXPERTS)
    operations: dict[str, str] | None = None  # none may, before all else has been tried
    records_grad = False
    while True:
        # In training mode too, where other modules may have to run unsharded. The products are
        # those of the last copy, in evaluation mode.
        copies = [copy.deepcopy(model)]
        if model.training:
            copies.append(copy.deepcopy(model).eval())
        paths: dict[int, str] = {}
        for model_copy in copies:
            paths.update({id(module): path for path, module in model_copy.named_modules()})

        try:
            products: Products = {}
            with torch.set_grad_enabled(records_grad):
                for model_copy in copies:
                    products = _follow_copy(
                        model_copy, args, kwargs, list(unsharded), experts, operations
                    )
            return products, unsharded, operations or {}
        except Exception as error:
            if _NO_GRAD in str(error) and not records_grad:
                records_grad = True  # the model differentiates in its forward
                continue

            path, line = locate(error, paths, APPLY)
            if path not in unsharded:
                for inner in [name for name in unsharded if name.startswith(f"{path}.")]:
                    del unsharded[inner]  # it runs inside
                unsharded[path] = f"{line}: {_first_line(error)}"
            elif operations is None:
                operations = {}
            else:
                name = path or type(model).__name__
                error.add_note(f"{name} ({line}) cannot run on arrays. {USE_MODULE}")
                raise


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _follow_copy(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    unsharded: Sequence[str],
    experts: Collection[str],
    operations: dict[str, str] | None,
) -> Products:
    """Return the products of a copy of a model, in the order of their first use."""
    mesh = make_mesh({"followed": 1}, runtime="virtual")
    lazy_mode: Any = nullcontext()
    if without_memory(model):
        lazy_mode = _LazyMode(torch.device(mesh.device_type))
    with lazy_mode:
        sharded = shard_module(model, {}, mesh=mesh)
    layout = Layout(mesh)
    arrays: list[Any] = [*sharded.parameters(), *sharded.buffers()]
    for x in arrays:
        x.layout = layout  # one for all, so that operations of equal blocks are planned once

    names = {id(x): name for name, x in sharded.named_parameters()}
    observer = _DimFollower(names, operations)
    for path in unsharded:
        if path == "":
            continue  # the model itself only gets integers as plain tensors
        submodule = sharded.get_submodule(path)
        forward: Any = _copy_first if path in experts else submodule.forward
        submodule.forward = partial(observer.run_module, mesh, path, submodule, forward)

    def to_arrays(tree: Any) -> Any:
        leaves, structure = flatten(tree)
        for number, x in enumerate(leaves):
            if isinstance(x, Tensor) and ("" not in unsharded or x.is_floating_point()):
                leaves[number] = spread(x, Layout(mesh))
        observer.add_inputs(leaves)
        return unflatten(structure, leaves)

    with keyed_random(0), lazy_mode, observed_by(observer):
        output = sharded(*to_arrays(list(args)), **to_arrays(dict(kwargs)))
    observer.finish(output)
    return observer.products


def _copy_first(x: Tensor, *_: Any) -> Tensor:
    """Return a copy of the first argument, in place of the result of a layer of experts."""
    return x.clone()


class _LazyMode(ValuelessMode):
    """Lets lazy layers run on the mesh.

    Meta tensors claim to be on it, and only tensors that meet them lose their values.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(isinstance(x, Sharded) for x in arrays_in(args, kwargs)):
            with self:
                return operate(func, args, kwargs or {})
        if func == _IS_META:
            return False
        return super().__torch_function__(func, types, args, kwargs)


class _DimFollower:
    """Carries origins from the inputs of each operation to its results.

    Args:
        params: the names of parameters, by their id.
        operations: gets the operations that run unsharded, and why; None if none may.
    """

    def __init__(self, params: Mapping[int, str], operations: dict[str, str] | None) -> None:
        self.params = params
        self.operations = operations
        self.products: Products = {}
        # By the id of an array. They hold the arrays, since another one could get the id of one
        # that is freed.
        self._origins: dict[int, tuple[Sharded, list[Origin]]] = {}
        self._of_inputs: dict[int, Any] = {}  # inputs of the model, and what is computed from them

    def add_inputs(self, leaves: Sequence[Any]) -> None:
        """Add inputs of the model."""
        self._of_inputs.update({id(x): x for x in leaves})

    def __call__(
        self, call: Any, arrays: Sequence[Sharded], args: Any, results: Sequence[Sharded]
    ) -> None:
        """Carry the origins of an operation's inputs to its results."""
        _validate_no_function()
        op = call.operation
        input_origins = [self._origins_of(x) for x in arrays]
        carried = self._origins_by_label(op, arrays, input_origins)
        is_product = self._add_product(call.name, op, arrays, carried)

        for y, value in zip(results, op.outputs, strict=True):
            origins = [carried.get(label or "", NOTHING) for label in value.labels]
            self._origins[id(y)] = y, origins
            self._limit_lengths(y, origins)
        if any(id(x) in self._of_inputs for x in arrays):
            self.add_inputs(results)

        # A dim that no result has is needed, but the one that a product sums over is its input.
        output_labels = [label for value in op.outputs for label in value.labels]
        for value, origins in zip(op.inputs, input_origins, strict=True):
            for dim, (label, origin) in enumerate(zip(value.labels, origins, strict=True)):
                is_kept = label is not None and label in output_labels
                is_multiplied = is_product and label in op.summed
                if origin and not is_kept and not is_multiplied:
                    self._record_need(call, arrays, results, dim, origin)

    def _origins_of(self, x: Sharded) -> list[Origin]:
        """Return the origin of each dim of an array."""
        entry = self._origins.get(id(x))
        if entry is None:
            return [NOTHING] * x.ndim
        _, origins = entry
        return origins

    def _origins_by_label(
        self, op: Any, arrays: Sequence[Sharded], input_origins: Sequence[Sequence[Origin]]
    ) -> dict[str, Origin]:
        """Return the origins that reach each label of an operation, from all of its inputs."""
        carried: dict[str, Origin] = {}
        for x, value, origins in zip(arrays, op.inputs, input_origins, strict=True):
            if id(x) in self.params:
                continue
            for label, origin in zip(value.labels, origins, strict=True):
                if label is not None:
                    carried[label] = carried.get(label, NOTHING) | origin
        return carried

    def _limit_lengths(self, y: Sharded, origins: Sequence[Origin]) -> None:
        """Let no more devices share what weights produce than divide its dim of an array."""
        for length, origin in zip(y.shape, origins, strict=True):
            for dim_range in origin:
                product = self.products[dim_range.weight]
                product.length = gcd(product.length, length)

    def _add_product(
        self, name: str, op: Any, arrays: Sequence[Sharded], carried: dict[str, Origin]
    ) -> bool:
        """Record a product of a weight, which alone produces the dim of its result.

        Returns True if the operation is one: it has one weight of two dims, one of which the
        results have.
        """
        if name != "embedding" and name not in _PRODUCT_NAMES:
            return False
        params = [number for number, x in enumerate(arrays) if id(x) in self.params]
        weights = [number for number in params if arrays[number].ndim == 2]
        if len(weights) != 1:
            return False
        labels = op.inputs[weights[0]].labels
        output_labels = [label for value in op.outputs for label in value.labels]
        out_dims = [dim for dim, label in enumerate(labels) if label in output_labels]
        if len(out_dims) != 1:
            return False
        out = out_dims[0]
        summed = 1 - out

        weight = self.params[id(arrays[weights[0]])]
        kind = "embedding" if name == "embedding" else "linear"
        key = weight
        if weight in self.products and self.products[weight].kind != kind:
            key = f"{weight} ({kind})"  # a tied table is a linear layer too
        product = self.products.setdefault(key, Product(weight, kind, out, summed))
        if kind == "linear":
            product.inputs.append(carried.get(labels[summed] or "", NOTHING))
            biases = [number for number in params if arrays[number].ndim == 1]
            product.bias = self.params[id(arrays[biases[0]])] if biases else None
        elif any(id(x) in self._of_inputs for x in arrays):
            product.is_looked_up = True
        if labels[out] is not None:
            carried[labels[out]] = frozenset([DimRange(key)])
        return True

    def _record_need(
        self,
        call: Any,
        arrays: Sequence[Sharded],
        results: Sequence[Sharded],
        dim: int,
        origin: Origin,
    ) -> None:
        """Record an operation that needs all of a dim, unless it splits the dim into ranges."""
        ranges = None
        if call.is_view and len(arrays) == 1:
            views = [y.shards[0] for y in results]
            ranges = ranges_of(arrays[0].shards[0], views, dim)

        for dim_range in origin:
            product = self.products[dim_range.weight]
            is_range_already = dim_range.stop is not None
            if ranges is None or is_range_already:
                product.needed.append(call.name)
                continue
            for y, (start, stop) in zip(results, ranges, strict=True):
                product.parts.add((start, stop))
                _, origins = self._origins[id(y)]
                origins[dim] = origins[dim] | {DimRange(dim_range.weight, start, stop)}

    def run_module(
        self, mesh: Mesh, path: str, module: nn.Module, forward: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a module on unsharded tensors: an operation that needs all of each dim."""
        output = run_unsharded(mesh, module, forward, args, kwargs)
        self._record_unsharded(path, args, kwargs, output)
        return output

    def runs_unsharded(self, name: str, error: Exception) -> bool:
        """Record an operation without a rule, if it may run on unsharded tensors; return True."""
        if self.operations is None:
            return False
        why = f"{call_site()}: {_first_line(error)}"
        self.operations.setdefault(name, why)
        return True

    def run_operation(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on unsharded tensors: it needs all of each dim."""
        output = run_operation(func, args, kwargs)
        self._record_unsharded(name, args, kwargs, output)
        return output

    def _record_unsharded(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        arrays = [x for x in arrays_in(args, kwargs) if isinstance(x, Sharded)]
        results = [x for x in arrays_in(output) if isinstance(x, Sharded)]
        no_common_dim = describe(Rule("->"), arrays, results)
        call = SimpleNamespace(name=name, operation=no_common_dim, is_view=False)
        self(call, arrays, args, results)

    def finish(self, output: Any) -> None:
        """Record the products of the last dims that the model returns."""
        leaves, _ = flatten(dict(output) if isinstance(output, Mapping) else output)
        for y in leaves:
            if not isinstance(y, Sharded) or y.ndim == 0:
                continue
            for dim_range in self._origins_of(y)[-1]:
                self.products[dim_range.weight].is_output = True


def _validate_no_function() -> None:
    """Raise if a `torch.autograd.Function` calls."""
    frame = function_frame(sys._getframe())  # pyright: ignore[reportPrivateUsage]
    if frame is not None:
        title = frame.f_locals["cls"].__name__
        raise LayoutError(
            f"{title} is a torch.autograd.Function, whose backward arrays do not call."
        )
