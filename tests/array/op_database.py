"""Every entry of torch's op database equals torch on arrays, or raises a clear error.

Run it by `python -m tests.array.op_database`.
"""

import contextlib
import random
import re
import sys
import unittest
import warnings
from collections import Counter
from textwrap import fill
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import get_overridable_functions

import fshard as fs
from fshard import P
from fshard.array.dispatch import DIRECT, name_of
from fshard.array.rules import TABLE
from tests.array.oracle import tensors

MESH = fs.make_mesh({"data": 2, "model": 2})


def spec_of(x: Tensor, draw: random.Random) -> P:
    """Draw a spec that a tensor can have."""
    dims = [dim for dim in range(x.ndim) if x.shape[dim] % 2 == 0]
    entries: list[Any] = [None] * x.ndim
    for axis in ("data", "model"):
        if dims and draw.random() < 0.7:
            entries[dims.pop(draw.randrange(len(dims)))] = axis
    return P(*entries)


def placed(x: Any, draw: random.Random, made: dict[int, Any]) -> Any:
    """Put the tensors among arguments on the mesh."""
    if isinstance(x, Tensor):
        array = fs.device_put(x.detach(), fs.Layout(MESH, spec_of(x, draw)))
        made[id(x)] = array.requires_grad_() if x.requires_grad else array
        return made[id(x)]
    if isinstance(x, tuple | list):
        return type(x)(placed(one, draw, made) for one in x)
    return {name: placed(one, draw, made) for name, one in x.items()} if isinstance(x, dict) else x


def outcome(op: Any, sample: Any, draw: random.Random) -> str:  # noqa: PLR0911
    """Return "equal", "refused", "skipped" or "wrong: ..." for one sample."""
    made: dict[int, Any] = {}
    args = [sample.input, *sample.args]
    flat = [x for x in tensors([args, list(sample.kwargs.values())]) if isinstance(x, Tensor)]
    moving = [x for x in flat if x.requires_grad]
    try:
        torch.manual_seed(0)
        wanted = op(*args, **sample.kwargs)
    except Exception:
        return "skipped"
    try:
        torch.manual_seed(0)
        actual = op(*placed(args, draw, made), **placed(sample.kwargs, draw, made))
    except (
        fs.errors.FshardError,
        NotImplementedError,
        TypeError,
        RuntimeError,
        ValueError,
        IndexError,
        AttributeError,
    ) as error:
        return f"refused: {type(error).__name__}: {str(error)[:90]}"
    pairs = list(zip(tensors(actual), tensors(wanted), strict=False))
    for y, z in pairs:
        if not isinstance(z, Tensor):
            if y != z:
                return f"wrong: {y} for {z}"
            continue
        try:
            torch.testing.assert_close(
                fs.unshard(y), z.detach(), equal_nan=True, rtol=1e-6, atol=1e-6
            )
        except Exception as error:
            return f"wrong: {str(error)[:90]}"
    pairs = [(y, z) for y, z in pairs if isinstance(z, Tensor) and z.requires_grad]
    if not moving or not pairs:
        return "equal"
    gs = [torch.ones_like(z) for _, z in pairs]
    more = {"allow_unused": True, "materialize_grads": True}
    with contextlib.suppress(RuntimeError):
        expected = torch.autograd.grad([z for _, z in pairs], moving, gs, **more)
        arrays = [made[id(x)] for x in moving]
        cotangents = [fs.device_put(g, fs.Layout(MESH)) for g in gs]
        try:
            given = torch.autograd.grad([y for y, _ in pairs], arrays, cotangents, **more)
            for g, h in zip(expected, given, strict=True):
                torch.testing.assert_close(fs.unshard(h), g, equal_nan=True, rtol=1e-6, atol=1e-6)
        except Exception as error:
            return f"wrong gradient: {str(error)[:90]}"
    return "equal"


def judge(op: Any, samples: int = 4) -> list[str]:
    """Return the outcomes of the first samples of an entry."""
    draw = random.Random(op.name)
    inputs = op.sample_inputs("cpu", torch.float64, requires_grad=True)
    return [outcome(op, sample, draw) for sample, _ in zip(inputs, range(samples), strict=False)]


def entries() -> list[Any]:
    """Return the differentiable entries that take float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.modules.setdefault(
            "expecttest", SimpleNamespace(TestCase=unittest.TestCase)
        )  # the list does not need it
        from torch.testing._internal.common_methods_invocations import op_db
    return [
        op for op in op_db if op.supports_autograd and torch.float64 in op.supported_dtypes("cpu")
    ]


SPECIAL = r"^_|_copy$|^(q|sym|native|fbgemm|miopen|batch_norm|fake)_|quant|sparse|coalesce|indices$|storage|_cell$|smm|spmm|s.*addmm|^(cpu|cuda|xpu|mtia|ipu)$|slice_inverse|hash_tensor"
"""Names of functions of sparse and quantized tensors, of storages, and of torch itself."""


def list_rowless() -> str:
    """Return the public functions and methods of torch that have no row for arrays, as the guide
    lists them.
    """
    found: dict[str, set[str]] = {}
    for space, functions in get_overridable_functions().items():
        if space is not Tensor and not isinstance(space, ModuleType):
            continue  # a property
        label = {"torch.functional": "torch"}.get(space.__name__, space.__name__)
        for function in functions:
            name = name_of.__wrapped__(function)
            title = function.__name__.removeprefix(f"{label.rpartition('.')[2]}_")
            has_row = any(one in TABLE or one in DIRECT for one in (name, name.removesuffix("_")))
            if not has_row and not re.search(SPECIAL, function.__name__):
                found.setdefault(label, set()).add(title)
    found["Tensor"] -= found["torch"]
    return (
        "\n".join(
            fill(f"{label}: {' '.join(sorted(found[label]))}", 120) for label in sorted(found)
        )
        + "\n"
    )


def main() -> None:
    counts: Counter[str] = Counter()
    warnings.simplefilter("ignore")
    for op in entries():
        try:
            actual = judge(op)
        except Exception as error:
            actual = [f"refused: no samples: {error}"[:80]]
        kinds = {one.partition(":")[0].split()[0] for one in actual}
        verdict = "wrong" if "wrong" in kinds else "supported" if "equal" in kinds else "refused"
        counts[verdict] += 1
        counts["partly refused"] += verdict == "supported" and "refused" in kinds
        if verdict != "supported" or "-v" in sys.argv:
            first = next((one for one in actual if one != "equal"), "")
            sys.stdout.write(f"{verdict} {op.name} {op.variant_test_name} {first}\n")
    sys.stdout.write(f"{dict(counts)}\n")


if __name__ == "__main__":
    main()
