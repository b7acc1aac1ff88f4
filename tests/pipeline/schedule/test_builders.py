"""The known schedules are complete for any numbers, as fast as their papers prove, and as drawn.

The oracle (`timed`) runs all rows side by side, tick by tick; numbers are those of the papers.
"""

import inspect
from collections import Counter
from fractions import Fraction
from itertools import accumulate, product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fshard.pipeline.schedule import builders
from fshard.pipeline.schedule.actions import Action, Kind
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.paths import schedule_along_path
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.schedule.weights import (
    advance_forwards,
    advance_gradient,
    swap_gradients,
    with_weights,
)

LINE = ("gpipe", "1f1b", "zb-h1", "zb-h2")
LOOPS = ("interleaved", "bfs")
VEE = ("zbv", "v-half", "v-min", "dualpipe-v")


def build(name: str, devices: int, microbatches: int, loops: int = 2) -> Schedule:
    """Make a schedule by the number of its devices."""
    stages = devices if name in LINE else devices * (loops if name in LOOPS else 2)
    return pipeline_schedule(name, stages=stages, microbatches=microbatches, devices=devices)


class Timed(NamedTuple):
    """An action, and the ticks at which it begins and ends."""

    action: Action
    begin: int
    end: int


def requirements(action: Action, stages: int) -> list[tuple[str, int, int]]:
    """List what an action waits for; "I" is the gradient of the inputs, by B or by I."""
    kind, stage, microbatch = action
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage > 0 else []
    if kind == "W":
        return [("I", stage, microbatch)]
    needed = [("F", stage, microbatch)]
    if stage + 1 < stages:
        needed.append(("I", stage + 1, microbatch))
    return needed


def timed(schedule: Schedule) -> list[list[Timed]]:
    """Run all rows side by side: a B takes two ticks, all others one."""
    ends: dict[tuple[str, int, int], int] = {}
    rows: list[list[Timed]] = [[] for _ in schedule.rows]
    free = [0] * schedule.devices
    has_progress = True
    while has_progress:
        has_progress = False
        for device, row in enumerate(schedule.rows):
            for action in row[len(rows[device]) :]:
                needed = requirements(action, schedule.stages)
                if not all(requirement in ends for requirement in needed):
                    break
                begin = max([free[device], *(ends[requirement] for requirement in needed)])
                end = begin + (2 if action.kind == "B" else 1)
                result = "I" if action.kind in "BI" else str(action.kind)
                ends[result, action.stage, action.microbatch] = end
                free[device] = end
                rows[device].append(Timed(action, begin, end))
                has_progress = True
    assert [len(row) for row in rows] == [len(row) for row in schedule.rows], f"stuck: {schedule}"
    return rows


def idle(schedule: Schedule) -> Fraction:
    """Return the time of a step beyond the work of a device, in forwards of all its stages."""
    stages = Fraction(schedule.stages, schedule.devices)
    last = max(row[-1].end for row in timed(schedule))
    return last / stages - 3 * schedule.microbatches


def waits(schedule: Schedule) -> list[int]:
    """Return the idle ticks of each device between its first action and its last."""
    idle_ticks = []
    for row in timed(schedule):
        busy = sum(entry.end - entry.begin for entry in row)
        idle_ticks.append(row[-1].end - row[0].begin - busy)
    return idle_ticks


def peaks(schedule: Schedule) -> list[int]:
    """Return the most activations of each device: an F adds a stage's, its B or W frees them."""
    changes = {"F": 1, "B": -1, "W": -1}
    result = []
    for row in schedule.rows:
        stored = list(accumulate((changes.get(action.kind, 0) for action in row), initial=0))
        result.append(max(stored))
    return result


@given(
    name=st.sampled_from([*LINE, *LOOPS, *VEE]),
    stages=st.integers(1, 13),
    microbatches=st.integers(1, 17),
    data=st.data(),
)
def test_named_schedule_of_any_size_is_complete(name, stages, microbatches, data):
    devices = data.draw(st.none() | st.integers(1, stages)) if name in LOOPS else None

    schedule = pipeline_schedule(name, stages=stages, microbatches=microbatches, devices=devices)

    assert (schedule.name, schedule.stages, schedule.microbatches) == (name, stages, microbatches)
    assert schedule.devices == devices or devices is None

    # Each stage has one forward of each microbatch, and one backward, or its halves.
    counts = Counter(action for row in schedule.rows for action in row)
    for stage, microbatch in product(range(stages), range(microbatches)):
        assert counts.pop(Action(Kind.F, stage, microbatch)) == 1
        if counts.pop(Action(Kind.B, stage, microbatch), 0) != 1:
            assert counts.pop(Action(Kind.I, stage, microbatch)) == 1
            assert counts.pop(Action(Kind.W, stage, microbatch)) == 1
    assert not counts

    for device, row in enumerate(schedule.rows):
        assert {schedule.placement[action.stage] for action in row} == {device}
    timed(schedule)


@pytest.mark.parametrize(("devices", "microbatches"), [(4, 8), (8, 16), (16, 64)])
def test_idle_time_is_that_of_the_papers(devices, microbatches):
    others = devices - 1
    expected = {
        "gpipe": 3 * others,
        "1f1b": 3 * others,
        "zb-h1": others,
        "zb-h2": others,
        "zbv": Fraction(others, 2),
        "dualpipe-v": Fraction(others, 2),
        "interleaved": Fraction(3 * others, 2),
        "bfs": Fraction(3 * others, 2),
    }
    for name, time in expected.items():
        assert idle(build(name, devices, microbatches)) == time, name
    for name in ("interleaved", "bfs"):
        assert idle(build(name, devices, microbatches, loops=4)) == Fraction(3 * others, 4)


def shortest(devices: int, held: int) -> Fraction:
    """Return the least wait with stages in a V, if no device stores more than `held` activations.

    Decision 017 has the proof.
    """
    return max(Fraction(devices - 1, 2), 3 * devices - Fraction(3 * held + 1, 2))


@given(devices=st.integers(1, 12), more=st.integers(0, 12))
def test_v_schedules_reach_the_lower_bound_of_the_bubble(devices, more):
    limits = {"zbv": devices, "v-half": (devices + 2) // 2, "v-min": (devices + 4) // 3}
    for name, limit in limits.items():
        schedule = build(name, devices, devices + more)
        assert max(peaks(schedule)) <= 2 * limit
        assert idle(schedule) == shortest(devices, 2 * limit), name


@given(devices=st.integers(1, 9))
def test_v_half_period_tolerates_latency_of_half_a_tick(devices):
    def makespan(microbatches):
        schedule = build("v-half", devices, microbatches)
        return schedule.simulate(send=Fraction(1, 2)).makespan

    assert makespan(6 * devices) - makespan(3 * devices) == 18 * devices


@given(devices=st.integers(1, 9), more=st.integers(0, 9))
def test_zero_bubble_schedules_are_never_idle_once_begun(devices, more):
    for name in ("zb-h2", "zbv"):
        assert waits(build(name, devices, 2 * devices + more)) == [0] * devices


@given(devices=st.integers(1, 12), microbatches=st.integers(1, 30))
def test_peak_activations_equal_those_of_the_papers(devices, microbatches):
    def most(name: str) -> int:
        return max(peaks(build(name, devices, microbatches)))

    assert peaks(build("gpipe", devices, microbatches)) == [microbatches] * devices
    assert peaks(build("1f1b", devices, microbatches)) == [
        min(microbatches, devices - s) for s in range(devices)
    ]
    assert most("zb-h1") == min(microbatches, devices)
    assert most("zb-h2") == min(microbatches, 2 * devices - 1)
    # of the others a device's whole stage is two
    assert most("zbv") == 2 * min(microbatches, devices)
    assert most("v-half") <= 2 * ((devices + 2) // 2)
    assert most("v-min") <= 2 * ((devices + 4) // 3)
    assert most("dualpipe-v") <= 2 * devices + 1


@pytest.mark.parametrize(("devices", "microbatches"), [(4, 8), (8, 16), (16, 64)])
def test_peak_activations_with_two_microbatches_per_device(devices, microbatches):
    assert max(peaks(build("v-half", devices, microbatches))) == devices + 2
    assert max(peaks(build("v-min", devices, microbatches))) == 2 * ((devices + 4) // 3)
    assert max(peaks(build("interleaved", devices, microbatches))) == 3 * devices - 1
    assert max(peaks(build("interleaved", devices, microbatches, loops=4))) == 5 * devices - 1


LEG = st.tuples(st.integers(1, 5), st.integers(0, 3))
LEGS = st.lists(LEG, min_size=2, max_size=2) | st.lists(LEG, min_size=4, max_size=4)


@given(
    legs=LEGS,
    devices=st.integers(1, 6),
    microbatches=st.integers(1, 9),
    limit=st.integers(1, 12),
    rules=st.permutations([advance_forwards, advance_gradient, swap_gradients]),
)
def test_early_actions_do_not_exceed_the_activation_limit(
    legs, devices, microbatches, limit, rules
):
    placement = (*range(devices), *reversed(range(devices)))[: devices * len(legs) // 2]
    steps, pauses = zip(*legs, strict=True)
    path = schedule_along_path("any", placement, microbatches, steps, pauses)

    strict = with_weights(path, limit)
    early = with_weights(path, limit, rules=tuple(rules))

    assert max(peaks(early)) <= max(*peaks(strict), limit)
    actions = Counter(action for row in early.rows for action in row)
    assert actions == Counter(action for row in strict.rows for action in row)
    for schedule in (early, strict):
        peak = max(peaks(schedule))
        if len(legs) == 4 and peak < 2 * microbatches:
            assert idle(schedule) >= shortest(devices, peak)


def picture(schedule: Schedule) -> list[str]:
    """Draw a schedule as the docstrings do."""
    lines = []
    for device, row in enumerate(timed(schedule)):
        cells = ["."] * row[-1].end
        for action, begin, end in row:
            is_first_stage = action.stage < schedule.devices
            kind = action.kind if is_first_stage else action.kind.lower()
            cells[begin] = f"{kind}{action.microbatch}"
            cells[begin + 1 : end] = ["--"] * (end - begin - 1)
        text = " ".join(cell.ljust(2) for cell in cells)
        lines.append(f"device {device}   {text.rstrip()}")
    return lines


@pytest.mark.parametrize("name", [*LINE, *LOOPS, *VEE])
def test_docstring_drawing_equals_built_schedule(name):
    text = inspect.getdoc(builders.BUILDERS[name].build) or ""
    drawing = [line for line in text.splitlines() if line.startswith("device ")]
    numbers = [int(word[1:]) for word in drawing[0].split()[2:] if word[1:].isdigit()]
    microbatches = 1 + max(numbers)

    schedule = build(name, len(drawing), microbatches)

    assert drawing == picture(schedule)


# What cannot be
