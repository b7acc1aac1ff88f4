"""Modules in ZeRO: frozen parameters, buffers, recomputation, and what a loss may do with parameters."""

import copy
import gc
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten
from tests.helpers.sampled import in_pairs
from tests.helpers.training import Case, by_train_step
from tests.transforms.module.zoo import MODULES, D

STAGES = (0, 1, 2, 3)
N = 2
STEPS = 3


def placed(params, stage, mesh):
    return fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)


# -- one device, by torch ---------------------------------------------------------------------------------------------


def batches(width: int, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(8, width, dtype=torch.float64, generator=generator)[:size] for _ in range(STEPS)
    ]


def loss_of(y: Tensor) -> Tensor:
    return (y.flatten(1).sin() * y.flatten(1)).mean()


def serial(
    module: nn.Module, width: int, size: int = 8
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Train a copy of a module in plain torch; return losses, parameters and buffers."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    losses = []
    for x in batches(width, size):
        optimizer.zero_grad()
        loss = loss_of(module(x))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return (
        losses,
        {name: x.detach() for name, x in module.named_parameters()},
        dict(module.named_buffers()),
    )


# -- frozen parameters ------------------------------------------------------------------------------------------------


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
    _, params = by_train_step(
        Case(lambda: kind().requires_grad_(True), width=D), 3, 2, frozen=frozen
    )
    torch.manual_seed(1)
    start = dict(kind().double().named_parameters())
    same = {name for name, x in params.items() if torch.equal(x, start[name].detach())}
    assert same == {"blocks.1.weight", "blocks.1.bias", "unused.weight", "unused.bias"}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_have_no_state_nor_messages(stage, n):
    """A device holds two numbers for each trained one, the parameters at rest, and sends what training the rest takes."""
    mesh = fs.make_mesh({"data": n})
    base = nn.Linear(16, 32)
    head = nn.Linear(32, 16)
    apply, params, buffers = fs.functionalize(
        nn.Sequential(base.requires_grad_(False), nn.Tanh(), head)
    )
    opt = fs.partition_optimizer(
        fs.optim.adamw(0.1, fused=False), mesh=mesh, axis="data", stage=stage
    )
    own = placed(params, stage, mesh)
    assert [x.layout.frozen for x in own.values()] == [True, True, False, False]
    state = opt.init(own)
    trained = sum(x.numel() for x in head.parameters())
    everything = trained + sum(x.numel() for x in base.parameters())
    pieces = [x for x in flatten(state)[0] if isinstance(x, fs.Sharded) and x.ndim]
    for device in range(n):
        assert sum(x.shards[device].numel() for x in own.values()) == everything // (
            n if stage == 3 else 1
        )
        assert sum(x.shards[device].numel() for x in pieces) == 2 * trained // (n if stage else 1)
    step = fs.train_step(
        lambda p, x: loss_of(apply(p, buffers, x)[0]), opt, mesh=mesh, batch=P("data"), live_units=2
    )
    with fs.ledger() as comm:
        after, state, _ = step(own, state, torch.ones(8, 16))
    moved = 4 * Fraction(n - 1, n) * (2 * trained + (everything - trained if stage == 3 else 0))
    assert moved <= comm.bytes() < moved + 400
    assert all(
        x is y
        for name in ("0.weight", "0.bias")
        for x, y in zip(own[name].shards, after[name].shards, strict=True)
    )
    assert [x.layout.frozen for x in after.values()] == [True, True, False, False]


# -- buffers ----------------------------------------------------------------------------------------------------------------


def batch_normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def with_buffers(module, stage, n=N, size=8, lay=lambda buffers, mesh: buffers, **options):
    """Train a module whose buffers go from step to step."""
    mesh = fs.make_mesh({"data": n})
    sync = None if options.get("reproducible") else "data"
    apply, params, buffers = fs.functionalize(module, sync_batchnorm=sync)
    opt = fs.partition_optimizer(
        fs.optim.sgd(0.1, momentum=0.9), mesh=mesh, axis="data", stage=stage
    )

    def loss_fn(params, buffers, x):
        y, buffers = apply(params, buffers, x)
        return loss_of(y), buffers

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), has_buffers=True, **options)
    own = placed(params, stage, mesh)
    buffers = lay(buffers, mesh)
    state = opt.init(own)
    losses = []
    for x in batches(6, size):
        own, state, buffers, metrics = step(own, state, buffers, x)
        losses.append(metrics["loss"].item())
    return losses, fs.unshard(own), buffers


@pytest.mark.parametrize("size", [8, 5, 3])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_batchnorm_trains_as_on_one_device(stage, n, size):
    """A device without samples takes part in the sums and adds nothing to them."""
    actual = with_buffers(batch_normed(), stage, n, size)
    torch.testing.assert_close(actual, serial(batch_normed(), 6, size), rtol=1e-9, atol=1e-11)


def test_buffers_update_once_a_step_with_accumulation():
    """The mean over slices: torch, on each slice from the same buffers."""
    module = nn.BatchNorm1d(6).double()
    mesh = fs.make_mesh({"data": 2})
    apply, params, buffers = fs.functionalize(module)

    def loss_fn(params, buffers, x):
        y, buffers = apply(params, buffers, x)
        return y.square().mean(), buffers, {"first": [*y[0]]}

    x, *_ = batches(6)
    run = fs.value_and_grad(
        loss_fn, mesh=mesh, batch=P("data"), accumulate=2, has_buffers=True, has_aux=True
    )
    (_, actual, aux), grads = run(fs.shard_params(params, P(), mesh=mesh), buffers, x)
    slices = [copy.deepcopy(module) for _ in range(4)]
    first = [one(part)[0] for one, part in zip(slices, x.chunk(4), strict=True)]
    torch.testing.assert_close(torch.stack(aux["first"]), torch.stack(first).mean(0))
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(
            actual[name], torch.stack([dict(one.named_buffers())[name] for one in slices]).mean(0)
        )
    assert actual["num_batches_tracked"] == 1 and grads["weight"] is not None
    assert buffers["num_batches_tracked"] == 0


@pytest.mark.parametrize(
    "options",
    [{"reproducible": True, "slices": 4}, {"accumulate": 2}, {"reshard_after_forward": False}],
    ids=str,
)
def test_buffers_are_equal_in_every_zero_stage(options):
    losses, params, buffers = with_buffers(batch_normed(), 0, 2, **options)
    for stage in (1, 3):
        others, again, after = with_buffers(batch_normed(), stage, 2, **options)
        torch.testing.assert_close(
            (others, again, after), (losses, params, buffers), rtol=1e-10, atol=1e-12
        )


def test_buffers_keep_their_dtype_in_low_precision():
    _, _, buffers = with_buffers(batch_normed().float(), 3, precision="bf16")
    assert [x.dtype for x in buffers.values()] == [torch.float32, torch.float32, torch.int64]
    assert buffers["1.num_batches_tracked"] == STEPS


def test_buffers_on_the_mesh_keep_their_layout():
    def lay(buffers, mesh):
        return fs.device_put(buffers, fs.Layout(mesh))

    _, _, actual = with_buffers(batch_normed(), 3, lay=lay)
    assert all(isinstance(x, fs.Sharded) and x.spec == P() for x in actual.values())
    torch.testing.assert_close(
        fs.unshard(actual), serial(batch_normed(), 6)[2], rtol=1e-10, atol=1e-12
    )
    with pytest.raises(
        ValueError, match=r"buffers must be replicated .*; 1.num_batches_tracked has P.flat"
    ):
        with_buffers(
            batch_normed(), 3, lay=lambda x, mesh: fs.device_put(x, fs.Layout(mesh, P.flat("data")))
        )


# -- rematerialisation --------------------------------------------------------------------------------------------------------


def tower(
    params: dict, x: Tensor, wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
) -> Tensor:
    """Blocks with dropout, each of which `wrap` may change."""

    def block(w, x):
        return x + nn.functional.dropout(
            torch.tanh(fs.nn.checkpoint_name(x @ w["up"], "up")) @ w["down"], 0.25
        )

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


WRAPS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "gathered": fs.with_unsharded_params,
    "nothing": fs.remat,
    "dots": lambda block: fs.remat(block, "dots"),
    "names": lambda block: fs.remat(block, fs.nn.save_names("up")),
    "offloaded": lambda block: fs.remat(block, fs.nn.offload("dots")),
    "gathered in remat": lambda block: fs.remat(fs.with_unsharded_params(block)),
    "remat in gathered": lambda block: fs.with_unsharded_params(fs.remat(block)),
    "torch's checkpoint": lambda block: (
        lambda w, x: torch.utils.checkpoint.checkpoint(block, w, x, use_reentrant=False)
    ),
}


def tower_gradient(wrap, stage, **options):
    mesh = fs.make_mesh({"data": N})
    torch.manual_seed(5)  # of the dropout
    run = fs.value_and_grad(lambda p, x: tower(p, x, wrap), mesh=mesh, batch=P("data"), **options)
    loss, grads = run(placed(tower_params(), stage, mesh), batches(6)[0])
    return [
        loss,
        fs.unshard(grads["head"]),
        *(fs.unshard(g) for w in grads["blocks"] for g in w.values()),
    ]


@pytest.mark.parametrize("options", [{}, {"live_units": 1}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("name", WRAPS)
def test_remat_blocks_have_equal_gradients_and_dropout(name, options):
    plain = tower_gradient(lambda block: block, 0, **options)
    ours = tower_gradient(WRAPS[name], 3, **options)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class Most(NamedTuple):
    """How many gathered units and bytes of them were there at a time; of a unit that is there twice, both."""

    units: int
    bytes: int


def most_whole(monkeypatch, loss_fn, own, mesh, width=6, **options) -> Most:
    """Return what was whole at most in the second of two steps."""
    from torch.multiprocessing.reductions import StorageWeakRef

    from fshard.transforms.fsdp.units import Unit

    alive: dict[Any, list[list[Any]]] = {}
    most: list[Most] = []
    wait_for_unshard = Unit.wait_for_unshard

    def watched(self):
        pending = self.pending is not None
        values = wait_for_unshard(self)
        copies = alive.setdefault(self.context, [])
        if pending:
            copies.append([(StorageWeakRef(x.untyped_storage()), x.nbytes) for x in self.values])
        there = [[size for memory, size in copy if not memory.expired()] for copy in copies]
        most.append(Most(sum(map(bool, there)), sum(map(sum, there))))
        return values

    monkeypatch.setattr(Unit, "wait_for_unshard", watched)
    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), **options)
    gc.collect()
    gc.disable()  # what is freed must be freed without the collector
    try:
        for _ in range(2):  # the second gathers ahead
            alive.clear()
            most.clear()
            run(own, batches(width)[0])
    finally:
        gc.enable()
    return Most(*map(max, zip(*most, strict=True)))


@pytest.mark.parametrize(("name", "live", "prefetch"), in_pairs(["plain", *WRAPS], (1, 3), (0, 2)))
def test_live_units_bound_unsharded_units(monkeypatch, name, live, prefetch):
    wrap = {"plain": lambda block: block, **WRAPS}[name]
    options = {"live_units": live, "prefetch": prefetch}
    mesh = fs.make_mesh({"data": N})
    actual = most_whole(
        monkeypatch,
        lambda p, x: tower(p, x, wrap),
        placed(tower_params(), 3, mesh),
        mesh,
        **options,
    )
    assert 1 <= actual.units <= live + prefetch


class Nested(nn.Module):
    """Names that say nothing of units: a stack, and a head tied to what stands before it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.body = nn.Sequential(
            nn.Linear(6, 6), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        )
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
    units = fs.nn.units_of(module, nn.TransformerEncoderLayer, nn.Linear)
    assert len(units) == 1 + 4 * 4 + 1 and units[:3] == (
        "body.0",
        "body.1.layers.0",
        "body.1.layers.0.self_attn.out_proj",
    )
    units = fs.nn.units_of(module, nn.TransformerEncoderLayer)
    assert units == tuple(f"body.1.layers.{layer}" for layer in range(4))
    own = fs.shard_params(params, fs.fsdp("data", unit=units), mesh=mesh)
    layer = sum(x.nbytes for name, x in params.items() if name.startswith("body.1.layers.0."))
    actual = most_whole(
        monkeypatch,
        lambda p, x: loss_of(apply(p, buffers, x)[0]),
        own,
        mesh,
        18,
        live_units=live,
        prefetch=0,
    )
    assert actual.bytes <= live * layer < sum(x.nbytes for x in params.values())
    coarse = fs.shard_params(params, fs.fsdp("data", unit=["body", "head"]), mesh=mesh)
    full = most_whole(
        monkeypatch,
        lambda p, x: loss_of(apply(p, buffers, x)[0]),
        coarse,
        mesh,
        18,
        live_units=live,
        prefetch=0,
    )
    assert full.bytes > 4 * layer


# -- what a loss function may do with parameters ------------------------------------------------------------------------------


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
    draw = torch.randn(3, 4, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    params = {"a": draw[0], "b": draw[1]}
    x = draw[2]
    mesh = fs.make_mesh({"data": N})
    own = fs.shard_params(params, fs.fsdp("data", unit=1) if stage == 3 else P(), mesh=mesh)
    gradients = fs.partition_optimizer(
        fs.optim.sgd(1.0), mesh=mesh, axis="data", stage=stage
    ).gradients
    _, grads = fs.value_and_grad(
        loss_fn, mesh=mesh, batch=P("data"), live_units=1, gradients=gradients
    )(own, x)
    leaves = {name: w.clone().requires_grad_() for name, w in params.items()}
    expected = torch.autograd.grad(loss_fn(leaves, x), [*leaves.values()])
    torch.testing.assert_close([fs.unshard(g) for g in grads.values()], [*expected])
    assert not any(shard.requires_grad for leaf in own.values() for shard in leaf.shards)


def test_unwritten_buffers_are_not_sent():
    mesh = fs.make_mesh({"data": 2})
    own = fs.shard_params({"w": torch.ones(())}, P(), mesh=mesh)
    buffers = {"mask": torch.ones(1000), "seen": torch.tensor(0.0), "name": "what is no tensor"}

    def loss_fn(p, buffers, x):
        return (p["w"] * x * buffers["mask"].mean()).mean(), buffers | {
            "seen": buffers["seen"] + x.mean()
        }

    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), has_buffers=True)
    with fs.ledger() as comm:
        (_, after), _ = run(own, buffers, torch.arange(4.0))
    assert comm.bytes() < buffers["mask"].nbytes / 10
    assert after["mask"] is buffers["mask"] and (after["seen"], after["name"]) == (
        1.5,
        buffers["name"],
    )


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
