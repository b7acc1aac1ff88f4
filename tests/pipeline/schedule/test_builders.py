"""The known schedules: complete for any numbers, as fast as their papers say, and drawn as they are."""

import inspect
from collections import Counter
from fractions import Fraction

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


def timed(schedule: Schedule) -> list[list[tuple[Action, int, int]]]:
    """Run all rows side by side, sweep by sweep: each action with its begin and its end."""
    ends: dict[tuple[str, int, int], int] = {}
    done: list[list[tuple[Action, int, int]]] = [[] for _ in schedule.rows]
    free = [0] * schedule.devices
    progress = True
    while progress:
        progress = False
        for device, row in enumerate(schedule.rows):
            for action in row[len(done[device]) :]:
                kind, stage, m = action
                back = "I" if kind in "BI" else None
                expected = [("F", stage, m)] * bool(back) + [("I", stage, m)] * (kind == "W")
                expected += [("F", stage - 1, m)] * (kind == "F" and stage > 0)
                expected += [("I", stage + 1, m)] * (
                    back is not None and stage + 1 < schedule.stages
                )
                if not all(each in ends for each in expected):
                    break
                begin = max([free[device], *(ends[each] for each in expected)])
                free[device] = ends[back or str(kind), stage, m] = begin + (2 if kind == "B" else 1)
                done[device].append((action, begin, free[device]))
                progress = True
    assert [len(row) for row in done] == [len(row) for row in schedule.rows], f"stuck: {schedule}"
    return done


def idle(schedule: Schedule) -> Fraction:
    """Say how much longer all takes than one device works, in units of a device's whole forward."""
    stages = Fraction(schedule.stages, schedule.devices)
    return max(row[-1][2] for row in timed(schedule)) / stages - 3 * schedule.microbatches


def waits(schedule: Schedule) -> list[int]:
    """Say how many ticks each device waits after its first action has begun, and before its last has ended."""
    rows = timed(schedule)
    return [row[-1][2] - row[0][1] - sum(end - begin for _, begin, end in row) for row in rows]


def peaks(schedule: Schedule) -> list[int]:
    """Count what each device holds at most: an F begins to hold a stage's activations, its B or W lets them go."""
    actual = []
    for row in schedule.rows:
        held = [
            sum({"F": 1, "B": -1, "W": -1}.get(action.kind, 0) for action in row[:n])
            for n in range(len(row) + 1)
        ]
        actual.append(max(held))
    return actual


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
    counts = Counter(action for row in schedule.rows for action in row)
    for stage in range(stages):
        for m in range(microbatches):
            full = Action(Kind.B, stage, m)
            halves = {Action(Kind.I, stage, m), Action(Kind.W, stage, m)}
            assert counts.pop(Action(Kind.F, stage, m)) == 1
            assert counts.pop(full, 0) == 1 or [counts.pop(half) for half in halves] == [1, 1]
    assert not counts
    for device, row in enumerate(schedule.rows):
        assert {schedule.placement[action.stage] for action in row} == {device}
    timed(schedule)


@pytest.mark.parametrize(("devices", "microbatches"), [(4, 8), (8, 16), (16, 64)])
def test_idle_time_is_that_of_the_papers(devices, microbatches):
    less = devices - 1
    golden = {
        "gpipe": 3 * less,
        "1f1b": 3 * less,
        "zb-h1": less,
        "zb-h2": less,
        "zbv": Fraction(less, 2),
    }
    golden |= {
        "dualpipe-v": Fraction(less, 2),
        "interleaved": Fraction(3 * less, 2),
        "bfs": Fraction(3 * less, 2),
    }
    assert {name: idle(build(name, devices, microbatches)) for name in golden} == golden
    assert idle(build("interleaved", devices, microbatches, loops=4)) == Fraction(3 * less, 4)
    assert idle(build("bfs", devices, microbatches, loops=4)) == Fraction(3 * less, 4)


def shortest(devices: int, held: int) -> Fraction:
    """Return the least wait with stages in a V, if no device holds more than a number: decision 017 has the proof."""
    return max(Fraction(devices - 1, 2), 3 * devices - Fraction(3 * held + 1, 2))


@given(devices=st.integers(1, 12), more=st.integers(0, 12))
def test_v_schedules_reach_the_lower_bound_of_the_bubble(devices, more):
    for name, held in (
        ("zbv", devices),
        ("v-half", (devices + 2) // 2),
        ("v-min", (devices + 4) // 3),
    ):
        schedule = build(name, devices, devices + more)
        assert max(peaks(schedule)) <= 2 * held
        assert idle(schedule) == shortest(devices, 2 * held), name


@given(devices=st.integers(1, 9))
def test_v_half_period_tolerates_latency_of_half_a_tick(devices):
    once, twice = (build("v-half", devices, times * devices) for times in (3, 6))
    assert (
        twice.simulate(send=Fraction(1, 2)).makespan - once.simulate(send=Fraction(1, 2)).makespan
        == 18 * devices
    )


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


@given(
    legs=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=2, max_size=4).filter(
        lambda legs: len(legs) != 3
    ),
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
    assert Counter(a for row in early.rows for a in row) == Counter(
        a for row in strict.rows for a in row
    )
    for schedule in (early, strict):
        if len(legs) == 4 and max(peaks(schedule)) < 2 * microbatches:
            assert idle(schedule) >= shortest(devices, max(peaks(schedule)))


def picture(schedule: Schedule) -> list[str]:
    """Draw a schedule as the docstrings do."""
    lines = []
    for device, row in enumerate(timed(schedule)):
        cells = ["."] * row[-1][2]
        for action, begin, end in row:
            kind = action.kind if action.stage < schedule.devices else action.kind.lower()
            cells[begin:end] = [f"{kind}{action.microbatch}", "--"][: end - begin]
        lines.append(f"device {device}   {' '.join(cell.ljust(2) for cell in cells).rstrip()}")
    return lines


@pytest.mark.parametrize("name", [*LINE, *LOOPS, *VEE])
def test_docstring_drawing_equals_built_schedule(name):
    text = inspect.getdoc(builders.BUILDERS[name].build) or ""
    drawing = [line for line in text.splitlines() if line.startswith("device ")]
    microbatches = 1 + max(int(word[1:]) for word in drawing[0].split()[2:] if word[1:].isdigit())
    assert drawing == picture(build(name, len(drawing), microbatches))


# What cannot be
