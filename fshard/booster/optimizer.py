"""An optimizer whose state and work are sharded by a plugin, and that steps along the gradients of a boosted model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

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
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import put_equal
from fshard.mesh.spmd.deterministic import deterministic
from fshard.optim.arguments import validate, within
from fshard.optim.chain import clipped, shrunk
from fshard.optim.contract import Optimizer, Update, donating, step_of, writing
from fshard.optim.leaves import Leaf, Leaves, trainable
from fshard.optim.norms import exact_norms, global_norm
from fshard.optim.partition import Partitioned, partition_optimizer
from fshard.optim.scaling import loss_scaled
from fshard.optim.torch_optim.instances import OptimizerSource, TorchSource
from fshard.uncompiled import uncompiled


def partitioned(
    plugin: Plugin, source: OptimizerSource, update_on: UpdateOn | None = None
) -> Callable[[], Partitioned]:
    """Return a function that shards an optimizer's state and work, with its current options."""
    update_on = update_on or plugin.update_on()
    cached = lru_cache(maxsize=1)(
        partial(_partition, plugin, update_on)
    )  # of an optimizer with the same options
    return lambda: cached(source.current_optimizer())


def _partition(plugin: Plugin, update_on: UpdateOn, opt: Optimizer) -> Partitioned:
    mesh, axes, layers = (
        plugin.default_mesh(),
        plugin.zero_axes(),
        plugin.gradient_options().get("local", ()),
    )
    stage = plugin.zero() if axes else 0
    opt = loss_scaled(opt) if plugin.precision == "fp16" and opt.loss_scale is None else opt
    axes, compress, memory = axes or mesh.axis_names, plugin.compressors(), plugin.state_memory()
    offload: Any = {"state_memory": memory, "update_on": update_on}
    sharded = partition_optimizer(
        opt, mesh=mesh, axis=axes, stage=stage, compress=compress, **offload
    )
    if (
        layers and stage == 0 and opt.elementwise is not True
    ):  # the shards of a matrix are collected by one device
        by_owners = partition_optimizer(opt, mesh=mesh, axis=layers, stage=1, **offload)
        sharded = by_owners._replace(gradients=sharded.gradients)
    sharded = sharded if plugin.unused == "skip" else _with_zeros(sharded)
    return sharded._replace(
        init=lambda params, init=sharded.init: plugin.placed("state", init(params)),
        on_mesh=lambda mesh: _partition(replace(plugin, mesh=mesh), update_on, opt),
    )


def _with_zeros(opt: Partitioned) -> Partitioned:
    """Return an optimizer that takes zeros for gradients that are None."""

    def filled(x: Leaf, grad: Leaf) -> Leaf:
        is_unused = grad is None and isinstance(x, Sharded) and trainable(x)
        return (
            put_equal(torch.zeros(x.shape, dtype=x.dtype), opt.gradients(x.layout))
            if is_unused
            else grad
        )

    def run(update: Update, grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        leaves = Leaves.of(params)
        return update(leaves.mapped(filled, leaves.beside(grads, "grads")), state, params)

    step = opt.step and donating(partial(run, writing(opt.step)))
    return opt._replace(update=partial(run, opt.update), step=step)


_stale_step = refusing(
    OptimizerError,
    "the optimizer must be the second value that boost returned; got step() of the optimizer that was boosted, which has no "
    "gradients. Write model, optimizer, *_ = booster.boost(model, optimizer).",
)
_stale_step._wrapped_by_lr_sched = True  # schedulers warn of a step that they have not wrapped


class BoostedOptimizer(torch.optim.Optimizer, ShardedObject):
    """An optimizer whose state is sharded by the plugin; its groups are those of the optimizer that was boosted.

    Args:
        optim: the optimizer of torch, or a pure one.
        source: the same, as pure ones.
        partitioned: returns it on shards, with the present options of the groups.
        model: whose parameters it writes.
        plugin: of both.
    """

    def __init__(
        self,
        optim: Any,
        source: OptimizerSource,
        partitioned: Callable[[], Partitioned],
        model: LoopModel | StagedModel,
        plugin: Plugin,
    ) -> None:
        self.optim, self._source, self._partitioned, self.model = optim, source, partitioned, model
        self._plugin = plugin
        self._unplaced = (
            plugin if isinstance(plugin, GeminiPlugin) and plugin.placement == "auto" else None
        )
        self._steps = 0
        self._grads: PyTree | None = None
        self.state: PyTree = self._partitioned().init(model.params)
        if isinstance(optim, torch.optim.Optimizer):
            self.defaults = optim.defaults
            vars(optim)["step"] = _stale_step

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups of the optimizer that was boosted: options written to them are used in the next step."""
        return self.optim.param_groups

    @property
    def scale(self) -> float:
        """The loss scale."""
        loss_scale = self._partitioned().loss_scale
        return 1.0 if loss_scale is None else float(loss_scale(self.state))

    @property
    def grads(self) -> PyTree:
        """The gradients of all backwards since the last step, of `scale` times the loss, in their layouts."""
        has_dropped = not self.model.slots.gradients.exist  # by model.zero_grad()
        if self._grads is None or has_dropped:
            self._grads, compression = (
                self.model.gradients(self._numbers()),
                self._partitioned().compression,
            )
            if compression is not None:
                self._grads, self.state = compression.reduce(self._grads, self.state)
        return self._grads

    def _numbers(self) -> list[dict[str, float]]:
        """Return the numbers among the options of the groups: they must be the same on all devices."""
        groups = self.optim.param_groups if isinstance(self.optim, torch.optim.Optimizer) else []
        return [
            {name: float(x) for name, x in group.items() if isinstance(x, float | int)}
            | {
                name: x.item()
                for name, x in group.items()
                if isinstance(x, Tensor) and x.numel() == 1
            }
            for group in groups
        ]

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float | str = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`; return the norm before.

        `norm_type` is p of the norm: 2 the Euclidean one, "inf" the largest element.
        """
        order, scale = float(norm_type), self.scale
        validate(
            "clip_grad_norm",
            within("[0, inf]", max_norm=max_norm),
            within("(0, inf]", norm_type=order),
        )
        with exact_norms(self.model.is_reproducible):
            norm = global_norm(self.grads, order)
        if error_if_nonfinite and not norm.isfinite():
            raise OptimizerError(
                f"clip_grad_norm: the norm of the gradients must be finite; got {norm.item()}."
            )
        self._grads = shrunk(self.grads, norm, max_norm * scale)
        return norm / scale

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Keep each element of the gradients between -clip_value and clip_value."""
        validate("clip_grad_value", within("[0, inf]", clip_value=clip_value))
        is_scaled = self._partitioned().loss_scale is not None
        self._grads = clipped(self.grads, clip_value * self.scale, keep_infinite=is_scaled)

    @uncompiled
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Tensor] | None = None
    ) -> Tensor | None:
        """Take a step along the gradients, including those of `closure`, which is called once; return its result."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        model, opt, exact = self.model, self._partitioned(), self.model.is_reproducible
        step = None if exact else opt.step  # fused kernels round otherwise where a shard ends
        claim(self.state, "state")
        if isinstance(self._plugin, GeminiPlugin):
            self._plugin.validate_peak()
        with torch.no_grad(), deterministic(exact, model.mesh.device_type), exact_norms(exact):
            write = partial(step_of(Optimizer(opt.init, opt.update, step)), self.grads, self.state)
            params = model.params
            with model.draws_of_update():
                model.params, self.state = (
                    write(params) if model.replicas is None else model.combine(write)
                )
        self._grads, model.slots.gradients.exist = None, False
        self._steps += 1
        if (
            self._unplaced is not None and self._steps == 2
        ):  # units are prefetched since the first one
            self._place(self._unplaced)
        if isinstance(self.optim, torch.optim.Optimizer):
            vars(self.optim)["_opt_called"] = True  # schedulers check that a step precedes theirs
        return loss

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
            grown = self._source.add_group_state(
                self.model.params, self.state, self._partitioned().init
            )
            self.model.params, self.state = grown

    def sharded_state(self) -> dict[str, Any]:
        """Return state and groups by the names of parameters, as they are sharded: `fs.save` stores these."""
        groups = {"groups": self._source} if isinstance(self._source, TorchSource) else {}
        replicas = self.model.replicas
        return {
            "state": self.state if replicas is None else replicas.joined([self.state]),
            **groups,
        }

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Use arrays of `sharded_state`, into which others have been written."""
        replicas = self.model.replicas
        self.state = (
            state["state"] if replicas is None else replicas.local(state["state"], self.model.mesh)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the full state: of an optimizer of torch in its form. All devices must call it."""
        replicas = self.model.replicas
        state = self.state if replicas is None else replicas.mean(self.state)
        return full_state(self._source, state, self.model.first_names())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state, such as that of the optimizer on one device; all devices must give equal ones."""
        init = self._partitioned().init(self.model.params)
        self.state = loaded_state(self._source, init, self.model.first_names(), state_dict)

    __reduce_ex__ = refusing(
        OptimizerError, "a boosted optimizer is sharded, so it cannot be copied or pickled."
    )
