"""`certify_module`: does a module train sharded as it does on one device?"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fshard as fs
from fshard.mesh.layout import Mesh
from fshard.optim.contract import copied
from fshard.optim.leaves import Leaves
from fshard.testing.certify.certificate import Certificate
from fshard.testing.certify.compare import SUBJECTS, certificate, gather_processes, judge
from fshard.testing.certify.runs import LOWER_DTYPES, Snapshot, in_float64, repeated, widen
from fshard.transforms.reproducible.randomness import keyed_random

Plugin = fs.DDPPlugin | fs.ZeroPlugin | fs.FSDPPlugin | fs.HybridParallelPlugin
_PLUGINS: tuple[Plugin, ...] = (fs.DDPPlugin(), fs.ZeroPlugin(stage=1), fs.ZeroPlugin(stage=2), fs.FSDPPlugin())
_CURE = (
    "For dropout give a plugin with reproducible=True. Else draw by generators that the factory seeds, and count nothing "
    "outside of the module."
)
_HINT = (
    ". State that is neither parameter nor buffer is private to each device: register it as a buffer; "
    "BatchNorm needs sync_batchnorm=True"
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
    """Train new modules over batches, sharded and on one device; compare parameters, buffers and loss after each
    step.

    This shows whether training depends on state that is neither parameter nor buffer: attributes, lists and objects of
    a module are private to each device. The sharded run is that of `Booster.step`, the serial one plain torch;
    both are in float64, as in `certify`.

    A module with dropout needs a plugin with `reproducible=True`, and is compared with a mesh of one device, bit for
    bit.

    Args:
        factory: builds the module, with the same parameters each time; it is called for every run.
        batches: one per step, full tensors: pairs (inputs, labels), or dicts of the module's arguments without a `loss`.
        mesh: the devices.
        loss: of (output, labels); None: the module's output has it as `.loss`.
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
    plugin = replace(_PLUGINS[plugin] if isinstance(plugin, int) else plugin, mesh=mesh)
    batches = [
        Leaves.of(batch).mapped(lambda x: x.to(mesh.device_type) if isinstance(x, Tensor) else x) for batch in batches
    ]
    if not plugin.reproducible:
        plugin = replace(
            plugin, precision=None, options={n: x for n, x in plugin.options.items() if n not in LOWER_DTYPES}
        )
        batches = [Leaves.of(batch).mapped(widen) for batch in batches]
    optimizer = optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    program = _ModuleProgram(factory, batches, loss, optimizer, mesh, seed, not plugin.reproducible)
    with nullcontext() if plugin.reproducible else in_float64():
        module, dtype = program.module(), None
        params, buffers = ([name for name, _ in each] for each in (module.named_parameters(), module.named_buffers()))
        names = Snapshot([], params, [*(f"buffers.{name}" for name in buffers), "loss"])
        if plugin.reproducible:
            alone = Mesh(tuple((axis, 1) for axis in mesh.axis_names), "virtual", mesh.device_type)
            serial = _train_sharded(program, replace(plugin, mesh=alone), params, buffers)
            serial = [step.mapped(fs.unshard) for step in serial]
        else:
            serial, dtype = repeated(partial(_train_serial, program, module), dict.fromkeys(SUBJECTS, _CURE))
        sharded = _train_sharded(program, plugin, params, buffers)
    rows = judge(serial, sharded, names, type(plugin).__name__, dict.fromkeys(SUBJECTS, _HINT), dtype)
    return certificate(mesh, rows, len(batches), dtype)


@dataclass(frozen=True)
class _ModuleProgram:
    factory: Callable[[], nn.Module]
    batches: list[Any]
    loss: Callable[..., Tensor] | None
    optimizer: Callable[[Iterable[nn.Parameter]], Any]
    mesh: Mesh
    seed: int
    wide: bool

    def module(self) -> nn.Module:
        """Build a module on the mesh's kind of device."""
        with keyed_random(self.seed):
            module = self.factory().to(self.mesh.device_type)
        return module.double() if self.wide else module


def _train_sharded(
    program: _ModuleProgram, plugin: Plugin, names: Sequence[str], buffers: Sequence[str]
) -> list[Snapshot]:
    """Train by `Booster.step`."""
    booster, module, snapshots = fs.Booster(plugin), program.module(), list[Snapshot]()
    state = booster.init(module, program.optimizer(module.parameters()), program.loss)
    for batch in program.batches:
        state, metrics = booster.step(state, batch)
        trees = copied(state.params), copied(state.buffers)
        params, after = (tree if isinstance(tree, Mapping) else ChainMap(*tree) for tree in trees)  # of stages
        values = [params[name] for name in names], [*(after[name] for name in buffers), metrics["loss"]]
        snapshots.append(Snapshot([], *values).mapped(gather_processes))
    return snapshots


def _train_serial(program: _ModuleProgram, start: nn.Module, key: int) -> list[Snapshot]:
    """Train a new module in torch's own loop."""
    module, snapshots = program.module(), list[Snapshot]()
    if not all(map(torch.equal, start.parameters(), module.parameters())):
        raise ValueError("certify_module: factory must build equal parameters each time. Seed all that it draws.")
    optimizer = program.optimizer(module.parameters())
    for step, batch in enumerate(program.batches):
        with keyed_random(program.seed, key, step), torch.enable_grad():
            output = module(**batch).loss if program.loss is None else program.loss(module(batch[0]), batch[1])
            loss = output.mean()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        after = [*module.buffers(), loss]
        snapshots.append(
            Snapshot([], *([x.detach().clone() for x in leaves] for leaves in (module.parameters(), after)))
        )
    return snapshots
