"""The controls of the lab: a group for each class of fields, with the choices that a state has.

Names, legal values and descriptions are those of `Parallelism` and `Transformer`. A choice that
would contradict the state has the text of that error: `why_not`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from fshard.laboratory.state import (
    DTYPES,
    OPTIMIZERS,
    SIZES_OF_MODEL,
    SMALL,
    LabState,
    StateError,
)
from fshard.parallelism.value import (
    CHOICES,
    RECOMPUTED_IN_LAYERS,
    Parallelism,
)
from fshard.pipeline.schedule.builders import BUILDERS
from fshard.plan.cluster import PRESETS
from fshard.plan.models import Transformer

MODELS: dict[str, Transformer] = {
    "Small": SMALL,
    "Small with 8 experts": Transformer(
        layers=2,
        hidden=256,
        ffn=1024,
        heads=8,
        kv_heads=8,
        vocab=1024,
        sequence=128,
        experts=8,
        top_k=2,
        expert_ffn=256,
    ),
    "GPT-2, 124 M": Transformer(
        layers=12,
        hidden=768,
        ffn=3072,
        heads=12,
        kv_heads=12,
        vocab=50257,
        sequence=1024,
        gated=False,
        tied=True,
        bias=True,
        positions=1024,
    ),
    "Llama 3.1, 8 B": Transformer(
        layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256, sequence=8192
    ),
    "Llama 3.1, 70 B": Transformer(
        layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=128256, sequence=8192
    ),
    "Llama 3.1, 405 B": Transformer(
        layers=126, hidden=16384, ffn=53248, heads=128, kv_heads=8, vocab=128256, sequence=8192
    ),
}
"""Models by name: the sizes of their configurations."""

DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""The numbers of devices that are offered."""

_EXPERT_SIZES = ("experts", "top_k", "expert_ffn")
_MESH_SIZES = ("tensor", "pipeline", "sequence", "experts", "replicas")
_SHARDING = ("zero_stage", "tensor_mode", "tensor_depth", "sequence_mode", "state_memory")
_TIME = ("rows", "microbatches", "schedule", "chunks", "recompute")

_LABELS = {
    "ffn": "MLP width",
    "heads": "heads",
    "kv_heads": "key heads",
    "vocab": "words",
    "hidden": "width",
    "sequence": "tokens",
    "top_k": "experts of a token",
    "expert_ffn": "expert width",
    "zero_stage": "ZeRO",
    "rows": "samples of a microbatch",
    "chunks": "stages of a device",
    "recompute": "recomputed",
    "state_memory": "optimizer state in",
}
"""The words for fields whose names a reader would not know."""


def controls_of(state: LabState) -> list[dict[str, Any]]:
    """Return the groups of controls, with the values of a state."""
    groups = [_group("Machine", _machine(state)), _group("Mesh", _mesh(state))]
    groups.append(_group("Sharding", _plan_controls(state, _SHARDING)))
    groups.append(_group("Step", _plan_controls(state, _TIME)))
    if state.model is not None:
        groups.insert(0, _group("Model", _model(state.model, state)))
    return groups


def _group(title: str, controls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"title": title, "controls": [*controls]}


def fields_with_controls(state: LabState) -> list[str]:
    """Return the paths of all fields that have a control."""
    paths = list[str]()
    for group in controls_of(state):
        paths += [control["field"] for control in group["controls"]]
    return paths


# -- groups ----------------------------------------------------------------------------------------


def _model(model: Transformer, state: LabState) -> list[dict[str, Any]]:
    sizes = state.to_json()["model"]
    values = dict[str, Any]()
    for name, preset in MODELS.items():
        values[name] = LabState(model=preset, devices=1).to_json()["model"]
    is_preset = sizes in values.values()
    if not is_preset:
        values = {"other sizes": sizes, **values}
    choices = [{"value": value, "label": name, "why_not": None} for name, value in values.items()]
    controls = [_choice("model", "model", sizes, choices, "A model by its sizes.")]

    names = [*SIZES_OF_MODEL]
    if model.experts:
        names = [name for name in names if name != "ffn"]
        names += _EXPERT_SIZES
    descriptions = descriptions_of(Transformer)
    for name in names:
        path = f"model.{name}"
        controls.append(_number(path, _label(name), getattr(model, name), descriptions[name]))
    dtype = str(model.dtype).removeprefix("torch.")
    controls.append(
        _choice("model.dtype", "dtype", dtype, _named_choices(DTYPES), descriptions["dtype"])
    )
    return controls


def _machine(state: LabState) -> list[dict[str, Any]]:
    counts = sorted({*DEVICES, state.devices})
    return [
        _choice(
            "devices",
            "devices",
            state.devices,
            _choices(state, "devices", counts),
            "Their number: `data` has those that are left.",
        ),
        _choice(
            "cluster", "machine", state.cluster, _named_choices(PRESETS), "See fs.plan.cluster."
        ),
        _choice(
            "optimizer",
            "optimizer",
            state.optimizer,
            _named_choices(OPTIMIZERS),
            OPTIMIZERS[state.optimizer],
        ),
    ]


def _mesh(state: LabState) -> list[dict[str, Any]]:
    descriptions = descriptions_of(Parallelism)
    controls = list[dict[str, Any]]()
    has_experts = state.model is None or state.model.experts > 0
    for name in _MESH_SIZES:
        if name == "experts" and not has_experts:
            continue
        path = f"plan.{name}"
        value = vars(state.parallelism)[name]
        divisors = [size for size in _divisors(state.devices) if size <= LARGEST_OFFERED[name]]
        sizes = sorted({*divisors, value})
        choices = _choices(state, path, sizes)
        controls.append(_choice(path, _label(name), value, choices, descriptions[name]))
    return controls


LARGEST_OFFERED = {"tensor": 64, "pipeline": 64, "sequence": 64, "experts": 256, "replicas": 4096}
"""The largest sizes of axes that are offered; a link may have others."""


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, min(number, 4096) + 1) if number % size == 0]


def _plan_controls(state: LabState, names: Sequence[str]) -> list[dict[str, Any]]:
    descriptions = descriptions_of(Parallelism)
    plan = state.parallelism
    controls = list[dict[str, Any]]()
    for name in names:
        path = f"plan.{name}"
        value = vars(plan)[name]
        label = _label(name)
        help_text = descriptions[name]
        legal = _legal_values(name)
        if not legal:
            control = _number(path, label, value, help_text)
            control["optional"] = name in ("microbatches", "chunks")
            controls.append(control)
            continue
        if value not in legal:
            legal = (value, *legal)
        controls.append(_choice(path, label, value, _choices(state, path, legal), help_text))
    return controls


def _legal_values(name: str) -> tuple[Any, ...]:
    """Return the values of a field that has few; () of a number."""
    if name == "schedule":
        return tuple(BUILDERS)
    if name == "recompute":
        return RECOMPUTED_IN_LAYERS
    return CHOICES.get(name, ())


# -- controls --------------------------------------------------------------------------------------


def _choice(
    path: str, label: str, value: Any, choices: Sequence[dict[str, Any]], help_text: str
) -> dict[str, Any]:
    return {
        "field": path,
        "kind": "choice",
        "label": label,
        "value": value,
        "choices": [*choices],
        "help": help_text,
    }


def _number(path: str, label: str, value: int, help_text: str) -> dict[str, Any]:
    return {
        "field": path,
        "kind": "number",
        "label": label,
        "value": value,
        "min": 1,
        "step": "double",
        "help": help_text,
    }


def _label(name: str) -> str:
    return _LABELS.get(name, name.replace("_", " "))


def _named_choices(names: Sequence[str] | Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"value": name, "label": name, "why_not": None} for name in names]


def _choices(state: LabState, path: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return choices, each with the error of the state that it would make."""
    choices = list[dict[str, Any]]()
    for value in values:
        why_not = None
        try:
            changed(state, path, value)
        except StateError as error:
            why_not = str(error)
        choices.append({"value": value, "label": str(value), "why_not": why_not})
    return choices


def changed(state: LabState, path: str, value: Any) -> LabState:
    """Return a state with another value of a field.

    >>> changed(LabState(), "plan.zero_stage", 3).parallelism.zero_stage
    3
    """
    content = state.to_json()
    *outer, name = path.split(".", 1)
    target = content
    for key in outer:
        target = content[key]
    target[name] = value
    return LabState.from_json(content)


# -- descriptions ----------------------------------------------------------------------------------


@cache
def descriptions_of(of_class: type) -> dict[str, str]:
    """Return the description of each field, in the docstring of its class.

    >>> descriptions_of(Parallelism)["replicas"]
    'number of groups of devices along which ZeRO does not shard (HSDP); 1 in stages.'
    """
    _, _, rest = inspect.getdoc(of_class).partition("Args:\n")  # type: ignore[union-attr]
    block, _, _ = rest.partition("\n\n")
    descriptions = dict[str, str]()
    names = list[str]()
    for line in block.splitlines():
        start = re.fullmatch(r" {4}(\w[\w, ]*): (.*)", line)
        if start is None:
            for name in names:
                descriptions[name] += f" {line.strip()}"
            continue
        names = start[1].split(", ")
        for name in names:
            descriptions[name] = start[2]
    return descriptions
