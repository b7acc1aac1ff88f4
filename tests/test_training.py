"""One table: every module, by every way of training, in every ZeRO stage trains as in torch on one device."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.sampled import in_pairs
from tests.training import PLUGINS, WAYS, Case, adamw, assert_trained_alike, bits, boosted, by_train_step, momentum

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own, and of what torch calls old


class Sparse(nn.Module):
    """Whose embedding has sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.table((x[:, 0] * 3).long().abs() % 9))


class Rebound(nn.Module):
    """Which binds a buffer to another shape, keeps one that is not saved, and counts in whole numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen = torch.zeros(len(self.seen) + 1)
        self.calls += 1
        return self.layer(x) * self.scale / self.seen.numel()


class Strided(nn.Module):
    """Whose gradients come back transposed and expanded, and which keeps a tensor that nobody has registered."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.ones(1))
        self.offset = torch.linspace(0, 1, 4)

    def forward(self, x):
        return (x @ self.weight.t().contiguous().t() + self.bias.expand(4) + self.offset).t()[::2].t()


class Kinked(nn.Module):
    """With a ReLU in place, right at its entrance."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))

    def forward(self, x):
        return self.layers(x.clone())


class Again(nn.Module):
    """Which computes its blocks again in the backward, in both of torch's ways."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        y = checkpoint(lambda x: self.first(x).tanh(), x, use_reentrant=False)
        return checkpoint(lambda y: self.second(y).tanh(), y, use_reentrant=False)


class Slope(nn.Module):
    """Which takes a gradient inside of its forward."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return force


class Choosing(nn.Module):
    """Which uses a layer if the samples say so: on some devices only."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        y = self.always(x)
        return torch.cat([self.sometimes(row) if row[0, 0] > 0 else row for row in y[:, None]])


class Wasteful(nn.Module):
    """Of whose outputs the loss takes one."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.other = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        y = self.body(x)
        return {"wanted": self.head(y), "left": self.other(y)}


@dataclass
class Graph:
    """An input that is an object."""

    nodes: torch.Tensor
    edges: list[str]


class OnGraphs(nn.Module):
    """Which is given objects."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, graph):
        return self.layer(graph.nodes) * len(graph.edges)


class Recurrent(nn.Module):
    """An LSTM, which keeps a list of its weights besides."""

    def __init__(self, norm=None):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        if norm is not None:
            norm(self.lstm, "weight_hh_l0")

    def forward(self, x):
        return self.lstm(x[:, None].expand(-1, 5, -1))[0][:, -1]


class Closing(nn.Module):
    """Whose functions, made at first, refer to itself: to a parameter, and to what its forward sets."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(3, 2)), 0.5
        self.times = lambda x: x @ self.weight * self.scale

    def forward(self, x):
        y = self.times(x)
        self.scale *= 1.5
        return y


class Perceptron(nn.Module):
    """Blocks of which the first and the last are tied, one is frozen, and one is never called."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.blocks[3].weight = self.blocks[0].weight
        self.blocks[1].requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Twice(nn.Module):
    """One block that is called before and after others, so that its unit is freed and gathered again."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        x = self.shared(x)
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return self.shared(self.shared(x))


class Bidirectional(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        return self.head(self.lstm(x.reshape(len(x), 3, 6))[0][:, -1])


class TiedWords(nn.Module):
    """An embedding whose matrix is the head's too, a layer norm between, and a padding row."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6, padding_idx=0)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        ids = (x.abs() * 5).long().clamp(max=6)
        return self.head(self.norm(self.embedding(ids)).mean(1))


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (2, 3, 3)),
        nn.Conv2d(2, 4, 2, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.ConvTranspose2d(4, 3, 2),
        nn.PReLU(3),
        nn.Flatten(),
        nn.Linear(75, 3),
    )


def normed_without_dropout():
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 6)),
        nn.Tanh(),
        parametrizations.weight_norm(nn.Linear(6, 3)),
        nn.Dropout(0.5),
    ).eval()


def transformer(*, norm_first):
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.Sequential(nn.Unflatten(1, (3, 6)), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def normed(norm):
    return nn.Sequential(norm(nn.Linear(3, 4)), nn.Tanh(), norm(nn.Linear(4, 2)))


LOOP = ("loop",)
CASES = {
    "tied, frozen and unused": Case(Perceptron, width=6),
    "called three times": Case(Twice, width=6),
    "bidirectional": Case(Bidirectional, width=18),
    "tied words": Case(TiedWords, width=6),
    "convolutions": Case(convolutions, width=18),
    "no dropout": Case(normed_without_dropout, width=6),
    "transformer": Case(partial(transformer, norm_first=True), width=18),
    "transformer, norm last": Case(partial(transformer, norm_first=False), width=18),
    "sparse": Case(Sparse, ways=LOOP),
    "rebound": Case(Rebound, ways=LOOP),
    "closing": Case(Closing, ways=LOOP),
    "strided": Case(Strided),
    "kinked": Case(Kinked),
    "again": Case(Again),
    "slope": Case(Slope),
    "choosing": Case(Choosing),
    "wasteful": Case(Wasteful, taken=lambda y: y["wanted"].square().mean()),
    "objects": Case(OnGraphs, given=lambda x: Graph(x, ["a", "b"]), ways=LOOP),
    "recurrent": Case(Recurrent),
    "recurrent parametrization": Case(partial(Recurrent, parametrizations.weight_norm)),
    "fewer than devices": Case(nn.PReLU),
    "spectral norm": Case(partial(normed, spectral_norm), ways=LOOP),
    "spectral parametrization": Case(partial(normed, parametrizations.spectral_norm), ways=LOOP),
    "weight norm": Case(partial(normed, weight_norm)),
    "weight parametrization": Case(partial(normed, parametrizations.weight_norm)),
}
BY_PAIRS = in_pairs(CASES, range(4), WAYS, (momentum, adamw), (1, 2, 4))


@pytest.mark.parametrize(("name", "stage", "way", "optimizer", "n"), BY_PAIRS)
def test_module_trains_as_in_torch(name, stage, way, optimizer, n):
    case = CASES[name]
    way = way if way in case.ways else case.ways[0]
    optimizer = momentum if name == "sparse" else optimizer  # torch's AdamW refuses sparse gradients
    assert_trained_alike(case, *WAYS[way](case, stage, n, optimizer), optimizer=optimizer)


OPTIONS = {
    "accumulated": {"accumulate": 2},
    "reduced once": {"accumulate": 4, "reduce_once": True},
    "reduced each time": {"accumulate": 4, "reduce_once": False},
    "one unit": {"live_units": 1},
    "kept": {"reshard_after_forward": False},
    "synchronous": {"in_flight": 0, "donate": True},
    "reproducible": {"reproducible": True, "slices": 4, "accumulate": 2},
}


@pytest.mark.parametrize(
    ("name", "options", "stage"),
    in_pairs(("tied, frozen and unused", "called three times", "bidirectional", "no dropout"), OPTIONS, (0, 1, 2, 3)),
)
def test_module_trains_as_in_torch_with_any_options(name, options, stage):
    case = CASES[name]
    assert_trained_alike(case, by_train_step(case, stage, 2, adamw, **OPTIONS[options]), optimizer=adamw)


def on_processes(n):
    case = CASES["tied, frozen and unused"]
    return [by_train_step(case, stage, n, adamw) for stage in range(4)]


def test_module_trains_on_processes_as_in_torch(two, four):
    for pool, n in ((two, 2), (four, 4)):
        for results in pool.run(on_processes, n):
            assert_trained_alike(CASES["tied, frozen and unused"], *results, optimizer=adamw)


# -- transformers -----------------------------------------------------------------------------------------------------


BERT = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {"n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
CONFIGS = {
    "Albert": BERT | {"embedding_size": 8, "classifier_dropout_prob": 0.0},
    "Bert": BERT,
    "GPT2": GPT2 | NO_DROPOUT,
}


def of_transformers(kind, name):
    import transformers as hf

    return getattr(hf, name)(getattr(hf, f"{kind}Config")(vocab_size=20, **CONFIGS[kind]))


def words(x):
    """Return words for each sample."""
    return (x.repeat_interleave(2, 1) * 7).long().abs() % 20


TRANSFORMERS = {
    "AlbertForPreTraining": Case(
        partial(of_transformers, "Albert", "AlbertForPreTraining"),
        words,
        lambda y: y.prediction_logits.square().mean() + y.sop_logits.square().mean(),
    ),
    "BertModel": Case(partial(of_transformers, "Bert", "BertModel"), words, lambda y: y.pooler_output.square().mean()),
    "GPT2DoubleHeadsModel": Case(
        partial(of_transformers, "GPT2", "GPT2DoubleHeadsModel"),
        lambda x: words(x)[:, None].repeat(1, 2, 1),
        lambda y: y.logits.square().mean() + y.mc_logits.square().mean(),
    ),
}


@pytest.mark.parametrize(("name", "plugin"), [*zip(TRANSFORMERS, ("fsdp", "zero 2", "fsdp"), strict=True)])
def test_transformers_model_trains_as_torch(name, plugin):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install fshard[hf]")
    assert_trained_alike(TRANSFORMERS[name], *boosted(TRANSFORMERS[name], PLUGINS[plugin](), 2))


@pytest.mark.parametrize("plugin", ["zero 2", "fsdp"])
def test_bert_with_dropout_has_equal_bits_on_all_meshes(plugin):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install fshard[hf]")
    (expected,) = bits(TRANSFORMERS["BertModel"], "ddp", 1)
    for found in bits(TRANSFORMERS["BertModel"], plugin, 4):
        assert all(torch.equal(x, expected[key]) for key, x in found.items())
