"""Linear layers on shards against the serial operation, and the elements that they send."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import fshard as fs
from fshard import P
from tests.tensor.serial import (
    GRIDS,
    SMALL,
    assert_equal_to_serial,
    examples,
    mapped,
    mode_of,
    randn,
    shard_of,
    units,
)

# torch itself uses torch.jit.script in its first jvp
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

T = fs.tensor
LAYERS = [(name, False) for name in GRIDS] + [(name, True) for name in GRIDS if name[0] in "13"]


@pytest.mark.parametrize(("name", "flipped"), LAYERS)
def test_linear_layers_equal_serial_to_the_second_derivative(name, flipped):
    """Two weights and one bias at once, of any sizes that the devices divide."""
    mode, mesh = mode_of(name)
    (batch, features), most = units(mode), st.integers(1, 3)
    mode = mode.next if flipped else mode

    def layer(x, w, b, v):
        y, z = T.linear(x, (w, v), mode, (b, None))
        return torch.cat([y, z], 1)

    def serial(x, w, b, v):
        return torch.cat([F.linear(x, w, b), F.linear(x, v)], 1)

    specs = mode.activation(3), mode.weight, mode.bias, mode.weight
    f = mapped(layer, mesh, specs, mode.next.activation(3))

    @settings(max_examples=examples(name))
    @given(most, most, most, st.integers(1, 4))
    def check(m, k, n, length):
        x = randn(m * batch, length, k * features)
        w = randn(n * features, k * features)
        assert_equal_to_serial(f, serial, (x, w, randn(n * features), -2 * w))

    check()


@given(st.sampled_from([2, 3]), st.integers(4, 9), st.integers(1, 4))
@settings(max_examples=8)
def test_column_and_row_take_hidden_features_that_devices_do_not_divide(t, hidden, rows):
    mesh = fs.make_mesh({"t": t})

    def on_shards(x, up, bias, down, last):
        up, bias, down = fs.pvary((up, bias, down), "t")
        up = shard_of(up, P("t"))
        bias = shard_of(bias, P("t"))
        down = shard_of(down, P(None, "t"))
        return T.row(T.column(x, up, "t", bias).sin(), down, "t", last)

    def serial(x, up, bias, down, last):
        return F.linear(F.linear(x, up, bias).sin(), down, last)

    if len(torch.empty(hidden).chunk(t)) == t:  # no shard is empty
        arguments = randn(rows, 4), randn(hidden, 4), randn(hidden), randn(3, hidden), randn(3)
        assert_equal_to_serial(mapped(on_shards, mesh, P(), P()), serial, arguments)


# -- what is sent and saved ------------------------------------------------------------------------


def ledger_of(mode, mesh, program, *arguments):
    """Return the ledger of a program of local tensors, forward and backward."""

    def step(*xs):
        xs = [x.requires_grad_() for x in xs]
        ys = program(*xs)
        ys = ys if isinstance(ys, tuple) else (ys,)
        return torch.autograd.grad(sum(y.sum() for y in ys), xs)

    specs = mode.activation(arguments[0].ndim), *(mode.weight for _ in arguments[1:])
    with fs.ledger() as comm:
        fs.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs, check=False)(*arguments)
    return comm


@pytest.mark.parametrize("runtime", ["virtual", "abstract"])
@pytest.mark.parametrize("name", GRIDS)
def test_elements_sent_equal_the_theory(name, runtime):
    mode, mesh = mode_of(name, runtime)
    kind, sizes = GRIDS[name]
    (batch, features), q = units(mode), sizes[-1]
    m = 2 * batch
    k = 3 * features
    n = 5 * features
    x = torch.ones(m, k, device=mesh.device_type)
    w = torch.ones(n, k, device=mesh.device_type)
    if kind == "1d":
        sent = ledger_of(
            mode, mesh, lambda x, w, v: T.linear(T.linear(x, w, mode), v.mT, mode.next), x, w, w
        ).bytes()
        theory = Fraction(4 * (q - 1), q) * m * k
    else:
        sent = ledger_of(mode, mesh, lambda x, w: T.linear(x, w, mode), x, w).bytes()
        d = sizes[0] if kind == "2.5d" else 1
        theory = {
            "2d": Fraction(3 * (q - 1), q**2) * (m * k + k * n),
            "2.5d": Fraction(3 * (q - 1), q**2) * (Fraction(m * k, d) + k * n)
            + Fraction(2 * (d - 1) * k * n, d * q**2),
            "3d": Fraction(2 * (q - 1), q**3) * (m * k + k * n + m * n),
        }[kind]
    assert sent / 4 == theory


@pytest.mark.parametrize("name", SMALL)
def test_tuple_of_weights_shares_each_collective(name):
    mode, mesh = mode_of(name)
    batch, features = units(mode)
    x = torch.ones(batch, features)
    w = torch.ones(features, features)
    one = ledger_of(mode, mesh, lambda x, w: T.linear(x, w, mode), x, w)
    three = ledger_of(mode, mesh, lambda x, *ws: T.linear(x, ws, mode), x, w, w, w)
    assert three.calls() == one.calls()
    assert three.bytes() <= 3 * one.bytes()


def test_summa_saves_local_shards_only():
    mode, mesh = mode_of("2d-3x3")
    saved = []

    def count(x, w):
        own = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda y: (own.append(y.numel()), y)[1], lambda y: y
        ):
            y = T.linear(x.requires_grad_(), w.requires_grad_(), mode)
        saved.append(sum(own))
        return y.detach()

    specs = mode.activation(2), mode.weight
    fs.shard_map(count, mesh=mesh, in_specs=specs, out_specs=mode.activation(2))(
        torch.ones(6, 9), torch.ones(3, 9)
    )
    assert set(saved) == {(6 * 9 + 3 * 9) // 9}


def test_frozen_weights_need_no_second_gather_of_activations():
    mode, mesh = mode_of("2d-2x2")
    x = torch.ones(4, 6)
    w = torch.ones(2, 6)

    def step(x, w):
        return torch.autograd.grad(T.linear(x.requires_grad_(), w, mode).sum(), x)[0]

    specs = mode.activation(2), mode.weight
    with fs.ledger() as comm:
        fs.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[0], check=False)(x, w)
    assert comm.bytes() / 4 == Fraction(1, 4) * (2 * x.numel() + 2 * w.numel())


TRANSFORMS = {
    "grad": lambda f, w: torch.func.grad(f)(w),
    "hessian": lambda f, w: torch.func.hessian(f)(w),
    "vmap": lambda f, w: torch.func.vmap(torch.func.grad(f))(torch.stack([w, -w])),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["1d-2", "2d-2x2", "3d-2x2x2"])
def test_torch_func_transforms_pass_through(name, transform):
    mode, mesh = mode_of(name)
    batch, features = units(mode)
    x = randn(batch, features)
    w = randn(features, features)
    f = mapped(
        lambda x, w: T.linear(x, w, mode),
        mesh,
        (mode.activation(2), mode.weight),
        mode.next.activation(2),
    )
    sharded, serial = (
        TRANSFORMS[transform](lambda w, f=f: f(x, w).sin().sum(), w) for f in (f, F.linear)
    )
    torch.testing.assert_close(sharded, serial)


def test_weights_of_another_layout_raise():
    mode, mesh = mode_of("2d-2x2")
    f = fs.shard_map(
        lambda x, *ws: T.linear(x, ws, mode)[0], mesh=mesh, in_specs=P(), out_specs=P()
    )
    with pytest.raises(
        ValueError, match=r'local shards \(out, 4\) of P\("b", "a"\); got \(4, 2\), \(4, 6\)'
    ):
        f(torch.ones(2, 4), torch.ones(4, 2), torch.ones(4, 4), torch.ones(4, 6))
