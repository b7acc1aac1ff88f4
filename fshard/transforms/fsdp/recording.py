"""Recorders of a step: they take values on the way to the gradients, device by device.

    shard, unsharded          a parameter of a unit, before and after its all-gather
    output                    of a stage of a pipeline
    loss, gradient            of one slice, the gradient leaf by leaf
    sum of gradients          of a device's slices, as it is reduced
    reduced gradient          the device's shard of the sum

A step without a recorder compares a field with None, and that is all. `fshard.auditing` records.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from fshard.mesh.layout import PyTree

Phase = Literal[
    "shard", "unsharded", "output", "loss", "gradient", "sum of gradients", "reduced gradient"
]


class DeviceRecorder(Protocol):
    """Records one device in one step."""

    def begin_slice(self, number: int) -> None:
        """Begin a slice, or a microbatch, by its number among those of all devices."""
        ...

    def record(self, phase: Phase, leaf: str, x: Any) -> None:
        """Record a tensor, or the tensors of a tree; `leaf` is the path of a parameter, or ""."""
        ...


class ValueRecorder(Protocol):
    """Records one step on all devices of the caller."""

    def on_device(self, number: int) -> DeviceRecorder:
        """Return the recorder of a device, by its number in the world."""
        ...

    def reduced(self, grads: PyTree) -> PyTree:
        """Record reduced gradients; return those that the update takes."""
        ...
