"""`HybridParallelPlugin`: data, pipeline, sequence and tensor parallelism on one mesh.

axis      "pipe"     "data"          "seq"        "model"; or those of another mode (`MODEL_AXES`), innermost
shards    stages     batch, ZeRO     tokens       layers, by a plan: see `tensor_parallel`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, cast, get_args

from torch import nn

from fshard.booster.plugins import Plugin
from fshard.mesh.layout import Mesh
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.runtimes.launchers import process_count
from fshard.mesh.spmd.scope import here, outside
from fshard.optim.partition import Stage
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.split.balance import Balance, check_balance
from fshard.pipeline.split.stages import split_stages
from fshard.tensor.layer_plans import SequenceMode
from fshard.tensor.plan import Plan, tensor_parallel
from fshard.tensor.sequence import How
from fshard.transforms.module.lazy import without_memory
from fshard.transforms.module.replica import copy_on_meta
from fshard.transforms.options import integer, one_of, refusal, wrong_options
from fshard.transforms.reproducible.randomness import keyed_random
from fshard.transforms.shard_params import Rules, fsdp
from fshard.transforms.stages.functions import How as Recompute

MODEL_AXES = {
    "1d": ("model",),
    "2d": ("model_i", "model_j"),
    "2.5d": ("model_d", "model_i", "model_j"),
    "3d": ("model_a", "model_b", "model_c"),
}
"""The axes of the layers in each mode; in "2.5d" the first one is the depth."""
_COUNTS = ("data", "microbatches", "chunks", "tensor", "tensor_depth", "sequence")


def model_axes(size: int, mode: str, depth: int) -> dict[str, int]:
    """Return the sizes of a mode's axes; raise with the nearest legal sizes if there are none.

    >>> model_axes(8, "2.5d", 2)
    {'model_d': 2, 'model_i': 2, 'model_j': 2}
    """
    deep, names = mode == "2.5d", MODEL_AXES[mode]
    axes = names[deep:]
    if depth != 1 and not deep:
        raise ValueError(f'tensor_depth={depth} has no meaning for tensor_mode="{mode}"; "2.5d" has a depth.')
    side = max(int((size / depth) ** (1 / len(axes)) + 1e-9), 1)
    if depth * side ** len(axes) != size:
        kind = {"2d": "a square", "2.5d": f"tensor_depth={depth} times a square", "3d": "a cube"}[mode]
        nearest = " and ".join(str(depth * q ** len(axes)) for q in (side, side + 1))
        raise ValueError(f'tensor must be {kind} for tensor_mode="{mode}", got {size}: the nearest are {nearest}.')
    return {**({names[0]: depth} if deep else {}), **dict.fromkeys(axes, side)}


@dataclass(frozen=True, kw_only=True)
class HybridParallelPlugin(Plugin):
    """Stages of a pipeline, layers and tokens sharded along axes of their own, any stage of ZeRO along the others.

    Each device's part of a batch is that of the devices that share its samples, with all tokens. The output of a boosted
    model has full tensors: a criterion, or the model's own loss, is the same as on one device. To an optimizer of matrices,
    such as Muon or LAMB, each part of a fused weight (q of q, k and v) is a matrix of its own.

    Args:
        data: number of devices that have other samples; None: all that are left.
        pipeline: number of devices of the pipeline; with 1 the options of stages are ignored.
        tensor: number of devices that share each layer.
        tensor_mode: how: "1d" (Megatron), "2d" (a square of devices), "2.5d" (`tensor_depth` squares), "3d" (a cube).
        tensor_depth: of "2.5d".
        sequence: number of devices that share the tokens, dim 1 of all inputs.
        sequence_mode: the algorithm of their attention: see `fs.tensor.attention`; or "megatron": norms and dropout on
            shards of tokens, along the axis of the layers, with sequence=1.
        zero_stage: 0 to 3, of the devices that have the same stages.
        microbatches: number of microbatches of each device's part of a batch; required with stages.
        schedule: a name of `pipeline_schedule`.
        chunks: number of stages per device; None: one, or two where the schedule needs them.
        balance, sample, blocks: how the model is split into stages: see `split_stages`. With tensor or sequence the model
            is planned on the sample before, and the plan is checked: see `tensor_parallel`.
        recompute: which activations are recomputed: see `stage_functions`.
        pipeline_axis: the axis of the stages.
    """

    data: int | None = None
    pipeline: int = 1
    tensor: int = 1
    tensor_mode: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    tensor_depth: int = 1
    sequence: int = 1
    sequence_mode: SequenceMode = "gather"
    zero_stage: Stage = 0
    microbatches: int | None = None
    schedule: str = "1f1b"
    chunks: int | None = None
    balance: Balance = "parameters"
    sample: Any = None
    blocks: str | Sequence[str] | None = None
    recompute: Recompute = "never"
    pipeline_axis: str = "pipe"

    def errors(self) -> list[str]:
        counts = {name: getattr(self, name) for name in _COUNTS}
        optional = ("data", "chunks") if self.in_stages() else ("data", "chunks", "microbatches")
        absent = {name for name in optional if counts[name] is None}
        sizes = [text for name, count in counts.items() if name not in absent for text in integer(name, count)]
        sizes += one_of("tensor_mode", self.tensor_mode, *MODEL_AXES)
        sizes += one_of("sequence_mode", self.sequence_mode, *get_args(How), "megatron")
        wrong = integer("pipeline", self.pipeline) + one_of("zero_stage", self.zero_stage, 0, 1, 2, 3)
        wrong += wrong_options({"recompute": self.recompute}) + (sizes or self._unfit_layers())
        if not wrong and self.in_stages():
            wrong += refusal(lambda: check_balance(self.balance, self.plan().stages, self.sample))
            wrong += ["sync_batchnorm=True has no meaning for stages"] * self.sync_batchnorm
        if isinstance(self.mesh, Mesh):
            found = {self.pipeline_axis: 1, **self.mesh.shape}
            if (size := found[self.pipeline_axis]) != self.pipeline:
                axis = f'"{self.pipeline_axis}" in {self.mesh}'
                wrong.append(f"pipeline must be the size of {axis}, {size}, got {self.pipeline}")
            inner = {} if wrong else self.inner_axes()
            wrong += [
                f'"{name}" of {self.mesh} must have size {n}' for name, n in inner.items() if found.get(name) != n
            ]
            data = None if wrong else prod(found[axis] for axis in self.axes(self.mesh))
            if data is not None and self.data not in (None, data):
                wrong.append(f"data must be that of {self.mesh}, {data}, got {self.data}")
        return super().errors() + wrong

    def _unfit_layers(self) -> list[str]:
        """List the errors of sharded layers and tokens."""
        wrong = refusal(self.inner_axes)
        if self.sequence_mode == "megatron" and (self.tensor_mode != "1d" or self.tensor == 1 or self.sequence != 1):
            wrong.append(
                'sequence_mode="megatron" shards tokens along the axis of the layers, so it must have tensor > 1, '
                f'tensor_mode="1d" and sequence=1; got {self.tensor}, "{self.tensor_mode}" and {self.sequence}'
            )
        if not wrong and self.inner_axes():
            wrong += ["sync_batchnorm=True must have tensor=1 and sequence=1"] * self.sync_batchnorm
        return wrong

    def zero(self) -> Stage:
        return self.zero_stage

    def in_stages(self) -> bool:
        return self.pipeline != 1

    def plan(self) -> Schedule:
        """Return the schedule."""
        chunks = self.chunks or (1 if self.schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2") else 2)
        devices = self.pipeline if self.schedule in ("interleaved", "bfs") else None
        count = cast(int, self.microbatches)
        return pipeline_schedule(self.schedule, stages=chunks * self.pipeline, microbatches=count, devices=devices)

    def default_mesh(self) -> Mesh:
        """Return the mesh: that which was given, or all devices or processes, the layers along the last axes."""
        if self.mesh is not None:
            return self.mesh
        scope, inner = here(), self.inner_axes()
        count = scope.mesh.root_size if scope is not None else process_count()
        sizes = {"pipeline": self.pipeline, "sequence": self.sequence, "tensor": self.tensor}
        each = prod(sizes.values())
        if count % each or self.data not in (None, count // each):
            sizes = sizes if self.data is None else {"data": self.data, **sizes}
            nearest = " or ".join(str(n * each) for n in (count // each, count // each + 1) if n)
            raise ValueError(
                f"HybridParallelPlugin: {' * '.join(sizes)} must {'divide' if self.data is None else 'be'} the number of "
                f"devices, {count}; got {' * '.join(map(str, sizes.values()))} = {prod(sizes.values())}. "
                + (f"Use {nearest} devices." if count % each else f"Use data={count // each}, or leave it out.")
            )
        return make_mesh({self.pipeline_axis: self.pipeline, "data": count // each, **inner})

    def inner_axes(self) -> dict[str, int]:
        """Return the axes of tokens and layers, along which devices share samples."""
        if self.tensor == self.sequence == 1:
            return {}
        tokens = {"seq": self.sequence} if self.sequence > 1 else {}
        return {**tokens, **model_axes(self.tensor, self.tensor_mode, self.tensor_depth)}

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        tokens, is_sharded = ("seq",) * (self.sequence != 1), self.tensor != 1 or self.sequence != 1
        layers = MODEL_AXES.get(self.tensor_mode, ()) if is_sharded else ()
        return tuple(axis for axis in super().axes(mesh) if axis not in (self.pipeline_axis, *tokens, *layers))

    def rules(self, mesh: Mesh, within: Rules = None) -> Rules:
        axes = self.axes(mesh)
        return fsdp(axes, within=within) if self.zero_stage == 3 and axes else super().rules(mesh, within)

    def own_options(self) -> dict[str, Any]:
        local = {"local": tuple(inner)} if (inner := self.inner_axes()) else {}
        if not self.in_stages():
            return {**super().own_options(), **local}
        return {"schedule": self.plan(), "axis": self.pipeline_axis, "recompute": self.recompute, **local}

    def plans_of(self, model: nn.Module, stages: Sequence[nn.Module]) -> Sequence[Plan | None]:
        """Plan the model, and return for each stage the plan of its parameters."""
        if not (inner := self.inner_axes()):
            return super().plans_of(model, stages)
        if self.sample is None:
            raise ValueError(
                f"HybridParallelPlugin: tensor={self.tensor} and sequence={self.sequence} must have sample=, the model's "
                "arguments, on which its layers are planned; got None."
            )
        scope, axes, x = here(), MODEL_AXES[self.tensor_mode], self.sample
        sequence = "seq" if self.sequence > 1 else axes[0] if self.sequence_mode == "megatron" else None
        how: Any = {"axis": axes, "mode": self.tensor_mode, "size": inner[axes[-1]], "sequence": sequence}
        how |= {"sequence_mode": self.sequence_mode if sequence is not None else "gather"}
        if self.in_stages():
            x = (x,) if self.blocks is None else tuple(x) if isinstance(x, list) else x
        is_meta = bool(without_memory(model))
        is_checked = not is_meta and (scope is None or scope.mesh.runtime == "process" or scope.device == 0)
        with outside(), keyed_random(self.seed):  # checked by one of the devices that share the work
            plan = tensor_parallel(copy_on_meta(model) if is_meta else model, sample=x, check=is_checked, **how)
        return plan.of_stages(stages)

    def stages_of(self, model: nn.Module) -> Sequence[nn.Module]:
        if not self.in_stages():
            return super().stages_of(model)
        count, layers = len(self.plan().placement), cast(Any, model)
        return split_stages(layers, count, self.balance, sample=self.sample, blocks=cast(Any, self.blocks))
