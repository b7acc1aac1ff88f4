"""The buffers of stages, on the devices that have the stage.

As without stages, every microbatch starts from the same ones, and the next step's are the mean over all that wrote to them,
weighted as the loss is (see `buffers`). Running statistics of BatchNorm are not means over microbatches, whose variance
would be too small, but move once, towards those of all samples together (torchgpipe's deferred BatchNorm); in
reproducible mode they are means, with the bits of a step without stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fshard.errors import LayoutError
from fshard.mesh.layout import Layout, Mesh, PyTree, flatten_with_paths
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.scope import Group
from fshard.pipeline.execution.leaves import Stage
from fshard.source import Site
from fshard.transforms.agreement import reduce_rows, tree_sum
from fshard.transforms.module.batchnorm import Moments
from fshard.transforms.module.buffers import Buffers, Written, averaged, entry_of, number_of
from fshard.transforms.module.functionalize import module_function
from fshard.transforms.patterns import named, parts_of
from fshard.transforms.stages.plan import at_coordinate


def with_buffers(stage: nn.Module | Stage, *, in_place: bool = False) -> Stage:
    """Convert a stage to a function of ((params, buffers), x) that returns (y, buffers); a module may run in place."""
    if not isinstance(stage, nn.Module):
        return lambda state, x, **skips: stage(*state, x, **skips)
    apply, _, _ = module_function(stage, in_place=in_place)
    return lambda state, x, **skips: apply(*state, x, **skips)


def stage_buffers(
    caller: str, trees: PyTree, mesh: Mesh, axis: str, placement: Sequence[int]
) -> Buffers:
    """Return the buffers that a step is given: a tree for each stage, replicated on the devices of the stage."""
    count = len(trees) if isinstance(trees, list | tuple) else None
    if count != len(placement):
        raise ValueError(
            f"{caller}: {len(placement)} stages have a list of as many trees of buffers, found "
            f"{type(trees).__name__ if count is None else count}. Write fs.shard_stages([dict(stage.named_buffers()) for "
            "stage in stages], mesh=mesh, schedule=schedule)."
        )

    def layout_of(path: str) -> Layout:
        return at_coordinate(Layout(mesh), axis, placement[stage_of(path)])

    entries = zip(*flatten_with_paths(trees, none_is_leaf=True)[:2], strict=True)
    misplaced = [
        f"{named(parts_of(path))} is {x.spec if isinstance(x, Sharded) else type(x).__name__}"
        for path, x in entries
        if not isinstance(x, Sharded) or x.spec != layout_of(path).spec
    ]
    if misplaced:
        raise LayoutError(
            f"{caller}: buffers must be replicated on the devices of their stage, but {'; '.join(misplaced)}. Put them there: "
            "fs.shard_stages(trees, mesh=mesh, schedule=schedule)."
        )
    return Buffers(trees, mesh, layout_of)


class StageWrites:
    """The buffers that the stages of one device write in a step.

    Args:
        caller: the function that was called, for messages.
        buffers: those before the step.
        number: the index of the device among the local ones.
    """

    def __init__(self, caller: str, buffers: Buffers, number: int) -> None:
        self.parts, self._caller, self._before = (
            buffers.part(number),
            caller,
            buffers.before(number),
        )
        self._written: dict[int, dict[str, Tensor]] = {}
        self._moments: dict[tuple[str, str], dict[int, Moments]] = {}

    @property
    def paths(self) -> list[str]:
        """The buffers of all stages."""
        return [*self._before]

    def record(
        self, stage: int, microbatch: int, after: PyTree, moments: Sequence[Moments]
    ) -> None:
        """Record the buffers that a stage returned; raise unless they are the given ones, of their shapes and dtypes."""
        paths, leaves, _ = flatten_with_paths(after, none_is_leaf=True)
        returned = {f"[{stage}]{path}": x for path, x in zip(paths, leaves, strict=True)}
        expected = {path for path in self._before if stage_of(path) == stage}
        cpu = torch.device("cpu")
        new = {
            path: number_of(path, x, cpu)
            for path, x in returned.items()
            if x is not self._before.get(path, self)
        }
        changed = {
            path
            for path in new.keys() & expected
            if entry_of(path, new[path]) != entry_of(path, self._before[path])
        }
        for path in sorted((expected ^ returned.keys()) | changed):
            x = new.get(path)
            error = (
                "is missing"
                if x is None
                else f"is {str(x.dtype)[6:]}{list(x.shape)}"
                if path in expected
                else "is new"
            )
            raise ValueError(
                f"{self._caller}: stage {stage} must return (y, buffers), of the names, shapes and dtypes that it was given; "
                f"{named(parts_of(path)[1:])} {error}."
            )
        self._written.setdefault(microbatch, {}).update(new)
        names, calls = (
            {id(x): path for path, x in new.items()},
            [id(x.running_mean) for x in moments],
        )
        for x in moments:  # of a layer that is called twice, the mean over microbatches is kept
            paths = names.get(id(x.running_mean), ""), names.get(id(x.running_var), "")
            if all(paths) and calls.count(id(x.running_mean)) == 1:
                self._moments.setdefault(paths, {})[microbatch] = x

    def written(self, weights: Sequence[float]) -> list[Written]:
        """Return the buffers that each microbatch has written to, with its weight."""
        return [
            Written(weight, self._written.get(microbatch, {}))
            for microbatch, weight in enumerate(weights)
        ]

    def average(
        self,
        written: Sequence[Written],
        flagged: Sequence[str],
        stages: Sequence[int],
        group: Group | None,
        site: Site,
    ) -> dict[str, Tensor]:
        """Return the changed buffers after all microbatches; a collective of a group of devices.

        Args:
            written: by this device's microbatches.
            flagged: written by any device.
            stages: those of this device.
            group: the devices that have the same stages.
            site: the source line of the step.
        """
        statistics = self._move_statistics([entry.weight for entry in written], group, site)
        paths = [path for path in flagged if stage_of(path) in stages and path not in statistics]
        entries = [entry_of(path, self._before[path]) for path in paths]
        return statistics | averaged(
            written, entries, group, self._before, torch.device("cpu"), site
        )

    def _move_statistics(
        self, weights: Sequence[float], group: Group | None, site: Site
    ) -> dict[str, Tensor]:
        """Return running statistics moved towards those of all microbatches; those of weight 0 add nothing."""
        result = dict[str, Tensor]()
        for paths, moments in sorted(self._moments.items()):
            zero = torch.zeros_like(next(iter(moments.values())).sums)
            rows = [
                moments[number].sums if weight and number in moments else zero
                for number, weight in enumerate(weights)
            ]
            (sums,) = reduce_rows((tree_sum(rows),), group, site)
            total, squares = sums[:-1].chunk(2)
            n, mean, values = sums[-1], total / sums[-1], [self._before[path] for path in paths]
            unbiased = (squares - n * mean * mean) / (n - 1).clamp(min=1)
            weight = next(iter(moments.values())).weight
            for path, old, new in zip(paths, values, (mean, unbiased), strict=True):
                result[path] = (old + weight * (new - old)).to(old.dtype)
        return result


def stage_of(path: str) -> int:
    """Return the stage of a path in the list of all stages' trees.

    >>> stage_of('[12]["norm.running_mean"]')
    12
    """
    return int(path[1:].partition("]")[0])
