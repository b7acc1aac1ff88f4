"""`certify_module`: does a module train sharded as it does on one device?"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fshard as fs
from fshard.mesh.layout import Mesh
from fshard.optim.contract import copied
from fshard.optim.leaves import Leaf, Leaves
from fshard.testing.certify.bounds import Field, bounded, equal_bits, judge
from fshard.testing.certify.certificate import Certificate
from fshard.testing.certify.runs import Snapshot, Training
from fshard.testing.certify.shards import gather_processes, is_floating, widen
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
    a module are private to each device. The sharded run is that of `Booster.step`, the serial one plain torch. The
    bounds come from a run in float64, as in `certify`.

    A module with dropout needs a plugin with `reproducible=True`, and is compared with a mesh of one device, bit for
    bit.

    Args:
        factory: builds the module, with the same parameters each time; it is called for every run.
        batches: one per step, full tensors: pairs (inputs, labels), or dicts of the module's arguments without a `loss`.
        mesh: the devices.
        loss: of (output, labels); None: the module's output has it as `.loss`.
        optimizer: from parameters to an optimizer of torch; None: SGD with momentum.
        plugin: of the Booster, in the parameters' own precision; or a stage of ZeRO.
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
    own = replace(_PLUGINS[plugin] if isinstance(plugin, int) else plugin, mesh=mesh)
    if own.precision is not None:
        raise ValueError(f"certify_module: plugin must compute in the parameters' own dtype; got {own.precision=}.")
    given = [
        Leaves.of(batch).mapped(lambda x: x.to(mesh.device_type) if isinstance(x, Tensor) else x) for batch in batches
    ]
    optimizer = optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    program = _ModuleProgram(factory, given, loss, optimizer, mesh, seed)
    module = program.module()
    params, buffers = ([name for name, _ in each] for each in (module.named_parameters(), module.named_buffers()))
    if own.reproducible:
        one = Mesh(tuple((name, 1) for name in mesh.axis_names), "virtual", mesh.device_type)
        reference = equal_bits(_sharded_run(program, replace(own, mesh=one), params, buffers))
    else:
        start = Snapshot([], *_values(module, torch.zeros(())))
        cures = dict.fromkeys(Snapshot._fields, _CURE)
        training = Training(
            start, lambda wide, sign: _ModuleTrainer(program, module, wide, sign), len(given), seed, cures
        )
        reference = bounded(training)
    found = _sharded_run(program, own, params, buffers)
    labels = [*(f"buffers.{name}" for name in buffers), "loss"]
    hints: dict[Field, str] = {"params": _HINT, "buffers": _HINT}
    rows = judge(reference, found, type(own).__name__, hints, params, labels)
    return Certificate(mesh, len(given), own.reproducible, tuple(rows))


@dataclass(frozen=True)
class _ModuleProgram:
    factory: Callable[[], nn.Module]
    batches: list[Any]
    loss: Callable[..., Tensor] | None
    optimizer: Callable[[Iterable[nn.Parameter]], Any]
    mesh: Mesh
    seed: int

    def module(self) -> nn.Module:
        """Build a module on the mesh's kind of device."""
        with keyed_random(self.seed):
            return self.factory().to(self.mesh.device_type)


def _sharded_run(
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


class _ModuleTrainer:
    """Trains a new module in torch's own loop, from the parameters and buffers of `start`."""

    def __init__(self, program: _ModuleProgram, start: nn.Module, wide: bool, sign: int) -> None:
        self._program, self._wide, self._module = program, wide, program.module()
        if wide:
            self._module.double()
        draw, own = torch.Generator().manual_seed(program.seed), [*self._module.parameters(), *self._module.buffers()]
        with torch.no_grad():
            for x, y in zip([*start.parameters(), *start.buffers()], own, strict=True):
                if not wide and not torch.equal(x, y):
                    raise ValueError(
                        "certify_module: factory must build equal parameters each time. Seed all that it draws."
                    )
                y.copy_(widen(x, sign, torch.finfo(x.dtype).eps if is_floating(x) else 0.0, draw))
        self._params = [*self._module.parameters()]
        self._optimizer = program.optimizer(self._params)

    def gradients(self, step: int) -> list[Leaf]:
        batch, loss_fn = self._program.batches[step], self._program.loss
        batch = Leaves.of(batch).mapped(widen) if self._wide else batch
        with torch.enable_grad():
            if loss_fn is None:
                self._loss = self._module(**batch).loss.mean()
            else:
                self._loss = loss_fn(self._module(batch[0]), batch[1]).mean()
            self._loss.backward()
        return [None if p.grad is None else p.grad.to_dense().clone() for p in self._params]

    def update(self, grads: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
        for p, g in zip(self._params, grads, strict=True):
            p.grad = g
        self._optimizer.step()
        self._optimizer.zero_grad()
        return _values(self._module, self._loss)


def _values(module: nn.Module, loss: Tensor) -> tuple[list[Leaf], list[Leaf]]:
    params, after = module.parameters(), (*module.buffers(), loss)
    return [x.detach().clone() for x in params], [x.detach().clone() for x in after]
