"""The example trains as it says: under any stage on virtual devices, and as two processes, with equal losses."""

import io
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from fshard.testing.processes import run_processes

EXAMPLE = str(Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py")
STEPS = 3


def printed(*options):
    """Run the example for a few steps; return what it prints."""
    before, sys.argv = sys.argv, [EXAMPLE, "--steps", str(STEPS), "--batch", "8", "--letters", "9", *options]
    try:
        with redirect_stdout(io.StringIO()) as out:
            runpy.run_path(EXAMPLE, run_name="__main__")
    finally:
        sys.argv = before
    return out.getvalue()


def losses(text):
    return re.findall(r"step +\d+ +loss (\S+)", text)


def test_two_processes_print_the_losses_of_virtual_devices():
    first, second = run_processes(printed, 2, "--reproducible")
    here = printed("--reproducible", "--devices", "4", "--stage", "1")
    assert "ZeRO-3 on Mesh(data=2; process, cpu)" in first and "ZeRO-1 on Mesh(data=4; virtual, cpu)" in here
    assert losses(first) == losses(here) and len({*losses(here)}) == STEPS and not losses(second)
    for text in (first, here):
        assert re.search(r"It writes, \d+ of \d+ sentences", text) and "bytes of optimizer state" in text
        assert "A step sends" in text and "train_gpt.py" in text
    otherwise = printed("--devices", "2", "--stage", "0", "--accumulate", "2", "--precision", "bf16")
    assert [*map(float, losses(otherwise))] == pytest.approx([*map(float, losses(here))], abs=0.03)
    assert losses(otherwise) != losses(here)
