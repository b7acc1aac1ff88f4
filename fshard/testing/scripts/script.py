"""`certify_script`: a training script as torchrun runs it, without an edit, and in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import inf, isclose, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import PromiseError
from fshard.launching.pool import Processes
from fshard.testing.certificate import Certificate, CertificateRow
from fshard.testing.programs.batches import Axes
from fshard.testing.programs.certify import PRELOADED, validate_axes
from fshard.testing.programs.compare import judge_ranks, mesh_text, notes_on
from fshard.testing.programs.layouts import Parts
from fshard.testing.programs.microbatches import rows_of_microbatches
from fshard.testing.programs.record import RankRecord
from fshard.testing.scripts.joining import Joining
from fshard.testing.scripts.run import (
    Script,
    ScriptError,
    ScriptRecord,
    run_alone,
    run_in_processes,
)
from fshard.testing.scripts.watch import Options, Start
from fshard.torch_collectives import Recording

UNSEEN = (
    "The script ran on CPUs over gloo, in float64, without mixed precision, dropout and "
    "torch.compile, with the learning rates of the processes. It does not see: other batches and "
    "later steps, buffers such as BatchNorm's, random draws, an error that one process makes too, "
    "and processes that load equal batches along an axis, which count as one."
)


def certify_script(
    path: str | Path,
    meshes: Axes | Sequence[Axes],
    args: Sequence[str] = (),
    *,
    steps: int = 2,
    alone: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    splits: Mapping[str, int] | None = None,
    parts: Parts | None = None,
    same: Sequence[str] = (),
    record: str | Path | None = None,
    timeout: float = 180.0,
) -> Certificate:
    """Run a training script in gloo processes, as torchrun does, and in one, and compare the runs.

    The script is not edited. Its batches are those of its DataLoader, or the arguments of its model
    and loss; its steps those of optimizers of torch.

    Args:
        path: of the script.
        meshes: axes and sizes, such as {"data": 2, "model": 2}; one or several.
        args: of the script.
        steps: after this number of steps of the first optimizer the script ends.
        alone: the arguments in one process, where they are others, as `--tp 1`.
        dtype: see `certify_program`, as for `splits` and `parts`.
        splits: the dim of batches that is split along an axis.
        parts: the rows of each part of a parameter.
        same: the axes along which equal batches are meant.
        record: a file for the collectives of the steps, which `fshard explore` shows. It is for one
            mesh.
        timeout: seconds that the processes of a mesh may take.

    While it runs, GPUs are the CPU and NCCL is gloo, float32 and mixed precision are float64,
    dropout is off, torch.compile does nothing, and loaders have no processes.

        print(fs.testing.certify_script("train.py", {"data": 2}, ["--layers", "2"]))
    """
    meshes = [meshes] if isinstance(meshes, Mapping) else list(meshes)
    file = Path(path).resolve()
    if not meshes or steps < 1 or not file.is_file():
        raise ValueError(
            f"certify_script: a file, a mesh and steps >= 1 are needed; got {path}, {meshes}, "
            f"{steps=}."
        )
    if record is not None and len(meshes) > 1:
        raise ValueError(f"certify_script: record must be of one mesh; got {len(meshes)} meshes.")
    validate_axes("certify_script", meshes, splits or {}, same)
    # A process that waits in vain, since another has left a step out, ends before all are late.
    patience = timeout / 2
    script = Script(str(file), tuple(args), str(Path.cwd()), steps, patience, record is not None)
    script_alone = script if alone is None else script._replace(arguments=tuple(alone))
    rows: list[CertificateRow] = []
    notes: list[str] = []
    numbers: list[int] = []
    for axes in meshes:
        runs = _ScriptRuns(script, script_alone, Joining(axes, splits or {}), timeout)
        ranks = runs.in_processes()
        if record is not None:
            words = " ".join([file.name, *args])
            Recording(words, [each.calls for each in ranks], axes).save(record)
        found = runs.verdict(ranks, dtype, parts, same)
        rows += found.rows
        numbers.append(found.steps)
        prefix = f"{mesh_text(axes)}: " if len(meshes) > 1 else ""
        notes += [prefix + note for note in found.notes]
    title = f"{file.name}: processes against one process"
    return Certificate(tuple(rows), min(numbers), title, UNSEEN, "mesh", tuple(notes))


class _Verdict(NamedTuple):
    """Rows, notes, and the number of steps that were judged."""

    rows: list[CertificateRow]
    notes: list[str]
    steps: int


class _ScriptRuns(NamedTuple):
    """The runs of a script on one mesh."""

    script: Script
    script_alone: Script
    joining: Joining
    timeout: float

    def in_processes(self) -> list[ScriptRecord]:
        """Run a script in the processes of a mesh."""
        with self._processes(prod(self.joining.axes.values())) as pool:
            return _outcomes(pool, run_in_processes, self.script)

    def verdict(
        self,
        ranks: Sequence[ScriptRecord],
        dtype: torch.dtype | None,
        parts: Parts | None,
        same: Sequence[str],
    ) -> _Verdict:
        """Run a script in one process, and judge the run in the processes of a mesh."""
        axes = self.joining.axes
        mesh = mesh_text(axes)
        numbers = [len(each.rank.steps) for each in ranks]
        if not any(numbers):
            raise PromiseError(
                f"certify: {self.script.name} must step an optimizer of torch.optim; got no step. "
                "Give its model, loss, batch and step to the other form, fshard certify FILE:NAME."
            )
        if len(set(numbers)) > 1:
            text = f"the ranks have made {numbers} steps of optimizers"
            for rank, each in enumerate(ranks):
                if each.ended_by:
                    text += f"; rank {rank}, which others have left, ended by: {each.ended_by}"
            return _Verdict([_row(mesh, "steps", text)], [], 0)

        single, takes_more = self._single(ranks)
        different = _rows_of_starts(mesh, ranks, single)
        if different:
            return _Verdict(different, [], 0)

        # The one process may have ended earlier: then its steps alone are judged.
        number = len(single.rank.steps)
        records = [_first_steps(each.rank, number) for each in ranks]
        rows = judge_ranks(axes, records, single.rank, dtype, parts, same)
        if not takes_more:
            rows = rows_of_microbatches(mesh, records, single.rank, rows)
        rows += _rows_of_kept_gradients(mesh, single.rank)
        if number < numbers[0]:
            rows.append(_row_of_unjudged(mesh, number, single.ended_by))

        notes = notes_on(axes, records, single.rank, dtype)
        notes += _notes_on_options(ranks, single)
        if ranks[0].steps < self.script.steps:
            notes.append(f"The script ended after {ranks[0].steps} of {self.script.steps} steps.")
        return _Verdict(rows, notes, min(single.steps, ranks[0].steps))

    def _single(self, ranks: Sequence[ScriptRecord]) -> tuple[ScriptRecord, bool]:
        """Run the script in one process; return also if a step takes more batches there."""
        start = _start_of(ranks, self.joining.axes)
        single, repeated = self._alone(ranks, start, self.joining)
        takes_more = not single.counts or single.counts[0] > ranks[0].counts[0]
        if takes_more:
            single, repeated = self._in_turn(ranks, start, single)
        _validate(self.script.name, single, repeated, ranks)
        return single, takes_more

    def _in_turn(
        self, ranks: Sequence[ScriptRecord], start: Start, single: ScriptRecord
    ) -> tuple[ScriptRecord, ScriptRecord]:
        """Run the script alone, with more microbatches in a step than each of the processes takes."""
        taken = ranks[0].counts[0]
        turn = max(1, taken // max(1, ranks[0].rank.steps[0].backwards))
        in_turn = self.joining._replace(turn=turn, repeats=_takes(single, taken, len(ranks)))
        runs = self._alone(ranks, start, in_turn)
        has_ended = len(runs[0].rank.steps) < len(ranks[0].rank.steps)
        if not in_turn.repeats and has_ended:
            runs = self._alone(ranks, start, in_turn._replace(repeats=True))
        return runs

    def _processes(self, n: int) -> Processes:
        return Processes(n, timeout=self.timeout, preload=PRELOADED)

    def _alone(
        self, ranks: Sequence[ScriptRecord], start: Start, joining: Joining
    ) -> tuple[ScriptRecord, ScriptRecord]:
        """Run the script in one process; twice beside each other, with other seeds."""
        replayed = joining.joined([each.batches for each in ranks])
        with self._processes(2) as pool:
            first, second = _outcomes(pool, run_alone, self.script_alone, replayed, start)
        return first, second


def _outcomes(pool: Processes, fn: Any, *args: Any) -> list[ScriptRecord]:
    """Run in the processes of a pool; raise the error of the script as one line."""
    try:
        return pool.run_last(fn, *args)
    except ScriptError as error:
        failure = PromiseError(f"certify: {error}")
        for note in error.__notes__[:1]:
            failure.add_note(note)
        raise failure from None


def _start_of(ranks: Sequence[ScriptRecord], axes: Axes) -> Start:
    """Return what the one process begins with."""
    names: dict[str, None] = {}
    for each in ranks:
        names.update(dict.fromkeys(each.rank.start))
    params: dict[str, list[Tensor]] = {}
    for name in names:
        values = [each.rank.start[name] for each in ranks if name in each.rank.start]
        params[name] = [values[0]]
        have_all = len(values) == len(ranks)
        if have_all and any(not _is_same(values[0], x) for x in values):
            params[name] += full_candidates(values, axes)

    for each in ranks:
        for name, x in each.buffers.items():
            params.setdefault(name, [x])
    return Start(params, ranks[0].options)


def full_candidates(parts: Sequence[Tensor], axes: Axes) -> list[Tensor]:
    """Return the full tensors of which the ranks may have parts, along one axis of the mesh."""
    numbers = torch.arange(len(parts)).reshape(*axes.values())
    candidates: list[Tensor] = []
    for axis, dim in product(range(len(axes)), range(parts[0].ndim)):
        lines = (
            numbers.movedim(axis, -1).flatten(0, -2).tolist()
            if len(axes) > 1
            else [numbers.tolist()]
        )
        fulls: list[Tensor] = []
        for line in lines:
            shapes = {x.shape[:dim] + x.shape[dim + 1 :] for x in [parts[rank] for rank in line]}
            if len(shapes) == 1:
                fulls.append(torch.cat([parts[rank] for rank in line], dim))
        if len(fulls) == len(lines) and all(_is_same(fulls[0], x) for x in fulls):
            candidates.append(fulls[0])
    return candidates


def _is_same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x, y)


def _takes(single: ScriptRecord, taken: int, n: int) -> bool:
    """Return True if a step in one process has as many batches as n steps that take some each."""
    return bool(single.counts) and single.counts[0] == n * taken


def _first_steps(record: RankRecord, number: int) -> RankRecord:
    return record._replace(batches=record.batches[:number], steps=record.steps[:number])


def _validate(
    name: str, single: ScriptRecord, repeated: ScriptRecord, ranks: Sequence[ScriptRecord]
) -> None:
    """Raise if the run in one process is no measure for the others."""
    number = len(single.rank.steps)
    expected = len(ranks[0].rank.steps)
    if number > expected or (number < expected and not single.ended_by):
        raise PromiseError(
            f"certify: {name} must make as many steps in one process as in {len(ranks)}; got {number} "
            f"and {expected} with the same batches. Give the arguments of one process by --alone."
        )
    losses = [step.loss for step in single.rank.steps]
    repeated_losses = [step.loss for step in repeated.rank.steps]
    if losses != repeated_losses:
        raise PromiseError(
            f"certify: {name} must draw nothing in its steps; got other losses with other seeds: "
            f"{losses} and {repeated_losses}. Batches by a DataLoader and dropout "
            "of torch are taken care of; leave out other draws, as noise."
        )


def _row(mesh: str, leaf: str, reason: str) -> CertificateRow:
    return CertificateRow(mesh, leaf, "DIVERGENT", inf, 0.0, reason, 0)


def _rows_of_starts(
    mesh: str, ranks: Sequence[ScriptRecord], single: ScriptRecord
) -> list[CertificateRow]:
    """Return a row for each replicated parameter that begins differently on ranks."""
    rows: list[CertificateRow] = []
    for name, full in single.rank.start.items():
        values = {
            rank: each.rank.start[name]
            for rank, each in enumerate(ranks)
            if name in each.rank.start and each.rank.start[name].shape == full.shape
        }
        first = next(iter(values), 0)
        others = [rank for rank, x in values.items() if not torch.equal(x, values[first])]
        if others:
            text = (
                f"the parameter begins differently on ranks {first} and {others[0]}: broadcast it"
            )
            rows.append(_row(mesh, name, text))
    return rows


def _row_of_unjudged(mesh: str, step: int, error: str) -> CertificateRow:
    """Return the row of the first step that the one process did not reach."""
    text = (
        f"step {step} is not judged: {error}. Give the arguments of one process by --alone, or the "
        "model, loss, batch and step to the other form, fshard certify FILE:NAME"
    )
    return CertificateRow(mesh, "steps", "INCONCLUSIVE", inf, 0.0, text, step, "steps")


def _notes_on_options(ranks: Sequence[ScriptRecord], single: ScriptRecord) -> list[str]:
    """Return notes on learning rates and other options that depend on the rank, or on their number."""
    notes: list[str] = []
    for rank, each in enumerate(ranks):
        difference = _first_difference(ranks[0].options, each.options)
        if difference is not None:
            option, step, value, other = difference
            notes.append(
                f"WARNING: the {option} differs between ranks: at step {step} {value} on rank 0 and "
                f"{other} on rank {rank}; the one process takes those of rank 0."
            )
            break
    difference = _first_difference(ranks[0].options, single.own_options)
    if difference is not None:
        option, step, value, own = difference
        notes.append(
            f"The {option} depends on the number of processes: at step {step} it is {value} in "
            f"{len(ranks)}, and the script sets {own} in one, which takes {value} here."
        )
    return notes


def _first_difference(
    runs: Sequence[Options], others: Sequence[Options]
) -> tuple[str, int, str, str] | None:
    """Return an option that differs, the first step in which it does, and both of its values.

    The learning rate is tried first: it causes what schedules note of themselves, as `initial_lr`.
    """
    names = {"lr": None}  # a set in order
    for groups in runs:
        for group in groups:
            names.update(dict.fromkeys(group))
    for name in names:
        for step, (groups, other_groups) in enumerate(zip(runs, others, strict=False)):
            for group, other in zip(groups, other_groups, strict=False):
                pairs = zip(group.get(name, ()), other.get(name, ()), strict=False)
                if not all(isclose(x, y) for x, y in pairs):
                    option = "learning rate" if name == "lr" else f"option {name}"
                    return option, step, _numbers_text(group[name]), _numbers_text(other[name])
    return None


def _numbers_text(numbers: Sequence[float]) -> str:
    return ", ".join([f"{x:.6g}" for x in numbers])


def _rows_of_kept_gradients(mesh: str, single: RankRecord) -> list[CertificateRow]:
    """Return a row if a step begins with the gradients of the one before, in all runs."""
    for step, record in enumerate(single.steps):
        if record.kept:
            name = next(name for name in single.start if name in record.kept)
            text = (
                f"step {step}: the gradient of {name} was not 0 when the step began, in the one "
                "process too: call zero_grad() in each step"
            )
            if "set_requires_gradient_sync" in single.sync_hint:
                text = f"step {step}: gradients of a step before are left{single.sync_hint}"
            return [_row(mesh, "gradients", text)._replace(step=step)]
    return []
