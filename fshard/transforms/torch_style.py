"""What stands for a model and an optimizer in the torch-style loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fshard.errors import LayoutError, ModuleError, OptimizerError
from fshard.mesh.mesh import Mesh
from fshard.mesh.placing import unshard
from fshard.mesh.scope import here
from fshard.mesh.tree import PyTree
from fshard.optim.chain import clip_by_value, clipped_if_finite, shrunk
from fshard.optim.norms import global_norm
from fshard.optim.numbers import above, refuse, within
from fshard.optim.partition import Partitioned
from fshard.optim.source import OptimizerSource, TorchSource
from fshard.transforms.alterations import Alterations
from fshard.transforms.announced import Announced
from fshard.transforms.by_hand import ByHand
from fshard.transforms.in_stages import InStages
from fshard.transforms.seen import seen_together
from fshard.transforms.skeleton import filled


class Model(nn.Module):
    """A model whose parameters lie as its plugin says: called as before, on this device's part of the batch.

    `module` is its structure: its tensors have shapes and a device, and no memory.  Attributes that are set there count from
    the next call on, and so do hooks.  `unwrap()` returns it with what it has learnt.
    """

    def __init__(self, module: nn.Module, learner: ByHand | InStages) -> None:
        super().__init__()
        self.module = module
        self.learner = learner
        self._alterations = Alterations(module, objects=isinstance(learner, InStages))
        parts = [module] if isinstance(learner, ByHand) else learner.stages
        self._seen = [seen_together(part).shown(hold=part is not module) for part in parts]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if isinstance(self.learner, InStages):
            raise ModuleError(
                "a model in stages is run by its schedule: booster.execute_pipeline(iter(dataloader), model, criterion, "
                "optimizer), in torch.no_grad() to evaluate it."
            )
        self._follow()
        output = self.learner(*args, **kwargs)
        self._show()
        return output

    def _follow(self) -> None:
        """Have the next call know of what was done to `module`."""
        noted = dict(vars(self._alterations))
        altered = self._alterations.found()
        if altered is not None:
            try:
                self.learner.follow(self.module, altered)
            except ModuleError:
                vars(self._alterations).update(noted)  # so the next call is told again
                raise
            for seen in self._seen:
                seen.give(altered.values, altered.attributes)

    def _show(self) -> None:
        """Let `module` have what the last call has kept and left behind."""
        left = {slot: x for seen in self._seen for slot, x in seen.left_by_all.items()}
        graphs = {slot: x for seen in self._seen for slot, x in seen.taken_graphs().items()}
        self._alterations.show(self.learner.kept(), left, self.learner.shown(graphs) if graphs else {})

    def _show_late(self) -> None:
        """Let `module` and the next call have what a backward has set."""
        for seen in self._seen:
            late = seen.late.taken(seen.changed) if seen.late is not None else {}
            if late:
                seen.left.update(late)
                self._alterations.show({}, late, {})

    def forget_late(self) -> None:
        """Look no more at what backwards set: a step is over."""
        for seen in self._seen:
            if seen.late is not None:
                seen.late.forget()

    def go_back(self, loss: Tensor, *, scale: float, sync: bool) -> None:
        """Add the gradient of `scale` times a loss."""
        if not isinstance(self.learner, ByHand):
            raise OptimizerError("the backward of a model in stages is part of booster.execute_pipeline(...).")
        if not isinstance(loss, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"backward takes one number that the model's output led to, a tensor, not {loss!r}.")
        held = [seen.late.held() for seen in self._seen if seen.late is not None]
        try:
            self.learner.backward(loss, scale=scale, sync=sync)
        finally:  # what it has set before it has failed is set, as in torch
            self._show_late()
            del held

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as the optimizer's `zero_grad` does."""
        self.learner.zero(to_none=set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: what there is here has no memory."""
        raise ModuleError(
            "state_dict: a boosted model's tensors lie as the plugin says. On all devices: model.unwrap().state_dict()."
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: what there is here has no memory."""
        raise ModuleError(
            "load_state_dict: load into the model before it is boosted; afterwards its tensors have no memory."
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Model:
        """Raise: `to`, `half` and all that changes every tensor come before."""
        raise ModuleError(
            "a boosted model is not moved or converted: its tensors lie as the plugin says, which has precision= too. Do it "
            "before the model is boosted."
        )

    def __deepcopy__(self, memo: Any) -> Model:
        """Raise: a copy would have no tensors."""
        raise ModuleError(
            "a boosted model is not copied: its tensors have no memory. model.unwrap() is a copy with what it has learnt; "
            "fs.optim.ema(opt, decay) keeps an average."
        )

    def run_stages(
        self,
        criterion: Callable[..., Tensor] | None,
        batches: Iterator[Any],
        optimizer: BoostedOptimizer | None,
        outputs: bool,
    ) -> tuple[Tensor, Any]:
        """Run a schedule on the next batch; return its loss and, if wanted, what the last stage makes of each sample."""
        if not isinstance(self.learner, InStages):
            raise ModuleError(
                "execute_pipeline: this model is not cut into stages. Call it: loss = criterion(model(inputs), labels)."
            )
        if not hasattr(batches, "__next__"):
            raise ModuleError(
                f"execute_pipeline takes the next batch of an iterator, {type(batches).__name__} is none: "
                "batches = iter(dataloader), once for an epoch."
            )
        if optimizer is None and torch.is_grad_enabled():
            raise ModuleError(
                "execute_pipeline: without an optimizer nobody takes gradients: call it in torch.no_grad()."
            )
        if self._forward_hooks or self._forward_pre_hooks:
            raise ModuleError(
                "execute_pipeline: hooks of the boosted model are not called: no stage has the whole. Hook a part of "
                "model.module."
            )
        self._follow()
        scale = boosted(optimizer).scale if torch.is_grad_enabled() else 1.0
        value = self.learner.run(criterion, next(batches), scale=scale, outputs=outputs)
        self._show()
        self._show_late()
        self.forget_late()
        return value.loss, unshard(value.aux) if outputs else None

    def unwrap(self) -> nn.Module:
        """Return a copy of the model by itself, with whole parameters; all devices have to call it."""
        self._follow()
        return filled(self.module, *map(_copies, self.learner.whole()))


@dataclass
class Loop:
    """What a Booster has for one device: the models that it trains, and whether backwards reduce gradients.

    `announced` is what its loaders have told, for functional steps.
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
        """Let gradients of the calling device's backwards stay there."""
        own = self.own
        before, own.sync = own.sync, False
        try:
            yield
        finally:
            own.sync = before

    def notice(self, mesh: Mesh, axes: tuple[str, ...], samples: int | None, part: Any) -> None:
        """Tell the calling device's models and steps which batch comes."""
        own = self.own
        if axes:
            own.announced = own.announced or Announced(mesh, axes)
            own.announced.tell(samples, part)
        for model in own.models:
            model.learner.announce(samples, part)

    def batch(self, given: PyTree) -> PyTree:
        """Return what a functional step is given, with what is known of it: see `Announced.part`."""
        own = self.own
        return given if own.announced is None else own.announced.part(given)


class BoostedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state lies as the plugin says.

    Schedulers write into the groups of the one it stands for, whichever of the two they were given.

    Args:
        given: the optimizer of torch, or a pure one.
        opts: what divides the pure optimizer that it is at the moment.
        model: whose parameters it writes.
        source: the given one, from step to step.
        zeros: whether parameters that nobody has used have a gradient of zeros.
    """

    def __init__(
        self, given: Any, opts: Callable[[], Partitioned], model: Model, source: OptimizerSource, *, zeros: bool
    ) -> None:
        self._opts, self._model, self._learner, self._source, self._zeros = opts, model, model.learner, source, zeros
        self._grads, self._limits = cast("PyTree | None", None), list[float]()
        self.state: PyTree = opts().init(self._learner.params)
        self.optim = given  # last: from now on, what that has is set there

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, of the optimizer that was boosted if it has that: its steps are made with it."""
        given = vars(self).get("optim")
        of_given = (
            isinstance(given, torch.optim.Optimizer) and name in vars(given) and name not in (*vars(self), "step")
        )
        super().__setattr__(name, value) if not of_given else setattr(given, name, value)

    def __getattr__(self, name: str) -> Any:
        """Return what the optimizer that was boosted has in an attribute of its own."""
        given = vars(self).get("optim")
        if name in vars(given or self):
            return vars(given)[name]
        more = (
            f": {type(given).__name__} has it, but copies of that make the steps" if hasattr(type(given), name) else ""
        )
        raise AttributeError(f"a boosted optimizer has no {name}{more}")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups of the optimizer that was boosted, with the options that count in the next step."""
        return self._of_torch("param_groups")

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The options of groups that say nothing else."""
        return self._of_torch("defaults")

    def _of_torch(self, name: str) -> Any:
        if not isinstance(self.optim, torch.optim.Optimizer):
            raise OptimizerError(
                f"{name}: the optimizer that was boosted is a pure one, which has none. Give it a schedule as its rate: "
                "fs.optim.adamw(fs.optim.schedules.cosine(...))."
            )
        return getattr(self.optim, name)

    @property
    def scale(self) -> float:
        """What losses are multiplied by."""
        loss_scale = self._opts().loss_scale
        return 1.0 if loss_scale is None else float(loss_scale(self.state))

    def backward(self, loss: Tensor, *, sync: bool = True) -> None:
        """Add the gradient of a loss."""
        if self._grads is not None:
            raise OptimizerError(
                "backward after the gradients were clipped or read: do that once all of a step are there."
            )
        self._model.go_back(loss, scale=self.scale, sync=sync)

    @property
    def grads(self) -> PyTree:
        """The gradients of all backwards since the last step, of their size times `scale`, as they lie."""
        if self._grads is None:
            self._grads = self._learner.gradients(zeros=self._zeros)
        return self._grads

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float | str = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Shrink the gradients so that the norm of all of them is at most `max_norm`; return what it was.

        Args:
            max_norm: how much it may be.
            norm_type: p of the norm: 2 the Euclidean one, inf the largest element.
            error_if_nonfinite: whether a norm that is none, or infinite, is an error.
        """
        order = torch.inf if norm_type == "inf" else norm_type
        refuse("clip_grad_norm", _no_numbers(max_norm=max_norm, norm_type=order))
        refuse("clip_grad_norm", within(0, torch.inf, max_norm=max_norm), above(0, norm_type=order))
        norm, scale = global_norm(self.grads, float(order)), self.scale
        if error_if_nonfinite and not norm.isfinite():
            raise OptimizerError(
                f"clip_grad_norm: the norm of the gradients is {norm.item()}; error_if_nonfinite=False would only return it."
            )
        self._grads = shrunk(self.grads, norm, max_norm * scale)
        self._limits.append(float(max_norm))
        return norm / scale

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Keep each element of the gradients between -clip_value and clip_value; of scaled losses, what overflowed is told."""
        refuse("clip_grad_value", _no_numbers(clip_value=clip_value))
        if self._opts().loss_scale is None:
            self._grads, _ = clip_by_value(float(clip_value)).update(self.grads, (), None)
        else:
            refuse("clip_grad_value", within(0, torch.inf, clip_value=clip_value))
            self._grads = clipped_if_finite(self.grads, clip_value * self.scale)
        self._limits.append(float(clip_value))

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Tensor] | None = None
    ) -> Tensor | None:
        """Take a step along the gradients, those of `closure` too, if it is given; return what that has returned."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        params, self.state = self._learner.written(self._opts(), self.grads, self.state)
        self._learner.params, self._grads = params, None
        self._learner.stepped, self._limits = self._options(), []
        self._model.forget_late()
        if isinstance(self.optim, torch.optim.Optimizer):
            vars(self.optim)["_opt_called"] = (
                True  # schedulers ask torch's optimizers whether a step came before theirs
            )
        return loss

    def _options(self) -> str:
        """Return what this step was made with, as far as a loop decides it."""
        groups = self.optim.param_groups if isinstance(self.optim, torch.optim.Optimizer) else []
        told = ", ".join(f"{name}={_shown(group[name])}" for group in groups for name in _VARIED if name in group)
        return told + "".join(f", a limit of {limit}" for limit in self._limits)

    def state_dict(self) -> Any:
        """Raise: `state` lies as the plugin says."""
        raise OptimizerError("state_dict: a boosted optimizer's state lies as the plugin says: optimizer.state.")

    def load_state_dict(self, state_dict: Any) -> None:
        """Raise: as `state_dict`."""
        raise OptimizerError("load_state_dict: a boosted optimizer's state lies as the plugin says: optimizer.state.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise: what torch makes of a copy is another class."""
        raise OptimizerError(
            "a boosted optimizer is not copied or pickled: its state lies as the plugin says. model.unwrap() is a copy of what "
            "was learnt, optimizer.state what is to be kept beside it."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train parameters that were in no group so far."""
        self._of_torch("add_param_group")(param_group)
        if isinstance(self._source, TorchSource):
            grown = self._source.grown(self._learner.params, self.state, self._opts().init)
            self._learner.params, self.state = grown

    def _hook(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: nobody would call it."""
        raise OptimizerError("hooks of a boosted optimizer are not called. Call them beside step().")

    register_step_pre_hook = register_step_post_hook = _hook
    register_state_dict_pre_hook = register_state_dict_post_hook = _hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _hook

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients.  If they are not set to None, those that there were are zeros where nobody makes others."""
        self._grads = None
        self._learner.zero(to_none=set_to_none)


_VARIED = "lr", "momentum", "betas", "weight_decay"
"""Options that schedulers change."""


def _shown(x: Any) -> str:
    return str(float(x)) if isinstance(x, Tensor) and x.numel() == 1 else str(x)


def _no_numbers(**given: Any) -> list[str]:
    """Return a complaint of each that is neither a number nor a tensor of one."""
    wrong = {k: x for k, x in given.items() if not (isinstance(x, Real) or (isinstance(x, Tensor) and x.numel() == 1))}
    return [f"{name} is a number, not {x!r}" for name, x in wrong.items()]


def _copies(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors that training may go on with, and let go of each: gathered ones are not there twice."""
    return {name: tree.pop(name).clone() for name in [*tree]}


def boosted_model(model: Any) -> Model:
    """Return a model that `boost` has returned; raise if it is another."""
    if not isinstance(model, Model):
        raise ModuleError(
            f"{type(model).__name__} is no model that boost has returned. Write "
            "model, optimizer, *_ = booster.boost(model, optimizer), and give that one."
        )
    return model


def boosted(optimizer: Any) -> BoostedOptimizer:
    """Return an optimizer that `boost` has returned; raise if it is another."""
    if not isinstance(optimizer, BoostedOptimizer):
        raise OptimizerError(
            f"{type(optimizer).__name__} is no optimizer that boost has returned. Write "
            "model, optimizer, *_ = booster.boost(model, optimizer), and give that one."
        )
    return optimizer
