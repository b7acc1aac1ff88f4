"""Agreement of devices in a step: losses, buffers, used parameters, and equal inputs.

    on devices    loss x weight, metrics x weight        ──> tree over slices ──┐
    on hosts      weight, differences, written, used ... (`StepAgreement`) ─────┴──> psum

The row of the host waits for no accelerator. A slice of weight 0 adds nothing, even if its loss is
not finite. Differences are hashes of what must be equal on all devices:

    shapes of the global batch, order of all-gathers           in every step
    in loops the options of the optimizer's groups,
    and the samples that samplers have chosen                  in every step
    in reproducible mode the key of random draws               in every step
    replicated parameters, batches that are given in full      in the first step, each bit
    samples of devices with the same                           in the first step, each bit; then up
                                                               to 64 KiB of each in host memory

The losses of devices with the same samples are compared too: Note [Losses of the same samples].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

import torch
import xxhash
from torch import Tensor

from fshard.errors import MismatchError, PromiseError
from fshard.mesh.collectives.autograd import Bound
from fshard.mesh.collectives.moves import Psum
from fshard.mesh.layout import as_written
from fshard.mesh.runtimes.watch import watching
from fshard.mesh.spmd.global_inputs import digest
from fshard.mesh.spmd.moments import listeners, reach
from fshard.mesh.spmd.scope import Group
from fshard.source import Site
from fshard.transforms.batch import Batch

FIX_UNEVEN_GATHERS = (
    "An all-gather needs all devices. Let each of them call the part with the parameters, and "
    "branch inside: "
    "fs.with_unsharded_params(part, keep=True); or put them into a unit that all devices use: "
    "fs.fsdp(axis, unit=...)."
)

INPUT_ERRORS = {
    "key": (
        "the random state, from which reproducible=True draws the key of the step, must be the "
        "same on all devices. Give all processes one seed: torch.manual_seed(0), not that of a "
        "rank."
    ),
    "params": (
        "replicated parameters must be the same on all devices. Make them from one seed on all "
        "processes, or load them from one file."
    ),
    "optimizer": (
        "the options of the optimizer's groups must be the same on all devices. Does a scheduler "
        "get the loss of this device alone? booster.mean(loss) is that of all."
    ),
    "order": (
        "the sampler of a loader must choose the same samples, in the same order, on all devices, "
        "of which each takes its part. Let it draw by torch's generators, or by a seed and "
        "set_epoch(epoch)."
    ),
    "shapes": (
        "devices were given batches of different shapes. Every process gets the global batch and "
        "takes its part: give all the same, or each its own by fs.from_local."
    ),
    "batch": (
        "devices were given different batches, of the same shapes. A plain tensor is the "
        "global batch, of which each takes its part. If this process has loaded its own part: "
        'fs.from_local(x, fs.Layout(mesh, P("data"))).'
    ),
    "samples": (
        "devices along {axes} must have the same samples, since they compute one loss together; "
        "got different ones. Load them by the coordinate along the batch's axes: seed and shard a "
        "loader by these alone."
    ),
    "gathers": (
        f"devices gathered different units, so one was given another's values. {FIX_UNEVEN_GATHERS}"
    ),
}
"""The error of each difference. Where several differ, the first is the reason."""


_MOST_LISTED = 8
"""The number of losses that an error has, so that it stays readable on many devices."""

_SAMPLED_BYTES = 1 << 16
"""The bytes of each tensor that are compared in every step, about."""


class StepAgreement(NamedTuple):
    """The numbers of one device in a step or, after `unpack`, their sums over all devices.

    Args:
        weight: of the device's slices.
        differences: see `difference`; 0 if all devices have the same.
        losses: see `losses_by_index`.
        written: for each buffer, 1 if the device wrote to it.
        accumulated: for each unit, 1 if the device has gradients of it that are not reduced yet.
        used: for each parameter, 1 if the device used it.
    """

    weight: float
    differences: Mapping[str, float]
    losses: Sequence[float] = ()
    written: Sequence[float] = ()
    accumulated: Sequence[float] = ()
    used: Sequence[float] = ()

    def pack(self) -> list[float]:
        """Return all numbers as one row, the weight first."""
        return [
            self.weight,
            *self.differences.values(),
            *self.losses,
            *self.written,
            *self.accumulated,
            *self.used,
        ]

    def unpack(self, row: Sequence[float]) -> StepAgreement:
        """Return the agreement of a row in the form of `pack`."""
        weight, *terms = row
        numbers = iter(terms)
        differences = {name: next(numbers) for name in self.differences}
        lists = (self.losses, self.written, self.accumulated, self.used)
        unpacked = [[*islice(numbers, len(column))] for column in lists]
        return StepAgreement(weight, differences, *unpacked)

    def reduce(self, group: Group | None, site: Site) -> StepAgreement:
        """Return the sums over a group; without values, as if every parameter was used."""
        row = host_row(self.pack(), torch.device("cpu"))
        (row,) = reduce_rows((row,), group, site)
        if row.is_meta:
            return self._replace(weight=self.weight or 1.0, used=[1.0] * len(self.used))
        return self.unpack(row.tolist())

    def check(
        self,
        caller: str,
        along: tuple[str, ...],
        local: tuple[str, ...],
        *,
        weight: float,
        is_trained: bool,
    ) -> None:
        """Raise if devices differ in what must be equal, or have used no trained parameter.

        Args:
            caller: the function that was called.
            along: axes along which devices have the same samples.
            local: those of them along which devices compute one loss together.
            weight: the total of all samples, each counted once.
            is_trained: True if there is a trained parameter.
        """
        for name, error in INPUT_ERRORS.items():
            if self.differences.get(name):
                raise MismatchError(f"{caller}: {error.format(axes=', '.join(along))}")
        self.check_losses(caller, local, weight)
        if is_trained and not any(self.used):
            raise ValueError(
                f"{caller}: the loss depends on no parameter that is trained, on any device, "
                "so nothing would be trained. Was it cut off by detach(), item(), no_grad() or "
                "torch.tensor(...), or are all parameters that it uses frozen?"
            )

    def check_losses(self, caller: str, axes: tuple[str, ...], weight: float) -> None:
        """Raise if the losses of devices along local axes differ by more than rounding.

        `weight`: the total of all samples, each counted once.
        """
        if not self.losses:
            return
        *losses, allowed = self.losses
        difference = max(losses) - min(losses)
        # Where a loss is not finite neither is `allowed`, and nothing is greater.
        if not difference > allowed:
            return
        means = ", ".join(f"{loss / weight:.10g}" for loss in losses[:_MOST_LISTED])
        ellipsis = " ..." if len(losses) > _MOST_LISTED else ""
        raise PromiseError(
            f"{caller}(local=): the loss must be equal on all devices along {as_written(axes)}, "
            f"which compute it together from the same samples; got {means}{ellipsis}. "
            "Sum what is sharded along them by "
            "fs.psum before it is used; if the mean is meant, return fs.pmean(loss, "
            f"{as_written(axes)})."
        )


# Note [Differences of inputs]
# Device i of n adds c_i h_i, where c = (n - 1, -1, ..., -1) and h_i is a hash of 32 bits of its
# value. The sum is 0 if all values are equal, since c adds up to 0. If they are not, the hash of
# device 0's value counts once for each device with another value: whatever the other hashes are, it
# makes the sum 0 by one of 2^32 values. All sums of any of the c_i h_i are below n 2^32, so float64
# adds them exactly in any order while n 2^32 <= 2^53: up to 2^21 devices, 2^20 where two
# differences are one number. The hash includes the group, so that those of two groups do not
# cancel.
def difference(value: object, group: Group | None) -> float:
    """Return a number whose sum over a group is 0 if all its devices have the same value.

    See Note [Differences of inputs].
    """
    if not value or group is None or group.size == 1 or not group.world.has_values:
        return 0.0
    number = hash_of((group.base, value))
    factor = group.size - 1 if group.index == 0 else -1
    return float(number * factor)


def hash_of(value: object) -> int:
    """Return a hash of 32 bits of a value's text, equal on all processes."""
    return xxhash.xxh32_intdigest(repr(value).encode())


# Note [Losses of the same samples]
# Devices along a local axis have the same samples and compute one loss together: each adds the part
# of its shards by a collective. A forgotten psum leaves each with a loss of its own, and their mean
# is trained. No type shows it, since every value in a loss function is varying. So the losses are
# compared by value. Device j of the axis adds its weighted loss to number j of a row, which is
# summed over all devices with the rest of the agreement: then the numbers must be equal. They may
# differ by rounding, since a ring may add in another order on each device. Two thirds of a dtype's
# digits must be equal: 4e-11 in 64 bits, 2e-5 in 32 and 4 % in bfloat16. An accelerator's loss is
# read in the first step only, since the host waits for it. A weight that is zero at first, as one
# of LoRA's, hides a forgotten psum there; the next step in host memory, or FSHARD_CHECK=1, finds
# it.
def losses_by_index(slices: Sequence[SliceLoss], group: Group | None) -> list[float]:
    """Return a device's row in a group with the same samples: losses by index, allowed difference.

    See Note [Losses of the same samples]. Empty if no other device has the same.
    """
    if group is None or group.size == 1:
        return []
    losses = [0.0] * group.size
    allowed = 0.0
    for slice in slices:
        if slice.weight and not slice.loss.is_meta:
            loss = float(slice.loss) * slice.weight
            losses[group.index] += loss
            # Summed over the group, this is the mean of the devices' allowances.
            tolerance = torch.finfo(slice.loss.dtype).eps ** (2 / 3)
            allowed += abs(loss) / group.size * tolerance
    return [*losses, allowed]


def input_differences(
    batch: Batch,
    device_index: int,
    key: int | None,
    params: Iterable[Tensor],
    group: Group | None,
    same_samples: Group | None,
    *,
    is_first_step: bool,
) -> dict[str, float]:
    """Return the differences of the inputs of the device at an index.

    `key`: of random draws, if all devices draw alike; `params`: those that each has in full.
    Batches are compared in the first step, for which an accelerator is waited for; under
    FSHARD_CHECK=1 in each.
    """
    is_full = batch.may_differ and (is_first_step or watching())
    params_digests: list[int] = []
    batch_digests: list[int] = []
    if is_full:
        params_digests = [digest(param) for param in params]
        batch_digests = [digest(x) for x in batch.global_leaves if isinstance(x, Tensor)]
    sample_digests: list[int] = []
    if batch.may_differ and same_samples is not None and same_samples.size > 1:
        sample_digests = _sample_digests(batch, device_index, is_full=is_full)
    keys = None if key is None else (key,)
    return {
        "key": difference(keys, group),
        "params": difference(params_digests, group),
        "shapes": difference(batch.shapes, group),
        "batch": difference(batch_digests, group),
        "samples": difference(sample_digests, same_samples),
    }


def _sample_digests(batch: Batch, device_index: int, *, is_full: bool) -> list[int]:
    """Return a hash of each tensor that devices with the same samples have.

    `is_full`: of all bits. Else of some elements at equal distances, and only where that waits for
    no accelerator.
    """
    digests: list[int] = []
    for column, has_samples in zip(batch.columns, batch.has_samples, strict=True):
        shard = column[device_index]
        if not isinstance(shard, Tensor):
            continue
        if is_full:
            digests.append(digest(shard))
        elif has_samples and shard.device.type == "cpu":
            distance = 1 + shard.nbytes // _SAMPLED_BYTES
            digests.append(digest(shard.reshape(-1)[::distance]))
    return digests


# -- sums over slices and devices ------------------------------------------------------------------


class SliceLoss(NamedTuple):
    """The loss of a slice, or of all, its weight, and the metrics that are averaged with it."""

    loss: Tensor
    weight: float
    means: list[Tensor]


def average_losses(
    slices: Sequence[SliceLoss],
    row: list[float],
    group: Group | None,
    site: Site,
    *,
    copies: int = 1,
) -> tuple[SliceLoss, list[float]]:
    """Average losses and metrics over the slices of all devices; return also the sum of their rows.

    Args:
        slices: of this device.
        row: its numbers, the weight of its slices first.
        group: the devices.
        site: the source line of the step.
        copies: the number of devices that have the same samples.
    """
    first = slices[0]
    is_alone = group is None or group.size == 1
    loss_dtype = torch.promote_types(first.loss.dtype, torch.float32)
    if is_alone and len(slices) == 1 and first.weight:
        loss = first.loss.to(loss_dtype)  # a mean of one
        return first._replace(loss=loss), row

    with torch.no_grad():
        sums = tree_sum([_weighted_row(slice, first.loss.device) for slice in slices])
    if not is_alone:
        # The row has no name here, which would keep it beside the results.
        sums, numbers = reduce_rows((sums, host_row(row, first.loss.device)), group, site)
        if not numbers.is_meta:
            row = numbers.tolist()

    weight = row[0]
    lengths = [mean.numel() for mean in first.means]
    loss, *totals = (sums / weight).split([1, *lengths])
    means: list[Tensor] = []
    for total, like in zip(totals, first.means, strict=True):
        means.append(total.reshape(like.shape).to(like))
    return SliceLoss(loss.reshape(()).to(loss_dtype), weight / copies, means), row


def _weighted_row(slice: SliceLoss, device: torch.device) -> Tensor:
    """Return the numbers of a slice times its weight; those of weight 0 are 0, finite or not."""
    columns = [x.to(device, torch.float64).reshape(-1) for x in (slice.loss, *slice.means)]
    row = columns[0] if len(columns) == 1 else torch.cat(columns)
    if not slice.weight:
        return torch.zeros_like(row)
    return row * slice.weight


Number = TypeVar("Number", float, Tensor)


def tree_sum(numbers: Sequence[Number]) -> Number:
    """Add up the numbers or tensors of slices in the tree in which their gradients are added.

    >>> tree_sum([1.0, 2.0, 3.0, 4.0, 5.0])  # ((1 + 2) + (3 + 4)) + 5
    15.0
    """
    level = [*numbers]
    while len(level) > 1:
        sums = [left + right for left, right in zip(level[::2], level[1::2], strict=False)]
        if len(level) % 2:
            sums.append(level[-1])
        level = sums
    return level[0]


def reduce_rows(rows: tuple[Tensor, ...], group: Group | None, site: Site) -> tuple[Tensor, ...]:
    """Sum rows of numbers over devices; one device has the sums already.

    Rows in one memory share a collective, which cannot take a row of the host with one of an
    accelerator.
    """
    if group is None or group.size == 1:
        return rows
    if listeners:
        reach("agree")
    psum = Bound(Psum(), group, site).run
    if len({row.device for row in rows}) == 1:
        return psum(rows)
    return tuple([psum((row,))[0] for row in rows])


def host_row(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return a row of numbers in host memory; without values, where a device has none."""
    memory = "meta" if device.type == "meta" else "cpu"
    return torch.tensor(numbers, dtype=torch.float64, device=memory)
