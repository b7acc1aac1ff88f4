"""Modules whose parameters are arrays run unchanged: a GPT, a ResNet block, a transformer encoder,
an HF BERT.
"""

import copy

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P
from fshard.errors import LayoutError
from tests.tensor.small_gpt import Layer, Words, next_word

F64 = torch.float64
MESH = fs.make_mesh({"data": 2, "model": 2})
WIDTH, HEADS, WORDS, LENGTH = 8, 2, 16, 6


TENSOR_PARALLEL = {
    "*.qkv.*": P("model"), "*.out.weight": P(None, "model"), "*.up.*": P("model"), "*.down.weight": P(None, "model"),
    "*.words.weight": P(None, "model"),
}  # fmt: skip


def test_gpt_equals_one_device_over_five_steps():
    """Its table of words is also its head."""
    torch.manual_seed(0)
    words = Words()
    head = nn.Linear(WIDTH, 11, bias=False)
    head.weight = words.words.weight
    single = nn.Sequential(words, *(Layer() for _ in range(6)), nn.LayerNorm(WIDTH), head).to(F64)
    sharded = fs.array.shard_module(copy.deepcopy(single), TENSOR_PARALLEL, mesh=MESH)
    assert sharded[-1].weight is sharded[0].words.weight
    for seed in range(5):
        ids = torch.randint(11, (4, 4), generator=torch.Generator().manual_seed(seed))
        losses = []
        for model, batch in (
            (single, ids),
            (sharded, fs.device_put(ids, fs.Layout(MESH, P("data")))),
        ):
            losses.append(next_word(model(batch), batch))
            losses[-1].backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            model.zero_grad()
        assert abs(float(losses[0].detach()) - float(losses[1])) < 1e-10
    for p, q in zip(single.parameters(), sharded.parameters(), strict=True):
        assert (fs.unshard(q.detach()) - p.detach()).abs().max() < 1e-10


class Residual(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += self.short(x)
        return self.relu(y)


def resnet():
    stem = [
        nn.Conv2d(3, 4, 5, 2, 2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    return nn.Sequential(
        *stem,
        Residual(4, 4, 1),
        Residual(4, 8, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.head = nn.Linear(WIDTH, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos = nn.Parameter(torch.randn(1, 17, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 16, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        return self.head(self.encoder(x)[:, 0])


@pytest.mark.filterwarnings("ignore")  # of transformers' own
def test_bert_of_hugging_face_equals_one_device():
    hugging_face = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 2 * WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
    }
    config = hugging_face.BertConfig(
        vocab_size=WORDS, max_position_embeddings=LENGTH, attention_probs_dropout_prob=0.0, **sizes
    )
    one = hugging_face.BertForMaskedLM(config).to(F64)
    columns = {f"*{name}.*": P("model") for name in ("query", "key", "value", "intermediate.dense")}
    rules = {
        **columns,
        "*.output.dense.weight": P(None, "model"),
        "*word_embeddings.weight": P("model"),
    }
    many = fs.array.shard_module(copy.deepcopy(one), rules, mesh=MESH)
    ids = torch.randint(0, WORDS, (4, LENGTH))
    mask = torch.ones(4, LENGTH, dtype=torch.long)
    mask[1:, -2:] = 0
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    actual, expected = [], []
    for model, results, put in (
        (one, expected, lambda x: x),
        (many, actual, lambda x: fs.device_put(x, fs.Layout(MESH, P("data")))),
    ):
        torch.manual_seed(1)
        result = model(**{name: put(x) for name, x in given.items()})
        results += [result.loss, result.logits]
        result.loss.backward()
    torch.testing.assert_close([fs.unshard(x) for x in actual], expected)
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
    expected = one(x)
    torch.manual_seed(1)
    actual = many(fs.device_put(x, fs.Layout(MESH, spec)))
    torch.testing.assert_close(fs.unshard(actual), expected)
    (expected * expected).sum().backward()
    (actual * actual).sum().backward()
    for p, q in zip(one.parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(fs.unshard(q.grad), p.grad)
        assert q.grad.layout.spec == q.spec
    for p, q in zip(one.buffers(), many.buffers(), strict=True):
        torch.testing.assert_close(fs.unshard(q), p)


def test_rules_that_match_nothing_raise():
    with pytest.raises(LayoutError, match="match none"):
        fs.array.shard_module(nn.Linear(2, 2), {"wieght": P("model")}, mesh=MESH)
