"""The comparison of a run in processes with one in a single process, leaf by leaf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import PromiseError
from fshard.mesh.layout import PyTree, flatten, unflatten
from fshard.testing.certificate import TOLERANCES, CertificateRow, bound_of, constant_factor, largest, refer_to_first
from fshard.testing.programs.record import RankRecord, Tensors, rows_of

Axes = Mapping[str, int]


def _coordinates(axes: Axes) -> list[tuple[int, ...]]:
    """Return the coordinates of the ranks."""
    return [*product(*map(range, axes.values()))]


def joined_batch(ranks: Sequence[RankRecord], axes: Axes) -> PyTree:
    """Return the batch of all processes: rows of axes along which batches differ, in the order of ranks."""
    columns, structure = [flatten(rank.batch)[0] for rank in ranks], flatten(ranks[0].batch)[1]
    groups = dict(zip(_coordinates(axes), columns, strict=True))
    for axis in reversed(range(len(axes))):
        before = {key[:axis] for key in groups}
        lines = {key: [groups[(*key, i)] for i in range([*axes.values()][axis])] for key in before}
        is_equal = all(_equal(line[0], leaves) for line in lines.values() for leaves in line)
        groups = {key: line[0] if is_equal else _concatenated(line) for key, line in lines.items()}
    return unflatten(structure, groups[()])


def _equal(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else bool(x == y)
        for x, y in zip(leaves, others, strict=True)
    )


def _concatenated(line: Sequence[Sequence[Any]]) -> list[Any]:
    columns = [*zip(*line, strict=True)]
    if errors := [
        str(sorted({tuple(x.shape[1:]) for x in column}))
        for column in columns
        if isinstance(column[0], Tensor) and len({x.shape[1:] for x in column}) > 1
    ]:
        raise ValueError(
            f"certify_program: the batches of processes must differ in rows only; got rows of {'; '.join(errors)}."
        )
    return [torch.cat(column) if isinstance(column[0], Tensor) and column[0].ndim else column[0] for column in columns]


class _Assembly(NamedTuple):
    """The assembly of a parameter from those of ranks: all are equal, or each is a part of a dim along an axis."""

    dim: int | None
    groups: list[list[int]]

    def fits(self, parts: Sequence[Tensors], name: str, expected: Tensor) -> bool:
        """Return True if each group has the expected tensor."""
        shapes = {parts[rank][name].shape for group in self.groups for rank in group}
        if len(shapes) > 1 or any(
            len(group) * shapes.copy().pop().numel() != expected.numel() for group in self.groups
        ):
            return False
        x, spread = self.tensor(parts, name)
        return x is not None and torch.equal(x, expected) and not spread

    def tensor(self, parts: Sequence[Tensors], name: str) -> tuple[Tensor | None, float]:
        """Return the full tensor of the first group that has it, and the largest difference between groups."""
        tensors = [
            torch.cat([parts[rank][name] for rank in group], self.dim or 0)
            if self.dim is not None
            else parts[group[0]][name]
            for group in self.groups
            if all(name in parts[rank] for rank in group)
        ]
        spread = max([float((x - tensors[0]).abs().max()) for x in tensors if x.numel()], default=0.0)
        return (tensors[0], spread) if tensors else (None, 0.0)


@dataclass(frozen=True)
class Comparison:
    """The run in the processes of a mesh, against that in one."""

    axes: Axes
    ranks: Sequence[RankRecord]
    one: RankRecord
    dtype: torch.dtype

    def rows(self) -> list[CertificateRow]:
        """Return the row of the loss, and those of the parameters; those that diverge later refer to the first."""
        names = dict.fromkeys(name for rank in (self.one, *self.ranks) for name in rank.start)
        assemblies = {name: self._assembly(name) for name in names}
        mesh = ", ".join(f"{name}={size}" for name, size in self.axes.items())
        if unlike := [name for name, assembly in assemblies.items() if assembly is None]:
            raise PromiseError(
                f"certify_program: on mesh {mesh} parameters must begin as in one process; got other values, names or parts of "
                f"{', '.join(unlike)}. Seed all ranks alike, and shard dims in equal parts in the order of an axis."
            )
        rows = [self._loss(), *(self._leaf(name, assembly) for name, assembly in assemblies.items() if assembly)]
        return [row._replace(stage=mesh) for row in refer_to_first(rows)]

    def _assembly(self, name: str) -> _Assembly | None:
        """Return how a parameter is put together, by its values before the first step."""
        expected, parts = self.one.start.get(name), [rank.start for rank in self.ranks]
        holders = [rank for rank, start in enumerate(parts) if name in start]
        if expected is None:
            return None
        candidates = [_Assembly(None, [[rank] for rank in holders])]
        coordinates = _coordinates(self.axes)
        for dim, axis in product(range(expected.ndim), range(len(self.axes))):
            lines: dict[Any, list[int]] = {}
            for rank in holders:
                lines.setdefault((*coordinates[rank][:axis], *coordinates[rank][axis + 1 :]), []).append(rank)
            candidates.append(_Assembly(dim, [*lines.values()]))
        for candidate in candidates:
            if candidate.fits(parts, name, expected):
                return candidate
        return None

    def _loss(self) -> CertificateRow:
        """Compare the mean of the losses, weighted by rows, where processes have one."""
        row = CertificateRow("", "loss", "EXACT", 0.0, 0.0)
        for step, expected in enumerate(self.one.losses):
            pairs = [(rank.losses[step], rows_of(rank.batch) or 1) for rank in self.ranks]
            rows = sum(rows for loss, rows in pairs if loss is not None)
            if expected is None or not rows or row.step is not None:
                continue
            mean = sum(loss * rows for loss, rows in pairs if loss is not None) / rows
            x, y = (torch.tensor(number, dtype=torch.float64) for number in (mean, expected))
            row = self._row("loss", "loss", x, y, step, bound_of(y, 0.0, self.dtype))
        return row

    def _leaf(self, name: str, assembly: _Assembly) -> CertificateRow:
        """Compare gradients, then changes of the parameter, step by step."""
        row = CertificateRow("", name, "EXACT", 0.0, 0.0)
        for step in range(len(self.one.grads)):
            largest_of_all = max(map(largest, self.one.grads[step].values()), default=0.0)
            expected = self.one.grads[step].get(name)
            x, spread = assembly.tensor([rank.grads[step] for rank in self.ranks], name)
            if x is None and expected is not None:
                x = torch.zeros_like(expected)
            if x is not None:
                expected = torch.zeros_like(x) if expected is None else expected
                row = self._row(
                    name, "gradient", x, expected, step, bound_of(expected, largest_of_all, self.dtype), spread
                )
            if row.step is None:
                x, spread = assembly.tensor([rank.params[step] for rank in self.ranks], name)
                expected = self.one.params[step][name]
                assert x is not None
                start, bound = self.one.start[name], bound_of(expected, 0.0, self.dtype)
                row = self._row(name, "change of the parameter", x - start, expected - start, step, bound, spread)
            if row.step is not None:
                return row
        return row

    def _row(
        self, name: str, subject: str, x: Tensor, expected: Tensor, step: int, bound: float, spread: float = 0.0
    ) -> CertificateRow:
        """Judge one tensor; an error beyond the bound has a reason."""
        error = float((x - expected).abs().max()) if x.numel() else 0.0
        error = error if error == error else inf
        row = CertificateRow("", name, "EXACT" if not error else "BOUNDED", error, bound)
        if error <= bound and spread <= bound:
            return row
        reason = (
            self._reason(name, subject, x, expected, step)
            if error > bound
            else f"differs between ranks by {spread:.3g}"
        )
        return row._replace(verdict="DIVERGENT", reason=f"step {step}: the {subject} {reason}", step=step)

    def _reason(self, name: str, subject: str, x: Tensor, expected: Tensor, step: int) -> str:
        if not x.isfinite().all():
            return "is not finite"
        if not x.any():
            return "is 0"
        near = 1e-6 + TOLERANCES[self.dtype]
        if factor := constant_factor(x, expected, near):
            sizes = {**self.axes, **({"all axes": len(self.ranks)} if len(self.axes) > 1 else {})}
            names = [
                axis for axis, n in sizes.items() if n > 1 and min(abs(factor - n) / n, abs(factor * n - 1)) < near
            ]
            sizes = f": the size of {' or '.join(names)}" if names else ""
            if names or x.numel() > 1:
                return f"is {factor:.4g} times that of one process{sizes}"
        for other, g in self.one.grads[step].items():
            if subject == "gradient" and other != name and g.shape == x.shape and torch.allclose(g, x, near, 0.0):
                return f"is that of {other}"
        index = tuple(int(i) for i in torch.unravel_index((x - expected).abs().argmax(), x.shape))
        position = f" most at {[*index]}" if index else ""
        return f"differs{position}: {float(x[index]):.6g} instead of {float(expected[index]):.6g}"
