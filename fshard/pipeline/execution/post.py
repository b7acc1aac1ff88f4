"""Messages whose contents only the sender knows, and the messages that a schedule needs.

The first message of a kind is preceded by its description: structure, shapes, dtypes and non-tensors. After that both
ends have it, and only tensors are sent, those of one dtype in one buffer.

A *wire* leads from a stage to a later one: values are sent along it, and their gradients back. Every stage has one to
the next; *skips* have names. All devices have the full schedule, so each derives which messages it receives from
another, in which order: a message is sent as soon as it is computed, and received when it is needed.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from fshard.errors import LayoutError, ScheduleError
from fshard.mesh.collectives.ledger import active
from fshard.mesh.collectives.send_recv import dispatch
from fshard.mesh.layout import PyTree, Structure, flatten, unflatten
from fshard.mesh.spmd.scope import Group, Lane, Pending
from fshard.pipeline.schedule.schedule import COMPUTE, UNITS, Action, Kind, Schedule
from fshard.source import Site

Key = TypeVar("Key", bound=Hashable)


class _Like(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


class Form(NamedTuple):
    """The header of a message: its tree structure, shapes and dtypes of tensors, and all other leaves."""

    structure: Structure
    leaves: tuple[Any, ...]

    @staticmethod
    def of(leaves: Sequence[Any], structure: Structure) -> Form:
        """Describe a tree."""
        return Form(structure, tuple([_Like(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves]))

    def fits(self, leaves: Sequence[Any], structure: Structure) -> bool:
        """Return True if it describes a tree."""
        if structure != self.structure:
            return False
        for x, leaf in zip(leaves, self.leaves, strict=True):
            if isinstance(x, Tensor):
                if not isinstance(leaf, _Like) or x.shape != leaf.shape or x.dtype != leaf.dtype:
                    return False
            elif x is not leaf and x != leaf:
                return False
        return True

    def __str__(self) -> str:
        described = [f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, _Like) else repr(x) for x in self.leaves]
        return f"({', '.join(described)})"


class MessageForm(NamedTuple):
    """A form, and the tensors that share a buffer: indices of all tensors of one dtype, with meta tensors like them.

    Of a message that is a tuple of one tensor and bools, `rest` are the bools.
    """

    form: Form
    batches: Sequence[tuple[Sequence[int], tuple[Tensor, ...]]]
    rest: tuple[Any, ...] | None = None

    @staticmethod
    def of(form: Form, device: torch.device) -> MessageForm:
        """Sort the tensors of a form."""
        places: dict[torch.dtype, list[int]] = {}
        likes: dict[torch.dtype, tuple[Tensor, ...]] = {}
        for place, leaf in enumerate(form.leaves):
            if isinstance(leaf, _Like):
                places.setdefault(leaf.dtype, []).append(place)
                likes[leaf.dtype] = (*likes.get(leaf.dtype, ()), _like(leaf.shape, leaf.dtype, device))
        batches = [(own, likes[dtype]) for dtype, own in places.items()]
        tree = unflatten(form.structure, form.leaves) if len(form.leaves) else None
        alone = type(tree) is tuple and [*map(len, places.values())] == [1] and isinstance(tree[0], _Like)
        simple = alone and all(type(leaf) is bool for place, leaf in enumerate(form.leaves) if place)
        return MessageForm(form, batches, cast("tuple[Any, ...]", tree)[1:] if simple else None)

    def alone(self, tree: PyTree) -> Tensor | None:
        """Return the one tensor of a message that is such a tuple, if it matches its description."""
        if self.rest is None or type(tree) is not tuple or type(x := tree[0]) is not Tensor or tree[1:] != self.rest:
            return None
        like = self.batches[0][1][0]
        return x if x.shape == like.shape and x.dtype is like.dtype else None


def _like(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def _aligned(x: Tensor) -> Tensor:
    """Return a tensor aligned as in its own memory: kernels round differently at other alignments."""
    return x.clone() if x.data_ptr() % _ALIGNED else x


_ALIGNED = 64
"""Bytes, of which torch's memory begins at a multiple."""


class Post(Generic[Key]):
    """The messages of one device.

    Args:
        group: the devices.
        site: the source line of the step.
        device: of the tensors.
        expected: the messages from each other device, in order.
        kind: of a message; messages of one kind have one form.
        known: the forms that both ends have, by kind and receiver; None: every message is described.
    """

    def __init__(
        self,
        group: Group,
        site: Site,
        device: torch.device,
        expected: Mapping[int, Sequence[Key]],
        kind: Callable[[Key], Hashable],
        known: dict[Hashable, MessageForm] | None,
    ) -> None:
        self._group, self._site, self._device, self._kind, self._known = group, site, device, kind, known
        self._expected = {source: deque(mails) for source, mails in expected.items()}
        self._begun: dict[int, tuple[MessageForm, list[Pending] | Lane]] = {}
        self._ways: dict[Hashable, tuple[MessageForm, Lane | None]] = {}
        self._arrived: dict[Key, PyTree] = {}
        for source in self._expected:
            self._begin(source)

    def send(self, mail: Key, to: int, tree: PyTree) -> None:
        """Send a tree to a device, without waiting for it."""
        known, lane = self._way(mail, to, to) or (None, None)
        if known is not None and (x := known.alone(tree)) is not None and not active():
            if lane is None or not lane.send(x):
                self._send((x,), to)
            return
        leaves, structure = flatten(tree, none_is_leaf=True)
        if known is None:
            form = Form.of(leaves, structure)
            known = self._learn(mail, to, form)
            described = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8).to(self._device)
            self._send((torch.tensor([len(described)], device=self._device),), to)
            self._send((described,), to)
        elif not known.form.fits(leaves, structure):
            raise LayoutError(
                f"{mail} is {Form.of(leaves, structure)}; for a microbatch of the same shapes it was {known.form}, which its "
                "receiver expects. If shapes depend on values, give dynamic=True: then each message is described."
            )
        for places, _ in known.batches:
            self._send(tuple([leaves[place] for place in places]), to)

    def take(self, mail: Key, source: int) -> PyTree:
        """Return the next message from a device, and wait for it."""
        while mail not in self._arrived:
            first = self._expected[source].popleft()
            known, coming = self._begun.pop(source, None) or self._receive_all(self._hear(first, source), None, source)
            if not isinstance(coming, list):
                tree = (coming.take(), *(known.rest or ()))
            else:
                leaves = list(known.form.leaves)
                for (places, _), pending in zip(known.batches, coming, strict=True):
                    for place, x in zip(places, pending.wait(), strict=True):
                        leaves[place] = _aligned(x)
                tree = unflatten(known.form.structure, leaves)
            self._begin(source)
            if first == mail:
                return tree
            self._arrived[first] = tree
        return self._arrived.pop(mail)

    def _begin(self, source: int) -> None:
        """Start receiving the next message, if its form is known, so that it arrives during computation."""
        way = self._way(self._expected[source][0], self._group.index, source) if self._expected[source] else None
        if way is not None:
            self._begun[source] = self._receive_all(*way, source)

    # -- descriptions -------------------------------------------------------------------------------------------

    def _way(self, mail: Key, to: int, other: int) -> tuple[MessageForm, Lane | None] | None:
        """Return the cached form of a message, and the cached lane to or from the other device, if any."""
        key = to, self._kind(mail)
        found = self._ways.get(key)
        if found is None and self._known is not None and (known := self._known.get(key)) is not None:
            found = self._ways[key] = known, self._lane(known, other)
        return found

    def _learn(self, mail: Key, to: int, form: Form) -> MessageForm:
        known = MessageForm.of(form, self._device)
        if self._known is not None:
            self._known[to, self._kind(mail)] = known
        return known

    def _hear(self, mail: Key, source: int) -> MessageForm:
        (length,) = self._receive((_like([1], torch.int64, self._device),), source).wait()
        (described,) = self._receive((_like([int(length)], torch.uint8, self._device),), source).wait()
        return self._learn(mail, self._group.index, pickle.loads(described.cpu().numpy().tobytes()))

    # -- tensors of one dtype -----------------------------------------------------------------------------------

    def _send(self, xs: tuple[Tensor, ...], to: int) -> None:
        dispatch(xs, self._group, to, self._site)

    def _receive_all(
        self, known: MessageForm, lane: Lane | None, source: int
    ) -> tuple[MessageForm, list[Pending] | Lane]:
        return known, [self._receive(likes, source) for _, likes in known.batches] if lane is None else lane

    def _lane(self, known: MessageForm, other: int) -> Lane | None:
        if known.rest is None:
            return None
        return self._group.world.current().lane(known.batches[0][1][0], self._group, other, self._site)

    def _receive(self, likes: tuple[Tensor, ...], source: int) -> Pending:
        return self._group.world.current().receive(likes, self._group, source, self._site)


class Wire(NamedTuple):
    """A way from one stage to a later one; without a name, it is that of the one stage's result."""

    source: int
    to: int
    name: str | None = None


class Mail(NamedTuple):
    """The message along a wire for one microbatch: F, a value, or B, its gradient, in the other direction."""

    kind: Kind
    wire: Wire
    microbatch: int

    @property
    def ends(self) -> tuple[int, int]:
        """The stage that sends and the stage that receives."""
        return self.wire[:2] if self.kind is Kind.F else (self.wire.to, self.wire.source)

    def __str__(self) -> str:
        what = "result" if self.wire.name is None else f'skip "{self.wire.name}"'
        gradient = "" if self.kind is Kind.F else "the gradient of "
        return f"{gradient}the {what} of stage {self.wire.source} for microbatch {self.microbatch}"


class WireTurn(NamedTuple):
    """One action of a device: its inputs with their sources, and its outputs with their destinations."""

    action: Action
    takes: Sequence[tuple[Mail, int]] = ()
    sends: Sequence[tuple[Mail, int]] = ()


class Route:
    """The wires of a schedule, the `turns` of each device, and the messages that `expected` to it from each other, in
    order.

    `split`: the backwards in two halves.

    Args:
        schedule: placement and actions.
        skips: by name, the stage that sends and the later one that receives.
        backward: False drops all but the forwards.
        units: True if stages can be unsharded, resharded and reduced.
    """

    def __init__(
        self, schedule: Schedule, skips: Mapping[str, tuple[int, int]], backward: bool, *, units: bool = False
    ) -> None:
        self.placement = schedule.placement
        kept = (COMPUTE if backward else {Kind.F}) | (UNITS if units else set())
        self.rows = [[action for action in row if action.kind in kept] for row in schedule.rows]
        wires = [Wire(*pair) for pair in pairwise(range(schedule.stages))]
        wires += [Wire(*ends, name) for name, ends in skips.items()]
        wires.sort(key=lambda wire: -wire.to)  # gradients are accumulated in this order, as in one backward
        self.sends = [[wire for wire in wires if wire.source == stage] for stage in range(schedule.stages)]
        self.takes = [[wire for wire in wires if wire.to == stage] for stage in range(schedule.stages)]
        self.names = [{wire.name for wire in sends if wire.name is not None} for sends in self.sends]
        self.split = {(action.stage, action.microbatch) for row in self.rows for action in row if action.kind is Kind.I}
        _check(schedule, skips, units)
        self.turns = [[self._turn(action) for action in row] for row in self.rows]
        devices = range(schedule.devices)
        self.expected = [{source: list[Mail]() for source in devices if source != device} for device in devices]
        for source, turns in enumerate(self.turns):
            for mail, to in (given for turn in turns for given in turn.sends):
                if to != source:
                    self.expected[to][source].append(mail)

    def _turn(self, action: Action) -> WireTurn:
        takes, sends = self.takes[action.stage], self.sends[action.stage]
        kind = Kind.F
        if action.kind in (Kind.B, Kind.I):
            kind, takes, sends = Kind.B, sends, takes
        elif action.kind is not Kind.F:
            return WireTurn(action)
        taken, given = ([Mail(kind, wire, action.microbatch or 0) for wire in wires] for wires in (takes, sends))
        return WireTurn(
            action,
            [(mail, self.placement[mail.ends[0]]) for mail in taken],
            [(mail, self.placement[mail.ends[1]]) for mail in given],
        )


def _check(schedule: Schedule, skips: Mapping[str, tuple[int, int]], units: bool) -> None:
    """Raise unless all actions of the schedule and all skips can be executed."""
    units_in = [(each, device) for device, row in enumerate(schedule.rows) for each in row if each.kind in UNITS]
    if units_in and not units:
        raise ScheduleError(
            f"the schedule {schedule.name} gathers, frees or reduces weights, which stages do not let the interpreter do: "
            f"{units_in[0][0]} on device {units_in[0][1]}."
        )
    astray = [f'"{name}": {ends}' for name, ends in skips.items() if not 0 <= ends[0] < ends[1] < schedule.stages]
    if astray:
        raise ScheduleError(
            f"skips lead from a stage to a later one of 0..{schedule.stages - 1}; found {'; '.join(astray)}."
        )
