"""Every collective means the same on every runtime: what its oracle says, to the last bit, and at
the same cost.
"""

from itertools import islice
from math import prod

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard.testing.oracles import ORACLES
from tests.helpers.processes import run_processes
from tests.helpers.sampled import THOROUGH
from tests.mesh.collectives.cases import all_cases, drawn_cases, large_cases
from tests.mesh.collectives.conformance import check_runtime

EXAMPLES = 500 if THOROUGH else 25
"""For each collective; the bar is 500."""
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


def suite(shape, cases=None, step=1, runtime="process"):
    """Try every case, or where the table is long and this is no thorough run, every so many."""
    mesh = fs.make_mesh(shape, runtime=runtime)
    cases = all_cases(mesh) if cases is None else cases
    return check_runtime(mesh, islice(cases, 0, None, 1 if THOROUGH else step))


@pytest.mark.parametrize(
    ("runtime", "shape", "step"),
    [
        ("virtual", {"a": 1}, 3),
        ("virtual", {"a": 2}, 1),
        ("virtual", {"a": 3}, 1),
        ("virtual", {"a": 6}, 3),
        ("virtual", {"a": 8}, 3),
        ("virtual", {"a": 2, "b": 3}, 3),
        ("virtual", {"a": 1, "b": 2}, 1),
        ("virtual", {"a": 2, "b": 2, "c": 2}, 5),
        ("abstract", {"a": 2}, 1),
        ("abstract", {"a": 3, "b": 2}, 3),
        ("abstract", {"a": 2, "b": 1, "c": 2}, 5),
    ],
    ids=str,
)
def test_conformance_in_one_process(runtime, shape, step):
    assert suite(shape, step=step, runtime=runtime) > 500 // step


@pytest.mark.parametrize(
    ("shape", "step"),
    [
        ({"a": 2}, 3),
        ({"a": 1, "b": 2}, 3),
        ({"a": 4}, 3),
        ({"a": 2, "b": 2}, 3),
        ({"a": 2, "b": 1, "c": 2}, 13),
    ],
    ids=str,
)
def test_conformance_on_processes(two, four, shape, step):
    pool = {2: two, 4: four}[prod(shape.values())]
    assert min(pool.run(suite, shape, step=step)) > 500 // step


@pytest.mark.parametrize("n", [2, 3, 4])
def test_conformance_of_large_tensors_between_processes(link, two, four, n):
    """Over gloo on 4 processes by recursive halving and doubling."""
    # More than 1 MiB of float32: the largest size from which a link uses another algorithm. One
    # dtype of each collective, in a thorough run too: they take long.
    cases = [*large_cases(fs.make_mesh({"a": n}), 270_001)][::3]
    if n == 3:
        counts = run_processes(suite, n, {"a": n}, cases, environment=link, timeout=300)
    else:
        counts = {2: two, 4: four}[n].run(suite, {"a": n}, cases)
    assert min(counts) > 10


SHAPES = [
    {"a": 1},
    {"a": 2},
    {"a": 3},
    {"a": 6},
    {"a": 2, "b": 3},
    {"a": 3, "b": 1},
    {"a": 2, "b": 2, "c": 2},
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(ORACLES))
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_drawn_case_on_virtual_mesh(name, data):
    mesh = fs.make_mesh(data.draw(st.sampled_from(SHAPES)))
    check_runtime(mesh, [data.draw(drawn_cases(mesh, name))])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", [{"a": 2}, {"a": 4}, {"a": 2, "b": 2}], ids=str)
@pytest.mark.parametrize("name", sorted(ORACLES))
@settings(max_examples=EXAMPLES if THOROUGH else 8, suppress_health_check=SHARED)
@given(data=st.data())
def test_drawn_case_on_processes(two, four, name, shape, data):
    pool = {2: two, 4: four}[prod(shape.values())]
    pool.run(suite, shape, [data.draw(drawn_cases(fs.make_mesh(shape), name))])


# -- the ledger ------------------------------------------------------------------------------------


def program():
    """A bit of everything, forward and backward; returns what this device sent."""
    w = torch.ones(4, 6, requires_grad=True)
    with fs.ledger() as comm:
        h = fs.pvary(w, ("a", "b")).sin()
        h = fs.psum(h, "a") + fs.all_gather(h[:2], "b", dim=0)
        h = fs.psum_scatter(
            fs.pvary({"x": h, "y": (h.bfloat16(), h)}, ("b", "a")), ("b", "a"), dim=0
        )["y"][1]
        h = fs.ppermute(fs.all_to_all(h.repeat(2, 1), "a"), "b", [(0, 1)])
        h = fs.pmax(h, "a") * fs.pmean(h, ("a", "b")) + fs.broadcast(h, "b", source=1)
        torch.autograd.grad(h.sum(), w)
    rows = (
        comm.devices[min(comm.devices)]
        if len(comm.devices) == 1
        else comm.devices[fs.axis_index(("a", "b"))]
    )
    return {
        (row.collective, row.axes, row.site.function): (entry.calls, entry.bytes)
        for row, entry in rows.items()
    }


def run_program(runtime):
    return fs.run(program, mesh=fs.make_mesh({"a": 2, "b": 2}, runtime=runtime))


def test_ledger_on_processes_equals_virtual_and_abstract(four):
    virtual, (abstract,) = run_program("virtual"), run_program("abstract")
    assert four.run(run_program, "process") == [[rows] for rows in virtual]
    assert abstract.keys() == virtual[0].keys()
    for row, (
        calls,
        sent,
    ) in abstract.items():  # of each call it counts what the busiest device sends
        busiest = max(rows[row][1] for rows in virtual)
        is_bound = row[0] in ("ppermute", "broadcast")
        assert calls == virtual[0][row][0] and (sent >= busiest if is_bound else sent == busiest)
    assert {collective for collective, _, _ in virtual[0]} == set(ORACLES) - {
        "pvary",
        "pmean",
        "pmin",
        "send_recv",
    }


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
        (lambda x: fs.ppermute(x, "a", perm=[(0, 1), (1, 2), (3, 3)]), [48, 48, 0, 0]),
        (lambda x: fs.pvary(x, "a"), [0] * 4),
        (lambda x: fs.psum(x > 0, "a"), [144] * 4),  # counted as 64-bit integers: 96 bytes
        (lambda x: fs.psum({}, "a"), [0] * 4),
        (lambda x: fs.all_gather.start((), "a").wait(), [0] * 4),
    ],
)
def test_ledger_bytes_equal_theory(collective, sent):
    with fs.ledger() as comm:
        fs.run(lambda: collective(torch.ones(4, 3)), mesh=fs.make_mesh({"a": 4}))
    assert [comm.bytes(device) for device in range(4)] == sent and comm.calls() <= 4


# -- messages --------------------------------------------------------------------------------------


def test_send_recv_chain_gradients():
    def body(dtype):
        index = fs.axis_index("a")
        n = fs.axis_size("a")
        w = torch.full((3,), 2.0, dtype=dtype, requires_grad=True)
        start = torch.ones(3, dtype=dtype, requires_grad=True)
        like = {"h": start, "mask": torch.empty(2, dtype=torch.bool)}
        h = (fs.recv(like, "a", source=index - 1)["h"] if index else start) * w
        message = {"h": h, "mask": torch.ones(2, dtype=torch.bool)}
        out = h.real.sum() if index == n - 1 else fs.send(message, "a", to=index + 1)
        return torch.autograd.grad(out, [w, start])[0]

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        gradients = fs.run(body, dtype, mesh=fs.make_mesh({"a": 4}))
        assert [g.real.tolist() for g in gradients] == [[8.0] * 3] * 4
