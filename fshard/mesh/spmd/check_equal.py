"""Check by value that arrays promised equal are equal, and reject tensors captured from outside.

Types state where values are equal on all devices: a replicated argument and its gradient, the result of `psum` and its
gradient. In a checked call an identity that compares with the first device's value is inserted there. It is a linear
map whose transpose compares in backward. Errors that values do not show are found by `gradient_audit`.

A mapped function is one operation of its arguments. A tensor that it captures from a closure would be a constant to
autograd and torch.func, so a captured tensor that requires grad raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from fshard.errors import LayoutError, PromiseError
from fshard.mesh.collectives.autograd import LinearMap, Tensors, transformed
from fshard.mesh.collectives.moves import Broadcast
from fshard.mesh.layout import Mesh, as_written
from fshard.mesh.layout.sharded import flatten_shards
from fshard.mesh.spmd.global_inputs import gather_all
from fshard.mesh.spmd.scope import Group
from fshard.source import Site


@dataclass(frozen=True)
class FirstOf(Broadcast):
    """The broadcast of a check, which has a name of its own: it never pairs with a broadcast of the program."""

    source: int = 0
    name = "check"


def _equal(x: Tensor, y: Tensor) -> bool:
    """Equal element by element, where a NaN equals a NaN."""
    return torch.equal(x, y) or bool(((x == y) | ((x != x) & (y != y))).all())


@dataclass(frozen=True)
class Guard(LinearMap):
    """An identity that compares over a group of devices: values if `forward`, else cotangents.

    `broken` is the error text, with "{axes}" for the group's axes.
    """

    group: Group
    site: Site
    broken: str
    forward: bool = False

    def run(self, xs: Tensors) -> Tensors:
        if self.forward:
            plain = tuple(x.detach() for x in xs)
            firsts = self.group.world.current().start(FirstOf(), plain, self.group, self.site).wait()
            equal = [float(_equal(x, first)) for x, first in zip(plain, firsts, strict=True)]
            verdicts = gather_all(torch.tensor(equal, device=xs[0].device), self.group, self.site)
            for index, verdict in enumerate(verdicts.T):
                if not bool(verdict.all()):
                    which = f" (tensor {index} of {len(xs)})" if len(xs) > 1 else ""
                    raise PromiseError(
                        _complaint(self.broken, self.group.axes, f"{self.site}{which}", verdict.tolist())
                    )
        return xs

    def transposed(self) -> Guard:
        return replace(self, forward=not self.forward)


def _complaint(broken: str, axes: tuple[str, ...], where: str, verdict: list[bool]) -> str:
    same = [index for index, equal in enumerate(verdict) if equal]
    other = [index for index, equal in enumerate(verdict) if not equal]
    return (
        f"A promise of equality is broken: {broken.replace('{axes}', as_written(axes))}.\n"
        f"  at {where}: {_places(other)} along {'+'.join(axes)} differ{'s' if len(other) == 1 else ''} "
        f"from {_places(same)}"
    )


def _places(places: list[int]) -> str:
    shown = ", ".join(map(str, places[:8])) + (f" and {len(places) - 8} more" if len(places) > 8 else "")
    return f"index {shown}" if len(places) == 1 else f"indices {shown}"


def refuse_captured(mesh: Mesh, inputs: list[Tensors], outputs: list[Tensors]) -> None:
    """Raise if a result depends on a tensor that requires grad and was not passed in: its gradient would be lost.

    A leaf that the function made out of an argument, as `w.detach().requires_grad_()`, is no such tensor.
    """
    for xs, ys in zip(inputs, outputs, strict=True):
        if not any(y.requires_grad for y in ys):
            continue
        memory = {x.untyped_storage()._cdata for x in xs if x.device.type != "meta"}  # pyright: ignore[reportPrivateUsage]
        for leaf in _leaves_of(ys):
            if not any(leaf is x for x in xs) and leaf.untyped_storage()._cdata not in memory:  # pyright: ignore[reportPrivateUsage]
                raise LayoutError(
                    f"A result of the function depends on a tensor that requires grad (shape {tuple(leaf.shape)}, "
                    f"{leaf.dtype}) and is not one of its arguments, so its gradient on {mesh} would be lost. Pass it as "
                    "an argument with a spec; if it was made inside, detach the result."
                )


def _leaves_of(ys: Tensors) -> Iterator[Tensor]:
    """Yield the leaves that require grad in the graph of some tensors."""
    seen: set[Any] = set()
    nodes = [y.grad_fn for y in ys if y.grad_fn is not None]
    yield from (y for y in ys if y.grad_fn is None and y.requires_grad)
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                yield variable
            nodes += [before for before, _ in node.next_functions if before is not None]


class RefuseTransformed(TorchFunctionMode):
    """Raise where a device makes a tensor of one that a torch.func transform around the run looks at."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given: Any = (args, kwargs or {})
        lost = [x for x in flatten_shards(given)[0] if isinstance(x, Tensor) and is_functorch_wrapped_tensor(x)]
        if lost and not transformed() and any(isinstance(x, Tensor) for x in flatten_shards(found)[0]):
            raise LayoutError(
                f"The function uses a tensor from outside (shape {tuple(lost[0].shape)}, {lost[0].dtype}) that a transform of "
                "torch.func looks at and that is not one of its arguments, so its derivative would be lost. Pass it as an "
                "argument with a spec, or detach it."
            )
        return found
