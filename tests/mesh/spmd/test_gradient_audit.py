"""`check=True` on a virtual mesh: a gradient is right, or an error says what is wrong with the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.errors import PromiseError

Body = Callable[..., Any]
TWO = fs.make_mesh({"d": 2})
ARGUMENT, TYPES = "Write b = fs.pvary", "its types do not fit"

WRONG: dict[str, tuple[Body, P, str]] = {
    "a bias is added": (lambda x, b: x + b, P("d"), ARGUMENT),
    "psum of what is equal": (lambda x, b: fs.psum(x, "d") + fs.psum(b, "d"), P(), TYPES),
    "pmean of what is equal": (lambda x, b: fs.psum(x, "d") + fs.pmean(b, "d"), P(), TYPES),
    "pmax of what is equal": (lambda x, b: fs.psum(x, "d") + fs.pmax(b, "d"), P(), TYPES),
    "psum_scatter of what is equal": (lambda x, b: x.sum() + fs.psum_scatter(b, "d"), P("d"), TYPES),
    "all_to_all of what is equal": (lambda x, b: x + fs.all_to_all(b, "d"), P("d"), ARGUMENT),
    "all_gather of what is equal": (
        lambda x, b: fs.psum(x, "d").sum() + fs.all_gather(b, "d", to="replicated"),
        P(),
        "b",
    ),
    "a bias before a psum": (lambda x, b: fs.psum(x * x + b, "d"), P(), TYPES),
    "a sum started for later": (lambda x, b: fs.psum(x, "d") + fs.psum.start(b, "d").wait(), P(), TYPES),
}


def loss_of(body: Body, out: P, x: Tensor, b: Tensor, mesh: fs.Mesh = TWO, check: bool | None = None) -> Tensor:
    """Return a sum, whose cotangents are equal everywhere."""
    return fs.unshard(fs.shard_map(body, mesh=mesh, in_specs=(P("d"), P()), out_specs=out, check=check)(x, b)).sum()


def given_tensors() -> tuple[Tensor, Tensor]:
    return torch.arange(1.0, 5).double().requires_grad_(), torch.tensor([2.0, 3.0]).double().requires_grad_()


@pytest.mark.parametrize("what", WRONG)
def test_audit_wrong_types_raise_with_fix(what: str) -> None:
    body, out, words = WRONG[what]
    with pytest.raises(PromiseError, match=words):
        loss_of(body, out, *given_tensors()).backward()


@pytest.mark.parametrize("what", WRONG)
def test_audit_without_check_does_not_run(what: str) -> None:
    body, out, _ = WRONG[what]
    mapped = fs.shard_map(body, mesh=TWO, in_specs=(P("d"), P()), out_specs=out, check=False)
    fs.unshard(mapped(*given_tensors())).sum().backward()


def test_audit_runs_once_and_counts_no_bytes() -> None:
    calls: list[int] = []

    def body(x: Tensor, b: Tensor) -> Tensor:
        calls.append(1)
        return fs.psum(x * fs.pvary(b, "d"), "d")

    mapped = fs.shard_map(body, mesh=TWO, in_specs=(P("d"), P()), out_specs=P())
    sent: list[Any] = []
    for _ in range(3):
        with fs.ledger() as comm:
            fs.unshard(mapped(*given_tensors())).sum().backward()
        sent.append(comm.by_collective())
    assert sent[0] == sent[1] == sent[2]
    assert len(calls) == 3 * 2 + 2 * 2


def test_audit_keeps_random_state() -> None:
    def body(x: Tensor, b: Tensor) -> Tensor:
        return fs.psum(torch.nn.functional.dropout(x * fs.pvary(b, "d")), "d")

    after: list[Tensor] = []
    for check in (True, False):
        torch.manual_seed(3)
        mapped = fs.shard_map(body, mesh=TWO, in_specs=(P("d"), P()), out_specs=P(), check=check)
        x, b = given_tensors()
        fs.unshard(mapped(x, b)).sum().backward()
        assert x.grad is not None
        after += [x.grad, torch.rand(2).double()]
    assert torch.equal(after[0], after[2]) and torch.equal(after[1], after[3])


def test_audit_of_inner_gradient_passes() -> None:
    def body(x: Tensor, b: Tensor) -> Tensor:
        (g,) = torch.autograd.grad((fs.pvary(b, "d") * x).sum(), b, create_graph=True)
        return g * b

    x, b = given_tensors()
    loss_of(body, P(), x, b).backward()
    assert torch.equal(b.grad, x.detach().view(2, 2).sum(0))  # type: ignore[arg-type]


class Op(NamedTuple):
    """One operation of a drawn program; `marked`: with `pvary` where its argument is equal on all devices."""

    name: str
    marked: bool


@st.composite
def programs(draw: st.DrawFn) -> list[Op]:
    names = st.sampled_from(["sin", "add", "multiply", "psum", "pmean", "scatter", "gather", "max"])
    return draw(st.lists(st.builds(Op, names, st.booleans()), min_size=1, max_size=4))


def run(program: list[Op], x: Tensor, v: Tensor) -> Tensor:
    """Run a drawn program on one device; `v` begins equal on all."""
    equal = True
    for op in program:
        if equal and op.marked and op.name != "sin":
            v = fs.pvary(v, "d")
        match op.name:
            case "sin":
                v = v.sin()
            case "add":
                v, equal = v + x, False
            case "multiply":
                v, equal = v * x, False
            case "psum":
                v, equal = fs.psum(v, "d"), True
            case "pmean":
                v, equal = fs.pmean(v, "d"), True
            case "scatter":
                v, equal = fs.psum_scatter(v, "d").expand(2), False
            case "gather":
                v, equal = fs.all_gather(v, "d", to="replicated").view(2, 2).cos().sum(0), True
            case _:
                v, equal = fs.pmax(v, "d"), True
    return v


def ends_equal(program: list[Op]) -> bool:
    kinds = [op.name in ("psum", "pmean", "gather", "max") for op in program if op.name != "sin"]
    return kinds[-1] if kinds else True


def is_well_typed(program: list[Op]) -> bool:
    """Return whether each operation that wants a device's own value is given one."""
    equal = True
    for op in program:
        if op.name != "sin":
            if equal and not op.marked:
                return False
            equal = op.name in ("psum", "pmean", "gather", "max")
    return True


@given(programs(), st.randoms(use_true_random=False))
def test_audited_gradient_is_right_or_raises(program: list[Op], random: Any) -> None:
    """The oracle is the difference of two values."""
    out = P() if ends_equal(program) else P("d")
    x, b = (torch.tensor([random.uniform(0.5, 2) for _ in range(n)], dtype=torch.float64) for n in (4, 2))

    def loss(b: Tensor) -> Tensor:
        return loss_of(lambda x, v: run(program, x, v), out, x, b)

    try:
        (found,) = torch.autograd.grad(loss(b.requires_grad_()), b)
    except PromiseError:
        assert not is_well_typed(program)
        return
    step = 1e-6
    for place in range(2):
        there = torch.zeros(2).double()
        there[place] = step
        with torch.no_grad():
            rise = (loss(b + there) - loss(b - there)) / (2 * step)
        assert torch.isclose(found[place], rise, rtol=1e-4, atol=1e-6)
