"""Tensor parallelism: functions of a device's local tensors, for `shard_map` and for loss functions.

m = fs.tensor.mode("1d", "model", mesh)      # or "2d", "2.5d", "3d": which axes shard what
h = fs.tensor.mlp(fs.tensor.layer_norm(x, p["norm"], m), p["up"], p["down"], m)
loss = fs.tensor.cross_entropy(fs.tensor.linear(h, p["head"], m), labels, m.next)
"""

from fshard.tensor.layers import dropout, embedding, feature_embedding, layer_norm, mlp, rms_norm, self_attention
from fshard.tensor.linear_layers import classifier, column, linear, row
from fshard.tensor.loss import cross_entropy, to_next
from fshard.tensor.modes import Mode, mode

__all__ = [
    "Mode", "classifier", "column", "cross_entropy", "dropout", "embedding", "feature_embedding", "layer_norm", "linear",
    "mlp", "mode", "rms_norm", "row", "self_attention", "to_next",
]  # fmt: skip
