"""Classes of torch.optim as pure pairs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
