"""Writes of a loop to a boosted module take effect as in torch, or raise."""

import re

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.errors import ModuleError
from tests.booster.loops import PLUGINS, Loop, assert_close, mesh_of, on_devices

X = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 2


class Centred(nn.Module):
    """A head whose outputs are centred and divided by a temperature, both of which the loop sets."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)
        self.register_buffer("centre", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("temperature", torch.ones((), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return (self.layer(x) - self.centre) / self.temperature


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return x * self.factor


def staged():
    layers = Centred(), nn.Tanh(), nn.Linear(2, 2, dtype=torch.float64), Scale()
    return nn.Sequential(*layers)


def tower():
    layers = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2)
    return nn.Sequential(*layers).double()


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def module_of(loop):
    return loop.model if loop.booster is None else loop.model.module


# -- buffers ---------------------------------------------------------------------------------------


def centred(loop):
    """Write between forward and step, as DINO does, and between steps; of samples, only means."""
    module = module_of(loop)
    temperature = module.temperature
    for number in range(3):
        temperature.fill_(1.0 + number)
        output = loop.model(loop.part(X))
        loop.backward(loop.criterion(output, loop.part(Y)))
        module.centre.lerp_(output.detach().mean(0), 0.1)
        module.count += 1
        loop.step()
        module.centre = module.centre * 0.9
    module.temperature.data.copy_(torch.tensor(0.5))
    return loop.state()


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("plugin", ["ddp", "zero 1", "zero 2", "fsdp"])
def test_buffers_written_by_the_loop_are_those_of_one_device(plugin, n):
    expected = centred(Loop(Centred, optimizer=sgd))
    assert_close(on_devices(centred, PLUGINS[plugin](), n, Centred, sgd), expected)


def test_buffers_written_in_a_reproducible_loop_are_those_of_one_device():
    expected = centred(Loop(Centred, optimizer=sgd))
    states = on_devices(centred, fs.FSDPPlugin(reproducible=True), 2, Centred, sgd)
    assert_close(states, expected)


def test_buffers_written_by_a_tensor_parallel_loop_are_those_of_one_device():
    def body(loop):
        module_of(loop).temperature.fill_(3.0)
        loop.step(X, Y)
        module_of(loop).centre = torch.ones(2, dtype=torch.float64)
        loop.step(X, Y)
        return loop.state()

    plugin = fs.HybridParallelPlugin(tensor=2, sample=X, mesh=fs.make_mesh({"data": 1, "model": 2}))
    states = fs.run(lambda: body(Loop(Centred, plugin, sgd)), mesh=plugin.mesh)
    assert_close(states, body(Loop(Centred, optimizer=sgd)))


@pytest.mark.parametrize("n", [2, 4])
def test_buffers_written_between_batches_of_stages_are_those_of_one_device(n):
    def body(loop):
        module = module_of(loop)
        for number in range(3):
            module[0].temperature.fill_(1.0 + number)
            module[3].factor = torch.full((), 2.0 - number, dtype=torch.float64)
            loop.step(X, Y)
        module[0].centre.add_(1.0)
        return loop.state()

    plugin = PLUGINS["stages"]()
    assert_close(on_devices(body, plugin, n, staged, sgd), body(Loop(staged, optimizer=sgd)))


def test_a_buffer_that_devices_write_differently_is_averaged_by_the_step():
    def body(loop):
        loop.backward(loop.model(X).mean())
        module_of(loop).centre.fill_(float(fs.axis_index("data")))
        loop.step()
        return module_of(loop).centre.clone()

    for centre in on_devices(body, fs.DDPPlugin(), 2, Centred, sgd):
        torch.testing.assert_close(centre, torch.full((2,), 0.5, dtype=torch.float64))


def test_buffers_written_between_steps_are_saved_and_loaded(tmp_path):
    """A save has them before the next step averages them; a load replaces what was written after
    it.
    """

    def body(loop):
        module = module_of(loop)
        module.centre.fill_(2.0)
        loop.booster.save(tmp_path, loop.model, loop.opt)
        state = loop.model.state_dict()
        module.centre.fill_(7.0)
        loop.booster.load(tmp_path, loop.model, loop.opt)
        loaded = module.centre.clone()
        module.centre.fill_(7.0)
        loop.model.load_state_dict(state)
        return loaded, loop.state()["centre"], module.centre.clone()

    expected = torch.full((2,), 2.0, dtype=torch.float64)
    for centres in on_devices(body, fs.FSDPPlugin(), 2, Centred, sgd):
        for centre in centres:
            assert torch.equal(centre, expected)


class Counting(Centred):
    """Counts its calls in a checkpoint, which a backward calls again."""

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False)

    def part(self, x):
        self.count.add_(1)
        return super().forward(x)


def test_a_layer_that_a_backward_recomputes_writes_its_buffer_once():
    def body(loop):
        for _ in range(3):
            loop.step(X, Y)
        return int(module_of(loop).count)

    assert on_devices(body, fs.FSDPPlugin(), 2, Counting, sgd) == [3, 3]


def test_a_layer_that_another_models_backward_recomputes_writes_its_buffer_once():
    def body(loop):
        critic = Loop(Counting, loop.booster, sgd)
        loop.backward(critic.model(loop.model(X)).mean())
        loop.step()
        return int(module_of(critic).count)

    def generator():
        return nn.Linear(3, 3, dtype=torch.float64)

    assert on_devices(body, fs.FSDPPlugin(), 2, generator, sgd) == [1, 1]


def test_a_removed_buffer_raises():
    def body(loop):
        module_of(loop).centre = None
        loop.model(X)

    with pytest.raises(ModuleError, match="the buffer centre must be a tensor; got None"):
        on_devices(body, fs.DDPPlugin(), 2, Centred, sgd)


# -- gradients and parameters ----------------------------------------------------------------------


def first_param(loop):
    return next(iter(module_of(loop).parameters()))


def none(loop):
    first_param(loop).grad = None


def another(loop):
    first_param(loop).grad = torch.ones(3, 3, dtype=torch.float64)


def scaled(loop):
    first_param(loop).grad.mul_(2.0)


def deleted(loop):
    del first_param(loop).grad


def of_the_optimizer(loop):
    loop.opt.param_groups[0]["params"][0].grad = None


@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize("plugin", ["ddp", "zero 2", "fsdp", "stages"])
def test_writing_gradients_raises(plugin, is_clipped):
    """After a backward, and once they have been reduced."""

    def body(loop):
        loop.accumulate(X, Y)
        if is_clipped:
            loop.booster.clip_grad_norm(loop.opt, 1.0)
        for write in (none, another, scaled, deleted, of_the_optimizer):
            with pytest.raises(
                ModuleError, match=re.escape("optimizer.zero_grad(); optimizer.reduce_gradients()")
            ):
                write(loop)

    on_devices(body, PLUGINS[plugin](), 2, tower, sgd)


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "stages"])
def test_dropping_gradients_before_the_backward_changes_nothing(plugin):
    def body(loop):
        for _ in range(2):
            for x in module_of(loop).parameters():
                x.grad = None
            loop.accumulate(X, Y)
            loop.opt.step()
            loop.opt.zero_grad()
        return loop.state()

    states = on_devices(body, PLUGINS[plugin](), 2, tower, sgd)
    assert_close(states, body(Loop(tower, optimizer=sgd)))


def test_zero_grad_of_the_model_drops_gradients_that_were_clipped():
    def body(loop):
        loop.accumulate(X, Y)
        loop.booster.clip_grad_norm(loop.opt, 1.0)
        loop.model.zero_grad()
        loop.step(X, Y)
        return loop.state()

    expected = Loop(tower, optimizer=sgd)
    expected.step(X, Y)
    assert_close(on_devices(body, fs.FSDPPlugin(), 2, tower, sgd), expected.state())


def tie(module):
    module[2].weight = module[0].weight


def replace_param(module):
    module[2].weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))


def replace_layer(module):
    module[2] = nn.Linear(3, 3, dtype=torch.float64)


def add_param(module):
    module[1].slope = nn.Parameter(torch.ones((), dtype=torch.float64))


def add_layer(module):
    module.append(nn.Linear(2, 2, dtype=torch.float64))


def delete_param(module):
    del module[2].bias


@pytest.mark.parametrize("moment", ["before", "within", "after"])
@pytest.mark.parametrize(
    "change", [tie, replace_param, replace_layer, add_param, add_layer, delete_param]
)
def test_exchanging_parameters_raises(change, moment):
    """In the next call, in the step, and where the model is unwrapped."""

    def body(loop):
        if moment != "before":
            loop.accumulate(X, Y)
        if moment == "after":
            loop.step()
        change(module_of(loop))
        with pytest.raises(ModuleError, match=r"Tie, replace and add parameters .*before boost"):
            loop.step() if moment == "within" else loop.accumulate(X, Y)
        with pytest.raises(ModuleError, match=r"after boost"):
            loop.model.state_dict()

    on_devices(body, fs.FSDPPlugin(), 2, tower, sgd)


def test_exchanging_parameters_of_stages_raises():
    def main():
        loop = Loop(tower, PLUGINS["stages"](), sgd)
        tie(loop.model.module)
        with pytest.raises(ModuleError, match="the parameter 2.weight was bound to another"):
            loop.step(X, Y)

    fs.run(main, mesh=mesh_of(PLUGINS["stages"](), 2))


def test_a_layer_without_parameters_may_be_exchanged():
    def body(loop):
        loop.step(X, Y)
        module_of(loop)[1] = nn.ReLU()
        loop.step(X, Y)
        return loop.state()

    states = on_devices(body, fs.FSDPPlugin(), 2, tower, sgd)
    assert_close(states, body(Loop(tower, optimizer=sgd)))
