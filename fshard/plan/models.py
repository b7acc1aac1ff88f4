"""`Transformer`: a decoder of language models by its sizes.

They are given, or those of a `config.json` of Hugging Face: see `Transformer.from_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fshard.experts.module import MoE
from fshard.plan.hugging_face.families import fields_of_config, read_config
from fshard.transforms.module.remat import checkpoint_name, remat

BIASED = ("qkv", "out", "mlp", "norm")
"""The parts that have a bias with `bias=True`; the head, "head", is seldom one of them."""

_ACTIVATIONS = {"silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu}


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
        bias: True if linear layers and norms have one; or the names of those that do, of "qkv",
            "out", "mlp", "norm" and "head".
        dropout: the part of attention's scores and of each branch's result that is dropped.
        dtype: of its parameters.
        experts, top_k, expert_ffn: of each layer, instead of an MLP: their number, those of a
            token, and their width. 0: an MLP.
        shared: width of the network beside the experts.
        shared_gate: True if that network's result is multiplied by a gate of each token.
        head_dim: width of a head. 0: hidden / heads.
        activation: of an MLP: "silu", "gelu" or "relu". "": SiLU if it is gated, else GELU.
        norms: of a layer: "before" attention and before the MLP; "after" them; "around", both;
            "parallel", of a layer whose attention and MLP read one input, each through a norm;
            "shared", the same through one norm.
        norm_weights: True if norms have weights.
        qk_norm: norms of queries and keys: "none", of each "head", or of all heads ("width").
        positions: number of positions that have an embedding; 0: none is learned.
        embedding_norm: True if a norm follows the embedding.

    Norms are torch's fused layer norms, which cost as much as RMSNorm. Rotary embeddings and
    windows of attention are left out.

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
    bias: bool | tuple[str, ...] = False
    dropout: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared: int = 0
    shared_gate: bool = False
    head_dim: int = 0
    activation: Literal["", "silu", "gelu", "relu"] = ""
    norms: Literal["before", "after", "around", "parallel", "shared"] = "before"
    norm_weights: bool = True
    qk_norm: Literal["none", "head", "width"] = "none"
    positions: int = 0
    embedding_norm: bool = False

    @cached_property
    def parameters(self) -> int:
        """The number of parameters."""
        # All layers are equal, so that two models suffice.
        one = self._parameters_with(1)
        two = self._parameters_with(2)
        return one + (self.layers - 1) * (two - one)

    def _parameters_with(self, layers: int) -> int:
        return sum([x.numel() for x in self.build(layers).parameters()])

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """The width of the queries of a token."""
        return self.head_width * self.heads

    @property
    def kv_width(self) -> int:
        """The width of keys, and of values, of a token."""
        return self.head_width * self.kv_heads

    @property
    def activation_name(self) -> str:
        """The activation of an MLP: "silu", "gelu" or "relu"."""
        return self.activation or ("silu" if self.gated else "gelu")

    def has_bias(self, part: str) -> bool:
        """Return True if a part, of "qkv", "out", "mlp", "norm" and "head", has a bias."""
        if isinstance(self.bias, bool):
            return self.bias and part in BIASED
        return part in self.bias

    def flops(self, samples: int, *, attention: bool = False) -> float:
        """Return the operations of a step: 6 for a parameter and a token.

        With `attention` those of attention are added, of all pairs. Experts count as often as
        tokens use them.
        """
        tokens = samples * self.sequence
        idle_experts = self.experts - self.top_k
        idle = self.layers * idle_experts * 3 * self.hidden * self.expert_ffn
        flops = 6 * (self.parameters - idle) * tokens
        if attention:
            # Scores and their products with values: 2 matrix products of 2 operations for a pair
            # and an element, three times as many with the backward.
            flops += 12 * self.layers * self.query_width * self.sequence * tokens
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
            source: path of the file or its folder, or its content, of a `model_type` in
                `fshard.plan.hugging_face.families.FAMILIES`: a Llama, Mistral, Mixtral, Qwen, Gemma, Phi, GPT-2, GPT-NeoX,
                OPT, BLOOM, Falcon, StarCoder, OLMo and others.
            sequence: tokens of a sample; default: the most that the model takes.

        The number of parameters is that of transformers.

        Raises:
            PlanError: naming the type if it is another one, or all keys that are wrong or missing.
        """
        return cls(**fields_of_config(read_config(source), sequence))


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


def _fused(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v, None, dropout, is_causal=True, enable_gqa=True
    )


def _by_formula(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Return attention with scores in memory.

    There is no mask: the kernel of a masked softmax applies it without traffic of its own.
    """
    heads = q.shape[1]
    is_grouped = k.shape[1] < heads
    if is_grouped:
        # The products broadcast keys over the queries of a group, so that keys are not repeated.
        q = q.unflatten(1, (k.shape[1], -1))
        k = k.unsqueeze(2)
        v = v.unsqueeze(2)
    scores = torch.softmax(q @ k.mT, -1)
    if dropout:
        scores = _dropped(scores, dropout)
    result = scores @ v
    return result.flatten(1, 2) if is_grouped else result


_ATTENTION = {"fused": _fused, "formula": _by_formula, "recomputed": remat(_by_formula)}


class DecoderBlock(nn.Module):
    """Attention and an MLP, or experts.

    The results of attention and of `up` and `gate` are named, so that they can be kept when the
    rest is recomputed.
    """

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        hidden = sizes.hidden
        has_qkv_bias = sizes.has_bias("qkv")
        has_mlp_bias = sizes.has_bias("mlp")
        self.norms = sizes.norms
        self.width = sizes.head_width
        self.attention = _ATTENTION[sizes.attention]
        self.activation = _ACTIVATIONS[sizes.activation_name]
        self.dropout = sizes.dropout
        self.norm = _norm(hidden, sizes)
        self.norm2 = None
        if sizes.norms != "shared":
            self.norm2 = _norm(hidden, sizes)
        self.norm_after = None
        self.norm2_after = None
        if sizes.norms == "around":
            self.norm_after = _norm(hidden, sizes)
            self.norm2_after = _norm(hidden, sizes)
        self.q = nn.Linear(hidden, sizes.query_width, bias=has_qkv_bias)
        self.out = nn.Linear(sizes.query_width, hidden, bias=sizes.has_bias("out"))
        self.k = nn.Linear(hidden, sizes.kv_width, bias=has_qkv_bias)
        self.v = nn.Linear(hidden, sizes.kv_width, bias=has_qkv_bias)
        self.qk_norm = sizes.qk_norm
        self.q_norm = None
        self.k_norm = None
        if sizes.qk_norm == "head":
            self.q_norm = _norm(sizes.head_width, sizes)
            self.k_norm = _norm(sizes.head_width, sizes)
        elif sizes.qk_norm == "width":
            self.q_norm = _norm(sizes.query_width, sizes)
            self.k_norm = _norm(sizes.kv_width, sizes)
        self.experts = None
        self.shared = None
        if sizes.experts:
            self.experts = MoE(
                hidden,
                sizes.expert_ffn,
                axis="expert",
                experts=sizes.experts,
                top_k=sizes.top_k,
            )
            if sizes.shared:
                self.shared = SharedExpert(hidden, sizes.shared, has_gate=sizes.shared_gate)
            return
        self.up = nn.Linear(hidden, sizes.ffn, bias=has_mlp_bias)
        self.down = nn.Linear(sizes.ffn, hidden, bias=has_mlp_bias)
        self.gate = nn.Linear(hidden, sizes.ffn, bias=has_mlp_bias) if sizes.gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states after the block."""
        match self.norms:
            case "before":
                x = x + self._dropped(self._attend(self.norm, x))
                return x + self._dropped(self._feed(self.norm2, x))
            case "after":
                x = x + self._dropped(self.norm(self._attend(None, x)))
                return x + self._dropped(_normed(self.norm2, self._feed(None, x)))
            case "around":
                attended = self._attend(self.norm, x)
                x = x + self._dropped(_normed(self.norm_after, attended))
                fed = self._feed(self.norm2, x)
                return x + self._dropped(_normed(self.norm2_after, fed))
            case "parallel":
                attended = self._attend(self.norm, x)
                return x + self._dropped(attended) + self._dropped(self._feed(self.norm2, x))
            case _:  # "shared"
                y = self.norm(x)
                return x + self._dropped(self._attend(None, y)) + self._dropped(self._feed(None, y))

    def _attend(self, norm: nn.LayerNorm | None, x: Tensor) -> Tensor:
        # See Note [Kernels of Megatron].
        queries, keys, values = remat(partial(self._projected, norm), "dots")(x)
        q = self._by_head(self._normed_width(self.q_norm, queries))
        k = self._by_head(self._normed_width(self.k_norm, keys))
        v = self._by_head(values)
        if self.qk_norm == "head":
            q = _normed(self.q_norm, q)
            k = _normed(self.k_norm, k)
        dropout = self.dropout if self.training else 0.0
        heads = checkpoint_name(self.attention(q, k, v, dropout), "attention")
        return self.out(heads.transpose(1, 2).flatten(2))

    def _normed_width(self, norm: nn.LayerNorm | None, x: Tensor) -> Tensor:
        return _normed(norm, x) if self.qk_norm == "width" else x

    def _by_head(self, x: Tensor) -> Tensor:
        """(batch, token, head * width) -> (batch, head, token, width)."""
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def _projected(self, norm: nn.LayerNorm | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = _normed(norm, x)
        return self.q(y), self.k(y), self.v(y)

    def _feed(self, norm: nn.LayerNorm | None, x: Tensor) -> Tensor:
        """Return the result of the MLP, or of the experts."""
        if self.experts is None:
            return self._mlp(norm, x)
        normed = _normed(norm, x)
        tokens = normed.flatten(0, 1)
        y = self.experts(tokens).unflatten(0, normed.shape[:2])
        return y if self.shared is None else y + self.shared(normed)

    def _mlp(self, norm: nn.LayerNorm | None, x: Tensor) -> Tensor:
        # See Note [Kernels of Megatron].
        up, gate = remat(partial(self._up_and_gate, norm), "dots")(x)
        if gate is None:
            return self.down(self.activation(up))
        return self.down(remat(self._gated)(gate, up))

    def _up_and_gate(self, norm: nn.LayerNorm | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        y = _normed(norm, x)
        up = checkpoint_name(self.up(y), "mlp")
        gate = None if self.gate is None else checkpoint_name(self.gate(y), "mlp")
        return up, gate

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up

    def _dropped(self, x: Tensor) -> Tensor:
        return _dropped(x, self.dropout) if self.dropout and self.training else x


class SharedExpert(nn.Module):
    """The network of a layer of experts that all tokens pass through."""

    def __init__(self, hidden: int, ffn: int, *, has_gate: bool) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.gate_of_token = None
        if has_gate:
            self.gate_of_token = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the results of all tokens."""
        y = self.down(functional.silu(self.gate(x)) * self.up(x))
        if self.gate_of_token is None:
            return y
        return y * torch.sigmoid(self.gate_of_token(x))


def _norm(width: int, sizes: Transformer) -> nn.LayerNorm:
    has_bias = sizes.has_bias("norm")
    return nn.LayerNorm(width, elementwise_affine=sizes.norm_weights, bias=has_bias)


def _normed(norm: nn.LayerNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class Decoder(nn.Module):
    """Token ids to logits."""

    def __init__(self, sizes: Transformer, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.positions = None
        if sizes.positions:
            self.positions = nn.Embedding(sizes.positions, sizes.hidden)
        self.embedding_norm = None
        if sizes.embedding_norm:
            self.embedding_norm = _norm(sizes.hidden, sizes)
        self.layers = nn.ModuleList(DecoderBlock(sizes) for _ in range(layers))
        self.norm = _norm(sizes.hidden, sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=sizes.has_bias("head"))
        if sizes.tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next tokens."""
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        x = _normed(self.embedding_norm, x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
