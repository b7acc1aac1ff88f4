"""Call a collective on a tree: group the leaves that share a buffer, then run it now or start it.

psum({"a": f32, "b": bf16, "c": f32}, "data") -> two collectives: a and c in one buffer, b in another
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Literal, ParamSpec, Protocol, TypeGuard, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from fshard.errors import LayoutError
from fshard.mesh.collectives.autograd import (
    Begun,
    Bound,
    Tensors,
    apply,
    apply_extreme,
    has_tangent,
    recorded,
    transformed,
)
from fshard.mesh.collectives.ledger import active
from fshard.mesh.collectives.moves import Alone, Extreme, Move, Pvary, Stay, Wired
from fshard.mesh.layout import (
    Axes,
    PyTree,
    Structure,
    flatten,
    flatten_with_paths,
    is_dense,
    no_dense,
    paths_of,
    unflatten,
)
from fshard.mesh.spmd.check_equal import Guard
from fshard.mesh.spmd.scope import Group, Scope, here, require
from fshard.source import Site, call_site
from fshard.uncompiled import uncompiled

Params = ParamSpec("Params")

MAX_FAST_PATHS = 1024
"""Fast paths cached per scope."""


_PLAIN = {str, int, bool, tuple, list}
"""The types of arguments of collectives, besides tensors."""


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
class PackedTensors:
    """Leaves that share one collective, and their indices among all leaves."""

    bound: Bound
    xs: Tensors
    indices: Sequence[int]

    def run(self, guard: Guard | Bound | None) -> Tensors:
        if type(self.bound.move) is Stay:
            return self.xs
        applied = apply_extreme if type(self.bound.move) is Extreme else apply
        if guard is None:
            return applied(self.bound, self.xs)
        if isinstance(guard, Guard) and guard.forward:
            return applied(self.bound, apply(guard, self.xs))
        return apply(guard, applied(self.bound, self.xs))

    def start(self, guard: Guard | Bound | None) -> Callable[[], Tensors]:
        """Start the move and return the function that finishes it.

        Autograd records it here, with results that are filled in later. So backwards run in the order in which
        collectives were started, which is equal on all devices; the order of waits may differ.
        """
        pending = self.bound.start(tuple(x.detach() for x in self.xs))
        if not recorded(self.xs):
            return pending.wait
        ys = apply(Begun(self.bound), self.xs)
        ys = ys if guard is None else apply(guard, ys)

        def fill() -> Tensors:
            for y, result in zip(ys, pending.wait(), strict=True):
                y.data = result
            return ys

        return fill


@dataclass(slots=True)
class CollectiveCall:
    """One call of a collective; `structure` is None for a single tensor."""

    batches: Sequence[PackedTensors]
    structure: Structure | None
    guard: Guard | Bound | None
    after: Callable[[Tensor, Group], Tensor] | None

    def run(self) -> PyTree:
        if self.structure is None and self.guard is None and self.after is None:
            return self.batches[0].run(None)[0]
        return self._finished([batch.run(self.guard) for batch in self.batches])

    def fast_path(self, tree: PyTree) -> Callable[[Tensor], Tensor] | None:
        """Return the short way for calls like this one, on single tensors, if there is one."""
        if self.structure is not None or self.guard is not None or self.batches[0].xs[0] is not tree:
            return None
        move, group = self.batches[0].bound.move, self.batches[0].bound.group
        fast_path = None if isinstance(move, Alone) else group.world.fast_path(cast("Wired", move), group, tree)
        after = self.after
        return fast_path if fast_path is None or after is None else lambda x: after(fast_path(x), group)

    def start(self) -> Handle:
        if transformed() or any(
            isinstance(batch.bound.move, Alone | Extreme) or has_tangent(batch.xs) for batch in self.batches
        ):  # nothing to wait for, or a result that its derivative needs immediately
            result = self.run()
            return Handle(lambda: result)
        finishes = [batch.start(self.guard) for batch in self.batches]
        return Handle(lambda: self._finished([finish() for finish in finishes]))

    def _finished(self, results: list[Tensors]) -> PyTree:
        if self.after is not None:
            group = self.batches[0].bound.group if self.batches else None
            results = [tuple(self.after(y, group) for y in ys) for ys in results] if group is not None else results
        if self.structure is None:
            return results[0][0]
        by_index = {
            index: y
            for batch, ys in zip(self.batches, results, strict=True)
            for index, y in zip(batch.indices, ys, strict=True)
        }
        return unflatten(self.structure, [by_index[index] for index in range(len(by_index))])


class Collective(Protocol[Params]):
    """A collective: a function whose `start` begins it and returns a `Handle` to wait for."""

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> PyTree: ...
    def start(self, *args: Params.args, **kwargs: Params.kwargs) -> Handle: ...


def collective(plan: Callable[Params, CollectiveCall]) -> Collective[Params]:
    """Turn the plan of a collective into the function that users call."""
    name, signature = f"fs.{plan.__name__}", inspect.signature(plan).replace(return_annotation=PyTree)

    def run(*args: Params.args, **kwargs: Params.kwargs) -> PyTree:
        if kwargs:
            _validate_keywords(name, signature, args, kwargs)
        scope = here()
        if scope is None or scope.fast_paths is None or not args or not _plain(x := args[0]):
            return plan(*args, **kwargs).run()
        fast_paths, key = scope.fast_paths, _key(name, x, args[1:], kwargs)
        if key is not None and key not in fast_paths:
            if len(fast_paths) == MAX_FAST_PATHS:
                fast_paths.clear()
            fast_paths[key] = plan(*args, **kwargs).fast_path(x)
        fast_path = fast_paths.get(key)
        return plan(*args, **kwargs).run() if fast_path is None else fast_path(x)

    def start(*args: Params.args, **kwargs: Params.kwargs) -> Handle:
        _validate_keywords(name, signature, args, kwargs)
        return plan(*args, **kwargs).start()

    def public(function: Callable[..., object], returns: object) -> Any:
        result: Any = update_wrapper(uncompiled(function), plan)
        result.__signature__ = signature.replace(return_annotation=returns)
        return result

    made = public(run, PyTree)
    made.start = public(start, Handle)
    return made


_HINTS = {
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


def _validate_keywords(
    name: str, signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Raise if a keyword does not exist or is given twice, with the name that it has here."""
    names = list(signature.parameters)
    wrong = [
        f"{key} is not an argument. {_HINTS.get(key, '')}".rstrip() if key not in names else f"{key} is given twice."
        for key in kwargs
        if key not in names[len(args) :]
    ]
    if wrong:
        hint = " The mesh axis is `axis`, a tensor dim is `dim`." if "axis" in kwargs and len(args) > 1 else ""
        raise TypeError(f"{name}({', '.join(names)}): {' '.join(wrong)}{hint}")


def _key(name: str, x: Tensor, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Return the cache key of a call; None if an argument cannot be in one, such as an iterator."""
    for given in args, kwargs.values():
        for one in given:
            if type(one) not in _PLAIN:
                return None
    try:
        key = (name, x.shape, x.dtype, args, *kwargs.items())
        hash(key)
    except TypeError:  # there is a list
        return (name, x.shape, x.dtype, repr(args), repr(kwargs))
    return key


def _plain(x: object) -> TypeGuard[Tensor]:
    """Return True for a contiguous CPU tensor without gradient, while no ledger is open: it may take a fast path."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and is_dense(x)
        and not transformed()
        and not recorded((x,))
        and not active()
        and x.is_contiguous()
        and not (x.is_conj() or x.is_neg())
    )


def call(
    what: str,
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
    scope = require(what)
    group, site = scope.called_group(axis, what), call_site()
    guard: Guard | Bound | None = None
    if equal is not None and not scope.own.isdisjoint(group.axes):
        own = tuple(axis for axis in group.axes if axis in scope.own)
        others = tuple(axis for axis in group.axes if axis not in scope.own)
        if equal == "result":
            guard = Bound(Pvary(), scope.group(own, what), site)
        elif others:
            group = scope.group(others, what)
        else:
            move = lambda x, group: Stay()  # noqa: E731
    elif equal is not None and scope.checked:
        guard = _guard(what, scope, group, site, equal)

    def prepared(x: Tensor) -> tuple[Tensor, Move]:
        x = x if before is None else before(x)
        return x, move(x, group)

    leaves, structure = tensors_of(what, tree)
    if structure is None:
        leaf, own = prepared(leaves[0])
        return CollectiveCall((PackedTensors(Bound(own, group, site), (leaf,), (0,)),), None, guard, after)
    batches = _batches(_all_prepared(what, tree, leaves, prepared), group, site, structure)
    return CollectiveCall(batches, structure, guard, after)


def _all_prepared(
    what: str, tree: PyTree, leaves: list[Tensor], prepared: Callable[[Tensor], tuple[Tensor, Move]]
) -> list[tuple[Tensor, Move]]:
    """Prepare all leaves of a tree; raise with all invalid leaves, grouped by error."""
    ready: list[tuple[Tensor, Move]] = []
    wrong: dict[str, list[int]] = {}
    for index, leaf in enumerate(leaves):
        try:
            ready.append(prepared(leaf))
        except LayoutError as error:
            wrong.setdefault(str(error).removeprefix(f"{what}: "), []).append(index)
    if wrong:
        paths, _, _ = flatten_with_paths(tree, sharded_is_leaf=True)
        lines = [f"leaf {', '.join(paths[index] for index in indices)}: {text}" for text, indices in wrong.items()]
        raise LayoutError(f"{what}: " + ("\n  " if len(lines) > 1 else "") + "\n  ".join(lines))
    return ready


def _batches(
    leaves: list[tuple[Tensor, Move]], group: Group, site: Site, structure: Structure | None
) -> list[PackedTensors]:
    alike: dict[tuple[torch.dtype, Move], list[int]] = {}  # (4)
    for index, (leaf, own) in enumerate(leaves):
        alike.setdefault((leaf.dtype, own), []).append(index)
    paths = paths_of(structure) if structure is not None else ("",)
    return [
        PackedTensors(
            Bound(own, group, site._replace(leaves=tuple([paths[index] for index in indices]))),
            tuple(leaves[index][0] for index in indices),
            indices,
        )
        for (_, own), indices in alike.items()
    ]


def _guard(what: str, scope: Scope, group: Group, site: Site, equal: Literal["argument", "result"]) -> Guard | None:
    broken = {
        "argument": f"the argument of {what} over {{axes}} has to be equal on all devices; use psum or all_gather to make "
        "it so",
        "result": f"the result of {what} over {{axes}} is equal on all devices, so its gradient has to be; but it was used "
        "with each device's own data. Put fs.pvary(x, {axes}) around the result where that use begins",
    }
    return Guard(group, site, broken[equal], forward=equal == "argument") if scope.world.has_values else None


def tensors_of(what: str, tree: PyTree) -> tuple[list[Tensor], Structure | None]:
    """Return the leaves of a tree, as plain tensors, and its structure, or raise naming all leaves that are no dense ones."""
    if type(tree) is Tensor and is_dense(tree):
        return [tree], None
    leaves, structure = ([tree], None) if isinstance(tree, Tensor) else flatten(tree, sharded_is_leaf=True)
    if not all(isinstance(leaf, Tensor) and is_dense(leaf) for leaf in leaves):
        raise _no_tensors(what, tree)
    return [_bare(leaf) for leaf in leaves], structure


def _no_tensors(what: str, tree: PyTree) -> LayoutError:
    wrong, hint = list[str](), ""
    for path, leaf in zip(*flatten_with_paths(tree, sharded_is_leaf=True)[:2], strict=True):
        named = f"leaf {path}" if path else "the argument"
        if not isinstance(leaf, Tensor):
            wrong.append(f"{named} is {type(leaf).__name__}")
            hint = " Write torch.tensor(...) around numbers, and x.local for the own shard of a Sharded."
        elif not is_dense(leaf):
            wrong.append(f"{named} is {no_dense(leaf)}")
    return LayoutError(f"{what} takes tensors; {'; '.join(wrong)}.{hint}")


def _bare(x: Tensor) -> Tensor:
    """Return the plain tensor of a tensor subclass, such as a lazy parameter."""
    return x if type(x) is Tensor or type(x) is Parameter else x.view_as(x)
