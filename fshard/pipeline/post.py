"""Messages of which only the sender knows what is in them: trees of tensors of any shapes.

The first message of a kind is told before it is sent: its structure, shapes and dtypes, and whatever in it is no tensor.
From then on both ends know it, and tensors travel alone.  A kind is what stands in a schedule, and of which shapes the
microbatch is: so sequences of many lengths are told once each, and nothing is told in vain.

    first       how long ──>  what it is ──>  tensors of each dtype ──>
    later                                     tensors of each dtype ──>
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.messages import Send
from fshard.mesh.runtimes.protocol import Pending
from fshard.mesh.scope import Group
from fshard.mesh.tree import PyTree, Structure, flatten, unflatten
from fshard.source import Site

Mail = TypeVar("Mail", bound=Hashable)


class Form(NamedTuple):
    """What both ends of a message know.

    Args:
        structure: of the tree.
        leaves: of each tensor its shape and dtype; of anything else, itself.
    """

    structure: Structure
    leaves: tuple[Any, ...]

    def tensors(self) -> dict[torch.dtype, list[int]]:
        """Return where tensors of each dtype stand."""
        places: dict[torch.dtype, list[int]] = {}
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, _Like):
                places.setdefault(leaf.dtype, []).append(place)
        return places


class _Like(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


class Post(Generic[Mail]):
    """The messages of one device.

    Args:
        group: the devices.
        site: the line that they are sent for.
        device: where tensors lie.
        comes: what comes from each other device, in that order.
        kind: of a message; messages of one kind have one form.
        known: the forms of kinds, which both ends learn; None: every message is told.
    """

    def __init__(
        self,
        group: Group,
        site: Site,
        device: torch.device,
        comes: Mapping[int, Sequence[Mail]],
        kind: Callable[[Mail], Hashable],
        known: dict[Hashable, Form] | None,
    ) -> None:
        self._group, self._site, self._device, self._kind, self._known = group, site, device, kind, known
        self._comes = {source: deque(mails) for source, mails in comes.items()}
        self._begun: dict[int, list[Pending]] = {}
        self._arrived: dict[Mail, PyTree] = {}
        for source in self._comes:
            self._begin(source)

    def send(self, mail: Mail, to: int, tree: PyTree) -> None:
        """Send a tree to a device, without waiting for it."""
        leaves, structure = flatten(tree, none_is_leaf=True)
        form = Form(structure, tuple([_Like(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves]))
        if self._is_new(mail, to, form):
            told = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8).to(self._device)
            self._send([torch.tensor([len(told)], device=self._device)], to)
            self._send([told], to)
        for places in form.tensors().values():
            self._send([leaves[place].detach() for place in places], to)

    def take(self, mail: Mail, source: int) -> PyTree:
        """Return what comes from a device, as soon as it is there."""
        while mail not in self._arrived:
            first = self._comes[source].popleft()
            form = self._form(first) or self._heard(first, source)
            coming = self._begun.pop(source, None) or self._receiving(form, source)
            leaves = list(form.leaves)
            for places, pending in zip(form.tensors().values(), coming, strict=True):
                for place, x in zip(places, pending.wait(), strict=True):
                    leaves[place] = x
            self._arrived[first] = unflatten(form.structure, leaves)
            self._begin(source)
        return self._arrived.pop(mail)

    def _begin(self, source: int) -> None:
        """Begin to receive what comes next, if it is known what that is: it may come while something is computed."""
        form = self._form(self._comes[source][0]) if self._comes[source] else None
        if form is not None:
            self._begun[source] = self._receiving(form, source)

    def _form(self, mail: Mail) -> Form | None:
        """Return the form of a message that comes here, if it has been told."""
        return None if self._known is None else self._known.get((self._group.index, self._kind(mail)))

    def _is_new(self, mail: Mail, to: int, form: Form) -> bool:
        """Return whether the receiver does not know the form of a message yet."""
        if self._known is None:
            return True
        known = self._known.setdefault((to, self._kind(mail)), form)
        if known is form:
            return True
        if known != form:
            raise LayoutError(
                f"{mail} is {_words(form)}; for a microbatch of the same shapes it was {_words(known)}, and whoever receives "
                "it counts on that. If shapes depend on values, say dynamic=True: then each message is told."
            )
        return False

    def _heard(self, mail: Mail, source: int) -> Form:
        """Be told the form of a message."""
        (length,) = self._receive([self._like(torch.Size([1]), torch.int64)], source).wait()
        (told,) = self._receive([self._like(torch.Size([int(length)]), torch.uint8)], source).wait()
        form: Form = pickle.loads(told.cpu().numpy().tobytes())
        if self._known is not None:
            self._known[self._group.index, self._kind(mail)] = form
        return form

    def _receiving(self, form: Form, source: int) -> list[Pending]:
        return [
            self._receive([self._like(*form.leaves[place]) for place in places], source)
            for places in form.tensors().values()
        ]

    def _like(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor of some shape that has no memory."""
        return torch.empty((), dtype=dtype, device=self._device).expand(shape)

    def _send(self, xs: list[Tensor], to: int) -> None:
        Send(to, self._group, self._site, ()).run(tuple(xs))

    def _receive(self, likes: list[Tensor], source: int) -> Pending:
        return self._group.world.current().receive(tuple(likes), self._group, source, self._site)


def _words(form: Form) -> str:
    told = [f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, _Like) else repr(x) for x in form.leaves]
    return f"({', '.join(told)})"
