"""The layouts of modes, and the sizes that they take."""

import pytest

import fshard as fs
from fshard import P

MESH = fs.make_mesh({"a": 2, "b": 3, "c": 3, "d": 3, "e": 2}, runtime="abstract")
TABLE = {  # activations, weight, bias, norm, embedding of a mode and its next
    ("1d", "b"): [
        (P(), P("b"), P("b"), P(), P("b")),
        (P(None, "b"), P(None, "b"), P(), P("b"), P(None, "b")),
    ],
    ("2d", ("b", "c")): 2 * [(P("b", "c"), P("c", "b"), P("c"), P("c"), P("b", "c"))],
    ("2.5d", ("a", "c", "d")): 2
    * [(P(("a", "c"), "d"), P("d", "c"), P("d"), P("d"), P(("a", "c"), "d"))],
    ("3d", ("b", "c", "d")): [
        (P(("b", "d"), "c"), P("d", ("c", "b")), P("d"), P("c"), P(("d", "b"), "c")),
        (P(("b", "c"), "d"), P("c", ("d", "b")), P("c"), P("d"), P(("c", "b"), "d")),
    ],
}


@pytest.mark.parametrize(("kind", "axes"), TABLE)
def test_layouts_of_a_mode_and_its_next(kind, axes):
    mode = fs.tensor.mode(kind, axes, MESH)
    for actual, expected in zip((mode, mode.next), TABLE[kind, axes], strict=True):
        assert (
            actual.activation(2),
            actual.weight,
            actual.bias,
            actual.norm,
            actual.embedding,
        ) == expected
    assert mode.next.next == mode
    assert hash(mode.next.next) == hash(mode)


@pytest.mark.parametrize(
    ("kind", "axes", "message"),
    [
        (
            "2d",
            ("a", "b"),
            'a, b of "2d" must have equal sizes; got 2 x 3. The nearest legal sizes are 2 x 2 and 3 x 3',
        ),
        ("2.5d", ("b", "a", "c"), "a, c .* got 2 x 3"),
        (
            "3d",
            ("a", "e", "c"),
            "got 2 x 2 x 3. The nearest legal sizes are 2 x 2 x 2 and 3 x 3 x 3",
        ),
        ("2d", ("a",), "\"2d\" with 2 axes, .* all different; got '2d' with a"),
        ("2d", ("a", "a"), "got '2d' with a, a"),
        ("4d", "a", "mode must be one of .* got '4d' with a"),
        ("1d", ("x",), "has no axis"),
    ],
)
def test_mesh_of_another_shape_raises(kind, axes, message):
    with pytest.raises(fs.errors.MeshError, match=message):
        fs.tensor.mode(kind, axes, MESH)


def test_one_error_names_all_sizes_that_devices_do_not_divide():
    mode = fs.tensor.mode("3d", ("b", "c", "d"), MESH)
    with pytest.raises(ValueError) as caught:
        mode.check(batch=10, hidden=5, heads=4)
    assert str(caught.value) == (
        'mode "3d" on b=3, c=3, d=3: batch must be a multiple of 9; got 10 (the nearest is 9); hidden must be a '
        "multiple of 9; got 5 (the nearest is 9); heads must be a multiple of 3; got 4 (the nearest is 3)."
    )
    mode.check(batch=9, hidden=18, heads=6)
    fs.tensor.mode("1d", "b", MESH).check(batch=1, hidden=5, heads=3)
