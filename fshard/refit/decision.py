"""Do a thing everywhere or nowhere: one decision for all processes, in the world's store.

    each process     has come, and can begin
    each process     has done its part: a vote
    the last vote    decides "take"
    an error, or a process that has ended, decides against it, unless it is decided

The store changes a key once, so the first decision counts, and a process acts only after it has
read it. A process that ends before the decision ends the attempt for all; one that ends afterwards
has no part in it. The store is in the launcher, or in process 0: if that ends between the decision
and its last reader, those that have not read it do not take part.

Nothing is sent before all have come: what one process refuses at once ends the attempt on all at
once, and no process waits for it in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch.distributed as dist

from fshard.mesh.layout import Mesh
from fshard.mesh.runtimes.process import ProcessWorld
from fshard.mesh.runtimes.watch import open_store

TAKE = "take"
_STORE_IS_LOST = "the process with the store has ended"
_PAUSE = 0.001
"""Seconds between two looks at the store of a process that waits for it."""
_LOOK = 0.02
"""The same of one that waits for messages."""


class Attempts:
    """The attempts of some devices to do a thing together, each with a decision of its own.

    Processes count their attempts, so that one which has come too late, or has called for something
    else, finds the attempt of the others.

    Args:
        name: of the thing, equal on all devices.
        mesh: of these devices.
    """

    def __init__(self, name: str, mesh: Mesh) -> None:
        self._name = name
        self._mesh = mesh
        self._count = 0
        self._ended: list[Decision] = []

    def next(self) -> Decision | OwnDecision:
        """Return the decision on the next attempt."""
        if self._mesh.runtime != "process":
            return OwnDecision()
        self._count += 1
        decision = Decision(f"decision/{self._name}/{self._count}", self._mesh)
        # Where the last attempt was a success, all have read the decisions before it.
        if self._ended and self._ended[-1].is_taken:
            for ended in self._ended[:-1]:
                ended.forget()
            del self._ended[:-1]
        self._ended.append(decision)
        return decision


class OwnDecision:
    """The decision of one caller; virtual devices end together, so each decides as all do."""

    def begin(self) -> str:
        """Return "": all have come."""
        return ""

    def links(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def leave(self, reason: str) -> str:
        """Decide against it."""
        return reason

    def fail(self, error: BaseException) -> str:
        """Decide against it, because of an error here; return the decision if it is another one."""
        return ""

    def vote(self) -> str:
        """Decide for it."""
        return TAKE


class Decision:
    """One decision of processes. The methods are in order of time.

    Args:
        key: of its own.
        mesh: the processes that vote.
    """

    def __init__(self, key: str, mesh: Mesh) -> None:
        self._key = key
        self._mesh = mesh
        self._world = ProcessWorld.of(mesh)
        self._store = open_store()
        self._next_look = 0.0
        self.is_taken = False

    def begin(self) -> str:
        """Wait until all processes have come; return "", or the decision against it."""
        keys = [self._key_of(rank) for rank in self._mesh.devices]
        try:
            self._store.set(self._key_of(self._world.rank), "")
            self._wait(keys)
            return self._current()
        except dist.DistError:
            return _STORE_IS_LOST

    def links(self) -> AbstractContextManager[None]:
        """Return a context whose collectives end when it is decided against it."""
        return self._world.attempt(self._mesh, self._key, self._failure)

    def leave(self, reason: str) -> str:
        """Decide against it, unless it is decided; return the decision."""
        try:
            return self._decide(reason)
        except dist.DistError:
            return _STORE_IS_LOST

    def fail(self, error: BaseException) -> str:
        """Decide against it, because of an error here; return the decision if it is another one."""
        text = f"process {self._world.rank}: {type(error).__name__}: {error}".splitlines()[0]
        decision = self.leave(text)
        return "" if decision == text else decision

    def vote(self) -> str:
        """Vote for it, and return the decision."""
        try:
            votes = self._store.add(f"{self._key}/votes", 1)
            if votes == self._mesh.size:
                self._decide(TAKE)
            self._wait([self._key])
            decision = self._current()
        except dist.DistError:
            return _STORE_IS_LOST
        self.is_taken = decision == TAKE
        return decision

    def forget(self) -> None:
        """Remove it from the store."""
        rank = self._world.rank
        keys = [self._key_of(rank)]
        if rank == self._mesh.devices[0]:
            keys += [self._key, f"{self._key}/votes"]
        with suppress(dist.DistError):  # the store may have ended
            for key in keys:
                self._store.delete_key(key)

    # -- the store ---------------------------------------------------------------------------------

    def _key_of(self, rank: int) -> str:
        """Return the key that is there once a process has come."""
        return f"{self._key}/{rank}"

    def _decide(self, text: str) -> str:
        decision: bytes = self._store.compare_set(self._key, "", text)
        return decision.decode()

    def _current(self) -> str:
        """Return the decision, or "" before it."""
        if not self._store.check([self._key]):
            return ""
        return self._store.get(self._key).decode()

    def _failure(self) -> str:
        """Return the decision, or "" before it, and between two looks at the store."""
        now = time.monotonic()
        if now < self._next_look:
            return ""
        self._next_look = now + _LOOK
        try:
            return self._current()
        except dist.DistError:
            return _STORE_IS_LOST

    def _wait(self, keys: Sequence[str]) -> None:
        """Wait until these keys are there, or until it is decided."""
        limit = self._world.timeout.total_seconds()
        end = time.monotonic() + limit
        while not self._store.check(keys) and not self._store.check([self._key]):
            gone = [rank for rank in self._mesh.devices if self._world.peers.has_gone(rank)]
            if gone:
                self._decide(f"process {gone[0]} has ended")
            elif time.monotonic() > end:
                missing = [rank for rank in self._mesh.devices if not self._has_come(rank)]
                shown = ", ".join(map(str, missing)) or "another one"
                self._decide(f"process {shown} has not come within {limit:g} s")
            time.sleep(_PAUSE)

    def _has_come(self, rank: int) -> bool:
        return self._store.check([self._key_of(rank)])
