"""What a backward sets in a module: the next call finds it, and whoever looks at the module."""

import gc
import warnings
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

import fshard as fs

ROWS, WIDTH, STEPS = 4, 3, 3


class ByTensorHook(nn.Module):
    """Goes on by what hooks have counted, as one that adapts itself to its gradients."""

    def __init__(self):
        super().__init__()
        self.layer, self.times, self.gradient = nn.Linear(WIDTH, WIDTH), 0, None

    def note(self, g):
        self.times, self.gradient = self.times + 1, g.detach() * 2

    def forward(self, x):
        y = self.layer(x) / (1 + self.times)
        if y.requires_grad:
            y.register_hook(self.note)
        return y


class ByLayersHook(ByTensorHook):
    def forward(self, x):
        return self.layer(x) / (1 + self.times)


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        ctx.module.note(g)
        return g, None


class ByFunction(ByTensorHook):
    def forward(self, x):
        return Counting.apply(self.layer(x) / (1 + self.times), self)


def hooked(module, inputs, outputs):
    module.note(outputs[0])


def made(kind):
    torch.manual_seed(0)
    module = nn.Sequential(kind(), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
    if kind is ByLayersHook:
        module[0].register_full_backward_hook(hooked)
    return module


def batch(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).double()


def trained(kind, plugin=None, n=1, *, early=False):
    """Return losses, what hooks have noted after each step, and parameters."""
    model, booster, whole = made(kind), None, None
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    whole = model
    if plugin is not None:
        booster = fs.Booster(plugin)
        model, opt, *_ = booster.boost(model, opt)
        whole = model.module
    found = []
    for step in range(STEPS):
        x = batch(step) if booster is None else batch(step).chunk(n)[fs.axis_index("data")]
        loss = model(x).square().mean()
        if early:
            opt.zero_grad()
        loss.backward() if booster is None else booster.backward(loss, opt)
        opt.step()
        if not early:
            opt.zero_grad()
        found.append((loss.item(), whole[0].times, whole[0].gradient))
        with torch.no_grad():
            model(x)
    return found, [x.detach() for x in (model if booster is None else model.unwrap()).parameters()]


pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
KINDS = [ByTensorHook, ByLayersHook, ByFunction]


@pytest.mark.parametrize(
    "plugin", [fs.DDPPlugin, lambda: fs.ZeroPlugin(stage=2), fs.FSDPPlugin], ids=["ddp", "zero 2", "fsdp"]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "early"), [(1, False), (2, False), (2, True)])
def test_what_a_backward_sets_is_kept(kind, plugin, n, early):
    notes, params = trained(kind)
    for index, (found, learnt) in enumerate(
        fs.run(lambda: trained(kind, plugin(), n, early=early), mesh=fs.make_mesh({"data": n}))
    ):
        torch.testing.assert_close(learnt, params, rtol=0, atol=1e-12)
        assert [times for _, times, _ in found] == [times for _, times, _ in notes] == [*range(1, STEPS + 1)]
        for (_, _, g), (_, _, whole) in zip(found, notes, strict=True):
            torch.testing.assert_close(g, whole.chunk(n)[index], rtol=0, atol=1e-12)  # of the whole batch's loss


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_backward_sets_is_kept_in_stages(kind):
    def main():
        model = made(kind)
        booster = fs.Booster(fs.HybridParallelPlugin(pipeline=2, microbatches=1))
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        losses = []
        for step in range(STEPS):
            pair = batch(step), torch.zeros(ROWS, 1).double()
            losses.append(booster.execute_pipeline(iter([pair]), model, nn.functional.mse_loss, opt)["loss"].item())
            opt.step(), opt.zero_grad()
        return losses, model.module[0].times

    first, other = fs.run(main, mesh=fs.make_mesh({"pipe": 2}))
    expected = [loss for loss, _, _ in trained(kind)[0]]
    assert first[0] == pytest.approx(expected, rel=1e-12)
    assert other[0] == pytest.approx(expected, rel=1e-12)
    assert first[1] == STEPS


class Losing(ByTensorHook):
    """Writes where nobody looks."""

    def __init__(self):
        super().__init__()
        self.all = []

    def note(self, g):
        self.all.append(g)


def test_what_a_backward_writes_to_lists_is_told():
    with pytest.warns(UserWarning, match=r"A backward has changed 0.all, where nobody finds it"):
        fs.run(lambda: trained(Losing, fs.DDPPlugin()), mesh=fs.make_mesh({"data": 1}))


class Checkpointed(nn.Module):
    """Has a graph that refers to it, and runs a part again that sets attributes, which counts once."""

    def __init__(self):
        super().__init__()
        self.layer, self.note, self.times, self.gradient = nn.Linear(WIDTH, WIDTH), [1], 0, None
        self.register_buffer("calls", torch.zeros(()))

    def inner(self, x):
        self.calls += 1
        self.times += 1
        self.latest = x
        return self.layer(x)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


def test_what_a_checkpoint_sets_again_counts_once():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ((found, _),) = fs.run(lambda: trained(Checkpointed, fs.DDPPlugin()), mesh=fs.make_mesh({"data": 1}))
    assert [times for _, times, _ in found] == [1, 3, 5]  # and that of each evaluation


class Resetting(ByTensorHook):
    """Forgets in a forward what hooks have noted."""

    def forward(self, x):
        self.gradient = None
        return super().forward(x)


def test_what_was_none_when_a_forward_ended_is_what_a_hook_made_it():
    ((found, _),) = fs.run(lambda: trained(Resetting, fs.DDPPlugin()), mesh=fs.make_mesh({"data": 1}))
    for (_, _, g), (_, _, expected) in zip(found, trained(Resetting)[0], strict=True):
        torch.testing.assert_close(g, expected, rtol=0, atol=1e-12)


class Saving(ByTensorHook):
    """Has something in its graph that tells whether that is still there."""

    marks: ClassVar = []

    def forward(self, x):
        y = super().forward(x)
        mark = Saving()
        self.marks.append(weakref.ref(mark))
        y.register_hook(lambda g: self.note(g) if mark else None)
        self.latest = y
        return y


def test_graphs_are_let_go_though_they_lead_to_what_leads_to_them():
    Saving.marks.clear()

    def main():
        model = made(Saving)
        booster = fs.Booster(fs.DDPPlugin())
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            loss = model(batch(step)).sum()
            opt.zero_grad()
            booster.backward(loss, opt)
            opt.step()
            del loss
        gc.collect()
        return [mark() is None for mark in Saving.marks]

    assert fs.run(main, mesh=fs.make_mesh({"data": 1})) == [[True, True, False]]  # the last one's can be seen


def test_calls_of_which_two_are_gone_back_through_one_after_the_other_are_both_looked_at():
    def main():
        model = made(ByTensorHook)
        booster = fs.Booster(fs.DDPPlugin())
        model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        first, second = model(batch(0)).sum(), model(batch(1)).square().sum()
        found = []
        for loss in (first, second):
            booster.backward(loss, opt)
            found.append(model.module[0].gradient.clone())
        return found

    ((one, other),) = fs.run(main, mesh=fs.make_mesh({"data": 1}))
    assert not torch.equal(one, other)


class Failing(ByTensorHook):
    """Raises in the middle of a backward, once."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def note(self, g):
        super().note(g)
        if self.times == 2:
            raise KeyError("a hook has failed")


def gone_on(plugin=None, n=1, each=1):
    """Return what was learnt by a loop that goes on after a backward has failed, and what hooks have noted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Failing(), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
    booster, whole = None, model
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if plugin is not None:
        booster = fs.Booster(plugin)
        model, opt, *_ = booster.boost(model, opt)
        whole = model.module
    failed = 0
    for step in range(5):
        try:
            for turn in range(each):
                x = torch.cat([batch(step * each + turn)] * 2)
                x = x if booster is None else x.chunk(n)[fs.axis_index("data")]
                loss = model(x).square().mean() / each
                loss.backward() if booster is None else booster.backward(loss, opt)
        except KeyError:
            failed += 1
        else:
            opt.step()
        opt.zero_grad()
    model = model if booster is None else model.unwrap()
    return (failed, whole[1].times, model[1].calls.item()), dict(model.named_parameters())


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "plugin",
    [
        fs.DDPPlugin,
        lambda: fs.ZeroPlugin(stage=2),
        fs.FSDPPlugin,
        lambda: fs.FSDPPlugin(unit=1),
        lambda: fs.DDPPlugin(options={"bucket": 1}),
        lambda: fs.DDPPlugin(reproducible=True),
    ],
    ids=["ddp", "zero 2", "fsdp", "units", "buckets", "reproducible"],
)
def test_a_backward_that_fails_leaves_no_gradients_once_they_are_zeroed(plugin, n, each):
    counted, params = gone_on(each=each)
    assert counted[0] == 1
    for found, learnt in fs.run(lambda: gone_on(plugin(), n, each), mesh=fs.make_mesh({"data": n})):
        assert found == counted
        torch.testing.assert_close(learnt, params, rtol=0, atol=1e-9)
