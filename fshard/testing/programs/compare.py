"""The comparison of a run in processes with one in a single process, in the order of time.

loss ─> gradients, those of the last layer first ─> what optimizers are given ─> changes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import inf

import torch
from torch import Tensor

from fshard.errors import PromiseError
from fshard.rounding import TOLERANCES, bound_of, largest
from fshard.testing.certificate import WARNING, CertificateRow
from fshard.testing.programs.batches import (
    Axes,
    equal_axes,
    repeated_rows,
)
from fshard.testing.programs.causes import factors_of_shards_text, regulariser_text, rows_text
from fshard.testing.programs.layouts import Parts, Slices, mistake_at_start, slices_of
from fshard.testing.programs.losses import LossRule
from fshard.testing.programs.pair import Dtypes, RunPair
from fshard.testing.programs.record import RankRecord
from fshard.testing.programs.unreduced import DATA_AXES, is_local, judged_as_local
from fshard.testing.verdicts import (
    SOME_TIMES,
    Comparison,
    Shards,
    constant_factor,
    judge,
)


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
    run = RunPair(axes, ranks, single, layouts, Dtypes(ranks, dtype))
    rows = judge(_comparisons(run), mesh, run.counts(), "rank")
    rows = _with_common_cause(rows)
    return [*_rows_of_equal_batches(axes, ranks, same), *run.dtypes.rows(mesh), *start_rows, *rows]


def _rows_of_equal_batches(
    axes: Axes, ranks: Sequence[RankRecord], same: Sequence[str]
) -> list[CertificateRow]:
    """Return a row for each axis of data along which batches are equal, unless that is meant."""
    rows: list[CertificateRow] = []
    mesh = mesh_text(axes)
    for name in equal_axes([rank.batches for rank in ranks], axes):
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
    for name in equal_axes([rank.batches for rank in ranks], axes):
        notes.append(f"Batches are equal along {name}, so its ranks count as replicas.")
    repeated, rows = repeated_rows(ranks, axes)
    if repeated:
        notes.append(
            f"{WARNING}: {repeated} of {rows} rows are read by several ranks. Is the data set "
            "divided, as by a DistributedSampler?"
        )
    dtypes = Dtypes(ranks, dtype)
    lower = [str(dtype) for dtype in dtypes.seen if dtype not in dtypes.undeclared]
    if lower:
        notes.append(
            f"Bounds are those of {', '.join(sorted(lower))}, in which it computes or sends."
        )
    if all(step.loss is None for step in single.steps):
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


# -- comparisons ------------------------------------------------------------------------------------

_DIVIDED_LATER = "step() changes gradients; what the optimizer is given agrees"


def _comparisons(run: RunPair) -> Iterator[Comparison]:
    """Compare the losses, gradients and changes of parameters of all steps."""
    loss_rule = LossRule(run)
    for step in range(len(run.single.steps)):
        yield from loss_rule.comparisons(step)
        largest_of_all = max(map(largest, run.single.steps[step].grads.values()), default=0.0)
        for name, slices in run.layouts.items():
            yield from _parameter(run, step, name, slices, largest_of_all)


def _parameter(
    run: RunPair, step: int, name: str, slices: Slices, largest_of_all: float
) -> Iterator[Comparison]:
    change = _change(run, step, name, slices)
    gradient = _gradient(run, step, name, slices, largest_of_all)
    given = _given(run, step, name, slices, largest_of_all)

    if run.dtypes.of_gradients == torch.float64:
        gradient = _strict_for_multiples(gradient)
        given = _strict_for_multiples(given)
    if gradient is not None and not gradient.is_within_bound():
        is_given_right = (
            given is not None
            and given.is_within_bound()
            and _is_given_everywhere(run, step, name, slices)
        )
        if is_given_right and change.is_within_bound():
            gradient = gradient._replace(shards=None, full=None, note=_DIVIDED_LATER)
        elif is_local(run, gradient):
            gradient, given = judged_as_local(run, gradient, given, change)
    elif given is not None and not given.is_within_bound():
        given = given._replace(cause=factors_of_shards_text(run, given))
    for comparison in (gradient, given, change):
        if comparison is not None:
            yield comparison


def _gradient(
    run: RunPair, step: int, name: str, slices: Slices, largest_of_all: float
) -> Comparison | None:
    """Compare the gradients before `step()`; None if no run has one."""
    single_grads = run.single.steps[step].grads
    grads = {rank: run.ranks[rank].steps[step].grads.get(name) for rank in slices}
    if name not in single_grads and all(x is None for x in grads.values()):
        return None
    # No gradient is one of 0.
    expected = single_grads.get(name, torch.zeros_like(run.single.start[name]))
    shards: dict[int, Tensor] = {}
    for rank, x in grads.items():
        shards[rank] = torch.zeros_like(run.ranks[rank].start[name]) if x is None else x
    comparison = _compared(run, step, name, "gradient", shards, expected, largest_of_all)
    hint = _kept_text(run, step, name, slices)
    hint += regulariser_text(run, comparison)
    hint += rows_text(run, step)
    return comparison._replace(hint=hint)


def _kept_text(run: RunPair, step: int, name: str, slices: Slices) -> str:
    """Describe ranks whose gradient was not 0 when a step began, as that of one process was."""
    if name in run.single.steps[step].kept:
        return ""
    ranks = [str(rank) for rank in slices if name in run.ranks[rank].steps[step].kept]
    if not ranks:
        return ""
    return f"; it was not 0 when the step began on rank {', '.join(ranks)}"


def _given(
    run: RunPair, step: int, name: str, slices: Slices, largest_of_all: float
) -> Comparison | None:
    """Compare the gradients that optimizers were given, on the ranks that gave one."""
    if name not in run.single.steps[step].given:
        return None
    shards: dict[int, Tensor] = {}
    for rank in slices:
        if name in run.ranks[rank].steps[step].given:
            shards[rank] = run.ranks[rank].steps[step].given[name]
    if not shards:
        return None
    expected = run.single.steps[step].given[name]
    subject = "gradient that the optimizer is given"
    return _compared(run, step, name, subject, shards, expected, largest_of_all)


def _compared(
    run: RunPair,
    step: int,
    name: str,
    subject: str,
    shards: Mapping[int, Tensor],
    expected: Tensor,
    largest_of_all: float,
) -> Comparison:
    dtype = run.dtypes.of_gradients
    bound = bound_of(expected, largest_of_all, dtype)
    rivals = dict(run.single.steps[step].grads)
    if step > 0 and name in rivals and name in run.single.steps[step - 1].grads:
        both = rivals[name] + run.single.steps[step - 1].grads[name]
        rivals["this step and the one before: set gradients to zero"] = both
    return Comparison(
        step,
        name,
        subject,
        _shards(shards, run.layouts[name]),
        expected,
        bound,
        rivals=rivals,
        tolerance=1e-6 + TOLERANCES[dtype],
    )


def _change(run: RunPair, step: int, name: str, slices: Slices) -> Comparison:
    """Compare the changes of a parameter since the start."""
    start = run.single.start[name]
    expected = run.single.steps[step].params[name] - start
    changes: dict[int, Tensor] = {}
    for rank in slices:
        change = run.ranks[rank].steps[step].params[name] - run.ranks[rank].start[name]
        is_noise = _is_noise(run, step, name, rank)
        changes[rank] = torch.where(is_noise, slices[rank].of(expected), change)
    # Relative to the parameter: a small change has the errors of the large parameter.
    dtype = run.dtypes.of_changes
    bound = bound_of(run.single.steps[step].params[name], 0.0, dtype)
    return Comparison(
        step,
        name,
        "change of the parameter",
        _shards(changes, run.layouts[name]),
        expected,
        bound,
        tolerance=1e-6 + TOLERANCES[dtype],
    )


def _is_noise(run: RunPair, step: int, name: str, rank: int) -> Tensor:
    """Return where a gradient was zero but for rounding in some step so far.

    Such a gradient, as that of a bias below a softmax, is another small number in each run, of
    which Adam makes a full step.
    """
    each = run.layouts[name][rank]
    noise = torch.zeros_like(run.ranks[rank].start[name], dtype=torch.bool)
    for i in range(step + 1):
        largest_of_all = max(map(largest, run.single.steps[i].grads.values()), default=0.0)
        actual = run.ranks[rank].steps[i].grads.get(name)
        expected = run.single.steps[i].grads.get(name)
        if actual is None or expected is None:
            continue
        roundings = bound_of(None, largest_of_all, run.dtypes.of_gradients)
        expected = each.of(expected)
        is_small = (actual.abs() <= roundings) & (expected.abs() <= roundings)
        noise |= is_small & (actual != expected)
    return noise


def _is_given_everywhere(run: RunPair, step: int, name: str, slices: Slices) -> bool:
    """Return True if an optimizer of torch is given the gradient on each rank."""
    return all(name in run.ranks[rank].steps[step].given for rank in slices)


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


def _shards(parts: Mapping[int, Tensor], slices: Slices) -> Shards:
    """Return the tensors of some ranks as shards of a full one."""

    def cut(full: Tensor) -> list[Tensor]:
        return [slices[rank].of(full) for rank in parts]

    return Shards(list(parts.values()), list(parts), cut)
