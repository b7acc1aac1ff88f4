"""`Unit`: leaves that are gathered and reduced together, by one multi-output autograd Function.

It stands right before the first operation that uses the unit on autograd's tape, so its backward, the reduction, comes right
after the backward of all of them, while that of earlier units is still to come.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import Function

from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout import Layout
from fshard.mesh.reshard.execute import Way, go

if TYPE_CHECKING:
    from fshard.transforms.fsdp.param_runtime import Tape

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
Result = TypeVar("Result")


class Leaf(NamedTuple):
    """What is to be done with one parameter: the way to its use, whether it is trained, and how its gradient is to lie."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str
    gather: Way
    trained: bool
    gradient: Layout


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
    bucket: int = 8 << 20
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None


def is_sent(way: Way) -> bool:
    """Return whether anything is sent on a way."""
    return len(way.steps) > 1 or (bool(way.steps) and way.steps[0].kind != "reshape")


class Unit:
    """Leaves that are gathered and reduced together."""

    __slots__ = (
        "awaited",
        "coming",
        "kept",
        "number",
        "places",
        "sharded",
        "tape",
        "trained",
        "used",
        "values",
        "versions",
    )

    def __init__(self, tape: Tape, number: int, places: list[int]) -> None:
        self.tape, self.number, self.places = tape, number, places
        self.coming: Callable[[], list[Tensor]] | None = None
        leaves = [tape.leaves[place] for place in places]
        self.sharded = any(is_sent(leaf.gather) for leaf in leaves)
        self.trained = any(leaf.trained for leaf in leaves)
        self.used: tuple[Tensor, ...] | None = None
        self.values: list[Tensor] = []
        self.versions: list[int] = []
        self.kept: list[Tensor | None] | None = None
        self.awaited = 0  # uses whose backward is still to come

    def whole(self) -> tuple[Tensor, ...]:
        """Return all leaves of the unit, whole and differentiable, gathering them if they are not at hand."""
        used = self.used
        if used is None:
            if self.sharded:
                self.tape.make_room(self)
            if self.trained and torch.is_grad_enabled():
                used = _outside_transforms(lambda: _Use.apply(self.tape.anchor, self))
                if not _in_backward():  # a rematerialised use comes in a backward, and ends with it
                    self.awaited += 1
                    self.tape.first += [self.number] if self.number not in self.tape.first else []
            else:
                used = _outside_transforms(self._detached)
            if torch.is_grad_enabled() or not self.trained:
                self.used = used
            if self.sharded:
                self.tape.look_ahead(self.tape.seen.forward, self.tape.expected.forward, self)
        return used

    def _detached(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple([x.detach() for x in self.gather()])

    def leaf(self, at: int) -> Tensor:
        """Return one leaf, whole and differentiable, for one use."""
        x = self.whole()[at]
        if self.tape.each_use and x.requires_grad:
            return _outside_transforms(lambda: _Once.apply(x, self, at))
        return x

    def gather(self) -> list[Tensor]:
        """Return all leaves, whole."""
        if self.sharded:
            self.start()
            self.arrive()
        elif not self.values:
            leaves, shards = self.tape.leaves, self.tape.shards
            with unrecorded():
                xs = [self._converted(shards[place]) for place in self.places]
                self._take([x.reshape(leaves[place].shape) for x, place in zip(xs, self.places, strict=True)])
        return self.values

    def _take(self, values: list[Tensor]) -> None:
        self.values, self.versions = values, versions_of(values)

    def changed(self) -> set[int]:
        """Return which of the leaves at hand somebody has changed in place."""
        now = versions_of(self.values)  # none, if they have been let go
        return {place for place, one, other in zip(self.places, now, self.versions, strict=False) if one != other}

    def start(self) -> None:
        """Start to gather the unit, unless it is at hand or under way."""
        tape = self.tape
        if self.sharded and not self.values and self.coming is None:
            tape.sequence.append(self.number)
            with unrecorded():
                xs = [self._converted(tape.shards[place]) for place in self.places]
                self.coming = go(xs, [tape.leaves[place].gather for place in self.places], tape.site, ahead=True)

    def arrive(self) -> None:
        """Wait for what is under way."""
        if self.coming is not None:
            with unrecorded():
                values, self.coming = self.coming(), None
            self._take(values)
            self.tape.saved.know(self)

    def _converted(self, x: Tensor) -> Tensor:
        compute = self.tape.manner.compute
        return x.detach() if compute is None or not x.is_floating_point() else x.detach().to(compute)

    def again(self) -> list[Tensor]:
        """Return all leaves for the backward, gathering them again if they have been let go."""
        if not self.values:
            self.tape.make_room(self)
            self.gather()
            self.tape.look_ahead(self.tape.seen.backward, self.tape.expected.backward, self)
        return self.values

    def release(self) -> None:
        """Let the leaves go: the next use gathers them anew."""
        if self.values:
            self.tape.changed |= self.changed()
            self.values, self.versions = [], []
        self.used = None
        if self.sharded:
            self.tape.live = [other for other in self.tape.live if other is not self]

    def went_back(self) -> None:
        """Note that the backward of one use has ended."""
        self.awaited -= 1
        if self.sharded and self.tape.manner.reshard:
            self.release()

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
        values = [x.detach() for x in unit.gather()]  # a write is found by `check_unchanged`
        leaves = unit.tape.leaves
        fixed = [x for x, place in zip(values, unit.places, strict=True) if not leaves[place].trained]
        ctx.mark_non_differentiable(*fixed)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[None, None]:
        ctx.unit.tape.reductions.receive(ctx.unit, gs)
        return None, None


class _Once(Function):
    """The same leaf for one use; backward, its cotangent goes by itself.

    Autograd would add up all that come to a `_Use`, of which there are more where a unit was let go in between.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: Unit, at: int) -> Tensor:
        ctx.unit, ctx.at = unit, at
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[None, None, None]:
        own: list[Tensor | None] = [None] * len(ctx.unit.places)
        (own[ctx.at],) = gs
        ctx.unit.tape.reductions.receive_apart(ctx.unit, own)
        return None, None, None


def _outside_transforms(make: Callable[[], Result]) -> Result:
    """Call without torch.func's transforms: parameters come from outside of them."""
    if not transformed():
        return make()
    with temporarily_clear_interpreter_stack():
        return make()


def unrecorded() -> AbstractContextManager[Any]:
    """Return a context without a graph, in which what is made can be saved for a backward even in inference mode."""
    return _out_of_inference() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _out_of_inference() -> Generator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def versions_of(xs: Sequence[Tensor]) -> list[int]:
    """Return numbers that grow whenever a tensor is written to; torch keeps none of what was made in inference mode."""
    try:
        return [x._version for x in xs]
    except RuntimeError:
        return [0 if x.is_inference() else x._version for x in xs]


def _in_backward() -> bool:
    return _C._current_graph_task_id() != -1
