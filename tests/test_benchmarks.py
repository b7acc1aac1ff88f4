"""The benchmarks run, and what they compare trains the same."""

import contextlib
import importlib
import io
import itertools
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from tests.helpers.processes import run_processes
from tests.helpers.sampled import thorough
from tests.mesh.runtimes.nccl_rules import Ruled

RULES = {"FSHARD_BACKEND": "nccl_rules"}
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


def gpu_benchmark(*argument_lists):
    """Run benchmarks/gpu.py in this process, once for each list of arguments; return its numbers,
    and what it printed.
    """
    sys.path.insert(0, str(BENCHMARKS))
    warnings.simplefilter("ignore")  # torch's own, of the peers
    gpu = importlib.import_module("gpu")
    results = []
    for arguments in argument_lists:
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            file = Path(folder, "numbers.json")
            sys.argv = [
                "gpu.py",
                *arguments,
                "--device",
                "cpu",
                "--size",
                "tiny",
                "--rounds",
                "1",
                "--json",
                str(file),
            ]
            with contextlib.suppress(SystemExit):
                gpu.main()
            results.append(
                (json.loads(file.read_text()) if file.is_file() else {}, printed.getvalue())
            )
    return results


def test_gpu_benchmark_runs_on_a_cpu():
    """Tiny sizes, over gloo: each kind of part, and --smoke with a pipeline."""
    variants = ["--only", "ddp", "fully_shard", "fshard 3", "reproducible 0", "reproducible 3"]
    parts = ["masters", "reproducible", "wires", "checkpoints", *variants]
    (numbers, _), (_, smoke) = run_processes(gpu_benchmark, 2, parts, ["--smoke"], timeout=300)[0]
    assert list(numbers["masters"]) == ["ddp", "fully_shard", "fshard 3"]
    assert {"ms", "host ms", "tokens/s", "launches", "syncs", "exposed ms"} <= numbers["masters"][
        "fshard 3"
    ].keys()
    pairs = [row for part in ("wires", "checkpoints") for row in numbers[part].values()]
    assert len(pairs) == 6 and all(
        row.keys() == {"ours", "torch"} and min(row.values()) > 0 for row in pairs
    )
    assert "304 calls are exact" in smoke and "FAILED" not in smoke


@pytest.mark.thorough
def test_smoke_of_one_process_runs_under_the_rules_of_nccl():
    """`tests/mesh/runtimes/test_under_nccl_rules.py` has its calls, on several processes."""
    ((_, smoke),) = run_processes(
        Ruled(gpu_benchmark), 1, ["--smoke"], environment=RULES, timeout=300
    )[0]
    assert "304 calls are exact" in smoke and "FAILED" not in smoke


def test_exposed_communication_is_that_without_kernels(load):
    exposed, computed = load("gpu").exposed, [(0.0, 2.0), (1.0, 3.0), (6.0, 7.0)]
    assert exposed([(2.5, 5.0), (4.0, 6.5)], computed) == 3.0
    assert exposed([(1.0, 2.0)], computed) == exposed([], computed) == 0.0


def test_a_variant_that_trains_something_else_is_an_error(load):
    compare = load("gpu").compare
    losses = {f"loss {index}": 3.0 - index / 10 for index in range(4)}
    compare({"plain": losses, "ddp": {**losses, "loss 3": 2.71}, "fshard 3": losses})
    with pytest.raises(AssertionError, match=r"^ddp did not train"):
        compare({"plain": losses, "ddp": {**losses, "loss 3": 2.9}, "fshard 3": losses})
    with pytest.raises(AssertionError, match="reproducible steps"):
        compare({"reproducible 0": losses, "reproducible 3": {**losses, "loss 3": 2.7000001}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so(load, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit):
        load("gpu").main()
    assert (
        "no GPU is here for --device cuda; --device cpu --size tiny shows that it runs"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "make", [lambda m: m.Gpt(16, 2, 2, 11, 8, 2), lambda m: m.Mlp(4, 8, 2, 3)], ids=["gpt", "mlp"]
)
def test_a_model_is_the_same_as_functions_and_as_a_module(load, make):
    models = load("models")
    model = make(models).model()
    batch = model.batch(1, 0)
    module = models.Module(model, 3)
    params = {name: x.requires_grad_() for name, x in model.init(3).items()}
    loss = model.loss(params, batch)
    expected = torch.autograd.grad(loss, list(params.values()))
    actual = torch.autograd.grad(module(batch), list(module.parameters()))
    assert torch.equal(module(batch), loss) and all(map(torch.equal, actual, expected))


def test_calls_are_timed_in_turn(load):
    timing = load("timing")
    seen = []
    calls = {name: lambda name=name: seen.append(name) for name in "ab"}
    times = timing.interleaved(
        calls, 3, warm_up=2, between=lambda: seen.append("-"), ready=lambda: seen.append(".")
    )
    assert {name: len(row) for name, row in times.items()} == {"a": 3, "b": 3}
    turns = "".join(seen).split("-")[1:]
    assert len(turns) == 5 and set(turns) == {".a.b", ".b.a"}


def test_a_link_delays_packets_and_limits_their_rate(load):
    """Five packets of 1,000 bytes at 0.8 Mbit/s: 10 ms each, and 50 ms later; the other direction
    is free.
    """
    forward = load("two_machines").forward
    ended = threading.Event()
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    (here, to_there), (there, to_here) = pairs
    link = threading.Thread(
        target=forward, args=([to_there.fileno(), to_here.fileno()], 0.05, 0.8e6, ended)
    )
    link.start()
    began = time.perf_counter()
    for number in range(5):
        here.send(bytes([number]) * 1000)
    there.send(b"back")
    assert here.recv(10) == b"back" and time.perf_counter() - began >= 0.05
    for number in range(5):
        assert there.recv(2000) == bytes([number]) * 1000
        assert time.perf_counter() - began >= 0.05 + 0.01 * (number + 1)
    ended.set()
    link.join()
    for end in itertools.chain(*pairs):
        end.close()


def kernels_of_a_step():
    """Return the table of benchmarks/kernels.py, which makes process groups of its own."""
    sys.path.insert(0, str(BENCHMARKS))
    warnings.simplefilter("ignore")  # torch's own, of the fake group
    return importlib.import_module("kernels").rows()


def test_kernels_of_a_step_do_not_grow():
    """The oracle is `fully_shard`, whose operations are counted beside ours."""
    (rows,) = run_processes(kernels_of_a_step, 1)
    assert rows["fully_shard"]["added by block"] <= 10
    assert rows["fshard"]["added by block"] <= 10
    assert rows["fshard"]["clipping"] <= 8
    assert rows["fshard"]["gathers"] == 10


@pytest.mark.parametrize(
    "only", [["raise"], thorough(["programs", "messages", "elastic", "raise"])], ids=len
)
def test_first_card_runs_without_a_card(tmp_path, only):
    """Each part says what it could not do; those that must fail end by themselves, and not with 0."""
    file = tmp_path / "first.json"
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "first_card.py")]
    done = subprocess.run(
        [*command, "--device", "cpu", "--only", *only, "--json", str(file)],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    outcomes = {outcome["name"]: outcome for outcome in json.loads(file.read_text())}
    assert done.returncode == 0, done.stdout
    assert {name: outcome["passed"] for name, outcome in outcomes.items()} == dict.fromkeys(
        only, True
    )
    assert outcomes["raise"]["code"] != 0
    if "messages" in only:
        assert outcomes["messages"]["missing"] == "NCCL: ranks are linked by gloo"
    if "programs" in only:
        assert "experts: losses" in "\n".join(outcomes["programs"]["output"])


@pytest.mark.parametrize("engine", ["disjoint", "overlapping"])
def test_moves_between_meshes_are_those_of_torch(load, engine):
    """The benchmark itself compares all shards with those of full tensors that torch broadcasts."""
    between = load("between")
    numbers = between.ENGINES[engine]
    size = max(between.TRAINER, max(numbers) + 1)
    (report, *_) = run_processes(times_between_meshes, size, 1 << 20, numbers)
    times, seconds = report
    assert times.keys() == seconds.keys() == {"ours", "torch"}


def times_between_meshes(size, engine):
    """Return the report of benchmarks/between.py, which makes meshes of torch."""
    sys.path.insert(0, str(BENCHMARKS))
    return importlib.import_module("between").timed(size, engine, 1)


def test_plan_of_a_mixture_has_each_missing_element(load, capsys):
    between = load("between")
    between.plan(between.Console(), layers=1)
    assert "planned in" in capsys.readouterr().out


@pytest.mark.parametrize("is_cold", [False, True])
def test_decode_steps_have_the_tokens_of_plain_torch(load, is_cold):
    """The benchmark itself compares them."""
    decode = load("decode")
    size = decode.Size(hidden=96, heads=4, layers=1, words=32, batch=2, cache=4)
    ways = decode.ratios(size, 1, is_cold=is_cold)
    assert ways.keys() == {"plain", "arrays", "shard_map"}
    assert ways["plain"][1] == 1


def test_copies_of_every_fourth_step_send_a_quarter(load):
    found = load("elastic").times_of_copies("small", 2, 2, 1, {})
    assert found.keys() == {"alone", "every 1", "every 4"}
    assert found["alone"].copied == 0
    assert found["every 1"].copied == 4 * found["every 4"].copied > 0
    assert len({one.sent for one in found.values()}) == 1


@pytest.mark.thorough
def test_processes_make_a_step_after_one_is_killed(load):
    """`tests/test_elastic.py` has the recovery itself."""
    assert 0 < load("elastic").seconds_to_next_step(3, 0, {}, 1) < 60
