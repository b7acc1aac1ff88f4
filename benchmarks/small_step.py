"""A small ZeRO-3 step over the same plain torch loop: the cost of everything around the mathematics.

    python benchmarks/small_step.py --devices 1 8 64 --rounds 60

MLP of four layers of 64 x 64, batch 2, AdamW; per device; medians. The plain loop runs in blocks of its own, before and
after: interleaved with 64 devices its caches are cold, which flatters the ratio.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

import fshard as fs
from fshard import P

LAYERS, WIDTH, BATCH = 4, 64, 2


def weights() -> dict[str, torch.Tensor]:
    """Return the parameters of the MLP."""
    torch.manual_seed(0)
    pairs = [(f"w{at}", torch.randn(WIDTH, WIDTH) / 8) for at in range(LAYERS)]
    return dict(pairs) | {f"b{at}": torch.zeros(WIDTH) for at in range(LAYERS)}


def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the mean square of the MLP's output, for parameters in a dict."""
    for at in range(LAYERS):
        x = torch.relu(x @ params[f"w{at}"] + params[f"b{at}"])
    return x.square().mean()


def module() -> torch.nn.Module:
    """Return the same MLP as a module."""
    layers = [
        part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())
    ]
    return torch.nn.Sequential(*layers)


def plain(devices: int) -> Callable[[], object]:
    """Return a step of the plain loop, run once per device."""
    params = {name: x.requires_grad_() for name, x in weights().items()}
    opt, x = torch.optim.AdamW(params.values(), lr=1e-3), torch.randn(BATCH, WIDTH)

    def step() -> None:
        for _ in range(devices):
            opt.zero_grad()
            loss_of(params, x).backward()
            opt.step()

    return step


def sharded(
    devices: int, loss_fn: Any, given: Any, *, donate: bool = False
) -> Callable[[], object]:
    """Return a ZeRO-3 step on virtual devices."""
    mesh = fs.make_mesh({"data": devices})
    params = fs.shard_params(given, fs.fsdp("data"), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(1e-3), mesh=mesh, axis="data", stage=3)
    train = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), donate=donate)
    now, x = (params, opt.init(params)), torch.randn(BATCH * devices, WIDTH)

    def step() -> None:
        nonlocal now
        *now, _ = train(*now, x)

    return step


def functional(devices: int) -> Callable[[], object]:
    """Return the step of a functionalized module."""
    apply, params, buffers = fs.functionalize(module())
    return sharded(devices, lambda params, x: apply(params, buffers, x)[0].square().mean(), params)


def main() -> None:
    """Print, for each number of devices, the time per device over that of the plain loop."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("devices  plain ms  function of a dict  donated  functionalized module")
    for devices in args.devices:
        steps = {
            "dict": sharded(devices, loss_of, weights()),
            "donated": sharded(devices, loss_of, weights(), donate=True),
            "module": functional(devices),
        }
        loop = plain(1)
        base = seconds({"plain": loop}, 10 * args.rounds)["plain"]
        times = seconds(steps, args.rounds)
        loop_time = median([*base, *seconds({"plain": loop}, 10 * args.rounds)["plain"]])
        ratios = [f"{median(row) / devices / loop_time:.2f}" for row in times.values()]
        print(f"{devices:7}  {loop_time * 1e3:8.3f}  " + "  ".join(ratios), flush=True)


def seconds(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step in each round but the first ten."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 10):
        for name, step in steps.items():
            began = perf_counter()
            step()
            if turn >= 10:
                times[name].append(perf_counter() - began)
    return times


if __name__ == "__main__":
    main()
