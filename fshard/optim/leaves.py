"""Parallel trees: the parameters, and other trees of the same structure.

Gradients, updates and state are paired with the parameters leaf by leaf; a `Sharded` is one leaf and None another (an
unused parameter has no gradient). Then each leaf is mapped over its shards, which are plain tensors.

    params   {"w": Sharded(a, b), "bias": c}          a, b, c: tensors
    grads    {"w": None,          "bias": d}          so: nothing for a and b; d for c
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from fshard.errors import LayoutError, OptimizerError
from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout import (
    P,
    PyTree,
    Structure,
    broadcast_prefix,
    flatten,
    holders,
    paths_of,
    unflatten,
)
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.mesh.spmd.run import local_devices

Leaf = Any
"""A tensor, a `Sharded`, or None."""


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def differentiable(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Hide a pure function from autograd, but not from the transforms of torch.func."""
    unrecorded = torch.no_grad()(function)

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return (function if transformed() else unrecorded)(*args, **kwargs)

    return run


def raise_undifferentiable() -> NoReturn:
    """Raise where a transform of torch.func would see a part of an optimizer only."""
    raise OptimizerError(
        "this optimizer must not be called within a transform of torch.func, such as vjp: it writes in place, which no "
        "transform sees. Write its update as a pure function: fs.optim.Optimizer(init, update, elementwise=True)."
    )


def undifferentiable(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Hide a function, part of which writes in place, from autograd; raise within a transform of torch.func."""
    unrecorded = torch.no_grad()(function)

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if transformed():
            raise_undifferentiable()
        return unrecorded(*args, **kwargs)

    return run


@dataclass(frozen=True)
class Leaves:
    """The leaves of a tree, and how to rebuild it; static ones count as None, and are put back."""

    leaves: list[Leaf]
    structure: Structure
    static: Sequence[tuple[int, Any]] = ()

    @staticmethod
    def of(tree: PyTree) -> Leaves:
        """Take a tree apart."""
        leaves, structure = flatten(tree, none_is_leaf=True)
        return Leaves(leaves, structure, _hidden(leaves))

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each leaf as an expression: `["blocks"][0]["w"]`."""
        return paths_of(self.structure)

    @cached_property
    def firsts(self) -> list[int]:
        """For each leaf the index of the first equal one: ties are one parameter."""
        return firsts_of(self.leaves)

    def rebuild(self, leaves: Sequence[Leaf]) -> PyTree:
        """Put a tree of this structure together from other leaves."""
        if self.static:
            leaves = [*leaves]
            for index, x in self.static:
                leaves[index] = x
        return unflatten(self.structure, leaves)

    def mapped(self, f: Callable[..., Leaf], *columns: list[Leaf]) -> PyTree:
        """Return a tree of this structure with f of each leaf and those paired with it; ties stay ties."""
        results: dict[object, Leaf] = {}
        keys: list[object] = []
        for column in zip(self.leaves, *columns, strict=True):
            keys.append(key := tuple(map(key_of, column)))
            if key not in results:
                results[key] = f(*column)
        return self.rebuild([results[key] for key in keys])

    def beside(self, tree: PyTree, name: str) -> list[Leaf]:
        """Return the leaves of another tree, which must have this structure."""
        leaves, structure = flatten(tree, none_is_leaf=True)
        if structure != self.structure:
            raise OptimizerError(
                f"{name} must be a tree of the structure of params, {self.structure}; got {structure}. Give one leaf for "
                "each parameter; None where there is none."
            )
        _hidden(leaves)
        return leaves

    def gradients(
        self, tree: PyTree, name: str = "grads", *, any_shape: bool = False
    ) -> list[Leaf]:
        """Return the leaves of a tree that has for each parameter a tensor of its layout, or None.

        With `any_shape`, tensors of another shape than the parameter's may have other layouts.
        """
        leaves = self.beside(tree, name)
        for i, (param, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            if leaf is None or alike(param, leaf):
                continue
            if any_shape and (param is None or not param.ndim or param.shape != leaf.shape):
                continue
            path = self.paths[i]
            raise LayoutError(
                f"{name}{path} must have the layout of params{path}, {kind_of(param)}, or be None; got {kind_of(leaf)}. "
                "Reshard gradients, fs.reshard(grads, layout), and a state as its optimizer would make it: "
                "fs.device_put(state, fs.mesh.layouts(opt.init(params)))."
            )
        return leaves

    def chosen(self, prefix: PyTree) -> list[Any]:
        """Return the value of a prefix tree, or of a function of path and leaf, for each leaf but None."""
        if callable(prefix):
            pairs = zip(self.paths, self.leaves, strict=True)
            return [None if leaf is None else prefix(path, leaf) for path, leaf in pairs]
        try:
            return broadcast_prefix(prefix, self.rebuild(self.leaves), none_is_leaf=True)
        except ValueError:
            raise OptimizerError(
                f"labels and masks must be a prefix of the tree {self.structure}; got {prefix!r}. Give one value, a tree of "
                "values that ends where the parameters end or before, or a function of (path, leaf)."
            ) from None


# -- static leaves -----------------------------------------------------------------------------------------------------


def is_static(leaf: Any) -> bool:
    """Return True for a string, number, function or dtype in a tree of parameters: it is passed through.

    >>> [is_static(x) for x in ("relu", 0.5, torch.relu, torch.float32, torch.ones(1), None)]
    [True, True, True, True, False, False]
    """
    if isinstance(leaf, Tensor | Sharded | Module) or leaf is None:
        return False
    return isinstance(leaf, str | int | float | complex | torch.dtype | torch.device) or callable(
        leaf
    )


_TENSORS = (Sharded, Tensor)  # a tuple: isinstance is faster than with a union


def _hidden(leaves: list[Leaf]) -> list[tuple[int, Any]]:
    """Replace static leaves by None; return them with their indices."""
    static = [
        (index, x) for index, x in enumerate(leaves) if not isinstance(x, _TENSORS) and is_static(x)
    ]
    for index, _ in static:
        leaves[index] = None
    return static


def without_static(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Return a tree with None in place of static leaves, and the function that puts them into such a tree again.

    >>> hidden, restore = without_static({"w": torch.ones(1), "act": "relu"})
    >>> hidden, restore({"w": 1, "act": None})
    ({'w': tensor([1.]), 'act': None}, {'w': 1, 'act': 'relu'})
    """
    leaves = Leaves.of(tree)
    if not leaves.static:
        return tree, lambda result: result

    def restore(result: PyTree) -> PyTree:
        return leaves.rebuild(flatten(result, none_is_leaf=True)[0])

    return unflatten(leaves.structure, leaves.leaves), restore


# -- shards ------------------------------------------------------------------------------------------------------------


def shards_of(leaf: Leaf) -> tuple[Tensor, ...]:
    """Return the tensors that a leaf is made of: none, itself, or its shards."""
    if leaf is None:
        return ()
    return leaf.shards if isinstance(leaf, Sharded) else (leaf,)


def like(leaf: Leaf, shards: Sequence[Tensor]) -> Leaf:
    """Return a leaf of new shards of the shapes of a leaf's own, with its layout."""
    if leaf is None:
        return None
    return (
        Sharded(leaf.shape, leaf.layout, tuple(shards)) if isinstance(leaf, Sharded) else shards[0]
    )


def map_shards(f: Callable[..., Tensor], leaf: Leaf, *others: Leaf) -> Leaf:
    """Apply a function to each shard of a leaf, and to the shards that other leaves have beside it."""
    return like(
        leaf, [f(*column) for column in zip(shards_of(leaf), *map(shards_of, others), strict=True)]
    )


def each_shard(f: Callable[[Tensor], Tensor], tree: PyTree) -> PyTree:
    """Apply a function to the shards of every leaf of a tree."""
    return Leaves.of(tree).mapped(lambda leaf: map_shards(f, leaf))


def state_leaf(param: Leaf, make: Callable[[Tensor], Tensor | None]) -> Leaf:
    """Make a leaf of state: `make` of each shard of a parameter; None if there is no such state."""
    if not isinstance(param, Sharded):
        return make(param)
    has_any = [param.layout.has_any(device) for device in local_devices(param.mesh)]
    state = [make(shard) if has else None for shard, has in zip(param.shards, has_any, strict=True)]
    if not any(has_any):  # other processes own it: shapes will do
        state.append(make(shape_of_shard(param)))
    return assembled_state(param, state)


def shape_of_shard(param: Sharded) -> Tensor:
    """Return a meta tensor of the shape of a parameter's first shard, which another process may have."""
    shape = param.layout.local_shape(param.shape, holders(param.layout)[0])
    return torch.empty(shape, dtype=param.dtype, device="meta")


def assembled_state(param: Sharded, shards: Sequence[Tensor | None]) -> Leaf:
    """Assemble the state that devices have beside their shards of a parameter; None where they have none of it.

    State of the shape of the shards has the layout of the parameter; all other, such as numbers, is unsharded on the
    devices that store any of the parameter. One more than there are local devices is that of `shape_of_shard`.
    """
    example = next((x for x in shards if x is not None), None)
    if example is None:
        return None
    layout, shape, devices = param.layout, param.shape, local_devices(param.mesh)
    pairs = zip(shards, (*devices, holders(layout)[0]), strict=False)
    if any(
        x is not None and tuple(x.shape) != layout.local_shape(shape, device) for x, device in pairs
    ):
        shape, layout = tuple(example.shape), layout.with_spec(P(at=dict(layout.spec.at)))

    def empty(device: int, param_shard: Tensor) -> Tensor:
        return torch.empty(
            layout.local_shape(shape, device), dtype=example.dtype, device=param_shard.device
        )

    columns = zip(shards, devices, param.shards, strict=False)
    return Sharded(
        shape, layout, tuple([empty(device, p) if x is None else x for x, device, p in columns])
    )


def count_from_zero() -> Tensor:
    """Return a count, on the host: to read it never waits for a device."""
    return torch.zeros((), dtype=torch.int64)


# -- properties --------------------------------------------------------------------------------------------------------


def is_frozen(leaf: Leaf) -> bool:
    """Return True if a leaf is frozen: by its layout, or as a Parameter that does not require grad.

    >>> is_frozen(torch.ones(1)), is_frozen(torch.nn.Parameter(torch.ones(1), requires_grad=False))
    (False, True)
    """
    if isinstance(leaf, Sharded):
        return leaf.layout.frozen
    return isinstance(leaf, Parameter) and not leaf.requires_grad


def trainable(leaf: Leaf) -> bool:
    """Return True if a leaf can be trained: floating or complex, and not frozen."""
    return (
        leaf is not None
        and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
        and not is_frozen(leaf)
    )


def firsts_of(leaves: Sequence[Leaf]) -> list[int]:
    """Return for each leaf the index of the first leaf with the same tensors.

    >>> x = torch.ones(2)
    >>> firsts_of([x, torch.ones(2), x])
    [0, 1, 0]
    """
    if len({id(leaf.shards[0] if isinstance(leaf, Sharded) else leaf) for leaf in leaves}) == len(
        leaves
    ):
        return list(range(len(leaves)))  # leaves with different first tensors differ
    seen: dict[tuple[int, ...], int] = {}
    return [
        i if leaf is None else seen.setdefault(key_of(leaf), i) for i, leaf in enumerate(leaves)
    ]


def alike(x: Leaf, y: Leaf) -> bool:
    """Return True if two leaves have equal shapes and layouts; the shape that a spec was written for does not count."""
    if isinstance(x, Sharded) and isinstance(y, Sharded):
        a, b = x.layout, y.layout
        return x.shape == y.shape and (
            a is b or (a.mesh == b.mesh and a.spec.shapeless == b.spec.shapeless)
        )
    return isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape


def kind_of(leaf: Leaf) -> str:
    """Return a description of a leaf."""
    if leaf is None:
        return "None"
    return (
        repr(leaf)
        if isinstance(leaf, Sharded)
        else f"a {type(leaf).__name__} of shape {tuple(leaf.shape)}"
    )


def is_unsharded(leaf: Leaf) -> bool:
    """Return True if every device that stores any of a leaf stores all of it, in its shape."""
    if not isinstance(leaf, Sharded):
        return True
    if leaf.spec.flat_axes is not None and len(leaf.shape) != 1:
        return False  # a row of numbers, if over one device too
    return all(leaf.mesh.shape[axis] == 1 for axis in (*leaf.spec.split_axes, *leaf.spec.unreduced))


def check_unsharded(
    caller: str, params: Leaves, unsupported: Callable[[Leaf], str | None] = lambda leaf: None
) -> None:
    """Raise unless every trainable parameter is unsharded on its devices, and supported; `unsupported` returns reasons."""
    pairs = [
        (path or "the leaf", x)
        for path, x in zip(params.paths, params.leaves, strict=True)
        if trainable(x)
    ]
    if sharded := [
        f"\n  params{path} is {leaf!r}" for path, leaf in pairs if not is_unsharded(leaf)
    ]:
        raise LayoutError(
            f"{caller} needs full matrices, but these parameters are sharded:{''.join(sharded)}\n"
            "Give each matrix to one device: fs.partition_optimizer(opt, mesh=..., axis=..., stage=...)."
        )
    if reasons := [
        f"\n  params{path}: {reason}" for path, leaf in pairs if (reason := unsupported(leaf))
    ]:
        raise OptimizerError(
            f"{caller} is not for these parameters:{''.join(reasons)}\nGive them another optimizer: by_label({{...}}, labels)."
        )


def complex_is_unsupported(leaf: Leaf) -> str | None:
    """Return a reason if a parameter is complex."""
    return "it is complex" if leaf.dtype.is_complex else None
