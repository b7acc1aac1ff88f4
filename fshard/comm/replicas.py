"""Training steps of replicas that differ: local steps (local SGD, DiLoCo) and gossip.

`inner` is a step on the mesh of one replica, `mesh["gpu"]`. Trees of all replicas have a first dim, sharded along `axis`:

    one replica     f32[64, 16]            on mesh["gpu"]     each device of a replica runs `inner` on its shards,
    all             f32[4@node, 64, 16]    on mesh            and around it a rule that combines replicas
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.comm.compressor import Compressor
from fshard.comm.graph import Graph, mix, start_mix
from fshard.errors import LayoutError
from fshard.mesh.collectives.api import axis_index, axis_size, broadcast, pmean, pmin, psum
from fshard.mesh.layout import Layout, Mesh, PyTree, flatten_with_paths, map_leaves
from fshard.mesh.layout.sharded import Sharded, key_of, stack, unstack
from fshard.mesh.reshard.device_put import unshard
from fshard.mesh.spmd.global_inputs import compare_inputs
from fshard.mesh.spmd.run import local_devices, resolve_mesh, run_on_devices
from fshard.optim.arguments import validate, within
from fshard.optim.contract import Optimizer, copied, pure_step
from fshard.optim.leaves import Leaf, Leaves, count_from_zero, each_shard, like, trainable
from fshard.optim.per_device.run import device_optimizer
from fshard.transforms.train_step import TrainStep

Arrays = list[Sharded]
"""Parameters of one replica on one device: those that are trained, of tied ones the first."""
Combining = Generator[Any, list[Tensor], None]
Rule = Callable[[list[Tensor], PyTree, int], Combining]
_NUMBER = "number"  # the unit of arrays that are plain tensors of the devices


class ReplicaGroup(NamedTuple):
    """The replicas along an axis, which a rule combines around each step.

    Args:
        mesh: all devices.
        axis: along which the replicas are.
        rule: on each device, from the shards of parameters, the state and the number of a step, from 1, to a generator: it
            yields for the step, whose shards it is sent; then it yields the next shards and state.
    """

    mesh: Mesh
    axis: str
    rule: Rule

    def run(
        self, params: PyTree, state: PyTree, count: int, step: Callable[[], Any]
    ) -> tuple[Any, ...]:
        """Return the parameters that a step returns first, combined, the rule's state, and the step's other results."""
        rule = self.rule(_shards(_trained(params)), state, count)
        with torch.no_grad():
            next(rule)
        after, *results = step()
        with torch.no_grad():
            shards, state = rule.send(_shards(_trained(after)))
        arrays = {
            key_of(x): like(x, (shard,)) for x, shard in zip(_trained(after), shards, strict=True)
        }
        return Leaves.of(after).mapped(lambda x: arrays.get(key_of(x), x)), state, *results

    def local(self, tree: PyTree, mesh: Mesh) -> PyTree:
        """Return the tree of this device's replica, on its mesh."""
        device = local_devices(resolve_mesh(self.mesh))[0]

        def local(x: Leaf) -> Leaf:
            if not isinstance(x, Sharded):
                return x
            shard = x.shards[device if len(x.shards) > 1 else 0]
            x = unstack(Sharded(x.shape, x.layout, (shard,)), self.axis, mesh)
            return x.shards[0] if x.layout.unit == _NUMBER else x

        return Leaves.of(tree).mapped(local)

    def joined(self, trees: Sequence[PyTree]) -> PyTree:
        """Return the tree of all replicas from those of the devices here; numbers that are one tensor become several."""
        mesh = resolve_mesh(self.mesh)
        number = Layout(mesh, unit=_NUMBER)

        def joined(x: Leaf, *xs: Leaf) -> Leaf:
            shards = tuple([y.shards[0] if isinstance(y, Sharded) else y for y in (x, *xs)])
            layout = x.layout if isinstance(x, Sharded) else number
            return x if x is None else stack(Sharded(x.shape, layout, shards), self.axis, mesh)

        trees = [
            map_leaves(lambda x: x.clone() if isinstance(x, Tensor) else x, tree) for tree in trees
        ]
        return Leaves.of(trees[0]).mapped(joined, *[Leaves.of(tree).leaves for tree in trees[1:]])

    def mean(self, tree: PyTree) -> PyTree:
        """Return the mean of the replicas' trees, from this device's; of integers the first replica's."""

        def mean_shard(x: Tensor) -> Tensor:
            return pmean(x, self.axis) if x.is_floating_point() else broadcast(x, self.axis)

        return run_on_devices(resolve_mesh(self.mesh), lambda _: each_shard(mean_shard, tree))[0]


class ReplicaStep:
    """A step of (params, state, batch) of all replicas; `init` makes the first two arguments.

    The batch is that of all replicas: each gets an equal part of its rows, in order. The metrics are means over the replicas,
    but for "finite" (of all) and "samples" (their sum).

    Args:
        inner: a step of `train_step` on the mesh of one replica.
        mesh: all devices.
        axis: along which the replicas are.
        init: on each device, from parameters to the state of the rule.
        rule: see `ReplicaGroup`.
    """

    def __init__(self, inner: TrainStep, mesh: Mesh, axis: str, init: Any, rule: Rule) -> None:
        if not isinstance(inner, TrainStep):
            raise ValueError(
                f"inner must be a step of fs.train_step, on the mesh of one replica; got {inner!r}."
            )
        mesh.check_axes(axis, "axis=")
        self._inner, self._mesh, self._axis, self._init = inner, mesh, axis, init
        self._replicas = ReplicaGroup(mesh, axis, rule)
        self._replica = mesh[tuple(name for name in mesh.axis_names if name != axis)]

    def init(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Return the parameters of all replicas and the state, from parameters that are replicated along the axis."""
        arrays = dict(zip(*flatten_with_paths(params)[:2], strict=True))
        for path, x in arrays.items():
            if not isinstance(x, Sharded) or self._axis in x.spec.axes:
                raise LayoutError(
                    f"init: parameters must be arrays, replicated along {self._axis}; got {x!r} for {path}. "
                    "Make them by fs.shard_params; of replicas take fs.comm.mean."
                )
        compare_inputs(
            "init", self._mesh, {path: x.shards for path, x in arrays.items()}, (self._axis,)
        )
        replicas = Leaves.of(params).mapped(lambda x: x if x is None else stack(x, self._axis))

        def on_device(_: int) -> PyTree:
            tree = self._replicas.local(replicas, resolve_mesh(self._replica))
            return {
                "inner": self._inner.init(tree),
                "rule": self._init(_trained(tree)),
                "count": count_from_zero(),
            }

        return replicas, self._replicas.joined(
            run_on_devices(resolve_mesh(self._mesh), on_device, mapped=(self._axis,))
        )

    def __call__(
        self, params: PyTree, state: PyTree, batch: PyTree
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        def on_device(_: int) -> tuple[PyTree, PyTree, dict[str, Any]]:
            before, local_state = self._replicas.local((params, state), resolve_mesh(self._replica))
            count, rows = local_state["count"] + 1, map_leaves(self._rows, batch)
            after, rule_state, inner, metrics = self._replicas.run(
                before,
                local_state["rule"],
                int(count),
                lambda: self._inner(before, local_state["inner"], rows),
            )
            return (
                after,
                {"inner": inner, "rule": rule_state, "count": count},
                self._mean_metrics(metrics),
            )

        results = run_on_devices(resolve_mesh(self._mesh), on_device, mapped=(self._axis,))
        all_params, states, metrics = zip(*results, strict=True)
        return self._replicas.joined(all_params), self._replicas.joined(states), metrics[0]

    def _rows(self, x: Any) -> Any:
        return (
            x.tensor_split(axis_size(self._axis))[axis_index(self._axis)]
            if isinstance(x, Tensor) and x.ndim
            else x
        )

    def _mean_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        finite, samples = metrics["finite"], metrics.get("samples")
        numbers = {name: x for name, x in metrics.items() if name not in ("finite", "samples")}
        mean = pmean(
            map_leaves(lambda x: x if x.is_floating_point() else x.double(), numbers), self._axis
        )
        mean["finite"] = pmin(torch.as_tensor(finite).to(torch.uint8), self._axis).bool()
        return mean if samples is None else {**mean, "samples": psum(samples, self._axis)}


def _trained(params: PyTree) -> Arrays:
    return [*{key_of(x): x for x in Leaves.of(params).leaves if trainable(x)}.values()]


def _shards(arrays: Arrays) -> list[Tensor]:
    return [x.shards[0] for x in arrays]


def _arrays(shards: Sequence[Tensor], params: Arrays) -> Arrays:
    return [like(x, (shard,)) for x, shard in zip(params, shards, strict=True)]


def mean(params: PyTree) -> PyTree:
    """Return the mean of all replicas, as plain tensors."""

    def mean_leaf(x: Any) -> Tensor:
        if not isinstance(x, Sharded) or not x.spec.dims(1)[0]:
            raise LayoutError(
                f"mean: params must be those of all replicas, from `init` of their step; got {x!r}."
            )
        unstack(x, x.spec.dims(1)[0])
        return unshard(x).mean(0) if trainable(x) else unshard(x)[0]

    return map_leaves(mean_leaf, params)


def local_sgd(
    inner: TrainStep, *, every: int, mesh: Mesh, axis: str, after: int = 0
) -> ReplicaStep:
    """Average the parameters of replicas every few steps (Stich 2018; post-local SGD, Lin 2018).

    Args:
        inner: a step of `train_step` on the mesh of one replica.
        every: steps between averages.
        mesh: all devices.
        axis: along which the replicas are.
        after: number of first steps that are each followed by an average; `every` counts from there.
    """
    return ReplicaStep(inner, mesh, axis, lambda params: None, local_sgd_rule(axis, every, after))


def local_sgd_rule(axis: str, every: int, after: int = 0) -> Rule:
    """Return the rule of `local_sgd`."""
    validate(
        "local_sgd",
        within("[1, inf)", integer=True, every=every),
        within("[0, inf)", integer=True, after=after),
    )

    def rule(before: list[Tensor], state: PyTree, count: int) -> Combining:
        shards = yield
        yield (
            pmean(shards, axis) if count <= after or (count - after) % every == 0 else shards,
            state,
        )

    return rule


def diloco(
    inner: TrainStep,
    outer: Optimizer,
    *,
    every: int,
    mesh: Mesh,
    axis: str,
    compress: Compressor | None = None,
) -> ReplicaStep:
    """Take outer steps along the replicas' mean change (DiLoCo, Douillard 2023): `streaming_diloco` of one fragment."""
    return streaming_diloco(
        inner, outer, every=every, fragments=1, mesh=mesh, axis=axis, compress=compress
    )


def streaming_diloco(
    inner: TrainStep,
    outer: Optimizer,
    *,
    every: int,
    fragments: int,
    delay: int = 0,
    mix: float = 1.0,
    mesh: Mesh,
    axis: str,
    compress: Compressor | None = None,
) -> ReplicaStep:
    """Take DiLoCo's outer steps for fragments of the parameters in turn (Streaming DiLoCo, Douillard 2025).

    step s            gradient = parameters after the fragment's last outer step - the replica's parameters
    step s + delay    parameters = mix * (outer step along the mean gradient) + (1 - mix) * the replica's parameters

    Args:
        inner: as in `local_sgd`; so are mesh and axis.
        outer: an elementwise optimizer, such as `fs.optim.sgd(0.7, momentum=0.9, nesterov=True)`.
        every: steps between outer steps of a fragment; those of fragment f are f * every // fragments later.
        fragments: number of groups of consecutive parameters, about equally many in each.
        delay: inner steps that follow, fewer than `every`; during the last of them gradients are averaged by pmean.
        mix: weight of the outer step: 1 - alpha of the paper.
        compress: the compressor of the gradients, after the delay; None: pmean.
    """
    errors = within("[1, inf)", integer=True, every=every) + within(
        f"[1, {every}]", integer=True, fragments=fragments
    )
    errors += within(f"[0, {every})", integer=True, delay=delay) + within("[0, 1]", mix=mix)
    validate("streaming_diloco", errors)
    outer_step, compression = pure_step(outer), compress and _compression(compress, axis)

    def due(count: int) -> list[int]:
        steps = [count - f * every // fragments for f in range(fragments)]
        return [f for f, step in enumerate(steps) if step > 0 and step % every == 0]

    def init_fragment(params: Arrays) -> dict[str, PyTree]:
        anchor = copied(params)
        waiting = each_shard(torch.zeros_like, anchor) if delay else None
        compressed = compression and compression.init(anchor)
        return {
            "anchor": anchor,
            "outer": outer.init(anchor),
            "waiting": waiting,
            "compress": compressed,
        }

    def init(params: Arrays) -> list[PyTree]:
        if fragments > max(len(params), 1):
            raise ValueError(
                f"streaming_diloco: fragments must be at most {len(params)}, one a leaf; got {fragments}."
            )
        bounds = pairwise([f * len(params) // fragments for f in range(fragments + 1)])
        return [init_fragment(params[start:end]) for start, end in bounds]

    def start_mean(grads: Arrays, state: PyTree) -> Callable[[], tuple[Arrays, PyTree]]:
        if compression is not None:
            return partial(compression.update, grads, state["compress"], grads)
        means = pmean.start(_shards(grads), axis)
        return lambda: (_arrays(means.wait(), grads), None)

    def rule(before: list[Tensor], state: list[PyTree], count: int) -> Combining:
        means = {f: start_mean(state[f]["waiting"], state[f]) for f in due(count - delay) if delay}
        shards = iter((yield))
        groups, after = [[next(shards) for _ in fragment["anchor"]] for fragment in state], [*state]
        for f in due(count):
            anchor = state[f]["anchor"]
            grads = _arrays(
                [x - y for x, y in zip(_shards(anchor), groups[f], strict=True)], anchor
            )
            after[f] = {**state[f], "waiting": grads if delay else None}
            means |= {} if delay else {f: start_mean(grads, state[f])}
        for f, finish in means.items():
            grads, compressed = finish()
            anchor, outer_state = outer_step(grads, state[f]["outer"], state[f]["anchor"])
            after[f] = {**state[f], "anchor": anchor, "outer": outer_state, "compress": compressed}
            groups[f] = [x.lerp(y, mix) for x, y in zip(groups[f], _shards(anchor), strict=True)]
        yield [x for group in groups for x in group], after

    return ReplicaStep(inner, mesh, axis, init, rule)


def _compression(compress: Compressor, axis: str) -> Optimizer:
    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        total, _, after = compress.reduce(grads, state, axis)
        return map_leaves(lambda x: x / axis_size(axis), total), after

    sharding = "owners" if compress.full else "flat"
    return device_optimizer(Optimizer(compress.init, update, sharding=sharding))


def gossip(inner: TrainStep, graph: Graph, *, mesh: Mesh, axis: str) -> ReplicaStep:
    """Average with neighbours during each step (D-PSGD, Lian 2017): params = mix(params) + the inner step's change.

    Args:
        inner: as in `local_sgd`; so are mesh and axis.
        graph: who averages with whom, such as `ring(n)`.
    """
    return ReplicaStep(inner, mesh, axis, lambda params: None, gossip_rule(axis, graph))


def gossip_rule(axis: str, graph: Graph) -> Rule:
    """Return the rule of `gossip`."""

    def rule(before: list[Tensor], state: PyTree, count: int) -> Combining:
        copies = [x.clone() for x in before]  # the inner step may reuse the memory of its arguments
        averages = start_mix(copies, graph, count - 1, axis)
        shards = yield
        yield (
            [
                average + (y - x)
                for average, x, y in zip(averages.wait(), copies, shards, strict=True)
            ],
            state,
        )

    return rule


def push_sum(inner: TrainStep, graph: Graph, *, mesh: Mesh, axis: str) -> ReplicaStep:
    """Divide the step's result among neighbours (stochastic gradient push, Assran 2019), for graphs with one-way edges.

    Parameters times a weight, and the weight itself, are divided by the rows of the graph, so that their sums over the
    replicas stay; the parameters are their quotient.

    Args:
        inner: as in `local_sgd`; so are mesh and axis.
        graph: who sends to whom: entry (i, j) is the share that i sends to j.
    """

    def rule(before: list[Tensor], weight: Tensor, count: int) -> Combining:
        sums = [x * weight.to(x.dtype) - x for x in before]
        weight_after = mix(weight, graph, count - 1, axis, push=True)
        shards = yield
        sums = mix(
            [x + y for x, y in zip(sums, shards, strict=True)], graph, count - 1, axis, push=True
        )
        yield [x / weight_after.to(x.dtype) for x in sums], weight_after

    return ReplicaStep(inner, mesh, axis, lambda params: torch.ones((), dtype=torch.float64), rule)
