"""Checkpoints of what is in host memory or on disk: from every kind to every kind, and between
plugins; bits are equal.
"""

from functools import cache
from itertools import product

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten
from tests.booster.loops import Loop
from tests.memory import offloaded
from tests.memory.offloaded import OPTIMIZERS, arrays_of, batch, is_same, memories, network, tensors

KINDS = ("device", "host", "disk")
PLUGINS = {**offloaded.PLUGINS, "ddp": (fs.DDPPlugin, {"data": 2}, "device")}


def arrays_in(memory, n, scale=1):
    """Return arrays on a mesh in a memory: flat shards of odd sizes, and dims; of several dtypes."""
    flat, split = (
        fs.Layout(fs.make_mesh({"data": n}), spec, memory) for spec in (P.flat("data"), P("data"))
    )
    draw = torch.Generator().manual_seed(1)
    values = {
        "w": torch.randn(7, 3, generator=draw),
        "half": torch.randn(8, 2, generator=draw).bfloat16(),
    }
    values["count"] = torch.arange(8) + 1
    layouts = {"w": flat, "half": split, "count": split}
    return {name: fs.device_put(x * scale, layouts[name]) for name, x in values.items()}


def saved_as_file(folder, tree):
    fs.export(folder / "x", tree, to="safetensors")
    return lambda target: fs.restore(folder / "x", target)


def saved_in_the_background(folder, tree):
    checkpoints = fs.Checkpoints(folder)
    checkpoints.save(1, tree, wait=False)
    for x in flatten(tree)[0]:  # as the next step does
        for shard in x.shards:
            shard.zero_()
    return checkpoints.restore


def saved(folder, tree):
    fs.save(folder / "x", tree)
    return lambda target: fs.restore(folder / "x", target)


@pytest.mark.parametrize(("source", "target"), [*product(KINDS, KINDS)])
@pytest.mark.parametrize("save", [saved, saved_in_the_background, saved_as_file])
def test_arrays_are_restored_in_the_memory_of_the_target(
    disk_folder, tmp_path, source, target, save
):
    tree = arrays_in(source, 4)
    into = arrays_in(target, 2, scale=0)
    expected = fs.unshard(tree)
    shards = [x.data_ptr() for leaf in flatten(into)[0] for x in leaf.shards]
    with fs.memory.limit() as used:
        result = save(tmp_path, tree)(into)
    assert memories(result) == {target}
    assert [x.data_ptr() for leaf in flatten(result)[0] for x in leaf.shards] == shards
    assert all(torch.equal(x, expected[name]) for name, x in fs.unshard(result).items())
    assert "device" in (source, target) or save is saved_as_file or used.peak("device") == 0


# -- plugins ---------------------------------------------------------------------------------------

LOOPS = {  # of the names of plugins, and their offload
    "ddp": ("ddp", {}),
    "zero 1 on disk": ("zero 1", {"offload": "disk"}),
    "zero 2 on the host": ("zero 2", {"offload": "host"}),
    "fsdp": ("fsdp", {}),
    "fsdp on the host": ("fsdp", {"offload": "host"}),
    "fsdp on disk": ("fsdp", {"offload": "disk"}),
    "tensor on disk": ("hybrid 3", {"offload": "disk"}),
    "stages on the host": ("stages 3", {"offload": "host"}),
}
FSDP = [name for name in LOOPS if "fsdp" in name]
PAIRS = {
    *product(FSDP, FSDP),
    *zip(LOOPS, [*LOOPS][1:] + [*LOOPS][:1], strict=True),
    *zip(LOOPS, [*LOOPS][::-1], strict=True),
}


def trained(name, folder, optimizer, count, *, loads=False, keeps_state=True):
    """Return the full state of each device after steps, which begin by loading or end by saving;
    and the arrays.
    """
    plugin, offload = LOOPS[name]
    make, axes, _ = PLUGINS[plugin]

    def main():
        plugin = make(**(offload if keeps_state else {}))
        loop = Loop(network, plugin, OPTIMIZERS[optimizer], criterion=nn.functional.mse_loss)
        if loads:
            with torch.no_grad():
                for x in flatten((loop.model.params, loop.opt.state))[0]:
                    for shard in x.shards if isinstance(x, fs.Sharded) else ():
                        shard.fill_(7)
            loop.booster.load(folder, loop.model, loop.opt)
        for step in range(count):
            loop.step(*map(loop.part, batch(step)))
        if not loads:
            loop.booster.save(folder, loop.model, loop.opt)
        return (loop.state(), loop.opt.state_dict()), arrays_of(loop)

    return fs.run(main, mesh=fs.make_mesh(axes))


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    """Return a function that trains and saves, once each: from the loop and the optimizer to the
    folder and the state.
    """

    @cache
    def save(name, optimizer):
        folder = tmp_path_factory.mktemp("checkpoint") / "x"
        return folder, trained(name, folder, optimizer, 2)

    return save


def assert_restored(save, source, target, optimizer):
    folder, expected = save(source, optimizer)
    with fs.memory.limit():
        result = trained(target, folder, optimizer, 0, loads=True)
    full = tensors(expected[0][0])
    for values, (params, state) in result:
        assert all(torch.equal(x, y) for x, y in zip(tensors(values), full, strict=True))
        plugin = LOOPS[target][0]
        kind = LOOPS[target][1].get("offload", "device")
        assert memories(state) == {kind}
        assert memories(params) == {kind if PLUGINS[plugin][2] == "host" else "device"}
    continued = trained(target, folder, optimizer, 2, loads=True)
    assert is_same(continued, trained(target, folder, optimizer, 2, loads=True, keeps_state=False))


@pytest.mark.parametrize(("source", "target"), sorted(PAIRS))
def test_loops_continue_under_other_plugins(disk_folder, save, source, target):
    """With equal state in the memory of the target, and the next steps of the target without
    offload.
    """
    assert_restored(save, source, target, "adamw")


@pytest.mark.parametrize(("source", "target"), [*zip(FSDP, FSDP[1:] + FSDP[:1], strict=True)])
def test_state_of_an_own_class_is_restored_in_its_memory(disk_folder, save, source, target):
    """That of a class, which the target has not made yet."""
    assert_restored(save, source, target, "own class")


@pytest.mark.parametrize("optimizer", ["adamw", "own class"])
@pytest.mark.parametrize("name", ["zero 2 on the host", "fsdp on disk"])
def test_state_dicts_are_loaded_into_the_memory_of_the_state(disk_folder, save, name, optimizer):
    (_, ((expected, _), *_)), (plugin, offload) = save("ddp", optimizer), LOOPS[name]
    memory = offload["offload"] if PLUGINS[plugin][2] == "host" else "device"

    def main():
        loop = Loop(network, PLUGINS[plugin][0](**offload), OPTIMIZERS[optimizer])
        for x, values in zip((loop.model, loop.opt), expected, strict=True):
            x.load_state_dict(values)
        assert [*map(memories, arrays_of(loop))] == [{memory}, {offload["offload"]}]
        return loop.state(), loop.opt.state_dict()

    for values in fs.run(main, mesh=fs.make_mesh(PLUGINS[plugin][1])):
        assert all(
            torch.equal(x, y) for x, y in zip(tensors(values), tensors(expected), strict=True)
        )
