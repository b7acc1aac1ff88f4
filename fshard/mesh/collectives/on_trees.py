"""Call a collective on a tree: group the leaves that share a buffer, then run it now or start it.

psum({"a": f32, "b": bf16, "c": f32}, "data") -> two collectives: a and c in one buffer, b in another
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Literal, ParamSpec, Protocol, TypeGuard

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
from fshard.mesh.collectives.ledger import active
from fshard.mesh.collectives.moves import Alone, Extreme, Move, Pvary, Wired, is_plain
from fshard.mesh.layout import (
    Axes,
    PyTree,
    Structure,
    collected,
    flatten,
    flatten_with_paths,
    is_dense,
    no_dense,
    paths_of,
    unflatten,
)
from fshard.mesh.spmd.check_equal import Guard
from fshard.mesh.spmd.scope import Group, here, require
from fshard.source import Site, call_site, code_position
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
class LeafBatch:
    """Leaves that share one collective, and their indices among all leaves; `linear` is None for the identity."""

    linear: LinearMap | None
    xs: Tensors
    indices: Sequence[int]


@dataclass(slots=True)
class CollectiveCall:
    """One call of a collective; `structure` is None for a single tensor.

    `guard` checks the result (or the argument) for equality; `after` maps each result.
    """

    batches: Sequence[LeafBatch]
    structure: Structure | None
    guard: Guard | Bound | None = None
    after: Callable[[Tensor], Tensor] | None = None

    def run(self) -> PyTree:
        if self.structure is None and self.after is None and len(self.batches) == 1:
            return self.apply_to(self.batches[0])[0]
        return self.assembled([self.apply_to(batch) for batch in self.batches])

    def apply_to(self, batch: LeafBatch) -> Tensors:
        """Run the collective of some leaves, and check what must be equal."""
        linear, guard, xs = batch.linear, self.guard, batch.xs
        if linear is None:
            return xs
        if isinstance(guard, Guard) and guard.forward:
            xs, guard = apply(guard, xs), None
        if isinstance(linear, Bound) and type(linear.move) is Extreme:
            ys = apply_extreme(linear, xs)
        else:
            ys = apply(linear, xs)
        return ys if guard is None else apply(guard, ys)

    def start(self) -> Handle:
        """Start the collectives of tensors whose derivative nothing needs; run others now."""
        bounds = [batch.linear for batch in self.batches if isinstance(batch.linear, Bound)]
        is_plain = not transformed() and not any(recorded(batch.xs) for batch in self.batches)
        if not is_plain or len(bounds) < len(self.batches) or any(isinstance(one.move, Alone) for one in bounds):
            result = self.run()
            return Handle(lambda: result)
        pending = [bound.start(batch.xs) for bound, batch in zip(bounds, self.batches, strict=True)]
        for batch in self.batches:
            batch.xs = ()  # the operation keeps what it still needs
        return Handle(lambda: self.assembled([one.wait() for one in pending]))

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

    def fast_path(self, tree: PyTree) -> Callable[[Tensor], Tensor] | None:
        """Return the fast path of the runtime for calls like this one, on single tensors, if there is one."""
        if self.structure is not None or self.guard is not None or self.batches[0].xs[0] is not tree:
            return None
        bound, after = self.batches[0].linear, self.after
        if not isinstance(bound, Bound) or not isinstance(bound.move, Wired):
            return None
        fast_path = bound.group.world.fast_path(bound.move, bound.group, tree, bound.site)
        return fast_path if fast_path is None or after is None else lambda x: after(fast_path(x))


class Collective(Protocol[Params]):
    """A collective: a function whose `start` begins it and returns a `Handle` to wait for."""

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> PyTree: ...
    def start(self, *args: Params.args, **kwargs: Params.kwargs) -> Handle: ...


def collective(plan: Callable[Params, CollectiveCall]) -> Collective[Params]:
    """Turn the plan of a collective into the function that users call."""
    name, signature = f"fs.{plan.__name__}", inspect.signature(plan).replace(return_annotation=PyTree)
    most = sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in signature.parameters.values())

    def run(*args: Params.args, **kwargs: Params.kwargs) -> PyTree:
        if kwargs or len(args) > most:
            _validate_call(name, signature, most, args, kwargs)
        scope = here()
        if scope is None or scope.fast_paths is None or not args or not _plain(x := args[0]):
            return plan(*args, **kwargs).run()
        fast_paths, key = scope.fast_paths, _key(name, x, args[1:], kwargs)
        fast_path = None if key is None else fast_paths.get(key, ...)
        if fast_path is ...:
            if len(fast_paths) == MAX_FAST_PATHS:
                fast_paths.clear()
            fast_path = fast_paths[key] = plan(*args, **kwargs).fast_path(x)
        return plan(*args, **kwargs).run() if fast_path is None else fast_path(x)

    def start(*args: Params.args, **kwargs: Params.kwargs) -> Handle:
        _validate_call(name, signature, most, args, kwargs)
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


def _validate_call(
    name: str, signature: inspect.Signature, most: int, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Raise if a keyword does not exist or is given twice, with the name that it has here, or if an option has no name."""
    names = list(signature.parameters)
    if len(args) > most:
        options = "".join(f", {option}={value!r}" for option, value in zip(names[most:], args[most:], strict=False))
        raise TypeError(
            f"{name} takes {most} positional arguments; got {len(args)}. Write {name}({', '.join(names[:most])}{options})."
        )
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
    position = code_position(3)
    try:
        key = (name, position, x.shape, x.dtype, args, *kwargs.items())
        hash(key)
    except TypeError:  # there is a list
        return (name, position, x.shape, x.dtype, repr(args), repr(kwargs))
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
        and is_plain(x)
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
            leaves, structure = tensors_of(what, tree)
            return CollectiveCall((LeafBatch(None, tuple(leaves), range(len(leaves))),), structure)
    elif equal is not None and scope.checked and scope.world.has_values:
        guard = Guard(group, site, _BROKEN[equal].replace("{what}", what), forward=equal == "argument")

    def prepared(x: Tensor) -> tuple[Tensor, Move]:
        x = x if before is None else before(x)
        return x, move(x, group)

    leaves, structure = tensors_of(what, tree)
    try:
        ready = [prepared(leaf) for leaf in leaves]
    except (TypeError, ValueError):
        with collected(what) as attempt:
            for path, leaf in zip([""] if structure is None else paths_of(structure), leaves, strict=True):
                with attempt(path and f"leaf {path}"):
                    prepared(leaf)
        raise
    last = None if after is None else lambda y: after(y, group)
    if structure is None:
        ((leaf, own),) = ready
        return CollectiveCall((LeafBatch(Bound(own, group, site), (leaf,), (0,)),), None, guard, last)
    batches = batched([leaf for leaf, _ in ready], [own for _, own in ready], structure, site)
    made = [LeafBatch(Bound(ready[batch[0]][1], group, site), xs, batch) for batch, xs, site in batches]
    return CollectiveCall(made, structure, guard, last)


_BROKEN = {
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


def tensors_of(what: str, tree: PyTree) -> tuple[list[Tensor], Structure | None]:
    """Return the leaves of a tree, as plain tensors, and its structure, or raise naming all leaves that are no dense ones."""
    if type(tree) is Tensor and is_dense(tree):
        return [tree], None
    leaves, structure = ([tree], None) if isinstance(tree, Tensor) else flatten(tree)
    if not all(isinstance(leaf, Tensor) and is_dense(leaf) for leaf in leaves):
        raise _no_tensors(what, tree)
    plain = (Tensor, Parameter)  # not subclasses, such as lazy parameters
    return [leaf if type(leaf) in plain else leaf.view_as(leaf) for leaf in leaves], structure


def _no_tensors(what: str, tree: PyTree) -> Exception:
    wrong, hint = list[str](), ""
    for path, leaf in zip(*flatten_with_paths(tree)[:2], strict=True):
        named = f"leaf {path}" if path else "the argument"
        if not isinstance(leaf, Tensor):
            wrong.append(f"{named} is {type(leaf).__name__}")
            hint = " Write torch.tensor(...) around numbers, and x.local for the own shard of a Sharded."
        elif not is_dense(leaf):
            wrong.append(f"{named} is {no_dense(leaf)}")
    kind = TypeError if hint else LayoutError
    return kind(f"{what} takes tensors; {'; '.join(wrong)}.{hint}")
