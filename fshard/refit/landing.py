"""Keep what a target needs of each source, and copy it to the places that the loader would.

A device receives each element of a source that its target needs once, though the loader may copy it
to several places: tied weights, heads that are repeated. So the boxes of a trace are made disjoint.
What arrives is a flat tensor for each source, box after box, and is copied into the target only
when all of it is there.

    source w (4, 6)      target a is w[0:2], target b is w[1:3]
    received             boxes [0:2, 0:6] and [2:3, 0:6], 18 elements
    copied               to a from the first box, to b from both
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fshard.mesh.reshard.regions import Numbers, intersect, volume
from fshard.refit.origins import SourceBox
from fshard.refit.traced import Trace


class Landing(NamedTuple):
    """A box of a source, and where one tensor of the target stores its elements.

    Args:
        target: the name of the tensor in the target.
        slices: of that tensor.
        box: of the source.  (d, 2)
        along: for each dim of the target the dim of the source, or -1 where elements are repeated.
        flipped: for each dim of the target, True if it counts down along the source's.
        dtypes: the dtype of the source, then those of casts, one after another.
    """

    target: str
    slices: tuple[slice, ...]
    box: Numbers
    along: tuple[int, ...]
    flipped: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]

    def copy(self, portion: Numbers, values: Tensor, tensor: Tensor) -> None:
        """Copy the elements of a part of the box into the target's tensor.

        Args:
            portion: a box in `box`.  (d, 2)
            values: its elements, in the shape of the portion.
            tensor: of the target.
        """
        places: list[slice] = []
        for side, dim, is_flipped in zip(self.slices, self.along, self.flipped, strict=True):
            if dim < 0:
                places.append(side)
                continue
            start, stop = portion[dim].tolist()
            begin, end = self.box[dim].tolist()
            offset = end - stop if is_flipped else start - begin
            places.append(slice(side.start + offset, side.start + offset + stop - start))

        # The source's dims in the order of the target's: those that no dim is along have one index.
        used = [dim for dim in self.along if dim >= 0]
        unused = [*range(values.ndim)]
        for dim in used:
            unused.remove(dim)
        shape = [values.shape[dim] for dim in used]
        values = values.permute([*used, *unused]).reshape(shape)
        for number, dim in enumerate(self.along):
            if dim < 0:
                values = values.unsqueeze(number)
        flips = [number for number, is_flipped in enumerate(self.flipped) if is_flipped]
        for dtype in self.dtypes:
            values = values.to(dtype)
        tensor[tuple(places)].copy_(values.flip(flips))


class Needs(NamedTuple):
    """The elements of one source that a target needs.

    Args:
        boxes: disjoint boxes of the source.  (k, d, 2)
        dtype: the dtype in which its values may arrive: see `_arrival`.
        landings: where they are copied to.
    """

    boxes: Numbers
    dtype: torch.dtype
    landings: Sequence[Landing]

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(volume(self.boxes[:, None]).sum())


def needs_of(trace: Trace) -> dict[str, Needs]:
    """Return what the target of a trace needs, by the name of the source."""
    landings: dict[str, list[Landing]] = {}
    for name, leaf in trace.targets.items():
        if leaf.tied_to != name:
            continue  # its memory is that of another leaf
        for box in trace.boxes(name):
            landings.setdefault(box.source, []).extend(_landings_of(name, box))

    result: dict[str, Needs] = {}
    for source, landings_of_source in landings.items():
        dtype, count = _arrival([landing.dtypes for landing in landings_of_source])
        boxes = _disjoint([landing.box for landing in landings_of_source])
        left = [landing._replace(dtypes=landing.dtypes[count:]) for landing in landings_of_source]
        result[source] = Needs(boxes, dtype, left)
    return result


def _arrival(chains: Sequence[tuple[torch.dtype, ...]]) -> tuple[torch.dtype, int]:
    """Return the dtype in which a source can be sent, and how many dtypes of a chain that covers.

    It is that of the first cast, where all places have it and it is smaller: senders then cast.
    """
    source = chains[0][0]
    casts = {(chain + chain)[1] for chain in chains}  # of a chain without a cast, the source's
    if len(casts) == 1:
        (cast,) = casts
        if cast.itemsize < source.itemsize:
            return cast, 2
    return source, 1


def _landings_of(name: str, box: SourceBox) -> Iterator[Landing]:
    """Yield the landings of a box of the target.

    Where the target takes each second element of a source, or each third, each is one of its own.
    """
    lengths = [side.stop - side.start for side in box.target]
    strided: list[range] = []
    for length, step in zip(lengths, box.steps, strict=True):
        is_strided = abs(step) > 1 and length > 1
        strided.append(range(length) if is_strided else range(1))

    for indices in product(*strided):
        begin = [*box.begin] or [0]  # a scalar is a box of one dim
        end = [*begin]
        slices: list[slice] = []
        for number, index in enumerate(indices):
            dim = box.along[number]
            step = box.steps[number]
            start = box.target[number].start + index
            length = lengths[number] if len(strided[number]) == 1 else 1
            slices.append(slice(start, start + length))
            if dim >= 0:
                begin[dim] += index * step
                end[dim] = begin[dim] + (length - 1) * step
        first = np.minimum(begin, end)
        last = np.maximum(begin, end)
        region = np.stack([first, last + 1], -1)
        flipped = tuple([step < 0 for step in box.steps])
        yield Landing(name, tuple(slices), region, box.along, flipped, box.dtypes)


def _disjoint(boxes: Sequence[Numbers]) -> Numbers:
    """Return disjoint boxes with the elements of some boxes.  (d, 2) each -> (k, d, 2)"""
    unique = np.unique(np.stack(boxes), axis=0)
    if _are_disjoint(unique):
        return unique
    result: list[Numbers] = []
    for box in unique:
        left = [box]
        for other in result:
            parts: list[Numbers] = []
            for part in left:
                parts += _without(part, other)
            left = parts
        result += left
    return np.stack(result)


def _are_disjoint(boxes: Numbers) -> bool:
    """Return True if no two boxes have a common element.

    They overlap only if their sides along every dim do, so neighbours along one dim are compared.
    """
    order = np.argsort(boxes[:, 0, 0], kind="stable")
    boxes = boxes[order]
    for index, box in enumerate(boxes):
        following = boxes[index + 1 :]
        count = int(np.searchsorted(following[:, 0, 0], box[0, 1]))
        if count == 0:
            continue
        common = intersect(box[None, None], following[:count, None])
        if volume(common).any():
            return False
    return True


def _without(box: Numbers, other: Numbers) -> list[Numbers]:
    """Return the boxes of what is in one box and not in another.

    Along each dim what is before the other and what is behind it; then the next dim of the rest.
    """
    (common,) = intersect(box[None], other[None])
    if volume(common[None, None]).item() == 0:
        return [box]
    result: list[Numbers] = []
    rest = box.copy()
    for dim, (start, stop) in enumerate(common):
        for side in ((rest[dim, 0], start), (stop, rest[dim, 1])):
            if side[0] < side[1]:
                part = rest.copy()
                part[dim] = side
                result.append(part)
        rest[dim] = (start, stop)
    return result


@torch.no_grad()
def copy_into(
    needs: Mapping[str, Needs], received: Mapping[str, Tensor], target: Mapping[str, Tensor]
) -> None:
    """Copy what has arrived to all its places.

    Args:
        needs: of the target, by source.
        received: the elements of each source's boxes, one box after another.
        target: its tensors, by name.
    """
    for source, (boxes, dtype, landings) in needs.items():
        flat = received[source].to(dtype)  # it was sent uncast, if other devices cast it otherwise
        lengths = boxes[..., 1] - boxes[..., 0]
        ends = lengths.prod(1).cumsum()
        for landing in landings:
            common = intersect(landing.box[None, None], boxes[:, None])[:, 0]  # (k, d, 2)
            for index in np.flatnonzero(volume(common[:, None])).tolist():
                portion = common[index]
                shape = lengths[index].tolist()
                end = int(ends[index])
                box_values = flat[end - prod(shape) : end].view(shape)
                begin = boxes[index, :, :1]
                within = tuple([slice(*side) for side in (portion - begin).tolist()])
                landing.copy(portion, box_values[within], target[landing.target])
