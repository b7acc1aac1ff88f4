"""`FSHARD_CHECK=1`: processes publish their calls, so that a hang becomes an error.

A process that starts a collective writes its call to the shared store and continues. Before it
waits for the result, it waits until the others of the group have started theirs; if the calls
differ, every process raises. Meanwhile it compares all calls that it has started, and reads the
states of all processes: see Note [A reported deadlock is certain].

    in the store                        written by a process
    call/GROUP/NUMBER/RANK              when it starts a collective
    call/GROUP/NUMBER/seen              when it has seen that the entire group has started it
    sent/SENDER>RECEIVER/NUMBER         when it sends a message
    state/RANK                          when it begins or ends a wait

A process that dies publishes nothing: those that wait for it raise when its neighbours notice, at
the latest after the time-out.

Where a process could receive the bytes of another call, or must wait for its group anyway, the
start waits: on NCCL, and over gloo in the first call along several axes. There all processes must
start their collectives in one order.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fshard.errors import CollectiveTimeoutError, DeadlockError, LostProcessError, MismatchError
from fshard.mesh.collectives.moves import AWAITED_COTANGENTS, uneven
from fshard.mesh.layout import shortened
from fshard.mesh.runtimes.call import CallInfo, compares_lines

if TYPE_CHECKING:
    from fshard.mesh.collectives.moves import Purpose
    from fshard.mesh.spmd.scope import Group
    from fshard.source import Site

READ_INTERVAL = 0.05
"""Seconds between two reads of the store."""
_HAS_LEFT = "has left"
"""The state of a process that has joined another world."""
MIN_PAUSE, MAX_PAUSE = 0.0002, 0.005
"""Seconds to sleep between two checks whether a wait has ended: at first, and at most."""


def watching() -> bool:
    """Return True if FSHARD_CHECK=1: processes check their calls."""
    return os.environ.get("FSHARD_CHECK", "0") not in ("", "0")


@dataclass(frozen=True)
class Meeting:
    """A started collective and its key in the store.

    It is open until the entire group is seen to have started the same.
    """

    group: str
    prefix: str
    ranks: tuple[int, ...]
    text: str

    @property
    def keys(self) -> list[str]:
        """Where each process of the group writes its call."""
        return [f"{self.prefix}/{rank}" for rank in self.ranks]


class Watch:
    """The published state of one process, and its view of the others.

    Args:
        rank: this process.
        timeout: the limit of a wait.
        has_gone: True for the rank of a process of this machine that has ended.
        advance: advances what is in progress, and returns True if something could be.
    """

    def __init__(
        self,
        rank: int,
        timeout: timedelta,
        has_gone: Callable[[int], bool],
        advance: Callable[[], bool],
    ) -> None:
        self.rank = rank
        self.size = dist.get_world_size()
        self.store = open_store()
        self._timeout = timeout.total_seconds()
        self._has_gone = has_gone
        self._advance = advance
        self._counts: dict[str, int] = defaultdict(int)  # calls of each group, messages of a route
        self._open_meetings: dict[Meeting, None] = {}  # a set in order
        self._parted: dict[str, MismatchError] = {}  # the groups whose calls differed stay closed
        self._turn = 0
        self._attempt = ""
        self._failure: Callable[[], str] = str
        self._publish_state("runs", [], "")

    @contextlib.contextmanager
    def attempt(self, name: str, failure: Callable[[], str]) -> Generator[None]:
        """Run a block whose calls may fail on some: see Note [Attempts leave links open].

        They are counted apart, and end where the attempt has failed.
        """
        self._attempt = name
        self._failure = failure
        try:
            yield
        finally:
            self._attempt = ""
            self._failure = str
            for meeting in [*self._open_meetings]:
                if meeting.group.endswith(name):
                    del self._open_meetings[meeting]

    # -- collectives -------------------------------------------------------------------------------

    def start(
        self,
        group: Group,
        call: str,
        site: Site,
        purpose: str = "values",
        *,
        has_one_line: bool = True,
    ) -> Meeting:
        """Publish a collective that this process starts.

        `has_one_line`: all processes must call it in one line of the program.
        """
        name = "-".join(map(str, group.members)) + self._attempt
        if name in self._parted:
            raise self._parted[name]
        prefix = f"call/{name}/{self._next_number(name)}"
        if group.numbers is not None:
            call += f" of processes {shortened(group.members)}"
        meeting = Meeting(name, prefix, group.members, f"{call} at {site}")
        compares_line = has_one_line and compares_lines()
        row = _call_row(call, site, purpose, compares_line=compares_line)
        self.store.set(f"{prefix}/{self.rank}", row)
        self._open_meetings[meeting] = None
        return meeting

    def meet(self, meeting: Meeting) -> None:
        """Wait for the entire group, and raise unless all have started the same collective."""
        self._wait_for_keys(meeting.keys, meeting.ranks, meeting.text)
        self._compare_calls(meeting)
        del self._open_meetings[meeting]
        # The last process removes the call: see Note [A reported deadlock is certain].
        seen = f"{meeting.prefix}/seen"
        if self.store.add(seen, 1) == len(meeting.ranks):
            for key in [*meeting.keys, seen]:
                self.store.delete_key(key)

    def _compare_calls(self, meeting: Meeting) -> None:
        """Raise if those that have started a collective have started different ones."""
        error = _mismatch_error(self.store, meeting.ranks, meeting.keys)
        if error is not None:
            self._parted[meeting.group] = error
            raise error

    # -- messages ----------------------------------------------------------------------------------

    def sent(self, call: CallInfo, to: int) -> None:
        """Publish that a message has been sent."""
        route = f"{self.rank}>{call.group.members[to]}"
        key = f"sent/{route}/{self._next_number(route)}"
        self.store.set(key, _call_row(call.signature, call.site, call.purpose))

    def expect(self, call: CallInfo, source: int) -> None:
        """Wait until the message has been sent, and raise unless it is the one expected."""
        sender = call.group.members[source]
        signature = call.signature
        route = f"{sender}>{self.rank}"
        key = f"sent/{route}/{self._next_number(route)}"
        text = f"recv of {signature} from process {sender} at {call.site}"
        advice = AWAITED_COTANGENTS if call.number is not None else ""
        self._wait_for_keys([key], [sender], text, advice)

        message = json.loads(self.store.get(key))
        self.store.delete_key(key)
        if message["call"] != signature:
            raise MismatchError(
                f"process {self.rank} expects {signature} at {call.site}, but received "
                f"{message['call']}, sent by process {sender} at {message['site']}."
                f"{call.advice(call.purpose, message['for'])}"
            )

    # -- waiting -----------------------------------------------------------------------------------

    def finished(self, *, keeps_store: bool = False) -> None:
        """Publish that this process makes no more calls.

        Process 0, which serves the store, stays until all have done so, or for ten seconds. If it
        keeps the store, it leaves for another world, and the others will not wait for it.
        """
        with contextlib.suppress(dist.DistError):  # the process that served the store has died
            if keeps_store:
                self._publish_state(_HAS_LEFT, [], "")
                return
            self._publish_state("has finished", [], "")
            deadline = time.monotonic() + 10
            while self.rank == 0 and time.monotonic() < deadline:
                if not any(_needs_store(state) for state in self._read_states()):
                    return
                time.sleep(READ_INTERVAL)

    def _next_number(self, name: str) -> int:
        number = self._counts[name]
        self._counts[name] = number + 1
        return number

    def _publish_state(self, action: str, keys: list[str], text: str, advice: str = "") -> None:
        self._turn += 1
        turn = self._turn
        state = {"action": action, "keys": keys, "text": text, "advice": advice, "turn": turn}
        self.store.set(f"state/{self.rank}", json.dumps(state))

    def _wait_for_keys(
        self, keys: list[str], ranks: Sequence[int], text: str, advice: str = ""
    ) -> None:
        """Wait for keys of other processes; advance what is in progress meanwhile.

        Args:
            keys: in the store.
            ranks: the processes that write them.
            text: the call that waits, for errors.
            advice: for the error of a deadlock.
        """
        if self.store.check(keys):
            return
        # An attempt ends by its decision, which this process may not have read yet: then it waits for
        # calls that the others will not make, and still is not stuck.
        action = "tries" if self._attempt else "waits"
        self._publish_state(action, keys, f"waits in {text}", advice)
        begin = last_read = time.monotonic()
        pause = MIN_PAUSE
        while not self.store.check(keys):
            if not self._advance():
                time.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)
            if time.monotonic() - last_read > READ_INTERVAL:
                failed = self._failure()
                if failed:
                    raise RuntimeError(f"The attempt has failed: {failed}")
                for meeting in self._open_meetings:
                    self._compare_calls(meeting)
                self._raise_if_deadlocked()
                is_late = time.monotonic() - begin > self._timeout
                self._raise_if_lost_or_late(ranks, text, is_late=is_late)
                last_read = time.monotonic()
        self._publish_state("runs", [], "")

    def _raise_if_lost_or_late(self, ranks: Sequence[int], text: str, *, is_late: bool) -> None:
        """Raise if one of these processes has ended without a word, or if it is too late."""
        states = self._read_states()
        gone_ranks: list[int] = []
        for rank in ranks:
            has_left = states[rank]["action"] == _HAS_LEFT
            if rank != self.rank and (has_left or self._has_gone(rank)):
                gone_ranks.append(rank)
        if not gone_ranks and not is_late:
            return
        for rank in gone_ranks:
            if states[rank]["action"] != "has finished":
                raise LostProcessError(
                    f"{text} cannot end: process {rank} has failed or ended. Its own error is the "
                    "one to look for."
                )
        if is_late:
            raise CollectiveTimeoutError(
                f"{text} did not end within {self._timeout:g} s.\n{_table_of_states(states)}"
            )

    def _read_states(self) -> list[dict[str, Any]]:
        """Return the states of all processes; one that has not published any runs."""
        states: list[dict[str, Any]] = []
        for rank in range(self.size):
            key = f"state/{rank}"
            if self.store.check([key]):
                states.append(json.loads(self.store.get(key)))
            else:
                states.append({"action": "runs", "keys": [], "text": "", "advice": ""})
        return states

    # Note [A reported deadlock is certain]
    # If each process waits or has finished, and the keys of no wait are there, no process can go
    # on. But states and keys are read one after another, and processes run meanwhile. So states are
    # read, then keys, then states again. A state has a number that grows (`turn`): if the states
    # are unchanged, each process has waited all the time. And a key that was missing has not been
    # there before: a call is removed only when its entire group has read it.
    def _raise_if_deadlocked(self) -> None:
        """Raise if no process can continue."""
        states = self._read_states()
        if not all(self._is_stuck(state) for state in states):
            return
        if states == self._read_states():
            advice = ""
            for state in states:
                advice = advice or state["advice"]
            raise DeadlockError(
                f"No process can go on.\n{_table_of_states(states)}\n"
                f"Every process of a group must call the same collectives in the same order.{advice}"
            )

    def _is_stuck(self, state: dict[str, Any]) -> bool:
        if state["action"] == "has finished":
            return True
        return state["action"] == "waits" and not self.store.check(state["keys"])


def open_store() -> Any:
    """Return the part of the world's store that is fshard's."""
    return dist.PrefixStore("fshard", default_store())  # pyright: ignore[reportPrivateImportUsage]


def default_store() -> Any:
    """Return the world's store."""
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def publish_leaving() -> None:
    """Publish that this process leaves for another world, so that none waits for its calls."""
    with contextlib.suppress(dist.DistError, ValueError):  # as in `compare_failed`
        open_store().set(f"left/{dist.get_rank()}", "")


def compare_failed(call: CallInfo, has_gone: Callable[[int], bool]) -> None:
    """Publish a call that failed over a group of torch.distributed.

    Raise if others failed in a different one. `has_gone`: True for the rank of a process of this
    machine that has ended.
    """
    prefix, ranks = call.meeting
    keys = [f"failed/{prefix}/{rank}" for rank in ranks]
    # The process with the store may have failed, or this one have left.
    with contextlib.suppress(dist.DistError, ValueError):
        store = open_store()
        row = _call_row(call.signature, call.site, call.purpose, compares_line=call.has_one_line)
        store.set(f"failed/{prefix}/{dist.get_rank()}", row)
        # Another process may not have failed, so this one waits for a second only. One that is
        # gone does not fail any more.
        deadline = time.monotonic() + 1
        others = [rank for rank in ranks if rank != dist.get_rank()]
        while not store.check(keys) and time.monotonic() < deadline:
            if any(has_gone(rank) or store.check([f"left/{rank}"]) for rank in others):
                break
            time.sleep(MAX_PAUSE)
        error = _mismatch_error(store, ranks, keys, advice=call.advice)
        if error is not None:
            raise error


def _needs_store(state: dict[str, Any]) -> bool:
    return state["action"] == "runs" or bool(state["keys"])


def _call_row(call: str, site: Site, purpose: str, *, compares_line: bool = False) -> str:
    row = {"call": call, "site": str(site), "for": purpose, "compares_line": compares_line}
    return json.dumps(row)


def _table_of_states(states: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for rank, state in enumerate(states):
        lines.append(f"  process {rank}: {state['text'] or state['action']}")
    return "\n".join(lines)


def _mismatch_error(
    store: Any,
    ranks: Sequence[int],
    keys: Sequence[str],
    *,
    advice: Callable[[Purpose, Purpose], str] = uneven,
) -> MismatchError | None:
    """Return the error that lists the calls that processes have published, if they differ.

    The same call in another line differs too, if its line is compared. `advice` is that of the
    calls.
    """
    calls: dict[int, dict[str, Any]] = {}
    for rank, key in zip(ranks, keys, strict=True):
        if store.check([key]):
            calls[rank] = json.loads(store.get(key))
    names = {call["call"] for call in calls.values()}
    sites = {call["site"] for call in calls.values()}
    are_lines_compared = any(call["compares_line"] for call in calls.values())
    if len(names) <= 1 and (len(sites) <= 1 or not are_lines_compared):
        return None

    rows = [f"  process {rank}: {call['call']} at {call['site']}" for rank, call in calls.items()]
    table = "\n".join(rows)
    if len(names) == 1:
        hint = " Only the lines differ; if that is meant, run with FSHARD_LINES=0."
    else:
        purposes = sorted({call["for"] for call in calls.values()})
        hint = advice(purposes[0], purposes[-1])
    return MismatchError(
        f"The processes of one group met in one collective with different calls.\n{table}\n"
        "Every process of a group must call the same collectives in the same order, on equal "
        f"shapes, dtypes and trees.{hint}"
    )
