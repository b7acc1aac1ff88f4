"""The model and the optimizer that `Booster.boost` returns for a torch-style loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fshard.booster.announced import Announced
from fshard.booster.loop import ImperativeGradient
from fshard.booster.loop_stages import StagedGradient
from fshard.copying import copied
from fshard.errors import LayoutError, ModuleError, OptimizerError
from fshard.mesh.layout import Layout, Mesh, PyTree, flatten, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import unshard
from fshard.mesh.spmd.run import local_devices, one_thread
from fshard.mesh.spmd.scope import here
from fshard.optim.arguments import validate, within
from fshard.optim.chain import clip_by_value, clipped_if_finite, shrunk
from fshard.optim.contract import Optimizer, step_of
from fshard.optim.leaves import trainable
from fshard.optim.norms import global_norm
from fshard.optim.partition import Partitioned
from fshard.optim.torch_instances import OptimizerSource, TorchSource
from fshard.uncompiled import uncompiled


def _refusing(kind: type[Exception], text: str) -> Any:
    """Return a method that raises."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise kind(text)

    return refuse


class Model(nn.Module):
    """A model whose parameters are sharded by its plugin: called as before, on this device's part of the batch.

    `module` is the module that was boosted, and it is the one that runs: hooks, attributes and modes set there take
    effect. Between steps its parameters have no memory; `unwrap()` returns a copy with full parameters.
    """

    def __init__(self, module: nn.Module, gradient: ImperativeGradient | StagedGradient) -> None:
        super().__init__()
        self.module = module
        self.gradient = gradient

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if isinstance(self.gradient, StagedGradient):
            raise ModuleError(
                "a model in stages is run by its schedule: booster.execute_pipeline(iter(dataloader), model, criterion, "
                "optimizer), in torch.no_grad() to evaluate it."
            )
        return self.gradient(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as the optimizer's `zero_grad` does."""
        self.gradient.drop()

    state_dict = _refusing(
        ModuleError, "state_dict: a boosted model is sharded. Call model.unwrap().state_dict() on all devices."
    )
    load_state_dict = _refusing(
        ModuleError, "load_state_dict: a boosted model is sharded. Load before the model is boosted."
    )
    _apply = _refusing(
        ModuleError, "a boosted model is sharded, so it cannot be moved or converted. Do it before boosting."
    )
    __deepcopy__ = _refusing(
        ModuleError,
        "a boosted model is sharded, so it cannot be copied. model.unwrap() is a copy with full parameters; "
        "fs.optim.ema(opt, decay) keeps an average.",
    )

    def run_stages(
        self,
        criterion: Callable[..., Tensor] | None,
        batches: Iterator[Any],
        optimizer: BoostedOptimizer | None,
        outputs: bool,
    ) -> tuple[Tensor, Any]:
        """Run a schedule on the next batch; return its loss and, if requested, the last stage's result for each
        sample.
        """
        wrong: list[str] = []
        if not isinstance(self.gradient, StagedGradient):
            wrong.append(
                "the model must be cut into stages, by HybridParallelPlugin; this one is called, model(inputs)"
            )
        if not hasattr(batches, "__next__"):
            wrong.append(f"data_iter must be an iterator, iter(dataloader); got {type(batches).__name__}")
        if optimizer is None and torch.is_grad_enabled():
            wrong.append("an optimizer must be given, or torch.no_grad() around the call")
        if self._forward_hooks or self._forward_pre_hooks:
            wrong.append(
                "the boosted model must have no hooks, since no stage has the full model; hook a submodule of model.module"
            )
        if wrong or not isinstance(self.gradient, StagedGradient):
            raise ModuleError(f"execute_pipeline: {'; '.join(wrong)}.")
        scale = boosted(optimizer).scale if torch.is_grad_enabled() else 1.0
        value = self.gradient.run(criterion, next(batches), scale=scale, outputs=outputs)
        return value.loss, unshard(value.aux) if outputs else None

    def unwrap(self) -> nn.Module:
        """Return a copy of the module with full parameters; all devices have to call it."""
        params, buffers = self.gradient.full()
        full: dict[int, Any] = {}
        for name, x in self.module.named_parameters():
            own = params.get(name, buffers.get(name))
            assert own is not None
            full[id(x)] = nn.Parameter(own.detach().clone(), requires_grad=x.requires_grad)
        for name, x in self.module.named_buffers():
            full[id(x)] = buffers[name].clone() if name in buffers else x.clone()
        return copied(self.module, full)


@dataclass
class Loop:
    """The models of a Booster on one device, and whether their backwards reduce gradients.

    `announced`: the batches of its loaders, for functional steps.
    """

    models: list[Model] = field(default_factory=list[Model])
    sync: bool = True
    inits: int = 0
    announced: Announced | None = None


class Loops:
    """The loops of all devices that use one Booster: those of a virtual mesh may share it, and run after run."""

    def __init__(self) -> None:
        self._loops = WeakKeyDictionary[Any, Loop]()

    @property
    def own(self) -> Loop:
        """That of the calling device."""
        return self._loops.setdefault(here() or self, Loop())

    @contextmanager
    def unsynchronised(self) -> Generator[None]:
        """Keep the gradients of the calling device's backwards on the device."""
        own = self.own
        before, own.sync = own.sync, False
        try:
            yield
        finally:
            own.sync = before

    def notice(self, mesh: Mesh, axes: tuple[str, ...], samples: int | None, part: Any) -> None:
        """Announce a batch to the calling device's models and steps."""
        own = self.own
        if axes:
            own.announced = own.announced or Announced(mesh, axes)
            own.announced.announce(samples, part)
        for model in own.models:
            model.gradient.announce(samples, part)

    def batch(self, given: PyTree) -> PyTree:
        """Return the batch of a functional step as this device's part: see `Announced.part`."""
        own = self.own
        return given if own.announced is None else own.announced.part(given)


class BoostedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is sharded by the plugin; its groups are those of the optimizer that was boosted.

    Args:
        given: the optimizer of torch, or a pure one.
        opts: returns the partitioned optimizer with the present options of the groups.
        model: whose parameters it writes.
        source: the given optimizer, as pure ones.
        zeros: True gives a gradient of zeros to parameters that no device has used.
    """

    def __init__(
        self, given: Any, opts: Callable[[], Partitioned], model: Model, source: OptimizerSource, *, zeros: bool
    ) -> None:
        self.optim = given
        self._opts, self._gradient, self._source, self._zeros = opts, model.gradient, source, zeros
        self._grads: PyTree | None = None
        self.state: PyTree = opts().init(self._gradient.params)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups of the optimizer that was boosted: options written there count in the next step."""
        return self._of_torch("param_groups")

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The default options of groups."""
        return self._of_torch("defaults")

    def _of_torch(self, name: str) -> Any:
        if not isinstance(self.optim, torch.optim.Optimizer):
            raise OptimizerError(
                f"{name}: a pure optimizer has none. Give it a schedule as its rate: "
                "fs.optim.adamw(fs.optim.schedules.cosine(...))."
            )
        return getattr(self.optim, name)

    @property
    def scale(self) -> float:
        """The loss scale."""
        loss_scale = self._opts().loss_scale
        return 1.0 if loss_scale is None else float(loss_scale(self.state))

    @uncompiled
    def backward(self, loss: Tensor, *, sync: bool = True) -> None:
        """Add the gradient of a loss."""
        if not isinstance(self._gradient, ImperativeGradient):
            raise OptimizerError("the backward of a model in stages is part of booster.execute_pipeline(...).")
        if not isinstance(loss, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"backward: the loss must be a tensor that the model's output led to; got {loss!r}.")
        if self._grads is not None:
            raise OptimizerError("backward must come before the gradients of a step are clipped or read.")
        self._gradient.backward(loss, scale=self.scale, sync=sync)

    @property
    def grads(self) -> PyTree:
        """The gradients of all backwards since the last step, of `scale` times the loss, in their layouts."""
        if self._grads is None:
            grads, own = self._gradient.gradients(), self._gradient
            self._grads = with_zeros(grads, own.params, own.gradient_layout) if self._zeros else grads
        return self._grads

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float | str = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`; return the norm before.

        Args:
            max_norm: the limit.
            norm_type: p of the norm: 2 the Euclidean one, inf the largest element.
            error_if_nonfinite: raise if the norm is nan or infinite.
        """
        order = torch.inf if norm_type == "inf" else norm_type
        validate("clip_grad_norm", _no_numbers(max_norm=max_norm, norm_type=order))
        validate("clip_grad_norm", within("[0, inf]", max_norm=max_norm), within("(0, inf]", norm_type=order))
        norm, scale = global_norm(self.grads, float(order)), self.scale
        if error_if_nonfinite and not norm.isfinite():
            raise OptimizerError(f"clip_grad_norm: the norm of the gradients must be finite; got {norm.item()}.")
        self._grads = shrunk(self.grads, norm, max_norm * scale)
        return norm / scale

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Keep each element of the gradients between -clip_value and clip_value."""
        validate("clip_grad_value", _no_numbers(clip_value=clip_value))
        if self._opts().loss_scale is None:
            self._grads, _ = clip_by_value(float(clip_value)).update(self.grads, (), None)
        else:
            validate("clip_grad_value", within("[0, inf]", clip_value=clip_value))
            self._grads = clipped_if_finite(self.grads, clip_value * self.scale)

    @uncompiled
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Tensor] | None = None
    ) -> Tensor | None:
        """Take a step along the gradients, including those of `closure`, which is called once; return its result."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        own, opt = self._gradient, self._opts()
        step = None if own.is_reproducible else opt.step  # fused kernels round otherwise where a shard ends
        with torch.no_grad(), one_thread(own.is_reproducible):
            write = step_of(Optimizer(opt.init, opt.update, step, arrays=True))
            own.params, self.state = write(self.grads, self.state, own.params)
        self._grads = None
        if isinstance(self.optim, torch.optim.Optimizer):
            vars(self.optim)["_opt_called"] = True  # schedulers check that a step precedes theirs
        return loss

    state_dict = _refusing(OptimizerError, "state_dict: a boosted optimizer's state is sharded: optimizer.state.")
    load_state_dict = _refusing(
        OptimizerError, "load_state_dict: a boosted optimizer's state is sharded: optimizer.state."
    )
    __reduce_ex__ = _refusing(OptimizerError, "a boosted optimizer is sharded, so it cannot be copied or pickled.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train parameters that were in no group so far."""
        self._of_torch("add_param_group")(param_group)
        if isinstance(self._source, TorchSource):
            own = self._gradient
            own.params, self.state = self._source.grown(own.params, self.state, self._opts().init)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self._grads = None
        self._gradient.drop()


def _no_numbers(**given: Any) -> list[str]:
    """Return a complaint of each that is neither a number nor a tensor of one."""
    wrong = {k: x for k, x in given.items() if not (isinstance(x, Real) or (isinstance(x, Tensor) and x.numel() == 1))}
    return [f"{name} is a number, not {x!r}" for name, x in wrong.items()]


def boosted_model(model: Any) -> Model:
    """Return a model that `boost` has returned; raise if it is another."""
    return _boosted(model, Model, "model", ModuleError)


def boosted(optimizer: Any) -> BoostedOptimizer:
    """Return an optimizer that `boost` has returned; raise if it is another."""
    return _boosted(optimizer, BoostedOptimizer, "optimizer", OptimizerError)


def _boosted(given: Any, kind: type[Any], name: str, error: type[Exception]) -> Any:
    if not isinstance(given, kind):
        raise error(
            f"{name} must be what boost has returned; got {type(given).__name__}. Write "
            "model, optimizer, *_ = booster.boost(model, optimizer), and give that one."
        )
    return given


def with_zeros(grads: PyTree, params: PyTree, gradient_layout: Callable[[Layout], Layout]) -> PyTree:
    """Return gradients with zeros for trained parameters that have none; `gradient_layout` gives the layout of a gradient."""
    given, _ = flatten(grads, sharded_is_leaf=True, none_is_leaf=True)
    leaves, structure = flatten(params, sharded_is_leaf=True, none_is_leaf=True)
    both = zip(leaves, given, strict=True)
    return unflatten(
        structure, [_zeros(x, gradient_layout(x.layout)) if g is None and trainable(x) else g for x, g in both]
    )


def _zeros(x: Sharded, layout: Layout) -> Sharded:
    near = x.shards[0]
    shapes = [layout.local_shape(x.shape, device) for device in local_devices(x.mesh)]
    return Sharded(x.shape, layout, tuple(near.new_zeros(shape) for shape in shapes))
