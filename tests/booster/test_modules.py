"""Hard modules and models of transformers train under every plugin as in torch on one device."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.booster.loops import PLUGINS, Case, assert_trained_alike, bits, boosted

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


def normed(norm):
    return nn.Sequential(norm(nn.Linear(3, 4)), nn.Tanh(), norm(nn.Linear(4, 2)))


CASES = {
    "sparse": Case(Sparse),
    "rebound": Case(Rebound),
    "closing": Case(Closing),
    "strided": Case(Strided),
    "kinked": Case(Kinked),
    "again": Case(Again),
    "slope": Case(Slope),
    "choosing": Case(Choosing),
    "wasteful": Case(Wasteful, taken=lambda y: y["wanted"].square().mean()),
    "objects": Case(OnGraphs, given=lambda x: Graph(x, ["a", "b"])),
    "recurrent": Case(Recurrent),
    "recurrent parametrization": Case(partial(Recurrent, parametrizations.weight_norm)),
    "fewer than devices": Case(lambda: nn.PReLU()),
    "spectral norm": Case(partial(normed, spectral_norm)),
    "spectral parametrization": Case(partial(normed, parametrizations.spectral_norm)),
    "weight norm": Case(partial(normed, weight_norm)),
    "weight parametrization": Case(partial(normed, parametrizations.weight_norm)),
}


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("name", CASES)
def test_hard_module_trains_as_torch(name, plugin):
    assert_trained_alike(CASES[name], *boosted(CASES[name], PLUGINS[plugin](), 2))


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
    "AlbertModel": Case(
        partial(of_transformers, "Albert", "AlbertModel"), words, lambda y: y.last_hidden_state.square().mean()
    ),
    "AlbertForPreTraining": Case(
        partial(of_transformers, "Albert", "AlbertForPreTraining"),
        words,
        lambda y: y.prediction_logits.square().mean() + y.sop_logits.square().mean(),
    ),
    "BertModel": Case(partial(of_transformers, "Bert", "BertModel"), words, lambda y: y.pooler_output.square().mean()),
    "BertForPreTraining": Case(
        partial(of_transformers, "Bert", "BertForPreTraining"), words, lambda y: y.prediction_logits.square().mean()
    ),
    "GPT2DoubleHeadsModel": Case(
        partial(of_transformers, "GPT2", "GPT2DoubleHeadsModel"),
        lambda x: words(x)[:, None].repeat(1, 2, 1),
        lambda y: y.logits.square().mean() + y.mc_logits.square().mean(),
    ),
}


@pytest.mark.parametrize("plugin", ["zero 2", "fsdp"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_model_trains_as_torch(name, plugin):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install fshard[hf]")
    assert_trained_alike(TRANSFORMERS[name], *boosted(TRANSFORMERS[name], PLUGINS[plugin](), 2))


@pytest.mark.parametrize("plugin", PLUGINS)
def test_bert_with_dropout_has_equal_bits_on_all_meshes(plugin):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install fshard[hf]")
    (expected,) = bits(TRANSFORMERS["BertModel"], "ddp", 1)
    for n in (2, 4):
        for found in bits(TRANSFORMERS["BertModel"], plugin, n):
            assert all(torch.equal(x, expected[key]) for key, x in found.items())
