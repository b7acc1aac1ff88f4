"""`RunPair`: a run in processes with the one in a single process, and what both are compared by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod
from typing import NamedTuple

import torch

from fshard.rounding import TOLERANCES
from fshard.testing.certificate import CertificateRow
from fshard.testing.programs.batches import Axes
from fshard.testing.programs.layouts import Slices
from fshard.testing.programs.record import RankRecord


class RunPair(NamedTuple):
    """A run in processes with the one in a single process, and the layouts of its parameters."""

    axes: Axes
    ranks: Sequence[RankRecord]
    single: RankRecord
    layouts: Mapping[str, Slices]
    dtypes: Dtypes

    def sizes(self) -> dict[str, int]:
        """Return the sizes of axes, and of several axes together, by the words for them."""
        axes = {name: size for name, size in self.axes.items() if size > 1}
        sizes: dict[str, int] = {}
        for n in range(1, len(axes) + 1):
            for names in combinations(axes, n):
                sizes[f"the size of {' x '.join(names)}"] = prod([axes[name] for name in names])
        return sizes

    def counts(self) -> dict[str, int]:
        """Return the numbers by which a mistake may multiply, by their names."""
        counts = self.sizes()
        backwards = 1
        for rank in self.ranks:
            backwards = max([backwards, *[step.backwards for step in rank.steps]])
        if backwards > 1:
            counts["the number of backward calls in a step"] = backwards
        return counts


class Dtypes:
    """The dtypes of a run, by which rounding explains differences."""

    def __init__(self, ranks: Sequence[RankRecord], declared: torch.dtype | None) -> None:
        computed: set[torch.dtype] = set()
        sent: set[torch.dtype] = set()
        rounded: set[torch.dtype] = set()
        for rank in ranks:
            computed |= rank.computed_in
            sent |= rank.sent_in
            rounded |= rank.rounded_in
        allowed = computed | ({declared} if declared is not None else set())
        self.undeclared: list[torch.dtype] = []
        for dtype in sent:
            if TOLERANCES[dtype] > TOLERANCES[_lowest(allowed)]:
                self.undeclared.append(dtype)
        self.seen = computed | sent | rounded
        self.of_gradients = _lowest(allowed | sent)
        # An update may compute in a dtype of its own, as Muon does.
        self.of_changes = _lowest(allowed | sent | rounded)

    def rows(self, mesh: str) -> list[CertificateRow]:
        """Return a row for each dtype that tensors are sent in without need."""
        rows: list[CertificateRow] = []
        for dtype in self.undeclared:
            name = str(dtype).removeprefix("torch.")
            reason = (
                f"step 0: tensors are reduced or sent in {name}, and nothing is computed in it. If "
                f"that is meant: --dtype {name} (dtype=torch.{name})"
            )
            error = torch.finfo(dtype).eps
            bound = torch.finfo(torch.float64).eps
            rows.append(CertificateRow(mesh, "reductions", "DIVERGENT", error, bound, reason, 0))
        return rows


def _lowest(dtypes: set[torch.dtype]) -> torch.dtype:
    return max(dtypes | {torch.float64}, key=lambda dtype: TOLERANCES[dtype])
