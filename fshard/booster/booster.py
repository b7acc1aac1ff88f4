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

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from fshard.booster.accepted import BOOSTED, taken
from fshard.booster.arrangement import Arrangement, Step, TrainState
from fshard.booster.loader import Loader
from fshard.booster.plugins import DDPPlugin, Plugin
from fshard.booster.torch_style import BoostedOptimizer, Loops, Model, boosted, boosted_model
from fshard.errors import LayoutError, ModuleError
from fshard.transforms.module.lora import LoraConfig, lora
from fshard.transforms.train_step import Metrics


class Booster:
    """Trains a model by its plugin, in torch's loop or by a functional step.

    Args:
        plugin: layouts and options; None: `DDPPlugin()`.

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
            raise LayoutError(f"Booster: plugin must be a plugin, such as fs.ZeroPlugin(stage=1); got {plugin!r}.")
        self.plugin = plugin or DDPPlugin()
        self._loops, self._steps = Loops(), list[Step]()

    # -- torch's loop -------------------------------------------------------------------------------------------------

    def boost(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Callable[..., Tensor] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Return the boosted five, in this order; None stays None.

        Args:
            model: any module, which then runs in place: each device makes its own. One that no device can hold is made of
                `lazy` layers: each device builds one at a time, by the plugin's seed, and keeps its shards.
            optimizer: of torch, or of `fs.optim`.
            criterion: returned unchanged.
            dataloader: of torch, whose batches are then those of all devices together; anything else is unchanged.
            lr_scheduler: returned unchanged: values that it writes to the optimizer's groups are used.
        """
        source = taken("boost", model, optimizer, criterion, dataloader, lr_scheduler)
        how = self.plugin.arranged().of(len(self._loops.own.models))
        boosted = Model(model, how.gradient(model, source))
        BOOSTED.add(model)
        source.point_at(dict(model.named_parameters()))
        self._loops.own.models.append(boosted)
        wrapped = None
        if optimizer is not None:
            wrapped = BoostedOptimizer(optimizer, how.divided(source), boosted, source, zeros=how.zeros)
        if isinstance(dataloader, DataLoader):
            dataloader = Loader.of(dataloader, seed=self.plugin.seed, **self._cut(how))
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    def enable_lora(self, model: nn.Module, lora_config: LoraConfig | None = None) -> nn.Module:
        """Return a model to boost, in which only differences of low rank are trained: see `lora`."""
        return lora(model, lora_config)

    def backward(self, loss: Tensor, optimizer: BoostedOptimizer) -> None:
        """Take the gradient of a loss that is a mean over this device's samples."""
        boosted(optimizer).backward(loss, sync=self._loops.own.sync)

    def no_sync(self, model: Any = None, optimizer: Any = None) -> AbstractContextManager[None]:
        """Let gradients of backwards inside stay on the device, until one outside, or the step, reduces their sum.

        Where gradients are reduced as they come (stages 2 and 3, reproducible mode) it changes nothing but memory.
        """
        return self._loops.unsynchronised()

    def clip_grad_norm(
        self, optimizer: BoostedOptimizer, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`; return the norm before, as torch does."""
        return boosted(optimizer).clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value(self, optimizer: BoostedOptimizer, clip_value: float) -> None:
        """Keep each element of the gradients between -clip_value and clip_value."""
        boosted(optimizer).clip_grad_by_value(clip_value)

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
        return Loader(
            dataset, batch_size, **self._cut(self.plugin.arranged()), **own, num_workers=num_workers, **kwargs
        )

    def _cut(self, how: Arrangement) -> dict[str, Any]:
        """Return the sharding of a loader's batches; stages get full ones, which their step shards."""
        return {"mesh": how.mesh, "axes": how.axes if how.cut is None else (), "notice": self._loops.notice}

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: Model,
        criterion: Callable[[Any, Any], Tensor],
        optimizer: BoostedOptimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run a batch through the stages, forward and backward; under `torch.no_grad`, without an optimizer, forward
        only.

        Args:
            data_iter: returns the batch of all devices, (inputs, labels) or any tree as the first stage's input.
            model, optimizer: as returned by `boost`.
            criterion: of the last stage's result and the labels; or the microbatch, without labels.
            return_loss: return the loss of the entire batch, on every device.
            return_outputs: return the last stage's result for every sample.
        """
        loss, outputs = boosted_model(model).run_stages(criterion, data_iter, optimizer, return_outputs)
        return {"loss": loss if return_loss else None, "outputs": outputs}

    # -- the functional form ------------------------------------------------------------------------------------------

    def init(self, model: nn.Module, optimizer: Any, criterion: Callable[..., Tensor] | None = None) -> TrainState:
        """Return the state to begin with, and remember the step: see `loss_of`."""
        source = taken("init", model, optimizer, criterion)
        how, self._loops.own.inits = self.plugin.arranged().of(self._loops.own.inits), self._loops.own.inits + 1
        state, step = how.functional(model, source, criterion)
        self._steps.append(step)
        return state._replace(turn=len(self._steps) - 1)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Take a step on a batch of all devices, or a batch of a prepared loader; the given state is donated."""
        if not isinstance(state, TrainState) or state.turn >= len(self._steps):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModuleError("step needs a state: call state = booster.init(model, optimizer, criterion) first.")
        return self._steps[state.turn](state, self._loops.batch(batch))
