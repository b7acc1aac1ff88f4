"""An arrangement: the layouts of a model, its optimizer and batches, and the options of training. Made by a plugin.

                     ┌─ gradient(model)      for a torch-style loop
Arrangement, model ──┤
                     └─ functional(model)    a state, and the step that takes it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.booster.loop import ImperativeGradient
from fshard.booster.loop_stages import StagedGradient, loss_in, loss_of_pair
from fshard.booster.torch_style import with_zeros
from fshard.errors import ModuleError
from fshard.mesh.layout import Mesh, P, PyTree
from fshard.mesh.layout.sharded import Sharded
from fshard.optim.contract import Optimizer, Update
from fshard.optim.partition import Partitioned, Stage, partition_optimizer
from fshard.optim.scaling import loss_scaled
from fshard.optim.torch_instances import NOTHING, OptimizerSource
from fshard.pipeline.schedule.schedule import Schedule
from fshard.transforms.module.functionalize import functionalize, functionalize_in_place, refuse_hooks
from fshard.transforms.module.lazy import draw, fill, reserved
from fshard.transforms.module.replica import give_up_memory
from fshard.transforms.patterns import Choice
from fshard.transforms.reproducible.randomness import folded, keyed_random
from fshard.transforms.shard_params import Rules, apply_rules
from fshard.transforms.stages.plan import has_stages, place_stages
from fshard.transforms.train_step import Metrics, train_step
from fshard.transforms.value_and_grad import gradient_of

Criterion = Callable[..., Tensor]


class TrainState(NamedTuple):
    """The state of training that a functional step takes and returns.

    Args:
        params: in their layouts.
        optimizer: its state, in its layout.
        buffers: of the model.
        steps: number of steps so far, which seeds the next one's draws.
        turn: index among the models of one Booster.
    """

    params: PyTree
    optimizer: PyTree
    buffers: PyTree
    steps: int = 0
    turn: int = 0


Step = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Layouts and options on a mesh.

    Args:
        mesh: the devices.
        axes: that shard a batch.
        rules: layouts of parameters.
        stage: of ZeRO.
        zero_axes: the axes of ZeRO's shards; none: nothing is sharded.
        scaled: losses are scaled, for gradients in 16 bits.
        sync_batchnorm: BatchNorm takes mean and variance over all devices.
        seed: of random draws in the model.
        zeros: True gives a gradient of zeros to parameters that no device has used.
        buffers: frozen parameters that the forward updates: see `functionalize`.
        cut: splits a model into stages; None: it is not split.
        options: further ones of `value_and_grad`, with a schedule and its axis if there are stages.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    rules: Any = field(default_factory=P)
    stage: Stage = 0
    zero_axes: tuple[str, ...] = ()
    scaled: bool = False
    sync_batchnorm: bool = False
    seed: int = 0
    zeros: bool = False
    buffers: Choice = None
    cut: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def of(self, number: int) -> Arrangement:
        """Return the same for one of several models: each draws otherwise, the first by the seed itself."""
        return replace(self, seed=folded(self.seed, number)) if number else self

    def check(self) -> None:
        """Raise if options of gradients have no meaning, or contradict each other."""
        how: Any = {"mesh": self.mesh, "batch": P(self.axes) if self.axes else P(), "schedule": None, **self.options}
        stages, plan = [nn.Sequential(nn.Identity())], how["schedule"]
        what = {"has_buffers": True} if plan is None else {"loss": loss_of_pair(None)}
        gradient_of("value_and_grad", loss_of if plan is None else stages * plan.stages, **what, **how)

    def partition(self, opt: Optimizer) -> Partitioned:
        """Return an optimizer whose work is divided."""
        opt = loss_scaled(opt) if self.scaled and opt.loss_scale is None else opt
        axes = self.zero_axes or self.mesh.axis_names
        return partition_optimizer(opt, mesh=self.mesh, axis=axes, stage=self.stage if self.zero_axes else 0)

    def divided(self, source: OptimizerSource) -> Callable[[], Partitioned]:
        """Return a function that partitions an optimizer with its current options."""
        divided = lru_cache(maxsize=1)(self.partition)
        return lambda: divided(source.now())

    def gradient(self, model: nn.Module, source: OptimizerSource) -> ImperativeGradient | StagedGradient:
        """Return the gradient that a loop calls; the model runs in place, and the memory of its parameters is freed."""
        gradient_layout = self.partition(NOTHING).gradients
        how: Any = {
            "mesh": self.mesh,
            "axes": self.axes,
            "seed": self.seed,
            "gradients": gradient_layout,
            **self.options,
        }
        if self.cut is not None:
            stages = self.cut(model)
            params, buffers = self._shard_stages(model, stages, source)
            give_up_memory([model, *stages], torch.device(self.mesh.device_type))
            return StagedGradient(stages, params, buffers, **how)
        apply, params, buffers = functionalize_in_place(model, buffers=self.buffers, sync_batchnorm=self._synchronised)
        sharded = self._shard(model, params, buffers, source)
        give_up_memory([model], torch.device(self.mesh.device_type))
        return ImperativeGradient(apply, sharded, buffers, **how)

    def functional(
        self, model: nn.Module, source: OptimizerSource, criterion: Criterion | None
    ) -> tuple[TrainState, Step]:
        """Return the state to begin with, and the step that takes it: see `loss_of`."""
        if self.cut is None:
            apply, given, buffers = functionalize(model, buffers=self.buffers, sync_batchnorm=self._synchronised)
            params = self._shard(model, given, buffers, source)
            loss, own = loss_of(apply, criterion), dict[str, Any]()
        else:
            loss = self.cut(model)
            params, buffers = self._shard_stages(model, loss, source)
            own = {"loss": loss_of_pair(criterion)}
        opts = self.divided(source)
        how: Any = {
            "mesh": self.mesh,
            "batch": P(self.axes) if self.axes else P(),
            "donate": True,
            "has_buffers": True,
            **own,
            **self.options,
        }

        def made(opt: Partitioned) -> Callable[..., Any]:
            divided: Any = _of_all(opt) if self.zeros else opt
            return train_step(loss, divided, **how)

        train = lru_cache(maxsize=1)(made)

        def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
            with keyed_random(self.seed, state.steps, 0):
                params, kept, buffers, metrics = train(opts())(state.params, state.optimizer, state.buffers, batch)
            return state._replace(params=params, optimizer=kept, buffers=buffers, steps=state.steps + 1), metrics

        return TrainState(params, opts().init(params), buffers), step

    @property
    def _synchronised(self) -> tuple[str, ...] | None:
        return self.axes if self.sync_batchnorm else None

    def _shard(self, model: nn.Module, params: Any, buffers: Any, source: OptimizerSource) -> Any:
        return shard_model(model, params, buffers, self.rules, source.trained, mesh=self.mesh, seed=self.seed)

    def _shard_stages(self, model: nn.Module, stages: Sequence[nn.Module], source: OptimizerSource) -> tuple[Any, Any]:
        where: Any = {name: self.options[name] for name in ("schedule", "axis")}
        return shard_stage_tensors(model, stages, self.rules, source.trained, mesh=self.mesh, seed=self.seed, **where)


def _of_all(opt: Partitioned) -> Partitioned:
    """Return an optimizer that takes zeros for gradients that are not there."""

    def after(update: Update) -> Update:
        return lambda grads, state, params: update(with_zeros(grads, params, opt.gradients), state, params)

    return opt._replace(update=after(opt.update), step=None if opt.step is None else after(opt.step))


def loss_of(apply: Callable[..., Any], criterion: Criterion | None) -> Callable[..., tuple[Tensor, PyTree]]:
    """Return the loss of a batch (inputs, labels), as a function of parameters, buffers and it, that also returns buffers.

    Without a criterion a batch is a dict of arguments, and the model returns its loss, as those of transformers do.
    """

    def loss_fn(params: PyTree, buffers: PyTree, batch: Any) -> tuple[Tensor, PyTree]:
        if criterion is None:
            if not isinstance(batch, Mapping):
                raise ModuleError(
                    f"without a criterion a batch is a dict of the model's arguments, not a {type(batch).__name__}. Give "
                    "one to init: booster.init(model, optimizer, criterion)."
                )
            output, after = apply(params, buffers, **batch)
            return loss_in(output), after
        inputs, labels = batch
        output, after = apply(params, buffers, inputs)
        return criterion(output, labels), after

    return loss_fn


Trained = Callable[[Mapping[str, Tensor]], PyTree]
"""Freezes some of the parameters that it is given by their names."""


def shard_model(
    model: nn.Module,
    params: Mapping[str, Tensor],
    buffers: dict[str, Tensor],
    rules: Rules,
    trained: Trained,
    *,
    mesh: Mesh,
    seed: int,
) -> PyTree:
    """Shard a model's parameters by rules; add buffers of lazy layers to `buffers`."""
    sharded = apply_rules(trained(params), rules, mesh, put=reserved)
    if mesh.runtime == "abstract":
        return sharded

    def take(name: str, made: Tensor) -> None:
        if name in sharded:
            fill(sharded[name], made)
        else:
            buffers[name] = made.to(torch.device(mesh.device_type))

    draw(model, seed, {name for name, x in {**params, **buffers}.items() if x.is_meta}, take)
    return sharded


def shard_stage_tensors(
    model: nn.Module,
    stages: Sequence[nn.Module],
    rules: Rules,
    trained: Trained,
    *,
    mesh: Mesh,
    schedule: Schedule,
    axis: str,
    seed: int,
) -> tuple[Sequence[PyTree], Sequence[PyTree]]:
    """Shard the parameters and buffers of a model's stages, each on the devices that have the stage."""
    for stage in stages:
        refuse_hooks(stage)
    where: dict[str, Any] = {"mesh": mesh, "schedule": schedule, "axis": axis}
    params = place_stages([trained(dict(stage.named_parameters())) for stage in stages], rules, **where, put=reserved)
    buffers = place_stages([dict(stage.named_buffers()) for stage in stages], **where, put=reserved)
    sharded: dict[str, Sharded] = {}
    for here, own, rest in zip(has_stages(**where), params, buffers, strict=True):
        sharded |= {**own, **rest} if here else {}
    draw(model, seed, sharded, lambda name, made: fill(sharded[name], made))
    return params, buffers
