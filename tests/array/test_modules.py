"""Modules whose parameters are arrays run unchanged: a GPT, a ResNet block, a transformer encoder, an HF BERT."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fshard as fs
from fshard import P
from fshard.errors import LayoutError

F64 = torch.float64
MESH = fs.make_mesh({"data": 2, "model": 2})
WIDTH, HEADS, WORDS, LENGTH = 8, 2, 16, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.tok, self.pos = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, tokens, targets):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


TENSOR_PARALLEL = {
    "*.qkv.*": P("model"), "*.out.weight": P(None, "model"), "*.up.*": P("model"), "*.down.weight": P(None, "model"),
    "tok.weight": P("model"),
}  # fmt: skip


def test_gpt_of_12_layers_equals_one_device_over_10_steps():
    torch.manual_seed(0)
    one = GPT(12).to(F64)
    many = fs.array.shard_module(copy.deepcopy(one), TENSOR_PARALLEL, mesh=MESH)
    assert many.head.weight is many.tok.weight
    data = fs.Layout(MESH, P("data"))
    for _ in range(10):
        tokens, targets = torch.randint(0, WORDS, (2, 4, LENGTH))
        losses = one(tokens, targets), many(fs.device_put(tokens, data), fs.device_put(targets, data))
        assert abs(float(losses[0].detach()) - float(losses[1])) < 1e-10
        for model, loss in zip((one, many), losses, strict=True):
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            model.zero_grad()
    for p, q in zip(one.parameters(), many.parameters(), strict=True):
        assert (fs.unshard(q.detach()) - p.detach()).abs().max() < 1e-10


class Residual(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.short, self.relu = nn.Conv2d(before, after, 1, stride), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += self.short(x)
        return self.relu(y)


def resnet():
    stem = [nn.Conv2d(3, 4, 5, 2, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(
        *stem, Residual(4, 4, 1), Residual(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, WIDTH, 4, 4), nn.Linear(WIDTH, 4)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 17, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        return self.head(self.encoder(x)[:, 0])


@pytest.mark.filterwarnings("ignore")  # of transformers' own
def test_bert_of_hugging_face_equals_one_device():
    hugging_face = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 2 * WIDTH, "num_attention_heads": HEADS, "intermediate_size": 24, "num_hidden_layers": 2}
    config = hugging_face.BertConfig(
        vocab_size=WORDS, max_position_embeddings=LENGTH, attention_probs_dropout_prob=0.0, **sizes
    )
    one = hugging_face.BertForMaskedLM(config).to(F64)
    columns = {f"*{name}.*": P("model") for name in ("query", "key", "value", "intermediate.dense")}
    rules = {**columns, "*.output.dense.weight": P(None, "model"), "*word_embeddings.weight": P("model")}
    many = fs.array.shard_module(copy.deepcopy(one), rules, mesh=MESH)
    ids, mask = torch.randint(0, WORDS, (4, LENGTH)), torch.ones(4, LENGTH, dtype=torch.long)
    mask[1:, -2:] = 0
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    found, wanted = [], []
    for model, results, put in (
        (one, wanted, lambda x: x),
        (many, found, lambda x: fs.device_put(x, fs.Layout(MESH, P("data")))),
    ):
        torch.manual_seed(1)
        result = model(**{name: put(x) for name, x in given.items()})
        results += [result.loss, result.logits]
        result.loss.backward()
    torch.testing.assert_close([fs.unshard(x) for x in found], wanted)
    for p, q in zip(one.parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(fs.unshard(q.grad), p.grad)
    assert "attention.self.query.weight" in fs.array.inspect(many)
    assert "f64[16@model, 16]" in fs.array.inspect(many)


@pytest.mark.parametrize(
    ("make", "spec", "rules"),
    [
        (resnet, P(("data", "model")), {}),
        (ViT, P("data"), {"*linear1.*": P("model"), "*linear2.weight": P(None, "model")}),
    ],
)
def test_image_models_equal_one_device(make, spec, rules):
    torch.manual_seed(0)
    one = make().to(F64)
    many = fs.array.shard_module(copy.deepcopy(one), rules, mesh=MESH)
    x = torch.randn(4, 3, 16, 16, dtype=F64)
    torch.manual_seed(1)
    wanted = one(x)
    torch.manual_seed(1)
    found = many(fs.device_put(x, fs.Layout(MESH, spec)))
    torch.testing.assert_close(fs.unshard(found), wanted)
    (wanted * wanted).sum().backward()
    (found * found).sum().backward()
    for p, q in zip(one.parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(fs.unshard(q.grad), p.grad)
        assert q.grad.layout.spec == q.spec
    for p, q in zip(one.buffers(), many.buffers(), strict=True):
        torch.testing.assert_close(fs.unshard(q), p)


def test_rules_that_match_nothing_raise():
    with pytest.raises(LayoutError, match="match none"):
        fs.array.shard_module(nn.Linear(2, 2), {"wieght": P("model")}, mesh=MESH)
