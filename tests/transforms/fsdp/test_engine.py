"""The engine takes its storage and its reducer as protocols, for full models and for stages."""

from dataclasses import dataclass, replace

import torch

import fshard as fs
from fshard import P


@dataclass
class CountedStorage:
    """Uses the usual storage's shards, and records what is unsharded."""

    usual: object
    unsharded: list

    def unshard(self, indices):
        self.unsharded.append(tuple(indices))
        return self.usual.unshard(indices)


@dataclass
class DoublingReducer:
    """Returns twice the sums of the usual reducer."""

    usual: object

    def reduce(self, indices, gs, along):
        finish = self.usual.reduce(indices, gs, along)
        return lambda: [g * 2 for g in finish()]


def with_engine(gradient, unsharded):
    options = replace(
        gradient.how.unit_options, storage=lambda usual: CountedStorage(usual, unsharded), reducer=DoublingReducer
    )
    return replace(gradient, how=replace(gradient.how, unit_options=options))


def test_gradient_uses_given_storage_and_reducer():
    mesh, unsharded = fs.make_mesh({"data": 2}), []
    params = fs.shard_params([torch.ones(2, 2), torch.ones(2, 2)], fs.fsdp("data"), mesh=mesh)
    gradient = fs.value_and_grad(lambda ws, x: (x @ ws[0] @ ws[1]).mean(), mesh=mesh, batch=P("data"))
    x = torch.ones(4, 2)
    loss, grads = gradient(params, x)
    other, doubled = with_engine(gradient, unsharded)(params, x)
    assert torch.equal(loss, other)
    assert all(torch.equal(2 * fs.unshard(g), fs.unshard(d)) for g, d in zip(grads, doubled, strict=True))
    assert {(0,), (1,)} <= {*unsharded}


def test_staged_gradient_uses_given_storage_and_reducer():
    mesh, unsharded = fs.make_mesh({"pipe": 2, "data": 2}), []
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    params = fs.shard_stages([torch.ones(2, 2), torch.ones(2, 2)], fs.fsdp("data"), mesh=mesh, schedule=schedule)
    options = {"mesh": mesh, "batch": P("data"), "schedule": schedule, "loss": lambda y, x: y.mean()}
    gradient = fs.value_and_grad([lambda w, x: x @ w] * 2, **options)
    x = torch.ones(4, 2)
    loss, grads = gradient(params, x)
    other, doubled = with_engine(gradient, unsharded)(params, x)
    assert torch.equal(loss, other)
    assert all(torch.equal(2 * fs.unshard(g), fs.unshard(d)) for g, d in zip(grads, doubled, strict=True))
    assert (0,) in unsharded
