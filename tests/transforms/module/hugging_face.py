"""Small models of transformers, by the function that makes each."""

import pytest
import torch

WORDS, LENGTH, WIDTH, STEPS = 32, 8, 16, 2


def gpt2(drop):
    made = pytest.importorskip("transformers")
    config = made.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop,
    )  # fmt: skip
    return made.GPT2LMHeadModel(config)


def llama(drop):
    made = pytest.importorskip("transformers")
    config = made.LlamaConfig(
        vocab_size=WORDS, max_position_embeddings=LENGTH, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, attention_dropout=drop, tie_word_embeddings=True,
    )  # fmt: skip
    return made.LlamaForCausalLM(config)


def bert(drop):
    made = pytest.importorskip("transformers")
    config = made.BertConfig(
        vocab_size=WORDS, max_position_embeddings=LENGTH, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=2, hidden_dropout_prob=drop, attention_probs_dropout_prob=drop, pad_token_id=0,
    )  # fmt: skip
    return made.BertForMaskedLM(config)


MODELS = {
    gpt2: ("transformer.h[*]", "GPT2Block"),
    llama: ("model.layers[*]", "LlamaDecoderLayer"),
    bert: ("bert.encoder.layer[*]", "BertLayer"),
}


def built(make, drop, checkpointing=False):
    torch.manual_seed(0)
    model = make(drop).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def batch_of(turn):
    return torch.randint(1, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(turn))
