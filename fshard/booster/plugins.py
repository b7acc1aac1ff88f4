"""Plugins: mesh, layouts of parameters, gradients and optimizer state, and precision.

plugin                   parameters       gradients                     optimizer state
DDPPlugin                replicated       all-reduced                   replicated
ZeroPlugin(stage=1)      replicated       reduce-scattered once a step  sharded
ZeroPlugin(stage=2)      replicated       reduce-scattered per unit     sharded
FSDPPlugin               sharded          reduce-scattered per unit     sharded
HybridParallelPlugin     those of a stage on its devices, of layers by a plan, and along the axes
                         of data by its `zero_stage`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, Literal, Self, cast, get_args, get_origin, get_type_hints

import torch
from torch import nn

from fshard.comm.graph import Graph
from fshard.comm.replicas import ReplicaGroup, gossip_rule, local_sgd_rule
from fshard.memory.placement import Role
from fshard.memory.state import UpdateOn
from fshard.mesh.layout import Memory, Mesh, P, PyTree
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.runtimes.launchers import process_count
from fshard.mesh.spmd.scope import here
from fshard.optim.partition import Stage
from fshard.tensor.plan import Plan
from fshard.transforms.options import (
    COMPUTE_DTYPES,
    KnownKeywords,
    Options,
    Precision,
    flag,
    integer,
    must_be,
    one_of,
    plugin_options,
    refusal,
    unknown,
)
from fshard.transforms.patterns import Choice
from fshard.transforms.shard_params import Rules, fsdp

_PRECISIONS: dict[Any, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, kw_only=True)
class Plugin(KnownKeywords):
    """The options of every plugin.

    Args:
        mesh: the devices; None: that of `fs.run`, or all processes, along one axis "data".
        axis: that shards the batch; None: all axes of the mesh.
        precision: "bf16" or "fp16", or the dtype, computes in it; parameters and state stay in
            their own.
        unused: a parameter that no device has used gets: "skip", nothing, as in torch.optim, so
            that neither its state nor its count of steps changes; "zero", a gradient of zeros, as
            in JAX.
        sync_batchnorm: BatchNorm takes mean and variance over all devices.
        reproducible: the same bits on any number of devices that divides `slices`, if a sample's
            loss depends on it alone.
        slices: number of slices of a batch then.
        seed: of random draws in the model, and of lazy modules.
        buffers: frozen parameters that the forward updates, such as a momentum encoder: see
            `functionalize`.
        options: further ones of `value_and_grad`, such as bucket, prefetch or reduce: an error
            lists all.
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

    def __post_init__(self) -> None:
        if isinstance(self.precision, torch.dtype):
            precision = _PRECISIONS.get(self.precision, self.precision)
            object.__setattr__(self, "precision", precision)
        errors = self._invalid_fields() or self.contradictions()
        if errors:
            raise ValueError(f"{type(self).__name__}: {'; '.join(errors)}.")

    def _invalid_fields(self) -> list[str]:
        """List the flags, integers and literals that are not what their annotations allow."""
        errors = must_be("mesh", "a Mesh or None", self.mesh, isinstance(self.mesh, Mesh | None))
        for name, annotation in get_type_hints(type(self)).items():
            errors += _field_errors(name, getattr(self, name), annotation)
        return errors

    def contradictions(self) -> list[str]:
        """List the fields, each valid, that contradict each other or the mesh."""
        legal = plugin_options(in_stages=self.in_stages())
        errors = unknown("options", self.options, legal)
        errors += self.option_errors(
            reproducible=self.reproducible,
            **{name: value for name, value in self.options.items() if name in legal},
        )
        if self.reproducible and self.sync_batchnorm:
            errors.append(
                "sync_batchnorm=True needs all devices together, "
                "reproducible=True computes slices one by one"
            )
        if self.reproducible and self.state_memory() == "disk":
            errors.append(
                'offload="disk" is updated in place, which reproducible=True does not: '
                'use offload="host"'
            )
        if self.mesh is not None:
            errors += refusal(self.zero_axes)
        return errors

    def option_errors(self, **options: Any) -> list[str]:
        """List the errors of options of a step."""
        mesh: Any = self.mesh
        return refusal(lambda: Options(mesh=mesh, batch=P(), **options))

    def zero(self) -> Stage:
        """Return the stage of ZeRO."""
        return 0

    def in_stages(self) -> bool:
        """Return True if the model is split into stages."""
        return False

    def split(self, model: nn.Module) -> Sequence[tuple[nn.Module, Plan | None]]:
        """Return the stages of a model, each with the plan of its layers that are sharded."""
        return [(model, None)]

    def default_mesh(self) -> Mesh:
        """Return the mesh: that which was given, that of `fs.run`, or all processes."""
        if self.mesh is not None:
            return self.mesh
        scope = here()
        if scope is not None:
            return scope.mesh
        return make_mesh({"data": process_count()})

    def on_mesh(self) -> Self:
        """Return the plugin with its mesh."""
        return self if self.mesh is not None else replace(self, mesh=self.default_mesh())

    def axes(self) -> tuple[str, ...]:
        """Return the axes that shard the batch."""
        mesh = self.default_mesh()
        if self.axis is None:
            return mesh.axis_names
        return mesh.check_axes(cast(Any, self.axis), "axis=")

    def zero_axes(self) -> tuple[str, ...]:
        """Return the axes along which ZeRO shards."""
        return self.replica_axes()

    def replicas(self) -> ReplicaGroup | None:
        """Return the replicas that train apart; None: all devices train one model."""
        return None

    def replica_axes(self) -> tuple[str, ...]:
        """Return the axes that shard the batch of one replica."""
        axes = self.axes()
        replicas = self.replicas()
        if replicas is None:
            return axes
        return tuple([axis for axis in axes if axis != replicas.axis])

    def rules(self, within: Rules = None) -> Rules:
        """Return the layouts of parameters, which plans shard by the rules `within`."""
        return P() if within is None else within

    def state_memory(self) -> Memory:
        """Return the memory of the optimizer's state."""
        return "device"

    def update_on(self) -> UpdateOn:
        """Return the memory in which the state is updated."""
        return "device" if self.state_memory() == "device" else "host"

    def rules_of(self, params: Mapping[str, Any], within: Rules = None) -> Rules:
        """Return the layouts of some parameters by name."""
        return self.rules(within)

    def placed(self, role: Role, tree: PyTree) -> PyTree:
        """Return new parameters or state in their memories."""
        return tree

    def param_memory(self) -> Memory | Mapping[str, Memory]:
        """Return the memory of parameters."""
        return "device"

    def compressors(self) -> Mapping[str, Any] | None:
        """Return the compressors of gradients, by axis."""
        return None

    def gradient_options(self) -> dict[str, Any]:
        """Return the options of `value_and_grad`."""
        precision = cast(Precision | None, self.precision)
        replica_axes = self.replica_axes()
        batch = P(replica_axes) if replica_axes else P()
        # A sum over devices may be infinite in float16.
        reduce_dtype = torch.float32 if precision == "fp16" else None
        options: dict[str, Any] = {
            "mesh": self.default_mesh(),
            "batch": batch,
            "has_buffers": True,
            "compute": COMPUTE_DTYPES[precision],
            "reduce": reduce_dtype,
            "reproducible": self.reproducible,
        }
        if not self.in_stages():
            options["reduce_once"] = self.zero() < 2
            if self.reproducible:
                options["slices"] = self.slices
        return options | self.options


def _field_errors(name: str, x: Any, annotation: Any) -> list[str]:
    """List the error of a field that is not the flag, integer or literal of its annotation."""
    kinds = [*get_args(annotation)]
    if get_origin(annotation) is Literal or not kinds:
        kinds = [annotation]
    values = list[Any]()
    types = set[Any]()
    for kind in kinds:
        if get_origin(kind) is Literal:
            values += get_args(kind)
        else:
            types.add(kind)
    is_optional = NoneType in types
    types -= {NoneType, torch.dtype}  # a dtype is another word for a literal
    if x is None and is_optional:
        return []
    if types == {bool}:
        return flag(name, x)
    if types == {int} and not values:
        return integer(name, x, 0 if name == "seed" else 1)
    if values and not types:
        return one_of(name, x, *values, *([None] if is_optional else []))
    return []


@dataclass(frozen=True, kw_only=True)
class _SlowLinkPlugin(Plugin):
    """A plugin with replicated parameters, for slow links.

    Its gradients are compressed, or its replicas train apart.
    """

    compress: Any = None
    local_steps: Any = None
    gossip: Any = None

    def contradictions(self) -> list[str]:
        names = list[str]()
        for name in ("compress", "local_steps", "gossip"):
            if getattr(self, name) is not None:
                names.append(name)
        if len(names) > 1:
            return [f"{' and '.join(names)} must not be combined: give one of them"]
        counts = [self.local_steps]
        if isinstance(self.local_steps, Mapping):
            counts = [*cast(Mapping[str, Any], self.local_steps).values()]
        errors = list[str]()
        for count in counts:
            if count is not None:
                errors += integer("local_steps", count)
        errors += super().contradictions()
        for name in names:
            if self.reproducible:
                errors.append(
                    f"{name} must be None with reproducible=True, since its sums depend on the mesh"
                )
            if name != "compress" and self.zero() > 1:
                errors.append(f"{name} must be None in stage {self.zero()}: use stage 0 or 1")
        return errors

    def _by_axis(self, name: str) -> Mapping[str, Any] | None:
        """Return the values of an option by axis; a single one is for the axis of the batch."""
        value = getattr(self, name)
        if value is None or isinstance(value, Mapping):
            return value
        axes = [axis for axis in self.axes() if self.default_mesh().shape[axis] > 1]
        if not axes:  # one device: it has the state that a checkpoint of several has
            axes = [*self.axes()[:1]]
        if len(axes) > 1:
            raise ValueError(
                f"{name} must be for each axis of {', '.join(axes)}, as {{{axes[0]!r}: ...}}; "
                f"got {value}."
            )
        return dict.fromkeys(axes, value)

    def compressors(self) -> Mapping[str, Any] | None:
        return self._by_axis("compress")

    def replicas(self) -> ReplicaGroup | None:
        name = "gossip" if self.local_steps is None else "local_steps"
        values = self._by_axis(name)
        if values is None:
            return None
        mesh = self.default_mesh()
        is_usable = len(values) == 1
        for axis in values:
            if axis not in self.axes() or mesh.shape[axis] == 1:
                is_usable = False
        if not is_usable:
            raise ValueError(
                f"{name} must be along one axis of the batch, of several devices; got {mesh}."
            )
        ((axis, value),) = values.items()
        if name == "local_steps":
            return ReplicaGroup(mesh, axis, local_sgd_rule(axis, value))
        graph = value(mesh.shape[axis]) if callable(value) else value
        if not isinstance(graph, Graph) or graph.size != mesh.shape[axis]:
            raise ValueError(
                f"gossip must be a graph of the {mesh.shape[axis]} devices along {axis}; "
                f"got {value}."
            )
        return ReplicaGroup(mesh, axis, gossip_rule(axis, graph))


@dataclass(frozen=True, kw_only=True)
class DDPPlugin(_SlowLinkPlugin):
    """Data parallelism: parameters are replicated and gradients all-reduced.

    Args:
        compress: a compressor of `fs.comm` that reduces gradients instead, along the axis of the
            batch; or one by axis.
        local_steps: number of steps between averages of the replicas along that axis, which train
            apart; or one by axis.
        gossip: such replicas average with neighbours in each step: a graph, or a function from
            their number to one, such as `fs.comm.ring`; or one by axis.

    With local_steps or gossip each device runs the model of its replica; `state_dict` and `unwrap`
    return their mean.

    >>> DDPPlugin(precision="fp8", seed=-1)
    Traceback (most recent call last):
    ValueError: DDPPlugin: precision must be 'bf16', 'fp16' or None, got 'fp8'; seed must be an ...
    """


@dataclass(frozen=True, kw_only=True)
class ZeroPlugin(_SlowLinkPlugin):
    """ZeRO 1 and 2: the optimizer's state is sharded.

    `stage` 2 reduces gradients in each backward, 1 once a step.

    Args:
        stage: of ZeRO.
        offload: store the state on the "host", or on "disk" in the folder FSHARD_DISK, and update
            it on the host: gradients are sent there as they are reduced, and parameters back.

    `compress` and, in stage 1, `local_steps` and `gossip` are those of `DDPPlugin`.
    """

    stage: Literal[1, 2] = 1
    offload: Literal["host", "disk"] | None = None

    def _invalid_fields(self) -> list[str]:
        errors = super()._invalid_fields()
        if self.stage == 3:
            errors.append("ZeRO-3 is fs.FSDPPlugin()")
        return errors

    def zero(self) -> Stage:
        return self.stage

    def state_memory(self) -> Memory:
        return self.offload or "device"


@dataclass(frozen=True, kw_only=True)
class ShardedPlugin(Plugin):
    """ZeRO 3: parameters are sharded too, and all-gathered as they are used.

    Args:
        unit: parameters that are all-gathered together: a pattern of paths ("blocks[*]"), several,
            or a size in bytes; None: each repeated block, small ones merged: see `fs.fsdp`.
        shard_axis: that shards parameters and state; None: all of `axis`. Along the others they are
            replicated (hybrid sharding), such as {"node": 2, "gpu": 8} with shard_axis="gpu".
        reshard_after_forward: free unsharded parameters after the forward, and all-gather them
            again for the backward.
    """

    unit: str | Sequence[str] | int | None = None
    shard_axis: str | Sequence[str] | None = None
    reshard_after_forward: bool = True

    def contradictions(self) -> list[str]:
        return super().contradictions() + refusal(lambda: fsdp((), unit=self.unit))

    def zero(self) -> Stage:
        return 3

    def zero_axes(self) -> tuple[str, ...]:
        axes = self.axes()
        if self.shard_axis is None:
            return axes
        shard_axis = cast(Any, self.shard_axis)
        shard_axes = self.default_mesh().check_axes(shard_axis, "shard_axis=")
        if not {*shard_axes} <= {*axes}:
            raise ValueError(f"shard_axis must be among axis=, got {shard_axis!r}.")
        return shard_axes

    def rules(self, within: Rules = None) -> Rules:
        return fsdp(self.zero_axes(), unit=self.unit)

    def gradient_options(self) -> dict[str, Any]:
        return {**super().gradient_options(), "reshard_after_forward": self.reshard_after_forward}


@dataclass(frozen=True, kw_only=True)
class FSDPPlugin(ShardedPlugin):
    """ZeRO 3 with all parameters, gradients and state on the devices, or all of them elsewhere.

    See `ShardedPlugin`.

    Args:
        offload: store parameters, gradients and state on the "host" (True), and update them there:
            a unit is sent to the device before it is all-gathered. "disk": parameters and state in
            the folder FSHARD_DISK.
    """

    offload: Literal[False, True, "host", "disk"] = False

    def state_memory(self) -> Memory:
        if self.offload is True:
            return "host"
        return self.offload or "device"

    def param_memory(self) -> Memory:
        return self.state_memory()
