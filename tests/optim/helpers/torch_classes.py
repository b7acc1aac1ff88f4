"""Optimizers as users write them on torch's base class, and a small model for them."""

import torch
from torch import nn

import fshard as fs
from tests.optim.helpers.optimizers import (
    tensor,
)

PLUGINS = {
    "ddp": fs.DDPPlugin,
    "zero 1": lambda **options: fs.ZeroPlugin(stage=1, **options),
    "zero 2": lambda **options: fs.ZeroPlugin(stage=2, **options),
    "fsdp": fs.FSDPPlugin,
}


class Net(nn.Module):
    """Matrices, vectors, a number, a layer that is not always used, and one that is in no group at
    first.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 5)
        self.third = nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.late = nn.Linear(2, 2, bias=False)

    def forward(self, x, deep=True):
        y = self.first(x).tanh()
        return self.scale * self.late(self.third(self.second(y).tanh() if deep else y))


def net():
    torch.manual_seed(1)
    return Net().double()


def x_of(step):
    return tensor((8, 3), torch.float64, step)


def groups_of(model, matrices_alone=False):
    own = [p for p in model.parameters() if p is not model.late.weight]
    matrices = {"params": [p for p in own if p.ndim == 2]}
    return (
        [matrices]
        if matrices_alone
        else [matrices, {"params": [p for p in own if p.ndim < 2], "lr": 0.03}]
    )


class Lion(torch.optim.Optimizer):
    """Elementwise, and says so."""

    sharding = "flat"

    def __init__(self, params, lr=0.02, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (first, second), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(torch.sign(m * first + p.grad * (1 - first)), alpha=-lr)
                m.mul_(second).add_(p.grad, alpha=1 - second)


class Factored(torch.optim.Optimizer):
    """Second moments of rows and columns, in float32; a vector has its own; writes `param.data`."""

    def __init__(self, params, lr=0.05, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                square = p.grad.float().square() + 1e-8
                decay = group["decay"]
                if not state:
                    state["count"], state["unused"] = 0, None
                    for name, shape in (
                        {"row": p.shape[:1], "column": p.shape[1:]}.items() if p.ndim == 2 else ()
                    ):
                        state[name] = torch.zeros(shape)
                    if p.ndim != 2:
                        state["whole"] = torch.zeros(p.shape)
                state["count"] += 1
                if p.ndim == 2:
                    state["row"].lerp_(square.mean(1), 1 - decay)
                    state["column"] = decay * state["column"] + (1 - decay) * square.mean(0)
                    moment = state["row"][:, None] * state["column"] / state["row"].mean()
                else:
                    moment = state["whole"].lerp_(square, 1 - decay)
                p.data = p.data - group["lr"] * p.grad / (
                    moment / (1 - decay ** state["count"])
                ).sqrt().to(p.dtype)


class Lars(torch.optim.Optimizer):
    """A trust ratio for each parameter, and an attribute that counts."""

    def __init__(self, params, lr=0.5, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    trust = 0.1 * p.norm() / (p.grad.norm() + 1e-3) / self.steps
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.mul_(group["momentum"]).add_(p.grad * trust)
                    p.sub_(m, alpha=group["lr"])


class MyAdagrad(torch.optim.Adagrad):
    """Its constructor makes the state, of which each device keeps its shard."""

    sharding = "flat"
