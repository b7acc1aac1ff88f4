"""Point-to-point messages for pipelines: `send` and `recv`.

`send` returns immediately; `recv` waits for its message. Messages between two devices arrive in order, and match
receives in the order in which these were called or started. Cotangents of a received tensor are sent back to the
sender. For that, `send` returns a *token*, a zero to add to the value that the sender differentiates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.collectives.api import check_index
from fshard.mesh.collectives.autograd import LinearMap, Tensors, apply
from fshard.mesh.collectives.ledger import LedgerRow, active
from fshard.mesh.collectives.moves import Permute, purpose, serving
from fshard.mesh.collectives.on_trees import Handle, collective, tensors_of
from fshard.mesh.layout import Axes, PyTree, Structure, paths_of, unflatten
from fshard.mesh.spmd.scope import Group, World, require
from fshard.source import Site, call_site


def dispatch(xs: Tensors, group: Group, to: int, site: Site) -> None:
    """Send tensors of one dtype to the device at index `to`, and record the bytes."""
    for ledger in active():
        pair, size = Permute(((group.index, to),)), sum(x.nbytes for x in xs)
        ledger.record(
            group.device,
            LedgerRow("send", group.axes, site._replace(leaves=())),
            pair.sent(size, group.index, group.size),
        )
    group.world.current().send(xs, group, to, site)


class _Message(LinearMap):
    def batched(self) -> LinearMap:
        """Refuse: the other end has agreed on the message as it is."""
        raise LayoutError(
            "fs.send and fs.recv cannot be mapped by vmap (nor by jacrev, jacfwd and hessian, which do it): the device at the "
            "other end expects one message. Map inside the stages, or use fs.ppermute, which can be mapped."
        )


@dataclass(frozen=True)
class Send(_Message):
    """The map from tensors to nothing (a zero), whose transpose receives their cotangents."""

    to: int
    group: Group
    site: Site
    likes: Tensors

    def run(self, xs: Tensors) -> Tensors:
        dispatch(xs, self.group, self.to, self.site)
        return (torch.zeros((), dtype=xs[0].dtype, device=xs[0].device),)

    def transposed(self) -> LinearMap:
        return Receive(self.to, self.group, self.site, self.likes, from_token=True)


@dataclass(frozen=True)
class Receive(_Message):
    """The map from nothing (a zero, or tensors whose values are ignored) to the received tensors."""

    source: int
    group: Group
    site: Site
    likes: Tensors
    from_token: bool

    def run(self, xs: Tensors) -> Tensors:
        if self.from_token:
            _settle(_started(self.group, self.source))
        likes = self.likes if self.from_token else xs
        return self.group.world.current().receive(likes, self.group, self.source, self.site).wait()

    def transposed(self) -> LinearMap:
        send = Send(self.source, self.group, self.site, self.likes)
        return send if self.from_token else _AndZeros(send)


@dataclass(frozen=True)
class _AndZeros(_Message):
    """Send cotangents back, and give those whose values did not matter a gradient of zero."""

    send: Send

    def run(self, xs: Tensors) -> Tensors:
        self.send.run(xs)
        return tuple(torch.zeros_like(x) for x in xs)

    def transposed(self) -> LinearMap:
        return Receive(self.send.to, self.send.group, self.send.site, self.send.likes, from_token=False)


Started = deque[Handle]
"""The receives from another device that were started, in order, and not waited for."""

_all_started: WeakKeyDictionary[World, dict[tuple[int, int], Started]] = WeakKeyDictionary()


def _started(group: Group, source: int) -> Started:
    ways = _all_started.setdefault(group.world.current(), {})
    return ways.setdefault((group.device, group.member(source)), deque())


def _settle(started: Started) -> None:
    """Wait for the started receives, in their order."""
    while started:
        started.popleft().wait()


@dataclass
class _Exchange:
    """One call of send or recv: a message per dtype. A recv runs after those that were `started` before it."""

    leaves: list[Tensor]
    structure: Structure | None
    site: Site
    linear: Callable[[Tensors, Site], LinearMap]
    started: Started | None = None

    def run(self) -> PyTree:
        if self.started is not None:
            _settle(self.started)
        return self._run()

    def _run(self) -> PyTree:
        places: dict[torch.dtype, list[int]] = {}
        paths = () if self.structure is None else paths_of(self.structure)
        for place, leaf in enumerate(self.leaves):
            places.setdefault(leaf.dtype, []).append(place)
        out: list[Any] = [None] * len(self.leaves)
        tokens: list[Tensor] = []
        for chosen in places.values():
            xs = tuple(self.leaves[place] for place in chosen)
            site = self.site._replace(leaves=tuple(paths[place] for place in chosen if paths))
            ys = apply(self.linear(tuple(x.detach() for x in xs), site), xs)
            tokens += ys if self.started is None else []
            for place, y in zip(chosen, ys, strict=False):
                out[place] = y
        if self.started is not None:
            return out[0] if self.structure is None else unflatten(self.structure, out)
        reals = [token.real if token.is_complex() else token for token in tokens]
        differentiable = [token for token in reals if token.dtype.is_floating_point]
        return sum(differentiable[1:], start=differentiable[0]) if differentiable else torch.zeros(())

    def fast_path(self, tree: PyTree) -> None: ...

    def start(self) -> Handle:
        """Return a handle: a send starts now, a recv is queued behind earlier ones."""
        started, graded, meant = self.started, torch.is_grad_enabled(), purpose()
        if started is None:
            token = self.run()
            return Handle(lambda: token)

        def receive() -> PyTree:
            with torch.set_grad_enabled(graded), serving(meant):
                return self._run()

        def in_turn() -> PyTree:
            while any(other is own for other in started):
                started.popleft().wait()
            return own.wait()

        own = Handle(receive)
        started.append(own)
        return Handle(in_turn)


@collective
def send(tree: PyTree, axis: Axes, to: int) -> Any:
    """Send tensors to the device at index `to` along `axis` without waiting; return the token (a zero).

    For gradients, add the token to the value that is differentiated on this device.

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
    return _Exchange(leaves, structure, site, lambda likes, site: Send(to, group, site, likes))


@collective
def recv(like: PyTree, axis: Axes, source: int) -> Any:
    """Receive the next message of the device at index `source` along `axis`: a tree with the shapes and dtypes of
    `like`.

    If a tensor of `like` requires grad, the cotangent is sent back to the sender, which must add the token of its
    `send` to the value that it differentiates. Second derivatives are not defined.

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

    def receiving(likes: Tensors, site: Site) -> Receive:
        return Receive(source, group, site, likes, from_token=False)

    return _Exchange(leaves, structure, site, receiving, _started(group, source))


def _begin(what: str, tree: PyTree, axis: Axes) -> tuple[Group, Site, list[Tensor], Structure | None]:
    group = require(what).called_group(axis, what)
    leaves, structure = tensors_of(what, tree)
    return group, call_site(), leaves, structure
