"""Memory kinds of layouts: where shards are, what is copied, and what the ledger counts."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard import P, optim
from fshard.memory import memory_of
from fshard.mesh.layout import kinds
from fshard.mesh.layout.sharded import in_memory
from fshard.testing import strategies

MEMORIES = ("device", "host", "disk")


@pytest.fixture(autouse=True, scope="module")
def files_in_memory():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(
            kinds.makers, "disk", lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype)
        )
        yield


def memories(x):
    return {memory_of(shard) for shard in x.shards}


@given(st.data(), st.sampled_from(MEMORIES), st.sampled_from(MEMORIES))
def test_reshard_between_memories_copies_and_keeps_the_value(data, before, after):
    mesh = data.draw(strategies.meshes())
    shape = data.draw(strategies.shapes_for(mesh))
    start, end = (data.draw(strategies.layouts(mesh, shape)) for _ in range(2))
    x = torch.randn(shape)
    y = fs.device_put(x, start.with_memory(before))
    z = fs.reshard(y, end.with_memory(after))
    torch.testing.assert_close(fs.unshard(z), x)
    assert fs.typeof(z).memory == after and memories(y) == {before} and memories(z) == {after}
    if before != after:
        pointers = [
            {shard.data_ptr() for shard in array.shards if shard.numel()} for array in (y, z)
        ]
        assert pointers[0].isdisjoint(pointers[1])


def test_host_memory_beside_a_gpu_is_page_locked_at_its_size(monkeypatch):
    """As torch's own page-locked memory is not: it has the next power of two."""
    made = []
    monkeypatch.setitem(
        kinds.makers,
        "host",
        lambda shape, dtype: made.append(shape) or torch.empty(shape, dtype=dtype),
    )
    empty = kinds.empty_in("host", (5,), torch.float32, "cuda")
    copy = kinds.copy_in("host", torch.arange(3), "cuda")
    assert (
        made == [(5,), (3,)]
        and copy.tolist() == [0, 1, 2]
        and {memory_of(empty), memory_of(copy)} == {"host"}
    )
    kinds.empty_in("host", (5,), torch.float32, "cpu")
    assert len(made) == 2


def test_shard_is_copied_to_page_locked_memory_at_its_size_from_any_other(monkeypatch):
    """From a GPU, and from memory of the CPU that CUDA would copy slowly; what is locked stays."""
    made = []

    def empty_on_host(shape, dtype):
        made.append(tuple(shape))
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setitem(kinds.makers, "host", empty_on_host)
    mesh = fs.Mesh((("data", 1),), "virtual", "cuda")
    x = torch.arange(3.0)
    copy = in_memory(x, mesh, "host")
    assert made == [(3,)] and torch.equal(copy, x) and copy is not x

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self is copy)
    assert in_memory(copy, mesh, "host") is copy
    assert made == [(3,)]


@pytest.mark.parametrize("memory", MEMORIES)
def test_from_local_copies_a_shard_within_its_memory(memory):
    layout = fs.Layout(fs.make_mesh({"data": 1}), P("data"), memory)
    shard = kinds.copy_in(memory, torch.arange(4.0), "cpu")
    x = fs.from_local(shard, layout)
    assert memories(x) == {memory} and x.shards[0].data_ptr() != shard.data_ptr()
    assert torch.equal(fs.unshard(x), shard)


@pytest.mark.parametrize("donate", [False, True])
def test_mesh_of_cpus_beside_a_gpu_in_use_has_no_host_memory_of_its_own(monkeypatch, donate):
    """A process that uses CUDA may train on its CPUs: plain tensors are where their mesh computes."""

    class Torch:
        cuda = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 0)

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(kinds, "torch", Torch())
    mesh = fs.make_mesh({"data": 2})
    x = torch.ones(4, 3)
    assert in_memory(x, mesh, "device") is x
    assert [memory_of(x, kind) for kind in ("cpu", "cuda", None)] == ["device", "host", "host"]
    with fs.use_mesh(mesh):
        assert memory_of(x) == "device"

    plain_kinds = len(kinds._kinds)
    assert optim.apply_updates([x], [x])[0].sum() == 24
    with fs.use_mesh(mesh), fs.memory.limit() as used:
        opt = fs.partition_optimizer(optim.adamw(0.1), mesh=mesh, axis="data", stage=3)
        params = fs.shard_params({"w": torch.ones(3)}, fs.fsdp("data"), mesh=mesh)
        step = fs.train_step(
            lambda p, x: (x @ p["w"]).sum(), opt, mesh=mesh, batch=P("data"), donate=donate
        )
        state = opt.init(params)
        for _ in range(2):
            params, state, _ = step(params, state, torch.ones(4, 3))
    assert len(kinds._kinds) == plain_kinds and used.peak("device") > 0


@pytest.mark.parametrize("runtime", ["virtual", "abstract"])
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (P("data"), {("host", "disk"): 16}),
        (P(None, "data"), {("host", "device"): 16, ("device", "disk"): 16}),
        (P(), {("host", "device"): 16, ("device", "disk"): 32}),
    ],
)
def test_ledger_counts_moves_beside_the_network(runtime, spec, expected):
    mesh = fs.make_mesh({"data": 2}, runtime=runtime)
    layout = fs.Layout(mesh, P("data"))
    x = fs.device_put(torch.ones(2, 4), layout.with_memory("host"))
    with fs.ledger() as comm, fs.ledger() as network:
        fs.reshard(x, fs.Layout(mesh, spec, "disk"))
    assert {
        pair: comm.moved(*pair)
        for pair in [(a, b) for a in MEMORIES for b in MEMORIES]
        if comm.moved(*pair)
    } == expected
    with fs.ledger() as network:
        fs.reshard(fs.device_put(torch.ones(2, 4), layout), fs.Layout(mesh, spec))
    assert comm.bytes() == network.bytes() and network.moves == {}
    assert ("host to disk" in str(comm)) == (("host", "disk") in expected)


def test_moved_of_an_unknown_memory_raises():
    with fs.ledger() as comm, pytest.raises(ValueError, match="got 'gpu'"):
        comm.moved("device", "gpu")


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ("host", "host host host"),
        ({"blocks.*.w": "disk", "**": "host"}, "disk disk host"),
        ({"blocks[1].w": "host", "blocks.**": "disk", "**": "device"}, "disk host device"),
    ],
)
def test_shard_params_takes_a_kind_or_patterns(memory, expected):
    mesh = fs.make_mesh({"data": 2})
    params = {"blocks": [{"w": torch.ones(3, 3)}, {"w": torch.ones(3)}], "head": torch.ones(2)}
    params = fs.shard_params(
        params, fs.fsdp("data", unit=("blocks[*]", "head")), mesh=mesh, memory=memory
    )
    leaves = [params["blocks"][0]["w"], params["blocks"][1]["w"], params["head"]]
    assert (
        [leaf.layout.memory for leaf in leaves]
        == expected.split()
        == [*map(memory_of, (x.shards[0] for x in leaves))]
    )
    assert [leaf.layout.unit for leaf in leaves] == ["blocks[0]", "blocks[1]", "head"]


def test_lazy_layers_are_drawn_into_their_memory():
    mesh = fs.make_mesh({"data": 2})
    model = fs.lazy(lambda: torch.nn.Linear(3, 2))
    drawn = [
        fs.shard_params(model, fs.fsdp("data"), mesh=mesh, seed=0, memory=memory)
        for memory in ("device", "host")
    ]
    assert memories(drawn[1]["weight"]) == {"host"}
    assert torch.equal(*[fs.unshard(params["weight"]) for params in drawn])


def test_pictures_show_the_kind(capsys):
    mesh = fs.make_mesh({"data": 2})
    x = fs.device_put(torch.ones(4), fs.Layout(mesh, P("data"), "disk"))
    assert str(fs.typeof(x)) == "f32[4@data]{disk}"
    fs.visualize(x)
    picture = capsys.readouterr().out
    assert "disk 0" in picture and "disk 1" in picture and "on disk" in picture
    fs.visualize({"x": x, "y": torch.ones(1)})
    assert "8 B per device on disk" in capsys.readouterr().out


def test_storages_of_a_kind_are_forgotten_with_their_tensors():
    x = kinds.empty_in("host", (4,), torch.float32, "cpu")
    count = len(kinds._kinds)
    del x
    assert len(kinds._kinds) == count - 1
