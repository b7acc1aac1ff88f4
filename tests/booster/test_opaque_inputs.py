"""Objects with unknown samples reach the module unchanged, and raise where samples are split."""

from functools import partial

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P
from tests.booster.loops import assert_close, on_devices
from tests.helpers.training import PLUGINS, Case, assert_trained_alike, boosted


class Bags:
    """Indices for each feature of each sample: all of a feature first, as torchrec's jagged tensors
    have them.
    """

    def __init__(self, values, lengths):
        self.values, self.lengths = values, lengths


class RegisteredBags(Bags):
    """Bags whose tensors torch takes apart."""


torch.utils._pytree.register_pytree_node(
    RegisteredBags,
    lambda bags: ([bags.values, bags.lengths], None),
    lambda tensors, _: RegisteredBags(*tensors),
)


class OnBags(nn.Module):
    """The mean of each bag of two features."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(7, 3)

    def forward(self, bags):
        offsets = bags.lengths.cumsum(0) - bags.lengths
        return self.table(bags.values, offsets).unflatten(0, (2, -1)).sum(0)  # (samples, 3)


def bags_of(x, kind=Bags):
    lengths = (x[:, :2].abs() * 3).long().t().reshape(-1) % 3
    starts = (x[:, :2].exp() * 9).long().t().reshape(-1)
    values = [
        (start + torch.arange(n)) % 7 for start, n in zip(starts, lengths.tolist(), strict=True)
    ]
    return kind(torch.cat(values), lengths)


CASES = {kind: Case(OnBags, partial(bags_of, kind=kind)) for kind in (Bags, RegisteredBags)}


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", CASES)
def test_opaque_input_reaches_module_unchanged(kind, plugin):
    assert_trained_alike(CASES[kind], *boosted(CASES[kind], PLUGINS[plugin](), 2))


@pytest.mark.parametrize("count", [7, 5, 1])
def test_opaque_batch_of_loader_keeps_its_weight(count):
    rows = torch.randn(count, 3, generator=torch.Generator().manual_seed(5))

    def body(loop):
        options = {"batch_size": count, "collate_fn": lambda samples: bags_of(torch.stack(samples))}
        (bags,) = loop.booster.prepare_dataloader(rows, **options)
        loop.step(bags)
        return loop.state()

    states = [
        on_devices(body, fs.DDPPlugin(), n, OnBags, criterion=lambda y, _: y.square().mean())
        for n in (1, 2, 4)
    ]
    assert_close([*states[1], *states[2]], states[0][0], 1e-5)


@pytest.mark.parametrize("kind", CASES)
def test_opaque_input_that_would_be_split_raises(kind):
    """In reproducible mode, by slices; and as a leaf of a sharded batch.

    Without gradients nothing is split.
    """
    x = torch.ones(8, 3)
    mesh = fs.make_mesh({"data": 2})

    def body(loop):
        with torch.no_grad():
            assert loop.model(bags_of(x, kind)).shape == (8, 3)
        loop.model(bags_of(x, kind))

    if kind is Bags:
        with pytest.raises(TypeError, match="a Bags is not sharded"):
            on_devices(body, fs.DDPPlugin(reproducible=True), 2, OnBags)
    params = fs.shard_params({"w": torch.ones(3)}, P(), mesh=mesh)
    batch = {"x": x, "bags": bags_of(x, kind)}

    def loss_fn(params, batch):
        return (batch["x"] * params["w"]).mean() * batch["bags"].lengths.sum()

    message = (
        r"batch: bags: a Bags is not sharded.*or P\(\) for it"
        if kind is Bags
        else "must have the same samples"
    )
    with pytest.raises((TypeError, ValueError), match=message):
        fs.evaluate(loss_fn, mesh=mesh, batch=P("data"))(params, batch)
    loss = fs.evaluate(loss_fn, mesh=mesh, batch={"x": P("data"), "bags": P()})(params, batch)
    torch.testing.assert_close(loss, batch["bags"].lengths.sum().float())
