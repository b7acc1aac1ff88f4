"""Half-precision parameters that are rounded copies of float32 masters.

The inner optimizer works on the masters, which are in the state and have its layouts; parameters are the rounded
masters. A difference of two half-precision numbers, computed in float32 and added in float32, rounds back to the
second: so `apply_updates` gives the result of the inner optimizer's own update, and nothing is rounded twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fshard.mesh.layout import PyTree
from fshard.optim.contract import Optimizer, Update, differences, scale_inside, step_of
from fshard.optim.leaves import Leaf, Leaves, map_shards, trainable
from fshard.optim.plain import inside

_HALVES = (torch.bfloat16, torch.float16)


def with_master_weights(opt: Optimizer) -> Optimizer:
    """Apply an optimizer to float32 copies of bfloat16 and float16 parameters.

    Parameters of other dtypes are their own masters: state["master"] is None for them.

    >>> import torch, fshard.optim as optim
    >>> opt = with_master_weights(optim.sgd(2.0**-10))
    >>> params = [torch.ones(1, dtype=torch.bfloat16)]
    >>> state = opt.init(params)
    >>> for _ in range(4):
    ...     params, state = opt.step([torch.ones(1, dtype=torch.bfloat16)], state, params)
    >>> params, state["master"]  # four moves, each too small for bfloat16
    ([tensor([0.9961], dtype=torch.bfloat16)], [tensor([0.9961])])
    """

    opt = inside(opt, "with_master_weights")

    @torch.no_grad()
    def init(params: PyTree) -> PyTree:
        at = Leaves.of(params)
        masters = at.mapped(lambda leaf: map_shards(_widened, leaf) if _is_half(leaf) else None)
        return {"master": masters, "inner": opt.init(_over(at, masters))}

    scale = scale_inside(opt, "inner")

    def through(act: Update) -> Update:
        @torch.no_grad()
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            at = Leaves.of(params)
            given = at.mapped(_gradient, at.gradients(grads))
            moved, inner = act(given, state["inner"], _over(at, state["master"]))
            after = at.beside(moved, "the optimizer's results")
            masters = at.mapped(lambda old, new: new if _is_half(old) else None, after)
            return at.mapped(_rounded, after), {"master": masters, "inner": inner}

        return run

    pure = through(step_of(opt._replace(step=None)))

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        moved, state = pure(grads, state, params)
        return differences(params, moved, grads, _difference), state

    return Optimizer(init, update, through(step_of(opt)), opt.elementwise, scale, arrays=True)


def _is_half(leaf: Leaf) -> bool:
    return trainable(leaf) and leaf.dtype in _HALVES


def _widened(x: Tensor) -> Tensor:
    return x.detach().float()


def _over(at: Leaves, masters: PyTree) -> PyTree:
    """Replace parameters by their masters."""
    return at.mapped(lambda p, m: p if m is None else m, at.beside(masters, 'state["master"]'))


def _gradient(param: Leaf, grad: Leaf) -> Leaf:
    return map_shards(_widened, grad) if grad is not None and _is_half(param) else grad


def _rounded(param: Leaf, master: Leaf) -> Leaf:
    if not _is_half(param):
        return master
    return map_shards(lambda p, m: m.to(p.dtype).requires_grad_(p.requires_grad), param, master)


def _difference(new: Tensor, old: Tensor) -> Tensor:
    wide = torch.promote_types(old.dtype, torch.float32)
    return torch.where(new == old, 0, new.to(wide) - old.to(wide))  # an infinite one that stays moves by 0
