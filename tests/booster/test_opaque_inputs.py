"""Objects with unknown samples reach the module unchanged, and raise where samples are split."""

from functools import partial

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P
from tests.training import PLUGINS, Case, assert_trained_alike, boosted


class Bags:
    """Indices for each feature of each sample: all of a feature first, as torchrec's jagged tensors have them."""

    def __init__(self, values, lengths):
        self.values, self.lengths = values, lengths


class Known(Bags):
    """Bags that torch takes apart."""


class Rows:
    """A tensor with a row for each sample, which torch takes apart."""

    def __init__(self, x):
        self.x = x


torch.utils._pytree.register_pytree_node(
    Known, lambda bags: ([bags.values, bags.lengths], None), lambda tensors, _: Known(*tensors)
)
torch.utils._pytree.register_pytree_node(Rows, lambda rows: ([rows.x], None), lambda tensors, _: Rows(*tensors))


class OnBags(nn.Module):
    """The mean of each bag of two features."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(7, 3)

    def forward(self, bags, beside=None):
        offsets = bags.lengths.cumsum(0) - bags.lengths
        y = self.table(bags.values, offsets).unflatten(0, (2, -1)).sum(0)  # (samples, 3)
        return y if beside is None else y * beside.x


def bags_of(x, kind=Bags):
    lengths = (x[:, :2].abs() * 3).long().t().reshape(-1) % 3
    starts = (x[:, :2].exp() * 9).long().t().reshape(-1)
    values = [(start + torch.arange(n)) % 7 for start, n in zip(starts, lengths.tolist(), strict=True)]
    return kind(torch.cat(values), lengths)


ALONE = {kind: Case(OnBags, partial(bags_of, kind=kind)) for kind in (Bags, Known)}


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("case", ALONE.values(), ids=["opaque", "known to torch"])
def test_opaque_input_reaches_module_unchanged(case, plugin):
    assert_trained_alike(case, *boosted(case, PLUGINS[plugin](), 2))


@pytest.mark.parametrize("count", [7, 5, 1])
def test_opaque_batch_of_loader_keeps_its_weight(count):
    rows = torch.randn(count, 3, generator=torch.Generator().manual_seed(5))

    def gradient(n):
        def main():
            torch.manual_seed(1)
            model = OnBags()
            booster = fs.Booster(plugin=fs.DDPPlugin())
            model, opt, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
            (bags,) = booster.prepare_dataloader(
                rows, batch_size=count, collate_fn=lambda samples: bags_of(torch.stack(samples))
            )
            booster.backward(model(bags).square().mean(), opt)
            opt.step()
            return model.unwrap().table.weight

        return fs.run(main, mesh=fs.make_mesh({"data": n}))

    (expected,) = gradient(1)
    for found in (*gradient(2), *gradient(4)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", [Bags, Known])
def test_reproducible_opaque_input_raises(kind):
    def main():
        model = OnBags()
        booster = fs.Booster(plugin=fs.DDPPlugin(reproducible=True))
        model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
        x = torch.ones(8, 3)
        with torch.no_grad():  # nothing is cut
            assert model(bags_of(x, kind), Rows(x)).shape == (8, 3)
        model(bags_of(x, kind), beside=Rows(x))

    message = "a Bags is not sharded" if kind is Bags else "this device has . of the batch's"
    with pytest.raises((TypeError, ValueError), match=message):
        fs.run(main, mesh=fs.make_mesh({"data": 2}))


@pytest.mark.parametrize("kind", [Bags, Known])
def test_opaque_leaf_of_sharded_batch_raises(kind):
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params({"w": torch.ones(3)}, P(), mesh=mesh)

    def loss_fn(params, batch):
        return (batch["x"] * params["w"]).mean() * batch["bags"].lengths.sum()

    x = torch.ones(8, 3)
    batch = {"x": x, "bags": bags_of(x, kind)}
    message = r'\["bags"\]: a Bags is not sharded.*or P\(\) for it' if kind is Bags else "must have the same samples"
    with pytest.raises((TypeError, ValueError), match=message):
        fs.evaluate(loss_fn, mesh=mesh, batch=P("data"))(params, batch)
    whole = fs.evaluate(loss_fn, mesh=mesh, batch={"x": P("data"), "bags": P()})(params, batch)
    torch.testing.assert_close(whole, batch["bags"].lengths.sum().float())
