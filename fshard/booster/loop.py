"""A gradient with separate forward and backward, as torch's loops are written.

    output = model(x)              forward     of this device's part of the batch; parameters are unsharded as they are used
    loss = criterion(output, y)                the caller's own
    model.backward(loss)           backward    gradients are reduced as they are ready; or kept: sync=False
    grads = model.gradients()                  of all backwards since the last call, in their layouts

It uses `value_and_grad`'s device: the loss is a mean over the samples of this device, the gradient that of the mean
over all devices, weighted by samples. The caller is one device: a process, or inside of `fs.run`.

In reproducible mode the device's part is split into slices that the module runs in sequence. The criterion gets their
outputs joined and detached; its cotangents are split, and each slice has its own backward. So the bits of gradients
are equal on any mesh, if a sample's loss depends on that sample alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from fshard.booster.announced import Announced, Counted
from fshard.booster.join_slices import CotangentSplit, refuse_unsliced, side_by_side
from fshard.errors import LayoutError, ModuleError, ScopeError
from fshard.mesh.layout import Layout, Mesh, PyTree, flatten, flatten_outside, flatten_with_paths, unflatten
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.reshard.device_put import unshard
from fshard.mesh.spmd.run import is_outside, one_thread, resolve_mesh, run_on_devices
from fshard.mesh.spmd.scope import owning
from fshard.optim.scaling import finite_scale
from fshard.source import call_site
from fshard.transforms.batch import Batch
from fshard.transforms.device_step import DeviceStep
from fshard.transforms.fsdp.lazy_param import unsharded
from fshard.transforms.fsdp.param_runtime import ParamPlans, ParamRuntime, numbered
from fshard.transforms.fsdp.units import Unit
from fshard.transforms.gradient import same_layouts, unstaged
from fshard.transforms.graph_checks import (
    refuse_attached,
    refuse_backward,
    refuse_other_parameters,
    refuse_unreached,
)
from fshard.transforms.means import LossSums
from fshard.transforms.module.buffers import Buffers, Written
from fshard.transforms.module.functionalize import Apply
from fshard.transforms.origin import refuse_distant, refuse_unplaced
from fshard.transforms.reproducible.randomness import drawn_key, keyed_random
from fshard.transforms.reproducible.summation_tree import TreeAccumulator


@dataclass
class LoopDraws:
    """The keys of a loop's random draws: the first forward of a step draws as a functional step does.

    `steps` are the optimizer's steps, `_forwards` those since the last of them, `_others` those without gradients.
    """

    seed: int
    steps: int = 0
    _forwards: int = 0
    _others: int = 0

    def next(self, *, grad: bool) -> AbstractContextManager[None]:
        """Return the context of the next forward's draws."""
        if not grad:
            self._others += 1
            return keyed_random(self.seed, self.steps, "look", self._others)
        self._forwards += 1
        return keyed_random(self.seed, self.steps, self._forwards - 1)

    def end_step(self) -> None:
        """Count a step."""
        self.steps, self._forwards = self.steps + 1, 0


@dataclass
class _OpenStep:
    """A step in progress: its parameters, its last forward, and the results of its backwards.

    Args:
        tape: the parameters of this device.
        known: their plans.
        tree: returns lazy parameters as the module's parameters.
        unflatten: returns gradients as the same tree.
        device: agrees and reduces with the others.
        counted: the weight of the batch of the last forward.
        slices: the samples of each slice of the last forward; None outside of reproducible mode.
        buffers: of each slice.
        joined: outputs passed to a criterion, each with the function that splits its cotangent.
        is_forward: a forward waits for its backward.
        has_unreduced: gradients of a backward without `sync` are left to reduce.
        used: number of devices that used each parameter, once agreed.
        loss: the last one.
    """

    runtime: ParamRuntime
    plans: ParamPlans
    tree: Callable[[], PyTree]
    unflatten: Callable[[Sequence[Any]], PyTree]
    device: DeviceStep | None = None
    counted: Counted | None = None
    slices: list[int] | None = None
    buffers: list[PyTree] = field(default_factory=list[PyTree])
    joined: list[tuple[Tensor, CotangentSplit]] = field(default_factory=list[tuple[Tensor, CotangentSplit]])
    is_forward: bool = False
    has_unreduced: bool = False
    used: list[float] = field(default_factory=list[float])
    share: float = 1.0
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))


class ImperativeGradient:
    """A module's function and its parameters, called and differentiated by the caller: see above.

    Args:
        apply: of (params, buffers, *args, **kwargs), as `functionalize` returns it.
        params: in their layouts; replaced after a step.
        buffers: replicated.
        mesh: the devices.
        axes: those that shard the batch.
        seed: of random draws; the same on all devices.
        options: those of `value_and_grad` that are not about the batch.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 2})
    >>> def main():
    ...     apply, params, buffers = fs.functionalize(torch.nn.Linear(1, 1, bias=False))
    ...     params = fs.shard_params({"weight": torch.ones(1, 1)}, fs.fsdp("data"), mesh=mesh)
    ...     model = ImperativeGradient(apply, params, buffers, mesh=mesh, axes=("data",))
    ...     loss = model(torch.full((2, 1), float(fs.axis_index("data")))).mean()
    ...     model.backward(loss)
    ...     return loss.item(), fs.unshard(model.gradients())["weight"].item()
    >>> fs.run(main, mesh=mesh)
    [(0.0, 0.5), (1.0, 0.5)]
    """

    def __init__(
        self,
        apply: Apply,
        params: PyTree,
        buffers: PyTree,
        *,
        mesh: Mesh,
        axes: tuple[str, ...],
        seed: int = 0,
        **options: Any,
    ) -> None:
        refuse_outside(mesh)
        self.apply, self.params, self.mesh, self.axes = apply, params, mesh, axes
        self.draws = LoopDraws(seed)
        self.gradient_layout: Callable[[Layout], Layout] = options.get("gradients") or same_layouts
        self._agreed = Buffers(buffers, resolve_mesh(mesh))  # as they were on all devices after the last step
        self._buffers = self._agreed.part(0)  # as the last forward has left them
        self._announced = Announced(mesh, axes)
        self._gradient = unstaged(apply, mesh=mesh, batch=None, has_buffers=True, **options)
        self._open: _OpenStep | None = None

    @property
    def is_reproducible(self) -> bool:
        """True if a batch is split into slices."""
        return self._gradient.how.slices is not None

    def full(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return unsharded parameters and buffers by name; a collective of all devices."""
        changed = self._agreed.changed(0, self._buffers, torch.device("cpu"))
        return unshard(self.params), unshard(self._agreed.after([changed]))

    def announce(self, total: int | None, part: PyTree) -> None:
        """Record the number of samples on all devices of the next batch."""
        self._announced.announce(total, part)

    # -- forward ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this device's part of the batch."""
        return self._on_device(lambda device: self._forward(device, args, kwargs))

    def _on_device(self, body: Callable[[int], Any]) -> Any:
        with one_thread(self.is_reproducible):
            (result,) = run_on_devices(resolve_mesh(self.mesh), body, mapped=self.mesh.axis_names)
        return result

    def _forward(self, device: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grad, how = torch.is_grad_enabled(), self._gradient.how
        now = self._open if self._open is not None and grad else self._opened()
        if not now.is_forward:
            now.runtime.begin()
        sliced = how.slices is not None and (grad or bool(self._open and self._open.buffers))
        batch, now.counted = self._batch(device, args, kwargs, sliced=sliced)
        with self.draws.next(grad=grad):
            key = drawn_key()
        now.device = DeviceStep(how, now.runtime, now.tree, self._agreed, batch, 0, key, 1.0)
        run = self._forward_slices if sliced else self._forward_once
        try:
            output = run(now, grad=grad)
        except BaseException:
            if now is not self._open:  # no later call uses it
                now.runtime.leave()
            raise
        if not grad:
            now.runtime.end()
            now.runtime.close()
        else:
            self._open, now.is_forward = now, True
        return output

    def _forward_once(self, now: _OpenStep, *, grad: bool) -> Any:
        assert now.device is not None
        output, self._buffers = self._one(now, [x for (x,) in now.device.batch.columns], self._buffers, 0, grad=grad)
        now.slices = None
        return output

    def _forward_slices(self, now: _OpenStep, *, grad: bool) -> Any:
        """Run each slice alone, and join the outputs as if the module had been called once."""
        assert now.device is not None
        device, count = now.device, now.device.turns
        slices = device.batch.slices(0, count, apart=True)
        given = now.buffers if len(now.buffers) == count else [self._buffers] * count
        first = 0 if device.group is None else device.group.index * count
        parts = [
            self._one(now, slice.leaves, given[turn], first + turn, grad=grad) for turn, slice in enumerate(slices)
        ]
        now.slices, now.buffers = [slice.rows for slice in slices], [buffers for _, buffers in parts]
        found, structure = side_by_side([output for output, _ in parts], now.slices)
        recorded = [(x, split) for x, split in found if isinstance(x, Tensor) and x.requires_grad]
        for x, _ in recorded:
            x.register_post_accumulate_grad_hook(lambda _: refuse_backward())
        now.joined += recorded
        ends = {id(x) for x, _ in recorded}
        return tree_unflatten([x.view_as(x) if id(x) in ends else x for x, _ in found], structure)

    def _one(
        self, now: _OpenStep, leaves: list[Any], buffers: PyTree, number: int, *, grad: bool
    ) -> tuple[Any, PyTree]:
        """Run the module once; return its output, and the buffers after it."""
        assert now.device is not None
        device, runtime = now.device, now.runtime
        args, kwargs = device.batch.tree(leaves, self._gradient.how.unit_options.compute)
        with keyed_random(device.key, 0, number), owning(device.batch.mesh.axis_names, device.collectives.notice):
            if grad:
                with runtime.saved.watch():
                    output, after = self.apply(now.tree(), buffers, *args, **kwargs)
            else:
                output, after = self.apply(now.tree(), buffers, *args, **kwargs)
        if grad and runtime.fresh:
            refuse_unreached(output)
        return unsharded(output), after

    def _batch(
        self, device: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, sliced: bool
    ) -> tuple[Batch, Counted]:
        """Return this device's part of a batch, and its weight."""
        mesh = resolve_mesh(self.mesh)
        _, leaves, structure = flatten_with_paths((args, kwargs), none_is_leaf=True)
        lengths = [x.shape[0] if isinstance(x, Tensor) and x.ndim else None for x in leaves]
        paths, outside, _ = flatten_outside((args, kwargs))
        counted = self._announced.counted(outside, device)
        if sliced:
            refuse_unsliced(paths, outside, leaves, counted)
        cuts = [counted.cut if length is not None and length == counted.rows else None for length in lengths]
        return Batch(mesh, (device,), [(x,) for x in leaves], cuts, structure, self.axes, ()), counted

    def _opened(self) -> _OpenStep:
        """Begin a step: make the parameters available."""
        mesh, gradient = resolve_mesh(self.mesh), self._gradient
        refuse_distant(mesh, "the model", params=self.params)
        leaves, structure = flatten(self.params, sharded_is_leaf=True)
        refuse_unplaced(leaves, structure, mesh, "the model")
        own, at = numbered(leaves)
        plans = gradient.plans_of(structure, leaves, at, mesh, self.axes)
        shards = [leaves[place].shards[0] for place in own]
        runtime = gradient.runtime(plans, shards, call_site())
        return _OpenStep(
            runtime,
            plans,
            lambda: unflatten(structure, [runtime.lazy_params[place] for place in at]),
            lambda found: unflatten(structure, [found[place] for place in at]),
        )

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, scale: float = 1.0, sync: bool = True) -> None:
        """Add the gradient of `scale` times the loss; without `sync` it is not reduced yet.

        A mean over this device's samples is weighted by the number of samples of the last forward. In reproducible
        mode, and where gradients are reduced each time, `sync` makes no difference.
        """
        now = self._open
        if now is None or now.counted is None:
            raise ModuleError("backward: the model must be called after the last step or zero_grad. Call it first.")
        if loss.numel() != 1 or not loss.requires_grad:
            found = "that does not depend on the model" if loss.numel() == 1 else f"of shape {tuple(loss.shape)}"
            raise LayoutError(f"backward: the loss must be one number that the model's output led to; got one {found}.")
        if now.runtime.fresh:
            refuse_other_parameters(loss)
        self._on_device(lambda device: self._backward(now, loss, scale, sync))

    def _backward(self, now: _OpenStep, loss: Tensor, scale: float, sync: bool) -> None:
        device = now.device
        assert device is not None and now.counted is not None
        now.runtime.check_unchanged()
        device.scale, device.scaled = scale, finite_scale(loss.dtype, scale)
        now.share, now.is_forward = self._announced.share(now.counted), False
        device.agree_on_axes(loss.device)
        start = torch.full_like(loss, now.share * device.scaled)
        keep = Unit.accumulate if not sync and device.how.once and not self.is_reproducible else None
        if self.is_reproducible:
            self._back_through_slices(now, loss, start)
        else:
            now.runtime.begin_backward(device.everyone, device.collectives.along, keep, idle=not now.share)
            with now.runtime.reductions.collecting():
                torch.autograd.grad(loss, [now.runtime.anchor], start, allow_unused=True)
            if keep is None:
                now.runtime.reductions.end()
        now.has_unreduced, now.loss = keep is not None, loss.detach()
        if not now.has_unreduced:
            self._agree(now, device)

    def _back_through_slices(self, now: _OpenStep, loss: Tensor, start: Tensor) -> None:
        """Go back through each slice alone, and add gradients in the tree of `TreeAccumulator`."""
        device, runtime = now.device, now.runtime
        assert device is not None and now.slices is not None
        trees = TreeAccumulator(runtime.units, runtime.reductions.as_reduced)
        runtime.begin_backward(device.everyone, device.collectives.along, trees.add, idle=not now.share)
        joined = now.joined
        refuse_attached(loss, [x for x, _ in joined])
        given = torch.autograd.grad(loss, [x for x, _ in joined], start, allow_unused=True) if joined else ()
        now.joined = [
            pair for pair, g in zip(joined, given, strict=True) if g is None
        ]  # another loss may be made of these
        if all(g is None for g in given):
            raise LayoutError("backward: the loss must depend on what this model has returned; got another model's.")
        for turn in range(len(now.slices)):
            pairs = [split(turn, g) for (_, split), g in zip(joined, given, strict=True) if g is not None]
            outputs, cotangents = [x for x, _ in pairs], [g for _, g in pairs]
            with runtime.reductions.collecting():
                torch.autograd.grad(outputs, [runtime.anchor], cotangents, allow_unused=True)
            trees.end_slice(1.0)
        for unit in runtime.units:
            unit.accumulated = trees.result(unit)
        runtime.reductions.end()

    def _agree(self, now: _OpenStep, device: DeviceStep) -> None:
        """Reduce the remaining gradients, and average buffers."""
        weights = [now.share] if now.slices is None else [row * bool(now.share) for row in now.slices]
        trees = now.buffers or [self._buffers] * len(weights)
        near = now.loss.device
        written = [
            Written(weight, self._agreed.changed(0, tree, near)) for weight, tree in zip(weights, trees, strict=True)
        ]
        found = [LossSums(now.loss, weight, [], []) for weight in weights]
        _, now.used, changed = device.together(found, written)
        if now.runtime.fresh and now.slices is not None and len(now.slices) > 1:
            now.runtime.warn_of_attributes()
        self._agreed = Buffers(self._agreed.after([changed]), resolve_mesh(self.mesh))
        self._buffers, now.buffers = self._agreed.part(0), []

    def gradients(self) -> PyTree:
        """Return the gradients of all backwards since the last time; None where no device has used a parameter."""
        now = self._open
        if now is None or now.device is None or not (now.used or now.has_unreduced):
            raise ModuleError(
                "there are no gradients. Call the model, then booster.backward(loss, optimizer): loss.backward() does not "
                "reduce over devices."
            )
        found = self._on_device(lambda device: self._reduced(now, now.device))
        self.draws.end_step()
        return found

    def _reduced(self, now: _OpenStep, device: DeviceStep | None) -> PyTree:
        assert device is not None
        runtime = now.runtime
        if now.has_unreduced:
            runtime.begin_backward(device.everyone, device.collectives.along, None, idle=False)
            runtime.reductions.end()
            self._agree(now, device)
        runtime.check_unchanged()
        runtime.end()
        grads = [
            None if g is None else Sharded(leaf.shape, leaf.gradient, (g,))
            for leaf, g in zip(now.plans.leaves, device.gradients(now.used), strict=True)
        ]
        now.plans.order = runtime.order
        tree = now.unflatten(grads)
        self._close()
        return tree

    def drop(self) -> None:
        """Drop all gradients since the last step; a forward without its backward stays, as in torch."""
        if self._open is None or not self._open.is_forward:
            self._close()
        else:
            self._open.runtime.reductions.drop()
            self._open.used, self._open.has_unreduced = [], False

    def _close(self) -> None:
        """Drop all gradients and forwards since the last step."""
        if self._open is not None:
            now, self._open = self._open, None
            self._on_device(lambda device: now.runtime.stop())


def refuse_outside(mesh: Mesh) -> None:
    """Raise unless the caller is one device of a mesh."""
    if is_outside(mesh):
        raise ScopeError(
            f"a loop must run as one device of {mesh}. Call it inside of fs.run(main, mesh=mesh), or under torchrun."
        )
