"""`power_sgd`: approximate the gradient of a matrix by the product of two thin factors.

Each step does one step of power iteration on the sum over devices, which no device has (Vogels
2019). M_i is the gradient of device i, of shape (rows, columns):

    P = orthogonal(psum(M_i Q^T))        (rows, rank)       Q of the step before
    Q = psum(P^T M_i)                    (rank, columns)
    sum of M_i is about P Q
"""

from __future__ import annotations

import torch
from torch import Tensor

from fshard.comm.compressor import Compressor, FlatLeaf, Phases, Reduced
from fshard.mesh.collectives.api import axis_size, psum
from fshard.mesh.layout import Axes, PyTree, flatten_with_paths, unflatten
from fshard.optim.arguments import validate, within


def power_sgd(rank: int, *, seed: int = 0) -> Compressor:
    """Send two thin factors of each matrix.

    The first dim of a leaf is the rows, the others are the columns. Leaves that factors would not
    make smaller, vectors too, are reduced by psum. It needs full parameters: a shard of a matrix
    has other factors. Sends 8 (n-1)/n (rank (rows + columns) + the rest) bytes, in float32.
    """
    validate("power_sgd", within("[1, inf)", integer=True, rank=rank))

    def is_factored(x: Tensor) -> bool:
        if not x.is_floating_point() or x.ndim < 2:
            return False
        rows = len(x)
        columns = x[:1].numel()  # of one row: without rows x[0] would raise
        return rank * (rows + columns) < x.numel()

    def init(params: PyTree) -> PyTree:
        paths, leaves, structure = flatten_with_paths(params)
        factors: list[Tensor | None] = []
        for path, x in zip(paths, leaves, strict=True):
            if not is_factored(x):
                factors.append(None)
                continue
            draws = FlatLeaf(x, path).generator(seed)
            factor = torch.randn(rank, x[0].numel(), generator=draws, device=draws.device)
            factors.append(factor.to(x.device))
        return {"q": unflatten(structure, factors)}

    def phases(grads: PyTree, state: PyTree, axis: Axes) -> Phases:
        n = axis_size(axis)
        if n == 1:
            return Reduced(grads, grads, state)

        # Leaves that are not factored are None in the state, so they have no path there.
        paths, leaves, structure = flatten_with_paths(grads)
        q_paths, q_leaves, _ = flatten_with_paths(state["q"])
        q_before = dict(zip(q_paths, q_leaves, strict=True))
        sent = dict(zip(paths, leaves, strict=True))
        dense = {path: x for path, x in sent.items() if path not in q_before}
        matrices = {path: sent[path].float().flatten(1) for path in q_before}

        # (M Q^T)^T: faster with the thin factor on the left.
        products = {path: q_before[path] @ m.T for path, m in matrices.items()}
        products, total = yield psum.start((products, dense), axis)
        p = {path: torch.linalg.qr(x.T).Q for path, x in products.items()}
        q = yield psum.start({path: p[path].T @ m for path, m in matrices.items()}, axis)

        for path in matrices:
            x = sent[path]
            total[path] = (p[path] @ q[path]).view_as(x).to(x.dtype)
            sent[path] = total[path] / n
            # From zeros the power iteration would stay at zeros: after a gradient of zeros, such as
            # that of an unused layer, the factor before it remains.
            q[path] = torch.where(q[path].any(), q[path], q_before[path])

        def tree_of(values: dict[str, Tensor]) -> PyTree:
            return unflatten(structure, [values.get(path) for path in paths])

        return Reduced(tree_of(total), tree_of(sent), {"q": tree_of(q)})

    return Compressor(init, phases, full=True)
