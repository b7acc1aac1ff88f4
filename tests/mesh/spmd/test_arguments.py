"""Arguments of `shard_map`, `device_put` and collectives that users write: other forms that work, and clear errors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.errors import LayoutError, MismatchError
from fshard.testing.processes import Processes

UNTYPED: Any = fs
MESH = fs.make_mesh({"data": 2})
SHARDED = fs.Layout(MESH, P("data"))
X = torch.arange(4.0)
DATA = P("data")
ARRAY = fs.device_put(X, SHARDED)


def map_data(f: Callable[..., Any], *args: Any, in_specs: Any = DATA, out_specs: Any = DATA) -> Any:
    return fs.shard_map(f, mesh=MESH, in_specs=in_specs, out_specs=out_specs)(*args)


def same(*args: Any) -> Any:
    return args[0]


def differ(first: Any, second: Any) -> Any:
    return map_data(lambda x: second(x) if fs.axis_index("data") else first(x), X)


def gradient(**options: Any) -> Any:
    return fs.value_and_grad(lambda w, x: (w * x).mean(), mesh=MESH, **options)


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "axes of P.flat in a tuple": (lambda: UNTYPED.P.flat(("data",)), TypeError, "Write P.flat(*axes)"),
    "a name as in_specs": (lambda: map_data(same, X, in_specs="data"), TypeError, "Write P('data')"),
    "a name in in_specs": (lambda: map_data(same, X, in_specs=("data",)), TypeError, "in_specs[0] must be a P"),
    "a name as out_specs": (lambda: map_data(same, X, out_specs="data"), TypeError, "Write P('data')"),
    "a tensor without in_specs": (lambda: map_data(same, X, in_specs=None), TypeError, "argument 0: is a tensor, but"),
    "batch=None": (lambda: gradient(batch=None), TypeError, "value_and_grad: batch must be a P"),
    "a name as batch": (lambda: gradient(batch="data"), TypeError, "value_and_grad: batch must be a P"),
    "numbers in a list": (lambda: fs.device_put([1.0, 2.0], SHARDED), TypeError, "[0], [1]: a tensor is needed"),
    "a numpy number": (lambda: fs.device_put([np.float32(1)], SHARDED), TypeError, "a tensor is needed"),
    "a list of numbers": (lambda: map_data(same, [1.0, 2.0]), TypeError, "argument 0[0], argument 0[1]: it is a float"),
    "a number": (lambda: map_data(same, X, 3), TypeError, "argument 1: it is a int"),
    "a set": (lambda: map_data(same, {X}), TypeError, "it is a set, which is not sharded"),
    "a generator": (lambda: map_data(same, (x for x in [X])), TypeError, "it is a generator"),
    "results of other lengths": (
        lambda: differ(lambda x: {"a": x}, lambda x: {"a": x, "b": x}),
        MismatchError,
        "devices 0 and 1 return different trees",
    ),
    "a result that is None": (lambda: differ(lambda x: (x, x), lambda x: (x, None)), MismatchError, "different trees"),
    "options without names": (
        lambda: map_data(lambda x: UNTYPED.all_to_all(x, "data", 0, 0), X),
        TypeError,
        "fs.all_to_all(tree, axis, split_dim, concat_dim, counts): too many positional arguments",
    ),
    "a dim without its name": (
        lambda: map_data(lambda x: UNTYPED.psum_scatter(x, "data", 0), X),
        TypeError,
        "(tree, axis, dim)",
    ),
    "an array in the closure": (lambda: map_data(lambda x: x * ARRAY, X), LayoutError, "pass the array as an argument"),
    "an array in the closure alone": (
        lambda: map_data(lambda x: ARRAY.sin(), X),
        LayoutError,
        "pass it as an argument",
    ),
    "device_put without a mesh": (lambda: fs.device_put(X, P("data")), TypeError, "with fs.use_mesh"),
    "shard_map without a mesh": (lambda: fs.shard_map(same, out_specs=P()), TypeError, "with fs.use_mesh"),
    "shard_params without a mesh": (lambda: fs.shard_params({"w": X}, P()), TypeError, "with fs.use_mesh"),
    "use_mesh without a mesh": (lambda: UNTYPED.use_mesh(None).__enter__(), TypeError, "use_mesh: mesh must be a Mesh"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_unfit_argument_raises_one_clear_error(what: str) -> None:
    call, kind, text = ERRORS[what]
    with pytest.raises(kind) as error:
        call()
    assert text in str(error.value)


def test_keys_that_cannot_be_sorted_are_leaves_of_their_own() -> None:
    tree = {1: X, "a": X, None: X, (2,): X}
    assert {*map_data(same, fs.device_put(tree, SHARDED))} == {*tree}


def test_replicated_numbers_pass_unchanged() -> None:
    assert fs.device_put([1.0, "x"], fs.Layout(MESH, P())) == [1.0, "x"]
    assert map_data(same, 2, X, in_specs=(P(), P("data"))) == 2
    assert map_data(same, [1, 2], X, in_specs=(None, P("data"))) == [1, 2]


def test_layouts_count_as_their_specs() -> None:
    specs = {"in_specs": ({"x": SHARDED}, fs.Layout(MESH, P())), "out_specs": SHARDED}
    assert (
        str(fs.typeof(map_data(lambda tree, w: tree["x"] * w, {"x": X}, torch.tensor(2.0), **specs))) == "f32[4@data]"
    )


def use_defaults() -> list[Any]:
    """Return what programs without in_specs and without a mesh give, on this runtime."""
    mesh = fs.make_mesh({"data": 2})
    other = fs.make_mesh({"data": 2, "model": 1})

    @fs.shard_map(mesh=mesh, out_specs=P("data"))
    def double(x: Tensor, scale: float = 2) -> Tensor:
        return scale * x

    assert double.__name__ == "double"
    with fs.use_mesh(other), fs.use_mesh(mesh) as used:
        assert used is mesh
        x = fs.device_put({"x": X}, {"x": P("data")})["x"]
        total = fs.shard_map(lambda x: fs.psum(x.sum(), "data"), out_specs=P())(x)
        y = fs.shard_map(lambda x: x, in_specs=P("data"), out_specs=P("data"))(X)
        w = fs.shard_params({"w": X}, fs.fsdp("data"))["w"]
        inside = fs.run(lambda: fs.unshard(fs.reshard(fs.device_put(X, P("data")), P())).tolist())[0]
        explicit = fs.device_put(X, fs.Layout(other, P("data"))).mesh
    types = [str(fs.typeof(one)) for one in (double(x), x, y, w)]
    return [types, fs.unshard(double(x, scale=3)).tolist(), fs.unshard(total).item(), inside, explicit == other]


DEFAULTS = [["f32[4@data]"] * 3 + ["f32[4]{flat:data}"], [0, 3, 6, 9], 6, [0, 1, 2, 3], True]


def test_mesh_and_specs_have_defaults() -> None:
    assert use_defaults() == DEFAULTS


def test_mesh_and_specs_have_defaults_on_processes(two: Processes) -> None:
    assert two.run(use_defaults) == [DEFAULTS] * 2
