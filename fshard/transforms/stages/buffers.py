"""The buffers of stages, on the devices that have the stage.

As without stages, every microbatch starts from the same ones, and the next step's are the mean over all that wrote to them,
weighted as the loss is (see `buffers`).  The sums of a deferred BatchNorm are added up and committed at last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fshard.errors import LayoutError
from fshard.mesh.layout import Layout, Mesh, PyTree, flatten_with_paths, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.scope import Group
from fshard.pipeline.execution.leaves import Stage
from fshard.source import Site
from fshard.transforms.module.batchnorm import commit_batch_norm, is_pending, pending
from fshard.transforms.module.buffers import BufferEntry, Written, averaged, entry_of, number_of
from fshard.transforms.module.functionalize import functionalize, functionalize_in_place
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.stages.plan import on_place


def with_buffers(stage: nn.Module | Stage, deferred: bool, *, in_place: bool = False) -> Stage:
    """Convert a stage to a function of ((params, buffers), x) that returns (y, buffers); a module may run in place."""
    if not isinstance(stage, nn.Module):
        return lambda given, x, **skips: stage(*given, x, **skips)
    apply, _, _ = (functionalize_in_place if in_place else functionalize)(stage, deferred_batch_norm=deferred)
    sums = pending(stage) if deferred else {}
    return lambda given, x, **skips: apply(given[0], {**given[1], **sums}, x, **skips)


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
                f"{caller}: buffers must be replicated on the devices of their stage, but {'; '.join(wrong)}. Put them there: "
                "fs.shard_stages(trees, mesh=mesh, schedule=schedule)."
            )

    def _layout(self, stage: int) -> Layout:
        return on_place(Layout(self._mesh), self._axis, self._placement[stage])

    def part(self, at: int) -> list[PyTree]:
        """Return the buffers of each stage on the device at this index of shards."""
        return [unflatten(structure, [x.shards[at] for x in leaves]) for _, leaves, structure in self._found]

    def after(self, changed: Sequence[Mapping[str, Tensor]]) -> list[PyTree]:
        """Return the buffers for the next step, from those of each local device's stages, by key."""
        return [
            unflatten(
                structure, [_next(key_of(stage, path), x, changed) for path, x in zip(paths, leaves, strict=True)]
            )
            for stage, (paths, leaves, structure) in enumerate(self._found)
        ]


def _next(key: str, given: Sharded, changed: Sequence[Mapping[str, Tensor]]) -> Sharded:
    if not any(key in one for one in changed):
        return given
    shards = [one.get(key, x) for one, x in zip(changed, given.shards, strict=True)]
    return Sharded(given.shape, given.layout, tuple(shards))


class Memory:
    """The buffers that the stages of one device write in a step; `parts` are the buffers before it."""

    def __init__(self, caller: str, parts: Sequence[PyTree], modules: Sequence[nn.Module | None]) -> None:
        self.parts, self._caller, self._modules = parts, caller, modules
        self._given = {key_of(stage, path): x for stage, part in enumerate(parts) for path, x in _by_path(part).items()}
        self._written: dict[int, dict[str, Tensor]] = {}

    @property
    def keys(self) -> list[str]:
        """The buffers of all stages, and the sums that are pending."""
        sums = [
            key_of(at, f'["{name}"]') for at, module in enumerate(self._modules) if module for name in pending(module)
        ]
        return [*self._given, *(key for key in sums if key not in self._given)]

    def note(self, stage: int, microbatch: int, after: PyTree) -> None:
        """Note the buffers that a stage returned; raise unless they are the given ones, of their shapes and dtypes."""
        found = {key_of(stage, path): x for path, x in _by_path(after).items()}
        own = {key for key in self._given if stage_and_path(key)[0] == stage}
        near = torch.device("cpu")
        new = {key: number_of(key, x, near) for key, x in found.items() if x is not self._given.get(key, self)}
        wrong = [f"{_shown(key)} is missing" for key in own - found.keys()]
        wrong += [f"{_shown(key)} is new" for key in new.keys() - own if not is_pending(stage_and_path(key)[1])]
        wrong += [
            f"{_shown(key)} is {str(x.dtype)[6:]}{list(x.shape)}"
            for key, x in new.items()
            if key in own and entry_of(key, x) != entry_of(key, self._given[key])
        ]
        if wrong:
            raise LayoutError(
                f"{self._caller}: stage {stage} must return (y, buffers), of the names, shapes and dtypes that it was given; "
                f"{'; '.join(sorted(wrong))}."
            )
        self._written.setdefault(microbatch, {}).update(new)

    def written(self, weights: Sequence[float]) -> list[Written]:
        """Return the buffers that each microbatch has written to, with its weight."""
        return [Written(weight, self._written.get(microbatch, {})) for microbatch, weight in enumerate(weights)]

    def together(
        self, written: Sequence[Written], flagged: Sequence[str], place: Sequence[int], group: Group | None, site: Site
    ) -> dict[str, Tensor]:
        """Return the changed buffers after all microbatches; a collective of a group of devices.

        Args:
            written: by this device's microbatches.
            flagged: written by any device.
            place: coordinate of these devices along the pipeline.
            group: the devices that have the same stages.
            site: the source line of the step.
        """
        keys = [key for key in flagged if stage_and_path(key)[0] in place]
        sums = {key for key in keys if is_pending(stage_and_path(key)[1])}
        entries = [self._entry(key) for key in keys]
        result = averaged(written, entries, group, self._given, torch.device("cpu"), site, added=sums)
        for stage in sorted({stage_and_path(key)[0] for key in sums}):
            module = self._modules[stage]
            assert module is not None
            own = {key: x for key, x in (self._given | result).items() if stage_and_path(key)[0] == stage}
            after = commit_batch_norm(module, {stage_and_path(key)[1][2:-2]: x for key, x in own.items()})
            result |= {key: after[stage_and_path(key)[1][2:-2]] for key in own}
        return {key: x for key, x in result.items() if key not in sums}

    def _entry(self, key: str) -> BufferEntry:
        if key in self._given:
            return entry_of(key, self._given[key])
        stage, path = stage_and_path(key)
        module = self._modules[stage]
        assert module is not None
        return entry_of(key, pending(module)[path[2:-2]])


def _shown(key: str) -> str:
    return named(parts_of(stage_and_path(key)[1]))


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


def _by_path(tree: PyTree) -> dict[str, Any]:
    paths, leaves, _ = flatten_with_paths(tree, none_is_leaf=True)
    return dict(zip(paths, leaves, strict=True))
