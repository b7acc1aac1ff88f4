"""`audit`: a training step that repeats itself in another layout, every few steps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fshard.auditing.compare import Difference
from fshard.auditing.diagnosis import (
    UNREPEATABLE,
    Finding,
    device_name,
    differences_of_all,
    faults_of_all,
    persistent,
    transient,
)
from fshard.auditing.folder import AuditFacts, save_step
from fshard.auditing.layouts import OtherLayout, layout_errors, other_step
from fshard.auditing.meeting import is_any
from fshard.auditing.replicas import UnequalReplicas, described, table_of, unequal_replicas
from fshard.auditing.runs import KINDS, AuditTrial, Run, Twin, run_recorded
from fshard.errors import AuditError
from fshard.mesh.collectives.ledger import uncounted
from fshard.mesh.layout import Mesh, PyTree
from fshard.optim.sharded.layouts import Stage
from fshard.randomness import random_state
from fshard.source import call_site
from fshard.transforms.train_step import TrainStep

OnDifference = Literal["raise", "warn"]

REPLICAS = "replicas"
"""The phase of a finding of replicas that differ."""

CAUSES = (
    "Causes may be a wrong reduction; statistics of a device's batch, as of BatchNorm without "
    "sync_batchnorm; what depends on the number of devices; and random numbers, as for dropout, "
    "which are equal in another layout only with reproducible=True"
)
"""The end of a disagreement up to rounding."""


def audit(
    step: TrainStep,
    *,
    every: int = 1000,
    mesh: Mesh | None = None,
    stage: Stage | None = None,
    folder: str | os.PathLike[str] = "audits",
    on_difference: OnDifference = "raise",
    digest: bool = False,
    program: str | None = None,
    **options: Any,
) -> AuditedStep:
    """Return a step that repeats itself in another layout every `every` steps, and compares.

    It is called as `step` is, by all processes, and returns what that returns. The n-th call is
    audited if n is a multiple of `every`; the first is one only with every=1. In an audited call
    the arguments are kept, as copies; the step runs; then it runs again from the kept ones in the
    other layout. Gradients, parameters, state, buffers and metrics must be equal: in bits if both
    steps are `reproducible`, else up to rounding, by the bounds of `fs.testing.certify`; then the
    second update takes the gradients of the first, and both gradients are compared.

    A difference names the step, the device, the leaf, the element and the phase: both runs are
    repeated, and digests of all that devices compute, send and receive show where a run first
    differed from its repetition, or the layouts from each other. The arguments are saved in
    `folder`; `fshard replay` and `fs.replay` repeat that step alone.

    An exception in the second run, such as a lack of memory, is raised, whatever `on_difference`:
    on processes the others may wait. It has a note that the step itself had succeeded, and its
    results are in `results` of the audited step.

    What it does not see: what happened before the arguments were kept, such as a bit that flipped
    in a step without an audit (but see `digest`), and what is wrong in both layouts alike.

    Args:
        step: of `fs.train_step`.
        every: audit each call whose number is a multiple of this.
        mesh: another mesh with the same axes: of another size, of fewer devices, or of the same
            ones in another order. None: that of the step.
        stage: another stage of ZeRO. Parameters move too, between 3 and the others.
        folder: for the arguments of a step that differs: `folder/step-12`.
        on_difference: "raise" an AuditError, on all processes, or "warn" and go on.
        digest: compare what several devices hold after each step, too: parameters, state and
            buffers. It costs a psum of 8 bytes, and a digest of what is replicated.
        program: "FILE:FUNCTION", which the folder keeps for `fshard replay`: see `fs.replay`.
        options: those of `train_step` that the other step has instead: another schedule, bucket...
            Without mesh, stage and options it repeats the step as it is, which finds what does not
            happen twice.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh, half = fs.make_mesh({"data": 4}), fs.make_mesh({"data": 2})
    >>> params = fs.shard_params({"w": torch.ones(3)}, fs.fsdp("data"), mesh=mesh)
    >>> opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=3)
    >>> def loss_fn(params, x):
    ...     return (params["w"] * x).sum(1).square().mean()
    >>> step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), reproducible=True)
    >>> step = audit(step, every=2, mesh=half, stage=1)
    >>> state = step.init(params)
    >>> for _ in range(4):
    ...     params, state, metrics = step(params, state, torch.ones(8, 3))
    >>> print(step.last.text)
    step 4: data=4, ZeRO 3 against data=2, ZeRO 1: equal bits
    >>> step.audits
    2
    """
    errors: list[str] = []
    if not isinstance(step, TrainStep):  # pyright: ignore[reportUnnecessaryIsInstance]
        errors.append(
            f"step must be a step of fs.train_step; got {type(step).__name__}. Of a boosted loop, "
            "which cannot be repeated, fs.Booster(plugin, digest=True) compares replicas after "
            "each step"
        )
    if type(every) is not int or every < 1:
        errors.append(f"every must be an integer >= 1; got {every!r}")
    if on_difference not in ("raise", "warn"):
        errors.append(f'on_difference must be "raise" or "warn"; got {on_difference!r}')
    if stage is not None and (stage not in get_args(Stage) or isinstance(stage, bool)):
        errors.append(f"stage must be 0, 1, 2 or 3, as in ZeRO; got {stage!r}")
    if program is not None and ":" not in program:
        errors.append(f'program must be "FILE:FUNCTION"; got {program!r}')
    if errors:
        raise ValueError(f"fs.audit: {'; '.join(errors)}.")
    other = other_step(step, mesh, stage, options)
    errors = layout_errors(step, other)
    if errors:
        raise ValueError(f"fs.audit: {'; '.join(errors)}.")
    is_exact = step.options.reproducible and other.options.reproducible
    twin = Twin(OtherLayout(step, other), is_exact)
    return AuditedStep(twin, every, Path(folder), on_difference, digest, program)


class AuditOutcome(NamedTuple):
    """The outcome of the audit of one step.

    Args:
        step: the number of the call.
        findings: what is at fault; empty if both layouts agree.
        differences: of gradients and results, on all devices.
        text: the table.
    """

    step: int
    findings: Sequence[Finding]
    differences: Sequence[Difference]
    text: str

    @property
    def is_equal(self) -> bool:
        """True if both layouts agree."""
        return not self.findings


class AuditedStep:
    """A step that is audited: see `audit`. It is called as a `TrainStep` is.

    Args:
        twin: the step, and the other layout.
        every: audit each call whose number is a multiple of this.
        folder: for the arguments of steps that differ.
        on_difference: "raise" or "warn".
        has_digest: compare replicas after each step.
        program: makes the step again, for `fshard replay`.

    `calls` counts calls: set it to the number of steps of an earlier run, and numbers continue.
    `audits` counts those that were audited; `last` is the outcome of the last audit, None before
    the first. If the run in the other layout raises, as by a lack of memory, `results` is what the
    step had returned, until the next call.
    """

    __name__ = "train_step"  # for what wraps a function, such as functools.wraps

    def __init__(
        self,
        twin: Twin,
        every: int,
        folder: Path,
        on_difference: OnDifference,
        has_digest: bool,
        program: str | None,
    ) -> None:
        self.twin = twin
        self.every = every
        self.folder = folder
        self.on_difference: OnDifference = on_difference
        self.has_digest = has_digest
        self.program = program
        self.calls = 0
        self.audits = 0
        self.last: AuditOutcome | None = None
        self.results: tuple[Any, ...] | None = None

    @property
    def step(self) -> TrainStep:
        """The step that is audited."""
        return self.twin.step

    @property
    def mesh(self) -> Mesh:
        """The devices of the step."""
        return self.step.mesh

    def init(self, params: PyTree) -> PyTree:
        """Return the state of the optimizer."""
        return self.step.init(params)

    def __call__(self, params: PyTree, state: PyTree, *inputs: PyTree) -> tuple[Any, ...]:
        """Return the next parameters, state, buffers if there are any, and metrics."""
        self.calls += 1
        self.results = None
        if self.calls % self.every:
            results = self.step(params, state, *inputs)
        else:
            results = self._audited([params, state, *inputs])
        if self.has_digest:
            self._compare_replicas(results)
        return results

    def _audited(self, arguments: Sequence[PyTree]) -> tuple[Any, ...]:
        """Run the step and audit it; save its arguments if it differs."""
        trial = AuditTrial(self.twin, arguments)
        results, outcome = self.check(trial, arguments, self.calls)
        self.audits += 1
        self.last = outcome
        if outcome.is_equal:
            return results
        self._complain(f"{outcome.text}\n{self._save(outcome, trial)}")
        return results

    def check(
        self, trial: AuditTrial, arguments: Sequence[PyTree], number: int
    ) -> tuple[tuple[Any, ...], AuditOutcome]:
        """Run the step in both layouts; return its results, and the outcome of step `number`.

        The arguments, of which the trial has copies, are donated, if the step donates its own.
        """
        first = run_recorded(self.step, arguments)
        # The runs below draw again; the program continues with the draws after its own step.
        after = random_state()
        try:
            with uncounted():
                findings, differences = self._compared(trial, first)
        except Exception as error:
            error.add_note(
                f"It is of the audit of step {number}, {' against '.join(self.twin.names)}, which "
                "runs the step again from copies. The step itself had succeeded: the attribute "
                "results of the audited step has what it returned."
            )
            self.results = first.returned
            raise
        finally:
            after.set()
        text = self._table(number, findings, differences)
        return first.returned, AuditOutcome(number, findings, differences, text)

    def _compared(
        self, trial: AuditTrial, first: Run
    ) -> tuple[Sequence[Finding], Sequence[Difference]]:
        """Run the step in the other layout; return what is at fault, and the differences."""
        other = trial.other(first)
        differences = self.twin.compare(first, other)
        # All devices continue alike, since a diagnosis communicates.
        if not is_any(self.mesh, bool(differences)):
            return [], differences
        differences = differences_of_all(self.mesh, differences)
        return self._diagnose(trial, (first, other), differences), differences

    def _diagnose(
        self, trial: AuditTrial, runs: tuple[Run, Run], differences: Sequence[Difference]
    ) -> list[Finding]:
        """Return the findings of two runs that differ: see `diagnosis`."""
        unequal = self._unequal_replicas(trial.kept)
        if unequal:
            return [_of_replicas(replica, self.mesh) for replica in unequal]

        meshes = self.mesh, self.twin.other.mesh
        first, other = runs
        again, other_again = trial.step_again(), trial.other_again(first)
        faults = faults_of_all(self.mesh, first, again)
        other_faults = faults_of_all(meshes[1], other, other_again)
        if faults and other_faults:
            return [UNREPEATABLE]
        findings = transient(faults, self.mesh, "in this layout")
        findings += transient(other_faults, meshes[1], "in the other layout, which audits")

        if findings:
            # Beside a fault that happens once, layouts may disagree.
            first, other = again, trial.other_again(again)
            differences = self.twin.compare(first, other)
            if not is_any(self.mesh, bool(differences)):
                return findings
            differences = differences_of_all(self.mesh, differences)
        has_slices = self.twin.is_exact
        disagreement = persistent(
            first.record, other.record, meshes, differences, has_slices=has_slices
        )
        if not has_slices:
            disagreement = disagreement._replace(text=f"{disagreement.text}. {CAUSES}")
        return [*findings, disagreement]

    # -- replicas ----------------------------------------------------------------------------------

    def _compare_replicas(self, results: Sequence[PyTree]) -> None:
        """Compare what several devices hold after a step; raise or warn if it differs."""
        unequal = self._unequal_replicas(results[:-1])  # metrics are equal by their making
        if unequal:
            self._complain(table_of(unequal, self.mesh, f"step {self.calls}"))

    def _unequal_replicas(self, trees: Sequence[PyTree]) -> list[UnequalReplicas]:
        """Return the leaves of parameters, state and buffers whose replicas differ."""
        kinds = ["params", "state"]
        if self.step.options.has_buffers:
            kinds.append("buffers")
        named = {KINDS[kind]: tree for kind, tree in zip(kinds, trees, strict=False)}
        return unequal_replicas(named, self.mesh, call_site())

    # -- texts -------------------------------------------------------------------------------------

    def _complain(self, text: str) -> None:
        """Raise or warn."""
        if self.on_difference == "raise":
            raise AuditError(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _table(
        self, number: int, findings: Sequence[Finding], differences: Sequence[Difference]
    ) -> str:
        """Return the table of an outcome: a title, findings, and differences by kind."""
        layout, other_layout = self.twin.names
        layouts = f"{layout} against {other_layout}"
        measure = "bits" if self.twin.is_exact else "up to rounding"
        verdict = "different" if findings else "equal"
        lines = [f"step {number}: {layouts}: {verdict} {measure}"]
        lines += [f"  {finding.text}" for finding in findings]
        if not findings:
            return lines[0]
        for kind in ("gradient", *KINDS.values()):
            of_kind = [difference for difference in differences if difference.kind == kind]
            lines.append(f"  {kind:<10} {self._described(of_kind)}")
        return "\n".join(lines)

    def _described(self, differences: Sequence[Difference]) -> str:
        """Return the first of the differences of a kind, and the number of leaves."""
        if not differences:
            return "equal" if self.twin.is_exact else "equal up to rounding"
        first = differences[0]
        leaves = {difference.leaf for difference in differences}
        others = f"; {len(leaves)} leaves differ" if len(leaves) > 1 else ""
        return (
            f"{first.name} is {first.value}, in the other layout {first.other}, on "
            f"{device_name(self.mesh, first.device)}{others}"
        )

    # -- the folder --------------------------------------------------------------------------------

    def _save(self, outcome: AuditOutcome, trial: AuditTrial) -> str:
        """Save the arguments of a step, with the table; return how it is repeated."""
        if outcome.findings[0].phase == REPLICAS:
            return "Its arguments are not saved: a checkpoint has one value of each replica."
        path = self.folder / f"step-{outcome.step}"
        facts = AuditFacts(outcome.step, self.program, *self.twin.recorded)
        save_step(path, facts, outcome.text, trial.kept, trial.state_of_draws)
        return f"Repeat it alone: fshard replay {path} {self.program or 'FILE:FUNCTION'}"


def _of_replicas(replica: UnequalReplicas, mesh: Mesh) -> Finding:
    """Return the finding of a leaf whose replicas differ before a step."""
    text = described(replica, mesh, "before the step")
    return Finding(REPLICAS, replica.devices[0], replica.leaf, text)
