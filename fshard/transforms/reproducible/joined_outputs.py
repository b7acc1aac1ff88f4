"""The outputs of slices, joined: a module runs once for each slice of the batch, and the criterion of a loop once.

    slice 0   [0 1]   mean 2.0                 [0 1 2]   mean 3.0        the criterion's
    slice 1   [2]     mean 5.0       ──>                                 own graph begins here

Outputs are joined and detached from the graphs of the slices. The backward splits the cotangent of each joined output;
each slice then has its own backward, whose gradients are added in the tree of `TreeAccumulator`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import (
    tree_flatten,
    tree_unflatten,
)  # it has the output classes of other libraries' modules

from fshard.transforms.fsdp.graph_checks import raise_foreign_backward, validate_joined


class JoinedOutput(NamedTuple):
    """A tensor of the output, joined: samples are concatenated, means averaged."""

    joined: Tensor  # the start of the criterion's graph
    parts: Sequence[Tensor]  # of each slice
    rows: Sequence[int]  # number of samples of each slice

    def split(self, g: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Split the cotangent; return the part and the cotangent of each slice."""
        if self.joined.ndim:
            columns = zip(self.parts, g.split([*self.rows]), self.rows, strict=True)
            return [(x[:count], sample.clone()) for x, sample, count in columns]
        return [
            (x, g * (count / sum(self.rows)))
            for x, count in zip(self.parts, self.rows, strict=True)
        ]


def join(outputs: Sequence[Any], rows: Sequence[int]) -> tuple[Any, list[JoinedOutput]]:
    """Join the outputs of slices with these numbers of samples; return also the tensors that need a gradient.

    >>> joined, _ = join([(torch.zeros(2), torch.tensor(1.0)), (torch.ones(1), torch.tensor(4.0))], [2, 1])
    >>> joined
    (tensor([0., 0., 1.]), tensor(2.))
    """
    if not any(rows):  # an idle device: a neighbour's sample with weight 0
        rows = [1, *rows[1:]]
    leaves, structure = tree_flatten(outputs[0])
    columns = [*zip(leaves, *(tree_flatten(output)[0] for output in outputs[1:]), strict=True)]
    results, recorded = list[Any](), list[JoinedOutput]()
    for column in columns:
        x = _join_slices(column, rows)
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_post_accumulate_grad_hook(lambda _: raise_foreign_backward())
            recorded.append(JoinedOutput(x, column, rows))
            x = x.view_as(x)
        results.append(x)
    return tree_unflatten(results, structure), recorded


def _join_slices(column: Sequence[Any], rows: Sequence[int]) -> Any:
    first, pairs = column[0], [*zip(column, rows, strict=True)]
    if not isinstance(first, Tensor):
        return first
    if first.ndim and all(len(x) == max(row, 1) for x, row in pairs):
        joined = torch.cat([x.detach()[:row] for x, row in pairs])
    elif not first.ndim and first.is_floating_point():
        joined = torch.stack([x.detach() * (row / sum(rows)) for x, row in pairs]).sum()
    else:
        raise ValueError(
            f"reproducible=True: the module must return a row for each sample, or a mean over samples; got a tensor of "
            f"shape {tuple(first.shape)} for a slice of {rows[0]} samples."
        )
    return joined.requires_grad_(any(x.requires_grad for x in column))


def split_cotangents(
    loss: Tensor, start: Tensor, outputs: Sequence[JoinedOutput], *, retain_graph: bool = False
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield for each slice its outputs with their cotangents; `start` is the cotangent of the loss."""
    joined = [output.joined for output in outputs]
    validate_joined(loss, joined)
    cotangents = ()
    if outputs:
        cotangents = torch.autograd.grad(
            loss, joined, start, retain_graph=retain_graph, allow_unused=True
        )
    reached = [
        output.split(g) for output, g in zip(outputs, cotangents, strict=True) if g is not None
    ]
    if not reached:
        raise ValueError(
            "backward: the loss must depend on what this model has returned; got another model's."
        )
    yield from map(list, zip(*reached, strict=True))
