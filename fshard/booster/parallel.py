"""`parallel`: a plugin from the configuration of Colossal-AI, a dict or a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from fshard.booster.hybrid import MODEL_AXES, HybridParallelPlugin

_MODES = [*MODEL_AXES, "sequence"]


def parallel(config: Mapping[str, Any] | str | PathLike[str], **plugin_options: Any) -> HybridParallelPlugin:
    """Return the plugin of a parallel configuration.

    Args:
        config: a dict, or the path of a TOML file, with any of `data` (the number of devices with other samples, by
            default all that are left), `pipeline` (the number of stages, or dict(size=)) and `tensor`, a dict of `size`,
            `mode` ("1d", "2d", "2.5d", "3d", or "sequence": ring self-attention of as many devices) and `depth` (of
            "2.5d"). They may be in a table named "parallel".
        plugin_options: others of `HybridParallelPlugin`: sample=, zero_stage=, microbatches=, ...

    >>> plugin = parallel(dict(pipeline=2, tensor=dict(size=4, mode="2d")), sample=None or [0])
    >>> plugin.pipeline, plugin.tensor, plugin.tensor_mode
    (2, 4, '2d')
    >>> parallel(dict(pipeline=2, tensor=4))
    Traceback (most recent call last):
    ValueError: parallel: tensor=4 must have a mode: write tensor=dict(size=4, mode="1d"), or "2d", "2.5d", "3d", "sequence".
    """
    table = dict(config) if isinstance(config, Mapping) else tomllib.loads(Path(config).read_text(encoding="utf-8"))
    table = table.get("parallel", table)
