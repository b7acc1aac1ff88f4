"""shard_map: specs, arguments, results, nesting; its arrays; abstract meshes.

What raises is in test_misuse.py.
"""

import time
from typing import NamedTuple

import optree
import pytest
import torch
from torch.utils import _pytree as torch_trees
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from fshard.errors import PromiseError
from fshard.mesh.spmd.call_plan import CallPlans


@pytest.fixture
def mesh():
    return fs.make_mesh({"data": 2, "model": 2})


def identity(mesh, in_specs, out_specs, **options):
    return fs.shard_map(lambda x: x, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


# -- specs and trees -------------------------------------------------------------------------------


def test_in_specs_single_tuple_keywords_or_layouts(mesh):
    a = torch.arange(4.0)
    b = torch.arange(4.0, 8.0)

    def add(a, b, *, scale=1):
        return (a + b) * scale

    layout = fs.Layout(mesh, P("data"))
    for spec in (P("data"), layout):
        for in_specs in (spec, (spec, spec)):
            f = fs.shard_map(add, mesh=mesh, in_specs=in_specs, out_specs=spec)
            assert torch.equal(fs.unshard(f(a, b)), a + b)
            assert torch.equal(fs.unshard(f(a, b=b)), a + b) and f(a, b).layout == layout
    f = fs.shard_map(add, mesh=mesh, in_specs=(P("data"), None, P("data")), out_specs=P("data"))
    assert torch.equal(fs.unshard(f(a, scale=3, b=b)), 3 * (a + b))


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_prefix_specs_and_static_leaves(mesh):
    w = torch.arange(8.0).reshape(4, 2)
    deep = Pair(torch.ones(4), torch.zeros(2))
    params = {"w": w, "deep": deep, "name": "layer", "none": None}
    specs = {"w": P("data"), "deep": Pair(P("model"), P()), "name": None, "none": None}

    def f(params, sizes, flag, number):
        assert (flag, params["name"], params["none"], number) == ("yes", "layer", None, 2)
        return params, {
            "sum": fs.psum(params["w"].sum(), "data"),
            "sizes": sizes,
            "shape": tuple(params["w"].shape),
        }

    mapped = fs.shard_map(f, mesh=mesh, in_specs=(specs, None, None, P()), out_specs=(specs, P()))
    out, info = mapped(params, [1, 2], "yes", 2)
    assert str(fs.typeof(out["w"])) == "f32[4@data, 2]"
    assert str(fs.typeof(out["deep"].left)) == "f32[4@model]"
    assert out["name"] == "layer" and out["none"] is None
    assert (
        fs.unshard(info["sum"]).item() == 28 and info["sizes"] == [1, 2] and info["shape"] == (2, 2)
    )
    tree = {1: w, "a": w, None: w, (2,): w}  # keys that cannot be sorted
    put = fs.device_put(tree, fs.Layout(mesh, P("data")))
    assert identity(mesh, P("data"), P("data"))(put).keys() == tree.keys()
    assert fs.device_put([1.0, "x"], fs.Layout(mesh, P())) == [1.0, "x"]


def test_argument_of_other_layout_is_resharded(mesh):
    x = fs.device_put(torch.arange(16.0).reshape(4, 4), fs.Layout(mesh, P("data")))
    with fs.ledger() as comm:
        y = identity(mesh, P(None, "data"), P(None, "data"))(x)
    assert set(comm.by_collective()) == {("all_to_all", ("data",))}
    assert torch.equal(fs.unshard(y), fs.unshard(x))


def test_flat_and_unreduced_specs(mesh):
    x = torch.arange(5.0)
    y = identity(mesh, P.flat("data"), P.flat("data", shape=(5,)))(x)
    assert [shard.tolist() for shard in y.shards] == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]
    z = identity(mesh, P(unreduced="model"), P(unreduced="model"))(x)
    assert str(fs.typeof(z)) == "f32[5]{U:model}"
    assert torch.equal(fs.unshard(y), x) and torch.equal(fs.unshard(z), x)


@pytest.mark.parametrize("spec", [P(), P("data"), P.flat("data")])
def test_shard_changed_in_place_raises_but_for_copies(mesh, spec):
    x = torch.ones(8)
    f_spec = P() if spec == P() else P("data")
    write = fs.shard_map(lambda x: x.add_(1), mesh=mesh, in_specs=f_spec, out_specs=f_spec)
    with pytest.raises(ValueError, match="<lambda> changed its argument x in place"):
        write(fs.device_put(x, fs.Layout(mesh, spec)))
    on_host = fs.device_put(x, fs.Layout(mesh, spec, "host"))
    assert fs.unshard(write(on_host)).tolist() == [2] * 8  # a copy in the device's memory
    assert fs.unshard(on_host).tolist() == [1] * 8
    copy = fs.shard_map(lambda x: x.clone().add_(1), mesh=mesh, in_specs=f_spec, out_specs=f_spec)
    with torch.inference_mode():
        assert fs.unshard(copy(fs.device_put(x, fs.Layout(mesh, spec)))).tolist() == [2] * 8


def use_defaults():
    """Return the results of programs without in_specs and without a mesh, on this runtime."""
    mesh = fs.make_mesh({"data": 2})
    other = fs.make_mesh({"data": 2, "model": 1})
    x = torch.arange(4.0)

    @fs.shard_map(mesh=mesh, out_specs=P("data"))
    def double(x, scale=2.0):
        return scale * x

    assert double.__name__ == "double"
    with fs.use_mesh(other), fs.use_mesh(mesh) as used:
        assert used is mesh
        put = fs.device_put({"x": x}, {"x": P("data")})["x"]
        total = fs.shard_map(lambda x: fs.psum(x.sum(), "data"), out_specs=P())(put)
        y = fs.shard_map(lambda x: x, in_specs=P("data"), out_specs=P("data"))(x)
        w = fs.shard_params({"w": x}, fs.fsdp("data"))["w"]
        inside = fs.run(lambda: fs.unshard(fs.reshard(fs.device_put(x, P("data")), P())).tolist())[
            0
        ]
        assert fs.device_put(x, fs.Layout(other, P("data"))).mesh == other
    types = [str(fs.typeof(array)) for array in (double(put), put, y, w)]
    return [types, fs.unshard(double(put, scale=3)).tolist(), fs.unshard(total).item(), inside]


def test_mesh_and_specs_have_defaults_on_processes_too(two):
    defaults = [["f32[4@data]"] * 3 + ["f32[4]{flat:data}"], [0, 3, 6, 9], 6, [0, 1, 2, 3]]
    assert [use_defaults(), *two.run(use_defaults)] == [defaults] * 3


# -- nesting ---------------------------------------------------------------------------------------


def test_nested_shard_maps_have_values_and_gradients(mesh):
    x = torch.randn(4, 6, dtype=torch.float64)
    w = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    specs = {"in_specs": (P(None, "model"), P("model")), "out_specs": P()}

    def outer(x, w):
        y = fs.shard_map(lambda x, w: fs.psum(x @ w, "model"), mesh=mesh["model"], **specs)(
            x, fs.pvary(w, "data")
        )
        assert y.mesh.axis_names == ("model",)
        return fs.psum((fs.unshard(y) ** 2).sum(), "data")

    (expected,) = torch.autograd.grad(((x @ w) ** 2).sum(), w)
    for options in ({"mesh": mesh, "axes": "data"}, {"mesh": mesh["data"]}):
        total = fs.unshard(
            fs.shard_map(outer, in_specs=(P("data"), P()), out_specs=P(), **options)(x, w)
        )
        torch.testing.assert_close(total, ((x @ w) ** 2).sum())
        torch.testing.assert_close(torch.autograd.grad(total, w)[0], expected)


def test_array_on_submesh_has_shards_of_entire_mesh(mesh):
    x = fs.device_put(torch.arange(4.0), fs.Layout(mesh["data"], P("data")))
    assert x.mesh == mesh and len(x.shards) == 4


# -- from_local, Sharded ---------------------------------------------------------------------------


def test_from_local_builds_arrays(mesh):
    x = fs.from_local(
        lambda data, model: torch.full((1, 2), 10 * data + model),
        fs.Layout(mesh, P("data", "model")),
    )
    assert fs.unshard(x).tolist() == [[0, 0, 1, 1], [10, 10, 11, 11]]
    layout = fs.Layout(mesh, P("data"))

    def inside():
        return fs.unshard(fs.from_local(torch.tensor([fs.axis_index("data")]), layout)).tolist()

    assert fs.run(inside, mesh=mesh) == [[0, 1]] * 4
    flat = fs.from_local(
        lambda data, model: torch.ones(3 - data), fs.Layout(mesh, P.flat("data")), shape=(5,)
    )
    assert fs.unshard(flat).tolist() == [1] * 5


def test_sharded_is_a_leaf_of_trees(mesh):
    """A mapped function gets the global array: its norm, its maximum and its transpose are those of
    the tensor.
    """
    full = torch.arange(8.0).reshape(4, 2)
    x, copies = (fs.device_put(full, fs.Layout(mesh, spec)) for spec in (P("data"), P()))
    maps = [
        (torch_trees.tree_map, torch_trees.tree_leaves),
        (optree.tree_map, optree.tree_leaves),
        (
            lambda f, tree: optree.tree_map(f, tree, namespace="fshard"),
            lambda tree: optree.tree_leaves(tree, namespace="fshard"),
        ),
        (lambda f, tree: torch_trees.tree_map_only(fs.Sharded, f, tree), torch_trees.tree_leaves),
    ]
    for tree_map, tree_leaves in maps:
        for f in (lambda g: g / g.norm(), lambda g: g.clamp(max=g.mean()), lambda g: g.t()):
            torch.testing.assert_close(fs.unshard(tree_map(f, {"x": x})["x"]), f(full))
        assert tree_leaves([copies]) == [copies]


def test_shards_of_trees(mesh):
    x = fs.device_put(torch.arange(4.0), fs.Layout(mesh, P("data")))
    leaves, structure = fs.mesh.flatten_shards({"x": x, "y": torch.ones(1)})
    doubled = structure.unflatten([2 * leaf for leaf in leaves])
    assert fs.unshard(doubled["x"]).tolist() == [0, 2, 4, 6] and doubled["y"].tolist() == [2]
    counts = structure.unflatten([leaf.numel() for leaf in leaves])["x"]
    assert counts.shards == (2, 2, 2, 2) and "int" in repr(counts)
    assert fs.run(lambda: x.local.tolist(), mesh=mesh) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_device_put_owns_its_memory(mesh):
    full = torch.arange(4.0)
    x = fs.device_put(full, fs.Layout(mesh, P("data")))
    x.shards[0].add_(1)
    assert full.tolist() == [0, 1, 2, 3] and x.shards[1].tolist() == [0, 1]


# -- abstract meshes -------------------------------------------------------------------------------


def test_abstract_mesh_gradients_of_meta_tensors():
    mesh = fs.make_mesh({"data": 4}, runtime="abstract")
    mapped = fs.shard_map(
        lambda w: fs.psum((w**2).sum(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    w = torch.ones(8, device="meta", requires_grad=True)
    fs.unshard(mapped(w)).backward()
    assert w.grad.shape == (8,)
    assert torch.func.grad(lambda w: fs.unshard(mapped(w)))(w.detach()).is_meta


def test_abstract_mesh_time_independent_of_size():
    def cost(n):
        mesh = fs.make_mesh({"data": n, "model": 8}, runtime="abstract")
        x = fs.device_put(
            torch.empty(n * 8, 64, device="meta"), fs.Layout(mesh, P("data", "model"))
        )

        def body(x):
            full = fs.all_gather(x, ("data", "model"), dim=0)
            return fs.psum_scatter(full, ("model", "data"), dim=0), fs.ppermute(
                x, "model", [(0, 1)]
            )

        f = fs.shard_map(body, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model"))
        times = []
        for _ in range(20):  # what others on the machine do makes some slower, and none faster
            began = time.perf_counter()
            assert f(x)[0].shape[0] == n * 8
            times.append(time.perf_counter() - began)
        return min(times)

    small = cost(1)
    large = cost(8192)
    assert large < 3 * small + 0.001


# -- what a review found ---------------------------------------------------------------------------


def test_recomputed_backward_repeats_random_draws(mesh):
    dropout = lambda x: torch.nn.functional.dropout(x, 0.5)  # noqa: E731
    mapped = fs.shard_map(dropout, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check=False)
    f = lambda x: fs.unshard(mapped(x))  # noqa: E731
    x = torch.ones(64, requires_grad=True)
    y = f(x)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], y.detach())
    y, pull = torch.func.vjp(f, torch.ones(64))
    assert torch.equal(pull(torch.ones(64))[0], y)
    y = checkpoint(f, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y.detach())
    after = []
    for is_differentiated in (False, True):
        torch.manual_seed(3)
        y = f(x)
        if is_differentiated:
            torch.autograd.grad(y.sum(), x, create_graph=True)
        after.append(torch.randn(2))
    assert torch.equal(*after)


def test_draws_in_mapped_function_differ_by_call_and_along_named_axes(mesh):
    """Along an axis that no spec names all values are equal, so draws are."""

    def draw(x):
        return x + torch.rand_like(x)

    noisy = fs.shard_map(draw, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check=True)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append([fs.unshard(noisy(torch.zeros(8))) for _ in range(2)])
    assert len(torch.cat(runs[0]).unique()) == 16
    assert all(map(torch.equal, *runs))


def test_draws_in_mapped_function_without_named_axes_are_equal(mesh):
    f = fs.shard_map(lambda: torch.rand(3), mesh=mesh, out_specs=P(), check=True)
    assert len(torch.cat([fs.unshard(f()) for _ in range(2)]).unique()) == 6


def test_draws_of_results_that_are_sharded_differ_by_device(mesh):
    f = fs.shard_map(lambda: torch.rand(3), mesh=mesh, out_specs=P("data"), check=True)
    values = fs.unshard(f())
    assert len(values.unique()) == len(values) > 3


def test_draws_in_mapped_function_by_a_key_are_equal_on_all_devices(mesh):
    def f(x):
        with fs.keyed_random(3):
            return fs.psum(x, "data") + torch.rand_like(x)

    mapped = fs.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P(), check=True)
    assert torch.equal(fs.unshard(mapped(torch.ones(4))), fs.unshard(mapped(torch.ones(4))))


def test_sampled_tokens_by_a_key_with_the_coordinate_agree_on_devices_that_share_rows(mesh):
    """Weights that are sharded over "model" would let its devices draw different tokens."""

    def sample(weight, x, call):
        logits = fs.all_gather(x @ weight, "model", dim=1)
        with fs.keyed_random(0, call, fs.axis_index("data")):
            return torch.multinomial(logits.softmax(-1), 1)

    specs = (P(None, "model"), P("data"), None)
    mapped = fs.shard_map(sample, mesh=mesh, in_specs=specs, out_specs=P("data"), check=True)
    weight, x = torch.zeros(4, 64), torch.ones(8, 4)
    first, second, again = (fs.unshard(mapped(weight, x, call)) for call in (0, 1, 0))
    assert first.equal(again)
    assert not first.equal(second)
    assert not first[:4].equal(first[4:])


def test_draws_that_differ_in_a_replicated_result_raise(mesh):
    mapped = fs.shard_map(lambda x: torch.rand(2), mesh=mesh, in_specs=P("data"), out_specs=P())
    with pytest.raises(PromiseError, match=r"in fs\.keyed_random\(seed\) they are equal"):
        mapped(torch.ones(4))


def test_draws_in_mapped_function_advance_the_callers_state_alike_under_transforms(mesh):
    """Each call draws one key, whatever the function draws, and the state of the caller is not that
    of a device.
    """
    f = fs.shard_map(
        lambda x: x * torch.rand(()), mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    batched = torch.func.vmap(lambda x: fs.unshard(f(x)), randomness="same")
    results, after = [], []
    for call, x in ((lambda x: fs.unshard(f(x)), torch.ones(4)), (batched, torch.ones(1, 4))):
        torch.manual_seed(1)
        results.append(call(x).flatten())
        after.append(torch.rand(2))
    assert torch.equal(*after) and torch.equal(*results)


def test_argument_used_by_some_devices_has_gradient(mesh):
    def f(w, x):
        y = (fs.pvary(w, "model") * x) if fs.axis_index("data") == 0 else x.detach()
        return y.sum().reshape(1)

    w = torch.ones(2, requires_grad=True)
    x = torch.arange(4.0, requires_grad=True)
    f = fs.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check=False)
    gradients = torch.autograd.grad(fs.unshard(f(w, x)).sum(), (w, x))
    assert [g.tolist() for g in gradients] == [[2, 0], [1, 1, 0, 0]]


def test_plan_cache_is_bounded(mesh):
    plans = CallPlans(lambda x: x, "f", P(), P(), ("data", "model"))
    for size in range(600):
        plans.of_arguments(mesh, (torch.empty(size),), {})
    assert len(plans._arguments) <= 512


# -- plans that are shared by calls that compare equal ---------------------------------------------


@pytest.mark.parametrize("keys", [(1, True), (True, 1), (1.0, 1), (0.0, -0.0)], ids=str)
def test_trees_that_compare_equal_keep_their_own_keys(mesh, keys):
    seen = []

    def f(tree):
        seen.extend(tree)
        return {key: x + 1 for key, x in tree.items()}

    mapped = fs.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    for key in keys:
        (result,) = mapped({key: torch.ones(4)})
        assert (type(result), str(result), str(seen.pop())) == (type(key), str(key), str(key))


@pytest.mark.parametrize("scales", [(1, True), (2, 2.0), (0.0, -0.0)], ids=str)
def test_numbers_that_compare_equal_are_passed_unchanged(mesh, scales):
    f = fs.shard_map(
        lambda x, scale: (x * scale, scale),
        mesh=mesh,
        in_specs=(P("data"), None),
        out_specs=(P("data"), None),
    )
    for scale in scales:
        x = torch.arange(4)
        y, passed = f(x, scale)
        assert fs.unshard(y).dtype == (x * scale).dtype
        assert repr(passed) == repr(scale)
