"""A check of optimizers: does an element's update depend on that element alone, or on that leaf alone?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard.mesh.layout import Layout, Mesh, PyTree
from fshard.optim.contract import ArrayOptimizer, Optimizer, elementwise_leaves, pure_step
from fshard.optim.leaves import Leaf, Leaves, trainable
from fshard.optim.per_device import array_optimizer
from fshard.testing.certificate import first_of
from fshard.testing.certify.runs import shards_of
from fshard.testing.verdicts import Comparison, judge, largest
from fshard.transforms.patterns import named, parts_of


def check_elementwise(
    opt: Optimizer, params: PyTree = None, *, steps: int = 3, seed: int = 0
) -> None:
    """Train with an optimizer on full tensors, and partitioned over virtual meshes of several sizes; raise if they differ.

    With `elementwise=True` each device updates a flat shard of every leaf, else the leaves that it owns (in a `by_label`,
    leaf by leaf). The gradients are random and differ in size from shard to shard. An optimizer may communicate, as
    `clip_by_global_norm` does, and `global_norm` in an own `update`. It may draw: all runs begin with one random state,
    and draws of an own `update` like a gradient, a parameter or state must be those on full tensors.

    Args:
        opt: an optimizer, or a transformation of gradients; if of arrays, elementwise for some leaves.
        params: default: a few leaves of odd shapes.
        steps: number of steps.
        seed: of the gradients, and of the optimizer's draws.

    >>> import torch, fshard as fs
    >>> check_elementwise(fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(0.1)))
    >>> check_elementwise(fs.optim.lamb(0.1)._replace(elementwise=True))  # it sums norms over the shards
    >>> def update(grads, state, params):
    ...     return {name: -g / g.norm() for name, g in grads.items()}, state
    >>> check_elementwise(fs.optim.Optimizer(lambda params: (), update, elementwise=True), {"w": torch.zeros(4)}, steps=1)
    Traceback (most recent call last):
    ...
    AssertionError: ...
    """
    draw = torch.Generator().manual_seed(seed)
    shapes = {"bias": (7,), "matrix": (6, 5), "scale": (), "stack": (2, 3, 4)}
    params = (
        {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        if params is None
        else params
    )
    promised, leaves = elementwise_leaves(opt.elementwise, params), Leaves.of(params)
    names = [named(parts_of(path)) or "params" for path in leaves.paths]
    if isinstance(opt, ArrayOptimizer) and not any(promised):
        raise fs.errors.OptimizerError(
            "check_elementwise: this optimizer is not elementwise, so there is nothing to compare."
        )
    opt = array_optimizer(opt, "check_elementwise")

    def uneven(x: Any) -> Any:
        """Draw a gradient whose elements grow from the first to the last, by up to 16 times."""
        if not isinstance(x, Tensor) or not trainable(x):
            return None
        sizes = torch.logspace(-2, 2, x.numel(), base=4).reshape(x.shape)
        return (torch.randn(x.shape, generator=draw) * sizes).to(x)

    grads = [leaves.mapped(uneven) for _ in range(steps)]
    expected = _train(opt, params, grads, seed)
    for axes in ({"data": 2}, {"data": 3}, {"data": 2, "model": 2}, {"data": 7}):
        mesh = Mesh(tuple(axes.items()), "virtual", "cpu")
        parted = fs.partition_optimizer(opt, mesh=mesh, axis=mesh.axis_names, stage=1)
        replicated, shards = Layout(mesh), parted.gradients(Layout(mesh))
        gradients = [_put(tree, shards) for tree in grads]
        trained = _train(parted, _put(params, replicated), gradients, seed)
        comparisons = list[Comparison]()
        for step, (sharded, serial) in enumerate(zip(trained, expected, strict=True)):
            for name, x, y in zip(names, sharded, serial, strict=True):
                if x is not None and y is not None:
                    bound = (1e-3 if y.dtype.itemsize < 4 else 1e-5) * largest(y)
                    comparisons.append(Comparison(step, name, "parameter", shards_of(x), y, bound))
        if (first := first_of(judge(comparisons, mesh.size))) is not None:
            difference = f"got another {first.leaf}, {first.reason}"
            raise AssertionError(
                f"the optimizer has elementwise=True, but on {mesh.size} flat shards {difference}. Use elementwise=False, "
                "or communicate with the other shards, as clip_by_global_norm does."
                if dict(zip(names, promised, strict=True))[first.leaf]
                else f"the optimizer must update each leaf by itself, but with leaves at {mesh.size} owners {difference}. "
                "Take a norm of all by fs.optim.global_norm(tree)."
            )


def _put(tree: PyTree, layout: Layout) -> PyTree:
    return Leaves.of(tree).mapped(
        lambda x: fs.device_put(x, layout) if isinstance(x, Tensor) else x
    )


def _train(opt: Any, params: PyTree, grads: list[PyTree], seed: int) -> list[list[Leaf]]:
    step, snapshots = pure_step(opt), list[list[Leaf]]()
    with fs.keyed_random(seed):
        state = opt.init(params)
        for tree in grads:
            params, state = step(tree, state, params)
            snapshots.append(Leaves.of(params).leaves)
    return snapshots
