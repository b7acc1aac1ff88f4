"""An optimizer whose state and work are sharded by a plugin, for the model that `boost` returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fshard.auditing.replicas import validate_replicas
from fshard.booster.full_state import full_state, loaded_state
from fshard.booster.gemini import GeminiPlugin
from fshard.booster.loop import LoopModel
from fshard.booster.model import refusing
from fshard.booster.plugins import Plugin
from fshard.booster.stages import StagedModel
from fshard.checkpoint.names import ShardedObject
from fshard.errors import OptimizerError
from fshard.memory.kinds import claim
from fshard.memory.state import UpdateOn
from fshard.mesh.layout import PyTree
from fshard.mesh.spmd.deterministic import deterministic
from fshard.optim.arguments import validate, within
from fshard.optim.chain import clipped, shrunk
from fshard.optim.contract import Optimizer, step_of
from fshard.optim.norms import exact_norms, global_norm
from fshard.optim.partition import partition_optimizer
from fshard.optim.scaling import loss_scaled, lower_scale
from fshard.optim.sharded.optimizer import ShardedOptimizer
from fshard.optim.torch_optim.instances import OptimizerSource, TorchSource
from fshard.uncompiled import uncompiled


def partitioned(
    plugin: Plugin, source: OptimizerSource, update_on: UpdateOn | None = None
) -> Callable[[], ShardedOptimizer]:
    """Return a function that shards an optimizer's state and work, with its current options."""
    update_on = update_on or plugin.update_on()
    cached = lru_cache(maxsize=1)(
        partial(_partition, plugin, update_on)
    )  # of an optimizer with the same options
    return lambda: cached(source.current_optimizer())


def _partition(plugin: Plugin, update_on: UpdateOn, opt: Optimizer) -> ShardedOptimizer:
    """Shard an optimizer's state and work by the options of a plugin."""
    mesh, axes = plugin.default_mesh(), plugin.zero_axes()
    local_axes = plugin.gradient_options().get("local", ())
    stage = plugin.zero() if axes else 0
    if plugin.precision == "fp16" and opt.loss_scale is None:
        opt = loss_scaled(opt)
    offload: Any = {"state_memory": plugin.state_memory(), "update_on": update_on}

    # Along local axes matrices are sharded in every stage: one device of them collects each.
    is_owned_along_local_axes = local_axes and stage == 0 and opt.sharding != "flat"
    if is_owned_along_local_axes:
        sharded = partition_optimizer(opt, mesh=mesh, axis=local_axes, stage=1, **offload)
        layouts = replace(sharded.layouts, are_gradients_sharded=False)
        sharded = sharded.replaced(layouts=layouts)
    else:
        sharded = partition_optimizer(
            opt,
            mesh=mesh,
            axis=axes or mesh.axis_names,
            stage=stage,
            compress=plugin.compressors(),
            **offload,
        )
    return sharded.replaced(
        missing="skip" if plugin.unused == "skip" else "zero",
        place_state=partial(plugin.placed, "state"),
    )


_stale_step = refusing(
    OptimizerError,
    "the optimizer must be the second value that boost returned; got step() of the optimizer that "
    "was boosted, which has no gradients. Write model, optimizer, *_ = booster.boost(model, "
    "optimizer).",
)
_stale_step._wrapped_by_lr_sched = True  # schedulers warn of a step that they have not wrapped


class BoostedOptimizer(torch.optim.Optimizer, ShardedObject):
    """An optimizer whose state is sharded by the plugin.

    The groups are those of the optimizer that was boosted.

    Args:
        optim: the optimizer of torch, or a pure one.
        source: the same, as pure ones.
        partitioned: returns it on shards, with the present options of the groups.
        model: whose parameters it writes.
        plugin: of both.
        has_digest: compare replicas after each step.

    `digests` counts the steps whose replicas were compared, and equal.
    """

    def __init__(
        self,
        optim: Any,
        source: OptimizerSource,
        partitioned: Callable[[], ShardedOptimizer],
        model: LoopModel | StagedModel,
        plugin: Plugin,
        has_digest: bool = False,
    ) -> None:
        self.optim = optim
        self.model = model
        self.mesh = model.mesh
        self._source = source
        self._partitioned = partitioned
        self._plugin = plugin
        self._unplaced: GeminiPlugin | None = None  # it places memory after the first steps
        if isinstance(plugin, GeminiPlugin) and plugin.placement == "auto":
            self._unplaced = plugin
        self._steps = 0
        self._has_digest = has_digest
        self.digests = 0
        self._grads: PyTree | None = None
        self.state: PyTree = self._partitioned().init(model.params)
        if isinstance(optim, torch.optim.Optimizer):
            self.defaults = optim.defaults
            vars(optim)["step"] = _stale_step

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups of the boosted optimizer, whose present options the next step uses."""
        return self.optim.param_groups

    @property
    def scale(self) -> float:
        """The loss scale; 1 outside of the mesh, where nothing is scaled."""
        loss_scale = self._partitioned().loss_scale
        if loss_scale is None or not self.model.mesh.is_member:
            return 1.0
        return float(loss_scale(self.state))

    def reduce_gradients(self) -> PyTree:
        """Return the gradients of all backwards since the last step, in their layouts.

        They are those of `scale` times the loss. The first call of a step communicates: devices
        agree, reduce the gradients that are left, and average buffers. So all must call it, as they
        must call `step`.
        """
        has_dropped = not self.model.slots.gradients.exist  # by model.zero_grad()
        if self._grads is None or has_dropped:
            self._grads = self.model.gradients(self._group_numbers())
            compression = self._partitioned().compression
            if compression is not None:
                self._grads, self.state = compression.reduce(self._grads, self.state)
        return self._grads

    def validate_takes_gradients(self) -> None:
        """Raise if gradients of this step were read: those of a further backward would be lost."""
        if self._grads is not None and self.model.slots.gradients.exist:
            raise OptimizerError(
                "backward: all losses of a step must come before its gradients are read or clipped, "
                "which reduces them; got one after clip_grad_norm, clip_grad_value or "
                "reduce_gradients. Clip last, or call optimizer.step() or optimizer.zero_grad()."
            )

    @property
    def grads(self) -> PyTree:
        """Raise with the new name."""
        raise AttributeError(
            "the gradients must be read by optimizer.reduce_gradients(), since this communicates; "
            "got optimizer.grads. "
            "Write reduce_gradients()."
        )

    def _group_numbers(self) -> list[dict[str, float]]:
        """Return the numbers in the options of the groups, which must be equal on all devices."""
        if not isinstance(self.optim, torch.optim.Optimizer):
            return []
        groups = list[dict[str, float]]()
        for group in self.optim.param_groups:
            numbers = dict[str, float]()
            for name, x in group.items():
                if isinstance(x, float | int):
                    numbers[name] = float(x)
                elif isinstance(x, Tensor) and x.numel() == 1:
                    numbers[name] = x.item()
            groups.append(numbers)
        return groups

    register_step_pre_hook = register_step_post_hook = refusing(
        OptimizerError,
        "a boosted optimizer must have no hooks around its step, which would see no gradients: these are sharded. Call the "
        "function before or after optimizer.step(); gradients are clipped by booster.clip_grad_norm.",
    )

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float | str = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor | None:
        """Scale the gradients to a total norm of at most `max_norm`; return the norm before.

        `norm_type` is p of the norm: 2 the Euclidean one, "inf" the largest element.
        """
        order = float(norm_type)
        scale = self.scale  # gradients are of this times the loss
        validate(
            "clip_grad_norm",
            within("[0, inf]", max_norm=max_norm),
            within("(0, inf]", norm_type=order),
        )
        with exact_norms(self.model.is_reproducible):
            norm = global_norm(self.reduce_gradients(), order)
        has_value = self.model.mesh.is_member
        if error_if_nonfinite and has_value and not norm.isfinite():
            raise OptimizerError(
                f"clip_grad_norm: the norm of the gradients must be finite; got {norm.item()}."
            )
        self._grads = shrunk(self.reduce_gradients(), norm, max_norm * scale)
        return norm / scale if has_value else None

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Keep each element of the gradients between -clip_value and clip_value."""
        validate("clip_grad_value", within("[0, inf]", clip_value=clip_value))
        is_scaled = self._partitioned().loss_scale is not None
        limit = clip_value * self.scale
        self._grads = clipped(self.reduce_gradients(), limit, keep_infinite=is_scaled)

    @uncompiled
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Tensor] | None = None
    ) -> Tensor | None:
        """Take a step along the gradients, including those of `closure`; return its result.

        The closure is called once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if isinstance(self._plugin, GeminiPlugin):
            self._plugin.validate_peak()
        claim(self.state, "state")

        model, opt = self.model, self._partitioned()
        scale = self.scale
        is_reproducible = model.is_reproducible
        # In reproducible mode without fused kernels, which round otherwise where a shard ends.
        fused_step = None if is_reproducible else opt.step
        with (
            torch.no_grad(),
            deterministic(is_reproducible, model.mesh.device_type),
            exact_norms(is_reproducible),
        ):
            step = step_of(Optimizer(opt.init, opt.update, fused_step))
            write = partial(step, self.reduce_gradients(), self.state)
            params = model.params
            with model.draws_of_update():
                if model.replicas is None:
                    model.params, self.state = write(params)
                else:
                    model.params, self.state = model.combine(write)
        if opt.loss_scale is not None and model.mesh.is_member:
            lower_scale(opt.loss_scale(self.state), scale, model.largest_loss)
        self._grads = None
        model.slots.gradients.exist = False
        self._steps += 1

        # From the second step on units are prefetched, so that peaks are those of all later steps.
        if self._unplaced is not None and self._steps == 2:
            self._place(self._unplaced)
        if isinstance(self.optim, torch.optim.Optimizer):
            vars(self.optim)["_opt_called"] = True  # schedulers check that a step precedes theirs
        if self._has_digest:
            self._validate_replicas()
        return loss

    def _validate_replicas(self) -> None:
        """Raise unless devices that hold the same after a step hold equal values."""
        buffers: PyTree = self.model.buffer_trees()
        if isinstance(self.model, LoopModel):
            (buffers,) = buffers  # one tree; stages have one each
        trees = {"parameter": self.model.params, "state": self.state, "buffer": buffers}
        validate_replicas(trees, self.mesh, f"step {self._steps}")
        self.digests += 1

    def _place(self, plugin: GeminiPlugin) -> None:
        """Return to the devices what has room there."""
        assert isinstance(self.model, LoopModel)
        update_on, self.model.params, self.state = plugin.placed_in_loop(
            self.model.params, self.state
        )
        if update_on != plugin.update_on():
            self._partitioned = partitioned(plugin, self._source, update_on)
            self.model.set_gradients(self._partitioned().gradients)
        self._unplaced = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self._grads = None
        self.model.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train parameters that were in no group so far."""
        self.optim.add_param_group(param_group)
        if isinstance(self._source, TorchSource):
            init = self._partitioned().init
            self.model.params, self.state = self._source.add_group_state(
                self.model.params, self.state, init
            )

    def sharded_state(self) -> dict[str, Any]:
        """Return sharded state and groups by the names of parameters: `fs.save` stores these."""
        replicas, state = self.model.replicas, self.state
        if replicas is not None:
            state = replicas.joined([state])
        if isinstance(self._source, TorchSource):
            return {"state": state, "groups": self._source}
        return {"state": state}

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Use arrays of `sharded_state`, into which others have been written."""
        replicas = self.model.replicas
        self.state = state["state"]
        if replicas is not None:
            self.state = replicas.local(self.state, self.model.mesh)

    def state_dict(self) -> dict[str, Any]:
        """Return the full state: of an optimizer of torch in its form. All devices must call it."""
        replicas = self.model.replicas
        state = self.state if replicas is None else replicas.mean(self.state)
        return full_state(self._source, state, self.model.first_names())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state, such as one device has; all devices must give equal ones."""
        init = self._partitioned().init(self.model.params)
        self.state = loaded_state(self._source, init, self.model.first_names(), state_dict)

    __reduce_ex__ = refusing(
        OptimizerError, "a boosted optimizer is sharded, so it cannot be copied or pickled."
    )
