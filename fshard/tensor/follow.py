"""Follow dims through a model: which linear layer produces the dim that another one sums over.

The model runs once, on arrays that nothing shards. The rule of each operation names which dims of its results are dims of its
inputs; so each dim carries the weights that produced it, through views, attention and elementwise operations, until an
operation needs all of it. A linear layer sums over the dim that reaches it, and produces a new one.
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


class DimRange(NamedTuple):
    """A range of the dim that a weight produces; `stop` is None for all of it."""

    weight: str
    start: int = 0
    stop: int | None = None


Origin = frozenset[DimRange]
NOTHING: Origin = frozenset()


@dataclass
class Product:
    """A weight that is multiplied: a linear layer, or an embedding.

    Args:
        kind: "linear", or "embedding" for a table that is looked up.
        out: the dim of the weight that the result has.
        summed: the dim of the weight that is summed over, or looked up.
        inputs: the ranges that reach it: in each use.
        needed: operations that need all of the dim that it produces.
        length: the largest number of devices that can share what it produces.
        parts: the ranges that its result is split into; of a fused weight.
        is_output: it produces a dim of the model's output.
        is_looked_up: a table, at indices that are inputs of the model or computed from them: no table of positions.
        bias: the parameter that is added to its result.
    """

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
"""By the name of their weight."""


def follow(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], experts: Collection[str] = ()
) -> tuple[Products, dict[str, str], dict[str, str]]:
    """Run a model on a sample; return its products by weight, and what runs unsharded, with the reason.

    That is modules by their path; and operations by their name, of the model's own forward. The model itself, of path
    "", gets integers as plain tensors. The layers of `experts` return their first argument.
    """
    unsharded = dict.fromkeys(experts, EXPERTS)
    operations: dict[str, str] | None = None  # none may, before all else has been tried
    records_grad = False
    while True:
        copies = [copy.deepcopy(model)]
        if model.training:
            copies.append(copy.deepcopy(model).eval())
        paths = {id(submodule): path for each in copies for path, submodule in each.named_modules()}
        try:
            with torch.set_grad_enabled(records_grad):
                followed = [
                    _follow(each, args, kwargs, [*unsharded], experts, operations)
                    for each in copies
                ]
            return followed[-1], unsharded, operations or {}
        except Exception as error:
            if _NO_GRAD in str(error) and not records_grad:
                records_grad = True  # the model differentiates in its forward
                continue
            path, line = locate(error, paths, APPLY)
            if path in unsharded and operations is None:
                operations = {}
                continue
            if path in unsharded:
                error.add_note(
                    f"{path or type(model).__name__} ({line}) cannot run on arrays. {USE_MODULE}"
                )
                raise
            for inner in [inner for inner in unsharded if inner.startswith(f"{path}.")]:
                del unsharded[inner]  # it runs inside
            unsharded[path] = f"{line}: {str(error).partition(chr(10))[0]}"


def _follow(
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
    for path in filter(None, unsharded):
        submodule = sharded.get_submodule(path)
        forward: Any = (lambda x, *_: x.clone()) if path in experts else submodule.forward
        submodule.forward = partial(observer.run_module, mesh, path, submodule, forward)

    def to_arrays(tree: Any) -> Any:
        leaves, structure = flatten(tree)
        is_array = [
            isinstance(x, Tensor) and ("" not in unsharded or x.is_floating_point()) for x in leaves
        ]
        pairs = zip(leaves, is_array, strict=True)
        arrays = [spread(x, Layout(mesh)) if yes else x for x, yes in pairs]
        observer.of_inputs.update((id(x), x) for x in arrays)
        return unflatten(structure, arrays)

    with keyed_random(0), lazy_mode, observed_by(observer):
        output = sharded(*to_arrays(list(args)), **to_arrays(dict(kwargs)))
    observer.finish(output)
    return observer.products


class _LazyMode(ValuelessMode):
    """Lets lazy layers run on the mesh: meta tensors claim to be on it, and only tensors that meet them lose their values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(isinstance(x, Sharded) for x in arrays_in(args, kwargs)):
            with self:
                return operate(func, args, kwargs or {})
        return False if func == _IS_META else super().__torch_function__(func, types, args, kwargs)


class _DimFollower:
    """Carries origins from the inputs of each operation to its results."""

    def __init__(self, params: Mapping[int, str], operations: dict[str, str] | None) -> None:
        self.params, self.operations = params, operations
        self.products: dict[str, Product] = {}
        self.origins: dict[
            int, tuple[Sharded, list[Origin]]
        ] = {}  # with the arrays, whose ids stay theirs
        self.of_inputs: dict[
            int, Any
        ] = {}  # the inputs of the model, and what is computed from them

    def __call__(
        self, call: Any, arrays: Sequence[Sharded], args: Any, results: Sequence[Sharded]
    ) -> None:
        _validate_no_function()
        op = call.operation
        input_origins = [self._origins(x) for x in arrays]
        carried: dict[str, Origin] = {}
        for x, value, origins in zip(arrays, op.inputs, input_origins, strict=True):
            if id(x) in self.params:
                continue
            for label, origin in zip(value.labels, origins, strict=True):
                if label is not None:
                    carried[label] = carried.get(label, NOTHING) | origin
        produced = self._product(call.name, op, arrays, carried)
        for y, value in zip(results, op.outputs, strict=True):
            self.origins[id(y)] = y, [carried.get(label or "", NOTHING) for label in value.labels]
            for length, origin in zip(y.shape, self._origins(y), strict=True):
                for dim_range in origin:
                    product = self.products[dim_range.weight]
                    product.length = gcd(product.length, length)  # the devices must divide it
        if any(id(x) in self.of_inputs for x in arrays):
            self.of_inputs.update((id(y), y) for y in results)
        for value, origins in zip(op.inputs, input_origins, strict=True):
            for dim, (label, origin) in enumerate(zip(value.labels, origins, strict=True)):
                is_record_need = label is None or not any(label in y.labels for y in op.outputs)
                if origin and is_record_need and not (label in op.summed and produced):
                    self._record_need(call, arrays, results, dim, origin)

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
        why = f"{call_site()}: {str(error).partition(chr(10))[0]}"
        self.operations.setdefault(name, why)
        return True

    def run_operation(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on unsharded tensors: it needs all of each dim."""
        output = run_operation(func, args, kwargs)
        self._record_unsharded(name, args, kwargs, output)
        return output

    def _record_unsharded(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        operands, outputs = arrays_in(args, kwargs), arrays_in(output)
        arrays = [x for x in operands if isinstance(x, Sharded)]
        results = [x for x in outputs if isinstance(x, Sharded)]
        operation = describe(Rule("->"), arrays, results)
        self(SimpleNamespace(name=name, operation=operation, is_view=False), arrays, args, results)

    def _origins(self, x: Sharded) -> list[Origin]:
        entry = self.origins.get(id(x))
        return [NOTHING] * x.ndim if entry is None else entry[1]

    def _product(
        self, name: str, op: Any, arrays: Sequence[Sharded], carried: dict[str, Origin]
    ) -> bool:
        """Note a product of a weight; that weight alone produces the dim of its result."""
        if name != "embedding" and name not in _NAMES:
            return False
        weights = [
            number for number, x in enumerate(arrays) if id(x) in self.params and x.ndim == 2
        ]
        if len(weights) != 1:
            return False
        labels = op.inputs[weights[0]].labels
        out_dims = [
            dim for dim, label in enumerate(labels) if any(label in y.labels for y in op.outputs)
        ]
        if len(out_dims) != 1:
            return False
        out, summed = out_dims[0], 1 - out_dims[0]
        weight = self.params[id(arrays[weights[0]])]
        kind = "embedding" if name == "embedding" else "linear"
        # A tied table is a linear layer too: what it produces counts there.
        key = (
            weight
            if weight not in self.products or self.products[weight].kind == kind
            else f"{weight} ({kind})"
        )
        product = self.products.setdefault(key, Product(kind, out, summed))
        if kind == "linear":
            product.inputs.append(carried.get(labels[summed] or "", NOTHING))
            biases = [self.params[id(x)] for x in arrays if id(x) in self.params and x.ndim == 1]
            product.bias = biases[0] if biases else None
        else:
            product.is_looked_up |= any(id(x) in self.of_inputs for x in arrays)
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
        """Note an operation that needs all of a dim; the ranges that a dim is split into carry on."""
        shards = [x.shards[0] for x in (*arrays, *results)]
        ranges = (
            ranges_of(shards[0], shards[1:], dim) if call.is_view and len(arrays) == 1 else None
        )
        for dim_range in origin:
            if ranges is None or dim_range.stop is not None:
                self.products[dim_range.weight].needed.append(call.name)
                continue
            for y, (start, stop) in zip(results, ranges, strict=True):
                self.products[dim_range.weight].parts.add((start, stop))
                origins = self.origins[id(y)][1]
                origins[dim] = origins[dim] | {DimRange(dim_range.weight, start, stop)}

    def finish(self, output: Any) -> None:
        """Note the products that the model returns."""
        leaves, _ = flatten(dict(output) if isinstance(output, Mapping) else output)
        for y in leaves:
            for dim_range in self._origins(y)[-1] if isinstance(y, Sharded) and y.ndim else NOTHING:
                self.products[dim_range.weight].is_output = True


_NAMES = frozenset(name for names in PRODUCTS for name in names.split())


def _validate_no_function() -> None:
    """Raise if a `torch.autograd.Function` calls."""
    frame = function_frame(sys._getframe())  # pyright: ignore[reportPrivateUsage]
    if frame is not None:
        title = frame.f_locals["cls"].__name__
        raise LayoutError(
            f"{title} is a torch.autograd.Function, whose backward arrays do not call."
        )
