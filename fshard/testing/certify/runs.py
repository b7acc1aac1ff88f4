"""The runs that are compared: in float64 with plain torch on one device, or bit for bit with a mesh of one device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard.errors import PromiseError
from fshard.mesh.layout import Mesh
from fshard.optim.leaves import is_frozen
from fshard.testing.certificate import Certificate, CertificateRow, widest
from fshard.testing.certify.compare import Snapshot, judge

LOWER_DTYPES = {"precision", "compute", "reduce"}
"""Options that let a step compute or send in another dtype: runs in float64 are without them."""


def certificate_of(
    mesh: Mesh,
    alone: Mesh,
    stages: Sequence[Any],
    train: Callable[[Mesh, Any, Sequence[Snapshot]], list[Snapshot]],
    names: Snapshot,
    hints: Mapping[str, str],
    train_serial: Callable[[int], list[Snapshot]] | None,
    cure: str,
) -> Certificate:
    """Compare the runs of a program on a mesh, in some stages, with that on one device.

    That is `train_serial` in float64, from a key of its random draws, and `train` is given its snapshots; or else `train` on
    the mesh `alone`, bit for bit. `hints` has likely causes by the field that diverges, `cure` the advice if a run differs
    when it is repeated.
    """
    rows, dtype = list[CertificateRow](), None
    title, unseen = "a mesh of one device, bit for bit", "It does not see an error that a mesh of one device makes too."
    with _in_float64() if train_serial else nullcontext():
        if train_serial is None:
            serial = [step.mapped(fs.unshard) for step in train(alone, 0, [])]
        else:
            with _Casts() as casts, _note("in the run in float64: does the loss function name a dtype?"):
                serial = train_serial(0)
            dtype, title = casts.dtype, "one device, both in float64"
            for row in judge(serial, train_serial(1), names, "", {}, dtype):
                if row.verdict == "DIVERGENT":
                    raise PromiseError(
                        "certify: on one device a run must give the same results when it is repeated; got another "
                        f"{row.leaf}, {row.reason}. {cure}"
                    )
            unseen = "It does not see casts by precision=, compute= or reduce=: reproducible=True does."
            if dtype != torch.float64:
                unseen = f"The program casts to {dtype}, so bounds are wider. {unseen}"
        for stage in stages:
            with _note(f"in stage {stage}"):
                sharded = train(mesh, stage, serial if train_serial else [])
                rows += judge(serial, sharded, names, stage, hints, dtype)
    return Certificate(tuple(rows), len(serial), f"{mesh} against {title}", unseen)


class _Casts(TorchDispatchMode):
    """Records the lowest dtype that floating tensors are cast to."""

    dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and is_floating(args[0]) and is_floating(result):
            self.dtype = max(self.dtype, result.dtype.to_real(), key=lambda dtype: torch.finfo(dtype).eps)
        return result


@contextmanager
def _in_float64() -> Generator[None]:
    """Make float64 the dtype of new tensors, so that constants have it, too."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def _note(text: str) -> Generator[None]:
    """Add a note to an exception."""
    try:
        yield
    except Exception as error:
        error.add_note(f"certify: {text}")
        raise


def is_floating(x: Any) -> TypeGuard[Tensor]:
    """Return True if x is a floating or complex tensor."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def widen(x: Any) -> Any:
    """Convert floating tensors to float64 (complex128), and leave all else as it is."""
    return keep_frozen(x, widest(x)) if is_floating(x) else x


def keep_frozen(x: Tensor, new: Tensor) -> Tensor:
    """Make `new` a frozen parameter if x is one."""
    return Parameter(new.detach(), requires_grad=False) if is_frozen(x) else new
