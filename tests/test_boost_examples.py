"""The examples of the Booster: one loop, and the same losses under every plugin, on virtual devices and in processes."""

import re

import pytest

from fshard.testing.processes import run_processes
from tests.examples import printed

PLUGINS = ["zero1", "zero2", "fsdp", "hybrid"]


def losses(text):
    return [float(x) for x in re.findall(r"step +\d+ of \d+  loss (\S+)", text)]


def gpt(*options):
    return printed("boost_gpt.py", "--epochs", "1", *options)


def bert(*options):
    return printed("boost_bert.py", "--epochs", "1", *options)


def same(text, other):
    """Hold the printed losses, four digits each, to be equal up to the last of them."""
    assert losses(text) == pytest.approx(losses(other), rel=2e-3) and len(losses(text)) == 11
    (first,), (second,) = (re.findall(r"(\d+)% of all", x) for x in (text, other))
    assert abs(int(first) - int(second)) <= 1


@pytest.fixture(scope="module")
def counted():
    return gpt("--plugin", "ddp", "--devices", "1")


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_gpt_learns_the_same_under_every_plugin(plugin, counted):
    same(gpt("--plugin", plugin, "--devices", "4"), counted)
    assert losses(counted)[-1] < losses(counted)[0] - 0.1


def test_a_gpt_learns_the_same_in_two_processes(counted):
    for plugin in ("fsdp", "hybrid"):
        first, second = run_processes(gpt, 2, "--plugin", plugin)
        same(first, counted)
        assert not second


@pytest.fixture(scope="module")
def judged():
    pytest.importorskip("transformers")
    return bert("--plugin", "ddp", "--devices", "1")


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_bert_of_transformers_learns_under_every_plugin(plugin, judged):
    """Its dropout draws other numbers on other devices, so that its losses are alike, not the same."""
    text = bert("--plugin", plugin, "--devices", "2")
    assert losses(text) == pytest.approx(losses(judged), abs=0.15) and len(losses(text)) == 11


def test_a_bert_learns_differences_of_low_rank(judged):
    text = bert("--lora", "2", "--devices", "2")
    assert losses(text)[-1] < losses(text)[0] and losses(text) != losses(judged)
