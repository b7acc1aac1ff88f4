"""The buffers of stages, on the devices that have the stage.

As without stages, every microbatch starts from the same ones, and the next step's are the mean over
all that wrote to them, weighted as the loss is (see `buffers`). Running statistics of BatchNorm are
not means over microbatches, whose variance would be too small, but move once, towards those of all
samples together (torchgpipe's deferred BatchNorm); in reproducible mode they are means, with the
bits of a step without stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from fshard.transforms.module.buffers import (
    BufferEntry,
    Buffers,
    Written,
    averaged,
    entry_of,
    number_of,
)
from fshard.transforms.module.functionalize import module_function
from fshard.transforms.patterns import named, parts_of, titled
from fshard.transforms.stages.plan import at_coordinate


def with_buffers(stage: nn.Module | Stage, *, in_place: bool = False) -> Stage:
    """Convert a stage to a function of ((params, buffers), x) that returns (y, buffers).

    `in_place`: a module may run with its own parameters replaced.
    """
    function: Callable[..., PyTree] = stage
    if isinstance(stage, nn.Module):
        function, _, _ = module_function(stage, in_place=in_place)

    def with_state(state: tuple[PyTree, PyTree], x: PyTree, **skips: PyTree) -> PyTree:
        params, buffers = state
        return function(params, buffers, x, **skips)

    return with_state


def stage_buffers(
    caller: str, trees: PyTree, mesh: Mesh, axis: str, placement: Sequence[int]
) -> Buffers:
    """Return the given buffers: a tree for each stage, replicated on the devices of the stage."""
    is_sequence = isinstance(trees, list | tuple)
    if not is_sequence or len(trees) != len(placement):
        got = len(trees) if is_sequence else type(trees).__name__
        raise ValueError(
            f"{caller}: {len(placement)} stages have a list of as many trees of buffers, found "
            f"{got}. Write fs.shard_stages([dict(stage.named_buffers()) for stage in stages], "
            "mesh=mesh, schedule=schedule)."
        )

    def layout_of(path: str) -> Layout:
        return at_coordinate(Layout(mesh), axis, placement[stage_of(path)])

    paths, buffers, _ = flatten_with_paths(trees, none_is_leaf=True)
    misplaced: list[str] = []
    for path, buffer in zip(paths, buffers, strict=True):
        if not isinstance(buffer, Sharded):
            misplaced.append(f"{titled(path, 'the buffer')} is {type(buffer).__name__}")
        elif buffer.spec != layout_of(path).spec:
            misplaced.append(f"{titled(path, 'the buffer')} is {buffer.spec}")
    if misplaced:
        raise LayoutError(
            f"{caller}: buffers must be replicated on the devices of their stage, but "
            f"{'; '.join(misplaced)}. Put them there: "
            "fs.shard_stages(trees, mesh=mesh, schedule=schedule)."
        )
    return Buffers(trees, mesh, layout_of)


class StageWrites:
    """The buffers that the stages of one device write in a step.

    Args:
        caller: the function that was called, for messages.
        buffers: those before the step.
        device_index: of the device among the local ones.
        device: that computes their means.

    `parts` are the trees of the stages that the device begins with.
    """

    def __init__(
        self, caller: str, buffers: Buffers, device_index: int, device: torch.device
    ) -> None:
        self.parts = buffers.part(device_index)
        self._caller = caller
        self._device = device
        self._before = buffers.before(device_index)
        self._written: dict[int, dict[str, Tensor]] = {}  # by microbatch
        # Of each layer, by the paths of its running mean and variance, and by microbatch.
        self._moments: dict[tuple[str, str], dict[int, Moments]] = {}

    @property
    def paths(self) -> list[str]:
        """The buffers of all stages."""
        return [*self._before]

    def record(
        self, stage: int, microbatch: int, after: PyTree, moments: Sequence[Moments]
    ) -> None:
        """Record the buffers that a stage returned, and the moments of its BatchNorms.

        Raises unless the buffers have the paths, shapes and dtypes of those given.
        """
        paths, leaves, _ = flatten_with_paths(after, none_is_leaf=True)
        returned = {f"[{stage}]{path}": leaf for path, leaf in zip(paths, leaves, strict=True)}
        written: dict[str, Tensor] = {}
        for path, leaf in returned.items():
            is_unchanged = path in self._before and leaf is self._before[path]
            if not is_unchanged:
                written[path] = number_of(path, leaf, self._device)
        self._validate(stage, returned, written)
        self._written.setdefault(microbatch, {}).update(written)
        self._record_moments(microbatch, written, moments)

    def _validate(
        self, stage: int, returned: Mapping[str, Any], written: Mapping[str, Tensor]
    ) -> None:
        """Raise unless a stage returned buffers like those that it was given."""
        expected = {path for path in self._before if stage_of(path) == stage}
        for path in sorted(expected | returned.keys()):
            leaf = written.get(path)
            if path not in returned:
                error = "is missing"
            elif path not in expected:
                error = "is new"
            elif leaf is not None and entry_of(path, leaf) != entry_of(path, self._before[path]):
                error = f"is {str(leaf.dtype)[6:]}{list(leaf.shape)}"
            else:
                continue
            raise ValueError(
                f"{self._caller}: stage {stage} must return (y, buffers), of the names, shapes and "
                f"dtypes that it was given; {named(parts_of(path)[1:])} {error}."
            )

    def _record_moments(
        self, microbatch: int, written: Mapping[str, Tensor], moments: Sequence[Moments]
    ) -> None:
        """Record the moments of the layers that ran once in a microbatch.

        The statistics of a layer that ran twice are means over microbatches, as other buffers.
        """
        path_of = {id(leaf): path for path, leaf in written.items()}
        runs = Counter([id(layer.running_mean) for layer in moments])
        for layer in moments:
            mean_path = path_of.get(id(layer.running_mean))
            variance_path = path_of.get(id(layer.running_var))
            if mean_path and variance_path and runs[id(layer.running_mean)] == 1:
                by_microbatch = self._moments.setdefault((mean_path, variance_path), {})
                by_microbatch[microbatch] = layer

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
        weights = [entry.weight for entry in written]
        statistics = self._move_statistics(weights, group, site)
        entries: list[BufferEntry] = []
        for path in flagged:
            if stage_of(path) in stages and path not in statistics:
                entries.append(entry_of(path, self._before[path]))
        means = averaged(written, entries, group, self._before, self._device, site)
        return statistics | means

    def _move_statistics(
        self, weights: Sequence[float], group: Group | None, site: Site
    ) -> dict[str, Tensor]:
        """Return running statistics, moved once towards the moments of all microbatches.

        Microbatches of weight 0 add nothing.
        """
        statistics: dict[str, Tensor] = {}
        for paths, by_microbatch in sorted(self._moments.items()):
            first = next(iter(by_microbatch.values()))
            zero = torch.zeros_like(first.sums)
            rows: list[Tensor] = []
            for microbatch, weight in enumerate(weights):
                has_samples = weight and microbatch in by_microbatch
                rows.append(by_microbatch[microbatch].sums if has_samples else zero)
            (sums,) = reduce_rows((tree_sum(rows),), group, site)

            # The sums are n m, n (v + m^2) and n of each channel: see `sums_of`.
            count = sums[-1]
            total, squares = sums[:-1].chunk(2)
            mean = total / count
            unbiased = (squares - count * mean * mean) / (count - 1).clamp(min=1)
            for path, new in zip(paths, (mean, unbiased), strict=True):
                old = self._before[path]
                statistics[path] = (old + first.weight * (new - old)).to(old.dtype)
        return statistics


def stage_of(path: str) -> int:
    """Return the stage of a path in the list of all stages' trees.

    >>> stage_of('[12]["norm.running_mean"]')
    12
    """
    return int(path[1:].partition("]")[0])
