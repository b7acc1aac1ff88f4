"""`ShardedOptimizer`: an optimizer on the shards of a mesh.

In a step, in order of time, with the layouts of `layouts.py`:

    gradients, parameters                        as `train_step` has them
      (1) missing gradients become zeros         if no parameter may be skipped
      (2) compressors reduce gradients           if they come unreduced
      (3) the shards of the update               owners collect matrices; flat shards are cut
      (4) the inner optimizer's step             on the shards that each device has
      (5) the layouts of the parameters          an all_gather in stages 1 and 2; owners distribute
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from operator import is_
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fshard.errors import LayoutError, OptimizerError
from fshard.memory.kinds import claim, made_for
from fshard.memory.state import Update, UpdateOn
from fshard.mesh.layout import Layout, Memory, Mesh, PyTree, path_text
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import put_equal, reshard_all
from fshard.mesh.spmd.moments import listeners
from fshard.mesh.spmd.run import reach_on, resolve_mesh
from fshard.optim.contract import DonatingStep, Optimizer, step_of
from fshard.optim.leaves import Leaf, Leaves, kind_of, trainable
from fshard.optim.sharded.compression import Compression, are_unreduced
from fshard.optim.sharded.layouts import ShardLayouts, Stage, in_memory
from fshard.optim.sharded.offload import StateMemory, offloaded
from fshard.source import Site, call_site
from fshard.uncompiled import uncompiled

AT_ONCE = 1 << 26
"""Approximate bytes of parameters that are assembled together in a donated step.

Together they are one collective: large ones are as fast as the network. Each leaf's old memory is
freed when the next is assembled, so a step holds little more than one copy of the parameters.
"""


class ShardedOptimizer:
    """An optimizer whose state and work are sharded over the devices of a mesh.

    It has the functions of an `Optimizer` of arrays, and the layouts of the gradients that it
    takes.

    Args:
        opt: an optimizer of arrays.
        layouts: of the update's shards.
        memory: of the state; None if state is where `opt` makes it.
        compression: reduces gradients, which come unreduced. Then the state is {"compress",
            "inner"}.
        missing: "skip": parameters without a gradient, and their state, do not change. "zero":
            their gradient is zero.
        place_state: from a new state to the same in other memories.
        map_gradients: from the gradients of a step to those that it uses, for tests of a training.
    """

    def __init__(
        self,
        opt: Optimizer,
        layouts: ShardLayouts,
        memory: StateMemory | None = None,
        *,
        compression: Compression | None = None,
        missing: Literal["skip", "zero"] = "skip",
        place_state: Callable[[PyTree], PyTree] | None = None,
        map_gradients: Callable[[PyTree], PyTree] | None = None,
    ) -> None:
        self.opt = opt
        self.layouts = layouts
        self.memory = memory
        self.compression = compression
        self.missing = missing
        self.place_state = place_state
        self.map_gradients = map_gradients
        self._inner = opt if memory is None else offloaded(opt, layouts.mesh, memory)
        self._inner_step = step_of(self._inner)

    def __repr__(self) -> str:
        axes = self.layouts.axes
        axis = axes[0] if len(axes) == 1 else axes
        texts = [f"axis={axis!r}", f"stage={self.stage}", f"mesh={self.layouts.mesh!r}"]
        memories = {"state_memory": self.state_memory, "update_on": self.update_on}
        texts += [f"{name}={kind!r}" for name, kind in memories.items() if kind != "device"]
        if self.compression is not None:
            texts.append("compress=...")
        return f"ShardedOptimizer({', '.join(texts)})"

    def replaced(self, **options: Any) -> ShardedOptimizer:
        """Return the same optimizer with other options: the arguments of the class."""
        own = {name: x for name, x in vars(self).items() if not name.startswith("_")}
        return ShardedOptimizer(**own | options)

    def on_mesh(self, mesh: Mesh) -> ShardedOptimizer:
        """Return the same optimizer on another mesh with these axes."""
        layouts = replace(self.layouts, mesh=mesh)
        if self.compression is None:
            return self.replaced(layouts=layouts)
        return self.replaced(layouts=layouts, compression=self.compression.on_mesh(mesh))

    # -- properties ------------------------------------------------------------------------------

    @property
    def stage(self) -> Stage:
        """The stage of ZeRO."""
        return self.layouts.stage

    @property
    def state_memory(self) -> Memory:
        """The memory of the state between updates."""
        return "device" if self.memory is None else self.memory.state

    @property
    def update_on(self) -> UpdateOn:
        """The memory of the update."""
        return "device" if self.memory is None else self.memory.update_on

    @property
    def loss_scale(self) -> Callable[[PyTree], Tensor] | None:
        """From the state to the factor of the loss; None: 1."""
        scale = self._inner.loss_scale
        if scale is None or self.compression is None:
            return scale
        return lambda state: scale(state["inner"])

    def gradients(self, layout: Layout) -> Layout:
        """Return the layout of the gradient that the optimizer takes, from its parameter's."""
        if self.compression is not None:
            return self.compression.layout(layout)
        return self.layouts.of_gradient(layout)

    # -- init ------------------------------------------------------------------------------------

    @uncompiled
    def init(self, params: PyTree) -> PyTree:
        """Return the state of parameters."""
        if self.compression is None:
            state = self._init_inner(params)
        else:
            # The compressors first: their random draws come before those of the optimizer.
            compressors = self.compression.init(params)
            state = {"compress": compressors, "inner": self._init_inner(params)}
        return state if self.place_state is None else self.place_state(state)

    @made_for("state")
    def _init_inner(self, params: PyTree) -> PyTree:
        if self.memory is None:
            return self._inner.init(params)
        claim(params, "parameters")  # state counts for their devices
        leaves = Leaves.of(params)
        layouts = self.layouts
        _validate_mesh(leaves, leaves.leaves, layouts.mesh, takes_plain=not layouts.is_divided)
        _validate_memory(leaves, layouts.stage)
        if not layouts.is_divided:
            return self._inner.init(params)
        shards = _reshard(leaves.leaves, layouts.of_update(leaves), call_site())
        return self._inner.init(leaves.rebuild(shards))

    # -- update ----------------------------------------------------------------------------------

    @uncompiled
    def update(self, grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        """Return the updates of parameters, and the next state; arguments are not modified."""
        return self._run(self._inner.update, grads, state, params, writes=False)

    @property
    def step(self) -> Update:
        """The step: it returns parameters and state, and donates those that it is given."""
        return DonatingStep(partial(self._run, self._inner_step, writes=True))

    # Note [Lifetimes in a step]
    # A name keeps its tensors. At the end of each phase those that are not needed any more are
    # deleted, so that the step holds no more than the shards it works on: gradients that the step
    # has made go before the update, and the collected matrices before the parameters are assembled.
    # Each `del` lowers the peak; `tests/optim/test_update_memory.py` counts it.
    @uncompiled
    def _run(
        self, act: Update, grads: PyTree, state: PyTree, params: PyTree, *, writes: bool
    ) -> tuple[PyTree, PyTree]:
        """Run the inner optimizer's update, or its step, which `writes` parameters.

        See Note [Lifetimes in a step].
        """
        if self.map_gradients is not None:
            grads = self.map_gradients(grads)
        if self.missing == "zero":
            grads = self._with_zeros(grads, params)  # (1)
        compressors: PyTree = None
        if self.compression is not None:
            if are_unreduced(grads):
                grads, state = self.compression.reduce(grads, state)  # (2)
            compressors = state["compress"]
            state = state["inner"]

        if listeners:
            reach_on(self.layouts.mesh, "update")
        work = None
        collected = None
        if self.layouts.is_divided:
            work = self._work_on(params)
            collected = self._collect(work, grads)  # (3)
        if work is None or collected is None:
            result, state = act(grads, state, params)
        else:
            del grads
            result, state = act(collected.grads, state, collected.params)  # (4)
            del collected
            after = work.leaves.beside(result, "the optimizer's results")
            del result
            self._assemble(work, after, donates=writes)  # (5)
            result = work.leaves.rebuild(after)
        if self.compression is None:
            return result, state
        return result, {"compress": compressors, "inner": state}

    def _with_zeros(self, grads: PyTree, params: PyTree) -> PyTree:
        """Return gradients, zeros in place of None."""

        def with_zeros(x: Leaf, grad: Leaf) -> Leaf:
            is_missing = grad is None and isinstance(x, Sharded) and trainable(x)
            if not is_missing:
                return grad
            return put_equal(torch.zeros(x.shape, dtype=x.dtype), self.gradients(x.layout))

        leaves = Leaves.of(params)
        return leaves.mapped(with_zeros, leaves.beside(grads, "grads"))

    def _work_on(self, params: PyTree) -> _Work:
        """Return the work of an update of parameters."""
        leaves = Leaves.of(params)
        layouts = self.layouts.of_update(leaves)
        cut_layouts = self.layouts.of_collected(leaves.leaves, layouts)
        return _Work(leaves, layouts, cut_layouts, call_site())

    def _collect(self, work: _Work, grads: PyTree) -> _Collected | None:
        """Return gradients and parameters in the layouts of the update; None if nothing moves."""
        leaves = work.leaves
        gradients = leaves.beside(grads, "grads")
        _validate_mesh(leaves, leaves.leaves, self.layouts.mesh)
        _validate_mesh(leaves, gradients, self.layouts.mesh)
        memory = self.layouts.gradient_memory
        gradient_layouts = [layout and in_memory(layout, memory) for layout in work.layouts]
        before = [*gradients, *_reshard(leaves.leaves, work.cut_layouts, work.site)]
        shards = _reshard(before, [*gradient_layouts, *work.layouts], work.site)
        if shards is before:
            return None
        count = len(gradients)
        return _Collected(leaves.rebuild(shards[:count]), leaves.rebuild(shards[count:]))

    def _assemble(self, work: _Work, after: list[Leaf], *, donates: bool) -> None:
        """Move results into the layouts of the parameters, in place of the shards in the list.

        A step that `donates` its parameters assembles some at a time, and gives the given
        parameters their memory. Updates are assembled together.
        """
        params = work.leaves.leaves
        firsts = work.leaves.firsts
        for i, first in enumerate(firsts):
            if first != i:
                after[i] = None  # ties are one parameter, moved once
        after[:] = _reshard(after, work.cut_layouts, work.site)

        groups = _groups(after) if donates else [range(len(after))]
        for indices in groups:
            layouts = [None if params[i] is None else params[i].layout for i in indices]
            results = _reshard([after[i] for i in indices], layouts, work.site)
            for i, x in zip(indices, results, strict=True):
                if x is None or not donates:
                    after[i] = x
                else:
                    after[i] = _with_memory(params[i], x)
            del results  # or the last group would be held while the next is assembled
        after[:] = [after[first] for first in firsts]


class _Work(NamedTuple):
    """The work of an update: parameters and the layouts in which devices update them.

    Args:
        leaves: the parameters.
        layouts: of each in the update; None where nothing is updated.
        cut_layouts: of those that owners collect, on the way there and back: see `of_collected`.
        site: the source line of the step.
    """

    leaves: Leaves
    layouts: Sequence[Layout | None]
    cut_layouts: Sequence[Layout | None]
    site: Site


class _Collected(NamedTuple):
    """Trees of what devices work on."""

    grads: PyTree
    params: PyTree


# -- leaves --------------------------------------------------------------------------------------


def _reshard(leaves: list[Leaf], layouts: Sequence[Layout | None], site: Site) -> list[Leaf]:
    """Return leaves in the given layouts, resharded together; the list itself, if none moves."""
    goals: dict[int, Layout] = {}
    for i, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True)):
        if leaf is not None and layout is not None and leaf.layout is not layout:
            goals[i] = layout
    if not goals:
        return leaves
    arrays = reshard_all([leaves[i] for i in goals], [*goals.values()], site)
    resharded = dict(zip(goals, arrays, strict=True))
    return [resharded.get(i, leaf) for i, leaf in enumerate(leaves)]


def _groups(leaves: list[Leaf]) -> list[Sequence[int]]:
    """Return the indices of leaves that are assembled together: about AT_ONCE bytes each."""
    groups: dict[int, list[int]] = {}
    end = 0
    for i, leaf in enumerate(leaves):
        if leaf is not None:
            end += prod(leaf.shape) * leaf.dtype.itemsize
        groups.setdefault(end // AT_ONCE, []).append(i)
    return [*groups.values()]


def _with_memory(param: Sharded, result: Sharded) -> Sharded:
    """Return a parameter whose shards have the memory of those of a result.

    So the given parameter's memory is free at once, and not when its caller lets go of it.
    """
    if all(map(is_, param.shards, result.shards)):
        return param
    if param.dtype != result.dtype:
        return result
    for target, source in zip(param.shards, result.shards, strict=True):
        if source.data_ptr() == target.data_ptr():
            continue
        # The view of a collective's buffer, which has padding or other leaves, would keep all of
        # it.
        is_alone = source.untyped_storage().nbytes() == source.nbytes
        target.data = source if is_alone else source.clone()
    return param


# -- checks --------------------------------------------------------------------------------------


def _validate_mesh(
    params: Leaves, leaves: list[Leaf], mesh: Mesh, *, takes_plain: bool = False
) -> None:
    """Raise naming the first leaf that is not on a mesh; plain tensors may be, if `takes_plain`."""
    for i, leaf in enumerate(leaves):
        if leaf is None:
            continue
        if isinstance(leaf, Sharded):
            is_valid = leaf.mesh is mesh or leaf.mesh in (mesh, resolve_mesh(mesh))
        else:
            is_valid = takes_plain
        if is_valid:
            continue
        name = path_text(params.paths[i]) or "the leaf"
        raise LayoutError(
            f"partition_optimizer on {mesh}: {name} is {kind_of(leaf)}. "
            "Give the mesh of the parameters, or shard them on this one: fs.shard_params(params, "
            "rules, mesh=mesh)."
        )


def _validate_memory(params: Leaves, stage: Stage) -> None:
    """Raise with the parameters in other memory, which only stage 3 fetches before their use."""
    if stage == 3:
        return
    away: list[str] = []
    for path, x in zip(params.paths, params.leaves, strict=True):
        if isinstance(x, Sharded) and x.layout.memory != "device":
            away.append(f"{path_text(path) or 'the leaf'} in {x.layout.memory} memory")
    if away:
        raise OptimizerError(
            f"partition_optimizer: stage must be 3 for parameters in other memory; got {stage}, "
            f"and {', '.join(away)}. Leave memory= out of shard_params, or write stage=3."
        )
