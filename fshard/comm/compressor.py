"""`Compressor`: an approximate psum, as a pair of pure functions.

Every device calls `reduce` with its own tree, in `fs.run`, `shard_map` or an optimizer's update.
The sum over devices of what they `sent` is the `total`, so a device can keep what it has not sent:
gradients - sent.

    gradients (unreduced)  ──reduce──>  total (replicated)
                              └─────>  sent (unreduced, its sum is the total)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from fshard.mesh.collectives.api import axis_size, psum
from fshard.mesh.collectives.on_trees import Handle
from fshard.mesh.layout import Axes, PyTree, flatten_with_paths, unflatten
from fshard.optim.leaves import count_from_zero

Phases = Generator[Handle, Any, Any]
"""Yields the collectives that it has started, and is resumed with their results."""


class Reduced(NamedTuple):
    """The result of a compressed reduction.

    Args:
        total: on all devices.
        sent: the summand of this device in the total.
        state: for the next step.
    """

    total: PyTree
    sent: PyTree
    state: PyTree


class Compressor(NamedTuple):
    """An approximate psum as pure functions on trees of plain tensors: `init` and `phases`.

    Args:
        init: from a device's tree to its state.
        phases: from a device's gradients, its state and the axis to `Reduced`: a generator of
            started collectives. Its arguments are not modified. Along an axis of one device total
            and sent are the gradients.
        full: it needs full leaves, in their shapes: no shards.
        encoding: the form of the leaves, for `chain`; None: it cannot be chained.
        early: starts, from the state and the axis, what needs no gradients: `phases` then takes
            the handle too.
        totals: names of trees in its state, and in that of compressors inside it, that are equal on
            all devices along the axis. Other trees of the structure of the gradients are unreduced:
            another mesh keeps their sum alone.

    >>> import torch, fshard as fs
    >>> mesh, compress = fs.make_mesh({"data": 2}), fs.comm.top_k(0.1)
    >>> def main():
    ...     grads = [torch.eye(10)[fs.axis_index("data")] + 0.5 * torch.eye(10)[9]]
    ...     return compress.reduce(grads, compress.init(grads), "data").total
    >>> fs.run(main, mesh=mesh)[0]
    [tensor([1., 1., 0., 0., 0., 0., 0., 0., 0., 0.])]
    """

    init: Callable[[PyTree], PyTree]
    phases: Callable[..., Phases]
    full: bool = False
    encoding: Any = None
    early: Callable[[PyTree, Axes], Handle] | None = None
    totals: Sequence[str] = ()

    def start(self, grads: PyTree, state: PyTree, axis: Axes, *early: Handle) -> Handle:
        """Start a reduction, which `wait` of the handle finishes."""
        phases = torch.no_grad()(self.phases)
        return begin(phases(grads, state, axis, *early))

    def reduce(self, grads: PyTree, state: PyTree, axis: Axes, *early: Handle) -> Reduced:
        """Return the total of a device's gradients, what it sent, and its next state."""
        return self.start(grads, state, axis, *early).wait()


def begin(phases: Phases, result: Any = None) -> Handle:
    """Run phases up to the next collective that they wait for; `wait` of the handle runs the rest.

    Args:
        result: of the collective before, with which the phases are resumed.
    """
    try:
        handle = phases.send(result)
    except StopIteration as end:
        return Handle(None, end.value)

    def finish() -> Any:
        return begin(phases, handle.wait()).wait()

    return Handle(finish)


class FlatLeaf(NamedTuple):
    """A leaf to compress: its values in one dim, and a key that seeds its random draws."""

    x: Tensor
    key: str

    def generator(self, seed: int, *, device: int | None = None) -> torch.Generator:
        """Return a generator of this leaf and step, equal on all devices unless one is named.

        It draws where the leaf is: the host would wait for draws that it copies to a GPU.
        """
        digest = xxhash.xxh3_64_intdigest(f"{seed} {self.key} {device}".encode())
        memory = "cpu" if self.x.is_meta else self.x.device  # tensors without values have none
        return torch.Generator(memory).manual_seed(digest >> 1)  # a seed has 63 bits


def compressor(
    bytes_sent: Callable[[Tensor, int], float],
    leaf_phases: Callable[[Sequence[FlatLeaf], Axes], Phases],
    encoding: Any = None,
) -> Compressor:
    """Return a compressor of flat floating leaves, with their number of steps as its state.

    A leaf for which it sends no less than psum is reduced by psum.

    Args:
        bytes_sent: of each device, from a leaf and the number of devices.
        leaf_phases: reduces the other leaves to two lists: totals, and what this device sent.
        encoding: for `Compressor`.
    """

    def is_dense(x: Tensor, n: int) -> bool:
        bytes_of_psum = 2 * (n - 1) / n * x.nbytes
        return not x.is_floating_point() or bytes_sent(x, n) >= bytes_of_psum

    def init(params: PyTree) -> PyTree:
        return {"step": count_from_zero()}

    def phases(grads: PyTree, state: PyTree, axis: Axes) -> Phases:
        n = axis_size(axis)
        step = state["step"]
        if n == 1:
            return Reduced(grads, grads, {"step": step + 1})

        paths, leaves, structure = flatten_with_paths(grads)
        # Draws have no values on an abstract mesh, where the step has none either.
        key = "" if step.is_meta else f"{int(step)} "
        dense_leaves: dict[str, Tensor] = {}
        flat_leaves: list[FlatLeaf] = []
        for path, x in zip(paths, leaves, strict=True):
            if is_dense(x, n):
                dense_leaves[path] = x
            else:
                flat_leaves.append(FlatLeaf(x.reshape(-1), key + path))

        dense_handle = psum.start(dense_leaves, axis)
        flat_handle = begin(leaf_phases(flat_leaves, axis))
        dense_totals = yield dense_handle
        flat_totals, flat_sent = yield flat_handle

        def tree_of(dense: Mapping[str, Tensor], flat: Sequence[Tensor]) -> PyTree:
            """Return the tree of dense and flat leaves, in the gradients' shapes and dtypes."""
            flat_values = iter(flat)
            results: list[Tensor] = []
            for path, x in zip(paths, leaves, strict=True):
                if path in dense:
                    results.append(dense[path])
                else:
                    results.append(next(flat_values).view_as(x).to(x.dtype))
            return unflatten(structure, results)

        total = tree_of(dense_totals, flat_totals)
        sent = tree_of(dense_leaves, flat_sent)
        return Reduced(total, sent, {"step": step + 1})

    return Compressor(init, phases, encoding=encoding)
