"""Classes of torch.optim, as pure optimizers and boosted; optimizers of one's own class, which step
on local shards.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fshard as fs
from fshard import P, optim
from fshard.errors import OptimizerError
from fshard.optim.torch_optim.classes import CLASSES
from fshard.testing import check_elementwise
from tests.optim.helpers.optimizers import (
    FOREIGN,
    by_step,
    by_torch,
    by_update,
    example,
    leaves_of,
    same,
    suited,
    tensor,
    trees,
)
from tests.optim.helpers.torch_classes import (
    PLUGINS,
    Factored,
    Lars,
    Lion,
    MyAdagrad,
    groups_of,
    net,
    x_of,
)

# -- as pure optimizers ----------------------------------------------------------------------------


@pytest.mark.parametrize("cls", FOREIGN, ids=lambda cls: cls.__name__)
@given(st.data())
@settings(max_examples=10)
def test_from_torch_equals_torch_optim(cls, data):
    params, steps = data.draw(trees((torch.float32, torch.float64)))
    expected = by_torch(cls, params, steps, **FOREIGN[cls])
    assert same(
        leaves_of(by_step(optim.from_torch(cls, **FOREIGN[cls]), params, steps)[0]), expected
    )


TYPES = [value for value in vars(torch.optim).values() if isinstance(value, type)]
ALL_OF_TORCH = [cls for cls in TYPES if issubclass(cls, torch.optim.Optimizer)]
ALL_OF_TORCH.remove(torch.optim.Optimizer)


@pytest.mark.parametrize("cls", ALL_OF_TORCH, ids=lambda cls: cls.__name__)
def test_every_torch_class_is_listed_or_refused(cls):
    if cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(
            optim.OptimizerError, match=f"torch.optim.{cls.__name__} cannot step on shards"
        ):
            optim.from_torch(cls)
    elif optim.from_torch(cls).sharding == "flat":
        check_elementwise(optim.from_torch(cls))
    else:
        with pytest.raises(
            (AssertionError, optim.OptimizerError, fs.errors.LayoutError),
            match="flat|full matrices|2D",
        ):
            check_elementwise(
                replace(optim.from_torch(cls), sharding="flat"), {"w": torch.ones(6, 5)}
            )


@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.ASGD], ids=lambda cls: cls.__name__)
def test_numbers_of_state_are_equal_on_devices_with_an_empty_shard(cls):
    mesh = fs.make_mesh({"data": 4})
    opt = fs.partition_optimizer(optim.from_torch(cls, lr=0.1), mesh=mesh, axis="data", stage=1)
    params = fs.shard_params({"w": torch.ones(3)}, P(), mesh=mesh)
    step = fs.train_step(lambda p, x: (p["w"] * x).sum(1).mean(), opt, mesh=mesh, batch=P("data"))
    state = opt.init(params)
    for _ in range(2):
        params, state, _ = step(params, state, torch.ones(4, 3))

    leaves = [leaf["w"] for leaf in state.values() if isinstance(leaf, dict)]
    numbers = [leaf for leaf in leaves if isinstance(leaf, fs.Sharded) and leaf.shape == ()]
    assert numbers
    for number in numbers:
        assert len({float(shard) for shard in number.shards}) == 1


MODES = (
    {"foreach": False},
    {"foreach": True},
    {"fused": True},
    {"capturable": True},
    {"maximize": True},
)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_from_torch_accepts_every_torch_mode(cls, mode):
    params, steps = suited(optim.muon, *example())
    try:
        expected = by_torch(cls, params, steps, **mode)
    except Exception as refused:  # of whatever kind: torch has several
        with pytest.raises((optim.OptimizerError, type(refused))):
            by_step(optim.from_torch(cls, **mode), params, steps)
        return
    assert same(leaves_of(by_step(optim.from_torch(cls, **mode), params, steps)[0]), expected)


@pytest.mark.parametrize("shape", [(33, 17), (1,), (4099,)])
def test_fused_class_is_fused_in_step_only(shape):
    grads = [
        [torch.randn(shape, generator=torch.Generator().manual_seed(seed))] for seed in range(4)
    ]
    params = [torch.ones(shape)]
    fused, plain = (
        optim.from_torch(torch.optim.Adam, lr=0.1, fused=fused) for fused in (True, False)
    )
    assert same(by_update(fused, params, grads), by_update(plain, params, grads))
    assert same(
        by_step(fused, params, grads)[0],
        by_torch(torch.optim.Adam, params, grads, lr=0.1, fused=True),
    )


PARTS = {"heads": (4, 0), "queries, keys and values": ((8, 2, 2), 0), "columns": (2, 1)}


@pytest.mark.parametrize("name", PARTS)
def test_muon_of_parts_equals_matrices_by_themselves(name):
    parts, dim = PARTS[name]
    fused, *grads = (tensor((12, 6), torch.float32, seed) for seed in range(4))

    def divided(x):
        return [*(x.tensor_split(parts, dim) if isinstance(parts, int) else x.split(parts, dim))]

    for run in (by_step, by_update):
        opt = optim.muon(0.1, parts=parts, parts_dim=dim)
        actual, state = run(opt, [fused], [[grad] for grad in grads])
        expected, each = run(optim.muon(0.1), divided(fused), [divided(grad) for grad in grads])
        assert torch.equal(actual[0], torch.cat(expected, dim))
        assert torch.equal(state["momentum_buffer"][0], torch.cat(each["momentum_buffer"], dim))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("spec", [P("model"), P(None, "model")], ids=str)
def test_muon_under_tensor_parallelism_equals_one_device(spec, stage):
    """A matrix is assembled from its shards along the tensor axis, in one exchange with the others."""
    opt = optim.by_label(
        {
            "fused": optim.muon(0.1, parts=3),
            "matrix": optim.muon(0.1),
            "vector": optim.sgd(0.1, fused=False),
        },
        lambda path, leaf: "vector" if leaf.ndim < 2 else "fused" if "qkv" in path else "matrix",
    )
    shapes = {"qkv": (12, 4), "out": (4, 4), "bias": (12,)}

    def drawn(seed):
        return {name: tensor(shape, torch.float32, seed) for name, shape in shapes.items()}

    params, *steps = drawn(0), drawn(1), drawn(2)
    mesh = fs.make_mesh({"data": 2, "model": 2})
    specs = {"qkv": spec, "out": P(None, "model"), "bias": P("model")}
    if stage == 3:
        specs = {name: spec.replace(flat="data") for name, spec in specs.items()}
    sharded = fs.device_put(params, {name: fs.Layout(mesh, x) for name, x in specs.items()})
    partitioned = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)
    layouts = {name: partitioned.gradients(x.layout) for name, x in sharded.items()}
    with fs.ledger() as comm:
        actual, _ = by_step(
            partitioned, sharded, [fs.device_put(grads, layouts) for grads in steps]
        )
    assert comm.by_collective()["all_to_all", ("data", "model")][0] == 1 + 2 * len(
        steps
    )  # one of init
    assert same(fs.unshard(actual), by_step(opt, params, steps)[0])


# -- boosted: torch's classes and one's own do on any mesh what they do on one device --------------


def halved(opt):
    return torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)


def rounds(model, opt, backward, schedule, part=lambda x: x, module=None):
    """Five steps: a scheduler writes rates, a loop weight decay, and a group is added after the
    second.
    """
    for step in range(5):
        backward(model(part(x_of(step)), deep=step not in (0, 3)).square().mean())
        opt.step(), model.zero_grad(), schedule.step()
        opt.param_groups[0]["weight_decay"] = 0.1 * step
        if step == 1:
            opt.add_param_group({"params": [(module or model).late.weight], "lr": 0.07})
            schedule = halved(opt)


def by_torchs_loop(make):
    model = net()
    opt = make(model)
    rounds(model, opt, torch.Tensor.backward, halved(opt))
    return model.state_dict()


def boosted(make, plugin, n=2, **options):
    def main():
        model = net()
        opt = make(model)
        schedule = halved(opt)
        booster = fs.Booster(PLUGINS[plugin](**options))
        model, opt, *_ = booster.boost(model, opt, lr_scheduler=schedule)

        def part(x):
            return x.chunk(n)[fs.axis_index("data")]

        rounds(model, opt, lambda loss: booster.backward(loss, opt), schedule, part, model.module)
        return model.unwrap().state_dict()

    return fs.run(main, mesh=fs.make_mesh({"data": n}))


class MyAdamW(torch.optim.AdamW):
    """A class of torch's under another name: owners."""


def all_groups(cls, **options):
    return lambda model: cls(groups_of(model), **options)


TORCHS = {cls.__name__: all_groups(cls, lr=0.05) for cls in CLASSES if cls is not torch.optim.Muon}
TORCHS |= {
    "Muon": lambda model: torch.optim.Muon(groups_of(model, matrices_alone=True), lr=0.05),
    "AdamW, foreach": all_groups(torch.optim.AdamW, lr=0.05, foreach=True, amsgrad=True),
    "Adam, fused": all_groups(torch.optim.Adam, lr=0.05, fused=True, decoupled_weight_decay=True),
    "SGD, nesterov": all_groups(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "one group": lambda model: torch.optim.RMSprop(
        groups_of(model, matrices_alone=True), lr=0.05, centered=True
    ),
}
OWN = {
    "Lion": all_groups(Lion),
    "Factored": all_groups(Factored),
    "Lars": all_groups(Lars),
    "MyAdamW": all_groups(MyAdamW, lr=0.02, betas=(0.8, 0.9)),
    "MyAdagrad": all_groups(MyAdagrad, lr=0.1, initial_accumulator_value=0.5),
}


@pytest.mark.parametrize(("name", "n"), [*((name, 2) for name in TORCHS), *product(OWN, (1, 2, 4))])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_boosted_class_equals_torch_loop(name, n, plugin):
    make = {**TORCHS, **OWN}[name]
    expected = by_torchs_loop(make)
    for state in boosted(make, plugin, n):
        torch.testing.assert_close(dict(state), dict(expected), rtol=0, atol=1e-12)


def test_custom_instance_keeps_state_of_local_shards():
    """The owner of a parameter has its state; hooks and keys of the instance are those of torch."""

    def main():
        model = net()
        called = []
        given = Lars(groups_of(model))
        given.register_step_post_hook(lambda *_: called.append(1))
        booster = fs.Booster(fs.ZeroPlugin(stage=1))
        model, opt, *_ = booster.boost(model, given)
        keys = []
        for step in range(3):
            booster.backward(model(x_of(step)).square().mean(), opt)
            opt.step(), opt.zero_grad()
            keys.append([*map(id, given.state)])
        assert keys[0] == keys[1] == keys[2] and len(called) == given.steps == 3
        return sorted(tuple(state["m"].shape) for state in given.state.values())

    shapes = fs.run(main, mesh=fs.make_mesh({"data": 2}))
    assert all(shapes)
    expected = []
    for group in groups_of(net()):
        expected += [tuple(p.shape) for p in group["params"]]
    assert sorted(shapes[0] + shapes[1]) == sorted(expected)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"elementwise": True},
            r'Own: the class must have sharding = "flat" in place of elementwise',
        ),
        ({"elementwise": False}, "and nothing in place of False. Rename the attribute"),
        ({"sharding": "rows"}, "sharding of the class must be one of 'flat', 'owners'; got 'rows'"),
    ],
)
def test_class_with_an_unknown_sharding_raises(attributes, message):
    def step(self, closure=None):
        return None

    own = type("Own", (torch.optim.SGD,), {"step": step, **attributes})

    def main():
        model = nn.Linear(2, 2)
        fs.Booster(fs.DDPPlugin()).boost(model, own(model.parameters(), lr=0.1))

    with pytest.raises(OptimizerError, match=message):
        fs.run(main, mesh=fs.make_mesh({"data": 2}))
