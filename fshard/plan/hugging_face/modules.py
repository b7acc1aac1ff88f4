"""The model of a `config.json` of Hugging Face: its sizes, or else the module of transformers.

config.json ─┬─ layers of one of the families ──> Transformer
             └─ other layers ──> transformers builds them on the meta device ──> nn.Module, batch
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fshard.errors import PlanError
from fshard.mesh.layout import PyTree
from fshard.plan.hugging_face.families import (
    FAMILIES,
    ConfigReader,
    OtherLayersError,
    longest_sequence,
    misspelled,
    model_type_of,
    read_config,
)
from fshard.plan.models import Transformer

ATTENTION = "fshard_causal"
"""The name of `_causal_attention` in transformers: an attention that needs no mask."""


def model_of_config(
    source: str | Path | Mapping[str, Any], *, sequence: int | None = None
) -> tuple[Transformer | nn.Module, PyTree]:
    """Return the model of a `config.json` of Hugging Face, and its batch, for `search`.

    It is a `Transformer` without a batch if its sizes suffice; else the module of transformers on
    the meta device, in bfloat16, with a batch of one sample. Experts may be sharded, and all layers
    must be equal.

    Args:
        source: path of the file or its folder, or its content.
        sequence: tokens of a sample; default: the most that the model takes.

    Raises:
        PlanError: naming the type if transformers does not have it, or what is wrong.

    >>> config = dict(model_type="gpt2", n_layer=2, n_embd=16, n_head=2, vocab_size=9)
    >>> model, batch = model_of_config(config, sequence=8)
    Traceback (most recent call last):
        ...
    fshard.errors.PlanError: plan: config.json of gpt2: n_positions or max_position_embeddings is missing...
    >>> model, batch = model_of_config({**config, "n_positions": 8})
    >>> model.parameters, batch
    (6864, None)
    """
    config = read_config(source)
    name = model_type_of(config)
    if name in FAMILIES:
        try:
            return Transformer.from_config(config, sequence=sequence), None
        except OtherLayersError:
            if "model_type" not in config:
                raise
    module = _module_of_transformers(config, name)
    tokens = sequence or _longest_sequence(config, name)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    return module, {"input_ids": ids, "labels": ids}


def _longest_sequence(config: Mapping[str, Any], name: str) -> int:
    reader = ConfigReader(config)
    tokens = longest_sequence(reader)
    if reader.errors:
        raise PlanError(f"plan: config.json of {name}: {'; '.join(reader.errors)}.")
    return tokens


def _module_of_transformers(config: dict[str, Any], name: str) -> nn.Module:
    """Return the module of a configuration on the meta device."""
    known = ", ".join(FAMILIES)
    try:
        import transformers
    except ImportError:
        raise PlanError(
            f"plan: model_type must be one of {known}; got {name!r}. The modules of others are "
            "those of transformers, which is not installed."
        ) from None
    if name not in transformers.CONFIG_MAPPING:
        raise PlanError(
            f"plan: model_type must be one of {known}, or another one of transformers; "
            f"got {name!r}."
        )
    _validate_equal_layers(config, name)

    config_class: Any = transformers.CONFIG_MAPPING[name]
    keys = {"model_type", *signature(config_class).parameters, *config_class.attribute_map}
    errors = misspelled(config, keys)
    if errors:
        raise PlanError(f"plan: config.json of {name}: {'; '.join(errors)}.")

    transformers.AttentionInterface.register(ATTENTION, _causal_attention)
    fields = {key: value for key, value in config.items() if key != "model_type"}
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # its warnings are about values, such as padding
    try:
        full_config: Any = transformers.AutoConfig.for_model(name, **{**fields, "use_cache": False})
        with torch.device("meta"):
            module: Any = transformers.AutoModelForCausalLM.from_config(
                full_config, dtype=torch.bfloat16, attn_implementation=ATTENTION
            )
    except Exception as error:  # whatever a wrong number makes its code raise
        text = str(error).strip().partition("\n")[0].rstrip(".")
        raise PlanError(
            f"plan: config.json of {name} must be one that transformers builds a language model "
            f"of; {type(error).__name__}: {text}."
        ) from None
    finally:
        transformers.logging.set_verbosity(verbosity)
    if module._is_stateful:
        raise PlanError(
            f"plan: model_type must be of layers of attention; got {name!r}, whose recurrent "
            "layers run a loop over tokens without a GPU. Take their cost with fs.plan.rank."
        )
    return module


def _validate_equal_layers(config: Mapping[str, Any], name: str) -> None:
    """Raise, with the change that makes layers equal, if the first ones have no experts."""
    if config.get("first_k_dense_replace"):
        raise PlanError(
            f"plan: config.json of {name} must have equal layers; got first_k_dense_replace="
            f"{config['first_k_dense_replace']}. Write 0 to plan them as layers with experts."
        )


def _causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return fused causal attention. transformers makes no mask for a function of another library.

    A mask of all pairs of tokens would be memory and traffic that a fused kernel does not have.
    """
    y = functional.scaled_dot_product_attention(
        query, key, value, None, dropout, is_causal=True, scale=scaling, enable_gqa=True
    )
    return y.transpose(1, 2), None
