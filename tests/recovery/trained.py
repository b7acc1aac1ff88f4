"""Programs that train a few steps on `run.mesh`, and keep each in `run`: an elastic run, or a folder.

Each returns its losses, and its parameters as plain tensors.
"""

from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs
from fshard import P

STEPS = 3
SLICES = 8
"""Parts of a batch whose gradients are added in one tree: on 1, 2, 4 or 8 devices it is the same."""


def batch_of(step, rows=24):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 4, generator=draw)
    return {"x": x, "y": x.sin().sum(1, keepdim=True)}


def mlp(dropout=0.0, norm=False):
    torch.manual_seed(0)
    hidden = nn.BatchNorm1d(6) if norm else nn.Dropout(dropout)
    return nn.Sequential(nn.Linear(4, 6), hidden, nn.GELU(), nn.Linear(6, 1))


def slices_on(mesh):
    """Return the number of slices on a mesh; on three devices sums round differently."""
    return SLICES if SLICES % mesh.size == 0 else mesh.size


def is_at_end(run, steps):
    """Return True if a program has made all its steps."""
    return steps == STEPS


def plain(tree):
    """Return a tree of plain tensors."""
    return fs.unshard(tree)


def loop(run, step, kept, batch=batch_of):
    """Train from the version of a run, or from the start."""
    losses = []
    if run.latest is not None:
        kept = run.restore(kept)
        losses = kept["losses"].tolist()[: kept["steps"]]
    while not is_at_end(run, kept["steps"]):
        trained = step(kept["params"], kept["state"], batch(kept["steps"]))
        kept["params"], kept["state"], metrics = trained
        losses.append(float(metrics["loss"]))
        kept["losses"] = torch.tensor(losses + [0.0] * (STEPS - len(losses)), dtype=torch.float64)
        kept["steps"] += 1
        run.save(kept["steps"], kept)
    return {"losses": losses, "params": plain(kept["params"])}


def beginning(step, params):
    """Return what a loop keeps."""
    losses = torch.zeros(STEPS, dtype=torch.float64)
    return {"params": params, "state": step.init(params), "losses": losses, "steps": 0}


def squared(apply, buffers):
    def loss_fn(params, batch):
        y, _ = apply(params, buffers, batch["x"])
        return (y - batch["y"]).square().mean()

    return loss_fn


def zero(run, stage=3, model=mlp, opt=None, memory="device", of_opt=None, **options):
    """ZeRO of a stage."""
    apply, params, buffers = fs.functionalize(model())
    rules = fs.fsdp("data") if stage == 3 else P()
    params = fs.shard_params(params, rules, mesh=run.mesh, memory=memory)
    opt = opt or fs.optim.adamw(1e-2)
    opt = fs.partition_optimizer(opt, mesh=run.mesh, axis="data", stage=stage, **(of_opt or {}))
    options = {"reproducible": True, "slices": slices_on(run.mesh), **options}
    step = fs.train_step(squared(apply, buffers), opt, mesh=run.mesh, batch=P("data"), **options)
    return loop(run, step, beginning(step, params))


def clipped(run):
    chain = fs.optim.chain(fs.optim.clip_by_global_norm(0.1), fs.optim.adamw(1e-2))
    return zero(run, opt=chain)


def fp16(run):
    scaled = fs.optim.loss_scaled(fs.optim.sgd(1e-2))
    return zero(run, 2, opt=scaled, precision="fp16")


def tensor_parallel(run):
    """ZeRO-3 beside a tensor axis of two."""
    model = mlp()
    plan = fs.tensor_parallel(model, axis="model", sample=batch_of(0)["x"])
    apply, params, buffers = fs.functionalize(model, plan=plan)

    def loss_fn(params, batch):
        y, _ = apply(params, buffers, batch["x"])
        return (plan.full(y) - batch["y"]).square().mean()

    params = fs.shard_params(params, fs.fsdp("data", within=plan.rules), mesh=run.mesh)
    opt = fs.optim.adamw(1e-2)
    options = {"local": plan.axes, "reproducible": True, "slices": SLICES}
    step = fs.train_step(loss_fn, opt, mesh=run.mesh, batch=P("data"), **options)
    return loop(run, step, beginning(step, params))


def stages(run):
    """Two stages by 1f1b, ZeRO-3 beside them."""
    microbatches = SLICES // run.mesh.shape["data"]
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=microbatches)
    parts = fs.pipeline.split_stages(mlp(), 2)
    params = fs.shard_stages(parts, fs.fsdp("data"), mesh=run.mesh, schedule=schedule)
    opt = fs.partition_optimizer(fs.optim.adamw(1e-2), mesh=run.mesh, axis="data", stage=3)

    def loss(y, batch):
        return (y - batch[1]).square().mean()

    options = {"schedule": schedule, "loss": loss, "reproducible": True}
    step = fs.train_step(parts, opt, mesh=run.mesh, batch=P("data"), **options)
    return loop(run, step, beginning(step, params), lambda s: (batch_of(s)["x"], batch_of(s)["y"]))


def experts(run):
    """Four experts, which an axis of two shards, and ZeRO-3 of each."""
    draw = torch.Generator().manual_seed(0)
    params = {"router": torch.randn(4, 4, generator=draw), "experts": {}}
    for name, shape in {"gate": (4, 6), "up": (4, 6), "down": (6, 4)}.items():
        params["experts"][name] = torch.randn(4, *shape, generator=draw) / 2
    params["head"] = torch.randn(4, 1, generator=draw)
    axes = ("expert", "data")

    def loss_fn(params, batch):
        x = batch["x"]
        routing = fs.experts.route(x @ params["router"], 2)
        y, _ = fs.experts.moe(x, routing, params["experts"], axis="expert")
        return ((x + y) @ params["head"] - batch["y"]).square().mean()

    rules = fs.fsdp(axes, within={"experts.*": P("expert"), "**": P()})
    params = fs.shard_params(params, rules, mesh=run.mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(1e-2), mesh=run.mesh, axis=axes, stage=3)
    options = {"local": "expert", "reproducible": True, "slices": SLICES}
    step = fs.train_step(loss_fn, opt, mesh=run.mesh, batch=P(axes), **options)
    return loop(run, step, beginning(step, params))


def compressed(run):
    """Gradients as their largest elements, with residuals: sums depend on the mesh."""
    compress = fs.comm.error_feedback(fs.comm.top_k(0.5))
    of_opt = {"compress": {"data": compress}}
    opt = fs.optim.sgd(0.1)
    return zero(run, 1, opt=opt, of_opt=of_opt, reproducible=False, slices=None)


def batchnorm(run):
    """Buffers that each step writes."""
    apply, params, buffers = fs.functionalize(mlp(norm=True), sync_batchnorm="data")

    def loss_fn(params, buffers, batch):
        y, buffers = apply(params, buffers, batch["x"])
        return (y - batch["y"]).square().mean(), buffers

    params = fs.shard_params(params, fs.fsdp("data"), mesh=run.mesh)
    opt = fs.partition_optimizer(fs.optim.sgd(0.1), mesh=run.mesh, axis="data", stage=3)
    step = fs.train_step(loss_fn, opt, mesh=run.mesh, batch=P("data"), has_buffers=True)
    kept = {"params": params, "state": step.init(params), "buffers": buffers, "steps": 0}
    if run.latest is not None:
        kept = run.restore(kept)
    while kept["steps"] < STEPS:
        trained = step(kept["params"], kept["state"], kept["buffers"], batch_of(kept["steps"]))
        kept["params"], kept["state"], kept["buffers"], _ = trained
        kept["steps"] += 1
        run.save(kept["steps"], kept)
    return {"params": plain(kept["params"]), "buffers": plain(kept["buffers"])}


def draws(run):
    """Numbers that are equal on all devices, added up: any mesh has the same sum."""
    layout = fs.Layout(run.mesh, P("data"))
    kept = {"w": fs.device_put(torch.zeros(12), layout), "steps": 0}
    if run.latest is not None:
        kept = run.restore(kept)
    while not is_at_end(run, kept["steps"]):
        drawn = fs.device_put(torch.rand(12), layout)
        kept = {"w": kept["w"] + drawn, "steps": kept["steps"] + 1}
        run.save(kept["steps"], kept)
    return {"w": plain(kept["w"]), "steps": kept["steps"]}


def boosted(run, plugin=None):
    """Torch's loop with a shuffled loader, which stops in the middle of an epoch."""
    return fs.run(_boosted, run, plugin, mesh=run.mesh)[0]


def _boosted(run, plugin):
    model = mlp(dropout=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = batch_of(0, 60)
    data = TensorDataset(batch["x"], batch["y"])
    loader = DataLoader(data, batch_size=24, shuffle=True)
    booster = fs.Booster(plugin or fs.ZeroPlugin(stage=2, reproducible=True))
    criterion = nn.MSELoss()
    model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, criterion, loader)
    if run.latest is not None:
        booster.load(run, model, optimizer, dataloader=loader)
    steps = run.latest or 0
    while steps < 4:
        for x, y in loader:
            booster.backward(criterion(model(x), y), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            booster.save(run, model, optimizer, dataloader=loader)
            if steps == 4:
                break
    return {name: plain(x).clone() for name, x in model.state_dict().items()}


def on_disk(run):
    """Adam's state in files, which each update writes in place."""
    options = {"reproducible": False, "slices": None, "donate": True}
    return zero(run, of_opt={"state_memory": "disk"}, **options)


def of_count(devices):
    return fs.make_mesh({"data": len(devices)}, devices=devices)


def of_two(devices):
    """Two devices train, and the others are spares: so sums round alike after a loss."""
    return of_count(devices) if len(devices) == 2 else None


def of_pairs(axis):
    def make_mesh(devices):
        axes = {axis: 2, "data": -1}
        return fs.make_mesh(axes, devices=devices)

    return make_mesh


def of_powers(devices):
    if len(devices) == 3:
        return None
    return of_count(devices)


PROGRAMS = {
    "zero 0": (of_powers, partial(zero, stage=0)),
    "zero 1": (of_powers, partial(zero, stage=1)),
    "zero 2": (of_powers, partial(zero, stage=2)),
    "zero 3": (of_powers, zero),
    "state on the host": (of_powers, partial(zero, of_opt={"state_memory": "host"})),
    "parameters on the host": (of_powers, partial(zero, memory="host")),
    "accumulation": (of_powers, partial(zero, accumulate=2)),
    "dropout": (of_powers, partial(zero, model=partial(mlp, 0.5))),
    "clipping": (of_powers, clipped),
    "fp16": (of_powers, fp16),
    "tensor axis": (of_pairs("model"), tensor_parallel),
    "1f1b": (of_pairs("pipe"), stages),
    "experts": (of_pairs("expert"), experts),
    "booster": (of_powers, boosted),
    "draws": (of_count, draws),
}
"""The function that makes the mesh, and the program. Its bits are those of any such mesh."""

PROGRAMS_OF_TWO = {"state on disk of two": (of_two, on_disk)}
"""Programs whose mesh has two devices before and after a loss."""

PROGRAMS_OF_A_MESH = {
    "three devices": (of_count, zero),
    "batchnorm": (of_count, batchnorm),
    "compress": (of_count, compressed),
    "state on disk": (of_count, on_disk),
}
"""Programs whose sums round differently on another mesh."""
