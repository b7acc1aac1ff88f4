"""Optimizer state on the host and on disk: bits equal those of state on the device, bytes those of
the table.
"""

from itertools import permutations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P, optim
from fshard.errors import OptimizerError
from fshard.memory import state as memory_state
from fshard.memory.transfers import stress
from fshard.mesh.layout.kinds import memory_of
from fshard.optim.leaves import Leaves
from fshard.optim.torch_optim.instances import optimizer_source
from tests.helpers.sampled import examples
from tests.memory.training import CASE, OPTIMIZERS, bits, same_bits, trained
from tests.optim.helpers.optimizers import ALL, FOREIGN
from tests.optim.helpers.torch_classes import Factored, Lion

PLACES = [("host", "device"), ("host", "host"), ("disk", "device"), ("disk", "host")]
OPTIMIZERS |= {
    name: opt for name, opt in ALL.items() if opt.step is not None or name.startswith("chain")
}
OPTIMIZERS |= {cls.__name__: optim.from_torch(cls, **options) for cls, options in FOREIGN.items()}
CASES = st.fixed_dictionaries(
    {
        "name": st.sampled_from(sorted(OPTIMIZERS)),
        "n": st.sampled_from([1, 2, 4]),
        "stage": st.integers(0, 3),
        "half": st.booleans(),
        "clips": st.booleans(),
        "fp16": st.booleans(),
        "microbatches": st.sampled_from([1, 3]),
    }
)


@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CASES, st.sampled_from(PLACES))
def test_bits_equal_those_of_state_on_the_device(disk_folder, case, place):
    """Stages, optimizers, clipping, loss scaling, masters; with NaN in every buffer that was not
    waited for.

    Inside a limit, operations on tensors in several memories raise as on a GPU.
    """
    expected = trained(**case)
    with stress(poison=True), fs.memory.limit():
        result = trained(*place, **case)
    assert same_bits(result, expected)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("donate", [False, True])
def test_state_of_mixed_dtypes_equals_state_on_the_device(disk_folder, place, donate):
    """Leaves of one group have one buffer, in which each keeps its dtype, whatever its size."""
    if place[0] == "disk" and not donate:
        pytest.skip("state on disk is updated in place")
    dtypes = [torch.float64, torch.bfloat16, torch.float32, torch.float16] * 10  # several a group
    mesh = fs.make_mesh({"data": 2})
    draw = torch.Generator().manual_seed(0)
    values = {}
    for index, dtype in enumerate(dtypes):
        values[str(index)] = torch.randn(3 + index % 5, generator=draw).to(dtype)

    def after(**options):
        params = fs.shard_params(values, P(), mesh=mesh)
        opt = fs.partition_optimizer(optim.adamw(0.1), mesh=mesh, axis="data", stage=2, **options)

        def loss_fn(params, x):
            return sum((p.float() - 1).square().sum() for p in params.values()) * x.mean()

        step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=donate)
        state = opt.init(params)
        for _ in range(3):
            params, state, _ = step(params, state, torch.ones(4))
        return [fs.unshard(x) for x in (*params.values(), *state["exp_avg"].values())]

    expected = after()
    with stress(poison=True):
        results = after(state_memory=place[0], update_on=place[1])
    assert [x.dtype for x in results] == [x.dtype for x in expected]
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("update_on", ["device", "host"])
@pytest.mark.parametrize("donate", [False, True])
def test_state_that_changes_its_dtype_keeps_it_on_the_host(update_on, donate):
    """An own update may return state of a wider dtype: it is stored so, not rounded to that of
    before.
    """

    def update(grads, state, params):
        state = {name: state[name].double() + grads[name].double() / 3 for name in grads}
        return {name: -x.to(params[name]) for name, x in state.items()}, state

    own = optim.Optimizer(
        lambda params: {name: torch.zeros_like(x) for name, x in params.items()},
        update,
        sharding="flat",
    )
    mesh = fs.make_mesh({"data": 2})

    def after(**options):
        params = fs.shard_params({"w": torch.linspace(0, 1, 7)}, P(), mesh=mesh)
        opt = fs.partition_optimizer(own, mesh=mesh, axis="data", stage=1, **options)

        def loss_fn(params, x):
            return params["w"].square().sum() * x.mean()

        step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=donate)
        state = opt.init(params)
        for _ in range(3):
            params, state, _ = step(params, state, torch.ones(4))
        return fs.unshard(params["w"]), fs.unshard(state["w"]), state["w"]

    expected = after()
    result = after(state_memory="host", update_on=update_on)
    assert result[1].dtype == torch.float64 and result[2].layout.memory == "host"
    assert all(map(torch.equal, result[:2], expected[:2]))


@pytest.mark.parametrize("place", [("host", "device"), ("disk", "host")])
def test_a_missing_wait_changes_bits(disk_folder, monkeypatch, place):
    expected = trained(**CASE)
    monkeypatch.setattr(memory_state._Group, "tensors", lambda group: group._columns)
    with stress(poison=True):
        result = trained(*place, **CASE)
    assert not same_bits(result, expected)


BYTES = {  # name -> bytes of a parameter and of its state; if that has masters
    "sgd, nesterov": (4, 4, False),
    "adamw": (4, 12, False),  # with amsgrad
    "with_master_weights": (2, 12, True),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("place", PLACES)
def test_bytes_are_those_of_the_table(disk_folder, name, place, stage):
    """Of one step of 3 backwards; in stages 1 to 3 state is sharded, in stages 2 and 3 each
    backward reduces gradients.
    """
    (p, s, has_masters), (memory, update_on) = BYTES[name], place
    reductions = 3 if stage > 1 else 1
    for n in (1, 2, 4):
        sizes = [25] * 5 + [5, 1]
        local = sum(-(-size // n) for size in sizes) if stage else sum(sizes)  # of the first device
        case = {"name": name, "n": n, "stage": stage, "half": p == 2, "microbatches": 3}
        *_, comm = trained(*place, **CASE | case, steps=1)
        g = (
            4 if p == 2 and reductions == 1 else p
        )  # 16-bit gradients of several slices are reduced in 32 bits
        from_device = reductions * g + (0 if has_masters and memory == "host" else p)
        on_disk = s if memory == "disk" else 0
        assert {
            pair: comm.moved(*pair) for pair in permutations(("device", "host", "disk"), 2)
        } == {
            ("host", "device"): (s if update_on == "device" else p) * local,
            ("device", "host"): (s if update_on == "device" else from_device) * local,
            ("disk", "host"): on_disk * local,
            ("host", "disk"): on_disk * local,
            ("device", "disk"): 0,
            ("disk", "device"): 0,
        }


@pytest.mark.parametrize("place", [("host", "device"), ("disk", "host")])
def test_three_groups_of_state_have_buffers(disk_folder, place):
    """Of 16 groups of two leaves each."""
    mesh, (memory, update_on) = fs.make_mesh({"data": 2}), place
    params = fs.shard_params([torch.ones(1024) for _ in range(32)], fs.fsdp("data"), mesh=mesh)
    opt = fs.partition_optimizer(
        optim.adamw(0.1), mesh=mesh, axis="data", stage=3, state_memory=memory, update_on=update_on
    )
    of_params = 32 * 512 * 4
    with fs.memory.limit() as used:
        state = opt.init(params)
    assert used.peak(memory, "state") == 2 * of_params
    with fs.memory.limit() as used:
        opt.step(params, state, params)
    others = (
        2 * of_params
    )  # on devices parameters of both, from before the limit; on the host also gradients
    assert used.peak(update_on) - others == pytest.approx(3 * 2 * of_params / 16, rel=0.02)


def test_state_that_is_updated_where_it_is_has_no_buffers():
    """Beside it are buffers of gradients and parameters, of a device's 16 KiB each."""
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params([torch.ones(1024) for _ in range(8)], fs.fsdp("data"), mesh=mesh)
    opt = fs.partition_optimizer(
        optim.adamw(0.1), mesh=mesh, axis="data", stage=3, state_memory="host", update_on="host"
    )
    with fs.memory.limit() as used, fs.ledger() as comm:
        opt.step(params, opt.init(params), params)
    assert used.peak("host") == (2 + 1 + 1) * 8 * 2048 and comm.moved("host", "host") == 0


def test_network_totals_are_unchanged(disk_folder):
    for name in ("adamw", "muon"):
        case = CASE | {"name": name, "stage": 3, "clips": True}
        expected = trained(**case)[-1].by_collective()
        assert [trained(*place, **case)[-1].by_collective() for place in PLACES] == [expected] * 4


@pytest.mark.parametrize("place", PLACES)
def test_state_has_the_memory_of_its_layout(disk_folder, place):
    for name in ("adamw", "ema of masters", "muon", "plain"):
        _, state, *_ = trained(*place, **CASE | {"name": name, "half": True, "n": 4})
        leaves = [leaf for leaf in Leaves.of(state).leaves if isinstance(leaf, fs.Sharded)]
        assert leaves and {leaf.layout.memory for leaf in leaves} == {place[0]}
        memories = set()
        for leaf in leaves:
            memories |= {memory_of(x) for x in leaf.shards if x.numel() > 0}
        assert memories == {place[0]}


def test_pure_steps_copy_state_on_the_host():
    """Without donate=True arguments keep their values; the results have the bits of a step in
    place.
    """
    for update_on in ("device", "host"):
        expected = trained(**CASE)
        result = trained("host", update_on, **CASE, donate=False)
        assert same_bits(result, expected)


@pytest.mark.parametrize("update_on", ["device", "host"])
def test_updates_leave_state_as_it_was(disk_folder, update_on):
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params({"w": torch.ones(5, 3)}, fs.fsdp("data"), mesh=mesh)
    plain = fs.partition_optimizer(optim.adamw(0.1), mesh=mesh, axis="data", stage=3)
    opt = fs.partition_optimizer(
        optim.adamw(0.1), mesh=mesh, axis="data", stage=3, state_memory="host", update_on=update_on
    )
    state = opt.init(params)
    before = bits(state)
    updates, after = opt.update(params, state, params)
    expected = plain.update(params, plain.init(params), params)
    assert same_bits((updates, after, {}), (*expected, {})) and all(
        map(torch.equal, bits(state), before)
    )


def test_state_on_disk_is_not_copied(disk_folder):
    """By a pure step, which is what `train_step` takes without donate=True."""
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params({"w": torch.ones(4)}, fs.fsdp("data"), mesh=mesh)
    opt = fs.partition_optimizer(
        optim.adamw(0.1), mesh=mesh, axis="data", stage=3, state_memory="disk"
    )
    with pytest.raises(OptimizerError, match=r"on disk must be updated in place.*donate=True"):
        optim.pure_step(opt)(params, opt.init(params), params)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("cls", [Lion, Factored], ids=lambda cls: cls.__name__)
def test_state_of_an_instance_is_moved_to_its_step(disk_folder, cls, place):
    """Tensors that the class writes in place, replaces, or makes in its first step."""

    def run(memory="device", update_on="device"):
        mesh = fs.make_mesh({"data": 1})
        generator = torch.Generator().manual_seed(0)
        values = {
            name: torch.randn(shape, generator=generator)
            for name, shape in {"a": (5, 3), "b": (3,)}.items()
        }
        own = {name: torch.nn.Parameter(x.clone()) for name, x in values.items()}
        instance = cls(own.values())
        opt = optimizer_source(instance, own, "test").current_optimizer()
        opt = fs.partition_optimizer(
            opt, mesh=mesh, axis="data", stage=1, state_memory=memory, update_on=update_on
        )
        params = fs.shard_params(values, P(), mesh=mesh)
        state = opt.init(params)
        for _ in range(3):
            grads = {name: torch.randn(x.shape, generator=generator) for name, x in values.items()}
            params, state = opt.step(fs.device_put(grads, fs.Layout(mesh)), state, params)
        entries = []
        for entry in instance.state.values():
            entries += [x for x in entry.values() if isinstance(x, torch.Tensor)]
        return bits(params) + bits(entries), {memory_of(x) for x in entries}

    expected, _ = run()
    with stress(poison=True):
        result, memories = run(*place)
    assert all(map(torch.equal, result, expected)) and (
        memories == {place[0]} or place == ("host", "host")
    )


def test_abstract_meshes_count_the_same_bytes():
    """Those of the first virtual device, whose shards are the largest."""

    def moves(runtime, update_on):
        mesh = fs.make_mesh({"data": 4}, runtime=runtime)
        params = fs.shard_params(
            [torch.ones(9, dtype=torch.bfloat16), torch.ones(5)], fs.fsdp("data"), mesh=mesh
        )
        opt = optim.with_master_weights(optim.adamw(0.1))
        opt = fs.partition_optimizer(
            opt, mesh=mesh, axis="data", stage=3, state_memory="host", update_on=update_on
        )
        step = fs.train_step(
            lambda p, x: (p[0].float().sum() + p[1].sum()) * x.mean(),
            opt,
            mesh=mesh,
            batch=P("data"),
            donate=True,
        )
        state = opt.init(params)
        with fs.ledger() as comm:
            step(params, state, torch.ones(8))
        return [comm.moved(*pair) for pair in (("host", "device"), ("device", "host"))]

    for update_on in ("device", "host"):
        assert moves("abstract", update_on) == moves("virtual", update_on) != [0, 0]
