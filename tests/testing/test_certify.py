"""`certify` passes correct programs, and finds every mistake that is made here on purpose, with its leaf and step."""

import itertools
from dataclasses import replace
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
from fshard.optim.sharded.optimizer import ShardedOptimizer
from fshard.testing import certify, check_elementwise, gpt
from fshard.testing.certify import dyadic_like
from fshard.transforms import train_step as step_module
from fshard.transforms.value_and_grad import gradient_of

STAGES = (0, 1, 2, 3)
ADAMW = fs.optim.adamw(3e-3, fused=False)
LION = fs.optim.lion(1e-2)
MOMENTUM = fs.optim.sgd(0.1, momentum=0.9, fused=False)
X = torch.randn(8, 5, generator=torch.Generator().manual_seed(2))


def mlp(params, x):
    y = torch.tanh(x @ params["up"] + params["bias"]) @ params["down"]
    return (y * params["scale"]).square().mean()


def mlp_params():
    draw = torch.Generator().manual_seed(1)
    shapes = {"bias": (6,), "down": (6, 3), "scale": (), "up": (5, 6)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def certified(loss_fn=mlp, opt=MOMENTUM, *, sizes=None, params=None, batch=X, **options):
    mesh = fs.make_mesh(sizes or {"data": 4})
    return certify(
        loss_fn, mlp_params() if params is None else params, batch, opt, mesh=mesh, **options
    )


def size():
    return fs.axis_size("data")


# -- what is sound -------------------------------------------------------------------------------------------------


def per_sample(p, x):
    return (torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]).square().mean(1) * p["scale"]


def with_mean(params, x):
    return mlp(params, x), {"mean": x.mean()}


def centred(params, x):
    return mlp(params, x - fs.pmean(x.mean(0), "data"))


def linear(params, x):
    return (
        (x @ params["up"]).sum(1).mean()
        + params["bias"].sum() * x.mean() * 0
        + params["down"].sum()
    )


def over_the_model(reductions):
    """A loss that adds up over each axis of the model, and is centred over the batch, by functions that are named."""

    def loss_fn(params, x):
        y = params["bias"][:3]
        for axis in [axis for axis in reductions if axis != "data"]:
            n = fs.axis_size(axis)
            index = fs.axis_index(axis)
            up = params["up"].chunk(n, 1)[index]
            down = params["down"].chunk(n, 0)[index]
            y = y + reductions[axis](torch.tanh(x @ up) @ down, axis)
        return (
            (y - reductions.get("data", lambda y, axis: 0 * y)(y.mean(0), "data")).square()
            * params["scale"]
        ).mean()

    return loss_fn


def shifted(p, x):
    """The gradient of `shift` is 0 but for rounding."""
    return -torch.log_softmax(x @ p["w"] + p["shift"], -1)[:, 0].mean()


def from_mean(p, x):
    """At its minimum all of the gradient is rounding, of which Adam and Lion make a step."""
    return (x - p["mean"]).square().mean()


def chaotic(p, x):
    """Each step multiplies an error in the parameters by about 1e6; with the serial run's gradients there is none."""
    return torch.sin(1e6 * (p["w"] * x[:, :3]).sum(1)).mean()


def batch_normed(sync):
    """Return a loss with buffers, its parameters and its buffers."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    )
    apply, params, buffers = fs.functionalize(module, sync_batchnorm=sync)

    def loss_fn(params, buffers, x):
        y, buffers = apply(params, buffers, x)
        return y.square().mean(), buffers

    return {"loss_fn": loss_fn, "params": params, "buffers": buffers, "opt": ADAMW}


def moving_mean(params, buffers, x):
    mean = x.mean(0)
    return (
        mlp(params, x - buffers["mean"]),
        {"mean": 0.5 * buffers["mean"] + 0.5 * mean, "none": None},
        {"any": x.amax()},
    )


def frozen_up():
    params = mlp_params()
    params["up"] = torch.nn.Parameter(params["up"], requires_grad=False)
    return params


GPT = {"params": gpt.init(layers=1), "batch": gpt.batch(), "opt": ADAMW}
MEANS = {"buffers": {"mean": torch.ones(5), "none": None}, "has_aux": True}
RIGHT = {
    "gpt on one device": {"loss_fn": gpt.without_dropout, **GPT, "sizes": {"data": 1}},
    "gpt": {"loss_fn": gpt.without_dropout, **GPT, "stages": [0, 3]},
    "gpt in bf16": {"loss_fn": gpt.without_dropout, **GPT, "params": gpt.init(1, dtype=torch.bfloat16), "stages": [3]},
    "accumulate": {"accumulate": 2},
    "precision": {"precision": "bf16"},
    "donate": {"donate": True},
    "frozen by a function": {"frozen": lambda path: path == "bias"},
    "frozen by patterns": {"frozen": ["bias", "s*"]},
    "frozen parameter": {"params": frozen_up()},
    "weight": {"weight": lambda x: x.shape[0]},
    "auxiliary values": {"loss_fn": with_mean, "has_aux": True},
    "a loss for each sample": {"loss_fn": per_sample},
    "collectives in the loss": {"loss_fn": centred},
    "sums over axes of the model": {
        "loss_fn": over_the_model({"data": fs.pmean, "model": fs.psum, "expert": fs.psum}),
        "sizes": {"expert": 3, "data": 2, "model": 2}, "axis": ("data", "model"), "stages": [0, 3],
    },
    "buffers": batch_normed("data"),
    "donated buffers": {**batch_normed("data"), "donate": True, "has_buffers": True, "sizes": {"data": 2}},
    "buffers before auxiliary values": {"loss_fn": moving_mean, **MEANS},
    "gradients of roundings": {"loss_fn": shifted, "params": {"shift": X[:1, 0], "w": X[:5]}, "opt": LION},
    "at a minimum, adamw": {"loss_fn": from_mean, "params": {"mean": X.double().mean(0)}, "opt": ADAMW, "steps": 4},
    "at a minimum, lion": {"loss_fn": from_mean, "params": {"mean": X.double().mean(0)}, "opt": LION, "steps": 4},
    "chaotic": {"loss_fn": chaotic, "params": {"w": torch.full((3,), 0.5)}, "opt": fs.optim.sgd(1.0), "steps": 8},
}  # fmt: skip
EXACT = {
    **{
        f"dropout on {n}": {"loss_fn": gpt.loss_fn, **GPT, "sizes": {"data": n}, "reproducible": True} for n in (1, 2, 4)
    },
    **{
        f"linear over {'x'.join(map(str, sizes.values()))}": {
            "loss_fn": linear, "opt": fs.optim.sgd(0.5), "sizes": sizes, "batch_spec": P(tuple(sizes)), "exact_inputs": True
        }
        for sizes in ({"data": 8}, {"node": 2, "data": 4})
    },
    "accumulate": {"accumulate": 2, "reproducible": True},
    "precision": {"precision": "bf16", "reproducible": True},
    "buffers": {"loss_fn": moving_mean, **MEANS, "reproducible": True},
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_certify_accepts_right_programs(name):
    certificate = certified(**RIGHT[name]).check()
    assert {row.verdict for row in certificate.rows} <= {"EXACT", "BOUNDED"}


@pytest.mark.parametrize("name", EXACT)
def test_certify_demands_bits_where_they_are_promised(name):
    assert {row.verdict for row in certified(**EXACT[name]).check().rows} == {"EXACT"}


def test_certify_has_a_row_for_every_kind_of_leaf():
    w = torch.ones(3)
    params = {
        "tied": [w, w],
        "unused": torch.ones(2),
        "count": torch.arange(3),
        "empty": torch.ones(0),
        "none": None,
    }
    params["double"], params["complex"] = (
        torch.ones(5).double(),
        torch.ones(2, dtype=torch.complex64),
    )

    def loss_fn(p, x):
        used = (
            p["tied"][0].sum()
            + 2 * p["tied"][1].square().sum()
            + p["count"].sum()
            + p["empty"].sum()
        )
        return (
            used + p["double"].square().sum().float() + p["complex"].abs().square().sum()
        ) * x.mean()

    certificate = certified(loss_fn, ADAMW, params=params, sizes={"data": 2}).check()
    paths = ["complex", "count", "double", "empty", "none", "tied[0]", "tied[1]", "unused"]
    assert [row.leaf for row in certificate.rows] == 4 * paths
    buffers = [
        row for row in certified(**batch_normed("data")).rows if row.leaf.startswith("buffers")
    ][:3]
    assert [row.leaf[10:] for row in buffers] == [
        "num_batches_tracked",
        "running_mean",
        "running_var",
    ]
    frozen = certified(params=frozen_up(), exact_inputs=True).check()
    assert {row.verdict for row in frozen.rows if row.leaf == "up"} == {"EXACT"}


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.01), (torch.float16, 1.2)])
def test_certify_widens_bounds_for_casts_of_the_loss(dtype, factor):
    """Casts inside of the loss widen the tolerance to the roundings of that dtype, which the certificate names."""

    def loss_fn(params, x):
        return mlp({name: w.to(dtype) for name, w in params.items()}, x.to(dtype)).double()

    certificate = certified(loss_fn, stages=[0, 3]).check()
    assert f"The program casts to {dtype}, so bounds are wider" in certificate.unseen
    assert max(row.error for row in certificate.rows) > 1e-9
    mistaken = certified(lambda params, x: loss_fn(params, x) * factor ** (size() > 1), stages=[0])
    assert "DIVERGENT" in {row.verdict for row in mistaken.rows}


def test_certify_keeps_the_state_of_the_default_generator():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    certified(steps=1)
    assert torch.equal(torch.get_rng_state(), before)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def of_one_scalar(params, x):
    scale = params["scale"] * size() - params["scale"].detach() * (size() - 1)
    return mlp({**params, "scale": scale}, x)


def of_one_element(params, x):
    index = fs.axis_index("data")
    return mlp(params, x) + params["up"].flatten()[7 + index] * index


def of_one_gradient(params, x):
    return mlp(params if size() > 1 else {**params, "bias": params["bias"].detach()}, x)


def own_samples(params, buffers, x):
    return mlp(params, x), {"mean": x[0]}


def masked(params, x, generator=None):
    """Drop the same elements on each device: others than on one."""
    return mlp(
        params,
        x * (torch.rand(x.shape, generator=generator or torch.Generator().manual_seed(0)) < 0.5),
    )


def optimizer_of(update):
    """Return an optimizer without state that claims to be elementwise, of a function of one gradient."""

    def updates(grads, state, params):
        leaves, structure = flatten(grads)
        return unflatten(structure, [update(g) for g in leaves]), state

    return fs.optim.Optimizer(lambda params: (), updates, sharding="flat")


BY_NORM = optimizer_of(lambda g: -g / (1 + g.norm()))
FORGOTTEN = {
    "loss_fn": over_the_model({"model": lambda y, axis: y}),
    "stages": [0, 3],
    "opt": fs.optim.sgd(0.1),
}
WRONG = {  # arguments, the first leaf that diverges, and a part of its reason
    "scaled, all stages": ({"loss_fn": lambda p, x: mlp(p, x) * size()}, "bias", "gradient is 4 times that of one device"),
    "divided, adamw": (
        {"loss_fn": lambda p, x: mlp(p, x) / size(), "opt": ADAMW, "stages": [0, 3]}, "bias", "is 0.25 times"
    ),
    "summed": ({"loss_fn": lambda p, x: mlp(p, x) * x.shape[0], "accumulate": 2}, "bias", "is 0.125 times"),
    "dropped, scaled": (
        {"loss_fn": lambda p, x: mlp(p, F.dropout(x, 0.1)) * size(), "reproducible": True}, "bias", "is 4 times"
    ),
    "by a millionth": (
        {"loss_fn": lambda p, x: mlp(p, x) * (1 + 1e-6 * fs.axis_index("data")), "stages": [0, 2]}, "bias", "first differs"
    ),
    "of one device": ({"loss_fn": lambda p, x: mlp(p, x) * (fs.axis_index("data") == 0)}, "bias", "differs at [0]: "),
    "of one scalar": ({"loss_fn": of_one_scalar, "stages": [0, 3]}, "scale", "gradient is 4 times that of one device"),
    "of one element": ({"loss_fn": of_one_element, "stages": [3]}, "up", "gradient first differs at [1, 2]: "),
    "a gradient on the mesh only": ({"loss_fn": of_one_gradient}, "bias", "only the sharded run has it"),
    "a mask for each device": ({"loss_fn": masked}, "bias", "gradient first differs"),
    "means of own samples": (
        {"loss_fn": own_samples, "buffers": {"mean": torch.ones(5)}, "stages": [0, 3]}, "buffers.mean",
        "each device's own samples",
    ),
    "no psum": ({**FORGOTTEN, "sizes": {"model": 2}, "axis": "model", "batch_spec": P()}, "bias", "step 0: the gradient "),
    "no psum, data first": (
        {**FORGOTTEN, "sizes": {"data": 2, "model": 2}, "axis": ("data", "model")}, "bias", "step 0: the gradient "
    ),
    "by the norm of a shard": (
        {"opt": BY_NORM, "stages": [1, 2, 3]}, "bias", "parameter first differs at [0]: .* agrees: is the optimizer element"
    ),
}  # fmt: skip


def assert_diverges(certificate, leaf, reason):
    """Assert that in every stage this leaf diverges first, in the first step, and for this reason."""
    for stage in {row.stage for row in certificate.rows}:
        first = next(row for row in certificate.rows if row.stage == stage and row.step == 0)
        assert (first.leaf, first.verdict) == (leaf, "DIVERGENT")
        assert all(words in first.reason for words in reason.split(".*")), first.reason
    with pytest.raises(
        AssertionError, match="the sharded run is not the run on one device"
    ) as error:
        certificate.check()
    assert str(certificate) in str(error.value) and not certificate.ok


@pytest.mark.parametrize("name", WRONG)
def test_certify_finds_mistakes(name):
    arguments, leaf, reason = WRONG[name]
    assert_diverges(certified(**arguments), leaf, reason)


def test_certify_names_only_leaves_that_diverge():
    rows = certified(of_one_scalar, stages=[0], steps=1).rows
    assert [row.leaf for row in rows if row.verdict == "DIVERGENT"] == ["scale"]
    rows = certified(
        opt=optimizer_of(lambda g: -g * (g.numel() if g.numel() <= 2 else 1)), stages=[3]
    ).rows
    assert {row.reason for row in rows if row.leaf == "up"} == {"step 1: after bias has diverged"}
    (row,) = (
        r
        for r in certified(**batch_normed(None), sizes={"data": 2}).rows
        if r.stage == 0 and "var" in r.leaf
    )
    assert row.verdict == "DIVERGENT" and "sync_batchnorm=axis" in row.reason


@settings(max_examples=25)
@given(st.data(), st.sampled_from(STAGES), st.sampled_from([ADAMW, fs.optim.sgd(0.1)]))
def test_certify_finds_mistakes_in_every_leaf_on_any_mesh(data, stage, opt):
    sizes = data.draw(
        st.sampled_from([{"a": 2, "b": 4}, {"a": 3, "b": 2}, {"a": 2, "b": 2}, {"a": 5}])
    )
    subsets = [axes for count in (1, 2) for axes in combinations(sizes, count)]
    axes = data.draw(st.sampled_from(subsets))
    batch_axes = data.draw(st.sampled_from(subsets))
    power = data.draw(st.sampled_from([None, 1, -1, 0.5, -0.5]))

    def mistaken(params, x):
        factor = fs.axis_index(axes) == 0 if power is None else fs.axis_size(axes) ** power
        return (
            torch.tanh(x @ params["up"] + params["bias"]) @ params["down"]
        ).square().mean() * factor

    params = {name: mlp_params()[name] for name in ("bias", "down", "up")}
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(3))
    options = {"axis": batch_axes, "batch_spec": P(batch_axes), "stages": [stage], "steps": 1}
    rows = certified(mistaken, opt, params=params, batch=x, sizes=sizes, **options).rows
    assert [row.leaf for row in rows if row.verdict == "DIVERGENT"] == ["bias", "down", "up"]
    if power is not None:
        factor = prod(sizes[axis] for axis in axes) ** power
        assert {row.reason for row in rows} == {
            f"step 0: the gradient is {factor:.4g} times that of one device"
        }


def certified_on_processes():
    return certified(of_one_element, stages=[3], sizes={"data": 2}).rows, certified(
        sizes={"data": 2}, opt=ADAMW
    ).ok


def test_certify_on_processes_has_the_rows_of_virtual_devices(two):
    expected = certified_on_processes()
    assert expected[1] and all(result == expected for result in two.run(certified_on_processes))


# -- mistakes in the library, put in here --------------------------------------------------------------------------------


def change_gradient(monkeypatch, change):
    """Let a training step have another gradient of `down`: change(the right one, the summands)."""

    def run(right, *args):
        value, grads = right.run(*args)
        axes = tuple(axis for axis in right.mesh.axis_names if right.mesh.shape[axis] > 1)
        options = replace(
            right.options, gradients=lambda layout: fs.Layout(right.mesh, P(unreduced=axes))
        )
        summands = flatten(replace(right, options=options).run(*args)[1])[0]
        paths, leaves, structure = flatten_with_paths(grads)
        index = paths.index('["down"]')
        leaves[index] = change(leaves[index], summands[index])
        return value, unflatten(structure, leaves)

    def mistaken(*args, **options):
        right = gradient_of(*args, **options)
        return SimpleNamespace(
            options=right.options, program=right.program, run=partial(run, right)
        )

    monkeypatch.setattr(step_module, "gradient_of", mistaken)


@pytest.mark.parametrize("stage", STAGES)
def test_certify_missing_reduction_diverges(monkeypatch, stage):
    def unreduced(g, summands):
        shards = [
            fs.device_put(x, g.layout).shards[device] for device, x in enumerate(summands.shards)
        ]
        return fs.Sharded(g.shape, g.layout, tuple(shards))

    change_gradient(monkeypatch, unreduced)
    assert_diverges(certified(stages=[stage]), "down", "the gradient first differs at ")


def test_certify_compares_every_replica(monkeypatch):
    change_gradient(
        monkeypatch, lambda g, _: fs.Sharded(g.shape, g.layout, (*g.shards[:3], g.shards[3] + 1))
    )
    assert_diverges(certified(stages=[0]), "down", "(device 3)")


def change_step(monkeypatch, change):
    """Let sharded optimizers step on other gradients than those that they are given."""
    run = ShardedOptimizer._run

    def mistaken(opt, act, grads, state, params, **options):
        def act_on_others(grads, state, params):
            leaves, structure = flatten_shards(grads)
            return act(unflatten(structure, [change(g) for g in leaves]), state, params)

        return run(opt, act_on_others, grads, state, params, **options)

    monkeypatch.setattr(ShardedOptimizer, "_run", mistaken)


def test_certify_partitioned_optimizer_that_scales_diverges(monkeypatch):
    change_step(monkeypatch, lambda g: g * 4.0)
    assert_diverges(certified(), "bias", "The gradient agrees: is the optimizer elementwise?")


def test_certify_reproducible_other_rounding_diverges(monkeypatch):
    change_step(monkeypatch, lambda g: g if g.numel() >= 6 else g * (1 + 2**-18))
    first = certified(reproducible=True, stages=[3]).first
    assert first.verdict == "DIVERGENT" and first.error < 1e-5


# -- optimizers alone ----------------------------------------------------------------------------------------------------

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
ELEMENTWISE = {
    "sgd": fs.optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": fs.optim.adamw(0.1),
    "lion": fs.optim.lion(0.1),
    "clipped": fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adam(0.1)),
    "clip_by_value": fs.optim.clip_by_value(0.1),
    "masked": fs.optim.masked(
        fs.optim.sgd(0.1), {"bias": True, "matrix": False, "scale": True, "stack": True}
    ),
    "rmsprop": fs.optim.from_torch(torch.optim.RMSprop, lr=0.1),
}


def by_kind(others):
    return fs.optim.by_label(
        {True: fs.optim.muon(0.1), False: others}, lambda path, leaf: leaf.ndim == 2
    )


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_wrong_promise_of_an_optimizer_is_found(name):
    opt = optimizer_of(lambda g: -0.1 * NOT_ELEMENTWISE[name](g))
    with pytest.raises(
        AssertionError,
        match=r'has sharding="flat", but on \d flat shards got another \w+, step 0: the ',
    ):
        check_elementwise(opt)
    for row in (certified(opt=opt, stages=[stage], steps=1).first for stage in (1, 3)):
        assert "The gradient agrees: is the optimizer elementwise?" in row.reason


@pytest.mark.parametrize(
    "opt", [*ELEMENTWISE.values(), by_kind(fs.optim.adamw(0.1))], ids=[*ELEMENTWISE, "by label"]
)
def test_check_elementwise_passes_elementwise_optimizers(opt):
    check_elementwise(opt)


# -- errors, and the certificate -----------------------------------------------------------------------------------------


def counting():
    calls = itertools.count(1)
    return optimizer_of(lambda g: -0.1 / next(calls) * g)


MESH = fs.make_mesh({"data": 2})
SHARDED = {
    "params": {"a": fs.shard_params(torch.ones(2), P(), mesh=MESH), "b": torch.ones(2)},
    "batch": fs.shard_params([X], P(), mesh=MESH),
    "opt": fs.partition_optimizer(ADAMW, mesh=MESH, axis="data", stage=1),
}
DRAWS = fs.errors.PromiseError
ERRORS = {
    "dropout": (lambda: certified(lambda p, x: mlp(p, F.dropout(x, 0.5))), DRAWS, r"draws random .*reproducible=True\)"),
    "a generator": (lambda: certified(partial(masked, generator=torch.Generator())), DRAWS, "got another bias, step 0: the g"),
    "a noisy optimizer": (lambda: certified(opt=optimizer_of(lambda g: -g * torch.rand(()))), DRAWS, "the parameter "),
    "a counting optimizer": (lambda: certified(opt=counting()), DRAWS, "got another bias, step 0: the parameter first"),
    "no steps": (lambda: certified(steps=0), ValueError, "steps=0"),
    "no values": (
        lambda: certify(mlp, mlp_params(), X, ADAMW, fs.make_mesh({"data": 2}, runtime="abstract")), ValueError, "abstract"
    ),
    "sharded": (lambda: certified(**SHARDED), ValueError, "got params, batch, the optimizer sharded"),
    "a scaled loss": (lambda: certified(opt=fs.optim.loss_scaled(ADAMW)), ValueError, "opt must not scale the loss"),
    "no buffers": (lambda: certified(has_buffers=True), ValueError, "a loss function that has_buffers is given them"),
    "buffers": (lambda: certified(has_buffers=False, buffers={"n": X}), ValueError, "a loss function that has_buffers"),
    "by norm": (
        lambda: check_elementwise(BY_NORM, {"a": torch.zeros(1), "w": torch.zeros(2, 3)}), AssertionError,
        r"on 2 flat shards got another w, step 0: the parameter first differs at \[0, 0\]: .* Leave out sharding=",
    ),
    "by norm, by label": (lambda: check_elementwise(by_kind(BY_NORM)), AssertionError, "flat shards got another bias"),
    "muon": (lambda: check_elementwise(fs.optim.muon(0.1)), fs.errors.OptimizerError, "is not elementwise, so there is"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_certified_raises(name):
    call, error, words = ERRORS[name]
    with pytest.raises(error, match=words):
        call()


def test_certify_notes_the_run_that_raised():
    with pytest.raises(RuntimeError) as error:
        certified(lambda params, x: (x.float() @ params["up"]).mean())
    assert (
        "certify: in the run on one device in float64: does the program name a dtype?"
        in error.value.__notes__
    )
    with pytest.raises(ValueError) as error:
        certified(stages=[0], gradients=lambda layout: fs.Layout(layout.mesh, P(unreduced="data")))
    assert "certify: in the run in stage 0" in error.value.__notes__


def test_certify_nonfinite_serial_run_is_inconclusive():
    first = certified(lambda p, x: mlp(p, x / 0)).first
    assert first.verdict == "INCONCLUSIVE" and "is not finite" in first.reason


def test_certificate_prints_as_a_table():
    params = {"n": torch.ones(1), "w": torch.ones(5)}
    options = {"sizes": {"data": 2}, "stages": [0, 3], "exact_inputs": True}
    certificate = certified(
        lambda p, x: (p["w"] * x).sum(1).mean() * size(),
        fs.optim.sgd(1.0),
        params=params,
        **options,
    )
    assert repr(certificate) == str(certificate) and "DIVERGENT" in certificate._repr_html_()
    rows = [
        [cell.strip() for cell in line.split("│")[1:4]]
        for line in str(certificate).splitlines()
        if "│" in line
    ]
    rows = [row for row in rows if row[2]]
    assert rows == [
        ["0", "n", "EXACT"],
        ["", "w", "DIVERGENT"],
        ["3", "n", "EXACT"],
        ["", "w", "DIVERGENT"],
    ]
    assert "Mesh(data=2; virtual, cpu) against one device, both in float64" in str(certificate)


def test_dyadic_like_keeps_ties_and_integers():
    x = torch.ones(2, 3)
    tree = {
        "a": x,
        "b": x,
        "c": x.clone(),
        "n": torch.arange(2),
        "z": torch.ones(2, dtype=torch.complex64),
    }
    drawn = dyadic_like(tree, 0)
    assert drawn["a"] is drawn["b"] and not torch.equal(drawn["a"], drawn["c"])
    assert torch.equal(drawn["n"], torch.arange(2)) and drawn["z"].dtype == torch.complex64
    assert ((8 * drawn["a"]) % 1 == 0).all() and drawn["a"].abs().max() <= 1
