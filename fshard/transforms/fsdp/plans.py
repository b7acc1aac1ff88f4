"""Plans of parameters: how each is unsharded and used, and how its gradient gets to its layout.

ParamPlans          a tree of parameters, and the order in which its units were last used; cached by a gradient
  UnitPlan          parameters that are all-gathered and reduced together
    ParamPlan       one parameter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.mesh.layout import Layout, Memory, Mesh, P
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.execute import ReshardPlan, plan_reshard
from fshard.optim.leaves import firsts_of
from fshard.transforms.patterns import titled, unit_of

Along = tuple[str, ...]
"""Axes besides the batch's over which gradients are summed."""
Gradients = list[Tensor | None]
"""The gradients of the parameters of a unit; None where there is none."""
ReductionPlans = Mapping[int, ReshardPlan]
"""The reshard plans of gradients, by the index of the trained parameter.

From summands to layouts of gradients.
"""


class ParamPlan(NamedTuple):
    """The plan of one parameter.

    Args:
        path: in the tree of parameters.
        shape: of the unsharded parameter.
        dtype: in which it is stored.
        unit: the name of its unit.
        gather: the plan from the stored layout to that in which it is used.
        trained: True if it has a gradient.
        gradient: the layout of that.
        used: the spec in which it is used.
        memory: in which it is stored.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str
    gather: ReshardPlan
    trained: bool
    gradient: Layout
    used: P = P()
    memory: Memory = "device"

    @property
    def is_sharded(self) -> bool:
        """True if it is all-gathered, or copied to the device, before it is used."""
        if self.memory != "device":
            return True
        return any(step.kind != "reshape" for step in self.gather.steps)


class UnitPlan(NamedTuple):
    """The plan of a unit.

    Args:
        indices: of its parameters among those of the step, of stages among those of the stage.
        params: their plans.
        is_sharded: True if any is all-gathered, or copied to the device, before it is used.
        is_trained: True if any is trained.
        number: of the unit among those of a full model.
    """

    indices: list[int]
    params: list[ParamPlan]
    is_sharded: bool
    is_trained: bool
    number: int = 0

    @staticmethod
    def of(leaves: Sequence[ParamPlan], indices: list[int], number: int = 0) -> UnitPlan:
        """Return the plan of the unit of these leaves."""
        params = [leaves[index] for index in indices]
        is_sharded = any(plan.is_sharded for plan in params)
        is_trained = any(plan.trained for plan in params)
        return UnitPlan(indices, params, is_sharded, is_trained, number)


class Order(NamedTuple):
    """The order of units in one step, by number, which the next step expects.

    Args:
        forward: of all-gathers in the forward.
        backward: of all-gathers in the backward.
        turns: of reductions, on which devices agreed along the batch's axes and `along`.
        along: the axes besides.
    """

    forward: list[int]
    backward: list[int]
    turns: Sequence[int] = ()
    along: Along = ()


# -- all parameters of a step ----------------------------------------


@dataclass
class ParamPlans:
    """The cached plans of a tree of parameters, and the order in which its units were last used.

    `keeps_saved`: autograd keeps the unsharded parameters that it saves: see Note [torch.func
    refuses saved-tensor hooks].
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
    _reduction_plans: dict[Along, ReductionPlans] = field(
        default_factory=dict[Along, ReductionPlans]
    )

    def units(self, device: int | None) -> list[UnitPlan]:
        """Return the plans of units, those of a device where it uses local shards."""
        units = self._units.get(device)
        if units is None:
            leaves = self.leaves if device is None else local_plans(self.leaves, device)
            units = self._units[device] = self._group(leaves)
        return units

    def _group(self, leaves: Sequence[ParamPlan]) -> list[UnitPlan]:
        """Group floating-point and complex leaves by the names of their units.

        Others have no gradient and no unit.
        """
        groups: dict[str, list[int]] = {}
        for index, leaf in enumerate(leaves):
            if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
                continue
            # On one device, with all in its memory, nothing is gathered, freed or reduced, so one
            # unit costs least.
            is_moved = self.mesh.size > 1 or leaf.memory != "device"
            name = leaf.unit if is_moved else ""
            groups.setdefault(name, []).append(index)
        return [
            UnitPlan.of(leaves, indices, number) for number, indices in enumerate(groups.values())
        ]

    def reduction_plans(self, along: Along) -> ReductionPlans:
        """Return the plans that reduce gradients over the axes of the batch and these.

        Those of the batch are first, in reproducible mode.
        """
        plans = self._reduction_plans.get(along)
        if plans is None:
            axes = (*along, *self.axes)
            plans = self._reduction_plans[along] = {
                index: plan_reduction(self.mesh, axes, leaf, in_order=self.in_order)
                for index, leaf in enumerate(self.leaves)
                if leaf.trained
            }
        return plans


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


def validate_ties_frozen(
    paths: Sequence[str], numbers: Sequence[int], frozen: Sequence[bool]
) -> None:
    """Raise naming parameters that are frozen under one name and trained under another."""
    names: dict[int, list[str]] = {}
    is_frozen: dict[int, set[bool]] = {}
    for path, number, flag in zip(paths, numbers, frozen, strict=True):
        names.setdefault(number, []).append(titled(path))
        is_frozen.setdefault(number, set()).add(flag)

    half_frozen = [number for number, flags in is_frozen.items() if len(flags) == 2]
    if half_frozen:
        errors = "; ".join(" and ".join(names[number]) for number in half_frozen)
        raise ValueError(
            f"frozen: {errors} are one parameter (tied), and only one name of it is frozen. Freeze all."
        )


# -- one parameter ----------------------------------------


def plan_param(
    path: str,
    x: Sharded,
    gradients: Callable[[Layout], Layout] | None,
    unsharded: Layout | None = None,
) -> ParamPlan:
    """Return the plan of a parameter.

    Args:
        path: of the parameter.
        x: the parameter.
        gradients: maps its layout to its gradient's; None if it is frozen.
        unsharded: the layout in which it is used, sharded along local axes only; default:
            replicated on all devices.
    """
    layout = x.layout
    if unsharded is None:
        unsharded = Layout(x.mesh)
    gradient = layout if gradients is None else gradients(layout)
    if not isinstance(gradient, Layout):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"value_and_grad: {gradients=!r} must return a Layout for {titled(path)}; got {gradient!r}. "
            "Write opt.gradients of a partitioned optimizer, or leave it out."
        )
    if gradient.memory == "disk":
        # A `Reducer` adds gradients on the device or on the host; parameters and state alone are on
        # disk.
        gradient = gradient.with_memory("host")
    return ParamPlan(
        path=path,
        shape=x.shape,
        dtype=x.dtype,
        unit=layout.unit or unit_of(path),
        gather=plan_reshard(layout, unsharded, x.shape),
        trained=gradients is not None,
        gradient=gradient,
        used=unsharded.spec,
        memory=layout.memory,
    )


@lru_cache(maxsize=1024)
def local_plans(leaves: tuple[ParamPlan, ...], device: int) -> Sequence[ParamPlan]:
    """Return the plans of one device: with the shapes of the shards that it uses."""
    plans: list[ParamPlan] = []
    for leaf in leaves:
        block = Layout(leaf.gradient.mesh, leaf.used).block(leaf.shape, device)
        shape = tuple([stop - start for start, stop in block])
        plans.append(leaf._replace(shape=shape))
    return plans


# -- the reduction of its gradient ----------------------------------------


def plan_reduction(
    mesh: Mesh, axes: tuple[str, ...], leaf: ParamPlan, *, in_order: bool
) -> ReshardPlan:
    """Return the plan from summands over `axes`, or shards along those where it is used so, to the layout of a gradient."""
    axes = tuple([axis for axis in axes if axis not in leaf.used.split_axes])
    if in_order:
        return plan_in_order(mesh, axes, leaf.gradient, leaf.shape, leaf.used)
    return plan_reshard(_summands(mesh, axes, leaf.used), leaf.gradient, leaf.shape)


def _summands(mesh: Mesh, axes: tuple[str, ...], used: P) -> Layout:
    """Return the layout of gradients that are to be summed over axes."""
    return Layout(mesh, P(*used.entries, unreduced=axes, at=dict(used.at)))


@lru_cache(maxsize=4096)
def plan_in_order(
    mesh: Mesh, axes: tuple[str, ...], gradient: Layout, shape: tuple[int, ...], used: P = P()
) -> ReshardPlan:
    """Return the plan from summands over `axes`, sharded as in `used`, to a layout; it reduces over the last axis first.

    It is the usual plan, if that does; else axes are reduced one by one, and the gradient is
    scattered with the first.

    >>> from fshard import make_mesh
    >>> mesh = make_mesh({"a": 2, "b": 2})
    >>> for axis in "ab":
    ...     print([(step.kind, *step.axes) for step in plan_in_order(mesh, ("a", "b"), Layout(mesh, P.flat(axis)), (8,)).steps])
    [('psum', 'b'), ('flat_scatter', 'a')]
    [('flat_scatter', 'b'), ('psum', 'a')]
    """
    plan = plan_reshard(_summands(mesh, axes, used), gradient, shape)
    reduced_axes: list[str] = []
    for step in reversed(plan.steps):
        if step.kind in ("psum", "psum_scatter", "flat_scatter"):
            reduced_axes += step.axes
    if reduced_axes == [axis for axis in axes if mesh.shape[axis] > 1]:
        return plan

    layouts = [_summands(mesh, axes[:count], used) for count in range(len(axes), 0, -1)]
    steps: list[Any] = []
    for source, target in pairwise([*layouts, gradient]):
        steps += plan_reshard(source, target, shape).steps
    return ReshardPlan(tuple(steps), shape)
