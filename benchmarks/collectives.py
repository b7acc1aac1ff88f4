"""What collectives cost: on virtual devices, and between processes against torch.distributed.

    python benchmarks/collectives.py             everything (about four minutes on two cores)
    python benchmarks/collectives.py virtual     one part: virtual, gloo, fused, map, matmul, deadlock
    python benchmarks/collectives.py gloo --processes 2 --sizes 1024 8388608

Machines are shared and noisy, so all that is compared runs in turn in one process, round after round, and the median
over the rounds is shown; of several processes the slowest counts.  Ratios mean something, absolute times little.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from timing import Times, interleaved, slowest

import fshard as fs
from fshard import P
from fshard.testing.processes import run_processes

KB, MB = 1 << 10, 1 << 20
SIZES = [KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 8 * MB, 32 * MB]
Calls = dict[str, Callable[[], object]]


def shown(size: int) -> str:
    return f"{size // MB} MB" if size >= MB else f"{size // KB} KB"


# -- virtual devices ----------------------------------------------------------------------------------------------


def virtual(console: Console) -> None:
    """Microseconds per device for one collective on a small tensor."""
    table = Table(
        "collective",
        "8 devices",
        "64 devices",
        "256 devices",
        title="virtual: us per device (bar: 40 at 8)",
    )
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "psum": lambda x: fs.psum(x, "d"),
        "all_gather": lambda x: fs.all_gather(x, "d"),
        "psum_scatter": lambda x: fs.psum_scatter(x, "d"),
        "all_to_all": lambda x: fs.all_to_all(x, "d"),
        "ppermute": lambda x: fs.ppermute(x, "d", [(0, 1)]),
    }
    for name, call in calls.items():
        row = [name]
        for n, rounds in ((8, 200), (64, 40), (256, 10)):
            x = torch.ones(max(n, 16))

            def main(
                call: Callable[[torch.Tensor], object] = call,
                rounds: int = rounds,
                x: torch.Tensor = x,
            ) -> float:
                call(x)
                began = time.perf_counter()
                for _ in range(rounds):
                    call(x)
                return (time.perf_counter() - began) / rounds

            mesh = fs.make_mesh({"d": n})
            row.append(f"{median([max(fs.run(main, mesh=mesh)) / n * 1e6 for _ in range(5)]):.1f}")
        table.add_row(*row)
    console.print(table)


def matmul(console: Console) -> None:
    """Eight virtual devices with an eighth of the rows each, against one device with all of them."""
    torch.manual_seed(0)
    x, weights = (
        torch.randn(2048, 512),
        [torch.randn(512, 2048) / 23, torch.randn(2048, 512) / 45] * 3,
    )

    def step(x: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = torch.relu(x @ w)
        return fs.psum(x.sum(), "d")

    runs = {
        n: fs.shard_map(step, mesh=fs.make_mesh({"d": n}), in_specs=P("d"), out_specs=P())
        for n in (1, 8)
    }

    def run(n: int, threads: int) -> torch.Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return runs[n](x)
        finally:
            torch.set_num_threads(before)

    table = Table(
        "each with",
        "one device, ms",
        "eight devices, ms",
        "ratio",
        title="a matmul-bound step (bar: 1.25)",
    )
    for threads in (1, len(os.sched_getaffinity(0))):
        times = interleaved({str(n): partial(run, n, threads) for n in runs}, rounds=8, warm_up=1)
        one, eight = median(times["1"]), median(times["8"])
        table.add_row(
            f"{threads} threads", f"{one * 1e3:.0f}", f"{eight * 1e3:.0f}", f"{eight / one:.2f}"
        )
    console.print(table)


def deadlock(console: Console) -> None:
    """How long it takes until a collective that one of 64 devices leaves out is reported."""

    def main() -> None:
        if fs.axis_index("d") != 41:
            fs.psum(torch.ones(1), "d")

    began = time.perf_counter()
    try:
        fs.run(main, mesh=fs.make_mesh({"d": 64}))
    except fs.errors.DeadlockError:
        console.print(
            f"a missing collective on one of 64 devices: reported in {time.perf_counter() - began:.3f} s (bar: 2)"
        )
    assert threading.active_count() == 1


# -- processes ----------------------------------------------------------------------------------------------------


def compare(calls: Calls, rounds: int) -> Times:
    """Time calls in turn; all processes begin each together, and the slowest counts."""
    return slowest(interleaved(calls, rounds, ready=dist.barrier))


def calls_of(x: torch.Tensor, n: int) -> dict[str, Calls]:
    """Return for each collective ours, torch's own, and what torch's costs as a pure function where it is in place."""
    work, shard = x.clone(), x[: x.numel() // n].clone()
    full, scattered, exchanged = (
        torch.empty(n * x.numel()),
        torch.empty_like(shard),
        torch.empty_like(x),
    )
    pairs = [(source, (source + 1) % n) for source in range(n)]
    right, left = (dist.get_rank() + 1) % n, (dist.get_rank() - 1) % n

    def shift() -> None:
        messages = [dist.P2POp(dist.irecv, exchanged, left), dist.P2POp(dist.isend, x, right)]
        for message in dist.batch_isend_irecv(messages):
            message.wait()

    return {
        "psum": {
            "ours": lambda: fs.psum(x, "d"),
            "torch": lambda: dist.all_reduce(work),
            "pure": lambda: dist.all_reduce(x.clone()),
        },
        "all_gather": {
            "ours": lambda: fs.all_gather(x, "d"),
            "torch": lambda: dist.all_gather_single(full, x),
            "pure": lambda: dist.all_gather_single(torch.empty(n * x.numel()), x),
        },
        "psum_scatter": {
            "ours": lambda: fs.psum_scatter(x, "d"),
            "torch": lambda: dist.reduce_scatter_single(scattered, x),
            "pure": lambda: dist.reduce_scatter_single(torch.empty_like(shard), x),
        },
        "all_to_all": {
            "ours": lambda: fs.all_to_all(x, "d"),
            "torch": lambda: dist.all_to_all_single(exchanged, x),
            "pure": lambda: dist.all_to_all_single(torch.empty_like(x), x),
        },
        "ppermute": {"ours": lambda: fs.ppermute(x, "d", pairs), "torch": shift},
        "broadcast": {
            "ours": lambda: fs.broadcast(x, "d"),
            "torch": lambda: dist.broadcast(work, 0),
            "pure": lambda: dist.broadcast(x.clone(), 0),
        },
    }


def gloo_process(sizes: list[int], only: list[str]) -> dict[tuple[str, int], Times]:
    """Run in every process: all collectives at all sizes."""
    n = int(os.environ["WORLD_SIZE"])
    mesh = fs.make_mesh({"d": n}, device="cpu")

    def main() -> dict[tuple[str, int], Times]:
        found: dict[tuple[str, int], Times] = {}
        for size in sizes:
            x = torch.zeros(size // 4)
            rounds = 60 if size <= MB else 20 if size <= 8 * MB else 10
            for name, calls in calls_of(x, n).items():
                if not only or name in only:
                    found[name, size] = compare(calls, rounds)
        return found

    return fs.run(main, mesh=mesh)[0]


def gloo(console: Console, processes: list[int], sizes: list[int], only: list[str]) -> None:
    """Ours against torch.distributed's own call, by size."""
    titles = {
        "torch": "ratio to torch's call into a buffer at hand",
        "pure": "ratio to torch's call into a new tensor, as ours",
        "": "ours, ms",
    }
    for n in processes:
        found = run_processes(gloo_process, n, sizes, only, timeout=560)[0]
        for against, title in titles.items():
            table = Table("collective", *map(shown, sizes), title=f"gloo, {n} processes: {title}")
            for name in dict.fromkeys(name for name, _ in found):
                rows = [
                    {call: median(times) for call, times in found[name, size].items()}
                    for size in sizes
                ]
                if not against:
                    table.add_row(name, *(f"{row['ours'] * 1e3:.2f}" for row in rows))
                elif against in rows[0]:
                    table.add_row(name, *(f"{row['ours'] / row[against]:.2f}" for row in rows))
            console.print(table)


def fused_process() -> Times:
    """Run in every process: 64 tensors of 4 KB together, and one by one."""
    mesh = fs.make_mesh({"d": int(os.environ["WORLD_SIZE"])}, device="cpu")
    xs = [torch.zeros(1024) for _ in range(64)]
    calls: Calls = {
        "together": lambda: fs.psum(xs, "d"),
        "ours one by one": lambda: [fs.psum(x, "d") for x in xs],
        "torch one by one": lambda: [dist.all_reduce(x) for x in xs],
    }
    return fs.run(lambda: compare(calls, 20), mesh=mesh)[0]


def fused(console: Console, processes: list[int]) -> None:
    """A tree of many small tensors is one collective."""
    singly = ("ours one by one", "torch one by one")
    table = Table(
        "processes", *singly, title="64 x 4 KB psum: times the cost of one tree (bar: 10)"
    )
    for n in processes:
        found = {
            call: median(times)
            for call, times in run_processes(fused_process, n, timeout=300)[0].items()
        }
        table.add_row(str(n), *(f"{found[call] / found['together']:.1f}" for call in singly))
    console.print(table)


def map_process() -> dict[int, float]:
    """Run in every process: what shard_map costs around a function that does nothing."""
    mesh = fs.make_mesh({"d": int(os.environ["WORLD_SIZE"])}, device="cpu")
    found: dict[int, float] = {}
    for leaves in (1, 10, 100):
        xs = [fs.device_put(torch.zeros(8), fs.Layout(mesh, P("d"))) for _ in range(leaves)]
        f = fs.shard_map(lambda xs: xs, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        times: list[float] = []
        for _ in range(200):
            began = time.perf_counter()
            f(xs)
            times.append(time.perf_counter() - began)
        found[leaves] = median(times) * 1e6
    return found


def map_cost(console: Console) -> None:
    """Time a call of `shard_map` by its number of leaves, and one of 64 virtual devices."""
    found = run_processes(map_process, 2, timeout=300)[0]
    table = Table(
        "leaves", "us per call", "bar: 50 + 5 per leaf", title="shard_map's own cost, 2 processes"
    )
    for leaves, cost in found.items():
        table.add_row(str(leaves), f"{cost:.0f}", str(50 + 5 * leaves))
    console.print(table)
    specs = (P(None, "d"), P("d"))
    f = fs.shard_map(
        lambda a, b: fs.psum(a @ b, "d"),
        mesh=fs.make_mesh({"d": 64}),
        in_specs=specs,
        out_specs=P(),
    )
    times = interleaved(
        {"f": partial(f, torch.randn(64, 4096), torch.randn(4096, 64))}, rounds=50, warm_up=10
    )["f"]
    console.print(f"matmul and psum on 64 virtual devices: {median(times) * 1e3:.1f} ms (bar: 6)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--only", nargs="+", default=[])
    chosen, console = parser.parse_args(), Console(width=120)
    parts = {
        "virtual": virtual,
        "matmul": matmul,
        "deadlock": deadlock,
        "map": map_cost,
        "fused": partial(fused, processes=chosen.processes),
        "gloo": partial(gloo, processes=chosen.processes, sizes=chosen.sizes, only=chosen.only),
    }
    if unknown := set(chosen.parts) - set(parts):
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(parts)}")
    for part in chosen.parts or parts:
        parts[part](console)


if __name__ == "__main__":
    main()
