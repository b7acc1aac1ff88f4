"""The example trains as it says: under any stage on virtual devices, and as two processes, with equal losses."""

import re

import pytest

from fshard.testing.processes import run_processes
from tests.examples import losses, printed

STEPS = 3


def gpt(*options):
    return printed("train_gpt.py", "--steps", str(STEPS), "--batch", "8", "--letters", "9", *options)


def test_two_processes_print_the_losses_of_virtual_devices():
    first, second = run_processes(gpt, 2, "--reproducible")
    here = gpt("--reproducible", "--devices", "4", "--stage", "1")
    assert "ZeRO-3 on Mesh(data=2; process, cpu)" in first and "ZeRO-1 on Mesh(data=4; virtual, cpu)" in here
    assert losses(first) == losses(here) and len({*losses(here)}) == STEPS and not losses(second)
    for text in (first, here):
        assert re.search(r"It writes, \d+ of \d+ sentences", text) and "bytes of optimizer state" in text
        assert "A step sends" in text and "train_gpt.py" in text
    otherwise = gpt("--devices", "2", "--stage", "0", "--accumulate", "2", "--precision", "bf16")
    assert [*map(float, losses(otherwise))] == pytest.approx([*map(float, losses(here))], abs=0.03)
    assert losses(otherwise) != losses(here)
