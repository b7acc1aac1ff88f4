"""`certify_program`: a program in the processes of meshes, and in one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from math import prod
from typing import Any

import torch
from torch import Tensor

from fshard.errors import PromiseError
from fshard.launching.pool import Processes
from fshard.rounding import TOLERANCES
from fshard.testing.certificate import Certificate, CertificateRow
from fshard.testing.programs.batches import Axes, joined_batches
from fshard.testing.programs.compare import judge_ranks, mesh_text, notes_on
from fshard.testing.programs.layouts import Parts
from fshard.testing.programs.microbatches import rows_of_microbatches
from fshard.testing.programs.record import Program, RankRecord, batches_alone, record

UNSEEN = (
    "It does not see: other batches and later steps, buffers such as BatchNorm's, random draws, an "
    "error that one process makes too, and processes that load equal batches along an axis, which "
    "count as one."
)

SECOND_OF_ONE = -1
"""The key of a second pool of one process, which runs beside the first."""

PRELOADED = (
    "fshard.testing.programs.record",
    "torch.distributed.fsdp",
    # Any optimizer of torch imports it.
    "torch._dynamo",
)
"""The modules that most programs import, which takes longer than all else in a process."""


def certify_program(
    program: Program,
    meshes: Axes | Sequence[Axes],
    *,
    steps: int = 3,
    dtype: torch.dtype | None = None,
    splits: Mapping[str, int] | None = None,
    parts: Parts | None = None,
    same: Sequence[str] = (),
    timeout: float = 60.0,
    processes: dict[int, Processes] | None = None,
) -> Certificate:
    """Train a program of torch.distributed in gloo processes and in one, and compare the runs.

    Losses, gradients before `step()`, those that optimizers of torch are given, and parameters are
    compared.

    Args:
        program: `program(rank, world) -> (model, loss, batch, step)`, at the top level of a module.
            `world` is the number of processes, `world.mesh` torch's DeviceMesh with the axes of the
            mesh; the process group is there already. `model` is a module, wrapped and sharded in
            any way, or a dict of parameters; `batch` the rows of this process, or a loader, of
            which each step takes a batch; `loss(model, batch)` returns the loss, of which the
            gradient is taken, unless it has called backward itself (or a dict with "loss", an
            object with `.loss`, a tuple with the loss first); `step()` updates the parameters and
            sets gradients to zero. It must seed its generators.
        meshes: axes and sizes, such as {"data": 2, "model": 2}; one or several.
        steps: number of steps, each with the same batch unless there is a loader.
        dtype: the lowest one that tensors may be sent and reduced in. What activations are computed
            in, as by a mixed precision policy, is seen and need not be declared.
        splits: the dim of batches that is split along an axis, such as {"context": 1}. It is 0 for
            other axes, and none need be given if the program's batch in one process has the
            elements of all.
        parts: the rows of each part of a parameter, of which each is divided along an axis, by
            patterns of names: {"layers.*.qkv.bias": (64, 16, 16)}. Parts that have
            different values before the first step are found.
        same: the axes along which batches are equal by intent, though their names, such as data,
            are those of axes along which each rank reads other rows.
        timeout: seconds that the processes of a mesh may take.
        processes: pools by size, to use for several calls; the caller closes them.

    The run is in float64: what a program computes in float32 is float64 too.

    Processes whose batches are equal along an axis count as one: such an axis shards the model. The
    batches along other axes are put together in the order of the ranks, for the one process. A
    parameter that is a plain tensor with a shard of one or two dims is compared with the same
    elements.

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
    is_dtype = dtype is None or dtype in TOLERANCES
    if not meshes or steps < 1 or not is_dtype:
        names = ", ".join([str(dtype) for dtype in TOLERANCES])
        raise ValueError(
            f"certify_program: a mesh, steps >= 1 and a dtype of {names} are needed; got {meshes}, "
            f"{steps=}, {dtype=}."
        )

    validate_axes("certify_program", meshes, splits or {}, same)
    _validate_picklable(program)

    rows: list[CertificateRow] = []
    notes: list[str] = []
    with ExitStack() as stack:
        pools = _Pools(stack, timeout, processes)
        for axes in meshes:
            ranks, single = _runs(pools, program, axes, steps, splits or {})
            judged = judge_ranks(axes, ranks, single, dtype, parts, same)
            rows += rows_of_microbatches(mesh_text(axes), ranks, single, judged)
            for note in notes_on(axes, ranks, single, dtype):
                prefix = f"{mesh_text(axes)}: " if len(meshes) > 1 else ""
                notes.append(prefix + note)
    title = "processes against one process"
    return Certificate(tuple(rows), steps, title, UNSEEN, "mesh", tuple(notes))


def validate_axes(
    name: str, meshes: Sequence[Axes], splits: Mapping[str, int], same: Sequence[str]
) -> None:
    """Raise unless `splits` and `same` are of axes of the meshes."""
    names = {axis for axes in meshes for axis in axes}
    known = ", ".join(sorted(names))
    for axis, dim in splits.items():
        if axis not in names or dim < 0:
            raise ValueError(
                f"{name}: splits must be dims from 0 by axes of the mesh; got {axis}={dim}, and "
                f"axes {known}."
            )
    for axis in same:
        if axis not in names:
            raise ValueError(
                f"{name}: same must be axes of the mesh; got {axis!r}, and axes {known}."
            )


def _validate_picklable(program: Program) -> None:
    """Raise unless other processes can import a program."""
    try:
        pickle.dumps(program)
    except (pickle.PicklingError, AttributeError, TypeError):
        name = repr(program)
        raise TypeError(
            "certify_program: a program must be a function at the top of a file, which other "
            f"processes import; got {name}. Move it there; functools.partial gives it arguments."
        ) from None


class _Pools:
    """Processes by number, started at their first use.

    They end with the stack unless they are given.
    """

    def __init__(
        self, stack: ExitStack, timeout: float, given: dict[int, Processes] | None
    ) -> None:
        self._stack = stack
        self._timeout = timeout
        self._is_given = given is not None
        self._pools = {} if given is None else given
        self._threads = stack.enter_context(ThreadPoolExecutor(3))

    def start(self, n: int, fn: Callable[..., Any], *args: Any) -> Future[list[Any]]:
        """Run a function in n processes, beside what the caller does."""
        if n not in self._pools:
            pool = Processes(max(n, 1), timeout=self._timeout, preload=PRELOADED)
            if not self._is_given:
                self._stack.callback(pool.close)
            self._pools[n] = pool
        return self._threads.submit(self._pools[n].run, fn, *args)


def _runs(
    pools: _Pools, program: Program, axes: Axes, steps: int, splits: Mapping[str, int]
) -> tuple[list[RankRecord], RankRecord]:
    """Run a program in the processes of a mesh, and in one."""
    n = prod(axes.values())
    axes_of_one = dict.fromkeys(axes, 1)
    alone_begun = None
    if n > 1:
        alone_begun = pools.start(1, batches_alone, program, axes_of_one, steps, 2)
    ranks: list[RankRecord] = pools.start(n, record, program, axes, steps, 1).result()
    alone = None
    if alone_begun is not None:
        (alone,) = alone_begun.result()
    batches = joined_batches([rank.batches for rank in ranks], axes, splits, alone)

    # Twice, with other seeds, to see what the program draws without a seed of its own; and with
    # gradients that are set to zero, to see whether the program does it.
    first = pools.start(1, record, program, axes_of_one, steps, 2, batches)
    second = pools.start(SECOND_OF_ONE, record, program, axes_of_one, steps, 3, batches, True)
    (single,) = first.result()
    (repeated,) = second.result()
    _validate(ranks, single, repeated)
    return ranks, single


def _validate(ranks: Sequence[RankRecord], single: RankRecord, repeated: RankRecord) -> None:
    """Raise if a program draws what is not seeded, keeps gradients, or trains nothing."""
    unseeded = _different(single.start, repeated.start)
    if unseeded:
        raise PromiseError(
            f"certify_program: two runs must begin alike; got other values of "
            f"{', '.join(unseeded)}. Call torch.manual_seed(0) first in the program."
        )
    _validate_steps(single, repeated)

    has_gradient = any(x.any() for step in single.steps for x in step.grads.values())
    is_moved = any(
        _different(run.start, step.params) for run in (single, *ranks) for step in run.steps
    )
    if not single.start or not (has_gradient or is_moved):
        raise PromiseError(
            "certify_program: a program must train parameters; got none with a gradient in one "
            "process. Return a model whose parameters require grad, and a loss that uses them."
        )
    if not is_moved:
        raise PromiseError(
            "certify_program: step() must update parameters; got the same ones after "
            f"{len(single.steps)} steps{ranks[0].sync_hint}. Make the optimizer of parameters of the "
            "model that is returned, after it is sharded."
        )


def _validate_steps(single: RankRecord, repeated: RankRecord) -> None:
    """Raise if a run that has other seeds, and gradients set to zero before each step, differs."""
    for step, (first, second) in enumerate(zip(single.steps, repeated.steps, strict=True)):
        is_loss_equal = _is_same(first.loss, second.loss)
        other_grads = _different(first.grads, second.grads)
        other_params = _different(first.params, second.params)
        if step > 0 and is_loss_equal and other_grads:
            raise PromiseError(
                f"certify_program: gradients must be 0 when a step begins; got those of step "
                f"{step - 1} added to those of step {step} in {', '.join(other_grads)}. Let step() "
                "set gradients to zero, as by opt.zero_grad()."
            )
        if not is_loss_equal or other_grads:
            raise PromiseError(
                "certify_program: the loss draws random numbers, which no run in one process draws "
                "alike. Set dropout to 0."
            )
        if other_params:
            raise PromiseError(
                "certify_program: step() must update alike when it is repeated; got other values "
                f"of {', '.join(other_params)} after step {step}. Seed what it draws."
            )


def _is_same(x: float | None, y: float | None) -> bool:
    are_nan = x is not None and y is not None and x != x and y != y
    return x == y or are_nan


def _different(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ."""
    names: list[str] = []
    for name in {**tensors, **others}:
        x = tensors.get(name)
        y = others.get(name)
        # No gradient is one of 0.
        if x is None or y is None:
            x = y if x is None else x
            is_other = x is not None and bool(x.any())
        else:
            is_other = x.shape != y.shape or not torch.equal(x.nan_to_num(), y.nan_to_num())
        if is_other:
            names.append(name)
    return names
