"""A model in stages: a schedule takes gradients batch by batch, the caller steps.

    value = model.run(criterion, batch)      forward and backward of all microbatches
    grads = model.gradients(optimizer)       of all batches since the last call

The caller is one device, as in `loop`; a batch is that of all devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fshard.booster.model import BoostedModel, refusing, stages_of, validate_inside
from fshard.booster.plugins import Plugin
from fshard.errors import ModuleError
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.sharded import Sharded
from fshard.optim.leaves import Leaf, Leaves, map_shards
from fshard.optim.sharded.optimizer import ShardedOptimizer
from fshard.optim.torch_optim.instances import OptimizerSource
from fshard.pipeline.split.followed import FollowedModule, has_hooks
from fshard.source import call_site
from fshard.transforms.gradient import GradientFunction, StepValue
from fshard.transforms.options import Options, Weight
from fshard.transforms.stages.plan import has_stages
from fshard.transforms.value_and_grad import gradient_of

Criterion = Callable[[Any, Any], Tensor]


class StagedModel(BoostedModel):
    """A boosted model in the layouts of a schedule; its stages run in place.

    For the arguments see `LoopModel`.
    """

    def __init__(
        self, module: nn.Module, plugin: Plugin, source: OptimizerSource, opt: ShardedOptimizer
    ) -> None:
        super().__init__(module, plugin, source)
        self._options = {"gradients": opt.gradients, **plugin.gradient_options()}
        self._grads: PyTree | None = None
        self._criterion: Criterion | None = None
        self._weight: Any = None
        # With and without outputs, backward and weight; a loop uses few of them.
        self._gradient = lru_cache(maxsize=4)(self._make_gradient)
        self._has_stages = has_stages(**stages_of(self._options))
        self.set_buffers(self.module_buffers)
        self._followed = FollowedModule(module, [stage for stage, _ in self.plugin_parts])

    def stages_here(self) -> Sequence[bool]:
        return self._has_stages

    def buffer_trees(self) -> list[PyTree]:
        written = self.slots.written()
        trees = list[PyTree]()
        for is_here, tree in zip(self._has_stages, self.module_buffers, strict=True):
            if is_here and written:
                tree = _with_written(tree, written)
            trees.append(tree)
        return trees

    def set_buffers(self, trees: list[PyTree]) -> None:
        self.module_buffers = trees
        values = dict[str, Tensor]()
        for is_here, tree in zip(self._has_stages, trees, strict=True):
            if is_here:
                for name, x in tree.items():
                    values[name] = x.shards[0]
        self.slots.leave(values)

    forward = refusing(
        ModuleError,
        "a model in stages is run by its schedule: booster.execute_pipeline(iter(dataloader), "
        "model, criterion, optimizer), "
        "in torch.no_grad() to evaluate it.",
    )
    backward = refusing(
        ModuleError, "the backward of a model in stages is part of booster.execute_pipeline(...)."
    )

    def _make_gradient(self, outputs: bool, backward: bool, weighted: bool) -> GradientFunction:
        """Return the gradient of the schedule, for any criterion and weight.

        A loop may pass new ones in every step, so that they are read when it runs.
        """

        def loss(y: Any, microbatch: Any) -> Any:
            value = loss_of(self._criterion, y, microbatch)
            return (value, y) if outputs else value

        options: dict[str, Any] = {**self._options, "loss": loss}
        options["aux"] = "rows" if outputs else None
        if weighted:
            options["weight"] = lambda microbatch: self._weight(microbatch)
        return gradient_of(
            "execute_pipeline",
            self.function,
            Options(**options),
            backward=backward,
            in_place=True,
        )

    def run(
        self,
        criterion: Criterion | None,
        batch: PyTree,
        scale: float,
        *,
        outputs: bool,
        weight: Weight | None = None,
    ) -> StepValue:
        """Run the schedule on a batch, and keep the gradients of `scale` times the loss.

        Without grad mode it runs forwards only.

        The loss is the mean over microbatches, weighted by samples or by `weight`. With `outputs`,
        the last stage's results of all samples are returned beside the loss.
        """
        validate_inside(self.mesh)
        self.slots.validate_params()
        if has_hooks(self):
            raise ModuleError(
                "hooks of a model in stages must be registered on the module that was boosted, "
                "which is run by its schedule; got hooks of the boosted model. Register them on "
                "model.module."
            )
        self._followed.follow()
        self.module_buffers = self.buffer_trees()
        backward = torch.is_grad_enabled()
        self._criterion = criterion
        self._weight = weight
        with self.draws(grad=backward):
            gradient = self._gradient(outputs, backward, weight is not None)
            value, grads = gradient.run(self.params, self.module_buffers, batch, call_site(), scale)
        if backward:
            self.slots.gradients.exist = True
            self.largest_loss = value.largest
            self._grads = grads if self._grads is None else _sums(self._grads, grads)
        self.set_buffers(value.buffers)
        return value

    def gradients(self, optimizer: object) -> PyTree:
        if self._grads is None:
            raise ModuleError("there are no gradients. Call booster.execute_pipeline first.")
        grads = self._grads
        self._grads = None
        self.end_step()
        return grads

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step."""
        self._grads = None
        self.slots.gradients.exist = False


def loss_of(criterion: Criterion | None, output: Any, batch: Any) -> Tensor:
    """Return the loss of an output, by a criterion of the output and the labels.

    The labels are those of a pair (inputs, labels), or the full batch. Without a criterion the
    model has returned its loss, as those of transformers do.
    """
    if criterion is None:
        return output.loss
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    labels = batch[1] if is_pair else batch
    return criterion(output, labels)


def _sums(tree: PyTree, grads: PyTree) -> PyTree:
    """Return the sums of two trees of gradients; None is the gradient of an unused parameter."""
    leaves = Leaves.of(tree)
    return leaves.mapped(_add, leaves.beside(grads, "the gradients"))


def _add(x: Leaf, y: Leaf) -> Leaf:
    if x is None:
        return y
    if y is None:
        return x
    return map_shards(torch.add, x, y)


def _with_written(tree: PyTree, written: Mapping[str, Tensor]) -> PyTree:
    """Return the buffers of a stage with those that the loop has written to."""
    result = dict(tree)
    for name, x in tree.items():
        if name in written:
            result[name] = Sharded(tuple(written[name].shape), x.layout, (written[name],))
    return result
