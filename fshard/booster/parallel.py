"""`parallel`: a plugin from the configuration of Colossal-AI or DeepSpeed, a dict or a file."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from fshard.booster.deepspeed import is_deepspeed, plugin_of_deepspeed
from fshard.booster.hybrid import HybridParallelPlugin
from fshard.booster.plugins import Plugin
from fshard.mesh.runtimes.launchers import process_count
from fshard.mesh.spmd.scope import here
from fshard.parallelism.tables import fields_of, read_table
from fshard.parallelism.value import FIELDS
from fshard.transforms.options import refusal, unknown


def parallel(config: Mapping[str, Any] | str | PathLike[str], **plugin_options: Any) -> Plugin:
    """Return the plugin of a configuration of Colossal-AI or DeepSpeed.

    One error names all that is wrong.

    Args:
        config: a dict, or the path of a file of TOML or JSON: see `fs.Parallelism.load`. Inside of
            `fs.run`, and in several processes, the product of all sizes must be the number of
            devices; elsewhere this is checked when a model is boosted. Or DeepSpeed's: a dict, or
            the path of its JSON file, with "zero_optimization", "fp16", "bf16", ... What no plugin
            expresses, such as "gradient_clipping", is named in a warning, with the way to write it.
        plugin_options: further ones: sample=, zero_stage=, microbatches=, ... of
            `HybridParallelPlugin`.

    >>> plugin = parallel(dict(pipeline=2, tensor=dict(size=4, mode="2d")))
    >>> plugin.pipeline, plugin.tensor, plugin.tensor_mode, plugin.microbatches
    (2, 4, '2d', 2)
    >>> parallel({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}).precision
    'bf16'
    >>> parallel(dict(tensor=4))
    Traceback (most recent call last):
    ValueError: parallel: tensor must have a mode: write tensor=dict(size=4, mode=...), with one of ['1d', '2d', ...
    """
    table = read_table(config, "parallel")
    if is_deepspeed(table):
        return plugin_of_deepspeed(table, **plugin_options)

    values, errors = fields_of(table, "parallel")
    errors += unknown("parallel", values, FIELDS)
    known = {name: value for name, value in values.items() if name in FIELDS}
    plugins = list[HybridParallelPlugin]()
    errors += refusal(lambda: plugins.append(HybridParallelPlugin(**{**known, **plugin_options})))
    has_known_devices = here() is not None or process_count() > 1
    if has_known_devices and not errors:
        errors += refusal(plugins[0].default_mesh)
    if errors:
        texts = [error.removeprefix("HybridParallelPlugin: ") for error in errors]
        raise ValueError(f"parallel: {'; '.join(texts)}.")
    return plugins[0]
