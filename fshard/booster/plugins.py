"""Plugins: mesh, layouts of parameters, gradients and optimizer state, and precision.

plugin                   parameters       gradients                     optimizer state
DDPPlugin                replicated       all-reduced                   replicated
ZeroPlugin(stage=1)      replicated       reduce-scattered once a step  sharded
ZeroPlugin(stage=2)      replicated       reduce-scattered per unit     sharded
FSDPPlugin               sharded          reduce-scattered per unit     sharded
HybridParallelPlugin     those of a stage on its devices, of layers by a plan, and along the axes of data by its `zero_stage`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, cast

import torch
from torch import nn

from fshard.comm.graph import Graph
from fshard.comm.replicas import ReplicaGroup, gossip_rule, local_sgd_rule
from fshard.foreign_names import NAMES
from fshard.mesh.layout import Mesh, P
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.runtimes.launchers import process_count
from fshard.mesh.spmd.scope import here
from fshard.optim.partition import Stage
from fshard.tensor.plan import Plan
from fshard.transforms.options import flag, integer, must_be, one_of, refusal, unknown, wrong_options
from fshard.transforms.patterns import Choice
from fshard.transforms.shard_params import Rules, fsdp
from fshard.transforms.train_step import Precision
from fshard.transforms.value_and_grad import OF_LOSSES, OF_STAGES

_OPTIONS = {"bucket", "in_flight", "prefetch", "live_units", "reduce", "reduce_once", "skips", "inputs", "dynamic"}
"""The options of `value_and_grad` that no field of a plugin sets."""
_PRECISIONS: dict[Any, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """The options of every plugin.

    Args:
        mesh: the devices; None: that of `fs.run`, or all processes, along one axis "data".
        axis: that shards the batch; None: all axes of the mesh.
        precision: "bf16" or "fp16", or the dtype, computes in it; parameters and state stay in their own.
        unused: a parameter that no device has used gets: "skip", nothing, as in torch.optim, so that neither its state
            nor its count of steps changes; "zero", a gradient of zeros, as in JAX.
        sync_batchnorm: BatchNorm takes mean and variance over all devices.
        reproducible: the same bits on any number of devices that divides `slices`, if a sample's loss depends on it alone.
        slices: number of slices of a batch then.
        seed: of random draws in the model, and of lazy modules.
        buffers: frozen parameters that the forward updates, such as a momentum encoder: see `functionalize`.
        options: further ones of `value_and_grad`: bucket, in_flight, live_units, prefetch, reduce, ...
    """

    mesh: Mesh | None = None
    axis: str | Sequence[str] | None = None
    precision: Precision | torch.dtype | None = None
    unused: Literal["skip", "zero"] = "skip"
    sync_batchnorm: bool = False
    reproducible: bool = False
    slices: int = 8
    seed: int = 0
    buffers: Choice = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def __new__(cls, *args: Any, **options: Any) -> Self:
        foreign = {name: x for name, x in options.items() if name in NAMES}
        if errors := unknown(cls.__name__, foreign, cls.__dataclass_fields__):
            raise TypeError(f"{errors[0]}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.precision, torch.dtype):
            object.__setattr__(self, "precision", _PRECISIONS.get(self.precision, self.precision))
        if wrong := self.errors():
            raise ValueError(f"{type(self).__name__}: {'; '.join(wrong)}.")

    def errors(self) -> list[str]:
        """List the invalid fields, and those that contradict each other or the mesh."""
        wrong, mesh = must_be("mesh", "a Mesh or None", self.mesh, isinstance(self.mesh, Mesh | None)), self.mesh
        wrong += one_of("precision", self.precision, "bf16", "fp16", None)
        wrong += one_of("unused", self.unused, "skip", "zero")
        wrong += flag("sync_batchnorm", self.sync_batchnorm) + flag("reproducible", self.reproducible)
        wrong += integer("slices", self.slices) + integer("seed", self.seed, 0)
        known = _OPTIONS & {*(OF_STAGES if self.in_stages() else OF_LOSSES)}
        wrong += unknown("options", self.options, sorted(known))
        wrong += wrong_options({**self.options, "reproducible": self.reproducible})
        if self.reproducible and self.sync_batchnorm:
            wrong.append("sync_batchnorm=True needs all devices together, reproducible=True computes slices one by one")
        if isinstance(mesh, Mesh):
            wrong += dict.fromkeys(refusal(lambda: self.axes(mesh)) + refusal(lambda: self.zero_axes(mesh)))
        return wrong

    def zero(self) -> Stage:
        """Return the stage of ZeRO."""
        return 0

    def in_stages(self) -> bool:
        """Return True if the model is split into stages."""
        return False

    def stages_of(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the stages of a model."""
        return [model]

    def default_mesh(self) -> Mesh:
        """Return the mesh: that which was given, that of `fs.run`, or all processes."""
        if self.mesh is not None:
            return self.mesh
        return scope.mesh if (scope := here()) is not None else make_mesh({"data": process_count()})

    def on_mesh(self) -> Self:
        """Return the plugin with its mesh."""
        return self if self.mesh is not None else replace(self, mesh=self.default_mesh())

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes that shard the batch."""
        return mesh.axis_names if self.axis is None else mesh.check_axes(cast(Any, self.axis), "axis=")

    def zero_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes along which ZeRO shards."""
        return self.replica_axes(mesh)

    def replicas(self, mesh: Mesh) -> ReplicaGroup | None:
        """Return the replicas that train apart; None: all devices train one model."""
        return None

    def replica_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes that shard the batch of one replica."""
        axes, replicas = self.axes(mesh), self.replicas(mesh)
        return axes if replicas is None else tuple([axis for axis in axes if axis != replicas.axis])

    def plans_of(self, model: nn.Module, stages: Sequence[nn.Module]) -> Sequence[Plan | None]:
        """Return the plan of layers of each stage that are sharded."""
        return [None] * len(stages)

    def rules(self, mesh: Mesh, within: Rules = None) -> Rules:
        """Return the layouts of parameters, which plans shard by the rules `within`."""
        return P() if within is None else within

    def compressors(self, mesh: Mesh) -> Mapping[str, Any] | None:
        """Return the compressors of gradients, by axis."""
        return None

    def gradient_options(self) -> dict[str, Any]:
        """Return the options of `value_and_grad`."""
        mesh = self.default_mesh()
        return {
            "mesh": mesh,
            "batch": P(axes) if (axes := self.replica_axes(mesh)) else P(),
            "has_buffers": True,
            "compute": next((dtype for dtype, name in _PRECISIONS.items() if name == self.precision), None),
            "reduce": torch.float32 if self.precision == "fp16" else None,
            "reproducible": self.reproducible,
            **self.own_options(),
            **self.options,
        }

    def own_options(self) -> dict[str, Any]:
        """Return those that stages do not have, or that they alone have."""
        return {"slices": self.slices if self.reproducible else None, "reduce_once": self.zero() < 2}


@dataclass(frozen=True, kw_only=True)
class _SlowLinkPlugin(Plugin):
    """A plugin with replicated parameters, whose gradients are compressed, or whose replicas train apart."""

    compress: Any = None
    local_steps: Any = None
    gossip: Any = None

    def errors(self) -> list[str]:
        wrong, mesh = super().errors(), self.mesh
        names = [name for name in ("compress", "local_steps", "gossip") if getattr(self, name) is not None]
        if len(names) > 1:
            wrong.append(f"{' and '.join(names)} must not be combined: give one of them")
        if names and self.reproducible:
            wrong.append(f"{names[0]} must be None with reproducible=True, since its sums depend on the mesh")
        if names and names != ["compress"] and self.zero() > 1:
            wrong.append(f"{names[-1]} must be None in stage {self.zero()}: use stage 0 or 1")
        steps = self.local_steps.values() if isinstance(self.local_steps, Mapping) else [self.local_steps]
        wrong += [error for every in steps if every is not None for error in integer("local_steps", every)]
        return wrong + ([] if wrong or mesh is None else refusal(lambda: self.replicas(mesh)))

    def _by_axis(self, name: str, mesh: Mesh) -> Mapping[str, Any] | None:
        """Return the values of an option by axis; a single one is for the axis of the batch."""
        value = getattr(self, name)
        if value is None or isinstance(value, Mapping):
            return value
        axes = [axis for axis in self.axes(mesh) if mesh.shape[axis] > 1]
        if len(axes) > 1:
            raise ValueError(
                f"{name} must be for each axis of {', '.join(axes)}, as {{{axes[0]!r}: ...}}; got {value}."
            )
        return dict.fromkeys(axes, value)

    def compressors(self, mesh: Mesh) -> Mapping[str, Any] | None:
        return self._by_axis("compress", mesh)

    def replicas(self, mesh: Mesh) -> ReplicaGroup | None:
        name = "gossip" if self.local_steps is None else "local_steps"
        values = self._by_axis(name, mesh)
        if values is None:
            return None
        if len(values) != 1 or any(axis not in self.axes(mesh) or mesh.shape[axis] == 1 for axis in values):
            raise ValueError(f"{name} must be along one axis of the batch, of several devices; got {mesh}.")
        ((axis, value),) = values.items()
        if name == "local_steps":
            return ReplicaGroup(mesh, axis, local_sgd_rule(axis, value))
        graph = value(mesh.shape[axis]) if callable(value) else value
        if not isinstance(graph, Graph) or graph.size != mesh.shape[axis]:
            raise ValueError(f"gossip must be a graph of the {mesh.shape[axis]} devices along {axis}; got {value}.")
        return ReplicaGroup(mesh, axis, gossip_rule(axis, graph))


@dataclass(frozen=True, kw_only=True)
class DDPPlugin(_SlowLinkPlugin):
    """Data parallelism: parameters are replicated and gradients all-reduced.

    Args:
        compress: a compressor of `fs.comm` that reduces gradients instead, along the axis of the batch; or one by axis.
        local_steps: number of steps between averages of the replicas along that axis, which train apart; or one by axis.
        gossip: such replicas average with neighbours in each step: a graph, or a function from their number to one, such as
            `fs.comm.ring`; or one by axis.

    With local_steps or gossip each device runs the model of its replica; `state_dict` and `unwrap` return their mean.

    >>> DDPPlugin(precision="fp8", seed=-1)
    Traceback (most recent call last):
    ValueError: DDPPlugin: precision must be 'bf16', 'fp16' or None, got 'fp8'; seed must be an integer >= 0, ...
    """


@dataclass(frozen=True, kw_only=True)
class ZeroPlugin(_SlowLinkPlugin):
    """ZeRO 1 and 2: the optimizer's state is sharded.  `stage` 2 reduces gradients in each backward, 1 once a step.

    `compress` and, in stage 1, `local_steps` and `gossip` are those of `DDPPlugin`.
    """

    stage: Literal[1, 2] = 1

    def errors(self) -> list[str]:
        wrong = one_of("stage", self.stage, 1, 2)
        return super().errors() + [f"{text}: stage 0 is DDPPlugin, stage 3 FSDPPlugin" for text in wrong]

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

    def errors(self) -> list[str]:
        wrong = super().errors() + flag("reshard_after_forward", self.reshard_after_forward)
        return wrong + refusal(lambda: fsdp((), unit=self.unit))

    def zero(self) -> Stage:
        return 3

    def zero_axes(self, mesh: Mesh) -> tuple[str, ...]:
        axes = self.axes(mesh)
        found = axes if self.shard_axis is None else mesh.check_axes(cast(Any, self.shard_axis), "shard_axis=")
        if not {*found} <= {*axes}:
            raise ValueError(f"shard_axis must be among axis=, got {self.shard_axis!r}.")
        return found

    def rules(self, mesh: Mesh, within: Rules = None) -> Rules:
        return fsdp(self.zero_axes(mesh), unit=self.unit)

    def own_options(self) -> dict[str, Any]:
        return {**super().own_options(), "reshard_after_forward": self.reshard_after_forward}
