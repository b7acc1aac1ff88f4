"""What is done to `model.module` after boosting: attributes and hooks count, as in torch; what cannot is refused."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.transforms.replica import Blueprint
from tests.loops import PLUGINS, momentum


class Tempered(nn.Module):
    """Whose forward depends on a temperature, and on what it has kept since it was told to forget."""

    def __init__(self):
        super().__init__()
        self.layer, self.tau, self.state, self.calls = nn.Linear(3, 3), 1.0, None, 0

    def forward(self, x):
        y = self.layer(x) / self.tau
        if self.state is not None:
            y = y + self.state
        self.state = torch.full((3,), 0.5, dtype=x.dtype) if self.state is None else self.state * 2
        self.calls += 1
        return y

    def reset(self):
        self.state = None


def doubled(module, args, kwargs, output):
    return output * 2


def act(module, step, handles):
    """Do something to a model between two steps."""
    if step == 1:
        module[0].tau = 0.25
    if step == 2:
        module[0].reset()
    if step == 3:
        handles.append(module[1].register_forward_hook(doubled, with_kwargs=True))
    if step == 4:
        handles.pop().remove()
        module[0].tau = 0.5


STEPS = 6


def make():
    torch.manual_seed(0)
    return nn.Sequential(Tempered(), nn.Linear(3, 2)).double()


def batch(step):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def alone():
    model, losses, handles = make(), [], []
    opt = momentum(model)
    for step in range(STEPS):
        act(model, step, handles)
        loss = model(batch(step)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def boosted(plugin):
    model, losses, handles = make(), [], []
    booster = fs.Booster(plugin=plugin())
    model, opt, *_ = booster.boost(model, momentum(model))
    for step in range(STEPS):
        act(model.module, step, handles)
        loss = model(batch(step).chunk(2)[fs.axis_index("data")]).square().mean()
        booster.backward(loss, opt)
        opt.step()
        opt.zero_grad()
        losses.append(fs.pmean(loss.detach(), "data").item())
    return losses, model.module[0].calls


def in_stages(**options):
    model, losses, handles = make(), [], []
    booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2, microbatches=2, **options))
    model, opt, loss, *_ = booster.boost(model, momentum(model), lambda y, _: y.square().mean())
    for step in range(STEPS):
        act(model.module, step, handles)
        x = batch(step)
        losses.append(booster.execute_pipeline(iter([(x, x)]), model, loss, opt, return_loss=True)["loss"].item())
        opt.step()
        opt.zero_grad()
    return losses, model.unwrap()[0].calls


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("reproducible", [False, True])
def test_attributes_and_hooks_count_from_the_next_call_on(plugin, reproducible):
    own = {"reproducible": True, "slices": 2} if reproducible else {}
    for losses, calls in fs.run(lambda: boosted(lambda: PLUGINS[plugin](**own)), mesh=fs.make_mesh({"data": 2})):
        torch.testing.assert_close(losses, alone(), rtol=1e-6 if reproducible else 1e-9, atol=1e-9)
        assert calls == STEPS


@pytest.mark.parametrize("mesh", [{"pipe": 2}, {"pipe": 2, "data": 2}], ids=str)
def test_they_count_in_stages(mesh):
    for losses, calls in fs.run(in_stages, mesh=fs.make_mesh(mesh)):
        torch.testing.assert_close(losses, alone(), rtol=1e-9, atol=1e-9)
        assert calls == STEPS


def stages_of_this_process():
    return fs.run(in_stages, mesh=fs.make_mesh({"pipe": 2}))


def test_they_count_in_stages_of_processes(two):
    for ((losses, calls),) in two.run(stages_of_this_process):
        torch.testing.assert_close(losses, alone(), rtol=1e-9, atol=1e-9)
        assert calls == STEPS


def frozen(module):
    module[0].layer.requires_grad_(False)


def replaced(module):
    module[1] = nn.Linear(3, 2).double()


def registered(module):
    module[0].register_buffer("mask", torch.ones(3))


@pytest.mark.parametrize("plugin", [fs.DDPPlugin, lambda: fs.HybridParallelPlugin(pipeline=2)], ids=["ddp", "stages"])
@pytest.mark.parametrize(
    ("do", "names"),
    [
        (frozen, "0.layer.weight, 0.layer.bias"),
        (replaced, "1"),
        (registered, "0.mask"),
    ],
    ids=["frozen", "replaced", "registered"],
)
def test_what_cannot_be_followed_is_refused(do, names, plugin):
    def main():
        booster = fs.Booster(plugin=plugin())
        model, opt, loss, *_ = booster.boost(
            model := nn.Sequential(*make(), nn.BatchNorm1d(2)), momentum(model), lambda y, _: y.square().mean()
        )
        do(model.module)
        x = batch(0)
        if isinstance(booster.plugin, fs.DDPPlugin):
            model(x)
        else:
            booster.execute_pipeline(iter([(x, x)]), model, loss, opt)

    mesh = fs.make_mesh({"data": 1} if plugin is fs.DDPPlugin else {"pipe": 2})
    with pytest.raises(
        fs.ModuleError, match=rf"^{names} of model.module was replaced, written to, frozen or thawed after"
    ):
        fs.run(main, mesh=mesh)


def test_what_leads_to_layers_is_not_set_in_stages():
    """Each run tells it anew, until it is as it was."""

    def main():
        booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2))
        model, opt, loss, *_ = booster.boost(model := make(), momentum(model), lambda y, _: y.square().mean())
        before = model.module[0].tau
        model.module[0].tau = [model.module[0].layer]
        for _ in range(2):
            with pytest.raises(
                fs.ModuleError, match=r"^0.tau of model.module was set or changed .* no number, string, tensor or None"
            ):
                booster.execute_pipeline(iter([(batch(0), batch(0))]), model, loss, opt)
        model.module[0].tau = before
        return booster.execute_pipeline(iter([(batch(0), batch(0))]), model, loss, opt, return_loss=True)[
            "loss"
        ].isfinite()

    assert all(fs.run(main, mesh=fs.make_mesh({"pipe": 2})))


def test_modes_count_that_were_switched_with_what_is_refused():
    def main():
        booster, x = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2, microbatches=2)), torch.ones(4, 3)
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.9), nn.Linear(3, 3))
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))

        def loss():
            return booster.execute_pipeline(iter([(x, x)]), model, nn.functional.mse_loss, opt)["loss"].item()

        model.eval()
        model.module[0].table = {"layer": model.module[0]}
        with pytest.raises(fs.ModuleError, match=r"0\.table"):
            loss()
        del model.module[0].table
        return loss() == loss()

    assert all(fs.run(main, mesh=fs.make_mesh({"pipe": 2})))


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_stages_have_backward_hooks_of_their_parts(hook):
    def tripled(module, *grads):
        return tuple(None if g is None else 3 * g for g in grads[0])

    def alone():
        model = make()
        getattr(model[1], hook)(tripled)
        loss = model(batch(0)).square().mean()
        return torch.autograd.grad(loss, [*model.parameters()])

    def main():
        booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2, balance=[1, 1]))
        given = make()
        model, opt, loss, *_ = booster.boost(
            given, torch.optim.SGD(given.parameters(), lr=1), lambda y, _: y.square().mean()
        )
        before = dict(model.unwrap().named_parameters())
        getattr(model.module[1], hook)(tripled)
        booster.execute_pipeline(iter([(batch(0), batch(0))]), model, loss, opt)
        opt.step()
        return [before[name].detach() - x.detach() for name, x in model.unwrap().named_parameters()]

    for found in fs.run(main, mesh=fs.make_mesh({"pipe": 2})):
        torch.testing.assert_close(found, [*alone()], rtol=0, atol=1e-12)


def test_no_stage_has_a_hook_of_the_whole():
    def main():
        booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2))
        model, opt, loss, *_ = booster.boost(model := make(), momentum(model), lambda y, _: y.square().mean())
        model.module.register_forward_hook(doubled, with_kwargs=True)
        booster.execute_pipeline(iter([(batch(0), batch(0))]), model, loss, opt)

    with pytest.raises(fs.ModuleError, match=r"^hooks of model.module itself are not called"):
        fs.run(main, mesh=fs.make_mesh({"pipe": 2}))


def zeroed(module):
    module[0].layer.weight.data.zero_()


def initialised(module):
    module.apply(lambda part: nn.init.constant_(part.weight, 0.5) if isinstance(part, nn.Linear) else None)


def unseen(module):
    """As an operator in C++ would."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        module[0].layer.weight.zero_()


def reset(module):
    module[2].reset_running_stats()


def looked_up(module):
    return torch.arange(3)[module[2].num_batches_tracked]


@pytest.mark.parametrize("do", [reset, looked_up])
def test_buffers_without_memory_are_neither_read_nor_written(do):
    def main():
        model = nn.Sequential(*make(), nn.BatchNorm1d(2))
        boosted, *_ = fs.Booster().boost(model)
        do(boosted.module)

    with pytest.raises(fs.ModuleError, match=NO_VALUES):
        fs.run(main, mesh=fs.make_mesh({"data": 1}))


NO_VALUES = r"^parameters and buffers of a boosted model have no values here.*set before the model is boosted"


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (zeroed, NO_VALUES),
        (initialised, NO_VALUES),
        (unseen, r"^parameters or buffers of model.module were written to after"),
    ],
)
def test_numbers_that_are_written_to_tensors_without_memory_are_refused(do, message):
    def main():
        booster = fs.Booster(plugin=fs.DDPPlugin())
        model, *_ = booster.boost(model := make(), momentum(model))
        do(model.module)
        model(batch(0))

    with pytest.raises(fs.ModuleError, match=message):
        fs.run(main, mesh=fs.make_mesh({"data": 1}))


def test_gradients_of_tensors_without_memory_have_no_hooks():
    def main():
        booster = fs.Booster(plugin=fs.DDPPlugin())
        model, *_ = booster.boost(model := make(), momentum(model))
        for register in ("register_hook", "register_post_accumulate_grad_hook"):
            with pytest.raises(fs.ModuleError, match="^hooks of a boosted model's parameters are not called"):
                getattr(model.module[0].layer.weight, register)(print)

    fs.run(main, mesh=fs.make_mesh({"data": 1}))


@pytest.mark.parametrize("to", [0.5, torch.full((3,), 0.5, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("plugin", [fs.DDPPlugin, lambda: fs.HybridParallelPlugin(pipeline=2)], ids=["ddp", "stages"])
def test_what_is_annealed_makes_no_function_anew(plugin, to, monkeypatch):
    made, counts, build = [], [], Blueprint.build
    monkeypatch.setattr(Blueprint, "build", lambda self: (made.append(self), build(self))[1])

    def main():
        booster = fs.Booster(plugin=plugin())
        model, opt, loss, *_ = booster.boost(model := make(), momentum(model), lambda y, _: y.square().mean())
        losses = []
        for step in range(STEPS):
            model.module[0].tau = to / (1 + step)
            x = batch(step)
            if isinstance(booster.plugin, fs.DDPPlugin):
                found = loss(model(x), None)
                booster.backward(found, opt)
            else:
                found = booster.execute_pipeline(iter([(x, x)]), model, loss, opt)["loss"]
            opt.step()
            opt.zero_grad()
            losses.append(found.item())
            counts.append(len(made))
        return losses

    plain, expected = make(), []
    opt = momentum(plain)
    for step in range(STEPS):
        plain[0].tau = to / (1 + step)
        loss = plain(batch(step)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        expected.append(loss.item())
    for losses in fs.run(main, mesh=fs.make_mesh({"data": 1} if plugin is fs.DDPPlugin else {"pipe": 2})):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-10)
    assert counts[-1] == counts[1]  # after the first step of each device


def test_no_stage_has_a_hook_of_the_boosted_model():
    def main():
        booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2))
        model, opt, loss, *_ = booster.boost(model := make(), momentum(model), lambda y, _: y.square().mean())
        model.register_forward_hook(doubled, with_kwargs=True)
        booster.execute_pipeline(iter([(batch(0), batch(0))]), model, loss, opt)

    with pytest.raises(fs.ModuleError, match=r"^execute_pipeline: hooks of the boosted model are not called"):
        fs.run(main, mesh=fs.make_mesh({"pipe": 2}))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.scale, self.on = nn.Linear(3, 3), 0, torch.ones(3), False

    def forward(self, x):
        y = self.layer(x) * self.scale
        self.calls, self.scale, self.on = self.calls + 1, self.scale * 0.9, not self.on
        return y


def test_a_copy_knows_what_was_done_since_the_last_call():
    def main():
        model = Counting()
        model, *_ = fs.Booster(plugin=fs.DDPPlugin()).boost(model, momentum(model))
        model(torch.ones(2, 3))
        before = model.unwrap()
        model.module.calls, model.module.scale = 7, None
        model.module.layer.extra = "set"
        after = model.unwrap()
        return before.calls, before.scale.tolist(), after.calls, after.scale, after.layer.extra

    scale = pytest.approx([0.9] * 3)
    assert fs.run(main, mesh=fs.make_mesh({"data": 2})) == [(1, scale, 7, None, "set")] * 2


def test_what_other_stages_keep_has_a_shape_and_no_numbers():
    def main():
        model = nn.Sequential(Counting(), Counting())
        booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2))
        model, opt, loss, *_ = booster.boost(model, momentum(model), lambda y, _: y.square().mean())
        pair = torch.ones(4, 3), torch.ones(4, 3)
        booster.execute_pipeline(iter([pair]), model, loss, opt)
        shown = [(part.calls, part.scale.tolist()) for part in model.module]
        for part in model.module:
            part.scale[0] = 3.0
            part.calls = 0 if part.calls > 0 else part.calls
        booster.execute_pipeline(iter([pair]), model, loss, opt)
        learnt = [(part.calls, part.scale.tolist()) for part in model.unwrap()]
        return shown, learnt

    own, nothing = (
        (1, pytest.approx([0.9] * 3)),
        (pytest.approx(torch.nan, nan_ok=True), pytest.approx([torch.nan] * 3, nan_ok=True)),
    )
    learnt = [(1, pytest.approx([2.7, 0.81, 0.81]))] * 2
    found = fs.run(main, mesh=fs.make_mesh({"pipe": 2}))
    assert found == [([own, nothing], learnt), ([nothing, own], learnt)]


class LazyAct(nn.Module):
    """Makes a part of it in its first call."""

    def __init__(self, make):
        super().__init__()
        self.layer, self.act, self.make = nn.Linear(3, 3), None, make

    def forward(self, x):
        if self.act is None:
            self.act = self.make()
        return self.act(self.layer(x))


def lazily(make):
    def main():
        torch.manual_seed(0)
        model = LazyAct(make)
        booster = fs.Booster(plugin=fs.DDPPlugin())
        model, opt, *_ = booster.boost(model, momentum(model))
        found = []
        for step in range(3):
            loss = model(batch(step).float()).square().mean()
            booster.backward(loss, opt)
            opt.step()
            opt.zero_grad()
            found.append(loss.item())
        return found

    return fs.run(main, mesh=fs.make_mesh({"data": 1}))[0]


def test_a_part_without_tensors_may_be_made_in_a_forward():
    torch.manual_seed(0)
    model, expected = LazyAct(nn.GELU), []
    opt = momentum(model)
    for step in range(3):
        loss = model(batch(step).float()).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        expected.append(loss.item())
    assert lazily(nn.GELU) == pytest.approx(expected)


def test_a_part_with_tensors_may_not():
    with pytest.warns(UserWarning, match="LazyAct's submodules was changed by a forward"):
        lazily(lambda: nn.Linear(3, 3))


REGISTER = {
    "forward": lambda part: part.register_forward_hook(lambda module, x, y: y * 0.5),
    "backward": lambda part: part.register_full_backward_hook(lambda module, xs, ys: tuple(x * 0.5 for x in xs)),
    "before backward": lambda part: part.register_full_backward_pre_hook(lambda module, ys: tuple(y * 0.5 for y in ys)),
}


@pytest.mark.parametrize("kind", REGISTER)
def test_hooks_of_all_kinds_count_in_stages(kind):
    def row():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).double()

    def main():
        booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2, microbatches=2))
        model, opt, loss, *_ = booster.boost(model := row(), momentum(model), lambda y, _: y.square().mean())
        losses = []
        for step in range(STEPS):
            if step == 1:
                REGISTER[kind](model.module[1])
            losses.append(booster.execute_pipeline(iter([(batch(step),) * 2]), model, loss, opt)["loss"].item())
            opt.step(), opt.zero_grad()
        return losses

    plain, expected = row(), []
    opt = momentum(plain)
    for step in range(STEPS):
        if step == 1:
            REGISTER[kind](plain[1])
        loss = plain(batch(step)).square().mean()
        loss.backward()
        opt.step(), opt.zero_grad()
        expected.append(loss.item())
    for losses in fs.run(main, mesh=fs.make_mesh({"pipe": 2})):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-10)


class Tabled(nn.Module):
    """Whose forward looks something up in a table, of which every call has a copy."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.table = nn.Linear(3, 2), kind(dict.fromkeys(range(3000), 1.0))

    def forward(self, x):
        return self.layer(x) * self.table[0]


KINDS = {"dict": dict, "list": lambda table: [*table.values()]}


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_of_a_large_table_is_followed(kind):
    def main():
        model = Tabled(KINDS[kind])
        model, *_ = fs.Booster().boost(model, momentum(model))
        before = model(torch.ones(2, 3))
        model.module.table[0] = 0.5
        return before, model(torch.ones(2, 3))

    for before, after in fs.run(main, mesh=fs.make_mesh({"data": 1})):
        torch.testing.assert_close(after, before / 2)


@pytest.mark.parametrize("plugin", [fs.DDPPlugin, lambda: fs.HybridParallelPlugin(pipeline=2)], ids=["ddp", "stages"])
@pytest.mark.parametrize("path", ["", "0"])
def test_what_is_compiled_after_boosting_is_told(plugin, path):
    def main():
        booster, x = fs.Booster(plugin=plugin()), batch(0)
        model, opt, loss, *_ = booster.boost(model := make(), momentum(model), lambda y, _: y.square().mean())
        model.module.get_submodule(path).compile(backend="eager")
        for _ in range(2):
            if plugin is fs.DDPPlugin:
                booster.backward(model(x).square().mean(), opt)
            else:
                booster.execute_pipeline(iter([(x, x)]), model, loss, opt)
            opt.step()

    mesh = fs.make_mesh({"data": 1} if plugin is fs.DDPPlugin else {"pipe": 2})
    with pytest.warns(UserWarning, match=rf"^compile\(\) of {path or 'the model'} counts for nothing") as told:
        fs.run(main, mesh=mesh)
    assert len(told) == mesh.size
