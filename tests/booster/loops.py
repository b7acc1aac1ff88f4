"""Loops as torch's users write them: of torch alone, or boosted by a plugin, in stages too."""

from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

import fshard as fs
from fshard.booster.plugins import Plugin
from tests.helpers.training import momentum

PLUGINS = {
    "ddp": fs.DDPPlugin,
    "zero 1": partial(fs.ZeroPlugin, stage=1),
    "zero 2": partial(fs.ZeroPlugin, stage=2),
    "fsdp": fs.FSDPPlugin,
    "stages": partial(fs.HybridParallelPlugin, pipeline=2, microbatches=2, zero_stage=2),
}


class Loop:
    """A model and its optimizer in a loop: of torch alone, or boosted.

    Args:
        make: returns the model; it draws by seed 1.
        plugin: or a Booster; None: torch alone.
        optimizer, schedule: return the optimizer of a model, and the scheduler of an optimizer.
        loader: of torch.
        criterion: of the model's output and the labels.
    """

    def __init__(
        self,
        make,
        plugin=None,
        optimizer=momentum,
        *,
        schedule=None,
        loader=None,
        criterion=nn.functional.cross_entropy,
    ):
        torch.manual_seed(1)
        self.module = self.model = make()
        self.opt = optimizer(self.model)
        self.loader = loader
        self.criterion = criterion
        self.schedule = schedule and schedule(self.opt)
        self.booster = fs.Booster(plugin) if isinstance(plugin, Plugin) else plugin
        self.is_staged = plugin is not None and self.booster.plugin.in_stages()
        if plugin is not None:
            five = self.booster.boost(self.model, self.opt, criterion, loader, self.schedule)
            self.model, self.opt, self.criterion, self.loader, self.schedule = five

    def part(self, x):
        """Return this device's rows of a batch; in stages, and by torch alone, all of them."""
        if self.booster is None or self.is_staged:
            return x
        return x.chunk(fs.axis_size("data"))[fs.axis_index("data")]

    def backward(self, loss, *, sync=True):
        if self.booster is None:
            loss.backward()
        else:
            with nullcontext() if sync else self.booster.no_sync(self.model, self.opt):
                self.booster.backward(loss, self.opt)

    def accumulate(self, x, y=None, *, sync=True):
        """Add the gradient of a batch, of which this device has its part; return the loss."""
        if self.is_staged:
            return self.booster.execute_pipeline(
                iter([(x, y)]), self.model, self.criterion, self.opt
            )["loss"]
        loss = self.criterion(self.model(x), y)
        self.backward(loss, sync=sync)
        return loss.detach()

    def step(self, *batch, clip=None, set_to_none=True):
        """Take a step along the gradients, also those of a batch if there is one; return its loss."""
        loss = self.accumulate(*batch) if batch else None
        if clip is not None and self.booster is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        elif clip is not None:
            self.booster.clip_grad_norm(self.opt, clip)
        self.opt.step()
        self.opt.zero_grad(set_to_none)
        return loss

    def output(self, x):
        """Return the model's output in eval mode, of all rows."""
        self.model.eval()
        with torch.no_grad():
            if not self.is_staged:
                return self.model(x)
            batch = iter([(x, x)])
            options = {"return_loss": False, "return_outputs": True}
            return self.booster.execute_pipeline(
                batch, self.model, lambda y, _: y.mean(), **options
            )["outputs"]

    def state(self):
        """Return copies of parameters and buffers."""
        module = self.module if self.booster is None else self.model.unwrap()
        return {name: x.clone() for name, x in module.state_dict().items()}


def mesh_of(plugin, n):
    """Return the mesh of n devices, of which stages need two for each part of a batch."""
    return fs.make_mesh({"data": n // 2, "pipe": 2} if plugin.in_stages() else {"data": n})


def on_devices(body, plugin, n, make, *args, **options):
    """Return what each of n devices returns of a body that is given its loop."""
    return fs.run(lambda: body(Loop(make, plugin, *args, **options)), mesh=mesh_of(plugin, n))


def assert_close(states, expected, tolerance=1e-12):
    """Compare the states of all devices with one."""
    for state in states:
        torch.testing.assert_close(dict(state), dict(expected), rtol=tolerance, atol=tolerance)


def unequal_bits(state, expected):
    """Return the names of tensors whose bits differ."""
    return [name for name, x in expected.items() if not torch.equal(x, state[name])]
