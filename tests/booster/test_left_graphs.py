"""Losses that layers leave in attributes, as routers do: whoever adds them to another trains as with torch, or is told."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs

ROWS, WIDTH = 4, 5
STEPS = 3
PLUGINS = {
    "ddp": fs.DDPPlugin,
    "zero 2": lambda **more: fs.ZeroPlugin(stage=2, **more),
    "fsdp": fs.FSDPPlugin,
}


class Router(nn.Module):
    """Leaves what it thinks of its output; of several kinds, which say how."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(WIDTH, WIDTH), kind
        if kind in BEFORE:
            self.aux = BEFORE[kind]

    def forward(self, x):
        y = self.layer(x).tanh()
        loss = y.square().mean()
        self.aux = LEFT[self.kind](loss) if self.kind in LEFT else loss
        if self.kind == "added up":
            self.aux = loss + self.earlier
            self.earlier = self.earlier + 1
        return y


BEFORE = {"a number": 0.0, "None": None, "a tensor": torch.zeros(()), "a list": [], "a tuple": (), "a dict": {}}
LEFT = {
    "a list": lambda loss: [loss],
    "a tuple": lambda loss: (1, loss),
    "a dict": lambda loss: {"loss": loss, "name": "aux"},
    "nested": lambda loss: {"losses": [loss, loss * 2]},
}
KINDS = [*BEFORE, "not there", "nested", "checkpointed"]


def losses_in(aux):
    if isinstance(aux, torch.Tensor):
        return [aux]
    values = aux.values() if isinstance(aux, dict) else aux
    return [x for each in values if isinstance(each, (torch.Tensor, list)) for x in losses_in(each)]


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.routers, self.head, self.kind = nn.ModuleList(Router(kind) for _ in range(2)), nn.Linear(WIDTH, 1), kind

    def forward(self, x):
        for router in self.routers:
            x = checkpoint(router, x, use_reentrant=False) if self.kind == "checkpointed" else router(x)
        return self.head(x)


def batch(step, rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step)).double()


def trained(kind, plugin=None, calls=1, n=1):
    """Return the parameters after a loop whose loss has what routers have left after each of so many calls."""
    torch.manual_seed(0)
    model = Net(kind).double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    booster, whole = None, model
    if plugin is not None:
        booster = fs.Booster(plugin)
        model, opt, *_ = booster.boost(model, opt)
        whole = model.module
    for step in range(STEPS):
        if kind == "hooked midway" and step == 1:
            whole.routers[0].register_forward_hook(lambda module, args, output: output * 1.5)
        loss = 0.0
        for call in range(calls):
            rows = batch(10 * step + call, ROWS * (1 + call))
            place = 0 if plugin is None else fs.axis_index("data")
            own = rows.chunk(n)[place] if plugin is not None else rows
            loss = loss + model(own).square().mean()
            loss = loss + sum(x for router in whole.routers for x in losses_in(router.aux))
        loss.backward() if booster is None else booster.backward(loss, opt)
        opt.step()
        opt.zero_grad()
        if kind == "looked at":
            with torch.no_grad():
                model(batch(step))
            assert not whole.routers[0].aux.requires_grad
            model.unwrap() if booster is not None else None
    return [x.detach() for x in (model if booster is None else model.unwrap()).parameters()]


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_layers_leave_may_be_added_to_a_loss(kind, plugin):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fs.run(lambda: trained(kind, PLUGINS[plugin](), n=2), mesh=fs.make_mesh({"data": 2}))
    for own in found:
        torch.testing.assert_close(own, trained(kind), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_in_reproducible_mode_a_loss_made_of_it_is_an_error(kind):
    with pytest.raises(fs.errors.ModuleError, match=r"what a layer left in an attribute, beside the model's outputs"):
        fs.run(lambda: trained(kind, fs.DDPPlugin(reproducible=True, slices=1)), mesh=fs.make_mesh({"data": 1}))
