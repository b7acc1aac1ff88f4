"""`booster.save` and `load`: the steps after are those of the loop that was not interrupted, to the bit, under any plugin."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs
from fshard.booster.full_state import full_leaves
from fshard.errors import CheckpointError
from fshard.optim.torch_optim.classes import CLASSES

DATA = TensorDataset(
    torch.randn(40, 4, 8, generator=torch.Generator().manual_seed(1)).double(),
    torch.randn(40, 4, 8, generator=torch.Generator().manual_seed(2)).double(),
)


class Block(nn.Module):
    def __init__(self, counts, dropout):
        super().__init__()
        self.counts = counts
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.counts:
            self.calls += 1
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.out(y.transpose(1, 2).flatten(2)))


def network(counts=True, dropout=0.25):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8), Block(counts, dropout), nn.Linear(8, 8), Block(counts, dropout), nn.Linear(8, 8)
    )
    model[4].weight = model[0].weight  # of the first and the last stage
    return model.double()


def adamw(model):
    decayed = [x for x in model.parameters() if x.ndim > 1]
    others = [x for x in model.parameters() if x.ndim < 2]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01, betas=(0.8, 0.9))


HYBRID = partial(fs.HybridParallelPlugin, sample=torch.randn(2, 4, 8).double(), microbatches=1)
PLUGINS = {
    "ddp": (fs.DDPPlugin, {"data": 2}),
    "zero1": (partial(fs.ZeroPlugin, stage=1), {"data": 4}),
    "zero2": (partial(fs.ZeroPlugin, stage=2), {"data": 2}),
    "fsdp": (fs.FSDPPlugin, {"data": 4}),
    "stages": (partial(HYBRID, pipeline=2, zero_stage=1), {"pipe": 2, "data": 2}),
    "tensor": (partial(HYBRID, tensor=2, zero_stage=3), {"data": 2, "model": 2}),
    "both": (partial(HYBRID, tensor=2, pipeline=2, zero_stage=2), {"pipe": 2, "data": 1, "model": 2}),
}


def options_of(plugin):
    return getattr(plugin, "keywords", {})


class Loop:
    """The boosted parts of a loop on one device."""

    def __init__(self, plugin, make=network, optimizer=adamw, reproducible=True, **options):
        staged = options_of(plugin).get("pipeline", 1) > 1
        self.booster = fs.Booster(plugin(reproducible=reproducible, **({} if staged else {"slices": 4}), **options))
        model = make() if options_of(plugin).get("tensor", 1) == 1 else make(counts=False)
        opt = optimizer(model)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(opt, [2, 5, 5, 9], gamma=0.5)
        loader = DataLoader(DATA, 8, shuffle=True)
        self.model, self.opt, _, self.loader, _ = self.booster.boost(model, opt, None, loader)
        self.parts = (self.model, self.opt, self.schedule, self.loader)
        self.staged = staged

    def step(self, batches):
        if self.staged:
            loss = self.booster.execute_pipeline(batches, self.model, nn.MSELoss(), self.opt)["loss"]
        else:
            x, y = next(batches)
            loss = nn.functional.mse_loss(self.model(x), y)
            self.booster.backward(loss, self.opt)
        self.booster.clip_grad_norm(self.opt, 1.0)
        self.opt.step()
        self.opt.zero_grad()
        self.schedule.step()
        return loss.detach()

    def steps(self, count):
        """Take steps on the loader's batches, in as many epochs as that takes; return losses and what is left."""
        losses = []
        while len(losses) < count:
            batches = iter(self.loader)
            losses += [self.step(batches) for _ in range(min(count - len(losses), len(self.loader)))]
        state = {name: x.detach().clone() for name, x in self.model.unwrap().state_dict().items()}
        return losses, state, torch.rand(2), self.schedule.get_last_lr(), self.loader.state_dict()


def saved(folder, plugin, before=3, after=3, **options):
    """Return the steps after a save, by the loop that saves."""

    def main():
        loop = Loop(plugin, **options)
        loop.steps(before)
        loop.booster.save(folder, *loop.parts)
        return loop.steps(after)

    return main


def loaded(folder, plugin, after=3, **options):
    def main():
        torch.manual_seed(100)
        loop = Loop(plugin, **{"seed": 5, **options})
        loop.booster.load(folder, *loop.parts)
        return loop.steps(after)

    return main


def equal(found, wanted, what=range(5)):
    for place in what:
        torch.testing.assert_close(found[place], wanted[place], rtol=0, atol=0)


@pytest.mark.parametrize("name", PLUGINS)
def test_loop_continues_with_equal_bits(name, tmp_path):
    plugin, axes = PLUGINS[name]
    mesh = fs.make_mesh(axes)
    wanted = fs.run(saved(tmp_path, plugin), mesh=mesh)
    for one, other in zip(fs.run(loaded(tmp_path, plugin), mesh=mesh), wanted, strict=True):
        equal(one, other)


PLAIN = partial(network, counts=False, dropout=0.0)
PAIRS = [pair for name in PLUGINS if name != "both" for pair in ((name, "both"), ("both", name))]
PAIRS += [("ddp", "fsdp"), ("fsdp", "zero2"), ("zero1", "stages"), ("tensor", "stages")]
EXACT = {"ddp", "zero1", "zero2", "fsdp"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that returns the checkpoint of a plugin, its state, and the three steps after it."""
    made = {}

    def folder(name):
        if name not in made:
            path, (plugin, axes) = tmp_path_factory.mktemp(name), PLUGINS[name]

            def main():
                loop = Loop(plugin, PLAIN)
                loop.steps(3)
                loop.booster.save(path, *loop.parts)
                state = copy.deepcopy((loop.model.state_dict(), loop.opt.state_dict()))
                return state, loop.steps(3)

            made[name] = path, fs.run(main, mesh=fs.make_mesh(axes))[0]
        return made[name]

    return folder


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_checkpoint_of_one_plugin_loads_into_another(one, other, folders):
    """State is equal to the bit; the next steps too, where both plugins compute the same bits."""
    (path, (state, wanted)), (plugin, axes) = folders(one), PLUGINS[other]

    def main():
        loop = Loop(plugin, PLAIN, seed=5)
        loop.booster.load(path, *loop.parts)
        equal((loop.model.state_dict(), loop.opt.state_dict()), state, [0, 1])
        return loop.steps(3)

    exact = {one, other} <= EXACT
    for _, learnt, _, rates, position in fs.run(main, mesh=fs.make_mesh(axes)):
        tolerance = 0 if exact else 1e-9
        torch.testing.assert_close(learnt, wanted[1], rtol=tolerance, atol=tolerance)
        assert (rates, position) == wanted[3:]


# -- full state, in the form of torch ---------------------------------------------------------------------------------


def batch(step):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)).double()


def two_groups(kind, model):
    options = {torch.optim.SGD: {"momentum": 0.9}, torch.optim.RMSprop: {"momentum": 0.5, "centered": True}}.get(
        kind, {}
    )
    matrices = [x for x in model.parameters() if x.ndim == 2]
    others = [] if kind is torch.optim.Muon else [{"params": [x for x in model.parameters() if x.ndim < 2], "lr": 0.02}]
    return kind([{"params": matrices}, *others], lr=0.01, **options)


def by_torch(kind, steps, load=None):
    model = small()
    opt = two_groups(kind, model)
    if load is not None:
        model.load_state_dict(load[0])
        opt.load_state_dict(load[1])
    for step in steps:
        model(batch(step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return copy.deepcopy((model.state_dict(), opt.state_dict()))


def by_booster(kind, plugin, steps, load=None, precision=None):
    def main():
        module = small()
        booster = fs.Booster(plugin(precision=precision, sync_batchnorm=True))
        model, opt, *_ = booster.boost(module, two_groups(kind, module))
        if load is not None:
            assert not any(model.load_state_dict(load[0]))
            opt.load_state_dict(load[1])
        for step in steps:
            own = batch(step).chunk(2)[fs.axis_index("data")]
            booster.backward(model(own).square().mean(), opt)
            opt.step()
            opt.zero_grad()
        return copy.deepcopy((model.state_dict(), opt.state_dict()))

    return fs.run(main, mesh=fs.make_mesh({"data": 2}))


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("plugin", [fs.DDPPlugin, fs.FSDPPlugin])
def test_state_dicts_are_those_of_torch_on_one_device(kind, plugin):
    """Keys, order, shapes and values; and each continues from the other's."""
    wanted = by_torch(kind, range(2))
    for found in by_booster(kind, plugin, range(2)):
        assert list(found[0]) == list(wanted[0])
        close(found, wanted)
    close(by_booster(kind, plugin, range(2, 4), wanted)[0], by_torch(kind, range(4)))
    close(by_torch(kind, range(2, 4), found), by_torch(kind, range(2, 4), by_torch(kind, range(2))))


def close(found, wanted):
    """Compare model and optimizer state, whose rounding Muon magnifies."""
    torch.testing.assert_close(dict(found[0]), dict(wanted[0]), rtol=1e-3, atol=1e-6)
    assert found[1].keys() == wanted[1].keys()
    assert found[1]["param_groups"] == wanted[1]["param_groups"]
    torch.testing.assert_close(found[1]["state"], wanted[1]["state"], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", PLUGINS)
def test_full_state_of_one_plugin_loads_into_another(name, folders):
    (_, (state, _)), (plugin, axes) = folders("ddp" if name != "ddp" else "both"), PLUGINS[name]

    def main():
        loop = Loop(plugin, PLAIN)
        loop.model.load_state_dict(state[0])
        loop.opt.load_state_dict(state[1])
        return copy.deepcopy((loop.model.state_dict(), loop.opt.state_dict()))

    for found in fs.run(main, mesh=fs.make_mesh(axes)):
        equal(found, state, [0, 1])


class Recorder(nn.Linear):
    """Has extra state, and a buffer that torch does not save."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


@pytest.mark.parametrize("by", ["folder", "state_dict"])
def test_extra_state_is_saved(by, tmp_path):
    def main():
        one, other = Recorder(), Recorder()
        booster = fs.Booster()
        (model, *_), (again, *_) = booster.boost(one), booster.boost(other)
        one.seen = 3
        assert list(model.state_dict()) == ["weight", "bias", "_extra_state"]
        if by == "folder":
            booster.save_model(model, tmp_path)
            booster.load_model(again, tmp_path)
        else:
            again.load_state_dict(model.state_dict())
        return other.seen, torch.equal(again.unwrap().weight, model.unwrap().weight)

    assert fs.run(main, mesh=fs.make_mesh({"data": 2})) == [(3, True)] * 2


def test_model_with_low_rank_differences(tmp_path):
    def main(plugin, load):
        booster = fs.Booster(plugin())
        module = booster.enable_lora(network())
        model, opt, *_ = booster.boost(module, torch.optim.AdamW([x for x in module.parameters() if x.requires_grad]))
        if load:
            booster.load(tmp_path, model, opt)
        else:
            booster.backward(model(DATA[:4][0]).square().mean(), opt)
            opt.step()
            booster.save(tmp_path, model, opt)
        return copy.deepcopy((model.state_dict(), opt.state_dict()))

    wanted = fs.run(main, fs.DDPPlugin, False, mesh=fs.make_mesh({"data": 2}))[0]
    assert any("lora_A" in name for name in wanted[0])
    for found in fs.run(main, fs.FSDPPlugin, True, mesh=fs.make_mesh({"data": 4})):
        equal(found, wanted, range(2))


def test_state_before_the_first_step_is_that_of_torch():
    for kind in CLASSES:
        wanted, (found, _) = by_torch(kind, []), by_booster(kind, fs.FSDPPlugin, [])
        close(found, wanted)


def test_state_of_another_optimizer_raises():
    given = by_torch(torch.optim.SGD, range(1))
    with pytest.raises(
        fs.errors.OptimizerError, match=r"parameter 0 must have exp_avg, exp_avg_sq, step; got momentum_b"
    ):
        by_booster(torch.optim.Adam, fs.DDPPlugin, [], (given[0], {**by_torch(torch.optim.Adam, [])[1], **given[1]}))
    given[0].pop("1.weight")
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "1.weight"'):
        by_booster(torch.optim.SGD, fs.DDPPlugin, [], given)


# -- other parts ------------------------------------------------------------------------------------------------------


def test_loss_scale_is_saved(tmp_path):
    def main(path=None):
        module = nn.Linear(3, 2)
        booster = fs.Booster(fs.FSDPPlugin(precision="fp16"))
        model, opt, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), lr=0.1))
        if path is not None:
            booster.load(path, model, opt)
            return opt.scale, opt.state_dict()
        for _ in range(3):
            booster.backward(model(torch.full((4, 3), 6e4)).square().mean(), opt)
            opt.step()
        booster.save(tmp_path, model, opt)
        return opt.scale, opt.state_dict()

    wanted = fs.run(main, mesh=fs.make_mesh({"data": 2}))[0]
    assert wanted[0] < 2.0**15
    assert wanted[1]["loss_scale"]["scale"] == wanted[0]
    assert fs.run(main, tmp_path, mesh=fs.make_mesh({"data": 4})) == [wanted] * 4


class Branches(nn.Module):
    """Uses one branch or the other, so that their counts of steps differ."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.which = nn.Linear(3, 3), nn.Linear(3, 3), "a"

    def forward(self, x):
        return getattr(self, self.which)(x)


def test_counts_of_unused_parameters_are_saved(tmp_path):
    def main(load):
        torch.manual_seed(0)
        module = Branches()
        booster = fs.Booster()
        model, opt, *_ = booster.boost(module, torch.optim.Adam(module.parameters()))
        if load:
            booster.load(tmp_path, model, opt)
        for which in "b" if load else "aabb":
            if which == "b" and module.which == "a" and not load:
                booster.save(tmp_path, model, opt)
            module.which = which
            booster.backward(model(torch.ones(2, 3)).square().mean(), opt)
            opt.step(), opt.zero_grad()
        return model.state_dict(), opt.state_dict()

    mesh = fs.make_mesh({"data": 2})
    fs.run(main, False, mesh=mesh)
    (_, opt), _ = fs.run(main, True, mesh=mesh)
    assert [int(opt["state"][i]["step"]) for i in range(4)] == [2, 2, 1, 1]


@pytest.mark.parametrize(
    "opt", [fs.optim.adamw(0.1), fs.optim.shampoo(0.1), fs.optim.chain(fs.optim.clip_by_value(0.1), fs.optim.lion(0.1))]
)
def test_pure_optimizers_in_full_form(opt):
    def main(load=None):
        module = small()
        booster = fs.Booster(fs.ZeroPlugin(stage=2))
        model, own, *_ = booster.boost(module, opt)
        if load is not None:
            model.load_state_dict(load[0])
            own.load_state_dict(load[1])
        for step in range(2) if load is None else range(1):
            if step == 1:
                state = copy.deepcopy((model.state_dict(), own.state_dict()))
            booster.backward(model(batch(7)).square().mean(), own)
            own.step()
            own.zero_grad()
        return state if load is None else None, copy.deepcopy((model.state_dict(), own.state_dict()))

    mesh = fs.make_mesh({"data": 2})
    state, wanted = fs.run(main, mesh=mesh)[0]
    for _, found in fs.run(main, state, mesh=mesh):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_names_of_colossal_ai(tmp_path):
    def main(load):
        loop = Loop(fs.FSDPPlugin)
        booster, (model, opt, schedule, _) = loop.booster, loop.parts
        for name, x in (("model", model), ("optimizer", opt), ("lr_scheduler", schedule)):
            if load:
                getattr(booster, f"load_{name}")(x, tmp_path / name)
        if not load:
            loop.steps(3)
            for name, x in (("model", model), ("optimizer", opt), ("lr_scheduler", schedule)):
                getattr(booster, f"save_{name}")(x, tmp_path / name)
        return copy.deepcopy((model.state_dict(), opt.state_dict(), schedule.state_dict()))

    mesh = fs.make_mesh({"data": 2})
    wanted = fs.run(main, False, mesh=mesh)[0]
    for found in fs.run(main, True, mesh=mesh):
        equal(found, wanted, range(3))
    names = [*fs.restore(tmp_path / "model")]
    assert set(names) == set(wanted[0])


@pytest.mark.parametrize("name", ["fsdp", "both"])
def test_low_rank_differences_are_saved_for_peft(name, tmp_path):
    """As from the model in one, under any plugin."""
    plugin, axes = PLUGINS[name]

    def adapted():
        booster = fs.Booster(plugin())
        return booster, booster.enable_lora(network(counts=False), fs.nn.LoraConfig(r=2, target_modules=["qkv", "out"]))

    def main():
        booster, module = adapted()
        model, *_ = booster.boost(module, torch.optim.SGD([x for x in module.parameters() if x.requires_grad]))
        booster.save_lora_as_pretrained(model, tmp_path / "boosted")

    fs.run(main, mesh=fs.make_mesh(axes))
    module = adapted()[1]
    fs.export(tmp_path / "plain", dict(module.named_parameters()), to="peft", model=module)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "boosted" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


def test_what_cannot_be_saved_or_loaded_raises(tmp_path):
    def main(act):
        act(Loop(fs.DDPPlugin))

    def run(act):
        fs.run(main, act, mesh=fs.make_mesh({"data": 1}))

    with pytest.raises(
        TypeError, match="model must be as boost has returned it; got a Linear; dataloader must be .* got a Data"
    ):
        run(lambda loop: loop.booster.save(tmp_path, nn.Linear(1, 1), None, None, DataLoader(DATA)))
    run(lambda loop: loop.booster.save(tmp_path, loop.model))
    with pytest.raises(CheckpointError, match="only='lr_scheduler' matches no leaf"):
        run(lambda loop: loop.booster.load(tmp_path, loop.model, None, loop.schedule))


def test_functional_state_is_a_tree(tmp_path):
    def made(axes, plugin):
        booster = fs.Booster(plugin(mesh=fs.make_mesh(axes), reproducible=True))
        module = network()
        return booster, booster.init(module, adamw(module), nn.MSELoss())

    booster, state = made({"data": 2}, fs.FSDPPlugin)
    for step in range(5):
        if step == 3:
            fs.save(tmp_path, state)
        state, _ = booster.step(state, DATA[8 * step : 8 * step + 8])
    booster, other = made({"data": 4}, partial(fs.ZeroPlugin, stage=1))
    other = fs.restore(tmp_path, other)
    assert other.steps == 3
    for step in (3, 4):
        other, _ = booster.step(other, DATA[8 * step : 8 * step + 8])
    torch.testing.assert_close(fs.unshard(tuple(other)), fs.unshard(tuple(state)), rtol=0, atol=0)


@pytest.mark.parametrize(("one", "other"), [("both", "ddp"), ("ddp", "both"), ("both", "tensor"), ("tensor", "stages")])
def test_functional_state_loads_under_another_plan(one, other, tmp_path):
    """Without stages and parts of fused weights in names; a tied weight has a second one in stages."""

    def trained(name, steps):
        plugin, axes = PLUGINS[name]
        booster, module = fs.Booster(plugin(mesh=fs.make_mesh(axes))), PLAIN()
        state = booster.init(module, adamw(module), nn.MSELoss())
        for step in range(steps):
            state, _ = booster.step(state, DATA[8 * step : 8 * step + 8])
        return state

    def by_name(state):
        return {leaf.name: leaf.value for leaf in full_leaves(tuple(state)) if "4.weight" not in leaf.name}

    saved = trained(one, 2)
    fs.save(tmp_path, saved)
    found = by_name(fs.restore(tmp_path, trained(other, 0)))
    torch.testing.assert_close(found, by_name(saved), rtol=0, atol=0)
    assert found["0.1.qkv.weight"].shape == (24, 8) and found["1.0.step.1.qkv.weight"] == 2


def of_processes(path, before, after):
    """Train under ZeRO 2 on processes; return what was learnt, and the draws of the device."""
    loop = Loop(fs.FSDPPlugin if before else partial(fs.ZeroPlugin, stage=2))
    torch.manual_seed(fs.mesh.process_index())
    if before:
        loop.steps(before)
        loop.booster.save(path, *loop.parts)
    else:
        loop.booster.load(path, *loop.parts)
    return loop.steps(after)


def test_processes_continue_on_fewer_with_equal_bits(tmp_path):
    wanted = fs.launch(of_processes, tmp_path, 3, 3, processes=2)
    (one,) = fs.launch(of_processes, tmp_path, 0, 3, processes=1)
    equal(one, wanted[0], [1, 2, 3, 4])
    again = fs.launch(of_processes, tmp_path, 0, 3, processes=2)
    for found, known in zip(again, wanted, strict=True):
        equal(found, known, [1, 2, 3, 4])
    assert not torch.equal(wanted[0][2], wanted[1][2])
