"""Check by value that arrays promised equal are equal.

Types state where values are equal on all devices: a replicated argument and its gradient, the result of `psum` and its
gradient. In a checked call an identity that compares with the first device's value is inserted there. It is a linear
map whose transpose compares in backward. Errors that values do not show are found by `gradient_audit`.
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
    return world_of(group).start(AllGather(0, True), (row[None],), group, site).wait()[0].cpu()


@dataclass(frozen=True)
class FirstOf(Broadcast):
    """The broadcast of a check, which has a name of its own: it never pairs with a broadcast of the program."""

    source: int = 0
    name = "check"


def _is_equal(x: Tensor, y: Tensor) -> bool:
    """Equal element by element, where a NaN equals a NaN."""
    return torch.equal(x, y) or bool(((x == y) | ((x != x) & (y != y))).all())


@dataclass(frozen=True)
class Guard(LinearMap):
    """An identity that compares over a group of devices: values if `forward`, else cotangents.

    `error_text` has "{axes}" for the group's axes. `is_of_loop`: the code of `fs.run` has called the collective, whose
    cotangents may differ in the loss of a loop: see Note [Collectives of loops].
    """

    group: Group
    site: Site
    error_text: str
    forward: bool = False
    is_of_loop: bool = False

    def run(self, xs: Tensors) -> Tensors:
        is_in_loss = self.is_of_loop and loss_along(self.group) is not None
        if not self.forward or is_in_loss:
            return xs
        plain = tuple(x.detach() for x in xs)
        firsts = world_of(self.group).start(FirstOf(), plain, self.group, self.site).wait()
        are_equal = [float(_is_equal(x, first)) for x, first in zip(plain, firsts, strict=True)]
        verdicts = gather_all(torch.tensor(are_equal, device=xs[0].device), self.group, self.site)
        for number, verdict in enumerate(verdicts.T.bool()):
            if verdict.all():
                continue
            axes, position = (
                self.group.axes,
                f" (tensor {number} of {len(xs)})" if len(xs) > 1 else "",
            )
            equal, unequal = (mask.nonzero().flatten().tolist() for mask in (verdict, ~verdict))
            raise PromiseError(
                f"A promise of equality is broken: {self.error_text.replace('{axes}', as_written(axes))}.\n"
                f"  at {self.site}{position}: {_list_indices(unequal)} along {'+'.join(axes)} "
                f"differ{'s' if len(unequal) == 1 else ''} from {_list_indices(equal)}"
            )
        return xs

    def transposed(self) -> Guard:
        return replace(self, forward=not self.forward)


def _list_indices(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8])) + (
        f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    )
    return f"index {shown}" if len(indices) == 1 else f"indices {shown}"
