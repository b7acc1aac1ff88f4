"""`Booster`: torch's familiar loop, and beside it the functional step, as a plugin lays them out.

model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(model, optimizer, criterion, dataloader, lr_scheduler)
for inputs, labels in dataloader:
    loss = criterion(model(inputs), labels)
    booster.backward(loss, optimizer)
    optimizer.step(); optimizer.zero_grad(); lr_scheduler.step()

state = booster.init(model, optimizer, criterion)
state, metrics = booster.step(state, (inputs, labels))
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fshard.booster.plugins import DDPPlugin, Plugin
from fshard.errors import LayoutError, ModuleError, OptimizerError
from fshard.mesh.mesh import Mesh
from fshard.mesh.placing import unshard
from fshard.mesh.spec import P
from fshard.mesh.tree import PyTree
from fshard.optim.contract import Optimizer
from fshard.optim.following import NOTHING, Followed, followed
from fshard.optim.partition import Partitioned, partition_optimizer
from fshard.optim.scaling import loss_scaled
from fshard.transforms.by_hand import ByHand
from fshard.transforms.functionalize import functionalize
from fshard.transforms.in_stages import InStages
from fshard.transforms.loader import Loader
from fshard.transforms.lora import LoraConfig, lora
from fshard.transforms.rules import shard_params
from fshard.transforms.skeleton import skeleton
from fshard.transforms.step import Metrics, train_step
from fshard.transforms.torch_style import BoostedOptimizer, Model, loss_of


class State(NamedTuple):
    """What a functional step takes and returns: parameters, the optimizer's state and buffers, as they lie."""

    params: PyTree
    optimizer: PyTree
    buffers: PyTree


class Booster:
    """Trains a model as its plugin says, in torch's loop or by a functional step.

    Args:
        plugin: how; None: `DDPPlugin()`.

    The loop runs as one device: under torchrun, or inside of `fs.run` on a virtual mesh.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 2})
    >>> def main():
    ...     torch.manual_seed(0)
    ...     model = torch.nn.Linear(2, 1)
    ...     data = torch.utils.data.TensorDataset(torch.eye(2).repeat(4, 1), torch.ones(8, 1))
    ...     booster = fs.Booster(plugin=fs.ZeroPlugin(stage=1))
    ...     opt, loader = torch.optim.SGD(model.parameters(), lr=0.5), torch.utils.data.DataLoader(data, batch_size=8)
    ...     model, opt, criterion, loader, _ = booster.boost(model, opt, torch.nn.MSELoss(), loader)
    ...     for _ in range(20):
    ...         for x, y in loader:
    ...             loss = criterion(model(x), y)
    ...             booster.backward(loss, opt)
    ...             opt.step(), opt.zero_grad()
    ...     return loss.item() < 1e-3
    >>> fs.run(main, mesh=mesh)
    [True, True]
    """

    def __init__(self, plugin: Plugin | None = None) -> None:
        if plugin is not None and not isinstance(plugin, Plugin):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"Booster(plugin=) takes a plugin, fs.ZeroPlugin(stage=1) say, not {plugin!r}.")
        self.plugin = plugin or DDPPlugin()
        self._models: list[Model] = []
        self._sync = True
        self._step: Callable[..., Any] | None = None

    # -- torch's loop -------------------------------------------------------------------------------------------------

    def boost(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Callable[..., Tensor] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Return what takes the place of the five, in this order; None stays None.

        Args:
            model: any module.  What is returned refers to none of its tensors, and neither does the optimizer any more.
            optimizer: of torch, or of `fs.optim`.
            criterion: stays as it is.
            dataloader: of torch, whose batches are then those of all devices together; anything else stays as it is.
            lr_scheduler: stays as it is: what it writes into the optimizer's groups counts.
        """
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModuleError(
                f"boost takes a module, not {type(model).__name__}. For a function there is fs.train_step."
            )
        mesh, given = self.plugin.laid_on(), dict(model.named_parameters())
        source = followed(optimizer, given, "boost")
        bare = skeleton(model)
        boosted = Model(bare, self._learner(mesh, model, bare, source))
        source.point_at(dict(bare.named_parameters()))
        self._models.append(boosted)
        wrapped = None
        if optimizer is not None:
            opts = self._divided(mesh, source)
            wrapped = BoostedOptimizer(optimizer, opts, boosted, zeros=self.plugin.unused == "zero")
        if isinstance(dataloader, DataLoader):
            dataloader = Loader.of(dataloader, seed=self.plugin.seed, **self._cut(mesh))
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    def enable_lora(self, model: nn.Module, lora_config: LoraConfig | None = None) -> nn.Module:
        """Return a model to boost, in which only differences of low rank are trained: see `lora`."""
        return lora(model, lora_config)

    def _learner(self, mesh: Mesh, model: nn.Module, bare: nn.Module, source: Followed) -> ByHand | InStages:
        plugin, axes = self.plugin, self.plugin.axes(mesh)
        lay = self._partition(mesh, NOTHING).gradients
        rules = plugin.rules(mesh)
        if plugin.in_stages():
            stages, options = plugin.stages_of(model), plugin.staged()
            return InStages.of(stages, rules, source.trained, mesh=mesh, axes=axes, gradients=lay, **options)
        apply, params, buffers = self._pure(model, bare, axes)
        params = shard_params(source.trained(params), rules, mesh=mesh)
        options = plugin.gradient()
        return ByHand(apply, params, buffers, mesh=mesh, axes=axes, seed=plugin.seed, gradients=lay, **options)

    def _pure(self, model: nn.Module, bare: nn.Module, axes: tuple[str, ...]) -> tuple[Any, Any, Any]:
        """Return a model as a function, which keeps none of its tensors, its parameters and its buffers."""
        apply, _, _ = functionalize(bare, sync_batchnorm=axes if self.plugin.sync_batchnorm else None)
        return apply, *functionalize(model)[1:]

    def _divided(self, mesh: Mesh, source: Followed) -> Callable[[], Partitioned]:
        """Return what says how the optimizer is now, and how its work is divided."""
        divided = lru_cache(maxsize=1)(partial(self._partition, mesh))
        return lambda: divided(source.now())

    def _partition(self, mesh: Mesh, opt: Optimizer) -> Partitioned:
        plugin = self.plugin
        if plugin.precision == "fp16" and opt.loss_scale is None:
            opt = loss_scaled(opt)
        axes = plugin.pieces(mesh)
        return partition_optimizer(opt, mesh=mesh, axis=axes or mesh.axis_names, stage=plugin.zero() if axes else 0)

    def backward(self, loss: Tensor, optimizer: BoostedOptimizer) -> None:
        """Take the gradient of a loss that is a mean over this device's samples."""
        _boosted(optimizer).backward(loss, sync=self._sync)

    @contextmanager
    def no_sync(self, model: Any = None, optimizer: Any = None) -> Generator[None]:
        """Let gradients of backwards inside stay on the device, until one outside, or the step, reduces their sum.

        Where gradients are reduced as they come (stages 2 and 3, reproducible mode) it changes nothing but memory.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def clip_grad_norm(self, optimizer: BoostedOptimizer, max_norm: float) -> Tensor:
        """Shrink the gradients so that the norm of all of them is at most `max_norm`; return what it was."""
        return _boosted(optimizer).clip_grad_by_norm(max_norm)

    def clip_grad_value(self, optimizer: BoostedOptimizer, clip_value: float) -> None:
        """Keep each element of the gradients between -clip_value and clip_value."""
        _boosted(optimizer).clip_grad_by_value(clip_value)

    def prepare_dataloader(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> Loader:
        """Return the batches of a dataset, `batch_size` samples on all devices together: see `Loader`."""
        own: Any = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last, "pin_memory": pin_memory}
        return Loader(dataset, batch_size, **self._cut(self.plugin.laid_on()), **own, num_workers=num_workers, **kwargs)

    def _cut(self, mesh: Mesh) -> dict[str, Any]:
        """Return how a loader's batches are cut: stages are given whole ones, which their step cuts."""
        axes = () if self.plugin.in_stages() else self.plugin.axes(mesh)
        return {"mesh": mesh, "axes": axes, "notice": self._notice}

    def _notice(self, samples: int) -> None:
        for model in self._models:
            if isinstance(model.learner, ByHand):
                model.learner.total = samples

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: Model,
        criterion: Callable[[Any, Any], Tensor],
        optimizer: BoostedOptimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run a batch through the stages, forward and backward; under `torch.no_grad`, which needs no optimizer, forward alone.

        Args:
            data_iter: gives the batch of all devices, (inputs, labels) or anything of which the first stage takes all.
            model, optimizer: as `boost` has returned them.
            criterion: of what the last stage makes, and the labels; or the microbatch, where there are no labels.
            return_loss: whether the loss of the whole batch is returned, on every device.
            return_outputs: whether that is returned too, for every sample, what the last stage makes of it.
        """
        if not isinstance(model.learner, InStages):
            raise ModuleError(
                "execute_pipeline: this model is not cut into stages. Call it: loss = criterion(model(inputs), labels)."
            )
        if optimizer is None and torch.is_grad_enabled():
            raise ModuleError(
                "execute_pipeline: without an optimizer nobody takes gradients: call it in torch.no_grad()."
            )
        scale = _boosted(optimizer).scale if torch.is_grad_enabled() else 1.0
        value = model.learner.run(criterion, next(data_iter), scale=scale, outputs=return_outputs)
        outputs = unshard(value.aux) if return_outputs else None
        return {"loss": value.loss if return_loss else None, "outputs": outputs}

    # -- the functional form ------------------------------------------------------------------------------------------

    def init(self, model: nn.Module, optimizer: Any, criterion: Callable[..., Tensor] | None = None) -> State:
        """Return the state to begin with, and remember the step, whose loss is `loss_of` a batch."""
        plugin, mesh = self.plugin, self.plugin.laid_on()
        if plugin.in_stages():
            raise LayoutError(
                "init: for a model in stages write fs.train_step(stages, opt, schedule=...), which is its functional form, or "
                "boost it and call execute_pipeline."
            )
        axes = plugin.axes(mesh)
        source = followed(optimizer, dict(model.named_parameters()), "init")
        opts, (apply, params, buffers) = self._divided(mesh, source), self._pure(model, skeleton(model), axes)

        params = shard_params(source.trained(params), plugin.rules(mesh), mesh=mesh)

        @lru_cache(maxsize=1)
        def train(opt: Any) -> Callable[..., Any]:
            options: Any = {**plugin.gradient(), "has_buffers": True}
            return train_step(loss_of(apply, criterion), opt, mesh=mesh, batch=P(axes), donate=True, **options)

        def step(state: State, batch: Any) -> tuple[State, Metrics]:
            *after, metrics = train(opts())(*state, batch)
            return State(*after), metrics

        self._step = step
        return State(params, opts().init(params), buffers)

    def step(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Take a step on a batch, which is that of all devices; the state that is given is used up."""
        if self._step is None:
            raise ModuleError("step comes after state = booster.init(model, optimizer, criterion).")
        return self._step(state, batch)


def _boosted(optimizer: Any) -> BoostedOptimizer:
    """Return an optimizer that `boost` has returned; raise if it is another."""
    if not isinstance(optimizer, BoostedOptimizer):
        raise OptimizerError(
            f"{type(optimizer).__name__} is no optimizer that boost has returned. Write "
            "model, optimizer, *_ = booster.boost(model, optimizer), and give that one."
        )
    return optimizer
