"""What is set at `model.module` between the steps of a model in stages: the same, whichever device has the stage."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fshard as fs
from tests.loops import momentum


class Counting(nn.Module):
    """Keeps a count, and whether it was called."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.begun, self.scale = nn.Linear(3, 3), 0, False, 1.0

    def forward(self, x):
        self.calls = min(self.calls + 1, 3)
        y = self.layer(x) / self.calls * self.scale
        if not self.begun:
            self.begun, y = True, y * 2
        self.scale *= 0.5
        return y


def make(kind):
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(4))).double()


def batch(step):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def alone(kind, act, steps=6):
    model, losses = make(kind), []
    opt = momentum(model)
    for step in range(steps):
        act(model[1], step)
        loss = model(batch(step)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def in_stages(kind, act, steps=6, **options):
    model, losses = make(kind), []
    booster = fs.Booster(plugin=fs.HybridParallelPlugin(pipeline=2, microbatches=2, **options))
    model, opt, *_ = booster.boost(model, momentum(model))
    for step in range(steps):
        act(model.module[1], step)
        x = batch(step)
        result = booster.execute_pipeline(iter([(x, x)]), model, lambda y, _: y.square().mean(), opt)
        opt.step()
        opt.zero_grad()
        losses.append(result["loss"].item())
    model.unwrap()
    return losses


def same_count(layer, step):
    if step == 4:
        layer.calls = 3


def same_flag(layer, step):
    if step:
        layer.begun = True


def other_count(layer, step):
    layer.calls = 0


def other_flag(layer, step):
    layer.begun = step % 2 == 0


def more(layer, step):
    layer.calls += 1


def another_kind(layer, step):
    if step == 3:
        layer.calls = 0.5
    if step == 4:
        layer.scale = 1


@pytest.mark.parametrize("act", [same_count, same_flag, other_count, other_flag, more, another_kind])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_number_that_a_forward_keeps_is_set(act, schedule):
    for losses in fs.run(lambda: in_stages(Counting, act, schedule=schedule), mesh=fs.make_mesh({"pipe": 2})):
        torch.testing.assert_close(losses, alone(Counting, act), rtol=1e-9, atol=1e-12)


np = pytest.importorskip("numpy")


class Scaled(nn.Module):
    """Multiplies by what stands in tables, arrays, tensors and objects, small and large."""

    def __init__(self):
        super().__init__()
        self.layer, self.tensor, self.object = nn.Linear(3, 3), torch.ones(3), SimpleNamespace(row=[1.0])
        self.small, self.large, self.table = [1.0], [1.0] * 5000, dict.fromkeys(range(5000), 1.0)
        self.array, self.wide, self.nested = np.ones(1), np.ones(20000), {"a": {"b": [1.0]}}

    def forward(self, x):
        y = self.layer(x) * self.tensor * self.small[0] * self.large[0] * self.table[0] * self.nested["a"]["b"][0]
        return y * self.object.row[0] * float(self.array[0]) * float(self.wide[0])


def factor(step):
    return 1 / (step + 2)


def by_data(layer, step):
    layer.tensor.data = torch.full((3,), factor(step), dtype=torch.float64)


def by_numpy(layer, step):
    layer.tensor.numpy()[:] = factor(step)


def small(layer, step):
    layer.small[0] = factor(step)


def large(layer, step):
    layer.large[0] = factor(step)


def table(layer, step):
    layer.table[0] = factor(step)


def nested(layer, step):
    layer.nested["a"]["b"][0] = factor(step)


def within_object(layer, step):
    layer.object.row[0] = factor(step)


def array(layer, step):
    layer.array[0] = factor(step)


def wide(layer, step):
    layer.wide[0] = factor(step)


def others(layer, step):
    layer.small, layer.object, layer.array = [factor(step)], SimpleNamespace(row=[0.5]), np.full(1, factor(step + 1))
    if step % 2:
        layer.small[0] *= 2
        layer.object.row[0] *= 2


def as_number(layer, step):
    layer.array = [[factor(step)], factor(step) * torch.ones(1, dtype=torch.float64)][step % 2]


ACTS = [by_data, by_numpy, small, large, table, nested, within_object, array, wide, others, as_number]


@pytest.mark.parametrize("act", ACTS)
def test_what_is_changed_within_attributes_is_followed(act):
    for losses in fs.run(lambda: in_stages(Scaled, act), mesh=fs.make_mesh({"pipe": 2})):
        torch.testing.assert_close(losses, alone(Scaled, act), rtol=1e-9, atol=1e-12)


class Leading(nn.Module):
    """Has an object that leads to a layer: the stage's is a copy."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.helper = SimpleNamespace(layer=self.layer, scale=1.0)

    def forward(self, x):
        return self.helper.layer(x) * self.helper.scale


def in_helper(layer, step):
    layer.helper.scale = factor(step)


def test_what_leads_to_a_layer_is_not():
    with pytest.raises(fs.ModuleError, match=r"^1\.helper of model\.module was set or changed after"):
        fs.run(lambda: in_stages(Leading, in_helper), mesh=fs.make_mesh({"pipe": 2}))


class Noting(nn.Module):
    """Notes what it does in an object, in tensors of a list and in a small table, and reads none of it."""

    def __init__(self):
        super().__init__()
        self.layer, self.notes = nn.Linear(3, 3), SimpleNamespace(calls=0, means=[])
        self.sums = [torch.zeros(3)]

    def forward(self, x):
        self.notes.calls += 1
        self.notes.means.append(x.mean().item())
        with torch.no_grad():
            self.sums[0].add_(x.mean(0))
        return self.layer(x)


def nothing(layer, step):
    pass


@pytest.mark.filterwarnings("default::UserWarning")
def test_what_a_stage_notes_in_objects_is_of_no_concern_to_others():
    for losses in fs.run(lambda: in_stages(Noting, nothing), mesh=fs.make_mesh({"pipe": 2})):
        torch.testing.assert_close(losses, alone(Noting, nothing), rtol=1e-9, atol=1e-12)


class Growing(nn.Module):
    """Appends to a long list, sets an entry of a large table, and writes to an array, in each call."""

    def __init__(self, way):
        super().__init__()
        self.layer, self.way = nn.Linear(3, 3), way
        self.row, self.table, self.array = [0.0] * 5000, dict.fromkeys(range(5000), 0), np.zeros(10000)

    def forward(self, x):
        self.way(self)
        return self.layer(x)


def appended(layer):
    layer.row.append(1.0)


def counted(layer):
    layer.table[0] += 1


def added(layer):
    layer.array += 1


@pytest.mark.parametrize("where", ["reproducible", "stages"])
@pytest.mark.parametrize(("way", "name"), [(appended, "row"), (counted, "table"), (added, "array")])
def test_a_forward_that_changes_what_all_calls_share_is_told(way, name, where):
    def main():
        if where == "stages":
            return in_stages(lambda: Growing(way), nothing)
        booster = fs.Booster(plugin=fs.DDPPlugin(reproducible=True, slices=2))
        model, *_ = booster.boost(model := make(lambda: Growing(way)), momentum(model))
        return model(batch(0))

    with pytest.warns(UserWarning, match=rf"Growing\.{name}|\.{name} was changed by a forward, and is so large"):
        fs.run(main, mesh=fs.make_mesh({"pipe": 2} if where == "stages" else {"data": 1}))
