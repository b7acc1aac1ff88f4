"""The layouts that an operation chooses: the fewest bytes, and the layout of the larger input where
bytes are equal.

The oracle reshards the inputs of an operation by hand to all layouts that suggest themselves, and
counts the bytes of those after which the operation needs no communication.
"""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.errors import LayoutError
from tests.array.oracle import put

F64 = torch.float64
MESH = fs.make_mesh({"data": 2, "model": 2})
AXES = ("data", "model")


def draw_tensor(*shape):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(sum(shape)))


def bytes_of(f):
    with fs.ledger() as comm:
        result = f()
    return comm.bytes(), result


# Flat layouts, those of parameters in ZeRO-3.

WITH_A_SUM = {
    "x * s": lambda x, s: x * s,
    "s * x": lambda x, s: s * x,
    "x + s * x": lambda x, s: x + s * x,
    "x / s.sqrt()": lambda x, s: x / s.sqrt(),
    "s - x": lambda x, s: s - x,
    "where": lambda x, s: torch.where(x > s, x, s),
    "addcmul": lambda x, s: torch.addcmul(x, x, s),
    "lerp": lambda x, s: x.lerp(2 * x, s),
    "in place": lambda x, s: x.clone().mul_(s),
    "s of one dim": lambda x, s: x * s.reshape(1),
}


@pytest.mark.parametrize("shape", [(8, 8), (7, 5), (13,), (3, 3, 3)], ids=str)
@pytest.mark.parametrize("name", WITH_A_SUM)
def test_flat_array_with_a_sum_keeps_its_layout(name, shape):
    f = WITH_A_SUM[name]
    x = draw_tensor(*shape)
    for spec in (P.flat("data"), P.flat("model"), P.flat("data", "model")):
        array = put(x, MESH, spec).requires_grad_()
        total = (array * array).sum()
        assert total.spec.unreduced
        sent, y = bytes_of(lambda array=array, total=total: f(array, total))
        plain = x.clone().requires_grad_()
        expected = f(plain, (plain * plain).sum())

        assert y.spec == spec
        assert sent <= 2 * 8
        torch.testing.assert_close(fs.unshard(y.detach()), expected.detach())

        y.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(fs.unshard(array.grad), plain.grad)


@pytest.mark.parametrize("other", [P(), P("data"), P("model", "data")], ids=str)
def test_flat_array_with_another_layout_sends_the_fewest_bytes(other):
    x = draw_tensor(8, 4)
    y = draw_tensor(4, 8).T.contiguous()
    array = put(x, MESH, P.flat("data"))
    second = put(y, MESH, other)
    sent, result = bytes_of(lambda: array * second)
    alternatives = [
        bytes_of(lambda spec=spec: [fs.reshard(z, fs.Layout(MESH, spec)) for z in (array, second)])[
            0
        ]
        for spec in (P.flat("data"), other)
    ]
    assert sent <= min(alternatives)
    torch.testing.assert_close(fs.unshard(result), x * y)


def test_flat_array_of_one_element_keeps_its_layout():
    x = put(torch.ones(1, dtype=F64), MESH, P.flat("data"))
    sent, y = bytes_of(lambda: x * 2 + x)
    assert (sent, y.spec) == (0, x.spec)


# The rule, on drawn expressions.

EQUATIONS = {
    "add": ("ab", "ab"),
    "mul": ("ab", "ab"),
    "maximum": ("ab", "ab"),
    "add a row": ("ab", "b"),
    "mul by a number": ("ab", ""),
    "matmul": ("ab", "bc"),
    "sum of rows": ("ab",),
    "relu": ("ab",),
}
FUNCTIONS = {
    "add": torch.add,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "add a row": torch.add,
    "mul by a number": torch.mul,
    "matmul": torch.matmul,
    "sum of rows": lambda x: x.sum(0),
    "relu": torch.relu,
}


def spec_with(dims, places):
    """Return the spec of an array whose axes are at these dims, or unreduced."""
    entries = [tuple(axis for axis in AXES if places[axis] == dim) for dim in dims]
    unreduced = tuple(axis for axis in AXES if places[axis] == "unreduced")
    return P(*entries, unreduced=unreduced)


@st.composite
def programs(draw):
    """Draw an operation, and a layout for each of its inputs."""
    name = draw(st.sampled_from(sorted(EQUATIONS)))
    lengths = {letter: draw(st.sampled_from([4, 8, 12])) for letter in "abc"}
    terms = EQUATIONS[name]
    specs = []
    shapes = []
    for term in terms:
        places = {axis: draw(st.sampled_from([*term, "unreduced", None])) for axis in AXES}
        specs.append(spec_with(term, places))
        shapes.append(tuple(lengths[letter] for letter in term))
    return name, shapes, specs


def ways_of(axis, terms, specs):
    """Return the letters that an axis shards in an input, and every set of inputs in which it is
    unreduced.
    """
    letters = set()
    may_be_unreduced = []
    for term, spec in zip(terms, specs, strict=True):
        letters |= {
            letter for letter, axes in zip(term, spec.dims(len(term)), strict=True) if axis in axes
        }
        may_be_unreduced.append([False, True] if axis in spec.unreduced else [False])
    return [*sorted(letters), *product(*may_be_unreduced)]


def alternatives_of(terms, specs):
    """Yield the specs of all inputs: each axis shards one letter, or is unreduced in some inputs,
    or in none.
    """
    for choice in product(*(ways_of(axis, terms, specs) for axis in AXES)):
        ways = dict(zip(AXES, choice, strict=True))
        chosen = []
        for number, term in enumerate(terms):
            places = {}
            for axis, way in ways.items():
                if isinstance(way, str):
                    places[axis] = way if way in term else None
                else:
                    places[axis] = "unreduced" if way[number] else None
            chosen.append(spec_with(term, places))
        yield chosen


@settings(max_examples=40, deadline=None)
@given(programs())
def test_drawn_operation_sends_no_more_bytes_than_any_alternative(program):
    name, shapes, specs = program
    f = FUNCTIONS[name]
    tensors = [draw_tensor(*shape) for shape in shapes]
    arrays = [put(x, MESH, spec) for x, spec in zip(tensors, specs, strict=True)]
    sent, result = bytes_of(lambda: f(*arrays))

    for chosen in alternatives_of(EQUATIONS[name], specs):
        layouts = [fs.Layout(MESH, spec) for spec in chosen]
        by_hand, moved = bytes_of(
            lambda layouts=layouts: [
                fs.reshard(x, layout) for x, layout in zip(arrays, layouts, strict=True)
            ]
        )
        try:
            with fs.array.explicit():
                f(*moved)
        except LayoutError:
            continue  # it needs more communication
        assert sent <= by_hand, (chosen, by_hand)

    final = fs.reshard(result, fs.Layout(MESH, result.spec.replace(unreduced=None)))
    torch.testing.assert_close(fs.unshard(final), f(*tensors))


@given(programs(), st.sampled_from(AXES))
def test_explicit_along_an_axis_raises_where_bytes_are_sent_along_it(program, axis):
    """The oracle is the ledger of the operation without `explicit`."""
    name, shapes, specs = program
    function = FUNCTIONS[name]
    arrays = [
        put(draw_tensor(*shape), MESH, spec) for shape, spec in zip(shapes, specs, strict=True)
    ]
    with fs.ledger() as comm:
        result = function(*arrays)
    used = set()
    for rows in comm.devices.values():
        for row, entry in rows.items():
            if entry.bytes:
                used.update(row.axes)

    arrays = [
        put(draw_tensor(*shape), MESH, spec) for shape, spec in zip(shapes, specs, strict=True)
    ]
    with fs.array.explicit(axis):
        if axis in used:
            with pytest.raises(LayoutError, match=f'explicit."{axis}". forbids'):
                function(*arrays)
        else:
            assert function(*arrays).spec == result.spec


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "model"), P.flat("data")], ids=str)
def test_array_with_a_sum_keeps_its_layout(spec):
    x = put(draw_tensor(8, 4), MESH, spec)
    for other in (P("data"), P("model"), P(("data", "model"))):
        total = put(draw_tensor(4), MESH, other).sum()
        for result in (total * x, x * total, x.lerp(2 * x, total), torch.where(x > 0, x, total)):
            assert result.spec == spec


def test_result_has_the_layout_of_the_first_of_equal_inputs():
    first = P("data")
    second = P(None, "data")
    x, y = (put(draw_tensor(8, 4), MESH, spec) for spec in (first, second))
    assert (x + y).spec == first
    assert (y + x).spec == second


def test_sum_and_larger_sum_stay_unreduced_together():
    x = put(draw_tensor(8, 4), MESH, P(unreduced="data"))
    row = put(draw_tensor(4), MESH, P(unreduced="data"))
    sent, y = bytes_of(lambda: x + row)
    assert (sent, y.spec) == (0, x.spec)
