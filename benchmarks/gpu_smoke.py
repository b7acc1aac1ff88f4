"""`gpu.py --smoke`: the first two minutes on a card. Each check runs, whatever the ones before found.

export PYTHONFAULTHANDLER=1 NCCL_DEBUG=WARN TORCH_NCCL_TRACE_BUFFER_SIZE=2000
timeout 120 python benchmarks/gpu.py --smoke                             a world of one, over NCCL
timeout 120 torchrun --nproc-per-node 2 benchmarks/gpu.py --smoke        two cards; on one card over gloo

names      torch, NCCL and the card; names of torch's functions that differ between versions
steps      a model of several buckets in all stages, against the plain loop; from the second step on whatever waits
           for the device raises
calls      each wire format of the transport in each dtype, for 0, 1, an odd number and 10^6 elements
host time  the same behind a kernel that sleeps: to start and wait must take less than 1 ms
virtual    four devices on one card: equal bits, random numbers, a checkpoint
attention  causal, over the tokens of four such devices, with and without a mask: the error is at most four times torch's
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpu import SIZES, Task, choose_deterministic_kernels, fshard, machine, pipeline, plain
from models import RATE, SEED, Batch, Gpt, Model, Params
from rich.console import Console
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fshard as fs
from fshard import P
from fshard.mesh.collectives.moves import (
    AllGather,
    AllToAll,
    Broadcast,
    Extreme,
    Permute,
    Psum,
    PsumScatter,
    Wired,
)
from fshard.mesh.runtimes.nccl import WIRES, permute
from fshard.mesh.runtimes.process_group import GroupCall

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
MODEL = Gpt(width=512, heads=8, depth=8, vocabulary=8192, length=256, sequences=4)
LIMIT = 1e-3


def smoke(console: Console, mesh: fs.Mesh) -> int:
    """Run all checks; return the number of those that failed."""
    failures = 0
    for check in (names, steps, stages, calls, host_time, virtual, attention):
        began = time.perf_counter()
        try:
            outcome = check(mesh)
        except Exception:  # the next ones may tell more
            failures += 1
            outcome = f"FAILED\n{traceback.format_exc()}"
        console.print(
            f"{check.__name__} ({time.perf_counter() - began:.1f} s): {outcome}", markup=False
        )
    return failures


def names(mesh: fs.Mesh) -> str:
    functions = (
        "all_gather_single",
        "reduce_scatter_single",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    )
    return str({**machine(mesh.device_type), **{name: hasattr(dist, name) for name in functions}})


# -- steps ---------------------------------------------------------------------------------------------------------


@contextmanager
def refusing_waits(mesh: fs.Mesh) -> Generator[None]:
    """Raise where the host waits for the device, on CUDA."""
    is_cuda = mesh.device_type == "cuda"
    if is_cuda:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if is_cuda:
            torch.cuda.set_sync_debug_mode("default")


def steps(mesh: fs.Mesh) -> str:
    task = Task(MODEL if mesh.device_type == "cuda" else SIZES["tiny"], mesh, "bf16")
    bucket = sum(x.nbytes for x in task.model().init(SEED).values()) // 4
    variants = {f"fshard {stage}": partial(fshard, stage, bucket=bucket) for stage in range(4)}
    if mesh.size == 1:
        variants["plain"] = plain
    curves: dict[str, list[float]] = {}
    for name, make in variants.items():
        step = make(task)
        losses = [step(0)]
        task.wait()
        with refusing_waits(mesh):
            losses += [step(index) for index in (1, 2)]
        curves[name] = torch.stack(losses).tolist()
    first = next(iter(curves.values()))
    for name, curve in curves.items():
        torch.testing.assert_close(curve, first, rtol=2e-2, atol=0, msg=f"{name}: {curves}")
    return f"losses {first} in {', '.join(curves)}"


def stages(mesh: fs.Mesh) -> str:
    if mesh.size == 1:
        return "left out: one process sends no messages"
    task = Task(MODEL if mesh.device_type == "cuda" else SIZES["tiny"], mesh, "masters")
    return f"three steps of each schedule have torch's gradients: {', '.join(pipeline(task, rounds=1))}"


# -- calls ---------------------------------------------------------------------------------------------------------


def moves(n: int) -> list[Wired]:
    ring = tuple((i, (i + 1) % n) for i in range(n))
    return [
        Psum(),
        Extreme(True),
        AllGather(0),
        PsumScatter(0),
        AllToAll(0, 0),
        Permute(ring),
        Broadcast(n - 1),
    ]


def run_wire(move: Wired, x: Tensor, n: int) -> Tensor:
    """Run the transport's wire on the group of all processes, without the runtime around it."""
    group: Any = dist.group.WORLD
    call = GroupCall(group, dist.get_rank(), n, 0)
    packed = move.pack(x, n).contiguous()
    if isinstance(move, Permute):
        wire = permute(call, [packed], move)
    else:
        wire = WIRES[move.wire](call, packed, move)

    try:
        while True:
            for work in next(wire):
                work.wait()
    except StopIteration as end:
        rows = end.value[0] if isinstance(move, Permute) else end.value
        return move.unpack(rows, x.shape, n)


def calls(mesh: fs.Mesh) -> str:
    n, count, largest = mesh.size, 0, 10**6 if mesh.device_type == "cuda" else 10**4
    wrong: list[str] = []
    for move in moves(n):
        for dtype in DTYPES:
            for size in (0, 1, 1001, largest):
                if dtype.is_complex and isinstance(move, Extreme):
                    continue
                generator = torch.Generator().manual_seed(size)
                xs = [
                    torch.randint(2, (n * size,), generator=generator).to(dtype) for _ in range(n)
                ]
                result = run_wire(move, xs[dist.get_rank()].to(mesh.device_type), n)
                count += 1
                if not torch.equal(result.cpu(), move.meaning(xs)[dist.get_rank()]):
                    wrong.append(f"{move.name} {dtype} {n * size}")
    if wrong:
        raise AssertionError(f"wrong results: {wrong}")
    return f"{count} calls are exact"


def host_time(mesh: fs.Mesh) -> str:
    is_cuda, x, n = (
        mesh.device_type == "cuda",
        torch.ones(mesh.size << 10, device=mesh.device_type),
        mesh.size,
    )
    timed: dict[str, Callable[[], Any]] = {
        move.name: partial(run_wire, move, x, n) for move in moves(n)
    }
    if n > 1:
        collectives = {
            "fs.psum": fs.psum,
            "fs.all_gather": fs.all_gather,
            "fs.psum_scatter": fs.psum_scatter,
        }
        timed |= {
            name: lambda one=one: one.start(x, "data").wait() for name, one in collectives.items()
        }
    seconds = fs.run(
        lambda: {name: behind_sleep(is_cuda, call) for name, call in timed.items()}, mesh=mesh
    )[0]
    if is_cuda and (slow := {name: time for name, time in seconds.items() if time > LIMIT}):
        raise AssertionError(f"the host waited for the device: {slow} s, others {seconds}")
    shown = {name: f"{1e6 * time:.0f} us" for name, time in seconds.items()}
    return f"{shown}{'' if is_cuda else ' (no card: nothing slept)'}"


def behind_sleep(is_cuda: bool, call: Callable[[], Any]) -> float:
    """Return the seconds until a call returns, while the device sleeps."""
    call()  # makes communicators
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9)  # pyright: ignore[reportPrivateUsage]
    began = time.perf_counter()
    call()
    host = time.perf_counter() - began
    if is_cuda:
        torch.cuda.synchronize()
    return host


# -- values --------------------------------------------------------------------------------------------------------


def virtual(mesh: fs.Mesh) -> str:
    if mesh.size > 1:
        return "left out: only in a world of one"
    choose_deterministic_kernels(mesh.device_type)
    curves: list[Any] = []
    for n in (1, 4):
        devices = fs.make_mesh({"data": n}, runtime="virtual", device=mesh.device_type)
        task = Task(
            Gpt(width=64, heads=4, depth=2, vocabulary=256, length=32, sequences=4), mesh, "masters"
        )
        params, batch, model = task.model().init(SEED), task.data()[0], task.model()

        def loss_fn(params: Params, batch: Batch, model: Model = model) -> Tensor:
            return model.loss(params, batch) * (1 + torch.rand((), device=batch["inputs"].device))

        params = fs.shard_params(params, fs.fsdp("data"), mesh=devices)
        opt = fs.partition_optimizer(fs.optim.adamw(RATE), mesh=devices, axis="data", stage=3)
        train = fs.train_step(
            loss_fn, opt, mesh=devices, batch=P("data"), reproducible=True, slices=4
        )
        torch.manual_seed(SEED)
        saved = params, opt.init(params)
        with tempfile.TemporaryDirectory() as folder:
            params, state, _ = train(*saved, batch)
            fs.save(f"{folder}/1", (params, state))
            params, state = fs.restore(f"{folder}/1", saved)
        curves.append(
            [train(params, state, batch)[2][name].item() for name in ("loss", "grad_norm")]
        )
    if curves[0] != curves[1]:
        raise AssertionError(f"one device and four have different bits: {curves}")
    return f"one device and four have equal bits, after a restore: {curves[0]}"


def attention(mesh: fs.Mesh) -> str:
    if mesh.size > 1:
        return "left out: only in a world of one"
    devices, tokens, kind = (
        fs.make_mesh({"seq": 4}, runtime="virtual", device=mesh.device_type),
        600,
        mesh.device_type,
    )
    key_mask = torch.rand(2, tokens, device=kind) > 0.3
    key_mask[:, 0] = True  # so that every token sees one
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=kind).tril()
    ratios: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        *xs, weights = torch.randn(4, 2, 8, tokens, 64, device=kind).to(dtype).unbind()
        for name, mask in (("full", None), ("masked", key_mask)):
            visible = causal if mask is None else causal & mask[:, None, None]
            serial = partial(scaled_dot_product_attention, attn_mask=visible)
            exact = gradients(serial, [x.double() for x in xs], weights)
            alone, sharded = (
                gradients(serial, xs, weights),
                gradients(partial(over_tokens, devices, mask), xs, weights),
            )
            errors = [
                [float((x - y).norm()) for x, y in zip(values, exact, strict=True)]
                for values in (alone, sharded)
            ]
            ratios[f"{dtype} {name}"] = max(
                own / torchs for torchs, own in zip(*errors, strict=True)
            )
    if max(ratios.values()) > 4:
        raise AssertionError(f"errors of torch's: {ratios}")
    return f"errors of torch's: { {name: round(ratio, 1) for name, ratio in ratios.items()} }"


def over_tokens(devices: fs.Mesh, key_mask: Tensor | None, *xs: Tensor) -> Tensor:
    """Attend on virtual devices that share the tokens."""

    def local(*xs: Tensor) -> Tensor:
        mask = None if key_mask is None else key_mask.chunk(devices.size, 1)[fs.axis_index("seq")]
        return fs.tensor.attention(*xs, "seq", causal=True, key_mask=mask)

    spec = P(None, None, "seq")
    return fs.unshard(fs.shard_map(local, mesh=devices, in_specs=spec, out_specs=spec)(*xs))


def gradients(attend: Callable[..., Tensor], xs: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Return the output and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in xs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]
