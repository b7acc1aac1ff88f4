"""Make an `Optimizer` of a rule that writes parameters.

A rule is the arithmetic of an optimizer: it gets shards with their gradients, counts and state, as
lists, and writes the next parameters and state to them, in the order of operations of torch.optim:

    step(grads, state, params)    the rule writes to its arguments;
    update(grads, state, params)  it writes to copies, and the update is their difference to the
                                  parameters.

`step` thus has torch's bits. The difference of two floats within a factor of two of each other is
exact (Sterbenz), so parameters that change by no more get the same bits from `apply_updates`;
others differ by a rounding.

State is a dict: "count", of all steps, on the host; "step", of the steps of each leaf, as in torch,
but one tensor for all leaves with equal counts; and the slots of the rule, named as in torch, each
a tree of the parameters' structure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.memory.kinds import claim, made_for
from fshard.memory.state import Update, stored
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.sharded import key_of
from fshard.optim.contract import Optimizer, copied, differences
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
from fshard.optim.sharding import Sharding

Slots = Mapping[str, Callable[[Tensor], Tensor | None]]
"""For each slot, how a shard of state is made of a parameter's; None where a leaf has none."""


def optimizer_of_rule(
    lr: Rate,
    slots: Slots,
    rule: Rule,
    *,
    fast: Rule | None = None,
    check: Callable[[Leaves], None] = lambda params: None,
    sharding: Sharding = "flat",
) -> Optimizer:
    """Make an optimizer of a rule.

    Args:
        lr: the learning rate, or a schedule of it.
        slots: the state of a shard.
        rule: writes it.
        fast: a rule that does the same with other rounding, for `step`.
        check: raises for parameters that the rule does not support.
        sharding: the kind of shards that the rule runs on.
    """

    @made_for("state")
    def init(params: PyTree) -> PyTree:
        claim(params, "parameters")  # state counts for their devices
        leaves = Leaves.of(params)
        check(leaves)
        state = {"count": count_from_zero()}
        zero = torch.zeros(())
        # One tensor for all leaves: as long as their counts are equal, they are read once a step.
        state["step"] = leaves.mapped(lambda x: zero if trainable(x) else None)
        for name, make in slots.items():
            state[name] = leaves.mapped(partial(_slot, make))
        return state

    names = {"count", "step", *slots}

    def stepped(chosen: Rule) -> Update:
        @undifferentiable
        def step(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            _validate_state(state, names)
            leaves = Leaves.of(params)
            check(leaves)
            columns, shard_lists = _open(leaves, grads, state)
            if shard_lists.params:
                rate = rate_at(lr, int(state["count"]))
                for group in shard_lists.fetched():
                    chosen(group, rate)
            after = {name: leaves.rebuild(column) for name, column in columns.items()}
            return after.pop("params"), {"count": state["count"] + 1} | after

        return step

    by_rule = stepped(rule)

    @undifferentiable
    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        after, state = by_rule(grads, copied(state), copied(params))
        return differences(params, after, grads), state

    return Optimizer(init, update, stepped(fast or rule), sharding, takes="arrays")


def _slot(make: Callable[[Tensor], Tensor | None], param: Leaf) -> Leaf:
    """Return the state of a parameter for a slot; None if it is not trained."""
    return stored(state_leaf(param, make)) if trainable(param) else None


def _validate_state(state: PyTree, names: set[str]) -> None:
    """Raise unless a state has the entries that `init` makes."""
    if isinstance(state, dict) and state.keys() == names:
        return
    keys = f"a {type(state).__name__}"
    if isinstance(state, dict):
        keys = f"one of {sorted(map(str, state))}"
    raise OptimizerError(
        f"state must be a dict of {sorted(names)}, as from init of this optimizer; got {keys}. "
        "Write state = opt.init(params)."
    )


def _open(params: Leaves, grads: PyTree, state: PyTree) -> tuple[dict[str, list[Leaf]], ShardLists]:
    """Return the leaves of the next "params", "step" and slots, and the shards that a rule writes.

    They have the memory of those before, if no two of them share it. Tied leaves are written once.
    """
    gradients = params.gradients(grads)
    firsts = params.firsts
    _validate_tied(params, gradients)
    columns = {"params": params.leaves}
    for name, tree in state.items():
        if name != "count":
            columns[name] = params.gradients(tree, f'state["{name}"]', any_shape=True)

    moved: list[int] = []
    for i, param in enumerate(params.leaves):
        if i == firsts[i] and gradients[i] is not None and trainable(param):
            moved.append(i)

    written: dict[str, list[Leaf]] = {}
    for name, column in columns.items():
        leaves = [column[i] for i in moved]
        written[name] = _next(leaves) if name == "step" else _writable(leaves)
    moved_leaves = [params.leaves[i] for i in moved]
    moved_grads = [gradients[i] for i in moved]
    shard_lists = ShardLists.of(moved_leaves, moved_grads, written)
    if len(moved) == len(firsts):
        return written, shard_lists
    for name, column in columns.items():
        after = dict(zip(moved, written[name], strict=True))
        columns[name] = [after.get(firsts[i], before) for i, before in enumerate(column)]
    return columns, shard_lists


def _next(counts: list[Tensor]) -> list[Tensor]:
    """Return the next counts, one tensor for all leaves that have made as many steps."""
    numbers = numbers_of(counts)
    after = {number: torch.full_like(counts[0], number + 1.0) for number in {*numbers}}
    return [after[number] for number in numbers]


def _writable(leaves: list[Leaf]) -> list[Leaf]:
    """Return leaves whose memory may be written: their own, if no two shards share it."""
    shards: list[Tensor] = []
    for leaf in leaves:
        shards += shards_of(leaf)
    pointers = [pointer for pointer in map(Tensor.data_ptr, shards) if pointer]  # 0: no memory
    is_shared = len({*pointers}) != len(pointers)
    if not is_shared and all(map(Tensor.is_contiguous, shards)):
        return leaves
    return [map_shards(_clone, leaf) for leaf in leaves]


def _clone(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _validate_tied(params: Leaves, grads: list[Leaf]) -> None:
    """Raise if tied parameters, which are one parameter, have different gradients."""
    for i, first in enumerate(params.firsts):
        if i != first and key_of(grads[i]) != key_of(grads[first]):
            raise OptimizerError(
                f"params{params.paths[first]} and params{params.paths[i]} are one tensor (tied), "
                "but have two gradients. Give both the sum as one tensor, or clone one parameter "
                "to untie them."
            )
