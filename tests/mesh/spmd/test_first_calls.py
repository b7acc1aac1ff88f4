"""The first call of each signature of a `shard_map` is checked, on virtual devices and on
processes.
"""

import torch

import fshard as fs
from fshard import P
from fshard.errors import LostProcessError, MismatchError, PromiseError
from tests.helpers.processes import not_under_rules, run_processes

X = torch.arange(1.0, 13).double().view(6, 2)
W = torch.tensor([0.5, -2.0]).double()


def grad_by_autograd(loss):
    w = W.clone().requires_grad_()
    return torch.autograd.grad(loss(w), w)[0]


GRADS = {"func": lambda loss: torch.func.grad(loss)(W), "autograd": grad_by_autograd}


def unmarked(w, x):
    return fs.pmean((x @ w).square().mean(), "d")


def marked(w, x):
    return fs.pmean((x @ fs.pvary(w, "d")).square().mean(), "d")


def mapped(f, **options):
    f = fs.shard_map(
        f, mesh=fs.make_mesh({"d": 2}), in_specs=(P(), P("d")), out_specs=P(), **options
    )
    return lambda w: fs.unshard(f(w, X))


def raises(call, *args):
    try:
        call(*args)
    except PromiseError:
        return True
    return False


def observe():
    """Return what first and later calls do, on this mesh."""
    results = {}
    for name, grad in GRADS.items():
        loss = mapped(unmarked)
        with torch.no_grad():
            loss(W)  # a call without gradients audits none
        results[name] = [raises(grad, loss), raises(grad, loss)]  # a failed call is no first call
        results[f"{name} unchecked"] = raises(grad, mapped(unmarked, check=False))
    unequal = mapped(lambda w, x: x.sum())
    results["no psum"] = [raises(unequal, W), raises(unequal, W)]

    runs = []

    def counted(w, x):
        runs.append(1)
        return marked(w, x)

    f = mapped(counted)
    each = 1 if fs.make_mesh({"d": 2}).runtime == "process" else 0.5
    collectives = set()
    expected = grad_by_autograd(lambda w: (X @ w).square().mean())
    results["runs"] = []
    for _ in range(3):
        before = len(runs)
        with fs.ledger() as comm:
            torch.testing.assert_close(grad_by_autograd(f), expected, rtol=1e-12, atol=1e-12)
        results["runs"].append((len(runs) - before) * each)
        collectives.add(comm.calls())
    assert len(collectives) == 1
    return results


EXPECTED = {
    "func": [True, True],
    "func unchecked": False,
    "autograd": [True, True],
    "autograd unchecked": False,
    "no psum": [True, True],
    "runs": [3, 1, 1],
}


def differ_later(check):
    """Return which of four calls raise; a replicated argument differs between devices in the last
    two.
    """
    mesh = fs.make_mesh({"d": 2})
    f = fs.shard_map(lambda w: fs.psum(w, "d"), mesh=mesh, in_specs=P(), out_specs=P(), check=check)

    def on_device():
        index = fs.axis_index("d")
        calls = ((0, 2), (0, 2), (1, 2), (1, 3))
        return [raises(f, torch.full((size,), float(index * unequal))) for unequal, size in calls]

    return fs.run(on_device, mesh=mesh)[0]


def test_first_call_checks_and_later_calls_do_not(two):
    assert [observe(), *two.run(observe)] == [EXPECTED] * 3
    for check, third, fourth in ((None, False, True), (True, True, True), (False, False, False)):
        expected = [False, False, third, fourth]
        assert [differ_later(check), *two.run(differ_later, check)] == [expected] * 3


def find_checked_of_growing_sizes():
    """Return the numbers of the calls that are checked, where each has another size, by an unequal result."""
    mesh = fs.make_mesh({"d": 2})

    def is_checked(number):
        f = fs.shard_map(lambda x: x, mesh=mesh, in_specs=P("d"), out_specs=P())
        for size in range(1, number):
            f(torch.ones(2 * size))
        return raises(f, torch.arange(2.0 * number))

    return [number for number in range(1, 10) if is_checked(number)]


def test_calls_of_growing_sizes_are_checked_at_powers_of_two(two):
    expected = [1, 2, 4, 8]
    assert [find_checked_of_growing_sizes(), *two.run(find_checked_of_growing_sizes)] == [
        expected
    ] * 3


def test_environment_variable_checks_every_call(monkeypatch):
    monkeypatch.setenv("FSHARD_CHECK", "1")
    assert differ_later(None) == [False, False, True, True]
    assert differ_later(False) == [False] * 4


def disagree():
    f = mapped(marked, check=None)
    new = mapped(marked, check=None)
    f(W)
    try:
        (f if fs.mesh.process_index() else new)(W)
    except (MismatchError, LostProcessError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@not_under_rules("NCCL compares no calls")
def test_processes_that_disagree_on_first_call_raise():
    """A check pairs only with a check."""
    texts = run_processes(disagree, 2, timeout=60)
    assert "no error" not in texts and any("MismatchError" in text for text in texts)
