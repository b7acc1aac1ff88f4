"""Training steps of replicas that differ: local steps (local SGD, DiLoCo) and gossip.

`inner` is a step on the mesh of one replica, `mesh["gpu"]`. Trees of all replicas have a first dim,
sharded along `axis`:

    one replica     f32[64, 16]            on mesh["gpu"]     each device of a replica runs `inner`
    all             f32[4@node, 64, 16]    on mesh            on its shards, and a rule around it
                                                              combines replicas

A rule is a generator: it yields once, while the step runs, and then the combined shards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
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
from fshard.randomness import drawn_key
from fshard.transforms.train_step import TrainStep, no_metrics

Arrays = list[Sharded]
"""Parameters of one replica on one device: those that are trained, of tied ones the first."""

Combining = Generator[Any, list[Tensor], None]
"""The rule in one step: yields for the inner step, receives its shards, yields (shards, state)."""

Rule = Callable[[list[Tensor], PyTree, int], Combining]
"""From the shards of parameters, the state and the number of a step, from 1, to `Combining`."""

# A number of the optimizer's state, such as its count, is a plain tensor of each device. In the
# trees of all replicas it is an array; this unit marks it, so that a replica gets the tensor back.
_NUMBER = "number"


class ReplicaGroup(NamedTuple):
    """The replicas along an axis, which a rule combines around each step.

    Args:
        mesh: all devices.
        axis: along which the replicas are.
        rule: runs on each device, before and after the step.
    """

    mesh: Mesh
    axis: str
    rule: Rule

    def run(
        self, params: PyTree, state: PyTree, count: int, step: Callable[[], Any]
    ) -> tuple[Any, ...]:
        """Run a step of one replica, and combine its parameters with those of the others.

        Args:
            params: of the replica, before the step.
            state: of the rule.
            count: the number of the step, from 1.
            step: returns the next parameters, and other results.

        Returns:
            The combined parameters, the rule's state, and the step's other results.
        """
        rule = self.rule(_shards(_trained(params)), state, count)
        with torch.no_grad():
            next(rule)
        after, *results = step()
        with torch.no_grad():
            shards, state = rule.send(_shards(_trained(after)))

        combined: dict[tuple[int, ...], Leaf] = {}
        for x, shard in zip(_trained(after), shards, strict=True):
            combined[key_of(x)] = like(x, (shard,))
        params = Leaves.of(after).mapped(lambda x: combined.get(key_of(x), x))
        return params, state, *results

    def local(self, tree: PyTree, mesh: Mesh) -> PyTree:
        """Return the tree of this device's replica, on its mesh."""
        device = local_devices(resolve_mesh(self.mesh))[0]

        def local_leaf(x: Leaf) -> Leaf:
            if not isinstance(x, Sharded):
                return x
            number = device if len(x.shards) > 1 else 0
            row = Sharded(x.shape, x.layout, (x.shards[number],))
            leaf = unstack(row, self.axis, mesh)
            return leaf.shards[0] if leaf.layout.unit == _NUMBER else leaf

        return Leaves.of(tree).mapped(local_leaf)

    def joined(self, trees: Sequence[PyTree]) -> PyTree:
        """Return the tree of all replicas, from those of the devices of this process.

        Plain tensors that are one tensor become several.
        """
        mesh = resolve_mesh(self.mesh)

        def joined_leaf(*leaves: Leaf) -> Leaf:
            first = leaves[0]
            if first is None:
                return None
            layout = Layout(mesh, unit=_NUMBER)
            if isinstance(first, Sharded):
                layout = first.layout
            shards: list[Any] = []
            for leaf in leaves:
                shards.append(leaf.shards[0] if isinstance(leaf, Sharded) else leaf)
            return stack(Sharded(first.shape, layout, tuple(shards)), self.axis, mesh)

        # No reason is known for these copies: tests are the same without them.
        copies = [map_leaves(_copy_of_tensor, tree) for tree in trees]
        others = [Leaves.of(tree).leaves for tree in copies[1:]]
        return Leaves.of(copies[0]).mapped(joined_leaf, *others)

    def mean(self, tree: PyTree) -> PyTree:
        """Return the mean of the replicas' trees, from that of this device.

        Integers are those of the first replica.
        """

        def mean_shard(x: Tensor) -> Tensor:
            if x.is_floating_point():
                return pmean(x, self.axis)
            return broadcast(x, self.axis)

        mesh = resolve_mesh(self.mesh)
        return run_on_devices(mesh, lambda _: each_shard(mean_shard, tree))[0]


def _copy_of_tensor(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


class ReplicaStep:
    """A step of (params, state, batch) of all replicas; `init` makes the first two arguments.

    The batch is that of all replicas: each gets an equal part of its rows, in order. The metrics
    are means over the replicas, but for "finite" (of all) and "samples" (their sum).

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
        self._inner = inner
        self._mesh = mesh
        self._axis = axis
        self._init = init
        self._replicas = ReplicaGroup(mesh, axis, rule)
        self._replica_mesh = mesh[tuple(name for name in mesh.axis_names if name != axis)]

    def init(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Return the parameters of all replicas and the state.

        Args:
            params: replicated along the axis.
        """
        paths, arrays, _ = flatten_with_paths(params)
        shards: dict[str, tuple[Tensor, ...]] = {}
        for path, x in zip(paths, arrays, strict=True):
            if not isinstance(x, Sharded) or self._axis in x.spec.axes:
                raise LayoutError(
                    "init: parameters must be arrays, replicated along "
                    f"{self._axis}; got {x!r} for {path}. "
                    "Make them by fs.shard_params; of replicas take fs.comm.mean."
                )
            shards[path] = x.shards
        compare_inputs("init", self._mesh, shards, (self._axis,))

        def stacked(x: Leaf) -> Leaf:
            return None if x is None else stack(x, self._axis)

        replicas = Leaves.of(params).mapped(stacked)

        def init_on_device(_: int) -> PyTree:
            tree = self._replicas.local(replicas, resolve_mesh(self._replica_mesh))
            inner_state = self._inner.init(tree)
            rule_state = self._init(_trained(tree))
            return {"inner": inner_state, "rule": rule_state, "count": count_from_zero()}

        mesh = resolve_mesh(self._mesh)
        states = run_on_devices(mesh, init_on_device, mapped=(self._axis,))
        return replicas, self._replicas.joined(states)

    def __call__(
        self, params: PyTree, state: PyTree, batch: PyTree
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        def run_on_device(_: int) -> tuple[PyTree, PyTree, dict[str, Any]]:
            replica_mesh = resolve_mesh(self._replica_mesh)
            before, local_state = self._replicas.local((params, state), replica_mesh)
            count = local_state["count"] + 1
            rows = map_leaves(self._rows, batch)

            def inner_step() -> Any:
                return self._inner(before, local_state["inner"], rows)

            after, rule_state, inner_state, metrics = self._replicas.run(
                before, local_state["rule"], int(count), inner_step
            )
            next_state = {"inner": inner_state, "rule": rule_state, "count": count}
            return after, next_state, self._mean_metrics(metrics)

        mesh = resolve_mesh(self._mesh)
        if not mesh.is_member:  # the count, by which the rule decides, has no value here
            drawn_key()  # as the inner step does: see Note [Steps outside of a mesh]
            return params, state, no_metrics(self._inner.gradient.options)
        results = run_on_devices(mesh, run_on_device, mapped=(self._axis,))
        all_params, states, metrics = zip(*results, strict=True)
        return self._replicas.joined(all_params), self._replicas.joined(states), metrics[0]

    def _rows(self, x: Any) -> Any:
        """Return the rows of a batch's leaf for this device's replica; leaves without rows stay."""
        if not isinstance(x, Tensor) or not x.ndim:
            return x
        parts = x.tensor_split(axis_size(self._axis))
        return parts[axis_index(self._axis)]

    def _mean_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        numbers: dict[str, PyTree] = {}
        for name, value in metrics.items():
            if name not in ("finite", "samples"):
                numbers[name] = map_leaves(_as_floating, value)
        mean = pmean(numbers, self._axis)

        is_finite = torch.as_tensor(metrics["finite"]).to(torch.uint8)
        mean["finite"] = pmin(is_finite, self._axis).bool()
        samples = metrics.get("samples")
        if samples is not None:
            mean["samples"] = psum(samples, self._axis)
        return mean


def _as_floating(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.double()


def _trained(params: PyTree) -> Arrays:
    arrays: dict[tuple[int, ...], Sharded] = {}
    for x in Leaves.of(params).leaves:
        if trainable(x):
            arrays[key_of(x)] = x
    return [*arrays.values()]


def _shards(arrays: Arrays) -> list[Tensor]:
    return [x.shards[0] for x in arrays]


def _arrays(shards: Sequence[Tensor], params: Arrays) -> Arrays:
    """Return shards as arrays in the layouts of parameters."""
    return [like(x, (shard,)) for x, shard in zip(params, shards, strict=True)]


def mean(params: PyTree) -> PyTree:
    """Return the mean of all replicas, as plain tensors; None outside of their mesh."""

    def mean_leaf(x: Any) -> Tensor | None:
        axes = x.spec.dims(1)[0] if isinstance(x, Sharded) else ()
        if not axes:
            raise LayoutError(
                f"mean: params must be those of all replicas, from `init` of their step; got {x!r}."
            )
        unstack(x, axes)  # raises for a first dim that is not one of replicas
        full = unshard(x)
        if full is None:
            return None
        return full.mean(0) if trainable(x) else full[0]

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
        after: number of first steps that are each followed by an average; `every` counts from
            there.
    """
    return ReplicaStep(inner, mesh, axis, _without_state, local_sgd_rule(axis, every, after))


def _without_state(params: Arrays) -> PyTree:
    return None


def local_sgd_rule(axis: str, every: int, after: int = 0) -> Rule:
    """Return the rule of `local_sgd`."""
    validate(
        "local_sgd",
        within("[1, inf)", integer=True, every=every),
        within("[0, inf)", integer=True, after=after),
    )

    def rule(before: list[Tensor], state: PyTree, count: int) -> Combining:
        shards = yield
        is_due = count <= after or (count - after) % every == 0
        if is_due:
            shards = pmean(shards, axis)
        yield shards, state

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
    """Take outer steps along the replicas' mean change (DiLoCo, Douillard 2023).

    It is `streaming_diloco` of one fragment.
    """
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
    """Take DiLoCo's outer steps for fragments of the parameters in turn (Douillard 2025).

    The anchor of a fragment is its parameters after the last outer step. A fragment is due in some
    steps s:

        step s            gradient = anchor - the replica's parameters
        step s + delay    anchor = outer step from the anchor along the mean gradient
                          parameters = mix * anchor + (1 - mix) * the replica's parameters

    Args:
        inner: as in `local_sgd`; so are mesh and axis.
        outer: an elementwise optimizer, such as `fs.optim.sgd(0.7, momentum=0.9, nesterov=True)`.
        every: steps between outer steps of a fragment; those of fragment f are
            f * every // fragments later.
        fragments: number of groups of consecutive parameters, about equally many in each.
        delay: inner steps that follow, fewer than `every`; during the last of them gradients are
            averaged by pmean.
        mix: weight of the outer step: 1 - alpha of the paper.
        compress: the compressor of the gradients, after the delay; None: pmean.
    """
    validate(
        "streaming_diloco",
        within("[1, inf)", integer=True, every=every),
        within(f"[1, {every}]", integer=True, fragments=fragments),
        within(f"[0, {every})", integer=True, delay=delay),
        within("[0, 1]", mix=mix),
    )
    compression = None if compress is None else _compression(compress, axis)
    steps = _OuterSteps(outer, pure_step(outer), compression, axis, every, fragments, delay, mix)
    return ReplicaStep(inner, mesh, axis, steps.init, steps.rule)


@dataclass(frozen=True)
class _OuterSteps:
    """The rule of `streaming_diloco`: its state has a dict for each fragment.

    Args:
        outer_step: that of `outer`, which keeps its arguments.
        compression: of gradients; its updates are their mean. The other arguments are those of
            `streaming_diloco`.
    """

    outer: Optimizer
    outer_step: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    compression: Optimizer | None
    axis: str
    every: int
    fragments: int
    delay: int
    mix: float

    def init(self, params: Arrays) -> list[PyTree]:
        """Return the state of each fragment."""
        if self.fragments > max(len(params), 1):
            raise ValueError(
                f"streaming_diloco: fragments must be at most {len(params)}, one a leaf; "
                f"got {self.fragments}."
            )
        bounds = [f * len(params) // self.fragments for f in range(self.fragments + 1)]
        return [self._init_fragment(params[start:end]) for start, end in pairwise(bounds)]

    def _init_fragment(self, params: Arrays) -> dict[str, PyTree]:
        anchor = copied(params)
        outer = self.outer.init(anchor)
        waiting: Arrays | None = None
        if self.delay:
            waiting = each_shard(torch.zeros_like, anchor)
        compress: PyTree = None
        if self.compression is not None:
            compress = self.compression.init(anchor)
        return {"anchor": anchor, "outer": outer, "waiting": waiting, "compress": compress}

    def rule(self, before: list[Tensor], state: list[PyTree], count: int) -> Combining:
        """Take the outer steps of the fragments that are due in a step."""
        # Gradients that have waited are averaged while the inner step runs.
        means: dict[int, Callable[[], tuple[Arrays, PyTree]]] = {}
        if self.delay:
            for f in self._due(count - self.delay):
                means[f] = self._start_mean(state[f]["waiting"], state[f])

        all_shards = iter((yield))
        groups: list[list[Tensor]] = []  # the replica's parameters, by fragment
        for fragment in state:
            groups.append([next(all_shards) for _ in fragment["anchor"]])

        next_state = [*state]
        for f in self._due(count):
            grads = _change(state[f]["anchor"], groups[f])
            next_state[f] = {**state[f], "waiting": grads if self.delay else None}
            if not self.delay:
                means[f] = self._start_mean(grads, state[f])

        for f, finish in means.items():
            grads, compress_state = finish()
            anchor, outer_state = self.outer_step(grads, state[f]["outer"], state[f]["anchor"])
            next_state[f] = {
                **state[f],
                "anchor": anchor,
                "outer": outer_state,
                "compress": compress_state,
            }
            pairs = zip(groups[f], _shards(anchor), strict=True)
            groups[f] = [x.lerp(y, self.mix) for x, y in pairs]
        yield list(chain.from_iterable(groups)), next_state

    def _due(self, count: int) -> list[int]:
        """Return the fragments that are due in a step."""
        fragments_due: list[int] = []
        for f in range(self.fragments):
            step = count - f * self.every // self.fragments
            if step > 0 and step % self.every == 0:
                fragments_due.append(f)
        return fragments_due

    def _start_mean(self, grads: Arrays, state: PyTree) -> Callable[[], tuple[Arrays, PyTree]]:
        """Start to average gradients of a fragment; the result waits for them.

        It returns the mean and the compressor's next state. A compressor runs when it is called.
        """
        if self.compression is not None:
            return partial(self.compression.update, grads, state["compress"], grads)
        means = pmean.start(_shards(grads), self.axis)
        return lambda: (_arrays(means.wait(), grads), None)


def _change(anchor: Arrays, shards: Sequence[Tensor]) -> Arrays:
    """Return the anchor minus shards."""
    pairs = zip(_shards(anchor), shards, strict=True)
    return _arrays([x - y for x, y in pairs], anchor)


def _compression(compress: Compressor, axis: str) -> Optimizer:
    """Return a compressor as an optimizer of arrays, whose updates are the mean gradients."""

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        total, _, next_state = compress.reduce(grads, state, axis)
        n = axis_size(axis)
        return map_leaves(lambda x: x / n, total), next_state

    sharding = "owners" if compress.full else "flat"
    return device_optimizer(Optimizer(compress.init, update, sharding=sharding))


def gossip(inner: TrainStep, graph: Graph, *, mesh: Mesh, axis: str) -> ReplicaStep:
    """Average with neighbours during each step (D-PSGD, Lian 2017).

    The parameters become mix(parameters) + the inner step's change.

    Args:
        inner: as in `local_sgd`; so are mesh and axis.
        graph: who averages with whom, such as `ring(n)`.
    """
    return ReplicaStep(inner, mesh, axis, _without_state, gossip_rule(axis, graph))


def gossip_rule(axis: str, graph: Graph) -> Rule:
    """Return the rule of `gossip`."""

    def rule(before: list[Tensor], state: PyTree, count: int) -> Combining:
        copies = [x.clone() for x in before]  # the inner step may reuse the memory of its arguments
        averages = start_mix(copies, graph, count - 1, axis)
        after = yield
        columns = zip(averages.wait(), copies, after, strict=True)
        yield [average + (y - x) for average, x, y in columns], state

    return rule


def push_sum(inner: TrainStep, graph: Graph, *, mesh: Mesh, axis: str) -> ReplicaStep:
    """Divide the step's result among neighbours, for graphs with one-way edges.

    This is stochastic gradient push (Assran 2019). Parameters times a weight, and the weight
    itself, are divided by the rows of the graph, so that their sums over the replicas stay; the
    parameters are their quotient.

    Args:
        inner: as in `local_sgd`; so are mesh and axis.
        graph: who sends to whom: entry (i, j) is the share that i sends to j.
    """
    for turn in range(len(graph.rounds)):
        received = graph.matrix(turn).sum(0).tolist()
        if 0 in received:
            raise ValueError(
                "push_sum: each device must receive a share in each round; got none for "
                f"{received.index(0)} in round {turn} of {graph.name}, whose weight would be 0. "
                "Let it keep a share."
            )

    def init(params: Arrays) -> Tensor:
        return torch.ones((), dtype=torch.float64)

    def rule(before: list[Tensor], weight: Tensor, count: int) -> Combining:
        # sum = weight * before + (after - before). `before` is read here: the inner step may reuse
        # its memory.
        summands = [x * weight.to(x.dtype) - x for x in before]
        next_weight = mix(weight, graph, count - 1, axis, push=True)
        after = yield
        sums = [x + y for x, y in zip(summands, after, strict=True)]
        del summands  # else their memory stays during the exchange
        sums = mix(sums, graph, count - 1, axis, push=True)
        yield [x / next_weight.to(x.dtype) for x in sums], next_weight

    return ReplicaStep(inner, mesh, axis, init, rule)
