"""`ParamRuntime`: the parameters of one device in one step, unsharded just before their use and resharded after.

Inside a loss function every parameter is a `LazyParam`. The first operation that uses one unshards its entire `Unit`.
Autograd calls the backward of that, the reduce-scatter (`Reductions`), right after the backward of the block that uses
the unit; the backward of earlier blocks overlaps with it.

    forward     all-gather 0 | block 0 | all-gather 1 | block 1 | ... | loss
    backward    ... | block 1 | reduce-scatter 1 | block 0 | reduce-scatter 0      (units are all-gathered again if freed)

A sharded unit is freed when later ones are unsharded; `SavedTensors` keeps it out of autograd's graph. Replicated
parameters (ZeRO 0 to 2) are neither all-gathered nor freed: the same Function only reduces their gradients.

`ParamPlans` caches the plans of a tree of parameters and of their gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import ModuleError
from fshard.mesh.layout import Layout, Mesh, flatten, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.execute import ReshardPlan, plan_reshard
from fshard.mesh.spmd.scope import Group, require
from fshard.optim.leaves import firsts_of
from fshard.source import Site
from fshard.transforms.fsdp.engine import Along, ParamPlan, Reducer, Storage, plan_reduction, versions_of
from fshard.transforms.fsdp.lazy_param import (
    WRITES,
    LazyParam,
    SavedTensors,
    lazy_params_of,
    lazy_versions,
    unsharded,
    unwatched,
)
from fshard.transforms.fsdp.reductions import AccumulateInto, Reductions
from fshard.transforms.fsdp.units import Unit
from fshard.transforms.module.replica import Replica
from fshard.transforms.options import StepOptions
from fshard.transforms.patterns import named, parts_of, unit_of


class Order(NamedTuple):
    """The order of units in one step, by number, which the next step expects.

    `forward` and `backward` are the orders of all-gathers, `turns` that of reductions, on which devices agreed along the
    batch's axes and `along`.
    """

    forward: list[int]
    backward: list[int]
    turns: list[int]
    along: Along = ()


class ParamRuntime:
    """The parameters of one device in one step: their units, lazy parameters, saved tensors and gradients.

    Args:
        leaves: the plans of parameters, and `shards` this device's shards.
        by_unit: the indices of the parameters of each unit.
        storage: unshards parameters.
        reducer: sums gradients over devices.
        options: of units.
        site: the source line of the step.
        order: of units, in an earlier step.
        several: True if gradients of several slices are accumulated before they are reduced.
        each_use: True if the gradient of each use is received separately, as in reproducible mode.
    """

    def __init__(
        self,
        leaves: Sequence[ParamPlan],
        by_unit: Sequence[list[int]],
        shards: Sequence[Tensor],
        storage: Storage,
        reducer: Reducer,
        options: StepOptions,
        site: Site,
        order: Order | None = None,
        *,
        several: bool = False,
        each_use: bool = False,
    ) -> None:
        self.leaves, self.shards, self.storage, self.options, self.site = leaves, shards, storage, options, site
        self.scope = require("value_and_grad")
        self.anchor = torch.zeros((), requires_grad=True)  # the input that makes autograd call the backwards of units
        self.sequence: list[int] = []  # of all-gathers, which must be equal on all devices
        self.live: list[Unit] = []  # the sharded units that are unsharded, the last used last
        self.first: list[int] = []  # the units that the forward has used, by first use
        self.over, self.fresh = False, order is None
        self.each_use, self.begun = each_use, False
        self.written: set[int] = set()  # the parameters that the loss function has written to
        self._replicas: list[Replica] = []  # copies of modules, in which lazy parameters are installed
        self._versions = versions_of(shards)
        self.seen, self.expected = Order([], [], []), order or Order([], [], [])
        self.units = [Unit(self, number, indices) for number, indices in enumerate(by_unit)]
        self.saved = SavedTensors(options.reshard_after_forward and any(unit.sharded for unit in self.units))
        turns, along = self.expected.turns, self.expected.along
        device = shards[0].device if shards else torch.device("cpu")
        self.reductions = Reductions(
            self.units, leaves, device, options, reducer, turns=turns, along=along, wide=several, site=site
        )
        self.lazy_params = self._lazy_params()
        self._lazy_versions = lazy_versions(self.lazy_params)

    def _lazy_params(self) -> list[Tensor]:
        """Return the arguments of a loss function: lazy parameters, and plain integer tensors, which may be indices."""
        indices = [index for unit in self.units for index in unit.indices]
        found = dict(zip(indices, lazy_params_of(self), strict=True))
        plain = [index for index in range(len(self.leaves)) if index not in found]
        if plain:
            found.update(zip(plain, self.storage.unshard(plain)(), strict=True))
        return [found[index] for index in range(len(self.leaves))]

    @property
    def order(self) -> Order:
        """The order of units in this step."""
        reductions = self.reductions
        return self.seen._replace(turns=reductions.turns, along=reductions.along)

    def make_room(self, unit: Unit) -> None:
        """Reshard the units that were used longest ago, so that one more can be unsharded."""
        self.live = [other for other in self.live if other is not unit]
        while self.options.reshard_after_forward and len(self.live) >= self.options.live_units:
            self.live[0].reshard()  # (6)
        self.live.append(unit)

    def begin(self) -> None:
        """Begin a slice."""
        if self.begun:
            self.end()
        self.begun = True
        self.seen, self.first = Order([], [], []), []

    def begin_backward(
        self, group: Group | None, along: Along, accumulate: AccumulateInto | None, *, idle: bool
    ) -> None:
        """Begin the backward of a slice: see `Reductions.begin`."""
        self.reductions.begin(self.first, group, along, accumulate, idle=idle)

    def end(self) -> None:
        """End a slice."""
        for unit in self.units:
            unit.arrive()  # a prefetch that was not used: other devices take part in it
            unit.reshard()
            unit.pending_backwards = 0
        self.saved.clear()

    def stop(self) -> None:
        """End a step early, and wait for its communication, which other devices take part in."""
        self.reductions.finish()
        self.end()
        self.close()

    def close(self) -> None:
        """Drop all references of the step: units and runtime form a reference cycle."""
        self.over, self.shards, self.lazy_params = True, (), []
        for replica in self._replicas:
            replica.rest()
        self._replicas = []
        self.reductions.sums = []

    def leave(self) -> None:
        """Drop everything after an error, without waiting for other devices."""
        for unit in self.units:
            unit.reshard()
        self.saved.clear()
        self.close()

    def use(self, replica: Replica) -> None:
        """Record a module copy that has lazy parameters installed until the step closes."""
        if not any(replica is other for other in self._replicas):
            self._replicas.append(replica)
            if self.fresh:
                replica.note_attributes()

    def warn_of_attributes(self) -> None:
        """Warn of plain attributes that a module has set in the first step, if it is called once for each slice."""
        names = [name for replica in self._replicas for name in replica.changed_attributes()]
        if names:
            warnings.warn(
                f"a forward sets {', '.join(names)}, and is called once for each slice of the batch. Such attributes are "
                "private to the device and see every call. Register what is a state of training as a buffer.",
                stacklevel=2,
            )

    def look_ahead(self, seen: list[int], expected: list[int], unit: Unit) -> None:
        """Record an all-gather in `seen`, and prefetch the units that followed it in the last step.

        All devices need the same all-gathers in one order. A use of a unit that is unsharded already needs none and is
        not recorded: it may depend on the data. So all devices prefetch alike, and their collectives keep one order.
        """
        index = len(seen)
        seen.append(unit.number)
        if index < len(expected) and expected[: index + 1] == seen:
            for number in expected[index + 1 : index + 1 + self.options.prefetch]:
                self.units[number].start()

    def check_unchanged(self) -> None:
        """Raise if the loss function has written to a parameter in place."""
        written = self.written.union(*(unit.written() for unit in self.units))
        shards = zip(versions_of(self.shards), self._versions, strict=True)
        lazy = zip(lazy_versions(self.lazy_params), self._lazy_versions, strict=True)
        for versions in (shards, lazy):
            written |= {index for index, (now, before) in enumerate(versions) if now != before}
        if written:
            names = ", ".join(named(parts_of(self.leaves[index].path)) for index in sorted(written))
            raise ModuleError(
                f"the loss function, or a forward in it, writes to parameters in place: {names}. {WRITES}"
            )

    def words(self) -> list[str]:
        """Return the name and the parameters of each unit, for messages."""
        return [
            f"{self.leaves[unit.indices[0]].unit} ({', '.join(named(parts_of(self.leaves[at].path)) for at in unit.indices)})"
            for unit in self.units
        ]


def with_unsharded_params(fn: Callable[..., Any], *, keep: bool = False) -> Callable[..., Any]:
    """Return a function that unshards the parameters in its arguments when called, and reshards them when it returns.

    No loss function needs this: it determines how long a block's parameters are unsharded, and its body gets plain
    tensors.

    Args:
        fn: called with parameters among its arguments.
        keep: keep the unsharded parameters that autograd saves, instead of unsharding them again for the backward.

    >>> import torch, fshard as fs
    >>> block = fs.with_unsharded_params(lambda w, x: torch.relu(x @ w))
    >>> block(torch.eye(2), torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = flatten((args, kwargs), none_is_leaf=True)
        units = {id(leaf.unit): leaf.unit for leaf in leaves if type(leaf) is LazyParam}
        own_args, own_kwargs = unflatten(structure, [unsharded(leaf) for leaf in leaves])
        try:
            with unwatched() if keep else nullcontext():
                return fn(*own_args, **own_kwargs)
        finally:
            for unit in units.values():
                if unit.sharded and unit.runtime.options.reshard_after_forward:
                    unit.reshard()

    return run


def followed(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function that takes lazy parameters: a compiled one is called with unsharded parameters."""
    return with_unsharded_params(loss_fn) if hasattr(loss_fn, "_torchdynamo_orig_callable") else loss_fn


@dataclass
class ParamPlans:
    """The cached plans of a tree of parameters, and the order in which its units were last used.

    A prefetch after this order may be wrong, which costs only time: it is on all devices. They have agreed on the order of
    reductions.
    """

    leaves: tuple[ParamPlan, ...]
    mesh: Mesh
    axes: tuple[str, ...]
    in_order: bool
    order: Order | None = None
    by_unit: list[list[int]] = field(init=False)
    _ways: dict[Along, list[ReshardPlan | None]] = field(default_factory=dict[Along, list[ReshardPlan | None]])

    def __post_init__(self) -> None:
        by_unit: dict[str, list[int]] = {}
        alone = self.mesh.size == 1  # nothing is sent, so all are one unit
        for index, leaf in enumerate(self.leaves):
            if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
                by_unit.setdefault("" if alone else leaf.unit, []).append(index)
        self.by_unit = [*by_unit.values()]

    def ways(self, along: Along) -> list[ReshardPlan | None]:
        """Return the plans that reduce gradients over the batch's axes and these: the batch's first, in reproducible mode."""
        found = self._ways.get(along)
        if found is None:
            found = self._ways[along] = [
                plan_reduction(self.mesh, (*along, *self.axes), leaf, in_order=self.in_order) if leaf.trained else None
                for leaf in self.leaves
            ]
        return found


def numbered(leaves: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return the indices of leaves without repeated (tied) ones, and for each leaf its number among these.

    >>> x = torch.ones(2)
    >>> numbered([x, torch.ones(2), x])
    ([0, 1], [0, 1, 0])
    """
    firsts = firsts_of(leaves)
    own = sorted({*firsts})
    number = {index: at for at, index in enumerate(own)}
    return own, [number[index] for index in firsts]


def plan_param(
    path: str, x: Sharded, gradients: Callable[[Layout], Layout] | None, unsharded: Layout | None = None
) -> ParamPlan:
    """Return the plan of a parameter; `gradients` maps its layout to its gradient's, None if it is frozen.

    `unsharded` is the layout in which it is used, sharded along local axes only; default: replicated on all devices.
    """
    layout, unsharded = x.layout, unsharded or Layout(x.mesh)
    wanted = layout if gradients is None else gradients(layout)
    if not isinstance(wanted, Layout):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"value_and_grad: {gradients=!r} must return a Layout for {named(parts_of(path))}; got {wanted!r}. "
            "Write opt.gradients of a partitioned optimizer, or leave it out."
        )
    gather, unit = plan_reshard(layout, unsharded, x.shape), layout.unit or unit_of(path)
    return ParamPlan(path, x.shape, x.dtype, unit, gather, gradients is not None, wanted, unsharded.spec)


def refuse_half_frozen(paths: Sequence[str], at: Sequence[int], fixed: Sequence[bool]) -> None:
    """Raise naming parameters that are frozen under one name and trained under another."""
    names: dict[int, list[str]] = {}
    for path, index in zip(paths, at, strict=True):
        names.setdefault(index, []).append(named(parts_of(path)))
    half = {index for index, fix in zip(at, fixed, strict=True) if not fix} & {
        index for index, fix in zip(at, fixed, strict=True) if fix
    }
    if half:
        wrong = "; ".join(" and ".join(names[index]) for index in sorted(half))
        raise ValueError(f"frozen: {wrong} are one parameter (tied), and only one name of it is frozen. Freeze all.")
