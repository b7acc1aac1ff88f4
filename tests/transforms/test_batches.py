"""Batches of any size: the gradient, and the mean, are those of one device on the whole batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fshard as fs
from fshard import P

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
    mask = torch.randint(0, 2, (size, 3), generator=generator).double() if masked else torch.ones(size, 3).double()
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


def serial(loss_fn, params, batch):
    leaves = [x.clone().requires_grad_() for x in (*params["blocks"], params["bias"])]
    loss = loss_fn({"blocks": leaves[:2], "bias": leaves[2]}, batch).mean()
    return loss.detach(), torch.autograd.grad(loss, leaves)


def sharded(loss_fn, params, batch, n, stage=0, **options):
    mesh = fs.make_mesh({"data": n})
    opt = fs.partition_optimizer(fs.optim.sgd(1.0), mesh=mesh, axis="data", stage=stage)
    own = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), gradients=opt.gradients, **options)
    loss, grads = run(own, batch)
    return loss, [fs.unshard(g) for g in (*grads["blocks"], grads["bias"])]


def assert_serial(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-14)
    for ours, g in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(ours, g, rtol=1e-11, atol=1e-13)


# -- the serial gradient ----------------------------------------------------------------------------------------------


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
    found = sharded(loss_fn, params(), batch, n, stage, accumulate=accumulate, **mode, **weight)
    assert_serial(found, serial(loss_fn, params(), batch))


def reproducible(n, stage, size):
    batch = {name: x.float() for name, x in batch_of(size).items()}
    own = {"blocks": [x.float() for x in params()["blocks"]], "bias": params()["bias"].float()}
    torch.manual_seed(3)

    def with_dropout(params, batch):
        return nn.functional.dropout(each(params, batch), 0.5).mean()

    return sharded(with_dropout, own, batch, n, stage, reproducible=True)


@pytest.mark.parametrize("size", SIZES)
def test_reproducible_batch_of_any_size_has_equal_bits(size):
    loss, grads = reproducible(1, 0, size)
    for n in (2, 4, 8):
        for stage in (0, 3):
            other, again = reproducible(n, stage, size)
            assert torch.equal(loss, other) and all(map(torch.equal, grads, again))


def on_processes(n):
    found = [sharded(mean, params(), batch_of(size), n, stage) for size in SIZES for stage in (1, 3)]
    bits = [reproducible(n, 2, size) for size in SIZES]
    return found, bits, [rows_on(n, size) for size in SIZES]


def rows_on(n, size):
    mesh = fs.make_mesh({"data": n})
    own = fs.shard_params(params(), P(), mesh=mesh)
    run = fs.value_and_grad(lambda *given: (mean(*given), per_sample(*given)), mesh=mesh, batch=P("data"), aux="rows")
    return fs.unshard(run(own, batch_of(size))[0][1])


def test_batch_of_any_size_on_processes_has_equal_gradient(two, four):
    expected = [serial(mean, params(), batch_of(size)) for size in SIZES for _ in (1, 3)]
    bits = [reproducible(1, 0, size) for size in SIZES]
    for pool, n in ((two, 2), (four, 4)):
        for found, again, rows in pool.run(on_processes, n):
            for own, size in zip(rows, SIZES, strict=True):
                torch.testing.assert_close(own, per_sample(params(), batch_of(size)))
            for ours, theirs in zip(found, expected, strict=True):
                assert_serial(ours, theirs)
            for (loss, grads), (other, others) in zip(bits, again, strict=True):
                assert torch.equal(loss, other) and all(map(torch.equal, grads, others))


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
    loss, grads = fs.value_and_grad(lambda p, x: (p["w"] * x).mean(), mesh=mesh, batch=P("data"))(own, x)
    assert (loss.item(), fs.unshard(grads)["w"].item()) == (3.0, 3.0)


def test_weight_zero_with_nonfinite_loss_adds_nothing():
    """The losses of the first device's samples are 0 / 0."""
    mesh = fs.make_mesh({"data": 2})
    batch = {"x": torch.arange(4.0), "mask": torch.tensor([0.0, 0.0, 1.0, 1.0])}

    def loss_fn(w, batch):
        loss = (w * batch["x"] * batch["mask"]).sum() / batch["mask"].sum()
        return loss, {"mean": loss}

    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), weight=lambda batch: batch["mask"].sum(), has_aux=True)
    (loss, aux), grads = run(fs.shard_params(torch.tensor(2.0), P(), mesh=mesh), batch)
    assert (loss.item(), aux["mean"].item(), fs.unshard(grads).item()) == (5.0, 5.0, 2.5)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_synchronised_batchnorm_counts_each_sample_once(size, n):
    """Devices without samples take part in its sums and add nothing to them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).double()
    mesh = fs.make_mesh({"data": n})
    apply, own, buffers = fs.functionalize(module, sync_batchnorm="data")
    x = batch_of(size)["x"]

    def loss_fn(params, x):
        return apply(params, buffers, x)[0].square().mean()

    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))
    loss, grads = run(fs.shard_params(own, fs.fsdp("data"), mesh=mesh), x)
    expected = module(x).square().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, p in module.named_parameters():
        torch.testing.assert_close(fs.unshard(grads[name]), p.grad)


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
    ("size", "refused"), [(8, set()), (16, set()), (7, {"pmean"}), (5, {"pmean"}), (3, {"pmean", "psum", "gather"})]
)
@pytest.mark.parametrize("name", MEANS)
def test_collective_in_loss_with_uneven_batch_raises(name, size, refused, stage):
    mesh = fs.make_mesh({"data": 4})
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(0))
    own = fs.shard_params(torch.ones(3), fs.fsdp("data") if stage else P(), mesh=mesh)
    run = fs.value_and_grad(centred(MEANS[name]), mesh=mesh, batch=P("data"))
    if name in refused:
        with pytest.raises(
            ValueError, match=f"in the loss function.*{size} samples of the batch are cut into 4 slices"
        ):
            run(own, x)
        return
    loss, grads = run(own, x)
    parts = x.tensor_split([size * place // 4 for place in (1, 2, 3)])
    whole = x.amax(0) if name == "pmax" else x.mean(0)
    expected = torch.cat([part - part.mean(0) for part in parts]) if name == "gather" else x - whole
    torch.testing.assert_close(loss, expected.square().sum(1).mean())
    torch.testing.assert_close(fs.unshard(grads), 2 * expected.square().mean(0))


def test_collective_over_other_axes_is_allowed():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    own = fs.shard_params(torch.ones(3), P(), mesh=mesh)
    run = fs.value_and_grad(
        lambda p, x: (fs.pmean(p, "model") * x).sum(1).mean(), mesh=mesh, batch=P("data"), accumulate=2
    )
    assert run(own, torch.ones(3, 3))[0] == 3


# -- metrics and errors -----------------------------------------------------------------------------------------------


DATA = P("data")


def metrics_of(loss_fn, batch, spec=DATA, **options):
    mesh = fs.make_mesh({"data": 2})
    opt = fs.partition_optimizer(fs.optim.sgd(1.0), mesh=mesh, axis="data", stage=1)
    own = fs.shard_params({"w": torch.ones(())}, P(), mesh=mesh)
    return fs.train_step(loss_fn, opt, mesh=mesh, batch=spec, **options)(own, opt.init(own), batch)[2]


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
@pytest.mark.parametrize("size", [3, 7, 8])
@pytest.mark.parametrize("stage", [0, 3])
def test_aux_equals_that_of_the_global_batch(stage, size, options):
    def loss_fn(params, batch):
        found = per_sample(params, batch)
        large = found > 1
        aux = {"mean": found.mean(), "rows": (batch["x"], large), "count": [large.sum(), len(found)]}
        return found, aux

    mesh = fs.make_mesh({"data": 4})
    own = fs.shard_params(params(), fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    words = {"mean": "mean", "rows": "rows", "count": "sum"}
    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), aux=words, **options)
    (_, aux), _ = run(own, batch_of(size))
    _, expected = loss_fn(params(), batch_of(size))
    assert [str(fs.typeof(x)) for x in aux["rows"]] == (
        ["f64[8@data, 4]", "bool[8@data]"] if size == 8 else [f"f64[{size}, 4]", f"bool[{size}]"]
    )
    torch.testing.assert_close(fs.unshard(aux["rows"]), expected["rows"], rtol=0, atol=0)
    torch.testing.assert_close(aux["mean"], expected["mean"])
    assert [x.item() for x in aux["count"]] == [expected["count"][0].item(), size]


def test_aux_rows_of_equal_samples_are_averaged():
    mesh = fs.make_mesh({"data": 2, "seq": 2})
    own = fs.shard_params({"w": torch.ones(())}, P(), mesh=mesh)

    def loss_fn(p, x):
        found = (p["w"] * x).mean(1)
        return found, (found, x[:, 0] > 6)

    for size in (4, 3):
        x = torch.arange(4.0 * size).reshape(size, 4)
        run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data", "seq"), aux="rows")
        (loss, aux), _ = run(own, x)
        mean, large = fs.unshard(aux)
        assert (loss, mean.tolist(), large.tolist()) == (x.mean(), x.mean(1).tolist(), (x[:, 0] > 6).tolist())


@pytest.mark.parametrize("size", [4, 3, 8])
@pytest.mark.parametrize("options", ACCUMULATED, ids=str)
def test_aux_matrix_is_combined_as_its_word_says(size, options):
    """A square matrix that may have as many rows as a device has samples."""
    batch = {"x": torch.arange(4.0 * size).reshape(size, 4)}

    def loss_fn(p, batch):
        x = batch["x"]
        return p["w"] * x.mean(), {
            "mean": x.mean(0) + torch.zeros(4, 4),
            "sum": x.T @ x,
            "rows": x,
            "share": x[:, 0] > 4,
        }

    words = {"mean": "mean", "sum": "sum", "rows": "rows", "share": "rows"}
    found = fs.unshard(metrics_of(loss_fn, batch, aux=words, **options)["aux"])
    expected = loss_fn({"w": torch.ones(())}, batch)[1]
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=r"in aux=; mean is of shape \(4, 4\). Give aux="):
        metrics_of(loss_fn, batch, has_aux=True, **options)


def test_aux_numbers_are_averaged_by_default():
    def loss_fn(p, x):
        return p["w"] * x.mean(), {"mean": x.mean(), "share": (x > 1).any(), "count": len(x), "rows": x.sum()}

    assert metrics_of(loss_fn, torch.arange(4.0), has_aux=True)["aux"] == {
        "mean": 1.5,
        "share": 0.5,
        "count": 2,
        "rows": 3,
    }
    assert metrics_of(loss_fn, torch.arange(4.0), aux="rows")["aux"]["rows"] == 3
    assert metrics_of(loss_fn, torch.arange(4.0), aux="sum")["aux"] == {"mean": 3, "share": 1, "count": 4, "rows": 6}


@pytest.mark.parametrize(
    ("aux", "names", "message"),
    [
        ("rows", ["best", "name"], r"best is of shape \(3,\), but there are 2 samples"),
        ("mean", ["best", "fine", "name", "z"], "name is a str"),
        ("mean", ["fine", "z"], "z is complex"),
        ({"best": "mean"}, ["best", "fine"], "must be a prefix of the metrics"),
        ("median", ["fine"], 'aux must be "mean", "sum" or "rows", or a tree of these, got .median'),
    ],
    ids=str,
)
def test_aux_of_an_invalid_leaf_names_the_first(aux, names, message):
    def loss_fn(p, x):
        leaves = {"best": x.mean(0), "name": "x", "z": torch.tensor(1j), "fine": 1}
        return (p["w"] * x).mean(), {name: leaves[name] for name in names}

    with pytest.raises(ValueError, match=message):
        metrics_of(loss_fn, torch.ones(4, 3), aux=aux)


def test_replicated_batch_accepts_per_sample_losses():
    metrics = metrics_of(lambda p, x: (p["w"] * x, {"rows": x}), torch.arange(4.0), spec=P(), aux="rows")
    assert (metrics["loss"], metrics["samples"], fs.unshard(metrics["aux"]["rows"]).tolist()) == (1.5, 4, [0, 1, 2, 3])
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


def test_tensors_of_different_lengths_raise():
    with pytest.raises(ValueError, match="must have the same samples; got 4 over data, 8 over data. Replicate"):
        metrics_of(lambda p, batch: p["w"] * batch["x"].mean(), {"x": torch.ones(4), "y": torch.arange(8.0)})


def test_unsplittable_batches_raise():
    def loss_fn(p, x):
        return (p["w"] * x).mean()

    with pytest.raises(ValueError, match="the batch has no samples"):
        metrics_of(loss_fn, torch.ones(0))
    with pytest.raises(ValueError, match="must be split into 2 slices, but has no tensor whose first dim is sharded"):
        metrics_of(
            lambda p, x: p["w"] * x["a"].mean(), {"a": torch.ones(4), "b": torch.ones(2)}, spec=P(), accumulate=2
        )
    with pytest.raises(
        ValueError, match=r"one number, or without weight= one for each sample; got .* \(2,\)\. Take its mean"
    ):
        metrics_of(lambda p, x: p["w"] * x, torch.ones(4), weight=len)
    with pytest.raises(ValueError, match=r"one number for a part of the batch; got .* \(3,\)"):
        metrics_of(loss_fn, torch.ones(4), weight=lambda x: torch.ones(3))
    with pytest.raises(ValueError, match="of at least 0; got -1.0"):
        metrics_of(loss_fn, torch.ones(4), weight=lambda x: -1.0)
    mesh = fs.make_mesh({"data": 3, "seq": 2})
    own = fs.shard_params({"w": torch.ones(())}, P(), mesh=mesh)
    with pytest.raises(ValueError, match="dim 1 has 3 elements, which 2 devices"):
        fs.grad(loss_fn, mesh=mesh, batch=P("data", "seq"))(own, torch.ones(4, 3))


def linear_loss(params, batch):
    return torch.tanh(torch.nn.functional.linear(batch["x"], params["w"], params["b"])).square().mean()


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 9), st.sampled_from([2, 4, 8]))
def test_slice_alignment_leaves_bits_unchanged(size, width, devices):
    """The rows of a slice begin at any address: a product of the same numbers was rounded differently there."""
    draw = torch.Generator().manual_seed(size)
    whole = {"w": torch.randn(5, width, generator=draw), "b": torch.randn(5, generator=draw)}
    batch = {"x": torch.randn(size, width, generator=draw)}

    def found(n):
        mesh = fs.make_mesh({"data": n})
        run = fs.value_and_grad(linear_loss, mesh=mesh, batch=P("data"), reproducible=True)
        loss, grads = run(fs.shard_params(whole, P(), mesh=mesh), batch)
        return [loss, *map(fs.unshard, grads.values())]

    assert all(map(torch.equal, found(1), found(devices)))
