"""Draw a schedule's events: a row per device, time to the right, as text and as SVG.

    device 0 │ F0 F1 ·  ·  B0─── ·  B1───
    device 1 │ ·  F0 B0─── F1 B1─── ·  ·

Where a device has several stages, the stage is added: 2F0. Text is truncated at the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from html import escape
from itertools import chain
from math import floor

from fshard.pipeline.schedule.actions import COMPUTE, Action, Kind
from fshard.pipeline.schedule.rows import ScheduleRows
from fshard.pipeline.schedule.trace import Event, Number, rounded

Events = Sequence[Sequence[Event]]
"""The events of each device."""

_MAX_COLUMNS = 256


# -- text ------------------------------------------------------------------------------------------


def draw_text(schedule: ScheduleRows, events: Events, summary: str) -> str:
    """Draw the computation of devices as text."""
    unit = _unit(events)
    labels = _Labels(schedule, events)
    columns = _column(_makespan(events), unit)
    total = min(columns, _MAX_COLUMNS)

    lines = [_title(schedule)]
    for device, row in enumerate(events):
        cells = _draw_row(row, unit, labels, total)
        if columns > total:
            cells += "…"
        lines.append(f"{labels.device(device)} │ {cells}".rstrip())
    return "\n".join([*lines, summary])


def _draw_row(row: Sequence[Event], unit: Number, labels: _Labels, total: int) -> str:
    """Draw the computations of a device in so many columns, with a dot in each idle one."""
    width = labels.width + 1
    idle_cell = "·".ljust(width)
    cells = ""
    column = 0
    for event in row:
        start = _column(event.start, unit)
        end = _column(event.end, unit)
        is_drawn = event.action.kind in COMPUTE and start < end <= total
        if is_drawn:
            cells += idle_cell * (start - column)
            fill = " " if end == start + 1 else "─"
            cells += labels.action(event.action).ljust(width * (end - start) - 1, fill) + " "
            column = end
    return cells + idle_cell * (total - column)


def _column(time: Number, unit: Number) -> int:
    """Round a time to the nearest column."""
    return floor(time / unit + Fraction(1, 2))


# -- SVG -------------------------------------------------------------------------------------------

# Pixels.
_LETTER = 7.3  # the width of a letter of 12 px
_LINE = 18.0  # the height of a line of text
_ROW = 26.0  # the height of a device's row
_BAR = 5.0  # the height of the bar of communication below it
_WIDTH = 1000.0  # of the drawing, if it would be wider
_TOP = _LINE + 6  # below the title
_PITCH = _ROW + _BAR + 3  # from row to row

_INK = "#16191d"  # text on the colours
_PAGE = "currentColor"  # other text: the colour of the page's text
_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"

_MESSAGE = ("#a9b8c6", "message")
_COLOURS = {  # of each kind, and its word in the legend
    Kind.F: ("#7cb7e8", "forward"),
    Kind.B: ("#86cf91", "backward"),
    Kind.I: ("#6fcdc6", "input gradient"),
    Kind.W: ("#f4b06a", "weight gradient"),
    Kind.SEND_F: _MESSAGE,
    Kind.RECV_F: _MESSAGE,
    Kind.SEND_B: _MESSAGE,
    Kind.RECV_B: _MESSAGE,
    Kind.UNSHARD: ("#b9a4ea", "unshard"),
    Kind.REDUCE: ("#ee9aa7", "reduce"),
}


def draw_svg(schedule: ScheduleRows, events: Events, summary: str) -> str:
    """Draw all actions that take time as SVG: computation, and below it communication."""
    unit = _unit(events)
    labels = _Labels(schedule, events)
    columns = min(_makespan(events) / unit, _MAX_COLUMNS)
    last_time = columns * unit
    margin = _LETTER * len(labels.device(schedule.devices - 1)) + 12
    scale = max(4.0, min(_LETTER * labels.width + 7, _WIDTH / max(columns, 1)))  # of a column

    # The rows of devices, from the top.
    parts = [_draw_word(_title(schedule), 0, 12, bold=True)]
    kinds = set[Kind]()
    for device, row in enumerate(events):
        top = _TOP + device * _PITCH
        parts.append(_draw_word(labels.device(device), 0, top + _ROW / 2 + 4))
        for event in row:
            if event.start < event.end <= last_time:
                x = margin + scale * float(event.start / unit)
                width = scale * float((event.end - event.start) / unit)
                parts.append(_draw_event(event, labels, x, top, width))
                kinds.add(event.action.kind)

    # The legend of the kinds that were drawn, and the summary.
    bottom = _TOP + schedule.devices * _PITCH + 6
    legend, legend_end = _draw_legend(kinds, margin, bottom)
    parts += legend
    if last_time < _makespan(events):
        summary += f"; drawn up to {rounded(last_time)}"
    parts.append(_draw_word(summary, margin, bottom + 12 + _LINE))

    rows_end = margin + scale * float(columns)
    summary_end = margin + _LETTER * len(summary)
    width = max(rows_end, legend_end, summary_end) + 20
    height = bottom + 54
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -8 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" style="max-width:100%;height:auto" role="img" '
        f'aria-label="{escape(_title(schedule))}" font-family="{_FONT}" font-size="12">'
        f"{''.join(parts)}</svg>"
    )


def _draw_event(event: Event, labels: _Labels, x: float, top: float, width: float) -> str:
    """Draw a box with a tooltip, and a label if the box has space for it."""
    action = event.action
    is_computation = action.kind in COMPUTE
    colour, word = _COLOURS[action.kind]
    colour = _lighter(colour, labels.shades[action.stage])
    y, height = (top, _ROW) if is_computation else (top + _ROW, _BAR)

    times = f"{rounded(event.start)} to {rounded(event.end)}"
    box = (
        f"<g><title>{action}: {word}, {times}, device {event.device}</title>"
        f'<rect x="{x:g}" y="{y:g}" width="{max(width - 1, 0.5):g}" height="{height:g}" rx="2" '
        f'fill="{colour}"/>'
    )
    label = labels.action(action)
    if is_computation and _LETTER * len(label) < width:
        box += _draw_word(label, x + (width - 1) / 2, y + height / 2 + 4.3, _INK, "middle")
    return box + "</g>"


def _draw_legend(kinds: set[Kind], x: float, y: float) -> tuple[list[str], float]:
    """Draw the colours of these kinds and their words; return the x at the end, too."""
    entries: list[tuple[str, str]] = []
    for kind, entry in _COLOURS.items():
        if kind in kinds and entry not in entries:
            entries.append(entry)

    parts: list[str] = []
    for colour, word in entries:
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(_draw_word(word, x + 17, y + 10.5))
        x += _LETTER * len(word) + 34
    return parts, x


def _draw_word(
    text: str, x: float, y: float, colour: str = _PAGE, anchor: str = "start", *, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}"{weight}>'
        f"{escape(text)}</text>"
    )


def _lighter(colour: str, share: float) -> str:
    """Mix a colour with white: an opacity would let a dark page through."""
    channels = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    mixed = [round(255 - share * (255 - channel)) for channel in channels]
    return "#" + "".join([f"{channel:02x}" for channel in mixed])


# -- both ------------------------------------------------------------------------------------------


class _Labels:
    """The labels of devices and actions, and the shade of each stage's colours.

    Actions are labelled with their stage where a device has several.
    """

    def __init__(self, schedule: ScheduleRows, events: Events) -> None:
        self._has_stages = len({*schedule.placement}) < schedule.stages
        self._digits = len(str(schedule.devices - 1))

        labels: list[str] = []
        for event in _computations(events):
            labels.append(self.action(event.action))
        self.width = max(map(len, labels), default=1)

        # From 1 for the first stage of a device to 0.55 for the last one.
        self.shades: list[float] = []
        for stage, device in enumerate(schedule.placement):
            stages_before = schedule.placement[:stage].count(device)
            most_before = schedule.placement.count(device) - 1
            self.shades.append(1 - 0.45 * stages_before / max(most_before, 1))

    def action(self, action: Action) -> str:
        """Return the label of an action."""
        label = str(action)
        return label if self._has_stages else label.removeprefix(str(action.stage))

    def device(self, device: int) -> str:
        """Return the label of a device; all are equally long."""
        return f"device {device:{self._digits}}"


def _title(schedule: ScheduleRows) -> str:
    return (
        f"{schedule.name}: {schedule.microbatches} microbatches, "
        f"{schedule.stages} stages on {schedule.devices} devices"
    )


def _computations(events: Events) -> list[Event]:
    return [event for event in chain(*events) if event.action.kind in COMPUTE]


def _makespan(events: Events) -> Number:
    ends = [event.end for event in chain(*events)]
    return max(ends, default=0)


def _unit(events: Events) -> Number:
    """Return the time per column: the shortest action, but at least a quarter of the median.

    So one action that takes almost no time does not make all others very wide.
    """
    lengths = [event.end - event.start for event in _computations(events)]
    lengths = sorted([length for length in lengths if length > 0])
    if not lengths:
        return 1
    median = lengths[len(lengths) // 2]
    return max(lengths[0], Fraction(1, 4) * median)
