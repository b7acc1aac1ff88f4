"""Families of transformers: tiny models with random weights, and engines that load them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.refit.engine import (
    Engine,
    FusedExperts,
    Layer,
    MergedColumnParallel,
    QKVParallel,
    Rank,
    RowParallel,
    Rule,
    VocabParallel,
)

HIDDEN = 16
INNER = 32
HEADS = 8
HEAD = 4
VOCABULARY = 21
EXPERTS = 4


@dataclass(frozen=True)
class Family:
    """A model of transformers, and the engine of a rank that loads it.

    Args:
        config: the class of the configuration, and its sizes.
        engine: from a rank to its engine.
        unused: names of weights that the engine drops.
    """

    config: tuple[str, dict[str, Any]]
    engine: Callable[[Rank], Engine]
    unused: tuple[str, ...] = ()

    def model(self) -> Any:
        torch.manual_seed(0)
        name, sizes = self.config
        config = getattr(transformers, name)(
            **sizes, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, pad_token_id=0
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for x in model.parameters():
                x.normal_()
        return model


def _sizes(**sizes: Any) -> dict[str, Any]:
    common = {
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 32,
    }
    return common | sizes


# -- Llama and its like: q, k, v and gate, up are fused by the engine --------------------------------------------------

_LLAMA_RULES = [
    Rule(r".*embed_tokens\.weight", "top.embed.weight"),
    Rule(r"lm_head\.weight", "top.head.weight"),
    Rule(r"model\.norm\.weight", "top.norm.weight"),
    Rule(r".*\.([qkv])_proj\.weight", "block.qkv.weight", lambda match: match[1]),
    Rule(r".*\.qkv_proj\.weight", "block.qkv.weight"),
    Rule(r".*\.o_proj\.weight", "block.o.weight"),
    Rule(r".*mlp\.gate_proj\.weight", "block.gate_up.weight", lambda match: 0),
    Rule(r".*mlp\.up_proj\.weight", "block.gate_up.weight", lambda match: 1),
    Rule(r".*\.gate_up_proj\.weight", "block.gate_up.weight"),
    Rule(r".*mlp\.down_proj\.weight", "block.down.weight"),
    Rule(r".*layernorm\.weight", "block.norm.weight"),
    Rule(r".*\.experts\.gate_up_proj", "block.experts.w13_weight", lambda match: "w13"),
    Rule(r".*\.experts\.down_proj", "block.experts.w2_weight", lambda match: "w2"),
    Rule(
        r".*\.experts\.(\d+)\.gate_proj\.weight",
        "block.experts.w13_weight",
        lambda match: ("w1", int(match[1])),
    ),
    Rule(
        r".*\.experts\.(\d+)\.up_proj\.weight",
        "block.experts.w13_weight",
        lambda match: ("w3", int(match[1])),
    ),
    Rule(
        r".*\.experts\.(\d+)\.down_proj\.weight",
        "block.experts.w2_weight",
        lambda match: ("w2", int(match[1])),
    ),
    Rule(r".*mlp\.gate\.weight", "block.router.weight"),
    Rule(r".*\.([qk]_norm)\.weight", r"block.\1.weight"),
]
_LLAMA_RULES.insert(0, Rule(r".*\.post_attention_layernorm\.weight", "block.norm2.weight"))


def _llama_layers(
    rank: Rank, kv_heads: int, head: int = HEAD
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    top = {
        "embed": VocabParallel(rank, VOCABULARY, HIDDEN),
        "norm": Layer(rank, HIDDEN),
        "head": VocabParallel(rank, VOCABULARY, HIDDEN),
    }
    block = {
        "qkv": QKVParallel(rank, HIDDEN, head, HEADS, kv_heads),
        "o": RowParallel(rank, HIDDEN, HEADS * head),
        "gate_up": MergedColumnParallel(rank, [INNER, INNER], HIDDEN),
        "down": RowParallel(rank, HIDDEN, INNER),
        "norm": Layer(rank, HIDDEN),
        "norm2": Layer(rank, HIDDEN),
    }
    return top, block


def llama(rank: Rank) -> Engine:
    return Engine(*_llama_layers(rank, kv_heads=2), _LLAMA_RULES)


def gemma(rank: Rank) -> Engine:
    """Tied: the head is the embedding, and the checkpoint's head is dropped."""
    top, block = _llama_layers(rank, kv_heads=1)
    top["head"].weight = top["embed"].weight
    return Engine(top, block, _LLAMA_RULES, skipped=r"lm_head\.weight")


def qwen3_moe(rank: Rank) -> Engine:
    top, block = _llama_layers(rank, kv_heads=4)
    del block["gate_up"], block["down"]
    block["experts"] = FusedExperts(rank, EXPERTS, HIDDEN, INNER)
    block["router"] = Layer(rank, EXPERTS, HIDDEN)
    block["q_norm"] = Layer(rank, HEAD)
    block["k_norm"] = Layer(rank, HEAD)
    return Engine(top, block, _LLAMA_RULES)


# -- GPT-2: transposed, fused weights with biases; tied ----------------------------------------------------------------

_GPT2_RULES = [
    Rule(r".*\.wte\.weight|lm_head\.weight", "top.embed.weight"),
    Rule(r".*\.wpe\.weight", "top.positions.weight"),
    Rule(r".*\.ln_f\.(\w+)", r"top.norm.\1"),
    Rule(r".*\.ln_(\d)\.(\w+)", r"block.norm\1.\2"),
    Rule(r".*\.c_attn\.(\w+)", r"block.qkv.\1"),
    Rule(r".*attn\.c_proj\.(\w+)", r"block.o.\1"),
    Rule(r".*\.c_fc\.(\w+)", r"block.up.\1"),
    Rule(r".*mlp\.c_proj\.(\w+)", r"block.down.\1"),
]


def _transpose_of_conv(name: str, x: Tensor) -> Tensor:
    is_conv = re.search(r"c_\w+\.weight", name)
    return x.t() if is_conv else x


def gpt2(rank: Rank) -> Engine:
    top = {
        "embed": VocabParallel(rank, VOCABULARY, HIDDEN),
        "positions": Layer(rank, 32, HIDDEN),
        "norm": nn.LayerNorm(HIDDEN),
    }
    block = {
        "norm1": nn.LayerNorm(HIDDEN),
        "norm2": nn.LayerNorm(HIDDEN),
        "qkv": QKVParallel(rank, HIDDEN, 2, HEADS, HEADS, bias=True),
        "o": RowParallel(rank, HIDDEN, HIDDEN, bias=True),
        "up": MergedColumnParallel(rank, [4 * HIDDEN], HIDDEN, bias=True),
        "down": RowParallel(rank, HIDDEN, 4 * HIDDEN, bias=True),
    }
    return Engine(top, block, _GPT2_RULES, _transpose_of_conv)


# -- GPT-NeoX: q, k and v of each head are beside each other -----------------------------------------------------------

_NEOX_RULES = [
    Rule(r".*\.embed_in\.weight", "top.embed.weight"),
    Rule(r"lm_head\.weight", "top.head.weight"),
    Rule(r".*\.final_layer_norm\.(\w+)", r"top.norm.\1"),
    Rule(r".*\.input_layernorm\.(\w+)", r"block.norm1.\1"),
    Rule(r".*\.post_attention_layernorm\.(\w+)", r"block.norm2.\1"),
    Rule(r".*\.query_key_value\.(\w+)", r"block.qkv.\1"),
    Rule(r".*\.dense\.(\w+)", r"block.o.\1"),
    Rule(r".*\.dense_h_to_4h\.(\w+)", r"block.up.\1"),
    Rule(r".*\.dense_4h_to_h\.(\w+)", r"block.down.\1"),
]


def _grouped_by_kind(name: str, x: Tensor) -> Tensor:
    """Reorder (heads, 3, head) rows to (3, heads, head)."""
    if "query_key_value" not in name:
        return x
    shape = x.shape
    x = x.view(HEADS, 3, HIDDEN // HEADS, *shape[1:])
    return x.transpose(0, 1).reshape(shape)


def gpt_neox(rank: Rank) -> Engine:
    top = {
        "embed": VocabParallel(rank, VOCABULARY, HIDDEN),
        "norm": nn.LayerNorm(HIDDEN),
        "head": VocabParallel(rank, VOCABULARY, HIDDEN),
    }
    block = {
        "norm1": nn.LayerNorm(HIDDEN),
        "norm2": nn.LayerNorm(HIDDEN),
        "qkv": QKVParallel(rank, HIDDEN, HIDDEN // HEADS, HEADS, HEADS, bias=True),
        "o": RowParallel(rank, HIDDEN, HIDDEN, bias=True),
        "up": MergedColumnParallel(rank, [INNER], HIDDEN, bias=True),
        "down": RowParallel(rank, HIDDEN, INNER, bias=True),
    }
    return Engine(top, block, _NEOX_RULES, _grouped_by_kind)


FAMILIES = {
    "llama": Family(("LlamaConfig", _sizes(num_key_value_heads=2, head_dim=HEAD)), llama),
    "gemma": Family(("GemmaConfig", _sizes(num_key_value_heads=1, head_dim=HEAD)), gemma),
    "qwen3_moe": Family(
        (
            "Qwen3MoeConfig",
            _sizes(
                num_key_value_heads=4,
                head_dim=HEAD,
                num_experts=EXPERTS,
                moe_intermediate_size=INNER,
            ),
        ),
        qwen3_moe,
    ),
    "phi3": Family(("Phi3Config", _sizes(num_key_value_heads=4)), lambda rank: _phi3(rank)),
    "gpt2": Family(
        ("GPT2Config", {"n_layer": 1, "n_embd": HIDDEN, "n_head": HEADS, "n_positions": 32}), gpt2
    ),
    "gpt_neox": Family(("GPTNeoXConfig", _sizes()), gpt_neox),
}


def _phi3(rank: Rank) -> Engine:
    """Fused weights in the checkpoint too, of which each rank has slices of each matrix."""
    return Engine(*_llama_layers(rank, kv_heads=4, head=HIDDEN // HEADS), _LLAMA_RULES)
