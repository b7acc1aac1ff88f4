"""`certify`: does a program, sharded, train as it does on one device?  And if not, what is the likely reason?

Both runs are made, and a third in float64 that says how far rounding alone leads.  Gradients and parameters are
compared after every step, on every device, leaf by leaf:

    EXACT       the bits of the run on one device
    BOUNDED     as near to float64 as four times the run on one device is
    DIVERGENT   neither; then the gradient of that step is looked at, in this order:
                  a constant times too large      summed where it should be averaged, or the other way round
                  what some devices have alone    a reduction over an axis is missing
                  right                           then it is the optimizer: is it elementwise?

In reproducible mode bits are promised, so nothing is BOUNDED, and one device means a mesh of one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from itertools import combinations
from math import inf, prod
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fshard as fs
from fshard.errors import LayoutError, OptimizerError, PromiseError
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.spmd import held
from fshard.mesh.tree import PyTree, flatten, flatten_with_paths, map_leaves, unflatten
from fshard.optim.contract import Optimizer, copied, pure_step, step_of
from fshard.optim.leaves import Leaf, key_of, shards_of, trainable
from fshard.transforms.randomness import keyed_random
from fshard.transforms.rules import named, parts_of

Verdict = Literal["EXACT", "BOUNDED", "DIVERGENT"]
TIMES = 4
"""How much further from float64 the sharded run may be than the one on one device."""
FLOOR = 8
"""Roundings of a leaf's largest number that are always allowed: a leaf of few numbers may be right by luck."""
_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}


# -- the certificate ----------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """What was found of one leaf in one stage; `step` is the first at which it diverges."""

    stage: int
    leaf: str
    verdict: Verdict
    error: float
    bound: float
    reason: str = ""
    step: int | None = None


@dataclass(frozen=True)
class Certificate:
    """A row for every stage and leaf.  Prints as a table; see `certify`."""

    mesh: Mesh
    steps: int
    reproducible: bool
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing diverges."""
        return self.first is None

    @property
    def first(self) -> Row | None:
        """What diverges first: in the first stage, at the first step, the first leaf in the order of the tree."""
        return _first(self.rows)

    def check(self) -> Certificate:
        """Raise an AssertionError with the table if anything diverges; else return the certificate."""
        if not self.ok:
            raise AssertionError(f"the sharded run is not the run on one device.\n{self}")
        return self

    def table(self) -> Table:
        """Return the certificate as a rich table."""
        one = "a mesh of one device, bit for bit" if self.reproducible else "one device and float64"
        table = Table("stage", "leaf", "verdict", "error", "bound", "reason", title=f"{self.mesh} against {one}")
        table.caption = f"{self.steps} steps; errors of parameters after the last one, or where they diverge"
        stage = None
        for row in self.rows:
            if stage not in (None, row.stage):
                table.add_section()
            numbers = ("", "") if self.reproducible and row.verdict == "EXACT" else (row.error, row.bound)
            shown = [x if isinstance(x, str) else f"{x:.1e}" for x in numbers]
            table.add_row("" if row.stage == stage else str(row.stage), row.leaf, row.verdict, *shown, row.reason)
            stage = row.stage
        for column in (3, 4):
            table.columns[column].justify = "right"
        return table

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=110, force_terminal=False, force_jupyter=False, color_system=None)
        with console.capture() as shown:
            console.print(self.table())
        return shown.get().rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        console = Console(file=StringIO(), width=110, record=True, force_jupyter=False)
        console.print(self.table())
        style = "line-height:1.2;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
        return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')


def _first(rows: Sequence[Row]) -> Row | None:
    divergent = [row for row in rows if row.step is not None]
    return min(divergent, key=lambda row: (row.stage, row.step), default=None)


def certify(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    opt: Optimizer,
    *,
    mesh: Mesh,
    axis: str | tuple[str, ...] = "data",
    batch_spec: PyTree = P("data"),
    stages: Sequence[Literal[0, 1, 2, 3]] = (0, 1, 2, 3),
    steps: int = 3,
    exact_inputs: bool = False,
    seed: int = 0,
    **options: Any,
) -> Certificate:
    """Train a few steps on a mesh and on one device; say of every leaf whether it is the same, and if not, why.

    Communicates what `train_step` does.  On a process mesh every process calls it and judges what it holds itself.

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
        batch_spec: how the batch is cut.
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
        raise LayoutError(f"certify: it compares numbers, so it needs a mesh with values and steps; found {mesh}, {steps=}.")
    if exact_inputs:
        params, batch = dyadic(params, seed), dyadic(batch, seed + 1)
    task = Task(loss_fn, params, batch, opt, axis, batch_spec, steps, seed, options)
    if task.reproducible:
        one = Mesh(tuple((name, 1) for name in mesh.axis_names), "virtual", mesh.device_type)
        alone = exact = [_whole(turn) for turn in _sharded(task, one, 0)]
    else:
        _refuse_random(task)
        alone, exact = _serial(task), _serial(_widened(task))
    rows: list[Row] = []
    for stage in stages:
        rows += _judged(Comparison(task, mesh, stage, _sharded(task, mesh, stage), alone, exact))
    return Certificate(mesh, steps, task.reproducible, tuple(rows))


def dyadic(tree: PyTree, seed: int) -> PyTree:
    """Draw all floating tensors of a tree anew, as multiples of 1/8 from -1 to 1; all else stays as it is.

    Sums of 8,000,000 of them, and of 250,000 products of two, are exact in float32 in any order.  So what is linear has
    the same bits on any layout.

    >>> import torch
    >>> drawn = dyadic({"w": torch.ones(2, 3), "count": torch.tensor(3)}, seed=0)
    >>> drawn["w"], drawn["count"]
    (tensor([[-0.5000, -0.3750,  0.7500], [-1.0000,  0.1250, -0.1250]]), tensor(3))
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(x: Any) -> Any:
        if not isinstance(x, Tensor) or not trainable(x):
            return x
        real = torch.view_as_real(x) if x.is_complex() else x
        numbers = (torch.randint(-8, 9, real.shape, generator=generator) / 8).to(real)
        return torch.view_as_complex(numbers) if x.is_complex() else numbers

    return _mapped_once(drawn, tree)


# -- the runs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is to be trained, and how: what `certify` was told."""

    loss_fn: Callable[..., Any]
    params: PyTree
    batch: PyTree
    opt: Optimizer
    axis: str | tuple[str, ...]
    batch_spec: PyTree
    steps: int
    seed: int
    options: Mapping[str, Any]

    @property
    def reproducible(self) -> bool:
        """Whether equal bits are promised."""
        return bool(self.options.get("reproducible"))

    @property
    def compute(self) -> torch.dtype | None:
        """The dtype that is computed in, if not that of the parameters."""
        return self.options.get("compute") or _COMPUTE.get(self.options.get("precision"))


class Turn(NamedTuple):
    """Gradients that the optimizer was given in one step, and parameters that it made, in the order of the tree."""

    grads: list[Leaf]
    params: list[Leaf]


def _sharded(task: Task, mesh: Mesh, stage: Any) -> list[Turn]:
    """Train on a mesh, and note what the optimizer is given."""
    opt = fs.partition_optimizer(task.opt, mesh=mesh, axis=task.axis, stage=stage)
    write, turns, given = step_of(opt), list[Turn](), list[PyTree]()  # pyright: ignore[reportArgumentType]

    def noted(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        given.append(copied(grads))  # the step may use them up
        return write(grads, state, params)

    params = _placed(task.params, task, mesh, stage)
    state = opt.init(params)
    step = fs.train_step(task.loss_fn, opt._replace(step=noted), mesh=mesh, batch=task.batch_spec, **task.options)
    for turn in range(task.steps):
        with keyed_random(task.seed, turn):
            params, state, _ = step(params, state, task.batch)
        turns.append(Turn(_leaves(given[-1]), _leaves(copied(params))))
    return turns


def _placed(params: PyTree, task: Task, mesh: Mesh, stage: int) -> PyTree:
    return fs.shard_params(params, fs.fsdp(task.axis) if stage == 3 else P(), mesh=mesh)


def _serial(task: Task) -> list[Turn]:
    """Train on one device, with plain tensors, plain autograd and the optimizer as it is."""
    step, params, turns = pure_step(task.opt), task.params, list[Turn]()
    state = task.opt.init(params)
    with _default_dtype(_leaves(params)):
        for _ in range(task.steps):
            grads = _gradient(task, params)[1]
            params, state = step(grads, state, params)
            turns.append(Turn(_leaves(grads), _leaves(params)))
    return turns


def _gradient(task: Task, params: PyTree) -> tuple[Tensor, PyTree]:
    """Return the loss and the gradient on whole tensors, on a mesh on which every axis has size 1."""
    frozen = task.options.get("frozen") or (lambda path: False)
    paths, leaves, structure = flatten_with_paths(params)
    tied = {id(x): (path, x) for path, x in reversed([*zip(paths, leaves, strict=True)])}
    used = {
        key: x.detach().requires_grad_(trainable(x) and not frozen(named(parts_of(path))))
        for key, (path, x) in tied.items()
    }
    moving = {key: x for key, x in used.items() if x.requires_grad}
    computed = {key: _converted(x, task.compute) for key, x in used.items()}

    def program() -> tuple[Tensor, Sequence[Tensor | None]]:
        batch = _mapped_once(lambda x: _converted(x, task.compute), task.batch)
        result = task.loss_fn(unflatten(structure, [computed[id(x)] for x in leaves]), batch)
        loss = result[0] if task.options.get("has_aux") else result
        found = torch.autograd.grad(loss, [*moving.values()], allow_unused=True) if loss.requires_grad else ()
        return loss.detach(), found

    axes = tuple((name, 1) for name in _axes_named(task))
    with torch.enable_grad():
        ((loss, found),) = fs.run(program, mesh=Mesh(axes, "virtual", "cpu"))
    grads = dict(zip(moving, found, strict=False))
    return loss, unflatten(structure, [grads.get(id(x)) for x in leaves])


def _axes_named(task: Task) -> tuple[str, ...]:
    return task.options["_axes"]


def _refuse_random(task: Task) -> None:
    losses: list[Tensor] = []
    for key in ("one", "another"):
        with keyed_random(task.seed, key):
            losses.append(_gradient(task, task.params)[0])
    if not torch.equal(*losses):
        raise PromiseError(
            f"certify: the loss function draws random numbers: twice on the same batch, it gave {losses[0].item():.6g} and "
            f"{losses[1].item():.6g}. No serial run draws what the devices draw. Call certify(..., reproducible=True), which "
            "compares with a mesh of one device, or give a loss function without dropout."
        )
