"""A gradient is right, or an error names what is wrong with the program.

Promises are compared by value, and the audit is by types. The oracle of drawn programs is the
difference of two values of the loss.
"""

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
    collective = getattr(fs, name)
    return lambda x, b: (x[:, None] * collective(x, "d", **options)).sum(1)


def gradient_of_mean(x, b):
    x = x.detach().requires_grad_()
    mean = fs.psum(x, "d")  # used below with each device's own data
    loss = (mean * (1 + fs.axis_index("d"))).sum()
    return torch.autograd.grad(loss, x)[0]


def scatter_of_equal(x, b):
    return x.sum() + fs.psum_scatter(b, "d")


def gather_of_equal(x, b):
    return fs.psum(x, "d").sum() + fs.all_gather(b, "d", to="replicated")


def sum_started_for_later(x, b):
    return fs.psum(x, "d") + fs.psum.start(b, "d").wait()


SHARDED = P("d")
EQUAL = P()
WRONG = {  # name: what each device does, the spec of its results, words of the error
    "a bias is added": (lambda x, b: x + b, SHARDED, *ARGUMENT),
    "a weight is used": (
        lambda x, b: fs.psum(((x * b) ** 2).sum(), "d"),
        EQUAL,
        *ARGUMENT,
        WHERE[1],
    ),
    "all_to_all of what is equal": (
        lambda x, b: x + fs.all_to_all(b, "d"),
        SHARDED,
        *ARGUMENT,
    ),
    "psum of what is equal": (
        lambda x, b: fs.psum(x, "d") + fs.psum(b, "d"),
        EQUAL,
        TYPES,
    ),
    "pmean of what is equal": (
        lambda x, b: fs.psum(x, "d") + fs.pmean(b, "d"),
        EQUAL,
        TYPES,
    ),
    "pmax of what is equal": (
        lambda x, b: fs.psum(x, "d") + fs.pmax(b, "d"),
        EQUAL,
        TYPES,
    ),
    "psum_scatter of what is equal": (scatter_of_equal, SHARDED, TYPES),
    "all_gather of what is equal": (gather_of_equal, EQUAL, "b"),
    "a bias before a psum": (lambda x, b: fs.psum(x * x + b, "d"), EQUAL, TYPES),
    "a sum started for later": (sum_started_for_later, EQUAL, TYPES),
    "no psum": (lambda x, b: (x * fs.pvary(b, "d")).sum(), EQUAL, *RESULT, *WHERE),
    "a gradient without psum": (
        lambda x, b: torch.autograd.grad((b * x).sum(), b, create_graph=True)[0],
        EQUAL,
        *RESULT,
    ),
    "torch.func inside": (
        lambda x, b: torch.func.grad(lambda b: (x * b).sum())(b),
        EQUAL,
        *RESULT,
    ),
    "a gradient inside": (
        gradient_of_mean,
        SHARDED,
        "the result of fs.psum over",
        *WHERE,
    ),
    "a psum used alone": (
        used_alone("psum"),
        SHARDED,
        'Put fs.pvary(x, "d") around the result',
        *WHERE,
    ),
    "a pmax used alone": (
        used_alone("pmax"),
        SHARDED,
        'the result of fs.pmax over "d" is equal on all devices',
    ),
    "a pmean used alone": (used_alone("pmean"), SHARDED, "the result of fs.pmean"),
    "a broadcast used alone": (used_alone("broadcast"), SHARDED, "the result of fs.broadcast"),
    "an all_gather used alone": (
        used_alone("all_gather", to="replicated"),
        SHARDED,
        "the result of fs.all_gather",
    ),
    "unequal values declared equal": (
        lambda x, b: fs.replicated(x, "d"),
        EQUAL,
        'argument of fs.replicated over "d"',
    ),
    "a ring": (
        lambda x, b: x + fs.ppermute(x, "d", [(0, 1), (1, 0)]),
        EQUAL,
        "declare it with fs.replicated(x, axis)",
    ),
}


def loss_of(body, out, x, b, check=None):
    """Return a sum, whose cotangents are equal everywhere."""
    mesh = fs.make_mesh({"d": 2})
    in_specs = (P("d"), P())
    mapped = fs.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out, check=check)
    return fs.unshard(mapped(x, b)).sum()


def arguments():
    x = torch.arange(1.0, 5).double().requires_grad_()
    b = torch.tensor([2.0, 3.0]).double().requires_grad_()
    return x, b


@pytest.mark.parametrize("check", [None, True])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradient_raises_with_fix(name, check):
    body, out, *words = WRONG[name]

    with pytest.raises(PromiseError) as error:
        loss_of(body, out, *arguments(), check=check).backward()

    message = str(error.value)
    assert all(word in message for word in words), message


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

    mesh = fs.make_mesh({"d": 2})
    mapped = fs.shard_map(body, mesh=mesh, in_specs=(P("d"), P()), out_specs=P())
    sent = []
    for _ in range(3):
        with fs.ledger() as comm:
            fs.unshard(mapped(*arguments())).sum().backward()
        sent.append(comm.by_collective())

    assert sent[0] == sent[1] == sent[2]
    of_steps = 3 * 2
    of_audit = 2 * 2
    assert len(calls) == of_steps + of_audit


def test_audit_keeps_random_state():
    def body(x, b):
        return fs.psum(torch.nn.functional.dropout(x * fs.pvary(b, "d")), "d")

    def gradient_and_draws(check):
        torch.manual_seed(3)
        x, b = arguments()
        loss_of(body, P(), x, b, check=check).backward()
        return torch.cat([x.grad, torch.rand(2).double()])

    assert torch.equal(gradient_and_draws(True), gradient_and_draws(False))


def test_audit_of_inner_gradient_passes():
    def body(x, b):
        (g,) = torch.autograd.grad((fs.pvary(b, "d") * x).sum(), b, create_graph=True)
        return g * b

    x, b = arguments()
    loss_of(body, P(), x, b).backward()
    assert torch.equal(b.grad, x.detach().view(2, 2).sum(0))


# -- drawn programs --------------------------------------------------------------------------------


class Op(NamedTuple):
    """One operation of a drawn program.

    If it is marked, `pvary` is around an argument that is equal on all devices.
    """

    name: str
    marked: bool


REDUCTIONS = ("psum", "pmean", "gather", "max")
NAMES = ["sin", "add", "multiply", "scatter", *REDUCTIONS]


def run(program, x, v):
    """Run a drawn program on one device; `v` is equal on all in the beginning."""
    is_equal = True
    for op in program:
        if is_equal and op.marked and op.name != "sin":
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
        if op.name != "sin":
            is_equal = op.name in REDUCTIONS
    return v


def types_of(program):
    """Return whether a program is well typed, and whether its result is equal on all devices.

    It is well typed if each operation that needs a device's own value receives one.
    """
    is_equal = True
    is_well_typed = True
    for op in program:
        if op.name != "sin":
            is_well_typed = is_well_typed and (op.marked or not is_equal)
            is_equal = op.name in REDUCTIONS
    return is_well_typed, is_equal


def verdict(program, seed):
    """Return "right" if the gradient is the difference of two values, "raises", or "wrong"."""
    draw = random.Random(seed)
    is_well_typed, is_equal = types_of(program)
    x = torch.tensor([draw.uniform(0.5, 2) for _ in range(4)]).double()
    b = torch.tensor([draw.uniform(0.5, 2) for _ in range(2)]).double()
    out = P() if is_equal else P("d")

    def loss(b, check=None):
        return loss_of(lambda x, v: run(program, x, v), out, x, b, check)

    try:
        gradient = torch.func.grad(loss)(b)
    except PromiseError:
        return "wrong" if is_well_typed else "raises"

    differences = []
    for step in 1e-6 * torch.eye(2).double():
        rise = loss(b + step, False) - loss(b - step, False)
        differences.append(rise / 2e-6)
    is_right = torch.allclose(gradient, torch.stack(differences), rtol=1e-4, atol=1e-6)
    return "right" if is_right else "wrong"


OPS = st.builds(Op, st.sampled_from(NAMES), st.booleans())


@given(st.lists(OPS, min_size=1, max_size=4), st.integers(0, 99))
def test_audited_gradient_is_right_or_raises(program, seed):
    assert verdict(program, seed) != "wrong"


def verdicts(seed, count):
    fs.make_mesh({"d": 2})  # processes meet outside of torch.func
    draw = random.Random(seed)
    results = []
    for number in range(count):
        length = draw.randint(1, 4)
        program = [Op(draw.choice(NAMES), draw.random() < 0.5) for _ in range(length)]
        results.append(verdict(program, number))
    return results


def test_audited_gradient_on_processes_is_right_or_raises(two):
    first, second = two.run(verdicts, 38, 40)

    assert first == second
    assert {*first} == {"right", "raises"}
