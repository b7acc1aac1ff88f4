"""`offload=` of plugins: bits of the functional step and of torch's loop equal those without it, and less is on the device."""

from functools import cache, partial

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import optim
from fshard.memory.transfers import stress
from fshard.mesh.layout import flatten
from fshard.mesh.layout.kinds import memory_of
from tests.booster.loops import Loop, on_devices
from tests.sampled import in_pairs

HYBRID = partial(fs.HybridParallelPlugin, microbatches=2, sample=torch.zeros(2, 6))
PLUGINS = {  # name -> plugin, mesh, memories of parameters and of state with offload="host"
    "zero 1": (partial(fs.ZeroPlugin, stage=1), {"data": 2}, "device"),
    "zero 2": (partial(fs.ZeroPlugin, stage=2), {"data": 2}, "device"),
    "fsdp": (fs.FSDPPlugin, {"data": 2}, "host"),
    "fsdp of one device": (fs.FSDPPlugin, {"data": 1}, "host"),
    "hybrid 0": (partial(HYBRID, tensor=2), {"data": 1, "model": 2}, "device"),
    "hybrid 3": (partial(HYBRID, tensor=2, zero_stage=3), {"data": 2, "model": 2}, "host"),
    "stages 1": (partial(HYBRID, pipeline=2, zero_stage=1), {"pipe": 2, "data": 2}, "device"),
    "stages 3": (partial(HYBRID, pipeline=2, zero_stage=3), {"pipe": 2, "data": 2}, "host"),
}
OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(groups(model), lr=0.05),
    "rmsprop": lambda model: torch.optim.RMSprop(groups(model), lr=0.05),
    "own class": lambda model: Signs(model.parameters(), lr=0.05),
    "lamb": lambda model: optim.lamb(0.05),
}


class Signs(torch.optim.Optimizer):
    """A class that torch has not: it steps on full parameters."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    m = self.state[x].setdefault("m", torch.zeros_like(x))
                    m.lerp_(x.grad, 0.1)
                    x.sub_(group["lr"] * m.sign())


def groups(model):
    return [
        {"params": [x for x in model.parameters() if (x.ndim > 1) is is_matrix]}
        for is_matrix in (True, False)
    ]


def network(norm=nn.Identity):
    torch.manual_seed(1)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())]
    model = nn.Sequential(*layers, norm(6), nn.Dropout(0.25), nn.Linear(6, 6))
    model[10].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    return model


def norm_of(name):
    """Return a layer with buffers, unless the plugin plans its layers."""
    return nn.Identity if "hybrid" in name else nn.BatchNorm1d


def batch(step, part=0):
    return torch.randn(
        8, 6, generator=torch.Generator().manual_seed(10 * step + part)
    ), torch.zeros(8, 6)


def steps(loop, count=3):
    """Take steps of two backwards each; return losses and norms."""
    numbers = []
    for step in range(count):
        numbers += [
            loop.accumulate(*map(loop.part, batch(step, part)), sync=part > 0) for part in range(2)
        ]
        numbers.append(loop.booster.clip_grad_norm(loop.opt, 0.1, 2.0 if step else float("inf")))
        loop.step()
    return numbers


def loop_of(name, optimizer="adamw", **options):
    model = partial(network, norm_of(name))
    return Loop(
        model, PLUGINS[name][0](**options), OPTIMIZERS[optimizer], criterion=nn.functional.mse_loss
    )


def arrays_of(loop):
    """Return the arrays of parameters and state."""
    return loop.model.params, loop.opt.state.state_dict() if isinstance(
        loop.opt.optim, Signs
    ) else loop.opt.state


def looped(name, optimizer="adamw", **options):
    """Return what each device has after steps: losses, norms, full state; and its arrays."""

    def main():
        loop = loop_of(name, optimizer, **options)
        return (steps(loop), loop.state(), loop.opt.state_dict()), arrays_of(loop)

    return fs.run(main, mesh=fs.make_mesh(PLUGINS[name][1]))


def stepped(name, optimizer="adamw", **options):
    """Return what is there after some functional steps: metrics, full parameters and state; and the arrays."""
    make, axes, _ = PLUGINS[name]
    model = network(norm_of(name))
    booster = fs.Booster(make(mesh=fs.make_mesh(axes), **options))
    state, seen = booster.init(model, OPTIMIZERS[optimizer](model), nn.MSELoss()), []
    for step in range(3):
        state, metrics = booster.step(state, batch(step))
        seen.append(metrics)
    return [
        (
            (seen, fs.unshard(state.params), fs.unshard(state.optimizer)),
            (state.params, state.optimizer),
        )
    ]


def tensors(tree):
    return [x.detach() for x in flatten(tree)[0] if isinstance(x, torch.Tensor)]


def is_same(result, expected):
    pairs = zip(
        tensors([values for values, _ in result]),
        tensors([values for values, _ in expected]),
        strict=True,
    )
    return all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs
    )  # of a step that overflows


def memories(tree):
    """Return the memories that layouts name, and those in which shards are."""
    leaves = [x for x in flatten(tree)[0] if isinstance(x, fs.Sharded) and x.ndim]
    return {x.layout.memory for x in leaves} | {
        memory_of(x) for leaf in leaves for x in leaf.shards if x.numel()
    }


RUNS = {"loop": looped, "step": stepped}
expected = cache(lambda run, name, optimizer: RUNS[run](name, optimizer))


@pytest.mark.parametrize(
    ("name", "offload", "run", "optimizer"),
    in_pairs(PLUGINS, ("host", "disk"), RUNS, ("adamw", "lamb")),
)
def test_bits_equal_those_without_offload(disk_folder, name, offload, run, optimizer):
    """With NaN in every buffer that was not waited for; inside a limit, where memories must not be mixed."""
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
    model, options = (
        nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(4)]),
        {"mesh": fs.make_mesh(axes)},
    )
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
    """What was made before the limit, too; and each purpose in its memory."""

    def body(loop):
        with fs.memory.limit() as used:
            for step in range(2):
                loop.step(*map(loop.part, batch(step)))
        return used

    def matrices():
        return nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(4)])

    options = {"optimizer": OPTIMIZERS["adamw"], "criterion": nn.functional.mse_loss}
    used, *_ = on_devices(body, PLUGINS[name][0](offload="host"), 2, matrices, **options)
    whole, half = 4 * 4 * 36, 4 * 2 * 36  # bytes of four matrices, and of a device's shards
    assert used.peak("device", "parameters") == (whole if name == "zero 2" else 0)
    assert (
        used.peak("host", "parameters")
        == used.peak("host", "gradients")
        == half
        <= used.peak("host", "state") / 2
    )
    assert used.peak("device", "state") < 50 and used.peak("device", "activations")
