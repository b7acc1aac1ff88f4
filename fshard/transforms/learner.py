"""What `ByHand` and `InStages` share: parameters that change from step to step, and gradients that add up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from fshard.errors import ScopeError
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.sharded import Sharded
from fshard.mesh.spmd import held, is_outside
from fshard.mesh.threads import one_thread
from fshard.mesh.tree import PyTree, flatten, unflatten
from fshard.optim.contract import Optimizer, step_of
from fshard.optim.leaves import trainable
from fshard.transforms.alterations import Altered
from fshard.transforms.kept import Slot
from fshard.transforms.randomness import keyed_random


class Learner(ABC):
    """Parameters as they lie, of one device.

    Args:
        params: the parameters; after a step, the new ones.
        mesh: the devices.
        lay: from a parameter's layout to its gradient's.
        seed: of random draws; the same on all devices.
        reproducible: whether updates keep their bits where pieces end.
    """

    def __init__(
        self,
        params: PyTree,
        mesh: Mesh,
        lay: Callable[[Layout], Layout],
        *,
        seed: int,
        reproducible: bool,
    ) -> None:
        if is_outside(mesh):
            raise ScopeError(
                f"a loop of one's own runs as one device of {mesh}: call it inside of fs.run(main, mesh=mesh), or under "
                "torchrun."
            )
        self.params, self.mesh, self._lay, self.reproducible = params, mesh, lay, reproducible
        self.seed, self.stepped = seed, ""  # with which options, as a text
        self.steps = self._rounds = self._looks = 0
        self._had, self._zeroed = set[int](), set[int]()  # which have had a gradient, and whose is zero at least

    @abstractmethod
    def whole(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return parameters and buffers as plain tensors, by their names in the model; all devices have to ask."""

    def draws(self, *, grad: bool) -> AbstractContextManager[None]:
        """Return the context of another call's draws; the first with gradients in a step draws as a functional step."""
        if not grad:
            self._looks += 1
            return keyed_random(self.seed, self.steps, "look", self._looks)
        self._rounds += 1
        return keyed_random(self.seed, self.steps, self._rounds - 1)

    @abstractmethod
    def follow(self, module: nn.Module, altered: Altered) -> None:
        """Call from now on what a model's structure has become; forget what was kept in attributes that were set."""

    @abstractmethod
    def kept(self) -> dict[str, Tensor]:
        """Return what this device's last call has kept in attributes, by the names of buffers."""

    @abstractmethod
    def shown(self, graphs: Mapping[Slot, Any]) -> dict[Slot, Any]:
        """Return what is to be seen of what the last call has left in attributes with its graph."""

    @abstractmethod
    def announce(self, total: int | None, part: PyTree) -> None:
        """Note how many samples all devices have together, of which this one's are about to come."""

    @abstractmethod
    def found(self) -> PyTree:
        """Return the gradients since the last time, and forget them; None where no device has used a parameter."""

    @abstractmethod
    def drop(self) -> None:
        """Drop all gradients since the last step."""

    def gradients(self, *, zeros: bool = False) -> PyTree:
        """Return the gradients since the last time, and forget them; where no device has used a parameter None, or zeros.

        Zeros are those of all parameters, or else of those that were zeroed.
        """
        grads = self.found()
        self.steps, self._rounds = self.steps + 1, 0
        leaves, _ = flatten(grads, sharded_is_leaf=True, none_is_leaf=True)
        there = {place for place, g in enumerate(leaves) if g is not None}
        missing = {*range(len(leaves))} - there
        wanted, self._zeroed = missing if zeros else missing & self._zeroed, set[int]()
        self._had |= there
        return with_zeros(grads, self.params, self._lay, wanted) if wanted else grads

    def zero(self, *, to_none: bool) -> None:
        """Drop the gradients; unless they become None, those that there were are zeros where nobody makes others."""
        self.drop()
        if to_none:
            self._had = set[int]()
        self._zeroed = {*self._had}

    @torch.no_grad()
    def written(self, opt: Any, grads: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return the parameters after a step of an optimizer, which may use up what there is, and its state."""
        step = None if self.reproducible else opt.step  # torch's fused kernels round otherwise where a piece ends
        with one_thread(self.reproducible):
            return step_of(Optimizer(opt.init, opt.update, step, arrays=True))(grads, state, self.params)


def with_zeros(
    grads: PyTree,
    params: PyTree,
    lay: Callable[[Layout], Layout],
    places: Collection[int] | None = None,
) -> PyTree:
    """Return gradients with zeros for parameters that have none, all or some of them.

    `lay` leads from a parameter's layout to its gradient's.
    """
    given, _ = flatten(grads, sharded_is_leaf=True, none_is_leaf=True)
    leaves, structure = flatten(params, sharded_is_leaf=True, none_is_leaf=True)
    pairs = enumerate(zip(leaves, given, strict=True))
    missing = [g is None and trainable(x) and (places is None or at in places) for at, (x, g) in pairs]
    both = zip(leaves, given, missing, strict=True)
    return unflatten(structure, [_zeros(x, lay(x.layout)) if wanted else g for x, g, wanted in both])


def _zeros(x: Sharded, layout: Layout) -> Sharded:
    near = x.shards[0]
    shapes = [layout.local_shape(x.shape, device) for device in held(x.mesh)]
    return Sharded(x.shape, layout, tuple(near.new_zeros(shape) for shape in shapes))
