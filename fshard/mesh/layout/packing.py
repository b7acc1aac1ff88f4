"""Cast tensors, join them into a buffer and split it again: many tensors in one operation.

Each operation is a kernel on a GPU, and a block has a dozen parameters. A collective of three
tensors on two devices:

    xs        [a a]  [b]  [c c c]          packed for the wire: (elements,) or (n, elements) each
    join      [a a b c c c]                one operation, which casts them too
    gather    [a a b c c c]                a row of each device
              [A A B C C C]
    split     [a a]  [b]  [c c c]          one operation
              [A A]  [B]  [C C C]          each in memory of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

_torch: Any = torch  # for private functions

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def cast(xs: Sequence[MaybeTensor], dtypes: Sequence[torch.dtype]) -> list[MaybeTensor]:
    """Return tensors in these dtypes: copies where they have another, else themselves.

    None stays None.

    >>> xs = torch.ones(2), torch.ones(3, dtype=torch.int64)
    >>> [x.dtype for x in cast(xs, [torch.bfloat16, torch.int64])]
    [torch.bfloat16, torch.int64]
    """
    results: list[Any] = [*xs]
    copies: list[Tensor] = []
    sources: list[Tensor] = []
    for index, (x, dtype) in enumerate(zip(xs, dtypes, strict=True)):
        if x is not None and x.dtype is not dtype:
            # Each copy has memory of its own, not a place in a buffer: it is freed by itself, and
            # its address is aligned.
            results[index] = torch.empty_like(x, dtype=dtype)
            copies.append(results[index])
            sources.append(x)
    if copies:
        _copy_all(copies, sources)
    return results


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors, and cast them, in one operation for each pair of dtypes.

    On a GPU an operation on lists is one kernel only if each list has one dtype.
    """
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        group = groups.setdefault((target.dtype, source.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for targets_of_group, sources_of_group in groups.values():
        _torch._foreach_copy_(targets_of_group, sources_of_group)


def padded(xs: Sequence[Tensor], lengths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Pad flat tensors with zeros to these lengths, without recording it for autograd.

    Those that are padded share a buffer of a dtype; the others are the same tensors.

    >>> padded([torch.ones(2), torch.ones(1)], [2, 3], torch.float32)
    [tensor([1., 1.]), tensor([1., 0., 0.])]
    """
    results = [*xs]
    short = [index for index, x in enumerate(xs) if len(x) < lengths[index]]
    if not short:
        return results

    short_lengths = [lengths[index] for index in short]
    buffer = xs[0].new_zeros(sum(short_lengths), dtype=dtype)
    places = buffer.split(short_lengths)
    targets: list[Tensor] = []
    for index, place in zip(short, places, strict=True):
        results[index] = place
        targets.append(place[: len(xs[index])])  # what follows is the padding
    _copy_all(targets, [xs[index] for index in short])
    return results


def join_into(buffer: Tensor, xs: Sequence[Tensor]) -> None:
    """Copy tensors into a buffer of another dtype perhaps, side by side along the last dim."""
    if all([x.dtype is buffer.dtype for x in xs]):
        torch.cat([*xs], dim=-1, out=buffer)  # one kernel for rows, too
    else:
        places = buffer.split([x.shape[-1] for x in xs], dim=-1)
        _copy_all(places, xs)


def split(
    rows: Tensor, widths: Sequence[int], into: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Split rows into contiguous tensors, each in memory of its own; what follows them is padding.

    (n, elements) -> (n, width) each

    It is that of the contiguous tensors `into`, where they have as many elements, else new.

    >>> [part.tolist() for part in split(torch.arange(6).view(2, 3), [1, 2])]
    [[[0], [3]], [[1, 2], [4, 5]]]
    """
    parts: list[Tensor] = []
    for index, width in enumerate(widths):
        if into is not None and into[index].numel() == len(rows) * width:
            parts.append(into[index].view(len(rows), width))
        else:
            parts.append(rows.new_empty(len(rows), width))

    targets = [*parts]
    all_widths = [*widths]
    padding = rows.shape[1] - sum(widths)
    if padding:
        # Copied too: rows without it are not contiguous, and each part would be a kernel.
        targets.append(rows.new_empty(len(rows), padding))
        all_widths.append(padding)
    torch.split_with_sizes_copy(rows, all_widths, dim=1, out=targets)
    return parts


def copy_into(targets: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """Copy tensors into others of their shapes, where they are not the same memory already."""
    missing: list[Tensor] = []
    sources: list[Tensor] = []
    for target, x in zip(targets, xs, strict=True):
        if target.data_ptr() != x.data_ptr():
            missing.append(target)
            sources.append(x)
    _copy_all(missing, sources)
