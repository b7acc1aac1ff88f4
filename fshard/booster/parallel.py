"""`parallel`: a plugin from Colossal-AI's parallel configuration, or DeepSpeed's, as a dict or a file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from fshard.booster.deepspeed import is_deepspeed, plugin_of_deepspeed
from fshard.booster.hybrid import MODEL_AXES, HybridParallelPlugin
from fshard.booster.plugins import Plugin
from fshard.foreign_names import hint
from fshard.mesh.runtimes.launchers import process_count
from fshard.mesh.spmd.scope import here
from fshard.transforms.options import one_of, refusal, unknown

_MODES = [*MODEL_AXES, "sequence"]


def parallel(config: Mapping[str, Any] | str | PathLike[str], **plugin_options: Any) -> Plugin:
    """Return the plugin of a configuration of Colossal-AI or DeepSpeed. One error names all that is wrong.

    Args:
        config: a dict, or the path of a TOML file, with any of `data` (the number of devices with other samples; by
            default all that are left), `experts` (the number that share the experts), `pipeline` (the number of stages, or
            dict(size=)) and `tensor`: a dict of `size`, `mode` ("1d", "2d", "2.5d", "3d", or "sequence": tokens are sharded,
            with ring self-attention) and `depth`, of "2.5d". They may be in a table named "parallel". Inside `fs.run`, and in
            several processes, the product of all sizes must be the number of devices; elsewhere this is checked when a model
            is boosted. Or DeepSpeed's: a dict, or the path of its JSON file, with "zero_optimization", "fp16", "bf16", ...
            What no plugin expresses, such as "gradient_clipping", is named in a warning, with the way to write it.
        plugin_options: further ones of the plugin: sample=, zero_stage=, microbatches=, ... of `HybridParallelPlugin`.

    >>> plugin = parallel(dict(pipeline=2, tensor=dict(size=4, mode="2d")))
    >>> plugin.pipeline, plugin.tensor, plugin.tensor_mode, plugin.microbatches
    (2, 4, '2d', 2)
    >>> parallel({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}).precision
    'bf16'
    >>> parallel(dict(tensor=4))
    Traceback (most recent call last):
    ValueError: parallel: tensor must have a mode: write tensor=dict(size=4, mode=...), with one of ['1d', '2d', ...
    """
    if not isinstance(config, Mapping) and Path(config).suffix == ".py":
        raise ValueError(
            f"parallel: config must be a dict or a file of TOML or JSON; got {str(config)!r}.{hint('a Python file')}"
        )
    table: Any = config if isinstance(config, Mapping) else _read(Path(config))
    if is_deepspeed(table):
        return plugin_of_deepspeed(table, **plugin_options)
    table = table.get("parallel", table)
    if not isinstance(table, Mapping):
        raise ValueError(
            f"parallel: parallel must be a dict of data, experts, pipeline and tensor, got {table!r}."
        )
    pipeline, tensor = _sized(table.get("pipeline", 1)), _sized(table.get("tensor", 1))
    layers, errors = _layers(tensor)
    options: dict[str, Any] = {
        "data": table.get("data"),
        "experts": table.get("experts", 1),
        "pipeline": pipeline.get("size"),
        **layers,
        **plugin_options,
    }
    plugins = list[HybridParallelPlugin]()
    errors += unknown("parallel", table, ["data", "experts", "pipeline", "tensor"]) + unknown(
        "pipeline", pipeline, ["size"]
    )
    errors += refusal(lambda: plugins.append(HybridParallelPlugin(**options)))
    if not errors and (here() is not None or process_count() > 1):
        errors += refusal(plugins[0].default_mesh)
    if errors:
        raise ValueError(
            f"parallel: {'; '.join(error.removeprefix('HybridParallelPlugin: ') for error in errors)}."
        )
    return plugins[0]


def _read(path: Path) -> Any:
    """Return the table of a file of TOML or JSON."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)


def _sized(x: Any) -> Mapping[str, Any]:
    """Return a table of the configuration; a single value is its size."""
    return x if isinstance(x, Mapping) else {"size": x}


def _layers(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of sharded layers or tokens, and the errors of `tensor`."""
    size, mode, depth = table.get("size"), table.get("mode"), table.get("depth", 1)
    errors = unknown("tensor", table, ["size", "mode", "depth"])
    if mode is None and size == 1:
        return {}, errors
    if mode is None:
        errors.append(
            f"tensor must have a mode: write tensor=dict(size={size!r}, mode=...), with one of {_MODES}"
        )
        return {}, errors
    errors += one_of("the mode of tensor", mode, *_MODES)
    name = "sequence" if mode == "sequence" else "tensor"
    modes = {"sequence_mode": "rsa"} if mode == "sequence" else {"tensor_mode": mode}
    return {name: size, "tensor_depth": depth, **modes}, errors
