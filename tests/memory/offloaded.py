"""A loop whose state, or parameters, are in other memory, under each plugin and optimizer."""

from functools import cache, partial

import torch
from torch import nn

import fshard as fs
from fshard import optim
from fshard.mesh.layout import flatten
from fshard.mesh.layout.kinds import memory_of
from tests.booster.loops import Loop

HYBRID = partial(fs.HybridParallelPlugin, microbatches=2, sample=torch.zeros(2, 6))


PLUGINS = {  # name -> plugin, mesh, memories of parameters and of state with offload="host"
    "zero 1": (partial(fs.ZeroPlugin, stage=1), {"data": 2}, "device"),
    "zero 2": (partial(fs.ZeroPlugin, stage=2), {"data": 2}, "device"),
    "fsdp": (fs.FSDPPlugin, {"data": 2}, "host"),
    "fsdp of one device": (fs.FSDPPlugin, {"data": 1}, "host"),
    "hybrid 0": (partial(HYBRID, tensor=2), {"data": 1, "model": 2}, "device"),
    "hybrid 3": (partial(HYBRID, tensor=2, zero_stage=3), {"data": 2, "model": 2}, "host"),
    "stages 1": (partial(HYBRID, pipeline=2, zero_stage=1), {"pipe": 2, "data": 2}, "device"),
    "stages 3": (partial(HYBRID, pipeline=2, zero_stage=3), {"pipe": 2, "data": 2}, "host"),
}


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(groups(model), lr=0.05),
    "rmsprop": lambda model: torch.optim.RMSprop(groups(model), lr=0.05),
    "own class": lambda model: Signs(model.parameters(), lr=0.05),
    "lamb": lambda model: optim.lamb(0.05),
}


class Signs(torch.optim.Optimizer):
    """A class that torch has not: it steps on full parameters."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    m = self.state[x].setdefault("m", torch.zeros_like(x))
                    m.lerp_(x.grad, 0.1)
                    x.sub_(group["lr"] * m.sign())


def groups(model):
    """Return one group of matrices, and one of all other parameters."""
    matrices = [x for x in model.parameters() if x.ndim > 1]
    others = [x for x in model.parameters() if x.ndim <= 1]
    return [{"params": matrices}, {"params": others}]


def network(norm=nn.Identity):
    torch.manual_seed(1)
    layers = []
    for _ in range(4):
        layers += [nn.Linear(6, 6), nn.Tanh()]
    model = nn.Sequential(*layers, norm(6), nn.Dropout(0.25), nn.Linear(6, 6))
    model[10].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    return model


def norm_of(name):
    """Return a layer with buffers, unless the plugin plans its layers."""
    return nn.Identity if "hybrid" in name else nn.BatchNorm1d


def batch(step, part=0):
    return torch.randn(
        8, 6, generator=torch.Generator().manual_seed(10 * step + part)
    ), torch.zeros(8, 6)


def steps(loop, count=3):
    """Take steps of two backwards each; return losses and norms."""
    numbers = []
    for step in range(count):
        numbers += [
            loop.accumulate(*map(loop.part, batch(step, part)), sync=part > 0) for part in range(2)
        ]
        numbers.append(loop.booster.clip_grad_norm(loop.opt, 0.1, 2.0 if step else float("inf")))
        loop.step()
    return numbers


def loop_of(name, optimizer="adamw", **options):
    model = partial(network, norm_of(name))
    return Loop(
        model, PLUGINS[name][0](**options), OPTIMIZERS[optimizer], criterion=nn.functional.mse_loss
    )


def arrays_of(loop):
    """Return the arrays of parameters and state."""
    return loop.model.params, loop.opt.state.state_dict() if isinstance(
        loop.opt.optim, Signs
    ) else loop.opt.state


def looped(name, optimizer="adamw", **options):
    """Return what each device has after steps: losses, norms, full state; and its arrays."""

    def main():
        loop = loop_of(name, optimizer, **options)
        return (steps(loop), loop.state(), loop.opt.state_dict()), arrays_of(loop)

    return fs.run(main, mesh=fs.make_mesh(PLUGINS[name][1]))


def stepped(name, optimizer="adamw", **options):
    """Return what is there after some functional steps: metrics, full parameters and state; and the
    arrays.
    """
    make, axes, _ = PLUGINS[name]
    model = network(norm_of(name))
    booster = fs.Booster(make(mesh=fs.make_mesh(axes), **options))
    state = booster.init(model, OPTIMIZERS[optimizer](model), nn.MSELoss())
    seen = []
    for step in range(3):
        state, metrics = booster.step(state, batch(step))
        seen.append(metrics)
    return [
        (
            (seen, fs.unshard(state.params), fs.unshard(state.optimizer)),
            (state.params, state.optimizer),
        )
    ]


def tensors(tree):
    return [x.detach() for x in flatten(tree)[0] if isinstance(x, torch.Tensor)]


def is_same(result, expected):
    pairs = zip(
        tensors([values for values, _ in result]),
        tensors([values for values, _ in expected]),
        strict=True,
    )
    return all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs
    )  # of a step that overflows


def memories(tree):
    """Return the memories that layouts name, and those in which shards are."""
    names = set()
    for leaf in flatten(tree)[0]:
        if isinstance(leaf, fs.Sharded) and leaf.ndim > 0:
            names.add(leaf.layout.memory)
            names |= {memory_of(shard) for shard in leaf.shards if shard.numel() > 0}
    return names


RUNS = {"loop": looped, "step": stepped}


expected = cache(lambda run, name, optimizer: RUNS[run](name, optimizer))
