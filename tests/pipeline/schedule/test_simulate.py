"""`simulate` against a clock that is turned until nothing changes, and against what is known of the schedules."""

import json
import random
import time
from fractions import Fraction
from itertools import pairwise

import pytest

from fshard.errors import ScheduleError
from fshard.pipeline.schedule.actions import Action, Kind
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.communication import with_messages, with_units
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.schedule.simulate import simulate
from fshard.pipeline.schedule.verify import verify
from tests.pipeline.schedule.drawn import NAMES, some_schedule

TWO = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", name="two")


def text(timed):
    return [f"{event.action} {event.start}-{event.end}" for event in timed]


# What is known.


def test_peak_activations_scale_with_activation_size():
    def peaks(name, chunks=1):
        schedule = pipeline_schedule(name, stages=chunks * 8, microbatches=16, devices=8)
        return [*simulate(schedule, activation=Fraction(1, chunks)).peak_activations]

    assert peaks("gpipe") == [16] * 8
    assert peaks("1f1b") == [8, 7, 6, 5, 4, 3, 2, 1]
    assert max(peaks("zb-h1")) == 8
    assert (max(peaks("v-half", 2)), max(peaks("v-min", 2))) == (5, 4)


def test_zb_h2_has_no_idle_span():
    actual = simulate(pipeline_schedule("zb-h2", stages=4, microbatches=8))
    assert actual.idle_span == (0, 0, 0, 0)
    assert actual.idle_by_device == (3, 3, 3, 3)
    assert (actual.idle, actual.bubble) == (12, Fraction(1, 9))


# Times.


def test_latency_delays_messages_but_not_devices():
    actual = simulate(TWO, send=Fraction(1, 2))
    assert [text(row) for row in actual.events] == [
        ["0F0 0-1", "0F1 1-2", "0B0 5-7", "0B1 8-10"],
        ["1F0 3/2-5/2", "1B0 5/2-9/2", "1F1 9/2-11/2", "1B1 11/2-15/2"],
    ]
    assert actual.messages == 4


def test_unshard_and_reduce_overlap_computation():
    schedule = Schedule.from_csv(
        "0UNSHARD,0F0,1UNSHARD,1F0,1B0,1REDUCE_GRAD,1RESHARD,0B0,0REDUCE_GRAD,0RESHARD"
    )
    actual = simulate(schedule, gather=3, reduce=[4, 1])
    assert text(actual.events[0]) == [
        "0UNSHARD 0-3", "0F0 3-4", "1UNSHARD 4-7", "1F0 7-8", "1B0 8-10", "1REDUCE_GRAD 10-11", "1RESHARD 11-11",
        "0B0 10-12", "0REDUCE_GRAD 12-16", "0RESHARD 16-16",
    ]  # fmt: skip
    assert actual.makespan == 16


def test_simulated_times_equal_a_fixed_point_iteration():
    for seed in range(60):
        draw = random.Random(seed)
        schedule = pipeline_schedule(
            draw.choice(NAMES), stages=draw.randint(1, 5), microbatches=draw.randint(1, 4)
        )
        cost = {
            kind: [Fraction(draw.randint(0, 9), draw.randint(1, 4)) for _ in schedule.placement]
            for kind in "FIW"
        }
        send = Fraction(draw.randint(0, 5), 3)
        actual = simulate(
            schedule,
            forward=cost["F"],
            backward_input=cost["I"],
            backward_weight=cost["W"],
            send=send,
        )
        starts = {(e.device, e.action): e.start for row in actual.events for e in row}
        assert starts == turned(schedule, cost, send), seed


def turned(schedule, cost, send):
    """Move every action back behind what it waits for, again and again."""

    def lasts(action):
        return sum(
            cost[kind][action.stage] for kind in ("IW" if action.kind is Kind.B else action.kind)
        )

    def before(action):
        kind, stage, microbatch = action
        if kind is Kind.F:
            return [Action(Kind.F, stage - 1, microbatch)]
        if kind is Kind.W:
            return [Action(Kind.I, stage, microbatch)]
        return [
            Action(Kind.F, stage, microbatch),
            *(Action(k, stage + 1, microbatch) for k in (Kind.B, Kind.I)),
        ]

    home = {action: device for device, row in enumerate(schedule.rows) for action in row}
    start = dict.fromkeys(home, Fraction(0))
    changed = True
    while changed:
        changed = False
        for row in schedule.rows:
            for previous, action in pairwise([None, *row]):
                waits = [start[previous] + lasts(previous)] if previous else [Fraction(0)]
                needs = [need for need in before(action) if need in home]
                waits += [
                    start[need] + lasts(need) + send * (home[need] != home[action])
                    for need in needs
                ]
                changed |= max(waits) != start[action]
                start[action] = max(waits)
    return {(home[action], action): when for action, when in start.items()}


def test_explicit_messages_take_as_long_as_derived_ones():
    for seed in range(40):
        draw = random.Random(seed)
        schedule = pipeline_schedule(
            draw.choice(NAMES), stages=draw.randint(1, 6), microbatches=draw.randint(1, 5)
        )
        latency = draw.randint(0, 3)
        bare = simulate(schedule, send=latency)
        sent = simulate(with_messages(schedule), send=latency)
        assert (bare.makespan, bare.idle_span, bare.messages) == (
            sent.makespan,
            sent.idle_span,
            sent.messages,
        )
        assert sent.messages == verify(sent.schedule).messages


def test_critical_path_has_no_gaps():
    for seed in range(60):
        draw = random.Random(seed)
        actual = simulate(some_schedule(draw), forward=draw.randint(1, 3), gather=2, reduce=3)
        path = actual.critical_path
        assert path[0].start == 0 and path[-1].end == actual.makespan
        assert all(
            before.end == after.start for before, after in pairwise(path) if before[2:] != after[2:]
        ), seed


# Numbers, exact and not.


def test_exact_costs_give_fractions():
    actual = simulate(TWO, forward=[1, Fraction(1, 3)], send=[1, Fraction(1, 7)])
    numbers = [
        actual.makespan,
        actual.idle,
        actual.bubble,
        *actual.idle_span,
        *actual.busy,
        actual.events[1][0].start,
    ]
    assert all(isinstance(number, Fraction) for number in numbers)
    assert isinstance(simulate(TWO, forward=[1, 0.5]).makespan, float)
    assert (
        simulate(TWO, forward=lambda stage: stage + 1).makespan
        == simulate(TWO, forward=(1, 2)).makespan
        == 11
    )


def test_simulate_of_invalid_schedule_raises_as_verify():
    circle = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    with pytest.raises(ScheduleError) as proof:
        verify(circle)
    with pytest.raises(ScheduleError) as simulated:
        simulate(circle)
    assert str(simulated.value) == str(proof.value)


def test_large_schedule_simulates_within_four_seconds():
    schedule = pipeline_schedule("1f1b", stages=64, microbatches=512)
    before = time.process_time()
    assert simulate(schedule).makespan == 3 * (512 + 63)
    assert time.process_time() - before < 4, "it takes 0.6 s on a quiet machine"


# Traces.


def test_chrome_trace_has_every_event_and_message():
    actual = simulate(
        with_units(with_messages(pipeline_schedule("zbv", stages=4, microbatches=3))),
        send=1,
        gather=1,
    )
    records = json.loads(actual.to_chrome_trace(unit=1000))["traceEvents"]
    done = [record for record in records if record["ph"] == "X"]
    events = [event for row in actual.events for event in row]
    assert [(r["pid"], r["name"], r["ts"], r["dur"]) for r in done] == [
        (e.device, str(e.action), float(e.start * 1000), float((e.end - e.start) * 1000))
        for e in events
    ]
    tips = {
        kind: sorted(record["id"] for record in records if record["ph"] == kind) for kind in "sf"
    }
    assert tips["s"] == tips["f"] and len(tips["s"]) == actual.messages
    lines = {(r["pid"], r.get("tid")): r["args"]["name"] for r in records if r["ph"] == "M"}
    assert {name for (_, line), name in lines.items() if line is None} == {"device 0", "device 1"}
    assert {(r["pid"], r["tid"]) for r in done} <= {*lines}
