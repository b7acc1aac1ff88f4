"""`simulate` against a clock that is turned until nothing changes, and against what is known of the schedules."""

import json
import random
import time
from fractions import Fraction
from itertools import pairwise

import pytest

from fshard.errors import ScheduleError
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.messages import with_messages
from fshard.pipeline.schedule.schedule import COMPUTE, Action, Kind, Schedule, with_units
from fshard.pipeline.schedule.simulate import simulate
from fshard.pipeline.schedule.trace import to_chrome_trace
from fshard.pipeline.schedule.verify import verify
from tests.pipeline.schedule.test_verify import NAMES, some_schedule

TWO = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", name="two")


def text(timed):
    return [f"{event.action} {event.start}-{event.end}" for event in timed]


# What is known.


@pytest.mark.parametrize(("devices", "microbatches"), [(4, 8), (8, 16), (16, 64)])
def test_idle_time_is_that_of_the_papers(devices, microbatches):
    def idle(name, chunks=1):
        schedule = pipeline_schedule(name, stages=chunks * devices, microbatches=microbatches, devices=devices)
        cost = Fraction(1, chunks)
        found = simulate(schedule, forward=cost, backward_input=cost, backward_weight=cost)
        assert found.idle == devices * (found.makespan - 3 * microbatches)
        assert found.bubble == found.idle / (devices * found.makespan)
        return found.makespan - 3 * microbatches

    base = 3 * (devices - 1)
    assert idle("gpipe") == idle("1f1b") == base
    assert (idle("interleaved", 2), idle("interleaved", 4)) == (Fraction(base, 2), Fraction(base, 4))
    assert (idle("zb-h1"), idle("zbv", 2)) == (Fraction(base, 3), Fraction(base, 6))


def test_peaks_are_those_of_the_papers():
    def peaks(name, chunks=1):
        schedule = pipeline_schedule(name, stages=chunks * 8, microbatches=16, devices=8)
        return [*simulate(schedule, activation=Fraction(1, chunks)).peak_activations]

    assert peaks("gpipe") == [16] * 8
    assert peaks("1f1b") == [8, 7, 6, 5, 4, 3, 2, 1]
    assert max(peaks("zb-h1")) == 8
    assert (max(peaks("v-half", 2)), max(peaks("v-min", 2))) == (5, 4)


def test_zero_bubble_is_zero_between_the_first_and_the_last_thing_that_a_device_does():
    found = simulate(pipeline_schedule("zb-h2", stages=4, microbatches=8))
    assert found.idle_span == (0, 0, 0, 0)
    assert found.idle_by_device == (3, 3, 3, 3)
    assert (found.idle, found.bubble) == (12, Fraction(1, 9))


# Times.


def test_a_message_takes_its_time_but_not_that_of_the_devices():
    found = simulate(TWO, send=Fraction(1, 2))
    assert [text(row) for row in found.events] == [
        ["0F0 0-1", "0F1 1-2", "0B0 5-7", "0B1 8-10"],
        ["1F0 3/2-5/2", "1B0 5/2-9/2", "1F1 9/2-11/2", "1B1 11/2-15/2"],
    ]
    assert (found.messages, found.messages_by_pair) == (4, {(0, 1): 2, (1, 0): 2})


def test_without_overlap_both_devices_are_held_up():
    found = simulate(TWO, send=1, overlap=False)
    assert found.schedule == with_messages(TWO)
    assert [text(row) for row in found.events] == [
        [
            "0F0 0-1",
            "0SEND_F0 1-2",
            "0F1 2-3",
            "0SEND_F1 3-4",
            "0RECV_B0 6-7",
            "0B0 7-9",
            "0RECV_B1 10-11",
            "0B1 11-13",
        ],
        ["1RECV_F0 1-2", "1F0 2-3", "1RECV_F1 3-4", "1B0 4-6", "1SEND_B0 6-7", "1F1 7-8", "1B1 8-10", "1SEND_B1 10-11"],
    ]
    assert found.busy == (6, 6)


def test_messages_of_one_way_pass_one_by_one():
    forwards = Schedule.from_csv("0F0,0F1\n1F0,1F1")
    found = simulate(forwards, send=1, size=6, bandwidth=2)
    assert text(found.events[1]) == ["1F0 5-6", "1F1 8-9"]  # sent off at 1 and 4, 3 to pass, 1 on the way
    assert simulate(forwards, send=1, size=lambda stage: 6 - stage, bandwidth=1.0).makespan == 15.0


def test_weights_are_gathered_and_reduced_meanwhile():
    schedule = Schedule.from_csv("0UNSHARD,0F0,1UNSHARD,1F0,1B0,1REDUCE_GRAD,1RESHARD,0B0,0REDUCE_GRAD,0RESHARD")
    found = simulate(schedule, gather=3, reduce=[4, 1])
    assert text(found.events[0]) == [
        "0UNSHARD 0-3", "0F0 3-4", "1UNSHARD 4-7", "1F0 7-8", "1B0 8-10", "1REDUCE_GRAD 10-11", "1RESHARD 11-11",
        "0B0 10-12", "0REDUCE_GRAD 12-16", "0RESHARD 16-16",
    ]  # fmt: skip
    assert simulate(schedule, gather=3, reduce=[4, 1], overlap=False).makespan == 17
    assert found.makespan == 16


def test_times_are_those_of_a_clock_that_is_turned_until_nothing_changes():
    for seed in range(60):
        draw = random.Random(seed)
        schedule = pipeline_schedule(draw.choice(NAMES), stages=draw.randint(1, 5), microbatches=draw.randint(1, 4))
        cost = {kind: [Fraction(draw.randint(0, 9), draw.randint(1, 4)) for _ in schedule.placement] for kind in "FIW"}
        send = Fraction(draw.randint(0, 5), 3)
        found = simulate(schedule, forward=cost["F"], backward_input=cost["I"], backward_weight=cost["W"], send=send)
        starts = {(e.device, e.action): e.start for row in found.events for e in row}
        assert starts == turned(schedule, cost, send), seed


def turned(schedule, cost, send):
    """Move every action back behind what it waits for, again and again."""

    def lasts(action):
        return sum(cost[kind][action.stage] for kind in ("IW" if action.kind is Kind.B else action.kind))

    def before(action):
        kind, stage, microbatch = action
        if kind is Kind.F:
            return [Action(Kind.F, stage - 1, microbatch)]
        if kind is Kind.W:
            return [Action(Kind.I, stage, microbatch)]
        return [Action(Kind.F, stage, microbatch), *(Action(k, stage + 1, microbatch) for k in (Kind.B, Kind.I))]

    home = {action: device for device, row in enumerate(schedule.rows) for action in row}
    start, changed = dict.fromkeys(home, Fraction(0)), True
    while changed:
        changed = False
        for row in schedule.rows:
            for previous, action in pairwise([None, *row]):
                waits = [start[previous] + lasts(previous)] if previous else [Fraction(0)]
                needs = [need for need in before(action) if need in home]
                waits += [start[need] + lasts(need) + send * (home[need] != home[action]) for need in needs]
                changed |= max(waits) != start[action]
                start[action] = max(waits)
    return {(home[action], action): when for action, when in start.items()}


def test_a_schedule_with_messages_takes_as_long_as_without_them():
    for seed in range(40):
        draw = random.Random(seed)
        schedule = pipeline_schedule(draw.choice(NAMES), stages=draw.randint(1, 6), microbatches=draw.randint(1, 5))
        costs = {"send": draw.randint(0, 3), "size": draw.randint(1, 3), "bandwidth": draw.randint(1, 3)}
        bare, sent = simulate(schedule, **costs), simulate(with_messages(schedule), **costs)
        assert (bare.makespan, bare.idle_span, bare.messages_by_pair) == (
            sent.makespan,
            sent.idle_span,
            sent.messages_by_pair,
        )
        assert sent.messages == verify(sent.schedule).messages


def test_on_the_critical_path_nothing_waits():
    for seed in range(60):
        draw = random.Random(seed)
        found = simulate(
            some_schedule(draw), forward=draw.randint(1, 3), gather=2, reduce=3, overlap=draw.random() < 0.5
        )
        path = found.critical_path
        assert path[0].start == 0 and path[-1].end == found.makespan
        assert all(before.end == after.start for before, after in pairwise(path) if before[2:] != after[2:]), seed


def test_no_two_things_happen_at_once_on_a_device():
    for seed in range(40):
        draw = random.Random(seed)
        overlap = draw.random() < 0.5
        found = simulate(some_schedule(draw), send=1, gather=2, reduce=3, overlap=overlap)
        for row in found.events:
            alone = [event for event in row if event.action.kind in COMPUTE or not overlap]
            assert all(before.end <= after.start for before, after in pairwise(alone)), seed


# Numbers, exact and not.


def test_what_comes_out_of_whole_numbers_and_fractions_are_fractions():
    found = simulate(TWO, forward=[1, Fraction(1, 3)], send={0: 1, 1: Fraction(1, 7)})
    numbers = [found.makespan, found.idle, found.bubble, *found.idle_span, *found.busy, found.events[1][0].start]
    assert all(isinstance(number, Fraction) for number in numbers)
    assert isinstance(simulate(TWO, forward=[1, 0.5]).makespan, float)
    assert simulate(TWO, forward=lambda stage: stage + 1).makespan == simulate(TWO, forward=(1, 2)).makespan == 11


def test_nothing_to_do_takes_no_time():
    found = simulate(TWO, forward=0, backward_input=0, backward_weight=0)
    assert (found.makespan, found.bubble, found.idle_span) == (0, 0, (0, 0))


def test_what_cannot_run_raises_what_verify_raises():
    circle = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    with pytest.raises(ScheduleError) as proof:
        verify(circle)
    with pytest.raises(ScheduleError) as simulated:
        simulate(circle, overlap=False)
    assert str(simulated.value) == str(proof.value)


def test_wrong_costs_are_all_named():
    with pytest.raises(ScheduleError) as raised:
        simulate(TWO, forward=[1], backward_input={0: 1, 2: 1}, send=-1, reduce=lambda stage: -stage)
    assert str(raised.value) == (
        "simulate, two: forward=[1] is not for stages 0 to 1; backward_input={0: 1, 2: 1} is not for stages 0 to 1; "
        "send is below 0 for stages [0, 1]; reduce is below 0 for stages [1]."
    )


@pytest.mark.parametrize("given", [{"size": 3}, {"bandwidth": 3}, {"size": 3, "bandwidth": 0}])
def test_size_and_bandwidth_go_together(given):
    with pytest.raises(ScheduleError, match="a message takes size / bandwidth; found"):
        simulate(TWO, **given)


def test_a_large_schedule_is_simulated_in_a_second():
    schedule = pipeline_schedule("1f1b", stages=64, microbatches=512)
    before = time.process_time()
    assert simulate(schedule).makespan == 3 * (512 + 63)
    assert time.process_time() - before < 4, "it takes 0.6 s on a quiet machine"


# Traces.


def test_a_trace_has_every_event_and_an_arrow_for_every_message():
    found = simulate(with_units(with_messages(pipeline_schedule("zbv", stages=4, microbatches=3))), send=1, gather=1)
    records = json.loads(found.to_chrome_trace(unit=1000))["traceEvents"]
    done = [record for record in records if record["ph"] == "X"]
    events = [event for row in found.events for event in row]
    assert [(r["pid"], r["name"], r["ts"], r["dur"]) for r in done] == [
        (e.device, str(e.action), float(e.start * 1000), float((e.end - e.start) * 1000)) for e in events
    ]
    tips = {kind: sorted(record["id"] for record in records if record["ph"] == kind) for kind in "sf"}
    assert tips["s"] == tips["f"] and len(tips["s"]) == found.messages
    lines = {(r["pid"], r.get("tid")): r["args"]["name"] for r in records if r["ph"] == "M"}
    assert {name for (_, line), name in lines.items() if line is None} == {"device 0", "device 1"}
    assert {(r["pid"], r["tid"]) for r in done} <= {*lines}


def test_no_events_are_an_empty_trace():
    assert json.loads(to_chrome_trace([])) == {"traceEvents": []}
