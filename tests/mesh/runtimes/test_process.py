"""The process runtime: the same program on gloo, torch's own meshes and tensors, hangs that are
errors.
"""

import os
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fshard as fs
from fshard import P
from fshard.mesh.runtimes import process
from fshard.mesh.runtimes.buffers import SMALLEST, empty
from fshard.mesh.runtimes.gloo import Gloo
from fshard.mesh.runtimes.nccl import Nccl
from fshard.mesh.runtimes.process import ProcessWorld
from fshard.mesh.runtimes.transport import joined
from fshard.mesh.spmd.scope import require
from fshard.source import call_site
from fshard.transforms.agreement import reduce_rows
from tests.helpers.ended import wait_until
from tests.helpers.processes import ONE_LINK, not_under_rules, run_processes
from tests.mesh.runtimes.programs import each_collective, extremes, the_example


def test_readme_example_on_processes_equals_virtual(four):
    full, *texts, ledgers = the_example()
    for rank, (full_of_rank, *texts_of_rank, (ledger,)) in enumerate(four.run(the_example)):
        assert (
            torch.equal(full, full_of_rank) and texts == texts_of_rank and ledgers[rank] == ledger
        )


SPECS = [
    P(), P("a"), P(None, ("b", "a")), P("b", "a"), P.flat("a", "b"), P.flat("b"), P(unreduced="a"),
    P("a", unreduced="b"),
]  # fmt: skip


def reshard_everything():
    mesh = fs.make_mesh({"a": 2, "b": 2})
    full = torch.arange(48.0).reshape(4, 4, 3)
    layouts = [fs.Layout(mesh, spec) for spec in SPECS]
    for before, after in product(layouts, repeat=2):
        x = full.clone().requires_grad_()
        y = fs.reshard(fs.device_put(x, before), after)
        assert tuple(y.local.shape) == after.local_shape(full.shape, dist.get_rank())
        assert torch.equal(fs.unshard(y), full)
        assert torch.equal(torch.autograd.grad((fs.unshard(y) * full).sum(), x)[0], full)
    odd = torch.arange(7.0).reshape(7, 1)
    x = fs.device_put(odd, fs.Layout(mesh, P.flat("a")))
    assert x.local.numel() == 4 - fs.mesh.process_index() // 2 and torch.equal(fs.unshard(x), odd)


def test_reshard_and_backward_on_processes_equals_virtual(four):
    four.run(reshard_everything)


# -- torch's meshes and tensors --------------------------------------------------------------------


def to_and_from_torch():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    theirs = fs.mesh.to_device_mesh(mesh)
    assert (theirs.mesh_dim_names, tuple(theirs.mesh.shape)) == (("data", "model"), (2, 2))
    assert fs.mesh.from_device_mesh(theirs) == mesh
    assert fs.mesh.to_device_mesh(mesh["model"]).mesh_dim_names == ("model",)
    group = fs.run(lambda: require("test").group("model", "test"), mesh=mesh)[0]
    if os.environ.get("FSHARD_DIRECT") == "0":
        assert ProcessWorld.of(mesh).transport(group).pg == theirs.get_group("model")
    full = torch.arange(48.0).reshape(8, 6)
    for spec, placements in [
        (P("data", "model"), [Shard(0), Shard(1)]),
        (P(("data", "model")), [Shard(0), Shard(0)]),
        (P(None, "data"), [Shard(1), Replicate()]),
        (P("data", unreduced="model"), [Shard(0), Partial()]),
    ]:
        x = fs.device_put(full, fs.Layout(mesh, spec))
        d = fs.mesh.to_dtensor(x)
        assert list(d.placements) == placements and d.shape == (8, 6)
        assert d.to_local().data_ptr() == x.local.data_ptr()
        assert torch.equal(d.full_tensor(), full)
        back = fs.mesh.from_dtensor(d)
        assert back.layout == x.layout and back.local.data_ptr() == x.local.data_ptr()
    turned = fs.shard_map(
        lambda x: x.t(), mesh=mesh, in_specs=P("data"), out_specs=P(None, "data")
    )(full)
    gaps = fs.shard_map(lambda x: x[:, ::2], mesh=mesh, in_specs=P("data"), out_specs=P("data"))(
        full
    )
    for x, expected in ((turned, full.t()), (gaps, full[:, ::2])):
        d = fs.mesh.to_dtensor(x)
        assert d.to_local().data_ptr() == x.local.data_ptr()
        assert d.stride() == (expected.clone() + 0).stride()
        views = d.contiguous().view(-1).view(expected.shape), d.reshape(-1).view(expected.shape)
        assert all(
            torch.equal(same.full_tensor(), expected) for same in (d, d + 0, d.clone(), *views)
        )
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    theirs = DTensor.from_local(torch.ones(2, 3), grid, [Shard(0), Shard(1)])
    assert str(fs.typeof(fs.mesh.from_dtensor(theirs))) == "f32[4@a, 6@b]"
    for spec, text in (
        (P.flat("data"), "flat, owned and host layouts are fshard's own"),
        (P(("model", "data")), "dim 0 is cut by .'model', 'data'., not in the mesh's order"),
    ):
        with pytest.raises(fs.errors.LayoutError, match=text):
            fs.mesh.to_dtensor(fs.device_put(full, fs.Layout(mesh, spec)))


@not_under_rules("torch's DTensor takes no process group that is written in Python")
def test_device_mesh_and_dtensor_conversions_round_trip(four):
    four.run(to_and_from_torch)


def a_mesh_in_another_order():
    fs.make_mesh({"d": 4})
    theirs = DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]]), mesh_dim_names=("a", "b"))

    def main():
        rank = torch.tensor([float(dist.get_rank())])
        return [
            fs.axis_index(("a", "b")),
            *(fs.all_gather(rank, axes).tolist() for axes in (("a", "b"), ("b", "a"))),
        ]

    return fs.run(main, mesh=fs.mesh.from_device_mesh(theirs))[0]


def test_from_device_mesh_permuted_ranks_keeps_order(four):
    gathered = [3, 1, 2, 0], [3, 2, 1, 0]
    assert four.run(a_mesh_in_another_order) == [[index, *gathered] for index in (3, 1, 2, 0)]


def wrong_size():
    with pytest.raises(fs.errors.MeshError, match=r"has 3 devices, but there are 2 processes"):
        fs.make_mesh({"data": 3})


def test_make_mesh_size_unlike_world_raises(two):
    two.run(wrong_size)


def unseeded():
    before = torch.randn(3)
    fs.make_mesh({"data": 2})
    return before, torch.randn(3)


def test_make_mesh_unseeded_processes_draw_equal_numbers():
    (before, first), (other, second) = run_processes(unseeded, 2)
    assert torch.equal(first, second) and not torch.equal(before, other)


# -- a hang is an error ----------------------------------------------------------------------------


def leave_one_out(path):
    """Call a collective on process 0 alone, which writes that it has failed; process 1 is there
    until then.
    """

    def main():
        if fs.axis_index("data") == 1:
            wait_until(path.exists)
            return
        try:
            fs.psum(torch.ones(3), "data")
        finally:
            path.touch()

    fs.run(main, mesh=fs.make_mesh({"data": 2}, timeout=1))


def test_collective_timeout_names_the_call(link, tmp_path):
    text = r"psum of float32\[3\] over data .* at .*test_process.py.* in main did not end"
    with pytest.raises(fs.errors.CollectiveTimeoutError, match=text):
        run_processes(leave_one_out, 2, tmp_path / "failed", environment=link, timeout=30)


def fail_on_one(path):
    def main():
        fs.psum(torch.ones(2), "data")
        if fs.axis_index("data") == 1:
            raise KeyError("mine")
        try:
            fs.psum(torch.ones(2), "data")
        except fs.errors.LostProcessError as error:
            path.write_text(str(error))
            raise

    fs.run(main, mesh=fs.make_mesh({"data": 2}))


def test_wait_for_failed_process_raises_lost_process_error(tmp_path, link):
    with pytest.raises(KeyError, match="mine"):
        run_processes(fail_on_one, 2, tmp_path / "error", environment=link, timeout=30)
    text = (tmp_path / "error").read_text()
    assert "psum of float32[2] over data" in text and "Its own error is the one to look for" in text


def end_early_on_one(path, is_silent):
    def call():
        fs.psum(torch.ones(2), "data")

    mesh = fs.make_mesh({"data": 2})
    fs.run(call, mesh=mesh)
    if dist.get_rank() == 0:
        with pytest.raises(fs.errors.LostProcessError) as error:
            fs.run(call, mesh=mesh)
        path.write_text(str(error.value))
    elif is_silent:
        os._exit(0)


def test_call_after_the_end_of_a_process_names_that_end(tmp_path, link):
    """There is no error of its own to look for."""
    run_processes(end_early_on_one, 2, tmp_path / "error", False, environment=link, timeout=30)
    text = (tmp_path / "error").read_text()
    assert "psum of float32[2] over data" in text and "before this call" in text
    if not link:
        assert "process 1 has ended before this call" in text and "Its own error" not in text


def test_call_after_a_process_that_ended_without_a_word_names_both_causes(tmp_path, link):
    with pytest.raises(RuntimeError):
        run_processes(end_early_on_one, 2, tmp_path / "error", True, environment=link, timeout=30)
    text = (tmp_path / "error").read_text()
    assert "Its own error is the one to look for" in text and "ended before this call" in text


# -- the wires -------------------------------------------------------------------------------------


def run_on_each_link(main):
    """Run on direct links, over gloo, and by NCCL's table, which is torch's own operations: gloo
    has most of them.
    """
    mesh = fs.make_mesh({"d": 2})
    world = ProcessWorld.of(mesh)
    results = []
    for kind in (None, Gloo, Nccl):
        if kind is not None:
            world._transports[0, 1] = kind(world._works, dist.group.WORLD, dist.get_rank(), 2)
        results.append(fs.run(main, mesh=mesh)[0])
    del world._transports[0, 1]
    return results


FLOATS = ["[nan, nan, nan, inf, 2.0, nan]", "[nan, nan, nan, -inf, -3.0, nan]"]
EXTREMES = [
    *3 * FLOATS, str([2**63, 2**63 + 7, 2**64 - 1]), str([1, 5, 2**63]), str([1, 2, 2**63 - 1]),
    str([-1, -2, -(2**63)]), "[1, 2, 0]", "[-1, -2, -1]", "[True, True, True]", "[True, True, True]",
]  # fmt: skip


@not_under_rules("it compares the links over gloo")
@ONE_LINK
@pytest.mark.filterwarnings("default")
def test_native_and_gloo_wires_equal_direct_ones(two):
    assert fs.run(extremes, mesh=fs.make_mesh({"d": 2})) == [EXTREMES] * 2
    assert two.run(run_on_each_link, extremes) == [[EXTREMES] * 3] * 2
    for results in two.run(run_on_each_link, each_collective):
        assert all(torch.equal(x, y) for xs in zip(*results, strict=True) for x, y in pairwise(xs))


def between_hosts():
    """Sum rows of numbers and send one, as if the processes' own backend took only tensors of
    devices.
    """
    mesh = fs.make_mesh({"d": 2})
    world = ProcessWorld.of(mesh)
    world._staged, world.device_type = False, "cuda"

    def main():
        group = require("here").group("d", "here")
        fs.send(torch.full((1,), float(group.index)), "d", to=1 - group.index)
        rows = reduce_rows(
            (torch.tensor([1.0, float(group.index)]), torch.ones(1)), group, call_site()
        )
        return *rows, fs.recv(torch.empty(1), "d", source=1 - group.index) + group.index

    try:
        rows = fs.run(main, mesh=mesh)[0]
    finally:
        world._staged, world.device_type = True, "cpu"
    messages = [next(numbers) for numbers in world._hosts[0, 1].messages.values()]
    return [row.tolist() for row in rows], [*world._hosts], messages


BESIDE_GLOO = not_under_rules(
    "its groups have no gloo beside them: test_under_nccl_rules has a device that does"
)


@BESIDE_GLOO
def test_host_tensors_beside_nccl_use_a_gloo_link(two):
    assert two.run(between_hosts) == [([[2.0, 1.0], [2.0], [1.0]], [(0, 1)], [1, 1])] * 2


def share_state_of_gpus():
    """Share the state of a generator of GPUs, which do not exist; then ask for a mesh of GPUs."""
    fs.make_mesh({"d": 2})
    before = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    states = [torch.full((16,), 1 + dist.get_rank(), dtype=torch.uint8)]
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = (
        lambda: states[0],
        lambda state: states.append(state.clone()),
    )
    try:
        process._share_random_state("cuda")
    finally:
        torch.cuda.get_rng_state, torch.cuda.set_rng_state = before
    with pytest.raises(fs.errors.MeshError, match=r'must be "cpu"; got "cuda"'):
        process.join("cuda", None)
    return states[-1].unique().tolist(), torch.default_generator.get_state()


def test_random_state_of_gpus_is_shared_and_cpu_world_refuses_gpus(two):
    (first, state), (second, same) = two.run(share_state_of_gpus)
    assert first == second == [1] and torch.equal(state, same)


def make_groups_unevenly():
    """Make groups in some processes only: of host tensors beside GPUs, and by torch; then groups of
    all.
    """
    mesh = fs.make_mesh({"pipe": 2, "data": 2}, timeout=8)
    world = ProcessWorld.of(mesh)
    rank = dist.get_rank()

    def host_sum(axis):
        group = require("here").group(axis, "here")
        world._staged, world.device_type = False, "cuda"
        try:
            return reduce_rows((torch.tensor([1.0 + rank]),), group, call_site())[0].item()
        finally:
            world._staged, world.device_type = True, "cpu"

    def main():
        sums: list[float] = []
        if fs.axis_index("pipe") == 0:
            dist.new_group([0, 1], use_local_synchronization=True)
            sums += [host_sum("data")]
        sums += [host_sum("pipe"), fs.psum(torch.tensor(1.0 + rank), ("data", "pipe")).item()]
        device_mesh = fs.mesh.to_device_mesh(mesh)
        limits = {
            group._get_backend(torch.device("cpu")).options._timeout
            for group in device_mesh.get_all_groups()
        }
        return sums, limits == {world.timeout}

    return fs.run(main, mesh=mesh)[0]


@BESIDE_GLOO
def test_groups_made_by_some_processes_only_do_not_hang():
    expected = [
        ([3.0, 4.0, 10.0], True),
        ([3.0, 6.0, 10.0], True),
        ([4.0, 10.0], True),
        ([6.0, 10.0], True),
    ]
    assert (
        run_processes(make_groups_unevenly, 4, environment={"FSHARD_DIRECT": "0"}, timeout=40)
        == expected
    )


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 1)])
def test_expanded_elements_are_packed_with_a_stride_of_one(shape):
    """The gradient of `x.sum()` for one element: torch refuses to view it as bytes."""
    x = torch.arange(1.0, 4.0).to(torch.bfloat16)[: shape[0]]
    x = x.unsqueeze(0).expand(1, -1).t() if len(shape) == 2 else x[:1].sum().expand(shape)
    assert x.is_contiguous() and x.stride(-1) != 1
    packed = joined([x], x.dtype)
    assert torch.equal(packed, x)
    assert packed.view(torch.uint8).shape == (*shape[:-1], 2 * shape[-1])


def test_buffer_pool_free_buffer_is_reused():
    first = empty((SMALLEST,), torch.uint8)
    address = first.data_ptr()
    view = first[5:]
    del first
    assert empty((SMALLEST,), torch.uint8).data_ptr() != address
    del view
    assert empty((SMALLEST // 4,), torch.float32).data_ptr() == address


X = torch.ones(4)
DIFFERENT = {  # calls of equal size on two processes
    "dtype": lambda first: fs.psum(X if first else X.int(), "d"),
    "shape": lambda first: fs.all_gather(X if first else X.reshape(2, 2), "d"),
    "collective": lambda first: fs.psum(X, "d") if first else fs.pmax(X, "d"),
    "broadcast": lambda first: [  # its source does not wait
        fs.broadcast(X if first else X[1:], "d"),
        fs.psum(X if first else X.int(), "d"),
    ],
    "message": lambda first: [
        fs.send(X if first else X[1:], "d", to=int(first)),
        fs.recv(X if first else X[1:], "d", source=int(first)),
    ],
}


def call_differently(kind):
    try:
        fs.run(
            lambda: DIFFERENT[kind](fs.axis_index("d") == 0), mesh=fs.make_mesh({"d": 2}, timeout=1)
        )
    except fs.errors.MismatchError as error:
        return str(error)


@pytest.mark.parametrize("kind", DIFFERENT)
def test_gloo_mismatched_calls_raise_without_mixing_bytes(kind):
    for text in run_processes(
        call_differently, 2, kind, environment={"FSHARD_DIRECT": "0"}, timeout=60
    ):
        assert text.count("test_process.py:") == 2


def read_on_one_process():
    """Read an unreduced sum on process 0 alone: the others are in their next sum meanwhile."""
    mesh = fs.make_mesh({"data": 2}, timeout=3)
    x = fs.device_put(torch.arange(8.0), fs.Layout(mesh, P("data")))
    total = x.sum()
    double = (2 * x).sum()
    dist.barrier()
    try:
        if fs.mesh.process_index() == 0:
            float(total)
        return float(double), float(total)
    except fs.errors.MismatchError as error:
        return str(error)


@not_under_rules("NCCL compares no calls")
def test_collective_on_one_process_names_both_lines(link):
    line = read_on_one_process.__code__.co_firstlineno + 9
    for text in run_processes(read_on_one_process, 2, environment=link):
        assert all(f"test_process.py:{number}" in text for number in (line, line + 1)), text


def send_without_recv(sizes):
    """Process 1 receives the first message only."""

    def main():
        for size in sizes if fs.axis_index("d") == 0 else ():
            fs.send(torch.ones(size), "d", to=1)
        return fs.recv(torch.ones(sizes[0]), "d", source=0) if fs.axis_index("d") else None

    fs.run(main, mesh=fs.make_mesh({"d": 2}, timeout=20))


def test_send_without_recv_raises_at_the_end(link):
    sizes = (1, 2) if link else (1, 2, 1 << 20)
    with pytest.raises(fs.errors.MismatchError, match="sent but never received:") as error:
        run_processes(send_without_recv, 2, sizes, environment=link)
    text = str(error.value)
    assert [f"float32[{size}]" in text for size in sizes] == [False] + [True] * (len(sizes) - 1)
    assert text.count("test_process.py:") == len(sizes) - 1
