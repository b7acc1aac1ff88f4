"""Sums over all elements of a tree, exact for every layout, with one collective.

A device contributes a leaf only if it is the first along every axis along which the leaf is
replicated, so that no element is counted twice; one `psum` over all sharding axes then adds all
leaves.

    mesh 2 x 2, axes a and b       device      (0,0)  (0,1)  (1,0)  (1,1)
    w sharded over a               w counts      x             x
    v replicated                   v counts      x
    u sharded over a and b         u counts      x      x      x      x        then psum over (a, b)

Plain tensors are global values and are added at the end. Sums are in float64, or exact.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import chain
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fshard.errors import LayoutError, OptimizerError
from fshard.mesh.collectives.autograd import recorded, transformed
from fshard.mesh.collectives.moves import Psum
from fshard.mesh.collectives.on_shards import apply_move
from fshard.mesh.layout import Layout, P, PyTree, path_text
from fshard.mesh.layout.kinds import compute_device, copy_in
from fshard.mesh.layout.sharded import Sharded, key_of
from fshard.mesh.reshard.device_put import full_values, reshard_all, spread
from fshard.mesh.spmd.run import local_devices
from fshard.optim.arguments import validate, within
from fshard.optim.exact_sum import WIDTH, columns_of, number_of
from fshard.optim.leaves import Leaf, Leaves, like, shards_of
from fshard.optim.rules import foreach
from fshard.source import Site, call_site

Precision = Literal["exact", "float64", "own"]
"""Of a sum of squares: exact; in float64; of norms in the dtype of each shard."""


def global_norm(tree: PyTree, order: float = 2, *, exact: bool | None = None) -> Tensor:
    """Return the norm of all elements of a tree: (sum of |x|^order)^(1 / order), in float64.

    Args:
        tree: tensors and `Sharded`s. In an `update` of plain tensors, a tree like its parameters,
            such as its gradients: then parameters of other devices count too, in every stage of
            ZeRO.
        order: above 0; inf for the largest |x|.
        exact: of order 2. True: the same bits for any layout, by exact sums: about 20 ns an element
            on a CPU. None: so only if a leaf is of float64, and in a reproducible step; else
            squares are added in float64: two layouts differ in the last bits, and about once in
            2^29 times after rounding to float32. False: each shard is squared and added in its own
            dtype, several times as fast.

    Communicates a `psum` of 8 bytes, or of 848 for an exact sum, over the axes that shard any leaf;
    nothing if none does. Maxima are gathered, 8 bytes of each device. Tied leaves (the very same
    tensors) count once, None counts as nothing. It may be differentiated, for a finite order: then
    squares are added in float64, with a psum for each leaf.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> x = fs.device_put(torch.tensor([3.0, 0.0]), fs.Layout(fs.make_mesh({"data": 2}), P("data")))
    >>> with fs.ledger() as comm:
    ...     norm = global_norm({"x": x, "y": torch.tensor(4.0)})
    >>> norm, comm.calls()
    (tensor(5., dtype=torch.float64), 1)
    >>> tree = {"x": x, "y": torch.tensor(4.0)}
    >>> global_norm(tree, 1), global_norm(tree, inf)
    (tensor(7., dtype=torch.float64), tensor(4., dtype=torch.float64))
    """
    errors = ["exact=True is for order=2"] if exact and order != 2 else []
    validate("global_norm", within("(0, inf]", order=order), errors)
    arrays = local_arrays.get()
    tree = Leaves.of(tree if arrays is None else arrays(tree))
    check_summable("global_norm", tree)
    leaves = _without_ties(tree)
    if _is_differentiated(leaves):
        _validate_outside_update("global_norm", leaves)
        return _differentiable_norm(leaves, order)
    with torch.no_grad():
        if order == inf:
            return _largest_of_all(leaves)
        if exact is None and order == 2 and arrays is None:
            shared = _shared.get()
            if shared is not None and shared.leaf_keys == [*map(key_of, leaves)]:
                return shared.norm()
        precision = _default_precision(leaves)
        if exact is not None:
            precision = "exact" if exact else "own"
        return _norm_later(leaves, order, precision)()


def global_dot(x: PyTree, y: PyTree) -> Tensor:
    """Return the inner product of two trees of one structure: the sum of x * y, in float64.

    Of complex elements it is the real part of conj(x) * y, so that `global_dot(x, x)` is the square
    of `global_norm(x)`. Products are made and added in float64. Arrays of any layouts may meet:
    those of y are resharded to those of x, and unreduced ones are reduced. In an `update` of plain
    tensors, the trees are like its parameters, as for `global_norm`.

    Communicates one `psum` of 8 bytes beside that, over the axes that shard any leaf. Tied pairs
    count once, None counts as nothing. It may be differentiated: then there is a psum for each
    leaf.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> x = fs.device_put({"w": torch.tensor([1.0, 2.0, 3.0])}, fs.Layout(mesh, P.flat("data")))
    >>> y = fs.device_put({"w": torch.tensor([1.0, 0.0, 2.0])}, fs.Layout(mesh, P()))
    >>> global_dot(x, y)
    tensor(7., dtype=torch.float64)
    """
    site = call_site()
    first = Leaves.of(x)
    second = first.beside(y, "global_dot: y")
    arrays = local_arrays.get()
    if arrays is not None:  # in a device's update
        first = Leaves.of(arrays(x))
        second = arrays(y)
    pairs: dict[object, tuple[Leaf, Leaf]] = {}
    for path, a, b in zip(first.paths, first.leaves, second, strict=True):
        if a is None or b is None:
            continue
        if a.shape != b.shape:
            raise LayoutError(
                f"global_dot: y{path} must have the shape of x{path}, {tuple(a.shape)}; got "
                f"{tuple(b.shape)}."
            )
        pairs[key_of(a), key_of(b)] = _in_one_layout(path, a, b, site)

    leaves = list(chain.from_iterable(pairs.values()))
    if _is_differentiated(leaves):
        _validate_outside_update("global_dot", leaves)
        products = [_differentiable_dot(a, b) for a, b in pairs.values()]
        return sum(products, start=torch.zeros((), dtype=torch.float64))
    with torch.no_grad():
        numbers: list[Leaf] = []  # of each pair, an array of one number on each device
        for a, b in pairs.values():
            numbers.append(like(a, [*map(_dot, shards_of(a), shards_of(b))]))
        check_summable("global_dot", Leaves.of(numbers))
        if not numbers:
            return torch.zeros((), dtype=torch.float64)
        device = device_of_sums(numbers)

        def row(shards: list[Tensor]) -> Tensor:
            zero = torch.zeros((1,), dtype=torch.float64, device=device)
            return sum([x.to(device, non_blocking=True) for x in shards], start=zero)

        return sum_over_mesh(numbers, row)()[0]


def _in_one_layout(path: str, a: Leaf, b: Leaf, site: Site) -> tuple[Leaf, Leaf]:
    """Return two leaves in the layout of the first that is an array, reduced."""
    array = a if isinstance(a, Sharded) else b
    if not isinstance(array, Sharded):
        return a, b
    layout = array.layout.with_spec(array.spec.replace(unreduced=None))
    replicated = Layout(array.mesh)
    arrays = [x if isinstance(x, Sharded) else spread(x, replicated) for x in (a, b)]
    if any(x.mesh != array.mesh for x in arrays):
        raise LayoutError(
            f"global_dot: x{path} and y{path} must be on one mesh; got {a!r} and {b!r}. "
            "Put y there: fs.device_put(y, fs.mesh.layouts(x))."
        )
    a, b = reshard_all(arrays, [layout, layout], site)
    return a, b


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of two shards: a row of one number."""
    return _products(a, b).double().sum()[None]


def _products(a: Any, b: Any) -> Any:
    """Return the products of the elements of two tensors or arrays: if complex, the real part."""
    if a.is_complex() or b.is_complex():
        return (a.conj() * b).real
    return a.double() * b.double()


# Within a transform of torch.func, and where autograd records: operations on arrays, which
# differentiate them.


def _is_differentiated(leaves: Sequence[Leaf]) -> bool:
    """Return True if something looks at the leaves that takes derivatives."""
    return transformed() or recorded(tuple(chain.from_iterable(map(shards_of, leaves))))


def _validate_outside_update(caller: str, leaves: Sequence[Leaf]) -> None:
    """Raise in a device's update of shards: if differentiated, it must not communicate."""
    if are_divided(leaves) and local_arrays.get() is not None:
        raise OptimizerError(
            f"{caller} must not be called in an update of shards within a transform of torch.func. "
            f"Compute it before the update, fs.optim.{caller}(...) of the global arrays, and scale "
            "the gradients that the update gets."
        )


def _differentiable_dot(a: Leaf, b: Leaf) -> Tensor:
    total = _products(a, b).double().sum()
    return full_values(total) if isinstance(total, Sharded) else total


def _differentiable_norm(leaves: Sequence[Leaf], order: float) -> Tensor:
    if order == inf:
        raise ValueError(
            "global_norm: order must be finite where the norm is differentiated; got inf. Take the "
            "norm of detached tensors."
        )
    total = torch.zeros((), dtype=torch.float64)
    for leaf in leaves:
        if order == 2:
            total = total + _differentiable_dot(leaf, leaf)
        else:
            power = (leaf.abs().double() ** order).sum()
            total = total + (full_values(power) if isinstance(power, Sharded) else power)
    # Where the norm is 0 its derivative is 0, as torch's; that of the root would be infinite, and 0
    # times it is no number. So the root there is that of 1, which nothing uses.
    is_zero = total == 0
    root = torch.where(is_zero, 1.0, total) ** (1 / order)
    return torch.where(is_zero, total, root)


_exact: ContextVar[bool] = ContextVar("exact", default=False)
local_arrays: ContextVar[Callable[[PyTree], list[Leaf]] | None] = ContextVar(
    "local_arrays", default=None
)
"""Converts a local tree to global arrays, in a device's update of plain tensors."""


@contextmanager
def exact_norms(wanted: bool) -> Generator[None]:
    """Compute norms by exact sums, unless another precision is requested."""
    token = _exact.set(wanted)
    try:
        yield
    finally:
        _exact.reset(token)


def norm_later(tree: PyTree, *, exact: bool) -> Callable[[], Tensor]:
    """Square the local gradients, which are donated next.

    Return the function that sums the squares to their norm.

    Args:
        tree: the gradients.
        exact: by exact sums; otherwise as `global_norm(exact=False)`.

    >>> norm = norm_later([torch.tensor([3.0, 4.0])], exact=False)
    >>> norm()
    tensor(5., dtype=torch.float64)
    """
    return _norm_later(_without_ties(Leaves.of(tree)), 2, "exact" if exact else "own")


def _default_precision(leaves: Sequence[Leaf]) -> Precision:
    return "exact" if _exact.get() or shows_all_bits(leaves) else "float64"


class _SharedNorm(NamedTuple):
    """The norm of some leaves, known by the identity of their tensors, which the step holds."""

    leaf_keys: list[tuple[int, ...]]
    norm: Callable[[], Tensor]


_shared: ContextVar[_SharedNorm | None] = ContextVar("shared", default=None)


@contextmanager
def sharing_norm(tree: PyTree) -> Generator[Callable[[], Tensor]]:
    """Compute the norm of gradients once, for a step's metrics and for the update in the block.

    There `global_norm` of these gradients returns this norm. Yield the function that returns it.

    >>> grads = [torch.tensor([3.0, 4.0])]
    >>> with sharing_norm(grads) as norm:
    ...     global_norm(grads) is norm()
    True
    """
    leaves = _without_ties(Leaves.of(tree))
    norm = lru_cache(maxsize=1)(_norm_later(leaves, 2, _default_precision(leaves)))
    token = _shared.set(_SharedNorm([*map(key_of, leaves)], norm))
    try:
        yield norm
    finally:
        _shared.reset(token)


def _without_ties(tree: Leaves) -> list[Leaf]:
    firsts = [tree.leaves[i] for i, first in enumerate(tree.firsts) if first == i]
    return [leaf for leaf in firsts if leaf is not None]


def _norm_later(leaves: Sequence[Leaf], order: float, precision: Precision) -> Callable[[], Tensor]:
    """Sum powers of the local shards now.

    Return the function that sums over the mesh and takes the root.
    """
    if not leaves:
        return lambda: torch.zeros((), dtype=torch.float64)
    device = device_of_sums(leaves)

    def row(shards: list[Tensor]) -> Tensor:
        if order == 2:
            return squares(shards, device, precision).sum(0)
        norms = _norms([x.abs() for x in shards], device, order, torch.float64)
        return norms.pow(order).sum()[None]

    total = sum_over_mesh(leaves, row)

    def root() -> Tensor:
        power = sum_of(total())
        return power.sqrt() if order == 2 else power.pow(1 / order)

    return root


def _largest_of_all(leaves: Sequence[Leaf]) -> Tensor:
    """Return the largest absolute value, from the maxima of all devices' shards."""
    columns = [[x.abs() for x in shards_of(leaf)] for leaf in leaves]
    sharded = [leaf for leaf in leaves if isinstance(leaf, Sharded) and cut_axes(leaf.layout)]

    def largest(index: int) -> Tensor:
        """Return the largest value on a local device: of plain tensors too, which all have."""
        shards = [column[index % len(column)] for column in columns]
        shards = [x for x in shards if x.numel()]
        if not shards:
            return torch.zeros((), dtype=torch.float64)
        return largest_each(shards, device_of_sums(leaves)).max()

    if not sharded:
        return largest(0)
    mesh = sharded[0].mesh
    maxima: list[Tensor] = []
    for index in range(len(local_devices(mesh))):
        maxima.append(copy_in("device", largest(index)[None], mesh.device_type))
    layout = Layout(mesh, P(mesh.axis_names))
    return full_values(Sharded((mesh.size,), layout, tuple(maxima))).max()


def device_of_sums(leaves: Sequence[Leaf]) -> torch.device:
    """Return the device on which numbers of leaves are added.

    It is theirs, or that of their mesh where some are in host memory: the host would wait for each
    number that it gets from a device.
    """
    device = shards_of(leaves[0])[0].device
    for leaf in leaves:
        if isinstance(leaf, Sharded) and leaf.shards[0].device != device:
            return compute_device(leaf.mesh)
    return device


def largest_each(shards: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the largest absolute value in each shard that has any; not a number, if one is not."""
    return _norms([shard for shard in shards if shard.numel()], device, inf, None)


def shows_all_bits(leaves: Sequence[Leaf]) -> bool:
    """Return True if a float64 norm is not rounded when it is used: sums are exact then."""
    return any(leaf.dtype in (torch.float64, torch.complex128) for leaf in leaves)


def squares(shards: Sequence[Tensor], device: torch.device, precision: Precision) -> Tensor:
    """Return the sums of the squares of each shard: rows, of which `sum_of` makes numbers."""
    if precision != "exact":
        dtype = torch.float64 if precision == "float64" else None
        return _norms(shards, device, 2, dtype).square()[:, None]
    if not shards:
        return torch.zeros((1, WIDTH), dtype=torch.float64, device=device)
    columns = [columns_of(_real(x), squared=True) for x in shards]
    return torch.stack([x.to(device, non_blocking=True) for x in columns])


def sum_of(rows: Tensor) -> Tensor:
    """Return the numbers of sums of `squares` (the last dim)."""
    is_exact = rows.shape[-1] > 1  # the columns of exact sums
    return number_of(rows) if is_exact else rows[..., 0]


def _norms(
    shards: Sequence[Tensor], device: torch.device, order: float, dtype: torch.dtype | None
) -> Tensor:
    norms = [torch.zeros((), device=device)]
    if shards:
        norms = foreach.norm(list(map(_real, shards)), order, dtype=dtype)
    # From host memory to the device, never back, which would not wait for the copy.
    return torch.stack([norm.to(device, non_blocking=True) for norm in norms]).double()


def _real(x: Tensor) -> Tensor:
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x if x.is_floating_point() else x.double()


def check_summable(caller: str, tree: Leaves) -> None:
    """Raise if leaves are on several meshes, or unreduced; name the first."""
    pairs = zip(tree.paths, tree.leaves, strict=True)
    arrays = [(path, leaf) for path, leaf in pairs if isinstance(leaf, Sharded)]
    if not arrays:
        return
    first_path, first_array = arrays[0]
    for path, leaf in arrays:
        if leaf.spec.unreduced:
            raise LayoutError(
                f"{caller}: a norm of sums that are not made yet would be wrong: "
                f"{path_text(path) or 'the leaf'} is {leaf!r}. "
                "Reduce them first: fs.reshard(x, layout) to a layout without unreduced axes."
            )
        if leaf.mesh != first_array.mesh:
            raise LayoutError(
                f"{caller}: leaves must be on one mesh; got {first_path} on {first_array.mesh} "
                f"and {path} on {leaf.mesh}."
            )


def sum_over_mesh(
    leaves: Sequence[Leaf], row: Callable[[list[Tensor]], Tensor]
) -> Callable[[], Tensor]:
    """Compute a row on each device from its shards of some leaves.

    Return the function that sums the rows.

    Args:
        leaves: whose layouts determine which shards are replicas; not unreduced, on one mesh.
        row: from the shards that count on a device to a float64 vector: zeros, if there are none.

    Returns:
        A function that communicates, and returns the sum of the rows, the same on all devices.
    """
    replicated: list[Tensor] = []
    sharded: list[tuple[Sharded, tuple[str, ...]]] = []  # with the axes that shard them
    for leaf in leaves:
        axes = cut_axes(leaf.layout) if isinstance(leaf, Sharded) else ()
        if axes:
            sharded.append((leaf, axes))
        else:
            replicated.append(shards_of(leaf)[0])
    if not sharded:
        total = row(replicated)
        return lambda: total

    mesh = sharded[0][0].mesh
    distinct = {axes for _, axes in sharded}
    all_axes = {*chain.from_iterable(distinct)}
    over = tuple([axis for axis in mesh.axis_names if axis in all_axes])
    rows: list[Tensor] = []
    for index, device in enumerate(local_devices(mesh)):
        coordinates = mesh.coordinates(device)
        counting: set[tuple[str, ...]] = set()
        for axes in distinct:
            # Of replicas the first counts: the device at 0 along the axes that do not shard a leaf.
            if not any(coordinates[axis] for axis in over if axis not in axes):
                counting.add(axes)
        shards = [leaf.shards[index] for leaf, axes in sharded if axes in counting]
        row_of_device = row(shards)
        rows.append(copy_in("device", row_of_device, mesh.device_type))  # of gradients on the host
    of_replicated = copy_in("device", row(replicated), mesh.device_type) if replicated else None
    site = call_site()

    def added() -> Tensor:
        total = apply_move(mesh, Psum(), over, tuple(rows), site)[0]
        return total if of_replicated is None else of_replicated + total

    return added


@lru_cache(maxsize=4096)
def cut_axes(layout: Layout) -> tuple[str, ...]:
    """Return the axes along which devices hold different shards."""
    sizes = layout.mesh.shape
    return tuple([axis for axis in layout.spec.sharded_axes if sizes[axis] > 1])


def are_divided(leaves: Sequence[Leaf]) -> bool:
    """Return True if devices hold different shards of a leaf."""
    return any(isinstance(leaf, Sharded) and cut_axes(leaf.layout) for leaf in leaves)
