"""The blocks of the README run as they stand there: on virtual devices, and the same text in
processes.
"""

import re
from pathlib import Path

import torch

import fshard as fs
from tests.helpers.examples import python_blocks
from tests.helpers.processes import run_processes

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = python_blocks(README.read_text())


def metrics_of(*blocks):
    """Run blocks one after the other, each seeing the names of those before; return the last
    metrics.
    """
    torch.manual_seed(0)
    names = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    return names["metrics"]


def test_training_ends_with_a_loss(capsys):
    metrics = metrics_of(*BLOCKS)
    assert {"loss", "grad_norm", "samples", "finite"} <= metrics.keys()
    assert metrics["samples"] == 32 and metrics["finite"] and 0 < metrics["loss"] < 10
    assert "grad_norm" in capsys.readouterr().out


def test_four_processes_train_as_virtual_devices_do():
    there = run_processes(losses_of, 4, *BLOCKS)
    torch.testing.assert_close(there, 4 * [losses_of(*BLOCKS)])


def losses_of(*blocks):
    return float(metrics_of(*blocks)["loss"])


def test_weight_makes_a_mean_over_tokens_that_of_one_device():
    """The line of the README: without it, padding counts as much as tokens do."""
    (text,) = re.findall(r"`weight=(lambda batch: .*?)`", README.read_text())
    weight = eval(text)
    tokens = torch.randint(5, (8, 6), generator=torch.Generator().manual_seed(0))
    tokens[:4, 2:] = -100  # the rows of two devices are padded
    params = {"scores": torch.randn(6, 5, generator=torch.Generator().manual_seed(1))}

    def loss_fn(params, batch):
        scores = params["scores"].expand(len(batch["y"]), 6, 5).flatten(0, 1)
        return torch.nn.functional.cross_entropy(scores, batch["y"].flatten())

    expected = loss_fn(params, {"y": tokens})
    mesh = fs.make_mesh({"data": 4})
    arrays = fs.shard_params(params, fs.P(), mesh=mesh)
    batch = {"y": tokens}
    weighted, _ = fs.value_and_grad(loss_fn, mesh=mesh, batch=fs.P("data"), weight=weight)(
        arrays, batch
    )
    by_samples, _ = fs.value_and_grad(loss_fn, mesh=mesh, batch=fs.P("data"))(arrays, batch)

    torch.testing.assert_close(weighted, expected)
    assert abs(by_samples - expected) > 1e-3
