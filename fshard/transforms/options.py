"""The options of `value_and_grad` and their values; checks of single arguments, each returns a list of errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from reprlib import repr as shown
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor

from fshard.errors import FshardError
from fshard.foreign_names import NAMES
from fshard.mesh.layout import Axes, Layout, P, PyTree, as_axes, flatten
from fshard.mesh.layout.counting import ActivationMemory
from fshard.transforms.patterns import Choice

AuxReduction = Literal["mean", "sum", "rows"]
Weight = Callable[[PyTree], Tensor | int | float]


class Options(TypedDict, total=False):
    """All options by name: those of loss functions, then those of stages alone."""

    has_buffers: bool
    has_aux: bool
    aux: PyTree
    weight: Weight | None
    accumulate: int
    reduce_once: bool
    gradients: Callable[[Layout], Layout] | None
    frozen: Choice
    local: Axes
    reproducible: bool
    slices: int | None
    reshard_after_forward: bool
    live_units: int
    prefetch: int
    in_flight: int
    bucket: int
    activations: Mapping[str, ActivationMemory]
    compute: torch.dtype | None
    reduce: torch.dtype | None

    loss: Callable[..., Any] | None
    inputs: Callable[[PyTree], PyTree] | None
    skips: Mapping[str, tuple[int, int]] | None
    axis: str
    dynamic: bool
    recompute: Literal["never", "always", "except_last"] | int


OF_STAGES_ALONE = ("loss", "inputs", "skips", "axis", "dynamic", "recompute")
OF_LOSSES_ALONE = (
    "accumulate",
    "reduce_once",
    "slices",
    "reshard_after_forward",
    "prefetch",
    "in_flight",
    "bucket",
)
OF_LOSSES = [name for name in Options.__annotations__ if name not in OF_STAGES_ALONE]
OF_STAGES = [*OF_STAGES_ALONE, *(name for name in OF_LOSSES if name not in OF_LOSSES_ALONE)]


def same_layouts(layout: Layout) -> Layout:
    """Give gradients the layouts of their parameters."""
    return layout


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of a step, with their defaults; for those of the user see `value_and_grad`.

    Args:
        loss_fn: of (params, batch), or of what the last stage returns and the microbatch.
        caller: the function that was called, for messages.
        backward: False takes no gradient.
        slices: the number of slices of the global batch in reproducible mode; None: another mode.
    """

    loss_fn: Callable[..., Any]
    caller: str = "value_and_grad"
    backward: bool = True
    has_buffers: bool = False
    has_aux: bool = False
    aux: PyTree = None
    weight: Weight | None = None
    accumulate: int = 1
    reduce_once: bool = True
    gradients: Callable[[Layout], Layout] = same_layouts
    frozen: Choice = None
    local: tuple[str, ...] = ()
    reproducible: bool = False
    slices: int | None = None
    reshard_after_forward: bool = True
    live_units: int = 2
    prefetch: int = 1
    in_flight: int = 2
    bucket: int = 8 << 20
    activations: Mapping[str, ActivationMemory] = field(default_factory=dict[str, ActivationMemory])
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    @classmethod
    def of(
        cls, loss_fn: Callable[..., Any], options: Mapping[str, Any], **fields: Any
    ) -> StepOptions:
        """Return the step's options from valid ones of the user."""
        chosen: dict[str, Any] = {
            **options,
            "has_aux": options.get("has_aux", False) or options.get("aux") is not None,
            "gradients": options.get("gradients") or same_layouts,
            "local": as_axes(options.get("local", ())),
            "slices": (options.get("slices") or 8) if options.get("reproducible") else None,
        }
        return cls(loss_fn=loss_fn, **(chosen | fields))

    def used_in(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter of this dtype is used."""
        return self.compute or dtype if dtype.is_floating_point else dtype

    def reduced_in(self, dtype: torch.dtype, *, wide: bool) -> torch.dtype:
        """Return the dtype that the gradient of a parameter is reduced in; at least 32 bits if it is `wide`."""
        if dtype.is_complex:
            return dtype
        used = self.compute or dtype
        return self.reduce or (torch.promote_types(used, torch.float32) if wide else used)

    def used(self, layout: Layout) -> Layout:
        """Return the layout in which a parameter is used: sharded along local axes, as it is stored, else replicated."""
        return Layout(layout.mesh, P(*layout.spec.entries)) if self.local else Layout(layout.mesh)

    def turns(self, n: int) -> int:
        """Return the number of slices of each of n devices; in reproducible mode they are one branch of the global
        tree.
        """
        if self.slices is None:  # not in reproducible mode
            return self.accumulate
        count, remainder = divmod(self.slices, n)
        if remainder or count % self.accumulate:
            raise ValueError(
                f"reproducible mode cuts the batch into {self.slices} slices, which {n} devices do not share evenly "
                f"in {self.accumulate} turns. Give a number of slices that all your meshes divide."
            )
        if n > 1 and count & (count - 1):
            raise ValueError(
                f"reproducible mode adds {self.slices} slices in one binary tree, of which the {count} of each of {n} devices "
                f"are no branch: one device would round differently. "
                f"Give each 1, 2, 4, ... slices, such as {n << count.bit_length()}."
            )
        return count


_LEAST = {"live_units": 1, "accumulate": 1, "slices": 1, "prefetch": 0, "in_flight": 0, "bucket": 0}
_FLAGS = (
    "has_buffers",
    "has_aux",
    "reproducible",
    "reduce_once",
    "reshard_after_forward",
    "dynamic",
)
_FUNCTIONS = ("weight", "gradients", "loss", "inputs")


def wrong_options(options: Mapping[str, Any]) -> list[str]:
    """List the errors of each option and of their combination."""
    errors, reproducible = list[str](), bool(options.get("reproducible"))
    for name, x in options.items():
        if name in _LEAST and not (name == "slices" and x is None):
            errors += integer(name, x, _LEAST[name])
        elif name in _FLAGS:
            errors += flag(name, x)
        elif name in ("compute", "reduce"):
            is_dtype = isinstance(x, torch.dtype)
            errors += must_be(name, "a torch.dtype or None", x, x is None or is_dtype)
            is_wide = not is_dtype or (x.is_floating_point and x.itemsize > 1)
            errors += must_be(name, "a floating dtype of at least 16 bits", x, is_wide)
        elif name == "aux":
            leaves = flatten(x)[0]
            ok = all(isinstance(leaf, str) and leaf in get_args(AuxReduction) for leaf in leaves)
            errors += must_be(name, '"mean", "sum" or "rows", or a tree of these', x, ok)
        elif name in _FUNCTIONS:
            errors += must_be(name, "a function or None", x, x is None or callable(x))
        elif name == "activations":
            ok = isinstance(x, Mapping) and all(
                memory in get_args(ActivationMemory) for memory in x.values()
            )
            errors += must_be(name, 'a dict from names to "device", "host" or "recomputed"', x, ok)
        elif name == "recompute":
            ok = x in ("never", "always", "except_last") or not integer(name, x)
            errors += must_be(name, '"never", "always", "except_last" or an integer >= 1', x, ok)
    if options.get("slices") is not None and not reproducible:
        errors.append(
            f"slices={options['slices']} has no meaning without reproducible=True, and accumulate= cuts each device's part"
        )
    if reproducible and (reduce := options.get("reduce")) in (torch.bfloat16, torch.float16):
        errors.append(
            f"reproducible=True with reduce={reduce}: sums in 16 bits are rounded differently on other meshes; "
            "reduce=torch.float32 is not"
        )
    return errors


def must_be(name: str, description: str, x: Any, ok: bool) -> list[str]:
    """Return the error of an invalid argument.

    >>> must_be("unit", "a pattern", 3, isinstance(3, str))
    ['unit must be a pattern, got 3']
    """
    return [] if ok else [f"{name} must be {description}, got {shown(x)}"]


def one_of(name: str, x: Any, *legal: Any) -> list[str]:
    """Complain of an argument that is none of a few values.

    >>> one_of("precision", "fp8", "bf16", "fp16", None)
    ["precision must be 'bf16', 'fp16' or None, got 'fp8'"]
    """
    *choices, last = map(repr, legal)
    return must_be(
        name,
        f"{', '.join(choices)} or {last}",
        x,
        any(type(x) is type(choice) and x == choice for choice in legal),
    )


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


def unknown(name: str, keys: Mapping[str, Any], legal: Iterable[str]) -> list[str]:
    """Complain of keys that a mapping must not have, naming the legal ones, and the words for names of other libraries.

    >>> unknown("options", {"buckt": 1, "tp_size": 2}, ["bucket", "reduce"])
    ["options has no 'buckt', 'tp_size' (use tensor=2, sample=batch); legal: bucket, reduce"]
    """
    legal = [*legal]
    illegal = [
        f"{key!r} (use {NAMES[key]})" if key in NAMES else repr(key)
        for key in keys
        if key not in legal
    ]
    return [f"{name} has no {', '.join(illegal)}; legal: {', '.join(legal)}"] if illegal else []


def refusal(call: Callable[[], Any]) -> list[str]:
    """Call a function; return the text of the error by which it refuses its arguments."""
    try:
        call()
    except (FshardError, TypeError, ValueError) as error:
        return [str(error).rstrip(".")]
    return []
