"""Sharded layers together with everything else: every mode, ZeRO, stages, precision, optimizers, recomputation."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import optim
from tests.sampled import in_pairs
from tests.tensor.small_gpt import (
    IDS,
    Layer,
    LayerOfParts,
    Words,
    assert_learnt,
    by_torch_alone,
    gpt,
    token_ids,
    trained,
)

MODES = {
    "1d": ({"model": 2}, {"tensor": 2}),
    "2d": ({"model_i": 2, "model_j": 2}, {"tensor": 4, "tensor_mode": "2d"}),
    "2.5d": (
        {"model_d": 2, "model_i": 2, "model_j": 2},
        {"tensor": 8, "tensor_mode": "2.5d", "tensor_depth": 2},
    ),
    "3d": ({"model_a": 2, "model_b": 2, "model_c": 2}, {"tensor": 8, "tensor_mode": "3d"}),
}


class Recomputed(nn.Module):
    """A layer whose forward runs again in the backward."""

    def __init__(self, layer, checkpointed):
        super().__init__()
        self.layer, self.checkpointed = layer, checkpointed

    def forward(self, x):
        return self.checkpointed(self.layer, x)


ZERO = (0, 1, 2, 3)
ALONE, STAGES = {"pipe": 1, "data": 2, "model": 2}, {"pipe": 2, "data": 1, "model": 2}


def planned(mesh, *args, **how):
    """Train on a mesh, in its number of stages."""
    return trained(mesh, *args, pipeline=mesh["pipe"], **{"tensor": mesh.get("model", 1), **how})


@pytest.mark.parametrize(("mode", "stages", "zero_stage"), in_pairs(MODES, (1, 2), ZERO))
def test_modes_stages_and_zero_on_8_and_16_devices_equal_one_device(mode, stages, zero_stage):
    axes, how = MODES[mode]
    devices = 8 if how["tensor"] == 2 or (mode, stages) == ("2d", 1) else 16
    mesh = {"pipe": stages, "data": devices // stages // how["tensor"], **axes}
    found = planned(mesh, ids=token_ids(16), zero_stage=zero_stage, **how)
    assert len(found) == devices
    assert_learnt(found, by_torch_alone(rows=16))


def four_heads():
    return gpt(heads=4)


@pytest.mark.parametrize("sequence_mode", ["gather", "ulysses", "ring", "rsa"])
def test_sequences_with_stages_and_zero_equal_one_device(sequence_mode):
    mesh = {"pipe": 2, "data": 2, "seq": 2, "model": 2}
    found = planned(mesh, four_heads, sequence=2, sequence_mode=sequence_mode, zero_stage=3, ids=token_ids(8))
    assert_learnt(found, by_torch_alone(four_heads, rows=8))


def by_torch_checkpoint(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def untied_with_dropout():
    torch.manual_seed(0)
    return nn.Sequential(
        Words(),
        Layer(dropout=0.2),
        nn.Dropout(0.2),
        Recomputed(Layer(dropout=0.2), by_torch_checkpoint),
        nn.Linear(8, 12),
    )


@cache
def in_bits(data, stages, zero_stage):
    """Return what was learnt in reproducible mode, from 8 slices."""
    mesh, microbatches = {"pipe": stages, "data": data, "model": 2}, 8 // data if stages > 1 else 1
    how = {"microbatches": microbatches, "reproducible": True, "zero_stage": zero_stage, "sample": IDS[:1]}
    return planned(mesh, untied_with_dropout, ids=token_ids(8), clip=0.5, **how)


@pytest.mark.parametrize(("data", "stages"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_reproducible_mode_has_equal_bits_for_one_size_of_model(data, stages):
    """With dropout, clipping and recomputation."""
    expected = in_bits(1, 1, 0)[0]
    for zero_stage in (0, 1, 3):
        for found in in_bits(data, stages, zero_stage):
            assert [key for key, x in expected.items() if not torch.equal(x, found[key])] == []


# Stages that a plan does not follow.


class Attend(nn.Module):
    def forward(self, qkv):
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in qkv.chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def layers_of_pairs():
    """Return a model whose fused weight, and that of an MLP, are each the last one of a stage."""
    torch.manual_seed(0)
    heads = nn.LayerNorm(8), nn.Linear(8, 24), Attend(), nn.Linear(8, 8)
    return nn.Sequential(
        Words(),
        *heads,
        nn.LayerNorm(8),
        nn.Linear(8, 16),
        nn.GELU(),
        nn.Linear(16, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 11),
    ).double()


def shared_layers():
    """Return a model with one layer, of a fused weight, in two stages."""
    torch.manual_seed(0)
    layer = Layer()
    return nn.Sequential(Words(), layer, nn.GELU(), layer, nn.Linear(8, 11)).double()


@pytest.mark.parametrize(
    ("make", "balance"), [(layers_of_pairs, [3, 8]), (layers_of_pairs, [7, 4]), (shared_layers, [3, 2])]
)
def test_layers_of_a_pair_and_shared_ones_in_two_stages(make, balance):
    assert_learnt(planned(STAGES, make, balance=balance, zero_stage=1), by_torch_alone(make))


class Blocks(nn.Module):
    """The small model with a forward of its own; with `skips` its head needs a value from before the blocks."""

    def __init__(self, skips):
        super().__init__()
        self.skips, (self.first, *layers, self.head) = skips, gpt()
        self.layers = nn.ModuleList(layers)

    def forward(self, ids):
        x = before = self.first(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + before if self.skips else x)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_blocks_of_a_module_equal_one_device(zero_stage):
    """The second stage has the table of words, and runs the code before its blocks without values."""
    make = lambda: Blocks(skips=False)  # noqa: E731
    found = planned(STAGES, make, blocks="layers", zero_stage=zero_stage)
    assert_learnt(found, by_torch_alone(make))


def test_value_from_before_the_blocks_raises():
    with pytest.raises(ValueError, match="must be given a tensor; got Sharded f64.* which skips blocks"):
        planned(STAGES, lambda: Blocks(skips=True), blocks="layers")


# Precision.


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def single():
    return gpt().float()


def brain():
    return gpt().bfloat16()


def error(found, exact):
    return max(float((x.double() - exact[key]).abs().max()) for key, x in found.items())


@cache
def exact_and_serial_error(make, precision):
    exact = by_torch_alone(lambda: make().double(), sgd)
    return exact, error(trained({"data": 1}, make, sgd, precision=precision)[0], exact)


@pytest.mark.parametrize(
    ("mesh", "zero_stage", "make", "precision"),
    [(ALONE, 3, single, "fp16"), (STAGES, 0, single, "bf16"), (ALONE, 0, brain, None), (STAGES, 3, brain, None)],
)
def test_half_precision_errs_as_one_device_does(mesh, make, precision, zero_stage):
    exact, serial = exact_and_serial_error(make, precision)
    for found in planned(mesh, make, sgd, precision=precision, zero_stage=zero_stage):
        assert 1e-5 < error(found, exact) < 2 * serial < 0.02


def overflowing():
    """Return a model whose gradient overflows in float16 in one row of `up`, which the last device has."""
    model = single()
    with torch.no_grad():
        model[1].down.weight[:, -1] *= 300
    return model


def slow_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(("mesh", "zero_stage"), [(ALONE, 3), (STAGES, 2)])
def test_overflow_of_one_shard_skips_the_step_of_all_devices(mesh, zero_stage):
    options = {"precision": "fp16", "state": True, "steps": 8}
    ((wanted, state),) = trained({"data": 1}, overflowing, slow_sgd, **options)
    assert 0 < state["skipped"] < 8
    for found, own in planned(mesh, overflowing, slow_sgd, zero_stage=zero_stage, **options):
        assert (own["skipped"], own["scale"]) == (state["skipped"], state["scale"])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


# Optimizers, and what is trained.


def fused():
    torch.manual_seed(0)
    return nn.Sequential(Words(), Layer(), Layer(), nn.Linear(8, 12)).double()


def parts():
    """Return the same model without fused weights. The gradient of a bias of keys is 0 but for rounding: it is frozen."""
    model = fused()
    model[1], model[2] = LayerOfParts(model[1]).double(), LayerOfParts(model[2]).double()
    model[1].k.bias.requires_grad_(False), model[2].k.bias.requires_grad_(False)
    return model


def muon(model):
    return optim.by_label({True: optim.muon(0.02), False: optim.adam(1e-2)}, lambda path, x: x.ndim == 2)


def lamb(model):
    return optim.lamb(0.02)


@pytest.mark.parametrize(
    ("mesh", "optimizer", "zero_stage"),
    [(ALONE, muon, 1), (STAGES, muon, 3), (STAGES, muon, 0), (ALONE, lamb, 3), (STAGES, lamb, 0)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_optimizers_of_matrices_equal_one_device(mesh, optimizer, zero_stage):
    wanted = trained({"data": 1}, parts, optimizer)[0]
    assert_learnt(planned(mesh, parts, optimizer, zero_stage=zero_stage), wanted)


def test_muon_of_a_square_of_devices_equals_one_device():
    axes, how = MODES["2d"]
    found = planned({"pipe": 1, "data": 1, **axes}, parts, muon, **how)
    assert_learnt(found, trained({"data": 1}, parts, muon)[0])


def test_parts_of_a_fused_weight_are_matrices_of_their_own():
    wanted = trained({"data": 1}, parts, muon)[0]
    for layer in "12":
        for kind in "weight", "bias":
            wanted[f"{layer}.qkv.{kind}"] = torch.cat([wanted.pop(f"{layer}.{part}.{kind}") for part in "qkv"])
    assert_learnt(planned(ALONE, fused, muon, zero_stage=1), wanted)


def frozen():
    model = gpt()
    for part in (model[1].up, model[3].qkv, model[0].places):
        part.requires_grad_(False)
    return model


@pytest.mark.parametrize(("mesh", "zero_stage"), [(ALONE, 3), (STAGES, 0)])
def test_frozen_parameters_stay(mesh, zero_stage):
    found = planned(mesh, frozen, zero_stage=zero_stage, clip=0.1)
    assert_learnt(found, by_torch_alone(frozen, clip=0.1))
    start = dict(frozen().named_parameters())
    assert all(torch.equal(found[0][key], x) for key, x in start.items() if not x.requires_grad)


@pytest.mark.parametrize(("mesh", "zero_stage"), [(ALONE, 3), (STAGES, 0)])
def test_lora_beside_a_plan_equals_one_device(mesh, zero_stage):
    lora = fs.nn.LoraConfig(r=2, target_modules=["qkv", "out", "up"], bias="lora_only")
    (wanted,) = trained({"data": 1}, gpt, lora=lora, steps=5)
    start = dict(gpt().named_parameters())
    assert not torch.equal(wanted["1.qkv.base_layer.bias"], start["1.qkv.bias"])
    assert torch.equal(wanted["1.qkv.base_layer.weight"], start["1.qkv.weight"])
    assert_learnt(planned(mesh, gpt, lora=lora, steps=5, zero_stage=zero_stage), wanted)


# Accumulation, clipping, recomputation.


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_accumulation_and_clipping_in_stages_equal_one_device(zero_stage):
    found = planned(STAGES, accumulate=2, clip=0.1, zero_stage=zero_stage)
    assert_learnt(found, by_torch_alone(clip=0.1))


def recomputed(checkpointed):
    def make():
        model = gpt()
        model[1], model[3] = Recomputed(model[1], checkpointed), Recomputed(model[3], checkpointed)
        return model

    return make


@pytest.mark.parametrize(
    ("mesh", "zero_stage", "checkpointed"),
    [(ALONE, 3, lambda layer, x: fs.remat(layer)(x)), (STAGES, 0, by_torch_checkpoint)],
    ids=["remat", "torch"],
)
def test_recomputed_layers_equal_one_device(mesh, checkpointed, zero_stage):
    wanted = {key.replace("1.", "1.layer.").replace("3.", "3.layer."): x for key, x in by_torch_alone().items()}
    assert_learnt(planned(mesh, recomputed(checkpointed), zero_stage=zero_stage), wanted)


@pytest.mark.parametrize("recompute", ["always", "except_last"])
def test_recomputed_stages_equal_one_device(recompute):
    assert_learnt(planned(STAGES, recompute=recompute, zero_stage=3), by_torch_alone())
