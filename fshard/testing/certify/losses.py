"""`certify`: does a loss function with its optimizer train sharded as on one device?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import fshard as fs
from fshard.errors import LayoutError
from fshard.mesh.layout import Layout, Mesh, P, PyTree, as_axes, flatten
from fshard.mesh.layout.sharded import Sharded
from fshard.optim.contract import Optimizer, Update, copied, pure_step, step_of
from fshard.optim.leaves import Leaf, Leaves, trainable
from fshard.optim.partition import Partitioned
from fshard.optim.per_device import array_optimizer
from fshard.testing.certify.bounds import Field, bounded, equal_bits, judge
from fshard.testing.certify.certificate import Certificate, CertificateRow
from fshard.testing.certify.runs import Snapshot, Training, note
from fshard.testing.certify.shards import gather_processes, is_floating, keep_frozen, widen
from fshard.transforms.patterns import chosen, named, parts_of
from fshard.transforms.reproducible.randomness import keyed_random
from fshard.transforms.shard_params import Rules

_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}
_LOSS = (
    "The loss function draws random numbers or counts its calls. For dropout call certify(..., reproducible=True), which "
    "compares with a mesh of one device."
)
_CURES = {
    "grads": _LOSS,
    "buffers": _LOSS,
    "params": "The optimizer draws random numbers or counts its calls. Keep in its state what it counts.",
}
_HINTS: dict[Field, str] = {
    "params": ". A norm of all leaves is fs.optim.global_norm(tree). The gradient agrees: is the optimizer elementwise?",
    "buffers": ". It must not depend on each device's own samples: BatchNorm needs sync_batchnorm=axis",
}


def certify(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    opt: Optimizer,
    mesh: Mesh,
    *,
    axis: str | tuple[str, ...] = "data",
    unit: str | Sequence[str] | int | None = None,
    within: Rules = None,
    batch_spec: PyTree = P("data"),
    buffers: PyTree = None,
    stages: Sequence[Literal[0, 1, 2, 3]] = (0, 1, 2, 3),
    steps: int = 3,
    exact_inputs: bool = False,
    seed: int = 0,
    **options: Any,
) -> Certificate:
    """Train a few steps on a mesh and on one device, and compare every leaf after each step, on every device.

    Communicates as `train_step` does. On a process mesh it is a collective of all processes, with one verdict.

    A loss function that draws random numbers (dropout) needs `reproducible=True`, and is compared with a mesh of one
    device, or of one along all but local axes: otherwise each device draws its own, and no serial run draws the same.

    Args:
        loss_fn: an ordinary function of one device: see `value_and_grad`. In the serial run its collectives have axes of
            size 1.
        params: full tensors.
        batch: full tensors; every step has the same.
        opt: an optimizer, not partitioned and without `loss_scaled`.
        mesh: the devices.
        axis: over which parameters (stage 3) and the optimizer (1 to 3) are sharded.
        unit: the units of stage 3: see `fsdp`.
        within: in every stage, the rules that shard dims of parameters along `local=` axes.
        batch_spec: the spec of the batch.
        buffers: full tensors that the loss function takes and returns, if it `has_buffers`; they are compared too.
        stages: of ZeRO.
        steps: number of steps.
        exact_inputs: replace parameters and the floats of the batch by small dyadic rationals: see `dyadic_like`.
        seed: of all random draws.
        options: those of `train_step`: accumulate, weight, has_aux, local, precision, reproducible, ...

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
    step 0: the gradient is 2 times that of one device
    """
    if mesh.runtime == "abstract" or steps < 1:
        raise ValueError(f"certify: mesh must have values, and steps must be at least 1; got {mesh}, {steps=}.")
    opt = array_optimizer(opt, "certify")
    _validate_serial(opt, params=params, batch=batch, buffers=buffers)
    if bool(options.get("has_buffers", buffers is not None)) != (buffers is not None):
        raise ValueError("certify: a loss function that has_buffers is given them by buffers=, and none else is.")
    options["has_buffers"] = buffers is not None
    if exact_inputs:
        params, batch = dyadic_like(params, seed), dyadic_like(batch, seed + 1)
    params, buffers, batch = (
        Leaves.of(tree).mapped(lambda x: x.to(mesh.device_type) if isinstance(x, Tensor) else x)
        for tree in (params, buffers, batch)
    )
    one, alone = (
        Mesh(tuple((name, n if name in kept else 1) for name, n in mesh.axes), "virtual", mesh.device_type)
        for kept in ((), as_axes(options.get("local")))
    )
    program = _Program(loss_fn, params, buffers, batch, opt, one, options, seed, buffers is not None)
    within = P() if within is None else within
    spec = fs.fsdp(axis, unit=unit, within=within)
    train = partial(_train_sharded, program, axis, within, spec, batch_spec, steps)
    reproducible = bool(options.get("reproducible"))
    start = Snapshot([], Leaves.of(params).leaves, Leaves.of(buffers).leaves)
    if reproducible:
        reference = equal_bits(train(alone, 0))
    else:
        training = Training(
            start, lambda wide, sign: _Trainer(program, wide, sign), steps, seed, _CURES, program.compute
        )
        reference = bounded(training)
    names = [named(parts_of(path)) or "params" for path in Leaves.of(params).paths]
    paths = Leaves.of(buffers).paths if buffers is not None else ()
    buffer_names = [f"buffers.{named(parts_of(path))}".rstrip(".") for path in paths]
    rows: list[CertificateRow] = []
    for stage in stages:
        with note(f"in stage {stage}"):
            rows += judge(reference, train(mesh, stage), stage, _HINTS, names, buffer_names)
    return Certificate(mesh, steps, reproducible, tuple(rows))


@dataclass(frozen=True)
class _Program:
    """A loss function, an optimizer and full tensors; `one` is a mesh of one device with the axes of the mesh."""

    loss_fn: Callable[..., Any]
    params: PyTree
    buffers: PyTree
    batch: PyTree
    opt: Optimizer
    one: Mesh
    options: Mapping[str, Any]
    seed: int
    has_buffers: bool

    @property
    def compute(self) -> torch.dtype | None:
        """The dtype of the computation, if it is not that of the parameters."""
        return self.options.get("compute") or _COMPUTE.get(self.options.get("precision"))


def _train_sharded(
    it: _Program,
    axis: str | tuple[str, ...],
    within: Rules,
    fsdp: Rules,
    batch_spec: PyTree,
    steps: int,
    mesh: Mesh,
    stage: Any,
) -> list[Snapshot]:
    """Train by `train_step`, in a stage of ZeRO."""
    opt: Any = fs.partition_optimizer(it.opt, mesh=mesh, axis=axis, stage=stage)
    snapshots, given = list[Snapshot](), list[PyTree]()

    def recording(act: Update) -> Update:
        def recorded(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            given.append(copied(grads))  # the step may overwrite them
            return act(grads, state, params)

        return recorded

    params = fs.shard_params(it.params, fsdp if stage == 3 else within, mesh=mesh)
    state, buffers = opt.init(params), fs.device_put(it.buffers, Layout(mesh))
    recorder = opt._replace(step=recording(step_of(opt)), update=recording(opt.update))
    step = fs.train_step(it.loss_fn, recorder, mesh=mesh, batch=batch_spec, **it.options)
    for turn in range(steps):
        with keyed_random(it.seed, turn):
            params, state, *new, _ = step(params, state, *([buffers] if it.has_buffers else []), it.batch)
        buffers = new[0] if new else buffers
        trees = given[-1], copied(params), copied(buffers)
        snapshots.append(Snapshot(*(Leaves.of(tree).leaves for tree in trees)).mapped(gather_processes))
    return snapshots


class _Trainer:
    """Trains on full tensors by plain autograd and the optimizer as it is; all axes have size 1."""

    def __init__(self, program: _Program, wide: bool, sign: int) -> None:
        compute, draw = program.compute, torch.Generator().manual_seed(program.seed)
        eps = max(
            (torch.finfo(compute or x.dtype).eps for x in Leaves.of(program.params).leaves if is_floating(x)), default=0
        )

        def converted(x: Leaf) -> Leaf:
            return widen(x, sign, eps, draw) if wide else x

        trees = (program.params, program.buffers, program.batch)
        self._params, self._buffers, self._batch = (Leaves.of(tree).mapped(converted) for tree in trees)
        self._program, self._compute = program, None if wide else compute
        self._step, self._state = pure_step(program.opt), program.opt.init(self._params)

    def gradients(self, step: int) -> list[Leaf]:
        at, program = Leaves.of(self._params), self._program
        frozen = chosen(program.options.get("frozen"), at.paths, "frozen")
        moving = {
            id(x): x.detach().requires_grad_()
            for i, (x, first, fixed) in enumerate(zip(at.leaves, at.firsts, frozen, strict=True))
            if i == first and trainable(x) and not fixed
        }

        def used(x: Leaf) -> Leaf:
            return self._computed(moving.get(id(x), x.detach() if isinstance(x, Tensor) else x))

        def loss_and_grads() -> tuple[Sequence[Tensor | None], PyTree]:
            batch, buffers = Leaves.of(self._batch).mapped(self._computed), [self._buffers] * program.has_buffers
            result = program.loss_fn(at.mapped(used), *buffers, batch)
            loss, *more = result if program.has_buffers or {"has_aux", "aux"} & program.options.keys() else (result,)
            loss = loss.mean()  # of one number, or of one for each sample
            after = more[0] if program.has_buffers else None
            if not loss.requires_grad:
                return (), after
            return torch.autograd.grad(loss, [*moving.values()], allow_unused=True), after

        with torch.enable_grad():
            ((found, after),) = fs.run(loss_and_grads, mesh=program.one)
        self._buffers = Leaves.of(after).mapped(lambda x: x.detach() if isinstance(x, Tensor) else x)
        grads = dict(zip(moving, found, strict=False))
        return [grads.get(id(x)) for x in at.leaves]

    def _computed(self, x: Leaf) -> Leaf:
        return x.to(self._compute) if self._compute is not None and is_floating(x) and not x.is_complex() else x

    def update(self, grads: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
        tree = Leaves.of(self._params).rebuild(grads)
        self._params, self._state = self._step(tree, self._state, self._params)
        return Leaves.of(self._params).leaves, Leaves.of(self._buffers).leaves


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


def _validate_serial(opt: Optimizer, **trees: PyTree) -> None:
    """Raise if an argument is sharded already, or if the optimizer scales the loss."""
    wrong = [name for name, tree in trees.items() if any(isinstance(x, Sharded) for x in flatten(tree)[0])]
    wrong += ["the optimizer"] if isinstance(opt, Partitioned) else []
    if wrong:
        raise LayoutError(
            f"certify: all tensors must be full and the optimizer not partitioned; got {', '.join(wrong)} sharded. "
            "Leave out fs.device_put, fs.shard_params and fs.partition_optimizer: certify shards for every stage."
        )
    if opt.loss_scale is not None:
        raise ValueError("certify: opt must not scale the loss; got loss_scaled. Certify the optimizer inside of it.")
