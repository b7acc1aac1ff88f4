"""Small models of transformers with experts."""

import pytest
import torch

transformers = pytest.importorskip("transformers")


COMMON = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}


MODELS = {
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen3 moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **COMMON,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            head_dim=8,
            norm_topk_prob=True,
        )
    ),
    "deepseek v3": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **COMMON,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=12,
            n_shared_experts=1,
            first_k_dense_replace=1,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        )
    ),
    "gpt oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **COMMON,
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=8,
            sliding_window=8,
            layer_types=["full_attention", "sliding_attention"],
        )
    ),
}


def model_of(name):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    model.config._experts_implementation = "eager"  # the default has no float64
    return model


def ids():
    return torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(1))
