"""A trainer shows the right numbers, once, wherever it runs."""

import importlib
import io
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P
from fshard.errors import FshardError
from fshard.mesh.spmd.run import MARK
from fshard.report.profile import by_device


class Recorder:
    """A writer that records what it is given, without what depends on the machine."""

    def __init__(self):
        self.rows, self.closed = [], 0

    def write(self, step, values):
        assert 2**20 < values["memory"] < 2**40
        self.rows.append((step, {name: x for name, x in values.items() if name != "memory"}))

    def close(self):
        self.closed += 1


def seconds(*times):
    return iter(times).__next__


# -- Report ----------------------------------------------------------------------------------------


def test_report_writes_metrics_of_train_step():
    mesh = fs.make_mesh({"data": 2})
    recorder = Recorder()
    params = fs.shard_params({"w": torch.ones(2)}, P(), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.sgd(0.5), mesh=mesh, axis="data", stage=1)
    step = fs.train_step(lambda p, x: (p["w"] * x).sum(1).mean(), opt, mesh=mesh, batch=P("data"))
    _, _, metrics = step(params, opt.init(params), torch.ones(4, 2))
    with fs.report.Report(recorder, clock=seconds(0.0, 0.0)) as report:
        report(metrics, lr=0.5)
    numbers = {
        "loss": 2.0,
        "grad_norm": pytest.approx(2**0.5),
        "finite": 1.0,
        "samples": 4.0,
        "lr": 0.5,
    }
    assert recorder.rows == [(1, numbers)] and recorder.closed == 1


def test_report_rate_counts_samples_of_all_steps():
    recorder = Recorder()
    report = fs.report.Report(recorder, every=3, step=10, clock=seconds(0.0, 1.0, 3.0, 5.0, 6.0))
    for samples in (4, torch.tensor(4), 8, 4, 2):  # steps 11 to 15
        report(samples=samples)
    report(loss=1.0), report(), report()
    rates = [(step, values.get("samples_per_second")) for step, values in recorder.rows]
    assert rates == [(11, 4.0), (12, 2.0), (15, 7.0), (18, None)]


MISUSE = {
    "every": (lambda: fs.report.Report(every=0), "every= must be an integer >= 1; got 0"),
    "two": (
        lambda: fs.report.Report(every=2.5, step="3"),
        "every= .* got 2.5; step= must be an integer >= 0; got '3'",
    ),
    "writer": (lambda: fs.report.Report(print), "cannot write: a writer has write"),
    "profile": (
        lambda: fs.report.Profile("x", wait=-1, active=0),
        "wait= .* >= 0; got -1; active= .* >= 1; got 0",
    ),
    "option of torch": (lambda: fs.report.Profile("x", stack=True), "stack"),
}


def test_report_in_a_notebook_is_its_writers_and_steps():
    report = fs.report.Report(Recorder(), Recorder(), every=10, step=7)
    report(loss=1.0)
    assert repr(report) == "Report(Recorder, Recorder, every=10, step=8)"


@pytest.mark.parametrize("name", MISUSE)
def test_wrong_arguments_raise(name):
    call, words = MISUSE[name]
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def test_report_in_a_loop_counts_each_sample_once():
    """9 samples in batches of 8: at last one device has one, three compute on a neighbour's, here
    on one that is not finite.
    """
    recorders = [Recorder() for _ in range(4)]
    mesh = fs.make_mesh({"data": 4})
    xs = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, float("inf")])

    def main():
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        booster = fs.Booster()
        loader = booster.prepare_dataloader(
            torch.utils.data.TensorDataset(xs[:, None]), batch_size=8
        )
        model, *_ = booster.boost(model)
        recorder = recorders[fs.axis_index("data")]
        with (
            fs.report.Report(recorder, mesh=mesh, clock=seconds(0, 1, 2)) as report,
            torch.no_grad(),
        ):
            for (x,) in loader:
                report(loss=model(x).mean(), samples=loader.samples)

    fs.run(main, mesh=mesh)
    assert recorders[0].rows == [
        (1, {"loss": pytest.approx(255 / 8), "samples": 8.0, "samples_per_second": 8.0}),
        (2, {"loss": float("inf"), "samples": 1.0, "samples_per_second": 1.0}),
    ]
    assert [recorder.rows for recorder in recorders[1:]] == [[], [], []]
    assert [recorder.closed for recorder in recorders] == [1, 0, 0, 0]


def reported_by_processes(folder):
    mesh = fs.make_mesh({"data": 2})
    with (
        fs.report.Report(fs.report.JsonLines(f"{folder}/run.jsonl"), mesh=mesh) as report,
        fs.report.Profile(folder, wait=0, warmup=1, active=1) as profile,
    ):
        for step in range(2):
            report(
                loss=float(step + fs.run(lambda: fs.axis_index("data"), mesh=mesh)[0]), samples=4
            )
            fs.run(lambda: fs.psum(torch.ones(4) @ torch.ones(4), "data"), mesh=mesh)
            profile.step()


def test_report_and_profile_on_processes(tmp_path, two):
    two.run(reported_by_processes, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"], line["samples"]) for line in lines] == [
        (1, 0.5, 8.0),
        (2, 1.5, 8.0),
    ]
    for device in (0, 1):
        assert "aten::dot" in names_in(tmp_path / f"device-{device}.json", device)
    assert not (tmp_path / "host.json").exists()


# -- writers ---------------------------------------------------------------------------------------


def test_json_lines_append_to_the_file(tmp_path):
    path = tmp_path / "new" / "run.jsonl"
    for step in (1, 2):
        with fs.report.Report(fs.report.JsonLines(path), step=step - 1) as report:
            report(loss=math.nan if step == 2 else 0.5)
            written = path.read_text()  # before it is closed
    assert [json.loads(line)["loss"] for line in written.splitlines()] == [0.5, None]


def test_tensorboard_has_the_written_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with fs.report.Report(fs.report.TensorBoard(tmp_path), every=2) as report:
        for step in range(4):
            report(loss=2.0**-step)
    actual = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in actual.Scalars("loss")] == [
        (1, 1.0),
        (2, 0.5),
        (4, 0.125),
    ]


TRACKIO = """
runs = []


class Run:
    def __init__(self, options):
        self.options, self.logged, self.is_finished = options, [], False

    def log(self, metrics: dict, step: int | None = None):
        self.logged.append((step, metrics))

    def finish(self):
        self.is_finished = True


def init(project: str, name: str | None = None, *, config: dict | None = None) -> Run:
    runs.append(Run((project, name, config)))
    return runs[-1]
"""
"""The calls of trackio 0.43 that a writer makes, with its signatures."""


@pytest.fixture
def trackio(tmp_path, monkeypatch):
    """A module in place of the package."""
    (tmp_path / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("trackio", None)
    yield importlib.import_module("trackio")
    del sys.modules["trackio"]


def test_tracker_begins_a_run_with_the_first_step_and_ends_it(trackio):
    tracker = fs.report.Tracker("trackio", project="llama", config={"lr": 0.1})
    assert trackio.runs == []

    with fs.report.Report(tracker, step=10) as report:
        report(loss=torch.tensor(0.5))
        report(loss=0.25)

    (run,) = trackio.runs
    assert run.options == ("llama", None, {"lr": 0.1}) and run.is_finished
    assert [(step, metrics["loss"]) for step, metrics in run.logged] == [(11, 0.5), (12, 0.25)]


def test_tracker_writes_on_the_first_device_alone(trackio):
    def train():
        with fs.report.Report(fs.report.Tracker("trackio", project="p")) as report:
            report(loss=1.0)

    fs.run(train, mesh=fs.make_mesh({"data": 4}))

    assert len(trackio.runs) == 1


def test_tracker_of_another_or_a_missing_package_raises(monkeypatch):
    with pytest.raises(ValueError, match='must be "wandb" or "trackio"; got .mlflow'):
        fs.report.Tracker("mlflow")
    monkeypatch.setattr(sys.modules["fshard.report.files"], "find_spec", lambda name: None)
    with pytest.raises(FshardError, match="needs the package trackio: pip install trackio"):
        fs.report.Tracker("trackio", project="p")


OFFLINE = """
import sys, fshard as fs
tracker = fs.report.Tracker("wandb", project="llama", mode="offline", dir=sys.argv[1])
with fs.report.Report(tracker) as report:
    report(loss=0.5)
    report(loss=0.25)
"""


@pytest.mark.thorough
def test_tracker_of_wandb_offline_has_the_written_numbers(tmp_path):
    """In a process of its own: wandb leaves threads, and a service, in the one that imports it."""
    pytest.importorskip("wandb")
    environment = os.environ | {"WANDB_SILENT": "true", "WANDB__DISABLE_STATS": "true"}
    command = [sys.executable, "-c", OFFLINE, str(tmp_path)]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=200)

    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = path.read_bytes()
    assert b"loss" in records and b"0.25" in records and b"llama" in records


# -- Bar -------------------------------------------------------------------------------------------


def shown(steps, total, **how):
    file = io.StringIO()
    bar = fs.report.Bar(total, file=file, clock=iter(map(float, range(1000))).__next__, **how)
    for step in range(1, steps + 1):
        bar.write(
            step,
            {"loss": 1 / step, "samples": 8, "samples_per_second": 12345.6, "memory": 1.5 * 2**30},
        )
    bar.close()
    return file.getvalue()


def test_bar_has_a_line_per_tenth_in_a_file_and_one_in_a_terminal():
    lines = shown(100, 100).splitlines()
    assert len(lines) == 11
    assert lines[0] == "step   1 of 100  loss 1  12,345 samples/s  1.5 GiB  0:01:39 left"
    assert lines[-1] == "step 100 of 100  loss 0.01  12,345 samples/s  1.5 GiB  0:01:40"
    assert shown(2, 2, update=True).split("\r") == [
        "",
        "step 1 of 2 ━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌ loss 1  12,345 samples/s  1.5 GiB  0:00:01 left",
        "step 2 of 2 ━━━━━━━━━━━━━━━━━━━━━━━━ loss 0.5  12,345 samples/s  1.5 GiB  0:00:02   \n",
    ]


@pytest.mark.parametrize(
    ("module", "tty", "lines"), [("ipykernel.io", False, 1), ("x", True, 1), ("x", False, 2)]
)
def test_bar_updates_in_terminals_and_notebooks_only(module, tty, lines):
    stream = type("Stream", (io.StringIO,), {"__module__": module, "isatty": lambda self: tty})()
    bar = fs.report.Bar(2, file=stream)
    for step in (1, 2):
        bar.write(step, {})
    bar.close()
    assert stream.getvalue().count("\n") == lines


# -- Profile ---------------------------------------------------------------------------------------


def names_in(path, device):
    """Return the names of what a trace has, all of one process, which is the device."""
    events = json.loads(path.read_text())["traceEvents"]
    own = [event for event in events if event["ph"] == "X" and isinstance(event["pid"], int)]
    assert {event["pid"] for event in own} == {device}
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        f"device {device}"
    ]
    return {event["name"] for event in own}


def test_profile_has_a_trace_per_virtual_device_and_host(tmp_path):
    mesh = fs.make_mesh({"data": 2})
    product = fs.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with fs.report.Profile(tmp_path) as profile:
        for step in range(6):
            product(torch.ones(4, 3))
            if step == 2:
                torch.linalg.inv(torch.eye(2))
            elif step == 5:
                torch.ones(1).cos()  # five steps are over: this is not recorded
            profile.step()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "device-0.json",
        "device-1.json",
        "host.json",
    ]
    for device in (0, 1):
        actual = names_in(tmp_path / f"device-{device}.json", device)
        assert "aten::mm" in actual and "aten::linalg_inv" not in actual
    outside = {
        event["name"] for event in json.loads((tmp_path / "host.json").read_text())["traceEvents"]
    }
    assert "aten::linalg_inv" in outside and not {"aten::mm", "aten::cos"} & outside
    assert not any(name.startswith(MARK) for name in outside)


def test_profile_gpu_kernels_belong_to_their_process():
    kernel = {"ph": "X", "name": "gemm", "pid": 0, "tid": 7}
    assert by_device([kernel], 1234, alone=3)["device-3"][1] == kernel
    assert by_device([kernel], 1234)["host"][1] == kernel


class Rows:
    """A writer that keeps what it gets."""

    def __init__(self):
        self.rows = []

    def write(self, step, values):
        self.rows.append((step, values.get("loss")))

    def close(self):
        pass


def reported_by_the_first_of_some_devices():
    mesh = fs.make_mesh({"data": 2}, devices=(3, 1))
    writer = Rows()
    report = fs.report.Report(writer, mesh=mesh)
    report(loss=float(fs.axis_index("device")) if mesh.is_member else None)
    return writer.rows


def test_report_of_some_devices_is_written_by_their_first():
    rows = fs.run(reported_by_the_first_of_some_devices, mesh=fs.make_mesh({"device": 4}))
    assert rows == [[], [], [], [(1, 2.0)]]


def test_report_without_values_on_the_writing_device_raises():
    with pytest.raises(ValueError, match="fs.broadcast_to"):
        fs.report.Report(Rows())({"loss": None, "samples": None})
