"""The hub of the rules of NCCL: a thread of rank 0 that plays the devices of all ranks; the rules
are in nccl_rules.py.
"""

from __future__ import annotations

import atexit
import os
import pickle
import random
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.mesh.runtimes.fake_device import on_host

SEED = int(os.environ.get("NCCL_RULES_SEED", "0"))
DELAY = float(os.environ.get("NCCL_RULES_DELAY", "0.0005"))
"""Seconds by which a completion is delayed: four in five by less, the others by eight times as
much.
"""
QUIET = 0.5
"""Seconds of silence, then deadlocks are looked for."""
STALL = float(os.environ.get("NCCL_RULES_STALL", "20"))
"""Seconds of silence, then all open operations are reported."""


def deaths_are_unseen() -> bool:
    """Return True if nothing is to be reported of processes that were killed."""
    return os.environ.get("NCCL_RULES_DEATHS") == "unseen"


def array_of(x: Tensor) -> np.ndarray[Any, Any]:
    """Return the memory of a contiguous tensor; autograd does not see writes to it, as it does not
    see NCCL's.
    """
    if not x.numel():
        return np.empty(0, np.uint8)
    return on_host(x.detach().reshape(-1).view(torch.uint8)).numpy()


def bytes_of(x: Tensor) -> bytes:
    return array_of(x).tobytes()


@dataclass(eq=False)
class Op:
    """An operation of one rank: a collective, or messages (peer, bytes, data or None to receive)."""

    id: int
    rank: int
    comm: tuple[str, str]
    members: tuple[int, ...]
    name: str
    signature: tuple[Any, ...] = ()
    """The properties that must be equal on all ranks."""
    data: Sequence[bytes] = ()
    sizes: Sequence[int] = ()
    """Bytes of the results."""
    messages: Sequence[tuple[int, int, bytes | None]] = ()
    results: dict[int, bytes] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    is_matched: bool = False

    def __str__(self) -> str:
        ends = ", ".join(
            f"{'receive from' if data is None else 'send to'} {to}" for to, _, data in self.messages
        )
        what = ends if self.messages else " ".join([self.name, *map(str, self.signature)])
        return f"rank {self.rank}'s {what} (no. {self.id} there, group {' '.join(self.comm)})"


def _listed(ops: Iterable[Op]) -> str:
    return "; ".join(map(str, ops)) or "none"


def _reduced(name: str, dtype: torch.dtype, rows: list[bytes], start: int) -> bytes:
    """Combine the ranks' rows, beginning with one that depends on the number of operations before."""
    xs = [
        torch.frombuffer(bytearray(row), dtype=dtype) if row else torch.empty(0, dtype=dtype)
        for row in rows
    ]
    xs = xs[start % len(xs) :] + xs[: start % len(xs)]
    result = xs[0].clone()
    for x in xs[1:]:
        if name in ("MAX", "MIN"):
            result = (torch.fmax if name == "MAX" else torch.fmin)(result, x)
        elif name == "PRODUCT":
            result *= x
        else:
            result += x
    return bytes_of((result / len(xs)).to(dtype) if name == "AVG" else result)


def _collective(op: Op, data: list[Sequence[bytes]], number: int) -> list[Sequence[bytes]]:
    """Return the results of all ranks, from the data of all."""
    n = len(data)
    if op.name in ("all_reduce", "reduce", "reduce_scatter"):
        dtype, reduction = op.signature[:2]
        sums = [_reduced(reduction, dtype, [*rows], number) for rows in zip(*data, strict=True)]
        if op.name == "all_reduce":
            return [sums] * n
        return [
            [sums[i]] if op.name == "reduce_scatter" or i == op.signature[-1] else []
            for i in range(n)
        ]
    if op.name == "broadcast":
        return [data[op.signature[-1]]] * n
    if op.name == "all_to_all":
        return [[rows[i] for rows in data] for i in range(n)]
    if op.name == "scatter":
        return [[data[op.signature[-1]][i]] for i in range(n)]
    gathered = [rows[0] for rows in data]
    return [gathered if op.name == "all_gather" or i == op.signature[-1] else [] for i in range(n)]


# -- the hub ---------------------------------------------------------------------------------------


class Hub:
    """The devices of all ranks."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.listener = Listener(family="AF_UNIX", backlog=n)
        self.ranks: dict[Connection, int] = {}
        self.queues: dict[tuple[Any, int], deque[Op]] = defaultdict(deque)
        self.joining: dict[Any, dict[int, Op]] = defaultdict(dict)
        self.blocked: dict[int, Op] = {}
        self.ended: set[int] = set()
        self.has_unseen_death = False
        self.ops: dict[tuple[int, int], Op] = {}
        self.due: list[tuple[float, Op]] = []
        self.numbers: Counter[Any] = Counter()
        self.failure: tuple[str, str] | None = None
        self.random = random.Random(SEED)
        self.event = time.monotonic()
        self.thread = threading.Thread(target=self.run, name="nccl_rules", daemon=True)
        self.thread.start()
        atexit.register(self.thread.join, 5)

    def run(self) -> None:
        for _ in range(self.n):
            connection = self.listener.accept()
            self.ranks[connection] = connection.recv()
        self.listener.close()
        while self.ranks:
            limit = (
                min([at for at, _ in self.due], default=time.monotonic() + 0.1) - time.monotonic()
            )
            for connection in wait([*self.ranks], max(0.0, limit)):
                assert isinstance(connection, Connection)
                self.take(connection, self.ranks[connection])
            self.complete()
            if not self.failure and not self.has_unseen_death:
                self.look_for_deadlocks()

    def take(self, connection: Connection, rank: int) -> None:
        """Take a message of a rank."""
        self.event = time.monotonic()
        try:
            kind, content = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            kind, content = "killed", None
        if kind in ("leave", "killed"):
            del self.ranks[connection]
            self.ended.add(rank)
            self.has_unseen_death |= deaths_are_unseen() and kind == "killed"
            connection.close()
        elif kind == "block":
            if op := self.ops.get((rank, content)):
                self.blocked[rank] = op
        elif kind == "go on":
            self.blocked.pop(rank, None)
        elif self.failure:
            self.tell(rank, "error", *self.failure)
        else:
            self.ops[rank, content.id] = content
            if content.name == "rendezvous":
                self.join(content)
            else:
                content.pending = {*range(len(content.messages))}
                self.queues[content.comm, rank].append(content)
                self.match(content.comm, content.members)

    def tell(self, rank: int, *message: Any) -> None:
        for connection in [connection for connection, index in self.ranks.items() if index == rank]:
            with suppress(OSError):
                connection.send_bytes(pickle.dumps(message))

    def join(self, op: Op) -> None:
        self.joining[op.comm][op.rank] = op
        if self.joining[op.comm].keys() == {*op.members}:
            for member in self.joining.pop(op.comm).values():
                self.end(member, {})

    def end(self, op: Op, results: dict[int, bytes]) -> None:
        """Tell a rank that its operation has completed; it waits for it no longer, however late it says so."""
        del self.ops[op.rank, op.id]
        if self.blocked.get(op.rank) is op:
            del self.blocked[op.rank]
        self.tell(op.rank, "done", op.id, results)

    def match(self, comm: Any, members: tuple[int, ...]) -> None:
        """Start what the heads of a communicator's queues allow."""
        heads = {
            rank: queue[0]
            for rank in members
            if (queue := self.queues[comm, rank]) and not queue[0].is_matched
        }
        collectives = [op for op in heads.values() if not op.messages]
        if len({(op.name, op.signature) for op in collectives}) > 1:
            self.fail(f"Operations are paired by order, but these differ: {_listed(collectives)}.")
        elif len(collectives) == len(members):
            self.numbers[comm] += 1
            results = _collective(
                collectives[0], [op.data for op in collectives], self.numbers[comm]
            )
            for op, result in zip(collectives, results, strict=True):
                if [len(row) for row in result] != [*op.sizes]:
                    self.fail(f"{op} has {[*op.sizes]} bytes for {[len(row) for row in result]}.")
                op.results = dict(enumerate(result))
                self.schedule(op)
        for op in heads.values():
            self.exchange(op, heads)
        for op in heads.values():
            if op.messages and not op.pending:
                self.schedule(op)

    def exchange(self, op: Op, heads: dict[int, Op]) -> None:
        """Pair the sends of an operation with the receives of the heads, in order for each pair of
        ranks.
        """
        for i in sorted(op.pending):
            to, size, data = op.messages[i]
            if data is None or to not in heads:
                continue
            receives = [
                j
                for j in sorted(heads[to].pending)
                if heads[to].messages[j][::2] == (op.rank, None)
            ]
            if receives:
                if size != heads[to].messages[receives[0]][1]:
                    self.fail(
                        f"Messages are paired by order, but sizes differ: {_listed([op, heads[to]])}."
                    )
                heads[to].results[receives[0]] = data
                heads[to].pending.discard(receives[0])
                op.pending.discard(i)

    def schedule(self, op: Op) -> None:
        op.is_matched = True
        delay = DELAY * (
            self.random.random() if self.random.random() < 0.8 else 8
        )  # a few are overtaken by others
        self.due.append((time.monotonic() + delay, op))

    def complete(self) -> None:
        """Complete what is due, and start what has waited behind it."""
        now = time.monotonic()
        due = [op for at, op in self.due if at <= now]
        self.due = [(at, op) for at, op in self.due if at > now]
        for op in due:
            self.event = now
            self.queues[op.comm, op.rank].popleft()
            self.end(op, op.results)
            self.match(op.comm, op.members)

    def fail(self, text: str, kind: str = "rules") -> None:
        self.failure = self.failure or (kind, text)
        for rank in self.ranks.values():
            self.tell(rank, "error", *self.failure)

    # -- deadlocks ---------------------------------------------------------------------------------

    def look_for_deadlocks(self) -> None:
        silence = time.monotonic() - self.event
        if self.due or silence < QUIET:
            return
        for op in self.blocked.values():
            for end, path in self.paths(op, {}):
                text = "; ".join(f"{step} waits for {_reason(after)}" for step, after in path)
                if isinstance(end, Op):
                    self.fail(f"Deadlock: {text}.")
                elif end in self.ended:
                    self.fail(
                        f"NCCL: a remote process has exited: {text}, which has ended.", "remote"
                    )
        if self.blocked and silence > STALL:
            self.fail(f"Nothing has happened for {STALL:g} s. Open: {_listed(self.ops.values())}.")

    def paths(
        self, op: Op, path: dict[Op, Op | int]
    ) -> Iterator[tuple[Op | int, list[tuple[Op, Op | int]]]]:
        """Yield the cycles of operations that wait for each other, and the paths to ranks that are
        not blocked.
        """
        if op in path:
            steps = [*path.items()]
            yield op, steps[[step for step, _ in steps].index(op) :]
            return
        for after in self.needs(op):
            if isinstance(after, Op):
                yield from self.paths(after, {**path, op: after})
            else:
                yield after, [*path.items(), (op, after)]

    def needs(self, op: Op) -> Iterator[Op | int]:
        """Yield what an operation waits for: operations, or ranks that are not blocked and have not
        made theirs.
        """
        queue = [*self.queues[op.comm, op.rank]]
        if op in queue[1:]:
            yield queue[queue.index(op) - 1]
            return
        peers = (
            [op.messages[i][0] for i in op.pending]
            if op.messages
            else [r for r in op.members if r != op.rank]
        )
        for peer in peers:
            if op.name == "rendezvous":
                posted = [self.joining[op.comm][peer]] if peer in self.joining[op.comm] else []
            else:
                posted = [after for after in self.queues[op.comm, peer] if _pairs(op, after)]
            if not posted:
                yield self.blocked.get(peer, peer)
            elif op.name != "rendezvous" and posted[0] is not self.queues[op.comm, peer][0]:
                yield posted[0]


def _pairs(op: Op, after: Op) -> bool:
    """Return True if an operation of another rank is one with which this one can be paired."""
    if not op.messages or not after.messages:
        return not op.messages and not after.messages
    ends = {(to, data is None) for to, _, data in (op.messages[i] for i in op.pending)}
    return any(
        to == op.rank and (after.rank, data is not None) in ends for to, _, data in after.messages
    )


def _reason(after: Op | int) -> str:
    return f"rank {after}" if isinstance(after, int) else str(after)
