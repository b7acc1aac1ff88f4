"""Messages whose form only the sender knows.

A message is a tuple: a list of leaves, and what describes them, such as their structure. The first
message of a kind is preceded by its header: the description, shapes and dtypes of tensors, and all
other leaves. After that both ends have its form, and only tensors are sent, those of one dtype in
one buffer:

    0F0   the length of the header ── the header ── float32 tensors ── int64 tensors
    0F1                                             float32 tensors ── int64 tensors

Headers are in host memory: to read one synchronizes no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.collectives.autograd import Bound
from fshard.mesh.collectives.delivery import world_of
from fshard.mesh.collectives.moves import Broadcast
from fshard.mesh.collectives.send_recv import dispatch
from fshard.mesh.plain_bytes import from_bytes, to_bytes
from fshard.mesh.spmd.scope import Group, Pending
from fshard.pipeline.execution.route import Message
from fshard.source import Site

Content = tuple[Any, ...]
"""A list of leaves, and what describes them: contents of one form have equal descriptions."""
Forms = dict[Any, "MessageForm"]
"""The forms that both ends have, by receiver and kind of message."""

_ALIGNMENT = 64
"""Bytes, of which the address of memory that torch allocates is a multiple."""


class _TensorLike(NamedTuple):
    """A tensor in the leaves of a form."""

    shape: torch.Size
    dtype: torch.dtype
    is_cpu: bool

    def __repr__(self) -> str:
        return f"{str(self.dtype)[6:]}{list(self.shape)}"

    def placeholder(self, device: torch.device) -> Tensor:
        """Return a tensor of this shape that takes no memory, for the receiver."""
        memory = torch.device("cpu") if self.is_cpu else device
        return torch.empty((), dtype=self.dtype, device=memory).expand(self.shape)


class _Buffer(NamedTuple):
    """The tensors of a message that are sent together: their indices, and placeholders."""

    indices: Sequence[int]
    placeholders: tuple[Tensor, ...]


class MessageForm(NamedTuple):
    """The form of a message.

    Args:
        leaves: those of the message, with `_TensorLike` for tensors.
        description: the rest of the message.
        buffers: one for each dtype and memory.
    """

    leaves: tuple[Any, ...]
    description: Content
    buffers: Sequence[_Buffer]

    @staticmethod
    def of(leaves: tuple[Any, ...], description: Content, device: torch.device) -> MessageForm:
        """Return the form of a message from its header."""
        indices_by_kind: dict[tuple[torch.dtype, bool], list[int]] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, _TensorLike):
                indices_by_kind.setdefault((leaf.dtype, leaf.is_cpu), []).append(index)

        buffers: list[_Buffer] = []
        for indices in indices_by_kind.values():
            placeholders = [leaves[index].placeholder(device) for index in indices]
            buffers.append(_Buffer(indices, tuple(placeholders)))
        return MessageForm(leaves, description, buffers)


def _leaves_of_form(leaves: Sequence[Any]) -> tuple[Any, ...]:
    form: list[Any] = []
    for leaf in leaves:
        is_tensor = isinstance(leaf, Tensor)
        form.append(_TensorLike(leaf.shape, leaf.dtype, leaf.is_cpu) if is_tensor else leaf)
    return tuple(form)


def _are_equal(leaves: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Return True if the leaves of two forms are the same, and not only equal.

    1, 1.0 and True are equal, and so are 0.0 and -0.0: the receiver would compute with the value of
    another microbatch.
    """
    if leaves != others:
        return False
    if [type(leaf) for leaf in leaves] != [type(leaf) for leaf in others]:
        return False
    has_numbers = any([isinstance(leaf, float | complex) for leaf in leaves])
    return not has_numbers or repr(leaves) == repr(others)


def _finish_content(form: MessageForm, pending: Sequence[Pending]) -> Content:
    """Wait for the buffers of a message; return its content."""
    leaves = list(form.leaves)
    for buffer, delivery in zip(form.buffers, pending, strict=True):
        for index, x in zip(buffer.indices, delivery.wait(), strict=True):
            # A tensor within a buffer may begin at any address, and kernels round differently at
            # other alignments.
            is_aligned = x.data_ptr() % _ALIGNMENT == 0
            leaves[index] = x if is_aligned else x.clone()
    return leaves, *form.description


class Mailbox:
    """The messages that one device sends and receives.

    Args:
        group: the devices.
        site: the source line of the step.
        device: of the tensors.
        receives: the messages from each other device, as it sends them.
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
        self._group = group
        self._site = site
        self._device = device
        self._keys = keys
        self._forms = forms
        self._world: Any = world_of(group)

        # From each device: the messages that are still to be received, first to last, and the
        # buffers of the first of them, if their receives have been started.
        self._expected = {source: deque(messages) for source, messages in receives.items()}
        self._started: dict[int, tuple[MessageForm, list[Pending]]] = {}
        self._received: dict[Message, Content] = {}
        for source in self._expected:
            self._start_next(source)

    def send(self, message: Message, target: int, content: Content) -> None:
        """Send a message to a device, without waiting for it."""
        leaves = content[0]
        form = self._form_of_sent(message, target, content)
        for buffer in form.buffers:
            self._send(tuple([leaves[index] for index in buffer.indices]), target)

    def _form_of_sent(self, message: Message, target: int, content: Content) -> MessageForm:
        """Return the form of a message to a device, which has its header then."""
        leaves, *rest = content
        form_leaves = _leaves_of_form(leaves)
        description = tuple(rest)
        form = self._find_form(message, target)
        if form is None:
            form = self._add_form(message, target, form_leaves, description)
            self._send_header(form, target)
            return form
        if not _are_equal(form_leaves, form.leaves) or description != form.description:
            raise ValueError(
                f"{message} must be {form.leaves}, as for another microbatch of the same shapes; "
                f"got {form_leaves}. If messages depend on values, as a mask that is None where "
                "nothing is padded, give dynamic=True, or options={'dynamic': True} of a plugin: "
                "then each message has a header."
            )
        return form

    def receive(self, message: Message, source: int) -> Content:
        """Wait for a message from a device, and return it; messages before it are kept.

        A device may send messages in another order than this one needs them.
        """
        while message not in self._received:
            arriving = self._expected[source].popleft()
            started = self._started.pop(source, None)
            if started is None:
                form = self._receive_header(arriving, source)
                started = form, self._start_buffers(form, source)
            self._received[arriving] = _finish_content(*started)
            self._start_next(source)
        return self._received.pop(message)

    def _start_next(self, source: int) -> None:
        """Start receiving the next message, if its form is known: it arrives during computation."""
        if not self._expected[source]:
            return
        form = self._find_form(self._expected[source][0], self._group.index)
        if form is not None:
            self._started[source] = form, self._start_buffers(form, source)

    # -- broadcasts --------------------------------------------------------------------------------
    # By a collective: messages would need a connection to each device.

    def broadcast(self, message: Message, content: Content) -> None:
        """Send a message to all other devices, which must have received all others."""
        index = self._group.index
        peers = [peer for peer in range(self._group.size) if peer != index]
        if not peers:
            return
        # All peers have the same form, of the same messages.
        form, *_ = [self._form_of_sent(message, peer, content) for peer in peers]
        leaves = content[0]
        pending: list[Pending] = []
        for buffer in form.buffers:
            xs = tuple([leaves[index] for index in buffer.indices])
            pending.append(self._start_broadcast(xs, index))
        for delivery in pending:
            delivery.wait()

    def receive_broadcast(self, message: Message, source: int) -> Content:
        """Receive a message that the device at index `source` broadcasts."""
        form = self._find_form(message, self._group.index)
        if form is None:
            form = self._receive_header(message, source)
        pending = [self._start_broadcast(buffer.placeholders, source) for buffer in form.buffers]
        return _finish_content(form, pending)

    def _start_broadcast(self, xs: tuple[Tensor, ...], source: int) -> Pending:
        return Bound(Broadcast(source), self._group, self._site).start(xs)

    # -- headers -----------------------------------------------------------------------------------

    def _send_header(self, form: MessageForm, target: int) -> None:
        data = to_bytes((form.leaves, form.description))
        length = len(data).to_bytes(8, "little")
        # As writable copies: torch warns of a tensor on constant bytes.
        self._send((torch.frombuffer(bytearray(length), dtype=torch.int64),), target)
        self._send((torch.frombuffer(bytearray(data), dtype=torch.uint8),), target)

    def _receive_header(self, message: Message, source: int) -> MessageForm:
        """Receive the header of a message; return its form."""
        one_number = torch.empty(1, dtype=torch.int64, device="cpu")
        (length,) = self._receive((one_number,), source).wait()
        some_bytes = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        (data,) = self._receive((some_bytes,), source).wait()

        leaves, description = from_bytes(data.numpy().tobytes())
        return self._add_form(message, self._group.index, leaves, description)

    # -- forms -------------------------------------------------------------------------------------

    def _form_key(self, message: Message, target: int) -> Hashable:
        """Return a key of all messages with one form: those of microbatches of equal shapes."""
        shapes = self._keys[message.microbatch] if message.microbatch >= 0 else tuple(self._keys)
        return target, message.kind, message.wire, shapes

    def _find_form(self, message: Message, target: int) -> MessageForm | None:
        return None if self._forms is None else self._forms.get(self._form_key(message, target))

    def _add_form(
        self, message: Message, target: int, leaves: tuple[Any, ...], description: Content
    ) -> MessageForm:
        form = MessageForm.of(leaves, description, self._device)
        if self._forms is not None:
            self._forms[self._form_key(message, target)] = form
        return form

    # -- tensors of one dtype ----------------------------------------------------------------------

    def _send(self, xs: tuple[Tensor, ...], target: int) -> None:
        dispatch(xs, self._group, target, self._site)

    def _start_buffers(self, form: MessageForm, source: int) -> list[Pending]:
        return [self._receive(buffer.placeholders, source) for buffer in form.buffers]

    def _receive(self, likes: tuple[Tensor, ...], source: int) -> Pending:
        return self._world.receive(likes, self._group, source, self._site)
