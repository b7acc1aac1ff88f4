"""The model and the optimizer that `Booster.boost` returns: what is common to models in a loop and in stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from fshard.booster.plugins import Plugin
from fshard.booster.sharding import shard_model
from fshard.copying import copied
from fshard.errors import ModuleError, OptimizerError, ScopeError
from fshard.mesh.layout import PyTree
from fshard.mesh.reshard.device_put import unshard
from fshard.mesh.spmd.run import is_outside, one_thread
from fshard.optim.arguments import validate, within
from fshard.optim.chain import clipped, shrunk
from fshard.optim.contract import Optimizer, step_of
from fshard.optim.norms import global_norm
from fshard.optim.partition import Partitioned
from fshard.optim.torch_instances import OptimizerSource, TorchSource
from fshard.transforms.reproducible.randomness import keyed_random
from fshard.uncompiled import uncompiled


def refusing(kind: type[Exception], text: str) -> Any:
    """Return a method that raises."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise kind(text)

    return refuse


class BoostedModel(nn.Module):
    """A model whose parameters are sharded by its plugin: called as before, on this device's part of the batch.

    `module` is the module that was boosted, and it is the one that runs: hooks, attributes and modes set there take
    effect. Between steps its parameters have no memory; `unwrap()` returns a copy with full parameters.

    Args:
        module: runs in place, and the memory of its parameters is freed.
        plugin: with its mesh.
        source: which parameters are trained.
    """

    params: PyTree  # in their layouts

    def __init__(self, module: nn.Module, plugin: Plugin, source: OptimizerSource) -> None:
        super().__init__()
        self.module, self.mesh, self.is_reproducible = module, plugin.default_mesh(), plugin.reproducible
        self._seed, self._steps, self._forwards, self._others = plugin.seed, 0, 0, 0
        self.refuse_outside()
        self.function, self.params, self.module_buffers = shard_model(plugin, module, source, in_place=True)

    def refuse_outside(self) -> None:
        """Raise unless the caller is one device of the mesh."""
        if is_outside(self.mesh):
            raise ScopeError(
                f"a loop must run as one device of {self.mesh}. Call it inside of fs.run(main, mesh=mesh), or under torchrun."
            )

    def trees(self) -> list[PyTree]:
        """Return the trees of parameters and buffers by name."""
        return [self.params, self.module_buffers]

    def backward(self, loss: Tensor, *, scale: float, sync: bool) -> None:
        """Add the gradient of `scale` times the loss; without `sync` it is not reduced yet."""
        raise NotImplementedError

    def gradients(self) -> PyTree:
        """Return the gradients of all backwards since the last time; None where no device has used a parameter."""
        raise NotImplementedError

    def draws(self, *, grad: bool) -> AbstractContextManager[None]:
        """Return the context of the next forward's random draws.

        The first forward of a step draws as a functional step does; those without gradients do not change this.
        """
        if not grad:
            self._others += 1
            return keyed_random(self._seed, self._steps, "no_grad", self._others)
        self._forwards += 1
        return keyed_random(self._seed, self._steps, self._forwards - 1)

    def end_step(self) -> None:
        """Count a step of the optimizer."""
        self._steps, self._forwards = self._steps + 1, 0

    def unwrap(self) -> nn.Module:
        """Return a copy of the module with full parameters; all devices must call it."""
        values = {name: x for tree in unshard(self.trees()) for name, x in tree.items()}
        full: dict[int, Any] = {id(x): values.get(name, x).clone() for name, x in self.module.named_buffers()}
        for name, x in self.module.named_parameters():
            full[id(x)] = nn.Parameter(values[name].detach().clone(), requires_grad=x.requires_grad)
        return copied(self.module, full)

    state_dict = refusing(ModuleError, "a boosted model is sharded: call model.unwrap().state_dict() on all devices.")
    load_state_dict = refusing(ModuleError, "a boosted model is sharded. Load before the model is boosted.")
    _apply = refusing(ModuleError, "a boosted model is sharded. Move or convert it before it is boosted.")
    __deepcopy__ = refusing(ModuleError, "a boosted model is sharded: model.unwrap() is a copy with full parameters.")


class BoostedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is sharded by the plugin; its groups are those of the optimizer that was boosted.

    Args:
        optim: the optimizer of torch, or a pure one.
        source: the same, as pure ones.
        partitioned: returns it on shards, with the present options of the groups.
        model: whose parameters it writes.
    """

    def __init__(
        self, optim: Any, source: OptimizerSource, partitioned: Callable[[], Partitioned], model: BoostedModel
    ) -> None:
        self.optim, self._source, self._partitioned, self._model = optim, source, partitioned, model
        self._grads: PyTree | None = None
        self.state: PyTree = self._partitioned().init(model.params)
        if isinstance(optim, torch.optim.Optimizer):  # options written to the groups count in the next step
            self.param_groups, self.defaults = optim.param_groups, optim.defaults

    @property
    def scale(self) -> float:
        """The loss scale."""
        loss_scale = self._partitioned().loss_scale
        return 1.0 if loss_scale is None else float(loss_scale(self.state))

    @uncompiled
    def backward(self, loss: Tensor, *, sync: bool = True) -> None:
        """Add the gradient of a loss."""
        if self._grads is not None:
            raise OptimizerError("backward must come before the gradients of a step are clipped or read.")
        self._model.backward(loss, scale=self.scale, sync=sync)

    @property
    def grads(self) -> PyTree:
        """The gradients of all backwards since the last step, of `scale` times the loss, in their layouts."""
        if self._grads is None:
            self._grads = self._model.gradients()
        return self._grads

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float | str = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`; return the norm before.

        `norm_type` is p of the norm: 2 the Euclidean one, "inf" the largest element.
        """
        order = float(norm_type)
        validate("clip_grad_norm", within("[0, inf]", max_norm=max_norm), within("(0, inf]", norm_type=order))
        norm, scale = global_norm(self.grads, order), self.scale
        if error_if_nonfinite and not norm.isfinite():
            raise OptimizerError(f"clip_grad_norm: the norm of the gradients must be finite; got {norm.item()}.")
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
        model, opt = self._model, self._partitioned()
        step = None if model.is_reproducible else opt.step  # fused kernels round otherwise where a shard ends
        with torch.no_grad(), one_thread(model.is_reproducible):
            write = step_of(Optimizer(opt.init, opt.update, step, arrays=True))
            model.params, self.state = write(self.grads, self.state, model.params)
        self._grads = None
        if isinstance(self.optim, torch.optim.Optimizer):
            vars(self.optim)["_opt_called"] = True  # schedulers check that a step precedes theirs
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self._grads = None
        self._model.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train parameters that were in no group so far."""
        self.optim.add_param_group(param_group)
        if isinstance(self._source, TorchSource):
            grown = self._source.grown(self._model.params, self.state, self._partitioned().init)
            self._model.params, self.state = grown

    state_dict = refusing(OptimizerError, "state_dict: a boosted optimizer's state is sharded: optimizer.state.")
    load_state_dict = refusing(
        OptimizerError, "load_state_dict: a boosted optimizer's state is sharded: optimizer.state."
    )
    __reduce_ex__ = refusing(OptimizerError, "a boosted optimizer is sharded, so it cannot be copied or pickled.")
