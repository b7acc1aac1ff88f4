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
from fshard.transforms.module.remat import remat

_KEYS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "ffn": ("intermediate_size", "n_inner"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "vocab": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions"),
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

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        h, kv = self.hidden, self.hidden // self.heads * self.kv_heads
        block = 2 * h * (h + kv) + (3 if self.gated else 2) * h * self.ffn + 2 * h
        biases = self.layers * (5 * h + 2 * kv + (2 if self.gated else 1) * self.ffn) + h
        return self.layers * block + (1 if self.tied else 2) * self.vocab * h + h + (biases if self.bias else 0)

    def flops(self, samples: int, *, attention: bool = False) -> float:
        """Return the operations of a step: 6 for a parameter and a token; with those of attention, of all pairs."""
        tokens = samples * self.sequence
        pairs = 12 * self.layers * self.hidden * self.sequence * tokens if attention else 0
        return 6 * self.parameters * tokens + pairs

    def build(self, layers: int | None = None) -> Decoder:
        """Return the module on the meta device, with fewer layers if a number is given."""
        with torch.device("meta"):
            return Decoder(self, self.layers if layers is None else layers).to(self.dtype)

    @classmethod
    def from_config(cls, source: str | Path | Mapping[str, Any], *, sequence: int | None = None) -> Transformer:
        """Return the sizes in a `config.json` of Hugging Face, of a Llama, Mistral, Qwen or GPT-2.

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
        sizes: dict[str, Any] = {
            name: next((config[key] for key in keys if config.get(key)), None) for name, keys in _KEYS.items()
        }
        sizes["sequence"] = sequence or sizes["sequence"]
        sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]
        is_gpt2 = config.get("model_type") == "gpt2"
        sizes["ffn"] = sizes["ffn"] or (4 * (sizes["hidden"] or 0) if is_gpt2 else None)
        if missing := [" or ".join(_KEYS[name]) for name, size in sizes.items() if not size]:
            raise PlanError(f"plan: config.json must have {', '.join(missing)}; it has {', '.join(sorted(config))}.")
        if experts := [key for key in config if "expert" in key and config[key]]:
            raise PlanError(
                f"plan: config.json must be of a dense model; got {experts[0]}. Build the model, and give it."
            )
        tied, dropout = bool(config.get("tie_word_embeddings", is_gpt2)), config.get("resid_pdrop", 0.0)
        return cls(**sizes, gated=not is_gpt2, tied=tied, bias=is_gpt2, dropout=dropout)


def _fused(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True, enable_gqa=True)


def _by_formula(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Return attention with scores in memory, for as many heads of keys; the mask is part of a fused softmax."""
    scores = torch.softmax(q @ k.mT, -1)
    return (functional.dropout(scores, dropout) if dropout else scores) @ v


_ATTENTION = {"fused": _fused, "formula": _by_formula, "recomputed": remat(_by_formula)}


class DecoderBlock(nn.Module):
    """Attention and an MLP."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        h, kv, bias = sizes.hidden, sizes.hidden // sizes.heads * sizes.kv_heads, sizes.bias
        self.width = sizes.hidden // sizes.heads
        self.attention, self.dropout = _ATTENTION[sizes.attention], sizes.dropout
        self.norm, self.norm2 = nn.LayerNorm(h, bias=bias), nn.LayerNorm(h, bias=bias)
        self.q, self.out = nn.Linear(h, h, bias=bias), nn.Linear(h, h, bias=bias)
        self.k, self.v = nn.Linear(h, kv, bias=bias), nn.Linear(h, kv, bias=bias)
        self.up, self.down = nn.Linear(h, sizes.ffn, bias=bias), nn.Linear(sizes.ffn, h, bias=bias)
        self.gate = nn.Linear(h, sizes.ffn, bias=bias) if sizes.gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states after the block."""
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = self.attention(q, k, v, self.dropout if self.training else 0.0)
        x = x + self._dropped(self.out(y.transpose(1, 2).flatten(2)))
        y, up = self.norm2(x), self.up
        y = functional.gelu(up(y)) if self.gate is None else functional.silu(self.gate(y)) * up(y)
        return x + self._dropped(self.down(y))

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
