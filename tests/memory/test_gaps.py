"""Plans of gaps against an exhaustive search, and their time."""

from __future__ import annotations

import time
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fshard.memory.gaps import Gap, NotEnoughError, bytes_beyond, choose_gaps


def cost(gaps: list[Gap]) -> float:
    return sum(gap.cost for gap in gaps)


def needs_with(chosen: list[Gap], needs: list[int]) -> list[int]:
    """The bytes of each event, tensor by tensor."""
    return [
        need - sum(gap.size for gap in chosen if event in gap.absence or event + len(needs) in gap.absence)
        for event, need in enumerate(needs)
    ]


def least_cost(gaps: list[Gap], needs: list[int], limit: int) -> float:
    """The least cost of all sets of gaps that keep the limit."""
    subsets = (list(subset) for count in range(len(gaps) + 1) for subset in combinations(gaps, count))
    return min(cost(subset) for subset in subsets if max(needs_with(subset, needs)) <= limit)


@st.composite
def problems(draw: st.DrawFn, *, equal: bool) -> tuple[list[Gap], list[int], int]:
    """At most 5 tensors with at most 10 uses in all, and a limit that can be kept."""
    events, tensors = draw(st.integers(6, 12)), draw(st.integers(2, 5))
    gaps, total = list[Gap](), 0
    for number in range(tensors):
        size, price = (4, 1.0) if equal else (draw(st.integers(1, 9)), draw(st.sampled_from([1.0, 2.0, 3.0])))
        total += size
        uses = sorted(draw(st.sets(st.integers(0, events - 1), min_size=1, max_size=10 // tensors)))
        pairs = zip(uses, [*uses[1:], uses[0] + events], strict=True)
        gaps += [Gap(f"tensor {number}", size, begin, end, size * price) for begin, end in pairs]
    extra = [0 if equal else draw(st.integers(0, 6)) for _ in range(events)]
    needs = [total + more for more in extra]
    lowest = max(needs_with(gaps, needs))
    return gaps, needs, draw(st.integers(lowest, max(needs)))


@given(problems(equal=True))
def test_plans_of_equal_tensors_cost_the_least(problem: tuple[list[Gap], list[int], int]):
    gaps, needs, limit = problem
    chosen = choose_gaps(gaps, needs, limit)
    assert max(needs_with(chosen, needs)) <= limit
    assert cost(chosen) == least_cost(gaps, needs, limit)


@given(problems(equal=False))
def test_other_plans_cost_at_most_a_fifth_more(problem: tuple[list[Gap], list[int], int]):
    gaps, needs, limit = problem
    chosen = choose_gaps(gaps, needs, limit)
    assert max(needs_with(chosen, needs)) <= limit
    assert cost(chosen) <= 1.2 * least_cost(gaps, needs, limit) + 1e-9


@given(problems(equal=False))
def test_bytes_beyond_are_those_of_the_tensors_that_are_there(problem: tuple[list[Gap], list[int], int]):
    gaps, needs, limit = problem
    assert bytes_beyond(gaps, needs, limit).tolist() == [need - limit for need in needs_with(gaps, needs)]


@given(problems(equal=False))
def test_a_limit_that_cannot_be_kept_names_the_event(problem: tuple[list[Gap], list[int], int]):
    gaps, needs, _ = problem
    least = needs_with(gaps, needs)
    assume(max(least) > 0)
    with pytest.raises(NotEnoughError) as raised:
        choose_gaps(gaps, needs, max(least) - 1)
    assert (raised.value.event, raised.value.need) == (least.index(max(least)), max(least))


def test_plans_of_a_thousand_units_take_a_second():
    """Each unit is used in the forward and in the backward; two thirds of the parameters leave."""
    events, sizes = 2001, [1000 * (1 + index * 7919 % 9) for index in range(1000)]
    gaps = [Gap(f"unit {i}", size, i, 2000 - i, size) for i, size in enumerate(sizes)]
    gaps += [Gap(f"unit {i}", size, 2000 - i, events + i, 2.0 * size) for i, size in enumerate(sizes)]
    needs, limit = [sum(sizes)] * events, sum(sizes) // 3
    began = time.process_time()
    chosen = choose_gaps(gaps, needs, limit)
    assert time.process_time() - began < 3  # a third of it on an idle machine
    assert int(bytes_beyond(chosen, needs, limit).max()) <= 0
