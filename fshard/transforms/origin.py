"""Check the inputs of a step: their layouts, and that replicated ones are equal on all devices.

                     a virtual mesh holds         a process holds
outside of fs.run    a shard per device           its own
inside               the calling device's own     its own

    the shapes of the global batch           in every step
    the initial key of random draws          in every step, in reproducible mode
    replicated parameters                    in the first step: a hash of each leaf's bits
    batches that are given in full           in the first step, likewise
    the samples of devices with the same     in the first step; then of tensors in host memory, up to 64 KiB of each

A mark of all these is added to numbers that are summed anyway; only if it differs do devices compare each kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fshard.errors import LayoutError, MismatchError
from fshard.mesh.layout import Mesh, PyTree, Structure, flatten, flatten_with_paths, paths_of
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.global_inputs import digest
from fshard.mesh.spmd.run import local_devices
from fshard.mesh.spmd.scope import Group
from fshard.source import Site
from fshard.transforms.agree import mark, marks, on_host, summed, unlike
from fshard.transforms.batch import Batch
from fshard.transforms.patterns import named, parts_of


def samples_mark(batch: Batch, place: int, same: Group | None, *, fresh: bool) -> float:
    """Return a number whose sum over devices is 0 if those of each group along other axes have the same samples.

    `same`: the group of the device at index `place`. An accelerator is waited for in the first step only.
    """
    if same is None or same.size == 1 or not batch.alone:
        return 0.0
    pairs = [(column[place], rows) for column, rows in zip(batch.columns, batch.has_samples, strict=True)]
    tensors = [x for x, rows in pairs if isinstance(x, Tensor) and (fresh or (rows and x.device.type == "cpu"))]
    at = batch.mesh.coordinates(batch.devices[place])  # groups that exchange samples differ by them
    number = mark(
        [
            *(at[axis] for axis in batch.axes),
            *(digest(x if fresh else x.reshape(-1)[:: 1 + x.nbytes // (1 << 16)]) for x in tensors),
        ]
    )
    return number * (same.size - 1 if same.index == 0 else -1)


class Inputs(NamedTuple):
    """The inputs of one device, as numbers that must be equal on all devices; where several differ, the first is why.

    `key`: of random draws, if devices must draw alike. `leaves`, `batch`: hashes of replicated parameters and of tensors of
    the batch, in the first step of a process. `shapes`: the lengths of the batch's dims.
    """

    key: list[int]
    leaves: list[int]
    shapes: list[int]
    batch: list[int]

    def refuse(self, caller: str, group: Group, site: Site) -> NoReturn:
        """Raise with the kind of input that differs; a collective of all devices."""
        (sums,) = summed((on_host(marks(*self), torch.device("cpu")),), group, site)
        raise MismatchError(f"{caller}: {_DIFFERENT[unlike(sums.tolist())[0]]}")


def inputs_of(batch: Batch, key: int | None, replicated: Iterable[Tensor], *, fresh: bool) -> Inputs:
    """Return the inputs of a step; `replicated` are the parameters that every device has in full."""
    look = fresh and batch.alone
    return Inputs(
        [] if key is None else [key % (1 << 40)],
        [*map(digest, replicated)] if look else [],
        [length for shape in batch.shapes for length in shape],
        [digest(x) for x in batch.given if isinstance(x, Tensor)] if look else [],
    )


_DIFFERENT = (
    "the random state, from which reproducible=True draws the key of the step, must be the same on all devices. Give all "
    "processes one seed: torch.manual_seed(0), not that of a rank.",
    "replicated parameters must be the same on all devices. Make them from one seed on all processes, or load them from one "
    "file.",
    "devices were given batches of different shapes. Every process gets the global batch and takes its part: give all the "
    "same, or each its own by fs.from_local.",
    "devices were given different batches, of the same shapes. A plain tensor is the global batch, of which each takes its "
    'part. If this process has loaded its own part: fs.from_local(x, fs.Layout(mesh, P("data"))).',
)
"""The errors of `Inputs`, in their order."""


def refuse_different_samples(caller: str, total: float, axes: Sequence[str]) -> None:
    """Raise unless the sum of `samples_mark` over devices is 0."""
    if total:
        raise MismatchError(
            f"{caller}: devices along {', '.join(axes)} must have the same samples, since they compute one loss together; got "
            "different ones. Load them by the coordinate along the batch's axes: seed and shard a loader by these alone."
        )


def refuse_distant(mesh: Mesh, what: str, **trees: PyTree) -> None:
    """Raise with the arrays that were sharded outside of `fs.run` and are used inside, or vice versa.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = fs.shard_params({"w": torch.ones(4)}, fs.fsdp("data"), mesh=mesh)
    >>> refuse_distant(mesh, "step", params=params)
    >>> fs.run(lambda: refuse_distant(mesh, "step", params=params), mesh=mesh)
    Traceback (most recent call last):
    fshard.errors.LayoutError: step: sharded outside of fs.run and used inside: params.w. Shard everything where the ...
    """
    if mesh.runtime != "virtual" or mesh.size == 1:
        return
    count = len(local_devices(mesh))

    def is_distant(x: Any) -> bool:
        return isinstance(x, Sharded) and len(x.shards) != (count if x.mesh is mesh else len(local_devices(x.mesh)))

    if not any(map(is_distant, flatten([*trees.values()])[0])):
        return
    found = ((name, *flatten_with_paths(tree)[:2]) for name, tree in trees.items())
    wrong = [
        named((name, *parts_of(path)))
        for name, paths, leaves in found
        for path, x in zip(paths, leaves, strict=True)
        if is_distant(x)
    ]
    where = "outside of fs.run and used inside" if count == 1 else "inside of fs.run and used outside"
    raise LayoutError(f"{what}: sharded {where}: {', '.join(wrong)}. Shard everything where the step is called.")


WHOLE_OR_FSDP = 'fs.shard_params(params, P(), mesh=mesh), or fs.fsdp("data") for ZeRO-3'


def refuse_unplaced(
    leaves: Sequence[Any], structure: Structure, mesh: Mesh, what: str = "value_and_grad", cure: str = WHOLE_OR_FSDP
) -> None:
    """Raise with the parameters that are not on a mesh."""

    def elsewhere(x: Any) -> bool:
        return not isinstance(x, Sharded) or (x.mesh is not mesh and x.mesh != mesh)

    if any(map(elsewhere, leaves)):
        wrong = [
            f"{named(parts_of(path)) or 'the parameter'} is {f'on {x.mesh}' if isinstance(x, Sharded) else type(x).__name__}"
            for path, x in zip(paths_of(structure), leaves, strict=True)
            if elsewhere(x)
        ]
        raise LayoutError(f"{what} on {mesh}: {'; '.join(wrong)}. Put the parameters on that mesh: {cure}.")
