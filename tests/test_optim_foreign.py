"""Classes of torch.optim as pure pairs."""

import functools
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fshard as fs
from fshard import P, optim
from fshard.testing import check_elementwise
from tests.optimizers import FOREIGN, by_step, by_torch, by_update, example, leaves_of, same, suited, tensor, trees


@pytest.mark.parametrize("cls", FOREIGN, ids=lambda cls: cls.__name__)
@given(st.data())
@settings(max_examples=10)
def test_foreign_optimizers_have_torchs_bits(cls, data):
    params, steps = data.draw(trees((torch.float32, torch.float64)))
    expected = by_torch(cls, params, steps, **FOREIGN[cls])
    assert same(leaves_of(by_step(optim.from_torch(cls, **FOREIGN[cls]), params, steps)[0]), expected)


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Muon])
def test_foreign_optimizers_of_matrices(cls):
    params, steps = suited(optim.muon, *example())
    opt = optim.from_torch(cls, lr=0.1)
    assert not opt.elementwise
    assert same(leaves_of(by_step(opt, params, steps)[0]), by_torch(cls, params, steps, lr=0.1))


CLASSES = [
    cls for cls in vars(torch.optim).values() if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
]
REFUSED = (torch.optim.LBFGS, torch.optim.SparseAdam)


@pytest.mark.parametrize(
    "cls", [cls for cls in CLASSES if cls is not torch.optim.Optimizer], ids=lambda cls: cls.__name__
)
def test_of_every_class_it_is_known_whether_it_is_elementwise(cls):
    if cls in REFUSED:
        with pytest.raises(optim.OptimizerError, match=f"cannot make torch.optim.{cls.__name__}"):
            optim.from_torch(cls)
    elif optim.from_torch(cls).elementwise:
        check_elementwise(optim.from_torch(cls))
    else:
        with pytest.raises((AssertionError, optim.OptimizerError), match="flat pieces|refused what it was given"):
            check_elementwise(optim.from_torch(cls, elementwise=True), {"w": torch.ones(6, 5)})


def test_of_a_class_that_torch_may_add_it_is_asked(monkeypatch):
    later = type("Later", (torch.optim.SGD,), {})
    monkeypatch.setattr(torch.optim, "Later", later, raising=False)
    with pytest.raises(optim.OptimizerError, match="does not know whether Later is elementwise"):
        optim.from_torch(later)
    assert optim.from_torch(later, elementwise=True).elementwise


MODES = ({"foreach": False}, {"foreach": True}, {"fused": True}, {"capturable": True})


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("cls", [*FOREIGN, torch.optim.Adafactor, torch.optim.Muon], ids=lambda cls: cls.__name__)
def test_every_class_works_in_every_mode_in_which_torch_runs(cls, mode):
    params, steps = suited(optim.muon, *example())
    try:
        expected = by_torch(cls, params, steps, **mode)
    except Exception as refused:  # of whatever kind: torch has several
        with pytest.raises((optim.OptimizerError, type(refused))):
            by_step(optim.from_torch(cls, **mode), params, steps)
        return
    opt = optim.from_torch(cls, **mode)
    assert same(leaves_of(by_step(opt, params, steps)[0]), expected)
    if opt.elementwise:
        check_elementwise(opt)


class Own(torch.optim.Optimizer):
    """A class that keeps what `remember` keeps."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / self.remember(group, self.state[p]))


def in_group(self, group, state):
    group["step"] = group.get("step", 0) + 1
    return group["step"]


def on_object(self, group, state):
    self.count = getattr(self, "count", 0) + 1
    return self.count


def in_shared_state(self, group, state):
    self.state["all"]["n"] = self.state["all"].get("n", 0) + 1
    return self.state["all"]["n"]


def in_list(self, group, state):
    state.setdefault("history", []).append(1.0)
    return len(state["history"])


def late(self, group, state):
    if "n" in state:
        state["more"] = 1
    state["n"] = state.get("n", 0) + 1
    return state["n"]


def in_number(self, group, state):
    state["n"] = state.get("n", 0) + 1
    return state["n"]


LOST = {
    in_group: 'param_groups[0]["step"], which steps change',
    on_object: "count, which steps change",
    in_shared_state: "state['all'], which steps change",
    in_list: 'state[param]["history"], a list',
    late: 'state[param]["more"], which comes at the second step',
}


@pytest.mark.parametrize("remember", LOST, ids=lambda f: f.__name__)
def test_a_class_that_remembers_what_would_be_lost_is_refused(remember):
    cls = type("Mine", (Own,), {"remember": remember})
    with pytest.raises(optim.OptimizerError) as error:
        optim.from_torch(cls, elementwise=True)
    assert str(error.value) == (
        f"from_torch cannot make Mine a pure function of gradients: it would lose {LOST[remember]}. "
        "What is kept from step to step are tensors and numbers in state[param], from the first step on."
    )


def test_all_that_would_be_lost_is_named():
    cls = type("Mine", (Own,), {"remember": lambda *given: max(f(*given) for f in LOST)})
    with pytest.raises(optim.OptimizerError) as error:
        optim.from_torch(cls, elementwise=True)
    assert all(text in str(error.value) for text in LOST.values())


def test_a_class_that_keeps_numbers_of_each_parameter_has_torchs_bits():
    cls = type("Mine", (Own,), {"remember": in_number})
    params, steps = example()
    opt = optim.from_torch(cls, elementwise=True)
    assert same(leaves_of(by_step(opt, params, steps)[0]), by_torch(cls, params, steps))


@pytest.mark.parametrize("shape", [(33, 17), (1,), (4099,)])
def test_a_fused_class_is_fused_in_steps_alone(shape):
    grads = [[torch.randn(shape, generator=torch.Generator().manual_seed(seed))] for seed in range(4)]
    params = [torch.ones(shape)]
    fused, plain = (optim.from_torch(torch.optim.Adam, lr=0.1, fused=fused) for fused in (True, False))
    assert same(by_update(fused, params, grads), by_update(plain, params, grads))
    assert same(by_step(fused, params, grads)[0], by_torch(torch.optim.Adam, params, grads, lr=0.1, fused=True))


def test_in_reproducible_mode_a_fused_class_has_equal_bits_on_any_mesh():
    def trained(n):
        mesh = fs.make_mesh({"data": n})
        params = fs.shard_params({"w": torch.linspace(-1, 1, 33 * 7).reshape(33, 7)}, fs.fsdp("data"), mesh=mesh)
        opt = optim.ema(optim.from_torch(torch.optim.Adam, lr=0.1, fused=True), 0.5)
        opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=3)
        step = fs.train_step(
            lambda p, x: (x @ p["w"]).sin().sum(1).mean(),
            opt,
            mesh=mesh,
            batch=P("data"),
            reproducible=True,
            slices=8,
        )
        state = opt.init(params)
        for seed in range(4):
            params, state, _ = step(params, state, tensor((8, 33), torch.float32, seed))
        return fs.unshard(params["w"])

    assert all(torch.equal(trained(n), trained(1)) for n in (2, 4, 8))


# -- classes of one's own, made before they are boosted ---------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """Elementwise, and says so."""

    elementwise = True

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (first, second), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(torch.sign(m * first + p.grad * (1 - first)), alpha=-lr)
                m.mul_(second).add_(p.grad, alpha=1 - second)


class MyAdamW(torch.optim.AdamW):
    pass


class MyAdagrad(torch.optim.Adagrad):
    """Its state is made by the constructor."""


class ByWords(torch.optim.Optimizer):
    """Nobody sees in its constructor what it takes."""

    def __init__(self, params, **words):
        super().__init__(params, {"lr": 0.05, "max_lr": 1.0, "power": 2.0, **words})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(min(group["lr"], group["max_lr"]) * p.grad.sign() * p.grad.abs() ** (1 / group["power"]))


class ByAttributes(torch.optim.SGD):
    """What its steps read stands on the object: a number, a method of its own."""

    def __init__(self, params, lr, bound=1.0, squashed=True):
        super().__init__(params, lr=lr, momentum=0.9)
        self.bound = bound
        self.bounded = self.by_tanh if squashed else self.by_clamp

    def by_tanh(self, x):
        return self.bound * torch.tanh(x / self.bound)

    def by_clamp(self, x):
        return x.clamp(-self.bound, self.bound)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.copy_(self.bounded(p.grad))  # in place
        super().step()


class Factored(torch.optim.Optimizer):
    """Second moments of rows and columns, float32; a vector has its own."""

    def __init__(self, params, lr=0.05, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, square, decay = self.state[p], p.grad.float().square() + 1e-8, group["decay"]
                if not state:
                    state["count"], state["unused"] = 0, None
                    for name, shape in {"row": p.shape[:1], "column": p.shape[1:]}.items() if p.ndim == 2 else ():
                        state[name] = torch.zeros(shape)
                    if p.ndim != 2:
                        state["whole"] = torch.zeros(p.shape)
                state["count"] += 1
                if p.ndim == 2:
                    state["row"].lerp_(square.mean(1), 1 - decay)
                    state["column"] = decay * state["column"] + (1 - decay) * square.mean(0)
                    moment = state["row"][:, None] * state["column"] / state["row"].mean()
                else:
                    moment = state["whole"].lerp_(square, 1 - decay)
                p.data = p.data - group["lr"] * p.grad / (moment / (1 - decay ** state["count"])).sqrt().to(p.dtype)


class Lars(torch.optim.Optimizer):
    """A trust ratio for each parameter."""

    def __init__(self, params, lr=0.5, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    trust = 0.1 * p.norm() / (p.grad.norm() + 1e-3)
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.mul_(group["momentum"]).add_(p.grad * trust)
                    p.sub_(m, alpha=group["lr"])


class Counting(torch.optim.Optimizer):
    """Counts that are Python's: one from 1 on, one of every other step, a power with all of its digits, a flag."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=1, power=1.0, odd=False, m=torch.zeros_like(p))
                state["power"] *= group["beta"]
                state["odd"] = not state["odd"]
                state["m"].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                p.sub_(state["m"] / (1 - state["power"]), alpha=group["lr"] / state["step"] ** 0.5)
                state["step"] += 1 + state["odd"]


OWN = {
    "Lion": lambda params: Lion(params, lr=0.02),
    "MyAdamW": lambda params: MyAdamW(params, lr=0.02, weight_decay=0.3, betas=(0.8, 0.9)),
    "MyAdagrad": lambda params: MyAdagrad(params, lr=0.1, initial_accumulator_value=0.5),
    "ByWords": lambda params: ByWords(params, lr=0.05, power=3.0, max_lr=0.04),
    "ByAttributes": lambda params: ByAttributes(params, lr=0.1, bound=0.01),
    "Factored": Factored,
    "Lars": Lars,
    "Counting": Counting,
}
PLUGINS = {
    "ddp": fs.DDPPlugin,
    "zero 1": lambda **options: fs.ZeroPlugin(stage=1, **options),
    "zero 2": lambda **options: fs.ZeroPlugin(stage=2, **options),
    "fsdp": fs.FSDPPlugin,
}


class Net(nn.Module):
    """Matrices, vectors, a number, and a layer that is not always used."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, deep=True):
        y = self.first(x).tanh()
        return self.scale * self.third(self.second(y).tanh() if deep else y)


def net():
    torch.manual_seed(1)
    return Net().double()


def x_of(step):
    return tensor((8, 3), torch.float64, step)


def groups_of(model):
    few = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": [p for p in model.parameters() if p.ndim == 2]}, {"params": few, "lr": 0.03}]


def by_torchs_loop(make, steps=5):
    model = net()
    opt = make(groups_of(model))
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    for step in range(steps):
        model(x_of(step), deep=step not in (0, 3)).square().mean().backward()
        opt.step(), opt.zero_grad(), schedule.step()
    return model.state_dict()


def boosted(make, plugin, n=2, steps=5, **options):
    def main():
        model = net()
        opt = make(groups_of(model))
        schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
        booster = fs.Booster(PLUGINS[plugin](**options))
        model, opt, *_ = booster.boost(model, opt, lr_scheduler=schedule)
        for step in range(steps):
            x = x_of(step).chunk(n)[fs.axis_index("data")]
            booster.backward(model(x, deep=step not in (0, 3)).square().mean(), opt)
            opt.step(), opt.zero_grad(), schedule.step()
        return model.unwrap().state_dict()

    return fs.run(main, mesh=fs.make_mesh({"data": n}))


def close(states, expected):
    for state in states:
        torch.testing.assert_close(dict(state), dict(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("name", OWN)
def test_classes_of_ones_own_train_what_torch_trains(name, plugin, n):
    close(boosted(OWN[name], plugin, n), by_torchs_loop(OWN[name]))


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
@pytest.mark.parametrize("name", OWN)
def test_classes_of_ones_own_train_stages(name, zero_stage):
    def start():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        return model, OWN[name](model.parameters())

    model, opt = start()
    for step in range(4):
        model(x_of(step)).square().mean().backward()
        opt.step(), opt.zero_grad()

    def main():
        booster = fs.Booster(fs.HybridParallelPlugin(pipeline=2, microbatches=2, zero_stage=zero_stage))
        model, opt, *_ = booster.boost(*start())
        for step in range(4):
            booster.execute_pipeline(iter([x_of(step)]), model, lambda y, x: y.square().mean(), opt)
            opt.step(), opt.zero_grad()
        return model.unwrap().state_dict()

    close(fs.run(main, mesh=fs.make_mesh({"data": 2, "pipe": 2})), model.state_dict())


@pytest.mark.parametrize("name", ["Lion", "Factored", "Counting"])
def test_classes_of_ones_own_have_equal_bits_on_any_mesh_in_reproducible_mode(name):
    expected = boosted(OWN[name], "ddp", 1, reproducible=True, slices=4)[0]
    for plugin, n in [("ddp", 2), ("zero 1", 4), ("zero 2", 2), ("fsdp", 4)]:
        assert all(
            same(dict(state), dict(expected)) for state in boosted(OWN[name], plugin, n, reproducible=True, slices=4)
        )


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", OWN)
def test_the_functional_form_takes_classes_of_ones_own(name, plugin):
    model = net()
    opt = OWN[name](model.parameters())
    for step in range(3):
        model(x_of(step)).square().mean().backward()
        opt.step(), opt.zero_grad()
    model, expected = net(), dict(model.named_parameters())
    booster = fs.Booster(PLUGINS[plugin](mesh=fs.make_mesh({"data": 2})))
    state = booster.init(model, OWN[name](model.parameters()), lambda y, _: y.square().mean())
    for step in range(3):
        state, _ = booster.step(state, (x_of(step), x_of(step)))
    close([fs.unshard(state.params)], {name: x.detach() for name, x in expected.items()})


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["Lars", "Factored", "Counting"])
def test_classes_of_ones_own_train_masters_of_16_bits(name, precision):
    for plugin in ("zero 2", "fsdp"):
        for state in boosted(OWN[name], plugin, precision=precision):
            for key, x in by_torchs_loop(OWN[name]).items():
                torch.testing.assert_close(state[key], x, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_class_of_ones_own_takes_closures_zeros_and_options_that_change(plugin):
    def rounds(model, opt, backward):
        for step in range(4):
            opt.zero_grad(set_to_none=False)

            def closure(step=step):
                loss = model(x_of(step)).square().mean()
                backward(loss)
                return loss

            opt.step(closure)
            opt.param_groups[0]["betas"] = (0.5, 0.6)
            opt.param_groups[1]["weight_decay"] = 0.2 * step
        return model

    class WithClosure(Lion):
        def step(self, closure=None):
            loss = closure() if closure else None
            super().step()
            return loss

    model = net()
    opt = WithClosure(groups_of(model))
    rounds(model, opt, lambda loss: loss.backward())

    def main():
        ours = net()
        booster = fs.Booster(PLUGINS[plugin]())
        ours, opt, *_ = booster.boost(ours, WithClosure(groups_of(ours)))
        return rounds(ours, opt, lambda loss: booster.backward(loss, opt)).unwrap().state_dict()

    close(fs.run(main, mesh=fs.make_mesh({"data": 2})), model.state_dict())


def boost(opt_of, change=lambda opt: None):
    model = net()
    opt = opt_of(model)
    change(opt)
    return fs.Booster(fs.DDPPlugin(mesh=fs.make_mesh({"data": 1}))).init(model, opt, lambda y: y.mean())


class Plain(torch.optim.Optimizer):
    """Steps by what `moved` makes of the gradients of a group."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            some = [p for p in group["params"] if p.grad is not None]
            for p, g in zip(some, self.moved(some), strict=True):
                p.sub_(g, alpha=group["lr"])


def by_norm(self, params):
    norm = torch.stack([p.grad.norm() for p in params]).norm()
    return [p.grad / norm for p in params]


def by_noise(self, params):
    return [p.grad + torch.randn_like(p) for p in params]


def by_place(self, params):
    return [p.grad * place for place, p in enumerate(params, 1)]


def by_all_groups(self, params):
    return [p.grad / sum(len(group["params"]) for group in self.param_groups) for p in params]


@pytest.mark.parametrize("moved", [by_norm, by_noise, by_place, by_all_groups], ids=lambda f: f.__name__)
@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_a_class_in_which_parameters_depend_on_others_is_refused(moved, lr):
    cls = type("Mixed", (Plain,), {"moved": moved})
    with pytest.raises(fs.OptimizerError) as error:
        boost(lambda model: cls(groups_of(model), lr=lr))
    assert str(error.value) == (
        "Mixed: steps of several parameters together have another result than those of each alone. The update of one depends "
        "on others, by a norm of all, a count, random numbers or its place in the group, and others may be on other devices. "
        "For norms there is booster.clip_grad_norm(optimizer, max_norm)."
    )


class Holding(Plain):
    """Goes through a list that it has made for itself."""

    def __init__(self, params):
        params = [p for group in params for p in group["params"]]
        super().__init__(params)
        self.own, self.helper = list(params), {"of": [self.param_groups]}

    def moved(self, params):
        return [p.grad for p in self.own]


class Sam(Plain):
    """Steps twice, and asks for the gradient in between."""

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()


class Decaying(Plain):
    """Moves what has no gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.1 * p if p.grad is None else p.grad, alpha=group["lr"])


class Aliasing(Plain):
    """Has the parameter itself as its state."""

    def moved(self, params):
        for p in params:
            self.state[p].setdefault("self", p)
        return [p.grad + self.state[p]["self"] - 2 * p for p in params]


class Tagged(Plain):
    """Looks at what somebody has written on a parameter."""

    def moved(self, params):
        return [p.grad * getattr(p, "multiplier", 1.0) for p in params]


class Untrue(Lars):
    """Says of itself what is not so."""

    elementwise = True


class Prepared(Plain):
    """Begins with copies of the parameters."""

    def __init__(self, params):
        super().__init__(params)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()


class Shared(Plain):
    """Begins with a state that is no parameter's."""

    def __init__(self, params):
        super().__init__(params)
        self.state["k"] = {"n": 0}


class ByList(Plain):
    """Goes through parameters that it finds by weak references."""

    def __init__(self, params):
        super().__init__(params)
        self.own = [weakref.ref(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p in (x for ref in self.own if (x := ref()) is not None and x.grad is not None):
            p.sub_(p.grad, alpha=0.1)


class Coasting(Plain):
    """Goes on moving what has had a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9)
                p.sub_(m if p.grad is None else m.add_(p.grad), alpha=group["lr"])


class OfFirst(Plain):
    """Has the rate of the first group for all."""

    def moved(self, params):
        return [p.grad * self.param_groups[0]["lr"] for p in params]


class Dropping(Plain):
    """Lowers the rate itself after some steps."""

    def moved(self, params):
        for p in params:
            self.state[p]["n"] = n = self.state[p].get("n", 0) + 1
            if n == 5 and not self.param_groups[0].get("low"):
                self.param_groups[0].update(lr=0.01, low=True)
        return [p.grad for p in params]


class Switching(Plain):
    """Has another rate for all, once any parameter has made some steps."""

    rate = 1.0

    def moved(self, params):
        for p in params:
            self.state[p]["n"] = self.state[p].get("n", 0) + 1
            if self.state[p]["n"] > 4:
                self.rate = 0.1
        return [p.grad * self.rate for p in params]


class Skipping(Plain):
    """Makes no step where any gradient is no number."""

    def moved(self, params):
        good = all(
            p.grad.isfinite().all() for group in self.param_groups for p in group["params"] if p.grad is not None
        )
        return [p.grad if good else torch.zeros_like(p) for p in params]


class Bounded(Plain):
    """Bounds a norm of all that is seldom too large."""

    def moved(self, params):
        norm = torch.stack([p.grad.norm() for p in params]).norm() / 1e4
        return [p.grad / norm.clamp(min=1.0) for p in params]


class Breaking(Plain):
    """Leaves what comes after a parameter without gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    break
                p.sub_(p.grad, alpha=group["lr"])


def tagged(opt):
    opt.param_groups[0]["params"][0].multiplier = 2.0


def replaced(opt):
    opt.step = lambda closure=None: None


def stepped(opt):
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.arange(p.numel()).to(p).reshape(p.shape)
    opt.step()


REFUSALS = {
    "holding": (Holding, None, "Holding holds parameters of the model in own, helper"),
    "closure": (
        Sam,
        None,
        r"could not step other parameters of the same shapes: TypeError: .*missing 1 required.*no closure",
    ),
    "decaying": (Decaying, None, "Decaying moves parameters that have no gradient"),
    "aliasing": (Aliasing, None, "Aliasing: steps of one optimizer have another result than those of new ones"),
    "tagged": (Tagged, tagged, "Tagged reads attributes of parameters, of multiplier"),
    "untrue": (Untrue, None, "Untrue says elementwise = True, but pieces of a parameter have another result"),
    "prepared": (Prepared, None, r'Prepared: state\[param\]\["slow"\] would be lost'),
    "shared": (Shared, None, r"Shared: state\['k'\] would be lost"),
    "replaced": (MyAdamW, replaced, "MyAdamW: the step of this one optimizer has been replaced"),
    "stepped": (MyAdamW, stepped, r'MyAdamW: state\[param\]\["exp_avg"\].* would be lost.*before its first step'),
    "by list": (ByList, None, "ByList holds parameters of the model in own"),
    "coasting": (Coasting, None, "Coasting moves parameters that have no gradient"),
    "dropping": (Dropping, None, "Dropping: steps of .* have another result"),
    **{
        cls.__name__: (cls, None, f"{cls.__name__}: steps of several parameters together")
        for cls in (OfFirst, Switching, Skipping, Bounded, Breaking)
    },
    "a subclass of LBFGS": (
        type("Mine", (torch.optim.LBFGS,), {}),
        None,
        "Mine holds parameters of the model in _params",
    ),
}


@pytest.mark.parametrize(("cls", "change", "told"), REFUSALS.values(), ids=REFUSALS)
def test_what_a_copy_of_an_optimizer_could_not_do_is_refused(cls, change, told):
    with pytest.raises(fs.OptimizerError, match=told):
        boost(
            lambda model: cls([*model.parameters()] if "LBFGS" in str(cls.__mro__) else groups_of(model)), change or str
        )


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.RMSprop, MyAdamW])
def test_a_step_that_was_replaced_is_refused_whose_class_it_may_be(cls):
    def wrapped(opt):
        before = opt.step
        opt.step = functools.wraps(type(opt).step)(lambda closure=None: before())

    with pytest.raises(fs.OptimizerError, match=f"{cls.__name__}: the step of this one optimizer has been replaced"):
        boost(lambda model: cls(groups_of(model), lr=0.1), wrapped)


def test_tags_that_nobody_reads_are_no_matter():
    assert (
        boost(lambda model: OWN["Lars"](groups_of(model)), tagged).params.keys()
        == dict(net().named_parameters()).keys()
    )


def test_state_that_comes_late_or_changes_is_refused_when_it_does():
    class Late(Plain):
        def moved(self, params):
            for p in params:
                n = self.state[p]["n"] = self.state[p].get("n", 0) + 1
                if n == 5:
                    self.state[p]["more"] = 1
            return [p.grad for p in params]

    with pytest.raises(
        fs.OptimizerError, match=r'Late cannot be made .* a step has made, .* state\[param\]\["more"\]\.'
    ):
        boosted(Late, "zero 1", steps=8)


def test_dry_steps_draw_nothing_and_leave_the_given_one_as_it_was():
    model = net()
    opt = OWN["Counting"](groups_of(model))
    noisy = type("Noisy", (Plain,), {"moved": by_noise})(groups_of(model))
    before = torch.get_rng_state()
    fs.optim.following.Following(opt, dict(model.named_parameters())).now()
    with pytest.raises(fs.OptimizerError, match="random numbers"):
        fs.optim.following.Following(noisy, dict(model.named_parameters()))
    assert torch.equal(torch.get_rng_state(), before) and not opt.state
    assert same(dict(model.state_dict()), dict(net().state_dict()))
