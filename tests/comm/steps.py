"""Steps with compressed gradients."""

import torch

import fshard as fs
from fshard import P, comm

AXES = {"node": 2, "gpu": 2}


FRACTION, RATE = 0.2, 0.1


FEEDBACK = comm.error_feedback(comm.top_k(FRACTION))


def full_params():
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "w": (6, 5),
        "b": (5,),
        "scale": (),
        "empty": (0, 3),
        "odd": (7,),
        "frozen": (5,),
        "unused": (8,),
    }
    params = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return {**params, "half": torch.ones(9, dtype=torch.bfloat16)}


def batch():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def loss_fn(params, x):
    y = (x @ params["w"] + params["b"] * params["frozen"]) * params["scale"]
    y = y @ params.get("tied", params["w"]).T + params["odd"][:6] * params["odd"][1:]
    return (
        y.square().mean()
        + (params["half"] * 4.0 ** torch.arange(-10, -1).bfloat16()).sum()
        + params["empty"].sum()
    )


def first_stage(params, x):
    return x @ params["w"] + params["b"] * params["frozen"]


def last_stage(params, y):
    return y * params["scale"] + params["odd"][:5]


def train(
    compress,
    *,
    stage=0,
    axis="gpu",
    opt=None,
    count=3,
    mesh=None,
    rules=None,
    tied=False,
    **options,
):
    """Train a model in which `frozen`, `unused` and maybe ties occur; return its parameters, state
    and metrics.
    """
    mesh = mesh or fs.make_mesh(AXES)
    params = full_params()
    params = fs.shard_params(
        {**params, "tied": params["w"]} if tied else params,
        rules or P(),
        mesh=mesh,
        frozen="frozen",
    )
    opt = fs.partition_optimizer(
        opt or fs.optim.sgd(RATE), mesh=mesh, axis=axis, stage=stage, compress=compress
    )
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P(mesh.axis_names), **options)
    return follow(step, params, opt, count)


def follow(step, params, opt, count, x=None):
    state = opt.init(params)
    metrics = []
    x = batch() if x is None else x
    for _ in range(count):
        params, state, values = step(params, state, x)
        metrics.append(values)
    return fs.unshard(params), state, metrics


def train_stages(
    compress,
    *,
    name="1f1b",
    axes=("pipe",),
    second=last_stage,
    keys=("scale", "odd"),
    count=3,
    **options,
):
    """Train in two stages, which have `w`, `b` and `frozen`, and the parameters of these keys."""
    mesh = fs.make_mesh({"node": 2, **dict.fromkeys(axes, 2)})
    schedule = fs.pipeline_schedule(name, stages=2, microbatches=2)
    full = full_params()
    params = [{key: full[key] for key in names} for names in (("w", "b", "frozen"), keys)]
    params = fs.shard_stages(params, P(), mesh=mesh, schedule=schedule)
    opt = fs.partition_optimizer(
        fs.optim.sgd(RATE), mesh=mesh, axis=axes[-1], stage=len(axes) - 1, compress=compress
    )
    step = fs.train_step(
        [first_stage, second],
        opt,
        mesh=mesh,
        batch=P(("node", *axes[1:])),
        schedule=schedule,
        frozen="0.frozen",
        loss=lambda y, x: y.square().mean(),
        inputs=lambda x: x,
        **options,
    )
    trees, state, metrics = follow(step, params, opt, count)
    return {**trees[0], **trees[1]}, state, metrics
