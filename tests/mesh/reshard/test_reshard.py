"""Reshard: from any layout to any layout, by the fewest bytes."""

import itertools
import time
from fractions import Fraction
from math import prod

import pytest
import torch
from hypothesis import example, given

import fshard as fs
from fshard import P
from fshard.mesh.reshard.plan import plan
from tests.mesh.reshard.problems import expected_shards, problems


@given(problems())
@example(({"a": 2, "b": 2, "c": 2}, (3, 3), P(at={("b", "c"): 3}, unreduced="a"), P()))
@example(({"a": 2, "b": 2, "c": 2}, (2,), P(unreduced=("a", "c")), P("a", at={"c": 0})))
def test_reshard_any_layout_to_any_layout(problem):
    """Values, bytes that are at most those of the plan, and gradients, which are those of the
    identity.
    """
    axes, shape, before, after = problem
    mesh = fs.make_mesh(axes)
    full = torch.arange(1.0, prod(shape) + 1).reshape(shape)
    x = fs.device_put(full, fs.Layout(mesh, before))
    for shard, expected in zip(x.shards, expected_shards(full, x.layout), strict=True):
        assert torch.equal(shard, expected)
    with fs.ledger() as comm:
        y = fs.reshard(x, fs.Layout(mesh, after))
    assert [shard.shape for shard in y.shards] == [
        y.layout.local_shape(shape, d) for d in range(mesh.size)
    ]
    assert torch.equal(fs.unshard(y), full)
    if not after.unreduced:
        for shard, expected in zip(y.shards, expected_shards(full, y.layout), strict=True):
            assert torch.equal(shard, expected)

    planned = (
        sum((step.elements for step in plan(before, after, shape, mesh.axes)), Fraction(0)) * 4
    )
    sent = sum(comm.bytes(device) for device in range(mesh.size))
    assert (
        sent <= planned * mesh.size and comm.bytes() <= planned
    )  # a device that keeps its shard sends less
    through_full = [plan(before, P(), shape, mesh.axes), plan(P(), after, shape, mesh.axes)]
    padding = 8 * mesh.size  # of uneven ranges
    assert (
        planned
        <= 4 * sum((step.elements for steps in through_full for step in steps), Fraction(0))
        + padding
    )

    full.requires_grad_()
    weight = torch.arange(prod(shape), 0.0, -1).reshape(shape)
    y = fs.reshard(fs.device_put(full, fs.Layout(mesh, before)), fs.Layout(mesh, after))
    (gradient,) = torch.autograd.grad((fs.unshard(y) * weight).sum(), full)
    assert torch.equal(gradient, weight)


def kinds(before, after, shape, mesh):
    return [(step.kind, step.axes) for step in plan(before, after, shape, tuple(mesh.items()))]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (P(), P("a"), [("slice", ("a",))]),
        (P("a"), P(), [("all_gather", ("a",))]),
        (P(("a", "b")), P(), [("all_gather", ("a", "b"))]),
        (P(("a", "b")), P("a"), [("all_gather", ("b",))]),
        (P("a"), P(None, "a"), [("all_to_all", ("a",))]),
        (P("a", "b"), P(None, ("b", "a")), [("all_to_all", ("a",))]),
        (P(("a", "b")), P(("b", "a")), [("direct", ("a", "b"))]),
        (P(unreduced=("a", "b")), P(), [("psum", ("a", "b"))]),
        (P(unreduced="a"), P("a"), [("psum_scatter", ("a",))]),
        (P(unreduced="a"), P("a", "b"), [("slice", ("b",)), ("psum_scatter", ("a",))]),
        (P(unreduced=("a", "b")), P(("a", "b")), [("psum_scatter", ("a", "b"))]),
        (P(unreduced="a"), P("b"), [("slice", ("b",)), ("psum", ("a",))]),
        (P(("a", "b")), P.flat("a", "b"), [("reshape", ("a", "b"))]),
        (P(None, "a"), P.flat("a"), [("direct", ("a",))]),
        (P("a"), P("b"), [("direct", ("a", "b"))]),
        (P(unreduced=("a", "b")), P.flat("b"), [("flat_scatter", ("b",)), ("psum", ("a",))]),
        (P(unreduced="a"), P(at={"a": 1}), [("flat_scatter", ("a",)), ("direct", ("a",))]),
        (P(at={"a": 1}), P(), [("direct", ("a",)), ("flat_gather", ("a",))]),
        (P.flat("a"), P(), [("flat_gather", ("a",))]),
    ],
)
def test_plan_steps_for_known_layouts(before, after, expected):
    steps = kinds(before, after, (16, 16), {"a": 4, "b": 2})
    assert [step for step in steps if step[0] != "reshape"] == [
        step for step in expected if step[0] != "reshape"
    ]


def test_reshard_uneven_flat_shards_pads():
    assert kinds(P(unreduced="a"), P.flat("a"), (5, 3), {"a": 4}) == [("flat_scatter", ("a",))]
    assert kinds(P.flat("a"), P(), (5, 3), {"a": 4}) == [("flat_gather", ("a",))]
    mesh = fs.make_mesh({"a": 4})
    x = fs.device_put(torch.arange(5.0), fs.Layout(mesh, P.flat("a")))
    assert [shard.tolist() for shard in x.shards] == [[0.0, 1.0], [2.0, 3.0], [4.0], []]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (P(("a", "b"), ("c", "d")), P(("a", "b"))),
        (P(("a", "b"), ("c", "d")), P()),
        (P(("a", "b"), ("c", "d")), P(("c", "d"), ("a", "b"))),
        (P(("a", "b")), P(("c", "d"))),
        (P.flat("a", "b"), P.flat("d", "c")),
        (P(("a", "b", "c"), "d"), P()),
        (P.flat("a", "b"), P.flat("b", "c", "a")),
        (P.flat("a", unreduced="b"), P.flat("b", "c", "a")),
        (P("a", "b"), P.flat("d", "b")),
        (P(at={("a", "b"): 3}), P("c", "a")),
        (P("a", at={"d": 1}), P.flat("b", "c")),
        (P("a", unreduced="b", at={"d": 1}), P("c", at={"d": 0})),
    ],
    ids=str,
)
def test_reshard_plan_time_independent_of_mesh_size(before, after):
    def cost(each):
        mesh = fs.make_mesh(dict.fromkeys("abcd", each), runtime="abstract")
        shape = (65521, 65537) if before.is_flat else (65536, 65536)
        piece = torch.empty(
            fs.Layout(mesh, before).local_shape(shape), device="meta", requires_grad=True
        )
        x = fs.from_local(piece, fs.Layout(mesh, before), shape=shape)
        began = time.process_time()
        with fs.ledger() as comm:
            y = fs.reshard(x, fs.Layout(mesh, after))
            full = fs.unshard(y)
            torch.autograd.grad(full, piece, torch.empty_like(full))
        assert y.shards[0].shape == y.layout.local_shape(shape)
        assert comm.bytes() > 0
        return time.process_time() - began

    cost(2)
    small = cost(4)
    large = cost(16)
    assert (
        large < 3 * small + 0.3
    )  # to pair 65,536 devices takes as long for each step that is weighed


def test_device_put_error_names_all_leaves():
    mesh = fs.make_mesh({"a": 4, "b": 2})
    tree = {"w": torch.zeros(6, 3), "b": torch.zeros(8), "s": torch.zeros(())}
    with pytest.raises(fs.errors.LayoutError) as error:
        fs.device_put(tree, fs.Layout(mesh, P("a", "b")))
    text = str(error.value)
    assert all(f"  {path}: " in text for path in "ws") and '["' not in text
    assert "dim 0 has 6 elements, which 4 devices (a) do not divide" in text
    assert "dim 1 has 3 elements, which 2 devices (b) do not divide" in text


def test_reshard_from_host_memory():
    mesh = fs.make_mesh({"a": 2})
    x = fs.device_put(torch.ones(4), fs.Layout(mesh, P("a"), "host"))
    assert str(fs.typeof(x)) == "f32[4@a]{host}"
    assert str(fs.typeof(fs.reshard(x, fs.Layout(mesh, P("a"))))) == "f32[4@a]"


def test_reshard_to_a_mesh_of_another_runtime_raises():
    x = fs.device_put(torch.ones(4), fs.Layout(fs.make_mesh({"a": 2}), P("a")))
    abstract = fs.make_mesh({"a": 4}, runtime="abstract")
    with pytest.raises(fs.errors.LayoutError, match="cannot be resharded to"):
        fs.reshard(x, fs.Layout(abstract, P("a")))


@pytest.mark.parametrize("axes", [{"a": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (6,), (4, 6)], ids=str)
def test_reshard_axis_of_one_device_sends_nothing(shape, axes):
    mesh = fs.make_mesh(axes)
    names = tuple(axes)
    specs = [P(), P(unreduced="a"), P.flat("a"), P.flat(*names), P.flat(*reversed(names))]
    specs += [P(name) for name in names if shape and shape[0] % axes[name] == 0]
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    for before, after in itertools.product(specs, specs):
        y = fs.device_put(x, fs.Layout(mesh, before))
        with fs.ledger() as comm:
            z = fs.reshard(y, fs.Layout(mesh, after))
        assert torch.equal(fs.unshard(z), x)
        assert [tuple(shard.shape) for shard in z.shards] == [
            z.layout.local_shape(shape, d) for d in range(mesh.size)
        ]
        assert all("a" not in axes or mesh.shape["a"] > 1 for _, axes in comm.by_collective())
        assert mesh.size > 1 or not comm.calls()
