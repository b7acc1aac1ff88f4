"""Optimizers of one's own whose steps ask for more of a parameter than its numbers: its place, its name, its class."""

import re

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fshard as fs
from fshard.optim.following import Following
from tests.test_optim_foreign import PLUGINS, Plain, boost, groups_of, net


class Each(torch.optim.Optimizer):
    """Steps each parameter by `one`."""

    def __init__(self, params, lr=0.05, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(group, p)

    def one(self, group, p):
        p.sub_(p.grad, alpha=group["lr"])


class Deep(nn.Module):
    """Nine layers of one shape, and a head; one is not always used."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(9)])
        self.head = nn.Linear(4, 2)

    def forward(self, x, deep=True):
        for i, layer in enumerate(self.layers):
            x = x + layer(x).tanh() if deep or i != 1 else x
        return self.head(x)


def deep():
    torch.manual_seed(1)
    return Deep().double()


def x_of(step):
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def loop(model, opt, backward, part=lambda x: x, between=lambda opt, step: None, steps=5):
    for step in range(steps):
        between(opt, step)
        backward(model(part(x_of(step)), deep=step not in (0, 3)).square().mean())
        opt.step(), opt.zero_grad()


def by_torch(start, **how):
    model, opt = start()
    loop(model, opt, torch.Tensor.backward, **how)
    return model.state_dict()


def by_plugin(start, plugin, n, **how):
    def main():
        booster = fs.Booster(PLUGINS[plugin]())
        model, opt, *_ = booster.boost(*start())
        loop(model, opt, lambda loss: booster.backward(loss, opt), lambda x: x.chunk(n)[fs.axis_index("data")], **how)
        return model.unwrap().state_dict()

    return fs.run(main, mesh=fs.make_mesh({"data": n}))


def as_torch(start, plugin, n=2, **how):
    expected = by_torch(start, **how)
    for state in by_plugin(start, plugin, n, **how):
        torch.testing.assert_close(dict(state), dict(expected), rtol=0, atol=1e-11)


# -- what goes by place, and is cut along with the parameters ---------------------------------------------------------


class ByName(Each):
    """The head is slow; so is what comes first."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for name, p in zip(group["param_names"], group["params"], strict=True):
                    if p.grad is not None:
                        m = self.state[p].setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                        p.sub_(m, alpha=group["lr"] * (0.1 if name.startswith(("head", "layers.0")) else 1))


class ByNameInPieces(ByName):
    elementwise = True


class ByScale(Each):
    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for scale, p in zip(group["scales"], group["params"], strict=True):
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=group["lr"] * scale)


class ByBetas(Each):
    """Its list is as long as there are parameters, by chance."""

    def one(self, group, p):
        m = self.state[p].setdefault("m", torch.zeros_like(p))
        p.sub_(m.mul_(group["betas"][0]).add_(p.grad), alpha=group["lr"] * group["betas"][-1])


def two(model, key=lambda name, p: p):
    names = [*model.named_parameters()]
    return [
        {"params": [key(name, p) for name, p in names if p.ndim == 2]},
        {"params": [key(name, p) for name, p in names if p.ndim < 2], "lr": 0.03},
    ]


def named(name, p):
    return name, p


BY_PLACE = {
    "names": lambda m: ByName([*m.named_parameters()]),
    "names of groups": lambda m: ByName(two(m, named)),
    "names in pieces": lambda m: ByNameInPieces(two(m, named)),
    "names that nobody reads": lambda m: Each(two(m, named)),
    "lists": lambda m: ByScale([g | {"scales": [1.0 / (1 + i) for i in range(10)]} for g in two(m)]),
    "tuples": lambda m: ByScale([g | {"scales": (1.0,) * 9 + (0.1,)} for g in two(m)]),
    "equal items": lambda m: ByScale([g | {"scales": [1.0] * 10} for g in two(m)]),
    "by chance": lambda m: ByBetas([{"params": [*m.head.parameters()], "betas": [0.5, 0.7]}]),
}


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("kind", BY_PLACE)
def test_options_that_go_by_place_go_with_their_parameters(kind, plugin):
    def start():
        model = deep()
        return model, BY_PLACE[kind](model)

    as_torch(start, plugin)
    as_torch(start, plugin, n=4)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_equal_items_of_a_list_may_become_others(plugin):
    def start():
        model = deep()
        return model, BY_PLACE["equal items"](model)

    as_torch(start, plugin, between=lambda opt, step: opt.param_groups[0]["scales"].__setitem__(2 * step, 0.25))


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_betas_may_be_tensors(cls):
    def start():
        model = deep()
        return model, cls(model.parameters(), lr=0.01, betas=(torch.tensor(0.5), torch.tensor(0.75)))

    as_torch(start, "fsdp")


@pytest.mark.parametrize("plugin", PLUGINS)
def test_lists_of_options_may_change(plugin):
    def start():
        model = deep()
        return model, BY_PLACE["lists"](model)

    as_torch(start, plugin, between=lambda opt, step: opt.param_groups[0].update(scales=[float(step)] * 10))


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_names_go_with_the_parameters_of_stages(zero_stage):
    def start():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        return model, FirstOf([*model.named_parameters()])

    class FirstOf(ByName):
        def step(self, closure=None):
            with torch.no_grad():
                for group in self.param_groups:
                    for name, p in zip(group["param_names"], group["params"], strict=True):
                        p.sub_(p.grad, alpha=0.05 * (1 + int(name[0])))

    model, opt = start()
    for step in range(3):
        model(x_of(step)).square().mean().backward()
        opt.step(), opt.zero_grad()

    def main():
        booster = fs.Booster(fs.HybridParallelPlugin(pipeline=2, microbatches=2, zero_stage=zero_stage))
        model, opt, *_ = booster.boost(*start())
        for step in range(3):
            booster.execute_pipeline(iter([x_of(step)]), model, lambda y, x: y.square().mean(), opt)
            opt.step(), opt.zero_grad()
        return model.unwrap().state_dict()

    for state in fs.run(main, mesh=fs.make_mesh({"data": 2, "pipe": 2})):
        torch.testing.assert_close(dict(state), dict(model.state_dict()), rtol=0, atol=1e-11)


# -- what is refused --------------------------------------------------------------------------------------------------


class ByIndex(Plain):
    """Each four layers have another rate."""

    def moved(self, params):
        return [p.grad * 0.5 ** (i // 4) for i, p in enumerate(params)]


class Stacked(Plain):
    """Has one norm for those of one shape."""

    def moved(self, params):
        norms = {
            shape: torch.stack([p.grad for p in params if p.shape == shape]).norm()
            for shape in {p.shape for p in params}
        }
        return [p.grad / norms[p.shape] for p in params]


class Rounding(Each):
    """Rounds 16 bits by chance."""

    def one(self, group, p):
        new = p.float() - group["lr"] * p.grad.float()
        if p.dtype == torch.bfloat16:
            new = (new.view(torch.int32) + torch.randint_like(new, 1 << 16, dtype=torch.int32)) & -65536
            new = new.view(torch.float32)
        p.copy_(new)


class Sphere(nn.Parameter):
    """Stays on a sphere."""


class OnSphere(Each):
    def one(self, group, p):
        super().one(group, p)
        if isinstance(p, Sphere):
            p.div_(p.norm())


class Orthogonal(Each):
    def one(self, group, p):
        super().one(group, p)
        if p.ndim == 2 and getattr(p, "orthogonal", False):
            p.div_(p.norm())


class Decayed(Each):
    def one(self, group, p):
        if not getattr(p, "no_decay", False):
            p.mul_(1 - group.get("decay", 0.0))
        super().one(group, p)


class ById(Each):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.slow = {id(p) for group in self.param_groups for p in group["params"] if p.ndim < 2}

    def one(self, group, p):
        p.sub_(p.grad, alpha=group["lr"] * (0.1 if id(p) in self.slow else 1))


def by_id_from_around(model):
    slow = {id(p) for p in model.parameters() if p.ndim < 2}

    class FromAround(Each):
        def one(self, group, p):
            p.sub_(p.grad, alpha=group["lr"] * (0.1 if id(p) in slow else 1))

    return FromAround(model.parameters())


class Zeroing(Each):
    """Leaves zeros behind, as torch once did."""

    def zero_grad(self, set_to_none=False):
        super().zero_grad(set_to_none)


class Ints(Each):
    def one(self, group, p):
        p.sub_(self.state[p].setdefault(0, torch.zeros_like(p)).add_(p.grad), alpha=group["lr"])


def with_sphere(model):
    model.head.weight = Sphere(model.head.weight.detach())


def with_tags(model):
    for p in model.parameters():
        p.orthogonal = True


def without_decay(model):
    model.head.weight.no_decay = True


def decays(model):
    matrices, few = two(model)
    first, *rest = matrices["params"]
    return [{"params": [first]}, {"params": rest, "decay": 0.1}, few]


def replaced_zeroing(model):
    opt = Each(model.parameters())
    opt.zero_grad = lambda: None
    return opt


DEPENDENT = "steps of several parameters together have another result"
REFUSALS = {
    "index": (str, lambda m: ByIndex(two(m)), f"ByIndex: {DEPENDENT}"),
    "stack of a shape": (str, lambda m: Stacked([{"params": [m.head.bias]}, two(m)[0]]), f"Stacked: {DEPENDENT}"),
    "rounding": (nn.Module.bfloat16, lambda m: Rounding(two(m)), f"Rounding: {DEPENDENT}.* random numbers"),
    "class": (with_sphere, lambda m: OnSphere(two(m)), "OnSphere steps parameters of the class Sphere otherwise"),
    "tag": (with_tags, lambda m: Orthogonal([*m.parameters()]), "Orthogonal reads attributes .* of orthogonal"),
    "tag of a group": (without_decay, lambda m: Decayed(decays(m)), "Decayed reads attributes .* of no_decay"),
    "id": (str, lambda m: ById(two(m)), "ById holds parameters of the model in slow"),
    "id from around": (str, by_id_from_around, "FromAround holds parameters of the model in slow of .*one"),
    "zero_grad": (str, lambda m: Zeroing(two(m)), "Zeroing: its own zero_grad does something else than torch's"),
    "replaced zero_grad": (str, replaced_zeroing, "Each: the zero_grad of this one optimizer has been replaced"),
    "int names": (
        str,
        lambda m: Ints(two(m)),
        r"Ints cannot be made .* state\[param\]\[0\], as names have to be strings",
    ),
}


def following(prepare, opt_of):
    model = deep()
    prepare(model)
    return Following(opt_of(model), dict(model.named_parameters()))


@pytest.mark.parametrize(("prepare", "opt_of", "told"), REFUSALS.values(), ids=REFUSALS)
def test_what_asks_for_more_than_a_copy_has_is_refused(prepare, opt_of, told):
    with pytest.raises(fs.OptimizerError, match=told):
        following(prepare, opt_of)


class DroppingGrads(Each):
    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None if set_to_none or p.grad is None else torch.zeros_like(p)


class OldNames(Each):
    """Has names of ours in its state."""

    def one(self, group, p):
        state = self.state[p]
        state["count"], state["step"] = state.get("count", 0) + 2, state.get("step", 0) + 1
        state["own step"] = torch.full_like(p, state["step"])
        p.sub_(p.grad / state["own step"], alpha=group["lr"] / state["count"])


HARMLESS = {
    "a class that nobody asks for": (with_sphere, Each),
    "tags that nobody reads": (with_tags, Each),
    "a zero_grad like torch's": (str, DroppingGrads),
    "names of ours": (str, OldNames),
    "rounding of others": (str, Rounding),
}


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize(("prepare", "cls"), HARMLESS.values(), ids=HARMLESS)
def test_what_makes_no_difference_trains(prepare, cls, plugin):
    def start():
        model = deep()
        prepare(model)
        return model, cls(two(model))

    as_torch(start, plugin)


# -- what is changed later --------------------------------------------------------------------------------------------


class Clipped(Plain):
    """Bounds the norm of all, if it is told to."""

    def __init__(self, params, clip=0.0, momentum=0.0):
        super().__init__(params)
        for group in self.param_groups:
            group["clip"] = clip

    def moved(self, params):
        norm = torch.stack([p.grad.norm() for p in params]).norm() if self.param_groups[0]["clip"] else 1.0
        return [p.grad / norm for p in params]


class MySGD(torch.optim.SGD):
    pass


def setting(**options):
    return lambda opt: [group.update(options) for group in opt.param_groups]


def moved(opt):
    opt.param_groups[1]["params"].append(opt.param_groups[0]["params"].pop())


def fewer(opt):
    opt.param_groups[0]["params"] = opt.param_groups[0]["params"][:1]


def loaded(opt):
    opt.load_state_dict(
        MySGD([{"params": g["params"]} for g in opt.param_groups]).state_dict() | {"state": {0: {"m": 1.0}}}
    )


MOMENTUM = r'param_groups\[0\]\["momentum"\] was 0 and is 0.9'
GROUPS = "groups, or parameters of them, have been added, removed or moved"
CHANGES = {
    "tags": (Decayed, setting(decay=0.1), "Decayed reads attributes .* of no_decay"),
    "norm": (Clipped, setting(clip=1.0), f"Clipped: {DEPENDENT}"),
    "momentum": (torch.optim.SGD, setting(momentum=0.9), f"SGD: {MOMENTUM}"),
    "momentum of a copy": (MySGD, setting(momentum=0.9), f"MySGD: {MOMENTUM}"),
    "amsgrad": (torch.optim.Adam, setting(amsgrad=True), r'Adam: param_groups\[0\]\["amsgrad"\] was False and is True'),
    "moved": (torch.optim.SGD, moved, GROUPS),
    "moved in a copy": (Each, moved, GROUPS),
    "fewer": (torch.optim.SGD, fewer, GROUPS),
    "a group less": (Each, lambda opt: opt.param_groups.pop(), GROUPS),
    "state cleared": (torch.optim.Adam, lambda opt: opt.state.clear(), "state: .* has none any more"),
    "state written": (Each, lambda opt: opt.state.update({0: {}}) or opt.state[opt], "state: .* has none any more"),
    "state loaded": (torch.optim.SGD, loaded, "SGD: a state was loaded into it after it was boosted"),
}


@pytest.mark.parametrize(("cls", "change", "told"), CHANGES.values(), ids=CHANGES)
def test_changes_that_would_count_for_nothing_are_refused(cls, change, told):
    model = deep()
    without_decay(model)
    given = cls(two(model))

    def main():
        booster = fs.Booster(fs.DDPPlugin())
        boosted, opt, *_ = booster.boost(model, given)
        loop(boosted, opt, lambda loss: booster.backward(loss, opt), steps=1)
        change(given)
        opt.step()

    with pytest.raises(fs.OptimizerError, match=told):
        fs.run(main, mesh=fs.make_mesh({"data": 1}))


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, Each])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_groups_that_were_replaced_are_followed(cls, plugin):
    def between(opt, step):
        given = getattr(opt, "optim", opt)
        if step == 1:
            given.param_groups[0] = dict(given.param_groups[0], lr=0.02)
        if step == 2 and given is not opt:
            given.load_state_dict(given.state_dict())
        if step == 3:
            opt.param_groups[1]["lr"] = 0.015

    def start():
        model = deep()
        return model, cls(two(model), lr=0.01)

    as_torch(start, plugin, between=between)


class Paused(Each):
    """Rests where a group says so."""

    def one(self, group, p):
        p.sub_(p.grad, alpha=group["lr"] * (not group["rest"]))


SWITCHES = {"decay": (Decayed, 0.1), "rest": (Paused, True)}


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("option", SWITCHES)
def test_options_may_be_switched_on_and_off(option, plugin):
    cls, on = SWITCHES[option]

    def start():
        model = deep()
        return model, cls(two(model), **{option: on * 0})

    as_torch(start, plugin, between=lambda opt, step: setting(**{option: on * (step % 2)})(opt))


# -- closures ---------------------------------------------------------------------------------------------------------


class Closure(Each):
    """Does with a closure what `called` does."""

    by = 1.0

    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                loss = self.called(closure)
            self.by = loss if isinstance(loss, float) else 1.0
        super().step()

    def one(self, group, p):
        p.sub_(p.grad, alpha=group["lr"] * self.by)


def once(self, closure):
    closure()


def twice(self, closure):
    closure()
    with torch.no_grad():
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(0.0 if p.grad is None else p.grad)
    closure()


def calls_again(self, closure):
    closure(), closure()


def never(self, closure):
    return 1.0


def by_loss(self, closure):
    return float(closure())


def by_late_loss(self, closure):
    loss = float(closure())
    return 0.5 if loss < -50 else 1.0


def after_moving(self, closure):
    with torch.no_grad():
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.5)
    closure()


def by_backward(self, closure):
    closure().backward()


def not_at_all(self, closure):
    raise ValueError("no closures")


CALLS = (twice, calls_again, never, by_loss, by_late_loss, after_moving, by_backward, not_at_all)


@pytest.mark.parametrize("called", CALLS, ids=lambda f: f.__name__)
def test_a_closure_that_is_more_than_called_once_is_refused(called):
    given = following(str, lambda m: type("Own", (Closure,), {"called": called, "__module__": __name__})(two(m)))
    with pytest.raises(fs.OptimizerError) as error:
        given.refuse_closure()
    assert str(error.value) == (
        "step: Own does something else with a closure than to call it once before it steps: it calls it again, or steps by "
        "its loss, and a boosted optimizer does not. Take the backward before step(), without a closure."
    )


@pytest.mark.parametrize(
    "cls", [type("Once", (Closure,), {"called": once}), Each, MySGD, torch.optim.SGD, torch.optim.RMSprop]
)
def test_a_closure_that_is_called_once_is_not(cls):
    given = following(str, lambda m: cls(two(m), lr=0.1))
    if cls is Each:  # which takes one, and calls it never
        with pytest.raises(fs.OptimizerError, match="Each does something else with a closure"):
            given.refuse_closure()
    else:
        given.refuse_closure()


# -- what stands around a class ---------------------------------------------------------------------------------------


def test_hooks_of_all_optimizers_are_refused_where_nobody_calls_them():
    handle = register_optimizer_step_post_hook(lambda opt, args, kwargs: None)
    try:
        with pytest.raises(fs.OptimizerError, match="SGD: hooks of the steps of all optimizers are not called"):
            boost(lambda model: torch.optim.SGD(groups_of(model), lr=0.1))
    finally:
        handle.remove()
    assert (
        boost(lambda model: torch.optim.SGD(groups_of(model), lr=0.1)).params.keys()
        == dict(net().named_parameters()).keys()
    )


def test_a_class_of_torch_with_another_step_is_refused(monkeypatch):
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: None)
    with pytest.raises(fs.OptimizerError, match=re.escape("SGD: the step of torch's own class has been replaced")):
        boost(lambda model: torch.optim.SGD(groups_of(model), lr=0.1))


@pytest.mark.parametrize(("layers", "groups"), [(150, 1), (25, 25), (150, 150)])
def test_dry_steps_are_few_also_of_many_groups(layers, groups):
    stepped = []

    class Counted(Each):
        def one(self, group, p):
            stepped.append(None)
            super().one(group, p)

    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(layers)])
    parts = [{"params": [*part.parameters()], "lr": 0.1 / (1 + i)} for i, part in enumerate(model)]
    parts = parts if groups > 1 else [{"params": [*model.parameters()]}]
    Following(Counted(parts), dict(model.named_parameters()))
    assert 100 < len(stepped) < 20 * 2 * layers + 2000
