"""Sequences whose tokens are sharded over a mesh axis: attention, the order of tokens, means over tokens."""

from fshard.tensor.sequence import attention, gather_sequence, scatter_sequence, shard_sequence, token_mean, zigzag

__all__ = ["attention", "gather_sequence", "scatter_sequence", "shard_sequence", "token_mean", "zigzag"]
