"""`LayerPlans`: how each layer of a model is sharded, and why, decided by what follows it.

column   the dim that a layer produces is sharded: heads, hidden units
row      the layer that sums over that dim; its result is a partial sum
words    a table of words, and the layer that scores them: rows by words
"""

from __future__ import annotations

from collections import Counter, namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from math import gcd, prod
from typing import Any, Literal, NamedTuple, Self, cast, get_args

import torch
from torch import Tensor, nn

from fshard.errors import LayoutError
from fshard.mesh.layout import Mesh, P, as_written
from fshard.mesh.layout.arithmetic import chunk
from fshard.mesh.spmd.scope import here
from fshard.tensor.follow import EXPERTS, Product
from fshard.tensor.modes import Mode
from fshard.tensor.sequence import Algorithm
from fshard.tensor.unsharded import run_operation

Style = Literal["column", "row", "words"]
LOSSES = {"log_softmax"}
"""Operations that need all words, but send little where these are sharded."""
STYLES = (*get_args(Style), "replicated")
SequenceMode = Algorithm | Literal["megatron"]
"""The algorithm of attention over a sharded sequence; or norms and dropout alone are sharded over the axis of the layers."""


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
        """Return True if n devices can share the layer; words may be uneven, if each device has some."""
        return self.shared % n == 0 or (
            self.style == "words" and (n - 1) * chunk(self.shared, n) < self.shared
        )


@dataclass(frozen=True)
class LayerPlans:
    """The layouts of a model's parameters along the axes of a plan: see `tensor_parallel`.

    Args:
        mode: the axes that shard layers.
        layers: the plan of each sharded weight, by its name.
        shapes: of all parameters.
        biases: the weight of each bias that is sharded with it.
        replicated: weights of linear layers that are not sharded, and why.
        sequence: the axis that shards tokens; `sequence_mode`: the algorithm of attention.
        unsharded: modules that run on unsharded tensors, by their path, and why; "" if integers stay plain tensors.
        operations: operations in the model's own forward that run on unsharded tensors, by their name, and why.
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
        return tuple(dict.fromkeys((*((self.sequence,) if self.sequence else ()), *self.mode.axes)))

    @property
    def rules(self) -> dict[str, P]:
        """The spec of every parameter along the axes, for `fs.fsdp("data", within=plan.rules)`."""
        return {name: self.spec(name) for name in self.shapes}

    def spec(self, name: str) -> P:
        """Return the spec of a parameter."""
        layer = self.layers.get(self.biases.get(name, name))
        if layer is None:
            return self.experts.get(name, P())
        mode = self.mode.next if layer.style == "row" else self.mode
        if name in self.biases:
            return mode.bias
        out, summed = mode.weight.dims(2)
        return P(out, summed) if layer.out == 0 else P(summed, out)

    def parts_of(self, name: str) -> tuple[tuple[int, ...], int]:
        """Return the lengths of the parts of a parameter, and their dim."""
        layer = self.layers.get(self.biases.get(name, name))
        return ((), 0) if layer is None else (layer.parts, 0 if name in self.biases else layer.out)

    def of_stages(self, stages: Sequence[nn.Module]) -> list[Self]:
        """Return the plan of each stage of the model, by its own names. A fused weight of several stages is one part."""
        first = {id(x): name for name, x in self.model.named_parameters()}
        first = {
            name: first[id(x)] for name, x in self.model.named_parameters(remove_duplicate=False)
        }
        shapes = [
            {name: tuple(x.shape) for name, x in stage.named_parameters()} for stage in stages
        ]
        uses = Counter(first[name] for stage_shapes in shapes for name in stage_shapes)
        plans = {
            name: x._replace(parts=()) if uses[name] > 1 else x for name, x in self.layers.items()
        }
        layers = {
            name: plans[model_name] for name, model_name in first.items() if model_name in plans
        }
        biases = {
            name: self.biases[model_name]
            for name, model_name in first.items()
            if model_name in self.biases
        }
        experts = {
            name: self.experts[model_name]
            for name, model_name in first.items()
            if model_name in self.experts
        }
        return [
            replace(self, layers=layers, biases=biases, experts=experts, shapes=each)
            for each in shapes
        ]

    def split(self, params: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return parameters by name, of fused weights a tuple of their parts, which are leaves: `parts_class`."""

        def parts(name: str, x: Tensor) -> Any:
            lengths, dim = self.parts_of(name)
            if len(lengths) < 2:
                return x
            split = (view.clone() for view in x.detach().split(lengths, dim))
            leaves = [
                y.requires_grad_() if x.requires_grad else nn.Parameter(y, requires_grad=False)
                for y in split
            ]
            return parts_class(dim, len(leaves))(*leaves)

        return {name: parts(name, x) for name, x in params.items()}

    def joined(self, params: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return parameters by name, whose parts are concatenated."""
        both = {name: (x, self.parts_of(name)[1]) for name, x in params.items()}
        return {
            name: torch.cat([*x], dim) if isinstance(x, tuple) else x
            for name, (x, dim) in both.items()
        }

    def __str__(self) -> str:
        rows = [
            (name, x.style, " + ".join(map(str, x.parts)), x.why) for name, x in self.layers.items()
        ]
        rows += [(name, "", "", why) for name, why in self.replicated.items()]
        rows += [
            (path, "experts" if why is EXPERTS else "unsharded", "", why)
            for path, why in self.unsharded.items()
        ]
        rows += [(name, "unsharded", "", why) for name, why in self.operations.items()]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = [
            "  ".join(f"{text:{width}}" for text, width in zip(row, (*widths, 0), strict=True))
            for row in rows
        ]
        tokens = (
            f", tokens over {as_written((self.sequence,))} ({self.sequence_mode})"
            if self.sequence
            else ""
        )
        title = f"{self.mode.kind} over {as_written(self.mode.axes)}{tokens}; all other parameters are replicated"
        return "\n".join([title, *map(str.rstrip, lines)])

    @property
    def reduces_at_once(self) -> bool:
        """True if a partial sum is reduced by the operation that makes it.

        In the mode "megatron" it is reduced and scattered over tokens after the layer.
        """
        return self.sequence_mode != "megatron"

    def runs_unsharded(self, name: str, error: Exception) -> bool:
        """Return True if an operation that has no rule, and has raised, runs on unsharded tensors."""
        return name in self.operations

    def run_operation(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on unsharded tensors."""
        return run_operation(func, args, kwargs)

    def check_sizes(self, mesh: Mesh) -> None:
        """Raise with all layers that the devices of a mesh cannot share."""
        n = prod(mesh.shape[axis] for axis in self.mode.next.hidden)
        errors = [
            f"{name} is shared by at most {x.shared}"
            for name, x in self.layers.items()
            if not x.fits(n)
        ]
        if errors:
            raise LayoutError(
                f"{n} devices along {as_written(self.mode.next.hidden)} must divide the heads and widths of all sharded "
                f"layers; {'; '.join(errors)}. Plan for this size: fs.tensor_parallel(..., size={n})."
            )

    def own_mesh(self) -> Mesh | None:
        """Return the devices along the axes; None outside of a step."""
        scope = here()
        if scope is None or not {*self.axes} <= {*scope.mesh.axis_names}:
            return None
        zigzag = self.sequence if self.sequence_mode == "zigzag" else None
        return _mesh_of_arrays(scope.mesh, self.axes, zigzag, bool(scope.varying_axes))


@cache
def _mesh_of_arrays(
    mesh: Mesh, axes: tuple[str, ...], zigzag: str | None, is_varying: bool
) -> Mesh:
    """Return the mesh of some axes, whose arrays are those of a loss function if it `is_varying`."""
    return replace(mesh[axes], zigzag=zigzag, is_varying=is_varying)


@cache
def parts_class(dim: int, count: int) -> Any:
    """Return the class of the parts of a fused weight: a node of all trees, which checkpoints join along its `joined_dim`.

    >>> parts_class(1, 3)(1, 2, 3)
    Parts(part0=1, part1=2, part2=3)
    """
    cls: Any = namedtuple("Parts", [f"part{i}" for i in range(count)])  # pyright: ignore[reportUntypedNamedTuple]
    cls.joined_dim = dim
    cls.__reduce__ = lambda parts: (_parts_of, (dim, *parts))
    return cls


def _parts_of(dim: int, *parts: Any) -> Any:
    return parts_class(dim, len(parts))(*parts)


def decide(
    products: Mapping[str, Product], shapes: Mapping[str, tuple[int, ...]], size: int | None
) -> tuple[dict[str, LayerPlan], dict[str, str]]:
    """Return the plan of each sharded weight, and why others are replicated."""
    columns, rows = dict[str, str](), dict[str, list[str]]()
    for name, product in products.items():
        producers = sorted({dim_range.weight for origin in product.inputs for dim_range in origin})
        if (
            not producers
            or not all(product.inputs)
            or any(x in rows or products[x].needed for x in producers)
        ):
            continue
        fitting = [x for x in producers if size is None or products[x].length % size == 0]
        if fitting:
            rows[name] = fitting
            columns.update(dict.fromkeys(fitting, f"{_short(name)} sums over what it produces"))
    layers, replicated = dict[str, LayerPlan](), dict[str, str]()
    for name, p in products.items():
        words = LayerPlan("words", p.out, (), p.length, "the model returns what it produces")
        if name in rows:
            shared = gcd(*(products[x].length for x in rows[name]))
            why = f"sums over what {', '.join(map(_short, rows[name]))} produce"
            layers[name] = LayerPlan("row", p.out, (), shared, why)
        elif name in columns:
            layers[name] = LayerPlan(
                "column", p.out, _parts(p, shapes[name][p.out]), p.length, columns[name]
            )
        elif p.kind == "linear" and p.is_output and {*p.needed} <= LOSSES and words.fits(size or 1):
            layers[name.removesuffix(" (linear)")] = words
        elif p.kind == "linear":
            why = (
                f"{p.needed[0]} needs all that it produces"
                if p.needed
                else "no layer sums over what it produces"
            )
            replicated[name] = (
                why if p.length % (size or 1) == 0 else f"{size} devices do not divide {p.length}"
            )
    scored = {
        shapes[name][layer.out]: layer for name, layer in layers.items() if layer.style == "words"
    }
    for name, p in products.items():
        if p.is_looked_up and name not in layers and (layer := scored.get(shapes[name][p.summed])):
            layers[name] = layer._replace(
                out=p.summed, why="a table of the words that the model scores"
            )
    return layers, replicated


def override(
    layers: Mapping[str, LayerPlan],
    replicated: Mapping[str, str],
    products: Mapping[str, Product],
    rules: Mapping[str, str],
) -> tuple[dict[str, LayerPlan], dict[str, str]]:
    """Return plans where the weights that patterns match have the style that is named; raise with all wrong rules."""
    by_weight = {name.removesuffix(" (linear)"): p for name, p in products.items()}
    layers, replicated, errors = {**layers}, {**replicated}, list[str]()
    named: dict[str, set[str]] = {}
    for pattern, style in rules.items():
        matched = [name for name in by_weight if fnmatchcase(name, pattern)]
        errors += [] if matched else [f"{pattern!r} matches no weight of a layer"]
        errors += (
            []
            if style in STYLES
            else [f"{pattern!r} must be one of {', '.join(STYLES)}; got {style!r}"]
        )
        for name in matched:
            named.setdefault(name, set()).add(style)
    errors += [
        f"{name} is {' and '.join(sorted(styles))} by several"
        for name, styles in named.items()
        if len(styles) > 1
    ]
    if errors:
        raise ValueError(
            f"tensor_parallel(rules=): {'; '.join(errors)}. The weights are {', '.join(by_weight)}."
        )
    for name, (style,) in named.items():
        layers.pop(name, None)
        replicated.pop(name, None)
        if style == "replicated":
            replicated[name] = "named by rules"
        else:
            p = by_weight[name]
            out = p.summed if style == "words" and p.kind == "embedding" else p.out
            layers[name] = LayerPlan(cast("Style", style), out, (), p.length, "named by rules")
    return layers, replicated


def _short(name: str) -> str:
    return ".".join(name.split(".")[-3:-1]) or name


def _parts(product: Product, length: int) -> tuple[int, ...]:
    """Return the lengths of the parts of a fused weight, of which all is split; () of another."""
    ranges = sorted(product.parts)
    if (
        not ranges
        or ranges[0][0]
        or ranges[-1][1] != length
        or any(a[1] != b[0] for a, b in pairwise(ranges))
    ):
        return ()
    return tuple(stop - start for start, stop in ranges)
