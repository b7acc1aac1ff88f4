"""`Optimizer`: a pair of pure functions, and the operations on such pairs.

An optimizer is a value. `init(params)` makes its state; `update(grads, state, params)` returns
differences to add to the parameters, and the next state; its arguments are not modified. A
*transformation* (`clip_by_value`, `scale`) is such a pair too: it maps gradients to gradients. A
*writer* also has a `step`: it returns the next parameters, exactly as torch.optim would write them,
and may reuse the memory of its arguments.

    grads ─> transformation ─> ... ─> writer ─┬─ update ─> differences ── apply_updates ─> params
                                              └─ step ─────────────────────────────────> params
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from fshard.errors import OptimizerError
from fshard.foreign_names import renamed_keywords
from fshard.memory.state import Update, at_once
from fshard.mesh.collectives.autograd import transformed
from fshard.mesh.layout import Memory, PyTree, flatten, unflatten
from fshard.mesh.layout.kinds import empty_in, memory_of
from fshard.mesh.layout.sharded import Sharded, donated
from fshard.optim.leaves import (
    Leaf,
    Leaves,
    differentiable,
    is_frozen,
    like,
    map_shards,
    shards_of,
    trainable,
    undifferentiable,
)
from fshard.optim.rules import foreach
from fshard.optim.sharding import Sharding, validate_sharding


@renamed_keywords(elementwise='sharding="flat" in place of True, and nothing in place of False')
@dataclass(frozen=True)
class Optimizer:
    """An optimizer, or a transformation of gradients, as pure functions on trees.

    Args:
        init: from parameters to state.
        update: from gradients, state and parameters to updates and state. Does not modify its
            arguments. A gradient that is None (an unused parameter) has the update None, and its
            state does not change.
        step: from gradients, state and parameters to parameters and state. May reuse the memory of
            its arguments: the fast path. None for a transformation of gradients. The steps of
            `fs.optim` donate global arrays: each later use of the given parameters and state
            raises. Plain tensors are written in place, as by torch.optim.
        sharding: how parameters may be sharded for the update. "flat": as flat ranges, if an
            element's update depends on that element alone (and on numbers). "owners": each is
            stored in full by one device. That differs by leaf in `by_label`.
        loss_scale: from the state to the factor of the loss for the backward; None: 1. Only the
            outermost may have it.
        takes: the trees that the functions take. "tensors": one device's plain tensors, as below.
            "arrays": all devices', plain tensors or global arrays, as the optimizers of `fs.optim`.
        uses_norm: the first thing that it computes is `global_norm(grads)`, as in a chain that
            begins with `clip_by_global_norm`. `train_step` then computes this norm once, for its
            metrics too.

    The functions take trees of one device's plain tensors: its shards of the parameters with a
    gradient, and None for the others, which optree.tree_map skips. Subtrees of the state with the
    structure of the parameters get their layouts, leaf by leaf; state of an owner may have any
    shape. All other state is replicated: numbers, equal on all devices. These are compared in the
    updates 1, 2, 4, 8, ...; `fs.psum` raises over axes along which parameters are replicated.
    Random draws like a leaf, `torch.randn_like(grad)`, are those of one device in every layout; on
    shards others must be one number.

    Who calls the functions of a pair calls them as they are. `train_step`, `partition_optimizer`,
    `chain` and the other wrappers call them on each device, with its tensors.

    >>> import torch, fshard.optim as optim
    >>> opt = optim.sgd(0.5)
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> updates, state = opt.update({"w": torch.tensor([2.0, 4.0])}, opt.init(params), params)
    >>> updates, apply_updates(params, updates)
    ({'w': tensor([-1., -2.])}, {'w': tensor([0., 0.])})
    """

    init: Callable[[PyTree], PyTree]
    update: Update
    step: Update | None = None
    sharding: Sharding = "owners"
    loss_scale: Callable[[PyTree], Tensor] | None = None
    takes: Literal["tensors", "arrays"] = "tensors"
    uses_norm: bool = False

    def __post_init__(self) -> None:
        validate_sharding("Optimizer", self.sharding)
        if self.takes == "arrays":
            object.__setattr__(self, "step", donating(self.step))

    def __getattr__(self, name: str) -> NoReturn:
        hint = '. Write opt.sharding == "flat".' if name == "elementwise" else ""
        raise AttributeError(f"'Optimizer' has no attribute {name!r}{hint}")


# -- steps ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DonatingStep:
    """A step after which each use of the given parameters and state raises, if they are arrays.

    Args:
        write: the step itself, which writes into their memory. Optimizers that contain another call
            it, by `step_of`: only the outermost step knows that its arguments are used no more.
    """

    write: Update

    def __call__(self, grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return donated((params, state), self.write(grads, state, params))


def writing(step: Update) -> Update:
    """Return a step that leaves it to its caller to mark the arguments as donated."""
    return step.write if isinstance(step, DonatingStep) else step


def donating(step: Update | None) -> Update | None:
    """Return a step that donates its parameters and state; None for none."""
    if step is None or isinstance(step, DonatingStep):
        return step
    return DonatingStep(step)


def step_of(opt: Any) -> Update:
    """Return an optimizer's step; if it has none: update, then params + updates.

    The step may write into the memory of its arguments, and does not mark them as donated.

    >>> import torch, fshard.optim as optim
    >>> opt = optim.scale(-1.0)
    >>> params, state = step_of(opt)([torch.ones(1)], opt.init([]), [torch.ones(1)])
    >>> params
    [tensor([0.])]
    """
    check_optimizer(opt, "step_of")
    if opt.step is not None:
        return writing(opt.step)

    def update_and_apply(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = opt.update(grads, state, params)
        return apply_updates(params, updates), state

    return at_once(update_and_apply, writes=True)


def pure_step(opt: Any) -> Update:
    """Return an optimizer's step as a pure function: arguments are copied, and keep their values.

    Within a transform of torch.func it is the update, then params + updates.

    >>> import torch, fshard.optim as optim
    >>> opt, params = optim.sgd(0.5), [torch.ones(1)]
    >>> pure_step(opt)([torch.ones(1)], opt.init(params), params)[0], params
    ([tensor([0.5000])], [tensor([1.])])
    """
    step = step_of(opt)

    def pure(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        if transformed():
            updates, state = opt.update(grads, state, params)
            return apply_updates(params, updates), state
        return step(copied(grads), copied(state), copied(params))

    return pure


# -- updates -------------------------------------------------------------------------------------


@differentiable
def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Add updates to parameters, leaf by leaf: params + updates. None leaves a parameter unchanged.

    The sum is made in the wider of the two dtypes and rounded once to the parameter's. Transforms
    of torch.func see it; autograd does not.

    >>> import torch
    >>> apply_updates([torch.ones(2), torch.ones(1)], [torch.tensor([1.0, 2.0]), None])
    [tensor([2., 3.]), tensor([1.])]
    """
    leaves = Leaves.of(params)
    return leaves.mapped(_sum, leaves.gradients(updates, "updates"))


def _sum(param: Leaf, update: Leaf) -> Leaf:
    if update is None or not shards_of(param):
        return param
    sums = foreach.add(shards_of(param), shards_of(update))
    if transformed():
        return like(param, [x.to(param.dtype) for x in sums])
    is_array = isinstance(param, Sharded)
    shards: list[Tensor] = []
    for x, before in zip(sums, shards_of(param), strict=True):
        shard = x.to(before.dtype)
        device_type = param.layout.mesh.device_type if is_array else before.device.type
        memory = memory_of(before, device_type)
        if memory != "device":
            shard = _copy_in(memory, shard, before)
        shards.append(shard.requires_grad_(before.requires_grad))
    return like(param, shards)


@torch.no_grad()
def differences(
    params: PyTree,
    after: PyTree,
    grads: PyTree,
    difference: Callable[[Tensor, Tensor], Tensor] = torch.sub,
) -> PyTree:
    """Return the updates that lead from parameters to the next ones.

    None where there is no gradient.
    """
    leaves = Leaves.of(after)

    def update(new: Leaf, old: Leaf, grad: Leaf) -> Leaf:
        if grad is None or not trainable(old):
            return None
        return map_shards(difference, new, old)

    return leaves.mapped(update, leaves.beside(params, "params"), leaves.beside(grads, "grads"))


def no_updates(grads: PyTree) -> PyTree:
    """Return updates that leave every parameter as it is."""
    return Leaves.of(grads).mapped(lambda grad: None)


# -- copies --------------------------------------------------------------------------------------


@torch.no_grad()
def copied(tree: PyTree) -> PyTree:
    """Return a tree of copies, each in the same memory; tied tensors stay tied.

    Frozen ones are not copied, since they are never written.
    """
    leaves, structure = flatten(tree, none_is_leaf=True)
    tensors: dict[int, Tensor] = {}
    memories: dict[int, Memory] = {}
    for leaf in leaves:
        if is_frozen(leaf):
            continue
        is_array = isinstance(leaf, Sharded)
        for x in shards_of(leaf):
            if isinstance(x, Tensor):
                device_type = leaf.layout.mesh.device_type if is_array else x.device.type
                tensors[id(x)] = x
                memories[id(x)] = memory_of(x, device_type)
    if "disk" in memories.values():
        raise OptimizerError(
            "what is on disk must be updated in place; got a step that copies its arguments. Write "
            "donate=True, without reproducible=True."
        )

    copies: dict[int, Tensor] = {}
    for key, x in tensors.items():
        memory = memories[key]
        copies[key] = x.clone() if memory == "device" else _copy_in(memory, x, x)

    def copied_leaf(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, Sharded) or is_frozen(leaf):
            return copies.get(id(leaf), leaf)
        return Sharded(leaf.shape, leaf.layout, tuple([copies[id(x)] for x in leaf.shards]))

    copied_leaves = {id(leaf): copied_leaf(leaf) for leaf in leaves}
    return unflatten(structure, [copied_leaves[id(leaf)] for leaf in leaves])


def _copy_in(memory: Memory, x: Tensor, home: Tensor) -> Tensor:
    """Return a copy in a memory, page-locked as `home` is."""
    device_type = "cuda" if home.is_pinned() else x.device.type
    return empty_in(memory, x.shape, x.dtype, device_type).copy_(x)


# -- optimizers inside of others -----------------------------------------------------------------


def is_optimizer(x: object) -> bool:
    """Return True for a pair of init and update, of any library."""
    functions = [getattr(x, name, None) for name in ("init", "update")]
    return all(map(callable, functions))


def check_optimizer(opt: object, caller: str) -> None:
    """Raise unless something has the functions of an optimizer: a pair of any library does."""
    if not is_optimizer(opt):
        name = opt.__name__ if isinstance(opt, type) else type(opt).__name__
        raise OptimizerError(
            f"{caller}: {name} is no pair of init and update. Write fs.optim.adamw(...), or make "
            "one of a class of torch: fs.optim.from_torch(torch.optim.RMSprop, lr=...)."
        )


def conditional(
    opt: Optimizer,
    init: Callable[[PyTree], dict[str, PyTree]],
    decide: Callable[[PyTree, PyTree], tuple[bool, PyTree, dict[str, PyTree]]],
) -> Optimizer:
    """Make an optimizer whose inner one acts in some steps only; in others parameters stay.

    Args:
        opt: the inner optimizer; its state is the entry "inner".
        init: from parameters to the other entries of the state.
        decide: from gradients and state to: whether the inner optimizer acts, the gradients it
            gets, the next other entries.
    """

    def if_decided(act: Update, unchanged: Callable[[PyTree, PyTree], PyTree]) -> Update:
        @undifferentiable
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            acts, inner_grads, entries = decide(grads, state)
            if not acts:
                return unchanged(grads, params), {**entries, "inner": state["inner"]}
            result, inner = act(inner_grads, state["inner"], params)
            return result, {**entries, "inner": inner}

        return run

    step = None
    if opt.step is not None:
        step = if_decided(step_of(opt), lambda grads, params: params)
    return Optimizer(
        init=lambda params: {**init(params), "inner": opt.init(params)},
        update=if_decided(opt.update, lambda grads, params: no_updates(grads)),
        step=step,
        sharding=opt.sharding,
        takes="arrays",
    )
