"""Stages whose gradient is taken batch by batch, run by a schedule, and stepped by the caller.

    value = model.run(loss, batch)       forward and backward of all microbatches
    grads = model.gradients()            of all batches since the last call

The caller is one device, as in `loop`; a batch is that of all devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fshard.booster.loop import LoopDraws, refuse_outside
from fshard.errors import ModuleError
from fshard.mesh.layout import Layout, Mesh, P, PyTree, flatten, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import unshard
from fshard.pipeline.schedule.schedule import Schedule
from fshard.source import call_site
from fshard.transforms.gradient import GradientFunction, StepValue, same_layouts
from fshard.transforms.origin import refuse_distant
from fshard.transforms.value_and_grad import gradient_of

Loss = Callable[[Any, Any], Tensor]
"""Of the last stage's result, and the labels of a pair (inputs, labels), or else the full microbatch."""


class StagedGradient:
    """Stages with parameters and buffers in the layouts of a schedule.

    Args:
        stages: modules, which run in place: each device its own.
        params: see `shard_stages`; so for buffers.
        mesh: the devices.
        axes: those that shard the batch.
        schedule: placement and order of the stages' work.
        seed: of random draws; the same on all devices.
        options: those of `value_and_grad` with a schedule.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        params: Sequence[PyTree],
        buffers: Sequence[PyTree],
        *,
        mesh: Mesh,
        axes: tuple[str, ...],
        schedule: Schedule,
        seed: int = 0,
        **options: Any,
    ) -> None:
        refuse_outside(mesh)
        self.params, self.buffers, self.mesh = params, buffers, mesh
        self.draws = LoopDraws(seed)
        self.gradient_layout: Callable[[Layout], Layout] = options.get("gradients") or same_layouts
        self.is_reproducible: bool = options.get("reproducible", False)
        self._stages = stages
        self._options = {"mesh": mesh, "batch": P(axes) if axes else P(), "schedule": schedule, **options}
        self._grads = list[PyTree]()
        self._loss = loss_of_pair(None)
        self._gradient = lru_cache(maxsize=4)(self._made)

    def full(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return unsharded parameters and buffers of all stages by name; a collective of all devices."""
        params, buffers = unshard(self.params), unshard(self.buffers)
        return {k: x for tree in params for k, x in tree.items()}, {k: x for tree in buffers for k, x in tree.items()}

    def announce(self, total: int | None, part: PyTree) -> None:
        """Do nothing: stages are given the batches of all devices."""

    def _made(self, outputs: bool, backward: bool) -> GradientFunction:
        """Return the gradient of the schedule, for any criterion: a loop may pass a new one in every step."""

        def both(y: Any, microbatch: Any) -> Any:
            found = self._loss(y, microbatch)
            return (found, y) if outputs else found

        how: dict[str, Any] = {**self._options, "loss": both, "has_aux": outputs, "has_buffers": True}
        return gradient_of("execute_pipeline", self._stages, backward=backward, in_place=True, **how)

    def run(self, loss: Loss | None, batch: PyTree, *, scale: float = 1.0, outputs: bool = False) -> StepValue:
        """Run the schedule on a batch, and keep the gradients of `scale` times the loss; without grad mode, forwards
        only.

        With `outputs`, the last stage's results of all samples are returned beside the loss.
        """
        backward = torch.is_grad_enabled()
        refuse_distant(self.mesh, "execute_pipeline", params=self.params, buffers=self.buffers)
        self._loss = loss_of_pair(loss)
        with self.draws.next(grad=backward), torch.set_grad_enabled(backward):
            runs = self._gradient(outputs, backward)
            value, grads = runs.run(self.params, self.buffers, batch, call_site(), scale)
        if backward:
            self._grads.append(grads)
        self.buffers = value.buffers
        return value

    def gradients(self) -> PyTree:
        """Return the gradients of all batches since the last time, and forget them."""
        if not self._grads:
            raise ModuleError("there are no gradients. Call booster.execute_pipeline first.")
        columns = [flatten(tree, sharded_is_leaf=True, none_is_leaf=True)[0] for tree in self._grads]
        _, structure = flatten(self._grads[0], sharded_is_leaf=True, none_is_leaf=True)
        self.drop()
        self.draws.end_step()
        return unflatten(structure, [_sum([g for g in row if g is not None]) for row in zip(*columns, strict=True)])

    def drop(self) -> None:
        """Drop all gradients since the last step."""
        self._grads = []


def loss_of_pair(criterion: Loss | None) -> Loss:
    """Return the loss of the last stage's result and a microbatch; without a criterion the last stage returns it."""

    def loss(y: Any, microbatch: Any) -> Tensor:
        if criterion is None:
            return loss_in(y)
        pair = isinstance(microbatch, tuple | list) and len(microbatch) == 2
        return criterion(y, microbatch[1] if pair else microbatch)

    return loss


def loss_in(output: Any) -> Tensor:
    """Return the loss that a model has returned itself."""
    if not hasattr(output, "loss"):
        raise ModuleError(
            f"without a criterion a model must return its loss, as .loss of its output; got a {type(output).__name__}. "
            "Give a criterion: criterion(output, labels)."
        )
    return output.loss


def _sum(given: Sequence[Sharded]) -> Sharded | None:
    """Add gradients in sequence."""
    if not given:
        return None
    first, *others = given
    for other in others:
        shards = tuple(x + y for x, y in zip(first.shards, other.shards, strict=True))
        first = Sharded(first.shape, first.layout, shards)
    return first
