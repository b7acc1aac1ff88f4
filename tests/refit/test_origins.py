"""Boxes of origins against the numbers that they are made of, and those of blocks against masks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fshard.refit.numbers import ElementNumbers, Shadow, Weight
from fshard.refit.origins import SourceBox, numbers_of, origins_of

WEIGHTS = [
    Weight(("a",), (3, 4), torch.float32),
    Weight(("b",), (5,), torch.float32),
    Weight(("c",), (), torch.float32),
    Weight(("d",), (2, 2, 3), torch.float32),
]
ELEMENTS = 12 + 5 + 1 + 12


@st.composite
def _numbers(draw):
    """Draw numbers of a target: regular ones, some of which are replaced."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    count = torch.Size(shape).numel()
    steps = [draw(st.integers(-3, 12)) for _ in shape]
    numbers = torch.tensor(draw(st.integers(0, ELEMENTS - 1)))
    for length, step in zip(shape, steps, strict=True):
        numbers = numbers[..., None] + torch.arange(length) * step
    numbers = numbers.remainder(ELEMENTS)
    for _ in range(draw(st.integers(0, 3))):
        if count:
            position = draw(st.integers(0, count - 1))
            numbers.view(-1)[position] = draw(st.integers(-2, ELEMENTS - 1))
    return numbers


@given(numbers=_numbers())
def test_origins_have_all_numbers(numbers):
    numbering = ElementNumbers(WEIGHTS)
    origins = origins_of(numbers, numbering)
    assert torch.equal(numbers_of(origins, numbers.shape, numbering), numbers)
    assert int(origins.sizes.sum()) == int((numbers >= 0).sum())
    for along in origins.along.tolist():
        used = [dim for dim in along if dim >= 0]
        assert len({*used}) == len(used)


@given(numbers=_numbers(), data=st.data())
def test_box_within_a_block_has_the_elements_of_it(numbers, data):
    numbering = ElementNumbers(WEIGHTS)
    blocks = {}
    inside = torch.zeros(ELEMENTS, dtype=torch.bool)
    for range_ in numbering.ranges:
        weight = WEIGHTS[range_.source]
        block = []
        for length in weight.shape:
            start = data.draw(st.integers(0, length))
            block.append((start, data.draw(st.integers(start, length))))
        blocks[weight.name] = block
        mask = torch.zeros(weight.shape, dtype=torch.bool)
        mask[tuple([slice(start, stop) for start, stop in block])] = True
        inside[range_.first :][: mask.numel()] = mask.view(-1)

    expected = torch.where((numbers >= 0) & inside[numbers.clamp(min=0)], numbers, -1)
    actual = torch.full_like(numbers, -1)
    sources = {}
    for range_ in numbering.ranges:
        weight = WEIGHTS[range_.source]
        size = torch.Size(weight.shape).numel()
        sources[weight.name] = torch.arange(range_.first, range_.first + size).view(weight.shape)
    for box in origins_of(numbers, numbering).boxes(numbering.ranges, WEIGHTS):
        part = box.within(blocks[box.source])
        if part is not None:
            actual[part.target] = part.read(sources[part.source])
    assert torch.equal(actual, expected)


@given(numbers=_numbers())
def test_shadow_encodes_numbers(numbers):
    flat = numbers.reshape(-1)
    shadow = Shadow(len(flat), 4, dense=flat.repeat(20))
    expected = flat.repeat(20)
    shadow.length = len(expected)
    shadow.encode()
    assert torch.equal(shadow.numbers, expected)


def test_origins_of_permuted_columns_are_columns():
    numbering = ElementNumbers([Weight(("w",), (100, 80), torch.float32)])
    index = torch.randperm(80)
    numbers = torch.arange(8000).view(100, 80)[:, index]
    assert len(origins_of(numbers, numbering).target) <= 80
    assert isinstance(
        next(origins_of(numbers, numbering).boxes(numbering.ranges, numbering.weights)), SourceBox
    )
