"""Memory kinds of layouts: where shards are, what is copied, and what the ledger counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.memory import memory_of
from fshard.mesh.layout import kinds
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
