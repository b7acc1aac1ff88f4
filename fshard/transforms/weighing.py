"""What is asked before plugins are compared, and the table that says how they were.

Whether there is anything to count, into how many stages a model may be cut, and on which mesh each plugin is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from reprlib import repr as shown
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fshard.errors import FshardError, LayoutError
from fshard.mesh.mesh import Mesh
from fshard.optim.source import optimizer_source
from fshard.transforms.budget import Budget
from fshard.transforms.complaints import complaints_of
from fshard.transforms.takers import reason
from fshard.transforms.torch_style import Model


class Table:
    """What was counted of several ways, and what of it fits.

    >>> table = Table(100)
    >>> table.fits("all on each device", lambda: Budget(50, 0, 50, 50, 0))
    False
    >>> table.fits("in pieces", lambda: Budget(10, 20, 10, 10, 0))
    True
    >>> print(table)
    bytes a device           parameters         copies      gradients          state    activations       together  of 100
    all on each device               50              0             50             50              0            150  too much
    in pieces                        10             20             10             10              0             50  fits
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        titles = "".join(f"{name:>15}" for name in (*Budget._fields, "together"))
        self.rows = [f"{'bytes a device':20}{titles}  of {memory:,}"]
        self._told, self._last = set[str](), ""

    def fits(self, name: str, counted: Callable[[], Budget]) -> bool:
        """Write down what is counted, or why it is not: once, and of several alike that follow each other of the first."""
        try:
            held = counted()
        except FshardError as error:
            kind, told = name.partition(",")[0], " ".join(reason(error).split())
            self.rows += [f"{name:20}  {told}"] if kind != self._last and told not in self._told else []
            self._told, self._last = {*self._told, told}, kind
            return False
        self._last = ""
        numbers, fits = "".join(f"{size:>15,}" for size in (*held, held.total)), held.total <= self.memory
        self.rows.append(f"{name:20}{numbers}  {'fits' if fits else 'too much'}")
        return fits

    def __str__(self) -> str:
        return "\n".join(self.rows)


def counts_of_stages(model: object, options: Mapping[str, Any], mesh: object) -> list[int]:
    """Return into how many stages a model may be cut: so that they divide the devices, and each has a layer, or a block.

    If that is none, return the least that divides the devices: of it is told then what is wrong.

    Args:
        model: of which an `nn.Sequential` alone has layers.
        options: may say "pipeline", the number itself, and "blocks", the paths of lists of these.
        mesh: the devices.

    >>> from fshard.mesh.make import make_mesh
    >>> counts_of_stages(nn.Sequential(*(nn.ReLU() for _ in range(5))), {}, make_mesh({"data": 8}))
    [2, 4]
    """
    parts: Mapping[str, nn.Module] = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    blocks = options.get("blocks") or [""] * isinstance(model, nn.Sequential)
    paths = [*blocks] if isinstance(blocks, list | tuple) else [blocks]
    layers = sum(len([*parts[path].named_children()]) for path in paths if path in parts)
    devices = mesh.size if isinstance(mesh, Mesh) else 1
    divide = [count for count in range(2, devices + 1) if devices % count == 0] or [2]
    fit = [count for count in divide if count <= layers] or divide[:1]
    return [count for count in fit if count == options.get("pipeline", count)] or fit[:1]


def in_the_abstract(mesh: Mesh, stages: Mapping[str, int]) -> Mesh:
    """Return a mesh of as many devices that are nowhere: as it is, or anew, for stages along an axis.

    >>> from fshard.mesh.make import make_mesh
    >>> in_the_abstract(make_mesh({"data": 8}), {"pipe": 2})
    Mesh(data=4, pipe=2; abstract, meta)
    """
    count = prod(stages.values())
    if mesh.size % count:
        raise LayoutError(f"pipeline={count} does not divide the {mesh.size} devices there are")
    return Mesh((("data", mesh.size // count), *stages.items()) if stages else mesh.axes, "abstract", "meta")


def not_counted(model: object, optimizer: object) -> dict[str, str]:
    """Return what is wrong with a model and its optimizer, by name."""
    if isinstance(model, Model):
        return {"model": "model is boosted already: ask before that"}
    if not isinstance(model, nn.Module):
        wrong = {"model": f"model is a Module, not {shown(model)}"}
        return wrong if isinstance(optimizer, torch.optim.Optimizer) else wrong | _wrong(optimizer, {})
    bare = [name for name, x in model.named_parameters() if is_lazy(x)]
    wrong = {"model": f"model has no shapes before its first call: {', '.join(bare)}"} if bare else {}
    return wrong | _wrong(optimizer, dict(model.named_parameters()))


def _wrong(optimizer: object, params: Mapping[str, Tensor]) -> dict[str, str]:
    told = complaints_of(lambda opt: optimizer_source(opt, params, "optimizer").now().init, optimizer)
    return {"optimizer": told[0].removeprefix("optimizer: ")} if told else {}
