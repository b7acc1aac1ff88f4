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
        update: True writes over the line, False adds one per tenth of the steps; None: by what
            shows the output.
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
        self._file = file
        self._clock = clock
        self._start = clock()
        self._first: int | None = None
        """The first step that is shown, which may be one of a continued run."""
        self._line_update = _can_update(file or sys.stdout) if update is None else update
        self._line_width = 0
        """Of the line that the next one is written over."""
        self._last_tenth = -1
        self._skipped_line = ""
        """The last line, if it has not been printed."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show a step."""
        if self._first is None:
            self._first = step
        words = [*_words(values), self._time(step, self._first)]
        if self._line_update:
            self._write_over(step, words)
        else:
            self._write_line(step, words)

    def close(self) -> None:
        """Leave the last line as it is."""
        self._print("\n" if self._line_width else self._skipped_line)
        self._line_width = 0
        self._skipped_line = ""

    def _write_over(self, step: int, words: list[str]) -> None:
        """Write a line with a bar over the last one."""
        bar = ""
        if self.total is not None:
            filled = "━" * (_WIDTH * step // self.total)
            bar = f" {filled:╌<{_WIDTH}}"
        line = f"{self._count(step)}{bar} {'  '.join(words)}"
        self._print("\r" + line.ljust(self._line_width))
        self._line_width = len(line)

    def _write_line(self, step: int, words: list[str]) -> None:
        """Add a line, if the step is the first of a tenth; of a hundred without a total."""
        line = "  ".join([self._count(step), *words]) + "\n"
        tenth = 10 * step // self.total if self.total else step // 100
        if tenth == self._last_tenth:
            self._skipped_line = line
            return
        self._last_tenth = tenth
        self._skipped_line = ""
        self._print(line)

    def _time(self, step: int, first: int) -> str:
        """Return the remaining time, or the time since the beginning if that is unknown or 0."""
        seconds = self._clock() - self._start
        if self.total is None or step >= self.total:
            return str(timedelta(seconds=int(seconds)))
        seconds_per_step = seconds / (step - first + 1)
        remaining = seconds_per_step * (self.total - step)
        return f"{timedelta(seconds=int(remaining))} left"

    def _count(self, step: int) -> str:
        if self.total is None:
            return f"step {step:,}"
        width = len(f"{self.total:,}")
        return f"step {step:{width},} of {self.total:,}"

    def _print(self, text: str) -> None:
        file = self._file or sys.stdout
        file.write(text)
        file.flush()


def _can_update(file: Any) -> bool:
    """Return True if a line can be written over: in a terminal, and in a notebook's cell."""
    return file.isatty() or type(file).__module__.startswith("ipykernel")


def _words(values: Mapping[str, float]) -> list[str]:
    """Return the values as words, those with a format of their own last."""
    words: list[str] = []
    for name, x in values.items():
        if name not in _FORMATS and name not in _QUIET:
            words.append(f"{name} {x:.4g}")
    for name, form in _FORMATS.items():
        if name in values:
            words.append(form(values[name]))
    return words


def _bytes(size: float) -> str:
    """Return a number of bytes in the largest unit of which there is one.

    >>> _bytes(3 << 20), _bytes(1000)
    ('3 MiB', '1e+03 bytes')
    """
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


_FORMATS: dict[str, Callable[[float], str]] = {
    "samples_per_second": lambda rate: f"{int(rate):,} samples/s",
    "memory": _bytes,
}
_QUIET = {"samples", "finite", "weight"}
"""Metrics of a step that are not shown."""
_WIDTH = 24
"""Characters of the bar."""
