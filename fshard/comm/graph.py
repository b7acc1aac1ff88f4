"""Graphs of devices that average with their neighbours, and these averages.

A graph has a matrix for each round, and after the last round the first one follows. In a round
device i gets the sum over j of matrix[i][j] times the value of device j:

    ring(4)          0 - 1 - 2 - 3 - 0         row 0 of all rounds    1/3  1/3   0   1/3
    one_peer(4)      0 -> 1 -> 2 -> 3 -> 0     row 0 of round 0       1/2   0    0   1/2
                     0 - 2, 1 - 3              row 0 of round 1       1/2   0   1/2   0
    hypercube(4)     0 - 1, 2 - 3              row 0 of round 0       1/2  1/2   0    0
                     0 - 2, 1 - 3              row 0 of round 1       1/2   0   1/2   0

After log2 n rounds of a hypercube all devices have the mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from html import escape
from math import cos, pi, sin

import torch
from torch import Tensor

from fshard.mesh.collectives.api import axis_index, axis_size, ppermute
from fshard.mesh.collectives.on_trees import Handle
from fshard.mesh.layout import Axes, PyTree, flatten, unflatten
from fshard.optim.arguments import validate, within

DRAWN_ROUNDS = 6
"""The rounds of a graph that are drawn, side by side."""


@dataclass(frozen=True, repr=False)
class Graph:
    """Weights of averages between devices, round by round; drawn in notebooks.

    Args:
        name: for messages.
        rounds: a matrix for each round; entry (i, j) is the weight of j in the average of i.

    >>> ring(4), ring(4).matrix(0)[0]
    (ring(4): 1 round, gap 0.667, tensor([0.3333, 0.3333, 0.0000, 0.3333], dtype=torch.float64))
    >>> hypercube(4).edges(1)
    [(2, 0), (3, 1), (0, 2), (1, 3)]
    """

    name: str
    rounds: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_weights()
        self._check_paths()

    def _check_sizes(self) -> None:
        """Raise unless all matrices are square and of one size."""
        sizes: set[int] = set()
        for matrix in self.rounds:
            sizes.add(len(matrix))
            sizes.update(map(len, matrix))
        if len(sizes) != 1 or sizes == {0}:
            raise ValueError(
                f"{self.name}: matrices must be square and of one size; got sizes {sorted(sizes)}."
            )

    def _check_weights(self) -> None:
        """Raise unless each row is an average: at least 0, with the sum 1."""
        negative: list[str] = []
        unequal: list[str] = []
        # Each condition is False of NaN.
        for matrix in self.rounds:
            for index, row in enumerate(matrix):
                if not min(row) >= 0:
                    negative.append(f"row {index} has {min(row):.6g}")
                if not abs(sum(row) - 1) <= 1e-9:
                    unequal.append(f"row {index} sums to {sum(row):.6g}")

        errors = negative + unequal
        if errors:
            raise ValueError(
                f"{self.name}: rows must be >= 0 and sum to 1; {', '.join(errors[:4])}. "
                "Divide by sums."
            )

    def _check_paths(self) -> None:
        """Raise unless there is a path from each device to each, along the edges of all rounds."""
        weights = torch.eye(self.size, dtype=torch.float64)
        for turn in range(len(self.rounds)):
            weights += self.matrix(turn)

        # A square of the matrix has the paths of twice the length; a path has at most size - 1
        # edges. Only zeros matter: without `> 0` the numbers would overflow.
        reached = weights
        for _ in range(self.size.bit_length()):
            reached = ((reached @ reached) > 0).double()
        missing = (reached == 0).nonzero().tolist()
        if missing:
            target, source = missing[0]
            raise ValueError(
                f"{self.name}: the graph must be connected; got no path from {source} to {target}. "
                "Add edges."
            )

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.rounds[0])

    def matrix(self, turn: int) -> Tensor:
        """Return the weights of a round. (devices, devices)"""
        return torch.tensor(self.rounds[turn % len(self.rounds)], dtype=torch.float64)

    def edges(self, turn: int) -> list[tuple[int, int]]:
        """Return the messages of a round: (source, target)."""
        entries = self.matrix(turn).nonzero().tolist()
        return [(source, target) for target, source in entries if source != target]

    @property
    def gap(self) -> float:
        """1 - the factor by which differences shrink in all rounds together, in the long run.

        The largest eigenvalue of the product of the matrices is 1, of the average to which all
        values tend: the mean, if columns sum to 1 too. The second largest is this factor; of one
        device it is 0.
        """
        product = self.matrix(0)
        for turn in range(1, len(self.rounds)):
            product = self.matrix(turn) @ product
        factors = torch.linalg.eigvals(product).abs().tolist()
        return 1 - sorted([0.0, *factors])[-2]

    def __repr__(self) -> str:
        count = len(self.rounds)
        rounds = "1 round" if count == 1 else f"{count} rounds"
        return f"{self.name}({self.size}): {rounds}, gap {self.gap:.3f}"

    def _repr_svg_(self) -> str:
        """Draw the devices on a circle for each of the first rounds.

        Edges are as opaque as their weights.
        """
        count = min(len(self.rounds), DRAWN_ROUNDS)
        width = max(180 * count + 20, 300)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="205"'
        style = 'font-family="sans-serif" font-size="12" fill="currentColor" stroke-width="2"'
        title = f'<text x="10" y="20">{escape(repr(self))}</text>'
        circles = [self._svg_of_round(turn) for turn in range(count)]
        return f"{head} {style}>{title}{''.join(circles)}</svg>"

    def _svg_of_round(self, turn: int) -> str:
        points: list[str] = []
        for device in range(self.size):
            angle = 2 * pi * device / self.size
            x = 100 + 180 * turn + 70 * sin(angle)
            y = 115 - 70 * cos(angle)
            points.append(f"{x:.1f} {y:.1f}")

        parts: list[str] = []
        for source, target in self.edges(turn):
            opacity = max(self.rounds[turn][target][source], 0.15)
            line = f"M{points[source]}L{points[target]}"
            parts.append(f'<path d="{line}" stroke="#4c78a8" opacity="{opacity:.2f}"/>')
        for device, point in enumerate(points):
            parts.append(f'<g transform="translate({point})"><circle r="10" fill="#4c78a8"/>')
            parts.append(f'<text y="4" text-anchor="middle" style="fill:#fff">{device}</text></g>')
        return "".join(parts)


def from_matrix(*matrices: Sequence[Sequence[float]] | Tensor, name: str = "from_matrix") -> Graph:
    """Return the graph of these weights, a matrix for each round."""
    rounds: list[tuple[tuple[float, ...], ...]] = []
    for matrix in matrices:
        rows = matrix.tolist() if isinstance(matrix, Tensor) else matrix
        rounds.append(tuple([tuple(map(float, row)) for row in rows]))
    return Graph(name, tuple(rounds))


def ring(n: int) -> Graph:
    """Average with the device before and the device after."""
    devices = _devices("ring", n)
    return _even("ring", devices, [[devices - 1, devices + 1]])


def exponential(n: int) -> Graph:
    """Average with the devices 1, 2, 4, ... before."""
    devices = _devices("exponential", n)
    return _even("exponential", devices, [[devices - step for step in _powers_of_two(n)]])


def one_peer(n: int) -> Graph:
    """Average with the device 1 before, then with the one 2 before, 4 before, ..., a round each."""
    devices = _devices("one_peer", n)
    return _even("one_peer", devices, [[devices - step] for step in _powers_of_two(n)])


def complete(n: int) -> Graph:
    """Average with all devices."""
    devices = _devices("complete", n)
    return _even("complete", devices, [[devices + step for step in range(n)]])


def hypercube(n: int) -> Graph:
    """Average pairs of devices whose indices differ in one bit, in another bit each round.

    After log2 n rounds all devices have the mean.
    """
    errors: list[str] = []
    if n not in [1 << bit for bit in range(64)]:
        errors.append(f"n must be a power of two; got {n!r}")
    validate("hypercube", errors)
    devices = _devices("hypercube", n)
    return _even("hypercube", devices, [[devices ^ bit] for bit in _powers_of_two(n)])


def random_pairs(n: int, *, seed: int = 0, rounds: int = 64) -> Graph:
    """Average pairs of devices that are drawn for each round.

    Of an odd number of devices one keeps its value.
    """
    validate("random_pairs", within("[1, inf)", integer=True, rounds=rounds))
    devices = _devices("random_pairs", n)
    draws = torch.Generator().manual_seed(seed)
    peers: list[list[Tensor]] = []
    for _ in range(rounds):
        order = torch.randperm(n, generator=draws)[: n // 2 * 2]
        swapped = order.view(-1, 2).flip(1).flatten()  # neighbours in the order are a pair
        peers.append([devices.index_copy(0, order, swapped)])
    return _even("random_pairs", devices, peers)


def _devices(name: str, n: int) -> Tensor:
    """Return the indices of n devices; raise if n is no number of devices."""
    validate(name, within("[1, inf)", integer=True, n=n))
    return torch.arange(n)


def _powers_of_two(n: int) -> list[int]:
    """Return 1, 2, 4, ... below n."""
    return [1 << bit for bit in range((n - 1).bit_length())]


def _even(name: str, devices: Tensor, rounds: Iterable[Sequence[Tensor]]) -> Graph:
    """Return the graph in which each device averages itself and its sources with equal weights.

    Args:
        devices: the indices 0, 1, ..., n - 1.
        rounds: for each round some sources of each device, modulo n. A device that is a source
            twice counts once. Without rounds, of one device, each device keeps its value.
    """
    n = len(devices)
    matrices: list[Tensor] = []
    for sources in [*rounds] or [[]]:
        is_used = torch.eye(n, dtype=torch.bool)
        for indices in sources:
            is_used[devices, indices % n] = True
        matrices.append(is_used / is_used.sum(1, keepdim=True).double())
    return from_matrix(*matrices, name=name)


def mix(tree: PyTree, graph: Graph, turn: int, axis: Axes, *, push: bool = False) -> PyTree:
    """Average a tree with those of the device's neighbours in a round.

    Weights that are equal are applied to the sum, as a pmean does. Sends the bytes of the tree
    along each edge. With `push` each device divides its tree among its neighbours instead, by its
    row of the matrix: the sum over devices stays, as in push-sum.
    """
    return start_mix(tree, graph, turn, axis, push=push).wait()


def start_mix(tree: PyTree, graph: Graph, turn: int, axis: Axes, *, push: bool = False) -> Handle:
    """Start a `mix`; the tree must not be modified before its handle is waited for."""
    index = axis_index(axis)
    n = axis_size(axis)
    if graph.size != n:
        raise ValueError(
            f"mix: the graph must be of {n} devices, those along {axis}; got {graph.size}."
        )
    matrix = graph.matrix(turn)
    if push:
        matrix = matrix.T

    # The edges from all devices i - offset to i are disjoint, so one ppermute runs along them.
    edges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for target, source in matrix.nonzero().tolist():
        edges[(target - source) % n].append((source, target))
    leaves, structure = flatten(tree)
    messages: dict[int, Handle] = {}
    for offset in sorted(edges):
        if offset != 0:
            messages[offset] = ppermute.start(leaves, axis, edges[offset])

    # The sources of this device in the order of addition: index - 1, index, index + 1, ...
    # For a ring these are left, itself, right.
    weights: dict[int, float] = {}
    for offset in sorted(edges, key=lambda offset: (1 - offset) % n):
        weight = matrix[index, index - offset].item()
        if weight != 0:
            weights[offset] = weight

    def finish() -> PyTree:
        values = {0: leaves}
        for offset, message in messages.items():
            values[offset] = message.wait()
        terms = [values[offset] for offset in weights]
        means = _weighted_sums(leaves, terms, [*weights.values()])
        return unflatten(structure, means)

    return Handle(finish)


def _weighted_sums(
    leaves: Sequence[Tensor], terms: Sequence[Sequence[Tensor]], weights: Sequence[float]
) -> list[Tensor]:
    """Return the sum over sources, for each of the leaves, of a term times a weight.

    Args:
        leaves: of this device.
        terms: the leaves of each source.
        weights: of each source.
    """
    if not terms:  # by `push`, if the device keeps nothing and no neighbour sends to it
        return [torch.zeros_like(leaf) for leaf in leaves]
    columns = zip(*terms, strict=True)
    # A factor on the sum is rounded once: then the rounds of a hypercube are equal to a pmean.
    is_even = all(weight == 1 / len(weights) for weight in weights)
    if is_even:
        return [reduce(torch.add, column) / len(weights) for column in columns]

    sums: list[Tensor] = []
    for column in columns:
        scaled = [term * weight for term, weight in zip(column, weights, strict=True)]
        sums.append(reduce(torch.add, scaled))
    return sums
