"""The interpreter: every device goes along its row of a schedule, and does what stands there.

    F   take what comes along the wires to the stage, call it, hand its results on along the wires from it
    B   take their gradients, go back through what F has recorded, hand the gradients of what came on
    I   the same for what came alone;   W   the rest, for the weights

What is taken is let go.  A stage that lies on the same device is handed a copy, so what a stage is given is always its own,
to be changed in place if it likes.  Of a forward only edges of its graph are kept, and what autograd has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fshard.errors import LayoutError
from fshard.mesh.mesh import Mesh, refuse_no_mesh
from fshard.mesh.scope import Group, require
from fshard.mesh.spmd import everywhere, is_outside, standing
from fshard.mesh.threads import one_thread
from fshard.mesh.tree import PyTree
from fshard.pipeline.halves import halves, whole
from fshard.pipeline.leaves import Params, Value, left, map_tensors
from fshard.pipeline.microbatches import Batch, Found, together
from fshard.pipeline.post import Known, Post
from fshard.pipeline.route import Mail, Route, Wire
from fshard.pipeline.saved import Saved
from fshard.pipeline.schedule import Action, Kind, Schedule
from fshard.pipeline.total import Ordered, Running, Total
from fshard.pipeline.turns import Stage, called_for
from fshard.pipeline.verify import verify
from fshard.source import Site, call_site


class Outcome(NamedTuple):
    """What a pipelined step gives.

    Args:
        loss: the mean over the microbatches; None without a loss function.
        gradients: of the parameters of each stage; None for stages of other devices, and where there is no backward.
        metrics: what the loss function returns beside the loss: means, sums of whole numbers.  Without a loss function, the
            last stage's result for each microbatch, on its device; None elsewhere.
    """

    loss: Tensor | None
    gradients: list[PyTree]
    metrics: PyTree


def pipelined(
    stages: Sequence[Stage],
    schedule: Schedule,
    loss_fn: Callable[[PyTree, PyTree], Any] | None = None,
    *,
    mesh: Mesh,
    axis: str = "pipe",
    skips: Mapping[str, tuple[int, int]] | None = None,
    backward: bool = True,
    reproducible: bool = False,
    dynamic: bool = False,
) -> Callable[..., Outcome]:
    """Return the function (params, microbatches, weights=None) -> Outcome that runs stages as a schedule says.

    Values and gradients travel between stages on different devices, once each; the loss and metrics to all devices.

    Args:
        stages: functions (params, x) -> y of pytrees.  The first is given the microbatch.
        schedule: what each device does, in order; it is verified.
        loss_fn: of (y, microbatch), where y is the last stage's: a loss, or a loss and a tree of metrics.
        mesh: the devices.
        axis: along which the stages lie.
        skips: {name: (from, to)}: stage `from` returns (y, {name: value}), and stage `to` is called with name=value.
        backward: whether gradients are wanted; without them only the forwards of the schedule are run.
        reproducible: add gradients of microbatches in one fixed tree, whatever the schedule, with one intra-op thread.
        dynamic: whether shapes depend on more than the shapes of the microbatch; then each message says what it is.

    The function's `params` are a tree for each stage, of which a device needs its own; floating tensors in it are trained,
    but for Parameters that do not require grad.
    `microbatches` are trees, the same on all devices; their shapes may differ.  They count for as many samples as their
    tensors have rows, or for what `weights` says.

    >>> import fshard as fs
    >>> schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n", name="1f1b")
    >>> def stage(w, x):
    ...     return w * x
    >>> step = pipelined([stage] * 2, schedule, lambda y, x: y.mean(), mesh=fs.make_mesh({"pipe": 2}))
    >>> step([torch.tensor(2.0), torch.tensor(3.0)], [torch.ones(1), torch.ones(3)])[:2]
    (tensor(6.), [tensor(3.), tensor(2.)])
    """
    refuse_no_mesh("pipelined", mesh)
    mesh.check_axes(axis, "pipelined(axis=)")
    wrong = [
        (len(stages) != schedule.stages, f"it has {schedule.stages} stages, {len(stages)} are given"),
        (
            mesh.shape[axis] != schedule.devices,
            f"it is for {schedule.devices} devices, axis {axis} has {mesh.shape[axis]}",
        ),
        (backward and loss_fn is None, "a backward begins with a loss: give loss_fn=, or say backward=False"),
        (backward and not any(map(_goes_back, schedule.rows)), "it has no backward: say backward=False"),
        (mesh.runtime == "abstract", "on an abstract mesh nobody says what a stage makes: `simulate` needs no stages"),
    ]
    if any(is_wrong for is_wrong, _ in wrong):
        raise LayoutError(f"pipelined as {schedule.name}: {'; '.join(text for is_wrong, text in wrong if is_wrong)}.")
    verify(schedule)
    plan = Plan(stages, Route(schedule, skips or {}, backward), loss_fn, backward, reproducible, dynamic, {})

    def step(
        params: Sequence[PyTree], microbatches: Sequence[PyTree], weights: Sequence[float] | None = None
    ) -> Outcome:
        own, site = standing(mesh), call_site()
        batch = Batch.of(microbatches, weights, schedule.microbatches)
        if len(params) != len(stages):
            raise LayoutError(
                f"pipelined: {len(stages)} stages have as many trees of parameters, {len(params)} are given."
            )
        if is_outside(own) and own.size != own.shape[axis]:
            raise LayoutError(
                f"pipelined over {axis} of {own}: what its other axes are for is not known here. Call it inside shard_map."
            )

        def body(_: int) -> Outcome:
            group = require("pipelined").group(axis, "pipelined")
            return Device(plan, batch, params, group, torch.device(own.device_type), site).run()

        try:
            with one_thread(reproducible):
                outcomes = everywhere(own, body)
        except BaseException:
            plan.known.clear()  # some devices may have learnt what others have not
            raise
        gradients = [_held([one.gradients[stage] for one in outcomes]) for stage in range(len(stages))]
        return Outcome(outcomes[0].loss, gradients, _held([one.metrics for one in outcomes]))

    return step


def _goes_back(row: Sequence[Action]) -> bool:
    return any(action.kind in (Kind.B, Kind.I, Kind.W) for action in row)


def _held(trees: Sequence[PyTree]) -> PyTree:
    """Return what the device that has it has."""
    return next((tree for tree in trees if tree is not None), None)


# -- one device -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What all steps have in common: see `pipelined`; `known` are the forms of messages that each device has learnt."""

    stages: Sequence[Stage]
    route: Route
    loss_fn: Callable[[PyTree, PyTree], Any] | None
    backward: bool
    reproducible: bool
    dynamic: bool
    known: dict[int, dict[Any, Known]]


class Record(NamedTuple):
    """What a forward leaves for its backward: where gradients come in and out, how many by each wire, and what is saved."""

    outputs: list[tuple[Wire, list[GradientEdge]]]
    inputs: list[tuple[Wire, list[GradientEdge]]]
    saved: Saved | None

    def edges(self) -> tuple[list[GradientEdge], list[GradientEdge]]:
        """Return those of the outputs and of the inputs."""
        ins, outs = ([edge for _, edges in part for edge in edges] for part in self[:2])
        return ins, outs


class Device:
    """One device in one step."""

    def __init__(
        self, plan: Plan, batch: Batch, params: Sequence[PyTree], group: Group, device: torch.device, site: Site
    ) -> None:
        self.plan, self.batch, self.index, self.route = plan, batch, group.index, plan.route
        self.others = [other for other in range(group.size) if other != group.index]
        self.last = self.route.placement[-1]
        comes = {**self.route.comes(group.index)}
        if plan.loss_fn is not None and group.index != self.last:
            comes[self.last] = [*comes[self.last], _OUTCOME]
        known = None if plan.dynamic else plan.known.setdefault(group.device, {})
        self.post = Post[Mail](group, site, device, comes, self._kind, known)
        self.here: dict[Mail, Any] = {}
        own = [stage for stage, place in enumerate(self.route.placement) if place == group.index]
        self.params = {stage: Params(params[stage], plan.backward) for stage in own}
        self.totals: dict[int, Total] = {
            stage: Ordered(batch.weights) if plan.reproducible else Running() for stage in own
        }
        self.records: dict[tuple[int, int], Record] = {}
        self.later: dict[tuple[int, int], Callable[[], list[Tensor | None]]] = {}
        self.found: dict[int, Found] = {}
        self.results: dict[int, PyTree] = {}

    def run(self) -> Outcome:
        """Go along the row."""
        does = {Kind.F: self._forward, Kind.B: self._both, Kind.I: self._inputs, Kind.W: self._weights}
        for action in self.route.rows[self.index]:
            does[action.kind](action, action.stage, action.microbatch or 0)
        gradients: list[PyTree] = [None] * len(self.plan.stages)
        for stage, total in self.totals.items() if self.plan.backward else ():
            gradients[stage] = self.params[stage].tree_of(total.result())
        loss, metrics = self._ended()
        return Outcome(loss, gradients, metrics)

    # -- what stands in a row -----------------------------------------------------------------------------------

    def _forward(self, action: Action, stage: int, microbatch: int) -> None:
        values = {wire: self._take(Mail(Kind.F, wire, microbatch)) for wire in self.route.takes[stage]}
        if stage == 0:
            values[_BATCH] = Value(self.batch.microbatches[microbatch], ()).copied()
        saved = Saved() if (stage, microbatch) in self.route.split else None
        with torch.set_grad_enabled(self.plan.backward):
            entered = {wire: value.entered() for wire, value in values.items()}
            values.clear()
            given = {wire.name or "": tree for wire, (tree, _) in entered.items()}
            with nullcontext() if saved is None else saved.watching():
                called = called_for(self.plan.stages[stage], microbatch)
                y = called(self.params[stage].tree, given.pop(""), **given)
            made = {wire: left(tree) for wire, tree in self._results(stage, microbatch, y).items()}
        if self.plan.backward:
            outputs = [(wire, edges) for wire, (_, edges) in made.items()]
            inputs = [(wire, edges) for wire, (_, edges) in entered.items()]
            self.records[stage, microbatch] = Record(outputs, inputs, saved)
        for mail in self.route.made(action):
            self._give(mail, made[mail.wire][0])

    def _results(self, stage: int, microbatch: int, y: PyTree) -> dict[Wire, PyTree]:
        """Return what a stage has made, by the wires that it goes along; of the last, the loss."""
        gives, loss_fn = self.route.gives[stage], self.plan.loss_fn
        names = {wire.name for wire in gives if wire.name is not None}
        skips: dict[str | None, PyTree] = {}
        if names:
            if not isinstance(y, tuple) or len(y) != 2 or not isinstance(y[1], dict) or y[1].keys() != names:
                wanted = ", ".join(f"{name!r}: ..." for name in sorted(names))
                raise LayoutError(f"pipelined: stage {stage} has skips, so it has to return (y, {{{wanted}}}).")
            y, skips = y
        if stage < len(self.route.gives) - 1:
            return {wire: y if wire.name is None else skips[wire.name] for wire in gives}
        if loss_fn is None:
            self.results[microbatch] = map_tensors(Tensor.detach, y)
            return {}
        loss, self.found[microbatch] = Found.of(loss_fn(y, self.batch.microbatches[microbatch]))
        return {_LOSS: loss}

    def _both(self, action: Action, stage: int, microbatch: int) -> None:
        record, gs = self._begun(stage, microbatch)
        outputs, inputs = record.edges()
        gxs, gws = whole(outputs, gs, inputs, self.params[stage].edges)
        self.totals[stage].add(microbatch, gws)
        self._hand_back(microbatch, record, gxs)

    def _inputs(self, action: Action, stage: int, microbatch: int) -> None:
        record, gs = self._begun(stage, microbatch)
        outputs, inputs = record.edges()
        gxs, self.later[stage, microbatch] = halves(outputs, gs, inputs, self.params[stage].edges, record.saved)
        self._hand_back(microbatch, record, gxs)

    def _weights(self, action: Action, stage: int, microbatch: int) -> None:
        self.totals[stage].add(microbatch, self.later.pop((stage, microbatch))())

    def _begun(self, stage: int, microbatch: int) -> tuple[Record, list[Tensor | None]]:
        """Return what a forward has left, and the gradients of its outputs."""
        record = self.records.pop((stage, microbatch))
        gs: list[Tensor | None] = []
        for wire, edges in record.outputs:
            gs += self._take(Mail(Kind.B, wire, microbatch)) if wire != _LOSS else self._start(microbatch, len(edges))
        return record, gs

    def _start(self, microbatch: int, count: int) -> list[Tensor]:
        """Return the gradient of a microbatch's loss: its part of the mean, unless sums are weighted."""
        weights = self.batch.weights
        part = 1.0 if self.plan.reproducible else weights[microbatch] / sum(weights)
        return [torch.full_like(self.found[microbatch].loss, part)] * count

    def _hand_back(self, microbatch: int, record: Record, gxs: list[Tensor | None]) -> None:
        """Give the stages before this one the gradients of what they gave."""
        rest = iter(gxs)
        for wire, edges in record.inputs:
            if wire != _BATCH:
                self._give(Mail(Kind.B, wire, microbatch), [next(rest) for _ in edges])

    # -- messages -----------------------------------------------------------------------------------------------

    def _give(self, mail: Mail, what: Any) -> None:
        to = self.route.placement[mail.ends[1]]
        if to != self.index:
            self.post.send(mail, to, tuple(what))
        else:
            self.here[mail] = what.copied() if isinstance(what, Value) else what

    def _take(self, mail: Mail) -> Any:
        source = self.route.placement[mail.ends[0]]
        found = self.here.pop(mail) if source == self.index else self.post.take(mail, source)
        return Value(*found) if mail.kind is Kind.F else found

    def _kind(self, mail: Mail) -> Any:
        """Return what decides of which shapes a message is."""
        return mail.kind, mail.wire, tuple(self.batch.kinds) if mail == _OUTCOME else self.batch.kinds[mail.microbatch]

    def _ended(self) -> tuple[Tensor | None, PyTree]:
        """Tell all devices the loss and the metrics."""
        if self.plan.loss_fn is None:
            return None, [self.results[microbatch] for microbatch in sorted(self.results)] or None
        if self.index != self.last:
            return self.post.take(_OUTCOME, self.last)
        outcome = together([self.found[microbatch] for microbatch in sorted(self.found)], self.batch.weights)
        for other in self.others:
            self.post.send(_OUTCOME, other, outcome)
        return outcome


_BATCH = Wire(-1, 0)
_LOSS = Wire(-1, -1)
_OUTCOME = Mail(Kind.F, _LOSS, -1)
