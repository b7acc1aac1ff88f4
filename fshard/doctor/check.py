"""Check every collective between the processes against its oracle: a result, and its gradient.

Each process draws the inputs of all processes from seeds, so it knows what the collective must
return.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import fshard as fs
from fshard.testing.oracles import ORACLES, Options, kind, options_of

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
SHAPES = (3, 11), (30_011,)
"""The dims after the first, which has a row for each process.

Large tensors may take other algorithms.
"""


@dataclass(frozen=True)
class Trial:
    """The result of checking one collective."""

    collective: str
    cases: int
    complaints: tuple[str, ...] = ()


def check_collectives(mesh: fs.Mesh) -> list[Trial]:
    """Check all collectives on a mesh of one axis.

    All processes call it; each checks its own results.
    """
    trials: list[Trial] = []
    for name, oracle in ORACLES.items():
        complaints: list[str] = []
        dtypes = [dtype for dtype in DTYPES if oracle.takes(dtype)]
        for dtype in dtypes:
            for dims in SHAPES:
                shape = (mesh.size, *dims)
                case = f"{name}({str(dtype).removeprefix('torch.')}{list(shape)})"
                results = fs.run(_complaint, mesh, name, dtype, shape, mesh=mesh)
                complaints += [f"{case}: {complaint}" for complaint in results if complaint]
        trials.append(Trial(name, len(dtypes) * len(SHAPES), tuple(complaints)))
    return trials


def _complaint(mesh: fs.Mesh, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Compare the result and the gradient of one device with the oracle's.

    Return the first difference, or "".
    """
    oracle = ORACLES[name]
    options = plain_options(name, mesh.size)
    device = fs.axis_index(mesh.axis_names)
    xs = [_values(shape, dtype, index) for index in range(mesh.size)]
    ys = oracle.forward(xs, **options)

    x = xs[device].to(mesh.device_type).requires_grad_(kind(dtype) in "fc")
    y, tokens = _call(name, x, mesh)
    difference = _difference(y, ys[device])
    if difference:
        return f"result: {difference}"
    if not x.requires_grad:
        return ""

    cotangents: list[Tensor] = []
    for index, expected in enumerate(ys):
        cotangents.append(_values(tuple(expected.shape), expected.dtype, mesh.size + index))
    local_cotangents = [cotangents[device].to(mesh.device_type)]
    local_cotangents += [torch.zeros_like(token) for token in tokens]
    (gradient,) = torch.autograd.grad([y, *tokens], x, local_cotangents)
    difference = _difference(gradient, oracle.backward(cotangents, xs, **options)[device])
    return f"gradient: {difference}" if difference else ""


def plain_options(name: str, n: int) -> Options:
    """Return the plainest options of a collective among n devices."""
    if name == "send_recv":  # around the ring, which one device alone is too
        return {"perm": tuple([(index, (index + 1) % n) for index in range(n)])}
    return options_of(name, n)[0]


def _call(name: str, x: Tensor, mesh: fs.Mesh) -> tuple[Tensor, list[Tensor]]:
    """Call a collective; return its result, and the token of a message that was sent."""
    (axis,) = mesh.axis_names
    n = mesh.size
    if name != "send_recv":
        return getattr(fs, name)(x, axis, **plain_options(name, n)), []
    index = fs.axis_index(axis)
    token = fs.send(x, axis, to=(index + 1) % n)
    received = fs.recv(x, axis, (index - 1) % n)
    return received, [token] if token.requires_grad else []


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Draw equal values on all processes."""
    generator = torch.Generator().manual_seed(seed)
    if kind(dtype) == "i":
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


def _difference(actual: Tensor, expected: Tensor) -> str:
    """Describe the first value that differs by more than rounding, or return "".

    A backend may add in any order.
    """
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    tolerance = 0.0
    if kind(expected.dtype) in "fc":
        tolerance = 16 * torch.finfo(expected.dtype).eps
    x = actual.detach().cpu().to(wide).reshape(-1)
    y = expected.to(wide).reshape(-1)
    is_close = torch.isclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
    indices = (~is_close).nonzero().flatten().tolist()
    if not indices:
        return ""
    first = indices[0]
    return (
        f"{len(indices)} of {y.numel()} values differ, "
        f"first {x[first].item()} instead of {y[first].item()}"
    )
