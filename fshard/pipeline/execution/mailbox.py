"""Messages whose form only the sender knows.

A message is a tuple of a list of leaves and of what describes them, such as their structure. The first message of a kind
is preceded by its header: the description, shapes and dtypes of tensors, and all other leaves. After that both ends have
its form, and only tensors are sent, those of one dtype in one buffer. Headers are in host memory: to read one
synchronizes no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.collectives.delivery import world_of
from fshard.mesh.collectives.send_recv import dispatch
from fshard.mesh.plain_bytes import from_bytes, to_bytes
from fshard.mesh.spmd.scope import Group, Pending
from fshard.pipeline.execution.route import Message
from fshard.source import Site

Content = tuple[Any, ...]
"""A list of leaves, and what describes them: two contents of the same form have equal descriptions."""
Forms = dict[Any, "MessageForm"]
"""The forms that both ends have, by receiver and kind of message."""


class _TensorLike(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    is_cpu: bool

    def __repr__(self) -> str:
        return f"{str(self.dtype)[6:]}{list(self.shape)}"

    def placeholder(self, device: torch.device) -> Tensor:
        return torch.empty((), dtype=self.dtype, device="cpu" if self.is_cpu else device).expand(
            self.shape
        )


class MessageForm(NamedTuple):
    """The form of a message: its leaves, with `_TensorLike` for tensors, and their description.

    `buffers` are the tensors of each dtype and memory, which are sent together: their indices, and placeholders like them.
    """

    leaves: tuple[Any, ...]
    description: Content
    buffers: Sequence[tuple[Sequence[int], tuple[Tensor, ...]]]

    @staticmethod
    def of(leaves: tuple[Any, ...], description: Content, device: torch.device) -> MessageForm:
        """Return the form of a message from its header."""
        indices: dict[tuple[torch.dtype, bool], list[int]] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, _TensorLike):
                indices.setdefault((leaf.dtype, leaf.is_cpu), []).append(index)
        buffers = [
            (group, tuple([leaves[index].placeholder(device) for index in group]))
            for group in indices.values()
        ]
        return MessageForm(leaves, description, buffers)


def _are_equal(leaves: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Return True if the leaves of two headers are the same: 1, 1.0 and True are not, nor 0.0 and -0.0."""
    if leaves != others or [*map(type, leaves)] != [*map(type, others)]:
        return False
    numbers = [x for x in (*leaves, *others) if isinstance(x, float | complex)]
    return not numbers or repr(leaves) == repr(others)


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
        self._group, self._site, self._device, self._keys, self._forms = (
            group,
            site,
            device,
            keys,
            forms,
        )
        self._world: Any = world_of(group)
        self._expected = {source: deque(messages) for source, messages in receives.items()}
        self._started: dict[int, tuple[MessageForm, list[Pending]]] = {}
        self._arrived: dict[Message, Content] = {}
        for source in self._expected:
            self._start_next(source)

    def send(self, message: Message, to: int, content: Content) -> None:
        """Send a message to a device, without waiting for it."""
        leaves, *description = content
        header = tuple(
            [
                _TensorLike(x.shape, x.dtype, x.is_cpu) if isinstance(x, Tensor) else x
                for x in leaves
            ]
        )
        form = self._form(message, to)
        if form is None:
            form = self._add_form(message, to, header, tuple(description))
            data = torch.frombuffer(bytearray(to_bytes(form[:2])), dtype=torch.uint8)
            self._send(
                (torch.frombuffer(bytearray(len(data).to_bytes(8, "little")), dtype=torch.int64),),
                to,
            )
            self._send((data,), to)
        elif not _are_equal(header, form.leaves) or tuple(description) != form.description:
            raise ValueError(
                f"{message} must be {form.leaves}, as for another microbatch of the same shapes; got {header}. If messages "
                "depend on values, as a mask that is None where nothing is padded, give dynamic=True, or "
                "options={'dynamic': True} of a plugin: then each message has a header."
            )
        for indices, _ in form.buffers:
            self._send(tuple([leaves[index] for index in indices]), to)

    def receive(self, message: Message, source: int) -> Content:
        """Wait for a message from a device, and return it; those before it are kept."""
        while message not in self._arrived:
            arriving = self._expected[source].popleft()
            form, buffers = self._started.pop(source, None) or self._receive_header(
                arriving, source
            )
            leaves = list(form.leaves)
            for (indices, _), pending in zip(form.buffers, buffers, strict=True):
                for index, x in zip(indices, pending.wait(), strict=True):
                    is_aligned = (
                        x.data_ptr() % _ALIGNED == 0
                    )  # kernels round differently at other alignments
                    leaves[index] = x if is_aligned else x.clone()
            self._arrived[arriving] = leaves, *form.description
            self._start_next(source)
        return self._arrived.pop(message)

    def _start_next(self, source: int) -> None:
        """Start receiving the next message, if its form is known, so that it arrives during computation."""
        if (
            self._expected[source]
            and (form := self._form(self._expected[source][0], self._group.index)) is not None
        ):
            self._started[source] = form, self._start_buffers(form, source)

    def _receive_header(self, message: Message, source: int) -> tuple[MessageForm, list[Pending]]:
        """Receive the header of a message, and start receiving its tensors."""
        (length,) = self._receive((torch.empty(1, dtype=torch.int64, device="cpu"),), source).wait()
        (data,) = self._receive(
            (torch.empty(int(length), dtype=torch.uint8, device="cpu"),), source
        ).wait()
        form = self._add_form(message, self._group.index, *from_bytes(data.numpy().tobytes()))
        return form, self._start_buffers(form, source)

    # -- forms --------------------------------------------------------------------------------------------------

    def _form_key(self, message: Message, to: int) -> Hashable:
        shapes = self._keys[message.microbatch] if message.microbatch >= 0 else tuple(self._keys)
        return to, message.kind, message.wire, shapes

    def _form(self, message: Message, to: int) -> MessageForm | None:
        return None if self._forms is None else self._forms.get(self._form_key(message, to))

    def _add_form(
        self, message: Message, to: int, leaves: tuple[Any, ...], description: Content
    ) -> MessageForm:
        form = MessageForm.of(leaves, description, self._device)
        if self._forms is not None:
            self._forms[self._form_key(message, to)] = form
        return form

    # -- tensors of one dtype -----------------------------------------------------------------------------------

    def _send(self, xs: tuple[Tensor, ...], to: int) -> None:
        dispatch(xs, self._group, to, self._site)

    def _start_buffers(self, form: MessageForm, source: int) -> list[Pending]:
        return [self._receive(likes, source) for _, likes in form.buffers]

    def _receive(self, likes: tuple[Tensor, ...], source: int) -> Pending:
        return self._world.receive(likes, self._group, source, self._site)


_ALIGNED = 64
"""Bytes, of which torch's memory begins at a multiple."""
