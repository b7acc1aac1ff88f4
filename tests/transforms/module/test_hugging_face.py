"""Models of transformers are plain modules: they train in pieces as they do whole, and so does one that is built alike."""

from collections import OrderedDict
from dataclasses import dataclass, fields
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own

WORDS, LENGTH, WIDTH, STEPS = 32, 8, 16, 2


@dataclass
class Output(OrderedDict):
    """A dict with attributes; None is not in it."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self):
        self.update({one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) is not None})


torch.utils._pytree.register_pytree_node(
    Output, lambda x: (list(x.values()), list(x)), lambda xs, names: Output(**dict(zip(names, xs, strict=True)))
)


class Block(nn.Module):
    """Has its own way with dropout: by a module that is called twice, and by a function."""

    def __init__(self, drop):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout, self.drop = nn.Dropout(drop), drop

    def forward(self, x, *, mask):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.dropout((q @ k.mT).masked_fill(~mask, -1e9).softmax(-1), self.drop, self.training) @ v
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


class Alike(nn.Module):
    """A tied head, checkpoints of its own, an output with attributes, a second pass over what constructors have drawn."""

    def __init__(self, drop):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block(drop) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool(), persistent=False)
        self.checkpointing = False
        self.apply(self._init_weights)
        self.head.weight = self.words.weight

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.1)

    def gradient_checkpointing_enable(self):
        self.checkpointing = True

    def forward(self, input_ids, labels=None, use_cache=None):
        x = self.words(input_ids) + self.places(torch.arange(LENGTH))
        for layer in self.layers:
            run = partial(layer, mask=self.mask)
            x = checkpoint(run, x, use_reentrant=False) if self.checkpointing else run(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits)


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
    Alike: ("layers[*]", Block),
    gpt2: ("transformer.h[*]", "GPT2Block"),
    llama: ("model.layers[*]", "LlamaDecoderLayer"),
    bert: ("bert.encoder.layer[*]", "BertLayer"),
}
each_model = pytest.mark.parametrize("make", MODELS)
WAYS = ["blocks", "class", "checkpoints"]


def built(make, drop, checkpointing=False):
    torch.manual_seed(0)
    model = make(drop).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def batch_of(turn):
    return torch.randint(1, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(turn))


def class_of(model, kind):
    return next(type(part) for part in model.modules() if kind in (type(part), type(part).__name__))


def trained(model, n, stage, unit=None, **options):
    mesh = fs.make_mesh({"data": n})
    apply, params, buffers = fs.functionalize(model)
    laid = fs.shard_params(params, fs.fsdp("data", unit=unit) if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.sgd(1.0, momentum=0.9), mesh=mesh, axis="data", stage=stage)

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


@pytest.mark.parametrize(("make", "way"), [(make, way) for make in MODELS for way in WAYS] + [(Alike, "path")])
def test_hugging_face_model_sharded_trains_as_unsharded(make, way):
    model = built(make, 0.0, way == "checkpoints")
    pattern, kind = MODELS[make]
    exact = 1e-12 if make is Alike else 1e-6  # transformers takes the loss in 32 bits
    unit = {
        "path": (pattern, f"{pattern}.*"),
        "class": fs.nn.units_of(model, class_of(model, kind), nn.LayerNorm, nn.Embedding),
    }
    losses, params = trained(model, 4, 3, unit.get(way))
    opt = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
    for turn in range(STEPS):
        loss = model(input_ids=batch_of(turn), labels=batch_of(turn)).loss
        assert loss.item() == pytest.approx(losses[turn], rel=exact)
        opt.zero_grad()
        loss.backward()
        opt.step()
    expected = dict(model.named_parameters())
    assert params.keys() == expected.keys()
    for name, w in expected.items():
        torch.testing.assert_close(params[name], w.detach(), rtol=0, atol=exact)
    assert abs(losses[1] - losses[0]) > 1e-2


@each_model
def test_hugging_face_dropout_has_equal_bits_on_any_mesh(make):
    how = {"reproducible": True, "slices": 4}
    losses, params = trained(built(make, 0.2), 1, 0, **how)
    without = built(make, 0.0)(input_ids=batch_of(0), labels=batch_of(0)).loss.item()
    assert losses[0] != pytest.approx(without, rel=1e-5)
    meshes = [(4, 3, True), (2, 3, False), (4, 1, False)]
    for n, stage, checkpointing in meshes if make is Alike else meshes[:1]:
        own, found = trained(built(make, 0.2, checkpointing), n, stage, **how)
        assert own == losses and all(found[name].equal(w) for name, w in params.items())


@each_model
def test_hugging_face_model_is_built_sharded(make):
    own = fs.nn.init_params(
        lambda: dict(make(0.1).named_parameters()), fs.fsdp("data"), mesh=fs.make_mesh({"data": 4}), seed=0
    )
    torch.manual_seed(0)
    expected = dict(make(0.1).named_parameters())
    assert own.keys() == expected.keys() and all(
        fs.unshard(own[name]).equal(w.detach()) for name, w in expected.items()
    )


@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_hugging_face_model_splits_into_stages(make):
    model, tokens, blocks = built(make, 0.0), batch_of(0), MODELS[make][0].removesuffix("[*]")
    model.config.use_cache = False  # no tensor, so no stage hands it on
    mesh, schedule = fs.make_mesh({"pipe": 2, "data": 2}), fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    stages = fs.pipeline.split_stages(model, 2, sample={"input_ids": tokens}, blocks=blocks)
    params = fs.shard_stages(stages, fs.fsdp("data"), mesh=mesh, schedule=schedule)

    def entropy(y, batch):
        return F.cross_entropy(y.logits.flatten(0, 1), batch["input_ids"].flatten())

    gradient = fs.value_and_grad(stages, mesh=mesh, batch=P("data"), schedule=schedule, loss=entropy)
    loss, grads = gradient(params, {"input_ids": tokens})
    whole = entropy(model(input_ids=tokens), {"input_ids": tokens})
    whole.backward()
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-12, atol=0)
    found = {name: g for tree in fs.unshard(grads) for name, g in tree.items()}
    for name, w in model.named_parameters():
        torch.testing.assert_close(found[name], w.grad, rtol=0, atol=1e-12)
