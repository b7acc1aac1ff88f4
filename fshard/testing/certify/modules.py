"""`certify_module`: does a module train sharded as it does on one device?"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fshard as fs
from fshard.mesh.layout import Mesh
from fshard.optim.contract import copied
from fshard.testing.certificate import Certificate
from fshard.testing.certify.runs import (
    LOWER_DTYPES,
    SUBJECTS,
    Snapshot,
    certificate_of,
    gather_processes,
    on_device,
)

Plugin = fs.DDPPlugin | fs.ZeroPlugin | fs.FSDPPlugin | fs.HybridParallelPlugin
_PLUGINS: tuple[Plugin, ...] = (
    fs.DDPPlugin(),
    fs.ZeroPlugin(stage=1),
    fs.ZeroPlugin(stage=2),
    fs.FSDPPlugin(),
)
"""The plugin of each stage of ZeRO."""
_CURE = (
    "For dropout give a plugin with reproducible=True. Else factory must build equal parameters "
    "each time, by generators that it seeds; and nothing may be counted outside of the module."
)
_HINT = (
    ". State that is neither parameter nor buffer is private to each device: register it as a "
    "buffer; BatchNorm needs sync_batchnorm=True"
)


def certify_module(
    factory: Callable[[], nn.Module],
    batches: Iterable[Any],
    mesh: Mesh,
    *,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    plugin: Plugin | Literal[0, 1, 2, 3] = 3,
    seed: int = 0,
) -> Certificate:
    """Train new modules over batches, sharded and on one device; compare them after each step.

    Parameters, buffers and losses are compared. This shows whether training depends on state that
    is neither parameter nor buffer: attributes, lists and objects of a module are private to each
    device. The sharded run is that of `Booster.step`, the serial one plain torch; both are in
    float64, as in `certify`. An optimizer that takes signs may make a step of a rounding.

    A module with dropout needs a plugin with `reproducible=True`, and is compared with a mesh of
    one device, bit for bit.

    Args:
        factory: builds the module, with the same parameters each time; it is called for every run.
        batches: one per step, full tensors: pairs (inputs, labels), or dicts of the module's
            arguments.
        mesh: the devices.
        loss: of (output, labels), or of (output, batch) if the batch is a dict; None: the module's
            output has it as `.loss`.
        optimizer: from parameters to an optimizer of torch; None: SGD with momentum.
        plugin: of the Booster; or a stage of ZeRO.
        seed: of all random draws.

    >>> import torch, fshard as fs
    >>> class Whitened(torch.nn.Linear):
    ...     def forward(self, x):
    ...         self.largest = max(getattr(self, "largest", 0.0), x.abs().max().item())
    ...         return super().forward(x / self.largest)
    >>> batches = [(torch.randn(8, 3), torch.ones(8, 2)) for _ in range(2)]
    >>> mesh, loss = fs.make_mesh({"data": 2}), torch.nn.MSELoss()
    >>> certify_module(lambda: torch.nn.Linear(3, 2), batches, mesh, loss=loss).ok
    True
    >>> certify_module(lambda: Whitened(3, 2), batches, mesh, loss=loss).first.verdict
    'DIVERGENT'
    """
    if isinstance(plugin, int):
        plugin = _PLUGINS[plugin]
    plugin = replace(plugin, mesh=mesh)
    is_in_float64 = not plugin.reproducible
    if is_in_float64:
        options = {name: x for name, x in plugin.options.items() if name not in LOWER_DTYPES}
        plugin = replace(plugin, precision=None, options=options)
        if isinstance(plugin, fs.HybridParallelPlugin):
            plugin = replace(plugin, sample=on_device(plugin.sample, mesh, wide=True))
    program = _ModuleProgram(
        factory=factory,
        batches=[on_device(batch, mesh, wide=is_in_float64) for batch in batches],
        loss=loss,
        new_optimizer=optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        plugin=plugin,
        device_type=mesh.device_type,
        seed=seed,
    )

    model = program.new_module()
    params = [name for name, _ in model.named_parameters()]
    buffers = [name for name, _ in model.named_buffers()]
    del model  # before others are trained
    train = partial(_train_sharded, program, params, buffers)
    train_serial = partial(_train_serial, program) if is_in_float64 else None

    names = Snapshot([], params, [*[f"buffers.{name}" for name in buffers], "loss"])
    axes = [(axis, 1) for axis in mesh.axis_names]
    alone = Mesh(tuple(axes), "virtual", mesh.device_type)
    hints = dict.fromkeys(SUBJECTS, _HINT)
    stages = [type(plugin).__name__]
    return certificate_of(mesh, alone, stages, train, names, hints, train_serial, _CURE)


@dataclass(frozen=True)
class _ModuleProgram:
    """The arguments of `certify_module`, with all defaults."""

    factory: Callable[[], nn.Module]
    batches: list[Any]
    loss: Callable[..., Tensor] | None
    new_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    plugin: Plugin
    device_type: str
    seed: int

    def new_module(self) -> nn.Module:
        """Return a new module, the same each time."""
        with fs.keyed_random(self.seed):
            module = self.factory().to(self.device_type)
        return module if self.plugin.reproducible else module.double()


def _train_sharded(
    program: _ModuleProgram, params: list[str], buffers: list[str], mesh: Mesh, *_: Any
) -> list[Snapshot]:
    """Train by `Booster.step`; return the named parameters and buffers, and the loss, of steps."""
    booster = fs.Booster(replace(program.plugin, mesh=mesh))
    model = program.new_module()
    state = booster.init(model, program.new_optimizer(model.parameters()), program.loss)
    snapshots: list[Snapshot] = []
    for batch in program.batches:
        state, metrics = booster.step(state, batch)
        params_by_name = _by_name(copied(state.params))
        buffers_by_name = _by_name(copied(state.buffers))
        param_leaves = [params_by_name[name] for name in params]
        buffer_leaves = [buffers_by_name[name] for name in buffers]
        snapshot = Snapshot([], param_leaves, [*buffer_leaves, metrics["loss"]])
        snapshots.append(snapshot.mapped(gather_processes))
    return snapshots


def _by_name(tree: Any) -> Mapping[str, Any]:
    """Return leaves by name; those of stages are a list of one mapping each."""
    return tree if isinstance(tree, Mapping) else ChainMap(*tree)


@torch.enable_grad()
def _train_serial(program: _ModuleProgram, key: int) -> list[Snapshot]:
    """Train by plain torch."""
    model = program.new_module()
    opt = program.new_optimizer(model.parameters())
    snapshots: list[Snapshot] = []
    for step, batch in enumerate(program.batches):
        with fs.keyed_random(program.seed, key, step):
            if isinstance(batch, Mapping):
                output = model(**batch)
                labels: Any = batch
            else:
                output = model(batch[0])
                labels = batch[1]
            value = output.loss if program.loss is None else program.loss(output, labels)
            loss = value.mean()
            loss.backward()
            opt.step()
        opt.zero_grad()
        params: list[Any] = [x.detach().clone() for x in model.parameters()]
        buffers: list[Any] = [x.detach().clone() for x in (*model.buffers(), loss)]
        snapshots.append(Snapshot([], params, buffers))
    return snapshots
