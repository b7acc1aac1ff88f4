"""A schedule is a value that says all there is to say in text, and what torch.distributed.pipelining reads in CSV."""

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given
from hypothesis import strategies as st

from fshard.errors import ScheduleError
from fshard.pipeline.schedule.actions import UNITS, Action, Kind
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.communication import with_messages, with_units
from fshard.pipeline.schedule.schedule import Schedule

NAMES = ("gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipe-v")
schedules = st.builds(
    lambda name, stages, microbatches: pipeline_schedule(name, stages=stages, microbatches=microbatches),
    st.sampled_from(NAMES),
    st.integers(1, 9),
    st.integers(1, 9),
)
changes = st.sampled_from([lambda s: s, with_messages, with_units, lambda s: with_messages(with_units(s))])


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
    assert Schedule.from_csv(schedule.to_csv(), name="one") == schedule == Schedule.from_text(schedule.to_text())


def test_schedule_from_lists_is_hashable():
    schedule = Schedule("one", [0], 1, [[Action(Kind.F, 0, 0)]])  # type: ignore[arg-type]
    assert schedule == Schedule("one", (0,), 1, ((Action(Kind.F, 0, 0),),))
    assert len({schedule}) == 1


@pytest.mark.parametrize("kind", Kind)
def test_action_of_every_kind_is_parsed(kind):
    for action in (Action(kind, 12, 345), Action(kind, 0, 0), Action(kind, 7)):
        assert Action.parse(str(action)) == action


def refused(make) -> str:
    with pytest.raises(ScheduleError) as caught:
        make()
    return str(caught.value)


def test_invalid_rows_raise_one_error_that_names_all():
    rows = ((Action(Kind.F, 2, 0), Action(Kind.B, 0), Action(Kind.REDUCE, 0, 1)),)
    assert refused(lambda: Schedule("mine", (0, 3), 0, rows)) == (
        "mine: microbatches must be at least 1; got 0; placement must be on the 1 devices that have rows; got stage 1 on "
        "device 3; actions must be of stages below 2; got 2F0; "
        "actions must have one microbatch, and REDUCE_GRAD, RESHARD, UNSHARD none; got 0B, 0REDUCE_GRAD1."
    )
    assert refused(lambda: Schedule("mine", (), 1, ((),))) == "mine: placement must have at least one stage."
    assert refused(lambda: Schedule("mine", (0,), 1, (("0F0", Action(Kind.F, 1)),))) == (  # type: ignore[arg-type]
        "mine: rows must consist of Actions; got '0F0'."
    )


def test_text_of_no_schedule_raises():
    assert refused(lambda: Action.parse("F0")).startswith(
        "An action must be a stage, one of F, B, I, W, SEND_F, RECV_F"
    )
    assert refused(lambda: Schedule.from_csv("0F0,1F0\n0B0,3F0")) == (
        "csv: each stage must be on one device; got stage 0 on [0, 1], stage 2 on none. Give placement=."
    )
    assert refused(lambda: Schedule.from_text("\n")).endswith('got "".')
    assert refused(lambda: Schedule.from_text("0F0 0B0")).startswith('A schedule must begin with "name: 8 microbatches')


def test_misplaced_action_can_be_parsed():
    schedule = Schedule.from_csv("0F0,1F0\n0B0", placement=(0, 1), microbatches=1)
    assert schedule.rows[0][1] == Action(Kind.F, 1, 0)  # on a device that has not this stage


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
    made.num_stages, made.n_local_stages, made._stages = schedule.stages, loops, [None] * loops
    made.microbatches_per_round = schedule.microbatches // max(1, schedule.microbatches // schedule.devices)
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
    assert [[*filter(None, row)] for row in sent._simulate().values()] == [*sent.pipeline_order_with_comms.values()]


def torch_rows(kind, schedule: Schedule) -> str:
    """Write the CSV of torch's own schedule of the same size."""
    theirs = runtime(schedule, kind)
    if hasattr(kind, "_calculate_single_rank_operations"):
        for theirs.rank in range(schedule.devices):
            theirs.pipeline_order[theirs.rank] = theirs._calculate_single_rank_operations(theirs.rank)
    else:
        theirs.pipeline_order = theirs._get_pipeline_order()
    rows = theirs.pipeline_order.values()
    return "\n".join(",".join("" if action is None else str(action) for action in row) for row in rows)


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


def test_invalid_1f1b_rows_of_torch_are_parsed():
    ours = pipeline_schedule("1f1b", stages=4, microbatches=8)
    text = torch_rows(torch_schedules.Schedule1F1B, ours)
    read = Schedule.from_csv(text, name="1f1b", microbatches=8).without(UNITS)
    assert read.rows[:3] == ours.rows[:3]
    assert [str(action) for action in read.rows[3]][:4] == ["3F1", "3B0", "3F2", "3B1"]


def test_from_csv_reads_empty_and_overlapped_cells():
    read = Schedule.from_csv("0F0,, (0F1;1B0)OVERLAP_F_B ,1F0", name="mine")
    assert read.to_csv() == "0F0,0F1,1B0,1F0\n"
