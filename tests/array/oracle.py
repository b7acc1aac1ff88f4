"""The oracle of array operations: the same function of unsharded float64 tensors, and its first and
second derivatives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.mesh.layout import Mesh

F64 = torch.float64


def tensors(y: Any) -> list[Any]:
    return [one for each in y for one in tensors(each)] if isinstance(y, tuple | list) else [y]


def put(x: Tensor, mesh: Mesh, spec: P) -> fs.Sharded:
    """Put a tensor on a mesh; unreduced values are split into unequal summands."""
    made = fs.device_put(x, fs.Layout(mesh, spec.replace(unreduced=None)))
    if not spec.unreduced:
        return made
    n = 1
    for axis in spec.unreduced:
        n *= mesh.shape[axis]
    shares = [1.0] if n == 1 else [2.0 / n, *[1.0 / n] * (n - 2), 0.0]
    shards = []
    for device, shard in enumerate(made.shards):
        index = 0
        for axis in spec.unreduced:
            index = index * mesh.shape[axis] + mesh.coordinates(device)[axis]
        shards.append(shard * shares[index] if shard.is_floating_point() else shard * (index == 0))
    return fs.Sharded(made.shape, fs.Layout(mesh, spec), tuple(shards))


def check(
    f: Callable[..., Any],
    xs: Sequence[Tensor],
    specs: Sequence[P],
    mesh: Mesh,
    *,
    order: int = 2,
    seed: int = 0,
) -> Any:
    """Assert that values, gradients and gradients of gradients equal those of the unsharded
    function; return the result.
    """
    moving = [x.is_floating_point() and order > 0 for x in xs]
    plain = [x.clone().requires_grad_(m) for x, m in zip(xs, moving, strict=True)]
    arrays = [put(x, mesh, spec) for x, spec in zip(xs, specs, strict=True)]
    for x, m in zip(arrays, moving, strict=True):
        if m:
            x.requires_grad_()
    torch.manual_seed(seed)
    expected = tensors(f(*plain))
    torch.manual_seed(seed)
    result = f(*arrays)
    actual = tensors(result)
    assert len(actual) == len(expected)
    for y, z in zip(actual, expected, strict=True):
        assert isinstance(y, fs.Sharded), y
        y.check()
        assert (y.shape, y.dtype) == (tuple(z.shape), z.dtype)
        torch.testing.assert_close(fs.unshard(y), z, equal_nan=True)
    draw = torch.Generator().manual_seed(seed)
    pairs = [(y, z) for y, z in zip(actual, expected, strict=True) if z.requires_grad]
    if not pairs:
        return result
    assert all(y.requires_grad for y, _ in pairs)
    cotangents = [torch.randn(z.shape, dtype=z.dtype, generator=draw) for _, z in pairs]
    inputs = [x for x, m in zip(arrays, moving, strict=True) if m]
    tensors_ = [x for x, m in zip(plain, moving, strict=True) if m]
    gs = torch.autograd.grad(
        [z for _, z in pairs],
        tensors_,
        cotangents,
        create_graph=order > 1,
        allow_unused=True,
        materialize_grads=True,
    )
    hs = torch.autograd.grad(
        [y for y, _ in pairs],
        inputs,
        [put(g, mesh, P()) for g in cotangents],
        create_graph=order > 1,
        allow_unused=True,
        materialize_grads=True,
    )
    for g, h, x in zip(gs, hs, inputs, strict=True):
        assert h.spec == x.spec.replace(unreduced=None)
        h.check()
        torch.testing.assert_close(fs.unshard(h), g, equal_nan=True)
    directions = [torch.randn(g.shape, dtype=g.dtype, generator=draw) for g in gs]
    again = [(g, d) for g, d in zip(gs, directions, strict=True) if g.requires_grad]
    ours = [(h, put(d, mesh, P())) for h, d in zip(hs, directions, strict=True) if h.requires_grad]
    if order < 2 or not again:
        return result
    more = {"allow_unused": True, "materialize_grads": True}
    gs = torch.autograd.grad([g for g, _ in again], tensors_, [d for _, d in again], **more)
    if not ours:
        assert not any(g.any() for g in gs)
        return result
    hs = torch.autograd.grad([h for h, _ in ours], inputs, [d for _, d in ours], **more)
    for g, h in zip(gs, hs, strict=True):
        torch.testing.assert_close(fs.unshard(h), g, equal_nan=True)
    return result
