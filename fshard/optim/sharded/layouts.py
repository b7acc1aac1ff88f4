"""The layouts of an update's shards: `ShardLayouts`, ZeRO as a table of layouts.

    stage   parameters     gradients                  state        after the update
    0       as given       as the parameters          as these
    1, 2    replicated     shards (psum_scatter)      shards       all_gather of the parameters
    3       shards         shards (psum_scatter)      shards

An optimizer of the kind "flat" runs on any shard of the parameters: it gets flat ranges. One of the
kind "owners" (Muon, Shampoo) gets each matrix on one device; the shards of the others are empty.

Stored and sent shards are flat ranges. Owners collect them before the update and distribute them
after it, in one exchange each (`mesh.reshard.exchange`); so gradients are reduced as usual, each
unit's evenly.

    w: f32[4, 3]      gradients        flat:data      device 0 [4, 3]:0-5      device 1 [4, 3]:6-11
    of owner 1        in the update    at:data=1      device 0 nothing         device 1 all of it

Stages 1 and 2 differ in when gradients are reduced, which the optimizer does not see: once a step,
or as each unit's are ready (`train_step`). The layout of the state follows from the shards that the
optimizer's `init` gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

from fshard.mesh.layout import Layout, Memory, Mesh, P
from fshard.optim.leaves import Leaf, Leaves
from fshard.optim.sharding import Sharding, ShardKind, has_owner, is_flat, kinds_of

Stage = Literal[0, 1, 2, 3]
"""Of ZeRO: what is sharded. 0: nothing; 1 and 2: state and gradients; 3: parameters as well."""


@dataclass(frozen=True)
class ShardLayouts:
    """The layouts of an optimizer's work on the devices of a mesh.

    Args:
        mesh: the devices.
        axes: along which the work is divided.
        stage: of ZeRO.
        sharding: the kind of each parameter's shards.
        gradient_memory: the memory in which reduced gradients arrive.
        are_gradients_sharded: True if gradients arrive as shards; False if in their parameters'
            layouts, and are sharded in the update.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    stage: Stage
    sharding: Sharding
    gradient_memory: Memory = "device"
    are_gradients_sharded: bool = True

    @cached_property
    def is_divided(self) -> bool:
        """True if the devices work on other shards than they store.

        One device has all flat ranges already. An owner needs the matrix: a parameter that is
        stored flat is a row of numbers on one device too.
        """
        is_alone = all(self.mesh.shape[axis] == 1 for axis in self.axes)
        return self.stage > 0 and not (is_flat(self.sharding) and is_alone)

    def of_gradient(self, layout: Layout) -> Layout:
        """Return the layout of a reduced gradient, from its parameter's."""
        if self.is_divided and self.are_gradients_sharded:
            layout = shard_layout(layout, self.axes)
        return in_memory(layout, self.gradient_memory)

    def of_update(self, params: Leaves) -> tuple[Layout | None, ...]:
        """Return the layout of each parameter in the update; None where nothing is updated."""
        layouts: list[Layout | None] = [None] * len(params.leaves)
        shapes: list[tuple[int, ...]] = [()] * len(params.leaves)
        for i, leaf in enumerate(params.leaves):
            if leaf is None:
                continue
            shapes[i] = leaf.shape
            if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
                layouts[i] = leaf.layout
        kinds = tuple(kinds_of(self.sharding, params))
        firsts = tuple(params.firsts)
        return _layouts_of_update(tuple(layouts), tuple(shapes), firsts, kinds, self.axes)

    def of_collected(
        self, params: list[Leaf], layouts: Sequence[Layout | None]
    ) -> list[Layout | None]:
        """Return, for sharded parameters that owners collect, the layout of their gradients.

        Cut like this, which sends nothing, they travel to their owners and back in one exchange
        with the gradients. None for the other parameters.
        """
        results: list[Layout | None] = []
        for leaf, layout in zip(params, layouts, strict=True):
            is_sent_to_owner = layout is not None and has_owner(layout.spec)
            is_collected = is_sent_to_owner and leaf.spec.split_axes
            results.append(_cut_further(leaf.layout, self.axes) if is_collected else None)
        return results


# -- layouts of shards ---------------------------------------------------------------------------


@lru_cache(maxsize=4096)  # one object for each: layouts are compared by identity first
def in_memory(layout: Layout, memory: Memory) -> Layout:
    """Return the layout of the same shards in a memory: itself, if they are there."""
    return layout if layout.memory == memory else layout.with_memory(memory)


def shard_layout(layout: Layout, axes: tuple[str, ...]) -> Layout:
    """Return the layout of the shards that devices along `axes` work on.

    Existing sharding is kept, of dims too; the other axes split each shard further, flat. One
    device splits nothing.
    """
    return _cut_further(layout, axes) or layout  # itself: layouts are compared by identity first


@lru_cache(maxsize=4096)
def _cut_further(layout: Layout, axes: tuple[str, ...]) -> Layout | None:
    """Return the layout of shards that are split further along axes; None if no axis does."""
    spec = layout.spec
    sizes = layout.mesh.shape
    further_axes = [axis for axis in axes if axis not in spec.sharded_axes and sizes[axis] > 1]
    if not further_axes:
        return None
    flat_axes = (*(spec.flat_axes or ()), *further_axes)
    return layout.with_spec(spec.shapeless.replace(flat=flat_axes))


@lru_cache(maxsize=256)
def _layouts_of_update(
    layouts: tuple[Layout | None, ...],
    shapes: tuple[tuple[int, ...], ...],
    firsts: tuple[int, ...],
    kinds: tuple[ShardKind, ...],
    axes: tuple[str, ...],
) -> tuple[Layout | None, ...]:
    """Return the layout of each parameter in the update, by its kind; ties have one."""
    results: list[Layout | None] = [None] * len(layouts)
    owned: dict[int, Layout] = {}
    for i, layout in enumerate(layouts):
        if layout is None or firsts[i] != i:
            continue
        shards = shard_layout(layout, axes)
        # A parameter that nothing splits is full already: its devices are its owners.
        if is_flat(kinds[i]) or not shards.spec.split_axes:
            results[i] = shards
        else:
            owned[i] = shards
    for i, spec in _owner_specs(owned, shapes).items():
        stored = layouts[i]
        assert stored is not None
        results[i] = stored.with_spec(spec)

    for i, layout in enumerate(layouts):
        if layout is None or layout.frozen:
            results[i] = None
        else:
            results[i] = results[firsts[i]]
    return tuple(results)


def _owner_specs(owned: dict[int, Layout], shapes: Sequence[tuple[int, ...]]) -> dict[int, P]:
    """Return the spec of each parameter at its owner, from the layouts of their shards.

    Leaves sharded over the same axes, at the same coordinates, are assigned to the owner with the
    least so far, the largest first. Frozen ones count, though they are not moved: so unfreezing one
    changes no owner.
    """
    groups: dict[tuple[Mesh, P], list[int]] = {}
    for i, shards in owned.items():
        spec = P.flat(*shards.spec.split_axes, at=dict(shards.spec.at))
        groups.setdefault((shards.mesh, spec), []).append(i)

    specs: dict[int, P] = {}
    for (mesh, spec), indices in groups.items():
        axes = spec.split_axes
        count = prod([mesh.shape[axis] for axis in axes])
        sizes = [prod(shapes[i]) for i in indices]
        owners = assign_owners(sizes, count)
        for i, owner in zip(indices, owners, strict=True):
            specs[i] = P(at={**dict(spec.at), axes: owner})
    return specs


def assign_owners(sizes: Sequence[int], n: int) -> list[int]:
    """Assign sizes to n owners, the largest first, each to the first one with the least.

    Returns the owner of each.

    >>> assign_owners([1, 5, 2, 2], 2)
    [1, 0, 1, 1]
    """
    loads = [0] * n
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners
