"""Loss scaling: the scale equals that of torch's GradScaler, within limits and with hysteresis."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard import P, optim

FINITE = st.lists(st.booleans(), max_size=30)


def scales(opt, finite):
    """The scale after each step, and what the parameter is in the end."""
    params = [torch.zeros(())]
    state = opt.init([torch.zeros(())])
    actual = []
    for good in finite:
        grads = [state["scale"].clone() if good else torch.tensor(torch.inf)]
        params, state = opt.step(grads, state, params)
        actual.append(state["scale"].item())
    assert params[0] == -sum(finite) and state["skipped"] == finite.count(False)
    return actual


LIMITS = st.sampled_from([(2.0**-100, 2.0**100), (2.0**9, 2.0**11)])


@given(FINITE, st.integers(1, 4), st.sampled_from([2.0, 4.0]), st.sampled_from([0.5, 0.25]), LIMITS)
def test_loss_scale_equals_torch_grad_scaler(finite, interval, growth, backoff, limits):
    scale = torch.tensor(2.0**10)
    tracker = torch.tensor(0, dtype=torch.int32)
    expected = []
    for good in finite:
        torch._amp_update_scale_(
            scale, tracker, torch.tensor(0.0 if good else 1.0), growth, backoff, interval
        )
        expected.append(scale.clamp_(*limits).item())
    options = {"growth": growth, "backoff": backoff, "interval": interval}
    options |= dict(zip(("smallest", "largest"), limits, strict=True))
    assert scales(optim.loss_scaled(optim.sgd(1.0), initial=2.0**10, **options), finite) == expected


def test_hysteresis_is_restored_by_growth():
    opt = optim.loss_scaled(optim.sgd(1.0), initial=64.0, interval=2, hysteresis=3)
    bad, good = [False], [True]
    assert scales(opt, bad * 4 + good * 2 + bad * 3) == [64, 64, 32, 16, 16, 32, 32, 32, 16]


def test_loss_scaled_divides_16_bits_in_float32():
    """A gradient of 2^-20 in float16, of a loss scaled by 2^10, would be rounded to 0 as 2^-30."""
    opt = optim.loss_scaled(
        optim.with_master_weights(optim.sgd(2.0**30)), initial=2.0**10, smallest=1.0
    )
    params = [torch.zeros(1, dtype=torch.float16)]
    params, _ = opt.step(
        [torch.full((1,), 2.0**-20, dtype=torch.float16)], opt.init(params), params
    )
    assert params[0] == -1


@pytest.mark.parametrize("options", [{}, {"reproducible": True, "slices": 4}], ids=str)
def test_scale_beyond_float16_skips_no_step(options):
    """65536 is no number of float16: a loss in it is multiplied by what is one, and gradients by
    the rest.
    """

    def found(n, stage):
        mesh = fs.make_mesh({"data": n})
        params = fs.shard_params(
            {"w": torch.full((3,), 2.0**-12)}, fs.fsdp("data") if stage == 3 else P(), mesh=mesh
        )
        opt = fs.partition_optimizer(
            optim.loss_scaled(optim.sgd(0.5)), mesh=mesh, axis="data", stage=stage
        )
        step = fs.train_step(
            lambda p, x: (p["w"] * x).sum(1).mean(),
            opt,
            mesh=mesh,
            batch=P("data"),
            precision="fp16",
            **options,
        )
        params, state, metrics = step(params, opt.init(params), torch.ones(4, 3) / 4)
        assert (state["skipped"], state["scale"], metrics["finite"]) == (0, 2.0**15, True)
        return [*fs.unshard(params["w"]).tolist(), metrics["grad_norm"].item()]

    expected = [*[2.0**-12 - 0.125] * 3, pytest.approx(3**0.5 / 4)]
    assert all(found(n, stage) == expected for n in (1, 2, 4) for stage in (0, 1, 2, 3))


def oracle_scales(factors, *, initial, interval, largest):
    """The state's scale after each step of one weight, whose gradient is a factor times the scale.

    Serial: the loss is multiplied by at most `largest`, and that is what grows and backs off.
    """
    scale, finite, expected = initial, 0, []
    for factor in factors:
        applied = min(scale, largest)
        is_finite = torch.tensor(factor * applied).half().isfinite().item()
        finite = finite + 1 if is_finite else 0
        scale = applied if is_finite else applied / 2
        if finite == interval:
            scale, finite = min(applied * 2, largest), 0
        expected.append(scale)
    return expected


def stepped_scales(factors, dtype, *, is_staged=False, **options):
    """The state's scale after each step of one weight, with a loss of a dtype."""
    mesh = fs.make_mesh({"pipe": 2, "data": 1} if is_staged else {"data": 1})
    opt = optim.loss_scaled(optim.sgd(2.0**-30), **options)

    def loss(y, x):
        return (y.to(dtype) * x.to(dtype)).sum()

    def first(params, x):
        return params["w"] * torch.ones_like(x)

    weight, more, functions = {"w": torch.ones(1)}, {}, lambda p, x: loss(first(p, x), x)
    if is_staged:
        more["schedule"] = fs.pipeline_schedule("1f1b", stages=2, microbatches=1)
        more["loss"] = loss
        functions = [first, lambda p, y: p["w"] * y]
        params = fs.shard_stages([weight] * 2, P(), mesh=mesh, schedule=more["schedule"])
    else:
        params = fs.shard_params(weight, P(), mesh=mesh)
    step = fs.train_step(functions, opt, mesh=mesh, batch=P("data"), precision="fp16", **more)
    state, actual = step.init(params), []
    for factor in factors:
        params, state, _ = step(params, state, torch.full((1, 1), factor))
        actual.append(state["scale"].item())
    return actual


FACTORS = [*[1.0] * 8, 8.0, 8.0, 1.0, 1.0, 1.0, 16.0, 16.0, 16.0, 1.0]


@pytest.mark.parametrize("is_staged", [False, True], ids=["model", "stages"])
@pytest.mark.parametrize("initial", [2.0**13, 2.0**16, 2.0**20])
def test_scale_of_a_float16_loss_is_what_was_applied(initial, is_staged):
    options = {"initial": initial, "interval": 2}
    expected = oracle_scales(FACTORS, largest=2.0**15, **options)
    assert stepped_scales(FACTORS, torch.float16, is_staged=is_staged, **options) == expected


def test_first_overflow_of_a_float16_loss_halves_what_was_applied():
    """2^20 in the state is 2^15 in the loss: backing off from 2^20 would lose five steps more."""
    actual = stepped_scales([8.0] * 4, torch.float16, initial=2.0**20)
    assert actual == [2.0**14, 2.0**13, 2.0**12, 2.0**12]


@pytest.mark.parametrize(("dtype", "last"), [(torch.float32, 2.0**19), (torch.float16, 2.0**15)])
def test_scale_grows_to_the_largest_that_the_loss_holds(dtype, last):
    assert stepped_scales([2.0**-9] * 3, dtype, interval=1)[-1] == last


def scaled_on_two_meshes():
    """Step on a mesh of some devices, then on another one with the state of the first."""
    first = fs.make_mesh({"data": 1}, devices=(0,))
    second = fs.make_mesh({"data": 1}, devices=(1,))
    opt = fs.optim.loss_scaled(fs.optim.sgd(0.5), initial=8.0)

    def stepped(mesh, state, gradient):
        params = [fs.device_put(torch.ones(1), fs.Layout(mesh))]
        state = opt.init(params) if state is None else state
        return opt.step([fs.device_put(gradient, fs.Layout(mesh))], state, params)[1]

    state = stepped(first, None, torch.tensor([torch.inf]))
    error = ""
    try:
        stepped(second, state, torch.ones(1))
    except fs.optim.OptimizerError as raised:
        error = str(raised)
    state = fs.broadcast_to(state, source=first)
    return error, stepped(second, state, torch.ones(1))["scale"]


def test_scale_of_another_mesh_is_unknown_until_it_is_broadcast():
    results = fs.run(scaled_on_two_meshes, mesh=fs.make_mesh({"device": 2}))
    (no_error, _), (error, scale) = results
    assert no_error == ""
    assert 'state["scale"] must be a number' in error
    assert "fs.broadcast_to" in error
    assert scale == 4.0
