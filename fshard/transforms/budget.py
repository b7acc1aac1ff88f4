"""What a device would hold of a model in training, counted on an abstract mesh: nothing is laid anywhere.

device 0 .. 3   [whole parameters | gradients | state]      fs.P(), stage 0
                [parameters / 4 | two units | gradients / 4, one unit | state / 4]      fs.fsdp("data"), stage 3

Parameters and state lie as a functional step would lay them, so they are what it holds.  What a step makes besides is worked
out here from how it goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import nn

from fshard.mesh.layout import Layout
from fshard.mesh.sharded import Sharded, key_of
from fshard.mesh.tree import PyTree, flatten, flatten_with_paths
from fshard.optim.leaves import trainable
from fshard.optim.source import NOTHING, OptimizerSource
from fshard.pipeline.schedule import Schedule
from fshard.transforms.arrangement import Arrangement
from fshard.transforms.patterns import unit_of


class Budget(NamedTuple):
    """Bytes that one device holds.  What is under way, gathered ahead or being reduced, is not counted: a unit or two.

    Args:
        parameters: as they lie at rest.
        copies: for use.  Of units that lie in pieces those that are whole at a time, the largest; of a stage in pieces all.  Of
            what lies whole those in another dtype, all of them: they stay for a step.
        gradients: whole where they are reduced once a step: in stages 0 and 1, of a pipeline, and in reproducible mode, which
            has several trees of them.  Else pieces, and the largest unit's whole ones.
        state: of the optimizer, as it makes it.
        activations: those of the microbatches that a device of a pipeline holds at once, or else of its part of the batch.
    """

    parameters: int
    copies: int
    gradients: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def budget(how: Arrangement, model: nn.Module, source: OptimizerSource, activations: int = 0) -> Budget:
    """Return what that device holds that holds most.

    Args:
        how: all is to lie, on an abstract mesh.
        model: what is trained, but for what is frozen in it.
        source: what trains it, and which parameters are its.
        activations: bytes that those of a whole batch take, of the whole model.

    >>> import fshard as fs
    >>> mesh = fs.make_mesh({"data": 4}, runtime="abstract")
    >>> model = nn.Sequential(nn.Linear(100, 10, bias=False), nn.Linear(10, 10, bias=False).requires_grad_(False))
    >>> def counted(plugin):
    ...     source = fs.optim.source.optimizer_source(fs.optim.adamw(), dict(model.named_parameters()), "budget")
    ...     return budget(plugin.arranged(mesh), model, source)
    >>> counted(fs.DDPPlugin())
    Budget(parameters=4400, copies=0, gradients=4000, state=8000, activations=0)
    >>> counted(fs.ZeroPlugin(stage=1, precision="bf16"))
    Budget(parameters=4400, copies=2200, gradients=4000, state=2000, activations=0)
    """
    state, _ = how.functional(model, source, None)
    rest, kept = _pieces(state.params), _pieces(state.optimizer)
    part, found = Fraction(activations, _along_batch(how)), list[Budget]()
    for place, (trees, held) in enumerate(zip(*_places(how, state.params, part), strict=True)):
        rows = [row for unit, tree in trees for row in _with_units(tree, unit)]
        for device in _unlike(how, place, [*rest, *kept]):
            found.append(
                Budget(
                    _bytes(rest, device),
                    _copies(how, rows, device),
                    _gradients(how, rows),
                    _bytes(kept, device),
                    ceil(held),
                )
            )
    return max(found, key=lambda one: one.total)


def _along_batch(how: Arrangement) -> int:
    return prod(how.mesh.shape[axis] for axis in how.axes)


def _places(
    how: Arrangement, params: PyTree, part: Fraction
) -> tuple[Sequence[Sequence[tuple[str, PyTree]]], Sequence[Any]]:
    """Return for each place along the pipeline its trees of parameters, and what it holds of a part's activations."""
    plan = _plan(how)
    if plan is None:
        return [[("", params)]], [part]
    stages = [*zip(plan.placement, params, strict=True)]
    trees = [
        [(f"stage {number}", tree) for number, (at, tree) in enumerate(stages) if at == place]
        for place in range(plan.devices)
    ]
    one = part / plan.stages / plan.microbatches
    return trees, plan.simulate(activation=one).peak_activations if part else [0] * plan.devices


def _plan(how: Arrangement) -> Schedule | None:
    return how.options.get("schedule")


def _with_units(tree: PyTree, unit: str) -> Iterator[tuple[str, Sharded]]:
    """Yield each parameter once, and with what it is gathered: with all of its stage, if it is in one."""
    paths, leaves, _ = flatten_with_paths(tree, sharded_is_leaf=True)
    once = {key_of(leaf): (path, leaf) for path, leaf in zip(paths, leaves, strict=True)}
    yield from ((unit or leaf.layout.unit or unit_of(path), leaf) for path, leaf in once.values())


# -- at rest ----------------------------------------------------------------------------------------------------------

_Pieces = Counter[tuple[Layout, tuple[int, ...], int]]
"""How many tensors lie so, are of this shape, and have elements of so many bytes."""


def _pieces(tree: PyTree) -> _Pieces:
    leaves = {key_of(x): x for x in flatten(tree, sharded_is_leaf=True)[0] if isinstance(x, Sharded)}.values()
    return Counter((Layout(x.mesh, x.spec), x.shape, x.dtype.itemsize) for x in leaves)


def _bytes(pieces: _Pieces, device: int) -> int:
    return sum(many * size * _size(layout, shape, device) for (layout, shape, size), many in pieces.items())


def _size(layout: Layout, shape: Sequence[int], device: int = 0) -> int:
    return prod(layout.local_shape(shape, device))


def _unlike(how: Arrangement, place: int, pieces: Iterable[tuple[Layout, tuple[int, ...], int]]) -> set[int]:
    """Return the devices at a place along the pipeline that may hold most: the first, and the first of each owner."""
    mesh = how.mesh
    here = {how.options["axis"]: place} if _plan(how) is not None else {}
    owners = [here | layout.place for layout, *_ in pieces]
    return {mesh.index(here), *(mesh.index(owner) for owner in owners if here.items() <= owner.items())}


# -- in use -----------------------------------------------------------------------------------------------------------


def _used(how: Arrangement, leaf: Sharded) -> torch.dtype:
    compute = how.options["compute"]
    return compute if compute is not None and leaf.dtype.is_floating_point else leaf.dtype


def _copies(how: Arrangement, rows: Sequence[tuple[str, Sharded]], device: int) -> int:
    gathered, converted = Counter[str](), 0
    for unit, leaf in rows:
        size, dtype = prod(leaf.shape), _used(how, leaf)
        if _size(leaf.layout, leaf.shape, device) < size:
            gathered[unit] += size * dtype.itemsize
        elif dtype is not leaf.dtype:
            converted += size * dtype.itemsize
    let_go = how.options.get("reshard_after_forward", True)
    whole = gathered.most_common(how.options.get("live_units", 2) if let_go else None)
    return converted + sum(size for _, size in whole)


def _gradients(how: Arrangement, rows: Sequence[tuple[str, Sharded]]) -> int:
    plan, in_trees, lay = _plan(how), how.options["reproducible"], how.partition(NOTHING).gradients
    turns = plan.microbatches if plan is not None else how.options["slices"] // _along_batch(how) if in_trees else 1
    once = how.stage < 2 or plan is not None or in_trees
    gradients, reduced = 0, Counter[str]()
    for unit, leaf in rows:
        if trainable(leaf):
            size, dtype = prod(leaf.shape), how.options["reduce"] or _used(how, leaf)
            if in_trees or turns > 1:
                dtype = torch.promote_types(dtype, torch.float32)
            piece = size if once else _size(lay(leaf.layout), leaf.shape)
            gradients += piece * torch.promote_types(dtype, leaf.dtype).itemsize
            reduced[unit] += size * dtype.itemsize if piece < size else 0
    return gradients * (turns.bit_length() if in_trees else 1) + max(reduced.values(), default=0)
