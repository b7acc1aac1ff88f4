"""Do a thing everywhere or nowhere: one decision for all processes.

    each process     has come, and can begin
    each process     has done its part: a vote
    the last vote    decides "take"
    an error, or a process that has ended, decides against it, unless it is decided

A decision is recorded once, so the first one counts, and a process acts only after it has read it.
A process that ends before the decision ends the attempt for all; one that ends afterwards has no
part in it.

Nothing is sent before all have come: what one process refuses at once ends the attempt on all at
once, and no process waits for it in a collective.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fshard.mesh.layout import Mesh
from fshard.mesh.record import FileRecord
from fshard.mesh.runtimes.process import ProcessWorld, share_files
from fshard.mesh.runtimes.watch import open_store

TAKE = "take"
_STORE_IS_LOST = "the process with the store has ended"
_PAUSE = 0.001
"""Seconds between two looks of a process that waits for the others."""
_LOOK = 0.02
"""The same of one that waits for messages."""
_FILES = Path("/dev/shm")
"""The folder of decisions of processes on one machine. It is in memory."""


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
        self._token = ""
        if mesh.runtime == "process":
            # Worlds of other programs on the machine have names like these.
            token = open_store().compare_set(f"decision/{name}", "", secrets.token_hex(8))
            self._token = token.decode()

    def next(self) -> Decision | OwnDecision:
        """Return the decision on the next attempt."""
        if self._mesh.runtime != "process":
            return OwnDecision()
        self._count += 1
        return Decision(f"decision/{self._name}/{self._count}", self._token, self._mesh)


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


# Note [A decision outlives its process]
# The store may be in one of the processes, as it is under mpirun and srun. A process that has read
# "take" acts on it; if the store then ended, the others could not read what was decided, and would
# keep the old version: a mix. It was seen where the process with the store was killed. On one
# machine a decision is therefore a file, in memory, which outlives them all: it is written beside
# its place and linked there, which succeeds once: see `FileRecord`. Between machines it is a key of
# the store.


class StoreRecord:
    """A decision in a key of the store, which can be changed once."""

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key

    def decide(self, text: str) -> str:
        """Record a decision, unless there is one; return the one that counts."""
        try:
            return self._store.compare_set(self._key, "", text).decode()
        except dist.DistError:
            return _STORE_IS_LOST

    def current(self) -> str:
        """Return the decision, or "" before it."""
        try:
            if not self._store.check([self._key]):
                return ""
            return self._store.get(self._key).decode()
        except dist.DistError:
            return _STORE_IS_LOST

    def remove(self) -> None:
        """Delete the key."""
        with suppress(dist.DistError):
            self._store.delete_key(self._key)


class Decision:
    """One decision of processes. The methods are in order of time.

    Args:
        key: of its own.
        token: of the world, for names of files.
        mesh: the processes that vote.
    """

    def __init__(self, key: str, token: str, mesh: Mesh) -> None:
        self._key = key
        self._mesh = mesh
        self._world = ProcessWorld.of(mesh)
        self._store = open_store()
        self._next_look = 0.0
        self._record: FileRecord | StoreRecord = StoreRecord(self._store, key)
        if share_files(mesh):
            name = key.replace("/", "-")
            self._record = FileRecord(_FILES / f"fshard-{token}-{name}")

    def begin(self) -> str:
        """Wait until all processes have come; return "", or the decision against it."""
        try:
            self._store.set(self._key_of(self._world.rank), "")
            self._wait([self._key_of(rank) for rank in self._mesh.devices])
        except dist.DistError:
            return self._record.decide(_STORE_IS_LOST)
        return self._record.current()

    def links(self) -> AbstractContextManager[None]:
        """Return a context whose collectives end when it is decided against it."""
        return self._world.attempt(self._mesh, self._key, self._failure)

    def leave(self, reason: str) -> str:
        """Decide against it, unless it is decided; return the decision."""
        decision = self._record.decide(reason)
        self._finish()
        return decision

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
                self._record.decide(TAKE)
            self._wait(None)
        except dist.DistError:
            self._record.decide(_STORE_IS_LOST)
        decision = self._record.current()
        self._finish()
        return decision

    def _finish(self) -> None:
        """Remove what was recorded, once all processes have read it: the last one does."""
        with suppress(dist.DistError):  # then the last file stays
            if self._store.add(f"{self._key}/read", 1) < self._mesh.size:
                return
            self._record.remove()
            for name in ("votes", "read", *self._mesh.devices):
                self._store.delete_key(f"{self._key}/{name}")

    def _key_of(self, rank: int) -> str:
        """Return the key that is there once a process has come."""
        return f"{self._key}/{rank}"

    def _failure(self) -> str:
        """Return the decision, or "" before it, and between two looks at it."""
        now = time.monotonic()
        if now < self._next_look:
            return ""
        self._next_look = now + _LOOK
        return self._record.current()

    def _wait(self, keys: Sequence[str] | None) -> None:
        """Wait until these keys are in the store, if there are any, or until it is decided."""
        limit = self._world.timeout.total_seconds()
        end = time.monotonic() + limit
        while not self._record.current():
            if keys is not None and self._store.check(keys):
                return
            gone = [rank for rank in self._mesh.devices if self._world.peers.has_gone(rank)]
            if gone:
                self._record.decide(f"process {gone[0]} has ended")
            elif time.monotonic() > end:
                missing = [rank for rank in self._mesh.devices if not self._has_come(rank)]
                shown = ", ".join(map(str, missing)) or "another one"
                self._record.decide(f"process {shown} has not come within {limit:g} s")
            time.sleep(_PAUSE)

    def _has_come(self, rank: int) -> bool:
        return self._store.check([self._key_of(rank)])
