"""The interpreter: every device runs the actions of its row of a schedule.

    F   receive the stage's inputs, call the stage, send its outputs
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
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fshard.mesh.layout import PyTree, unflatten
from fshard.mesh.layout.sharded import flatten_shards
from fshard.mesh.spmd.scope import Group
from fshard.pipeline.execution.leaves import StageValue, as_output, first_value
from fshard.pipeline.execution.mailbox import Content, Forms, Mailbox
from fshard.pipeline.execution.route import Message, Route, RoutedAction, Wire
from fshard.pipeline.execution.saved_tensors import SavedActivations
from fshard.pipeline.execution.split_backward import Gradients, run_backward, split_backward
from fshard.pipeline.schedule.actions import Action, Kind
from fshard.pipeline.schedule.trace import recorder_of
from fshard.source import Site


class StageWork(Protocol):
    """The functions behind the actions of one device's stages in one step.

    `evaluate_loss` computes the loss from the last stage's output, None if there is no loss function. Gradients of weights
    are read at `edges` and passed to `add_gradients`, unless `may_accumulate` states that autograd may add to their `.grad`
    in place. `outcome` is broadcast to all devices at the end.
    """

    def first_input(self, microbatch: int) -> PyTree: ...
    def run_stage(
        self, stage: int, microbatch: int, x: PyTree, skips: dict[str, PyTree]
    ) -> PyTree: ...
    def evaluate_loss(self, microbatch: int, y: PyTree) -> Tensor | None: ...
    def cotangent(self, microbatch: int) -> Tensor: ...
    def edges(self, stage: int) -> list[GradientEdge]: ...
    def may_accumulate(self, stage: int, microbatch: int) -> bool: ...
    def add_gradients(self, stage: int, microbatch: int, gs: list[Tensor | None]) -> None: ...
    def unshard(self, stage: int) -> None: ...
    def reshard(self, stage: int) -> None: ...
    def reduce(self, stage: int) -> None: ...
    def outcome(self) -> PyTree: ...


class ForwardRecord(NamedTuple):
    """The record of a forward for its backward: the edges where gradients enter and leave, and the saved tensors."""

    outputs: list[GradientEdge]
    inputs: list[list[GradientEdge]]
    saved: SavedActivations | None


class StageDevice:
    """One device in one step: it runs its `work` along the `route`.

    `keys`: a key per microbatch that determines the shapes of messages. `forms`: the message forms known to both ends;
    None: every message has a header. With `backward` forwards are recorded; with `has_outcome` all devices receive the
    outcome.
    """

    def __init__(
        self,
        route: Route,
        work: StageWork,
        group: Group,
        device: torch.device,
        site: Site,
        keys: Sequence[Hashable],
        forms: Forms | None,
        *,
        backward: bool,
        has_outcome: bool,
    ) -> None:
        self.route, self.work, self.index, self.backward = route, work, group.index, backward
        self.peers = [index for index in range(group.size) if index != group.index]
        self.last, self.has_outcome = route.placement[-1], has_outcome
        pairs, receives = route.pairs, {**route.receives[group.index]}
        if has_outcome:
            pairs = pairs | {(self.last, index) for index in range(group.size)}
        group.world.current().connect(group.members, pairs)
        if has_outcome and group.index != self.last:
            receives[self.last] = [*receives[self.last], _OUTCOME]
        self.mailbox = Mailbox(group, site, device, receives, keys, forms)
        self.recorder = recorder_of(group.device)
        self.local: dict[Message, Content] = {}  # messages between stages of this device
        self.records: dict[tuple[int, int], ForwardRecord] = {}
        self.weight_backwards: dict[tuple[int, int], Callable[[], Gradients | None]] = {}

    def run(self) -> PyTree:
        """Run the row; return the outcome, if it is broadcast."""
        compute = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._backward_weight,
        }
        units = {
            Kind.UNSHARD: self.work.unshard,
            Kind.RESHARD: self.work.reshard,
            Kind.REDUCE: self.work.reduce,
        }
        for routed in self.route.actions[self.index]:  # (3)
            began, action = perf_counter(), routed.action
            try:
                if action.microbatch is None:
                    units[action.kind](action.stage)
                else:
                    compute[action.kind](routed, action.stage, action.microbatch)
            except Exception as error:
                suffix = "" if action.microbatch is None else f", microbatch {action.microbatch}"
                error.add_note(f"in {action} of the schedule: stage {action.stage}{suffix}")
                raise
            if self.recorder is not None:
                self.recorder.record(action, began)
        return self._broadcast_outcome() if self.has_outcome else None

    # -- the actions of a row -----------------------------------------------------------------------------------

    def _forward(self, routed: RoutedAction, stage: int, microbatch: int) -> None:
        values = [
            StageValue(*self._receive(message, source)) for message, source in routed.inputs
        ]  # (4)
        if stage == 0:
            values.append(first_value(self.work.first_input(microbatch)))
        saved = SavedActivations() if (stage, microbatch) in self.route.split else None
        with torch.set_grad_enabled(self.backward):
            inputs = [value.as_input() for value in values]
            values.clear()
            named = zip(routed.inputs[1:], inputs[1:], strict=True)
            skips = {message.wire.name or "": tree for (message, _), (tree, _) in named}
            with nullcontext() if saved is None else saved.recording():
                y = self.work.run_stage(stage, microbatch, inputs[0][0], skips)  # (5)
            outputs = [
                as_output(tree) for tree in self._stage_outputs(routed, stage, microbatch, y)
            ]
        for (message, to), (value, _) in zip(
            routed.outputs, outputs, strict=False
        ):  # no device receives the loss
            self._send(message, to, value)
        if self.backward:  # (6)
            ends = [edge for _, edges in outputs for edge in edges]
            self.records[stage, microbatch] = ForwardRecord(
                ends, [edges for _, edges in inputs], saved
            )

    def _stage_outputs(
        self, routed: RoutedAction, stage: int, microbatch: int, y: PyTree
    ) -> list[PyTree]:
        """Return the outputs of a stage, in the order of sending; of the last stage, the loss."""
        names = self.route.skips[stage]
        skips: dict[str, PyTree] = {}
        if names:
            if (
                not isinstance(y, tuple)
                or len(y) != 2
                or not isinstance(y[1], dict)
                or y[1].keys() != names
            ):
                wanted = ", ".join(f"{name!r}: ..." for name in sorted(names))
                raise ValueError(
                    f"stage {stage} must return (y, {{{wanted}}}), since it has skips; got {type(y).__name__}."
                )
            y, skips = y
        if routed.outputs:
            return [
                y if (name := message.wire.name) is None else skips[name]
                for message, _ in routed.outputs
            ]
        loss = self.work.evaluate_loss(microbatch, y)
        return [] if loss is None else [loss]

    def _backward(self, routed: RoutedAction, stage: int, microbatch: int) -> None:
        """Run a full backward (B), or its first half (I)."""
        record = self.records.pop((stage, microbatch))
        if routed.inputs:
            gs = [g for message, source in routed.inputs for g in self._receive(message, source)[0]]
        else:
            gs = [self.work.cotangent(microbatch) for _ in record.outputs]
        ends = (
            record.outputs,
            gs,
            [edge for edges in record.inputs for edge in edges],
            self.work.edges(stage),
        )
        accumulate, gws = self.work.may_accumulate(stage, microbatch), None
        if routed.action.kind is Kind.B:
            gxs, gws = run_backward(*ends, accumulate=accumulate)  # (7)
        else:
            gxs, self.weight_backwards[stage, microbatch] = split_backward(
                *ends, record.saved, accumulate=accumulate
            )
        remaining = iter(
            gxs
        )  # they are sent first: another device waits for them; a microbatch needs no gradient
        for (message, to), edges in zip(routed.outputs, record.inputs, strict=False):
            self._send(message, to, ([*islice(remaining, len(edges))],))
        if gws is not None:
            self.work.add_gradients(stage, microbatch, gws)  # (8)

    def _backward_weight(self, _: RoutedAction, stage: int, microbatch: int) -> None:
        self.work.edges(stage)  # unsharded, if the stage has units
        self.work.may_accumulate(stage, microbatch)
        gws = self.weight_backwards.pop((stage, microbatch))()
        if gws is not None:
            self.work.add_gradients(stage, microbatch, gws)

    # -- messages -----------------------------------------------------------------------------------------------

    def _send(self, message: Message, to: int, value: Content) -> None:
        if to == self.index:
            self.local[message] = value.copied() if isinstance(value, StageValue) else value
            return
        began = perf_counter()
        self.mailbox.send(message, to, value)
        if self.recorder is not None:
            kind = Kind.SEND_F if message.kind is Kind.F else Kind.SEND_B
            self.recorder.record(Action(kind, message.ends[0], message.microbatch), began)

    def _receive(self, message: Message, source: int) -> Content:
        if source == self.index:
            return self.local.pop(message)
        began = perf_counter()
        value = self.mailbox.receive(message, source)
        if self.recorder is not None:
            kind = Kind.RECV_F if message.kind is Kind.F else Kind.RECV_B
            self.recorder.record(Action(kind, message.ends[1], message.microbatch), began)
        return value

    def _broadcast_outcome(self) -> PyTree:
        """Send the outcome to all devices."""
        if self.index != self.last:
            leaves, structure = self.mailbox.receive(_OUTCOME, self.last)
            return unflatten(structure, leaves)
        outcome = self.work.outcome()  # (9)
        content = flatten_shards(outcome, none_is_leaf=True)
        for peer in self.peers:
            self.mailbox.send(_OUTCOME, peer, content)
        return outcome


_OUTCOME = Message(Kind.F, Wire(-1, -1), -1)
