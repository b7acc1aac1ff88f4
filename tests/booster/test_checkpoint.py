"""`booster.save` and `load`: the steps after are those of the loop that was not interrupted, to the
bit, under any plugin.
"""

import copy
from functools import partial
from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs
from fshard.booster.full_state import full_leaves
from fshard.errors import CheckpointError, OptimizerError
from fshard.optim.torch_optim.classes import CLASSES
from tests.booster.checkpointed import PLUGINS, adamw, network
from tests.booster.loops import Loop, on_devices
from tests.helpers.processes import run_processes
from tests.helpers.sampled import thorough

DATA = TensorDataset(
    *(torch.randn(40, 4, 8, generator=torch.Generator().manual_seed(i)).double() for i in (1, 2))
)


PLAIN = partial(network, counts=False, dropout=0.0)


def schedule(opt):
    return torch.optim.lr_scheduler.MultiStepLR(opt, [2, 5, 5, 9], gamma=0.5)


EXACT = {"ddp", "zero1", "zero2", "fsdp"}
"""Plugins under which the next steps have equal bits."""


def loop_of(name, make=None, **options):
    """Return a loop over a loader, with a scheduler, in reproducible mode."""
    plugin = PLUGINS[name][0](
        reproducible=True, **({} if name in ("stages", "both") else {"slices": 4}), **options
    )
    make = make or partial(network, counts=name in EXACT or name == "stages")
    loader = DataLoader(DATA, 8, shuffle=True)
    return Loop(make, plugin, adamw, schedule=schedule, loader=loader, criterion=nn.MSELoss())


def parts(loop):
    return loop.model, loop.opt, loop.schedule, loop.loader


def steps(loop, count):
    """Take steps, in as many epochs as needed; return losses, state, draws, learning rates and the
    loader's position.
    """
    losses = []
    while len(losses) < count:
        for batch in islice(loop.loader, count - len(losses)):
            losses.append(loop.step(*batch, clip=1.0))
            loop.schedule.step()
    return (
        losses,
        loop.state(),
        torch.rand(2),
        loop.schedule.get_last_lr(),
        loop.loader.state_dict(),
    )


def run(name, body, *args):
    return fs.run(body, *args, mesh=fs.make_mesh(PLUGINS[name][1]))


def full_state(model, opt):
    return copy.deepcopy((model.state_dict(), opt.state_dict()))


def assert_equal(tree, expected):
    torch.testing.assert_close(tree, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", PLUGINS)
def test_loop_continues_with_equal_bits(name, tmp_path):
    def saved():
        loop = loop_of(name)
        steps(loop, 3)
        loop.booster.save(tmp_path, *parts(loop))
        return steps(loop, 3)

    def loaded():
        torch.manual_seed(100)
        loop = loop_of(name, seed=5)
        loop.booster.load(tmp_path, *parts(loop))
        return steps(loop, 3)

    expected = run(name, saved)
    assert_equal(run(name, loaded), expected)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that returns the checkpoint of a plugin, its state, and the three steps
    after it.
    """
    results = {}

    def folder(name):
        if name not in results:
            path = tmp_path_factory.mktemp(name)

            def main():
                loop = loop_of(name, PLAIN)
                steps(loop, 3)
                loop.booster.save(path, *parts(loop))
                return full_state(loop.model, loop.opt), steps(loop, 3)

            results[name] = path, *run(name, main)[0]
        return results[name]

    return folder


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *((name, "both") for name in PLUGINS if name != "both"),
        *(("both", name) for name in ("ddp", "fsdp", "tensor")),
        ("fsdp", "zero2"),
        ("zero1", "stages"),
        thorough("ddp", "fsdp"),
        thorough("tensor", "stages"),
    ],
)
def test_checkpoint_of_one_plugin_loads_into_another(source, target, folders):
    """State is equal to the bit; the next steps too, where both plugins compute the same bits."""
    path, state, (_, learnt, _, rates, position) = folders(source)
    tolerance = 0 if {source, target} <= EXACT else 1e-9

    def main():
        loop = loop_of(target, PLAIN, seed=5)
        loop.booster.load(path, *parts(loop))
        assert_equal(full_state(loop.model, loop.opt), state)
        return steps(loop, 3)

    for _, actual, _, *rest in run(target, main):
        torch.testing.assert_close(actual, learnt, rtol=tolerance, atol=tolerance)
        assert rest == [rates, position]


@pytest.mark.parametrize("name", PLUGINS)
def test_full_state_of_one_plugin_loads_into_another(name, folders):
    _, state, _ = folders("ddp" if name != "ddp" else "both")

    def main():
        loop = loop_of(name, PLAIN)
        loop.model.load_state_dict(state[0])
        loop.opt.load_state_dict(state[1])
        return full_state(loop.model, loop.opt)

    for actual in run(name, main):
        assert_equal(actual, state)


def of_processes(path, plugin, before):
    """Save after three steps, or load; return three more steps, and draws of the device."""
    loop = loop_of(plugin)
    torch.manual_seed(fs.mesh.process_index())
    if before:
        steps(loop, 3)
        loop.booster.save(path, *parts(loop))
    else:
        loop.booster.load(path, *parts(loop))
    return steps(loop, 3)[1:]


def test_processes_continue_on_fewer_with_equal_bits(tmp_path):
    expected = run_processes(of_processes, 2, tmp_path, "fsdp", True)
    assert_equal(run_processes(of_processes, 1, tmp_path, "zero2", False), expected[:1])
    assert_equal(run_processes(of_processes, 2, tmp_path, "zero2", False), expected)
    assert not torch.equal(expected[0][1], expected[1][1])


# -- full state, in the form of torch --------------------------------------------------------------


def batch(step):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def small():
    return nn.Sequential(
        nn.BatchNorm1d(3), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)
    ).double()


def two_groups(kind, model):
    options = {
        torch.optim.SGD: {"momentum": 0.9},
        torch.optim.RMSprop: {"momentum": 0.5, "centered": True},
    }
    matrices = [x for x in model.parameters() if x.ndim == 2]
    rest = (
        []
        if kind is torch.optim.Muon
        else [{"params": [x for x in model.parameters() if x.ndim < 2], "lr": 0.02}]
    )
    return kind([{"params": matrices}, *rest], lr=0.01, **options.get(kind, {}))


def trained(kind, plugin, numbers, load=None):
    """Return the full state after some steps by torch alone, or on each of two devices, from a
    state or the beginning.
    """

    def body(loop):
        if load is not None:
            assert not any(loop.model.load_state_dict(load[0]))
            loop.opt.load_state_dict(load[1])
        for number in numbers:
            loop.step(loop.part(batch(number)))
        return full_state(loop.model, loop.opt)

    options = {"optimizer": partial(two_groups, kind), "criterion": lambda y, _: y.square().mean()}
    return (
        [body(Loop(small, **options))]
        if plugin is None
        else on_devices(body, plugin, 2, small, **options)
    )


def assert_close(state, expected):
    """Compare model and optimizer state, whose rounding Muon magnifies: keys, order, shapes and
    values.
    """
    assert [*state[0]] == [*expected[0]] and state[1].keys() == expected[1].keys()
    torch.testing.assert_close(dict(state[0]), dict(expected[0]), rtol=1e-3, atol=1e-6)
    assert state[1]["param_groups"] == expected[1]["param_groups"]
    torch.testing.assert_close(state[1]["state"], expected[1]["state"], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("plugin", [fs.DDPPlugin, fs.FSDPPlugin])
def test_state_dicts_are_those_of_torch_on_one_device(kind, plugin):
    """Before the first step and after two; and each continues from the other's."""
    plugin = plugin(sync_batchnorm=True)
    for numbers in (range(0), range(2)):
        (expected,) = trained(kind, None, numbers)
        for state in trained(kind, plugin, numbers):
            assert_close(state, expected)
    assert_close(trained(kind, plugin, range(2, 4), expected)[0], trained(kind, None, range(4))[0])
    assert_close(
        trained(kind, None, range(2, 4), state)[0], trained(kind, None, range(2, 4), expected)[0]
    )


def test_state_of_another_optimizer_raises():
    ((model, opt),) = trained(torch.optim.SGD, None, range(1))
    ((_, expected),) = trained(torch.optim.Adam, None, [])
    with pytest.raises(
        OptimizerError, match=r"parameter 0 must have exp_avg, exp_avg_sq, step; got momentum_b"
    ):
        trained(torch.optim.Adam, fs.DDPPlugin(), [], (model, {**expected, **opt}))
    model.pop("1.weight")
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "1.weight"'):
        trained(torch.optim.SGD, fs.DDPPlugin(), [], (model, opt))


PURE = {
    "adamw": fs.optim.adamw(0.1),
    "shampoo": fs.optim.shampoo(0.1),
    "chain": fs.optim.chain(fs.optim.clip_by_value(0.1), fs.optim.lion(0.1)),
}


@pytest.mark.parametrize("name", PURE)
def test_pure_optimizers_in_full_form(name):
    def body(loop, load=None):
        if load is None:
            loop.step(batch(7))
            load = full_state(loop.model, loop.opt)
        else:
            loop.model.load_state_dict(load[0])
            loop.opt.load_state_dict(load[1])
        loop.step(batch(7))
        return load, full_state(loop.model, loop.opt)

    options = {"optimizer": lambda _: PURE[name], "criterion": lambda y, _: y.square().mean()}
    (state, expected), _ = on_devices(body, fs.ZeroPlugin(stage=2), 2, small, **options)
    for _, actual in on_devices(
        partial(body, load=state), fs.ZeroPlugin(stage=2), 2, small, **options
    ):
        assert_equal(actual, expected)


# -- what else is saved ----------------------------------------------------------------------------


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


def test_extra_state_is_saved(tmp_path):
    def main():
        modules = [Recorder() for _ in "abc"]
        booster = fs.Booster()
        model, by_folder, by_state = (booster.boost(module)[0] for module in modules)
        modules[0].seen = 3
        booster.save_model(model, tmp_path)
        booster.load_model(by_folder, tmp_path)
        by_state.load_state_dict(model.state_dict())
        equal = [
            torch.equal(x.unwrap().weight, model.unwrap().weight) for x in (by_folder, by_state)
        ]
        return [*model.state_dict()], [module.seen for module in modules], equal

    expected = ["weight", "bias", "_extra_state"], [3, 3, 3], [True, True]
    assert fs.run(main, mesh=fs.make_mesh({"data": 2})) == [expected] * 2


def trainable(model, kind=torch.optim.AdamW):
    return kind([x for x in model.parameters() if x.requires_grad], lr=0.1)


class Branches(nn.Module):
    """Uses one branch in a step, so that their counts of steps differ."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.step = 0

    def forward(self, x):
        self.step += 1
        return self.a(x) if self.step < 3 else self.b(x)


X = torch.full((4, 3), 6e4)  # whose squares overflow in 16 bits
SAVED = {
    "low-rank differences": (
        lambda: fs.Booster().enable_lora(network()),
        {},
        DATA[:4][0],
        lambda model, opt: "lora_A" in str([*model]),
    ),
    "loss scale": (
        lambda: nn.Linear(3, 2),
        {"precision": "fp16"},
        X,
        lambda model, opt: opt["loss_scale"]["scale"] < 2.0**15,
    ),
    "counts of steps": (
        Branches,
        {},
        X,
        lambda model, opt: [int(x["step"]) for x in opt["state"].values()] == [2, 2, 1, 1],
    ),
}


@pytest.mark.parametrize("name", SAVED)
def test_state_of_steps_is_saved(name, tmp_path):
    make, options, x, is_expected = SAVED[name]

    def main(plugin, load):
        torch.manual_seed(0)
        booster = fs.Booster(plugin(**options))
        module = make()
        model, opt, *_ = booster.boost(module, trainable(module))
        if load:
            booster.load(tmp_path, model, opt)
            return full_state(model, opt)
        for _ in range(3):
            booster.backward(model(x).square().mean(), opt)
            opt.step(), opt.zero_grad()
        booster.save(tmp_path, model, opt)
        return full_state(model, opt)

    expected = fs.run(main, fs.DDPPlugin, False, mesh=fs.make_mesh({"data": 2}))[0]
    assert is_expected(*expected)
    for state in fs.run(main, fs.FSDPPlugin, True, mesh=fs.make_mesh({"data": 4})):
        assert_equal(state, expected)


def test_names_of_colossal_ai(tmp_path):
    def main(verb):
        loop = loop_of("fsdp")
        if verb == "save":
            steps(loop, 3)
        for name, x in (
            ("model", loop.model),
            ("optimizer", loop.opt),
            ("lr_scheduler", loop.schedule),
        ):
            getattr(loop.booster, f"{verb}_{name}")(x, tmp_path / name)
        return *full_state(loop.model, loop.opt), copy.deepcopy(loop.schedule.state_dict())

    expected = run("fsdp", main, "save")
    assert_equal(run("fsdp", main, "load"), expected)
    assert {*fs.restore(tmp_path / "model")} == {*expected[0][0]}


@pytest.mark.parametrize("name", ["fsdp", "both"])
def test_low_rank_differences_are_saved_for_peft(name, tmp_path):
    """As from the unsharded model, under any plugin."""

    def main(export):
        booster = fs.Booster(PLUGINS[name][0]())
        config = fs.nn.LoraConfig(r=2, target_modules=["qkv", "out"])
        module = booster.enable_lora(network(counts=False), config)
        if export:
            fs.export(tmp_path / "plain", dict(module.named_parameters()), to="peft", model=module)
        else:
            booster.save_lora_as_pretrained(
                booster.boost(module, trainable(module))[0], tmp_path / "boosted"
            )

    run(name, main, False)
    main(True)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "boosted" / file).read_bytes() == (
            tmp_path / "plain" / file
        ).read_bytes()


def test_what_cannot_be_saved_or_loaded_raises(tmp_path):
    def main(act):
        loop = loop_of("ddp")
        act(loop.booster, loop)

    with pytest.raises(
        TypeError,
        match="model must be as boost .*; got a Linear; dataloader must be .* got a DataLoader",
    ):
        run(
            "ddp",
            main,
            lambda booster, _: booster.save(
                tmp_path, nn.Linear(1, 1), None, None, DataLoader(DATA)
            ),
        )
    run("ddp", main, lambda booster, loop: booster.save(tmp_path, loop.model))
    with pytest.raises(CheckpointError, match="only='lr_scheduler' matches no leaf"):
        run(
            "ddp",
            main,
            lambda booster, loop: booster.load(tmp_path, loop.model, None, loop.schedule),
        )


# -- the functional form ---------------------------------------------------------------------------


def stepped(name, state=None, make=network, numbers=range(0), **options):
    """Return the state after some steps, from a state that a function returns for the initial one."""
    plugin, axes = PLUGINS[name]
    booster = fs.Booster(plugin(mesh=fs.make_mesh(axes), **options))
    module = make()
    first = booster.init(module, adamw(module), nn.MSELoss())
    state = first if state is None else state(first)
    for number in numbers:
        state, _ = booster.step(state, DATA[8 * number : 8 * number + 8])
    return state


def test_functional_state_is_a_tree(tmp_path):
    fs.save(tmp_path, stepped("ddp", numbers=range(3), reproducible=True))
    expected = stepped("ddp", numbers=range(5), reproducible=True)
    state = stepped("zero1", partial(fs.restore, tmp_path), numbers=(3, 4), reproducible=True)
    assert state.steps == 5
    assert_equal(fs.unshard(tuple(state)), fs.unshard(tuple(expected)))


@pytest.mark.parametrize(
    ("source", "target"),
    [("both", "ddp"), ("ddp", "both"), ("both", "tensor"), ("tensor", "stages")],
)
def test_functional_state_loads_under_another_plan(source, target, tmp_path):
    """Without stages and parts of fused weights in names; a tied weight has a second one in stages."""

    def by_name(state):
        return {
            leaf.name: leaf.value
            for leaf in full_leaves(tuple(state))
            if "4.weight" not in leaf.name
        }

    saved = stepped(source, make=PLAIN, numbers=range(2))
    fs.save(tmp_path, saved)
    restored = by_name(stepped(target, partial(fs.restore, tmp_path), PLAIN))
    assert_equal(restored, by_name(saved))
    assert restored["0.1.qkv.weight"].shape == (24, 8) and restored["1.0.step.1.qkv.weight"] == 2


@pytest.mark.parametrize("is_torch", [True, False], ids=["torch", "fshard"])
def test_state_with_a_loss_scale_loads_without_it_as_the_error_says(is_torch):
    """The state of precision="fp16", into an optimizer of another precision."""
    key = 'entry "loss_scale"' if is_torch else 'state_dict["state"]["inner"]'

    def main():
        def boosted(precision):
            booster = fs.Booster(fs.FSDPPlugin(precision=precision))
            module = nn.Linear(3, 2)
            opt = torch.optim.Adam(module.parameters()) if is_torch else fs.optim.adam()
            return booster, *booster.boost(module, opt)[:2]

        booster, model, opt = boosted("fp16")
        booster.backward(model(torch.ones(4, 3)).sum(), opt)
        opt.step()
        state, (_, _, other) = opt.state_dict(), boosted("bf16")
        with pytest.raises(OptimizerError, match="has the loss scale") as error:
            other.load_state_dict(state)
        assert key in str(error.value)

        rest = {k: x for k, x in state.items() if k != "loss_scale"}
        if not is_torch:
            rest = {"state": state["state"]["inner"]}
        other.load_state_dict(rest)
        assert_equal(other.state_dict()["state"], rest["state"])
        if not is_torch:
            with pytest.raises(OptimizerError, match="has no loss scale"):
                opt.load_state_dict(rest)
            opt.load_state_dict({"state": {**state["state"], "inner": rest["state"]}})
            assert_equal(opt.state_dict(), state)

    fs.run(main, mesh=fs.make_mesh({"data": 2}))
