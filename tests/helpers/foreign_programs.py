"""Programs whose backwards run in threads of another engine."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fshard as fs
from fshard import P
from fshard.errors import ModuleError


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layers(width=4, count=5):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)) for _ in range(count))
    )


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 0.1)


def mesh_of(axis="data"):
    return fs.make_mesh({axis: 2})


def zero(stage, **options):
    """Take a step whose gradients fill buckets in the backward, and whose units are unsharded again
    in it.
    """
    mesh = mesh_of()
    apply, params, buffers = fs.functionalize(layers())
    params = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=stage)

    def loss_fn(params, x):
        return apply(params, buffers, x)[0].square().mean()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), bucket=1, **options)
    state = opt.init(params)
    x = draw(8, 4)
    for _ in range(2):
        params, state, metrics = step(params, state, x)
    return fs.unshard(params), metrics["loss"]


def stages():
    """Run a schedule whose backwards are in two halves."""
    mesh = mesh_of("pipe")
    schedule = fs.pipeline_schedule("zb-h1", stages=2, microbatches=4)
    stages = fs.pipeline.split_stages(layers(count=4), 2, "uniform")
    params = fs.shard_stages(stages, P(), mesh=mesh, schedule=schedule)
    gradient = fs.value_and_grad(
        stages, mesh=mesh, batch=P(), schedule=schedule, loss=lambda y, x: y.square().mean()
    )
    loss, grads = gradient(params, draw(8, 4))
    return loss, fs.unshard(grads)


def booster(wrap=lambda layer: layer, **options):
    """Train in torch's loop; also take the gradient of an input, by a backward that is the caller's
    own.
    """
    mesh = mesh_of()
    made = fs.Booster(fs.FSDPPlugin(mesh=mesh, **options))
    model = layers()
    model, opt, *_ = made.boost(nn.Sequential(*map(wrap, model)), adamw(model))
    x = draw(4, 4).to(mesh.device_type).requires_grad_(not options)
    for _ in range(2):
        loss = model(x).square().mean()
        made.backward(loss, opt)
        opt.step()
        opt.zero_grad()
    trained = dict(model.unwrap().named_parameters())
    return [trained] if options else [trained, *torch.autograd.grad(model(x).square().mean(), x)]


class Remat(nn.Module):
    """A layer that is run again in the backward; its parameters are unsharded there."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return fs.remat(self.layer, fs.nn.offload("dots"))(x)


def refused():
    """Call `loss.backward()` on a boosted model, which must raise the error that names the cure."""
    model = layers()
    model, *_ = fs.Booster(fs.FSDPPlugin(mesh=mesh_of())).boost(model, adamw(model))
    with pytest.raises(ModuleError, match=r"Call booster\.backward"):
        model(draw(4, 4)).mean().backward()


def tensor_parallel():
    mesh = fs.make_mesh({"data": 1, "model": 2})
    made = fs.Booster(fs.HybridParallelPlugin(tensor=2, mesh=mesh, sample=draw(2, 8)))
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(draw(*p.shape, seed=number))
    model, opt, *_ = made.boost(model, adamw(model))
    x = draw(2, 8).to(mesh.device_type)
    made.backward(model(x).square().mean(), opt)
    opt.step()
    return dict(model.unwrap().named_parameters())


def sequence_parallel():
    """Differentiate attention over a ring inside of `run`."""
    q = draw(1, 2, 8, 4).requires_grad_()

    def main():
        shards = [x.chunk(2, 2)[fs.axis_index("seq")] for x in (q, q * 2, q * 3)]
        fs.tensor.attention(*shards, "seq", causal=True).square().sum().backward()
        return q.grad

    return fs.run(main, mesh=mesh_of("seq"))


def array():
    """Differentiate arrays by their own methods; then a plain tensor of one, whose backward is the
    caller's own.
    """
    x = fs.device_put(draw(4, 6), fs.Layout(mesh_of(), P("data"))).requires_grad_()
    (F.layer_norm(x @ x.T, (4,)).sum() + x.softmax(0).square().sum()).backward()
    (g,) = torch.autograd.grad(x.exp().mean(), x)
    fs.unshard((x * g).sum()).backward()
    return fs.unshard(x.grad)


def mapped():
    """Differentiate a mapped function that is run again, by a backward that is the caller's own."""
    again = fs.remat(lambda x: fs.psum(x.sin(), "data").sin())
    x = fs.device_put(draw(4), fs.Layout(mesh_of(), P("data"))).requires_grad_()
    y = fs.shard_map(again, mesh=x.mesh, in_specs=P("data"), out_specs=P())(x)
    fs.unshard(y).sum().backward()
    return fs.unshard(x.grad)


class Mean(torch.autograd.Function):
    """A function of the user's own, whose backward calls a collective."""

    @staticmethod
    def forward(ctx, x):
        return fs.pmean(x, "data")

    @staticmethod
    def backward(ctx, g):
        return fs.pmean(g, "data")


def messages():
    """Differentiate messages and collectives inside of `run` by `Tensor.backward`."""
    x = draw(3).requires_grad_()

    def main():
        y = Mean.apply(x * (1 + fs.axis_index("data")))
        y = fs.remat(lambda y: fs.psum(y.sin(), "data").cos())(y)
        if fs.axis_index("data") == 0:
            value = fs.send(y, "data", to=1) + y.sum()
        else:
            value = (fs.recv(torch.zeros(3, requires_grad=True), "data", source=0) * y).sum()
        value.backward()
        return x.grad

    return fs.run(main, mesh=mesh_of())


PROGRAMS = {
    **{f"zero {stage}": (lambda stage=stage: zero(stage), 0) for stage in range(4)},
    "accumulated": (lambda: zero(2, accumulate=2), 0),
    "reproducible": (lambda: zero(3, reproducible=True), 0),
    "stages": (stages, 0),
    "booster": (booster, 1),
    "rematerialised": (lambda: booster(Remat), 1),
    "booster, reproducible": (lambda: booster(reproducible=True), 0),
    "refused": (refused, 1),
    "tensor parallel": (tensor_parallel, 0),
    "sequence parallel": (sequence_parallel, 0),
    "array": (array, 1),
    "mapped": (mapped, 1),
    "messages": (messages, 0),
}
"""Programs, and the number of their backwards that run in a thread of their own."""
