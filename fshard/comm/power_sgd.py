"""`power_sgd`: the gradient of a matrix as a product of two thin ones, found by one step of power iteration.

M = sum over devices of M_i          (rows, columns)
P = orthogonal(psum(M_i Q^T))        (rows, rank)       Q of the step before
Q = psum(P^T M_i)                    (rank, columns)
M is approximately P Q
"""

from __future__ import annotations

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

    def factor(path: str, x: Tensor) -> Tensor | None:
        if not x.is_floating_point() or x.ndim < 2 or rank * (len(x) + x[:1].numel()) >= x.numel():
            return None
        return torch.randn(rank, x[0].numel(), generator=FlatLeaf(x, path).generator(seed)).to(
            x.device
        )

    def init(params: PyTree) -> PyTree:
        paths, leaves, structure = flatten_with_paths(params)
        return {"q": unflatten(structure, [*map(factor, paths, leaves)])}

    def phases(grads: PyTree, state: PyTree, axis: Axes) -> Phases:
        if (n := axis_size(axis)) == 1:
            return Reduced(grads, grads, state)
        paths, leaves, structure = flatten_with_paths(grads)
        sent, before = (
            dict(zip(paths, leaves, strict=True)),
            dict(zip(*flatten_with_paths(state["q"])[:2], strict=True)),
        )
        matrices = {path: sent[path].float().flatten(1) for path in before}
        products = {
            path: before[path] @ m.T for path, m in matrices.items()
        }  # fast, with the thin one left
        uncompressed = {path: x for path, x in sent.items() if path not in before}
        products, total = yield psum.start((products, uncompressed), axis)
        p = {path: torch.linalg.qr(x.T).Q for path, x in products.items()}
        q = yield psum.start({path: p[path].T @ m for path, m in matrices.items()}, axis)
        for path in matrices:
            total[path] = (p[path] @ q[path]).view_as(sent[path]).to(sent[path].dtype)
            sent[path] = total[path] / n
        q = {
            path: torch.where(x.any(), x, before[path]) for path, x in q.items()
        }  # zeros lead nowhere
        total, sent, q = (
            unflatten(structure, [*map(tree.get, paths)]) for tree in (total, sent, q)
        )
        return Reduced(total, sent, {"q": q})

    return Compressor(init, phases, full=True)
