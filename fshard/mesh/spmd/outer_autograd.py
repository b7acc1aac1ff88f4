"""Run a function of one device on all devices, as one differentiable operation.

On a device, autograd records everything. Outside a virtual mesh the gradient is taken in a thread that is not a
device, so the run is one autograd Function, whose backward is another run: each device runs the backward of its own graph. The
graph is kept for one backward. A second backward, gradients of gradients and torch.func run another function, which
computes the vjp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

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


class Program(Protocol):
    """A program of one device: from its number and its tensors to its results."""

    def __call__(self, device: int, xs: Tensors) -> Tensors: ...


@dataclass(frozen=True)
class MappedRun:
    """A program and where to run it.

    `grad` and `is_transformed`: whether grad mode was on and a torch.func transform active in the caller. `derived`: whether
    the program is another one's derivative. `random`: the initial random state of a repeated forward.
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
        return run_on_devices(
            self.mesh,
            lambda device: program(device, xs[device]),
            mapped=self.mapped,
            checked=self.checked,
            random=self.random if self.derived else None,
        )


@dataclass
class Tape:
    """Inputs and results of each device with its graph, which the forward keeps for one backward."""

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
        body = partial(program, xs=tuple([column[0] for column in columns]))
        (results,) = run_on_devices(mesh, body, mapped=mapped, checked=checked)
        return [(result,) for result in results]
    random = random_state(mesh.device_type)
    run = MappedRun(
        mesh, program, mapped, checked, torch.is_grad_enabled(), transformed(), random=random
    )
    return _shards_by_tensor(
        _apply_run(run, tuple([x for column in columns for x in column])), mesh.size
    )


def _shards_by_tensor(flat: tuple[Item, ...], n: int) -> list[tuple[Item, ...]]:
    """Split tensors of n devices, which are in the order of `flat`, into the shards of each tensor."""
    return [flat[start : start + n] for start in range(0, len(flat), n)]


def _apply_run(run: MappedRun, flat: Tensors) -> Tensors:
    """Apply a run to the tensors of all devices: the first of each device, then the second of each, and so on.

    So a device's own tensors are `flat[device::n]`.
    """
    if transformed():
        return _MappedFunction.apply(run, None, *flat)
    needs = tuple(
        any(x.requires_grad for x in column) for column in _shards_by_tensor(flat, run.mesh.size)
    )
    if run.grad and any(needs) and not saving_is_watched():
        return _MappedFunction.apply(run, Tape(needs), *flat)
    return (
        _MappedFunction.apply(run, None, *flat) if recorded(flat) else _run_program(run, None, flat)
    )


def saving_is_watched() -> bool:
    """Return True if saved-tensor hooks are active, as in a checkpoint: then only the inputs are kept."""
    return _C._autograd._top_saved_tensors_default_hooks(True) is not None


def _run_program(run: MappedRun, tape: Tape | None, flat: Tensors) -> Tensors:
    """Run the program; with a tape, keep the graph."""
    inputs = [
        tuple([x.detach() for x in flat[device :: run.mesh.size]])
        for device in range(run.mesh.size)
    ]
    if tape is not None:
        for xs in inputs:
            for x, need in zip(xs, tape.needs, strict=True):
                x.requires_grad_(need)

    watch = RefuseTransformed() if run.is_transformed and not run.derived else nullcontext()
    with torch.set_grad_enabled(run.grad), watch:  # which the threads of devices inherit
        outputs = run.devices(inputs, run.program)
    if tape is not None:
        tape.inputs, tape.outputs = inputs, outputs
    if not run.derived:
        validate_captured(run.mesh, inputs, outputs)
    return tuple(
        [_without_overlap(y.detach()) for column in zip(*outputs, strict=True) for y in column]
    )


def _without_overlap(x: Tensor) -> Tensor:
    """Return a tensor without overlapping elements (an expanded one has some), so that each has a tangent."""
    return x.contiguous() if 0 in x.stride() else x


def _backward_of_tape(run: MappedRun, tape: Tape, cotangents: Tensors) -> tuple[Tensor | None, ...]:
    """Run the backward of each device's own graph, once."""
    n = run.mesh.size
    targets = [index for index, need in enumerate(tape.needs) if need]

    def back(device: int, xs: Tensors) -> Tensors:
        return backward(
            tape.outputs[device], [xs[index] for index in targets], cotangents[device::n]
        )

    gradients = run.devices(tape.inputs, back)
    tape.inputs, tape.outputs = [], []
    return _gradients_of_inputs(list(zip(*gradients, strict=True)), targets, len(tape.needs), n)


def _gradients_of_inputs(
    columns: list[Tensors], targets: Sequence[int], width: int, n: int
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all tensors of n devices, from those of the targets."""
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
        return tuple(torch.zeros_like(x) for x in xs)
    ys, gs = zip(*pairs, strict=True)
    return torch.autograd.grad(
        ys, xs, gs, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )


def _vjp_run(run: MappedRun, targets: tuple[int, ...], width: int) -> MappedRun:
    """Return the run that computes cotangents of the inputs at `targets` from all inputs and the results' cotangents."""

    def program(device: int, xs: Tensors) -> Tensors:
        inputs, gs = xs[:width], xs[width:]
        if transformed():
            return _vjp_by_func(lambda *ys: run.program(device, ys), inputs, targets, gs)
        higher = torch.is_grad_enabled() and any(x.requires_grad for x in xs)
        with torch.enable_grad():
            chosen = [
                x if x.requires_grad else x.detach().requires_grad_()
                for x in (inputs[index] for index in targets)
            ]
            ys = run.program(device, _replaced_inputs(inputs, targets, tuple(chosen)))
            return backward(ys, chosen, gs, create_graph=higher)

    return replace(run, program=program, derived=True)


def _vjp_by_func(
    f: Callable[..., Tensors], xs: Tensors, targets: tuple[int, ...], gs: Tensors
) -> Tensors:
    """Pull cotangents back to the inputs at `targets`, under a torch.func transform."""
    moves = [y.is_floating_point() or y.is_complex() for y in gs]

    def of_targets(*chosen: Tensor) -> Tensors:
        ys = f(*_replaced_inputs(xs, targets, chosen))
        return tuple(y for y, moving in zip(ys, moves, strict=True) if moving)

    pull: Any = torch.func.vjp(of_targets, *(xs[index] for index in targets))[1]
    return pull(tuple(g for g, moving in zip(gs, moves, strict=True) if moving))


def _jvp_run(run: MappedRun, width: int, moving: tuple[int, ...]) -> MappedRun:
    """Return the run that computes tangents of the results from all inputs and the tangents of those at `moving`."""

    def program(device: int, xs: Tensors) -> Tensors:
        inputs, tangents = xs[:width], xs[width:]

        def of_moving(*chosen: Tensor) -> Tensors:
            return run.program(device, _replaced_inputs(inputs, moving, chosen))

        return torch.func.jvp(
            of_moving, tuple(_without_overlap(inputs[index]) for index in moving), tangents
        )[1]

    return replace(run, program=program, derived=True)


def _vmap_run(run: MappedRun, dims: tuple[int | None, ...], randomness: str) -> MappedRun:
    """Return the run in which every device maps the program over a leading dim of some of its tensors."""

    def program(device: int, xs: Tensors) -> Tensors:
        def of_one(*xs_of_one: Any) -> Tensors:
            return run.program(device, xs_of_one)

        return torch.func.vmap(of_one, in_dims=dims, randomness=randomness)(*xs)

    return replace(run, program=program, derived=True)


def _apply_derivative(derived: MappedRun, flat: Tensors, moved: Tensors) -> Tensors:
    """Apply a derivative to the inputs of all devices and their cotangents or tangents, or to a batch of these."""
    n = derived.mesh.size
    batched = _vmap_run(derived, (None,) * (len(flat) // n) + (0,) * (len(moved) // n), "same")
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
        ctx.moves = [y.is_floating_point() or y.is_complex() for y in output]
        ctx.mark_non_differentiable(
            *[y for y, moves in zip(output, ctx.moves, strict=True) if not moves]
        )

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        run, n = ctx.run, ctx.run.mesh.size
        tape: Tape | None = ctx.tape
        if tape is not None and tape.outputs and not torch.is_grad_enabled() and not transformed():
            return None, None, *_backward_of_tape(run, tape, cotangents)
        flat: Tensors = ctx.saved_tensors
        firsts = flat[::n]
        targets = tuple(
            index for index, x in enumerate(firsts) if x.is_floating_point() or x.is_complex()
        )
        pulled = replace(_vjp_run(run, targets, len(firsts)), grad=torch.is_grad_enabled())
        gradients = _shards_by_tensor(_apply_derivative(pulled, flat, cotangents), n)
        return None, None, *_gradients_of_inputs(gradients, targets, len(firsts), n)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> tuple[Tensor | None, ...]:
        run, n = ctx.run, ctx.run.mesh.size
        flat: Tensors = ctx.saved_tensors
        columns = _shards_by_tensor(grad_inputs[2:], n)
        moving = tuple(
            index for index, column in enumerate(columns) if any(x is not None for x in column)
        )
        moved = tuple(
            torch.zeros_like(x) if tangent is None else tangent
            for index in moving
            for x, tangent in zip(flat[index * n : (index + 1) * n], columns[index], strict=True)
        )
        tangents = _apply_derivative(_jvp_run(run, len(columns), moving), flat, moved)
        return tuple([x if moves else None for x, moves in zip(tangents, ctx.moves, strict=True)])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensors, tuple[int, ...]]:
        run, _, *flat = args
        n = run.mesh.size
        dims: tuple[int | None, ...] = in_dims[2:]
        columns, dims_of_columns = _shards_by_tensor(tuple(flat), n), _shards_by_tensor(dims, n)
        mapped = [any(dim is not None for dim in column) for column in dims_of_columns]
        batched = tuple(
            leading(x, dim, info.batch_size) if is_mapped else x
            for column, column_dims, is_mapped in zip(columns, dims_of_columns, mapped, strict=True)
            for x, dim in zip(column, column_dims, strict=True)
        )
        inner = _vmap_run(
            run, tuple(0 if is_mapped else None for is_mapped in mapped), info.randomness
        )
        results = _apply_run(inner, batched)
        return results, (0,) * len(results)
