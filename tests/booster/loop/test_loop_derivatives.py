"""Derivatives that a loop takes itself, of inputs, parameters and activations, equal those of one
device.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fshard as fs
from fshard.errors import ModuleError

F64 = torch.float64
X = torch.randn(8, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3
MESHES = {
    "tensor": (2, {"tensor": 2}),
    "2d": (4, {"tensor": 4, "tensor_mode": "2d"}),
    "tensor and ZeRO-1": (4, {"tensor": 2, "zero_stage": 1}),
    "tensor and ZeRO-3": (4, {"tensor": 2, "zero_stage": 3}),
    "data": (2, {}),
    "ZeRO-3": (2, {"zero_stage": 3}),
}


class OneDevice:
    """A loop of torch alone, with the interface of a Booster."""

    def boost(self, model, optimizer):
        return model, optimizer

    def backward(self, loss, optimizer):
        loss.backward()


def network():
    torch.manual_seed(1)
    layers = nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers).to(F64)


def trained(step, booster, index=0, devices=1):
    """Return the parameters after two steps of a loop on this device's samples, and what the steps
    returned.
    """
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, *_ = booster.boost(model, optimizer)
    size = len(X) // devices
    rows = slice(index * size, index * size + size)
    results = []
    for _ in range(2):
        module = model.module if isinstance(booster, fs.Booster) else model
        returned = step(model, module, X[rows].clone(), Y[rows])
        loss, *values = returned if isinstance(returned, tuple) else (returned,)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        results += values
    full = model.unwrap() if isinstance(booster, fs.Booster) else model
    return {name: x.detach() for name, x in full.named_parameters()}, results


def boosted(step, mesh):
    """Return the same of each device of a mesh."""
    size, options = MESHES[mesh]
    devices = size // options.get("tensor", 1)

    def main():
        index = fs.axis_index("all") // (size // devices)
        plugin = fs.HybridParallelPlugin(sample=X[:4], **options)
        return trained(step, fs.Booster(plugin), int(index), devices)

    return fs.run(main, mesh=fs.make_mesh({"all": size}))


def gradient_penalty(model, module, x, y):
    x.requires_grad_()
    output = model(x)
    (g,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.cross_entropy(output, y) + g.square().sum(1).mean()


def laplacian(model, module, x, y):
    x.requires_grad_()
    u = model(x)[:, :1]
    (g,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    seconds = [torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
    return (sum(seconds) - 1).square().mean() + u.square().mean()


def perturbed_input(model, module, x, y):
    step = torch.zeros_like(x).requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(model(x + step), y), step)
    return F.cross_entropy(model(x + 0.1 * g.sign()), y)


def squared_parameters(model, module, x, y):
    loss = F.cross_entropy(model(x), y)
    return loss + 0.1 * sum(p.square().sum() for p in model.parameters())


def unsharded_sum_of_parameters(model, module, x, y):
    loss = F.cross_entropy(model(x), y)
    return loss + 0.1 * fs.unshard(sum(p.abs().sum() for p in model.parameters()))


def spectral_norms(model, module, x, y):
    loss = F.cross_entropy(model(x), y)
    weights = [fs.unshard(module[number].weight) for number in (0, 2, 4)]
    return loss + 0.1 * sum(torch.linalg.matrix_norm(w, 2) for w in weights)


def product_of_weights(model, module, x, y):
    loss = F.cross_entropy(model(x), y)
    product = module[2].weight @ module[0].weight
    gram = product @ product.T
    return loss + 0.1 * fs.unshard(gram.square().sum().sqrt() + module[2].bias.sum())


def gradients_of_activations(model, module, x, y):
    kept = []
    hooks = [
        layer.register_forward_hook(lambda layer, args, y: kept.append(y)) for layer in module[1:3]
    ]
    output = model(x)
    for hook in hooks:
        hook.remove()
    grads = torch.autograd.grad(output[:, 0].sum(), kept, create_graph=True)
    squares = sum(g.square().sum(1).mean() for g in grads)
    return output.square().mean() + fs.unshard(squares)


STEPS = [
    gradient_penalty,
    laplacian,
    perturbed_input,
    squared_parameters,
    unsharded_sum_of_parameters,
    spectral_norms,
    product_of_weights,
    gradients_of_activations,
]


@pytest.mark.parametrize(
    ("step", "mesh"),
    [
        *[(step, "tensor") for step in STEPS],
        (gradient_penalty, "2d"),
        (gradient_penalty, "tensor and ZeRO-3"),
        (gradient_penalty, "ZeRO-3"),
        (squared_parameters, "2d"),
        (squared_parameters, "tensor and ZeRO-1"),
        (unsharded_sum_of_parameters, "tensor and ZeRO-3"),
        (squared_parameters, "ZeRO-3"),
        (product_of_weights, "2d"),
        (gradients_of_activations, "tensor and ZeRO-3"),
    ],
)
def test_loops_that_differentiate_train_as_on_one_device(step, mesh):
    expected, _ = trained(step, OneDevice())
    for actual, _ in boosted(step, mesh):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def input_with_gradient(model, module, x, y):
    x.requires_grad_()
    return F.cross_entropy(model(x * 2), y), x


@pytest.mark.parametrize("mesh", ["tensor", "tensor and ZeRO-3", "data"])
def test_backward_adds_gradients_of_inputs_to_their_grad(mesh):
    expected, inputs = trained(input_with_gradient, OneDevice())
    size, options = MESHES[mesh]
    copies = options.get("tensor", 1)
    for device, (actual, parts) in enumerate(boosted(input_with_gradient, mesh)):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)
        for x, part in zip(inputs, parts, strict=True):
            rows = x.grad.chunk(size // copies)[device // copies]
            torch.testing.assert_close(part.grad, rows, rtol=1e-11, atol=1e-12)


def observed_activation(model, module, x, y):
    grads, kept = [], []

    def observe(layer, args, output):
        output.retain_grad()
        output.register_hook(lambda g: grads.append(fs.unshard(g).detach().clone()))
        kept.append(output)

    hooks = [layer.register_forward_hook(observe) for layer in module[:3]]
    loss = model(x).square().mean()
    for hook in hooks:
        hook.remove()
    return loss, grads, kept


@pytest.mark.parametrize("mesh", ["tensor", "2d"])
def test_hooks_of_activations_get_their_gradients(mesh):
    _, (expected, kept, *_) = trained(observed_activation, OneDevice())
    for _, (grads, arrays, *_) in boosted(observed_activation, mesh):
        torch.testing.assert_close(grads, expected, rtol=1e-11, atol=1e-12)
        assert len(arrays) == len(kept) == 3


def test_gradients_of_nested_keyword_inputs_are_right():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.words = nn.Embedding(5, 6)
            self.up = nn.Linear(6, 8)
            self.down = nn.Linear(8, 3)

        def forward(self, batch, *, scale):
            x, (y, count) = batch["x"], batch["more"]
            return (
                self.down(torch.tanh(self.up(x * y + x + self.words(batch["ids"])) * scale)) * count
            )

    def gradients(run):
        x = X.clone().requires_grad_()
        y = (X * 2).requires_grad_()
        scale = torch.tensor(1.5, dtype=F64, requires_grad=True)
        output = run({"x": x, "ids": torch.arange(8) % 5, "more": (y, 2)}, scale=scale)
        return torch.autograd.grad(output.square().sum(), [x, y, scale])

    def main():
        sample = {
            "batch": {"x": X, "ids": torch.arange(8) % 5, "more": (X, 2)},
            "scale": torch.tensor(1.5, dtype=F64),
        }
        booster = fs.Booster(fs.HybridParallelPlugin(tensor=2, sample=sample))
        model, *_ = booster.boost(Model().to(F64))
        return gradients(model)

    expected = gradients(Model().to(F64))
    for actual in fs.run(main, mesh=fs.make_mesh({"all": 2})):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


class Fused(nn.Module):
    """Has q, k and v in one weight, whose parts are arrays of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.qkv = nn.Linear(6, 24)
        self.out = nn.Linear(8, 6)

    def forward(self, x):
        q, k, v = self.qkv(x).split(8, dim=-1)
        return self.out(torch.tanh(q) * k.sigmoid() * v)


def test_penalties_on_fused_weights_are_those_of_one_device():
    def learnt(booster):
        model = Fused().to(F64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, *_ = booster.boost(model, optimizer)
        loss = model(X).square().mean()
        loss = loss + sum(p.square().sum() for p in model.parameters())
        loss = loss + sum(fs.unshard(p).norm() for p in model.parameters())
        booster.backward(loss, optimizer)
        optimizer.step()
        full = model.unwrap() if isinstance(booster, fs.Booster) else model
        return {name: x.detach() for name, x in full.state_dict().items()}

    def main():
        return learnt(fs.Booster(fs.HybridParallelPlugin(tensor=2, sample=X[:4])))

    expected = learnt(OneDevice())
    for actual in fs.run(main, mesh=fs.make_mesh({"all": 2})):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


# -- hooks -----------------------------------------------------------------------------------------


def run_hooked(register, *, is_before):
    def main():
        model = network()
        booster = fs.Booster(fs.HybridParallelPlugin(tensor=2, sample=X[:4]))
        if is_before:
            register(model)
        model, *_ = booster.boost(model)
        register(model.module)
        model(X)

    fs.run(main, mesh=fs.make_mesh({"all": 2}))


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize(
    "register",
    [
        lambda model: model[1].register_full_backward_hook(lambda layer, gi, go: None),
        lambda model: model[2].register_full_backward_pre_hook(lambda layer, go: None),
        lambda model: model.register_full_backward_hook(lambda layer, gi, go: None),
    ],
)
def test_backward_hooks_of_planned_modules_raise(register, is_before):
    with pytest.raises(ModuleError, match="must have no backward hooks.*model that boost returned"):
        run_hooked(register, is_before=is_before)


def test_backward_hooks_of_the_boosted_model_get_full_gradients():
    def step(model, module, x, y):
        grads = []
        hook = model.register_full_backward_hook(lambda layer, gi, go: grads.extend([*gi, *go]))
        loss = model(x.requires_grad_()).square().mean()
        hook.remove()
        return loss, grads

    _, expected = trained(step, OneDevice())
    for _, actual in boosted(step, "tensor"):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def test_parameters_of_experts_used_in_a_loop_raise():
    def main():
        torch.manual_seed(0)
        model = fs.nn.MoE(6, 8, experts=4, top_k=1, axis="expert")
        booster = fs.Booster(fs.HybridParallelPlugin(experts=2))
        model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.randn(4, 6))
        sum(p.square().sum() for p in model.parameters())

    with pytest.raises(ModuleError, match=r"experts.* must be used in the model's forward only"):
        fs.run(main, mesh=fs.make_mesh({"all": 2}))
