"""Any valid schedule, on threads and on processes, gives the bits of the serial run.

The oracle (`serial`) runs each microbatch in one graph, and adds gradients in the fixed tree.
Schedules are those of the builders, and any that devices can run.
"""

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

# -- schedules -------------------------------------------------------------------------------------


def requirements(kind, stage, microbatch, stages, split):
    """List the actions that must have run before one."""
    if kind is Kind.F:
        return [(Kind.F, stage - 1, microbatch)] if stage else []
    if kind is Kind.W:
        return [(Kind.I, stage, microbatch)]

    following = stage + 1
    actions = [(Kind.F, stage, microbatch)]
    if following < stages:
        backward = Kind.I if following in split else Kind.B
        actions.append((backward, following, microbatch))
    return actions


def any_schedule(choose, placement, microbatches, split=()):
    """Choose, one after the other, actions whose requirements have run.

    `split` has the stages whose backward is divided into I and W.
    """
    stages = len(placement)
    remaining = []
    for stage in range(stages):
        kinds = (Kind.F, Kind.I, Kind.W) if stage in split else (Kind.F, Kind.B)
        for microbatch in range(microbatches):
            remaining += [(kind, stage, microbatch) for kind in kinds]

    done = set()
    rows = [[] for _ in range(max(placement) + 1)]
    while remaining:
        ready = []
        for action in remaining:
            if done.issuperset(requirements(*action, stages, split)):
                ready.append(action)
        kind, stage, microbatch = choose(ready)
        remaining.remove((kind, stage, microbatch))
        done.add((kind, stage, microbatch))
        rows[placement[stage]].append(Action(kind, stage, microbatch))
    return Schedule("any", tuple(placement), microbatches, tuple(map(tuple, rows)))


def named(name, stages, microbatches):
    return pipeline_schedule(name, stages=stages, microbatches=microbatches)


# -- stages ----------------------------------------------------------------------------------------


def dense(params, x):
    return torch.tanh(F.linear(x, *params))


def residual(params, x):
    return x + F.gelu(x @ params["in"]) @ params["out"]


def rectified(params, x, *, in_place):
    return F.relu(x, inplace=in_place) + 0.0


def reused(params, x):
    return torch.sigmoid(x @ params[0]) @ params[0] * params[1]


def stage_of(kind, in_place, sends=None):
    """Return a stage of trees {x, others}: values that are no floats are passed on.

    With `sends`, it also returns a skip connection of that name.
    """
    bodies = {
        "dense": dense,
        "residual": residual,
        "reused": reused,
        "rectified": partial(rectified, in_place=in_place),
    }

    def stage(params, given, **skips):
        others = given["others"]
        y = bodies[kind](params, given["x"])
        for skip in skips.values():
            y = y + skip["v"] * 2
        y = y * others[0].sum() / 8

        result = {"x": y, "others": others}
        if sends is None:
            return result
        return result, {sends: {"v": y * 0.5, "n": others[0]}}

    return stage


def params_of(kind, seed):
    draw = torch.Generator().manual_seed(seed)

    def t(*shape):
        return torch.randn(shape, generator=draw) / 2

    if kind == "dense":
        return t(4, 4), t(4)
    if kind == "residual":
        return {"in": t(4, 4), "out": t(4, 4), "unused": t(2), "count": torch.tensor(3)}
    if kind == "reused":
        return [t(4, 4), t(4)]
    return None


def batches(sizes):
    """Draw microbatches of (rows, length)."""
    draw = torch.Generator().manual_seed(5)
    microbatches = []
    for rows, length in sizes:
        x = torch.randn(rows, length, 4, generator=draw)
        others = (torch.arange(1, rows + 1), "word", None)
        microbatches.append({"x": x, "others": others})
    return microbatches


def loss_fn(y, batch):
    assert y["others"][1:] == ("word", None)
    assert torch.equal(y["others"][0], batch["others"][0])
    loss = (y["x"] - batch["x"].roll(1)).square().mean()
    metrics = {"mean": y["x"].mean(), "n": torch.tensor(len(y["x"]))}
    return loss, metrics


def with_leaves(params):
    """Return the trees with floating parameters that require grad, and these parameters."""
    trees = []
    leaves = []
    for tree in params:
        xs, structure = flatten(tree)
        xs = [x.clone().requires_grad_(x.is_floating_point()) for x in xs]
        trees.append(unflatten(structure, xs))
        leaves += [x for x in xs if x.requires_grad]
    return trees, leaves


def serial_result(stages, params, batch, skips):
    """Run all stages on one microbatch."""
    saved = {}
    value = batch
    for number, (stage, tree) in enumerate(zip(stages, params, strict=True)):
        received = {}
        for name, (_, target) in skips.items():
            if target == number:
                received[name] = saved[name]
        value = stage(tree, value, **received)

        is_source = any(source == number for source, _ in skips.values())
        if is_source:
            value, sent = value
            saved |= sent
    return value


def serial(stages, params, microbatches, skips):
    """Return the loss and gradients of a run of each microbatch in one graph.

    Sums over microbatches are made in the fixed tree, with their samples as weights.
    """
    trees, leaves = with_leaves(params)
    losses = []
    gradients = []
    for batch in microbatches:
        samples = len(batch["x"])
        loss, _ = loss_fn(serial_result(stages, trees, batch, skips), batch)
        gs = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else []
        gradients.append([None if g is None else g * samples for g in gs])
        losses.append(loss.detach().double() * samples)

    total = sum(len(batch["x"]) for batch in microbatches)
    sums = []
    for of_microbatches in zip(*gradients, strict=True):
        is_used = of_microbatches[0] is not None
        sums.append(tree_sum(of_microbatches) / total if is_used else None)
    return (tree_sum(losses) / total).float(), sums


class Case:
    """Stages, parameters, microbatches and a schedule, all drawn."""

    def __init__(self, choose, devices, schedule=None):
        count = schedule.stages if schedule else choose(range(devices, 6))
        placement = [*range(devices), *(choose(range(devices)) for _ in range(count - devices))]
        kinds = [choose(["dense", "residual", "reused", "rectified"]) for _ in placement]
        self.params = [params_of(kind, seed) for seed, kind in enumerate(kinds)]

        # A skip connection between two stages, if two unlike ones are drawn.
        ends = sorted({choose(range(count)), choose(range(count))})
        self.skips = {"far": tuple(ends)} if len(ends) == 2 else {}
        source = ends[0] if self.skips else None
        self.stages = []
        self.plain = []
        for number, kind in enumerate(kinds):
            sends = "far" if number == source else None
            self.stages.append(stage_of(kind, in_place=True, sends=sends))
            self.plain.append(stage_of(kind, in_place=False, sends=sends))

        microbatches = schedule.microbatches if schedule else choose(range(1, 6))
        sizes = [(choose([1, 2, 3]), choose([1, 2])) for _ in range(microbatches)]
        self.batches = batches(sizes)
        split = [stage for stage in range(count) if choose([True, False])]
        self.schedule = schedule or any_schedule(choose, placement, microbatches, split)

    def check(self, mesh, modes=(True, True, False)):
        """Run it twice in each mode, and compare what this process has with the serial run."""
        loss, gradients = serial(self.plain, self.params, self.batches, self.skips)
        samples = sum(len(batch["x"]) for batch in self.batches)
        options = {"mesh": mesh, "skips": self.skips}
        for reproducible in modes:
            step = pipelined(
                self.stages, self.schedule, loss_fn, reproducible=reproducible, **options
            )
            step(self.params, self.batches)
            actual = step(self.params, self.batches)

            self.check_gradients(actual.gradients, gradients, reproducible)
            assert torch.equal(actual.loss, loss)
            assert actual.metrics["n"] == samples

    def check_gradients(self, actual, gradients, reproducible):
        """Compare trees of gradients, one for each stage, with the list of the serial run."""
        following = iter(gradients)
        for params, tree in zip(self.params, actual, strict=True):
            expected = []
            for x in flatten(params)[0]:
                expected.append(next(following) if x.is_floating_point() else None)

            is_of_another_process = tree is None and params is not None
            if is_of_another_process or not expected:
                continue
            leaves, _ = flatten(tree, none_is_leaf=True)
            for g, expected_g in zip(leaves, expected, strict=True):
                assert (g is None) == (expected_g is None)
                if g is not None and reproducible:
                    assert torch.equal(g, expected_g)
                elif g is not None:
                    torch.testing.assert_close(g, expected_g)


@settings(max_examples=25)
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_random_schedule_equals_serial_run_bitwise(source, devices):
    Case(source.choice, devices).check(fs.make_mesh({"pipe": devices}))


@pytest.mark.parametrize("name", BUILDERS)
def test_named_schedules_give_equal_bits(name):
    """Also with fewer microbatches than stages, and with messages and actions on weights."""
    for microbatches in (1, 6):
        bare = named(name, 4, microbatches)
        for schedule in (bare, with_units(with_messages(bare))):
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
    first, x = given
    return F.linear(x, *params) * first


def on_odd_addresses(sizes):
    """Return losses and gradients of messages in which a tensor of any length precedes another."""
    mesh = fs.make_mesh({"pipe": 2})
    step = pipelined(
        [two_tensors, of_two_tensors],
        named("gpipe", 2, 1),
        lambda y, _: y.square().mean(),
        mesh=mesh,
        reproducible=True,
    )
    results = []
    for n in sizes:
        draw = torch.Generator().manual_seed(n)
        params = []
        for _ in range(2):
            w = torch.randn(6, 6, generator=draw)
            params.append((w, torch.randn(6, generator=draw)))
        outcome = step(params, [torch.randn(n, 6, generator=draw)])
        gradients, _ = flatten(outcome.gradients)  # of the stages of this process
        results.append([outcome.loss, *gradients])
    return results


def test_received_tensors_are_aligned_for_equal_bits(two):
    """Kernels round differently at other addresses, and a message is one buffer."""
    sizes = range(1, 9)
    expected = on_odd_addresses(sizes)

    first, last = two.run(on_odd_addresses, sizes)

    for full, (loss, *of_first), (_, *of_last) in zip(expected, first, last, strict=True):
        assert all(map(torch.equal, full, [loss, *of_first, *of_last]))
        assert len(full) == 1 + len(of_first) + len(of_last)


def three_tensors(w, x):
    return x * w, x + 1, x + 2


def writing_to_the_last(w, received):
    x, saved, written = received
    y = saved * w
    written.add_(1)
    return x + y + written


def gradients_with_a_written_input():
    stages = [three_tensors, writing_to_the_last]
    step = pipelined(stages, named("gpipe", 2, 1), total, mesh=fs.make_mesh({"pipe": 2}))
    return step([torch.ones(16)] * 2, [torch.ones(1, 16)]).gradients


def test_stage_may_write_to_one_of_several_received_tensors(two):
    """They share a buffer, and would share a version, which autograd compares."""
    _, last = two.run(gradients_with_a_written_input)
    assert torch.equal(last[1], torch.full((16,), 2.0))


# -- what devices hold and send --------------------------------------------------------------------


def count_alive(references):
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 6), (4, 2), (3, 1), (1, 3)])
def test_one_f_one_b_frees_activations_after_their_backward(stages, microbatches):
    """Weak references to saved tensors count the graphs of a stage.

    After the step there are none.
    """
    saved = [[] for _ in range(stages)]
    results = []
    most = [0] * stages

    def watched(number, w, x):
        y = torch.sigmoid(x @ w)
        saved[number].append(weakref.ref(y.untyped_storage()))
        most[number] = max(most[number], count_alive(saved[number]))

        # A result is freed when it is sent, except for what its graph saves.
        assert count_alive(results) == 0
        result = y * 2
        results.append(weakref.ref(result.untyped_storage()))
        return result

    step = pipelined(
        [partial(watched, number) for number in range(stages)],
        named("1f1b", stages, microbatches),
        lambda y, batch: y.sum(),
        mesh=fs.make_mesh({"pipe": stages}),
    )
    step([torch.ones(2, 2)] * stages, [torch.ones(1, 2)] * microbatches)

    assert most == [min(microbatches, stages - stage) for stage in range(stages)]
    assert sum(map(count_alive, saved)) == 0
    assert count_alive(results) == 0


def scaled(w, x):
    return x * w


def total(y, batch):
    return y.sum()


def lengths(*sizes):
    return [torch.ones(1, size) for size in sizes]


def test_message_header_is_sent_once_per_shape():
    step = pipelined([scaled] * 3, named("gpipe", 3, 4), total, mesh=fs.make_mesh({"pipe": 3}))

    def messages(*sizes):
        """Count the messages that each device sends for microbatches of some lengths."""
        with fs.ledger() as ledger:
            step([torch.tensor(2.0)] * 3, lengths(*sizes))
        return [ledger.calls(device, collective="send") for device in range(3)]

    # Values and gradients of four microbatches; the outcome is broadcast.
    first, second, last = 4, 4 + 4, 4
    header = 2  # messages

    # Headers of all kinds; of the outcome of another batch; none; of one more length.
    assert messages(3, 3, 5, 3) == [first + 2 * header, second + 4 * header, last + 4 * header]
    assert messages(5, 3, 3, 3) == [first, second, last + 2 * header]
    assert messages(3, 3, 5, 3) == [first, second, last]
    assert messages(5, 3, 3, 3) == [first, second, last]
    assert messages(3, 3, 5, 4) == [first + header, second + 2 * header, last + 3 * header]


def placeholder(x):
    """Return a tensor of the shape of x that has the memory of one number."""
    return x.new_empty(()).expand(x.shape)


def with_placeholders(has_placeholders):
    """The first stage's process needs no targets, the last one's no inputs."""
    mesh = fs.make_mesh({"pipe": 2})
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=draw)
    target = torch.randn(6, 4, generator=draw)
    rank = torch.distributed.get_rank()
    if has_placeholders and rank == 0:
        target = placeholder(target)
    elif has_placeholders:
        x = placeholder(x)

    stages = [lambda w, batch: batch[0] @ w, lambda w, x: x @ w]
    step = pipelined(
        stages, named("1f1b", 2, 3), lambda y, batch: F.mse_loss(y, batch[1]), mesh=mesh
    )
    microbatches = [*zip(x.chunk(3), target.chunk(3), strict=True)]
    outcome = step([torch.eye(4), torch.ones(4, 4)], microbatches)
    return outcome.loss, outcome.gradients[rank]


def test_placeholder_inputs_on_other_processes_give_equal_bits(two):
    expected = two.run(with_placeholders, False)

    actual = two.run(with_placeholders, True)

    for (loss, g), (expected_loss, expected_g) in zip(actual, expected, strict=True):
        assert torch.equal(loss, expected_loss)
        assert torch.equal(g, expected_g)


def test_stages_on_one_device_send_no_messages():
    def messages(placement):
        """Count the messages that each device sends in a second step, without headers."""
        schedule = any_schedule(lambda ready: ready[0], placement, 3)
        step = pipelined([scaled] * 3, schedule, total, mesh=fs.make_mesh({"pipe": 2}))
        step([torch.tensor(2.0)] * 3, lengths(1, 1, 1))
        with fs.ledger() as ledger:
            step([torch.tensor(2.0)] * 3, lengths(1, 1, 1))
        return [ledger.calls(device, collective="send") for device in range(2)]

    assert messages([0, 0, 1]) == [3, 3]
    assert messages([0, 1, 0]) == [6, 6]


def positive(w, x):
    return (x * w)[x[:, 0] > 0]


def test_value_dependent_shapes_need_dynamic():
    xs = [torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [-1.0]])]
    ws = [torch.tensor(3.0), torch.tensor(2.0)]
    schedule = named("gpipe", 2, 2)
    mesh = fs.make_mesh({"pipe": 2})

    message = "the result of stage 0 for microbatch 1 must be .*2, 1.*got .*1, 1.*dynamic=True"
    with pytest.raises(ValueError, match=message):
        pipelined([positive, scaled], schedule, total, mesh=mesh)(ws, xs)

    step = pipelined([positive, scaled], schedule, total, mesh=mesh, dynamic=True)
    actual = step(ws, xs, [1, 1])
    assert actual.loss == (12 + 6) / 2
    assert [g.item() for g in actual.gradients] == [3.0, 4.5]


# -- without a backward, beside other axes ---------------------------------------------------------


def test_forward_only_step_evaluates_and_infers():
    xs = lengths(1, 2, 3)
    ws = [torch.tensor(2.0), torch.tensor(3.0)]
    records_graph = []

    def stage(w, x):
        records_graph.append(torch.is_grad_enabled() or x.requires_grad or w.requires_grad)
        return w * x

    def loss(y, batch):
        return y.mean(), {"largest": y.max()}

    stages = [stage] * 2
    schedule = named("1f1b", 2, 3)
    options = {"mesh": fs.make_mesh({"pipe": 2}), "backward": False}

    evaluated = pipelined(stages, schedule, loss, **options)(ws, xs)
    assert evaluated.loss == 6.0
    assert evaluated.gradients == [None, None]
    assert evaluated.metrics == {"largest": 6.0}

    inferred = pipelined(stages, schedule, **options)(ws, xs)
    assert inferred.loss is None
    for y, x in zip(inferred.metrics, xs, strict=True):
        assert torch.equal(y, 6 * x)

    assert not any(records_graph)


def on_two_axes():
    """Run two pipelines of two stages beside each other, each on other data.

    Return the loss and the gradients of each device.
    """
    mesh = fs.make_mesh({"data": 2, "pipe": 2})
    step = pipelined([scaled] * 2, named("1f1b", 2, 2), total, mesh=mesh)

    def main():
        x = torch.full((1, 1), 1.0 + fs.axis_index("data"))
        params = [None, None]
        stage = fs.axis_index("pipe")
        params[stage] = torch.tensor([2.0, 3.0][stage])
        actual = step(params, [x, x])
        gradients = [None if g is None else g.item() for g in actual.gradients]
        return actual.loss.item(), gradients

    return fs.run(main, mesh=mesh)


ON_TWO_AXES = [(6.0, [3.0, None]), (6.0, [None, 2.0]), (12.0, [6.0, None]), (12.0, [None, 4.0])]


def test_pipelines_along_two_axes_run_independently():
    assert on_two_axes() == ON_TWO_AXES


def test_detached_stage_gives_no_gradients_before_it():
    stages = [scaled, lambda w, x: (x * w).detach(), scaled]
    step = pipelined(stages, named("gpipe", 3, 2), total, mesh=fs.make_mesh({"pipe": 3}))
    actual = step([torch.tensor(2.0)] * 3, lengths(1, 1))
    assert actual.gradients == [None, None, 4.0]


# -- threads, and errors of stages -----------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2])
def test_reproducible_step_uses_one_thread(devices):
    threads = set()

    def stage(w, x):
        threads.add(torch.get_num_threads())
        return w * x

    schedule = pipeline_schedule("bfs", stages=2, microbatches=1, devices=devices)
    mesh = fs.make_mesh({"pipe": devices})
    step = pipelined([stage] * 2, schedule, lambda y, x: y.sum(), mesh=mesh, reproducible=True)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        step([torch.ones(())] * 2, [torch.ones(1)])
        assert threads == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("reproducible", [False, True])
def test_microbatch_of_weight_zero_may_have_no_numbers(name, reproducible):
    schedule = fs.pipeline_schedule(name, stages=2, microbatches=3)
    params = [torch.eye(2), torch.full((2, 2), 0.5)]
    first = torch.ones(1, 2)
    not_a_number = torch.full((1, 2), torch.nan)
    last = torch.full((1, 2), 2.0)

    step = pipelined(
        [lambda w, x: x @ w, lambda w, x: (x @ w).tanh()],
        schedule,
        lambda y, x: (y.square().mean(), {"mean": y.mean()}),
        mesh=fs.make_mesh({"pipe": 2}),
        reproducible=reproducible,
    )
    result = step(params, [first, not_a_number, last], weights=[1, 0, 3])

    leaves = [x.clone().requires_grad_() for x in params]
    y1 = (first @ leaves[0] @ leaves[1]).tanh()
    y3 = (last @ leaves[0] @ leaves[1]).tanh()
    loss = (y1.square().mean() + 3 * y3.square().mean()) / 4
    torch.testing.assert_close(result.loss, loss.detach())
    torch.testing.assert_close(result.gradients, [*torch.autograd.grad(loss, leaves)])
    assert result.metrics["mean"].isfinite()


def test_error_in_a_stage_notes_stage_and_microbatch():
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=3)
    stages = [lambda w, x: x * w, lambda w, x: x @ w]
    mesh = fs.make_mesh({"pipe": 2})
    step = fs.pipeline.pipelined(stages, schedule, lambda y, x: y.sum(), mesh=mesh)
    weights = [torch.ones(()), torch.ones(2, 2)]

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        step(weights, [torch.ones(1, 2), torch.ones(1, 3), torch.ones(1, 2)])

    assert "in 1F1 of the schedule: stage 1, microbatch 1" in error.value.__notes__
    step(weights, [torch.ones(1, 2)] * 3)  # the next step runs


# -- what was done when ----------------------------------------------------------------------------


def watch_a_step(name):
    """Run a step; return the schedule and the timeline of the devices of this process."""
    schedule = fs.pipeline_schedule(name, stages=4, microbatches=3)
    mesh = fs.make_mesh({"pipe": schedule.devices})
    stages = [lambda w, x: w * x] * 4
    step = fs.pipeline.pipelined(stages, schedule, lambda y, x: y.sum(), mesh=mesh)
    params = [torch.ones(())] * 4
    microbatches = [torch.ones(2)] * 3

    with fs.pipeline.timeline() as run:
        step(params, microbatches)
    step(params, microbatches)  # is not recorded
    return schedule, run


def assert_runs_the_schedule(schedule, run, devices):
    """Assert that the timeline of some devices has the rows of the schedule, and its messages."""
    for device, row in enumerate(schedule.rows):
        events = [event for event in run.events if event.device == device]
        computed = [event for event in events if event.action.kind in "FBIW"]
        expected = [*row] if device in devices else []
        assert [event.action for event in computed] == expected
        assert all(event.start <= event.end for event in events)
        assert all(before.end <= after.start for before, after in pairwise(computed))

    messages = [event.action for event in run.events if event.action.kind not in "FBIW"]
    if len(devices) == schedule.devices:
        assert Counter(messages) == Counter(action.partner for action in messages)
        assert len(messages) == 2 * schedule.simulate().messages

    records = json.loads(run.to_chrome_trace())["traceEvents"]
    complete_events = [record for record in records if record["ph"] == "X"]
    assert len(complete_events) == len(run.events)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_timeline_has_the_actions_of_the_schedule(name):
    schedule, run = watch_a_step(name)
    assert_runs_the_schedule(schedule, run, range(schedule.devices))
