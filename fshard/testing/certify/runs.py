"""The trainings that `certify` compares: sharded by `train_step`, serial by plain autograd, and serial in float64.

The serial run is a function of its arguments, or nothing could be compared: losses and optimizer steps are repeated and have
to be the same.  The float64 run repeats the random draws of the serial run (a mask from the loss function's own generator).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard.errors import PromiseError
from fshard.mesh.layout import Layout, Mesh, P, PyTree, broadcast_prefix, flatten
from fshard.optim.contract import Optimizer, Update, copied, pure_step, step_of
from fshard.optim.leaves import Leaf, Leaves, map_shards, trainable
from fshard.optim.scaling import finite_scale
from fshard.testing.certify.shards import gather_processes, is_floating, keep_frozen, largest, widen
from fshard.transforms.patterns import chosen, named, parts_of
from fshard.transforms.reproducible.randomness import keyed_random

Units = str | Sequence[str] | int | None
"""The units of `fsdp`."""
_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}


@dataclass(frozen=True)
class CertifyTask:
    """The arguments of `certify`; `one` is a mesh of one device with the same axes."""

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
        """True if equal bits are promised."""
        return bool(self.options.get("reproducible"))

    @property
    def has_buffers(self) -> bool:
        """True if the loss function takes and returns buffers."""
        return bool(self.options.get("has_buffers"))

    @property
    def compute(self) -> torch.dtype | None:
        """The dtype of the computation, if it is not that of the parameters."""
        return self.options.get("compute") or _COMPUTE.get(self.options.get("precision"))

    @property
    def names(self) -> list[str]:
        """The names of the parameters, in the order of the tree."""
        return [named(parts_of(path)) or "params" for path in Leaves.of(self.params).paths]

    def mapped(self, f: Callable[[Any], Any]) -> CertifyTask:
        """Apply a function to each leaf of parameters, buffers and batch."""
        params, buffers, batch = (Leaves.of(tree).mapped(f) for tree in (self.params, self.buffers, self.batch))
        return replace(self, params=params, buffers=buffers, batch=batch)

    def widened(self) -> CertifyTask:
        """Convert the task to float64."""
        options = {key: x for key, x in self.options.items() if key not in ("compute", "precision")}
        return replace(self.mapped(widen), options=options)

    def perturbed(self, sign: int) -> CertifyTask:
        """Convert the task to float64 and move each number by a rounding, half of them up and half down."""
        draw = torch.Generator().manual_seed(self.seed)
        return self.mapped(lambda x: perturb(x, sign, draw, self.compute)).widened()

    def place(self, params: PyTree, mesh: Mesh, stage: int) -> PyTree:
        """Shard parameters as a stage of ZeRO does."""
        return fs.shard_params(params, fs.fsdp(self.axis, unit=self.unit) if stage == 3 else P(), mesh=mesh)


class Snapshot(NamedTuple):
    """One step of a run: the gradients given to the optimizer, the parameters and buffers after it; leaves in tree order."""

    grads: list[Leaf]
    params: list[Leaf]
    buffers: list[Leaf]

    @staticmethod
    def of(*trees: PyTree) -> Snapshot:
        """Flatten the trees."""
        return Snapshot(*(Leaves.of(tree).leaves for tree in trees))

    def mapped(self, f: Callable[[Leaf], Leaf]) -> Snapshot:
        """Apply a function to each leaf; tied leaves stay tied."""
        return Snapshot(*(Leaves.of(leaves).mapped(f) for leaves in self))


def perturb(x: Any, sign: int, draw: torch.Generator, dtype: torch.dtype | None = None) -> Any:
    """Convert a floating tensor to float64, each number moved by half a unit in the last place of its own dtype or
    `dtype`.
    """
    if not is_floating(x):
        return x
    signs = torch.randint(2, x.shape, generator=draw).to(x.device) * 2 - 1
    return keep_frozen(x, widen(x) * (1 + sign * signs * torch.finfo(dtype or x.dtype).eps / 2))


class RandomDraws:
    """Tensors that a run draws at random, from any generator: recorded in one run, repeated in others."""

    def __init__(self) -> None:
        self.drawn: list[Any] = []

    def record(self) -> TorchDispatchMode:
        """Record the draws in the context."""
        return _Drawing(lambda found: self.drawn.append(found.clone()))

    def repeat(self) -> TorchDispatchMode:
        """Overwrite the draws in the context by the recorded ones; draws of another shape are unchanged."""
        left = iter(self.drawn)

        def overwrite(found: Tensor) -> None:
            recorded = next(left, None)
            if recorded is not None and recorded.shape == found.shape:
                found.copy_(recorded)

        return _Drawing(overwrite)


class _Drawing(TorchDispatchMode):
    """Calls a function with each tensor that is drawn at random."""

    def __init__(self, handle: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._handle = handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            for found in flatten(result)[0]:
                self._handle(found)
        return result


# -- sharded ------------------------------------------------------------------------------------------------------


def sharded_run(task: CertifyTask, mesh: Mesh, stage: Any) -> list[Snapshot]:
    """Train on a mesh by `train_step`, with a partitioned optimizer that notes its gradients."""
    opt: Any = fs.partition_optimizer(task.opt, mesh=mesh, axis=task.axis, stage=stage)
    snapshots, given = list[Snapshot](), list[PyTree]()

    def recording(act: Update) -> Update:
        def recorded_opt(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            given.append(_times(grads, 1 / _scale(opt, state)))  # a copy: the step may overwrite them
            return act(grads, state, params)

        return recorded_opt

    params = task.place(task.params, mesh, stage)
    state, buffers = opt.init(params), fs.device_put(task.buffers, Layout(mesh))
    recorded_opt = opt._replace(step=recording(step_of(opt)), update=recording(opt.update))
    step = fs.train_step(task.loss_fn, recorded_opt, mesh=mesh, batch=task.batch_spec, **task.options)
    for turn in range(task.steps):
        with keyed_random(task.seed, turn):
            params, state, *new, _ = step(params, state, *([buffers] if task.has_buffers else []), task.batch)
        buffers = new[0] if new else buffers
        snapshots.append(Snapshot.of(given[-1], copied(params), copied(buffers)).mapped(gather_processes))
    return snapshots


def _scale(opt: Any, state: PyTree) -> float:
    """Return an optimizer's factor of the loss."""
    return float(opt.loss_scale(state)) if getattr(opt, "loss_scale", None) is not None else 1.0


@torch.no_grad()
def _times(tree: PyTree, factor: float) -> PyTree:
    return Leaves.of(tree).mapped(lambda leaf: map_shards(lambda x: x * factor, leaf))


# -- serial -------------------------------------------------------------------------------------------------------


def serial_run(
    task: CertifyTask,
    draws: TorchDispatchMode | None = None,
    shifts: Sequence[Sequence[Leaf]] | None = None,
    key: str = "",
) -> list[Snapshot]:
    """Train on plain tensors with plain autograd and the optimizer as it is; `shifts` are added to the gradients."""
    step, params, buffers, snapshots = pure_step(task.opt), task.params, task.buffers, list[Snapshot]()
    state = task.opt.init(params)
    for turn in range(task.steps):
        with (
            default_dtype(_is_wide(Leaves.of(params).leaves)),
            keyed_random(task.seed, key, turn),
            draws or nullcontext(),
        ):
            scale = _scale(task.opt, state)
            grads, buffers = gradient(task, params, buffers, scale)
            grads = _times(grads, 1 / scale)
            moved = grads if shifts is None else _plus(grads, shifts[turn])
            params, state = step(_times(moved, scale), state, params)
        snapshots.append(Snapshot.of(grads, params, buffers))
    return snapshots


def gradient(task: CertifyTask, params: PyTree, buffers: PyTree, scale: float = 1.0) -> tuple[PyTree, PyTree]:
    """Compute the gradient times `scale`, and new buffers, on full tensors; all axes have size 1."""
    at = Leaves.of(params)
    frozen = chosen(task.options.get("frozen"), at.paths, "frozen")
    moving = {
        id(x): x.detach().requires_grad_()
        for i, (x, first, fixed) in enumerate(zip(at.leaves, at.firsts, frozen, strict=True))
        if i == first and trainable(x) and not fixed
    }

    def used(x: Any) -> Any:
        return _converted(moving.get(id(x), x.detach() if isinstance(x, Tensor) else x), task.compute)

    def program() -> tuple[Sequence[Tensor | None], PyTree]:
        batch = Leaves.of(task.batch).mapped(lambda x: _converted(x, task.compute))
        result = task.loss_fn(at.mapped(used), *([buffers] if task.has_buffers else []), batch)
        loss, *more = result if task.has_buffers or task.options.get("has_aux") else (result,)
        loss, after = loss.mean(), more[0] if task.has_buffers else buffers  # of one number, or of one for each sample
        if not loss.requires_grad:
            return (), after
        start = finite_scale(loss.dtype, scale)
        found = torch.autograd.grad(loss, [*moving.values()], torch.full_like(loss, start), allow_unused=True)
        return [None if g is None else g * (scale / start) for g in found], after

    with torch.enable_grad():
        ((found, after),) = fs.run(program, mesh=task.one)
    grads = dict(zip(moving, found, strict=False))
    after = Leaves.of(after).mapped(lambda x: x.detach() if isinstance(x, Tensor) else x)
    return at.rebuild([grads.get(id(x)) for x in at.leaves]), after


def check_repeatable(who: str, serial: Sequence[Snapshot], again: Sequence[Snapshot], cures: Mapping[str, str]) -> None:
    """Raise if two serial runs differ by more than a kernel's own order of sums may."""
    for step, (one, other) in enumerate(zip(serial, again, strict=True)):
        for what, left, right in zip(Snapshot._fields, one, other, strict=True):
            for x, y in zip(left, right, strict=True):
                if x is None or torch.equal(x, y):
                    continue
                error = (x.to(torch.complex128) - y.to(torch.complex128)).abs()
                if (error > 1e-3 * largest(x)).any():
                    raise PromiseError(
                        f"{who}: on one device a run must give the same results when it is repeated; got others for the {what} "
                        f"of step {step}. {cures[what]}"
                    )


def nonfinite_parts(run: Sequence[Snapshot]) -> list[list[Leaf]]:
    """Return the non-finite elements of gradients, else 0: a run with these shifts skips the same steps."""
    return [[None if g is None else torch.where(g.isfinite(), 0, widen(g)) for g in step.grads] for step in run]


def largest_summands(task: CertifyTask, mesh: Mesh, run: Sequence[Snapshot]) -> list[float]:
    """Compute, for each step, the largest element of the gradients that devices and turns of accumulate add up."""
    at = Leaves.of(task.batch)
    specs = broadcast_prefix(task.batch_spec, task.batch, none_is_leaf=True)
    axes = [
        spec.dims(x.ndim)[0] if isinstance(spec, P) and isinstance(x, Tensor) and x.ndim else ()
        for x, spec in zip(at.leaves, specs, strict=True)
    ]
    count = max((prod(mesh.shape[axis] for axis in each) for each in axes), default=1) * task.options.get(
        "accumulate", 1
    )
    tasks: list[CertifyTask] = [task]
    for i in range(count):
        leaves = [x.tensor_split(count)[i] if cut else x for x, cut in zip(at.leaves, axes, strict=True)]
        if all(len(x) for x, cut in zip(leaves, axes, strict=True) if cut):
            tasks.append(replace(task, batch=at.rebuild(leaves)))
    params, buffers, found = Leaves.of(task.params), Leaves.of(task.buffers), list[float]()
    for before in [Snapshot([], params.leaves, buffers.leaves), *run[:-1]]:
        trees = params.rebuild(before.params), buffers.rebuild(before.buffers)
        sizes = [largest(g) for each in tasks for g in Leaves.of(gradient(each, *trees)[0]).leaves]
        found.append(max((size for size in sizes if size < torch.inf), default=0.0))
    return found


def _plus(grads: PyTree, shifts: Sequence[Leaf]) -> PyTree:
    at = Leaves.of(grads)
    by = {id(g): shift for g, shift in zip(at.leaves, shifts, strict=True)}
    return at.mapped(lambda g: None if g is None else g + by[id(g)])


def _converted(x: Any, compute: torch.dtype | None) -> Any:
    return x.to(compute) if compute is not None and isinstance(x, Tensor) and x.is_floating_point() else x


@contextmanager
def default_dtype(wide: bool) -> Generator[None]:
    """Make float64 the dtype of new tensors if `wide`, so that constants have it, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if wide else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _is_wide(leaves: Sequence[Leaf]) -> bool:
    floats = {x.dtype for x in leaves if is_floating(x)}
    return bool(floats) and floats <= {torch.float64, torch.complex128}
