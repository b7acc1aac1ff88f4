"""Wrong calls of `shard_map`, `run` and the functions that make arrays raise one error.

A row of a table is the call, and texts that the error contains: the first one begins it. They name
the error's type, the argument and the fix.
"""

from typing import Any

import numpy as np
import pytest
import torch

import fshard as fs
from fshard import P

UNTYPED: Any = fs
MESH = fs.make_mesh({"data": 2, "model": 2})
LINE = fs.make_mesh({"data": 2})
DATA = P("data")
X = torch.arange(4.0)
LEAF = torch.ones(4, requires_grad=True)
LAYOUT = fs.Layout(MESH, DATA)
ARRAY = fs.device_put(X, fs.Layout(LINE, DATA))
MIXED = fs.Sharded((4,), LAYOUT, (*[torch.ones(2)] * 2, *[torch.ones(2, dtype=torch.int64)] * 2))
NUMBERS = fs.Sharded((4,), LAYOUT, (2.0,) * 4)


def call(f, *args, mesh=MESH, in_specs=DATA, out_specs=DATA, **options):
    """Map `f` over a mesh with specs that are right for one vector, and call it."""
    mapped = fs.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
    return mapped(*args)


def same(*args):
    return args if len(args) > 1 else args[0]


def differ(first, second):
    """Call `first` on half of the devices, and `second` on the others."""

    def main(x):
        if fs.axis_index("data"):
            return second(x)
        return first(x)

    return call(main, X)


def never_runs(a, b, c):
    raise AssertionError("the function ran")


def inner_sharded(x):
    specs = {"in_specs": P(None, "model"), "out_specs": P(None, "model")}
    return {"y": fs.shard_map(same, mesh=MESH["model"], **specs)(x), "n": 1}


def psum_over_both(x):
    return call(
        lambda x: fs.psum(x.sum(), ("data", "model")),
        x,
        mesh=MESH["model"],
        in_specs=P("model"),
        out_specs=P(),
    )


def unequal_shards():
    x = fs.from_local(lambda data, model: torch.zeros(1), fs.Layout(MESH, P()))
    for device in (1, 3):
        x.shards[device].add_(1)  # from_local compares its shards
    call(lambda weight: weight * 2, x, in_specs=P(), out_specs=P(), check=True)


def unequal_in_run():
    double = fs.shard_map(lambda x: 2 * x, mesh=LINE, in_specs=P(), out_specs=P(), check=True)

    # Outside of a run, one tensor is passed to all devices.
    assert fs.unshard(double(torch.ones(2))).tolist() == [2, 2]

    def main():
        index = fs.axis_index("data")
        double(torch.full((2,), float(index)))

    fs.run(main, mesh=LINE)


def captured(use):
    """Differentiate a mapped function that uses a tensor from outside of it."""

    def loss(x):
        mapped = call(lambda y: y + use(x).sum(), x, mesh=LINE)
        return fs.unshard(mapped).sum()

    torch.func.grad(loss)(torch.ones(4, 4))


def gradient(batch):
    return fs.value_and_grad(lambda w, x: (w * x).mean(), mesh=LINE, batch=batch)


def axes_that_do_not_exist():
    sizes = [torch.ones(2), torch.ones(3), torch.ones(2)]
    in_specs = (P("dta"), DATA, P("modl"))
    out_specs = (P("x"), {"b": P("data", "y")})
    call(never_runs, *sizes, in_specs=in_specs, out_specs=out_specs)


def indivisible_arguments():
    in_specs = (DATA, P(None, "model"), DATA)
    call(same, torch.ones(3), torch.ones(2, 5), X, in_specs=in_specs)


def another_mesh_inside():
    mesh = fs.make_mesh({"x": 4})

    def main(x):
        return call(same, x, mesh=mesh, in_specs=P("x"), out_specs=P("x")).local

    call(main, X)


def shards_of_two_shapes():
    fs.from_local(lambda data, model: torch.ones(2 - data), LAYOUT)


def shards_of_two_dtypes():
    dtypes = [torch.int32, torch.float32]
    fs.from_local(lambda data, model: torch.ones(2, dtype=dtypes[data]), LAYOUT)


def results_of_two_lengths():
    differ(lambda x: {"a": x}, lambda x: {"a": x, "b": x})


def one_result_is_none():
    differ(lambda x: (x, x), lambda x: (x, None))


def copied(x):
    return torch.zeros(4, 4).copy_(x)


HERE = {"mesh": MESH, "in_specs": P(), "out_specs": P()}
TYPES = {
    "a number for a mesh": (
        lambda: fs.shard_map(abs, **{**HERE, "mesh": 4}),
        "TypeError: shard_map: mesh must be a",
    ),
    "a number for f": (
        lambda: fs.shard_map(4, **HERE),
        "TypeError: shard_map: f must be a function",
    ),
    "run without a mesh": (
        lambda: fs.run(abs, mesh=None),
        "TypeError: fs.run: mesh must be a Mesh",
    ),
    "run a string": (
        lambda: fs.run("main", mesh=MESH),
        "TypeError: fs.run: main must be a function",
    ),
    "a spec for a layout": (
        lambda: fs.from_local(X, DATA),
        "TypeError: from_local: layout must have a mesh; got P(",
    ),
    "to_dtensor": (
        lambda: fs.mesh.to_dtensor(X),
        "TypeError: to_dtensor: x must be a Sharded; got Tensor.",
    ),
    "from_dtensor": (
        lambda: fs.mesh.from_dtensor(X),
        "TypeError: from_dtensor: x must be a DTensor; got Tensor.",
    ),
    "to_device_mesh": (
        lambda: fs.mesh.to_device_mesh("cpu"),
        "TypeError: to_device_mesh: mesh must be a Mesh",
    ),
    "from_device_mesh": (
        lambda: fs.mesh.from_device_mesh(MESH),
        "TypeError: from_device_mesh: device_mesh must",
    ),
    "batch=None": (lambda: gradient(None), "TypeError: value_and_grad: batch must be a P"),
    "a name as batch": (lambda: gradient("data"), "TypeError: value_and_grad: batch must be a P"),
    "numbers in a list": (
        lambda: fs.device_put([1.0, 2.0], LAYOUT),
        "TypeError",
        "[0], [1]: a tensor is needed",
    ),
    "a numpy number": (
        lambda: fs.device_put([np.float32(1)], LAYOUT),
        "TypeError",
        "a tensor is needed",
    ),
    "device_put without a mesh": (lambda: fs.device_put(X, DATA), "TypeError", "with fs.use_mesh"),
    "shard_map without a mesh": (
        lambda: fs.shard_map(same, out_specs=P()),
        "TypeError",
        "with fs.use_mesh",
    ),
    "shard_params without a mesh": (
        lambda: fs.shard_params({"w": X}, P()),
        "TypeError",
        "with fs.use_mesh",
    ),
    "use_mesh without a mesh": (
        lambda: UNTYPED.use_mesh(None).__enter__(),
        "TypeError: use_mesh: mesh must be a Mesh",
    ),
}

SPECS = {
    "two specs": (
        lambda: call(lambda x: x, X, in_specs=(P(), P())),
        "ValueError",
        "each of the 1 arguments (x)",
    ),
    "no spec": (
        lambda: call(lambda x: x, X, in_specs=None),
        "TypeError",
        "argument x: is a tensor, but its spec",
    ),
    "a deep spec": (
        lambda: call(same, X, in_specs=({"deep": P()},)),
        "ValueError",
        "are no prefix of the tree",
    ),
    "a name as in_specs": (lambda: call(same, X, in_specs="data"), "TypeError", "Write P('data')"),
    "a name in in_specs": (
        lambda: call(same, X, in_specs=("data",)),
        "TypeError",
        "in_specs[0] must be a P",
    ),
    "a name as out_specs": (
        lambda: call(same, X, out_specs="data"),
        "TypeError",
        "Write P('data')",
    ),
    "an axis not mapped": (
        lambda: call(same, X, in_specs=P("model"), axes="data"),
        "LayoutError",
        "names model, which this shard_map is not mapped over",
    ),
    "axes that do not exist": (
        axes_that_do_not_exist,
        "LayoutError: shard_map of never_runs: ",
        "argument a: ",
        'no axis "dta"',
        "argument b: ",
        "dim 0 has 3 elements",
        "argument c: ",
        'no axis "modl"',
        "out_specs[0]: ",
        'no axis "x"',
        'out_specs[1]["b"]: ',
        'no axis "y"',
    ),
    "an out_spec's axis": (
        lambda: call(never_runs, X, X, X, in_specs=P(), out_specs=P("y")),
        "MeshError: shard_map of never_runs: out_specs: ",
        'no axis "y"',
    ),
}

ARGUMENTS = {
    "indivisible arguments": (
        indivisible_arguments,
        "LayoutError",
        "argument 0: ",
        "dim 0 has 3 elements, which 2 devices (data) do not divide",
        "argument 1: ",
        "dim 1 has 5 elements, which 2 devices (model) do not divide",
    ),
    "a list of numbers": (
        lambda: call(same, [1.0, 2.0]),
        "TypeError",
        "argument 0[0], argument 0[1]: it is a float",
    ),
    "a number": (lambda: call(same, X, 3), "TypeError", "argument 1: it is a int"),
    "a numpy array": (
        lambda: call(same, np.ones(4)),
        "TypeError",
        "it is a ndarray, which is not sharded",
    ),
    "a set": (lambda: call(same, {X}), "TypeError", "it is a set, which is not sharded"),
    "a generator": (lambda: call(same, (x for x in [X])), "TypeError", "it is a generator"),
    "an array of another mesh": (lambda: call(same, ARRAY), "LayoutError", "it is on Mesh"),
    "changed in place": (
        lambda: call(lambda x: x.add_(1), torch.ones(2), in_specs=P(), out_specs=P()),
        "ValueError: <lambda> changed its argument x in place",
    ),
    "shards that differ": (
        unequal_shards,
        "PromiseError",
        "argument weight of <lambda>, with spec P(), must be",
        "equal ",
        "indices 1, 3 ",
        "differ from indices 0, 2",
    ),
    "tensors of a run that differ": (unequal_in_run, "PromiseError", "argument x of <lambda>"),
}

RESULTS = {
    "no out_spec": (
        lambda: call(same, X, out_specs=None),
        "TypeError",
        "result: is a tensor, but its out_spec is",
    ),
    "a short out_spec": (
        lambda: call(lambda x: (x, x), X, out_specs=(DATA,)),
        "ValueError",
        "are no prefix of",
    ),
    "a result without dims": (
        lambda: call(torch.sum, X),
        "LayoutError",
        'must have a dim for each entry of P("data"); got 0 for 1',
    ),
    "a flat result": (
        lambda: call(same, X, out_specs=P.flat("data")),
        "LayoutError",
        "cannot be derived from a",
    ),
    "uneven results": (
        lambda: call(lambda x: x[: fs.axis_index("data")], X),
        "LayoutError",
        "does not make up a tensor",
    ),
    "unequal numbers": (
        lambda: call(lambda x: fs.axis_index("data"), X),
        "MismatchError",
        "different trees",
    ),
    "trees of other lengths": (
        results_of_two_lengths,
        "MismatchError",
        "devices 0 and 2 return different trees",
    ),
    "a result of None": (one_result_is_none, "MismatchError", "different trees"),
    "results of two dtypes": (
        lambda: differ(lambda x: x, lambda x: x.double()),
        "LayoutError",
        "another dtype on some devices: torch.float32, torch.float64",
    ),
    "an inner array": (
        lambda: call(inner_sharded, torch.ones(4, 4), axes="data"),
        'LayoutError: shard_map of inner_sharded: result["y"]: it is a Sharded on Mesh(model=2 of data=2, model=2;',
    ),
}

CAPTURED = {
    "an array in the closure": (
        lambda: call(lambda x: x * ARRAY, X),
        "LayoutError",
        "pass the array as an argument",
    ),
    "an array alone": (
        lambda: call(lambda x: ARRAY.sin(), X, mesh=LINE),
        "LayoutError",
        "pass it as an argument",
    ),
    "a leaf that requires grad": (
        lambda: call(lambda x: x @ LEAF, torch.ones(4, 4)),
        "LayoutError: A result of the function depends on a tensor that requires grad (shape (4,), torch.float32)",
    ),
    "a leaf on some devices": (
        lambda: differ(lambda x: x * 3, lambda x: x * LEAF[:2]),
        "LayoutError",
        "is not one of",
    ),
    "a transformed tensor": (
        lambda: captured(lambda x: x.T),
        "LayoutError",
        "its derivative would be lost",
    ),
    "its sum": (lambda: captured(torch.sum), "LayoutError", "its derivative would be lost"),
    "its row": (lambda: captured(lambda x: x[0]), "LayoutError", "its derivative would be lost"),
    "its copy": (lambda: captured(copied), "LayoutError", "its derivative would be"),
}

MESHES = {
    "an axis mapped twice": (
        lambda: call(psum_over_both, X, out_specs=P()),
        "MeshError",
        "axis model is already mapped by the shard_map around it",
    ),
    "another mesh inside": (
        another_mesh_inside,
        "MeshError",
        "its devices differ along axes that are mapped there",
    ),
}

ARRAYS = {
    "one shard for all": (
        lambda: fs.from_local(X, LAYOUT),
        "LayoutError",
        "got one shard for the 4 devices",
    ),
    "shards of two shapes": (
        shards_of_two_shapes,
        "LayoutError",
        "device {'data': 1, 'model': 0} must have shape (2,)",
    ),
    "shards of two dtypes": (
        shards_of_two_dtypes,
        "LayoutError",
        "not dense tensors of one dtype: f32, i32",
    ),
    "unshard two dtypes": (
        lambda: fs.unshard(MIXED),
        "LayoutError",
        "not dense tensors of one dtype: f32, i64",
    ),
    "map two dtypes": (
        lambda: call(same, MIXED),
        "LayoutError",
        "not dense tensors of one dtype: f32, i64",
    ),
    "reshard two dtypes": (
        lambda: fs.reshard(MIXED, LAYOUT.with_spec(P())),
        "LayoutError",
        "of one dtype: f32, i64",
    ),
    "unshard numbers": (
        lambda: fs.unshard(NUMBERS),
        "LayoutError",
        "not dense tensors of one dtype: float",
    ),
    "map numbers": (
        lambda: call(same, NUMBERS),
        "LayoutError",
        "not dense tensors of one dtype: float",
    ),
    "the shard of four devices": (
        lambda: ARRAY.local,
        "LayoutError",
        "holds the shards of 2 devices here",
    ),
}
WRONG = {**TYPES, **SPECS, **ARGUMENTS, **RESULTS, **CAPTURED, **MESHES, **ARRAYS}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call_raises_and_names_the_argument(name):
    wrong_call, *texts = WRONG[name]

    with pytest.raises((fs.errors.FshardError, TypeError, ValueError)) as error:
        wrong_call()

    message = f"{type(error.value).__name__}: {error.value}"
    assert message.startswith(texts[0])
    assert all(text in message for text in texts)


def test_message_names_wrong_arguments_alone():
    with pytest.raises(fs.errors.LayoutError) as error:
        call(same, torch.ones(3), torch.ones(4))

    assert "argument 0" in str(error.value)
    assert "argument 1" not in str(error.value)
