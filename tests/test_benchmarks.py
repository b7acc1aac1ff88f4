"""The benchmarks run, and what they compare trains the same."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """A function that imports a benchmark, whose modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    for path in BENCHMARKS.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    yield importlib.import_module
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


def rows(text):
    found = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in found}


def test_one_device_is_measured_on_a_cpu_too(load, monkeypatch, capsys):
    gpu = load("gpu")
    monkeypatch.setattr(gpu, "compiles", lambda device: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "masters", "--device", "cpu", "--size", "tiny", "--rounds", "1"])
    gpu.main()
    text = capsys.readouterr().out
    assert "left out: torch.compile (it finds no compiler)" in text
    found = rows(text)
    assert set(found) == {"plain", "autocast", "fshard 0", "fshard 3"}
    assert found["plain"][1] == "1.000" and all(float(row[0]) > 0 for row in found.values())


def test_a_variant_that_trains_something_else_is_an_error(load, monkeypatch):
    gpu = load("gpu")
    right = gpu.fshard

    def wrong(task):
        step = right(0, task)
        return lambda index: 1.1 * step(index)

    monkeypatch.setitem(gpu.VARIANTS, "bf16", {"plain": gpu.plain, "wrong": wrong})
    task = gpu.Task(gpu.SIZES["tiny"].model(), "cpu", "bf16", compiled=False)
    with pytest.raises(AssertionError, match="wrong did not train what the plain loop did"):
        gpu.measure(gpu.Console(), task, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so(load, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit):
        load("gpu").main()
    assert "no GPU is here for --device cuda; --device cpu --size tiny shows that it runs" in capsys.readouterr().err


@pytest.mark.parametrize("make", [lambda m: m.Gpt(16, 2, 2, 11, 8, 2), lambda m: m.Mlp(4, 8, 2, 3)], ids=["gpt", "mlp"])
def test_a_model_is_the_same_as_functions_and_as_a_module(load, make):
    models = load("models")
    model = make(models).model()
    batch, module = model.batch(1, 0), models.Module(model, 3)
    params = {name: x.requires_grad_() for name, x in model.init(3).items()}
    loss = model.loss(params, batch)
    expected = torch.autograd.grad(loss, list(params.values()))
    found = torch.autograd.grad(module(batch), list(module.parameters()))
    assert torch.equal(module(batch), loss) and all(map(torch.equal, found, expected))


def test_calls_are_timed_in_turn(load):
    timing, seen = load("timing"), []
    calls = {name: lambda name=name: seen.append(name) for name in "ab"}
    times = timing.interleaved(calls, 3, warm_up=2, between=lambda: seen.append("-"), ready=lambda: seen.append("."))
    assert {name: len(row) for name, row in times.items()} == {"a": 3, "b": 3}
    turns = "".join(seen).split("-")[1:]
    assert len(turns) == 5 and set(turns) == {".a.b", ".b.a"}
