"""A boosted loop with replicas, for tests of the options of `comm` in plugins."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import fshard as fs
from fshard import comm

DRAW = torch.Generator().manual_seed(1)


DATA = TensorDataset(
    torch.randn(43, 6, generator=DRAW).double(), torch.randn(43, 2, generator=DRAW).double()
)


NODES = {"node": 2, "gpu": 2}


def network(dropout=0.0):
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2)
    return nn.Sequential(*layers if dropout else (layers[0], *layers[2:])).double()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


class Loop:
    def __init__(self, plugin, dropout=0.0, optimizer=adamw, batch=8):
        self.booster = fs.Booster(plugin)
        model = network(dropout)
        loader = DataLoader(DATA, batch)
        self.model, self.opt, _, self.loader, _ = self.booster.boost(
            model, optimizer(model), None, loader
        )
        self.parts = self.model, self.opt, None, self.loader

    def steps(self, count):
        for _, (x, y) in zip(range(count), self.loader, strict=False):
            self.booster.backward(mse_loss(self.model(x), y), self.opt)
            self.booster.clip_grad_norm(self.opt, 1.0)
            self.opt.step()
            self.opt.zero_grad()
        return self

    def weights(self):
        with torch.no_grad():
            return self.model.state_dict(), self.model.eval()(DATA.tensors[0][:3])


def run(plugin, count=6, axes=None, **options):
    return fs.run(
        lambda: Loop(plugin, **options).steps(count).weights(), mesh=fs.make_mesh(axes or NODES)
    )


EVERY, RING, ALL = {"node": 4}, {"node": comm.ring}, {"node": comm.top_k(1.0)}


COMPRESS = {"node": comm.error_feedback(comm.quantized(4, block=8, stochastic=True))}


PLUGINS = {
    "local steps": fs.ZeroPlugin(stage=1, local_steps=EVERY, sync_batchnorm=True),
    "gossip": fs.DDPPlugin(gossip=RING),
    "compress": fs.ZeroPlugin(stage=1, compress=COMPRESS),
    "compress, stage 2": fs.ZeroPlugin(stage=2, compress=COMPRESS),
}
