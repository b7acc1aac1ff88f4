"""`auto_plugin`: which plugin a model of this size needs on these devices, by what they would hold.

fits on one device            DDPPlugin
the optimizer's state does not    ZeroPlugin(stage=1), then stage=2
parameters do not             FSDPPlugin
nor do units or activations   HybridParallelPlugin: fewer layers on each device
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, cast

from torch import nn

from fshard.booster.plugins import DDPPlugin, FSDPPlugin, HybridParallelPlugin, Plugin, ZeroPlugin
from fshard.errors import LayoutError
from fshard.mesh.mesh import Mesh
from fshard.mesh.spec import as_axes
from fshard.optim.adam import adamw
from fshard.optim.source import optimizer_source
from fshard.transforms.budget import Budget, budget
from fshard.transforms.complaints import misfits
from fshard.transforms.takers import Taker, takers_of, wrong_for_all
from fshard.transforms.weighing import Table, counts_of_stages, in_the_abstract, not_counted


def auto_plugin(
    model: nn.Module, mesh: Mesh, memory: int, *, optimizer: Any = None, activations: int = 0, **options: Any
) -> Plugin:
    """Return the simplest plugin with which each device holds at most so much; its `why` is a table of what was counted.

    The device counts that holds most.  A plugin that the options make meaningless has a row that says why.

    Args:
        model: any module, which may be lazy or lie on the meta device: nothing is laid anywhere.
        mesh: the devices.  For stages they are laid anew, along "data" and "pipe".
        memory: bytes of each device.
        optimizer: what trains it; None: AdamW.
        activations: bytes that those of a device's part of a batch take on this mesh, if none are computed again.  Stages share
            them, and a device holds those of as many microbatches as its schedule says.
        options: of plugins, precision and so on: each is given those that it has.  Stages of a model that is no `nn.Sequential`
            need `blocks` and `sample`.  Unless said, `zero_stage` is 1 or 3, and there are two microbatches for each stage.

    >>> import torch, fshard as fs
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(100, 100, device="meta") for _ in range(8)))
    >>> plugin = fs.auto_plugin(model, fs.make_mesh({"data": 4}), memory=700_000)
    >>> type(plugin).__name__, plugin.stage
    ('ZeroPlugin', 2)
    >>> print(plugin.why)
    bytes a device           parameters         copies      gradients          state    activations       together  of 700,000
    DDP, stage 0                323,200              0        323,200        646,400              0      1,292,800  too much
    Zero, stage 1               323,200              0        323,200        161,600              0        808,000  too much
    Zero, stage 2               323,200              0        121,200        161,600              0        606,000  fits
    """
    given: dict[str, Any] = {"mesh": mesh, "memory": memory, "activations": activations}
    opt, takers = adamw() if optimizer is None else optimizer, _takers(model, mesh, options)
    wrong = not_counted(model, opt) | misfits(cast(Any, auto_plugin), given, activations=0)
    axis = filter(None, [takers[0].refusal({"axis": options.get("axis")})])
    if told := dict.fromkeys([*wrong.values(), *axis, *wrong_for_all(takers, options, ("mesh", "why"))]):
        raise LayoutError(f"auto_plugin: {'; '.join(told)}.")
    batch = activations * prod(n for axis, n in mesh.axes if axis in as_axes(options.get("axis") or mesh.axis_names))

    def counted(taker: Taker[Plugin]) -> Budget:
        plugin = taker.made(options)
        cut = {plugin.pipeline_axis: plugin.pipeline} if isinstance(plugin, HybridParallelPlugin) else {}
        source = optimizer_source(opt, dict(model.named_parameters()), "auto_plugin")
        return budget(plugin.arranged(in_the_abstract(mesh, cut)), model, source, batch)

    table = Table(memory)
    for taker in takers:
        if table.fits(_name(taker, options), partial(counted, taker)):
            return replace(taker.made(options), why=str(table))
    raise LayoutError(f"auto_plugin: this model fits in no way:\n{table}")


def _takers(model: nn.Module, mesh: Mesh, options: dict[str, Any]) -> list[Taker[Plugin]]:
    """Return plugins, the simplest first, and what is theirs unless it is said."""
    on = {"mesh": mesh if isinstance(mesh, Mesh) else None}  # pyright: ignore[reportUnnecessaryIsInstance]
    usual: list[tuple[type[Plugin], dict[str, Any]]] = [(DDPPlugin, on)]
    usual += [(ZeroPlugin, on | {"stage": stage}) for stage in (1, 2)]
    usual += [(FSDPPlugin, on)]
    for count in counts_of_stages(model, options, mesh):
        of_stages = {"pipeline": count, "microbatches": 2 * count}
        usual += [(HybridParallelPlugin, of_stages | {"zero_stage": stage}) for stage in (1, 3)]
    return takers_of(usual, options)


def _name(taker: Taker[Plugin], options: dict[str, Any]) -> str:
    own: dict[str, Any] = {"stage": 3 if taker.kind is FSDPPlugin else 0} | taker.own(options)
    stage = own.get("zero_stage", own["stage"])
    cut = f" x {own['pipeline']}" if "pipeline" in own else ""
    return f"{taker.kind.__name__.removesuffix('Plugin').removesuffix('Parallel')}, stage {stage}{cut}"
