"""What is wrong with numbers and words that were given, as parts of one sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def not_whole(least: int, **given: Any) -> list[str]:
    """Return a complaint of each that is no whole number from `least` on.

    >>> not_whole(1, r=0, slices=8, seed=True)
    ['r is a whole number from 1 on, not 0', 'seed is a whole number from 1 on, not True']
    """
    wrong = {k: x for k, x in given.items() if not isinstance(x, int) or isinstance(x, bool) or x < least}
    return [f"{name} is a whole number from {least} on, not {x!r}" for name, x in wrong.items()]


def not_among(choices: Sequence[Any], **given: Any) -> list[str]:
    """Return a complaint of each that is none of the choices.

    >>> not_among(("skip", "zero"), unused="none")
    ['unused is "skip" or "zero", not \\'none\\'']
    """
    *others, last = [json.dumps(x) if isinstance(x, str) else repr(x) for x in choices]
    wrong = {k: x for k, x in given.items() if isinstance(x, bool) or x not in choices}
    return [f"{name} is {', '.join(others)} or {last}, not {x!r}" for name, x in wrong.items()]
