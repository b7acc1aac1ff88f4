"""`Transformer`: a decoder of language models by its sizes, such as those of a Hugging Face `config.json`."""

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

_KEYS = {  # of config.json
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "ffn": ("intermediate_size", "n_inner"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "vocab": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions"),
}
_EXPERT_KEYS = {
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size", "intermediate_size"),
    "shared": ("shared_expert_intermediate_size",),
}


@dataclass(frozen=True)
class Transformer:
    """The sizes of a decoder.

    Args:
        layers, hidden, ffn, heads, kv_heads, vocab: its sizes.
        sequence: tokens of a sample.
        gated: True for three matrices in an MLP, False for two.
        tied: True if the head is the embedding.
        attention: "fused"; or "formula", with scores in memory, or "recomputed", the same with scores that are recomputed.
        bias: True if linear layers and norms have one.
        dropout: the part of attention's scores and of each branch's result that is dropped.
        dtype: of its parameters.
        experts, top_k, expert_ffn: of each layer, instead of an MLP; those of a token; their width. 0: an MLP.
        shared: width of the network beside the experts.

    Norms are torch's fused layer norms, which cost as much as RMSNorm.

    >>> small = Transformer(layers=2, hidden=64, ffn=256, heads=4, kv_heads=4, vocab=100, sequence=16, gated=False)
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

    def _parameters(self, experts: int) -> int:
        """Return the number of parameters with a number of experts."""
        h, kv = self.hidden, self.hidden // self.heads * self.kv_heads
        mlp = (3 if self.gated else 2) * h * self.ffn
        if self.experts:
            mlp = 3 * h * self.expert_ffn * experts + h * self.experts + 2 * h * self.shared
            mlp += h + self.shared if self.shared else 0  # biases
        biases = self.layers * (5 * h + 2 * kv + (2 if self.gated else 1) * self.ffn) + h
        block, ends = 2 * h * (h + kv) + mlp + 2 * h, (1 if self.tied else 2) * self.vocab * h + h
        return self.layers * block + ends + (biases if self.bias else 0)

    def flops(self, samples: int, *, attention: bool = False) -> float:
        """Return the operations of a step: 6 for a parameter and a token; with those of attention, of all pairs.

        Experts count as often as tokens use them.
        """
        tokens = samples * self.sequence
        pairs = 12 * self.layers * self.hidden * self.sequence * tokens if attention else 0
        return 6 * self._parameters(self.top_k) * tokens + pairs

    def build(self, layers: int | None = None) -> Decoder:
        """Return the module on the meta device, with fewer layers if a number is given."""
        with torch.device("meta"):
            return Decoder(self, self.layers if layers is None else layers).to(self.dtype)

    @classmethod
    def from_config(
        cls, source: str | Path | Mapping[str, Any], *, sequence: int | None = None
    ) -> Transformer:
        """Return the sizes in a `config.json` of Hugging Face, of a Llama, Mistral, Mixtral, Qwen or GPT-2.

        Args:
            source: path of the file or its folder, or its content.
            sequence: tokens of a sample; default: the most that the model takes.

        Raises:
            PlanError: naming all keys that are missing.
        """
        if isinstance(source, str | Path):
            path = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
            config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        else:
            config = {**source}
        config |= config.get("text_config", {})
        sizes = _found(config, _KEYS)
        sizes["sequence"] = sequence or sizes["sequence"]
        sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]
        is_gpt2 = config.get("model_type") == "gpt2"
        sizes["ffn"] = sizes["ffn"] or (4 * (sizes["hidden"] or 0) if is_gpt2 else None)
        if missing := [" or ".join(_KEYS[name]) for name, size in sizes.items() if not size]:
            raise PlanError(
                f"plan: config.json must have {', '.join(missing)}; it has {', '.join(sorted(config))}."
            )
        if other := [
            key
            for key in ("kv_lora_rank", "n_shared_experts", "first_k_dense_replace")
            if config.get(key)
        ]:
            raise PlanError(
                f"plan: config.json must be of equal layers with usual attention; got {', '.join(other)}. "
                "Build the model, and give it."
            )
        head_dim = config.get("head_dim")
        if head_dim and head_dim * sizes["heads"] != sizes["hidden"]:
            raise PlanError(
                f"plan: config.json must have a head_dim of hidden size / heads; got {head_dim} for "
                f"{sizes['hidden']} / {sizes['heads']}. Build the model, and give it."
            )
        experts = _found(config, _EXPERT_KEYS)
        sizes |= {name: size or 0 for name, size in experts.items()} if experts["experts"] else {}
        tied, dropout = (
            bool(config.get("tie_word_embeddings", is_gpt2)),
            config.get("resid_pdrop", 0.0),
        )
        return cls(**sizes, gated=not is_gpt2, tied=tied, bias=is_gpt2, dropout=dropout)


def _found(config: Mapping[str, Any], keys: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the values of the first key that a configuration has, None if it has none."""
    return {
        name: next((config[key] for key in legal if config.get(key)), None)
        for name, legal in keys.items()
    }


def _fused(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v, None, dropout, is_causal=True, enable_gqa=True
    )


def _by_formula(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Return attention with scores in memory, for as many heads of keys; the mask is part of a fused softmax."""
    scores = torch.softmax(q @ k.mT, -1)
    return (functional.dropout(scores, dropout) if dropout else scores) @ v


_ATTENTION = {"fused": _fused, "formula": _by_formula, "recomputed": remat(_by_formula)}


class DecoderBlock(nn.Module):
    """Attention and an MLP. What they compute is named, so that it can be kept when the rest is recomputed."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        h, kv, bias = sizes.hidden, sizes.hidden // sizes.heads * sizes.kv_heads, sizes.bias
        self.width = sizes.hidden // sizes.heads
        self.attention, self.dropout = _ATTENTION[sizes.attention], sizes.dropout
        self.norm, self.norm2 = nn.LayerNorm(h, bias=bias), nn.LayerNorm(h, bias=bias)
        self.q, self.out = nn.Linear(h, h, bias=bias), nn.Linear(h, h, bias=bias)
        self.k, self.v = nn.Linear(h, kv, bias=bias), nn.Linear(h, kv, bias=bias)
        self.experts = None
        if sizes.experts:
            counts: Any = {"experts": sizes.experts, "top_k": sizes.top_k, "shared": sizes.shared}
            self.experts = MoE(h, sizes.expert_ffn, axis="expert", **counts)
            return
        self.up, self.down = nn.Linear(h, sizes.ffn, bias=bias), nn.Linear(sizes.ffn, h, bias=bias)
        self.gate = nn.Linear(h, sizes.ffn, bias=bias) if sizes.gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states after the block."""
        y = self.norm(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = checkpoint_name(
            self.attention(q, k, v, self.dropout if self.training else 0.0), "attention"
        )
        x = x + self._dropped(self.out(y.transpose(1, 2).flatten(2)))
        y = self.norm2(x)
        if self.experts is not None:
            return x + self._dropped(self.experts(y.flatten(0, 1)).unflatten(0, y.shape[:2]))
        up = checkpoint_name(self.up(y), "mlp")
        gate = None if self.gate is None else checkpoint_name(self.gate(y), "mlp")
        return x + self._dropped(
            self.down(functional.gelu(up) if gate is None else functional.silu(gate) * up)
        )

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training) if self.dropout else x


class Decoder(nn.Module):
    """Token ids to logits."""

    def __init__(self, sizes: Transformer, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(DecoderBlock(sizes) for _ in range(layers))
        self.norm, self.head = (
            nn.LayerNorm(sizes.hidden, bias=sizes.bias),
            nn.Linear(sizes.hidden, sizes.vocab, bias=False),
        )
        if sizes.tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next tokens."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
