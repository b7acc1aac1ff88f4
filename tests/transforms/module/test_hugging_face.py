"""Models of transformers are plain modules: they train in pieces as they do whole, and so does one
that is built alike.
"""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P
from tests.transforms.module.hugging_face import (
    MODELS,
    STEPS,
    batch_of,
    built,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own


each_model = pytest.mark.parametrize("make", MODELS)
EXACT = 1e-6  # transformers takes the loss in 32 bits


def class_of(model, kind):
    return next(type(part) for part in model.modules() if kind == type(part).__name__)


def trained(model, n, stage, unit=None, **options):
    mesh = fs.make_mesh({"data": n})
    apply, params, buffers = fs.functionalize(model)
    sharded_params = fs.shard_params(
        params, fs.fsdp("data", unit=unit) if stage == 3 else P(), mesh=mesh
    )
    opt = fs.partition_optimizer(
        fs.optim.sgd(1.0, momentum=0.9), mesh=mesh, axis="data", stage=stage
    )

    def loss_fn(params, tokens):
        output, _ = apply(params, buffers, input_ids=tokens, labels=tokens, use_cache=False)
        return output.loss, output

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), aux="rows", **options)
    torch.manual_seed(1)
    state = opt.init(sharded_params)
    losses = []
    for turn in range(STEPS):
        sharded_params, state, metrics = step(sharded_params, state, batch_of(turn))
        losses.append(metrics["loss"].item())
    return losses, fs.unshard(sharded_params)


@pytest.mark.parametrize("way", ["path", "class", "checkpoints"])
@each_model
def test_hugging_face_model_sharded_trains_as_unsharded(make, way):
    model = built(make, 0.0, way == "checkpoints")
    pattern, kind = MODELS[make]
    unit = {
        "path": (pattern, f"{pattern}.*"),
        "class": fs.nn.units_of(model, class_of(model, kind), nn.LayerNorm, nn.Embedding),
    }
    losses, params = trained(model, 4, 3, unit.get(way))
    opt = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
    for turn in range(STEPS):
        loss = model(input_ids=batch_of(turn), labels=batch_of(turn)).loss
        assert loss.item() == pytest.approx(losses[turn], rel=EXACT)
        opt.zero_grad()
        loss.backward()
        opt.step()
    expected = dict(model.named_parameters())
    assert params.keys() == expected.keys()
    for name, w in expected.items():
        torch.testing.assert_close(params[name], w.detach(), rtol=0, atol=EXACT)
    assert abs(losses[1] - losses[0]) > 1e-2


@each_model
def test_hugging_face_dropout_has_equal_bits_on_any_mesh(make):
    how = {"reproducible": True, "slices": 4}
    losses, params = trained(built(make, 0.2), 1, 0, **how)
    without = built(make, 0.0)(input_ids=batch_of(0), labels=batch_of(0)).loss.item()
    assert losses[0] != pytest.approx(without, rel=1e-5)
    own, actual = trained(built(make, 0.2, checkpointing=True), 4, 3, **how)
    assert own == losses and all(actual[name].equal(w) for name, w in params.items())
