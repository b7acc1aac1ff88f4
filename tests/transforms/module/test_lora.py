"""Low rank: what is computed is W x + s B A x, what is trained is B and A, and all plugins train it
alike.
"""

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.mesh.layout import flatten
from fshard.transforms.module.lora import LowRank, lora
from tests.helpers.training import PLUGINS, Case, assert_trained_alike, boosted


class Tied(nn.Module):
    """An embedding tied to the head, and attention, which uses the weights of its layers without
    calling them.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=3)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        y = self.embed(tokens)
        return self.head(self.up(y + self.mix(y, y, y, need_weights=False)[0])).mean(1)


def train_adapters(model, seed=0):
    """Return a model whose differences are not zero."""
    draw = torch.Generator().manual_seed(seed)
    for part in model.modules():
        if isinstance(part, LowRank):
            part.lora_B.data = torch.randn(part.lora_B.shape, generator=draw).to(part.lora_B)
    return model


def test_lora_difference_equals_its_formula():
    torch.manual_seed(0)
    layer = nn.Linear(5, 3).double()
    x = torch.randn(4, 5).double()
    model = train_adapters(lora(layer, fs.nn.LoraConfig(r=2, lora_alpha=6)))
    w = layer.weight + 6 / 2 * model.lora_B @ model.lora_A
    torch.testing.assert_close(model(x), x @ w.T + layer.bias)
    torch.testing.assert_close(fs.nn.merge_lora(model)(x), model(x))
    assert torch.equal(lora(layer)(x), layer(x))  # at first there is none


def test_lora_wraps_linear_layers_and_merges():
    torch.manual_seed(0)
    model = Tied().double()
    tokens = torch.tensor([[1, 2, 3, 10], [3, 3, 0, 4]])
    config = fs.nn.LoraConfig(r=2, target_modules=["embed", "mix.out_proj", "up", "head"])
    tuned = train_adapters(lora(model, config))
    plain = fs.nn.merge_lora(tuned)
    assert [type(x).__name__ for x in (plain.embed, plain.mix.out_proj, plain.up, plain.head)] == [
        type(x).__name__ for x in (model.embed, model.mix.out_proj, model.up, model.head)
    ]
    torch.testing.assert_close(plain(tokens), tuned(tokens))
    assert not torch.allclose(plain(tokens), model(tokens))
    plain.up.weight.data.zero_()  # what is merged is another model
    assert tuned.up.base_layer.weight.any()


def test_lora_of_shared_layer_has_one_difference():
    layer = nn.Linear(4, 4)
    model = lora(nn.Sequential(layer, nn.ReLU(), layer))
    assert model[0] is model[2] and isinstance(model[0], LowRank)
    both = fs.nn.merge_lora(train_adapters(model))
    assert both[0] is both[2] and type(both[0]) is nn.Linear


def test_lora_covers_transformer_layers():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    tuned = train_adapters(
        lora(model, fs.nn.LoraConfig(r=2, target_modules=r".*\.(c_attn|c_proj)"))
    )
    assert sum(isinstance(part, LowRank) for part in tuned.modules()) == 3
    tokens = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(fs.nn.merge_lora(tuned)(tokens).logits, tuned(tokens).logits)


def test_lora_shares_weights_of_unchanged_model():
    model = Tied()
    before = {name: (x, x.requires_grad) for name, x in model.named_parameters()}
    tuned = lora(model)
    assert {name: (x, x.requires_grad) for name, x in model.named_parameters()} == before
    assert tuned.up.base_layer.weight.data_ptr() == model.up.weight.data_ptr()
    assert tuned.head.base_layer.weight is tuned.embed.weight  # what is tied stays tied


@pytest.mark.parametrize(
    ("config", "trained"),
    [
        ({"target_modules": ["up"]}, {"up.lora_A", "up.lora_B"}),
        ({"target_modules": "u.|nothing"}, {"up.lora_A", "up.lora_B"}),
        ({"target_modules": ["up"], "bias": "lora_only"}, {"up.lora_A", "up.lora_B", "up.base_layer.bias"}),
        (
            {"target_modules": ["up"], "bias": "all"},
            {"up.lora_A", "up.lora_B", "up.base_layer.bias", "mix.in_proj_bias", "mix.out_proj.bias"},
        ),
        (
            {"modules_to_save": ["up"], "target_modules": ["mix.out_proj"]},
            {"up.weight", "up.bias", "mix.out_proj.lora_A", "mix.out_proj.lora_B"},
        ),
        ({"modules_to_save": ["mix", "up"]}, {f"mix.{name}" for name, _ in Tied().mix.named_parameters()}
            | {"up.weight", "up.bias", "head.lora_A", "head.lora_B"}),
    ],
)  # fmt: skip
def test_lora_trains_selected_parameters(config, trained):
    tuned = lora(Tied(), fs.nn.LoraConfig(**config))
    assert {name for name, x in tuned.named_parameters() if x.requires_grad} == trained


TOKENS = torch.randint(11, (8, 4), generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(8)


CONFIG = fs.nn.LoraConfig(r=2, target_modules=["up", "head", "mix.out_proj"], bias="lora_only")
CASE = Case(
    lambda: train_adapters(lora(Tied(), CONFIG)),
    to_inputs=lambda x: (x.abs() * 9).long() % 11,
    width=4,
)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_lora_trains_equally_under_every_plugin(plugin):
    assert_trained_alike(CASE, *boosted(CASE, PLUGINS[plugin](), 2))


def test_lora_frozen_weights_have_no_state_nor_gradient():
    def main():
        booster = fs.Booster(plugin=fs.ZeroPlugin(stage=2))
        torch.manual_seed(0)
        model = booster.enable_lora(nn.Linear(100, 100), lora_config=fs.nn.LoraConfig(r=1))
        opt = torch.optim.AdamW(model.parameters())  # all of them, as one writes it
        model, opt, *_ = booster.boost(model, opt)
        booster.backward(model(torch.ones(2, 100)).mean(), opt)
        opt.step()
        leaves, *_ = flatten(opt.state)
        return sum(x.shards[0].numel() for x in leaves if isinstance(x, fs.Sharded) and x.shape)

    with fs.ledger() as comm:
        held = fs.run(main, mesh=fs.make_mesh({"data": 2}))
    assert held == [200, 200]  # two moments of 100 + 100 numbers, half of them on each device
    assert (
        comm.bytes() < 2 * 4 * 200
    )  # their gradients, and what they become: nothing of 10,000 weights is sent


MISUSE = {
    "numbers": (
        lambda: fs.nn.LoraConfig(lora_alpha="8", lora_dropout="x"),
        "lora_alpha must be a number, got '8'; lora_dropout must be .*'x'",
    ),
    "a pattern": (
        lambda: fs.nn.LoraConfig(target_modules="("),
        r"a regular expression; got .\(.: missing \)",
    ),
    "a dict": (lambda: lora(3, {"r": 2}), "got 3 and {'r': 2}"),
    "twice": (
        lambda: lora(lora(nn.Linear(2, 2))),
        r"learns differences already.*merge_lora\(model\)",
    ),
    "names": (
        lambda: lora(
            Tied(),
            fs.nn.LoraConfig(
                target_modules=["mix", "q_proj", "up"], modules_to_save=["classifier"]
            ),
        ),
        "lora: mix is a MultiheadAttention, which has no low rank; no layer is called 'q_proj'; no layer is called "
        "'classifier'. Linear layers are: mix.out_proj, up, head.",
    ),
    "a name": (
        lambda: lora(Tied(), fs.nn.LoraConfig(target_modules="v_proj")),
        "no layer is called 'v_proj'. Linear layers are",
    ),
    "no layers": (
        lambda: lora(nn.BatchNorm1d(2)),
        "there is no linear layer. Linear layers are: none.",
    ),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_of_lora_raises(name):
    call, words = MISUSE[name]
    with pytest.raises(fs.errors.ModuleError, match=words):
        call()
