"""`LossCheck`: the law of a loop's loss, compared once.

    device 0    samples 0 1    loss 0.9 ─┐ mean, weighted as the gradient is    0.8   ──┐ equal, or
    device 1    samples 2 3    loss 0.7 ─┘                                              │ it raises
    each        samples 0 1 2 3, gathered from all    loss                      0.8   ──┘

The loss is one that a criterion returned which `boost` was given, or `output.loss` of the model,
which runs again in eval mode. What the loop does with it afterwards (a scale, a sum with others) is
not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import ModuleError
from fshard.mesh.layout import PyTree, flatten, unflatten
from fshard.mesh.spmd.scope import Group
from fshard.source import Site
from fshard.transforms.agreement import difference, host_row, reduce_rows
from fshard.transforms.batch import rows_of


class LossCall(NamedTuple):
    """A call that returned a loss; `function` takes other arguments in its place."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LossCheck:
    """The calls since the last backward that have returned a loss, until the first step."""

    def __init__(self) -> None:
        self._calls = list[LossCall]()
        self.is_running = False

    def watched(self, criterion: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a criterion whose calls are recorded until the first step."""

        def call(*args: Any, **kwargs: Any) -> Tensor:
            self.record(criterion, args, kwargs)
            return criterion(*args, **kwargs)

        return call

    def record(
        self, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record a call under grad mode."""
        if torch.is_grad_enabled() and not self.is_running:
            self._calls.append(LossCall(function, args, kwargs))

    def clear(self) -> None:
        """Drop the calls, as of a model whose first step is over."""
        self._calls = []

    def compare(self, share: float, group: Group | None, site: Site, *, is_idle: bool) -> None:
        """Raise unless the mean of the devices' losses is that of all samples; and if there is none.

        Args:
            share: the weight of this device's gradient.
            group: of the devices that share a batch; None: one device.
            site: the line of the backward.
            is_idle: True if this device has computed on another's samples.
        """
        calls = self._calls
        self.clear()
        if not calls:
            raise ModuleError(
                'backward: check="loss" must see the loss. Give the criterion to boost and call '
                "the one that it returns, or let the model return an output with .loss; or leave "
                "check= out, and compare one step by fs.testing.certify."
            )
        if group is None or group.size == 1:
            return
        # The calls that run again here are those of the boosted criterion: they are not recorded.
        self.is_running = True
        try:
            with torch.no_grad():
                for call in calls:
                    _compare(call, share, group, site, is_idle=is_idle)
        finally:
            self.is_running = False


def loss_in(output: Any) -> Tensor | None:
    """Return the loss in a model's output, as those of transformers have it."""
    if isinstance(output, Mapping):
        loss = output.get("loss")
    else:
        loss = getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def _compare(call: LossCall, share: float, group: Group, site: Site, *, is_idle: bool) -> None:
    local = call.function(*call.args, **call.kwargs)
    args, kwargs = _gathered((call.args, call.kwargs), group, site, is_idle=is_idle)
    loss_of_all = call.function(*args, **kwargs)
    if not isinstance(local, Tensor) or local.numel() != 1:
        return  # the loop takes the mean itself

    summand = float(local) * share if share else 0.0  # an idle device's loss may be NaN
    (row,) = reduce_rows((host_row([summand], local.device),), group, site)
    mean = row.item()
    expected = float(loss_of_all)
    # Half of the digits: sums in another order differ in the last ones, a wrong law in the first.
    tolerance = torch.finfo(local.dtype).eps ** 0.5 * max(abs(expected), 1e-6)
    is_equal = abs(mean - expected) <= tolerance  # False of NaN
    if not is_equal:
        raise ModuleError(
            'backward: check="loss": the mean of the devices\' losses must be the loss of all '
            f"samples, {expected:.6g}; got {mean:.6g}. It is no mean over samples. Give the number "
            "that this device's loss is a mean over, booster.backward(loss, optimizer, "
            "weight=tokens); divide a sum by it; or compare with the samples of all devices."
        )


def _gathered(tree: PyTree, group: Group, site: Site, *, is_idle: bool) -> PyTree:
    """Return a tree with the rows of all devices, in the tensors as long as the first one."""
    leaves, structure = flatten(tree, none_is_leaf=True)
    lengths = [rows_of(x) for x in leaves]
    count = next((length for length in lengths if length is not None), None)
    if count is None:
        return tree
    tensors = [x for x, length in zip(leaves, lengths, strict=True) if length == count]
    start, total = _own_range(tensors, 0 if is_idle else count, group, site)

    gathered = list[Any]()
    for x, length in zip(leaves, lengths, strict=True):
        if length == count:
            x = _with_all_rows(x, start, total, group, site, is_idle=is_idle)
        gathered.append(x)
    return unflatten(structure, gathered)


def _own_range(tensors: list[Tensor], count: int, group: Group, site: Site) -> tuple[int, int]:
    """Return where this device's rows begin among those of all devices, and the number of all.

    One reduction has the counts, which may be uneven, and compares the shapes of rows.
    """
    counts = [0.0] * group.size
    counts[group.index] = float(count)
    shapes = [(x.shape[1:], x.dtype) for x in tensors]
    row = host_row([*counts, difference(shapes, group)], tensors[0].device)
    (row,) = reduce_rows((row,), group, site)
    *numbers, is_different = row.tolist()
    if is_different:
        raise ModuleError(
            'backward: check="loss" must get tensors of the same shape on all devices, but for '
            f"their rows, to gather them; got {[tuple(x.shape) for x in tensors]} on one. Pad the "
            "first batch alike."
        )
    return int(sum(numbers[: group.index])), int(sum(numbers))


def _with_all_rows(
    x: Tensor, start: int, total: int, group: Group, site: Site, *, is_idle: bool
) -> Tensor:
    """Return the rows of all devices: each adds its own to zeros."""
    is_inexact = x.is_floating_point() or x.is_complex()
    dtype = x.dtype if is_inexact else torch.int64  # bools have no sum
    rows = x.new_zeros((total, *x.shape[1:]), dtype=dtype)
    if not is_idle:
        rows[start : start + len(x)] = x.detach()
    (rows,) = reduce_rows((rows,), group, site)
    return rows.to(x.dtype)
