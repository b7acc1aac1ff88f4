"""`check_elementwise`: does an update of an optimizer depend on its element or leaf alone?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard.mesh.layout import Layout, Mesh, PyTree
from fshard.optim.contract import Optimizer, pure_step
from fshard.optim.leaves import Leaf, Leaves, trainable
from fshard.optim.per_device.run import on_arrays
from fshard.optim.sharding import ShardKind, kinds_of
from fshard.rounding import largest
from fshard.testing.certificate import first_of
from fshard.testing.certify.runs import shards_of
from fshard.testing.verdicts import Comparison, judge
from fshard.transforms.patterns import named, parts_of


def check_elementwise(
    opt: Optimizer, params: PyTree = None, *, steps: int = 3, seed: int = 0
) -> None:
    """Train with an optimizer on full tensors, and on shards; raise if the results differ.

    The shards are those of virtual meshes of several sizes. With `sharding="flat"` each device
    updates a flat shard of every leaf, else the leaves that it owns (in a `by_label`, leaf by
    leaf). The gradients are random and differ in size from shard to shard. An optimizer may
    communicate, as `clip_by_global_norm` does, and `global_norm` in an own `update`. It may draw:
    all runs begin with one random state, and draws of an own `update` like a gradient, a parameter
    or state must be those on full tensors.

    Args:
        opt: an optimizer, or a transformation of gradients; if of `fs.optim`, flat for some leaves.
        params: default: a few leaves of odd shapes.
        steps: number of steps.
        seed: of the gradients, and of the optimizer's draws.

    >>> import torch, fshard as fs
    >>> from dataclasses import replace
    >>> check_elementwise(fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(0.1)))
    >>> lamb = replace(fs.optim.lamb(0.1), sharding="flat")
    >>> check_elementwise(lamb)  # it sums norms over the shards
    >>> def update(grads, state, params):
    ...     return {name: -g / g.norm() for name, g in grads.items()}, state
    >>> opt = fs.optim.Optimizer(lambda params: (), update, sharding="flat")
    >>> check_elementwise(opt, {"w": torch.zeros(4)}, steps=1)
    Traceback (most recent call last):
    ...
    AssertionError: ...
    """
    draw = torch.Generator().manual_seed(seed)
    shapes = {"bias": (7,), "matrix": (6, 5), "scale": (), "stack": (2, 3, 4)}
    if params is None:
        params = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    leaves = Leaves.of(params)
    names = [named(parts_of(path)) or "params" for path in leaves.paths]
    arrays = on_arrays(opt, "check_elementwise")
    kind_by_name = dict(zip(names, kinds_of(arrays.sharding, leaves), strict=True))
    # With leaves at owners there is something to compare of a pair (init, update) of the user, which
    # may couple them. The optimizers of fshard, which `on_arrays` returns as they are, do not.
    is_of_fshard = arrays is opt
    if is_of_fshard and "flat" not in kind_by_name.values():
        raise fs.errors.OptimizerError(
            "check_elementwise: this optimizer is not elementwise, so there is nothing to compare."
        )

    def uneven(x: Any) -> Any:
        """Draw a gradient whose elements grow from the first to the last, by up to 16 times."""
        if not isinstance(x, Tensor) or not trainable(x):
            return None
        sizes = torch.logspace(-2, 2, x.numel(), base=4).reshape(x.shape)
        return (torch.randn(x.shape, generator=draw) * sizes).to(x)

    grads = [leaves.mapped(uneven) for _ in range(steps)]
    expected = _train(arrays, params, grads, seed)
    for axes in ({"data": 2}, {"data": 3}, {"data": 2, "model": 2}, {"data": 7}):
        mesh = Mesh(tuple(axes.items()), "virtual", "cpu")
        sharded = fs.partition_optimizer(arrays, mesh=mesh, axis=mesh.axis_names, stage=1)
        layout = sharded.gradients(Layout(mesh))
        gradients = [_put(tree, layout) for tree in grads]
        trained = _train(sharded, _put(params, Layout(mesh)), gradients, seed)
        comparisons = _comparisons(names, trained, expected)
        difference = first_of(judge(comparisons, mesh.size))
        if difference is not None:
            text = f"got another {difference.leaf}, {difference.reason}"
            raise AssertionError(_explained(kind_by_name[difference.leaf], mesh.size, text))


def _comparisons(
    names: list[str], trained: list[list[Leaf]], expected: list[list[Leaf]]
) -> list[Comparison]:
    """Return the comparisons of the parameters after each step."""
    comparisons: list[Comparison] = []
    for step, (sharded, serial) in enumerate(zip(trained, expected, strict=True)):
        for name, x, y in zip(names, sharded, serial, strict=True):
            if x is None or y is None:
                continue
            bound = (1e-3 if y.dtype.itemsize < 4 else 1e-5) * largest(y)
            comparisons.append(Comparison(step, name, "parameter", shards_of(x), y, bound))
    return comparisons


def _explained(kind: ShardKind, count: int, difference: str) -> str:
    """Return the error of an optimizer whose results differ on the shards of `count` devices."""
    if kind == "flat":
        return (
            f'the optimizer has sharding="flat", but on {count} flat shards {difference}. Leave '
            'out sharding="flat", for owners, or communicate with the other shards, as '
            "clip_by_global_norm does."
        )
    return (
        f"the optimizer must update each leaf by itself, but with leaves at {count} owners "
        f"{difference}. Take a norm of all by fs.optim.global_norm(tree)."
    )


def _put(tree: PyTree, layout: Layout) -> PyTree:
    return Leaves.of(tree).mapped(
        lambda x: fs.device_put(x, layout) if isinstance(x, Tensor) else x
    )


def _train(opt: Any, params: PyTree, grads: list[PyTree], seed: int) -> list[list[Leaf]]:
    """Return the leaves of the parameters after each step."""
    step = pure_step(opt)
    snapshots: list[list[Leaf]] = []
    with fs.keyed_random(seed):
        state = opt.init(params)
        for tree in grads:
            params, state = step(tree, state, params)
            snapshots.append(Leaves.of(params).leaves)
    return snapshots
