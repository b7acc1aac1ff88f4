"""What stages remember from one step to the next, as the running statistics of BatchNorm: on the devices that have them.

As without stages, every microbatch starts from the same, and what comes back is the mean over all, weighted as the loss is.
What is new in the buffers that a stage returns is a sum that was put off (`deferred`): it is added up, and committed at last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fshard.errors import LayoutError
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.scope import Group
from fshard.mesh.sharded import Sharded
from fshard.mesh.tree import PyTree, flatten_with_paths, unflatten
from fshard.pipeline.turns import Stage
from fshard.source import Site
from fshard.transforms.buffers import numbers
from fshard.transforms.deferred import commit_batch_norm
from fshard.transforms.functionalize import functionalize
from fshard.transforms.means import Found, together
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.stage_layouts import on_place


def remembering(stage: nn.Module | Stage, deferred: bool) -> Stage:
    """Return a stage as a function of ((params, buffers), x) that returns (y, buffers)."""
    if not isinstance(stage, nn.Module):
        return lambda given, x, **skips: stage(*given, x, **skips)
    apply, _, first = functionalize(stage, deferred_batch_norm=deferred)
    pending = {name: x for name, x in first.items() if name not in dict(stage.named_buffers())}
    return lambda given, x, **skips: apply(given[0], {**given[1], **pending}, x, **skips)


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
        self._found = [flatten_with_paths(tree, sharded_is_leaf=True, none_is_leaf=True) for tree in trees]
        wrong = [
            f"{named((str(stage), *parts_of(path)))} is {x.spec if isinstance(x, Sharded) else type(x).__name__}"
            for stage, ((paths, leaves, _), place) in enumerate(zip(self._found, placement, strict=True))
            for path, x in zip(paths, leaves, strict=True)
            if not isinstance(x, Sharded) or x.spec != on_place(Layout(mesh), axis, place).spec
        ]
        if wrong:
            raise LayoutError(
                f"{caller}: buffers lie whole where the schedule has their stage, but {'; '.join(wrong)}. Lay them there: "
                "fs.shard_stages(trees, mesh=mesh, schedule=schedule)."
            )

    def part(self, at: int) -> list[PyTree]:
        """Return what the device has whose shards stand at a place, for each stage."""
        return [unflatten(structure, [x.shards[at] for x in leaves]) for _, leaves, structure in self._found]

    def after(self, learnt: Sequence[Mapping[int, Mapping[str, Tensor]]]) -> list[PyTree]:
        """Return the buffers for the next step, from what each device at hand has learnt, by stage and path."""

        def leaf(stage: int, path: str, x: Sharded) -> Sharded:
            new = [one.get(stage, {}).get(path, shard) for one, shard in zip(learnt, x.shards, strict=True)]
            return Sharded(x.shape, x.layout, tuple(new))

        return [
            unflatten(structure, [leaf(stage, path, x) for path, x in zip(paths, leaves, strict=True)])
            for stage, (paths, leaves, structure) in enumerate(self._found)
        ]


class Memory:
    """What the stages of one device learn in a step; `parts` are their buffers before it."""

    def __init__(self, caller: str, parts: Sequence[PyTree], modules: Sequence[nn.Module | None]) -> None:
        self._caller, self.parts, self._modules = caller, parts, modules
        self._before = [_by_path(part) for part in parts]
        self._learnt: dict[int, dict[int, dict[str, Any]]] = {}

    def note(self, stage: int, microbatch: int, after: PyTree) -> None:
        """Note what a stage has returned of its buffers."""
        before, found = self._before[stage], _by_path(after)
        new = {path: x for path, x in found.items() if path not in before or x is not before[path]}
        wrong = [path for path in before if path not in found]
        wrong += [path for path in new if path not in before and self._modules[stage] is None]
        if wrong:
            listed = ", ".join(named(parts_of(path)) for path in wrong)
            raise LayoutError(
                f"{self._caller}: stage {stage} has to return (y, buffers), those that it was given: {listed}."
            )
        self._learnt.setdefault(stage, {})[microbatch] = new

    def together(self, weights: Sequence[float], group: Group | None, site: Site) -> dict[int, dict[str, Tensor]]:
        """Return what has changed, by stage and path, as it is after all microbatches of all devices."""
        changed = [(stage, path) for stage, learnt in sorted(self._learnt.items()) for path in learnt[len(weights) - 1]]
        if not changed:
            return {}
        means, sums = ([at for at in changed if (at[1] in self._before[at[0]]) is known] for known in (True, False))
        rows = [
            [self._learnt[stage][each].get(path) for stage, path in (*means, *sums)] for each in range(len(weights))
        ]
        found = [
            Found(torch.zeros(()), weight, self._numbers(means, row), self._numbers(sums, row[len(means) :]))
            for weight, row in zip(weights, rows, strict=True)
        ]
        all_of_them, _ = together(found, [], group, 1, site)
        result: dict[int, dict[str, Tensor]] = {stage: {} for stage in self._learnt}
        for (stage, path), x in zip([*means, *sums], [*all_of_them.means, *all_of_them.counts], strict=True):
            result[stage][path] = x
        return {stage: self._committed(stage, new) for stage, new in result.items()}

    def _numbers(self, places: Sequence[tuple[int, str]], values: Sequence[Any]) -> list[Tensor]:
        """Return the values at some places; what a microbatch has left alone is as it was."""
        pairs = zip(places, values, strict=False)
        given = {f"{stage}{path}": self._before[stage][path] if x is None else x for (stage, path), x in pairs}
        return numbers(given, torch.device("cpu"))

    def _committed(self, stage: int, new: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what is new of a stage, with what was put off."""
        before, module = self._before[stage], self._modules[stage]
        if module is None or all(path in before for path in new):
            return new
        after = commit_batch_norm(module, {_key(path): x for path, x in {**before, **new}.items()})
        return {path: after[_key(path)] for path in before}


def _by_path(tree: PyTree) -> dict[str, Any]:
    paths, leaves, _ = flatten_with_paths(tree, none_is_leaf=True)
    return dict(zip(paths, leaves, strict=True))


def _key(path: str) -> str:
    """Return the name of a module's buffer from its path, `["1.running_mean"]`."""
    return path[2:-2]
