"""The abstract runtime: shapes without data.

One representative device runs the program on meta tensors. Received tensors get the shapes that the
move's `pack` and `unpack` give them, so a mesh of 65,536 devices costs no more than one of 8.

In a pipeline each stage has a representative, which runs in a thread of its own (`represented`):
devices of a stage do the same, those of other stages do not.

    mesh pipe=2, data=4                    device 0 for stage 0, device 4 for stage 1
    psum over "data" on device 4           represents all four: the result has the shape of a sum
    send over "pipe" from 0                is received by 4
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Condition
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from fshard.ambient import setting
from fshard.mesh.collectives.delivery import delivered
from fshard.mesh.collectives.ledger import active, writing_to
from fshard.mesh.runtimes.device_threads import Stopped
from fshard.mesh.spmd.scope import MessageCount, MessageCounts
from fshard.source import Site, call_site, run_for_line

if TYPE_CHECKING:
    from fshard.mesh.collectives.moves import Purpose, Wired
    from fshard.mesh.layout.mesh import Runtime
    from fshard.mesh.spmd.scope import Group, Scope

Result = TypeVar("Result")


@dataclass(frozen=True)
class Done:
    """A result that is already there."""

    results: tuple[Tensor, ...]

    def wait(self, into: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
        """Return it."""
        return self.results


class OneProcessWorld:
    """The base of the worlds that are in one process."""

    def report_failure(self, group: Group, error: BaseException) -> None:
        """Do nothing: an error ends all devices."""


class AbstractWorld(OneProcessWorld):
    """Answers every collective with empty tensors of the right shape."""

    has_values = False
    runtime: Runtime = "abstract"

    def __init__(self) -> None:
        self.scopes: dict[object, Scope] = {}
        self.message_counts: MessageCounts = defaultdict(MessageCount)

    def current(self) -> AbstractWorld:
        """Return itself: it has no state."""
        return self

    def represents(self, axes: tuple[str, ...]) -> bool:
        """Return True unless one of the axes is that of stages, which have their own devices."""
        current = representative()
        return current is None or current.axis not in axes

    def start(
        self,
        move: Wired,
        xs: tuple[Tensor, ...],
        group: Group,
        site: Site,
        purpose: Purpose = "values",
        dtype: torch.dtype | None = None,
    ) -> Done:
        """Return tensors of the shapes that the collective would return."""
        return Done(tuple([delivered(move, x, group.size, dtype) for x in xs]))

    def send(
        self,
        xs: tuple[Tensor, ...],
        group: Group,
        to: int,
        site: Site,
        purpose: Purpose = "values",
        number: int | None = None,
    ) -> None:
        """Send tensors to a representative, if there are several: else there is no receiver."""
        current = representative()
        if current is not None:
            current.mail.put(group.device, group.member(to), xs)

    def receive(
        self,
        likes: tuple[Tensor, ...],
        group: Group,
        source: int,
        site: Site,
        purpose: Purpose = "values",
        number: int | None = None,
    ) -> Done | PendingMessage:
        """Return the tensors of a representative, or some like those announced."""
        current = representative()
        if current is not None:
            return PendingMessage(current.mail, group.member(source), group.device)
        return Done(tuple([torch.empty_like(like) for like in likes]))

    def report_failure(self, group: Group, error: BaseException) -> None:
        """End the other representatives."""
        current = representative()
        if current is not None:
            current.mail.close()


class Mail:
    """Messages between the representatives of an abstract mesh, in order between each two.

    The representative that runs holds `running`, and gives it back only where it waits in `get`. So
    one runs at a time: in several threads at once torch's modes crashed in one of twelve runs.
    """

    def __init__(self) -> None:
        self._boxes: defaultdict[tuple[int, int], deque[tuple[Tensor, ...]]] = defaultdict(deque)
        self.running = Condition()
        self._is_closed = False

    def put(self, source: int, to: int, xs: tuple[Tensor, ...]) -> None:
        """Send tensors."""
        copies: list[Tensor] = []
        for x in xs:
            copies.append(torch.empty_like(x) if x.is_meta else x.clone())
        with self.running:
            self._boxes[source, to].append(tuple(copies))
            self.running.notify_all()

    def get(self, source: int, to: int) -> tuple[Tensor, ...]:
        """Wait for the next tensors that one device sends to another."""
        box = self._boxes[source, to]
        with self.running:
            self.running.wait_for(lambda: box or self._is_closed)
            if not box:
                raise Stopped  # another representative has failed
            return box.popleft()

    def close(self) -> None:
        """End the waits: no more messages are sent."""
        with self.running:
            self._is_closed = True
            self.running.notify_all()


class PendingMessage(NamedTuple):
    """A message that is received where it is waited for."""

    mail: Mail
    source: int
    to: int

    def wait(self, into: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
        """Return it."""
        return self.mail.get(self.source, self.to)


class Representative(NamedTuple):
    """A device of an abstract mesh that the calling thread runs as.

    It is a fact of the thread, since such a thread runs a complete training step, whose own runs
    enter the scope of this device. `axis` is that of the stages, if there are any.
    """

    device: int
    axis: str | None
    mail: Mail


_representative: ContextVar[Representative | None] = ContextVar("representative", default=None)
representative = _representative.get
"""Return the device of an abstract mesh that the calling thread runs as, if one of several."""


def represented(
    devices: Sequence[int], axis: str | None, body: Callable[[int], Result], mail: Mail
) -> list[Result]:
    """Run a function as each of some devices of an abstract mesh, in threads with messages.

    Raises the first error that is not the end of another representative.

    Args:
        devices: one of each stage.
        axis: of the stages, None without stages: then all run in the calling thread.
        body: called with the number of the device.
        mail: the messages.
    """
    site = call_site()
    ledgers = active()

    def run(device: int) -> Result:
        current = Representative(device, axis, mail)
        with mail.running, setting(_representative, current), writing_to(ledgers):
            return run_for_line(site, body, device)

    if axis is None:
        return [run(device) for device in devices]
    with ThreadPoolExecutor(len(devices), "stage") as threads:
        futures = [threads.submit(run, device) for device in devices]
    errors = [future.exception() for future in futures]
    errors.sort(key=lambda error: isinstance(error, Stopped))  # causes before consequences
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]
