"""`parallel`: a plugin from Colossal-AI's parallel configuration, a dict or a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from fshard.booster.hybrid import MODEL_AXES, HybridParallelPlugin
from fshard.foreign_names import hint
from fshard.mesh.runtimes.launchers import process_count
from fshard.mesh.spmd.scope import here
from fshard.transforms.options import integer, must_be, one_of, refusal, unknown


def parallel(config: Mapping[str, Any] | str | PathLike[str], **plugin_options: Any) -> HybridParallelPlugin:
    """Return the plugin of a parallel configuration. One error names all that is wrong.

    Args:
        config: a dict, or the path of a TOML file, with any of `data` (the number of devices with other samples; by
            default all that are left), `pipeline` (the number of stages, or dict(size=)) and `tensor`: a dict of `size`,
            `mode` ("1d", "2d", "2.5d", "3d", or "sequence": tokens are sharded, with ring self-attention) and `depth`, of
            "2.5d". They may be in a table named "parallel". Inside `fs.run`, and in several processes, the product of all
            sizes must be the number of devices; elsewhere this is checked when a model is boosted.
        plugin_options: further ones of `HybridParallelPlugin`: sample=, zero_stage=, microbatches=, ...

    >>> plugin = parallel(dict(pipeline=2, tensor=dict(size=4, mode="2d")), microbatches=4)
    >>> plugin.pipeline, plugin.tensor, plugin.tensor_mode
    (2, 4, '2d')
    >>> parallel(dict(tensor=4))
    Traceback (most recent call last):
    ValueError: parallel: tensor=4 must have a mode: write tensor=dict(size=4, mode="1d"), or "2d", "2.5d", "3d", "sequence".
    """
    if not isinstance(config, Mapping) and Path(config).suffix == ".py":
        raise ValueError(f"parallel: config must be a dict or a TOML file; got {str(config)!r}.{hint('a Python file')}")
    table: Any = config if isinstance(config, Mapping) else tomllib.loads(Path(config).read_text(encoding="utf-8"))
    table = table.get("parallel", table)
    if wrong := must_be("parallel", "a dict of data, pipeline and tensor", table, isinstance(table, Mapping)):
        raise ValueError(f"parallel: {wrong[0]}.")
    wrong = unknown("parallel", table, ["data", "pipeline", "tensor"])
    pipeline = table.get("pipeline", 1)
    if isinstance(pipeline, Mapping):
        wrong += unknown("pipeline", pipeline, ["size"])
        pipeline = pipeline.get("size")
    layers, refused = _layers(table.get("tensor", 1))
    options: dict[str, Any] = {"data": table.get("data"), "pipeline": pipeline, **layers, **plugin_options}
    made = list[HybridParallelPlugin]()
    wrong += refused + refusal(lambda: made.append(HybridParallelPlugin(**options)))
    if not wrong and (here() is not None or process_count() > 1):
        wrong += refusal(made[0].default_mesh)
    if wrong:
        raise ValueError(f"parallel: {'; '.join(text.removeprefix('HybridParallelPlugin: ') for text in wrong)}.")
    return made[0]


def _layers(given: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the options of sharded layers or tokens, and the errors of `tensor`."""
    table = given if isinstance(given, Mapping) else {"size": given}
    size, mode, depth = table.get("size"), table.get("mode"), table.get("depth", 1)
    wrong = unknown("tensor", table, ["size", "mode", "depth"])
    wrong += integer("the size of tensor", size) + integer("the depth of tensor", depth)
    modes = [*MODEL_AXES, "sequence"]
    if mode is None and size != 1:
        first, *others = [f'"{mode}"' for mode in modes]
        wrong.append(
            f"tensor={given!r} must have a mode: write tensor=dict(size={size!r}, mode={first}), or {', '.join(others)}"
        )
    wrong += [] if mode is None else one_of("the mode of tensor", mode, *modes)
    wrong += ['depth has no meaning for mode="sequence"; "2.5d" has a depth'] * (mode == "sequence" and depth != 1)
    if wrong or mode is None:
        return {}, wrong
    if mode == "sequence":
        return {"sequence": size, "sequence_mode": "rsa"}, []
    return {"tensor": size, "tensor_mode": mode, "tensor_depth": depth}, []
