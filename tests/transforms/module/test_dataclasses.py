"""Trees of dataclasses, whoever has registered them, train as trees of dicts do."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten

optree_dataclasses: Any = optree.dataclasses


@dataclass
class Plain:
    w: Tensor
    b: Tensor | None


@dataclass(frozen=True, slots=True)
class Frozen:
    w: Tensor
    b: Tensor | None


@dataclass
class Strict:
    """One that would not be made of anything but whole matrices."""

    w: Tensor
    b: Tensor | None
    rows: int = field(init=False, metadata={"static": True})

    def __post_init__(self):
        assert self.w.ndim == 2
        self.rows = len(self.w)


@dataclass
class OfTorch:
    w: Tensor
    b: Tensor | None


@optree_dataclasses.dataclass(namespace="fshard")
class OfOptree:
    w: Tensor
    b: Tensor | None


@optree_dataclasses.dataclass(namespace="of somebody else")
class OfAnother:
    w: Tensor
    b: Tensor | None
    name: str = optree_dataclasses.field(default="linear", pytree_node=False)


class Pair(NamedTuple):
    w: Tensor
    b: Tensor | None


torch.utils._pytree.register_dataclass(OfTorch)
KINDS = (Plain, Frozen, Strict, OfTorch, OfOptree, OfAnother, Pair)


@dataclass
class Model:
    blocks: list[Any]
    head: Any
    rate: float = field(default=0.5, metadata={"static": True})


def model(kind, whole=Model):
    draw = torch.Generator().manual_seed(0)
    w = [torch.randn(4, 4, generator=draw, dtype=torch.float64) for _ in range(3)]
    return whole(
        blocks=[kind(w=w[0], b=w[0][0].clone()), kind(w=w[1], b=None)],
        head=kind(w=w[2], b=w[2][0].clone()),
    )


class Block(dict):
    __getattr__ = dict.__getitem__


optree.register_pytree_node(
    Block,
    lambda x: (list(x.values()), list(x)),
    lambda keys, xs: Block(zip(keys, xs, strict=True)),
    namespace="fshard",
)


def loss_fn(params, x):
    for one in [*params.blocks, params.head]:
        x = torch.tanh(x @ one.w + (0 if one.b is None else one.b))
    return (x**2).mean()


def trained(params, stage):
    mesh = fs.make_mesh({"data": 2})
    sharded_params = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(
        fs.optim.chain(fs.optim.clip_by_global_norm(0.1), fs.optim.adamw(0.1)),
        mesh=mesh,
        axis="data",
        stage=stage,
    )
    state = opt.init(sharded_params)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"))
    for turn in range(2):
        sharded_params, state, _ = step(
            sharded_params, state, torch.full((4, 4), 1.0 + turn, dtype=torch.float64)
        )
    return fs.unshard(sharded_params)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 3])
def test_dataclass_parameters_train_as_dicts(kind, stage):
    own = trained(model(kind), stage)
    expected = trained(model(Block, Block), stage)
    assert type(own) is Model and own.rate == 0.5
    assert [type(x) for x in (*own.blocks, own.head)] == [kind] * 3 and own.blocks[1].b is None
    actual = flatten(own)[0]
    wanted = flatten(expected)[0]
    assert len(actual) == 5 and all(map(torch.equal, actual, wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_rules_match_dataclass_fields(kind):
    mesh = fs.make_mesh({"data": 2})
    params = model(kind)
    if kind is not Strict:  # which does not take specs
        sharded_params = fs.shard_params(
            params, Model([P("data"), P()], kind(w=P(None, "data"), b=P())), mesh=mesh
        )
        assert [x.spec for x in flatten(sharded_params)[0]] == [
            P("data"),
            P("data"),
            P(),
            P(None, "data"),
            P(),
        ]
    if kind is not Pair:  # whose paths are numbers
        rules = {"blocks[*].w": P("data"), "head.**": P(None), "**": P()}
        sharded_params = fs.shard_params(params, rules, mesh=mesh, frozen="blocks[0].b")
        assert [
            x.spec
            for x in (sharded_params.blocks[0].w, sharded_params.blocks[0].b, sharded_params.head.w)
        ] == [
            P("data"),
            P(),
            P(None),
        ]
        assert sharded_params.blocks[0].b.layout.frozen and not sharded_params.head.b.layout.frozen


def test_batch_and_aux_may_be_dataclasses():
    def loss_fn(params, batch):
        return (params * batch.w).sum(-1), Plain(batch.w.sum(), None)

    mesh = fs.make_mesh({"data": 2})
    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), has_aux=True)
    params = fs.shard_params(torch.ones(3), P(), mesh=mesh)
    (loss, aux), gradient = run(params, Frozen(torch.ones(4, 3), torch.zeros(4)))
    assert (
        fs.unshard(loss).item() == 3
        and fs.unshard(gradient).tolist() == [1, 1, 1]
        and type(aux) is Plain
    )
