"""Run a function of one device on all devices, as one differentiable operation.

On a device, autograd records everything. Outside a virtual mesh the gradient is taken in a thread
that is not a device, so the run is one autograd Function, whose backward is another run: each
device runs the backward of its own graph.

    shards of x   ->  [ device 0: program  ]  ->  shards of y      forward: keeps the graphs
                      [ device 1: program  ]
    shards of dx  <-  [ device 0: backward ]  <-  shards of dy     backward: uses them up
                      [ device 1: backward ]

The graph is kept for one backward. A second backward, gradients of gradients and torch.func run
another function, which computes the vjp.

Tensors of all devices are *flat*: the first tensor of each device, then the second of each, and so
on. Of n devices, `flat[device::n]` are those of one device, and `flat[i * n : (i + 1) * n]` are the
shards of tensor i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import Function

from fshard.mesh.collectives.autograd import Tensors, leading, over_many, recorded, transformed
from fshard.mesh.layout import Mesh
from fshard.mesh.runtimes.thread_state import random_state
from fshard.mesh.spmd.captured import RefuseTransformed, validate_captured
from fshard.mesh.spmd.run import is_outside, run_on_devices

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


Item = TypeVar("Item")


Program = Callable[[int, Tensors], Tensors]
"""A program of one device: from its number and its tensors to its results."""


@dataclass(frozen=True)
class MappedRun:
    """A program and where to run it.

    Args:
        mesh: the devices.
        program: of one device.
        mapped: the axes that scopes of the devices have.
        checked: compare what is promised to be equal.
        grad: grad mode was on in the caller.
        is_transformed: a torch.func transform was active in the caller.
        derived: the program is a derivative of another one.
        random: the initial random state of a repeated forward.
    """

    mesh: Mesh
    program: Program
    mapped: tuple[str, ...]
    checked: bool
    grad: bool = True
    is_transformed: bool = False
    derived: bool = False
    random: Tensor | None = None

    def devices(self, xs: list[Tensors], program: Program) -> list[Tensors]:
        """Run a program on every device, each with its own tensors."""
        # A derivative runs the program again, which must draw what it drew before.
        random = self.random if self.derived else None
        return run_on_devices(
            self.mesh,
            lambda device: program(device, xs[device]),
            mapped=self.mapped,
            checked=self.checked,
            random=random,
        )


@dataclass
class Tape:
    """Inputs and results of each device with its graph, kept by the forward for one backward.

    `needs`: for each tensor, True if it requires a gradient.
    """

    needs: tuple[bool, ...]
    inputs: list[Tensors] = field(default_factory=list[Tensors])
    outputs: list[Tensors] = field(default_factory=list[Tensors])


def run_mapped(
    mesh: Mesh,
    program: Program,
    columns: list[Tensors],
    *,
    mapped: tuple[str, ...] = (),
    checked: bool = False,
) -> list[Tensors]:
    """Run `program` on every device of the caller; return the shards of each result.

    `columns` and the result have one entry per tensor: its shards, in device order.
    """
    if not is_outside(mesh):
        xs = tuple([column[0] for column in columns])
        (results,) = run_on_devices(
            mesh, lambda device: program(device, xs), mapped=mapped, checked=checked
        )
        return [(result,) for result in results]
    random = random_state(mesh.device_type)
    grad = torch.is_grad_enabled()
    run = MappedRun(mesh, program, mapped, checked, grad, transformed(), random=random)
    flat = tuple([x for column in columns for x in column])
    return _shards_by_tensor(_apply_run(run, flat), mesh.size)


def _shards_by_tensor(flat: tuple[Item, ...], n: int) -> list[tuple[Item, ...]]:
    """Split the flat tensors of n devices into the shards of each tensor."""
    return [flat[start : start + n] for start in range(0, len(flat), n)]


def _apply_run(run: MappedRun, flat: Tensors) -> Tensors:
    """Apply a run to the flat tensors of all devices, differentiably."""
    if transformed():
        return _MappedFunction.apply(run, None, *flat)

    columns = _shards_by_tensor(flat, run.mesh.size)
    needs = tuple([_requires_grad(column) for column in columns])
    if run.grad and any(needs) and not saving_is_watched():
        return _MappedFunction.apply(run, Tape(needs), *flat)
    if recorded(flat):
        return _MappedFunction.apply(run, None, *flat)
    return _run_program(run, None, flat)


def _requires_grad(column: Tensors) -> bool:
    return any(x.requires_grad for x in column)


def saving_is_watched() -> bool:
    """Return True if saved-tensor hooks are active, as in a checkpoint.

    Then only the inputs are kept.
    """
    return _C._autograd._top_saved_tensors_default_hooks(True) is not None


def _run_program(run: MappedRun, tape: Tape | None, flat: Tensors) -> Tensors:
    """Run the program; with a tape, keep the graph."""
    n = run.mesh.size
    inputs = [tuple([x.detach() for x in flat[device::n]]) for device in range(n)]
    if tape is not None:
        for xs in inputs:
            for x, need in zip(xs, tape.needs, strict=True):
                x.requires_grad_(need)

    is_outermost = run.is_transformed and not run.derived
    watch = RefuseTransformed() if is_outermost else nullcontext()
    with torch.set_grad_enabled(run.grad), watch:  # which the threads of devices inherit
        outputs = run.devices(inputs, run.program)

    if tape is not None:
        tape.inputs = inputs
        tape.outputs = outputs
    if not run.derived:
        validate_captured(run.mesh, inputs, outputs)

    results: list[Tensor] = []
    for column in zip(*outputs, strict=True):
        results += [_without_overlap(y.detach()) for y in column]
    return tuple(results)


def _without_overlap(x: Tensor) -> Tensor:
    """Return a tensor without overlapping elements, so that each has a tangent.

    An expanded tensor has overlapping elements: their stride is 0.
    """
    return x.contiguous() if 0 in x.stride() else x


def _backward_of_tape(run: MappedRun, tape: Tape, cotangents: Tensors) -> tuple[Tensor | None, ...]:
    """Run the backward of each device's own graph, once."""
    n = run.mesh.size
    targets = [index for index, need in enumerate(tape.needs) if need]

    def backward_on_device(device: int, xs: Tensors) -> Tensors:
        differentiated = [xs[index] for index in targets]
        return backward(tape.outputs[device], differentiated, cotangents[device::n])

    gradients = run.devices(tape.inputs, backward_on_device)
    tape.inputs = []  # the graph is used up: a second backward computes the vjp
    tape.outputs = []
    columns = list(zip(*gradients, strict=True))
    return _gradients_of_inputs(columns, targets, len(tape.needs), n)


def _gradients_of_inputs(
    columns: list[Tensors], targets: Sequence[int], width: int, n: int
) -> tuple[Tensor | None, ...]:
    """Return the flat gradients of `width` tensors of n devices, from those of the targets."""
    gradients: list[Tensor | None] = [None] * (width * n)
    for index, column in zip(targets, columns, strict=True):
        gradients[index * n : (index + 1) * n] = column
    return tuple(gradients)


def _replaced_inputs(xs: Tensors, indices: tuple[int, ...], chosen: Tensors) -> Tensors:
    """Return tensors with some replaced, by index."""
    result = list(xs)
    for index, x in zip(indices, chosen, strict=True):
        result[index] = x
    return tuple(result)


def backward(ys: Tensors, xs: list[Tensor], gs: Tensors, *, create_graph: bool = False) -> Tensors:
    """Return the gradients with regard to xs, zeros where there are none."""
    pairs = [(y, g) for y, g in zip(ys, gs, strict=True) if y.requires_grad]
    if not pairs or not xs:
        return tuple([torch.zeros_like(x) for x in xs])
    ys, gs = zip(*pairs, strict=True)
    return torch.autograd.grad(
        ys, xs, gs, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )


def _vjp_run(run: MappedRun, targets: tuple[int, ...], width: int) -> MappedRun:
    """Return the run that computes the cotangents of the inputs at `targets`.

    It takes all inputs and the cotangents of the results.
    """

    def program(device: int, xs: Tensors) -> Tensors:
        inputs = xs[:width]
        gs = xs[width:]
        if transformed():
            return _vjp_by_func(lambda *ys: run.program(device, ys), inputs, targets, gs)

        is_recorded = torch.is_grad_enabled() and _requires_grad(xs)
        with torch.enable_grad():
            chosen = [_requiring_grad(inputs[index]) for index in targets]
            ys = run.program(device, _replaced_inputs(inputs, targets, tuple(chosen)))
            return backward(ys, chosen, gs, create_graph=is_recorded)

    return replace(run, program=program, derived=True)


def _requiring_grad(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_()


def _vjp_by_func(
    f: Callable[..., Tensors], xs: Tensors, targets: tuple[int, ...], gs: Tensors
) -> Tensors:
    """Pull cotangents back to the inputs at `targets`, under a torch.func transform."""
    are_differentiable = [_is_differentiable(g) for g in gs]

    def of_targets(*chosen: Tensor) -> Tensors:
        ys = f(*_replaced_inputs(xs, targets, chosen))
        return tuple(compress(ys, are_differentiable))

    chosen = [xs[index] for index in targets]
    _, pull_back = cast("Any", torch.func.vjp(of_targets, *chosen))
    return pull_back(tuple(compress(gs, are_differentiable)))


def _is_differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _jvp_run(run: MappedRun, width: int, moving: tuple[int, ...]) -> MappedRun:
    """Return the run that computes the tangents of the results.

    It takes all inputs and the tangents of those at `moving`.
    """

    def program(device: int, xs: Tensors) -> Tensors:
        inputs = xs[:width]
        tangents = xs[width:]

        def of_moving(*chosen: Tensor) -> Tensors:
            return run.program(device, _replaced_inputs(inputs, moving, chosen))

        primals = tuple([_without_overlap(inputs[index]) for index in moving])
        _, results = cast("Any", torch.func.jvp(of_moving, primals, tangents))
        return results

    return replace(run, program=program, derived=True)


def _vmap_run(run: MappedRun, dims: tuple[int | None, ...], randomness: str) -> MappedRun:
    """Return the run in which every device maps the program over a leading dim of some tensors."""

    def program(device: int, xs: Tensors) -> Tensors:
        def of_one(*xs_of_one: Any) -> Tensors:
            return run.program(device, xs_of_one)

        return torch.func.vmap(of_one, in_dims=dims, randomness=randomness)(*xs)

    return replace(run, program=program, derived=True)


def _apply_derivative(derived: MappedRun, flat: Tensors, moved: Tensors) -> Tensors:
    """Apply a derivative to flat inputs and flat cotangents or tangents, or to a batch of these."""
    n = derived.mesh.size
    dims = (None,) * (len(flat) // n) + (0,) * (len(moved) // n)
    batched = _vmap_run(derived, dims, "same")
    return over_many(
        lambda moved: _apply_run(derived, (*flat, *moved)),
        lambda moved: _apply_run(batched, (*flat, *moved)),
        moved,
    )


class _MappedFunction(Function):
    @staticmethod
    def forward(run: MappedRun, tape: Tape | None, *flat: Tensor) -> Tensors:
        return _run_program(run, tape, flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.run, ctx.tape, *flat = inputs
        ctx.save_for_backward(*flat)
        ctx.save_for_forward(*flat)
        ctx.are_differentiable = [_is_differentiable(y) for y in output]
        constants = [y for y in output if not _is_differentiable(y)]
        ctx.mark_non_differentiable(*constants)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        run: MappedRun = ctx.run
        tape: Tape | None = ctx.tape
        # The graphs on the tape can be used once, and their backward is not recorded.
        is_recorded = torch.is_grad_enabled() or transformed()
        if tape is not None and tape.outputs and not is_recorded:
            return None, None, *_backward_of_tape(run, tape, cotangents)

        n = run.mesh.size
        flat: Tensors = ctx.saved_tensors
        firsts = flat[::n]  # of each tensor, the shard of the first device
        width = len(firsts)
        targets = tuple([index for index in range(width) if _is_differentiable(firsts[index])])
        vjp = replace(_vjp_run(run, targets, width), grad=torch.is_grad_enabled())
        gradients = _shards_by_tensor(_apply_derivative(vjp, flat, cotangents), n)
        return None, None, *_gradients_of_inputs(gradients, targets, width, n)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> tuple[Tensor | None, ...]:
        run: MappedRun = ctx.run
        n = run.mesh.size
        flat: Tensors = ctx.saved_tensors
        columns = _shards_by_tensor(grad_inputs[2:], n)

        moving: list[int] = []
        moved: list[Tensor] = []
        for index, column in enumerate(columns):
            if all(tangent is None for tangent in column):
                continue
            moving.append(index)
            for x, tangent in zip(flat[index * n : (index + 1) * n], column, strict=True):
                moved.append(torch.zeros_like(x) if tangent is None else tangent)

        jvp = _jvp_run(run, len(columns), tuple(moving))
        tangents = _apply_derivative(jvp, flat, tuple(moved))
        pairs = zip(tangents, ctx.are_differentiable, strict=True)
        return tuple([tangent if has_tangent else None for tangent, has_tangent in pairs])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensors, tuple[int, ...]]:
        run, _, *flat = args
        n = run.mesh.size
        columns = _shards_by_tensor(tuple(flat), n)
        dims_of_columns: list[tuple[int | None, ...]] = _shards_by_tensor(in_dims[2:], n)

        # If one shard of a tensor is mapped over, all get the leading dim.
        dims: list[int | None] = []
        batched: list[Tensor] = []
        for column, column_dims in zip(columns, dims_of_columns, strict=True):
            if all(dim is None for dim in column_dims):
                dims.append(None)
                batched += column
                continue
            dims.append(0)
            for x, dim in zip(column, column_dims, strict=True):
                batched.append(leading(x, dim, info.batch_size))

        inner = _vmap_run(run, tuple(dims), info.randomness)
        results = _apply_run(inner, tuple(batched))
        return results, (0,) * len(results)
