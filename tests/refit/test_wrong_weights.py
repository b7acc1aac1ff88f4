"""Public bugs by which engines got wrong weights, as mutants of loaders: each is found by its name.

The oracle of a mutant is its difference: the error must name the parameter, the element, the weight
that should be there, and the one that is.
"""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard.errors import RefitError
from tests.refit.engine import FusedExperts, Layer, QKVParallel, Rank
from tests.refit.families import FAMILIES, HEAD, HEADS, HIDDEN, INNER

EXPERTS = "model.layers.0.mlp.experts"
W13 = r"block\.experts\.w13_weight"


def _weights(family):
    return FAMILIES[family].model().state_dict()


FULL = Rank(0, 1)


def _trace(family, rank=FULL, mutate=None):
    """Return the trace of an engine's load; `mutate(engine)` may return another loader."""
    engine = FAMILIES[family].engine(rank)
    load = engine.load_weights
    if mutate is not None:
        load = mutate(engine) or load
    return fs.refit.trace(load, _weights(family), engine)


def _swap_halves(engine):
    """After a load, put the halves of w13 into the order of a kernel: up, then gate."""

    def load_for_kernel(weights):
        engine.load_weights(weights)
        w13 = engine.block["experts"].w13_weight
        w13.data.copy_(torch.cat([w13[:, INNER:], w13[:, :INNER]], 1))

    return load_for_kernel


def test_second_load_into_a_kernels_order_is_named():
    """A bug of vllm: a load wrote gate and up into memory whose halves a kernel had swapped."""
    first_load = _trace("qwen3_moe", mutate=_swap_halves)
    second_load = _trace("qwen3_moe")
    with pytest.raises(RefitError) as error:
        second_load.check(first_load)
    assert str(error.value).startswith(
        "refit: a trace must be the expected one; block.experts.w13_weight[0, 0, 0] must be "
        f"{EXPERTS}.gate_up_proj[0, {INNER}, 0]; got {EXPERTS}.gate_up_proj[0, 0, 0]"
    )


def test_load_into_blocks_of_a_kernel_is_named():
    """A bug of verl: a kernel had made the experts' weights 4-dimensional, in blocks of columns."""

    def blocks(x):
        return x.unflatten(2, (2, HIDDEN // 2)).transpose(1, 2).contiguous()

    def in_blocks(engine):
        w13 = engine.block["experts"].w13_weight
        w13.data = blocks(w13.data)

        def load(weights):
            other = FAMILIES["qwen3_moe"].engine(FULL)
            other.load_weights(weights)
            for name, x in other.named_parameters():
                x = blocks(x) if name.endswith("w13_weight") else x
                engine.get_parameter(name).data.copy_(x)

        return load

    def in_rows(engine):
        w13 = engine.block["experts"].w13_weight
        w13.data = blocks(w13.data)

        def load(weights):
            # What is loaded has the right number of elements, in the order of rows.
            w13.data = w13.data.view(w13.shape[0], -1, HIDDEN)
            engine.load_weights(weights)
            w13.data = w13.data.view(w13.shape[0], 2, -1, HIDDEN // 2)

        return load

    expected = _trace("qwen3_moe", mutate=in_blocks)
    with pytest.raises(RefitError, match=W13 + r"\[0, 0, 1, 0\] must be .*\[0, 1, 0\]; got"):
        _trace("qwen3_moe", mutate=in_rows).check(expected)


def test_slices_of_joined_halves_are_named():
    """A bug of maxtext: gate and up were joined, then sliced by rank: rank 0 had gate alone."""

    def slice_joined(engine):
        def load_expert(param, loaded, shard):
            param.data.copy_(engine.block["experts"].rank.slice(loaded, 1))

        engine.block["experts"].w13_weight.weight_loader = load_expert

    ranks = [Rank(0, 2), Rank(1, 2)]
    wrong = [_trace("qwen3_moe", rank, slice_joined) for rank in ranks]
    fs.refit.check_ranks(wrong)  # each element does reach a rank
    row = rf"\[0, {INNER // 2}, 0\]"
    with pytest.raises(
        RefitError, match=W13 + row + r" must be .*\[0, 32, 0\]; got .*\[0, 16, 0\]"
    ):
        wrong[0].check(_trace("qwen3_moe", ranks[0]))


def test_weights_that_a_copy_skips_are_named():
    """The same run of maxtext: a copy by attributes dropped the bare parameter of the experts."""

    def skip_bare_parameters(engine):
        def load(weights):
            engine.load_weights([(name, x) for name, x in weights if name.endswith(".weight")])

        return load

    with pytest.raises(RefitError) as error:
        _trace("qwen3_moe", mutate=skip_bare_parameters)
    assert f"{EXPERTS}.down_proj[0, 0, 0] must reach the target" in str(error.value)
    assert "block.experts.w2_weight[0, 0, 0] must be written" in str(error.value)


def test_writes_to_copies_of_fused_weights_are_named():
    """A bug of torchtitan: `state_dict` returned copies of a fused weight, and these were filled."""
    engine = FAMILIES["llama"].engine(FULL)

    def load(weights):
        params = dict(engine.named_parameters())
        q, k, v = params.pop("block.qkv.weight").split([HEADS * HEAD, 2 * HEAD, 2 * HEAD])
        copies = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
        for name, x in weights:
            target, shard = engine.target_of(name)
            if target == "block.qkv.weight":
                copies[shard].copy_(x)
            else:
                params[target].weight_loader(params[target], x, shard)

    with pytest.raises(RefitError) as error:
        fs.refit.trace(load, _weights("llama"), engine)
    assert "q_proj.weight[0, 0] must reach the target" in str(error.value)
    assert "block.qkv.weight[0, 0] must be written" in str(error.value)


def test_rounding_to_a_narrower_dtype_is_named():
    """A bug of miles: a bridge cast a weight to bfloat16 whose parameter is in float32."""

    def round_router(engine):
        def load_shard(param, loaded, shard):
            param.data.copy_(loaded.bfloat16())

        engine.block["router"].weight.weight_loader = load_shard

    with pytest.raises(RefitError) as error:
        _trace("qwen3_moe", mutate=round_router).check(_trace("qwen3_moe"))
    assert (
        "block.router.weight[0, 0] must be model.layers.0.mlp.gate.weight[0, 0]; got "
        "model.layers.0.mlp.gate.weight[0, 0] as bfloat16 as float32"
    ) in str(error.value)


def test_copies_of_key_value_heads_in_another_order_are_named():
    """A bug of tunix: heads were repeated as 0 1 0 1, where ranks need 0 0 1 1."""
    rank = Rank(1, 4)

    def tile(engine):
        layer = engine.block["qkv"]
        load_shard = layer.load_shard

        def load_tiled(param, loaded, shard):
            if shard != "q":
                tiled = loaded.view(2, HEAD, HIDDEN).repeat(2, 1, 1)
                loaded = tiled[rank.rank].repeat(2, 1)  # any head that it takes is this one
            load_shard(param, loaded, shard)

        layer.weight.weight_loader = load_tiled

    first_key = HEADS // rank.size * HEAD
    expected = _trace("llama", rank)
    with pytest.raises(RefitError) as error:
        _trace("llama", rank, tile).check(expected)
    assert f"block.qkv.weight[{first_key}, 0] must be" in str(error.value)
    assert f"k_proj.weight[0, 0]; got model.layers.0.self_attn.k_proj.weight[{HEAD}, 0]" in str(
        error.value
    )


def test_ranks_that_load_the_first_shard_are_named():
    """A plugin of vLLM: the rank was an option whose default is 0."""

    def first_shard(engine):
        engine.block["gate_up"].rank = Rank(0, 2)

    traces = [_trace("llama", Rank(number, 2), first_shard) for number in range(2)]
    row = INNER // 2
    with pytest.raises(RefitError, match=rf"gate_proj\.weight\[{row}, 0\] reaches none"):
        fs.refit.check_ranks(traces)


def test_a_transposed_square_weight_is_named():
    """Its shape is right: of transposes of square weights nothing else is."""
    engine = Layer(FULL, HIDDEN, HIDDEN)
    names = {"w": torch.ones(HIDDEN, HIDDEN)}
    expected = fs.refit.trace(
        lambda weights: engine.weight.data.copy_(dict(weights)["w"]), names, engine
    )
    actual = fs.refit.trace(
        lambda weights: engine.weight.data.copy_(dict(weights)["w"].t()), names, engine
    )
    with pytest.raises(RefitError, match=r"weight\[0, 1\] must be w\[0, 1\]; got w\[1, 0\]"):
        actual.check(expected)
    expected.check(expected)


def test_rows_of_interleaved_heads_are_named():
    """Queries, keys and values of each group beside each other, loaded as all queries first."""
    layer = QKVParallel(FULL, HIDDEN, HEAD, 4, 2)
    names = {"linear_qkv.weight": torch.ones(8 * HEAD, HIDDEN)}

    def load(weights):
        x = dict(weights)["linear_qkv.weight"]
        groups = x.view(2, 4, HEAD, HIDDEN).split([2, 1, 1], 1)
        for shard, group in zip("qkv", groups, strict=True):
            layer.load_shard(layer.weight, group.reshape(-1, HIDDEN), shard)

    def load_in_order(weights):
        layer.load_shard(layer.weight, dict(weights)["linear_qkv.weight"])

    expected = fs.refit.trace(load, names, layer)
    row = 2 * HEAD
    with pytest.raises(RefitError, match=rf"weight\[{row}, 0\] must be linear_qkv.weight\[16, 0\]"):
        fs.refit.trace(load_in_order, names, layer).check(expected)


def test_check_names_other_shapes_dtypes_and_parameters():
    def traced(target):
        def load(weights):
            for name, x in weights:
                target[name].copy_(x.view(target[name].shape))

        names = {name: torch.ones(4) for name in target}
        return fs.refit.trace(load, names, target)

    expected = traced({"a": torch.ones(4), "b": torch.ones(2, 2)})
    other = traced({"a": torch.ones(4, dtype=torch.float16), "c": torch.ones(4)})
    with pytest.raises(RefitError) as error:
        other.check(expected)
    assert "a must be torch.float32 of (4,); got torch.float16 of (4,)" in str(error.value)
    assert "b is missing" in str(error.value)
    assert "c is not expected" in str(error.value)


def test_experts_of_another_number_fail_in_the_loader():
    layer = FusedExperts(FULL, 3, HIDDEN, INNER)

    def load(weights):
        for _, x in weights:
            layer.load_expert(layer.w13_weight, x, "w13")

    with pytest.raises(IndexError):
        fs.refit.trace(load, {"w13": torch.ones(4, 2 * INNER, HIDDEN)}, layer)
