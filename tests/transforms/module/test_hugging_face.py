"""Models of transformers are plain modules: they train in pieces as they do whole, and so does one that is built alike."""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own

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
each_model = pytest.mark.parametrize("make", MODELS)
EXACT = 1e-6  # transformers takes the loss in 32 bits


def built(make, drop, checkpointing=False):
    torch.manual_seed(0)
    model = make(drop).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def batch_of(turn):
    return torch.randint(1, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(turn))


def class_of(model, kind):
    return next(type(part) for part in model.modules() if kind == type(part).__name__)


def trained(model, n, stage, unit=None, **options):
    mesh = fs.make_mesh({"data": n})
    apply, params, buffers = fs.functionalize(model)
    laid = fs.shard_params(params, fs.fsdp("data", unit=unit) if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(
        fs.optim.sgd(1.0, momentum=0.9), mesh=mesh, axis="data", stage=stage
    )

    def loss_fn(params, tokens):
        output, _ = apply(params, buffers, input_ids=tokens, labels=tokens, use_cache=False)
        return output.loss, output

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), aux="rows", **options)
    torch.manual_seed(1)
    state, losses = opt.init(laid), []
    for turn in range(STEPS):
        laid, state, metrics = step(laid, state, batch_of(turn))
        losses.append(metrics["loss"].item())
    return losses, fs.unshard(laid)


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
    own, found = trained(built(make, 0.2, checkpointing=True), 4, 3, **how)
    assert own == losses and all(found[name].equal(w) for name, w in params.items())
