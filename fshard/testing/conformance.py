"""The runtime conformance suite: every collective, on every dtype, over every choice of axes, held to its oracle.

`check_runtime(mesh)` is all that the author of a runtime has to call: on a virtual mesh once, on a process mesh in
every process.  A *case* is data.  Its program makes each device's tensors from a seed, so that every device (and the
test around it) knows what all the others hold, calls the collective, and differentiates it; afterwards what came out
is compared with `oracles.ORACLES`, where the group of devices is worked out here, with plain arithmetic.

Values are random normal numbers, and compared bit for bit: the order in which sums are added is promised.  On an
abstract mesh there are no values; shapes, dtypes and the ledger are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, islice, product
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import optree
import torch
from hypothesis import strategies as st
from torch import Tensor

import fshard as fs
from fshard.errors import CollectiveTimeoutError, DeadlockError, MismatchError
from fshard.testing.oracles import ORACLES, Oracle, kind

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
FEW_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
"""One of each kind: what is not about dtypes is tried on these."""

Form = Literal["plain", "strided", "conjugate", "slice", "expanded"]
Road = Literal["call", "start", "func"]
"""How to call and differentiate: directly, by `.start(...).wait()`, or under torch.func."""
Tensors = list[Tensor]


class Operand(NamedTuple):
    """One tensor that goes in: `form` says how it lies in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    form: Form = "plain"

    def __str__(self) -> str:
        lies = "" if self.form == "plain" else f" {self.form}"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{lies}"


@dataclass(frozen=True)
class Case:
    """One thing to try: a collective over some axes, on one tensor or on a tree of several."""

    collective: str
    axes: tuple[str, ...]
    operands: tuple[Operand, ...]
    options: tuple[tuple[str, Any], ...] = ()
    road: Road = "call"
    seed: int = 0

    @property
    def oracle(self) -> Oracle:
        """What it means."""
        return ORACLES[self.collective]

    @property
    def axis(self) -> str | tuple[str, ...]:
        """The axes, as a user would write them."""
        return self.axes[0] if len(self.axes) == 1 else self.axes

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options)
        road = "" if self.road == "call" else f" by {self.road}"
        return f"{self.collective}({' '.join(map(str, self.operands))}, {'+'.join(self.axes)}{options}){road}"


# -- what the devices hold ----------------------------------------------------------------------------------------


def _values(shape: tuple[int, ...], dtype: torch.dtype, *seeds: int) -> Tensor:
    """Return random values: the same for the same seeds, in whatever process."""
    generator = torch.Generator().manual_seed(hash(seeds) % 2**63)
    if kind(dtype) in "bi":
        return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


def _laid_out(x: Tensor, form: Form) -> Tensor:
    """Return the same values, lying in memory otherwise."""
    match form:
        case "strided":
            return x.clone() if x.ndim < 2 else x.transpose(0, -1).contiguous().transpose(0, -1)
        case "conjugate":
            return x.conj().resolve_conj().conj() if x.is_complex() else torch.complex(x, -x).conj().imag
        case "slice":
            return torch.cat([x, x]).narrow(0, x.shape[0], x.shape[0]) if x.ndim else torch.stack([x, x])[1]
        case "expanded" | "plain":
            return x


def operand(case: Case, place: int, device: int) -> Tensor:
    """Return what `device` puts in as its tensor number `place`."""
    dtype, shape, form = case.operands[place]
    if form == "expanded":
        return _values(shape[:-1], dtype, case.seed, place, device).unsqueeze(-1).expand(shape)
    return _laid_out(_values(shape, dtype, case.seed, place, device), form)


def cotangent(case: Case, place: int, device: int, like: Tensor) -> Tensor:
    """Return what `device` is given as the cotangent of its result number `place`."""
    return _values(tuple(like.shape), like.dtype, case.seed, place, device, 1)


def group_of(mesh: fs.Mesh, device: int, axes: tuple[str, ...]) -> list[int]:
    """Return the devices that `device` meets along `axes`, in their order: major to minor, as the axes are named.

    >>> group_of(fs.make_mesh({"a": 2, "b": 3}), 4, ("b", "a"))
    [0, 3, 1, 4, 2, 5]
    """
    sizes = list(mesh.shape.values())
    at = {name: device // prod(sizes[place + 1 :]) % size for place, (name, size) in enumerate(mesh.shape.items())}
    members: list[int] = []
    for places in product(*(range(mesh.shape[name]) for name in axes)):
        number = 0
        for name, coordinate in {**at, **dict(zip(axes, places, strict=True))}.items():
            number = number * mesh.shape[name] + coordinate
        members.append(number)
    return members


# -- the program of one device ------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What one case came to on one device."""

    results: Tensors
    gradients: Tensors
    sent: Fraction
    calls: int
    error: str | None = None


def perform(mesh: fs.Mesh, cases: list[Case]) -> tuple[int, list[Outcome]]:
    """Be one device: run the cases, one after the other; return the own number and what came out."""
    device = 0
    for name, size in mesh.shape.items():
        device = device * size + fs.axis_index(name)
    return device, [_attempt(case, device, mesh.device_type) for case in cases]


def _attempt(case: Case, device: int, device_type: str) -> Outcome:
    try:
        return _perform(case, device, device_type)
    except (DeadlockError, MismatchError, CollectiveTimeoutError) as error:  # after these the devices are out of step
        error.add_note(f"in the case {case}")
        raise
    except Exception as error:
        return Outcome([], [], Fraction(0), 0, f"{type(error).__name__}: {error}")


def _perform(case: Case, device: int, device_type: str) -> Outcome:
    xs = [operand(case, place, device).to(device_type) for place in range(len(case.operands))]
    moving = [x for x in xs if kind(x.dtype) in "fc"]

    def function(*changed: Tensor) -> tuple[Tensors, Tensors]:
        inputs = iter(changed)
        return _call(case, [next(inputs) if kind(x.dtype) in "fc" else x for x in xs])

    def pulled(ys: Tensors) -> Tensors:
        gs = [cotangent(case, place, device, y).to(y.device) for place, y in enumerate(ys)]
        return [g for g in gs if kind(g.dtype) in "fc"]

    if not moving or case.road == "func":
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


def _outcome(ys: Tensors, gradients: Tensors, book: fs.Ledger, device: int) -> Outcome:
    return Outcome([y.detach() for y in ys], [g.detach() for g in gradients], book.bytes(device), book.calls(device))


def _call(case: Case, xs: Tensors) -> tuple[Tensors, Tensors]:
    """Call the collective on one tensor, or on a tree; return the results, and what else has to be differentiated."""
    tree: Any = xs[0] if len(xs) == 1 else {"first": xs[0], "others": tuple(xs[1:])}
    options = dict(case.options)
    if case.collective == "send_recv":
        result, tokens = _send_recv(tree, case.axis, case.road == "start", **options)
    else:
        collective = getattr(fs, case.collective)
        started = collective.start(tree, case.axis, **options).wait if case.road == "start" else None
        result, tokens = started() if started else collective(tree, case.axis, **options), []
    return optree.tree_leaves(result), tokens


def _send_recv(tree: Any, axis: Any, start: bool, *, pairs: tuple[tuple[int, int], ...]) -> tuple[Any, Tensors]:
    """Send along pairs, and receive: zeros where nothing comes, as in ppermute."""
    place = fs.axis_index(axis)
    tokens = [fs.send(tree, axis, to=to) for origin, to in pairs if origin == place]
    origins = [origin for origin, to in pairs if to == place]
    if not origins:
        return optree.tree_map(_nothing, tree), [token for token in tokens if token.requires_grad]
    received = fs.recv.start(tree, axis, origins[0]).wait() if start else fs.recv(tree, axis, origins[0])
    return received, [token for token in tokens if token.requires_grad]


def _nothing(x: Tensor) -> Tensor:
    """Return zeros that autograd takes for a function of x."""
    return torch.where(torch.zeros((), dtype=torch.bool, device=x.device), x, torch.zeros_like(x))


# -- the comparison -----------------------------------------------------------------------------------------------


def check_runtime(mesh: fs.Mesh, cases: Iterable[Case] | None = None, *, exact: bool | None = None) -> int:
    """Hold the runtime of `mesh` to what the collectives mean; return how many cases were tried.

    Raises an AssertionError that lists all cases that fail.  On a process mesh every process calls it, with the same
    cases, and looks at its own results.

    Args:
        mesh: where to run; each axis, and each tuple of axes, is a group to try.
        cases: what to try, by default `all_cases(mesh)`.
        exact: whether sums, too, have to be equal bit for bit.  By default they have to unless the backend adds
            (NCCL); then they are held to rounding.

    >>> check_runtime(fs.make_mesh({"data": 2}), islice(all_cases(fs.make_mesh({"data": 2})), 20))
    20
    """
    exact = (mesh.runtime != "process" or mesh.device_type == "cpu") if exact is None else exact
    remaining, count, complaints = iter(all_cases(mesh) if cases is None else cases), 0, list[str]()
    while some := list(islice(remaining, 64)):
        outcomes = dict(fs.run(perform, mesh, some, mesh=mesh))
        for place, case in enumerate(some):
            complaints += _complaints(mesh, case, {device: found[place] for device, found in outcomes.items()}, exact)
        count += len(some)
    if complaints:
        head = f"{len(complaints)} complaints about {mesh} in {count} cases:"
        raise AssertionError("\n  ".join([head, *complaints]))
    return count


def _complaints(mesh: fs.Mesh, case: Case, outcomes: dict[int, Outcome], exact: bool) -> list[str]:
    """Compare what the devices held here got with the oracle; one line for each device that differs."""
    expected: dict[int, Outcome] = {}
    found: list[str] = []
    for device, outcome in outcomes.items():
        if device not in expected and not outcome.error:
            members = group_of(mesh, device, case.axes)
            expected |= dict(zip(members, expect(case, members, abstract=mesh.runtime == "abstract"), strict=True))
        problem = outcome.error or _difference(case, outcome, expected[device], exact)
        if problem:
            found.append(f"{case}, device {device}: {problem}")
    return found


def expect(case: Case, members: list[int], *, abstract: bool = False) -> list[Outcome]:
    """Return what each device of a group has to get, by the oracle."""
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
        sent = [max(sent)] * n  # one device stands for all
    return [
        Outcome(
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
    """Count the calls that a ledger has to show: one for all tensors of a dtype."""
    each = len({_wire_dtype(case.oracle, operand.dtype) for operand in case.operands})
    match case.collective:
        case "pvary":
            return 0
        case "send_recv":
            return each * sum(origin == place for origin, _ in dict(case.options)["pairs"])
        case _:
            return each


def _difference(case: Case, got: Outcome, want: Outcome, exact: bool) -> str | None:
    """Say how two outcomes differ, in one line."""
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


# -- the cases ----------------------------------------------------------------------------------------------------


def axes_choices(mesh: fs.Mesh) -> list[tuple[str, ...]]:
    """Return every axis, and every choice of several: in the mesh's order, and in the opposite one.

    >>> axes_choices(fs.make_mesh({"a": 2, "b": 3}))
    [('a',), ('b',), ('a', 'b'), ('b', 'a')]
    """
    names = mesh.axis_names
    several = [chosen for count in range(2, len(names) + 1) for chosen in combinations(names, count)]
    return [(name,) for name in names] + [order for chosen in several for order in (chosen, chosen[::-1])]


def all_cases(mesh: fs.Mesh, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[Case]:
    """Return the whole table for a mesh: collective × dtype × axes × options, and then what is special.

    All options are tried on one dtype of each kind and single axes, all dtypes and axes with the first option.
    """
    for place, axes in enumerate(axes_choices(mesh)):
        n = prod(mesh.shape[name] for name in axes)
        for name, oracle in ORACLES.items():
            base = [Case(name, axes, (), tuple(options.items())) for options in oracle.options(n)]
            for dtype in filter(oracle.takes, dtypes):
                for case in base if len(axes) == 1 and dtype in FEW_DTYPES else base[:1]:
                    yield replace(case, operands=(Operand(dtype, (n, 2 * n)),))
            if place in (0, len(mesh.axes)):  # on the first single axis, and the first tuple
                yield from _special_cases(base[0], n)


def _special_cases(base: Case, n: int) -> Iterator[Case]:
    """Return what tends to be forgotten: odd memory, odd shapes, trees, and the other roads to the same result."""
    oracle = base.oracle
    few = [dtype for dtype in FEW_DTYPES if oracle.takes(dtype)]
    for dtype in few:
        for form in ("strided", "conjugate", "slice", "expanded"):
            if form != "conjugate" or dtype not in (torch.int64, torch.bfloat16):
                yield replace(base, operands=(Operand(dtype, (n, 2, n), form),))
        for road in ("start", "func"):
            yield replace(base, operands=(Operand(dtype, (n, n)),), road=road)
        yield replace(base, operands=(Operand(dtype, (n, 0)),))
        yield replace(base, operands=(Operand(dtype, (n, 11, 13)),), seed=1)
    tree = tuple(Operand(dtype, (n, width)) for width in (1, 3) for dtype in few)
    for road in ("call", "start", "func"):
        yield replace(base, operands=tree, road=road)
    if "dim" not in dict(base.options) or base.collective == "all_gather":
        yield replace(base, operands=(Operand(torch.float32, ()),))
        yield replace(base, operands=(Operand(torch.bfloat16, (3,)),))


def large_cases(mesh: fs.Mesh, elements: int = 300_007) -> Iterator[Case]:
    """Return cases of many elements (an odd number), where runtimes may take other ways than for few."""
    n = mesh.size
    for name, oracle in ORACLES.items():
        case = Case(name, mesh.axis_names, (), tuple(oracle.options(n)[0].items()))
        for dtype in filter(oracle.takes, (torch.float32, torch.bfloat16, torch.complex64)):
            yield replace(case, operands=(Operand(dtype, (n, elements // n | 1)),))


@st.composite
def drawn_cases(draw: st.DrawFn, mesh: fs.Mesh, name: str | None = None) -> Case:
    """Draw any case for a mesh: axes, collective (or the one named), options, road, one tensor or a tree of up to five."""
    axes = draw(st.sampled_from(axes_choices(mesh)))
    n = prod(mesh.shape[name] for name in axes)
    name = name or draw(st.sampled_from(sorted(ORACLES)))
    oracle = ORACLES[name]
    options = draw(st.sampled_from(oracle.options(n)))
    dtypes = st.sampled_from([dtype for dtype in DTYPES if oracle.takes(dtype)])
    lengths = st.integers(0, 3).map(lambda length: length * n)
    ndim = draw(st.integers(2 if options.get("dim") is not None else 0, 4))
    loose = st.integers(0, 4)  # a dim that nothing cuts
    sizes = st.tuples(*([lengths if options.get("dim") is not None and ndim < 4 else loose] * ndim))
    if ndim == 4 and options.get("dim") is not None:
        sizes = st.tuples(lengths, lengths, loose, lengths)
    forms = st.sampled_from(["plain", "strided", "slice"])
    operands = draw(st.lists(st.builds(Operand, dtypes, sizes, forms), min_size=1, max_size=5))
    road: Road = draw(st.sampled_from(get_args(Road)))
    return Case(name, axes, tuple(operands), tuple(options.items()), road, draw(st.integers(0, 2**31)))
