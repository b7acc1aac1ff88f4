"""What stages remember from one step to the next, as the running statistics of BatchNorm: on the devices that have them.

As without stages, every microbatch starts from the same, and what comes back is the mean over all that wrote to it, weighted
as the loss is (see `remembered`).  What was put off by a BatchNorm (`deferred`) is added up, and committed at last.

Only the devices of a stage know what it has made, and of which shape; so these tell the others, where a step has made
something new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.errors import LayoutError
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.scope import Group
from fshard.mesh.sharded import Sharded
from fshard.mesh.spmd import held
from fshard.mesh.tree import PyTree, flatten, flatten_with_paths, unflatten
from fshard.pipeline.turns import Stage
from fshard.source import Site
from fshard.transforms.buffers import numbers
from fshard.transforms.deferred import commit_batch_norm, is_pending, pending
from fshard.transforms.functionalize import in_two_parts
from fshard.transforms.hidden import watched
from fshard.transforms.kept import forgotten, is_forgotten, slot_of
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.remembered import Entry, Written, averaged, entry_of, of_one_kind
from fshard.transforms.stage_layouts import on_place


class Remembering:
    """A module as a function of ((params, buffers), x) that returns (y, buffers), or y and what ends the call."""

    def __init__(self, module: nn.Module, deferred: bool, several: bool) -> None:
        begun, _, _ = in_two_parts(module, deferred_batch_norm=deferred)
        self._begun = watched(begun, module) if several else begun
        self._sums = pending(module) if deferred else {}

    def begun(self, given: tuple[PyTree, PyTree], x: PyTree, **skips: PyTree) -> tuple[PyTree, Callable[[], PyTree]]:
        """Return y, and what returns the buffers: see `in_two_parts`."""
        params, buffers = given
        return self._begun(params, {**buffers, **self._sums}, x, **skips)

    def __call__(self, given: tuple[PyTree, PyTree], x: PyTree, **skips: PyTree) -> tuple[PyTree, PyTree]:
        """Return both."""
        y, end = self.begun(given, x, **skips)
        return y, end()


def remembering(stage: nn.Module | Stage, deferred: bool, *, several: bool) -> Stage:
    """Return a stage as a function of ((params, buffers), x) that returns (y, buffers); a step may call it several times."""
    if isinstance(stage, nn.Module):
        return Remembering(stage, deferred, several)
    return lambda given, x, **skips: stage(*given, x, **skips)


class StageBuffers:
    """The buffers that a step is given: a tree for each stage."""

    def __init__(self, caller: str, trees: PyTree, mesh: Mesh, axis: str, placement: Sequence[int]) -> None:
        count = len(trees) if isinstance(trees, list | tuple) else None
        if count != len(placement):
            raise LayoutError(
                f"{caller}: {len(placement)} stages have a list of as many trees of buffers, found "
                f"{type(trees).__name__ if count is None else count}. Write fs.shard_stages([dict(stage.named_buffers()) for "
                "stage in stages], mesh=mesh, schedule=schedule)."
            )
        self._mesh, self._axis, self._placement = mesh, axis, placement
        self._found = [flatten_with_paths(tree, sharded_is_leaf=True, none_is_leaf=True) for tree in trees]
        wrong = [
            f"{named((str(stage), *parts_of(path)))} is {x.spec if isinstance(x, Sharded) else type(x).__name__}"
            for stage, (paths, leaves, _) in enumerate(self._found)
            for path, x in zip(paths, leaves, strict=True)
            if not isinstance(x, Sharded) or x.spec != self._layout(stage).spec
        ]
        if wrong:
            raise LayoutError(
                f"{caller}: buffers lie whole where the schedule has their stage, but {'; '.join(wrong)}. Lay them there: "
                "fs.shard_stages(trees, mesh=mesh, schedule=schedule)."
            )

    def _layout(self, stage: int) -> Layout:
        return on_place(Layout(self._mesh), self._axis, self._placement[stage])

    def part(self, at: int) -> list[PyTree]:
        """Return what the device has whose shards stand at a place, for each stage."""
        return [unflatten(structure, [x.shards[at] for x in leaves]) for _, leaves, structure in self._found]

    def after(self, learnt: Sequence[Learnt]) -> list[PyTree]:
        """Return the buffers for the next step, from what each device at hand has learnt."""
        new = {entry.path: entry for entry in learnt[0].new}
        trees: list[PyTree] = []
        for stage, (paths, leaves, structure) in enumerate(self._found):
            known = {key_of(stage, path) for path in paths}
            pairs = zip(paths, leaves, strict=True)
            tree = unflatten(structure, [self._leaf(stage, key_of(stage, path), x, new, learnt) for path, x in pairs])
            for key in new.keys() - known:
                at, path = stage_and_path(key)
                if at == stage:
                    tree[path[2:-2]] = self._leaf(stage, key, None, new, learnt)
            trees.append(tree)
        return trees

    def _leaf(
        self, stage: int, key: str, given: Sharded | None, new: Mapping[str, Entry], learnt: Sequence[Learnt]
    ) -> Sharded:
        """Return a buffer; if it is new, or has a new shape, devices that do not have the stage have nothing of that."""
        if key in new:
            layout, shape, dtype = self._layout(stage), new[key].shape, getattr(torch, new[key].dtype)
            near = self._mesh.device_type
            empty = [torch.empty(layout.local_shape(shape, at), dtype=dtype, device=near) for at in held(self._mesh)]
            shards = [one.values.get(key, x) for one, x in zip(learnt, empty, strict=True)]
            return Sharded(shape, layout, tuple(shards))
        assert given is not None
        if not any(key in one.values for one in learnt):
            return given
        shards = [one.values.get(key, x) for one, x in zip(learnt, given.shards, strict=True)]
        return Sharded(given.shape, given.layout, tuple(shards))


class Learnt(NamedTuple):
    """What one device has learnt, by stage and path; and what any device has that is new, or has a new shape."""

    values: Mapping[str, Tensor]
    new: Sequence[Entry]


class Memory:
    """What the stages of one device learn in a step; `parts` are their buffers before it."""

    def __init__(self, caller: str, parts: Sequence[PyTree], modules: Sequence[nn.Module | None]) -> None:
        self._caller, self._modules = caller, modules
        self._before = [_by_path(part) for part in parts]
        self.parts = [_known(part) for part in parts]
        self._given = [flatten(part, none_is_leaf=True) for part in self.parts]
        self._learnt: dict[int, dict[str, Any]] = {}

    def note(self, stage: int, microbatch: int, after: PyTree) -> None:
        """Note what a stage has returned of its buffers."""
        given, structure = self._given[stage]
        if not after and not given:
            return
        leaves, form = flatten(after, none_is_leaf=True)
        if form == structure and all(map(is_, given, leaves)):
            return
        before, found = self._before[stage], _by_path(after)
        new = {path: x for path, x in found.items() if path not in before or x is not before[path]}
        missing = [path for path in before if path not in found]
        wrong = [path for path in missing if slot_of(path[2:-2]) is None]
        new |= {path: forgotten() for path in missing if path not in wrong and not is_forgotten(before[path])}
        wrong += [path for path in new if path not in before and self._modules[stage] is None]
        if wrong:
            listed = ", ".join(named(parts_of(path)) for path in wrong)
            raise LayoutError(
                f"{self._caller}: stage {stage} has to return (y, buffers), those that it was given: {listed}."
            )
        self._learnt.setdefault(microbatch, {}).update({key_of(stage, path): x for path, x in new.items()})

    def written(self, weights: Sequence[float]) -> list[Written]:
        """Return what each microbatch has written to; they count for so much."""
        rows = [self._learnt.get(microbatch, {}) for microbatch in range(len(weights))]
        near = torch.device("cpu")
        return [
            Written(weight, dict(zip(row, numbers(row, near), strict=True)))
            for weight, row in zip(weights, rows, strict=True)
        ]

    def is_new(self, entry: Entry) -> bool:
        """Return whether other devices do not know of something: neither a sum that was put off nor a buffer like the given."""
        stage, path = stage_and_path(entry.path)
        given = self._before[stage].get(path)
        return not is_pending(path) and (given is None or entry != entry_of(entry.path, given))

    def together(
        self,
        written: Sequence[Written],
        entries: Sequence[Entry],
        group: Group | None,
        site: Site,
    ) -> dict[str, Tensor]:
        """Return what has changed as it is after all microbatches of all devices of a group, which ask for it alike."""
        given = {key_of(stage, path): x for stage, tree in enumerate(self._before) for path, x in tree.items()}
        sums = {entry.path for entry in entries if is_pending(stage_and_path(entry.path)[1])}
        result = averaged(written, of_one_kind(entries), group, given, torch.device("cpu"), site, added=sums)
        for stage in sorted({stage_and_path(key)[0] for key in sums}):
            module = self._modules[stage]
            assert module is not None
            own = {path: x for key, x in result.items() for at, path in [stage_and_path(key)] if at == stage}
            after = commit_batch_norm(module, {path[2:-2]: x for path, x in {**self._before[stage], **own}.items()})
            result |= {key_of(stage, path): after[path[2:-2]] for path in self._before[stage]}
        return {key: x for key, x in result.items() if key not in sums}


def key_of(stage: int, path: str) -> str:
    """Return the path of a buffer in the list of all stages' trees."""
    return f"[{stage}]{path}"


def stage_and_path(key: str) -> tuple[int, str]:
    """Return the stage, and the path in its tree.

    >>> stage_and_path(key_of(12, '["norm.running_mean"]'))
    (12, '["norm.running_mean"]')
    """
    number, _, path = key[1:].partition("]")
    return int(number), path


def _known(part: PyTree) -> PyTree:
    """Return buffers without what stands for attributes that are kept no more."""
    if isinstance(part, dict) and any(map(is_forgotten, part.values())):
        return {name: x for name, x in part.items() if not is_forgotten(x)}
    return part


def _by_path(tree: PyTree) -> dict[str, Any]:
    paths, leaves, _ = flatten_with_paths(tree, none_is_leaf=True)
    return dict(zip(paths, leaves, strict=True))
