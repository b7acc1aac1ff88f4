"""`verify` proves that a schedule runs, or names the actions that cannot."""

import random

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from fshard.errors import ScheduleError
from fshard.pipeline.schedule.actions import Action, Kind
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.communication import with_messages, with_units
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.schedule.verify import verify
from tests.pipeline.execution.pipeline_oracle import harm
from tests.pipeline.schedule.drawn import NAMES, some_schedule


def corrupted(schedule, draw):
    """Drop, repeat, swap or carry to another device a few actions."""
    rows = [[*row] for row in schedule.rows]
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        row = draw.choice([row for row in rows if row] or [[Action(Kind.F, 0, 0)]])
        place = draw.randrange(len(row))
        other = draw.randrange(len(row))
        match draw.choice(["drop", "repeat", "swap", "neighbours", "move", "carry"]):
            case "drop":
                row.pop(place)
            case "repeat":
                row.insert(other, row[place])
            case "swap":
                row[place], row[other] = row[other], row[place]
            case "neighbours":
                row[place - 1], row[place] = row[place], row[place - 1]
            case "move":
                row.insert(other, row.pop(place))
            case _:
                to = draw.choice(rows)
                to.insert(draw.randint(0, len(to)), row.pop(place))
    return Schedule("corrupted", schedule.placement, schedule.microbatches, rows)


def refusal(schedule):
    try:
        verify(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


def test_valid_schedules_verify():
    for seed in range(300):
        schedule = some_schedule(random.Random(seed))
        assert not harm(schedule), schedule.to_text()
        verify(schedule)


def test_verify_agrees_with_the_oracle_on_corrupted_schedules():
    verdicts = {True: 0, False: 0}
    for seed in range(1000):
        draw = random.Random(seed)
        schedule = corrupted(some_schedule(draw), draw)
        why = harm(schedule)
        said = refusal(schedule)
        assert bool(said) == bool(why), f"{seed}: {why or 'harmless'}\n{said}\n{schedule.to_text()}"
        verdicts[bool(why)] += 1
    assert verdicts[True] > 600 and verdicts[False] > 80


def lowered_by_torch(schedule, *, deferred=False):
    rows = {
        d: [torch_schedules._Action.from_str(str(action)) for action in row]
        for d, row in enumerate(schedule.rows)
    }
    home = schedule.placement.__getitem__
    rows = torch_schedules._add_send_recv(rows, home, schedule.stages)
    rows = torch_schedules._defer_recv_ops(rows, home) if deferred else rows
    return Schedule.from_csv(
        "\n".join(",".join(map(str, rows[device])) for device in range(len(rows))), name="torch"
    )


@pytest.mark.parametrize("name", NAMES)
def test_schedules_lowered_by_torch_verify(name):
    schedule = pipeline_schedule(name, stages=6, microbatches=5)
    assert (
        verify(lowered_by_torch(schedule)).messages == verify(with_messages(schedule)).messages > 0
    )


def test_crossed_messages_of_torch_raise():
    schedule = lowered_by_torch(pipeline_schedule("zbv", stages=4, microbatches=4), deferred=True)
    assert "devices 0 -> 1 -> 0 wait for each other" in refusal(schedule)
    assert harm(schedule)


SENT = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1"
ERRORS = {
    "other devices and microbatches": (
        "0F0,1B0,0F1,0B0,0B1\n1F0,1F1,1B1,1F3,1B0",
        """
- 1B0 (device 0, index 1) must not be there: stage 1 is on device 1
- 1F3 (device 1, index 3) must not be there: microbatches are below 2""",
    ),
    "a repetition": (
        "0F0,0B0,0B0\n1F0,1B0",
        "\n- 0B0 (device 0, index 2) repeats 0B0 (device 0, index 1)",
    ),
    "no weight gradients": (
        "0F0,0I0,0W0,0F1\n1F0,1I0,1W0,1F1,1I1",
        "\n- missing on device 0: 0B1\n- missing on device 1: 1W1",
    ),
    "to no device": (
        "0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1SEND_F0,1B0",
        """
- 1SEND_F0 (device 1, index 2) must not be there: nothing is to be sent, received or reduced
- missing on device 0: 0RECV_B0
- missing on device 1: 1SEND_B0""",
    ),
    "before what it needs": (
        "0B0,0F1,0F0,0B1\n1F0,1B0,1F1,1W1,1I1",
        """
- device 0 waits for itself:
    device 0: [0B0] 0F1 [0F0] 0B1   0B0 (index 0) waits for 0F0 (device 0, index 2)""",
    ),
    "crossed messages": (
        SENT.replace("1RECV_F0,1F0,1RECV_F1,1F1", "1RECV_F1,1F1,1RECV_F0,1F0"),
        """
- devices 0 -> 1 -> 0 wait for each other:
    device 0: 0F0 [0SEND_F0] 0F1 [0SEND_F1] 0RECV_B0 …   0SEND_F0 (index 1) waits for 1RECV_F0 (device 1, index 2)
    device 1: [1RECV_F1] 1F1 [1RECV_F0] 1F0 …            1RECV_F1 (index 0) waits for 0SEND_F1 (device 0, index 3)""",
    ),
    "weights": (
        "0F0,0UNSHARD,0B0,0F1,0UNSHARD,0B1,0RESHARD,0RESHARD\n1UNSHARD,1F0,1B0,1F1,1B1",
        """
- stage 0 is sharded at 0F0 (device 0, index 0)
- stage 0 is unsharded already at 0UNSHARD (device 0, index 4)
- stage 0 is sharded at 0RESHARD (device 0, index 7)
- stage 1 is not resharded at the end of device 1""",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_invalid_schedule_raises_and_draws_the_error(name):
    text, said = ERRORS[name]
    schedule = Schedule.from_csv(text, placement=[0, 1], microbatches=text.count("1F1") + 1)
    assert refusal(schedule) == f'"csv" cannot run:{said}'


def test_cycle_of_three_devices_is_drawn_alone():
    schedule = Schedule.from_csv("0F0,3F0,0F1,3F1\n1F0,1F1\n2F1,2F0\n4F0,4F1", name="around")
    assert refusal(schedule) == (
        """"around" cannot run:
- devices 0 -> 2 -> 1 -> 0 wait for each other:
    device 0: 0F0 [3F0] [0F1] 3F1   3F0 (index 1) waits for 2F0 (device 2, index 1)
    device 2: [2F1] [2F0]           2F1 (index 0) waits for 1F1 (device 1, index 1)
    device 1: 1F0 [1F1]             1F1 (index 1) waits for 0F1 (device 0, index 2)"""
    )


def test_proof_prints_as_a_sentence():
    proof = verify(with_units(with_messages(pipeline_schedule("1f1b", stages=3, microbatches=4))))
    assert (proof.messages, proof.collectives, proof.peak_activations) == (16, 6, (3, 2, 1))
    assert str(proof) == (
        "1f1b can run: every action runs once and after its inputs; 16 messages are received even if sends block; "
        "6 collectives have one order; devices hold at most 3, 2, 1 activations."
    )


def test_forward_only_schedule_verifies():
    assert verify(
        Schedule.from_csv("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1")
    ).peak_activations == (1, 1)
