"""Messages and gathered weights: put in at the right places, in one order for both ends, and taken
out again.
"""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from fshard.pipeline.schedule.actions import COMPUTE, MESSAGES, UNITS, Action, Kind
from fshard.pipeline.schedule.builders import BUILDERS, pipeline_schedule
from fshard.pipeline.schedule.communication import with_messages, with_units

schedules = st.builds(
    lambda name, stages, microbatches: pipeline_schedule(
        name, stages=stages, microbatches=microbatches
    ),
    st.sampled_from([*BUILDERS]),
    st.integers(1, 10),
    st.integers(1, 10),
)


def test_with_messages_sends_after_each_computation():
    schedule = pipeline_schedule("zbv", stages=4, microbatches=1)
    assert with_messages(schedule).to_csv().splitlines() == [
        "0F0,0SEND_F0,3RECV_F0,3F0,3I0,3SEND_B0,3W0,0RECV_B0,0I0,0W0",
        "1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,2I0,1I0,1SEND_B0,2W0,1W0",
    ]


@given(schedules)
def test_with_messages_round_trips(schedule):
    assert with_messages(schedule).without(MESSAGES) == schedule
    assert with_messages(with_messages(schedule)) == with_messages(schedule)


# Gathered weights


@given(schedules, st.integers(1, 3), st.booleans())
def test_with_units_unshards_used_stages_within_the_limit(schedule, live, messages):
    before = with_messages(schedule) if messages else schedule
    after = with_units(before, live)
    assert after.without(UNITS) == before
    assert with_units(after, live) == after
    for row in after.rows:
        full = set()
        used = defaultdict(int)
        for kind, stage, _ in row:
            if kind is Kind.UNSHARD:
                assert stage not in full
                full.add(stage)
            elif kind is Kind.RESHARD:
                full.remove(stage)
            elif kind is Kind.REDUCE:
                assert used[stage] == schedule.microbatches
                used[stage] = -1
            elif kind in COMPUTE:
                assert stage in full
                used[stage] += kind in {Kind.B, Kind.W}
            assert len(full) <= live
        assert not full
        assert set(used.values()) <= {-1}


def test_with_units_unshards_the_next_stage_ahead():
    schedule = pipeline_schedule("bfs", stages=3, microbatches=1, devices=1)
    assert with_units(schedule).to_csv() == (
        "0UNSHARD,1UNSHARD,0F0,0RESHARD,2UNSHARD,1F0,2F0,2B0,2REDUCE_GRAD,2RESHARD,0UNSHARD,1B0,1REDUCE_GRAD,"
        "1RESHARD,0B0,0REDUCE_GRAD,0RESHARD\n"
    )


def test_messages_and_units_are_added_in_either_order():
    schedule = pipeline_schedule("interleaved", stages=4, microbatches=3)
    assert with_messages(with_units(schedule)).without(UNITS) == with_messages(schedule)
    assert with_units(with_messages(schedule)).without(MESSAGES) == with_units(schedule)
    assert Action(Kind.UNSHARD, 0) in with_messages(with_units(schedule)).rows[0]
