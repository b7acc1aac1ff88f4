"""`certify` passes correct programs, and finds every mistake that is made here on purpose, with its leaf and step."""

import itertools
from dataclasses import FrozenInstanceError, replace
from functools import partial
from itertools import combinations
from math import prod
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten, flatten_with_paths, unflatten
from fshard.mesh.layout.sharded import flatten_shards
from fshard.testing import certify, check_elementwise, gpt
from fshard.testing.certify import dyadic_like
from fshard.transforms import train_step as step_module
from fshard.transforms.value_and_grad import gradient_of

STAGES = (0, 1, 2, 3)
ADAMW = fs.optim.adamw(3e-3, fused=False)


def mlp(params, x):
    y = torch.tanh(x @ params["up"] + params["bias"]) @ params["down"]
    return (y * params["scale"]).square().mean()


def mlp_params():
    draw = torch.Generator().manual_seed(1)
    shapes = {"bias": (6,), "down": (6, 3), "scale": (), "up": (5, 6)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


X = torch.randn(8, 5, generator=torch.Generator().manual_seed(2))


def certified(loss_fn=mlp, opt=None, sizes=None, **options):
    mesh = fs.make_mesh(sizes or {"data": 4})
    return certify(loss_fn, mlp_params(), X, opt or fs.optim.sgd(0.1, momentum=0.9, fused=False), mesh=mesh, **options)


def verdicts(certificate):
    return {row.verdict for row in certificate.rows}


def only(certificate, leaf):
    """Return the reason of the first divergence, which must be of this leaf, in every stage."""
    stages = {row.stage for row in certificate.rows}
    found = [next(r for r in certificate.rows if r.stage == stage and r.step == 0) for stage in sorted(stages)]
    assert {row.leaf for row in found} == {leaf}
    (reason,) = {row.reason for row in found}
    with pytest.raises(AssertionError, match="the sharded run is not the run on one device") as error:
        certificate.check()
    assert str(certificate) in str(error.value) and not certificate.ok
    return reason


# -- what is sound -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4])
def test_certify_reproducible_dropout_is_exact(n):
    mesh = fs.make_mesh({"data": n})
    found = certify(gpt.loss_fn, gpt.init(), gpt.batch(), ADAMW, mesh=mesh, reproducible=True)
    assert verdicts(found.check()) == {"EXACT"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_certify_gpt_is_bounded_by_roundings(n, dtype):
    """Runs are in float64, whatever the parameters are in."""
    mesh, params = fs.make_mesh({"data": n}), gpt.init(layers=1, dtype=dtype)
    certificate = certify(gpt.without_dropout, params, gpt.batch(), ADAMW, mesh=mesh, stages=[0, 3]).check()
    assert verdicts(certificate) <= {"EXACT", "BOUNDED"} and (n == 1 or "BOUNDED" in verdicts(certificate))
    assert all(row.error <= 1e-5 * row.bound <= 1e-13 for row in certificate.rows)


def test_certify_finds_a_mistake_of_a_millionth():
    certificate = certified(lambda params, x: mlp(params, x) * (1 + 1e-6 * fs.axis_index("data")), stages=[0, 2])
    assert {row.verdict for row in certificate.rows} == {"DIVERGENT"}


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.01), (torch.float16, 1.2)])
def test_certify_widens_bounds_for_casts_of_the_loss(dtype, factor):
    """Casts inside of the loss widen the tolerance to the roundings of that dtype, which the certificate names."""

    def loss_fn(params, x):
        return mlp({name: w.to(dtype) for name, w in params.items()}, x.to(dtype)).double()

    certificate = certified(loss_fn, stages=[0, 3]).check()
    assert f"The program casts to {dtype}, so bounds are wider" in certificate.unseen
    assert max(row.error for row in certificate.rows) > 1e-9
    mistaken = certified(lambda params, x: loss_fn(params, x) * factor ** (fs.axis_size("data") > 1), stages=[0])
    assert "DIVERGENT" in verdicts(mistaken)


@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 8}, {"node": 2, "data": 4}], ids=str)
def test_certify_linear_loss_with_exact_inputs_is_exact(sizes):
    def linear(params, x):
        return (x @ params["up"]).sum(1).mean() + params["bias"].sum() * x.mean() * 0 + params["down"].sum()

    found = certified(linear, fs.optim.sgd(0.5), sizes, batch_spec=P(tuple(sizes)), exact_inputs=True).check()
    assert [row.leaf for row in found.rows] == ["bias", "down", "scale", "up"] * 4
    assert verdicts(found) == {"EXACT"}


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2},
        {"precision": "bf16"},
        {"donate": True},
        {"frozen": lambda path: path == "bias"},
        {"frozen": ["bias", "s*"]},
        {"weight": lambda x: x.shape[0]},
        {"reproducible": True, "accumulate": 2},
        {"reproducible": True, "precision": "bf16"},
    ],
    ids=lambda options: "+".join(options),
)
def test_certify_passes_train_step_options_to_both_runs(options):
    certified(sizes={"data": 2}, **options).check()


def test_certify_accepts_auxiliary_values():
    certified(lambda params, x: (mlp(params, x), {"mean": x.mean()}), has_aux=True).check()


# -- buffers -------------------------------------------------------------------------------------------------------


def batch_normed(sync):
    """A loss with buffers, its parameters and its buffers."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    apply, params, buffers = fs.functionalize(module, sync_batchnorm=sync)

    def loss_fn(params, buffers, x):
        y, buffers = apply(params, buffers, x)
        return y.square().mean(), buffers

    return loss_fn, params, buffers


@pytest.mark.parametrize("options", [{}, {"donate": True}, {"has_buffers": True}], ids=str)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_certify_compares_buffers_too(n, options):
    loss_fn, params, buffers = batch_normed("data")
    mesh = fs.make_mesh({"data": n})
    found = certify(loss_fn, params, X, ADAMW, mesh=mesh, buffers=buffers, **options).check()
    names = [f"buffers.1.{name}" for name in ("num_batches_tracked", "running_mean", "running_var")]
    assert [row.leaf for row in found.rows if row.stage == 3][-3:] == names
    assert {row.verdict for row in found.rows if row.leaf == names[0]} == {"EXACT"}


def test_certify_takes_buffers_before_auxiliary_values():
    def loss_fn(params, buffers, x):
        mean = x.mean(0)
        loss = mlp(params, x - buffers["mean"])
        return loss, {"mean": 0.5 * buffers["mean"] + 0.5 * mean, "none": None}, {"largest": x.amax()}

    given = {"buffers": {"mean": torch.ones(5), "none": None}, "has_aux": True}
    assert "BOUNDED" in verdicts(certified(loss_fn, **given).check())
    found = certified(loss_fn, reproducible=True, **given).check()
    assert verdicts(found) == {"EXACT"}
    wrong = certified(
        loss_fn=lambda p, b, x: (mlp(p, x), {"mean": x[0]}), buffers={"mean": torch.ones(5)}, stages=[0, 3]
    )
    assert "each device's own samples" in only(wrong, "buffers.mean")


def test_certify_unsynchronised_batchnorm_diverges():
    loss_fn, params, buffers = batch_normed(None)
    found = certify(loss_fn, params, X, ADAMW, mesh=fs.make_mesh({"data": 2}), buffers=buffers, stages=[0])
    (row,) = (row for row in found.rows if row.leaf == "buffers.1.running_var")
    assert row.verdict == "DIVERGENT" and "sync_batchnorm=axis" in row.reason


def test_certify_accepts_a_loss_per_sample():
    certified(lambda p, x: (torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]).square().mean(1) * p["scale"]).check()


def test_certify_has_a_row_for_every_kind_of_leaf():
    w = torch.ones(3)
    params = {"tied": [w, w], "unused": torch.ones(2), "count": torch.arange(3), "empty": torch.ones(0), "none": None}
    params["double"], params["complex"] = torch.ones(5).double(), torch.ones(2, dtype=torch.complex64)

    def loss_fn(p, x):
        used = p["tied"][0].sum() + 2 * p["tied"][1].square().sum() + p["count"].sum() + p["empty"].sum()
        return (used + p["double"].square().sum().float() + p["complex"].abs().square().sum()) * x.mean()

    found = certify(loss_fn, params, X, ADAMW, mesh=fs.make_mesh({"data": 2})).check()
    paths = ["complex", "count", "double", "empty", "none", "tied[0]", "tied[1]", "unused"]
    assert [row.leaf for row in found.rows if row.stage == 3] == paths


@pytest.mark.parametrize("exact", [False, True])
def test_certify_frozen_parameters_are_exact(exact):
    params = mlp_params()
    params["up"] = torch.nn.Parameter(params["up"], requires_grad=False)
    found = certify(mlp, params, X, ADAMW, mesh=fs.make_mesh({"data": 2}), exact_inputs=exact).check()
    assert {row.verdict for row in found.rows if row.leaf == "up"} == {"EXACT"}


def test_certify_accepts_collectives_in_the_loss():
    def centred(params, x):
        return mlp(params, x - fs.pmean(x.mean(0), "data"))

    certified(centred).check()


@pytest.mark.parametrize(
    "opt", [ADAMW, fs.optim.lion(1e-3), fs.optim.adam(1e-3, eps=1e-12)], ids=["adamw", "lion", "adam"]
)
@pytest.mark.parametrize("seed", range(4))
def test_certify_gradient_of_roundings_passes(opt, seed):
    def loss_fn(p, x):
        return -torch.log_softmax(x @ p["w"] + p["shift"], -1)[:, 0].mean()

    draw = torch.Generator().manual_seed(seed)
    params = {"shift": torch.randn(1, generator=draw), "w": torch.randn(5, 7, generator=draw)}
    certify(loss_fn, params, X, opt, mesh=fs.make_mesh({"data": 4})).check()


@pytest.mark.parametrize("opt", [ADAMW, fs.optim.lion(1e-2)], ids=["adamw", "lion"])
@pytest.mark.parametrize("seed", range(3))
def test_certify_at_a_minimum_passes(opt, seed):
    """Adam and Lion make a step of a rounding: they are given the gradients of the serial run."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 5, generator=draw)

    def loss_fn(p, x):
        return (x - p["mean"]).square().mean()  # at its minimum, the gradient is rounding alone

    params = {"mean": x.double().mean(0)}
    certify(loss_fn, params, x, opt, mesh=fs.make_mesh({"data": 4}), steps=4).check()


def one_element_is_wrong(n):
    """Certify a loss whose gradient is wrong in one element, which one device holds."""

    def loss_fn(p, x):
        wrong = (p["w"][0] * x[:, 0]).mean() * (fs.axis_size("data") > 1)
        return (p["w"] * x[:, :3]).sum(1).mean() + p["s"] * x.mean() + wrong

    params = {"s": torch.ones(()), "w": torch.ones(3)}
    return certify(loss_fn, params, X, fs.optim.sgd(0.1), mesh=fs.make_mesh({"data": n}), stages=[3])


def rows_of(n):
    return one_element_is_wrong(n).rows


def test_certify_on_processes_has_the_rows_of_virtual_devices(two):
    virtual = one_element_is_wrong(2)
    assert not virtual.ok and all(found == virtual.rows for found in two.run(rows_of, 2))


def on_processes():
    mesh = fs.make_mesh({"data": 2})
    bad = certify(lambda p, x: mlp(p, x) * fs.axis_size("data"), mlp_params(), X, fs.optim.sgd(0.1), mesh=mesh)
    return certify(mlp, mlp_params(), X, ADAMW, mesh=mesh).ok, bad.first.leaf, bad.first.reason


def test_certify_on_processes_finds_scaled_loss(two):
    for ok, leaf, reason in two.run(on_processes):
        assert ok and leaf == "bias" and reason == "step 0: the gradient is 2 times that of one device"


# -- mistakes in the loss function ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("power", "factor"), [(1, "4"), (-1, "0.25"), (0.5, "2")])
@pytest.mark.parametrize("opt", [None, ADAMW], ids=["sgd", "adamw"])
def test_certify_scaled_loss_names_the_factor(power, factor, opt):
    found = certified(lambda params, x: mlp(params, x) * fs.axis_size("data") ** power, opt)
    assert only(found, "bias") == f"step 0: the gradient is {factor} times that of one device"


def test_certify_summed_loss_names_the_factor():
    found = certified(lambda params, x: mlp(params, x) * x.shape[0], accumulate=2)
    assert only(found, "bias") == "step 0: the gradient is 0.125 times that of one device"


def test_certify_names_only_the_leaf_whose_gradient_diverges():
    def loss_fn(params, x):
        scaled = params["scale"] * fs.axis_size("data") - params["scale"].detach() * (fs.axis_size("data") - 1)
        return mlp({**params, "scale": scaled}, x)

    certificate = certified(loss_fn, stages=[0, 3])
    assert only(certificate, "scale") == "step 0: the gradient is 4 times that of one device"
    assert {row.leaf for row in certificate.rows if row.verdict == "DIVERGENT"} == {"scale"}
    assert certificate.first.leaf == "scale" and certificate.first.stage == 0


def test_certify_later_divergence_refers_to_the_first():
    def update(grads, state, params):
        n = grads["bias"].numel()  # 2 of 6 on a device
        return {name: -g * (n if name == "bias" else 1) for name, g in grads.items()}, state

    opt = fs.optim.Optimizer(lambda params: (), update, elementwise=True)
    certificate = certified(opt=opt, stages=[3])
    only(certificate, "bias")
    assert {row.reason for row in certificate.rows if row.leaf == "up"} == {"step 1: after bias has diverged"}


def test_certify_loss_of_one_device_diverges():
    found = certified(lambda params, x: mlp(params, x) * (fs.axis_index("data") == 0))
    assert "the gradient first differs at [0]: " in only(found, "bias")


def a_sum_over_the_model_is_forgotten(sizes):
    """Each device multiplies by its own rows and columns; what comes out is a summand, and is taken for the sum."""

    def loss_fn(params, x):
        n, at = fs.axis_size("model"), fs.axis_index("model")
        up, down = params["up"].chunk(n, 1)[at], params["down"].chunk(n, 0)[at]
        return (torch.tanh(x @ up) @ down * params["scale"] + params["bias"][:3]).square().mean()

    batch = P("data" if "data" in sizes else None)
    opt, mesh = fs.optim.sgd(0.1), fs.make_mesh(sizes)
    return certify(loss_fn, mlp_params(), X, opt, mesh=mesh, axis=tuple(sizes), batch_spec=batch, stages=[0, 3])


@pytest.mark.parametrize("sizes", [{"model": 2}, {"data": 2, "model": 2}, {"model": 2, "data": 3}], ids=str)
def test_certify_missing_psum_over_model_axis_diverges(sizes):
    assert only(a_sum_over_the_model_is_forgotten(sizes), "bias").startswith("step 0: the gradient ")


def with_collectives(reductions):
    """A loss that adds up over each axis of the model, and is centred over the batch; each by a function that is given."""

    def loss_fn(params, x):
        y = params["bias"][:3]
        for axis in [axis for axis in reductions if axis != "data"]:
            n, at = fs.axis_size(axis), fs.axis_index(axis)
            up, down = params["up"].chunk(n, 1)[at], params["down"].chunk(n, 0)[at]
            y = y + reductions[axis](torch.tanh(x @ up) @ down, axis)
        return ((y - reductions["data"](y.mean(0), "data")).square() * params["scale"]).mean()

    return loss_fn


RIGHT = {"data": fs.pmean, "model": fs.psum, "expert": fs.psum}


def test_certify_psum_over_model_axes_passes():
    mesh = fs.make_mesh({"expert": 3, "data": 2, "model": 2})
    certify(with_collectives(RIGHT), mlp_params(), X, ADAMW, mesh=mesh, axis=("data", "model"), stages=[0, 3]).check()


def test_certify_reproducible_scaled_loss_names_the_factor():
    def loss_fn(params, x):
        return mlp(params, F.dropout(x, 0.1)) * fs.axis_size("data")

    assert "4 times that of one device" in only(certified(loss_fn, reproducible=True), "bias")


def test_certify_names_the_first_element_that_differs():
    def loss_fn(params, x):
        index = fs.axis_index("data")
        return mlp(params, x) + params["up"].flatten()[7 + index] * index

    reason = only(certified(loss_fn, stages=[3]), "up")
    assert reason.startswith("step 0: the gradient first differs at [1, 2]: ")


def test_certify_gradient_only_on_the_mesh_diverges():
    def loss_fn(params, x):
        return mlp(params if fs.axis_size("data") > 1 else {**params, "bias": params["bias"].detach()}, x)

    assert "only the sharded run has it" in only(certified(loss_fn), "bias")


def test_certify_nonfinite_serial_run_is_inconclusive():
    first = certified(lambda p, x: mlp(p, x / 0)).first
    assert first is not None and first.verdict == "INCONCLUSIVE"
    assert "is not finite" in first.reason


def test_certify_notes_the_run_that_raised():
    def loss_fn(params, x):
        return (x.float() @ params["up"]).mean()

    with pytest.raises(RuntimeError) as error:
        certified(loss_fn)
    assert "certify: in the run on one device in float64: does the program name a dtype?" in error.value.__notes__
    with pytest.raises(ValueError) as error:
        certified(stages=[0], gradients=lambda layout: fs.Layout(layout.mesh, P(unreduced="data")))
    assert "certify: in the run in stage 0" in error.value.__notes__


def test_certify_random_loss_raises():
    with pytest.raises(fs.errors.PromiseError) as error:
        certified(lambda params, x: mlp(params, F.dropout(x, 0.5)))
    assert "on one device a run must give the same results when it is repeated; got another bias, step 0" in str(
        error.value
    )
    assert "The loss function or the optimizer draws random numbers or counts its calls" in str(error.value)
    assert "call certify(..., reproducible=True), which compares with a mesh of one device" in str(error.value)


def test_certify_keeps_the_state_of_the_default_generator():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    certified(steps=1)
    assert torch.equal(torch.get_rng_state(), before)


@settings(max_examples=25)
@given(st.data(), st.sampled_from(STAGES), st.sampled_from([ADAMW, fs.optim.sgd(0.1)]))
def test_certify_finds_mistakes_in_every_leaf_on_any_mesh(data, stage, opt):
    sizes = data.draw(st.sampled_from([{"a": 2, "b": 4}, {"a": 3, "b": 2}, {"a": 2, "b": 2}, {"a": 5}]))
    some = [axes for count in (1, 2) for axes in combinations(sizes, count)]
    axes, cut = data.draw(st.sampled_from(some)), data.draw(st.sampled_from(some))
    power = data.draw(st.sampled_from([None, 1, -1, 0.5, -0.5]))

    def mistaken(params, x):
        factor = fs.axis_index(axes) == 0 if power is None else fs.axis_size(axes) ** power
        return (torch.tanh(x @ params["up"] + params["bias"]) @ params["down"]).square().mean() * factor

    params = {name: mlp_params()[name] for name in ("bias", "down", "up")}
    x, mesh = torch.randn(24, 5, generator=torch.Generator().manual_seed(3)), fs.make_mesh(sizes)
    found = certify(mistaken, params, x, opt, mesh, axis=cut, batch_spec=P(cut), stages=[stage], steps=1)
    assert [row.leaf for row in found.rows if row.verdict == "DIVERGENT"] == ["bias", "down", "up"]
    if power is not None:
        factor = prod(sizes[axis] for axis in axes) ** power
        assert {row.reason for row in found.rows} == {f"step 0: the gradient is {factor:.4g} times that of one device"}


# -- mistakes in the library, put in here ---------------------------------------------------------------------------------


def wrong_gradients(monkeypatch, of_leaf, leaf="down"):
    """Let a training step have another gradient of one leaf: of_leaf(the right one, the summands)."""

    def wrong(right, *given):
        value, grads = right.run(*given)
        axes = tuple(axis for axis in right.mesh.axis_names if right.mesh.shape[axis] > 1)
        options = replace(right.options, gradients=lambda layout: fs.Layout(right.mesh, P(unreduced=axes)))
        summands = replace(right, options=options)
        local = summands.run(*given)[1]
        paths, leaves, structure = flatten_with_paths(grads)
        place = paths.index(f'["{leaf}"]')
        leaves[place] = of_leaf(leaves[place], flatten(local)[0][place])
        return value, unflatten(structure, leaves)

    def made(*args, **options):
        right = gradient_of(*args, **options)
        return SimpleNamespace(options=right.options, run=partial(wrong, right))

    monkeypatch.setattr(step_module, "gradient_of", made)


def pretended(layout, shape, wholes):
    """Return what says that it lies as `layout`, made of pieces of a whole of each device's own."""
    pieces = [fs.device_put(x, layout).shards[device] for device, x in enumerate(wholes)]
    return fs.Sharded(shape, layout, tuple(pieces))


@pytest.mark.parametrize("stage", STAGES)
def test_certify_missing_reduction_diverges(monkeypatch, stage):
    wrong_gradients(monkeypatch, lambda g, local: pretended(g.layout, g.shape, local.shards))
    assert only(certified(stages=[stage]), "down").startswith("step 0: the gradient first differs at ")


def test_certify_compares_every_replica(monkeypatch):
    def of_leaf(g, local):
        return fs.Sharded(g.shape, g.layout, (*g.shards[:3], g.shards[3] + 1))

    wrong_gradients(monkeypatch, of_leaf)
    assert "(device 3)" in only(certified(stages=[0]), "down")


# -- mistakes in the optimizer -----------------------------------------------------------------------------------------


def by_norm(grads, state, params):
    """Divide by the norm of a leaf: of a piece of it, where it is in pieces."""
    leaves, structure = flatten(grads)
    return unflatten(structure, [-g / (1 + g.norm()) for g in leaves]), state


BY_NORM = fs.optim.Optimizer(lambda params: (), by_norm, elementwise=True)


def test_certify_optimizer_that_is_not_elementwise_diverges():
    certified(opt=BY_NORM, stages=[0]).check()
    for stage in (1, 2, 3):
        reason = only(certified(opt=BY_NORM, stages=[stage]), "bias")
        assert reason.startswith("step 0: the parameter first differs at [0]: ")
        assert reason.endswith("The gradient agrees: is the optimizer elementwise?")


NOT_ELEMENTWISE = {
    "by norm": lambda g: g / (1 + g.norm()),
    "by mean": lambda g: g - (g.mean() if g.numel() else 0.0),
    "by largest": lambda g: g / g.abs().amax() if g.numel() else g,
    "by size": lambda g: g * g.numel(),
    "by shape": lambda g: g * (1 + g.ndim),
    "by place": lambda g: g * torch.arange(1.0, g.numel() + 1).reshape(g.shape),
    "by sum": lambda g: g.reshape(-1).cumsum(0).reshape(g.shape),
    "by neighbour": lambda g: g.reshape(-1).roll(1).reshape(g.shape),
    "by order": lambda g: g.reshape(-1).sort().values.reshape(g.shape),
}


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_check_elementwise_wrong_promise_raises(name):
    def update(grads, state, params):
        leaves, structure = flatten(grads)
        return unflatten(structure, [-0.1 * NOT_ELEMENTWISE[name](g) for g in leaves]), state

    opt = fs.optim.Optimizer(lambda params: (), update, elementwise=True)
    with pytest.raises(AssertionError, match=r"has elementwise=True, but on \d flat shards got another \w+, step \d: the parameter "):
        check_elementwise(opt)
    for row in (certified(opt=opt, stages=[stage], steps=1).first for stage in (1, 3)):
        assert "The gradient agrees: is the optimizer elementwise?" in row.reason


def stepping(monkeypatch, change):
    """Let partitioned optimizers take their step on other gradients."""
    right = fs.partition_optimizer

    def wrong(opt, **options):
        own = right(opt, **options)

        def on_other_gradients(act):
            def run(grads, state, params):
                leaves, structure = flatten_shards(grads)
                return act(unflatten(structure, [change(g) for g in leaves]), state, params)

            return run

        return own._replace(step=on_other_gradients(own.step), update=on_other_gradients(own.update))

    monkeypatch.setattr(fs, "partition_optimizer", wrong)


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_certify_partitioned_optimizer_that_scales_diverges(monkeypatch, factor):
    stepping(monkeypatch, lambda g: g * factor)
    assert "The gradient agrees: is the optimizer elementwise?" in only(certified(), "bias")


def test_certify_reproducible_other_rounding_diverges(monkeypatch):
    whole = mlp_params()["bias"].numel()
    stepping(monkeypatch, lambda g: g if g.numel() >= whole else g * (1 + 2**-18))
    found = certified(reproducible=True, stages=[3])
    assert found.first.verdict == "DIVERGENT" and found.first.error < 1e-5


@pytest.mark.parametrize(
    "opt",
    [
        fs.optim.sgd(0.1, momentum=0.9, nesterov=True),
        fs.optim.adamw(0.1),
        fs.optim.lion(0.1),
        fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adam(0.1)),
        fs.optim.clip_by_value(0.1),
        fs.optim.masked(fs.optim.sgd(0.1), {"bias": True, "matrix": False, "scale": True, "stack": True}),
        fs.optim.from_torch(torch.optim.RMSprop, lr=0.1),
    ],
    ids=["sgd", "adamw", "lion", "clipped", "clip_by_value", "masked", "rmsprop"],
)
def test_check_elementwise_passes_elementwise_optimizers(opt):
    check_elementwise(opt)


def test_check_elementwise_names_the_first_element_that_differs():
    params = {"a": torch.zeros(1), "w": torch.zeros(2, 3)}
    with pytest.raises(
        AssertionError, match=r"on 2 flat shards got another w, step 0: the parameter first differs at \[0, 0\]: .* Use elementwise=False"
    ):
        check_elementwise(BY_NORM, params)
    with pytest.raises(fs.errors.OptimizerError, match="is not elementwise, so there is nothing"):
        check_elementwise(fs.optim.muon(0.1))


def test_check_elementwise_by_label_checks_each_optimizer():
    def mixed(others):
        return fs.optim.by_label({True: fs.optim.muon(0.1), False: others}, lambda path, leaf: leaf.ndim == 2)

    check_elementwise(mixed(fs.optim.adamw(0.1)))
    with pytest.raises(AssertionError, match="flat shards got another bias"):
        check_elementwise(mixed(BY_NORM))


# -- the certificate ----------------------------------------------------------------------------------------------------


def test_certificate_prints_as_a_table():
    mesh = fs.make_mesh({"data": 2})
    loss_fn, params = (
        (lambda p, x: (p["w"] * x).sum(1).mean() * fs.axis_size("data")),
        {"n": torch.ones(1), "w": torch.ones(5)},
    )
    found = certify(loss_fn, params, X, fs.optim.sgd(1.0), mesh=mesh, stages=[0, 3], exact_inputs=True)
    assert repr(found) == str(found) and "DIVERGENT" in found._repr_html_()
    lines = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in str(found).splitlines() if line.startswith("│")
    ]
    assert [line[:3] for line in lines if line[2]] == [
        ["0", "n", "EXACT"],
        ["", "w", "DIVERGENT"],
        ["3", "n", "EXACT"],
        ["", "w", "DIVERGENT"],
    ]
    assert "Mesh(data=2; virtual, cpu) against one device, both in float64" in str(found)
    with pytest.raises(FrozenInstanceError):
        found.steps = 4


def test_certify_missing_buffers_raise():
    for options in ({"has_buffers": True}, {"has_buffers": False, "buffers": {"n": torch.ones(1)}}):
        with pytest.raises(ValueError, match="a loss function that has_buffers is given them by buffers="):
            certified(**options)


def test_dyadic_like_keeps_ties_and_integers():
    x = torch.ones(2, 3)
    drawn = dyadic_like(
        {"a": x, "b": x, "c": x.clone(), "n": torch.arange(2), "z": torch.ones(2, dtype=torch.complex64)}, 0
    )
    assert drawn["a"] is drawn["b"] and not torch.equal(drawn["a"], drawn["c"])
    assert torch.equal(drawn["n"], torch.arange(2)) and drawn["z"].dtype == torch.complex64
    assert ((8 * drawn["a"]) % 1 == 0).all() and drawn["a"].abs().max() <= 1


def test_certify_wrong_arguments_raise():
    with pytest.raises(ValueError, match="steps=0"):
        certified(steps=0)
    with pytest.raises(ValueError, match="abstract"):
        certify(mlp, mlp_params(), X, ADAMW, mesh=fs.make_mesh({"data": 2}, runtime="abstract"))


def test_certify_sharded_arguments_raise():
    mesh = fs.make_mesh({"data": 2})
    params = {"a": fs.shard_params(torch.ones(2), P(), mesh=mesh), "b": torch.ones(2)}
    opt = fs.partition_optimizer(ADAMW, mesh=mesh, axis="data", stage=1)
    with pytest.raises(ValueError) as error:
        certify(mlp, params, fs.shard_params([X], P(), mesh=mesh), opt, mesh)
    assert "got params, batch, the optimizer sharded." in str(error.value)


def test_certify_loss_scaled_optimizer_raises():
    with pytest.raises(ValueError, match="opt must not scale the loss"):
        certified(opt=fs.optim.loss_scaled(ADAMW), precision="fp16")


# -- programs that are not the same twice, or amplify roundings ----------------------------------------------------------


def masked(generator):
    def loss_fn(params, x):
        mask = torch.rand(x.shape, generator=generator) < 0.5
        return mlp(params, x * mask)

    return loss_fn


def test_certify_loss_with_own_generator_raises():
    with pytest.raises(fs.errors.PromiseError, match="got another bias, step 0: the gradient first differs"):
        certified(masked(torch.Generator().manual_seed(0)))


def test_certify_mask_drawn_per_device_diverges():
    """It is the same in each call: 5 of 8 samples' columns on one device, others on four."""

    def loss_fn(params, x):
        return masked(torch.Generator().manual_seed(0))(params, x)

    first = certified(loss_fn).first
    assert first is not None and first.verdict == "DIVERGENT" and first.step == 0


@pytest.mark.parametrize("kind", ["noisy", "counting"])
def test_certify_nondeterministic_optimizer_raises(kind):
    calls = itertools.count(1)

    def update(grads, state, params):
        factor = torch.rand(()) if kind == "noisy" else 1 / next(calls)
        return {name: -0.1 * factor * g for name, g in grads.items()}, state

    with pytest.raises(fs.errors.PromiseError, match="got another bias, step 0: the parameter first differs"):
        certified(opt=fs.optim.Optimizer(lambda params: (), update, elementwise=True))


def test_certify_chaotic_loss_passes():
    """Each step multiplies an error in the parameters by about 1e6; with the serial run's gradients there is none."""
    params = {"w": torch.full((3,), 0.5)}

    def loss_fn(p, x):
        return torch.sin(1e6 * (p["w"] * x[:, :3]).sum(1)).mean()

    certify(loss_fn, params, X, fs.optim.sgd(1.0), mesh=fs.make_mesh({"data": 2}), steps=8).check()
