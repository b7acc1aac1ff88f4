"""Sums over all elements of a tree, wherever they lie: exact for every layout, with one collective in all.

A device contributes a leaf only if it is the first along every axis along which the leaf is replicated, so that no
element is counted twice; then one `psum` over the axes along which anything is cut adds up all leaves at once.

    mesh 2 x 2, axes a and b       device      (0,0)  (0,1)  (1,0)  (1,1)
    w cut over a                   w counts      x             x
    v replicated                   v counts      x
    u cut over a and b             u counts      x      x      x      x        then psum over (a, b)

Plain tensors are global values and are added at the end.  Sums are made in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fshard.errors import LayoutError
from fshard.mesh.layout import Layout
from fshard.mesh.mesh import Mesh
from fshard.mesh.placing import reshard
from fshard.mesh.sharded import Sharded
from fshard.mesh.spec import P
from fshard.mesh.spmd import held
from fshard.mesh.tree import PyTree
from fshard.optim import lists
from fshard.optim.leaves import Leaf, Leaves, shards_of


@torch.no_grad()
def global_norm(tree: PyTree, *, exact: bool = True) -> Tensor:
    """Return the Euclidean norm of all elements of a tree, as a float64 number.

    Args:
        tree: tensors and `Sharded`s.
        exact: square and add in float64, which makes the result the same however the tree is cut, but for the last bits of
            a float64.  Else each shard is squared and added in its own dtype, several times as fast on a CPU.

    Communicates a `psum` of 8 bytes over the axes along which any leaf is cut; nothing if none is.  Tied leaves (the very
    same tensors) count once, None counts as nothing.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> x = fs.device_put(torch.tensor([3.0, 0.0]), fs.Layout(fs.make_mesh({"data": 2}), P("data")))
    >>> with fs.ledger() as comm:
    ...     norm = global_norm({"x": x, "y": torch.tensor(4.0)})
    >>> norm, comm.calls()
    (tensor(5., dtype=torch.float64), 1)
    """
    at = Leaves.of(tree)
    firsts = at.firsts()
    leaves = [leaf for i, leaf in enumerate(at.leaves) if leaf is not None and firsts[i] == i]
    check_summable("global_norm", at)
    if not leaves:
        return torch.zeros((), dtype=torch.float64)
    found = iter(squares([shard for leaf in leaves for shard in shards_of(leaf)], exact=exact))
    values = [[next(found) for _ in shards_of(leaf)] for leaf in leaves]
    return sum_over_mesh(leaves, values, [0] * len(leaves)).sqrt()[0]


def squares(shards: Sequence[Tensor], *, exact: bool = True) -> list[Tensor]:
    """Return the sum of the squares of each shard, in float64; unless it is to be exact, from a norm in its own dtype."""
    if not shards:
        return []
    norms = lists.norm(list(map(_real, shards)), 2, dtype=torch.float64 if exact else None)
    near = norms[0].device
    if all(norm.device == near for norm in norms):
        return list(torch.stack([*norms]).double().square().unbind())
    return [norm.double().square() for norm in norms]


def _real(x: Tensor) -> Tensor:
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x if x.is_floating_point() else x.double()


def check_summable(what: str, at: Leaves) -> None:
    """Raise if leaves lie on several meshes, or are sums that have not been made yet; name all of them."""
    placed = [leaf for leaf in at.leaves if isinstance(leaf, Sharded)]
    if all(leaf.mesh is placed[0].mesh and not leaf.spec.unreduced for leaf in placed):
        return
    placed = [
        (path or "the leaf", leaf) for path, leaf in zip(at.paths, at.leaves, strict=True) if isinstance(leaf, Sharded)
    ]
    open_sums = [f"{path} is {leaf!r}" for path, leaf in placed if leaf.spec.unreduced]
    if open_sums:
        raise LayoutError(
            f"{what}: a norm of sums that are not made yet would be wrong: {'; '.join(open_sums)}. "
            "Reduce them first: fs.reshard(x, layout) to a layout without unreduced axes."
        )
    meshes: dict[Mesh, str] = {}
    for path, leaf in placed:
        meshes.setdefault(leaf.mesh, path)
    if len(meshes) > 1:
        found = "; ".join(f"{path} on {mesh}" for mesh, path in meshes.items())
        raise LayoutError(f"{what}: the leaves lie on {len(meshes)} meshes: {found}. Lay them on one.")


def sum_over_mesh(leaves: Sequence[Leaf], values: Sequence[Sequence[Tensor]], slots: Sequence[int]) -> Tensor:
    """Add up numbers that were computed from each shard of each leaf.

    Args:
        leaves: whose layouts say which numbers are of the same elements; not unreduced, on one mesh.
        values: for each leaf a 0-d number per shard.
        slots: for each leaf which entry of the result its numbers add to.

    Returns:
        A float64 vector, the same on all devices, where the first number is.
    """
    size = max(slots) + 1
    near = values[0][0].device
    cut = [_cut_axes(leaf) for leaf in leaves]
    mesh = next((leaf.mesh for leaf, axes in zip(leaves, cut, strict=True) if axes), None)
    whole = [i for i, axes in enumerate(cut) if not axes]
    total = _collect([values[i][0] for i in whole], [slots[i] for i in whole], size, near)
    if mesh is None:
        return total
    over = tuple(axis for axis in mesh.axis_names if any(axis in axes for axes in cut))
    parts: list[Tensor] = []
    for index, device in enumerate(held(mesh)):
        place = mesh.coordinates(device)
        mine = [i for i, axes in enumerate(cut) if axes and not any(place[axis] for axis in over if axis not in axes)]
        parts.append(_collect([values[i][index] for i in mine], [slots[i] for i in mine], size, near))
    summands = Sharded((size,), Layout(mesh, P(unreduced=over)), tuple(parts))
    return total + reshard(summands, Layout(mesh)).shards[0].to(near)


def _cut_axes(leaf: Leaf) -> tuple[str, ...]:
    """Return the axes along which devices hold different pieces."""
    if not isinstance(leaf, Sharded):
        return ()
    return tuple(axis for axis in leaf.spec.sharded_axes if leaf.mesh.shape[axis] > 1)


def _collect(values: list[Tensor], slots: list[int], size: int, device: torch.device) -> Tensor:
    """Add each number to its slot of a vector."""
    total = torch.zeros(size, dtype=torch.float64, device=device)
    if not values:
        return total
    numbers = torch.stack([value.to(device, torch.float64) for value in values])
    if slots == list(range(size)):
        return numbers
    return total.index_add(0, torch.tensor(slots, device=device), numbers)
