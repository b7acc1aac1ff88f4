"""The options of `value_and_grad` and their values; checks of single arguments, each returns a list of errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from reprlib import repr as shown
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor

from fshard.errors import FshardError
from fshard.foreign_names import NAMES
from fshard.mesh.layout import Axes, Layout, PyTree, flatten
from fshard.transforms.patterns import Choice

AuxReduction = Literal["mean", "sum", "rows"]
Weight = Callable[[PyTree], Tensor | int | float]


class Options(TypedDict, total=False):
    """All options by name: first those of any gradient, then those of a loss function, then those of stages."""

    has_buffers: bool
    has_aux: bool
    aux: PyTree
    weight: Weight | None
    gradients: Callable[[Layout], Layout] | None
    frozen: Choice
    local: Axes
    reproducible: bool
    live_units: int
    compute: torch.dtype | None
    reduce: torch.dtype | None

    accumulate: int
    reduce_once: bool
    slices: int | None
    reshard_after_forward: bool
    prefetch: int
    in_flight: int
    bucket: int

    loss: Callable[..., Any] | None
    inputs: Callable[[PyTree], PyTree] | None
    skips: Mapping[str, tuple[int, int]] | None
    axis: str
    dynamic: bool
    recompute: Literal["never", "always", "except_last"] | int


OF_STAGES_ALONE = ("loss", "inputs", "skips", "axis", "dynamic", "recompute")
OF_LOSSES_ALONE = ("accumulate", "reduce_once", "slices", "reshard_after_forward", "prefetch", "in_flight", "bucket")
_BOTH = [name for name in Options.__annotations__ if name not in OF_LOSSES_ALONE + OF_STAGES_ALONE]
OF_LOSSES = [*_BOTH[:4], *OF_LOSSES_ALONE, *_BOTH[4:]]
OF_STAGES = [*OF_STAGES_ALONE, *_BOTH]

_LEAST = {"live_units": 1, "accumulate": 1, "slices": 1, "prefetch": 0, "in_flight": 0, "bucket": 0}
_FLAGS = ("has_buffers", "has_aux", "reproducible", "reduce_once", "reshard_after_forward", "dynamic")
_FUNCTIONS = ("weight", "gradients", "loss", "inputs")


def wrong_options(reproducible: bool, given: Mapping[str, Any]) -> list[str]:
    """List the errors of each option and of their combination."""
    wrong: list[str] = []
    for name, x in given.items():
        if name in _LEAST and not (name == "slices" and x is None):
            wrong += integer(name, x, _LEAST[name])
        elif name in _FLAGS:
            wrong += flag(name, x)
        elif name in ("compute", "reduce"):
            is_dtype = isinstance(x, torch.dtype)
            wrong += must_be(name, "a torch.dtype or None", x, x is None or is_dtype)
            is_wide = not is_dtype or (x.is_floating_point and x.itemsize > 1)
            wrong += must_be(name, "a floating dtype of at least 16 bits", x, is_wide)
        elif name == "aux":
            leaves = flatten(x)[0]
            ok = all(isinstance(leaf, str) and leaf in get_args(AuxReduction) for leaf in leaves)
            wrong += must_be(name, '"mean", "sum" or "rows", or a tree of these', x, ok)
        elif name in _FUNCTIONS:
            wrong += must_be(name, "a function or None", x, x is None or callable(x))
        elif name == "recompute":
            ok = x in ("never", "always", "except_last") or not integer(name, x)
            wrong += must_be(name, '"never", "always", "except_last" or an integer >= 1', x, ok)
    if given.get("slices") is not None and not reproducible:
        wrong.append(
            f"slices={given['slices']} has no meaning without reproducible=True, and accumulate= cuts each device's part"
        )
    if reproducible and (reduce := given.get("reduce")) in (torch.bfloat16, torch.float16):
        wrong.append(
            f"reproducible=True with reduce={reduce}: sums in 16 bits are rounded differently on other meshes; "
            "reduce=torch.float32 is not"
        )
    return wrong


def must_be(name: str, what: str, x: Any, ok: bool) -> list[str]:
    """Return the error of an invalid argument.

    >>> must_be("unit", "a pattern", 3, isinstance(3, str))
    ['unit must be a pattern, got 3']
    """
    return [] if ok else [f"{name} must be {what}, got {shown(x)}"]


def one_of(name: str, x: Any, *legal: Any) -> list[str]:
    """Complain of an argument that is none of a few values.

    >>> one_of("precision", "fp8", "bf16", "fp16", None)
    ["precision must be 'bf16', 'fp16' or None, got 'fp8'"]
    """
    *others, last = map(repr, legal)
    return must_be(name, f"{', '.join(others)} or {last}", x, any(type(x) is type(one) and x == one for one in legal))


def integer(name: str, x: Any, least: int = 1) -> list[str]:
    """Complain of an argument that is no integer, or a smaller one.

    >>> integer("seed", -1, 0), integer("seed", True, 0), integer("seed", 3)
    (['seed must be an integer >= 0, got -1'], ['seed must be an integer >= 0, got True'], [])
    """
    ok = isinstance(x, Integral) and not isinstance(x, bool) and int(x) >= least
    return must_be(name, f"an integer >= {least}", x, ok)


def flag(name: str, x: Any) -> list[str]:
    """Complain of an argument that is neither True nor False."""
    return one_of(name, x, True, False)


def unknown(name: str, given: Mapping[str, Any], legal: Iterable[str]) -> list[str]:
    """Complain of keys that a mapping must not have, naming the legal ones, and the words for names of other libraries.

    >>> unknown("options", {"buckt": 1, "tp_size": 2}, ["bucket", "reduce"])
    ["options has no 'buckt', 'tp_size' (use tensor=2, sample=batch); legal: bucket, reduce"]
    """
    legal = [*legal]
    wrong = [f"{key!r} (use {NAMES[key]})" if key in NAMES else repr(key) for key in given if key not in legal]
    return [f"{name} has no {', '.join(wrong)}; legal: {', '.join(legal)}"] if wrong else []


def refusal(call: Callable[[], Any]) -> list[str]:
    """Call a function; return the text of the error by which it refuses its arguments."""
    try:
        call()
    except (FshardError, TypeError, ValueError) as error:
        return [str(error).rstrip(".")]
    return []
