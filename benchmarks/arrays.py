"""Operations on arrays against torch's DTensor: bytes that one device sends, and times on two gloo processes.

    python benchmarks/arrays.py bytes      named cases, forward, on 4 devices: no process is started
    python benchmarks/arrays.py time       pointwise operations, an MLP and a GPT block, forward and backward
    python benchmarks/arrays.py dispatch   a cached pointwise operation on 1 and 8 virtual devices

In the byte cases both get the same inputs, and both results are brought to the layout that the case
names. Times are medians of interleaved rounds; of two processes the slower counts.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, placement_types
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import P
from fshard.testing.processes import run_processes

S0, S1, R = (0,), (1,), ()
"""Layouts of the named cases on one axis of four devices: the sharded dim."""


class Case(NamedTuple):
    """A function, shapes and sharded dims of its arguments, and the sharded dim that its result must have."""

    f: Callable[..., Any]
    arguments: list[tuple[tuple[int, ...], tuple[int, ...]]]
    result: tuple[int, ...]


def cases() -> dict[str, Case]:
    """Return the named cases. Results that have the shape of the input keep its layout; sums are replicated.

    The cases "to replicated" want the layout of DTensor's own result, where fshard keeps the result sharded.
    """
    found: dict[str, Case] = {}
    for one in (R, S0, S1):
        for other in (R, S0, S1):
            for result in (R, S0, S1):
                arguments = [((64, 32), one), ((32, 16), other)]
                found[f"matmul {one} {other} -> {result}"] = Case(torch.matmul, arguments, result)
    for name in ("softmax", "log_softmax", "cumsum", "sort", "cumprod"):
        for dim in (0, 1):
            f = lambda x, n=name, d=dim: _first(getattr(x, n)(dim=d))  # noqa: E731
            found[f"{name} dim {dim}, sharded 1"] = Case(f, [((64, 32), S1)], S1)
    for name in ("softmax", "log_softmax", "cumsum"):
        f = lambda x, n=name: getattr(x, n)(dim=1)  # noqa: E731
        found[f"{name} dim 1, sharded 1, to replicated"] = Case(f, [((64, 32), S1)], R)
    found["layer_norm (1,), to replicated"] = Case(
        lambda x: F.layer_norm(x, (32,)), [((64, 32), S1)], R
    )
    found["flatten (1,), to replicated"] = Case(lambda x: x.reshape(-1), [((64, 32), S1)], R)
    for name in ("sum", "mean", "amax", "logsumexp", "var", "std"):
        for dim in (0, 1):
            f = lambda x, n=name, d=dim: getattr(x, n)(d)  # noqa: E731
            found[f"{name} dim {dim}, sharded 0"] = Case(f, [((64, 32), S0)], S0 if dim else R)
    for one, other in ((S0, S1), (S1, S0)):
        found[f"layer_norm {one}"] = Case(lambda x: F.layer_norm(x, (32,)), [((64, 32), one)], one)
        found[f"rms_norm {one}"] = Case(lambda x: F.rms_norm(x, (32,)), [((64, 32), one)], one)
        found[f"add {one} {other}"] = Case(torch.add, [((64, 32), one), ((64, 32), other)], one)
        found[f"relu(x @ w) {one}"] = Case(
            lambda x, w: torch.relu(x @ w), [((64, 32), one), ((32, 16), R)], one
        )
        found[f"mse {one}"] = Case(F.mse_loss, [((64, 32), one), ((64, 32), one)], R)
        found[f"flatten {one}"] = Case(lambda x: x.reshape(-1), [((64, 32), one)], S0)
        found[f"split reshape {one}"] = Case(
            lambda x: x.reshape(4, 16, 32), [((64, 32), one)], R if one else S0
        )
        found[f"max {one}"] = Case(lambda x: x.max(), [((64, 32), one)], R)
        found[f"norm {one}"] = Case(lambda x: x.norm(), [((64, 32), one)], R)
        found[f"cross_entropy {one}"] = Case(_cross_entropy, [((64, 32), one)], R)
    return found


def _first(y: Any) -> Any:
    return y[0] if isinstance(y, tuple) else y


def _cross_entropy(x: Any) -> Any:
    return -x.log_softmax(1).mean()


class CountBytes(TorchDispatchMode):
    """Count what the functional collectives of torch send, by the rule of `fs.ledger`."""

    sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's own dispatch calls the collectives
        n, name = dist.get_world_size(), str(func)
        if "c10d" in name or "dtensor" in name:
            size = (
                args[0].numel() * args[0].element_size() if isinstance(args[0], torch.Tensor) else 0
            )
            factors = {
                "all_gather": n - 1,
                "reduce_scatter": (n - 1) / n,
                "all_reduce": 2 * (n - 1) / n,
                "all_to_all": (n - 1) / n,
            }
            self.sent += next(
                (
                    factor * size
                    for kind, factor in factors.items()
                    if kind in name or kind[:7] + "_" in name
                ),
                0,
            )
        return func(*args, **(kwargs or {}))


def count_bytes() -> None:
    """Print the bytes of every case."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    device_mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    mesh = fs.make_mesh({"data": 4}, runtime="virtual")
    real, theirs = placement_types.shard_dim_alltoall, CountBytes()

    def all_to_all(x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Count an all-to-all, which DTensor replaces by an all-gather on the CPU."""
        before = theirs.sent
        y = real(x, *args)
        theirs.sent = before + x.numel() * x.element_size() * 3 / 4
        return y

    placement_types.shard_dim_alltoall = all_to_all
    more, fewer = 0, 0
    for name, case in cases().items():
        xs = [torch.randn(shape) for shape, _ in case.arguments]
        places = [Shard(own[0]) if own else Replicate() for _, own in case.arguments]
        given = [
            distribute_tensor(x, device_mesh, [own], src_data_rank=None)
            for x, own in zip(xs, places, strict=True)
        ]
        sent, theirs.sent = float("nan"), 0.0
        with theirs, contextlib.suppress(Exception):  # some operations it does not have
            case.f(*given).redistribute(
                placements=[Shard(case.result[0]) if case.result else Replicate()]
            )
            sent = theirs.sent
        arrays = [
            fs.device_put(x, fs.Layout(mesh, _spec(own)))
            for x, (_, own) in zip(xs, case.arguments, strict=True)
        ]
        with fs.ledger() as comm:
            fs.reshard(case.f(*arrays), fs.Layout(mesh, _spec(case.result)))
        ours = float(comm.bytes())
        more, fewer = more + (ours > sent), fewer + (ours < sent)
        print(
            f"{name:36} fshard {ours:8,.0f}   DTensor {sent:8,.0f}{'   MORE' if ours > sent else ''}"
        )
    print(f"{len(cases())} cases: more bytes in {more}, fewer in {fewer}")


def _spec(dims: tuple[int, ...]) -> P:
    return P(*[None] * dims[0], "data") if dims else P()


class MLP(nn.Module):
    """Two layers, of 128 and 512 features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2, self.mlp = nn.LayerNorm(128), nn.LayerNorm(128), MLP()
        self.q, self.k, self.v, self.out = (nn.Linear(128, 128) for _ in range(4))

    def forward(self, x: Any) -> Any:
        y = self.n1(x)
        q, k, v = (
            own(y).unflatten(-1, (4, 32)).transpose(1, 2) for own in (self.q, self.k, self.v)
        )
        y = (q @ k.transpose(-1, -2) * 32**-0.5).softmax(
            -1
        ) @ v  # DTensor has no fused attention on the CPU
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.n2(x))


RULES = {"*up.*": 0, "*down.weight": 1, "q.*": 0, "k.*": 0, "v.*": 0, "out.weight": 1}


def timed(rounds: int = 20) -> dict[str, list[float]]:
    """Return the seconds of each program, round by round, on one of two processes."""
    torch.set_num_threads(1)
    mesh = fs.make_mesh({"model": 2})
    device_mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    programs: dict[str, Callable[[], Any]] = {}
    for name, make, shape in (("MLP", MLP, (32, 128)), ("GPT block", Block, (4, 64, 128))):
        torch.manual_seed(0)
        x = torch.randn(shape)
        plain, theirs, ours = make(), make(), make()
        rules = {key: P(*[None] * dim, "model") for key, dim in RULES.items()}
        known = {
            key for key in rules if any(_fits(key, path) for path, _ in ours.named_parameters())
        }
        fs.array.shard_module(ours, {key: rules[key] for key in known}, mesh=mesh)
        for path, part in theirs.named_modules():
            for key, p in list(part.named_parameters(recurse=False)):
                full = f"{path}.{key}" if path else key
                dim = next((dim for pattern, dim in RULES.items() if _fits(pattern, full)), None)
                placed = distribute_tensor(
                    p.detach(), device_mesh, [Replicate() if dim is None else Shard(dim)]
                )
                part.register_parameter(key, nn.Parameter(placed))
        own, other = (
            fs.device_put(x, fs.Layout(mesh)),
            distribute_tensor(x, device_mesh, [Replicate()]),
        )
        programs[f"{name}, DTensor"] = lambda m=theirs, x=other: _sum(m(x)).backward()
        programs[f"{name}, fshard"] = lambda m=ours, x=own: m(x).square().sum().backward()
        programs[f"{name}, one device"] = lambda m=plain, x=x: m(x).square().sum().backward()
    small = torch.randn(64)
    array = fs.device_put(small, fs.Layout(mesh, P("model")))
    shard = array.shards[0]
    programs["100 adds, fshard"] = lambda: [array + array for _ in range(100)]
    programs["100 adds, local"] = lambda: [shard + shard for _ in range(100)]
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            dist.barrier()
            start = time.perf_counter()
            program()
            times[name].append(time.perf_counter() - start)
    return times


def dispatch(rounds: int = 21) -> None:
    """Print what one cached pointwise operation costs on virtual devices, and on as many local tensors."""
    for n in (1, 8):
        array = fs.device_put(torch.randn(64), fs.Layout(fs.make_mesh({"data": n}), P("data")))
        programs = {
            "fshard": lambda x=array: x + x,
            "local": lambda x=array: [shard + shard for shard in x.shards],
        }
        times: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(rounds):
            for name, program in programs.items():
                start = time.perf_counter()
                for _ in range(1000):
                    program()
                times[name].append(time.perf_counter() - start)
        print(
            f"{n} virtual devices: "
            + ", ".join(f"{name} {1e3 * median(own):.1f} us" for name, own in times.items())
        )


def _fits(pattern: str, path: str) -> bool:
    from fnmatch import fnmatchcase

    return fnmatchcase(path, pattern)


def _sum(y: DTensor) -> Any:
    return y.square().sum().redistribute(placements=[Replicate()])


def main() -> None:
    """Run the part that was asked for."""
    if "dispatch" in sys.argv:
        dispatch()
        return
    if "time" not in sys.argv:
        count_bytes()
        return
    first, second = run_processes(timed, 2, timeout=500)
    for name in first:
        print(f"{name:24} {1e6 * max(median(first[name][3:]), median(second[name][3:])):10,.0f} us")


if __name__ == "__main__":
    main()
