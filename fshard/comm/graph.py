"""`Graph`: who averages with whom in each round, as a value.

ring(4)                 0 - 1 - 2 - 3 - 0, each round      row i: 1/3 of i-1, i and i+1
one_peer(4)             0 -> 1 -> 2 -> 3 -> 0, then 0 -> 2, 1 -> 3, ...
hypercube(4)            0 - 1, 2 - 3, then 0 - 2, 1 - 3: the mean of all after log2 n rounds
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2

import torch
from torch import Tensor

from fshard.mesh.collectives.api import axis_index, axis_size, ppermute
from fshard.mesh.collectives.on_trees import Handle
from fshard.mesh.layout import Axes, PyTree, flatten, unflatten
from fshard.optim.arguments import validate, within

Row = tuple[float, ...]
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Graph:
    """Weights of averages between devices, round by round.

    Args:
        name: for messages.
        rounds: a matrix for each round, after the last the first again; entry (i, j) is the weight of j in the average of i.

    >>> ring(4).matrix(0)[0]
    tensor([0.3333, 0.3333, 0.0000, 0.3333], dtype=torch.float64)
    >>> hypercube(4).edges(1)
    [(2, 0), (3, 1), (0, 2), (1, 3)]
    """

    name: str
    rounds: tuple[tuple[Row, ...], ...]

    def __post_init__(self) -> None:
        sizes = {len(row) for matrix in self.rounds for row in matrix} | {len(matrix) for matrix in self.rounds}
        if len(sizes) != 1:
            raise ValueError(f"{self.name}: matrices must be square and of one size; got sizes {sorted(sizes)}.")
        sums = [(i, sum(row)) for matrix in self.rounds for i, row in enumerate(matrix)]
        if wrong := [f"row {i} sums to {total:.6g}" for i, total in sums if abs(total - 1) > _ROUNDING]:
            raise ValueError(
                f"{self.name}: rows of weights must sum to 1; {', '.join(wrong[:4])}. Divide each by its sum."
            )
        if any(weight < 0 for matrix in self.rounds for row in matrix for weight in row):
            raise ValueError(f"{self.name}: weights must not be negative.")
        if not self._is_connected():
            raise ValueError(f"{self.name}: the graph must be connected; some devices never hear from others.")

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.rounds[0])

    def matrix(self, turn: int) -> Tensor:
        """Return the weights of a round. (devices, devices)"""
        return torch.tensor(self.rounds[turn % len(self.rounds)], dtype=torch.float64)

    def edges(self, turn: int) -> list[tuple[int, int]]:
        """Return the messages of a round: (source, destination)."""
        matrix = self.rounds[turn % len(self.rounds)]
        return [(j, i) for i, row in enumerate(matrix) for j, weight in enumerate(row) if weight and i != j]

    @property
    def gap(self) -> float:
        """1 - the factor by which differences from the mean shrink in a round, or in all rounds."""
        product = torch.eye(self.size, dtype=torch.float64)
        for turn in range(len(self.rounds)):
            product = self.matrix(turn) @ product
        sizes = sorted(torch.linalg.eigvals(product).abs().tolist())
        return 1 - sizes[-2] if len(sizes) > 1 else 1.0

    def _is_connected(self) -> bool:
        reached = torch.eye(self.size) > 0
        for _ in range(max(self.size.bit_length(), 1)):
            for turn in range(len(self.rounds)):
                reached = ((self.matrix(turn) > 0).float() @ reached.float() + reached.float()) > 0
            reached = (reached.float() @ reached.float()) > 0
        return bool(reached.all())


def from_matrix(*matrices: Sequence[Sequence[float]] | Tensor) -> Graph:
    """Return the graph of these weights, a matrix for each round."""
    rows = [m.tolist() if isinstance(m, Tensor) else m for m in matrices]
    return Graph("from_matrix", tuple([tuple([tuple(map(float, row)) for row in matrix]) for matrix in rows]))


def ring(n: int) -> Graph:
    """Each device averages with the one before and the one after."""
    return _of_offsets("ring", n, [[-1, 0, 1]])


def exponential(n: int) -> Graph:
    """Each device averages with those 1, 2, 4, ... before it."""
    return _of_offsets("exponential", n, [[0, *_powers(n)]])


def one_peer(n: int) -> Graph:
    """Each device averages with the one 1 before it, then 2, 4, ..., a round each."""
    return _of_offsets("one_peer", n, [[0, power] for power in _powers(n)] or [[0]])


def complete(n: int) -> Graph:
    """Each device averages with all."""
    return _of_offsets("complete", n, [list(range(n))])


def hypercube(n: int) -> Graph:
    """Pairs whose indices differ in one bit average, a bit a round: after log2 n rounds all have the mean."""
    validate("hypercube", within("[1, inf)", integer=True, n=n))
    if n & (n - 1):
        raise ValueError(f"hypercube: n must be a power of two; got {n}.")
    return _of_pairs("hypercube", n, [{i: i ^ (1 << bit) for i in range(n)} for bit in range(int(log2(n)))] or [{}])


def random_pairs(n: int, *, seed: int = 0, rounds: int = 64) -> Graph:
    """Pairs that are drawn for each round average; of an odd number one device keeps its own."""
    validate("random_pairs", within("[1, inf)", integer=True, n=n, rounds=rounds))
    draw, peers = torch.Generator().manual_seed(seed), list[dict[int, int]]()
    for _ in range(rounds):
        order: list[int] = torch.randperm(n, generator=draw).tolist()
        pairs = list(zip(order[::2], order[1::2], strict=False))
        peers.append({**dict(pairs), **{b: a for a, b in pairs}})
    return _of_pairs("random_pairs", n, peers)


def _powers(n: int) -> list[int]:
    return [1 << k for k in range((n - 1).bit_length())]


def _of_offsets(name: str, n: int, rounds: Sequence[Sequence[int]]) -> Graph:
    """Return the graph in which each device averages evenly with those at some offsets before it."""
    validate(name, within("[1, inf)", integer=True, n=n))
    sources = [[[(i - offset) % n for offset in offsets] for i in range(n)] for offsets in rounds]
    return Graph(name, tuple([tuple([_even(n, row) for row in matrix]) for matrix in sources]))


def _of_pairs(name: str, n: int, rounds: Sequence[Mapping[int, int]]) -> Graph:
    return Graph(name, tuple([tuple([_even(n, [i, peers.get(i, i)]) for i in range(n)]) for peers in rounds]))


def _even(n: int, sources: Sequence[int]) -> Row:
    return tuple([1 / len({*sources}) if j in sources else 0.0 for j in range(n)])


def mix(tree: PyTree, graph: Graph, turn: int, axis: Axes, *, push: bool = False) -> PyTree:
    """Average a tree with those of the device's neighbours in a round, by a ppermute for each set of disjoint edges.

    Weights that are equal are applied to the sum. Sends the bytes of the tree along each edge.

    Args:
        tree: this device's.
        graph: of the devices along `axis`.
        turn: number of the round.
        axis: an axis of the mesh.
        push: divide the tree among its neighbours instead: the sum over devices stays, as in push-sum.
    """
    return start_mix(tree, graph, turn, axis, push=push).wait()


def start_mix(tree: PyTree, graph: Graph, turn: int, axis: Axes, *, push: bool = False) -> Handle:
    """Start a `mix`; the tree must not be modified before its handle is waited for."""
    if graph.size != axis_size(axis):
        raise ValueError(f"mix: the graph must be of {axis_size(axis)} devices, those along {axis}; got {graph.size}.")
    index, turn = axis_index(axis), turn % len(graph.rounds)
    matrix = graph.rounds[turn]
    row = [line[index] for line in matrix] if push else matrix[index]
    leaves, structure = flatten(tree)
    messages = [(edges, ppermute.start(leaves, axis, edges)) for edges in _disjoint(graph, turn, push)]

    def finish() -> PyTree:
        parts = {index: leaves}
        for edges, message in messages:
            received = message.wait()
            parts.update({source: received for source, to in edges if to == index})
        sources = sorted(
            (j for j in parts if row[j]), key=lambda j: (j - index + 1) % graph.size
        )  # of a ring: left, itself, right
        weights = [row[source] for source in sources]
        columns = [*zip(*[parts[source] for source in sources], strict=True)]
        if {*weights} == {1 / len(weights)}:
            return unflatten(structure, [_summed(column) / len(weights) for column in columns])
        return unflatten(
            structure, [_summed([x * weight for x, weight in zip(column, weights, strict=True)]) for column in columns]
        )

    return Handle(finish)


def _summed(xs: Sequence[Tensor]) -> Tensor:
    total, *others = xs
    for x in others:
        total = total + x
    return total


@lru_cache(maxsize=256)
def _disjoint(graph: Graph, turn: int, push: bool) -> tuple[list[tuple[int, int]], ...]:
    """Return the edges of a round in sets in which each device sends and receives at most once."""
    edges = graph.edges(turn)
    return tuple(_colored([(to, source) for source, to in edges] if push else edges, graph.size))


def _colored(edges: Sequence[tuple[int, int]], n: int) -> Iterator[list[tuple[int, int]]]:
    rest = sorted(edges, key=lambda edge: ((edge[1] - edge[0]) % n, edge))  # edges of one offset are disjoint
    while rest:
        chosen, senders, receivers = list[tuple[int, int]](), set[int](), set[int]()
        for source, to in rest:
            if source not in senders and to not in receivers:
                chosen.append((source, to))
                senders.add(source)
                receivers.add(to)
        yield chosen
        rest = [edge for edge in rest if edge not in chosen]
