"""States that a step has used up: it has written the next one's parameters where theirs were.

after, metrics = booster.step(before, batch)         before.params are those of `after` now, and the rest is not
"""

from __future__ import annotations

from weakref import ref

from fshard.errors import LayoutError
from fshard.mesh.sharded import Sharded
from fshard.mesh.tree import PyTree, flatten
from fshard.optim.leaves import trainable


class Donated:
    """Remembers, without holding them, a parameter of the newest state and a tensor of its optimizer's, and how many steps."""

    def __init__(self) -> None:
        self._newest = list[ref[Sharded]]()
        self._steps, self._given = 0, list[int]()
        self._kept = set[int]()

    def refuse(self, params: PyTree, optimizer: PyTree, steps: int) -> None:
        """Raise if a state of so many steps, which is given, has what has taken another number of them."""
        trained, kept = _trained(params), _sharded(optimizer)
        given = {*map(id, trained), *map(id, kept)}
        if steps != self._steps and any(id(x()) in given for x in self._newest if x() is not None):
            raise LayoutError(
                f"step: this state, of {steps} steps, was used up by an earlier step, and its parameters, or its optimizer's, "
                f"have taken {self._steps} by now. Go on with the state that was returned; what is to be kept is copied "
                "before: copy.deepcopy(state), or {name: x.clone() for name, x in fs.unshard(state.params).items()}."
            )
        self._given, self._kept = [*map(id, trained)], {*map(id, kept)}

    def note(self, params: PyTree, optimizer: PyTree, steps: int) -> None:
        """Note what a step returns for what was given; a parameter that nobody uses stays the same, others may be new ones."""
        made = _trained(params)
        in_place = bool(made) and [*map(id, made)] == self._given
        kept = (x for x in _sharded(optimizer) if id(x) in self._kept)
        self._newest = [ref(x) for x in (made[0], next(kept, None)) if x is not None] if in_place else []
        self._steps = steps


def _trained(params: PyTree) -> list[Sharded]:
    return [x for x in _sharded(params) if trainable(x)]


def _sharded(tree: PyTree) -> list[Sharded]:
    return [x for x in flatten(tree, sharded_is_leaf=True)[0] if isinstance(x, Sharded)]
