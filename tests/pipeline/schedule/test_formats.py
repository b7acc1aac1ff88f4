"""A schedule is a value that says all there is to say in text, and what torch.distributed.pipelining reads in CSV."""

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given
from hypothesis import strategies as st

from fshard.errors import ScheduleError
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.messages import with_messages
from fshard.pipeline.schedule.schedule import Action, Kind, Schedule, with_units, without_units

NAMES = ("gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipe-v")
schedules = st.builds(
    lambda name, stages, microbatches: pipeline_schedule(name, stages=stages, microbatches=microbatches),
    st.sampled_from(NAMES),
    st.integers(1, 9),
    st.integers(1, 9),
)
changes = st.sampled_from([lambda s: s, with_messages, with_units, lambda s: with_messages(with_units(s))])


@given(schedules, changes)
def test_text_and_csv_say_the_same_again(schedule, change):
    schedule = change(schedule)
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert Schedule.from_text(f"\n  {schedule.to_text()}\n\n") == schedule
    assert Schedule.from_csv(schedule.to_csv(), name=schedule.name) == schedule


def test_a_device_may_have_nothing_to_do():
    schedule = Schedule("one", (1,), 2, ((), (Action(Kind.F, 0, 0), Action(Kind.F, 0, 1)), ()))
    assert schedule.to_csv() == "\n0F0,0F1\n\n"
    assert schedule.to_text() == "one: 2 microbatches, stages on devices 1\n-\n0F0 0F1\n-"
    assert Schedule.from_csv(schedule.to_csv(), name="one") == schedule == Schedule.from_text(schedule.to_text())


def test_lists_are_kept_as_tuples():
    schedule = Schedule("one", [0], 1, [[Action(Kind.F, 0, 0)]])  # type: ignore[arg-type]
    assert schedule == Schedule("one", (0,), 1, ((Action(Kind.F, 0, 0),),))
    assert len({schedule}) == 1


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_action_can_be_read(kind):
    for action in (Action(kind, 12, 345), Action(kind, 0, 0), Action(kind, 7)):
        assert Action.parse(str(action)) == action


def refused(make) -> str:
    with pytest.raises(ScheduleError) as caught:
        make()
    return str(caught.value)


def test_what_is_no_schedule_is_one_error_that_names_all():
    rows = ((Action(Kind.F, 2, 0), Action(Kind.B, 0), Action(Kind.REDUCE, 0, 1)),)
    assert refused(lambda: Schedule("mine", (0, 3), 0, rows)) == (
        "mine: microbatches=0 has to be at least 1; there are 1 rows, and the placement has stage 1 on device 3; "
        "there are 2 stages, and the rows have 2F0; "
        "one microbatch belongs to each action, none to REDUCE_GRAD, RESHARD, UNSHARD; found 0B, 0REDUCE_GRAD1."
    )
    assert refused(lambda: Schedule("mine", (), 1, ((),))) == "mine: a model has at least one stage."
    assert refused(lambda: Schedule("mine", (0,), 1, (("0F0", Action(Kind.F, 1)),))) == (  # type: ignore[arg-type]
        "mine: the rows have '0F0', which is no Action."
    )


def test_text_that_is_no_schedule_is_refused():
    assert refused(lambda: Action.parse("F0")) == (
        '"F0" is no action: write the stage, one of F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD, '
        "and the microbatch: 2F0."
    )
    assert refused(lambda: Schedule.from_csv("0F0,1F0\n0B0,3F0")) == (
        "csv: each stage must be on one device; got stage 0 on [0, 1], stage 2 on none. Give placement=."
    )
    assert refused(lambda: Schedule.from_text("\n")).endswith('found "".')
    assert refused(lambda: Schedule.from_text("0F0 0B0")) == (
        'A schedule begins with "name: 8 microbatches, stages on devices 0 1 2 3"; found "0F0 0B0".'
    )


def test_a_schedule_may_be_wrong():
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
def test_torch_takes_our_schedules_in_both_forms(path, schedule):
    bare = load(schedule, schedule.to_csv(), "compute_only", path)
    assert bare.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    load(schedule, schedule.to_csv(overlapped=True), "compute_only", path)
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
def test_torch_makes_the_same_schedule(name, kind, stages, microbatches):
    ours = pipeline_schedule(name, stages=stages, microbatches=microbatches)
    read = Schedule.from_csv(torch_rows(kind, ours), name=name)
    assert without_units(read) == ours


def test_the_list_that_torch_reports_for_1f1b_can_be_read_although_it_is_wrong():
    ours = pipeline_schedule("1f1b", stages=4, microbatches=8)
    text = torch_rows(torch_schedules.Schedule1F1B, ours)
    read = without_units(Schedule.from_csv(text, name="1f1b", microbatches=8))
    assert read.rows[:3] == ours.rows[:3]
    assert [str(action) for action in read.rows[3]][:4] == ["3F1", "3B0", "3F2", "3B1"]


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 6), (8, 8)])
def test_torch_overlaps_the_same_actions(stages, microbatches):
    ours = pipeline_schedule("dualpipe-v", stages=stages, microbatches=microbatches)
    *theirs, last = torch_rows(torch_schedules.ScheduleDualPipeV, ours).splitlines()
    *rows, own = ours.to_csv(overlapped=True).splitlines()
    assert rows == theirs
    alone = [cell for cell in last.split(",") if cell not in own.split(",")]  # on its last device torch leaves out one
    assert own == last.replace(",".join(alone), f"({';'.join(alone)})OVERLAP_F_B")
    assert len(alone) == 2


@given(schedules)
def test_what_overlaps_is_read_as_its_parts(schedule):
    assert Schedule.from_csv(schedule.to_csv(overlapped=True), name=schedule.name) == schedule


def test_cells_may_be_empty_or_overlap():
    read = Schedule.from_csv("0F0,, (0F1;1B0)OVERLAP_F_B ,1F0", name="mine")
    assert read.to_csv() == "0F0,0F1,1B0,1F0\n"
