"""`LayerPlans`: how each layer of a model is sharded, and why. `decide` makes them.

    column   the dim that a layer produces is sharded: heads, hidden units
    row      the layer that sums over that dim; its result is a partial sum
    words    a table of words, and the layer that scores them: rows by words

A fused weight, such as q, k and v in one, is a leaf for each part: `LayerPlans.split`.
"""

from __future__ import annotations

from collections import Counter, namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from fshard.errors import LayoutError
from fshard.mesh.layout import Mesh, P, as_written
from fshard.mesh.layout.arithmetic import chunk
from fshard.mesh.spmd.scope import here
from fshard.tables import Table, TableColumn, Tabular, aligned
from fshard.tensor.follow import EXPERTS
from fshard.tensor.modes import Mode
from fshard.tensor.sequence import Algorithm
from fshard.tensor.unsharded import run_operation

Style = Literal["column", "row", "words"]
SequenceMode = Algorithm | Literal["megatron"]
"""The algorithm of attention over a sharded sequence. With "megatron" norms and dropout alone are
sharded over tokens, along the axis of the layers."""


class LayerPlan(NamedTuple):
    """The sharding of one weight.

    Args:
        style: column, row or words.
        out: the dim of the weight that its result has.
        parts: lengths of the parts of a fused weight along that dim, each of which is sharded.
        shared: the largest number of devices that can share the dim.
        why: in words.
    """

    style: Style
    out: int
    parts: tuple[int, ...]
    shared: int
    why: str

    def fits(self, n: int) -> bool:
        """Return True if n devices can share the layer.

        Words may be uneven, if each device has some: 34 devices share 67 words, the last one has 1
        and all others 2; 40 devices do not, since 6 would have none.
        """
        if self.shared % n == 0:
            return True
        words_before_last = (n - 1) * chunk(self.shared, n)
        return self.style == "words" and words_before_last < self.shared


@dataclass(frozen=True, repr=False)
class LayerPlans(Tabular):
    """The layouts of a model's parameters along the axes of a plan: see `tensor_parallel`.

    Prints as lines, without the boxes of other tables.

    Args:
        mode: the axes that shard layers.
        layers: the plan of each sharded weight, by its name.
        shapes: of all parameters.
        biases: the weight of each bias that is sharded with it.
        replicated: weights of linear layers that are not sharded, and why.
        sequence: the axis that shards tokens.
        sequence_mode: the algorithm of attention.
        unsharded: modules that run on unsharded tensors, by their path, and why; "" if integers
            stay plain tensors.
        operations: operations in the model's own forward that run on unsharded tensors, by their
            name, and why.
        experts: the specs of experts' weights, which such modules use as they are stored.
        model: that the plan is made for.
    """

    mode: Mode
    layers: Mapping[str, LayerPlan]
    shapes: Mapping[str, tuple[int, ...]]
    biases: Mapping[str, str]
    replicated: Mapping[str, str]
    sequence: str | None = None
    sequence_mode: SequenceMode = "gather"
    unsharded: Mapping[str, str] = field(default_factory=dict[str, str])
    operations: Mapping[str, str] = field(default_factory=dict[str, str])
    experts: Mapping[str, P] = field(default_factory=dict[str, P])
    model: Any = field(default=None, repr=False, compare=False)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes, for `local=` of a step."""
        sequence_axes = (self.sequence,) if self.sequence else ()
        distinct = dict.fromkeys((*sequence_axes, *self.mode.axes))
        return tuple(distinct)

    @property
    def rules(self) -> dict[str, P]:
        """The spec of every parameter along the axes, for `fs.fsdp("data", within=plan.rules)`."""
        return {name: self.spec(name) for name in self.shapes}

    def spec(self, name: str) -> P:
        """Return the spec of a parameter."""
        layer = self._layer(name)
        if layer is None:
            return self.experts.get(name, P())
        mode = self.mode.next if layer.style == "row" else self.mode
        if name in self.biases:
            return mode.bias
        out, summed = mode.weight.dims(2)
        return P(out, summed) if layer.out == 0 else P(summed, out)

    def parts_of(self, name: str) -> tuple[tuple[int, ...], int]:
        """Return the lengths of the parts of a parameter, and their dim."""
        layer = self._layer(name)
        if layer is None:
            return (), 0
        dim = 0 if name in self.biases else layer.out
        return layer.parts, dim

    def _layer(self, name: str) -> LayerPlan | None:
        """Return the plan of a weight, or of the weight of a bias."""
        weight = self.biases.get(name, name)
        return self.layers.get(weight)

    def of_stages(self, stages: Sequence[nn.Module]) -> list[Self]:
        """Return the plan of each stage of the model, by the names that it has there."""
        # A tied parameter has several names, of which the plan has the first.
        name_of_parameter = {id(x): name for name, x in self.model.named_parameters()}
        planned_names: dict[str, str] = {}
        for name, x in self.model.named_parameters(remove_duplicate=False):
            planned_names[name] = name_of_parameter[id(x)]

        shapes_of_stages: list[dict[str, tuple[int, ...]]] = []
        uses: Counter[str] = Counter()
        for stage in stages:
            shapes = {name: tuple(x.shape) for name, x in stage.named_parameters()}
            shapes_of_stages.append(shapes)
            uses.update([planned_names[name] for name in shapes])

        layers: dict[str, LayerPlan] = {}
        for name, layer in self.layers.items():
            # `split` copies the parts, so stages would train two copies of a weight that they share.
            layers[name] = layer._replace(parts=()) if uses[name] > 1 else layer
        all_stages = replace(
            self,
            layers=_by_all_names(layers, planned_names),
            biases=_by_all_names(self.biases, planned_names),
            experts=_by_all_names(self.experts, planned_names),
        )
        return [replace(all_stages, shapes=shapes) for shapes in shapes_of_stages]

    def split(self, params: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return parameters by name, of fused weights a tuple of their parts: see `parts_class`."""
        split: dict[str, Any] = {}
        for name, x in params.items():
            lengths, dim = self.parts_of(name)
            if len(lengths) < 2:
                split[name] = x
                continue
            leaves: list[Tensor] = []
            for view in x.detach().split(lengths, dim):
                leaf = view.clone()  # contiguous, and without the memory of the other parts
                if x.requires_grad:
                    leaves.append(leaf.requires_grad_())
                else:  # a parameter that is never trained
                    leaves.append(nn.Parameter(leaf, requires_grad=False))
            split[name] = parts_class(dim, len(leaves))(*leaves)
        return split

    def joined(self, params: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return parameters by name, whose parts are concatenated."""
        joined: dict[str, Tensor] = {}
        for name, x in params.items():
            if isinstance(x, tuple):
                _, dim = self.parts_of(name)
                joined[name] = torch.cat([*x], dim)
            else:
                joined[name] = x
        return joined

    def table(self) -> Table:
        """Return the style of each layer, and why, as a table."""
        tokens = ""
        if self.sequence:
            tokens = f", tokens over {as_written((self.sequence,))} ({self.sequence_mode})"
        axes = as_written(self.mode.axes)
        title = f"{self.mode.kind} over {axes}{tokens}; all other parameters are replicated"

        columns = (
            TableColumn("layer"),
            TableColumn("style"),
            TableColumn("parts"),
            TableColumn("why", "source"),
        )
        table = Table(columns, title=title)
        for name, layer in self.layers.items():
            parts = " + ".join([str(length) for length in layer.parts])
            table.add(name, layer.style, parts, layer.why)
        for name, why in self.replicated.items():
            table.add(name, None, None, why)
        for path, why in self.unsharded.items():
            style = "experts" if why == EXPERTS else "unsharded"
            table.add(path, style, None, why)
        for name, why in self.operations.items():
            table.add(name, "unsharded", None, why)
        return table

    def __str__(self) -> str:
        table = self.table()
        return "\n".join([table.title, *aligned(table.texts())])

    @property
    def reduces_at_once(self) -> bool:
        """True if a partial sum is reduced by the operation that makes it.

        In the mode "megatron" it is reduced and scattered over tokens after the layer.
        """
        return self.sequence_mode != "megatron"

    def runs_unsharded(self, name: str, error: Exception) -> bool:
        """Return True if an operation without a rule, which has raised, runs unsharded."""
        return name in self.operations

    def run_operation(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on unsharded tensors."""
        return run_operation(func, args, kwargs)

    def check_sizes(self, mesh: Mesh) -> None:
        """Raise with all layers that the devices of a mesh cannot share."""
        axes = self.mode.next.hidden
        n = prod([mesh.shape[axis] for axis in axes])
        errors: list[str] = []
        for name, layer in self.layers.items():
            if not layer.fits(n):
                errors.append(f"{name} is shared by at most {layer.shared}")
        if errors:
            raise LayoutError(
                f"{n} devices along {as_written(axes)} must divide the heads and widths of all "
                f"sharded layers; {'; '.join(errors)}. Plan for this size: "
                f"fs.tensor_parallel(..., size={n})."
            )

    def mesh_of_arrays(self) -> Mesh | None:
        """Return the mesh of the axes, with the devices of this step; None outside of a step."""
        scope = here()
        if scope is None or not set(self.axes) <= set(scope.mesh.axis_names):
            return None
        zigzag = self.sequence if self.sequence_mode == "zigzag" else None
        return _mesh_of_arrays(scope.mesh, self.axes, zigzag, bool(scope.varying_axes))


@cache
def _mesh_of_arrays(
    mesh: Mesh, axes: tuple[str, ...], zigzag: str | None, is_varying: bool
) -> Mesh:
    """Return the mesh of some axes. Its arrays are those of a loss function if it `is_varying`."""
    return replace(mesh[axes], zigzag=zigzag, is_varying=is_varying)


def _by_all_names(values: Mapping[str, Any], planned_names: Mapping[str, str]) -> dict[str, Any]:
    """Return values by each name of their parameter, not only by the name that the plan has."""
    by_name: dict[str, Any] = {}
    for name, planned_name in planned_names.items():
        if planned_name in values:
            by_name[name] = values[planned_name]
    return by_name


@cache
def parts_class(dim: int, count: int) -> Any:
    """Return the class of the parts of a fused weight along a dim, a node of all trees.

    A namedtuple, since all libraries of trees know these, and rebuild one from its class and
    leaves. So the class has the dim, along which checkpoints join the parts.

    >>> parts_class(1, 3)(1, 2, 3)
    Parts(part0=1, part1=2, part2=3)
    """
    names = [f"part{number}" for number in range(count)]
    cls: Any = namedtuple("Parts", names)  # pyright: ignore[reportUntypedNamedTuple]
    cls.joined_dim = dim
    # pickle and copy find a class by its name in a module, where this one is not.
    cls.__reduce__ = lambda parts: (_parts_of, (dim, *parts))
    return cls


def _parts_of(dim: int, *parts: Any) -> Any:
    return parts_class(dim, len(parts))(*parts)
