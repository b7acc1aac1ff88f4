"""Audit the gradient of a mapped function (`check=True`, virtual meshes).

A program that breaks the types of gradients (it adds a replicated bias without `pvary`, or sums a value that is equal
already) gets a wrong gradient, which its values need not show. So the first backward of each kind of call is computed
in two ways, on random cotangents:

    by types       as in the program, with checks of equality: a broken promise raises and is named
    by devices     every value is varying: results promised equal are followed by `pvary`, and `pvary` itself does nothing;
                   an argument's gradient is summed over the devices that received it. Right for any program
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from fshard.errors import LayoutError, PromiseError
from fshard.mesh.collectives.autograd import Bound, Tensors, transformed
from fshard.mesh.collectives.ledger import uncounted
from fshard.mesh.collectives.moves import Psum
from fshard.mesh.layout import PyTree, as_written
from fshard.mesh.reshard.device_put import shard_of
from fshard.mesh.runtimes.thread_state import batches_nested
from fshard.mesh.spmd.call_plan import ArgumentRecipe, PlannedTensor, Recipes, unnamed
from fshard.mesh.spmd.outer_autograd import MappedRun, backward
from fshard.mesh.spmd.scope import owning, require
from fshard.source import Site

TOLERANCE = 0.05
"""Of the norm of a gradient.  Types that do not fit make factors of 2 and more; roundings, in 16 bits, make 0.01."""


@dataclass(frozen=True)
class Audit:
    """The check of one call's gradients; `call` runs the function on some arguments' shards."""

    recipes: Recipes
    recipe: ArgumentRecipe
    call: Callable[[Tensors], PyTree]
    site: Site

    def __call__(self, run: MappedRun, inputs: list[Tensors]) -> None:
        """Raise if the gradient with regard to some argument, given to the devices as `inputs`, is wrong."""
        known = self.recipes.audited
        if transformed() or batches_nested() or id(self.recipe) in known:
            return
        known.add(id(self.recipe))
        again = replace(run, derived=True, audit=None)
        with uncounted():
            typed = again.devices(inputs, self._by_types)
            try:
                own = replace(again, checked=False).devices(inputs, self._by_devices)
            except LayoutError:  # it reshards, which relies on types
                return
        width = len(self.recipe.entries)
        if all(
            _close(x, y) for xs, ys in zip(typed, own, strict=True) for x, y in zip(xs[width:], ys[width:], strict=True)
        ):
            self._compare(run, [xs[:width] for xs in typed], [xs[:width] for xs in own])

    def _by_types(self, device: int, xs: Tensors) -> Tensors:
        entries, shards = self.recipe.entries, _leaves(xs)
        with torch.enable_grad():
            own = [entry.checked(x, self.site) for x, entry in zip(shards, entries, strict=True)]
            recipe, _, leaves = self.recipes.of_results(require("shard_map").mesh, self.call(tuple(own)))
            ys = [entry.checked(leaves[entry.index], self.site) for entry in recipe.entries]
            gs = [
                _cotangent(place, y, entry, device)
                for place, (y, entry) in enumerate(zip(ys, recipe.entries, strict=True))
            ]
            return *_gradients(ys, shards, gs), *(y.detach() for y in ys)

    def _by_devices(self, device: int, xs: Tensors) -> Tensors:
        scope, shards = require("shard_map"), _leaves(xs)
        with torch.enable_grad(), owning(self.recipes.mapped):
            recipe, _, leaves = self.recipes.of_results(scope.mesh, self.call(tuple(shards)))
            ys = [leaves[entry.index] for entry in recipe.entries]
            gs = [
                _cotangent(place, y, entry, device) / prod(scope.mesh.shape[axis] for axis in self._alike(entry))
                for place, (y, entry) in enumerate(zip(ys, recipe.entries, strict=True))
            ]
            found = _gradients(ys, shards, gs)
        sums = list[Tensor]()
        for g, entry in zip(found, self.recipe.entries, strict=True):
            over = self._alike(entry)
            sums += Bound(Psum(), scope.group(over, "shard_map"), self.site).run((g,)) if over else (g,)
        return *sums, *(y.detach() for y in ys)

    def _alike(self, entry: PlannedTensor) -> tuple[str, ...]:
        """Return the mapped axes along which a shard is promised to be equal."""
        return unnamed(self.recipes.mapped, entry.layout.spec)

    def _compare(self, run: MappedRun, typed: Sequence[Tensors], own: Sequence[Tensors]) -> None:
        wrong: list[str] = []
        for place, entry in enumerate(self.recipe.entries):
            off = [
                device
                for device, (xs, ys) in enumerate(zip(typed, own, strict=True))
                if not _close(xs[place], ys[place])
            ]
            if off:
                x, y = typed[off[0]][place].flatten(), own[off[0]][place].flatten()
                times = float(torch.vdot(y, x).real / torch.vdot(y, y).real.clamp(min=1e-30))
                axes = as_written(self._alike(entry) or self.recipes.mapped)
                wrong.append(
                    f"that of argument {entry.path}, equal along {axes}, is {times:.3g} times what it should be"
                )
        if wrong:
            raise PromiseError(
                f"shard_map of {self.recipes.name}, at {self.site}: its types do not fit, so its gradient would be wrong: "
                f"{'; '.join(wrong)}.\nA collective that adds up, gathers or exchanges what devices have of their own was "
                "given a value that is equal on all of them. If that is meant, put fs.pvary(x, axis) around the value "
                "there; else leave the collective out. If a result is equal by construction, such as that of a ring of "
                "ppermutes, declare it with fs.replicated(x, axis)."
            )


def _leaves(xs: Tensors) -> list[Tensor]:
    """Return the same arguments, to be differentiated."""
    return [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in xs]


def _cotangent(index: int, y: Tensor, entry: PlannedTensor, device: int) -> Tensor:
    """Return the device's shard of a random array, which is the same on all."""
    generator = torch.Generator().manual_seed(index)
    full = torch.randn(entry.shape, generator=generator, dtype=torch.complex128 if y.is_complex() else torch.float64)
    return shard_of(full, entry.layout, device).to(y.device, y.dtype)


def _gradients(ys: Sequence[Tensor], xs: Sequence[Tensor], gs: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients with regard to all xs; zeros for those that have none."""
    found = iter(backward(tuple(ys), [x for x in xs if x.requires_grad], tuple(gs)))
    return [next(found) if x.requires_grad else torch.zeros_like(x) for x in xs]


def _close(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors differ at most by rounding; non-finite elements are ignored."""
    x, y = (one.detach().to(torch.complex128 if one.is_complex() else torch.float64) for one in (x, y))
    if not (x.isfinite().all() and y.isfinite().all()):
        return True
    return bool((x - y).norm() <= TOLERANCE * torch.maximum(x.norm(), y.norm()))
