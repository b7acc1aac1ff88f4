"""Which combinations of options a test tries: all in a thorough run."""

import os
from collections import Counter
from itertools import combinations, product

THOROUGH = os.environ.get("FSHARD_EXAMPLES") == "thorough"


def in_pairs(*kinds):
    """Return combinations in which any two options of different kinds occur together; all of them in a thorough run."""
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
