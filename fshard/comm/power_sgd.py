"""`power_sgd`: the gradient of a matrix as a product of two thin ones, found by one step of power iteration.

M = sum over devices of M_i          (rows, columns)
P = orthogonal(psum(M_i Q))          (rows, rank)       Q of the step before
Q = psum(M_i^T P)                    (columns, rank)
M is approximately P Q^T
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fshard.comm.compressor import Compressor, FlatLeaf, Phases, Reduced
from fshard.mesh.collectives.api import axis_size, psum
from fshard.mesh.layout import Axes, PyTree, flatten_with_paths, unflatten
from fshard.optim.arguments import validate, within


def power_sgd(rank: int, *, seed: int = 0) -> Compressor:
    """Send two thin factors of each matrix.  Sends 8 (n-1)/n (rank (rows + columns) + the rest) bytes, in float32.

    The first dim of a leaf is the rows, the others are the columns. Leaves that factors would not make smaller, vectors
    too, are reduced by psum. It needs full parameters: a shard of a matrix has other factors.
    """
    validate("power_sgd", within("[1, inf)", integer=True, rank=rank))

    def is_compressed(x: Tensor) -> bool:
        return x.ndim > 1 and x.is_floating_point() and rank * (len(x) + x[0].numel()) < x.numel() if len(x) else False

    def init(params: PyTree) -> PyTree:
        paths, leaves, _ = flatten_with_paths(params)
        return {
            "q": {
                path: _draw(FlatLeaf(x, path), rank, seed)
                for path, x in zip(paths, leaves, strict=True)
                if x.ndim and is_compressed(x)
            }
        }

    def phases(grads: PyTree, state: PyTree, axis: Axes) -> Phases:
        n = axis_size(axis)
        if n == 1:
            return Reduced(grads, grads, state)
        paths, leaves, structure = flatten_with_paths(grads)
        matrices = {path: x.float().flatten(1) for path, x in zip(paths, leaves, strict=True) if path in state["q"]}
        rest = {path: x for path, x in zip(paths, leaves, strict=True) if path not in matrices}
        products: dict[str, Tensor]
        products, rest_totals = yield psum.start(
            ({path: m @ state["q"][path] for path, m in matrices.items()}, rest), axis
        )
        factors = {path: torch.linalg.qr(p).Q for path, p in products.items()}
        q: Any = yield psum.start({path: m.T @ factors[path] for path, m in matrices.items()}, axis)
        q = {
            path: torch.where(x.any(), x, state["q"][path]) for path, x in q.items()
        }  # a gradient of zero leads nowhere
        totals = {path: factors[path] @ q[path].T for path in matrices}
        total = [
            totals[path].view(x.shape).to(x.dtype) if path in totals else rest_totals[path]
            for path, x in zip(paths, leaves, strict=True)
        ]
        sent = [
            (totals[path] / n).view(x.shape).to(x.dtype) if path in totals else x
            for path, x in zip(paths, leaves, strict=True)
        ]
        return Reduced(unflatten(structure, total), unflatten(structure, sent), {"q": q})

    return Compressor(init, phases, full=True)


def _draw(leaf: FlatLeaf, rank: int, seed: int) -> Tensor:
    columns = leaf.x[0].numel()
    return torch.randn(columns, rank, generator=leaf.generator(seed)).to(leaf.x.device)
