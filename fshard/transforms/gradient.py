"""`value_and_grad`: the gradient of an ordinary loss function, on parameters and a batch that lie on a mesh.

Each device takes the loss of its own part of the batch; the loss of the whole is their mean, weighted by samples or by
what `weight` counts.  So a batch of any size has the loss and the gradient that it has on one device, if the loss is a
mean over samples, or with `weight` over what that counts.  A loss may talk to other devices itself, over any axis: its
gradient is that of the mean of all devices' losses (see `talk`).  It needs an even batch for `fs.pmean`, and for a sum
samples on all devices (see `uneven`); `sync_batchnorm` needs neither.

Gradients come out as their layouts say: that is all that ZeRO 0 to 3 differ in.

    parameters at rest   gradients     the way of a gradient
    P()                  P()           psum                    (0)
    P()                  flat          psum_scatter            (1, 2)
    flat                 flat          psum_scatter            (3; gathered at use)

Reproducible mode: the batch is cut into slices whose number does not depend on the mesh.  Gradients of slices are added
in one binary tree, within a device and, by the collectives, on across devices, in 32 bits at least (sums in 16 would be
rounded at other places on other meshes); random draws are keyed by the slice; torch computes with one thread.  Then the
bits are the same on any mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import CollectiveTimeoutError, DeadlockError, LayoutError, MismatchError
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.spmd import everywhere, held, standing
from fshard.mesh.steps import Way, way_between
from fshard.mesh.threads import one_thread
from fshard.mesh.tree import PyTree, Structure, flatten_with_paths, unflatten
from fshard.optim.leaves import firsts_of, trainable
from fshard.source import Site, call_site
from fshard.transforms.agree import CURE, disagreement
from fshard.transforms.batch import placed
from fshard.transforms.beside import put_together
from fshard.transforms.buffers import Buffers
from fshard.transforms.counts import Weight
from fshard.transforms.nearby import refuse_distant
from fshard.transforms.ordered import way_in_order
from fshard.transforms.reductions import Along
from fshard.transforms.rules import Choice, chosen, named, parts_of, unit_of
from fshard.transforms.slices import Device, How, Result
from fshard.transforms.tape import Order, Tape
from fshard.transforms.units import Leaf, Manner
from fshard.uncompiled import uncompiled


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    mesh: Mesh,
    batch: PyTree,
    has_buffers: bool = False,
    has_aux: bool = False,
    weight: Weight | None = None,
    accumulate: int = 1,
    reduce_once: bool = True,
    gradients: Callable[[Layout], Layout] | None = None,
    frozen: Choice = None,
    reproducible: bool = False,
    slices: int | None = None,
    reshard_after_forward: bool = True,
    live_units: int = 2,
    prefetch: int = 1,
    in_flight: int = 2,
    bucket: int = 1 << 20,
    compute: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
) -> Gradient:
    """Return a function of (params, batch) that gives the mean loss over the whole batch and its gradient.

    Args:
        loss_fn: `loss_fn(params, batch)` of one device: the mean loss over the samples that it is given, or the loss of each;
            with `has_aux`, a pair of that and a tree: floating numbers, which are averaged as the loss is, whole numbers, which
            are counts and are added up, and tensors with a row for each sample, which come back for the whole batch, as a
            `Sharded` (see `beside`).
        mesh: the devices.
        batch: how the batch is cut: a P, or a prefix tree of Ps.  Its axes are the ones that gradients are summed over.  What
            the loss needs besides, a second network say, is a part of it that is not cut, P(): a tree of `Sharded`s too, which
            are then gathered, all at once.
        has_buffers: whether loss_fn has buffers, of BatchNorm say: it is then `loss_fn(params, buffers, batch)` and returns
            (loss, new buffers), and so does the result: see `buffers`.
        has_aux: whether loss_fn returns something more, last.
        weight: what a part of the batch counts for: `weight(part)`, say its number of tokens.  By default a part counts for
            its samples: how long the first dim is, where the batch is cut along it.  A part that counts 0 adds nothing, even
            if its loss is no number; no part counts less, and a batch that counts for nothing at all is refused.  It may be a
            number for each sample, and has to be if the loss function returns a loss for each.  For a number that lies on a
            device the host waits, once a step.
        accumulate: cut each device's part into so many, one after the other.  Parts differ by one sample at most.
        reduce_once: with `accumulate`, add gradients up locally and reduce the sum, instead of reducing each.  It sends less
            and holds whole gradients meanwhile.
        gradients: from a parameter's layout to its gradient's; by default they are the same.
        frozen: which parameters have no gradient here: a path pattern, several, or a function of the path ("blocks[3].w").
            What is never trained is better frozen by `shard_params`: it has no optimizer state either.
        reproducible: equal bits on every mesh: see the module.
        slices: into how many slices the whole batch is cut in reproducible mode, whatever the mesh; by default 8.
        reshard_after_forward: gather sharded units again for the backward instead of keeping them.
        live_units: how many sharded units are whole at a time, besides those that are gathered ahead, and in the backward
            those of a rematerialised block that has been run again.
        prefetch: how many units to start gathering ahead of their use, in the order that the step before used them.
        in_flight: how many reductions may be under way while the backward goes on.
        bucket: about how many bytes of gradients are reduced together where parameters lie whole (ZeRO 0 to 2): units wait, in
            the order of the backward, until there are so many.  0: each unit alone.
        compute: the floating dtype that parameters and batch are used in, if not their own.
        reduce: the dtype that gradients are reduced in, if not that of the computation, or in reproducible mode and where
            slices are added up, that or float32, whichever is wider.

    The function also takes `scale=`: gradients are then those of so many times the loss, which `optim.loss_scaled` needs:
    `gradient(params, batch, scale=opt.loss_scale(state))`.

    The loss is a tensor, equal on all devices; a gradient is None where no device has used the parameter.  loss_fn may call
    collectives over any axis, and needs no `fs.pvary`: every value in it is the device's own.  If it does so over an axis
    that does not cut the batch, to use a part of the model on each device, the loss is the mean over that axis too.  In
    reproducible mode it can ask nothing over the batch's axes.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = fs.shard_params({"w": torch.tensor([1.0, 2.0])}, fs.fsdp("data"), mesh=mesh)
    >>> def loss_fn(params, batch):
    ...     return (params["w"] * batch).sum(1).mean()
    >>> loss, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))(params, torch.ones(4, 2))
    >>> loss, fs.typeof(grads["w"]), fs.unshard(grads["w"])
    (tensor(3.), f32[2]{flat:data}, tensor([1., 1.]))

    Each device along "model" multiplies by its rows of w:

    >>> mesh = fs.make_mesh({"data": 2, "model": 2})
    >>> def loss_fn(w, x):
    ...     at, n = fs.axis_index("model"), fs.axis_size("model")
    ...     return fs.psum(x.chunk(n, 1)[at] @ w.chunk(n)[at], "model").square().mean()
    >>> w = fs.shard_params(torch.tensor([1.0, 2.0]), P("model"), mesh=mesh)
    >>> loss, grad = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))(w, torch.ones(4, 2))
    >>> loss, fs.typeof(grad), fs.unshard(grad)
    (tensor(9.), f32[2@model], tensor([6., 6.]))
    """
    if slices is not None and not reproducible:
        raise LayoutError(
            f"value_and_grad(slices={slices}) has no meaning without reproducible=True. Add it, or leave slices out; "
            "accumulate= cuts each device's part."
        )
    slices = 8 if slices is None else slices
    counts = {"accumulate": accumulate, "slices": slices, "live_units": live_units}
    sizes = {"in_flight": in_flight, "prefetch": prefetch, "bucket": bucket}
    wrong = [
        f"{name}={value!r}"
        for least, values in ((1, counts), (0, sizes))
        for name, value in values.items()
        if not isinstance(value, Integral) or value < least
    ]
    if wrong:
        raise LayoutError(
            f"value_and_grad: {', '.join(wrong)}: a whole number of at least 1 is needed (in_flight, prefetch and bucket: 0)."
        )
    if reproducible and reduce in (torch.bfloat16, torch.float16):
        raise LayoutError(
            f"value_and_grad(reproducible=True, reduce={reduce}): sums in 16 bits are rounded at other places on other meshes. "
            "Give reduce=torch.float32, or leave it out."
        )
    manner = Manner(reshard_after_forward, live_units, prefetch, in_flight, bucket, compute, reduce)
    once = reduce_once or reproducible
    how = How(loss_fn, has_buffers, has_aux, weight, accumulate, once, slices if reproducible else None, manner)
    return Gradient(how, mesh, batch, gradients or _as_they_lie, frozen)


def _as_they_lie(layout: Layout) -> Layout:
    return layout


def grad(loss_fn: Callable[..., Any], **options: Any) -> Callable[..., PyTree]:
    """Return a function of (params, batch) that gives the gradient of the mean loss: see `value_and_grad`.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> w = fs.device_put(torch.tensor(3.0), fs.Layout(mesh))
    >>> fs.unshard(fs.grad(lambda w, x: (w * x).mean(), mesh=mesh, batch=P("data"))(w, torch.arange(4.0)))
    tensor(1.5000)
    """
    both = value_and_grad(loss_fn, **options)
    return lambda params, *given, scale=1.0: both(params, *given, scale=scale)[1]


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
    _ways: dict[Along, tuple[list[Way | None], int]] = field(default_factory=dict[Along, tuple[list[Way | None], int]])

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


KNOWN = 64
"""How many trees a gradient remembers."""


class Value(NamedTuple):
    """What a step has found: the loss, what it is the mean over, and what the loss function returns beside it.

    `samples` are those of the batch; None: its tensors do not agree on how many there are.  Of a batch that is not cut, all
    tensors have to.
    """

    loss: Tensor
    weight: float
    samples: int | None
    buffers: PyTree
    aux: PyTree


@uncompiled
@dataclass(frozen=True)
class Gradient:
    """What `value_and_grad` returns: a function of (params, batch), which remembers what it has worked out."""

    how: How
    mesh: Mesh
    specs: PyTree
    gradients: Callable[[Layout], Layout]
    frozen: Choice
    known: list[Known] = field(init=False, default_factory=list[Known], compare=False, repr=False)

    def __call__(self, params: PyTree, *given: PyTree, scale: Tensor | float = 1.0) -> tuple[Any, PyTree]:
        """Return the loss, or what comes with it too, and the gradient of `scale` times the loss."""
        buffers, batch = given if self.how.has_buffers else ((), *given)
        refuse_distant(self.mesh, "value_and_grad", params=params, buffers=buffers, batch=batch)
        value, grads = self.run(params, buffers, batch, call_site(), float(scale))
        rest = (value.buffers,) * self.how.has_buffers + (value.aux,) * self.how.has_aux
        return ((value.loss, *rest) if rest else value.loss), grads

    def run(
        self, params: PyTree, buffers: PyTree, batch: PyTree, site: Site, scale: float = 1.0
    ) -> tuple[Value, PyTree]:
        """Run forward and backward on all devices; return the loss, and the gradients of `scale` times it as they lie."""
        if self.how.backward and torch.is_inference_mode_enabled():
            raise LayoutError(
                "value_and_grad under torch.inference_mode(): nothing is recorded there, so there is no gradient. "
                "Call it outside, or in torch.inference_mode(False)."
            )
        mesh = standing(self.mesh)
        paths, leaves, structure = flatten_with_paths(params, sharded_is_leaf=True)
        refuse_unplaced(paths, leaves, mesh)
        parts = placed(batch, self.specs, mesh)
        parts.check(self.how.turns(prod(mesh.shape[axis] for axis in parts.axes)))
        first = firsts_of(leaves)  # a tied leaf is one, wherever it stands
        own = sorted({*first})
        number = {place: number for number, place in enumerate(own)}
        at = [number[place] for place in first]
        known = self._known(structure, paths, leaves, at, mesh, parts.axes)
        drawn = int(torch.randint(1 << 62, ()).item())  # the same on every process
        devices, memory, tapes = held(mesh), Buffers(buffers, mesh), dict[int, Tape]()

        def on_device(device: int) -> Result:
            place = devices.index(device) if len(devices) > 1 else 0
            tape = tapes[device] = Tape(
                known.leaves, [leaves[at].shards[place] for at in own], known.ways, self.how.manner, site, known.order
            )

            def tree() -> PyTree:
                return unflatten(structure, [tape.handles[place] for place in at])

            return Device(self.how, tape, tree, memory, parts, place, drawn, scale).run()

        try:
            with one_thread(self.how.slices is not None):
                results = everywhere(mesh, on_device, mapped=mesh.axis_names)
        except (MismatchError, DeadlockError) as error:
            difference = _difference(mesh, tapes)
            if difference and CURE not in str(error):
                raise MismatchError(f"{error}\nvalue_and_grad: {difference}") from error
            raise
        except CollectiveTimeoutError as error:
            error.add_note(f"value_and_grad: {_difference(mesh, tapes)}")
            raise
        first = results[0]
        known.order = first.order
        grads = [
            None if shards[0] is None else Sharded(leaf.shape, leaf.gradient, tuple(shards))
            for leaf, *shards in zip(known.leaves, *(result.gradients for result in results), strict=True)
        ]
        after = memory.after([result.buffers for result in results])
        aux = put_together(first.numbers, [result.rows for result in results], first.structure)
        return Value(first.loss, first.weight, parts.samples, after, aux), unflatten(
            structure, [grads[place] for place in at]
        )

    def _known(
        self,
        structure: Structure,
        paths: Sequence[str],
        leaves: Sequence[Sharded],
        at: Sequence[int],
        mesh: Mesh,
        axes: tuple[str, ...],
    ) -> Known:
        """Return what is worked out once for parameters of these paths, ties, shapes, dtypes and layouts."""
        key = structure, at, axes, [x.shape for x in leaves], [x.dtype for x in leaves], [x.layout for x in leaves]
        found = next((known for known in self.known if known.key == key), None)
        if found is None:
            fixed = chosen(self.frozen, paths, "frozen")
            refuse_half_frozen(paths, at, fixed)
            ways: dict[int, Leaf] = {}
            for path, place, x, fix in zip(paths, at, leaves, fixed, strict=True):
                ways.setdefault(place, self._leaf(path, x, trained=self.how.backward and trainable(x) and not fix))
            found = Known(key, tuple(ways[place] for place in sorted(ways)), mesh, axes, self.how.slices is not None)
            self.known[:] = [found, *self.known[: KNOWN - 1]]
        return found

    def _leaf(self, path: str, x: Sharded, *, trained: bool) -> Leaf:
        layout, whole = x.layout, Layout(x.mesh)
        wanted = layout
        if trained:
            wanted = self.gradients(layout)
            if not isinstance(wanted, Layout):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise LayoutError(
                    f"value_and_grad: gradients={self.gradients!r} has to return a Layout for {named(parts_of(path))}; found "
                    f"{wanted!r}. Write opt.gradients of a partitioned optimizer, or leave it out."
                )
        gather = way_between(layout, whole, x.shape)
        return Leaf(path, x.shape, x.dtype, layout.unit or unit_of(path), gather, trained, wanted)


def _difference(mesh: Mesh, tapes: Mapping[int, Tape]) -> str:
    """Say which devices have gathered other units than others."""
    gathered = {device: tape.sequence for device, tape in tapes.items()}
    return disagreement(mesh, gathered, next(iter(tapes.values())).words()) if tapes else ""


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


WHOLE_OR_FSDP = 'fs.shard_params(params, P(), mesh=mesh), or fs.fsdp("data") for ZeRO-3'


def refuse_unplaced(
    paths: Sequence[str],
    leaves: Sequence[Any],
    mesh: Mesh,
    what: str = "value_and_grad",
    cure: str = WHOLE_OR_FSDP,
) -> None:
    """Raise naming parameters that do not lie on a mesh."""
    wrong = [
        f"{named(parts_of(path)) or 'the parameter'} is {type(x).__name__ if not isinstance(x, Sharded) else f'on {x.mesh}'}"
        for path, x in zip(paths, leaves, strict=True)
        if not isinstance(x, Sharded) or (x.mesh is not mesh and x.mesh != mesh)
    ]
    if wrong:
        raise LayoutError(f"{what} on {mesh}: {'; '.join(wrong)}. Lay the parameters on that mesh: {cure}.")
