"""Parameters used as they are stored along "model": a GPT of local functions trains as the same GPT, written for one device."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import fshard as fs
from fshard import P
from fshard.errors import PromiseError
from fshard.mesh.spmd.run import device_of

# -- a GPT: two blocks and tied embeddings of 51 words, which neither two nor four devices divide ----------------------

WORDS, WIDTH, HEADS, LENGTH = 51, 8, 6, 5
COLUMN = P(None, "model")
ROW = P("model")
LEAVES = {
    "emb": ((WORDS, WIDTH), ROW), "norm": ((WIDTH,), P()), "q": ((WIDTH, 12), COLUMN), "k": ((WIDTH, 12), COLUMN),
    "v": ((WIDTH, 12), COLUMN), "o": ((12, WIDTH), ROW), "up": ((WIDTH, 18), COLUMN), "bias": ((18,), ROW),
    "down": ((18, WIDTH), ROW), "shift": ((WIDTH,), P()),
}  # fmt: skip
RULES = {f"*.{name}": spec for name, (_, spec) in LEAVES.items()}


def params(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def draw(shape):
        return (
            torch.randn(*shape, dtype=torch.float64, generator=generator) / math.sqrt(shape[0])
        ).to(dtype)

    first, last = ({name: draw(shape) for name, (shape, _) in LEAVES.items()} for _ in range(2))
    return [first, {**last, "emb": first["emb"]}]


def batch_of(size):
    return torch.randint(
        WORDS, (2, size, LENGTH), generator=torch.Generator().manual_seed(size)
    ).unbind()


def block(p, h, sent=lambda x: x, summed=lambda x: x):
    x = sent(h * p["norm"])
    q, k, v = (
        F.linear(x, p[name].T).unflatten(-1, (-1, 12 // HEADS)).transpose(-2, -3) for name in "qkv"
    )
    h = h + summed(
        F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2)
        @ p["o"]
    )
    return h + summed(torch.tanh(sent(h) @ p["up"] + p["bias"]) @ p["down"]) + p["shift"]


def alone(p, batch):
    """The loss on one device."""
    h = block(p[1], block(p[0], F.embedding(batch[0], p[0]["emb"])))
    return F.cross_entropy((h @ p[1]["emb"].T).flatten(0, 1), batch[1].flatten())


def parallel(p, h):
    return block(p, h, lambda x: fs.pvary(x, "model"), lambda x: fs.psum(x, "model"))


def own(ids, words):
    """Return the rows of this device's part of the vocabulary, and which of them are its own."""
    actual = ids - fs.axis_index("model") * -(-WORDS // fs.axis_size("model"))
    return actual.clamp(0, words - 1), (actual >= 0) & (actual < words)


def first(p, ids):
    at, here = own(ids, len(p["emb"]))
    return parallel(p, fs.psum(F.embedding(at, p["emb"]) * here[..., None], "model"))


def last(p, h):
    return fs.pvary(parallel(p, h), "model") @ p["emb"].T


def entropy(logits, batch):
    top = fs.pmax(logits.detach().amax(-1), "model")
    total = fs.psum((logits - top[..., None]).exp().sum(-1), "model").log() + top
    at, here = own(batch[1], logits.shape[-1])
    return (total - fs.psum(logits.gather(-1, at[..., None])[..., 0] * here, "model")).mean()


def local_loss(p, batch):
    return entropy(last(p[1], first(p[0], batch[0])), batch)


def rules(stage):
    return fs.fsdp("data", within=RULES) if stage == 3 else RULES


CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.optim.adamw(1e-2))


def train(loss_fn, sizes, stage=0, lay=None, steps=5, **options):
    """Return parameters, state, and the loss and the gradient's norm of each step."""
    mesh = fs.make_mesh(sizes)
    params_of_mesh = fs.shard_params(params(), rules(stage) if lay is None else lay, mesh=mesh)
    opt = fs.partition_optimizer(CLIPPED, mesh=mesh, axis="data", stage=stage)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), **options)
    numbers = []
    state = opt.init(params_of_mesh)
    for turn in range(steps):
        params_of_mesh, state, metrics = step(params_of_mesh, state, batch_of(12 + turn))
        numbers.append((metrics["loss"].item(), metrics["grad_norm"].item()))
    return params_of_mesh, state, numbers


def assert_equal(found, expected, tolerance=1e-12):
    for ours, theirs in zip(fs.unshard(found[0]), fs.unshard(expected[0]), strict=True):
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        torch.tensor(found[2]), torch.tensor(expected[2]), atol=tolerance, rtol=tolerance
    )


@pytest.fixture(scope="module")
def expected():
    return train(alone, {"data": 1}, lay=P())


@settings(max_examples=10)
@given(
    data=st.sampled_from([1, 2, 3]),
    model=st.sampled_from([2, 3, 1]),
    stage=st.sampled_from([0, 1, 2, 3]),
    way=st.sampled_from(
        [{}, {"accumulate": 2}, {"accumulate": 2, "reduce_once": False}, {"bucket": 0}]
    ),
)
def test_local_parameters_train_as_on_one_device(expected, data, model, stage, way):
    """With clipping by the global norm, tied embeddings, and batches that devices do not divide."""
    assert_equal(
        train(local_loss, {"data": data, "model": model}, stage, local="model", **way), expected
    )


def test_optimizer_keeps_layouts_within_shards():
    own, state, _ = train(local_loss, {"data": 2, "model": 2}, 3, steps=1, local="model")
    kinds = [
        {str(fs.typeof(x)) for x in tree.values()} for tree in (own[1], state[1]["exp_avg"][1])
    ]
    assert (
        {"f64[51@model, 8]{flat:data}", "f64[8, 12@model]{flat:data}", "f64[8]{flat:data}"}
        <= kinds[0]
        == kinds[1]
    )
    assert [len(x) for x in own[0]["emb"].shards] == [
        104,
        100,
        104,
        100,
    ]  # 26 and 25 words of 8 numbers, on 2 devices


@pytest.mark.parametrize("stage", range(4))
def test_sharded_parameters_send_nothing_over_local_axes(stage):
    """Bytes sent over "model" do not depend on the width of sharded parameters, in any stage."""

    def sent(width):
        def loss_fn(p, x):
            return (
                fs.psum(torch.tanh(fs.pvary(x, "model") @ p["up"]) @ p["down"], "model")
                .square()
                .mean()
            )

        mesh = fs.make_mesh({"data": 2, "model": 2})
        lay = {"up": COLUMN, "down": ROW}
        tree = {"up": torch.ones(4, width), "down": torch.ones(width, 4)}
        own = fs.shard_params(tree, fs.fsdp("data", within=lay) if stage == 3 else lay, mesh=mesh)
        opt = fs.partition_optimizer(CLIPPED, mesh=mesh, axis="data", stage=stage)
        state = opt.init(own)
        step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), local="model")
        own, state, _ = step(own, state, torch.ones(8, 4))
        with fs.ledger() as comm:
            step(own, state, torch.ones(8, 4))
        actual = {True: 0, False: 0}
        for (_, axes), (_, bytes_) in comm.by_collective().items():
            actual["model" in axes] += bytes_
        return actual

    small = sent(6)
    large = sent(600)
    assert small[True] == large[True] < 2000
    assert large[False] > 50 * small[False]  # over "data", gradients are


def test_lazy_parameters_are_drawn_for_local_layouts():
    lay = {"**.weight": ROW, "**.bias": P()}
    model = nn.Sequential(fs.lazy(nn.Linear, 4, 7), fs.lazy(nn.Linear, 7, 5))
    mesh = fs.make_mesh({"data": 2, "model": 2})
    actual = [
        fs.shard_params(model, rule, mesh=mesh, seed=1)
        for rule in (P(), lay, fs.fsdp("data", within=lay))
    ]
    for name in actual[0]:
        assert all(
            torch.equal(fs.unshard(one[name]), fs.unshard(actual[0][name])) for one in actual
        )
    assert [tuple(x.shape) for x in actual[1]["0.weight"].shards] == [(4, 4), (3, 4)] * 2


def test_evaluate_gives_loss_of_one_device():
    for stage, model in [(0, 2), (3, 3)]:
        mesh = fs.make_mesh({"data": 2, "model": model})
        own = fs.shard_params(params(), rules(stage), mesh=mesh)
        actual = fs.evaluate(local_loss, mesh=mesh, batch=P("data"), local="model")(
            own, batch_of(7)
        )
        torch.testing.assert_close(actual.double(), alone(params(), batch_of(7)))


# -- a forgotten psum ---------------------------------------------------------------------------------------------------

TWO_LAYERS = {"up": COLUMN, "down": ROW}


def two_layers():
    generator = torch.Generator().manual_seed(1)
    shapes = {"up": (4, 6), "down": (6, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def summed_loss(p, x):
    return fs.psum(torch.tanh(x @ p["up"]) @ p["down"], "model").square().mean()


def loss_without_psum(p, x):
    return (torch.tanh(x @ p["up"]) @ p["down"]).square().mean()


def loss_with_own_penalty(p, x):
    """A penalty of the device's shards alone, small beside the loss."""
    return summed_loss(p, x) + 1e-3 * p["up"].square().mean()


FORGOTTEN = {"output": loss_without_psum, "penalty": loss_with_own_penalty}


@pytest.mark.parametrize("loss_fn", FORGOTTEN.values(), ids=FORGOTTEN)
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"reproducible": True}], ids=str)
@pytest.mark.parametrize("call", [fs.value_and_grad, fs.evaluate], ids=["gradient", "evaluate"])
def test_loss_that_differs_along_a_local_axis_raises(call, loss_fn, options):
    if call is fs.evaluate and "accumulate" in options:
        options = {}
    mesh = fs.make_mesh({"data": 2, "model": 2})
    p = fs.shard_params(two_layers(), fs.fsdp("data", within=TWO_LAYERS), mesh=mesh)
    function = call(loss_fn, mesh=mesh, batch=P("data"), local="model", **options)
    with pytest.raises(PromiseError, match=r'\(local=\): the loss must be equal .* along "model"'):
        function(p, torch.ones(8, 4))


def test_differentiated_loss_that_differs_along_a_local_axis_raises():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    p = fs.shard_params(two_layers(), TWO_LAYERS, mesh=mesh)

    def derivative(loss_fn):
        function = fs.evaluate(loss_fn, mesh=mesh, batch=P("data"), local="model")
        return fs.array.lift(torch.func.grad)(lambda p: function(p, torch.ones(8, 4)))(p)

    def expected_loss(p):
        return (torch.tanh(torch.ones(8, 4) @ p["up"]) @ p["down"]).square().mean()

    expected = torch.func.grad(expected_loss)(two_layers())
    torch.testing.assert_close(fs.unshard(derivative(summed_loss)), expected)
    with pytest.raises(PromiseError, match="must be equal"):
        derivative(loss_without_psum)


def test_psum_that_zeros_hide_is_missed_in_the_next_step():
    """As LoRA's second matrix is zero at first, and with it each device's part of the loss."""
    mesh = fs.make_mesh({"data": 2, "model": 2})
    full = {**two_layers(), "down": torch.zeros(6, 4)}
    p = fs.shard_params(full, TWO_LAYERS, mesh=mesh)
    opt = fs.optim.sgd(0.1)

    def loss_fn(p, x):
        return (torch.tanh(x @ p["up"]) @ p["down"] - 1).square().mean()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), local="model")
    p, state, _ = step(p, opt.init(p), torch.ones(8, 4))
    with pytest.raises(PromiseError, match="must be equal"):
        step(p, state, torch.ones(8, 4))


def test_loss_that_differs_by_rounding_is_equal():
    """A ring adds in another order on each device."""
    mesh = fs.make_mesh({"data": 1, "model": 3})
    x = torch.randn(9, 4)
    shards = {"up": torch.randn(4, 6), "down": torch.randn(6, 4)}
    p = fs.shard_params(shards, TWO_LAYERS, mesh=mesh)

    def ring_sum(x):
        total, passed = x, x
        for _ in range(2):
            passed = fs.ppermute(passed, "model", [(0, 1), (1, 2), (2, 0)])
            total = total + passed
        return total

    def loss_fn(p, x):
        return ring_sum(torch.tanh(x @ p["up"]) @ p["down"]).square().mean()

    loss, _ = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), local="model")(p, x)
    expected = (torch.tanh(x @ shards["up"]) @ shards["down"]).square().mean()
    torch.testing.assert_close(loss, expected)


def test_pmean_of_losses_that_differ_trains_their_mean():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    full = two_layers()
    x = torch.randn(8, 4)
    p = fs.shard_params(full, TWO_LAYERS, mesh=mesh)

    def loss_fn(p, x):
        return fs.pmean(loss_without_psum(p, x), "model")

    def expected_loss(p):
        halves = [loss_without_psum({"up": p["up"][:, i], "down": p["down"][i]}, x) for i in PARTS]
        return sum(halves) / 2

    function = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), local="model")
    loss, grads = function(p, x)
    expected, expected_grads = torch.func.grad_and_value(expected_loss)(full)[::-1]
    torch.testing.assert_close((loss, fs.unshard(grads)), (expected, expected_grads))


PARTS = (slice(0, 3), slice(3, 6))


# -- gradients inside a loss ---------------------------------------------------------------------------------------------


def doubles():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 4, dtype=torch.float64, generator=generator)
    return {name: value.double() for name, value in two_layers().items()}, x


def hidden_sum(p, x):
    return torch.tanh(x @ p["up"]) @ p["down"]


def output_of(p, x):
    return fs.psum(hidden_sum(p, x), "model").square().sum()


def input_penalty(gradient):
    """Return a loss: the mean square of a gradient by the inputs."""
    return lambda p, x: gradient(lambda x: output_of(p, x), x).square().mean()


def expected_penalty(p, x):
    gradient = torch.func.grad(lambda x: hidden_sum(p, x).square().sum())(x)
    return gradient.square().mean()


def pulled(f, x):
    y, pull = torch.func.vjp(f, x)
    return pull(torch.ones_like(y))[0]


@torch.enable_grad()
def by_autograd(f, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x), x, create_graph=True)[0]


INNER_GRADIENTS = {
    "autograd": by_autograd,
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": pulled,
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "samples": lambda f, x: torch.func.vmap(torch.func.grad(f))(x),
    "summed": lambda f, x: fs.psum(torch.func.grad(f)(x), "model"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("name", INNER_GRADIENTS)
@pytest.mark.parametrize("stage", [0, 3])
def test_inner_gradient_through_a_collective_along_a_local_axis_raises(name, stage):
    mesh, (full, x) = fs.make_mesh({"data": 2, "model": 2}), doubles()
    rules_of_stage = fs.fsdp("data", within=TWO_LAYERS) if stage == 3 else TWO_LAYERS
    p = fs.shard_params(full, rules_of_stage, mesh=mesh)
    loss_fn = input_penalty(INNER_GRADIENTS[name])
    options = {"mesh": mesh, "batch": P("data"), "local": "model"}
    for function in (fs.value_and_grad(loss_fn, **options), fs.evaluate(loss_fn, **options)):
        with pytest.raises(ValueError, match=r'fs\.psum over "model" .*test_local\.py.*vjp'):
            function(p, x)


def test_inner_gradient_by_autograd_along_the_axes_of_the_batch_is_right():
    """Each device differentiates the sum of all devices' values, of which each has its own gradient."""
    mesh, (full, x) = fs.make_mesh({"data": 2}), doubles()

    def penalty(total):
        def loss_fn(p, x):
            gradient = by_autograd(lambda x: total(hidden_sum(p, x).square().sum()), x)
            return gradient.square().mean()

        return loss_fn

    value_and_grad = fs.value_and_grad(
        penalty(lambda x: fs.psum(x, "data")), mesh=mesh, batch=P("data")
    )
    loss, grads = value_and_grad(fs.shard_params(full, P(), mesh=mesh), x)
    leaves = {name: value.requires_grad_() for name, value in full.items()}
    expected = penalty(lambda x: 2 * x)(leaves, x)
    expected.backward()
    expected_grads = {name: value.grad for name, value in leaves.items()}
    torch.testing.assert_close((loss, fs.unshard(grads)), (expected.detach(), expected_grads))


def test_inner_gradient_through_a_local_collective_raises_where_the_loss_is_differentiated():
    mesh, (full, x) = fs.make_mesh({"data": 2, "model": 2}), doubles()
    p = fs.shard_params(full, TWO_LAYERS, mesh=mesh)
    loss_fn = input_penalty(INNER_GRADIENTS["grad"])
    function = fs.evaluate(loss_fn, mesh=mesh, batch=P("data"), local="model")
    with pytest.raises(ValueError, match="must not be differentiated"):
        fs.array.lift(torch.func.grad)(lambda p: function(p, x))(p)


def penalty_by_parts(p, x):
    """The gradient of the device's own part, summed over "model"."""
    part, pull = torch.func.vjp(lambda x: hidden_sum(p, x), x)
    output = fs.psum(part, "model")
    cotangent = torch.func.grad(lambda y: y.square().sum())(output)
    return fs.psum(pull(cotangent)[0], "model").square().mean()


@pytest.mark.parametrize(("data", "model"), [(2, 2), (1, 3), (2, 1)])
def test_inner_gradient_by_parts_equals_one_devices(data, model):
    mesh, (full, x) = fs.make_mesh({"data": data, "model": model}), doubles()
    p = fs.shard_params(full, TWO_LAYERS, mesh=mesh)
    function = fs.value_and_grad(penalty_by_parts, mesh=mesh, batch=P("data"), local="model")
    loss, grads = function(p, x)
    expected_grads, expected = torch.func.grad_and_value(expected_penalty)(full, x)
    torch.testing.assert_close((loss, fs.unshard(grads)), (expected, expected_grads))


def test_outer_gradient_of_evaluate_along_a_local_axis_equals_one_devices():
    mesh, (full, x) = fs.make_mesh({"data": 2, "model": 2}), doubles()
    p = fs.shard_params(full, TWO_LAYERS, mesh=mesh)
    output = fs.evaluate(output_of, mesh=mesh, batch=P("data"), local="model")

    def penalty(p):
        devices = mesh.shape["data"]  # evaluate returns the mean of their sums
        gradient = torch.func.grad(lambda x: output(p, x) * devices)(x)
        return gradient.square().mean()

    expected = torch.func.grad(expected_penalty)(full, x)
    torch.testing.assert_close(fs.unshard(fs.array.lift(torch.func.grad)(penalty)(p)), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch itself uses it in its first jvp
def test_inner_jvp_through_a_collective_along_a_local_axis_equals_one_devices():
    mesh, (full, x) = fs.make_mesh({"data": 2, "model": 2}), doubles()
    p = fs.shard_params(full, TWO_LAYERS, mesh=mesh)

    def slope(output):
        return lambda p, x: torch.func.jvp(lambda x: output(p, x), (x,), (x,))[1].square().mean()

    def summed(p, x):
        return torch.func.vmap(lambda x: fs.psum(hidden_sum(p, x), "model"))(x)

    function = fs.value_and_grad(slope(summed), mesh=mesh, batch=P("data"), local="model")
    loss, grads = function(p, x)
    expected_grads, expected = torch.func.grad_and_value(slope(hidden_sum))(full, x)
    torch.testing.assert_close((loss, fs.unshard(grads)), (expected, expected_grads))


def test_certify_names_forgotten_psum():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    tree = two_layers()
    how = {"within": TWO_LAYERS, "local": "model"}
    x = torch.randn(8, 4)
    for options in ({}, {"reproducible": True}, {"reproducible": True, "precision": "bf16"}):
        certificate = fs.testing.certify(
            summed_loss, tree, x, CLIPPED, mesh, stages=[0, 2, 3], **how, **options
        )
        certificate.check()
    with pytest.raises(PromiseError, match="must be equal"):
        fs.testing.certify(loss_without_psum, tree, x, CLIPPED, mesh, stages=[3], **how)


def test_certify_needs_the_rules_of_local_axes():
    """Without them each device would have full parameters, and the verdict would be reversed."""
    mesh = fs.make_mesh({"data": 2, "model": 2})
    x = torch.randn(8, 4)
    with pytest.raises(ValueError, match="within must be the rules"):
        fs.testing.certify(summed_loss, two_layers(), x, CLIPPED, mesh, local="model")


def started_from_others(axis):
    """Return the error of a step where replicas differ along an axis; shards along "model" may."""
    mesh = fs.make_mesh({"data": 2, "model": 2})
    at = torch.distributed.get_rank() // 2 if axis == "data" else torch.distributed.get_rank() % 2
    own = fs.shard_params({"w": torch.ones(4)}, ROW, mesh=mesh)
    own["w"].local.add_(at)
    try:
        fs.value_and_grad(
            lambda p, x: fs.psum((x * p["w"]).sum(), "model"),
            mesh=mesh,
            batch=P("data"),
            local="model",
        )(own, torch.ones(4, 2))
    except fs.errors.MismatchError as error:
        return str(error)


def test_processes_with_different_replicas_of_a_shard_raise(four):
    assert four.run(started_from_others, "model") == [None] * 4
    for actual in four.run(started_from_others, "data"):
        assert "replicated parameters must be the same" in actual


MESH = fs.make_mesh({"a": 2, "b": 3, "c": 2}, runtime="virtual")


@st.composite
def layouts(draw, ndim):
    entries, flat, unreduced = [[] for _ in range(ndim)], [], []
    for axis in draw(st.permutations(MESH.axis_names)):
        use = draw(st.sampled_from([*entries, *entries, flat, unreduced, []]))
        use.append(axis)
    return fs.Layout(
        MESH, P(*map(tuple, entries), flat=tuple(flat), unreduced=tuple(unreduced)), unit="u"
    )


@given(st.data(), st.lists(st.integers(1, 7), min_size=1, max_size=3))
def test_uneven_parameters_are_resharded_exactly(data, shape):
    x = torch.arange(float(math.prod(shape))).reshape(shape)
    before = data.draw(layouts(len(shape)))
    after = data.draw(layouts(len(shape)))
    actual = fs.reshard(fs.device_put(x, before), after)
    actual.check()
    assert torch.equal(fs.unshard(actual), x)


def test_layouts_that_are_not_local_raise_together():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    lay = {"w": P("data", "model"), "v": P.flat("model"), "u": P("model")}
    own = fs.shard_params({name: torch.ones(4, 4) for name in lay}, lay, mesh=mesh)
    with pytest.raises(fs.errors.LayoutError, match="v is .*; w is ") as error:
        fs.grad(lambda p, x: p["u"].sum(), mesh=mesh, batch=P("data"), local="model")(
            own, torch.ones(4)
        )
    assert "u is" not in str(error.value)
    with pytest.raises(fs.errors.MeshError, match='has no axis "rows", "columns"'):
        fs.grad(alone, mesh=mesh, batch=P("data"), local=("rows", "columns"))
    how = {
        "schedule": fs.pipeline_schedule("1f1b", stages=2, microbatches=2),
        "axis": "model",
        "loss": entropy,
    }
    with pytest.raises(ValueError, match="the axis of the stages, model, is local"):
        fs.train_step([first, last], CLIPPED, mesh=mesh, batch=P("data"), local="model", **how)
    with pytest.raises(fs.errors.LayoutError, match="muon needs full matrices"):
        fs.optim.muon(0.1).init(own)


# -- devices that compute one loss have the same samples -----------------------------------------------------------


def samples_of(data, model, step, kind):
    """Return the samples of a device in a step: right, or other ones along "model" in one of four ways."""
    if kind == "right" or model == 0 or (kind == "late" and step == 0):
        return torch.arange(4.0).reshape(2, 2) + 10 * data + 100 * step
    if kind == "exchanged":  # by the groups
        return samples_of(1 - data, 0, step, "right")
    x = samples_of(data, 0, step, "right")
    return x.flip(0) if kind == "order" else x + 1


def steps_with_samples(mesh, kind, stages=False):
    """Train three steps as one device; return the error."""
    coordinates = mesh.coordinates(device_of(mesh))
    layout = fs.Layout(mesh, P("data"))
    if stages:
        schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
        options = {"schedule": schedule, "loss": lambda y, x: y.square().mean()}
        w = fs.shard_stages([torch.ones(2), torch.ones(2)], mesh=mesh, schedule=schedule)
        given = [torch.mul] * 2
    else:
        options = {"local": "model"}
        w = fs.shard_params(torch.ones(2, 2), P(None, "model"), mesh=mesh)

        def given(w, x):
            return fs.psum((x @ w).square().mean(), "model")

    run = fs.value_and_grad(given, mesh=mesh, batch=P("data"), **options)
    along = coordinates["pipe" if stages else "model"]
    try:
        for step in range(3):
            x = fs.from_local(samples_of(coordinates["data"], along, step, "right"), layout)
            x.shards[0].copy_(
                samples_of(coordinates["data"], along, step, kind)
            )  # from_local compares its shards
            run(w, x)
    except fs.errors.MismatchError as error:
        return str(error)


def samples_on_processes(stages):
    mesh = fs.make_mesh({"data": 2, "pipe" if stages else "model": 2})
    return [
        steps_with_samples(mesh, kind, stages)
        for kind in ("right", "values", "order", "late", "exchanged")
    ]


@pytest.mark.parametrize("stages", [False, True], ids=["local", "stages"])
def test_different_samples_in_a_group_raise(four, stages):
    """Of devices along a local axis, and along that of stages: other values, another order, later, or exchanged."""
    mesh = fs.make_mesh({"data": 2, "pipe" if stages else "model": 2}, runtime="virtual")
    actual = [
        fs.run(steps_with_samples, mesh, kind, stages, mesh=mesh)[0] for kind in ("right", "late")
    ]
    for right, *others in [*four.run(samples_on_processes, stages), actual]:
        assert right is None
        assert all("must have the same samples" in str(error) for error in others)
