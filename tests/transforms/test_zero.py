"""ZeRO as a table of layouts: every stage, on every mesh, trains as one device does."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten, map_leaves
from fshard.testing import gpt
from tests.transforms.helpers.placement import placed

STAGES = (0, 1, 2, 3)


def optimizer(stage, mesh, opt=None):
    return fs.partition_optimizer(
        opt or fs.optim.adamw(3e-3, fused=False), mesh=mesh, axis="data", stage=stage
    )


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


# -- reproducible mode ---------------------------------------------------------------------------------------------

SCALED = fs.optim.loss_scaled(fs.optim.adamw(3e-3))
REPRODUCIBLE = {
    "adamw": {},
    "sgd": {"opt": fs.optim.sgd(0.1, momentum=0.9)},
    "lion": {"opt": fs.optim.lion(1e-3)},
    "bf16": {"opt": SCALED, "precision": "bf16"},
    "fp16": {"opt": SCALED, "precision": "fp16"},
    "compute": {"compute": torch.bfloat16},
    "reduced in float64": {"opt": SCALED, "precision": "bf16", "reduce": torch.float64},
}


@pytest.mark.parametrize("name", REPRODUCIBLE)
def test_reproducible_bits_are_equal_on_all_meshes_and_stages(name):
    """With dropout; in two slices a device too."""
    options = {"reproducible": True, "steps": 3, **REPRODUCIBLE[name]}
    losses, params = train(fs.make_mesh({"data": 1}), 0, **options)
    assert len({*losses}) == 3
    for n, stage, more in (
        (8, 0, {}),
        (4, 1, {}),
        (2, 2, {"accumulate": 2, "slices": 8}),
        (1, 3, {}),
        (8, 3, {}),
    ):
        actual, again = train(fs.make_mesh({"data": n}), stage, **options, **more)
        assert actual == losses and all(map(torch.equal, params, again))


def step_with_threads(count):
    """Take a step on sums that torch cuts among its threads."""
    generator = torch.Generator().manual_seed(0)
    mesh = fs.make_mesh({"data": 2})
    params = {
        "w": torch.randn(512, 512, generator=generator) / 20,
        "b": torch.randn(512, generator=generator),
    }

    def loss_fn(p, x):
        for _ in range(3):
            x = torch.nn.functional.layer_norm(torch.tanh(x @ p["w"] + p["b"]), (512,))
        return x.square().mean()

    own = placed(params, 3, mesh)
    opt = optimizer(3, mesh, fs.optim.adamw(1e-2))
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), reproducible=True, slices=4)
    torch.set_num_threads(count)
    try:
        own, _, metrics = step(own, opt.init(own), torch.randn(1024, 512, generator=generator))
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(1)
    return [metrics["loss"], metrics["grad_norm"], *leaves_of(own)]


def test_reproducible_bits_are_equal_for_any_thread_count():
    assert all(map(torch.equal, step_with_threads(3), step_with_threads(1)))


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
    uses=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(sorted(USES))), min_size=3, max_size=9
    ),
    n=st.sampled_from([1, 2, 4]),
    live_units=st.integers(1, 2),
    options=st.sampled_from(
        [{}, {"compute": torch.bfloat16}, {"accumulate": 2}, {"reshard_after_forward": False}]
    ),
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
        run = fs.grad(
            loss_fn,
            mesh=fs.make_mesh({"data": n}),
            batch=P("data"),
            reproducible=True,
            slices=4,
            **options,
        )
        actual = flatten(
            run(placed(params, stage, fs.make_mesh({"data": n})), xs), none_is_leaf=True
        )[0]
        return [None if g is None else fs.unshard(g) for g in actual]

    compute = {key: x for key, x in options.items() if key == "compute"}
    for ours, g in zip(
        gradients(n, 3, live_units=live_units, **options), gradients(1, 0, **compute), strict=True
    ):
        assert (ours is None) == (g is None)
        assert g is None or torch.equal(ours, g)


@pytest.mark.parametrize(
    ("stage", "dtype", "compute", "options"),
    [
        (0, torch.float16, None, {}),
        (1, torch.float32, torch.float16, {"accumulate": 2}),
        (2, torch.float16, None, {"weight": lambda x: 100 * len(x)}),
        (3, torch.float32, torch.float16, {"weight": lambda x: 100 * len(x)}),
        (3, torch.float16, None, {"accumulate": 2}),
    ],
)
def test_reproducible_batch_sums_do_not_overflow(stage, dtype, compute, options):
    """The gradient fits into 16 bits, the sum over all samples that it is the mean of does not."""
    mesh = fs.make_mesh({"data": 2})
    x = torch.full((64, 4), 5000.0, dtype=torch.float16)
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


def test_dropout_differs_by_device_and_step_only():
    def loss_fn(params, batch):
        return (torch.nn.functional.dropout(torch.ones(64)) * params["w"] * batch.mean()).sum()

    mesh = fs.make_mesh({"data": 2})
    params = placed({"w": torch.ones(64)}, 0, mesh)
    run = fs.value_and_grad(
        loss_fn,
        mesh=mesh,
        batch=P("data"),
        gradients=lambda layout: fs.Layout(mesh, P(unreduced="data")),
    )

    def masks():
        torch.manual_seed(3)
        return [
            [shard.clone() for shard in run(params, torch.ones(2))[1]["w"].shards] for _ in range(2)
        ]

    (first, second), (third, fourth) = masks()
    assert (
        not torch.equal(first, second)
        and not torch.equal(first, third)
        and not torch.equal(third, fourth)
    )
    again = masks()
    assert torch.equal(again[0][0], first) and torch.equal(again[1][1], fourth)


# -- what is sent -----------------------------------------------------------------------------------------------------

BLOCK = 4 * (16 * 16 + 16)  # bytes


def tower(params, x):
    for w in params["blocks"]:
        x = torch.tanh(x @ w["w"] + w["b"])
    return x.square().mean()


def tower_step(stage, n, blocks=4, *, runtime="virtual", trains=True, **options):
    """Return the ledger and the gradients of a step on blocks of 16 x 16 weights and 16 biases."""
    mesh = fs.make_mesh({"data": n}, runtime=runtime)
    device = "meta" if runtime == "abstract" else "cpu"
    draw = torch.Generator().manual_seed(0)
    params = [
        {"w": torch.randn(16, 16, generator=draw), "b": torch.randn(16, generator=draw)}
        for _ in range(blocks)
    ]
    own = placed({"blocks": map_leaves(lambda x: x.to(device), params)}, stage, mesh)
    opt = optimizer(stage, mesh)
    batch = torch.ones(4 * n, 16, device=device)
    options = {**options, "batch": P("data")}
    state = opt.init(own)
    with fs.ledger() as comm:
        if trains:
            fs.train_step(tower, opt, mesh=mesh, **options)(own, state, batch)
            return comm, None
        _, grads = fs.value_and_grad(
            tower, mesh=mesh, gradients=opt.gradients, reduce_once=False, **options
        )(own, batch)
    return comm, leaves_of(grads)


def sent_per_step(stage, n, **options):
    """Return the bytes, as a multiple of the parameters'; besides there are some numbers, as the loss and the norm."""
    (comm, _), size = tower_step(stage, n, **options), 4 * BLOCK
    numbers = (
        comm.bytes(collective="psum") if stage else comm.bytes() - Fraction(2 * (n - 1) * size, n)
    )
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


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_reduced_in_buckets_of_given_size(stage):
    def found(**options):
        comm, grads = tower_step(stage, 2, 8, trains=False, **options)
        others = 0 if stage else 2  # of means, and in a first step of the turns that units take
        return comm.calls(collective="psum_scatter" if stage else "psum") - others, grads

    _, grads = found(bucket=0)
    sizes = {0: 8, 1: 8, BLOCK: 8, BLOCK + 1: 4, 3 * BLOCK: 3, 1 << 30: 1}
    for bucket, expected in sizes.items():
        calls, again = found(bucket=bucket)
        assert calls == (expected if stage < 3 else 8) and all(map(torch.equal, grads, again))
    assert found(bucket=3 * BLOCK, accumulate=2)[0] == (6 if stage < 3 else 16)
    assert found()[0] == (1 if stage < 3 else 8)


@pytest.mark.parametrize("stage", STAGES)
def test_abstract_mesh_sends_the_same_bytes(stage):
    def rows(n, runtime):
        comm, _ = tower_step(stage, n, runtime=runtime, accumulate=2)
        return [
            (row.collective, row.axes, row.site.function, calls, sent)
            for row, calls, sent in comm.rows()
        ]

    assert rows(4, "abstract") == rows(4, "virtual")
    assert rows(4096, "abstract")


# -- purity, donation, frozen and unused leaves ------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_step_leaves_its_arguments_unchanged(stage):
    mesh = fs.make_mesh({"data": 2})
    opt = optimizer(stage, mesh)
    params = placed(gpt.init(), stage, mesh)
    state = opt.init(params)
    before = [x.clone() for x in flatten((params, state))[0]]
    fs.train_step(gpt.loss_fn, opt, mesh=mesh, batch=P("data"))(params, state, gpt.batch())
    assert all(map(torch.equal, before, flatten((params, state))[0]))


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_integer_and_unused_leaves_stay_unchanged(stage):
    mesh = fs.make_mesh({"data": 2})
    params = {"w": torch.ones(3), "fixed": torch.ones(3), "unused": torch.ones(2)}
    params |= {"count": torch.arange(3), "empty": torch.ones(0)}

    def loss_fn(p, x):
        return ((p["w"] * p["fixed"]).sum() + p["count"].sum() + p["empty"].sum()) * x.mean()

    opt = optimizer(stage, mesh, fs.optim.sgd(1.0))
    own = placed(params, stage, mesh)
    state = opt.init(own)
    step = fs.train_step(
        loss_fn, opt, mesh=mesh, batch=P("data"), frozen=lambda path: path == "fixed"
    )
    new, state, _ = step(own, state, torch.ones(2))
    new = fs.unshard(new)
    assert torch.equal(new["w"], torch.zeros(3))
    assert all(torch.equal(new[name], params[name]) for name in params if name != "w")
    _, grads = fs.value_and_grad(
        loss_fn, mesh=mesh, batch=P("data"), frozen=lambda path: path == "fixed"
    )(own, torch.ones(2))
    assert [name for name in params if grads[name] is None] == ["fixed", "unused", "count"]


# -- precision -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_half_precision_computes_low_and_keeps_masters(precision, dtype):
    """That it trains alike is in the table of tests/test_training.py."""
    seen = set()

    def loss_fn(params, batch):
        loss = gpt.without_dropout(params, batch)
        seen.add((params["embedding"].dtype, loss.dtype))
        return loss

    _, params = train(fs.make_mesh({"data": 2}), 3, loss_fn, 1, opt=SCALED, precision=precision)
    assert seen == {(dtype, dtype)} and all(x.dtype == torch.float32 for x in params)


@pytest.mark.parametrize("stage", STAGES)
def test_16_bit_gradients_are_accumulated_in_32_bits(stage):
    """In bfloat16, 256 + 1 is 256."""
    mesh = fs.make_mesh({"data": 2})
    x = torch.tensor([256.0, 1, 1, 1, 1, 1, 1, 256.0])
    options = {"accumulate": 4, "reduce_once": True, "gradients": optimizer(stage, mesh).gradients}
    run = fs.grad(lambda p, x: (8 * p["w"] * x).mean(), mesh=mesh, batch=P("data"), **options)
    g = run(placed({"w": torch.ones((), dtype=torch.bfloat16)}, stage, mesh), x)
    assert fs.unshard(g["w"]) == torch.tensor(518.0).bfloat16()


def test_overflow_on_one_device_is_skipped_by_all():
    mesh = fs.make_mesh({"data": 2})
    opt = fs.partition_optimizer(
        fs.optim.loss_scaled(fs.optim.sgd(1.0), initial=2.0**14, interval=2),
        mesh=mesh,
        axis="data",
        stage=2,
    )
    params = fs.shard_params({"w": torch.ones(4)}, P(), mesh=mesh)
    state = opt.init(params)
    step = fs.train_step(
        lambda p, x: (p["w"].sum() * x).mean(), opt, mesh=mesh, batch=P("data"), precision="fp16"
    )
    actual = []
    for x in ([0.5, 10.0], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]):
        params, state, metrics = step(params, state, torch.tensor(x))
        actual.append(
            (state["scale"].item(), fs.unshard(params["w"])[0].item(), bool(metrics["finite"]))
        )
    assert actual == [
        (2.0**13, 1.0, False),
        (2.0**13, 0.5, True),
        (2.0**14, 0.0, True),
        (2.0**14, -0.5, True),
    ]
    assert state["skipped"] == 1


# -- arrays inside and outside of a run -------------------------------------------------------------------------------


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
    where = (
        "outside of fs.run and used inside"
        if made == "outside"
        else "inside of fs.run and used outside"
    )
    assert f"sharded {where}: " in message
    assert {
        part.split(".")[0] for part in message.split(": ")[2].split(". ")[0].split(", ")
    } == distant
