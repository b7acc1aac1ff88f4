"""Drawn chains of moves and casts; the oracle is the same chain on random weights, to the bit."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs

MOST_ELEMENTS = 200
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@st.composite
def _shapes(draw):
    return tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))


def _permute(draw, x, other):
    return x.permute(draw(st.permutations(range(x.ndim))))


def _reshape(draw, x, other):
    sizes = []
    rest = x.numel()
    while rest > 1 and draw(st.booleans()):
        divisors = [size for size in range(1, rest + 1) if rest % size == 0]
        sizes.append(draw(st.sampled_from(divisors)))
        rest //= sizes[-1]
    return x.reshape(*sizes, rest)


def _narrow(draw, x, other):
    if x.ndim == 0:
        return x
    dim = draw(st.integers(0, x.ndim - 1))
    start = draw(st.integers(0, x.shape[dim] - 1))
    stop = draw(st.integers(start + 1, x.shape[dim]))
    step = draw(st.integers(1, 2))
    return x[(slice(None),) * dim + (slice(start, stop, step),)]


def _cat(draw, x, other):
    if x.ndim == 0:
        return torch.stack([x, other.reshape(-1)[0]])
    dim = draw(st.integers(0, x.ndim - 1))
    parts = [*x.chunk(draw(st.integers(1, 3)), dim)]
    count = min(other.numel(), 3)
    shape = [*x.shape]
    shape[dim] = 1
    parts.append(other.reshape(-1)[count - 1].expand(shape))
    order = draw(st.permutations(range(len(parts))))
    return torch.cat([parts[index] for index in order], dim)


def _stack(draw, x, other):
    return torch.stack([x, x.flip(*range(x.ndim)) if x.ndim else x], draw(st.integers(0, x.ndim)))


def _index(draw, x, other):
    if x.ndim == 0:
        return x
    dim = draw(st.integers(0, x.ndim - 1))
    index = draw(st.lists(st.integers(0, x.shape[dim] - 1), min_size=1, max_size=5))
    return x.index_select(dim, torch.tensor(index))


def _pad(draw, x, other):
    if x.ndim == 0:
        return x
    return torch.nn.functional.pad(x, (draw(st.integers(0, 2)), draw(st.integers(0, 2))))


def _roll(draw, x, other):
    if x.ndim == 0:
        return x
    return x.roll(draw(st.integers(-2, 2)), draw(st.integers(0, x.ndim - 1)))


def _cast(draw, x, other):
    return x.to(draw(st.sampled_from(DTYPES)))


def _expand(draw, x, other):
    return x.expand(draw(st.integers(1, 3)), *x.shape)


def _write(draw, x, other):
    y = torch.zeros(x.shape, dtype=x.dtype)
    y.copy_(x)
    if x.ndim and x.shape[0] > 1:
        y[draw(st.integers(0, x.shape[0] - 1))] = other.reshape(-1)[0]
    return y


STEPS = [_permute, _reshape, _narrow, _cat, _stack, _index, _pad, _roll, _cast, _expand, _write]


class _Recording:
    """Draws that are repeated: the trace and the real load take the same steps."""

    def __init__(self, draw):
        self.draw = draw
        self.drawn = []
        self.position = 0

    def __call__(self, strategy):
        if self.position == len(self.drawn):
            self.drawn.append(self.draw(strategy))
        self.position += 1
        return self.drawn[self.position - 1]


def _chain(draw, steps, x, other):
    for step in steps:
        x = step(draw, x, other)
        if x.numel() > MOST_ELEMENTS:
            x = x.reshape(-1)[:MOST_ELEMENTS]
    return x


@given(
    data=st.data(),
    shape=_shapes(),
    other_shape=_shapes(),
    steps=st.lists(st.sampled_from(STEPS), max_size=8),
    source_dtype=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES),
)
def test_trace_of_drawn_moves_is_the_real_load(
    data, shape, other_shape, steps, source_dtype, dtype
):
    draw = _Recording(data.draw)
    weights = {
        "a": torch.randn(shape).to(source_dtype),
        "b": torch.randn(other_shape).to(source_dtype),
    }
    expected = _chain(draw, steps, weights["a"], weights["b"]).to(dtype)
    target = {"w": torch.full_like(expected, 7.0)}

    def load(weights):
        draw.position = 0
        target["w"].copy_(_chain(draw, steps, *dict(weights).values()))

    traced = fs.refit.trace(load, weights, target, unused="*")
    assert bool((target["w"] == 7.0).all())
    traced.copy(weights, target)
    is_constant = traced.numbers("w") == -2
    assert torch.equal(target["w"][~is_constant], expected[~is_constant])
    assert bool((target["w"][is_constant] == 7.0).all())
    assert traced.targets["w"].unwritten == 0
    sizes = traced.targets["w"].origins.sizes.sum() + is_constant.sum()
    assert sizes == prod(expected.shape)
