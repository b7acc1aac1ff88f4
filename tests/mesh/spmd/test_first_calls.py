"""The first call of each signature of a `shard_map` is checked, on virtual devices and on processes."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.errors import LostProcessError, MismatchError, PromiseError
from fshard.testing.processes import Processes, run_processes
from tests.mesh.spmd.test_gradient_audit import Op, ends_equal, is_well_typed, loss_of, run

X, W = torch.arange(1.0, 13).double().view(6, 2), torch.tensor([0.5, -2.0]).double()


def grad_by_func(loss: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.func.grad(loss)(W)


def grad_by_autograd(loss: Callable[[Tensor], Tensor]) -> Tensor:
    w = W.clone().requires_grad_()
    return torch.autograd.grad(loss(w), w)[0]


def unmarked(w: Tensor, x: Tensor) -> Tensor:
    return fs.pmean((x @ w).square().mean(), "d")


def marked(w: Tensor, x: Tensor) -> Tensor:
    return fs.pmean((x @ fs.pvary(w, "d")).square().mean(), "d")


def sum_of_shard(w: Tensor, x: Tensor) -> Tensor:
    return x.sum()


def mapped(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return fs.shard_map(f, mesh=fs.make_mesh({"d": 2}), in_specs=(P(), P("d")), out_specs=P(), **options)


def raises(call: Callable[..., Any], *args: Any) -> bool:
    try:
        call(*args)
    except PromiseError:
        return True
    return False


def observe() -> dict[str, Any]:
    """Return what first and later calls do, on this mesh."""
    results: dict[str, Any] = {}
    for grad in (grad_by_func, grad_by_autograd):
        f = mapped(unmarked)
        loss = lambda w, f=f: fs.unshard(f(w, X))  # noqa: E731
        with torch.no_grad():
            loss(W)  # a call without gradients audits none
        results[grad.__name__] = [raises(grad, loss), raises(grad, loss)]  # a failed call is no first call
        f = mapped(unmarked, check=False)
        loss = lambda w, f=f: fs.unshard(f(w, X))  # noqa: E731
        results[f"{grad.__name__} unchecked"] = raises(grad, loss)
    unequal = mapped(sum_of_shard)
    results["forgotten psum"] = [raises(unequal, W, X), raises(unequal, W, X)]

    runs: list[int] = []

    def counted(w: Tensor, x: Tensor) -> Tensor:
        runs.append(1)
        return marked(w, x)

    f, on_device = mapped(counted), fs.make_mesh({"d": 2}).runtime == "process"
    for _ in range(3):
        before = len(runs)
        with fs.ledger() as comm:
            error = grad_by_autograd(lambda w: fs.unshard(f(w, X))) - grad_by_autograd(
                lambda w: (X @ w).square().mean()
            )
        results.setdefault("runs", []).append((len(runs) - before) * (1 if on_device else 0.5))
        results.setdefault("collectives", []).append(comm.calls())
        assert error.abs().max() < 1e-12
    return results


EXPECTED = {
    "grad_by_func": [True, True],
    "grad_by_func unchecked": False,
    "grad_by_autograd": [True, True],
    "grad_by_autograd unchecked": False,
    "forgotten psum": [True, True],
    "runs": [3, 1, 1],
}


def differ_later(check: bool | None) -> list[bool]:
    """Return which of four calls raise; a replicated argument differs between devices in the last two."""
    mesh = fs.make_mesh({"d": 2})
    f = fs.shard_map(lambda w: fs.psum(w, "d"), mesh=mesh, in_specs=P(), out_specs=P(), check=check)

    def on_device() -> list[bool]:
        index = fs.axis_index("d")
        return [
            raises(f, torch.full((size,), float(index * unequal))) for unequal, size in ((0, 2), (0, 2), (1, 2), (1, 3))
        ]

    return fs.run(on_device, mesh=mesh)[0]


def test_first_call_checks_and_later_calls_do_not() -> None:
    results = observe()
    calls = results.pop("collectives")
    assert results == EXPECTED and len({*calls}) == 1
    assert differ_later(None) == [False, False, False, True]


def test_first_call_checks_on_processes(two: Processes) -> None:
    for results in two.run(observe):
        calls = results.pop("collectives")
        assert results == EXPECTED and len({*calls}) == 1
    assert two.run(differ_later, None) == [[False, False, False, True]] * 2
    assert two.run(differ_later, True) == [[False, False, True, True]] * 2
    assert two.run(differ_later, False) == [[False] * 4] * 2


def test_environment_variable_checks_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSHARD_CHECK", "1")
    assert differ_later(None) == [False, False, True, True]
    assert differ_later(False) == [False] * 4


def disagree() -> str:
    f, new = mapped(marked, check=None), mapped(marked, check=None)
    f(W, X)
    try:
        (f if fs.mesh.process_index() else new)(W, X)
    except (MismatchError, LostProcessError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_processes_that_disagree_on_first_call_raise() -> None:
    """A check pairs only with a check."""
    texts = run_processes(disagree, 2, timeout=60)
    assert "no error" not in texts and any("MismatchError" in text for text in texts)


NAMES = ["sin", "add", "multiply", "psum", "pmean", "scatter", "gather", "max"]


def gradients_of_random_programs(seed: int, count: int) -> list[str]:
    """Return for each drawn program whether its gradient is right, by differences of values, or raises."""
    draw, results = random.Random(seed), []
    for _ in range(count):
        program = [Op(draw.choice(NAMES), draw.random() < 0.5) for _ in range(draw.randint(1, 4))]
        out = P() if ends_equal(program) else P("d")
        x, b = (torch.tensor([draw.uniform(0.5, 2) for _ in range(n)]).double() for n in (4, 2))

        def loss(
            b: Tensor, check: bool | None = None, x: Tensor = x, out: P = out, program: list[Op] = program
        ) -> Tensor:
            return loss_of(lambda x, v: run(program, x, v), out, x, b, mesh=fs.make_mesh({"d": 2}), check=check)

        try:
            gradient = torch.func.grad(loss)(b)
        except PromiseError:
            assert not is_well_typed(program)
            results.append("raises")
            continue
        steps = 1e-6 * torch.eye(2).double()
        rises = torch.stack([(loss(b + step, False) - loss(b - step, False)) / 2e-6 for step in steps])
        results.append("right" if torch.allclose(gradient, rises, rtol=1e-4, atol=1e-6) else f"wrong: {program}")
    return results


def test_random_programs_on_processes_are_right_or_raise(two: Processes) -> None:
    first, second = two.run(gradients_of_random_programs, 38, 40)
    assert first == second and {*first} == {"right", "raises"}
