"""The comparison of a run in processes with one in a single process, in the order of time.

loss ─> gradients, those of the last layer first ─> what optimizers are given ─> changes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from math import inf, prod
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.errors import PromiseError
from fshard.rounding import TOLERANCES, bound_of, largest
from fshard.testing.certificate import CertificateRow
from fshard.testing.programs.batches import (
    Axes,
    coordinates_of,
    element_counts,
    equal_axes,
    repeated_rows,
    rows_at,
)
from fshard.testing.programs.layouts import Parts, Slices, mistake_at_start, slices_of
from fshard.testing.programs.record import RankRecord
from fshard.testing.verdicts import (
    SOME_TIMES,
    Comparison,
    Shards,
    constant_factor,
    judge,
    number_text,
)

DATA_AXES = ("data", "dp", "replica", "replicate", "fsdp", "ddp", "shard", "batch")
"""Names of axes along which processes load other rows."""


def judge_ranks(
    axes: Axes,
    ranks: Sequence[RankRecord],
    single: RankRecord,
    dtype: torch.dtype | None = None,
    parts: Parts | None = None,
    same: Sequence[str] = (),
) -> list[CertificateRow]:
    """Judge the run in the processes of a mesh, by the run in one process.

    Args:
        axes: of the mesh.
        ranks: the runs in processes.
        single: the run in one process.
        dtype: the lowest one that tensors may be sent in, besides those that a program computes in.
        parts: see `certify_program`.
        same: the axes along which equal batches are meant.
    """
    mesh = mesh_text(axes)
    layouts, start_rows = _layouts(axes, ranks, single, parts or {})
    run = _RunPair(axes, ranks, single, layouts, _Dtypes(ranks, dtype))
    rows = judge(run.comparisons(), mesh, run.counts(), "rank")
    rows = _with_common_cause(rows)
    return [*_rows_of_equal_batches(axes, ranks, same), *run.dtypes.rows(mesh), *start_rows, *rows]


def _rows_of_equal_batches(
    axes: Axes, ranks: Sequence[RankRecord], same: Sequence[str]
) -> list[CertificateRow]:
    """Return a row for each axis of data along which batches are equal, unless that is meant."""
    rows: list[CertificateRow] = []
    mesh = mesh_text(axes)
    for name in equal_axes(ranks, axes):
        if name in DATA_AXES and name not in same:
            reason = (
                f"step 0: batches are equal along {name}: each rank reads the same rows. Let each "
                "load other rows, as by a DistributedSampler; if equal ones are meant, say so: "
                f'--same {name} (same=("{name}",)), or give the axis another name'
            )
            row = CertificateRow(mesh, "batches", "DIVERGENT", inf, 0.0, reason, 0, "start")
            rows.append(row)
    return rows


def _with_common_cause(rows: list[CertificateRow]) -> list[CertificateRow]:
    """Note once, in the first row, that the gradients of all leaves have the same factors on ranks."""
    failures = [row for row in rows if row.step is not None and row.leaf != "loss"]
    if len(failures) < 2 or len({row.reason for row in failures}) > 1:
        return rows
    first = failures[0]
    if SOME_TIMES not in first.reason or "gradient" not in first.subject:
        return rows
    text = "; all gradients have one factor per rank: does the norm for clipping differ?"
    number = rows.index(first)
    described = first._replace(reason=first.reason + text)
    return [*rows[:number], described, *rows[number + 1 :]]


def notes_on(
    axes: Axes,
    ranks: Sequence[RankRecord],
    single: RankRecord,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Return what a reader of the verdict must know besides."""
    notes: list[str] = []
    for name in equal_axes(ranks, axes):
        notes.append(f"Batches are equal along {name}, so its ranks count as replicas.")
    repeated, rows = repeated_rows(ranks, axes)
    if repeated:
        notes.append(
            f"WARNING: {repeated} of {rows} rows are read by several ranks. Is the data set divided, "
            "as by a DistributedSampler?"
        )
    dtypes = _Dtypes(ranks, dtype)
    lower = [str(dtype) for dtype in dtypes.seen if dtype not in dtypes.undeclared]
    if lower:
        notes.append(
            f"Bounds are those of {', '.join(sorted(lower))}, in which it computes or sends."
        )
    if all(loss is None for loss in single.losses):
        notes.append("The program returns no loss, so gradients and parameters alone are compared.")
    return notes


def mesh_text(axes: Axes) -> str:
    """Return the axes as the command takes them."""
    return ", ".join([f"{name}={size}" for name, size in axes.items()])


def _layouts(
    axes: Axes, ranks: Sequence[RankRecord], single: RankRecord, parts: Parts
) -> tuple[dict[str, Slices], list[CertificateRow]]:
    """Return the slices of each parameter that a run trains, in the order of the backward.

    Those that begin wrongly have rows instead.
    """
    names: dict[str, None] = {}  # a set in order
    trained: set[str] = set()
    for run in (single, *ranks):
        names.update(dict.fromkeys(run.start))
        trained |= run.start.keys() - run.frozen
    ordered = [
        name for name in names if name in trained and not _is_second_name(name, ranks, single)
    ]

    for pattern in parts:
        if not any(fnmatchcase(name, pattern) for name in ordered):
            raise ValueError(
                f"certify_program: parts must be of parameters; got {pattern!r}, which no name "
                "has. "
                f"Names are {', '.join(ordered)}."
            )
    _validate_rows_of_parts(parts, ordered, single)

    layouts: dict[str, Slices] = {}
    rows: list[CertificateRow] = []
    unknown: list[str] = []
    mesh = mesh_text(axes)
    for name in _in_backward_order(ordered, single.order):
        slices = slices_of(name, axes, ranks, single, parts)
        mistake = "" if slices else mistake_at_start(name, ranks, single)
        if slices:
            layouts[name] = slices
        elif mistake:
            reason = f"step 0: the parameter {mistake}"
            rows.append(CertificateRow(mesh, name, "DIVERGENT", inf, 0.0, reason, 0, "start"))
        else:
            unknown.append(name)
    if unknown:
        raise PromiseError(
            f"certify_program: on mesh {mesh} parameters must be shards of those in one process; got "
            f"other values, names or parts of {', '.join(unknown)}. Seed all ranks alike; declare the "
            'rows of parts that are divided each: parts={"*.qkv.weight": (q, k, v)}.'
        )
    return layouts, rows


def _validate_rows_of_parts(parts: Parts, names: Sequence[str], single: RankRecord) -> None:
    """Raise if declared parts are not all rows of a parameter."""
    for pattern, sizes in parts.items():
        for name in names:
            x = single.start.get(name)
            if x is None or not x.ndim or not fnmatchcase(name, pattern):
                continue
            if sum(sizes) != len(x):
                declared = ", ".join([str(size) for size in sizes])
                raise ValueError(
                    f"certify_program: parts of {pattern!r} must have all {len(x)} rows of {name}; "
                    f"got {declared}, which are {sum(sizes)}. Give the rows of each part."
                )


def _is_second_name(name: str, ranks: Sequence[RankRecord], single: RankRecord) -> bool:
    """Return True if a parameter is compared under another name in all runs."""
    first = single.tied.get(name)
    if first is None:
        return False
    return all(rank.tied.get(name) == first for rank in ranks if name in rank.start)


def _in_backward_order(names: Sequence[str], uses: Sequence[str]) -> list[str]:
    """Return names in the order in which gradients are done: that used last is first.

    Without uses it is the order of the model, reversed.
    """
    if not uses:
        return list(reversed(names))
    used = [name for name in reversed(uses) if name in names]
    return used + [name for name in names if name not in uses]


class _Dtypes:
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


class _RunPair(NamedTuple):
    """A run in processes with the one in a single process, and the layouts of its parameters."""

    axes: Axes
    ranks: Sequence[RankRecord]
    single: RankRecord
    layouts: Mapping[str, Slices]
    dtypes: _Dtypes

    def counts(self) -> dict[str, int]:
        """Return the numbers by which a mistake may multiply, by their names."""
        counts: dict[str, int] = {}
        sizes = {name: size for name, size in self.axes.items() if size > 1}
        for n in range(1, len(sizes) + 1):
            for names in combinations(sizes, n):
                counts[f"the size of {' x '.join(names)}"] = prod([sizes[name] for name in names])
        backwards = max([n for rank in self.ranks for n in rank.backwards], default=1)
        if backwards > 1:
            counts["the number of backward calls in a step"] = backwards
        return counts

    def comparisons(self) -> Iterator[Comparison]:
        """Compare the losses, gradients and changes of parameters of all steps."""
        loss_rule = _LossRule(self)
        for step in range(len(self.single.params)):
            yield from loss_rule.comparisons(step)
            largest_of_all = max(map(largest, self.single.grads[step].values()), default=0.0)
            for name, slices in self.layouts.items():
                yield from self._parameter(step, name, slices, largest_of_all)

    def _parameter(
        self, step: int, name: str, slices: Slices, largest_of_all: float
    ) -> Iterator[Comparison]:
        change = self._change(step, name, slices)
        gradient = self._gradient(step, name, slices, largest_of_all)
        given = self._given(step, name, slices, largest_of_all)

        if self.dtypes.of_gradients == torch.float64:
            gradient = _strict_for_multiples(gradient)
            given = _strict_for_multiples(given)
        if gradient is not None and not gradient.is_within_bound():
            is_given_right = (
                given is not None
                and given.is_within_bound()
                and self._is_given_everywhere(step, name, slices)
            )
            if is_given_right and change.is_within_bound():
                gradient = gradient._replace(shards=None, full=None, note=_DIVIDED_LATER)
            elif self._is_local(gradient):
                gradient, given = self._judged_as_local(gradient, given, change)
        for comparison in (gradient, given, change):
            if comparison is not None:
                yield comparison

    def _gradient(
        self, step: int, name: str, slices: Slices, largest_of_all: float
    ) -> Comparison | None:
        """Compare the gradients before `step()`; None if no run has one."""
        single_grads = self.single.grads[step]
        grads = {rank: self.ranks[rank].grads[step].get(name) for rank in slices}
        if name not in single_grads and all(x is None for x in grads.values()):
            return None
        # No gradient is one of 0.
        expected = single_grads.get(name, torch.zeros_like(self.single.start[name]))
        shards: dict[int, Tensor] = {}
        for rank, x in grads.items():
            shards[rank] = torch.zeros_like(self.ranks[rank].start[name]) if x is None else x
        comparison = self._compared(step, name, "gradient", shards, expected, largest_of_all)
        return comparison._replace(hint=self._kept_text(step, name, slices))

    def _kept_text(self, step: int, name: str, slices: Slices) -> str:
        """Describe ranks whose gradient was not 0 when a step began, as that of one process was."""
        if _has_kept(self.single, step, name):
            return ""
        ranks = [str(rank) for rank in slices if _has_kept(self.ranks[rank], step, name)]
        if not ranks:
            return ""
        return f"; it was not 0 when the step began on rank {', '.join(ranks)}"

    def _given(
        self, step: int, name: str, slices: Slices, largest_of_all: float
    ) -> Comparison | None:
        """Compare the gradients that optimizers were given, on the ranks that gave one."""
        if step >= len(self.single.given) or name not in self.single.given[step]:
            return None
        shards: dict[int, Tensor] = {}
        for rank in slices:
            if step < len(self.ranks[rank].given) and name in self.ranks[rank].given[step]:
                shards[rank] = self.ranks[rank].given[step][name]
        if not shards:
            return None
        expected = self.single.given[step][name]
        subject = "gradient that the optimizer is given"
        return self._compared(step, name, subject, shards, expected, largest_of_all)

    def _compared(
        self,
        step: int,
        name: str,
        subject: str,
        shards: Mapping[int, Tensor],
        expected: Tensor,
        largest_of_all: float,
    ) -> Comparison:
        dtype = self.dtypes.of_gradients
        bound = bound_of(expected, largest_of_all, dtype)
        rivals = dict(self.single.grads[step])
        if step > 0 and name in rivals and name in self.single.grads[step - 1]:
            both = rivals[name] + self.single.grads[step - 1][name]
            rivals["this step and the one before: set gradients to zero"] = both
        return Comparison(
            step,
            name,
            subject,
            _shards(shards, self.layouts[name]),
            expected,
            bound,
            rivals=rivals,
            tolerance=1e-6 + TOLERANCES[dtype],
        )

    def _change(self, step: int, name: str, slices: Slices) -> Comparison:
        """Compare the changes of a parameter since the start."""
        start = self.single.start[name]
        expected = self.single.params[step][name] - start
        changes: dict[int, Tensor] = {}
        for rank in slices:
            change = self.ranks[rank].params[step][name] - self.ranks[rank].start[name]
            is_noise = self._is_noise(step, name, rank)
            changes[rank] = torch.where(is_noise, slices[rank].of(expected), change)
        # Relative to the parameter: a small change has the errors of the large parameter.
        dtype = self.dtypes.of_changes
        bound = bound_of(self.single.params[step][name], 0.0, dtype)
        return Comparison(
            step,
            name,
            "change of the parameter",
            _shards(changes, self.layouts[name]),
            expected,
            bound,
            tolerance=1e-6 + TOLERANCES[dtype],
        )

    def _is_noise(self, step: int, name: str, rank: int) -> Tensor:
        """Return where a gradient was zero but for rounding in some step so far.

        Such a gradient, as that of a bias below a softmax, is another small number in each run, of
        which Adam makes a full step.
        """
        each = self.layouts[name][rank]
        noise = torch.zeros_like(self.ranks[rank].start[name], dtype=torch.bool)
        for i in range(step + 1):
            largest_of_all = max(map(largest, self.single.grads[i].values()), default=0.0)
            actual = self.ranks[rank].grads[i].get(name)
            expected = self.single.grads[i].get(name)
            if actual is None or expected is None:
                continue
            roundings = bound_of(None, largest_of_all, self.dtypes.of_gradients)
            expected = each.of(expected)
            is_small = (actual.abs() <= roundings) & (expected.abs() <= roundings)
            noise |= is_small & (actual != expected)
        return noise

    def _is_given_everywhere(self, step: int, name: str, slices: Slices) -> bool:
        """Return True if an optimizer of torch is given the gradient on each rank."""
        return all(
            step < len(self.ranks[rank].given) and name in self.ranks[rank].given[step]
            for rank in slices
        )

    def _judged_as_local(
        self, gradient: Comparison, given: Comparison | None, change: Comparison
    ) -> tuple[Comparison, Comparison | None]:
        """Describe the cause if ranks have their own gradients: they are not reduced.

        If `step()` reduces them, or parameters, the result of it is judged instead. Equal changes
        alone prove nothing: those of Adam hardly depend on the size of a gradient.
        """
        scale = self._scale_of_sum(gradient)
        if scale is None:
            return gradient, given
        is_sent = self._is_sent_in_step(gradient)
        is_given_local = given is not None and self._is_local(given)
        if not is_sent and (given is None or is_given_local):
            return gradient._replace(cause=self._unreduced_text(scale, gradient)), given

        if given is not None and is_given_local:
            is_reduced_later = gradient.leaf in self._reduced_later(gradient.step)
            given_scale = self._scale_of_sum(given)
            if is_reduced_later and change.is_within_bound():
                given = None
            elif given_scale is not None:
                given = given._replace(cause=self._unreduced_text(given_scale, given))
        # Its result is judged instead, later in the step.
        return gradient._replace(shards=None, full=None, note=_REDUCED_LATER), given

    def _is_sent_in_step(self, gradient: Comparison) -> bool:
        """Return True if `step()` sends as many elements as a gradient has, on all its ranks."""
        assert gradient.shards is not None
        by_rank = zip(gradient.shards.devices, gradient.shards.shards, strict=True)
        for rank, x in by_rank:
            sends = self.ranks[rank].sends_in_step
            if gradient.step >= len(sends) or sends[gradient.step] < max(x.numel(), 1):
                return False
        return True

    def _reduced_later(self, step: int) -> frozenset[str]:
        """Return the parameters that `step()` may reduce after optimizers have them, on any rank."""
        names: frozenset[str] = frozenset()
        for rank in self.ranks:
            if step < len(rank.reduced_later):
                names |= rank.reduced_later[step]
        return names

    def _groups(self, comparison: Comparison) -> list[tuple[int, list[Tensor]]]:
        """Return the shards of ranks that have the same elements, with the first rank of each."""
        assert comparison.shards is not None and comparison.full is not None
        by_rank = dict(zip(comparison.shards.devices, comparison.shards.shards, strict=True))
        numbers = torch.arange(comparison.full.numel()).reshape(comparison.full.shape)
        groups: dict[bytes, tuple[int, list[Tensor]]] = {}
        for rank, x in by_rank.items():
            elements = self.layouts[comparison.leaf][rank].of(numbers).numpy().tobytes()
            _, members = groups.setdefault(elements, (rank, []))
            members.append(x)
        return list(groups.values())

    def _is_local(self, comparison: Comparison) -> bool:
        """Return True if ranks that have the same elements have other values, beyond rounding."""
        if comparison.is_within_bound():
            return False
        for _, members in self._groups(comparison):
            if not all(_is_near(members[0], x, comparison.bound) for x in members):
                return True
        return False

    def _scale_of_sum(self, gradient: Comparison) -> float | None:
        """Return what the gradient of one process is of the sum of those of ranks.

        It is one over a number of ranks, as for a mean, or 1; None if it is none.
        """
        assert gradient.full is not None
        scales = {1.0 / n for n in (1, *self.counts().values())}
        for rank, members in self._groups(gradient):
            total = torch.stack(members).sum(0)
            expected = self.layouts[gradient.leaf][rank].of(gradient.full)
            scales = {s for s in scales if _is_near(s * total, expected, gradient.bound)}
        return min(scales, default=None)

    def _unreduced_text(self, scale: float, gradient: Comparison) -> str:
        """Describe gradients of which a multiple of the sum over ranks is right."""
        axes = self._axes_of_differences(gradient)
        what = self._operations_text(scale, axes, gradient)
        if not what:
            what = f"sum times {number_text(scale, 1e-9)} over ranks"
        along = " and ".join(axes)
        return (
            f"differs along {along}, where the {what} is that of one process: it is not reduced "
            f"along {along}{self.ranks[0].sync_hint}"
        )

    def _operations_text(self, scale: float, axes: Sequence[str], gradient: Comparison) -> str:
        """Return the axes of a mean and those of a sum that make a gradient; "" if none do.

        Ranks along other axes have equal gradients, so the sum over all counts each several times.
        """
        members = max(len(members) for _, members in self._groups(gradient))
        scale *= members / prod([self.axes[name] for name in axes])
        by_data = sorted(axes, key=lambda name: name not in DATA_AXES)
        for n in range(len(axes) + 1):
            for means in combinations(by_data, n):
                if abs(scale * prod([self.axes[name] for name in means]) - 1) > 1e-9:
                    continue
                sums = [name for name in axes if name not in means]
                texts: list[str] = []
                if means:
                    texts.append(f"mean over {' and '.join(means)}")
                if sums:
                    texts.append(f"sum over {' and '.join(sums)}")
                return " and the ".join(texts)
        return ""

    def _axes_of_differences(self, comparison: Comparison) -> list[str]:
        """Return the axes along which ranks that have the same elements have other values."""
        assert comparison.shards is not None
        by_rank = dict(zip(comparison.shards.devices, comparison.shards.shards, strict=True))
        slices = self.layouts[comparison.leaf]
        coordinates = coordinates_of(self.axes)
        names: list[str] = []
        for number, name in enumerate(self.axes):
            for rank, other in combinations(by_rank, 2):
                steps = [i != j for i, j in zip(coordinates[rank], coordinates[other], strict=True)]
                is_along = [i for i, is_step in enumerate(steps) if is_step] == [number]
                is_same_slice = is_along and slices[rank].is_equal(slices[other])
                if is_same_slice and not _is_near(by_rank[rank], by_rank[other], comparison.bound):
                    names.append(name)
                    break
        return names


_DIVIDED_LATER = "step() changes gradients; what the optimizer is given agrees"
_REDUCED_LATER = "gradients are reduced in step(), after which the runs are compared"


def _strict_for_multiples(gradient: Comparison | None) -> Comparison | None:
    """Take the bound from a gradient as small as rounding that is a multiple of the right one.

    Rounding makes no multiples.
    """
    if gradient is None or gradient.shards is None or gradient.full is None:
        return gradient
    x = gradient.shards.flattened()
    full = gradient.full
    is_comparable = full.numel() > 1 and bool(full.any()) and bool(x.any())
    if not is_comparable or not gradient.is_within_bound():
        return gradient
    factor = constant_factor(x, gradient.shards.same_elements_of(full), gradient.tolerance)
    return gradient if factor is None else gradient._replace(bound=0.0)


def _has_kept(record: RankRecord, step: int, name: str) -> bool:
    return step < len(record.kept) and name in record.kept[step]


def _is_near(x: Tensor, y: Tensor, bound: float) -> bool:
    return bool(((x - y).abs() <= bound).all())


def _shards(parts: Mapping[int, Tensor], slices: Slices) -> Shards:
    """Return the tensors of some ranks as shards of a full one."""

    def cut(full: Tensor) -> list[Tensor]:
        return [slices[rank].of(full) for rank in parts]

    return Shards(list(parts.values()), list(parts), cut)


# -- the loss --------------------------------------------------------------------------------------


class _LossRule:
    """The number of the losses of ranks that is the loss of one process.

    It is a mean or a sum of shares: the first that agrees in the first step, else the mean by rows.
    """

    def __init__(self, run: _RunPair) -> None:
        self._run = run
        steps = range(len(run.single.losses))
        # By the first step: later ones differ if a gradient is wrong.
        self._losses: list[dict[int, float]] = []
        for step in steps:
            losses = {rank: x.losses[step] for rank, x in enumerate(run.ranks)}
            self._losses.append({rank: x for rank, x in losses.items() if x is not None})
        self._values = [self._mean_by_rows(step) for step in steps]
        self._note = ""
        if self._agrees(self._values):
            return

        means = [self._mean(step) for step in steps]
        candidates = {"the mean of the losses of ranks, whatever their rows": means}
        for name, n in run.counts().items():
            if "size" in name:
                shares = [None if x is None else x * n for x in means]
                candidates[f"each rank returns a share of the loss: 1 / {name}"] = shares
        for note, values in candidates.items():
            if self._agrees(values):
                self._note = note
                self._values = values
                return

    def _mean_by_rows(self, step: int) -> float | None:
        losses = self._losses[step]
        rows = {rank: rows_at(self._run.ranks[rank], step) for rank in losses}
        if not sum(rows.values()):
            return None
        return sum([losses[rank] * rows[rank] for rank in losses]) / sum(rows.values())

    def _mean(self, step: int) -> float | None:
        losses = self._losses[step]
        return sum(losses.values()) / len(losses) if losses else None

    def _agrees(self, values: Sequence[float | None]) -> bool:
        return all(comparison.is_within_bound() for comparison in self._compared(0, values[0]))

    def comparisons(self, step: int) -> Iterator[Comparison]:
        """Compare the loss of a step, if a run has one."""
        return self._compared(step, self._values[step])

    def _compared(self, step: int, value: float | None) -> Iterator[Comparison]:
        single = self._run.single.losses[step]
        if value is None and single is None:
            return
        shards = None if value is None else Shards([_scalar(value)], [0], lambda x: [x])
        expected = None if single is None else _scalar(single)
        dtype = self._run.dtypes.of_gradients
        bound = bound_of(expected, 0.0, dtype)
        tolerance = 1e-6 + TOLERANCES[dtype]
        yield Comparison(
            step,
            "loss",
            "loss",
            shards,
            expected,
            bound,
            hint=self._hint(step, value, single),
            note=self._note,
            tolerance=tolerance,
        )

    def _hint(self, step: int, value: float | None, single: float | None) -> str:
        """Return the cause, if the mean of the losses by tokens of each rank is the right one."""
        losses = self._losses[step]
        if value is None or single is None or not losses:
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


def _scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)
