"""Do a thing everywhere or nowhere: one decision for all processes, in the world's store.

    each process     is ready to do it: a vote
    the last vote    decides "take"
    an error, or a process that has ended    decides "leave", unless it is decided

The store changes a key once, so the first decision counts, and a process acts only after it has
read it. A process that ends before the decision ends the attempt for all; one that ends afterwards
has no part in it. The store is in the launcher, or in process 0: if that ends between the decision
and its last reader, those that have not read it do not take part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fshard.mesh.layout import Mesh
from fshard.mesh.runtimes.process import ProcessWorld
from fshard.mesh.runtimes.watch import open_store

TAKE = "take"
_PAUSE = 0.001
"""Seconds between two looks at the store."""


def decision_on(key: str, mesh: Mesh) -> Decision:
    """Return the decision that the processes of a mesh make together, under a key of its own."""
    world = ProcessWorld.of(mesh)
    limit = world.timeout.total_seconds()
    return Decision(open_store(), f"decision/{key}", mesh.devices, world.peers.has_gone, limit)


class Decision:
    """One decision.

    Args:
        store: of all processes.
        key: of its own.
        ranks: the processes that vote.
        has_gone: returns True for a process that has ended.
        limit: seconds to wait for the others.
    """

    def __init__(
        self,
        store: Any,
        key: str,
        ranks: Sequence[int],
        has_gone: Callable[[int], bool],
        limit: float,
    ) -> None:
        self._store = store
        self._key = key
        self._ranks = ranks
        self._has_gone = has_gone
        self._limit = limit

    def leave(self, reason: str) -> str:
        """Decide against it, unless it is decided; return the decision."""
        return self._decide(reason)

    def vote(self) -> str:
        """Vote for it, and return the decision."""
        votes = self._store.add(f"{self._key}/votes", 1)
        if votes == len(self._ranks):
            return self._decide(TAKE)
        return self._wait()

    def _decide(self, text: str) -> str:
        decision: bytes = self._store.compare_set(self._key, "", text)
        return decision.decode()

    def _wait(self) -> str:
        end = time.monotonic() + self._limit
        while not self._store.check([self._key]):
            gone = [rank for rank in self._ranks if self._has_gone(rank)]
            if gone:
                return self.leave(f"process {gone[0]} has ended")
            if time.monotonic() > end:
                return self.leave(f"not all processes are ready within {self._limit:g} s")
            time.sleep(_PAUSE)
        return self._store.get(self._key).decode()
