"""Check where the arrays of a step were sharded.

They must be on the mesh of the step, and on the same side of `fs.run` as the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fshard.errors import LayoutError
from fshard.mesh.layout import (
    Mesh,
    P,
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
from fshard.transforms.patterns import titled


def validate_run(mesh: Mesh, caller: str, **trees: PyTree) -> None:
    """Raise if arrays were sharded outside of `fs.run` and are used inside, or vice versa.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = fs.shard_params({"w": torch.ones(4)}, fs.fsdp("data"), mesh=mesh)
    >>> validate_run(mesh, "step", params=params)
    >>> fs.run(lambda: validate_run(mesh, "step", params=params), mesh=mesh)
    Traceback (most recent call last):
    fshard.errors.LayoutError: step: sharded outside of fs.run and used inside: params.w. Shard ...
    """
    if mesh.runtime != "virtual" or mesh.size == 1:
        return
    # Outside of `fs.run` the caller has the shards of all devices, inside those of one.
    local_count = len(local_devices(mesh))

    def is_from_other_side(leaf: Any) -> bool:
        if not isinstance(leaf, Sharded):
            return False
        expected = local_count if leaf.mesh is mesh else len(local_devices(leaf.mesh))
        return len(leaf.shards) != expected

    # Paths are for the error alone: this runs in every step.
    leaves, _ = flatten([*trees.values()])
    if not any(map(is_from_other_side, leaves)):
        return
    paths, leaves, _ = flatten_with_paths(trees)
    names: list[str] = []
    for path, leaf in zip(paths, leaves, strict=True):
        if is_from_other_side(leaf):
            names.append(titled(path))
    if local_count == 1:
        sides = "outside of fs.run and used inside"
    else:
        sides = "inside of fs.run and used outside"
    raise LayoutError(
        f"{caller}: sharded {sides}: {', '.join(names)}. Shard all arrays where the step is called."
    )


LISTED = 3
"""The parameters that an error names: a model on a wrong mesh has hundreds with one reason."""

REPLICATED_OR_FSDP = 'fs.shard_params(params, P(), mesh=mesh), or fs.fsdp("data") for ZeRO-3'


def validate_mesh(
    leaves: Sequence[Any],
    structure: Structure,
    mesh: Mesh,
    caller: str = "value_and_grad",
    fix: str = REPLICATED_OR_FSDP,
) -> None:
    """Raise naming the parameters that are not on a mesh."""

    def is_elsewhere(leaf: Any) -> bool:
        if not isinstance(leaf, Sharded):
            return True
        return leaf.mesh is not mesh and leaf.mesh != mesh

    # Paths are for the error alone: this runs in every step.
    if not any(map(is_elsewhere, leaves)):
        return
    errors: list[str] = []
    for path, leaf in zip(paths_of(structure), leaves, strict=True):
        if is_elsewhere(leaf):
            kind = f"on {leaf.mesh}" if isinstance(leaf, Sharded) else type(leaf).__name__
            errors.append(f"{titled(path)} is {kind}")
    shown = "; ".join(errors[:LISTED])
    if len(errors) > LISTED:
        shown += f"; and {len(errors) - LISTED} others of the {len(leaves)}"
    raise LayoutError(f"{caller} on {mesh}: {shown}. Put the parameters on that mesh: {fix}.")


def validate_local(
    options: StepOptions,
    paths: Sequence[str],
    leaves: Sequence[Sharded],
    batch_axes: tuple[str, ...],
) -> None:
    """Raise naming the parameters that are sharded as `local=` does not allow."""
    if not options.local:
        return
    errors: list[str] = []
    for path, leaf in zip(paths, leaves, strict=True):
        spec = leaf.spec
        if any(_is_misplaced(spec, axis, options.local, batch_axes) for axis in spec.axes):
            errors.append(f"{titled(path)} is {spec}")
    if errors:
        raise LayoutError(
            f"{options.caller}(local=): along {as_written(options.local)} dims of parameters may "
            "be sharded, along other axes their flattened shards only; "
            f"{'; '.join(errors)}. Write fs.shard_params(params, fs.fsdp(axis, within=rules), "
            "mesh=mesh)."
        )


def _is_misplaced(
    spec: P, axis: str, local_axes: tuple[str, ...], batch_axes: tuple[str, ...]
) -> bool:
    """Return True if a parameter may not be sharded along an axis in the way of its spec.

    Along a local axis it is used as it is stored, so only dims may be sharded. Along any other axis
    it is gathered at use, so it must be flat, or stored at one coordinate of that axis.
    """
    is_local = axis in local_axes
    is_flat = axis in (spec.flat_axes or ())
    if is_local and is_flat and axis in batch_axes:
        return False  # experts: a local axis that also shards the batch may shard dense leaves flat
    is_gathered_at_use = is_flat or axis in spec.at_axes
    return is_local == is_gathered_at_use
