"""Cross-entropy of logits that are sharded over the vocabulary, which are never gathered.

With z the logits less their largest, over all devices, and S = sum of exp z over the vocabulary:

    -log p[c] = log S - z[c]

Label smoothing of e replaces the label's weight by 1 - e, and gives each of the C classes e / C:

    loss = (1 - e) w[label] (log S - z[label]) + e / C (log S sum of w - sum of w z)

So devices add up S, z[label] and, for label smoothing, the sum of w z: one psum of three numbers
per token.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fshard.mesh.collectives.api import all_gather, axis_index, pmax, psum
from fshard.mesh.layout import Axes, as_axes
from fshard.mesh.layout.arithmetic import WIDER
from fshard.tensor.modes import Mode, shard_range


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    mode: Mode,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    vocabulary: int | None = None,
    also: Axes = (),
) -> Tensor:
    """Compute torch's cross-entropy of sharded logits, over the tokens of all devices.

    16-bit logits give a loss in float32. The arguments that are not listed are torch's;
    reduction="none" gives this device's tokens.

    Args:
        logits: (tokens, ..., vocabulary), of `mode`.
        labels: (tokens, ...), equal along the axes of the vocabulary: see `to_next`.
        mode: of the logits, so the next of the linear layer's.
        weight: of all classes, replicated.
        vocabulary: its global size, if the devices do not divide it.
        also: more axes that shard tokens, such as those of the batch or the sequence.
    """
    _validate(label_smoothing, reduction)
    start, classes = shard_range(
        vocabulary, logits.shape[-1], mode.hidden, mode.size(), "vocabulary"
    )
    is_counted = labels != ignore_index
    labels = labels.masked_fill(~is_counted, 0)  # a valid class, whose loss is dropped below

    logits = logits.to(WIDER.get(logits.dtype, logits.dtype))
    largest = logits.detach().amax(-1, keepdim=True)  # the loss does not depend on its value
    if mode.hidden:
        largest = pmax(largest, mode.hidden)
    z = logits - largest

    z_label = _at_label(z, labels - start)
    sums = [z.exp().sum(-1), z_label]
    if label_smoothing:
        sums.append(_weighted_sum(z, weight, start))
    total, z_label, *smooth = psum(tuple(sums), mode.hidden) if mode.hidden else sums

    if weight is None:
        label_weight = is_counted.to(z.dtype)
    else:
        label_weight = weight[labels] * is_counted
    losses = (1 - label_smoothing) * (total.log() - z_label) * label_weight
    if smooth:
        weights = classes if weight is None else weight.sum()
        losses = losses + label_smoothing / classes * (total.log() * weights - smooth[0])
    # The loss of an ignored token may not be finite, so a factor of 0 would not do.
    losses = losses.masked_fill(~is_counted, 0)
    if reduction == "none":
        return losses

    loss = losses.sum()
    count = label_weight.sum()
    axes = (*mode.tokens, *as_axes(also))
    if axes:
        loss, count = psum((loss, count), axes)
    return loss if reduction == "sum" else loss / count


def _validate(label_smoothing: float, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f'cross_entropy: reduction must be "mean", "sum" or "none"; got {reduction!r}.'
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"cross_entropy: label_smoothing must be between 0 and 1; got {label_smoothing!r}."
        )


def _at_label(z: Tensor, rows: Tensor) -> Tensor:
    """Return the logit of each token's label, 0 where another device has it.

    `rows` are the labels, counted from the first class of this device.
    """
    is_elsewhere = (rows < 0) | (rows >= z.shape[-1])
    rows = rows.masked_fill(is_elsewhere, 0)
    return z.gather(-1, rows[..., None])[..., 0].masked_fill(is_elsewhere, 0)


def _weighted_sum(z: Tensor, weight: Tensor | None, start: int) -> Tensor:
    """Return the sum of this device's logits, by the weights of their classes."""
    if weight is None:
        return z.sum(-1)
    return (z * weight[start : start + z.shape[-1]]).sum(-1)


def to_next(tokens: Tensor, mode: Mode) -> Tensor:
    """Reshard labels, or any rows per token, from the tokens of `mode` to those of `mode.next`.

    Only in 3d they differ: there a linear layer moves tokens from one axis to another.
    """
    if mode.kind != "3d":
        return tokens
    rows = all_gather(tokens, mode.next.hidden, dim=0)
    return rows.chunk(mode.size(mode.hidden))[axis_index(mode.hidden)]
