"""Copies between host and GPU, on a fake GPU: waits of the host, misused memory, and bytes on the
device, against plain copies.
"""

import pytest
import torch

from fshard.memory import transfers
from fshard.memory.activations import HostCopy
from fshard.memory.transfers import Link, start
from fshard.mesh.layout.kinds import empty_in
from tests.mesh.layout.fake_gpu import Storages

DOWN, UP = Link("device", "host"), Link("host", "device")


def on_host(*values):
    return [empty_in("host", (4,), torch.float32, "cpu").fill_(value) for value in values]


def on_device(*values):
    return [torch.full((4,), value) for value in values]


def first(xs):
    return [x[0].item() for x in xs]


def test_unit_of_twelve_tensors_is_fetched_without_host_waits(gpu):
    values = [float(i) for i in range(12)]
    units = [start(on_host(*values), on_device(*values), UP) for _ in range(3)]
    assert gpu.log == ["to device"] * 36
    for unit in units:
        assert first(unit.wait()) == values
    assert gpu.log[36:] == ["device waits"] * 3


def test_copy_to_the_host_waits_only_where_the_host_reads(gpu):
    transfer = start(on_device(1.0, 2.0), on_host(0.0, 0.0), DOWN)
    assert gpu.log == ["to host"] * 2
    assert first(transfer.wait()) == [1, 2]
    assert gpu.log[2:] == ["host waits"]
    transfer.wait()
    assert gpu.log[2:] == ["host waits"]


def test_copies_to_the_host_do_not_hold_up_those_to_the_device(gpu, monkeypatch):
    monkeypatch.setattr(transfers, "UNDER_WAY", 1)
    homes = on_host(*[0.0] * 9)
    for home in homes:
        start(on_device(1.0), [home], DOWN)
    waits = gpu.log.count("device waits")
    fetched = start(on_host(5.0), on_device(0.0), UP)
    assert gpu.log.count("device waits") == waits == 7
    fetched.wait()
    assert first(homes[7:]) != [1, 1]  # the last two have not run


def test_released_sources_may_be_written_to(gpu):
    x = torch.ones(4)
    transfer = start([x], on_host(0.0), DOWN)
    transfer.release()
    x.zero_()
    assert gpu.log == ["to host", "device waits"]
    assert first(transfer.wait()) == [1]


@pytest.mark.parametrize(("limit", "held"), [(64, 4), (1, 2)])
@pytest.mark.parametrize("link", [DOWN, UP])
def test_device_memory_of_copies_is_bounded_far_behind_the_host(
    gpu, monkeypatch, link, limit, held
):
    """No copy has run yet; of 20, whose tensors have 16 bytes each and are freed at once, few are
    there.
    """
    monkeypatch.setattr(transfers, "UNDER_WAY", limit)
    alive = Storages()
    homes = on_host(*[3.0] * 20)
    for home in homes:
        x = torch.zeros(4)
        alive.add(x)
        sides = ([x], [home]) if link is DOWN else ([home], [x])
        start(*sides, link)
        del x, sides
        assert alive.count() <= held
    assert "host waits" not in gpu.log


def test_tensors_that_are_dropped_are_kept_until_their_copies(gpu):
    """Without their transfer's help another tensor would have the memory: see `FakeGpu`."""
    home = on_host(0.0)
    start([torch.full((4,), 7.0)], home, DOWN)
    start([home[0].clone()], [torch.zeros(4)], UP)
    gpu.synchronize()
    assert first(home) == [7]


def test_user_stream_waits_for_its_own_copies(gpu):
    user = gpu.stream()
    with user:
        x = torch.ones(4)
        down = start([x], on_host(0.0), DOWN)
    up = start(on_host(2.0), on_device(0.0), UP)
    with user:
        before = gpu.log.count("device waits")
        assert first(up.wait()) == [2]
        assert gpu.log.count("device waits") - before == 2  # this stream, and that of the memory
        down.release()
        del x
    assert "host waits" not in gpu.log
    assert first(down.wait()) == [1]


def test_activations_leave_and_return_without_host_waits(gpu):
    alive = Storages()
    copies = []
    for value in range(12):
        x = torch.full((2, 3), float(value))
        alive.add(x)
        copies.append(HostCopy(x))
        del x
        assert alive.count() <= 3  # two are leaving beside this one
    for value in reversed(range(12)):
        x = copies.pop().get()
        assert x.eq(value).all() and x.shape == (2, 3)
    assert "host waits" not in gpu.log


def test_activation_written_to_while_it_leaves_has_no_values(gpu):
    x, y = torch.ones(3), torch.ones(3)
    written, kept = HostCopy(x), HostCopy(y)
    gpu.synchronize()  # so that the fake GPU finds no fault in this write
    x.zero_()
    assert kept.get().tolist() == [1, 1, 1]
    y.zero_()  # behind the copy
    assert written.get() is None and kept.get().tolist() == [1, 1, 1]
