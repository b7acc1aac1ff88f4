"""Types of results, compared with those of spmd_types: each difference has a reason, and the values
of both are those of one device.

A case is an operation on inputs with drawn layouts. fshard runs it on arrays, within
`fs.array.explicit`; spmd_types runs it on the shards of each device, with their types, and checks
them. The operations name no size, so that they are the same program on shards.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import fshard as fs
from fshard import P
from fshard.errors import LayoutError
from tests.helpers.sampled import THOROUGH

spmd = pytest.importorskip("spmd_types")
checker = pytest.importorskip("spmd_types.checker")

MESH = fs.make_mesh({"data": 2, "model": 2})
GROUPS = {"data": spmd.MeshAxis.of(2, 2), "model": spmd.MeshAxis.of(2, 1)}

M = (8, 8)
OPERATIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "neg": (lambda x: -x, [M]),
    "clone": (lambda x: x.clone(), [M]),
    "scale": (lambda x: 3 * x, [M]),
    "divide by a number": (lambda x: x / 4, [M]),
    "add a number": (lambda x: x + 1, [M]),
    "exp": (torch.exp, [M]),
    "relu": (torch.relu, [M]),
    "abs": (torch.abs, [M]),
    "square": (torch.square, [M]),
    "tril": (torch.tril, [M]),
    "dropout": (lambda x: F.dropout(x, 0.0), [M]),
    "float": (lambda x: x.float(), [M]),
    "add": (torch.add, [M, M]),
    "sub": (torch.sub, [M, M]),
    "mul": (torch.mul, [M, M]),
    "div": (torch.div, [M, M]),
    "maximum": (torch.maximum, [M, M]),
    "where": (lambda x, y: torch.where(x > 0, x, y), [M, M]),
    "add a row": (torch.add, [M, (8,)]),
    "mul a row": (torch.mul, [M, (8,)]),
    "add a scalar": (torch.add, [M, ()]),
    "mul a scalar": (torch.mul, [M, ()]),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.5), [M, M]),
    "matmul": (torch.matmul, [M, M]),
    "matmul of three dims": (torch.matmul, [(8, 8, 8), M]),
    "bmm": (torch.bmm, [(8, 8, 8), (8, 8, 8)]),
    "mv": (torch.mv, [M, (8,)]),
    "dot": (torch.dot, [(8,), (8,)]),
    "outer": (torch.outer, [(8,), (8,)]),
    "linear": (F.linear, [M, M]),
    "linear with a bias": (F.linear, [M, M, (8,)]),
    "addmm": (torch.addmm, [M, M, M]),
    "einsum": (lambda x, y: torch.einsum("bij,jk->bik", x, y), [(8, 8, 8), M]),
    "einsum of a batch": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), [(8, 8, 8), (8, 8, 8)]),
    "sum": (torch.sum, [M]),
    "sum of dim 0": (lambda x: x.sum(0), [M]),
    "sum of dim 1, kept": (lambda x: x.sum(1, keepdim=True), [M]),
    "mean": (torch.mean, [M]),
    "mean of dim 0": (lambda x: x.mean(0), [M]),
    "nansum of dim 0": (lambda x: torch.nansum(x, 0), [M]),
    "prod of dim 0": (lambda x: x.prod(0), [M]),
    "amax of dim 0": (lambda x: x.amax(0), [M]),
    "logsumexp of dim 1": (lambda x: x.logsumexp(1), [M]),
    "var of dim 1": (lambda x: x.var(1), [M]),
    "norm": (torch.norm, [M]),
    "any": (lambda x: (x > 2).any(), [M]),
    "argmax of dim 1": (lambda x: x.argmax(1), [M]),
    "cumsum of dim 0": (lambda x: x.cumsum(0), [M]),
    "softmax of dim 1": (lambda x: x.softmax(1), [M]),
    "log_softmax of dim 0": (lambda x: x.log_softmax(0), [M]),
    "sort of dim 0": (lambda x: x.sort(0).values, [M]),
    "transpose": (lambda x: x.T, [M]),
    "permute": (lambda x: x.permute(2, 0, 1), [(8, 8, 8)]),
    "movedim": (lambda x: x.movedim(0, 2), [(8, 8, 8)]),
    "unsqueeze": (lambda x: x.unsqueeze(1), [M]),
    "flatten": (lambda x: x.flatten(0, 1), [(8, 8, 8)]),
    "select": (lambda x: x.select(0, 0), [M]),
    "index a row": (lambda x: x[0], [M]),
    "flip of dim 0": (lambda x: x.flip(0), [M]),
    "roll of dim 0": (lambda x: x.roll(1, 0), [M]),
    "diagonal": (torch.diagonal, [M]),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), [M]),
    "pad": (lambda x: F.pad(x, (0, 1)), [M]),
    "cat": (lambda x, y: torch.cat([x, y], 0), [M, M]),
    "stack": (lambda x, y: torch.stack([x, y]), [M, M]),
    "chunk": (lambda x: x.chunk(2, 0), [M]),
    "unbind": (lambda x: x.unbind(0), [M]),
    "mse_loss": (F.mse_loss, [M, M]),
    "mse_loss, summed": (lambda x, y: F.mse_loss(x, y, reduction="sum"), [M, M]),
    "gelu": (F.gelu, [M]),
}  # fmt: skip


class Outcome(NamedTuple):
    """What a library makes of a case: the specs of the results, or its error."""

    specs: list[P] | None
    values: list[Tensor]
    error: str


def drawn_spec(shape: tuple[int, ...], draw: random.Random) -> P:
    """Draw how each axis shares an array: it shards a dim, is replicated, or has summands."""
    dims: list[list[str]] = [[] for _ in shape]
    unreduced = []
    for axis in draw.sample(MESH.axis_names, 2):
        use = draw.choice(["replicated", "unreduced", *range(len(shape))])
        if use == "unreduced":
            unreduced.append(axis)
        elif use != "replicated":
            dims[use].append(axis)
    return P(*map(tuple, dims), unreduced=tuple(unreduced))


def drawn_case(draw: random.Random) -> tuple[str, list[P]]:
    """Draw an operation and specs of its inputs: half of the time equal ones for equal shapes."""
    name = draw.choice([*OPERATIONS])
    shapes = OPERATIONS[name][1]
    specs = [drawn_spec(shape, draw) for shape in shapes]
    if draw.random() < 0.5:
        specs = [specs[shapes.index(shape)] for shape in shapes]
    return name, specs


def array_of(shape: tuple[int, ...], spec: P, number: int) -> fs.mesh.Sharded:
    """Return an array of small integers, whose summands differ along unreduced axes."""
    draw = torch.Generator().manual_seed(number)
    full = torch.randint(-3, 4, shape, generator=draw, dtype=torch.float64)
    x = fs.device_put(full, fs.Layout(MESH, spec))
    if not spec.unreduced:
        return x
    # Add numbers to the summands that cancel, so that each device has some of the value.
    (group,) = [spec.unreduced]
    changes = []
    for device, shard in enumerate(x.shards):
        is_first = not any(MESH.coordinates(device)[axis] for axis in group)
        others = 2 ** len(group) - 1
        changes.append(shard + (others if is_first else -1))
    return fs.from_local(lambda **at: changes[MESH.index(at)], x.layout)


def by_fshard(name: str, arrays: list[fs.mesh.Sharded]) -> Outcome:
    """Run an operation on arrays, without communication."""
    try:
        with fs.array.explicit():
            results = tree_leaves(OPERATIONS[name][0](*arrays))
    except LayoutError as error:
        return Outcome(None, [], str(error))
    return Outcome([y.spec for y in results], [fs.unshard(y) for y in results], "")


def by_spmd_types(name: str, arrays: list[fs.mesh.Sharded]) -> Outcome:
    """Run an operation on the shards of each device, checked by their types."""
    types = [fs.mesh.to_spmd_type(x.layout, x.ndim) for x in arrays]
    columns = []
    for number in range(MESH.size):
        shards = [x.shards[number].clone() for x in arrays]
        with spmd.set_current_mesh(GROUPS):
            for shard, type_ in zip(shards, types, strict=True):
                spmd.assert_type(shard, type_)
            try:
                with checker.typecheck(local=False):
                    columns.append(tree_leaves(OPERATIONS[name][0](*shards)))
            except Exception as error:  # of spmd_types, of DTensor, or of torch on shards
                return Outcome(None, [], str(error))

    specs: list[P] = []
    values: list[Tensor] = []
    for shards in zip(*columns, strict=True):
        type_ = spmd.SpmdType(spmd.get_local_type(shards[0]), spmd.get_partition_spec(shards[0]))
        layout = fs.mesh.from_spmd_type(type_, MESH)
        plain = [shard.detach().clone() for shard in shards]
        y = fs.from_local(lambda plain=plain, **at: plain[MESH.index(at)], layout)
        specs.append(layout.spec)
        values.append(fs.unshard(y))
    return Outcome(specs, values, "")


class Kind(NamedTuple):
    """A kind of difference.

    Args:
        reason: for it.
        count: of such cases among the 2,000 that a thorough run draws.
        error: a part of the error of the library that raises.
        operations: that have it; all of them if there are none.
    """

    reason: str
    count: int
    error: str = ""
    operations: frozenset[str] = frozenset()


def among(*names: str) -> frozenset[str]:
    assert {*names} <= {*OPERATIONS}
    return frozenset(names)


THEY_RAISE = {
    "mean": Kind(
        "A mean over a sharded dim is the sum of the devices' means, divided by their number. "
        "DTensor, which spmd_types calls, makes an average of it, and that has no type.",
        41,
        error="Only sum-Partial is supported, got reduce_op='avg'",
        operations=among("mean", "mean of dim 0", "mse_loss"),
    ),
    "linear": Kind(
        "The operation is linear in the unreduced input, but not in the list of linear operations "
        "of spmd_types. For a function with a rule of its own, `spmd_types.rules` has `linear_in=`.",
        55,
        error="cannot propagate through non-linear ops",
        operations=among(
            "dropout",
            "index a row",
            "lerp",
            "linear",
            "linear with a bias",
            "outer",
            "tril",
            "where",
        ),
    ),
    "bias": Kind(
        "Beside a sharded inner dim the bias is one more summand, of one device. In spmd_types a "
        "bias with summands may not meet varying inputs: a program adds it to the reduced product.",
        1,
        error="cannot combine with Varying",
        operations=among("linear with a bias"),
    ),
    "converted": Kind(
        "fshard slices a replicated input, or lets one device alone add it to a sum: nothing is "
        "sent. A program of spmd_types writes `convert(x, axis, src=R, dst=S(0))`; with that the "
        "types are equal.",
        57,
    ),
}
"""Kinds of cases that fshard computes without communication, and spmd_types refuses."""

WE_RAISE = {
    "bool": Kind(
        "A sum of bools over devices is no sum of fshard: `any` of a sharded dim reduces at once.",
        17,
        operations=among("any"),
    ),
    "repeated": Kind(
        "`repeat_interleave` has the row of `roll`, which needs its dim in full. Shards of "
        "repeated elements would do.",
        13,
        operations=among("repeat_interleave"),
    ),
    "broadcast": Kind(
        "A sum that is broadcast is reduced first, where it has fewest elements.",
        4,
        operations=among("mul a scalar"),
    ),
    "nan": Kind(
        "nansum is not linear: a nan on one device makes the sum nan, which counts as 0. Of "
        "summands, spmd_types leaves out that of one device.",
        7,
        operations=among("nansum of dim 0"),
    ),
}
"""Kinds of cases that spmd_types computes without communication, and fshard refuses."""


def kind_of(name: str, arrays: list[fs.mesh.Sharded], ours: Outcome, theirs: Outcome) -> str:
    """Return "equal", or the kind of difference; raise for an unknown one."""
    if ours.specs == theirs.specs:
        return "both raise" if ours.specs is None else "equal"
    inputs = ", ".join(str(fs.typeof(x)) for x in arrays)
    if ours.specs is None:
        for key, kind in WE_RAISE.items():
            if name in kind.operations:
                return key
        raise AssertionError(f"{name} of {inputs}: {ours.error}, but {theirs.specs}")

    # The first are the arrays themselves.
    for xs in converted(arrays):
        theirs = by_spmd_types(name, xs)
        if theirs.specs == ours.specs:
            return "converted"
        for key, kind in THEY_RAISE.items():
            if kind.error and kind.error in theirs.error and name in kind.operations:
                return key
    raise AssertionError(f"{name} of {inputs}: {ours.specs}, but {theirs.specs or theirs.error}")


def converted(arrays: list[fs.mesh.Sharded]) -> Iterator[list[fs.mesh.Sharded]]:
    """Yield arrays whose replicated axes shard dims, or have one summand that is not 0."""
    for specs in product(*[converted_specs(x) for x in arrays]):
        yield [fs.reshard(x, fs.Layout(MESH, spec)) for x, spec in zip(arrays, specs, strict=True)]


def converted_specs(x: fs.mesh.Sharded) -> list[P]:
    specs = [x.spec]
    for axis in x.layout.replicated_axes:
        for spec in list(specs):
            dims = spec.dims(x.ndim)
            specs.append(P(*dims, unreduced=(*spec.unreduced, axis)))
            for dim in range(x.ndim):
                changed = [*dims]
                changed[dim] = (*dims[dim], axis)
                specs.append(P(*changed, unreduced=spec.unreduced))
                changed[dim] = (axis, *dims[dim])
                specs.append(P(*changed, unreduced=spec.unreduced))
    return [*dict.fromkeys(specs)]


def drawn_kind(draw: random.Random) -> str:
    """Return the kind of a drawn case, whose values are first compared with those of one device."""
    name, specs = drawn_case(draw)
    function, shapes = OPERATIONS[name]
    arrays = [array_of(*one) for one in zip(shapes, specs, range(len(specs)), strict=True)]
    ours = by_fshard(name, arrays)
    theirs = by_spmd_types(name, arrays)

    expected = tree_leaves(function(*[fs.unshard(x) for x in arrays]))
    for outcome in (ours, theirs):
        if outcome.specs is not None:
            torch.testing.assert_close(outcome.values, expected, equal_nan=True)
    return kind_of(name, arrays, ours, theirs)


@pytest.fixture
def without_logs() -> Iterator[None]:
    """Silence torch, which logs each operation that fails on shards."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("without_logs")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_types_of_results_are_those_of_spmd_types():
    draw = random.Random(0)
    counts = Counter(drawn_kind(draw) for _ in range(2000 if THOROUGH else 200))
    assert counts["equal"] > 0.3 * counts.total()
    if THOROUGH:
        differences = {key: kind.count for key, kind in {**THEY_RAISE, **WE_RAISE}.items()}
        del counts["equal"], counts["both raise"]
        assert counts == differences
