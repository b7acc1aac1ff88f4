"""A step once more, from the parameters that it began with: what devices have before any sum over them, and what they would
have if a collective in the loss function were another.

    loss_fn     y = fs.pmean(own @ w, "model")          asked: fs.pmean over "model", there
    trial       y = 2 * fs.pmean(own @ w, "model")      is the gradient right then?  So fs.psum was meant
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fshard as fs
from fshard.mesh.layout import Layout
from fshard.mesh.scope import Group, require, trying
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.spmd import held
from fshard.mesh.tree import flatten
from fshard.optim.leaves import Leaf, Leaves
from fshard.source import Site
from fshard.testing.certify.beside import known_to_all
from fshard.testing.certify.comparison import Comparison
from fshard.transforms.agree import mark
from fshard.transforms.randomness import keyed_random


class Asked(NamedTuple):
    """A sum or an average that the loss function asks for: its name, over which axes, and the line."""

    what: str
    axes: tuple[str, ...]
    site: Site


class Again(NamedTuple):
    """Gradients of devices that are to be summed, over which axes, the loss of each device, and what all have asked for."""

    axes: tuple[str, ...]
    grads: list[Leaf]
    losses: Tensor
    asked: tuple[Asked, ...]


def step_again(it: Comparison, step: int, trial: Callable[[Asked], float] = lambda asked: 1.0) -> Again:
    """Take the gradients of a step again, with the results of sums and averages times what `trial` says."""
    task, mesh = it.task, it.mesh
    wanted = {axis for spec in flatten(task.batch_spec)[0] if isinstance(spec, P) for axis in spec.axes}
    axes = tuple(axis for axis in mesh.axis_names if axis in wanted and mesh.shape[axis] > 1)
    left_out = ("donate", "precision", "gradients", "compute")
    options: dict[str, Any] = {key: x for key, x in task.options.items() if key not in left_out}
    summands, losses = Layout(mesh, P(unreduced=axes)), dict[int, Tensor]()
    asked: dict[int, dict[Asked, None]] = {device: {} for device in held(mesh)}

    def noting(*args: Any) -> Any:
        here = require("certify").device  # nothing is asked of others

        def tried(what: str, group: Group, site: Site) -> float:
            if what not in ("fs.psum", "fs.pmean") or group.size == 1:
                return 1.0
            one = Asked(what, group.axes, site._replace(leaves=()))
            asked[here][one] = None
            return trial(one)

        with trying(tried):
            result = task.loss_fn(*args)
        loss: Tensor = result[0] if task.has_buffers or task.options.get("has_aux") else result
        losses[here] = losses.get(here, 0) + loss.detach().mean().double()
        return result

    run = partial(fs.value_and_grad, gradients=lambda layout: summands, compute=task.compute, **options)
    params = task.placed(Leaves.of(task.params).rebuild(before(it, step)), mesh, it.stage)
    buffers = Leaves.of(task.buffers).rebuild(it.alone[step - 1].buffers) if step else task.buffers
    with keyed_random(task.seed, step):
        _, grads = run(noting, mesh=mesh, batch=task.batch_spec)(
            params, *([buffers] if task.has_buffers else []), task.batch
        )
    rows = [torch.stack([losses[device], losses[device].new_tensor(mark([*asked[device]]))]) for device in held(mesh)]
    lie = Layout(mesh, P(mesh.axis_names))
    every, marks = fs.unshard(Sharded((2 * mesh.size,), lie, tuple(rows))).view(-1, 2).unbind(1)
    same = bool((marks == marks[0]).all())  # processes that differ could not try the same one
    return Again(
        axes, [known_to_all(leaf) for leaf in Leaves.of(grads).leaves], every, (*asked[held(mesh)[0]],) if same else ()
    )


def before(it: Comparison, step: int) -> list[Leaf]:
    """Return the parameters that a step began with."""
    return it.alone[step - 1].params if step else Leaves.of(it.task.params).leaves


def trials(it: Comparison, step: int, asked: Sequence[Asked]) -> dict[str, list[Leaf]]:
    """Return the whole gradients that each other choice between a sum and an average would give, by what is wrong then."""
    found: dict[str, list[Leaf]] = {}
    for one in asked:
        known: dict[float, list[Leaf]] = {}
        for axes in subsets(one.axes):
            n = prod(it.mesh.shape[axis] for axis in axes)
            times, sums = (1 / n, True) if one.what == "fs.psum" else (float(n), False)
            if times not in known:
                grads = step_again(it, step, lambda other, one=one, times=times: times if other == one else 1.0).grads
                known[times] = [fs.unshard(leaf) for leaf in grads]
            told = (
                f"{one.what} over {named(one.axes)}, at {one.site}, {'sums' if sums else 'averages'} over {named(axes)}"
            )
            meant = f"should {'average' if sums else 'sum'}: its result is {n} times too {'large' if sums else 'small'}"
            found[f"{told} where it {meant}"] = known[times]
    return found


def subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """List the choices of one or more axes, the whole first."""
    return [some for size in range(len(axes), 0, -1) for some in combinations(axes, size)]


def named(axes: tuple[str, ...]) -> str:
    """Return axes as messages have them."""
    return " x ".join(f'"{axis}"' for axis in axes)
