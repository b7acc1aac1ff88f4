"""Running schedules: any order that can be, on threads and on processes, gives the bits of the serial run."""

import json
import random
import weakref
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard.mesh.layout import flatten, unflatten
from fshard.mesh.layout.arithmetic import tree_sum
from fshard.pipeline.execution.pipelined import pipelined
from fshard.pipeline.schedule.actions import Action, Kind
from fshard.pipeline.schedule.builders import BUILDERS, pipeline_schedule
from fshard.pipeline.schedule.communication import with_messages, with_units
from fshard.pipeline.schedule.schedule import Schedule
from tests.helpers.processes import run_processes

# -- schedules ----------------------------------------------------------------------------------------------------


def any_schedule(choose, placement, microbatches, split=()):
    """Make a schedule by letting devices do, in any order, what can be done: then it can be run."""
    stages = len(placement)
    devices = max(placement) + 1
    done = set()
    rows = [[] for _ in range(devices)]

    def needs(kind, stage, m):
        backward = [(Kind.I if s in split else Kind.B, s, m) for s in (stage + 1,) if s < stages]
        if kind is Kind.F:
            return [(Kind.F, stage - 1, m)] if stage else []
        return [(Kind.I, stage, m)] if kind is Kind.W else [(Kind.F, stage, m), *backward]

    def kinds(stage):
        return (Kind.F, Kind.I, Kind.W) if stage in split else (Kind.F, Kind.B)

    left = [
        (kind, stage, m)
        for stage in range(stages)
        for m in range(microbatches)
        for kind in kinds(stage)
    ]
    while left:
        ready = [one for one in left if done.issuperset(needs(*one))]
        one = choose(ready)
        left.remove(one)
        done.add(one)
        rows[placement[one[1]]].append(Action(*one))
    return Schedule("any", tuple(placement), microbatches, tuple(map(tuple, rows)))


def named(name, stages, microbatches):
    return pipeline_schedule(name, stages=stages, microbatches=microbatches)


# -- stages -------------------------------------------------------------------------------------------------------


def dense(params, x):
    return torch.tanh(F.linear(x, *params))


def residual(params, x):
    return x + F.gelu(x @ params["in"]) @ params["out"]


def rectified(params, x, *, in_place):
    return F.relu(x, inplace=in_place) + 0.0


def reused(params, x):
    return torch.sigmoid(x @ params[0]) @ params[0] * params[1]


def stage_of(kind, in_place, sends=None):
    """Return a stage on trees (x, tokens, a word): what is no float goes along."""
    body = {
        "dense": dense,
        "residual": residual,
        "reused": reused,
        "rectified": partial(rectified, in_place=in_place),
    }[kind]

    def stage(params, given, **skips):
        x = given["x"]
        others = given["others"]
        y = body(params, x)
        for value in skips.values():
            y = y + value["v"] * 2
        y = y * others[0].sum() / 8
        result = {"x": y, "others": others}
        return (result, {sends: {"v": y * 0.5, "n": others[0]}}) if sends else result

    return stage


def params_of(kind, seed):
    draw = torch.Generator().manual_seed(seed)

    def t(*shape):
        return torch.randn(shape, generator=draw) / 2

    return {
        "dense": (t(4, 4), t(4)),
        "residual": {"in": t(4, 4), "out": t(4, 4), "unused": t(2), "count": torch.tensor(3)},
        "reused": [t(4, 4), t(4)],
        "rectified": None,
    }[kind]


def batches(rows):
    draw = torch.Generator().manual_seed(5)
    return [
        {
            "x": torch.randn(n, length, 4, generator=draw),
            "others": (torch.arange(1, n + 1), "word", None),
        }
        for n, length in rows
    ]


def loss_fn(y, batch):
    assert y["others"][1:] == ("word", None) and torch.equal(y["others"][0], batch["others"][0])
    return (y["x"] - batch["x"].roll(1)).square().mean(), {
        "mean": y["x"].mean(),
        "n": torch.tensor(len(y["x"])),
    }


def serial(stages, params, microbatches, skips):
    """Run each microbatch in one graph, add up in the fixed tree."""
    losses = []
    gradients = []
    total = sum(len(one["x"]) for one in microbatches)
    leaves = [
        [x.clone().requires_grad_(x.is_floating_point()) for x in flatten(tree)[0]]
        for tree in params
    ]
    for batch in microbatches:
        kept, value = {}, batch
        for number, (stage, tree) in enumerate(zip(stages, params, strict=True)):
            given = {name: kept[name] for name, (_, to) in skips.items() if to == number}
            value = stage(unflatten(flatten(tree)[1], leaves[number]), value, **given)
            if any(source == number for source, _ in skips.values()):
                value, actual = value
                kept |= actual
        loss, _ = loss_fn(value, batch)
        expected = [x for own in leaves for x in own if x.requires_grad]
        gs = torch.autograd.grad(loss, expected, allow_unused=True) if expected else []
        gradients.append([None if g is None else g * len(batch["x"]) for g in gs])
        losses.append(loss.detach().double() * len(batch["x"]))
    sums = [None if gs[0] is None else tree_sum(gs) / total for gs in zip(*gradients, strict=True)]
    return (tree_sum(losses) / total).float(), sums


class Case:
    """Stages, parameters, microbatches and a schedule, all drawn."""

    def __init__(self, choose, devices, schedule=None):
        count = schedule.stages if schedule else choose(range(devices, 6))
        placement = [*range(devices), *(choose(range(devices)) for _ in range(count - devices))]
        kinds = [choose(["dense", "residual", "reused", "rectified"]) for _ in placement]
        ends = sorted({choose(range(count)), choose(range(count))})
        self.skips = {"far": tuple(ends)} if len(ends) == 2 else {}
        self.stages, self.plain = (
            [
                stage_of(kind, in_place, sends="far" if self.skips and number == ends[0] else None)
                for number, kind in enumerate(kinds)
            ]
            for in_place in (True, False)
        )
        self.params = [params_of(kind, seed) for seed, kind in enumerate(kinds)]
        self.batches = batches(
            [
                (choose([1, 2, 3]), choose([1, 2]))
                for _ in range(schedule.microbatches if schedule else choose(range(1, 6)))
            ]
        )
        split = [stage for stage in range(count) if choose([True, False])]
        self.schedule = schedule or any_schedule(choose, placement, len(self.batches), split)

    def check(self, mesh, modes=(True, True, False)):
        """Run it twice, in either mode, and compare what is on this process with the serial run."""
        expected, gradients = serial(self.plain, self.params, self.batches, self.skips)
        for reproducible in modes:
            step = pipelined(
                self.stages,
                self.schedule,
                loss_fn,
                mesh=mesh,
                skips=self.skips,
                reproducible=reproducible,
            )
            for _ in range(2):
                actual = step(self.params, self.batches)
            wanted = iter(gradients)
            for tree, own in zip(self.params, actual.gradients, strict=True):
                exact = [next(wanted) if x.is_floating_point() else None for x in flatten(tree)[0]]
                if own is None and tree is not None:
                    continue  # a stage of another process
                for ours, g in zip(
                    flatten(own, none_is_leaf=True)[0] if exact else (), exact, strict=True
                ):
                    assert (ours is None) == (g is None)
                    if g is not None and reproducible:
                        assert torch.equal(ours, g)
                    elif g is not None:
                        torch.testing.assert_close(ours, g)
            assert torch.equal(actual.loss, expected)
            assert actual.metrics["n"] == sum(len(one["x"]) for one in self.batches)


@settings(max_examples=25)
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_random_schedule_equals_serial_run_bitwise(source, devices):
    Case(source.choice, devices).check(fs.make_mesh({"pipe": devices}))


@pytest.mark.parametrize("name", BUILDERS)
def test_named_schedules_give_equal_bits(name):
    """Also with fewer microbatches than stages, and with messages and actions on weights."""
    for microbatches in (1, 6):
        for schedule in (
            named(name, 4, microbatches),
            with_units(with_messages(named(name, 4, microbatches))),
        ):
            case = Case(random.Random(1).choice, 4, schedule=schedule)
            case.check(fs.make_mesh({"pipe": schedule.devices}), modes=(True,))


def on_processes(seeds, devices):
    mesh = fs.make_mesh({"pipe": devices})
    for seed in seeds:
        Case(random.Random(seed).choice, devices).check(mesh)
    Case(random.Random(0).choice, 2 * devices, schedule=named("zbv", 2 * devices, 5)).check(mesh)


def test_random_schedules_on_checked_processes_equal_serial_run():
    run_processes(on_processes, 2, range(2), 2, environment={"FSHARD_CHECK": "1"})


def two_tensors(params, x):
    return x[:, :1] + 0.0, F.linear(x, *params)


def of_two_tensors(params, given):
    odd, x = given
    return F.linear(x, *params) * odd


def on_odd_addresses(sizes):
    """Return losses and gradients of messages in which a tensor of any length comes before another."""
    actual = []
    mesh = fs.make_mesh({"pipe": 2})
    for n in sizes:
        draw = torch.Generator().manual_seed(n)
        params = [
            (torch.randn(6, 6, generator=draw), torch.randn(6, generator=draw)) for _ in range(2)
        ]
        step = pipelined(
            [two_tensors, of_two_tensors],
            named("gpipe", 2, 1),
            lambda y, _: y.square().mean(),
            mesh=mesh,
            reproducible=True,
        )
        outcome = step(params, [torch.randn(n, 6, generator=draw)])
        actual.append(
            [outcome.loss, *(g for tree in outcome.gradients if tree is not None for g in tree)]
        )
    return actual


def test_received_tensors_are_aligned_for_equal_bits(two):
    """Kernels round differently at other addresses, and a message is one buffer."""
    full = on_odd_addresses(range(1, 9))
    first, last = two.run(on_odd_addresses, range(1, 9))
    for all_of_it, *parts in zip(full, first, last, strict=True):
        assert all(
            torch.equal(x, y) for x, y in zip(all_of_it, [*parts[0], *parts[1][1:]], strict=True)
        )


def three_tensors(w, x):
    return x * w, x + 1, x + 2


def writing_to_the_last(w, received):
    x, saved, written = received
    y = saved * w
    written.add_(1)
    return x + y + written


def gradients_with_a_written_input():
    step = pipelined(
        [three_tensors, writing_to_the_last],
        named("gpipe", 2, 1),
        total,
        mesh=fs.make_mesh({"pipe": 2}),
    )
    return step([torch.ones(16)] * 2, [torch.ones(1, 16)]).gradients


def test_stage_may_write_to_one_of_several_received_tensors(two):
    """They share a buffer, and would share a version, which autograd compares."""
    _, last = two.run(gradients_with_a_written_input)
    assert torch.equal(last[1], torch.full((16,), 2.0))


# -- what devices hold and send -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 6), (4, 2), (3, 1), (1, 3)])
def test_one_f_one_b_frees_activations_after_their_backward(stages, microbatches):
    """Weak references to what a stage has saved tell how many graphs there are; after the step there is none."""
    alive, made = [[] for _ in range(stages)], []
    most = [0] * stages

    def watched(number, w, x):
        y = torch.sigmoid(x @ w)
        alive[number].append(weakref.ref(y.untyped_storage()))
        most[number] = max(most[number], sum(one() is not None for one in alive[number]))
        assert not any(
            one() is not None for one in made
        )  # results are sent and let go, but for what is saved of them
        result = y * 2
        made.append(weakref.ref(result.untyped_storage()))
        return result

    step = pipelined(
        [partial(watched, number) for number in range(stages)],
        named("1f1b", stages, microbatches),
        lambda y, batch: y.sum(),
        mesh=fs.make_mesh({"pipe": stages}),
    )
    step([torch.ones(2, 2)] * stages, [torch.ones(1, 2)] * microbatches)
    assert most == [min(microbatches, stages - stage) for stage in range(stages)]
    assert not any(one() is not None for own in [*alive, made] for one in own)


def scaled(w, x):
    return x * w


def total(y, batch):
    return y.sum()


def lengths(*sizes):
    return [torch.ones(1, size) for size in sizes]


def test_message_header_is_sent_once_per_shape():
    step = pipelined([scaled] * 3, named("gpipe", 3, 4), total, mesh=fs.make_mesh({"pipe": 3}))

    def messages(*sizes):
        with fs.ledger() as told:
            step([torch.tensor(2.0)] * 3, lengths(*sizes))
        return [told.calls(device, collective="send") for device in range(3)]

    two = 2  # messages that tell what another is
    alone = [4, 4 + 4, 4]  # values and gradients; the outcome is broadcast
    assert messages(3, 3, 5, 3) == [alone[0] + 2 * two, alone[1] + 4 * two, alone[2] + 4 * two]
    assert messages(5, 3, 3, 3) == [
        alone[0],
        alone[1],
        alone[2] + 2 * two,
    ]  # the outcome of another batch
    assert messages(3, 3, 5, 3) == messages(5, 3, 3, 3) == alone
    assert messages(3, 3, 5, 4) == [alone[0] + two, alone[1] + 2 * two, alone[2] + 3 * two]


def shapes_where_values_are_not_needed(pretend):
    """The first stage's device has no targets, the last one's no inputs."""
    mesh = fs.make_mesh({"pipe": 2})
    draw = torch.Generator().manual_seed(0)
    first = torch.distributed.get_rank() == 0
    x, target = (torch.randn(6, 4, generator=draw) for _ in range(2))
    if pretend:
        x, target = (
            (x, target.new_empty(()).expand(6, 4))
            if first
            else (x.new_empty(()).expand(6, 4), target)
        )
    stages = [lambda w, batch: batch[0] @ w, lambda w, x: x @ w]
    step = pipelined(
        stages, named("1f1b", 2, 3), lambda y, batch: F.mse_loss(y, batch[1]), mesh=mesh
    )
    outcome = step(
        [torch.eye(4), torch.ones(4, 4)], list(zip(x.chunk(3), target.chunk(3), strict=True))
    )
    return outcome.loss, outcome.gradients[0 if first else 1]


def test_placeholder_inputs_on_other_processes_give_equal_bits(two):
    for (loss, g), (same_loss, same) in zip(
        *(two.run(shapes_where_values_are_not_needed, pretend) for pretend in (False, True)),
        strict=True,
    ):
        assert torch.equal(loss, same_loss) and torch.equal(g, same)


def test_stages_on_one_device_send_no_messages():
    def stages(placement):
        rows = any_schedule(lambda ready: ready[0], placement, 3)
        step = pipelined([scaled] * 3, rows, total, mesh=fs.make_mesh({"pipe": 2}))
        step([torch.tensor(2.0)] * 3, lengths(1, 1, 1))
        with fs.ledger() as told:
            step([torch.tensor(2.0)] * 3, lengths(1, 1, 1))
        return [told.calls(device, collective="send") for device in range(2)]

    assert stages([0, 0, 1]) == [3, 3]
    assert stages([0, 1, 0]) == [6, 6]


def positive(w, x):
    return (x * w)[x[:, 0] > 0]


def test_value_dependent_shapes_need_dynamic():
    xs = [torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [-1.0]])]
    stages, ws = [positive, scaled], [torch.tensor(3.0), torch.tensor(2.0)]
    mesh = fs.make_mesh({"pipe": 2})
    with pytest.raises(
        ValueError,
        match="the result of stage 0 for microbatch 1 must be .*2, 1.*got .*1, 1.*dynamic=True",
    ):
        pipelined(stages, named("gpipe", 2, 2), total, mesh=mesh)(ws, xs)
    actual = pipelined(stages, named("gpipe", 2, 2), total, mesh=mesh, dynamic=True)(ws, xs, [1, 1])
    assert actual.loss == (12 + 6) / 2 and [g.item() for g in actual.gradients] == [3.0, 4.5]


# -- without a backward, beside other axes ------------------------------------------------------------------------


def test_forward_only_step_evaluates_and_infers():
    mesh = fs.make_mesh({"pipe": 2})
    xs = lengths(1, 2, 3)
    ws = [torch.tensor(2.0), torch.tensor(3.0)]
    recording = []

    def stage(w, x):
        recording.append(torch.is_grad_enabled() or x.requires_grad or w.requires_grad)
        return w * x

    def loss(y, batch):
        return y.mean(), {"largest": y.max()}

    evaluated = pipelined([stage] * 2, named("1f1b", 2, 3), loss, mesh=mesh, backward=False)(ws, xs)
    assert (evaluated.loss, evaluated.gradients, evaluated.metrics) == (
        6.0,
        [None, None],
        {"largest": 6.0},
    )
    inferred = pipelined([stage] * 2, named("1f1b", 2, 3), mesh=mesh, backward=False)(ws, xs)
    assert inferred.loss is None and all(
        torch.equal(y, 6 * x) for y, x in zip(inferred.metrics, xs, strict=True)
    )
    assert not any(recording)


def on_two_axes():
    """Two pipelines of two stages beside each other, each with data of its own."""
    mesh = fs.make_mesh({"data": 2, "pipe": 2})
    step = pipelined([scaled] * 2, named("1f1b", 2, 2), total, mesh=mesh)

    def main():
        x = torch.full((1, 1), 1.0 + fs.axis_index("data"))
        place = fs.axis_index("pipe")
        actual = step(
            [torch.tensor(2.0) if place == 0 else None, torch.tensor(3.0) if place == 1 else None],
            [x, x],
        )
        return actual.loss.item(), [None if g is None else g.item() for g in actual.gradients]

    return fs.run(main, mesh=mesh)


ON_TWO_AXES = [(6.0, [3.0, None]), (6.0, [None, 2.0]), (12.0, [6.0, None]), (12.0, [None, 4.0])]


def test_pipelines_along_two_axes_run_independently():
    assert on_two_axes() == ON_TWO_AXES


def test_detached_stage_gives_no_gradients_before_it():
    stages = [scaled, lambda w, x: (x * w).detach(), scaled]
    step = pipelined(stages, named("gpipe", 3, 2), total, mesh=fs.make_mesh({"pipe": 3}))
    actual = step([torch.tensor(2.0)] * 3, lengths(1, 1))
    assert actual.gradients == [None, None, 4.0]


# -- threads, and errors of stages --------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2])
def test_reproducible_step_uses_one_thread(devices):
    before = torch.get_num_threads()
    seen = set()

    def stage(w, x):
        seen.add(torch.get_num_threads())
        return w * x

    schedule = pipeline_schedule("bfs", stages=2, microbatches=1, devices=devices)
    step = pipelined(
        [stage] * 2,
        schedule,
        lambda y, x: y.sum(),
        mesh=fs.make_mesh({"pipe": devices}),
        reproducible=True,
    )
    torch.set_num_threads(3)
    try:
        step([torch.ones(())] * 2, [torch.ones(1)])
        assert seen == {1} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("reproducible", [False, True])
def test_microbatch_of_weight_zero_may_have_no_numbers(name, reproducible):
    schedule = fs.pipeline_schedule(name, stages=2, microbatches=3)
    stages = [lambda w, x: x @ w, lambda w, x: (x @ w).tanh()]
    step = pipelined(
        stages,
        schedule,
        lambda y, x: (y.square().mean(), {"mean": y.mean()}),
        mesh=fs.make_mesh({"pipe": 2}),
        reproducible=reproducible,
    )
    params = [torch.eye(2), torch.full((2, 2), 0.5)]
    first = torch.ones(1, 2)
    last = torch.full((1, 2), 2.0)
    result = step(params, [first, torch.full((1, 2), torch.nan), last], weights=[1, 0, 3])
    leaves = [x.clone().requires_grad_() for x in params]
    outputs = [(x @ leaves[0] @ leaves[1]).tanh() for x in (first, last)]
    loss = (outputs[0].square().mean() + 3 * outputs[1].square().mean()) / 4
    torch.testing.assert_close(result.loss, loss.detach())
    torch.testing.assert_close(result.gradients, [*torch.autograd.grad(loss, leaves)])
    assert result.metrics["mean"].isfinite()


def test_error_in_a_stage_notes_stage_and_microbatch():
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=3)
    stages = [lambda w, x: x * w, lambda w, x: x @ w]
    step = fs.pipeline.pipelined(
        stages, schedule, lambda y, x: y.sum(), mesh=fs.make_mesh({"pipe": 2})
    )
    weights = [torch.ones(()), torch.ones(2, 2)]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        step(weights, [torch.ones(1, 2), torch.ones(1, 3), torch.ones(1, 2)])
    assert "in 1F1 of the schedule: stage 1, microbatch 1" in error.value.__notes__
    step(weights, [torch.ones(1, 2)] * 3)


# -- what was done when --------------------------------------------------------------------------------------------


def watch_a_step(name):
    """Run a step; return the schedule and what the devices of this process did."""
    schedule = fs.pipeline_schedule(name, stages=4, microbatches=3)
    mesh = fs.make_mesh({"pipe": schedule.devices})
    step = fs.pipeline.pipelined(
        [lambda w, x: w * x] * 4, schedule, lambda y, x: y.sum(), mesh=mesh
    )
    with fs.pipeline.timeline() as run:
        step([torch.ones(())] * 4, [torch.ones(2)] * 3)
    step([torch.ones(())] * 4, [torch.ones(2)] * 3)  # nobody looks any more
    return schedule, run


def assert_is_what_the_schedule_says(schedule, run, devices):
    for device, row in enumerate(schedule.rows):
        events = [event for event in run.events if event.device == device]
        done = [event for event in events if event.action.kind in "FBIW"]
        assert [event.action for event in done] == ([*row] if device in devices else [])
        assert all(event.start <= event.end for event in events)
        assert all(before.end <= after.start for before, after in pairwise(done))
    messages = [event.action for event in run.events if event.action.kind not in "FBIW"]
    if len(devices) == schedule.devices:
        assert Counter(messages) == Counter(action.partner for action in messages)
        assert len(messages) == 2 * schedule.simulate().messages
    records = json.loads(run.to_chrome_trace())["traceEvents"]
    assert sum(record["ph"] == "X" for record in records) == len(run.events)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_timeline_has_the_actions_of_the_schedule(name):
    schedule, run = watch_a_step(name)
    assert_is_what_the_schedule_says(schedule, run, range(schedule.devices))
