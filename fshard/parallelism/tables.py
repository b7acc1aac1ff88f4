"""A parallelism as a table: a file of TOML or JSON, a dict, or Colossal-AI's configuration.

Colossal-AI    pipeline = {size = 2}    tensor = {size = 4, mode = "2d"}      any may be left out
fields         pipeline = 2             tensor = 4, tensor_mode = "2d"        as `save` writes them
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

from fshard.errors import PlanError
from fshard.foreign_names import hint
from fshard.parallelism.modes import MODEL_AXES
from fshard.transforms.options import one_of, unknown

_MODES = [*MODEL_AXES, "sequence"]
"""The modes of Colossal-AI's `tensor`."""


def read_table(source: Mapping[str, Any] | str | PathLike[str], caller: str) -> Mapping[str, Any]:
    """Return a table itself, or that of a file of TOML or JSON; raise if it is another file."""
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    if path.suffix == ".py":
        raise PlanError(
            f"{caller}: config must be a dict or a file of TOML or JSON; got {str(path)!r}."
            f"{hint('a Python file')}"
        )
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise PlanError(f"{caller}: {path} must be a {kind} file: {error}.") from None


def fields_of(
    source: Mapping[str, Any] | str | PathLike[str], caller: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a parallelism in a table, and what is wrong with it."""
    outer = read_table(source, caller)
    table = outer.get("parallel", outer)
    if not isinstance(table, Mapping):
        raise PlanError(
            f"{caller}: parallel must be a dict of data, experts, pipeline and tensor, "
            f"got {table!r}."
        )
    values = dict(cast(Mapping[str, Any], table))
    values.pop("run", None)  # the arguments of `fshard plan`, for `fshard explore`

    errors = list[str]()
    # `save` writes all fields: then a number of devices needs no mode beside it.
    is_saved = {"zero_stage", "rows"} <= values.keys()
    if "tensor" in values and not is_saved and "tensor_mode" not in values:
        tensor = _with_size(values.pop("tensor"))
        tensor_fields, errors = _fields_of_tensor(tensor)
        values |= tensor_fields
    if "pipeline" in values:
        pipeline = _with_size(values["pipeline"])
        values["pipeline"] = pipeline.get("size")
        errors += unknown("pipeline", pipeline, ["size"])
    return values, errors


def _with_size(value: Any) -> Mapping[str, Any]:
    """Return a table of the configuration; a single value is its size."""
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {"size": value}


def _fields_of_tensor(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of Colossal-AI's `tensor`, which shares layers or tokens, and its errors."""
    size = table.get("size")
    mode = table.get("mode")
    errors = unknown("tensor", table, ["size", "mode", "depth"])
    if mode is None and size == 1:
        return {}, errors
    if mode is None:
        errors.append(
            f"tensor must have a mode: write tensor=dict(size={size!r}, mode=...), "
            f"with one of {_MODES}"
        )
        return {}, errors

    errors += one_of("the mode of tensor", mode, *_MODES)
    depth = {"tensor_depth": table.get("depth", 1)}
    if mode == "sequence":
        return {"sequence": size, "sequence_mode": "rsa", **depth}, errors
    return {"tensor": size, "tensor_mode": mode, **depth}, errors


def write_table(path: str | PathLike[str], values: Mapping[str, Any]) -> None:
    """Write a TOML file of numbers and names; None, which TOML has not, is left out."""
    lines = list[str]()
    for name, value in values.items():
        if value is not None:
            lines.append(f"{name} = {json.dumps(value)}")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
