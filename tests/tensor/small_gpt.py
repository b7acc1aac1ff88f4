"""A small transformer in stages of layers, trained by torch and by the Booster in any
configuration.
"""

from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

import fshard as fs

STEPS = 2


def token_ids(rows=4):
    """Return rows of tokens; many have the first ones of fewer."""
    return torch.randint(11, (rows, 4), generator=torch.Generator().manual_seed(1))


IDS = token_ids()


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.places = nn.Embedding(4, 8)

    def forward(self, ids):
        return self.words(ids) + self.places(torch.arange(4))


class Layer(nn.Module):
    def __init__(self, heads=2, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.dropped = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def projected(self, x):
        return self.qkv(x).chunk(3, -1)

    def forward(self, x):
        heads = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.projected(self.norm(x))
        )
        x = x + self.out(
            F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(self.dropped(F.gelu(self.up(x))))


class LayerOfParts(Layer):
    """A layer where the weights of q, k and v are parameters of their own."""

    def __init__(self, layer):
        super().__init__()
        self.load_state_dict(layer.state_dict())
        parts = zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        for part, (weight, bias) in zip((self.q, self.k, self.v), parts, strict=True):
            part.weight = nn.Parameter(weight.detach().clone())
            part.bias = nn.Parameter(bias.detach().clone())
        del self.qkv

    def projected(self, x):
        return self.q(x), self.k(x), self.v(x)


def gpt(dropout=0.0, heads=2):
    """Return a model whose table of words is also its head."""
    torch.manual_seed(0)
    head = nn.Linear(8, 11, bias=False)
    words = Words()
    head.weight = words.words.weight
    return nn.Sequential(
        words, Layer(heads, dropout), nn.Dropout(dropout), Layer(heads), head
    ).double()


def next_word(y, ids):
    return F.cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(
    mesh,
    make=gpt,
    optimizer=adamw,
    *,
    ids=IDS,
    steps=STEPS,
    clip=None,
    accumulate=1,
    lora=None,
    state=False,
    **how,
):
    """Return what the devices have learnt, by a loop or a schedule; or with `state` also the
    optimizer's state.

    Args:
        mesh: the sizes of its axes.
        make: returns the model.
        clip: the largest norm of a gradient.
        accumulate: the number of batches, one after the other, of a step.
        lora: the config of the differences that are trained.
    """

    def main():
        model = make()
        rows = len(ids) // how.get("data", mesh["data"]) // how.get("microbatches", 2)
        booster = fs.Booster(
            fs.HybridParallelPlugin(**{"sample": ids[:rows], "microbatches": 2, **how})
        )
        model = model if lora is None else booster.enable_lora(model, lora)
        model, opt, *_ = booster.boost(model, optimizer(model))
        n = fs.axis_size("data")
        at = fs.axis_index("data")
        for _ in range(steps):
            for batch in ids.chunk(accumulate):
                scaled = lambda y, x: next_word(y, x) / accumulate  # noqa: E731
                if how.get("pipeline", 1) > 1:
                    booster.execute_pipeline(iter([(batch, batch)]), model, scaled, opt)
                else:
                    booster.backward(scaled(model(batch.chunk(n)[at]), batch.chunk(n)[at]), opt)
            if clip is not None:
                booster.clip_grad_norm(opt, clip)
            opt.step()
            opt.zero_grad()
        learnt = {key: x.detach() for key, x in model.unwrap().named_parameters()}
        return (learnt, opt.state) if state else learnt

    return fs.run(main, mesh=fs.make_mesh(mesh))


@cache
def by_torch_alone(make=gpt, optimizer=adamw, rows=4, steps=STEPS, clip=None):
    """Return what torch alone has learnt."""
    model = make()
    ids = token_ids(rows)
    opt = optimizer(model)
    for _ in range(steps):
        next_word(model(ids), ids).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
    return {key: x.detach() for key, x in model.named_parameters()}


def assert_learnt(found, wanted, tolerance=1e-8):
    for own in found:
        torch.testing.assert_close(own, wanted, rtol=tolerance, atol=tolerance)
