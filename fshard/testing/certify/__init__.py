"""`certify`: does a program, sharded, train as it does on one device?  And if not, what is the likely reason?

Both runs are made, and a third in float64 that says how far rounding alone leads.  Gradients and parameters are
compared after every step, on every device, leaf by leaf:

    EXACT       the bits of the run on one device
    BOUNDED     as near to float64 as four times the run on one device is (see `bounds_of`)
    DIVERGENT   neither; then the gradient of that step is looked at, in this order:
                  a psum in the loss function     with an average in its place it would be right; or the other way round
                  a constant times too large      summed where it should be averaged, or the other way round
                  what one device adds to it      a reduction over an axis is missing
                  losses that differ              it is missing inside the loss function, over an axis of the model
                  right                           then it is the optimizer: is it elementwise?

In reproducible mode bits are promised, so nothing is BOUNDED, and one device means a mesh of one.

    inputs ─> runs ─> comparison ─> judge ─> certificate        beside: what devices hold beside a whole tensor
                                      └─ reasons ─ again        elementwise: the same for optimizers alone
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.mesh import Mesh
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.tree import PyTree, flatten_with_paths
from fshard.optim.contract import Optimizer
from fshard.optim.leaves import Leaves
from fshard.optim.partition import Partitioned
from fshard.optim.plain import on_arrays
from fshard.testing.certify.certificate import Certificate, Row
from fshard.testing.certify.comparison import Comparison, bounds_of
from fshard.testing.certify.elementwise import check_elementwise
from fshard.testing.certify.inputs import dyadic
from fshard.testing.certify.judge import judged
from fshard.testing.certify.runs import Task, Units, on_mesh, on_one_device, overflows, refuse_random

__all__ = ["Certificate", "Row", "certify", "check_elementwise", "dyadic"]


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
    """Train a few steps on a mesh and on one device; say of every leaf whether it is the same, and if not, why.

    Communicates what `train_step` does.  On a process mesh every process calls it; all see what all hold, and come to
    one verdict.

    A loss function that draws random numbers (dropout) needs `reproducible=True`, and one device is then a mesh of one:
    otherwise each device draws its own, and no serial run draws what they draw.

    Args:
        loss_fn: an ordinary function of one device: see `value_and_grad`.  On one device the collectives in it go over
            axes of size 1.
        params: whole tensors.
        batch: whole tensors; every step has the same.
        opt: an optimizer, not partitioned.
        mesh: the devices.
        axis: over which parameters (stage 3) and the optimizer (1 to 3) are divided.
        unit: what parameters are gathered together in stage 3: see `fsdp`.
        batch_spec: how the batch is cut.
        buffers: whole tensors that the loss function takes and returns, if it `has_buffers`; they are judged too.
        stages: of ZeRO.
        steps: how many.
        exact_inputs: draw parameters and the floats of the batch anew, as small dyadic rationals: see `dyadic`.
        seed: of all that is random.
        options: those of `train_step`: accumulate, weight, has_aux, precision, reproducible, ...

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
        raise LayoutError(
            f"certify: it compares numbers, so it needs a mesh with values and steps; found {mesh}, {steps=}."
        )
    opt = on_arrays(opt, "certify")
    _refuse_laid_out(opt, params=params, batch=batch, buffers=buffers)
    if exact_inputs:
        params, batch = dyadic(params, seed), dyadic(batch, seed + 1)
    if bool(options.get("has_buffers", buffers is not None)) != (buffers is not None):
        raise LayoutError("certify: a loss function that has_buffers is given them by buffers=, and none else is.")
    options["has_buffers"] = buffers is not None
    params, buffers, batch = (Leaves.of(tree).mapped(lambda x: _on(mesh, x)) for tree in (params, buffers, batch))
    one = Mesh(tuple((name, 1) for name in mesh.axis_names), "virtual", mesh.device_type)
    task = Task(loss_fn, params, buffers, batch, opt, one, axis, unit, batch_spec, steps, seed, options)
    if task.reproducible:
        alone = exact = [turn.whole() for turn in on_mesh(task, one, 0)]
    else:
        refuse_random(task)
        alone = on_one_device(task)
        with _noting("in the run on one device in float64: does the loss function name a dtype?"):
            exact = on_one_device(task.wide(), overflows(alone))
    bounds, rows = bounds_of(task, mesh, alone, exact), list[Row]()
    for stage in stages:
        with _noting(f"in stage {stage}"):
            turns = on_mesh(task, mesh, stage)
        rows += judged(Comparison(task, mesh, stage, turns, alone, exact, bounds))
    return Certificate(mesh, steps, task.reproducible, tuple(rows))


def _refuse_laid_out(opt: Optimizer, **trees: PyTree) -> None:
    """Raise if something lies on a mesh already, naming all that does."""
    laid = [
        name + path
        for name, tree in trees.items()
        for path, leaf in zip(*flatten_with_paths(tree, sharded_is_leaf=True)[:2], strict=True)
        if isinstance(leaf, Sharded)
    ]
    laid += ["the optimizer"] if isinstance(opt, Partitioned) else []
    if laid:
        raise LayoutError(
            f"certify: {', '.join(laid)} {'is' if len(laid) == 1 else 'are'} laid on a mesh already. It does that itself, for "
            "every stage: give whole tensors (fs.unshard), and the optimizer as it was before fs.partition_optimizer."
        )


def _on(mesh: Mesh, x: Any) -> Any:
    return x.to(mesh.device_type) if isinstance(x, Tensor) else x


@contextmanager
def _noting(where: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"certify: {where}")
        raise
