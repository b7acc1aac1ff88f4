"""`HybridParallelPlugin`: data, pipeline, expert, sequence and tensor parallelism on one mesh.

It holds a `Parallelism`, for the axes of its mesh see there, and how a model is split by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from inspect import Parameter, Signature, signature
from math import prod
from typing import Any, Literal

from torch import nn

from fshard.booster.plugins import Plugin
from fshard.mesh.layout import Memory, Mesh
from fshard.mesh.layout.make import make_mesh
from fshard.optim.partition import Stage
from fshard.parallelism.build import ModelPart, param_rules, split_model, step_options
from fshard.parallelism.value import FIELDS, Parallelism, present_devices
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.split.balance import Balance, check_balance
from fshard.tensor.plan import TOLERANCE
from fshard.transforms.options import refusal
from fshard.transforms.shard_params import Rules

OF_STAGES = ("microbatches", "schedule", "chunks", "recompute")
"""The fields of a parallelism that have no meaning in a loop without stages."""


@dataclass(frozen=True, kw_only=True, init=False)
class HybridParallelPlugin(Plugin):
    """Stages, layers and tokens sharded along axes of their own, any ZeRO along the others.

    Each device's part of a batch is that of the devices that share its samples, with all tokens.
    The output of a boosted model has full tensors: a criterion, or the model's own loss, is the
    same as on one device. To an optimizer of matrices, such as Muon or LAMB, each part of a fused
    weight (q of q, k and v) is a matrix of its own.

    Args:
        parallelism: sizes of the mesh, ZeRO, stages and microbatches: see `fs.Parallelism`. Or its
            fields as keywords: pipeline=2, tensor=2, zero_stage=1; with pipeline=1 those of stages
            are ignored. `plugin.pipeline` and others are those of the parallelism.
        sample, blocks, balance: how the model is split into stages: see `split_stages`. With
            tensor or sequence the layers are planned on the sample before, and the plan is
            checked: see `tensor_parallel`.
        tensor_tolerance, tensor_ignore: of that check.
        tensor_rules: the styles of weights by pattern: the rules of `tensor_parallel`.
        offload: store the optimizer's state on the "host" or on "disk", and update it on the host:
            see `ZeroPlugin`; with zero_stage=3 parameters and gradients too: see `FSDPPlugin`.
        pipeline_axis: the axis of the stages.

    >>> plugin = HybridParallelPlugin(pipeline=2, schedule="zbv", zero_stage=1)
    >>> plugin.parallelism
    Parallelism(pipeline=2, zero_stage=1, microbatches=4, schedule='zbv', chunks=2)
    """

    parallelism: Parallelism = field(default_factory=Parallelism)
    sample: Any = None
    blocks: str | Sequence[str] | None = None
    balance: Balance = "parameters"
    tensor_tolerance: float = TOLERANCE
    tensor_ignore: str | Sequence[str] = ()
    tensor_rules: Mapping[str, str] | None = None
    offload: Literal["host", "disk"] | None = None
    pipeline_axis: str = "pipe"

    @classmethod
    def keywords(cls) -> list[str]:
        return [*super().keywords(), *FIELDS]

    def __init__(self, parallelism: Parallelism | None = None, **options: Any) -> None:
        sizes = {name: options.pop(name) for name in FIELDS if name in options}
        for each in fields(self):
            default = each.default if each.default is not MISSING else _made(each.default_factory)
            object.__setattr__(self, each.name, options.get(each.name, default))

        errors = list[str]()
        if parallelism is None:
            parallelism, errors = _of_keywords(sizes)
        elif sizes:
            errors.append(
                f"{', '.join(sizes)} must be fields of the parallelism; got both. "
                "Give dataclasses.replace(parallelism, ...)"
            )
        object.__setattr__(self, "parallelism", parallelism)
        if errors:
            raise ValueError(
                f"{type(self).__name__}: {'; '.join(errors + self._invalid_fields())}."
            )
        self.__post_init__()

    def __getattr__(self, name: str) -> Any:
        if name in FIELDS:
            return getattr(self.parallelism, name)
        renamed = " Use pipeline_schedule()." if name == "plan" else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.{renamed}")

    # -- checks -----------------------------------------------------------------------------------

    def contradictions(self) -> list[str]:
        errors = list[str]()
        if self.in_stages():
            stages = self.parallelism.stages
            errors += refusal(lambda: check_balance(self.balance, stages, self.sample))
        errors += self._not_in_a_loop()
        p = self.parallelism
        if self.sync_batchnorm and (p.pipeline, p.tensor, p.sequence) != (1, 1, 1):
            errors.append("sync_batchnorm=True must have pipeline=1, tensor=1 and sequence=1")
        if self.mesh is not None and not errors:
            errors += self._mesh_errors(self.mesh)
        return super().contradictions() + errors

    def _not_in_a_loop(self) -> list[str]:
        """List the fields of the parallelism that only a functional step by a plan has."""
        p = self.parallelism
        errors = list[str]()
        in_every_layer = p.recompute == "full" and not self.in_stages()
        if in_every_layer or p.recompute == "selective" or str(p.recompute).startswith("except "):
            errors.append(
                f'recompute must be "never", or "full" in stages; got "{p.recompute}": '
                "wrap the layers in fs.remat"
            )
        if p.microbatches != 1 and not self.in_stages():
            errors.append(
                f"microbatches must be 1 without stages; got {p.microbatches}: "
                "accumulate in the loop"
            )
        if p.replicas > 1:
            errors.append(f"replicas must be 1; got {p.replicas}")
        if p.state_memory != "device":
            errors.append(
                f'state_memory must be "device"; got "{p.state_memory}": '
                "offload= of the plugin updates on the host"
            )
        return errors

    def _mesh_errors(self, mesh: Mesh) -> list[str]:
        """List the axes of a mesh that have other sizes than the parallelism."""
        p = self.parallelism
        sizes = {self.pipeline_axis: 1, **mesh.shape}
        expected = {self.pipeline_axis: p.pipeline, **p.expert_axes, **p.inner_axes}
        errors = list[str]()
        for axis, size in expected.items():
            if sizes.get(axis) != size:
                errors.append(f'"{axis}" of {mesh} must have size {size}, got {sizes.get(axis)}')

        data = prod([sizes[axis] for axis in self.axes() if axis not in p.expert_axes])
        if p.data not in (None, data):
            errors.append(f"data must be that of {mesh}, {data}, got {p.data}")
        return errors

    # -- what a plugin decides --------------------------------------------------------------------

    def zero(self) -> Stage:
        return self.parallelism.zero_stage

    def state_memory(self) -> Memory:
        return self.offload or "device"

    def param_memory(self) -> Memory:
        has_sharded_params = self.parallelism.zero_stage == 3 and bool(self.axes())
        return self.state_memory() if has_sharded_params else "device"

    def in_stages(self) -> bool:
        return self.parallelism.in_stages

    def pipeline_schedule(self) -> Schedule:
        """Return the schedule of the stages."""
        return self.parallelism.pipeline_schedule()

    def default_mesh(self) -> Mesh:
        """Return the mesh that was given, or that of all devices or processes."""
        if self.mesh is not None:
            return self.mesh
        devices = present_devices()
        if reason := self.parallelism.misfit(devices=devices):
            raise ValueError(f"HybridParallelPlugin: {reason}.")
        sizes = dict[str, int]()
        for axis, size in self.parallelism.on(devices).axes.items():
            sizes[self.pipeline_axis if axis == "pipe" else axis] = size
        return make_mesh(sizes)

    def axes(self) -> tuple[str, ...]:
        shared = (self.pipeline_axis, *self.parallelism.inner_axes)
        return tuple([axis for axis in super().axes() if axis not in shared])

    def rules(self, within: Rules = None) -> Rules:
        return param_rules(self.parallelism, self.axes(), within)

    def gradient_options(self) -> dict[str, Any]:
        options = {
            **super().gradient_options(),
            **step_options(self.parallelism, self.pipeline_axis),
        }
        if self.in_stages():
            # Groups of one layer recompute what layers do that recompute in full.
            recompute = self.parallelism.recompute
            options["recompute"] = 1 if recompute == "full" else recompute
        return options

    def split(self, model: nn.Module) -> Sequence[ModelPart]:
        p = self.parallelism
        if p.inner_axes and self.sample is None:
            raise ValueError(
                f"HybridParallelPlugin: tensor={p.tensor} and sequence={p.sequence} must have "
                "sample=, the model's arguments, on which its layers are planned; got None. "
                "Give sample=batch to the plugin or to fs.parallel."
            )
        return split_model(
            model,
            p,
            sample=self.sample,
            blocks=self.blocks,
            balance=self.balance,
            tolerance=self.tensor_tolerance,
            ignore=self.tensor_ignore,
            seed=self.seed,
            styles=self.tensor_rules,
        )


def _made(factory: Any) -> Any:
    return factory()


def _of_keywords(sizes: dict[str, Any]) -> tuple[Parallelism, list[str]]:
    """Return the parallelism of keywords, a default one if they are invalid, and what is wrong."""
    made = list[Parallelism]()
    errors = refusal(lambda: made.append(Parallelism(**sizes)))
    if errors:
        return Parallelism(), [errors[0].removeprefix("Parallelism: ")]
    (parallelism,) = made
    if not parallelism.in_stages:
        parallelism = replace(parallelism, microbatches=1, schedule="1f1b", recompute="never")
    return parallelism, []


def _signature() -> Signature:
    """Return the signature of the plugin, for `help`: all keywords, those of a parallelism too."""
    parameters = [Parameter("parallelism", Parameter.POSITIONAL_OR_KEYWORD, default=None)]
    keywords = {**signature(Parallelism).parameters}
    for each in fields(HybridParallelPlugin):
        if each.name != "parallelism":
            default = each.default if each.default is not MISSING else _made(each.default_factory)
            keywords[each.name] = Parameter(
                each.name, Parameter.KEYWORD_ONLY, default=default, annotation=each.type
            )
    return Signature([*parameters, *keywords.values()])


HybridParallelPlugin.__signature__ = _signature()  # pyright: ignore[reportAttributeAccessIssue]
