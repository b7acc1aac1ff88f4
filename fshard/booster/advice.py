"""`auto_plugin`: which plugin a model of this size needs on these devices, by what they would hold.

fits on one device            DDPPlugin
the optimizer's state does not    ZeroPlugin(stage=1), then stage=2
parameters do not             FSDPPlugin
nor do units or activations   HybridParallelPlugin: fewer layers on each device
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from fshard.booster.plugins import DDPPlugin, FSDPPlugin, HybridParallelPlugin, Plugin, ZeroPlugin
from fshard.errors import LayoutError
from fshard.mesh.mesh import Mesh, refuse_no_mesh
from fshard.optim.adam import adamw
from fshard.optim.following import followed
from fshard.optim.partition import Stage
from fshard.transforms.budget import budget
from fshard.transforms.functionalize import functionalize

_COLUMNS = ("parameters", "gathered", "gradients", "state", "activations", "together")


def auto_plugin(
    model: nn.Module, mesh: Mesh, memory: int, *, optimizer: Any = None, activations: int = 0, **options: Any
) -> Plugin:
    """Return the simplest plugin with which each device holds at most so much; its `why` is a table of what was counted.

    Stages are for rows of layers, an `nn.Sequential`, and are counted as equal parts.

    Args:
        model: any module, which may lie on the meta device: nothing is laid anywhere.
        mesh: the devices.  For stages they are laid anew, along "data" and "pipe".
        memory: bytes of each device.
        optimizer: what trains it; None: AdamW.
        activations: bytes that those of a device's part of a batch take, which stages divide.
        options: of the plugin, precision and so on.

    >>> import torch, fshard as fs
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(100, 100, device="meta") for _ in range(8)))
    >>> plugin = fs.auto_plugin(model, fs.make_mesh({"data": 4}), memory=700_000)
    >>> type(plugin).__name__, plugin.stage
    ('ZeroPlugin', 2)
    >>> print(plugin.why)
    bytes a device           parameters       gathered      gradients          state    activations       together  of 700,000
    DDP, stage 0                323,200              0        323,200        646,400              0      1,292,800  too much
    Zero, stage 1               323,200              0        323,200        161,600              0        808,000  too much
    Zero, stage 2               323,200              0        121,200        161,600              0        606,000  fits
    """
    refuse_no_mesh("auto_plugin", mesh)
    given = dict(model.named_parameters())
    opt = adamw() if optimizer is None else followed(optimizer, given, "auto_plugin").now()
    _, params, _ = functionalize(model)
    rows = ["".join(["bytes a device      ", *(f"{name:>15}" for name in _COLUMNS), f"  of {memory:,}"])]
    for plugin, parts, cut in _candidates(model, mesh, options):
        how = plugin.arranged(cut)
        counted = budget(params, how.rules, opt, cut, how.pieces or cut.axis_names, how.stage if how.pieces else 0)
        held = [-(-one // parts) for one in (*counted, activations)]
        fits = sum(held) <= memory
        numbers = [f"{one:>15,}" for one in (*held, sum(held))]
        rows.append("".join([f"{_name(plugin):20}", *numbers, "  fits" if fits else "  too much"]))
        if fits:
            return replace(plugin, why="\n".join(rows))
    raise LayoutError("auto_plugin: this model fits in no way:\n" + "\n".join(rows))


def _candidates(model: nn.Module, mesh: Mesh, options: dict[str, Any]) -> Iterator[tuple[Plugin, int, Mesh]]:
    """Yield plugins, the simplest first: into how many parts each cuts the model, and the mesh that is then along its batch."""
    yield DDPPlugin(mesh=mesh, **options), 1, mesh
    yield ZeroPlugin(mesh=mesh, stage=1, **options), 1, mesh
    yield ZeroPlugin(mesh=mesh, stage=2, **options), 1, mesh
    yield FSDPPlugin(mesh=mesh, **options), 1, mesh
    layers = len(model) if isinstance(model, nn.Sequential) else 0
    stages: tuple[Stage, Stage] = (1, 3)
    for parts in range(2, min(mesh.size, layers) + 1):
        if mesh.size % parts == 0:
            cut = Mesh((("data", mesh.size // parts), ("pipe", parts)), "abstract", "meta")
            for stage in stages:
                yield (
                    HybridParallelPlugin(pipeline=parts, microbatches=2 * parts, zero_stage=stage, **options),
                    parts,
                    cut,
                )


def _name(plugin: Plugin) -> str:
    name = type(plugin).__name__.removesuffix("Plugin").removesuffix("Parallel")
    cut = f" x {plugin.pipeline}" if isinstance(plugin, HybridParallelPlugin) else ""
    return f"{name}, stage {plugin.zero()}{cut}"
