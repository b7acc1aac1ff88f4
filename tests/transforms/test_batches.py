"""Batches of any size: the gradient, and the mean, are those of one device on the whole batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fshard as fs
from fshard import P
from tests.transforms.helpers.gradients import DATA, assert_equal, serial, sharded

STAGES = (0, 1, 2, 3)
SIZES = (1, 2, 3, 5, 7, 8, 13)


def params():
    generator = torch.Generator().manual_seed(0)
    return {
        "blocks": [torch.randn(4, 4, dtype=torch.float64, generator=generator) for _ in range(2)],
        "bias": torch.randn(3, dtype=torch.float64, generator=generator),
    }


def batch_of(size, masked=False):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 4, dtype=torch.float64, generator=generator)
    mask = (
        torch.randint(0, 2, (size, 3), generator=generator).double()
        if masked
        else torch.ones(size, 3).double()
    )
    mask[-1] = 1.0  # there is something to predict
    return {"x": x, "mask": mask}


def each(params, batch):
    """Return the losses of all tokens: (batch, 3)."""
    x = batch["x"]
    for w in params["blocks"]:
        x = torch.tanh(x @ w)
    return (x[:, :3] + params["bias"]).square()


def mean(params, batch):
    return each(params, batch).mean()


def per_sample(params, batch):
    return each(params, batch).mean(1)


def masked_mean(params, batch):
    return (each(params, batch) * batch["mask"]).sum() / batch["mask"].sum()


# -- the serial gradient ---------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    size=st.integers(1, 13),
    n=st.sampled_from([1, 2, 3, 4, 8]),
    stage=st.sampled_from(STAGES),
    accumulate=st.integers(1, 3),
    kind=st.sampled_from(["mean", "per sample", "masked"]),
    mode=st.sampled_from([{}, {"reduce_once": False}, {"reproducible": True}]),
)
def test_batch_of_any_size_has_gradient_of_one_device(size, n, stage, accumulate, kind, mode):
    batch = batch_of(size, masked=kind == "masked")
    loss_fn = {"mean": mean, "per sample": per_sample, "masked": masked_mean}[kind]
    weight = {"weight": lambda batch: batch["mask"].sum()} if kind == "masked" else {}
    mode = {**mode, "slices": 8 * n} if mode.get("reproducible") else mode
    accumulate = 1 if mode.get("reproducible") else accumulate
    actual = sharded(
        loss_fn, params(), batch, {"data": n}, stage, accumulate=accumulate, **mode, **weight
    )
    assert_equal(actual, serial(loss_fn, params(), batch))


def reproducible(n, stage, size):
    batch = {name: x.float() for name, x in batch_of(size).items()}
    own = {"blocks": [x.float() for x in params()["blocks"]], "bias": params()["bias"].float()}
    torch.manual_seed(3)

    def with_dropout(params, batch):
        return nn.functional.dropout(each(params, batch), 0.5).mean()

    return sharded(with_dropout, own, batch, {"data": n}, stage, reproducible=True)


@pytest.mark.parametrize("size", SIZES)
def test_reproducible_batch_of_any_size_has_equal_bits(size):
    loss, grads = reproducible(1, 0, size)
    for n in (2, 4, 8):
        for stage in (0, 3):
            other, again = reproducible(n, stage, size)
            assert torch.equal(loss, other) and all(map(torch.equal, grads, again))


def test_batch_sharded_over_several_axes_has_equal_gradient():
    mesh = fs.make_mesh({"node": 2, "data": 2, "seq": 2})
    x = torch.arange(7 * 4.0).reshape(7, 4).double()
    w = torch.tensor(1.5, dtype=torch.float64)
    own = fs.shard_params({"w": w}, P(), mesh=mesh)

    def loss_fn(p, batch):
        assert batch["x"].shape[1] == 2
        return ((p["w"] * batch["x"]).sin() * batch["y"][:, None]).mean()

    specs = {"x": P(("node", "data"), "seq"), "y": P(("node", "data"))}
    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=specs, accumulate=2)
    loss, grads = run(own, {"x": x, "y": x[:, 0]})
    leaf = w.clone().requires_grad_()
    expected = ((leaf * x).sin() * x[:, :1]).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(fs.unshard(grads)["w"], leaf.grad)


@pytest.mark.parametrize("spec", [P(), P.flat("data")], ids=str)
def test_sharded_uneven_batch_is_accepted(spec):
    mesh = fs.make_mesh({"data": 2})
    own = fs.shard_params({"w": torch.ones(())}, P(), mesh=mesh)
    x = fs.device_put(torch.tensor([1.0, 2.0, 6.0]), fs.Layout(mesh, spec))
    loss, grads = fs.value_and_grad(lambda p, x: (p["w"] * x).mean(), mesh=mesh, batch=P("data"))(
        own, x
    )
    assert (loss.item(), fs.unshard(grads)["w"].item()) == (3.0, 3.0)


def centred(collective):
    def loss_fn(params, x):
        return (params * (x - collective(x))).square().sum(1).mean()

    return loss_fn


MEANS = {
    "pmean": lambda x: fs.pmean(x.mean(0), "data"),
    "psum": lambda x: fs.psum(x.sum(0), "data") / fs.psum(torch.tensor(float(len(x))), "data"),
    "gather": lambda x: fs.psum_scatter(fs.all_gather(x.mean(0), "data"), "data") / 4,
    "pmax": lambda x: fs.pmax(x.amax(0), "data"),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("size", "refused"),
    [(8, set()), (16, set()), (7, {"pmean"}), (5, {"pmean"}), (3, {"pmean", "psum", "gather"})],
)
@pytest.mark.parametrize("name", MEANS)
def test_collective_in_loss_with_uneven_batch_raises(name, size, refused, stage):
    mesh = fs.make_mesh({"data": 4})
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(0))
    own = fs.shard_params(torch.ones(3), fs.fsdp("data") if stage else P(), mesh=mesh)
    run = fs.value_and_grad(centred(MEANS[name]), mesh=mesh, batch=P("data"))
    if name in refused:
        with pytest.raises(
            ValueError,
            match=f"in the loss function.*{size} samples of the batch are cut into 4 slices",
        ):
            run(own, x)
        return
    loss, grads = run(own, x)
    parts = x.tensor_split([size * place // 4 for place in (1, 2, 3)])
    full = x.amax(0) if name == "pmax" else x.mean(0)
    expected = torch.cat([part - part.mean(0) for part in parts]) if name == "gather" else x - full
    torch.testing.assert_close(loss, expected.square().sum(1).mean())
    torch.testing.assert_close(fs.unshard(grads), 2 * expected.square().mean(0))


# -- metrics and errors ----------------------------------------------------------------------------


def metrics_of(loss_fn, batch, spec=DATA, **options):
    mesh = fs.make_mesh({"data": 2})
    opt = fs.partition_optimizer(fs.optim.sgd(1.0), mesh=mesh, axis="data", stage=1)
    own = fs.shard_params({"w": torch.ones(())}, P(), mesh=mesh)
    return fs.train_step(loss_fn, opt, mesh=mesh, batch=spec, **options)(own, opt.init(own), batch)[
        2
    ]


@pytest.mark.parametrize("options", [{}, {"accumulate": 4}, {"reproducible": True}], ids=str)
def test_metrics_contain_samples_and_weight(options):
    batch = {"x": torch.randn(32, 3), "mask": torch.ones(32, 3)}
    batch["mask"][:, 2] = 0

    def loss_fn(p, batch):
        return (p["w"] * batch["x"] * batch["mask"]).sum() / batch["mask"].sum()

    metrics = metrics_of(loss_fn, batch, **options)
    assert metrics.keys() == {"loss", "grad_norm", "finite", "samples"}
    assert metrics["samples"].item() == 32 and metrics["samples"].dtype == torch.int64
    metrics = metrics_of(loss_fn, batch, weight=lambda part: part["mask"].sum(), **options)
    assert metrics.keys() == {"loss", "grad_norm", "finite", "samples", "weight"}
    assert (metrics["samples"].item(), metrics["weight"].item()) == (32, 64)


ACCUMULATED = [{}, {"accumulate": 3}, {"reproducible": True, "slices": 4}]


@pytest.mark.parametrize("options", ACCUMULATED, ids=str)
@pytest.mark.parametrize(("stage", "size"), [(0, 3), (3, 3), (0, 4), (3, 7), (0, 8), (3, 8)])
def test_aux_equals_that_of_the_global_batch(stage, size, options):
    def loss_fn(params, batch):
        actual = per_sample(params, batch)
        large = actual > 1
        x = batch["x"]  # matrices may have as many rows as a device has samples
        aux = {"mean": [actual.mean(), x.mean(0) + torch.zeros(4, 4)], "rows": (x, large)}
        aux["count"], aux["sum"] = [large.sum(), len(actual)], x.T @ x
        return actual, aux

    mesh = fs.make_mesh({"data": 4})
    own = fs.shard_params(params(), fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    words = {"mean": "mean", "rows": "rows", "count": "sum", "sum": "sum"}
    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), aux=words, **options)
    (_, aux), _ = run(own, batch_of(size))
    _, expected = loss_fn(params(), batch_of(size))
    assert [str(fs.typeof(x)) for x in aux["rows"]] == (
        [f"f64[{size}@data, 4]", f"bool[{size}@data]"]
        if size % 4 == 0
        else [f"f64[{size}, 4]", f"bool[{size}]"]
    )
    torch.testing.assert_close(fs.unshard(aux["rows"]), expected["rows"], rtol=0, atol=0)
    torch.testing.assert_close([aux["mean"], aux["sum"]], [expected["mean"], expected["sum"]])
    assert [x.item() for x in aux["count"]] == [expected["count"][0].item(), size]


def test_aux_rows_of_equal_samples_are_averaged():
    mesh = fs.make_mesh({"data": 2, "seq": 2})
    own = fs.shard_params({"w": torch.ones(())}, P(), mesh=mesh)

    def loss_fn(p, x):
        actual = (p["w"] * x).mean(1)
        return actual, (actual, x[:, 0] > 6)

    for size in (4, 3):
        x = torch.arange(4.0 * size).reshape(size, 4)
        run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data", "seq"), aux="rows")
        (loss, aux), _ = run(own, x)
        mean, large = fs.unshard(aux)
        assert (loss, mean.tolist(), large.tolist()) == (
            x.mean(),
            x.mean(1).tolist(),
            (x[:, 0] > 6).tolist(),
        )


def test_aux_numbers_are_averaged_by_default():
    def loss_fn(p, x):
        return p["w"] * x.mean(), {
            "mean": x.mean(),
            "share": (x > 1).any(),
            "count": len(x),
            "rows": x.sum(),
        }

    actual = metrics_of(loss_fn, torch.arange(4.0), has_aux=True)["aux"]
    assert actual == {"mean": 1.5, "share": 0.5, "count": 2, "rows": 3}
    assert metrics_of(loss_fn, torch.arange(4.0), aux="rows")["aux"]["rows"] == 3
    assert metrics_of(loss_fn, torch.arange(4.0), aux="sum")["aux"] == {
        "mean": 3,
        "share": 1,
        "count": 4,
        "rows": 6,
    }


def test_replicated_batch_accepts_per_sample_losses():
    metrics = metrics_of(
        lambda p, x: (p["w"] * x, {"rows": x}), torch.arange(4.0), spec=P(), aux="rows"
    )
    assert (metrics["loss"], metrics["samples"], fs.unshard(metrics["aux"]["rows"]).tolist()) == (
        1.5,
        4,
        [0, 1, 2, 3],
    )
    assert "samples" not in metrics_of(
        lambda p, x: p["w"] * x["a"].mean(), {"a": torch.ones(4), "b": torch.ones(2)}, spec=P()
    )


def test_replicated_batch_splits_into_slices():
    def loss_fn(p, batch):
        assert len(batch["x"]) in (2, 3)
        return p["w"] * batch["x"] + batch["rate"], {"rows": batch["x"]}

    batch = {"x": torch.arange(5.0), "rate": torch.tensor(0.5), "name": "a"}
    metrics = metrics_of(loss_fn, batch, spec=P(), aux="rows", accumulate=2)
    assert (metrics["loss"], metrics["samples"], metrics["grad_norm"]) == (2.5, 5, 2.0)
    assert fs.unshard(metrics["aux"]["rows"]).tolist() == [0, 1, 2, 3, 4]


def linear_loss(params, batch):
    return (
        torch.tanh(torch.nn.functional.linear(batch["x"], params["w"], params["b"])).square().mean()
    )


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 9), st.sampled_from([2, 4, 8]))
def test_slice_alignment_leaves_bits_unchanged(size, width, devices):
    """The rows of a slice begin at any address: a product of the same numbers was rounded
    differently there.
    """
    draw = torch.Generator().manual_seed(size)
    full = {"w": torch.randn(5, width, generator=draw), "b": torch.randn(5, generator=draw)}
    batch = {"x": torch.randn(size, width, generator=draw)}

    def found(n):
        mesh = fs.make_mesh({"data": n})
        run = fs.value_and_grad(linear_loss, mesh=mesh, batch=P("data"), reproducible=True)
        loss, grads = run(fs.shard_params(full, P(), mesh=mesh), batch)
        return [loss, *map(fs.unshard, grads.values())]

    assert all(map(torch.equal, found(1), found(devices)))


@pytest.mark.parametrize("size", [3, 4])
def test_sparse_batch_raises_with_fix(size):
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params({"w": torch.ones(size)}, P(), mesh=mesh)
    step = fs.value_and_grad(lambda p, x: (x @ p["w"]).sum(), mesh=mesh, batch=P("data"))
    with pytest.raises(ValueError, match=r"batch: .*sparse.* Give x.to_dense\(\)"):
        step(params, torch.eye(size).to_sparse())


@pytest.mark.parametrize("n", [1, 8])
def test_metrics_in_16_bits_are_combined_in_32(n):
    """257 samples are no number of bfloat16; the oracle is float64."""
    mesh = fs.make_mesh({"data": n})
    values = torch.arange(257 * 8.0).reshape(-1, 1) / 64
    params = fs.shard_params({"w": torch.ones(1)}, P(), mesh=mesh)

    def loss_fn(params, x):
        metrics = {"mean": x.float().mean().bfloat16(), "sum": x.new_full((), 257 * 8 / n)}
        return (x * params["w"]).mean(), metrics

    words = {"mean": "mean", "sum": "sum"}
    gradient = fs.value_and_grad(
        loss_fn, mesh=mesh, batch=P("data"), aux=words, compute=torch.bfloat16
    )
    (_, metrics), _ = gradient(params, values)

    parts = [part.double().mean().bfloat16().double() for part in values.chunk(n)]
    torch.testing.assert_close(metrics["mean"].double(), sum(parts) / n, rtol=1e-6, atol=0)
    count = torch.tensor(257 * 8 / n).bfloat16().double() * n
    torch.testing.assert_close(metrics["sum"].double(), count, rtol=1e-6, atol=0)
