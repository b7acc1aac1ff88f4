"""`certify`: does a loss function with its optimizer train sharded as on one device?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import fshard as fs
from fshard.mesh.layout import Layout, Mesh, P, PyTree, as_axes, flatten
from fshard.optim.contract import Optimizer, Update, copied, pure_step, step_of
from fshard.optim.leaves import Leaf, Leaves, trainable
from fshard.optim.partition import Partitioned
from fshard.optim.per_device import array_optimizer
from fshard.testing.certificate import Certificate
from fshard.testing.certify.runs import (
    LOWER_DTYPES,
    Snapshot,
    certificate_of,
    gather_processes,
    is_floating,
    keep_frozen,
    on_device,
)
from fshard.transforms.patterns import chosen, named, parts_of
from fshard.transforms.shard_params import Rules

_CURE = (
    "The loss function or the optimizer draws random numbers or counts its calls. For dropout call "
    "certify(..., reproducible=True), which compares with a mesh of one device; what an optimizer counts must be in its state."
)
_HINTS = {
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

    Both runs are in float64, without `precision`, `compute` and `reduce`, and differ by 1e-9 at most, or by a mistake. Both
    optimizers are given the gradients of the run on one device, since Adam makes a step of a rounding. If the loss function
    casts to a lower dtype, the roundings of that dtype are allowed.

    With `reproducible=True`, as dropout needs, the dtypes stay, and bits are compared with a mesh of one device, or of one
    along all but local axes. Communicates as `train_step` does; on a process mesh all processes call it, with one verdict.

    Args:
        loss_fn: an ordinary function of one device: see `value_and_grad`. In the serial run its collectives have axes of
            size 1.
        params: full tensors.
        batch: full tensors; every step has the same.
        opt: an optimizer, not partitioned and without `loss_scaled`.
        mesh: the devices.
        axis: over which parameters (stage 3) and the optimizer (1 to 3) are sharded.
        unit: the units of stage 3: see `fsdp`.
        within: in every stage, the rules that shard dims of parameters along `local=` axes, which need them; P() if none is.
        batch_spec: the spec of the batch.
        buffers: full tensors that the loss function takes and returns, if it `has_buffers`; they are compared too.
        stages: of ZeRO.
        steps: number of steps.
        exact_inputs: replace parameters and the floats of the batch by small dyadic rationals: see `dyadic_like`.
        seed: of all random draws.
        options: those of `train_step`: accumulate, weight, has_aux, local, precision, reproducible, ...

    Raises a PromiseError if a repeated run on one device differs.

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
        raise ValueError(
            f"certify: mesh must have values, and steps must be at least 1; got {mesh}, {steps=}."
        )
    if options.get("local") and within is None:
        raise ValueError(
            f"certify(local={options['local']!r}): within must be the rules that shard parameters along these axes, as for "
            "fs.shard_params; got None. Give within=P() if all parameters are replicated along them."
        )
    opt = array_optimizer(opt, "certify")
    _validate_serial(opt, params=params, batch=batch, buffers=buffers)
    if options.setdefault("has_buffers", buffers is not None) != (buffers is not None):
        raise ValueError(
            "certify: a loss function that has_buffers is given them by buffers=, and none else is."
        )
    if exact_inputs:
        params, batch = dyadic_like(params, seed), dyadic_like(batch, seed + 1)
    reproducible = bool(options.get("reproducible"))
    if not reproducible:
        options = {name: x for name, x in options.items() if name not in LOWER_DTYPES}
    trees = params, () if buffers is None else buffers, batch
    params, buffers, batch = (on_device(tree, mesh, wide=not reproducible) for tree in trees)
    within = P() if within is None else within
    rules = within, fs.fsdp(axis, unit=unit, within=within)
    program = _Program(
        loss_fn, params, buffers, batch, batch_spec, opt, axis, rules, options, steps, seed
    )
    names = [named(parts_of(path)) or "params" for path in Leaves.of(params).paths]
    buffer_names = [
        f"buffers.{named(parts_of(path))}".rstrip(".") for path in Leaves.of(buffers).paths
    ]
    single, alone = (
        Mesh(
            tuple((name, n if name in axes else 1) for name, n in mesh.axes),
            "virtual",
            mesh.device_type,
        )
        for axes in ((), as_axes(options.get("local")))
    )
    train, names = partial(_train_sharded, program), Snapshot(names, names, buffer_names)
    train_serial = None if reproducible else partial(_train_serial, program, single)
    return certificate_of(mesh, alone, stages, train, names, _HINTS, train_serial, _CURE)


@dataclass(frozen=True)
class _Program:
    """A loss function, an optimizer and full tensors; `rules` shard the parameters in stages 0 to 2, and in stage 3."""

    loss_fn: Callable[..., Any]
    params: PyTree
    buffers: PyTree
    batch: PyTree
    batch_spec: PyTree
    opt: Optimizer
    axis: str | tuple[str, ...]
    rules: tuple[Rules, Rules]
    options: Mapping[str, Any]
    steps: int
    seed: int


def _train_sharded(
    program: _Program, mesh: Mesh, stage: Any, serial: Sequence[Snapshot]
) -> list[Snapshot]:
    """Train by `train_step`, in a stage of ZeRO; the optimizer is given the gradients of the serial run, if there is one."""
    opt: Any = fs.partition_optimizer(program.opt, mesh=mesh, axis=program.axis, stage=stage)
    snapshots, recorded = list[Snapshot](), list[PyTree]()

    def like(grad: Leaf, full: Tensor | None) -> Leaf:
        """Shard a full gradient as another one, unless only that exists or it is a sum not yet reduced."""
        is_sharded = isinstance(grad, fs.Sharded) and full is not None and not grad.spec.unreduced
        return fs.device_put(full, grad.layout) if is_sharded else grad

    def recording(act: Update) -> Update:
        def run(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            recorded.append(copied(grads))  # the step may overwrite them
            if serial:
                grads = Leaves.of(grads).mapped(like, serial[len(recorded) - 1].grads)
            return act(grads, state, params)

        return run

    params = fs.shard_params(program.params, program.rules[stage == 3], mesh=mesh)
    state, buffers = opt.init(params), fs.device_put(program.buffers, Layout(mesh))
    recorder = opt._replace(step=recording(step_of(opt)), update=recording(opt.update))
    step = fs.train_step(
        program.loss_fn, recorder, mesh=mesh, batch=program.batch_spec, **program.options
    )
    for turn in range(program.steps):
        with fs.keyed_random(program.seed, turn):
            params, state, *after, _ = step(
                params, state, *([buffers] * program.options["has_buffers"]), program.batch
            )
        buffers = after[0] if after else buffers
        trees = recorded[-1], copied(params), copied(buffers)
        snapshots.append(
            Snapshot(*(Leaves.of(tree).leaves for tree in trees)).mapped(gather_processes)
        )
    return snapshots


def _train_serial(program: _Program, alone: Mesh, key: int) -> list[Snapshot]:
    """Train on full tensors by plain autograd and the optimizer as it is; all axes have size 1."""
    params, buffers, snapshots = program.params, program.buffers, list[Snapshot]()
    step, state = pure_step(program.opt), program.opt.init(params)
    for turn in range(program.steps):
        with fs.keyed_random(program.seed, key, turn):
            ((grads, buffers),) = fs.run(partial(_gradients, program, params, buffers), mesh=alone)
            params, state = step(Leaves.of(params).rebuild(grads), state, params)
        snapshots.append(Snapshot(grads, Leaves.of(params).leaves, Leaves.of(buffers).leaves))
    return snapshots


@torch.enable_grad()
def _gradients(program: _Program, params: PyTree, buffers: PyTree) -> tuple[list[Leaf], PyTree]:
    """Return the gradients of a loss in the order of the parameters, and the buffers after it."""
    leaves, has_buffers = Leaves.of(params), program.options["has_buffers"]

    def variable(x: Leaf, is_frozen: bool) -> Leaf:
        return (
            x.detach().requires_grad_(trainable(x) and not is_frozen)
            if isinstance(x, Tensor)
            else x
        )

    tree = leaves.mapped(variable, chosen(program.options.get("frozen"), leaves.paths, "frozen"))
    result = program.loss_fn(tree, *([buffers] * has_buffers), program.batch)
    loss, *more = (
        result if has_buffers or {"has_aux", "aux"} & program.options.keys() else (result,)
    )
    if loss.requires_grad:
        loss.mean().backward()  # of one number, or of one for each sample
    buffers = Leaves.of(more[0] if has_buffers else ()).mapped(
        lambda x: x.detach() if isinstance(x, Tensor) else x
    )
    return [x.grad if isinstance(x, Tensor) else None for x in Leaves.of(tree).leaves], buffers


def dyadic_like(tree: PyTree, seed: int) -> PyTree:
    """Replace all floating tensors of a tree by random multiples of 1/8 from -1 to 1; other leaves and ties are unchanged.

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
    sharded = [
        name
        for name, tree in trees.items()
        if any(isinstance(x, fs.Sharded) for x in flatten(tree)[0])
    ]
    if sharded := [*sharded, *["the optimizer"] * isinstance(opt, Partitioned)]:
        raise fs.errors.LayoutError(
            f"certify: all tensors must be full and the optimizer not partitioned; got {', '.join(sharded)} sharded. "
            "Leave out fs.device_put, fs.shard_params and fs.partition_optimizer: certify shards for every stage."
        )
    if opt.loss_scale is not None:
        raise ValueError(
            "certify: opt must not scale the loss; got loss_scaled. Certify the optimizer inside of program."
        )
