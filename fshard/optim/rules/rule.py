"""Make an `Optimizer` of a rule that writes parameters.

A rule is the arithmetic of an optimizer: it gets *cells* (shards with their gradients, counts and state, as lists) and
writes the next parameters and state to them, in the order of operations of torch.optim. So

    step(grads, state, params)    the rule writes to its arguments;
    update(grads, state, params)  it writes to copies, and the update is their difference to the parameters.

`step` thus has torch's bits. The difference of two floats within a factor of two of each other is exact (Sterbenz), so
parameters that change by no more get the same bits from `apply_updates`; others differ by a rounding.

State is a dict: "count", of all steps, on the host; "step", of the steps of each leaf, as in torch, but one tensor for
all leaves with equal counts; and the slots of the rule, named as in torch, each a tree of the parameters' structure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.optim.contract import Optimizer, Update, copied, differences
from fshard.optim.leaves import (
    Leaf,
    Leaves,
    count_from_zero,
    like,
    made_of,
    shards_of,
    trainable,
)
from fshard.optim.rules.cells import Cells, Rule, cells_of, numbers_of
from fshard.optim.schedules import Rate, rate_at

Slots = Mapping[str, Callable[[Tensor], Tensor | None]]
"""For each slot, how a shard of state is made from a shard of a parameter; None where a leaf has none."""


def writer(
    lr: Rate,
    slots: Slots,
    rule: Rule,
    *,
    fast: Rule | None = None,
    check: Callable[[Leaves], None] | None = None,
    elementwise: bool = True,
) -> Optimizer:
    """Make an optimizer of a rule.

    Args:
        lr: the learning rate, or a schedule of it.
        slots: the state of a shard.
        rule: writes it.
        fast: a rule that does the same with other rounding, for `step`.
        check: raises for parameters that the rule does not support.
        elementwise: True if the rule runs on any shards.
    """

    def init(params: PyTree) -> PyTree:
        at = Leaves.of(params)
        if check:
            check(at)
        zero = torch.zeros(())
        made = {"step": _once(at, lambda leaf: zero)}
        for name, make in slots.items():
            made[name] = _once(at, lambda leaf, make=make: made_of(leaf, make))
        return {"count": count_from_zero()} | {name: at.rebuild(column) for name, column in made.items()}

    names = {"count", "step", *slots}

    def stepped(chosen: Rule) -> Update:
        @torch.no_grad()
        def step(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            _refuse_strange_state(state, names)
            at = Leaves.of(params)
            after, columns, cells = _opened(at, grads, state)
            if check:
                check(at)
            if cells.params:
                chosen(cells, rate_at(lr, int(state["count"])))
            next_state = {name: at.rebuild(column) for name, column in columns.items()}
            return at.rebuild(after), {"count": state["count"] + 1} | next_state

        return step

    by_rule = stepped(rule)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        after, state = by_rule(grads, copied(state), copied(params))
        return differences(params, after, grads), state

    return Optimizer(init, update, stepped(fast or rule), elementwise, arrays=True)


def _opened(at: Leaves, grads: PyTree, state: PyTree) -> tuple[list[Leaf], dict[str, list[Leaf]], Cells]:
    """Return the leaves of the next parameters, of "step" and of each slot, and the shards among them that a rule writes.

    They have the memory of those before, if no two of them share it.  Tied leaves are written once.
    """
    given = at.gradients(grads)
    columns = {
        name: at.gradients(tree, f'state["{name}"]', any_shape=True) for name, tree in state.items() if name != "count"
    }
    firsts, after = at.firsts, list(at.leaves)
    tied = len(set(firsts)) < len(firsts)
    if tied:
        _one_gradient_each(at, given, firsts)
    moved = [
        i
        for i, (param, grad) in enumerate(zip(at.leaves, given, strict=True))
        if grad is not None and firsts[i] == i and trainable(param)
    ]
    for name, column in {"params": after, **columns}.items():
        some = [column[i] for i in moved]
        for i, own in zip(moved, _next(some) if name == "step" else _owned(some), strict=True):
            column[i] = own
        if tied:
            column[:] = [column[first] for first in firsts]
    return after, columns, cells_of(moved, at.leaves, after, given, columns)


def _refuse_strange_state(state: PyTree, names: set[str]) -> None:
    if isinstance(state, dict) and state.keys() == names and not isinstance(state["count"], Sharded):
        return
    found = {*map(str, state)} if isinstance(state, dict) else None  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if found != names:
        has = f"is a {type(state).__name__}" if found is None else f"has {sorted(found)}"
        raise OptimizerError(
            f"This state was not made by this optimizer's init: it {has}, and {sorted(names)} is needed. "
            "Write state = opt.init(params)."
        )
    raise OptimizerError(
        'state["count"] is on a mesh; it must be a number of the host. Shard a state as its optimizer makes it: '
        "fs.device_put(state, fs.mesh.layouts(opt.init(params)))."
    )


def _next(counts: list[Tensor]) -> list[Tensor]:
    """Return the next counts, one tensor for all leaves that have made as many steps."""
    numbers = numbers_of(counts)
    made = {number: torch.full_like(counts[0], number + 1.0) for number in {*numbers}}
    return [made[number] for number in numbers]


def _owned(leaves: list[Leaf]) -> list[Leaf]:
    """Return leaves whose memory may be written: their own, if no two shards share it."""
    shards = [x for leaf in leaves for x in shards_of(leaf) if x.numel() and not x.is_meta]
    if len({x.data_ptr() for x in shards}) == len(shards) and all(x.is_contiguous() for x in shards):
        return leaves
    return [like(leaf, list(map(_copy, shards_of(leaf)))) for leaf in leaves]


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _once(at: Leaves, make: Callable[[Leaf], Leaf]) -> list[Leaf]:
    """Make something for each parameter; for tied ones the same thing."""
    made = {i: make(at.leaves[i]) for i in set(at.firsts) if trainable(at.leaves[i])}
    return [made.get(first) for first in at.firsts]


def _one_gradient_each(at: Leaves, grads: list[Leaf], firsts: list[int]) -> None:
    """Raise if tied parameters, which are one parameter, have different gradients."""
    wrong = [(first, i) for i, first in enumerate(firsts) if i != first and key_of(grads[i]) != key_of(grads[first])]
    if wrong:
        found = "; ".join(f"params{at.paths[first]} and params{at.paths[i]}" for first, i in wrong)
        raise OptimizerError(
            f"These parameters are one and the same tensor, but have two gradients: {found}. "
            "Give both the sum as one tensor, or clone one parameter to untie them."
        )
