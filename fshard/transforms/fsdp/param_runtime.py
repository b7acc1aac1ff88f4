"""Parameters where they are used: gathered just before, let go just after, their gradients reduced when complete.

Inside a loss function every parameter is a light *handle* (`handle`).  The first operation that touches a leaf of a unit
gathers the whole unit (`units`), and autograd comes to the backward of that, the reduction (`reductions`), right after the
backward of the block that uses it, while earlier blocks are still to come.

    forward     gather 0 | block 0 | gather 1 | block 1 | ... | loss
    backward    ... | block 1 | reduce 1 | block 0 | reduce 0           (gather 1, gather 0 again, as they are needed)

A unit that lies sharded is let go when later ones are gathered; what autograd saves of it is a note of where it lay
(`saved`).  Where parameters lie whole (ZeRO 0 to 2) nothing is gathered and nothing let go: the same Function only reduces.

What is worked out once for a tree of parameters: how each comes to its use, and how its gradient goes where it is to lie.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import wraps
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import LayoutError, ModuleError
from fshard.mesh.layout import Layout, Mesh, P, PyTree, flatten, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.execute import Way, go, way_between
from fshard.mesh.spmd.scope import Group, require
from fshard.optim.leaves import firsts_of
from fshard.source import Site
from fshard.transforms.fsdp.lazy_param import WRITES, Handle, Saved, handles_of, own_versions, unwatched, wholes
from fshard.transforms.fsdp.reductions import Along, Keep, Reductions, Ways
from fshard.transforms.fsdp.units import Leaf, Manner, Unit, versions_of
from fshard.transforms.module.replica import Replica
from fshard.transforms.patterns import named, parts_of, unit_of
from fshard.transforms.reproducible.summation_tree import way_in_order


class Order(NamedTuple):
    """What one step can tell the next.

    In which order units were gathered, by number: forward, and again for the backward; the turns of reductions, and along
    which axes devices have agreed on them.
    """

    forward: list[int]
    backward: list[int]
    turns: list[int]
    along: Along = ()


class Tape:
    """The parameters of one device, through the slices of one step.

    Args:
        leaves: the parameters, and `shards` what this device holds of them.
        by_unit: the numbers of the leaves of each unit.
        ways: see `Reductions`.
        manner: how units are handled.
        site: the line of the step.
        order: that of an earlier step.
        several: gradients of several slices are added up before they are reduced.
        each_use: each use of a leaf is received by itself, in reproducible mode.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        by_unit: Sequence[list[int]],
        shards: Sequence[Tensor],
        ways: Ways,
        manner: Manner,
        site: Site,
        order: Order | None = None,
        *,
        several: bool = False,
        each_use: bool = False,
    ) -> None:
        self.leaves, self.shards, self.manner, self.site = leaves, shards, manner, site
        self.scope = require("value_and_grad")
        self.anchor = torch.zeros((), requires_grad=True)  # what makes autograd call the units' backwards
        self.sequence: list[int] = []  # which units were gathered: the same on all devices, or they would mix them up
        self.live: list[Unit] = []  # the units that lie sharded and are whole, the last used last
        self.first: list[int] = []  # the units that the forward has used, in the order of their first use
        self.over, self.fresh = False, order is None
        self.each_use, self.begun = each_use, False
        self.changed: set[int] = set()  # the leaves that the loss function was found to have changed
        self._replicas: list[Replica] = []  # whose modules the handles are installed in
        self._versions = versions_of(shards)
        self.seen, self.expected = Order([], [], []), order or Order([], [], [])
        self.units = [Unit(self, number, places) for number, places in enumerate(by_unit)]
        self.saved = Saved(manner.reshard and any(unit.sharded for unit in self.units))
        self.reductions = Reductions(
            self.units, leaves, shards, manner, site, self.expected.turns, self.expected.along, ways, several
        )
        self.handles = self._handles()
        self._handle_versions = own_versions(self.handles)

    def _handles(self) -> list[Tensor]:
        """Return what stands for the parameters: handles; integers themselves, since they may be indices."""
        places = [place for unit in self.units for place in unit.places]
        found = dict(zip(places, handles_of(self), strict=True))
        plain = [place for place in range(len(self.leaves)) if place not in found]
        if plain:
            finish = go(
                [self.shards[place] for place in plain], [self.leaves[place].gather for place in plain], self.site
            )
            found.update((place, x.detach()) for place, x in zip(plain, finish(), strict=True))
        return [found[place] for place in range(len(self.leaves))]

    @property
    def order(self) -> Order:
        """What the next step may expect."""
        reductions = self.reductions
        return self.seen._replace(turns=reductions.turns, along=reductions.along)

    def make_room(self, unit: Unit) -> None:
        """Let units go that have not been used for the longest time, so that one more can be whole."""
        self.live = [other for other in self.live if other is not unit]
        while self.manner.reshard and len(self.live) >= self.manner.live:
            self.live[0].release()
        self.live.append(unit)

    def begin(self) -> None:
        """Begin a slice: nothing of the one before is used again."""
        if self.begun:
            self.end()
        self.begun = True
        self.seen, self.first = Order([], [], []), []

    def begin_backward(self, group: Group | None, along: Along, keep: Keep | None, *, idle: bool) -> None:
        """Begin the backward of a slice: see `Reductions.begin`."""
        self.reductions.begin(self.first, group, along, keep, idle=idle)

    def end(self) -> None:
        """End a slice."""
        for unit in self.units:
            unit.arrive()  # if it was gathered ahead in vain: other devices count on it
            unit.release()
            unit.awaited = 0
        self.saved.clear()

    def stop(self) -> None:
        """End a step; what a backward that has failed has under way, other devices count on."""
        self.reductions.finish()
        self.end()
        self.close()

    def close(self) -> None:
        """Let everything go that a step has used: units refer to the tape and it to them, so it would stay for a while."""
        self.over, self.shards, self.handles = True, (), []
        for replica in self._replicas:
            replica.rest()
        self._replicas = []
        self.reductions.shards, self.reductions.sums = (), []

    def leave(self) -> None:
        """Let everything go after an error, and wait for nobody: graphs and units refer to each other, which nobody finds."""
        for unit in self.units:
            unit.release()
        self.saved.clear()
        self.close()

    def use(self, replica: Replica) -> None:
        """Note that handles are installed in a module until the step closes."""
        if not any(replica is other for other in self._replicas):
            self._replicas.append(replica)
            if self.fresh:
                replica.note_attributes()

    def warn_of_attributes(self) -> None:
        """Warn of plain attributes that a module has set in a first step, in which it was called for each slice."""
        names = [name for replica in self._replicas for name in replica.changed_attributes()]
        if names:
            warnings.warn(
                f"a forward sets {', '.join(names)}, and is called once for each slice of the batch. Such attributes are "
                "private to the device and see every call. Register what is a state of training as a buffer.",
                stacklevel=2,
            )

    def look_ahead(self, seen: list[int], expected: list[int], unit: Unit) -> None:
        """Note that a unit is gathered, and start to gather those that came after it the last time."""
        place = len(seen)
        seen.append(unit.number)
        if place < len(expected) and expected[: place + 1] == seen:
            for number in expected[place + 1 : place + 1 + self.manner.prefetch]:
                self.units[number].start()

    def check_unchanged(self) -> None:
        """Raise if the loss function has changed a parameter in place."""
        changed = self.changed.union(*(unit.changed() for unit in self.units))
        both = zip(versions_of(self.shards), self._versions, strict=True)
        changed |= {place for place, (now, before) in enumerate(both) if now != before}
        written = zip(own_versions(self.handles), self._handle_versions, strict=True)
        changed |= {place for place, (now, before) in enumerate(written) if now != before}
        if changed:
            names = ", ".join(named(parts_of(self.leaves[place].path)) for place in sorted(changed))
            raise ModuleError(
                f"the loss function, or a forward in it, writes to parameters in place: {names}. {WRITES}"
            )

    def words(self) -> list[str]:
        """Return what each unit is called, and what it holds."""
        return [
            f"{self.leaves[unit.places[0]].unit} ({', '.join(named(parts_of(self.leaves[at].path)) for at in unit.places)})"
            for unit in self.units
        ]


def whole(tree: PyTree) -> PyTree:
    """Return a tree with plain tensors in the place of parameters, gathered.

    Outside a loss function there are no handles, and the tree is returned as it is.
    """
    leaves, structure = flatten(tree, sharded_is_leaf=True, none_is_leaf=True)
    return unflatten(structure, [wholes(leaf) for leaf in leaves])


def gathered(fn: Callable[..., Any], *, keep: bool = False) -> Callable[..., Any]:
    """Return a function whose parameters are gathered when it is called and let go when it returns.

    Any loss function works without this mark; a marked block holds its parameters for exactly as long as it runs, and its
    body sees plain tensors.

    Args:
        fn: a function that is called with parameters among its arguments.
        keep: leave what autograd saves in it as it is, instead of gathering parameters again for the backward.

    >>> import torch, fshard as fs
    >>> block = fs.gathered(lambda w, x: torch.relu(x @ w))
    >>> block(torch.eye(2), torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = flatten((args, kwargs), sharded_is_leaf=True, none_is_leaf=True)
        units = {id(leaf.unit): leaf.unit for leaf in leaves if type(leaf) is Handle}
        own_args, own_kwargs = unflatten(structure, [wholes(leaf) for leaf in leaves])
        try:
            with unwatched() if keep else nullcontext():
                return fn(*own_args, **own_kwargs)
        finally:
            for unit in units.values():
                if unit.sharded and unit.tape.manner.reshard:
                    unit.release()

    return run


def followed(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function as it is to be called with handles: what torch.compile has made takes gathered parameters."""
    return gathered(loss_fn) if hasattr(loss_fn, "_torchdynamo_orig_callable") else loss_fn


@dataclass
class Known:
    """What is known of a tree of parameters: the ways of its leaves, and the order in which units were last used.

    What is gathered ahead is a guess: a wrong one costs time only.  All devices have agreed on the turns of reductions.
    `key` is what it depends on: it is compared, for to hash it takes longer where little is known.
    """

    key: object
    leaves: tuple[Leaf, ...]
    mesh: Mesh
    axes: tuple[str, ...]
    in_order: bool
    order: Order | None = None
    by_unit: list[list[int]] = field(init=False)
    _ways: dict[Along, tuple[list[Way | None], int]] = field(default_factory=dict[Along, tuple[list[Way | None], int]])

    def __post_init__(self) -> None:
        by_unit: dict[str, list[int]] = {}
        alone = self.mesh.size == 1  # nothing is sent, so all are one unit
        for place, leaf in enumerate(self.leaves):
            if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
                by_unit.setdefault("" if alone else leaf.unit, []).append(place)
        self.by_unit = [*by_unit.values()]

    def ways(self, along: Along) -> tuple[list[Way | None], int]:
        """Return the ways of gradients that devices along the batch's axes, and these, hold summands of; how many these are."""
        found = self._ways.get(along)
        if found is None:
            ways = [self._way(along, leaf) if leaf.trained else None for leaf in self.leaves]
            found = self._ways[along] = ways, prod(self.mesh.shape[axis] for axis in along)
        return found

    def _way(self, along: Along, leaf: Leaf) -> Way:
        """Return the way of one gradient: over the batch's axes first, if the order of additions matters."""
        axes = (*along, *self.axes)
        if self.in_order:
            return way_in_order(self.mesh, axes, leaf.gradient, leaf.shape)
        return way_between(Layout(self.mesh, P(unreduced=axes)), leaf.gradient, leaf.shape)


def numbered(leaves: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return the places of leaves that are the first of their ties, and for each leaf the number of its own among these.

    >>> x = torch.ones(2)
    >>> numbered([x, torch.ones(2), x])
    ([0, 1], [0, 1, 0])
    """
    firsts = firsts_of(leaves)
    own = sorted({*firsts})
    number = {place: at for at, place in enumerate(own)}
    return own, [number[place] for place in firsts]


def leaf_of(path: str, x: Sharded, gradients: Callable[[Layout], Layout] | None) -> Leaf:
    """Return what is to be done with a parameter, given where its gradient is to lie; None: it is not trained."""
    layout, whole = x.layout, Layout(x.mesh)
    wanted = layout if gradients is None else gradients(layout)
    if not isinstance(wanted, Layout):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(
            f"value_and_grad: {gradients=!r} has to return a Layout for {named(parts_of(path))}; found {wanted!r}. "
            "Write opt.gradients of a partitioned optimizer, or leave it out."
        )
    gather = way_between(layout, whole, x.shape)
    return Leaf(path, x.shape, x.dtype, layout.unit or unit_of(path), gather, gradients is not None, wanted)


def refuse_half_frozen(paths: Sequence[str], at: Sequence[int], fixed: Sequence[bool]) -> None:
    """Raise naming parameters that are frozen under one name and trained under another."""
    names: dict[int, list[str]] = {}
    for path, place in zip(paths, at, strict=True):
        names.setdefault(place, []).append(named(parts_of(path)))
    half = {place for place, fix in zip(at, fixed, strict=True) if not fix} & {
        place for place, fix in zip(at, fixed, strict=True) if fix
    }
    if half:
        wrong = "; ".join(" and ".join(names[place]) for place in sorted(half))
        raise LayoutError(f"frozen: {wrong} are one parameter (tied), and only one name of it is frozen. Freeze all.")
