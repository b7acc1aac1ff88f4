"""Small models of transformers, and inputs for them."""

import pytest
import torch

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
OPT = {**SIZES, "ffn_dim": 64, "max_position_embeddings": 32, "word_embed_proj_dim": 32}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": 8}
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", {**DECODER, "eos_token_id": 1}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SIZES, "max_position_embeddings": 32}),
    "BERT": ("BertForMaskedLM", "BertConfig", {**SIZES, "max_position_embeddings": 32}),
    "ALBERT": (
        "AlbertForMaskedLM",
        "AlbertConfig",
        {**SIZES, "embedding_size": 16, "max_position_embeddings": 32},
    ),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, "bos_token_id": 1, "eos_token_id": 1}),
    "OPT": ("OPTForCausalLM", "OPTConfig", OPT),
    "T5": ("T5ForConditionalGeneration", "T5Config", {**T5, "decoder_start_token_id": 0}),
    "ViT": ("ViTForImageClassification", "ViTConfig", {**SIZES, **IMAGE}),
}


def model_of(name, **sizes):
    """Return a model in float64."""
    transformers = pytest.importorskip("transformers")
    model, config, given = MODELS[name]
    torch.manual_seed(0)
    return (
        getattr(transformers, model)(getattr(transformers, config)(**{**given, **sizes}))
        .double()
        .eval()
    )


def inputs_of(name):
    """Return inputs of four samples, and labels."""
    draw = torch.Generator().manual_seed(1)
    if name == "ViT":
        images = torch.randn(4, 3, 16, 16, generator=draw, dtype=torch.float64)
        return {"pixel_values": images}, torch.randint(0, 8, (4,), generator=draw)
    ids = torch.randint(1, 64, (4, 8), generator=draw)
    return (
        {"input_ids": ids, "decoder_input_ids": ids} if name == "T5" else {"input_ids": ids}
    ), ids


def block_weights(model):
    """Return the names of the weights of linear layers in blocks."""
    inside = ("layer", "block", ".h.")
    return [
        name
        for name, x in model.named_parameters()
        if x.ndim == 2 and any(part in name for part in inside)
    ]
