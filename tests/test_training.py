"""One table: every module, by every way of training, in every ZeRO stage trains as in torch on one
device.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fshard as fs
from tests.helpers.sampled import in_pairs
from tests.helpers.training import WAYS, Case, adamw, assert_trained_alike, by_train_step, momentum
from tests.transforms.module.zoo import MODULES, D

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*deprecated", "ignore:buffers .* have different shapes"
)


class Wasteful(nn.Module):
    """Of whose outputs the loss takes one."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)
        self.other = nn.Linear(3, 2)

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


def penalty(model, x):
    """Return the slopes of a model's output, of which the loss takes another gradient."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]


LOOP = ("loop",)
IN_A_LOOP = {"rebound buffer", "closing", "old spectral norm", "spectral norm"}
OF_ALL_SAMPLES = {
    "batch norm",
    "batch norm, cumulative",
    "buffers",
    "stateful",
}  # they do not train alike on parts
CASES = {
    **{
        name: Case(make, width=D, ways=LOOP) if name in IN_A_LOOP else Case(make, width=D)
        for name, make in MODULES.items()
        if name not in OF_ALL_SAMPLES
    },
    "no dropout": Case(lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval()),
    "gradient penalty": Case(MODULES["called three times"], forward=penalty, width=D, ways=LOOP),
    "wasteful": Case(Wasteful, to_loss=lambda y: y["wanted"].square().mean()),
    "objects": Case(OnGraphs, to_inputs=lambda x: Graph(x, ["a", "b"]), ways=LOOP),
}
BY_PAIRS = in_pairs(CASES, range(4), WAYS, (momentum, adamw), (1, 2, 4))


@pytest.mark.parametrize(("name", "stage", "way", "optimizer", "n"), BY_PAIRS)
def test_module_trains_as_in_torch(name, stage, way, optimizer, n):
    case = CASES[name]
    way = way if way in case.ways else case.ways[0]
    optimizer = (
        momentum if name == "sparse" else optimizer
    )  # torch's AdamW refuses sparse gradients
    assert_trained_alike(case, *WAYS[way](case, stage, n, optimizer), optimizer=optimizer)


CLIP = 0.005
OPTIONS = {
    "accumulated": {"accumulate": 2},
    "reduced once": {"accumulate": 4, "reduce_once": True},
    "reduced each time": {"accumulate": 4, "reduce_once": False},
    "one live unit": {"live_units": 1, "prefetch": 0},
    "many live units": {"live_units": 5, "prefetch": 3},
    "not resharded": {"reshard_after_forward": False},
    "synchronous": {"in_flight": 0, "donate": True, "bucket": 0},
    "reproducible": {"reproducible": True, "slices": 4, "accumulate": 2},
    "clipped": {"wrap": lambda opt: fs.optim.chain(fs.optim.clip_by_global_norm(CLIP), opt)},
    "scaled": {"wrap": lambda opt: fs.optim.loss_scaled(opt, initial=2.0**10, interval=2)},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "wrap": lambda opt: fs.optim.loss_scaled(opt, initial=256.0)},
}
TOLERANCES = {"bf16": 2e-2, "fp16": 2e-3}
SMALL = (
    "tied, frozen and unused",
    "called three times",
    "lstm",
    "gradient in forward",
    "checkpoints in forward",
)


@pytest.mark.parametrize(("name", "options", "stage"), in_pairs(SMALL, OPTIONS, range(4)))
def test_module_trains_as_in_torch_with_any_options(name, options, stage):
    clip = CLIP if options == "clipped" else None
    tolerance = TOLERANCES.get(options, 1e-9)
    results = by_train_step(
        CASES[name], stage, 2, **OPTIONS[options]
    )  # by momentum: its steps are as long as gradients
    assert_trained_alike(CASES[name], results, clip=clip, tolerance=tolerance)
