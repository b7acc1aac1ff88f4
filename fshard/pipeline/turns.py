"""Stages that treat some microbatches otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fshard.mesh.tree import PyTree

Stage = Callable[..., PyTree]
"""(params, x) -> y, with skips as keywords: see `pipelined`."""


@dataclass(frozen=True)
class ByMicrobatch:
    """A stage that is asked for by the number of a microbatch, the first being 0.

    >>> doubled = ByMicrobatch(lambda number: lambda params, x: x * 2 if number else x)
    >>> [called_for(doubled, number)((), 1) for number in range(3)]
    [1, 2, 2]
    """

    at: Callable[[int], Stage]

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call it for the first."""
        return self.at(0)(*args, **kwargs)


def called_for(stage: Stage, microbatch: int) -> Stage:
    """Return what a stage is for a microbatch."""
    return stage.at(microbatch) if isinstance(stage, ByMicrobatch) else stage
