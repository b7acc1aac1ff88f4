"""Plugins: mesh, layouts of parameters, gradients and optimizer state, and precision.

plugin                   parameters       gradients                     optimizer state
DDPPlugin                replicated       all-reduced                   replicated
ZeroPlugin(stage=1)      replicated       reduce-scattered once a step  sharded
ZeroPlugin(stage=2)      replicated       reduce-scattered per unit     sharded
FSDPPlugin               sharded          reduce-scattered per unit     sharded
HybridParallelPlugin     those of a stage on its devices, and along the other axes by its `zero_stage`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, cast

import torch
from torch import nn

from fshard.booster.arrangement import Arrangement
from fshard.errors import LayoutError
from fshard.mesh.layout import Mesh, as_axes
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.runtimes.launchers import process_count
from fshard.mesh.spmd.scope import here
from fshard.optim.partition import Stage
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.split.balance import Balance, check_balance
from fshard.pipeline.split.stages import split_stages
from fshard.transforms.options import flag, integer, must_be, one_of, refusal, unknown, wrong_options
from fshard.transforms.patterns import Choice
from fshard.transforms.shard_params import fsdp
from fshard.transforms.stages.functions import How
from fshard.transforms.train_step import Precision
from fshard.transforms.value_and_grad import OF_LOSSES, OF_STAGES

Unused = Literal["skip", "zero"]
_OPTIONS = {"bucket", "in_flight", "prefetch", "live_units", "reduce", "reduce_once", "skips", "inputs", "dynamic"}
"""The options of `value_and_grad` that no field of a plugin sets."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """The options of every plugin.

    Args:
        mesh: the devices; None: all there are, along one axis "data".
        axis: that shards the batch; None: all axes of the mesh.
        precision: "bf16" or "fp16" computes in that dtype; parameters and state stay in their own.
        unused: a parameter that no device has used gets: "skip", nothing, as in torch.optim, so that neither its state
            nor its count of steps changes; "zero", a gradient of zeros, as in JAX.
        sync_batchnorm: BatchNorm takes mean and variance over all devices.
        reproducible: the same bits on any number of devices that divides `slices`, if a sample's loss depends on it alone.
        slices: number of slices of a batch then.
        seed: of random draws in the model, and of lazy modules.
        buffers: frozen parameters that the forward updates, such as a momentum encoder: see `functionalize`.
        options: further ones of `value_and_grad`: bucket, in_flight, live_units, prefetch, reduce, ...
        why: the table by which `auto_plugin` has chosen it.
    """

    mesh: Mesh | None = None
    axis: str | Sequence[str] | None = None
    precision: Precision | None = None
    unused: Unused = "skip"
    sync_batchnorm: bool = False
    reproducible: bool = False
    slices: int = 8
    seed: int = 0
    buffers: Choice = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    why: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        if wrong := self.invalid() or self.conflicts():
            raise LayoutError(f"{type(self).__name__}: {'; '.join(wrong)}.")

    def invalid(self) -> list[str]:
        """List the invalid fields."""
        wrong = must_be("mesh", "a Mesh or None", self.mesh, isinstance(self.mesh, Mesh | None))
        wrong += _wrong_axes("axis", self.axis, self.mesh)
        wrong += one_of("precision", self.precision, "bf16", "fp16", None)
        wrong += one_of("unused", self.unused, "skip", "zero")
        wrong += flag("sync_batchnorm", self.sync_batchnorm) + flag("reproducible", self.reproducible)
        wrong += integer("slices", self.slices) + integer("seed", self.seed, 0)
        known = _OPTIONS & {*(OF_STAGES if self.in_stages() else OF_LOSSES)}
        return wrong + unknown("options", self.options, sorted(known)) + wrong_options(self.reproducible, self.options)

    def conflicts(self) -> list[str]:
        """List the fields that contradict each other, or the mesh."""
        wrong: list[str] = []
        if self.zero() != 3 and (idle := {"prefetch", "live_units"} & {*self.options}):
            wrong.append(f"options={sorted(idle)} need parameters that are sharded: stage 3, not {self.zero()}")
        if self.reproducible and self.sync_batchnorm:
            wrong.append("sync_batchnorm=True needs all devices together, reproducible=True computes slices one by one")
        if self.slices != Plugin.slices and (self.in_stages() or not self.reproducible):
            wrong.append("slices= needs reproducible=True, and a model that is not cut into stages")
        if self.mesh is not None and self.reproducible and not self.in_stages():
            parts = prod(self.mesh.shape[axis] for axis in self.axes(self.mesh))
            own, left = divmod(self.slices, parts)
            if left or (parts > 1 and own & (own - 1)):
                wrong.append(f"slices must be 1, 2, 4, ... for each of {parts} devices, got {self.slices} in all")
        return wrong

    def zero(self) -> Stage:
        """Return the stage of ZeRO."""
        return 0

    def in_stages(self) -> bool:
        """Return True if the model is split into stages."""
        return False

    def default_mesh(self) -> Mesh:
        """Return the mesh: that which was given, that of `fs.run`, or all processes."""
        if self.mesh is not None:
            return self.mesh
        return scope.mesh if (scope := here()) is not None else make_mesh({"data": process_count()})

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes that shard the batch."""
        return mesh.axis_names if self.axis is None else mesh.check_axes(self.axis, "axis=")

    def arranged(self, mesh: Mesh | None = None) -> Arrangement:
        """Return the arrangement on a mesh; None: that of `default_mesh`."""
        mesh = mesh or self.default_mesh()
        options = {
            "compute": {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}[self.precision],
            "reduce": torch.float32 if self.precision == "fp16" else None,
            "reproducible": self.reproducible,
            "slices": self.slices if self.reproducible else None,
            "reduce_once": self.zero() < 2,
        }
        return Arrangement(
            mesh=mesh,
            axes=self.axes(mesh),
            stage=self.zero(),
            zero_axes=self.axes(mesh),
            scaled=self.precision == "fp16",
            sync_batchnorm=self.sync_batchnorm,
            seed=self.seed,
            zeros=self.unused == "zero",
            buffers=self.buffers,
            options={**options, **self.options},
        )


@dataclass(frozen=True, kw_only=True)
class DDPPlugin(Plugin):
    """Data parallelism: parameters are replicated and gradients all-reduced.

    >>> DDPPlugin(precision="fp8", seed=-1)
    Traceback (most recent call last):
    fshard.errors.LayoutError: DDPPlugin: precision must be 'bf16', 'fp16' or None, got 'fp8'; seed must be an integer >= 0, ...
    """


@dataclass(frozen=True, kw_only=True)
class ZeroPlugin(Plugin):
    """ZeRO 1 and 2: the optimizer's state is sharded.  `stage` 2 reduces gradients in each backward, 1 once a step."""

    stage: Literal[1, 2] = 1

    def invalid(self) -> list[str]:
        wrong = one_of("stage", self.stage, 1, 2)
        return super().invalid() + [f"{text}: stage 0 is DDPPlugin, stage 3 FSDPPlugin" for text in wrong]

    def zero(self) -> Stage:
        return self.stage


@dataclass(frozen=True, kw_only=True)
class FSDPPlugin(Plugin):
    """ZeRO 3: parameters are sharded too, and all-gathered as they are used.

    Args:
        unit: parameters that are all-gathered together: a pattern of paths ("blocks[*]"), several, or a size in bytes;
            None: each repeated block.
        shard_axis: that shards parameters and state; None: all of `axis`. Along the others they are replicated
            (hybrid sharding), such as {"node": 2, "gpu": 8} with shard_axis="gpu".
        reshard_after_forward: free unsharded parameters after the forward, and all-gather them again for the backward.
    """

    unit: str | Sequence[str] | int | None = None
    shard_axis: str | Sequence[str] | None = None
    reshard_after_forward: bool = True

    def zero(self) -> Stage:
        return 3

    def invalid(self) -> list[str]:
        wrong = super().invalid() + flag("reshard_after_forward", self.reshard_after_forward)
        return wrong + refusal(lambda: fsdp((), unit=self.unit)) + _wrong_axes("shard_axis", self.shard_axis, self.mesh)

    def conflicts(self) -> list[str]:
        strange = {*self.zero_axes(self.mesh)} - {*self.axes(self.mesh)} if self.mesh is not None else ()
        return super().conflicts() + [f'shard_axis must be among axis=, got "{axis}"' for axis in sorted(strange)]

    def zero_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes that shard parameters and state."""
        return self.axes(mesh) if self.shard_axis is None else mesh.check_axes(self.shard_axis, "shard_axis=")

    def arranged(self, mesh: Mesh | None = None) -> Arrangement:
        how = super().arranged(mesh)
        zero_axes = self.zero_axes(how.mesh)
        options = {**how.options, "reshard_after_forward": self.reshard_after_forward}
        return replace(how, zero_axes=zero_axes, rules=fsdp(zero_axes, unit=self.unit), options=options)


@dataclass(frozen=True, kw_only=True)
class HybridParallelPlugin(Plugin):
    """Stages of a pipeline along one axis, any stage of ZeRO along the others.

    Args:
        pipeline: number of devices of the pipeline.
        zero_stage: 0 to 3, of the devices that have the same stages.
        microbatches: number of microbatches of each device's part of a batch.
        schedule: a name of `pipeline_schedule`.
        chunks: number of stages per device; None: one, or two where the schedule needs them.
        balance, sample, blocks: how the model is split into stages: see `split_stages`.
        recompute: which activations are recomputed: see `stage_functions`.
        pipeline_axis: the axis of the stages.
    """

    pipeline: int = 1
    zero_stage: Stage = 0
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    balance: Balance = "parameters"
    sample: Any = None
    blocks: str | Sequence[str] | None = None
    recompute: How = "never"
    pipeline_axis: str = "pipe"

    def zero(self) -> Stage:
        return self.zero_stage

    def in_stages(self) -> bool:
        return self.pipeline != 1

    def invalid(self) -> list[str]:
        wrong = [*integer("pipeline", self.pipeline), *one_of("zero_stage", self.zero_stage, 0, 1, 2, 3)]
        wrong += integer("microbatches", self.microbatches)
        wrong += [] if self.chunks is None else integer("chunks", self.chunks)
        wrong += wrong_options(False, {"recompute": self.recompute})
        if not wrong and self.in_stages():
            wrong += (plan := refusal(self.plan))
            wrong += [] if plan else refusal(lambda: check_balance(self.balance, self.plan().stages, self.sample))
        return super().invalid() + wrong

    def conflicts(self) -> list[str]:
        wrong, axis = super().conflicts(), self.pipeline_axis
        if self.mesh is not None and (found := self.mesh.shape.get(axis, 1)) != self.pipeline:
            wrong.append(f'pipeline must be the size of "{axis}" in {self.mesh}, {found}, got {self.pipeline}')
        if self.mesh is None and self.in_stages() and axis == "data":
            wrong.append('pipeline_axis must not be the axis of the batch, "data"')
        if self.sync_batchnorm:
            wrong.append("sync_batchnorm=True has no meaning for stages, whose microbatches run in sequence")
        if not self.in_stages():
            given = [name for name in _OF_STAGES if _is_given(self, name)]
            return wrong + [f"{', '.join(given)} must be left out without stages: pipeline=1"] * bool(given)
        if (plan := self.plan()).devices != self.pipeline:
            lays = f"{self.schedule} puts {plan.stages} stages on {plan.devices} devices"
            wrong.append(f"{lays}, not on {self.pipeline}: change chunks={self.chunks}")
        return wrong

    def plan(self) -> Schedule:
        """Return the schedule."""
        chunks = self.chunks or (1 if self.schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2") else 2)
        devices = self.pipeline if self.schedule in ("interleaved", "bfs") else None
        return pipeline_schedule(
            self.schedule, stages=chunks * self.pipeline, microbatches=self.microbatches, devices=devices
        )

    def default_mesh(self) -> Mesh:
        """Return the mesh: that which was given, that of `fs.run`, or all processes, the stages along the last axis."""
        if self.mesh is not None:
            return self.mesh
        scope = here()
        count = scope.mesh.root_size if scope is not None else process_count()
        if count % self.pipeline:
            raise LayoutError(
                f"HybridParallelPlugin: pipeline={self.pipeline} does not divide the {count} devices there are."
            )
        return make_mesh({"data": count // self.pipeline, self.pipeline_axis: self.pipeline})

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes that shard the batch: all but that of the stages."""
        chosen = super().axes(mesh)
        return tuple(axis for axis in chosen if axis != self.pipeline_axis)

    def arranged(self, mesh: Mesh | None = None) -> Arrangement:
        how = super().arranged(mesh)
        if self.zero_stage == 3 and how.axes:
            how = replace(how, rules=fsdp(how.axes))
        if not self.in_stages():
            return how
        of_both = {name: how.options[name] for name in ("compute", "reduce", "reproducible", *self.options)}
        own = {"schedule": self.plan(), "axis": self.pipeline_axis, "recompute": self.recompute}
        return replace(how, cut=self.stages_of, options={**of_both, **own})

    def stages_of(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the stages of a model."""
        count, layers = len(self.plan().placement), cast(Any, model)
        return split_stages(layers, count, self.balance, sample=self.sample, blocks=cast(Any, self.blocks))


_OF_STAGES = ("microbatches", "schedule", "chunks", "balance", "sample", "blocks", "recompute")


def _is_given(plugin: HybridParallelPlugin, name: str) -> bool:
    given, usual = getattr(plugin, name), getattr(HybridParallelPlugin, name)
    return type(given) is not type(usual) or given != usual


def _wrong_axes(name: str, axes: Any, mesh: Mesh | None) -> list[str]:
    """List the errors of axis names, of a mesh if there is one."""
    if wrong := refusal(lambda: as_axes(axes)):
        return [f"{name}: {wrong[0]}"]
    names = as_axes(axes)
    wrong = must_be(name, "axes that are named once", axes, len({*names}) == len(names))
    return wrong + (refusal(lambda: mesh.check_axes(names, f"{name}=")) if isinstance(mesh, Mesh) else [])
