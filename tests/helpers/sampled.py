"""Choose the cases of a table: some in each run, all of them in a thorough one.

`make thorough` is a thorough run.
"""

import os
from collections import Counter
from itertools import combinations, product

import pytest

THOROUGH = os.environ.get("FSHARD_EXAMPLES") == "thorough"


def thorough(*case):
    """Return a case of a table that only a thorough run tries: it takes long, and others would fail
    with it.
    """
    return pytest.param(*case, marks=pytest.mark.thorough)


def examples(count):
    """Return how many examples hypothesis draws of a property whose examples take long.

    Every run draws others. A thorough run draws ten times as many.
    """
    return 10 * count if THOROUGH else count


def in_pairs(*kinds):
    """Return combinations in which any two options of different kinds occur together; all of them
    in a thorough run.
    """
    every = [*product(*map(tuple, kinds))]
    pairs = {one: {*combinations(enumerate(one), 2)} for one in every}
    left = set().union(*pairs.values())
    chosen = []
    used = Counter()
    while left and not THOROUGH:
        best = max(
            every,
            key=lambda one: (len(pairs[one] & left), -sum(used[item] for item in enumerate(one))),
        )
        chosen.append(best)
        used.update(enumerate(best))
        left -= pairs[best]
    return chosen or every
