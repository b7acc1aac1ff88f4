"""Flat pieces gathered where the wholes lie: nothing is laid out in one buffer, neither what is sent nor what comes.

Each process tells the others in one table where its pieces lie, and copies theirs straight to where they belong.

    process 0   [own | ...] [own | ...]     "mine lie at 0x7f.., 0x7f.."   --->   process 1   [... | own] [... | own]
                     ^           ^                                                                  |           |
                     └───────────┴──────────────────── one call for all of them ────────────────────┴───────────┘
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fshard.mesh.arithmetic import flat_range
from fshard.mesh.moves import plain
from fshard.mesh.runtimes.direct import ANSWER, Turn
from fshard.mesh.runtimes.link import Wire

MANY = 4096
"""Tensors up to which a table is short enough for one message."""


def fill(turn: Turn, xs: Sequence[Tensor], into: Sequence[Tensor]) -> Wire:
    """(elements,) each -> (elements,) each: everybody gets the whole of each tensor, of which it has a piece."""
    kept = [plain(x).contiguous() for x in xs]  # as long as others read
    table = torch.tensor([x.data_ptr() for x in kept])
    for other in turn.others:
        turn.put(other, table.data_ptr(), table.nbytes)
    own, _ = _spans(into, turn.n, turn.index)
    for x, whole, address in zip(kept, into, own.tolist(), strict=True):
        if x.data_ptr() != address:
            begin, end = flat_range(whole.numel(), turn.n, turn.index)
            whole[begin:end].copy_(x[: end - begin])
    yield turn.needs(*turn.others)
    for other in turn.others:
        theirs = torch.empty_like(table)
        turn.get(other, theirs.data_ptr(), table.nbytes)
        here, sizes = _spans(into, turn.n, other)
        turn.peers[other].read_all(torch.stack([here, sizes], 1), torch.stack([theirs, sizes], 1))
        turn.done(other)
    answers = [(turn.peers[other], turn.key | ANSWER) for other in turn.others]
    yield answers
    turn.answered(answers)
    return table


def _spans(wholes: Sequence[Tensor], n: int, index: int) -> tuple[Tensor, Tensor]:
    """Return where the pieces of process `index` of n belong, and their sizes in bytes."""
    ranges = [flat_range(whole.numel(), n, index) for whole in wholes]
    rows = [
        (whole.data_ptr() + begin * whole.element_size(), (end - begin) * whole.element_size())
        for whole, (begin, end) in zip(wholes, ranges, strict=True)
    ]
    addresses, sizes = torch.tensor(rows).unbind(1)
    return addresses, sizes
