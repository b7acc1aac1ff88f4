"""Call a collective on a tree: group the leaves that share a buffer, then run it now or start it.

    psum({"a": f32, "b": bf16, "c": f32}, "data")
        -> two collectives: a and c in one buffer, b in another

A function with `@collective` plans a call: it returns a `CollectiveCall`. The decorator makes of it
the function of `fshard` that runs the plan, and `start`, which begins it and returns a `Handle`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
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
from fshard.mesh.collectives.moves import Extreme, Move, Pvary, Wired
from fshard.mesh.layout import (
    Axes,
    PyTree,
    Structure,
    flatten,
    is_dense,
    no_dense,
    path_text,
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

    The arguments must not be modified before `wait`. Every handle must be waited for, in any order.
    """

    _finish: Callable[[], PyTree] | None
    _result: PyTree = None

    def wait(self) -> PyTree:
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None  # it may hold the arguments
        return self._result


@dataclass(slots=True)
class LeafBatch:
    """Leaves that share one collective, and their indices among all leaves of the tree.

    `linear` is the collective; None returns the leaves unchanged.
    """

    linear: LinearMap | None
    xs: Tensors
    indices: Sequence[int]


@dataclass(slots=True)
class CollectiveCall:
    """The plan of one call of a collective: what is applied to each batch of leaves, in this order.

    Args:
        on_arguments: a linear map before the collective: the check that arguments are equal.
        batches: the leaves, each with the collective.
        on_results: a linear map after it: the check that cotangents are equal, or a `Pvary`.
        finish: a function of each result.
        structure: of the tree; None for a single tensor.
    """

    batches: Sequence[LeafBatch]
    structure: Structure | None
    on_arguments: LinearMap | None = None
    on_results: LinearMap | None = None
    finish: Callable[[Tensor], Tensor] | None = None

    def run(self) -> PyTree:
        """Run the collective of each batch, and check what must be equal."""
        results: list[Tensors] = []
        for batch in self.batches:
            linear = batch.linear
            xs = batch.xs
            if self.on_arguments is not None:
                xs = apply(self.on_arguments, xs)

            if isinstance(linear, Bound) and type(linear.move) is Extreme:
                xs = apply_extreme(linear, xs)
            elif linear is not None:
                xs = apply(linear, xs)

            if self.on_results is not None:
                xs = apply(self.on_results, xs)
            results.append(xs)
        return self.assembled(results)

    def start(self) -> Handle:
        """Start the collectives of tensors whose derivative nothing needs; run others now.

        What is started skips the checks. One of arguments belongs to a move without communication,
        which is run; one of results compares cotangents, and there are none.
        """
        bounds = self._startable_bounds()
        if bounds is None:
            result = self.run()
            return Handle(lambda: result)

        pending = [bound.start(batch.xs) for bound, batch in zip(bounds, self.batches, strict=True)]
        for batch in self.batches:
            batch.xs = ()  # the operation holds what it still needs; this call lives until `wait`
        return Handle(lambda: self.assembled([operation.wait() for operation in pending]))

    def _startable_bounds(self) -> list[Bound] | None:
        """Return the collective of each batch; None if one must be run at once."""
        bounds: list[Bound] = []
        for batch in self.batches:
            linear = batch.linear
            if not isinstance(linear, Bound) or not isinstance(linear.move, Wired):
                return None
            if transformed() or recorded(batch.xs):
                return None
            bounds.append(linear)
        return bounds

    def assembled(self, results: list[Tensors]) -> PyTree:
        """Return the tree of results from those of each batch."""
        if self.finish is not None:
            results = [tuple([self.finish(y) for y in ys]) for ys in results]
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
        return _checked_plan(plan, args, kwargs).run()

    @uncompiled
    def start(*args: Params.args, **kwargs: Params.kwargs) -> Handle:
        return _checked_plan(plan, args, kwargs).start()

    # `help` shows what the plan takes, but not that it returns a plan.
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


def _checked_plan(
    plan: Callable[..., CollectiveCall],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> CollectiveCall:
    """Plan a call; if the arguments do not fit the signature, raise with a hint for each keyword.

    Arguments are bound to the signature after a TypeError only, so right calls do not wait for it.
    """
    try:
        return plan(*args, **kwargs)
    except TypeError:
        signature = inspect.signature(plan)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            hints = [_HINTS[key] for key in kwargs if key in _HINTS]
            names = ", ".join(signature.parameters)
            text = f"fs.{plan.__name__}({names}): {error}."
            raise TypeError(" ".join([text, *hints])) from None
        raise


# Note [Collectives of loss functions]
# Types state what is replicated: the argument of pvary, the result of psum. In a loss function of
# `value_and_grad` each device has a loss of its own, the objective is their mean, and every value
# is varying along the axes of the batch (`Scope.varying_axes`). Then nothing is compared, and
#
#     pvary, replicated    have nothing to convert along these axes: the argument is returned
#     psum, broadcast      are followed by a pvary, so that the cotangents of all devices are summed
def plan_call(
    caller: str,
    tree: PyTree,
    axis: Axes,
    move: Callable[[Tensor, Group], Move],
    *,
    prepare: Callable[[Tensor], Tensor] | None = None,
    finish: Callable[[Tensor, Group], Tensor] | None = None,
    equal: Literal["argument", "result", None] = None,
) -> CollectiveCall:
    """Plan a collective on a tree of tensors.

    Args:
        caller: the function of the user, for errors.
        tree: the tensors.
        axis: one mesh axis, or several.
        move: returns the move of a leaf; it raises for a leaf that has none.
        prepare: converts each leaf before the move, or raises.
        finish: converts each result.
        equal: what must be equal on all devices, and is compared in a checked call: the values of
            the argument, or the cotangents of the result.
    """
    scope = require(caller)
    group = scope.called_group(axis, caller)
    site = call_site()
    user_call = scope.user_call(caller)
    leaves, structure = tensors_of(caller, tree)

    on_arguments: LinearMap | None = None
    on_results: LinearMap | None = None
    varying_axes = scope.varying_axes
    if equal is not None and varying_axes and not varying_axes.isdisjoint(group.axes):
        # See Note [Collectives of loss functions].
        varying = tuple([name for name in group.axes if name in varying_axes])
        others = tuple([name for name in group.axes if name not in varying_axes])
        if equal == "result":
            on_results = Bound(Pvary(), scope.group(varying, caller), site)
        elif others:
            group = scope.group(others, caller)
        else:
            unchanged = LeafBatch(None, tuple(leaves), range(len(leaves)))
            return CollectiveCall((unchanged,), structure)
    elif equal is not None and scope.checked and scope.world.has_values:
        error_text = _ERROR_TEXTS[equal].replace("{what}", caller)
        is_argument = equal == "argument"
        is_of_loop = user_call is not None
        guard = Guard(group, site, error_text, forward=is_argument, is_of_loop=is_of_loop)
        if is_argument:
            on_arguments = guard
        else:
            on_results = guard

    xs, moves = _moves_of_leaves(caller, leaves, structure, group, move, prepare)
    # All leaves of a batch have an equal move, which is part of the key that groups them.
    batches: list[LeafBatch] = []
    for indices, tensors, batch_site in batched(xs, moves, structure, site):
        bound = Bound(moves[indices[0]], group, batch_site, user_call=user_call)
        batches.append(LeafBatch(bound, tensors, indices))
    convert = None if finish is None else lambda y: finish(y, group)
    return CollectiveCall(batches, structure, on_arguments, on_results, convert)


def _moves_of_leaves(
    caller: str,
    leaves: list[Tensor],
    structure: Structure | None,
    group: Group,
    move: Callable[[Tensor, Group], Move],
    prepare: Callable[[Tensor], Tensor] | None,
) -> tuple[list[Tensor], list[Move]]:
    """Return the converted leaves and their moves; raise with the path of a leaf that has none."""
    xs: list[Tensor] = []
    moves: list[Move] = []
    for number, leaf in enumerate(leaves):
        try:
            x = leaf if prepare is None else prepare(leaf)
            moves.append(move(x, group))
        except (TypeError, ValueError) as error:
            subject = ""
            if structure is not None:
                subject = f"leaf {path_text(paths_of(structure)[number])}: "
            raise type(error)(f"{caller}: {subject}{error}") from None
        xs.append(x)
    return xs, moves


_ERROR_TEXTS = {
    "argument": "the argument of {what} over {axes} must be equal on all devices; use psum or "
    "all_gather to make it so",
    "result": "the result of {what} over {axes} is equal on all devices, so its gradient must be; "
    "but it was used with each device's own data. Put fs.pvary(x, {axes}) around the result where "
    "that use begins",
}


def batched(
    xs: Sequence[Tensor],
    kinds: Sequence[object],
    structure: Structure | None,
    site: Site,
) -> list[tuple[list[int], Tensors, Site]]:
    """Group the leaves of one dtype, kind and type of device, which can share a buffer.

    Return for each group the indices, the tensors, and the site with the paths of the leaves.
    """
    if structure is None:  # a single tensor, as most calls have: no key is hashed
        return [([0], tuple(xs), site)]

    groups: dict[object, list[int]] = {}  # (4)
    for index, (x, kind) in enumerate(zip(xs, kinds, strict=True)):
        key = (x.dtype, x.device.type, kind)
        groups.setdefault(key, []).append(index)

    paths = paths_of(structure)
    batches: list[tuple[list[int], Tensors, Site]] = []
    for indices in groups.values():
        leaves = tuple([paths[index] for index in indices])
        tensors = tuple([xs[index] for index in indices])
        batches.append((indices, tensors, site._replace(leaves=leaves)))
    return batches


def tensors_of(caller: str, tree: PyTree) -> tuple[list[Tensor], Structure | None]:
    """Return the leaves of a tree as plain tensors, and its structure; raise for other leaves."""
    if type(tree) is Tensor and is_dense(tree):  # as most calls have
        return [tree], None

    if isinstance(tree, Tensor):
        leaves, structure = [tree], None
    else:
        leaves, structure = flatten(tree)

    tensors: list[Tensor] = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{caller} takes tensors; {_name_of_leaf(structure, index)} is "
                f"{type(leaf).__name__}. Write torch.tensor(...) around numbers, and x.local for "
                "the local shard of a Sharded."
            )
        if not is_dense(leaf):
            name = _name_of_leaf(structure, index)
            raise LayoutError(f"{caller} takes tensors; {name} is {no_dense(leaf)}.")
        # A view of a subclass is a plain tensor: of a lazy parameter, the unsharded one.
        is_plain = type(leaf) is Tensor or type(leaf) is Parameter
        tensors.append(leaf if is_plain else leaf.view_as(leaf))
    return tensors, structure


def _name_of_leaf(structure: Structure | None, index: int) -> str:
    path = "" if structure is None else paths_of(structure)[index]
    return f"leaf {path_text(path)}" if path else "the argument"
