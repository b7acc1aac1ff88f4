"""Parameters where they are used: gathered just before, let go just after, their gradients reduced when complete.

Inside a loss function every parameter is a light *handle*.  The first operation that touches a leaf of a unit gathers
the whole unit, as one multi-output autograd Function; that stands right before the block's own operations on the tape, so
autograd comes to its backward, the reduction, right after the block's backward, while earlier blocks are still to come.

    forward     gather 0 | block 0 | gather 1 | block 1 | ... | loss
    backward    ... | block 1 | reduce 1 | block 0 | reduce 0           (gather 1, gather 0 again, as they are needed)

A unit that lies sharded is let go when later ones have been gathered.  What autograd saves of it is kept as a note of
where it lay (saved-tensor hooks), and reading the note gathers the unit again.  Where parameters lie whole (ZeRO 0 to 2)
nothing is gathered and nothing let go: the same Function only reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import Function
from torch.autograd.graph import saved_tensors_hooks

from fshard.errors import LayoutError
from fshard.mesh.differentiate import transformed
from fshard.mesh.scope import Group, require
from fshard.mesh.steps import Way, go
from fshard.mesh.tree import PyTree, flatten, unflatten
from fshard.source import Site
from fshard.transforms.agree import agreed_turns
from fshard.transforms.handle import Handle, handles_of, wholes
from fshard.transforms.rules import named, parts_of

_VF: Any = torch
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


class Leaf(NamedTuple):
    """What is to be done with one parameter: the ways to its use and of its gradient."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str
    gather: Way
    reduce: Way | None
    """From the sum that each device holds a summand of, to the gradient's layout; None: it is not trained."""


@dataclass(frozen=True)
class Manner:
    """How units are handled.

    Args:
        reshard: let sharded units go after their forward, and gather them again for the backward.
        live: how many units that lie sharded are whole at a time, besides those under way and those that a
            rematerialised block holds.
        prefetch: how many units to start gathering ahead of their use, in the order of the step before.
        in_flight: how many reductions may be under way; 0: each is waited for at once.
        bucket: about how many bytes of gradients to reduce together, of units that lie whole.
        compute: the dtype that floating parameters are used in, None: their own.
        reduce: the dtype that gradients are reduced in, None: the one they come in.
    """

    reshard: bool = True
    live: int = 2
    prefetch: int = 1
    in_flight: int = 2
    bucket: int = 1 << 20
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None


class Order(NamedTuple):
    """In which order units were gathered, by number: forward, and again for the backward; and the turns of reductions."""

    forward: list[int]
    backward: list[int]
    turns: list[int]


class Tape:
    """The parameters of one device, through the slices of one step.  `order` is that of an earlier step."""

    def __init__(
        self, leaves: Sequence[Leaf], shards: Sequence[Tensor], manner: Manner, site: Site, order: Order | None = None
    ) -> None:
        self.leaves, self.shards, self.manner, self.site = leaves, shards, manner, site
        self.scope = require("value_and_grad")
        self.anchor = torch.zeros((), requires_grad=True)  # what makes autograd call the units' backwards
        self.sequence: list[int] = []  # which units were gathered: the same on all devices, or they would mix them up
        self._versions = [x._version for x in shards]
        by_unit: dict[str, list[int]] = {}
        for place, leaf in enumerate(leaves):
            if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
                by_unit.setdefault(leaf.unit, []).append(place)
        self.units = [Unit(self, number, places) for number, places in enumerate(by_unit.values())]
        self.order, self.expected = Order([], [], []), order or Order([], [], [])
        self.turns = list(self.expected.turns)
        self.wide = False  # whether gradients are added up before they are reduced
        self.handles: list[Any] = [None] * len(leaves)
        places = [place for unit in self.units for place in unit.places]
        for place, handle in zip(places, handles_of(self), strict=True):
            self.handles[place] = handle
        self.gathering = any(unit.sharded for unit in self.units)
        plain = [
            place for place, handle in enumerate(self.handles) if handle is None
        ]  # integers may be indices: no handles
        for place, x in zip(
            plain, go([shards[at] for at in plain], [leaves[at].gather for at in plain], site)(), strict=True
        ):
            self.handles[place] = x.detach()
        self.used = [False] * len(leaves)
        self.sums: list[Tensor | None] = [None] * len(leaves)
        self.keep: Callable[[Unit, list[Tensor | None]], None] | None = None
        self.first: list[int] = []  # the units that the forward has used so far
        self.idle = False  # whether what is computed counts for nothing
        self._turn = 0
        self._waiting: dict[int, list[Tensor | None]] = {}
        self.live: list[Unit] = []  # the units that lie sharded and are whole, the last used last
        self._bucket: list[tuple[int, Tensor, Way]] = []
        self._under_way: list[tuple[list[int], Callable[[], list[Tensor]]]] = []
        self.storages: dict[int, tuple[Unit, int]] = {}

    def check_unchanged(self) -> None:
        """Raise if the loss function has changed a parameter in place."""
        changed = [
            named(parts_of(leaf.path))
            for leaf, x, version in zip(self.leaves, self.shards, self._versions, strict=True)
            if x._version != version
        ]
        if changed:
            raise LayoutError(
                f"the loss function changed parameters in place: {', '.join(changed)}. It has to be pure: work on a copy, "
                "or return the new value with has_aux=True."
            )

    # -- forward ------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Generator[None]:
        """Compute the loss in this context."""
        watched = self.gathering and self.manner.reshard
        try:
            with saved_tensors_hooks(self._note, self._read) if watched else nullcontext():
                yield
        except RuntimeError as error:
            if watched and "support saved tensor hooks" in str(error):
                raise LayoutError(_NO_HOOKS) from error
            raise

    @contextmanager
    def unwatched(self) -> Generator[None]:
        """Let autograd save tensors as they are for a while."""
        watched = self.gathering and self.manner.reshard
        if watched:
            _C._autograd._pop_saved_tensors_default_hooks()
        try:
            yield
        finally:
            if watched:
                _C._autograd._push_saved_tensors_default_hooks(self._note, self._read)

    def make_room(self, unit: Unit) -> None:
        """Let units go that have not been used for the longest time, so that one more can be whole."""
        self.live = [other for other in self.live if other is not unit]
        while self.manner.reshard and len(self.live) >= self.manner.live:
            self.live[0].release()
        self.live.append(unit)

    def begin(self) -> None:
        """Begin a slice: nothing of the one before is used again."""
        self.end()
        self.order, self.first = Order([], [], self.turns), []

    def end(self) -> None:
        """End a slice."""
        for unit in self.units:
            unit.arrive()  # if it was gathered ahead in vain: other devices count on it
            unit.release()
            unit.awaited = 0

    def look_ahead(self, seen: list[int], expected: list[int], unit: Unit) -> None:
        """Note that a unit is gathered, and start to gather those that came after it the last time."""
        place = len(seen)
        seen.append(unit.number)
        if place < len(expected) and expected[: place + 1] == seen:
            for number in expected[place + 1 : place + 1 + self.manner.prefetch]:
                self.units[number].start()

    def _note(self, x: Tensor) -> Any:
        if type(x) is Handle:
            return x
        found = self.storages.get(_storage(x))
        if found is None or x.dtype != found[0].values[found[1]].dtype:
            return x
        return _Note(found[0], found[1], x.size(), x.stride(), int(x.storage_offset()), x.is_conj(), x.is_neg())

    def _read(self, note: Any) -> Tensor:
        if not isinstance(note, _Note):
            return note
        x = note.unit.again()[note.at].as_strided(note.size, note.stride, note.offset)
        x = x.conj() if note.conj else x
        return _VF._neg_view(x) if note.neg else x

    # -- backward -----------------------------------------------------------------------------------------------

    def receive(self, unit: Unit, gs: Sequence[Tensor | None]) -> None:
        """Take the cotangents of one use of a unit."""
        gs = self._noted(unit, gs)
        if unit.sharded and self.manner.reshard:
            unit.release()
        unit.awaited -= 1
        if self.keep is not None:
            self.keep(unit, gs)
        elif unit.awaited:  # it was used, let go and used again: its uses are reduced together
            unit.keep(gs)
        else:
            self._complete(unit, unit.with_kept(gs))

    def receive_aside(self, unit: Unit, gs: Sequence[Tensor | None]) -> None:
        """Take the cotangents that came to a unit's handles themselves, to be reduced after the backward."""
        if any(g is not None for g in gs):
            (self.keep or Unit.keep)(unit, self._noted(unit, gs))

    def _noted(self, unit: Unit, gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Note which leaves were used; return what counts of their cotangents."""
        for place, g in zip(unit.places, gs, strict=True):
            self.used[place] |= g is not None
        return [None if self.idle else g for g in gs]

    def begin_backward(self, group: Group | None) -> None:
        """Agree on the turns of reductions, unless they are known."""
        if not self.turns and any(leaf.reduce is not None for leaf in self.leaves):
            self.turns = agreed_turns(self.first, len(self.units), group, self.site, self.shards[0].device)
        self._turn = 0

    def _complete(self, unit: Unit, gs: list[Tensor | None]) -> None:
        """Reduce what has its turn, now that a unit's gradients are there."""
        self._waiting[unit.number] = gs
        while self._turn < len(self.turns) and self.turns[self._turn] in self._waiting:
            self._next()

    def _next(self) -> None:
        unit = self.units[self.turns[self._turn]]
        self._turn += 1
        gs = self._waiting.pop(unit.number, None)
        self.reduce(unit, unit.with_kept([None] * len(unit.places)) if gs is None else gs)

    def end_backward(self) -> None:
        """Reduce all whose turn has not come, and keep what has none for the end of the step."""
        while self._turn < len(self.turns):
            self._next()
        self._send()
        for number, gs in self._waiting.items():
            self.units[number].keep(gs)
        self._waiting.clear()

    def reduce_rest(self, kept: Sequence[float], used: Sequence[float]) -> None:
        """Reduce what some device has kept; note the turns of the next step."""
        rest = [unit for unit, times in zip(self.units, kept, strict=True) if times]
        for unit in rest:
            self.reduce(unit, unit.with_kept([None] * len(unit.places)))
        self._send()
        self._finish()
        turns = dict.fromkeys([*self.turns, *(unit.number for unit in rest)])
        turns = [number for number in turns if any(used[place] for place in self.units[number].places)]
        self.order = self.order._replace(turns=turns)

    def reduce(self, unit: Unit, gs: Sequence[Tensor | None]) -> None:
        """Reduce the gradients of a unit, if it lies whole together with those that come before and after.

        All devices do so in one order, and in one dtype whatever they have, so their buckets are alike.
        """
        for place, g in zip(unit.places, gs, strict=True):
            leaf, near = self.leaves[place], self.shards[place]
            if leaf.reduce is not None:
                dtype = self._reduced_in(leaf)
                g = near.new_zeros(leaf.shape, dtype=dtype) if g is None else g.to(dtype)
                self._bucket.append((place, g, leaf.reduce))
        if unit.sharded or sum(g.nbytes for _, g, _ in self._bucket) >= self.manner.bucket:
            self._send()

    def _send(self) -> None:
        """Start to reduce what is in the bucket."""
        if self._bucket:
            places, xs, ways = map(list, zip(*self._bucket, strict=True))
            self._bucket = []
            self._under_way.append((places, go(xs, ways, self.site, ahead=self.manner.in_flight > 0)))
            self._finish(self.manner.in_flight)

    def _reduced_in(self, leaf: Leaf) -> torch.dtype:
        if leaf.dtype.is_complex:
            return leaf.dtype
        used = self.manner.compute or leaf.dtype
        return self.manner.reduce or (torch.promote_types(used, torch.float32) if self.wide else used)

    def words(self) -> list[str]:
        """Return what each unit is called, and what it holds."""
        return [
            f"{self.leaves[unit.places[0]].unit} ({', '.join(named(parts_of(self.leaves[at].path)) for at in unit.places)})"
            for unit in self.units
        ]

    def _finish(self, but: int = 0) -> None:
        """Wait for reductions, the oldest first, until only so many are under way."""
        while len(self._under_way) > but:
            places, finish = self._under_way.pop(0)
            for place, result in zip(places, finish(), strict=True):
                known, dtype = self.sums[place], self.leaves[place].dtype
                result = result.to(dtype)
                self.sums[place] = result if known is None else known + result


_NO_HOOKS = (
    "torch.func's grad, vjp, jacrev and hessian bear no saved-tensor hooks, by which parameters are gathered again for the "
    "backward. Mark the function that uses them, fs.gathered(fn, keep=True), or pass reshard_after_forward=False."
)


def _untransformed() -> AbstractContextManager[Any]:
    """Return a context without torch.func's transforms: parameters come from outside of them."""
    return temporarily_clear_interpreter_stack() if transformed() else nullcontext()


def _in_backward() -> bool:
    return _C._current_graph_task_id() != -1


def _storage(x: Tensor) -> int:
    """Return what tells a tensor's memory apart, as long as it lives."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


class _Note(NamedTuple):
    """Where a saved tensor lay in a unit."""

    unit: Unit
    at: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


class Unit:
    """Leaves that are gathered and reduced together."""

    __slots__ = ("awaited", "coming", "kept", "number", "places", "sharded", "tape", "used", "values")

    def __init__(self, tape: Tape, number: int, places: list[int]) -> None:
        self.tape, self.number, self.places = tape, number, places
        self.coming: Callable[[], list[Tensor]] | None = None
        self.sharded = any(tape.leaves[place].gather.steps for place in places)
        self.used: tuple[Tensor, ...] | None = None
        self.values: list[Tensor] = []
        self.kept: list[Tensor | None] | None = None
        self.awaited = 0  # uses whose backward is still to come

    def whole(self) -> tuple[Tensor, ...]:
        """Return all leaves of the unit, whole and differentiable, gathering them if they are not at hand."""
        used = self.used
        if used is None:
            if self.sharded:
                self.tape.make_room(self)
            trained = any(self.tape.leaves[place].reduce is not None for place in self.places)
            if trained and torch.is_grad_enabled():
                with _untransformed():
                    used = _Use.apply(self.tape.anchor, self)
                if not _in_backward():  # a rematerialised use comes in a backward, and ends with it
                    self.awaited += 1
                    self.tape.first += [self.number] if self.number not in self.tape.first else []
            else:
                with _untransformed(), torch.no_grad():
                    used = tuple(x.detach() for x in self.gather())
            if torch.is_grad_enabled() or not trained:
                self.used = used
            if self.sharded:
                self.tape.look_ahead(self.tape.order.forward, self.tape.expected.forward, self)
        return used

    def gather(self) -> list[Tensor]:
        """Return all leaves, whole."""
        if not self.sharded:
            return [self._converted(self.tape.shards[place]).detach() for place in self.places]
        self.start()
        self.arrive()
        return self.values

    def start(self) -> None:
        """Start to gather the unit, unless it is at hand or under way."""
        tape = self.tape
        if self.sharded and not self.values and self.coming is None:
            tape.sequence.append(self.number)
            with torch.no_grad():
                xs = [self._converted(tape.shards[place]) for place in self.places]
                self.coming = go(xs, [tape.leaves[place].gather for place in self.places], tape.site, ahead=True)

    def arrive(self) -> None:
        """Wait for what is under way."""
        if self.coming is not None:
            with torch.no_grad():
                self.values, self.coming = self.coming(), None
            for at, x in enumerate(self.values):
                self.tape.storages[_storage(x)] = self, at

    def _converted(self, x: Tensor) -> Tensor:
        compute = self.tape.manner.compute
        return x.detach() if compute is None or not x.is_floating_point() else x.detach().to(compute)

    def again(self) -> list[Tensor]:
        """Return all leaves for the backward, gathering them again if they have been let go."""
        if not self.values:
            self.tape.make_room(self)
            self.gather()
            self.tape.look_ahead(self.tape.order.backward, self.tape.expected.backward, self)
        return self.values

    def release(self) -> None:
        """Let the leaves go: the next use gathers them anew."""
        self.used = None
        for x in self.values:
            self.tape.storages.pop(_storage(x), None)
        self.values = []
        self.tape.live = [other for other in self.tape.live if other is not self]

    def keep(self, gs: list[Tensor | None]) -> None:
        """Add to what earlier slices gave, to be reduced together; in 32 bits at least."""
        gs = [g.float() if g is not None and g.dtype in (torch.bfloat16, torch.float16) else g for g in gs]
        if self.kept is None:
            self.kept = gs
            return
        for at, g in enumerate(gs):
            known = self.kept[at]
            if g is not None:
                self.kept[at] = g if known is None else known + g

    def with_kept(self, gs: list[Tensor | None]) -> list[Tensor | None]:
        """Return gradients together with those kept, of which none are left."""
        if self.kept is not None:
            self.keep(gs)
            gs, self.kept = self.kept, None
        return gs


class _Use(Function):
    """From nothing to the leaves of a unit; backward, their gradients are reduced."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, unit: Unit) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        values = unit.gather()
        leaves = unit.tape.leaves
        fixed = [x for x, place in zip(values, unit.places, strict=True) if leaves[place].reduce is None]
        ctx.mark_non_differentiable(*fixed)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[None, None]:
        ctx.unit.tape.receive(ctx.unit, gs)
        return None, None


def whole(tree: PyTree) -> PyTree:
    """Return a tree with plain tensors in the place of parameters, gathered.

    Outside a loss function there are no handles, and the tree is returned as it is.
    """
    leaves, structure = flatten(tree, sharded_is_leaf=True, none_is_leaf=True)
    return unflatten(structure, [wholes(leaf) for leaf in leaves])


def gathered(fn: Callable[..., Any], *, keep: bool = False) -> Callable[..., Any]:
    """Return a function whose parameters are gathered when it is called and let go when it returns.

    Any loss function works without this mark; a marked block holds its parameters for exactly as long as it runs, and its
    body sees plain tensors.

    Args:
        fn: a function that is called with parameters among its arguments.
        keep: leave what autograd saves in it as it is, instead of gathering parameters again for the backward.  Then
            torch.func works in it, which bears no saved-tensor hooks.

    >>> import torch, fshard as fs
    >>> block = fs.gathered(lambda w, x: torch.relu(x @ w))
    >>> block(torch.eye(2), torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = flatten((args, kwargs), sharded_is_leaf=True, none_is_leaf=True)
        units = {id(leaf.unit): leaf.unit for leaf in leaves if type(leaf) is Handle}
        own_args, own_kwargs = unflatten(structure, [wholes(leaf) for leaf in leaves])
        tapes = {id(unit.tape): unit.tape for unit in units.values()}
        try:
            with ExitStack() as stack:
                for tape in tapes.values() if keep else ():
                    stack.enter_context(tape.unwatched())
                return fn(*own_args, **own_kwargs)
        finally:
            for unit in units.values():
                if unit.sharded and unit.tape.manner.reshard:
                    unit.release()

    return run


def followed(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function as it is to be called with handles: what torch.compile has made takes gathered parameters."""
    return gathered(loss_fn) if hasattr(loss_fn, "_torchdynamo_orig_callable") else loss_fn
