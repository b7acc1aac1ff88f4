"""Draw a schedule's events: a row per device, time to the right, as text and as SVG.

    device 0 │ F0 F1 ·  ·  B0─── ·  B1───
    device 1 │ ·  F0 B0─── F1 B1─── ·  ·

Where a device has several stages, the stage is added: 2F0. Text is truncated at the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from html import escape
from math import floor

from fshard.pipeline.schedule.actions import COMPUTE, Action, Kind
from fshard.pipeline.schedule.rows import ScheduleRows
from fshard.pipeline.schedule.trace import Event, Number, rounded

Events = Sequence[Sequence[Event]]
"""The events of each device."""

_MOST = 256  # columns
_INK, _PAGE = "#16191d", "currentColor"  # on the colours; the colour of the page's text
_COLOURS = {  # of each kind, and its word in the legend
    Kind.F: ("#7cb7e8", "forward"),
    Kind.B: ("#86cf91", "backward"),
    Kind.I: ("#6fcdc6", "input gradient"),
    Kind.W: ("#f4b06a", "weight gradient"),
    **dict.fromkeys((Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B), ("#a9b8c6", "message")),
    Kind.UNSHARD: ("#b9a4ea", "unshard"),
    Kind.REDUCE: ("#ee9aa7", "reduce"),
}
_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
# Pixels: of a 12 px letter, of a line of text, of a device's row, of the bar below it, of the full width.
_LETTER, _LINE, _ROW, _BAR, _WIDE = 7.3, 18.0, 26.0, 5.0, 1000.0


def draw_text(schedule: ScheduleRows, events: Events, summary: str) -> str:
    """Draw the computation of devices as text."""
    makespan, unit, labels = _makespan(events), _unit(events), _Labels(schedule, events)
    total = min(_column(makespan, unit), _MOST)
    lines = [_title(schedule)]
    for device, row in enumerate(events):
        line, column = f"{labels.device(device)} │ ", 0
        for event in row:
            start, end = _column(event.start, unit), _column(event.end, unit)
            if event.action.kind in COMPUTE and start < end <= total:
                fill = " " if end == start + 1 else "─"
                line += "·".ljust(labels.width + 1) * (start - column)
                line += (
                    labels.action(event.action).ljust((labels.width + 1) * (end - start) - 1, fill)
                    + " "
                )
                column = end
        line += "·".ljust(labels.width + 1) * (total - column)
        line += "…" if _column(makespan, unit) > total else ""
        lines.append(line.rstrip())
    return "\n".join([*lines, summary])


def draw_svg(schedule: ScheduleRows, events: Events, summary: str) -> str:
    """Draw all actions that take time as SVG: the computation of each device, and below it communication."""
    unit, labels = _unit(events), _Labels(schedule, events)
    columns = min(_makespan(events) / unit, _MOST)
    margin = _LETTER * len(labels.device(schedule.devices - 1)) + 12
    scale = max(4.0, min(_LETTER * labels.width + 7, _WIDE / max(columns, 1)))
    parts, kinds = [_text(_title(schedule), 0, 12, bold=True)], set[Kind]()
    for device, row in enumerate(events):
        top = _LINE + 6 + device * (_ROW + _BAR + 3)
        parts.append(_text(labels.device(device), 0, top + _ROW / 2 + 4))
        for event in row:
            if event.start < event.end <= columns * unit:
                x, width = (
                    margin + scale * float(event.start / unit),
                    scale * float((event.end - event.start) / unit),
                )
                kinds.add(event.action.kind)
                parts.append(_box(event, labels, x, top, width))
    bottom = _LINE + 6 + schedule.devices * (_ROW + _BAR + 3) + 6
    x = margin
    for colour, word in dict.fromkeys(_COLOURS[kind] for kind in _COLOURS if kind in kinds):
        parts.append(
            f'<rect x="{x:g}" y="{bottom:g}" width="12" height="12" rx="2" fill="{colour}"/>'
        )
        parts.append(_text(word, x + 17, bottom + 10.5))
        x += _LETTER * len(word) + 34
    if columns * unit < _makespan(events):
        summary += f"; drawn up to {rounded(columns * unit)}"
    parts.append(_text(summary, margin, bottom + 12 + _LINE))
    width = max(margin + scale * float(columns), x, margin + _LETTER * len(summary)) + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -8 {width:g} {bottom + 54:g}" width="{width:g}" '
        f'height="{bottom + 54:g}" style="max-width:100%;height:auto" role="img" aria-label="{escape(_title(schedule))}" '
        f'font-family="{_FONT}" font-size="12">'
        f"{''.join(parts)}</svg>"
    )


def _box(event: Event, labels: _Labels, x: float, top: float, width: float) -> str:
    action = event.action
    colour, word = _COLOURS[action.kind]
    y, height = (top, _ROW) if action.kind in COMPUTE else (top + _ROW, _BAR)
    colour = _lighter(colour, labels.shade[action.stage])
    box = (
        f"<g><title>{action}: {word}, {rounded(event.start)} to {rounded(event.end)}, device {event.device}</title>"
        f'<rect x="{x:g}" y="{y:g}" width="{max(width - 1, 0.5):g}" height="{height:g}" rx="2" fill="{colour}"/>'
    )
    label = labels.action(action)
    if action.kind in COMPUTE and _LETTER * len(label) < width:
        box += _text(label, x + (width - 1) / 2, y + height / 2 + 4.3, _INK, "middle")
    return box + "</g>"


def _lighter(colour: str, share: float) -> str:
    """Mix a colour with white: an opacity would let a dark page through."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - channel)):02x}" for channel in parts)


class _Labels:
    """Labels of devices and actions, with the stage where devices have several, and the share of each stage's colours."""

    def __init__(self, schedule: ScheduleRows, events: Events) -> None:
        self.has_stages = len({*schedule.placement}) < schedule.stages
        computed = {event.action for row in events for event in row if event.action.kind in COMPUTE}
        self.width = max((len(self.action(action)) for action in computed), default=1)
        self.digits = len(str(schedule.devices - 1))
        self.shade = [
            1
            - 0.45
            * schedule.placement[:stage].count(device)
            / max(schedule.placement.count(device) - 1, 1)
            for stage, device in enumerate(schedule.placement)
        ]

    def action(self, action: Action) -> str:
        return str(action) if self.has_stages else str(action)[len(str(action.stage)) :]

    def device(self, device: int) -> str:
        return f"device {device:{self.digits}}"


def _title(schedule: ScheduleRows) -> str:
    return f"{schedule.name}: {schedule.microbatches} microbatches, {schedule.stages} stages on {schedule.devices} devices"


def _makespan(events: Events) -> Number:
    return max((event.end for row in events for event in row), default=0)


def _unit(events: Events) -> Number:
    """Return the time per column: that of the shortest action, but at least a quarter of the median."""
    computed = (event for row in events for event in row if event.action.kind in COMPUTE)
    lengths = sorted(event.end - event.start for event in computed if event.end > event.start)
    return max(lengths[0], Fraction(1, 4) * lengths[len(lengths) // 2]) if lengths else 1


def _column(time: Number, unit: Number) -> int:
    return floor(time / unit + Fraction(1, 2))


def _text(
    text: str, x: float, y: float, colour: str = _PAGE, anchor: str = "start", *, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
