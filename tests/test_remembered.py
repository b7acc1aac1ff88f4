"""What a model remembers, where slices and devices write to different parts of it, and make of them what they like."""

import gc
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from tests.loops import PLUGINS, momentum

ROWS = 8
START = {
    "a": torch.full((2, 3), 0.5, dtype=torch.float64),
    "b": torch.tensor(4),
    "c": torch.tensor(True),
    "z": torch.tensor([0.25 + 0.5j], dtype=torch.complex128),
}


def remembering(params, buffers, batch):
    """Write to what the first sample says, by the bits of a number, and make something of what it says too."""
    which, value = int(batch[0, 0]), batch[0, 1]
    new = dict(buffers)
    if which & 1:
        new["a"] = new["a"] * 0.5 + value
    if which & 2:
        new["b"] = new["b"] + 2
    if which & 4:
        new["made"] = value.detach().reshape(1).clone()
    if which & 8:
        new["c"] = ~new["c"]
    if which & 16:
        new["z"] = new["z"] * 1j + value
    return (params["w"] * batch[:, 1]).mean(), new


def expected(batch, slices):
    """Return the mean of each buffer over the slices that wrote to it: lists, and nothing else."""
    params, found = {"w": torch.ones((), dtype=torch.float64)}, {}
    for part in batch.chunk(slices):
        _, new = remembering(params, START, part)
        for key, x in new.items():
            if x is not START.get(key):
                found.setdefault(key, []).append(x)
    result = dict(START)
    for key, rows in found.items():
        if rows[0].is_complex():
            result[key] = torch.view_as_complex(torch.stack([torch.view_as_real(x) for x in rows]).mean(0))
        else:
            mean = torch.stack(rows).double().mean(0)
            result[key] = (mean if rows[0].is_floating_point() else mean.round()).to(rows[0])
    return result


def step(batch, n, **options):
    mesh = fs.make_mesh({"data": n})
    params = fs.shard_params({"w": torch.ones((), dtype=torch.float64)}, P(), mesh=mesh)
    value_and_grad = fs.value_and_grad(remembering, mesh=mesh, batch=P("data"), has_buffers=True, **options)
    (_, buffers), _ = value_and_grad(params, START, batch)
    return {key: fs.unshard(x) for key, x in buffers.items()}


batches = st.lists(st.tuples(st.integers(0, 31), st.integers(-40, 40)), min_size=ROWS, max_size=ROWS).map(
    lambda rows: torch.tensor(rows, dtype=torch.float64) / torch.tensor([1.0, 8.0])
)


@given(batches, st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2)]))
def test_what_is_remembered_is_the_mean_over_those_that_wrote_to_it(batch, how):
    n, accumulate = how
    found, wanted = step(batch, n, accumulate=accumulate), expected(batch, n * accumulate)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], x) and found[key].dtype is x.dtype for key, x in wanted.items())


@given(batches)
def test_it_has_the_same_bits_on_all_meshes(batch):
    alone, *others = [step(batch * torch.tensor([1.0, torch.pi]), n, reproducible=True, slices=8) for n in (1, 2, 4)]
    for found in others:
        assert found.keys() == alone.keys() and all(torch.equal(found[key], x) for key, x in alone.items())


def test_a_tree_that_is_no_dict_has_to_be_the_same_everywhere():
    def loss(params, buffers, batch):
        return params["w"] * batch.mean(), [*buffers, batch.sum()] if batch[0] > 0 else buffers

    mesh = fs.make_mesh({"data": 2})
    grad = fs.value_and_grad(loss, mesh=mesh, batch=P("data"), has_buffers=True)
    with pytest.raises(fs.LayoutError, match=r"1 is among the buffers that some devices, .* not among those of others"):
        grad(fs.shard_params({"w": torch.ones(())}, P(), mesh=mesh), [torch.ones(2)], torch.tensor([-1.0, 1.0]))


# -- modules ----------------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Which normalises a batch that begins above 0, and counts those."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("taken", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = self.layer(x)
        if x[0, 0] <= 0:
            return y
        self.taken += 1
        return self.norm(y)


class Masking(nn.Module):
    """Which keeps a mask as long as it has ever been needed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("mask", torch.ones(1), persistent=False)

    def forward(self, x):
        longest = int(x[0, 0].abs())
        if len(self.mask) < longest:
            self.mask = torch.ones(longest)
        return self.layer(x) * self.mask[0]


def train(make, plugin, batches):
    """Return what one device remembers after each step, and has learnt at last; device i is given batches[step][i]."""
    torch.manual_seed(0)
    model = make()
    booster = fs.Booster(plugin=plugin())
    model, opt, *_ = booster.boost(model, momentum(model))
    remembered = []
    for batch in batches:
        booster.backward(model(batch[fs.axis_index("data")]).square().mean(), opt)
        opt.step()
        opt.zero_grad()
        remembered.append({name: x.clone() for name, x in model.unwrap().named_buffers()})
    return remembered, dict(model.unwrap().named_parameters())


def signed(step, sign):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
    x[0, 0] = sign * x[0, 0].abs()
    return x


BRANCHES = [[signed(0, 1), signed(1, -1)], [signed(2, -1), signed(3, -1)], [signed(4, 1), signed(5, 1)]]


def branching(plugin):
    """Return what the devices of this process remember and have learnt."""
    return fs.run(train, Branching, plugin, BRANCHES, mesh=fs.make_mesh({"data": 2}))


TOGETHER = PLUGINS | {"fsdp": partial(fs.FSDPPlugin, unit=1 << 20)}  # a gather takes all devices: not within a branch


@pytest.mark.parametrize("plugin", TOGETHER)
def test_a_norm_in_a_branch_that_one_device_takes(plugin):
    (first, one), (second, other) = branching(TOGETHER[plugin])
    torch.manual_seed(0)
    module = Branching()
    module(BRANCHES[0][0])
    assert [int(each["taken"]) for each in first] == [1, 1, 2]
    torch.testing.assert_close(
        first[0]["norm.running_mean"], module.norm.running_mean
    )  # not averaged with what did nothing
    assert torch.equal(first[0]["norm.running_var"], first[1]["norm.running_var"])
    for here, there in zip([*first, one], [*second, other], strict=True):
        assert here.keys() == there.keys() and all(torch.equal(here[key], x) for key, x in there.items())


def test_a_norm_in_a_branch_that_one_process_takes(two):
    found, wanted = two.run(branching, fs.DDPPlugin), branching(fs.DDPPlugin)
    for ((remembered, learnt),), (expected, params) in zip(found, wanted, strict=True):
        for here, there in zip([*remembered, learnt], [*expected, params], strict=True):
            assert here.keys() == there.keys() and all(torch.equal(here[key], x) for key, x in there.items())


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_mask_of_another_size_on_each_device(plugin):
    lengths = [(2, 2), (3, 5), (5, 5)]
    batches = [[torch.full((4, 3), float(length)) for length in row] for row in lengths]

    with pytest.warns(UserWarning, match="give mask several shapes"):
        found = fs.run(train, Masking, PLUGINS[plugin], batches, mesh=fs.make_mesh({"data": 2}))
    torch.manual_seed(0)
    module = Masking()
    opt = momentum(module)
    for batch in batches:
        module(torch.cat(batch)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    for remembered, learnt in found:
        assert [len(each["mask"]) for each in remembered] == [2, 2, 5]
        for name, x in module.named_parameters():
            torch.testing.assert_close(learnt[name], x)


class Rotating(nn.Module):
    """Which makes a table as long as it has ever been needed, and a note of its length."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.build(1)

    def build(self, length):
        self.length = length
        self.register_buffer("table", torch.ones(length), persistent=False)

    def forward(self, x):
        longest = int(x[0, 0].abs())
        if self.length < longest:
            self.build(longest)
        return self.layer(x) * self.table[:longest].mean()


def test_what_a_module_writes_together_stays_together():
    batches = [[torch.full((4, 3), float(length)) for length in row] for row in ((5, 9), (7, 7), (7, 7), (8, 8))]
    with pytest.warns(
        UserWarning, match="give table several shapes or dtypes: .* so (length:kept, table|table, length:kept) is"
    ):
        found = fs.run(train, Rotating, fs.DDPPlugin, batches, mesh=fs.make_mesh({"data": 2}))
    for remembered, _ in found:
        assert [len(each["table"]) for each in remembered] == [1, 7, 7, 8]


def test_large_whole_numbers_keep_their_digits():
    def loss(params, buffers, batch):
        return params["w"] * batch.mean(), {"seed": buffers["seed"] + 2}

    mesh = fs.make_mesh({"data": 2})
    grad = fs.value_and_grad(loss, mesh=mesh, batch=P("data"), has_buffers=True)
    params = fs.shard_params({"w": torch.ones(())}, P(), mesh=mesh)
    (_, buffers), _ = grad(params, {"seed": torch.tensor(123456789123456789)}, torch.ones(2))
    assert fs.unshard(buffers["seed"]).item() == 123456789123456791


# -- in stages ----------------------------------------------------------------------------------------------------------


class Growing(nn.Module):
    """Which remembers in all ways: a buffer that grows, one that is made, numbers and tensors in plain attributes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("made", None)
        self.calls, self.mean, self.table = 0, torch.zeros(4, dtype=torch.float64), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0, 1, 4, dtype=x.dtype)
        y = self.layer(x - self.mean) / len(self.seen) + self.table * (self.calls if self.made is None else self.made)
        self.seen = torch.zeros(len(self.seen) + 1)
        self.made = torch.full((1,), self.calls / 8, dtype=x.dtype)
        self.calls += 1
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return y


def growing():
    torch.manual_seed(0)
    parts = [[nn.Linear(3, 4), Growing()], [Growing()], [nn.Tanh(), Growing()], [nn.Linear(4, 2)]]
    return nn.Sequential(*(nn.Sequential(*layers) for layers in parts)).double()


def whole_batch(step):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def alone():
    model, losses = growing(), []
    opt = momentum(model)
    for step in range(3):
        loss = model(whole_batch(step)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, model


def in_stages(**options):
    """Return the losses, and what the model is at last."""
    model = growing()
    booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2, microbatches=4, **options))
    model, opt, loss, *_ = booster.boost(model, momentum(model), lambda y, _: y.square().mean())
    losses = []
    for step in range(3):
        x = whole_batch(step)
        losses.append(booster.execute_pipeline(iter([(x, x)]), model, loss, opt, return_loss=True)["loss"].item())
        opt.step()
        opt.zero_grad()
    return losses, model.unwrap()


def on_processes(mesh):
    ((losses, model),) = fs.run(in_stages, mesh=fs.make_mesh(mesh))
    return losses, dict(model.named_buffers()), model[2][1].calls, model[2][1].mean


MESHES = [{"pipe": 2}, {"pipe": 2, "data": 2}]


def assert_remembers_alike(losses, model, expected, plain):
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-10)
    for (name, x), (other, y) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert name == other
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        if isinstance(one, Growing):
            assert one.calls == other.calls == 3
            torch.testing.assert_close(one.mean, other.mean, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"schedule": "interleaved", "chunks": 2}, {"zero_stage": 1}, {"recompute": "always"}]
)
def test_what_stages_make_is_remembered(mesh, options):
    expected, plain = alone()
    for losses, model in fs.run(lambda: in_stages(**options), mesh=fs.make_mesh(mesh)):
        assert_remembers_alike(losses, model, expected, plain)


def test_what_stages_make_is_known_to_all_processes(two):
    expected, plain = alone()
    for losses, buffers, calls, mean in two.run(on_processes, {"pipe": 2}):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-10)
        assert calls == 3 and {name: x.shape for name, x in buffers.items()} == {
            name: x.shape for name, x in plain.named_buffers()
        }
        torch.testing.assert_close(mean, plain[2][1].mean, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_functional_step_remembers_what_stages_make(mesh):
    expected, _ = alone()
    booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2, microbatches=4, mesh=fs.make_mesh(mesh)))
    model = growing()
    state = booster.init(model, momentum(model), lambda y, _: y.square().mean())
    losses = []
    for step in range(3):
        x = whole_batch(step)
        state, metrics = booster.step(state, (x, x))
        losses.append(metrics["loss"].item())
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-10)


# -- several calls in a step ----------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x, norm=True):
        return self.norm(self.layer(x)) if norm else self.layer(x)


@pytest.mark.parametrize("reproducible", [False, True])
def test_what_an_earlier_call_of_a_step_has_written_is_averaged_too(reproducible):
    a, b = torch.randn(16, 3), torch.randn(16, 3)
    own = {"reproducible": True, "slices": 2} if reproducible else {}

    def main():
        torch.manual_seed(0)
        model = Normed()
        booster = fs.Booster(plugin=fs.DDPPlugin(**own))
        model, opt, *_ = booster.boost(model, momentum(model))
        here = slice(8 * fs.axis_index("data"), 8 * fs.axis_index("data") + 8)
        loss = model(a[here]).square().mean() + model(b[here], norm=False).square().mean()
        booster.backward(loss, opt)
        opt.step()
        return dict(model.unwrap().named_buffers())

    found = fs.run(main, mesh=fs.make_mesh({"data": 2}))
    means = []
    for part in a.chunk(2):
        torch.manual_seed(0)
        module = Normed()
        module(part)
        means.append(module.norm.running_mean)
    for each in found:
        assert torch.equal(each["norm.num_batches_tracked"], torch.tensor(1))
        torch.testing.assert_close(each["norm.running_mean"], torch.stack(means).mean(0))


class Counting(nn.Module):
    """Which runs a part again in backward, that counts its calls, and notes what comes back in a hook."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.calls = nn.Linear(3, 3), nn.BatchNorm1d(3), 0
        self.register_buffer("seen", torch.zeros(3))

    def inner(self, x):
        self.calls += 1
        self.seen.add_(x.detach().mean(0))
        return self.norm(self.layer(x)).tanh()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def counting(recompute):
    torch.manual_seed(0)
    model = nn.Sequential(Counting(), nn.Linear(3, 3), Counting(), nn.Linear(3, 2)).double()
    booster = fs.Booster(fs.HybridParallelPlugin(pipeline=2, microbatches=4, recompute=recompute))
    model, opt, loss, *_ = booster.boost(model, momentum(model), lambda y, _: y.square().mean())
    for step in range(3):
        x = whole_batch(step)
        booster.execute_pipeline(iter([(x, x)]), model, loss, opt)
        opt.step()
        opt.zero_grad()
    return model.unwrap()


def test_what_a_stage_runs_again_in_backward_is_learnt_once():
    """A call may be ended after its backward, but for one of which a part is run again there."""
    (once, *_), (again, *_) = (fs.run(counting, how, mesh=fs.make_mesh({"pipe": 2})) for how in ("never", "always"))
    for part in (once[0], once[2]):
        assert part.calls == 3 and part.norm.num_batches_tracked == 3
    for one, other in zip(once.state_dict().values(), again.state_dict().values(), strict=True):
        assert one.equal(other)


class Binding(nn.Module):
    """Which does what no forward may, as it comes out when its call ends."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        y = self.layer(x)
        self.layer.weight = nn.Parameter(self.layer.weight.detach() * 2)
        return y


def test_what_comes_out_when_a_call_ends_says_which_call_it_was():
    def main():
        model = nn.Sequential(Binding(), nn.Linear(3, 3), Binding(), nn.Linear(3, 2)).double()
        booster = fs.Booster(fs.HybridParallelPlugin(pipeline=2, microbatches=4))
        model, opt, loss, *_ = booster.boost(model, momentum(model), lambda y, _: y.square().mean())
        x = whole_batch(0)
        booster.execute_pipeline(iter([(x, x)]), model, loss, opt)

    with pytest.raises(fs.ModuleError, match="binds the parameter 0.layer.weight to another") as error:
        fs.run(main, mesh=fs.make_mesh({"pipe": 2}))
    assert any("after stage 0 was called with microbatch 0" in note for note in error.value.__notes__)


class Toggling(nn.Module):
    """Whose buffers are None every other time, and gone every third."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 4), 0
        self.register_buffer("cache", torch.ones(4))
        self.register_buffer("made", None)

    def forward(self, x):
        y = self.layer(x)
        y = y if self.cache is None else y * self.cache
        y = y if self.made is None else y + self.made
        self.calls += 1
        self.cache = None if self.calls % 2 else torch.full((4,), 0.5, dtype=x.dtype)
        self.made = torch.ones(4, dtype=x.dtype) if self.made is None else None
        if self.calls % 3 == 0:
            del self.cache
            self.register_buffer("cache", None)
        return y


@pytest.mark.parametrize("options", [{}, {"pipeline": 2, "microbatches": 2}], ids=["ddp", "stages"])
def test_buffers_may_be_none(options):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(Toggling(), nn.Linear(4, 2)).double()

    def main():
        model, losses = make(), []
        booster = fs.Booster(plugin=fs.HybridParallelPlugin(**options) if options else fs.DDPPlugin())
        model, opt, loss, *_ = booster.boost(model, momentum(model), lambda y, _: y.square().mean())
        for step in range(6):
            x = whole_batch(step)
            if options:
                losses.append(
                    booster.execute_pipeline(iter([(x, x)]), model, loss, opt, return_loss=True)["loss"].item()
                )
            else:
                own = loss(model(x.chunk(2)[fs.axis_index("data")]), None)
                booster.backward(own, opt)
                losses.append(fs.pmean(own.detach(), "data").item())
            opt.step()
            opt.zero_grad()
        return losses, model.unwrap()[0]

    plain, expected = make(), []
    opt = momentum(plain)
    for step in range(6):
        loss = plain(whole_batch(step)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        expected.append(loss.item())
    for losses, module in fs.run(main, mesh=fs.make_mesh({"pipe": 2} if options else {"data": 2})):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-10)
        assert module.cache is None and module.made is None and module.calls == 6


def norms():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("plugin", [*PLUGINS, "reproducible"])
def test_what_a_forward_without_gradients_writes_is_remembered(plugin, when):
    x, other = torch.randn(8, 3).double(), torch.randn(8, 3).double()

    def look(model, at):
        if at == when:
            with torch.no_grad():
                model(other)

    def main():
        model = norms()
        made = partial(fs.DDPPlugin, reproducible=True, slices=1) if plugin == "reproducible" else PLUGINS[plugin]
        booster = fs.Booster(plugin=made())
        model, opt, *_ = booster.boost(model, momentum(model))
        for _ in range(2):
            look(model, "before")
            loss = model(x).square().mean()
            look(model, "between")
            booster.backward(loss, opt)
            look(model, "after")
            opt.step()
            opt.zero_grad()
        return model.unwrap()

    model = norms()
    opt = momentum(model)
    for _ in range(2):
        look(model, "before")
        loss = model(x).square().mean()
        look(model, "between")
        loss.backward()
        look(model, "after")
        opt.step()
        opt.zero_grad()
    (found,) = fs.run(main, mesh=fs.make_mesh({"data": 1}))
    for (name, own), (_, expected) in zip(found.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(own, expected, msg=name)


def test_stages_remember_forwards_without_gradients():
    x = torch.randn(8, 3).double()

    def main():
        model = nn.Sequential(norms(), nn.Linear(4, 2).double())
        booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2, microbatches=1))
        model, _, loss, *_ = booster.boost(model, None, lambda y, _: y.square().mean())
        with torch.no_grad():
            booster.execute_pipeline(iter([(x, x)]), model, loss)
            model.eval()
            booster.execute_pipeline(iter([(x, x)]), model, loss)
        return model.unwrap()[0][1]

    expected = norms()
    expected(x)
    for norm in fs.run(main, mesh=fs.make_mesh({"pipe": 2})):
        torch.testing.assert_close(norm.running_mean, expected[1].running_mean)
        assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("rows", [8, 10, 14])
@pytest.mark.parametrize("n", [1, 2])
def test_slices_of_a_loop_count_as_those_of_a_step(n, rows):
    x = torch.randn(rows, 3).double()
    own = {"reproducible": True, "slices": 4}

    def main():
        model = norms()
        booster = fs.Booster(plugin=fs.DDPPlugin(**own))
        model, opt, *_ = booster.boost(model, momentum(model))
        booster.backward(model(x.chunk(n)[fs.axis_index("data")]).square().mean(), opt)
        opt.step()
        return dict(model.unwrap().named_buffers())

    mesh = fs.make_mesh({"data": n})
    booster, model = fs.Booster(plugin=fs.DDPPlugin(mesh=mesh, **own)), norms()
    state = booster.init(model, momentum(model), lambda y, _: y.square().mean())
    state, _ = booster.step(state, (x, x))
    for found in fs.run(main, mesh=mesh):
        for name, buffer in found.items():
            assert torch.equal(buffer, fs.unshard(state.buffers[name])), name


@pytest.mark.parametrize("reproducible", [False, True])
def test_outputs_that_nobody_holds_are_let_go(reproducible):
    own = {"reproducible": True, "slices": 2} if reproducible else {}

    def main():
        model = norms()
        booster = fs.Booster(plugin=fs.DDPPlugin(**own))
        model, opt, *_ = booster.boost(model, momentum(model))
        seen = []

        def note(module, args, output):
            seen.append(weakref.ref(output))

        model.module[1].register_forward_hook(note)
        for _ in range(3):
            model(torch.randn(4, 3).double())
            gc.collect()
        alive = sum(one() is not None for one in seen[: -2 if reproducible else -1])
        booster.backward(model(torch.randn(4, 3).double()).square().mean(), opt)
        opt.step()
        return alive

    assert fs.run(main, mesh=fs.make_mesh({"data": 1})) == [0]
