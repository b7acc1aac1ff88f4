"""Loss functions may call collectives, over the axes of the batch and over those of the model.

The oracle of each is the same loss, written for one device without collectives (`..._alone`).
"""

import os
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import fshard as fs
from fshard import P
from tests.transforms.helpers.gradients import assert_equal, serial, sharded

SIZES = {"w": (4, 6), "v": (6, 4), "b": (6,), "u": (4, 4)}


def params():
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(*size, dtype=torch.float64, generator=generator) / 2
        for name, size in SIZES.items()
    }


def batch_of(size):
    generator = torch.Generator().manual_seed(size)
    return tuple(torch.randn(size, 4, dtype=torch.float64, generator=generator) for _ in range(2))


def hidden(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def errors(p, batch):
    """Return the loss of each sample."""
    x, y = batch
    return (hidden(p, x) @ p["v"] - y).square().mean(1)


# -- losses over the batch's axes: written for devices, and for one --------------------------------


def marked(p, batch):
    """As one writes it for shard_map."""
    return fs.pvary(fs.pmean(errors(fs.pvary(p, "data"), batch).mean(), "data"), "data")


def sums_by_counts(p, batch):
    losses = errors(p, batch)
    count = torch.tensor(float(len(losses)), dtype=torch.float64)
    return fs.psum(losses.sum(), "data") / fs.psum(count, "data")


def started(p, batch):
    """Devices wait in different orders."""
    z = hidden(p, batch[0])
    first = fs.psum.start(z.sum(0), "data")
    second = fs.pmean.start((p["u"] * batch[0].mean(0)).sum(), "data")
    handles = (first, second) if fs.axis_index("data") else (second, first)
    for handle in handles:
        handle.wait()
    return (z * first.wait()).mean() + second.wait()


def started_alone(p, batch):
    z = hidden(p, batch[0])
    return (z * z.sum(0)).mean() + (p["u"] * batch[0].mean(0)).sum()


def standardised(p, batch):
    z = hidden(p, batch[0])
    count = fs.psum(z.new_tensor(float(len(z))), "data")
    mean = fs.psum(z.sum(0), "data") / count
    variance = fs.psum((z - mean).square().sum(0), "data") / count
    normed = (z - mean) / (variance + 0.1).sqrt()
    return (normed @ p["v"] - batch[1]).square().mean(1)


def standardised_alone(p, batch):
    z = hidden(p, batch[0])
    z = (z - z.mean(0)) / (z.var(0, correction=0) + 0.1).sqrt()
    return (z @ p["v"] - batch[1]).square().mean()


def contrastive(to):
    """Return a loss that compares each sample with those of all devices."""

    def loss_fn(p, batch):
        x = hidden(p, batch[0]) @ p["v"]
        y = batch[1] @ p["u"]
        ys = fs.all_gather(y, "data", to=to)
        labels = torch.arange(len(x)) + len(x) * fs.axis_index("data")
        return F.cross_entropy(x @ ys.T, labels)

    return loss_fn


def contrastive_alone(p, batch):
    x = hidden(p, batch[0]) @ p["v"]
    y = batch[1] @ p["u"]
    return F.cross_entropy(x @ y.T, torch.arange(len(x)))


def softmax_over_samples(p, batch):
    scores = errors(p, batch)
    high = fs.pmax(scores.max(), "data")
    weights = (scores - high).exp()
    total = fs.psum(weights.sum(), "data")
    return fs.psum((weights / total * scores).sum(), "data") + high / 7


def softmax_alone(p, batch):
    scores = errors(p, batch)
    return (scores.softmax(0) * scores).sum() + scores.max() / 7


def neighbours(p, batch):
    """Each device's last sample is carried on to the next device."""
    z = hidden(p, batch[0])
    n = fs.axis_size("data")
    ring = [(index, (index + 1) % n) for index in range(n)]
    before = fs.ppermute(z[-1:], "data", ring)
    return (z * torch.cat([before, z[:-1]])).mean()


def neighbours_alone(p, batch):
    z = hidden(p, batch[0])
    return (z * z.roll(1, 0)).mean()


def memory(p, batch):
    """A block that is run again in the backward."""

    def centred(p, x):
        mean = fs.pmean(hidden(p, x).mean(0), "data")
        return hidden(p, x) - mean

    z = fs.remat(centred)(p, batch[0])
    return (z @ p["v"] - batch[1]).square().mean()


def remembered_alone(p, batch):
    z = hidden(p, batch[0])
    return ((z - z.mean(0)) @ p["v"] - batch[1]).square().mean()


LOSSES = {
    "marked as for shard_map": (marked, errors, 4),
    "sums by counts": (sums_by_counts, errors, 1),
    "started": (started, started_alone, 4),
    "standardised": (standardised, standardised_alone, 1),
    "contrastive": (contrastive("varying"), contrastive_alone, 4),
    "contrastive, replicated": (contrastive("replicated"), contrastive_alone, 4),
    "softmax": (softmax_over_samples, softmax_alone, 1),
    "neighbours": (neighbours, neighbours_alone, 4),
    "remat": (memory, remembered_alone, 4),
}
"""Written for devices, for one device, and 4 if devices must have equally many samples, else 1."""


# -- losses that cut the model ---------------------------------------------------------------------


def cut(x, dim, axis="model"):
    return x.chunk(fs.axis_size(axis), dim)[fs.axis_index(axis)]


def hidden_part(p, x):
    """Return the result of this device's columns of w and rows of v."""
    return torch.tanh(x @ cut(p["w"], 1) + cut(p["b"], 0)) @ cut(p["v"], 0)


def tensor_parallel(p, batch):
    x, y = batch
    return (fs.psum(hidden_part(p, x), "model") - y).square().mean(1)


def two_blocks(p, batch):
    """All devices compute alike what comes before the part that is cut."""
    x, y = batch
    h = torch.tanh(x @ p["u"])
    z = fs.psum(hidden_part(p, h), "model")
    return ((h + z - y) @ p["u"]).square().mean()


def two_blocks_alone(p, batch):
    x, y = batch
    h = torch.tanh(x @ p["u"])
    z = hidden(p, h) @ p["v"]
    return ((h + z - y) @ p["u"]).square().mean()


def run_again(p, batch):
    """The part that is cut is rematerialised."""
    x, y = batch
    h = torch.tanh(x @ p["u"])
    z = fs.remat(lambda p, h: fs.psum(hidden_part(p, h), "model"))(p, h)
    return ((h + z - y) @ p["u"]).square().mean()


def gathered(p, batch):
    x, y = batch
    columns = torch.tanh(x @ cut(p["w"], 1) + cut(p["b"], 0))
    h = fs.all_gather(columns, "model", dim=1)
    return (h @ p["v"] - y).square().mean()


def each_a_part(p, batch):
    """Devices along "model" have different losses, whose mean counts."""
    x, y = batch
    return (cut(hidden(p, x) @ p["v"], 1) - cut(y, 1)).square().mean()


def both_axes(p, batch):
    z = errors(p, batch).mean() * (1 + fs.axis_index("model"))
    return fs.pmean(z, ("model", "data")) / (1 + (fs.axis_size("model") - 1) / 2)


MODEL_LOSSES = {
    "tensor parallel": (tensor_parallel, errors),
    "two blocks": (two_blocks, two_blocks_alone),
    "remat": (run_again, two_blocks_alone),
    "gathered": (gathered, errors),
    "each a part": (each_a_part, errors),
    "both axes": (both_axes, errors),
    "nothing asked": (errors, errors),
}

LAYOUTS = {
    "whole": P(),
    "fsdp": fs.fsdp("data"),
    "fsdp of both": fs.fsdp(("data", "model")),
    "fsdp of model": fs.fsdp("model"),
    "tensor": {"w": P(None, "model"), "v": P("model"), "b": P("model"), "u": P()},
    "other dims": {
        "w": P("data", "model"),
        "v": P(None, "model"),
        "b": P("data"),
        "u": P("model", "data"),
    },
}


def alone_on(loss_fn, batch):
    return serial(loss_fn, params(), batch)


def on_mesh(loss_fn, batch, sizes, rules=None, **options):
    return sharded(loss_fn, params(), batch, sizes, rules=rules, **options)


WAYS = [{}, {}, {"reshard_after_forward": False}, {"in_flight": 0, "bucket": 0}]


@settings(max_examples=50)
@given(
    name=st.sampled_from([*LOSSES]),
    n=st.sampled_from([1, 2, 4]),
    stage=st.sampled_from([0, 2, 3]),
    more=st.integers(0, 3),
    way=st.sampled_from(WAYS),
)
def test_collective_over_batch_axis_has_gradient_of_one_device(name, n, stage, more, way):
    loss_fn, alone, divisor = LOSSES[name]
    size = 8 if divisor == 4 else 5 + more

    actual = on_mesh(loss_fn, batch_of(size), {"data": n}, stage=stage, **way)
    assert_equal(actual, alone_on(alone, batch_of(size)))


@settings(max_examples=50)
@given(
    name=st.sampled_from([*MODEL_LOSSES]),
    sizes=st.sampled_from(
        [
            {"data": 2, "model": 2},
            {"model": 2, "data": 2},
            {"data": 1, "model": 2},
            {"data": 2, "model": 1},
        ]
    ),
    layout=st.sampled_from([*LAYOUTS]),
    stage=st.sampled_from([0, 2]),
    way=st.sampled_from([*WAYS, {"accumulate": 2}, {"accumulate": 2, "reduce_once": False}]),
)
def test_model_parallel_loss_has_gradient_of_one_device(name, sizes, layout, stage, way):
    loss_fn, alone = MODEL_LOSSES[name]
    actual = on_mesh(loss_fn, batch_of(8), sizes, LAYOUTS[layout], stage=stage, **way)
    assert_equal(actual, alone_on(alone, batch_of(8)))


# -- what is particular ----------------------------------------------------------------------------


def test_weight_zero_samples_count_in_collectives():
    """A device without weight gives what others are compared with."""
    mask = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 1], dtype=torch.float64)
    batch = (*batch_of(8), mask)

    def losses(p, batch, labels, gather=lambda x: x):
        x, y, mask = batch
        scores = (hidden(p, x) @ p["v"]) @ gather(y @ p["u"]).T
        return F.cross_entropy(scores, labels, reduction="none") * mask

    def loss_fn(p, batch):
        count = len(batch[0])
        labels = torch.arange(count) + count * fs.axis_index("data")
        total = losses(p, batch, labels, lambda x: fs.all_gather(x, "data")).sum()
        return total / batch[2].sum().clamp(min=1)

    def alone(p, batch):
        return losses(p, batch, torch.arange(8)).sum() / mask.sum()

    def weight(batch):
        return batch[2].sum()

    actual = on_mesh(loss_fn, batch, {"data": 4}, fs.fsdp("data"), weight=weight)

    assert_equal(actual, alone_on(alone, batch))


def test_model_parallel_parts_have_their_gradients():
    """Along "model", the first device uses w and the second u; v is frozen, and nobody uses b."""

    def of_w(p, x):
        return x @ p["w"][:, :4]

    def of_u(p, x):
        return x @ p["u"]

    def loss_fn(p, batch):
        x, y = batch
        part = of_u(p, x) if fs.axis_index("model") else of_w(p, x)
        return (fs.psum(part, "model") @ p["v"][:4] - y).square().mean()

    def alone(p, batch):
        x, y = batch
        return ((of_u(p, x) + of_w(p, x)) @ p["v"][:4] - y).square().mean()

    loss, (_, u, _, w) = alone_on(alone, batch_of(8))
    expected = (loss, (None, u, None, w))
    sizes = {"data": 2, "model": 2}
    for stage, accumulate in ((0, 1), (2, 1), (0, 2)):
        options = {"frozen": "v", "stage": stage, "accumulate": accumulate}
        assert_equal(on_mesh(loss_fn, batch_of(8), sizes, P(), **options), expected)


def test_unused_axis_has_no_messages():
    def axes_of_messages(loss_fn):
        """Return the axes, without both together, over which the first step agrees."""
        with fs.ledger() as ledger:
            on_mesh(loss_fn, batch_of(8), {"data": 2, "model": 2}, P())
        return {row.axes for row, _, _ in ledger.rows()} - {("data", "model")}

    def with_size_of_axis(p, batch):
        return errors(p, batch) * fs.axis_size("model") / 2

    assert axes_of_messages(errors) == {("data",)}
    assert axes_of_messages(with_size_of_axis) == {("data",)}
    used = set().union(*axes_of_messages(tensor_parallel))
    assert {"model"} < used


def test_reproducible_model_parallel_loss_has_equal_bits():
    def run(n, layout):
        return on_mesh(
            two_blocks, batch_of(8), {"data": n, "model": 2}, LAYOUTS[layout], reproducible=True
        )

    loss, grads = run(1, "whole")
    assert_equal((loss, grads), alone_on(two_blocks_alone, batch_of(8)))
    for n, layout in ((2, "whole"), (4, "fsdp"), (2, "tensor"), (4, "fsdp of both")):
        other, others = run(n, layout)
        assert torch.equal(loss, other) and all(map(torch.equal, grads, others))


REFUSED = {
    "marked as for shard_map": r'fs.pmean over "data" in the loss function, at .*losses.py:\d+ in marked: with reproducible',
    "contrastive": 'fs.all_gather over "data".*, or leave reproducible=True out',
    "softmax": 'fs.pmax over "data" in the loss function',
    "neighbours": 'fs.ppermute over "data" in the loss function',
    "batch norm": 'sync_batchnorm over "data" in the loss function',
}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_reproducible_collective_over_batch_axis_raises(name, n):
    apply, _, buffers = fs.functionalize(torch.nn.BatchNorm1d(4).double(), sync_batchnorm="data")

    def normalised(p, batch):
        params = {"weight": p["u"][0], "bias": p["u"][1]}
        y, _ = apply(params, buffers, batch[0])
        return y.square().mean()

    loss_fn = LOSSES[name][0] if name in LOSSES else normalised
    with pytest.raises(ValueError, match=REFUSED[name]):
        on_mesh(loss_fn, batch_of(8), {"data": n}, P(), reproducible=True)


# -- what processes must start from alike ----------------------------------------------------------


def started_from(what, n):
    """Return the error of a step where each process starts from something of its own.

    "later values" of the batch differ in the second step.
    """
    mesh = fs.make_mesh({"data": n})
    rank = torch.distributed.get_rank()
    arrays = fs.shard_params(params(), P() if what == "parameters" else fs.fsdp("data"), mesh=mesh)
    if what == "parameters":
        arrays["w"].local.add_(rank)
        arrays["u"].local.add_(rank // 2)
    options = {"reproducible": True, "slices": n} if what == "seed" else {}
    run = fs.value_and_grad(errors, mesh=mesh, batch=P("data"), **options)
    torch.manual_seed(rank if what == "seed" else 0)
    x, y = batch_of(8 + rank if what == "batch" else 8)

    is_checked = what == "later values"
    try:
        if what == "later values":
            run(arrays, (x, y))
        if "values" in what:
            y = y + rank
        with patch.dict(os.environ, {"FSHARD_CHECK": str(int(is_checked))}):
            run(arrays, (x, y))
    except fs.errors.MismatchError as error:
        return str(error)


def test_processes_with_different_inputs_raise(two, four):
    expected = {
        "nothing": None,
        "batch": "batches of different shapes. Every process gets the global batch and",
        "seed": "the random state, from which reproducible=True draws",
        "parameters": "replicated parameters must be the same on all devices.",
        "values": "devices were given different batches, of the same shapes. A plain",
        "later values": "devices were given different batches, of the same shapes. A plain",  # under FSHARD_CHECK=1
    }
    for what, words in expected.items():
        for pool, n in [(two, 2)] + [(four, 4)] * (what == "parameters"):
            for actual in pool.run(started_from, what, n):
                assert actual is None if words is None else words in actual, actual


@pytest.mark.parametrize("stage", [0, 3])
def test_device_dependent_print_in_loss_changes_nothing(stage):
    """A device that reads an index that others do not read reduces over the same axes as these."""
    mesh = fs.make_mesh({"data": 2, "model": 2})
    x = torch.arange(12.0).reshape(4, 3)
    w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (expected,) = torch.autograd.grad((x @ w).square().mean(), w)
    prints = []
    steps_that_print = []

    def loss_fn(p, x):
        is_to_print = len(prints) < len(steps_that_print)
        if is_to_print and fs.axis_index("data") == 0 and fs.axis_index("model") == 0:
            prints.append(0)
        return (x @ p["w"]).square().mean()

    rules = fs.fsdp("data") if stage else P()
    arrays = fs.shard_params({"w": w.detach()}, rules, mesh=mesh)
    run = fs.grad(loss_fn, mesh=mesh, batch=P("data"))
    for step in (0, 1, 2):
        if step != 1:
            steps_that_print.append(step)
        torch.testing.assert_close(fs.unshard(run(arrays, x)["w"]), expected)
    assert len(prints) == 2


def test_collective_on_some_devices_decides_for_all():
    """Devices agree on the axes of a loss before anything is reduced.

    Here one row of them calls a collective.
    """
    mesh = fs.make_mesh({"data": 2, "model": 2})

    def loss_fn(w, x):
        y = (x * w).mean()
        return fs.pmean(y, "model") if fs.axis_index("data") == 0 else y

    w = fs.shard_params(torch.tensor(2.0), P(), mesh=mesh)
    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))
    for _ in range(2):
        loss, g = run(w, torch.arange(4.0))
        assert loss.item() == 3.0 and fs.unshard(g).item() == 1.5
