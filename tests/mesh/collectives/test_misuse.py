"""Wrong calls of collectives: each raises one error, which names the argument and the fix.

A row of a table is a call on the mesh a=2, b=3, and a text that the error contains.
"""

import inspect
import pydoc

import pytest
import torch

import fshard as fs
from fshard.testing.oracles import ORACLES

X = torch.ones(4, 5)
SCOPE = 'the axes bound here are "a", "b". Name axes of the mesh that shard_map or run was given.'
PERM = (
    "ValueError: fs.ppermute: perm must be (source, destination) pairs of indices in 0..2 along b, "
)
COUNTS = (
    "ValueError: fs.all_to_all: counts must be 2 numbers of rows, or 2 x 2, "
    "for the 2 devices along a"
)
DIMS = [
    (
        lambda: fs.psum_scatter(X, "b", dim=1),
        "LayoutError: fs.psum_scatter: dim 1 has 5 elements, which the 3 devices",
    ),
    (lambda: fs.psum_scatter(X, "b", dim=1), "along b do not divide (shape (4, 5)). Pad it to 6."),
    (
        lambda: fs.all_to_all(X, ("a", "b"), split_dim=-1),
        "the 6 devices along a+b do not divide (shape (4, 5))",
    ),
    (
        lambda: fs.psum_scatter({"x": X, "y": [torch.ones(3)]}, "a"),
        "LayoutError: fs.psum_scatter: leaf y[0]: dim",
    ),
    (
        lambda: fs.all_gather(X, "a", dim=2),
        "ValueError: fs.all_gather: dim 2 does not exist in a tensor of shape",
    ),
    (
        lambda: fs.all_gather({"x": torch.ones(3)}, "a", dim=1),
        "fs.all_gather: leaf x: dim 1 does not exist",
    ),
    (
        lambda: fs.all_gather(X, "a", to="all"),
        'fs.all_gather: to must be "varying" or "replicated"; got',
    ),
    (
        lambda: fs.all_gather(X, "a", dim=True),
        "TypeError: fs.all_gather: a dim must be an integer; got True.",
    ),
    (
        lambda: fs.all_to_all(X, "a", split_dim=(0, 1)),
        "TypeError: fs.all_to_all: a dim must be an integer; got (0",
    ),
    (
        lambda: fs.psum_scatter(X, "a", dim="x"),
        "TypeError: fs.psum_scatter: a dim must be an integer; got 'x'.",
    ),
]

DEVICES = [
    (lambda: fs.ppermute(X, "b", [(0, 2), (0, 3), (2, 1)]), PERM),
    (
        lambda: fs.ppermute(X, "b", [(0, 2), (1, 2)]),
        "at most once as source and once as destination; got (1, 2).",
    ),
    (lambda: fs.ppermute(X, "a", [(0, 1), ("x", 1), (0, 1, 2)]), "got ('x', 1)."),
    (lambda: fs.ppermute({"x": X}, ("a", "b"), [[1, 0], (True, 2), (6, 0)]), "got (True, 2)."),
    (lambda: fs.ppermute(X, "a", 5), "got 5."),
    (
        lambda: fs.broadcast(X, "b", source=3),
        "ValueError: fs.broadcast: source must be one of the indices",
    ),
    (
        lambda: fs.broadcast(X, "b", source="x"),
        "TypeError: fs.broadcast: source must be one of the indices",
    ),
    (
        lambda: fs.send(X, "b", to=-1),
        "ValueError: fs.send: to must be one of the indices 0..2 along b; got -1.",
    ),
    (
        lambda: fs.recv(X, "b", source=7),
        "ValueError: fs.recv: source must be one of the indices 0..2 along b; got 7.",
    ),
]

AXES = [
    (lambda: fs.psum(X, "z"), f'ScopeError: fs.psum over "z": {SCOPE}'),
    (lambda: fs.axis_index("z"), f'ScopeError: fs.axis_index over "z": {SCOPE}'),
    (lambda: fs.psum(X, ()), f"ScopeError: fs.psum over no axis: {SCOPE}"),
    (lambda: fs.psum(X, ("a", "a")), 'ScopeError: fs.psum over "a", "a": an axis is named twice.'),
    (
        lambda: fs.psum(X, ("a", 5)),
        'TypeError: fs.psum: An axis must be a name like "data" or a tuple of names; got 5',
    ),
]

TYPES = [
    (
        lambda: fs.psum({"w": X, "n": [3, "four"]}, "a"),
        "TypeError: fs.psum takes tensors; leaf n[0] is int.",
    ),
    (lambda: fs.send({"x": 1}, "b", to=0), "TypeError: fs.send takes tensors; leaf x is int."),
    (lambda: fs.pmax(2.5, "a"), "TypeError: fs.pmax takes tensors; the argument is float."),
    (
        lambda: fs.pmax(X + 1j, "a"),
        "TypeError: fs.pmax: complex numbers have no order. Compare x.abs().",
    ),
    (
        lambda: fs.pmax([X, X + 2j], "a"),
        "TypeError: fs.pmax: leaf [1]: complex numbers have no order.",
    ),
    (
        lambda: fs.pmean(X.long(), "a"),
        "TypeError: fs.pmean: the mean of torch.int64 is no torch.int64. Write",
    ),
    (
        lambda: fs.pmean({"x": X, "y": X.bool()}, "a"),
        "fs.pmean: leaf y: the mean of torch.bool",
    ),
    (
        lambda: fs.pmean(X.to(torch.float8_e5m2), "a"),
        "TypeError: fs.pmean: torch does not divide torch.float8_e5m2.",
    ),
]

COUNTS_OF_ROWS = [
    (lambda: fs.all_to_all(X, "a", counts=[1, 2, 3]), COUNTS),
    (lambda: fs.all_to_all(X, "a", counts=[1.0, 2.0]), COUNTS),
    (lambda: fs.all_to_all(X, "a", counts=[5, -1]), COUNTS),
    (lambda: fs.all_to_all(X, "a", counts=[1, 1]), "are of 2 rows; got a tensor of shape (4, 5)"),
    (
        lambda: fs.all_to_all(X, "a", counts=[1, 3], split_dim=1),
        "counts are of rows, of dim 0; got split_dim=1",
    ),
    (
        lambda: torch.vmap(lambda x: fs.recv(x, "a", source=0))(X),
        "fs.send and fs.recv cannot be mapped by vmap",
    ),
]

SIGNATURES = [
    (
        lambda: fs.all_to_all(X, "a", 0, 0),
        "(tree, axis, split_dim, concat_dim, counts): too many positional arguments",
    ),
    (
        lambda: fs.psum_scatter(X, "a", 0),
        "fs.psum_scatter(tree, axis, dim): too many positional arguments",
    ),
    (
        lambda: fs.psum(X, axis_name="a"),
        "missing a required argument: 'axis'. The mesh axis is `axis`.",
    ),
    (
        lambda: fs.all_gather(X, "a", axis=0),
        "for argument 'axis'. The mesh axis is `axis`, a tensor dim is `dim`.",
    ),
    (lambda: fs.all_gather(X, "a", tiled=True), "Results are always tiled"),
    (lambda: fs.psum_scatter(X, "a", scatter_dimension=0), "The tensor dim is `dim`"),
    (
        lambda: fs.all_to_all(X, "a", split_axis=0, concat_axis=0),
        "is `split_dim`. The tensor dim to concatenate along",
    ),
    (
        lambda: fs.ppermute(X, "a", pairs=[(0, 1)]),
        "(tree, axis, perm): missing a required argument: 'perm'.",
    ),
    (lambda: fs.broadcast.start(X, "a", src=0), "The device that sends is `source`"),
    (lambda: fs.psum(X, "a", nonsense=1), "unexpected keyword argument 'nonsense'."),
]
WRONG = [*DIMS, *DEVICES, *AXES, *TYPES, *COUNTS_OF_ROWS, *SIGNATURES]


@pytest.mark.parametrize(("call", "text"), WRONG, ids=[text[:44] for _, text in WRONG])
def test_wrong_call_raises_and_names_the_argument(call, text):
    mesh = fs.make_mesh({"a": 2, "b": 3})

    with pytest.raises((fs.errors.FshardError, TypeError, ValueError)) as error:
        fs.run(call, mesh=mesh)

    assert text in f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize("name", [name for name in ORACLES if name != "send_recv"])
def test_collective_outside_shard_map_raises(name):
    collective = getattr(fs, name)
    options = {"perm": [(0, 0)]} if name == "ppermute" else {}

    message = f"fs.{name} was called outside shard_map and run"
    with pytest.raises(fs.errors.ScopeError, match=message):
        collective(X, "a", **options)


@pytest.mark.parametrize("function", [fs.psum, fs.all_gather, fs.ppermute, fs.send])
def test_help_shows_the_signature(function):
    names = list(inspect.signature(function).parameters)

    text = pydoc.render_doc(function, renderer=pydoc.plaintext)

    signature = text.splitlines()[2]
    assert inspect.isfunction(function)
    assert all(name in signature for name in names), text
    assert "wait" not in names
    assert "Handle" in str(inspect.signature(function.start))
