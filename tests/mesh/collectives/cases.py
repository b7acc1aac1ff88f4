"""The cases of the conformance suite, as data: a collective, its axes and options, and the input
tensors.

A new collective is tested by adding it to `ORACLES` and, if it takes options, to `OPTIONS`, both of
`fshard.testing.oracles`.

Each device's input follows from the case and the device's number, so every device (and the test)
can compute the input of all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor

import fshard as fs
from fshard.testing.oracles import ORACLES, Oracle, kind, options_of

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
FEW_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
"""One of each kind, for options that do not depend on the dtype."""

Form = Literal["plain", "strided", "conjugate", "slice", "expanded"]
CallMode = Literal["call", "start", "func"]
"""How to call and differentiate: directly, by `.start(...).wait()`, or under torch.func."""


class Operand(NamedTuple):
    """One input tensor; `form` is its memory format."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    form: Form = "plain"

    def __str__(self) -> str:
        suffix = "" if self.form == "plain" else f" {self.form}"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{suffix}"


@dataclass(frozen=True)
class Case:
    """One thing to try: a collective over some axes, on one tensor or on a tree of several."""

    collective: str
    axes: tuple[str, ...]
    operands: tuple[Operand, ...]
    options: tuple[tuple[str, Any], ...] = ()
    mode: CallMode = "call"
    seed: int = 0

    @property
    def oracle(self) -> Oracle:
        """The oracle of the collective."""
        return ORACLES[self.collective]

    @property
    def axis(self) -> str | tuple[str, ...]:
        """The axes, as a user would write them."""
        return self.axes[0] if len(self.axes) == 1 else self.axes

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options)
        mode = "" if self.mode == "call" else f" by {self.mode}"
        return f"{self.collective}({' '.join(map(str, self.operands))}, {'+'.join(self.axes)}{options}){mode}"


# -- what the devices hold -------------------------------------------------------------------------


def _values(shape: tuple[int, ...], dtype: torch.dtype, *seeds: int) -> Tensor:
    """Return random values: the same for the same seeds, in whatever process."""
    generator = torch.Generator().manual_seed(hash(seeds) % 2**63)
    if kind(dtype) in "bi":
        return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(
            dtype
        )
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


def _in_format(x: Tensor, form: Form) -> Tensor:
    """Return the same values in another memory format."""
    match form:
        case "strided":
            return x.clone() if x.ndim < 2 else x.transpose(0, -1).contiguous().transpose(0, -1)
        case "conjugate":
            return (
                x.conj().resolve_conj().conj()
                if x.is_complex()
                else torch.complex(x, -x).conj().imag
            )
        case "slice":
            return (
                torch.cat([x, x]).narrow(0, x.shape[0], x.shape[0])
                if x.ndim
                else torch.stack([x, x])[1]
            )
        case "expanded" | "plain":
            return x


def operand(case: Case, number: int, device: int) -> Tensor:
    """Return the input `number` of `device`."""
    dtype, shape, form = case.operands[number]
    if form == "expanded":
        return _values(shape[:-1], dtype, case.seed, number, device).unsqueeze(-1).expand(shape)
    return _in_format(_values(shape, dtype, case.seed, number, device), form)


def cotangent(case: Case, number: int, device: int, like: Tensor) -> Tensor:
    """Return the cotangent of result `number` of `device`."""
    return _values(tuple(like.shape), like.dtype, case.seed, number, device, 1)


# -- the cases -------------------------------------------------------------------------------------


def axes_choices(mesh: fs.Mesh) -> list[tuple[str, ...]]:
    """Return every axis, and every choice of several: in the mesh's order, and in the opposite one."""
    names = mesh.axis_names
    several = [
        chosen for count in range(2, len(names) + 1) for chosen in combinations(names, count)
    ]
    return [(name,) for name in names] + [
        order for chosen in several for order in (chosen, chosen[::-1])
    ]


def all_cases(mesh: fs.Mesh, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[Case]:
    """Return all cases for a mesh: collective × dtype × axes × options, then special ones.

    All options are tried on one dtype of each kind and single axes, all dtypes and axes with the
    first option.
    """
    for number, axes in enumerate(axes_choices(mesh)):
        n = prod(mesh.shape[name] for name in axes)
        for name, oracle in ORACLES.items():
            base = [Case(name, axes, (), tuple(options.items())) for options in options_of(name, n)]
            for dtype in filter(oracle.takes, dtypes):
                for case in base if len(axes) == 1 and dtype in FEW_DTYPES else base[:1]:
                    yield replace(case, operands=(Operand(dtype, (n, 2 * n)),))
            if number in (0, len(mesh.axes)):  # on the first single axis, and the first tuple
                yield from _special_cases(base[0], n)


def _special_cases(base: Case, n: int) -> Iterator[Case]:
    """Return special cases: odd memory formats and shapes, trees, and other calls with the same
    result.
    """
    oracle = base.oracle
    few = [dtype for dtype in FEW_DTYPES if oracle.takes(dtype)]
    for dtype in few:
        for form in ("strided", "conjugate", "slice", "expanded"):
            if form != "conjugate" or dtype not in (torch.int64, torch.bfloat16):
                yield replace(base, operands=(Operand(dtype, (n, 2, n), form),))
        for mode in ("start", "func"):
            yield replace(base, operands=(Operand(dtype, (n, n)),), mode=mode)
        yield replace(base, operands=(Operand(dtype, (n, 0)),))
        yield replace(base, operands=(Operand(dtype, (n, 11, 13)),), seed=1)
    tree = tuple(Operand(dtype, (n, width)) for width in (1, 3) for dtype in few)
    for mode in ("call", "start", "func"):
        yield replace(base, operands=tree, mode=mode)
    if not {"dim", "split_dim"} & dict(base.options).keys() or base.collective == "all_gather":
        yield replace(base, operands=(Operand(torch.float32, ()),))
        yield replace(base, operands=(Operand(torch.bfloat16, (3,)),))


def large_cases(mesh: fs.Mesh, elements: int = 300_007) -> Iterator[Case]:
    """Return cases of many elements (an odd number), for which runtimes may use other algorithms."""
    n = mesh.size
    for name, oracle in ORACLES.items():
        case = Case(name, mesh.axis_names, (), tuple(options_of(name, n)[0].items()))
        for dtype in filter(oracle.takes, (torch.float32, torch.bfloat16, torch.complex64)):
            yield replace(case, operands=(Operand(dtype, (n, elements // n | 1)),))


@st.composite
def drawn_cases(draw: st.DrawFn, mesh: fs.Mesh, name: str | None = None) -> Case:
    """Draw any case for a mesh: axes, collective (by default any), options, mode, a tensor or a
    tree of up to five.
    """
    axes = draw(st.sampled_from(axes_choices(mesh)))
    n = prod(mesh.shape[name] for name in axes)
    name = name or draw(st.sampled_from(sorted(ORACLES)))
    oracle = ORACLES[name]
    options = draw(st.sampled_from(options_of(name, n)))
    dtypes = st.sampled_from([dtype for dtype in DTYPES if oracle.takes(dtype)])
    lengths = st.integers(0, 3).map(lambda length: length * n)
    cut = not {"dim", "split_dim"}.isdisjoint(options)
    ndim = draw(st.integers(2 if cut else 0, 4))
    loose = st.integers(0, 4)  # a dim that nothing cuts
    sizes = st.tuples(*([lengths if cut and ndim < 4 else loose] * ndim))
    if ndim == 4 and cut:
        sizes = st.tuples(lengths, lengths, loose, lengths)
    forms = st.sampled_from(["plain", "strided", "slice"])
    operands = draw(st.lists(st.builds(Operand, dtypes, sizes, forms), min_size=1, max_size=5))
    mode: CallMode = draw(st.sampled_from(get_args(CallMode)))
    return Case(
        name, axes, tuple(operands), tuple(options.items()), mode, draw(st.integers(0, 2**31))
    )
