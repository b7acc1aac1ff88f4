"""The verdict on each leaf of a run, by its shards after every step.

They are compared with the same elements on one device:

    device 0   w[0:2]  |  full[0:2]
    device 1   w[2:4]  |  full[2:4]
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.rounding import largest, widest
from fshard.testing.certificate import CertificateRow, Verdict, first_of, time_of


@contextmanager
def float64_by_default() -> Generator[None]:
    """Create tensors in float64 in the block, also constants of a program."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SOME_TIMES = "is that of one device, but "
"""The words before the factors of some members."""


class Shards(NamedTuple):
    """The shards of a tensor on some devices. Every replica is a shard.

    `cut` takes the same elements of a full tensor.
    """

    shards: Sequence[Tensor]
    devices: Sequence[int]
    cut: Callable[[Tensor], Sequence[Tensor]]

    def flattened(self) -> Tensor:
        """Return the elements of all shards in a row."""
        return _in_a_row(self.shards)

    def same_elements_of(self, full: Tensor) -> Tensor:
        """Return the elements of a full tensor at the indices of all shards, in a row."""
        return _in_a_row(self.cut(full))

    def errors(self, full: Tensor) -> Tensor:
        """Return the absolute error of each element of all shards; infinity where it is nan."""
        difference = widest(self.flattened()) - widest(self.same_elements_of(full))
        return difference.abs().nan_to_num(inf, inf)

    def first_difference(self, full: Tensor, bound: float, member: str = "device") -> str:
        """Describe the first element whose error exceeds a bound, and the member that stores it."""
        position = int((self.errors(full) > bound).nonzero()[0])
        actual, expected = different_texts(
            self.flattened()[position].item(), self.same_elements_of(full)[position].item()
        )

        if full.ndim == 0:
            return f"is {actual} instead of {expected}"

        numbers = torch.arange(full.numel(), device=full.device).reshape(full.shape)
        number = self.same_elements_of(numbers)[position]
        index = [int(i) for i in torch.unravel_index(number, full.shape)]
        return (
            f"first differs at {index}: {actual} instead of {expected} "
            f"({member} {self._device_at(position)})"
        )

    def _device_at(self, position: int) -> int:
        """Return the device of an element, by its position in the row of all shards."""
        for device, shard in zip(self.devices, self.shards, strict=True):
            if position < shard.numel():
                return device
            position -= shard.numel()
        raise IndexError(position)


def different_texts(x: float, y: float) -> tuple[str, str]:
    """Return two numbers with as many digits as it takes to differ.

    >>> different_texts(1.00000001, 1.0)
    ('1.00000001', '1')
    """
    for digits in range(6, 18):
        texts = f"{x:.{digits}g}", f"{y:.{digits}g}"
        if texts[0] != texts[1]:
            return texts
    return str(x), str(y)


def number_text(x: float, tolerance: float) -> str:
    """Return a number, as a fraction too if it is one that decimals do not show.

    >>> number_text(1 / 3, 1e-6), number_text(0.49999999999, 1e-6)
    ('0.333333 (1/3)', '0.5')
    """
    digits = 6 if tolerance < 1e-4 else 4
    fraction = Fraction(x).limit_denominator(64)
    is_fraction = abs(float(fraction) - x) <= min(tolerance, 1e-6) * abs(x)
    if not is_fraction:
        return f"{x:.{digits}g}"
    text = f"{float(fraction):.{digits}g}"
    return text if Fraction(text) == fraction else f"{text} ({fraction})"


def _in_a_row(xs: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in xs])


class Comparison(NamedTuple):
    """A leaf after a step: its shards, and the full tensor of one device.

    Args:
        step: the number of the step.
        leaf: the name.
        subject: what of the leaf, such as its gradient.
        shards: None where the sharded run has none.
        full: None where the serial run has none.
        bound: the error that rounding explains.
        hint: the likely cause of a divergence.
        rivals: other full tensors, which the shards may have by mistake.
        cause: the description of a divergence, if it is known.
        note: a remark for the row if the leaf agrees.
        tolerance: the relative error of a factor, and of a rival.
    """

    step: int
    leaf: str
    subject: str
    shards: Shards | None
    full: Tensor | None
    bound: float
    hint: str = ""
    rivals: Mapping[str, Tensor] = {}
    cause: str = ""
    note: str = ""
    tolerance: float = 1e-3

    def is_within_bound(self) -> bool:
        """Return True if both runs have the leaf, or neither, and rounding explains the error."""
        if self.shards is None or self.full is None:
            return self.shards is None and self.full is None
        errors = self.shards.errors(self.full)
        return not errors.numel() or float(errors.max()) <= self.bound


def judge(
    comparisons: Iterable[Comparison],
    stage: int | str,
    counts: Mapping[str, int] | None = None,
    member: str = "device",
) -> list[CertificateRow]:
    """Judge every leaf of a run, by the first comparison that fails or else by the largest error.

    `counts` are numbers by which a mistake may multiply, by their names; `member` is the word for
    what has shards.
    """
    rows_of_leaves: dict[str, list[CertificateRow]] = {}
    notes: dict[str, str] = {}
    for comparison in comparisons:
        row = _row(comparison, stage, counts or {}, member)
        rows_of_leaves.setdefault(comparison.leaf, []).append(row)
        if comparison.note:
            notes[comparison.leaf] = comparison.note

    def order(row: CertificateRow) -> tuple[bool, int, int, float]:
        if row.step is None:
            return True, 0, 0, -row.error
        # A gradient before the change that it makes.
        return False, row.step, time_of(row.subject), -row.error

    rows: list[CertificateRow] = []
    for leaf, leaf_rows in rows_of_leaves.items():
        row = min(leaf_rows, key=order)
        if row.step is None:
            row = row._replace(reason=notes.get(leaf, ""))
        rows.append(row)
    first = first_of(rows, prefers_causes=bool(counts))
    if first is None:
        return rows
    # What diverges later may have the first divergence as its cause.
    judged: list[CertificateRow] = []
    for row in rows:
        if row.step not in (None, first.step):
            row = row._replace(reason=f"step {row.step}: after {first.leaf} has diverged")
        judged.append(row)
    return judged


def _row(
    comparison: Comparison, stage: int | str, counts: Mapping[str, int], member: str
) -> CertificateRow:
    """Return the row of one comparison; its `step` is None unless it fails."""
    verdict, error, reason = _verdict(comparison, counts, member)
    row = CertificateRow(stage, comparison.leaf, verdict, error, comparison.bound)
    if not reason:
        return row
    step = comparison.step
    subject = comparison.subject
    return row._replace(reason=f"step {step}: the {subject} {reason}", step=step, subject=subject)


def _verdict(
    comparison: Comparison, counts: Mapping[str, int], member: str
) -> tuple[Verdict, float, str]:
    """Return the verdict, the largest error, and the reason of a failure."""
    shards = comparison.shards
    full = comparison.full
    if shards is None and full is None:
        return "EXACT", 0.0, ""
    if shards is None or full is None:
        run = "sharded" if full is None else "serial"
        return "DIVERGENT", inf, f"is missing: only the {run} run has it"
    if all(map(torch.equal, shards.shards, shards.cut(full))):
        return "EXACT", 0.0, ""

    error = float(shards.errors(full).max())
    if error <= comparison.bound:
        return "BOUNDED", error, ""
    if not full.isfinite().all():
        return "INCONCLUSIVE", error, "of one device is not finite"
    mistake = comparison.cause or _mistake(comparison, shards, full, counts, member)
    return "DIVERGENT", error, mistake + comparison.hint


def _mistake(
    comparison: Comparison, shards: Shards, full: Tensor, counts: Mapping[str, int], member: str
) -> str:
    """Describe a difference.

    By its factor, by the leaf that the shards have instead, or by its first element.
    """
    x = shards.flattened()
    if not x.isfinite().all():
        return "is not finite"
    if not x.any():
        return "is 0"

    tolerance = comparison.tolerance
    factor = constant_factor(x, shards.same_elements_of(full), tolerance)
    by_factor = _factor_text(factor, full, counts, tolerance)
    if by_factor:
        return by_factor
    for name, rival in comparison.rivals.items():
        if rival is full or rival.shape != full.shape:
            continue
        if torch.allclose(x, shards.same_elements_of(rival), tolerance, 0.0):
            return f"is that of {name}"

    by_members = _factors_of_members(comparison, shards, full, member)
    difference = by_members or shards.first_difference(full, comparison.bound, member)
    if full.numel() == 1 and factor is not None and not by_members:
        difference += f", {number_text(factor, tolerance)} times"
    return difference


def _factor_text(
    factor: float | None, full: Tensor, counts: Mapping[str, int], tolerance: float
) -> str:
    """Describe a factor and the numbers that explain it; "" if it explains nothing."""
    if factor is None:
        return ""
    text = f"is {number_text(factor, tolerance)} times that of one device"
    names = [name for name, n in counts.items() if _is_by_size(factor, n, tolerance)]
    if names:
        return f"{text}: {' or '.join(names)}"
    # One number is always a multiple of another, so a factor explains it only by a size.
    return text if full.numel() > 1 or not counts else ""


def _factors_of_members(comparison: Comparison, shards: Shards, full: Tensor, member: str) -> str:
    """Describe the factors of members that have other ones; "" if a shard has none."""
    tolerance = comparison.tolerance
    factors: dict[int, float] = {}
    for number, (shard, expected) in enumerate(zip(shards.shards, shards.cut(full), strict=True)):
        x = shard.flatten()
        y = expected.flatten()
        if _largest_difference(x, y) <= comparison.bound:
            continue
        has_factor = x.numel() > 1 and bool(y.any())
        if not x.any():
            factors[shards.devices[number]] = 0.0
            continue
        factor = constant_factor(x, y, tolerance) if has_factor else None
        if factor is None:
            return ""
        factors[shards.devices[number]] = factor
    if len(shards.shards) == 1:
        return ""
    texts = [f"times {number_text(x, tolerance)} on {member} {i}" for i, x in factors.items()]
    return SOME_TIMES + ", ".join(texts)


def _largest_difference(x: Tensor, y: Tensor) -> float:
    if not x.numel():
        return 0.0
    return float((widest(x) - widest(y)).abs().max())


def _is_by_size(factor: float, n: int, tolerance: float) -> bool:
    """Return True if a factor is a number, or one over it."""
    return n > 1 and min(abs(factor / n - 1), abs(factor * n - 1)) < tolerance


def constant_factor(x: Tensor, expected: Tensor, tolerance: float) -> float | None:
    """Return the number that all of `expected` is multiplied by in x.

    None if there is none, or it is 1. It is the factor of the least squared error, which then must
    be small everywhere.
    """
    x = widest(x)
    expected = widest(expected)
    factor = float((x * expected.conj()).sum().real / expected.abs().square().sum())
    error = (x - factor * expected).abs().max()
    is_constant = bool(error <= tolerance * abs(factor) * largest(expected))
    if is_constant and abs(factor - 1) > tolerance:
        return factor
    return None
