"""A backward in two halves, I (inputs) and W (weights), equals one backward.

The oracle is the backward of both at once, by bits, with the operations that it runs: no product is
computed twice, and none that W may compute is computed in I. Activations that W does not need are
freed after I.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

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
    """Counts operations that compute: neither views, nor copies, nor tensors of a constant."""

    VIEWS = (
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
        "slice",
        "as_strided",
        "_unsafe_view",
    )
    CONSTANTS = ("zeros", "ones_like", "zeros_like", "new_zeros", "empty_like")

    def __init__(self):
        super().__init__()
        self.done = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in self.VIEWS + self.CONSTANTS:
            self.done[name] += 1
        return func(*args, **(kwargs or {}))


def edges(xs):
    return [get_gradient_edge(x) for x in xs]


PRODUCTS = ("mm", "bmm", "addmm", "mv")


class Backward(NamedTuple):
    """Return the edges of the graph that a backward starts from, and those that it leads to."""

    outputs: list
    cotangents: list
    inputs: list


def recorded_forward(f, xs, ws, seed, saved=None):
    """Run a forward on clones of the inputs; saved tensors go to `saved`, if it is given."""
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in xs]
    with saved.recording() if saved is not None else nullcontext():
        ys = f(inputs, ws)

    torch.manual_seed(seed)
    outputs = [y for y in ys if y.requires_grad]
    cotangents = [torch.randn_like(y) for y in outputs]
    return Backward(edges(outputs), cotangents, edges(x for x in inputs if x.requires_grad))


def assert_equal_bits(actual, expected):
    assert (actual is None) == (expected is None)
    if expected is not None:
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        assert torch.equal(actual, expected)


def compare(f, xs, ws, *, watched=True, deferred=None, seed=0):
    """Compare both halves of the backward of f(xs, ws) with one backward: bits and operations.

    With `watched`, saved tensors are recorded, so that they can be freed. `deferred` is the number
    of products that are left to W. Return the operations of one backward, of I and of W.
    """
    weights = edges(w for w in ws if w.requires_grad)

    once = recorded_forward(f, xs, ws, seed)
    with Work() as expected:
        gxs, gws = run_backward(*once, weights)

    saved = SavedActivations() if watched else None
    split = recorded_forward(f, xs, ws, seed, saved)
    with Work() as early:
        split_gxs, compute_weight_gradients = split_backward(*split, weights, saved)
    del split  # W may not depend on what the caller holds
    with Work() as late:
        split_gws = compute_weight_gradients()

    for actual, gradient in zip([*split_gxs, *split_gws], [*gxs, *gws], strict=True):
        assert_equal_bits(actual, gradient)
    for name in PRODUCTS:
        assert early.done[name] + late.done[name] == expected.done[name], name
    if deferred is not None:
        late_products = [late.done[name] for name in (*PRODUCTS, "convolution_backward")]
        assert sum(late_products) == deferred
    return expected.done, early.done, late.done


def t(*shape, grad=True, seed=0, dtype=torch.float32):
    """Draw a tensor."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad)


# -- the bits of one backward, and its work --------------------------------------------------------


class Twice(Function):
    """A product as a user writes it, whose backward reads the saved tensors twice."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, _ = ctx.saved_tensors
        _, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


def chain(xs, ws):
    return (torch.tanh(xs[0] @ ws[0]) @ ws[1],)


def with_bias(xs, ws):
    return (F.linear(xs[0], ws[0], ws[1]).relu(),)


def bias_used_twice(xs, ws):
    return (F.linear(xs[0], ws[0], ws[1]).relu() + ws[1],)


def weight_used_three_times(xs, ws):
    y = (xs[0] @ ws[0]).relu()
    y = (y @ ws[0]).relu()
    return (y @ ws[0],)


def weight_beside_a_product(xs, ws):
    y = (xs[0] @ ws[0]).relu()
    return (y @ ws[0] * ws[0].sum(),)


def embedding_and_head(xs, ws):
    y = xs[0] + F.embedding(torch.tensor([1, 2, 1]), ws[0])
    return (F.linear(y, ws[0]),)


def two_embeddings_and_two_heads(xs, ws):
    y = xs[0] + F.embedding(torch.tensor([1, 2, 1]), ws[0])
    y = y + F.embedding(torch.tensor([0, 3, 1]), ws[0])
    return (F.linear(y @ ws[0], ws[0]),)


def weight_of_weights(xs, ws):
    return (xs[0] @ (ws[0] + ws[1] @ ws[2]),)


def attention(xs, ws):
    x = xs[0]
    q, k, v = (F.linear(x, w) for w in ws[:3])
    (y,) = F.scaled_dot_product_attention(q[None], k[None], v[None])
    return (F.linear(F.gelu(y), ws[3]) + x,)


def convolution(xs, ws):
    y = F.conv2d(xs[0], ws[0], ws[1]).relu()
    return (F.conv2d(y, ws[2], ws[3]),)


def output_of_another_output(xs, ws):
    y = (xs[0] @ ws[0]).relu()
    return y, y @ ws[1], xs[0]


def output_without_inputs(xs, ws):
    return xs[0] @ ws[0], ws[1].relu() @ ws[2], ws[3]


def without_inputs(xs, ws):
    embedded = F.embedding(torch.tensor([1, 2]), ws[0])
    return ((embedded @ ws[1]).relu() @ ws[2],)


def without_weights(xs, ws):
    return (xs[0].relu() * 2,)


def one_product(xs, ws):
    return (xs[0] @ ws[0],)


def several_inputs(xs, ws):
    return xs[0] @ ws[0] + xs[1] @ ws[1], xs[1].sum()


def two_products(xs, ws):
    return (xs[0] @ ws[0] @ ws[1],)


def product_of_relu(xs, ws):
    return ((xs[0] @ ws[0]).relu() @ ws[1],)


def in_place(xs, ws):
    y = (xs[0] @ ws[0]).add_(1)
    return (torch.relu_(y) @ ws[1],)


def written_product(xs, ws):
    y = Twice.apply(xs[0].tanh(), ws[0])
    return (y.tanh() @ ws[1],)


def written_function_of_weights(xs, ws):
    product = Twice.apply(ws[0], ws[1])
    factor = Twice.apply(ws[1], ws[0]).sum()
    return (xs[0] @ product * factor,)


def checkpointed(xs, ws):
    y = checkpoint(lambda x: (x @ ws[0]).relu() @ ws[1], xs[0], use_reentrant=False)
    return (y @ ws[2],)


def batches_of_products(xs, ws):
    matrices = torch.stack([ws[0], ws[1], ws[0]])
    return (torch.einsum("bi,bij->bj", xs[0], matrices),)


def other_dtypes(xs, ws):
    return (xs[0] @ ws[0].double() @ ws[1].double(),)


def complex_product(xs, ws):
    return ((xs[0] @ ws[0]).abs(),)


@dataclass(frozen=True)
class Case:
    """A function of inputs and weights, and the number of its products that wait for W."""

    f: Callable
    xs: list
    ws: list
    deferred: int


X = t(3, 4)
W = [t(4, 4, seed=seed) for seed in range(1, 5)]
BIAS = t(4, seed=7)
IMAGES = t(2, 3, 6, 6)
FILTERS = [t(3, 3, 3, 3, seed=1), t(3, seed=2), t(3, 3, 3, 3, seed=3), t(3, seed=4)]
DOUBLE = t(3, 4, dtype=torch.float64)
COMPLEX = t(3, 4, dtype=torch.complex64)
COMPLEX_WEIGHT = t(4, 4, dtype=torch.complex64)
CASES = {
    "a chain": Case(chain, [X], W[:2], deferred=2),
    "with a bias": Case(with_bias, [X], [W[0], BIAS], deferred=1),
    "a bias used twice": Case(bias_used_twice, [X], [W[0], BIAS], deferred=1),
    "a weight used three times": Case(weight_used_three_times, [X], W[:1], deferred=0),
    "used in a product and beside": Case(weight_beside_a_product, [X], W[:1], deferred=0),
    "an embedding and a head": Case(embedding_and_head, [X], W[:1], deferred=0),
    "two embeddings and two heads": Case(two_embeddings_and_two_heads, [X], W[:1], deferred=0),
    "a weight of weights": Case(weight_of_weights, [X], W[:3], deferred=3),
    "attention": Case(attention, [X], W, deferred=4),
    "a convolution": Case(convolution, [IMAGES], FILTERS, deferred=2),
    "several outputs, one of another": Case(output_of_another_output, [X], W[:2], deferred=2),
    "an output without inputs": Case(output_without_inputs, [X], W, deferred=1),
    "no inputs": Case(without_inputs, [], W[:3], deferred=4),
    "no weights": Case(without_weights, [X], [], deferred=0),
    "unused": Case(one_product, [X, t(2)], [W[0], t(3)], deferred=1),
    "several inputs": Case(several_inputs, [X, t(3, 4, seed=9)], W[:2], deferred=2),
    "an input that does not move": Case(two_products, [X.detach()], W[:2], deferred=3),
    "a frozen weight": Case(product_of_relu, [X], [W[0].detach(), W[1]], deferred=1),
    "in place": Case(in_place, [X], W[:2], deferred=2),
    "a written product": Case(written_product, [X], W[:2], deferred=1),
    "a written function of weights": Case(written_function_of_weights, [X], W[:2], deferred=0),
    "a checkpoint": Case(checkpointed, [X], W[:3], deferred=1),
    "batches of products": Case(batches_of_products, [X], W[:2], deferred=0),
    "other dtypes": Case(other_dtypes, [DOUBLE], W[:2], deferred=2),
    "complex": Case(complex_product, [COMPLEX], [COMPLEX_WEIGHT], deferred=1),
}


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_split_backward_equals_one_backward_and_repeats_no_product(name, watched):
    case = CASES[name]
    compare(case.f, case.xs, case.ws, watched=watched, deferred=case.deferred)


def test_split_backward_defers_all_products_of_a_transformer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    x = t(2, 5, 16)

    once, early, late = compare(
        lambda xs, ws: (layer(xs[0]),), [x], [*layer.parameters()], deferred=4
    )

    assert early["mm"] == 4
    assert early["sum"] + late["sum"] == once["sum"]
    assert early + late == once


def programs():
    """Draw a program of a few operations on a pool of values that begins with inputs and weights.

    An instruction is an operation, and two numbers that choose its operands.
    """
    operation = st.sampled_from(["mm", "linear", "add", "mul", "relu", "mul_sum", "t"])
    number = st.integers(0, 99)
    instruction = st.tuples(operation, number, number)
    return st.lists(instruction, min_size=1, max_size=7)


@settings(max_examples=150)
@given(programs(), st.booleans(), st.integers(1, 3))
def test_split_backward_of_random_programs_equals_one_backward(program, watched, outputs):
    """Weights are used several times, behind others, beside inputs and without them."""

    def run(xs, ws):
        arguments = [*xs, *ws]
        pool = [*arguments]
        for name, i, j in program:
            first = pool[i % len(pool)]
            second = pool[j % len(pool)]
            pool.append(OPERATIONS[name](first, second))

        results = []
        for y in pool[-outputs:]:
            is_argument = any(y is x for x in arguments)
            results.append(y * 1 if is_argument else y)
        return results

    inputs = [t(3, 3), t(3, 3, seed=1)]
    weights = [t(3, 3, seed=2), t(3, 3, seed=3)]
    compare(run, inputs, weights, watched=watched)


OPERATIONS = {
    "mm": lambda a, b: a @ b / 4,
    "linear": lambda a, b: F.linear(a, b, b[0]) / 4,
    "add": torch.add,
    "mul": lambda a, b: (a * b).tanh(),
    "mul_sum": lambda a, b: a * b.sum(0).tanh(),
    "relu": lambda a, b: a.relu(),
    "t": lambda a, b: a.t(),
}


# -- memory ----------------------------------------------------------------------------------------


def test_split_backward_frees_activations_of_inputs_after_i():
    activations = {}

    def stage(x, w1, w2):
        a = torch.sigmoid(x @ w1)  # saves a, for I alone
        b = a.tanh()  # saves b; and the product below saves it, for W
        activations["a"] = weakref.ref(a.untyped_storage())
        activations["b"] = weakref.ref(b.untyped_storage())
        return b @ w2

    x = t(3, 4)
    ws = W[:2]
    saved = SavedActivations()
    with saved.recording():
        y = stage(x, *ws)

    _, compute_weight_gradients = split_backward(
        edges([y]), [torch.ones_like(y)], edges([x]), edges(ws), saved
    )
    del y  # its graph holds the activations
    assert activations["a"]() is None
    assert activations["b"]() is not None

    compute_weight_gradients()
    assert activations["b"]() is None


def test_saved_tensor_modified_in_place_raises():
    x = t(3, 4)
    saved = SavedActivations()
    with saved.recording():
        h = (x @ W[0]).sigmoid()
        y = h @ W[1]
    h.add_(1)

    message = r"modified by an inplace operation.*is at version 1; expected version 0"
    with pytest.raises(RuntimeError, match=message):
        split_backward(edges([y]), [torch.ones_like(y)], edges([x]), edges(W[:2]), saved)


def test_run_backward_accumulates_into_given_weights_only():
    matrices = [torch.randn(150, 150, requires_grad=True) for _ in range(4)]
    bias = torch.randn(150, requires_grad=True)
    unused = torch.randn(150, 150, requires_grad=True)
    x = torch.randn(2, 150, requires_grad=True)
    captured = torch.randn(150, requires_grad=True)  # by the stage function: no parameter of it
    weights = [*matrices, bias, unused]

    def outputs():
        y = x
        for w in matrices:
            y = torch.tanh(y @ w)
        return edges([y * bias + captured])

    cotangents = [torch.ones(2, 150)]
    (gx,), expected = run_backward(outputs(), cotangents, edges([x]), edges(weights))
    total = RunningSum()
    for _ in range(3):
        x.grad = None
        total.let_accumulate(weights)
        actual, gradients = run_backward(
            outputs(), cotangents, edges([x]), edges(weights), accumulate=True
        )
        assert actual[0].equal(gx)
        assert gradients is None

    *sums, sum_of_unused = total.result()
    for actual, g in zip(sums, expected[:5], strict=True):
        assert torch.equal(actual, g + g + g)
    assert sum_of_unused is None
    assert captured.grad is None


def test_running_sum_mixes_added_and_accumulated_gradients():
    total = RunningSum()
    weights = [torch.zeros(2, requires_grad=True) for _ in range(4)]
    first = torch.ones(2)

    total.add(0, [first, None, None, None])
    for _ in range(2):
        total.let_accumulate(weights)
        (weights[0].sum() + weights[1].sum()).backward()
    total.add(3, [torch.ones(2), torch.ones(2), None, torch.ones(2)])
    total.let_accumulate(weights)
    weights[3].sum().backward()

    sums = [None if x is None else x.tolist() for x in total.result()]
    assert sums == [[4, 4], [3, 3], None, [2, 2]]
    assert first.tolist() == [1, 1]  # the caller's tensor is not written to


class ViewOfBuffer(torch.autograd.Function):
    """Its gradient is a view of a buffer that its caller keeps."""

    @staticmethod
    def forward(ctx, w, buffer):
        ctx.buffer = buffer
        return w.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.buffer.view(-1), None


def test_running_sum_does_not_write_to_shared_memory():
    buffer = torch.ones(3, 1)
    longer = torch.ones(5)
    w = torch.zeros(3, requires_grad=True)
    v = torch.zeros(3, requires_grad=True)

    total = RunningSum()
    for _ in range(3):
        total.let_accumulate([w, v])
        y = ViewOfBuffer.apply(w, buffer).sum() + ViewOfBuffer.apply(v, longer[:3]).sum()
        y.backward()

    assert [x.tolist() for x in total.result()] == [[3, 3, 3], [3, 3, 3]]
    assert buffer.tolist() == [[1]] * 3
    assert longer.tolist() == [1] * 5


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

    stages = [lambda w, x: torch.tanh(x @ w)] * 4
    step = fs.pipeline.pipelined(stages, schedule, lambda y, x: y.square().mean(), mesh=mesh)
    actual = step(weights, microbatches).gradients

    # One model on the full batch, in float64.
    model = [w.double().requires_grad_() for w in weights]
    y = torch.cat(microbatches).double()
    for w in model:
        y = torch.tanh(y @ w)
    expected = torch.autograd.grad(y.square().mean(), model)
    for g, g64 in zip(actual, expected, strict=True):
        torch.testing.assert_close(g, g64.float(), rtol=1e-4, atol=1e-7)


def halved(gradients):
    if isinstance(gradients, torch.Tensor):
        return gradients * 0.5
    return tuple(g * 0.5 for g in gradients)


@pytest.mark.parametrize("hooked", ["tensor", "node"], ids=["of a tensor", "of its node"])
def test_hooks_of_a_deferred_product_run_once(hooked):
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    w = torch.randn(4, 2, requires_grad=True)

    def product():
        y = x @ w
        if hooked == "tensor":
            y.register_hook(halved)
        else:
            y.grad_fn.register_prehook(halved)
        return y.tanh()

    cotangents = [torch.ones(3, 2)]
    gxs, compute_weight_gradients = split_backward(
        edges([product()]), cotangents, edges([x]), edges([w])
    )
    gws = compute_weight_gradients()

    expected = torch.autograd.grad([product()], [x, w], cotangents)
    assert torch.equal(gxs[0], expected[0])
    assert torch.equal(gws[0], expected[1])
