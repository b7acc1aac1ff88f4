"""`certify`: does a program train sharded as on one device? If not, what is the likely reason?

Three runs are made: sharded, serial, and serial in float64, which measures the effect of rounding alone. Gradients and
parameters are compared after every step, on every device, leaf by leaf:

    EXACT          the bits of the serial run
    BOUNDED        as near to float64 as four times the serial run is (see `bounds`)
    DIVERGENT      neither; then the first of these that fits is the reason:
                     a constant times too large      summed where it should be averaged, or vice versa
                     the summand of one device       a reduction over an axis is missing
                     losses that differ              it is missing inside the loss function, over an axis of the model
                     a gradient that is right        the optimizer: is it elementwise?
    INCONCLUSIVE   the bound is so large that it would allow anything

In reproducible mode bits are promised: nothing is BOUNDED, and the serial run is one on a mesh of one device.

    runs ─> bounds ─> certificate          shards: comparisons of shards with full tensors
               └─ reasons                  modules, elementwise: the same for modules and for optimizers alone
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

import fshard as fs
from fshard.errors import LayoutError
from fshard.mesh.layout import Mesh, P, PyTree, flatten_with_paths
from fshard.mesh.layout.sharded import Sharded
from fshard.optim.contract import Optimizer
from fshard.optim.leaves import Leaf, Leaves
from fshard.optim.partition import Partitioned
from fshard.optim.per_device import on_arrays
from fshard.testing.certify.bounds import Comparison, Reference, bounded, equal_bits, judge
from fshard.testing.certify.certificate import Certificate, CertificateRow
from fshard.testing.certify.elementwise import check_elementwise
from fshard.testing.certify.modules import certify_module
from fshard.testing.certify.reasons import Reasons
from fshard.testing.certify.runs import (
    CertifyTask,
    RandomDraws,
    Snapshot,
    Units,
    check_repeatable,
    largest_summands,
    nonfinite_parts,
    serial_run,
    sharded_run,
)
from fshard.testing.certify.shards import is_floating, keep_frozen
from fshard.transforms.patterns import named, parts_of

__all__ = ["Certificate", "CertificateRow", "certify", "certify_module", "check_elementwise", "dyadic_like"]


def certify(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    opt: Optimizer,
    mesh: Mesh,
    *,
    axis: str | tuple[str, ...] = "data",
    unit: Units = None,
    batch_spec: PyTree = P("data"),
    buffers: PyTree = None,
    stages: Sequence[Literal[0, 1, 2, 3]] = (0, 1, 2, 3),
    steps: int = 3,
    exact_inputs: bool = False,
    seed: int = 0,
    **options: Any,
) -> Certificate:
    """Train a few steps on a mesh and on one device; compare every leaf and explain differences.

    Communicates as `train_step` does. On a process mesh it is a collective of all processes, with one verdict.

    A loss function that draws random numbers (dropout) needs `reproducible=True`, and is compared with a mesh of one
    device: otherwise each device draws its own, and no serial run draws the same.

    Args:
        loss_fn: an ordinary function of one device: see `value_and_grad`. In the serial run its collectives have axes of
            size 1.
        params: full tensors.
        batch: full tensors; every step has the same.
        opt: an optimizer, not partitioned.
        mesh: the devices.
        axis: over which parameters (stage 3) and the optimizer (1 to 3) are sharded.
        unit: the units of stage 3: see `fsdp`.
        batch_spec: the spec of the batch.
        buffers: full tensors that the loss function takes and returns, if it `has_buffers`; they are compared too.
        stages: of ZeRO.
        steps: number of steps.
        exact_inputs: replace parameters and the floats of the batch by small dyadic rationals: see `dyadic_like`.
        seed: of all random draws.
        options: those of `train_step`: accumulate, weight, has_aux, precision, reproducible, ...

    Raises a PromiseError if a repeated call of the loss function or the optimizer differs.

    >>> import torch, fshard as fs
    >>> mesh, params, x = fs.make_mesh({"data": 2}), {"w": torch.ones(3)}, torch.randn(4, 3)
    >>> def loss_fn(params, x):
    ...     return (params["w"] * x).sum(1).mean()
    >>> def mistaken(params, x):
    ...     return loss_fn(params, x) * fs.axis_size("data")
    >>> certificate = certify(loss_fn, params, x, fs.optim.sgd(0.5), mesh=mesh, exact_inputs=True)
    >>> [(row.stage, row.leaf, row.verdict) for row in certificate.check().rows]
    [(0, 'w', 'EXACT'), (1, 'w', 'EXACT'), (2, 'w', 'EXACT'), (3, 'w', 'EXACT')]
    >>> print(certify(mistaken, params, x, fs.optim.sgd(0.5), mesh=mesh, stages=[3]).first.reason)
    step 0: the gradient is 2 times too large: summed over "data" where it should be averaged
    """
    if mesh.runtime == "abstract" or steps < 1:
        raise LayoutError(f"certify: mesh must have values, and steps must be at least 1; got {mesh}, {steps=}.")
    opt = on_arrays(opt, "certify")
    _refuse_sharded(opt, params=params, batch=batch, buffers=buffers)
    if bool(options.get("has_buffers", buffers is not None)) != (buffers is not None):
        raise LayoutError("certify: a loss function that has_buffers is given them by buffers=, and none else is.")
    options["has_buffers"] = buffers is not None
    if exact_inputs:
        params, batch = dyadic_like(params, seed), dyadic_like(batch, seed + 1)
    one = Mesh(tuple((name, 1) for name in mesh.axis_names), "virtual", mesh.device_type)
    task = CertifyTask(loss_fn, params, buffers, batch, opt, one, axis, unit, batch_spec, steps, seed, options)
    task = task.mapped(lambda x: x.to(mesh.device_type) if isinstance(x, Tensor) else x)
    reference, rows = _reference(task, mesh), list[CertificateRow]()
    for stage in stages:
        rows += _judge_stage(task, mesh, stage, reference)
    return Certificate(mesh, steps, task.reproducible, tuple(rows))


def _judge_stage(task: CertifyTask, mesh: Mesh, stage: int, reference: Reference) -> list[CertificateRow]:
    with _note(f"in stage {stage}"):
        comparison = Comparison(reference, sharded_run(task, mesh, stage))
    paths = Leaves.of(task.buffers).paths if task.has_buffers else []
    buffers = [f"buffers.{named(parts_of(path))}".rstrip(".") for path in paths]
    return judge(comparison, stage, task.names, buffers, lambda step: Reasons(task, mesh, stage, comparison, step).of)


def _reference(task: CertifyTask, mesh: Mesh) -> Reference:
    """Train on one device, and in float64 for the bounds; raise if the program does not do the same again."""
    start = Snapshot.of([], task.params, task.buffers)
    if task.reproducible:
        serial = [snapshot.mapped(fs.unshard) for snapshot in sharded_run(task, task.one, 0)]
        return equal_bits(start, serial)
    draws = RandomDraws()
    serial = serial_run(task, draws.record())
    check_repeatable("certify", serial, serial_run(task, key="again"), _CURES)
    with _note("in the run on one device in float64: does the loss function name a dtype?"):
        exact = serial_run(task.widened(), draws.repeat(), shifts=nonfinite_parts(serial))
        summands = largest_summands(task.widened(), mesh, exact)

    def perturbed_run(sign: int, shifts: list[list[Leaf]]) -> list[Snapshot]:
        return serial_run(task.perturbed(sign), draws.repeat(), shifts=shifts)

    return bounded(start, serial, exact, summands, perturbed_run, task.compute)


_LOSS = (
    "The loss function draws random numbers or counts its calls. For dropout call certify(..., reproducible=True), which "
    "compares with a mesh of one device."
)
_CURES = {
    "grads": _LOSS,
    "buffers": _LOSS,
    "params": "The optimizer draws random numbers or counts its calls. Keep in its state what it counts.",
}


def dyadic_like(tree: PyTree, seed: int) -> PyTree:
    """Replace all floating tensors of a tree by random multiples of 1/8 from -1 to 1; other leaves and ties are
    unchanged.

    Sums of 8,000,000 of them, and of 250,000 products of two, are exact in float32 in any order. So linear functions
    have the same bits in any layout.

    >>> import torch
    >>> drawn = dyadic_like({"w": torch.ones(2, 3), "count": torch.tensor(3)}, seed=0)
    >>> drawn["w"], drawn["count"]
    (tensor([[-0.1250, -0.6250,  0.5000],
            [ 1.0000, -0.7500, -1.0000]]), tensor(3))
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(x: Any) -> Any:
        if not is_floating(x):
            return x
        real = torch.view_as_real(x) if x.is_complex() else x
        numbers = (torch.randint(-8, 9, real.shape, generator=generator) / 8).to(real)
        return keep_frozen(x, torch.view_as_complex(numbers) if x.is_complex() else numbers)

    return Leaves.of(tree).mapped(draw)


def _refuse_sharded(opt: Optimizer, **trees: PyTree) -> None:
    """Raise if anything is sharded already, naming all of it."""
    wrong = [
        name + path
        for name, tree in trees.items()
        for path, leaf in zip(*flatten_with_paths(tree, sharded_is_leaf=True)[:2], strict=True)
        if isinstance(leaf, Sharded)
    ]
    wrong += ["the optimizer"] if isinstance(opt, Partitioned) else []
    if wrong:
        raise LayoutError(
            f"certify: full tensors and an optimizer that is not partitioned are needed; {', '.join(wrong)} "
            f"{'is' if len(wrong) == 1 else 'are'} sharded already. Give what was there before fs.device_put, fs.shard_params "
            "and fs.partition_optimizer: certify shards for every stage."
        )


@contextmanager
def _note(where: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"certify: {where}")
        raise
