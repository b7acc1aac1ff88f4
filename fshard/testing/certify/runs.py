"""Training on one device, on which `certify` and `certify_module` agree: in the own dtypes, and in float64.

A run must be a function of its arguments, or nothing could be compared: it is repeated and must give the same. The
runs in float64 repeat its random draws (a mask from the loss function's own generator).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fshard.errors import PromiseError
from fshard.mesh.layout import flatten
from fshard.optim.leaves import Leaf, Leaves
from fshard.testing.certify.shards import is_floating, largest
from fshard.transforms.reproducible.randomness import keyed_random


class Snapshot(NamedTuple):
    """One step of a run: the gradients given to the optimizer, the parameters and buffers after it; leaves in tree order."""

    grads: list[Leaf]
    params: list[Leaf]
    buffers: list[Leaf]

    def mapped(self, f: Callable[[Leaf], Leaf]) -> Snapshot:
        """Apply a function to each leaf; tied leaves stay tied."""
        return Snapshot(*(Leaves.of(leaves).mapped(f) for leaves in self))


class SerialTrainer(Protocol):
    """A training on one device, step by step."""

    def gradients(self, step: int) -> list[Leaf]:
        """Compute the gradients of a step; one for each parameter."""
        ...

    def update(self, grads: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
        """Update the parameters; return copies of parameters and buffers."""
        ...


@dataclass(frozen=True)
class Training:
    """A program to certify: the parameters and buffers at its start, and how it trains on one device.

    Args:
        start: without gradients.
        trainer: new trainings, from (wide, sign): in float64, with all numbers moved by a rounding (see `widen`).
        steps: number of steps.
        seed: of all random draws.
        cures: by field of Snapshot, the advice if it differs when the run is repeated.
        compute: the dtype of the computation, if it is not that of the parameters.
    """

    start: Snapshot
    trainer: Callable[[bool, int], SerialTrainer]
    steps: int
    seed: int
    cures: Mapping[str, str]
    compute: torch.dtype | None = None

    def run(
        self,
        draws: AbstractContextManager[Any] | None = None,
        *,
        wide: bool = False,
        sign: int = 0,
        shifts: Sequence[Snapshot] | None = None,
        key: str = "",
    ) -> list[Snapshot]:
        """Train; `sign` times the gradients of `shifts` are added to those of the run."""
        snapshots: list[Snapshot] = []
        hint = note("in the run in float64: does the loss function name a dtype?") if wide else nullcontext()
        with _default_dtype(wide or self._is_wide), draws or nullcontext(), hint:
            trainer = self.trainer(wide, sign)
            for step in range(self.steps):
                with keyed_random(self.seed, key, step):
                    grads = trainer.gradients(step)
                    own = [] if shifts is None else zip(grads, shifts[step].grads, strict=True)
                    moved = {id(g): g + sign * shift for g, shift in own if g is not None}  # ties stay ties
                    snapshots.append(Snapshot(grads, *trainer.update([moved.get(id(g), g) for g in grads])))
        return snapshots

    def repeated(self) -> tuple[list[Snapshot], RandomDraws]:
        """Train twice; return the run and what it drew at random, or raise if the runs differ."""
        draws = RandomDraws()
        first = self.run(draws.record())
        for step, (one, other) in enumerate(zip(first, self.run(key="again"), strict=True)):
            for field, left, right in zip(Snapshot._fields, one, other, strict=True):
                if any(map(_differ, left, right)):
                    raise PromiseError(
                        "certify: on one device a run must give the same results when it is repeated; got others for "
                        f"the {field} of step {step}. {self.cures[field]}"
                    )
        return first, draws

    @property
    def _is_wide(self) -> bool:
        floats = {x.dtype for x in self.start.params if is_floating(x)}
        return bool(floats) and floats <= {torch.float64, torch.complex128}


def _differ(x: Leaf, y: Leaf) -> bool:
    """Return True if two leaves differ by more than the order of a kernel's sums explains."""
    if x is None or torch.equal(x, y):
        return False
    return bool(((x.to(torch.complex128) - y.to(torch.complex128)).abs() > 1e-3 * largest(x)).any())


class RandomDraws:
    """Tensors that a run draws at random, from any generator: recorded in one run, repeated in others."""

    def __init__(self) -> None:
        self.drawn: list[Any] = []

    def record(self) -> TorchDispatchMode:
        """Record the draws in the context."""
        return _Drawing(lambda found: self.drawn.append(found.clone()))

    def repeat(self) -> TorchDispatchMode:
        """Overwrite the draws in the context by the recorded ones; draws of another shape are unchanged."""
        left = iter(self.drawn)

        def overwrite(found: Tensor) -> None:
            recorded = next(left, None)
            if recorded is not None and recorded.shape == found.shape:
                found.copy_(recorded)

        return _Drawing(overwrite)


class _Drawing(TorchDispatchMode):
    """Calls a function with each tensor that is drawn at random."""

    def __init__(self, handle: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._handle = handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            for found in flatten(result)[0]:
                self._handle(found)
        return result


@contextmanager
def _default_dtype(wide: bool) -> Generator[None]:
    """Make float64 the dtype of new tensors if `wide`, so that constants have it, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if wide else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def note(where: str) -> Generator[None]:
    """Add a note to an exception."""
    try:
        yield
    except Exception as error:
        error.add_note(f"certify: {where}")
        raise
