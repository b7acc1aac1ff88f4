"""`Draws`: the seeds of generators, which two runs in one process have unlike in their steps.

    before the first batch or forward    run 0   seed 5    run 1   seed 5
    after it                             run 0   seed 5    run 1   seed 1005

What is drawn in a step differs in the two runs, and so does the loss, which shows it. What is drawn
before is alike: parameters, and the copies that a script makes of them.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from fshard.testing.scripts.replacing import Replacements


class Draws:
    """The seeds of the generators that scripts draw from.

    Args:
        value: the seed before the script sets one.
        shift: is added to the seeds after `begin_steps`.
    """

    def __init__(self, value: int, shift: int = 0) -> None:
        self._value = value
        self._shift = shift
        self._has_begun = False

    def seed(self) -> None:
        """Seed the generators."""
        import numpy as np

        torch.manual_seed(self._value)
        random.seed(self._value)
        np.random.seed(self._value % 2**32)

    def begin_steps(self) -> None:
        """Shift the seeds, from the first batch or forward on."""
        if self._shift and not self._has_begun:
            self._has_begun = True
            self.seed()  # by the functions of the table, which add the shift

    def table(self) -> Replacements:
        """Return the replacements of the functions that seed."""
        names = ("torch:manual_seed", "torch.random:manual_seed", "random:seed")
        return dict.fromkeys([*names, "numpy.random:seed"], self._shifted)

    def _shifted(self, original: Any) -> Any:
        def seed(value: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._has_begun and isinstance(value, int):
                value = value + self._shift
            return original(value, *args, **kwargs)

        return seed
