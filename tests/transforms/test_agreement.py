"""The law by which devices find that inputs differ, where it is exact, and the row in which a step
sends it.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fshard.transforms.agreement import difference


def group_of(size, index, base=0):
    return SimpleNamespace(
        base=base, index=index, size=size, world=SimpleNamespace(has_values=True)
    )


def differences(values, base=0):
    return [
        difference(value, group_of(len(values), index, base)) for index, value in enumerate(values)
    ]


@given(st.lists(st.lists(st.integers(0, 2), max_size=2), min_size=1, max_size=9))
def test_differences_add_up_to_zero_if_and_only_if_all_are_equal(values):
    assert (sum(differences(values)) == 0) == all(value == values[0] for value in values)


@given(
    st.lists(st.sampled_from("ab"), min_size=2, max_size=5),
    st.lists(st.sampled_from("ab"), min_size=2, max_size=5),
)
def test_differences_of_two_groups_do_not_cancel(values, others):
    equal = len({*values}) == len({*others}) == 1
    assert (sum(differences(values)) + sum(differences(others, base=1)) == 0) == equal


SEED = next(
    seed
    for seed in range(99)
    if difference(seed, group_of(2, 0)) % 2 and difference(seed, group_of(2, 0)) > 2**31
)
"""A value whose hash is large and odd: its products are the first that float64 rounds."""


@pytest.mark.parametrize(("size", "exact"), [(2**20 + 1, True), (2**21, True), (2**22, False)])
def test_differences_are_exact_in_any_order_up_to_2_to_the_21_devices(size, exact):
    row = torch.full((size,), difference(SEED, group_of(size, 1)), dtype=torch.float64)
    row[0] = difference(SEED, group_of(size, 0))
    sums = [
        row.cumsum(0)[-1],
        row.flip(0).cumsum(0)[-1],
        row.sum(),
        row.roll(size // 3).view(1, -1).sum(1)[0],
    ]
    assert all(total == 0 for total in sums) == exact
