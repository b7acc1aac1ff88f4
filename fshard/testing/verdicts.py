"""The verdict on each leaf of a run: its shards, after every step, compared with the same elements on one device.

device 0   w[0:2]  |  full[0:2]
device 1   w[2:4]  |  full[2:4]
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.testing.certificate import CertificateRow, Verdict, first_of

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The relative difference that rounding explains, by the lowest precision of a program."""


def bound_of(x: Tensor | None, largest_of_all: float, dtype: torch.dtype) -> float:
    """Return the error that rounding in a dtype explains: relative to the largest number of a leaf.

    A gradient that is zero up to rounding has no size of its own: it counts as 1e-5, and as a thousandth of the largest
    number of all leaves; in a lower dtype 32 roundings of that number are allowed.
    """
    roundings = max(1e-3 * TOLERANCES[dtype], 32 * torch.finfo(dtype).eps)
    return max(TOLERANCES[dtype] * max(largest(x), 1e-5), roundings * largest_of_all)


def largest(x: Tensor | None) -> float:
    """Take the largest absolute value of those that are finite."""
    return 0.0 if x is None or not x.numel() else float(widest(x).abs().nan_to_num(0.0, 0.0).max())


@contextmanager
def float64_by_default() -> Generator[None]:
    """Create tensors in float64 in the block, also constants of a program."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def widest(x: Tensor) -> Tensor:
    """Convert any tensor to float64 (complex128)."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


class Shards(NamedTuple):
    """The shards of a tensor on some devices; `cut` takes the same elements of a full tensor. Every replica is a shard."""

    shards: Sequence[Tensor]
    devices: Sequence[int]
    cut: Callable[[Tensor], Sequence[Tensor]]

    def joined(self, full: Tensor | None = None) -> Tensor:
        """Return the elements of all shards in a row; or those of a full tensor at the same indices."""
        return torch.cat([x.reshape(-1) for x in (self.shards if full is None else self.cut(full))])

    def errors(self, full: Tensor) -> Tensor:
        """Return the absolute error of each element of all shards; infinity where it is not a number."""
        return (widest(self.joined()) - widest(self.joined(full))).abs().nan_to_num(inf, inf)

    def first_difference(self, full: Tensor, bound: float) -> str:
        """Describe the first element whose error exceeds a bound, and the device that stores it."""
        position = int((self.errors(full) > bound).nonzero()[0])
        numbers = torch.arange(full.numel(), device=full.device).reshape(full.shape)
        index = [int(i) for i in torch.unravel_index(self.joined(numbers)[position], full.shape)]
        device = [
            device
            for device, x in zip(self.devices, self.shards, strict=True)
            for _ in range(x.numel())
        ][position]
        x, expected = self.joined()[position].item(), self.joined(full)[position].item()
        return f"first differs at {index}: {x:.6g} instead of {expected:.6g} (device {device})"


class Comparison(NamedTuple):
    """A leaf after a step: its shards, and the full tensor of one device; None where a run has none.

    `hint` is the likely cause of a divergence; `rivals` are other full tensors, which the shards may have by mistake.
    """

    step: int
    leaf: str
    subject: str
    shards: Shards | None
    full: Tensor | None
    bound: float
    hint: str = ""
    rivals: Mapping[str, Tensor] = {}


def judge(
    comparisons: Iterable[Comparison],
    stage: int | str,
    sizes: Mapping[str, int] | None = None,
    tolerance: float = 1e-3,
) -> list[CertificateRow]:
    """Judge every leaf of a run, by the first comparison that fails or else by the largest error.

    `sizes` are of axes, by which a mistake may multiply; `tolerance` is the relative error of a factor, and of a rival.
    """
    of_leaves: dict[str, list[CertificateRow]] = {}
    for comparison in comparisons:
        verdict, error, reason = _verdict(comparison, sizes or {}, tolerance)
        step, leaf, subject, *_ = comparison
        row = CertificateRow(stage, leaf, verdict, error, comparison.bound)
        row = (
            row._replace(reason=f"step {step}: the {subject} {reason}", step=step)
            if reason
            else row
        )
        of_leaves.setdefault(leaf, []).append(row)
    rows = [
        min(rows, key=lambda row: (row.step is None, row.step or 0, -row.error))
        for rows in of_leaves.values()
    ]
    first = first_of(rows)
    later = [first is not None and row.step not in (None, first.step) for row in rows]
    return [
        row._replace(reason=f"step {row.step}: after {first.leaf} has diverged")
        if first and is_later
        else row
        for row, is_later in zip(rows, later, strict=True)
    ]


def _verdict(
    comparison: Comparison, sizes: Mapping[str, int], tolerance: float
) -> tuple[Verdict, float, str]:
    """Return the verdict, the largest error, and the reason of a failure."""
    shards, full = comparison.shards, comparison.full
    if shards is None or full is None:
        reason = f"is missing: only the {'sharded' if full is None else 'serial'} run has it"
        return ("EXACT", 0.0, "") if shards is full else ("DIVERGENT", inf, reason)
    if all(map(torch.equal, shards.shards, shards.cut(full))):
        return "EXACT", 0.0, ""
    error = float(shards.errors(full).max())
    if error <= comparison.bound:
        return "BOUNDED", error, ""
    if not full.isfinite().all():
        return "INCONCLUSIVE", error, "of one device is not finite"
    return (
        "DIVERGENT",
        error,
        _mistake(comparison, shards, full, sizes, tolerance) + comparison.hint,
    )


def _mistake(
    comparison: Comparison, shards: Shards, full: Tensor, sizes: Mapping[str, int], tolerance: float
) -> str:
    """Describe a difference: by its factor, by the leaf that the shards have instead, or by its first element."""
    x = shards.joined()
    if not x.isfinite().all():
        return "is not finite"
    if not x.any():
        return "is 0"
    if factor := constant_factor(x, shards.joined(full), tolerance):
        axes = [
            axis
            for axis, n in sizes.items()
            if n > 1 and min(abs(factor / n - 1), abs(factor * n - 1)) < tolerance
        ]
        if axes or x.numel() > 1 or not sizes:
            return f"is {factor:.4g} times that of one device" + (
                f": the size of {' or '.join(axes)}" if axes else ""
            )
    for name, rival in comparison.rivals.items():
        if (
            rival is not full
            and rival.shape == full.shape
            and torch.allclose(x, shards.joined(rival), tolerance, 0.0)
        ):
            return f"is that of {name}"
    return shards.first_difference(full, comparison.bound)


def constant_factor(x: Tensor, expected: Tensor, tolerance: float) -> float | None:
    """Return the number that all of `expected` is multiplied by in x; None if there is none, or it is 1."""
    x, expected = widest(x), widest(expected)
    factor = float((x * expected.conj()).sum().real / expected.abs().square().sum())
    is_constant = (x - factor * expected).abs().max() <= tolerance * abs(factor) * largest(expected)
    return factor if is_constant and abs(factor - 1) > tolerance else None
