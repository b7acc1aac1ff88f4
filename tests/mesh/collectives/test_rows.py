"""`all_to_all` with counts: rows for each device, their derivatives and bytes, on all runtimes.

The oracle is `exchanged`: lists of tensors, split and concatenated.
"""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import fshard as fs


def exchanged(xs, counts):
    """Return the rows of each device: from device 0, then 1, ..."""
    parts = [x.split(row) for x, row in zip(xs, counts, strict=True)]
    return [torch.cat([row[target] for row in parts]) for target in range(len(xs))]


@st.composite
def drawn(draw, most=4):
    """Draw counts, and the rows of each device."""
    n = draw(st.integers(1, most))
    row = st.lists(st.integers(0, 3), min_size=n, max_size=n)
    counts = [draw(row) for _ in range(n)]
    shape = draw(st.sampled_from([(), (1,), (2, 3), (0,)]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    xs = []
    for row in counts:
        x = torch.randint(0, 99, (sum(row), *shape), generator=generator)
        xs.append(x.to(dtype))
    return counts, xs


def run(n, function):
    return fs.run(lambda: function(fs.axis_index("d")), mesh=fs.make_mesh({"d": n}))


@given(drawn(), st.sampled_from(["row", "matrix", "tensor"]))
def test_rows_are_those_of_lists(problem, kind):
    counts, xs = problem
    n = len(xs)

    def argument(i):
        if kind == "row":
            return counts[i]
        return counts if kind == "matrix" else torch.tensor(counts)

    with fs.ledger() as comm:
        results = run(n, lambda i: fs.all_to_all(xs[i], "d", counts=argument(i)))

    assert all(map(torch.equal, results, exchanged(xs, counts)))
    row_bytes = xs[0].element_size() * xs[0].shape[1:].numel()
    counts_bytes = 8 * n * (n - 1) if kind == "row" else 0  # rows of counts are gathered
    for i, row in enumerate(counts):
        sent = (sum(row) - row[i]) * row_bytes
        assert comm.bytes(i) == sent + counts_bytes


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # torch's, at its first jvp
@given(drawn(most=3))
def test_derivatives_are_those_of_lists(problem):
    """Backward, a second backward through it, and forward mode: of sums of squares."""
    counts, xs = problem
    assume(all(map(sum, counts)) and all(x.numel() for x in xs))
    xs = [x.real.double() if x.is_complex() else x.double() for x in xs]
    weights = [torch.randn(y.shape, dtype=torch.float64) for y in exchanged(xs, counts)]

    def exchange(x):
        return fs.all_to_all(x, "d", counts=counts)

    def device(i):
        x = xs[i].clone().requires_grad_()
        loss = (weights[i] * exchange(x) ** 3).sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        (h,) = torch.autograd.grad((g * g).sum(), x)
        _, tangent = torch.func.jvp(exchange, (xs[i],), (2 * xs[i],))
        return g.detach(), h, tangent

    results = run(len(xs), device)

    leaves = [x.clone().requires_grad_() for x in xs]
    ys = exchanged(leaves, counts)
    loss = sum((w * y**3).sum() for w, y in zip(weights, ys, strict=True))
    gs = torch.autograd.grad(loss, leaves, create_graph=True)
    hs = torch.autograd.grad(sum((g * g).sum() for g in gs), leaves)
    for i, (g, h, tangent) in enumerate(results):
        torch.testing.assert_close(g, gs[i].detach())
        torch.testing.assert_close(h, hs[i])
        torch.testing.assert_close(tangent, 2 * ys[i].detach())


def test_vmap_and_trees_and_start():
    counts = [[1, 2], [3, 0]]
    xs = [torch.randn(5, 3, 2), torch.randn(5, 3, 2)]  # 5 samples of 3 rows

    def exchange_samples(i):
        return torch.vmap(lambda x: fs.all_to_all(x, "d", counts=counts))(xs[i])

    def exchange_tree(i):
        tree = {"a": xs[i][0], "b": xs[i][1, :, 0]}
        return fs.all_to_all.start(tree, "d", counts=counts).wait()

    mapped = run(2, exchange_samples)
    trees = run(2, exchange_tree)

    for sample in range(5):
        expected = exchanged([x[sample] for x in xs], counts)
        assert all(map(torch.equal, [y[sample] for y in mapped], expected))
    expected = exchanged([x[0] for x in xs], counts)
    assert all(map(torch.equal, [tree["a"] for tree in trees], expected))
    expected = exchanged([x[1, :, 0] for x in xs], counts)
    assert all(map(torch.equal, [tree["b"] for tree in trees], expected))


def test_along_one_axis_of_two():
    def device():
        a = fs.axis_index("a")
        b = fs.axis_index("b")
        rows = torch.full((2,), 10 * a + b)
        counts = [2 - a, a] if b else [0, 2]
        return fs.all_to_all(rows, "b", counts=counts)

    results = fs.run(device, mesh=fs.make_mesh({"a": 2, "b": 2}))

    assert [y.tolist() for y in results] == [[1, 1], [0, 0], [11], [10, 10, 11]]


def test_expected_rows_on_an_abstract_mesh():
    mesh = fs.make_mesh({"d": 4}, runtime="abstract")
    x = torch.empty(8, 5, device="meta")

    with fs.ledger() as comm, fs.memory.limit() as used:
        (y,) = fs.run(lambda: fs.all_to_all(x, "d", counts=[2, 2, 2, 2]), mesh=mesh)

    assert y.shape == (8, 5)
    assert comm.bytes() == 6 * 20
    assert used.peak() >= 8 * 20


def in_process():
    """Return the rows, and the gradient, of uneven counts of which one is large."""
    mesh = fs.make_mesh({"d": 2})
    counts = [[1, 40_000], [0, 3]]
    i = fs.mesh.process_index()
    x = torch.arange(3.0 * sum(counts[i])).view(-1, 3).add(i / 2).requires_grad_()

    def device():
        y = fs.all_to_all(x, "d", counts=counts[i])
        (g,) = torch.autograd.grad((y**2).sum(), x)
        return y.detach(), g

    ((y, g),) = fs.run(device, mesh=mesh)
    return x.detach(), y, g


def test_processes_exchange_the_same_rows(two):
    xs, ys, gs = zip(*two.run(in_process), strict=True)
    assert all(map(torch.equal, ys, exchanged(xs, [[1, 40_000], [0, 3]])))
    assert all(torch.equal(g, 2 * x) for x, g in zip(xs, gs, strict=True))


def test_matrices_that_differ_between_devices_raise():
    matrices = [[[2, 0], [1, 1]], [[1, 1], [1, 1]]]
    with pytest.raises(fs.errors.MismatchError, match="all_to_all"):
        run(2, lambda i: fs.all_to_all(torch.ones(2), "d", counts=matrices[i]))
