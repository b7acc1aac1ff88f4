"""Compressors against lists of tensors: values, bytes, and the bounds of theory."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

import fshard as fs
from fshard import comm
from fshard.comm.block_code import BlockCode
from fshard.comm.compressor import FlatLeaf
from fshard.comm.sparse import Encoding
from tests.helpers.sampled import examples

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


def on_devices(compress, count=1, n=4, make=gradients):
    """Reduce some steps' gradients.

    Return for each device (total, sent) of each step, and the last state.
    """

    def main():
        state = compress.init(make(0, 0))
        results = []
        for step in range(count):
            total, sent, state = compress.reduce(make(fs.axis_index("data"), step), state, "data")
            results.append((total, sent))
        return results, state

    return fs.run(main, mesh=fs.make_mesh({"data": n}))


def reduced(compress, xs):
    """Reduce one leaf, of which `xs` has a gradient for each device.

    Return what the first device gets and sends.
    """

    def main():
        grads = [xs[fs.axis_index("data")]]
        (total,), (sent,), _ = compress.reduce(grads, compress.init(grads), "data")
        return total, sent

    return fs.run(main, mesh=fs.make_mesh({"data": len(xs)}))[0]


def summed(trees):
    return {name: sum(tree[name].double() for tree in trees) for name in SHAPES}


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.float64, 1e-4), (torch.bfloat16, 0.1)],
    ids=str,
)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_totals_are_sums_of_what_was_sent_and_residuals_of_what_was_not(name, dtype, tolerance):
    n = 3
    count = 4
    bounds = {"rtol": tolerance, "atol": tolerance}

    def make(device, step):
        return gradients(device, step, dtype)

    compress = comm.error_feedback(COMPRESSORS[name]())
    results, states = zip(*on_devices(compress, count, n, make), strict=True)

    # In each step, all devices have the sum of what they have sent.
    for step in zip(*results, strict=True):
        totals, sent = zip(*step, strict=True)
        for leaf, shape in SHAPES.items():
            assert all(torch.equal(totals[0][leaf], total[leaf]) for total in totals)
            assert all(x[leaf].dtype == dtype for x in (*totals, *sent))
            assert all(x[leaf].shape == shape for x in (*totals, *sent))
        torch.testing.assert_close(summed(sent), summed([totals[0]]), **bounds)

    # Totals of all steps and residuals are the sum of all gradients.
    totals = [total for total, _ in results[0]]
    residuals = [state["residual"] for state in states]
    all_gradients = [make(device, step) for device in range(n) for step in range(count)]
    torch.testing.assert_close(summed([*totals, *residuals]), summed(all_gradients), **bounds)


def test_top_k_adds_up_the_largest_numbers_of_each_device():
    xs = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    expected = np.zeros(200, np.float32)
    for x in xs.numpy():
        largest = np.argsort(-np.abs(x))[:20]
        expected[largest] += x[largest]
    np.testing.assert_array_equal(reduced(comm.top_k(0.1), xs)[0].numpy(), expected)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_codes_are_the_nearest_levels_of_each_block(bits):
    compress = comm.sign(block=8) if bits == 1 else comm.quantized(bits, block=8)
    xs = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))

    def coded(x):
        blocks = x.reshape(-1, 8)
        if bits == 1:
            means = np.abs(blocks).mean(1, keepdims=True)
            return (np.where(blocks >= 0, 1, -1) * means).reshape(x.shape)
        levels = 2 ** (bits - 1) - 1
        scales = np.abs(blocks).max(1, keepdims=True) / levels
        return (np.round(blocks / scales) * scales).reshape(x.shape)

    total, _ = reduced(compress, xs)

    x, y = xs.numpy().astype(np.float64)
    np.testing.assert_allclose(total.numpy(), coded(coded(x) + coded(y)), atol=1e-5)


DYADIC = st.integers(-64, 64).map(lambda k: k / 8)


@settings(max_examples=examples(20))
@given(rows=st.lists(st.lists(DYADIC, min_size=40, max_size=40), min_size=2, max_size=4))
def test_a_fraction_of_one_is_psum_to_the_bit(rows):
    xs = torch.tensor(rows)
    for compress in (comm.top_k(1.0), comm.random_k(1.0), comm.error_feedback(comm.top_k(1.0))):
        assert torch.equal(reduced(compress, xs)[0], xs.sum(0))


DELTAS = {
    "top_k": 0.1,
    "chain": 0.19,
    "sign": 1 / 16,
    "8 bits": 0.99,
    "4 bits": 0.6,
    "2 bits": 1 / 8,
    "fp8": 0.99,
}
EDGES = st.sampled_from([0.0, 1.0, -1.0, 2.0**-149])


@given(
    name=st.sampled_from(sorted({*COMPRESSORS} - {"stochastic", "power_sgd"})),
    x=st.lists(st.floats(-1, 1, width=32) | EDGES, min_size=64, max_size=64),
    scale=st.sampled_from([0.0, 1e-42, 1e-30, 1.0, 1e20]),
)
def test_what_is_lost_is_a_part_of_the_gradient(name, x, scale):
    """|x - C(x)|^2 <= (1 - delta) |x|^2, with zeros, ties and denormals."""
    x = torch.tensor(x).mul(scale)
    total, sent = reduced(COMPRESSORS[name](), torch.stack([x, torch.zeros_like(x)]))
    lost = (x.double() - sent.double()).square().sum()
    assert lost <= x.double().square().sum() * (1 - DELTAS.get(name, 0) + 1e-6) + 1e-80
    assert torch.isfinite(total).all()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_gradient_that_is_not_finite_makes_the_total_so(name, number):
    def make(device, step):
        tree = gradients(device, step)
        return (
            tree
            if device == 0
            else {**tree, "matrix": tree["matrix"].index_fill(0, torch.tensor(3), number)}
        )

    for ((total, _),), _ in on_devices(COMPRESSORS[name](), n=3, make=make):
        assert not torch.isfinite(total["matrix"]).all() and torch.isfinite(total["vector"]).all()


def test_each_leaf_and_step_draws_other_elements():
    def make(device, step):
        return {"a": torch.ones(400), "b": torch.ones(400)}

    results, _ = on_devices(comm.random_k(0.1), count=2, make=make)[0]

    chosen = set()
    for total, _ in results:
        for name in "ab":
            chosen.add(tuple(total[name].nonzero().flatten().tolist()))
    assert len(chosen) == 4


def test_numbers_that_all_devices_draw_depend_on_the_seed_alone():
    """Of the CPU's generator, as they have always been: a checkpoint's run goes on with its draws."""
    leaf = FlatLeaf(torch.arange(40.0), "0 ['a']")
    seed = xxhash.xxh3_64_intdigest(b"7 0 ['a'] None") >> 1
    expected = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:4]
    index = Encoding(0.1, 7).indices(leaf)
    assert torch.equal(index, expected)
    assert index.untyped_storage().nbytes() == 4 * 8, "it keeps the order of all numbers"


class DrawingDevices(TorchFunctionMode):
    """Records the device of each draw, and that of its generator."""

    def __init__(self):
        super().__init__()
        self.devices = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "generator" in kwargs:
            self.devices.append((kwargs.get("device"), kwargs["generator"].device))
        return func(*args, **kwargs)


def test_draws_are_made_on_the_device_of_the_leaf(monkeypatch):
    """Without a copy for which the host waits: of a GPU, each draw names its device, and the
    generator is there.
    """
    made = []

    class OnCpu:
        def __new__(cls, device):
            made.append(torch.device(device))
            return generator("cpu")

    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", OnCpu)
    gpu = torch.device("cuda", 1)
    FlatLeaf(SimpleNamespace(device=gpu, is_meta=False), "0 a").generator(0)
    FlatLeaf(torch.empty(3, device="meta"), "0 a").generator(0)
    assert made == [gpu, torch.device("cpu")]

    leaf = FlatLeaf(torch.ones(64), "0 a")
    cpu = torch.device("cpu")
    with DrawingDevices() as draws:
        Encoding(0.1, 7).indices(leaf)
        BlockCode(4, 16, seed=0).encode(leaf.x, 1, leaf.generator(0))
        comm.power_sgd(1).init({"w": torch.ones(8, 8)})
    assert draws.devices == [(cpu, cpu)] * 3


def test_stochastic_codes_are_right_on_average():
    """The mean of 2,000 blocks of equal numbers; no total is further than 3 from its mean."""
    draws = 2000
    block = torch.linspace(-1, 1, 8)
    xs = torch.stack([block.repeat(draws), 2 * block.repeat(draws)])
    total, _ = reduced(comm.quantized(2, block=8, stochastic=True), xs)
    assert (total.view(draws, 8).mean(0) - 3 * block).abs().max() < 4 * 3.0 / draws**0.5


D = 4096


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(
    ("compress", "expected"),
    [
        (comm.top_k(1 / 64), lambda n: 8 * 64 * (n - 1)),
        (comm.random_k(1 / 64), lambda n: Fraction(8 * 64 * (n - 1), n)),
        (
            comm.quantized(8),
            lambda n: Fraction(2 * (n - 1), n) * D * Fraction(8 * 256 + 32, 8 * 256),
        ),
        (
            comm.quantized(2),
            lambda n: Fraction(2 * (n - 1), n) * D * Fraction(2 * 256 + 32, 8 * 256),
        ),
        (comm.sign(), lambda n: Fraction(2 * (n - 1), n) * D * Fraction(256 + 32, 8 * 256)),
        (comm.power_sgd(2), lambda n: Fraction(8 * (n - 1), n) * (2 * (64 + 64) + 10)),
        (
            comm.chain(comm.top_k(1 / 16), comm.quantized(8)),
            lambda n: (n - 1) * 256 * (4 + 1 + 4 / 256),
        ),
    ],
)
def test_bytes_are_those_of_the_formula(compress, expected, n):
    is_full = compress.encoding is None
    grads = (
        {"w": torch.randn(64, 4, 16), "b": torch.randn(10)} if is_full else {"w": torch.randn(D)}
    )
    with fs.ledger() as ledger:
        on_devices(compress, n=n, make=lambda device, step: grads)
    assert ledger.bytes() == expected(n)


def test_power_sgd_finds_a_matrix_of_its_rank_in_the_step_after_zeros():
    matrix = torch.outer(
        torch.randn(30, generator=torch.Generator().manual_seed(1)), torch.linspace(1, 2, 20)
    )

    def make(device, step):
        return {"matrix": (1 + device) * matrix * (step > 0)}

    results, _ = on_devices(comm.power_sgd(1), 2, n=2, make=make)[0]
    torch.testing.assert_close(results[1][0]["matrix"], 3 * matrix, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_one_device_sends_nothing_and_loses_nothing(name):
    with fs.ledger() as ledger:
        ((results, _),) = on_devices(comm.error_feedback(COMPRESSORS[name]()), 2, n=1)
    assert ledger.bytes() == 0
    assert all(torch.equal(results[1][0][leaf], gradients(0, 1)[leaf]) for leaf in SHAPES)
