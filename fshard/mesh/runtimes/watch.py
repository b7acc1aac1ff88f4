"""`FSHARD_CHECK=1`: processes publish their calls, so that a hang becomes an error.

A process that starts a collective writes its call to the shared store and continues. Before it waits for the result,
it waits until the others of the group have started theirs; if the calls differ, every process raises. Meanwhile it
compares all calls it has started, and reads the states of all processes: if each waits or has finished and no wait can
end, it raises.

A process that dies publishes nothing: those that wait for it raise when its neighbours notice, at the latest after the
time-out.

Where a process could receive the bytes of another call, or must wait for its group anyway, the start waits: on NCCL,
and over gloo in the first call along several axes. There all processes must start their collectives in one order.

A reported deadlock is certain: states are read, then calls, then states again. If the states are unchanged, each
process has waited all the time, and a call is removed only when its entire group has read it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fshard.errors import CollectiveTimeoutError, DeadlockError, LostProcessError, MismatchError
from fshard.mesh.collectives.moves import uneven
from fshard.mesh.runtimes.call import CallInfo, compares_lines

if TYPE_CHECKING:
    from fshard.mesh.spmd.scope import Group
    from fshard.source import Site

READ_INTERVAL = 0.05
"""Seconds between two reads of the store."""
MAX_PAUSE = 0.005
"""Maximal seconds to sleep between two checks whether a wait has ended."""


def watching() -> bool:
    """Return True if FSHARD_CHECK=1: processes check their calls."""
    return os.environ.get("FSHARD_CHECK", "0") not in ("", "0")


@dataclass(frozen=True)
class Meeting:
    """A started collective and its key in the store, until the entire group is seen to have started the same."""

    group: str
    prefix: str
    ranks: tuple[int, ...]
    text: str

    @property
    def keys(self) -> list[str]:
        """Where each process of the group writes its call."""
        return [f"{self.prefix}/{rank}" for rank in self.ranks]


class Watch:
    """The published state of one process, and its view of the others."""

    def __init__(
        self,
        rank: int,
        timeout: timedelta,
        has_gone: Callable[[int], bool],
        advance: Callable[[], bool],
    ) -> None:
        self.rank, self._timeout, self._has_gone, self._advance = (
            rank,
            timeout.total_seconds(),
            has_gone,
            advance,
        )
        self.size = dist.get_world_size()
        self.store = open_store()
        self._counts: dict[str, int] = defaultdict(int)
        self._open_meetings: dict[Meeting, None] = {}
        self._parted: dict[str, MismatchError] = {}
        self._count = 0
        self._publish_state("runs", [], "")

    # -- collectives --------------------------------------------------------------------------------------------

    def start(self, group: Group, call: str, site: Site, purpose: str = "values") -> Meeting:
        """Publish a collective that this process starts."""
        name = "-".join(map(str, group.members))
        if name in self._parted:
            raise self._parted[name]
        text = f"{call} at {site}"
        meeting = Meeting(name, f"call/{name}/{self._next_number(name)}", group.members, text)
        self.store.set(f"{meeting.prefix}/{self.rank}", _call_row(call, site, purpose))
        self._open_meetings[meeting] = None
        return meeting

    def meet(self, meeting: Meeting) -> None:
        """Wait for the entire group, and raise unless all have started the same collective."""
        self._wait_for_keys(meeting.keys, meeting.ranks, meeting.text)
        self._compare_calls(meeting)
        del self._open_meetings[meeting]
        if self.store.add(f"{meeting.prefix}/seen", 1) == len(meeting.ranks):
            for key in [*meeting.keys, f"{meeting.prefix}/seen"]:
                self.store.delete_key(key)

    def _compare_calls(self, meeting: Meeting) -> None:
        """Raise if those that have started a collective have started different ones."""
        if error := _mismatch_error(
            self.store, meeting.ranks, meeting.keys, lines=compares_lines()
        ):
            self._parted[meeting.group] = error
            raise error

    # -- messages -----------------------------------------------------------------------------------------------

    def sent(self, call: CallInfo, to: int) -> None:
        """Publish that a message has been sent."""
        route = f"{self.rank}>{call.group.members[to]}"
        self.store.set(
            f"sent/{route}/{self._next_number(route)}",
            _call_row(call.signature, call.site, call.purpose),
        )

    def expect(self, call: CallInfo, source: int) -> None:
        """Wait until the message has been sent, and raise unless it is the one expected."""
        sender, signature = call.group.members[source], call.signature
        route = f"{sender}>{self.rank}"
        key = f"sent/{route}/{self._next_number(route)}"
        self._wait_for_keys(
            [key], [sender], f"recv of {signature} from process {sender} at {call.site}"
        )
        message = json.loads(self.store.get(key))
        self.store.delete_key(key)
        if message["call"] != signature:
            raise MismatchError(
                f"process {self.rank} expects {signature} at {call.site}, but received {message['call']}, sent by process "
                f"{sender} at {message['site']}.{uneven(call.purpose, message['for'])}"
            )

    # -- waiting ------------------------------------------------------------------------------------------------

    def finished(self) -> None:
        """Publish that this process makes no more calls; the process that serves the store stays until all have done
        so.
        """
        with contextlib.suppress(dist.DistError):  # the process that served the store has died
            self._publish_state("has finished", [], "")
            deadline = time.monotonic() + 10
            while self.rank == 0 and time.monotonic() < deadline:
                if not any(
                    state["keys"] or state["action"] == "runs" for state in self._read_states()
                ):
                    return
                time.sleep(READ_INTERVAL)

    def _next_number(self, name: str) -> int:
        self._counts[name] += 1
        return self._counts[name] - 1

    def _publish_state(self, action: str, keys: list[str], text: str) -> None:
        self._count += 1
        state = {"action": action, "keys": keys, "text": text, "turn": self._count}
        self.store.set(f"state/{self.rank}", json.dumps(state))

    def _wait_for_keys(self, keys: list[str], ranks: Sequence[int], text: str) -> None:
        """Wait for keys of other processes, described by the text, and advance what is in progress meanwhile."""
        if self.store.check(keys):
            return
        self._publish_state("waits", keys, f"waits in {text}")
        began = looked = time.monotonic()
        pause = 0.0002
        while not self.store.check(keys):
            if not self._advance():
                time.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)
            if time.monotonic() - looked > READ_INTERVAL:
                for meeting in self._open_meetings:
                    self._compare_calls(meeting)
                self._raise_if_deadlocked()
                self._raise_if_lost_or_late(
                    ranks, text, is_late=time.monotonic() - began > self._timeout
                )
                looked = time.monotonic()
        self._publish_state("runs", [], "")

    def _raise_if_lost_or_late(self, ranks: Sequence[int], text: str, *, is_late: bool) -> None:
        """Raise if one of these processes has gone without a word, or if it is too late."""
        gone_ranks = [rank for rank in ranks if rank != self.rank and self._has_gone(rank)]
        if not gone_ranks and not is_late:
            return
        states = self._read_states()
        gone_ranks = [rank for rank in gone_ranks if states[rank]["action"] != "has finished"]
        if gone_ranks:
            raise LostProcessError(
                f"{text} cannot end: process {gone_ranks[0]} has failed or ended. Its own error is the one to look for."
            )
        if is_late:
            raise CollectiveTimeoutError(
                f"{text} did not end within {self._timeout:g} s.\n{_table_of_states(states)}"
            )

    def _read_states(self) -> list[dict[str, Any]]:
        keys = [f"state/{rank}" for rank in range(self.size)]
        initial = {"action": "runs", "keys": [], "text": ""}
        return [
            json.loads(self.store.get(key)) if self.store.check([key]) else initial for key in keys
        ]

    def _raise_if_deadlocked(self) -> None:
        """Raise if no process can continue."""
        states = self._read_states()
        stuck = all(
            state["action"] == "has finished"
            or (state["action"] == "waits" and not self.store.check(state["keys"]))
            for state in states
        )
        if stuck and states == self._read_states():
            raise DeadlockError(
                f"No process can go on.\n{_table_of_states(states)}\n"
                "Every process of a group must call the same collectives in the same order."
            )


def open_store() -> Any:
    """Return the part of the world's store that is fshard's."""
    default: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    return dist.PrefixStore("fshard", default)  # pyright: ignore[reportPrivateImportUsage]


def compare_failed(call: CallInfo) -> None:
    """Publish a call that failed over a group of torch.distributed; raise if others failed in a different one."""
    prefix, ranks = call.meeting
    keys = [f"failed/{prefix}/{rank}" for rank in ranks]
    with contextlib.suppress(
        dist.DistError, ValueError
    ):  # the process with the store has failed; this one has left
        store = open_store()
        store.set(
            f"failed/{prefix}/{dist.get_rank()}", _call_row(call.signature, call.site, call.purpose)
        )
        deadline = time.monotonic() + 1
        while (
            not store.check(keys) and time.monotonic() < deadline
        ):  # another process may not have failed
            time.sleep(MAX_PAUSE)
        if error := _mismatch_error(
            store, ranks, keys, lines=call.move is not None and compares_lines()
        ):
            raise error


def _call_row(call: str, site: Site, purpose: str) -> str:
    return json.dumps({"call": call, "site": str(site), "for": purpose})


def _table_of_states(states: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"  process {rank}: {state['text'] or state['action']}" for rank, state in enumerate(states)
    )


def _mismatch_error(
    store: Any, ranks: Sequence[int], keys: Sequence[str], *, lines: bool
) -> MismatchError | None:
    """Return the error that lists the calls that processes have published, if they differ."""
    rows = zip(ranks, keys, strict=True)
    calls = {rank: json.loads(store.get(key)) for rank, key in rows if store.check([key])}
    if len({(call["call"], call["site"] if lines else "") for call in calls.values()}) <= 1:
        return None
    table = "\n".join(
        f"  process {rank}: {call['call']} at {call['site']}" for rank, call in calls.items()
    )
    purposes = sorted({call["for"] for call in calls.values()})
    hint = uneven(purposes[0], purposes[-1])
    if len({call["call"] for call in calls.values()}) == 1:
        hint = " Only the lines differ; if that is meant, run with FSHARD_LINES=0."
    return MismatchError(
        f"The processes of one group met in one collective with different calls.\n{table}\n"
        f"Every process of a group must call the same collectives in the same order, on equal shapes, dtypes and trees.{hint}"
    )
