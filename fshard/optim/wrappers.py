"""Optimizers around another one, whose state is the entry "inner" of theirs.

Accumulation, averages of parameters, and master weights.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.memory.state import (
    Update,
    current_offload,
    fetched,
    home_of,
    is_away,
    moved,
    rounding,
    stored,
)
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.optim.arguments import validate, within
from fshard.optim.contract import (
    Optimizer,
    apply_updates,
    conditional,
    copied,
    differences,
    step_of,
)
from fshard.optim.leaves import (
    Leaf,
    Leaves,
    count_from_zero,
    map_shards,
    trainable,
    undifferentiable,
)
from fshard.optim.nesting import inner_optimizer
from fshard.optim.rules.shard_lists import ShardLists


def accumulate(opt: Optimizer, every: int) -> Optimizer:
    """Pass the mean of `every` gradients to an optimizer; between its steps parameters stay.

    step      1   2   3   4   5   6          every=3
    sums      a  +b  +c   d  +e  +f
    inner             x           x          with (a + b + c) / 3, then with (d + e + f) / 3

    A parameter without any of these gradients has none in the mean; otherwise a missing gradient
    counts as 0.

    >>> import torch, fshard.optim as optim
    >>> opt = accumulate(optim.sgd(1.0), every=2)
    >>> params, state = [torch.ones(1)], opt.init([torch.ones(1)])
    >>> for grad in (1.0, 3.0):
    ...     params, state = opt.step([torch.tensor([grad])], state, params)
    ...     print(params)
    [tensor([1.])]
    [tensor([-1.])]
    """
    validate("accumulate", within("[1, inf)", integer=True, every=every))
    opt = inner_optimizer(opt, "accumulate")

    def zeros(leaves: Leaves) -> dict[str, PyTree]:
        seen = leaves.mapped(lambda leaf: count_from_zero() if trainable(leaf) else None)
        return {"seen": seen, "sums": leaves.mapped(zero_sum)}

    def zero_sum(leaf: Leaf) -> Leaf:
        return map_shards(torch.zeros_like, leaf) if trainable(leaf) else None

    def decide(grads: PyTree, state: PyTree) -> tuple[bool, PyTree, dict[str, PyTree]]:
        sums = Leaves.of(state["sums"])
        count = state["count"] + 1
        gradients = sums.beside(grads, "grads")
        seen = sums.beside(state["seen"], 'state["seen"]')
        is_last = int(count) % every == 0
        if is_last:
            return True, sums.mapped(mean, seen, gradients), {"count": count, **zeros(sums)}
        after_seen = sums.mapped(counted, seen, gradients)
        after_sums = sums.mapped(_added, gradients)
        return False, None, {"count": count, "seen": after_seen, "sums": after_sums}

    def counted(total: Leaf, seen: Leaf, grad: Leaf) -> Leaf:
        return seen if total is None or grad is None else seen + 1

    def mean(total: Leaf, seen: Leaf, grad: Leaf) -> Leaf:
        if total is None:
            return None
        is_unused = grad is None and not int(seen)
        if is_unused:
            return None
        return map_shards(lambda x: x / every, _added(total, grad))

    def initial(params: PyTree) -> dict[str, PyTree]:
        entries = zeros(Leaves.of(params))
        sums = Leaves.of(entries["sums"]).mapped(lambda leaf: stored(leaf, beside_gradients=True))
        return {"count": count_from_zero(), **entries, "sums": sums}

    return conditional(opt, initial, decide)


def _added(total: Leaf, grad: Leaf) -> Leaf:
    if total is None or grad is None:
        return total
    return map_shards(lambda x, g: x + g.detach().to(x.dtype), total, grad)


def ema(opt: Optimizer, decay: float) -> Optimizer:
    """Keep a moving average of the parameters.

    average = decay average + (1 - decay) params, after every step; `ema_params(state)` returns it.

    >>> import torch, fshard.optim as optim
    >>> opt = ema(optim.sgd(1.0), 0.5)
    >>> params, state = opt.step([torch.ones(1)], opt.init([torch.ones(1)]), [torch.ones(1)])
    >>> params, ema_params(state)
    ([tensor([0.])], [tensor([0.5000])])
    """
    validate("ema", within("[0, 1]", decay=decay))
    opt = inner_optimizer(opt, "ema")

    @torch.no_grad()
    def init(params: PyTree) -> PyTree:
        averages = Leaves.of(params).mapped(_first_average)
        return {"ema": averages, "inner": opt.init(params)}

    @undifferentiable
    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, inner = opt.update(grads, state["inner"], params)
        averages = Leaves.of(state["ema"])
        after = averages.beside(apply_updates(params, updates), "params")
        return updates, {"ema": averages.mapped(next_average, after), "inner": inner}

    def next_average(average: Leaf, x: Leaf) -> Leaf:
        if not trainable(x):
            return x
        return map_shards(lambda average, x: average.lerp(x, 1 - decay), average, x)

    @undifferentiable
    def step(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        params, inner = step_of(opt)(grads, state["inner"], params)
        averages = Leaves.of(state["ema"])
        after = averages.beside(params, "params")
        offload = current_offload()
        near = after if offload is None else fetched(after, offload)
        pairs: list[tuple[Leaf, Leaf]] = []
        for i in sorted({*averages.firsts}):
            if trainable(after[i]):
                pairs.append((averages.leaves[i], near[i]))
        for group in ShardLists.of_pairs(pairs).fetched():
            for average, x in zip(group.params, group.grads, strict=True):
                average.lerp_(x, 1 - decay)
        written = averages.mapped(lambda average, x: average if trainable(x) else x, after)
        return params, {"ema": written, "inner": inner}

    return Optimizer(init, update, step, opt.sharding, takes="arrays")


def _first_average(x: Leaf) -> Leaf:
    if not trainable(x):
        return copied(x)
    # `copied` raises for what is on disk, which is written in place.
    if isinstance(x, Sharded) and home_of(x, x.mesh) == "disk":
        return stored(moved([x], x.mesh, "disk", "host")[0])
    return stored(copied(x))


def ema_params(state: PyTree) -> PyTree:
    """Return the averaged parameters from the state of an `ema`.

    Or from that of a chain or wrapper that has one in it.

    >>> import torch, fshard.optim as optim
    >>> opt = optim.chain(optim.clip_by_value(1.0), ema(optim.sgd(1.0), 0.5))
    >>> ema_params(opt.init([torch.ones(1)]))
    [tensor([1.])]
    """
    entries = [state]
    for entry in entries:  # which grows
        if isinstance(entry, dict) and {"ema", "inner"} <= entry.keys():
            return entry["ema"]
        if isinstance(entry, dict):
            entries += entry.values()
        elif isinstance(entry, tuple):
            entries += entry
    raise OptimizerError(
        "ema_params: there is no average in this state. Make the optimizer with ema(opt, decay)."
    )


_HALVES = (torch.bfloat16, torch.float16)


def with_master_weights(opt: Optimizer) -> Optimizer:
    """Apply an optimizer to float32 masters of 16-bit parameters: params = round(masters).

    Parameters of other dtypes are their own masters: state["master"] is None for them. An update is
    the difference of two rounded numbers in float32; added to the first it rounds to the second, so
    nothing is rounded twice.

    >>> import torch, fshard.optim as optim
    >>> opt = with_master_weights(optim.sgd(2.0**-10))
    >>> params = [torch.ones(1, dtype=torch.bfloat16)]
    >>> state = opt.init(params)
    >>> for _ in range(4):
    ...     params, state = opt.step([torch.ones(1, dtype=torch.bfloat16)], state, params)
    >>> params, state["master"]  # four moves, each too small for bfloat16
    ([tensor([0.9961], dtype=torch.bfloat16)], [tensor([0.9961])])
    """
    opt = inner_optimizer(opt, "with_master_weights")

    @torch.no_grad()
    def init(params: PyTree) -> PyTree:
        leaves = Leaves.of(params)
        masters = leaves.mapped(master)
        wide = _with_masters(leaves, Leaves.of(masters).leaves)
        return {"master": masters, "inner": opt.init(wide)}

    def master(leaf: Leaf) -> Leaf:
        return stored(map_shards(_widened, leaf)) if _is_half(leaf) else None

    def wide_gradient(param: Leaf, grad: Leaf) -> Leaf:
        if grad is None or not _is_half(param):
            return grad
        return map_shards(_widened, grad)

    def stepped(step: Update) -> Update:
        @undifferentiable
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            leaves = Leaves.of(params)
            wide = leaves.mapped(wide_gradient, leaves.gradients(grads))
            masters = leaves.beside(state["master"], 'state["master"]')
            with rounding(zip(masters, leaves.leaves, strict=True)):
                result, inner = step(wide, state["inner"], _with_masters(leaves, masters))
            after = leaves.beside(result, "the optimizer's results")
            rounded = leaves.mapped(_rounded, after, masters)
            next_masters = leaves.mapped(lambda p, x: x if _is_half(p) else None, after)
            return rounded, {"master": next_masters, "inner": inner}

        return run

    pure = stepped(step_of(replace(opt, step=None)))

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        after, state = pure(grads, state, params)
        return differences(params, after, grads, _difference), state

    return Optimizer(init, update, stepped(step_of(opt)), opt.sharding, takes="arrays")


def _is_half(leaf: Leaf) -> bool:
    return trainable(leaf) and leaf.dtype in _HALVES


def _widened(x: Tensor) -> Tensor:
    return x.detach().float()


def _with_masters(params: Leaves, masters: list[Leaf]) -> PyTree:
    """Replace parameters by their masters."""
    return params.mapped(lambda p, m: p if m is None else m, masters)


def _rounded(param: Leaf, master: Leaf, before: Leaf) -> Leaf:
    """Return the parameter of a master.

    Itself, if it was written when the master was, which is elsewhere.
    """
    if not _is_half(param):
        return master
    if is_away(master) and key_of(master) == key_of(before):
        return param
    return map_shards(lambda p, m: m.to(p.dtype).requires_grad_(p.requires_grad), param, master)


def _difference(new: Tensor, old: Tensor) -> Tensor:
    wide = torch.promote_types(old.dtype, torch.float32)
    difference = new.to(wide) - old.to(wide)
    # An infinite parameter that stays moves by 0, and not by inf - inf.
    return torch.where(new == old, 0, difference)
