"""`value_and_grad`: the gradient of an ordinary loss function, on parameters and a batch that lie on a mesh.

Each device takes the loss of its own part of the batch; the loss of the whole is their mean, weighted by samples or by
what `weight` counts.  Gradients come out as their layouts say: that is all that ZeRO 0 to 3 differ in.

    parameters at rest   gradients     the way of a gradient
    P()                  P()           psum                    (0)
    P()                  flat          psum_scatter            (1, 2)
    flat                 flat          psum_scatter            (3; gathered at use)

Reproducible mode: the batch is cut into slices whose number does not depend on the mesh.  Gradients of slices are added
in one binary tree, within a device and, by the collectives, on across devices; random draws are keyed by the slice.
Then the bits are the same on any mesh.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import DeadlockError, LayoutError, MismatchError
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.placing import collected, device_put
from fshard.mesh.scope import Group, require
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.spmd import everywhere, held, standing
from fshard.mesh.steps import Way, steps_between
from fshard.mesh.tree import PyTree, broadcast_prefix, flatten_with_paths, unflatten
from fshard.source import Site, call_site
from fshard.transforms.agree import disagreement, exchanged, summed
from fshard.transforms.randomness import keyed_random
from fshard.transforms.rules import named, parts_of, unit_of
from fshard.transforms.tape import Order, Tape
from fshard.transforms.units import Leaf, Manner, Unit
from fshard.transforms.use import followed

Weight = Callable[[PyTree], Tensor | int | float]


class Value(NamedTuple):
    """What a step's forward and backward have found: the loss and what it was the mean over."""

    loss: Tensor
    weight: Tensor
    aux: PyTree


@dataclass(frozen=True)
class How:
    """All that `value_and_grad` was told but the parameters and the batch."""

    loss_fn: Callable[..., Any]
    mesh: Mesh
    batch: PyTree
    gradients: Callable[[Layout], Layout]
    has_aux: bool
    weight: Weight | None
    accumulate: int
    once: bool
    slices: int | None
    frozen: Callable[[str], bool]
    manner: Manner
    orders: dict[Any, Order] = field(default_factory=dict[Any, Order], compare=False)


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    mesh: Mesh,
    batch: PyTree,
    has_aux: bool = False,
    weight: Weight | None = None,
    accumulate: int = 1,
    reduce_once: bool = True,
    gradients: Callable[[Layout], Layout] | None = None,
    frozen: Callable[[str], bool] | None = None,
    reproducible: bool = False,
    slices: int = 8,
    reshard_after_forward: bool = True,
    live_units: int = 2,
    prefetch: int = 1,
    in_flight: int = 2,
    compute: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
) -> Callable[[PyTree, PyTree], tuple[Any, PyTree]]:
    """Return a function of (params, batch) that gives the mean loss over the whole batch and its gradient.

    Args:
        loss_fn: `loss_fn(params, batch)` of one device: the mean loss over the samples that it is given; with `has_aux`, a
            pair of that and a tree of tensors, which are averaged as the loss is.
        mesh: the devices.
        batch: how the batch is cut: a P, or a prefix tree of Ps.  Its axes are the ones that gradients are summed over.
        has_aux: whether loss_fn returns a pair.
        weight: what a part of the batch counts for: `weight(part)`, say its number of tokens.  By default all parts are of
            one size and count the same.  A part that counts 0 adds nothing, even if its loss is no number.
        accumulate: cut each device's part into so many, one after the other.
        reduce_once: with `accumulate`, add gradients up locally and reduce the sum, instead of reducing each.  It sends less
            and holds whole gradients meanwhile.
        gradients: from a parameter's layout to its gradient's; by default they are the same.
        frozen: whether the parameter at a path ("blocks[3].w") is not to be trained; integers never are.
        reproducible: equal bits on every mesh: see the module.
        slices: into how many slices the whole batch is cut in reproducible mode, whatever the mesh.
        reshard_after_forward: gather sharded units again for the backward instead of keeping them.
        live_units: how many sharded units are whole at a time, besides those that are gathered ahead, and in the backward
            those of a rematerialised block that has been run again.
        prefetch: how many units to start gathering ahead of their use, in the order that the step before used them.
        in_flight: how many reductions may be under way while the backward goes on.
        compute: the floating dtype that parameters and batch are used in, if not their own.
        reduce: the dtype that gradients are reduced in, if not that of the computation.

    The loss is a tensor, equal on all devices; a gradient is None where no device has used the parameter.  loss_fn may call
    collectives; what one makes equal on all devices and is then used with a device's own data has to go through `fs.pvary`.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = fs.shard_params({"w": torch.tensor([1.0, 2.0])}, fs.fsdp("data"), mesh=mesh)
    >>> def loss_fn(params, batch):
    ...     return (params["w"] * batch).sum(1).mean()
    >>> loss, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"))(params, torch.ones(4, 2))
    >>> loss, fs.typeof(grads["w"]), fs.unshard(grads["w"])
    (tensor(3.), f32[2]{flat:data}, tensor([1., 1.]))
    """
    how = how_of(
        loss_fn,
        mesh=mesh,
        batch=batch,
        has_aux=has_aux,
        weight=weight,
        accumulate=accumulate,
        reduce_once=reduce_once,
        gradients=gradients,
        frozen=frozen,
        reproducible=reproducible,
        slices=slices,
        reshard_after_forward=reshard_after_forward,
        live_units=live_units,
        prefetch=prefetch,
        in_flight=in_flight,
        compute=compute,
        reduce=reduce,
    )

    def run(params: PyTree, batch: PyTree) -> tuple[Any, PyTree]:
        value, grads = differentiate(how, params, batch, call_site())
        return ((value.loss, value.aux) if has_aux else value.loss), grads

    return run


def how_of(
    loss_fn: Callable[..., Any],
    *,
    mesh: Mesh,
    batch: PyTree,
    has_aux: bool = False,
    weight: Weight | None = None,
    accumulate: int = 1,
    reduce_once: bool = True,
    gradients: Callable[[Layout], Layout] | None = None,
    frozen: Callable[[str], bool] | None = None,
    reproducible: bool = False,
    slices: int = 8,
    reshard_after_forward: bool = True,
    live_units: int = 2,
    prefetch: int = 1,
    in_flight: int = 2,
    compute: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
) -> How:
    """Return the options of `value_and_grad` as a value."""
    small = {"accumulate": accumulate, "slices": slices, "live_units": live_units}
    wrong = [f"{name}={value!r}" for name, value in small.items() if value < 1] + (
        [f"{name}={value!r}" for name, value in {"in_flight": in_flight, "prefetch": prefetch}.items() if value < 0]
    )
    if wrong:
        raise LayoutError(f"value_and_grad: {', '.join(wrong)}: at least 1 is needed (in_flight and prefetch: 0).")
    manner = Manner(reshard_after_forward, live_units, prefetch, in_flight, compute, reduce)
    return How(
        loss_fn,
        mesh,
        batch,
        gradients or _as_they_lie,
        has_aux,
        weight,
        accumulate,
        reduce_once or reproducible,
        slices if reproducible else None,
        frozen or _none,
        manner,
    )


def _as_they_lie(layout: Layout) -> Layout:
    return layout


def _none(path: str) -> bool:
    return False


def grad(loss_fn: Callable[..., Any], **options: Any) -> Callable[[PyTree, PyTree], PyTree]:
    """Return a function of (params, batch) that gives the gradient of the mean loss: see `value_and_grad`.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> w = fs.device_put(torch.tensor(3.0), fs.Layout(mesh))
    >>> fs.unshard(fs.grad(lambda w, x: (w * x).mean(), mesh=mesh, batch=P("data"))(w, torch.arange(4.0)))
    tensor(1.5000)
    """
    both = value_and_grad(loss_fn, **options)
    return lambda params, batch: both(params, batch)[1]


# -- what is worked out once per program --------------------------------------------------------------------------


def differentiate(how: How, params: PyTree, batch: PyTree, site: Site, scale: float = 1.0) -> tuple[Value, PyTree]:
    """Run forward and backward on all devices; return the loss, and the gradients of `scale` times it as they lie."""
    mesh = standing(how.mesh)
    paths, placed, structure = flatten_with_paths(params, sharded_is_leaf=True)
    _refuse_unplaced(paths, placed, mesh)
    parts, cut, part_structure, axes = _placed(how, batch, mesh)
    first = {id(x): place for place, x in reversed([*enumerate(placed)])}  # a tied leaf is one, wherever it stands
    own = sorted(first.values())
    key = tuple((paths[place], placed[place].shape, placed[place].dtype, placed[place].layout) for place in own)
    leaves = _leaves(key, axes, how.gradients, how.frozen)
    at = [own.index(first[id(x)]) for x in placed] if len(own) < len(placed) else list(range(len(placed)))
    devices = held(mesh)
    found: dict[int, tuple[Value, list[Tensor | None]]] = {}
    orders: list[Order] = []
    tapes: dict[int, Tape] = {}
    expected = how.orders.get(key)  # a guess: a wrong one costs time only
    drawn = int(torch.randint(1 << 62, ()).item())  # the same on every process

    def on_device(device: int) -> None:
        held_at = devices.index(device) if len(devices) > 1 else 0
        tape = tapes[device] = Tape(
            leaves, [placed[place].shards[held_at] for place in own], how.manner, site, expected
        )

        def params_of() -> PyTree:
            return unflatten(structure, [tape.handles[place] for place in at])

        mine = [x.shards[held_at] if isinstance(x, Sharded) else x for x in parts]
        found[device] = _Step(how, tape, params_of, part_structure, axes, drawn, scale).run(mine, cut)
        orders.append(tape.order)
        tape.close()

    try:
        everywhere(mesh, on_device, mapped=mesh.axis_names)
    except (MismatchError, DeadlockError) as error:
        sequences = {device: tape.sequence for device, tape in tapes.items()}
        known = disagreement(mesh, sequences, next(iter(tapes.values())).words())
        if known and known not in str(error):
            raise MismatchError(f"{error}\nvalue_and_grad: {known}") from error
        raise
    how.orders[key] = orders[0]
    results = [found[device] for device in devices]
    grads = [
        None if shards[0] is None else Sharded(placed[place].shape, how.gradients(placed[place].layout), tuple(shards))
        for place, *shards in zip(own, *(gs for _, gs in results), strict=True)
    ]
    return results[0][0], unflatten(structure, [grads[place] for place in at])


def _refuse_unplaced(paths: Sequence[str], leaves: Sequence[Any], mesh: Mesh) -> None:
    wrong = [
        f"{named(parts_of(path)) or 'the parameter'} is {type(x).__name__ if not isinstance(x, Sharded) else f'on {x.mesh}'}"
        for path, x in zip(paths, leaves, strict=True)
        if not isinstance(x, Sharded) or x.mesh != mesh
    ]
    if wrong:
        raise LayoutError(
            f"value_and_grad on {mesh}: {'; '.join(wrong)}. Lay the parameters on that mesh: "
            'fs.shard_params(params, P(), mesh=mesh), or fs.fsdp("data") for ZeRO-3.'
        )


def _placed(how: How, batch: PyTree, mesh: Mesh) -> tuple[list[Any], list[bool], Any, tuple[str, ...]]:
    """Lay the batch on the mesh; return its leaves, which have their samples cut, its structure, and the axes of the cuts."""
    paths, leaves, structure = flatten_with_paths(batch, sharded_is_leaf=True, none_is_leaf=True)
    try:
        specs = broadcast_prefix(how.batch, batch, none_is_leaf=True)
    except ValueError:
        raise LayoutError(f"the batch specs {how.batch!r} are no prefix of the batch {structure}.") from None
    placed: list[Any] = []
    with collected("batch") as attempt:
        for path, leaf, spec in zip(paths, leaves, specs, strict=True):
            with attempt(path):
                if isinstance(leaf, Tensor | Sharded):
                    if not isinstance(spec, P):
                        raise LayoutError(f"is a tensor, but its spec is {spec!r}. Give a P.")
                    layout = Layout(mesh, spec)
                    layout.check(leaf.shape)
                    leaf = leaf if isinstance(leaf, Sharded) and leaf.layout == layout else device_put(leaf, layout)
                placed.append(leaf)
    over = tuple(axis for axis in mesh.axis_names if any(isinstance(spec, P) and axis in spec.axes for spec in specs))
    cut = [isinstance(x, Sharded) and bool(x.ndim and x.spec.dims(x.ndim)[0]) for x in placed]
    return placed, cut, structure, over


Key = tuple[tuple[str, tuple[int, ...], torch.dtype, Layout], ...]


@lru_cache(maxsize=256)
def _leaves(
    key: Key, axes: tuple[str, ...], gradients: Callable[[Layout], Layout], frozen: Callable[[str], bool]
) -> tuple[Leaf, ...]:
    return tuple(_leaf(*one, axes, gradients, frozen) for one in key)


def _leaf(
    path: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: Layout,
    axes: tuple[str, ...],
    gradients: Callable[[Layout], Layout],
    frozen: Callable[[str], bool],
) -> Leaf:
    whole, reduce = Layout(layout.mesh), None
    if (dtype.is_floating_point or dtype.is_complex) and not frozen(named(parts_of(path))):
        summands = Layout(layout.mesh, P(unreduced=axes))
        reduce = Way(steps_between(summands, gradients(layout), shape), shape)
    gather = Way(steps_between(layout, whole, shape), shape)
    return Leaf(path, shape, dtype, layout.unit or unit_of(path), gather, reduce)


# -- what one device does -----------------------------------------------------------------------------------------


class _Step:
    """One device's forwards and backwards."""

    def __init__(
        self,
        how: How,
        tape: Tape,
        params: Callable[[], PyTree],
        batch: Any,
        axes: tuple[str, ...],
        key: int,
        scale: float,
    ) -> None:
        self.how, self.tape, self.params, self.batch = how, tape, params, batch
        self.axes, self.key, self.scale = axes, key, scale
        scope = require("value_and_grad")
        self.n = prod(scope.axes[axis][0] for axis in axes)
        self.index = scope.group(axes, "value_and_grad").index if axes else 0

    def run(self, parts: list[Any], cut: list[bool]) -> tuple[Value, list[Tensor | None]]:
        """Return the loss of the whole batch, and this device's shards of the gradients."""
        how, tape = self.how, self.tape
        count = self._slices()
        pieces = _cut(parts, cut, count)
        forest = Forest() if how.slices is not None else None
        losses: list[tuple[Tensor, Tensor, PyTree]] = []
        counts, shares = self._shares(pieces)
        tape.reductions.wide = how.once and forest is None and count > 1
        for place, piece in enumerate(pieces):
            last = place == count - 1
            if forest is not None:
                tape.reductions.keep = forest.plant
            elif how.once and not last:
                tape.reductions.keep = lambda unit, gs: unit.keep(gs)
            else:
                tape.reductions.keep = None
            tape.begin()
            with keyed_random(self.key, 0, self.index * count + place):
                losses.append(self._one(piece, counts[place], shares[place]))
            if forest is not None:
                forest.grow()
        tape.check_unchanged()
        if forest is not None:
            for unit in tape.units:
                unit.kept = forest.harvest(unit)
            tape.reductions.end()
        tape.end()
        return self._together(losses, count)

    def _slices(self) -> int:
        how = self.how
        if how.slices is None:
            return how.accumulate
        if how.slices % self.n or (how.slices // self.n) % how.accumulate:
            raise LayoutError(
                f"reproducible mode cuts the batch into {how.slices} slices, which {self.n} devices do not share evenly "
                f"in {how.accumulate} turns. Give a number of slices that all your meshes divide."
            )
        return how.slices // self.n

    def _one(self, piece: list[Any], counted: Tensor, share: float) -> tuple[Tensor, Tensor, PyTree]:
        """Forward and backward of one slice."""
        how, tape = self.how, self.tape
        batch = unflatten(self.batch, [_converted(x, how.manner.compute) for x in piece])
        with torch.enable_grad(), tape.saved.watching():
            result = followed(how.loss_fn)(self.params(), batch)
            loss, aux = result if how.has_aux else (result, ())
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise LayoutError(f"the loss function has to return one number; found {found}. Take its mean.")
        tape.begin_backward(self._group(), counts=share != 0)
        if loss.requires_grad:
            start = torch.full_like(loss, share * self.scale)
            torch.autograd.grad(loss, [tape.anchor], start, allow_unused=True)
        if tape.reductions.keep is None:
            tape.reductions.end()
        return loss.detach(), counted.to(loss.device), aux

    def _shares(self, pieces: list[list[Any]]) -> tuple[list[Tensor], list[float]]:
        """Return what each slice counts for, and its share of the mean (in reproducible mode, before the division)."""
        how = self.how
        if how.weight is None:
            share = 1.0 if how.slices is not None else 1.0 / (self.n * len(pieces))
            return [torch.ones((), dtype=torch.float64)] * len(pieces), [share] * len(pieces)
        counts = [torch.as_tensor(how.weight(unflatten(self.batch, piece)), dtype=torch.float64) for piece in pieces]
        if counts[0].is_meta:
            return counts, [1.0] * len(pieces)
        total = torch.stack(counts).sum()
        if how.slices is not None:
            return counts, [float(count) for count in counts]
        total = summed(total, self._group(), self.tape.site)
        return counts, [float(count / total) for count in counts]

    def _group(self) -> Group | None:
        return require("value_and_grad").group(self.axes, "value_and_grad") if self.n > 1 else None

    def _together(self, losses: list[tuple[Tensor, Tensor, PyTree]], count: int) -> tuple[Value, list[Tensor | None]]:
        """Average over slices and devices; a parameter that no device used has no gradient."""
        how, tape = self.how, self.tape
        flat = [_numbers(aux) for _, _, aux in losses]
        near = losses[0][0].device
        rows = [
            torch.cat([x.detach().to(near, torch.float64).reshape(-1) for x in (loss, torch.ones(()), *leaves)])
            .where(counted != 0, 0.0)  # a mean over nothing is no number
            .mul(counted)
            for (loss, counted, _), (leaves, _) in zip(losses, flat, strict=True)
        ]
        while len(rows) > 1:  # the tree of the slices
            rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=False)] + rows[len(rows) // 2 * 2 :]
        mark = zlib.crc32(repr(tape.sequence).encode()) % (1 << 20)
        more = [
            float(mark),
            float(mark**2),
            *(float(unit.kept is not None) for unit in tape.units),
            *map(float, tape.reductions.used),
        ]
        own = torch.cat([rows[0], torch.tensor(more, dtype=torch.float64, device=near)])
        both = summed(own, self._group(), tape.site)
        total, weight = both[:2].unbind()
        marks, squares, *flags = more if both.is_meta else both[rows[0].numel() :].tolist()
        if not both.is_meta and marks**2 != self.n * squares:
            raise MismatchError(self._another_order(near))
        kept, used = flags[: len(tape.units)], flags[len(tape.units) :]
        tape.reductions.rest(kept, used)
        divisor = float(weight) if how.slices is not None and not both.is_meta else 1.0
        grads = [
            (g if divisor == 1.0 else g / divisor) if g is not None and times else None
            for g, times in zip(tape.reductions.sums, used, strict=True)
        ]
        leaves, structure = flat[0]
        means = (both[2 : rows[0].numel()] / weight).split([x.numel() for x in leaves])
        aux = unflatten(structure, [mean.reshape(x.shape).to(x) for mean, x in zip(means, leaves, strict=True)])
        value = Value((total / weight).to(torch.promote_types(losses[0][0].dtype, torch.float32)), weight, aux)
        return value, grads

    def _another_order(self, near: torch.device) -> str:
        group, tape = self._group(), self.tape
        assert group is not None
        sequences = exchanged(tape.sequence, group, tape.site, near)
        known = disagreement(tape.scope.mesh, sequences, tape.words())
        return f"value_and_grad: devices gathered different units, so one was given another's values: {known}"


def _numbers(aux: PyTree) -> tuple[list[Tensor], Any]:
    """Return the leaves of what a loss function returns beside the loss, as tensors."""
    paths, leaves, structure = flatten_with_paths(aux)
    wrong = [
        f"aux{path} is {type(x).__name__}"
        for path, x in zip(paths, leaves, strict=True)
        if not isinstance(x, Tensor | int | float)
    ]
    if wrong:
        raise LayoutError(
            f"has_aux: {'; '.join(wrong)}. What is returned beside the loss is averaged: give tensors or numbers."
        )
    return [torch.as_tensor(x) for x in leaves], structure


def _converted(x: Any, compute: torch.dtype | None) -> Any:
    return x.to(compute) if compute is not None and isinstance(x, Tensor) and x.is_floating_point() else x


def _cut(parts: list[Any], cut: list[bool], count: int) -> list[list[Any]]:
    """Cut the tensors of a batch that hold samples into slices; what is whole on every device is in every slice."""
    if count == 1:
        return [parts]
    wrong = sorted({tuple(x.shape) for x, one in zip(parts, cut, strict=True) if one and x.shape[0] % count})
    if wrong or not any(cut):
        raise LayoutError(
            f"each device's part of the batch is to be cut into {count} slices, but has "
            + (
                f"tensors of shape {', '.join(map(str, wrong))}"
                if wrong
                else "no tensor whose first dim is cut by its spec"
            )
            + ". Give a batch whose first dim they divide."
        )
    chunks = [x.chunk(count) if one else (x,) * count for x, one in zip(parts, cut, strict=True)]
    return [[chunk[place] for chunk in chunks] for place in range(count)]


class Forest:
    """Gradients of slices, added in one binary tree: two trees of one height become one of the next.

    slices   0 1 2 3 4 5 6 7    ->    ((0+1)+(2+3)) + ((4+5)+(6+7))
    """

    def __init__(self) -> None:
        self._now: dict[Unit, list[Tensor | None]] = {}
        self._trees: dict[Unit, list[tuple[int, list[Tensor | None]]]] = {}

    def plant(self, unit: Unit, gs: list[Tensor | None]) -> None:
        """Take what one use of a unit gave in this slice."""
        known = self._now.get(unit)
        self._now[unit] = gs if known is None else _added(known, gs)

    def grow(self) -> None:
        """End a slice."""
        for unit, gs in self._now.items():
            trees = self._trees.setdefault(unit, [])
            trees.append((0, gs))
            while len(trees) > 1 and trees[-1][0] == trees[-2][0]:
                (height, left), (_, right) = trees[-2:]
                trees[-2:] = [(height + 1, _added(left, right))]
        self._now = {}

    def harvest(self, unit: Unit) -> list[Tensor | None] | None:
        """Return the sum of a unit's gradients."""
        trees = [tree for _, tree in self._trees.pop(unit, [])]
        while len(trees) > 1:
            trees[-2:] = [_added(trees[-2], trees[-1])]
        return trees[0] if trees else None


def _added(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]
