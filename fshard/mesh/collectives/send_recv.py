"""Point-to-point messages for pipelines: `send` and `recv`.

`send` returns immediately; `recv` waits for its message. Messages between two devices arrive in
order, one for each dtype of a tree. A started `recv` receives where its handle is waited for.

Cotangents of a received tensor are sent back to the sender. For that, `send` returns a *token*, a
zero to add to the value that the sender differentiates:

    sender      token = send(x)            backward: receive dx  <-+
                loss + token                                       |
    receiver    y = recv(like)             backward: send dy  -----+

Those of several messages have numbers: see Note [Order of cotangents].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.collectives.api import check_index
from fshard.mesh.collectives.autograd import LinearMap, Tensors
from fshard.mesh.collectives.delivery import world_of
from fshard.mesh.collectives.ledger import active
from fshard.mesh.collectives.moves import Permute, Purpose
from fshard.mesh.collectives.on_trees import (
    CollectiveCall,
    Handle,
    LeafBatch,
    batched,
    collective,
    tensors_of,
)
from fshard.mesh.layout import Axes, PyTree
from fshard.mesh.layout.counting import LedgerRow
from fshard.mesh.spmd.scope import Group, require
from fshard.source import Site, call_site

# Note [Order of cotangents]
# Cotangents are messages, too, and return in one order. Both ends know it without a word: autograd
# always runs the newest node whose cotangents are complete. A node is newer than all that it was
# computed from, so one backward runs the nodes of a device from the newest to the oldest. Messages
# have nodes in the order in which they were sent, and were received:
#
#     sender      Send 1, Send 2, loss + both tokens     backward: receives dx2, dx1
#     receiver    Receive 1, Receive 2, loss             backward: sends    dx2, dx1
#
# It fails if one end calls backward once and the other end for each message, or if a token was
# forgotten. So both ends count the messages of a route, and cotangents have the number of their
# message. It is part of what both ends must agree on, as the shapes are: another number raises.
# NCCL sends no stamps, so there it is compared under FSHARD_CHECK=1 only.


def dispatch(
    xs: Tensors,
    group: Group,
    to: int,
    site: Site,
    purpose: Purpose = "values",
    number: int | None = None,
) -> None:
    """Send tensors of one dtype to the device at index `to`, and record the bytes.

    `number` is that of the message whose cotangents they are.
    """
    ledgers = active()
    if ledgers:
        size = sum([x.nbytes for x in xs])
        sent = Permute(((group.index, to),)).sent(size, group.index, group.size)
        row = LedgerRow("send", group.axes, site._replace(leaves=()))
        for ledger in ledgers:
            ledger.record(group.number, row, sent)
    world_of(group).send(xs, group, to, site, purpose, number)


def _next_number(group: Group, sender: int, receiver: int, site: Site, *, is_send: bool) -> int:
    """Count one more message of a route at one of its ends; return its number."""
    ends = group.number_of(sender), group.number_of(receiver)
    return group.world.current().message_counts[group.members, *ends, is_send].add(site)


class _Message(LinearMap):
    def batched(self) -> LinearMap:
        """Refuse: the other end has agreed on the message as it is."""
        raise LayoutError(
            "fs.send and fs.recv cannot be mapped by vmap (nor by jacrev, jacfwd and hessian, "
            "which do it): the device at the other end expects one message. Map inside the stages, "
            "or use fs.ppermute, which can be mapped."
        )


@dataclass
class Send(_Message):
    """The map from tensors to nothing (a zero), whose transpose receives their cotangents.

    `number` is that of the message, once it is sent; of cotangents that of the message they are of.
    """

    to: int
    group: Group
    site: Site
    likes: Tensors
    purpose: Purpose = "values"
    number: int | None = None

    def run(self, xs: Tensors) -> Tensors:
        dispatch(xs, self.group, self.to, self.site, self.purpose, self.number)
        if self.number is None:
            sender = self.group.index
            self.number = _next_number(self.group, sender, self.to, self.site, is_send=True)
        return (torch.zeros((), dtype=xs[0].dtype, device=xs[0].device),)

    def transposed(self) -> LinearMap:
        return Receive(self.to, self.group, self.site, self.likes, True, "cotangents", self.number)

    def of_tangents(self) -> LinearMap:
        return replace(self, purpose="tangents", number=None)


@dataclass
class Receive(_Message):
    """The map from nothing (a zero, or tensors whose values are ignored) to received tensors.

    `number` is that of the message, as in `Send`.
    """

    source: int
    group: Group
    site: Site
    likes: Tensors
    from_token: bool
    purpose: Purpose = "values"
    number: int | None = None

    def run(self, xs: Tensors) -> Tensors:
        likes = self.likes if self.from_token else xs
        pending = world_of(self.group).receive(
            likes, self.group, self.source, self.site, self.purpose, self.number
        )
        ys = pending.wait()
        if self.number is None:
            receiver = self.group.index
            self.number = _next_number(self.group, self.source, receiver, self.site, is_send=False)
        return ys

    def transposed(self) -> LinearMap:
        send = Send(self.source, self.group, self.site, self.likes, "cotangents", self.number)
        return send if self.from_token else _SendAndZeros(send)

    def of_tangents(self) -> LinearMap:
        return replace(self, purpose="tangents", number=None)


@dataclass(frozen=True)
class _SendAndZeros(_Message):
    """Send cotangents back; the gradient of `like`, whose values do not matter, is zero."""

    send: Send

    def run(self, xs: Tensors) -> Tensors:
        self.send.run(xs)
        return tuple([torch.zeros_like(x) for x in xs])

    def transposed(self) -> LinearMap:
        send = self.send
        return Receive(send.to, send.group, send.site, send.likes, False, "cotangents", send.number)

    def of_tangents(self) -> LinearMap:
        return _SendAndZeros(replace(self.send, purpose="tangents", number=None))


@collective
def send(tree: PyTree, axis: Axes, to: int) -> Any:
    """Send tensors to the device at index `to` along `axis` without waiting; return the token.

    The token is a zero. For gradients, add it to the value that is differentiated on this device.
    Both devices must differentiate the same messages in the same order: call `backward` once for
    all of them on both, or once for each. Anything else raises a `MismatchError`, and so does a
    forgotten token; over NCCL another order raises under FSHARD_CHECK=1 only.

    >>> import torch, fshard as fs
    >>> def hand_on():
    ...     if fs.axis_index("pipe") == 0:
    ...         return fs.send(torch.tensor([1.0, 2.0]), "pipe", to=1)
    ...     return fs.recv(torch.empty(2), "pipe", source=0)
    >>> fs.run(hand_on, mesh=fs.make_mesh({"pipe": 2}))
    [tensor(0.), tensor([1., 2.])]
    """
    group = require("fs.send").called_group(axis, "fs.send")
    check_index("fs.send", "to", to, group)
    leaves, structure = tensors_of("fs.send", tree)
    batches: list[LeafBatch] = []
    for _, xs, site in batched(leaves, [None] * len(leaves), structure, call_site()):
        message = Send(to, group, site, _detached(xs))
        batches.append(LeafBatch(message, xs, (0,)))  # one token, whatever the leaves
    return _SendCall(batches, None)


@collective
def recv(like: PyTree, axis: Axes, source: int) -> Any:
    """Receive the next message of the device at index `source` along `axis`.

    It is a tree with the shapes and dtypes of `like`. If a tensor of `like` requires grad, the
    cotangent is sent back to the sender, which must add the token of its `send` to the value that
    it differentiates. Second derivatives are not defined. `torch.autograd.grad` and
    `fs.value_and_grad` leave out the backward of this message, for which the sender waits, unless
    `like` depends on what they differentiate by: add `0 * x` of that to it, or call `backward`.

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
    group = require("fs.recv").called_group(axis, "fs.recv")
    check_index("fs.recv", "source", source, group)
    leaves, structure = tensors_of("fs.recv", like)
    batches: list[LeafBatch] = []
    for indices, xs, site in batched(leaves, [None] * len(leaves), structure, call_site()):
        message = Receive(source, group, site, _detached(xs), from_token=False)
        batches.append(LeafBatch(message, xs, indices))
    return _ReceiveCall(batches, structure)


def _detached(xs: Tensors) -> Tensors:
    """Return tensors for their shapes and dtypes: with a graph, a message would keep it alive."""
    return tuple([x.detach() for x in xs])


class _SendCall(CollectiveCall):
    """The messages of one tree, one per dtype."""

    def assembled(self, results: list[Tensors]) -> PyTree:
        """Return the sum of the tokens that can be differentiated."""
        total: Tensor | None = None
        for (token,) in results:
            real = token.real if token.is_complex() else token
            if real.dtype.is_floating_point:
                total = real if total is None else total + real
        return torch.zeros(()) if total is None else total


class _ReceiveCall(CollectiveCall):
    def start(self) -> Handle:
        """Receive where the handle is waited for."""
        return Handle(self.run)
