"""The runtime conformance suite: every collective, on every dtype, over every choice of axes,
against its oracle.

`check_runtime(mesh)` is called on a virtual mesh once, on a process mesh in every process. The
program of a *case* (see `cases`) makes each device's tensors from a seed, calls the collective, and
differentiates it; then the results are compared with `oracles.ORACLES`, on groups of devices
computed here with plain arithmetic.

Values are random normal numbers, compared bit for bit: the order of additions is promised. On an
abstract mesh shapes, dtypes and the ledger are compared.
"""

from fractions import Fraction
from itertools import islice
from math import prod
from typing import NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor

import fshard as fs
from fshard.testing.oracles import kind
from tests.mesh.collectives.cases import Case, all_cases, cotangent, operand


def group_of(mesh, device, axes):
    """Return the devices that `device` meets along `axes`, in their order: major to minor, as the
    axes are named.
    """
    names = list(mesh.shape)
    grid = torch.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    coordinates = (grid == device).nonzero()[0].tolist()
    group = grid[
        tuple(slice(None) if name in axes else coordinates[dim] for dim, name in enumerate(names))
    ]
    group_names = [name for name in names if name in axes]
    return group.permute([group_names.index(name) for name in axes]).flatten().tolist()


def is_differentiable(x):
    return kind(x.dtype) in "fc"


class CaseOutcome(NamedTuple):
    """The outcome of one case on one device."""

    results: list[Tensor]
    gradients: list[Tensor]
    sent: Fraction
    calls: int


# -- the program of one device ---------------------------------------------------------------------


def perform(mesh, cases):
    """Run the cases as one device; return its number and results."""
    device = fs.axis_index(mesh.axis_names)
    return device, [_perform(case, device, mesh.device_type) for case in cases]


def _perform(case, device, device_type):
    xs = [operand(case, number, device).to(device_type) for number in range(len(case.operands))]
    leaves = [x for x in xs if is_differentiable(x)]

    def function(*leaves):
        """Return what to differentiate, and all results."""
        inputs = iter(leaves)
        ys, tokens = _call(case, [next(inputs) if is_differentiable(x) else x for x in xs])
        return [y for y in ys if is_differentiable(y)] + tokens, ys

    def cotangents(outputs, ys):
        gs = [cotangent(case, number, device, y).to(y.device) for number, y in enumerate(ys)]
        gs = [g for g in gs if is_differentiable(g)]
        return gs + [torch.zeros_like(token) for token in outputs[len(gs) :]]

    is_recorded = case.mode != "func"
    for x in leaves:
        x.requires_grad_(is_recorded)
    with fs.ledger() as comm:
        outputs, ys = function(*leaves)
    gradients = []
    if leaves and is_recorded:
        gradients = torch.autograd.grad(outputs, leaves, cotangents(outputs, ys))
    elif leaves:
        outputs, pull, ys = torch.func.vjp(function, *leaves, has_aux=True)
        gradients = pull(cotangents(outputs, ys))
    gradients = [g.detach() for g in gradients]
    return CaseOutcome([y.detach() for y in ys], gradients, comm.bytes(device), comm.calls(device))


def _call(case, xs):
    """Call the collective on one tensor, or on a tree; return the results, and other tensors to
    differentiate.
    """
    tree = xs[0] if len(xs) == 1 else {"first": xs[0], "others": tuple(xs[1:])}
    options = dict(case.options)
    is_started = case.mode == "start"
    if case.collective == "send_recv":
        return _send_recv(tree, case.axis, is_started, **options)
    collective = getattr(fs, case.collective)
    start = collective.start(tree, case.axis, **options).wait if is_started else None
    return optree.tree_leaves(start() if start else collective(tree, case.axis, **options)), []


def _send_recv(tree, axis, is_started, *, perm):
    """Send along perm, and receive: zeros where no device sends, as in ppermute."""
    index = fs.axis_index(axis)
    tokens = [fs.send(tree, axis, to=to) for origin, to in perm if origin == index]
    tokens = [token for token in tokens if token.requires_grad]
    origins = [origin for origin, to in perm if to == index]
    if not origins:  # zeros that autograd takes for a function of x
        no = torch.zeros((), dtype=torch.bool)
        return [
            torch.where(no.to(x.device), x, torch.zeros_like(x)) for x in optree.tree_leaves(tree)
        ], tokens
    received = (
        fs.recv.start(tree, axis, origins[0]).wait()
        if is_started
        else fs.recv(tree, axis, origins[0])
    )
    return optree.tree_leaves(received), tokens


# -- the comparison --------------------------------------------------------------------------------


def check_runtime(mesh, cases=None):
    """Compare the runtime of `mesh` with the oracles, by default in `all_cases(mesh)`; return the
    number of cases.

    Raises an AssertionError for the first case that fails. On a process mesh every process calls
    it, with the same cases, and checks its own results. Sums are equal bit for bit, unless the
    backend adds: all but gloo do.
    """
    remaining = iter(all_cases(mesh) if cases is None else cases)
    count = 0
    while some := list(islice(remaining, 64)):
        outcomes = dict(fs.run(perform, mesh, some, mesh=mesh))
        for number, case in enumerate(some):
            _check(mesh, case, {device: of_cases[number] for device, of_cases in outcomes.items()})
        count += len(some)
    return count


def _check(mesh, case, outcomes):
    """Compare the results of local devices with the oracle."""
    expected = {}
    adds_here = mesh.runtime != "process" or dist.get_backend() == "gloo"
    exact, exact_backward = (adds_here or not has_sums for has_sums in case.oracle.sums)
    exact_backward = exact_backward and case.collective not in (
        "pmax",
        "pmin",
    )  # a cotangent is divided
    for device, outcome in outcomes.items():
        if device not in expected:
            members = group_of(mesh, device, case.axes)
            expected |= dict(
                zip(members, expect(case, members, mesh.runtime == "abstract"), strict=True)
            )
        want = expected[device]
        assert outcome[2:] == want[2:], f"{case}, device {device}: bytes and calls"
        for xs, ys, bits in (outcome[0], want[0], exact), (outcome[1], want[1], exact_backward):
            assert len(xs) == len(ys), f"{case}, device {device}"
            for number, (x, y) in enumerate(zip(xs, ys, strict=True)):
                assert _is_same(x, y, bits), (
                    f"{case}, device {device}, tensor {number}: {x} instead of {y}"
                )


def expect(case: Case, members, is_abstract):
    """Return the expected outcome of each device of a group, by the oracle."""
    oracle = case.oracle
    options = dict(case.options)
    n = len(members)
    results, gradients = [], []
    for number in range(len(case.operands)):
        xs = [operand(case, number, device) for device in members]
        results.append(oracle.forward(xs, **options))
        if is_differentiable(xs[0]):
            gs = [
                cotangent(case, number, device, y)
                for device, y in zip(members, results[-1], strict=True)
            ]
            gradients.append(oracle.backward(gs, xs, **options))
    dtypes = [
        torch.int64 if oracle.counts and x.dtype == torch.bool else x.dtype for x in case.operands
    ]
    size = sum(
        prod(x.shape) * dtype.itemsize for x, dtype in zip(case.operands, dtypes, strict=True)
    )
    sent = [oracle.sent(size, index, n, **options) for index in range(n)]
    calls = [len({*dtypes})] * n  # one for all tensors of a dtype
    if case.collective == "send_recv":
        calls = [
            calls[0] * sum(origin == index for origin, _ in options["perm"]) for index in range(n)
        ]
    elif is_abstract:
        sent = [max(sent)] * n  # one device represents all
    if case.collective == "pvary":
        calls = [0] * n
    return [
        CaseOutcome(
            [ys[index] for ys in results],
            [gs[index] for gs in gradients],
            sent[index],
            calls[index],
        )
        for index in range(n)
    ]


def _is_same(x, y, bits):
    """Return True if two tensors are equal to the last bit, or within roundings; any NaN equals any
    other.
    """
    if (x.shape, x.dtype) != (y.shape, y.dtype) or x.is_meta:
        return (x.shape, x.dtype) == (y.shape, y.dtype)
    if bits or not is_differentiable(x):
        return torch.equal(_as_bits(x.cpu()), _as_bits(y))
    eps = torch.finfo(x.dtype).eps
    wide = torch.complex128 if x.is_complex() else torch.float64
    return torch.allclose(
        x.cpu().to(wide), y.to(wide), rtol=16 * eps, atol=16 * eps, equal_nan=True
    )


def _as_bits(x):
    """Return integers that are equal where values are, to the last bit."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    if not x.is_floating_point():
        return x.to(torch.int64)
    x = torch.where(x.isnan(), torch.full((), torch.nan, dtype=x.dtype), x.resolve_neg())
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])
