"""`certify_program`: a program in the processes of meshes, and in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod

import torch

from fshard.errors import PromiseError
from fshard.launching.pool import Processes
from fshard.rounding import TOLERANCES
from fshard.testing.certificate import Certificate, CertificateRow
from fshard.testing.programs.compare import Axes, joined_batch, judge_ranks
from fshard.testing.programs.record import Program, RankRecord, record

UNSEEN = (
    "It does not see: other batches and later steps, buffers such as BatchNorm's, random draws, an "
    "error that one process makes too, and processes that load equal batches along an axis, which "
    "count as one."
)


def certify_program(
    program: Program,
    meshes: Axes | Sequence[Axes],
    *,
    steps: int = 3,
    dtype: torch.dtype = torch.float64,
    timeout: float = 60.0,
    processes: dict[int, Processes] | None = None,
) -> Certificate:
    """Train a program of torch.distributed in gloo processes and in one, and compare the runs.

    Losses, gradients before `step()` and parameters are compared.

    Args:
        program: `program(rank, world) -> (model, loss, batch, step)`, at the top level of a module.
            `world` is the number of processes, `world.mesh` torch's DeviceMesh with the axes of the
            mesh; the process group is there already. `model` is a module, wrapped and sharded in
            any way, or a dict of parameters; `batch` the rows of this process; `loss(model, batch)`
            returns the loss, of which the gradient is taken, unless it has called backward itself;
            `step()` updates the parameters and zeroes gradients. It must seed its generators.
        meshes: axes and sizes, such as {"data": 2, "model": 2}; one or several.
        steps: number of steps, each with the same batch.
        dtype: the lowest precision that the program computes or sends in. New tensors are float64
            during the run, so only what a program casts explicitly, as by a mixed precision policy,
            is lower.
        timeout: seconds that the processes of a mesh may take.
        processes: pools by size, to use for several calls; the caller closes them.

    Processes whose batches are equal along an axis count as one: such an axis shards the model. The
    batches along other axes are put together in the order of the ranks, for the one process. A
    parameter that is a plain tensor with a part of a dim is put together along an axis.

        def program(rank, world):
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.Linear(3, 1))
            opt = torch.optim.SGD(model.parameters(), 0.1)
            x = torch.randn(8, 3).chunk(world)[rank]

            def step():
                opt.step()
                opt.zero_grad()

            return model, lambda model, x: model(x).square().mean(), x, step

        print(fs.testing.certify_program(program, {"data": 4}))
    """
    meshes = [meshes] if isinstance(meshes, Mapping) else list(meshes)
    if not meshes or steps < 1 or dtype not in TOLERANCES:
        names = ", ".join([str(dtype) for dtype in TOLERANCES])
        raise ValueError(
            f"certify_program: a mesh, steps >= 1 and a dtype of {names} are needed; got {meshes}, "
            f"{steps=}, {dtype=}."
        )

    rows: list[CertificateRow] = []
    with ExitStack() as stack:
        pools = {} if processes is None else processes

        def pool_of(n: int) -> Processes:
            if n not in pools:
                pools[n] = Processes(n, timeout=timeout)
                if processes is None:
                    stack.enter_context(pools[n])
            return pools[n]

        for axes in meshes:
            pool = pool_of(prod(axes.values()))
            pool_of_one = pool_of(1)
            axes_of_one = dict.fromkeys(axes, 1)

            ranks = pool.run(record, program, axes, steps, 1)
            batch = joined_batch(ranks, axes)
            # Twice, with other seeds, to see what the program draws without a seed of its own.
            (single,) = pool_of_one.run(record, program, axes_of_one, steps, 2, batch)
            (repeated,) = pool_of_one.run(record, program, axes_of_one, steps, 3, batch)
            _validate(single, repeated)
            rows += judge_ranks(axes, ranks, single, dtype)
    return Certificate(tuple(rows), steps, "processes against one process", UNSEEN, "mesh")


def _validate(single: RankRecord, repeated: RankRecord) -> None:
    """Raise if a program draws what is not seeded, draws in its loss, or trains nothing."""
    unseeded: list[str] = []
    for name, x in single.start.items():
        if not torch.equal(x, repeated.start[name]):
            unseeded.append(name)
    if unseeded:
        raise PromiseError(
            f"certify_program: two runs must begin alike; got other values of "
            f"{', '.join(unseeded)}. Call torch.manual_seed(0) first in the program."
        )
    if single.losses != repeated.losses:
        raise PromiseError(
            "certify_program: the loss draws random numbers, which no run in one process draws "
            "alike. Set dropout to 0."
        )
    if not single.start or all(not grads for grads in single.grads):
        raise PromiseError(
            "certify_program: a program must train parameters; got none with a gradient in one "
            "process. Return a model whose parameters require grad, and a loss that uses them."
        )
