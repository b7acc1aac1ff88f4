"""Models with experts on one mesh equal the same on one device in float64; bytes of dispatch;
routers; errors.
"""

from functools import partial

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import P, optim
from fshard.experts import balance_loss, grouped, grouped_matmul, moe, route, z_loss
from fshard.optim.contract import pure_step
from tests.helpers.sampled import examples

WIDTH, HIDDEN, ROWS = 4, 3, 16
OPTIMIZER = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.05))


def weights(experts, layers):
    draw = torch.Generator().manual_seed(experts)
    randn = partial(torch.randn, generator=draw, dtype=torch.float64)
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return [
        {
            "router": randn(WIDTH, experts),
            "experts": {name: randn(experts, *shape) for name, shape in shapes.items()},
            "dense": randn(WIDTH, WIDTH) / 2,
        }
        for _ in range(layers)
    ]


def layer(p, x, *, top_k, capacity, score, axis, batch, skewed, replicated=()):
    logits = x @ p["router"]
    if skewed:  # the last expert gets no token, the first many
        logits = torch.cat([logits[:, :1] + 2, logits[:, 1:-1], logits[:, -1:] - 1e3], 1)
    routing = route(logits, top_k, score=score)
    y, stats = moe(
        x, routing, p["experts"], axis=axis, batch=batch, replicated=replicated, capacity=capacity
    )
    losses = 0.1 * balance_loss(routing, batch) + 0.01 * z_loss(logits)
    return torch.tanh(x @ p["dense"] + y), losses, stats.load


def loss_of(options, axis, batch, replicated=()):
    def loss_fn(params, rows):
        x = rows["x"]
        total = 0.0
        loads = []
        for p in params:
            x, losses, load = layer(p, x, axis=axis, batch=batch, replicated=replicated, **options)
            total = total + losses
            loads = [*loads, load]
        return (x - rows["y"]).square().mean() + total, torch.stack(loads).double()

    return loss_fn


def data():
    draw = torch.Generator().manual_seed(9)
    return {name: torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64) for name in "xy"}


def trained(sizes, stage, experts, options, *, steps=3, accumulate=1, **more):
    """Return losses and norms, parameters, and loads after some steps of AdamW with clipping."""
    mesh = fs.make_mesh(sizes)
    axes = ("data", "expert")
    local = ("expert", *(["model"] if "model" in sizes else []))
    within = {"*.experts.*": P(local), "**": P()}
    rules = fs.fsdp(axes, within=within) if stage == 3 else within
    params = fs.shard_params(weights(experts, 2), rules, mesh=mesh)
    opt = fs.partition_optimizer(OPTIMIZER, mesh=mesh, axis=axes, stage=stage)
    step = fs.train_step(
        loss_of(options, "expert", axes, local[1:]),
        opt,
        mesh=mesh,
        batch=P(axes),
        local=local,
        aux="sum",
        accumulate=accumulate,
        **more,
    )
    state = opt.init(params)
    numbers = []
    for _ in range(steps):
        params, state, metrics = step(params, state, data())
        numbers += [metrics["loss"], metrics["grad_norm"]]
    return torch.stack(numbers), fs.unshard(params), metrics["aux"], params


def of_one_device(experts, options, steps=3):
    """Plain autograd and the optimizer on plain tensors; all experts are here."""
    params = weights(experts, 2)
    numbers = []
    state = OPTIMIZER.init(params)
    for _ in range(steps):
        leaves, structure = optree.tree_flatten(params)
        leaves = [x.detach().requires_grad_() for x in leaves]
        loss, loads = loss_of(options, None, ())(optree.tree_unflatten(structure, leaves), data())
        grads = torch.autograd.grad(loss, leaves)
        numbers += [loss.detach(), torch.stack([g.square().sum() for g in grads]).sum().sqrt()]
        params, state = pure_step(OPTIMIZER)(optree.tree_unflatten(structure, grads), state, params)
    return torch.stack(numbers), params, loads


OPTIONS = st.fixed_dictionaries(
    {
        "top_k": st.sampled_from([1, 2, 3]),
        "capacity": st.sampled_from([None, 0.5, 1.0]),
        "score": st.sampled_from(["softmax", "sigmoid"]),
        "skewed": st.booleans(),
    }
)


SHARDS = st.sampled_from([(1, 0), (2, 0), (4, 0), (1, 2), (1, 4), (2, 1), (2, 2)])


@settings(max_examples=examples(10))
@given(st.sampled_from([1, 2]), SHARDS, st.integers(0, 3), st.sampled_from([4, 8]), OPTIONS)
def test_drawn_models_equal_those_of_one_device(data_size, shards, stage, experts, options):
    """A mesh of data, experts and, if its size is not 0, an axis along which devices have the same
    tokens.
    """
    expert_size, model_size = shards
    sizes = {"data": data_size, "expert": expert_size} | (
        {"model": model_size} if model_size else {}
    )
    numbers, params, loads, sharded = trained(sizes, stage, experts, options)
    expected, expected_params, expected_loads = of_one_device(experts, options)
    torch.testing.assert_close(numbers, expected, rtol=1e-12, atol=1e-12)
    for x, y in zip(*map(optree.tree_leaves, (params, expected_params)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)
    assert torch.equal(loads / (data_size * expert_size), expected_loads)
    layout = fs.typeof(sharded[0]["experts"]["up"])
    axes = "expert+model" if model_size else "expert"
    assert str(layout) == f"f64[{experts}@{axes}, 4, 3]" + ("{flat:data}" if stage == 3 else "")


# -- capacity --------------------------------------------------------------------------------------


def moe_by_hand(x, routing, weights, limit):
    """Visit tokens in the order of the batch: an expert that has had `limit` tokens gives the next
    ones nothing.
    """
    counts = [0] * len(weights["up"])
    y = torch.zeros_like(x)
    for token, experts in enumerate(routing.experts.tolist()):
        for choice, expert in enumerate(experts):
            if counts[expert] == limit:
                continue
            counts[expert] += 1
            gate, up, down = (weights[name][expert] for name in ("gate", "up", "down"))
            hidden = functional.silu(x[token] @ gate) * (x[token] @ up)
            y[token] += routing.weights[token, choice] * (hidden @ down)
    return y, torch.tensor(counts)


@pytest.mark.parametrize(("top_k", "capacity", "limit"), [(1, 0.5, 2), (2, 1.0, 8), (2, 0.4, 4)])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_tokens_beyond_the_capacity_get_nothing(devices, top_k, capacity, limit):
    """16 tokens of 4 experts: the mean is 4 rows with top_k=1 and 8 with top_k=2, and a limit is
    rounded up.
    """
    mesh = fs.make_mesh({"expert": devices})
    full = weights(4, 1)[0]
    x = data()["x"]
    logits = x @ full["router"] + torch.tensor([2.0, 0.0, 0.0, -1.0])  # the first expert has many

    def on_device(x, logits, experts):
        routing = route(logits, top_k)
        y, stats = moe(x, routing, experts, axis="expert", capacity=capacity)
        return y, stats.load[None], stats.dropped[None]

    specs = P("expert"), P("expert"), P("expert")
    results = fs.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=specs)(
        x, logits, full["experts"]
    )
    y, loads, dropped = map(fs.unshard, results)
    expected, counts = moe_by_hand(x, route(logits, top_k), full["experts"], limit)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(load, counts) for load in loads)
    expected_dropped = top_k * ROWS - int(counts.sum())
    assert dropped.tolist() == [expected_dropped] * devices
    assert expected_dropped > 0


def in_process(sizes, stage, options):
    numbers, params, _, _ = trained(sizes, stage, 4, options)
    return numbers, optree.tree_leaves(params)


@pytest.mark.parametrize("stage", [1, 3])
def test_processes_train_the_same(two, stage):
    options = {"top_k": 2, "capacity": 1.0, "score": "sigmoid", "skewed": True}
    numbers, params, _ = of_one_device(4, options)
    for result, leaves in two.run(in_process, {"data": 1, "expert": 2}, stage, options):
        torch.testing.assert_close(result, numbers, rtol=1e-12, atol=1e-12)
        for x, y in zip(leaves, optree.tree_leaves(params), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


@settings(max_examples=examples(5))
@given(
    st.sampled_from([1, 2]),
    SHARDS,
    st.integers(0, 3),
    st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    OPTIONS,
)
def test_drawn_stages_have_the_gradient_of_one_device(data_size, shards, stage, schedule, options):
    """Two stages of one layer each, without balance losses and capacity, which are not linear in
    the samples.
    """
    (expert_size, model_size), options = shards, options | {"capacity": None}
    axes = ("data", "expert")
    replicated = ("model",) if model_size else ()
    mesh = fs.make_mesh(
        {"pipe": 2, "data": data_size, "expert": expert_size}
        | dict.fromkeys(replicated, model_size)
    )
    plan = fs.pipeline_schedule(schedule, stages=2, microbatches=2)

    def stage_fn(p, x):
        return layer(p, x, axis="expert", batch="expert", replicated=replicated, **options)[0]

    def loss(y, rows):
        return (y - rows["y"]).square().mean()

    within = {"*.experts.*": P(("expert", *replicated)), "**": P()}
    rules = fs.fsdp(axes, within=within) if stage == 3 else within
    params = fs.shard_stages(weights(4, 2), rules, mesh=mesh, schedule=plan)
    gradient = fs.value_and_grad(
        [stage_fn, stage_fn],
        mesh=mesh,
        batch=P(axes),
        schedule=plan,
        loss=loss,
        inputs=lambda rows: rows["x"],
        local=("expert", *replicated),
    )
    value, grads = gradient(params, data())
    leaves, structure = optree.tree_flatten(weights(4, 2))
    leaves = [x.requires_grad_() for x in leaves]
    x = data()["x"]
    for p in optree.tree_unflatten(structure, leaves):
        x = layer(p, x, axis=None, batch=(), **options)[0]
    expected = loss(x, data())
    torch.testing.assert_close(value, expected.detach())
    for g, y in zip(
        optree.tree_leaves(fs.unshard(grads)), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(g, y)


def test_experts_beside_tensor_parallel_dims():
    """Each expert's inner dim is sharded along "model": the results are summed there."""
    options = {"top_k": 2, "capacity": None, "score": "softmax", "skewed": False}
    mesh = fs.make_mesh({"data": 2, "expert": 2, "model": 3})
    axes = ("data", "expert")

    def experts_of(p):
        return lambda rows, counts: fs.psum(fs.experts.swiglu(p["experts"], rows, counts), "model")

    def loss_fn(p, rows):
        routing = route(rows["x"] @ p["router"], 2)
        y, _ = moe(rows["x"], routing, experts_of(p), axis="expert")
        return (torch.tanh(rows["x"] @ p["dense"] + y) - rows["y"]).square().mean()

    columns = P("expert", None, "model")
    rules = {
        "experts.gate": columns,
        "experts.up": columns,
        "experts.down": P("expert", "model"),
        "**": P(),
    }
    params = fs.shard_params(weights(4, 1)[0], rules, mesh=mesh)
    value, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=P(axes), local=("expert", "model"))(
        params, data()
    )
    p = optree.tree_map(lambda x: x.requires_grad_(), weights(4, 1)[0])
    y, *_ = layer(p, data()["x"], axis=None, batch=(), **options)
    expected = (y - data()["y"]).square().mean()
    torch.testing.assert_close(value, expected.detach())
    for g, y in zip(
        optree.tree_leaves(fs.unshard(grads)),
        torch.autograd.grad(expected, optree.tree_leaves(p)),
        strict=True,
    ):
        torch.testing.assert_close(g, y)


class Balanced(nn.Module):
    """Layers around experts, whose loss has the balance of these."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        axes = {"axis": "expert", "batch": ("data", "expert")}
        self.moe = fs.nn.MoE(8, 16, experts=4, top_k=2, **axes)

    def forward(self, x):
        y = self.moe(self.down(self.up(x).relu()))
        return y.square().mean() + 0.01 * self.moe.balance


def test_balance_of_experts_is_part_of_the_loss_of_a_planned_model():
    """The oracle is the module without a plan, outside of a mesh."""
    torch.manual_seed(0)
    model = Balanced()
    x = torch.randn(8, 8)
    plan = fs.tensor_parallel(model, axis="model", sample=x, experts="expert")
    apply, params, buffers = fs.functionalize(model, plan=plan)
    mesh = fs.make_mesh({"data": 2, "expert": 2, "model": 2})
    params = fs.shard_params(params, fs.fsdp("data", within=plan.rules), mesh=mesh)

    def loss_fn(params, rows):
        return plan.full(apply(params, buffers, rows)[0])

    options = {"batch": P(("data", "expert")), "local": ("expert", "model")}
    value, grads = fs.value_and_grad(loss_fn, mesh=mesh, **options)(params, x)

    expected = model(x)
    torch.testing.assert_close(value, expected.detach())
    expected.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(fs.unshard(grads[name]), p.grad)


def test_accumulation_without_capacity_is_the_same():
    """Balance losses are of microbatches; without them all is linear in the samples."""
    options = {"top_k": 2, "capacity": None, "score": "softmax", "skewed": False}
    mesh = fs.make_mesh({"data": 2, "expert": 2})
    axes = ("data", "expert")

    def loss_fn(params, rows):
        y, *_ = layer(params[0], rows["x"], axis="expert", batch=(), **options)
        return (y - rows["y"]).square().mean()

    params = fs.shard_params(weights(4, 1), {"*.experts.*": P("expert"), "**": P()}, mesh=mesh)
    gradient = partial(fs.value_and_grad, mesh=mesh, batch=P(axes), local="expert")
    (loss, grads), (same, sums) = (gradient(loss_fn, accumulate=n)(params, data()) for n in (1, 2))
    torch.testing.assert_close(loss, same)
    for x, y in zip(*(optree.tree_leaves(fs.unshard(tree)) for tree in (grads, sums)), strict=True):
        torch.testing.assert_close(x, y)


def test_bits_are_equal_in_reproducible_mode():
    """Over data, stages and turns, where the axis of experts comes first: it has one size."""
    options = {"top_k": 2, "capacity": None, "score": "softmax", "skewed": False}

    def bits(size, stage):
        mesh = fs.make_mesh({"expert": 2, "data": size})
        axes = ("expert", "data")

        def loss_fn(params, rows):
            y, *_ = layer(params[0], rows["x"], axis="expert", batch="expert", **options)
            return (y - rows["y"]).square().mean()

        within = {"*.experts.*": P("expert"), "**": P()}
        params = fs.shard_params(
            weights(4, 1), fs.fsdp(axes, within=within) if stage == 3 else within, mesh=mesh
        )
        opt = fs.partition_optimizer(optim.adamw(0.1), mesh=mesh, axis=axes, stage=stage)
        step = fs.train_step(
            loss_fn, opt, mesh=mesh, batch=P(axes), local="expert", reproducible=True
        )
        state = opt.init(params)
        for _ in range(2):
            params, state, metrics = step(params, state, data())
        return [metrics["loss"], *optree.tree_leaves(fs.unshard(params))]

    expected = bits(1, 0)
    for size, stage in ((2, 1), (4, 2), (4, 3), (1, 3)):
        assert all(map(torch.equal, bits(size, stage), expected))


def test_bytes_of_dispatch_are_those_of_rows_that_are_elsewhere():
    mesh = fs.make_mesh({"expert": 4})
    n = 4
    width = 6
    logits = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))

    def device():
        mine = logits.chunk(n)[fs.axis_index("expert")]
        routing = route(mine, 2)
        moe(torch.ones(len(mine), width), routing, lambda rows, counts: rows, axis="expert")
        return routing.experts

    with fs.ledger() as comm:
        chosen = fs.run(device, mesh=mesh)
    back = [
        sum(int((experts // 2 == i).sum()) for j, experts in enumerate(chosen) if j != i)
        for i in range(n)
    ]
    for i, experts in enumerate(chosen):
        there = int((experts // 2 != i).sum())
        assert comm.bytes(i, collective="all_to_all") == (there + back[i]) * width * 4


def test_an_abstract_mesh_expects_balanced_rows():
    mesh = fs.make_mesh({"expert": 4}, runtime="abstract")
    with fs.ledger() as comm:
        (y,) = fs.run(
            lambda: moe(
                torch.empty(8, 6),
                route(torch.empty(8, 8), 2),
                lambda rows, counts: rows,
                axis="expert",
            )[0],
            mesh=mesh,
        )
    assert y.shape == (8, 6) and comm.bytes(collective="all_to_all") == 2 * 12 * 6 * 4


# -- the parts -------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.sampled_from([1, 2]))
def test_groups_and_biases_choose_as_a_loop_does(seed, top_groups):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 6, generator=draw)
    bias = torch.randn(6, generator=draw)
    routing = route(
        logits, 2, score="sigmoid", bias=bias, groups=3, top_groups=top_groups, scale=2.5
    )
    for row, experts, given_weights in zip(
        logits.sigmoid(), routing.experts, routing.weights, strict=True
    ):
        choice = (row + bias).tolist()
        best = sorted(range(3), key=lambda group: -sum(choice[2 * group : 2 * group + 2]))[
            :top_groups
        ]
        legal = [expert for expert in range(6) if expert // 2 in best]
        assert experts.tolist() == sorted(legal, key=lambda expert: -choice[expert])[:2]
        chosen = row[experts]
        torch.testing.assert_close(given_weights, 2.5 * chosen / chosen.sum())


def test_grouped_matmul_is_one_product_for_each_expert():
    rows = torch.randn(7, 3)
    matrices = torch.randn(4, 3, 2).requires_grad_()
    counts = [2, 0, 4, 1]
    expected = torch.cat([part @ w for part, w in zip(rows.split(counts), matrices, strict=True)])
    y = grouped_matmul(rows, matrices, counts)
    torch.testing.assert_close(y, expected)
    (g,) = torch.autograd.grad(y.sum(), matrices)
    assert not g[1].any() and g[0].any()


def test_losses_are_known_functions():
    logits = torch.randn(6, 4)
    routing = route(logits, 2)
    load = functional.one_hot(routing.experts, 4).sum((0, 1)) / 12
    torch.testing.assert_close(balance_loss(routing), 4 * (load * logits.softmax(-1).mean(0)).sum())
    torch.testing.assert_close(z_loss(logits), logits.exp().sum(-1).log().square().mean())


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_of_no_tokens_are_zero_with_a_zero_gradient(score):
    weight = torch.randn(5, 4, requires_grad=True)
    logits = torch.randn(0, 5) @ weight
    for loss in (balance_loss(route(logits, 2, score=score)), z_loss(logits)):
        (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
        assert loss == 0 and gradient.equal(torch.zeros(5, 4))


@pytest.mark.parametrize("counts", [(0, 0), (6, 0), (2, 4)], ids=str)
def test_balance_loss_of_devices_without_tokens_is_that_of_all_tokens(counts):
    """The oracle adds up the tokens of all devices by hand, in float64."""
    logits = torch.randn(sum(counts), 4, dtype=torch.float64)
    shards = logits.split(counts)

    def body():
        here = shards[fs.axis_index("data")].clone().requires_grad_()
        loss = balance_loss(route(here, 2), "data")
        (gradient,) = torch.autograd.grad(loss, here)
        return loss.detach(), gradient

    results = fs.run(body, mesh=fs.make_mesh({"data": 2}))

    full = logits.clone().requires_grad_()
    tokens = max(len(full), 1)
    chosen = torch.zeros(4, dtype=torch.float64)
    for row in full.detach():
        chosen[row.topk(2).indices] += 1 / (2 * tokens)
    expected = 4 * sum((row.softmax(-1) * chosen).sum() / tokens for row in full)
    expected_gradient = torch.zeros(0, 4, dtype=torch.float64)
    if len(full):
        (expected_gradient,) = torch.autograd.grad(expected, full)
    for loss, _ in results:
        torch.testing.assert_close(loss, torch.as_tensor(expected).double().detach())
    actual = torch.cat([gradient for _, gradient in results])
    torch.testing.assert_close(actual, expected_gradient)


def test_a_module_in_a_step_and_alone():
    """The layer of a network, functionalized; the shared network is dense."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(4, 6),
        fs.nn.MoE(6, 5, experts=4, top_k=2, shared=3, axis="expert", batch=("data", "expert")),
    ).double()
    apply, params, buffers = fs.functionalize(network)
    mesh = fs.make_mesh({"data": 2, "expert": 2})
    axes = ("data", "expert")
    sharded = fs.shard_params(params, {"1.experts.*": P("expert"), "**": P()}, mesh=mesh)

    def loss_fn(params, x):
        return apply(params, buffers, x)[0].square().mean()

    loss, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=P(axes), local="expert")(
        sharded, data()["x"]
    )
    expected = network(data()["x"]).square().mean()
    torch.testing.assert_close(loss, expected.detach())
    for name, g in zip(params, torch.autograd.grad(expected, [*network.parameters()]), strict=True):
        torch.testing.assert_close(fs.unshard(grads[name]), g)
    assert network[1].stats.load.sum() == 2 * ROWS


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"top_k": 5}, "top_k must be from 1 to the 4 experts"),
        ({"capacity": 0}, "capacity be > 0 or None; got 3 devices, 4 experts"),
        ({}, 'the axes "expert" must divide the experts'),
        ({"batch": "data"}, 'batch must have the axis "expert", along which tokens are sent'),
    ],
)
def test_invalid_arguments_raise(change, text):
    options = {"top_k": 2, "capacity": None, "score": "softmax", "skewed": False}
    options |= {"batch": "expert", **change}
    mesh = fs.make_mesh({"data": 1, "expert": 3})
    with pytest.raises(ValueError, match=text):
        fs.run(lambda: layer(weights(4, 1)[0], data()["x"], axis="expert", **options), mesh=mesh)


def test_weights_that_are_not_sharded_raise():
    options = {"top_k": 2, "capacity": None, "score": "softmax", "skewed": False}
    with pytest.raises(
        ValueError,
        match="must have the 2 experts of a device in dim 0; gate has 4, up has 4, down has 4",
    ):
        fs.run(
            lambda: layer(weights(4, 1)[0], data()["x"], axis="expert", batch="expert", **options),
            mesh=fs.make_mesh({"expert": 2}),
        )


def test_backward_of_moe_has_no_sort_and_no_index_put():
    """Rows are moved by index_select, whose backward adds rows, and neither sorts nor waits."""
    names = set()

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    def device(x, experts):
        y, _ = moe(x, route(x, 2), experts, axis="expert", capacity=1.0)
        with Noted():
            torch.autograd.grad(y.sum(), [x, *experts.values()])

    experts = {name: x.requires_grad_() for name, x in weights(4, 1)[0]["experts"].items()}
    experts = {name: x.chunk(2)[0] for name, x in experts.items()}
    fs.run(device, data()["x"].requires_grad_(), experts, mesh=fs.make_mesh({"expert": 2}))
    assert {"index_add", "index_select"} <= names
    assert not [name for name in names if "index_put" in name or "sort" in name]


def test_rows_of_two_devices_and_none_have_the_gradient_of_all_tokens():
    """A device has no token, another one a few: the table of counts has their rows in the order of
    the batch.
    """
    full = weights(4, 1)[0]
    sizes = [0, 5, 1, 10]
    x = data()["x"].requires_grad_()
    leaves = {name: w.requires_grad_() for name, w in full["experts"].items()}

    def results(attend, x, experts):
        y, stats = attend(x, route(x @ full["router"], 2), experts)
        grads = torch.autograd.grad(y.square().sum(), [x, *experts.values()])
        return y, stats, grads

    def device():
        index = fs.axis_index("expert")
        mine = x.split(sizes)[index].detach().requires_grad_()
        experts = {name: w[index][None].detach().requires_grad_() for name, w in leaves.items()}
        return results(partial(moe, axis="expert", capacity=1.0), mine, experts)

    y, stats, grads = results(partial(moe, capacity=1.0), x, leaves)
    devices = fs.run(device, mesh=fs.make_mesh({"expert": 4}))
    torch.testing.assert_close(torch.cat([y for y, *_ in devices]), y)
    for _, own, _ in devices:
        assert torch.equal(own.load, stats.load) and torch.equal(own.dropped, stats.dropped)
    own_grads = zip(*(grads for *_, grads in devices), strict=True)
    for own, expected in zip(map(torch.cat, own_grads), grads, strict=True):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("counts", [[2, 0, 4, 1], [0, 0, 0, 0], [0, 0, 0, 7]])
def test_grouped_kernel_has_the_products_of_the_loop(counts, monkeypatch):
    """By torch's operation on a CPU, with offsets on the device of the rows."""
    rows = torch.randn(sum(counts), 16).bfloat16()
    matrices = torch.randn(4, 16, 8).bfloat16()
    expected = grouped_matmul(rows, matrices, counts)
    monkeypatch.setattr(grouped, "_has_grouped_kernel", lambda *args: True)
    torch.testing.assert_close(grouped_matmul(rows, matrices, counts), expected)
