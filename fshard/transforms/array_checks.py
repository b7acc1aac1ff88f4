"""Check where the arrays of a step were sharded: on its mesh, and on the same side of `fs.run` as the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fshard.errors import LayoutError
from fshard.mesh.layout import (
    Mesh,
    PyTree,
    Structure,
    as_written,
    flatten,
    flatten_with_paths,
    paths_of,
)
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.run import local_devices
from fshard.transforms.options import StepOptions
from fshard.transforms.patterns import named, parts_of


def validate_run(mesh: Mesh, caller: str, **trees: PyTree) -> None:
    """Raise naming the arrays that were sharded outside of `fs.run` and are used inside, or vice versa.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = fs.shard_params({"w": torch.ones(4)}, fs.fsdp("data"), mesh=mesh)
    >>> validate_run(mesh, "step", params=params)
    >>> fs.run(lambda: validate_run(mesh, "step", params=params), mesh=mesh)
    Traceback (most recent call last):
    fshard.errors.LayoutError: step: sharded outside of fs.run and used inside: params.w. Shard all arrays where the ...
    """
    if mesh.runtime != "virtual" or mesh.size == 1:
        return
    count = len(local_devices(mesh))

    def is_distant(x: Any) -> bool:
        return isinstance(x, Sharded) and len(x.shards) != (
            count if x.mesh is mesh else len(local_devices(x.mesh))
        )

    if any(map(is_distant, flatten([*trees.values()])[0])):
        paths, leaves, _ = flatten_with_paths(trees)
        names = [
            named(parts_of(path)) for path, x in zip(paths, leaves, strict=True) if is_distant(x)
        ]
        sides = (
            "outside of fs.run and used inside"
            if count == 1
            else "inside of fs.run and used outside"
        )
        raise LayoutError(
            f"{caller}: sharded {sides}: {', '.join(names)}. Shard all arrays where the step is called."
        )


REPLICATED_OR_FSDP = 'fs.shard_params(params, P(), mesh=mesh), or fs.fsdp("data") for ZeRO-3'


def validate_mesh(
    leaves: Sequence[Any],
    structure: Structure,
    mesh: Mesh,
    caller: str = "value_and_grad",
    fix: str = REPLICATED_OR_FSDP,
) -> None:
    """Raise naming the parameters that are not on a mesh."""

    def is_elsewhere(x: Any) -> bool:
        return not isinstance(x, Sharded) or (x.mesh is not mesh and x.mesh != mesh)

    if any(map(is_elsewhere, leaves)):
        errors = [
            f"{named(parts_of(path)) or 'the parameter'} is {f'on {x.mesh}' if isinstance(x, Sharded) else type(x).__name__}"
            for path, x in zip(paths_of(structure), leaves, strict=True)
            if is_elsewhere(x)
        ]
        raise LayoutError(
            f"{caller} on {mesh}: {'; '.join(errors)}. Put the parameters on that mesh: {fix}."
        )


def validate_local(
    options: StepOptions,
    paths: Sequence[str],
    leaves: Sequence[Sharded],
    batch_axes: tuple[str, ...],
) -> None:
    """Raise with the parameters that are not sharded along local axes by dims, and along others, or the batch's, flat."""
    flat_too = {*options.local} & {*batch_axes}
    errors = [
        f"{named(parts_of(path)) or 'the parameter'} is {x.spec}"
        for path, x in zip(paths, leaves, strict=True)
        if any(
            (axis in options.local) == (axis in (x.spec.flat_axes or ()) + x.spec.at_axes)
            for axis in x.spec.axes
            if not (axis in flat_too and axis in (x.spec.flat_axes or ()))
        )
    ]
    if options.local and errors:
        raise LayoutError(
            f"{options.caller}(local=): along {as_written(options.local)} dims of parameters may be sharded, along other axes "
            f"their flattened shards only; {'; '.join(errors)}. Write fs.shard_params(params, fs.fsdp(axis, within=rules), "
            "mesh=mesh)."
        )
