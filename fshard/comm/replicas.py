"""Training steps of replicas that differ: local steps (local SGD, DiLoCo) and gossip.

`inner` is a step on the mesh of one replica, `mesh["gpu"]`. Trees of all replicas have a first dim, sharded along `axis`:

    one replica     f32[64, 16]            on mesh["gpu"]     each device of a replica runs `inner` on its shards,
    all             f32[4@node, 64, 16]    on mesh            and then a rule that combines replicas
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.comm.compressor import Compressor
from fshard.comm.graph import Graph, mix
from fshard.errors import LayoutError
from fshard.mesh.collectives.api import axis_index, axis_size, pmean, pmin, psum
from fshard.mesh.layout import Layout, Mesh, P, PyTree, Structure, flatten, map_leaves, unflatten
from fshard.mesh.layout.sharded import Sharded, flatten_shards
from fshard.mesh.reshard.device_put import unshard
from fshard.mesh.spmd.run import local_devices, resolve_mesh, run_on_devices
from fshard.optim.arguments import validate, within
from fshard.optim.contract import Optimizer, step_of
from fshard.optim.leaves import count_from_zero


class ReplicaRule(NamedTuple):
    """Functions that follow the inner step on each device, of trees of one replica.

    Args:
        init: from parameters to the rule's state.
        act: from the parameters before and after the inner step, the rule's state and the number of this step, from 1, to the
            parameters and the state.
    """

    init: Callable[[PyTree], PyTree]
    act: Callable[[PyTree, PyTree, PyTree, int], tuple[PyTree, PyTree]]


class ReplicaStep:
    """A step of (params, state, batch) of all replicas; `init` makes the first two arguments.

    The batch is that of all replicas: each gets an equal part of its rows, in order. The metrics are means over the replicas,
    but for "finite" (of all) and "samples" (their sum).
    """

    def __init__(self, inner: Callable[..., Any], mesh: Mesh, axis: str, rule: ReplicaRule) -> None:
        if not callable(getattr(inner, "init", None)):
            raise ValueError(f"inner must be a step of fs.train_step, on the mesh of one replica; got {inner!r}.")
        mesh.check_axes(axis, "axis=")
        self._inner, self._mesh, self._axis, self._rule = inner, mesh, axis, rule
        self._replica = mesh[tuple(name for name in mesh.axis_names if name != axis)]
        self._is_array: dict[Structure, list[bool]] = {}

    def init(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Return the parameters of all replicas and the state, from parameters that are replicated along the axis."""
        trees = self._on_devices(lambda: self._first(params))
        return self._joined([tree for tree, _ in trees]), self._joined([state for _, state in trees])

    def _first(self, params: PyTree) -> tuple[PyTree, PyTree]:
        own = map_leaves(self._own, params)
        return own, {"inner": self._inner.init(own), "rule": self._rule.init(own), "count": count_from_zero()}  # pyright: ignore[reportFunctionMemberAccess]

    def _own(self, x: Any) -> Any:
        if not isinstance(x, Sharded):
            raise LayoutError("init: parameters must be arrays, as fs.shard_params(params, P(), mesh=mesh) makes them.")
        if self._axis in x.spec.axes:
            raise LayoutError(f"init: parameters must be replicated along {self._axis}; got {x!r}.")
        return Sharded(
            x.shape, Layout(self._here, x.spec, x.layout.memory, x.layout.unit, x.layout.frozen), (self._shard(x),)
        )

    def __call__(self, params: PyTree, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree, dict[str, Any]]:
        def on_device() -> tuple[PyTree, PyTree, dict[str, Any]]:
            before, held = self._split(params), self._split(state)
            after, inner, metrics = self._inner(before, held["inner"], map_leaves(self._rows, batch))
            count = held["count"] + 1
            after, rule = self._rule.act(before, after, held["rule"], int(count))
            return after, {"inner": inner, "rule": rule, "count": count}, self._combined(metrics)

        results = self._on_devices(on_device)
        params, state = (self._joined([result[i] for result in results]) for i in (0, 1))
        return params, state, results[0][2]

    # -- one device -----------------------------------------------------------------------------------------------------

    def _on_devices(self, body: Callable[[], Any]) -> list[Any]:
        return run_on_devices(resolve_mesh(self._mesh), lambda _: body(), mapped=(self._axis,))

    @property
    def _here(self) -> Mesh:
        """The mesh of this device's replica."""
        return resolve_mesh(self._replica)

    def _shard(self, x: Sharded) -> Tensor:
        return x.shards[device_index(self._mesh) if len(x.shards) > 1 else 0]

    def _rows(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.ndim:
            return x
        n, index = axis_size(self._axis), axis_index(self._axis)
        return x[len(x) * index // n : len(x) * (index + 1) // n]

    def _combined(self, metrics: dict[str, Any]) -> dict[str, Any]:
        finite, samples = metrics["finite"], metrics.get("samples")
        numbers = {name: x for name, x in metrics.items() if name not in ("finite", "samples")}
        mean = pmean(map_leaves(lambda x: x if x.is_floating_point() else x.double(), numbers), self._axis)
        mean["finite"] = pmin(torch.as_tensor(finite).to(torch.uint8), self._axis).bool()
        return mean if samples is None else {**mean, "samples": psum(samples, self._axis)}

    # -- trees of one replica, and of all -------------------------------------------------------------------------------

    def _split(self, tree: PyTree) -> PyTree:
        """Return the tree of this device's replica."""
        leaves, structure = flatten(tree)
        kinds = self._is_array.get(structure)
        if kinds is None:
            raise LayoutError("the step must be called with trees like those of its `init`. Call init first.")
        return unflatten(structure, [self._take(x, is_array) for x, is_array in zip(leaves, kinds, strict=True)])

    def _take(self, x: Any, is_array: bool) -> Any:
        if not isinstance(x, Sharded):
            return x
        shard, spec = self._shard(x), x.spec
        shard = shard if spec.is_flat else shard[0]
        if not is_array:
            return shard
        inner = P(*spec.entries[1:], unreduced=spec.unreduced, at=dict(spec.at))
        inner = inner.flattened(*spec.flat_axes) if spec.flat_axes is not None else inner
        layout = Layout(self._here, inner, x.layout.memory, x.layout.unit, x.layout.frozen)
        return Sharded(x.shape[1:], layout, (shard,))

    def _joined(self, trees: list[PyTree]) -> PyTree:
        """Return the tree of all replicas from those of the devices held here."""
        structure, columns = flatten(trees[0])[1], zip(*[flatten(tree)[0] for tree in trees], strict=True)
        leaves = [*map(self._join, columns)]
        self._is_array[structure] = [isinstance(x, Sharded) for x in flatten(trees[0])[0]]
        return unflatten(structure, leaves)

    def _join(self, column: tuple[Any, ...]) -> Any:
        first, n, mesh = column[0], self._mesh.shape[self._axis], resolve_mesh(self._mesh)
        if isinstance(first, Sharded):
            spec, layout = first.spec, first.layout
            outer = P(self._axis, *spec.entries, unreduced=spec.unreduced, at=dict(spec.at))
            outer = outer.flattened(*spec.flat_axes) if spec.flat_axes is not None else outer
            shards = [x.shards[0] if spec.is_flat else x.shards[0][None] for x in column]
            return Sharded(
                (n, *first.shape), Layout(mesh, outer, layout.memory, layout.unit, layout.frozen), tuple(shards)
            )
        if isinstance(first, Tensor):
            return Sharded((n, *first.shape), Layout(mesh, P(self._axis)), tuple([x[None] for x in column]))
        return first


def device_index(mesh: Mesh) -> int:
    """Return the index of the calling device among those of a mesh."""
    return local_devices(mesh)[0]


def mean(params: PyTree) -> PyTree:
    """Return the mean of all replicas, as plain tensors."""
    return map_leaves(lambda x: unshard(x).mean(0), params)


def _each(function: Callable[..., Any], tree: PyTree, *trees: PyTree) -> PyTree:
    """Apply a function of lists of tensors to the shards of arrays of one replica."""
    shards, structure = flatten_shards(tree)
    return structure.unflatten(function(shards, *[flatten_shards(each)[0] for each in trees]))


def local_sgd(inner: Callable[..., Any], *, every: int, mesh: Mesh, axis: str, after: int = 0) -> ReplicaStep:
    """Average the parameters of replicas every few steps (Stich 2018; post-local SGD, Lin 2018).

    Args:
        inner: a step of `train_step` on the mesh of one replica.
        every: steps between averages.
        mesh: all devices.
        axis: along which the replicas are.
        after: number of first steps that are each followed by an average.
    """
    validate("local_sgd", within("[1, inf)", integer=True, every=every), within("[0, inf)", integer=True, after=after))

    @torch.no_grad()
    def act(before: PyTree, params: PyTree, state: PyTree, count: int) -> tuple[PyTree, PyTree]:
        is_due = count <= after or (count - after) % every == 0
        return (_each(lambda xs: pmean(xs, axis), params) if is_due else params), state

    return ReplicaStep(inner, mesh, axis, ReplicaRule(lambda params: {}, act))


def diloco(
    inner: Callable[..., Any],
    outer: Optimizer,
    *,
    every: int,
    mesh: Mesh,
    axis: str,
    compress: Compressor | None = None,
) -> ReplicaStep:
    """Take a step of an outer optimizer along the mean change of the replicas' parameters (Douillard 2023).

    gradient of the outer optimizer = parameters at the last such step - mean of the replicas' parameters

    Args:
        inner: a step of `train_step` on the mesh of one replica.
        outer: an elementwise optimizer, such as `fs.optim.sgd(0.7, momentum=0.9, nesterov=True)`.
        every: steps between those of the outer optimizer.
        mesh: all devices.
        axis: along which the replicas are.
        compress: the compressor of the changes; None: they are averaged by pmean.
    """
    validate("diloco", within("[1, inf)", integer=True, every=every))
    write = step_of(outer)

    def init(params: PyTree) -> PyTree:
        anchor = map_leaves(lambda x: x, params)
        state = {"anchor": anchor, "outer": outer.init(anchor)}
        return state if compress is None else {**state, "compress": compress.init(flatten_shards(params)[0])}

    @torch.no_grad()
    def act(before: PyTree, params: PyTree, state: PyTree, count: int) -> tuple[PyTree, PyTree]:
        if count % every:
            return params, state
        change = _each(lambda xs, ys: [x - y for x, y in zip(xs, ys, strict=True)], state["anchor"], params)
        compressed: dict[str, PyTree] = {}
        if compress is None:
            grads = _each(lambda xs: pmean(xs, axis), change)
        else:
            shards, structure = flatten_shards(change)
            total, _, compressed["compress"] = compress.reduce(shards, state["compress"], axis)
            grads = structure.unflatten([x / axis_size(axis) for x in total])
        anchor, outer_state = write(grads, state["outer"], _each(lambda xs: [x.clone() for x in xs], state["anchor"]))
        after = _each(lambda xs: [x.clone() for x in xs], anchor)
        return after, {"anchor": anchor, "outer": outer_state, **compressed}

    return ReplicaStep(inner, mesh, axis, ReplicaRule(init, act))


def gossip(inner: Callable[..., Any], graph: Graph, *, mesh: Mesh, axis: str) -> ReplicaStep:
    """Average with neighbours in each step (D-PSGD, Lian 2017): params = mix(params) + the inner step's change.

    Args:
        inner: a step of `train_step` on the mesh of one replica.
        graph: who averages with whom, such as `ring(n)`.
        mesh: all devices.
        axis: along which the replicas are.
    """
    _validate_graph("gossip", graph, mesh, axis)

    @torch.no_grad()
    def act(before: PyTree, params: PyTree, state: PyTree, count: int) -> tuple[PyTree, PyTree]:
        def mixed(old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
            averages = mix(old, graph, count - 1, axis)
            return [average + (y - x) for average, x, y in zip(averages, old, new, strict=True)]

        return _each(mixed, before, params), state

    return ReplicaStep(inner, mesh, axis, ReplicaRule(lambda params: {}, act))


def push_sum(inner: Callable[..., Any], graph: Graph, *, mesh: Mesh, axis: str) -> ReplicaStep:
    """Divide the step's result among neighbours (stochastic gradient push, Assran 2019), for graphs with one-way edges.

    Parameters times a weight, and the weight itself, are divided by the rows of the graph, so that their sums over the
    replicas stay; the parameters are their quotient.

    Args:
        inner: a step of `train_step` on the mesh of one replica.
        graph: who sends to whom: entry (i, j) is the share that i sends to j.
        mesh: all devices.
        axis: along which the replicas are.
    """
    _validate_graph("push_sum", graph, mesh, axis)

    @torch.no_grad()
    def act(before: PyTree, params: PyTree, state: PyTree, count: int) -> tuple[PyTree, PyTree]:
        weight = state["weight"]
        sent = mix(weight, graph, count - 1, axis, push=True)

        def divided(old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
            summands = [x * weight.to(x.dtype) + (y - x) for x, y in zip(old, new, strict=True)]
            return [x / sent.to(x.dtype) for x in mix(summands, graph, count - 1, axis, push=True)]

        return _each(divided, before, params), {"weight": sent}

    return ReplicaStep(
        inner, mesh, axis, ReplicaRule(lambda params: {"weight": torch.ones((), dtype=torch.float64)}, act)
    )


def _validate_graph(function: str, graph: Graph, mesh: Mesh, axis: str) -> None:
    n = mesh.shape[mesh.check_axes(axis, f"{function}(axis=)")[0]]
    if graph.size != n:
        raise ValueError(
            f"{function}: graph must be of {n} devices, those along {axis}; got {graph.name} of {graph.size}."
        )
