"""A hypothesis strategy for any case of the conformance suite; the suite itself needs no hypothesis."""

from __future__ import annotations

from math import prod
from typing import get_args

from hypothesis import strategies as st

import fshard as fs
from fshard.testing.oracles import ORACLES
from tests.mesh.collectives.cases import DTYPES, CallMode, Case, Operand, axes_choices, options_of


@st.composite
def drawn_cases(draw: st.DrawFn, mesh: fs.Mesh, name: str | None = None) -> Case:
    """Draw any case for a mesh: axes, collective (or the one named), options, road, one tensor or a tree of up to five."""
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
    return Case(name, axes, tuple(operands), tuple(options.items()), mode, draw(st.integers(0, 2**31)))
