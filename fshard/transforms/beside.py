"""What a loss function returns beside the loss (`has_aux`), as it comes back from all devices.

    0-d, floating        the mean, weighted as the loss is
    0-d, whole           a count: the sum over all parts
    a row per sample     the rows of the whole batch, in its order: a `Sharded` that lies as the batch does, whole everywhere
                         where the batch is not cut evenly

So each is what the function would return for the whole batch, if that is a mean, a count or one row for each sample.  Devices
that hold the same samples, along other axes, are averaged; of rows that are whole numbers or bools, the first one's count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.differentiate import Bound
from fshard.mesh.layout import Layout
from fshard.mesh.moves import AllGather, Broadcast, Psum
from fshard.mesh.scope import Group
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.tree import PyTree, Structure, flatten_with_paths, unflatten
from fshard.source import Site
from fshard.transforms.batch import Batch
from fshard.transforms.patterns import named, parts_of


class Told(NamedTuple):
    """Leaves by their places in the tree: what is averaged, what is added up, and what there is for each sample."""

    means: dict[int, Tensor]
    counts: dict[int, Tensor]
    rows: dict[int, Tensor]
    structure: Structure


def told(aux: PyTree, samples: int | None, near: torch.device) -> Told:
    """Sort what a loss function returned of a slice of so many samples; raise naming all that is neither."""
    if isinstance(aux, tuple) and not aux:
        return _NOTHING
    paths, leaves, structure = flatten_with_paths(aux)
    found, wrong = Told({}, {}, {}, structure), list[str]()
    for place, (path, x) in enumerate(zip(paths, leaves, strict=True)):
        x = torch.full((), x, device=near) if isinstance(x, bool | int | float) else x
        kind = _complaint(x, samples)
        if kind is not None:
            wrong.append(f"{named(parts_of(path)) or 'it'} is {kind}")
        elif x.ndim:
            found.rows[place] = x.detach()
        else:
            (found.means if x.is_floating_point() else found.counts)[place] = x
    if wrong:
        raise LayoutError(
            f"value_and_grad: what is returned beside the loss is a number, or has a row for each sample; {'; '.join(wrong)}. "
            "Write x.float() for the share of a bool, or x.sum() for a count, and x.unbind() for several numbers."
        )
    return found


_NOTHING = Told({}, {}, {}, flatten_with_paths(())[2])


def _complaint(x: Any, samples: int | None) -> str | None:
    """Say what is wrong with a leaf."""
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    if x.ndim == 0:
        return "a bool" if x.dtype == torch.bool else "complex" if x.is_complex() else None
    if x.shape[0] == samples:
        return None
    return f"of shape {tuple(x.shape)}" + ("" if samples is None else f", but there are {samples} samples")


class Rows(NamedTuple):
    """One device's rows of a leaf, and how they lie."""

    own: Tensor
    shape: tuple[int, ...]
    layout: Layout


def collected(rows: Sequence[Tensor], batch: Batch, same: Group | None, group: Group | None, site: Site) -> Rows:
    """Put the rows of a device's slices together, those of each sample once.

    Args:
        rows: of each slice; a slice without samples has none.
        batch: that they are the samples of.
        same: the devices that hold the same samples.
        group: those that hold the others, along the axes that cut them.
        site: the line of the step.
    """
    x = torch.cat([*rows])
    if same is not None and same.size > 1:
        averaged = x.is_floating_point() or x.is_complex()
        (x,) = Bound(Psum() if averaged else Broadcast(0), same, site).run((x,))
        x = x / same.size if averaged else x
    cut = batch.cut
    if cut is None or group is None or cut.length % cut.parts == 0:
        return laid(x, batch)
    longest = -(-cut.length // cut.parts)
    filled = x.new_zeros(longest, *x.shape[1:])
    filled[: len(x)] = x
    (every,) = Bound(AllGather(0, True), group, site).run((filled,))
    pieces = [piece[:length] for piece, length in zip(every.split(longest), cut.lengths(), strict=True)]
    return laid(torch.cat(pieces), batch)


def laid(x: Tensor, batch: Batch) -> Rows:
    """Say how collected rows lie: as the batch does, or whole, where it is not cut evenly."""
    cut = batch.cut
    if cut is None or cut.length % cut.parts:
        return Rows(x, tuple(x.shape), Layout(batch.mesh))
    return Rows(x, (cut.length, *x.shape[1:]), Layout(batch.mesh, P(cut.axes)))


def put_together(means: dict[int, Tensor], rows: Sequence[dict[int, Rows]], structure: Structure) -> PyTree:
    """Return the tree: numbers, and rows as the devices at hand hold them."""
    whole = {
        place: Sharded(one.shape, one.layout, tuple(device[place].own for device in rows))
        for place, one in rows[0].items()
    }
    known = {**means, **whole}
    return unflatten(structure, [known[place] for place in range(structure.num_leaves)])
