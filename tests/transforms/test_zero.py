"""ZeRO as a table of layouts: every stage, on every mesh, trains as one device does."""

from fractions import Fraction
from functools import cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten, map_leaves
from fshard.testing import gpt

STAGES = (0, 1, 2, 3)


def placed(params, stage, mesh):
    """Shard parameters; small units stay apart where leaves of blocks are."""
    has_blocks = isinstance(params, dict) and "blocks" in params
    rules = fs.fsdp("data", unit="blocks[*]" if has_blocks else 1)
    return fs.shard_params(params, rules if stage == 3 else P(), mesh=mesh)


def optimizer(stage, mesh, opt=None):
    return fs.partition_optimizer(opt or fs.optim.adamw(3e-3, fused=False), mesh=mesh, axis="data", stage=stage)


def leaves_of(tree):
    return flatten(fs.unshard(tree))[0]


def train(mesh, stage, loss_fn=gpt.loss_fn, steps=4, params=None, opt=None, **options):
    torch.manual_seed(7)
    opt = optimizer(stage, mesh, opt)
    params = placed(params or gpt.init(), stage, mesh)
    state = opt.init(params)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), **options)
    losses = []
    for turn in range(steps):
        params, state, metrics = step(params, state, gpt.batch(seed=turn))
        losses.append(metrics["loss"].item())
    return losses, leaves_of(params)


@cache
def serial(loss_fn, steps=4, dtype=torch.float32):
    leaves, structure = flatten(gpt.init(dtype=dtype))
    leaves = [x.clone().requires_grad_() for x in leaves]
    opt = torch.optim.AdamW(leaves, 3e-3)
    losses = []
    for turn in range(steps):
        opt.zero_grad()
        loss = loss_fn(structure.unflatten(leaves), gpt.batch(seed=turn))
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, [x.detach() for x in leaves]


def distance(xs, ys):
    return max((x.double() - y.double()).abs().max().item() for x, y in zip(xs, ys, strict=True))


# -- transparency -------------------------------------------------------------------------------------------------


def within_four_times_the_error_of_one_device(found, steps):
    """Hold trained (losses, params) to float64; the bound is what torch itself is off on one device."""
    exact_losses, exact = serial(gpt.without_dropout, steps, dtype=torch.float64)
    _, params = serial(gpt.without_dropout, steps)
    bound = 4 * distance(params, exact)
    assert 0 < bound < 1e-4
    for losses, ours in found:
        assert distance(ours, exact) <= bound
        assert max(abs(a - b) for a, b in zip(losses, exact_losses, strict=True)) <= 1e-5


@pytest.mark.parametrize(("stage", "n"), [(0, 8), (1, 4), (2, 8), (3, 2), (3, 8)])
def test_every_zero_stage_trains_as_torch(stage, n):
    found = train(fs.make_mesh({"data": n}), stage, gpt.without_dropout, steps=10)
    within_four_times_the_error_of_one_device([found], 10)


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"live_units": 1},
        {"live_units": 5},
        {"prefetch": 0},
        {"prefetch": 3},
        {"donate": True},
    ],
    ids=str,
)
def test_live_units_and_reshard_leave_bits_unchanged(options):
    mesh = fs.make_mesh({"data": 2})
    losses, params = train(mesh, 3)
    others, again = train(mesh, 3, **options)
    assert losses == others and all(map(torch.equal, params, again))


class Pair(NamedTuple):
    left: torch.Tensor
    right: list


@st.composite
def trees(draw):
    """Parameters in containers of all kinds, of odd shapes, some of them not used."""
    shape = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    leaf = st.builds(
        lambda shape, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)), shape, st.integers(0, 99)
    )
    leaf = leaf | leaf.map(lambda x: x.double()) | leaf.map(lambda x: x.T if x.ndim == 2 else x)
    tree = st.recursive(
        leaf,
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, min_size=1)
        ),
    )
    return Pair(draw(leaf), [draw(tree), {"n": draw(tree)}])


def any_loss(params, batch):
    """Use two of three leaves, and a leaf twice."""
    total = batch["x"].mean() * 0
    for place, leaf in enumerate(flatten(params)[0]):
        if place % 3 != 2:
            total = (
                total + (torch.sin(leaf * 1.5) * batch["x"].mean()).sum().float() + (leaf * leaf).sum().float() * 0.1
            )
    return total


@settings(max_examples=30)
@given(params=trees(), n=st.sampled_from([1, 2, 4]), stage=st.sampled_from(STAGES), accumulate=st.sampled_from([1, 2]))
def test_any_tree_has_gradient_of_one_device(params, n, stage, accumulate):
    mesh = fs.make_mesh({"data": n})
    x = torch.arange(8.0) / 8
    leaves, structure = flatten(params)
    serial = [leaf.clone().requires_grad_() for leaf in leaves]
    loss = any_loss(structure.unflatten(serial), {"x": x})
    expected = torch.autograd.grad(loss, serial, allow_unused=True)
    gradients = optimizer(stage, mesh).gradients
    run = fs.value_and_grad(any_loss, mesh=mesh, batch=P("data"), gradients=gradients, accumulate=accumulate)
    ours, grads = run(placed(params, stage, mesh), {"x": x})
    torch.testing.assert_close(ours, loss.detach(), rtol=1e-5, atol=1e-5)
    found = flatten(grads, none_is_leaf=True)[0]
    for own, g in zip(found, expected, strict=True):
        assert (own is None) == (g is None)
        if g is not None:
            torch.testing.assert_close(fs.unshard(own), g, rtol=1e-4, atol=1e-5)


# -- reproducible mode ---------------------------------------------------------------------------------------------


def reproducible(sizes, stages, steps):
    found = [train(fs.make_mesh({"data": n}), stage, steps=steps, reproducible=True) for n in sizes for stage in stages]
    return [(losses, [x.sum().item() for x in params], params) for losses, params in found]


def test_reproducible_bits_are_equal_on_all_meshes_and_stages():
    (losses, _, params), *others = reproducible((1, 2, 4, 8), STAGES, 10)
    assert losses[0] > losses[-1]
    for other, _, again in others:
        assert other == losses and all(map(torch.equal, params, again))


@pytest.mark.parametrize(
    "opt", [fs.optim.adamw(3e-3), fs.optim.sgd(0.1, momentum=0.9), fs.optim.lion(1e-3)], ids=["adamw", "sgd", "lion"]
)
def test_reproducible_step_avoids_alignment_dependent_kernels(opt):
    found = [train(fs.make_mesh({"data": n}), stage, opt=opt, reproducible=True) for n in (1, 4, 8) for stage in (1, 3)]
    assert all(losses == found[0][0] and all(map(torch.equal, params, found[0][1])) for losses, params in found)


def test_reproducible_bits_are_equal_for_any_accumulation():
    losses, params = train(fs.make_mesh({"data": 2}), 2, reproducible=True)
    others, again = train(fs.make_mesh({"data": 2}), 2, reproducible=True, accumulate=2)
    assert losses == others and all(map(torch.equal, params, again))


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"compute": torch.bfloat16},
        {"precision": "bf16", "reduce": torch.float64},
    ],
    ids=str,
)
def test_reproducible_bits_are_equal_in_low_precision(options):
    opt = fs.optim.loss_scaled(fs.optim.adamw(3e-3))
    found = [
        train(fs.make_mesh({"data": n}), stage, opt=opt, reproducible=True, **options)
        for n in (1, 2, 4, 8)
        for stage in (0, 2, 3)
    ]
    assert found[0][0][0] > found[0][0][-1]
    assert all(losses == found[0][0] and all(map(torch.equal, params, found[0][1])) for losses, params in found)


def test_reproducible_bits_are_equal_for_low_precision_parameters():
    params, xs = {"w": torch.randn(5, 7).bfloat16(), "v": torch.randn(7, 3)}, torch.randn(8, 5)

    def gradients(n, stage):
        mesh = fs.make_mesh({"data": n})
        run = fs.grad(
            lambda p, x: (torch.tanh(x.bfloat16() @ p["w"]).float() @ p["v"]).square().mean(),
            mesh=mesh,
            batch=P("data"),
            reproducible=True,
            gradients=optimizer(stage, mesh).gradients,
        )
        return leaves_of(run(placed(params, stage, mesh), xs))

    expected = gradients(1, 0)
    for n in (2, 4, 8):
        for stage in STAGES:
            assert all(map(torch.equal, expected, gradients(n, stage)))


def by_view(w, x):
    v = w.T
    return torch.tanh(x @ v) @ v


USES = {
    "plain": lambda w, x: torch.tanh(x @ w),
    "a view, twice": by_view,
    "marked": fs.with_unsharded_params(lambda w, x: torch.tanh(x @ w).sin() @ w),
    "rematerialised": fs.remat(lambda w, x: torch.tanh(x @ w) @ w),
    "torch.func": lambda w, x: torch.func.vmap(lambda row, w: (w @ row).tanh(), (0, None))(x, w),
}


@settings(max_examples=40)
@given(
    uses=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(sorted(USES))), min_size=3, max_size=9),
    n=st.sampled_from([1, 2, 4]),
    live_units=st.integers(1, 2),
    options=st.sampled_from([{}, {"compute": torch.bfloat16}, {"accumulate": 2}, {"reshard_after_forward": False}]),
)
def test_reproducible_bits_are_equal_for_repeated_uses(uses, n, live_units, options):
    n = 2 if "accumulate" in options else n
    generator = torch.Generator().manual_seed(1)
    params = [torch.randn(8, 8, generator=generator) / 3 for _ in range(3)]
    xs = torch.randn(8, 8, generator=generator)

    def loss_fn(p, x):
        for place, how in uses:
            x = USES[how](p[place], x)
        return x.square().mean()

    def gradients(n, stage, **options):
        run = fs.grad(loss_fn, mesh=fs.make_mesh({"data": n}), batch=P("data"), reproducible=True, slices=4, **options)
        found = flatten(run(placed(params, stage, fs.make_mesh({"data": n})), xs), none_is_leaf=True)[0]
        return [None if g is None else fs.unshard(g) for g in found]

    compute = {key: x for key, x in options.items() if key == "compute"}
    for ours, g in zip(gradients(n, 3, live_units=live_units, **options), gradients(1, 0, **compute), strict=True):
        assert (ours is None) == (g is None)
        assert g is None or torch.equal(ours, g)


@pytest.mark.parametrize("options", [{}, {"weight": lambda x: 100 * len(x)}, {"accumulate": 2}])
@pytest.mark.parametrize(("dtype", "compute"), [(torch.float16, None), (torch.float32, torch.float16)], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_reproducible_batch_sums_do_not_overflow(stage, dtype, compute, options):
    """The gradient fits into 16 bits, the sum over all samples that it is the mean of does not."""
    mesh, x = fs.make_mesh({"data": 2}), torch.full((64, 4), 5000.0, dtype=torch.float16)
    run = fs.grad(
        lambda p, x: (p["w"] * x).sum(1).mean(),
        mesh=mesh,
        batch=P("data"),
        gradients=optimizer(stage, mesh).gradients,
        compute=compute,
        reproducible=True,
        slices=4,
        **options,
    )
    g = fs.unshard(run(placed({"w": torch.ones(4, dtype=dtype)}, stage, mesh), x)["w"])
    assert g.dtype == dtype and torch.equal(g, torch.full((4,), 5000.0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reproducible_low_precision_reduction_raises(dtype):
    with pytest.raises(ValueError, match=f"reduce={dtype}: sums in 16 bits are rounded differently"):
        fs.grad(lambda p, x: x.mean(), mesh=fs.make_mesh({"data": 2}), batch=P("data"), reproducible=True, reduce=dtype)


def on_processes(n, steps):
    return [train(fs.make_mesh({"data": n}), stage, steps=steps, reproducible=True) for stage in STAGES]


def test_reproducible_bits_are_equal_on_processes(two, four):
    losses, params = train(fs.make_mesh({"data": 1}), 0, steps=10, reproducible=True)
    for found in (*two.run(on_processes, 2, 10), *four.run(on_processes, 4, 10)):
        for other, again in found:
            assert other == losses and all(map(torch.equal, params, again))


def with_threads(count):
    """Take a step on sums that torch cuts among its threads."""
    torch.set_num_threads(count)
    torch.manual_seed(0)  # other tests may have left each process with a state of its own, which the step refuses
    try:
        generator = torch.Generator().manual_seed(0)
        params = {"w": torch.randn(512, 512, generator=generator) / 20, "b": torch.randn(512, generator=generator)}
        mesh = fs.make_mesh({"data": 2})
        own = placed(params, 3, mesh)

        def loss_fn(p, x):
            for _ in range(3):
                x = torch.nn.functional.layer_norm(torch.tanh(x @ p["w"] + p["b"]), (512,))
            return x.square().mean()

        opt = optimizer(3, mesh, fs.optim.adamw(1e-2))
        step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), reproducible=True, slices=4)
        own, _, metrics = step(own, opt.init(own), torch.randn(1024, 512, generator=generator))
        after = torch.get_num_threads()
        return after, [metrics["loss"], metrics["grad_norm"], *leaves_of(own)]
    finally:
        torch.set_num_threads(1)


def test_reproducible_bits_are_equal_for_any_thread_count(two):
    expected = with_threads(1)[1]
    for count in (1, 3):
        for after, found in two.run(with_threads, count):
            assert after == count and all(map(torch.equal, found, expected))


def test_dropout_differs_by_device_and_step_only():
    def loss_fn(params, batch):
        return (torch.nn.functional.dropout(torch.ones(64)) * params["w"] * batch.mean()).sum()

    mesh = fs.make_mesh({"data": 2})
    params = placed({"w": torch.ones(64)}, 0, mesh)
    run = fs.value_and_grad(
        loss_fn, mesh=mesh, batch=P("data"), gradients=lambda layout: fs.Layout(mesh, P(unreduced="data"))
    )

    def masks():
        torch.manual_seed(3)
        return [[shard.clone() for shard in run(params, torch.ones(2))[1]["w"].shards] for _ in range(2)]

    (first, second), (third, fourth) = masks()
    assert not torch.equal(first, second) and not torch.equal(first, third) and not torch.equal(third, fourth)
    again = masks()
    assert torch.equal(again[0][0], first) and torch.equal(again[1][1], fourth)


# -- what is sent, and what is held -----------------------------------------------------------------------------------


def sent_per_step(stage, n, **options):
    mesh = fs.make_mesh({"data": n})
    params = {"blocks": [{"w": torch.ones(8, 16), "b": torch.ones(16)} for _ in range(4)]}

    def loss_fn(params, batch):
        x = batch
        for w in params["blocks"]:
            x = torch.tanh(x @ w["w"] + w["b"])[:, :8]
        return x.mean()

    own, opt = placed(params, stage, mesh), optimizer(stage, mesh)
    state = opt.init(own)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), **options)
    with fs.ledger() as comm:
        step(own, state, torch.ones(8, 8))
    size = sum(x.nbytes for x in flatten(params)[0])
    numbers = comm.bytes(collective="psum") if stage else Fraction(0)  # the loss, the norm, and what was used
    if stage == 0:
        numbers = comm.bytes() - Fraction(2 * (n - 1) * size, n)
    assert numbers < 400
    return (comm.bytes() - numbers) / size


@pytest.mark.parametrize("n", [2, 4])
def test_ledger_bytes_equal_theory(n):
    part = Fraction(n - 1, n)
    assert [sent_per_step(stage, n) for stage in (0, 1, 2)] == [2 * part] * 3
    # The last block is still there when the backward begins, and the first is not needed: its input has no gradient.
    assert sent_per_step(3, n, live_units=1) == 3 * part - 2 * part / 4
    assert sent_per_step(3, n, reshard_after_forward=False) == 2 * part
    assert sent_per_step(2, n, accumulate=2) == 3 * part
    assert sent_per_step(2, n, accumulate=2, reduce_once=True) == 2 * part


def reductions(stage, **options):
    """Return the calls that reduce gradients, and the gradients: of 8 blocks of 4 KiB."""
    mesh = fs.make_mesh({"data": 2})
    params = {"blocks": [{"w": torch.randn(32, 31), "b": torch.randn(32)} for _ in range(8)]}

    def loss_fn(params, x):
        for w in params["blocks"]:
            x = torch.tanh(x[:, :31] @ w["w"].T + w["b"])
        return x.square().mean()

    run = fs.value_and_grad(
        loss_fn, mesh=mesh, batch=P("data"), gradients=optimizer(stage, mesh).gradients, reduce_once=False, **options
    )
    own = placed(params, stage, mesh)
    with fs.ledger() as comm:
        _, grads = run(own, torch.randn(4, 32))
    others = 0 if stage else 2  # of means, and in a first step of the turns that units take
    return comm.calls(collective="psum_scatter" if stage else "psum") - others, leaves_of(grads)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_reduced_in_buckets_of_given_size(stage):
    def found(**options):
        torch.manual_seed(0)
        return reductions(stage, **options)

    calls, grads = found(bucket=0)
    assert calls == 8
    sizes = {1: 8, 4096: 8, 4097: 4, 3 * 4096: 3, 1 << 30: 1}
    for bucket, expected in sizes.items():
        calls, again = found(bucket=bucket)
        assert calls == (expected if stage < 3 else 8) and all(map(torch.equal, grads, again))
    assert found(bucket=3 * 4096, accumulate=2)[0] == (6 if stage < 3 else 16)
    assert found()[0] == (1 if stage < 3 else 8)


def planned(runtime, n, stage, device):
    mesh = fs.make_mesh({"data": n}, runtime=runtime)
    params = {
        "blocks": [{"w": torch.ones(16, 16, device=device), "b": torch.ones(16, device=device)} for _ in range(3)]
    }

    def loss_fn(params, batch):
        for w in params["blocks"]:
            batch = torch.tanh(batch @ w["w"] + w["b"])
        return batch.mean()

    opt, own = optimizer(stage, mesh), placed(params, stage, mesh)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), accumulate=2)
    with fs.ledger() as comm:
        step(own, opt.init(own), torch.ones(4 * n, 16, device=device))
    return [(row.collective, row.axes, row.site.function, calls, sent) for row, calls, sent in comm.rows()]


@pytest.mark.parametrize("stage", STAGES)
def test_abstract_mesh_sends_the_same_bytes(stage):
    assert planned("abstract", 4, stage, "meta") == planned("virtual", 4, stage, "cpu")
    assert planned("abstract", 4096, stage, "meta")


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_device_memory_equals_theory(stage, n):
    mesh = fs.make_mesh({"data": n})
    params = {"w": torch.ones(64, 3), "b": torch.ones(32)}
    opt = optimizer(stage, mesh)
    own = placed(params, stage, mesh)
    state = opt.init(own)
    count = 64 * 3 + 32

    def held(tree):
        return [
            sum(x.shards[device].numel() for x in flatten(tree)[0] if isinstance(x, fs.Sharded) and x.ndim)
            for device in range(n)
        ]

    assert held(own) == [count // n if stage == 3 else count] * n
    assert held(state) == [2 * (count if stage == 0 else count // n)] * n


# -- purity, donation, frozen and unused leaves ------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_step_leaves_its_arguments_unchanged(stage):
    mesh = fs.make_mesh({"data": 2})
    opt, params = optimizer(stage, mesh), placed(gpt.init(), stage, mesh)
    state = opt.init(params)
    before = [x.clone() for x in flatten((params, state))[0]]
    fs.train_step(gpt.loss_fn, opt, mesh=mesh, batch=P("data"))(params, state, gpt.batch())
    assert all(map(torch.equal, before, flatten((params, state))[0]))


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_integer_and_unused_leaves_stay_unchanged(stage):
    mesh = fs.make_mesh({"data": 2})
    params = {
        "w": torch.ones(3),
        "fixed": torch.ones(3),
        "unused": torch.ones(2),
        "count": torch.arange(3),
        "empty": torch.ones(0),
    }

    def loss_fn(p, x):
        return ((p["w"] * p["fixed"]).sum() + p["count"].sum() + p["empty"].sum()) * x.mean()

    opt = optimizer(stage, mesh, fs.optim.sgd(1.0))
    own = placed(params, stage, mesh)
    state = opt.init(own)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), frozen=lambda path: path == "fixed")
    new, state, _ = step(own, state, torch.ones(2))
    new = fs.unshard(new)
    assert torch.equal(new["w"], torch.zeros(3))
    assert all(torch.equal(new[name], params[name]) for name in params if name != "w")
    _, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), frozen=lambda path: path == "fixed")(
        own, torch.ones(2)
    )
    assert [name for name in params if grads[name] is None] == ["fixed", "unused", "count"]


def test_leaf_used_on_one_device_has_gradient_everywhere():
    mesh = fs.make_mesh({"data": 2})

    def loss_fn(p, x):
        return p["a"].sum() * x.mean() + (p["b"].sum() if x.mean() > 0.5 else 0.0)

    own = fs.shard_params({"a": torch.ones(2), "b": torch.ones(2)}, lambda path, leaf: P(), mesh=mesh)
    own = map_leaves(lambda x: fs.Sharded(x.shape, fs.Layout(mesh, P(), unit="all"), x.shards), own)
    _, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))(own, torch.tensor([0.0, 1.0]))
    assert fs.unshard(grads)["b"].tolist() == [0.5, 0.5]


# -- means ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_are_weighted_by_weight(accumulate):
    mesh = fs.make_mesh({"data": 2})
    batch = {"x": torch.randn(8, 3), "mask": torch.tensor([1, 1, 1, 0, 1, 0, 1, 1.0])}

    def loss_fn(w, batch):
        each = (batch["x"] @ w).square()
        return (each * batch["mask"]).sum() / batch["mask"].sum()

    w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    loss = loss_fn(w, batch)
    loss.backward()
    run = fs.value_and_grad(
        loss_fn, mesh=mesh, batch=P("data"), weight=lambda batch: batch["mask"].sum(), accumulate=accumulate
    )
    ours, grads = run(fs.shard_params(w, fs.fsdp("data"), mesh=mesh), batch)
    torch.testing.assert_close(ours, loss.detach())
    torch.testing.assert_close(fs.unshard(grads), w.grad)


@settings(max_examples=40)
@given(
    mask=st.lists(st.integers(0, 1), min_size=8, max_size=8).filter(any),
    stage=st.sampled_from((0, 3)),
    options=st.sampled_from(
        [{}, {"accumulate": 2}, {"accumulate": 2, "reduce_once": False}, {"reproducible": True, "slices": 4}]
    ),
)
def test_slice_of_weight_zero_with_nan_adds_nothing(mask, stage, options):
    mesh = fs.make_mesh({"data": 2})
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = {"x": x, "mask": torch.tensor(mask).double()}

    def loss_fn(params, batch):
        loss = ((batch["x"] @ params["w"]).square() * batch["mask"]).sum() / batch["mask"].sum()
        return loss, {"twice": 2 * loss}

    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    loss, _ = loss_fn({"w": w}, batch)
    loss.backward()
    own = placed({"w": w.detach()}, stage, mesh)
    run = fs.value_and_grad(
        loss_fn, mesh=mesh, batch=P("data"), has_aux=True, weight=lambda batch: batch["mask"].sum(), **options
    )
    (ours, aux), grads = run(own, batch)
    torch.testing.assert_close(
        [ours, aux["twice"], fs.unshard(grads)["w"]], [loss, 2 * loss, w.grad], check_dtype=False
    )


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"reproducible": True, "slices": 4}], ids=str)
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.0] * 4, "weight= gave 0 for all of the batch"),
        ([1.0, 2.0, -1.0, -1.0], "weight= must return finite numbers of at least 0; got "),
        ([float("nan"), 1.0, 1.0, 1.0], "of at least 0; got nan"),
        ([1.0, float("inf"), 1.0, 1.0], "of at least 0; got inf"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", [0, 3])
def test_batch_of_weight_zero_raises(stage, weights, message, options):
    mesh = fs.make_mesh({"data": 2})
    opt, params = optimizer(stage, mesh), placed({"w": torch.ones(3)}, stage, mesh)

    def loss_fn(p, batch):
        return (p["w"] * batch["x"]).mean()

    step = fs.train_step(
        loss_fn,
        opt,
        mesh=mesh,
        batch=P("data"),
        weight=lambda part: part["w"].amax() + part["w"].amin(),
        donate=True,
        **options,
    )
    with pytest.raises(ValueError, match=message):
        step(params, opt.init(params), {"x": torch.ones(4, 3), "w": torch.tensor(weights)})
    assert torch.equal(fs.unshard(params["w"]), torch.ones(3))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_aux_values_are_averaged(accumulate):
    mesh = fs.make_mesh({"data": 2})
    own = fs.shard_params({"w": torch.ones(2)}, P(), mesh=mesh)

    def loss_fn(p, x):
        return (p["w"].sum() * x).mean(), {"mean": x.mean(), "both": [x.mean(), -x.mean()]}

    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), has_aux=True, accumulate=accumulate)
    (loss, aux), _ = run(own, torch.arange(4.0))
    assert (loss.item(), aux["mean"].item(), [x.item() for x in aux["both"]]) == (3.0, 1.5, [1.5, -1.5])


def test_replicated_batch_leaf_is_in_every_slice():
    mesh = fs.make_mesh({"data": 2})
    own = fs.shard_params({"w": torch.ones(3)}, P(), mesh=mesh)
    batch = {"x": torch.arange(4.0), "bias": torch.arange(3.0), "scale": torch.tensor(2.0), "name": "what is no tensor"}

    def loss_fn(p, batch):
        return ((p["w"] + batch["bias"]).sum() * batch["x"] * batch["scale"]).mean()

    specs = {"x": P("data"), "bias": P(), "scale": P(), "name": None}
    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=specs, accumulate=2)
    loss, grads = run(own, batch)
    assert loss.item() == 6 * 1.5 * 2 and fs.unshard(grads)["w"].tolist() == [3.0] * 3


# -- precision -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_half_precision_computes_low_and_keeps_masters(stage, precision):
    seen = set()

    def loss_fn(params, batch):
        loss = gpt.without_dropout(params, batch)
        seen.add((params["embedding"].dtype, loss.dtype))
        return loss

    opt = fs.optim.loss_scaled(fs.optim.adamw(3e-3, fused=False), initial=256.0)
    losses, params = train(fs.make_mesh({"data": 2}), stage, loss_fn, opt=opt, precision=precision)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert seen == {(half, half)} and all(x.dtype == torch.float32 for x in params)
    exact_losses, exact = serial(gpt.without_dropout)
    assert max(abs(a - b) for a, b in zip(losses, exact_losses, strict=True)) < 0.05
    assert distance(params, exact) < 4 * 3e-3


def test_overflow_on_one_device_is_skipped_by_all():
    mesh = fs.make_mesh({"data": 2})
    opt = fs.partition_optimizer(
        fs.optim.loss_scaled(fs.optim.sgd(1.0), initial=2.0**14, interval=2), mesh=mesh, axis="data", stage=2
    )
    params = fs.shard_params({"w": torch.ones(4)}, P(), mesh=mesh)
    state = opt.init(params)
    step = fs.train_step(lambda p, x: (p["w"].sum() * x).mean(), opt, mesh=mesh, batch=P("data"), precision="fp16")
    found = []
    for x in ([0.5, 10.0], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]):
        params, state, metrics = step(params, state, torch.tensor(x))
        found.append((state["scale"].item(), fs.unshard(params["w"])[0].item(), bool(metrics["finite"])))
    assert found == [(2.0**13, 1.0, False), (2.0**13, 0.5, True), (2.0**14, 0.0, True), (2.0**14, -0.5, True)]
    assert state["skipped"] == 1
    with pytest.raises(ValueError, match="needs a scaled loss"):
        fs.train_step(lambda p, x: x, optimizer(0, mesh), mesh=mesh, batch=P("data"), precision="fp16")


# -- handles ---------------------------------------------------------------------------------------------------------------


def test_torch_func_works_in_unsharded_part():
    mesh = fs.make_mesh({"data": 2})
    w, xs = torch.randn(3, 3), torch.randn(4, 3)

    def per_sample(p, xs):
        one = torch.func.grad(lambda w, x: torch.tanh(w @ x).sum())
        return torch.func.vmap(one, in_dims=(None, 0))(p["w"], xs).square().sum((1, 2)).mean()

    per_sample = fs.with_unsharded_params(per_sample, keep=True)
    reference = w.clone().requires_grad_()
    expected = torch.autograd.grad(per_sample({"w": reference}, xs), reference)[0]
    _, grads = fs.value_and_grad(per_sample, mesh=mesh, batch=P("data"))(
        fs.shard_params({"w": w}, fs.fsdp("data"), mesh=mesh), xs
    )
    torch.testing.assert_close(fs.unshard(grads)["w"], expected)


def test_gradient_penalty_flows_through_unsharded_parameters():
    mesh = fs.make_mesh({"data": 2})
    params = {"blocks": [{"w": torch.randn(3, 3)} for _ in range(4)]}
    xs = torch.randn(4, 3)

    def loss_fn(p, x):
        x = x.clone().requires_grad_()
        y = x
        for w in p["blocks"]:
            y = torch.tanh(y @ w["w"])
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return g.square().sum(1).mean()

    leaves, structure = flatten(params)
    serial = [x.clone().requires_grad_() for x in leaves]
    expected = torch.autograd.grad(loss_fn(structure.unflatten(serial), xs), serial)
    own = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
    _, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), live_units=1)(own, xs)
    for ours, g in zip(leaves_of(grads), expected, strict=True):
        torch.testing.assert_close(ours, g)


# -- errors ------------------------------------------------------------------------------------------------------------------


def test_invalid_calls_raise_and_name_the_error():
    mesh = fs.make_mesh({"data": 2})
    own = fs.shard_params({"w": torch.ones(2)}, P(), mesh=mesh)
    run = fs.value_and_grad(lambda p, x: p["w"] * x.mean(), mesh=mesh, batch=P("data"))
    with pytest.raises(ValueError, match=r"return one number, .*for each sample; got a tensor of shape \(2,\)"):
        run(own, torch.ones(2))
    with pytest.raises(ValueError, match="w is Tensor. Put the parameters on that mesh"):
        run({"w": torch.ones(2)}, torch.ones(2))
    with pytest.raises(
        ValueError,
        match="accumulate must be an integer >= 1, got 0; prefetch must be an integer >= 0, got -1",
    ):
        fs.value_and_grad(lambda p, x: x, mesh=mesh, batch=P("data"), accumulate=0, prefetch=-1)
    with pytest.raises(ValueError, match="cuts the batch into 3 slices, which 2 devices do not share"):
        fs.grad(lambda p, x: (p["w"] * x).mean(), mesh=mesh, batch=P("data"), reproducible=True, slices=3)(
            own, torch.ones(2)
        )
    with pytest.raises(fs.optim.OptimizerError, match="stage must be 0, 1, 2 or 3, as in ZeRO; got 4"):
        fs.partition_optimizer(fs.optim.sgd(1.0), mesh=mesh, axis="data", stage=4)


@pytest.mark.parametrize(("n", "live_units", "compute"), [(1, 1, torch.bfloat16), (2, 1, None), (2, 2, torch.bfloat16)])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_inplace_parameter_write_in_loss_raises(stage, recorded, n, live_units, compute):
    def loss_fn(p, x):
        with torch.set_grad_enabled(recorded):
            p[0]["w"].add_(1.0)
            p[2]["v"].mul_(2.0)
        for own in p:
            x = x @ own["w"] + own["v"]
        return x.mean()

    mesh = fs.make_mesh({"data": n})
    opt = optimizer(stage, mesh)
    params = placed([{"w": torch.eye(2), "v": torch.zeros(2)} for _ in range(3)], stage, mesh)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), live_units=live_units, compute=compute)
    with pytest.raises(fs.errors.ModuleError, match=r"writes to a parameter in place: 0\.w\. "):
        step(params, opt.init(params), torch.ones(2, 2))


def returned(*given):
    return lambda p, x: given if len(given) > 1 else given[0]


def called(loss_fn=lambda p, x: (x * p["w"]).mean(), batch=None, opt=None, **options):
    mesh = fs.make_mesh({"data": 2})
    opt = opt or optimizer(0, mesh)
    params = placed({"w": torch.ones(2)}, 0, mesh)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), **options)
    return step(params, opt.init(params), torch.ones(4, 2) if batch is None else batch)


def kept_from(stage):
    mesh, kept = fs.make_mesh({"data": 2}), []
    params = placed({"w": torch.ones(2)}, stage, mesh)
    fs.grad(lambda p, x: kept.append(p["w"]) or (p["w"] * x).mean(), mesh=mesh, batch=P("data"))(
        params, torch.ones(4, 2)
    )
    return kept[0]


SGD = torch.optim.SGD([torch.ones(1)], lr=0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: called(acumulate=2, wieght=3), "train_step has no option acumulate, wieght. .*weight, accumulate"),
        (
            lambda: called(accumulate=2.0, prefetch=0.5),
            "accumulate must be an integer >= 1, got 2.0; prefetch must be an integer >= 0, got 0.5",
        ),
        (
            lambda: called(weight=lambda x: torch.ones(3)),
            r"weight= must return one number .*got a tensor of shape \(3,\)",
        ),
        (lambda: called(has_aux=True), r"must return \(loss, aux\); got a Tensor"),
        (lambda: called(returned(torch.ones(()), {})), "one number, .*got tuple. Give has_aux=True"),
        (lambda: called(lambda p, x: p["w"].sum() * 1j), "a number of torch.complex64, which has no gradient"),
        (
            lambda: called(batch={"x": torch.ones(4, 2).numpy()}),
            r'batch: \["x"\]: a ndarray is not sharded. Write torch.as_tensor',
        ),
        (lambda: called(opt=SGD), r"train_step: SGD is no pair of init and update. .*fs.optim.from_torch"),
        (lambda: called(lambda p, x: (x * p["w"]).mean().detach()), "depends on no parameter that is trained"),
        (lambda: called(lambda p, x: x.mean()), r"value_and_grad: the loss depends on no parameter that is trained"),
        (lambda: kept_from(3) + 1, "w is a parameter of a step that is over"),
    ],
)
def test_common_mistakes_raise_one_clear_error(call, message):
    with pytest.raises((fs.errors.FshardError, ValueError, TypeError), match=message):
        call()


# -- rules ---------------------------------------------------------------------------------------------------------------------

TREE = {"emb": torch.ones(4, 4), "blocks": [{"w": torch.ones(4, 4), "b": torch.ones(4)} for _ in range(2)]}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("distant", [{"state"}, {"params", "state", "batch"}], ids=sorted)
@pytest.mark.parametrize("made", ["outside", "inside"])
def test_arrays_sharded_elsewhere_raise_by_name(stage, distant, made):
    mesh = fs.make_mesh({"data": 2})
    opt = optimizer(stage, mesh, fs.optim.adamw(1e-3))
    step = fs.train_step(lambda p, x: (p["w"] * x).mean(), opt, mesh=mesh, batch=P("data"))

    def given():
        params = placed({"w": torch.ones(4)}, stage, mesh)
        return {
            "params": params,
            "state": opt.init(params),
            "batch": fs.device_put(torch.ones(4, 4), fs.Layout(mesh, P("data"))),
        }

    def mixed(far, near):
        return step(*({**near, **{name: far[name] for name in distant}}.values()))

    if made == "outside":
        far = given()
        with pytest.raises(ValueError) as error:
            fs.run(lambda: mixed(far, given()), mesh=mesh)
    else:
        far = fs.run(given, mesh=mesh)[0]
        with pytest.raises(ValueError) as error:
            mixed(far, given())
    message = str(error.value).split("\n")[0]
    where = "outside of fs.run and used inside" if made == "outside" else "inside of fs.run and used outside"
    assert f"sharded {where}: " in message
    assert {part.split(".")[0] for part in message.split(": ")[2].split(". ")[0].split(", ")} == distant


def test_step_inside_run_equals_step_outside():
    mesh = fs.make_mesh({"data": 2})

    def trained():
        opt = optimizer(3, mesh, fs.optim.adamw(1e-2))
        params = placed({"w": torch.arange(6.0)}, 3, mesh)
        step = fs.train_step(lambda p, x: (p["w"] * x).sum(1).mean(), opt, mesh=mesh, batch=P("data"))
        params, _, metrics = step(params, opt.init(params), torch.arange(24.0).reshape(4, 6))
        return fs.unshard(params["w"]), metrics["loss"]

    assert all(map(torch.equal, xs, trained()) for xs in fs.run(trained, mesh=mesh))


def specs(rules):
    own = fs.shard_params(TREE, rules, mesh=fs.make_mesh({"data": 2, "model": 2}))
    return map_leaves(lambda x: x.spec, own)


def test_rules_of_every_kind_give_equal_layouts():
    expected = {"emb": P("model"), "blocks": [{"w": P(None, "model"), "b": P()}] * 2}
    assert specs(expected) == expected
    assert specs({"emb": P("model"), "blocks[*].w": P(None, "model"), "**.b": P()}) == expected
    assert specs({"emb": P("model"), "blocks[*].w": P(None, "model"), "**": P()}) == expected
    assert specs(lambda path, x: {"emb": P("model"), "w": P(None, "model")}.get(path.rsplit(".")[-1], P())) == expected
    assert specs(P()) == {"emb": P(), "blocks": [{"w": P(), "b": P()}] * 2}
    assert specs(fs.fsdp(("data", "model"))) == {
        "emb": P.flat("data", "model"),
        "blocks": [{"w": P.flat("data", "model"), "b": P.flat("data", "model")}] * 2,
    }


def test_incomplete_rules_raise():
    with pytest.raises(ValueError) as error:
        specs({"emb": P("model"), "blocks[*].w": P(), "blocks[0].w": P("model"), "head.*": P()})
    assert str(error.value) == (
        'no leaf is for the rule "head.*"; no rule is for blocks[0].b; '
        '"blocks[*].w" (P()) and "blocks[0].w" (P("model")) disagree about blocks[0].w; no rule is for blocks[1].b. '
        'The leaves are blocks[0].b, blocks[0].w, blocks[1].b, blocks[1].w, emb; "**": P() replicates what no other rule is for.'
    )


def test_rules_with_errors_raise_all():
    with pytest.raises(fs.errors.MeshError) as error:
        specs({"emb": P("foo"), "blocks": P("bar")})
    lines = str(error.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "blocks[0].b, blocks[0].w, blocks[1].b, blocks[1].w", "emb",
    ]  # fmt: skip
    assert 'has no axis "bar"' in lines[1] and 'has no axis "foo"' in lines[2]
    params = {"a": torch.ones(3, 2), **dict.fromkeys("bcef", torch.ones(2)), "d": object()}
    rules = {"a": P(None, None, "data"), "b": P("foo"), "d": P(), "e": P(unreduced="data"), "**": P()}
    with pytest.raises(ValueError, match='frozen: no leaf is for "g"'):
        fs.shard_params(params, rules, mesh=fs.make_mesh({"data": 2}), frozen="g")
    with pytest.raises(ValueError) as error:
        fs.shard_params(params, rules, mesh=fs.make_mesh({"data": 2}))
    assert [line.split(":")[0].strip() for line in str(error.value).splitlines()] == [
        "shard_params", "a", "b", "d", "e",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no rule is for b"):
        fs.nn.init_params(lambda: {"a": torch.ones(2), "b": torch.ones(2)}, {"a": P()}, mesh=fs.make_mesh({"data": 2}))


def test_double_star_matches_the_remaining_leaves():
    w, rest = P(None, "model"), {"emb": P(), "blocks": [{"w": P(None, "model"), "b": P()}] * 2}
    assert specs({"**.w": w, "**": P()}) == specs({"**": P(), "**.w": w}) == rest
    assert specs({"blocks[*].w": w, "blocks.**": P(), "**": P("model")}) == {**rest, "emb": P("model")}
    with pytest.raises(ValueError, match="disagree about"):
        specs({"**.w": w, "blocks.**": P(), "**": P()})


def test_unreduced_parameter_layout_raises():
    with pytest.raises(ValueError, match=r'P\(unreduced="data"\) is a sum that is not made yet'):
        fs.shard_params({"w": torch.ones(2)}, P(unreduced="data"), mesh=fs.make_mesh({"data": 2}))


def test_units_may_be_blocks_sizes_or_patterns():
    def units(unit):
        own = fs.shard_params(TREE, fs.fsdp("data", unit=unit), mesh=fs.make_mesh({"data": 2}))
        return [x.layout.unit for x in flatten(own)[0]]

    assert units(None) == ["blocks[0]"] * 5
    assert units("blocks[*]") == ["blocks[0]", "blocks[0]", "blocks[1]", "blocks[1]", "emb"]
    assert units(80) == ["unit 0", "unit 0", "unit 1", "unit 1", "unit 2"]
    assert units("blocks") == ["blocks"] * 4 + ["emb"]
    assert units(["blocks", "blocks[1]", "*[*].b"]) == ["blocks[0].b", "blocks", "blocks[1].b", "blocks[1]", "emb"]
    with pytest.raises(ValueError, match=r'no leaf is in a unit "block" or "w"\. The leaves are blocks\[0\]\.b, '):
        units(["block", "emb", "w"])


def test_hybrid_sharding_shards_in_node_and_replicates_across():
    mesh = fs.make_mesh({"node": 2, "data": 2})
    own = fs.shard_params(gpt.init(), fs.fsdp("data"), mesh=mesh)
    run = fs.value_and_grad(gpt.without_dropout, mesh=mesh, batch=P(("node", "data")))
    _, grads = run(own, gpt.batch())
    leaves, structure = flatten(gpt.init())
    serial = [x.clone().requires_grad_() for x in leaves]
    expected = torch.autograd.grad(gpt.without_dropout(structure.unflatten(serial), gpt.batch()), serial)
    for ours, g in zip(leaves_of(grads), expected, strict=True):
        torch.testing.assert_close(ours, g, rtol=1e-4, atol=1e-6)


def test_tied_leaf_is_sharded_once():
    x = torch.ones(4)
    own = fs.shard_params({"a": x, "b": x, "c": x.clone()}, fs.fsdp("data"), mesh=fs.make_mesh({"data": 2}))
    assert own["a"] is own["b"] and own["a"] is not own["c"]


@pytest.mark.parametrize("stage", STAGES)
def test_tied_leaf_has_one_gradient_and_stays_tied(stage):
    mesh, x = fs.make_mesh({"data": 2}), torch.ones(3)
    opt = optimizer(stage, mesh, fs.optim.adamw(0.1, fused=False))
    own = placed({"a": x, "b": [x]}, stage, mesh)

    def loss_fn(p, batch):
        return (2 * p["a"].sum() + 3 * p["b"][0].sum()) * batch.mean()

    _, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), gradients=opt.gradients)(own, torch.ones(2))
    assert fs.unshard(grads)["a"].tolist() == [5.0] * 3 and grads["a"] is grads["b"][0]
    own, _, metrics = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"))(own, opt.init(own), torch.ones(2))
    assert own["a"] is own["b"][0]
    torch.testing.assert_close(metrics["grad_norm"].item(), 75**0.5)
    torch.testing.assert_close(fs.unshard(own)["a"], torch.full((3,), 0.9 - 0.001))


def test_tensor_sharded_parameters_train():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    params = {"w": torch.randn(4, 6), "v": torch.randn(6, 4)}
    rules = {"w": P(None, "model"), "v": P("model", "data")}
    xs = torch.randn(8, 4)

    def loss_fn(p, x):
        return (torch.tanh(x @ p["w"]) @ p["v"]).square().mean()

    leaves, structure = flatten(params)
    serial = [x.clone().requires_grad_() for x in leaves]
    expected = torch.autograd.grad(loss_fn(structure.unflatten(serial), xs), serial)
    _, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))(fs.shard_params(params, rules, mesh=mesh), xs)
    assert grads["w"].spec == P(None, "model") and grads["v"].spec == P("model", "data")
    for ours, g in zip(leaves_of(grads), expected, strict=True):
        torch.testing.assert_close(ours, g)
