"""`lora`: a module whose layers learn a low-rank difference beside frozen weights.

    y = W x + s B A x    W: (out, in), frozen; A: (r, in); B: (out, r), zero at first; s = alpha / r

So few numbers have gradients and optimizer state that ZeRO stages 0 to 2 store little but W; stage
3 shards that too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from fshard.copying import copied
from fshard.errors import ModuleError
from fshard.transforms.options import integer, must_be, one_of

Bias = Literal["none", "all", "lora_only"]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The layers that learn a low-rank difference, and its form.

    Names and meanings are those of the peft library.

    Args:
        r: the rank.
        lora_alpha: the difference is multiplied by `lora_alpha / r`.
        lora_dropout: dropout of a layer's input to the difference in training; none where another
            module uses the layer's weight directly, as attention does with that of its `out_proj`.
        target_modules: names of layers, or their last components ("q_proj", "attn.out"), or a
            regular expression of full names; None: all linear ones.
        modules_to_save: modules that are trained as they are: names, as above.
        bias: which biases are trained: "none", "all", or those of the layers with a difference:
            "lora_only".
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: str | Sequence[str] | None = None
    modules_to_save: Sequence[str] = ()
    bias: Bias = "none"

    def __post_init__(self) -> None:
        errors = [*integer("r", self.r), *one_of("bias", self.bias, "none", "all", "lora_only")]
        is_number = isinstance(self.lora_alpha, Real)
        errors += must_be("lora_alpha", "a number", self.lora_alpha, is_number)
        rate = self.lora_dropout
        is_rate = isinstance(rate, Real) and 0 <= rate < 1
        errors += must_be("lora_dropout", "a number from 0 to below 1", rate, is_rate)

        targets = self.target_modules
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                errors.append(
                    "target_modules must be names or a regular expression; "
                    f"got {targets!r}: {error}"
                )
        elif targets is not None:
            is_sequence = isinstance(targets, Sequence)
            errors += must_be("target_modules", "names or a pattern", targets, is_sequence)
        saved = self.modules_to_save
        is_list = isinstance(saved, Sequence) and not isinstance(saved, str)
        errors += must_be("modules_to_save", "a list of names", saved, is_list)
        if errors:
            raise ModuleError(f"LoraConfig: {'; '.join(errors)}.")


class LowRank(nn.Module):
    """A layer and the difference that it learns: linear, transformers' Conv1D, or an embedding."""

    def __init__(self, base_layer: nn.Module, config: LoraConfig) -> None:
        super().__init__()
        weight = _weight(base_layer)
        outer, inner = weight.shape
        if _inputs_first(base_layer):
            inner, outer = weight.shape
        self.base_layer = base_layer
        self.config = config
        self.scale = config.lora_alpha / config.r
        self.lora_dropout = nn.Dropout(config.lora_dropout)
        device = None if weight.is_meta else weight.device
        self.lora_A = nn.Parameter(torch.empty(config.r, inner, dtype=weight.dtype, device=device))
        self.lora_B = nn.Parameter(torch.zeros(outer, config.r, dtype=weight.dtype, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # as nn.Linear begins

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Apply the layer, and add the difference."""
        y = self.base_layer(x, *args, **kwargs)
        if isinstance(self.base_layer, nn.Embedding):
            low = F.embedding(x, self.lora_A.T, self.base_layer.padding_idx)  # (..., r)
        else:
            low = F.linear(self.lora_dropout(x), self.lora_A)  # (..., r)
        return y + F.linear(low, self.lora_B) * self.scale

    @property
    def weight(self) -> Tensor:
        """The merged weight, for modules that use a layer's weight directly."""
        return self.merged(_weight(self.base_layer), self.lora_A, self.lora_B)

    def merged(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return a weight of this layer with a difference in it."""
        change = self.scale * b @ a  # (out, in)
        if _inputs_first(self.base_layer):
            change = change.T
        return weight + change

    @property
    def bias(self) -> Tensor | None:
        """The layer's bias."""
        return cast("Tensor | None", getattr(self.base_layer, "bias", None))


def lora(model: nn.Module, config: LoraConfig | None = None) -> nn.Module:
    """Return a model like this one, in which only low-rank differences are trained.

    The given one is not changed. Both share the same weights; nothing is copied. Make the optimizer
    of the returned model.

    >>> config = LoraConfig(r=2, target_modules=["0"])
    >>> model = lora(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), config)
    >>> [name for name, x in model.named_parameters() if x.requires_grad]
    ['0.lora_A', '0.lora_B']
    """
    config = config or LoraConfig()
    _validate_model(model, config)
    frozen = {id(x): nn.Parameter(x.detach(), requires_grad=False) for x in model.parameters()}
    buffers = {id(x): x for x in model.buffers()}
    model = copied(model, {**frozen, **buffers})

    layers = [*_target_layers(model, config).values()]
    for name, child in model.named_modules():
        if _is_named(name, config.modules_to_save):
            child.requires_grad_(True)
    if config.bias == "lora_only":
        for layer in layers:
            bias = getattr(layer, "bias", None)
            if isinstance(bias, nn.Parameter):
                bias.requires_grad_(True)
    model = _replace_modules(model, {id(layer): LowRank(layer, config) for layer in layers})
    if config.bias == "all":
        for name, param in model.named_parameters():
            if "bias" in name.rpartition(".")[2]:  # in_proj_bias, bias_ih_l0
                param.requires_grad_(True)
    return model


def _validate_model(model: nn.Module, config: LoraConfig) -> None:
    """Raise unless a model has the layers of a configuration, and these can have a difference."""
    if not isinstance(model, nn.Module) or not isinstance(config, LoraConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModuleError(
            "lora: model must be a module and config an fs.nn.LoraConfig; "
            f"got {model!r} and {config!r}."
        )
    if any(isinstance(child, LowRank) for child in model.modules()):
        raise ModuleError(
            "lora: this model learns differences already. "
            "Put them into its weights first: merge_lora(model)."
        )
    layers = _target_layers(model, config)
    errors: list[str] = []
    for name, layer in layers.items():
        reason = _reason_unfit(layer)
        if reason:
            errors.append(f"{name or 'it'} is a {type(layer).__name__}, {reason}")
    errors += [f"no layer is called {name!r}" for name in _unmatched_names(model, config)]
    lazy = [name for name, x in model.named_parameters() if is_lazy(x)]
    if lazy:
        errors.append(
            f"call the model once before, on an example: {', '.join(lazy)} has no shape yet"
        )
    if not layers and not errors:
        errors.append("there is no linear layer")
    if errors:
        suited: list[str] = []
        for name, child in model.named_modules():
            if _is_linear(child) and not _reason_unfit(child):
                suited.append(name)
        names = ", ".join(suited) or "none"
        raise ModuleError(f"lora: {'; '.join(errors)}. Linear layers are: {names}.")


@torch.no_grad()
def merge_lora(model: nn.Module) -> nn.Module:
    """Return a model of plain layers, whose weights have the differences of `lora` in them.

    >>> layer = lora(nn.Linear(3, 2))
    >>> x = torch.ones(3)
    >>> torch.equal(merge_lora(layer)(x), layer(x)), type(merge_lora(layer)).__name__
    (True, 'Linear')
    """
    model = copied(model, {})
    layers = [layer for layer in model.modules() if isinstance(layer, LowRank)]
    for layer in layers:
        # A new tensor: the old one may be tied to that of another layer, with another difference.
        is_trained = _weight(layer.base_layer).requires_grad
        layer.base_layer.weight = nn.Parameter(layer.weight, requires_grad=is_trained)
    return _replace_modules(model, {id(layer): layer.base_layer for layer in layers})


def _replace_modules(model: nn.Module, replacements: dict[int, nn.Module]) -> nn.Module:
    """Replace modules, by id, wherever they occur; return the model, which may be one of them."""
    for module in [*model.modules()]:
        children = vars(module)["_modules"]
        for name, child in children.items():
            children[name] = replacements.get(id(child), child)
    return replacements.get(id(model), model)


def _target_layers(model: nn.Module, config: LoraConfig) -> dict[str, nn.Module]:
    """Return the layers that are to have a difference, by their names."""
    targets = config.target_modules
    by_name = dict(model.named_modules())
    if targets is not None:
        return {name: layer for name, layer in by_name.items() if _is_named(name, targets)}

    # All linear layers, except those that are trained as they are.
    saved: set[int] = set()
    for name, module in by_name.items():
        if _is_named(name, config.modules_to_save):
            saved.update([id(child) for child in module.modules()])
    linear = {name: layer for name, layer in by_name.items() if _is_linear(layer)}
    return {name: layer for name, layer in linear.items() if id(layer) not in saved}


def _unmatched_names(model: nn.Module, config: LoraConfig) -> list[str]:
    """Return the names in a configuration that nothing in the model has."""
    names = [name for name, _ in model.named_modules()]
    targets = config.target_modules
    unmatched: list[str] = []
    if isinstance(targets, str):
        if not any(_is_named(name, targets) for name in names):
            unmatched.append(targets)
        targets = ()
    for wanted in (*(targets or ()), *config.modules_to_save):
        if not any(_is_named(name, [wanted]) for name in names):
            unmatched.append(wanted)
    return unmatched


def _is_named(name: str, names: str | Sequence[str]) -> bool:
    """Return True if a name is among `names`: a regular expression, or names or their ends."""
    if isinstance(names, str):
        return re.fullmatch(names, name) is not None
    return any(name == end or name.endswith(f".{end}") for end in names)


def _reason_unfit(layer: nn.Module) -> str | None:
    """Return why a layer cannot have LoRA weights."""
    if not isinstance(layer, nn.Embedding) and not _is_linear(layer):
        return "which has no low rank"
    weight = vars(layer)["_parameters"].get("weight")
    if weight is None:
        return (
            "whose weight is computed from others, as weight_norm does: remove that first, or "
            "leave the layer out"
        )
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        return "which shrinks its own weights: max_norm"
    return None


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def _inputs_first(layer: nn.Module) -> bool:
    """Return True if a weight's first dim is that of inputs."""
    return not isinstance(layer, nn.Linear)


def _weight(layer: nn.Module) -> Tensor:
    return cast(Tensor, layer.weight)
