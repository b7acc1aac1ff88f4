"""`fs.memory.limit` against sums of lists of sizes, and against itself on other runtimes."""

import gc
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.cuda import _memory_viz

import fshard as fs
from fshard import P
from fshard.errors import MemoryLimitError
from fshard.mesh.layout import kinds
from fshard.mesh.layout.counting import counting
from fshard.mesh.layout.kinds import empty_in

RUNTIMES = ("virtual", "abstract")


# -- storages --------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["new", "free", "view", "resize", "clone", "in place"]), st.integers(1, 64)
    ),
    max_size=20,
)


@given(ACTIONS)
def test_peak_is_the_largest_sum_of_live_storages(actions):
    """The oracle: a list of pairs (tensors of a storage, bytes)."""
    live = list[list]([])
    peak = 0
    with fs.memory.limit() as used:
        for action, n in actions:
            if action == "new":
                live.append([[torch.ones(n)], 4 * n])
            elif live:
                tensors, size = pair = live[n % len(live)]
                if action == "free":
                    tensors.pop()
                    if not tensors:
                        live.remove(pair)
                elif action == "view":
                    tensors.append(tensors[0].view(-1)[:1])
                elif action == "resize":
                    tensors[0].resize_(n)
                    pair[1] = max(size, 4 * n)
                elif action == "clone":
                    copy = tensors[0].clone()
                    live.append([[copy], 4 * copy.numel()])
                    del copy
                else:
                    tensors[0].add_(1)
                del tensors, pair
            peak = max(peak, sum(size for _, size in live))
            assert used.now() == sum(size for _, size in live)
    assert used.peak() == peak == sum(holder.bytes for holder in used.holders())


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_saved_activations_live_until_their_backward(runtime):
    device = "meta" if runtime == "abstract" else "cpu"
    w = torch.ones(8, requires_grad=True, device=device)
    with fs.memory.limit() as used:
        y = w * 2  # 32 bytes of w, 32 of y
        z = (y * y).sum()  # 32 more, freed; and 4
        assert (used.now(), used.peak()) == (68, 100)
        del y  # which the graph has saved
        assert used.now() == 68
        z.backward()
        del z
        assert used.now() == 64  # w and its gradient


def test_limit_leaves_nothing_behind():
    with pytest.raises(MemoryLimitError), fs.memory.limit(device=7):
        torch.ones(2)
    x = torch.ones(1 << 10)
    assert counting().counters == () and torch._C._len_torch_dispatch_stack() == 0
    with fs.memory.limit() as outer, fs.memory.limit(device=100) as inner:
        y = torch.ones(4)
    del x
    assert outer.peak() == inner.peak() == 16 and y.sum() == 4


def test_an_error_frees_what_was_allocated_before_it():
    with fs.memory.limit(device=100) as used:
        for _ in range(3):
            with pytest.raises(
                MemoryLimitError,
                match=r"at most 100 bytes per device; got 120 with 60 more .*test_limit.py",
            ):
                torch.ones(15) + torch.ones(15)  # the second has no room
        gc.collect()
        assert used.now() == 0 and used.peak() == 60


@pytest.mark.parametrize("limits", [{"device": -1}, {"host": 1.5, "disk": "1G"}, {"device": True}])
def test_invalid_limits_raise_one_error(limits):
    with (
        pytest.raises(ValueError, match="must be a number of bytes") as caught,
        fs.memory.limit(**limits),
    ):
        pass
    assert all(f"{name}={size!r}" in str(caught.value) for name, size in limits.items())


# -- kinds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_results_are_in_the_memory_of_arguments_and_mixtures_raise(device):
    host = empty_in("host", (4,), torch.float32, device)
    x = torch.ones(4, device=device)
    zero = torch.zeros((), device=device)
    with fs.memory.limit(host=100) as used:
        y = torch.relu(host * 2 + zero + 1)  # numbers may be anywhere
        x.copy_(y)
        assert (used.now("host"), used.now("device")) == (32, 20)
        for mixed in (
            lambda: x + y,
            lambda: torch.cat([x, y]),
            lambda: torch._foreach_add([x], [y]),
            lambda: x.add_(y),
        ):
            with pytest.raises(
                RuntimeError,
                match=r"must have all tensors in one memory; got f32\[4\] in device memory",
            ):
                mixed()
        with pytest.raises(MemoryLimitError, match="host memory must be at most 100"):
            y.repeat(5)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_reshard_counts_in_the_memory_of_the_layout(runtime, monkeypatch):
    monkeypatch.setitem(
        kinds.makers, "disk", lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype)
    )
    mesh = fs.make_mesh({"data": 2}, runtime=runtime)
    with fs.memory.limit() as used:
        x = fs.device_put(torch.ones(8), fs.Layout(mesh, P("data"), "host"))
        assert [used.now(kind) for kind in ("device", "host", "disk")] == [0, 16, 0]
        y = fs.reshard(x, x.layout.with_memory("disk"))
        assert [used.now(kind) for kind in ("device", "host", "disk")] == [0, 16, 16]
        z = fs.reshard(y, x.layout.with_memory("device"))
        assert [used.now(kind) for kind in ("device", "host", "disk")] == [16, 16, 16]
        del y
        assert used.now("disk") == 0 and z.shape == (8,)


# -- devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_each_device_counts_what_it_receives(runtime):
    mesh = fs.make_mesh({"data": 4}, runtime=runtime)

    def gather():
        x = torch.ones(4)  # 16 bytes
        y = fs.all_gather(x, "data")  # 64
        return y.sum()  # 4

    with fs.memory.limit() as used:
        fs.run(gather, mesh=mesh)
    assert used.peak() == 84
    with pytest.raises(MemoryLimitError, match="got 80 with 64 more"), fs.memory.limit(device=79):
        fs.run(gather, mesh=mesh)


def test_the_fullest_device_is_limited():
    def fill():
        return torch.ones(1 + fs.axis_index("data"))

    mesh = fs.make_mesh({"data": 3})
    with fs.memory.limit(device=12) as used:
        fs.run(fill, mesh=mesh)
    assert used.peak() == 12
    with pytest.raises(MemoryLimitError, match="on device 2"), fs.memory.limit(device=11):
        fs.run(fill, mesh=mesh)


def test_global_values_count_on_every_device():
    mesh = fs.make_mesh({"data": 2})
    with fs.memory.limit() as used:
        x = torch.ones(8)
        y = fs.device_put(x, fs.Layout(mesh, P("data")))
    assert used.peak() == 32 + 16 and y.shape == (8,)


def test_storages_from_before_count_with_their_purpose():
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params({"w": torch.ones(8)}, P("data"), mesh=mesh, memory="host")
    with fs.memory.limit() as used:
        fs.memory.claim(params, "parameters")
    assert used.peak("host", "parameters") == used.peak("host") == 16 and used.peak() == 0


# -- steps -----------------------------------------------------------------------------------------


def loss_fn(params, x):
    for block in params["blocks"]:
        x = torch.relu(x @ block["w"] + block["b"])
    return (x @ params["head"]).square().mean()


def two_steps(runtime, stage, donate, limit=None):
    """Return the peak of two steps, and its purposes."""
    mesh = fs.make_mesh({"data": 2}, runtime=runtime)
    params = {
        "blocks": [{"w": torch.ones(8, 8), "b": torch.ones(8)} for _ in range(3)],
        "head": torch.ones(8, 4),
    }
    opt = fs.partition_optimizer(fs.optim.adamw(1e-3), mesh=mesh, axis="data", stage=stage)
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=donate)
    with fs.memory.limit(device=limit) as used:
        params = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
        state = opt.init(params)
        for _ in range(2):
            params, state, _ = step(params, state, torch.ones(8, 8))
    return used.peak(), {
        purpose: used.peak("device", purpose) for purpose in ("parameters", "state", "gradients")
    }


def peaks(runtime):
    return [two_steps(runtime, stage, donate) for stage in range(4) for donate in (False, True)]


def test_peak_is_equal_on_all_runtimes(two):
    virtual = peaks("virtual")
    assert peaks("abstract") == virtual
    assert two.run(peaks, "process") == [virtual, virtual]
    weights = 4 * (3 * (64 + 8) + 32)
    for (peak, purposes), stage in zip(virtual[1::2], range(4), strict=True):  # donated: one copy
        divided = 1 if stage == 0 else 2
        assert purposes["parameters"] >= weights // (2 if stage == 3 else 1)
        assert purposes["state"] >= 2 * weights // divided and peak > sum(purposes.values())


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("stage", range(4))
def test_the_peak_as_limit_passes_and_one_byte_less_raises(runtime, stage):
    peak, _ = two_steps(runtime, stage, True)
    assert two_steps(runtime, stage, True, peak)[0] == peak
    with pytest.raises(
        MemoryLimitError, match=f"at most {peak - 1:,} bytes per device; got {peak:,} with"
    ):
        two_steps(runtime, stage, True, peak - 1)


def test_table_names_purposes_and_lines(tmp_path):
    mesh = fs.make_mesh({"data": 2})
    with fs.memory.limit(device=1 << 20, disk=0) as used:
        params = fs.shard_params({"w": torch.ones(64, 64)}, fs.fsdp("data"), mesh=mesh)
        apply, _, buffers = fs.functionalize(torch.nn.BatchNorm1d(64))

        def loss(params, buffers, x):
            y = x @ params["w"]  # the line of the unsharded parameter
            y, buffers = apply({"weight": torch.ones(64), "bias": torch.ones(64)}, buffers, y)
            return y.square().mean(), buffers

        opt = fs.partition_optimizer(
            fs.optim.sgd(0.1, momentum=0.9), mesh=mesh, axis="data", stage=3
        )
        step = fs.train_step(loss, opt, mesh=mesh, batch=P("data"), has_buffers=True)
        state = opt.init(params)
        step(params, state, buffers, torch.ones(4, 64))
    text = str(used)
    purposes = {"parameters", "state", "unsharded", "activations", "buffers", "gradients"}
    assert {holder.purpose for holder in used.holders()} >= purposes - {"gradients", "unsharded"}
    assert (
        "of 1,048,576" in text and "test_limit.py" in text and "disk" in text and "host" not in text
    )
    assert used.peak("device", "buffers") == 4 * 64 * 2 + 8

    used.export_snapshot(tmp_path / "memory.pickle")
    snapshot = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    assert {event["action"] for trace in snapshot["device_traces"] for event in trace} == {
        *("alloc", "free_requested", "free_completed")
    }
    frames = [
        frame["name"]
        for trace in snapshot["device_traces"]
        for event in trace
        for frame in event["frames"]
    ]
    assert "loss" in frames and any(
        name.startswith("unsharded, device memory of device 1") for name in frames
    )
    assert _memory_viz.segsum(snapshot) and _memory_viz.trace(snapshot)
    assert "<script" in _memory_viz.trace_plot(snapshot)
    sizes = [block["size"] for segment in snapshot["segments"] for block in segment["blocks"]]
    assert 64 * 64 * 4 // 2 in sizes


def attention_loss(params, x):
    q, k, v = (x @ params["qkv"]).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return (y.transpose(1, 2).reshape(x.shape) @ params["out"]).square().mean()


def test_attention_has_the_peak_of_the_kernel_that_runs():
    peaks = list[int]()
    for runtime in RUNTIMES:
        mesh = fs.make_mesh({"data": 2}, runtime=runtime)
        params = {"qkv": torch.ones(8, 24), "out": torch.ones(8, 8)}
        with fs.memory.limit() as used:
            params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh)
            fs.value_and_grad(attention_loss, mesh=mesh, batch=P("data"))(
                params, torch.ones(4, 32, 8)
            )
        peaks.append(used.peak())
    scores = (
        4 * 2 * 2 * 32 * 32
    )  # bytes of a device's attention matrix, which the kernel does not store
    assert peaks[0] == peaks[1] < 2 * scores + 4 * 4 * 32 * 8 * 8


def test_freed_parameters_of_stages_are_not_counted():
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    modules = [torch.nn.Linear(32, 32, bias=False) for _ in range(4)]
    stages = fs.pipeline.split_stages(torch.nn.Sequential(*modules), 2)
    params = fs.shard_stages(stages, fs.fsdp("data"), mesh=mesh, schedule=schedule)
    gradient = fs.value_and_grad(
        stages,
        mesh=mesh,
        batch=P("data"),
        schedule=schedule,
        loss=lambda y, batch: y.square().mean(),
    )
    with fs.memory.limit() as used:
        gradient(params, torch.ones(4, 32))
        unsharded = [block for block in used._blocks.values() if block.purpose == "unsharded"]
    full = 2 * 32 * 32 * 4  # of the two layers of a stage
    assert used.peak("device", "unsharded") >= full and sum(block.size for block in unsharded) == 0


def test_claim_counts_a_storage_that_was_resized():
    with fs.memory.limit() as used:
        x = torch.ones(8)
        x.untyped_storage().resize_(0)
        fs.memory.claim(x, "buffers")
        assert used.now() == 0
        x.untyped_storage().resize_(64)
        fs.memory.claim({"x": x}, "buffers")
        assert used.now() == used.peak("device", "buffers") == 64


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_state_counts_for_the_devices_of_parameters_from_before(runtime):
    """Each device has half of the state, two of 16 bytes, and two counts."""
    mesh = fs.make_mesh({"data": 2}, runtime=runtime)
    params = fs.shard_params({"w": torch.ones(8)}, fs.fsdp("data"), mesh=mesh)
    for opt in (
        fs.optim.adamw(),
        fs.partition_optimizer(fs.optim.adamw(), mesh=mesh, axis="data", stage=3),
    ):
        with fs.memory.limit() as used:
            state = opt.init(params)
        assert used.peak("device", "state") == 2 * 16 + 8 + 4 and used.peak() == 16 + 44 and state


@pytest.mark.parametrize("devices", [2, 3])
def test_full_tensors_that_parameters_are_sharded_from_count_as_source(devices):
    mesh = fs.make_mesh({"data": devices})
    full = {"w": torch.ones(64, 6), "b": torch.ones(12), "tied": None}
    full["tied"] = full["w"]
    size = 4 * (64 * 6 + 12)
    shard = 4 * (64 * 6 + 12) // devices
    with fs.memory.limit() as used:
        params = fs.shard_params(full, fs.fsdp("data"), mesh=mesh)
    assert used.peak("device", "source") == size
    assert used.peak("device", "parameters") == shard
    assert used.peak() == size + shard
    with fs.memory.limit() as used:
        fs.shard_params(params, fs.fsdp("data"), mesh=mesh)  # arrays are no source
    assert used.peak("device", "source") == 0


def test_full_tensors_made_in_the_block_are_source_until_they_are_freed():
    mesh = fs.make_mesh({"data": 2})
    with fs.memory.limit() as used:
        full = [torch.ones(64)]
        fs.shard_params(full, P.flat("data"), mesh=mesh)
        assert (used.peak(), used.peak("device", "source")) == (256 + 128, 256)
        del full
    with fs.memory.limit(device=300):
        full = [torch.ones(64)]
        with pytest.raises(fs.errors.MemoryLimitError, match="256 bytes for source at"):
            fs.shard_params(full, P.flat("data"), mesh=mesh)


def test_modules_of_a_booster_are_source():
    def main():
        with fs.memory.limit() as used:
            fs.Booster(fs.FSDPPlugin()).boost(torch.nn.Linear(64, 64, bias=False))
        return used.peak("device", "source"), used.peak("device", "parameters")

    assert fs.run(main, mesh=fs.make_mesh({"data": 2}))[0] == (4 * 64 * 64, 2 * 64 * 64)


@pytest.mark.parametrize("runtime", ["virtual", "abstract"])
def test_limit_that_ends_before_a_started_collective_does_not_count_its_results(runtime):
    mesh = fs.make_mesh({"data": 2}, runtime=runtime)

    def start_and_wait():
        with fs.memory.limit() as used:
            started = fs.psum.start(torch.ones(3), "data")
        peak = used.peak()
        started.wait()
        return peak, used.peak()

    for before, after in fs.run(start_and_wait, mesh=mesh):
        assert before == after > 0


@pytest.mark.parametrize("kind", ["cpu", 0])
def test_usage_of_an_unknown_kind_names_the_kinds(kind):
    with fs.memory.limit() as used:
        pass
    for method in (used.peak, used.now, used.holders):
        with pytest.raises(ValueError, match='kind must be "device", "host" or "disk"; got'):
            method(kind)


def test_usage_of_an_unknown_purpose_names_the_purposes():
    with fs.memory.limit() as used:
        pass
    with pytest.raises(ValueError, match="purpose must be one of parameters, .*; got 'params'"):
        used.peak("device", "params")
