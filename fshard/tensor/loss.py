"""Cross-entropy of logits that are sharded over the vocabulary, which are never gathered.

With z the logits less their largest, over all devices, and S = sum of exp z over the vocabulary:

    -log p[c] = log S - z[c]

Devices add up S, z[label] and, for label smoothing, the weighted sum of z, in one psum of three numbers per token.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fshard.mesh.collectives.api import all_gather, axis_index, pmax, psum
from fshard.mesh.layout import Axes, as_axes
from fshard.mesh.layout.arithmetic import WIDER
from fshard.tensor.modes import Mode, own_range


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
    """Compute torch's cross-entropy of sharded logits; means and sums are over the tokens of all devices.

    `mode` is that of the logits, (tokens, ..., vocabulary): the next of the linear layer's. Labels, (tokens, ...), are
    equal along the axes of the vocabulary (see `to_next`); the weight of all classes is replicated. Pass the global size
    of the `vocabulary` if the devices do not divide it. `also` are more axes that shard tokens, such as those of the
    batch or the sequence. The other arguments are torch's; reduction="none" gives this device's tokens.

    16-bit logits give a loss in float32.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f'cross_entropy: reduction must be "mean", "sum" or "none"; got {reduction!r}.'
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"cross_entropy: label_smoothing must be between 0 and 1; got {label_smoothing!r}."
        )
    start, classes = own_range(vocabulary, logits.shape[-1], mode.hidden, mode.size(), "vocabulary")
    counts = labels != ignore_index
    labels = labels.masked_fill(~counts, 0)
    logits = logits.to(WIDER.get(logits.dtype, logits.dtype))
    largest = logits.detach().amax(-1, keepdim=True)
    z = logits - (pmax(largest, mode.hidden) if mode.hidden else largest)
    rows = labels - start
    absent = (rows < 0) | (rows >= z.shape[-1])
    at_label = z.gather(-1, rows.masked_fill(absent, 0)[..., None])[..., 0].masked_fill(absent, 0)
    own_weight = 1 if weight is None else weight[start : start + z.shape[-1]]
    sums = z.exp().sum(-1), at_label, *([(z * own_weight).sum(-1)] if label_smoothing else [])
    total, at_label, *smooth = psum(sums, mode.hidden) if mode.hidden else sums
    of_label = counts.to(z.dtype) if weight is None else weight[labels] * counts
    losses = ((1 - label_smoothing) * (total.log() - at_label) * of_label).masked_fill(~counts, 0)
    if smooth:
        weights = classes if weight is None else weight.sum()
        losses = losses + label_smoothing / classes * (total.log() * weights - smooth[0]) * counts
    if reduction == "none":
        return losses
    loss, count = losses.sum(), of_label.sum()
    if axes := (*mode.tokens, *as_axes(also)):
        loss, count = psum((loss, count), axes)
    return loss if reduction == "sum" else loss / count


def to_next(tokens: Tensor, mode: Mode) -> Tensor:
    """Reshard labels, or anything with a row per token, from the tokens of `mode` to those of `mode.next`.

    Only in 3d they differ: there a linear layer moves tokens from one axis to another.
    """
    if mode.kind != "3d":
        return tokens
    rows = all_gather(tokens, mode.next.hidden, dim=0)
    return rows.chunk(mode.size(mode.hidden))[axis_index(mode.hidden)]
