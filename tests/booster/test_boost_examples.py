"""The examples of the Booster: one loop, and the same losses under every plugin."""

import re

import pytest

from tests.helpers.examples import printed


def losses(text):
    return [float(x) for x in re.findall(r"step +\d+ of \d+  loss (\S+)", text)]


def run(example, *options):
    return printed(example, "--epochs", "1", *options)


@pytest.fixture(scope="module")
def gpt():
    return run("boost_gpt.py", "--plugin", "ddp", "--devices", "1")


@pytest.mark.parametrize("plugin", ["zero2", "hybrid"])
def test_gpt_example_has_equal_losses_under_plugins(plugin, gpt):
    """They are printed with four digits, so that the last one may differ."""
    text = run("boost_gpt.py", "--plugin", plugin, "--devices", "4")
    assert losses(text) == pytest.approx(losses(gpt), rel=2e-3) and len(losses(text)) == 11
    (share,), (expected,) = (re.findall(r"(\d+)% of all", x) for x in (text, gpt))
    assert abs(int(share) - int(expected)) <= 1
    assert losses(gpt)[-1] < losses(gpt)[0] - 0.1


@pytest.fixture(scope="module")
def bert():
    pytest.importorskip("transformers")
    return run("boost_bert.py", "--plugin", "ddp", "--devices", "1")


@pytest.mark.parametrize("plugin", ["fsdp", "hybrid"])
def test_bert_example_trains_under_plugins(plugin, bert):
    """Its dropout draws other numbers on other devices, so that its losses are alike, not the same."""
    text = run("boost_bert.py", "--plugin", plugin, "--devices", "2")
    assert losses(text) == pytest.approx(losses(bert), abs=0.15) and len(losses(text)) == 11


def test_bert_example_with_lora_trains(bert):
    text = run("boost_bert.py", "--lora", "2", "--devices", "2")
    assert losses(text)[-1] < losses(text)[0] and losses(text) != losses(bert)
