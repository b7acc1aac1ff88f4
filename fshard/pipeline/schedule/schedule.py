"""`Schedule`: a value that is verified, simulated and drawn."""

from __future__ import annotations

from html import escape
from typing import Any

from fshard.errors import ScheduleError
from fshard.pipeline.schedule.rows import ScheduleRows
from fshard.pipeline.schedule.simulate import Simulation, simulate
from fshard.pipeline.schedule.verify import Proof, verify


class Schedule(ScheduleRows):
    """The placement of stages, and a row of actions for each device.

    Args:
        name: of the schedule.
        placement: the device of each stage.
        microbatches: number of microbatches.
        rows: the actions of each device, first to last.

    >>> schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1", name="1f1b")
    >>> schedule.placement, schedule.microbatches
    ((0, 1), 2)
    >>> print(schedule)
    1f1b: 2 microbatches, 2 stages on 2 devices
    device 0 │ F0 F1 ·  ·  B0─── ·  B1───
    device 1 │ ·  F0 B0─── F1 B1─── ·  ·
    time 9, bubble 1/3, at most 2 activations on a device
    """

    def verify(self) -> Proof:
        """Prove that the schedule can run; else raise a `ScheduleError` that draws all errors."""
        return verify(self)

    def simulate(self, **costs: Any) -> Simulation:
        """Return when each action runs.

        Args:
            costs: durations `forward`, `backward_input`, `backward_weight`, `gather` and `reduce`
                (of weights), the latency `send` of a message, and `activation` sizes. Each is a
                number, or a list or a function with one for each stage.
        """
        return simulate(self, **costs)

    def __str__(self) -> str:
        try:
            return str(simulate(self))
        except ScheduleError as error:
            return f"{self.to_text()}\n{error}"

    def _repr_html_(self) -> str:
        try:
            return simulate(self).to_svg()
        except ScheduleError:
            return f"<pre>{escape(str(self))}</pre>"
