"""`ParamRuntime`: the parameters of one device in one step, unsharded just before their use and resharded after.

Inside a loss function every parameter is a `LazyParam`. The first operation that uses one unshards
its entire `Unit`. Autograd calls the backward of that right after the backward of the block that
uses the unit: `AgreedReductions` starts the reduce-scatter, and the backward of earlier blocks
overlaps with it.

    forward     all-gather 0 | block 0 | all-gather 1 | block 1 | ... | loss
    backward    ... | block 1 | reduce-scatter 1 | block 0 | reduce-scatter 0      (units are all-gathered again if freed)

    pre_forward      an operation uses a unit: make room, unshard it, wait for it, look ahead
    pre_backward     autograd reads a saved tensor of the unit: the same, if it was resharded
    post_backward    its backward is over: reshard it, and receive its cotangents

A sharded unit is freed when later ones are unsharded; `SavedTensors` keeps it out of autograd's
graph. Replicated parameters (ZeRO 0 to 2) are neither all-gathered nor freed: the same nodes only
reduce their gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor

from fshard.errors import ModuleError
from fshard.mesh.layout import flatten, unflatten
from fshard.source import Site
from fshard.transforms.fsdp.autograd import (
    SavedTensors,
    lazy_params_of,
    outside_transforms,
    unwatched,
    use_once,
    use_unit,
)
from fshard.transforms.fsdp.graph_checks import raise_foreign_backward
from fshard.transforms.fsdp.lazy_param import WRITES, LazyParam, lazy_versions, unsharded
from fshard.transforms.fsdp.plans import Order, ParamPlans, UnitPlan, local_plans
from fshard.transforms.fsdp.reductions import AgreedReductions, Reducer
from fshard.transforms.fsdp.units import StepContext, Unit, versions_of
from fshard.transforms.options import StepOptions
from fshard.transforms.patterns import titled

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]

OTHER_ORDER = (
    "fshard: a step uses units in another order than the last one. Those in other memory are copied to the device when they "
    "are used, instead of ahead."
)


class ParamRuntime:
    """The parameters of one device in one step.

    It has their units, lazy parameters, saved tensors and gradients.

    Args:
        plans: of the parameters.
        shards: those of this device.
        device: its number in the mesh.
        options: of the step.
        site: the source line of the step.

    `sequence`: the numbers of units in the order of their all-gathers, which must be equal on all
    devices.
    """

    def __init__(
        self,
        plans: ParamPlans,
        shards: Sequence[Tensor],
        device: int,
        options: StepOptions,
        site: Site,
    ) -> None:
        self.context = StepContext.of(options, site)
        self.state: Literal["idle", "forward", "backward", "closed"] = "idle"
        self.is_first_step = plans.order is None
        self.expected = plans.order or Order([], [])
        self.observed = Order([], [])
        self.sequence: list[int] = []

        self.shards: Sequence[Tensor] = shards
        self.leaves = local_plans(plans.leaves, device) if options.local else plans.leaves
        unit_plans = plans.units(device if options.local else None)
        self.units: list[Unit] = []
        for plan in unit_plans:
            self.units.append(Unit(self.context, plan, [shards[index] for index in plan.indices]))

        # The state of each unit's uses, by its number.
        self._outputs: list[tuple[Tensor, ...] | None] = [None] * len(self.units)
        self._pending_backwards = [0] * len(self.units)
        self.used_units: dict[int, None] = {}  # those that the forward has used, by first use
        self._live: list[Unit] = []  # the sharded units that are unsharded, the last used last

        is_freed_early = options.reshard_after_forward and not plans.keeps_saved
        has_sharded_units = any([plan.is_sharded for plan in unit_plans])
        self.saved = SavedTensors(
            is_needed=is_freed_early and has_sharded_units, unshard=self.pre_backward
        )

        self.reducer = Reducer(
            self.leaves,
            self.context.device,
            options,
            site,
            wide=options.reproducible or (options.reduce_once and options.accumulate > 1),
            recorder=self.context.recorder,
        )
        self.reductions = AgreedReductions(
            unit_plans, self.reducer, plans.reduction_plans, self.expected
        )

        # See Note [The anchor makes autograd call units].
        self.anchor = torch.zeros((), requires_grad=True)
        self.lazy_params = self._make_lazy_params()
        self._shard_versions = versions_of(shards)
        self._lazy_versions = lazy_versions(self.lazy_params)
        self._written: list[str] = []  # the parameters that were found to be written to

    def _make_lazy_params(self) -> list[Tensor]:
        """Return the parameters for the loss function.

        Lazy parameters of units, and plain tensors of other leaves.
        """
        params: dict[int, Tensor] = {}
        indices = [index for unit in self.units for index in unit.plan.indices]
        params.update(zip(indices, lazy_params_of(self), strict=True))

        # Integers have no gradient, and are unsharded at once: operations may take them as indices,
        # which are read.
        plain = [index for index in range(len(self.leaves)) if index not in params]
        if plain:
            shards = [self.shards[index] for index in plain]
            unit = Unit(self.context, UnitPlan.of(self.leaves, plain), shards)
            unit.unshard()
            params.update(zip(plain, unit.wait_for_unshard(), strict=True))
        return [params[index] for index in range(len(self.leaves))]

    @property
    def order(self) -> Order:
        """The order of units in this step."""
        turns, along = self.reductions.sequence, self.reductions.along
        return self.observed._replace(turns=turns, along=along)

    # -- a slice: forward ----------------------------------------

    def begin_slice(self) -> None:
        """Begin a slice."""
        if self.state != "idle":
            self.finish_slice()
        self.state = "forward"
        self.observed = Order([], [])
        self.used_units = {}
        self._fetch(self.expected.forward)

    def use(self, unit: Unit, position: int) -> Tensor:
        """Return a parameter for an operation, unsharded and differentiable."""
        outputs = self._outputs[unit.plan.number]
        if outputs is None:
            outputs = self.pre_forward(unit)
        x = outputs[position]
        if self.context.options.reproducible and x.requires_grad:
            return use_once(self, unit, x, position)
        return x

    def pre_forward(self, unit: Unit) -> tuple[Tensor, ...]:
        """Unshard a unit for an operation that uses it.

        Returns all its parameters, differentiable.
        """
        number, is_trained = unit.plan.number, unit.plan.is_trained
        has_grad = torch.is_grad_enabled()
        is_gathered = unit.plan.is_sharded and not unit.values
        if is_gathered:
            self._make_room(unit)
        with outside_transforms():
            self._unshard(unit)
            if is_trained and has_grad:
                outputs = use_unit(self, unit)
            else:
                outputs = self._detached(unit)

        if is_trained and has_grad and not _is_recomputing():
            self._pending_backwards[number] += 1
            self.used_units.setdefault(number)
        if has_grad or not is_trained:  # else a later use, with gradients, needs other outputs
            self._outputs[number] = outputs
        if is_gathered:
            with outside_transforms():
                self._look_ahead(unit, self.observed.forward, self.expected.forward)
        return outputs

    @torch.no_grad()
    def _detached(self, unit: Unit) -> tuple[Tensor, ...]:
        """Return all parameters of a unit, without gradients.

        Writes to them change the versions of the values.
        """
        return tuple([x.detach() for x in self.wait_for_unshard(unit)])

    def _make_room(self, unit: Unit) -> None:
        """Reshard the units that were used longest ago, so that one more can be unsharded."""
        if unit in self._live:
            self._live.remove(unit)
        options = self.context.options
        while options.reshard_after_forward and len(self._live) >= options.live_units:
            self.reshard(self._live[0])  # (6)
        self._live.append(unit)

    def _unshard(self, unit: Unit) -> None:
        """Start the all-gather of a unit, unless it is unsharded or about to be."""
        if unit.plan.is_sharded and not unit.is_unsharded:
            self.sequence.append(
                unit.plan.number
            )  # before it starts, for the error if devices differ
        unit.unshard()

    def wait_for_unshard(self, unit: Unit) -> list[Tensor]:
        """Return the unsharded parameters of a unit, whose all-gather is complete."""
        if unit.pending is not None:
            unit.wait_for_unshard()
            if unit.plan.is_sharded:
                self.saved.register(unit)
        return unit.values

    # Note [Prefetch follows the last order]
    # A prefetched all-gather is a collective, which all devices must start at the same time. So
    # what a device prefetches depends only on what is equal on all devices: the order of the last
    # step, and the all-gathers of this one, which must be equal anyway. A use of a unit that is
    # unsharded already is none, may depend on the data, and is not recorded. Once the orders differ
    # nothing is prefetched; a unit that was prefetched in vain costs time and memory, not
    # correctness: the same one on all devices, which wait for it at the end of the slice. The next
    # step expects the order of this one.
    def _look_ahead(self, unit: Unit, observed: list[int], expected: list[int]) -> None:
        """Record an all-gather, and prefetch the units that followed it.

        See Note [Prefetch follows the last order].
        """
        observed.append(unit.plan.number)
        count = len(observed)
        if count <= len(expected) and expected[:count] == observed:
            self._fetch(expected[count:])
            for number in expected[count : count + self.context.options.prefetch]:
                self._unshard(self.units[number])
        elif expected and any(plan.memory != "device" for plan in unit.plan.params):
            warnings.warn(OTHER_ORDER, stacklevel=1)

    def _fetch(self, numbers: Sequence[int]) -> None:
        """Start to copy the next units from other memory.

        Those to prefetch, and the one after, whose copy takes time.
        """
        prefetch = self.context.options.prefetch
        if prefetch:
            for number in numbers[: prefetch + 1]:
                self.units[number].fetch()

    def reshard(self, unit: Unit) -> None:
        """Free the unsharded parameters of a unit: the next use all-gathers them again."""
        self._written += unit.written()
        unit.reshard()
        self._outputs[unit.plan.number] = None
        if unit in self._live:
            self._live.remove(unit)

    # -- a slice: backward ----------------------------------------

    @contextmanager
    def backward(self) -> Generator[None]:
        """Accept gradients within this context.

        Outside of it, a backward was not started by fshard, and other devices do not join in.
        """
        self.state = "backward"
        self._fetch(self.expected.backward)
        try:
            yield
        finally:
            self.state = "forward"

    def pre_backward(self, unit: Unit) -> list[Tensor]:
        """Return all parameters of a unit for a saved tensor.

        They are unsharded again if they were freed.
        """
        if not unit.values:
            self._make_room(unit)
            self._unshard(unit)  # (7)
            self.wait_for_unshard(unit)
            self._look_ahead(unit, self.observed.backward, self.expected.backward)
        return unit.values

    def post_backward(self, unit: Unit, gs: Sequence[Tensor | None]) -> None:
        """Reshard a unit after the backward of one use, and receive its cotangents."""
        self._validate_backward()
        number = unit.plan.number
        self._pending_backwards[number] -= 1
        if unit.plan.is_sharded and self.context.options.reshard_after_forward:
            self.reshard(unit)
        is_last_use = not self._pending_backwards[number]
        self.reductions.receive(unit.plan, gs, is_last_use=is_last_use)

    def receive_separately(self, unit: Unit, gs: Sequence[Tensor | None]) -> None:
        """Receive cotangents of lazy parameters themselves, or of a single use."""
        if any(g is not None for g in gs):
            self._validate_backward()
            self.reductions.receive_separately(unit.plan, gs)

    def _validate_backward(self) -> None:
        """Raise unless the backward was started by fshard."""
        if self.state != "backward":
            raise_foreign_backward()

    def finish_slice(self) -> None:
        """Reshard all units, and wait for their prefetches, which other devices take part in."""
        for unit in self.units:
            self._pending_backwards[unit.plan.number] = 0
            self.wait_for_unshard(unit)
            self.reshard(unit)
        self.saved.clear()
        self.state = "idle"

    # -- the end of the step ----------------------------------------

    def check_unchanged(self) -> None:
        """Raise if the loss function has written to a parameter in place."""
        written = {*self._written}
        for unit in self.units:
            written.update(unit.written())
        written.update(self._paths_of_changes(self._shard_versions, versions_of(self.shards)))
        lazy = lazy_versions(self.lazy_params)
        written.update(self._paths_of_changes(self._lazy_versions, lazy))
        if not written:
            return
        path = next(leaf.path for leaf in self.leaves if leaf.path in written)
        raise ModuleError(
            "the loss function, a forward in it, or the loop before the optimizer's step, writes to a parameter in place: "
            f"{titled(path)}. {WRITES}"
        )

    def _paths_of_changes(self, before: list[int], after: list[int]) -> list[str]:
        """Return the paths of the parameters whose version has changed."""
        if before == after:
            return []
        rows = zip(self.leaves, before, after, strict=True)
        return [leaf.path for leaf, version, new_version in rows if version != new_version]

    def close(self, *, wait: bool = True) -> None:
        """End the step, early perhaps, and drop all tensors.

        Lazy parameters that a loss function has kept would hold them.

        It waits for communication, which other devices take part in, unless there was an error.
        """
        if wait:
            self.reducer.finish()
            if self.state != "idle":
                self.finish_slice()
        else:
            for unit in self.units:
                self.reshard(unit)
            self.saved.clear()
        self.state = "closed"
        self.context.release_replicas()
        self.shards = ()
        self.lazy_params = []
        self.reducer.sums = []
        # `saved` refers to this runtime, so it stays until Python collects cycles; its tensors
        # would count in the peak of the update. A second call finds no anchor.
        vars(self).pop("anchor", None)
        for unit in self.units:
            unit.shards = ()

    def describe_units(self) -> list[str]:
        """Return the name and the parameters of each unit, for messages."""
        descriptions: list[str] = []
        for unit in self.units:
            names = [titled(plan.path) for plan in unit.plan.params]
            descriptions.append(f"{unit.plan.params[0].unit} ({', '.join(names)})")
        return descriptions


# Note [Recomputed uses are not counted]
# A checkpoint runs a part of the forward again within the backward, and may use a unit that was
# resharded: autograd records that use like any other. It ends with the backward that it is part of,
# whose last use of the unit is one of the first forward. No step is known whose reductions are late
# without this rule.
def _is_recomputing() -> bool:
    """Return True within a backward: see Note [Recomputed uses are not counted]."""
    return _C._current_graph_task_id() != -1


def with_unsharded_params(fn: Callable[..., Any], *, keep: bool = False) -> Callable[..., Any]:
    """Return a function that unshards the parameters in its arguments when called, and reshards them when it returns.

    No loss function needs this: it determines how long a block's parameters are unsharded, and its
    body gets plain tensors.

    Args:
        fn: called with parameters among its arguments.
        keep: keep the unsharded parameters that autograd saves, instead of unsharding them again
            for the backward.

    >>> import torch, fshard as fs
    >>> block = fs.with_unsharded_params(lambda w, x: torch.relu(x @ w))
    >>> block(torch.eye(2), torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = flatten((args, kwargs), none_is_leaf=True)
        runtimes = {leaf.unit: leaf.runtime for leaf in leaves if type(leaf) is LazyParam}
        plain_args, plain_kwargs = unflatten(structure, [unsharded(leaf) for leaf in leaves])
        try:
            with unwatched() if keep else nullcontext():
                return fn(*plain_args, **plain_kwargs)
        finally:
            for unit, runtime in runtimes.items():
                if unit.plan.is_sharded and unit.context.options.reshard_after_forward:
                    runtime.reshard(unit)

    return run
