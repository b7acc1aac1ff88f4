"""The optimizers that may be nested: `chain`, `by_label` and the wrappers take them."""

from __future__ import annotations

from typing import Any

from fshard.errors import OptimizerError
from fshard.optim.contract import Optimizer
from fshard.optim.per_device.run import on_arrays
from fshard.optim.sharded.optimizer import ShardedOptimizer


def inner_optimizer(opt: Any, caller: str) -> Optimizer:
    """Return an optimizer of arrays to nest in another; raise if it must be the outermost."""
    check_not_sharded(opt, caller)
    inner = on_arrays(opt, caller)
    if inner.loss_scale is not None:
        raise OptimizerError(
            f"{caller}: loss_scaled must not be nested, since what is around it would get "
            "gradients that are still scaled. Put one loss_scaled around all of it."
        )
    return inner


def check_not_sharded(opt: Any, caller: str) -> None:
    """Raise if an optimizer is sharded: one around it would work on other shards."""
    if isinstance(opt, ShardedOptimizer):
        raise OptimizerError(
            f"{caller}: a partitioned optimizer must not be nested, since what is around it would "
            "work on other shards than it does. Partition the outermost: "
            "fs.partition_optimizer(fs.optim.chain(...), ...)."
        )
