"""Operations of a ZeRO-3 step, ours and `fully_shard`'s: each is a kernel on a GPU.

    python benchmarks/kernels.py                 a table, on a CPU, of one process that plays 8 ranks

A step in bf16 with float32 masters trains six blocks of twelve parameters. Counted are torch's
operations, views left out: first those of the same step on one device, then what each adds to it.
Ours runs over an echo group, in which all ranks have this process's data; `fully_shard` over
torch's fake group. Neither's communication is an operation here; its calls are counted apart.

    own          operations of the step on one device: forward, backward, casts, AdamW
    added        operations that sharding adds, by block
    gathers      all-gathers of a step
    clipping     operations that clipping by the global norm adds to the step
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # the echo group is one of the tests

import fshard as fs
from fshard import P
from tests.mesh.runtimes import echo

BLOCKS = 6
WIDTH = 16
RANKS = 8
WARM = 3
"""Steps before the one that is counted: the first of ours records the order of units."""


class Block(nn.Module):
    """Six layers with weight and bias: twelve parameters, as a transformer's block has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states after the block."""
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return x + y


class Model(nn.Module):
    """Blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of a batch."""
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


NO_KERNELS = ("empty", "new_empty", "_unsafe_view", "promote_types", "_local_scalar_dense")
"""Operations that are no views for torch and launch nothing, or copy one number to the host."""


class Operations(TorchDispatchMode):
    """Counts operations of torch by name, but for views and what launches no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        launches_kernel = not func.is_view and not name.startswith(NO_KERNELS)
        if launches_kernel and func.namespace != "profiler":
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


Step = Callable[[], object]


class Count(NamedTuple):
    """The operations of a step, and its all-gathers."""

    operations: Counter[str]
    gathers: int

    @property
    def total(self) -> int:
        """The number of operations."""
        return self.operations.total()


def counted(step: Step) -> Counter[str]:
    """Return the operations of a step that is not the first."""
    for _ in range(WARM):
        step()
    with Operations() as operations:
        step()
    return operations.counts


def batch() -> Tensor:
    """Return the samples of one rank."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def seeded_model() -> Model:
    """Return the model with its first parameters."""
    torch.manual_seed(0)
    return Model()


# -- the steps -------------------------------------------------------------------------------------


def on_one_device() -> Counter[str]:
    """Count the step on one device: copies of the parameters in bf16 compute."""
    model = seeded_model()
    masters = [*model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    names = [name for name, _ in model.named_parameters()]
    x = batch().bfloat16()

    def step() -> None:
        copies = [master.detach().bfloat16().requires_grad_() for master in masters]
        loss = torch.func.functional_call(model, dict(zip(names, copies, strict=True)), (x,))
        gradients = torch.autograd.grad(loss, copies)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.float()
        optimizer.step()
        optimizer.zero_grad()

    operations = counted(step)
    # The casts are what sharding does with its shards: they are no part of the model's own.
    operations["_to_copy"] -= 2 * len(masters)
    return +operations


def by_fully_shard(max_norm: float | None = None) -> Count:
    """Count the step of `fully_shard` over torch's fake group."""
    with fake_ranks():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        model = seeded_model()
        mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        x = batch()

        def step() -> None:
            model(x).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()

        operations = counted(step)
    return _without_collectives(operations)


def by_fshard(max_norm: float | None = None) -> Count:
    """Count our step over an echo group."""
    with echoing_ranks():
        mesh = fs.make_mesh({"data": RANKS})
        apply, params, buffers = fs.functionalize(seeded_model())
        rule = fs.optim.adamw(1e-3)
        if max_norm is not None:
            rule = fs.optim.chain(fs.optim.clip_by_global_norm(max_norm), rule)
        opt = fs.partition_optimizer(rule, mesh=mesh, axis="data", stage=3)
        params = fs.shard_params(params, fs.fsdp("data", unit="blocks.*"), mesh=mesh)
        state = opt.init(params)
        x = fs.from_local(batch(), fs.Layout(mesh, P("data")))

        def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
            loss, _ = apply(params, buffers, x)
            return loss

        train = fs.train_step(
            loss_fn, opt, mesh=mesh, batch=P("data"), donate=True, precision="bf16"
        )

        def step() -> None:
            nonlocal params, state
            echo.forget()
            params, state, _ = train(params, state, x)

        operations = counted(step)
        gathers = [work for work in echo.works if work.name == "all_gather"]
    return Count(operations, len(gathers))


@contextmanager
def echoing_ranks() -> Iterator[None]:
    """Make this process play all ranks.

    Each of them has the inputs of the first, whose hashes would not cancel out: so they are 0.
    """
    with patch("fshard.transforms.agreement.hash_of", lambda value: 0), echo.echoing(RANKS):
        yield


@contextmanager
def fake_ranks() -> Iterator[None]:
    """Make this process rank 0 of many whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _without_collectives(operations: Counter[str]) -> Count:
    """Take the collectives of torch, which are operations too, out of a count."""
    gathers = 0
    kernels = Counter[str]()
    for name, count in operations.items():
        if name in ("_allgather_base_", "allgather_into_tensor_coalesced_"):
            gathers += count
        elif not name.endswith("_base_") and "allreduce" not in name and name != "wait_tensor":
            kernels[name] += count
    return Count(kernels, gathers)


# -- the table -------------------------------------------------------------------------------------


def rows() -> dict[str, dict[str, float]]:
    """Return the numbers of both by the name of the column."""
    own = on_one_device().total()
    table = dict[str, dict[str, float]]()
    for name, count in (("fshard", by_fshard), ("fully_shard", by_fully_shard)):
        plain = count()
        clipped = count(1.0)
        table[name] = {
            "own": own,
            "added by block": (plain.total - own) / BLOCKS,
            "gathers": plain.gathers,
            "clipping": clipped.total - plain.total,
        }
    return table


def main() -> None:
    """Print the table, and the operations of both by name."""
    table = Table("", "own", "added by block", "gathers", "clipping")
    for name, row in rows().items():
        table.add_row(name, *[f"{value:.0f}" for value in row.values()])
    console = Console()
    console.print(table)
    for name, count in (("fshard", by_fshard()), ("fully_shard", by_fully_shard())):
        counts = ", ".join(f"{op} {number}" for op, number in count.operations.most_common())
        console.print(f"{name}: {counts}", markup=False)


if __name__ == "__main__":
    main()
