"""The first nine minutes on a card: one command, whose parts run by themselves.

    timeout 600 python benchmarks/first_card.py --json first.json       on a machine with one card
    python benchmarks/first_card.py --device cpu --json first.json      the same program without one

Each part is a process, or two: what one finds, breaks or hangs in stops no other. A table and a
file of JSON have, for each, its seconds, its exit code, what it found, and what it could not do.

    doctor      `fshard doctor`
    smoke       `gpu.py --smoke`: wires, streams, attention, in a world of one
    two         the same over NCCL between two ranks on one card, which `NCCL_HOSTID` makes two hosts
    messages    a ring of sends, a sum of one rank, and a pipeline, with FSHARD_CHECK=1
    raise       rank 1 raises: both must end soon, and not with 0
    hang        rank 1 never joins a psum: rank 0 must end after FSHARD_TIMEOUT, and not with 0
    elastic     rank 1 is killed, without a word; rank 0 must go on alone, with equal bits
    programs    one program each: parameters on the host beside an unused one, a batch on the host,
                offload of activations and of state, experts, heads of 20 elements, clipping, fp16
    kernels     operations that sharding adds to a step, beside fully_shard's: see kernels.py
    bf16        steps of `gpu.py bf16`: plain, and ours in stages 0 and 3
    calibrate   `fshard calibrate`

One card can prove: kernels and their dtypes, streams and pinned copies, waits of the host, peaks of
memory, launches, the order and the end of groups. It cannot prove bandwidths, overlap with
communication on NVLink, hybrid sharding, or anything of several machines.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fshard as fs
from fshard import P

HERE = Path(__file__)
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")

SHOWN = 25
"""The lines of a part's output that are kept, the last ones."""

SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""Two ranks on one card are refused by NCCL as one device, unless they seem to be on two hosts."""


@dataclass
class Outcome:
    """The outcome of a part.

    Args:
        name: of the part.
        passed: True if its exit code, and its end in time, are as expected.
        seconds: that it took.
        code: its exit code; None if it was killed at its limit.
        missing: what it could not do here.
        output: the last lines that it has printed.
    """

    name: str
    passed: bool
    seconds: float
    code: int | None
    missing: str = ""
    output: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Part:
    """A part, as a command.

    Args:
        name: of the part.
        command: of each rank.
        limit: seconds after which it is killed.
        ranks: number of processes.
        must_fail: True if it must end with another code than 0.
        killed: the rank that is killed, whose code does not count.
        environment: more variables.
        missing: what it cannot do on this device.
    """

    name: str
    command: list[str]
    limit: float
    ranks: int = 1
    must_fail: bool = False
    killed: int | None = None
    environment: dict[str, str] = field(default_factory=dict[str, str])
    missing: str = ""


def parts(device: str) -> list[Part]:
    """Return all parts, in the order in which they tell most."""
    is_card = device == "cuda"
    python = sys.executable
    gpu = [python, str(HERE.with_name("gpu.py")), "--device", device]
    tiny = [] if is_card else ["--size", "tiny"]
    backend = {"FSHARD_BACKEND": "nccl", **SOCKETS} if is_card else {}
    no_nccl = "" if is_card else "NCCL: ranks are linked by gloo"
    no_card = "" if is_card else "kernels of CUDA, waits of the host"

    def own(name: str) -> list[str]:
        return [python, str(HERE), "--device", device, "--part", name]

    doctor = [python, "-m", "fshard", "doctor", "--device", device]
    calibrate = [python, "-m", "fshard", "calibrate", "--processes", "1", "-o", os.devnull]
    bf16 = [*gpu, "bf16", "--only", "plain", "fshard 0", "fshard 3", "--rounds", "4", *tiny]
    return [
        Part("doctor", doctor, 40, missing=no_card),
        Part("smoke", [*gpu, "--smoke"], 100, missing=no_card),
        Part("programs", own("programs"), 90, missing=no_card),
        Part("two", [*gpu, "--smoke"], 110, 2, environment=backend, missing=no_nccl),
        Part(
            "messages",
            own("messages"),
            60,
            2,
            environment={**backend, "FSHARD_CHECK": "1"},
            missing=no_nccl,
        ),
        Part("raise", own("raise"), 40, 2, must_fail=True, environment=backend, missing=no_nccl),
        Part(
            "hang",
            own("hang"),
            60,
            2,
            must_fail=True,
            environment={**backend, "FSHARD_TIMEOUT": "10"},
            missing=no_nccl,
        ),
        Part("elastic", own("elastic"), 60, 2, killed=1, environment=backend, missing=no_nccl),
        Part("kernels", [python, str(HERE.with_name("kernels.py"))], 60),
        Part("bf16", bf16, 60, missing=no_card),
        Part("calibrate", calibrate, 50, missing=no_card),
    ]


# -- running parts ---------------------------------------------------------------------------------


def outcome_of(part: Part, port: int) -> Outcome:
    """Run a part to its end or its limit; return what it has found."""
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        ranks = [_started(part, rank, port, output) for rank in range(part.ranks)]
        codes: list[int | None] = []
        for rank in ranks:
            rest = part.limit - (time.monotonic() - begin)
            try:
                codes.append(rank.wait(max(rest, 0.1)))
            except subprocess.TimeoutExpired:
                codes.append(None)
        for rank in ranks:
            _kill_group(rank)
        output.seek(0)
        lines = output.read().splitlines()[-SHOWN:]

    # All ranks must have ended by themselves; a part that must fail fails in one of them.
    has_ended = None not in codes
    failures = [code for rank, code in enumerate(codes) if code and rank != part.killed]
    passed = has_ended and bool(failures) == part.must_fail
    code = None
    if has_ended:
        code = failures[0] if failures else 0
    seconds = time.monotonic() - begin
    return Outcome(part.name, passed, seconds, code, part.missing, lines)


def _started(part: Part, rank: int, port: int, output: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", **part.environment}
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if part.ranks > 1:
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": "0",  # one card
            "WORLD_SIZE": str(part.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCL_HOSTID": f"host{rank}",
        }
    return subprocess.Popen(
        part.command,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that what it has started is killed with it
    )


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of it has ended
    process.wait()


# -- programs of two ranks -------------------------------------------------------------------------


def messages(device: str) -> None:
    """Send around a ring, sum over one of the ranks, and run a pipeline of two stages."""
    mesh = fs.make_mesh({"pair": 2}, device=device)

    def ring() -> Tensor:
        x = torch.full((1 << 20,), float(fs.axis_index("pair")), device=device)
        return fs.ppermute(x, "pair", perm=[(0, 1), (1, 0)])

    (received,) = fs.run(ring, mesh=mesh)
    rank = int(os.environ["RANK"])
    assert received.mean().item() == 1 - rank, "the ring has other values"
    print("ring: right")

    halves = fs.make_mesh({"half": 2, "rest": 1}, device=device)
    (total,) = fs.run(lambda: fs.psum(torch.ones(3, device=device), "rest"), mesh=halves)
    assert total.tolist() == [1, 1, 1], "a sum of one device has other values"
    print("sum of one rank: right")

    pipe = fs.make_mesh({"pipe": 2}, device=device)
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(2)]
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=4)
    params = fs.shard_stages(
        [dict(layer.named_parameters()) for layer in layers], mesh=pipe, schedule=schedule
    )
    opt = fs.optim.sgd(0.1)

    def loss(y: Tensor, batch: Any) -> Tensor:
        return y.square().mean()

    step = fs.train_step(layers, opt, mesh=pipe, batch=P(), schedule=schedule, loss=loss)
    batch = torch.randn(8, 64, device=device)
    losses: list[float] = []
    state = opt.init(params)
    for _ in range(3):
        params, state, metrics = step(params, state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] > losses[1] > losses[2], f"the pipeline does not train: {losses}"
    print(f"1f1b: losses {losses}")


def raise_in_one_rank(device: str) -> None:
    """Raise in rank 1, where rank 0 waits for a sum."""
    mesh = fs.make_mesh({"pair": 2}, device=device)

    def main() -> Tensor:
        if fs.axis_index("pair") == 1:
            raise RuntimeError("rank 1 raises, as this part wants")
        return fs.psum(torch.ones(1, device=device), "pair")

    (total,) = fs.run(main, mesh=mesh)
    print(f"rank 0 reads {total.item()}, which no rank has sent")


def hang_in_one_rank(device: str) -> None:
    """Leave rank 0 alone in a sum, and read the result."""
    mesh = fs.make_mesh({"pair": 2}, device=device)

    def main() -> Tensor:
        if fs.axis_index("pair") == 1:
            time.sleep(20)  # beyond FSHARD_TIMEOUT
        return fs.psum(torch.ones(1, device=device), "pair")

    (total,) = fs.run(main, mesh=mesh)
    print(f"this rank reads {total.item()}")


STEPS = 6


def elastic(device: str) -> None:
    """Train on two ranks, of which rank 1 is killed; compare with a run on one device."""

    def make_mesh(devices: Sequence[int]) -> fs.Mesh:
        return fs.make_mesh({"data": len(devices)}, devices=devices, device=device)

    def train(run: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        apply, params, buffers = fs.functionalize(Branches().to(device))
        params = fs.shard_params(params, fs.fsdp("data"), mesh=run.mesh)
        opt = fs.partition_optimizer(fs.optim.adamw(1e-3), mesh=run.mesh, axis="data", stage=3)
        step = fs.train_step(
            lambda params, x: apply(params, buffers, x)[0],
            opt,
            mesh=run.mesh,
            batch=P("data"),
            donate=True,
            reproducible=True,
            slices=2,
        )
        kept = {"params": params, "state": opt.init(params), "steps": 0}
        if run.latest is not None:
            kept = run.restore(kept)
        while kept["steps"] < STEPS:
            torch.manual_seed(kept["steps"])
            x = torch.randn(32, 64)
            if kept["steps"] == STEPS // 2 and run.mesh.size == 2 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            kept["params"], kept["state"], _ = step(kept["params"], kept["state"], x)
            kept["steps"] += 1
            run.save(kept["steps"], kept)
        return fs.unshard(kept["params"])

    trained = fs.elastic(make_mesh)(train)
    result = trained()
    assert result is not None
    print(f"the device goes on: {trained.generations}")
    one = fs.make_mesh({"data": 1}, runtime="virtual", device=device)
    expected = train(SimpleNamespace(mesh=one, latest=None, save=lambda step, kept: None))
    for name, x in expected.items():
        assert torch.equal(result[name], x), f"{name} has other bits"
    print("bits: equal")


# -- programs of one device ------------------------------------------------------------------------


@contextmanager
def counted(device: str) -> Iterator[dict[str, int]]:
    """Count launches, and waits of the host for the device, inside the block."""
    counts: dict[str, int] = {}
    if device == "cpu":
        yield counts
        return
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as run:
        yield counts
    events: Any = run.events()
    for event in events:
        if event.name in SYNCS:
            counts[event.name] = counts.get(event.name, 0) + 1
        elif event.name == "cudaLaunchKernel":
            counts["launches"] = counts.get("launches", 0) + 1


Program = Callable[[str, fs.Mesh], Callable[[], Tensor]]
"""Of the device and the mesh: a step, which returns its loss."""


class Branches(nn.Module):
    """Two layers, of which the second is used by no step."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(64, 64)
        self.unused = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss; positions are made on the device of the weights, as many models do."""
        positions = torch.arange(len(x), device=self.used.weight.device)
        return (self.used(x) + positions[:, None]).square().mean()


class Experts(nn.Module):
    """A layer of experts in a residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = fs.nn.MoE(64, 128, experts=4, top_k=2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        return (x + self.experts(x)).square().mean()


class Remat(nn.Module):
    """Blocks whose products are in host memory until the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = fs.remat(lambda x, layer=layer: torch.tanh(layer(x)), policy=KEEP)(x)
        return x.square().mean()


KEEP = fs.nn.offload("dots")


def program(
    make: Callable[[], nn.Module],
    *,
    memory: Any = "device",
    offload: dict[str, Any] | None = None,
    rule: fs.optim.Optimizer | None = None,
    batch_on_host: bool = False,
    **options: Any,
) -> Program:
    """Return the program of a module in ZeRO-3."""

    def prepare(device: str, mesh: fs.Mesh) -> Callable[[], Tensor]:
        torch.manual_seed(0)
        apply, params, buffers = fs.functionalize(make().to(device))
        params = fs.shard_params(params, fs.fsdp("data"), mesh=mesh, memory=memory)
        opt = fs.partition_optimizer(
            rule or fs.optim.adamw(1e-3), mesh=mesh, axis="data", stage=3, **(offload or {})
        )
        state = opt.init(params)
        x = torch.randn(32, 64, device="cpu" if batch_on_host else device)
        step = fs.train_step(
            lambda params, x: apply(params, buffers, x)[0],
            opt,
            mesh=mesh,
            batch=P("data"),
            donate=True,
            **options,
        )

        def run() -> Tensor:
            nonlocal params, state
            params, state, metrics = step(params, state, x)
            return metrics["loss"]

        return run

    return prepare


def attention_of_odd_heads(device: str, mesh: fs.Mesh) -> Callable[[], Tensor]:
    """Return a step of attention over sharded tokens, with heads of 20 elements."""
    virtual = fs.make_mesh({"seq": 2}, runtime="virtual", device=device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q = torch.randn(1, 2, 32, 20, device=device, dtype=dtype)

    def run() -> Tensor:
        spec = P(None, None, "seq")
        attention = fs.shard_map(
            lambda x: fs.tensor.attention(x, x, x, "seq"),
            mesh=virtual,
            in_specs=spec,
            out_specs=spec,
        )
        x = q.clone().requires_grad_()
        loss = fs.unshard(attention(x)).float().square().mean()
        loss.backward()
        return loss.detach()

    return run


HOST = {"state_memory": "host", "update_on": "host"}

PROGRAMS: dict[str, Program] = {
    "plain": program(Branches),
    "parameters on the host": program(Branches, memory="host", offload=HOST),
    "batch on the host": program(Branches, batch_on_host=True),
    "activations on the host": program(Remat),
    "state on the host": program(Branches, offload={"state_memory": "host"}),
    "experts": program(Experts),
    "heads of 20": attention_of_odd_heads,
    "clipping": program(
        Branches, rule=fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-3))
    ),
    "fp16": program(Branches, rule=fs.optim.loss_scaled(fs.optim.adamw(1e-3)), precision="fp16"),
}


def programs(device: str) -> None:
    """Run each program for three steps, and count launches and waits of a further one."""
    mesh = fs.make_mesh({"data": 2}, runtime="virtual", device=device)
    failures = 0
    for name, prepare in PROGRAMS.items():
        try:
            step = prepare(device, mesh)
            losses = [float(step()) for _ in range(3)]
            with counted(device) as counts:
                step()
            is_finite = all(loss == loss and abs(loss) < 1e9 for loss in losses)
            found = f"losses {losses}, {counts}" if is_finite else f"WRONG: losses {losses}"
            failures += not is_finite
        except Exception:
            failures += 1
            found = f"FAILED\n{traceback.format_exc(limit=-4)}"
        print(f"{name}: {found}", flush=True)
    sys.exit(min(failures, 1))


OWN_PARTS: dict[str, Callable[[str], None]] = {
    "messages": messages,
    "raise": raise_in_one_rank,
    "hang": hang_in_one_rank,
    "elastic": elastic,
    "programs": programs,
}


# -- the program -----------------------------------------------------------------------------------


def show(outcomes: list[Outcome], console: Console) -> None:
    """Print the table, and the output of what has failed."""
    table = Table("part", "passed", "s", "exit code", "not done here")
    for outcome in outcomes:
        code = "killed" if outcome.code is None else str(outcome.code)
        passed = "yes" if outcome.passed else "NO"
        table.add_row(outcome.name, passed, f"{outcome.seconds:.0f}", code, outcome.missing)
    console.print(table)
    for outcome in outcomes:
        if not outcome.passed:
            console.rule(outcome.name)
            console.print("\n".join(outcome.output), markup=False, highlight=False)


def main() -> int:
    """Run the parts; return 1 if one has failed."""
    parser = argparse.ArgumentParser(description="Check and measure a first card.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--part", choices=OWN_PARTS, help="one program, in this process")
    parser.add_argument("--only", nargs="*", help="the parts to run; default: all")
    parser.add_argument("--json", help="the file for all outcomes")
    options = parser.parse_args()
    if options.part is not None:
        OWN_PARTS[options.part](options.device)
        return 0

    console = Console()
    outcomes = list[Outcome]()
    for number, part in enumerate(parts(options.device)):
        if options.only and part.name not in options.only:
            continue
        console.print(f"{part.name} ...")
        outcomes.append(outcome_of(part, port=29620 + number))
        if options.json:  # after each, so that a machine that is taken away leaves what was found
            text = json.dumps([asdict(outcome) for outcome in outcomes], indent=1)
            Path(options.json).write_text(text, encoding="utf-8")
    show(outcomes, console)
    return int(not all([outcome.passed for outcome in outcomes]))


if __name__ == "__main__":
    sys.exit(main())
