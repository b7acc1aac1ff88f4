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
from fshard.optim.contract import Optimizer, copied, pure_step
from fshard.optim.leaves import Leaf, Leaves, trainable
from fshard.optim.per_device.run import on_arrays
from fshard.optim.sharded.optimizer import ShardedOptimizer
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
    "certify(..., reproducible=True), which compares with a mesh of one device; what an optimizer "
    "counts must be in its state."
)
_HINTS = {
    "params": ". A norm of all leaves is fs.optim.global_norm(tree). The gradient agrees: is the "
    "optimizer elementwise?",
    "buffers": ". It must not depend on each device's own samples: BatchNorm needs "
    "sync_batchnorm=axis",
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
    """Train a few steps on a mesh and on one device; compare every leaf after each step.

    On every device. Both runs are in float64, without `precision`, `compute` and `reduce`, and
    differ by 1e-9 at most, or by a mistake. Both optimizers are given the gradients of the run on
    one device, since Adam makes a step of a rounding. If the loss function casts to a lower dtype,
    the roundings of that dtype are allowed.

    With `reproducible=True`, as dropout needs, the dtypes stay, and bits are compared with a mesh
    of one device, or of one along all but local axes. Communicates as `train_step` does; on a
    process mesh all processes call it, with one verdict.

    Args:
        loss_fn: an ordinary function of one device: see `value_and_grad`. In the serial run its
            collectives have axes of size 1.
        params: full tensors.
        batch: full tensors; every step has the same.
        opt: an optimizer, not partitioned and without `loss_scaled`.
        mesh: the devices.
        axis: over which parameters (stage 3) and the optimizer (1 to 3) are sharded.
        unit: the units of stage 3: see `fsdp`.
        within: in every stage, the rules that shard dims of parameters along `local=` axes, which
            need them; P() if none is.
        batch_spec: the spec of the batch.
        buffers: full tensors that the loss function takes and returns, if it `has_buffers`; they
            are compared too.
        stages: of ZeRO.
        steps: number of steps.
        exact_inputs: replace parameters and the floats of the batch by small dyadic rationals: see
            `dyadic_like`.
        seed: of all random draws.
        options: those of `train_step`: accumulate, weight, has_aux, local, precision, reproducible,
            ...

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
    step 0: the gradient is 2 times that of one device. The loss is ...
    """
    has_buffers = options.setdefault("has_buffers", buffers is not None)
    _validate_options(mesh, steps, options, within, has_buffers, buffers is not None)
    _validate_serial(opt, params=params, batch=batch, buffers=buffers)
    opt = on_arrays(opt, "certify")
    if exact_inputs:
        params = dyadic_like(params, seed)
        batch = dyadic_like(batch, seed + 1)

    is_in_float64 = not options.get("reproducible")
    if is_in_float64:
        options = {name: x for name, x in options.items() if name not in LOWER_DTYPES}
    params = on_device(params, mesh, wide=is_in_float64)
    buffers = on_device(() if buffers is None else buffers, mesh, wide=is_in_float64)
    batch = on_device(batch, mesh, wide=is_in_float64)

    if within is None:
        within = P()
    program = _Program(
        loss_fn=loss_fn,
        params=params,
        buffers=buffers,
        batch=batch,
        batch_spec=batch_spec,
        opt=opt,
        axis=axis,
        rules=within,
        fsdp_rules=fs.fsdp(axis, unit=unit, within=within),
        options=options,
        steps=steps,
        seed=seed,
    )
    train = partial(_train_sharded, program)
    train_serial = None
    if is_in_float64:
        train_serial = partial(_train_serial, program, _mesh_of_one(mesh, ()))
    alone = _mesh_of_one(mesh, as_axes(options.get("local")))
    names = _names_of(params, buffers)
    return certificate_of(mesh, alone, stages, train, names, _HINTS, train_serial, _CURE)


def _validate_options(
    mesh: Mesh,
    steps: int,
    options: Mapping[str, Any],
    within: Rules,
    has_buffers: bool,
    are_buffers_given: bool,
) -> None:
    if mesh.runtime == "abstract" or steps < 1:
        raise ValueError(
            f"certify: mesh must have values, and steps must be at least 1; got {mesh}, {steps=}."
        )
    if options.get("local") and within is None:
        raise ValueError(
            f"certify(local={options['local']!r}): within must be the rules that shard parameters "
            "along these axes, as for fs.shard_params; got None. Give within=P() if all parameters "
            "are replicated along them."
        )
    if has_buffers != are_buffers_given:
        raise ValueError(
            "certify: a loss function that has_buffers is given them by buffers=, and none else is."
        )


def _mesh_of_one(mesh: Mesh, kept_axes: tuple[str, ...]) -> Mesh:
    """Return a virtual mesh of one device along all axes but some, which keep their sizes."""
    axes = [(name, n if name in kept_axes else 1) for name, n in mesh.axes]
    return Mesh(tuple(axes), "virtual", mesh.device_type)


def _names_of(params: PyTree, buffers: PyTree) -> Snapshot:
    """Return the names of all leaves. A gradient has the name of its parameter."""
    names = [named(parts_of(path)) or "params" for path in Leaves.of(params).paths]
    buffer_names: list[str] = []
    for path in Leaves.of(buffers).paths:
        buffer_names.append(f"buffers.{named(parts_of(path))}".rstrip("."))
    return Snapshot(names, names, buffer_names)


@dataclass(frozen=True)
class _Program:
    """A loss function, an optimizer and full tensors.

    `rules` shard the parameters in stages 0 to 2, `fsdp_rules` in stage 3.
    """

    loss_fn: Callable[..., Any]
    params: PyTree
    buffers: PyTree
    batch: PyTree
    batch_spec: PyTree
    opt: Optimizer
    axis: str | tuple[str, ...]
    rules: Rules
    fsdp_rules: Rules
    options: Mapping[str, Any]
    steps: int
    seed: int

    @property
    def has_buffers(self) -> bool:
        """True if the loss function takes buffers."""
        return self.options["has_buffers"]


def _train_sharded(
    program: _Program, mesh: Mesh, stage: Any, serial: Sequence[Snapshot]
) -> list[Snapshot]:
    """Train by `train_step`, in a stage of ZeRO.

    The optimizer is given the gradients of the serial run, if there is one.
    """
    recorded: list[PyTree] = []

    def record_gradients(grads: PyTree) -> PyTree:
        """Record gradients; return those of the serial run, if there is one."""
        recorded.append(copied(grads))  # the step may overwrite them
        if not serial:
            return grads
        step = len(recorded) - 1
        return Leaves.of(grads).mapped(_sharded_like, serial[step].grads)

    opt = fs.partition_optimizer(program.opt, mesh=mesh, axis=program.axis, stage=stage)
    recorder = opt.replaced(map_gradients=record_gradients)
    step = fs.train_step(
        program.loss_fn, recorder, mesh=mesh, batch=program.batch_spec, **program.options
    )
    rules = program.fsdp_rules if stage == 3 else program.rules
    params = fs.shard_params(program.params, rules, mesh=mesh)
    state = opt.init(params)
    buffers = fs.device_put(program.buffers, Layout(mesh))

    snapshots: list[Snapshot] = []
    for number in range(program.steps):
        with fs.keyed_random(program.seed, number):
            if program.has_buffers:
                params, state, buffers, metrics = step(params, state, buffers, program.batch)
            else:
                params, state, metrics = step(params, state, program.batch)
        trees = (recorded[-1], copied(params), copied(buffers), metrics["loss"])
        snapshot = Snapshot(*[Leaves.of(tree).leaves for tree in trees])
        snapshots.append(snapshot.mapped(gather_processes))
    return snapshots


def _sharded_like(grad: Leaf, full: Tensor | None) -> Leaf:
    """Shard a full gradient as another one.

    The other one is returned if it is a sum that is not reduced yet, or if only one of them exists.
    """
    is_sharded = isinstance(grad, fs.Sharded) and full is not None and not grad.spec.unreduced
    return fs.device_put(full, grad.layout) if is_sharded else grad


def _train_serial(program: _Program, alone: Mesh, key: int) -> list[Snapshot]:
    """Train on full tensors by plain autograd and the optimizer as it is.

    All axes have size 1.
    """
    params = program.params
    buffers = program.buffers
    step = pure_step(program.opt)
    state = program.opt.init(params)
    snapshots: list[Snapshot] = []
    for number in range(program.steps):
        with fs.keyed_random(program.seed, key, number):
            run = partial(_loss_and_gradients, program, params, buffers)
            ((loss, grads, buffers),) = fs.run(run, mesh=alone)
            params, state = step(Leaves.of(params).rebuild(grads), state, params)
        trees = (grads, params, buffers, loss)
        snapshots.append(Snapshot(*[Leaves.of(tree).leaves for tree in trees]))
    return snapshots


@torch.enable_grad()
def _loss_and_gradients(
    program: _Program, params: PyTree, buffers: PyTree
) -> tuple[Tensor, list[Leaf], PyTree]:
    """Return a loss, its gradients in the order of the parameters, and the buffers after it."""
    leaves = Leaves.of(params)

    def variable(x: Leaf, is_frozen: bool) -> Leaf:
        if not isinstance(x, Tensor):
            return x
        return x.detach().requires_grad_(trainable(x) and not is_frozen)

    frozen = chosen(program.options.get("frozen"), leaves.paths, "frozen")
    tree = leaves.mapped(variable, frozen)
    loss, new_buffers = _loss_and_buffers(program, tree, buffers)
    loss = loss.mean()  # of one number, or of one for each sample
    if loss.requires_grad:
        loss.backward()

    grads = [x.grad if isinstance(x, Tensor) else None for x in Leaves.of(tree).leaves]
    detached = Leaves.of(new_buffers).mapped(lambda x: x.detach() if isinstance(x, Tensor) else x)
    return loss.detach(), grads, detached


def _loss_and_buffers(program: _Program, tree: PyTree, buffers: PyTree) -> tuple[Tensor, PyTree]:
    """Call the loss function; return its loss, and its buffers, () if it has none."""
    if program.has_buffers:
        loss, new_buffers, *_ = program.loss_fn(tree, buffers, program.batch)
        return loss, new_buffers
    result = program.loss_fn(tree, program.batch)
    if {"has_aux", "aux"} & program.options.keys():
        result, *_ = result
    return result, ()


def dyadic_like(tree: PyTree, seed: int) -> PyTree:
    """Replace all floating tensors of a tree by random multiples of 1/8 from -1 to 1.

    Other leaves and ties are unchanged. Sums of 2 million of them, and of 262,144 products of two,
    are exact in float32 in any order: these are multiples of 1/8 and of 1/64, and 24 bits have all
    of them up to 2^21 and 2^18. So linear functions have the same bits in any layout.

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
        if x.is_complex():
            numbers = torch.view_as_complex(numbers)
        return keep_frozen(x, numbers)

    return Leaves.of(tree).mapped(draw)


def _validate_serial(opt: Optimizer, **trees: PyTree) -> None:
    """Raise if an argument is sharded already, or if the optimizer scales the loss."""
    sharded: list[str] = []
    for name, tree in trees.items():
        leaves, _ = flatten(tree)
        if any(isinstance(x, fs.Sharded) for x in leaves):
            sharded.append(name)
    if isinstance(opt, ShardedOptimizer):
        sharded.append("the optimizer")
    if sharded:
        raise fs.errors.LayoutError(
            "certify: all tensors must be full and the optimizer not partitioned; "
            f"got {', '.join(sharded)} sharded. Leave out fs.device_put, fs.shard_params and "
            "fs.partition_optimizer: certify shards for every stage."
        )
    if opt.loss_scale is not None:
        raise ValueError(
            "certify: opt must not scale the loss; got loss_scaled. Certify the optimizer inside "
            "of program."
        )
