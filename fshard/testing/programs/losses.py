"""`LossRule`: the number of the losses of ranks that is the loss of one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fshard.rounding import TOLERANCES, bound_of
from fshard.testing.programs.batches import element_counts, equal_axes, rows_at
from fshard.testing.programs.pair import RunPair
from fshard.testing.verdicts import Comparison, Shards


class LossRule:
    """The number of the losses of ranks that is the loss of one process, in all steps.

    It is their mean by rows, their mean or a sum of shares: the first that agrees in the most
    steps, counted from the first one. Later steps differ in any case if a gradient is wrong.
    """

    def __init__(self, run: RunPair) -> None:
        self._run = run
        steps = range(len(run.single.steps))
        self._losses: list[dict[int, float]] = []
        for step in steps:
            losses = {rank: x.steps[step].loss for rank, x in enumerate(run.ranks)}
            self._losses.append({rank: x for rank, x in losses.items() if x is not None})

        means = [self._mean(step) for step in steps]
        candidates = {
            "": [self._mean_by_rows(step) for step in steps],
            "the mean of the losses of ranks, whatever their rows": means,
        }
        for name, n in run.sizes().items():
            shares = [None if x is None else x * n for x in means]
            candidates[f"each rank returns a share of the loss: 1 / {name}"] = shares
        self._note = max(candidates, key=lambda note: self._steps_of_agreement(candidates[note]))
        self._values = candidates[self._note]

    def _mean_by_rows(self, step: int) -> float | None:
        losses = self._losses[step]
        rows = {rank: rows_at(self._run.ranks[rank], step) for rank in losses}
        if not sum(rows.values()):
            return None
        return sum([losses[rank] * rows[rank] for rank in losses]) / sum(rows.values())

    def _mean(self, step: int) -> float | None:
        losses = self._losses[step]
        return sum(losses.values()) / len(losses) if losses else None

    def _steps_of_agreement(self, values: Sequence[float | None]) -> int:
        """Return the number of steps before the first in which the losses differ."""
        for step, value in enumerate(values):
            if not all(comparison.is_within_bound() for comparison in self._compared(step, value)):
                return step
        return len(values)

    def comparisons(self, step: int) -> Iterator[Comparison]:
        """Compare the loss of a step, if a run has one."""
        for comparison in self._compared(step, self._values[step]):
            hint = ""
            if not comparison.is_within_bound():
                hint = self._tokens_text(step) or self._batch_norm_text()
            yield comparison._replace(hint=hint, note=self._note)

    def _compared(self, step: int, value: float | None) -> Iterator[Comparison]:
        single = self._run.single.steps[step].loss
        if value is None and single is None:
            return
        shards = None if value is None else Shards([_scalar(value)], [0], lambda x: [x])
        expected = None if single is None else _scalar(single)
        dtype = self._run.dtypes.of_gradients
        bound = bound_of(expected, 0.0, dtype)
        tolerance = 1e-6 + TOLERANCES[dtype]
        yield Comparison(step, "loss", "loss", shards, expected, bound, tolerance=tolerance)

    def _tokens_text(self, step: int) -> str:
        """Describe the cause, if the mean of the losses by tokens of each rank is the right one."""
        losses = self._losses[step]
        single = self._run.single.steps[step].loss
        if single is None or not losses:
            return ""
        counts = {rank: element_counts(self._run.ranks[rank], step) for rank in losses}
        tolerance = 1e-6 + TOLERANCES[self._run.dtypes.of_gradients]
        names = set[str].intersection(*[{*of_rank} for of_rank in counts.values()])
        for name in sorted(names):
            weights = {rank: of_rank[name] for rank, of_rank in counts.items()}
            total = sum(weights.values())
            if not total or len({*weights.values()}) == 1:
                continue
            mean = sum([losses[rank] * weights[rank] for rank in losses]) / total
            if abs(mean - single) <= tolerance * abs(single):
                return (
                    "; a mean of means? Do ranks have different numbers of tokens? The mean by "
                    f"{name} is that of one process"
                )
        return ""

    def _batch_norm_text(self) -> str:
        """Describe BatchNorm that takes the statistics of some rows; "" if there is none."""
        names = [rank.batch_norm for rank in self._run.ranks if rank.batch_norm]
        equal = equal_axes([rank.batches for rank in self._run.ranks], self._run.axes)
        axes = [name for name, n in self._run.axes.items() if n > 1 and name not in equal]
        if not names or not axes:
            return ""
        return (
            f"; BatchNorm {names[0]!r} takes the mean and variance of the rows of each rank: "
            "nn.SyncBatchNorm.convert_sync_batchnorm(model) gives those of all"
        )


def _scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)
