"""A backward in two halves: the bits of one backward, no work done twice, no memory kept for nothing."""

import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.pipeline.execution.gradient_sums import RunningSum
from fshard.pipeline.execution.saved_tensors import SavedActivations
from fshard.pipeline.execution.split_backward import run_backward, split_backward
from fshard.pipeline.schedule.builders import pipeline_schedule


class Work(TorchDispatchMode):
    """Counts the operations that cost something: all that neither look at memory otherwise nor copy it."""

    FREE = (
        "view",
        "t",
        "transpose",
        "permute",
        "expand",
        "detach",
        "alias",
        "clone",
        "unsqueeze",
        "squeeze",
        "select",
    )
    MADE = (
        "zeros",
        "ones_like",
        "zeros_like",
        "new_zeros",
        "_unsafe_view",
        "slice",
        "as_strided",
        "empty_like",
    )

    def __init__(self):
        super().__init__()
        self.done = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in self.FREE + self.MADE:
            self.done[name] += 1
        return func(*args, **(kwargs or {}))


def edges(xs):
    return [get_gradient_edge(x) for x in xs]


def compare(f, xs, ws, *, watched=True, deferred=None, seed=0):
    """Hold both halves of f(xs, ws) to one backward: bits, and work."""

    def forward(saved=None):
        own = [x.detach().clone().requires_grad_(x.requires_grad) for x in xs]
        if saved is None:
            ys = f(own, ws)
        else:
            with saved.recording():
                ys = f(own, ws)
        torch.manual_seed(seed)
        moving = [y for y in ys if y.requires_grad]
        return (
            edges(moving),
            [torch.randn_like(y) for y in moving],
            edges(x for x in own if x.requires_grad),
        )

    weights = edges(w for w in ws if w.requires_grad)
    ends, gs, sources = forward()
    with Work() as expected:
        gxs, gws = run_backward(ends, gs, sources, weights)
    saved = SavedActivations() if watched else None
    ends, gs, sources = forward(saved)
    with Work() as early:
        own_gxs, later = split_backward(ends, gs, sources, weights, saved)
    del ends
    with Work() as late:
        own_gws = later()
    for a, b in zip([*gxs, *gws], [*own_gxs, *own_gws], strict=True):
        assert (a is None) == (b is None)
        assert a is None or (torch.equal(a, b) and a.dtype == b.dtype and a.shape == b.shape)
    products = ("mm", "bmm", "addmm", "mv")
    for name in products:
        assert early.done[name] + late.done[name] == expected.done[name], name
    if deferred is not None:
        assert sum(late.done[name] for name in (*products, "convolution_backward")) == deferred
    return expected.done, early.done, late.done


def t(*shape, grad=True, seed=0, dtype=torch.float32):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=dtype
    ).requires_grad_(grad)


# -- the bits of one backward, and its work -----------------------------------------------------------------------


class Twice(Function):
    """A product that somebody wrote, which looks twice at what it has saved."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, _ = ctx.saved_tensors
        _, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


def attention(xs, ws):
    q, k, v = (F.linear(xs[0], w) for w in ws[:3])
    return (
        F.linear(F.gelu(F.scaled_dot_product_attention(q[None], k[None], v[None])[0]), ws[3])
        + xs[0],
    )


X = t(3, 4)
W = [t(4, 4, seed=seed) for seed in range(1, 5)]
CASES = {
    "a chain": (lambda xs, ws: (torch.tanh(xs[0] @ ws[0]) @ ws[1],), [X], W[:2], 2),
    "with a bias": (lambda xs, ws: (F.linear(xs[0], ws[0], ws[1]).relu(),), [X], [W[0], t(4, seed=7)], 1),
    "a bias used twice": (
        lambda xs, ws: (F.linear(xs[0], ws[0], ws[1]).relu() + ws[1],),
        [X],
        [W[0], t(4, seed=7)],
        1,
    ),
    "a weight used three times": (lambda xs, ws: (((xs[0] @ ws[0]).relu() @ ws[0]).relu() @ ws[0],), [X], W[:1], 0),
    "used in a product and beside": (lambda xs, ws: ((xs[0] @ ws[0]).relu() @ ws[0] * ws[0].sum(),), [X], W[:1], 0),
    "an embedding and a head": (
        lambda xs, ws: (F.linear(xs[0] + F.embedding(torch.tensor([1, 2, 1]), ws[0]), ws[0]),),
        [X],
        W[:1],
        0,
    ),
    "two embeddings and two heads": (
        lambda xs, ws: (
            F.linear(
                (xs[0] + F.embedding(torch.tensor([1, 2, 1]), ws[0]) + F.embedding(torch.tensor([0, 3, 1]), ws[0])) @ ws[0],
                ws[0],
            ),
        ),
        [X],
        W[:1],
        0,
    ),
    "a weight of weights": (lambda xs, ws: (xs[0] @ (ws[0] + ws[1] @ ws[2]),), [X], W[:3], 3),
    "attention": (attention, [X], W, 4),
    "a convolution": (
        lambda xs, ws: (F.conv2d(F.conv2d(xs[0], ws[0], ws[1]).relu(), ws[2], ws[3]),),
        [t(2, 3, 6, 6)],
        [t(3, 3, 3, 3, seed=1), t(3, seed=2), t(3, 3, 3, 3, seed=3), t(3, seed=4)],
        2,
    ),
    "several outputs, one of another": (lambda xs, ws: (y := (xs[0] @ ws[0]).relu(), y @ ws[1], xs[0]), [X], W[:2], 2),
    "an output without inputs": (lambda xs, ws: (xs[0] @ ws[0], ws[1].relu() @ ws[2], ws[3]), [X], W, 1),
    "no inputs": (lambda xs, ws: ((F.embedding(torch.tensor([1, 2]), ws[0]) @ ws[1]).relu() @ ws[2],), [], W[:3], 4),
    "no weights": (lambda xs, ws: (xs[0].relu() * 2,), [X], [], 0),
    "unused": (lambda xs, ws: (xs[0] @ ws[0],), [X, t(2)], [*W[:1], t(3)], 1),
    "several inputs": (lambda xs, ws: (xs[0] @ ws[0] + xs[1] @ ws[1], xs[1].sum()), [X, t(3, 4, seed=9)], W[:2], 2),
    "an input that does not move": (lambda xs, ws: (xs[0] @ ws[0] @ ws[1],), [X.detach()], W[:2], 3),
    "a frozen weight": (lambda xs, ws: ((xs[0] @ ws[0]).relu() @ ws[1],), [X], [W[0].detach(), W[1]], 1),
    "in place": (lambda xs, ws: (torch.relu_((xs[0] @ ws[0]).add_(1)) @ ws[1],), [X], W[:2], 2),
    "a written product": (lambda xs, ws: (Twice.apply(xs[0].tanh(), ws[0]).tanh() @ ws[1],), [X], W[:2], 1),
    "a written function of weights": (lambda xs, ws: (xs[0] @ Twice.apply(ws[0], ws[1]) * Twice.apply(ws[1], ws[0]).sum(),), [X], W[:2], 0),
    "a checkpoint": (
        lambda xs, ws: (checkpoint(lambda x: (x @ ws[0]).relu() @ ws[1], xs[0], use_reentrant=False) @ ws[2],),
        [X],
        W[:3],
        1,
    ),
    "batches of products": (
        lambda xs, ws: (torch.einsum("bi,bij->bj", xs[0], torch.stack([ws[0], ws[1], ws[0]])),),
        [X],
        W[:2],
        0,
    ),
    "other dtypes": (lambda xs, ws: (xs[0] @ ws[0].double() @ ws[1].double(),), [t(3, 4, dtype=torch.float64)], W[:2], 2),
    "complex": (lambda xs, ws: ((xs[0] @ ws[0]).abs(),), [t(3, 4, dtype=torch.complex64)], [t(4, 4, dtype=torch.complex64)], 1),
}  # fmt: skip


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_split_backward_equals_one_backward_and_repeats_no_product(name, watched):
    f, xs, ws, deferred = CASES[name]
    compare(f, xs, ws, watched=watched, deferred=deferred)


def test_split_backward_defers_all_products_of_a_transformer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    work, early, late = compare(
        lambda xs, ws: (layer(xs[0]),), [t(2, 5, 16)], [*layer.parameters()], deferred=4
    )
    assert early["mm"] == 4 and early["sum"] + late["sum"] == work["sum"] and early + late == work


@st.composite
def programs(draw):
    """Draw a program of a few operations on a pool of values that begins with inputs and weights."""
    count = draw(st.integers(1, 7))
    return [
        (draw(st.sampled_from(["mm", "linear", "add", "mul", "relu", "mul_sum", "t"])), draw(st.integers(0, 99)), draw(st.integers(0, 99)))
        for _ in range(count)
    ]  # fmt: skip


@settings(max_examples=150)
@given(programs(), st.booleans(), st.integers(1, 3))
def test_split_backward_of_random_programs_equals_one_backward(program, watched, outputs):
    """Products, sums and more of whatever there is: weights used by many, behind others, beside inputs and without."""

    def run(xs, ws):
        pool = [*xs, *ws]
        for name, i, j in program:
            a = pool[i % len(pool)]
            b = pool[j % len(pool)]
            pool.append(OPERATIONS[name](a, b))
        return [y * 1 if any(y is x for x in [*xs, *ws]) else y for y in pool[-outputs:]]

    compare(run, [t(3, 3), t(3, 3, seed=1)], [t(3, 3, seed=2), t(3, 3, seed=3)], watched=watched)


OPERATIONS = {
    "mm": lambda a, b: a @ b / 4,
    "linear": lambda a, b: F.linear(a, b, b[0]) / 4,
    "add": torch.add,
    "mul": lambda a, b: (a * b).tanh(),
    "mul_sum": lambda a, b: a * b.sum(0).tanh(),
    "relu": lambda a, b: a.relu(),
    "t": lambda a, b: a.t(),
}


# -- memory -------------------------------------------------------------------------------------------------------


def test_split_backward_frees_activations_of_inputs_after_i():
    kept = {}

    def stage(x, w1, w2):
        h = x @ w1
        a = torch.sigmoid(h)  # saves a, for I alone
        b = a.tanh()  # saves b; and the product below saves it, for W
        for name, one in {"a": a, "b": b}.items():
            kept[name] = weakref.ref(one.untyped_storage())
        return b @ w2

    x = t(3, 4)
    ws = W[:2]
    saved = SavedActivations()
    with saved.recording():
        y = stage(x, *ws)
    _, later = split_backward(edges([y]), [torch.ones_like(y)], edges([x]), edges(ws), saved)
    del y
    assert kept["a"]() is None and kept["b"]() is not None
    later()
    assert kept["b"]() is None


def test_saved_tensor_modified_in_place_raises():
    x = t(3, 4)
    saved = SavedActivations()
    with saved.recording():
        h = (x @ W[0]).sigmoid()
        y = h @ W[1]
    h.add_(1)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"
    ):
        split_backward(edges([y]), [torch.ones_like(y)], edges([x]), edges(W[:2]), saved)


def test_run_backward_accumulates_into_given_weights_only():
    weights = [torch.randn(150, 150, requires_grad=True) for _ in range(4)] + [
        torch.randn(150, requires_grad=True)
    ]
    unused = torch.randn(150, 150, requires_grad=True)
    x = torch.randn(2, 150, requires_grad=True)
    users = torch.randn(
        150, requires_grad=True
    )  # of the stage function's own, not of its parameters

    def outputs():
        y = x
        for w in weights[:4]:
            y = torch.tanh(y @ w)
        return [get_gradient_edge(y * weights[4] + users)]

    own = [get_gradient_edge(w) for w in (*weights, unused)]
    (gx,), expected = run_backward(outputs(), [torch.ones(2, 150)], [get_gradient_edge(x)], own)
    total = RunningSum()
    for _ in range(3):
        x.grad = None
        total.let_accumulate([*weights, unused])
        actual, rest = run_backward(
            outputs(), [torch.ones(2, 150)], [get_gradient_edge(x)], own, accumulate=True
        )
        assert actual[0].equal(gx) and rest is None
    assert all(
        torch.equal(total, g + g + g)
        for total, g in zip(total.result()[:5], expected[:5], strict=True)
    )
    assert total.result()[5] is None and users.grad is None


def test_running_sum_mixes_added_and_accumulated_gradients():
    total = RunningSum()
    weights = [torch.zeros(2, requires_grad=True) for _ in range(4)]
    first = torch.ones(2)
    total.add(0, [first, None, None, None])
    for _ in range(2):
        total.let_accumulate(weights)
        sum(w.sum() for w in weights[:2]).backward()
    total.add(3, [torch.ones(2), torch.ones(2), None, torch.ones(2)])
    total.let_accumulate(weights)
    weights[3].sum().backward()
    assert [None if x is None else x.tolist() for x in total.result()] == [
        [4, 4],
        [3, 3],
        None,
        [2, 2],
    ]
    assert first.tolist() == [1, 1]  # somebody else's


class Keeping(torch.autograd.Function):
    """Its gradient is a view of something that somebody else has."""

    @staticmethod
    def forward(ctx, w, kept):
        ctx.kept = kept
        return w.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.kept.view(-1), None


def test_running_sum_does_not_write_to_shared_memory():
    kept = torch.ones(3, 1)
    part = torch.ones(5)
    total, (w, v) = (
        RunningSum(),
        (torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)),
    )
    for _ in range(3):
        total.let_accumulate([w, v])
        (Keeping.apply(w, kept).sum() + Keeping.apply(v, part[:3]).sum()).backward()
    assert [x.tolist() for x in total.result()] == [[3, 3, 3], [3, 3, 3]]
    assert kept.tolist() == [[1]] * 3 and part.tolist() == [1] * 5


def test_running_sum_of_sparse_gradients_is_dense():
    total = RunningSum()
    w = torch.zeros(4, 2, requires_grad=True)
    for _ in range(3):
        total.let_accumulate([w])
        F.embedding(torch.tensor([1, 1, 3]), w, sparse=True).sum().backward()
    assert total.result()[0].tolist() == [[0, 0], [6, 6], [0, 0], [3, 3]]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv"])
def test_accumulated_gradients_equal_those_of_the_full_model(name):
    schedule = pipeline_schedule(name, stages=4, microbatches=3)
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(150, 150, generator=draw) / 12 for _ in range(4)]
    microbatches = [torch.randn(rows, 150, generator=draw) for rows in (2, 1, 3)]
    mesh = fs.make_mesh({"pipe": schedule.devices})
    step = fs.pipeline.pipelined(
        [lambda w, x: torch.tanh(x @ w)] * 4, schedule, lambda y, x: y.square().mean(), mesh=mesh
    )
    actual = step(weights, microbatches).gradients
    model = [w.double().requires_grad_() for w in weights]
    y = torch.cat(microbatches).double()
    for w in model:
        y = torch.tanh(y @ w)
    for g, expected in zip(actual, torch.autograd.grad(y.square().mean(), model), strict=True):
        torch.testing.assert_close(g, expected.float(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "hooked", [lambda y: y, lambda y: y.grad_fn], ids=["of a tensor", "of its node"]
)
def test_hooks_of_a_deferred_product_run_once(hooked):
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    w = torch.randn(4, 2, requires_grad=True)

    def product():
        y = x @ w
        register = y.register_hook if hooked(y) is y else y.grad_fn.register_prehook
        register(
            lambda g: g * 0.5 if isinstance(g, torch.Tensor) else tuple(each * 0.5 for each in g)
        )
        return y.tanh()

    given = [torch.ones(3, 2)]
    gxs, later = split_backward(edges([product()]), given, edges([x]), edges([w]))
    expected = torch.autograd.grad([product()], [x, w], given)
    assert torch.equal(gxs[0], expected[0])
    assert torch.equal(later()[0], expected[1])
