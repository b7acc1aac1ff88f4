"""Buffers: what a loss function remembers from one step to the next, as the running statistics of BatchNorm.

They lie whole on all devices.  Every slice of a step starts from the same ones, and what comes back is the mean over all
slices that wrote to them, weighted as the loss is (see `remembered`).  So a step is one update of the buffers, on any mesh
and however the batch is cut.  A buffer that the loss function hands back as it is (a mask, a table) is not sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.placing import device_put
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.tree import PyTree, Structure, flatten_with_paths, unflatten
from fshard.transforms.patterns import named, parts_of


class New(NamedTuple):
    """Buffers after a step: where they stand, and those that are not as they were given."""

    paths: list[str]
    structure: Structure
    changed: dict[str, Tensor]


def numbers(buffers: Mapping[str, Any], near: torch.device) -> list[Tensor]:
    """Return buffers, by their paths, as tensors."""
    wrong = [
        f"{named(parts_of(path))} is {type(x).__name__}"
        for path, x in buffers.items()
        if not isinstance(x, Tensor | int | float)
    ]
    if wrong:
        raise LayoutError(
            f"value_and_grad: among the buffers {'; '.join(wrong)}. They are averaged: give tensors or numbers."
        )
    return [x if isinstance(x, Tensor) else torch.full((), x, device=near) for x in buffers.values()]


class Buffers:
    """The buffers that a step is given."""

    def __init__(self, tree: PyTree, mesh: Mesh) -> None:
        paths, leaves, self._structure = flatten_with_paths(tree, sharded_is_leaf=True, none_is_leaf=True)
        wrong = [
            f"{named(parts_of(path))} lies as {x.spec} on {x.mesh}"
            for path, x in zip(paths, leaves, strict=True)
            if isinstance(x, Sharded) and (x.mesh, x.spec) != (mesh, P())
        ]
        if wrong:
            raise LayoutError(
                f"buffers lie whole on all devices of {mesh}, but {'; '.join(wrong)}. Lay them out as P(), or give tensors."
            )
        self._whole = Layout(mesh)
        self._given = dict(zip(paths, leaves, strict=True))
        laid = [device_put(x, self._whole) if isinstance(x, Tensor) else x for x in leaves]
        self._columns = [x.shards if isinstance(x, Sharded) else (x,) * mesh.size for x in laid]

    def part(self, place: int) -> PyTree:
        """Return what the device has whose shards stand at `place`."""
        return unflatten(self._structure, [column[place] for column in self._columns])

    def before(self, place: int) -> dict[str, Any]:
        """Return them by their paths."""
        return {path: column[place] for path, column in zip(self._given, self._columns, strict=True)}

    def compared(self, place: int, tree: PyTree, near: torch.device) -> New:
        """Return what the loss function has made of them there, numbers as tensors near to it."""
        paths, leaves, structure = flatten_with_paths(tree, none_is_leaf=True)
        before = self.before(place)
        new = {path: x for path, x in zip(paths, leaves, strict=True) if path not in before or x is not before[path]}
        return New(paths, structure, dict(zip(new, numbers(new, near), strict=True)))

    def after(self, found: Sequence[New]) -> PyTree:
        """Return the buffers for the next step, from what each device at hand has; they lie as those that were given.

        Devices return one tree.  Only from a dict may some leave out what others, in another branch, have made.
        """
        first = found[0]

        def leaf(path: str) -> Any:
            given = self._given.get(path)
            if path not in first.changed:
                return given
            shards = tuple(new.changed[path] for new in found)
            return Sharded(tuple(shards[0].shape), self._whole, shards) if isinstance(given, Sharded) else shards[0]

        tree = unflatten(first.structure, [leaf(path) for path in first.paths])
        elsewhere = [path for path in first.changed if path not in first.paths]
        lost = [path for path in first.paths if path not in first.changed and path not in self._given]
        if not elsewhere and not lost:
            return tree
        keys = {path: _KEY.fullmatch(path) for path in (*elsewhere, *lost)}
        if not isinstance(tree, dict) or None in keys.values():
            raise LayoutError(
                f"{', '.join(named(parts_of(path)) for path in keys)} is among the buffers that some devices, or slices of a "
                "batch, return, and not among those of others. Return one tree everywhere, or a dict of tensors."
            )
        for path, key in keys.items():
            assert key is not None
            tree.pop(key[1], None)
            tree |= {key[1]: leaf(path)} if path in elsewhere else {}
        return tree


_KEY = re.compile(r'\["([^"]*)"\]')
"""The path of an entry of a dict."""
