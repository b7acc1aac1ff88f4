"""Direct exchanges: nobody is sent what it has, on every runtime."""

from math import prod

import pytest
import torch
from hypothesis import given, settings

import fshard as fs
from fshard import P
from fshard.mesh.reshard.plan import plan
from fshard.mesh.runtimes.nccl import Nccl
from fshard.mesh.runtimes.process import ProcessWorld
from fshard.mesh.spmd.deterministic import deterministic
from tests.helpers.processes import HAS_RULES, Processes
from tests.mesh.reshard.problems import expected_shards, problems

# torch itself uses torch.jit.script in its first jvp
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)


def settled(spec):
    """Return a spec without its unreduced axes."""
    if spec.is_flat:
        return P.flat(*spec.flat_axes, at=dict(spec.at))
    return P(*spec.entries, at=dict(spec.at))


def sent(x, layout):
    with fs.ledger() as comm:
        y = fs.reshard(x, layout)
    item = x.shards[0].element_size()
    return (
        y,
        sum(comm.bytes(device) for device in range(layout.mesh.size)) / item,
        comm.bytes() / item,
    )


@pytest.mark.parametrize(
    ("shape", "before", "after", "expected"),
    [
        ((7,), P.flat("b"), P.flat("b", "a"), 2),
        ((7,), P.flat("a"), P.flat("a", "b"), 2),
        ((4, 6), P("a", "b"), P.flat("b"), 36),
        ((12, 6), P("a"), P("b", "a"), 36),
        ((7,), P.flat("b", at={"a": 0}), P.flat("b", at={"a": 1}), 7),
        ((4, 6), P(None, "b", at={"a": 1}), P("a", at={"b": 2}), 20),
        ((7,), P(at={("a", "b"): 1}), P(at={("b", "a"): 2}), 0),
        ((12, 6), P(None, "a"), P(("a", "b")), 36),
    ],
    ids=str,
)
def test_direct_exchange_sends_only_missing_elements(shape, before, after, expected):
    mesh = fs.make_mesh({"a": 2, "b": 3})
    full = torch.arange(1.0, prod(shape) + 1).reshape(shape)
    y, total, _ = sent(fs.device_put(full, fs.Layout(mesh, before)), fs.Layout(mesh, after))
    assert total == expected
    assert all(
        torch.equal(shard, piece)
        for shard, piece in zip(y.shards, expected_shards(full, y.layout), strict=True)
    )


# -- on other runtimes -----------------------------------------------------------------------------


def some_problems(count=40):
    """Draw problems that take a direct exchange, or coordinates; each in two dtypes."""
    cases = []

    @settings(max_examples=10 * count, derandomize=True, database=None)
    @given(problems([{"a": 4}, {"a": 2, "b": 2}, {"b": 2, "a": 2}]))
    def draw(problem):
        axes, shape, before, after = problem
        steps = plan(before, after, shape, tuple(axes.items()))
        is_told = any(step.kind == "direct" or step.at for step in steps) and {
            *after.unreduced
        } <= {*before.unreduced}
        if is_told and len(cases) < 2 * count:
            cases.extend((*problem, dtype) for dtype in (torch.float32, torch.bfloat16))

    draw()
    assert len(cases) == 2 * count
    return cases


def resharded(axes, shape, before, after, dtype, runtime):
    """Return the shard of each device here, and what it sent."""
    mesh = fs.make_mesh(axes, runtime=runtime)

    def piece(**place):
        seed = sum(
            index * 10**digit
            for digit, index in enumerate(place.values())
            if [*place][digit] in before.unreduced
        )
        full = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        return expected_shards(full, fs.Layout(mesh, settled(before)))[mesh.index(place)]

    x = fs.from_local(piece, fs.Layout(mesh, before), shape=shape)
    with fs.ledger() as comm:
        y = fs.reshard(x, fs.Layout(mesh, after))
    devices = range(mesh.size) if runtime == "virtual" else [torch.distributed.get_rank()]
    return {
        device: (shard, comm.bytes(device)) for device, shard in zip(devices, y.shards, strict=True)
    }


def in_processes(table, cases):
    world = ProcessWorld.of(fs.make_mesh(cases[0][0], runtime="process"))
    if table == "native":
        dist = torch.distributed
        everybody = tuple(range(dist.get_world_size()))
        world._transports[everybody] = Nccl(
            world._works, dist.group.WORLD, dist.get_rank(), len(everybody)
        )
    try:
        # Else the backend adds in an order of its own.
        with deterministic(table == "native" or HAS_RULES, "cpu"):
            return [resharded(*case, "process") for case in cases]
    finally:
        world._transports.clear()


@pytest.mark.parametrize("table", ["direct", "gloo", "native"])
def test_direct_exchange_between_processes_equals_virtual(table):
    cases = some_problems()
    with Processes(
        4, environment={"FSHARD_DIRECT": "1" if table == "direct" else "0"}, timeout=90
    ) as pool:
        reports = pool.run(in_processes, table, cases)
    for number, case in enumerate(cases):
        expected = resharded(*case, "virtual")
        for rank, report in enumerate(reports):
            ((device, (shard, count)),) = report[number].items()
            assert device == rank and count == expected[rank][1], case
            assert torch.equal(shard, expected[rank][0]), case


@given(problems())
def test_abstract_mesh_counts_bytes_of_busiest_device(problem):
    axes, shape, before, after = problem
    ways = plan(before, after, shape, tuple(axes.items()))
    counts = []
    for runtime in ("virtual", "abstract"):
        mesh = fs.make_mesh(axes, runtime=runtime)
        full = torch.ones(shape, device="cpu" if runtime == "virtual" else "meta")
        x = fs.device_put(full, fs.Layout(mesh, before))
        with fs.ledger() as comm:
            y = fs.reshard(x, fs.Layout(mesh, after))
        assert y.shards[0].shape == y.layout.local_shape(shape)
        counts.append({row[:2]: count for row, _, count in comm.rows()})
    if [step.kind for step in ways] == [
        "direct"
    ]:  # in several, another device may be the busiest each time
        assert counts[0] == counts[1]


# -- derivatives -----------------------------------------------------------------------------------

DERIVED = [
    ((7,), P.flat("b"), P.flat("b", "a")),
    ((7,), P.flat("a", unreduced="b"), P.flat("b", "a")),
    ((4, 6), P("a", "b"), P.flat("b")),
    ((4, 6), P(at={("a", "b"): 4}), P("a", "b")),
]


@pytest.mark.parametrize(("shape", "before", "after"), DERIVED, ids=str)
def test_reshard_derivatives_equal_identity(shape, before, after):
    mesh = fs.make_mesh({"a": 2, "b": 3})
    assert any(step.kind == "direct" for step in plan(before, after, shape, mesh.axes))

    def same(x):
        return fs.unshard(
            fs.reshard(fs.device_put(x, fs.Layout(mesh, before)), fs.Layout(mesh, after))
        )

    def cubed(x):
        return (same(x) ** 3).sum()

    x = torch.randn(shape, dtype=torch.float64)
    tangent = torch.randn(shape, dtype=torch.float64)
    many = torch.randn(4, *shape, dtype=torch.float64)
    assert torch.equal(torch.func.vjp(same, x)[1](tangent)[0], tangent)
    assert torch.equal(torch.func.jvp(same, (x,), (tangent,))[1], tangent)
    assert torch.equal(torch.func.vmap(same)(many), many)
    assert torch.equal(torch.func.vmap(torch.func.grad(cubed))(many), 3 * many**2)
    twice = torch.func.jvp(torch.func.grad(cubed), (x,), (tangent,))[1]
    torch.testing.assert_close(twice, 6 * x * tangent)
    with torch.autograd.forward_ad.dual_level():
        dual = same(torch.autograd.forward_ad.make_dual(x, tangent))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent)
    leaf = x.clone().requires_grad_()
    (grads,) = torch.autograd.grad(same(leaf), leaf, many, is_grads_batched=True)
    assert torch.equal(grads, many)
