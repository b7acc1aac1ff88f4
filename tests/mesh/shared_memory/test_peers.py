"""Waits for the other processes of a machine: when they end, and what counts for the time limit."""

import os
import socket
import threading
import time
import tracemalloc
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from fshard.mesh.runtimes.transport import Works
from fshard.mesh.shared_memory import meet
from fshard.mesh.shared_memory.peers import Peer, Peers
from fshard.mesh.shared_memory.transport import SharedMemory

pytestmark = pytest.mark.skipif(
    meet._libc() is None, reason="this system does not read other processes' memory"
)
TURN = 0.05
"""Seconds that a yield takes on the loaded machine that these tests act."""


@pytest.fixture
def slow_yields(monkeypatch):
    """Act a loaded machine: whoever yields the processor waits for the turns of others."""
    monkeypatch.setattr(os, "sched_yield", lambda: time.sleep(TURN))


@pytest.fixture
def link():
    """The two ends of a link, both in this process."""
    ends = socket.socketpair()
    peers = [None, None]

    def meet_other(rank):
        peers[rank] = Peer(1 - rank, os.getpid(), ends[rank], meet._libc())

    other = threading.Thread(target=meet_other, args=(1,))
    other.start()
    meet_other(0)
    other.join()
    yield peers
    for end in ends:
        end.close()


def seconds_to_raise(text, peers, advance=lambda: False):
    """Return the seconds after which a wait for a message that nobody sends raises."""
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=text):
        peers.wait([(peers.by_rank[1], 1)], advance)
    return time.monotonic() - begin


def test_wait_for_ended_process_raises_on_loaded_machine_within_few_turns(link, slow_yields):
    peer, other = link
    other.socket.close()  # as the system does when a process ends
    seconds = seconds_to_raise(
        "Connection closed", Peers({1: peer}, timedelta(minutes=1), meet._libc())
    )
    assert seconds < 10 * TURN


def test_wait_for_process_that_ends_later_raises_at_once(link):
    peer, other = link
    threading.Timer(0.2, other.socket.shutdown, [socket.SHUT_RDWR]).start()
    seconds = seconds_to_raise(
        "Connection closed", Peers({1: peer}, timedelta(minutes=1), meet._libc())
    )
    assert seconds < 1


@pytest.mark.parametrize("makes_progress", [False, True])
def test_limit_of_a_wait_counts_from_its_start(link, slow_yields, makes_progress):
    """Neither the time of checks before sleeping nor that of other collectives comes on top."""
    peer, _ = link

    def advance():
        time.sleep(0.01)
        return makes_progress

    peers = Peers({1: peer}, timedelta(seconds=0.2), meet._libc())
    assert 0.2 < seconds_to_raise("Timed out", peers, advance) < 1


def test_message_of_a_process_that_has_ended_is_received(link):
    peer, other = link
    other.put(1, 0, 0, 0)
    other.close()
    peers = Peers({1: peer}, timedelta(seconds=5), meet._libc())
    peers.wait([(peer, 1)], lambda: False)
    assert 1 in peer.incoming.inbox


def test_numbers_of_calls_take_no_memory():
    transport = SharedMemory(Works(timedelta(1)), Peers({}, timedelta(1)), (0,), 0)
    tracemalloc.start()
    try:
        for _ in range(10_000):
            transport._message_exchange(0, SimpleNamespace(is_send=True, dtype=torch.uint8))
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 10_000
