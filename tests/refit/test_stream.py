"""A stream yields each parameter once, in full; the oracles are plain tensors and transformers."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

import fshard as fs
from fshard import P
from fshard.errors import RefitError
from tests.refit.engine import Rank
from tests.refit.families import FAMILIES


def _mesh():
    return fs.make_mesh({"data": 2, "model": 2})


def _sharded(model):
    params = fs.functionalize(model)[1]
    return fs.shard_params(params, fs.fsdp(("data", "model")), mesh=_mesh())


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_stream_of_sharded_parameters_is_the_state_dict(family):
    model = FAMILIES[family].model()
    actual = dict(fs.refit.stream(_sharded(model), model=model))
    expected = revert_weight_conversion(model, model.state_dict())
    tied = {"lm_head.weight"} if family == "gpt2" else set()
    assert {*actual} == {*expected} - tied
    for name, x in actual.items():
        assert torch.equal(x, expected[name])


def test_stream_of_a_tree_has_its_paths_in_its_order():
    w = torch.arange(6.0).view(2, 3)
    layout = fs.Layout(_mesh(), P("data"))
    tree = {"z": [fs.device_put(w, layout), {"w": w + 1}], "a": w.T}
    actual = [*fs.refit.stream(tree)]
    assert [name for name, _ in actual] == ["z.0", "z.1.w", "a"]
    for (_, x), expected in zip(actual, [w, w + 1, w.T], strict=True):
        assert torch.equal(x, expected)


@pytest.mark.parametrize("names", ["hf", "params"])
def test_stream_of_tied_parameters_has_them_once_in_files(names):
    model = FAMILIES["gemma"].model()
    streamed = [name for name, _ in fs.refit.stream(model, names)]
    assert ("lm_head.weight" in streamed) == (names == "params")


def test_stream_of_experts_has_the_names_of_files():
    model = FAMILIES["qwen3_moe"].model()
    expected = revert_weight_conversion(model, model.state_dict())
    actual = dict(fs.refit.stream(_sharded(model), model=model))
    assert {*actual} == {*expected}
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in actual
    for name, x in actual.items():
        assert torch.equal(x, expected[name])


def test_stream_into_an_engine_is_its_trace():
    model = FAMILIES["qwen3_moe"].model()
    engine = FAMILIES["qwen3_moe"].engine(Rank(1, 2))
    engine.load_weights(fs.refit.stream(_sharded(model), model=model))
    other = FAMILIES["qwen3_moe"].engine(Rank(1, 2))
    traced = fs.refit.trace(other.load_weights, model.state_dict(), other)
    traced.copy(model.state_dict(), other)
    for name, x in engine.state_dict().items():
        assert torch.equal(x, other.state_dict()[name])


def test_stream_merges_the_differences_of_lora():
    base = FAMILIES["llama"].model()
    model = fs.nn.lora(base, fs.nn.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for x in model.parameters():
        nn.init.normal_(x)
    actual = dict(fs.refit.stream(_sharded(model), model=model))
    expected = fs.nn.merge_lora(model).state_dict()
    assert {*actual} == {*expected}
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name])


def test_stream_of_a_boosted_model_has_the_names_of_its_module():
    expected = FAMILIES["llama"].model().state_dict()
    mesh = fs.make_mesh({"data": 2})

    def main():
        model = FAMILIES["llama"].model()
        booster = fs.Booster(plugin=fs.FSDPPlugin(mesh=mesh))
        boosted, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        actual = dict(fs.refit.stream(boosted))
        return [*actual] == [*expected], [
            torch.equal(actual[name], expected[name]) for name in actual
        ]

    assert fs.run(main, mesh=mesh) == [(True, [True] * len(expected))] * 2


def test_stream_by_a_function_joins_the_leaves_of_one_result():
    calls = []

    def join(tensors):
        calls.append([*tensors])
        results = {}
        qkv = [x for name, x in tensors.items() if name in "qkv"]
        if qkv:
            results["qkv"] = torch.cat(qkv)
        if "o" in tensors:
            results["out"] = tensors["o"].t()
        return results

    params = {name: torch.randn(2, 3) for name in "qokv"}
    actual = dict(fs.refit.stream(params, join))
    assert [*actual] == ["qkv", "out"]
    assert torch.equal(actual["qkv"], torch.cat([params[name] for name in "qkv"]))
    assert calls[4:] == [["q", "k", "v"], ["o"]]


def test_stream_frees_each_tensor_when_the_caller_drops_it():
    params = fs.shard_params(
        {f"w{index}": torch.ones(8, 8) for index in range(4)}, fs.fsdp("data"), mesh=_mesh()
    )
    freed = []
    earlier = None
    for _, x in fs.refit.stream(params):
        freed.append(earlier is None or earlier() is None)
        earlier = weakref.ref(x)
        del x
    assert freed == [True] * 4


@pytest.mark.parametrize(
    ("params", "names", "text"),
    [
        ({"w": 3}, "hf", "w must be an array; got a int"),
        ({"w": torch.ones(2)}, "vllm", "names must be 'hf', 'params' or a function; got 'vllm'"),
        ({"w": torch.ones(2)}, lambda tensors: {}, "a tensor for each leaf; got none for w"),
    ],
)
def test_stream_of_wrong_arguments_raises(params, names, text):
    with pytest.raises(RefitError, match=text):
        [*fs.refit.stream(params, names)]
