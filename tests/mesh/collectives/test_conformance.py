"""Every collective means the same on every runtime: what its oracle says, to the last bit, and at the same cost."""

import os
from itertools import islice

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.testing.oracles import ORACLES, total
from fshard.testing.processes import run_processes
from tests.mesh.collectives.cases import all_cases, axes_choices, large_cases
from tests.mesh.collectives.conformance import check_runtime, group_of
from tests.mesh.collectives.drawn import drawn_cases

SHAPES = st.sampled_from(
    [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 6}, {"a": 2, "b": 3}, {"a": 3, "b": 1}, {"a": 2, "b": 2, "c": 2}]
)


# -- the suite, on the three runtimes -----------------------------------------------------------------------------


THOROUGH = os.environ.get("FSHARD_EXAMPLES") == "thorough"
EXAMPLES = 500 if THOROUGH else 25
"""For each collective; the bar is 500."""
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


def suite(shape, cases=None, step=1, runtime="process"):
    """Try every case, or where the table is long and this is no thorough run, every so many."""
    mesh = fs.make_mesh(shape, runtime=runtime)
    cases = all_cases(mesh) if cases is None else cases
    return check_runtime(mesh, islice(cases, 0, None, 1 if THOROUGH else step))


@pytest.mark.parametrize(
    ("shape", "step"),
    [
        ({"a": 1}, 1),
        ({"a": 2}, 1),
        ({"a": 3}, 1),
        ({"a": 6}, 1),
        ({"a": 8}, 3),
        ({"a": 2, "b": 3}, 3),
        ({"a": 1, "b": 2}, 1),
        ({"a": 2, "b": 2, "c": 2}, 5),
    ],
    ids=str,
)
def test_conformance_on_virtual_mesh(shape, step):
    assert suite(shape, step=step, runtime="virtual") > 500 // step


@pytest.mark.parametrize("shape", [{"a": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 1, "c": 2}], ids=str)
def test_conformance_on_abstract_mesh(shape):
    assert suite(shape, runtime="abstract") > 500


@pytest.mark.parametrize(("shape", "step"), [({"a": 2}, 1), ({"a": 1, "b": 2}, 3)], ids=str)
def test_conformance_on_two_processes(two, shape, step):
    assert min(two.run(suite, shape, step=step)) > 500 // step


@pytest.mark.parametrize(
    ("shape", "step"), [({"a": 4}, 2), ({"a": 2, "b": 2}, 3), ({"a": 2, "b": 1, "c": 2}, 7)], ids=str
)
def test_conformance_on_four_processes(four, shape, step):
    assert min(four.run(suite, shape, step=step)) > 500 // step


@pytest.mark.parametrize("n", [2, 4])
def test_conformance_of_large_tensors_between_processes(two, four, n):
    cases = [*large_cases(fs.make_mesh({"a": n}), 400_001)][::3]  # in a thorough run, too: they take long
    assert min({2: two, 4: four}[n].run(suite, {"a": n}, cases)) > 10


@pytest.mark.parametrize("n", [3, 4])
def test_conformance_of_large_tensors_over_gloo(n):
    """On 4 processes by recursive halving and doubling."""
    cases = [*large_cases(fs.make_mesh({"a": n}), 400_001)][::3]
    assert min(run_processes(suite, n, {"a": n}, cases, environment={"FSHARD_DIRECT": "0"}, timeout=300)) > 10


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(ORACLES))
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_drawn_case_on_virtual_mesh(name, data):
    mesh = fs.make_mesh(data.draw(SHAPES))
    check_runtime(mesh, [data.draw(drawn_cases(mesh, name))])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(ORACLES))
@settings(max_examples=EXAMPLES, suppress_health_check=SHARED)
@given(data=st.data())
def test_drawn_case_on_two_processes(two, name, data):
    shape = {"a": 2}
    two.run(suite, shape, [data.draw(drawn_cases(fs.make_mesh(shape), name))])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(ORACLES))
@settings(max_examples=EXAMPLES, suppress_health_check=SHARED)
@given(data=st.data())
def test_drawn_case_on_four_processes(four, name, data):
    shape = data.draw(st.sampled_from([{"a": 4}, {"a": 2, "b": 2}]))
    four.run(suite, shape, [data.draw(drawn_cases(fs.make_mesh(shape), name))])


# -- the suite itself ---------------------------------------------------------------------------------------------


def test_oracle_sums_in_documented_tree():
    big, one = torch.tensor(2.0**24), torch.tensor(1.0)
    assert total([big, one, one, one]) == (big + one) + (one + one)
    assert total([one, one, big, one, one]) == ((one + one) + (big + one)) + one
    halves = [torch.tensor(1.0, dtype=torch.bfloat16)] + 255 * [torch.tensor(2.0**-9, dtype=torch.bfloat16)]
    assert total(halves).item() == 1.5  # in 16 bits one by one nothing would be added at all
    assert total([torch.tensor(200, dtype=torch.uint8)] * 2).item() == 144


def test_groups_follow_order_of_named_axes():
    mesh = fs.make_mesh({"a": 2, "b": 3})  # 0 1 2
    assert group_of(mesh, 4, ("a",)) == [1, 4]  # 3 4 5
    assert group_of(mesh, 4, ("b",)) == [3, 4, 5]
    assert group_of(mesh, 4, ("a", "b")) == [0, 1, 2, 3, 4, 5]
    assert group_of(mesh, 4, ("b", "a")) == [0, 3, 1, 4, 2, 5]
    assert len(axes_choices(fs.make_mesh({"a": 1, "b": 1, "c": 1}))) == 3 + 3 * 2 + 2


# -- the ledger ---------------------------------------------------------------------------------------------------


def program():
    """A bit of everything, forward and backward; returns what this device sent."""
    w = torch.ones(4, 6, requires_grad=True)
    with fs.ledger() as comm:
        h = fs.pvary(w, ("a", "b")).sin()
        h = fs.psum(h, "a") + fs.all_gather(h[:2], "b", dim=0)
        h = fs.psum_scatter(fs.pvary({"x": h, "y": (h.bfloat16(), h)}, ("b", "a")), ("b", "a"), dim=0)["y"][1]
        h = fs.ppermute(fs.all_to_all(h.repeat(2, 1), "a"), "b", [(0, 1)])
        h = fs.pmax(h, "a") * fs.pmean(h, ("a", "b")) + fs.broadcast(h, "b", source=1)
        torch.autograd.grad(h.sum(), w)
    own = comm.devices[min(comm.devices)] if len(comm.devices) == 1 else comm.devices[fs.axis_index(("a", "b"))]
    return {(row.collective, row.axes, row.site.function): (entry.calls, entry.bytes) for row, entry in own.items()}


def run_program(shape):
    (own,) = fs.run(program, mesh=fs.make_mesh(shape))
    return own


def test_ledger_equal_on_all_runtimes(four):
    shape = {"a": 2, "b": 2}
    virtual = fs.run(program, mesh=fs.make_mesh(shape))
    assert four.run(run_program, shape) == virtual
    (abstract,) = fs.run(program, mesh=fs.make_mesh(shape, runtime="abstract"))
    assert abstract.keys() == virtual[0].keys()
    for row, (
        calls,
        sent,
    ) in abstract.items():  # one device stands for all: of each call it counts what the busiest sends
        busiest = max(book[row][1] for book in virtual)
        assert calls == virtual[0][row][0] and (
            sent >= busiest if row[0] in ("ppermute", "broadcast") else sent == busiest
        )
    assert {collective for collective, _, _ in virtual[0]} == set(ORACLES) - {"pvary", "pmean", "pmin", "send_recv"}


@pytest.mark.parametrize(
    ("collective", "sent"),  # by a device of 4 that holds 48 bytes
    [
        (lambda x: fs.psum(x, "a"), [72] * 4),  # 2 (n-1)/n
        (lambda x: fs.pmean(x, "a"), [72] * 4),
        (lambda x: fs.pmax(x, "a"), [72] * 4),
        (lambda x: fs.pmin(x, "a"), [72] * 4),
        (lambda x: fs.psum_scatter(x, "a"), [36] * 4),  # (n-1)/n
        (lambda x: fs.all_to_all(x, "a"), [36] * 4),
        (lambda x: fs.all_gather(x, "a"), [144] * 4),  # (n-1)/n of the result's 192
        (lambda x: fs.broadcast(x, "a", source=1), [0, 48, 48, 48]),  # 1 -> 2 -> 3 -> 0
        (lambda x: fs.ppermute(x, "a", [(0, 1), (1, 2), (3, 3)]), [48, 48, 0, 0]),
        (lambda x: fs.pvary(x, "a"), [0] * 4),
        (lambda x: fs.psum(x > 0, "a"), [144] * 4),  # counted as 64-bit integers: 96 bytes
    ],
)
def test_ledger_bytes_equal_theory(collective, sent):
    with fs.ledger() as comm:
        fs.run(lambda: collective(torch.ones(4, 3)), mesh=fs.make_mesh({"a": 4}))
    assert [comm.bytes(device) for device in range(4)] == sent


def test_tree_sends_one_collective_per_dtype():
    tree = {
        "w": torch.ones(3), "b": [torch.ones(2, 2), torch.ones(())],
        "half": torch.ones(5, dtype=torch.bfloat16), "mask": torch.ones(4, dtype=torch.bool), "n": torch.ones(1).long(),
    }  # fmt: skip

    def summed():
        return fs.psum(tree, "a")

    with fs.ledger() as comm:
        results = fs.run(summed, mesh=fs.make_mesh({"a": 2}))
    assert comm.calls(0) == 3  # float32, bfloat16, and bool counted together with int64
    assert results[1]["b"][0].tolist() == [[2, 2], [2, 2]]
    assert results[1]["mask"].tolist() == [2] * 4
    assert results[1]["b"][1].shape == ()


def test_empty_tree_sends_nothing():
    with fs.ledger() as comm:
        assert fs.run(lambda: fs.psum({}, "a"), mesh=fs.make_mesh({"a": 2})) == [{}, {}]
        assert fs.run(lambda: fs.all_gather.start((), "a").wait(), mesh=fs.make_mesh({"a": 2})) == [(), ()]
    assert comm.calls() == 0


# -- asynchronous forms -------------------------------------------------------------------------------------------


def in_flight():
    """Start everything, wait in another order, differentiate; compare with the direct calls."""
    torch.manual_seed(fs.axis_index("a"))
    n = fs.axis_size("a")
    x = torch.randn(n, 2 * n, requires_grad=True)
    ring = [(place, (place + 1) % n) for place in range(n)]
    calls = [
        (fs.psum, {}), (fs.pmean, {}), (fs.pmax, {}), (fs.pmin, {}), (fs.pvary, {}),
        (fs.all_gather, {"dim": 1}), (fs.all_gather, {"to": "replicated"}), (fs.psum_scatter, {"dim": 1}),
        (fs.all_to_all, {"split_dim": 0, "concat_dim": 1}), (fs.ppermute, {"perm": ring}), (fs.broadcast, {"source": n - 1}),
    ]  # fmt: skip
    direct = [collective(x * x, "a", **options) for collective, options in calls]
    handles = [collective.start(x * x, "a", **options) for collective, options in calls]
    waited = {place: handles[place].wait() for place in (7, 0, 10, 3, 5, 1, 9, 2, 8, 6, 4)}
    assert all(handle.wait() is waited[place] for place, handle in enumerate(handles))
    weights = [torch.randn_like(y) for y in direct]
    gradients = [
        torch.autograd.grad(sum((y * w).sum() for y, w in zip(ys, weights, strict=True)), x, create_graph=True)[0]
        for ys in (direct, [waited[place] for place in range(len(calls))])
    ]
    for y, place in zip(direct, range(len(calls)), strict=True):
        assert torch.equal(y, waited[place])
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-5)
    seconds = [torch.autograd.grad((g * g).sum(), x)[0] for g in gradients]
    assert torch.allclose(*seconds, rtol=1e-4, atol=1e-4)
    return True


def run_in_flight(n):
    return fs.run(in_flight, mesh=fs.make_mesh({"a": n}))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_started_collectives_in_flight_on_virtual_mesh(n):
    assert all(run_in_flight(n))


def test_started_collectives_in_flight_between_processes(two, four):
    assert all(two.run(run_in_flight, 2))
    assert all(four.run(run_in_flight, 4))


# -- one device, and no device ------------------------------------------------------------------------------------


def alone():
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    tree = [
        fs.psum(x, "a"),
        fs.pmax(x, "a"),
        fs.all_gather(x, "a"),
        fs.psum_scatter(x, "a", dim=1),
        fs.all_to_all(x, "a"),
    ]
    tree += [fs.ppermute(x, "a", [(0, 0)]), fs.broadcast(x, "a"), fs.pvary(x, "a"), fs.pmean(x, "a")]
    gradient = torch.autograd.grad(sum(y.sum() for y in tree), x)[0]
    changed = fs.psum(x.detach(), "a")
    changed += 1  # a result is the caller's own
    return [y.detach() for y in tree], gradient, x.detach().clone()


def test_collectives_over_one_device_are_identity():
    with fs.ledger() as comm:
        ((results, gradient, x),) = fs.run(alone, mesh=fs.make_mesh({"a": 1}))
    assert all(torch.equal(y, x) for y in results)
    assert torch.equal(gradient, torch.full_like(x, 9))
    assert torch.equal(x, torch.arange(6.0).reshape(2, 3))
    assert comm.bytes() == 0


# -- errors -------------------------------------------------------------------------------------------------------


def raised(body, shape=None):
    with pytest.raises((fs.errors.FshardError, TypeError, ValueError)) as caught:
        fs.run(body, mesh=fs.make_mesh(shape or {"a": 2, "b": 3}))
    return f"{type(caught.value).__name__}: {caught.value}"


X = torch.ones(4, 5)
PERM = (
    "ValueError: fs.ppermute: perm must be (source, destination) pairs of indices in 0..{} along {}, each index at most "
    "once as source and once as destination; got {}."
)
PICTURES = [
    (
        lambda: fs.psum_scatter(X, "b", dim=1),
        "LayoutError: fs.psum_scatter: dim 1 has 5 elements, which the 3 devices along b do not divide (shape (4, 5)). "
        "Pad it to 6.",
    ),
    (
        lambda: fs.all_to_all(X, ("a", "b"), split_dim=-1),
        "LayoutError: fs.all_to_all: dim 1 has 5 elements, which the 6 devices along a+b do not divide (shape (4, 5)). "
        "Pad it to 6.",
    ),
    (
        lambda: fs.all_gather(X, "a", dim=2),
        "ValueError: fs.all_gather: dim 2 does not exist in a tensor of shape (4, 5).",
    ),
    (
        lambda: fs.all_gather(X, "a", to="all"),
        'ValueError: fs.all_gather: to must be "varying" or "replicated"; got \'all\'.',
    ),
    (
        lambda: fs.ppermute(X, "b", [(0, 2), (0, 3), (2, 1)]),
        PERM.format(2, "b", (0, 3)),
    ),
    (
        lambda: fs.ppermute(X, "b", [(0, 2), (1, 2)]),
        PERM.format(2, "b", (1, 2)),
    ),
    (
        lambda: fs.broadcast(X, "b", source=3),
        "ValueError: fs.broadcast: source must be one of the indices 0..2 along b; got 3.",
    ),
    (lambda: fs.send(X, "b", to=-1), "ValueError: fs.send: to must be one of the indices 0..2 along b; got -1."),
    (lambda: fs.recv(X, "b", source=7), "ValueError: fs.recv: source must be one of the indices 0..2 along b; got 7."),
    (
        lambda: fs.psum(X, "z"),
        'ScopeError: fs.psum over "z": the axes bound here are "a", "b". Name axes of the mesh that shard_map or run '
        "was given.",
    ),
    (
        lambda: fs.psum(X, ("a", "a")),
        'ScopeError: fs.psum over "a", "a": an axis is named twice. Name axes of the mesh that shard_map or run was given.',
    ),
    (
        lambda: fs.psum(X, ()),
        'ScopeError: fs.psum over no axis: the axes bound here are "a", "b". Name axes of the mesh that shard_map or '
        "run was given.",
    ),
    (
        lambda: fs.psum({"w": X, "n": [3, "four"]}, "a"),
        'TypeError: fs.psum takes tensors; leaf ["n"][0] is int. Write torch.tensor(...) around '
        "numbers, and x.local for the local shard of a Sharded.",
    ),
    (
        lambda: fs.pmax(2.5, "a"),
        "TypeError: fs.pmax takes tensors; the argument is float. Write torch.tensor(...) around numbers, and x.local for the "
        "local shard of a Sharded.",
    ),
    (lambda: fs.pmax(X + 1j, "a"), "TypeError: fs.pmax: complex numbers have no order. Compare x.abs()."),
    (
        lambda: fs.pmean(X.long(), "a"),
        "TypeError: fs.pmean: the mean of torch.int64 is no torch.int64. Write fs.pmean(x.float(), ...).",
    ),
    (
        lambda: fs.psum_scatter({"x": torch.ones(3), "y": torch.ones(6), "z": [torch.ones(())]}, "a"),
        'LayoutError: fs.psum_scatter: leaf ["x"]: dim 0 has 3 elements, which the 2 devices along a do not divide (shape '
        "(3,)). Pad it to 4.",
    ),
    (
        lambda: fs.all_gather({"x": torch.ones(3), "y": torch.ones(3), "z": X}, "a", dim=1),
        'ValueError: fs.all_gather: leaf ["x"]: dim 1 does not exist in a tensor of shape (3,).',
    ),
    (
        lambda: fs.pmean({"x": X.long(), "y": X.bool(), "z": X}, "a"),
        'TypeError: fs.pmean: leaf ["x"]: the mean of torch.int64 is no torch.int64. Write fs.pmean(x.float(), ...).',
    ),
    (
        lambda: fs.pmax([X + 1j, X, X + 2j], "a"),
        "TypeError: fs.pmax: leaf [0]: complex numbers have no order. Compare x.abs().",
    ),
    (
        lambda: fs.pmean(X.to(torch.float8_e5m2), "a"),
        "TypeError: fs.pmean: torch does not divide torch.float8_e5m2. Write fs.pmean(x.float(), ...).",
    ),
    (
        lambda: fs.ppermute(X, "a", [(0, 1), ("x", 1), (0, 1, 2)]),
        PERM.format(1, "a", ("x", 1)),
    ),
    (
        lambda: fs.ppermute({"x": X}, ("a", "b"), [[1, 0], (True, 2), (6, 0)]),
        PERM.format(5, "a+b", (True, 2)),
    ),
    (
        lambda: fs.ppermute(X, "a", 5),
        PERM.format(1, "a", 5),
    ),
    (lambda: fs.all_gather(X, "a", dim=True), "TypeError: fs.all_gather: a dim must be an integer; got True."),
    (
        lambda: fs.psum(X, ("a", 5)),
        'TypeError: fs.psum: An axis must be a name like "data" or a tuple of names; got 5.',
    ),
    (
        lambda: fs.all_to_all(X, "a", split_dim=(0, 1)),
        "TypeError: fs.all_to_all: a dim must be an integer; got (0, 1).",
    ),
    (lambda: fs.psum_scatter(X, "a", dim="x"), "TypeError: fs.psum_scatter: a dim must be an integer; got 'x'."),
    (
        lambda: fs.broadcast(X, "b", source="x"),
        "TypeError: fs.broadcast: source must be one of the indices 0..2 along b; got 'x'.",
    ),
    (
        lambda: fs.send({"x": 1}, "b", to=0),
        'TypeError: fs.send takes tensors; leaf ["x"] is int. Write torch.tensor(...) around numbers, and x.local for the '
        "local shard of a Sharded.",
    ),
    (
        lambda: fs.axis_index("z"),
        'ScopeError: fs.axis_index over "z": the axes bound here are "a", "b". Name axes of the mesh that shard_map or '
        "run was given.",
    ),
]


@pytest.mark.parametrize(("body", "text"), PICTURES, ids=[text[:44] for _, text in PICTURES])
def test_collective_invalid_argument_error_text(body, text):
    assert raised(body) == text


@pytest.mark.parametrize("collective", [name for name in ORACLES if name != "send_recv"])
def test_collective_outside_shard_map_raises(collective):
    options = {"perm": [(0, 0)]} if collective == "ppermute" else {}
    with pytest.raises(fs.errors.ScopeError, match=f"fs.{collective} was called outside shard_map and run") as caught:
        getattr(fs, collective)(X, "a", **options)
    assert str(caught.value).endswith("Call it in the function that you give to fs.shard_map or fs.run.")


def test_recv_other_shape_raises():
    def body():
        if fs.axis_index("a") == 0:
            fs.send(torch.ones(2), "a", to=1)
        else:
            fs.recv(torch.empty(3), "a", source=0)

    with pytest.raises(fs.errors.MismatchError, match=r"expects recv of f32\[3\].*received f32\[2\] sent by device"):
        fs.run(body, mesh=fs.make_mesh({"a": 2}))


# -- messages -----------------------------------------------------------------------------------------------------


def test_send_recv_chain_gradients():
    def body(dtype):
        place, n = fs.axis_index("a"), fs.axis_size("a")
        w = torch.full((3,), 2.0, dtype=dtype, requires_grad=True)
        start = torch.ones(3, dtype=dtype, requires_grad=True)
        like = {"h": start, "mask": torch.empty(2, dtype=torch.bool)}
        h = (fs.recv(like, "a", source=place - 1)["h"] if place else start) * w
        last = place == n - 1
        out = h.real.sum() if last else fs.send({"h": h, "mask": torch.ones(2, dtype=torch.bool)}, "a", to=place + 1)
        return torch.autograd.grad(out, [w, start])[0]

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        gradients = fs.run(body, dtype, mesh=fs.make_mesh({"a": 4}))
        assert [g.real.tolist() for g in gradients] == [[8.0] * 3] * 4


def test_send_under_vmap_raises():
    def body():
        fs.send(torch.ones(2), "a", to=1 - fs.axis_index("a"))
        return torch.func.vmap(lambda x: fs.recv(x, "a", source=1 - fs.axis_index("a")))(torch.ones(3, 2))

    assert raised(body, {"a": 2}) == (
        "LayoutError: fs.send and fs.recv cannot be mapped by vmap (nor by jacrev, jacfwd and hessian, which do it): the "
        "device at the other end expects one message. Map inside the stages, or use fs.ppermute, which can be mapped."
    )


def test_spec_example_of_docs_holds():
    mesh = fs.make_mesh({"data": 4, "model": 2})
    torch.manual_seed(0)
    x, w = torch.randn(8, 6), torch.randn(6, 4)
    matmul = fs.shard_map(
        lambda a, b: fs.psum(a @ b, "model"),
        mesh=mesh,
        in_specs=(P("data", "model"), P("model", None)),
        out_specs=P("data", None),
    )
    torch.testing.assert_close(fs.unshard(matmul(x, w)), x @ w)
