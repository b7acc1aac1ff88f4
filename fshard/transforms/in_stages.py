"""Stages whose gradient is taken batch by batch, as a schedule runs them, and written when the caller says so.

    value = model.run(loss, batch)       forward and backward of all microbatches
    grads = model.gradients()            of all batches since the last time

The caller is one device, as in `by_hand`; a batch is that of all devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fshard.errors import ModuleError
from fshard.mesh.mesh import Mesh
from fshard.mesh.placing import unshard
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.spmd import held, standing
from fshard.mesh.tree import PyTree, flatten, unflatten
from fshard.pipeline.schedule import Schedule
from fshard.source import call_site
from fshard.transforms.alterations import Altered, alter
from fshard.transforms.criteria import IN_STAGES, watched_criterion
from fshard.transforms.cut_off import cut_off
from fshard.transforms.gradient import Runs, Value, as_they_lie
from fshard.transforms.kept import Slot, as_tensor, kept_of, value_of, without
from fshard.transforms.learner import Learner
from fshard.transforms.nearby import refuse_distant
from fshard.transforms.origin import after_a_step
from fshard.transforms.reached import look_beside
from fshard.transforms.seen import seen_together
from fshard.transforms.value_and_grad import gradient_of

Loss = Callable[[Any, Any], Tensor]
"""Of what the last stage makes, and the labels of a pair (inputs, labels), or else all of the microbatch."""


class InStages(Learner):
    """Stages with parameters and buffers that lie where a schedule has them.

    Args:
        stages: modules, of which only the structure is used.
        params: see `shard_stages`; so for buffers.
        axes: along which the batch is cut.
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
        lay = options.get("gradients") or as_they_lie
        super().__init__(params, mesh, lay, seed=seed, reproducible=options.get("reproducible", False))
        self.buffers = buffers
        cut = P(axes) if axes else P()
        self._options: dict[str, Any] = {"mesh": mesh, "batch": cut, "schedule": schedule, **options}
        self.stages, self._grads = stages, list[PyTree]()
        for stage in stages:
            seen_together(stage)  # by training and by evaluation
        self._gradient, self._losses = lru_cache(maxsize=4)(self._made), deque[tuple[Loss | None, Loss]](maxlen=4)
        self._loss, self._left = loss_of_pair(None), dict[Any, int]()

    def whole(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the parameters and buffers of all stages by their names in the model."""
        params, buffers = unshard(self.params), unshard(self.buffers)
        return {k: x for tree in params for k, x in tree.items()}, {k: x for tree in buffers for k, x in tree.items()}

    def follow(self, module: nn.Module, altered: Altered) -> None:
        """Call from now on what a model's structure has become; forget what was kept in attributes that were set."""
        if altered.modes:  # first: what is refused below is told once
            modes = {name: part.training for name, part in module.named_modules()}
            for name, part in (own for stage in self.stages for own in stage.named_modules()):
                part.training = modes.get(name, module.training)
        if altered.anew:
            alter(self.stages, module, altered)
        numbers = self._numbers_of(altered)
        others = altered._replace(attributes={slot: x for slot, x in altered.attributes.items() if slot not in numbers})
        if altered.anew or others.switches:
            self._gradient.cache_clear()  # first steps look for what no gradient would come to
        set_to = {slot.name: x for slot, x in numbers.items()}
        places = zip(self._here(), self.buffers, strict=True)
        self.buffers = [
            {name: _set_to(x, set_to[name]) if own and name in set_to else x for name, x in rest.items()}
            for own, tree in places
            for rest in [without(tree, others.forgotten)]
        ]

    def _numbers_of(self, altered: Altered) -> dict[Slot, Any]:
        """Return what kept numbers were set to, if it is of their kind: they stay.

        The device of another stage, to which they look like no numbers, finds what was set even where it is what there was,
        and the device of their own does not; both have to go on with the same.
        """
        known = {name: x for tree in self.buffers for name, x in kept_of(tree).items()}
        pairs = ((slot, x, known.get(slot.name)) for slot, x in altered.attributes.items())
        return {slot: x for slot, x, kept in pairs if kept is not None and not kept.shape and _is_of(x, kept.dtype)}

    def _here(self) -> list[bool]:
        """Return for each stage whether this device has it."""
        (device,) = held(standing(self.mesh))
        at = self.mesh.coordinates(device)[self._options["axis"]]
        return [place == at for place in self._options["schedule"].placement]

    def kept(self) -> dict[str, Tensor]:
        """Return what this device's last call has kept in attributes, by the names of buffers; of other stages, no numbers."""
        return {
            name: x.shards[0] if own else _no_number(x)
            for own, tree in sorted(zip(self._here(), self.buffers, strict=True), key=lambda pair: pair[0])
            for name, x in kept_of(tree).items()
        }

    def shown(self, graphs: Mapping[Slot, Any]) -> dict[Slot, Any]:
        """Return what is to be seen of what the last call has left in attributes with its graph: no loss is made of it."""
        return cut_off(graphs, "stages have gone back through what they have made")

    def _loss_of(self, loss: Loss | None) -> Loss:
        schedule: Schedule = self._options["schedule"]
        several = schedule.microbatches > 1 or len({*schedule.placement}) > 1
        return loss_of_pair(loss, watched=several, left=self._left)

    def _of_pair(self, loss: Loss | None) -> Loss:
        """Return the loss of what the last stage makes and a microbatch, that which was made before of the same one."""
        found = next((made for given, made in self._losses if _are_one(given, loss)), None)
        if found is None:
            found = self._loss_of(loss)
            self._losses.append((loss, found))
        return found

    def _made(self, outputs: bool, backward: bool) -> Runs:
        """Return what runs the schedule, whatever the criterion is: a loop may write a new one in every step."""

        def both(y: Any, microbatch: Any) -> Any:
            found = self._loss(y, microbatch)
            return (found, y) if outputs else found

        how: dict[str, Any] = {**self._options, "loss": both, "has_aux": outputs, "has_buffers": True}
        return gradient_of("execute_pipeline", self.stages, backward=backward, **how)

    def run(self, loss: Loss | None, batch: PyTree, *, scale: float = 1.0, outputs: bool = False) -> Value:
        """Run the schedule on a batch, and keep the gradients of `scale` times the loss; without grad mode, forwards alone.

        With `outputs`, what the last stage makes of all samples comes back beside the loss.
        """
        backward = torch.is_grad_enabled()
        refuse_distant(self.mesh, "execute_pipeline", params=self.params, buffers=self.buffers)
        with self.draws(grad=backward), torch.enable_grad() if backward else torch.no_grad():
            runs, self._loss = self._gradient(outputs, backward), self._of_pair(loss)
            with after_a_step(self.stepped):
                value, grads = runs.run(self.params, self.buffers, batch, call_site(), scale)
        if backward:
            self._grads.append(grads)
        self.buffers = value.buffers
        return value

    def announce(self, total: int | None, part: PyTree) -> None:
        """Do nothing: stages are given the batches of all devices."""

    def found(self) -> PyTree:
        """Return the gradients of all batches since the last time, and forget them."""
        if not self._grads:
            raise ModuleError("there are no gradients. Call booster.execute_pipeline first.")
        columns = [flatten(tree, sharded_is_leaf=True, none_is_leaf=True)[0] for tree in self._grads]
        _, structure = flatten(self._grads[0], sharded_is_leaf=True, none_is_leaf=True)
        self.drop()
        return unflatten(structure, [_sum([g for g in row if g is not None]) for row in zip(*columns, strict=True)])

    def drop(self) -> None:
        """Drop all gradients since the last step."""
        self._grads = []


def loss_of_pair(criterion: Loss | None, *, watched: bool = True, left: dict[Any, int] | None = None) -> Loss:
    """Return the loss of what the last stage makes and a microbatch; without a criterion the last stage returns it.

    One that is watched is called otherwise than a loop would call it, and warns if it keeps anything; for `left` see there.
    """
    if criterion is not None and watched:
        criterion = watched_criterion(criterion, IN_STAGES, left)

    def loss(y: Any, microbatch: Any) -> Tensor:
        if criterion is None:
            return loss_in(y)
        pair = isinstance(microbatch, tuple | list) and len(microbatch) == 2
        found = criterion(y, microbatch[1] if pair else microbatch)
        look_beside(found, y)
        return found

    return loss


def _are_one(given: Loss | None, loss: Loss | None) -> bool:
    """Return whether two criteria are one: equal ones need not be, and some have no hash; a method is another each time."""
    return given is loss or (isinstance(given, MethodType) and isinstance(loss, MethodType) and given == loss)


def _is_of(value: Any, dtype: torch.dtype) -> bool:
    """Return whether a value can be told as a number of some dtype; what is no number there may be one elsewhere."""
    if not isinstance(value, (bool, int, float)) or (x := as_tensor(value)) is None:
        return False
    return value != value or value_of(x.to(dtype)) == value


def _set_to(x: Sharded, value: Any) -> Sharded:
    """Return a number with another value."""
    return Sharded(x.shape, x.layout, tuple(torch.full_like(shard, value) for shard in x.shards))


def _no_number(x: Sharded) -> Tensor:
    """Return what is shown of what the device of another stage has kept: it has the same shape."""
    dtype = x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.float64
    return torch.full(x.shape, torch.nan, dtype=dtype)


def loss_in(output: Any) -> Tensor:
    """Return the loss that a model has returned itself."""
    if not hasattr(output, "loss"):
        raise ModuleError(
            f"without a criterion a model returns its loss, as .loss of its output; this one has returned a "
            f"{type(output).__name__}. Give a criterion: criterion(output, labels)."
        )
    return output.loss


def _sum(given: Sequence[Sharded]) -> Sharded | None:
    """Add gradients up, one after the other."""
    if not given:
        return None
    first, *others = given
    for other in others:
        shards = tuple(x + y for x, y in zip(first.shards, other.shards, strict=True))
        first = Sharded(first.shape, first.layout, shards)
    return first
