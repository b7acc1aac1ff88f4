"""Make an `Optimizer` of a rule that writes parameters.

A rule is the arithmetic of an optimizer: it gets shards with their gradients, counts and state, as lists, and writes
the next parameters and state to them, in the order of operations of torch.optim. So

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
from fshard.memory.kinds import claim, made_for
from fshard.memory.state import stored
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.sharded import key_of
from fshard.optim.contract import ArrayOptimizer, Optimizer, Update, copied, differences
from fshard.optim.leaves import (
    Leaf,
    Leaves,
    count_from_zero,
    map_shards,
    shards_of,
    state_leaf,
    trainable,
    undifferentiable,
)
from fshard.optim.rules.shard_lists import Rule, ShardLists, numbers_of
from fshard.optim.schedules import Rate, rate_at

Slots = Mapping[str, Callable[[Tensor], Tensor | None]]
"""For each slot, how a shard of state is made from a shard of a parameter; None where a leaf has none."""


def optimizer_of_rule(
    lr: Rate,
    slots: Slots,
    rule: Rule,
    *,
    fast: Rule | None = None,
    check: Callable[[Leaves], None] = lambda at: None,
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

    @made_for("state")
    def init(params: PyTree) -> PyTree:
        claim(params, "parameters")  # state counts for their devices
        at, zero = Leaves.of(params), torch.zeros(())
        check(at)
        makers = {"step": lambda leaf: zero} | {
            name: lambda leaf, make=make: stored(state_leaf(leaf, make))
            for name, make in slots.items()
        }
        trees = {
            name: at.mapped(lambda x, f=f: f(x) if trainable(x) else None)
            for name, f in makers.items()
        }
        return {"count": count_from_zero()} | trees

    names = {"count", "step", *slots}

    def stepped(chosen: Rule) -> Update:
        @undifferentiable
        def step(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            if not isinstance(state, dict) or state.keys() != names:
                keys = (
                    f"one of {sorted(map(str, state))}"
                    if isinstance(state, dict)
                    else f"a {type(state).__name__}"
                )
                raise OptimizerError(
                    f"state must be a dict of {sorted(names)}, as from init of this optimizer; got {keys}. "
                    "Write state = opt.init(params)."
                )
            at = Leaves.of(params)
            check(at)
            columns, shards = _open(at, grads, state)
            if shards.params:
                rate = rate_at(lr, int(state["count"]))
                for group in shards.fetched():
                    chosen(group, rate)
            after = {name: at.rebuild(column) for name, column in columns.items()}
            return after.pop("params"), {"count": state["count"] + 1} | after

        return step

    by_rule = stepped(rule)

    @undifferentiable
    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        after, state = by_rule(grads, copied(state), copied(params))
        return differences(params, after, grads), state

    return ArrayOptimizer(init, update, stepped(fast or rule), elementwise)


def _open(at: Leaves, grads: PyTree, state: PyTree) -> tuple[dict[str, list[Leaf]], ShardLists]:
    """Return the leaves of the next "params", "step" and slots, and the shards among them that a rule writes.

    They have the memory of those before, if no two of them share it. Tied leaves are written once.
    """
    gradients, firsts = at.gradients(grads), at.firsts
    _validate_tied(at, gradients)
    columns = {"params": at.leaves} | {
        name: at.gradients(tree, f'state["{name}"]', any_shape=True)
        for name, tree in state.items()
        if name != "count"
    }
    leaves = zip(firsts, at.leaves, gradients, strict=True)
    moved = [
        i
        for i, (first, param, grad) in enumerate(leaves)
        if i == first and grad is not None and trainable(param)
    ]

    def only(column: list[Leaf]) -> list[Leaf]:
        return [column[i] for i in moved]

    written = {
        name: (_next if name == "step" else _writable)(only(column))
        for name, column in columns.items()
    }
    shards = ShardLists.of(only(at.leaves), only(gradients), written)
    if len(moved) == len(firsts):
        return written, shards
    for name, column in columns.items():
        after = dict(zip(moved, written[name], strict=True))
        columns[name] = [
            after.get(first, before) for first, before in zip(firsts, column, strict=True)
        ]
    return columns, shards


def _next(counts: list[Tensor]) -> list[Tensor]:
    """Return the next counts, one tensor for all leaves that have made as many steps."""
    numbers = numbers_of(counts)
    after = {number: torch.full_like(counts[0], number + 1.0) for number in {*numbers}}
    return [after[number] for number in numbers]


def _writable(leaves: list[Leaf]) -> list[Leaf]:
    """Return leaves whose memory may be written: their own, if no two shards share it."""
    shards = [x for leaf in leaves for x in shards_of(leaf)]
    pointers = [pointer for x in shards if (pointer := x.data_ptr())]  # 0: without memory
    if len({*pointers}) == len(pointers) and all(map(Tensor.is_contiguous, shards)):
        return leaves
    return [
        map_shards(lambda x: x.detach().clone().requires_grad_(x.requires_grad), leaf)
        for leaf in leaves
    ]


def _validate_tied(at: Leaves, grads: list[Leaf]) -> None:
    """Raise if tied parameters, which are one parameter, have different gradients."""
    for i, first in enumerate(at.firsts):
        if i != first and key_of(grads[i]) != key_of(grads[first]):
            raise OptimizerError(
                f"params{at.paths[first]} and params{at.paths[i]} are one tensor (tied), but have two gradients. Give both the "
                "sum as one tensor, or clone one parameter to untie them."
            )
