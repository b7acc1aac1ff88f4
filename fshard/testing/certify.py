"""`certify`: does a program, sharded, train as it does on one device?  And if not, what is the likely reason?

Both runs are made, and a third in float64 that says how far rounding alone leads.  Gradients and parameters are
compared after every step, on every device, leaf by leaf:

    EXACT       the bits of the run on one device
    BOUNDED     as near to float64 as four times the run on one device is (see `_bounds`)
    DIVERGENT   neither; then the gradient of that step is looked at, in this order:
                  a constant times too large      summed where it should be averaged, or the other way round
                  what one device adds to it      a reduction over an axis is missing
                  right                           then it is the optimizer: is it elementwise?

In reproducible mode bits are promised, so nothing is BOUNDED, and one device means a mesh of one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from math import inf, prod
from typing import Any, Literal, NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import Parameter

import fshard as fs
from fshard.errors import LayoutError, OptimizerError, PromiseError
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.spmd import held
from fshard.mesh.tables import as_html, as_text
from fshard.mesh.tree import PyTree, flatten, flatten_with_paths, unflatten
from fshard.optim.contract import Optimizer, Update, copied, pure_step, step_of
from fshard.optim.leaves import Leaf, is_frozen, trainable
from fshard.transforms.randomness import keyed_random
from fshard.transforms.rules import chosen, named, parts_of

Verdict = Literal["EXACT", "BOUNDED", "DIVERGENT"]
TIMES = 4
"""How much further from float64 the sharded run may be than the one on one device."""
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
        table.caption = f"of the worst element, after step {self.steps - 1} or where it diverges"
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
        return as_text(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self.table())


def _first(rows: Sequence[Row]) -> Row | None:
    divergent = [(row.step, row) for row in rows if row.step is not None]
    own = [(step, row) for step, row in divergent if row.stage == divergent[0][1].stage]
    return min(own, key=lambda pair: pair[0], default=(0, None))[1]


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
        raise LayoutError(
            f"certify: it compares numbers, so it needs a mesh with values and steps; found {mesh}, {steps=}."
        )
    if exact_inputs:
        params, batch = dyadic(params, seed), dyadic(batch, seed + 1)
    params, batch = (_mapped_once(lambda x: _on(mesh, x), tree) for tree in (params, batch))
    one = Mesh(tuple((name, 1) for name in mesh.axis_names), "virtual", mesh.device_type)
    task = Task(loss_fn, params, batch, opt, one, axis, batch_spec, steps, seed, options)
    if task.reproducible:
        alone = exact = [_whole(turn) for turn in _sharded(task, one, 0)]
    else:
        _refuse_random(task)
        alone = _serial(task)
        with _noting("in the run on one device in float64: does the loss function name a dtype?"):
            exact = _serial(_widened(task))
    bounds, rows = _bounds(task, alone, exact), list[Row]()
    for stage in stages:
        with _noting(f"in stage {stage}"):
            turns = _sharded(task, mesh, stage)
        rows += _judged(Comparison(task, mesh, stage, turns, alone, exact, bounds))
    return Certificate(mesh, steps, task.reproducible, tuple(rows))


def dyadic(tree: PyTree, seed: int) -> PyTree:
    """Draw all floating tensors of a tree anew, as multiples of 1/8 from -1 to 1; all else stays as it is.

    Sums of 8,000,000 of them, and of 250,000 products of two, are exact in float32 in any order.  So what is linear has
    the same bits on any layout.

    >>> import torch
    >>> drawn = dyadic({"w": torch.ones(2, 3), "count": torch.tensor(3)}, seed=0)
    >>> drawn["w"], drawn["count"]
    (tensor([[-0.1250, -0.6250,  0.5000],
            [ 1.0000, -0.7500, -1.0000]]), tensor(3))
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(x: Any) -> Any:
        if not _floats(x):
            return x
        real = torch.view_as_real(x) if x.is_complex() else x
        numbers = (torch.randint(-8, 9, real.shape, generator=generator) / 8).to(real)
        return _frozen_as(x, torch.view_as_complex(numbers) if x.is_complex() else numbers)

    return _mapped_once(drawn, tree)


# -- the runs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is to be trained, and how: what `certify` was told."""

    loss_fn: Callable[..., Any]
    params: PyTree
    batch: PyTree
    opt: Optimizer
    one: Mesh
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


@contextmanager
def _noting(where: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"certify: {where}")
        raise


def _on(mesh: Mesh, x: Any) -> Any:
    return x.to(mesh.device_type) if isinstance(x, Tensor) else x


def _sharded(task: Task, mesh: Mesh, stage: Any) -> list[Turn]:
    """Train on a mesh, and note what the optimizer is given."""
    opt: Any = fs.partition_optimizer(task.opt, mesh=mesh, axis=task.axis, stage=stage)
    write, turns, given = step_of(opt), list[Turn](), list[PyTree]()

    def noting(act: Update) -> Update:
        def noted(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            given.append(_times(grads, 1 / _scale(opt, state)))  # a copy: the step may use them up
            return act(grads, state, params)

        return noted

    params = _placed(task.params, task, mesh, stage)
    state = opt.init(params)
    step = fs.train_step(
        task.loss_fn,
        opt._replace(step=noting(write), update=noting(opt.update)),
        mesh=mesh,
        batch=task.batch_spec,
        **task.options,
    )
    for turn in range(task.steps):
        with keyed_random(task.seed, turn):
            params, state, _ = step(params, state, task.batch)
        turns.append(Turn(_leaves(given[-1]), _leaves(copied(params))))
    return turns


def _placed(params: PyTree, task: Task, mesh: Mesh, stage: int) -> PyTree:
    return fs.shard_params(params, fs.fsdp(task.axis) if stage == 3 else P(), mesh=mesh)


def _serial(task: Task, shifts: Sequence[Sequence[Leaf]] | None = None) -> list[Turn]:
    """Train on one device, with plain tensors, plain autograd and the optimizer as it is, on gradients that are shifted."""
    step, params, turns = pure_step(task.opt), task.params, list[Turn]()
    state = task.opt.init(params)
    with _default_dtype(_leaves(params)):
        for turn in range(task.steps):
            scale = _scale(task.opt, state)
            grads = _times(_gradient(task, params, scale)[1], 1 / scale)
            moved = grads if shifts is None else _plus(grads, shifts[turn])
            params, state = step(_times(moved, scale), state, params)
            turns.append(Turn(_leaves(grads), _leaves(params)))
    return turns


def _plus(grads: PyTree, shifts: Sequence[Leaf]) -> PyTree:
    by = {id(g): shift for g, shift in zip(_leaves(grads), shifts, strict=True)}
    return _mapped_once(lambda g: None if g is None else g + by[id(g)], grads)


def _scale(opt: Any, state: PyTree) -> float:
    """Return what an optimizer wants the loss to be multiplied by."""
    return float(opt.loss_scale(state)) if getattr(opt, "loss_scale", None) is not None else 1.0


@torch.no_grad()
def _times(tree: PyTree, factor: float) -> PyTree:
    return _mapped_once(lambda x: None if x is None else x * factor, tree)


def _gradient(task: Task, params: PyTree, scale: float = 1.0) -> tuple[Tensor, PyTree]:
    """Return the loss and its scaled gradient on whole tensors, on a mesh on which every axis has size 1."""
    paths, leaves, structure = flatten_with_paths(params)
    frozen = chosen(task.options.get("frozen"), paths, "frozen")
    tied = {id(x): (fixed, x) for fixed, x in reversed([*zip(frozen, leaves, strict=True)])}
    used = {key: x.detach().requires_grad_(trainable(x) and not fixed) for key, (fixed, x) in tied.items()}
    moving = {key: x for key, x in used.items() if x.requires_grad}
    computed = {key: _converted(x, task.compute) for key, x in used.items()}

    def program() -> tuple[Tensor, Sequence[Tensor | None]]:
        batch = _mapped_once(lambda x: _converted(x, task.compute), task.batch)
        result = task.loss_fn(unflatten(structure, [computed[id(x)] for x in leaves]), batch)
        loss = result[0] if task.options.get("has_aux") else result
        if not loss.requires_grad:
            return loss, ()
        start = torch.full_like(loss, scale)
        return loss.detach(), torch.autograd.grad(loss, [*moving.values()], start, allow_unused=True)

    with torch.enable_grad():
        ((loss, found),) = fs.run(program, mesh=task.one)
    grads = dict(zip(moving, found, strict=False))
    return loss, unflatten(structure, [grads.get(id(x)) for x in leaves])


def _refuse_random(task: Task) -> None:
    losses: list[Tensor] = []
    for key in ("one", "another"):
        with keyed_random(task.seed, key):
            losses.append(_gradient(task, task.params)[0])
    if not torch.allclose(*losses, rtol=0, atol=0, equal_nan=True):
        raise PromiseError(
            f"certify: the loss function draws random numbers: twice on the same batch, it gave {losses[0].item():.6g} and "
            f"{losses[1].item():.6g}. No serial run draws what the devices draw. Call certify(..., reproducible=True), which "
            "compares with a mesh of one device, or give a loss function without dropout."
        )


def _widened(task: Task) -> Task:
    """Return the same task in float64."""
    options = {key: x for key, x in task.options.items() if key not in ("compute", "precision")}
    return replace(
        task, params=_mapped_once(_wide, task.params), batch=_mapped_once(_wide, task.batch), options=options
    )


def _wide(x: Any) -> Any:
    return _frozen_as(x, x.to(torch.complex128 if x.is_complex() else torch.float64)) if _floats(x) else x


def _floats(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _frozen_as(x: Tensor, new: Tensor) -> Tensor:
    """Return a tensor that is frozen where another is."""
    return Parameter(new.detach(), requires_grad=False) if is_frozen(x) else new


def _converted(x: Any, compute: torch.dtype | None) -> Any:
    return x.to(compute) if compute is not None and isinstance(x, Tensor) and x.is_floating_point() else x


@contextmanager
def _default_dtype(leaves: Sequence[Leaf]) -> Generator[None]:
    """Make float64 the dtype of new tensors where the parameters are float64, so that constants in a loss are, too."""
    before, floats = torch.get_default_dtype(), {x.dtype for x in leaves if trainable(x)}
    torch.set_default_dtype(torch.float64 if floats and floats <= {torch.float64, torch.complex128} else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _leaves(tree: PyTree) -> list[Leaf]:
    return flatten(tree, sharded_is_leaf=True, none_is_leaf=True)[0]


def _whole(turn: Turn) -> Turn:
    return Turn(*([fs.unshard(leaf) for leaf in leaves] for leaves in turn))


def _mapped_once(f: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Apply a function to every leaf, once to one that stands at several places: ties stay ties."""
    made: dict[int, Any] = {}
    leaves, structure = flatten(tree, none_is_leaf=True)
    for x in leaves:
        if id(x) not in made:
            made[id(x)] = f(x)
    return unflatten(structure, [made[id(x)] for x in leaves])


# -- the comparison -----------------------------------------------------------------------------------------------


class Gap(NamedTuple):
    """How far the worst element of a leaf, the nearest to its bound or the furthest beyond, is from where it should be."""

    same: bool
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether it has the same bits, or is within the bound (not so if anything is NaN)."""
        return self.same or self.error <= self.bound


def _bounds(task: Task, alone: list[Turn], exact: list[Turn]) -> list[Turn]:
    """Return how far from float64 each element may be, in each step: not at all where bits are promised.

    gradient    4 x the error of its leaf on one device + a rounding of the largest of all (a sum that should be 0 is not)
    parameter   4 x the error of its leaf on one device + a rounding of its leaf's largest a step (few may be lucky)
    both        + as far as training carries a shift of all gradients by their bound: Adam makes lr of a rounding
    """
    if task.reproducible:
        return [Turn(*([_allowed(x, 0.0) for x in leaves] for leaves in turn)) for turn in alone]
    own: list[Turn] = []
    for step, (one, other) in enumerate(zip(alone, exact, strict=True)):
        largest = max(map(_size, other.grads), default=0.0)
        grads = [_bound(task, *pair, largest) for pair in zip(one.grads, other.grads, strict=True)]
        params = [_bound(task, a, b, (step + 1) * _size(b)) for a, b in zip(one.params, other.params, strict=True)]
        own.append(Turn(grads, params))
    up = _serial(_widened(task), [turn.grads for turn in own])
    down = _serial(_widened(task), [[None if x is None else -x for x in turn.grads] for turn in own])
    return [Turn(*map(_wider, *turns)) for turns in zip(own, up, down, strict=True)]


def _wider(bounds: list[Leaf], up: list[Leaf], down: list[Leaf]) -> list[Leaf]:
    return [
        bound if bound is None or not trainable(high) else bound + (high - low).abs()
        for bound, high, low in zip(bounds, up, down, strict=True)
    ]


def _bound(task: Task, alone: Leaf, exact: Leaf, rounded: float) -> Leaf:
    if alone is None:
        return None
    if not trainable(alone):
        return _allowed(alone, 0.0)
    rounding = torch.finfo(task.compute or alone.dtype).eps * rounded
    return _allowed(alone, TIMES * _size(_wide(alone) - exact) + rounding)


def _allowed(x: Leaf, bound: float) -> Leaf:
    return None if x is None else torch.full(x.shape, bound, dtype=torch.float64, device=x.device)


@dataclass(frozen=True)
class Comparison:
    """One stage beside the run on one device, `alone`, and the one in float64, `exact`."""

    task: Task
    mesh: Mesh
    stage: int
    turns: list[Turn]
    alone: list[Turn]
    exact: list[Turn]
    bounds: list[Turn]

    def gap(self, step: int, what: Literal["grads", "params"], place: int) -> Gap:
        """Compare a gradient, or a parameter after a step."""
        every = (self.turns, self.alone, self.exact, self.bounds)
        found, alone, exact, bound = (getattr(turns[step], what)[place] for turns in every)
        if found is None or alone is None:
            return Gap(found is alone, 0.0 if found is alone else inf, 0.0)
        same = all(torch.equal(a, b) for a, b in _side_by_side(found, alone))
        errors = torch.cat([(_wide(a) - b).abs().reshape(-1) for a, b in _side_by_side(found, _wide(exact))])
        bounds = torch.cat([b.reshape(-1) for _, b in _side_by_side(found, bound)])
        if not errors.numel():
            return Gap(same, 0.0, 0.0)
        worst = int((errors - bounds).argmax())
        return Gap(same, float(errors[worst]), float(bounds[worst]))


def _size(x: Tensor | None) -> float:
    """Return the largest absolute value; NaN if there is one."""
    return 0.0 if x is None or not x.numel() else float(x.abs().max())


def _side_by_side(found: Leaf, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what each device holds of a leaf, and the same piece of a whole tensor.  Replicas are all looked at."""
    if isinstance(found, Sharded) and found.spec.unreduced:
        found = fs.unshard(found)
    if not isinstance(found, Sharded):
        yield found, whole
        return
    for device, shard in zip(held(found.mesh), found.shards, strict=True):
        yield shard, _piece(whole, found.layout, device)


def _piece(whole: Tensor, layout: Layout, device: int) -> Tensor:
    lying = whole.reshape(-1) if layout.spec.is_flat else whole
    return lying[tuple(slice(*limits) for limits in layout.ranges(whole.shape, device))]


def _judged(it: Comparison) -> list[Row]:
    """Judge every leaf; give the reason where one diverges first, and refer to that one where others follow."""
    paths = [named(parts_of(path)) or "params" for path in flatten_with_paths(it.task.params, none_is_leaf=True)[0]]
    rows = [_row(it, place, path) for place, path in enumerate(paths)]
    first = _first(rows)
    if first is None or first.step is None:
        return rows
    reasons = Reasons(it, first.step)
    return [
        row
        if row.step is None
        else row._replace(reason=f"step {row.step}: {reasons.of(place)}")
        if row.step == first.step
        else row._replace(reason=f"step {row.step}: after {first.leaf} has diverged")
        for place, row in enumerate(rows)
    ]


def _row(it: Comparison, place: int, path: str) -> Row:
    gaps = [(it.gap(step, "grads", place), it.gap(step, "params", place)) for step in range(it.task.steps)]
    for step, pair in enumerate(gaps):
        for gap in pair:
            if not gap.ok:
                return Row(it.stage, path, "DIVERGENT", gap.error, gap.bound, step=step)
    verdict: Verdict = "EXACT" if all(parameter.same for _, parameter in gaps) else "BOUNDED"
    return Row(it.stage, path, verdict, *gaps[-1][1][1:])


# -- the reasons --------------------------------------------------------------------------------------------------


class Reasons:
    """Why leaves diverge in a stage's first step that has any that do."""

    def __init__(self, it: Comparison, step: int) -> None:
        self._it, self._step = it, step
        self._factors = _factors(it.mesh, it.task.options.get("accumulate", 1))

    def of(self, place: int) -> str:
        """Say why one leaf does."""
        it, step = self._it, self._step
        found, alone = it.turns[step].grads[place], it.alone[step].grads[place]
        if found is None or alone is None:
            has = "the sharded run" if alone is None else "the run on one device"
            if found is not alone:
                return f"only {has} has a gradient: does the loss function use the parameter on all devices alike?"
        elif not torch.isfinite(alone).all():
            return "the gradient on one device is not finite"
        elif not it.gap(step, "grads", place).ok:
            return self._of_gradient(place, found, alone)
        return self._of_update(place)

    def _of_gradient(self, place: int, found: Leaf, alone: Tensor) -> str:
        factor = self._factor([*_side_by_side(found, alone)])
        if factor is not None:
            return f"the gradient is {factor.size}: {factor.reason}"
        if (missing := self._missing(place, found)) is not None:
            return missing
        if self._near([*_side_by_side(found, alone)]):
            return "the gradient differs by rounding: it is added up in another order than on one device"
        return f"unknown; the gradient first differs at {_first_difference(found, alone, self._tolerance)}"

    def _of_update(self, place: int) -> str:
        it, step = self._it, self._step
        found, alone = it.turns[step].params[place], it.alone[step].params[place]
        before = it.alone[step - 1].params[place] if step else _leaves(it.task.params)[place]
        factor = self._factor([(a - b, c - b) for (a, c), (_, b) in zip(
            _side_by_side(found, alone), _side_by_side(found, before), strict=True)])  # fmt: skip
        told = "the gradient is right, the update is not: "
        if factor is not None and not factor.root:
            return f"{told}it is {factor.size}. The optimizer multiplies or divides by the size of {factor.axes}"
        if self._near([*_side_by_side(found, alone)], 1e-5):
            return f"{told}it differs by rounding, as a fused kernel may at the ends of pieces: try fused=False"
        at = _first_difference(found, alone, self._tolerance)
        if it.stage == 0:
            return f"{told}the optimizer does not do the same on a mesh; the parameter first differs at {at}"
        return (
            f"{told}the optimizer is not elementwise, pieces give another result; the parameter first differs at {at}"
        )

    @property
    def _tolerance(self) -> float:
        """How near is equal, relative to the largest number."""
        return 1e-3 if self._it.task.compute is None else 5e-2

    def _near(self, pairs: list[tuple[Tensor, Tensor]], tolerance: float | None = None) -> bool:
        """Return whether all pieces are what stands beside them, but for rounding."""
        allowed = (tolerance or self._tolerance) * max((_size(b) for _, b in pairs), default=0.0)
        return allowed > 0 and all(_size(_wide(a) - _wide(b)) <= allowed for a, b in pairs)

    def _factor(self, pairs: list[tuple[Tensor, Tensor]]) -> Factor | None:
        """Return the likely constant between pieces and what stands beside them."""
        return next(
            (one for one in self._factors if self._near([(a, _wide(b) * one.value) for a, b in pairs])),
            None,
        )

    def _missing(self, place: int, found: Leaf) -> str | None:
        """Compare a gradient with sums over fewer axes: then what each device holds is its own, or one device's."""
        mesh = self._it.mesh
        if self._local is None or not isinstance(found, Sharded):
            return None
        local: Sharded = self._local[place]
        for axes in _subsets(local.spec.unreduced):
            summed = fs.reshard(local, Layout(mesh, P(unreduced=axes)))
            some = [*zip(held(mesh), found.shards, summed.shards, strict=True)]
            for times in (1, prod(mesh.shape[axis] for axis in axes)):  # a sum over the others, or their mean
                own = [(a, _piece(b, found.layout, device) * times) for device, a, b in some]
                if self._near(own):
                    return f"a reduction over {_named(axes)} is missing: each device has what it adds to the sum"
                for other in held(mesh):
                    whole = summed.shards[held(mesh).index(other)] * times
                    if self._near([*_side_by_side(found, whole)]):
                        return (
                            f"a reduction over {_named(axes)} is missing: all have what device {other} adds to the sum"
                        )
        return None

    @cached_property
    def _local(self) -> list[Leaf] | None:
        """The gradients of this step before any sum over devices, from the parameters that it began with."""
        it, step, task = self._it, self._step, self._it.task
        wanted = {axis for spec in flatten(task.batch_spec)[0] if isinstance(spec, P) for axis in spec.axes}
        axes = tuple(axis for axis in it.mesh.axis_names if axis in wanted and it.mesh.shape[axis] > 1)
        if not axes:
            return None
        left_out = ("donate", "precision", "gradients", "compute")
        options: dict[str, Any] = {key: x for key, x in task.options.items() if key not in left_out}
        summands, compute = Layout(it.mesh, P(unreduced=axes)), task.compute
        differentiated = partial(fs.value_and_grad, gradients=lambda layout: summands, compute=compute)
        run = differentiated(task.loss_fn, mesh=it.mesh, batch=task.batch_spec, **options)
        params = (
            unflatten(flatten(task.params, none_is_leaf=True)[1], it.alone[step - 1].params) if step else task.params
        )
        with keyed_random(task.seed, step):
            _, grads = run(_placed(params, task, it.mesh, it.stage), task.batch)
        return _leaves(grads)


class Factor(NamedTuple):
    """A constant that gradients are often wrong by."""

    value: float
    size: str
    axes: str
    reason: str
    root: bool = False


def _factors(mesh: Mesh, accumulate: int) -> list[Factor]:
    """List the constants that sizes of axes, and the turns of accumulate, give: what is likelier comes first."""
    turns = f"the {accumulate} turns of accumulate"
    sizes: dict[int, list[str]] = {}
    for axes in reversed(_subsets(tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1))):
        n = prod(mesh.shape[axis] for axis in axes)
        sizes.setdefault(n, []).append(_named(axes))
        if accumulate > 1:
            sizes.setdefault(n * accumulate, []).append(f"{_named(axes)} and {turns}")
    if accumulate > 1:
        sizes.setdefault(accumulate, []).append(turns)
    whole: list[Factor] = []
    roots: list[Factor] = []
    for n, names in sizes.items():
        over = " or ".join(names)
        summed = f"averaged over {over} where it should be summed (or the loss function returns a sum, not a mean)"
        root, scaled = f"{n**0.5:.4g} = √{n}", f"scaled by the root of the size of {over}"
        whole += [
            Factor(n, f"{n} times too large", over, f"summed over {over} where it should be averaged"),
            Factor(1 / n, f"{n} times too small", over, summed),
        ]
        roots += [
            Factor(n**0.5, f"{root} times too large", over, scaled, root=True),
            Factor(n**-0.5, f"{root} times too small", over, scaled, root=True),
        ]
    return whole + roots


def _subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """List the choices of one or more axes, the whole first."""
    return [some for size in range(len(axes), 0, -1) for some in combinations(axes, size)]


def _named(axes: tuple[str, ...]) -> str:
    return " x ".join(f'"{axis}"' for axis in axes)


def _first_difference(found: Leaf, whole: Tensor, tolerance: float) -> str:
    """Name the first element that differs by more than a tolerance, or at all, and the first device that has it."""
    for allowed in (tolerance * _size(whole), 0.0):
        at = torch.arange(whole.numel(), device=whole.device).reshape(whole.shape)
        devices = held(found.mesh) if isinstance(found, Sharded) and not found.spec.unreduced else (0,)
        pairs = zip(devices, _side_by_side(found, whole), _side_by_side(found, at), strict=True)
        for device, (a, b), (_, numbers) in pairs:
            wrong = ~((_wide(a) - _wide(b)).abs() <= allowed)
            if wrong.any():
                place = tuple(int(i) for i in torch.unravel_index(numbers[wrong][0], whole.shape))
                return f"{list(place)}: {a[wrong][0].item():.6g} instead of {b[wrong][0].item():.6g} (device {device})"
    return "no element"


# -- a property of optimizers -------------------------------------------------------------------------------------


def check_elementwise(opt: Optimizer, params: PyTree = None, *, steps: int = 3, seed: int = 0) -> None:
    """Hold an optimizer that says `elementwise=True` to its word: whole and in pieces, it has to do the same.

    Parameters are cut flat over virtual meshes of several sizes, gradients are random, of very different sizes from
    piece to piece.  What an optimizer communicates it may: `clip_by_global_norm` is no counterexample.

    Args:
        opt: an optimizer, or a transformation of gradients.
        params: what to run it on, by default a few leaves of odd shapes.
        steps: how many.
        seed: of the gradients.

    >>> import torch, fshard as fs
    >>> check_elementwise(fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(0.1)))
    >>> check_elementwise(fs.optim.lamb(0.1)._replace(elementwise=True))  # it knows of pieces: it asks the others
    >>> def update(grads, state, params):
    ...     leaves, structure = flatten(grads)
    ...     return unflatten(structure, [-g / g.norm() for g in leaves]), state
    >>> check_elementwise(fs.Optimizer(lambda params: (), update), {"w": torch.zeros(4)}, steps=1)
    Traceback (most recent call last):
    ...
    AssertionError: ...
    """
    if not opt.elementwise:
        raise OptimizerError(
            "check_elementwise: this optimizer says that it is not elementwise, so there is nothing to hold it to."
        )
    draw = torch.Generator().manual_seed(seed)
    shapes = {"bias": (7,), "matrix": (6, 5), "scale": (), "stack": (2, 3, 4)}
    params = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()} if params is None else params
    grads = [_mapped_once(lambda x: _uneven(x, draw), params) for _ in range(steps)]
    expected = _trained(opt, params, grads)
    paths = [named(parts_of(path)) or "params" for path in flatten_with_paths(params, none_is_leaf=True)[0]]
    for axes in ({"data": 2}, {"data": 3}, {"data": 2, "model": 2}, {"data": 7}):
        mesh = Mesh(tuple(axes.items()), "virtual", "cpu")
        found = _trained(opt, _cut(params, mesh), [_cut(each, mesh) for each in grads])
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            for path, a, b in zip(paths, ours, theirs, strict=True):
                _compare(path, a, b, step, mesh)


def _cut(tree: PyTree, mesh: Mesh) -> PyTree:
    layout = Layout(mesh, P.flat(*mesh.axis_names))
    return _mapped_once(lambda x: fs.device_put(x, layout) if isinstance(x, Tensor) else x, tree)


def _uneven(x: Any, draw: torch.Generator) -> Any:
    """Return a gradient whose elements grow from the first to the last, by up to 16 times."""
    if not isinstance(x, Tensor) or not trainable(x):
        return None
    return (torch.randn(x.shape, generator=draw) * torch.logspace(-2, 2, x.numel(), base=4).reshape(x.shape)).to(x)


def _trained(opt: Optimizer, params: PyTree, grads: list[PyTree]) -> list[list[Leaf]]:
    step, state, found = pure_step(opt), opt.init(params), list[list[Leaf]]()
    for each in grads:
        params, state = step(each, state, params)
        found.append(_leaves(params))
    return found


def _compare(path: str, found: Leaf, expected: Leaf, step: int, mesh: Mesh) -> None:
    if expected is None:
        return
    tolerance = 1e-3 if expected.dtype.itemsize < 4 else 1e-5
    near = all(_size(_wide(a) - _wide(b)) <= tolerance * _size(expected) for a, b in _side_by_side(found, expected))
    if not near:
        raise AssertionError(
            f"the optimizer says elementwise=True, but cut into {mesh.size} flat pieces, {path} first differs at "
            f"{_first_difference(found, expected, tolerance)}, step {step}. Say elementwise=False, or ask the other pieces for "
            "what you need of them, as clip_by_global_norm does."
        )
