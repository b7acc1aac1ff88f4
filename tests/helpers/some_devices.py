"""Programs of every transform on a mesh, whose results are arrays and plain values.

Each is `program(mesh)`: it gets a mesh of its axes, of all devices or of some, draws from torch's
default generator, and returns a tree of `Sharded`s, tensors and numbers.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten
from fshard.mesh.spmd.scope import outside

PAIR = {"data": 2}


def mlp(dropout=0.0):
    layers = [nn.Linear(4, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 3)]
    return nn.Sequential(*layers)


def batch():
    return {"x": torch.randn(8, 4), "y": torch.randn(8, 3)}


def trained(mesh, rules, *, stage=0, axis="data", opt=None, model=None, of_opt=None, **options):
    """Take three steps; return parameters, state and metrics."""
    model = model or mlp()
    apply, params, buffers = fs.functionalize(model)

    def loss_fn(params, batch):
        y, _ = apply(params, buffers, batch["x"])
        return (y - batch["y"]).square().mean()

    params = fs.shard_params(params, rules, mesh=mesh)
    opt = opt or fs.optim.adamw(1e-2)
    opt = fs.partition_optimizer(opt, mesh=mesh, axis=axis, stage=stage, **(of_opt or {}))
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P(axis), **options)
    state = step.init(params)
    metrics = None
    for _ in range(3):
        params, state, metrics = step(params, state, batch())
    return params, state, metrics


def zero(mesh, stage, **options):
    rules = fs.fsdp("data") if stage == 3 else P()
    return trained(mesh, rules, stage=stage, **options)


def clipped(mesh):
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(0.1), fs.optim.adamw(1e-2))
    return zero(mesh, 3, opt=opt)


def fp16(mesh):
    return zero(mesh, 2, opt=fs.optim.loss_scaled(fs.optim.sgd(1e-2)), precision="fp16")


def skipping(mesh):
    return zero(mesh, 2, opt=fs.optim.skip_if_not_finite(fs.optim.sgd(1e-2)))


def dropout(mesh):
    return zero(mesh, 3, model=mlp(0.5))


def hsdp(mesh):
    return trained(mesh, fs.fsdp("data"), stage=3, axis="data")


def lazy(mesh):
    return fs.shard_params(fs.lazy(mlp), fs.fsdp("data"), mesh=mesh, seed=3)


def in_memory(mesh, memory):
    return zero(mesh, 3, of_opt={"state_memory": memory})


def params_on_host(mesh):
    apply, params, buffers = fs.functionalize(mlp())

    def loss_fn(params, x):
        y, _ = apply(params, buffers, x)
        return y.square().mean()

    params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh, memory="host")
    gradient = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))
    return gradient(params, torch.randn(8, 4))


def compressed(mesh):
    compress = fs.comm.error_feedback(fs.comm.top_k(0.5))
    apply, params, buffers = fs.functionalize(mlp())

    def loss_fn(params, batch):
        return (apply(params, buffers, batch["x"])[0] - batch["y"]).square().mean()

    params = fs.shard_params(params, P(), mesh=mesh)
    opt = fs.partition_optimizer(
        fs.optim.sgd(0.1), mesh=mesh, axis="data", stage=1, compress={"node": compress}
    )
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P(("node", "data")))
    state = opt.init(params)
    for _ in range(2):
        params, state, metrics = step(params, state, batch())
    return params, state, metrics


def local_steps(mesh):
    """DiLoCo of two replicas."""
    apply, params, buffers = fs.functionalize(mlp())

    def loss_fn(params, batch):
        return (apply(params, buffers, batch["x"])[0] - batch["y"]).square().mean()

    inner = mesh["data"]
    opt = fs.partition_optimizer(fs.optim.sgd(0.1), mesh=inner, axis="data", stage=1)
    step = fs.train_step(loss_fn, opt, mesh=inner, batch=P("data"))
    step = fs.comm.diloco(step, fs.optim.sgd(0.7), every=2, mesh=mesh, axis="node")
    params, state = step.init(fs.shard_params(params, P(), mesh=mesh))
    for _ in range(3):
        params, state, metrics = step(params, state, batch())
    return params, metrics, fs.comm.mean(params)


def gradient(mesh):
    """Losses, metrics and gradients; the loss draws."""
    params = fs.shard_params({"w": torch.randn(4, 3)}, fs.fsdp("data"), mesh=mesh)

    def loss_fn(params, x):
        y = (x + torch.randn_like(x)) @ params["w"]
        return y.square().mean(), {"rows": y.sum(1), "count": len(x), "total": y.sum()}

    aux = {"rows": "rows", "count": "sum", "total": "mean"}
    options = {"mesh": mesh, "batch": P("data"), "aux": aux}
    x = torch.randn(8, 4)
    value, grads = fs.value_and_grad(loss_fn, **options)(params, x)
    evaluated = fs.evaluate(loss_fn, **options)(params, x)
    return fs.unshard(value), fs.unshard(evaluated), grads


def only_gradient(mesh):
    """The gradient of a batch that no number of devices divides, weighted."""
    params = fs.shard_params({"w": torch.randn(4, 3)}, fs.fsdp("data"), mesh=mesh)

    def loss_fn(params, x):
        return (x @ params["w"]).square().mean()

    options = {"mesh": mesh, "batch": P("data"), "weight": lambda x: x[:, 0].square().sum()}
    return fs.grad(loss_fn, **options)(params, torch.randn(7, 4))


def batchnorm(mesh):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    apply, params, buffers = fs.functionalize(model, sync_batchnorm="data")

    def loss_fn(params, buffers, x):
        y, buffers = apply(params, buffers, x)
        return y.square().mean(), buffers

    params = fs.shard_params(params, P(), mesh=mesh)
    step = fs.train_step(loss_fn, fs.optim.sgd(0.1), mesh=mesh, batch=P("data"), has_buffers=True)
    state = step.init(params)
    metrics = None
    for _ in range(2):
        params, state, buffers, metrics = step(params, state, buffers, torch.randn(8, 4))
    return params, buffers, metrics


def mapped(mesh):
    """A mapped function that draws, with a gradient through it."""

    def f(x, w):
        return fs.psum((x + torch.randn_like(x)) @ w, "data"), fs.axis_index("data") * x

    g = fs.shard_map(
        f, mesh=mesh, in_specs=(P(None, "data"), P("data")), out_specs=(P(), P(None, "data"))
    )
    w = torch.randn(4, 3, requires_grad=True)
    y, z = g(torch.randn(2, 4), w)
    return y, z, g(torch.randn(2, 4), w)


def arrays(mesh):
    """Operations on arrays, with autograd."""
    x = fs.device_put(torch.randn(4, 6), fs.Layout(mesh, P("data")))
    w = fs.device_put(torch.randn(6, 2), fs.Layout(mesh, P(None, None))).requires_grad_()
    y = torch.nn.functional.gelu(x @ w)
    loss = y.square().mean() + torch.nn.functional.dropout(y).sum()
    loss.backward()
    noise = torch.randn_like(x)
    return y, loss, w.grad, fs.reshard(y, fs.Layout(mesh, P(None, "data"))), noise


def differentiated(mesh):
    """A loss that is differentiated by its batch."""
    params = fs.shard_params({"w": torch.randn(4, 3)}, fs.fsdp("data"), mesh=mesh)
    x = torch.randn(8, 4, requires_grad=True)
    loss, _ = fs.value_and_grad(
        lambda p, x: (x @ p["w"]).square().mean(), mesh=mesh, batch=P("data")
    )(params, x)
    return loss


def staged(mesh, name, stages):
    schedule = fs.pipeline_schedule(name, stages=stages, microbatches=4)
    layers = [
        nn.Linear(4, 8),
        nn.GELU(),
        nn.Dropout(0.3),
        nn.Linear(8, 8),
        nn.GELU(),
        nn.Linear(8, 1),
    ]
    parts = fs.pipeline.split_stages(nn.Sequential(*layers), stages)
    rules = fs.fsdp("data") if "data" in mesh.shape else P()
    params = fs.shard_stages(parts, rules, mesh=mesh, schedule=schedule)
    opt = fs.optim.adamw(0.1)
    if "data" in mesh.shape:
        opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=3)
    step = fs.train_step(
        parts,
        opt,
        mesh=mesh,
        batch=P("data") if "data" in mesh.shape else P(),
        schedule=schedule,
        loss=lambda y, batch: (y - batch[1]).square().mean(),
    )
    state = step.init(params)
    metrics = None
    for _ in range(2):
        params, state, metrics = step(params, state, (torch.randn(16, 4), torch.randn(16, 1)))
    return params, metrics


def tensor_parallel(mesh):
    model = mlp()
    with outside():  # a plan is checked on virtual devices of its own
        plan = fs.tensor_parallel(model, axis="model", sample=torch.ones(8, 4))
    apply, params, buffers = fs.functionalize(model, plan=plan)

    def loss_fn(params, batch):
        y, _ = apply(params, buffers, batch["x"])
        return (plan.full(y) - batch["y"]).square().mean()

    params = fs.shard_params(params, plan.rules, mesh=mesh)
    opt = fs.optim.adamw(1e-2)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P(), local=plan.axes)
    return step(params, opt.init(params), batch())


def experts(mesh):
    """Experts that a device has in part, beside ZeRO-3 of dense leaves."""
    shapes = {"gate": (4, 8), "up": (4, 8), "down": (8, 4)}
    params = {"router": torch.randn(4, 4)}
    params["experts"] = {name: torch.randn(4, *shape) for name, shape in shapes.items()}

    def loss_fn(params, x):
        routing = fs.experts.route(x @ params["router"], top_k=2)
        y, _ = fs.experts.moe(x, routing, params["experts"], axis="data", batch=("data",))
        return y.square().mean() + fs.experts.balance_loss(routing, ("data",))

    rules = fs.fsdp("data", within={"experts.*": P("data"), "**": P()})
    params = fs.shard_params(params, rules, mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(1e-2), mesh=mesh, axis="data", stage=3)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), local="data")
    return step(params, opt.init(params), torch.randn(8, 4))


def by_torch(mesh):
    return zero(mesh, 3, opt=fs.optim.from_torch(torch.optim.RMSprop))


def muon(mesh):
    def label(path, x):
        return "muon" if x.ndim == 2 else "adamw"

    opts = {"muon": fs.optim.muon(0.1), "adamw": fs.optim.adamw(0.1)}
    return zero(mesh, 3, opt=fs.optim.by_label(opts, label))


def accumulating(mesh):
    return zero(mesh, 2, opt=fs.optim.accumulate(fs.optim.adamw(1e-2), every=2))


def functional_booster(mesh, plugin=fs.ZeroPlugin):
    """The functional step of a Booster."""
    booster = fs.Booster(plugin(mesh=mesh))
    model = mlp(0.2)
    state = booster.init(model, torch.optim.AdamW(model.parameters()), nn.MSELoss())
    for _ in range(2):
        state, metrics = booster.step(state, (torch.randn(8, 4), torch.randn(8, 3)))
    return state.params, metrics


PROGRAMS = {
    "shard_map": (PAIR, mapped),
    "arrays": (PAIR, arrays),
    "value_and_grad": (PAIR, gradient),
    "uneven batch": (PAIR, only_gradient),
    "differentiated": (PAIR, differentiated),
    "zero 0": (PAIR, partial(zero, stage=0)),
    "zero 1": (PAIR, partial(zero, stage=1)),
    "zero 2 in slices": (PAIR, partial(zero, stage=2, accumulate=2)),
    "zero 3 reproducible": (PAIR, partial(zero, stage=3, reproducible=True)),
    "zero 3 donating in bf16": (PAIR, partial(zero, stage=3, donate=True, precision="bf16")),
    "dropout": (PAIR, dropout),
    "clipping": (PAIR, clipped),
    "fp16": (PAIR, fp16),
    "skipping": (PAIR, skipping),
    "hsdp": ({"replica": 2, "data": 2}, hsdp),
    "batchnorm": (PAIR, batchnorm),
    "compression": ({"node": 2, "data": 2}, compressed),
    "local steps": ({"node": 2, "data": 2}, local_steps),
    "experts": (PAIR, experts),
    "torch.optim": (PAIR, by_torch),
    "muon": (PAIR, muon),
    "accumulating optimizer": (PAIR, accumulating),
    "functional booster": (PAIR, functional_booster),
    "functional booster, gemini": (PAIR, partial(functional_booster, plugin=fs.GeminiPlugin)),
    "lazy": (PAIR, lazy),
    "state on the host": (PAIR, partial(in_memory, memory="host")),
    "state on disk": (PAIR, partial(zero, stage=3, donate=True, of_opt={"state_memory": "disk"})),
    "parameters on the host": (PAIR, params_on_host),
    "1f1b": ({"pipe": 2}, partial(staged, name="1f1b", stages=2)),
    "zb-h1 with zero": ({"pipe": 2, "data": 2}, partial(staged, name="zb-h1", stages=2)),
    "tensor parallel": ({"model": 2}, tensor_parallel),
}


def loop(mesh, plugin):
    """Torch's loop on the devices of a mesh, which make up the run."""
    model = mlp(0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 3))
    booster = fs.Booster(plugin(mesh=mesh))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    boosted = booster.boost(model, optimizer, nn.MSELoss(), loader, schedule)
    model, optimizer, criterion, loader, schedule = boosted
    loss = None
    if mesh.is_member:
        with fs.keyed_random(0):  # what these devices alone draw must not be drawn from the state
            for x, y in loader:
                loss = criterion(model(x), y)
                booster.backward(loss, optimizer)
                booster.clip_grad_norm(optimizer, 0.5)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    loss = None if loss is None else loss.detach()
    return booster.mean(loss), model.state_dict(), model.params


def staged_loop(mesh):
    """Stages of a boosted model: the loop runs outside of the mesh too."""
    layers = [nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 3)]
    optimizer = torch.optim.AdamW(nn.ModuleList(layers).parameters(), lr=1e-2)
    plugin = fs.HybridParallelPlugin(pipeline=2, microbatches=2, precision="fp16", mesh=mesh)
    booster = fs.Booster(plugin)
    model, optimizer, *_ = booster.boost(layers, optimizer)
    results = []
    for _ in range(2):
        batches = iter([(torch.randn(8, 4), torch.randn(8, 3))])
        results.append(
            booster.execute_pipeline(batches, model, nn.MSELoss(), optimizer, return_outputs=True)
        )
        results.append(booster.clip_grad_norm(optimizer, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return results, model.state_dict(), model.params


LOOPS = {
    "loop, ddp": (PAIR, partial(loop, plugin=fs.DDPPlugin)),
    "loop, zero": (PAIR, partial(loop, plugin=partial(fs.ZeroPlugin, stage=1))),
    "loop, fsdp": (PAIR, partial(loop, plugin=fs.FSDPPlugin)),
    "loop in stages": ({"pipe": 2}, staged_loop),
}
"""Programs that run as one device: in `fs.run`, or on processes."""


class Outcome(NamedTuple):
    """The results of a program.

    Args:
        values: full tensors in place of arrays; None outside of the mesh.
        types: of the arrays.
        draw: the number that is drawn next.
    """

    values: Any
    types: list[str]
    draw: float


def run_program(name, devices=None):
    """Run a program on a mesh of some devices, by default of all."""
    torch.manual_seed(0)
    axes, program = (PROGRAMS | LOOPS)[name]
    mesh = fs.make_mesh(axes, devices=devices)
    result = program(mesh)
    arrays = [x for x in flatten(result)[0] if isinstance(x, fs.Sharded)]
    types = [str(fs.typeof(x)) for x in arrays]
    return Outcome(fs.unshard(result), types, torch.rand(()).item())
