"""Plugins: which mesh, where parameters, gradients and optimizer state lie, and in which precision.

plugin                   parameters at rest    gradients               optimizer state
DDPPlugin                whole                 summed                  whole
ZeroPlugin(stage=1)      whole                 in pieces, once a step  in pieces
ZeroPlugin(stage=2)      whole                 in pieces, at once      in pieces
FSDPPlugin               in pieces             in pieces               in pieces
HybridParallelPlugin     those of a stage on its devices, and along the other axes as its `zero_stage` says
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, cast

import torch
from torch import nn

from fshard.errors import LayoutError
from fshard.mesh.make import make_mesh
from fshard.mesh.mesh import Mesh
from fshard.mesh.runtimes.together import process_count
from fshard.mesh.scope import here
from fshard.mesh.spec import as_axes
from fshard.optim.partition import Stage
from fshard.pipeline.builders import pipeline_schedule
from fshard.pipeline.schedule import Schedule
from fshard.pipeline.stages import Balance, check_balance, split_stages
from fshard.transforms.arrangement import Arrangement
from fshard.transforms.complaints import changed, complaints_of, misfits, not_known
from fshard.transforms.options import wrong_options
from fshard.transforms.patterns import Choice
from fshard.transforms.rules import fsdp
from fshard.transforms.stage_functions import How
from fshard.transforms.step import Precision
from fshard.transforms.value_and_grad import OF_LOSSES, OF_STAGES

Unused = Literal["skip", "zero"]
_OPTIONS = {"bucket", "in_flight", "prefetch", "live_units", "reduce", "reduce_once", "skips", "inputs", "dynamic"}
"""What of `value_and_grad` a plugin leaves open."""
_USUAL = {"slices": {"slices": 0}, "zero_stage": {"zero_stage": 3}, "pipeline": {"pipeline": 2, "mesh": None}}
"""With what, if these are no such numbers, nothing else is wrong because of them."""
_OF_STAGES = ("microbatches", "schedule", "chunks", "balance", "sample", "blocks", "recompute")


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What all plugins have.

    Args:
        mesh: the devices; None: all there are, along one axis "data".
        axis: along which the batch is cut; None: all axes of the mesh.
        precision: "bf16" or "fp16" computes in that dtype; parameters and state stay in their own.
        unused: what a parameter that no device has used gets: "skip", nothing, as in torch.optim, so that neither its state
            nor its count of steps moves; "zero", a gradient of zeros, as in JAX.
        sync_batchnorm: BatchNorm takes mean and variance over all devices.
        reproducible: the same bits on any number of devices that divides `slices`, if a sample's loss depends on it alone.
        slices: into how many a batch is cut then.
        seed: of random draws in the model.
        buffers: frozen parameters that the forward updates, a momentum encoder say: see `functionalize`.
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
        wrong, usual = self.misfits(), copy(self)
        for name in wrong:
            vars(usual).update(_USUAL.get(name) or {name: getattr(type(self), name, {})})
        if told := [*wrong.values(), *usual.complaints()] or complaints_of(type(self).tried, self):
            raise LayoutError(f"{type(self).__name__}: {'; '.join(told)}.")

    def misfits(self) -> dict[str, str]:
        """Return what is no such thing as its type says, by name."""
        return misfits(type(self), vars(self), seed=0)

    def tried(self) -> None:
        """Raise if what is arranged has no meaning, on a mesh of the axes that are named if none was given."""
        sizes = tuple(self.sizes().items())
        self.arranged(self.mesh or Mesh(sizes, "virtual", "cpu")).check()

    def sizes(self) -> dict[str, int]:
        """Return the axes that are named, and how many devices are needed along each."""
        return dict.fromkeys(as_axes(self.axis or "data"), 1)

    def complaints(self) -> list[str]:
        """Return all that is wrong with what was given, where each is by itself what it may be."""
        axes = complaints_of(self.axes, self.mesh) if self.mesh is not None else complaints_of(as_axes, self.axis)
        known = _OPTIONS & {*(OF_STAGES if self.in_stages() else OF_LOSSES)}
        wrong = axes + not_known(sorted(known), options=self.options) + wrong_options(self.reproducible, self.options)
        if self.zero() != 3 and (idle := {"prefetch", "live_units"} & {*self.options}):
            wrong.append(f"options={sorted(idle)} have no meaning where nothing is gathered: stage {self.zero()}")
        if self.reproducible and self.sync_batchnorm:
            wrong.append("reproducible=True computes slices by themselves, sync_batchnorm=True all devices together")
        if changed(self, ["slices"]) and (self.in_stages() or not self.reproducible):
            wrong.append("slices= has no meaning without reproducible=True, and none for stages")
        if self.mesh is not None and not axes and self.reproducible and not self.in_stages():
            parts = prod(self.mesh.shape[axis] for axis in self.axes(self.mesh))
            own, left = divmod(self.slices, parts)
            if left or (parts > 1 and own & (own - 1)):
                wrong.append(f"{self.slices} slices are not 1, 2, 4, ... for each of {parts} devices")
        return wrong

    def zero(self) -> Stage:
        """Return the stage of ZeRO."""
        return 0

    def in_stages(self) -> bool:
        """Return whether the model is cut into stages."""
        return False

    def laid_on(self) -> Mesh:
        """Return the mesh: that which was given, that of `fs.run`, or all processes."""
        if self.mesh is not None:
            return self.mesh
        return scope.mesh if (scope := here()) is not None else make_mesh({"data": process_count()})

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes along which the batch is cut."""
        return mesh.axis_names if self.axis is None else mesh.check_axes(self.axis, "axis=")

    def arranged(self, mesh: Mesh | None = None) -> Arrangement:
        """Return how all lies on a mesh; None: that of `laid_on`."""
        mesh = mesh or self.laid_on()
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
            pieces=self.axes(mesh),
            scaled=self.precision == "fp16",
            sync_batchnorm=self.sync_batchnorm,
            seed=self.seed,
            zeros=self.unused == "zero",
            buffers=self.buffers,
            options={**options, **self.options},
        )


@dataclass(frozen=True, kw_only=True)
class DDPPlugin(Plugin):
    """Data parallelism: all devices have everything, and sum gradients.

    >>> DDPPlugin(precision="fp8", seed=-1)
    Traceback (most recent call last):
    fshard.errors.LayoutError: DDPPlugin: precision is "bf16", "fp16" or None, not 'fp8'; seed is a whole number from 0 on, ...
    """


@dataclass(frozen=True, kw_only=True)
class ZeroPlugin(Plugin):
    """ZeRO 1 and 2: the optimizer's state is divided.  `stage` 2 reduces gradients in each backward, 1 once a step."""

    stage: Literal[1, 2] = 1

    def misfits(self) -> dict[str, str]:
        wrong = super().misfits()
        return wrong | {k: f"{wrong[k]}: stage 0 is DDPPlugin, stage 3 FSDPPlugin" for k in {"stage"} & {*wrong}}

    def zero(self) -> Stage:
        return self.stage


@dataclass(frozen=True, kw_only=True)
class FSDPPlugin(Plugin):
    """ZeRO 3: parameters are divided too, and gathered as they are used.

    Args:
        unit: what is gathered together: a pattern of paths ("blocks[*]"), several, or a size in bytes; None: each repeated
            block.
        shard_axis: along which parameters and state are cut; None: all of `axis`.  If it is less, there are replicas along
            the others (hybrid sharding): {"node": 2, "gpu": 8} with shard_axis="gpu", say.
        reshard_after_forward: let parameters go after the forward, and gather them again for the backward.
    """

    unit: str | Sequence[str] | int | None = None
    shard_axis: str | Sequence[str] | None = None
    reshard_after_forward: bool = True

    def zero(self) -> Stage:
        return 3

    def complaints(self) -> list[str]:
        wrong = super().complaints() + complaints_of(lambda unit: fsdp((), unit=unit), self.unit)
        if self.mesh is None:
            wrong += complaints_of(as_axes, self.shard_axis)
        elif self.shard_axis is not None:
            own, all_axes = complaints_of(self.pieces, self.mesh), complaints_of(self.axes, self.mesh)
            strange = () if own or all_axes else {*self.pieces(self.mesh)} - {*self.axes(self.mesh)}
            wrong += [
                *own,
                *(f"shard_axis {axis} does not cut the batch, which axis= says" for axis in sorted(strange)),
            ]
        return wrong

    def sizes(self) -> dict[str, int]:
        return super().sizes() | dict.fromkeys(as_axes(self.shard_axis or ()), 1)

    def pieces(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes along which parameters and state are cut."""
        return self.axes(mesh) if self.shard_axis is None else mesh.check_axes(self.shard_axis, "shard_axis=")

    def arranged(self, mesh: Mesh | None = None) -> Arrangement:
        how = super().arranged(mesh)
        pieces = self.pieces(how.mesh)
        options = {**how.options, "reshard_after_forward": self.reshard_after_forward}
        return replace(how, pieces=pieces, rules=fsdp(pieces, unit=self.unit), options=options)


@dataclass(frozen=True, kw_only=True)
class HybridParallelPlugin(Plugin):
    """Stages of a pipeline along one axis, any stage of ZeRO along the others.

    Args:
        pipeline: how many devices the model is cut over.
        zero_stage: 0 to 3, of the devices that have the same stages.
        microbatches: into how many each device's part of a batch is cut.
        schedule: a name that `pipeline_schedule` knows.
        chunks: how many stages each device has; None: one, or two where the schedule wants them.
        balance: what stages have alike: see `split_stages`; so for `sample` and `blocks`.
        sample: a microbatch, if `balance` or `blocks` ask for one.
        blocks: where the blocks of a model stand that is no row of layers.
        recompute: which activations are computed again: see `stage_functions`.
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
        return self.pipeline > 1

    def complaints(self) -> list[str]:
        wrong = super().complaints()
        if self.mesh is not None and (found := self.mesh.shape.get(self.pipeline_axis, 1)) != self.pipeline:
            found = found if self.pipeline_axis in self.mesh.shape else "no"
            wrong.append(f'pipeline={self.pipeline}, but "{self.pipeline_axis}" of {self.mesh} has {found} devices')
        wrong += (plan := complaints_of(HybridParallelPlugin.plan, self))
        if not plan or isinstance(self.balance, str):
            stages = 0 if plan else len(self.plan().placement)
            wrong += complaints_of(lambda balance: check_balance(balance, stages, self.sample), self.balance)
        if self.mesh is None and self.in_stages() and self.pipeline_axis == "data":
            wrong.append('pipeline_axis="data" is the axis of the batch')
        if self.pipeline == 1 and (idle := changed(self, _OF_STAGES)):
            wrong.append(f"{idle} has no meaning without stages: pipeline=1")
        if self.in_stages() and not wrong and (devices := 1 + max(self.plan().placement)) != self.pipeline:
            lays = f"{self.schedule} lays {len(self.plan().placement)} stages on {devices} devices"
            wrong.append(f"{lays}, not on {self.pipeline}: change chunks={self.chunks}")
        if self.sync_batchnorm:
            wrong.append("sync_batchnorm=True has no meaning for stages, whose microbatches come one after the other")
        return wrong

    def sizes(self) -> dict[str, int]:
        return super().sizes() | {self.pipeline_axis: self.pipeline}

    def plan(self) -> Schedule:
        """Return the schedule."""
        chunks = self.chunks or (1 if self.schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2") else 2)
        devices = self.pipeline if self.schedule in ("interleaved", "bfs") else None
        return pipeline_schedule(
            self.schedule, stages=chunks * self.pipeline, microbatches=self.microbatches, devices=devices
        )

    def laid_on(self) -> Mesh:
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
        """Return the axes along which the batch is cut: all but that of the stages."""
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
