"""`simulate` is right about the known numbers of schedules, and about times of drawn ones.

The oracle of times (`fixed_point`) moves every action behind its requirements until none moves.
"""

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


def drawn_costs(draw, stages):
    costs = []
    for _ in range(stages):
        numerator = draw.randint(0, 9)
        costs.append(Fraction(numerator, draw.randint(1, 4)))
    return costs


def test_simulated_times_equal_a_fixed_point_iteration():
    for seed in range(60):
        draw = random.Random(seed)
        name = draw.choice(NAMES)
        stages = draw.randint(1, 5)
        schedule = pipeline_schedule(name, stages=stages, microbatches=draw.randint(1, 4))
        cost = {kind: drawn_costs(draw, len(schedule.placement)) for kind in "FIW"}
        send = Fraction(draw.randint(0, 5), 3)

        actual = simulate(
            schedule,
            forward=cost["F"],
            backward_input=cost["I"],
            backward_weight=cost["W"],
            send=send,
        )

        starts = {}
        for row in actual.events:
            starts |= {(event.device, event.action): event.start for event in row}
        assert starts == fixed_point(schedule, cost, send), seed


def requirements(action):
    """List the actions that may have to run before one.

    Of B and I of the next stage there is one.
    """
    kind, stage, microbatch = action
    if kind is Kind.F:
        return [Action(Kind.F, stage - 1, microbatch)]
    if kind is Kind.W:
        return [Action(Kind.I, stage, microbatch)]
    return [
        Action(Kind.F, stage, microbatch),
        Action(Kind.B, stage + 1, microbatch),
        Action(Kind.I, stage + 1, microbatch),
    ]


def fixed_point(schedule, cost, send):
    """Return the start of each action: all are moved behind what they wait for until none moves."""
    devices = {}
    for device, row in enumerate(schedule.rows):
        devices |= dict.fromkeys(row, device)
    start = dict.fromkeys(devices, Fraction(0))

    def end(action):
        if action.kind is Kind.B:
            return start[action] + cost["I"][action.stage] + cost["W"][action.stage]
        return start[action] + cost[action.kind][action.stage]

    def arrival(requirement, device):
        is_sent = devices[requirement] != device
        return end(requirement) + send * is_sent

    has_moved = True
    while has_moved:
        has_moved = False
        for device, row in enumerate(schedule.rows):
            for previous, action in pairwise([None, *row]):
                times = [end(previous) if previous else Fraction(0)]
                for requirement in requirements(action):
                    if requirement in devices:
                        times.append(arrival(requirement, device))
                has_moved |= max(times) != start[action]
                start[action] = max(times)
    return {(devices[action], action): time for action, time in start.items()}


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

        assert path[0].start == 0
        assert path[-1].end == actual.makespan
        for before, after in pairwise(path):
            is_other_action = before[2:] != after[2:]
            assert before.end == after.start or not is_other_action, seed


# Numbers, exact and not.


def test_exact_costs_give_fractions():
    actual = simulate(TWO, forward=[1, Fraction(1, 3)], send=[1, Fraction(1, 7)])
    numbers = [actual.makespan, actual.idle, actual.bubble, *actual.idle_span, *actual.busy]
    assert all(isinstance(number, Fraction) for number in numbers)
    assert isinstance(actual.events[1][0].start, Fraction)

    assert isinstance(simulate(TWO, forward=[1, 0.5]).makespan, float)
    by_function = simulate(TWO, forward=lambda stage: stage + 1)
    by_list = simulate(TWO, forward=(1, 2))
    assert by_function.makespan == by_list.makespan == 11


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
    bare = pipeline_schedule("zbv", stages=4, microbatches=3)
    actual = simulate(with_units(with_messages(bare)), send=1, gather=1)

    records = json.loads(actual.to_chrome_trace(unit=1000))["traceEvents"]

    def of_kind(kind):
        return [record for record in records if record["ph"] == kind]

    # A complete event for each of the schedule.
    complete = of_kind("X")
    expected = []
    for row in actual.events:
        for event in row:
            duration = float((event.end - event.start) * 1000)
            start = float(event.start * 1000)
            expected.append((event.device, str(event.action), start, duration))
    assert [(r["pid"], r["name"], r["ts"], r["dur"]) for r in complete] == expected

    # An arrow for each message, from "s" to "f".
    starts = sorted(record["id"] for record in of_kind("s"))
    ends = sorted(record["id"] for record in of_kind("f"))
    assert starts == ends
    assert len(starts) == actual.messages

    # Names of devices, and of the lines of events.
    names = {(r["pid"], r.get("tid")): r["args"]["name"] for r in of_kind("M")}
    assert {name for (_, line), name in names.items() if line is None} == {"device 0", "device 1"}
    assert {(r["pid"], r["tid"]) for r in complete} <= {*names}
