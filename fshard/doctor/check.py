"""Check every collective between the processes against its oracle: a result, and its gradient.

Each process draws the inputs of all processes from seeds, so it knows what the collective must return.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard.testing.oracles import ORACLES, Oracle, kind

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
    return [_trial(mesh, name, oracle) for name, oracle in ORACLES.items()]


def _trial(mesh: fs.Mesh, name: str, oracle: Oracle) -> Trial:
    ring = tuple((i, (i + 1) % mesh.size) for i in range(mesh.size))
    options = {"perm": ring} if name in ("ppermute", "send_recv") else {}
    cases = [(dtype, (mesh.size, *rest)) for dtype in DTYPES if oracle.takes(dtype) for rest in SHAPES]
    found = [
        f"{name}({str(dtype).removeprefix('torch.')}{list(shape)}): {complaint}"
        for dtype, shape in cases
        for complaint in fs.run(_complaint, mesh, name, dtype, shape, options, mesh=mesh)
        if complaint
    ]
    return Trial(name, len(cases), tuple(found))


def _complaint(mesh: fs.Mesh, name: str, dtype: torch.dtype, shape: tuple[int, ...], options: dict[str, Any]) -> str:
    """Compare the result and the gradient of one device with the oracle's; return the first difference."""
    oracle, device = ORACLES[name], fs.axis_index(mesh.axis_names)
    xs = [_values(shape, dtype, i) for i in range(mesh.size)]
    ys = oracle.forward(xs, **options)
    gs = [_values(tuple(y.shape), y.dtype, mesh.size + i) for i, y in enumerate(ys)]
    own = xs[device].to(mesh.device_type).requires_grad_(kind(dtype) in "fc")
    y, tokens = _call(name, own, mesh, options)
    if difference := _difference(y, ys[device]):
        return f"result: {difference}"
    if not own.requires_grad:
        return ""
    cotangents = [gs[device].to(mesh.device_type), *map(torch.zeros_like, tokens)]
    (gradient,) = torch.autograd.grad([y, *tokens], own, cotangents)
    difference = _difference(gradient, oracle.backward(gs, xs, **options)[device])
    return f"gradient: {difference}" if difference else ""


def _call(name: str, x: Tensor, mesh: fs.Mesh, options: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Call a collective; return its result, and the token of a message that was sent."""
    (axis,), n = mesh.axis_names, mesh.size
    if name != "send_recv":
        return getattr(fs, name)(x, axis, **options), []
    index = fs.axis_index(axis)
    token = fs.send(x, axis, to=(index + 1) % n)
    return fs.recv(x, axis, (index - 1) % n), [token] if token.requires_grad else []


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    if kind(dtype) == "i":
        return torch.randint(0, 100, shape, generator=draw).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=draw, dtype=wide).to(dtype)


def _difference(found: Tensor, expected: Tensor) -> str:
    """Describe the first value that differs by more than roundings: a backend may add in any order."""
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    ours, theirs = found.detach().cpu().to(wide).reshape(-1), expected.to(wide).reshape(-1)
    eps = 16 * torch.finfo(expected.dtype).eps if kind(expected.dtype) in "fc" else 0.0
    wrong = ~torch.isclose(ours, theirs, rtol=eps, atol=eps, equal_nan=True)
    if not wrong.any():
        return ""
    first = int(wrong.nonzero()[0])
    count = f"{int(wrong.sum())} of {expected.numel()} values differ"
    return f"{count}, first {ours[first].item()} instead of {theirs[first].item()}"
