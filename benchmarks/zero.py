"""What a training step costs: fshard's ZeRO stages, torch's data parallelism, and floors written by hand.

    python benchmarks/zero.py                                   everything
    python benchmarks/zero.py compute --rounds 15 --processes 2    one part: compute, communication, memory
    python benchmarks/zero.py communication --only ddp "floor 0"    variants whose names begin like that
    python benchmarks/zero.py --gloo                            ours over gloo, as torch's, not by direct links

All variants train the same model (models.py) on the same data with AdamW, in turn in one run: in every round each makes
one step, in an order drawn anew.  The slowest process counts, medians over the rounds are shown, and only their ratios
mean something.  All losses have to agree in the end: a variant that trains something else is a bug.

Ours goes by direct links (processes of one machine read each other's memory), torch's by gloo over loopback.

    floors: a unit's parameters are views of one flat buffer; autograd hands their gradients over together

    stage  before a unit runs      its gradient is ready        after backward, for each unit
    0                              psum.start                   wait, AdamW on the whole
    2                              psum_scatter.start           wait, AdamW on the own piece, all_gather.start
    3      all_gather, next one's  psum_scatter.start, let go   wait, AdamW on the own piece
           start; again in backward
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from models import WORKLOADS, Batch, Model, Module, Params, Unit, part
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import P
from fshard.testing.processes import run_processes

RATE, DECAY, BETAS, EPSILON = 3e-4, 1e-2, (0.9, 0.999), 1e-8  # torch's defaults but for the rate
SEED, BATCHES, WARM_UP, TOLERANCE = 0, 4, 3, 1e-3
MIB = 1 << 20

Step = Callable[[int], Tensor]
"""Train on batch `index`; return the loss before the step, of this process's part or of the whole."""
Make = Callable[[Model, list[Batch], fs.Mesh], Step]


# -- torch's own ---------------------------------------------------------------------------------------------------


def loop(module: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> Step:
    """The usual training step."""

    def step(index: int) -> Tensor:
        loss = module(data[index])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ddp(model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    module = DistributedDataParallel(Module(model, SEED), gradient_as_bucket_view=True, static_graph=True)
    return loop(module, AdamW(module.parameters(), lr=RATE, fused=True), data)


def ddp_zero(model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    module = DistributedDataParallel(Module(model, SEED), gradient_as_bucket_view=True, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, parameters_as_bucket_view=True, lr=RATE, fused=True)
    return loop(module, optimizer, data)


def fsdp(reshard: bool, model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    module, devices = Module(model, SEED), fs.to_device_mesh(mesh)
    for name, unit in zip(model.units, module.units, strict=True):
        if name.startswith("blocks."):
            fully_shard(unit, mesh=devices, reshard_after_forward=reshard)
    fully_shard(module, mesh=devices, reshard_after_forward=reshard)
    return loop(module, AdamW(module.parameters(), lr=RATE, fused=True), data)


# -- floors: flat buffers and our collectives, by hand ---------------------------------------------------------------


class Flat:
    """A unit whose parameters are views of one flat buffer, with AdamW's state for the range that is updated here."""

    def __init__(self, unit: Unit, params: Params, n: int) -> None:
        self.unit, self.names, self.shapes = unit, list(params), [leaf.shape for leaf in params.values()]
        self.sizes = [leaf.numel() for leaf in params.values()]
        self.sizes.append(-sum(self.sizes) % n)  # padding, so that all pieces are equal
        leaves = [*(leaf.flatten() for leaf in params.values()), torch.zeros(self.sizes[-1])]
        self.whole: Tensor | None = torch.cat(leaves)
        self.gathering: fs.Handle | None = None
        self.reducing: fs.Handle | None = None
        self.saved = False  # whether backward needs the parameters
        self.train(self.whole)

    def train(self, piece: Tensor) -> None:
        """Say which range is updated here."""
        self.piece, self.gradient = piece, None
        self.first, self.second, self.count = torch.zeros_like(piece), torch.zeros_like(piece), torch.zeros(())

    def own(self, mesh_size: int, index: int) -> Tensor:
        """Return the range of the whole that belongs to device `index`."""
        assert self.whole is not None
        return self.whole.chunk(mesh_size)[index]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the parameters, or their gradients, as they lie in a buffer."""
        return [x.view(shape) for x, shape in zip(buffer.split(self.sizes), self.shapes, strict=False)]

    def run(self, x: Tensor, batch: Batch, anchor: Tensor, reduce: Reduce) -> Tensor:
        """Run the unit on views of its buffer."""
        return self.unit(dict(zip(self.names, Used.apply(anchor, self, reduce), strict=True)), x, batch)

    def adamw(self, gradient: Tensor) -> None:
        """Update the range that is updated here, in place."""
        self.count += 1
        state = [self.piece], [gradient], [self.first], [self.second], [], [self.count]
        torch._fused_adamw_(
            *state,
            lr=RATE,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=DECAY,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )

    # stage 3: the whole comes and goes

    def begin(self) -> None:
        """Start to gather the whole, if it is neither here nor on its way."""
        if self.whole is None and self.gathering is None:
            self.gathering = fs.all_gather.start(self.piece, "data")

    def arrive(self) -> Tensor:
        """Return the whole."""
        if self.whole is None:
            self.begin()
            self.whole, self.gathering = self.gathering.wait(), None
        return self.whole

    @contextmanager
    def passing(self, before: Flat | None) -> Iterator[None]:
        """Save for backward where in the whole a tensor lies, not the tensor; in backward, gather again."""
        whole = self.arrive()
        begin = whole.data_ptr()
        end, self.saved = begin + whole.nbytes, False

        def pack(x: Tensor) -> Tensor | tuple[Any, ...]:
            if not begin <= x.data_ptr() < end:
                return x
            self.saved = True
            return x.shape, x.stride(), x.storage_offset()

        def unpack(packed: Tensor | tuple[Any, ...]) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            if self.whole is None:
                self.arrive()
                if before is not None and before.saved:
                    before.begin()
            return self.whole.as_strided(*packed)

        with saved_tensors_hooks(pack, unpack):
            yield
        self.whole = None


Reduce = Callable[[Flat, Sequence[Tensor]], None]


class Used(torch.autograd.Function):
    """(anchor) -> the parameters of a unit; backward gets all their gradients at once, right after the unit's own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, flat: Flat, reduce: Reduce) -> tuple[Tensor, ...]:
        ctx.flat, ctx.reduce = flat, reduce
        return tuple(flat.views(flat.arrive()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.reduce(ctx.flat, gradients)
        return None, None, None


class Reducer:
    """Starts to reduce a unit's gradients from one of two buffers: no more than two are ever under way."""

    def __init__(self, flats: list[Flat], start: Callable[[Tensor], fs.Handle], *, release: bool = False) -> None:
        size = max(sum(flat.sizes) for flat in flats)
        self.buffers, self.busy = [torch.zeros(size), torch.zeros(size)], list[Flat]()
        self.start, self.release = start, release

    def __call__(self, flat: Flat, gradients: Sequence[Tensor]) -> None:
        if len(self.busy) == 2:
            reduced(self.busy.pop(0))
        buffer, other = self.buffers
        self.buffers = [other, buffer]
        used = buffer[: sum(flat.sizes)]  # what lies in the padding is nobody's parameter
        torch._foreach_copy_(flat.views(used), list(gradients))
        flat.reducing = self.start(used)
        self.busy.append(flat)
        if self.release:
            flat.whole = None


def reduced(flat: Flat) -> Tensor:
    """Return a unit's reduced gradient."""
    if flat.reducing is not None:
        flat.gradient, flat.reducing = flat.reducing.wait(), None
    assert flat.gradient is not None
    return flat.gradient


def flats_of(model: Model, n: int) -> list[Flat]:
    params = model.init(SEED)
    return [Flat(unit, part(params, name), n) for name, unit in model.units.items()]


def local(model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """No communication: what a step costs without the others."""
    flats, anchor = flats_of(model, mesh.size), torch.zeros((), requires_grad=True)
    for flat in flats:
        flat.gradient = torch.zeros_like(flat.piece)

    def keep(flat: Flat, gradients: Sequence[Tensor]) -> None:
        torch._foreach_copy_(flat.views(flat.gradient), list(gradients))

    def step(index: int) -> Tensor:
        x = data[index]["inputs"]
        for flat in flats:
            x = flat.run(x, data[index], anchor, keep)
        x.backward()
        for flat in flats:
            flat.adamw(flat.gradient)
        return x.detach()

    return step


def floor_0(model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """Everything is replicated; gradients are summed as they become ready."""
    n, flats, anchor = mesh.size, flats_of(model, mesh.size), torch.zeros((), requires_grad=True)
    reduce = Reducer(flats, lambda gradient: fs.psum.start(gradient, "data"))

    def step(index: int) -> Tensor:
        x = data[index]["inputs"]
        for flat in flats:
            x = flat.run(x, data[index], anchor, reduce)
        (x / n).backward()
        for flat in reversed(flats):
            flat.adamw(reduced(flat))
        finish(flats, reduce)
        return x.detach()

    return inside(mesh, step)


def floor_2(model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """Gradients are summed and scattered as they become ready; each device updates its piece, and all gather."""
    n, flats, anchor = mesh.size, flats_of(model, mesh.size), torch.zeros((), requires_grad=True)
    reduce = Reducer(flats, lambda gradient: fs.psum_scatter.start(gradient, "data"))
    place = mesh_index(mesh)
    for flat in flats:
        flat.train(flat.own(n, place))

    def arrive(flat: Flat) -> None:
        flat.whole, flat.gathering = flat.gathering.wait(), None
        flat.piece = flat.own(n, place)

    def step(index: int) -> Tensor:
        x = data[index]["inputs"]
        for flat in flats:
            x = flat.run(x, data[index], anchor, reduce)
        (x / n).backward()
        for flat, before in zip(reversed(flats), [None, *reversed(flats[1:])], strict=True):
            flat.adamw(reduced(flat))
            flat.gathering = fs.all_gather.start(flat.piece, "data")
            if before is not None:
                arrive(before)
        arrive(flats[0])
        finish(flats, reduce)
        return x.detach()

    return inside(mesh, step)


def floor_3(reshard: bool, model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """Each device keeps its piece of everything; the whole of a unit is there while it is used."""
    n, flats, anchor = mesh.size, flats_of(model, mesh.size), torch.zeros((), requires_grad=True)
    reduce = Reducer(flats, lambda gradient: fs.psum_scatter.start(gradient, "data"), release=True)
    place = mesh_index(mesh)
    for flat in flats:
        flat.train(flat.own(n, place).clone())
        flat.whole = None

    def step(index: int) -> Tensor:
        x = data[index]["inputs"]
        for flat, before, after in zip(flats, [None, *flats], [*flats[1:], None], strict=False):
            flat.arrive()
            if after is not None:
                after.begin()
            if reshard and after is not None:
                with flat.passing(before):
                    x = flat.run(x, data[index], anchor, reduce)
            else:
                x = flat.run(x, data[index], anchor, reduce)
        if reshard:
            flats[-2].begin()  # the last one has stayed
        (x / n).backward()
        for flat in reversed(flats):
            flat.adamw(reduced(flat))
        finish(flats, reduce)
        return x.detach()

    return inside(mesh, step)


def finish(flats: list[Flat], reduce: Reducer) -> None:
    """Let go of the gradients."""
    reduce.busy.clear()
    for flat in flats:
        flat.gradient = None


def inside(mesh: fs.Mesh, step: Step) -> Step:
    """Make a step that calls collectives: they need to know their device."""
    return lambda index: fs.run(step, index, mesh=mesh)[0]


def mesh_index(mesh: fs.Mesh) -> int:
    return fs.run(lambda: fs.axis_index("data"), mesh=mesh)[0]


# -- fshard --------------------------------------------------------------------------------------------------------


def fshard(stage: int, options: dict[str, Any], model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """What a user writes."""
    rules = fs.fsdp("data") if stage == 3 else P()
    params = fs.shard_params(model.init(SEED), rules, mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(RATE), mesh=mesh, axis="data", stage=stage)
    state = opt.init(params)
    train = fs.train_step(model.loss, opt, mesh=mesh, batch=P("data"), donate=True, **options)
    layout = fs.Layout(mesh, P("data"))
    batches = [{name: fs.from_local(x, layout) for name, x in batch.items()} for batch in data]

    def step(index: int) -> Tensor:
        nonlocal params, state
        params, state, metrics = train(params, state, batches[index])
        return metrics["loss"]

    return step


# -- others, where they are installed --------------------------------------------------------------------------------


def deepspeed(stage: int, model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """DeepSpeed over the same gloo group, with torch's fused AdamW."""
    import deepspeed as ds

    module = Module(model, SEED)
    config = {
        "train_micro_batch_size_per_gpu": len(data[0]["inputs"]),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # else 1.0
    }
    optimizer = AdamW(module.parameters(), lr=RATE, fused=True)
    engine, *_ = ds.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)

    def step(index: int) -> Tensor:
        loss = engine(data[index])
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def jax_devices(sharded: bool, model: Model, data: list[Batch], mesh: fs.Mesh) -> Step:
    """JAX with a host device for each process, all in process 0 (the others wait): data parallel, or sharded at rest."""
    n = mesh.size
    if dist.get_rank() > 0:
        return lambda index: torch.full((), torch.nan)
    flags = f"--xla_force_host_platform_device_count={n} --xla_cpu_multi_thread_eigen=false"
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    import jax
    import jax.numpy as jnp

    devices = jax.sharding.Mesh(jax.devices(), ("data",))

    def put(x: Tensor, axis: str | None) -> Any:
        even = axis is not None and x.shape[0] % n == 0
        spec = jax.sharding.PartitionSpec(axis) if even else jax.sharding.PartitionSpec()
        return jax.device_put(x.numpy(), jax.sharding.NamedSharding(devices, spec))

    whole = [[model.batch(index, process) for process in range(n)] for index in range(len(data))]
    batches = [
        {name: put(torch.cat([one[name] for one in parts]), "data") for name in parts[0]} for parts in whole
    ]  # all processes' parts, one after the other
    params = {name: put(x, "data" if sharded else None) for name, x in model.init(SEED).items()}
    first, second = jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)
    layouts = jax.tree.map(lambda x: x.sharding, (params, first, second))

    def train(params: Any, first: Any, second: Any, count: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(model.loss_in_jax)(params, batch)
        first = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, first, gradient)
        second = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, second, gradient)

        def move(p: Any, m: Any, v: Any) -> Any:
            root = jnp.sqrt(v / (1 - BETAS[1] ** count)) + EPSILON
            return p * (1 - RATE * DECAY) - RATE / (1 - BETAS[0] ** count) * m / root

        moved = jax.tree.map(move, params, first, second)
        return *jax.lax.with_sharding_constraint((moved, first, second), layouts), value

    compiled = jax.jit(train, donate_argnums=(0, 1, 2))
    state, count = (params, first, second), 0

    def step(index: int) -> Tensor:
        nonlocal state, count
        count += 1
        *state, value = jax.block_until_ready(compiled(*state, float(count), batches[index]))
        return torch.tensor(float(value))

    return step


# -- the variants --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """How it is made, what it is held to, and the bytes that ZeRO's formula gives it per parameter on n processes."""

    make: Make
    formula: Callable[[int], float]
    peer: str | None = None
    floor: str | None = None
    needs: str | None = None  # a package, or "train_step"
    alone: bool = False  # it trains on one process's data only, so its loss is another


def replicated(n: int) -> float:
    return 16  # parameter, gradient and AdamW's two moments, in float32


def stage_1(n: int) -> float:
    return 8 + 8 / n


def stage_2(n: int) -> float:
    return 4 + 12 / n


def stage_3(n: int) -> float:
    return 16 / n


VARIANTS = {
    "no communication": Variant(local, replicated, alone=True),
    "ddp": Variant(ddp, replicated),
    "ddp + zero optimizer": Variant(ddp_zero, stage_1),
    "fully_shard": Variant(partial(fsdp, True), stage_3),
    "fully_shard keep": Variant(partial(fsdp, False), stage_2),
    "floor 0": Variant(floor_0, replicated, "ddp"),
    "floor 2": Variant(floor_2, stage_2, "ddp + zero optimizer"),
    "floor 3": Variant(partial(floor_3, True), stage_3, "fully_shard"),
    "floor 3 keep": Variant(partial(floor_3, False), stage_2, "fully_shard keep"),
    "fshard 0": Variant(partial(fshard, 0, {}), replicated, "ddp", "floor 0", "train_step"),
    "fshard 1": Variant(partial(fshard, 1, {}), stage_1, "ddp + zero optimizer", "floor 2", "train_step"),
    "fshard 2": Variant(partial(fshard, 2, {}), stage_2, "ddp + zero optimizer", "floor 2", "train_step"),
    "fshard 3": Variant(partial(fshard, 3, {}), stage_3, "fully_shard", "floor 3", "train_step"),
    "fshard 3 keep": Variant(
        partial(fshard, 3, {"reshard_after_forward": False}), stage_2, "fully_shard keep", "floor 3 keep", "train_step"
    ),
    "deepspeed 1": Variant(partial(deepspeed, 1), stage_1, "ddp + zero optimizer", needs="deepspeed"),
    "deepspeed 2": Variant(partial(deepspeed, 2), stage_2, "ddp + zero optimizer", needs="deepspeed"),
    "deepspeed 3": Variant(partial(deepspeed, 3), stage_3, "fully_shard", needs="deepspeed"),
    "jax replicated": Variant(partial(jax_devices, False), replicated, "ddp", needs="jax"),
    "jax sharded": Variant(partial(jax_devices, True), stage_3, "fully_shard", needs="jax"),
}


def is_here(variant: Variant) -> bool:
    if variant.needs == "train_step":
        return hasattr(fs, "train_step")
    return variant.needs is None or importlib.util.find_spec(variant.needs) is not None


def chosen_of(console: Console, only: list[str]) -> list[str]:
    """Return the names of the variants to run, and say which are not here."""
    names = [name for name in VARIANTS if not only or name.startswith(tuple(only))]
    missing = {VARIANTS[name].needs for name in names if not is_here(VARIANTS[name])}
    for needs in sorted(filter(None, missing)):
        which = ", ".join(name for name in names if VARIANTS[name].needs == needs)
        why = "fs.train_step does not exist yet" if needs == "train_step" else f"{needs} is not installed"
        console.print(f"left out: {which} ({why})")
    return [name for name in names if is_here(VARIANTS[name])]


# -- time and bytes ------------------------------------------------------------------------------------------------


class Wire(TorchDispatchMode):
    """Counts what torch's own collectives send from each process, by the textbook, as fs.ledger does for ours."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.bytes = n, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.bytes += self._sent(func.__name__, args)
        return func(*args, **(kwargs or {}))

    def _sent(self, name: str, args: Any) -> float:
        size = max((_size(arg) for arg in args[:2]), default=0)  # of the whole, whether it is given or got
        if name.startswith("barrier"):
            return 0
        return size * (2 if name.startswith("allreduce") else 1) * (self.n - 1) / self.n


def _size(arg: Any) -> int:
    if isinstance(arg, list | tuple):
        return sum(map(_size, arg))
    return arg.nbytes if isinstance(arg, Tensor) else 0


class Found(NamedTuple):
    """What was measured of one variant."""

    times: list[float]
    loss: float
    sent: float


def mesh_and_data(model: Model) -> tuple[fs.Mesh, list[Batch]]:
    mesh = fs.make_mesh({"data": int(os.environ["WORLD_SIZE"])}, device="cpu")
    return mesh, [model.batch(index, dist.get_rank()) for index in range(BATCHES)]


def timed_process(workload: str, names: list[str], rounds: int) -> dict[str, Found]:
    """Run in every process: all variants in turn, round after round; all processes begin each step together."""
    model = WORKLOADS[workload]
    mesh, data = mesh_and_data(model)
    steps = {name: VARIANTS[name].make(model, data, mesh) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(WARM_UP + rounds):
        order = random.Random(index).sample(names, len(names))  # the same in every process
        gc.collect()
        for name in order:
            dist.barrier()
            began = time.perf_counter()
            steps[name](index % BATCHES)
            times[name].append(time.perf_counter() - began)
    flat = torch.tensor([times[name][WARM_UP:] for name in names])
    dist.all_reduce(flat, dist.ReduceOp.MAX)
    found: dict[str, Found] = {}
    for name, row in zip(names, flat, strict=True):
        with Wire(mesh.size) as wire, fs.ledger() as comm:
            loss = float(steps[name]((WARM_UP + rounds) % BATCHES))
        losses: list[Any] = [None] * mesh.size
        dist.all_gather_object(losses, loss)
        known = [one for one in losses if one == one]  # not NaN: JAX has but one for all
        found[name] = Found(row.tolist(), statistics.mean(known), float(comm.bytes()) or wire.bytes)
    return found


def timed(console: Console, workload: str, n: int, rounds: int, names: list[str], variables: dict[str, str]) -> None:
    """Print how long a step takes, against a peer and a floor, and whether all train the same."""
    found = run_processes(timed_process, n, workload, names, rounds, environment=variables, timeout=3600)[0]
    middle = {name: statistics.median(one.times) for name, one in found.items()}

    def ratio(name: str, other: str | None) -> str:
        return f"{middle[name] / middle[other]:.2f}" if other in middle else ""

    links = "gloo" if variables else "direct links"
    title = f"{workload}: {n} processes, {rounds} rounds, ours by {links}"
    table = Table("variant", "ms", "x ddp", "x peer", "peer", "x floor", "MB sent", "loss", title=title)
    for name, one in found.items():
        variant = VARIANTS[name]
        sent = f"{one.sent / 1e6:.1f}" if variant.needs != "jax" else ""
        table.add_row(
            name,
            f"{middle[name] * 1e3:.1f}",
            ratio(name, "ddp"),
            ratio(name, variant.peer),
            (variant.peer or "") if variant.peer in middle else "",
            ratio(name, variant.floor),
            sent,
            f"{one.loss:.6f}{' (own data)' if variant.alone else ''}",
        )
    console.print(table)
    losses = {name: one.loss for name, one in found.items() if not VARIANTS[name].alone}
    expected = statistics.median(losses.values()) if losses else 0.0
    wrong = [name for name, loss in losses.items() if not abs(loss - expected) <= TOLERANCE * abs(expected)]
    if wrong:
        raise AssertionError(f"{workload}: {', '.join(wrong)} did not train what the others did: {losses}")


# -- memory --------------------------------------------------------------------------------------------------------


def memory_process(workload: str, name: str) -> int:
    """Run in every process: return the peak of resident memory in a step, in bytes more than before the model."""
    model = WORKLOADS[workload]
    mesh, data = mesh_and_data(model)
    fs.run(lambda: fs.psum(torch.ones(1), "data"), mesh=mesh)
    gc.collect()
    before = _resident("VmRSS")
    step = VARIANTS[name].make(model, data, mesh)
    step(0)  # makes the optimizer's state
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for index in range(1, BATCHES):
        step(index)
    return _resident("VmHWM") - before


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024


def memory(console: Console, n: int, names: list[str], variables: dict[str, str]) -> None:
    """Print the peak memory of each variant, in processes of its own, against ZeRO's formula."""
    # The C library is told to give memory back, else the peak is that of its caches; it asks only when it starts.
    os.environ.update(MALLOC_MMAP_THRESHOLD_=str(MIB), MALLOC_ARENA_MAX="2")
    for workload, model in WORKLOADS.items():
        count = sum(leaf.numel() for leaf in model.init(SEED).values())
        console.print(f"{workload}: {count / 1e6:.1f} M parameters, peak MiB per process, {n} processes")
        table = Table("variant", "peak", "formula", "beyond it")
        for name in names:
            if VARIANTS[name].needs == "jax":
                continue  # all its devices are in one process
            peaks = run_processes(memory_process, n, workload, name, environment=variables, timeout=600)
            peak, formula = max(peaks) / MIB, VARIANTS[name].formula(n) * count / MIB
            table.add_row(name, f"{peak:.0f}", f"{formula:.0f}", f"{peak - formula:+.0f}")
        console.print(table)
    for variable in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX"):
        del os.environ[variable]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = [*WORKLOADS, "memory"]
    parser.add_argument("parts", nargs="*", default=parts)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=[], help="variants whose names begin like one of these")
    parser.add_argument("--gloo", action="store_true", help="ours over gloo too, not by direct links")
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - set(parts):
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(parts)}")
    console = Console(width=120)
    names = chosen_of(console, chosen.only)
    variables = {"FSHARD_DIRECT": "0"} if chosen.gloo else {}
    for each in chosen.parts:
        if each == "memory":
            memory(console, chosen.processes, names, variables)
        else:
            timed(console, each, chosen.processes, chosen.rounds, names, variables)


if __name__ == "__main__":
    main()
