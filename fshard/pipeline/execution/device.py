"""The interpreter: every device runs the actions of its row of a schedule.

    F   receive the inputs of the stage, call the stage, send its outputs
    B   receive the gradients of the outputs, run the backward of F, send those of the inputs
    I   as B, but without the gradients of the weights
    W   compute the gradients of the weights

    device 0    0F0 ── send ──╮           ╭── receive ── 0B0
    device 1                  ╰── 1F0  1B0 ── send ──╯

A stage on the same device receives a copy, so it may write to its inputs. Of a forward only some
edges of its graph, and the tensors that autograd has saved, are kept for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fshard.mesh.layout import PyTree, unflatten
from fshard.mesh.layout.sharded import flatten_shards
from fshard.mesh.spmd.moments import listeners, reach
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

    F: `first_input`, `run_stage`, and of the last stage `evaluate_loss`, which returns None if
    there is no loss function. B, I and W: `cotangent` of the loss, and the gradients of weights,
    which are read at `edges` and passed to `add_gradients`. If `may_accumulate` returns True,
    autograd adds them to the `.grad` of the weights in place instead. `outcome` is broadcast to all
    devices at the end of the row.
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
    """A forward as its backward needs it.

    Args:
        outputs: the edges where the gradients of the outputs enter.
        inputs: of each input, the edges where its gradients leave.
        saved: the tensors that autograd saved, if the backward is split.
    """

    outputs: list[GradientEdge]
    inputs: list[list[GradientEdge]]
    saved: SavedActivations | None


_OUTCOME = Message(Kind.F, Wire(-1, -1), -1)
"""The outcome of the step, which is broadcast and belongs to no microbatch."""


class StageDevice:
    """One device in one step: it runs its row of the schedule.

    Args:
        route: the schedule with its messages.
        work: the functions behind the actions.
        group: the devices of the stages.
        device: of the tensors.
        site: the source line of the step.
        keys: a key per microbatch, which determines the shapes of its messages.
        forms: the message forms known to both ends; None: every message has a header.
        backward: record forwards for a backward.
        has_outcome: broadcast the outcome to all devices in the end.
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
        self.route = route
        self.work = work
        self.index = group.index
        self.backward = backward
        self.has_outcome = has_outcome
        self.last_device = route.placement[-1]
        self.mailbox = Mailbox(group, site, device, route.receives[group.index], keys, forms)

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
            start = perf_counter()
            action = routed.action
            try:
                if action.microbatch is None:
                    units[action.kind](action.stage)
                else:
                    compute[action.kind](routed, action.stage, action.microbatch)
            except Exception as error:
                error.add_note(_note_of(action))
                raise
            if self.recorder is not None:
                self.recorder.record(action, start)
        return self._broadcast_outcome() if self.has_outcome else None

    # -- the actions of a row ----------------------------------------------------------------------

    def _forward(self, routed: RoutedAction, stage: int, microbatch: int) -> None:
        if listeners:
            reach("forward")
        values: list[StageValue] = []
        for message, source in routed.inputs:  # (4)
            values.append(StageValue(*self._receive(message, source)))
        if stage == 0:
            values.append(first_value(self.work.first_input(microbatch)))

        saved = None
        if (stage, microbatch) in self.route.split:
            saved = SavedActivations()
        with torch.set_grad_enabled(self.backward):
            inputs = [value.as_input() for value in values]
            x, _ = inputs[0]
            skips: dict[str, PyTree] = {}
            for (message, _), (value, _) in zip(routed.inputs[1:], inputs[1:], strict=True):
                skips[message.wire.name or ""] = value

            with nullcontext() if saved is None else saved.recording():
                y = self.work.run_stage(stage, microbatch, x, skips)  # (5)
            trees = self._stage_outputs(routed, stage, microbatch, y)
            outputs = [as_output(tree) for tree in trees]

        # Of the last stage there is one output, the loss, and no message.
        for (message, target), (value, _) in zip(routed.outputs, outputs, strict=False):
            self._send(message, target, value)
        if self.backward:  # (6)
            output_edges = [edge for _, edges in outputs for edge in edges]
            input_edges = [edges for _, edges in inputs]
            self.records[stage, microbatch] = ForwardRecord(output_edges, input_edges, saved)

    def _stage_outputs(
        self, routed: RoutedAction, stage: int, microbatch: int, y: PyTree
    ) -> list[PyTree]:
        """Return the outputs of a stage, one for each message; of the last stage, the loss."""
        if not routed.outputs:
            loss = self.work.evaluate_loss(microbatch, y)
            return [] if loss is None else [loss]

        skips: dict[str, PyTree] = {}
        if self.route.skips[stage]:
            y, skips = self._validate_skips(stage, y)
        outputs: list[PyTree] = []
        for message, _ in routed.outputs:
            name = message.wire.name
            outputs.append(y if name is None else skips[name])
        return outputs

    def _validate_skips(self, stage: int, y: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
        """Return the result of a stage and the skips that it sends; raise unless y has both."""
        names = self.route.skips[stage]
        is_pair = isinstance(y, tuple) and len(y) == 2
        if not is_pair or not isinstance(y[1], dict) or y[1].keys() != names:
            expected = ", ".join([f"{name!r}: ..." for name in sorted(names)])
            raise ValueError(
                f"stage {stage} must return (y, {{{expected}}}), since it has skips; "
                f"got {type(y).__name__}."
            )
        return y

    def _backward(self, routed: RoutedAction, stage: int, microbatch: int) -> None:
        """Run a full backward (B), or its first half (I)."""
        if listeners:
            reach("backward")
        record = self.records.pop((stage, microbatch))
        cotangents: list[Tensor | None] = []
        for message, source in routed.inputs:
            (gradients,) = self._receive(message, source)
            cotangents += gradients
        if not routed.inputs:
            cotangents += [self.work.cotangent(microbatch) for _ in record.outputs]

        inputs = [edge for edges in record.inputs for edge in edges]
        weights = self.work.edges(stage)
        accumulate = self.work.may_accumulate(stage, microbatch)
        gws = None
        if routed.action.kind is Kind.B:
            gxs, gws = run_backward(  # (7)
                record.outputs, cotangents, inputs, weights, accumulate=accumulate
            )
        else:
            gxs, self.weight_backwards[stage, microbatch] = split_backward(
                record.outputs, cotangents, inputs, weights, record.saved, accumulate=accumulate
            )

        # Gradients of inputs first: another device waits for them. Stage 0 has inputs, which are
        # samples, but no edges and no messages.
        begin = 0
        for (message, target), edges in zip(routed.outputs, record.inputs, strict=False):
            end = begin + len(edges)
            self._send(message, target, (gxs[begin:end],))
            begin = end
        if gws is not None:
            self.work.add_gradients(stage, microbatch, gws)  # (8)

    def _backward_weight(self, _: RoutedAction, stage: int, microbatch: int) -> None:
        if listeners:
            reach("backward")
        self.work.edges(stage)  # waits until the stage is unsharded
        gws = self.weight_backwards.pop((stage, microbatch))()
        if gws is not None:
            self.work.add_gradients(stage, microbatch, gws)

    # -- messages ----------------------------------------------------------------------------------

    def _send(self, message: Message, target: int, value: Content) -> None:
        if target == self.index:
            self.local[message] = value.copied() if isinstance(value, StageValue) else value
            return
        start = perf_counter()
        self.mailbox.send(message, target, value)
        if self.recorder is not None:
            kind = Kind.SEND_F if message.kind is Kind.F else Kind.SEND_B
            stage, _ = message.ends
            self.recorder.record(Action(kind, stage, message.microbatch), start)

    def _receive(self, message: Message, source: int) -> Content:
        if source == self.index:
            return self.local.pop(message)
        start = perf_counter()
        value = self.mailbox.receive(message, source)
        if self.recorder is not None:
            kind = Kind.RECV_F if message.kind is Kind.F else Kind.RECV_B
            _, stage = message.ends
            self.recorder.record(Action(kind, stage, message.microbatch), start)
        return value

    def _broadcast_outcome(self) -> PyTree:
        """Broadcast the outcome from the device of the last stage; return it."""
        if self.index != self.last_device:
            leaves, structure = self.mailbox.receive_broadcast(_OUTCOME, self.last_device)
            return unflatten(structure, leaves)
        outcome = self.work.outcome()  # (9)
        self.mailbox.broadcast(_OUTCOME, flatten_shards(outcome, none_is_leaf=True))
        return outcome


def _note_of(action: Action) -> str:
    note = f"in {action} of the schedule: stage {action.stage}"
    if action.microbatch is not None:
        note += f", microbatch {action.microbatch}"
    return note
