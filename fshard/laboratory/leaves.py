"""The leaves of a step as the lab shows them: a row for all layers, and the axes on its dims.

layers.*.q.weight   bf16[256, 256]   model | -   flat: data   2 leaves, 128 KiB, 16 KiB a device
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from fshard.explore.grid import Grid, GridBlock, plan_grid
from fshard.explore.svg import html_of
from fshard.laboratory.state import LabState
from fshard.laboratory.subject import overrides_on_mesh
from fshard.mesh.layout import Layout, Mesh, P
from fshard.mesh.layout.layout import bytes_on_devices
from fshard.mesh.layout.sharded import Sharded, ShardType, typeof
from fshard.mesh.layout.tree import flatten_with_paths
from fshard.parallelism.value import Parallelism
from fshard.plan.cost import Cost
from fshard.plan.program import LayeredModel
from fshard.tensor.plan import Plan
from fshard.transforms.patterns import named, parts_of

CELLS_OF_LINE = 3
"""The shards beside each other of a leaf with one row of them: more are too small to be read."""

BATCH = "batch"
"""The pattern of the batch."""

_ROLES = {
    "pipe": "stages",
    "replica": "samples, without ZeRO",
    "data": "samples, ZeRO",
    "expert": "samples, experts",
    "seq": "tokens",
}
"""The shared part of a step by axis; devices along all other axes share layers."""


@dataclass(frozen=True)
class LeafGroup:
    """A parameter of a layer, which all layers have; or one beside the layers.

    Args:
        pattern: its name, with "*" for the number of the layer.
        name: of the first one.
        type: its dtype, shape and spec.
        count: of the layers.
        numbers: of the leaves, in the order of all parameters of the program.
    """

    pattern: str
    name: str
    type: ShardType
    count: int
    numbers: tuple[int, ...] = ()


def axes_of(plan: Parallelism) -> list[dict[str, Any]]:
    """Return the axes of the mesh, with what devices along them share."""
    axes = list[dict[str, Any]]()
    for name, size in plan.axes.items():
        axes.append({"name": name, "size": size, "role": _ROLES.get(name, "layers")})
    return axes


def leaf_groups(params: Any, model: LayeredModel) -> list[LeafGroup]:
    """Return the parameters of a program, those of all layers as one, in the order of the model.

    Args:
        params: of a full model by name, or a list of those of stages.
        model: of which a program may have fewer layers.
    """
    blocks = model.blocks
    names = [name for name, _ in model.build(1).named_parameters()]
    order = {pattern_of(name, blocks): number for number, name in enumerate(names)}
    groups = dict[str, LeafGroup]()
    for number, (name, x) in enumerate(_named_leaves(params)):
        pattern = pattern_of(name, blocks)
        count = model.layers if "*" in pattern else 1
        group = groups.setdefault(pattern, LeafGroup(pattern, name, typeof(x), count))
        groups[pattern] = replace(group, numbers=(*group.numbers, number))
    # The parts of a fused weight, which the model has not, are last.
    return sorted(groups.values(), key=lambda group: order.get(group.pattern, len(order)))


def _named_leaves(params: Any) -> Iterator[tuple[str, Sharded]]:
    trees: list[Any] = params if isinstance(params, list) else [params]
    for tree in trees:
        paths, leaves, _ = flatten_with_paths(tree)
        for path, x in zip(paths, leaves, strict=True):
            yield named(parts_of(path)).replace("[", ".").replace("]", ""), x


def pattern_of(name: str, blocks: str) -> str:
    """Return a name with "*" for the number of the layer, of a recomputed one as of others.

    >>> pattern_of("layers.3.q.weight", "layers"), pattern_of("head.weight", "layers")
    ('layers.*.q.weight', 'head.weight')
    """
    if not name.startswith(f"{blocks}."):
        return name
    number, _, rest = name.removeprefix(f"{blocks}.").partition(".")
    rest = rest.removeprefix("layer.")
    return f"{blocks}.*.{rest}" if number.isdecimal() else name


def layouts_shown(
    state: LabState, cost: Cost, groups: Sequence[LeafGroup], layer_plan: Plan | None
) -> dict[str, Any]:
    """Return the axes of the mesh, and a row for each group of leaves and for the batch."""
    plan = state.parallelism
    overrides = overrides_on_mesh(state)
    rows = list[dict[str, Any]]()
    for group in groups:
        movable = _movable_axes(group, plan, layer_plan)
        why = _why(group.name, layer_plan)
        if not movable and not why:
            why = _why_fixed(plan)
        row = _row(group, cost.mesh, movable, why)
        row["fixed"] = _fixed_axes(group, plan, movable, why)
        row["overridden"] = group.pattern in overrides
        rows.append(row)
    batch = batch_group(cost, plan)
    fixed = dict.fromkeys(plan.axes, "the samples and tokens of the batch follow the mesh")
    row = _row(batch, cost.mesh, [], "")
    rows.append({**row, "fixed": fixed, "overridden": False})
    return {"axes": axes_of(plan), "leaves": rows}


def _row(group: LeafGroup, mesh: Mesh, movable: Sequence[str], why: str) -> dict[str, Any]:
    spec = group.type.spec
    shape = group.type.shape
    item = group.type.dtype.itemsize
    present = dict(mesh.shape)
    dims = list[list[str]]()
    for axes in spec.dims(len(shape)):
        dims.append([axis for axis in axes if present[axis] > 1])
    flat = [axis for axis in spec.flat_axes or () if present[axis] > 1]
    everywhere = spec.replace(at={}, shape=None)
    local_shape = everywhere.local_shape(shape, mesh.shape, dict.fromkeys(mesh.axis_names, 0))
    dtype_text, _, _ = str(ShardType(group.type.dtype, shape, P())).partition("[")
    return {
        "pattern": group.pattern,
        "count": group.count,
        "shape": list(shape),
        "dtype": dtype_text,
        "dims": dims,
        "flat": flat,
        "type": str(group.type),
        "movable": [*movable],
        "bytes": group.count * prod(shape) * item,
        "per_device": group.count * prod(local_shape) * item,
        "why": why,
        "leaves": [*group.numbers],
    }


def _movable_axes(group: LeafGroup, plan: Parallelism, layer_plan: Plan | None) -> list[str]:
    """Return the axes that may be dragged onto another dim of a leaf."""
    is_of_experts = group.name.split(".")[-2:-1] == ["experts"]
    movable = list[str]()
    # Beside local axes a step shards along all others by flattened shards only.
    if not plan.in_stages and not plan.local_axes:
        movable += [axis for axis in plan.zero_axes if plan.axes[axis] > 1 and not is_of_experts]
    if layer_plan is not None and "model" in plan.inner_axes and plan.tensor > 1:
        is_of_product = group.name in {**layer_plan.layers, **layer_plan.replicated}
        if is_of_product:
            movable.append("model")
    return movable


def _fixed_axes(
    group: LeafGroup, plan: Parallelism, movable: Sequence[str], why: str
) -> dict[str, str]:
    """Return why each axis that shards a leaf cannot be dragged."""
    spec = group.type.spec
    fixed = dict[str, str]()
    for axis in spec.axes:
        if axis in movable:
            continue
        is_of_zero = axis in plan.zero_axes
        if plan.in_stages or (is_of_zero and plan.local_axes):
            fixed[axis] = _why_fixed(plan)
        elif is_of_zero:
            fixed[axis] = "experts are sharded by rules of their own"
        else:
            fixed[axis] = why or f"the layers need {axis} as it is"
    return fixed


def _why_fixed(plan: Parallelism) -> str:
    """Return why no axis of a leaf can be dragged."""
    if plan.in_stages:
        return "each stage has rules of its own"
    if plan.local_axes:
        return "beside axes of layers, tokens or experts ZeRO shards flattened leaves only"
    return "no axis of the mesh has several devices that ZeRO shards along"


def _why(name: str, layer_plan: Plan | None) -> str:
    """Return why a weight is sharded along the axes of layers as it is; "" if that is plain."""
    if layer_plan is None:
        return ""
    layer = layer_plan.layers.get(layer_plan.biases.get(name, name))
    if layer is not None:
        return f"{layer.style}: {layer.why}"
    if name in layer_plan.replicated:
        return f"replicated: {layer_plan.replicated[name]}"
    for path, reason in layer_plan.unsharded.items():
        if reason and name.startswith(f"{path}."):
            return f"{path} runs unsharded: {reason}"
    return ""


def batch_group(cost: Cost, plan: Parallelism) -> LeafGroup:
    """Return the first tensor of the batch."""
    _, leaves, _ = flatten_with_paths(cost.arguments[-1])
    first: Any = leaves[0]
    sample_axes = [axis for axis in ("replica", *plan.zero_axes) if axis in plan.axes]
    entries: list[Any] = [tuple(sample_axes)]
    if plan.token_axis is not None and first.dim() > 1:
        entries.append(plan.token_axis)
    return LeafGroup(BATCH, BATCH, ShardType(first.dtype, tuple(first.shape), P(*entries)), 1)


def shards_shown(groups: Mapping[str, LeafGroup], mesh: Mesh, pattern: str | None) -> Any:
    """Return the picture of the shards of a leaf; None without a leaf."""
    group = groups.get(pattern or "")
    if group is None:
        return None
    # The mesh is above the table, and the picture is as wide as its panel at most.
    kind = group.type
    layout = Layout(mesh, kind.spec, kind.memory)
    heading = (str(kind), bytes_on_devices(kind, layout))
    grid = replace(_in_lines_of_few(plan_grid(kind, mesh)), heading=heading)
    return {"pattern": group.pattern, "svg": html_of(grid)}


def _in_lines_of_few(grid: Grid) -> Grid:
    """Return a picture of one row of cells as lines of few, a block for each cell; others as is."""
    columns = grid.columns
    has_one_row = grid.rows is None or len(grid.rows.labels) == 1
    is_wide = columns is not None and len(columns.labels) > CELLS_OF_LINE
    has_one_block = len(grid.blocks) == 1 and len(grid.blocks[0]) == 1
    block = grid.blocks[0][0]
    if not (has_one_row and is_wide and has_one_block) or block is None:
        return grid

    assert columns is not None
    (cells,) = block.cells
    blocks = list[GridBlock]()
    for label, cell in zip(columns.labels, cells, strict=True):
        blocks.append(GridBlock(label, ((cell,),)))
    lines = list[tuple[GridBlock, ...]]()
    for first in range(0, len(blocks), CELLS_OF_LINE):
        lines.append(tuple(blocks[first : first + CELLS_OF_LINE]))
    return replace(grid, rows=None, columns=None, blocks=tuple(lines))
