"""Boosted models whose layers and tokens are sharded train as on one device."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fshard as fs
from fshard.errors import OptimizerError
from fshard.testing.processes import run_processes
from tests.tensor.hugging_face import inputs_of, model_of
from tests.tensor.small_gpt import (
    IDS,
    STEPS,
    Layer,
    Words,
    adamw,
    assert_learnt,
    by_torch_alone,
    gpt,
    next_word,
    trained,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own
MODES = {
    "1d": ({"data": 2, "model": 2}, {"tensor": 2}),
    "2d": ({"data": 2, "model_i": 2, "model_j": 2}, {"tensor": 4, "tensor_mode": "2d"}),
    "2.5d": (
        {"data": 1, "model_d": 2, "model_i": 2, "model_j": 2},
        {"tensor": 8, "tensor_mode": "2.5d", "tensor_depth": 2},
    ),
    "3d": ({"data": 1, "model_a": 2, "model_b": 2, "model_c": 2}, {"tensor": 8, "tensor_mode": "3d"}),
    "ring": ({"data": 1, "seq": 2, "model": 2}, {"sequence": 2, "tensor": 2, "sequence_mode": "ring"}),
    "zigzag": ({"data": 2, "seq": 2, "model": 1}, {"sequence": 2, "sequence_mode": "zigzag"}),
    "rsa": ({"data": 1, "seq": 2, "model_i": 2, "model_j": 2}, {"sequence": 2, "tensor": 4, "tensor_mode": "2d", "sequence_mode": "rsa"}),
    "megatron": ({"data": 2, "model": 2}, {"tensor": 2, "sequence_mode": "megatron"}),
}  # fmt: skip


def criterion(output, batch):
    return F.cross_entropy(output.logits.flatten(0, -2), batch["input_ids"].flatten())


@cache
def by_torch(name, clip=None, loss=criterion):
    model, (given, labels) = model_of(name), inputs_of(name)
    optimizer = adamw(model)
    for _ in range(STEPS):
        batch = given if loss is criterion else {**given, "labels": labels}
        loss(model(**batch), batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {key: x.detach() for key, x in model.named_parameters()}


def looped(name, mesh, clip=None, loss=criterion, accumulate=1, optimizer=adamw, **how):
    """Return what each device has learnt in a loop over a loader."""

    def main():
        model, (given, labels) = model_of(name), inputs_of(name)
        whole = given if loss is criterion else {**given, "labels": labels}
        rows = [{key: x[at] for key, x in whole.items()} for at in range(len(labels))]
        booster = fs.Booster(fs.HybridParallelPlugin(sample=given, **how))
        model, opt, _, loader, _ = booster.boost(model, optimizer(model), None, DataLoader(rows, 4 // accumulate))
        for _ in range(STEPS):
            for at, batch in enumerate(loader):
                value = loss(model(**batch), batch) / accumulate
                if at + 1 < accumulate:
                    with booster.no_sync(model, opt):
                        booster.backward(value, opt)
                else:
                    booster.backward(value, opt)
            if clip is not None:
                booster.clip_grad_norm(opt, clip)
            opt.step()
            opt.zero_grad()
        return {key: x.detach() for key, x in model.unwrap().named_parameters()}

    return fs.run(main, mesh=mesh)


@pytest.mark.parametrize(("mode", "zero_stage"), [("1d", 2), ("3d", 3), ("zigzag", 1)])
def test_functional_steps_equal_one_device(mode, zero_stage):
    sizes, how = MODES[mode]
    (given, _), model = inputs_of("GPT-NeoX"), model_of("GPT-NeoX")
    plugin = fs.HybridParallelPlugin(mesh=fs.make_mesh(sizes), sample=given, zero_stage=zero_stage, **how)
    booster = fs.Booster(plugin)
    state = booster.init(model, adamw(model), criterion)
    for _ in range(STEPS):
        state, _ = booster.step(state, given)
    layer = state.params["gpt_neox.layers.0.mlp.dense_h_to_4h.weight"]
    assert layer.spec.dims(2)[0]
    joined = {key: torch.cat(x) if isinstance(x, tuple) else x for key, x in fs.unshard(state.params).items()}
    assert_learnt([joined], by_torch("GPT-NeoX"))


@pytest.mark.parametrize(("mode", "zero_stage"), [("1d", 3), ("2.5d", 1), ("ring", 3), ("megatron", 0)])
def test_loops_equal_one_device(mode, zero_stage):
    sizes, how = MODES[mode]
    assert_learnt(looped("GPT-NeoX", fs.make_mesh(sizes), zero_stage=zero_stage, **how), by_torch("GPT-NeoX"))


@pytest.mark.parametrize(
    "how",
    [{"clip": 0.1}, {"accumulate": 2, "zero_stage": 3}, {"reproducible": True, "slices": 4}],
    ids=str,
)
def test_fused_weights_with_options_of_a_loop(how):
    """Of GPT-2: Conv1D, whose q, k and v are one weight."""
    mesh = fs.make_mesh({"data": 2, "model": 2})
    assert_learnt(looped("GPT-2", mesh, tensor=2, **{"zero_stage": 2, **how}), by_torch("GPT-2", how.get("clip")))


def own_loss(output, _):
    return output.loss


@pytest.mark.parametrize("mode", ["2d", "zigzag"])
def test_the_models_own_loss(mode):
    """It is computed in float32."""
    sizes, how = MODES[mode]
    found = looped("GPT-NeoX", fs.make_mesh(sizes), loss=own_loss, **how)
    assert_learnt(found, by_torch("GPT-NeoX", loss=own_loss), 1e-6)


def on_processes():
    return looped("GPT-NeoX", fs.make_mesh({"data": 2, "model": 2}), tensor=2, zero_stage=3)[0]


def test_loop_on_processes_equals_one_device():
    assert_learnt(run_processes(on_processes, 4, timeout=170), by_torch("GPT-NeoX"))


# Stages, lazy layers, other state.


STAGES = [("zigzag", 2), ("megatron", 3)]  # tests/tensor/test_combinations.py has the other modes


@pytest.mark.parametrize(("mode", "zero_stage"), STAGES)
def test_stages_of_sharded_layers_equal_one_device(mode, zero_stage):
    """The table of words is of two stages."""
    sizes, how = MODES[mode]
    mesh = {"pipe": 2, **sizes, "data": 2 if mode == "1d" else 1}
    assert_learnt(trained(mesh, pipeline=2, zero_stage=zero_stage, **how), by_torch_alone())


BLOCKS = {"GPT-2": "transformer.h", "Llama": "model.layers", "Qwen3": "model.layers"}
AXES = {
    "gather": ({"data": 1, "seq": 2, "model": 1}, {"sequence": 2, "sequence_mode": "gather"}),
    **{mode: ({**sizes, "data": 1}, how) for mode, (sizes, how) in MODES.items()},
}


def in_stages(name, mode, loss, data=1, **how):
    """Return the first loss, and what each device has learnt in two stages of the model's blocks."""
    sizes, layers = AXES[mode]

    def main():
        model, (given, labels) = model_of(name), inputs_of(name)
        batch = {**given, "use_cache": False, **({} if loss is criterion else {"labels": labels})}
        sample = {key: x[:2] if isinstance(x, torch.Tensor) else x for key, x in batch.items()}
        stages = {"pipeline": 2, "microbatches": 2, "blocks": BLOCKS[name], "sample": sample}
        booster = fs.Booster(fs.HybridParallelPlugin(**stages, **layers, **how))
        model, opt, *_ = booster.boost(model, adamw(model))
        losses = []
        for _ in range(STEPS):
            found = booster.execute_pipeline(iter([batch]), model, None if loss is own_loss else loss, opt)
            losses.append(found["loss"])
            opt.step()
            opt.zero_grad()
        return losses[0], {key: x.detach() for key, x in model.unwrap().named_parameters()}

    return fs.run(main, mesh=fs.make_mesh({"pipe": 2, **sizes, "data": data}))


@pytest.mark.parametrize(
    ("name", "mode", "loss", "how"),
    [
        ("GPT-2", "1d", criterion, {"data": 2, "zero_stage": 3}),
        ("GPT-2", "ring", criterion, {"schedule": "zb-h1"}),
        ("GPT-2", "megatron", criterion, {"recompute": "always"}),
        ("Llama", "megatron", own_loss, {"data": 2, "zero_stage": 2}),
        ("Qwen3", "zigzag", own_loss, {"zero_stage": 1}),
        ("Qwen3", "2d", criterion, {}),
    ],
)
def test_blocks_in_stages_equal_one_device(name, mode, loss, how):
    """Norms of Llama and Qwen3, and losses of transformers, are computed in float32."""
    found = in_stages(name, mode, loss, **how)
    tolerance = 1e-8 if (name, loss) == ("GPT-2", criterion) else 2e-5
    assert_learnt([own for _, own in found], by_torch(name, loss=loss), tolerance)
    batch = {**inputs_of(name)[0], "labels": inputs_of(name)[1]}
    assert [float(value) for value, _ in found] == pytest.approx(
        [loss(model_of(name)(**batch), batch).item()] * len(found)
    )


def test_functional_steps_in_stages_equal_one_device():
    mesh, model = fs.make_mesh({"pipe": 2, "data": 1, "model": 2}), gpt()
    booster = fs.Booster(fs.HybridParallelPlugin(mesh=mesh, sample=IDS[:2], pipeline=2, tensor=2, microbatches=2))
    state = booster.init(model, adamw(model), next_word)
    for _ in range(STEPS):
        state, _ = booster.step(state, (IDS, IDS))
    (layer,) = {x.spec for tree in state.params for key, x in tree.items() if key == "1.up.weight"}
    assert "model" in layer.axes
    joined = {
        key: torch.cat(x) if isinstance(x, tuple) else x for tree in fs.unshard(state.params) for key, x in tree.items()
    }
    wanted = by_torch_alone()
    assert_learnt([{key: joined[key] for key in wanted}], wanted)


def lazy_gpt():
    layers = [fs.lazy(lambda kind=kind: kind().double()) for kind in (Words, Layer, Layer)]
    return nn.Sequential(*layers, fs.lazy(nn.Linear, 8, 11, dtype=torch.float64))


@pytest.mark.parametrize("how", [{}, {"pipeline": 2}], ids=["alone", "stages"])
def test_lazy_layers_and_dropout(how):
    mesh = {"pipe": how.get("pipeline", 1), "data": 1, "model": 2}
    assert_learnt(trained(mesh, lazy_gpt, tensor=2, zero_stage=3, **how), trained({"data": 1}, lazy_gpt)[0])
    dropped = trained({**mesh, "pipe": 1}, lambda: gpt(0.5), tensor=2)
    assert_learnt(dropped, trained({"data": 1}, lambda: gpt(0.5))[0])


# Errors.


class Own(torch.optim.SGD):
    """A class of one's own."""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tensor": 6, "tensor_mode": "2d"}, "must be a square .* got 6: the nearest are 4 and 9"),
        ({"tensor": 9, "tensor_mode": "3d"}, "tensor must be a cube .* 8 and 27"),
        ({"tensor": 0, "sequence_mode": "rings"}, "tensor must be an integer .*; sequence_mode must be "),
        ({"tensor": 2, "tensor_depth": 2}, 'tensor_depth=2 has no meaning for tensor_mode="1d"'),
        ({"sequence": 2, "sequence_mode": "megatron"}, "must have tensor > 1, .* got 1, \"1d\" and 2"),
        ({"tensor": 2, "sync_batchnorm": True}, "sync_batchnorm=True must have pipeline=1, tensor=1"),
        ({"tensor": 2, "mesh": fs.make_mesh({"data": 2}, runtime="virtual")}, '"model" of .* must have size 2'),
        ({"data": 3, "mesh": fs.make_mesh({"data": 2}, runtime="virtual")}, "data must be that of .*, 2, got 3"),
    ],
)  # fmt: skip
def test_invalid_sizes_raise(options, text):
    with pytest.raises(ValueError, match=text):
        fs.HybridParallelPlugin(**options)


def test_mistakes_with_a_boosted_model():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    plugin = fs.HybridParallelPlugin(mesh=mesh, tensor=2)
    with pytest.raises(ValueError, match="tensor=2 and sequence=1 must have sample="):
        fs.Booster(plugin).init(gpt(), fs.optim.sgd(0.1), next_word)
    with pytest.raises(OptimizerError, match=r"1.qkv.weight.* are stored in parts"):
        trained({"data": 1, "model": 2}, optimizer=lambda model: Own(model.parameters(), lr=0.1), tensor=2)
