"""Check every collective between the processes against its oracle: a result, and its gradient.

Each process draws the inputs of all processes from seeds, so it knows what the collective must return.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard.testing.oracles import ORACLES, kind

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
SHAPES = (3, 11), (30_011,)
"""The dims after the first, which has a row for each process; large tensors may take other algorithms."""


@dataclass(frozen=True)
class Trial:
    """The result of checking one collective."""

    collective: str
    cases: int
    complaints: tuple[str, ...] = ()


def check_collectives(mesh: fs.Mesh) -> list[Trial]:
    """Check all collectives on a mesh of one axis; called by all processes, each checks its own results."""
    trials = list[Trial]()
    for name, oracle in ORACLES.items():
        cases = [
            (dtype, (mesh.size, *rest))
            for dtype in DTYPES
            if oracle.takes(dtype)
            for rest in SHAPES
        ]
        complaints = [
            f"{name}({str(dtype).removeprefix('torch.')}{list(shape)}): {complaint}"
            for dtype, shape in cases
            for complaint in fs.run(_complaint, mesh, name, dtype, shape, mesh=mesh)
            if complaint
        ]
        trials.append(Trial(name, len(cases), tuple(complaints)))
    return trials


def _complaint(mesh: fs.Mesh, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Compare the result and the gradient of one device with the oracle's; return the first difference."""
    oracle, device, options = (
        ORACLES[name],
        fs.axis_index(mesh.axis_names),
        options_of(name, mesh.size),
    )
    xs = [_values(shape, dtype, i) for i in range(mesh.size)]
    ys = oracle.forward(xs, **options)
    gs = [_values(tuple(y.shape), y.dtype, mesh.size + i) for i, y in enumerate(ys)]
    x = xs[device].to(mesh.device_type).requires_grad_(kind(dtype) in "fc")
    y, tokens = _call(name, x, mesh)
    if difference := _difference(y, ys[device]):
        return f"result: {difference}"
    if not x.requires_grad:
        return ""
    cotangents = [gs[device].to(mesh.device_type), *map(torch.zeros_like, tokens)]
    (gradient,) = torch.autograd.grad([y, *tokens], x, cotangents)
    difference = _difference(gradient, oracle.backward(gs, xs, **options)[device])
    return f"gradient: {difference}" if difference else ""


def options_of(name: str, n: int) -> dict[str, Any]:
    """Return the options of a collective among n devices: messages are sent around the ring."""
    return (
        {"perm": tuple((i, (i + 1) % n) for i in range(n))}
        if name in ("ppermute", "send_recv")
        else {}
    )


def _call(name: str, x: Tensor, mesh: fs.Mesh) -> tuple[Tensor, list[Tensor]]:
    """Call a collective; return its result, and the token of a message that was sent."""
    (axis,), n = mesh.axis_names, mesh.size
    if name != "send_recv":
        return getattr(fs, name)(x, axis, **options_of(name, n)), []
    index = fs.axis_index(axis)
    token = fs.send(x, axis, to=(index + 1) % n)
    return fs.recv(x, axis, (index - 1) % n), [token] if token.requires_grad else []


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    if kind(dtype) == "i":
        return torch.randint(0, 100, shape, generator=draw).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=draw, dtype=wide).to(dtype)


def _difference(x: Tensor, expected: Tensor) -> str:
    """Describe the first value that differs by more than roundings: a backend may add in any order."""
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    x, y = x.detach().cpu().to(wide).reshape(-1), expected.to(wide).reshape(-1)
    eps = 16 * torch.finfo(expected.dtype).eps if kind(expected.dtype) in "fc" else 0.0
    indices = (
        (~torch.isclose(x, y, rtol=eps, atol=eps, equal_nan=True)).nonzero().flatten().tolist()
    )
    if not indices:
        return ""
    first = indices[0]
    return f"{len(indices)} of {y.numel()} values differ, first {x[first].item()} instead of {y[first].item()}"
