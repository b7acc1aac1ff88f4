"""Sizes read from a `config.json` have the parameters of transformers' own model, whose modules on
the meta device are the oracle.
"""

import inspect
import re
from dataclasses import replace
from functools import cache
from importlib import import_module

import pytest
import torch

from fshard import optim
from fshard.errors import PlanError
from fshard.plan import Transformer, cluster, model_of_config, search
from fshard.plan.hugging_face.families import FAMILIES

transformers = pytest.importorskip("transformers")
DECODERS = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 70,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
ATTENTION = {"attention_bias": True}
HEAD = {"head_dim": 12}
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

OPTIONS = [
    ("bloom", {}),
    ("bloom", UNTIED),
    ("cohere", ATTENTION),
    ("falcon", {}),
    ("falcon", {"bias": True, "multi_query": False, **UNTIED}),
    ("falcon", {"parallel_attn": False, "alibi": True, "ffn_hidden_size": 56}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1}),
    ("gemma", HEAD),
    ("gemma", {}),
    ("gemma2", {**HEAD, **UNTIED}),
    ("gemma3_text", HEAD),
    ("gpt2", {}),
    ("gpt2", {"n_inner": 56, **UNTIED}),
    ("gpt_bigcode", {}),
    ("gpt_bigcode", {"multi_query": False}),
    ("gpt_neox", {}),
    ("gpt_neox", {"attention_bias": False, "use_parallel_residual": False, **TIED}),
    ("gptj", {"rotary_dim": 4}),
    ("granite", ATTENTION),
    ("llama", {}),
    ("llama", {**ATTENTION, "mlp_bias": True, **TIED}),
    ("llama", HEAD),
    ("mistral", HEAD),
    ("mixtral", LOCAL_EXPERTS),
    ("mixtral", {**LOCAL_EXPERTS, **HEAD, **TIED}),
    ("mpt", {"d_model": 48, "n_heads": 6, "n_layers": 2}),
    ("olmo", ATTENTION),
    ("olmo2", {}),
    ("olmo3", ATTENTION),
    ("olmoe", EXPERTS),
    ("opt", {"word_embed_proj_dim": 48, "ffn_dim": 80}),
    ("opt", {"word_embed_proj_dim": 48, "ffn_dim": 56, "enable_bias": False, **UNTIED}),
    ("phi", {}),
    ("phi3", {}),
    ("qwen2", TIED),
    ("qwen2", {}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40, "qkv_bias": False}),
    ("qwen3", {**ATTENTION, **HEAD}),
    ("qwen3", {}),
    ("qwen3_moe", {**EXPERTS, **HEAD}),
    ("smollm3", UNTIED),
    ("stablelm", {"use_qkv_bias": True}),
    ("stablelm", {"use_parallel_residual": True}),
    ("starcoder2", {}),
    ("starcoder2", {"use_bias": False, **UNTIED}),
]

SMALL = Transformer(layers=1, hidden=16, ffn=8, heads=4, kv_heads=4, vocab=8, sequence=4)


@pytest.fixture
def without_programs(monkeypatch):
    """Rank by the formulas alone, which is faster."""
    monkeypatch.setattr(import_module("fshard.plan.search"), "PROGRAMS", 0)


def config_of(name, options):
    sizes = {"n_inner": None} if name in ("gpt2", "gpt_bigcode") else {}
    return transformers.AutoConfig.for_model(name, **SIZES | sizes | options)


def count_parameters(config):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(x.numel() for x in model.parameters())


def test_each_family_is_compared_with_transformers():
    assert {name for name, _ in OPTIONS} == set(FAMILIES)


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_from_config_has_the_parameters_of_transformers(name, options):
    """In full, and as `save_pretrained` writes it, without what all models have."""
    config = config_of(name, options)
    expected = count_parameters(config)

    in_full = Transformer.from_config(config.to_dict())
    as_saved = Transformer.from_config({**config.to_diff_dict(), "model_type": name}, sequence=32)

    assert in_full.parameters == as_saved.parameters == expected
    assert in_full.parameters == sum(x.numel() for x in in_full.build().parameters())


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_from_config_without_sizes_has_the_parameters_of_the_published_model(name):
    """The defaults of transformers are those of a published model."""
    config = transformers.AutoConfig.for_model(name)
    read = Transformer.from_config(config.to_dict(), sequence=64)
    assert read.parameters == count_parameters(config)


@pytest.mark.usefixtures("without_programs")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma3_text", HEAD),
        ("gpt_neox", {}),
        ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
        ("falcon", {"multi_query": False}),
        ("gpt2", {}),
        ("olmo2", {}),
    ],
)
def test_search_plans_families_whose_layers_are_shared(name, options):
    """Each place of the norms, with experts, and with learned positions."""
    sizes = Transformer.from_config(config_of(name, options).to_dict())
    machine = cluster("h100", node=8)
    options = {"devices": 2, "global_batch": 4, "optimizer": optim.sgd(0.1), "rows": 2}
    plans = search(sizes, cluster=machine, tensor=(1, 2), pipeline=1, recompute="never", **options)
    assert {x.plan.tensor for x in plans} == {1, 2}


OTHER_LAYERS = [
    ("deepseek_v3", {"first_k_dense_replace": 0, "n_routed_experts": 8, "moe_intermediate_size": 24,
                     "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
                     "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
                     "v_head_dim": 8, "num_attention_heads": 8, "num_key_value_heads": 8}),
    ("glm4", {"head_dim": 8}),
    ("stablelm", {"qk_layernorm": True}),
    ("opt", {"word_embed_proj_dim": 24, "ffn_dim": 80}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), OTHER_LAYERS)
def test_model_of_config_with_other_layers_is_the_module_of_transformers(name, options):
    config = config_of(name, options)

    model, batch = model_of_config({**config.to_dict(), "model_type": name})

    assert sum(x.numel() for x in model.parameters()) == count_parameters(config)
    machine = cluster("h100", node=8)
    options = {"devices": 2, "global_batch": 4, "optimizer": optim.sgd(0.1), "rows": 2}
    options |= {"pipeline": 1, "recompute": "never", "zero_stage": 3, "sequence": 1}
    plans = search(model, batch, cluster=machine, **options)
    assert plans[0].layers == 3
    if name in ("deepseek_v3", "glm4"):  # the others have no program for shared layers
        assert {x.plan.tensor for x in plans} == {1, 2}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("nothing", {}, "or another one of transformers; got 'nothing'"),
        ("mamba", {}, "must be of layers of attention; got 'mamba'"),
        (
            "deepseek_v3",
            {"first_k_dense_replace": 3},
            "equal layers; got first_k_dense_replace=3. Write 0",
        ),
        (
            "glm4",
            {"hidden_size": "wide"},
            "must be one that transformers builds a language model of",
        ),
        ("t5", {}, "must be one that transformers builds a language model of"),
    ],
)
def test_model_of_config_raises_one_line(name, change, message):
    with pytest.raises(PlanError, match=message) as info:
        model_of_config({**SIZES, "model_type": name, **change})
    assert "\n" not in str(info.value)


def test_from_config_reads_the_language_model_of_several_inputs():
    text = config_of("gemma3_text", HEAD).to_dict()
    outer = {"model_type": "gemma3", "vision_config": {"hidden_size": 8}, "text_config": text}
    assert Transformer.from_config(outer) == Transformer.from_config(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "mamba"},
            "model_type must be one of .*; got 'mamba'. Take fs.plan.model_of",
        ),
        ({"model_type": 3}, "model_type must be a name; got 3"),
        ({"num_attention_heads": 5}, "heads must divide the hidden size, 48; got 5"),
        ({"num_key_value_heads": 4}, "must divide the 6 heads; got 4"),
        ({"hidden_act": "tanh"}, "hidden_act must be a kind of SiLU, GELU or ReLU; got 'tanh'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false; got 'no'"),
        (
            {"hidden_size": "48", "vocab_size": -1, "num_hidden_layers": None},
            r"hidden_size must be an integer >= 1; got '48'; .*num_hidden_layers or n_layer or "
            r"n_layers is missing; .*vocab_size must be",
        ),
    ],
)
def test_from_config_raises_with_all_that_is_wrong(change, message):
    with pytest.raises(PlanError) as info:
        Transformer.from_config({"model_type": "llama", **SIZES, **change})
    text = str(info.value)
    parts = message.split("; .*")
    assert all(re.search(part, text) for part in parts), text


@pytest.mark.parametrize(
    ("name", "misspelled", "key"),
    [
        ("llama", "num_key_value_head", "num_key_value_heads"),
        ("gpt2", "n_iner", "n_inner"),
        ("falcon", "num_ln_in_paralel_attn", "num_ln_in_parallel_attn"),
        ("glm4", "num_key_value_head", "num_key_value_heads"),
    ],
)
def test_misspelled_key_with_a_default_is_refused(name, misspelled, key):
    """glm4 is none of the families: its keys are those of transformers."""
    sizes = {other: value for other, value in SIZES.items() if other != key}
    fix = f"{misspelled} is no key that is read. Rename it to {key}, or remove it"
    with pytest.raises(PlanError, match=fix):
        model_of_config({**sizes, "model_type": name, misspelled: 1})


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_keys_of_real_files_are_not_refused_as_misspelled(name):
    """Those of all other decoders of transformers, in a file that has the least keys of its own."""
    required = config_of(name, {}).to_diff_dict()
    others = _keys_of_decoders() - _keys_of(name)
    Transformer.from_config({**dict.fromkeys(others), **required, "model_type": name}, sequence=8)


def _keys_of(name):
    return set(inspect.signature(transformers.CONFIG_MAPPING[name]).parameters)


@cache
def _keys_of_decoders():
    return set().union(*map(_keys_of, DECODERS))


def test_from_config_without_a_type_has_the_keys_of_a_llama():
    assert Transformer.from_config(SIZES) == Transformer.from_config(
        {**SIZES, "model_type": "llama"}
    )
    with pytest.raises(PlanError, match="attention must be that of a Llama: kv_lora_rank is 8"):
        model_of_config({**SIZES, "kv_lora_rank": 8})


@pytest.mark.parametrize("attention", ["formula", "recomputed"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_unfused_attention_of_grouped_heads_is_that_of_repeated_ones(attention, kv_heads):
    sizes = replace(SMALL, kv_heads=kv_heads, attention=attention, dtype=torch.float64)
    grouped = sizes.build()
    repeated = replace(sizes, kv_heads=4).build()
    torch.manual_seed(0)
    values = {name: torch.randn(x.shape) * 0.3 for name, x in grouped.state_dict().items()}
    grouped.load_state_dict(values, assign=True)
    for name in ("layers.0.k.weight", "layers.0.v.weight"):
        by_head = values[name].unflatten(0, (kv_heads, -1))
        values[name] = by_head.repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
    repeated.load_state_dict(values, assign=True)

    ids = torch.randint(0, 8, (2, 4))

    torch.testing.assert_close(grouped(ids), repeated(ids))


@pytest.mark.usefixtures("without_programs")
def test_search_plans_unfused_attention_of_grouped_heads():
    model = replace(SMALL, kv_heads=2, attention="recomputed")
    machine = cluster("h100", node=8)
    options = {"devices": 2, "global_batch": 4, "optimizer": optim.sgd(0.1), "tensor": (1, 2)}
    plans = search(model, cluster=machine, **options)
    assert {x.plan.tensor for x in plans} == {1, 2}
