"""The two kinds of engines that weights are sent to.

    ArrayEngine     has arrays in layouts on its mesh: a version is a new tree
    TensorEngine    has tensors that its own loader wrote, known by a trace: a version is written
                    into them in place

Both receive shards, beside what they have, and take them when all have arrived.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fshard.checkpoint.names import flattened
from fshard.errors import RefitError
from fshard.mesh.collectives.api import all_gather
from fshard.mesh.collectives.ledger import uncounted
from fshard.mesh.layout import Layout, Mesh, PyTree
from fshard.mesh.layout.kinds import compute_device, empty_in, owned_by
from fshard.mesh.layout.layout import dtype_name
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.mesh.reshard.between import AXIS, numbers_held
from fshard.mesh.reshard.crossing import MeshSide, RegionSide
from fshard.mesh.reshard.regions import Numbers
from fshard.mesh.spmd.run import is_outside, local_devices, run_on_devices
from fshard.refit.landing import Needs, copy_into, needs_of
from fshard.refit.traced import Target, Trace, listed, named_tensors


class SourceTree(NamedTuple):
    """The arrays of a tree by name, each once, and how to make the tree of others.

    Args:
        arrays: by the name of the first leaf that has it.
        first_names: by the name of each leaf, that of the first one that is tied to it.
        unflatten: makes a tree of values for all leaves.
    """

    arrays: dict[str, Sharded]
    first_names: dict[str, str]
    unflatten: Callable[[Sequence[Any]], PyTree]

    @staticmethod
    def of(caller: str, tree: PyTree) -> SourceTree:
        """Return the arrays of a tree; raise for leaves that are none."""
        leaves, unflatten = flattened(tree)
        arrays: dict[str, Sharded] = {}
        names_by_key: dict[object, str] = {}
        first_names: dict[str, str] = {}
        for leaf in leaves:
            x = leaf.value
            if not isinstance(x, Sharded):
                raise RefitError(
                    f"{caller}: {leaf.name} of the source must be an array; got "
                    f"{type(x).__name__}. Shard it, or leave it out."
                )
            if leaf.name in first_names:
                raise RefitError(
                    f"{caller}: each leaf of the source must have a name of its own; got two "
                    f"named {leaf.name}. Rename one."
                )
            x.check()
            first_name = names_by_key.setdefault(key_of(x), leaf.name)
            arrays.setdefault(first_name, x)
            first_names[leaf.name] = first_name
        if not arrays:
            raise RefitError(f"{caller}: the source has no arrays. Give it parameters.")
        return SourceTree(arrays, first_names, unflatten)

    def types(self) -> SourceTree:
        """Return the same tree of arrays without values, which keep no memory alive."""
        arrays: dict[str, Sharded] = {}
        for name, x in self.arrays.items():
            shards = tuple([torch.empty_like(shard, device="meta") for shard in x.shards])
            arrays[name] = Sharded(x.shape, x.layout, shards)
        # The function of the tree refers to the arrays, too.
        tree = self.unflatten([arrays[name] for name in self.first_names.values()])
        return self._replace(arrays=arrays, unflatten=flattened(tree)[1])

    @property
    def mesh(self) -> Mesh:
        """The mesh of all arrays."""
        meshes = {x.mesh for x in self.arrays.values()}
        if len(meshes) > 1:
            shown = " and ".join(sorted(map(str, meshes)))
            raise RefitError(f"Refit: the arrays of the source must be on one mesh; got {shown}.")
        return meshes.pop()


class Incoming(NamedTuple):
    """The arrival of one array at an engine.

    Args:
        side: what each device of the engine needs of it.
        dtype: in which it is sent.
        is_cast: a sender or a receiver casts it.
    """

    side: MeshSide | RegionSide
    dtype: torch.dtype
    is_cast: bool


class ArrayEngine:
    """An engine that has arrays in layouts on its mesh."""

    def __init__(self, source: SourceTree, layouts: PyTree, dtype: torch.dtype | None) -> None:
        self._source = source
        self._layouts = _layouts_of(source, layouts)
        self._dtype = dtype
        meshes = {layout.mesh for layout in self._layouts.values()}
        if len(meshes) > 1:
            raise RefitError("Refit: the layouts of the target must be on one mesh; got several.")
        self.mesh = meshes.pop()
        self._arrays: dict[str, Sharded] = {}
        self._versions: list[list[int]] = []

    def incoming(self, meeting: Mesh | None) -> dict[str, Incoming]:
        """Return how each array arrives, by name."""
        result: dict[str, Incoming] = {}
        for name, x in self._source.arrays.items():
            layout = self._layouts[name]
            if layout.spec.unreduced:
                raise RefitError(
                    f"Refit: the layout of {name} must have no sums; got {layout.spec}."
                )
            smaller = min(self.dtype_of(name), x.dtype, key=lambda dtype: dtype.itemsize)
            is_cast = self.dtype_of(name) != x.dtype
            result[name] = Incoming(MeshSide.of(layout), smaller, is_cast)
        return result

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of an array of the engine."""
        dtype = self._source.arrays[name].dtype
        is_cast = self._dtype is not None and dtype.is_floating_point
        return self._dtype if is_cast else dtype  # pyright: ignore[reportReturnType]

    def new_shards(self, number: int) -> list[Tensor]:
        """Return uninitialised shards of one of its devices, for a version."""
        device = self.mesh.devices.index(number)
        shards: list[Tensor] = []
        with owned_by(number):
            for name, x in self._source.arrays.items():
                layout = self._layouts[name]
                shape = layout.local_shape(x.shape, device)
                kind = self.mesh.device_type
                shards.append(empty_in(layout.memory, shape, self.dtype_of(name), kind))
        return shards

    def shards(self, number: int) -> list[Tensor]:
        """Return the shards of one of its devices in the current version."""
        row = numbers_held(self.mesh).index(number)
        return [x.shards[row] for x in self._arrays.values()]

    def validate(self) -> None:
        """Do nothing: the arrays of a version are new ones."""

    def is_written(self) -> bool:
        """Return True if the engine has written to its arrays, so that no change is of them."""
        return self._versions != [_writes_of(x) for x in self._arrays.values()]

    def take(self, shards: Mapping[int, Sequence[Tensor]]) -> PyTree:
        """Make a version the current one; return its tree."""
        numbers = numbers_held(self.mesh)
        arrays: dict[str, Sharded] = {}
        for index, (name, x) in enumerate(self._source.arrays.items()):
            layout = self._layouts[name]
            if numbers:
                local = tuple([shards[number][index] for number in numbers])
            else:
                shape = layout.local_shape(x.shape, local_devices(self.mesh)[0])
                local = (torch.empty(shape, dtype=self.dtype_of(name), device="meta"),)
            arrays[name] = Sharded(x.shape, layout, local)
        self._arrays = arrays
        self._versions = [_writes_of(x) for x in arrays.values()]
        return self._source.unflatten([arrays[name] for name in self._source.first_names.values()])


def _writes_of(x: Sharded) -> list[int]:
    """Return how often each shard was written in place."""
    writes: list[int] = []
    for shard in x.shards:
        # torch counts no writes in inference mode: `check` finds them.
        writes.append(0 if shard.is_inference() else shard._version)
    return writes


def _layouts_of(source: SourceTree, layouts: PyTree) -> dict[str, Layout]:
    """Return the layout of each array; raise for leaves that only one of the trees has."""
    if isinstance(layouts, Layout):
        return dict.fromkeys(source.arrays, layouts)
    leaves, _ = flattened(layouts)
    by_name = {leaf.name: leaf.value for leaf in leaves}
    missing = [name for name in source.arrays if name not in by_name]
    extra = sorted(by_name.keys() - source.first_names.keys())
    for names, text in ((missing, "has no layout for"), (extra, "has what the source has not:")):
        if names:
            raise RefitError(f"Refit: the target {text} {listed(names)}. Name the same leaves.")
    for name, layout in by_name.items():
        if not isinstance(layout, Layout):
            raise RefitError(
                f"Refit: {name} of the target must be a Layout; got {type(layout).__name__}."
            )
    return {name: by_name[name] for name in source.arrays}


class TensorEngine:
    """An engine whose loader was traced on each of its devices.

    Args:
        source: the arrays that are sent.
        mesh: the engine's.
        traced: of the calling device; None outside of the mesh.
        into: the tensors that the trace was made with.
        keeps: keep what has arrived, for changes to it.
    """

    def __init__(
        self,
        source: SourceTree,
        mesh: Mesh,
        traced: Trace | None,
        into: Target | None,
        *,
        keeps: bool,
    ) -> None:
        if is_outside(mesh):
            raise RefitError(
                "Refit: a trace is one device's; got one outside of the virtual devices of "
                f"{mesh}. Trace and send in a function of fs.run, or give layouts."
            )
        self.mesh = mesh
        self._source = source
        self._keeps = keeps
        self._traced = traced
        self._into = into
        self._needs: dict[str, Needs] = {}
        self._received: list[Tensor] = []
        if mesh.is_member:
            if traced is None or into is None:
                raise RefitError(
                    "Refit: on a device of mesh, target must be the trace of its loader, and into "
                    "what it loads into; got None. Other devices give None."
                )
            self._needs = needs_of(traced)

    def incoming(self, meeting: Mesh | None) -> dict[str, Incoming]:
        """Return how each array arrives: what each device needs, which all others get to know."""
        assert meeting is not None
        needs = {name: (x.boxes, x.dtype) for name, x in self._needs.items()}
        tables = _gathered(meeting, needs)
        numbers = [number for number in meeting.devices if number in self.mesh.devices]
        rows = [tables[meeting.devices.index(number)] for number in numbers]

        needed: dict[str, None] = {}  # a set in order
        for row in rows:
            needed.update(dict.fromkeys(row))
        unknown = [name for name in needed if name not in self._source.arrays]
        if unknown:
            raise RefitError(
                f"Refit: the engine needs {listed(unknown)}, which the source has not. Trace the "
                "loader with the names of the source."
            )
        result: dict[str, Incoming] = {}
        for name, x in self._source.arrays.items():
            dims = max(1, x.ndim)
            nothing = np.zeros((0, dims, 2), np.int64)
            boxes: list[Numbers] = []
            dtypes: set[torch.dtype] = set()
            for row in rows:
                box, *needed_dtypes = row.get(name, (nothing,))
                boxes.append(box)
                dtypes.update(needed_dtypes)
            # Devices that cast it differently get it as it is, and cast it themselves.
            dtype = dtypes.pop() if len(dtypes) == 1 else x.dtype
            side = RegionSide(tuple(numbers), tuple(boxes))
            result[name] = Incoming(side, dtype, dtype != x.dtype)
        self._incoming = result
        return result

    def new_shards(self, number: int) -> list[Tensor]:
        """Return uninitialised flat tensors for what the device needs of each array."""
        shards: list[Tensor] = []
        with owned_by(number):
            for name in self._source.arrays:
                size = self._needs[name].size if name in self._needs else 0
                dtype = self._incoming[name].dtype
                shards.append(torch.empty(size, dtype=dtype, device=compute_device(self.mesh)))
        return shards

    def shards(self, number: int) -> list[Tensor]:
        """Return what has arrived in the current version."""
        return self._received

    def take(self, shards: Mapping[int, Sequence[Tensor]]) -> None:
        """Write a version into the engine's tensors."""
        for received in shards.values():
            by_name = dict(zip(self._source.arrays, received, strict=True))
            copy_into(self._needs, by_name, self._tensors())
            if self._keeps:
                self._received = [*received]

    def is_written(self) -> bool:
        """Return False: what has arrived is not the engine's memory."""
        return False

    def validate(self) -> None:
        """Raise if a version cannot be written: before it is decided that all take it."""
        if self._traced is None:
            return
        tensors = self._tensors()
        for name, leaf in self._traced.targets.items():
            expected = f"{dtype_name(leaf.dtype)}{[*leaf.shape]}"
            actual = "nothing"
            if name in tensors:
                x = tensors[name]
                actual = f"{dtype_name(x.dtype)}{[*x.shape]}"
            if actual != expected:
                raise RefitError(
                    f"Refit: {name} of the engine must be as it was traced, {expected}; got "
                    f"{actual}. Trace again."
                )

    def _tensors(self) -> dict[str, Tensor]:
        assert self._into is not None
        return dict(named_tensors(self._into))


def _gathered(meeting: Mesh, value: object) -> list[Any]:
    """Return the values of all devices, which travel as bytes."""
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    device = compute_device(meeting)
    results: list[list[Any]] = []

    def on_device(index: int) -> None:
        sizes = all_gather(torch.tensor([len(mine)], device=device), AXIS).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        padded[: len(mine)] = mine
        rows = all_gather(padded, AXIS).view(len(sizes), -1).cpu()
        values: list[Any] = []
        for row, size in zip(rows, sizes, strict=True):
            values.append(pickle.loads(row[:size].numpy().tobytes()))
        results.append(values)

    with torch.no_grad(), uncounted():
        run_on_devices(meeting, on_device)
    return results[0]
