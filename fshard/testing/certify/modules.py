"""`certify_module`: does a module train sharded as it does on one device?"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
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
_CURE = (
    "For dropout give a plugin with reproducible=True. Else factory must build equal parameters each time, by generators "
    "that it seeds; and nothing may be counted outside of the module."
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
    """Train new modules over batches, sharded and on one device; compare parameters, buffers and loss after each step.

    This shows whether training depends on state that is neither parameter nor buffer: attributes, lists and objects of
    a module are private to each device. The sharded run is that of `Booster.step`, the serial one plain torch; both are
    in float64, as in `certify`. An optimizer that takes signs may make a step of a rounding.

    A module with dropout needs a plugin with `reproducible=True`, and is compared with a mesh of one device, bit for bit.

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
    if not plugin.reproducible:
        options = {name: x for name, x in plugin.options.items() if name not in LOWER_DTYPES}
        plugin = replace(plugin, precision=None, options=options)
    batches = [on_device(batch, mesh, wide=not plugin.reproducible) for batch in batches]

    def module() -> nn.Module:
        with fs.keyed_random(seed):
            module = factory().to(mesh.device_type)
        return module if plugin.reproducible else module.double()

    new_optimizer = optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    first = module()
    params, buffers = (
        [name for name, _ in first.named_parameters()],
        [name for name, _ in first.named_buffers()],
    )

    def train(mesh: Mesh, *_: Any) -> list[Snapshot]:
        booster, model, snapshots = (
            fs.Booster(replace(plugin, mesh=mesh)),
            module(),
            list[Snapshot](),
        )
        state = booster.init(model, new_optimizer(model.parameters()), loss)
        for batch in batches:
            state, metrics = booster.step(state, batch)
            trees = (copied(tree) for tree in (state.params, state.buffers))
            after, moved = (
                tree if isinstance(tree, Mapping) else ChainMap(*tree) for tree in trees
            )  # of stages
            leaves = (
                [after[name] for name in params],
                [*(moved[name] for name in buffers), metrics["loss"]],
            )
            snapshots.append(Snapshot([], *leaves).mapped(gather_processes))
        return snapshots

    @torch.enable_grad()
    def train_serial(key: int) -> list[Snapshot]:
        model, snapshots = module(), list[Snapshot]()
        opt = new_optimizer(model.parameters())
        for step, batch in enumerate(batches):
            with fs.keyed_random(seed, key, step):
                mean = (
                    model(**batch).loss if loss is None else loss(model(batch[0]), batch[1])
                ).mean()
                mean.backward()
                opt.step()
            opt.zero_grad()
            trees = model.parameters(), (*model.buffers(), mean)
            snapshots.append(
                Snapshot([], *([x.detach().clone() for x in leaves] for leaves in trees))
            )
        return snapshots

    names = Snapshot([], params, [*(f"buffers.{name}" for name in buffers), "loss"])
    alone = Mesh(tuple((axis, 1) for axis in mesh.axis_names), "virtual", mesh.device_type)
    serial, hints = None if plugin.reproducible else train_serial, dict.fromkeys(SUBJECTS, _HINT)
    return certificate_of(mesh, alone, [type(plugin).__name__], train, names, hints, serial, _CURE)
