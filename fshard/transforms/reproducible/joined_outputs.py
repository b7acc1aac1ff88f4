"""The outputs of slices, joined.

A module runs once for each slice of the batch, and the criterion of a loop once.

    slice 0   [0 1]   mean 2.0                 [0 1 2]   mean 3.0        the criterion's
    slice 1   [2]     mean 5.0       ──>                                 own graph begins here

Outputs are joined and detached from the graphs of the slices. The backward splits the cotangent of
each joined output; each slice then has its own backward, whose gradients are added in the tree of
`TreeAccumulator`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# torch's pytree, which knows the output classes of other libraries' modules.
from torch.utils._pytree import tree_flatten, tree_unflatten

from fshard.transforms.fsdp.graph_checks import raise_foreign_backward, validate_joined


class JoinedOutput(NamedTuple):
    """A tensor of the output, joined: samples are concatenated, means averaged."""

    joined: Tensor  # the start of the criterion's graph
    parts: Sequence[Tensor]  # of each slice
    rows: Sequence[int]  # number of samples of each slice

    def split(self, g: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Split the cotangent; return the part and the cotangent of each slice."""
        slices: list[tuple[Tensor, Tensor]] = []
        if self.joined.ndim:
            samples = g.split([*self.rows])
            for part, sample_g, count in zip(self.parts, samples, self.rows, strict=True):
                # The part of an idle slice has a neighbour's row.
                slices.append((part[:count], sample_g.clone()))
            return slices
        total = sum(self.rows)
        for part, count in zip(self.parts, self.rows, strict=True):
            slices.append((part, g * (count / total)))
        return slices


def join(outputs: Sequence[Any], rows: Sequence[int]) -> tuple[Any, list[JoinedOutput]]:
    """Join the outputs of slices with these numbers of samples.

    Returns also the joined tensors that need a gradient.

    >>> outputs = [(torch.zeros(2), torch.tensor(1.0)), (torch.ones(1), torch.tensor(4.0))]
    >>> joined, _ = join(outputs, [2, 1])
    >>> joined
    (tensor([0., 0., 1.]), tensor(2.))
    """
    if not any(rows):  # an idle device: a neighbour's sample with weight 0
        rows = [1, *rows[1:]]
    leaves, structure = tree_flatten(outputs[0])
    other_rows = [tree_flatten(output)[0] for output in outputs[1:]]
    results: list[Any] = []
    recorded: list[JoinedOutput] = []
    for column in zip(leaves, *other_rows, strict=True):
        x = _join_slices(column, rows)
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_post_accumulate_grad_hook(lambda _: raise_foreign_backward())
            recorded.append(JoinedOutput(x, column, rows))
            x = x.view_as(x)  # the criterion may write to it in place, which no leaf allows
        results.append(x)
    return tree_unflatten(results, structure), recorded


def _join_slices(column: Sequence[Any], rows: Sequence[int]) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        return first
    pairs = [*zip(column, rows, strict=True)]
    has_rows = first.ndim > 0 and all(len(x) == max(count, 1) for x, count in pairs)
    is_mean = first.ndim == 0 and first.is_floating_point()
    if has_rows:
        joined = torch.cat([x.detach()[:count] for x, count in pairs])
    elif is_mean:
        total = sum(rows)
        joined = torch.stack([x.detach() * (count / total) for x, count in pairs]).sum()
    else:
        raise ValueError(
            "reproducible=True: the module must return a row for each sample, or a mean over "
            f"samples; got a tensor of shape {tuple(first.shape)} for a slice of {rows[0]} samples."
        )
    return joined.requires_grad_(any(x.requires_grad for x in column))


def split_cotangents(
    loss: Tensor, start: Tensor, outputs: Sequence[JoinedOutput], *, retain_graph: bool = False
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield for each slice the outputs with their cotangents.

    `start` is the cotangent of the loss.
    """
    joined = [output.joined for output in outputs]
    validate_joined(loss, joined)
    cotangents = ()
    if outputs:
        cotangents = torch.autograd.grad(
            loss, joined, start, retain_graph=retain_graph, allow_unused=True
        )
    by_output: list[list[tuple[Tensor, Tensor]]] = []
    for output, g in zip(outputs, cotangents, strict=True):
        if g is not None:
            by_output.append(output.split(g))
    if not by_output:
        raise ValueError(
            "backward: the loss must depend on what this model has returned; got another model's."
        )
    for row in zip(*by_output, strict=True):
        yield [*row]
