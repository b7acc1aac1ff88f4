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

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fshard.errors import ModuleError
from fshard.mesh.layout import Layout, Mesh, flatten, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.execute import ReshardPlan, plan_reshard
from fshard.optim.leaves import firsts_of
from fshard.source import Site
from fshard.transforms.fsdp.lazy_param import (
    WRITES,
    LazyParam,
    SavedTensors,
    lazy_params_of,
    lazy_versions,
    unsharded,
    unwatched,
)
from fshard.transforms.fsdp.plans import Along, ParamPlan, local_plans, plan_reduction, versions_of
from fshard.transforms.fsdp.reductions import Reductions
from fshard.transforms.fsdp.units import LazyUnit, Order, Unit, UnitPlan, UnitRuntime, UnitSchedule
from fshard.transforms.options import StepOptions
from fshard.transforms.patterns import named, parts_of, titled, unit_of


class ParamRuntime(UnitSchedule):
    """The parameters of one device in one step: their units, lazy parameters, saved tensors and gradients.

    Args:
        plans: of the parameters.
        shards: those of this device.
        device: its number in the mesh.
        options: of the step.
        site: the source line of the step.
    """

    def __init__(
        self,
        plans: ParamPlans,
        shards: Sequence[Tensor],
        device: int,
        options: StepOptions,
        site: Site,
    ) -> None:
        super().__init__(options, site, plans.order)
        self.leaves = local_plans(plans.leaves, device) if options.local else plans.leaves
        self.shards: Sequence[Tensor] = shards
        self.is_first_step = plans.order is None
        self.units += [
            LazyUnit(self, number, plan, [shards[index] for index in plan.indices])
            for number, plan in enumerate(plans.units(device if options.local else None))
        ]
        self.saved = SavedTensors(
            options.reshard_after_forward
            and not plans.keeps_saved
            and any(unit.is_sharded for unit in self.units)
        )
        self.reductions = Reductions(
            self.units,
            self.leaves,
            shards[0].device if shards else torch.device("cpu"),
            options,
            plans.reduction_plans,
            order=self.expected,
            wide=options.reproducible or (options.reduce_once and options.accumulate > 1),
            site=site,
        )
        indices = [index for unit in self.units for index in unit.indices]
        params = dict(zip(indices, lazy_params_of(self), strict=True))
        if plain := [
            index for index in range(len(self.leaves)) if index not in params
        ]:  # integers may be indices
            unit = Unit(
                UnitRuntime(options, site),
                0,
                UnitPlan.of(self.leaves, plain),
                [shards[index] for index in plain],
            )
            unit.unshard()
            params.update(zip(plain, unit.wait_for_unshard(), strict=True))
        self.lazy_params = [params[index] for index in range(len(self.leaves))]
        self._versions = [*zip(versions_of(shards), lazy_versions(self.lazy_params), strict=True)]

    @property
    def order(self) -> Order:
        """The order of units in this step."""
        return self.observed._replace(turns=self.reductions.sequence, along=self.reductions.along)

    # -- a slice ------------------------------------------------------------------------------------------------------

    def begin_slice(self) -> None:
        """Begin a slice."""
        if self.state != "idle":
            self.finish_slice()
        self.state, self.observed, self.used_units = "forward", Order([], []), {}
        self.fetch_ahead(self.expected.forward)

    @contextmanager
    def backward(self) -> Generator[None]:
        """Accept gradients within: outside of it, a backward was not started by fshard, and other devices do not join in."""
        self.state = "backward"
        self.fetch_ahead(self.expected.backward)
        try:
            yield
        finally:
            self.state = "forward"

    def finish_slice(self) -> None:
        """Reshard all units, and wait for their prefetches, which other devices take part in."""
        for unit in self.units:
            unit.pending_backwards = 0
            unit.wait_for_unshard()
            unit.reshard()
        self.saved.clear()
        self.state = "idle"

    # -- the end of the step --------------------------------------------------------------------------------------------

    def check_unchanged(self) -> None:
        """Raise if the loss function has written to a parameter in place."""
        written = {*self.written, *(path for unit in self.units for path in unit.written())}
        versions = zip(versions_of(self.shards), lazy_versions(self.lazy_params), strict=True)
        rows = zip(self.leaves, versions, self._versions, strict=True)
        written |= {leaf.path for leaf, version, before in rows if version != before}
        path = next((leaf.path for leaf in self.leaves if leaf.path in written), None)
        if path is not None:
            raise ModuleError(
                "the loss function, a forward in it, or the loop before the optimizer's step, writes to a parameter in place: "
                f"{titled(path)}. {WRITES}"
            )

    def close(self, *, wait: bool = True) -> None:
        """End the step, early perhaps, and drop all references: units and runtime form a reference cycle.

        It waits for communication, which other devices take part in, unless there was an error.
        """
        if wait:
            self.reductions.finish()
            if self.state != "idle":
                self.finish_slice()
        else:
            for unit in self.units:
                unit.reshard()
            self.saved.clear()
        self.state, self.shards, self.lazy_params = "closed", (), []
        self.release_replicas()
        self.reductions.sums = []
        vars(self).pop("anchor", None)
        for unit in self.units:
            unit.shards = ()

    def describe_units(self) -> list[str]:
        """Return the name and the parameters of each unit, for messages."""
        return [
            f"{unit.plans[0].unit} ({', '.join(named(parts_of(plan.path)) for plan in unit.plans)})"
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
        plain_args, plain_kwargs = unflatten(structure, [unsharded(leaf) for leaf in leaves])
        try:
            with unwatched() if keep else nullcontext():
                return fn(*plain_args, **plain_kwargs)
        finally:
            for unit in units.values():
                if unit.is_sharded and unit.runtime.options.reshard_after_forward:
                    unit.reshard()

    return run


@dataclass
class ParamPlans:
    """The cached plans of a tree of parameters, and the order in which its units were last used.

    A prefetch after this order may be wrong, which costs only time: it is on all devices. They have agreed on the order of
    reductions. `keeps_saved`: autograd keeps the unsharded parameters that it saves: see Note [torch.func refuses
    saved-tensor hooks].
    """

    leaves: tuple[ParamPlan, ...]
    mesh: Mesh
    axes: tuple[str, ...]
    in_order: bool
    order: Order | None = None
    keeps_saved: bool = False
    _units: dict[int | None, list[UnitPlan]] = field(
        default_factory=dict[int | None, list[UnitPlan]]
    )
    _reduction_plans: dict[Along, list[ReshardPlan | None]] = field(
        default_factory=dict[Along, list[ReshardPlan | None]]
    )

    def units(self, device: int | None) -> list[UnitPlan]:
        """Return the plans of units, those of a device where it uses local shards."""
        if device not in self._units:
            leaves = self.leaves if device is None else local_plans(self.leaves, device)
            units: dict[str, list[int]] = {}
            for index, leaf in enumerate(leaves):
                if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
                    is_moved = (
                        self.mesh.size > 1 or leaf.memory != "device"
                    )  # else one unit is enough
                    units.setdefault(leaf.unit if is_moved else "", []).append(index)
            self._units[device] = [UnitPlan.of(leaves, indices) for indices in units.values()]
        return self._units[device]

    def reduction_plans(self, along: Along) -> list[ReshardPlan | None]:
        """Return the plans that reduce gradients over the batch's axes and these: the batch's first, in reproducible mode."""
        if along not in self._reduction_plans:
            self._reduction_plans[along] = [
                plan_reduction(self.mesh, (*along, *self.axes), leaf, in_order=self.in_order)
                if leaf.trained
                else None
                for leaf in self.leaves
            ]
        return self._reduction_plans[along]


def numbered(leaves: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return the indices of leaves without repeated (tied) ones, and for each leaf its number among these.

    >>> x = torch.ones(2)
    >>> numbered([x, torch.ones(2), x])
    ([0, 1], [0, 1, 0])
    """
    firsts = firsts_of(leaves)
    indices = sorted({*firsts})
    numbers = {index: number for number, index in enumerate(indices)}
    return indices, [numbers[index] for index in firsts]


def plan_param(
    path: str,
    x: Sharded,
    gradients: Callable[[Layout], Layout] | None,
    unsharded: Layout | None = None,
) -> ParamPlan:
    """Return the plan of a parameter; `gradients` maps its layout to its gradient's, None if it is frozen.

    `unsharded` is the layout in which it is used, sharded along local axes only; default: replicated on all devices.
    """
    layout, unsharded = x.layout, unsharded or Layout(x.mesh)
    wanted = layout if gradients is None else gradients(layout)
    if not isinstance(wanted, Layout):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"value_and_grad: {gradients=!r} must return a Layout for {titled(path)}; got {wanted!r}. "
            "Write opt.gradients of a partitioned optimizer, or leave it out."
        )
    wanted = wanted.with_memory("host") if wanted.memory == "disk" else wanted
    gather, unit = plan_reshard(layout, unsharded, x.shape), layout.unit or unit_of(path)
    return ParamPlan(
        path,
        x.shape,
        x.dtype,
        unit,
        gather,
        gradients is not None,
        wanted,
        unsharded.spec,
        layout.memory,
    )


def validate_ties_frozen(
    paths: Sequence[str], numbers: Sequence[int], frozen: Sequence[bool]
) -> None:
    """Raise naming parameters that are frozen under one name and trained under another."""
    names: dict[int, list[str]] = {}
    for path, number in zip(paths, numbers, strict=True):
        names.setdefault(number, []).append(titled(path))
    pairs = {*zip(numbers, frozen, strict=True)}
    if half := [number for number in names if {(number, True), (number, False)} <= pairs]:
        errors = "; ".join(" and ".join(names[number]) for number in half)
        raise ValueError(
            f"frozen: {errors} are one parameter (tied), and only one name of it is frozen. Freeze all."
        )
