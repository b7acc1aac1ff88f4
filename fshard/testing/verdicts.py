"""The verdict on each leaf of a run, by its shards after every step.

They are compared with the same elements on one device:

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

from fshard.rounding import largest, widest
from fshard.testing.certificate import CertificateRow, Verdict, first_of


@contextmanager
def float64_by_default() -> Generator[None]:
    """Create tensors in float64 in the block, also constants of a program."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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

    def first_difference(self, full: Tensor, bound: float) -> str:
        """Describe the first element whose error exceeds a bound, and the device that stores it."""
        position = int((self.errors(full) > bound).nonzero()[0])
        actual = self.flattened()[position].item()
        expected = self.same_elements_of(full)[position].item()

        numbers = torch.arange(full.numel(), device=full.device).reshape(full.shape)
        number = self.same_elements_of(numbers)[position]
        index = [int(i) for i in torch.unravel_index(number, full.shape)]
        return (
            f"first differs at {index}: {actual:.6g} instead of {expected:.6g} "
            f"(device {self._device_at(position)})"
        )

    def _device_at(self, position: int) -> int:
        """Return the device of an element, by its position in the row of all shards."""
        for device, shard in zip(self.devices, self.shards, strict=True):
            if position < shard.numel():
                return device
            position -= shard.numel()
        raise IndexError(position)


def _in_a_row(xs: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in xs])


class Comparison(NamedTuple):
    """A leaf after a step: its shards, and the full tensor of one device.

    Either is None where a run has none. `hint` is the likely cause of a divergence; `rivals` are
    other full tensors, which the shards may have by mistake.
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

    `sizes` are of axes, by which a mistake may multiply. `tolerance` is the relative error of a
    factor, and of a rival.
    """
    rows_of_leaves: dict[str, list[CertificateRow]] = {}
    for comparison in comparisons:
        row = _row(comparison, stage, sizes or {}, tolerance)
        rows_of_leaves.setdefault(comparison.leaf, []).append(row)

    def order(row: CertificateRow) -> tuple[bool, int, float]:
        return row.step is None, row.step or 0, -row.error

    rows = [min(leaf_rows, key=order) for leaf_rows in rows_of_leaves.values()]
    first = first_of(rows)
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
    comparison: Comparison, stage: int | str, sizes: Mapping[str, int], tolerance: float
) -> CertificateRow:
    """Return the row of one comparison; its `step` is None unless it fails."""
    verdict, error, reason = _verdict(comparison, sizes, tolerance)
    row = CertificateRow(stage, comparison.leaf, verdict, error, comparison.bound)
    if not reason:
        return row
    step = comparison.step
    return row._replace(reason=f"step {step}: the {comparison.subject} {reason}", step=step)


def _verdict(
    comparison: Comparison, sizes: Mapping[str, int], tolerance: float
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
    mistake = _mistake(comparison, shards, full, sizes, tolerance)
    return "DIVERGENT", error, mistake + comparison.hint


def _mistake(
    comparison: Comparison, shards: Shards, full: Tensor, sizes: Mapping[str, int], tolerance: float
) -> str:
    """Describe a difference.

    By its factor, by the leaf that the shards have instead, or by its first element.
    """
    x = shards.flattened()
    if not x.isfinite().all():
        return "is not finite"
    if not x.any():
        return "is 0"

    factor = constant_factor(x, shards.same_elements_of(full), tolerance)
    if factor is not None:
        axes = [axis for axis, n in sizes.items() if _is_by_size(factor, n, tolerance)]
        if axes:
            return f"is {factor:.4g} times that of one device: the size of {' or '.join(axes)}"
        # One number is always a multiple of another, so a factor explains it only by a size.
        if x.numel() > 1 or not sizes:
            return f"is {factor:.4g} times that of one device"

    for name, rival in comparison.rivals.items():
        if rival is full or rival.shape != full.shape:
            continue
        if torch.allclose(x, shards.same_elements_of(rival), tolerance, 0.0):
            return f"is that of {name}"
    return shards.first_difference(full, comparison.bound)


def _is_by_size(factor: float, n: int, tolerance: float) -> bool:
    """Return True if a factor is the size of an axis, or one over it."""
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
