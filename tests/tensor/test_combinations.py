"""Sharded layers beside all else: modes, ZeRO, stages, precision, optimizers, recomputation.

The oracle is the same loop on one device.
"""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import optim
from tests.helpers.sampled import thorough
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


ALONE = {"pipe": 1, "data": 2, "model": 2}
STAGES = {"pipe": 2, "data": 1, "model": 2}


def planned(mesh, *args, **how):
    """Train on a mesh, in its number of stages."""
    return trained(mesh, *args, pipeline=mesh["pipe"], **{"tensor": mesh.get("model", 1), **how})


# -- models ----------------------------------------------------------------------------------------


def four_heads():
    return gpt(heads=4)


class Attend(nn.Module):
    def forward(self, qkv):
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in qkv.chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2)


def layers_of_pairs():
    """Return a model whose fused weight, and that of an MLP, are each the last one of a stage."""
    torch.manual_seed(0)
    return nn.Sequential(
        Words(),
        nn.LayerNorm(8),
        nn.Linear(8, 24),
        Attend(),
        nn.Linear(8, 8),
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


class Blocks(nn.Module):
    """The small model with a forward of its own.

    With `skips` its head needs a value from before the blocks.
    """

    def __init__(self, skips):
        super().__init__()
        self.skips = skips
        self.first, *layers, self.head = gpt()
        self.layers = nn.ModuleList(layers)

    def forward(self, ids):
        before = self.first(ids)
        x = before
        for layer in self.layers:
            x = layer(x)
        if self.skips:
            x = x + before
        return self.head(x)


def frozen():
    model = gpt()
    for part in (model[1].up, model[3].qkv, model[0].places):
        part.requires_grad_(False)
    return model


def by_torch_checkpoint(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def recomputed(checkpointed):
    """Return a function that makes the small model with two recomputed layers."""

    def make():
        model = gpt()
        model[1] = Recomputed(model[1], checkpointed)
        model[3] = Recomputed(model[3], checkpointed)
        return model

    return make


# -- one table -------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A mesh, options of the plugin, and of the loop; the model, and the rows of a batch."""

    mesh: dict[str, int]
    how: dict[str, Any]
    make: Any = gpt
    rows: int = 4
    clip: float | None = None


def of_mode(mode, stages, zero_stage):
    axes, how = MODES[mode]
    devices = 8 if how["tensor"] == 2 or (mode, stages) == ("2d", 1) else 16
    mesh = {"pipe": stages, "data": devices // stages // how["tensor"], **axes}
    return Run(mesh, {**how, "zero_stage": zero_stage}, rows=16)


def of_sequence(mode):
    mesh = {"pipe": 2, "data": 2, "seq": 2, "model": 2}
    options = {"sequence": 2, "sequence_mode": mode, "zero_stage": 3}
    return Run(mesh, options, four_heads, rows=8)


BLOCKS = {"make": lambda: Blocks(skips=False)}
FUSED_LAST = {"balance": [3, 8], "zero_stage": 1}
MLP_LAST = {"balance": [7, 4], "zero_stage": 1}
RUNS = {
    # The mode, the number of stages, and ZeRO; tests/booster/test_tensor_parallel.py has other
    # pairs of mode and ZeRO.
    "1d-1-0": of_mode("1d", 1, 0),
    "1d-2-3": of_mode("1d", 2, 3),
    "2d-1-1": of_mode("2d", 1, 1),
    "2d-2-2": of_mode("2d", 2, 2),
    "2.5d-1-3": of_mode("2.5d", 1, 3),
    "2.5d-2-0": of_mode("2.5d", 2, 0),
    "3d-1-2": of_mode("3d", 1, 2),
    "3d-2-1": of_mode("3d", 2, 1),
    "gather": of_sequence("gather"),
    "ulysses": of_sequence("ulysses"),
    "ring": of_sequence("ring"),
    "rsa": of_sequence("rsa"),
    # A fused weight, or that of an MLP, is the last one of a stage; a layer is in two stages.
    "a fused weight ends a stage": Run(STAGES, FUSED_LAST, layers_of_pairs),
    "an MLP's weight ends a stage": Run(STAGES, MLP_LAST, layers_of_pairs),
    "a layer in two stages": Run(STAGES, {"balance": [3, 2], "zero_stage": 1}, shared_layers),
    # The second stage has the table of words, and runs the code before its blocks without values.
    "blocks of a module, ZeRO 1": Run(STAGES, {"blocks": "layers", "zero_stage": 1}, **BLOCKS),
    "blocks of a module, ZeRO 3": Run(STAGES, {"blocks": "layers", "zero_stage": 3}, **BLOCKS),
    "frozen": Run(ALONE, {"zero_stage": 3}, frozen, clip=0.1),
    "frozen, in stages": Run(STAGES, {"zero_stage": 0}, frozen, clip=0.1),
    "accumulated, clipped, ZeRO 0": Run(STAGES, {"accumulate": 2, "zero_stage": 0}, clip=0.1),
    "accumulated, clipped, ZeRO 3": Run(STAGES, {"accumulate": 2, "zero_stage": 3}, clip=0.1),
    "remat": Run(ALONE, {"zero_stage": 3}, recomputed(lambda layer, x: fs.remat(layer)(x))),
    "torch's checkpoint": Run(STAGES, {"zero_stage": 0}, recomputed(by_torch_checkpoint)),
    "recomputed stages": Run(STAGES, {"recompute": "always", "zero_stage": 3}),
    "recomputed stages but the last": Run(STAGES, {"recompute": "except_last", "zero_stage": 3}),
}


SLOW = {"2d-2-2", "2.5d-2-0", "3d-2-1"}
"""On 16 devices; these modes run in one stage, and "1d" in stages, with every commit."""


@pytest.mark.parametrize("name", [thorough(name) if name in SLOW else name for name in RUNS])
def test_sharded_layers_equal_one_device(name):
    run = RUNS[name]
    actual = planned(run.mesh, run.make, ids=token_ids(run.rows), clip=run.clip, **run.how)
    assert len(actual) == torch.Size(run.mesh.values()).numel()
    assert_learnt(actual, by_torch_alone(run.make, rows=run.rows, clip=run.clip))
    for name, x in run.make().named_parameters():
        assert x.requires_grad or name not in actual[0] or torch.equal(actual[0][name], x)


def test_value_from_before_the_blocks_raises():
    with pytest.raises(
        ValueError, match="must be given a tensor; got Sharded f64.* which skips blocks"
    ):
        planned(STAGES, lambda: Blocks(skips=True), blocks="layers")


# -- equal bits ------------------------------------------------------------------------------------


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
    mesh = {"pipe": stages, "data": data, "model": 2}
    microbatches = 8 // data if stages > 1 else 1
    how = {
        "microbatches": microbatches,
        "reproducible": True,
        "zero_stage": zero_stage,
        "sample": IDS[:1],
    }
    return planned(mesh, untied_with_dropout, ids=token_ids(8), clip=0.5, **how)


@pytest.mark.parametrize(
    ("data", "stages", "zero_stage"),
    [(1, 1, 3), (2, 1, 1), (2, 1, 3), (1, 2, 3), (2, 2, 0), (2, 2, 3)],
)
def test_reproducible_mode_has_equal_bits_for_one_size_of_model(data, stages, zero_stage):
    """With dropout, clipping and recomputation."""
    expected, *_ = in_bits(1, 1, 0)

    for learnt in in_bits(data, stages, zero_stage):
        unequal = [key for key, x in expected.items() if not torch.equal(x, learnt[key])]
        assert unequal == []


# -- precision -------------------------------------------------------------------------------------


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def single():
    return gpt().float()


def brain():
    return gpt().bfloat16()


def error(actual, exact):
    """Return the largest difference of any number."""
    errors = []
    for key, x in actual.items():
        errors.append(float((x.double() - exact[key]).abs().max()))
    return max(errors)


def exact_and_serial_error(make, precision):
    """Return the parameters of a run in float64, and the error of one device in a precision."""
    exact = by_torch_alone(lambda: make().double(), sgd)
    serial, *_ = trained({"data": 1}, make, sgd, precision=precision)
    return exact, error(serial, exact)


@pytest.mark.parametrize(
    ("mesh", "zero_stage", "make", "precision"),
    [
        (ALONE, 3, single, "fp16"),
        (STAGES, 0, single, "bf16"),
        (ALONE, 0, brain, None),
        (STAGES, 3, brain, None),
    ],
)
def test_half_precision_errs_as_one_device_does(mesh, make, precision, zero_stage):
    exact, serial = exact_and_serial_error(make, precision)
    for actual in planned(mesh, make, sgd, precision=precision, zero_stage=zero_stage):
        assert 1e-5 < error(actual, exact) < 2 * serial < 0.02


def overflowing():
    """Return a model whose gradient overflows in float16 in one row of `up`, which the last device
    has.
    """
    model = single()
    with torch.no_grad():
        model[1].down.weight[:, -1] *= 300
    return model


def slow_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(("mesh", "zero_stage"), [(ALONE, 3), (STAGES, 2)])
def test_overflow_of_one_shard_skips_the_step_of_all_devices(mesh, zero_stage):
    options = {"precision": "fp16", "state": True, "steps": 8}
    ((expected, state),) = trained({"data": 1}, overflowing, slow_sgd, **options)
    assert 0 < state["skipped"] < 8
    for actual, own in planned(mesh, overflowing, slow_sgd, zero_stage=zero_stage, **options):
        assert (own["skipped"], own["scale"]) == (state["skipped"], state["scale"])
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


# -- optimizers, and what is trained ---------------------------------------------------------------


def fused():
    torch.manual_seed(0)
    return nn.Sequential(Words(), Layer(), Layer(), nn.Linear(8, 12)).double()


def parts():
    """Return the same model without fused weights.

    The gradient of a bias of keys is 0 but for rounding: it is frozen.
    """
    model = fused()
    for index in (1, 2):
        model[index] = LayerOfParts(model[index]).double()
        model[index].k.bias.requires_grad_(False)
    return model


def muon(model):
    opts = {True: optim.muon(0.02), False: optim.adam(1e-2)}
    return optim.by_label(opts, lambda path, x: x.ndim == 2)


def lamb(model):
    return optim.lamb(0.02)


MESH_OF_2D, OPTIONS_OF_2D = MODES["2d"]
MATRICES = {
    "muon, ZeRO 1": (ALONE, muon, {"zero_stage": 1}),
    "muon, in stages": (STAGES, muon, {"zero_stage": 0}),
    "muon, in stages, ZeRO 3": (STAGES, muon, {"zero_stage": 3}),
    "muon, 2d": ({"pipe": 1, "data": 1, **MESH_OF_2D}, muon, OPTIONS_OF_2D),
    "lamb, ZeRO 3": (ALONE, lamb, {"zero_stage": 3}),
    "lamb, in stages": (STAGES, lamb, {"zero_stage": 0}),
}


@pytest.mark.parametrize("name", MATRICES)
def test_optimizers_of_matrices_equal_one_device(name):
    mesh, optimizer, how = MATRICES[name]
    assert_learnt(planned(mesh, parts, optimizer, **how), trained({"data": 1}, parts, optimizer)[0])


def test_parts_of_a_fused_weight_are_matrices_of_their_own():
    expected, *_ = trained({"data": 1}, parts, muon)
    for layer in "12":
        for kind in ("weight", "bias"):
            queries_keys_values = [expected.pop(f"{layer}.{part}.{kind}") for part in "qkv"]
            expected[f"{layer}.qkv.{kind}"] = torch.cat(queries_keys_values)

    assert_learnt(planned(ALONE, fused, muon, zero_stage=1), expected)


@pytest.mark.parametrize(("mesh", "zero_stage"), [(ALONE, 3), (STAGES, 0)])
def test_lora_beside_a_plan_equals_one_device(mesh, zero_stage):
    lora = fs.nn.LoraConfig(r=2, target_modules=["qkv", "out", "up"], bias="lora_only")
    (expected,) = trained({"data": 1}, gpt, lora=lora, steps=5)
    start = dict(gpt().named_parameters())
    assert not torch.equal(expected["1.qkv.base_layer.bias"], start["1.qkv.bias"])
    assert torch.equal(expected["1.qkv.base_layer.weight"], start["1.qkv.weight"])
    assert_learnt(planned(mesh, gpt, lora=lora, steps=5, zero_stage=zero_stage), expected)
