"""Flip one bit of one device at a moment of a step: the faults that an audit must name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fshard.mesh.runtimes.virtual import VirtualWorld
from fshard.mesh.spmd.scope import here
from fshard.transforms.fsdp.reductions import Reducer
from fshard.transforms.gradient import GradientFunction
from fshard.transforms.train_step import TrainStep

MOMENTS = ("activation", "parameter", "message", "gradient", "state")


def flip_in_place(x: Tensor, position: int, bit: int) -> None:
    """Flip a bit of an element of a float32 tensor."""
    bits = x.detach().reshape(-1).view(torch.int32)
    assert bits.data_ptr() == x.data_ptr()
    element = position % bits.numel()
    mask = 1 << bit
    bits[element] ^= mask


@dataclass
class Flip:
    """One flip: it happens once, after `arm`.

    Args:
        moment: one of MOMENTS.
        device: the number of the device.
        leaf: of the parameters, for all moments but activations.
        sizes: the elements of each leaf, different ones, by which messages differ visibly.
        position, bit: of the element.
        skipped: the number of opportunities before.

    `has_happened` is True afterwards.
    """

    moment: str
    device: int
    leaf: str
    sizes: dict[str, int]
    position: int
    bit: int
    skipped: int = 0
    is_armed: bool = False
    has_happened: bool = field(default=False, init=False)

    def is_due(self, device: int) -> bool:
        """Return True at the opportunity of the flip, on its device."""
        if not self.is_armed or device != self.device:
            return False
        if self.skipped:
            self.skipped -= 1
            return False
        self.is_armed = False
        self.has_happened = True
        return True

    def activation(self, x: Tensor) -> Tensor:
        """Return an activation of the loss function, flipped if it is due."""
        scope = here()
        assert scope is not None
        if self.moment != "activation" or not self.is_due(scope.number):
            return x
        flipped = x.detach().clone()
        flip_in_place(flipped, self.position, self.bit)
        return _With.apply(x, flipped)

    @contextmanager
    def installed(self):
        """Watch for the opportunity in the block."""
        with ExitStack() as stack:
            if self.moment == "parameter":
                stack.enter_context(_before(GradientFunction, "run", self._of_parameter))
            if self.moment == "state":
                stack.enter_context(_before(TrainStep, "_updated", self._of_state))
            if self.moment == "gradient":
                stack.enter_context(_before(Reducer, "send", self._of_gradient))
            if self.moment == "message":
                stack.enter_context(self._of_message())
            yield

    def _of_parameter(self, _: Any, params: Any, *rest: Any) -> None:
        self._of_shards(params[self.leaf])

    def _of_state(self, _: Any, params: Any, state: Any, *rest: Any) -> None:
        self._of_shards(state["exp_avg"][self.leaf])

    def _of_shards(self, x: Any) -> None:
        """Flip a bit of the shard of a device."""
        devices = x.mesh.devices
        index = -1
        if len(x.shards) > 1 and self.device in devices:  # virtual devices, from outside
            index = devices.index(self.device)
        elif len(x.shards) == 1 and torch.distributed.get_rank() == self.device:
            index = 0
        if index >= 0 and x.shards[index].numel() and self.is_due(self.device):
            flip_in_place(x.shards[index], self.position, self.bit)

    def _of_gradient(self, reducer: Reducer) -> None:
        scope = here()
        assert scope is not None
        for place, (index, g) in enumerate(reducer._bucket):
            is_leaf = reducer.leaves[index].path == f'["{self.leaf}"]'
            if is_leaf and self.is_due(scope.number):
                flipped = g.clone(memory_format=torch.contiguous_format)
                flip_in_place(flipped, self.position, self.bit)
                reducer._bucket[place] = (index, flipped)

    def _of_message(self):
        """Flip a bit in the results of a collective that carries the leaf."""
        original = VirtualWorld.start
        flip = self

        def start(world: Any, move: Any, xs: Any, group: Any, *rest: Any) -> Any:
            pending = original(world, move, xs, group, *rest)
            return _FlippedDelivery(pending, flip, group.number)

        return mock.patch.object(VirtualWorld, "start", start)


class _FlippedDelivery:
    """A collective in progress, one of whose results has a flipped bit."""

    def __init__(self, pending: Any, flip: Flip, number: int) -> None:
        self.pending = pending
        self.flip = flip
        self.number = number

    def wait(self, into: Any = None) -> Any:
        results = list(self.pending.wait(into))
        full = self.flip.sizes[self.flip.leaf]
        for index, x in enumerate(results):
            is_leaf = x.dtype == torch.float32 and x.numel() in (full, full // 4)
            if is_leaf and self.flip.is_due(self.number):
                flipped = x.clone(memory_format=torch.contiguous_format)
                flip_in_place(flipped, self.flip.position, self.flip.bit)
                results[index] = flipped
                if into is not None:
                    into[index].copy_(flipped.reshape(into[index].shape))
        return tuple(results)


class _With(torch.autograd.Function):
    """Another value in the forward; the gradient of the first one in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _before(owner: Any, name: str, act: Callable[..., None]):
    """Call a function before a method of a class."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        act(self, *args)
        return original(self, *args, **kwargs)

    return mock.patch.object(owner, name, method)
