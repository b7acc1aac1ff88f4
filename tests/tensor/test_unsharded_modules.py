"""Modules that arrays cannot run are found by the plan, and run on unsharded tensors: gradients
equal one device's.
"""

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
        self.function = function
        self.scale = nn.Parameter(torch.linspace(1, 2, width)) if width else None

    def forward(self, x):
        return self.function.apply(x if self.scale is None else x * self.scale)


class Spectrum(nn.Module):
    """An operation without a rule, written to a plain tensor."""

    def forward(self, x):
        y = torch.zeros(x.shape, dtype=x.dtype)
        y[:] = torch.fft.fft(x).real
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
        self.up = nn.Linear(4, 8)
        self.inner = inner
        self.down = nn.Linear(8, 4)
        self.unused = nn.Linear(2, 2)
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x):
        x = x + self.down(self.inner(self.up(x)))
        return x + self.second(self.first(x).relu())


CASES = {
    "linear": lambda: Apply(SquaredRelu),
    "coupled": lambda: Apply(NormedGradient),
    "with parameters": lambda: Apply(SquaredRelu, 8),
    "in training": lambda: TrainingOnly(SquaredRelu),
    "without a rule": Spectrum,
    "nested": lambda: Nested(SquaredRelu),
}


def train(case):
    """Return the gradients of the plan, and those of one device."""
    torch.manual_seed(0)
    model = Mlp(CASES[case]()).to(F64).train()
    x = torch.randn(6, 4, dtype=F64)
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
    expected = {name: w.grad for name, w in model.named_parameters()}
    return fs.unshard(grads), expected


@pytest.mark.parametrize("case", CASES)
def test_modules_on_unsharded_tensors_have_right_gradients(case):
    actual, expected = train(case)
    torch.testing.assert_close(actual, expected)


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

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


# -- operations of the model's own forward, and buffers that it writes -----------------------------


class Rotation(nn.Module):
    """Rotates pairs of features as complex numbers; one of them is selected by values."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 3)
        self.first = nn.Linear(3, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x):
        pairs = torch.view_as_complex(self.up(x).unflatten(-1, (4, 2)))
        angles = torch.polar(torch.ones(4, dtype=F64), torch.arange(4, dtype=F64))
        y = self.down(torch.view_as_real(pairs * angles).flatten(-2))
        return y + self.second(torch.tanh(self.first(y)))


class Experts(nn.Module):
    """Tokens of each expert are found by their values."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 2)
        self.last = nn.Linear(6, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(2)
        )

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(1, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen[:, 0] == number)
            y.index_add_(0, rows, expert(x[rows]) * weights[rows])
        return self.last(y)


class Steps(nn.Module):
    """Writes the result of each step into a tensor that the forward makes."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, 8)
        self.down = nn.Linear(8, 3)

    def forward(self, x):
        outputs = torch.zeros(len(x), 3, 8, dtype=F64)
        for i in range(3):
            outputs[:, i] = torch.tanh(self.up(x[:, 2 * i : 2 * i + 2]))
        return self.down(outputs * 2).sum(1)


class Forces(nn.Module):
    """Differentiates in its forward."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.down(torch.tanh(self.up(x)))
        (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy - gradient


class Statistics(nn.Module):
    """Writes buffers: BatchNorm's, by name and in place."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("square", torch.zeros(8))

    def forward(self, x):
        x = self.norm(self.up(x))
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        with torch.no_grad():
            self.square.mul_(0.9).add_(x.square().mean(0))
        return self.down(torch.tanh(x - self.mean) / (1 + self.square))


def train_loop(model, x, *, is_boosted, options=None):
    """Return parameters and buffers after two steps of a loop with a penalty of the input's
    gradient.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = fs.Booster(fs.HybridParallelPlugin(sample=x, **(options or {"tensor": 2})))
    if is_boosted:
        model, optimizer, *_ = booster.boost(model, optimizer)
    for _ in range(2):
        inputs = x.clone().requires_grad_()
        output = model(inputs)
        loss = output.square().mean()
        if not isinstance(getattr(model, "module", model), Forces):  # whose input is cut off
            (g,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
            loss = loss + g.square().mean()
        booster.backward(loss, optimizer) if is_boosted else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    full = model.unwrap() if is_boosted else model
    return {name: x.detach() for name, x in full.state_dict().items()}


@pytest.mark.parametrize(
    "make", [Rotation, Experts, Steps, Forces, Statistics, lambda: Mlp(Spectrum())]
)
def test_loops_over_operations_without_a_rule_equal_one_device(make):
    def model():
        torch.manual_seed(1)
        return make().to(F64).train()

    torch.manual_seed(0)
    width = 4 if isinstance(model(), Mlp) else 6
    x = torch.randn(6, width, dtype=F64)
    expected = train_loop(model(), x, is_boosted=False)
    mesh = fs.make_mesh({"all": 2})
    for actual in fs.run(lambda: train_loop(model(), x, is_boosted=True), mesh=mesh):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_plan_names_operations_that_run_unsharded():
    plan = fs.tensor_parallel(Rotation().to(F64), axis="model", sample=torch.randn(4, 6, dtype=F64))
    assert plan.operations.keys() >= {"view_as_complex"}
    assert "test_unsharded_modules.py" in plan.operations["view_as_complex"]
    assert "up.weight" not in plan.layers
    assert {"first.weight", "second.weight"} <= plan.layers.keys()
    rows = [line.split() for line in str(plan).splitlines()]
    assert ["view_as_complex", "unsharded"] in [row[:2] for row in rows]


def test_plugin_gives_tolerance_and_ignored_parameters_to_the_check_of_its_plan():
    x = torch.randn(4, 6, dtype=F64)

    def boost(**options):
        def main():
            plugin = fs.HybridParallelPlugin(tensor=2, sample=x, **options)
            fs.Booster(plugin).boost(Steps().to(F64))

        fs.run(main, mesh=fs.make_mesh({"all": 2}))

    with pytest.raises(LayoutError, match="these differ: .*tensor_tolerance= and tensor_ignore="):
        boost(tensor_tolerance=0.0)
    with pytest.raises(LayoutError, match="these differ: down.bias by [^;]*; down.weight"):
        boost(tensor_tolerance=0.0, tensor_ignore=["the loss", "up.*"])
    boost(tensor_tolerance=0.0, tensor_ignore="*")


def test_plugin_gives_styles_of_weights_to_its_plan():
    plugin = fs.HybridParallelPlugin(
        tensor=2,
        sample=torch.randn(4, 6, dtype=F64),
        tensor_rules={"up.weight": "replicated", "down.weight": "replicated"},
    )

    ((_, plan),) = plugin.split(Steps().to(F64))

    assert plan.layers == {}
