"""`Bar`: progress and metrics of training, in one line.

    step  120 of 300 ━━━━━━━━╺━━━━━━━━━━━ loss 1.234  5,678 samples/s  412 MiB  0:00:31 left

In a terminal and in Jupyter the line is updated; in a file or pipe there is a line per tenth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # it is imported where a bar is shown
    from rich.console import Console, RenderableType


class Bar:
    """Shows the last reported step.

    Args:
        total: number of steps; None: unknown, and no bar is drawn.
        console: of the output; None: standard output.
        clock: seconds.

    >>> from rich.console import Console
    >>> bar = Bar(2, console=Console(width=80, force_terminal=False), clock=iter([0.0, 1.0, 2.0]).__next__)
    >>> bar.write(1, {"loss": 0.5, "samples_per_second": 1234.5, "memory": 3 << 20})
    step 1 of 2  loss 0.5  1,234 samples/s  3 MiB  0:00:01 left
    >>> bar.write(2, {"loss": 0.25})
    step 2 of 2  loss 0.25  0:00:02
    """

    def __init__(
        self, total: int | None = None, *, console: Console | None = None, clock: Callable[[], float] = perf_counter
    ) -> None:
        from rich.console import Console

        self.total = total
        self._console, self._clock = console or Console(highlight=False), clock
        self._screen: _Screen | None = None
        self._began, self._before = clock(), 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show a step."""
        if self._screen is None:
            self._screen, self._before = _screen(self._console), step - 1
        self._screen.show(step, self.total, [*_words(values), self._time(step)])

    def _time(self, step: int) -> str:
        """Return the remaining time, if known, else the elapsed time."""
        spent = self._clock() - self._began
        if self.total is None or step >= self.total:
            return _clock_face(spent)
        return f"{_clock_face(spent / (step - self._before) * (self.total - step))} left"

    def close(self) -> None:
        """Leave the last line as it is."""
        if self._screen is not None:
            self._screen.close()
            self._screen = None


def _words(values: Mapping[str, float]) -> list[str]:
    """Return the text of a step."""
    shown = {name: x for name, x in values.items() if name not in _FORMATS and name not in _QUIET}
    words = [f"{name} {x:.4g}" for name, x in shown.items()]
    return [*words, *(form(values[name]) for name, form in _FORMATS.items() if name in values)]


def _bytes(size: float) -> str:
    unit = next(at for at in (0, 1, 2, 3, 4) if size < 1024 ** (at + 1) or at == 4)
    return f"{size / 1024**unit:.3g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def _clock_face(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


_FORMATS: dict[str, Callable[[float], str]] = {
    "samples_per_second": lambda rate: f"{int(rate):,} samples/s",
    "memory": _bytes,
}
_QUIET = {"samples", "finite", "weight"}
_WIDTH = 24


class _Screen(Protocol):
    def show(self, step: int, total: int | None, words: list[str]) -> None: ...
    def close(self) -> None: ...


def _screen(console: Console) -> _Screen:
    if console.is_jupyter:
        return _Cell()
    return _Terminal(console) if console.is_terminal else _Lines(console)


def _count(step: int, total: int | None) -> str:
    return f"step {step:,}" if total is None else f"step {step:{len(f'{total:,}')},} of {total:,}"


class _Lines:
    """A line per tenth of the steps, and for the last one."""

    def __init__(self, console: Console) -> None:
        self._console, self._tenth = console, -1
        self._last: str | None = None

    def show(self, step: int, total: int | None, words: list[str]) -> None:
        tenth = 10 * step // total if total else step // 100
        self._last = "  ".join([_count(step, total), *words])
        if tenth != self._tenth:
            self._tenth = tenth
            self._print()

    def _print(self) -> None:
        if self._last is not None:
            self._console.print(self._last, soft_wrap=True)
        self._last = None

    def close(self) -> None:
        self._print()


class _Terminal:
    """One line that is updated; other output on this console is printed above it."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console, self._live = console, Live(console=console, auto_refresh=False)
        self._live.start()

    def show(self, step: int, total: int | None, words: list[str]) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        count, text = _count(step, total), "  ".join(words)
        room = min(_WIDTH, self._console.width - len(count) - len(text) - 3)
        line: RenderableType = Text(f"{count}  {text}", no_wrap=True, overflow="ellipsis")
        if total is not None and room > 3:
            line = Table.grid(padding=(0, 1))
            line.add_row(count, ProgressBar(total=total, completed=step, width=room), text)
        self._live.update(line, refresh=True)

    def close(self) -> None:
        self._live.stop()


class _Cell:
    """A display of a notebook's cell, written anew; rich would need a package of widgets for that."""

    def __init__(self) -> None:
        from IPython.display import display

        self._display: Any = display
        self._handle: Any = None

    def show(self, step: int, total: int | None, words: list[str]) -> None:
        bar = "" if total is None else f" {'━' * (_WIDTH * step // total):╌<{_WIDTH}}"
        line = {"text/plain": f"{_count(step, total)}{bar} {'  '.join(words)}"}
        if self._handle is None:
            self._handle = self._display(line, raw=True, display_id=True)
        else:
            self._handle.update(line, raw=True)

    def close(self) -> None:
        self._handle = None
