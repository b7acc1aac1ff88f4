"""A run of an audited step: its results, its gradients, and the record of its devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, replace
from functools import partial
from typing import NamedTuple

import torch

from fshard.auditing.compare import Difference, differences, lowest_dtype
from fshard.auditing.layouts import OtherLayout, copied_like, without_arrays
from fshard.auditing.records import StepRecord, copies_of, recorded_by
from fshard.mesh.layout import Mesh, PyTree
from fshard.mesh.reshard.broadcast_to import broadcast_to
from fshard.mesh.spmd.run import is_outside, local_devices
from fshard.randomness import random_state
from fshard.transforms.options import OPTIONS
from fshard.transforms.train_step import TrainStep

KINDS = {"params": "parameter", "state": "state", "buffers": "buffer", "metrics": "metric"}
"""The results of a step in their order, with the name of a leaf of each."""


class Run(NamedTuple):
    """One run of a step.

    Args:
        results: params, state, buffers if there are any, and metrics.
        record: of its devices; also the reduced gradients.
    """

    results: Mapping[str, PyTree]
    record: StepRecord

    @property
    def returned(self) -> tuple[PyTree, ...]:
        """The results as the step returned them."""
        return tuple(self.results.values())


def run_recorded(
    step: TrainStep,
    arguments: Sequence[PyTree],
    substitute: Callable[[PyTree], PyTree] | None = None,
) -> Run:
    """Run a step, with a record of each device."""
    record = StepRecord(substitute)
    with recorded_by(record):
        returned = replace(step, substitute=record.reduced)(*arguments)
    names = [name for name in KINDS if name != "buffers" or step.options.has_buffers]
    results = dict(zip(names, returned, strict=True))
    numbers = numbers_of(step.mesh)
    for name in ("state", "params", "buffers"):
        record.add_results(KINDS[name], results.get(name), numbers)
    return Run(results, record)


def numbers_of(mesh: Mesh) -> list[int]:
    """Return the numbers in the world of the caller's devices, in the order of shards."""
    if not mesh.is_member:
        return []
    return [mesh.devices[device] for device in local_devices(mesh)]


class Twin(NamedTuple):
    """A step and the other layout, which are run from one set of arguments.

    Args:
        layout: from the one to the other.
        is_exact: True if bits must be equal.
    """

    layout: OtherLayout
    is_exact: bool

    @property
    def step(self) -> TrainStep:
        """The step that is audited."""
        return self.layout.step

    @property
    def other(self) -> TrainStep:
        """The step in the other layout."""
        return self.layout.other

    @property
    def names(self) -> tuple[str, str]:
        """The two layouts in words: mesh, stage of ZeRO, and options that differ."""
        return _layout_name(self.step, self.other), _layout_name(self.other, self.step)

    @property
    def recorded(self) -> tuple[str, str]:
        """The two layouts in words, for a folder; that of the step does not depend on the other."""
        unequal = _unequal_options(self.other, self.step)
        return _recorded_layout(self.step), _recorded_layout(self.other, unequal)

    def compare(self, first: Run, other: Run) -> list[Difference]:
        """Return the differences of two runs in two layouts, on the devices of the caller.

        Metrics, gradients, parameters, state, buffers; the loss is a metric.
        """
        mesh = self.step.mesh
        dtype = None
        if not self.is_exact:
            options = self.step.options
            params = first.results["params"]
            dtype = lowest_dtype(params, self.step.gradient.options.compute, options.reduce)

        grads = copied_like(other.record.grads, first.record.grads)
        results = differences("gradient", first.record.grads, grads, mesh, dtype)
        for name, tree in first.results.items():
            other_tree = other.results[name]
            if name == "metrics":
                tree, other_tree = self._metrics_here(tree, other_tree)
            else:
                other_tree = copied_like(other_tree, tree)
            results += differences(KINDS[name], tree, other_tree, mesh, dtype)
        return results

    def _metrics_here(self, metrics: PyTree, others: PyTree) -> tuple[PyTree, PyTree]:
        """Return the metrics of both runs on the devices of the first.

        Without arrays, such as a row for each sample, where some processes are outside of a mesh.
        """
        mesh = self.other.mesh
        if is_outside(mesh):
            return metrics, copied_like(others, metrics)
        if mesh.numbers is not None:
            others = broadcast_to(without_arrays(others), source=mesh)
        if mesh.numbers is not None or self.step.mesh.numbers is not None:
            return without_arrays(metrics), without_arrays(others)
        return metrics, copied_like(others, metrics)


class AuditTrial:
    """The runs of one step in both layouts, all from the arguments of the first.

    Args:
        twin: the step and the other layout.
        arguments: of the step: copies of them are kept, with the state of torch's generators.
    """

    def __init__(self, twin: Twin, arguments: Sequence[PyTree]) -> None:
        self.twin = twin
        self.kept = [copies_of(tree) for tree in arguments]
        self.random = random_state()
        self.state_of_draws = torch.get_rng_state()
        # A first run agrees on more than later ones, so a new step must repeat it.
        self._is_step_new = _is_new(twin.step)
        self._is_other_new = _is_new(twin.other)

    def step_again(self) -> Run:
        """Repeat the step."""
        step = self.twin.step.replace() if self._is_step_new else self.twin.step
        arguments = [copies_of(tree) for tree in self.kept]
        self.random.set()
        return run_recorded(step, arguments)

    def other(self, first: Run) -> Run:
        """Run the step in the other layout.

        Up to rounding its update takes the gradients of the first run, since Adam makes a step of
        a rounding; its own are compared.
        """
        return self._run_other(self.twin.other, first)

    def other_again(self, first: Run) -> Run:
        """Repeat the run in the other layout."""
        other = self.twin.other.replace() if self._is_other_new else self.twin.other
        return self._run_other(other, first)

    def _run_other(self, step: TrainStep, first: Run) -> Run:
        arguments = self.twin.layout.arguments(self.kept)
        self.random.set()
        if self.twin.is_exact:
            return run_recorded(step, arguments)
        return run_recorded(step, arguments, partial(copied_like, first.record.grads))


def _is_new(step: TrainStep) -> bool:
    """Return True if a step has run on no parameters yet."""
    return all([plans.order is None for _, plans in step.gradient.plans])


def _layout_name(step: TrainStep, other: TrainStep) -> str:
    """Return the mesh and the stage of a step, and the options that another one has otherwise."""
    return ", ".join(_layout_words(step, _unequal_options(step, other)))


def _unequal_options(step: TrainStep, other: TrainStep) -> list[str]:
    """Return the names of the options that two steps have otherwise, without the mesh."""
    names: list[str] = []
    for name in OPTIONS:
        is_equal = getattr(step.options, name) is getattr(other.options, name)
        if name != "mesh" and not is_equal:
            names.append(name)
    return names


def _layout_words(step: TrainStep, names: Iterable[str]) -> list[str]:
    """Return the mesh and the stage of a step, and some of its options."""
    words = [step.mesh.grid, f"ZeRO {step.optimizer.stage}"]
    for name in names:
        value = getattr(step.options, name)
        if name == "schedule" and value is not None:
            value = f"{value.name} of {value.microbatches} microbatches"
        if isinstance(value, int | str):
            words.append(f"{name}={value}")
        elif value is not None:
            words.append(name)
    return words


def _recorded_layout(step: TrainStep, names: Iterable[str] = ()) -> str:
    """Return the layout of a step, its options that are no defaults, and some more of them."""
    chosen: dict[str, None] = {}  # a set in order
    for name, option in OPTIONS.items():
        if option.default is not MISSING and getattr(step.options, name) != option.default:
            chosen[name] = None
    chosen.update(dict.fromkeys(names))
    chosen.pop("slices", None)  # given or by default
    words = _layout_words(step, chosen)
    slices = step.gradient.options.slices
    if slices is not None:
        words.append(f"slices={slices}")
    return ", ".join(words)
