"""`timeline`: what the devices of a pipeline really did, and when."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from fshard.pipeline.schedule import Action
from fshard.pipeline.trace import Event, to_chrome_trace


@dataclass(frozen=True)
class Timeline:
    """What has been done, in the order in which it ended; in seconds of a clock that the processes of a machine share.

    A device is here the number of one of the mesh, whether its stages lie beside others along "data" or not.
    """

    events: list[Event] = field(default_factory=list[Event])

    def to_chrome_trace(self) -> str:
        """Write it as the JSON that ui.perfetto.dev and chrome://tracing open; several processes' can be opened together."""
        return to_chrome_trace(self.events, unit=1e6)


@contextmanager
def timeline() -> Generator[Timeline]:
    """Note what the pipelines that are run meanwhile do, and when, on the devices of this process.

    Waiting for a message is an action of its own, as a schedule with messages writes it, and so is the moment at which one is
    sent.  Of a GPU it is seen when work is launched.

    >>> import torch, fshard as fs
    >>> schedule = fs.pipeline_schedule("gpipe", stages=2, microbatches=1)
    >>> step = fs.pipelined([lambda w, x: w * x] * 2, schedule, lambda y, x: y.sum(), mesh=fs.make_mesh({"pipe": 2}))
    >>> with timeline() as run:
    ...     outcome = step([torch.tensor(2.0), torch.tensor(3.0)], [torch.ones(1)])
    >>> [str(event.action) for event in run.events if event.device == 1]
    ['1RECV_F0', '1F0', '1SEND_B0', '1B0']
    """
    opened = Timeline()
    _open.append(opened)
    try:
        yield opened
    finally:
        _open[:] = [one for one in _open if one is not opened]


_open: list[Timeline] = []


class Clock:
    """Notes what one device does, in some timelines."""

    def __init__(self, device: int, timelines: Sequence[Timeline]) -> None:
        self._device, self._timelines = device, timelines
        self._waited = 0.0

    def did(self, action: Action, began: float) -> None:
        """Note an action that ends now; it has begun with the last message that it waited for."""
        self._note(action, max(began, self._waited))

    def sent(self, action: Action, began: float) -> None:
        """Note a message that is on its way."""
        self._note(action, began)

    def waited(self, action: Action, began: float) -> None:
        """Note a message that has come."""
        self._note(action, began)
        self._waited = perf_counter()

    def _note(self, action: Action, began: float) -> None:
        event = Event(self._device, action, began, perf_counter())
        for one in self._timelines:
            one.events.append(event)


def clock_of(device: int) -> Clock | None:
    """Return what notes what a device does in the timelines that are open, if there are any."""
    return Clock(device, tuple(_open)) if _open else None
