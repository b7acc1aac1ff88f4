"""The examples of the Booster: one loop, and the same losses under every plugin, on virtual devices and in processes."""

import re
import runpy

import pytest
import torch
from torch.utils.data import DataLoader

import fshard as fs
from fshard.testing.processes import run_processes
from tests.examples import EXAMPLES, printed


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


@pytest.mark.parametrize("plugin", ["zero2", "hybrid"])
def test_gpt_example_has_equal_losses_under_plugins(plugin, counted):
    same(gpt("--plugin", plugin, "--devices", "4"), counted)
    assert losses(counted)[-1] < losses(counted)[0] - 0.1


def test_gpt_example_has_equal_losses_in_two_processes(counted):
    for plugin in ("fsdp", "hybrid"):
        first, second = run_processes(gpt, 2, "--plugin", plugin)
        same(first, counted)
        assert not second


@pytest.fixture(scope="module")
def judged():
    pytest.importorskip("transformers")
    return bert("--plugin", "ddp", "--devices", "1")


@pytest.mark.parametrize("plugin", ["zero1", "fsdp", "hybrid"])
def test_bert_example_trains_under_plugins(plugin, judged):
    """Its dropout draws other numbers on other devices, so that its losses are alike, not the same."""
    text = bert("--plugin", plugin, "--devices", "2")
    assert losses(text) == pytest.approx(losses(judged), abs=0.15) and len(losses(text)) == 11


@pytest.mark.parametrize(("zero_stage", "schedule"), [(1, "1f1b"), (3, "gpipe")])
def test_bert_in_stages_equals_unsplit_bert_bitwise(zero_stage, schedule):
    pytest.importorskip("transformers")
    example = runpy.run_path(str(EXAMPLES / "boost_bert.py"))

    def main(plugin):
        booster, model = fs.Booster(plugin), example["bert"]()
        loader = DataLoader(example["sentences"]()[:48], batch_size=16)
        model, opt, _, loader, _ = booster.boost(model, torch.optim.AdamW(model.parameters()), dataloader=loader)
        batches = iter(loader)
        for _ in range(len(loader)):
            if plugin.in_stages():
                booster.execute_pipeline(batches, model, lambda output, batch: output.loss, opt)
            else:
                booster.backward(model(**next(batches)).loss, opt)
            opt.step(), opt.zero_grad()
        return model.unwrap().state_dict()

    how = {"zero_stage": zero_stage, "schedule": schedule, "sample": example["SAMPLE"], "blocks": "bert.encoder.layer"}
    staged = fs.HybridParallelPlugin(pipeline=2, microbatches=4, reproducible=True, **how)
    (expected,) = fs.run(main, fs.DDPPlugin(reproducible=True), mesh=fs.make_mesh({"data": 1}))
    for state in fs.run(main, staged, mesh=fs.make_mesh({"data": 2, "pipe": 2})):
        assert [name for name, x in expected.items() if not torch.equal(x, state[name])] == []


def test_bert_example_with_lora_trains(judged):
    text = bert("--lora", "2", "--devices", "2")
    assert losses(text)[-1] < losses(text)[0] and losses(text) != losses(judged)
