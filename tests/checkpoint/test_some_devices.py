"""Checkpoints of arrays on a mesh of some devices, against the values that were saved."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fshard as fs
from fshard import P
from fshard.mesh.spmd.scope import here
from tests.helpers.processes import Processes

WORLD = {"device": 4}
WRITERS, READERS = (3, 1), (0, 3)
X, Y = torch.arange(8.0), torch.arange(5.0)


@pytest.fixture(scope="module")
def pool():
    with Processes(4) as processes:
        yield processes


def everywhere(pool, folder, function):
    """Return what a function of a folder returns on virtual devices and on processes."""
    folders = [folder / "virtual", folder / "processes"]
    virtual = fs.run(function, folders[0], mesh=fs.make_mesh(WORLD))
    return [virtual, pool.run(function, folders[1])]


def number_of_caller():
    scope = here()
    return fs.mesh.process_index() if scope is None else scope.number


def wait_for_others(folder, name):
    """Let processes that write wait until all others have run the calls: they must not wait."""
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    number = number_of_caller()
    keys = [f"{folder}/{name}/{other}" for other in range(4) if other not in WRITERS]
    if store is not None and number in WRITERS:
        store.wait(keys, timedelta(seconds=30))

    def has_run():
        if store is not None and number not in WRITERS:
            store.set(f"{folder}/{name}/{number}", "yes")

    return has_run


def tree_on(mesh, *, zeros=False):
    scale = 0 if zeros else 1
    return {
        "x": fs.device_put(X * scale, fs.Layout(mesh, P("data"))),
        "y": fs.device_put(Y * scale, fs.Layout(mesh, P.flat("data"))),
    }


def saved_and_restored(folder):
    fs.make_mesh(WORLD)
    writers = fs.make_mesh({"data": 2}, devices=WRITERS)
    readers = fs.make_mesh({"data": 2}, devices=READERS)
    tree = tree_on(writers)
    total = fs.unshard(tree["y"].sum())
    has_run = wait_for_others(folder, "save")
    if writers.is_member:
        torch.manual_seed(WRITERS.index(number_of_caller()))
    fs.save(folder / "one", {**tree, "total": total, "n": 3, "random": fs.RandomState()})
    fs.export(folder / "x.safetensors", {"x": tree["x"]}, to="safetensors")
    has_run()
    fs.broadcast_to(None, source=writers)  # until the folder is there

    target = tree_on(readers, zeros=True)
    target |= {"total": torch.zeros(()), "n": 0, "random": fs.RandomState()}
    target = fs.restore(folder / "one", target)
    draw = torch.rand(()).item()
    y = fs.restore(folder / "one", P(), only="y", mesh=readers)
    exported = fs.restore(folder / "x.safetensors")["x"]
    values = fs.unshard([target["x"], target["y"], y])
    return values, float(target["total"]), target["n"], exported, draw


def test_restore_on_other_devices_has_the_values_that_some_have_saved(pool, tmp_path):
    for results in everywhere(pool, tmp_path, saved_and_restored):
        for number, (values, total, n, exported, draw) in enumerate(results):
            assert (total, n) == (float(Y.sum()), 3)
            assert torch.equal(exported, X)
            if number not in READERS:
                assert values == [None] * 3
                continue
            for value, expected in zip(values, (X, Y, Y), strict=True):
                assert torch.equal(value, expected)
            seed = READERS.index(number)  # each device has the state of the one at its place
            generator = torch.Generator().manual_seed(seed)
            assert draw == torch.rand((), generator=generator).item()


def kept(folder):
    fs.make_mesh(WORLD)
    mesh = fs.make_mesh({"data": 2}, devices=WRITERS)
    has_run = wait_for_others(folder, "kept")
    checkpoints = fs.Checkpoints(folder, keep=1, best="loss")
    for step, loss in enumerate([0.5, 0.1, 0.3, 0.4]):
        x = fs.device_put(X + step, fs.Layout(mesh, P("data")))
        metrics = {"loss": loss if mesh.is_member else None}
        checkpoints.save(step, {"x": x}, wait=step % 2 == 1, metrics=metrics)
    checkpoints.wait()
    has_run()
    fs.broadcast_to(None, source=mesh)
    target = fs.device_put(torch.zeros(8), fs.Layout(mesh, P("data")))
    return checkpoints.steps, fs.unshard(checkpoints.restore({"x": target})["x"])


def test_checkpoints_of_some_devices_keep_the_best_and_the_last(pool, tmp_path):
    for results in everywhere(pool, tmp_path, kept):
        for number, (steps, x) in enumerate(results):
            assert steps == [1, 3]
            if number in WRITERS:
                assert torch.equal(x, X + 3)
            else:
                assert x is None


def save_on_two_meshes(folder):
    first = fs.make_mesh({"data": 2}, devices=(0, 1))
    second = fs.make_mesh({"data": 2}, devices=(2, 3))
    fs.save(folder / "first", tree_on(first))
    fs.save(folder / "second", tree_on(second))
    fs.broadcast_to(None, source=first)
    fs.broadcast_to(None, source=second)
    return [fs.restore(folder / name)["x"] for name in ("first", "second")]


def test_two_meshes_save_at_the_same_time(pool, tmp_path):
    for results in everywhere(pool, tmp_path, save_on_two_meshes):
        for restored in results:
            assert all(torch.equal(x, X) for x in restored)


def save_a_tree_of_two_meshes(folder):
    trees = [tree_on(fs.make_mesh({"data": 2}, devices=(0, 1)))]
    trees.append(tree_on(fs.make_mesh({"data": 2}, devices=(1, 0))))
    fs.save(folder, trees)


def test_save_of_arrays_on_two_meshes_raises(tmp_path):
    with pytest.raises(fs.errors.CheckpointError, match="must be on the same devices"):
        fs.run(save_a_tree_of_two_meshes, tmp_path, mesh=fs.make_mesh({"device": 2}))


def boosted(folder):
    mesh = fs.make_mesh({"data": 2}, devices=WRITERS)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    booster = fs.Booster(fs.FSDPPlugin(mesh=mesh))
    model, optimizer, *_ = booster.boost(model, optimizer)
    if mesh.is_member:
        booster.backward(model(torch.ones(2, 4)).square().mean(), optimizer)
        optimizer.step()
    before = model.state_dict()
    booster.save(folder, model, optimizer)
    booster.save_model(model, folder / "model")
    fs.broadcast_to(None, source=mesh)
    booster.load(folder, model, optimizer)
    return before, model.state_dict(), sorted(os.listdir(folder / "model"))


def test_booster_on_some_devices_saves_and_loads(tmp_path):
    results = fs.run(boosted, tmp_path, mesh=fs.make_mesh(WORLD))
    for number, (before, after, files) in enumerate(results):
        assert len(files) == 5  # of two devices a file and a manifest each, and the index
        for name, value in before.items():
            if number in WRITERS:
                assert torch.equal(value, after[name])
            else:
                assert value is after[name] is None


def test_save_from_outside_of_numbered_devices_restores(tmp_path):
    mesh = fs.make_mesh({"data": 2}, devices=(5, 4))
    fs.save(tmp_path, {**tree_on(mesh), "random": fs.RandomState()})
    wider = fs.make_mesh({"data": 4}, devices=(5, 4, 0, 1))
    target = {**tree_on(wider, zeros=True), "random": fs.RandomState()}
    restored = fs.restore(tmp_path, target)
    assert torch.equal(fs.unshard(restored["x"]), X)


def restored_while_another_mesh_saves(folder):
    """Save on processes 3 and 1, and restore without waiting on 0 and 3: 3 has the new version, 0 the last."""
    writers = fs.make_mesh({"data": 2}, devices=WRITERS)
    readers = fs.make_mesh({"data": 2}, devices=READERS)
    checkpoints = fs.Checkpoints(folder)
    checkpoints.save(1, tree_on(writers))
    fs.broadcast_to(None, source=writers)
    target = tree_on(readers, zeros=True)
    if number_of_caller() in WRITERS:
        dist.distributed_c10d._get_default_store().wait([f"{folder}/read"], timedelta(seconds=30))
        checkpoints.save(2, tree_on(writers))
    try:
        if number_of_caller() == 0:
            assert checkpoints.latest == 1
            dist.distributed_c10d._get_default_store().set(f"{folder}/read", "yes")
        checkpoints.restore(target, step=1 if number_of_caller() == 0 else None)
    except fs.errors.CheckpointError as error:
        return str(error)
    return ""


def test_restore_of_two_versions_on_one_mesh_raises_on_all(pool, tmp_path):
    texts = pool.run(restored_while_another_mesh_saves, tmp_path / "folder")
    for number in READERS:
        assert "have read different checkpoints" in texts[number]
        assert "fs.broadcast_to(None, source=" in texts[number]
    assert [texts[number] for number in (1, 2)] == ["", ""]
