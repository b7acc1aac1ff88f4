"""Tensor and sequence parallelism.

Functions of a device's local tensors, for `shard_map` and for loss functions:

m = fs.tensor.mode("1d", "model", mesh)      # or "2d", "2.5d", "3d": which axes shard what
h = fs.tensor.mlp(fs.tensor.layer_norm(x, p["norm"], m), p["up"], p["down"], m)
loss = fs.tensor.cross_entropy(fs.tensor.linear(h, p["head"], m), labels, m.next)
y = fs.tensor.attention(q, k, v, "seq", how="zigzag")      # tokens sharded over "seq"

Or of any module, planned and run on arrays: `fs.tensor_parallel`.
"""

from fshard.mesh.layout.arithmetic import zigzag
from fshard.tensor.layer_plans import LayerPlan
from fshard.tensor.layers import (
    dropout,
    embedding,
    feature_embedding,
    layer_norm,
    mlp,
    rms_norm,
    self_attention,
)
from fshard.tensor.linear_layers import classifier, column, linear, row
from fshard.tensor.loss import cross_entropy, to_next
from fshard.tensor.modes import Mode, mode
from fshard.tensor.plan import Plan, tensor_parallel
from fshard.tensor.sequence import attention, shard_sequence, token_mean

__all__ = [
    "LayerPlan", "Mode", "Plan", "attention", "classifier", "column", "cross_entropy", "dropout", "embedding",
    "feature_embedding", "layer_norm", "linear", "mlp", "mode", "rms_norm", "row",
    "self_attention", "shard_sequence", "tensor_parallel", "to_next", "token_mean", "zigzag",
]  # fmt: skip
