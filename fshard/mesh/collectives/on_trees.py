"""Call a collective on a tree: group the leaves that share a buffer, then run it now or start it.

psum({"a": f32, "b": bf16, "c": f32}, "data") -> two collectives: a and c in one buffer, b in another
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Literal, ParamSpec, Protocol

from torch import Tensor
from torch.nn import Parameter

from fshard.errors import LayoutError
from fshard.mesh.collectives.autograd import (
    Bound,
    LinearMap,
    Tensors,
    apply,
    apply_extreme,
    recorded,
    transformed,
)
from fshard.mesh.collectives.moves import Alone, Extreme, Move, Pvary
from fshard.mesh.layout import (
    Axes,
    PyTree,
    Structure,
    flatten,
    is_dense,
    no_dense,
    paths_of,
    unflatten,
)
from fshard.mesh.spmd.check_equal import Guard
from fshard.mesh.spmd.scope import Group, require
from fshard.source import Site, call_site
from fshard.uncompiled import uncompiled

Params = ParamSpec("Params")


@dataclass
class Handle:
    """A collective in progress. `wait` returns its result; other work can run until then.

    The arguments must not be modified before `wait`, and every handle must be waited for, in any order.
    """

    _finish: Callable[[], PyTree] | None
    _result: PyTree = None

    def wait(self) -> PyTree:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


@dataclass(slots=True)
class LeafBatch:
    """Leaves that share one collective, and their indices among all leaves; `linear` is None for the identity."""

    linear: LinearMap | None
    xs: Tensors
    indices: Sequence[int]


@dataclass(slots=True)
class CollectiveCall:
    """The plan of one call of a collective; `structure` is None for a single tensor.

    `guard` checks the result (or the argument) for equality; `after` maps each result.
    """

    batches: Sequence[LeafBatch]
    structure: Structure | None
    guard: Guard | Bound | None = None
    after: Callable[[Tensor], Tensor] | None = None

    def run(self) -> PyTree:
        """Run the collective of each batch, and check what must be equal."""
        results: list[Tensors] = []
        for batch in self.batches:
            linear, guard, xs = batch.linear, self.guard, batch.xs
            if isinstance(guard, Guard) and guard.forward:
                xs, guard = apply(guard, xs), None
            if isinstance(linear, Bound) and type(linear.move) is Extreme:
                xs = apply_extreme(linear, xs)
            elif linear is not None:
                xs = apply(linear, xs) if transformed() or recorded(xs) else linear.run(xs)
            results.append(xs if guard is None else apply(guard, xs))
        return self.assembled(results)

    def start(self) -> Handle:
        """Start the collectives of tensors whose derivative nothing needs; run others now."""
        bounds = [batch.linear for batch in self.batches if isinstance(batch.linear, Bound)]
        is_plain = not transformed() and not any(recorded(batch.xs) for batch in self.batches)
        if (
            not is_plain
            or len(bounds) < len(self.batches)
            or any(isinstance(bound.move, Alone) for bound in bounds)
        ):
            result = self.run()
            return Handle(lambda: result)
        pending = [bound.start(batch.xs) for bound, batch in zip(bounds, self.batches, strict=True)]
        for batch in self.batches:
            batch.xs = ()  # the operation keeps what it still needs
        return Handle(lambda: self.assembled([operation.wait() for operation in pending]))

    def assembled(self, results: list[Tensors]) -> PyTree:
        """Return the tree of results from those of each batch."""
        if self.after is not None:
            results = [tuple([self.after(y) for y in ys]) for ys in results]
        if self.structure is None:
            return results[0][0]
        leaves: dict[int, Tensor] = {}
        for batch, ys in zip(self.batches, results, strict=True):
            leaves.update(zip(batch.indices, ys, strict=True))
        return unflatten(self.structure, [leaves[index] for index in range(len(leaves))])


class Collective(Protocol[Params]):
    """A collective: a function whose `start` begins it and returns a `Handle` to wait for."""

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> PyTree: ...
    def start(self, *args: Params.args, **kwargs: Params.kwargs) -> Handle: ...


def collective(plan: Callable[Params, CollectiveCall]) -> Collective[Params]:
    """Turn the plan of a collective into the function that runs it, and whose `start` starts it."""

    @uncompiled
    def run(*args: Params.args, **kwargs: Params.kwargs) -> PyTree:
        return _plan_call(plan, args, kwargs).run()

    @uncompiled
    def start(*args: Params.args, **kwargs: Params.kwargs) -> Handle:
        return _plan_call(plan, args, kwargs).start()

    function: Any = update_wrapper(run, plan)
    started: Any = update_wrapper(start, plan)
    signature = inspect.signature(plan)
    function.__signature__ = signature.replace(return_annotation=PyTree)
    started.__signature__ = signature.replace(return_annotation=Handle)
    function.start = started
    return function


_HINTS = {
    "axis": "The mesh axis is `axis`, a tensor dim is `dim`.",
    "axis_name": "The mesh axis is `axis`.",
    "axis_index_groups": "Groups are axes of the mesh: give it several.",
    "group": "The group is given by `axis`.",
    "tiled": "Results are always tiled: shards are concatenated along `dim`.",
    "scatter_dimension": "The tensor dim is `dim`.",
    "scatter_dim": "The tensor dim is `dim`.",
    "gather_dim": "The tensor dim is `dim`.",
    "split_axis": "The tensor dim to split is `split_dim`.",
    "concat_axis": "The tensor dim to concatenate along is `concat_dim`.",
    "pairs": "The (source, destination) pairs are `perm`.",
    "src": "The device that sends is `source`.",
    "dst": "The device that receives is `to`.",
}
"""Keywords of JAX's and torch's collectives, and their names here."""


def _plan_call(
    plan: Callable[..., CollectiveCall], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> CollectiveCall:
    """Plan a call; for arguments that do not fit the signature, raise with hints for keywords of other libraries."""
    try:
        return plan(*args, **kwargs)
    except TypeError:
        signature = inspect.signature(plan)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            hints = [_HINTS[key] for key in kwargs if key in _HINTS]
            names = ", ".join(signature.parameters)
            raise TypeError(" ".join([f"fs.{plan.__name__}({names}): {error}.", *hints])) from None
        raise


def call(
    caller: str,
    tree: PyTree,
    axis: Axes,
    move: Callable[[Tensor, Group], Move],
    *,
    before: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[Tensor, Group], Tensor] | None = None,
    equal: Literal["argument", "result", None] = None,
) -> CollectiveCall:
    """Plan a collective on a tree; `before` maps (or rejects) each leaf, `after` each result.

    `equal`: what must be equal on all devices, the argument's value or the result's gradient. Along axes where every
    value is varying (`Scope.own`) nothing must be; the result is then converted as by `pvary`.
    """
    scope = require(caller)
    group, site = scope.called_group(axis, caller), call_site()
    user_call = scope.user_call(caller)
    leaves, structure = tensors_of(caller, tree)
    guard: Guard | Bound | None = None
    if equal is not None and not scope.own.isdisjoint(group.axes):
        varying = tuple(axis for axis in group.axes if axis in scope.own)
        checked_axes = tuple(axis for axis in group.axes if axis not in scope.own)
        if equal == "result":
            guard = Bound(Pvary(), scope.group(varying, caller), site)
        elif checked_axes:
            group = scope.group(checked_axes, caller)
        else:
            return CollectiveCall((LeafBatch(None, tuple(leaves), range(len(leaves))),), structure)
    elif equal is not None and scope.checked and scope.world.has_values:
        guard = Guard(
            group,
            site,
            _ERROR_TEXTS[equal].replace("{what}", caller),
            forward=equal == "argument",
            is_of_loop=user_call is not None,
        )

    xs, moves = list[Tensor](), list[Move]()
    for leaf in leaves:
        try:
            xs.append(leaf if before is None else before(leaf))
            moves.append(move(xs[-1], group))
        except (TypeError, ValueError) as error:
            path = "" if structure is None else f"leaf {paths_of(structure)[len(moves)]}: "
            raise type(error)(f"{caller}: {path}{error}") from None
    last = None if after is None else lambda y: after(y, group)
    if structure is None:
        return CollectiveCall(
            (LeafBatch(Bound(moves[0], group, site, user_call=user_call), tuple(xs), (0,)),),
            None,
            guard,
            last,
        )
    batches = [
        LeafBatch(Bound(moves[indices[0]], group, site, user_call=user_call), leaves, indices)
        for indices, leaves, site in batched(xs, moves, structure, site)
    ]
    return CollectiveCall(batches, structure, guard, last)


_ERROR_TEXTS = {
    "argument": "the argument of {what} over {axes} must be equal on all devices; use psum or all_gather to make it so",
    "result": "the result of {what} over {axes} is equal on all devices, so its gradient must be; but it was used with "
    "each device's own data. Put fs.pvary(x, {axes}) around the result where that use begins",
}


def batched(
    xs: Sequence[Tensor], kinds: Sequence[object], structure: Structure | None, site: Site
) -> Iterator[tuple[list[int], Tensors, Site]]:
    """Group leaves of one dtype, kind and type of device: yield their indices, the tensors, and the site with their paths."""
    groups: dict[object, list[int]] = {}  # (4)
    for index, (x, kind) in enumerate(zip(xs, kinds, strict=True)):
        groups.setdefault((x.dtype, x.device.type, kind), []).append(index)
    paths = None if structure is None else paths_of(structure)
    for indices in groups.values():
        leaves = () if paths is None else tuple([paths[index] for index in indices])
        yield indices, tuple([xs[index] for index in indices]), site._replace(leaves=leaves)


def tensors_of(caller: str, tree: PyTree) -> tuple[list[Tensor], Structure | None]:
    """Return the leaves of a tree, as plain tensors, and its structure, or raise for the first leaf that is no dense one."""
    if type(tree) is Tensor and is_dense(tree):
        return [tree], None
    leaves, structure = ([tree], None) if isinstance(tree, Tensor) else flatten(tree)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and is_dense(leaf):
            continue
        path = "" if structure is None else paths_of(structure)[index]
        name = f"leaf {path}" if path else "the argument"
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{caller} takes tensors; {name} is {type(leaf).__name__}. Write torch.tensor(...) around numbers, and x.local "
                "for the local shard of a Sharded."
            )
        raise LayoutError(f"{caller} takes tensors; {name} is {no_dense(leaf)}.")
    plain = (Tensor, Parameter)  # not subclasses, such as lazy parameters
    return [leaf if type(leaf) in plain else leaf.view_as(leaf) for leaf in leaves], structure
