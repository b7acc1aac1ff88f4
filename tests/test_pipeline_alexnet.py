"""The example trains as it says: under any schedule on virtual devices, and as two processes, with equal losses."""

import re

from fshard.testing.processes import run_processes
from tests.examples import losses, printed

SMALL = ("--steps", "4", "--batch", "12", "--microbatches", "3", "--width", "4", "--reproducible")


def alexnet(*options):
    return printed("pipeline_alexnet.py", *SMALL, *options)


def test_two_processes_print_the_losses_of_virtual_devices_under_any_schedule():
    first, second = run_processes(alexnet, 2, "--stages", "2")
    here = alexnet("--schedule", "zbv", "--stages", "4", "--balance", "uniform")
    assert "1f1b on Mesh(pipe=2, data=1; process" in first and "zbv on Mesh(pipe=2, data=1; virtual" in here
    assert losses(first) == losses(here) and len({*losses(here)}) == 4 and not losses(second)
    for text in (first, here):
        assert "device 1" in text and re.search(r"stage 1 on device 1 .* ReLU", text)
        assert re.search(r"bubble \d+\.\d%, .* activations at most, \d+ messages a step", text)


def test_its_losses_fall():
    found = [*map(float, losses(alexnet("--stages", "2", "--steps", "30", "--batch", "24", "--width", "16")))]
    assert found[-1] < 0.7 * found[0]
