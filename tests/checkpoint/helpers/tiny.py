"""A tiny module and its tensors, for checkpoints of other libraries."""

import torch
import transformers
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw, shortest=0):
    result = {}
    for number in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(shortest, 6), max_size=3))
        x = torch.arange(torch.Size(shape).numel()).reshape(shape) + number
        x = x.to(draw(st.sampled_from(DTYPES)))
        result[f"blocks.{number}.w"] = (
            x.T if x.ndim == 2 and draw(st.booleans()) else x
        )  # strided in torch's formats
    return result


def tiny(name):
    small = {
        "vocab_size": 60,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2,
            n_embd=16,
            n_head=2,
            vocab_size=60,
            n_positions=8,
            bos_token_id=1,
            eos_token_id=1,
        )
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**small, num_key_value_heads=1)
        )
    return transformers.BertForMaskedLM(transformers.BertConfig(**small, max_position_embeddings=8))
