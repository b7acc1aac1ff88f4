"""Parallel trees: the parameters, and other trees of the same structure.

Gradients, updates and state are paired with the parameters leaf by leaf; a `Sharded` is one leaf
and None another (an unused parameter has no gradient). Then each leaf is mapped over its shards,
which are plain tensors.

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
        "this optimizer must not be called within a transform of torch.func, such as vjp: it "
        "writes "
        "in place, which no transform sees. Write its update as a pure function: "
        'fs.optim.Optimizer(init, update, sharding="flat").'
    )


def undifferentiable(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Hide a function, part of which writes in place, from autograd.

    Raise within a transform of torch.func.
    """
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
        """Return a tree of this structure with f of each leaf and those paired with it.

        Ties stay ties.
        """
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
                f"{name} must be a tree of the structure of params, {self.structure}; got "
                f"{structure}. Give one leaf for each parameter; None where there is none."
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
            is_like = param is not None and param.ndim and param.shape == leaf.shape
            if any_shape and not is_like:
                continue
            path = self.paths[i]
            raise LayoutError(
                f"{name}{path} must have the layout of params{path}, {kind_of(param)}, or be None; "
                f"got {kind_of(leaf)}. "
                "Reshard gradients, fs.reshard(grads, layout), and a state as its optimizer would "
                "make it: "
                "fs.device_put(state, fs.mesh.layouts(opt.init(params)))."
            )
        return leaves

    def chosen(self, prefix: PyTree) -> list[Any]:
        """Return the value for each leaf but None.

        Of a prefix tree, or a function of path and leaf.
        """
        if callable(prefix):
            pairs = zip(self.paths, self.leaves, strict=True)
            return [None if leaf is None else prefix(path, leaf) for path, leaf in pairs]
        try:
            return broadcast_prefix(prefix, self.rebuild(self.leaves), none_is_leaf=True)
        except ValueError:
            raise OptimizerError(
                f"labels and masks must be a prefix of the tree {self.structure}; got {prefix!r}. "
                "Give one value, a tree of values that ends where the parameters end or before, or "
                "a function of (path, leaf)."
            ) from None


# -- static leaves ---------------------------------------------------------------------------------


def is_static(leaf: Any) -> bool:
    """Return True for a string, number, function or dtype in a tree of parameters.

    It is passed through.

    >>> [is_static(x) for x in ("relu", 0.5, torch.relu, torch.float32, torch.ones(1), None)]
    [True, True, True, True, False, False]
    """
    if isinstance(leaf, Tensor | Sharded | Module) or leaf is None:
        return False
    is_value = isinstance(leaf, str | int | float | complex | torch.dtype | torch.device)
    return is_value or callable(leaf)


_TENSORS = (Sharded, Tensor)  # a tuple: isinstance is faster than with a union


def _hidden(leaves: list[Leaf]) -> list[tuple[int, Any]]:
    """Replace static leaves by None; return them with their indices."""
    static: list[tuple[int, Any]] = []
    for index, x in enumerate(leaves):
        if not isinstance(x, _TENSORS) and is_static(x):
            static.append((index, x))
            leaves[index] = None
    return static


def without_static(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Return a tree with None in place of static leaves, and a function that puts them back.

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


# -- shards ----------------------------------------------------------------------------------------


def shards_of(leaf: Leaf) -> tuple[Tensor, ...]:
    """Return the tensors that a leaf is made of: none, itself, or its shards."""
    if leaf is None:
        return ()
    return leaf.shards if isinstance(leaf, Sharded) else (leaf,)


def like(leaf: Leaf, shards: Sequence[Tensor]) -> Leaf:
    """Return a leaf of new shards of the shapes of a leaf's own, with its layout."""
    if leaf is None:
        return None
    if isinstance(leaf, Sharded):
        return Sharded(leaf.shape, leaf.layout, tuple(shards))
    return shards[0]


def map_shards(f: Callable[..., Tensor], leaf: Leaf, *others: Leaf) -> Leaf:
    """Apply a function to each shard of a leaf, and to the shards of other leaves beside it."""
    columns = zip(shards_of(leaf), *map(shards_of, others), strict=True)
    return like(leaf, [f(*column) for column in columns])


def each_shard(f: Callable[[Tensor], Tensor], tree: PyTree) -> PyTree:
    """Apply a function to the shards of every leaf of a tree."""
    return Leaves.of(tree).mapped(lambda leaf: map_shards(f, leaf))


def each_list(f: Callable[[list[Tensor]], Sequence[Tensor]], tree: PyTree) -> PyTree:
    """Apply a function to the shards of every leaf of a tree, as one list for each device and dtype.

    So torch's kernels over lists launch once for all leaves. Ties stay ties.
    """
    leaves = Leaves.of(tree)
    shards: dict[int, Tensor] = {}
    for leaf in leaves.leaves:
        for shard in shards_of(leaf):
            shards[id(shard)] = shard

    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for shard in shards.values():
        lists.setdefault((shard.device, shard.dtype), []).append(shard)
    results: dict[int, Tensor] = {}
    for xs in lists.values():
        for x, result in zip(xs, f(xs), strict=True):
            results[id(x)] = result
    return leaves.mapped(lambda leaf: map_shards(lambda shard: results[id(shard)], leaf))


def state_leaf(param: Leaf, make: Callable[[Tensor], Tensor | None]) -> Leaf:
    """Make a leaf of state: `make` of each shard of a parameter; None if there is no such state."""
    if not isinstance(param, Sharded):
        return make(param)
    state: list[Tensor | None] = []
    is_stored_here = False
    for shard, device in zip(param.shards, local_devices(param.mesh), strict=True):
        has_any = param.layout.has_any(device)
        state.append(make(shard) if has_any else None)
        is_stored_here |= has_any
    if not is_stored_here:  # other processes own it: shapes will do
        state.append(make(shape_of_shard(param)))
    return assembled_state(param, state)


def shape_of_shard(param: Sharded) -> Tensor:
    """Return a meta tensor of the shape of a parameter's first shard, of any process."""
    shape = param.layout.local_shape(param.shape, holders(param.layout)[0])
    return torch.empty(shape, dtype=param.dtype, device="meta")


def assembled_state(param: Sharded, shards: Sequence[Tensor | None]) -> Leaf:
    """Assemble the state that devices have beside their shards of a parameter.

    None where they have none of it.

    State of the shape of the shards has the layout of the parameter; all other, such as numbers, is
    unsharded on the devices that store any of the parameter. One more than there are local devices
    is that of `shape_of_shard`.
    """
    example = next((x for x in shards if x is not None), None)
    if example is None:
        return None
    layout, shape = param.layout, param.shape
    devices = local_devices(param.mesh)
    for x, device in zip(shards, (*devices, holders(layout)[0]), strict=False):
        if x is not None and tuple(x.shape) != layout.local_shape(shape, device):
            shape = tuple(example.shape)
            layout = layout.with_spec(P(at=dict(layout.spec.at)))
            break

    stored: list[Tensor] = []
    for x, device, param_shard in zip(shards, devices, param.shards, strict=False):
        if x is None:
            local_shape = layout.local_shape(shape, device)
            x = torch.empty(local_shape, dtype=example.dtype, device=param_shard.device)
        stored.append(x)
    return Sharded(shape, layout, tuple(stored))


def count_from_zero() -> Tensor:
    """Return a count, on the host: to read it never waits for a device."""
    return torch.zeros((), dtype=torch.int64)


# -- properties ------------------------------------------------------------------------------------


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
    if leaf is None:
        return False
    is_number = leaf.dtype.is_floating_point or leaf.dtype.is_complex
    return is_number and not is_frozen(leaf)


def firsts_of(leaves: Sequence[Leaf]) -> list[int]:
    """Return for each leaf the index of the first leaf with the same tensors.

    >>> x = torch.ones(2)
    >>> firsts_of([x, torch.ones(2), x])
    [0, 1, 0]
    """
    # Leaves with different first tensors differ: a quick answer in most steps.
    first_tensors = {id(leaf.shards[0] if isinstance(leaf, Sharded) else leaf) for leaf in leaves}
    if len(first_tensors) == len(leaves):
        return list(range(len(leaves)))
    index_of: dict[tuple[int, ...], int] = {}
    firsts: list[int] = []
    for i, leaf in enumerate(leaves):
        firsts.append(i if leaf is None else index_of.setdefault(key_of(leaf), i))
    return firsts


def alike(x: Leaf, y: Leaf) -> bool:
    """Return True if two leaves have equal shapes and layouts.

    The shape that a spec was written for does not count.
    """
    if isinstance(x, Sharded) and isinstance(y, Sharded):
        if x.shape != y.shape:
            return False
        a, b = x.layout, y.layout
        return a is b or (a.mesh == b.mesh and a.spec.shapeless == b.spec.shapeless)
    return isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape


def kind_of(leaf: Leaf) -> str:
    """Return a description of a leaf."""
    if leaf is None:
        return "None"
    if isinstance(leaf, Sharded):
        return repr(leaf)
    return f"a {type(leaf).__name__} of shape {tuple(leaf.shape)}"


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
    """Raise unless every trainable parameter is unsharded on its devices, and supported.

    `unsupported` returns reasons.
    """
    sharded: list[str] = []
    reasons: list[str] = []
    for path, leaf in zip(params.paths, params.leaves, strict=True):
        if not trainable(leaf):
            continue
        name = f"params{path}" if path else "the leaf"
        if not is_unsharded(leaf):
            sharded.append(f"\n  {name} is {leaf!r}")
        reason = unsupported(leaf)
        if reason is not None:
            reasons.append(f"\n  {name}: {reason}")
    if sharded:
        raise LayoutError(
            f"{caller} needs full matrices, but these parameters are sharded:{''.join(sharded)}\n"
            "Give each matrix to one device: "
            "fs.partition_optimizer(opt, mesh=..., axis=..., stage=...)."
        )
    if reasons:
        raise OptimizerError(
            f"{caller} is not for these parameters:{''.join(reasons)}\n"
            "Give them another optimizer: by_label({...}, labels)."
        )


def complex_is_unsupported(leaf: Leaf) -> str | None:
    """Return a reason if a parameter is complex."""
    return "it is complex" if leaf.dtype.is_complex else None
