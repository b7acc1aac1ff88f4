"""Modules that arrays cannot run are found by the plan, and run on unsharded tensors: gradients equal one device's."""

import pytest
import torch
from torch import nn
from torch.autograd.function import Function

import fshard as fs
from fshard import P
from fshard.errors import LayoutError

F64 = torch.float64


class SquaredRelu(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu() ** 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x.relu() * g  # no derivative of the forward


class NormedGradient(Function):
    """Its backward is not linear."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g / g.norm()


class Apply(nn.Module):
    def __init__(self, function, width=0):
        super().__init__()
        self.function, self.scale = (
            function,
            nn.Parameter(torch.linspace(1, 2, width)) if width else None,
        )

    def forward(self, x):
        return self.function.apply(x if self.scale is None else x * self.scale)


class CumulativeMaximum(nn.Module):
    """An operation without a rule, written to a plain tensor."""

    def forward(self, x):
        y = torch.zeros(x.shape, dtype=x.dtype)
        y[:] = x.cummax(-1).values
        return y


class TrainingOnly(Apply):
    def forward(self, x):
        return super().forward(x) if self.training else x


class Nested(Apply):
    """Finds its inner module first."""

    def __init__(self, function):
        super().__init__(function)
        self.inner = Apply(function)

    def forward(self, x):
        return super().forward(self.inner(x))


class Mlp(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.up, self.inner, self.down, self.unused = (
            nn.Linear(4, 8),
            inner,
            nn.Linear(8, 4),
            nn.Linear(2, 2),
        )
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = x + self.down(self.inner(self.up(x)))
        return x + self.second(self.first(x).relu())


CASES = {
    "linear": lambda: Apply(SquaredRelu),
    "coupled": lambda: Apply(NormedGradient),
    "with parameters": lambda: Apply(SquaredRelu, 8),
    "in training": lambda: TrainingOnly(SquaredRelu),
    "without a rule": CumulativeMaximum,
    "nested": lambda: Nested(SquaredRelu),
}


def train(case):
    """Return the gradients of the plan, and those of one device."""
    torch.manual_seed(0)
    model, x = Mlp(CASES[case]()).to(F64).train(), torch.randn(6, 4, dtype=F64)
    plan = fs.tensor_parallel(
        model, axis="model", sample=x, check=case != "coupled"
    )  # its loss is a mean over each output
    assert plan.unsharded.keys() == {"inner"} and "second.weight" in plan.layers
    assert "inner needs all that it produces" in str(plan)
    apply, params, buffers = fs.functionalize(model, plan=plan)

    def loss_fn(params, x):
        return plan.full(apply(params, buffers, x)[0]).square().mean()

    model(x).square().mean().backward()
    own = fs.shard_params(params, plan.rules, mesh=fs.make_mesh({"model": 2}))
    _, grads = fs.value_and_grad(
        loss_fn, mesh=fs.make_mesh({"model": 2}), batch=P(), local="model"
    )(own, x)
    wanted = {name: w.grad for name, w in model.named_parameters()}
    return fs.unshard(grads), wanted


@pytest.mark.parametrize("case", CASES)
def test_modules_on_unsharded_tensors_have_right_gradients(case):
    found, wanted = train(case)
    torch.testing.assert_close(found, wanted)


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(SquaredRelu.apply(self.up(x)))


def test_function_in_the_models_own_forward_raises():
    """No module inside contains it, so all of the model would be unsharded."""
    with pytest.raises(
        LayoutError,
        match=r"SquaredRelu is a torch.autograd(.|\n)*Root \(test_unsharded_modules.py:\d+\)",
    ):
        fs.tensor_parallel(Root(), axis="model", sample=torch.ones(2, 4))
    with pytest.raises(LayoutError, match="no layer that can be sharded.*SquaredRelu"):
        fs.tensor_parallel(nn.Sequential(Root()), axis="model", sample=torch.ones(2, 4))


def test_zero_gradients_pass_the_check():
    model = Mlp(nn.ReLU())
    nn.init.zeros_(model.second.weight), nn.init.zeros_(model.second.bias)
    model = nn.Sequential(model, nn.Linear(4, 4))
    nn.init.zeros_(model[1].weight), nn.init.zeros_(model[1].bias)
    assert fs.tensor_parallel(model, axis="model", sample=torch.randn(2, 4)).layers
