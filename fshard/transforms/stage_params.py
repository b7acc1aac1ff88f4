"""The parameters of one stage on one device: gathered before they are used, and let go.

What autograd saves of a parameter, views of it too, has its memory.  So that is what is emptied and filled again, under the
same tensors: nothing has to be swapped, and nothing is recorded twice.

    UNSHARD   its pieces are on their way     F, B, I, W   they are there: memory is filled     RESHARD   it is given back
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fshard.errors import ModuleError
from fshard.mesh.steps import go
from fshard.mesh.tree import PyTree
from fshard.pipeline.leaves import edges_of
from fshard.source import Site
from fshard.transforms.handle import WRITES
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.replica import Replica
from fshard.transforms.units import Leaf, versions_of

_data_of = cast("Any", Tensor).data.__get__


class _Guarded(Tensor):
    """A parameter of a stage, of which a write to `.data` is seen as any other, by its version."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore
    _is_param = True
    """As torch asks whether it is one."""
    path = ""
    step: StageParams
    """The step whose parameter it is."""

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
        """The same memory, and the same version."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise ModuleError(f"a stage writes to the parameter {named(parts_of(self.path))}. {WRITES}")


def _guarded(x: Tensor, path: str, step: StageParams) -> Tensor:
    made = x.detach().as_subclass(_Guarded)
    made.path, made.step = path, step
    return made


class StageParams:
    """The parameters of a stage, each once.

    Args:
        leaves: what they are, and their ways from pieces to wholes.
        shards: what the device has of them.
        tree: puts wholes together as the stage takes them.
        compute: the floating dtype that they are used in; None: their own.
        backward: whether gradients are wanted.
        site: the line of the step.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        shards: Sequence[Tensor],
        tree: Callable[[list[Tensor]], PyTree],
        compute: torch.dtype | None,
        *,
        backward: bool,
        site: Site,
    ) -> None:
        self._shards, self._compute, self._site = shards, compute, site
        self._replicas: list[Replica] = []
        self._ways = [leaf.gather for leaf in leaves]
        self._cut = [place for place, way in enumerate(self._ways) if any(step.kind != "reshape" for step in way.steps)]
        self._coming: Callable[[], list[Tensor]] | None = None
        self._whole = not self._cut
        wholes = dict(zip(self._uncut, self._go(self._uncut, ahead=False)(), strict=True))
        for place in self._cut:
            near = self._converted(place)
            wholes[place] = torch.empty(leaves[place].shape, dtype=near.dtype, device=near.device)
            wholes[place].untyped_storage().resize_(0)
        self._xs = [_guarded(wholes[place], leaf.path, self) for place, leaf in enumerate(leaves)]
        trained = [place for place, leaf in enumerate(leaves) if backward and leaf.trained]
        self.own = [self._xs[place].requires_grad_() for place in trained]
        self._edges = edges_of(self.own)
        self._tree = tree(self._xs)
        self._versions, self._leaves = versions_of(self._xs), leaves

    @property
    def tree(self) -> PyTree:
        """The parameters, whole."""
        self._arrive()
        return self._tree

    @property
    def edges(self) -> list[GradientEdge]:
        """Where the gradients of those that are trained come out; and they are whole."""
        self._arrive()
        return self._edges

    def use(self, replica: Replica) -> None:
        """Note that the parameters are installed in a module until the step closes."""
        if not any(replica is other for other in self._replicas):
            self._replicas.append(replica)

    def close(self) -> None:
        """End the step: take the parameters out of modules."""
        for replica in self._replicas:
            replica.rest()
        self._replicas = []

    def written_to(self) -> list[str]:
        """Return the paths of those that a stage has written to."""
        now = versions_of(self._xs)
        both = zip(self._leaves, now, self._versions, strict=True)
        return [leaf.path for leaf, version, before in both if version != before]

    def gather(self) -> None:
        """Begin to gather what lies in pieces, ahead of its use."""
        if not self._whole and self._coming is None:
            self._coming = self._go(self._cut, ahead=True)

    def free(self) -> None:
        """Let go what was gathered."""
        self._arrive()  # others count on it
        for place in self._cut:
            memory = self._xs[place].untyped_storage()
            if memory.resizable():  # that of which numpy has an array stays until the step ends
                memory.resize_(0)
        self._whole = not self._cut

    def _arrive(self) -> None:
        self.gather()
        if self._coming is not None:
            values, self._coming, self._whole = self._coming(), None, True
            for place, value in zip(self._cut, values, strict=True):
                x = _data_of(self._xs[place])  # whose changes autograd does not count
                if x.untyped_storage().nbytes() != x.nbytes:
                    x.untyped_storage().resize_(x.nbytes)
                x.copy_(value)

    @property
    def _uncut(self) -> list[int]:
        return [place for place in range(len(self._ways)) if place not in self._cut]

    def _go(self, places: Sequence[int], *, ahead: bool) -> Callable[[], list[Tensor]]:
        with torch.no_grad():
            xs = [self._converted(place) for place in places]
            return go(xs, [self._ways[place] for place in places], self._site, ahead=ahead)

    def _converted(self, place: int) -> Tensor:
        x = self._shards[place].detach()
        return x if self._compute is None or not x.is_floating_point() else x.to(self._compute)
