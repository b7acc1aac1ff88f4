"""`certify_module`: does a module train sharded as it does on one device?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard.errors import LayoutError
from fshard.mesh.layout import Mesh
from fshard.optim.contract import copied
from fshard.optim.leaves import Leaf, Leaves
from fshard.testing.certify.bounds import Comparison, Reference, bounded, equal_bits, judge
from fshard.testing.certify.certificate import Certificate
from fshard.testing.certify.runs import RandomDraws, Snapshot, check_repeatable, default_dtype, perturb
from fshard.testing.certify.shards import gather_processes, largest, widen
from fshard.transforms.reproducible.randomness import keyed_random

Plugin = fs.DDPPlugin | fs.ZeroPlugin | fs.FSDPPlugin | fs.HybridParallelPlugin
_CURE = (
    "For dropout give a plugin with reproducible=True. Else draw by generators that the factory seeds, and count nothing "
    "outside of the module."
)
_REASON = (
    "the module may keep state that is neither parameter nor buffer: each device has its own. Register it as a buffer. "
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
    own = replace(_plugin_of(plugin) if isinstance(plugin, int) else plugin, mesh=mesh)
    if own.precision is not None:
        raise LayoutError(f"certify_module: plugin must compute in the parameters' own dtype; got {own.precision=}.")
    given = [
        Leaves.of(batch).mapped(lambda x: x.to(mesh.device_type) if isinstance(x, Tensor) else x) for batch in batches
    ]
    task = _Task(factory, given, loss, optimizer or _sgd, mesh, seed)
    start = task.module()
    params, buffers = ([name for name, _ in each] for each in (start.named_parameters(), start.named_buffers()))
    comparison = Comparison(_reference(task, own, start), _sharded_run(task, own, params, buffers))
    labels = [*(f"buffers.{name}" for name in buffers), "loss"]
    rows = judge(comparison, type(own).__name__, params, labels, lambda step: lambda what, place: _REASON)
    return Certificate(mesh, len(given), own.reproducible, tuple(rows))


def _plugin_of(stage: Literal[0, 1, 2, 3]) -> Plugin:
    if stage in (1, 2):
        return fs.ZeroPlugin(stage=stage)
    return fs.FSDPPlugin() if stage == 3 else fs.DDPPlugin()


def _sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class _Task:
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


def _sharded_run(task: _Task, plugin: Plugin, names: Sequence[str], buffer_names: Sequence[str]) -> list[Snapshot]:
    """Train by `Booster.step`."""
    booster, module, snapshots = fs.Booster(plugin), task.module(), list[Snapshot]()
    state = booster.init(module, task.optimizer(module.parameters()), task.loss)
    for batch in task.batches:
        state, metrics = booster.step(state, batch)
        params, buffers = (_by_name(copied(tree)) for tree in (state.params, state.buffers))
        after = [*(buffers[name] for name in buffer_names), metrics["loss"]]
        snapshots.append(Snapshot([], [params[name] for name in names], after).mapped(gather_processes))
    return snapshots


def _by_name(tree: Any) -> Mapping[str, Leaf]:
    """Merge the dicts of stages."""
    return tree if isinstance(tree, Mapping) else {name: x for each in tree for name, x in each.items()}


def _serial_run(
    task: _Task,
    start: nn.Module,
    draws: TorchDispatchMode,
    *,
    wide: bool = False,
    sign: int = 0,
    shifts: Sequence[Sequence[Leaf]] | None = None,
    key: str = "serial",
) -> list[Snapshot]:
    """Train in torch's own loop; `wide` in float64, where `sign` moves the parameters by a rounding, `shifts` the gradients."""
    snapshots: list[Snapshot] = []
    with default_dtype(wide), draws:
        module = _started(task, start, wide, sign)
        params = [*module.parameters()]
        optimizer = task.optimizer(params)
        for turn, batch in enumerate(task.batches):
            with keyed_random(task.seed, key, turn), torch.enable_grad():
                loss = _loss(module, Leaves.of(batch).mapped(widen) if wide else batch, task.loss)
                loss.backward()
            grads = [None if p.grad is None else p.grad.to_dense().clone() for p in params]
            for i, p in enumerate(params if shifts is not None else ()):
                p.grad = None if p.grad is None else p.grad.to_dense() + shifts[turn][i]  # pyright: ignore[reportOptionalSubscript]
            optimizer.step()
            optimizer.zero_grad()
            snapshots.append(Snapshot(grads, *_values(module, loss)))
    return snapshots


@torch.no_grad()
def _started(task: _Task, start: nn.Module, wide: bool, sign: int) -> nn.Module:
    """Build a module with the parameters and buffers of `start`, in float64 moved by a rounding."""
    module, signs = task.module(), torch.Generator().manual_seed(task.seed)
    if wide:
        module.double()
    values = _values(start)[0] + _values(start)[1], [*module.parameters(), *module.buffers()]
    for x, own in zip(*values, strict=True):
        if not wide and not torch.equal(x, own):
            raise ValueError("certify_module: factory must build equal parameters each time. Seed all that it draws.")
        own.copy_(perturb(x, sign, signs) if sign else x)
    return module


def _values(module: nn.Module, *others: Tensor) -> tuple[list[Leaf], list[Leaf]]:
    return (
        [x.detach().clone() for x in module.parameters()],
        [x.detach().clone() for x in (*module.buffers(), *others)],
    )


def _loss(module: nn.Module, batch: Any, loss: Callable[..., Tensor] | None) -> Tensor:
    if loss is None:
        return module(**batch).loss.mean()
    inputs, labels = batch
    return loss(module(inputs), labels).mean()


def _reference(task: _Task, plugin: Plugin, start: nn.Module) -> Reference:
    """Train on one device, twice, and in float64 for the bounds."""
    first = Snapshot([], *_values(start, torch.zeros(())))
    if plugin.reproducible:
        one = Mesh(tuple((name, 1) for name in task.mesh.axis_names), "virtual", task.mesh.device_type)
        names = ([name for name, _ in each] for each in (start.named_parameters(), start.named_buffers()))
        serial = _sharded_run(task, replace(plugin, mesh=one), *names)
        return equal_bits(first, [snapshot.mapped(fs.unshard) for snapshot in serial])
    draws = RandomDraws()
    serial, again = (
        _serial_run(task, start, draws.record()),
        _serial_run(task, start, RandomDraws().record(), key="again"),
    )
    check_repeatable("certify_module", serial, again, dict.fromkeys(Snapshot._fields, _CURE))
    exact = _serial_run(task, start, draws.repeat(), wide=True)
    summands = [task.mesh.size * max(map(largest, step.grads), default=0.0) for step in exact]

    def perturbed_run(sign: int, shifts: list[list[Leaf]]) -> list[Snapshot]:
        return _serial_run(task, start, draws.repeat(), wide=True, sign=sign, shifts=shifts)

    return bounded(first, serial, exact, summands, perturbed_run)
