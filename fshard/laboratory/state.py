"""`LabState`: all that a reader has chosen in the lab, as one frozen value that checks itself.

model        the sizes of a Transformer; None: the module that `fs.lab` was given
devices      their number
plan         how they share a step: `fs.Parallelism`, whose `data` takes the devices that are left
overrides    the dims that axes were dragged to, by leaf: {"layers.*.q.weight": {"data": 1}}
optimizer    a name of `OPTIMIZERS`
cluster      a name of `fs.plan.cluster`

As JSON it is the part of a link behind "#": fields with their defaults are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, cast

import torch

import fshard as fs
from fshard.errors import FshardError, PlanError
from fshard.optim.contract import Optimizer
from fshard.parallelism.value import FIELDS, ONE_STAGE, Parallelism
from fshard.plan.cluster import PRESETS
from fshard.plan.models import Transformer
from fshard.plan.search import LARGEST_COUNT

OPTIMIZERS = {
    "adamw": "fs.optim.adamw(3e-4)",
    "adamw-master": "fs.optim.with_master_weights(fs.optim.adamw(3e-4))",
    "lion": "fs.optim.lion(1e-4)",
    "momentum": "fs.optim.sgd(0.1, momentum=0.9)",
    "sgd": "fs.optim.sgd(0.1)",
}
"""The optimizers, as they are written in a program."""

_MADE: dict[str, Callable[[], Optimizer]] = {
    "adamw": lambda: fs.optim.adamw(3e-4),
    "adamw-master": lambda: fs.optim.with_master_weights(fs.optim.adamw(3e-4)),
    "lion": lambda: fs.optim.lion(1e-4),
    "momentum": lambda: fs.optim.sgd(0.1, momentum=0.9),
    "sgd": lambda: fs.optim.sgd(0.1),
}

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
"""The dtypes of parameters, by name."""

SMALL = Transformer(
    layers=2, hidden=256, ffn=1024, heads=8, kv_heads=8, vocab=1024, sequence=128, gated=False
)
"""The model with which the lab begins: a change of it is answered in a fraction of a second."""

SIZES_OF_MODEL = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "sequence")
"""The sizes that each Transformer has."""

Overrides = Mapping[str, Mapping[str, int | None]]
"""The dim that shards a leaf along an axis, by the leaf's pattern; None: the axis shards none."""


class StateError(PlanError):
    """A state that contradicts itself, or that no program has.

    Args:
        text: in words.
        field: the path of the control that it is about, such as "plan.zero_stage".
    """

    def __init__(self, text: str, field: str = "") -> None:
        super().__init__(text)
        self.field = field


@dataclass(frozen=True, kw_only=True)
class LabState:
    """The choices in the lab: see the module.

    >>> state = LabState(devices=8, plan=Parallelism(tensor=2, zero_stage=3))
    >>> state.parallelism.mesh()
    Mesh(pipe=1, data=4, model=2; 8 devices, virtual, cpu)
    >>> LabState.from_json(state.to_json()) == state
    True
    """

    model: Transformer | None = SMALL
    devices: int = 8
    plan: Mapping[str, Any] | Parallelism = field(default_factory=dict[str, Any])
    overrides: Overrides = field(default_factory=dict[str, dict[str, int | None]])
    optimizer: str = "adamw"
    cluster: str = "h100"

    def __post_init__(self) -> None:
        _validate_count("devices", self.devices, LARGEST_COUNT)
        if self.optimizer not in OPTIMIZERS:
            _refuse("optimizer", f"one of {', '.join(OPTIMIZERS)}", self.optimizer)
        if self.cluster not in PRESETS:
            _refuse("cluster", f"one of {', '.join(PRESETS)}", self.cluster)
        if self.model is not None:
            _validate_model(self.model)

        plan = self.plan
        if not isinstance(plan, Parallelism):
            plan = _plan_of(plan)
        layers = None if self.model is None else self.model.layers
        reason = plan.misfit(devices=self.devices, layers=layers)
        if reason:
            raise StateError(f"Parallelism: {reason}.", _field_named(reason, plan))
        object.__setattr__(self, "plan", MappingProxyType(given_fields(plan)))
        self._freeze_overrides()

    def _freeze_overrides(self) -> None:
        frozen = dict[str, Mapping[str, int | None]]()
        for pattern, dims in _mapping("overrides", self.overrides).items():
            path = f"overrides.{pattern}"
            for axis, dim in _mapping(path, dims).items():
                is_dim = type(dim) is int and dim >= 0
                if dim is not None and not is_dim:
                    _refuse(f"{path}.{axis}", "a dim, or null for none", dim, path)
            if dims:
                frozen[pattern] = MappingProxyType(dict(dims))
        object.__setattr__(self, "overrides", MappingProxyType(frozen))

    def __hash__(self) -> int:
        return hash(self.text)

    @cached_property
    def parallelism(self) -> Parallelism:
        """The plan on these devices, with `data` as a number."""
        return _plan_of(cast(Mapping[str, Any], self.plan)).on(self.devices)

    def new_optimizer(self) -> Optimizer:
        """Return the optimizer."""
        return _MADE[self.optimizer]()

    # -- as JSON ----------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the fields as values of JSON; of the plan those that have no default."""
        return {
            "model": _model_to_json(self.model),
            "devices": self.devices,
            "plan": dict(cast(Mapping[str, Any], self.plan)),
            "overrides": {pattern: dict(dims) for pattern, dims in self.overrides.items()},
            "optimizer": self.optimizer,
            "cluster": self.cluster,
        }

    @cached_property
    def text(self) -> str:
        """The state as one line of JSON: equal states have equal texts."""
        return json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, source: str | Mapping[str, Any]) -> LabState:
        """Return the state of a text or an object of JSON; fields that are left out have defaults.

        Raises:
            StateError: naming the field that is wrong, or one of those that contradict each other.
        """
        content = _parsed(source)
        unknown = [name for name in content if name not in _FIELDS]
        if unknown:
            raise StateError(
                f"lab: a state must have fields {', '.join(_FIELDS)}; got {', '.join(unknown)}."
            )
        values = dict[str, Any](content)
        if "model" in values:
            values["model"] = _model_of_json(values["model"])
        return cls(**values)


_FIELDS = tuple([each.name for each in fields(LabState)])


def _parsed(source: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(source, str):
        return _mapping("a state", source)
    try:
        return _mapping("a state", json.loads(source))
    except json.JSONDecodeError as error:
        raise StateError(f"lab: a state must be JSON; {error}.") from None


def _mapping(name: str, x: Any) -> Mapping[str, Any]:
    if not isinstance(x, Mapping):
        _refuse(name, "an object of JSON", x)
    return cast(Mapping[str, Any], x)


def _refuse(name: str, description: str, x: Any, path: str | None = None) -> None:
    """Raise, naming a field and what it must be."""
    raise StateError(f"lab: {name} must be {description}; got {x!r}.", path or name)


def _validate_count(name: str, x: Any, most: int) -> None:
    if type(x) is not int or not 1 <= x <= most:
        _refuse(name, f"an integer from 1 to {most:,}", x)


# -- the plan --------------------------------------------------------------------------------------


def _plan_of(content: Any) -> Parallelism:
    """Return the plan of some fields; all others have their defaults."""
    values = dict(_mapping("plan", content))
    unknown = [name for name in values if name not in FIELDS]
    if unknown:
        raise StateError(
            f"lab: plan must have fields of fs.Parallelism, {', '.join(FIELDS)}; "
            f"got {', '.join(unknown)}.",
            "plan",
        )
    try:
        return Parallelism(**values)
    except FshardError as error:
        raise StateError(str(error), _field_named(str(error))) from None


def given_fields(plan: Parallelism) -> dict[str, Any]:
    """Return the fields of a plan that differ from what follows from the others.

    So the number of microbatches follows that of stages until another one is chosen.
    """
    values = dict(vars(plan))
    del values["data"]  # it follows from `devices`
    automatic = replace(plan, data=None, microbatches=None)
    if automatic.microbatches == plan.microbatches:
        values["microbatches"] = None
    needs_two = plan.in_stages and plan.schedule not in ONE_STAGE
    if plan.chunks == (2 if needs_two else 1):
        values["chunks"] = None

    default = {**vars(Parallelism()), "microbatches": None, "chunks": None}
    return {name: value for name, value in values.items() if value != default[name]}


def _field_named(text: str, plan: Parallelism | None = None) -> str:
    """Return the path of the first field of a plan that a text names, of those that are set."""
    names = fields_named(text, FIELDS)
    for name in names:
        is_default = plan is not None and vars(plan)[name] == vars(Parallelism())[name]
        if name != "data" and not is_default:
            return f"plan.{name}"
    return "devices"


def fields_named(text: str, names: Iterable[str]) -> list[str]:
    """Return the names that occur in a text as words, in the order of the text.

    >>> fields_named("chunks must be 1 for schedule=...", ["schedule", "chunks", "rows"])
    ['chunks', 'schedule']
    """
    known = {*names}
    found = dict.fromkeys([word for word in re.findall(r"\w+", text) if word in known])
    return [*found]


# -- the model -------------------------------------------------------------------------------------


def _model_to_json(model: Transformer | None) -> dict[str, Any] | None:
    if model is None:
        return None
    content = dict[str, Any]()
    for each in fields(Transformer):
        value = getattr(model, each.name)
        if each.name in SIZES_OF_MODEL or value != each.default:
            content[each.name] = _model_value(value)
    return content


def _model_value(x: Any) -> Any:
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    return list(cast(tuple[str, ...], x)) if isinstance(x, tuple) else x


def _model_of_json(content: Any) -> Transformer | None:
    if content is None:
        return None
    values = dict(_mapping("model", content))
    legal = [each.name for each in fields(Transformer)]
    unknown = [name for name in values if name not in legal]
    required = [each.name for each in fields(Transformer) if each.default is MISSING]
    missing = [name for name in required if name not in values]
    if unknown or missing:
        raise StateError(
            f"lab: model must have the fields of fs.plan.Transformer, {', '.join(legal)}; "
            f"unknown: {', '.join(unknown) or 'none'}; missing: {', '.join(missing) or 'none'}.",
            "model",
        )
    if "dtype" in values:
        name = values["dtype"]
        if name not in DTYPES:
            _refuse("model.dtype", f"one of {', '.join(DTYPES)}", name)
        values["dtype"] = DTYPES[name]
    if isinstance(values.get("bias"), list):
        values["bias"] = tuple(values["bias"])
    return Transformer(**values)


LARGEST_SIZE = 2**30
"""The largest size of a model."""


def _validate_model(model: Transformer) -> None:
    """Raise unless the sizes of a model are those of one that can be built."""
    for name in SIZES_OF_MODEL:
        _validate_count(f"model.{name}", getattr(model, name), LARGEST_SIZE)
    for each in fields(Transformer):
        value = getattr(model, each.name)
        default = each.default
        is_count = type(default) is int and each.name not in SIZES_OF_MODEL
        if is_count and (type(value) is not int or not 0 <= value <= LARGEST_SIZE):
            _refuse(f"model.{each.name}", "an integer >= 0", value)
        if type(default) is bool and each.name != "bias" and type(value) is not bool:
            _refuse(f"model.{each.name}", "true or false", value)
    for name, choices in MODEL_CHOICES.items():
        if getattr(model, name) not in choices:
            _refuse(
                f"model.{name}", f"one of {', '.join(map(repr, choices))}", getattr(model, name)
            )

    if not model.head_dim and model.hidden % model.heads:
        _refuse("model.heads", f"a divisor of hidden={model.hidden}", model.heads)
    if model.heads % model.kv_heads:
        _refuse("model.kv_heads", f"a divisor of heads={model.heads}", model.kv_heads)
    if model.experts and not 1 <= model.top_k <= model.experts:
        _refuse("model.top_k", f"from 1 to experts={model.experts}", model.top_k)
    if model.experts and not model.expert_ffn:
        _refuse("model.expert_ffn", "at least 1 with experts", model.expert_ffn)
    if model.positions and model.positions < model.sequence:
        _refuse("model.positions", f"0, or at least sequence={model.sequence}", model.positions)


MODEL_CHOICES: dict[str, tuple[Any, ...]] = {
    "attention": ("fused", "formula", "recomputed"),
    "activation": ("", "silu", "gelu", "relu"),
    "norms": ("before", "after", "around", "parallel", "shared"),
    "qk_norm": ("none", "head", "width"),
}
"""The names that fields of a model may have."""
