"""What counts for nothing and yet takes part: a loss of weight 0, of which others may have used a value.

Its own derivative is 0 times something, which is no number where that is infinite; what comes back from other devices is
a number, and has to go on.  So the graph is cut between the loss and the collectives: each node there gives exact zeros.

    loss = nan   <── (z * mask).sum() / 0  <── all_gather(y)  <── y
      cotangents:    0                         what others found of y
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, zeros_like

_TALKING = ("_Recorded", "_Transformed", "_Extreme", "_Again")
"""The Functions whose backward other devices may add to, by name: torch makes classes of its own of them."""


def silence(loss: Tensor) -> None:
    """Let a loss give cotangents of 0, whatever its derivative; those that come by collectives are let through."""
    every = [*_behind([loss.grad_fn])] if loss.grad_fn is not None else []
    talking = [node for node in every if _talks(node)]
    heard = {*_behind(next_ for node in talking for next_ in _next(node)), *talking}
    for node in every:
        if node not in heard:
            node.register_hook(_zeros)


def _zeros(grad_inputs: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else zeros_like(g) for g in grad_inputs)


def _behind(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield nodes and all that they lead to, each once."""
    left, seen = list(nodes), set[Any]()
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += _next(node)


def _next(node: Any) -> list[Any]:
    return [other for other, _ in node.next_functions if other is not None]


def _talks(node: Any) -> bool:
    return node.name().removesuffix("Backward").removesuffix("Generated") in _TALKING
