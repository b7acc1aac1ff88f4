"""Functions with a gradient of their own: `fs.array.custom_function`, and torch's own Functions,
which raise.

The oracle is a `torch.autograd.Function` with the same formulas, on unsharded tensors.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from fshard.errors import LayoutError
from tests.array.oracle import put

F64 = torch.float64
MESH = fs.make_mesh({"data": 2, "model": 2})
LAYOUTS = [
    P(),
    P("data"),
    P(None, "model"),
    P("model", "data"),
    P(("data", "model")),
    P.flat("data"),
    P.flat("data", "model"),
    P(unreduced="data"),
    P("data", unreduced="model"),
]


def product(x, w, scale):
    """Multiply; the gradient of x is scaled, and clipped by the value of the product."""
    y = torch.tanh(x @ w)
    return y, (x, w, y, scale)


def product_backward(residuals, cotangent):
    x, w, y, scale = residuals
    g = cotangent * (1 - y * y)
    return scale * (g @ w.T).clamp(-1, 1), x.T @ g, None


class Product(torch.autograd.Function):
    """The oracle of `product`: its second derivative goes through the residuals too."""

    @staticmethod
    def forward(ctx, x, w, scale):
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        return product(x, w, scale)[0]

    @staticmethod
    def backward(ctx, cotangent):
        x, w = ctx.saved_tensors
        return product_backward((x, w, torch.tanh(x @ w), ctx.scale), cotangent)


class Round(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent


class Reverse(torch.autograd.Function):
    """A gradient reversal layer."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, cotangent):
        return -ctx.scale * cotangent, None


def draw(*shape):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(len(shape)))


def spec_for(x, spec):
    return spec if spec.is_flat else spec.replace(entries=spec.entries[: x.ndim])


@pytest.mark.parametrize("second", [P(), P("model"), P(None, "data")], ids=str)
@pytest.mark.parametrize("first", LAYOUTS, ids=str)
def test_custom_function_equals_autograd_function_of_second_order(first, second):
    x = draw(8, 4)
    w = draw(4, 6)
    own_product = fs.array.custom_function(product, product_backward)

    def loss(function, x, w):
        return (function(x * 1.5, w, 2.0) ** 2).sum() + (x * x).sum()

    plain = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    expected = torch.autograd.grad(loss(Product.apply, *plain), plain, create_graph=True)
    second_expected = torch.autograd.grad([g.square().sum() for g in expected], plain)

    arrays = [put(x, MESH, first).requires_grad_(), put(w, MESH, second).requires_grad_()]
    first_order = torch.autograd.grad(loss(own_product, *arrays), arrays)
    recorded = torch.autograd.grad(loss(own_product, *arrays), arrays, create_graph=True)
    second_order = torch.autograd.grad([g.square().sum() for g in recorded], arrays)

    for actual, wanted in (
        (first_order, expected),
        (recorded, expected),
        (second_order, second_expected),
    ):
        for g, h, array in zip(actual, wanted, arrays, strict=True):
            g.check()
            assert g.spec == array.spec.replace(unreduced=None)
            torch.testing.assert_close(fs.unshard(g.detach()), h.detach())


@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
def test_custom_function_without_residuals_takes_and_returns_single_arrays(spec):
    straight_through = fs.array.custom_function(
        lambda x: x.round(), lambda residuals, cotangent: cotangent
    )
    x = draw(8, 4)
    plain = x.clone().requires_grad_()
    (Round.apply(plain * 3) * plain).sum().backward()

    array = put(x, MESH, spec).requires_grad_()
    (straight_through(array * 3) * array).sum().backward()

    torch.testing.assert_close(fs.unshard(array.grad), plain.grad)


@pytest.mark.parametrize("spec", LAYOUTS[:4], ids=str)
def test_custom_function_of_argument_itself_reverses_its_gradient(spec):
    reverse = fs.array.custom_function(
        lambda x, scale: (x, scale), lambda scale, cotangent: (-scale * cotangent, None)
    )
    x = draw(8, 4)
    plain = x.clone().requires_grad_()
    Reverse.apply(plain * 2, 0.5).square().sum().backward()

    array = put(x, MESH, spec).requires_grad_()
    reverse(array * 2, 0.5).square().sum().backward()

    torch.testing.assert_close(fs.unshard(array.grad), plain.grad)


def test_custom_function_of_trees_has_gradients_of_their_leaves():
    def forward(params, x):
        hidden = x @ params["w"]
        best = hidden.argmax(1)
        return {"value": hidden + params["b"], "best": best}, (params, x)

    def backward(residuals, cotangent):
        _, x = residuals
        assert cotangent["best"] is None
        g = cotangent["value"]
        return {"w": 2 * x.T @ g, "b": g.sum(0)}, None

    w = draw(4, 6)
    b = draw(6)
    x = draw(8, 4)
    params = {"w": put(w, MESH, P("model")), "b": put(b, MESH, P())}
    for leaf in params.values():
        leaf.requires_grad_()
    outputs = fs.array.custom_function(forward, backward)(params, put(x, MESH, P("data")))
    outputs["value"].square().sum().backward()

    cotangent = 2 * (x @ w + b)
    assert torch.equal(fs.unshard(outputs["best"]), (x @ w).argmax(1))
    torch.testing.assert_close(fs.unshard(params["w"].grad), 2 * x.T @ cotangent)
    torch.testing.assert_close(fs.unshard(params["b"].grad), cotangent.sum(0))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("spec", LAYOUTS[:7], ids=str)
def test_custom_function_under_lift_equals_autograd_function(spec):
    x = draw(8, 4)
    w = draw(4, 6)
    plain = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(Product.apply(plain, w, 0.5).sum(), plain, create_graph=True)
    (second_expected,) = torch.autograd.grad(expected.square().sum(), plain)

    own_product = fs.array.custom_function(product, product_backward)
    weight = put(w, MESH, P(None, "model"))
    grad = fs.array.lift(torch.func.grad)
    gradient = grad(lambda x: fs.unshard(own_product(x, weight, 0.5).sum()))
    second = grad(lambda x: fs.unshard(gradient(x).square().sum()))
    array = put(x, MESH, spec)

    torch.testing.assert_close(fs.unshard(gradient(array)), expected.detach())
    torch.testing.assert_close(fs.unshard(second(array)), second_expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_custom_function_under_jvp_raises():
    own_product = fs.array.custom_function(product, product_backward)
    x = put(draw(8, 4), MESH, P("data"))
    w = put(draw(4, 6), MESH, P())
    with pytest.raises(RuntimeError, match="jvp"):
        fs.array.lift(torch.func.jvp)(lambda x: own_product(x, w, 1.0), (x,), (x,))


@pytest.mark.parametrize("spec", [P("model"), P(None, "model"), P()], ids=str)
def test_custom_function_in_a_loss_function_has_the_serial_gradient(spec):
    own_product = fs.array.custom_function(product, product_backward)
    w = draw(4, 6)
    x = draw(8, 4)
    model = fs.Layout(MESH["model"])

    def loss(w, x):
        weight = fs.array.constrain(fs.Sharded((4, 6), model, (w,)), spec)
        y = own_product(fs.Sharded(tuple(x.shape), model, (x,)), weight * 2, 0.5)
        return fs.array.constrain(y.square().mean(), P()).local

    plain = w.clone().requires_grad_()
    Product.apply(x, plain * 2, 0.5).square().mean().backward()

    params = fs.shard_params(w, fs.fsdp("data"), mesh=MESH)
    gradient = fs.grad(loss, mesh=MESH, batch=P("data"))(params, x)

    torch.testing.assert_close(fs.unshard(gradient), plain.grad)


def test_custom_function_draws_the_same_numbers_for_second_derivatives():
    def forward(x):
        mask = torch.nn.functional.dropout(torch.ones_like(x), 0.5)
        return x * mask, (x, mask)

    def backward(residuals, cotangent):
        x, mask = residuals
        return cotangent * mask * x

    masked = fs.array.custom_function(forward, backward)
    x = put(draw(8, 4), MESH, P("data")).requires_grad_()
    y = masked(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.rand(3)
    torch.testing.assert_close(fs.unshard(g.detach()), fs.unshard(y.detach()))


def test_custom_function_that_is_recomputed_by_a_checkpoint_has_its_gradient():
    own_product = fs.array.custom_function(product, product_backward)
    x = put(draw(8, 4), MESH, P("data"))
    w = put(draw(4, 6), MESH, P())
    gradients = []
    for run in (own_product, lambda *args: checkpoint(own_product, *args, use_reentrant=False)):
        x.requires_grad_()
        gradients += torch.autograd.grad(run(x, w, 0.5).square().sum(), x)
    assert torch.equal(*map(fs.unshard, gradients))


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        (lambda x: (x, x, x), lambda r, g: g, "forward must return"),
        (lambda x: 3, lambda r, g: g, "forward must return"),
        (lambda x: x * 2, lambda r, g: (g, g), "each of the 1 arguments"),
        (lambda x: x * 2, lambda r, g: g.sum(), "an array of shape"),
        (lambda x: x * 2, lambda r, g: [g], "like argument 0"),
    ],
)
def test_custom_function_with_wrong_results_raises(forward, backward, message):
    x = put(draw(8, 4), MESH, P("data")).requires_grad_()
    with pytest.raises(LayoutError, match=message):
        fs.array.custom_function(forward, backward)(x).sum().backward()


def test_custom_function_of_plain_tensor_that_requires_grad_raises():
    double = fs.array.custom_function(lambda x, w: x * w, lambda r, g: (g, None))
    x = put(draw(8, 4), MESH, P("data"))
    with pytest.raises(LayoutError, match="must be an array"):
        double(x, torch.ones((), dtype=F64, requires_grad=True))


# Functions of torch.


@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
@pytest.mark.parametrize("call", [lambda x: Round.apply(x), lambda x: Reverse.apply(x * 2, 1.0)])
def test_autograd_function_of_arrays_raises(call, spec):
    x = put(draw(8, 4), MESH, spec).requires_grad_()
    with pytest.raises(LayoutError, match=r"fs\.array\.custom_function"):
        call(x)


def test_autograd_function_of_array_and_tensor_that_requires_grad_raises():
    scale = torch.ones((), dtype=F64, requires_grad=True)
    with pytest.raises(LayoutError, match=r"fs\.array\.custom_function"):
        Product.apply(put(draw(8, 4), MESH, P("data")), put(draw(4, 6), MESH, P()), scale)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_autograd_function_of_arrays_raises_under_lift():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent

    x = put(draw(8, 4), MESH, P("data"))
    with pytest.raises(LayoutError, match=r"fs\.array\.custom_function"):
        fs.array.lift(torch.func.grad)(lambda x: fs.unshard(Square.apply(x).sum()))(x)
    with pytest.raises(LayoutError, match=r"fs\.array\.custom_function"):
        Square.apply(x.requires_grad_())


def test_autograd_function_in_a_loss_of_arrays_raises():
    layout = fs.Layout(MESH["model"])

    def loss(w, x):
        return Round.apply(fs.Sharded(tuple(w.shape), layout, (w,)) * 1.0).local.mean() + x.mean()

    params = fs.shard_params(draw(4, 6), P(), mesh=MESH)
    with pytest.raises(LayoutError, match=r"fs\.array\.custom_function"):
        fs.grad(loss, mesh=MESH, batch=P("data"))(params, draw(8, 4))


def test_autograd_function_of_arrays_computes_where_nothing_is_recorded():
    x = put(draw(8, 4), MESH, P("data"))
    assert torch.equal(fs.unshard(Round.apply(x)), draw(8, 4).round())
    with torch.inference_mode():
        assert torch.equal(fs.unshard(Round.apply(x * 2)), (draw(8, 4) * 2).round())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_reentrant_checkpoint_of_arrays_raises():
    x = put(draw(8, 4), MESH, P("data")).requires_grad_()
    with pytest.raises(LayoutError, match="use_reentrant=False"):
        checkpoint(lambda x: x * x, x, use_reentrant=True)
