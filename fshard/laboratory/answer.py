"""`Answer`: all that the lab shows of a state: the cost of its program, leaves, code.

short enough      the program of all layers runs without values, as `fs.plan.cost` runs it
longer            time and memory from shorter programs, as `fs.plan.search` has them; a program
                  of few layers, stages and microbatches is drawn
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

from fshard.explore.described import described_cost
from fshard.explore.page import document
from fshard.laboratory.leaves import (
    BATCH,
    LeafGroup,
    batch_group,
    layouts_shown,
    leaf_groups,
    shards_shown,
)
from fshard.laboratory.state import LabState, StateError, fields_named
from fshard.laboratory.subject import Subject, abstract_mesh, machine_of
from fshard.mesh.layout import map_leaves
from fshard.parallelism.value import Parallelism
from fshard.plan.cost import Cost, cost_on_mesh
from fshard.plan.estimate import PlanEstimate
from fshard.plan.layers import LayerTracer
from fshard.plan.program import LayeredModel
from fshard.plan.programs.shortened import steps_of_programs
from fshard.tensor.plan import Plan
from fshard.transforms.train_step import TrainStep

LONGEST = 16
"""The layers, times microbatches, of a program that runs in full: about a second."""

DRAWN_LAYERS = 2
"""The layers of a longer program that is drawn."""

DRAWN_STAGES = 3
"""The devices along the pipeline that are drawn."""


class ProgramRun(NamedTuple):
    """A program that has run without values.

    Args:
        cost: of the program.
        layer_plan: of the layers that are sharded.
        drawn: of how much of the program it is, in words; "" if of all.
    """

    cost: Cost
    layer_plan: Plan | None
    drawn: str


@dataclass(frozen=True, eq=False)
class Answer:
    """The page of a state: cost, leaves and shards of its program.

    Args:
        state: that is shown.
        subject: the model.
    """

    state: LabState
    subject: Subject

    @property
    def plan(self) -> Parallelism:
        """The parallelism on the devices of the state."""
        return self.state.parallelism

    @cached_property
    def model(self) -> LayeredModel:
        """The model, with the overrides of the state."""
        return self.subject.overridden(self.state)

    @cached_property
    def base_estimate(self) -> PlanEstimate:
        """The time, memory and operations of the plan without overrides."""
        return PlanEstimate(self.plan, self.subject.tracer(self.state))

    @cached_property
    def estimate(self) -> PlanEstimate:
        """The plan's time and memory, by shorter programs if these are needed."""
        if self.model is self.subject.layered(self.state):
            return self.base_estimate
        cluster = self.base_estimate.tracer.cluster
        return PlanEstimate(self.plan, LayerTracer(self.model, cluster))

    @property
    def is_short(self) -> bool:
        """True if the program of all layers and microbatches runs."""
        microbatches = cast(int, self.plan.microbatches)
        return self.model.layers * microbatches <= LONGEST and self.plan.pipeline <= DRAWN_STAGES

    @cached_property
    def run(self) -> ProgramRun:
        """The program that is drawn: that of the state, or of a part of it."""
        if self.is_short:
            return _run(self.model, self.plan, self.state.cluster)
        plan, layers = _drawn_part(self.plan, self.model)
        drawn = f"{layers} of {self.model.layers} layers"
        if plan.pipeline < self.plan.pipeline:
            drawn += f", {plan.pipeline} of {self.plan.pipeline} devices of the pipeline"
        if plan.microbatches != self.plan.microbatches:
            drawn += f", {plan.microbatches} of {self.plan.microbatches} microbatches"
        part = replace(self.model, layers=layers)
        steps = steps_of_programs(plan, self.estimate.seconds)
        return _run(part, plan, self.state.cluster, steps, drawn)

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.run.cost.seconds if self.is_short else self.estimate.seconds

    @property
    def peak(self) -> int:
        """The bytes of the fullest device."""
        return self.run.cost.peak() if self.is_short else self.estimate.peak

    @cached_property
    def groups(self) -> list[LeafGroup]:
        """The parameters, those of all layers as one."""
        params = self.run.cost.arguments[0]
        return leaf_groups(params, self.model)

    def shards(self, pattern: str | None) -> Any:
        """Return the picture of the shards of a leaf, or None."""
        groups = {group.pattern: group for group in self.groups}
        groups[BATCH] = batch_group(self.run.cost, self.plan)
        return shards_shown(groups, self.run.cost.mesh, pattern)

    def layouts(self) -> dict[str, Any]:
        """Return the axes and the leaves."""
        return layouts_shown(self.state, self.run.cost, self.groups, self.run.layer_plan)

    def document(self) -> dict[str, Any]:
        """Return what the page of `fshard explore` shows of the plan."""
        described = described_cost(self.base_estimate, self.run.cost, self.subject.name)
        content = document(described)
        if not self.is_short:
            (shown,) = content["plans"]
            shown["title"] = (
                f"{self.subject.name} on {self.plan.devices:,} × {self.run.cost.cluster.name}"
            )
            shown["facts"]["drawn"] = self.run.drawn
            shown["length"] = self.run.cost.seconds
            shown["numbers"] = self._numbers_of_all()
        return content

    def _numbers_of_all(self) -> dict[str, float]:
        """Return the numbers of the program of all layers, of which a part is drawn."""
        numbers: dict[str, float] = {"seconds": self.seconds, "peak": self.peak}
        base = self.base_estimate
        done = base.model_flops
        cluster = self.run.cost.cluster
        numbers["mfu"] = done / (self.seconds * self.plan.devices * cluster.peak(base.dtype))
        if self.model.tokens:
            numbers["tokens"] = self.model.tokens * self.plan.rows_of_step / self.seconds
        return numbers


def _drawn_part(plan: Parallelism, model: LayeredModel) -> tuple[Parallelism, int]:
    """Return the part of a plan that is drawn, and its number of layers."""
    microbatches = cast(int, plan.microbatches)
    if not plan.in_stages:
        few = replace(plan, microbatches=min(microbatches, 2))
        return few, min(model.layers, DRAWN_LAYERS)
    pipeline = min(plan.pipeline, DRAWN_STAGES)
    few = replace(plan, pipeline=pipeline, microbatches=min(microbatches, pipeline))
    return few, few.stages


def _run(
    model: LayeredModel, plan: Parallelism, machine: str, steps: int = 2, drawn: str = ""
) -> ProgramRun:
    """Run the program of a plan without values."""
    mesh = abstract_mesh(plan)
    program = model.program(model.build(model.layers), plan, mesh)
    rows = plan.rows_of_step
    batch = map_leaves(lambda x: x.new_empty((rows, *x.shape[1:])), model.batch)
    step = cast(TrainStep, program.step)
    arguments = [*program.arguments, batch]
    # In a thread of its own no frame is that of a caller, such as a cell or a server: the lines of
    # the ledger are those of the model, or of no program.
    with ThreadPoolExecutor(1) as own_thread:
        running = own_thread.submit(
            cost_on_mesh, step, arguments, mesh, machine_of(machine), steps=steps
        )
        cost = running.result()
    return ProgramRun(cost, program.layer_plan, drawn)


# -- errors ----------------------------------------------------------------------------------------


def field_of_error(error: Exception, content: Any, before: LabState, known: Sequence[str]) -> str:
    """Return the control that an error is about: one that it names, or one that was changed.

    Args:
        error: of the state, or of its program.
        content: the state, as JSON.
        before: the last state that had an answer.
        known: the paths of all controls.
    """
    if isinstance(error, StateError) and error.field:
        return error.field
    changed = changed_fields(content, before)
    text = str(error)
    for path in changed:
        is_of_leaf = path.startswith("overrides.")
        if is_of_leaf and _names_leaf(text, path.removeprefix("overrides.")):
            return path
    names = [path.rpartition(".")[2] for path in known]
    named = [path for name in fields_named(text, names) for path in known if path.endswith(name)]
    for path in named:
        if path in changed:
            return path
    return [*changed, *named, "plan.zero_stage"][0]


def changed_fields(content: Any, before: LabState) -> list[str]:
    """Return the paths of the fields of a state, as JSON, that differ from another state."""
    after = _paths(content if isinstance(content, Mapping) else {})
    old = _paths(before.to_json())
    paths = dict.fromkeys([*after, *old])
    return [path for path in paths if after.get(path) != old.get(path)]


def _paths(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a state by their paths: those of inner objects one by one."""
    values = dict[str, Any]()
    for name, value in content.items():
        if isinstance(value, Mapping):
            for inner, x in cast(Mapping[str, Any], value).items():
                values[f"{name}.{inner}"] = x
        else:
            values[name] = value
    return values


def _names_leaf(text: str, pattern: str) -> bool:
    """Return True if a text names a leaf of a pattern, or the pattern."""
    return pattern in text or pattern.replace("*", "0") in text
