"""Arrays behave as tensors do: operators, conversions, gradients, in-place operations, errors.

The oracle is the same program on unsharded tensors.
"""

import copy
import io
import pickle
from pathlib import Path

import einops
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from fshard.array import lift
from fshard.errors import LayoutError, MeshError
from tests.array.op_database import list_rowless

# torch itself uses torch.jit.script in its first jvp
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)
MESH = fs.make_mesh({"data": 2, "model": 2})


def put(x, *entries, **more):
    return fs.device_put(x, fs.Layout(MESH, P(*entries, **more)))


def test_unreduced_results_are_reduced_once_and_scattered_where_wanted():
    x = put(torch.randn(8, 8), None, "model")
    w = put(torch.randn(8, 8), "model")
    with fs.ledger() as comm:
        y = (x @ w) * 2 + x @ w - (x @ w).T.T
    assert comm.calls() == 0
    with fs.ledger() as comm:
        z = y.sin() + 0
    assert set(comm.by_collective()) == {("psum", ("model",))}
    with fs.ledger() as comm:
        torch.maximum(y, put(torch.randn(8, 8), "model"))
    assert set(comm.by_collective()) == {("psum_scatter", ("model",))}
    assert z.spec == P()


def test_ledger_names_operation_and_line():
    x = put(torch.randn(8, 8), "data", unreduced="model")

    with fs.ledger() as comm:
        torch.relu(x)

    ((row, calls, sent),) = comm.rows()
    assert row.collective == "psum"
    assert "(relu)" in str(row.site)
    assert "test_protocols.py" in str(row.site)
    assert calls == 1
    assert sent == 4 * 8 * 4


def test_explicit_forbids_implicit_communication():
    x = put(torch.randn(8, 4), "data")
    z = put(torch.randn(8, 4), None, "data")
    communicating = [
        lambda: z.softmax(1),
        lambda: z.logsumexp(1),
        lambda: z.max(),
        lambda: float(x.sum()),
    ]
    with fs.array.explicit():
        _ = x + x
        message = r'fs.reshard\(x, fs.Layout\(mesh, P\("data"\)\)\) for argument 1'
        with pytest.raises(LayoutError, match=message):
            x + z
        for call in communicating:
            with pytest.raises(LayoutError, match="explicit"):
                call()
        assert (x + fs.array.constrain(z, P("data"))).spec == P("data")


def test_explicit_along_axes_allows_communication_along_others():
    x = put(torch.randn(8, 4), "data", "model")
    along_data = [lambda: x.softmax(0), lambda: x.logsumexp(0), lambda: x.sum(0).relu()]
    along_model = [lambda: x.softmax(1), lambda: x.logsumexp(1), lambda: float(x.sum())]
    with fs.array.explicit("model"):
        for call in along_data:
            call()
        for call in along_model:
            with pytest.raises(LayoutError, match=r'fs.array.explicit\("model"\) forbids'):
                call()
        assert fs.array.constrain(x, P("data")).spec == P("data")
        with fs.array.explicit("data"), pytest.raises(LayoutError, match='"model", "data"'):
            x.softmax(0)
        with fs.array.explicit(), pytest.raises(LayoutError, match=r"explicit\(\) forbids"):
            x.softmax(0)


def test_loss_stays_unreduced_along_explicit_axes():
    x = put(torch.randn(8, 4), "data", "model")
    y = put(torch.randn(8, 4), "data", "model")
    expected = torch.nn.functional.mse_loss(fs.unshard(x), fs.unshard(y))
    for axes, unreduced in ((("model",), "model"), (("data",), "data"), ((), ("data", "model"))):
        with fs.array.explicit(*axes):
            loss = torch.nn.functional.mse_loss(x, y)
        assert loss.spec == P(unreduced=unreduced)
        torch.testing.assert_close(fs.unshard(loss), expected)


def test_explicit_along_an_unknown_axis_raises():
    x = put(torch.randn(8, 4), "data")
    with fs.array.explicit("modle"), pytest.raises(MeshError, match='has no axis "modle"'):
        x.softmax(0)
    with pytest.raises(TypeError, match="axes must be names"):
        fs.array.explicit(("data", "model"))


def test_constrain_pins_layout_of_value_and_gradient():
    x = put(torch.randn(8, 4), "data").requires_grad_()
    y = fs.array.constrain(x, P(None, "model"))
    (g,) = torch.autograd.grad((y * y).sum(), y)
    assert (y.spec, g.spec) == (P(None, "model"), P(None, "model"))
    (y * y).sum().backward()
    assert x.grad.spec == P("data")


def test_attributes_and_conversions():
    full = torch.arange(8.0).reshape(4, 2)
    x = put(full, "data")

    assert x.size() == full.size()
    assert (x.size(1), x.dim(), x.numel(), len(x)) == (2, 2, 8, 4)
    assert not x.requires_grad
    assert x.is_floating_point()
    assert x.device.type == "cpu"
    assert not torch.is_tensor(x)

    assert [float(row.sum()) for row in x] == [1.0, 5.0, 9.0, 13.0]
    assert float(x[0, 1]) == 1.0
    assert int(x[1, 0]) == 2
    assert not bool(x[0, 0])
    assert x.sum().item() == 28.0
    assert x.tolist() == full.tolist()
    assert np.asarray(x).tolist() == full.tolist()
    assert torch.equal(torch.as_tensor(x), full)
    with pytest.raises(RuntimeError):
        bool(x)

    assert str(x).splitlines()[0] == repr(x)
    assert "[6., 7.]" in str(x)
    assert f"{x}" == str(x)
    assert f"{x.sum():.3f} {x[1, 1]:>4.1f}" == "28.000  3.0"

    torch.testing.assert_close(x, put(full, None, "model"))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close({"x": x}, {"x": x + 1})


def test_copies_and_pickles():
    x = put(torch.randn(4, 2), "data")
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)

    copies = [
        copy.copy(x),
        copy.deepcopy(x),
        pickle.loads(pickle.dumps(x)),
        torch.load(buffer, weights_only=False),
    ]

    for y in copies:
        assert torch.equal(x, y)
        assert y.layout == x.layout


PATTERNS = [
    lambda x: einops.rearrange(x, "(a b) c -> a b c", a=2),
    lambda x: einops.reduce(x, "(a b) c -> b", "mean", a=4),
    lambda x: einops.reduce(x, "a b -> b", "max"),
    lambda x: einops.repeat(x, "a b -> a c b", c=3),
    lambda x: einops.einsum(x, x, "a b, c b -> a c"),
]


def test_einops_patterns():
    full = torch.randn(8, 6)
    x = put(full, "data", "model")
    for f in PATTERNS:
        torch.testing.assert_close(fs.unshard(f(x)), f(full))


def test_in_place_operations_write_to_their_array():
    # An array, by operators, indices and methods.
    x = put(torch.ones(4, 2), "data")
    y = x
    x += 1
    x[0] = 5.0
    x[1:3] = put(torch.zeros(2))
    x.mul_(2)
    assert y is x
    assert fs.unshard(x).tolist() == [[10, 10], [0, 0], [0, 0], [4, 4]]
    x[x > 4] = 1.0
    assert float(x.sum()) == 2 + 8

    # A leaf, without a graph only.
    w = put(torch.ones(4), "data").requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        w += 1
    with torch.no_grad():
        w -= 0.5
    assert w.requires_grad
    assert fs.unshard(w.detach()).tolist() == [0.5] * 4

    # A result: its gradient is that of what was written.
    y = w * 2
    y.zero_()
    y.sum().backward()
    assert fs.unshard(w.grad).tolist() == [0.0] * 4

    # copy_ keeps layout and dtype.
    x.copy_(put(torch.ones(2, dtype=torch.float64), "model"))
    assert x.spec == P("data")
    assert x.dtype == torch.float32
    assert float(x.sum()) == 8.0


def test_views_are_not_used_when_stale():
    x = put(torch.ones(4, 2), "data").requires_grad_() * 1
    row = x[0]
    last = x[0][1]
    with pytest.raises(LayoutError, match=r"got .* view of another array by .T"):
        x.T.add_(1)

    x.add_(1)

    uses = [
        lambda: row + 1,
        lambda: last + 1,
        last.item,
        last.backward,
        lambda: fs.unshard(row),
    ]
    for use in uses:
        with pytest.raises(LayoutError, match="changed in place since"):
            use()
    assert fs.unshard(x[0] + 1).tolist() == [3, 3]


@pytest.mark.parametrize("with_grad", [False, True])
def test_writing_to_an_index_or_to_a_detached_array_writes_to_the_array(with_grad):
    def written(x):
        """Return an array after writes to its parts, a row of it, and the gradient of the leaf."""
        w = x.requires_grad_(with_grad)
        y = w * 1
        y[1:, 0] *= 3
        row = y[2]
        row += 1
        row[0].fill_(7)
        row = row.clone()
        y.detach().mul_(2)
        y.data[3] = 5
        y[[0]].mul_(9)  # a copy, as for tensors
        assert y.float() is y
        if not with_grad:
            return y.detach(), row.detach()
        (y * y.detach()).sum().backward()
        return y.detach(), row.detach(), w.grad

    expected = written(torch.ones(4, 2))
    actual = written(put(torch.ones(4, 2), "data", "model"))

    for array, tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(fs.unshard(array), tensor)


def test_leaves_that_require_grad_are_not_written():
    def assign(w):
        w[0] = 1

    writes = [
        lambda w: w.fill_(1),
        lambda w: w.zero_(),
        lambda w: w[0].mul_(2),
        lambda w: w.copy_(w * 2),
        assign,
    ]
    tensor = torch.ones(4, 2).requires_grad_()
    array = put(torch.ones(4, 2), "data").requires_grad_()
    for write in writes:
        for w in (tensor, array):
            with pytest.raises(RuntimeError, match="leaf"):
                write(w)


def test_leaves_accumulate_gradients_in_their_layout():
    full = torch.randn(8, 4)
    for spec in (P("data"), P(None, ("model", "data")), P.flat("data"), P()):
        x = fs.device_put(full, fs.Layout(MESH, spec)).requires_grad_()

        for _ in range(2):
            (x * x).sum().backward()

        assert x.grad.spec == spec
        torch.testing.assert_close(fs.unshard(x.grad), 4 * full)
        x.grad = None
        assert x.grad is None


def test_a_hook_gets_the_gradient_of_an_array_once_for_each_backward():
    x = put(torch.ones(4, 2), "data").requires_grad_()
    y = x[1:] * 3
    gradients = []
    handles = [x.register_hook(gradients.append), y.register_hook(gradients.append)]
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    handles[0].remove()
    x.sum().backward()
    assert [fs.unshard(g).sum().item() for g in gradients] == [6, 18] * 2
    assert gradients[1].spec == P("data")
    y.register_hook(lambda g: g * 2)
    with pytest.raises(LayoutError, match="must return None"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="require"):
        x.detach().register_hook(gradients.append)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_gradients_are_clipped_as_by_torch(norm_type):
    matrix = torch.randn(8, 4)
    vector = torch.randn(6, dtype=torch.float64)
    leaves = [matrix.clone().requires_grad_(), vector.clone().requires_grad_()]
    x = put(matrix, "data", "model").requires_grad_()
    y = put(vector).requires_grad_()
    without_gradient = put(torch.ones(2))
    for leaf in (*leaves, x, y):
        (leaf**3).sum().backward()

    expected = torch.nn.utils.clip_grad_norm_(leaves, 1.5, norm_type)
    norm = fs.array.clip_grad_norm_([x, y, without_gradient], 1.5, norm_type)

    assert float(norm) == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(fs.unshard(x.grad), leaves[0].grad)
    torch.testing.assert_close(fs.unshard(y.grad), leaves[1].grad)

    # A gradient that is assigned gets the layout of its leaf.
    x.grad = x.grad.T.T.reshape(32).reshape(8, 4) + put(torch.zeros(8, 4))
    assert x.grad.spec == P("data", "model")


def test_gradient_that_is_no_array_raises():
    x = put(torch.ones(8, 4)).requires_grad_()
    message = r"grad must be an array or None; got Tensor. Write x.grad = fs.dev"
    with pytest.raises(LayoutError, match=message):
        x.grad = torch.ones(8, 4)


def test_linear_algebra_is_unsharded_counted_and_sharded_again():
    x = put(torch.eye(4), "data", "model")

    with fs.ledger() as comm:
        y = torch.linalg.inv(x)

    for row, *_ in comm.rows():
        assert row.collective == "all_gather"
        assert "(linalg_inv)" in str(row.site)
    assert len(comm.rows()) > 0
    assert y.spec == x.spec
    with fs.array.explicit(), pytest.raises(LayoutError, match="explicit"):
        torch.linalg.qr(x)


def test_checkpoint_recomputes():
    full = torch.randn(8, 6, dtype=torch.float64)
    x = put(full, "data").requires_grad_()
    w = put(torch.ones(6, 6, dtype=torch.float64), None, "model").requires_grad_()
    y = checkpoint(lambda x: (x @ w).sin() @ w, x, use_reentrant=False)
    y.sum().backward()
    a = full.clone().requires_grad_()
    b = torch.ones(6, 6, dtype=torch.float64).requires_grad_()
    ((a @ b).sin() @ b).sum().backward()
    torch.testing.assert_close(fs.unshard(x.grad), a.grad)
    torch.testing.assert_close(fs.unshard(w.grad), b.grad)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_torch_func_transforms():
    full = torch.randn(8, 6, dtype=torch.float64)
    weights = torch.randn(6, 4, dtype=torch.float64)
    x = put(full, "data", "model")
    w = put(weights, "model")

    def f(w):
        return (x @ w).sin().sum()

    def serial(w):
        return (full @ w).sin().sum()

    # grad, and vjp with cotangents of ones.
    expected = torch.func.grad(serial)(weights)
    gradient = lift(torch.func.grad)(lambda w: fs.unshard(f(w)))
    torch.testing.assert_close(fs.unshard(gradient(w)), expected)
    _, pull = lift(torch.func.vjp)(lambda w: (x @ w).sin(), w)
    (pulled,) = pull(put(torch.ones(8, 4, dtype=torch.float64), "data"))
    torch.testing.assert_close(fs.unshard(pulled), expected)

    # jvp
    value, tangent = lift(torch.func.jvp)(f, (w,), (w * 2,))
    expected = torch.func.jvp(serial, (weights,), (weights * 2,))
    torch.testing.assert_close((fs.unshard(value), fs.unshard(tangent)), expected)

    # The Hessian at a plain tensor.
    def sum_of_cubes(v):
        array = fs.device_put(v, fs.Layout(MESH, P("data")))
        return fs.unshard((array**3).sum())

    v = weights[:, 0]
    torch.testing.assert_close(torch.func.hessian(sum_of_cubes)(v), torch.diag(6 * v))

    with pytest.raises(LayoutError, match="shards of this Sharded have shapes"):
        lift(torch.func.vmap)(lambda row: row.sin())(x)


def test_plain_tensors_numbers_and_0d_tensors():
    x = put(torch.ones(4, 2), "data")
    scale = torch.tensor(3.0, requires_grad=True)

    assert float((x * scale + torch.tensor(1)).sum()) == 32
    (x * scale).sum().backward()
    assert scale.grad.item() == 8

    with_plain_tensors = [
        lambda: x + torch.ones(4, 2),
        lambda: torch.ones(2) * x,
        lambda: torch.cat([x, torch.ones(1, 2)]),
    ]
    for call in with_plain_tensors:
        with pytest.raises(LayoutError, match="fs.device_put"):
            call()


X = put(torch.ones(4, 2), "data")
CUBE = put(torch.randn(4, 2, 6), "data")
FFT = (
    r"torch.fft.fft is no operation on arrays.* got f32\[4@data, 2\], "
    r"at .*test_protocols.py.*fs.shard_map.*fs.array.constrain"
)
DROPOUT = "dropout3d is no operation on arrays with these arguments"


def add_of_two_meshes():
    other = fs.Layout(fs.make_mesh({"other": 2}), P())
    return X + fs.device_put(torch.ones(4, 2), other)


def array_into_a_tensor():
    x = torch.ones(4)
    x[[0, 1]] = X[0]


def index_out_of_range():
    indices = put(torch.tensor([0, 9]))
    F.embedding(indices, put(torch.randn(8, 2), "data"))


def running_statistics():
    F.instance_norm(CUBE, put(torch.zeros(2)), put(torch.ones(2)))


ERRORS = {
    "no rule": (lambda: torch.fft.fft(X), LayoutError, FFT),
    "meshes": (add_of_two_meshes, MeshError, "must be on one mesh"),
    "shapes": (lambda: X + put(torch.ones(3)), RuntimeError, "broadcast"),
    "a sharded mask": (lambda: X[:, X[:, 0] > 0], IndexError, "mask"),
    "an array into a tensor": (array_into_a_tensor, LayoutError, "a plain tensor"),
    "out": (lambda: torch.add(X, X, out=X), LayoutError, "no operation on arrays"),
    "an index": (index_out_of_range, IndexError, "0..7"),
    "statistics": (running_statistics, LayoutError, "running statistics"),
    "draws": (lambda: CUBE.normal_(), LayoutError, "no operation on arrays"),
    "arguments": (lambda: F.dropout3d(CUBE, 0.5), LayoutError, DROPOUT),
    "a device": (lambda: X.to("meta"), LayoutError, "an array stays on its mesh"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_misuse_raises(name):
    call, error, words = ERRORS[name]
    with pytest.raises(error, match=words):
        call()


def test_guide_lists_operations_without_a_row():
    assert list_rowless() in Path("docs/guides/arrays.md").read_text()


def test_random_draws_equal_those_of_torch_on_any_layout():
    def seeded():
        return torch.Generator().manual_seed(1)

    for spec in (P(), P("data", "model"), P(("model", "data")), P.flat("data")):
        x = fs.array.randn(8, 4, layout=fs.Layout(MESH, spec), generator=seeded())
        full = fs.unshard(x)
        assert torch.equal(full, torch.randn(8, 4, generator=seeded()))

        torch.manual_seed(0)
        y = F.dropout(x, 0.4)
        torch.manual_seed(0)
        torch.testing.assert_close(fs.unshard(y), F.dropout(full, 0.4))

    zeros = fs.array.zeros(3, layout=fs.Layout(MESH))
    ones = fs.array.ones(3, layout=fs.Layout(MESH))
    assert float(zeros.sum() + ones.sum()) == 3


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_jvp_of_gradients_over_trees_of_arrays():
    def loss(params, x):
        return ((x @ params["w"] + params["b"]).tanh() ** 2).mean()

    def sharded(tree):
        return {"w": put(tree["w"], "model"), "b": put(tree["b"])}

    params = {"w": torch.randn(6, 4), "b": torch.randn(4)}
    tangents = {"w": torch.randn(6, 4), "b": torch.randn(4)}
    x = torch.randn(8, 6)

    gradient = lift(torch.func.grad)(lambda p: fs.unshard(loss(p, put(x, "data"))))
    actual = lift(torch.func.jvp)(gradient, (sharded(params),), (sharded(tangents),))

    serial_gradient = torch.func.grad(lambda p: loss(p, x))
    expected = torch.func.jvp(serial_gradient, (params,), (tangents,))
    assert actual[1]["w"].spec == P("model")
    for tree, expected_tree in zip(actual, expected, strict=True):
        torch.testing.assert_close(fs.unshard(tree), expected_tree)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own linearize
def test_lift_reshards_tangents_and_cotangents():
    w = put(torch.randn(6, 4, dtype=torch.float64), "data", "model")
    full_tangent, full_cotangent = torch.randn(2, 6, 4, dtype=torch.float64)
    derivative = 3 * fs.unshard(w) ** 2

    def cube(x):
        return x**3

    layouts = [
        fs.Layout(MESH, P()),
        fs.Layout(MESH, P("model")),
        fs.Layout(MESH, P.flat("data")),
        fs.Layout(MESH, P(None, ("data", "model"))),
        fs.Layout(MESH, w.spec, unit="other"),
    ]
    for layout in layouts:
        tangent = fs.device_put(full_tangent, layout)
        _, rate = lift(torch.func.jvp)(cube, (w,), (tangent,))
        assert rate.spec == w.spec
        torch.testing.assert_close(fs.unshard(rate), derivative * full_tangent)

        _, push = lift(torch.func.linearize)(cube, w)
        torch.testing.assert_close(fs.unshard(push(tangent)), derivative * full_tangent)

        _, pull = lift(torch.func.vjp)(lambda x: {"cube": cube(x)}, w)
        (pulled,) = pull({"cube": fs.device_put(full_cotangent, layout)})
        assert pulled.layout == w.layout
        torch.testing.assert_close(fs.unshard(pulled), derivative * full_cotangent)


def test_lift_reduces_unreduced_arrays():
    a, b = (torch.randn(4, 4, dtype=torch.float64) for _ in range(2))
    x = put(a, None, "data")
    y = put(b, "data")
    product = x @ y
    assert product.spec.unreduced
    gradient = lift(torch.func.grad)(lambda z: fs.unshard((z**2).sum()))(product)
    torch.testing.assert_close(fs.unshard(gradient), 2 * a @ b)
    value, pull = lift(torch.func.vjp)(lambda z: z @ y, x)
    torch.testing.assert_close(fs.unshard(pull(value)[0]), a @ b @ b.T)
