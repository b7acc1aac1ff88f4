"""Modules train in all stages of ZeRO as in plain torch, which is the oracle (`serial`).

Frozen parameters, buffers and recomputation; memory and bytes equal the theory of ZeRO; and what a
loss may do with parameters.
"""

import copy
import gc
from collections.abc import Callable
from fractions import Fraction
from itertools import cycle, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten
from tests.helpers.sampled import thorough
from tests.helpers.training import Case, by_train_step
from tests.transforms.module.zoo import MODULES, D

STAGES = (0, 1, 2, 3)
N = 2
STEPS = 3


def placed(params, stage, mesh):
    rules = fs.fsdp("data") if stage == 3 else P()
    return fs.shard_params(params, rules, mesh=mesh)


# -- one device, by torch --------------------------------------------------------------------------


def batches(width: int, size: int = 8) -> list[Tensor]:
    """Draw a batch for each step, of which the first `size` samples are used."""
    generator = torch.Generator().manual_seed(1)
    drawn = []
    for _ in range(STEPS):
        x = torch.randn(8, width, dtype=torch.float64, generator=generator)
        drawn.append(x[:size])
    return drawn


def loss_of(y: Tensor) -> Tensor:
    return (y.flatten(1).sin() * y.flatten(1)).mean()


class Trained(NamedTuple):
    """The losses of a training, and parameters and buffers after it."""

    losses: list[float]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]


def serial(module: nn.Module, width: int, size: int = 8) -> Trained:
    """Train a copy of a module in plain torch."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    losses = []
    for x in batches(width, size):
        optimizer.zero_grad()
        loss = loss_of(module(x))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    params = {name: x.detach() for name, x in module.named_parameters()}
    return Trained(losses, params, dict(module.named_buffers()))


# -- frozen parameters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frozen",
    [
        "blocks.1.*",
        ["blocks[1].weight", "blocks[1].bias"],
        '["blocks"][1].**',
        lambda path: "blocks[1]." in path,
    ],
    ids=["pattern", "paths", "quoted", "function"],
)
def test_frozen_patterns_match_module_names(frozen):
    kind = MODULES["tied, frozen and unused"]
    case = Case(lambda: kind().requires_grad_(True), width=D)

    _, params = by_train_step(case, 3, 2, frozen=frozen)

    torch.manual_seed(1)
    before = dict(kind().double().named_parameters())
    unchanged = {name for name, x in params.items() if torch.equal(x, before[name].detach())}
    assert unchanged == {"blocks.1.weight", "blocks.1.bias", "unused.weight", "unused.bias"}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_have_no_state_nor_messages(stage, n):
    """A device stores its parameters, and two numbers for each trained one, and sends no more.

    Frozen parameters are sent in stage 3 only, once.
    """
    mesh = fs.make_mesh({"data": n})
    base = nn.Linear(16, 32).requires_grad_(False)
    head = nn.Linear(32, 16)
    apply, full, buffers = fs.functionalize(nn.Sequential(base, nn.Tanh(), head))
    opt = fs.optim.adamw(0.1, fused=False)
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)
    params = placed(full, stage, mesh)
    state = opt.init(params)

    def loss_fn(params, x):
        y, _ = apply(params, buffers, x)
        return loss_of(y)

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), live_units=2)
    with fs.ledger() as comm:
        after, _, _ = step(params, state, torch.ones(8, 16))

    # Memory
    trained = sum(x.numel() for x in head.parameters())
    frozen = sum(x.numel() for x in base.parameters())
    moments = [x for x in flatten(state)[0] if isinstance(x, fs.Sharded) and x.ndim]
    for device in range(n):
        stored = sum(x.shards[device].numel() for x in params.values())
        assert stored == (trained + frozen) // (n if stage == 3 else 1)
        of_state = sum(x.shards[device].numel() for x in moments)
        assert of_state == 2 * trained // (n if stage else 1)

    # Communication
    numbers = 2 * trained + (frozen if stage == 3 else 0)
    expected_bytes = 4 * Fraction(n - 1, n) * numbers
    assert expected_bytes <= comm.bytes() < expected_bytes + 400

    # Frozen parameters are the same tensors after the step.
    for name in ("0.weight", "0.bias"):
        for shard, before in zip(after[name].shards, params[name].shards, strict=True):
            assert shard is before
    assert [x.layout.frozen for x in params.values()] == [True, True, False, False]
    assert [x.layout.frozen for x in after.values()] == [True, True, False, False]


# -- buffers ---------------------------------------------------------------------------------------


def batch_normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def with_buffers(module, stage, n=N, size=8, place=lambda buffers, mesh: buffers, **options):
    """Train a module whose buffers go from step to step."""
    mesh = fs.make_mesh({"data": n})
    sync = None if options.get("reproducible") else "data"
    apply, params, buffers = fs.functionalize(module, sync_batchnorm=sync)
    opt = fs.optim.sgd(0.1, momentum=0.9)
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)

    def loss_fn(params, buffers, x):
        y, buffers = apply(params, buffers, x)
        return loss_of(y), buffers

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), has_buffers=True, **options)
    params = placed(params, stage, mesh)
    buffers = place(buffers, mesh)
    state = opt.init(params)
    losses = []
    for x in batches(6, size):
        params, state, buffers, metrics = step(params, state, buffers, x)
        losses.append(metrics["loss"].item())
    return Trained(losses, fs.unshard(params), buffers)


@pytest.mark.parametrize("size", [8, 5, 3])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_batchnorm_trains_as_on_one_device(stage, n, size):
    """A device without samples takes part in the sums and adds nothing to them."""
    actual = with_buffers(batch_normed(), stage, n, size)

    expected = serial(batch_normed(), 6, size)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_buffers_update_once_a_step_with_accumulation():
    """They are means over slices; torch updates a copy of the module on each slice."""
    module = nn.BatchNorm1d(6).double()
    mesh = fs.make_mesh({"data": 2})
    apply, params, buffers = fs.functionalize(module)
    x, *_ = batches(6)

    def loss_fn(params, buffers, x):
        y, buffers = apply(params, buffers, x)
        return y.square().mean(), buffers, {"first": [*y[0]]}

    options = {"accumulate": 2, "has_buffers": True, "has_aux": True}
    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), **options)
    (_, after, aux), grads = run(fs.shard_params(params, P(), mesh=mesh), buffers, x)

    copies = [copy.deepcopy(module) for _ in range(4)]
    first_rows = []
    for copied, rows in zip(copies, x.chunk(4), strict=True):
        first_rows.append(copied(rows)[0])
    torch.testing.assert_close(torch.stack(aux["first"]), torch.stack(first_rows).mean(0))
    means = torch.stack([copied.running_mean for copied in copies]).mean(0)
    variances = torch.stack([copied.running_var for copied in copies]).mean(0)
    torch.testing.assert_close(after["running_mean"], means)
    torch.testing.assert_close(after["running_var"], variances)
    assert after["num_batches_tracked"] == 1
    assert buffers["num_batches_tracked"] == 0
    assert grads["weight"] is not None


@pytest.mark.parametrize(
    "options",
    [{"reproducible": True, "slices": 4}, {"accumulate": 2}, {"reshard_after_forward": False}],
    ids=str,
)
def test_buffers_are_equal_in_every_zero_stage(options):
    expected = with_buffers(batch_normed(), 0, 2, **options)
    for stage in (1, 3):
        actual = with_buffers(batch_normed(), stage, 2, **options)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_buffers_keep_their_dtype_in_low_precision():
    buffers = with_buffers(batch_normed().float(), 3, precision="bf16").buffers

    assert [x.dtype for x in buffers.values()] == [torch.float32, torch.float32, torch.int64]
    assert buffers["1.num_batches_tracked"] == STEPS


def test_buffers_on_the_mesh_keep_their_layout():
    def replicated(buffers, mesh):
        return fs.device_put(buffers, fs.Layout(mesh))

    def flat(buffers, mesh):
        return fs.device_put(buffers, fs.Layout(mesh, P.flat("data")))

    buffers = with_buffers(batch_normed(), 3, place=replicated).buffers
    expected = serial(batch_normed(), 6).buffers
    assert all(isinstance(x, fs.Sharded) and x.spec == P() for x in buffers.values())
    torch.testing.assert_close(fs.unshard(buffers), expected, rtol=1e-10, atol=1e-12)

    message = r"buffers must be replicated .*; 1.num_batches_tracked has P.flat"
    with pytest.raises(ValueError, match=message):
        with_buffers(batch_normed(), 3, place=flat)


# -- rematerialisation -----------------------------------------------------------------------------


Block = Callable[..., Tensor]


def tower(params: dict, x: Tensor, wrap: Callable[[Block], Block]) -> Tensor:
    """Return the loss of blocks with dropout, each of which `wrap` may change."""

    def block(w, x):
        hidden = torch.tanh(fs.nn.checkpoint_name(x @ w["up"], "up"))
        return x + nn.functional.dropout(hidden @ w["down"], 0.25)

    for w in params["blocks"]:
        x = wrap(block)(w, x)
    return loss_of(x @ params["head"])


def tower_params() -> dict:
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator) / 3

    return {
        "blocks": [{"up": draw(6, 9), "down": draw(9, 6)} for _ in range(5)],
        "head": draw(6, 2),
    }


def checkpointed(block):
    return lambda w, x: torch.utils.checkpoint.checkpoint(block, w, x, use_reentrant=False)


WRAPS: dict[str, Callable[[Block], Block]] = {
    "gathered": fs.with_unsharded_params,
    "nothing": fs.remat,
    "dots": lambda block: fs.remat(block, "dots"),
    "names": lambda block: fs.remat(block, fs.nn.save_names("up")),
    "offloaded": lambda block: fs.remat(block, fs.nn.offload("dots")),
    "gathered in remat": lambda block: fs.remat(fs.with_unsharded_params(block)),
    "remat in gathered": lambda block: fs.with_unsharded_params(fs.remat(block)),
    "torch's checkpoint": checkpointed,
}


def tower_gradient(wrap, stage, **options):
    """Return the loss and all gradients of a step."""
    mesh = fs.make_mesh({"data": N})
    run = fs.value_and_grad(lambda p, x: tower(p, x, wrap), mesh=mesh, batch=P("data"), **options)
    torch.manual_seed(5)  # of the dropout
    loss, grads = run(placed(tower_params(), stage, mesh), batches(6)[0])
    leaves, _ = flatten(fs.unshard(grads))
    return [loss, *leaves]


@pytest.mark.parametrize("options", [{}, {"live_units": 1}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("name", WRAPS)
def test_remat_blocks_have_equal_gradients_and_dropout(name, options):
    expected = tower_gradient(lambda block: block, 0, **options)

    actual = tower_gradient(WRAPS[name], 3, **options)

    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


class Most(NamedTuple):
    """The largest number of unsharded units at a time, and of their bytes.

    A unit of which there are two copies has the bytes of both.
    """

    units: int
    bytes: int


def most_unsharded(monkeypatch, loss_fn, params, mesh, width=6, **options) -> Most:
    """Return the largest numbers in the second of two steps, which prefetches."""
    from torch.multiprocessing.reductions import StorageWeakRef

    from fshard.transforms.fsdp.units import Unit

    copies_of_units: dict[Any, list[list[Any]]] = {}
    measured: list[Most] = []
    wait_for_unshard = Unit.wait_for_unshard

    def watched(self):
        is_pending = self.pending is not None
        values = wait_for_unshard(self)
        copies = copies_of_units.setdefault(self.context, [])
        if is_pending:
            copies.append([(StorageWeakRef(x.untyped_storage()), x.nbytes) for x in self.values])
        sizes = []
        for copied in copies:
            sizes.append(sum(size for memory, size in copied if not memory.expired()))
        measured.append(Most(sum(size > 0 for size in sizes), sum(sizes)))
        return values

    monkeypatch.setattr(Unit, "wait_for_unshard", watched)
    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), **options)
    x, *_ = batches(width)
    gc.collect()
    gc.disable()  # what is freed must be freed without the collector
    try:
        for _ in range(2):
            copies_of_units.clear()
            measured.clear()
            run(params, x)
    finally:
        gc.enable()
    return Most(max(row.units for row in measured), max(row.bytes for row in measured))


# A wrap that holds units does so with any limits: each has one pair of them in the suite.
LIMITS = [*product((1, 3), (0, 2))]
LIMITED = [*zip(["plain", *WRAPS], cycle(LIMITS), strict=False)]
OTHERS = [pair for pair in product(["plain", *WRAPS], LIMITS) if pair not in LIMITED]


@pytest.mark.parametrize(("name", "limits"), [*LIMITED, *[thorough(*pair) for pair in OTHERS]])
def test_live_units_bound_unsharded_units(monkeypatch, name, limits):
    live, prefetch = limits
    wrap = {"plain": lambda block: block, **WRAPS}[name]
    mesh = fs.make_mesh({"data": N})
    params = placed(tower_params(), 3, mesh)
    options = {"live_units": live, "prefetch": prefetch}

    most = most_unsharded(monkeypatch, lambda p, x: tower(p, x, wrap), params, mesh, **options)

    assert 1 <= most.units <= live + prefetch


class Nested(nn.Module):
    """Names that name no units: a stack, and a head tied to the layer before it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.body = nn.Sequential(nn.Linear(6, 6), encoder)
        self.head = nn.Linear(6, 6)
        self.head.weight = self.body[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.unflatten(1, (3, 6))))


@pytest.mark.parametrize("live", [1, 2])
def test_units_of_class_bound_unsharded_memory(monkeypatch, live):
    torch.manual_seed(0)
    module = Nested().double()
    apply, params, buffers = fs.functionalize(module)
    mesh = fs.make_mesh({"data": N})

    def loss_fn(params, x):
        y, _ = apply(params, buffers, x)
        return loss_of(y)

    def most_bytes(units):
        arrays = fs.shard_params(params, fs.fsdp("data", unit=units), mesh=mesh)
        options = {"live_units": live, "prefetch": 0}
        return most_unsharded(monkeypatch, loss_fn, arrays, mesh, 18, **options).bytes

    # Units of two classes are nested.
    units = fs.nn.units_of(module, nn.TransformerEncoderLayer, nn.Linear)
    assert len(units) == 1 + 4 * 4 + 1
    first_layer = "body.1.layers.0"
    assert units[:3] == ("body.0", first_layer, f"{first_layer}.self_attn.out_proj")

    layers = fs.nn.units_of(module, nn.TransformerEncoderLayer)
    assert layers == tuple(f"body.1.layers.{layer}" for layer in range(4))

    # Units of layers bound the memory; those of the top level do not.
    layer_bytes = sum(x.nbytes for name, x in params.items() if name.startswith(first_layer))
    model_bytes = sum(x.nbytes for x in params.values())
    assert most_bytes(layers) <= live * layer_bytes < model_bytes
    assert most_bytes(["body", "head"]) > 4 * layer_bytes


# -- what a loss function may do with parameters ---------------------------------------------------


def with_teacher(p, x):
    """A forward without a gradient: a teacher, a norm for logging, or one that only warms up."""
    with torch.no_grad():
        target = torch.tanh(x @ p["a"]) @ p["b"]
    return (torch.tanh(x @ p["a"]) @ p["b"] - 2 * target).square().mean()


def of_conjugates(p, x):
    """Saved views of complex parameters: conjugated, and transposed too."""
    return (x @ p["a"].conj() @ p["a"].mH @ p["b"].conj() @ p["b"].mH).abs().square().mean()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("loss_fn", "dtype"), [(with_teacher, torch.float64), (of_conjugates, torch.complex128)]
)
def test_loss_on_units_of_one_leaf_has_gradient_of_torch(loss_fn, dtype, stage):
    a, b, x = torch.randn(3, 4, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    full = {"a": a, "b": b}
    mesh = fs.make_mesh({"data": N})
    rules = fs.fsdp("data", unit=1) if stage == 3 else P()
    params = fs.shard_params(full, rules, mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.sgd(1.0), mesh=mesh, axis="data", stage=stage)

    options = {"live_units": 1, "gradients": opt.gradients}
    _, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), **options)(params, x)

    leaves = {name: w.clone().requires_grad_() for name, w in full.items()}
    expected = torch.autograd.grad(loss_fn(leaves, x), [*leaves.values()])
    torch.testing.assert_close([fs.unshard(g) for g in grads.values()], [*expected])
    for array in params.values():
        assert not any(shard.requires_grad for shard in array.shards)


def test_unwritten_buffers_are_not_sent():
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params({"w": torch.ones(())}, P(), mesh=mesh)
    buffers = {"mask": torch.ones(1000), "seen": torch.tensor(0.0), "name": "what is no tensor"}

    def loss_fn(p, buffers, x):
        loss = (p["w"] * x * buffers["mask"].mean()).mean()
        return loss, {**buffers, "seen": buffers["seen"] + x.mean()}

    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), has_buffers=True)
    with fs.ledger() as comm:
        (_, after), _ = run(params, buffers, torch.arange(4.0))

    assert comm.bytes() < buffers["mask"].nbytes / 10
    assert after["mask"] is buffers["mask"]
    assert after["seen"] == 1.5
    assert after["name"] == buffers["name"]


def test_frozen_option_applies_to_one_step():
    """Two programs on one tree: what one freezes, the other trains."""
    mesh = fs.make_mesh({"data": 2})
    own = fs.shard_params({"left": torch.ones(2), "right": torch.ones(2)}, P(), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.sgd(1.0), mesh=mesh, axis="data", stage=1)

    def loss_fn(p, x):
        return (p["left"] * p["right"]).sum() * x.mean()

    state = opt.init(own)
    for frozen in ("left", "right"):
        step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), frozen=frozen)
        own, state, _ = step(own, state, torch.full((2,), 0.5))
    assert [x.tolist() for x in fs.unshard(own).values()] == [[0.75, 0.75], [0.5, 0.5]]
