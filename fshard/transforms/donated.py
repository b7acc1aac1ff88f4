"""States that a step has used up: it has written the next one's parameters where theirs were.

after, metrics = booster.step(before, batch)         before.params are those of `after` now, and the rest is not
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from fshard.errors import LayoutError
from fshard.mesh.sharded import Sharded
from fshard.mesh.tree import PyTree, flatten
from fshard.optim.leaves import trainable


class Donated:
    """Remembers, without holding it, a parameter of the newest state, and how many steps that has taken."""

    def __init__(self) -> None:
        self._newest: Callable[[], Sharded | None] = lambda: None
        self._steps, self._given = 0, list[int]()

    def refuse(self, params: PyTree, steps: int) -> None:
        """Raise if a state of so many steps, which is given, has parameters that have taken another number of them."""
        newest, given = self._newest(), _trained(params)
        if newest is not None and any(newest is x for x in given) and steps != self._steps:
            raise LayoutError(
                f"step: this state, of {steps} steps, was used up by an earlier step, and its parameters have taken "
                f"{self._steps} by now. Go on with the state that was returned; what is to be kept is copied before: "
                "{name: x.clone() for name, x in fs.unshard(state.params).items()}."
            )
        self._given = [*map(id, given)]

    def note(self, params: PyTree, steps: int) -> None:
        """Note what a step returns for what was given; a parameter that nobody uses stays the same, others may be new ones."""
        made = _trained(params)
        in_place = bool(made) and [*map(id, made)] == self._given
        self._newest, self._steps = ref(made[0]) if in_place else (lambda: None), steps


def _trained(params: PyTree) -> list[Sharded]:
    leaves, _ = flatten(params, sharded_is_leaf=True)
    return [x for x in leaves if isinstance(x, Sharded) and trainable(x)]
