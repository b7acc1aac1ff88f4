"""`Graph`: who averages with whom in each round, as a value.

ring(4)                 0 - 1 - 2 - 3 - 0, each round      row i: 1/3 of i-1, i and i+1
one_peer(4)             0 -> 1 -> 2 -> 3 -> 0, then 0 -> 2, 1 -> 3, ...
hypercube(4)            0 - 1, 2 - 3, then 0 - 2, 1 - 3: the mean of all after log2 n rounds
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, repr=False)
class Graph:
    """Weights of averages between devices, round by round; drawn in notebooks.

    Args:
        name: for messages.
        rounds: a matrix for each round, after the last the first again; entry (i, j) is the weight of j in the average of i.

    >>> ring(4), ring(4).matrix(0)[0]
    (ring(4): 1 round, gap 0.667, tensor([0.3333, 0.3333, 0.0000, 0.3333], dtype=torch.float64))
    >>> hypercube(4).edges(1)
    [(2, 0), (3, 1), (0, 2), (1, 3)]
    """

    name: str
    rounds: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        sizes = {len(row) for matrix in self.rounds for row in matrix} | {
            len(matrix) for matrix in self.rounds
        }
        if len(sizes) != 1:
            raise ValueError(
                f"{self.name}: matrices must be square and of one size; got sizes {sorted(sizes)}."
            )
        rows = [(i, row) for matrix in self.rounds for i, row in enumerate(matrix)]
        errors = [f"row {i} has {min(row):.6g}" for i, row in rows if min(row) < 0]
        errors += [f"row {i} sums to {sum(row):.6g}" for i, row in rows if abs(sum(row) - 1) > 1e-9]
        if errors:
            raise ValueError(
                f"{self.name}: rows must be >= 0 and sum to 1; {', '.join(errors[:4])}. Divide by sums."
            )
        reached = torch.eye(self.size, dtype=torch.float64) + sum(
            map(self.matrix, range(len(self.rounds)))
        )
        for _ in range(self.size.bit_length()):
            reached = ((reached @ reached) > 0).double()
        if errors := [f"{j} to {i}" for i, j in (reached == 0).nonzero().tolist()]:
            raise ValueError(
                f"{self.name}: the graph must be connected; got no path from {errors[0]}. Add edges."
            )

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.rounds[0])

    def matrix(self, turn: int) -> Tensor:
        """Return the weights of a round. (devices, devices)"""
        return torch.tensor(self.rounds[turn % len(self.rounds)], dtype=torch.float64)

    def edges(self, turn: int) -> list[tuple[int, int]]:
        """Return the messages of a round: (source, destination)."""
        return [(j, i) for i, j in self.matrix(turn).nonzero().tolist() if i != j]

    @property
    def gap(self) -> float:
        """1 - the factor by which differences from the mean shrink in a round, or in all rounds."""
        product = reduce(
            lambda x, number: self.matrix(number) @ x, range(1, len(self.rounds)), self.matrix(0)
        )
        return 1 - sorted([0.0, *torch.linalg.eigvals(product).abs().tolist()])[-2]

    def __repr__(self) -> str:
        n = len(self.rounds)
        return f"{self.name}({self.size}): {n} round{'s' * (n > 1)}, gap {self.gap:.3f}"

    def _repr_svg_(self) -> str:
        """Draw the devices on a circle for each of the first rounds, with edges as opaque as their weights."""
        parts, count = (
            [f'<text x="10" y="20">{escape(repr(self))}</text>'],
            min(len(self.rounds), 6),
        )
        for number in range(count):
            angles = [2 * pi * i / self.size for i in range(self.size)]
            ends = [
                f"{100 + 180 * number + 70 * sin(angle):.1f} {115 - 70 * cos(angle):.1f}"
                for angle in angles
            ]
            for j, i in self.edges(number):
                opacity = max(self.rounds[number][i][j], 0.15)
                parts.append(
                    f'<path d="M{ends[j]}L{ends[i]}" stroke="#4c78a8" opacity="{opacity:.2f}"/>'
                )
            for i, end in enumerate(ends):
                parts.append(f'<g transform="translate({end})"><circle r="10" fill="#4c78a8"/>')
                parts.append(f'<text y="4" text-anchor="middle" style="fill:#fff">{i}</text></g>')
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(180 * count + 20, 300)}" height="205"'
        style = 'font-family="sans-serif" font-size="12" fill="currentColor" stroke-width="2"'
        return f"{head} {style}>{''.join(parts)}</svg>"


def from_matrix(*matrices: Sequence[Sequence[float]] | Tensor, name: str = "from_matrix") -> Graph:
    """Return the graph of these weights, a matrix for each round."""
    rows = [m.tolist() if isinstance(m, Tensor) else m for m in matrices]
    return Graph(
        name, tuple([tuple([tuple(map(float, row)) for row in matrix]) for matrix in rows])
    )


def ring(n: int) -> Graph:
    """Each device averages with the one before and the one after."""
    return _even("ring", n, lambda i: [[i - 1, i + 1]])


def exponential(n: int) -> Graph:
    """Each device averages with those 1, 2, 4, ... before it."""
    return _even("exponential", n, lambda i: [[i - (1 << k) for k in range((n - 1).bit_length())]])


def one_peer(n: int) -> Graph:
    """Each device averages with the one 1 before it, then 2, 4, ..., a round each."""
    return _even("one_peer", n, lambda i: [[i - (1 << k)] for k in range((n - 1).bit_length())])


def complete(n: int) -> Graph:
    """Each device averages with all."""
    return _even("complete", n, lambda i: [[i + k for k in range(n)]])


def hypercube(n: int) -> Graph:
    """Pairs whose indices differ in one bit average, a bit a round: after log2 n rounds all have the mean."""
    validate(
        "hypercube",
        [f"n must be a power of two; got {n!r}"] * (n not in [1 << k for k in range(64)]),
    )
    return _even("hypercube", n, lambda i: [[i ^ (1 << k)] for k in range((n - 1).bit_length())])


def random_pairs(n: int, *, seed: int = 0, rounds: int = 64) -> Graph:
    """Pairs that are drawn for each round average; of an odd number one device keeps its own."""
    draw = torch.Generator().manual_seed(seed)

    def peers(i: Tensor) -> Tensor:
        order = torch.randperm(n, generator=draw)[: n // 2 * 2]
        return i.index_copy(0, order, order.view(-1, 2).flip(1).flatten())

    validate("random_pairs", within("[1, inf)", integer=True, rounds=rounds))
    return _even("random_pairs", n, lambda i: [[peers(i)] for _ in range(rounds)])


def _even(name: str, n: int, sources: Callable[[Tensor], Sequence[Sequence[Tensor]]]) -> Graph:
    """Return the graph in which devices average evenly with their sources mod n, several for each round."""
    validate(name, within("[1, inf)", integer=True, n=n))
    eye = torch.eye(n, dtype=torch.float64)
    used = [
        sum([eye[indices % n] for indices in indices_of_round], eye) > 0
        for indices_of_round in sources(torch.arange(n)) or [[]]
    ]
    return from_matrix(*[x / x.sum(1, keepdim=True).double() for x in used], name=name)


def mix(tree: PyTree, graph: Graph, turn: int, axis: Axes, *, push: bool = False) -> PyTree:
    """Average a tree with those of the device's neighbours in a round, by a ppermute for each offset of edges.

    Weights that are equal are applied to the sum. Sends the bytes of the tree along each edge. With `push` it divides the
    tree among neighbours instead: the sum over devices stays, as in push-sum.
    """
    return start_mix(tree, graph, turn, axis, push=push).wait()


def start_mix(tree: PyTree, graph: Graph, turn: int, axis: Axes, *, push: bool = False) -> Handle:
    """Start a `mix`; the tree must not be modified before its handle is waited for."""
    index, n, edges = (
        axis_index(axis),
        axis_size(axis),
        defaultdict[int, list[tuple[int, int]]](list),
    )
    if graph.size != n:
        raise ValueError(
            f"mix: the graph must be of {n} devices, those along {axis}; got {graph.size}."
        )
    matrix = graph.matrix(turn).T if push else graph.matrix(turn)
    for i, j in matrix.nonzero().tolist():
        edges[(i - j) % n].append((j, i))  # those of one offset are disjoint
    leaves, structure = flatten(tree)
    weights = {offset: matrix[index, index - offset].item() for offset in edges}
    messages = {
        offset: ppermute.start(leaves, axis, edges[offset]) for offset in sorted(edges) if offset
    }

    def finish() -> PyTree:
        trees = {offset: message.wait() for offset, message in messages.items()} | {0: leaves}
        order = sorted(
            [offset for offset in edges if weights[offset]], key=lambda offset: (1 - offset) % n
        )
        columns = [
            *zip(*[trees[offset] for offset in order], strict=True)
        ]  # of a ring: left, itself, right
        if all(weights[offset] == 1 / len(order) for offset in order):
            return unflatten(
                structure, [reduce(torch.add, column) / len(order) for column in columns]
            )
        factors = [weights[offset] for offset in order]
        columns = [
            [x * factor for x, factor in zip(column, factors, strict=True)] for column in columns
        ]
        return unflatten(structure, [reduce(torch.add, column) for column in columns])

    return Handle(finish)
