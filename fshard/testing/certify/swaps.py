"""A step repeated without its reduction: the summand of each device, and what it would be if a collective were another.

loss_fn     y = fs.pmean(own @ w, "model")          found: fs.pmean over "model", at this line
repeated    y = 2 * fs.pmean(own @ w, "model")      if the gradient is right now, fs.psum was meant
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fshard as fs
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.scope import Group, require, trying
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.spmd import held
from fshard.mesh.tree import flatten
from fshard.optim.leaves import Leaf, Leaves
from fshard.source import Site
from fshard.testing.certify.runs import Snapshot, Task
from fshard.testing.certify.shards import gather_processes
from fshard.transforms.agree import mark
from fshard.transforms.randomness import keyed_random


class Call(NamedTuple):
    """A psum or pmean in the loss function: its name, axes and source line."""

    what: str
    axes: tuple[str, ...]
    site: Site


class Summands(NamedTuple):
    """Gradients that are unreduced over `axes`, the loss of each device, and the psums and pmeans of the loss function."""

    axes: tuple[str, ...]
    grads: list[Leaf]
    losses: Tensor
    calls: tuple[Call, ...]


def summands(
    task: Task, mesh: Mesh, stage: int, step: int, before: Snapshot, factor: Callable[[Call], float] = lambda call: 1.0
) -> Summands:
    """Repeat the gradient of a step without its reduction, the results of psum and pmean multiplied by `factor`."""
    wanted = {axis for spec in flatten(task.batch_spec)[0] if isinstance(spec, P) for axis in spec.axes}
    axes = tuple(axis for axis in mesh.axis_names if axis in wanted and mesh.shape[axis] > 1)
    unreduced, losses = Layout(mesh, P(unreduced=axes)), dict[int, Tensor]()
    left_out = ("donate", "precision", "gradients", "compute")
    options: dict[str, Any] = {key: x for key, x in task.options.items() if key not in left_out}
    calls: dict[int, dict[Call, None]] = {device: {} for device in held(mesh)}

    def loss_fn(*args: Any) -> Any:
        here = require("certify").device

        def multiply(what: str, group: Group, site: Site) -> float:
            if what not in ("fs.psum", "fs.pmean") or group.size == 1:
                return 1.0
            call = Call(what, group.axes, site._replace(leaves=()))
            calls[here][call] = None
            return factor(call)

        with trying(multiply):
            result = task.loss_fn(*args)
        loss: Tensor = result[0] if task.has_buffers or task.options.get("has_aux") else result
        losses[here] = losses.get(here, 0) + loss.detach().mean().double()
        return result

    params = task.place(Leaves.of(task.params).rebuild(before.params), mesh, stage)
    buffers = [Leaves.of(task.buffers).rebuild(before.buffers)] if task.has_buffers else []
    run = fs.value_and_grad(
        loss_fn, mesh=mesh, batch=task.batch_spec, gradients=lambda layout: unreduced, compute=task.compute, **options
    )
    with keyed_random(task.seed, step):
        _, grads = run(params, *buffers, task.batch)
    rows = [torch.stack([losses[device], losses[device].new_tensor(mark([*calls[device]]))]) for device in held(mesh)]
    one_each = Layout(mesh, P(mesh.axis_names))
    every, marks = fs.unshard(Sharded((2 * mesh.size,), one_each, tuple(rows))).view(-1, 2).unbind(1)
    alike = bool((marks == marks[0]).all())  # processes that differ could not repeat the same one
    found = tuple(calls[held(mesh)[0]]) if alike else ()
    return Summands(axes, [gather_processes(leaf) for leaf in Leaves.of(grads).leaves], every, found)


def swapped_gradients(
    task: Task, mesh: Mesh, stage: int, step: int, before: Snapshot, calls: Sequence[Call]
) -> dict[str, list[Leaf]]:
    """Compute the gradients with each psum as an average over some of its axes, each pmean as a sum; by the reason."""
    found: dict[str, list[Leaf]] = {}
    for call in calls:
        known: dict[float, list[Leaf]] = {}
        for axes in subsets(call.axes):
            n = prod(mesh.shape[axis] for axis in axes)
            times, sums = (1 / n, True) if call.what == "fs.psum" else (float(n), False)
            if times not in known:
                swap = summands(
                    task, mesh, stage, step, before, lambda other, call=call, x=times: x if other == call else 1.0
                )
                known[times] = [fs.unshard(leaf) for leaf in swap.grads]
            does = f"{'sums' if sums else 'averages'} over {quoted(axes)}"
            meant = f"should {'average' if sums else 'sum'}: its result is {n} times too {'large' if sums else 'small'}"
            found[f"{call.what} over {quoted(call.axes)}, at {call.site}, {does} where it {meant}"] = known[times]
    return found


def subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """List the choices of one or more axes, all of them first."""
    return [some for size in range(len(axes), 0, -1) for some in combinations(axes, size)]


def quoted(axes: tuple[str, ...]) -> str:
    """Write axes as error messages have them."""
    return " x ".join(f'"{axis}"' for axis in axes)
