"""`offload=` of plugins: bits of the functional step and of torch's loop equal those without it,
and less is on the device.
"""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.memory.transfers import stress
from fshard.mesh.layout import flatten
from tests.booster.loops import Loop, on_devices
from tests.helpers.sampled import in_pairs
from tests.memory.offloaded import (
    OPTIMIZERS,
    PLUGINS,
    RUNS,
    batch,
    expected,
    is_same,
    looped,
    memories,
)


@pytest.mark.parametrize(
    ("name", "offload", "run", "optimizer"),
    in_pairs(PLUGINS, ("host", "disk"), RUNS, ("adamw", "lamb")),
)
def test_bits_equal_those_without_offload(disk_folder, name, offload, run, optimizer):
    """With NaN in every buffer that was not waited for; inside a limit, where memories must not be
    mixed.
    """
    with stress(poison=True), fs.memory.limit():
        result = RUNS[run](name, optimizer, offload=offload)
    assert is_same(result, expected(run, name, optimizer))
    for _, (params, state) in result:
        assert memories(state) == {offload}
        assert memories(params) == {offload if PLUGINS[name][2] == "host" else "device"}


OTHERS = {
    "own class": ("zero 1", "own class", "host", {}),
    "own class, sharded": ("fsdp", "own class", "disk", {}),
    "fp16": ("fsdp", "adamw", "host", {"precision": "fp16"}),
    "bf16": ("stages 3", "adamw", "disk", {"precision": "bf16"}),
    "unused": ("zero 2", "adamw", "disk", {"unused": "zero"}),
    "reproducible": ("fsdp", "adamw", "host", {"reproducible": True, "slices": 4}),
    "reproducible stages": ("stages 1", "lamb", "host", {"reproducible": True}),
    "kept": ("fsdp", "adamw", "disk", {"reshard_after_forward": False}),
    "compressed": (
        "zero 1",
        "adamw",
        "host",
        {"compress": fs.comm.error_feedback(fs.comm.quantized(8))},
    ),
    "local steps": ("zero 1", "adamw", "disk", {"local_steps": 2}),
    "gossip": ("zero 1", "rmsprop", "host", {"gossip": fs.comm.ring}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_options_of_plugins_work_with_offload(disk_folder, case):
    name, optimizer, offload, options = OTHERS[case]
    with stress(poison=True), fs.memory.limit():
        result = looped(name, optimizer, offload=offload, **options)
    assert is_same(result, looped(name, optimizer, **options))
    for _, (params, state) in result:
        state = state["inner"] if case == "compressed" else state
        assert memories(state) == {offload}
        assert memories(params) == {offload if PLUGINS[name][2] == "host" else "device"}


@pytest.mark.parametrize("offload", ["host", "disk"])
@pytest.mark.parametrize("name", ["zero 1", "zero 2", "fsdp", "hybrid 3", "stages 1", "stages 3"])
def test_peak_of_the_device_is_lower_by_what_is_elsewhere(disk_folder, name, offload):
    """By the state, and in stage 3 by the parameters; with units that are not prefetched."""
    make, axes, memory = PLUGINS[name]
    model = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(4)])
    options = {"mesh": fs.make_mesh(axes)}
    options |= {} if "stages" in name else {"options": {"prefetch": 0}}

    def peaks(**offload):
        booster = fs.Booster(make(**options, **offload))
        state = booster.init(model, torch.optim.AdamW(model.parameters()), nn.MSELoss())
        with fs.memory.limit() as used:
            for step in range(2):
                state, _ = booster.step(state, batch(step))
        return used.peak("device"), used.peak(*[*offload.values(), "device"][:1]), state

    (resident, _, state), (peak, elsewhere, _) = peaks(), peaks(offload=offload)
    trees = (state.optimizer, state.params) if memory == "host" else (state.optimizer,)
    local = sum(x.shards[0].nbytes for x in flatten(trees)[0] if isinstance(x, fs.Sharded))
    assert resident - peak == local <= elsewhere


@pytest.mark.parametrize("name", ["zero 2", "fsdp"])
def test_memory_of_a_loop_is_counted_by_purpose(name):
    """Parameters that were made before the limit have it too; each purpose is in its memory."""

    def body(loop):
        with fs.memory.limit() as used:
            for step in range(2):
                loop.step(*map(loop.part, batch(step)))
        return used

    def matrices():
        return nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(4)])

    options = {"optimizer": OPTIMIZERS["adamw"], "criterion": nn.functional.mse_loss}
    used, *_ = on_devices(body, PLUGINS[name][0](offload="host"), 2, matrices, **options)
    full = 4 * 4 * 36
    half = 4 * 2 * 36  # bytes of four matrices, and of a device's shards
    assert used.peak("device", "parameters") == (full if name == "zero 2" else 0)
    assert (
        used.peak("host", "parameters")
        == used.peak("host", "gradients")
        == half
        <= used.peak("host", "state") / 2
    )
    assert used.peak("device", "state") < 50 and used.peak("device", "activations")


class Optimistic(torch.optim.Optimizer):
    """A class that keeps the gradient itself until the next step: as state, in a list, beside it."""

    def __init__(self, params):
        super().__init__(params, {})
        self.memory = {}

    @torch.no_grad()
    def step(self):
        for x in self.param_groups[0]["params"]:
            if x.grad is None:
                continue
            state = self.state[x]
            last = state.get("last", x.grad)
            before_last = state.get("history", [x.grad])[0]
            first = self.memory.get(id(x), x.grad)
            x.sub_(0.1 * (3 * x.grad - last - before_last)).sub_(0.01 * first)
            state["history"] = [last]
            state["last"] = x.grad
            self.memory.setdefault(id(x), x.grad)


def trained_optimistically(loop):
    """Return the parameters after seven steps with different batches."""
    for number in range(7):
        loop.step(*[loop.part(x) for x in batch(number)])
    return dict(loop.state())


@pytest.mark.parametrize("offload", ["host", "disk"])
@pytest.mark.parametrize("name", ["zero 1", "zero 2", "fsdp"])
def test_class_that_keeps_its_gradients_trains_as_torch(disk_folder, name, offload):
    """Gradients on the host are in buffers that the next step overwrites. The oracle is torch."""
    options = {"optimizer": lambda model: Optimistic(model.parameters())}
    options["criterion"] = nn.functional.mse_loss
    torch_loop = Loop(lambda: nn.Linear(6, 6), **options)
    params = trained_optimistically(torch_loop)

    plugin = PLUGINS[name][0](offload=offload)
    for actual in on_devices(trained_optimistically, plugin, 2, lambda: nn.Linear(6, 6), **options):
        torch.testing.assert_close(actual, params, rtol=1e-5, atol=1e-6)
