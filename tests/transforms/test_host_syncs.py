"""What would make the host wait for an accelerator: a number read off a tensor that is there, or
one brought there.

No accelerator is needed to see it: parameters, state and batch are taken for tensors that lie
there, and so is all that is computed from them.  What is made of Python's numbers, and computed
from that alone, lies on the host; zeros, say, may lie anywhere.
"""

import threading
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fshard as fs
from fshard import P
from fshard.mesh.layout.sharded import flatten_shards
from fshard.transforms.fsdp.lazy_param import LazyParam

PACKAGE = Path(fs.__file__).parent
CPU_ONLY = {"_sample_digests", "compared_losses", "shrunk"}
"""Functions that read a tensor only if it `is_cpu`, which is so for all here."""


SIZED_BY_VALUES = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.bincount.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten._unique2.default,
}
"""Operations that read values on an accelerator, most for the shape of their result."""


def reads_values(func, args, kwargs):
    """Return whether an operation reads values of tensors, as an index by a mask does."""
    if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default):
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return func in SIZED_BY_VALUES


class Watch(TorchDispatchMode):
    """Note where the host waits for tensors that lie `there`; those that lie `here` may be read,
    but not brought there.

    `known` are the tensors that devices have told of, for one makes the results of a collective for
    all.
    """

    def __init__(self, there, here, monkeypatch, known=None):
        super().__init__()
        self.there, self.here = known or ({}, {})
        for tensors, own in ((there, self.there), (here, self.here)):
            own |= {memory(x): x for x in tensors}  # held: no other memory gets its name
        self.waits = []
        self.thread = threading.get_ident()  # of this device: the methods are those of all
        for name in ("tolist", "cpu", "numpy"):  # no operators
            monkeypatch.setattr(Tensor, name, self.noting(name, getattr(Tensor, name)))

    def noting(self, name, method):
        def call(x, *args, **kwargs):
            self.note(name, threading.get_ident() == self.thread and self.has(x))
            return method(x, *args, **kwargs)

        return call

    def has(self, x):
        return isinstance(x, LazyParam) or memory(x) in self.there

    def note(self, what, waits):
        if waits:
            names = [
                f.name
                for f in traceback.extract_stack()
                if Path(f.filename).is_relative_to(PACKAGE)
            ]
            if CPU_ONLY.isdisjoint(names):
                self.waits.append(f"{what} in {names[-1]}" if names else what)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = any(map(self.has, given))
        here = any(memory(x) in self.here for x in given)
        reads = reads_values(func, args, kwargs or {})
        self.note(func.__name__, there and (here or reads))
        result = func(*args, **(kwargs or {}))
        made = {memory(x): x for x in tree_leaves(result) if isinstance(x, Tensor)}
        if there:
            self.there |= made
        elif (
            here or func is torch.ops.aten.lift_fresh.default
        ):  # the tensor that torch.tensor makes of numbers
            self.here |= made
        return result


def memory(x):
    return x.untyped_storage()._cdata


def tensors(tree):
    return flatten_shards(tree)[0]


def loss_fn(params, batch):
    y = torch.nn.functional.layer_norm(batch["x"] @ params["w"], (3,), params["scale"])
    return ((y - batch["y"]) ** 2).mean()


def with_aux(params, batch):
    loss = loss_fn(params, batch)
    return loss, {"twice": 2 * loss.detach(), "one": 1}


def waits(monkeypatch, opt, stage=0, loss_fn=loss_fn, n=1, **options):
    """Return where the host of each device waits in the second and third step."""
    mesh = fs.make_mesh({"data": n})
    return fs.run(steps, monkeypatch, opt, stage, loss_fn, mesh, options, ({}, {}), mesh=mesh)


def steps(monkeypatch, opt, stage, loss_fn, mesh, options, known):
    generator = torch.Generator().manual_seed(0)
    params = {
        "w": torch.randn(4, 3, generator=generator),
        "scale": torch.ones(3),
        "unused": torch.ones(2),
    }
    params = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)
    state = opt.init(params)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), **options)
    batch = {
        "x": torch.randn(8, 4, generator=generator),
        "y": torch.randn(8, 3, generator=generator),
    }
    batch = fs.device_put(batch, fs.Layout(mesh, P("data")))
    params, state, _ = step(params, state, batch)
    with watching(monkeypatch, (params, batch), state, known) as watch:
        for _ in range(2):
            params, state, metrics = step(params, state, batch)
    assert all(watch.has(metrics[name]) for name in ("loss", "grad_norm", "finite"))
    return watch.waits


def watching(monkeypatch, trees, state, known):
    """Watch for reads of parameters, batches and state but for its numbers: counts and scales,
    which lie on the host.
    """
    on_host = [x for x in tensors(state) if not x.ndim]
    there = [x for x in tensors((trees, state)) if not any(x is one for one in on_host)]
    return Watch(there, on_host, monkeypatch, known)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"donate": True},
        {"accumulate": 2},
        {"accumulate": 2, "reduce_once": False},
        {"precision": "bf16"},
        {"reproducible": True},
        {"loss_fn": with_aux, "has_aux": True},
        {"weight": lambda part: 7},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_step_launches_without_host_sync(monkeypatch, stage, n, options):
    assert waits(monkeypatch, fs.optim.adamw(0.1), stage, n=n, **options) == [[]] * n


SCALED = fs.optim.loss_scaled(fs.optim.adamw(0.1))
ONE_READ = "_local_scalar_dense.default in all_finite"
WAITS = {
    **{
        name: (getattr(fs.optim, name)(0.1), {}, [])
        for name in ("sgd", "adam", "adamw", "lion", "lamb")
    },
    "scaled": (SCALED, {}, [ONE_READ]),
    "scaled, fp16": (SCALED, {"precision": "fp16"}, [ONE_READ]),
    "scaled, clipped, fp16": (
        fs.optim.loss_scaled(
            fs.optim.chain(fs.optim.clip_by_global_norm(0.1), fs.optim.adamw(0.1))
        ),
        {"precision": "fp16", "donate": True},
        [ONE_READ],
    ),
    "skipped": (fs.optim.skip_if_not_finite(fs.optim.adamw(0.1)), {}, [ONE_READ]),
    "weights on the device": (
        fs.optim.adamw(0.1),
        {"weight": lambda part: (part["y"] > 0).sum(), "accumulate": 2},
        ["tolist in _counts"],
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_optimizers_and_weights_sync_at_most_once_a_step(monkeypatch, name):
    opt, options, reads = WAITS[name]
    assert waits(monkeypatch, opt, **options) == [reads * 2]


def model(count=4):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.1)) for _ in range(count))
    )


def stage_steps(monkeypatch, schedule, mesh, known, options):
    stages = fs.pipeline.split_stages(model(schedule.stages), schedule.stages, "uniform")
    params = fs.shard_stages(stages, fs.fsdp("data"), mesh=mesh, schedule=schedule)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=3)
    state = opt.init(params)
    batch = fs.device_put(torch.ones(8, 4), fs.Layout(mesh, P("data")))
    how = {"batch": P("data"), "schedule": schedule, "loss": lambda y, x: y.square().mean()}
    step = fs.train_step(stages, opt, mesh=mesh, **how, **options)
    params, state, _ = step(params, state, batch)
    with watching(monkeypatch, (params, batch), state, known) as watch:
        for _ in range(2):
            params, state, metrics = step(params, state, batch)
    assert watch.has(metrics["loss"])
    return watch.waits


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"reproducible": True}], ids=str)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_step_in_stages_launches_without_host_sync(monkeypatch, name, options):
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule(name, stages=2, microbatches=4)
    assert (
        fs.run(stage_steps, monkeypatch, schedule, mesh, ({}, {}), options, mesh=mesh) == [[]] * 4
    )


def loop_steps(monkeypatch, plugin, known):
    booster = fs.Booster(plugin)
    net = model()
    net, opt, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), 0.1))
    x = torch.ones(8, 4)

    def step():
        loss = net(x).square().mean()
        booster.backward(loss, opt)
        booster.clip_grad_norm(opt, 1.0)
        opt.step()
        opt.zero_grad()
        return loss

    step()
    with watching(monkeypatch, (net.params, x), opt.state, known) as watch:
        losses = [step() for _ in range(2)]
    assert all(map(watch.has, losses))
    return watch.waits


PLUGINS = {
    "ddp": fs.DDPPlugin,
    "zero 2": partial(fs.ZeroPlugin, stage=2),
    "fsdp": fs.FSDPPlugin,
    "fsdp, bf16": partial(fs.FSDPPlugin, precision="bf16"),
    "fsdp, fp16": partial(fs.FSDPPlugin, precision="fp16"),
    "fsdp, reproducible": partial(fs.FSDPPlugin, reproducible=True),
}


@pytest.mark.parametrize("name", PLUGINS)
def test_step_of_a_loop_syncs_only_to_see_if_scaled_gradients_are_finite(monkeypatch, name):
    actual = fs.run(
        loop_steps, monkeypatch, PLUGINS[name](), ({}, {}), mesh=fs.make_mesh({"data": 2})
    )
    reads = [ONE_READ] * 2 if "fp16" in name else []
    assert actual == [reads] * 2


# -- experts ---------------------------------------------------------------------------------------


def expert_steps(monkeypatch, mesh, known, options, block):
    """Take steps of two layers of experts; a device has fewer rows than experts."""
    axes = ("data", "expert")
    local = tuple(axis for axis in ("expert", "model") if axis in mesh.axis_names)
    network = nn.Sequential(
        *(
            fs.nn.MoE(4, 3, experts=8, top_k=2, axis="expert", batch=axes, **options)
            for _ in range(2)
        )
    )
    apply, params, buffers = fs.functionalize(network)
    params = fs.shard_params(params, {"*.experts.*": P(local), "**": P()}, mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis=axes, stage=1)
    state = opt.init(params)

    def loss_fn(params, x):
        return block(lambda x: apply(params, buffers, x)[0])(x).square().mean()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P(axes), local=local)
    batch = fs.device_put(torch.randn(16, 4), fs.Layout(mesh, P(axes)))
    params, state, _ = step(params, state, batch)
    with watching(monkeypatch, (params, batch), state, known) as watch:
        step(params, state, batch)
    return watch.waits


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 1, 2), (1, 2, 2)]
)
@pytest.mark.parametrize(
    "options", [{}, {"capacity": 0.5}, {"capacity": 1.0, "shared": 3}], ids=str
)
def test_layer_of_experts_reads_one_table_of_counts(monkeypatch, sizes, options):
    names = ("data", "expert", "model") if sizes[2] > 1 else ("data", "expert")
    mesh = fs.make_mesh(dict(zip(names, sizes, strict=False)))
    if "model" in names:
        options = options | {"replicated": "model"}
    actual = fs.run(
        expert_steps, monkeypatch, mesh, ({}, {}), options, lambda block: block, mesh=mesh
    )
    assert actual == [["tolist in _read"] * 2] * len(actual)


def test_recomputed_layer_of_experts_reads_its_counts_again(monkeypatch):
    mesh = fs.make_mesh({"data": 1, "expert": 2})
    actual = fs.run(expert_steps, monkeypatch, mesh, ({}, {}), {}, fs.remat, mesh=mesh)
    assert actual == [["tolist in _read"] * 4] * 2


# -- sequences -------------------------------------------------------------------------------------


def sequence_steps(monkeypatch, mesh, known, how):
    """Take steps of attention over a sequence with documents, padding and dropout."""
    mode = fs.tensor.mode("1d", "model", mesh)

    def loss_fn(params, batch):
        shard, _ = fs.tensor.shard_sequence(batch, "seq", how=how)
        q, k, v = (shard["x"] @ params["qkv"]).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        masks = {"key_mask": shard["mask"], "document_ids": shard["documents"]}
        y = fs.tensor.attention(q, k, v, "seq", how, causal=True, **masks)
        y = fs.tensor.dropout(y.transpose(1, 2).flatten(2), 0.1, mode)
        return fs.tensor.token_mean(y.square().sum(-1), shard["mask"], "seq")

    params = fs.shard_params({"qkv": torch.randn(4, 12)}, P(), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=1)
    state = opt.init(params)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), local=("seq", "model"))
    batch = {
        "x": torch.randn(2, 8, 4),
        "mask": torch.rand(2, 8) > 0.2,
        "documents": torch.arange(8).expand(2, 8) // 3,
    }
    batch = fs.device_put(batch, fs.Layout(mesh, P("data")))
    params, state, _ = step(params, state, batch)
    with watching(monkeypatch, (params, batch), state, known) as watch:
        step(params, state, batch)
    return watch.waits


@pytest.mark.parametrize("how", ["gather", "ulysses", "ring", "zigzag", "rsa"])
def test_step_over_sharded_tokens_launches_without_host_sync(monkeypatch, how):
    mesh = fs.make_mesh({"data": 1, "seq": 2, "model": 1})
    assert fs.run(sequence_steps, monkeypatch, mesh, ({}, {}), how, mesh=mesh) == [[]] * 2
