"""`Engine`: messages of a page in, answers out; one thread answers, another one proves.

    {"id", "page", "slot", "state"} ──> newest of its slot ──> answer ──> proof
                                        │                     unless a newer state has come
                                        └─ older ones are dropped

It knows no transport: `fs.lab` sends messages by a widget, `fshard lab` by HTTP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from fshard.errors import FshardError
from fshard.laboratory.answer import Answer, field_of_error
from fshard.laboratory.code import program_code
from fshard.laboratory.controls import controls_of, fields_with_controls
from fshard.laboratory.proof import prove, why_not_proven
from fshard.laboratory.state import LabState
from fshard.laboratory.subject import Subject

Message = dict[str, Any]
PageSlot = tuple[str, str]

PAUSE = 0.3
"""Seconds before a proof begins: a control that moves has the processor to itself."""

KEPT = 64
"""The answers that are kept, so that undo shows one at once."""


class Engine:
    """The engine of one lab.

    Args:
        subject: the model.
        state: with which the page begins.
        send: is called with each message of a proof, in another thread.
    """

    def __init__(
        self, subject: Subject, state: LabState, send: Callable[[Message], None] | None = None
    ) -> None:
        self.subject = subject
        self.state = state
        self.send = send
        self._answers: dict[str, Answer] = {}
        self._replies: dict[str, Message] = {}
        self._last_good: dict[PageSlot, LabState] = {}
        self._newest: dict[PageSlot, int] = {}
        self._lock = threading.Lock()  # one answer at a time: the abstract mesh has one thread
        self._newest_lock = threading.Lock()
        self._proof_lock = threading.Lock()  # one proof at a time: each has many threads
        self._proofs: list[threading.Thread] = []
        self._is_closed = False

    # -- answers ----------------------------------------------------------------------------------

    def reply(self, message: Mapping[str, Any]) -> Message:
        """Return the answer to a message: "answer", "shards", "error" or "dropped"."""
        head = _head(message)
        self.expect(message)
        with self._lock:
            if not _is_of_shards(message) and not self._is_newest(head):
                return {**head, "kind": "dropped"}
            reply = self._reply(message, head)
        if reply["kind"] == "answer":
            self._begin_proof(head, LabState.from_json(reply["state"]))
        return reply

    def expect(self, message: Mapping[str, Any]) -> None:
        """Drop all older messages of the slot from now on."""
        if _is_of_shards(message):
            return
        head = _head(message)
        with self._newest_lock:
            newest = self._newest.get(_slot(head), -1)
            self._newest[_slot(head)] = max(newest, head["id"])

    @property
    def shown_state(self) -> LabState:
        """The last state of a first slot that has an answer."""
        shown = [state for (_, slot), state in self._last_good.items() if slot == "A"]
        return shown[-1] if shown else self.state

    def code(self, state: LabState) -> str:
        """Return the program of a state."""
        return program_code(state, self.answer(state).model)

    def _is_newest(self, head: Message) -> bool:
        return head["id"] >= self._newest[_slot(head)]

    def _reply(self, message: Mapping[str, Any], head: Message) -> Message:
        begin = time.perf_counter()
        content = message.get("state")
        last_good = self._last_good.get(_slot(head), self.state)
        try:
            state = self.state if content is None else LabState.from_json(content)
            content = state.to_json()
            leaf = message.get("leaf")
            if _is_of_shards(message):
                return {**head, "kind": "shards", "shards": self.answer(state).shards(leaf)}
            is_kept = state.text in self._replies
            reply = self._shown(state)
            shards = self.answer(state).shards(leaf)
        except Exception as error:
            # Whatever the code of a model raises: the page shows it, and stays as it is.
            field = field_of_error(error, content, last_good, fields_with_controls(last_good))
            return {**head, "kind": "error", "text": _text(error), "field": field}
        self._last_good.pop(_slot(head), None)
        self._last_good[_slot(head)] = state  # as the newest
        milliseconds = None if is_kept else round(1e3 * (time.perf_counter() - begin))
        return {**head, **reply, "shards": shards, "milliseconds": milliseconds}

    def answer(self, state: LabState) -> Answer:
        """Return the answer of a state, which is kept."""
        known = self._answers.pop(state.text, None)
        answer = known or Answer(state, self.subject)
        self._answers[state.text] = answer  # as the newest
        while len(self._answers) > KEPT:
            oldest = next(iter(self._answers))
            del self._answers[oldest]
            self._replies.pop(oldest, None)
        return answer

    def _shown(self, state: LabState) -> Message:
        """Return the part of an answer that depends on the state alone."""
        answer = self.answer(state)
        if state.text not in self._replies:
            self._replies[state.text] = {
                "kind": "answer",
                "state": state.to_json(),
                "controls": controls_of(state),
                "document": answer.document(),
                "layouts": answer.layouts(),
                "code": self.code(state),
            }
        return self._replies[state.text]

    def close(self) -> None:
        """Abandon all proofs, and wait until they have ended."""
        self._is_closed = True
        for proof in self._proofs:
            proof.join()

    # -- proofs -----------------------------------------------------------------------------------

    def _begin_proof(self, head: Message, state: LabState) -> None:
        """Prove a state in a thread of its own; a newer state of the slot abandons the proof."""
        if self.send is None:
            return
        answer = self.answer(state)
        proof = threading.Thread(target=self._prove, args=(head, answer), daemon=True)
        self._proofs = [thread for thread in self._proofs if thread.is_alive()]
        self._proofs.append(proof)
        proof.start()

    def _prove(self, head: Message, answer: Answer) -> None:
        send = self.send
        assert send is not None

        def is_abandoned() -> bool:
            return self._is_closed or not self._is_newest(head)

        time.sleep(PAUSE)
        if is_abandoned():
            return
        try:
            reason = why_not_proven(answer)
            result = {"verdict": "none", "text": reason, "rows": []}
            if not reason:
                send({**head, "kind": "proof", "verdict": "running", "text": "", "rows": []})
                with self._proof_lock:
                    result = prove(answer, is_abandoned)
        except Exception as error:  # whatever the program raises with values
            result = {"verdict": "none", "text": _text(error), "rows": []}
        if result is not None and not is_abandoned():
            send({**head, "kind": "proof", **result})


def _head(message: Mapping[str, Any]) -> Message:
    """Return the fields of a message that its reply has too."""
    head = {"id": message.get("id", 0), "slot": message.get("slot", "A")}
    if "page" in message:
        head["page"] = message["page"]
    return head


def _slot(head: Message) -> PageSlot:
    """Return the slot of a message: each page has its own, as two pages count ids each for itself."""
    return str(head.get("page", "")), str(head["slot"])


def _is_of_shards(message: Mapping[str, Any]) -> bool:
    return message.get("only") == "shards"


def _text(error: Exception) -> str:
    """Return the text of an error; of one that is not the library's, with its class."""
    first_line = str(error).partition("\n")[0]
    is_of_library = isinstance(error, FshardError | ValueError)
    return first_line if is_of_library else f"{type(error).__name__}: {first_line}"
