"""`Subject`: the model of a lab, and what is cached of it.

    model and its loss ─> LayeredModel ─> with the overrides of a state ─> program ─> Cost

A change of a state in the lab seldom changes the model. So layers are traced once for each model,
optimizer and machine, and layer plans once for all states that share layers alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from fshard.laboratory.state import LabState, StateError
from fshard.mesh.layout import P, PyTree
from fshard.mesh.layout.make import make_mesh
from fshard.parallelism.build import split_model
from fshard.parallelism.value import Parallelism
from fshard.plan.cluster import Cluster, cluster
from fshard.plan.layers import LayerTracer
from fshard.plan.models import Transformer
from fshard.plan.program import LayeredModel, Loss, layered_model
from fshard.tensor.plan import Plan

CACHED = 16
"""The models, and the layer plans, that are kept."""


@dataclass(frozen=True, eq=False)
class Subject:
    """The model of a lab: a module with what it needs, or none, for Transformers by their sizes.

    Args:
        module: with repeated layers; None: `LabState.model` has the sizes of one.
        batch: of one sample or more, for a module: see `fs.plan.search`.
        loss: of the output and the batch.
        blocks: the path of the layers.
    """

    module: nn.Module | None = field(default=None, repr=False)  # long
    batch: PyTree = field(default=None, repr=False)
    loss: Loss | None = None
    blocks: str | None = None
    _layered: Any = field(init=False, repr=False)
    _tracer: Any = field(init=False, repr=False)
    _plan: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        assign = object.__setattr__  # the class is frozen
        assign(self, "_layered", lru_cache(CACHED)(self._new_layered))
        assign(self, "_tracer", lru_cache(CACHED)(self._new_tracer))
        assign(self, "_plan", lru_cache(CACHED)(self._new_plan))

    @property
    def name(self) -> str:
        """The name of the module's class, or of the model by sizes."""
        return "Transformer" if self.module is None else type(self.module).__name__

    def layered(self, state: LabState) -> LayeredModel:
        """Return the model of a state, without its overrides."""
        if state.model is None and self.module is None:
            raise StateError(
                "lab: model must be the sizes of a Transformer, or a module; got null. The state "
                "of a module is used with it: fs.lab(model, batch, state=...).",
                "model",
            )
        return self._layered(state.model, state.optimizer)

    def tracer(self, state: LabState) -> LayerTracer:
        """Return the tracer of the layers, without overrides."""
        self.layered(state)  # raises without a model
        return self._tracer(state.model, state.optimizer, state.cluster)

    def overridden(self, state: LabState) -> LayeredModel:
        """Return the model of a state, with its overrides."""
        model = self.layered(state)
        overrides = overrides_on_mesh(state)
        if not overrides:
            return model
        _validate_patterns(overrides, model)
        styles, plan = self._styles(state, overrides, model)
        inner_specs = dict[str, P]()
        for pattern in overrides:
            name = pattern.replace("*", "0")
            inner_specs[pattern] = P() if plan is None else plan.spec(name)
        layouts = layouts_of(overrides, state.parallelism, inner_specs)
        recompute = state.parallelism.recompute
        return replace(
            model,
            styles=_in_program(styles, model.blocks, recompute),
            layouts=_in_program(layouts, model.blocks, recompute),
        )

    def _styles(
        self,
        state: LabState,
        overrides: Mapping[str, Mapping[str, int | None]],
        model: LayeredModel,
    ) -> tuple[dict[str, str], Plan | None]:
        """Return the styles that put the axis of layers on the dims of overrides, and the plan."""
        styles = styles_of(overrides, state.parallelism, model)
        plan = self.layer_plan(state, styles)
        misplaced = _misplaced(styles, overrides, plan)
        if misplaced:
            # A weight that is stored as (in, out), or a table that is also the head.
            for pattern in misplaced:
                styles[pattern] = _OTHER_STYLES[styles[pattern]]
            plan = self.layer_plan(state, styles)
            misplaced = _misplaced(styles, overrides, plan)
        for pattern in misplaced:
            raise StateError(
                f"lab: the dim of model in {pattern} must be one that its layer can shard; "
                f"got {overrides[pattern]['model']}.",
                f"overrides.{pattern}",
            )
        return styles, plan

    def layer_plan(self, state: LabState, styles: Mapping[str, str]) -> Plan | None:
        """Return how layers are sharded in a state; None if no devices share them."""
        plan = state.parallelism
        if not plan.inner_axes:
            return None
        return self._plan(state.model, state.optimizer, plan.of_layer(), tuple(styles.items()))

    # -- what is cached ---------------------------------------------------------------------------

    def _new_layered(self, model: Transformer | None, optimizer: str) -> LayeredModel:
        opt = LabState(model=model, devices=1, optimizer=optimizer).new_optimizer()
        if model is not None:
            return layered_model(model, None, opt, None, None)
        assert self.module is not None
        return layered_model(self.module, self.batch, opt, self.loss, self.blocks)

    def _new_tracer(self, model: Transformer | None, optimizer: str, machine: str) -> LayerTracer:
        return LayerTracer(self._layered(model, optimizer), machine_of(machine))

    def _new_plan(
        self,
        model: Transformer | None,
        optimizer: str,
        plan: Parallelism,
        styles: tuple[tuple[str, str], ...],
    ) -> Plan | None:
        layered = self._layered(model, optimizer)
        module = layered.build(1)
        sample = layered.arguments(layered.batch)
        ((_, layer_plan),) = split_model(
            module, plan, sample=sample, blocks=layered.blocks, check=False, styles=dict(styles)
        )
        return layer_plan


@lru_cache
def machine_of(name: str) -> Cluster:
    """Return the cluster of a name."""
    return cluster(name)


# -- overrides -------------------------------------------------------------------------------------


class _MovedAxes(NamedTuple):
    """The axes of an override: those of layers, and those that ZeRO shards along."""

    of_layers: dict[str, int | None]
    of_zero: dict[str, int | None]


def overrides_on_mesh(state: LabState) -> dict[str, dict[str, int | None]]:
    """Return the overrides of a state along axes that its mesh has."""
    sizes = state.parallelism.axes
    overrides = dict[str, dict[str, int | None]]()
    for pattern, dims in state.overrides.items():
        present = {axis: dim for axis, dim in dims.items() if sizes.get(axis, 1) > 1}
        if present:
            overrides[pattern] = present
    return overrides


def _validate_patterns(overrides: Mapping[str, Any], model: LayeredModel) -> None:
    """Raise unless each pattern is that of a parameter, and each dim is one that it has."""
    shapes = {name: x.shape for name, x in model.build(1).named_parameters()}
    for pattern, dims in overrides.items():
        path = f"overrides.{pattern}"
        name = pattern.replace("*", "0")
        if name not in shapes:
            raise StateError(
                f"lab: overrides must be of parameters; got {pattern!r}. They are those in the "
                "table of leaves.",
                path,
            )
        for axis, dim in dims.items():
            if dim is not None and dim >= len(shapes[name]):
                raise StateError(
                    f"lab: the dim of {axis} in {pattern} must be less than "
                    f"{len(shapes[name])}; got {dim}.",
                    path,
                )


def _moved_axes(dims: Mapping[str, int | None], plan: Parallelism, path: str) -> _MovedAxes:
    moved = _MovedAxes({}, {})
    for axis, dim in dims.items():
        if axis in plan.zero_axes:
            moved.of_zero[axis] = dim
        elif axis in plan.inner_axes and axis == "model":
            moved.of_layers[axis] = dim
        else:
            raise StateError(
                f"lab: the axis of an override must be one of ZeRO, {', '.join(plan.zero_axes)}, "
                f'or "model" with tensor_mode="1d"; got {axis!r}.',
                path,
            )
    return moved


def styles_of(
    overrides: Mapping[str, Mapping[str, int | None]], plan: Parallelism, model: LayeredModel
) -> dict[str, str]:
    """Return the styles of weights whose axis of layers has another dim: see `tensor_parallel`."""
    styles = dict[str, str]()
    module = model.build(1)
    for pattern, dims in overrides.items():
        moved = _moved_axes(dims, plan, f"overrides.{pattern}").of_layers
        if not moved:
            continue
        path, _, _ = pattern.replace("*", "0").rpartition(".")
        is_table = isinstance(module.get_submodule(path), nn.Embedding)
        # A linear weight is (out, in), a table of words is (words, features).
        styles_by_dim = {
            None: "replicated",
            0: "words" if is_table else "column",
            1: "column" if is_table else "row",
        }
        styles[pattern] = styles_by_dim[moved["model"]]
    return styles


_OTHER_STYLES = {"column": "row", "row": "column", "words": "column"}
"""The style that shards the other dim of a weight."""


def _misplaced(
    styles: Mapping[str, str],
    overrides: Mapping[str, Mapping[str, int | None]],
    plan: Plan | None,
) -> list[str]:
    """Return the patterns of weights whose styles shard another dim than that of the override."""
    misplaced = list[str]()
    for pattern in styles:
        assert plan is not None
        dim = overrides[pattern]["model"]
        name = pattern.replace("*", "0")
        dims = plan.spec(name).dims(len(plan.shapes[name]))
        sharded = [number for number, axes in enumerate(dims) if "model" in axes]
        if styles[pattern] != "replicated" and sharded != [dim]:
            misplaced.append(pattern)
    return misplaced


def layouts_of(
    overrides: Mapping[str, Mapping[str, int | None]],
    plan: Parallelism,
    inner_specs: Mapping[str, P],
) -> dict[str, P]:
    """Return the specs of leaves whose axes of ZeRO have other dims.

    Args:
        overrides: by pattern.
        plan: of the state.
        inner_specs: the specs of these leaves along the axes of layers.
    """
    layouts = dict[str, P]()
    for pattern, dims in overrides.items():
        path = f"overrides.{pattern}"
        moved = _moved_axes(dims, plan, path).of_zero
        if not moved:
            continue
        if plan.in_stages:
            raise StateError(
                "lab: the axes of ZeRO must be as they are with pipeline > 1, where each stage has "
                f"rules of its own; got {', '.join(moved)} of {pattern}.",
                path,
            )
        inner = inner_specs[pattern]
        most = max([len(inner.entries), *[dim + 1 for dim in moved.values() if dim is not None]])
        entries = [list(axes) for axes in inner.dims(most)]
        for axis in reversed(plan.zero_axes):  # the outer axis of a dim is first
            dim = moved.get(axis)
            if dim is not None:
                entries[dim].insert(0, axis)
        flat = list[str]()
        if plan.zero_stage == 3:
            flat = [axis for axis in plan.zero_axes if axis not in moved]
        layouts[pattern] = P(*[tuple(axes) or None for axes in entries], flat=tuple(flat) or None)
    return layouts


def _in_program(by_pattern: Mapping[str, Any], blocks: str, recompute: object) -> dict[str, Any]:
    """Return values by the patterns of a program, in which a recomputed layer is in another one."""
    if recompute == "never":
        return dict(by_pattern)
    inner = f"{blocks}.*."
    renamed = dict[str, Any]()
    for pattern, value in by_pattern.items():
        renamed[pattern.replace(inner, f"{inner}layer.", 1)] = value
    return renamed


def abstract_mesh(plan: Parallelism) -> Any:
    """Return the mesh of a plan without devices."""
    return make_mesh(plan.axes, runtime="abstract")
