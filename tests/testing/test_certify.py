"""`certify` accepts correct programs, and finds each mistake made here on purpose.

A mistake is in the loss function, in the optimizer, or put into the library by a test. The expected
leaf and reason are derived by hand: a loss multiplied by the number of devices, for example, has a
gradient of 4 times that of one device.
"""

import itertools
from dataclasses import dataclass, replace
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
    """Return the certificate of a program: by default an MLP with momentum on 4 devices."""
    mesh = fs.make_mesh(sizes or {"data": 4})
    if params is None:
        params = mlp_params()
    return certify(loss_fn, params, batch, opt, mesh=mesh, **options)


def verdicts(certificate):
    return {row.verdict for row in certificate.rows}


def divergent_leaves(rows):
    return [row.leaf for row in rows if row.verdict == "DIVERGENT"]


def size():
    return fs.axis_size("data")


# -- what is sound ---------------------------------------------------------------------------------


def per_sample(p, x):
    return (torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]).square().mean(1) * p["scale"]


def with_mean(params, x):
    return mlp(params, x), {"mean": x.mean()}


def centred(params, x):
    return mlp(params, x - fs.pmean(x.mean(0), "data"))


def linear(params, x):
    up = (x @ params["up"]).sum(1).mean()
    bias = params["bias"].sum() * x.mean() * 0
    return up + bias + params["down"].sum()


def over_the_model(reductions):
    """Return a loss that sums over each axis of the model, and is centred over the batch.

    `reductions` has the function that reduces over an axis, by the name of the axis.
    """

    def loss_fn(params, x):
        y = params["bias"][:3]
        for axis, reduce in reductions.items():
            if axis != "data":
                count = fs.axis_size(axis)
                index = fs.axis_index(axis)
                up = params["up"].chunk(count, 1)[index]
                down = params["down"].chunk(count, 0)[index]
                hidden = torch.tanh(x @ up)
                y = y + reduce(hidden @ down, axis)

        if "data" in reductions:
            y = y - reductions["data"](y.mean(0), "data")
        return (y.square() * params["scale"]).mean()

    return loss_fn


def shifted(p, x):
    """The gradient of `shift` is 0 but for rounding."""
    return -torch.log_softmax(x @ p["w"] + p["shift"], -1)[:, 0].mean()


def from_mean(p, x):
    """At its minimum all of the gradient is rounding, of which Adam and Lion make a step."""
    return (x - p["mean"]).square().mean()


def chaotic(p, x):
    """Each step multiplies an error in the parameters by about 1e6.

    With the serial run's gradients there is none.
    """
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
GPT_BF16 = {**GPT, "params": gpt.init(1, dtype=torch.bfloat16)}
MOVING_MEAN = {
    "loss_fn": moving_mean,
    "buffers": {"mean": torch.ones(5), "none": None},
    "has_aux": True,
}
REDUCED_OVER_3_AXES = {
    "loss_fn": over_the_model({"data": fs.pmean, "model": fs.psum, "expert": fs.psum}),
    "sizes": {"expert": 3, "data": 2, "model": 2},
    "axis": ("data", "model"),
}
AT_MINIMUM = {"loss_fn": from_mean, "params": {"mean": X.double().mean(0)}, "steps": 4}
CHAOTIC = {"loss_fn": chaotic, "params": {"w": torch.full((3,), 0.5)}, "opt": fs.optim.sgd(1.0)}
SHIFTED = {"loss_fn": shifted, "params": {"shift": X[:1, 0], "w": X[:5]}}

RIGHT = {
    "gpt on one device": {"loss_fn": gpt.without_dropout, **GPT, "sizes": {"data": 1}},
    "gpt": {"loss_fn": gpt.without_dropout, **GPT, "stages": [0, 3]},
    "gpt in bf16": {"loss_fn": gpt.without_dropout, **GPT_BF16, "stages": [3]},
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
    "sums over axes of the model": {**REDUCED_OVER_3_AXES, "stages": [0, 3]},
    "buffers": batch_normed("data"),
    "donated buffers": {
        **batch_normed("data"),
        "donate": True,
        "has_buffers": True,
        "sizes": {"data": 2},
    },
    "buffers before auxiliary values": MOVING_MEAN,
    "gradients of roundings": {**SHIFTED, "opt": LION},
    "at a minimum, adamw": {**AT_MINIMUM, "opt": ADAMW},
    "at a minimum, lion": {**AT_MINIMUM, "opt": LION},
    "chaotic": {**CHAOTIC, "steps": 8},
}


def dropout_on(devices):
    return {"loss_fn": gpt.loss_fn, **GPT, "sizes": {"data": devices}, "reproducible": True}


def linear_over(**sizes):
    """Return a program without roundings: inputs are small multiples of 1/8."""
    return {
        "loss_fn": linear,
        "opt": fs.optim.sgd(0.5),
        "sizes": sizes,
        "batch_spec": P(tuple(sizes)),
        "exact_inputs": True,
    }


EXACT = {
    "dropout on 1": dropout_on(1),
    "dropout on 2": dropout_on(2),
    "dropout on 4": dropout_on(4),
    "linear over 8": linear_over(data=8),
    "linear over 2x4": linear_over(node=2, data=4),
    "accumulate": {"accumulate": 2, "reproducible": True},
    "precision": {"precision": "bf16", "reproducible": True},
    "buffers": {**MOVING_MEAN, "reproducible": True},
}


@pytest.mark.parametrize("name", RIGHT)
def test_certify_accepts_right_programs(name):
    certificate = certified(**RIGHT[name]).check()

    assert verdicts(certificate) <= {"EXACT", "BOUNDED"}


@pytest.mark.parametrize("name", EXACT)
def test_certify_demands_bits_where_they_are_promised(name):
    certificate = certified(**EXACT[name]).check()

    assert verdicts(certificate) == {"EXACT"}


def test_certify_has_a_row_for_every_kind_of_leaf():
    w = torch.ones(3)
    params = {
        "tied": [w, w],
        "unused": torch.ones(2),
        "count": torch.arange(3),
        "empty": torch.ones(0),
        "none": None,
        "double": torch.ones(5).double(),
        "complex": torch.ones(2, dtype=torch.complex64),
    }

    def loss_fn(p, x):
        first, second = p["tied"]
        y = first.sum() + 2 * second.square().sum()
        y = y + p["count"].sum() + p["empty"].sum()
        y = y + p["double"].square().sum().float()
        y = y + p["complex"].abs().square().sum()
        return y * x.mean()

    certificate = certified(loss_fn, ADAMW, params=params, sizes={"data": 2}).check()

    paths = ["complex", "count", "double", "empty", "none", "tied[0]", "tied[1]", "unused"]
    assert [row.leaf for row in certificate.rows] == 4 * paths

    # Buffers have rows too, after the parameters of a step.
    leaves = [row.leaf for row in certified(**batch_normed("data")).rows]
    buffers = [leaf for leaf in leaves if leaf.startswith("buffers")]
    assert buffers[:3] == [
        "buffers.1.num_batches_tracked",
        "buffers.1.running_mean",
        "buffers.1.running_var",
    ]

    # A frozen parameter has a row, and exactly its bits.
    frozen = certified(params=frozen_up(), exact_inputs=True).check()
    assert {row.verdict for row in frozen.rows if row.leaf == "up"} == {"EXACT"}


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.01), (torch.float16, 1.2)])
def test_certify_widens_bounds_for_casts_of_the_loss(dtype, factor):
    """Casts inside of the loss widen the tolerance to the roundings of that dtype, which the
    certificate names.
    """

    def loss_fn(params, x):
        cast = {name: w.to(dtype) for name, w in params.items()}
        return mlp(cast, x.to(dtype)).double()

    def mistaken_loss(params, x):
        loss = loss_fn(params, x)
        if size() > 1:
            loss = loss * factor
        return loss

    certificate = certified(loss_fn, stages=[0, 3]).check()
    assert f"The program casts to {dtype}, so bounds are wider" in certificate.unseen
    assert max(row.error for row in certificate.rows) > 1e-9

    mistaken = certified(mistaken_loss, stages=[0])
    assert "DIVERGENT" in verdicts(mistaken)


def test_certify_keeps_the_state_of_the_default_generator():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    certified(steps=1)
    assert torch.equal(torch.get_rng_state(), before)


# -- mistakes --------------------------------------------------------------------------------------


def of_one_scalar(params, x):
    scale = params["scale"]
    scale = scale * size() - scale.detach() * (size() - 1)  # the value of one, the gradient of all
    return mlp({**params, "scale": scale}, x)


def of_one_element(params, x):
    index = fs.axis_index("data")
    return mlp(params, x) + params["up"].flatten()[7 + index] * index


def of_one_gradient(params, x):
    if size() == 1:
        params = {**params, "bias": params["bias"].detach()}
    return mlp(params, x)


def times_devices(params, x):
    return mlp(params, x) * size()


def over_devices(params, x):
    return mlp(params, x) / size()


def times_samples(params, x):
    return mlp(params, x) * x.shape[0]


def times_devices_after_dropout(params, x):
    return mlp(params, F.dropout(x, 0.1)) * size()


def wrong_by_a_millionth(params, x):
    return mlp(params, x) * (1 + 1e-6 * fs.axis_index("data"))


def of_one_device(params, x):
    return mlp(params, x) * (fs.axis_index("data") == 0)


def first_sample(params, buffers, x):
    return mlp(params, x), {"mean": x[0]}


def masked(params, x, generator=None):
    """Drop the same elements on each device: not those that a run on one device drops."""
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    is_used = torch.rand(x.shape, generator=generator) < 0.5
    return mlp(params, x * is_used)


def optimizer_of(update):
    """Return an optimizer of a function of one gradient, which claims to be elementwise."""

    def updates(grads, state, params):
        leaves, structure = flatten(grads)
        return unflatten(structure, [update(g) for g in leaves]), state

    return fs.optim.Optimizer(lambda params: (), updates, sharding="flat")


def mean_over_tokens(p, x):
    """As a mean over tokens without padding: its denominator differs from device to device."""
    tokens = 1.0 + (x[:, 0] > 0)
    return (per_sample(p, x) * tokens).sum() / tokens.sum()


BY_NORM = optimizer_of(lambda g: -g / (1 + g.norm()))
FORGOTTEN = {
    "loss_fn": over_the_model({"model": lambda y, axis: y}),
    "stages": [0, 3],
    "opt": fs.optim.sgd(0.1),
}


@dataclass(frozen=True)
class Mistake:
    """A program with a mistake, the first leaf that diverges, and words of its reason in order."""

    arguments: dict
    leaf: str
    reason: tuple[str, ...]


WRONG = {
    "scaled, all stages": Mistake(
        {"loss_fn": times_devices},
        leaf="bias",
        reason=("gradient is 4 times that of one device",),
    ),
    "divided, adamw": Mistake(
        {"loss_fn": over_devices, "opt": ADAMW, "stages": [0, 3]},
        leaf="bias",
        reason=("is 0.25 times",),
    ),
    "summed": Mistake(
        {"loss_fn": times_samples, "accumulate": 2},
        leaf="bias",
        reason=("is 0.125 times",),
    ),
    "dropped, scaled": Mistake(
        {"loss_fn": times_devices_after_dropout, "reproducible": True},
        leaf="bias",
        reason=("is 4 times",),
    ),
    "by a millionth": Mistake(
        {"loss_fn": wrong_by_a_millionth, "stages": [0, 2]},
        leaf="bias",
        reason=("first differs",),
    ),
    "of one device": Mistake(
        {"loss_fn": of_one_device},
        leaf="bias",
        reason=("differs at [0]: ",),
    ),
    "a mean over tokens": Mistake(
        {"loss_fn": mean_over_tokens},
        leaf="bias",
        reason=("gradient first differs", "The loss is ", "A mean over tokens needs weight="),
    ),
    "of one scalar": Mistake(
        {"loss_fn": of_one_scalar, "stages": [0, 3]},
        leaf="scale",
        reason=("gradient is 4 times that of one device",),
    ),
    "of one element": Mistake(
        {"loss_fn": of_one_element, "stages": [3]},
        leaf="up",
        reason=("gradient first differs at [1, 2]: ",),
    ),
    "a gradient on the mesh only": Mistake(
        {"loss_fn": of_one_gradient},
        leaf="bias",
        reason=("only the sharded run has it",),
    ),
    "a mask for each device": Mistake(
        {"loss_fn": masked},
        leaf="bias",
        reason=("gradient first differs",),
    ),
    "means of own samples": Mistake(
        {"loss_fn": first_sample, "buffers": {"mean": torch.ones(5)}, "stages": [0, 3]},
        leaf="buffers.mean",
        reason=("each device's own samples",),
    ),
    "no psum": Mistake(
        {**FORGOTTEN, "sizes": {"model": 2}, "axis": "model", "batch_spec": P()},
        leaf="bias",
        reason=("step 0: the gradient ",),
    ),
    "no psum, data first": Mistake(
        {**FORGOTTEN, "sizes": {"data": 2, "model": 2}, "axis": ("data", "model")},
        leaf="bias",
        reason=("step 0: the gradient ",),
    ),
    "by the norm of a shard": Mistake(
        {"opt": BY_NORM, "stages": [1, 2, 3]},
        leaf="bias",
        reason=("parameter first differs at [0]: ", " agrees: is the optimizer element"),
    ),
}


def assert_diverges(certificate, leaf, *reason):
    """Assert that in every stage this leaf diverges first, in the first step, for this reason."""
    for stage in {row.stage for row in certificate.rows}:
        first_step = [row for row in certificate.rows if (row.stage, row.step) == (stage, 0)]
        first = first_step[0]
        assert (first.leaf, first.verdict) == (leaf, "DIVERGENT")
        assert all(words in first.reason for words in reason), first.reason

    message = "the sharded run is not the run on one device"
    with pytest.raises(AssertionError, match=message) as error:
        certificate.check()
    assert str(certificate) in str(error.value)
    assert not certificate.ok


@pytest.mark.parametrize("name", WRONG)
def test_certify_finds_mistakes(name):
    mistake = WRONG[name]

    certificate = certified(**mistake.arguments)

    assert_diverges(certificate, mistake.leaf, *mistake.reason)


def test_certify_names_only_leaves_that_diverge():
    rows = certified(of_one_scalar, stages=[0], steps=1).rows
    assert divergent_leaves(rows) == ["scale"]

    # Shards of `bias` have at most two elements: the others follow it in the step after.
    def times_size_if_small(g):
        factor = g.numel() if g.numel() <= 2 else 1
        return -g * factor

    rows = certified(opt=optimizer_of(times_size_if_small), stages=[3]).rows
    assert {row.reason for row in rows if row.leaf == "up"} == {"step 1: after bias has diverged"}

    # A batch norm that is not synchronised has the variance of each device's own samples.
    rows = certified(**batch_normed(None), sizes={"data": 2}).rows
    (variance,) = [row for row in rows if row.stage == 0 and "var" in row.leaf]
    assert variance.verdict == "DIVERGENT"
    assert "sync_batchnorm=axis" in variance.reason


MESHES = [{"a": 2, "b": 4}, {"a": 3, "b": 2}, {"a": 2, "b": 2}, {"a": 5}]


@settings(max_examples=25)
@given(st.data(), st.sampled_from(STAGES), st.sampled_from([ADAMW, fs.optim.sgd(0.1)]))
def test_certify_finds_mistakes_in_every_leaf_on_any_mesh(data, stage, opt):
    """The loss is multiplied by a power of the number of devices, or is of one device only."""
    sizes = data.draw(st.sampled_from(MESHES))
    subsets = [*combinations(sizes, 1), *combinations(sizes, 2)]
    axes = data.draw(st.sampled_from(subsets))
    batch_axes = data.draw(st.sampled_from(subsets))
    power = data.draw(st.sampled_from([None, 1, -1, 0.5, -0.5]))

    def mistaken(params, x):
        if power is None:
            factor = fs.axis_index(axes) == 0
        else:
            factor = fs.axis_size(axes) ** power
        hidden = torch.tanh(x @ params["up"] + params["bias"])
        return (hidden @ params["down"]).square().mean() * factor

    params = {name: mlp_params()[name] for name in ("bias", "down", "up")}
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(3))
    options = {"axis": batch_axes, "batch_spec": P(batch_axes), "stages": [stage], "steps": 1}
    rows = certified(mistaken, opt, params=params, batch=x, sizes=sizes, **options).rows

    assert divergent_leaves(rows) == ["bias", "down", "up"]
    if power is not None:
        factor = prod(sizes[axis] for axis in axes) ** power
        reason = f"step 0: the gradient is {factor:.4g}"
        assert all(row.reason.startswith(reason) for row in rows)
        assert all("times that of one device" in row.reason for row in rows)


def certified_on_processes():
    """Return the rows of a wrong program, and whether a right one is accepted."""
    sizes = {"data": 2}
    wrong = certified(of_one_element, stages=[3], sizes=sizes)
    right = certified(sizes=sizes, opt=ADAMW)
    return wrong.rows, right.ok


def test_certify_on_processes_has_the_rows_of_virtual_devices(two):
    rows, is_accepted = certified_on_processes()

    results = two.run(certified_on_processes)

    assert is_accepted
    assert all(result == (rows, True) for result in results)


# -- mistakes in the library, put in here ----------------------------------------------------------


def change_gradient(monkeypatch, change):
    """Replace the gradient of `down` in training steps by `change(gradient, summands)`.

    The summands are the gradient before it is reduced: one for each device.
    """

    def run(right, *args):
        value, grads = right.run(*args)

        mesh = right.mesh
        axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
        unreduced = fs.Layout(mesh, P(unreduced=axes))
        options = replace(right.options, gradients=lambda layout: unreduced)
        _, summands = replace(right, options=options).run(*args)

        paths, leaves, structure = flatten_with_paths(grads)
        index = paths.index('["down"]')
        leaves[index] = change(leaves[index], flatten(summands)[0][index])
        return value, unflatten(structure, leaves)

    def mistaken(*args, **options):
        right = gradient_of(*args, **options)
        run_wrong = partial(run, right)
        return SimpleNamespace(options=right.options, program=right.program, run=run_wrong)

    monkeypatch.setattr(step_module, "gradient_of", mistaken)


@pytest.mark.parametrize("stage", STAGES)
def test_certify_missing_reduction_diverges(monkeypatch, stage):
    def unreduced(g, summands):
        """Give each device its shard of its own summand."""
        shards = []
        for device, summand in enumerate(summands.shards):
            shards.append(fs.device_put(summand, g.layout).shards[device])
        return fs.Sharded(g.shape, g.layout, tuple(shards))

    change_gradient(monkeypatch, unreduced)
    assert_diverges(certified(stages=[stage]), "down", "the gradient first differs at ")


def test_certify_compares_every_replica(monkeypatch):
    def changed_on_device_3(g, summands):
        shards = (*g.shards[:3], g.shards[3] + 1)
        return fs.Sharded(g.shape, g.layout, shards)

    change_gradient(monkeypatch, changed_on_device_3)
    assert_diverges(certified(stages=[0]), "down", "(device 3)")


def change_step(monkeypatch, change):
    """Let sharded optimizers step with `change(gradient)` of each shard of the gradients."""
    run = ShardedOptimizer._run

    def mistaken(opt, update, grads, state, params, **options):
        def update_by_others(grads, state, params):
            leaves, structure = flatten_shards(grads)
            changed = unflatten(structure, [change(g) for g in leaves])
            return update(changed, state, params)

        return run(opt, update_by_others, grads, state, params, **options)

    monkeypatch.setattr(ShardedOptimizer, "_run", mistaken)


def test_certify_partitioned_optimizer_that_scales_diverges(monkeypatch):
    change_step(monkeypatch, lambda g: g * 4.0)
    assert_diverges(certified(), "bias", "The gradient agrees: is the optimizer elementwise?")


def test_certify_reproducible_other_rounding_diverges(monkeypatch):
    def rounded_otherwise_if_small(g):
        return g if g.numel() >= 6 else g * (1 + 2**-18)

    change_step(monkeypatch, rounded_otherwise_if_small)
    first = certified(reproducible=True, stages=[3]).first

    assert first.verdict == "DIVERGENT"
    assert first.error < 1e-5


# -- optimizers alone ------------------------------------------------------------------------------

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
    """Return an optimizer with Muon for matrices, and `others` for the rest."""
    rules = {True: fs.optim.muon(0.1), False: others}
    return fs.optim.by_label(rules, lambda path, leaf: leaf.ndim == 2)


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_wrong_promise_of_an_optimizer_is_found(name):
    update = NOT_ELEMENTWISE[name]
    opt = optimizer_of(lambda g: -0.1 * update(g))

    message = r'has sharding="flat", but on \d flat shards got another \w+, step 0: the '
    with pytest.raises(AssertionError, match=message):
        check_elementwise(opt)
    for stage in (1, 3):
        first = certified(opt=opt, stages=[stage], steps=1).first
        assert "The gradient agrees: is the optimizer elementwise?" in first.reason


@pytest.mark.parametrize(
    "opt", [*ELEMENTWISE.values(), by_kind(fs.optim.adamw(0.1))], ids=[*ELEMENTWISE, "by label"]
)
def test_check_elementwise_passes_elementwise_optimizers(opt):
    check_elementwise(opt)


# -- errors, and the certificate -------------------------------------------------------------------


def counting():
    calls = itertools.count(1)
    return optimizer_of(lambda g: -0.1 / next(calls) * g)


MESH = fs.make_mesh({"data": 2})
SHARDED = {
    "params": {"a": fs.shard_params(torch.ones(2), P(), mesh=MESH), "b": torch.ones(2)},
    "batch": fs.shard_params([X], P(), mesh=MESH),
    "opt": fs.partition_optimizer(ADAMW, mesh=MESH, axis="data", stage=1),
}


def with_dropout():
    certified(lambda params, x: mlp(params, F.dropout(x, 0.5)))


def with_a_generator():
    certified(partial(masked, generator=torch.Generator()))


def with_a_noisy_optimizer():
    certified(opt=optimizer_of(lambda g: -g * torch.rand(())))


def with_a_counting_optimizer():
    certified(opt=counting())


def without_steps():
    certified(steps=0)


def without_values():
    certify(mlp, mlp_params(), X, ADAMW, fs.make_mesh({"data": 2}, runtime="abstract"))


def with_sharded_arguments():
    certified(**SHARDED)


def with_a_scaled_loss():
    certified(opt=fs.optim.loss_scaled(ADAMW))


def without_buffers():
    certified(has_buffers=True)


def with_unwanted_buffers():
    certified(has_buffers=False, buffers={"n": X})


def check_by_norm():
    check_elementwise(BY_NORM, {"a": torch.zeros(1), "w": torch.zeros(2, 3)})


def check_by_norm_in_by_label():
    check_elementwise(by_kind(BY_NORM))


def check_muon():
    check_elementwise(fs.optim.muon(0.1))


DRAWS = fs.errors.PromiseError
NOT_ON_SHARDS = (
    r"on 2 flat shards got another w, step 0: the parameter first differs at \[0, 0\]: "
    ".* Leave out sharding="
)
ERRORS = {
    "dropout": (with_dropout, DRAWS, r"draws random .*reproducible=True\)"),
    "a generator": (with_a_generator, DRAWS, "got another bias, step 0: the g"),
    "a noisy optimizer": (with_a_noisy_optimizer, DRAWS, "the parameter "),
    "a counting optimizer": (
        with_a_counting_optimizer,
        DRAWS,
        "got another bias, step 0: the parameter first",
    ),
    "no steps": (without_steps, ValueError, "steps=0"),
    "no values": (without_values, ValueError, "abstract"),
    "sharded": (with_sharded_arguments, ValueError, "got params, batch, the optimizer sharded"),
    "a scaled loss": (with_a_scaled_loss, ValueError, "opt must not scale the loss"),
    "no buffers": (
        without_buffers,
        ValueError,
        "a loss function that has_buffers is given them",
    ),
    "buffers": (with_unwanted_buffers, ValueError, "a loss function that has_buffers"),
    "by norm": (check_by_norm, AssertionError, NOT_ON_SHARDS),
    "by norm, by label": (
        check_by_norm_in_by_label,
        AssertionError,
        "flat shards got another bias",
    ),
    "muon": (check_muon, fs.errors.OptimizerError, "is not elementwise, so there is"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_certified_raises(name):
    call, error, words = ERRORS[name]
    with pytest.raises(error, match=words):
        call()


def test_certify_notes_the_run_that_raised():
    with pytest.raises(RuntimeError) as error:
        certified(lambda params, x: (x.float() @ params["up"]).mean())
    note = "certify: in the run on one device in float64: does the program name a dtype?"
    assert note in error.value.__notes__

    def unreduced(layout):
        return fs.Layout(layout.mesh, P(unreduced="data"))

    with pytest.raises(ValueError) as error:
        certified(stages=[0], gradients=unreduced)
    assert "certify: in the run in stage 0" in error.value.__notes__


def test_certify_nonfinite_serial_run_is_inconclusive():
    first = certified(lambda p, x: mlp(p, x / 0)).first
    assert first.verdict == "INCONCLUSIVE" and "is not finite" in first.reason


def test_certificate_prints_as_a_table():
    def loss_fn(params, x):
        return (params["w"] * x).sum(1).mean() * size()

    params = {"n": torch.ones(1), "w": torch.ones(5)}
    options = {"sizes": {"data": 2}, "stages": [0, 3], "exact_inputs": True}
    certificate = certified(loss_fn, fs.optim.sgd(1.0), params=params, **options)

    assert repr(certificate) == str(certificate)
    assert "DIVERGENT" in certificate._repr_html_()
    assert "Mesh(data=2; virtual, cpu) against one device, both in float64" in str(certificate)

    # The first three columns: stage, leaf, verdict. Lines without a verdict continue a reason.
    rows = []
    for line in str(certificate).splitlines():
        if "│" in line:
            stage, leaf, verdict = [cell.strip() for cell in line.split("│")[1:4]]
            if verdict:
                rows.append((stage, leaf, verdict))
    assert rows == [
        ("0", "n", "EXACT"),
        ("", "w", "DIVERGENT"),
        ("3", "n", "EXACT"),
        ("", "w", "DIVERGENT"),
    ]


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

    assert drawn["a"] is drawn["b"]
    assert not torch.equal(drawn["a"], drawn["c"])
    assert torch.equal(drawn["n"], torch.arange(2))
    assert drawn["z"].dtype == torch.complex64
    assert ((8 * drawn["a"]) % 1 == 0).all()
    assert drawn["a"].abs().max() <= 1
