"""`Bar`: progress and metrics of training, in one line.

    step  120 of 300 ━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ loss 1.234  5,678 samples/s  412 MiB  0:00:31 left

In a terminal and in Jupyter the line is updated; in a file or pipe there is a line per tenth.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from time import perf_counter
from typing import Any, TextIO


class Bar:
    """Shows the last reported step.

    Args:
        total: number of steps; None: unknown, and no bar is drawn.
        file: of the output; None: standard output.
        update: True writes over the line, False adds one per tenth of the steps; None: by what shows the output.
        clock: seconds.

    >>> bar = Bar(2, update=False, clock=iter([0.0, 1.0, 2.0]).__next__)
    >>> bar.write(1, {"loss": 0.5, "samples_per_second": 1234.5, "memory": 3 << 20})
    step 1 of 2  loss 0.5  1,234 samples/s  3 MiB  0:00:01 left
    >>> bar.write(2, {"loss": 0.25})
    step 2 of 2  loss 0.25  0:00:02
    """

    def __init__(
        self,
        total: int | None = None,
        *,
        file: TextIO | None = None,
        update: bool | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.total = total
        self._file, self._clock = file, clock
        shown: Any = (
            file or sys.stdout
        )  # in a terminal and in a notebook's cell a line can be written over
        can_update = shown.isatty() or type(shown).__module__.startswith("ipykernel")
        self._update = can_update if update is None else update
        self._began, self._first = clock(), 0
        self._tenth, self._width, self._last = -1, 0, ""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show a step."""
        self._first = self._first or step
        words = [
            f"{name} {x:.4g}" for name, x in values.items() if name not in {*_FORMATS, *_QUIET}
        ]
        words += [form(values[name]) for name, form in _FORMATS.items() if name in values]
        seconds = self._clock() - self._began
        if self.total is None or step >= self.total:
            words.append(str(timedelta(seconds=int(seconds))))
        else:
            remaining = seconds / (step - self._first + 1) * (self.total - step)
            words.append(f"{timedelta(seconds=int(remaining))} left")
        tenth = 10 * step // self.total if self.total else step // 100
        if self._update:
            bar = "" if self.total is None else f" {'━' * (_WIDTH * step // self.total):╌<{_WIDTH}}"
            line = f"{self._count(step)}{bar} {'  '.join(words)}"
            self._print("\r" + line.ljust(self._width))
            self._width = len(line)
            return
        self._last = "  ".join([self._count(step), *words]) + "\n"
        if tenth != self._tenth:
            self._tenth = tenth
            self._print(self._last)
            self._last = ""

    def close(self) -> None:
        """Leave the last line as it is."""
        self._print("\n" if self._width else self._last)
        self._width, self._last = 0, ""

    def _print(self, text: str) -> None:
        file = self._file or sys.stdout
        file.write(text)
        file.flush()

    def _count(self, step: int) -> str:
        return (
            f"step {step:,}"
            if self.total is None
            else f"step {step:{len(f'{self.total:,}')},} of {self.total:,}"
        )


def _bytes(size: float) -> str:
    unit = next(power for power in (0, 1, 2, 3, 4) if size < 1024 ** (power + 1) or power == 4)
    return f"{size / 1024**unit:.3g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


_FORMATS: dict[str, Callable[[float], str]] = {
    "samples_per_second": lambda rate: f"{int(rate):,} samples/s",
    "memory": _bytes,
}
_QUIET = {"samples", "finite", "weight"}
_WIDTH = 24
