"""One device's step: forward and backward of its slices, in sequence.

slice 0          slice 1          last slice
gradients kept   accumulated      accumulated, reduced as each unit's are ready
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import FshardError, MismatchError
from fshard.mesh.layout import Layout, P, PyTree, flatten_with_paths
from fshard.mesh.layout.host_copies import start_read
from fshard.mesh.spmd.global_inputs import digest
from fshard.mesh.spmd.scope import Group, owning
from fshard.optim.scaling import finite_scale
from fshard.source import Site
from fshard.transforms.agree import CURE, CollectiveRecord, marks, objection, on_host, summed, unlike
from fshard.transforms.batch import Batch, Slice
from fshard.transforms.fsdp.engine import Gradients, UnitOptions
from fshard.transforms.fsdp.param_runtime import Order, ParamRuntime, followed
from fshard.transforms.fsdp.reductions import AccumulateInto
from fshard.transforms.fsdp.units import Unit
from fshard.transforms.graph_checks import refuse_unreached
from fshard.transforms.means import (
    AuxLeaves,
    Count,
    LossSums,
    Weight,
    averaged_results,
    collected,
    combine_aux,
    nonzero_weight,
    refuse_weights,
    slice_results,
    slice_state,
    weight_of,
)
from fshard.transforms.module.buffers import Buffers, Written, averaged, entries_to_average, irregular, written_paths
from fshard.transforms.origin import Inputs, inputs_of, refuse_different_samples, samples_mark
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.reproducible.randomness import keyed_random
from fshard.transforms.reproducible.summation_tree import TreeAccumulator


@dataclass(frozen=True)
class StepOptions:
    """How each device takes the gradient of its part.

    Args:
        loss_fn: of (params, batch).
        has_buffers: True if it takes and returns buffers: (params, buffers, batch) -> (loss, buffers).
        has_aux: True if it returns metrics too, and `aux` how they are combined.
        weight: the weight of a part of the batch.
        accumulate: number of slices per device.
        once: True accumulates gradients over the slices before they are reduced.
        slices: number of slices of the global batch in reproducible mode; None: another mode.
        unit_options: options of units.
        backward: False takes no gradient.
        caller: the function that was called, for messages.
        local: the axes along which parameters are used as they are stored; the loss is the mean over them.
    """

    loss_fn: Callable[..., Any]
    has_buffers: bool
    has_aux: bool
    weight: Weight | None
    accumulate: int
    once: bool
    slices: int | None
    unit_options: UnitOptions
    backward: bool = True
    caller: str = "value_and_grad"
    local: tuple[str, ...] = ()
    aux: PyTree = None

    def used(self, layout: Layout) -> Layout:
        """Return the layout in which a parameter is used: sharded along local axes, as it is stored, else replicated."""
        return Layout(layout.mesh, P(*layout.spec.entries)) if self.local else Layout(layout.mesh)

    def turns(self, n: int) -> int:
        """Return the number of slices of each of n devices; in reproducible mode they are one branch of the global
        tree.
        """
        if self.slices is None:
            return self.accumulate
        own, left = divmod(self.slices, n)
        if left or own % self.accumulate:
            raise ValueError(
                f"reproducible mode cuts the batch into {self.slices} slices, which {n} devices do not share evenly "
                f"in {self.accumulate} turns. Give a number of slices that all your meshes divide."
            )
        if n > 1 and own & (own - 1):
            raise ValueError(
                f"reproducible mode adds {self.slices} slices in one binary tree, of which the {own} of each of {n} devices "
                f"are no branch: one device would round differently. "
                f"Give each 1, 2, 4, ... slices, such as {n << own.bit_length()}."
            )
        return own


class SliceTurn(NamedTuple):
    """A slice, its index among those of the device and of all devices, and the function that returns their weights."""

    slice: Slice
    turn: int
    number: int
    counts: Callable[[], list[Count]]

    @property
    def weight(self) -> Count:
        """Its weight."""
        return self.counts()[self.turn]


class SliceOutput(NamedTuple):
    """The results of one slice, and the buffers that it wrote."""

    found: LossSums
    aux: AuxLeaves
    written: dict[str, Tensor]


class DeviceResult(NamedTuple):
    """The results of one device's step.

    The loss and its weight; the metrics; the local shards of the gradients, None where no device has used a parameter; the
    buffers that changed; the order of units.
    """

    loss: Tensor
    weight: float
    aux: PyTree
    gradients: Gradients
    buffers: dict[str, Tensor]
    order: Order | None = None


class DeviceStep:
    """One device in one step.

    Args:
        how: options of the step.
        runtime: its parameters.
        params: returns them as the tree that the loss function takes.
        buffers: of the loss function.
        batch: the batch.
        place: index of the device among the local ones.
        key: of random draws; the same on all devices.
        scale: the loss scale.
    """

    def __init__(
        self,
        how: StepOptions,
        runtime: ParamRuntime,
        params: Callable[[], PyTree],
        buffers: Buffers,
        batch: Batch,
        place: int,
        key: int,
        scale: float,
    ) -> None:
        self.how, self.runtime, self.params, self.buffers, self.batch = how, runtime, params, buffers, batch
        self.place, self.key, self.scale, self.scaled = place, key, scale, scale
        self.group = self._along(batch.axes)  # the devices that have other samples
        self.turns = how.turns(1 if self.group is None else self.group.size)
        objected = objection(batch, self.turns, reproducible=how.slices is not None)
        self.collectives = CollectiveRecord(batch, objected, how.local)

    @property
    def everyone(self) -> Group | None:
        """All devices whose losses make up the objective; in the order in which slices are added up."""
        return self._along((*self.collectives.along, *self.batch.axes))

    def _along(self, axes: tuple[str, ...]) -> Group | None:
        return self.runtime.scope.group(axes, "value_and_grad") if axes else None

    def run(self) -> DeviceResult:
        """Run the step: forward and backward of the device's slices, then the reductions of all devices."""
        how, runtime = self.how, self.runtime
        turns = slice_turns(how, self.batch, self.place, self.turns, self.group, runtime.site)
        if how.slices is not None:
            parts = self._run_reproducible(turns)
        else:
            parts = self._accumulate(turns) if how.once else [self._one(turn) for turn in turns]
        return self._result(parts, [turn.slice for turn in turns])

    def _accumulate(self, turns: list[SliceTurn]) -> list[SliceOutput]:
        """Add the gradients of all slices up on the device, and reduce them with those of the last one."""
        *others, last = turns
        return [*(self._one(turn, Unit.accumulate) for turn in others), self._one(last)]

    def _run_reproducible(self, turns: list[SliceTurn]) -> list[SliceOutput]:
        """Add the gradients of all slices up in one binary tree, which the reduction continues over devices."""
        trees, parts = TreeAccumulator(self.runtime.units, self.runtime.reductions.as_reduced), list[SliceOutput]()
        for turn in turns:
            parts.append(self._one(turn, trees.add))
            trees.end_slice(turn.weight.share)
        for unit in self.runtime.units:
            unit.accumulated = trees.result(unit)
        self.runtime.reductions.end()
        return parts

    def _result(self, parts: list[SliceOutput], slices: list[Slice]) -> DeviceResult:
        mean, used, changed = self.together([part.found for part in parts], [part.written for part in parts])
        gradients = self.gradients(used, mean.weight)
        counts = [slice.rows if self.batch.cut else None for slice in slices]
        aux = combine_aux([part.aux for part in parts], counts, mean, self._rows)
        self.runtime.close()
        return DeviceResult(mean.loss, mean.weight, aux, gradients, changed, self.runtime.order)

    def _rows(self, rows: Sequence[Tensor]) -> Tensor:
        """Concatenate the slices' results that have a row per sample."""
        cut = () if self.batch.cut is None else self.batch.cut.axes
        same = tuple(axis for axis in (*self.collectives.along, *self.batch.axes) if axis not in cut)
        return collected(rows, self.batch, self._along(same), self._along(cut), self.runtime.site)

    def _one(self, turn: SliceTurn, keep: AccumulateInto | None = None) -> SliceOutput:
        """Take the forward and backward of one slice; `keep` takes its gradients if they are not to be reduced yet."""
        runtime, slice, number = self.runtime, turn.slice, turn.number
        runtime.begin()
        with self.running(number), slice_state(idle=not slice.rows):
            loss, buffers, aux = self._forward(slice)
            self.agree_on_axes(loss.device)
            count = turn.weight  # where the host waits, behind a forward that is launched
            share = count.share if self.how.slices is None else 1.0  # else sums are weighted, in 32 bits
            start = self.begin_backward(loss, share, keep, idle=not count.weight)
            if loss.requires_grad:
                self.differentiate([loss], [start])
        if keep is None:
            runtime.reductions.end()
        written = self.buffers.changed(self.place, buffers, loss.device)
        return SliceOutput(*slice_results(loss, count, aux, slice.samples, self.how.aux), written)

    def _forward(self, slice: Slice) -> tuple[Tensor, PyTree, PyTree]:
        how, runtime = self.how, self.runtime
        with torch.set_grad_enabled(how.backward):
            batch = self.batch.tree(slice.leaves, how.unit_options.compute)
            with runtime.saved.watch():
                loss, buffers, aux = self._called(batch)
            loss = one_loss(how, loss, slice)
        if runtime.fresh:
            refuse_unreached(loss)
        return loss, buffers, aux

    def agree_on_axes(self, near: torch.device) -> None:
        """Agree with all devices on the axes over which any of them called a collective, once."""
        known = None if self.runtime.fresh else self.runtime.expected.along
        self.collectives.agree(self.runtime.scope, known, near, self.runtime.site)

    @contextmanager
    def running(self, number: int) -> Generator[None]:
        """Draw as the slice of this number, and record collectives."""
        with keyed_random(self.key, 0, number), owning(self.batch.mesh.axis_names, self.collectives.notice):
            yield

    def begin_backward(self, loss: Tensor, share: float, keep: AccumulateInto | None, *, idle: bool) -> Tensor:
        """Begin the backward of a loss of this share; return its cotangent."""
        idle = idle and not self.collectives.mixed  # else other losses may depend on samples of weight 0
        self.runtime.begin_backward(self.everyone, self.collectives.along, keep, idle=idle)
        self.scaled = finite_scale(loss.dtype, self.scale)
        return torch.full_like(loss, share * self.scaled)

    def differentiate(self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
        """Run autograd, which calls the backwards of units, and runs parts of the forward again."""
        with self.runtime.reductions.collecting(), owning(self.batch.mesh.axis_names, self.collectives.notice):
            torch.autograd.grad(outputs, [self.runtime.anchor], cotangents, allow_unused=True)

    def _called(self, batch: PyTree) -> tuple[Any, PyTree, PyTree]:
        """Call the loss function; return the loss, buffers and metrics."""
        how = self.how
        given = self.buffers.part(self.place)
        params = self.params()
        try:
            result = followed(how.loss_fn)(params, *((given,) if how.has_buffers else ()), batch)
        except (TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            if not isinstance(error, FshardError):
                self._explain(error, params, batch)
            raise
        wanted = ["loss", *(["buffers"] if how.has_buffers else []), *(["aux"] if how.has_aux else [])]
        if len(wanted) == 1:
            return result, given, ()
        if not isinstance(result, tuple | list) or len(result) != len(wanted):
            size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
            raise ValueError(
                f"the loss function must return ({', '.join(wanted)}); got a {type(result).__name__}{size}."
            )
        named = dict(zip(wanted, result, strict=True))
        return named["loss"], named.get("buffers", given), named.get("aux", ())

    def _explain(self, error: Exception, params: PyTree, batch: PyTree) -> None:
        """Add the arguments of the loss function to its error, and the fix if they are of several dtypes."""
        buffers = "buffers, " if self.how.has_buffers else ""
        note = f"The loss function is called as loss_fn(params, {buffers}batch)"
        dtypes = {leaf.dtype for leaf in self.runtime.leaves if leaf.dtype.is_floating_point}
        paths, leaves, _ = flatten_with_paths(batch)
        other = [
            f"{named(('batch', *parts_of(path)))} is {str(x.dtype).removeprefix('torch.')}"
            for path, x in zip(paths, leaves, strict=True)
            if isinstance(x, Tensor) and x.dtype not in dtypes
        ]
        if other and len(dtypes) == 1 and self.how.unit_options.compute is None:
            dtype = str(dtypes.pop())
            note += f"; params are {dtype.removeprefix('torch.')}, {', '.join(other)}"
            note += f". Where they meet, convert the batch, x.to({dtype}), or give compute={dtype} for floating ones"
        if ("'str'" in str(error) or "not str" in str(error)) and not isinstance(batch, Mapping):
            note += (
                f". It indexes the batch, a {type(batch).__name__}, by a string: swap its arguments if params are last"
            )
        if "saved tensor hooks" in str(error):
            note += (
                ". Mark the part that calls torch.func.grad, vjp or jacrev: fs.with_unsharded_params(part, keep=True)"
            )
        error.add_note(f"{self.how.caller}: {note}.")

    def together(
        self, found: list[LossSums], changed: Sequence[Mapping[str, Tensor]]
    ) -> tuple[LossSums, list[float], dict[str, Tensor]]:
        """Average losses, metrics and buffers, and reduce the remaining gradients.

        Args:
            found: the losses and metrics of each slice.
            changed: the buffers that each has written.

        Returns also how many devices used each parameter, and the averaged buffers that were written.
        """
        runtime, paths = self.runtime, self.buffers.paths
        runtime.check_unchanged()
        runtime.end()
        if runtime.fresh and len(found) > 1:
            runtime.warn_of_attributes()
        written = [Written(one.weight, own) for one, own in zip(found, changed, strict=True)]
        along = self.collectives.along
        given, near, inputs = self.buffers.before(self.place), found[0].loss.device, self._inputs()
        wrote, others = written_paths(written), irregular(written, given)
        several_shapes = len({entry.path for entry in others}) < len(others)
        columns = {
            "marks": marks(runtime.sequence, [*inputs], *([others] if paths else [])),
            "wrote": [float(path in wrote) for path in paths],
            "several": [float(several_shapes)] if paths else [],
            "kept": [float(unit.accumulated is not None) for unit in runtime.units],
            "used": [*map(float, runtime.reductions.used)],
            "samples": [samples_mark(self.batch, self.place, self._along(along), fresh=runtime.fresh)],
        }
        row = [number for column in columns.values() for number in column]
        mean, row = averaged_results(found, row, self.everyone, self.collectives.many, runtime.site)
        rest = iter(row)
        sums = {name: [next(rest) for _ in column] for name, column in columns.items()}
        differing, used = unlike(sums["marks"]), sums["used"]
        self._refuse_different(inputs, differing)
        refuse_different_samples(self.how.caller, sums["samples"][0], along)
        if any(leaf.trained for leaf in runtime.leaves):
            refuse_detached([times for times, leaf in zip(used, runtime.leaves, strict=True) if leaf.trained])
        runtime.reductions.rest(sums["kept"], used)
        if not paths:
            return mean, used, {}
        agreed = not differing and not any(sums["several"])
        entries = entries_to_average(paths, sums["wrote"], written, given, agreed=agreed)
        return mean, used, averaged(written, entries, self.everyone, given, near, runtime.site)

    def _inputs(self) -> Inputs:
        runtime, key = self.runtime, None if self.how.slices is None else self.key
        pairs = zip(runtime.leaves, runtime.shards, strict=True)
        full = (x for leaf, x in pairs if not leaf.gather.steps and not leaf.used.entries)
        inputs = inputs_of(self.batch, key, full, fresh=runtime.fresh)
        if self.how.local and runtime.fresh and self.batch.alone and self.group is not None:
            pairs = zip(runtime.leaves, runtime.shards, strict=True)
            own = marks([digest(x) for leaf, x in pairs if not leaf.gather.steps and leaf.used.entries])
            (sums,) = summed((on_host(own, runtime.reductions.device),), self.group, runtime.site)
            inputs.leaves.append(self.group.index if unlike(sums.tolist()) else 0)  # then all devices raise
        return inputs

    def _refuse_different(self, inputs: Inputs, differing: Sequence[int]) -> None:
        """Raise if devices have different inputs (1), or else if they all-gathered different units (0)."""
        group = self.everyone
        if group is not None and 1 in differing:  # which may be the reason for different all-gathers
            inputs.refuse(self.how.caller, group, self.runtime.site)
        if group is not None and 0 in differing:
            raise MismatchError(
                f"{self.how.caller}: devices gathered different units, so one was given another's values. {CURE}"
            )

    def gradients(self, used: Sequence[float], weight: float = 1.0) -> Gradients:
        """Return the gradients; None for a parameter that no device used. `weight` is the total of all slices."""
        divisor = 1.0 if self.how.slices is None or self.batch.mesh.runtime == "abstract" else nonzero_weight(weight)
        divisor *= self.scaled / self.scale
        return self.runtime.reductions.gradients(used, divisor)


def slice_turns(
    how: StepOptions, batch: Batch, place: int, count: int, group: Group | None, site: Site
) -> list[SliceTurn]:
    """Return the slices of the device at index `place`, with their weights; `group` are the devices with the others."""
    slices = batch.slices(place, count, apart=how.slices is not None)
    weight = how.weight
    weights = [] if weight is None else [torch.stack([weight_of(weight(batch.tree(one.leaves))) for one in slices])]
    read = start_read(weights)
    counts = cache(lambda: counts_of(how, batch, slices, read(), group, site))
    first = 0 if group is None else group.index * count
    return [SliceTurn(slice, turn, first + turn, counts) for turn, slice in enumerate(slices)]


def counts_of(
    how: StepOptions, batch: Batch, slices: list[Slice], given: list[Tensor], group: Group | None, site: Site
) -> list[Count]:
    """Return the weights of a device's slices, `given` or their rows; `group` are the devices that have the others."""
    rows = [slice.rows for slice in slices]
    if not given:
        total = batch.total(len(slices)) if how.slices is None else 1
        return [Count(float(each), each / total) for each in rows]
    (found,) = given
    if found.is_meta:
        return [Count(1.0, 1.0)] * len(slices)
    weights = [weight * bool(each) for weight, each in zip(found.tolist(), rows, strict=True)]
    refuse_weights(weights)
    if how.slices is not None:
        return [Count(weight, weight) for weight in weights]
    (sums,) = summed((on_host([sum(weights)], found.device),), group, site)
    total = nonzero_weight(sums.item())
    return [Count(weight, weight / total) for weight in weights]


def one_loss(how: StepOptions, loss: Any, slice: Slice) -> Tensor:
    """Return the loss of a slice as one number, from the result of the loss function."""
    if isinstance(loss, Tensor) and loss.shape == (slice.samples,) and how.weight is None:
        loss = loss.mean()
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        cure = "Give has_aux=True" if isinstance(loss, tuple | list) else "Take its mean"
        raise ValueError(
            f"the loss function must return one number, or without weight= one for each sample; got {found}. {cure}."
        )
    if not loss.is_floating_point():
        raise ValueError(
            f"the loss function returned a number of {loss.dtype}, which has no gradient. Return a real floating one."
        )
    return loss.reshape(()) if loss.ndim else loss


def refuse_detached(used: Sequence[float]) -> None:
    """Raise if no device has used any of the trained parameters."""
    if not any(used):
        raise ValueError(
            "value_and_grad: the loss depends on no parameter that is trained, on any device, so nothing would be trained. Was "
            "it cut off by detach(), item(), no_grad() or torch.tensor(...), or are all parameters that it uses frozen?"
        )
