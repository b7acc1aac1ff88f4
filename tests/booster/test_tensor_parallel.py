"""Boosted models whose layers and tokens are sharded train as on one device;
tests/tensor/test_combinations.py has more.
"""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fshard as fs
from fshard.errors import OptimizerError
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
    "1d": ({"model": 2}, {"tensor": 2}),
    "2d": ({"model_i": 2, "model_j": 2}, {"tensor": 4, "tensor_mode": "2d"}),
    "ring": ({"seq": 2, "model": 2}, {"sequence": 2, "tensor": 2, "sequence_mode": "ring"}),
    "zigzag": ({"seq": 2, "model": 1}, {"sequence": 2, "sequence_mode": "zigzag"}),
    "megatron": ({"model": 2}, {"tensor": 2, "sequence_mode": "megatron"}),
}
BLOCKS = {"GPT-2": "transformer.h", "Llama": "model.layers", "Qwen3": "model.layers"}


def criterion(output, batch):
    return F.cross_entropy(output.logits.flatten(0, -2), batch["input_ids"].flatten())


def own_loss(output, _):
    return output.loss


def batch_of(name, loss):
    inputs, labels = inputs_of(name)
    return inputs if loss is criterion else {**inputs, "labels": labels}


@cache
def by_torch(name, loss, clip):
    model = model_of(name)
    batch = batch_of(name, loss)
    optimizer = adamw(model)
    for _ in range(STEPS):
        loss(model(**batch), batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {key: x.detach() for key, x in model.named_parameters()}


def looped(name, sizes, plugin_options, loss, clip, accumulate):
    """Return what each device has learnt in a loop over a loader."""

    def main():
        model = model_of(name)
        batch = batch_of(name, loss)
        rows = [{key: x[i] for key, x in batch.items()} for i in range(4)]
        booster = fs.Booster(fs.HybridParallelPlugin(sample=inputs_of(name)[0], **plugin_options))
        model, opt, _, loader, _ = booster.boost(
            model, adamw(model), None, DataLoader(rows, 4 // accumulate)
        )
        for _ in range(STEPS):
            for i, microbatch in enumerate(loader, 1):
                value = loss(model(**microbatch), microbatch) / accumulate
                if i < accumulate:
                    with booster.no_sync(model, opt):
                        booster.backward(value, opt)
                else:
                    booster.backward(value, opt)
            if clip is not None:
                booster.clip_grad_norm(opt, clip)
            opt.step()
            opt.zero_grad()
        return {key: x.detach() for key, x in model.unwrap().named_parameters()}

    return fs.run(main, mesh=fs.make_mesh(sizes))


def in_stages(name, sizes, plugin_options, loss, *_):
    """Return what each device has learnt in two stages of the model's blocks; compare the first
    loss.
    """
    batch = {**batch_of(name, loss), "use_cache": False}
    sample = {key: x[:2] if isinstance(x, torch.Tensor) else x for key, x in batch.items()}
    options = {
        "pipeline": 2,
        "microbatches": 2,
        "blocks": BLOCKS[name],
        "sample": sample,
        **plugin_options,
    }

    def main():
        booster = fs.Booster(fs.HybridParallelPlugin(**options))
        model = model_of(name)
        losses = []
        model, opt, *_ = booster.boost(model, adamw(model))
        for _ in range(STEPS):
            result = booster.execute_pipeline(
                iter([batch]), model, None if loss is own_loss else loss, opt
            )
            losses.append(result["loss"].item())
            opt.step()
            opt.zero_grad()
        assert losses[0] == pytest.approx(loss(model_of(name)(**batch), batch).item())
        return {key: x.detach() for key, x in model.unwrap().named_parameters()}

    return fs.run(main, mesh=fs.make_mesh({"pipe": 2, **sizes}))


def by_functional_steps(name, sizes, plugin_options, loss, *_):
    model = model_of(name)
    batch = batch_of(name, loss)
    booster = fs.Booster(
        fs.HybridParallelPlugin(mesh=fs.make_mesh(sizes), sample=batch, **plugin_options)
    )
    state = booster.init(model, adamw(model), loss)
    for _ in range(STEPS):
        state, _ = booster.step(state, batch)
    return [
        {
            key: torch.cat(x) if isinstance(x, tuple) else x
            for key, x in fs.unshard(state.params).items()
        }
    ]


@pytest.mark.parametrize(
    ("form", "name", "mode", "options"),
    [
        (looped, "GPT-NeoX", "1d", {"data": 2, "zero_stage": 3}),
        (looped, "GPT-NeoX", "ring", {"zero_stage": 3}),
        (looped, "GPT-NeoX", "megatron", {"data": 2, "zero_stage": 0}),
        (looped, "GPT-NeoX", "zigzag", {"data": 2, "loss": own_loss}),
        (by_functional_steps, "GPT-NeoX", "1d", {"data": 2, "zero_stage": 2}),
        (by_functional_steps, "GPT-NeoX", "zigzag", {"data": 2, "zero_stage": 1}),
        # Conv1D, with q, k and v in one weight
        (looped, "GPT-2", "1d", {"data": 2, "zero_stage": 2, "clip": 0.1}),
        (looped, "GPT-2", "1d", {"data": 2, "zero_stage": 3, "accumulate": 2}),
        (looped, "GPT-2", "1d", {"data": 2, "zero_stage": 2, "reproducible": True, "slices": 4}),
        (in_stages, "GPT-2", "1d", {"data": 2, "zero_stage": 3}),
        (in_stages, "GPT-2", "ring", {"schedule": "zb-h1"}),
        (
            in_stages,
            "Llama",
            "megatron",
            {"data": 2, "zero_stage": 2, "loss": own_loss, "recompute": "always"},
        ),
        (in_stages, "Qwen3", "2d", {"loss": own_loss}),
    ],
)
def test_models_of_transformers_train_as_on_one_device(form, name, mode, options):
    """Norms of Llama and Qwen3, and losses of transformers, are computed in float32."""
    plugin_options = {"zero_stage": 0, **options}
    loss = plugin_options.pop("loss", criterion)
    clip = plugin_options.pop("clip", None)
    accumulate, (axes, layers) = plugin_options.pop("accumulate", 1), MODES[mode]
    sizes = {"data": options.get("data", 1), **axes}
    results = form(name, sizes, {**layers, **plugin_options}, loss, clip, accumulate)
    assert len(results) == 1 or len(results) == fs.make_mesh(sizes).size * (
        2 if form is in_stages else 1
    )
    assert_learnt(results, by_torch(name, loss, clip), 1e-8 if loss is criterion else 2e-5)


def test_functional_steps_in_stages_equal_one_device():
    mesh = fs.make_mesh({"pipe": 2, "data": 1, "model": 2})
    model = gpt()
    booster = fs.Booster(
        fs.HybridParallelPlugin(mesh=mesh, sample=IDS[:2], pipeline=2, tensor=2, microbatches=2)
    )
    state = booster.init(model, adamw(model), next_word)
    for _ in range(STEPS):
        state, _ = booster.step(state, (IDS, IDS))
    arrays = {key: x for tree in state.params for key, x in tree.items()}
    assert "model" in arrays["1.up.weight"].spec.axes
    params = {
        key: torch.cat(x) if isinstance(x, tuple) else x for key, x in fs.unshard(arrays).items()
    }
    expected = by_torch_alone()
    assert_learnt([{key: params[key] for key in expected}], expected)


def lazy_gpt():
    layers = [fs.lazy(lambda kind=kind: kind().double()) for kind in (Words, Layer, Layer)]
    return nn.Sequential(*layers, fs.lazy(nn.Linear, 8, 11, dtype=torch.float64))


@pytest.mark.parametrize(
    ("make", "mode", "options"),
    [
        (gpt, "zigzag", {"pipeline": 2, "zero_stage": 2}),
        (gpt, "megatron", {"pipeline": 2, "zero_stage": 3}),
        (lazy_gpt, "1d", {"zero_stage": 3}),
        (lazy_gpt, "1d", {"zero_stage": 3, "pipeline": 2}),
        (lambda: gpt(0.5), "1d", {}),
    ],
    ids=["zigzag", "megatron", "lazy", "lazy stages", "dropout"],
)
def test_small_models_train_as_on_one_device(make, mode, options):
    """In stages with a table of words in two of them; lazy ones; with dropout."""
    axes, layers = MODES[mode]
    mesh = {"pipe": options.get("pipeline", 1), "data": 1, **axes}
    assert_learnt(trained(mesh, make, **layers, **options), trained({"data": 1}, make)[0])


class OwnClass(torch.optim.SGD):
    """A class of the user's own."""


def test_mistakes_with_a_boosted_model_raise():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    with pytest.raises(ValueError, match="tensor=2 and sequence=1 must have sample="):
        fs.Booster(fs.HybridParallelPlugin(mesh=mesh, tensor=2)).init(
            gpt(), fs.optim.sgd(0.1), next_word
        )
    with pytest.raises(OptimizerError, match=r"1.qkv.weight.* are stored in parts"):
        trained(
            {"data": 1, "model": 2},
            optimizer=lambda model: OwnClass(model.parameters(), lr=0.1),
            tensor=2,
        )
