"""The interpreter: every device runs the actions of its row of a schedule.

    F   receive the stage's inputs, call the stage, send its results
    B   receive their gradients, run the backward of F, send the gradients of the inputs
    I   the gradients of the inputs only;   W   the rest: the gradients of the weights

A stage on the same device gets a copy, so the inputs of a stage are always its own. Of a forward only some edges of
its graph, and autograd's saved tensors, are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fshard.errors import LayoutError
from fshard.mesh.layout import PyTree
from fshard.mesh.spmd.scope import Group
from fshard.pipeline.execution.halves import halves, run_backward
from fshard.pipeline.execution.leaves import StageValue, left
from fshard.pipeline.execution.post import Mail, MessageForm, Post, Route, Wire, WireTurn
from fshard.pipeline.execution.saved import Saved
from fshard.pipeline.schedule.schedule import Action, Kind
from fshard.pipeline.schedule.trace import clock_of
from fshard.source import Site


class StageWork(Protocol):
    """The functions behind the actions of one device's stages in one step.

    `begin` returns the input of the first stage, `call` runs a stage; `end` computes the loss from the last stage's
    result, and `start` returns its gradient. Gradients of weights are read at `edges` and passed to `add`, unless
    `may_accumulate` states that autograd may add to their `.grad` in place. `outcome` is what all devices receive at the end.
    """

    def begin(self, microbatch: int) -> PyTree: ...
    def call(self, stage: int, microbatch: int, x: PyTree, skips: dict[str, PyTree]) -> PyTree: ...
    def end(self, microbatch: int, y: PyTree) -> Tensor | None: ...
    def start(self, microbatch: int) -> Tensor: ...
    def edges(self, stage: int) -> list[GradientEdge]: ...
    def may_accumulate(self, stage: int, microbatch: int) -> bool: ...
    def add(self, stage: int, microbatch: int, gs: list[Tensor | None]) -> None: ...
    def gather(self, stage: int) -> None: ...
    def free(self, stage: int) -> None: ...
    def reduce(self, stage: int) -> None: ...
    def outcome(self) -> PyTree: ...


class Record(NamedTuple):
    """The record of a forward for its backward: the edges where gradients enter and leave, and the saved tensors."""

    outputs: list[GradientEdge]
    inputs: list[list[GradientEdge]]
    saved: Saved | None


class StageDevice:
    """One device in one step: it runs its `work` along the `route`.

    `kinds`: a key per microbatch that determines the shapes of messages. `known`: the message forms known to both
    ends; None: every message is described. With `backward` forwards are recorded; with `has_outcome` all devices receive the
    outcome.
    """

    def __init__(
        self,
        route: Route,
        work: StageWork,
        group: Group,
        device: torch.device,
        site: Site,
        kinds: Sequence[Hashable],
        known: dict[Any, MessageForm] | None,
        *,
        backward: bool,
        has_outcome: bool,
    ) -> None:
        self.route, self.work, self.index, self.backward = route, work, group.index, backward
        self.others = [other for other in range(group.size) if other != group.index]
        self.last, self.has_outcome = route.placement[-1], has_outcome
        expected = {**route.expected[group.index]}
        if has_outcome and group.index != self.last:
            expected[self.last] = [*expected[self.last], _OUTCOME]

        def kind(mail: Mail) -> Any:  # no reference to the device: a cycle would keep the step's tensors alive
            """Return a key that determines the shapes of messages."""
            return mail.kind, mail.wire, tuple(kinds) if mail == _OUTCOME else kinds[mail.microbatch]

        self.post = Post[Mail](group, site, device, expected, kind, known)
        self.clock = clock_of(group.device)
        self.here: dict[Mail, Any] = {}
        self.records: dict[tuple[int, int], Record] = {}
        self.later: dict[tuple[int, int], Callable[[], list[Tensor | None] | None]] = {}

    def run(self) -> PyTree:
        """Run the row; return the outcome, if it is broadcast."""
        does = {Kind.F: self._forward, Kind.B: self._both, Kind.I: self._inputs, Kind.W: self._weights}
        units = {Kind.GATHER: self.work.gather, Kind.FREE: self.work.free, Kind.REDUCE: self.work.reduce}
        for turn in self.route.turns[self.index]:
            began, action = perf_counter(), turn.action
            try:
                if action.microbatch is None:
                    units[action.kind](action.stage)
                else:
                    does[action.kind](turn, action.stage, action.microbatch)
            except Exception as error:
                at = "" if action.microbatch is None else f", microbatch {action.microbatch}"
                error.add_note(f"in {action} of the schedule: stage {action.stage}{at}")
                raise
            if self.clock is not None:
                self.clock.did(action, began)
        return self._share_outcome() if self.has_outcome else None

    # -- the actions of a row -----------------------------------------------------------------------------------

    def _forward(self, turn: WireTurn, stage: int, microbatch: int) -> None:
        values = [StageValue(*self._take(mail, source)) for mail, source in turn.takes]
        if stage == 0:
            values.append(StageValue(self.work.begin(microbatch), ()).copied())
        saved = Saved() if (stage, microbatch) in self.route.split else None
        with torch.set_grad_enabled(self.backward):
            entered = [value.entered() for value in values]
            values.clear()
            named = zip(turn.takes[1:], entered[1:], strict=True)
            skips = {mail.wire.name or "": tree for (mail, _), (tree, _) in named}
            with nullcontext() if saved is None else saved.watching():
                y = self.work.call(stage, microbatch, entered[0][0], skips)
            made = [left(tree) for tree in self._results(turn, stage, microbatch, y)]
        for (mail, to), (value, _) in zip(turn.sends, made, strict=False):  # no device receives the loss
            self._give(mail, to, value)
        if self.backward:
            outputs = [edge for _, edges in made for edge in edges]
            self.records[stage, microbatch] = Record(outputs, [edges for _, edges in entered], saved)

    def _results(self, turn: WireTurn, stage: int, microbatch: int, y: PyTree) -> list[PyTree]:
        """Return the outputs of a stage, in the order of sending; of the last stage, the loss."""
        names = self.route.names[stage]
        skips: dict[str, PyTree] = {}
        if names:
            if not isinstance(y, tuple) or len(y) != 2 or not isinstance(y[1], dict) or y[1].keys() != names:
                wanted = ", ".join(f"{name!r}: ..." for name in sorted(names))
                raise LayoutError(f"pipelined: stage {stage} has skips, so it has to return (y, {{{wanted}}}).")
            y, skips = y
        if turn.sends:
            return [y if (name := mail.wire.name) is None else skips[name] for mail, _ in turn.sends]
        loss = self.work.end(microbatch, y)
        return [] if loss is None else [loss]

    def _both(self, turn: WireTurn, stage: int, microbatch: int) -> None:
        record, gs = self._begun(turn, stage, microbatch)
        inputs = [edge for edges in record.inputs for edge in edges]
        adding = self.work.may_accumulate(stage, microbatch)
        gxs, gws = run_backward(record.outputs, gs, inputs, self.work.edges(stage), adding=adding)
        self._hand_back(turn, record, gxs)  # first: another device waits for it
        if gws is not None:
            self.work.add(stage, microbatch, gws)

    def _inputs(self, turn: WireTurn, stage: int, microbatch: int) -> None:
        record, gs = self._begun(turn, stage, microbatch)
        inputs = [edge for edges in record.inputs for edge in edges]
        weights, adding = self.work.edges(stage), self.work.may_accumulate(stage, microbatch)
        gxs, self.later[stage, microbatch] = halves(record.outputs, gs, inputs, weights, record.saved, adding=adding)
        self._hand_back(turn, record, gxs)

    def _weights(self, turn: WireTurn, stage: int, microbatch: int) -> None:
        self.work.edges(stage)  # unsharded, if the stage has units
        self.work.may_accumulate(stage, microbatch)
        gws = self.later.pop((stage, microbatch))()
        if gws is not None:
            self.work.add(stage, microbatch, gws)

    def _begun(self, turn: WireTurn, stage: int, microbatch: int) -> tuple[Record, list[Tensor | None]]:
        """Return the record of a forward, and the gradients of its outputs."""
        record = self.records.pop((stage, microbatch))
        gs: list[Tensor | None] = []
        if not turn.takes:
            gs += [self.work.start(microbatch) for _ in record.outputs]
        for mail, source in turn.takes:
            gs += self._take(mail, source)
        return record, gs

    def _hand_back(self, turn: WireTurn, record: Record, gxs: list[Tensor | None]) -> None:
        """Send the gradients of a stage's inputs to the stages that made them."""
        rest = iter(gxs)
        for (mail, to), edges in zip(turn.sends, record.inputs, strict=False):  # not every microbatch needs any
            self._give(mail, to, [*islice(rest, len(edges))])

    # -- messages -----------------------------------------------------------------------------------------------

    def _give(self, mail: Mail, to: int, what: Any) -> None:
        if to == self.index:
            self.here[mail] = what.copied() if isinstance(what, StageValue) else what
            return
        began = perf_counter()
        self.post.send(mail, to, tuple(what))
        if self.clock is not None:
            self.clock.note(Action(_SENT[mail.kind], mail.ends[0], mail.microbatch), began)

    def _take(self, mail: Mail, source: int) -> Any:
        if source == self.index:
            return self.here.pop(mail)
        began = perf_counter()
        found = self.post.take(mail, source)
        if self.clock is not None:
            self.clock.waited(Action(_COME[mail.kind], mail.ends[1], mail.microbatch), began)
        return found

    def _share_outcome(self) -> PyTree:
        """Send the outcome to all devices."""
        if self.index != self.last:
            return self.post.take(_OUTCOME, self.last)
        outcome = self.work.outcome()
        for other in self.others:
            self.post.send(_OUTCOME, other, outcome)
        return outcome


_SENT = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}
_COME = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B}
_OUTCOME = Mail(Kind.F, Wire(-1, -1), -1)
