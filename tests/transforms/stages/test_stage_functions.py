"""Stages that compute again what they do not keep have the bits of those that keep all, and hold
less.
"""

import weakref
from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.autograd.function import Function
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard.pipeline.execution.leaves import Params
from fshard.pipeline.execution.saved_tensors import SavedActivations
from fshard.pipeline.execution.split_backward import split_backward

pytestmark = pytest.mark.filterwarnings(
    "ignore:Layer.counts was changed by a forward"
)  # where the tests count

LAYERS, MICROBATCHES = 3, 4
WAYS = ["always", "except_last", 1, 2, LAYERS]


class Watched(Function):
    """x^2, which keeps a tensor that is counted."""

    @staticmethod
    def forward(ctx, x, counts, where):
        kept = x.clone()
        counts.saved[where].append(weakref.ref(kept))
        ctx.save_for_backward(kept)
        ctx.look = lambda: counts.look(where)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (kept,) = ctx.saved_tensors
        ctx.look()
        return 2 * kept * g, None, None


class Counts:
    def __init__(self):
        self.saved = defaultdict(list)
        self.peak = defaultdict(int)
        self.calls = defaultdict(int)

    def __deepcopy__(self, memo):
        return self

    def look(self, where):
        self.saved[where] = [one for one in self.saved[where] if one() is not None]
        self.peak[where] = max(self.peak[where], len(self.saved[where]))


class Layer(nn.Module):
    def __init__(self, counts, where):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.where = where
        self.counts = counts

    def forward(self, x):
        self.counts.calls[self.where] += 1
        x = x.mul_(2)  # in place, at the entrance of a stage too
        return Watched.apply(self.drop(self.linear(x)).tanh(), self.counts, self.where)


def run(name, recompute):
    torch.manual_seed(0)
    counts = Counts()
    layers = [Layer(counts, where) for where in (0, 1) for _ in range(LAYERS)]
    stages = fs.pipeline.split_stages(layers, 2)
    functions, params = fs.nn.stage_functions(stages, recompute, microbatches=MICROBATCHES)
    schedule = fs.pipeline_schedule(name, stages=2, microbatches=MICROBATCHES)
    step = fs.pipeline.pipelined(
        functions,
        schedule,
        lambda y, _: y.square().mean(),
        mesh=fs.make_mesh({"pipe": 2}),
        reproducible=True,
    )
    actual = step(params, torch.linspace(0.5, 1, MICROBATCHES * 8).reshape(MICROBATCHES, 2, 4))
    return actual, counts


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_stage_recomputation_has_equal_bits(name):
    expected, kept = run(name, "never")
    assert kept.calls == {0: 12, 1: 12}
    for recompute in WAYS:
        actual, counts = run(name, recompute)
        assert torch.equal(actual.loss, expected.loss)
        for own, grads in zip(actual.gradients, expected.gradients, strict=True):
            assert own.keys() == grads.keys() and all(
                torch.equal(own[key], grads[key]) for key in grads
            ), recompute
        again = 9 if recompute == "except_last" else 12
        assert counts.calls == {0: 12 + again, 1: 12 + again}, (
            recompute
        )  # in two halves it is not done twice either


def test_stage_recomputation_holds_less_memory():
    peaks = {recompute: run("gpipe", recompute)[1].peak for recompute in ["never", *WAYS]}
    assert peaks["never"] == {0: 12, 1: 12}
    assert peaks["always"] == peaks[LAYERS] == {0: 3, 1: 3}
    assert peaks["except_last"] == {0: 6, 1: 6}
    assert peaks[2] == {0: 2, 1: 2} and peaks[1] == {0: 1, 1: 1}


@pytest.mark.parametrize("recompute", ["never", "always", 1])
def test_stage_recomputation_defers_weight_products(recompute):
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(), nn.Linear(4, 4))
    (function,), (params,) = fs.nn.stage_functions([layers], recompute)
    own = Params(params, trained=True)
    saved = SavedActivations()
    x = torch.randn(3, 4, requires_grad=True)
    with saved.recording():
        y = function(own.tree, x)
    end = get_gradient_edge(y)
    inputs = [get_gradient_edge(x)]
    with Products() as first:
        (gx,), later = split_backward([end], [torch.ones_like(y)], inputs, own.edges, saved)
    with Products() as second:
        actual = later()
    # recomputed layers have both their gradients in I; checkpoint stops early, before products
    # whose results are not read
    assert (first.count, second.count) == {"never": (2, 2), "always": (1 + 4, 0), 1: (4, 0)}[
        recompute
    ]
    assert all(g is not None for g in [gx, *actual])


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.counts = Counts()
        self.blocks = nn.ModuleList(Layer(self.counts, where) for where in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x.clone())
        return x


def test_stage_blocks_recompute_one_by_one():
    actual = []
    for recompute in ("never", 1, "always"):
        torch.manual_seed(0)
        model = Blocks()
        stages = fs.pipeline.split_stages(model, 2, sample=torch.ones(1, 4), blocks="blocks")
        model.counts.calls.clear()
        functions, params = fs.nn.stage_functions(stages, recompute)
        step = fs.pipeline.pipelined(
            functions,
            fs.pipeline_schedule("1f1b", stages=2, microbatches=2),
            lambda y, _: y.mean(),
            mesh=fs.make_mesh({"pipe": 2}),
            reproducible=True,
        )
        actual.append((step(params, torch.ones(2, 3, 4)), [*model.counts.calls.values()]))
    shapes = torch.tensor(
        [1, 1, 0, 0]
    )  # the second stage asks the first one's blocks once what they make of a shape
    assert [(torch.tensor(calls) - shapes).tolist() for _, calls in actual] == [
        [2] * 4,
        [4] * 4,
        [4] * 4,
    ]
    for (one, _), (other, _) in pairwise(actual):
        for own, grads in zip(one.gradients, other.gradients, strict=True):
            assert own.keys() == grads.keys() and all(
                torch.equal(own[key], grads[key]) for key in grads
            )
