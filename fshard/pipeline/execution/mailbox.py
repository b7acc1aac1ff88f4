"""Messages whose contents only the sender knows.

The first message of a kind is preceded by its header: structure, shapes, dtypes and non-tensors. After that both ends
have its form, and only tensors are sent, those of one dtype in one buffer. Headers are in host memory: to read one
synchronizes no device.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.collectives.send_recv import dispatch
from fshard.mesh.layout import PyTree, Structure, unflatten
from fshard.mesh.layout.sharded import flatten_shards
from fshard.mesh.spmd.scope import Group, Pending
from fshard.pipeline.execution.route import Message
from fshard.source import Site

Forms = dict[Any, "MessageForm"]
"""The forms that both ends have, by receiver and kind of message."""


class _Like(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    is_cpu: bool


class MessageForm(NamedTuple):
    """The form of a message: its structure, with the shapes and dtypes of tensors and all other leaves.

    `buffers` are the tensors of each dtype and memory, which are sent together: their indices, and placeholders like them. Of a
    message that is a tuple of one tensor and trees of bools, `flags` are these.
    """

    structure: Structure
    leaves: tuple[Any, ...]
    buffers: Sequence[tuple[Sequence[int], tuple[Tensor, ...]]]
    flags: tuple[Any, ...] | None

    @staticmethod
    def of(structure: Structure, leaves: tuple[Any, ...], device: torch.device) -> MessageForm:
        """Return the form of a message from its header."""
        indices: dict[tuple[torch.dtype, bool], list[int]] = {}
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, _Like):
                indices.setdefault((leaf.dtype, leaf.is_cpu), []).append(at)
        buffers = [(own, tuple([_placeholder(leaves[at], device) for at in own])) for own in indices.values()]
        flags = None
        if [*indices.values()] == [[0]] and all(type(leaf) is bool for leaf in leaves[1:]):
            tree = unflatten(structure, leaves)
            flags = tree[1:] if type(tree) is tuple and isinstance(tree[0], _Like) else None
        return MessageForm(structure, leaves, buffers, flags)

    def one_tensor(self, tree: PyTree) -> Tensor | None:
        """Return the tensor of a message that is a tuple of one and of `flags`, if it has this form."""
        if self.flags is None or type(tree) is not tuple or type(x := tree[0]) is not Tensor or tree[1:] != self.flags:
            return None
        like = self.leaves[0]
        return x if (x.shape, x.dtype, x.is_cpu) == like else None


def _described(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([_Like(x.shape, x.dtype, x.is_cpu) if isinstance(x, Tensor) else x for x in leaves])


def _shown(leaves: Sequence[Any]) -> str:
    shown = [f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, _Like) else repr(x) for x in leaves]
    return f"({', '.join(shown)})"


def _placeholder(like: _Like, device: torch.device) -> Tensor:
    return torch.empty((), dtype=like.dtype, device="cpu" if like.is_cpu else device).expand(like.shape)


def _aligned(x: Tensor) -> Tensor:
    """Return a tensor aligned as in its own memory: kernels round differently at other alignments."""
    return x.clone() if x.data_ptr() % _ALIGNED else x


_ALIGNED = 64
"""Bytes, of which torch's memory begins at a multiple."""


class Mailbox:
    """The messages of one device.

    Args:
        group: the devices.
        site: the source line of the step.
        device: of the tensors.
        receives: the messages from each other device, in order.
        keys: a key per microbatch, which determines the shapes of its messages.
        forms: the forms known to both ends; None: every message has a header.
    """

    def __init__(
        self,
        group: Group,
        site: Site,
        device: torch.device,
        receives: Mapping[int, Sequence[Message]],
        keys: Sequence[Hashable],
        forms: Forms | None,
    ) -> None:
        self._group, self._site, self._device, self._keys, self._forms = group, site, device, keys, forms
        self._expected = {source: deque(messages) for source, messages in receives.items()}
        self._started: dict[int, tuple[MessageForm, list[Pending]]] = {}
        self._arrived: dict[Message, PyTree] = {}
        for source in self._expected:
            self._start(source)

    def send(self, message: Message, to: int, tree: PyTree) -> None:
        """Send a tree to a device, without waiting for it."""
        form = self._form(message, to)
        if form is not None and (x := form.one_tensor(tree)) is not None:
            self._send((x,), to)
            return
        leaves, structure = flatten_shards(tree, none_is_leaf=True)
        described = _described(leaves)
        if form is None:
            form = self._learn(message, to, structure, described)
            header = torch.frombuffer(bytearray(pickle.dumps((structure, described))), dtype=torch.uint8)
            self._send((torch.tensor([len(header)], device="cpu"),), to)
            self._send((header,), to)
        elif (structure, described) != form[:2]:
            raise ValueError(
                f"{message} must be {_shown(form.leaves)}, as for another microbatch of the same shapes; got "
                f"{_shown(described)}. If messages depend on values, as a mask that is None where nothing is padded, give "
                "dynamic=True, or options={'dynamic': True} of a plugin: then each message has a header."
            )
        for indices, _ in form.buffers:
            self._send(tuple([leaves[at] for at in indices]), to)

    def receive(self, message: Message, source: int) -> PyTree:
        """Return a message from a device, and wait for it."""
        while message not in self._arrived:
            first = self._expected[source].popleft()
            started = self._started.pop(source, None)
            if started is None:
                form = self._receive_header(first, source)
                started = form, self._receive_buffers(form, source)
            tree = self._wait(*started)
            self._start(source)
            if first == message:
                return tree
            self._arrived[first] = tree
        return self._arrived.pop(message)

    @staticmethod
    def _wait(form: MessageForm, coming: list[Pending]) -> PyTree:
        leaves = list(form.leaves)
        for (indices, _), pending in zip(form.buffers, coming, strict=True):
            for at, x in zip(indices, pending.wait(), strict=True):
                leaves[at] = _aligned(x)
        return unflatten(form.structure, leaves)

    def _start(self, source: int) -> None:
        """Start receiving the next message, if its form is known, so that it arrives during computation."""
        if not self._expected[source]:
            return
        form = self._form(self._expected[source][0], self._group.index)
        if form is not None:
            self._started[source] = form, self._receive_buffers(form, source)

    # -- forms --------------------------------------------------------------------------------------------------

    def _key(self, message: Message, to: int) -> Hashable:
        of_all = message.microbatch < 0
        return to, message.kind, message.wire, tuple(self._keys) if of_all else self._keys[message.microbatch]

    def _form(self, message: Message, to: int) -> MessageForm | None:
        """Return the form of a message if it is known."""
        return None if self._forms is None else self._forms.get(self._key(message, to))

    def _learn(self, message: Message, to: int, structure: Structure, leaves: tuple[Any, ...]) -> MessageForm:
        form = MessageForm.of(structure, leaves, self._device)
        if self._forms is not None:
            self._forms[self._key(message, to)] = form
        return form

    def _receive_header(self, message: Message, source: int) -> MessageForm:
        (length,) = self._receive((torch.empty(1, dtype=torch.int64, device="cpu"),), source).wait()
        (header,) = self._receive((torch.empty(int(length), dtype=torch.uint8, device="cpu"),), source).wait()
        return self._learn(message, self._group.index, *pickle.loads(header.numpy().tobytes()))

    # -- tensors of one dtype -----------------------------------------------------------------------------------

    @property
    def _world(self) -> Any:
        return self._group.world.current()

    def _send(self, xs: tuple[Tensor, ...], to: int) -> None:
        dispatch(xs, self._group, to, self._site)

    def _receive_buffers(self, form: MessageForm, source: int) -> list[Pending]:
        return [self._receive(likes, source) for _, likes in form.buffers]

    def _receive(self, likes: tuple[Tensor, ...], source: int) -> Pending:
        return self._world.receive(likes, self._group, source, self._site)
