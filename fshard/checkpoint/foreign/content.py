"""The content of an export: how to load each array, from a tree or from files; LoRA weights merged or alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.checkpoint.copying import Span
from fshard.checkpoint.foreign.chunks import block_of
from fshard.checkpoint.index import refuse_unstorable
from fshard.checkpoint.names import JoinedArray, is_array, leaves_of, name_of, opened, refuse_repeated, stored_parts
from fshard.checkpoint.names import Path as TreePath
from fshard.checkpoint.source import Target
from fshard.errors import CheckpointError
from fshard.mesh.layout import PyTree
from fshard.mesh.layout.sharded import key_of
from fshard.mesh.reshard.device_put import unshard
from fshard.transforms.module.lora import LowRank


class ExportArray(NamedTuple):
    """An array to write; `load` returns it in full."""

    name: str
    path: TreePath
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def renamed(self, name: str) -> ExportArray:
        return self._replace(name=name, path=(name,))


class Content(NamedTuple):
    """Arrays to write, the paths under which they occur again, and values."""

    entries: Sequence[ExportArray]
    ties: Sequence[tuple[TreePath, str]]
    values: Sequence[tuple[TreePath, Any]]


def content_of(tree: PyTree) -> Content:
    """Return the leaves of a tree; of tied ones the first in its order is the one with the array."""
    tree, _ = opened(tree)
    order = {key: number for number, key in enumerate(tree)} if isinstance(tree, dict) else {}
    leaves = sorted(leaves_of(tree), key=lambda leaf: order.get(leaf.path[0], 0) if leaf.path else 0)
    refuse_repeated(leaves, "export")
    arrays = [(leaf.name, leaf.path, leaf.value) for leaf in leaves if is_array(leaf.value)]
    values = [leaf for leaf in leaves if not is_array(leaf.value)]
    refuse_unstorable(leaves)
    first: dict[Any, str] = {}
    of = {name: first.setdefault(tuple([key_of(one) for _, one in stored_parts(x)]), name) for name, _, x in arrays}
    own = [one for one in arrays if of[one[0]] == one[0]]
    entries = [ExportArray(name, path, tuple(x.shape), x.dtype, partial(_full, x)) for name, path, x in own]
    ties = [(path, of[name]) for name, path, _ in arrays if of[name] != name]
    return Content(entries, ties, [(leaf.path, leaf.value) for leaf in values])


def _full(x: Any) -> Tensor:
    """Return an array in full, its parts joined."""
    parts: list[Tensor] = [unshard(part) for _, part in stored_parts(x)]
    return torch.cat(parts, x.dim) if isinstance(x, JoinedArray) else parts[0]


def content_of_source(source: Any) -> Content:
    """Return what a folder or file has."""

    def load(name: str) -> Tensor:
        x = torch.empty(source.arrays[name].shape, dtype=source.arrays[name].dtype)
        if x.numel():
            source.read([Target(name, Span(block_of(x.shape), 0, x.numel()), x.view(-1))])
        return x

    source.check()
    own = [(name, one) for name, one in source.arrays.items() if name not in source.ties]
    entries = [ExportArray(name, one.path, one.shape, one.dtype, partial(load, name)) for name, one in own]
    ties = [(source.arrays[name].path, of) for name, of in source.ties.items()]
    return Content(entries, ties, [*source.values.values()])


# -- LoRA -------------------------------------------------------------------------------------------------------------


def merged(content: Content, model: nn.Module) -> Content:
    """Return parameters with the differences of `fs.nn.lora` in their weights, by the names of `fs.nn.merge_lora`."""
    known, first = _of_model(content, model)
    modules = dict(model.named_modules(remove_duplicate=False))
    names = dict(model.named_parameters(remove_duplicate=False))
    made: dict[Any, ExportArray] = {}
    for name, x in names.items():
        above, _, last = name.rpartition(".")
        layer = modules[above.removesuffix("base_layer").removesuffix(".")]
        own = known[first[id(x)]]
        if isinstance(modules[above], LowRank):
            continue
        if not isinstance(layer, LowRank):
            made.setdefault(id(x), own.renamed(name))
            continue
        plain = name.removesuffix(f"base_layer.{last}") + last
        if x is not layer.base_layer.weight:
            made.setdefault(id(x), own.renamed(plain))
            continue
        parts = [own, known[first[id(layer.lora_A)]], known[first[id(layer.lora_B)]]]
        made.setdefault((id(x), id(layer)), own.renamed(plain)._replace(load=partial(_merge, layer, parts)))
    rest = [one for one in content.entries if one.name not in names]
    return content._replace(entries=[*made.values(), *rest], ties=())


def _merge(layer: LowRank, parts: Sequence[ExportArray]) -> Tensor:
    weight, a, b = [one.load() for one in parts]
    return layer.merged(weight, a, b)


def adapters(content: Content, model: nn.Module) -> tuple[Content, dict[str, Any]]:
    """Return the trained parameters by peft's names, and the configuration of their adapter."""
    known, _ = _of_model(content, model)
    modules = dict(model.named_modules())
    layers = {name: part for name, part in modules.items() if isinstance(part, LowRank)}
    if not layers:
        raise CheckpointError("export to peft: model must be one of fs.nn.lora; got one without LoRA weights.")
    entries = list[ExportArray]()
    for name, x in model.named_parameters():
        above, _, last = name.rpartition(".")
        if above in layers:
            is_embedding = isinstance(layers[above].base_layer, nn.Embedding)
            last = last.replace("lora_", "lora_embedding_") if is_embedding else f"{last}.weight"
            entries.append(known[name].renamed(f"base_model.model.{above}.{last}"))
        elif x.requires_grad:
            entries.append(known[name].renamed(f"base_model.model.{name}"))
    config = next(iter(layers.values())).config
    targets = config.target_modules
    return Content(entries, (), ()), {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", None) or None,
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "bias": config.bias,
        "target_modules": targets if isinstance(targets, str) else [*(layers if targets is None else targets)],
        "modules_to_save": [*config.modules_to_save] or None,
        "fan_in_fan_out": any(type(one.base_layer).__name__ == "Conv1D" for one in layers.values()),
    }


def _of_model(content: Content, model: nn.Module) -> tuple[Mapping[str, ExportArray], Mapping[int, str]]:
    """Return the entries by all their names, and the first name of each parameter of a model."""
    known = {one.name: one for one in content.entries}
    known |= {name_of(path): known[of] for path, of in content.ties}
    first = {id(x): name for name, x in model.named_parameters()}
    if missing := [name for name in first.values() if name not in known]:
        raise CheckpointError(f"export: params must be those of model; {', '.join(missing[:20])} are missing.")
    return known, first
