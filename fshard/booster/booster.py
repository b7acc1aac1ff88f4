"""`Booster`: torch's loop, and beside it the functional step, in the layouts of a plugin.

boost     model, optimizer, ... of a loop, which runs as one device
init      a state, for `step`: a function of it and a batch
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, cast, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fshard.auditing.replicas import validate_replicas
from fshard.booster.checkpoint import Checkpointing
from fshard.booster.gemini import GeminiPlugin
from fshard.booster.hybrid import HybridParallelPlugin
from fshard.booster.loader import DeviceState, Loader
from fshard.booster.loop import LoopModel
from fshard.booster.model import BoostedModel, shard_model, validate_inside, validate_not_boosted
from fshard.booster.optimizer import BoostedOptimizer, partitioned
from fshard.booster.plugins import DDPPlugin, Plugin
from fshard.booster.stages import Criterion, StagedModel, loss_of
from fshard.errors import ModuleError, OptimizerError
from fshard.memory.state import UpdateOn
from fshard.mesh.collectives.api import psum
from fshard.mesh.layout import PyTree, map_leaves
from fshard.mesh.reshard.device_put import unshard
from fshard.mesh.spmd.run import resolve_mesh, run_on_devices
from fshard.mesh.spmd.scope import here
from fshard.optim.sharded.optimizer import ShardedOptimizer
from fshard.optim.torch_optim.instances import InstanceSource, OptimizerSource, optimizer_source
from fshard.parallelism.value import Parallelism
from fshard.pipeline.split.stages import Layer, split_stages
from fshard.randomness import folded, keyed_random
from fshard.transforms.module.compiled import compiled_in_place
from fshard.transforms.module.lora import LoraConfig, lora
from fshard.transforms.options import Weight, one_of
from fshard.transforms.train_step import Metrics, train_step
from fshard.uncompiled import uncompiled


class TrainState(NamedTuple):
    """The state of training that a functional step takes and returns."""

    params: PyTree  # in their layouts
    optimizer: PyTree  # its state, in its layout
    buffers: PyTree
    steps: int = 0  # so far, which seeds the next one's draws
    model: int = 0  # index among the models of one Booster


Step = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


class FunctionalStep:
    """The functional step of one model, with its optimizer as that is now.

    Args:
        plugin: the seed of draws, and limits of memory.
        optimizer: returns the sharded optimizer with the present options of its groups.
        make_step: of that optimizer, to the step of `train_step`.
    """

    def __init__(
        self,
        plugin: Plugin,
        optimizer: Callable[[], ShardedOptimizer],
        make_step: Callable[..., Any],
    ) -> None:
        self.plugin, self.optimizer = plugin, optimizer
        # As long as the options of the groups stay, the optimizer is the same object.
        self.make_step = lru_cache(maxsize=1)(make_step)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        step = self.make_step(self.optimizer())
        with keyed_random(self.plugin.seed, state.steps, 0):
            params, optimizer_state, buffers, metrics = step(
                state.params, state.optimizer, state.buffers, batch
            )
        if isinstance(self.plugin, GeminiPlugin):
            self.plugin.validate_peak()
        after = state._replace(
            params=params, optimizer=optimizer_state, buffers=buffers, steps=state.steps + 1
        )
        return after, metrics


class PlacedStep:
    """The functional step of a `GeminiPlugin`, which its first batch places.

    Args:
        plugin: decides where state is updated, and what leaves the device.
        source: of the optimizer.
        make_step: of a sharded optimizer, to the step of `train_step`.
    """

    def __init__(
        self, plugin: GeminiPlugin, source: OptimizerSource, make_step: Callable[..., Any]
    ) -> None:
        self.plugin, self.source, self.make_step = plugin, source, make_step
        self.step: FunctionalStep | None = None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        if self.step is None:
            self.step, state = self._placed(state, batch)
        return self.step(state, batch)

    def _placed(self, state: TrainState, batch: Any) -> tuple[FunctionalStep, TrainState]:
        """Return the step with activations in their memories, and a state in those of the plan."""
        optimizers = dict[str, Callable[[], ShardedOptimizer]]()
        for update_on in get_args(UpdateOn):
            optimizers[update_on] = partitioned(self.plugin, self.source, update_on)

        def make(update_on: UpdateOn) -> Any:
            return self.make_step(optimizers[update_on]())

        update_on, placement = self.plugin.placed_step(
            make, state.params, state.optimizer, state.buffers, batch
        )
        if placement is None:
            step = FunctionalStep(self.plugin, optimizers[update_on], self.make_step)
            return step, state
        make_step = partial(self.make_step, activations=placement.activations)
        params, optimizer_state = placement.apply(state.params, state.optimizer)
        step = FunctionalStep(self.plugin, optimizers[update_on], make_step)
        return step, state._replace(params=params, optimizer=optimizer_state)


def _with_criterion(function: Callable[..., Any], criterion: Criterion | None) -> Any:
    """Return the loss of a model's function, and its new buffers."""

    def loss(params: PyTree, buffers: PyTree, batch: Any) -> tuple[Tensor, PyTree]:
        if isinstance(batch, Mapping):
            output, after = function(params, buffers, **cast(Mapping[str, Any], batch))
        else:
            output, after = function(params, buffers, *batch[:1])
        return loss_of(criterion, output, batch), after

    return loss


class Booster(Checkpointing):
    """Trains a model in the layouts of its plugin, in torch's loop or by a functional step.

    The loop runs as one device: under torchrun, or inside of `fs.run` on a virtual mesh.

    Args:
        plugin: the layouts, and the mesh; by default `DDPPlugin()`. Or a parallelism, for
            `HybridParallelPlugin(parallelism)`.
        check: "loss" compares the loss of the first step, weighted over the devices, with that of
            all their samples on one device, and raises if it is no mean over samples. `boost` must
            get the criterion, or the model's output have `.loss`. Each device computes the loss of
            all samples once.
        digest: compare what several devices hold after each step, parameters, optimizer state and
            buffers, and raise an AuditError that names the leaf and the device if it differs. It
            costs a psum of 8 bytes, and a digest of what is replicated. `optimizer.digests` counts
            the steps of a loop that were compared.
    """

    def __init__(
        self,
        plugin: Plugin | Parallelism | None = None,
        *,
        check: Literal["loss"] | None = None,
        digest: bool = False,
    ) -> None:
        if isinstance(plugin, Parallelism):
            plugin = HybridParallelPlugin(plugin)
        if plugin is None:
            plugin = DDPPlugin()
        if not isinstance(cast(Any, plugin), Plugin):
            raise TypeError(
                "Booster: plugin must be a plugin, such as fs.FSDPPlugin(), or a Parallelism; "
                f"got {plugin!r}. Write fs.Booster(fs.FSDPPlugin(...))."
            )
        self.plugin = plugin
        self.check = check
        self.digest = digest
        if errors := one_of("check", check, "loss", None):
            raise ValueError(f"Booster: {errors[0]}.")
        self._states = WeakKeyDictionary[Any, DeviceState]()
        self._steps = list[Step]()

    @property
    def _state(self) -> DeviceState:
        """The state of the calling device: those of a virtual mesh may share a Booster."""
        key = here() or self
        if key not in self._states:
            self._states[key] = DeviceState(self.plugin)
        return self._states[key]

    def _prepare(
        self, caller: str, model: Any, optimizer: Any
    ) -> tuple[nn.Module, Plugin, OptimizerSource, Callable[[], ShardedOptimizer]]:
        """Return a module, its plugin and its optimizer.

        The draws of the plugin differ from those of the models before.
        """
        if isinstance(model, list):
            model = split_stages(cast(Any, model), 1)[0]
        if isinstance(model, nn.Module):
            model = compiled_in_place(model)
        source = _source_of(caller, model, optimizer)

        state = self._state
        plugin = state.plugin
        is_in_loop = caller == "boost" and not isinstance(source, InstanceSource)
        if plugin.replicas() is not None and not is_in_loop:
            raise ModuleError(
                f"{caller}: local_steps and gossip must be used in a loop, with an optimizer of "
                f"torch or fs.optim; got {type(optimizer).__name__} in {caller}. "
                "Around fs.train_step use fs.comm.local_sgd or fs.comm.gossip."
            )
        if self.check is not None and (caller == "init" or plugin.in_stages()):
            raise ValueError(
                f'{caller}: check="loss" must be used in a loop without stages. '
                "Compare one step by fs.testing.certify."
            )

        if self.digest and plugin.replicas() is not None:
            raise ValueError(
                f"{caller}: digest=True must be used without local_steps and gossip, whose "
                "parameters differ between devices. Leave digest=True out."
            )

        number = state.models
        state.models += 1
        if number:
            plugin = replace(plugin, seed=folded(plugin.seed, number))
        return model, plugin, source, partitioned(plugin, source)

    # -- torch's loop -----------------------------------------------------------------------------

    def boost(
        self,
        model: nn.Module | list[Layer],
        optimizer: Any = None,
        criterion: Callable[..., Tensor] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Return the boosted five, in this order; None stays None.

        Args:
            model: any module, or list of layers, which then runs in place: each device makes its
                own. One that no device can hold is made of `lazy` layers: each device builds one
                at a time, by the plugin's seed, and keeps its shards.
            optimizer: of torch, or of `fs.optim`.
            criterion: returned unchanged.
            dataloader: of torch, whose batches are then those of all devices together; anything
                else is unchanged.
            lr_scheduler: returned unchanged: values that it writes to the optimizer's groups are
                used.
        """
        model, plugin, source, opt = self._prepare("boost", model, optimizer)
        if plugin.in_stages():
            boosted = StagedModel(model, plugin, source, opt())
        else:
            loss_check = None if self.check is None else self._state.loss_check
            boosted = LoopModel(model, plugin, source, opt(), self._state, loss_check)
            if loss_check is not None and criterion is not None:
                criterion = loss_check.watched(criterion)
        source.rebind(dict(model.named_parameters()))
        if optimizer is not None:
            optimizer = BoostedOptimizer(optimizer, source, opt, boosted, plugin, self.digest)
        if isinstance(dataloader, DataLoader):
            dataloader = Loader(dataloader, self.plugin.seed, self._state)
        return boosted, optimizer, criterion, dataloader, lr_scheduler

    def enable_lora(self, model: nn.Module, lora_config: LoraConfig | None = None) -> nn.Module:
        """Return a model to boost, of which differences of low rank are trained: see `lora`."""
        return lora(model, lora_config)

    @uncompiled
    def backward(
        self,
        loss: Tensor,
        optimizer: BoostedOptimizer,
        *,
        weight: float | Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradient of a loss: the mean over all devices, weighted by their samples.

        It is the gradient of the loss of all samples on one device if that is a mean over samples.
        Gradients of several backwards add up until the step, as in torch: each is a mean over
        devices.

        Args:
            loss: a mean over this device's samples, or over what `weight` counts.
            optimizer: as returned by `boost`; its model has led to the loss.
            weight: the number that this device's loss is a mean over, such as its tokens that are
                not padding. With 0 the device adds nothing, even if its loss is not finite. One
                number is summed, for which the host waits.
            retain_graph: keep the graph, for another backward through it: of another loss, or of
                this one for another model's optimizer.
        """
        optimizer = _optimizer(optimizer)
        optimizer.validate_takes_gradients()
        optimizer.model.backward(
            loss,
            scale=optimizer.scale,
            sync=self._state.sync,
            weight=weight,
            retain_graph=retain_graph,
        )

    @contextmanager
    def no_sync(self, model: Any = None, optimizer: Any = None) -> Generator[None]:
        """Let gradients of backwards inside stay on the device; the next one outside reduces them.

        So does the step. Where gradients are reduced in each backward (stages 2 and 3 of ZeRO,
        reproducible mode) it changes nothing but memory.
        """
        state = self._state
        before, state.sync = state.sync, False
        try:
            yield
        finally:
            state.sync = before

    def parameters(self, model: BoostedModel) -> AbstractContextManager[dict[str, Tensor]]:
        """Return the context in which this device's shards are read and written, between steps.

        Its value is a dict from the names of parameters to local shards: tensors as they are, parts
        or flattened parts of them. Operations must be elementwise, and the same on all devices;
        random draws are. A tensor that replaces a shard is written to it at the end. The
        optimizer's state stays.

            with booster.parameters(critic) as shards:
                for shard in shards.values():
                    shard.clamp_(-0.01, 0.01)
        """
        if not isinstance(model, BoostedModel):
            raise ModuleError(
                "parameters: the model must be what boost has returned; "
                f"got {type(model).__name__}."
            )
        return model.local_shards()

    def mean(self, tree: PyTree, samples: float = 1.0) -> PyTree:
        """Return the mean of a tree of numbers over all devices that have other samples.

        All devices must call it.

        Args:
            tree: of numbers.
            samples: the weight of this device: the number of samples that its numbers are means of,
                such as `loader.samples`.
        """
        mesh = self._state.mesh
        axes = self._state.plugin.axes()
        validate_inside(mesh)
        if not mesh.is_member:
            return map_leaves(lambda x: None, tree)

        def scaled(x: Any) -> Tensor:
            dtype = None if isinstance(x, Tensor) else torch.float64
            x = torch.as_tensor(x, dtype=dtype, device=mesh.device_type)
            # Without samples its numbers may be NaN, which a product with 0 would keep.
            return x.detach() * samples if samples else torch.zeros_like(x)

        sums = map_leaves(scaled, tree), scaled(1.0)
        ((total, count),) = run_on_devices(
            resolve_mesh(mesh), lambda device: psum(sums, axes) if axes else sums
        )
        return map_leaves(lambda x: x / float(count), total)

    def clip_grad_norm(
        self,
        optimizer: BoostedOptimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor | None:
        """Scale the gradients to a total norm of at most `max_norm`; return the norm before."""
        return _optimizer(optimizer).clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value(self, optimizer: BoostedOptimizer, clip_value: float) -> None:
        """Keep each element of the gradients between -clip_value and clip_value."""
        _optimizer(optimizer).clip_grad_by_value(clip_value)

    def prepare_dataloader(
        self, dataset: Any, batch_size: int, shuffle: bool = False, seed: int = 1024, **options: Any
    ) -> Loader:
        """Return a loader of a dataset, `batch_size` samples on all devices: see `Loader`.

        Other options are those of torch's DataLoader: drop_last, num_workers, collate_fn, ...
        """
        loader = DataLoader[Any](dataset, batch_size, shuffle=shuffle, **options)
        return Loader(loader, seed, self._state)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: BoostedModel,
        criterion: Callable[[Any, Any], Tensor],
        optimizer: BoostedOptimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
        *,
        weight: Weight | None = None,
    ) -> dict[str, Any]:
        """Run a batch through the stages, forward and backward.

        Under `torch.no_grad` it is forward only, without an optimizer.

        Args:
            data_iter: returns the batch of all devices, (inputs, labels) or any tree as the first
                stage's input.
            model, optimizer: as returned by `boost`.
            criterion: of the last stage's result and the labels; or the microbatch, without labels.
            return_loss: return the loss of the entire batch, on every device.
            return_outputs: return the last stage's result for every sample.
            weight: a function of a microbatch: the number that its loss is a mean over, such as its
                tokens that are not padding. Default: its number of samples.
        """
        if not isinstance(model, StagedModel):
            raise ModuleError(
                "execute_pipeline: the model must be cut into stages, by HybridParallelPlugin, "
                f"and boosted; got {type(model).__name__}. Call another one, model(inputs)."
            )
        scale = 1.0
        if torch.is_grad_enabled():
            boosted = _optimizer(optimizer)
            boosted.validate_takes_gradients()
            scale = boosted.scale
        batch = _next_batch(data_iter)
        value = model.run(criterion, batch, scale, outputs=return_outputs, weight=weight)
        outputs = unshard(value.aux) if return_outputs else None
        return {"loss": value.loss if return_loss else None, "outputs": outputs}

    # -- the functional form -----------------------------------------------------------------------

    def init(
        self, model: nn.Module | list[Layer], optimizer: Any, criterion: Criterion | None = None
    ) -> TrainState:
        """Return the state to begin with.

        Args:
            model: any module or list of layers, as for `boost`; it is not changed.
            optimizer: of torch, or of `fs.optim`.
            criterion: of the output and the labels of a batch (inputs, labels), or the batch, if it
                is a dict of the model's arguments. Default: `output.loss`.
        """
        model, plugin, source, opt = self._prepare("init", model, optimizer)
        functions, params, buffers = shard_model(plugin, model, source)
        options = plugin.gradient_options()
        if plugin.in_stages():
            options["loss"] = partial(loss_of, criterion)
        else:
            functions = _with_criterion(functions, criterion)

        make_step = partial(train_step, functions, donate=True, **options)
        if isinstance(plugin, GeminiPlugin) and plugin.placement == "auto":
            step = PlacedStep(plugin, source, make_step)
        else:
            step = FunctionalStep(plugin, opt, make_step)
        self._steps.append(step)
        return TrainState(params, opt().init(params), buffers, model=len(self._steps) - 1)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Take a step on a batch of all devices, or of a prepared loader; the state is donated."""
        after, metrics = self._steps[state.model](state, self._state.as_part(batch))
        if self.digest:
            trees = {"parameter": after.params, "state": after.optimizer, "buffer": after.buffers}
            validate_replicas(trees, self.plugin.default_mesh(), f"step {after.steps}")
        return after, metrics


# -- arguments -------------------------------------------------------------------------------------

_WRAPPERS = {
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DTensor",
}
"""Classes of torch that reduce gradients of modules, or shard their parameters."""


def _source_of(caller: str, model: Any, optimizer: Any) -> OptimizerSource:
    """Return the source of an optimizer for a model's parameters; raise if one of them is invalid."""
    if model is None:
        raise ModuleError(
            f"{caller}: model must be a module, or a list of layers; got None. Give the model that the optimizer or the "
            "loader is for: without one there are no devices to share a batch."
        )
    if not isinstance(model, nn.Module):
        raise ModuleError(
            f"{caller}: the model is a module, not {type(model).__name__}: "
            "for a function there is fs.train_step."
        )
    validate_not_boosted(caller, model)
    if isinstance(optimizer, BoostedOptimizer):
        raise ModuleError(
            f"{caller}: the optimizer has been boosted already. Give one of torch or fs.optim."
        )
    for path, module in model.named_modules():
        if _is_sharded_by_torch(module):
            raise ModuleError(
                f"{caller}: the model must be a module that no library has sharded; "
                f"got {type(module).__name__} at {path!r}. Give the module before fully_shard, "
                "of DDP model.module: fs.FSDPPlugin() and fs.DDPPlugin() do this."
            )
    return optimizer_source(optimizer, dict(model.named_parameters()), caller)


def _is_sharded_by_torch(module: nn.Module) -> bool:
    """Return True if a module, or one of its own parameters, is of a class of `_WRAPPERS`."""
    for x in (module, *module.parameters(recurse=False)):
        names = {kind.__name__ for kind in type(x).__mro__}
        if not _WRAPPERS.isdisjoint(names):
            return True
    return False


def _next_batch(data_iter: Any) -> Any:
    if not hasattr(data_iter, "__next__"):
        raise TypeError(
            f"execute_pipeline: data_iter must be an iterator; got {type(data_iter).__name__}. "
            "Write batches = iter(loader) before the loop."
        )
    try:
        return next(data_iter)
    except StopIteration:  # it has no text, and would end a generator around the call in silence
        raise ValueError(
            "execute_pipeline: data_iter must have a batch for each call; got an iterator at its "
            "end. Write batches = iter(loader) for each epoch, and call it len(loader) times."
        ) from None


def _optimizer(optimizer: Any) -> BoostedOptimizer:
    """Return an optimizer that `boost` has returned; raise if it is another."""
    if not isinstance(optimizer, BoostedOptimizer):
        raise OptimizerError(
            f"optimizer must be what boost has returned; got {type(optimizer).__name__}. Write "
            "model, optimizer, *_ = booster.boost(model, optimizer), and give that one."
        )
    return optimizer
