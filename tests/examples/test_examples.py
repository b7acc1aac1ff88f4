"""The examples train as they say, on virtual devices and in processes."""

import re

import pytest

from tests.helpers.examples import losses, printed
from tests.helpers.processes import run_processes

SMALL = ("--steps", "4", "--batch", "12", "--microbatches", "3", "--width", "4", "--reproducible")


def alexnet(*options):
    return printed("pipeline_alexnet.py", *SMALL, *options)


def test_pipeline_prints_equal_losses_under_any_schedule():
    first, second = run_processes(alexnet, 2, "--stages", "2")
    here = alexnet("--schedule", "zbv", "--stages", "4", "--balance", "uniform")
    assert (
        "1f1b on Mesh(pipe=2, data=1; process" in first
        and "zbv on Mesh(pipe=2, data=1; virtual" in here
    )
    assert losses(first) == losses(here) and len({*losses(here)}) == 4 and not losses(second)
    for text in (first, here):
        assert "device 1" in text and re.search(r"stage 1 on device 1 .* ReLU", text)
        assert re.search(r"bubble \d+\.\d%, .* activations at most, \d+ messages a step", text)


def test_pipeline_losses_fall():
    actual = [
        *map(
            float,
            losses(alexnet("--stages", "2", "--steps", "30", "--batch", "24", "--width", "16")),
        )
    ]
    assert actual[-1] < 0.7 * actual[0]


def llama(*options):
    return printed("tensor_llama.py", "--steps", "2", "--batch", "8", *options)


@pytest.mark.filterwarnings("ignore")  # of transformers' own
def test_llama_prints_the_losses_of_one_device():
    pytest.importorskip("transformers")
    here = llama()
    staged = llama("--pipeline", "2")
    first, second = run_processes(llama, 2, "--model", "1", timeout=170)
    alone = [*map(float, losses(llama("--devices", "1", "--seq", "1", "--model", "1")))]
    assert (
        "Mesh(pipe=1, data=2, seq=2, model=2; virtual" in here
        and "Mesh(pipe=2, data=1, seq=2" in staged
    )
    assert "Mesh(pipe=1, data=1, seq=2, model=1; process" in first
    for text in (here, staged, first):
        assert [*map(float, losses(text))] == pytest.approx(alone, abs=2e-4)
    assert len(alone) == 2 and not second and "at:pipe=1" in staged
    sent = dict(
        re.findall(r"^(\S+) +(?:psum|ppermute|all_gather) +([\d,]+)$", here, flags=re.MULTILINE)
    )
    assert {"data", "seq", "model"} <= sent.keys()
