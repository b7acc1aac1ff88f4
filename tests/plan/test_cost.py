"""`fs.plan.cost`: operations, bytes and peaks are those of the run that it predicts.

The oracles are the ledger and the memory of that run, formulas of a GPT, and times of small lists
of events, derived by hand.
"""

from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fshard as fs
from fshard import P, optim
from fshard.errors import PlanError
from fshard.mesh.layout.counting import LedgerRow
from fshard.plan import Efficiency, NetworkLink, cost
from fshard.plan.timing import times_of
from fshard.plan.trace import CollectiveStart, CollectiveWait, Copy, Operation
from fshard.source import Site
from tests.helpers.processes import HAS_RULES
from tests.helpers.sampled import examples
from tests.plan.machines import FIXED, H100, ROWS, TOKENS, WIDTH, Block

OPTIMIZERS = {
    "adamw": lambda: optim.adamw(0.1),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1)),
    "sgd": lambda: optim.sgd(0.1, momentum=0.9),
    "masters": lambda: optim.with_master_weights(optim.adamw(0.1)),
}


def program(sizes, *, layers, kv_heads, stage, name, recomputed, dtype, **options):
    """Return a step of a GPT, and its arguments; an axis "model" has planned layers."""
    torch.manual_seed(0)
    mesh = fs.make_mesh(sizes)
    x = torch.randn(ROWS, TOKENS, WIDTH).to(dtype)
    model = nn.Sequential(*(Block(kv_heads) for _ in range(layers))).to(dtype)

    plan = None
    within = None
    local = ()
    if "model" in sizes:
        plan = fs.tensor_parallel(model, axis="model", sample=x, check=False)
        within = plan.rules
        local = plan.axes
    apply, params, buffers = fs.functionalize(model, plan=plan)
    rules = within or P()
    if stage == 3:
        rules = fs.fsdp("data", unit="[*]", within=within)
    params = fs.shard_params(params, rules, mesh=mesh)

    def loss_fn(params, x):
        run = fs.remat(apply) if recomputed else apply
        y, _ = run(params, buffers, x)
        if plan is not None:
            y = plan.full(y)
        return y.float().square().mean()

    opt = fs.partition_optimizer(OPTIMIZERS[name](), mesh=mesh, axis="data", stage=stage)
    options |= {"donate": True, "local": local}
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), **options)
    return step, [params, opt.init(params), x]


class Measured(NamedTuple):
    """The peak of memory of a step, and the bytes that a device sends along each axis."""

    peak: int
    sent: dict[str, Fraction]


def counted(step, trees):
    """Measure the second step of a run.

    Clipping at stage 0 is left out: all devices of a virtual mesh have one tensor of a replicated
    gradient.
    """

    def run():
        with fs.memory.limit() as used, fs.ledger() as comm:
            *trees[:2], _ = step(*trees)
        return used, comm

    run()
    used, comm = run()
    return Measured(used.peak(), {axis: comm.bytes(axis=axis) for axis in step.mesh.axis_names})


def predicted(report, axes):
    return Measured(report.peak(), {axis: report.sent(axis) for axis in axes})


def bytes_of_compared_losses(sizes):
    """Return the bytes by which a run on CPUs compares the losses of devices along "model".

    A row has a number of each device along the axis and the allowed difference. All devices sum it.
    """
    if "model" not in sizes:
        return 0
    row = 8 * (sizes["model"] + 1)
    devices = prod(sizes.values())
    return Fraction(2 * (devices - 1), devices) * row


PROGRAMS = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 3),
        "kv_heads": st.sampled_from([2, 4]),
        "stage": st.integers(0, 3),
        "name": st.sampled_from([*OPTIMIZERS]),
        "recomputed": st.booleans(),
        "dtype": st.sampled_from([torch.float32, torch.float64]),
        "accumulate": st.sampled_from([1, 2]),
        "live_units": st.sampled_from([1, 2]),
        "prefetch": st.sampled_from([0, 1]),
    }
)
MESHES = st.sampled_from(
    [{"data": 1}, {"data": 2}, {"data": 4}, {"data": 2, "model": 2}, {"data": 8, "model": 2}]
)


@settings(max_examples=examples(5))
@given(
    MESHES, PROGRAMS.filter(lambda options: (options["name"], options["stage"]) != ("clipped", 0))
)
def test_drawn_plans_have_the_bytes_and_the_peak_of_the_run(sizes, options):
    step, trees = program(sizes, **options)

    report = cost(step, *trees, cluster=H100)
    actual = counted(step, trees)

    compared = bytes_of_compared_losses(sizes)
    assert {axis: report.sent(axis) + compared for axis in sizes} == actual.sent

    # Along "model" devices differ by some numbers, since checks need values.
    assert report.peak() <= actual.peak
    assert report.peak() == actual.peak or "model" in sizes

    rows = report.operations()
    assert sum(row.seconds for row in rows) == pytest.approx(report.times.compute)
    assert max(sum(event.memory) for event in report.devices[0].operations) <= report.peak()
    assert report.seconds >= report.times.compute
    assert str(report)


SCHEDULES = {  # name: the stages of a device
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "bfs": 2,
    "zb-h1": 1,
    "zb-h2": 1,
    "zbv": 2,
    "v-half": 2,
    "v-min": 2,
    "dualpipe-v": 2,
}
STAGED = st.fixed_dictionaries(
    {
        "sizes": st.sampled_from(
            [{"pipe": 2}, {"pipe": 2, "data": 2}, {"pipe": 4, "data": 2}, {"data": 4, "pipe": 3}]
        ),
        "schedule": st.sampled_from([*SCHEDULES]),
        "microbatches": st.sampled_from([2, 4]),
        "stage": st.integers(0, 3),
        "name": st.sampled_from([*OPTIMIZERS]),
        "tied": st.booleans(),
        "recompute": st.sampled_from(["never", "always"]),
    }
)


def staged(sizes, *, schedule, microbatches, stage, name, tied, **options):
    """Return a step of stages, and its arguments."""
    torch.manual_seed(0)
    mesh = fs.make_mesh(sizes)
    x = torch.randn(ROWS, TOKENS, WIDTH)
    devices = sizes["pipe"]
    stages = devices * SCHEDULES[schedule]
    schedule = fs.pipeline_schedule(
        schedule, stages=stages, microbatches=microbatches, devices=devices
    )
    model = nn.Sequential(*(Block(2) for _ in range(stages + 1)))
    if tied:
        model[-1].out.weight = model[0].out.weight
    modules = fs.pipeline.split_stages(model, stages)

    is_sharded = stage > 0 and "data" in sizes
    rules = fs.fsdp("data") if stage == 3 and is_sharded else None
    params = fs.shard_stages(modules, rules, mesh=mesh, schedule=schedule)
    opt = OPTIMIZERS[name]()
    if is_sharded:
        opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)

    options |= {
        "batch": P("data") if "data" in sizes else P(),
        "schedule": schedule,
        "loss": lambda y, x: (y - x).square().mean(),
        "inputs": lambda x: x,
        "donate": True,
    }
    step = fs.train_step(modules, opt, mesh=mesh, **options)
    return step, [params, opt.init(params), x]


@settings(max_examples=examples(3))
@given(STAGED)
def test_drawn_plans_of_stages_have_the_bytes_and_the_peak_of_the_run(options):
    """A device of each stage runs its program on the abstract mesh."""
    step, trees = staged(**options)

    report = cost(step, *trees, cluster=H100)

    assert predicted(report, options["sizes"]) == counted(step, trees)
    assert report.seconds == max(device.times.step for device in report.devices.values())
    assert str(report)


def in_process(n, stage):
    step, trees = program({"data": n}, **{**FIXED, "stage": stage})
    report = cost(step, *trees, cluster=H100)
    return predicted(report, ["data"]), counted(step, trees)


@pytest.mark.parametrize("stage", [1, 3])
def test_plans_have_the_bytes_and_the_peak_of_processes(two, stage):
    for planned, actual in two.run(in_process, 2, stage):
        assert planned == actual


def stages_in_process(stage, schedule):
    options = {
        "schedule": schedule,
        "microbatches": 4,
        "stage": stage,
        "name": "adamw",
        "tied": True,
        "recompute": "never",
    }
    step, trees = staged({"pipe": 2, "data": 2}, **options)
    report = cost(step, *trees, cluster=H100)
    return predicted(report, ["pipe", "data"]), counted(step, trees)


@pytest.mark.parametrize(("stage", "schedule"), [(1, "1f1b"), (3, "zbv")])
def test_plans_of_stages_have_the_bytes_and_the_peak_of_four_processes(four, stage, schedule):
    """A process measures itself: the plan has the numbers of the one that has most."""
    results = four.run(stages_in_process, stage, schedule)

    plans = [planned for planned, _ in results]
    measured = [actual for _, actual in results]
    assert plans == [plans[0]] * 4
    if not HAS_RULES:  # there a message stays until the device has sent it, whenever that is
        assert plans[0].peak == max(actual.peak for actual in measured)
    for axis in ("pipe", "data"):
        assert plans[0].sent[axis] == max(actual.sent[axis] for actual in measured)


def test_operations_are_those_of_the_formula_and_recomputation_adds_a_forward():
    """A weight has 2 operations a token in the forward, and 4 in the backward.

    Attention counts half of all pairs of tokens, those that a causal one sees.
    """
    layers = 2
    tokens = ROWS * TOKENS
    weights = layers * (2 * WIDTH**2 + 2 * WIDTH * WIDTH // 2 + 4 * WIDTH**2)
    attention = layers * 4 * TOKENS * tokens * WIDTH // 2
    forward = 2 * weights * tokens + attention

    step, trees = program({"data": 1}, **FIXED)
    flops = cost(step, *trees, cluster=H100).flops()
    of_first_inputs = 2 * tokens * WIDTH * (WIDTH + 2 * WIDTH // 2)  # which need no gradient
    products = 3 * 2 * weights * tokens - of_first_inputs
    assert flops - products in (3 * attention, int(3.5 * attention))
    assert cost(step, *trees, cluster=H100).flops("f32") == flops

    step, trees = program({"data": 1}, **{**FIXED, "recomputed": True})
    last_product = 2 * tokens * 2 * WIDTH * WIDTH  # before which the recomputation ends
    assert cost(step, *trees, cluster=H100).flops() == flops + forward - last_product


def test_other_sizes_are_those_of_a_mesh_of_that_size():
    """A plan of 1,024 devices from a step on two; its batch is that of all devices."""
    step, (params, state, _) = program({"data": 2}, **FIXED)

    large = torch.empty(2048, TOKENS, WIDTH, device="meta")
    report = cost(step, params, state, large, cluster=H100, sizes={"data": 1024})
    small = torch.empty(4, TOKENS, WIDTH, device="meta")
    of_two = cost(step, params, state, small, cluster=H100)

    assert report.mesh.size == 1024
    assert report.flops() == of_two.flops()
    assert report.sent() > of_two.sent()
    assert report.peak(purpose="state") <= of_two.peak(purpose="state")


# -- time ------------------------------------------------------------------------------------------

MESH = fs.make_mesh({"a": 4, "b": 2}, runtime="abstract")
SITE = Site("f.py", 1, "f")
EFFICIENCY = Efficiency(matmul=1.0, half=0.0, attention=0.5, memory=1.0, launch=0.0, link=1.0)
PLAIN = replace(
    H100,
    flops={"f32": 1.0},
    bandwidth=1.0,
    host=1.0,
    disk=0.5,
    links=(NetworkLink(2, 10.0, 0.0), NetworkLink(0, 1.0, 0.0)),
    efficiency=EFFICIENCY,
)
"""A machine whose numbers are 1: times are the sizes of events."""


def work(flops, name="mm"):
    return Operation(name, "u", "f32", flops, 0)


def sent(size, axis="a", *, starts=True):
    return CollectiveStart(LedgerRow("psum", (axis,), SITE), size, starts)


FIRST = CollectiveWait(0)
SECOND = CollectiveWait(1)


@pytest.mark.parametrize(
    ("events", "step", "exposed"),
    [
        ([work(3), work(2, "attention")], 7, 0),
        ([sent(4), work(3), FIRST, work(1)], 5, 1),  # a collective beside an operation
        ([sent(4), work(5), FIRST], 5, 0),
        ([sent(4, starts=False), work(5)], 9, 4),
        ([sent(4), sent(4), work(5), FIRST, SECOND], 8, 3),  # one after another on a level
        ([sent(4), sent(40, "b"), work(1), FIRST, SECOND], 4, 3),  # independent levels
        ([Copy("device", "host", 4), work(1), Copy("host", "device", 2), work(1)], 4, 0),
        ([Copy("device", "disk", 4), work(1)], 8, 0),
    ],
)
def test_time_of_a_list_of_events(events, step, exposed):
    times = times_of({0: events}, PLAIN, MESH)[0]
    assert times.step == step
    assert sum(times.exposed.values()) == exposed

    without_overlap = replace(PLAIN, efficiency=replace(EFFICIENCY, overlap=0))
    assert times_of({0: events}, without_overlap, MESH)[0].step >= step


def test_collectives_along_two_axes_of_one_level_follow_each_other():
    """Both axes have the link between nodes, so the second collective begins when the first ends."""
    mesh = fs.make_mesh({"a": 2, "c": 2, "b": 2}, runtime="abstract")
    events = [sent(4, "a"), sent(4, "c"), work(5), CollectiveWait(0), CollectiveWait(1)]
    assert times_of({0: events}, PLAIN, mesh)[0].step == 8


OPERATIONS = st.builds(
    Operation,
    st.sampled_from(["mm", "add", "attention"]),
    st.just("u"),
    st.just("f32"),
    st.integers(0, 10**12),
    st.integers(0, 10**9),
)
COLLECTIVES = st.builds(sent, st.integers(0, 10**8), st.sampled_from("ab"), starts=st.booleans())
COPIES = st.builds(
    Copy, st.just("host"), st.sampled_from(["device", "disk"]), st.integers(0, 10**8)
)
EVENTS = st.lists(st.one_of(OPERATIONS, COLLECTIVES, COPIES), max_size=12)


@given(EVENTS, st.data())
def test_more_of_anything_is_never_slower(events, data):
    waits = []
    for index, event in enumerate(events):
        if isinstance(event, CollectiveStart) and event.is_started:
            waits.append(CollectiveWait(index))
    events = [*events, *waits]

    factor = data.draw(st.floats(1.0, 8.0))
    links = []
    for link in H100.links:
        links.append(NetworkLink(link.devices, factor * link.bandwidth, link.latency / factor))
    changes = {
        "flops": {name: factor * x for name, x in H100.flops.items()},
        "bandwidth": factor * H100.bandwidth,
        "host": factor * H100.host,
        "disk": factor * H100.disk,
        "links": tuple(links),
        "efficiency": replace(
            H100.efficiency,
            matmul=min(1.0, factor * H100.efficiency.matmul),
            half=H100.efficiency.half / factor,
        ),
    }
    names = data.draw(st.sets(st.sampled_from(sorted(changes)), min_size=1))
    better = replace(H100, **{name: changes[name] for name in names})

    before = times_of({0: events}, H100, MESH)[0].step
    after = times_of({0: events}, better, MESH)[0].step

    assert after <= before * (1 + 1e-12)


OF_NODES = {"data": 4, "model": 8}


@pytest.mark.parametrize(
    ("sizes", "axes", "level", "bandwidth"),
    [
        (OF_NODES, ("model",), 0, 450e9),
        (OF_NODES, ("data",), 1, 50e9),  # each device of a node has its own link to others
        (OF_NODES, ("data", "model"), 1, 400e9),  # a ring through the nodes has the links of all
        ({"data": 4, "model": 4}, ("data",), 1, 100e9),
        ({"data": 2, "model": 4}, ("data",), 0, 450e9),
    ],
)
def test_groups_use_the_links_between_their_devices(sizes, axes, level, bandwidth):
    machine = replace(H100, efficiency=replace(H100.efficiency, link=1.0, collisions=0.0))

    actual = machine.level(fs.make_mesh(sizes, runtime="abstract"), axes)

    assert actual[:2] == (level, bandwidth)


def test_invalid_arguments_raise():
    step, trees = program({"data": 2}, **FIXED)
    with pytest.raises(PlanError, match="step must be one of train_step; got function"):
        cost(lambda x: x, *trees, cluster=H100)
    mesh = fs.make_mesh({"pipe": 1}, runtime="abstract")
    weights = [[torch.empty(2, 2, device="meta")]]
    schedule = fs.pipeline_schedule("1f1b", stages=1, microbatches=1)
    options = {"mesh": mesh, "batch": P(), "schedule": schedule, "loss": lambda y, x: y.sum()}
    params = fs.shard_stages(weights, mesh=mesh, schedule=schedule)
    opt = optim.sgd(0.1)
    stages = fs.train_step([lambda params, x: x @ params[0]], opt, **options)
    with pytest.raises(ValueError, match="stages must not run on an abstract mesh by themselves"):
        stages(params, opt.init(params), torch.ones(2, 2))
    with pytest.raises(PlanError, match="sizes must name axes of Mesh.*got model"):
        cost(step, *trees, cluster=H100, sizes={"model": 2})


def test_a_step_that_does_not_fit_says_so():
    step, trees = program({"data": 2}, **FIXED)

    report = cost(step, *trees, cluster=replace(H100, memory=1000.0))

    assert not report.fits
    assert "of 1,000: too many" in str(report)
    per_device = 1e6 / 2
    expected = per_device / report.seconds / H100.flops["f32"]
    assert report.utilization(flops=1e6) == pytest.approx(expected)
    assert isinstance(report.sent("data"), Fraction)
