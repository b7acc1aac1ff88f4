"""Modules that are hard to shard, one mechanism each.

All map (samples, D) to a tensor with a row for each sample.
"""

from functools import partial

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

D = 12


class Perceptron(nn.Module):
    """Blocks of which the first and the last are tied, one is frozen, and one is never called."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.blocks[3].weight = self.blocks[0].weight
        self.blocks[1].requires_grad_(False)
        self.unused = nn.Linear(D, D)
        self.head = nn.Linear(D, 3)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Twice(nn.Module):
    """One block that is called before and after others, also by another name."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.again = self.shared

    def forward(self, x):
        x = self.shared(x)
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return self.again(self.shared(x))


class TiedWords(nn.Module):
    """An embedding whose matrix is the head's too, a layer norm between, and a padding row."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6, padding_idx=0)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.norm(self.embedding((x.abs() * 5).long().clamp(max=6))).mean(1))


class Buffers(nn.Module):
    """Integers, no saving, a new shape; and private ones: one that was None, and one that the
    forward registers.
    """

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.ones(D, dtype=torch.bool), persistent=False)
        self.register_buffer("seen", torch.zeros(0, D))
        self.register_buffer("later", None)
        self.register_buffer("tied", self.mask)

    def forward(self, x):
        self.count += 1
        self.seen = torch.cat([self.seen, x.detach()])
        self.later = self.seen.sum(0) if self.later is None else self.later * 0.5
        self.mask.data[int(self.count) % D] = False
        if not hasattr(self, "fresh"):
            self.register_buffer("fresh", torch.ones(D))
        self.fresh.add_(1)
        return x * self.weight * self.tied + self.later + self.fresh


class Rebound(nn.Module):
    """A buffer that the forward binds to another shape, the same for all samples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen = torch.zeros(len(self.seen) + 1)
        return self.layer(x) / self.seen.numel()


class Lists(nn.Module):
    """Parameters and submodules in containers of the module's own, in a partial function, and in an
    object.
    """

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(D, D)
        self.b = nn.Linear(D, D)
        self.ws = nn.ParameterList([torch.randn(D), torch.randn(D)])
        self.named = nn.ParameterDict({"scale": torch.randn(D)})
        self.plain = [self.a, (self.b, "name")]
        self.act = partial(self.scaled, by=2.0)
        self.helper = Helper(self.a)
        self.constant = torch.full((D,), 3.0)

    def scaled(self, x, by):
        return x * by * self.ws[1]

    def forward(self, x):
        first, (second, _) = self.plain
        x = self.act(second(first(x))) * self.ws[0] + self.named["scale"]
        return self.helper.layer(x) + self.constant


class Helper:
    """An object that is no module."""

    def __init__(self, layer):
        self.layer = layer


class Stateful(nn.Module):
    """Plain attributes that the next call reads: numbers, tensors, one with its graph, one set by a
    function.
    """

    steps = 1

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.calls = 0
        self.mean = 0.0
        self.odd = False
        self.table = None
        self.seen = torch.zeros(D)
        self.smooth = None

    def forward(self, x):
        self.calls += 1
        self.steps = self.steps * 2
        self.odd = not self.odd
        self.mean = 0.9 * self.mean + 0.1 * x.mean().item()
        self.seen.mul_(0.5).add_(x.mean(0))
        if self.table is None:
            self.table = torch.linspace(0, 1, D)
        if not hasattr(self, "first"):
            self.first = x.detach()[0]
        keep(self, x)
        latest = self.layer(x)
        self.smooth = latest if self.smooth is None else 0.9 * self.smooth.detach() + 0.1 * latest
        y = (
            self.smooth.detach()
            + latest * self.calls
            + self.mean * self.seen
            + self.table * self.steps
        )
        return (y if self.odd else -y) + self.first + self.kept


def keep(module, x):
    module.kept = getattr(module, "kept", 0) + x.detach().sum()


class Closing(nn.Module):
    """A function, made once, that refers to a parameter and to an attribute that the forward sets."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, 2))
        self.scale = 0.5
        self.times = lambda x: x @ self.weight * self.scale

    def forward(self, x):
        y = self.times(x)
        self.scale *= 1.5
        return y


class Strided(nn.Module):
    """Gradients come back transposed and expanded; a tensor is not registered."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, 4))
        self.bias = nn.Parameter(torch.ones(1))
        self.offset = torch.linspace(0, 1, 4)

    def forward(self, x):
        return (
            (x @ self.weight.t().contiguous().t() + self.bias.expand(4) + self.offset).t()[::2].t()
        )


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.table((x[:, 0] * 3).long().abs() % 9))


class Checkpointed(nn.Module):
    """Blocks that run again in the backward: a method, a function, a module."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.run = self.block

    def block(self, x, index):
        return self.blocks[index](x).tanh()

    def forward(self, x):
        x = checkpoint(self.run, x, 0, use_reentrant=False)
        x = checkpoint(lambda x: self.block(x, 1), x, use_reentrant=False)
        return checkpoint(self.blocks[0], x, use_reentrant=False)


class Slope(nn.Module):
    """Takes a gradient in its forward, of several layers."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(
            nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)
        )

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return force


class Choosing(nn.Module):
    """Uses a layer if the samples say so: on some devices only."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(D, D)
        self.sometimes = nn.Linear(D, D)

    def forward(self, x):
        y = self.always(x)
        return torch.cat([self.sometimes(row) if row[0, 0] > 0 else row for row in y[:, None]])


class Recurrent(nn.Module):
    """A network of torch's, which keeps a list of its weights besides."""

    def __init__(self, kind, norm=None, **options):
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True, **options)
        if norm is not None:
            norm(self.rnn, "weight_hh_l0")

    def forward(self, x):
        return self.rnn(x.unflatten(1, (3, 4)))[0][:, -1]


class Attention(nn.Module):
    """Attention and two encoders over three tokens of a sample: norms first, and last."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.encoders = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, norm_first=first)
                for first in (True, False)
            )
        )

    def forward(self, x):
        x = x.unflatten(1, (3, 4))
        return self.encoders(self.attention(x, x, x, need_weights=False)[0]).flatten(1)


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, w):
        return w.triu() + w.triu(1).T


def hooked():
    module = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    module[0].register_forward_pre_hook(lambda module, args: (args[0] + module.bias,))
    module.register_forward_hook(lambda module, args, y: y + module[0].bias)
    return module


def parametrized():
    module = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    parametrize.register_parametrization(module[0], "weight", Symmetric())
    return module


def convolutions():
    down = nn.Conv2d(3, 4, 2, padding=1)
    up = nn.ConvTranspose2d(4, 3, 2)
    return nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)),
        down,
        nn.GroupNorm(2, 4),
        nn.GELU(),
        up,
        nn.PReLU(3),
        nn.Flatten(),
    )


def normed(norm):
    return nn.Sequential(norm(nn.Linear(D, 4)), nn.Tanh(), norm(nn.Linear(4, 2)))


def batch_normed(**options):
    return nn.Sequential(nn.Linear(D, 5), nn.BatchNorm1d(5, **options), nn.Tanh(), nn.Linear(5, 3))


MODULES = {
    "linear": lambda: nn.Linear(D, D),
    "fewer elements than devices": nn.PReLU,
    "relu in place": lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True), nn.Linear(D, 1)),
    "batch norm": batch_normed,
    "batch norm, cumulative": partial(batch_normed, momentum=None),
    "old weight norm": partial(normed, weight_norm),
    "weight norm": partial(normed, parametrizations.weight_norm),
    "old spectral norm": partial(normed, spectral_norm),
    "spectral norm": partial(normed, parametrizations.spectral_norm),
    "orthogonal": partial(normed, parametrizations.orthogonal),
    "parametrized": parametrized,
    "pruned": lambda: prune.l1_unstructured(nn.Linear(D, D), "weight", 0.5),
    "hooks": hooked,
    "lstm": partial(Recurrent, nn.LSTM, num_layers=2, bidirectional=True),
    "gru": partial(Recurrent, nn.GRU),
    "lstm with weight norm": partial(Recurrent, nn.LSTM, parametrizations.weight_norm),
    "attention": Attention,
    "tied, frozen and unused": Perceptron,
    "called three times": Twice,
    "tied words": TiedWords,
    "buffers": Buffers,
    "rebound buffer": Rebound,
    "lists": Lists,
    "stateful": Stateful,
    "closing": Closing,
    "strided": Strided,
    "sparse": Sparse,
    "gradient in forward": Slope,
    "checkpoints in forward": Checkpointed,
    "choosing": Choosing,
    "convolutions": convolutions,
}
