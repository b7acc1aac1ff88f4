"""Laying tensors on a mesh: `device_put`, `reshard`, `unshard`.

Each is a function of one device, made of collectives and local moves that know their transpose, and run on every
device that the caller stands for.  `plan` chooses the steps, `steps` takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fshard.errors import FshardError, LayoutError, MeshError
from fshard.mesh import ledger
from fshard.mesh.differentiate import LinearMap, Tensors, apply, recorded, transformed
from fshard.mesh.layout import Layout, Memory, holders
from fshard.mesh.ledger import Row
from fshard.mesh.mapped import run_mapped
from fshard.mesh.mesh import Mesh
from fshard.mesh.sharded import Sharded, in_memory
from fshard.mesh.spmd import held, inside, is_outside, standing
from fshard.mesh.steps import Way, convert, go, steps_between, wire_of
from fshard.mesh.sums import tree_sum
from fshard.mesh.tree import PyTree, broadcast_prefix, flatten_with_paths, map_leaves, unflatten
from fshard.source import Site, call_site

# -- between one tensor outside and a replicated one on all devices -----------------------------------------------


@dataclass(frozen=True)
class Fanout:
    """Hand a tensor to all n devices, as the replicated value that it is.  Its cotangents are equal: one is taken."""

    n: int

    def run(self, xs: Tensors) -> Tensors:
        """Alias it n times."""
        return xs * self.n

    def transposed(self) -> LinearMap:
        """Return the map that takes one."""
        return First(self.n)

    def batched(self) -> LinearMap:
        """Return itself."""
        return self


@dataclass(frozen=True)
class First:
    """Take a replicated value from the first of n devices; the cotangent is replicated again."""

    n: int

    def run(self, xs: Tensors) -> Tensors:
        """Take the first."""
        return xs[:1]

    def transposed(self) -> LinearMap:
        """Return the map that hands out the cotangent."""
        return Fanout(self.n)

    def batched(self) -> LinearMap:
        """Return itself."""
        return self


def on_all(x: Tensor, layout: Layout) -> Tensors:
    """Return a global value as the replicated shards of the devices held here."""
    x = in_memory(x, layout.mesh, "device")
    return apply(Fanout(layout.mesh.size), (x,)) if is_outside(layout.mesh) else (x,)


# -- what the user calls ----------------------------------------------------------------------------------------


def _each_leaf(what: str, tree: PyTree, layouts: PyTree, act: Callable[[Any, Layout], Any]) -> PyTree:
    """Apply to every leaf of a tree the layout that a prefix tree of layouts has for it; collect what is wrong."""
    paths, leaves, structure = flatten_with_paths(tree, sharded_is_leaf=True)
    try:
        chosen = broadcast_prefix(layouts, tree)
    except ValueError:
        raise LayoutError(f"{what}: the layouts {layouts!r} are no prefix of the tree {structure}.") from None
    results: list[Any] = []
    with collected(what) as attempt:
        for path, leaf, layout in zip(paths, leaves, chosen, strict=True):
            with attempt(path):
                if not isinstance(layout, Layout):
                    raise LayoutError(
                        f"a Layout is needed, found {type(layout).__name__}. Write fs.Layout(mesh, P(...))."
                    )
                own = layout.on(standing(layout.mesh))
                refuse_unfit(leaf, own)
                results.append(act(leaf, own))
    return unflatten(structure, results)


def refuse_unfit(leaf: Any, layout: Layout) -> None:
    """Raise if a leaf cannot lie so."""
    if not isinstance(leaf, Tensor | Sharded):
        raise LayoutError(f"a tensor is needed, found {type(leaf).__name__}. Write torch.as_tensor(...) around it.")
    layout.check(leaf.shape)


@contextmanager
def collected(what: str) -> Generator[Callable[[str], Any]]:
    """Collect the errors of several attempts, of axes that a mesh lacks too, and raise them as one, with the path of each."""
    complaints: list[str] = []
    kinds: set[type[FshardError]] = set()

    @contextmanager
    def attempt(path: str) -> Generator[None]:
        try:
            yield
        except (LayoutError, MeshError) as error:
            kinds.add(type(error))
            complaints.append(f"{path}: {error}" if path else str(error))

    yield attempt
    if complaints:
        kind = MeshError if kinds == {MeshError} else LayoutError
        raise kind(f"{what}: " + ("\n  " if len(complaints) > 1 else "") + "\n  ".join(complaints))


def device_put(tree: PyTree, layout: PyTree) -> PyTree:
    """Lay global values on a mesh.  Nothing is sent: every process is given the whole value and keeps its piece.

    Args:
        tree: a tensor or tree of tensors, the same on every process; a `Sharded` is resharded.
        layout: a layout, or a tree of layouts that is a prefix of `tree`.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4, "model": 2})
    >>> x = device_put(torch.arange(8.0), fs.Layout(mesh, P("data")))
    >>> fs.typeof(x), x.shards[2]
    (f32[8@data], tensor([2., 3.]))
    """
    site = call_site()

    def put(x: Any, to: Layout) -> Sharded:
        return _reshard(x, to, site) if isinstance(x, Sharded) else _put(x, to, site)

    return _each_leaf("device_put", tree, layout, put)


def _put(x: Tensor, layout: Layout, site: Site) -> Sharded:
    shape = tuple(x.shape)

    def program(device: int, xs: Tensors) -> Tensors:
        piece = convert(xs[0], Layout(layout.mesh), layout, shape, site)
        return (piece.clone(memory_format=torch.contiguous_format),)  # a shard owns its memory

    (shards,) = run_mapped(layout.mesh, program, [on_all(x, layout)])
    return _with_memory(Sharded(shape, layout, shards), layout.memory)


def _with_memory(x: Sharded, memory: Memory) -> Sharded:
    """Return the same with its shards in the devices' memory, or in the host's, which they may be in."""
    if "host" not in (memory, x.layout.memory):
        return x
    return Sharded(x.shape, x.layout, tuple(in_memory(shard, x.mesh, memory) for shard in x.shards))


def reshard(tree: PyTree, layout: PyTree) -> PyTree:
    """Lay global arrays differently on the same mesh, by the cheapest collectives that lead there.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4})
    >>> x = fs.device_put(torch.arange(16.0).reshape(4, 4), fs.Layout(mesh, P("data")))
    >>> with fs.ledger() as comm:
    ...     y = reshard(x, fs.Layout(mesh, P(None, "data")))
    >>> fs.typeof(y), comm.by_collective()
    (f32[4, 4@data], {('all_to_all', ('data',)): (1, Fraction(12, 1))})
    """
    site = call_site()
    given: list[tuple[Sharded, Layout]] = []

    def note(x: Any, to: Layout) -> int:
        given.append((_movable(x, to), to))
        return len(given) - 1

    places = _each_leaf("reshard", tree, layout, note)
    moved = reshard_all([x for x, _ in given], [to for _, to in given], site)
    return map_leaves(lambda place: moved[place], places)


def _movable(x: Any, layout: Layout) -> Sharded:
    if not isinstance(x, Sharded):
        raise LayoutError(f"a Sharded is needed, found {type(x).__name__}. Lay tensors on a mesh with fs.device_put.")
    if x.mesh != layout.mesh:
        raise LayoutError(
            f"the tensor lies on {x.mesh} and cannot be moved to {layout.mesh}. Take it off with fs.unshard first."
        )
    x.check()
    return x


def reshard_all(xs: Sequence[Sharded], layouts: Sequence[Layout], site: Site) -> list[Sharded]:
    """Lay global arrays differently on their mesh, those that go the same way together; what is one stays one."""
    keys = [(tuple(map(id, x.shards)), to) for x, to in zip(xs, layouts, strict=True)]
    moved = dict(zip(keys, xs, strict=True))
    on_mesh: dict[Mesh, list[tuple[tuple[int, ...], Layout]]] = {}
    for key, x in moved.items():
        if x.layout is not key[1] and x.layout != key[1]:
            on_mesh.setdefault(x.mesh, []).append(key)
    for mesh, some in on_mesh.items():
        given = [moved[key] for key in some]
        _refuse_owned(given, mesh)
        ways = [Way(steps_between(x.layout, key[1], x.shape), x.shape) for key, x in zip(some, given, strict=True)]
        columns = [_with_memory(x, "device").shards for x in given]
        if any(way.steps for way in ways):

            def program(device: int, own: Tensors, ways: Sequence[Way] = ways) -> Tensors:
                return tuple(go(own, ways, site)())

            columns = run_mapped(mesh, program, columns)
        for key, x, shards in zip(some, given, columns, strict=True):
            moved[key] = _with_memory(Sharded(x.shape, key[1], tuple(shards)), key[1].memory)
    return [moved[key] for key in keys]


def _refuse_owned(xs: Sequence[Sharded], mesh: Mesh) -> None:
    """Raise if these depend on parameters in a loss function, where a value is no global one but the device's own."""
    scope = inside(mesh)
    if scope is not None and scope.own and any(recorded(x.shards) for x in xs):
        raise LayoutError(
            "a tensor that depends on parameters is laid out differently in a loss function of value_and_grad, where every "
            "value is the device's own. Use collectives: fs.all_gather(x, axis) for the whole, x.chunk(n, dim)[fs.axis_index("
            "axis)] for the own piece."
        )


def _reshard(x: Sharded, layout: Layout, site: Site) -> Sharded:
    return reshard_all([_movable(x, layout)], [layout], site)[0]


def unshard(tree: PyTree) -> PyTree:
    """Return the whole of global arrays, as plain tensors; on a process mesh, on every process.  All else stays as it is.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 4})
    >>> unshard(fs.device_put(torch.arange(4), fs.Layout(mesh, P("data"))))
    tensor([0, 1, 2, 3])
    """
    site = call_site()
    return map_leaves(lambda x: _unshard(x, site), tree)


def _unshard(x: Any, site: Site) -> Any:
    if not isinstance(x, Sharded):
        return x
    x.check()
    if is_outside(x.mesh) and not transformed() and not recorded(x.shards):
        return _assemble(x, site)
    whole = _reshard(x, Layout(x.mesh), site)
    return apply(First(len(whole.shards)), whole.shards)[0]


def _assemble(x: Sharded, site: Site) -> Tensor:
    """Put shards together from outside, where all are at hand; the ledger counts what devices would send."""
    if ledger.active():
        for device in held(x.mesh):
            _charge(x, device, site)
    devices = holders(x.layout)
    first = x.shards[devices[0]]
    whole = first.new_empty(prod(x.shape) if x.spec.is_flat else x.shape)
    for device in devices:
        piece = tree_sum([x.shards[other] for other in _summands(x.layout, device)])
        whole[tuple(slice(start, stop) for start, stop in x.layout.ranges(x.shape, device))] = piece
    return in_memory(whole.reshape(x.shape), x.mesh, "device")


def _summands(layout: Layout, device: int) -> list[int]:
    """Return the devices whose shards add up to the piece that `device` is the first holder of."""
    places = [{}]
    for axis in layout.spec.unreduced:
        places = [{**place, axis: index} for place in places for index in range(layout.mesh.shape[axis])]
    return [layout.mesh.index({**layout.mesh.coordinates(device), **place}) for place in places]


def _charge(x: Sharded, device: int, site: Site) -> None:
    """Write into the ledger what one device would send to have the whole."""
    for step in steps_between(x.layout, Layout(x.mesh), x.shape):
        move = wire_of(step)
        if move is not None:
            for opened in ledger.active():
                opened.record(device, Row(move.name, step.axes, site), step.elements * x.shards[0].element_size())
