"""A schedule is a value that says all there is to say in text, and what
torch.distributed.pipelining reads in CSV.
"""

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given
from hypothesis import strategies as st

from fshard.pipeline.schedule.actions import UNITS, Action, Kind
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.communication import with_messages, with_units
from fshard.pipeline.schedule.schedule import Schedule
from tests.pipeline.schedule.drawn import NAMES

schedules = st.builds(
    lambda name, stages, microbatches: pipeline_schedule(
        name, stages=stages, microbatches=microbatches
    ),
    st.sampled_from(NAMES),
    st.integers(1, 9),
    st.integers(1, 9),
)
changes = st.sampled_from(
    [lambda s: s, with_messages, with_units, lambda s: with_messages(with_units(s))]
)


@given(schedules, changes)
def test_text_and_csv_round_trip(schedule, change):
    schedule = change(schedule)
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert Schedule.from_text(f"\n  {schedule.to_text()}\n\n") == schedule
    assert Schedule.from_csv(schedule.to_csv(), name=schedule.name) == schedule


def test_device_without_actions_is_written_and_parsed():
    schedule = Schedule("one", (1,), 2, ((), (Action(Kind.F, 0, 0), Action(Kind.F, 0, 1)), ()))
    assert schedule.to_csv() == "\n0F0,0F1\n\n"
    assert schedule.to_text() == "one: 2 microbatches, stages on devices 1\n-\n0F0 0F1\n-"
    assert (
        Schedule.from_csv(schedule.to_csv(), name="one")
        == schedule
        == Schedule.from_text(schedule.to_text())
    )


@pytest.mark.parametrize("kind", Kind)
def test_action_of_every_kind_is_parsed(kind):
    for action in (Action(kind, 12, 345), Action(kind, 0, 0), Action(kind, 7)):
        assert Action.parse(str(action)) == action


# torch.distributed.pipelining


def runtime(schedule: Schedule, kind=torch_schedules._PipelineScheduleRuntime):
    """Make as much of torch's object as its formats and builders need."""
    loops = schedule.stages // schedule.devices
    made = object.__new__(kind)
    made.pp_group_size, made._n_microbatches, made._num_stages = (
        schedule.devices,
        schedule.microbatches,
        schedule.stages,
    )
    made.num_stages = schedule.stages
    made.n_local_stages = loops
    made._stages = [None] * loops
    made.microbatches_per_round = schedule.microbatches // max(
        1, schedule.microbatches // schedule.devices
    )
    made.pipeline_order, made._defer_pp_recv = {}, False
    return made


def load(schedule: Schedule, text: str, form: str, path):
    """Have torch read and check a text; return its object."""
    theirs = runtime(schedule)
    theirs._stages = []
    path.write_text(text)
    theirs._load_csv(str(path), format=form)
    return theirs


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("schedules") / "ours.csv"


@given(schedule=schedules)
def test_torch_loads_both_csv_formats(path, schedule):
    bare = load(schedule, schedule.to_csv(), "compute_only", path)
    assert bare.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    full = with_messages(with_units(schedule))
    read = load(schedule, full.to_csv(), "compute_comms", path).pipeline_order_with_comms
    assert [[*map(str, row)] for row in read.values()] == [[*map(str, row)] for row in full.rows]
    sent = load(schedule, with_messages(schedule).to_csv(), "compute_comms", path)
    assert [[*filter(None, row)] for row in sent._simulate().values()] == [
        *sent.pipeline_order_with_comms.values()
    ]


def torch_rows(kind, schedule: Schedule) -> str:
    """Write the CSV of torch's own schedule of the same size."""
    theirs = runtime(schedule, kind)
    if hasattr(kind, "_calculate_single_rank_operations"):
        for theirs.rank in range(schedule.devices):
            theirs.pipeline_order[theirs.rank] = theirs._calculate_single_rank_operations(
                theirs.rank
            )
    else:
        theirs.pipeline_order = theirs._get_pipeline_order()
    rows = theirs.pipeline_order.values()
    return "\n".join(
        ",".join("" if action is None else str(action) for action in row) for row in rows
    )


@pytest.mark.parametrize(
    ("name", "kind", "stages", "microbatches"),
    [
        ("gpipe", torch_schedules.ScheduleGPipe, 4, 6),
        ("gpipe", torch_schedules.ScheduleGPipe, 4, 2),
        ("interleaved", torch_schedules.ScheduleInterleaved1F1B, 8, 8),
        ("interleaved", torch_schedules.ScheduleInterleaved1F1B, 8, 10),
        ("interleaved", torch_schedules.ScheduleInterleaved1F1B, 6, 3),
        ("interleaved", torch_schedules.ScheduleInterleaved1F1B, 8, 3),
        ("dualpipe-v", torch_schedules.ScheduleDualPipeV, 6, 6),
        ("dualpipe-v", torch_schedules.ScheduleDualPipeV, 8, 11),
        ("dualpipe-v", torch_schedules.ScheduleDualPipeV, 2, 3),
    ],
)
def test_named_schedule_equals_that_of_torch(name, kind, stages, microbatches):
    ours = pipeline_schedule(name, stages=stages, microbatches=microbatches)
    read = Schedule.from_csv(torch_rows(kind, ours), name=name)
    assert read.without(UNITS) == ours


def test_from_csv_reads_empty_and_overlapped_cells():
    read = Schedule.from_csv("0F0,, (0F1;1B0)OVERLAP_F_B ,1F0", name="mine")
    assert read.to_csv() == "0F0,0F1,1B0,1F0\n"
