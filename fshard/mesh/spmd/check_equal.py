"""Check by value that arrays promised equal are equal.

Types state where values are equal on all devices: a replicated argument and its gradient, the
result of `psum` and its gradient. In a checked call a `Guard` is inserted there: an identity that
compares with the first device's value. Its transpose is a guard too, so one for values does nothing
in the backward, and one for cotangents nothing in the forward:

    Guard(forward=True)     forward: compare values      backward: pass
    Guard(forward=False)    forward: pass                backward: compare cotangents

Errors that values do not show are found by `gradient_audit`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fshard.errors import PromiseError
from fshard.mesh.collectives.autograd import LinearMap, Tensors
from fshard.mesh.collectives.delivery import world_of
from fshard.mesh.collectives.moves import AllGather, Broadcast
from fshard.mesh.layout import as_written
from fshard.mesh.spmd.scope import Group, loss_along
from fshard.source import Site


def gather_all(row: Tensor, group: Group, site: Site) -> Tensor:
    """Gather a row of every device of a group, uncounted. (numbers) -> (devices, numbers)"""
    gather = AllGather(0, replicated=True)
    (table,) = world_of(group).start(gather, (row[None],), group, site).wait()
    return table.cpu()


class FirstOf(Broadcast):
    """The broadcast of a check. Its name never pairs with a broadcast of the program."""

    name = "check"


def _is_equal(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors are equal element by element, where a NaN equals a NaN."""
    if torch.equal(x, y):
        return True
    are_nan = (x != x) & (y != y)
    return bool(((x == y) | are_nan).all())


@dataclass(frozen=True)
class Guard(LinearMap):
    """An identity that compares over a group of devices: values if `forward`, else cotangents.

    `error_text` has "{axes}" for the group's axes. `is_of_loop`: the code of `fs.run` has called
    the collective, whose cotangents may differ in the loss of a loop: see Note [Collectives of
    loops].
    """

    group: Group
    site: Site
    error_text: str
    forward: bool = False
    is_of_loop: bool = False

    def run(self, xs: Tensors) -> Tensors:
        if not self.forward:
            return xs
        if self.is_of_loop and loss_along(self.group) is not None:
            return xs

        plain = tuple([x.detach() for x in xs])
        firsts = world_of(self.group).start(FirstOf(0), plain, self.group, self.site).wait()
        are_equal = [float(_is_equal(x, first)) for x, first in zip(plain, firsts, strict=True)]
        # Every device gathers the verdicts of all, so that all raise the same error.
        device = xs[0].device
        verdicts = gather_all(torch.tensor(are_equal, device=device), self.group, self.site)
        for number, column in enumerate(verdicts.T.bool()):
            if not column.all():
                position = f" (tensor {number} of {len(xs)})" if len(xs) > 1 else ""
                raise PromiseError(self._text_of_error(column, position))
        return xs

    def _text_of_error(self, column: Tensor, position: str) -> str:
        """Return the error for one tensor, of which `column` has the verdict of every device."""
        axes = self.group.axes
        promise = self.error_text.replace("{axes}", as_written(axes))
        equal = column.nonzero().flatten().tolist()
        unequal = (~column).nonzero().flatten().tolist()
        verb = "differs" if len(unequal) == 1 else "differ"
        return (
            f"A promise of equality is broken: {promise}.\n"
            f"  at {self.site}{position}: {_list_indices(unequal)} along {'+'.join(axes)} "
            f"{verb} from {_list_indices(equal)}"
        )

    def transposed(self) -> Guard:
        return replace(self, forward=not self.forward)


def _list_indices(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    if len(indices) == 1:
        return f"index {shown}"
    if len(indices) > 8:
        shown += f" and {len(indices) - 8} more"
    return f"indices {shown}"
