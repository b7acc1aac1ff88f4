"""The runs that are compared: on a mesh by `train_step`, and on one device by plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fshard as fs
from fshard.errors import PromiseError
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.spec import P
from fshard.mesh.tree import PyTree
from fshard.optim.contract import Optimizer, Update, copied, pure_step, step_of
from fshard.optim.leaves import Leaf, Leaves, map_shards, trainable
from fshard.optim.scaling import held_by
from fshard.testing.certify.beside import frozen_as, is_floating, known_to_all, largest, wide
from fshard.transforms.batch import placed
from fshard.transforms.patterns import chosen
from fshard.transforms.randomness import keyed_random

Units = str | Sequence[str] | int | None
"""What `fsdp` makes units of."""
_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}


@dataclass(frozen=True)
class Task:
    """What is to be trained, and how: what `certify` was told."""

    loss_fn: Callable[..., Any]
    params: PyTree
    buffers: PyTree
    batch: PyTree
    opt: Optimizer
    one: Mesh
    axis: str | tuple[str, ...]
    unit: Units
    batch_spec: PyTree
    steps: int
    seed: int
    options: Mapping[str, Any]

    @property
    def reproducible(self) -> bool:
        """Whether equal bits are promised."""
        return bool(self.options.get("reproducible"))

    @property
    def has_buffers(self) -> bool:
        """Whether the loss function takes and returns buffers."""
        return bool(self.options.get("has_buffers"))

    @property
    def compute(self) -> torch.dtype | None:
        """The dtype that is computed in, if not that of the parameters."""
        return self.options.get("compute") or _COMPUTE.get(self.options.get("precision"))

    def wide(self) -> Task:
        """Return the same task in float64."""
        options = {key: x for key, x in self.options.items() if key not in ("compute", "precision")}
        params, buffers, batch = (Leaves.of(tree).mapped(wide) for tree in (self.params, self.buffers, self.batch))
        return replace(self, params=params, buffers=buffers, batch=batch, options=options)

    def rounded(self, way: int) -> Task:
        """Return the same task in float64, with each number that goes in moved by a rounding, half of them up, half down."""
        draw = torch.Generator().manual_seed(self.seed)

        def moved(x: Any) -> Any:
            if not is_floating(x):
                return x
            signs = torch.randint(2, x.shape, generator=draw).to(x.device) * 2 - 1
            return frozen_as(x, wide(x) * (1 + way * signs * torch.finfo(self.compute or x.dtype).eps / 2))

        params, buffers, batch = (Leaves.of(tree).mapped(moved) for tree in (self.params, self.buffers, self.batch))
        return replace(self, params=params, buffers=buffers, batch=batch).wide()

    def placed(self, params: PyTree, mesh: Mesh, stage: int) -> PyTree:
        """Lay parameters on a mesh as a stage of ZeRO has them."""
        return fs.shard_params(params, fs.fsdp(self.axis, unit=self.unit) if stage == 3 else P(), mesh=mesh)


class Turn(NamedTuple):
    """Gradients that the optimizer was given in one step, parameters that it made, and buffers, in the order of the trees."""

    grads: list[Leaf]
    params: list[Leaf]
    buffers: list[Leaf]

    @staticmethod
    def of(*trees: PyTree) -> Turn:
        """Take the trees apart."""
        return Turn(*(Leaves.of(tree).leaves for tree in trees))

    def whole(self) -> Turn:
        """Return whole tensors."""
        return self.each(fs.unshard)

    def each(self, f: Callable[[Leaf], Leaf]) -> Turn:
        """Return f of each leaf; what is tied stays so."""
        return Turn(*(Leaves.of(leaves).mapped(f) for leaves in self))


# -- on a mesh ----------------------------------------------------------------------------------------------------


def on_mesh(task: Task, mesh: Mesh, stage: Any) -> list[Turn]:
    """Train on a mesh, and note what the optimizer is given."""
    opt: Any = fs.partition_optimizer(task.opt, mesh=mesh, axis=task.axis, stage=stage)
    write, turns, given = step_of(opt), list[Turn](), list[PyTree]()

    def noting(act: Update) -> Update:
        def noted(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            given.append(_times(grads, 1 / _scale(opt, state)))  # a copy: the step may use them up
            return act(grads, state, params)

        return noted

    params = task.placed(task.params, mesh, stage)
    state, buffers = opt.init(params), fs.device_put(task.buffers, Layout(mesh))
    noted = opt._replace(step=noting(write), update=noting(opt.update))
    step = fs.train_step(task.loss_fn, noted, mesh=mesh, batch=task.batch_spec, **task.options)
    for turn in range(task.steps):
        with keyed_random(task.seed, turn):
            params, state, *new, _ = step(params, state, *([buffers] if task.has_buffers else []), task.batch)
        buffers = new[0] if new else buffers
        turns.append(Turn.of(given[-1], copied(params), copied(buffers)).each(known_to_all))
    return turns


def _scale(opt: Any, state: PyTree) -> float:
    """Return what an optimizer wants the loss to be multiplied by."""
    return float(opt.loss_scale(state)) if getattr(opt, "loss_scale", None) is not None else 1.0


@torch.no_grad()
def _times(tree: PyTree, factor: float) -> PyTree:
    return Leaves.of(tree).mapped(lambda leaf: map_shards(lambda x: x * factor, leaf))


# -- on one device ------------------------------------------------------------------------------------------------


def on_one_device(task: Task, shifts: Sequence[Sequence[Leaf]] | None = None) -> list[Turn]:
    """Train with plain tensors, plain autograd and the optimizer as it is, on gradients that are shifted."""
    step, params, buffers, turns = pure_step(task.opt), task.params, task.buffers, list[Turn]()
    state = task.opt.init(params)
    with _default_dtype(Leaves.of(params).leaves):
        for turn in range(task.steps):
            scale = _scale(task.opt, state)
            _, grads, buffers = gradient(task, params, buffers, scale)
            grads = _times(grads, 1 / scale)
            moved = grads if shifts is None else _plus(grads, shifts[turn])
            params, state = step(_times(moved, scale), state, params)
            turns.append(Turn.of(grads, params, buffers))
    return turns


def overflows(turns: Sequence[Turn]) -> list[list[Leaf]]:
    """Return of the gradients of each step what is not finite, and 0 elsewhere: another run with that skips what this did."""
    return [[None if g is None else torch.where(g.isfinite(), 0, wide(g)) for g in turn.grads] for turn in turns]


def gradient(task: Task, params: PyTree, buffers: PyTree, scale: float = 1.0) -> tuple[Tensor, PyTree, PyTree]:
    """Return the loss, its scaled gradient and new buffers on whole tensors, on a mesh on which every axis has size 1."""
    at = Leaves.of(params)
    frozen = chosen(task.options.get("frozen"), at.paths, "frozen")
    moving = {
        id(x): x.detach().requires_grad_()
        for i, (x, first, fixed) in enumerate(zip(at.leaves, at.firsts(), frozen, strict=True))
        if i == first and trainable(x) and not fixed
    }

    def used(x: Any) -> Any:
        return _converted(moving.get(id(x), x.detach() if isinstance(x, Tensor) else x), task.compute)

    def program() -> tuple[Tensor, Sequence[Tensor | None], PyTree]:
        batch = Leaves.of(task.batch).mapped(lambda x: _converted(x, task.compute))
        result = task.loss_fn(at.mapped(used), *([buffers] if task.has_buffers else []), batch)
        loss, *more = result if task.has_buffers or task.options.get("has_aux") else (result,)
        loss, after = (
            loss.mean(),
            more[0] if task.has_buffers else buffers,
        )  # the mean of a number, or of one for each sample
        if not loss.requires_grad:
            return loss, (), after
        start = held_by(loss.dtype, scale)
        found = torch.autograd.grad(loss, [*moving.values()], torch.full_like(loss, start), allow_unused=True)
        return loss.detach(), [None if g is None else g * (scale / start) for g in found], after

    with torch.enable_grad():
        ((loss, found, after),) = fs.run(program, mesh=task.one)
    grads = dict(zip(moving, found, strict=False))
    after = Leaves.of(after).mapped(lambda x: x.detach() if isinstance(x, Tensor) else x)
    return loss, at.rebuild([grads.get(id(x)) for x in at.leaves]), after


def largest_in_parts(task: Task, mesh: Mesh, turns: Sequence[Turn]) -> list[float]:
    """Return the largest element of the gradients that devices sum up, each step, on the parameters before it."""
    whole = Mesh(mesh.axes, "virtual", mesh.device_type)
    batch, count = placed(task.batch, task.batch_spec, whole), task.options.get("accumulate", 1)
    slices = [slice for place in range(mesh.size) for slice in batch.slices(place, count) if slice.rows]
    params, buffers = Leaves.of(task.params), Leaves.of(task.buffers)
    found: list[float] = []
    for before in [Turn([], params.leaves, buffers.leaves), *turns[:-1]]:
        trees = params.rebuild(before.params), buffers.rebuild(before.buffers)
        grads = [gradient(replace(task, batch=batch.tree(slice.leaves)), *trees)[1] for slice in slices]
        sizes = [largest(g) for each in grads for g in Leaves.of(each).leaves]
        found.append(max(filter(isfinite, sizes), default=0.0))
    return found


def refuse_random(task: Task) -> None:
    """Raise if the loss function draws random numbers."""
    losses: list[Tensor] = []
    for key in ("one", "another"):
        with keyed_random(task.seed, key):
            losses.append(gradient(task, task.params, task.buffers)[0])
    if not torch.allclose(*losses, rtol=0, atol=0, equal_nan=True):
        raise PromiseError(
            f"certify: the loss function draws random numbers: twice on the same batch, it gave {losses[0].item():.6g} and "
            f"{losses[1].item():.6g}. No serial run draws what the devices draw. Call certify(..., reproducible=True), which "
            "compares with a mesh of one device, or give a loss function without dropout."
        )


def _plus(grads: PyTree, shifts: Sequence[Leaf]) -> PyTree:
    at = Leaves.of(grads)
    by = {id(g): shift for g, shift in zip(at.leaves, shifts, strict=True)}
    return at.mapped(lambda g: None if g is None else g + by[id(g)])


def _converted(x: Any, compute: torch.dtype | None) -> Any:
    return x.to(compute) if compute is not None and isinstance(x, Tensor) and x.is_floating_point() else x


@contextmanager
def _default_dtype(leaves: Sequence[Leaf]) -> Generator[None]:
    """Make float64 the dtype of new tensors where the parameters are float64, so that constants in a loss are, too."""
    before, floats = torch.get_default_dtype(), {x.dtype for x in leaves if is_floating(x)}
    torch.set_default_dtype(torch.float64 if floats and floats <= {torch.float64, torch.complex128} else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
