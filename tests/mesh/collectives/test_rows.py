"""`all_to_all` with counts: rows for each device, against lists of tensors; its derivatives; bytes; all runtimes."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import fshard as fs


def exchanged(xs, counts):
    """The rows of each device: from device 0, then 1, ..."""
    parts = [x.split(row) for x, row in zip(xs, counts, strict=True)]
    return [torch.cat([row[to] for row in parts]) for to in range(len(xs))]


@st.composite
def drawn(draw, most=4):
    """Counts, and the rows of each device."""
    n = draw(st.integers(1, most))
    counts = [[draw(st.integers(0, 3)) for _ in range(n)] for _ in range(n)]
    shape = draw(st.sampled_from([(), (1,), (2, 3), (0,)]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    xs = [torch.randint(0, 99, (sum(row), *shape), generator=generator).to(dtype) for row in counts]
    return counts, xs


def run(n, function):
    return fs.run(lambda: function(fs.axis_index("d")), mesh=fs.make_mesh({"d": n}))


@given(drawn(), st.sampled_from(["row", "matrix", "tensor"]))
def test_rows_are_those_of_lists(problem, kind):
    counts, xs = problem
    argument = {
        "row": lambda i: counts[i],
        "matrix": lambda i: counts,
        "tensor": lambda i: torch.tensor(counts),
    }[kind]
    with fs.ledger() as comm:
        results = run(len(xs), lambda i: fs.all_to_all(xs[i], "d", counts=argument(i)))
    assert all(map(torch.equal, results, exchanged(xs, counts)))
    each = xs[0][:1].nbytes if len(xs[0]) else xs[0].element_size() * xs[0].shape[1:].numel()
    sent = [(sum(row) - row[i]) * each for i, row in enumerate(counts)]
    gathered = 8 * len(xs) * (len(xs) - 1) if kind == "row" else 0
    assert [comm.bytes(i) - gathered for i in range(len(xs))] == sent


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # torch's, at its first jvp
@given(drawn(most=3))
def test_derivatives_are_those_of_lists(problem):
    """Backward, a second backward through it, and forward mode: of sums of squares."""
    counts, xs = problem
    assume(all(map(sum, counts)) and all(x.numel() for x in xs))
    n = len(xs)
    xs = [x.real.double() if x.is_complex() else x.double() for x in xs]
    weights = [torch.randn(y.shape, dtype=torch.float64) for y in exchanged(xs, counts)]

    def device(i):
        x = xs[i].clone().requires_grad_()
        y = fs.all_to_all(x, "d", counts=counts)
        (g,) = torch.autograd.grad((weights[i] * y**3).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad((g * g).sum(), x)
        _, tangent = torch.func.jvp(
            lambda x: fs.all_to_all(x, "d", counts=counts), (xs[i],), (2 * xs[i],)
        )
        return g.detach(), h, tangent

    leaves = [x.clone().requires_grad_() for x in xs]
    loss = sum((w * y**3).sum() for w, y in zip(weights, exchanged(leaves, counts), strict=True))
    gs = torch.autograd.grad(loss, leaves, create_graph=True)
    hs = torch.autograd.grad(sum((g * g).sum() for g in gs), leaves)
    for i, result in enumerate(run(n, device)):
        for x, y in zip(result, (gs[i], hs[i], 2 * exchanged(xs, counts)[i]), strict=True):
            torch.testing.assert_close(x, y.detach())


def test_vmap_and_trees_and_start():
    counts = [[1, 2], [3, 0]]
    xs = [torch.randn(5, 3, 2), torch.randn(5, 3, 2)]  # 5 samples of 3 rows
    mapped = run(2, lambda i: torch.vmap(lambda x: fs.all_to_all(x, "d", counts=counts))(xs[i]))
    tree = run(
        2,
        lambda i: fs.all_to_all.start(
            {"a": xs[i][0], "b": xs[i][1, :, 0]}, "d", counts=counts
        ).wait(),
    )
    rows = [([y[sample] for y in mapped], [x[sample] for x in xs]) for sample in range(5)]
    rows += [
        ([y["a"] for y in tree], [x[0] for x in xs]),
        ([y["b"] for y in tree], [x[1, :, 0] for x in xs]),
    ]
    for results, arguments in rows:
        assert all(map(torch.equal, results, exchanged(arguments, counts)))


def test_along_one_axis_of_two():
    def device():
        a = fs.axis_index("a")
        b = fs.axis_index("b")
        return fs.all_to_all(torch.full((2,), 10 * a + b), "b", counts=[2 - a, a] if b else [0, 2])

    results = fs.run(device, mesh=fs.make_mesh({"a": 2, "b": 2}))
    assert [y.tolist() for y in results] == [[1, 1], [0, 0], [11], [10, 10, 11]]


def test_expected_rows_on_an_abstract_mesh():
    mesh = fs.make_mesh({"d": 4}, runtime="abstract")
    with fs.ledger() as comm, fs.memory.limit() as used:
        (y,) = fs.run(
            lambda: fs.all_to_all(torch.empty(8, 5, device="meta"), "d", counts=[2, 2, 2, 2]),
            mesh=mesh,
        )
    assert y.shape == (8, 5) and comm.bytes() == 6 * 20 and used.peak() >= 8 * 20


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
    with pytest.raises(fs.errors.MismatchError, match="all_to_all"):
        run(
            2,
            lambda i: fs.all_to_all(
                torch.ones(2), "d", counts=[[1, 1], [1, 1]] if i else [[2, 0], [1, 1]]
            ),
        )
