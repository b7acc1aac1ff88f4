"""Wrong arguments of schedules, stages and pipelined steps raise one error that names all of them.

A row of a table is a call, and a text that the error matches.
"""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.errors import ScheduleError
from fshard.pipeline.execution.pipelined import pipelined
from fshard.pipeline.schedule.actions import Action, Kind
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.communication import with_messages, with_units
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.schedule.simulate import simulate
from fshard.pipeline.schedule.weights import with_weights
from fshard.pipeline.split.stages import split_stages

MESH = fs.make_mesh({"pipe": 2})
LAYERS = [
    nn.Embedding(50, 8),
    nn.Linear(8, 8),
    nn.ReLU(),
    nn.Linear(8, 8),
    nn.Tanh(),
    nn.Linear(8, 50),
]
ROWS = ((Action(Kind.F, 2, 0), Action(Kind.B, 0), Action(Kind.REDUCE, 0, 1)),)


def scaled(w, x):
    return x * w


def gpipe(stages=2, microbatches=2):
    return pipeline_schedule("gpipe", stages=stages, microbatches=microbatches)


def total(y, batch):
    return y.sum()


def schedule_of(name="1f1b", **numbers):
    return pipeline_schedule(name, **({"stages": 8, "microbatches": 8} | numbers))


def prepare(stages=2, schedule=None, loss_fn=total, mesh=MESH, **options):
    schedule = gpipe() if schedule is None else schedule
    return pipelined([scaled] * stages, schedule, loss_fn, mesh=mesh, **options)


def take_step(params=2, batches=(1, 1), weights=None, **options):
    """Take a step; a number in `batches` is the length of a microbatch of one row."""
    microbatches = []
    for batch in batches:
        microbatches.append(torch.ones(1, batch) if isinstance(batch, int) else batch)
    return prepare(**options)([torch.tensor(2.0)] * params, microbatches, weights)


def parse(text):
    return Schedule.from_csv(text, name="mine")


class Halved(nn.Sequential):
    """Its division would be in no stage."""

    def forward(self, x):
        return super().forward(x) / 2


def with_hook():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.register_forward_hook(lambda *_: None)
    return model


def with_gain():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.gain = nn.Parameter(torch.ones(2))
    return model


def on_an_abstract_mesh():
    mesh = fs.make_mesh({"pipe": 2}, runtime="abstract")
    prepare(schedule=parse("0F0\n1F0"), mesh=mesh)


UNEQUAL_LENGTHS = (torch.ones(1), torch.ones(3))
STRINGS = (("0F0", Action(Kind.F, 1)),)


SCHEDULES = {
    "an unknown name": (
        lambda: schedule_of("zb-v"),
        'There is no schedule "zb-v"; did you mean "zbv".*gpipe, 1f1b, interleaved',
    ),
    "a name like none": (
        lambda: schedule_of("xyz"),
        r'There is no schedule "xyz"\. name must be one of',
    ),
    "no stages": (lambda: schedule_of(stages=0), "stages must be at least 1; got 0"),
    "half a microbatch": (
        lambda: schedule_of(microbatches=2.5),
        "microbatches must be an integer; got 2.5",
    ),
    "a true number": (
        lambda: schedule_of("bfs", stages=True),
        "stages must be an integer; got True",
    ),
    "devices of 1f1b": (
        lambda: schedule_of(devices=4),
        "devices must be equal to stages=8 for 1f1b.*got 4",
    ),
    "devices of zbv": (
        lambda: schedule_of("zbv", devices=3),
        "devices must be 4 for zbv.*got 3. For 3 devices give stages=5 or 6",
    ),
    "devices of interleaved": (
        lambda: schedule_of("interleaved", devices=9),
        "devices must be at most stages=8 for interleaved; got 9",
    ),
    "rows": (
        lambda: Schedule("mine", (0, 3), 0, ROWS),
        "mine: microbatches must be at least 1; got 0; "
        "placement must be on the 1 devices that have rows; got stage 1 on device 3; "
        "actions must be of stages below 2; got 2F0; "
        "actions must have one microbatch, and REDUCE_GRAD, RESHARD, UNSHARD none; "
        "got 0B, 0REDUCE_GRAD1.",
    ),
    "no placement": (
        lambda: Schedule("mine", (), 1, ((),)),
        "mine: placement must have at least one stage.",
    ),
    "strings": (
        lambda: Schedule("mine", (0,), 1, STRINGS),
        "mine: rows must consist of Actions; got '0F0'.",
    ),
    "an action": (
        lambda: Action.parse("F0"),
        "An action must be a stage, one of F, B, I, W, SEND_F, RECV_F",
    ),
    "stages on two devices": (
        lambda: parse("0F0,1F0\n0B0,3F0"),
        r"each stage must be on one device; got stage 0 on \[0, 1\], stage 2 on none. "
        r"Give placement=.",
    ),
    "text": (
        lambda: Schedule.from_text("0F0 0B0"),
        'A schedule must begin with "name: 8 microbatches',
    ),
    "messages": (
        lambda: with_messages(parse("0F0,0B1,0F1,0B0\n1F0,1B0,1F1,1B1")),
        "device 0 waits for itself",
    ),
    "weights": (
        lambda: with_weights(parse("0I0,0F0"), limit=1),
        "^mine: these wait for actions that never run: device 0 at 0I0.$",
    ),
    "no live stages": (lambda: with_units(gpipe(), live=0), "live must be at least 1.*got 0"),
    "a cost of one stage": (
        lambda: simulate(gpipe(), forward=[1]),
        "simulate: forward must be a cost of at least 0",
    ),
    "a negative cost": (
        lambda: simulate(gpipe(), send=-1),
        "simulate: send must be a cost of at least 0 for each of 2",
    ),
}

STAGES = {
    "too many stages": (
        lambda: split_stages(LAYERS, 7),
        "n must be from 1 to the number of layers, 6; got 7",
    ),
    "sizes": (
        lambda: split_stages(LAYERS, 2, [6]),
        r"balance must be a number of layers, at least 1, for each of 2 stages; got \[6\]",
    ),
    "the sum of sizes": (
        lambda: split_stages(LAYERS, 2, [3, 2]),
        r"balance must add up to 6 layers; got \[3, 2\]",
    ),
    "a balance": (lambda: split_stages(LAYERS, 2, "size"), "balance must be .*; got 'size'"),
    "no sample": (
        lambda: split_stages(LAYERS, 2, "time"),
        "must have a microbatch to measure on. Give sample=",
    ),
    "no such layer": (
        lambda: split_stages(LAYERS, 2, "type:Conv"),
        "balance must match the class of a layer, Embedding, Linear, ReLU, Tanh; got 'type:Conv'",
    ),
    "no layers": (
        lambda: split_stages([nn.ReLU(), 3, "x"], 2),
        r"got layers\[1\] is int, layers\[2\] is str",
    ),
    "a layer": (lambda: split_stages(nn.Bilinear(2, 2, 2), 2), "got Bilinear .* sample=x, blocks="),
    "a forward": (lambda: split_stages(Halved(*LAYERS), 2), "got Halved with its own forward"),
    "a hook": (lambda: split_stages(with_hook(), 2), "with its own hooks"),
    "a parameter": (lambda: split_stages(with_gain(), 2), "with its own gain"),
}

FUNCTIONS = {
    "three stages": (
        lambda: prepare(1, gpipe(3), None),
        r"stages must be 3.*got 1; axis pipe must have 3.*got 2; .*give loss_fn=",
    ),
    "a name": (lambda: prepare(schedule="gpipe"), "schedule must be a Schedule; got str"),
    "skips": (
        lambda: prepare(skips={"a": (1, 1), "b": (0, 2), "c": (0, 1)}),
        r'skips must lead to a later stage of 0..1; got "a": \(1, 1\); "b": \(0, 2\)',
    ),
    "no values": (
        on_an_abstract_mesh,
        "give backward=False; mesh must have values",
    ),
    "a deadlock": (
        lambda: prepare(schedule=parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")),
        "devices 0 -> 1 -> 0 wait for each other",
    ),
}

STEPS = {
    "microbatches": (
        lambda: take_step(batches=(1, 1, 1)),
        "microbatches must be 2, as in the schedule; got 3",
    ),
    "trees": (lambda: take_step(1), "params must be 2 trees, one for each stage; got 1"),
    "lengths": (
        lambda: take_step(batches=[UNEQUAL_LENGTHS] * 2),
        "must have one number of rows; got 1 and 3. Give weights=",
    ),
    "no weight": (
        lambda: take_step(weights=[0, 0]),
        r"weights must be 2 numbers of at least 0, not all 0; got \[0.0, 0.0\]",
    ),
    "a loss": (
        lambda: take_step(batches=(2, 2), loss_fn=lambda y, x: y),
        "loss_fn must return one floating number.*got torch.float32 of shape",
    ),
    "no skip": (
        lambda: take_step(skips={"a": (0, 1)}),
        r"stage 0 must return \(y, \{'a': ...\}\), since it has skips; got Tensor",
    ),
}
MISUSE = {**SCHEDULES, **STAGES, **FUNCTIONS, **STEPS}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_raises_and_names_the_error(name):
    call, words = MISUSE[name]
    with pytest.raises((ScheduleError, ValueError, TypeError), match=words):
        call()
