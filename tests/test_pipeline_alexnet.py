"""The example trains as it says: under any schedule on virtual devices, and as two processes, with equal losses."""

import io
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

from fshard.testing.processes import run_processes

EXAMPLE = str(Path(__file__).resolve().parents[1] / "examples" / "pipeline_alexnet.py")
SMALL = ("--steps", "4", "--batch", "12", "--microbatches", "3", "--width", "4", "--reproducible")


def printed(*options):
    """Run the example for a few steps; return what it prints."""
    before, sys.argv = sys.argv, [EXAMPLE, *SMALL, *options]
    try:
        with redirect_stdout(io.StringIO()) as out:
            runpy.run_path(EXAMPLE, run_name="__main__")
    finally:
        sys.argv = before
    return out.getvalue()


def losses(text):
    return re.findall(r"step +\d+ +loss (\S+)", text)


def test_two_processes_print_the_losses_of_virtual_devices_under_any_schedule():
    first, second = run_processes(printed, 2, "--stages", "2")
    here = printed("--schedule", "zbv", "--stages", "4", "--balance", "uniform")
    assert "1f1b on Mesh(pipe=2, data=1; process" in first and "zbv on Mesh(pipe=2, data=1; virtual" in here
    assert losses(first) == losses(here) and len({*losses(here)}) == 4 and not losses(second)
    for text in (first, here):
        assert "device 1" in text and re.search(r"stage 1 on device 1 .* ReLU", text)
        assert re.search(r"bubble \d+\.\d%, .* activations at most, \d+ messages a step", text)


def test_its_losses_fall():
    found = [*map(float, losses(printed("--stages", "2", "--steps", "30", "--batch", "24", "--width", "16")))]
    assert found[-1] < 0.7 * found[0]
