"""Embedding, norms, dropout, attention and the MLP on shards, against the serial operation."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

import fshard as fs
from fshard import P
from tests.tensor.serial import (
    GRIDS,
    SMALL,
    assert_equal_to_serial,
    attend,
    derivatives,
    dropped,
    mapped,
    mode_of,
    randn,
    shard_of,
    units,
)

T = fs.tensor
BOTH = [(name, False) for name in GRIDS]
BOTH += [(name, True) for name in GRIDS if name.startswith(("1", "3"))]
"""Grids, and whether the layer is the second of a pair: modes that have two kinds of layers."""


def settled(name, flipped):
    """Return a mode, its mesh, and a batch and features that the devices divide."""
    mode, mesh = mode_of(name)
    batch, features = units(mode)
    return (mode.next if flipped else mode), mesh, batch, 2 * features


@pytest.mark.parametrize(("name", "flipped"), BOTH)
def test_norms_equal_serial_to_the_second_derivative(name, flipped):
    mode, mesh, batch, features = settled(name, flipped)
    arguments = randn(batch, 2, features) + 3, randn(features), randn(features, seed=1)
    full = (features,)
    at = mode.activation(3)
    norm = mode.norm
    f = mapped(lambda x, w, b: T.layer_norm(x, w, mode, b, 0.1), mesh, (at, norm, norm), at)
    assert_equal_to_serial(f, lambda x, w, b: F.layer_norm(x, full, w, b, 0.1), arguments)
    f = mapped(lambda x, w: T.rms_norm(x, w, mode, 0.1), mesh, (at, norm), at)
    assert_equal_to_serial(f, lambda x, w: F.rms_norm(x, full, w, 0.1), arguments[:2])


def test_norms_without_weights_in_bfloat16_round_once():
    mode, mesh = mode_of("2d-2x2")
    x = randn(2, 3, 8, dtype=torch.bfloat16)
    at = mode.activation(3)
    for norm, serial in (T.layer_norm, F.layer_norm), (T.rms_norm, partial(F.rms_norm, eps=1e-6)):
        y = mapped(lambda x, norm=norm: norm(x, None, mode), mesh, at, at)(x)
        torch.testing.assert_close(y, serial(x.float(), (8,)).to(x.dtype), rtol=2**-7, atol=0)
        assert y.dtype == x.dtype


@pytest.mark.parametrize(("name", "flipped"), BOTH)
@pytest.mark.parametrize("by", ["embedding", "feature_embedding"])
def test_embeddings_equal_serial(name, flipped, by):
    mode, mesh, batch, features = settled(name, flipped)
    rows = 2 * mode.size(mode.vocabulary)
    ids = torch.randint(rows, (batch, 3), generator=torch.Generator().manual_seed(0))
    spec = mode.embedding if by == "embedding" else mode.features
    f = mapped(
        lambda i, w: getattr(T, by)(i, w, mode), mesh, (P(mode.tokens), spec), mode.activation(3)
    )
    assert_equal_to_serial(
        lambda w: f(ids, w), lambda w: F.embedding(ids, w), (randn(rows, features),)
    )


@pytest.mark.parametrize("name", ["1d-2", "1d-4", "2d-2x2", "2.5d-2x2x2", "3d-2x2x2"])
def test_embedding_and_tied_classifier_take_any_vocabulary(name):
    """51 rows, which no number of devices here divides; the classifier of 1d too."""
    mode, mesh, batch, features = settled(name, False)
    ids = torch.arange(batch * 17).reshape(batch, 17) % 51

    def on_shards(ids, x, weight):
        own = shard_of(fs.pvary(weight, mesh.axis_names), mode.embedding)
        y = T.embedding(shard_of(ids, P(mode.tokens)), own, mode, vocabulary=51)
        if mode.kind != "1d":
            return y
        logits = T.classifier(x + y, own, mode)
        labels = T.cross_entropy(logits, ids, mode.next, vocabulary=51, reduction="none")
        return y * labels[..., None]

    def serial(x, weight):
        y = F.embedding(ids, weight)
        if mode.kind != "1d":
            return y
        return y * F.cross_entropy(F.linear(x + y, weight).mT, ids, reduction="none")[..., None]

    f = mapped(on_shards, mesh, (P(), P(), P()), mode.activation(3))
    assert_equal_to_serial(
        lambda x, w: f(ids, x, w), serial, (randn(batch, 17, features), randn(51, features))
    )


@pytest.mark.parametrize("name", GRIDS)
def test_tied_classifier_equals_serial(name):
    mode, mesh, batch, features = settled(name, False)
    rows = 2 * mode.size(mode.vocabulary) * mode.next.size()
    f = mapped(
        lambda x, w: T.classifier(x, w, mode),
        mesh,
        (mode.activation(3), mode.embedding),
        mode.next.activation(3),
    )
    assert_equal_to_serial(f, F.linear, (randn(batch, 2, features), randn(rows, features)))


# -- dropout ---------------------------------------------------------------------------------------


def test_dropout_masks_are_equal_however_the_activation_is_sharded():
    x = torch.ones(36, 2, 36)
    first = dropped(*mode_of("1d-2"), x)
    for name, flipped in BOTH[1:]:
        mode, mesh = mode_of(name)
        assert torch.equal(dropped(mode.next if flipped else mode, mesh, x), first), name
    assert not torch.equal(dropped(*mode_of("1d-2"), x, seed=8), first)


def test_dropout_masks_in_a_loss_function_are_equal_however_features_are_sharded():
    """Slices differ, devices with the same slice do not."""
    mesh = fs.make_mesh({"data": 2, "a": 2})
    mode = T.mode("1d", "a", mesh)
    w = fs.shard_params({"w": torch.ones(8)}, P(), mesh=mesh)
    x = torch.ones(4, 8)

    def in_full(p, x):
        return T.dropout(x * p["w"], 0.5, mode).square().sum() + 0 * fs.axis_index("a")

    def by_features(p, x):
        own = shard_of(x * p["w"], P(None, "a"))
        return fs.psum(T.dropout(own, 0.5, mode.next).square().sum(), "a")

    gradients = []
    for loss_fn in in_full, by_features:
        torch.manual_seed(3)
        _, gradient = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))(w, x)
        gradients.append(fs.unshard(gradient["w"]))
    torch.testing.assert_close(gradients[0], gradients[1])
    assert len(gradients[0].unique()) > 2


def test_dropout_of_uneven_features_is_that_of_all():
    mode, mesh = mode_of("1d-2")
    x = randn(3, 7)

    def on_shards(x):
        return T.dropout(shard_of(x, P(None, "a")), 0.5, mode.next, features=7)

    torch.manual_seed(7)
    actual = fs.run(lambda: on_shards(x), mesh=mesh)
    torch.manual_seed(7)
    assert torch.equal(torch.cat(actual, 1), fs.run(lambda: T.dropout(x, 0.5, mode), mesh=mesh)[0])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_drops_independently_with_its_probability(p):
    mode, mesh = mode_of("1d-2")
    n = 400
    y = dropped(mode, mesh, torch.ones(n, n), p)
    assert set(y.unique().tolist()) <= {0.0, torch.tensor(1 / (1 - p)).item() if p < 1 else 0.0}
    zero = (y == 0).double()
    slack = 5 * (p * (1 - p)) ** 0.5 / n
    for shift in (
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (0, 2),
        (7, 3),
    ):  # alone, and together with a neighbour
        expected = p if shift == (0, 0) else p * p
        assert abs((zero * zero.roll(shift, (0, 1))).mean() - expected) <= slack + 1e-12
    assert ((zero.mean(0) - p).abs() <= slack * n**0.5 + 1e-12).all()


def test_dropout_gradient_has_the_mask_of_its_forward():
    mode, mesh = mode_of("2d-2x2")
    x = randn(4, 8)
    at = mode.activation(2)
    f = mapped(lambda x: T.dropout(x, 0.5, mode), mesh, at, at)

    def seeded(x):
        torch.manual_seed(1)
        return f(x)

    y, gradient = derivatives(seeded, (x,), order=1)
    torch.testing.assert_close(gradient == 0, y == 0)
    assert {0.0, 2.0} == set((y / x).round(decimals=9).unique().tolist())


# -- attention and the MLP -------------------------------------------------------------------------


def kv_heads(name):
    """Return the grid with numbers of heads, and of keys and values that divide them."""
    n = mode_of(name)[0].next.size()
    cases = set()
    for heads in (2 * n, 6 * n):
        cases |= {(name, heads, kv) for kv in (1, 2, n, 2 * n) if heads % kv == 0}
    return cases


CASES = {("3d-3x3x3", 6, 2)}
for grid in GRIDS:
    if "3x3x3" not in grid:
        CASES |= kv_heads(grid)


@pytest.mark.parametrize(("name", "heads", "kv"), sorted(CASES))
def test_self_attention_equals_serial(name, heads, kv):
    mode, mesh = mode_of(name)
    batch, features = units(mode)
    n = features
    width = 6 * heads
    weights = (
        randn(width, n),
        randn(6 * kv, n, seed=1),
        randn(6 * kv, n, seed=2),
        randn(6 * kv),
        randn(n, width),
    )
    inner = P(mode.next.hidden, mode.contracted), mode.kv_weight(kv), mode.kv_weight(kv)
    bias = P(mode.kv_weight(kv).entries[0] if mode.kv_weight(kv).entries else None)
    specs = mode.activation(3), *inner, bias, mode.next.weight
    options = {"heads": heads, "kv_heads": kv, "causal": True}

    def on_shards(x, q, k, v, b, out):
        return T.self_attention(x, (q, k, v), out, mode, qkv_bias=(None, b, None), **options)

    def serial(x, q, k, v, b, out):
        projected = F.linear(x, q), F.linear(x, k, b), F.linear(x, v)
        y = attend(*(y.unflatten(-1, (-1, 6)).transpose(1, 2) for y in projected), True)
        return F.linear(y.transpose(1, 2).flatten(2), out)

    arguments = randn(batch, 3, n), *weights
    assert_equal_to_serial(
        mapped(on_shards, mesh, specs, mode.activation(3)), serial, arguments, order=1
    )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_mlp_equals_serial_to_the_second_derivative(name, gated):
    mode, mesh, batch, n = settled(name, False)
    shapes = (batch, 2, n), (3 * n, n), (n, 3 * n), (3 * n,), (n,)
    arguments = [randn(*shape, seed=i) / 2 for i, shape in enumerate(shapes)]
    specs = mode.activation(3), mode.weight, mode.next.weight, mode.bias, mode.next.bias

    def on_shards(x, up, down, b, c):
        if gated:
            return T.mlp(
                x, (2 * up, up), down, mode, up_bias=(None, b), down_bias=c, activation=F.silu
            )
        return T.mlp(x, up, down, mode, up_bias=b, down_bias=c)

    def serial(x, up, down, b, c):
        y = F.linear(x, up, b)
        return F.linear(F.silu(F.linear(x, 2 * up)) * y if gated else F.gelu(y), down, c)

    assert_equal_to_serial(mapped(on_shards, mesh, specs, mode.activation(3)), serial, arguments)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((4, 4), "heads must be a multiple of 3; got 4"),
        ((6, 4), "kv_heads must divide heads, 6; got 4"),
    ],
)
def test_heads_that_devices_do_not_divide_raise(heads, message):
    mode, mesh = mode_of("2d-3x3")
    x = torch.ones(1, 1, 1)
    with pytest.raises(ValueError, match=message):
        fs.run(
            lambda: T.self_attention(x, (x[0],) * 3, x[0], mode, heads=heads[0], kv_heads=heads[1]),
            mesh=mesh,
        )


def test_shards_of_another_size_raise():
    mode, mesh = mode_of("1d-2")
    ids = torch.zeros(1, 1, dtype=torch.long)
    for size in (52, 49):
        with pytest.raises(ValueError, match="vocabulary must be the global size"):
            fs.run(
                lambda s=size: T.embedding(ids, torch.ones(25, 2), mode, vocabulary=s), mesh=mesh
            )
    with pytest.raises(ValueError, match="p must be a probability; got 1.5"):
        fs.run(lambda: T.dropout(torch.ones(2, 2), 1.5, mode), mesh=mesh)


def test_dropout_draws_on_the_host_whatever_the_default_device():
    x = torch.ones(4, 3)

    def device(name):
        with fs.keyed_random(0, 0), torch.device(name):
            return fs.tensor.dropout(
                x, 0.5, fs.tensor.mode("1d", "data", fs.make_mesh({"data": 1}))
            )

    mesh = fs.make_mesh({"data": 1})
    expected, actual = (fs.run(device, name, mesh=mesh)[0] for name in ("cpu", "meta"))
    assert actual.device == x.device and torch.equal(actual, expected)
