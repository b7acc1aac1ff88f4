"""The programs of `examples/pretrain` train alike on any number of devices, and after a kill.

The oracle is the run on one device: with --reproducible its losses to the bit, else rounded.
"""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.examples import printed
from tests.helpers.processes import run_processes

STEPS = 12
TINY = "--steps 12 --every 3 --documents 30 --layers 2 --width 64 --length 16 --batch 8"
TINY = [*TINY.split(), "--vocabulary", "280", "--words", "8"]
CURVES = ("loss", "grad_norm", "held_out_loss")


class OneDevice(NamedTuple):
    """The run on one device: its numbers by step, the last line of its text, its folder."""

    curves: dict
    written: str
    folder: Path


KILLED = """
import os, signal, sys
from fshard.report import JsonLines
from tests.helpers.examples import printed

write = JsonLines.write

def write_and_die(lines, step, values):
    write(lines, step, values)
    if step == 7:
        os.kill(os.getpid(), signal.SIGKILL)

JsonLines.write = write_and_die
printed(*sys.argv[1:])
"""
"""A program that kills itself once step 7 is reported."""


def pretrain(program, folder, *options):
    return printed(f"pretrain/{program}", *TINY, "--folder", str(folder), *options)


def curves(folder):
    """Return the reported numbers of each step; those of a step that was repeated are equal."""
    values = {}
    for line in (folder / "report.jsonl").read_text().splitlines():
        row = json.loads(line)
        numbers = {name: row[name] for name in CURVES if name in row}
        assert values.setdefault(row["step"], numbers) == numbers
    assert [*values] == [*range(1, STEPS + 1)]
    return values


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """The curves of one device, the text that it writes, and its folder."""
    folder = tmp_path_factory.mktemp("one")
    text = pretrain("train.py", folder, "--mesh", "data=1", "--reproducible")
    return OneDevice(curves(folder), text.splitlines()[-1], folder)


def test_pretraining_on_four_devices_has_the_bits_of_one(one_device, tmp_path):
    text = pretrain("train.py", tmp_path, "--mesh", "data=4", "--zero", "3", "--reproducible")

    expected = one_device.curves
    assert curves(tmp_path) == expected
    assert text.splitlines()[-1] == one_device.written
    assert expected[STEPS]["held_out_loss"] < expected[3]["held_out_loss"]

    picture = tmp_path / "curves.svg"
    runs = (f"one={one_device.folder}", f"four={tmp_path}")
    text = printed("pretrain/curves.py", str(picture), *runs)
    assert text == "four and one: 12 of 12 steps are equal\n"
    assert picture.read_text().count("<polyline") == 4


def test_pretraining_that_is_not_reproducible_is_near_that_of_one_device(one_device, tmp_path):
    pretrain("train.py", tmp_path, "--mesh", "data=4", "--zero", "1")

    for step, actual in curves(tmp_path).items():
        assert actual == pytest.approx(one_device.curves[step], rel=1e-4)


def test_pretraining_in_two_processes_has_the_bits_of_one_device(one_device, tmp_path):
    options = ("train.py", tmp_path, "--zero", "1", "--reproducible")

    first, second = run_processes(pretrain, 2, *options, timeout=170)

    assert curves(tmp_path) == one_device.curves
    assert first.splitlines()[-1] == one_device.written
    assert not second


def test_pretraining_goes_on_after_a_kill_with_the_bits_of_one_device(one_device, tmp_path):
    options = [*TINY, "--folder", str(tmp_path), "--reproducible"]
    command = [sys.executable, "-c", KILLED, "pretrain/train.py", *options, "--zero", "2"]
    ended = subprocess.run(command, check=False, timeout=170)
    assert ended.returncode == -signal.SIGKILL
    reported = (tmp_path / "report.jsonl").read_text().splitlines()
    assert len(reported) == 7

    said = pretrain("train.py", tmp_path, "--mesh", "data=2", "--zero", "3", "--reproducible")

    assert "resumed after step" in said
    assert curves(tmp_path) == one_device.curves
    reported = (tmp_path / "report.jsonl").read_text().splitlines()
    assert len(reported) < 7 + STEPS  # from a checkpoint on


def goes_on(program, folder, *options):
    """Run a program, remove its last checkpoint, and run it again from the one before."""
    pretrain(program, folder, *options)
    shutil.rmtree(folder / str(STEPS))
    pretrain(program, folder, *options)
    reported = (folder / "report.jsonl").read_text().splitlines()
    assert len(reported) == STEPS + 3


def test_boosted_pretraining_has_the_curve_of_one_device(one_device, tmp_path):
    goes_on("boosted.py", tmp_path, "--mesh", "data=2", "--zero", "3", "--reproducible")

    for step, actual in curves(tmp_path).items():
        assert actual == pytest.approx(one_device.curves[step], rel=1e-6)


FLAGS = {
    "tensor": ("train.py", "--mesh data=2,model=2 --zero 3", "--mesh data=1"),
    "muon": ("train.py", "--mesh data=2 --zero 3 --optimizer muon", "--optimizer muon"),
    "experts": ("train.py", "--mesh data=2,expert=2 --zero 1 --experts 4", "--experts 4"),
    "boosted tensor": ("boosted.py", "--mesh data=2,model=2 --zero 1", "--mesh data=1"),
    "boosted experts": ("boosted.py", "--mesh expert=2 --zero 2 --experts 4", "--experts 4"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FLAGS)
def test_flags_of_pretraining_train_as_on_one_device(name, tmp_path):
    program, sharded, alone = FLAGS[name]
    pretrain("train.py", tmp_path / "one", "--mesh", "data=1", *alone.split())

    goes_on(program, tmp_path / "many", *sharded.split())

    expected = curves(tmp_path / "one")
    for step, actual in curves(tmp_path / "many").items():
        assert actual == pytest.approx(expected[step], rel=1e-3)


def test_replicas_that_take_outer_steps_learn(tmp_path):
    goes_on("train.py", tmp_path, "--mesh", "replica=2,data=1", "--diloco", "3")

    losses = [row["held_out_loss"] for row in curves(tmp_path).values() if "held_out_loss" in row]
    assert losses == sorted(losses, reverse=True)


def test_axes_that_the_programs_do_not_have_raise(tmp_path):
    for mesh, message in {
        "data=2,pipe=2": "must have axes",
        "replica=2,data=2": "--diloco",
        "data=2,expert=2": "give --experts 4",
        "model=2,expert=2": "Leave one of them out",
    }.items():
        experts = ("--experts", "2") if "model" in mesh else ()
        with pytest.raises(SystemExit, match=message):
            pretrain("train.py", tmp_path, "--mesh", mesh, *experts)
