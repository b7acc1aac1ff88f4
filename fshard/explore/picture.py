"""`visualize` and `picture`: layouts and bytes, displayed or as a value.

`picture` is pure: it returns a `Picture`, which prints as text, and which a notebook shows in
colour at the end of a cell. `visualize` displays that picture wherever it is called: printed in a
script, in colours where the terminal has them, displayed in a notebook, also within a cell. It
returns None, so it is never shown twice.

Only shape, dtype and layout are used: abstract meshes work, and nothing is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.explore.grid import Grid, plan_grid, plan_mesh
from fshard.explore.inventory import Branch, Leaf, meshes_of, take_stock
from fshard.explore.page import framed, is_report
from fshard.explore.svg import html_of, svg_of
from fshard.mesh.layout import Layout, Mesh, PyTree, ShardType, as_layout
from fshard.mesh.layout.sharded import Sharded
from fshard.mesh.spmd.run import device_of
from fshard.mesh.spmd.scope import here
from fshard.pipeline.schedule.schedule import Schedule
from fshard.pipeline.schedule.simulate import Simulation
from fshard.tables import Tabular

if TYPE_CHECKING:  # it is imported where a picture is shown
    from rich.console import RenderableType

_WIDE = 10_000  # a string has no edge to break lines at


@dataclass(frozen=True, repr=False)
class Picture:
    """A picture of a tensor or of a tree: text when printed, coloured in a notebook.

    Args:
        plan: of the picture, from `picture`.

    >>> import fshard as fs
    >>> from fshard import P
    >>> from fshard.explore.picture import picture
    >>> picture((4,), layout=fs.Layout(fs.make_mesh({"data": 2}), P("data"))).svg[:4]
    '<svg'
    """

    plan: Grid | Branch

    @property
    def svg(self) -> str:
        """The picture of a tensor as an SVG document, to be written to a file."""
        if isinstance(self.plan, Branch):
            raise TypeError(
                "The picture of a tree is no SVG. Take the picture of one of its leaves."
            )
        return svg_of(self.plan)

    def __rich__(self) -> RenderableType:
        from fshard.explore.outline import tree_of
        from fshard.explore.text import text_of

        if isinstance(self.plan, Branch):
            return tree_of(self.plan)
        return text_of(self.plan)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(
            file=StringIO(),
            force_terminal=False,
            force_jupyter=False,
            color_system=None,
            width=_WIDE,
        )
        with console.capture() as shown:
            console.print(self)
        lines = shown.get().rstrip().split("\n")
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from fshard.explore.outline import outline_of

        if isinstance(self.plan, Branch):
            return outline_of(self.plan)
        return html_of(self.plan)


def picture(
    x: PyTree, *, layout: Layout | None = None, dtype: torch.dtype = torch.float32
) -> Picture:
    """Return the picture of the layout of a tensor, of every tensor of a tree, or of a mesh.

    Nothing is sent.

    Args:
        x: a `Sharded`, a tensor, a shape, any tree of the first two, or a mesh.
        layout: required for a tensor or a shape; replaces that of a `Sharded`. None for a tree.
        dtype: of a shape.

    >>> import fshard as fs
    >>> from fshard import P
    >>> from fshard.explore.picture import picture
    >>> mesh = fs.make_mesh({"data": 2, "model": 2})
    >>> picture((4, 6), layout=fs.Layout(mesh, P("data", unreduced="model")))
    f32[4@data, 6]{U:model} on Mesh(data=2, model=2; virtual, cpu)
    96 B, 48 B on each of 4 devices
    <BLANKLINE>
                dim 1
                  0:6
    dim 0@data ┌───────┐
           0:2 │ Σ 0+1 │
               ├───────┤
           2:4 │ Σ 2+3 │
               └───────┘
    <BLANKLINE>
    Σ: still to be summed, over model
    """
    if isinstance(x, Mesh):
        return Picture(plan_mesh(x))
    if layout is not None:
        return Picture(_grid_in(layout, x, dtype))
    stock = take_stock(x)
    if isinstance(stock, Branch):
        return Picture(stock)
    return Picture(_grid_of_leaf(stock))


def _grid_in(layout: Layout, x: Any, dtype: torch.dtype) -> Grid:
    """Return the plan of a tensor or a shape in a layout."""
    shape = x
    if isinstance(x, Sharded | Tensor):
        shape = x.shape
        dtype = x.dtype
    is_shape = isinstance(shape, Sequence) and all(isinstance(length, int) for length in shape)
    if not is_shape:
        raise TypeError(
            f"layout must be a Layout of a tensor or a shape; got {type(layout).__name__} of {x!r}."
        )
    layout = as_layout(layout, x.mesh if isinstance(x, Sharded) else None)
    layout.check(tuple(shape))
    kind = ShardType(dtype, tuple(shape), layout.spec, layout.memory)
    return plan_grid(kind, layout.mesh)


def visualize(
    x: PyTree, *, layout: Layout | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Display the layout of a tensor, of every tensor of a tree, a mesh, a schedule or a table.

    In a terminal it is text, in a notebook a picture. A schedule of stages, and its simulation, are
    timelines. A value that prints as a table is displayed too, such as a placement of
    `fs.memory.place`, with its memory curve; the report of `fs.plan.cost` as its page, in a
    notebook.

    Where many devices run the same code (under torchrun, in `fs.run`) the first one displays it; of
    arrays on a mesh of some devices the first of these. Nothing is sent. For the arguments, and the
    picture as a value, see `picture`.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> from fshard.explore.picture import visualize
    >>> mesh = fs.make_mesh({"data": 3})
    >>> visualize(fs.device_put(torch.arange(7), fs.Layout(mesh, P.flat("data"))))
    i64[7]{flat:data} on Mesh(data=3; virtual, cpu)
    56 B, at most 24 B on each of 3 devices
    <BLANKLINE>
     flat@data
      0:3   3:6   6:7
    ┌─────┬─────┬─────┐
    │  0  │  1  │  2  │
    └─────┴─────┴─────┘
    >>> visualize({"w": fs.device_put(torch.ones(6, 4), fs.Layout(mesh, P("data"))), "step": 3})
    dict, in all 96 B, 32 B per device · Mesh(data=3; virtual, cpu)
    ├── step  3
    └── w  f32[6@data, 4]  96 B, 32 B per device
    >>> visualize(fs.pipeline_schedule("gpipe", stages=2, microbatches=2))
    gpipe: 2 microbatches, 2 stages on 2 devices
    device 0 │ F0 F1 ·  ·  ·  B0─── B1───
    device 1 │ ·  F0 F1 B0─── B1─── ·  ·
    time 9, bubble 1/3, at most 2 activations on a device
    """
    if isinstance(x, Tabular | Schedule | Simulation):
        shown: Any = x
        plan = None
        meshes: tuple[Mesh, ...] = ()
    else:
        shown = picture(x, layout=layout, dtype=dtype)
        plan = shown.plan
        meshes = meshes_of(plan) if isinstance(plan, Branch) else (plan.mesh,)

    if not _is_shown_here(meshes):
        return
    if not _in_notebook():
        _print(shown, plan)
        return
    display = sys.modules["IPython.display"].display
    if is_report(x):
        display(framed(x), raw=True)
    else:
        display(shown)


def _is_shown_here(meshes: Sequence[Mesh]) -> bool:
    """Return True for the first device of those that run the code; of some, for their first."""
    first = meshes[0] if meshes else None
    if first is not None and not first.is_member:
        return False
    if first is not None and first.numbers is not None:
        return device_of(first) == 0
    scope = here()
    is_first = scope is None or scope.device == 0
    return is_first and all(device_of(mesh) == 0 for mesh in meshes)


def _print(shown: Any, plan: Grid | Branch | None) -> None:
    """Print a picture, or something without a plan that prints as a table."""
    from rich.console import Console
    from rich.text import Text

    console = Console(force_jupyter=False)
    has_colours = plan is not None and console.is_terminal
    may_wrap = isinstance(plan, Branch) and console.is_terminal  # lines of a grid would not fit
    console.print(shown if has_colours else Text(str(shown)), soft_wrap=not may_wrap)


def _grid_of_leaf(leaf: Leaf) -> Grid:
    """Return the plan of a tensor with a layout; raise for anything else."""
    if leaf.type is None:
        hint = ""
        if leaf.text == "Layout":
            hint = " Give the tensor or shape: fs.visualize((8, 6), layout=layout)."
        raise TypeError(f"A picture needs a tensor; got {leaf.text}.{hint}")
    if leaf.layout is None:
        raise LayoutError(
            f"{leaf.type} has no mesh to draw. Give a layout: "
            'fs.visualize(x, layout=fs.Layout(mesh, P("data"))).'
        )
    return plan_grid(leaf.type, leaf.layout.mesh)


def _in_notebook() -> bool:
    """Return True in a kernel that shows pictures.

    IPython is never imported: in a notebook it is loaded.
    """
    ipython: Any = sys.modules.get("IPython")
    if ipython is None or "IPython.display" not in sys.modules:
        return False
    shell = ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
