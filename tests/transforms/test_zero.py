"""ZeRO as a table of layouts: every stage, on every mesh, trains as one device does.

The oracles are one device at stage 0, torch, and the theory of bytes: all-gathers and
reduce-scatters of n devices send (n-1)/n of the parameters each.
"""

import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten
from fshard.testing import gpt
from tests.transforms.helpers.placement import placed

STAGES = (0, 1, 2, 3)


def optimizer(stage, mesh, opt=None):
    opt = opt or fs.optim.adamw(3e-3, fused=False)
    return fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)


def leaves_of(tree):
    return flatten(fs.unshard(tree))[0]


def train(mesh, stage, loss_fn=gpt.loss_fn, steps=4, params=None, opt=None, **options):
    """Return the losses of a training, and the parameters after it."""
    torch.manual_seed(7)
    opt = optimizer(stage, mesh, opt)
    params = placed(params or gpt.init(), stage, mesh)
    state = opt.init(params)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), **options)
    losses = []
    for number in range(steps):
        params, state, metrics = step(params, state, gpt.batch(seed=number))
        losses.append(metrics["loss"].item())
    return losses, leaves_of(params)


# -- reproducible mode -----------------------------------------------------------------------------

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
    expected_losses, expected = train(fs.make_mesh({"data": 1}), 0, **options)
    assert len({*expected_losses}) == 3

    in_two_slices = {"accumulate": 2, "slices": 8}
    for n, stage, more in ((8, 0, {}), (4, 1, {}), (2, 2, in_two_slices), (1, 3, {}), (8, 3, {})):
        losses, params = train(fs.make_mesh({"data": n}), stage, **options, **more)
        assert losses == expected_losses
        assert all(map(torch.equal, params, expected))


def sliced_step(devices, slices, accumulate=1):
    """Return the parameter after a step with a number of slices."""
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(5, generator=generator), torch.randn(48, 5, generator=generator)
    mesh = fs.make_mesh({"data": devices})
    params = fs.shard_params({"w": w}, fs.fsdp("data"), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.sgd(0.5), mesh=mesh, axis="data", stage=3)
    options = {"reproducible": True, "slices": slices, "accumulate": accumulate}

    def loss(params, x):
        return (x @ params["w"]).tanh().square().mean()

    step = fs.train_step(loss, opt, mesh=mesh, batch=P("data"), **options)
    params, _, _ = step(params, opt.init(params), x)
    return fs.unshard(params["w"])


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8, 12])
def test_slices_24_have_equal_bits_on_three_devices_times_a_power_of_two_or_raise(devices):
    expected = sliced_step(1, 24)
    if devices == 1 or devices % 3 == 0:
        assert torch.equal(sliced_step(devices, 24), expected)
        return
    with pytest.raises(ValueError, match="three devices and two have no number in common") as e:
        sliced_step(devices, 24)
    number = re.search(r"such as (\d+) in all", str(e.value))
    assert number is not None
    sliced_step(devices, int(number[1]))


@pytest.mark.parametrize("devices", [3, 5, 6])
def test_error_of_8_slices_names_a_number_that_the_mesh_accepts(devices):
    with pytest.raises(ValueError, match="do not share evenly") as e:
        sliced_step(devices, 8)
    number = re.search(r"such as (\d+) in all", str(e.value))
    assert number is not None
    sliced_step(devices, int(number[1]))


def test_accumulation_must_divide_the_slices_of_a_device():
    with pytest.raises(ValueError, match="accumulate must divide 4, the slices of a device"):
        sliced_step(2, 8, accumulate=3)


def step_with_threads(count):
    """Take a step on sums that torch cuts among its threads."""
    generator = torch.Generator().manual_seed(0)
    mesh = fs.make_mesh({"data": 2})
    w = torch.randn(512, 512, generator=generator) / 20
    b = torch.randn(512, generator=generator)
    x = torch.randn(1024, 512, generator=generator)

    def loss_fn(p, x):
        for _ in range(3):
            x = torch.nn.functional.layer_norm(torch.tanh(x @ p["w"] + p["b"]), (512,))
        return x.square().mean()

    params = placed({"w": w, "b": b}, 3, mesh)
    opt = optimizer(3, mesh, fs.optim.adamw(1e-2))
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), reproducible=True, slices=4)
    torch.set_num_threads(count)
    try:
        params, _, metrics = step(params, opt.init(params), x)
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(1)
    return [metrics["loss"], metrics["grad_norm"], *leaves_of(params)]


def test_reproducible_bits_are_equal_for_any_thread_count():
    assert all(map(torch.equal, step_with_threads(3), step_with_threads(1)))


def by_view(w, x):
    v = w.T
    return torch.tanh(x @ v) @ v


def mapped_over_rows(w, x):
    return torch.func.vmap(lambda row, w: (w @ row).tanh(), (0, None))(x, w)


USES = {
    "plain": lambda w, x: torch.tanh(x @ w),
    "a view, twice": by_view,
    "marked": fs.with_unsharded_params(lambda w, x: torch.tanh(x @ w).sin() @ w),
    "rematerialised": fs.remat(lambda w, x: torch.tanh(x @ w) @ w),
    "torch.func": mapped_over_rows,
}
REPEATED_USE = st.tuples(st.integers(0, 2), st.sampled_from(sorted(USES)))
STEP_OPTIONS = [
    {},
    {"compute": torch.bfloat16},
    {"accumulate": 2},
    {"reshard_after_forward": False},
]


@settings(max_examples=40)
@given(
    uses=st.lists(REPEATED_USE, min_size=3, max_size=9),
    n=st.sampled_from([1, 2, 4]),
    live_units=st.integers(1, 2),
    options=st.sampled_from(STEP_OPTIONS),
)
def test_reproducible_bits_are_equal_for_repeated_uses(uses, n, live_units, options):
    """A program is a list of weights, and of how each is used."""
    if "accumulate" in options:
        n = 2
    generator = torch.Generator().manual_seed(1)
    params = [torch.randn(8, 8, generator=generator) / 3 for _ in range(3)]
    xs = torch.randn(8, 8, generator=generator)

    def loss_fn(p, x):
        for index, use in uses:
            x = USES[use](p[index], x)
        return x.square().mean()

    def gradients(n, stage, **options):
        mesh = fs.make_mesh({"data": n})
        options |= {"reproducible": True, "slices": 4}
        run = fs.grad(loss_fn, mesh=mesh, batch=P("data"), **options)
        leaves, _ = flatten(run(placed(params, stage, mesh), xs), none_is_leaf=True)
        return [None if g is None else fs.unshard(g) for g in leaves]

    compute = {key: x for key, x in options.items() if key == "compute"}
    expected = gradients(1, 0, **compute)
    actual = gradients(n, 3, live_units=live_units, **options)
    for g, expected_g in zip(actual, expected, strict=True):
        assert (g is None) == (expected_g is None)
        assert g is None or torch.equal(g, expected_g)


def hundred_a_sample(x):
    return 100 * len(x)


@pytest.mark.parametrize(
    ("stage", "dtype", "compute", "options"),
    [
        (0, torch.float16, None, {}),
        (1, torch.float32, torch.float16, {"accumulate": 2}),
        (2, torch.float16, None, {"weight": hundred_a_sample}),
        (3, torch.float32, torch.float16, {"weight": hundred_a_sample}),
        (3, torch.float16, None, {"accumulate": 2}),
    ],
)
def test_reproducible_batch_sums_do_not_overflow(stage, dtype, compute, options):
    """The gradient fits into 16 bits; the sum over all samples that it is the mean of does not."""
    mesh = fs.make_mesh({"data": 2})
    x = torch.full((64, 4), 5000.0, dtype=torch.float16)
    params = placed({"w": torch.ones(4, dtype=dtype)}, stage, mesh)

    def loss_fn(p, x):
        return (p["w"] * x).sum(1).mean()

    run = fs.grad(
        loss_fn,
        mesh=mesh,
        batch=P("data"),
        gradients=optimizer(stage, mesh).gradients,
        compute=compute,
        reproducible=True,
        slices=4,
        **options,
    )
    g = fs.unshard(run(params, x)["w"])

    assert g.dtype == dtype
    assert torch.equal(g, torch.full((4,), 5000.0, dtype=dtype))


def test_dropout_differs_by_device_and_step_only():
    def loss_fn(params, batch):
        mask = torch.nn.functional.dropout(torch.ones(64))
        return (mask * params["w"] * batch.mean()).sum()

    mesh = fs.make_mesh({"data": 2})
    params = placed({"w": torch.ones(64)}, 0, mesh)
    unreduced = fs.Layout(mesh, P(unreduced="data"))
    run = fs.grad(loss_fn, mesh=mesh, batch=P("data"), gradients=lambda layout: unreduced)

    def masks():
        """Return the masks of each device in two steps: its summands of the gradient."""
        torch.manual_seed(3)
        steps = []
        for _ in range(2):
            shards = run(params, torch.ones(2))["w"].shards
            steps.append([shard.clone() for shard in shards])
        return steps

    (first, second), (third, fourth) = masks()
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)
    assert not torch.equal(third, fourth)

    repeated = masks()
    assert torch.equal(repeated[0][0], first)
    assert torch.equal(repeated[1][1], fourth)


# -- what is sent ----------------------------------------------------------------------------------

BLOCK = 4 * (16 * 16 + 16)  # bytes


def tower(params, x):
    for w in params["blocks"]:
        x = torch.tanh(x @ w["w"] + w["b"])
    return x.square().mean()


def blocks_of(count, device):
    """Return blocks of 16 x 16 weights and 16 biases."""
    draw = torch.Generator().manual_seed(0)
    blocks = []
    for _ in range(count):
        w = torch.randn(16, 16, generator=draw).to(device)
        b = torch.randn(16, generator=draw).to(device)
        blocks.append({"w": w, "b": b})
    return {"blocks": blocks}


def tower_step(stage, n, blocks=4, *, runtime="virtual", trains=True, **options):
    """Return the ledger of a step; if it does not train, the ledger of gradients, and the
    gradients.
    """
    mesh = fs.make_mesh({"data": n}, runtime=runtime)
    device = "meta" if runtime == "abstract" else "cpu"
    params = placed(blocks_of(blocks, device), stage, mesh)
    batch = torch.ones(4 * n, 16, device=device)
    opt = optimizer(stage, mesh)
    options |= {"mesh": mesh, "batch": P("data")}

    if trains:
        step = fs.train_step(tower, opt, **options)
        state = opt.init(params)
        with fs.ledger() as comm:
            step(params, state, batch)
        return comm, None

    options |= {"gradients": opt.gradients, "reduce_once": False}
    with fs.ledger() as comm:
        _, grads = fs.value_and_grad(tower, **options)(params, batch)
    return comm, leaves_of(grads)


def sent_per_step(stage, n, **options):
    """Return the bytes as a multiple of the parameters', without some numbers such as the loss."""
    comm, _ = tower_step(stage, n, **options)
    size = 4 * BLOCK
    if stage == 0:  # parameters are reduced by the same collective as these numbers
        numbers = comm.bytes() - Fraction(2 * (n - 1) * size, n)
    else:
        numbers = comm.bytes(collective="psum")
    assert numbers < 400
    return (comm.bytes() - numbers) / size


@pytest.mark.parametrize("n", [2, 4])
def test_ledger_bytes_equal_theory(n):
    part = Fraction(n - 1, n)
    for stage in (0, 1, 2):
        assert sent_per_step(stage, n) == 2 * part

    # The last block is still there when the backward begins, and the first is not needed: its
    # input has no gradient.
    assert sent_per_step(3, n, live_units=1) == 3 * part - 2 * part / 4
    assert sent_per_step(3, n, reshard_after_forward=False) == 2 * part
    assert sent_per_step(2, n, accumulate=2) == 3 * part
    assert sent_per_step(2, n, accumulate=2, reduce_once=True) == 2 * part


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_reduced_in_buckets_of_given_size(stage):
    def reductions(**options):
        """Return the number of reductions of 8 blocks, and the gradients."""
        comm, grads = tower_step(stage, 2, 8, trains=False, **options)
        if stage:
            return comm.calls(collective="psum_scatter"), grads
        others = 2  # of means, and in a first step of the turns that units take
        return comm.calls(collective="psum") - others, grads

    # Stage 3 reduces each unit by itself.
    _, expected = reductions(bucket=0)
    counts = {0: 8, 1: 8, BLOCK: 8, BLOCK + 1: 4, 3 * BLOCK: 3, 1 << 30: 1}
    for bucket, count in counts.items():
        calls, grads = reductions(bucket=bucket)
        assert calls == (count if stage < 3 else 8)
        assert all(map(torch.equal, grads, expected))

    calls, _ = reductions(bucket=3 * BLOCK, accumulate=2)
    assert calls == (6 if stage < 3 else 16)
    calls, _ = reductions()
    assert calls == (1 if stage < 3 else 8)


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


# -- purity, donation, frozen and unused leaves ----------------------------------------------------


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
    full = {
        "w": torch.ones(3),
        "fixed": torch.ones(3),
        "unused": torch.ones(2),
        "count": torch.arange(3),
        "empty": torch.ones(0),
    }

    def loss_fn(p, x):
        y = (p["w"] * p["fixed"]).sum() + p["count"].sum() + p["empty"].sum()
        return y * x.mean()

    params = placed(full, stage, mesh)
    opt = optimizer(stage, mesh, fs.optim.sgd(1.0))
    options = {"mesh": mesh, "batch": P("data"), "frozen": lambda path: path == "fixed"}
    step = fs.train_step(loss_fn, opt, **options)
    after, _, _ = step(params, opt.init(params), torch.ones(2))
    grads = fs.grad(loss_fn, **options)(params, torch.ones(2))

    after = fs.unshard(after)
    assert torch.equal(after.pop("w"), torch.zeros(3))
    for name, x in after.items():
        assert torch.equal(x, full[name])
    assert [name for name in full if grads[name] is None] == ["fixed", "unused", "count"]


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_half_precision_computes_low_and_keeps_masters(precision, dtype):
    """That it trains alike is in the table of tests/test_training.py."""
    dtypes = set()

    def loss_fn(params, batch):
        loss = gpt.without_dropout(params, batch)
        dtypes.add((params["embedding"].dtype, loss.dtype))
        return loss

    mesh = fs.make_mesh({"data": 2})
    _, params = train(mesh, 3, loss_fn, 1, opt=SCALED, precision=precision)

    assert dtypes == {(dtype, dtype)}
    assert all(x.dtype == torch.float32 for x in params)


@pytest.mark.parametrize("stage", STAGES)
def test_16_bit_gradients_are_accumulated_in_32_bits(stage):
    """In bfloat16, 256 + 1 is 256."""
    mesh = fs.make_mesh({"data": 2})
    x = torch.tensor([256.0, 1, 1, 1, 1, 1, 1, 256.0])
    params = placed({"w": torch.ones((), dtype=torch.bfloat16)}, stage, mesh)

    def loss_fn(p, x):
        return (8 * p["w"] * x).mean()

    options = {"accumulate": 4, "reduce_once": True, "gradients": optimizer(stage, mesh).gradients}
    grads = fs.grad(loss_fn, mesh=mesh, batch=P("data"), **options)(params, x)

    assert fs.unshard(grads["w"]) == torch.tensor(518.0).bfloat16()


def test_overflow_on_one_device_is_skipped_by_all():
    mesh = fs.make_mesh({"data": 2})
    opt = fs.optim.loss_scaled(fs.optim.sgd(1.0), initial=2.0**14, interval=2)
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=2)
    params = fs.shard_params({"w": torch.ones(4)}, P(), mesh=mesh)
    state = opt.init(params)

    def loss_fn(p, x):
        return (p["w"].sum() * x).mean()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), precision="fp16")
    rows = []
    for x in ([0.5, 10.0], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]):
        params, state, metrics = step(params, state, torch.tensor(x))
        w = fs.unshard(params["w"])[0].item()
        rows.append((state["scale"].item(), w, bool(metrics["finite"])))

    assert rows == [  # scale, weight, whether the step was taken
        (2.0**13, 1.0, False),
        (2.0**13, 0.5, True),
        (2.0**14, 0.0, True),
        (2.0**14, -0.5, True),
    ]
    assert state["skipped"] == 1


# -- arrays inside and outside of a run ------------------------------------------------------------


def names_in(message):
    """Return the arguments of the leaves that a message lists after its second colon."""
    leaves = message.split(": ")[2].split(". ")[0]
    return {leaf.split(".")[0] for leaf in leaves.split(", ")}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("distant", [{"state"}, {"params", "state", "batch"}], ids=sorted)
@pytest.mark.parametrize("made", ["outside", "inside"])
def test_arrays_sharded_elsewhere_raise_by_name(stage, distant, made):
    mesh = fs.make_mesh({"data": 2})
    opt = optimizer(stage, mesh, fs.optim.adamw(1e-3))
    step = fs.train_step(lambda p, x: (p["w"] * x).mean(), opt, mesh=mesh, batch=P("data"))

    def arguments():
        params = placed({"w": torch.ones(4)}, stage, mesh)
        batch = fs.device_put(torch.ones(4, 4), fs.Layout(mesh, P("data")))
        return {"params": params, "state": opt.init(params), "batch": batch}

    def step_with(far):
        """Take a step with the distant arguments of another place."""
        mixed = arguments()
        for name in distant:
            mixed[name] = far[name]
        step(mixed["params"], mixed["state"], mixed["batch"])

    if made == "outside":
        far = arguments()
        place = "outside of fs.run and used inside"
        with pytest.raises(ValueError) as error:
            fs.run(step_with, far, mesh=mesh)
    else:
        far, *_ = fs.run(arguments, mesh=mesh)
        place = "inside of fs.run and used outside"
        with pytest.raises(ValueError) as error:
            step_with(far)

    message, *_ = str(error.value).split("\n")
    assert f"sharded {place}: " in message
    assert names_in(message) == distant
