"""Compressors against lists of tensors: values, bytes, bits on processes, and the theory they are held to."""

from fractions import Fraction
from itertools import pairwise
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard import comm

COMPRESSORS = {
    "top_k": lambda: comm.top_k(0.1),
    "random_k": lambda: comm.random_k(0.1),
    "sign": lambda: comm.sign(block=16),
    "8 bits": lambda: comm.quantized(8, block=16),
    "4 bits": lambda: comm.quantized(4, block=16),
    "2 bits": lambda: comm.quantized(2, block=8),
    "fp8": lambda: comm.quantized("fp8", block=16),
    "stochastic": lambda: comm.quantized(4, block=16, stochastic=True),
    "power_sgd": lambda: comm.power_sgd(1),
    "chain": lambda: comm.chain(comm.top_k(0.2), comm.quantized(8, block=8)),
    "chain of random_k": lambda: comm.chain(comm.random_k(0.5), comm.quantized(8, block=8)),
}
SHAPES = {"matrix": (16, 24), "vector": (200,), "small": (3,), "number": (), "none": (0, 4)}


def gradients(device, step, dtype=torch.float32):
    draw = torch.Generator().manual_seed(100 * step + device)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}


def steps(compress, count, axis="data", make=gradients):
    """Reduce some steps' gradients on this device; return the results of each."""
    state, results = compress.init(make(0, 0)), []
    for step in range(count):
        result = compress.reduce(make(fs.axis_index(axis), step), state, axis)
        state = result.state
        results.append((result.total, result.sent))
    return results


def on_devices(compress, count=1, n=4, make=gradients):
    return fs.run(lambda: steps(compress, count, make=make), mesh=fs.make_mesh({"data": n}))


def assert_close(a, b, tolerance=1e-5):
    for name in SHAPES:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


def summed(trees):
    return {name: sum(tree[name].double() for tree in trees) for name in SHAPES}


@pytest.mark.parametrize("name", COMPRESSORS)
def test_totals_are_equal_and_the_sum_of_what_was_sent(name):
    for results in zip(*on_devices(COMPRESSORS[name](), 3), strict=True):
        totals, sent = zip(*results, strict=True)
        for leaf in SHAPES:
            assert all(torch.equal(totals[0][leaf], total[leaf]) for total in totals)
        assert_close(summed(sent), {leaf: x.double() for leaf, x in totals[0].items()})


@pytest.mark.parametrize("name", COMPRESSORS)
def test_totals_and_residuals_add_up_to_all_gradients(name):
    compress, n, count = comm.error_feedback(COMPRESSORS[name]()), 3, 4

    def main():
        state, totals = compress.init(gradients(0, 0)), []
        for step in range(count):
            total, _, state = compress.reduce(gradients(fs.axis_index("data"), step), state, "data")
            totals.append(total)
        return totals, state["residual"]

    results = fs.run(main, mesh=fs.make_mesh({"data": n}))
    sums = summed([*results[0][0], *(residual for _, residual in results)])
    assert_close(sums, summed([gradients(device, step) for device in range(n) for step in range(count)]), 1e-4)


def test_top_k_adds_up_the_largest_numbers_of_each_device():
    results = on_devices(comm.top_k(0.1), n=3)
    for leaf in ("matrix", "vector"):
        expected = np.zeros(np.prod(SHAPES[leaf]), np.float32)
        for device in range(3):
            x = gradients(device, 0)[leaf].flatten().numpy()
            largest = np.argsort(-np.abs(x))[: ceil(0.1 * len(x))]
            expected[largest] += x[largest]
        np.testing.assert_array_equal(results[0][0][0][leaf].flatten().numpy(), expected)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_codes_are_the_nearest_levels_of_each_block(bits):
    compress = comm.sign(block=8) if bits == 1 else comm.quantized(bits, block=8)
    draw = {"x": torch.randn(2, 64, generator=torch.Generator().manual_seed(0))}

    def coded(x):
        blocks, levels = x.reshape(-1, 8), 2 ** (bits - 1) - 1
        if bits == 1:
            return (np.where(blocks >= 0, 1, -1) * np.abs(blocks).mean(1, keepdims=True)).reshape(x.shape)
        scales = np.abs(blocks).max(1, keepdims=True) / levels
        return (np.round(blocks / scales) * scales).reshape(x.shape)

    def main():
        grads = [draw["x"][fs.axis_index("data")]]
        return compress.reduce(grads, compress.init(grads), "data").total[0]

    x = draw["x"].numpy().astype(np.float64)
    expected = coded(coded(x[0]) + coded(x[1]))
    np.testing.assert_allclose(fs.run(main, mesh=fs.make_mesh({"data": 2}))[0].numpy(), expected, atol=1e-5)


DYADIC = st.integers(-64, 64).map(lambda k: k / 8)


@given(rows=st.lists(st.lists(DYADIC, min_size=40, max_size=40), min_size=2, max_size=4))
def test_a_fraction_of_one_is_psum_to_the_bit(rows):
    xs = torch.tensor(rows)

    def main(compress):
        grads = [xs[fs.axis_index("data")]]
        return compress.reduce(grads, compress.init(grads), "data").total[0]

    for compress in (comm.top_k(1.0), comm.random_k(1.0), comm.error_feedback(comm.top_k(1.0))):
        (result, *_) = fs.run(lambda compress=compress: main(compress), mesh=fs.make_mesh({"data": len(rows)}))
        assert torch.equal(result, xs.sum(0))


DELTAS = {"top_k": 0.1, "chain": 0.19, "sign": 1 / 16, "8 bits": 0.99, "4 bits": 0.6, "2 bits": 1 / 8, "fp8": 0.99}
EDGES = st.sampled_from([0.0, 1.0, -1.0, 2.0**-149])


@given(
    name=st.sampled_from(sorted({*COMPRESSORS} - {"stochastic", "power_sgd"})),
    x=st.lists(st.floats(-1, 1, width=32) | EDGES, min_size=64, max_size=64),
    scale=st.sampled_from([0.0, 1e-42, 1e-30, 1.0, 1e20]),
)
def test_what_is_lost_is_a_part_of_the_gradient(name, x, scale):
    """|x - C(x)|^2 <= (1 - delta) |x|^2, with zeros, ties and denormals."""
    compress, x = COMPRESSORS[name](), torch.tensor(x).mul(scale)

    def main():
        grads = [x if fs.axis_index("data") == 0 else torch.zeros_like(x)]
        return compress.reduce(grads, compress.init(grads), "data")

    result = fs.run(main, mesh=fs.make_mesh({"data": 2}))[0]
    lost = (x.double() - result.sent[0].double()).square().sum()
    assert lost <= x.double().square().sum() * (1 - DELTAS.get(name, 0) + 1e-6) + 1e-80
    assert torch.isfinite(result.total[0]).all()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_gradient_that_is_not_finite_makes_the_total_so(name, number):
    def make(device, step):
        tree = gradients(device, step)
        return tree if device == 0 else {**tree, "matrix": tree["matrix"].index_fill(0, torch.tensor(3), number)}

    for ((total, _),) in on_devices(COMPRESSORS[name](), n=3, make=make):
        assert not torch.isfinite(total["matrix"]).all() and torch.isfinite(total["vector"]).all()


def test_stochastic_codes_are_right_on_average():
    """The mean of 2,000 blocks of equal numbers; no total is further than 3 from its mean."""
    compress, draws = comm.quantized(2, block=8, stochastic=True), 2000
    block = torch.linspace(-1, 1, 8)

    def main():
        grads = [(1 + fs.axis_index("data")) * block.repeat(draws)]
        return compress.reduce(grads, compress.init(grads), "data").total[0]

    total = fs.run(main, mesh=fs.make_mesh({"data": 2}))[0]
    assert (total.view(draws, 8).mean(0) - 3 * block).abs().max() < 4 * 3.0 / draws**0.5


D = 4096


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(
    ("compress", "expected"),
    [
        (comm.top_k(1 / 64), lambda n: 8 * 64 * (n - 1)),
        (comm.random_k(1 / 64), lambda n: Fraction(8 * 64 * (n - 1), n)),
        (comm.quantized(8), lambda n: Fraction(2 * (n - 1), n) * D * Fraction(8 * 256 + 32, 8 * 256)),
        (comm.quantized(2), lambda n: Fraction(2 * (n - 1), n) * D * Fraction(2 * 256 + 32, 8 * 256)),
        (comm.sign(), lambda n: Fraction(2 * (n - 1), n) * D * Fraction(256 + 32, 8 * 256)),
        (comm.power_sgd(2), lambda n: Fraction(8 * (n - 1), n) * (2 * (64 + 64) + 10)),
        (comm.chain(comm.top_k(1 / 16), comm.quantized(8)), lambda n: (n - 1) * 256 * (4 + 1 + 4 / 256)),
    ],
)
def test_bytes_are_those_of_the_formula(compress, expected, n):
    def main():
        grads = {"w": torch.randn(64, 64), "b": torch.randn(10)} if compress.encoding is None else {"w": torch.randn(D)}
        compress.reduce(grads, compress.init(grads), "data")

    with fs.ledger() as ledger:
        fs.run(main, mesh=fs.make_mesh({"data": n}))
    assert ledger.bytes() == expected(n)


def resnet_18():
    """Zeros in the shapes of ResNet-18's parameters, for images of 32 x 32 in 10 classes."""
    shapes, width = [(64, 3, 3, 3), (64,), (64,), (10, 512), (10,)], 64
    for wide in (64, 128, 256, 512):
        convs = [(wide, width, 3, 3), *[(wide, wide, 3, 3)] * 3, *[(wide, width, 1, 1)] * (wide > width)]
        shapes += [shape for conv in convs for shape in (conv, (wide,), (wide,))]
        width = wide
    return [torch.zeros(shape) for shape in shapes]


def test_power_sgd_sends_a_243rd_of_resnet_18():  # as in the appendix of its paper (Vogels 2019)
    grads, compress = resnet_18(), comm.power_sgd(1)
    with fs.ledger() as ledger:
        fs.run(lambda: compress.reduce(grads, compress.init(grads), "data"), mesh=fs.make_mesh({"data": 2}))
    assert sum(x.numel() for x in grads) == 11_173_962
    assert sum(x.nbytes for x in grads) / float(ledger.bytes()) == pytest.approx(243.26, abs=0.005)


def test_power_sgd_finds_a_matrix_of_its_rank_in_two_steps():
    u, v = torch.randn(30, generator=torch.Generator().manual_seed(1)), torch.linspace(1, 2, 20)

    def same(device, step):
        return {**gradients(device, step), "matrix": (1 + device) * torch.outer(u, v)}

    results = on_devices(comm.power_sgd(1), 2, n=2, make=same)
    torch.testing.assert_close(results[0][1][0]["matrix"], 3 * torch.outer(u, v), rtol=1e-4, atol=1e-4)


def test_power_sgd_goes_on_after_a_gradient_of_zero():
    results = on_devices(comm.power_sgd(1), 2, n=2, make=lambda device, step: {"m": torch.ones(9, 9) * step})
    torch.testing.assert_close(results[0][1][0]["m"], 2 * torch.ones(9, 9))


@pytest.mark.parametrize("name", COMPRESSORS)
def test_one_device_sends_nothing_and_loses_nothing(name):
    with fs.ledger() as ledger:
        results = on_devices(comm.error_feedback(COMPRESSORS[name]()), 2, n=1)
    assert ledger.bytes() == 0
    assert all(torch.equal(results[0][1][0][leaf], gradients(0, 1)[leaf]) for leaf in SHAPES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_dtypes_are_kept(name, dtype):
    def make(device, step):
        return gradients(device, step, dtype)

    ((total, sent),) = on_devices(COMPRESSORS[name](), n=2, make=make)[0]
    assert all(total[leaf].dtype == sent[leaf].dtype == dtype for leaf in SHAPES)
    assert all(total[leaf].shape == sent[leaf].shape == shape for leaf, shape in SHAPES.items())


def all_compressors():
    fs.make_mesh({"data": 2})
    return {name: on_devices(comm.error_feedback(make()), 2, n=2)[0] for name, make in COMPRESSORS.items()}


def test_processes_compute_the_bits_of_virtual_devices(two):
    expected = {name: on_devices(comm.error_feedback(make()), 2, n=2)[0] for name, make in COMPRESSORS.items()}
    for found in two.run(all_compressors):
        for name, results in expected.items():
            for (total, _), (other, _) in zip(results, found[name], strict=True):
                assert all(torch.equal(total[leaf], other[leaf]) for leaf in SHAPES), name


# -- the numbers of a textbook example: f_i(x) = <a_i, x>^2 + |x|^2 / 4 -------------------------------------------------

A = torch.tensor([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]], dtype=torch.float64)


def slope(a, x):
    return 2 * (a @ x) * a + x / 2


def descend(compress, lr, count):
    """Return the point and the state at each step of gradient descent with the mean of compressed gradients."""

    def main():
        a, x = A[fs.axis_index("data")], torch.ones(3, dtype=torch.float64)
        state, steps = compress.init(x), []
        for _ in range(count):
            total, _, state = compress.reduce(slope(a, x), state, "data")
            steps.append((x, state))
            x = x - lr * total / 3
        return steps

    return fs.run(main, mesh=fs.make_mesh({"data": 3}))


def test_bare_top_1_grows_in_each_step():
    lr = 0.05
    points = [x for x, _ in descend(comm.top_k(1 / 3), lr, 20)[0]]
    for before, after in pairwise(points):
        torch.testing.assert_close(after, before * (1 + 11 * lr / 6))


def test_ef21_keeps_its_bound():
    """f(x) + lr / theta mean |estimate - gradient|^2 shrinks by 0.99502 a step (Richtarik 2021, theorem 2)."""
    lr, theta, bounds = 1 / 234.26, 1 - (2 / 3) ** 0.5, []
    for steps in zip(*descend(comm.ef21(comm.top_k(1 / 3)), lr, 300), strict=True):
        x = steps[0][0]
        errors = [(state["estimate"] - slope(a, x)).square().sum() for a, (_, state) in zip(A, steps, strict=True)]
        bounds.append((A @ x).square().mean() + x.square().sum() / 4 + lr / theta * sum(errors) / 3)
    assert all(bound <= 0.99502**step * bounds[0] for step, bound in enumerate(bounds))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: comm.top_k(0), "top_k: fraction must be in"),
        (lambda: comm.random_k(1.5), "random_k: fraction must be in"),
        (lambda: comm.quantized(3), "quantized: bits must be 8, 4, 2"),
        (lambda: comm.quantized(8, block=0), "quantized: block must be"),
        (lambda: comm.quantized(8, block=12), "block must be a multiple of 8"),
        (lambda: comm.quantized("fp8", stochastic=True), "stochastic must be False"),
        (lambda: comm.power_sgd(0), "power_sgd: rank must be"),
        (lambda: comm.error_feedback(comm.sign(), decay=2), "error_feedback: decay must be"),
        (lambda: comm.momentum_corrected(comm.sign(), 1.0), "momentum_corrected: momentum must be"),
        (lambda: comm.delayed(comm.sign(), 0), "delayed: steps must be"),
        (lambda: comm.chain(comm.sign(), comm.top_k(0.1)), "chain: the compressors must be top_k or random_k"),
    ],
)
def test_wrong_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()
