"""Machines: TOML files, their errors, and the calibration of this one."""

import sys

import pytest
import torch

import fshard as fs
from fshard.command import main
from fshard.errors import PlanError
from fshard.plan import calibrate, cluster
from fshard.plan.cluster import PRESETS

calibration = sys.modules["fshard.plan.calibrate"]  # the package has the function of this name


@pytest.mark.parametrize("name", PRESETS)
def test_files_keep_a_machine(name, tmp_path):
    machine = cluster(name)
    machine.save(tmp_path / "machine.toml")
    assert cluster(tmp_path / "machine.toml") == machine


def test_nodes_have_another_size():
    assert [link.devices for link in cluster("h100", node=4).links] == [4, 0]
    with pytest.raises(
        PlanError, match="node must be >= 1, of a machine with links in a node; got 2"
    ):
        cluster("cpu", node=2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory = 84e9", "memory = 0", "memory must be > 0; got 0"),
        ("memory = 84e9", 'memory = "80 GB"', "memory must be a number; got '80 GB'"),
        (
            "memory = 84e9",
            "ram = 80e9",
            "ram is unknown; the keys are name, flops, .*; memory is missing",
        ),
        (
            "devices = 0",
            "devices = 4",
            r"links must go from small groups to devices=0, .*; got \[8, 4\]",
        ),
        ("f32 = ", "fp32 = ", 'flops must have "f32"'),
        (
            "latency = 15e-6",
            "delay = 1",
            r"links\[1\].delay is unknown; .*; links\[1\].latency is missing",
        ),
        ("[flops]", "[flops", "the file must be TOML"),
        ("bf16 = ", 'bf16 = "fast" #', "flops.bf16 must be a number; got 'fast'"),
    ],
)
def test_wrong_files_raise_with_the_key(old, new, message, tmp_path):
    cluster("h100").save(path := tmp_path / "h.toml")
    text = path.read_text().replace("84000000000.0", "84e9").replace("1.5e-05", "15e-6")
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(PlanError, match=message):
        cluster(path)


def test_files_whose_links_are_no_tables_raise(tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(
        'name = "x"\nmemory = 1\nbandwidth = 1\nhost = 1\ndisk = 1\nlinks = 3\n[flops]\nf32 = 1\n'
    )
    with pytest.raises(PlanError, match=r"links must be tables \[\[links\]\]; got 3"):
        cluster(path)


def test_unknown_names_raise_with_the_known_ones():
    with pytest.raises(
        PlanError,
        match="must be one of a100, h100, h200, b200, cpu, or the path of a .toml file; got 'h1000'",
    ):
        cluster("h1000")


def test_calibration_predicts_a_product_of_another_size():
    """Rates of this machine are positive, and a product that was not measured takes about as long
    as they say.
    """
    machine = calibrate(fs.make_mesh({"all": 1}))
    assert (
        machine.efficiency.overlap == 0 and machine.flops["f32"] > 1e8 and machine.bandwidth > 1e8
    )
    assert 0 < machine.seconds_of_operation("mm", "f32", 2 * 512**3, 3 * 4 * 512**2) < 10
    assert machine.peak("i64") == machine.flops["f32"]


def communication(side, seconds):
    """Return a gradient's collectives: of 8 units, each gathered twice and reduced."""
    unit = 4 * side**2
    return calibration._Communication(unit, 24, 24.0 * unit, seconds)


def link_of(monkeypatch, seconds):
    """Return the link of a machine on which collectives of units take these seconds, by their side."""
    monkeypatch.setattr(
        calibration,
        "_communication_of_gradient",
        lambda mesh, side: communication(side, seconds[side]),
    )
    return calibration._link(fs.make_mesh({"all": 2}))


def test_link_has_the_rate_of_the_first_units_that_take_twice_as_long(monkeypatch):
    link = link_of(monkeypatch, {8: 0.24, 1024: 0.24 + 0.5})
    assert link.latency == 0.01
    assert link.bandwidth == pytest.approx(24 * 4 * (1024**2 - 8**2) / 0.5)
    link = link_of(monkeypatch, {8: 0.24, 1024: 0.4, 2048: 0.24 + 2})
    assert link.bandwidth == pytest.approx(24 * 4 * (2048**2 - 8**2) / 2)


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (
            {8: 0.24, 1024: 0.2, 2048: 0.47},
            r"collectives of 16,777,216 bytes must take twice as long as those of 256, .*; "
            r"got 0.47 s and 0.24 s, so the bandwidth is unknown. Repeat it",
        ),
        (
            {8: -0.1},
            r"24 collectives must take longer than one without; got -0.1 s more, so the latency",
        ),
    ],
)
def test_link_that_cannot_be_measured_raises(monkeypatch, seconds, message):
    with pytest.raises(PlanError, match=message):
        link_of(monkeypatch, seconds)


def test_communication_is_that_of_a_gradient_less_the_time_of_one_device(monkeypatch):
    seconds = iter([3.0, 1.0])

    def timed(operation, device, agree):
        operation()
        return agree(next(seconds))

    monkeypatch.setattr(calibration, "_seconds", timed)
    result = calibration._communication_of_gradient(fs.make_mesh({"all": 2}), 16)
    # Of 8 units the last two are still there when the backward begins, the first needs none. The
    # losses are summed besides.
    assert (result.unit, result.calls, result.seconds) == (1024, 8 + 5 + 8 + 1, 2.0)
    assert 21 * 512 < result.sent < 22 * 512


class FakeTime:
    """A clock that operations advance; of a GPU, events read it."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        self.calls = 0
        monkeypatch.setattr(calibration, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(self))

    def operation(self, seconds):
        self.calls += 1
        self.now += seconds


class FakeEvent:
    def __init__(self, time):
        self.time, self.is_waited_for = time, False

    def record(self):
        self.recorded = self.time.now

    def synchronize(self):
        self.is_waited_for = True
        self.time.now += 0.5  # which is not measured

    def elapsed_time(self, last):
        assert last.is_waited_for
        return 1e3 * (last.recorded - self.recorded)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("seconds", "calls"), [(1e-7, 1000), (1e-4, 200), (0.003, 7), (2.0, 1)])
def test_operation_is_timed_in_runs_of_many_calls_the_same_on_all_devices(
    monkeypatch, device, seconds, calls
):
    """As many as fit into 20 ms of the slowest device, here one that takes twice as long."""
    time = FakeTime(monkeypatch)
    measured = calibration._seconds(lambda: time.operation(seconds), device, lambda x: 2 * x)
    assert measured == pytest.approx(2 * seconds, rel=1e-4)
    calls_of_slowest = {200: 100, 7: 4}.get(calls, calls)
    assert time.calls == 2 + calibration._ROUNDS * calls_of_slowest


def test_calibration_draws_data_without_the_random_state_of_the_program():
    state = torch.get_rng_state()
    x, y = (calibration._random(64, device="cpu") for _ in range(2))
    assert torch.equal(x, y) and len(x.unique()) == 64
    assert torch.equal(state, torch.get_rng_state())


def test_the_command_writes_a_file(tmp_path, capsys):
    assert main(["calibrate", "--processes", "1", "-o", str(tmp_path / "here.toml")]) == 0
    assert cluster(tmp_path / "here.toml").name == "cpu" or torch.cuda.is_available()
    assert "here.toml" in capsys.readouterr().out
