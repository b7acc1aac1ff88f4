"""Point-to-point messages: `send` and `recv`, for pipelines.

A send does not wait for its receiver; a recv waits for its message.  Messages between two devices arrive in the order
they were sent.  Both can be differentiated: the cotangent of what was received travels back to whoever sent it.  For
that, `send` returns a *token*, a zero that is to be added to what is differentiated on the sending device; without the
token the sender's backward does not know that it has something to wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.calls import Collective, Handle, tensors_of
from fshard.mesh.collectives import check_index
from fshard.mesh.differentiate import LinearMap, Tensors, apply
from fshard.mesh.ledger import Row, active
from fshard.mesh.moves import Permute
from fshard.mesh.scope import Group, require
from fshard.mesh.spec import Axes
from fshard.mesh.tree import PyTree, Structure, unflatten
from fshard.source import Site, call_site


@dataclass(frozen=True)
class Send:
    """The map from tensors to nothing (a zero), whose transpose receives their cotangents."""

    to: int
    group: Group
    site: Site
    likes: Tensors

    def run(self, xs: Tensors) -> Tensors:
        """Send, and return the token."""
        size = sum(x.numel() * x.element_size() for x in xs)
        for ledger in active():
            pair = Permute(((self.group.index, self.to),))
            row = Row("send", self.group.axes, self.site)
            ledger.record(self.group.device, row, pair.sent(size, self.group.index, self.group.size))
        self.group.world.current().send(xs, self.group, self.to, self.site)
        return (torch.zeros((), dtype=xs[0].dtype, device=xs[0].device),)

    def transposed(self) -> LinearMap:
        """Return the map that receives the cotangents."""
        return Receive(self.to, self.group, self.site, self.likes, from_token=True)

    def batched(self) -> LinearMap:
        """Refuse: the other end has agreed on the message as it is."""
        raise _no_vmap()


@dataclass(frozen=True)
class Receive:
    """The map from nothing (a zero, or tensors whose values do not matter) to what arrives."""

    source: int
    group: Group
    site: Site
    likes: Tensors
    from_token: bool

    def run(self, xs: Tensors) -> Tensors:
        """Wait for the message."""
        likes = self.likes if self.from_token else xs
        return self.group.world.current().receive(likes, self.group, self.source, self.site).wait()

    def transposed(self) -> LinearMap:
        """Return the map that sends the cotangents back."""
        send = Send(self.source, self.group, self.site, self.likes)
        return send if self.from_token else _AndZeros(send)

    def batched(self) -> LinearMap:
        """Refuse: the other end has agreed on the message as it is."""
        raise _no_vmap()


@dataclass(frozen=True)
class _AndZeros:
    """Send cotangents back, and give those whose values did not matter a gradient of zero."""

    send: Send

    def run(self, xs: Tensors) -> Tensors:
        self.send.run(xs)
        return tuple(torch.zeros_like(x) for x in xs)

    def transposed(self) -> LinearMap:
        return Receive(self.send.to, self.send.group, self.send.site, self.send.likes, from_token=False)

    def batched(self) -> LinearMap:
        raise _no_vmap()


def _no_vmap() -> LayoutError:
    return LayoutError(
        "fs.send and fs.recv cannot be mapped by vmap (nor by jacrev, jacfwd and hessian, which do it): the device at the "
        "other end expects one message. Map inside the stages, or use fs.ppermute, which can be mapped."
    )


@dataclass
class _Exchange:
    """One call of send or recv: a message for each dtype."""

    leaves: list[Tensor]
    structure: Structure | None
    linear: Callable[[Tensors], LinearMap]
    whole: bool

    def run(self) -> PyTree:
        """Send or receive now."""
        places: dict[torch.dtype, list[int]] = {}
        for place, leaf in enumerate(self.leaves):
            places.setdefault(leaf.dtype, []).append(place)
        out: list[Any] = [None] * len(self.leaves)
        tokens: list[Tensor] = []
        for chosen in places.values():
            xs = tuple(self.leaves[place] for place in chosen)
            ys = apply(self.linear(tuple(x.detach() for x in xs)), xs)
            tokens += ys if not self.whole else []
            for place, y in zip(chosen, ys, strict=False):
                out[place] = y
        if self.whole:
            return out[0] if self.structure is None else unflatten(self.structure, out)
        reals = [token.real if token.is_complex() else token for token in tokens]
        differentiable = [token for token in reals if token.dtype.is_floating_point]
        return sum(differentiable[1:], start=differentiable[0]) if differentiable else torch.zeros(())

    def road(self, tree: PyTree) -> None:
        """Return None: a message has no shorter way."""

    def start(self) -> Handle:
        """Return a handle; sending is under way at once, receiving is waited for."""
        if self.whole:
            return Handle(self.run)
        token = self.run()
        return Handle(lambda: token)


@Collective
def send(tree: PyTree, axis: Axes, to: int) -> Any:
    """Send tensors to the device at place `to` along `axis`, without waiting for it; return the token (a zero).

    Add the token to what is differentiated here, if gradients are to come back.

    >>> import torch, fshard as fs
    >>> def hand_on():
    ...     if fs.axis_index("pipe") == 0:
    ...         return fs.send(torch.tensor([1.0, 2.0]), "pipe", to=1)
    ...     return fs.recv(torch.empty(2), "pipe", source=0)
    >>> fs.run(hand_on, mesh=fs.make_mesh({"pipe": 2}))
    [tensor(0.), tensor([1., 2.])]
    """
    group, site, leaves, structure = _begin("fs.send", tree, axis)
    check_index("fs.send", "`to`", to, group)
    return _Exchange(leaves, structure, lambda likes: Send(to, group, site, likes), whole=False)


@Collective
def recv(like: PyTree, axis: Axes, source: int) -> Any:
    """Receive what the device at place `source` along `axis` sends next: tensors of the shapes and dtypes of `like`.

    If a tensor of `like` requires grad, the cotangent of what is received travels back to the sender; the sender then adds
    the token of its `send` to what it differentiates.  (Gradients of such gradients are not defined.)

    >>> import torch, fshard as fs
    >>> def double():
    ...     x = torch.ones(2, requires_grad=True)
    ...     if fs.axis_index("pipe") == 0:
    ...         return torch.autograd.grad(fs.send(x, "pipe", to=1), x)[0]
    ...     y = fs.recv(x, "pipe", source=0)
    ...     return torch.autograd.grad((2 * y).sum(), x)[0]
    >>> fs.run(double, mesh=fs.make_mesh({"pipe": 2}))
    [tensor([2., 2.]), tensor([0., 0.])]
    """
    group, site, leaves, structure = _begin("fs.recv", like, axis)
    check_index("fs.recv", "`source`", source, group)
    return _Exchange(leaves, structure, lambda likes: Receive(source, group, site, likes, from_token=False), whole=True)


def _begin(what: str, tree: PyTree, axis: Axes) -> tuple[Group, Site, list[Tensor], Structure | None]:
    group = require(what).group(axis, what)
    leaves, structure = tensors_of(what, tree)
    return group, call_site(), leaves, structure
