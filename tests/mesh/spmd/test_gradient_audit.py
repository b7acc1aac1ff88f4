"""A gradient is right, or an error says what is wrong with the program: promises by value, the audit by types."""

import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.errors import PromiseError

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

ARGUMENT = "argument b of <lambda>, with spec P(), is equal along", "Write b = fs.pvary(b, "
RESULT = (
    "result of <lambda>, with out_spec P(), must be equal along",
    "Reduce it with fs.psum or fs.pmean",
)
TYPES = "its types do not fit"
WHERE = "test_gradient_audit.py", "index 1 along d differs from index 0"


def used_alone(name, **options):
    """Use the replicated result of a collective with each device's own data."""
    return lambda x, b: (x[:, None] * getattr(fs, name)(x, "d", **options)).sum(1)


def gradient_of_mean(x, b):
    x = x.detach().requires_grad_()
    mean = fs.psum(x, "d")  # used below with each device's own data
    return torch.autograd.grad((mean * (1 + fs.axis_index("d"))).sum(), x)[0]


WRONG = {  # name: what each device does, the spec of its results, words of the error
    "a bias is added": (lambda x, b: x + b, P("d"), *ARGUMENT),
    "a weight is used": (lambda x, b: fs.psum(((x * b) ** 2).sum(), "d"), P(), *ARGUMENT, WHERE[1]),
    "all_to_all of what is equal": (lambda x, b: x + fs.all_to_all(b, "d"), P("d"), *ARGUMENT),
    "psum of what is equal": (lambda x, b: fs.psum(x, "d") + fs.psum(b, "d"), P(), TYPES),
    "pmean of what is equal": (lambda x, b: fs.psum(x, "d") + fs.pmean(b, "d"), P(), TYPES),
    "pmax of what is equal": (lambda x, b: fs.psum(x, "d") + fs.pmax(b, "d"), P(), TYPES),
    "psum_scatter of what is equal": (
        lambda x, b: x.sum() + fs.psum_scatter(b, "d"),
        P("d"),
        TYPES,
    ),
    "all_gather of what is equal": (
        lambda x, b: fs.psum(x, "d").sum() + fs.all_gather(b, "d", to="replicated"),
        P(),
        "b",
    ),
    "a bias before a psum": (lambda x, b: fs.psum(x * x + b, "d"), P(), TYPES),
    "a sum started for later": (
        lambda x, b: fs.psum(x, "d") + fs.psum.start(b, "d").wait(),
        P(),
        TYPES,
    ),
    "no psum": (lambda x, b: (x * fs.pvary(b, "d")).sum(), P(), *RESULT, *WHERE),
    "a gradient without psum": (
        lambda x, b: torch.autograd.grad((b * x).sum(), b, create_graph=True)[0],
        P(),
        *RESULT,
    ),
    "torch.func inside": (lambda x, b: torch.func.grad(lambda b: (x * b).sum())(b), P(), *RESULT),
    "a gradient inside": (
        lambda x, b: gradient_of_mean(x, b),
        P("d"),
        "the result of fs.psum over",
        *WHERE,
    ),
    "a psum used alone": (
        used_alone("psum"),
        P("d"),
        'Put fs.pvary(x, "d") around the result',
        *WHERE,
    ),
    "a pmax used alone": (
        used_alone("pmax"),
        P("d"),
        'the result of fs.pmax over "d" is equal on all devices',
    ),
    "a pmean used alone": (used_alone("pmean"), P("d"), "the result of fs.pmean"),
    "a broadcast used alone": (used_alone("broadcast"), P("d"), "the result of fs.broadcast"),
    "an all_gather used alone": (
        used_alone("all_gather", to="replicated"),
        P("d"),
        "the result of fs.all_gather",
    ),
    "unequal values declared equal": (
        lambda x, b: fs.replicated(x, "d"),
        P(),
        'argument of fs.replicated over "d"',
    ),
    "a ring": (
        lambda x, b: x + fs.ppermute(x, "d", [(0, 1), (1, 0)]),
        P(),
        "declare it with fs.replicated(x, axis)",
    ),
}


def loss_of(body, out, x, b, check=None):
    """Return a sum, whose cotangents are equal everywhere."""
    mesh = fs.make_mesh({"d": 2})
    return fs.unshard(
        fs.shard_map(body, mesh=mesh, in_specs=(P("d"), P()), out_specs=out, check=check)(x, b)
    ).sum()


def arguments():
    return torch.arange(1.0, 5).double().requires_grad_(), torch.tensor(
        [2.0, 3.0]
    ).double().requires_grad_()


@pytest.mark.parametrize("check", [None, True])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradient_raises_with_fix(name, check):
    body, out, *words = WRONG[name]
    with pytest.raises(PromiseError) as error:
        loss_of(body, out, *arguments(), check=check).backward()
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradient_without_check_does_not_raise(name):
    body, out, *_ = WRONG[name]
    loss = loss_of(body, out, *arguments(), check=False)
    if loss.requires_grad:
        loss.backward()


def test_nan_equals_nan():
    x = torch.tensor([float("nan"), 1.0])
    mapped = fs.shard_map(
        lambda x: x, mesh=fs.make_mesh({"d": 2}), in_specs=P(), out_specs=P(), check=True
    )
    assert fs.unshard(mapped(x)).isnan().tolist() == [True, False]


def test_audit_runs_once_and_counts_no_bytes():
    calls = []

    def body(x, b):
        calls.append(1)
        return fs.psum(x * fs.pvary(b, "d"), "d")

    mapped = fs.shard_map(body, mesh=fs.make_mesh({"d": 2}), in_specs=(P("d"), P()), out_specs=P())
    sent = []
    for _ in range(3):
        with fs.ledger() as comm:
            fs.unshard(mapped(*arguments())).sum().backward()
        sent.append(comm.by_collective())
    assert sent[0] == sent[1] == sent[2]
    assert len(calls) == 3 * 2 + 2 * 2


def test_audit_keeps_random_state():
    def body(x, b):
        return fs.psum(torch.nn.functional.dropout(x * fs.pvary(b, "d")), "d")

    after = []
    for check in (True, False):
        torch.manual_seed(3)
        x, b = arguments()
        loss_of(body, P(), x, b, check=check).backward()
        after.append(torch.cat([x.grad, torch.rand(2).double()]))
    assert torch.equal(*after)


def test_audit_of_inner_gradient_passes():
    def body(x, b):
        (g,) = torch.autograd.grad((fs.pvary(b, "d") * x).sum(), b, create_graph=True)
        return g * b

    x, b = arguments()
    loss_of(body, P(), x, b).backward()
    assert torch.equal(b.grad, x.detach().view(2, 2).sum(0))


# -- drawn programs -----------------------------------------------------------------------------------------------


class Op(NamedTuple):
    """One operation of a drawn program; `marked`: with `pvary` where its argument is equal on all devices."""

    name: str
    marked: bool


REDUCTIONS = ("psum", "pmean", "gather", "max")
NAMES = ["sin", "add", "multiply", "scatter", *REDUCTIONS]


def run(program, x, v):
    """Run a drawn program on one device; `v` begins equal on all."""
    equal = True
    for op in program:
        if equal and op.marked and op.name != "sin":
            v = fs.pvary(v, "d")
        match op.name:
            case "sin":
                v = v.sin()
            case "add":
                v = v + x
            case "multiply":
                v = v * x
            case "psum":
                v = fs.psum(v, "d")
            case "pmean":
                v = fs.pmean(v, "d")
            case "scatter":
                v = fs.psum_scatter(v, "d").expand(2)
            case "gather":
                v = fs.all_gather(v, "d", to="replicated").view(2, 2).cos().sum(0)
            case _:
                v = fs.pmax(v, "d")
        equal = equal if op.name == "sin" else op.name in REDUCTIONS
    return v


def types_of(program):
    """Return whether each operation that wants a device's own value is given one, and whether the result is equal."""
    equal = is_well_typed = True
    for op in program:
        if op.name != "sin":
            is_well_typed = is_well_typed and (op.marked or not equal)
            equal = op.name in REDUCTIONS
    return is_well_typed, equal


def verdict(program, seed):
    """Return "right" if the gradient is the difference of two values, or "raises"."""
    draw, (is_well_typed, is_equal) = random.Random(seed), types_of(program)
    x, b = (torch.tensor([draw.uniform(0.5, 2) for _ in range(n)]).double() for n in (4, 2))

    def loss(b, check=None):
        return loss_of(lambda x, v: run(program, x, v), P() if is_equal else P("d"), x, b, check)

    try:
        gradient = torch.func.grad(loss)(b)
    except PromiseError:
        return "wrong" if is_well_typed else "raises"
    steps = 1e-6 * torch.eye(2).double()
    rises = torch.stack([(loss(b + step, False) - loss(b - step, False)) / 2e-6 for step in steps])
    return "right" if torch.allclose(gradient, rises, rtol=1e-4, atol=1e-6) else "wrong"


@given(
    st.lists(st.builds(Op, st.sampled_from(NAMES), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 99),
)
def test_audited_gradient_is_right_or_raises(program, seed):
    assert verdict(program, seed) != "wrong"


def verdicts(seed, count):
    fs.make_mesh({"d": 2})  # processes meet outside of torch.func
    draw = random.Random(seed)
    programs = [
        [Op(draw.choice(NAMES), draw.random() < 0.5) for _ in range(draw.randint(1, 4))]
        for _ in range(count)
    ]
    return [verdict(program, seed) for seed, program in enumerate(programs)]


def test_audited_gradient_on_processes_is_right_or_raises(two):
    first, second = two.run(verdicts, 38, 40)
    assert first == second and {*first} == {"right", "raises"}
