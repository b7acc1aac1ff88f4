"""The origin of each element of a target, and comparisons of such maps: `Trace`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fshard.errors import RefitError
from fshard.mesh.layout.arithmetic import unravel
from fshard.refit.numbers import CONSTANT, ElementNumbers, Weight
from fshard.refit.origins import Origins, SourceBox, numbers_of

Target = nn.Module | Mapping[str, Tensor]
_UNKNOWN = -3
"""The number of an element of a source that another trace does not have."""
_SHOWN = 8
"""The most leaves that an error names."""


@dataclass(frozen=True)
class TargetLeaf:
    """One parameter or buffer of a target, and the origins of its elements.

    Args:
        name: in the target.
        shape: of its tensor.
        dtype: of its tensor.
        origins: the boxes of sources that its elements are copied from, as arrays.
        tied_to: the name of the first leaf with the same memory; else the name of this one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    origins: Origins
    tied_to: str

    @property
    def unwritten(self) -> int:
        """The number of elements that the loader does not write."""
        written = int(self.origins.sizes.sum()) + self.origins.constant_count
        return prod(self.shape) - written


@dataclass(frozen=True)
class Trace:
    """The origin of each element of a target: see `trace`.

    Args:
        weights: the sources that were given to the loader.
        targets: the parameters and buffers of the target that the loader writes, by name.
        numbering: the numbers of the sources' elements.
    """

    weights: Sequence[Weight]
    targets: Mapping[str, TargetLeaf]
    numbering: ElementNumbers

    def boxes(self, name: str) -> Iterator[SourceBox]:
        """Yield the boxes of one target leaf: what is copied from where."""
        return self.targets[name].origins.boxes(self.numbering.ranges, self.weights)

    def numbers(self, name: str) -> Tensor:
        """Return the number of each element of one target leaf: see `fshard.refit.numbers`."""
        leaf = self.targets[name]
        return numbers_of(leaf.origins, leaf.shape, self.numbering)

    @torch.no_grad()
    def copy(self, weights: Mapping[str, Tensor], into: Target) -> None:
        """Write full weights into a target as the loader does: the same elements, and casts.

        Elements that the loader does not write, or sets without a source, stay as they are.
        """
        tensors = dict(named_tensors(into))
        for name, leaf in self.targets.items():
            if leaf.tied_to != name:
                continue
            x = tensors[name].detach()
            if (tuple(x.shape), x.dtype) != (leaf.shape, leaf.dtype):
                raise RefitError(
                    f"refit: {name} must be {leaf.dtype} of {leaf.shape}, as the loader has made "
                    f"it; got {x.dtype} of {tuple(x.shape)}. Load once, then trace."
                )
            for box in self.boxes(name):
                x[box.target].copy_(box.read(weights[box.source]))

    def check(self, expected: Trace) -> None:
        """Raise unless another trace maps the same elements, of sources with the same names.

        Such as the trace of a reference loader, of another engine, or of the first load of this
        one. The error has, for each parameter that differs, the first element.
        """
        errors: list[str] = []
        for name in dict.fromkeys([*expected.targets, *self.targets]):
            errors += _differences(name, self, expected)
        if errors:
            raise RefitError(f"refit: a trace must be the expected one; {listed(errors)}.")

    def __repr__(self) -> str:
        boxes = sum([len(leaf.origins.target) for leaf in self.targets.values()])
        return f"Trace({len(self.weights)} weights -> {len(self.targets)} targets, {boxes} boxes)"


def check_ranks(traces: Sequence[Trace]) -> None:
    """Raise unless every element of the sources reaches a rank: the traces are of all ranks.

    A rank of an engine with tensor parallelism loads a slice of most weights. A slice that no rank
    loads is lost, such as where all ranks load the first one.

    >>> import torch, fshard as fs
    >>> half = {"w": torch.zeros(2)}
    >>> def load(weights):
    ...     half["w"].copy_(dict(weights)["w"][:2])
    >>> fs.refit.check_ranks([fs.refit.trace(load, {"w": torch.ones(4)}, half)] * 2)
    Traceback (most recent call last):
    fshard.errors.RefitError: refit: every element must reach a rank; w[2] reaches none.
    """
    boxes: dict[str, list[SourceBox]] = {}
    for traced in traces:
        for name in traced.targets:
            for box in traced.boxes(name):
                boxes.setdefault(box.source, []).append(box)

    errors: list[str] = []
    for weight in traces[0].weights:
        reached = torch.zeros(weight.shape, dtype=torch.bool)
        for box in boxes.get(weight.name, []):
            reached[box.source_slices] = True
        if not reached.all():
            first = int((~reached).view(-1).nonzero()[0])
            errors.append(f"{element_text(weight.name, weight.shape, first)} reaches none")
    if errors:
        raise RefitError(f"refit: every element must reach a rank; {listed(errors)}.")


def named_tensors(target: Target) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a target, tied ones under each name."""
    if isinstance(target, nn.Module):
        yield from target.named_parameters(remove_duplicate=False)
        yield from target.named_buffers(remove_duplicate=False)
    else:
        yield from target.items()


def listed(texts: Sequence[str]) -> str:
    """Join names or errors, of which the first few suffice."""
    text = "; ".join(texts[:_SHOWN])
    more = len(texts) - _SHOWN
    return f"{text}; and {more} more" if more > 0 else text


def element_text(name: str, shape: Sequence[int], position: int) -> str:
    """Return an element in words: w[2, 0]."""
    index = unravel(position, [*shape])
    return f"{name}[{', '.join(map(str, index))}]" if shape else name


def _differences(name: str, actual: Trace, expected: Trace) -> list[str]:
    """Return how a target leaf differs between two traces, in at most one error."""
    leaf = actual.targets.get(name)
    other = expected.targets.get(name)
    if leaf is None:
        return [f"{name} is missing"]
    if other is None:
        return [f"{name} is not expected"]
    if (leaf.shape, leaf.dtype) != (other.shape, other.dtype):
        return [f"{name} must be {other.dtype} of {other.shape}; got {leaf.dtype} of {leaf.shape}"]

    numbers = actual.numbers(name).view(-1)
    expected_numbers = _translated(expected, name, actual)
    wrong = (numbers != expected_numbers).nonzero()
    if len(wrong) == 0:
        return []
    position = int(wrong[0])
    element = element_text(name, leaf.shape, position)
    got = _origin_text(actual, int(numbers[position]))
    wanted = _origin_text(expected, int(expected.numbers(name).view(-1)[position]))
    return [f"{element} must be {wanted}; got {got}, and {len(wrong) - 1} more elements differ"]


def _translated(expected: Trace, name: str, actual: Trace) -> Tensor:
    """Return the numbers of a leaf, flat, in the row of numbers of another trace."""
    firsts: dict[Any, int] = {}
    for range_ in actual.numbering.ranges:
        weight = actual.weights[range_.source]
        firsts[weight.name, weight.shape, range_.dtypes] = range_.first

    numbers = expected.numbers(name).view(-1)
    indices = expected.numbering.range_indices(numbers)
    result = numbers.clone()
    for index in indices.unique().tolist():
        if index < 0:
            continue
        range_ = expected.numbering.ranges[index]
        weight = expected.weights[range_.source]
        first = firsts.get((weight.name, weight.shape, range_.dtypes))
        is_in_range = indices == index
        if first is None:
            result[is_in_range] = _UNKNOWN
        else:
            result[is_in_range] += first - range_.first
    return result


def _origin_text(traced: Trace, number: int) -> str:
    """Return the origin of an element with a number, in words."""
    if number < 0:
        return "a constant" if number == CONSTANT else "as before the load"
    index = int(traced.numbering.range_indices(torch.tensor([number])))
    range_ = traced.numbering.ranges[index]
    weight = traced.weights[range_.source]
    text = element_text(weight.name, weight.shape, number - range_.first)
    for dtype in range_.dtypes[1:]:
        text += f" as {str(dtype).removeprefix('torch.')}"
    return text
