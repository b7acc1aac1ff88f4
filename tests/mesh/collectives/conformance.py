"""The runtime conformance suite: every collective, on every dtype, over every choice of axes, against its oracle.

`check_runtime(mesh)` is called on a virtual mesh once, on a process mesh in every process. The program of a *case* (see
`cases`) makes each device's tensors from a seed, calls the collective, and differentiates it; then the results are
compared with `oracles.ORACLES`, on groups of devices computed here with plain arithmetic.

Values are random normal numbers, compared bit for bit: the order of additions is promised. On an abstract mesh shapes,
dtypes and the ledger are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

import fshard as fs
from fshard.testing.oracles import Oracle, kind
from tests.mesh.collectives.cases import Case, Operand, all_cases, cotangent, operand

Tensors = list[Tensor]


def group_of(mesh: fs.Mesh, device: int, axes: tuple[str, ...]) -> list[int]:
    """Return the devices that `device` meets along `axes`, in their order: major to minor, as the axes are named."""
    names, grid = list(mesh.shape), torch.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    at = (grid == device).nonzero()[0].tolist()
    group = grid[tuple(slice(None) if name in axes else at[dim] for dim, name in enumerate(names))]
    kept = [name for name in names if name in axes]
    return group.permute([kept.index(name) for name in axes]).flatten().tolist()


# -- the program of one device ------------------------------------------------------------------------------------


class CaseOutcome(NamedTuple):
    """The outcome of one case on one device."""

    results: Tensors
    gradients: Tensors
    sent: Fraction
    calls: int


def perform(mesh: fs.Mesh, cases: list[Case]) -> tuple[int, list[CaseOutcome]]:
    """Run the cases as one device; return its number and results."""
    device = fs.axis_index(mesh.axis_names)
    return device, [_perform(case, device, mesh.device_type) for case in cases]


def _perform(case: Case, device: int, device_type: str) -> CaseOutcome:
    xs = [operand(case, place, device).to(device_type) for place in range(len(case.operands))]
    moving = [x for x in xs if kind(x.dtype) in "fc"]

    def function(*changed: Tensor) -> tuple[Tensors, Tensors]:
        inputs = iter(changed)
        return _call(case, [next(inputs) if kind(x.dtype) in "fc" else x for x in xs])

    def pulled(ys: Tensors) -> Tensors:
        gs = [cotangent(case, place, device, y).to(y.device) for place, y in enumerate(ys)]
        return [g for g in gs if kind(g.dtype) in "fc"]

    if not moving or case.mode == "func":
        with fs.ledger() as book:
            ys, _ = function(*moving)
        if not moving:
            return _outcome(ys, [], book, device)
        results, gradients = _by_func(function, moving, pulled)
        return _outcome(results, gradients, book, device)
    for x in moving:
        x.requires_grad_()
    with fs.ledger() as book:
        ys, tokens = function(*moving)
    outputs = [y for y in ys if kind(y.dtype) in "fc"] + tokens
    gs = pulled(ys) + [torch.zeros_like(token) for token in tokens]
    return _outcome(ys, list(torch.autograd.grad(outputs, moving, gs)), book, device)


def _by_func(
    function: Callable[..., tuple[Tensors, Tensors]], xs: Tensors, pulled: Callable[[Tensors], Tensors]
) -> tuple[Tensors, Tensors]:
    """Differentiate under torch.func: return results and gradients."""

    def split(*changed: Tensor) -> tuple[tuple[Tensors, Tensors], Tensors]:
        ys, tokens = function(*changed)
        return ([y for y in ys if kind(y.dtype) in "fc"], tokens), ys

    outputs: Any = torch.func.vjp(split, *xs, has_aux=True)
    (_, tokens), pull, ys = outputs
    return ys, list(pull((pulled(ys), [torch.zeros_like(token) for token in tokens])))


def _outcome(ys: Tensors, gradients: Tensors, book: fs.mesh.Ledger, device: int) -> CaseOutcome:
    results, gradients = ([x.detach() for x in xs] for xs in (ys, gradients))
    return CaseOutcome(results, gradients, book.bytes(device), book.calls(device))


def _call(case: Case, xs: Tensors) -> tuple[Tensors, Tensors]:
    """Call the collective on one tensor, or on a tree; return the results, and other tensors to differentiate."""
    tree: Any = xs[0] if len(xs) == 1 else {"first": xs[0], "others": tuple(xs[1:])}
    options = dict(case.options)
    if case.collective == "send_recv":
        result, tokens = _send_recv(tree, case.axis, case.mode == "start", **options)
    else:
        collective = getattr(fs, case.collective)
        started = collective.start(tree, case.axis, **options).wait if case.mode == "start" else None
        result, tokens = started() if started else collective(tree, case.axis, **options), []
    return optree.tree_leaves(result), tokens


def _send_recv(tree: Any, axis: Any, start: bool, *, perm: tuple[tuple[int, int], ...]) -> tuple[Any, Tensors]:
    """Send along perm, and receive: zeros where no device sends, as in ppermute."""
    place = fs.axis_index(axis)
    tokens = [fs.send(tree, axis, to=to) for origin, to in perm if origin == place]
    origins = [origin for origin, to in perm if to == place]
    if not origins:
        return optree.tree_map(_nothing, tree), [token for token in tokens if token.requires_grad]
    received = fs.recv.start(tree, axis, origins[0]).wait() if start else fs.recv(tree, axis, origins[0])
    return received, [token for token in tokens if token.requires_grad]


def _nothing(x: Tensor) -> Tensor:
    """Return zeros that autograd takes for a function of x."""
    return torch.where(torch.zeros((), dtype=torch.bool, device=x.device), x, torch.zeros_like(x))


# -- the comparison -----------------------------------------------------------------------------------------------


def check_runtime(mesh: fs.Mesh, cases: Iterable[Case] | None = None) -> int:
    """Compare the runtime of `mesh` with the oracles, by default in `all_cases(mesh)`; return the number of cases.

    Raises an AssertionError for the first case that fails. On a process mesh every process calls it, with the same
    cases, and checks its own results. Sums are equal bit for bit, unless the backend adds (NCCL).
    """
    remaining, count = iter(all_cases(mesh) if cases is None else cases), 0
    while some := list(islice(remaining, 64)):
        outcomes = dict(fs.run(perform, mesh, some, mesh=mesh))
        for place, case in enumerate(some):
            _check(mesh, case, {device: found[place] for device, found in outcomes.items()})
        count += len(some)
    return count


def _check(mesh: fs.Mesh, case: Case, outcomes: dict[int, CaseOutcome]) -> None:
    """Compare the results of local devices with the oracle."""
    expected: dict[int, CaseOutcome] = {}
    exact = mesh.runtime != "process" or mesh.device_type == "cpu"
    for device, outcome in outcomes.items():
        if device not in expected:
            members = group_of(mesh, device, case.axes)
            expected |= dict(zip(members, expect(case, members, abstract=mesh.runtime == "abstract"), strict=True))
        problem = _difference(case, outcome, expected[device], exact)
        assert not problem, f"{case}, device {device}: {problem}"


def expect(case: Case, members: list[int], *, abstract: bool = False) -> list[CaseOutcome]:
    """Return the expected outcome of each device of a group, by the oracle."""
    oracle, options, n = case.oracle, dict(case.options), len(members)
    columns: list[Tensors] = []
    gradients: list[Tensors] = []
    for place in range(len(case.operands)):
        xs = [operand(case, place, device) for device in members]
        ys = oracle.forward(xs, **options)
        columns.append(ys)
        if kind(xs[0].dtype) in "fc":
            gs = [cotangent(case, place, device, y) for device, y in zip(members, ys, strict=True)]
            gradients.append(oracle.backward(gs, xs, **options))
    size = sum(_bytes_in(case.oracle, each) for each in case.operands)
    sent = [oracle.sent(size, place, n, **options) for place in range(n)]
    if abstract and case.collective != "send_recv":
        sent = [max(sent)] * n  # one device represents all
    return [
        CaseOutcome(
            [ys[place] for ys in columns],
            [gs[place] for gs in gradients],
            sent[place],
            _calls(case, place),
        )
        for place in range(n)
    ]


def _wire_dtype(oracle: Oracle, dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if oracle.counts and dtype == torch.bool else dtype


def _bytes_in(oracle: Oracle, each: Operand) -> int:
    return prod(each.shape) * _wire_dtype(oracle, each.dtype).itemsize


def _calls(case: Case, place: int) -> int:
    """Count the calls that a ledger must show: one for all tensors of a dtype."""
    each = len({_wire_dtype(case.oracle, operand.dtype) for operand in case.operands})
    match case.collective:
        case "pvary":
            return 0
        case "send_recv":
            return each * sum(origin == place for origin, _ in dict(case.options)["perm"])
        case _:
            return each


def _difference(case: Case, got: CaseOutcome, want: CaseOutcome, exact: bool) -> str | None:
    """Return the difference of two outcomes, in one line."""
    if (got.sent, got.calls) != (want.sent, want.calls):
        return f"the ledger has {got.calls} calls and {got.sent} bytes instead of {want.calls} and {want.sent}"
    forward, backward = (exact or not sums for sums in case.oracle.sums)
    backward = backward and case.collective not in ("pmax", "pmin")  # a cotangent is divided: one way or the other
    for what, ours, theirs, bits in (
        ("result", got.results, want.results, forward),
        ("gradient", got.gradients, want.gradients, backward),
    ):
        if len(ours) != len(theirs):
            return f"{len(ours)} {what}s instead of {len(theirs)}"
        for place, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            problem = _unlike(x, y, bits)
            if problem:
                return f"{what} {place}: {problem}"
    return None


def _unlike(x: Tensor, y: Tensor, bits: bool) -> str | None:
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return f"{x.dtype}{list(x.shape)} instead of {y.dtype}{list(y.shape)}"
    if x.is_meta:
        return None
    x = x.cpu()
    if bits:
        wrong = (_as_bits(x) != _as_bits(y)).flatten()
    else:
        eps = torch.finfo(x.dtype).eps if kind(x.dtype) in "fc" else 0
        wrong = ~torch.isclose(_wide(x), _wide(y), rtol=16 * eps, atol=16 * eps, equal_nan=True).flatten()
    if not wrong.any():
        return None
    first = int(wrong.nonzero()[0])
    at = first * x.numel() // wrong.numel()  # a complex number is two
    ours, theirs = x.reshape(-1)[at].item(), y.reshape(-1)[at].item()
    return f"{int(wrong.sum())} of {wrong.numel()} values differ, first {ours} instead of {theirs}"


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _as_bits(x: Tensor) -> Tensor:
    """Return integers that are equal where values are, to the last bit; any NaN equals any other."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    if not x.is_floating_point():
        return x.to(torch.int64)
    x = torch.where(x.isnan(), torch.full((), torch.nan, dtype=x.dtype), x.resolve_neg())
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])
