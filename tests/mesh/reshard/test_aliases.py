"""Results of `device_put`, `reshard`, `unshard`, `from_local`, `shard_params` and `shard_map` have
their own memory.
"""

import pytest
import torch

import fshard as fs
from fshard import P

RESULTS = {
    "device_put": lambda x: fs.device_put(x, x.layout),
    "device_put elsewhere": lambda x: fs.device_put(x, fs.Layout(x.mesh, P())),
    "reshard": lambda x: fs.reshard(x, x.layout),
    "reshard to a slice": lambda x: fs.reshard(x, fs.Layout(x.mesh, P.flat("data"))),
    "shard_params": lambda x: fs.shard_params([x], x.spec, mesh=x.mesh)[0],
    "frozen": lambda x: fs.shard_params([x], x.spec, mesh=x.mesh, frozen="**")[0],
    "shard_map": lambda x: fs.shard_map(
        lambda shard: shard, mesh=x.mesh, out_specs=x.spec.replace(shape=x.shape)
    )(x),
}


def loss_fn(params, x):
    return (x @ params["w"] + params["b"]).square().mean()


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("spec", [P(), P("data"), P.flat("data")], ids=str)
@pytest.mark.parametrize("name", RESULTS)
def test_result_keeps_its_values_when_each_shard_of_the_source_is_written(name, spec, devices):
    mesh = fs.make_mesh({"data": devices})
    x = fs.device_put(torch.arange(8.0), fs.Layout(mesh, spec))
    result = RESULTS[name](x)
    for shard in x.shards:
        shard.fill_(-1)
    assert fs.unshard(result).tolist() == torch.arange(8.0).tolist()
    for shard in result.shards:
        shard.fill_(-2)
    assert fs.unshard(x).tolist() == [-1.0] * 8


@pytest.mark.parametrize("spec", [P(), P("data"), P.flat("data"), P(at={"data": 1})], ids=str)
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_unsharded_tensor_is_written_and_the_array_keeps_its_values(spec, devices):
    if spec.at and devices == 1:
        pytest.skip("there is no second device")
    mesh = fs.make_mesh({"data": devices})
    x = fs.device_put(torch.arange(6.0), fs.Layout(mesh, spec))
    fs.unshard(x).add_(5)
    assert fs.unshard(x).tolist() == torch.arange(6.0).tolist()
    if spec == P():
        assert all(torch.equal(shard, torch.arange(6.0)) for shard in x.shards)


def test_numpy_array_of_an_array_is_a_copy():
    x = fs.device_put(torch.zeros(3), fs.Layout(fs.make_mesh({"data": 2}), P()))
    x.numpy()[:] = 1
    assert [shard.tolist() for shard in x.shards] == [[0.0] * 3] * 2


def test_from_local_copies_the_shards_it_is_given():
    mesh = fs.make_mesh({"data": 2})
    shard = torch.zeros(2)
    x = fs.from_local(lambda data: shard, fs.Layout(mesh, P("data")))
    shard.add_(1)
    assert fs.unshard(x).tolist() == [0.0] * 4
    x.shards[0].add_(1)
    assert fs.unshard(x).tolist() == [1.0, 1.0, 0.0, 0.0]


def test_ties_stay_ties_in_copies():
    mesh = fs.make_mesh({"data": 2})
    w = torch.ones(4)
    params = fs.shard_params({"a": w, "b": w}, P(), mesh=mesh)
    for result in (
        fs.shard_params(params, P(), mesh=mesh),
        fs.reshard(params, fs.Layout(mesh, P())),
        fs.device_put(params, fs.Layout(mesh, P())),
        fs.unshard(params),
    ):
        assert result["a"] is result["b"]
        assert result["a"] is not params["a"]


def test_leaves_without_a_layout_are_the_same_arrays():
    mesh = fs.make_mesh({"data": 2})
    tree = {"a": fs.device_put(torch.ones(4), fs.Layout(mesh, P())), "b": torch.ones(2)}
    result = fs.reshard(tree, {"a": None, "b": None})
    assert result["a"] is tree["a"]
    assert fs.unshard(tree)["b"] is tree["b"]


def test_copies_of_arrays_pass_gradients_on():
    mesh = fs.make_mesh({"data": 2})
    x = fs.device_put(torch.ones(4), fs.Layout(mesh, P())).requires_grad_()
    y = fs.unshard(fs.reshard(x, x.layout))
    (y * torch.arange(4.0)).sum().backward()
    assert fs.unshard(x.grad).tolist() == [0.0, 1.0, 2.0, 3.0]
    w = torch.ones(4, requires_grad=True)
    fs.unshard(fs.device_put(w, fs.Layout(mesh, P()))).sum().backward()
    assert w.grad.tolist() == [1.0] * 4


def test_array_made_of_a_tensor_with_gradient_shares_no_memory():
    w = torch.zeros(4, requires_grad=True)
    x = fs.device_put(w, fs.Layout(fs.make_mesh({"data": 2}), P()))
    assert len({shard.data_ptr() for shard in (w, *x.shards)}) == 3


def test_device_put_under_vmap_and_grad_is_the_identity():
    mesh = fs.make_mesh({"data": 2})
    layout = fs.Layout(mesh, P())
    gradient = torch.func.grad(lambda w: fs.unshard(fs.device_put(w, layout)).square().sum())
    assert gradient(torch.arange(3.0)).tolist() == [0.0, 2.0, 4.0]


def test_memory_kind_of_a_copy_is_that_of_the_array():
    mesh = fs.make_mesh({"data": 2})
    x = fs.device_put(torch.ones(8), fs.Layout(mesh, P("data"), "host"))
    with fs.memory.limit() as used:
        y = fs.reshard(x, x.layout)
    assert y.layout.memory == "host"
    assert (used.peak("host"), used.peak("device")) == (32, 0)


def test_constrained_array_of_a_written_array_raises():
    x = fs.device_put(torch.ones(4), fs.Layout(fs.make_mesh({"data": 2}), P()))
    same = fs.array.constrain(x, P())
    sliced = fs.array.constrain(x, P("data"))
    x.add_(1)
    for y in (same, sliced):
        with pytest.raises(fs.errors.LayoutError, match="view of an array that was changed"):
            fs.unshard(y)
    with pytest.raises(fs.errors.LayoutError, match="must write to an array"):
        fs.array.constrain(x, P()).add_(1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_snapshots_keep_their_values_in_all_stages(devices, stage):
    torch.manual_seed(0)
    mesh = fs.make_mesh({"data": devices})
    full = {"w": torch.randn(5, 3), "b": torch.randn(3)}
    rules = fs.fsdp("data") if stage == 3 else P()
    params = fs.shard_params(full, rules, mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.1), mesh=mesh, axis="data", stage=stage)
    state = opt.init(params)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=True)

    snapshot = fs.unshard(params)
    target = fs.device_put(params, fs.mesh.layouts(params))
    reference = fs.shard_params(params, rules, mesh=mesh, frozen="**")
    for _ in range(2):
        params, state, _ = step(params, state, torch.ones(6, 5))

    for kept in (snapshot, fs.unshard(target), fs.unshard(reference)):
        assert all(torch.equal(kept[name], full[name]) for name in full)
    assert not torch.equal(fs.unshard(params)["w"], full["w"])
