"""`Compressor`: an approximate psum, as a pair of pure functions.

Every device calls `reduce` with its own tree, in `fs.run`, `shard_map` or an optimizer's update. The sum over devices of
what they `sent` is the `total`, so a device can keep what it has not sent: gradients - sent.

    gradients (unreduced)  ──reduce──>  total (replicated)
                              └─────>  sent (unreduced, its sum is the total)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from fshard.mesh.collectives.api import axis_size, psum
from fshard.mesh.layout import Axes, PyTree, flatten_with_paths, unflatten
from fshard.optim.leaves import count_from_zero


class Reduced(NamedTuple):
    """The result of a compressed reduction: the total on all devices, what this device sent of it, and the next state."""

    total: PyTree
    sent: PyTree
    state: PyTree


class Compressor(NamedTuple):
    """An approximate psum as pure functions on trees of plain tensors.

    Args:
        init: from a device's tree to its state.
        reduce: from a device's gradients, its state and the axis to the total, what this device sent, and the next state.
            Its arguments are not modified. Along an axis of one device both are the gradients.
        full: it needs full leaves, in their shapes: no shards.
        encoding: what `chain` joins; None: it cannot be chained.

    >>> import torch, fshard as fs
    >>> mesh, compress = fs.make_mesh({"data": 2}), fs.comm.top_k(0.1)
    >>> def main():
    ...     grads = [torch.eye(10)[fs.axis_index("data")] + 0.5 * torch.eye(10)[9]]
    ...     return compress.reduce(grads, compress.init(grads), "data").total
    >>> fs.run(main, mesh=mesh)[0]
    [tensor([1., 1., 0., 0., 0., 0., 0., 0., 0., 0.])]
    """

    init: Callable[[PyTree], PyTree]
    reduce: Callable[[PyTree, PyTree, Axes], Reduced]
    full: bool = False
    encoding: Any = None


class FlatLeaf(NamedTuple):
    """A leaf to compress: its values in one dim, and its key for random draws."""

    x: Tensor
    key: str

    def generator(self, seed: int, *, device: int | None = None) -> torch.Generator:
        """Return a generator of this leaf and step, alike on all devices unless one is named."""
        return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {self.key} {device}".encode()) >> 1)


class LeafTotals(NamedTuple):
    """The totals of compressed leaves, and what this device sent of each."""

    totals: Sequence[Tensor]
    sent: Sequence[Tensor]


def dense_bytes(x: Tensor, n: int) -> float:
    """Return the bytes that each of n devices sends in a psum."""
    return 2 * (n - 1) / n * x.nbytes


def compressor(
    bytes_sent: Callable[[Tensor, int], float],
    reduce_leaves: Callable[[Sequence[FlatLeaf], Axes], LeafTotals],
    encoding: Any = None,
) -> Compressor:
    """Return a compressor of flat floating leaves; a leaf that it would not make smaller is reduced by psum.

    Args:
        bytes_sent: the bytes that each device sends of a leaf, from the leaf and the number of devices.
        reduce_leaves: the reduction of the others, all at once.
        encoding: see `Compressor`.
    """

    def init(params: PyTree) -> PyTree:
        return {"step": count_from_zero()}

    @torch.no_grad()
    def reduce(grads: PyTree, state: PyTree, axis: Axes) -> Reduced:
        n, after = axis_size(axis), {"step": state["step"] + 1}
        if n == 1:
            return Reduced(grads, grads, after)
        paths, leaves, structure = flatten_with_paths(grads)
        is_shorter = [x.is_floating_point() and bytes_sent(x, n) < dense_bytes(x, n) for x in leaves]
        key = f"{int(state['step'])}"
        chosen = [
            FlatLeaf(x.reshape(-1), f"{key} {path}")
            for x, path, short in zip(leaves, paths, is_shorter, strict=True)
            if short
        ]
        dense = [x for x, short in zip(leaves, is_shorter, strict=True) if not short]
        dense_totals = iter(psum(dense, axis) if dense else [])
        reduced = reduce_leaves(chosen, axis) if chosen else LeafTotals([], [])
        totals, parts = iter(reduced.totals), iter(reduced.sent)
        total, sent = list[Tensor](), list[Tensor]()
        for x, short in zip(leaves, is_shorter, strict=True):
            total.append(next(totals).view(x.shape).to(x.dtype) if short else next(dense_totals))
            sent.append(next(parts).view(x.shape).to(x.dtype) if short else x)
        return Reduced(unflatten(structure, total), unflatten(structure, sent), after)

    return Compressor(init, reduce, encoding=encoding)
