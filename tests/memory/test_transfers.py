"""Transfers, against plain copies; and modes of tests that detect a missing wait."""

import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fshard.errors import MemoryLimitError
from fshard.memory import pool, transfers
from fshard.memory.disk import empty_on_disk
from fshard.memory.pool import Pool, empty_on_host
from fshard.memory.transfers import Link, start, stress

RUNTIMES = ("virtual", "process")
DOWN = Link("device", "host", "process")
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
)
SIZES = st.lists(st.integers(0, 7), max_size=3)


@st.composite
def strided(draw, shape):
    """An index that makes a view of this shape of a larger tensor, and the shape of that tensor."""
    steps = [draw(st.integers(1, 2)) for _ in shape]
    before = [draw(st.integers(0, 2)) for _ in shape]
    larger = [b + max(size * step, 1) for b, size, step in zip(before, shape, steps, strict=True)]
    index = tuple(
        slice(b, b + size * step, step) for b, size, step in zip(before, shape, steps, strict=True)
    )
    return larger, index


def values(shape, dtype):
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_transfers_equal_plain_copies(disk_folder, data):
    """Sizes, strides, dtypes; either side in memory or on disk; both runtimes; all modes of tests."""
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(SIZES)
    makers = {
        "memory": lambda shape: torch.empty(shape, dtype=dtype),
        "disk": lambda shape: empty_on_disk(shape, dtype),
    }
    pairs = []
    for _ in range(data.draw(st.integers(1, 10))):
        tensors = []
        for _ in range(2):
            larger, index = data.draw(strided(shape))
            tensors.append(
                makers[data.draw(st.sampled_from(sorted(makers)))](larger).copy_(
                    values(larger, dtype)
                )[index]
            )
        pairs.append(tensors)
    expected = [source.clone() for source, _ in pairs]
    mode = data.draw(
        st.sampled_from([{}, {"poison": True}, {"rate": 1e7}, {"rate": 1e7, "poison": True}])
    )
    runtime = data.draw(st.sampled_from(RUNTIMES))
    with stress(**mode):
        link = Link("device", "host", runtime)
        size = data.draw(st.integers(1, 4))
        under_way = []
        for first in range(0, len(pairs), size):
            sources, targets = zip(*pairs[first : first + size], strict=True)
            under_way.append(start(sources, targets, link))
        for transfer in under_way[:: data.draw(st.sampled_from([1, 2]))]:
            transfer.release()
        results = []
        for transfer in reversed(under_way):
            results = transfer.wait() + results
    for (source, target), result, right in zip(pairs, results, expected, strict=True):
        assert (
            torch.equal(target, right)
            and torch.equal(source, right)
            and result.data_ptr() == target.data_ptr()
        )


def floats(buffer):
    return buffer.view(torch.float32)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("rate", [None, 2e3])
def test_poison_changes_the_bits_of_a_missing_wait(runtime, rate):
    """A sum over buffers that are fetched ahead: right with its waits; NaN where one is left out."""
    home = [torch.full((10,), float(i)) for i in range(6)]
    link = Link("host", "device", runtime)

    def total(missing=None):
        with stress(rate=rate, poison=True):
            pool = Pool(lambda: torch.empty(40, dtype=torch.uint8))
            sums = torch.zeros(10)
            fetched = [(buffer := pool.take(), start([home[0]], [floats(buffer)], link))]
            for i in range(len(home)):
                if i + 1 < len(home):
                    buffer = pool.take()
                    fetched.append((buffer, start([home[i + 1]], [floats(buffer)], link)))
                buffer, transfer = fetched[i]
                sums += floats(buffer) if i == missing else transfer.wait()[0]
                transfer.wait()
                pool.release(buffer)
            assert len(pool._free) == 2
            return sums

    assert torch.equal(total(), sum(home))
    assert [bool(total(missing=i).isnan().all()) for i in range(1, 6)] == [True] * 5


def test_released_buffers_are_poisoned():
    pool = Pool(lambda: torch.empty(8, dtype=torch.uint8))
    buffer = pool.take()
    buffer.zero_()
    pool.release(buffer)
    assert not buffer.any()
    with stress(poison=True):
        again = pool.take()
        assert again is buffer
        pool.release(again)
    assert buffer.view(torch.float32).isnan().all() and buffer.view(torch.bfloat16).isnan().all()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_slowed_transfers_run_beside_the_caller(runtime):
    xs = [torch.ones(250) for _ in range(3)]
    link = Link("device", "host", runtime)
    with stress(rate=20_000):  # 50 ms each
        before = time.perf_counter()
        under_way = [start([x], [torch.zeros(250)], link) for x in xs]
        started = time.perf_counter() - before
        results = [transfer.wait()[0] for transfer in under_way]
        assert started < 0.1 < 0.149 < time.perf_counter() - before
    assert all(map(torch.equal, results, xs))


@pytest.mark.parametrize(("limit", "under_way"), [(20, 5), (1, 2)])
def test_thread_bounds_the_bytes_under_way(monkeypatch, limit, under_way):
    """The host waits for the oldest copy, of a float each; two may be under way in any case."""
    gate = threading.Event()
    started, ended, counts = [], [], []
    copy = transfers.disk.copy

    def held(source, target):
        gate.wait(30)
        is_down = source.numel() == 1
        if is_down:
            # Those that wait for room have not returned from `start`.
            counts.append(len(started) - len(ended))
        copy(source, target)
        if is_down:
            ended.append(target)

    monkeypatch.setattr(transfers.disk, "copy", held)
    monkeypatch.setattr(transfers, "UNDER_WAY", limit)

    def start_all():
        for i in range(under_way + 3):
            start([torch.ones(1)], [torch.zeros(1)], DOWN)
            started.append(i)

    thread = threading.Thread(target=start_all)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and len(started) <= under_way
    up = start([torch.ones(2)], [torch.zeros(2)], Link("host", "device", "process"))  # has room
    gate.set()
    thread.join(30)
    up.wait()
    start([torch.ones(1)], [torch.zeros(1)], DOWN).wait()
    assert len(ended) == under_way + 4
    assert max(counts) <= under_way


def test_errors_of_the_helper_thread_are_raised_by_wait(disk_folder, monkeypatch):
    x = empty_on_disk((5,), torch.float32)
    y = torch.zeros(5)

    def broken(descriptor, buffers, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(transfers.disk.os, "pwritev", broken)
    transfer = start([y], [x], DOWN)
    for _ in range(2):
        with pytest.raises(
            transfers.disk.DiskError, match=f"FSHARD_DISK={disk_folder}.*Input/output error"
        ):
            transfer.wait()
    monkeypatch.undo()
    assert start([y], [x], DOWN).wait()  # the thread goes on


def test_other_shape_or_dtype_raises():
    for target in (torch.ones(3), torch.ones(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match="must have the shape and dtype of source"):
            start([torch.ones(2)], [target], DOWN)


def test_tensors_without_values_are_done_at_once():
    x = torch.empty(3, device="meta")
    (copy,) = start([x], [x], Link("host", "device", "abstract")).wait()
    assert copy.is_meta


def registrations_on_a_gpu(monkeypatch):
    """Return the calls that a GPU's machine would make, and the memory of the process."""
    calls = []
    cuda = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: calls.append(("register", address, nbytes)),
        cudaHostUnregister=lambda address: calls.append(("unregister", address)),
    )
    registered = pool.RegisteredMemory()
    monkeypatch.setattr(pool, "_cuda", lambda: cuda)
    monkeypatch.setattr(pool, "_registered", lambda process: registered)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    return calls, registered


@pytest.mark.parametrize("kept", [0, 5000])
def test_free_page_locked_memory_is_at_most_what_tensors_use_or_some_bytes(monkeypatch, kept):
    """Of tensors whose sizes vary; those that alternate between two sizes lock memory once."""
    monkeypatch.setattr(pool, "KEPT", kept)
    calls, registered = registrations_on_a_gpu(monkeypatch)
    used = empty_on_host((3000,), torch.uint8)
    for nbytes in range(1, 1000, 7):
        x = empty_on_host((nbytes,), torch.uint8)
        assert registered.kept_bytes <= max(len(used) + nbytes, kept)
        del x
    released = [call[1] for call in calls if call[0] == "unregister"]
    assert released and used.data_ptr() not in released

    calls.clear()
    for _ in range(5):
        x, y = [empty_on_host((nbytes,), torch.uint8) for nbytes in (1000, 1003)]
        del x, y
    assert sum([call[0] == "register" for call in calls]) == 2


def test_fork_has_no_page_locked_memory(monkeypatch):
    """As a worker that loads data, which would copy all of it; Linux shows the flag of a mapping."""
    registrations_on_a_gpu(monkeypatch)
    x = empty_on_host((1 << 20,), torch.float32)
    mappings = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M
    )
    for mapping in mappings[1:]:
        begin, end = [int(address, 16) for address in mapping.split(maxsplit=1)[0].split("-")]
        if begin <= x.data_ptr() < end:
            assert " dc " in mapping.partition("VmFlags:")[2]
            break
    else:
        pytest.fail("there is no mapping of the tensor")
    monkeypatch.undo()
    assert pool._registered(os.getpid()) is not pool._registered(os.getpid() + 1)


def test_page_locked_memory_is_reused_and_given_back_when_the_host_has_none(monkeypatch):
    """Its registration takes long on a GPU's machine; here the calls are recorded."""
    calls, _ = registrations_on_a_gpu(monkeypatch)
    free = [1 << 30]
    monkeypatch.setattr(pool, "_free_bytes", lambda: free[0])
    x, y = (empty_on_host((25, 10), torch.float32) for _ in range(2))
    assert x.shape == (25, 10) and x.untyped_storage().nbytes() == x.nbytes == 1000
    assert empty_on_host((0, 2), torch.bfloat16).shape == (0, 2)
    addresses = {x.data_ptr(), y.data_ptr()}
    view = x.fill_(1.0)[3:]
    del x
    z = empty_on_host((500,), torch.bfloat16)  # as large; the view still uses that of x
    addresses.add(z.data_ptr())
    assert len(addresses) == len(calls) == 3 and view.eq(1).all()
    del view, z
    again = [empty_on_host((1000,), torch.uint8) for _ in range(2)]
    assert {tensor.data_ptr() for tensor in again} < addresses and len(calls) == 3
    del again
    free[0] = 100
    with pytest.raises(MemoryLimitError):
        empty_on_host((2000,), torch.uint8)
    assert sorted(calls[3:]) == sorted(
        ("unregister", address) for address in addresses - {y.data_ptr()}
    )
