"""Audit the gradients of a mapped function, when autograd first records a call of its kind.

A program that breaks the types of gradients gets a wrong gradient, which its values need not show:
it adds a replicated bias without `pvary`, or sums a value that is equal already. So the gradient of
that call is computed in two ways beforehand, on random cotangents:

    by types       as in the program, with checks of equality: a broken promise raises and is named
    by devices     every value is varying: results promised equal are followed by `pvary`, and
                   `pvary` itself does nothing; an argument's gradient is summed over the devices
                   that received it. Right for any program

For f(w) = psum(w), with w = P() on 2 devices, and the cotangent 1 of the result:

    by types       the cotangent passes through the psum: dw = 1
    by devices     each device has half of the cotangent, which the psum sums: 1, and the sum of dw
                   over both devices is 2. So the gradient is 0.5 times what it should be

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
"""Of the norm of a gradient.

Types that do not fit make factors of 2 and more; roundings, in 16 bits, make 0.01.
"""


@dataclass(frozen=True)
class Audit(LinearMap):
    """The check of the gradients of one call: an identity on a device's arguments.

    A linear map, so that the arguments reach it as plain tensors, under any transform.

    Args:
        plans: those of the mapped function.
        plan: of the arguments.
        call: runs the function on the shards of some arguments.
        site: the line of the call.
        depth: the number of leading dims that `vmap` added; the first entry is audited.
        done: the devices that have run it; derivatives of the call run it again.
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
        if scope.device in self.done:
            return xs
        self.done.add(scope.device)

        # The program's own run draws the same numbers afterwards, and its bytes alone are counted.
        # Hooks, such as a checkpoint's, must not see what is saved here.
        kind = scope.mesh.device_type
        random = random_state(kind)
        hooks = saved_tensors_hooks(_identity, _identity) if saving_is_watched() else nullcontext()
        with uncounted(), hooks, torch.enable_grad():
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
            typed_grads, typed_results = self._differentiate_by_types(_requiring_grad(xs))

        set_random_state(scope.mesh.device_type, random)
        varying_axes = scope.varying_axes.union(self.plans.mapped)
        varying_scope = scope.replaced(checked=False, varying_axes=varying_axes)
        try:
            with entered(varying_scope):
                varying_grads, varying_results = self._differentiate_by_devices(_requiring_grad(xs))
        except LayoutError:  # it reshards, which relies on types
            return

        # Where the results differ, the two runs are not one program, and nothing is concluded.
        is_equal = all(map(_is_close, typed_results, varying_results))
        row = [float(is_equal)]
        for typed, varying in zip(typed_grads, varying_grads, strict=True):
            row.append(nan if _is_close(typed, varying) else _ratio_of_gradients(typed, varying))

        group = scope.group(self.plans.mapped, "shard_map")
        device = xs[0].device
        verdicts = torch.tensor(row, dtype=torch.float64, device=device)
        table = gather_all(verdicts, group, self.site)
        if table[:, 0].all():
            self._validate_ratios(table[:, 1:])

    def _differentiate_by_types(self, shards: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of the program as it is, and its results."""
        arguments = self._checked(shards, self.plan.entries)
        ys, entries = self._call_program(arguments)
        ys = self._checked(ys, entries)

        gs: list[Tensor] = []
        for index, (y, entry) in enumerate(zip(ys, entries, strict=True)):
            gs.append(_random_cotangent(index, y, entry))
        return _gradients(ys, shards, gs), [y.detach() for y in ys]

    def _differentiate_by_devices(self, shards: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of the program whose values are all varying, and its results."""
        scope = require("shard_map")
        ys, entries = self._call_program(shards)
        gs: list[Tensor] = []
        for index, (y, entry) in enumerate(zip(ys, entries, strict=True)):
            # The devices that have this result each get an equal part of its cotangent.
            replicas = prod([scope.mesh.shape[axis] for axis in self._replicated_axes(entry)])
            gs.append(_random_cotangent(index, y, entry) / replicas)

        sums: list[Tensor] = []
        for g, entry in zip(_gradients(ys, shards, gs), self.plan.entries, strict=True):
            axes = self._replicated_axes(entry)
            if axes:
                psum = Bound(Psum(), scope.group(axes, "shard_map"), self.site)
                sums += psum.run((g,))
            else:
                sums.append(g)
        return sums, [y.detach() for y in ys]

    def _checked(self, xs: Sequence[Tensor], entries: tuple[PlannedTensor, ...]) -> list[Tensor]:
        pairs = zip(xs, entries, strict=True)
        return [entry.checked(x, self.site) for x, entry in pairs]

    def _call_program(
        self, arguments: list[Tensor]
    ) -> tuple[list[Tensor], tuple[PlannedTensor, ...]]:
        mesh = require("shard_map").mesh
        plan, _, leaves = self.plans.of_results(mesh, self.call(tuple(arguments)))
        return [leaves[entry.index] for entry in plan.entries], plan.entries

    def _replicated_axes(self, entry: PlannedTensor) -> tuple[str, ...]:
        """Return the mapped axes along which a shard is promised to be equal."""
        return unnamed(self.plans.mapped, entry.layout.spec)

    def _validate_ratios(self, ratios: Tensor) -> None:
        """Raise if a gradient is not what it should be on some device. (devices, arguments)

        `ratios` has how many times it is that, or nan where it is right.
        """
        errors: list[str] = []
        for entry, column in zip(self.plan.entries, ratios.T, strict=True):
            wrong = column[~column.isnan()].tolist()
            if wrong:
                axes = as_written(self._replicated_axes(entry) or self.plans.mapped)
                errors.append(
                    f"that of argument {entry.path}, equal along {axes}, is {wrong[0]:.3g} times "
                    "what it should be"
                )
        if errors:
            raise PromiseError(
                f"shard_map of {self.plans.name}, at {self.site}: its types do not fit, so its "
                f"gradient would be wrong: {'; '.join(errors)}.\nA collective that adds up, "
                "gathers or exchanges what devices have of their own was given a value that is "
                "equal on all of them. If that is meant, put fs.pvary(x, axis) around the value "
                "there; else leave the collective out. If a result is equal by construction, such "
                "as that of a ring of ppermutes, declare it with fs.replicated(x, axis)."
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
    dtype = torch.complex128 if y.is_complex() else torch.float64
    full = torch.randn(entry.shape, generator=generator, dtype=dtype)
    return shard_of(full, entry.layout, device).to(y.device, y.dtype)


def _gradients(ys: Sequence[Tensor], xs: Sequence[Tensor], gs: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients with regard to all xs; zeros for those that have none."""
    differentiated = [x for x in xs if x.requires_grad]
    grads = iter(backward(tuple(ys), differentiated, tuple(gs)))
    return [next(grads) if x.requires_grad else torch.zeros_like(x) for x in xs]


def _ratio_of_gradients(x: Tensor, y: Tensor) -> float:
    """Return the factor by which x is y, in least squares."""
    x = x.flatten()
    y = y.flatten()
    return float(torch.vdot(y, x).real / torch.vdot(y, y).real.clamp(min=1e-30))


def _is_close(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors differ at most by rounding; non-finite elements are ignored."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x = x.detach().to(dtype)
    y = y.detach().to(dtype)
    if not (x.isfinite().all() and y.isfinite().all()):
        return True
    return bool((x - y).norm() <= TOLERANCE * torch.maximum(x.norm(), y.norm()))
