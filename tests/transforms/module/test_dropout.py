"""Dropout in a functionalized module is keyed by the name of the layer and the number of its call."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from fshard.randomness import keyed_random

WIDTH = 32


class Noisy(nn.Module):
    """Draws by itself, before and after a layer that draws too, and calls that layer twice."""

    def __init__(self, before=0, first=True, run=lambda f, x: f(x)):
        super().__init__()
        self.first = nn.Dropout(0.5) if first else None
        self.drop = nn.Dropout(0.5)
        self.draws, self.run = before, run

    def forward(self, x):
        masks = {}
        for _ in range(self.draws):
            F.dropout(x)
        if self.first is not None:
            masks["first"] = self.first(x)
        masks["own"] = F.dropout(x) if not self.draws else None
        masks["drop 0"] = self.run(self.drop, x)
        masks["drop 1"] = self.run(self.drop, x)
        masks["own 1"] = F.dropout(x) if not self.draws else None
        return masks


class Stack(nn.Module):
    def __init__(self, *blocks, run=lambda f, x: f(x)):
        super().__init__()
        self.blocks = nn.ModuleDict({f"at {place}": block for place, block in blocks})
        self.run = run

    def forward(self, x):
        return {
            f"{name}.{key}": mask
            for name, block in self.blocks.items()
            for key, mask in self.run(block, x).items()
        }


def masks(module, key=0):
    apply, params, buffers = fs.functionalize(module)
    with keyed_random(1, 2, key):
        return {
            name: mask
            for name, mask in apply(params, buffers, torch.ones(WIDTH))[0].items()
            if mask is not None
        }


def same(one, other):
    return all(one[name].equal(other[name]) for name in one.keys() & other.keys())


def test_dropout_mask_is_independent_of_other_layers():
    actual = masks(Stack((0, Noisy()), (1, Noisy())))
    assert len(actual) == 10 == len({tuple(mask.tolist()) for mask in actual.values()})
    for others in (
        [(1, Noisy())],
        [(0, Noisy(before=3)), (1, Noisy())],
        [(0, Noisy(first=False)), (1, Noisy())],
        [(0, Noisy()), (7, Noisy()), (1, Noisy(first=False))],
    ):
        own = masks(Stack(*others))
        assert same(actual, own) and len(actual.keys() & own.keys()) >= 5
    assert not same(actual, masks(Stack((0, Noisy()), (1, Noisy())), key=1))


def again(f, x):
    return checkpoint(f, x, use_reentrant=False)


@pytest.mark.parametrize(
    "inner", [None, again, lambda f, x: fs.remat(f)(x)], ids=["", "checkpoint", "remat"]
)
@pytest.mark.parametrize(
    "run",
    [again, lambda f, x: fs.remat(f)(x), lambda f, x: fs.remat(f, "dots")(x)],
    ids=["checkpoint", "remat", "dots"],
)
@pytest.mark.parametrize("whole", [False, True])
def test_dropout_in_recomputed_block_repeats_its_mask(run, inner, whole):
    block = Noisy() if inner is None else Noisy(run=inner)
    apply, params, buffers = fs.functionalize(Stack((0, block), (1, block), (2, Noisy()), run=run))
    x = torch.ones(WIDTH, requires_grad=True)
    with keyed_random(3):
        plain = masks(Stack((0, block), (1, block), (2, Noisy())), key=0)
        call = (lambda f, x: fs.remat(f)(x)) if whole else (lambda f, x: f(x))
        once = call(lambda x: apply(params, buffers, x)[0], x)
        twice = call(lambda x: apply(params, buffers, x)[0], x)
    outputs = [*once.values(), *twice.values()]
    assert len(plain) == 15 and len({tuple(mask.tolist()) for mask in outputs}) == 30
    torch.rand(3)
    for y in reversed(outputs):  # where x is 1, y is its own derivative
        (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert g.equal(y)


class Within(nn.Module):
    """Calls a functional module by itself."""

    def __init__(self):
        super().__init__()
        self.inner = [fs.functionalize(Stack(("a", Noisy()), ("b", Noisy())))]

    def forward(self, x):
        ((apply, params, buffers),) = self.inner
        return apply(params, buffers, x)[0]


def test_dropout_masks_of_nested_layers_differ():
    actual = masks(Stack(("a", Within()), ("b", Within()), ("c", Noisy())))
    assert len(actual) == 25 == len({tuple(mask.tolist()) for mask in actual.values()})


@pytest.mark.parametrize("stage", [0, 3])
def test_dropout_masks_are_equal_on_any_mesh(stage):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = Stack((0, Noisy()), (1, Noisy()), run=lambda f, x: fs.remat(f)(x))
            self.w = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return torch.stack([*self.stack(x * self.w).values()])

    apply, params, buffers = fs.functionalize(Model())

    def gradient(n, accumulate=1):
        mesh = fs.make_mesh({"data": n})
        sharded_params = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)

        def loss_fn(params, x):
            return (apply(params, buffers, x)[0] * torch.arange(10.0)[:, None, None]).mean()

        torch.manual_seed(0)
        run = fs.grad(
            loss_fn, mesh=mesh, batch=P("data"), reproducible=True, slices=4, accumulate=accumulate
        )
        return fs.unshard(run(sharded_params, torch.ones(4, WIDTH)))["w"]

    expected = gradient(1)
    assert expected.unique().numel() > 5
    assert (
        gradient(2, 2).equal(expected)
        and gradient(4).equal(expected)
        and gradient(1, 4).equal(expected)
    )
