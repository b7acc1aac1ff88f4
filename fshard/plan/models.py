"""`Transformer`: a decoder of language models by its sizes.

They are given, or those of a `config.json` of Hugging Face: see `Transformer.from_config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fshard.errors import PlanError
from fshard.experts.module import MoE
from fshard.transforms.module.remat import checkpoint_name, remat

_KEYS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "ffn": ("intermediate_size", "n_inner"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "vocab": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions"),
}
"""The sizes of a decoder, and their keys in `config.json`; those of GPT-2 come second."""

_EXPERT_KEYS = {
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size", "intermediate_size"),
    "shared": ("shared_expert_intermediate_size",),
}
"""The same of experts, whose names differ by family."""

_OTHER_LAYERS = ("kv_lora_rank", "n_shared_experts", "first_k_dense_replace")
"""Keys of models whose layers differ, or whose attention is compressed."""


@dataclass(frozen=True)
class Transformer:
    """The sizes of a decoder.

    Args:
        layers, hidden, ffn, heads, kv_heads, vocab: its sizes.
        sequence: tokens of a sample.
        gated: True for three matrices in an MLP, False for two.
        tied: True if the head is the embedding.
        attention: "fused"; or "formula", with scores in memory, or "recomputed", the same with
            scores that are recomputed.
        bias: True if linear layers and norms have one.
        dropout: the part of attention's scores and of each branch's result that is dropped.
        dtype: of its parameters.
        experts, top_k, expert_ffn: of each layer, instead of an MLP: their number, those of a
            token, and their width. 0: an MLP.
        shared: width of the network beside the experts.

    Norms are torch's fused layer norms, which cost as much as RMSNorm.

    >>> sizes = dict(layers=2, hidden=64, ffn=256, heads=4, kv_heads=4, vocab=100, sequence=16)
    >>> small = Transformer(**sizes, gated=False)
    >>> small.parameters == sum(x.numel() for x in small.build().parameters())
    True
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    sequence: int
    gated: bool = True
    tied: bool = False
    attention: Literal["fused", "formula", "recomputed"] = "fused"
    bias: bool = False
    dropout: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared: int = 0

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return self._parameters(self.experts)

    @property
    def kv_width(self) -> int:
        """The width of keys, and of values, of a token."""
        return self.hidden // self.heads * self.kv_heads

    def _parameters(self, experts: int) -> int:
        """Return the number of parameters with a number of experts."""
        hidden = self.hidden
        queries_and_output = 2 * hidden * hidden
        keys_and_values = 2 * hidden * self.kv_width
        norms = 2 * hidden
        block = queries_and_output + keys_and_values + norms + self._mlp_parameters(experts)
        if self.bias:
            block += self._biases_of_block()
        embeddings = (1 if self.tied else 2) * self.vocab * hidden
        last_norm = (2 if self.bias else 1) * hidden
        return self.layers * block + embeddings + last_norm

    def _mlp_parameters(self, experts: int) -> int:
        """Return the number of weights of a block's MLP, or of its experts and their router."""
        matrices = 3 if self.gated else 2
        if not self.experts:
            return matrices * self.hidden * self.ffn
        router = self.hidden * self.experts
        count = 3 * self.hidden * self.expert_ffn * experts + router
        if self.shared:  # two matrices, with their biases
            count += 2 * self.hidden * self.shared + self.hidden + self.shared
        return count

    def _biases_of_block(self) -> int:
        # Each has as many as its layer has outputs: queries, output, two norms and `down` those
        # of `hidden`; keys and values; `up`, and the gate if there is one.
        widths_of_ffn = 2 if self.gated else 1
        return 5 * self.hidden + 2 * self.kv_width + widths_of_ffn * self.ffn

    def flops(self, samples: int, *, attention: bool = False) -> float:
        """Return the operations of a step: 6 for a parameter and a token.

        With `attention` those of attention are added, of all pairs. Experts count as often as
        tokens use them.
        """
        tokens = samples * self.sequence
        flops = 6 * self._parameters(self.top_k) * tokens
        if attention:
            # Scores and their products with values: 2 matrix products of 2 operations for a pair
            # and an element, three times as many with the backward.
            flops += 12 * self.layers * self.hidden * self.sequence * tokens
        return flops

    def build(self, layers: int | None = None) -> Decoder:
        """Return the module on the meta device, with fewer layers if a number is given."""
        with torch.device("meta"):
            return Decoder(self, self.layers if layers is None else layers).to(self.dtype)

    @classmethod
    def from_config(
        cls, source: str | Path | Mapping[str, Any], *, sequence: int | None = None
    ) -> Transformer:
        """Return the sizes in a `config.json` of Hugging Face.

        Args:
            source: path of the file or its folder, or its content: of a Llama, Mistral, Mixtral,
                Qwen or GPT-2.
            sequence: tokens of a sample; default: the most that the model takes.

        Raises:
            PlanError: naming all keys that are missing.
        """
        config = _read_config(source)
        is_gpt2 = config.get("model_type") == "gpt2"
        sizes = _first_values(config, _KEYS)
        if sequence:
            sizes["sequence"] = sequence
        if not sizes["kv_heads"]:
            sizes["kv_heads"] = sizes["heads"]
        if is_gpt2 and not sizes["ffn"]:
            sizes["ffn"] = 4 * (sizes["hidden"] or 0)
        _assert_supported(config, sizes)

        expert_sizes = _first_values(config, _EXPERT_KEYS)
        if expert_sizes["experts"]:
            for name, size in expert_sizes.items():
                sizes[name] = size or 0
        return cls(
            **sizes,
            gated=not is_gpt2,
            tied=bool(config.get("tie_word_embeddings", is_gpt2)),
            bias=is_gpt2,
            dropout=config.get("resid_pdrop", 0.0),
        )


def _read_config(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, with the keys of its language model if it has others too."""
    if isinstance(source, Mapping):
        config = {**source}
    else:
        path = Path(source)
        if path.is_dir():
            path = path / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PlanError(
                f"plan: config must be a config.json of Hugging Face, or its folder; got {path}: "
                f"{error}."
            ) from None
        if not isinstance(config, dict):
            raise PlanError(f"plan: {path} must have a JSON object; got {type(config).__name__}.")
    return {**config, **config.get("text_config", {})}


def _first_values(config: Mapping[str, Any], keys: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the value of the first key of each size that a configuration has; None of none."""
    sizes = dict[str, Any]()
    for name, legal in keys.items():
        values = [config[key] for key in legal if config.get(key)]
        sizes[name] = values[0] if values else None
    return sizes


def _assert_supported(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Raise if sizes are missing, or if a decoder has other layers than `Decoder`."""
    missing = [" or ".join(_KEYS[name]) for name, size in sizes.items() if not size]
    if missing:
        raise PlanError(
            f"plan: config.json must have {', '.join(missing)}; it has {', '.join(sorted(config))}."
        )
    other_layers = [key for key in _OTHER_LAYERS if config.get(key)]
    if other_layers:
        raise PlanError(
            "plan: config.json must be of equal layers with usual attention; "
            f"got {', '.join(other_layers)}. Build the model, and give it."
        )
    head_dim = config.get("head_dim")
    if head_dim and head_dim * sizes["heads"] != sizes["hidden"]:
        raise PlanError(
            f"plan: config.json must have a head_dim of hidden size / heads; got {head_dim} for "
            f"{sizes['hidden']} / {sizes['heads']}. Build the model, and give it."
        )


# -- the module ------------------------------------------------------------------------------------


# Note [Kernels of Megatron]
# Megatron's layers save less for their backward than torch's operations, one by one, would:
#
#     norms         their input alone: they are computed again, and with
#                   sequence_mode="megatron" tokens are gathered again (arXiv 2205.05198, 4.2.2)
#     gate and up   these two, and the input of `down`; not silu of the gate (a fused SwiGLU)
#     dropout       a mask of one byte an element
#
# `remat` does the first two of any operations. torch has a kernel for the third on GPUs, which
# `functional.dropout` takes there and nowhere else: `native_dropout` is the same on all.


def _dropped(x: Tensor, rate: float) -> Tensor:
    if isinstance(x, Tensor):
        return torch.native_dropout(x, rate, train=True)[0]
    return functional.dropout(x, rate)  # of an array, which has no kernel of its own


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _fused(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v, None, dropout, is_causal=True, enable_gqa=True
    )


def _by_formula(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Return attention with scores in memory, for as many heads of keys as of queries.

    There is no mask: the kernel of a masked softmax applies it without traffic of its own.
    """
    scores = torch.softmax(q @ k.mT, -1)
    if dropout:
        scores = _dropped(scores, dropout)
    return scores @ v


_ATTENTION = {"fused": _fused, "formula": _by_formula, "recomputed": remat(_by_formula)}


class DecoderBlock(nn.Module):
    """Attention and an MLP, or experts.

    The results of attention and of `up` and `gate` are named, so that they can be kept when the
    rest is recomputed.
    """

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        hidden = sizes.hidden
        bias = sizes.bias
        self.width = hidden // sizes.heads
        self.attention = _ATTENTION[sizes.attention]
        self.dropout = sizes.dropout
        self.norm = nn.LayerNorm(hidden, bias=bias)
        self.norm2 = nn.LayerNorm(hidden, bias=bias)
        self.q = nn.Linear(hidden, hidden, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=bias)
        self.k = nn.Linear(hidden, sizes.kv_width, bias=bias)
        self.v = nn.Linear(hidden, sizes.kv_width, bias=bias)
        self.experts = None
        if sizes.experts:
            self.experts = MoE(
                hidden,
                sizes.expert_ffn,
                axis="expert",
                experts=sizes.experts,
                top_k=sizes.top_k,
                shared=sizes.shared,
            )
            return
        self.up = nn.Linear(hidden, sizes.ffn, bias=bias)
        self.down = nn.Linear(sizes.ffn, hidden, bias=bias)
        self.gate = nn.Linear(hidden, sizes.ffn, bias=bias) if sizes.gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states after the block."""
        x = x + self._dropped(self._attend(x))
        if self.experts is None:
            return x + self._dropped(self._mlp(x))
        y = self.norm2(x)
        tokens = y.flatten(0, 1)
        return x + self._dropped(self.experts(tokens).unflatten(0, y.shape[:2]))

    def _attend(self, x: Tensor) -> Tensor:
        # See Note [Kernels of Megatron].
        queries, keys, values = remat(self._projected, "dots")(x)
        q = self._by_head(queries)
        k = self._by_head(keys)
        v = self._by_head(values)
        dropout = self.dropout if self.training else 0.0
        heads = checkpoint_name(self.attention(q, k, v, dropout), "attention")
        return self.out(heads.transpose(1, 2).flatten(2))

    def _by_head(self, x: Tensor) -> Tensor:
        """(batch, token, head * width) -> (batch, head, token, width)."""
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.norm(x)
        return self.q(y), self.k(y), self.v(y)

    def _mlp(self, x: Tensor) -> Tensor:
        # See Note [Kernels of Megatron].
        up, gate = remat(self._up_and_gate, "dots")(x)
        if gate is None:
            return self.down(functional.gelu(up))
        return self.down(remat(_gated)(gate, up))

    def _up_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        y = self.norm2(x)
        up = checkpoint_name(self.up(y), "mlp")
        gate = None if self.gate is None else checkpoint_name(self.gate(y), "mlp")
        return up, gate

    def _dropped(self, x: Tensor) -> Tensor:
        return _dropped(x, self.dropout) if self.dropout and self.training else x


class Decoder(nn.Module):
    """Token ids to logits."""

    def __init__(self, sizes: Transformer, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(DecoderBlock(sizes) for _ in range(layers))
        self.norm = nn.LayerNorm(sizes.hidden, bias=sizes.bias)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        if sizes.tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next tokens."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
