"""Rings of messages in shared memory: a queue from which any message can be taken."""

import ctypes
import os
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fshard.mesh.shared_memory import meet, rings

pytestmark = pytest.mark.skipif(
    meet._libc() is None, reason="this system does not read other processes' memory"
)


def ring(wake=lambda: None):
    number = rings.new_ring()
    try:
        return rings.RingWriter(number, wake), rings.RingReader(number)
    finally:
        os.close(number)


def put(writer, key, text):
    kept = ctypes.create_string_buffer(text, max(len(text), 1))
    return writer.put(key, rings.INSIDE, len(text), key + 1, ctypes.addressof(kept))


def taken(reader, key):
    message = reader.inbox.pop(key)
    assert message.address == rings.INSIDE and message.stamp == key + 1
    return ctypes.string_at(message.inside, message.size)


sizes = st.one_of(st.integers(0, 70), st.integers(0, 64 << 10))
steps = st.one_of(
    st.tuples(st.just("put"), sizes),
    st.tuples(st.just("look"), st.integers(0, 3)),
    st.tuples(st.just("take"), st.integers(0, 3)),
)


@given(st.lists(steps, max_size=120))
def test_ring_any_message_can_be_taken_in_order(plan):
    writer, reader = ring()
    waiting = deque()
    inside = {}
    key = 0
    for what, number in plan:
        if what == "put":
            text = bytes([key % 251]) * number
            if put(writer, key, text):
                waiting.append((key, text))
            else:  # so there is no room, but for what the reader has not passed yet
                assert (
                    sum(len(text) + 96 for _, text in waiting) + 2 * (64 << 10) + number
                    > rings.SIZE
                )
            key += 1
        elif what == "look" and waiting:
            expected = waiting[min(number, len(waiting) - 1)][0]
            assert reader.receive_until(expected)
            while waiting and waiting[0][0] <= expected:
                inside.update([waiting.popleft()])
        elif what == "take" and inside:
            chosen = list(inside)[number % len(inside)]
            assert taken(reader, chosen) == inside.pop(chosen)
    assert not reader.receive_until(None) and not reader.is_filled
    for chosen, text in [*inside.items(), *waiting]:
        assert taken(reader, chosen) == text


def test_ring_full_put_returns_false_until_read():
    writer, reader = ring()
    text = b"x" * (64 << 10)
    count = 0
    while put(writer, count, text):
        count += 1
    assert 14 <= count <= 16
    assert reader.receive_until(count - 1)
    for key in range(count):
        assert taken(reader, key) == text
    assert (
        not reader.receive_until(count)
        and put(writer, count, text)
        and reader.receive_until(count)
        and taken(reader, count) == text
    )


def test_ring_put_wakes_sleeping_reader_only():
    wakes = []
    writer, reader = ring(lambda: wakes.append(True))
    put(writer, 0, b"a")
    reader.words[rings.ASLEEP] = 1
    assert not wakes and put(writer, 1, b"b") and wakes
