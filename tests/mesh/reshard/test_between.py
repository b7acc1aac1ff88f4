"""Arrays that move between meshes equal slices of their full tensors: values, bytes and gradients.

The oracle makes lists of element numbers, from the definitions of layouts alone.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.mesh.layout.kinds import memory_of
from fshard.mesh.layout.sharded import Sharded, donated
from fshard.mesh.reshard import rounds
from fshard.mesh.reshard.device_put import shares_memory
from fshard.mesh.spmd.run import local_devices
from tests.helpers.processes import HAS_RULES
from tests.helpers.sampled import THOROUGH, thorough
from tests.mesh.reshard.moves_between import (
    WORLD,
    all_coordinates,
    drawn_moves,
    expected_shard,
    same_bits,
    source_array,
)

# torch itself uses torch.jit.script in its first jvp
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)


@pytest.fixture(autouse=True, scope="module")
def disk(tmp_path_factory):
    """A folder for shards on disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSHARD_DISK", str(tmp_path_factory.mktemp("disk")))
        yield


def check_move(move):
    """Move all leaves from outside, and compare each shard with its slice of the full tensor."""
    before, after = move.before.make(), move.after.make()
    assume(before != after)
    sources = [source_array(move, leaf, before) for leaf in move.leaves]
    layouts = [leaf.after.layout(after) for leaf in move.leaves]
    results = fs.reshard(sources, layouts, dtype=move.dtype)
    for leaf, source, result in zip(move.leaves, sources, results, strict=True):
        full = move.expected_full(leaf)
        assert result.layout.spec == leaf.after.spec
        assert result.layout.unit == (leaf.after.unit or leaf.before.unit)
        assert result.layout.frozen == (leaf.after.frozen or leaf.before.frozen)
        for shard, coordinates in zip(result.shards, all_coordinates(move.after), strict=True):
            expected = expected_shard(full, move.after, leaf.after.spec, coordinates)
            assert same_bits(shard, expected, is_cast=move.dtype is not None), (leaf, coordinates)
            assert memory_of(shard) == leaf.after.memory
        assert not shares_memory(result, source)


@given(drawn_moves())
def test_reshard_between_any_meshes_equals_slices(move):
    check_move(move)


@pytest.mark.thorough
@settings(max_examples=2000)
@given(drawn_moves())
def test_reshard_between_2000_pairs_equals_slices(move):
    check_move(move)


# -- inside of a run, and on processes -------------------------------------------------------------


def check_here(moves):
    """Make the moves as one device, and compare its new shards; return the bytes that it sends."""
    links = []
    for move in moves:
        before, after = move.before.make(), move.after.make()
        sources = []
        for leaf in move.leaves:
            sources.append(fs.device_put(leaf.full(), leaf.before.layout(before)))
        layouts = [leaf.after.layout(after) for leaf in move.leaves]
        with fs.ledger() as comm:
            arrays = fs.reshard(sources, layouts, dtype=move.dtype)
        links.append(dict(comm.links))

        for leaf, source, array in zip(move.leaves, sources, arrays, strict=True):
            full = move.expected_full(leaf)
            assert (array.dtype, array.shape) == (full.dtype, leaf.shape)
            assert array.is_local == after.is_member
            if array.is_local:
                assert not shares_memory(array, source)
                coordinates = after.coordinates(local_devices(after)[0])
                expected = expected_shard(full, move.after, leaf.after.spec, coordinates)
                is_cast = move.dtype is not None
                assert same_bits(array.shards[0], expected, is_cast=is_cast), (leaf, coordinates)
    return links


@settings(max_examples=200 if THOROUGH else 15)
@given(drawn_moves(has_zigzag=False))
def test_reshard_between_meshes_of_a_run_equals_slices(move):
    fs.run(check_here, [move], mesh=fs.make_mesh({"device": WORLD}), check=True)


def some_moves(count, **options):
    """Return drawn moves, equal in each run."""
    moves = []

    @settings(max_examples=count, derandomize=True, database=None)
    @given(drawn_moves(**options))
    def draw(move):
        if len(moves) < count:
            moves.append(move)

    draw()
    return moves


def test_reshard_between_meshes_of_processes_equals_slices(four):
    moves = some_moves(60, has_zigzag=False, world=4, memories=["device", "host"])
    four.run(check_here, moves)


# -- rounds ----------------------------------------------------------------------------------------


@given(drawn_moves(), st.sampled_from([1, 100, 1000]))
def test_rounds_of_few_bytes_give_equal_results(move, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "ROUND", size)
        check_move(move)


@pytest.mark.parametrize("before", [P(), P("data"), P.flat("data")], ids=str)
@pytest.mark.parametrize("engine", [(4, 5), (1, 0)], ids=str)
def test_buffers_of_rounds_need_at_most_their_limit(before, engine, monkeypatch):
    monkeypatch.setattr(rounds, "ROUND", 1 << 16)
    trainer = fs.make_mesh({"data": 4})
    mesh = fs.make_mesh({"model": 2}, devices=engine)
    full = torch.arange(512.0 * 256).reshape(512, 256)
    x = fs.device_put(full, fs.Layout(trainer, before))
    for after in (P("model"), P(None, "model"), P()):
        for dtype in (None, torch.bfloat16):
            with fs.memory.limit() as used:
                y = fs.reshard(x, fs.Layout(mesh, after), dtype=dtype)
            shards = Counter()
            for array in (x, y):
                for number, shard in zip(array.mesh.devices, array.shards, strict=True):
                    shards[number] += shard.nbytes
            assert used.peak() <= max(shards.values()) + rounds.ROUND


def resident_bytes_of_a_move(size):
    """Return the peak of resident bytes of a move, beyond those before it and the new shard."""
    trainer = fs.make_mesh({"data": 2}, devices=(0, 1))
    engine = fs.make_mesh({"model": 2}, devices=(2, 3))
    shape = (size // 4096, 1024)
    layout = fs.Layout(trainer, P.flat("data"))
    layouts = fs.Layout(engine, P(None, "model"))
    small = fs.device_put(torch.ones(4, 1024), layout)
    fs.reshard(small, layouts)  # what is made once
    x = fs.array.zeros(shape, layout=layout)
    if trainer.is_member:
        x.local.fill_(1)  # else its pages are not there
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmHWM")
    y = fs.reshard(x, layouts)
    new = y.local.nbytes if y.is_local else 0
    return resident("VmHWM") - before - new


def resident(name):
    """Return a number of bytes of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {name}")


@pytest.mark.skipif(sys.platform != "linux" or HAS_RULES, reason="reads /proc of gloo's processes")
@pytest.mark.parametrize("size", [32 << 20, thorough(200 << 20)])
def test_resident_memory_of_processes_grows_by_one_round(four, size):
    noise = 4 << 20  # of allocators, and of Python
    assert max(four.run(resident_bytes_of_a_move, size)) <= rounds.ROUND + noise


# -- where arrays cannot move ----------------------------------------------------------------------


@pytest.mark.parametrize("function", [fs.reshard, fs.device_put])
@pytest.mark.parametrize("engine", [(4, 5), (0, 1)], ids=str)
def test_move_to_another_mesh_in_a_shard_map_or_loss_names_the_way_out(function, engine):
    text = (
        r"must be moved to model=2 on .* outside of shard_map and loss functions.* Move it before"
    )

    def main():
        trainer = fs.make_mesh({"data": 4}, devices=range(4))
        mesh = fs.make_mesh({"model": 2}, devices=engine)
        x = fs.device_put(torch.ones(4, 6), fs.Layout(trainer, P("data")))

        def moved(*arguments):
            with pytest.raises(fs.errors.LayoutError, match=text):
                function(x, fs.Layout(mesh, P("model")))
            return arguments[0]

        fs.shard_map(moved, mesh=trainer, in_specs=P("data"), out_specs=P("data"))(torch.ones(4))
        params = fs.shard_params({"w": torch.ones(4)}, fs.fsdp("data"), mesh=trainer)
        gradient = fs.value_and_grad(
            lambda p, batch: moved(p["w"] * batch).sum(), mesh=trainer, batch=P("data")
        )
        gradient(params, torch.ones(4))

    fs.run(main, mesh=fs.make_mesh({"device": 6}))


def test_move_of_a_donated_array_raises():
    layout = fs.Layout(fs.make_mesh({"data": 2}), P("data"))
    x = fs.device_put(torch.ones(4), layout)
    donated(x, None)
    with pytest.raises(fs.errors.LayoutError, match="must not be donated"):
        fs.reshard(x, fs.Layout(fs.make_mesh({"model": 2}, devices=(2, 3)), P("model")))


def test_move_between_abstract_meshes_counts_what_virtual_ones_send():
    counts = []
    for runtime in ("virtual", "abstract"):
        trainer = fs.make_mesh({"data": 4}, runtime=runtime)
        engine = fs.make_mesh({"model": 2}, devices=(5, 3), runtime=runtime)
        x = fs.device_put(torch.ones(7, 6), fs.Layout(trainer, P.flat("data")))
        with fs.ledger() as comm:
            y = fs.reshard(x, fs.Layout(engine, P(None, "model")), dtype=torch.bfloat16)
        assert (y.shape, y.dtype) == ((7, 6), torch.bfloat16)
        counts.append(dict(comm.links))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("view", ["transpose", "strided", "conj", "neg"])
def test_lazy_and_strided_shards_move_as_their_values(view):
    views = {
        "transpose": lambda x: x.movedim(0, -1),
        "strided": lambda x: x[..., ::2],
        "conj": lambda x: x.conj(),
        "neg": lambda x: x.conj().imag,
    }
    full = torch.arange(4 * 4 * 4.0).reshape(4, 4, 4) * (1 + 2j)
    layout = fs.Layout(fs.make_mesh({"data": 2}), P(None, "data"))
    x = fs.device_put(full, layout)
    shards = tuple([views[view](shard) for shard in x.shards])
    expected = views[view](full)
    spec = P("data") if view == "transpose" else P(None, "data")
    y = Sharded(tuple(expected.shape), layout.with_spec(spec), shards)
    engine = fs.make_mesh({"model": 2}, devices=(2, 1))
    for after in (P("model"), P.flat("model")):
        assert fs.unshard(fs.reshard(y, fs.Layout(engine, after))).equal(expected)


# -- gradients -------------------------------------------------------------------------------------

ROUTES = {
    "disjoint": ((0, 1, 2), (3, 4), P.flat("data"), P(None, "model")),
    "overlapping": ((0, 1), (1, 2), P("data"), P.flat("model")),
    "permuted": ((0, 1, 2, 3), (3, 1, 0, 2), P("data"), P.flat("model")),
    "replicas": ((2, 0), (0, 1, 3, 2), P(), P(at={"model": 3})),
    "sums": ((0, 1), (2, 3), P(unreduced="data"), P(unreduced="model")),
}
"""Devices of two meshes, and specs on them."""


def seam(route, dtype=None):
    """Return a function of plain tensors that goes through two meshes, and plain torch's."""
    numbers, new_numbers, spec, new_spec = ROUTES[route]
    layout = fs.Layout(fs.make_mesh({"data": len(numbers)}, devices=numbers), spec)
    new_layout = fs.Layout(fs.make_mesh({"model": len(new_numbers)}, devices=new_numbers), new_spec)

    def on_two_meshes(w):
        x = fs.device_put(w * w, layout)
        y = fs.reshard({"a": x, "b": x}, new_layout, dtype=dtype)
        return fs.unshard(y["a"]) * fs.unshard(y["b"]).sin()

    def plain(w):
        x = (w * w).to(dtype)
        return x * x.sin()

    return on_two_meshes, plain


def weights(shape=(4, 6), dtype=torch.float64):
    return torch.linspace(-1, 1, 24, dtype=dtype).reshape(shape)


@pytest.mark.parametrize("route", ROUTES)
def test_gradients_of_any_order_pass_a_seam_as_in_plain_torch(route):
    results = []
    for f in seam(route):
        w = weights().requires_grad_()
        (first,) = torch.autograd.grad(f(w).square().sum(), w, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), w)
        y = f(w)
        batch = torch.stack([torch.ones_like(y), y.detach()])
        (rows,) = torch.autograd.grad(y, w, batch, is_grads_batched=True)
        tangent = weights().cos()
        _, forward = torch.func.jvp(f, (w.detach(),), (tangent,))
        functional = torch.func.grad(lambda w, f=f: f(w).square().sum())(w.detach())
        over_rows = torch.func.vmap(f)(torch.stack([w.detach(), tangent]))
        jacobian = torch.func.jacrev(f)(w.detach())
        results.append((first, second, rows, forward, functional, over_rows, jacobian))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_gradients_through_casts_are_those_of_plain_casts(route, dtype):
    gradients = []
    for f in seam(route, dtype):
        w = weights(dtype=torch.float32).requires_grad_()
        (gradient,) = torch.autograd.grad(f(w).float().sum(), w)
        gradients.append(gradient)
    torch.testing.assert_close(*gradients)


def gradient_here(route):
    """Return the gradient of a program on two meshes, where the caller is on the first one."""
    numbers, new_numbers, spec, new_spec = ROUTES[route]
    first = fs.make_mesh({"data": len(numbers)}, devices=numbers)
    second = fs.make_mesh({"model": len(new_numbers)}, devices=new_numbers)
    w = weights().requires_grad_()
    x = fs.device_put(w, fs.Layout(first, spec))
    y = fs.reshard(x * x, fs.Layout(second, new_spec))
    (y * y.sin()).sum().backward()
    if not first.is_member:
        assert w.grad is None
        return None
    return w.grad


def expected_gradient():
    w = weights().requires_grad_()
    x = w * w
    (x * x.sin()).sum().backward()
    return w.grad


ALONE = ["disjoint", "overlapping", "permuted", "replicas"]
"""Routes without sums, whose squares are none."""


@pytest.mark.parametrize("route", ALONE)
def test_gradients_pass_a_seam_inside_of_a_run(route):
    gradients = fs.run(gradient_here, route, mesh=fs.make_mesh({"device": 5}))
    check_gradients(route, gradients)


def test_gradients_pass_a_seam_between_processes(four):
    for route in ("overlapping", "permuted", "replicas"):
        check_gradients(route, four.run(gradient_here, route))


def check_gradients(route, gradients):
    for number, gradient in enumerate(gradients):
        if number in ROUTES[route][0]:
            torch.testing.assert_close(gradient, expected_gradient())
        else:
            assert gradient is None
