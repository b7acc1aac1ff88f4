"""Audit the gradients of a mapped function, at the first call of each signature that autograd records.

A program that breaks the types of gradients (it adds a replicated bias without `pvary`, or sums a value that is equal
already) gets a wrong gradient, which its values need not show. So the gradient of that call is computed in two ways
beforehand, on random cotangents:

    by types       as in the program, with checks of equality: a broken promise raises and is named
    by devices     every value is varying: results promised equal are followed by `pvary`, and `pvary` itself does nothing;
                   an argument's gradient is summed over the devices that received it. Right for any program

Every device runs both. Their verdicts are gathered, so that all raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import nan, prod

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fshard.errors import LayoutError, PromiseError
from fshard.mesh.collectives.autograd import Bound, LinearMap, Tensors
from fshard.mesh.collectives.ledger import uncounted
from fshard.mesh.collectives.moves import Psum
from fshard.mesh.layout import PyTree, as_written
from fshard.mesh.reshard.device_put import shard_of
from fshard.mesh.runtimes.thread_state import random_state, set_random_state
from fshard.mesh.spmd.call_plan import ArgumentPlan, CallPlans, PlannedTensor, unnamed
from fshard.mesh.spmd.check_equal import gather_all
from fshard.mesh.spmd.outer_autograd import backward, saving_is_watched
from fshard.mesh.spmd.scope import entered, require
from fshard.source import Site

TOLERANCE = 0.05
"""Of the norm of a gradient.  Types that do not fit make factors of 2 and more; roundings, in 16 bits, make 0.01."""


@dataclass(frozen=True)
class Audit(LinearMap):
    """The check of one call's gradients: an identity on a device's arguments, which reach it as plain tensors.

    `call` runs the function on some arguments' shards. `depth`: number of leading dims that `vmap` added; the first
    entry is audited. `done`: devices that have run it; derivatives of the call run it again.
    """

    plans: CallPlans
    plan: ArgumentPlan
    call: Callable[[Tensors], PyTree]
    site: Site
    depth: int = 0
    done: set[int] = field(default_factory=set[int])

    def run(self, xs: Tensors) -> Tensors:
        """Raise on all devices if the gradient with regard to some argument is wrong."""
        scope = require("shard_map")
        if scope.device not in self.done:
            self.done.add(scope.device)
            kind = scope.mesh.device_type
            random = random_state(kind)
            unwatched = (
                saved_tensors_hooks(_identity, _identity) if saving_is_watched() else nullcontext()
            )
            with uncounted(), unwatched, torch.enable_grad():
                self._compare_gradients(tuple([x[(0,) * self.depth] for x in xs]), random)
            set_random_state(kind, random)
        return xs

    def transposed(self) -> Audit:
        return self

    def batched(self) -> Audit:
        return replace(self, depth=self.depth + 1)

    def _compare_gradients(self, xs: Tensors, random: Tensor) -> None:
        scope = require("shard_map")
        with entered(scope.replaced(checked=True)):
            typed, results = self._differentiate_by_types(_requiring_grad(xs))
        set_random_state(scope.mesh.device_type, random)
        try:
            with entered(
                scope.replaced(
                    checked=False, varying_axes=scope.varying_axes.union(self.plans.mapped)
                )
            ):
                varying_grads, varying_results = self._differentiate_by_devices(_requiring_grad(xs))
        except LayoutError:  # it reshards, which relies on types
            return
        is_equal = all(map(_is_close, results, varying_results))
        row = [
            float(is_equal),
            *(
                nan if _is_close(x, y) else _ratio_of_gradients(x, y)
                for x, y in zip(typed, varying_grads, strict=True)
            ),
        ]
        group = scope.group(self.plans.mapped, "shard_map")
        table = gather_all(
            torch.tensor(row, dtype=torch.float64, device=xs[0].device), group, self.site
        )
        if table[:, 0].all():
            self._validate_ratios(table[:, 1:])

    def _differentiate_by_types(self, shards: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of the program as it is, and its results."""
        arguments = [
            entry.checked(x, self.site) for x, entry in zip(shards, self.plan.entries, strict=True)
        ]
        ys, entries = self._call_program(arguments)
        ys = [entry.checked(y, self.site) for y, entry in zip(ys, entries, strict=True)]
        gs = [
            _random_cotangent(index, y, entry)
            for index, (y, entry) in enumerate(zip(ys, entries, strict=True))
        ]
        return _gradients(ys, shards, gs), [y.detach() for y in ys]

    def _differentiate_by_devices(self, shards: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of the program whose values are all varying, and its results."""
        scope = require("shard_map")
        ys, entries = self._call_program(shards)
        gs = [
            _random_cotangent(index, y, entry)
            / prod(scope.mesh.shape[axis] for axis in self._replicated_axes(entry))
            for index, (y, entry) in enumerate(zip(ys, entries, strict=True))
        ]
        sums = list[Tensor]()
        for g, entry in zip(_gradients(ys, shards, gs), self.plan.entries, strict=True):
            axes = self._replicated_axes(entry)
            sums += (
                Bound(Psum(), scope.group(axes, "shard_map"), self.site).run((g,)) if axes else (g,)
            )
        return sums, [y.detach() for y in ys]

    def _call_program(
        self, arguments: list[Tensor]
    ) -> tuple[list[Tensor], tuple[PlannedTensor, ...]]:
        plan, _, leaves = self.plans.of_results(
            require("shard_map").mesh, self.call(tuple(arguments))
        )
        return [leaves[entry.index] for entry in plan.entries], plan.entries

    def _replicated_axes(self, entry: PlannedTensor) -> tuple[str, ...]:
        """Return the mapped axes along which a shard is promised to be equal."""
        return unnamed(self.plans.mapped, entry.layout.spec)

    def _validate_ratios(self, ratios: Tensor) -> None:
        """Raise if a gradient is not what it should be on some device: its ratio to that is not nan. (devices, arguments)"""
        errors: list[str] = []
        for entry, column in zip(self.plan.entries, ratios.T, strict=True):
            for ratio in column[~column.isnan()][:1].tolist():
                axes = as_written(self._replicated_axes(entry) or self.plans.mapped)
                errors.append(
                    f"that of argument {entry.path}, equal along {axes}, is {ratio:.3g} times what it should be"
                )
        if errors:
            raise PromiseError(
                f"shard_map of {self.plans.name}, at {self.site}: its types do not fit, so its gradient would be wrong: "
                f"{'; '.join(errors)}.\nA collective that adds up, gathers or exchanges what devices have of their own was "
                "given a value that is equal on all of them. If that is meant, put fs.pvary(x, axis) around the value "
                "there; else leave the collective out. If a result is equal by construction, such as that of a ring of "
                "ppermutes, declare it with fs.replicated(x, axis)."
            )


def _requiring_grad(xs: Tensors) -> list[Tensor]:
    """Return the same arguments, to be differentiated."""
    return [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in xs]


def _identity(x: Tensor) -> Tensor:
    return x


def _random_cotangent(index: int, y: Tensor, entry: PlannedTensor) -> Tensor:
    """Return the device's shard of a random array, which is the same on all."""
    scope = require("shard_map")
    device = entry.layout.mesh.local_index(scope.device)
    generator = torch.Generator().manual_seed(index)
    full = torch.randn(
        entry.shape,
        generator=generator,
        dtype=torch.complex128 if y.is_complex() else torch.float64,
    )
    return shard_of(full, entry.layout, device).to(y.device, y.dtype)


def _gradients(ys: Sequence[Tensor], xs: Sequence[Tensor], gs: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients with regard to all xs; zeros for those that have none."""
    grads = iter(backward(tuple(ys), [x for x in xs if x.requires_grad], tuple(gs)))
    return [next(grads) if x.requires_grad else torch.zeros_like(x) for x in xs]


def _ratio_of_gradients(x: Tensor, y: Tensor) -> float:
    """Return the factor by which x is y, in least squares."""
    x, y = x.flatten(), y.flatten()
    return float(torch.vdot(y, x).real / torch.vdot(y, y).real.clamp(min=1e-30))


def _is_close(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors differ at most by rounding; non-finite elements are ignored."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, y = x.detach().to(dtype), y.detach().to(dtype)
    if not (x.isfinite().all() and y.isfinite().all()):
        return True
    return bool((x - y).norm() <= TOLERANCE * torch.maximum(x.norm(), y.norm()))
