"""Mutants of planned models: with a collective left out, or a wrong mean or mask, loss or gradients differ from one device's."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fshard as fs
from fshard import P
from fshard.array import communicate, create
from fshard.array.dispatch import constrain
from fshard.mesh.collectives.moves import Psum, Pvary
from fshard.tensor import blocks
from fshard.tensor.run import running, sharded_inputs
from tests.tensor.small_gpt import Layer, Words, token_ids

IGNORED = -100
GRIDS = {
    "1d": ({"axis": "model"}, {"model": 2}),
    "2.5d": ({"axis": ("d", "i", "j"), "mode": "2.5d"}, {"d": 2, "i": 2, "j": 2}),
    "ring": ({"axis": "model", "sequence": "seq", "sequence_mode": "ring"}, {"seq": 2, "model": 2}),
}


def step(name):
    """Return loss and gradients of a planned model with dropout, on its grid or, without a name, on one device."""
    torch.manual_seed(0)
    model = nn.Sequential(Words(), Layer(dropout=0.3), nn.Linear(8, 12)).double()
    ids = token_ids(4)
    labels = ids.roll(-1, 1).masked_fill(torch.arange(4) < torch.tensor([[2], [0], [1], [2]]), IGNORED)
    options, grid = GRIDS[name or "1d"]
    plan = fs.tensor_parallel(model, sample=ids, check=False, **options)
    apply, params, buffers = fs.functionalize(model, plan=plan)
    mesh, local = (fs.make_mesh(grid), plan.axes) if name else (fs.make_mesh({"data": 1}), ())

    def loss_fn(params, batch):
        logits, _ = apply(params, buffers, batch[0])
        return plan.cross_entropy(logits, batch[1])

    own = fs.shard_params(params, plan.rules if name else P(), mesh=mesh)
    torch.manual_seed(1)
    loss, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=P(), local=local)(own, (ids, labels))
    return loss, fs.unshard(grads)


@cache
def one_device():
    return step(None)


def assert_equal_to_one_device(name):
    torch.testing.assert_close(step(name), one_device(), rtol=1e-6, atol=1e-6)


def without(kind, axis=None):
    """Return collectives of which one kind is left out, along all axes or one."""
    apply = communicate.apply

    def mutant(bound, shards):
        is_left_out = isinstance(bound.move, kind) and axis in (None, *bound.group.axes)
        return shards if is_left_out else apply(bound, shards)

    return mutant


def mean_of_means(plan, logits, labels):
    """Return the mean over devices of the means over their tokens."""
    with running(plan):
        targets = sharded_inputs(plan, labels, logits.mesh)
        scores, own = constrain(logits, P(None, "seq")).local, constrain(targets, P(None, "seq")).local
        return fs.pmean(F.cross_entropy(scores.flatten(0, 1), own.flatten()), "seq")


def stale(plan, xs):
    yield from ((source, xs) for source in range(plan.n))


def one_mask(values, layout, device):
    return SHARD_OF(values, layout, 0)


SHARD_OF = create.shard_of
MUTANTS = {
    "row without psum": ("1d", communicate, "apply", without(Psum)),
    "column without psum of cotangents": ("1d", communicate, "apply", without(Pvary)),
    "depth not reduced": ("2.5d", communicate, "apply", without(Pvary, "d")),
    "tokens not reduced": ("ring", communicate, "apply", without(Pvary, "seq")),
    "stale keys and values": ("ring", blocks.BlockPlan, "received", stale),
    "mean of means": ("ring", fs.tensor.Plan, "cross_entropy", mean_of_means),
    "one dropout mask on all shards": ("1d", create, "shard_of", one_mask),
}


@pytest.mark.parametrize("name", GRIDS)
def test_planned_model_with_dropout_and_ignored_labels_equals_one_device(name):
    assert_equal_to_one_device(name)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_of_a_planned_model_differs_from_one_device(mutant, monkeypatch):
    name, owner, function, other = MUTANTS[mutant]
    one_device()
    monkeypatch.setattr(owner, function, other)
    with pytest.raises(AssertionError, match="not (close|equal)"):
        assert_equal_to_one_device(name)
