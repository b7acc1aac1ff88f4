"""A gradient whose forward and backward the caller takes himself, as torch's loops are written.

    output = model(x)              forward     of this device's part of the batch, parameters gathered as they are used
    loss = criterion(output, y)                the caller's own, as often and as complicated as he likes
    model.backward(loss)           backward    gradients reduced as they are ready; or kept: sync=False
    grads = model.gradients()                  of all backwards since the last time, as their layouts say

All else is as in `value_and_grad`, of which these are the parts: the loss is a mean over the samples that this device has,
the gradient that of the mean over all devices, weighted by samples.  The caller is one device: a process, or inside of
`fs.run` on a virtual mesh.

In reproducible mode the device's part is cut into slices that the module takes one after the other.  The criterion gets
their outputs together, cut off from the graph: what it makes of them comes back to each slice, so the bits of gradients are
the same on any mesh, as long as a sample's loss depends on that sample alone and devices have as many samples each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from fshard.errors import LayoutError, ModuleError
from fshard.mesh.mesh import Mesh
from fshard.mesh.placing import unshard
from fshard.mesh.scope import owning
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.spmd import everywhere, standing
from fshard.mesh.threads import one_thread
from fshard.mesh.tree import PyTree, flatten_outside, flatten_with_paths, unflatten
from fshard.optim.leaves import firsts_of
from fshard.optim.scaling import held_by
from fshard.source import call_site
from fshard.transforms.alterations import Altered
from fshard.transforms.announced import Announced, Counted
from fshard.transforms.batch import Batch, Slice
from fshard.transforms.buffers import Buffers
from fshard.transforms.cut_off import cut_off
from fshard.transforms.forest import Forest
from fshard.transforms.gradient import as_they_lie, unstaged
from fshard.transforms.handle import wholes
from fshard.transforms.kept import Slot, kept_of, without
from fshard.transforms.known import Known
from fshard.transforms.learner import Learner
from fshard.transforms.means import Found
from fshard.transforms.nearby import refuse_distant, refuse_unplaced
from fshard.transforms.origin import after_a_step
from fshard.transforms.randomness import drawn_key, keyed_random
from fshard.transforms.reached import Calls, look_beside, marked, reached, refuse_backward, refuse_unreached
from fshard.transforms.remembered import Written, warn_of_samples
from fshard.transforms.side_by_side import Pieces, side_by_side
from fshard.transforms.slices import Device
from fshard.transforms.tape import Tape
from fshard.transforms.unsliced import refuse_unsliced

Apply = Callable[..., tuple[Any, PyTree]]
"""Of (params, buffers, *args, **kwargs): the output and the new buffers."""


@dataclass
class _Open:
    """The parameters of a step that has begun, and its forwards.

    `remembered` is what each slice has made of the buffers, of so many `rows`; `joined` are the outputs of all forwards that
    somebody still holds, or something made of them does.
    """

    tape: Tape
    known: Known
    tree: Callable[[], PyTree]
    unflatten: Callable[[Sequence[Any]], PyTree]
    device: Device | None = None
    calls: Calls = field(default_factory=Calls)
    marks: list[Any] = field(default_factory=list[Any])
    share: float = 1.0
    remembered: list[PyTree] = field(default_factory=list[PyTree])
    joined: list[tuple[ref[Tensor], Pieces]] = field(default_factory=list[tuple[ref[Tensor], Pieces]])
    used: list[float] = field(default_factory=list[float])
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    rows: list[float] = field(default_factory=lambda: [1.0])
    samples: list[int | None] = field(default_factory=lambda: [None])
    begun: bool = False
    spent: bool = True
    kept: bool = False


class ByHand(Learner):
    """A module's function and its parameters, called and differentiated by the caller: see above.

    Args:
        apply: of (params, buffers, *args, **kwargs), as `functionalize` returns it.
        params: how they lie on the mesh; set anew after a step.
        buffers: whole on all devices.
        mesh: the devices.
        axes: along which the batch is cut.
        seed: of random draws; the same on all devices.
        pure: makes the function of a module that has been altered.
        options: those of `value_and_grad` that are not about the batch.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 2})
    >>> def main():
    ...     apply, params, buffers = fs.functionalize(torch.nn.Linear(1, 1, bias=False))
    ...     params = fs.shard_params({"weight": torch.ones(1, 1)}, fs.fsdp("data"), mesh=mesh)
    ...     model = ByHand(apply, params, buffers, mesh=mesh, axes=("data",))
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
        pure: Callable[[nn.Module], Apply] | None = None,
        **options: Any,
    ) -> None:
        lay = options.get("gradients") or as_they_lie
        super().__init__(params, mesh, lay, seed=seed, reproducible=options.get("reproducible", False))
        self.apply, self.axes, self._pure = apply, axes, pure
        self._agreed = Buffers(buffers, standing(mesh))  # as they were on all devices after the last step
        self._remembered, self._looks_anew = self._agreed.part(0), False
        self._announced = Announced(mesh, axes)
        self._gradient = unstaged(apply, mesh=mesh, batch=P(axes), has_buffers=True, **options)
        self._open: _Open | None = None

    def whole(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return parameters and buffers as plain tensors, by their names in the model; all devices have to ask."""
        new = self._agreed.compared(0, self._remembered, torch.device("cpu"))
        return unshard(self.params), unshard(self._agreed.after([new]))

    def follow(self, module: nn.Module, altered: Altered) -> None:
        """Call from now on what a model's structure has become; forget what was kept in attributes that were set."""
        if altered.anew:
            assert self._pure is not None
            self.apply = self._pure(module)
        self._looks_anew |= altered.anew or altered.switches
        self._remembered = without(self._remembered, altered.forgotten)
        if self._open is not None:
            self._open.remembered = [without(tree, altered.forgotten) for tree in self._open.remembered]

    def kept(self) -> dict[str, Tensor]:
        """Return what this device's last call has kept in attributes, by the names of buffers."""
        return kept_of(self._remembered if self._open is None else [*self._open.remembered, self._remembered][0])

    def shown(self, graphs: Mapping[Slot, Any]) -> dict[Slot, Any]:
        """Return what is to be seen of what the last call has left in attributes with its graph: a loss may be made of it."""
        now = self._open
        if self._gradient.how.slices is not None or now is None:
            return cut_off(graphs, "in reproducible mode each slice of a batch leaves its own")
        now.marks += marked([*graphs.values()], now.calls, len(now.calls.counted) - 1)
        return dict(graphs)

    def announce(self, total: int | None, part: PyTree) -> None:
        """Note how many samples all devices have together, of which this one's are about to come."""
        self._announced.tell(total, part)

    # -- forward ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this device's part of the batch."""
        return self._here(lambda device: self._forward(device, args, kwargs))

    def _here(self, body: Callable[[int], Any]) -> Any:
        with one_thread(self._gradient.how.slices is not None):
            (result,) = everywhere(standing(self.mesh), body, mapped=self.mesh.axis_names)
        return result

    def _forward(self, device: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grad = torch.is_grad_enabled()
        now = self._open if self._open is not None and grad else self._opened()
        tape, how = now.tape, self._gradient.how
        if now.spent:
            tape.begin()
            now.spent = False
        begun = None if self._open is None else self._open.remembered  # by the slices of this step
        sliced = how.slices is not None and (grad or bool(begun))
        batch, counted = self._batch(device, args, kwargs, sliced=sliced)
        place = prod(self.mesh.shape[axis] for axis in self.axes)
        count = how.turns(place)
        with self.draws(grad=grad):
            key = drawn_key()
        now.device = Device(how, tape, now.tree, self._agreed, batch, 0, key, 1.0)
        group = now.device.group
        index = 0 if group is None else group.index
        slices = batch.slices(0, count, apart=True) if sliced else [Slice([x for (x,) in batch.columns], 1, None)]
        now.rows = [float(slice.rows) for slice in slices] if sliced else [1.0]
        now.samples = [slice.rows for slice in slices] if sliced else [counted.rows]
        given = begun if sliced and begun else [self._remembered] * len(slices)
        try:
            parts = [
                self._one(now, slice, given[turn], index * len(slices) + turn, grad=grad)
                for turn, slice in enumerate(slices)
            ]
        except BaseException:
            if now is not self._open:  # nobody goes on with it
                tape.leave()
            raise
        now.begun = True
        outputs, remembered = [output for output, _ in parts], [after for _, after in parts]
        if not grad:
            tape.end()
            tape.close()
        else:
            self._open = now
            now.calls.add(counted, (args, kwargs))
        if sliced:
            found, structure = side_by_side(outputs, [slice.rows for slice in slices])
            if self._open is not None:
                self._open.remembered = remembered
            now.joined = [(end, pieces) for end, pieces in now.joined if end() is not None]
            now.joined += [(ref(x), pieces) for x, pieces in found if _needs(x)]
            for x in filter(_needs, (x for x, _ in found)):
                x.register_post_accumulate_grad_hook(refuse_backward)
            output = tree_unflatten([x.view_as(x) if _needs(x) else x for x, _ in found], structure)
        else:
            (output,), (self._remembered,) = outputs, remembered
        now.marks += marked(output, now.calls, len(now.calls.counted) - 1) if grad else []
        return output

    def _one(self, now: _Open, slice: Slice, given: PyTree, number: int, *, grad: bool) -> tuple[Any, PyTree]:
        """Run one slice; return its output, and the buffers after it."""
        assert now.device is not None
        device, tape = now.device, now.tape
        args, kwargs = device.batch.tree(slice.leaves, self._gradient.how.manner.compute)

        def forward() -> tuple[Any, PyTree]:
            return self.apply(now.tree(), given, *args, **kwargs)

        def begin() -> None:
            if not now.begun:
                tape.begin()

        with (
            keyed_random(device.key, 0, number),
            owning(device.batch.mesh.axis_names, device.talk.notice),
        ):
            output, after = tape.saved.watch(forward, begin) if grad else forward()
        if grad and (tape.fresh or self._looks_anew or not self.steps & (self.steps - 1)):  # and in steps 2, 4, 8, ...
            refuse_unreached(output)
        return wholes(output), after

    def _batch(
        self, device: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, sliced: bool
    ) -> tuple[Batch, Counted]:
        """Return this device's part of a batch, and what it counts for."""
        mesh = standing(self.mesh)
        _, leaves, structure = flatten_with_paths((args, kwargs), none_is_leaf=True)
        lengths = [x.shape[0] if isinstance(x, Tensor) and x.ndim else None for x in leaves]
        paths, outside, _ = flatten_outside((args, kwargs))
        counted = self._announced.counted(outside, device)
        if sliced:
            refuse_unsliced(paths, outside, leaves, counted)
        cuts = [counted.cut if length is not None and length == counted.rows else None for length in lengths]
        return Batch(mesh, (device,), [(x,) for x in leaves], cuts, structure, self.axes, (), {}), counted

    def _opened(self) -> _Open:
        """Begin a step: lay the parameters out for use."""
        mesh, gradient = standing(self.mesh), self._gradient
        refuse_distant(mesh, "the model", params=self.params)
        paths, leaves, structure = flatten_with_paths(self.params, sharded_is_leaf=True)
        refuse_unplaced(paths, leaves, mesh, "the model")
        first = firsts_of(leaves)
        own = sorted({*first})
        number = {place: number for number, place in enumerate(own)}
        at = [number[place] for place in first]
        known = gradient.known_of(structure, paths, leaves, at, mesh, self.axes)
        shards = [leaves[place].shards[0] for place in own]
        tape = Tape(known.leaves, shards, known.ways, gradient.how.manner, call_site(), known.order)
        return _Open(
            tape,
            known,
            lambda: unflatten(structure, [tape.handles[place] for place in at]),
            lambda found: unflatten(structure, [found[place] for place in at]),
        )

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, scale: float = 1.0, sync: bool = True) -> None:
        """Add the gradient of `scale` times the loss to what is there; without `sync` it is not reduced before it has to be.

        A mean over this device's samples counts for as much of the whole as these do.  In reproducible mode and where
        gradients are reduced each time, `sync` makes no difference.
        """
        now = self._open
        if now is None:
            raise ModuleError(
                "backward: the model has not been called since the last step or zero_grad. Call it first."
            )
        if loss.numel() != 1 or not loss.requires_grad:
            found = "does not depend on the model" if loss.numel() == 1 else f"has the shape {tuple(loss.shape)}"
            raise LayoutError(f"backward takes one number that the model's output led to; this loss {found}.")
        look_beside(loss)
        now.calls.tell(loss)
        with after_a_step(self.stepped):
            self._here(lambda device: self._backward(now, loss, scale, sync))

    def _backward(self, now: _Open, loss: Tensor, scale: float, sync: bool) -> None:
        tape, how, device = now.tape, self._gradient.how, now.device
        assert device is not None
        tape.check_unchanged()
        device.scale, device.scaled = scale, held_by(loss.dtype, scale)
        counted = now.calls.counted
        made_of = reached(loss, now.calls) if len(counted) > 1 else []
        now.share = self._announced.share([counted[place] for place in made_of] or counted[-1:])
        start = torch.full_like(loss, now.share * device.scaled)
        reductions = tape.reductions
        reductions.singly = reductions.wide = how.slices is not None
        reductions.keep = None if sync or not how.once else lambda unit, gs: unit.keep(gs)
        tape.begin_backward(device.everyone, device.talk.along, idle=not now.share)
        if how.slices is None:
            now.spent = True  # also if it fails: what it has not come to is gone back through by nobody
            with reductions.asked():
                torch.autograd.grad(loss, [tape.anchor], start, allow_unused=True)
            if reductions.keep is None:
                reductions.end()
        else:
            self._by_slices(now, loss, start)
        now.spent, now.kept, now.loss = True, reductions.keep is not None, loss.detach()
        if not now.kept:
            self._reduced(now, device, loss)

    def _by_slices(self, now: _Open, loss: Tensor, start: Tensor) -> None:
        """Go back through each slice alone, and add gradients in a tree."""
        reductions = now.tape.reductions
        forest = Forest(now.tape.units, reductions.as_reduced)
        reductions.keep = forest.plant
        ends = [(x, pieces) for end, pieces in now.joined if (x := end()) is not None]
        given = torch.autograd.grad(loss, [x for x, _ in ends], start, allow_unused=True)
        if all(g is None for g in given):
            raise LayoutError(
                "backward: this loss depends on nothing that this model has returned: it is another optimizer's."
            )
        for turn in range(len(now.rows)):
            pairs = [(pieces(turn, g)) for (_, pieces), g in zip(ends, given, strict=True) if g is not None]
            outputs, cotangents = [x for x, _ in pairs], [g for _, g in pairs]
            if outputs:
                with reductions.asked():
                    torch.autograd.grad(outputs, [now.tape.anchor], cotangents, allow_unused=True)
            forest.grow(1.0)
        reductions.keep = None
        for unit in now.tape.units:
            unit.kept = forest.harvest(unit)
        reductions.end()

    def _reduced(self, now: _Open, device: Device, loss: Tensor) -> None:
        """Reduce what is left, and average buffers."""
        trees = now.remembered or [self._remembered] * len(now.rows)
        weights = [row * bool(now.share) for row in now.rows] if device.how.slices is not None else [now.share]
        new = [self._agreed.compared(0, tree, loss.device) for tree in trees]
        written = [Written(weight, one.changed) for weight, one in zip(weights, new, strict=True)]
        _, now.used, changed = device.together([Found(loss.detach(), weight, [], []) for weight in weights], written)
        if now.tape.fresh and len(now.samples) * prod(self.mesh.shape[axis] for axis in self.axes) > 1:
            warn_of_samples(written, now.samples, [leaf.path for leaf in now.known.leaves], changed)
        self._agreed = Buffers(self._agreed.after([new[-1]._replace(changed=changed)]), standing(self.mesh))
        self._remembered, now.remembered = self._agreed.part(0), []

    def found(self) -> PyTree:
        """Return the gradients of all backwards since the last time; None where no device has used a parameter."""
        now = self._open
        if now is not None:
            now.calls.refuse_passed()
        if now is None or now.device is None or not (now.used or now.kept):
            raise ModuleError(
                "there are no gradients. Call the model, then booster.backward(loss, optimizer): loss.backward() knows "
                "nothing of the other devices."
            )
        with after_a_step(self.stepped):
            return self._here(lambda device: self._gradients(now, now.device))

    def _gradients(self, now: _Open, device: Device | None) -> PyTree:
        assert device is not None
        tape = now.tape
        if now.kept:  # nobody asked for the others' before
            tape.reductions.keep = None
            tape.reductions.begin(tape.first, device.everyone, device.talk.along, idle=False)
            tape.reductions.end()
            self._reduced(now, device, now.loss)
        tape.check_unchanged()
        tape.end()
        grads = [
            None if g is None else Sharded(leaf.shape, leaf.gradient, (g,))
            for leaf, g in zip(now.known.leaves, device.gradients(now.used), strict=True)
        ]
        now.known.order, self._looks_anew = tape.order, False
        tree = now.unflatten(grads)
        self.forget()
        return tree

    def drop(self) -> None:
        """Drop all gradients since the last step.  A forward that nobody has gone back through may still be, as in torch."""
        if self._open is None or self._open.spent:
            self.forget()
        else:
            self._open.tape.reductions.drop()
            self._open.used, self._open.kept, self._open.calls.passed = [], False, False

    def forget(self) -> None:
        """Drop all gradients and forwards since the last step."""
        if self._open is not None:
            now, self._open = self._open, None
            self._here(lambda device: now.tape.stop())


def _needs(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
