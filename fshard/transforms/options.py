"""The options of a step: each has its type, default, check, uses and description in one place.

    @takes_options(Options, until="backward")
    def value_and_grad(loss_fn, options):            an `Options` value, checked
    value_and_grad(loss_fn, mesh=mesh, ...)          its fields by keyword, statically typed

To add one, add a field to a group below: name, type, checks, uses, default, and its description.
`StepOptions` is what the engine reads.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum, auto
from functools import wraps
from itertools import pairwise
from numbers import Integral
from reprlib import repr as shown
from textwrap import wrap
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import torch
from torch import Tensor

from fshard.errors import FshardError
from fshard.foreign_names import NAMES
from fshard.mesh.layout import Axes, Layout, Mesh, P, PyTree, as_axes, flatten
from fshard.mesh.layout.counting import ActivationMemory
from fshard.pipeline.schedule.schedule import Schedule
from fshard.transforms.patterns import Choice

AuxReduction = Literal["mean", "sum", "rows"]
Precision = Literal["bf16", "fp16"]
Recompute = Literal["never", "always", "except_last"] | int
Weight = Callable[[PyTree], Tensor | int | float]
GradientLayouts = Callable[[Layout], Layout]
StageInputs = Callable[[PyTree], PyTree]

COMPUTE_DTYPES: Mapping[Precision | None, torch.dtype | None] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    None: None,
}


class Use(Enum):
    """A step that an option has a meaning for; an option with none of these has one for all."""

    BACKWARD = auto()  # it changes the backward: not for `evaluate`
    UPDATE = auto()  # it changes the update: for `train_step` alone
    SCHEDULED = auto()  # for stages alone
    UNSCHEDULED = auto()  # for a full model alone
    PLUGIN = auto()  # also for `options=` of the Booster's plugins


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The batch and the loss."""

    mesh: Mesh
    """The devices."""

    batch: PyTree
    """The sharding of the batch: a P, or a prefix tree of Ps. Gradients are summed over its axes.
    Other inputs of the loss, such as a second network, are leaves with P(), which may be `Sharded`:
    these are unsharded, all together."""

    has_buffers: Annotated[bool, flag] = False
    """The loss has buffers, such as BatchNorm's: it is `loss_fn(params, buffers, batch)` and
    returns (loss, new buffers). Of stages: a list of one tree each, sharded by `shard_stages`."""

    has_aux: Annotated[bool, flag] = False
    """The loss returns metrics, last: numbers, which are averaged as the loss is."""

    aux: Annotated[PyTree, _reductions] = None
    """How metrics are combined, in place of `has_aux`: "mean", "sum" (counts), or "rows" (a row per
    sample, returned for the entire batch, as a `Sharded`); or a prefix tree of these. A tensor with
    dims and without a word raises."""

    weight: Annotated[Weight | None, _function] = None
    """The weight of a part of the batch: `weight(part)`, such as its number of tokens. Default: its
    number of samples. A part of weight 0 adds nothing, even if its loss is not finite, unless the
    loss calls a collective; negative weights and a total of 0 raise. The loss is then one number.
    For a weight on a device the host waits, once a step."""


@dataclass(frozen=True, kw_only=True)
class AccumulationOptions:
    """Accumulation."""

    accumulate: Annotated[int, at_least(1), Use.UNSCHEDULED] = 1
    """Split each device's part into this many slices, run in sequence. They differ by at most one
    sample."""

    reduce_once: Annotated[bool | None, flag, Use.BACKWARD, Use.UNSCHEDULED, Use.PLUGIN] = None
    """With `accumulate`, sum gradients locally and reduce the sum, instead of reducing each: it
    sends less and holds full gradients meanwhile. Default: True, but with ZeRO 2 and 3."""


@dataclass(frozen=True, kw_only=True)
class ParameterOptions:
    """Parameters and gradients."""

    gradients: Annotated[GradientLayouts | None, _function, Use.BACKWARD] = None
    """From a parameter's layout to its gradient's. Default: the optimizer's, else the same."""

    frozen: Annotated[Choice, Use.BACKWARD] = None
    """Parameters without a gradient here: a path pattern, several, or a function of the path
    ("blocks[3].w"). Those that are never trained are better frozen by `shard_params`: they have no
    optimizer state either."""

    local: Axes = ()
    """Axes along which a parameter is used as it is stored: the loss gets the device's shard of one
    with P(None, "model"), and calls the collectives along these axes itself. Its gradient is not
    reduced along them, that of a replicated one is. The loss must be equal along them, which is
    compared (on accelerators in the first step only): a forgotten psum raises. See the guide of
    ZeRO for its use with ZeRO, uneven dims and experts."""


@dataclass(frozen=True, kw_only=True)
class ReproducibleOptions:
    """Reproducible."""

    reproducible: Annotated[bool, flag] = False
    """Equal bits on every mesh, for a fixed size of local axes; of stages to a full model with as
    many `slices` as there are microbatches on all devices."""

    slices: Annotated[int | None, at_least(1), Use.UNSCHEDULED] = None
    """The number of slices of the entire batch then, on any mesh; default 8. Of several devices
    each must have 1, 2, 4, ... of them, since other numbers would round differently."""


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Precision."""

    precision: Annotated[Precision | None, _precision, Use.UPDATE] = None
    """Compute in "bf16" or "fp16"; parameters and state stay in their own dtype (float32 masters).
    Gradients are reduced in 16 bits ("bf16") or in float32 ("fp16", which needs
    `fs.optim.loss_scaled(opt)`), unless `reduce` names another dtype."""

    compute: Annotated[torch.dtype | None, _dtype] = None
    """The floating dtype of parameters and batch in computation. Default: by `precision`, else
    their own."""

    reduce: Annotated[torch.dtype | None, _dtype, Use.BACKWARD, Use.PLUGIN] = None
    """The dtype that gradients are reduced in. Default: by `precision`, else that of the
    computation; in reproducible mode, and where slices are summed, that or float32, whichever is
    wider. NCCL rounds a sum in 16 bits at each addition."""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Memory and prefetch."""

    donate: Annotated[bool, flag, Use.UPDATE] = False
    """Reuse the memory of the parameters and state that a step gets for its results: each later use
    of the given arrays raises. Frozen ones are the same arrays."""

    reshard_after_forward: Annotated[bool, flag, Use.BACKWARD, Use.UNSCHEDULED] = True
    """Unshard units again for the backward instead of keeping them."""

    live_units: Annotated[int, at_least(1), Use.PLUGIN] = 2
    """Number of sharded units that are unsharded at a time, beside the prefetched ones, and in the
    backward those of a rematerialised block that runs again; of stages the current and next ones,
    if the schedule has no times for that."""

    prefetch: Annotated[int, at_least(0), Use.UNSCHEDULED, Use.PLUGIN] = 1
    """Number of units to all-gather ahead of their use, in the order of the previous step."""

    in_flight: Annotated[int, at_least(0), Use.BACKWARD, Use.UNSCHEDULED, Use.PLUGIN] = 2
    """Number of reductions that may run during the backward; each holds a packed copy of its
    gradients."""

    bucket: Annotated[int | None, at_least(0), Use.BACKWARD, Use.UNSCHEDULED, Use.PLUGIN] = None
    """Approximate bytes of gradients of replicated parameters (ZeRO 0 to 2) to reduce together, in
    the order of the backward. 0: each unit alone. Default: 25 MiB on GPUs, 8 MiB on CPUs."""

    activations: Annotated[Mapping[str, ActivationMemory], _memories, Use.BACKWARD] = field(
        default_factory=dict[str, ActivationMemory]
    )
    """The memory of those with a name of `fs.nn.checkpoint_name` until the backward, in place of a
    policy `fs.nn.save_names`: "device", "host" or "recomputed", by name."""


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """Stages."""

    schedule: Schedule | None = None
    """Placement and order of the stages' work: see `pipeline_schedule`. None: a full model."""

    loss: Annotated[Callable[..., Any] | None, Use.SCHEDULED] = None
    """loss(y, microbatch), where y is the last stage's output: the mean, or a value per sample."""

    inputs: Annotated[StageInputs | None, _function, Use.SCHEDULED, Use.PLUGIN] = None
    """inputs(microbatch): the first stage's input. Default: x of a pair (x, target), else all."""

    skips: Annotated[Mapping[str, tuple[int, int]] | None, Use.SCHEDULED, Use.PLUGIN] = None
    """{name: (source, target)}: stage `source` returns (y, {name: value}), stage `target` gets
    name=value."""

    axis: Annotated[str, Use.SCHEDULED] = "pipe"
    """The mesh axis of the stages."""

    dynamic: Annotated[bool, flag, Use.SCHEDULED, Use.PLUGIN] = False
    """Shapes of activations depend on more than the shapes of the microbatch."""

    recompute: Annotated[Recompute, _recompute, Use.BACKWARD, Use.SCHEDULED] = "never"
    """The activations to recompute in the backward instead of saving: see `stage_functions`."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Options(  # from the last group to the first: so a dataclass orders fields from first to last
    StageOptions,
    MemoryOptions,
    PrecisionOptions,
    ReproducibleOptions,
    ParameterOptions,
    AccumulationOptions,
    BatchOptions,
):
    """The options of `train_step`, `value_and_grad`, `grad` and `evaluate`, as they are given.

    >>> from fshard import P, make_mesh
    >>> Options(mesh=make_mesh({"data": 2}), batch=P("data"), bucket=-1, slices=4)
    Traceback (most recent call last):
    ValueError: bucket must be an integer >= 0, got -1; slices=4 has no meaning without reproducible=...
    """

    def __post_init__(self) -> None:
        errors = list[str]()
        for name, option in OPTIONS.items():
            value = vars(self)[name]
            if value is None and option.default is None:
                continue
            for check in option.checks:
                errors += check(name, value)
        errors += self._contradictions()
        if errors:
            raise ValueError(f"{'; '.join(errors)}.")

    def __repr__(self) -> str:
        """Show the options that differ from their defaults: few of many."""
        texts = list[str]()
        for each in fields(self):
            value = vars(self)[each.name]
            is_required = each.default is MISSING and each.default_factory is MISSING
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if is_required or value != default:
                texts.append(f"{each.name}={value!r}")
        return f"{type(self).__name__}({', '.join(texts)})"

    def _contradictions(self) -> list[str]:
        """List the options, each valid, that contradict each other."""
        errors = list[str]()
        if self.slices is not None and not self.reproducible:
            errors.append(
                f"slices={self.slices} has no meaning without reproducible=True, "
                "and accumulate= cuts each device's part"
            )
        if self.reproducible and self.reduce in (torch.bfloat16, torch.float16):
            errors.append(
                f"reproducible=True with reduce={self.reduce}: sums in 16 bits are rounded "
                "differently on other meshes; reduce=torch.float32 is not"
            )
        return errors


def default_bucket(device_type: str) -> int:
    """Return the bytes of a bucket on a kind of device; an abstract mesh is one of GPUs.

    NCCL has a third of its bandwidth at 8 MiB on 8 GPUs, and less across machines: 25 MiB, as
    torch's DistributedDataParallel. On CPUs 1 MiB is slower where the backward depends on caches,
    25 where bandwidth is the limit, and takes more memory.
    """
    return 8 << 20 if device_type == "cpu" else 25 << 20


def same_layouts(layout: Layout) -> Layout:
    """Give gradients the layouts of their parameters."""
    return layout


@dataclass(frozen=True, kw_only=True, repr=False)
class StepOptions(Options):
    """The options of one gradient as the engine reads them: completed, with the loss function.

    Args:
        loss_fn: of (params, batch), or of what the last stage returns and the microbatch.
        caller: the function that was called, for messages.
        backward: False takes no gradient.
        gradients, local, reduce_once, bucket: as in `Options`; they are never left out here.
    """

    loss_fn: Callable[..., Any]
    caller: str
    backward: bool = True
    gradients: GradientLayouts = same_layouts
    local: tuple[str, ...] = ()
    reduce_once: bool = True
    bucket: int = 0

    @classmethod
    def of(
        cls,
        options: Options,
        loss_fn: Callable[..., Any],
        *,
        caller: str,
        backward: bool = True,
        **of_stages: int,
    ) -> StepOptions:
        """Return the options with their defaults that depend on others.

        Args:
            of_stages: what a schedule decides: the number of slices, and those of each device.
        """
        completed: dict[str, Any] = {**vars(options), **of_stages}
        completed["has_aux"] = options.has_aux or options.aux is not None
        completed["local"] = as_axes(options.local)
        completed["slices"] = (completed["slices"] or 8) if options.reproducible else None
        completed["compute"] = options.compute or COMPUTE_DTYPES[options.precision]
        if options.bucket is None:
            completed["bucket"] = default_bucket(options.mesh.device_type)
        if options.reduce is None and options.precision == "fp16":
            completed["reduce"] = torch.float32
        given = {name: value for name, value in completed.items() if value is not None}
        return cls(loss_fn=loss_fn, caller=caller, backward=backward, **given)

    def used_in(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter of this dtype is used."""
        if self.compute is None or not dtype.is_floating_point:
            return dtype
        return self.compute

    def reduced_in(self, dtype: torch.dtype, *, wide: bool) -> torch.dtype:
        """Return the dtype that a parameter's gradient is reduced in; at least 32 bits if `wide`."""
        if dtype.is_complex:
            return dtype
        if self.reduce is not None:
            return self.reduce
        used = self.compute or dtype
        return torch.promote_types(used, torch.float32) if wide else used

    def used(self, layout: Layout) -> Layout:
        """Return the layout in which a parameter is used.

        That is sharded along local axes, as it is stored; else replicated.
        """
        if not self.local:
            return Layout(layout.mesh)
        return Layout(layout.mesh, P(*layout.spec.entries))

    def turns(self, n: int) -> int:
        """Return the number of slices of each of n devices.

        In reproducible mode they are one branch of the global tree.
        """
        if self.slices is None:  # not in reproducible mode
            return self.accumulate
        count, remainder = divmod(self.slices, n)
        remedy = (
            f"Give each device 1, 2, 4, ... slices, such as {n << count.bit_length()} in all, on "
            "all your meshes; three devices and two have no number in common."
        )
        if remainder:
            raise ValueError(
                f"reproducible mode cuts the batch into {self.slices} slices, which {n} devices do "
                f"not share evenly. {remedy}"
            )
        is_power_of_two = count & (count - 1) == 0
        if n > 1 and not is_power_of_two:
            raise ValueError(
                f"reproducible mode adds {self.slices} slices in one binary tree, of which the "
                f"{count} of each of {n} devices are no branch: one device would round "
                f"differently. {remedy}"
            )
        if count % self.accumulate:
            raise ValueError(
                f"accumulate must divide {count}, the slices of a device in reproducible mode; got "
                f"{self.accumulate}. Give accumulate=1, or other slices."
            )
        return count


# Checks of single arguments: each returns a list of errors.

Check = Callable[[str, Any], list[str]]


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
    is_legal = any(type(x) is type(choice) and x == choice for choice in legal)
    return must_be(name, f"{', '.join(choices)} or {last}", x, is_legal)


def integer(name: str, x: Any, least: int = 1) -> list[str]:
    """Complain of an argument that is no integer, or a smaller one.

    >>> integer("seed", -1, 0), integer("seed", True, 0), integer("seed", 3)
    (['seed must be an integer >= 0, got -1'], ['seed must be an integer >= 0, got True'], [])
    """
    is_integer = isinstance(x, Integral) and not isinstance(x, bool)
    return must_be(name, f"an integer >= {least}", x, is_integer and int(x) >= least)


def flag(name: str, x: Any) -> list[str]:
    """Complain of an argument that is neither True nor False."""
    return one_of(name, x, True, False)


def unknown(name: str, keys: Iterable[str], legal: Iterable[str]) -> list[str]:
    """Complain of keys that a mapping must not have; name the legal ones, and fshard's words for others.

    >>> unknown("options", {"buckt": 1, "tp_size": 2}, ["bucket", "reduce"])
    ["options has no 'buckt', 'tp_size' (use tensor=2, sample=batch); legal: bucket, reduce"]
    """
    legal = [*legal]
    illegal = list[str]()
    for key in keys:
        if key not in legal:
            illegal.append(f"{key!r} (use {NAMES[key]})" if key in NAMES else repr(key))
    if not illegal:
        return []
    return [f"{name} has no {', '.join(illegal)}; legal: {', '.join(legal)}"]


class KnownKeywords:
    """A base of dataclasses whose error for other keywords names the legal ones, and our words.

    >>> @dataclass
    ... class Sizes(KnownKeywords):
    ...     tensor: int = 1
    >>> Sizes(tp_size=2)
    Traceback (most recent call last):
    TypeError: Sizes has no 'tp_size' (use tensor=2, sample=batch); legal: tensor.
    """

    @classmethod
    def keywords(cls) -> list[str]:
        """Return the legal keywords."""
        declared: Any = cls
        return [field.name for field in fields(declared)]

    # Before `__init__`, whose own error would name only the first one, and no legal one.
    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        # Copies and pickles of a dataclass are made without any.
        errors = unknown(cls.__name__, keywords, cls.keywords()) if keywords else []
        if errors:
            raise TypeError(f"{errors[0]}.")
        return super().__new__(cls)


def refusal(function: Callable[[], Any]) -> list[str]:
    """Call a function; return the text of the error by which it refuses its arguments."""
    try:
        function()
    except (FshardError, TypeError, ValueError) as error:
        return [str(error).rstrip(".")]
    return []


def at_least(least: int) -> Check:
    """Return the check of an integer with a lower bound."""
    return lambda name, x: integer(name, x, least)


def _function(name: str, x: Any) -> list[str]:
    return must_be(name, "a function or None", x, callable(x))


def _dtype(name: str, x: Any) -> list[str]:
    if not isinstance(x, torch.dtype):
        return must_be(name, "a torch.dtype or None", x, ok=False)
    is_wide = x.is_floating_point and x.itemsize > 1
    return must_be(name, "a floating dtype of at least 16 bits", x, is_wide)


def _reductions(name: str, x: Any) -> list[str]:
    words = flatten(x)[0]
    are_known = all(isinstance(word, str) and word in get_args(AuxReduction) for word in words)
    return must_be(name, '"mean", "sum" or "rows", or a tree of these', x, are_known)


def _precision(name: str, x: Any) -> list[str]:
    return one_of(name, x, *get_args(Precision), None)


def _memories(name: str, x: Any) -> list[str]:
    legal = get_args(ActivationMemory)
    is_legal = isinstance(x, Mapping) and all(memory in legal for memory in x.values())
    return must_be(name, 'a dict from names to "device", "host" or "recomputed"', x, is_legal)


def _recompute(name: str, x: Any) -> list[str]:
    is_legal = x in ("never", "always", "except_last") or not integer(name, x)
    return must_be(name, '"never", "always", "except_last" or an integer >= 1', x, is_legal)


# What is derived from the fields: a table of them, signatures, the text of help.


@dataclass(frozen=True)
class OptionField:
    """One field of `Options`: the parts of its annotation, and the text below it."""

    name: str
    default: Any
    annotation: str
    checks: Sequence[Check]
    uses: Set[Use]
    group: str
    description: str

    @classmethod
    def of(cls, definition: Field[Any], hint: Any, group: str, description: str) -> OptionField:
        """Return a field with what is in its annotation: `Annotated[type, *checks, *uses]`."""
        metadata = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        default = definition.default
        if definition.default_factory is not MISSING:
            default = definition.default_factory()
        return cls(
            name=definition.name,
            default=default,
            annotation=_type_in(str(definition.type)),
            checks=[x for x in metadata if not isinstance(x, Use)],
            uses={x for x in metadata if isinstance(x, Use)},
            group=group,
            description=description,
        )

    def parameter(self) -> inspect.Parameter:
        """Return the option as a parameter of a function."""
        default = inspect.Parameter.empty if self.default is MISSING else self.default
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, kind, default=default, annotation=self.annotation)


def _type_in(annotation: str) -> str:
    """Return an annotation without the rest of an `Annotated`, as it is written.

    >>> _type_in("Annotated[int | None, at_least(1), Use.PLUGIN]"), _type_in("Mesh")
    ('int | None', 'Mesh')
    """
    match ast.parse(annotation, mode="eval").body:
        case ast.Subscript(value=ast.Name("Annotated"), slice=ast.Tuple(elts=[first, *_])):
            return ast.unparse(first)
        case _:
            return annotation


def _collect_options() -> dict[str, OptionField]:
    """Return the fields of `Options` by name, in order."""
    descriptions = _descriptions()
    hints = get_type_hints(Options, include_extras=True)
    groups = dict[str, str]()
    for group in Options.__bases__:
        title = inspect.getdoc(group) or ""
        groups |= dict.fromkeys(group.__annotations__, title.rstrip("."))
    options = dict[str, OptionField]()
    for definition in fields(Options):
        name = definition.name
        options[name] = OptionField.of(
            definition, hints[name], groups[name], descriptions.get(name, "")
        )
    return options


def _descriptions() -> dict[str, str]:
    """Return the strings below the fields, by field: Python itself drops them."""
    try:
        source = inspect.getsource(sys.modules[__name__])
    except OSError:  # a program that was packed without its sources has help without them
        return {}
    descriptions = dict[str, str]()
    for group in ast.parse(source).body:
        if isinstance(group, ast.ClassDef):
            for statement, following in pairwise(group.body):
                match statement, following:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        descriptions[name] = " ".join(text.split())
                    case _:
                        pass
    return descriptions


OPTIONS: Mapping[str, OptionField] = _collect_options()
"""The options by name, in the order of their groups."""

Last = Literal["forward", "backward", "update"]
_EXCLUDED: dict[Last, Set[Use]] = {
    "forward": {Use.BACKWARD, Use.UPDATE},
    "backward": {Use.UPDATE},
    "update": set(),
}


def options_until(last: Last) -> list[OptionField]:
    """Return the options of a function whose last phase of a step is this one."""
    return [option for option in OPTIONS.values() if not option.uses & _EXCLUDED[last]]


def plugin_options(*, in_stages: bool) -> list[str]:
    """Return the names of the options that a plugin of the Booster takes in `options=`, sorted."""
    excluded = Use.UNSCHEDULED if in_stages else Use.SCHEDULED
    names = list[str]()
    for name, option in OPTIONS.items():
        if Use.PLUGIN in option.uses and excluded not in option.uses:
            names.append(name)
    return sorted(names)


Given = ParamSpec("Given")
First = TypeVar("First")
Second = TypeVar("Second")
Result = TypeVar("Result")
_MARK = "{options}"
_HELP_WIDTH = 96  # help() indents a docstring by 4: 100 columns in all


class TakesOptions(Protocol[Given]):
    """A decorator: the last parameter of a function becomes keywords. Static checkers read it."""

    @overload
    def __call__(
        self, function: Callable[[First, Options], Result], /
    ) -> Callable[Concatenate[First, Given], Result]: ...
    @overload
    def __call__(
        self, function: Callable[[First, Second, Options], Result], /
    ) -> Callable[Concatenate[First, Second, Given], Result]: ...


def takes_options(make: Callable[Given, Options], *, until: Last) -> TakesOptions[Given]:
    """Return a decorator: the last parameter of a function, `options`, is given by keywords.

    They are the fields of `make`, so that static checkers know them. At run time too: they are in
    the signature, and their descriptions take the place of "{options}" in the docstring.

    Args:
        make: `Options`, of which nothing else lists the fields.
        until: the last phase of a step that the function runs: options of later ones raise.
    """
    options = options_until(until)

    def decorator(function: Callable[..., Any]) -> Any:
        parameters = [*inspect.signature(function).parameters.values()][:-1]
        caller = function.__name__

        @wraps(function)
        def run(*args: Any, **given: Any) -> Any:
            named = dict[str, Any]()  # such as loss_fn=
            for parameter in parameters:
                if parameter.name in given:
                    named[parameter.name] = given.pop(parameter.name)
            _validate_given(caller, given, options)
            validate_names(caller, given, options, is_scheduled=given.get("schedule") is not None)
            try:
                value: Any = make(**given)  # type: ignore[call-arg]
            except ValueError as error:
                raise ValueError(f"{caller}: {error}") from None
            return function(*args, **named, options=value)

        decorated: Any = run
        keywords = [option.parameter() for option in options]
        signature = inspect.signature(function)
        decorated.__signature__ = signature.replace(parameters=[*parameters, *keywords])
        docstring = function.__doc__
        if docstring is not None:  # with python -OO there is none
            decorated.__doc__ = _with_descriptions(docstring, options)
        return decorated

    return decorator


def _validate_given(caller: str, given: Mapping[str, Any], options: Sequence[OptionField]) -> None:
    """Raise if options without a default are missing."""
    missing = [x.name for x in options if x.default is MISSING and x.name not in given]
    if missing:
        names = " and ".join([f"{name}=" for name in missing])
        raise TypeError(f"{caller} must be given {names}.")


def validate_names(
    caller: str, given: Iterable[str], options: Sequence[OptionField], *, is_scheduled: bool
) -> None:
    """Raise if options are unknown, or have no meaning in the function that was called."""
    excluded = Use.UNSCHEDULED if is_scheduled else Use.SCHEDULED
    legal = [option.name for option in options if excluded not in option.uses]
    illegal = [name for name in given if name not in legal]
    if not illegal:
        return
    of_stages = [option.name for option in options if Use.SCHEDULED in option.uses]
    when = "With a schedule" if is_scheduled else "Without a schedule"
    fix = ""
    if not is_scheduled and not {*illegal}.isdisjoint(of_stages):
        fix = " For stages give schedule=fs.pipeline_schedule(...)."
    raise ValueError(
        f"{caller} has no option {', '.join(illegal)}. {when} it has: {', '.join(legal)}.{fix}"
    )


def _with_descriptions(docstring: str, options: Sequence[OptionField]) -> str:
    """Return a docstring with the descriptions of options, by group, in place of its mark."""
    lines = list[str]()
    group = ""
    for option in options:
        if option.group != group:
            group = option.group
            lines += ["", f"{group}:"]
        lines += wrap(
            f"{option.name}: {option.description}",
            _HELP_WIDTH,
            initial_indent="    ",
            subsequent_indent="        ",
            break_on_hyphens=False,
        )
    return inspect.cleandoc(docstring).replace(_MARK, "\n".join(lines[1:]))
