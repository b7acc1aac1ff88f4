"""Parameters used as they are stored along "model" train as on one device.

The oracle is the same GPT, written for one device (`alone`). Its local functions have a `psum`
where Megatron has one; losses that differ along a local axis, and samples that do, raise.
"""

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

# -- a GPT: two blocks and tied embeddings of 51 words, which neither two nor four devices divide --

WORDS, WIDTH, HEADS, LENGTH = 51, 8, 6, 5
COLUMN = P(None, "model")
ROW = P("model")
LEAVES = {
    "emb": ((WORDS, WIDTH), ROW),
    "norm": ((WIDTH,), P()),
    "q": ((WIDTH, 12), COLUMN),
    "k": ((WIDTH, 12), COLUMN),
    "v": ((WIDTH, 12), COLUMN),
    "o": ((12, WIDTH), ROW),
    "up": ((WIDTH, 18), COLUMN),
    "bias": ((18,), ROW),
    "down": ((18, WIDTH), ROW),
    "shift": ((WIDTH,), P()),
}
RULES = {f"*.{name}": spec for name, (_, spec) in LEAVES.items()}


def params(dtype=torch.float64):
    """Return the parameters of two blocks, which share the embedding."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape):
        x = torch.randn(*shape, dtype=torch.float64, generator=generator)
        return (x / math.sqrt(shape[0])).to(dtype)

    first = {name: draw(shape) for name, (shape, _) in LEAVES.items()}
    last = {name: draw(shape) for name, (shape, _) in LEAVES.items()}
    last["emb"] = first["emb"]
    return [first, last]


def batch_of(size):
    generator = torch.Generator().manual_seed(size)
    return torch.randint(WORDS, (2, size, LENGTH), generator=generator).unbind()


def heads_of(x, weight):
    """Return (samples, heads, length, width of a head)."""
    return F.linear(x, weight.T).unflatten(-1, (-1, 12 // HEADS)).transpose(-2, -3)


def block(p, h, sent=lambda x: x, summed=lambda x: x):
    """Return the result of attention and an MLP.

    `sent` is around the inputs of column weights, and `summed` around the results of row weights.
    """
    x = sent(h * p["norm"])
    q, k, v = (heads_of(x, p[name]) for name in "qkv")
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    h = h + summed(attended.transpose(-2, -3).flatten(-2) @ p["o"])
    hidden = torch.tanh(sent(h) @ p["up"] + p["bias"])
    return h + summed(hidden @ p["down"]) + p["shift"]


def alone(p, batch):
    """Return the loss on one device."""
    h = F.embedding(batch[0], p[0]["emb"])
    h = block(p[1], block(p[0], h))
    logits = h @ p[1]["emb"].T
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def parallel(p, h):
    return block(p, h, lambda x: fs.pvary(x, "model"), lambda x: fs.psum(x, "model"))


def local_rows(ids, words):
    """Return the rows of words in this device's part of the vocabulary, and which are in it."""
    rows = ids - fs.axis_index("model") * -(-WORDS // fs.axis_size("model"))
    is_local = (rows >= 0) & (rows < words)
    return rows.clamp(0, words - 1), is_local


def first(p, ids):
    rows, is_local = local_rows(ids, len(p["emb"]))
    embedded = F.embedding(rows, p["emb"]) * is_local[..., None]
    return parallel(p, fs.psum(embedded, "model"))


def last(p, h):
    return fs.pvary(parallel(p, h), "model") @ p["emb"].T


def entropy(logits, batch):
    """Return the cross entropy of logits that are sharded by words."""
    top = fs.pmax(logits.detach().amax(-1), "model")
    total = fs.psum((logits - top[..., None]).exp().sum(-1), "model").log() + top
    rows, is_local = local_rows(batch[1], logits.shape[-1])
    of_labels = logits.gather(-1, rows[..., None])[..., 0] * is_local
    return (total - fs.psum(of_labels, "model")).mean()


def local_loss(p, batch):
    return entropy(last(p[1], first(p[0], batch[0])), batch)


def rules(stage):
    return fs.fsdp("data", within=RULES) if stage == 3 else RULES


CLIPPED = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.optim.adamw(1e-2))


def train(loss_fn, sizes, stage=0, layouts=None, steps=5, **options):
    """Return parameters, state, and the loss and the gradient's norm of each step."""
    mesh = fs.make_mesh(sizes)
    if layouts is None:
        layouts = rules(stage)
    arrays = fs.shard_params(params(), layouts, mesh=mesh)
    opt = fs.partition_optimizer(CLIPPED, mesh=mesh, axis="data", stage=stage)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), **options)
    state = opt.init(arrays)
    numbers = []
    for number in range(steps):
        arrays, state, metrics = step(arrays, state, batch_of(12 + number))
        numbers.append((metrics["loss"].item(), metrics["grad_norm"].item()))
    return arrays, state, numbers


def assert_equal(actual, expected, tolerance=1e-12):
    options = {"atol": tolerance, "rtol": tolerance}
    params, _, numbers = actual
    expected_params, _, expected_numbers = expected
    for tree, expected_tree in zip(fs.unshard(params), fs.unshard(expected_params), strict=True):
        for name, x in expected_tree.items():
            torch.testing.assert_close(tree[name], x, **options)
    torch.testing.assert_close(torch.tensor(numbers), torch.tensor(expected_numbers), **options)


@pytest.fixture(scope="module")
def expected():
    return train(alone, {"data": 1}, layouts=P())


OPTIONS = [{}, {"accumulate": 2}, {"accumulate": 2, "reduce_once": False}, {"bucket": 0}]


@settings(max_examples=10)
@given(
    data=st.sampled_from([1, 2, 3]),
    model=st.sampled_from([2, 3, 1]),
    stage=st.sampled_from([0, 1, 2, 3]),
    options=st.sampled_from(OPTIONS),
)
def test_local_parameters_train_as_on_one_device(expected, data, model, stage, options):
    """With clipping by the global norm, tied embeddings, and batches that devices do not divide."""
    actual = train(local_loss, {"data": data, "model": model}, stage, local="model", **options)

    assert_equal(actual, expected)


def test_optimizer_keeps_layouts_within_shards():
    sizes = {"data": 2, "model": 2}
    arrays, state, _ = train(local_loss, sizes, 3, steps=1, local="model")

    types = {str(fs.typeof(x)) for x in arrays[1].values()}
    types_of_state = {str(fs.typeof(x)) for x in state[1]["exp_avg"][1].values()}
    assert types_of_state == types
    assert "f64[51@model, 8]{flat:data}" in types
    assert "f64[8, 12@model]{flat:data}" in types
    assert "f64[8]{flat:data}" in types

    # 26 and 25 words of 8 numbers, each on 2 devices
    assert [len(x) for x in arrays[0]["emb"].shards] == [104, 100, 104, 100]


@pytest.mark.parametrize("stage", range(4))
def test_sharded_parameters_send_nothing_over_local_axes(stage):
    """Bytes sent over "model" do not depend on the width of sharded parameters, in any stage."""
    mesh = fs.make_mesh({"data": 2, "model": 2})
    layouts = {"up": COLUMN, "down": ROW}
    rules_of_stage = fs.fsdp("data", within=layouts) if stage == 3 else layouts

    def loss_fn(p, x):
        hidden = torch.tanh(fs.pvary(x, "model") @ p["up"])
        return fs.psum(hidden @ p["down"], "model").square().mean()

    def sent(width):
        """Return the bytes of the second step over "model", and over "data"."""
        tree = {"up": torch.ones(4, width), "down": torch.ones(width, 4)}
        arrays = fs.shard_params(tree, rules_of_stage, mesh=mesh)
        opt = fs.partition_optimizer(CLIPPED, mesh=mesh, axis="data", stage=stage)
        step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), local="model")
        arrays, state, _ = step(arrays, opt.init(arrays), torch.ones(8, 4))
        with fs.ledger() as comm:
            step(arrays, state, torch.ones(8, 4))

        over_model = 0
        over_data = 0
        for (_, axes), (_, size) in comm.by_collective().items():
            if "model" in axes:
                over_model += size
            else:
                over_data += size
        return over_model, over_data

    small_over_model, small_over_data = sent(6)
    large_over_model, large_over_data = sent(600)
    assert small_over_model == large_over_model < 2000
    assert large_over_data > 50 * small_over_data  # gradients are sent there


def test_lazy_parameters_are_drawn_for_local_layouts():
    layouts = {"**.weight": ROW, "**.bias": P()}
    model = nn.Sequential(fs.lazy(nn.Linear, 4, 7), fs.lazy(nn.Linear, 7, 5))
    mesh = fs.make_mesh({"data": 2, "model": 2})

    replicated = fs.shard_params(model, P(), mesh=mesh, seed=1)
    by_rows = fs.shard_params(model, layouts, mesh=mesh, seed=1)
    flat = fs.shard_params(model, fs.fsdp("data", within=layouts), mesh=mesh, seed=1)

    for name, x in fs.unshard(replicated).items():
        assert torch.equal(fs.unshard(by_rows[name]), x)
        assert torch.equal(fs.unshard(flat[name]), x)
    assert [tuple(x.shape) for x in by_rows["0.weight"].shards] == [(4, 4), (3, 4)] * 2


def test_evaluate_gives_loss_of_one_device():
    expected = alone(params(), batch_of(7))
    for stage, model in [(0, 2), (3, 3)]:
        mesh = fs.make_mesh({"data": 2, "model": model})
        arrays = fs.shard_params(params(), rules(stage), mesh=mesh)
        evaluate = fs.evaluate(local_loss, mesh=mesh, batch=P("data"), local="model")

        actual = evaluate(arrays, batch_of(7))

        torch.testing.assert_close(actual.double(), expected)


# -- a forgotten psum ------------------------------------------------------------------------------

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
    """Add a penalty of the device's shards alone, small beside the loss."""
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
        first_half = {"up": p["up"][:, :3], "down": p["down"][:3]}
        second_half = {"up": p["up"][:, 3:], "down": p["down"][3:]}
        return (loss_without_psum(first_half, x) + loss_without_psum(second_half, x)) / 2

    function = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), local="model")
    loss, grads = function(p, x)

    expected_grads, expected = torch.func.grad_and_value(expected_loss)(full)
    torch.testing.assert_close((loss, fs.unshard(grads)), (expected, expected_grads))


# -- gradients inside a loss -----------------------------------------------------------------------


def doubles():
    """Return the two layers, and rows for them, in float64."""
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
    mesh = fs.make_mesh({"data": 2, "model": 2})
    full, x = doubles()
    rules_of_stage = fs.fsdp("data", within=TWO_LAYERS) if stage == 3 else TWO_LAYERS
    p = fs.shard_params(full, rules_of_stage, mesh=mesh)
    loss_fn = input_penalty(INNER_GRADIENTS[name])
    options = {"mesh": mesh, "batch": P("data"), "local": "model"}
    for function in (fs.value_and_grad(loss_fn, **options), fs.evaluate(loss_fn, **options)):
        with pytest.raises(ValueError, match=r'fs\.psum over "model" .*test_local\.py.*vjp'):
            function(p, x)


def test_inner_gradient_by_autograd_along_the_axes_of_the_batch_is_right():
    """Each device differentiates the sum of all devices' values, of which each has its own
    gradient.
    """
    mesh = fs.make_mesh({"data": 2})
    full, x = doubles()

    def penalty(total):
        def loss_fn(p, x):
            gradient = by_autograd(lambda x: total(hidden_sum(p, x).square().sum()), x)
            return gradient.square().mean()

        return loss_fn

    loss_fn = penalty(lambda x: fs.psum(x, "data"))
    function = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))
    loss, grads = function(fs.shard_params(full, P(), mesh=mesh), x)

    leaves = {name: value.requires_grad_() for name, value in full.items()}
    expected = penalty(lambda x: 2 * x)(leaves, x)
    expected.backward()
    expected_grads = {name: value.grad for name, value in leaves.items()}
    torch.testing.assert_close((loss, fs.unshard(grads)), (expected.detach(), expected_grads))


def test_inner_gradient_through_a_local_collective_raises_where_the_loss_is_differentiated():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    full, x = doubles()
    p = fs.shard_params(full, TWO_LAYERS, mesh=mesh)
    loss_fn = input_penalty(INNER_GRADIENTS["grad"])
    function = fs.evaluate(loss_fn, mesh=mesh, batch=P("data"), local="model")
    with pytest.raises(ValueError, match="must not be differentiated"):
        fs.array.lift(torch.func.grad)(lambda p: function(p, x))(p)


def penalty_by_parts(p, x):
    """Return the penalty by the gradient of the device's own part, summed over "model"."""
    part, pull = torch.func.vjp(lambda x: hidden_sum(p, x), x)
    output = fs.psum(part, "model")
    cotangent = torch.func.grad(lambda y: y.square().sum())(output)
    (gradient,) = pull(cotangent)
    return fs.psum(gradient, "model").square().mean()


@pytest.mark.parametrize(("data", "model"), [(2, 2), (1, 3), (2, 1)])
def test_inner_gradient_by_parts_equals_one_devices(data, model):
    mesh = fs.make_mesh({"data": data, "model": model})
    full, x = doubles()
    p = fs.shard_params(full, TWO_LAYERS, mesh=mesh)
    function = fs.value_and_grad(penalty_by_parts, mesh=mesh, batch=P("data"), local="model")
    loss, grads = function(p, x)
    expected_grads, expected = torch.func.grad_and_value(expected_penalty)(full, x)
    torch.testing.assert_close((loss, fs.unshard(grads)), (expected, expected_grads))


def test_outer_gradient_of_evaluate_along_a_local_axis_equals_one_devices():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    full, x = doubles()
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
    mesh = fs.make_mesh({"data": 2, "model": 2})
    full, x = doubles()
    p = fs.shard_params(full, TWO_LAYERS, mesh=mesh)

    def slope(output):
        def loss_fn(p, x):
            _, tangent = torch.func.jvp(lambda x: output(p, x), (x,), (x,))
            return tangent.square().mean()

        return loss_fn

    def summed(p, x):
        return torch.func.vmap(lambda x: fs.psum(hidden_sum(p, x), "model"))(x)

    function = fs.value_and_grad(slope(summed), mesh=mesh, batch=P("data"), local="model")
    loss, grads = function(p, x)

    expected_grads, expected = torch.func.grad_and_value(slope(hidden_sum))(full, x)
    torch.testing.assert_close((loss, fs.unshard(grads)), (expected, expected_grads))


def test_certify_names_forgotten_psum():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    tree = two_layers()
    rules_of_axis = {"within": TWO_LAYERS, "local": "model"}
    x = torch.randn(8, 4)
    for options in ({}, {"reproducible": True}, {"reproducible": True, "precision": "bf16"}):
        options |= rules_of_axis
        certificate = fs.testing.certify(
            summed_loss, tree, x, CLIPPED, mesh, stages=[0, 2, 3], **options
        )
        certificate.check()

    with pytest.raises(PromiseError, match="must be equal"):
        fs.testing.certify(loss_without_psum, tree, x, CLIPPED, mesh, stages=[3], **rules_of_axis)


def test_certify_needs_the_rules_of_local_axes():
    """Without them each device would have full parameters, and the verdict would be reversed."""
    mesh = fs.make_mesh({"data": 2, "model": 2})
    x = torch.randn(8, 4)
    with pytest.raises(ValueError, match="within must be the rules"):
        fs.testing.certify(summed_loss, two_layers(), x, CLIPPED, mesh, local="model")


def started_from_others(axis):
    """Return the error of a step where replicas differ along an axis; shards along "model" may."""
    mesh = fs.make_mesh({"data": 2, "model": 2})
    coordinates = mesh.coordinates(torch.distributed.get_rank())
    arrays = fs.shard_params({"w": torch.ones(4)}, ROW, mesh=mesh)
    arrays["w"].local.add_(coordinates[axis])

    def loss_fn(p, x):
        return fs.psum((x * p["w"]).sum(), "model")

    gradient = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), local="model")
    try:
        gradient(arrays, torch.ones(4, 2))
    except fs.errors.MismatchError as error:
        return str(error)


def test_processes_with_different_replicas_of_a_shard_raise(four):
    assert four.run(started_from_others, "model") == [None] * 4
    for actual in four.run(started_from_others, "data"):
        assert "replicated parameters must be the same" in actual


MESH = fs.make_mesh({"a": 2, "b": 3, "c": 2}, runtime="virtual")


@st.composite
def layouts(draw, ndim):
    """Draw a layout: each axis shards a dim, or the flat form, or has summands, or replicates."""
    entries = [[] for _ in range(ndim)]
    flat = []
    unreduced = []
    for axis in draw(st.permutations(MESH.axis_names)):
        replicated = []
        axes = draw(st.sampled_from([*entries, *entries, flat, unreduced, replicated]))
        axes.append(axis)
    spec = P(*map(tuple, entries), flat=tuple(flat), unreduced=tuple(unreduced))
    return fs.Layout(MESH, spec, unit="u")


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
    options = {"mesh": mesh, "batch": P("data")}
    specs = {"w": P("data", "model"), "v": P.flat("model"), "u": P("model")}
    arrays = fs.shard_params({name: torch.ones(4, 4) for name in specs}, specs, mesh=mesh)

    with pytest.raises(fs.errors.LayoutError, match="v is .*; w is ") as error:
        fs.grad(lambda p, x: p["u"].sum(), **options, local="model")(arrays, torch.ones(4))
    assert "u is" not in str(error.value)

    with pytest.raises(fs.errors.MeshError, match='has no axis "rows", "columns"'):
        fs.grad(alone, **options, local=("rows", "columns"))

    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    options |= {"schedule": schedule, "axis": "model", "loss": entropy}
    with pytest.raises(ValueError, match="the axis of the stages, model, is local"):
        fs.train_step([first, last], CLIPPED, **options, local="model")

    with pytest.raises(fs.errors.LayoutError, match="muon needs full matrices"):
        fs.optim.muon(0.1).init(arrays)


# -- devices that compute one loss have the same samples -------------------------------------------


def right_samples(data, step):
    return torch.arange(4.0).reshape(2, 2) + 10 * data + 100 * step


def samples_of(data, index, step, kind):
    """Return the samples of a device: wrong ones, of a kind, if its index along an axis is 1."""
    right = right_samples(data, step)
    if kind == "right" or index == 0:
        return right
    if kind == "late":
        return right if step == 0 else right + 1
    if kind == "exchanged":  # by the groups
        return right_samples(1 - data, step)
    if kind == "order":
        return right.flip(0)
    return right + 1  # "values"


def gradient_of_stages(mesh):
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    w = fs.shard_stages([torch.ones(2), torch.ones(2)], mesh=mesh, schedule=schedule)
    options = {"schedule": schedule, "loss": lambda y, x: y.square().mean()}
    return fs.value_and_grad([torch.mul] * 2, mesh=mesh, batch=P("data"), **options), w


def gradient_of_local_parameters(mesh):
    def loss_fn(w, x):
        return fs.psum((x @ w).square().mean(), "model")

    w = fs.shard_params(torch.ones(2, 2), P(None, "model"), mesh=mesh)
    return fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), local="model"), w


def steps_with_samples(mesh, kind, stages=False):
    """Train three steps as one device; return the error."""
    coordinates = mesh.coordinates(device_of(mesh))
    data = coordinates["data"]
    index = coordinates["pipe" if stages else "model"]
    gradient, w = gradient_of_stages(mesh) if stages else gradient_of_local_parameters(mesh)
    layout = fs.Layout(mesh, P("data"))
    try:
        for step in range(3):
            # `from_local` compares its shards, so that wrong samples are written afterwards.
            x = fs.from_local(right_samples(data, step), layout)
            x.shards[0].copy_(samples_of(data, index, step, kind))
            gradient(w, x)
    except fs.errors.MismatchError as error:
        return str(error)


KINDS = ("right", "values", "order", "late", "exchanged")


def samples_on_processes(stages):
    mesh = fs.make_mesh({"data": 2, "pipe" if stages else "model": 2})
    return [steps_with_samples(mesh, kind, stages) for kind in KINDS]


@pytest.mark.parametrize("stages", [False, True], ids=["local", "stages"])
def test_different_samples_in_a_group_raise(four, stages):
    """A group is along a local axis, or along that of stages."""
    mesh = fs.make_mesh({"data": 2, "pipe" if stages else "model": 2}, runtime="virtual")
    virtual = []
    for kind in ("right", "late"):
        virtual.append(fs.run(steps_with_samples, mesh, kind, stages, mesh=mesh)[0])

    for right, *others in (*four.run(samples_on_processes, stages), virtual):
        assert right is None
        assert all("must have the same samples" in str(error) for error in others)
