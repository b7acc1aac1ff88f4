"""Layouts that lie at one place along some axes, as the stages of a pipeline do: `on`."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten
from fshard.optim.contract import pure_step
from tests.optim.helpers.per_device_rules import ROWS

MESH = {"pipe": 2, "data": 2}


def numbers(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_spec_at_is_normalized():
    assert P(at={"pipe": 2}) == P(at={("pipe",): 2})
    both = P("model", at={"pipe": 2, "data": 1})
    assert both == P("model", at={"data": 1, "pipe": 2}) and hash(both) == hash(
        P("model", at={"data": 1, "pipe": 2})
    )
    assert both != P("model", at={"pipe": 1, "data": 1}) and both != P("model")
    assert (both.split_axes, both.at_axes, both.sharded_axes) == (
        ("model",),
        ("data", "pipe"),
        ("model", "data", "pipe"),
    )
    for spec in (
        both,
        P.flat("data", at={("pipe", "model"): 3}, shape=(2,)),
        P(at={"pipe": 0}),
        P(at={"a": 0, "b": 1}),
    ):
        assert eval(repr(spec)) == pickle.loads(pickle.dumps(spec)) == spec
        assert spec.shapeless.shape is None and spec.shapeless.at == spec.at


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (P.flat("data", at={"pipe": 1}), "f32[4, 6]{flat:data, at:pipe=1}"),
        (P("data", at={"pipe": 1}), "f32[4@data, 6]{at:pipe=1}"),
        (
            P(at={"pipe": 0, "data": 1}, unreduced="model"),
            "f32[4, 6]{at:data=1, at:pipe=0, U:model}",
        ),
        (P(None, "model", at={("pipe", "data"): 3}), "f32[4, 6@model]{at:pipe+data=3}"),
    ],
)
def test_typeof_shows_coordinates(spec, text):
    mesh = fs.make_mesh({**MESH, "model": 3})
    x = fs.device_put(torch.ones(4, 6), fs.Layout(mesh, spec))
    assert str(fs.typeof(x)) == text
    assert [shard.numel() > 0 for shard in x.shards] == [
        x.layout.has_any(device) for device in range(mesh.size)
    ]


def test_spec_at_invalid_raises():
    mesh = fs.make_mesh(MESH)
    for wrong in ({"pipe": -1}, {"pipe": True}, {"pipe": "1"}, {(): 0}):
        with pytest.raises(ValueError, match="at must map axes to coordinates"):
            P("data", at=wrong)
    with pytest.raises(TypeError, match="at must map axes to coordinates"):
        P.flat("data", at="pipe")
    with pytest.raises(fs.errors.LayoutError, match="names an axis more than once: data"):
        P("data", at={"data": 0})
    with pytest.raises(fs.errors.LayoutError, match=r"2 devices along data.*below 2"):
        fs.Layout(mesh, P(at={"pipe": 2, "data": 4}))
    with pytest.raises(fs.errors.LayoutError, match="written for shape"):
        fs.device_put(torch.ones(2), fs.Layout(mesh, P("data", at={"pipe": 1}, shape=(4,))))
    with pytest.raises(fs.errors.LayoutError, match="3 elements, which 2 devices"):
        fs.Layout(mesh, P("data", at={"pipe": 1}, shape=(3,))).global_shape((1,))


@pytest.mark.parametrize(
    "spec", [P.flat("data", at={"pipe": 1}), P("data", at={"pipe": 1})], ids=str
)
def test_reshard_at_coordinate_sends_only_there(spec):
    """Else a stage would wait for another."""
    mesh = fs.make_mesh(MESH)
    full = torch.arange(8.0)
    x = fs.device_put(full, fs.Layout(mesh, spec))
    with fs.ledger() as comm:
        y = fs.reshard(x, fs.Layout(mesh, P(at={"pipe": 1})))
    assert (
        [comm.bytes(device) for device in range(4)]
        == [0, 0, 16, 16]
        == [4 * n for n in (0, 0, 4, 4)]
    )
    assert [comm.calls(device) for device in range(4)] == [0, 0, 1, 1]
    assert [shard.tolist() for shard in y.shards] == [[], [], full.tolist(), full.tolist()]
    with fs.ledger() as counted:
        z = fs.device_put(
            torch.empty(8, device="meta"), fs.Layout(fs.make_mesh(MESH, runtime="abstract"), spec)
        )
        fs.reshard(z, fs.Layout(z.mesh, P(at={"pipe": 1})))
    assert (counted.bytes(), counted.bytes(0), counted.bytes(2)) == (16, 0, 16)


def test_visualize_at_coordinate_shows_devices(capsys):
    mesh = fs.make_mesh(MESH)
    fs.visualize(fs.device_put(torch.ones(4, 6), fs.Layout(mesh, P("data", at={"pipe": 1}))))
    text = capsys.readouterr().out
    assert (
        "at coordinate 1 along pipe, nothing elsewhere" in text
        and "48 B on each of 4 devices" in text
    )
    assert "│  2  │" in text and "│  3  │" in text


def test_shard_map_at_coordinate_in_and_out():
    mesh = fs.make_mesh(MESH)
    full = numbers((4, 3), 0).requires_grad_()
    spec = P("data", at={"pipe": 1}, shape=(4, 3))
    tripled = fs.shard_map(lambda x: 3 * x, mesh=mesh, in_specs=spec, out_specs=spec)(full)
    assert str(fs.typeof(tripled)) == "f32[4@data, 3]{at:pipe=1}"
    (gradient,) = torch.autograd.grad((fs.unshard(tripled) * full.detach()).sum(), full)
    assert torch.equal(fs.unshard(tripled), 3 * full) and torch.equal(gradient, 3 * full)
    number = torch.tensor(2.0, requires_grad=True)
    at = P(at={"pipe": 1}, shape=())
    squared = fs.shard_map(lambda x: x**2, mesh=mesh, in_specs=at, out_specs=at)(number)
    assert torch.autograd.grad(fs.unshard(squared), number)[0] == 4


OPTIMIZERS = {
    "adamw": lambda: fs.optim.adamw(0.1, weight_decay=0.01),
    "sgd": lambda: fs.optim.sgd(0.1, momentum=0.9),
    "muon": lambda: fs.optim.muon(0.1),
    "a pair of functions": lambda: ROWS,
}


def trained(mesh, name, stage, wholes, specs):
    """Return parameters and state after two steps."""
    params = fs.shard_params(wholes, specs, mesh=mesh)
    opt = fs.partition_optimizer(OPTIMIZERS[name](), mesh=mesh, axis="data", stage=stage)
    state = opt.init(params)
    for step in (1, 2):
        grads = [numbers(x.shape, 10 * step + seed) for seed, x in enumerate(wholes)]
        placed_grads = [
            fs.device_put(g, opt.gradients(x.layout)) for g, x in zip(grads, params, strict=True)
        ]
        params, state = pure_step(opt)(placed_grads, state, params)
    return params, state


def by_itself(name, wholes):
    """Return parameters after two steps without a mesh."""
    opt = OPTIMIZERS[name]()
    params = [x.clone() for x in wholes]
    state = opt.init(params)
    for step in (1, 2):
        grads = [numbers(x.shape, 10 * step + seed) for seed, x in enumerate(wholes)]
        params, state = pure_step(opt)(grads, state, params)
    return params


@settings(max_examples=30)
@given(st.data())
def test_optimizer_at_coordinates_equals_one_without(data):
    name = data.draw(st.sampled_from(sorted(OPTIMIZERS)))
    stage = data.draw(st.sampled_from([0, 1, 2, 3]))
    shapes = data.draw(
        st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=4)
    )
    wholes = [numbers(shape, seed) for seed, shape in enumerate(shapes)]
    rest = P.flat("data") if stage == 3 else P()
    specs = [rest.replace(at={"pipe": data.draw(st.sampled_from([0, 1]))}) for _ in shapes]
    params, state = trained(fs.make_mesh(MESH), name, stage, wholes, specs)
    assert [x.spec for x in params] == specs
    lying = [x for x in flatten(state)[0] if isinstance(x, fs.Sharded)]
    assert lying and all("pipe" in x.spec.at_axes for x in lying)
    alone, _ = trained(fs.make_mesh({"data": 2}), name, stage, wholes, [rest for _ in shapes])
    for x, y, z in zip(params, alone, by_itself(name, wholes), strict=True):
        assert torch.equal(fs.unshard(x), fs.unshard(y))
        torch.testing.assert_close(fs.unshard(x), z)


@pytest.mark.parametrize("stage", [1, 3])
def test_loss_with_params_at_coordinates_equals_serial(stage):
    mesh = fs.make_mesh(MESH)
    wholes = [numbers((3, 4), 0), numbers((4, 2), 1)]
    rest = [P.flat("data", at={"pipe": at}) if stage == 3 else P(at={"pipe": at}) for at in (0, 1)]
    x = numbers((4, 3), 2)

    def loss(params, x):
        return (x @ params[0] @ params[1]).square().mean()

    value, grads = fs.value_and_grad(loss, mesh=mesh, batch=P("data"))(
        fs.shard_params(wholes, rest, mesh=mesh), x
    )
    leaves = [full.clone().requires_grad_() for full in wholes]
    expected = loss(leaves, x)
    torch.testing.assert_close(value, expected.detach())
    for actual, wanted in zip(grads, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(fs.unshard(actual), wanted)
