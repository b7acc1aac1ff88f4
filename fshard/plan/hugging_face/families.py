"""The sizes of a decoder in a `config.json` of Hugging Face, by its `model_type`.

config.json ──> ConfigReader ──> sizes that all have, and those of FAMILIES[model_type] ──> Transformer
                all errors at once

A family is a function of the reader that returns the fields of `Transformer` in which the family
differs from a Llama. Keys that a file leaves out have the family's default, as in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from fshard.errors import PlanError

Fields = dict[str, Any]
"""Fields of `Transformer` by name."""

LARGEST_SIZE = 2**40
"""A size above it is a mistake: a product of two would pass the integers of torch."""


# Of all keys of the decoders in transformers, none is as near to a key of a family that it is not.
# "num_key_value_head" is, with 0.97; "moe_intermediate_size" is not, with 0.86 to the size alone.
SIMILAR = 0.9
"""The similarity (difflib's ratio) from which on a key is taken for another one, misspelled."""


class OtherLayersError(PlanError):
    """A configuration whose layers are those of no `Transformer`."""


class ConfigReader:
    """The values of a configuration.

    What is wrong with them is collected in `errors`; in `differences` how layers differ from those
    of a `Transformer`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.keys: set[str] = set()  # those that were read, if they have a value or not
        self.errors: list[str] = []
        self.differences: list[str] = []

    def value(self, key: str) -> Any:
        """Return the value of a key, as it is; None without one."""
        self.keys.add(key)
        return self.config.get(key)

    def integer(self, *keys: str, default: int | None = None) -> int:
        """Return the integer >= 1 of the first key that has a value; 0 after an error."""
        key, value = self._first(keys)
        if value is None:
            if default is None:
                self.errors.append(f"{' or '.join(keys)} is missing")
            return default or 0
        if type(value) is not int or not 1 <= value <= LARGEST_SIZE:
            self.errors.append(f"{key} must be an integer >= 1; got {value!r}")
            return 0
        return value

    def part(self, *keys: str) -> float:
        """Return a number from 0 to below 1; 0.0 if no key has a value."""
        key, value = self._first(keys)
        if value is None:
            return 0.0
        is_number = type(value) in (int, float)
        if not is_number or not 0 <= value < 1:
            self.errors.append(f"{key} must be a number from 0 to below 1; got {value!r}")
            return 0.0
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return True or False."""
        value = self.value(key)
        if value is None:
            return default
        if type(value) is not bool:
            self.errors.append(f"{key} must be true or false; got {value!r}")
            return default
        return value

    def activation(self, *keys: str, default: str) -> str:
        """Return the name in torch of an activation: all kinds of GELU are one."""
        key, value = self._first(keys)
        name = value or default
        for known in ("silu", "gelu", "relu"):
            if isinstance(name, str) and name.startswith((known, _OTHER_NAMES.get(known, known))):
                return known
        self.errors.append(f"{key} must be a kind of SiLU, GELU or ReLU; got {value!r}")
        return "silu"

    def refuse(self, key: str, *usual: Any, reason: str) -> None:
        """Add a difference if a key has another value than the usual ones, or None."""
        value = self.value(key)
        if value is not None and value not in usual:
            self.differences.append(f"{reason}: {key} is {value!r}")

    def _first(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        values = {key: self.value(key) for key in keys}
        for key, value in values.items():
            if value is not None:
                return key, value
        return keys[0], None


_OTHER_NAMES = {"silu": "swish", "gelu": "quick_gelu"}
"""Names of activations in other libraries."""


# -- families --------------------------------------------------------------------------------------


def _llama(c: ConfigReader) -> Fields:
    bias = _biases(attention=c.flag("attention_bias", False), mlp=c.flag("mlp_bias", False))
    return {"bias": bias, **_gated(c)}


def _gated(c: ConfigReader, default: str = "silu") -> Fields:
    return {"activation": c.activation("hidden_act", "hidden_activation", default=default)}


def _ungated(c: ConfigReader, *keys: str, default: str = "gelu") -> Fields:
    return {"gated": False, "activation": c.activation(*keys, default=default)}


def _biases(*, attention: bool = False, mlp: bool = False, norm: bool = False) -> tuple[str, ...]:
    has = {"qkv": attention, "out": attention, "mlp": mlp, "norm": norm}
    return tuple([name for name, is_biased in has.items() if is_biased])


def _experts(c: ConfigReader, *, width: str = "moe_intermediate_size") -> Fields:
    """Return the fields of experts in all layers; others must not be dense."""
    reason = "layers must be equal"
    c.refuse("mlp_only_layers", [], reason=reason)
    c.refuse("decoder_sparse_step", 1, reason=reason)
    c.refuse("first_k_dense_replace", 0, reason=reason)
    experts = c.integer("num_local_experts", "num_experts", "n_routed_experts")
    top_k = c.integer("num_experts_per_tok")
    if top_k > experts:
        c.errors.append(f"num_experts_per_tok must be at most the {experts} experts; got {top_k}")
    return {"experts": experts, "top_k": top_k, "expert_ffn": c.integer(width, "intermediate_size")}


def _mixtral(c: ConfigReader) -> Fields:
    return {**_gated(c), **_experts(c, width="intermediate_size")}


def _qwen2(c: ConfigReader) -> Fields:
    return {"bias": ("qkv",), **_gated(c)}


def _qwen3(c: ConfigReader) -> Fields:
    bias = _biases(attention=c.flag("attention_bias", False))
    return {"bias": bias, "qk_norm": "head", **_gated(c)}


def _qwen2_moe(c: ConfigReader) -> Fields:
    has_bias = c.flag("qkv_bias", True)
    bias = ("qkv",) * has_bias
    shared = c.integer("shared_expert_intermediate_size")
    return {"bias": bias, "shared": shared, "shared_gate": True, **_gated(c), **_experts(c)}


def _qwen3_moe(c: ConfigReader) -> Fields:
    return {**_qwen3(c), **_experts(c)}


def _olmoe(c: ConfigReader) -> Fields:
    bias = _biases(attention=c.flag("attention_bias", False))
    experts = _experts(c, width="intermediate_size")
    return {"bias": bias, "qk_norm": "width", **_gated(c), **experts}


def _gemma(c: ConfigReader) -> Fields:
    bias = _biases(attention=c.flag("attention_bias", False))
    # Files of the first Gemma have "hidden_act", which transformers does not read.
    return {"bias": bias, "activation": "gelu"}


def _gemma2(c: ConfigReader) -> Fields:
    return {**_gemma(c), "norms": "around"}


def _gemma3(c: ConfigReader) -> Fields:
    return {**_gemma2(c), "qk_norm": "head"}


def _olmo(c: ConfigReader) -> Fields:
    bias = _biases(attention=c.flag("attention_bias", False))
    return {"bias": bias, "norm_weights": False, **_gated(c)}


def _olmo2(c: ConfigReader) -> Fields:
    bias = _biases(attention=c.flag("attention_bias", False))
    return {"bias": bias, "norms": "after", "qk_norm": "width", **_gated(c)}


def _cohere(c: ConfigReader) -> Fields:
    c.refuse("use_qk_norm", False, reason="norms of queries must be equal for all heads")
    bias = _biases(attention=c.flag("attention_bias", False))
    return {"bias": bias, "norms": "shared", **_gated(c)}


def _stablelm(c: ConfigReader) -> Fields:
    c.refuse("qk_layernorm", False, reason="norms of queries must be equal for all heads")
    has_bias = c.flag("use_qkv_bias", False)
    is_parallel = c.flag("use_parallel_residual", False)
    fields: Fields = {"bias": ("norm",), **_gated(c)}
    if has_bias:
        fields["bias"] = ("qkv", "norm")
    if is_parallel:
        fields["norms"] = "shared"
    return fields


def _starcoder2(c: ConfigReader) -> Fields:
    has_bias = c.flag("use_bias", True)
    bias = _biases(attention=has_bias, mlp=has_bias, norm=True)
    return {"bias": bias, "dropout": c.part("residual_dropout"), **_ungated(c, "hidden_act")}


def _phi(c: ConfigReader) -> Fields:
    c.refuse("qk_layernorm", False, reason="norms of queries must be equal for all heads")
    bias = ("qkv", "out", "mlp", "norm", "head")
    dropout = c.part("resid_pdrop")
    return {"bias": bias, "norms": "shared", "dropout": dropout, **_ungated(c, "hidden_act")}


def _gpt2(c: ConfigReader) -> Fields:
    c.refuse("add_cross_attention", False, reason="layers must have no cross-attention")
    positions = c.integer("n_positions", "max_position_embeddings")
    dropout = c.part("resid_pdrop")
    activation = _ungated(c, "activation_function")
    return {"bias": True, "positions": positions, "dropout": dropout, **activation}


def _gpt_bigcode(c: ConfigReader) -> Fields:
    fields = _gpt2(c)
    if c.flag("multi_query", True):
        fields["kv_heads"] = 1
    return fields


def _gptj(c: ConfigReader) -> Fields:
    dropout = c.part("resid_pdrop")
    activation = _ungated(c, "activation_function")
    bias = ("mlp", "norm", "head")
    return {"bias": bias, "norms": "shared", "dropout": dropout, **activation}


def _gpt_neox(c: ConfigReader) -> Fields:
    bias = _biases(attention=c.flag("attention_bias", True), mlp=True, norm=True)
    norms = "parallel" if c.flag("use_parallel_residual", True) else "before"
    dropout = c.part("hidden_dropout")
    return {"bias": bias, "norms": norms, "dropout": dropout, **_ungated(c, "hidden_act")}


def _opt(c: ConfigReader) -> Fields:
    reason = "the last norm and the embedding must be as wide as the layers"
    c.refuse("word_embed_proj_dim", c.value("hidden_size"), reason=reason)
    c.refuse("do_layer_norm_before", True, reason=reason)
    c.refuse("_remove_final_layer_norm", False, reason=reason)
    has_bias = c.flag("enable_bias", True)
    has_norm_weights = c.flag("layer_norm_elementwise_affine", True)
    bias = _biases(attention=has_bias, mlp=has_bias, norm=has_norm_weights)
    return {
        "bias": bias,
        "norm_weights": has_norm_weights,
        "ffn": c.integer("ffn_dim"),
        # The first two positions are those of padding.
        "positions": c.integer("max_position_embeddings") + 2,
        "dropout": c.part("dropout"),
        **_ungated(c, "activation_function", default="relu"),
    }


def _bloom(c: ConfigReader) -> Fields:
    dropout = c.part("hidden_dropout")
    return {"bias": True, "embedding_norm": True, "gated": False, "dropout": dropout}


def _mpt(c: ConfigReader) -> Fields:
    c.refuse("no_bias", True, reason="transformers builds no biases")
    expansion = c.integer("expansion_ratio", default=4)
    if expansion != 4:
        c.errors.append(f"expansion_ratio must be 4, as transformers builds it; got {expansion}")
    return {"gated": False, "dropout": c.part("resid_pdrop")}


def _falcon(c: ConfigReader) -> Fields:
    is_new = c.flag("new_decoder_architecture", False)
    has_one_kv_head = c.flag("multi_query", True)
    is_parallel = c.flag("parallel_attn", True)
    has_bias = c.flag("bias", False)
    has_one_norm = c.value("num_ln_in_parallel_attn") == 1
    norms = "before"
    if is_new and not has_one_norm:
        norms = "parallel"
    elif is_new or is_parallel:
        norms = "shared"
    fields: Fields = {
        "bias": _biases(attention=has_bias, mlp=has_bias, norm=True),
        "norms": norms,
        "dropout": c.part("hidden_dropout"),
        **_ungated(c, "activation"),
    }
    if is_new:
        fields["kv_heads"] = c.integer("num_kv_heads", "num_attention_heads", "n_head")
    elif has_one_kv_head:
        fields["kv_heads"] = 1
    else:
        fields["kv_heads"] = c.integer("num_attention_heads", "n_head")
    return fields


Family = Callable[[ConfigReader], Fields]

FAMILIES: dict[str, Family] = {
    "bloom": _bloom,
    "cohere": _cohere,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "granite": _llama,
    "llama": _llama,
    "mistral": _gated,
    "mixtral": _mixtral,
    "mpt": _mpt,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "olmoe": _olmoe,
    "opt": _opt,
    "phi": _phi,
    "phi3": _gated,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _llama,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
"""The families whose sizes suffice, by `model_type`."""

TIED = (
    "bloom",
    "cohere",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_bigcode",
    "mpt",
    "opt",
    "smollm3",
    "starcoder2",
)
"""The families whose head is the embedding if a file does not have the key."""

HEAD_DIMS = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128}
"""The width of a head of families in which it is another number than hidden size / heads."""

FFN_KEYS: dict[str, tuple[str, ...]] = {
    "bloom": (),
    "falcon": ("ffn_hidden_size",),
    "gpt2": ("n_inner",),
    "gpt_bigcode": ("n_inner",),
    "gptj": ("n_inner",),
    "mpt": (),
}
"""The keys of families whose MLP is four times as wide as the hidden size without them."""

WITHOUT_GROUPS = ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt")
"""The families that read neither `num_key_value_heads` nor `head_dim`."""


# -- the file --------------------------------------------------------------------------------------


def read_config(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration: of a model of several kinds of input, that of its language model."""
    if isinstance(source, Mapping):
        config = dict(source)
    else:
        config = _read_file(Path(source))
    text_config = config.get("text_config")
    if text_config is None:
        return config
    if not isinstance(text_config, Mapping):
        raise PlanError(f"plan: text_config must be an object; got {text_config!r}.")
    outer = {name: value for name, value in config.items() if name != "text_config"}
    return {**outer, **cast(Mapping[str, Any], text_config)}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        if path.is_dir():
            path = path / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(
            f"plan: config must be a config.json of Hugging Face, or its folder; got {path}: "
            f"{error}."
        ) from None
    if not isinstance(config, dict):
        raise PlanError(f"plan: {path} must have a JSON object; got {type(config).__name__}.")
    return cast(dict[str, Any], config)


def model_type_of(config: Mapping[str, Any]) -> str:
    """Return the type of a configuration; one without a type has the keys of a Llama."""
    name = config.get("model_type", "llama")
    if name == "gemma3":  # without a text_config, as some files of text models have it
        return "gemma3_text"
    if not isinstance(name, str):
        raise PlanError(f"plan: model_type must be a name; got {name!r}.")
    return name


def fields_of_config(config: Mapping[str, Any], sequence: int | None) -> Fields:
    """Return the fields of a `Transformer` in a configuration; one error names all that is wrong."""
    name = model_type_of(config)
    if name not in FAMILIES:
        raise PlanError(
            f"plan: model_type must be one of {', '.join(FAMILIES)}; got {name!r}. Take "
            "fs.plan.model_of_config, which builds modules of transformers."
        )
    reader = ConfigReader(config)
    fields = {**_usual_fields(reader, name, sequence), **FAMILIES[name](reader)}
    has_no_type = "model_type" not in config
    expert_keys = ("num_local_experts", "num_experts", "n_routed_experts")
    if has_no_type and any([reader.value(key) for key in expert_keys]):
        fields |= _experts(reader)
        fields["shared"] = reader.integer("shared_expert_intermediate_size", default=0)
    if has_no_type:
        reader.refuse("kv_lora_rank", 0, reason="attention must be that of a Llama")
        reader.refuse("n_shared_experts", 0, reason="it must have a model_type")
    reader.errors += misspelled(config, reader.keys)
    if not reader.errors:
        _validate_heads(fields, reader.errors)
        _validate_positions(reader, fields, sequence)
    if reader.errors:
        raise PlanError(f"plan: config.json of {name}: {'; '.join(reader.errors)}.")
    if reader.differences:
        raise OtherLayersError(
            f"plan: config.json of {name}: {'; '.join(reader.differences)}. "
            "Take fs.plan.model_of_config, which builds modules of transformers."
        )
    return _without_defaults(fields)


def _without_defaults(fields: Fields) -> Fields:
    """Write what is the default of `Transformer` as it is there, so that equal sizes are equal."""
    has_default_bias = not fields.get("bias")
    is_gated = fields.get("gated", True)
    default_activation = "silu" if is_gated else "gelu"
    has_default_activation = fields.get("activation", default_activation) == default_activation
    values = {**fields}
    if has_default_bias:
        values["bias"] = False
    if has_default_activation:
        values["activation"] = ""
    return values


def _usual_fields(c: ConfigReader, name: str, sequence: int | None) -> Fields:
    """Return the fields that each family has."""
    hidden = c.integer("hidden_size", "n_embd", "n_embed", "d_model")
    heads = c.integer("num_attention_heads", "n_head", "n_heads")
    has_experts = "_moe" in name  # then all layers have, and no MLP beside them
    if name not in FFN_KEYS:
        least = hidden if has_experts else None
        ffn = c.integer("intermediate_size", "ffn_dim", default=least)
    elif FFN_KEYS[name]:
        ffn = c.integer(*FFN_KEYS[name], default=4 * hidden)
    else:
        ffn = 4 * hidden
    kv_heads = heads
    head_dim = 0
    if name not in WITHOUT_GROUPS:
        kv_heads = c.integer("num_key_value_heads", default=heads or 1)
        head_dim = c.integer("head_dim", default=HEAD_DIMS.get(name, 0))
    if head_dim * heads == hidden:
        head_dim = 0
    return {
        "layers": c.integer("num_hidden_layers", "n_layer", "n_layers"),
        "hidden": hidden,
        "ffn": ffn,
        "heads": heads,
        "kv_heads": kv_heads,
        "vocab": c.integer("vocab_size"),
        "sequence": sequence or longest_sequence(c),
        "head_dim": head_dim,
        "tied": c.flag("tie_word_embeddings", name in TIED),
    }


def longest_sequence(c: ConfigReader) -> int:
    """Return the most tokens of a sample that a model takes."""
    if not any([c.value(key) for key in _LENGTHS]):
        c.errors.append("no number of tokens is named. Give one: sequence")
        return 0
    return c.integer(*_LENGTHS)


_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def misspelled(config: Mapping[str, Any], keys: Collection[str]) -> list[str]:
    """Return an error for each key of a configuration that seems to be another one, misspelled.

    A key that is there is not the one that is meant. So only those that are missing are compared.

    Args:
        config: whose keys are compared.
        keys: that are read.
    """
    missing = sorted([key for key in keys if key not in config])
    errors = list[str]()
    for key in config:
        if key in keys:
            continue
        near_keys = get_close_matches(key, missing, n=1, cutoff=SIMILAR)
        if near_keys:
            errors.append(
                f"{key} is no key that is read. Rename it to {near_keys[0]}, or remove it"
            )
    return errors


def _validate_positions(c: ConfigReader, fields: Fields, sequence: int | None) -> None:
    """Refuse more tokens than there are embeddings of positions."""
    if not fields.get("positions") or sequence is None:
        return
    most = longest_sequence(c)
    if sequence > most:
        c.errors.append(
            f"sequence must be at most {most}, the positions that have an embedding; got {sequence}"
        )


def _validate_heads(fields: Fields, errors: list[str]) -> None:
    hidden = fields["hidden"]
    heads = fields["heads"]
    kv_heads = fields["kv_heads"]
    if not fields["head_dim"] and hidden % heads:
        errors.append(f"the number of heads must divide the hidden size, {hidden}; got {heads}")
    if heads % kv_heads:
        errors.append(f"the number of heads of keys must divide the {heads} heads; got {kv_heads}")
