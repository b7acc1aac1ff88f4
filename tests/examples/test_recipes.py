"""The recipes of `examples/recipes` train as the libraries that they take from do.

The oracles are these libraries themselves: the Trainer, Fabric, a model on one device; of vLLM's
layouts an engine that loads as vLLM does.
"""

import pytest
import torch

import fshard as fs
from tests.helpers.examples import losses, printed
from tests.helpers.processes import run_processes
from tests.refit.engine import MergedColumnParallel, QKVParallel, Rank, RowParallel, VocabParallel

pytestmark = pytest.mark.filterwarnings("ignore")  # of the other libraries' own

BY_LIBRARY = {"trainer": "transformers", "fabric": "lightning_fabric"}


@pytest.mark.parametrize("recipe", BY_LIBRARY)
def test_recipe_of_a_loop_has_the_losses_of_its_library(recipe):
    library = BY_LIBRARY[recipe]
    pytest.importorskip(library)
    name = library.removeprefix("lightning_")
    expected = losses(printed(f"recipes/{recipe}.py", "--library", name))

    actual = losses(printed(f"recipes/{recipe}.py"))

    assert [*map(float, actual)] == pytest.approx([*map(float, expected)], abs=2e-4)
    assert len(actual) >= 4


def recipe_of_accelerate():
    return printed("recipes/accelerate_mesh.py")


def test_recipe_of_the_mesh_of_accelerate_has_the_losses_of_one_device():
    pytest.importorskip("accelerate")
    # The program compares its losses with those of one device itself.
    first, second = run_processes(recipe_of_accelerate, 2, timeout=170)
    assert "Mesh(dp_shard=2; process" in first and len(losses(first)) == 5
    assert not second


def test_recipe_of_torchtitan_is_certified():
    pytest.importorskip("torchtitan")
    text = printed("recipes/titan.py", "--stages", "3")
    assert "layers[1].feed_forward.w3.weight" in text and "DIVERGENT" not in text


def engine_layers(config, rank):
    """Return layers of an engine that load the weights of a Llama as those of vLLM."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads
    head = hidden // heads
    return {
        "qkv_proj": QKVParallel(rank, hidden, head, heads, config.num_key_value_heads),
        "o_proj": RowParallel(rank, hidden, hidden),
        "gate_up_proj": MergedColumnParallel(rank, [inner, inner], hidden),
        "down_proj": RowParallel(rank, hidden, inner),
        "embed_tokens": VocabParallel(rank, config.vocab_size, hidden, multiple=64),
    }


SHARDS = {
    "model.layers.1.self_attn.qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
    "model.layers.1.self_attn.o_proj": {"o_proj": None},
    "model.layers.1.mlp.gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    "model.layers.1.mlp.down_proj": {"down_proj": None},
    "model.embed_tokens": {"embed_tokens": None},
}
"""By the name of a layer of vLLM: the layers of transformers that are loaded into it, as which shard."""


def recipe_of_vllm(folder, ranks):
    return printed("recipes/vllm_names.py", "--folder", str(folder), "--ranks", str(ranks))


@pytest.mark.parametrize(("ranks", "processes"), [(1, 1), (2, 2), (4, 1)])
def test_recipe_of_vllm_writes_what_its_loader_would_load(ranks, processes, tmp_path):
    transformers = pytest.importorskip("transformers")
    if processes == 1:
        recipe_of_vllm(tmp_path, ranks)
    else:
        run_processes(recipe_of_vllm, processes, tmp_path, ranks, timeout=170)

    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    full = model.state_dict()
    for number in range(ranks):
        file = tmp_path / "sharded" / f"model-rank-{number}-part-0.safetensors"
        written = fs.restore(file)
        layers = engine_layers(model.config, Rank(number, ranks))
        for name, shards in SHARDS.items():
            parent, _, kind = name.rpartition(".")
            weight = layers[kind].weight
            for source, shard in shards.items():
                weight.weight_loader(weight, full[f"{parent}.{source}.weight"], shard)
            assert torch.equal(written[f"{name}.weight"], weight)
        assert written["model.norm.weight"].equal(full["model.norm.weight"])
