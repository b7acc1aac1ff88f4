"""`FSHARD_CHECK=1`: processes tell each other what they are about to do, so that a hang becomes an error.

Before each collective a process writes its call into the store that all share, and waits there, where waiting can be
watched, for the others of its group.  If the calls differ, every process raises.  While it waits, it reads what all
processes say of themselves: if each waits or has finished, and no wait can end, nobody ever will go on, and it raises.

A process that dies says nothing: those that wait for it raise as soon as its neighbours know that it has gone, and at
the latest when the time-out is over.  A collective that is started waits for its group as well, so here all processes
have to start theirs in one order, also those of different groups.

The verdict of a deadlock cannot be wrong: states are read first and calls afterwards, and calls are only ever added.
A process that went on in between did so because its group was complete, and that is seen in the calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from fshard.errors import CollectiveTimeoutError, DeadlockError, LostProcessError, MismatchError

if TYPE_CHECKING:
    from fshard.mesh.scope import Group
    from fshard.source import Site

LOOK = 0.05
"""Seconds between two looks at the others."""


def watching() -> bool:
    """Return whether processes are to check their calls."""
    return os.environ.get("FSHARD_CHECK", "0") not in ("", "0")


class Watch:
    """One process's account of itself, and its view of the others."""

    def __init__(self, rank: int, timeout: timedelta, gone: Callable[[int], bool]) -> None:
        self.rank, self._timeout, self._gone = rank, timeout.total_seconds(), gone
        self.size = dist.get_world_size()
        default: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        self.store = dist.PrefixStore("fshard", default)  # pyright: ignore[reportPrivateImportUsage]
        self.lines = os.environ.get("FSHARD_CHECK") != "shapes"
        self._counts: dict[str, int] = defaultdict(int)
        self._say("runs", [], "")

    def meet(self, group: Group, call: str, site: Site) -> None:
        """Wait for the whole group, and raise unless all make the same call."""
        name = "-".join(map(str, group.members))
        turn = self._next(name)
        keys = [f"call/{name}/{turn}/{rank}" for rank in group.members]
        mine = json.dumps({"call": call, "site": str(site)})
        self.store.set(f"call/{name}/{turn}/{self.rank}", mine)
        if turn >= 2:  # all have passed the turn before this one, so nobody reads the one before that
            self.store.delete_key(f"call/{name}/{turn - 2}/{self.rank}")
        self._wait(keys, group.members, f"{call} over {'+'.join(group.axes)} at {site}")
        calls = {rank: json.loads(self.store.get(key)) for rank, key in zip(group.members, keys, strict=True)}
        compared = {(call["call"], call["site"] if self.lines else "") for call in calls.values()}
        if len(compared) > 1:
            self._raise_mismatch(calls)

    def _raise_mismatch(self, calls: dict[int, dict[str, str]]) -> NoReturn:
        table = "\n".join(f"  process {rank}: {call['call']} at {call['site']}" for rank, call in calls.items())
        hint = ""
        if len({call["call"] for call in calls.values()}) == 1:
            hint = " Only the lines differ; if that is meant, run with FSHARD_CHECK=shapes."
        raise MismatchError(
            f"The processes of one group met in one collective with different calls.\n{table}\n"
            f"Every process of a group has to call the same collectives in the same order, on equal shapes and dtypes.{hint}"
        )

    def sent(self, group: Group, to: int, what: str, site: Site) -> None:
        """Tell that a message has been sent."""
        route = f"{self.rank}>{group.members[to]}"
        self.store.set(f"sent/{route}/{self._next(route)}", json.dumps({"what": what, "site": str(site)}))

    def expect(self, group: Group, source: int, what: str, site: Site) -> None:
        """Wait until the message has been sent, and raise unless it is the one expected."""
        route = f"{group.members[source]}>{self.rank}"
        key = f"sent/{route}/{self._next(route)}"
        self._wait([key], [group.members[source]], f"recv of {what} from process {group.members[source]} at {site}")
        message = json.loads(self.store.get(key))
        self.store.delete_key(key)
        if message["what"] != what:
            raise MismatchError(
                f"process {self.rank} expects recv of {what} at {site}, but what comes is {message['what']}, sent by "
                f"process {group.members[source]} at {message['site']}."
            )

    def finished(self) -> None:
        """Tell that this process makes no more calls; whoever keeps the store stays until all have said so."""
        with contextlib.suppress(dist.DistError):  # whoever kept the store has died: there is nobody to tell
            self._say("has finished", [], "")
            until = time.monotonic() + 10
            while self.rank == 0 and time.monotonic() < until and not self._all_finished():
                time.sleep(LOOK)

    def _all_finished(self) -> bool:
        return not any(state["keys"] or state["what"] == "runs" for state in self._states())

    def _next(self, name: str) -> int:
        self._counts[name] += 1
        return self._counts[name] - 1

    def _say(self, what: str, keys: list[str], text: str) -> None:
        self.store.set(f"state/{self.rank}", json.dumps({"what": what, "keys": keys, "text": text}))

    def _wait(self, keys: list[str], ranks: Sequence[int], text: str) -> None:
        """Wait for the keys that these processes set, for what the text says."""
        if self.store.check(keys):
            return
        self._say("waits", keys, f"waits in {text}")
        began = looked = time.monotonic()
        pause = 0.0002
        while not self.store.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, LOOK)
            if time.monotonic() - looked > LOOK:
                self._look()
                self._give_up(ranks, text, late=time.monotonic() - began > self._timeout)
                looked = time.monotonic()
        self._say("runs", [], "")

    def _give_up(self, ranks: Sequence[int], text: str, *, late: bool) -> None:
        """Raise if one of these processes has gone without a word, or if it is too late."""
        lost = [rank for rank in ranks if rank != self.rank and self._gone(rank)]
        if not lost and not late:
            return
        states = self._states()
        lost = [rank for rank in lost if states[rank]["what"] != "has finished"]
        if lost:
            raise LostProcessError(
                f"{text} cannot end: process {lost[0]} has failed or ended. Its own error is the one to look for."
            )
        if late:
            raise CollectiveTimeoutError(f"{text} did not end within {self._timeout:g} s.\n{_table(states)}")

    def _states(self) -> list[dict[str, Any]]:
        keys = [f"state/{rank}" for rank in range(self.size)]
        unknown = {"what": "runs", "keys": [], "text": ""}
        return [json.loads(self.store.get(key)) if self.store.check([key]) else unknown for key in keys]

    def _look(self) -> None:
        states = self._states()
        stuck = all(
            state["what"] == "has finished" or (state["what"] == "waits" and not self.store.check(state["keys"]))
            for state in states
        )
        if stuck:
            raise DeadlockError(
                f"No process can go on.\n{_table(states)}\n"
                "Every process of a group has to call the same collectives in the same order."
            )


def _table(states: list[dict[str, Any]]) -> str:
    return "\n".join(f"  process {rank}: {state['text'] or state['what']}" for rank, state in enumerate(states))
