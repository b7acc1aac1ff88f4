"""What one device does in a step: forward and backward of its slices, one after the other.

slice 0          slice 1          last slice
gradients kept   kept, added up   added up, reduced as each unit's are ready
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.scope import require
from fshard.mesh.tree import PyTree
from fshard.transforms.batch import Batch
from fshard.transforms.forest import Forest
from fshard.transforms.means import Found, Value, summed, together
from fshard.transforms.randomness import keyed_random
from fshard.transforms.use import Manner, Tape

Weight = Callable[[PyTree], Tensor | int | float]


@dataclass(frozen=True)
class How:
    """How each device takes the gradient of its part.

    Args:
        loss_fn: of (params, batch).
        has_aux: whether it returns a pair.
        weight: what a part of the batch counts for.
        accumulate: into how many turns a device's part is cut.
        once: whether gradients are added up over the turns before they are reduced.
        slices: into how many slices the whole batch is cut in reproducible mode; None: another mode.
        manner: how units are handled.
    """

    loss_fn: Callable[..., Any]
    has_aux: bool
    weight: Weight | None
    accumulate: int
    once: bool
    slices: int | None
    manner: Manner


class Device:
    """One device in one step.

    Args:
        how: what it does.
        tape: its parameters.
        params: gives them as the tree that the loss function takes.
        batch: the batch, of which it has a part.
        place: where its shards stand among those at hand.
        key: of its random draws; the same on all devices.
        scale: what the loss is multiplied by for the backward.
    """

    def __init__(
        self, how: How, tape: Tape, params: Callable[[], PyTree], batch: Batch, place: int, key: int, scale: float
    ) -> None:
        self.how, self.tape, self.params, self.batch, self.place = how, tape, params, batch, place
        self.key, self.scale = key, scale
        scope = require("value_and_grad")
        self.n = prod(scope.axes[axis][0] for axis in batch.axes)
        self.group = scope.group(batch.axes, "value_and_grad") if batch.axes else None

    def run(self) -> tuple[Value, list[Tensor | None]]:
        """Return the loss of the whole batch, and this device's shards of the gradients."""
        how, tape = self.how, self.tape
        count = self._slices()
        pieces = self.batch.slices(self.place, count)
        forest = Forest() if how.slices is not None else None
        found: list[Found] = []
        counts, shares = self._shares(pieces)
        index = self.group.index if self.group is not None else 0
        for turn, piece in enumerate(pieces):
            if forest is not None:
                tape.keep = forest.plant
            elif how.once and turn < count - 1:
                tape.keep = lambda unit, gs: unit.keep(gs)
            else:
                tape.keep = None
            tape.begin()
            with keyed_random(self.key, 0, index * count + turn):
                found.append(self._one(piece, counts[turn], shares[turn]))
            if forest is not None:
                forest.grow()
        tape.check_unchanged()
        self._reduce_rest(forest)
        tape.end()
        value, used = together(found, self.group, tape.used, tape.sequence, tape.site)
        return value, self._gradients(value, used)

    def _slices(self) -> int:
        how = self.how
        if how.slices is None:
            return how.accumulate
        if how.slices % self.n or (how.slices // self.n) % how.accumulate:
            raise LayoutError(
                f"reproducible mode cuts the batch into {how.slices} slices, which {self.n} devices do not share evenly "
                f"in {how.accumulate} turns. Give a number of slices that all your meshes divide."
            )
        return how.slices // self.n

    def _shares(self, pieces: list[list[Any]]) -> tuple[list[Tensor], list[float]]:
        """Return what each slice counts for, and its share of the mean (in reproducible mode, before the division)."""
        how = self.how
        if how.weight is None:
            share = 1.0 if how.slices is not None else 1.0 / (self.n * len(pieces))
            return [torch.ones((), dtype=torch.float64)] * len(pieces), [share] * len(pieces)
        counts = [torch.as_tensor(how.weight(self.batch.tree(piece)), dtype=torch.float64) for piece in pieces]
        if counts[0].is_meta:
            return counts, [1.0] * len(pieces)
        if how.slices is not None:
            return counts, [float(count) for count in counts]
        total = summed(torch.stack(counts).sum(), self.group, self.tape.site)
        return counts, [float(count / total) for count in counts]

    def _one(self, piece: list[Any], count: Tensor, share: float) -> Found:
        """Forward and backward of one slice."""
        how, tape = self.how, self.tape
        with torch.enable_grad(), tape.forward():
            result = how.loss_fn(self.params(), self.batch.tree(piece, how.manner.compute))
            loss, aux = result if how.has_aux else (result, ())
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise LayoutError(f"the loss function has to return one number; found {found}. Take its mean.")
        if loss.requires_grad:
            start = torch.full_like(loss, share * self.scale)
            torch.autograd.grad(loss, [tape.anchor], start, allow_unused=True)
        return Found(loss.detach(), count.to(loss.device), aux)

    def _reduce_rest(self, forest: Forest | None) -> None:
        """Reduce what has been kept and not yet been reduced, in the order of the units."""
        tape = self.tape
        tape.keep = None
        for unit in tape.units:
            gs = forest.harvest(unit) if forest is not None else unit.kept
            unit.kept = None
            if gs is not None:
                tape.reduce(unit, gs)
        tape.finish()

    def _gradients(self, value: Value, used: list[bool]) -> list[Tensor | None]:
        """Return the gradients; a parameter that no device used has none."""
        meta = value.weight.is_meta
        divisor = float(value.weight) if self.how.slices is not None and not meta else 1.0
        sums, self.tape.sums = self.tape.sums, []
        return [
            (g if divisor == 1.0 else g / divisor) if g is not None and wanted else None
            for g, wanted in zip(sums, used, strict=True)
        ]
