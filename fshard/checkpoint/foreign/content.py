"""What an export writes: arrays of a source, under new names; LoRA weights merged or alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.checkpoint.copying import Span
from fshard.checkpoint.foreign.mapped import block_of
from fshard.checkpoint.names import Path as TreePath
from fshard.checkpoint.names import name_of
from fshard.checkpoint.source import Source, Target
from fshard.errors import CheckpointError
from fshard.transforms.module.lora import LowRank

_TOGETHER = 16 << 20
"""Bytes of small arrays that are loaded at a time."""


class ExportArray(NamedTuple):
    """An array to write: that of a source with a name, or what `join` makes of several. Tied ones differ in their path."""

    path: TreePath
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[str, ...]
    join: Callable[..., Tensor] | None = None

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def arrays_of(source: Source, order: Sequence[str]) -> list[ExportArray]:
    """Return the arrays of a source, by `order` of the first entries of their paths."""
    numbers = {entry: number for number, entry in enumerate(order)}
    ties = {name: of for name, of in source.ties.items() if of in source.arrays}
    arrays = [ExportArray(*one, (ties.get(name, name),)) for name, one in source.arrays.items()]
    return sorted(arrays, key=lambda one: numbers.get(name_of(one.path[:1]), 0))


def untied(arrays: Iterable[ExportArray]) -> list[ExportArray]:
    """Return the first of tied arrays."""
    first: dict[Any, ExportArray] = {}
    return [one for one in arrays if first.setdefault((one.parts, one.join), one) is one]


def grouped(arrays: Sequence[ExportArray], size: int) -> list[list[ExportArray]]:
    """Return arrays in groups of at most some bytes, or of one."""
    groups, room = list[list[ExportArray]](), 0
    for one in arrays:
        if not groups or one.size > room:
            groups.append([])
            room = size
        groups[-1].append(one)
        room -= one.size
    return groups


def loaded(source: Source, arrays: Sequence[ExportArray]) -> Iterator[Tensor]:
    """Yield arrays in order, in memory."""
    for group in grouped(arrays, _TOGETHER):
        stored = {name: source.arrays[name] for one in group for name in one.parts}
        made = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in stored.items()}
        source.read([Target(name, Span(block_of(x.shape), 0, x.numel()), x.view(-1)) for name, x in made.items()])
        for one in group:
            parts = [made[name] for name in one.parts]
            yield one.join(*parts).contiguous() if one.join else parts[0]
        del made, parts


# -- LoRA -------------------------------------------------------------------------------------------------------------


def merged(arrays: Sequence[ExportArray], model: nn.Module) -> list[ExportArray]:
    """Return parameters with the differences of `fs.nn.lora` in their weights, by the names of `fs.nn.merge_lora`."""
    known, modules = _of_model(arrays, model), dict(model.named_modules(remove_duplicate=False))
    names, made = dict(model.named_parameters(remove_duplicate=False)), list[ExportArray]()
    for name, x in names.items():
        above, _, last = name.rpartition(".")
        layer, own = modules[above.removesuffix("base_layer").removesuffix(".")], known[id(x)]
        if isinstance(modules[above], LowRank):
            continue
        if isinstance(layer, LowRank):
            name = name.removesuffix(f"base_layer.{last}") + last
            if x is layer.base_layer.weight:
                low = known[id(layer.lora_A)], known[id(layer.lora_B)]
                own = own._replace(parts=(*own.parts, *low[0].parts, *low[1].parts), join=layer.merged)
        made.append(own._replace(path=(name,)))
    return untied([*made, *(one for one in arrays if one.name not in names)])


def adapters(arrays: Sequence[ExportArray], model: nn.Module) -> tuple[list[ExportArray], dict[str, Any]]:
    """Return the trained parameters by peft's names, and the configuration of their adapter."""
    known, made = _of_model(arrays, model), list[ExportArray]()
    layers = {name: part for name, part in model.named_modules() if isinstance(part, LowRank)}
    if not layers:
        raise CheckpointError("export to peft: model must be one of fs.nn.lora; got one without LoRA weights.")
    for name, x in model.named_parameters():
        above, _, last = name.rpartition(".")
        if above in layers:
            is_embedding = isinstance(layers[above].base_layer, nn.Embedding)
            name = f"{above}.{last.replace('lora_', 'lora_embedding_')}" if is_embedding else f"{name}.weight"
        if above in layers or x.requires_grad:
            made.append(known[id(x)]._replace(path=(f"base_model.model.{name}",)))
    config = next(iter(layers.values())).config
    targets = config.target_modules
    return made, {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", None) or None,
        "inference_mode": True,
        **{key: getattr(config, key) for key in ("r", "lora_alpha", "lora_dropout", "bias")},
        "target_modules": targets if isinstance(targets, str) else [*(layers if targets is None else targets)],
        "modules_to_save": [*config.modules_to_save] or None,
        "fan_in_fan_out": any(type(one.base_layer).__name__ == "Conv1D" for one in layers.values()),
    }


def _of_model(arrays: Sequence[ExportArray], model: nn.Module) -> Mapping[int, ExportArray]:
    """Return the arrays of a model's parameters, by the identity of each."""
    known = {one.name: one for one in arrays}
    if missing := [name for name, _ in model.named_parameters() if name not in known]:
        raise CheckpointError(f"export: params must be those of model; {', '.join(missing[:20])} are missing.")
    return {id(x): known[name] for name, x in model.named_parameters()}
