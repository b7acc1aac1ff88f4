"""`HybridParallelPlugin`: data, pipeline, expert, sequence and tensor parallelism on one mesh.

axis      "pipe"     "data"          "expert"           "seq"        "model"; or those of another mode (`MODEL_AXES`), innermost
shards    stages     batch, ZeRO     batch, experts     tokens       layers, by a plan: see `tensor_parallel`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, cast

from torch import nn

from fshard.booster.plugins import Plugin
from fshard.experts.transformers import shard_experts
from fshard.mesh.layout import Memory, Mesh, P
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.runtimes.launchers import process_count
from fshard.mesh.spmd.scope import here, outside
from fshard.optim.partition import Stage
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.split.balance import Balance, check_balance
from fshard.pipeline.split.stages import split_stages
from fshard.randomness import keyed_random
from fshard.tensor.layer_plans import SequenceMode
from fshard.tensor.plan import TOLERANCE, Plan, tensor_parallel
from fshard.transforms.module.compiled import uncompile
from fshard.transforms.module.lazy import without_memory
from fshard.transforms.module.replica import copy_on_meta
from fshard.transforms.options import Recompute, refusal
from fshard.transforms.shard_params import Rules, fsdp

MODEL_AXES = {
    "1d": ("model",),
    "2d": ("model_i", "model_j"),
    "2.5d": ("model_d", "model_i", "model_j"),
    "3d": ("model_a", "model_b", "model_c"),
}
"""The axes of the layers in each mode; in "2.5d" the first one is the depth."""


def model_axes(size: int, mode: str, depth: int) -> dict[str, int]:
    """Return the sizes of a mode's axes; raise with the nearest legal sizes if there are none.

    >>> model_axes(8, "2.5d", 2)
    {'model_d': 2, 'model_i': 2, 'model_j': 2}
    """
    deep, names = mode == "2.5d", MODEL_AXES[mode]
    axes = names[deep:]
    if depth != 1 and not deep:
        raise ValueError(
            f'tensor_depth={depth} has no meaning for tensor_mode="{mode}"; "2.5d" has a depth.'
        )
    side = max(int((size / depth) ** (1 / len(axes)) + 1e-9), 1)
    if depth * side ** len(axes) != size:
        kind = {"2d": "a square", "2.5d": f"tensor_depth={depth} times a square", "3d": "a cube"}[
            mode
        ]
        nearest = " and ".join(str(depth * q ** len(axes)) for q in (side, side + 1))
        raise ValueError(
            f'tensor must be {kind} for tensor_mode="{mode}", got {size}: the nearest are {nearest}.'
        )
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
        tensor_tolerance, tensor_ignore: of the check of the plan: see `tensor_parallel`.
        experts: number of devices that share the experts of each layer, and have other samples: see `fs.experts`. Layers are
            those of `fs.nn.MoE(axis="expert")` and of transformers. With tensor or sequence all these devices share them.
        sequence: number of devices that share the tokens, dim 1 of all inputs.
        sequence_mode: the algorithm of their attention: see `fs.tensor.attention`; or "megatron": norms and dropout on
            shards of tokens, along the axis of the layers, with sequence=1.
        zero_stage: 0 to 3, of the devices that have the same stages.
        microbatches: number of microbatches of each device's part of a batch; None: as many as
            stages, which the plugin's repr shows. The number need not divide the batch.
        schedule: a name of `pipeline_schedule`.
        chunks: number of stages per device; None: one, or two where the schedule needs them.
        balance, sample, blocks: how the model is split into stages: see `split_stages`. With tensor or sequence the model
            is planned on the sample before, and the plan is checked: see `tensor_parallel`.
        recompute: which activations are recomputed: see `stage_functions`.
        offload: store the optimizer's state on the "host" or on "disk", and update it on the host: see `ZeroPlugin`; with
            zero_stage=3 parameters and gradients too: see `FSDPPlugin`.
        pipeline_axis: the axis of the stages.
    """

    data: int | None = None
    pipeline: int = 1
    tensor: int = 1
    tensor_mode: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    tensor_depth: int = 1
    tensor_tolerance: float = TOLERANCE
    tensor_ignore: str | Sequence[str] = ()
    experts: int = 1
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
    offload: Literal["host", "disk"] | None = None

    def __post_init__(self) -> None:
        has_valid_sizes = not self._invalid_fields()
        if has_valid_sizes and self.in_stages() and self.microbatches is None:
            # With fewer microbatches than stages some device idles in every phase of a schedule.
            object.__setattr__(self, "microbatches", self.pipeline * self._stages_per_device())
        super().__post_init__()

    def contradictions(self) -> list[str]:
        errors = refusal(self.inner_axes) + self.option_errors(recompute=self.recompute)
        if self.in_stages():
            errors = errors or refusal(
                lambda: check_balance(self.balance, self.plan().stages, self.sample)
            )
        if self.sequence_mode == "megatron" and (
            self.tensor_mode != "1d" or self.tensor == 1 or self.sequence != 1
        ):
            errors.append(
                'sequence_mode="megatron" shards tokens along the axis of the layers, so it must have tensor > 1, '
                f'tensor_mode="1d" and sequence=1; got {self.tensor}, "{self.tensor_mode}" and {self.sequence}'
            )
        if self.sync_batchnorm and (self.pipeline, self.tensor, self.sequence) != (1, 1, 1):
            errors.append("sync_batchnorm=True must have pipeline=1, tensor=1 and sequence=1")
        if self.mesh is not None and not errors:
            sizes = {self.pipeline_axis: 1, **self.mesh.shape}
            expected = {
                self.pipeline_axis: self.pipeline,
                **self._expert_axis(),
                **self.inner_axes(),
            }
            errors += [
                f'"{axis}" of {self.mesh} must have size {size}, got {sizes.get(axis)}'
                for axis, size in expected.items()
                if sizes.get(axis) != size
            ]
            data = prod(sizes[axis] for axis in self.axes() if axis not in self._expert_axis())
            errors += [f"data must be that of {self.mesh}, {data}, got {self.data}"] * (
                self.data not in (None, data)
            )
        return super().contradictions() + errors

    def zero(self) -> Stage:
        return self.zero_stage

    def state_memory(self) -> Memory:
        return self.offload or "device"

    def param_memory(self) -> Memory:
        return self.state_memory() if self.zero_stage == 3 and self.axes() else "device"

    def in_stages(self) -> bool:
        return self.pipeline != 1

    def plan(self) -> Schedule:
        """Return the schedule."""
        stages = self.pipeline * self._stages_per_device()
        devices = self.pipeline if self.schedule in ("interleaved", "bfs") else None
        count = cast(int, self.microbatches)
        return pipeline_schedule(self.schedule, stages=stages, microbatches=count, devices=devices)

    def _stages_per_device(self) -> int:
        if self.chunks is not None:
            return self.chunks
        has_one_stage = self.schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2")
        return 1 if has_one_stage else 2

    def default_mesh(self) -> Mesh:
        """Return the mesh: that which was given, or all devices or processes, the layers along the last axes."""
        if self.mesh is not None:
            return self.mesh
        scope, inner = here(), self.inner_axes()
        count = scope.mesh.root_size if scope is not None else process_count()
        size = self.pipeline * self.experts * prod(inner.values())
        data = max(count // size, 1) if self.data is None else self.data
        if data * size != count:
            raise ValueError(
                f"HybridParallelPlugin: data * pipeline * experts * sequence * tensor must be the number of devices, {count}; "
                f"got {data} * {self.pipeline} * {self.experts} * {self.sequence} * {self.tensor} = {data * size}."
            )
        return make_mesh(
            {self.pipeline_axis: self.pipeline, "data": data, **self._expert_axis(), **inner}
        )

    def _expert_axis(self) -> dict[str, int]:
        return {"expert": self.experts} if self.experts > 1 else {}

    def inner_axes(self) -> dict[str, int]:
        """Return the axes of tokens and layers, along which devices share samples."""
        if self.tensor == self.sequence == 1:
            return {}
        tokens = {"seq": self.sequence} if self.sequence > 1 else {}
        return {**tokens, **model_axes(self.tensor, self.tensor_mode, self.tensor_depth)}

    def axes(self) -> tuple[str, ...]:
        return tuple(
            [
                axis
                for axis in super().axes()
                if axis not in (self.pipeline_axis, *self.inner_axes())
            ]
        )

    def rules(self, within: Rules = None) -> Rules:
        axes, within = (
            self.axes(),
            _spec_of_experts if self.experts > 1 and within is None else within,
        )
        return fsdp(axes, within=within) if self.zero_stage == 3 and axes else super().rules(within)

    def gradient_options(self) -> dict[str, Any]:
        options, inner = super().gradient_options(), self.inner_axes()
        options |= {"local": (*self._expert_axis(), *inner)} if inner or self.experts > 1 else {}
        if self.in_stages():
            options |= {
                "schedule": self.plan(),
                "axis": self.pipeline_axis,
                "recompute": self.recompute,
            }
        return options

    def split(self, model: nn.Module) -> Sequence[tuple[nn.Module, Plan | None]]:
        if self.in_stages() or self.inner_axes():
            uncompile(model, "stages, and layers by a plan, run uncompiled. Leave it out.")
        stages, plan = [model], self._layer_plan(model) if self.inner_axes() else None
        if self.experts > 1 or plan is not None or self.in_stages():
            shard_experts(model, tuple(self._expert_axis()), tuple(self.inner_axes()))
        if self.in_stages():
            count, layers = len(self.plan().placement), cast(Any, model)
            stages = split_stages(
                layers, count, self.balance, sample=self.sample, blocks=cast(Any, self.blocks)
            )
        plans = [None] * len(stages) if plan is None else plan.of_stages(stages)
        return [*zip(stages, plans, strict=True)]

    def _layer_plan(self, model: nn.Module) -> Plan:
        """Return the plan of the model's layers, which one of the devices that share the work checks."""
        scope, axes, x = here(), MODEL_AXES[self.tensor_mode], self.sample
        if x is None:
            raise ValueError(
                f"HybridParallelPlugin: tensor={self.tensor} and sequence={self.sequence} must have sample=, the model's "
                "arguments, on which its layers are planned; got None. "
                "Give sample=batch to the plugin or to fs.parallel."
            )
        sequence = (
            "seq" if self.sequence > 1 else axes[0] if self.sequence_mode == "megatron" else None
        )
        if self.in_stages():
            x = (x,) if self.blocks is None else tuple(x) if isinstance(x, list) else x
        is_meta = bool(without_memory(model))
        with outside(), keyed_random(self.seed):
            return tensor_parallel(
                copy_on_meta(model) if is_meta else model,
                sample=x,
                check=not is_meta
                and (scope is None or scope.mesh.runtime == "process" or scope.device == 0),
                axis=axes,
                mode=self.tensor_mode,
                size=self.inner_axes()[axes[-1]],
                sequence=sequence,
                sequence_mode=self.sequence_mode if sequence is not None else "gather",
                experts="expert" if self.experts > 1 else None,
                tolerance=self.tensor_tolerance,
                ignore=self.tensor_ignore,
            )


def _spec_of_experts(path: str, leaf: Any) -> P:
    """Return the spec of a leaf: the tensors of a layer's `experts` are sharded by their first dim."""
    return P("expert") if path.split(".")[-2:-1] == ["experts"] else P()
