"""DualPipe-V, written out: what goes on at a time matters more in it than what a path can say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fshard.pipeline.paths import Placement
from fshard.pipeline.schedule import Action, Kind, Schedule


def dualpipe_v(name: str, placement: Placement, microbatches: int) -> Schedule:
    """Put forwards of one stage beside backwards of the other, so that one can compute while the other sends.

    Eight steps, as DeepSeek wrote them down; W is the oldest weight gradient that is left.  Fewer microbatches than two for
    each device are the first ones of a longer schedule.

    device 0   F0 F1 F2 f0 i0 w0 f1 F3 b1 -- f2 B0 -- F4 b2 -- f3 B1 -- b3 -- f4 .  B2 -- b4 -- I3 W3 I4 W4
    device 1   .  F0 f0 F1 f1 F2 b0 -- f2 B0 -- F3 b1 -- f3 B1 -- F4 b2 -- f4 B2 -- b3 -- B3 -- i4 I4 w4 W4
    """
    devices, total = max(placement) + 1, max(microbatches, len(placement) + len(placement) % 2)
    rows: list[list[Action]] = []
    for device in range(devices):
        after = devices - 1 - device
        drain = ["B1", "B0"] * (device + 1)
        plan = [
            *["F0"] * (2 * after),
            *["F0", "F1"] * (device + 1),
            *["I1", "W", "F1"] * after,
            *["F0", "B1", "F1", "B0"] * (total - 2 * devices + device + 1),
            *["B1", "F1", "B0"] * after,
            *drain[: device + 1],
            *(word.replace("B", "I") for word in drain[device + 1 :]),
            *["W", "I0"] * after,
            *["W"] * (device + 1),
        ]
        rows.append(_spelled(plan, (device, 2 * devices - 1 - device)))
    kept = [[a for a in row if a.stage < len(placement) and (a.microbatch or 0) < microbatches] for row in rows]
    return Schedule(name, placement, microbatches, tuple(map(tuple, kept)))


def _spelled(plan: Iterable[str], stages: tuple[int, int]) -> list[Action]:
    """Write a plan out: each word is the next microbatch of a device's first or second stage."""
    row: list[Action] = []
    owed: list[Action] = []
    next_of = Counter[tuple[bool, int]]()
    for word in plan:
        if word == "W":
            row.append(owed.pop(0))
            continue
        kind, stage = Kind(word[0]), stages[int(word[1])]
        way = (kind is Kind.F, stage)
        row.append(Action(kind, stage, next_of[way]))
        next_of[way] += 1
        if kind is Kind.I:
            owed.append(row[-1]._replace(kind=Kind.W))
    return row
