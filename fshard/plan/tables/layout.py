"""Layouts as text: "data=16 tensor=4", as tables show them and as `Plans.why` takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fshard.errors import PlanError
from fshard.parallelism.value import (
    FIELDS,
    RECOMPUTED_IN_LAYERS,
    RECOMPUTED_IN_STAGES,
    SIZES,
    Parallelism,
)

FIELD_OF_AXIS = {
    "pipe": "pipeline",
    "replica": "replicas",
    "expert": "experts",
    "seq": "sequence",
    "model": "tensor",
}
"""The field of each axis of a mesh whose name is another one; a layout may name either."""

_IN_TABLES = ("data", "pipeline", "tensor", "sequence", "experts", "replicas")
"""The sizes in the order of the text."""
assert set(_IN_TABLES) == set(SIZES)


def sizes_text(plan: Parallelism) -> str:
    """Return the sizes of a layout above 1.

    >>> sizes_text(Parallelism(data=16, tensor=4, zero_stage=3))
    'data=16 tensor=4'
    """
    sizes = [f"{name}={vars(plan)[name]}" for name in _IN_TABLES if (vars(plan)[name] or 1) > 1]
    return " ".join(sizes) or "data=1"


def layout_text(plan: Parallelism) -> str:
    """Return a layout on one line.

    >>> layout_text(Parallelism(data=16, pipeline=4, zero_stage=1, microbatches=8))
    'data=16 pipeline=4, ZeRO-1, 8 x 1, 1f1b'
    """
    return f"{sizes_text(plan)}, {options_text(plan)}"


def options_text(plan: Parallelism, stages: Sequence[int] = ()) -> str:
    """Return the stage of ZeRO, microbatches x samples of each, the schedule, and recomputation.

    `stages` of ZeRO are one program.
    """
    zero = " = ".join([str(stage) for stage in stages or (plan.zero_stage,)])
    texts = [f"ZeRO-{zero}", f"{plan.microbatches} x {plan.rows}"]
    if plan.state_memory == "host":
        texts.append("state on the host")
    if plan.in_stages:
        has_chunks = plan.chunks is not None and plan.chunks > 1
        chunks = f" x {plan.chunks}" if has_chunks else ""
        texts.append(f"{plan.schedule}{chunks}")
    if plan.recompute != "never":
        texts.append(f"recompute {plan.recompute}")
    return ", ".join(texts)


# -- from text -------------------------------------------------------------------------------------


def field_value(name: str, text: str) -> Any:
    """Return the value of a field of a parallelism in a text: an integer, or a name.

    >>> field_value("tensor", "8"), field_value("schedule", "1f1b")
    (8, '1f1b')
    """
    text = text.strip()
    if not text:
        raise PlanError(f"plan: {name} must have a value; got none.")
    digits = text.removeprefix("-")
    value: Any = text
    if digits.isascii() and digits.isdigit():
        value = int(text)
    fields: dict[str, Any] = {name: value}
    if value == "megatron":
        fields["tensor"] = 2  # it has a meaning only where devices share layers
    Parallelism(**fields)
    return value


def field_values(name: str, text: str) -> tuple[Any, ...]:
    """Return the values of a field in a text, by commas.

    Names that layers keep have commas too: what is no name of a recomputation belongs to them.

    >>> field_values("tensor", "1,8")
    (1, 8)
    >>> field_values("recompute", "never,except attention, mlp,full")
    ('never', 'except attention, mlp', 'full')
    """
    parts = list[str]()
    for part in text.split(","):
        is_kept_name = (
            name == "recompute"
            and bool(parts)
            and parts[-1].startswith("except ")
            and not _is_recomputation(part.strip())
        )
        if is_kept_name:
            parts[-1] += f",{part}"
        else:
            parts.append(part.strip())
    return tuple([field_value(name, part) for part in parts])


def _is_recomputation(text: str) -> bool:
    is_name = text in (*RECOMPUTED_IN_LAYERS, *RECOMPUTED_IN_STAGES)
    return is_name or text.startswith("except ") or text.isdigit()


def layout_fields(layout: str | Mapping[str, Any] | Parallelism) -> dict[str, Any]:
    """Return the fields that a layout names; the others are open.

    >>> layout_fields("data=128, tensor=8, zero_stage=3")
    {'data': 128, 'tensor': 8, 'zero_stage': 3}
    """
    if isinstance(layout, Parallelism):
        return dict(vars(layout))
    if isinstance(layout, Mapping):
        return dict(layout)
    fields = dict[str, Any]()
    # Sizes are separated by blanks in tables.
    words = layout.split()
    are_fields = all(["=" in word for word in words])
    separated = layout
    if are_fields and "," not in layout:
        separated = ",".join(words)
    for part in _assignments(separated):
        name, equals, text = part.partition("=")
        name = name.strip()
        field = FIELD_OF_AXIS.get(name, name)
        if not equals or field not in FIELDS:
            raise PlanError(
                f"plan: a layout must be like data=8,tensor=2,zero_stage=3 with the fields "
                f"{', '.join(FIELDS)}; got {part.strip()!r}."
            )
        if field in fields:
            raise PlanError(f"plan: a layout must name {field} once; got {layout!r}.")
        fields[field] = field_value(field, text)
    return fields


def _assignments(text: str) -> list[str]:
    """Return the parts of a layout; "recompute=except a, b" has a comma of its own."""
    parts = list[str]()
    for part in text.split(","):
        is_kept_name = bool(parts) and "=except " in parts[-1] and "=" not in part
        if is_kept_name:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def as_constraints(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields as constraints of a search, without what no search tries."""
    default = Parallelism()
    constraints = dict[str, Any]()
    for name, value in fields.items():
        is_default_mode = name in ("tensor_mode", "tensor_depth") and value == vars(default)[name]
        if value is not None and not is_default_mode:
            constraints[name] = value
    return constraints
