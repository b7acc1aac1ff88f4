"""Running one function on every device that the calling code stands for.

Code either stands *outside* a mesh, for all its devices (a notebook with a virtual mesh), or *is* one device (a process
under torchrun, a thread of `run`, the body of a `shard_map`).  `everywhere` hides which; that is why everything built
on it is one program on all runtimes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from torch import Tensor

from fshard.mesh.marks import mark
from fshard.mesh.mesh import Mesh
from fshard.mesh.runtimes.abstract import AbstractWorld
from fshard.mesh.runtimes.process import ProcessWorld
from fshard.mesh.runtimes.virtual import VirtualWorld
from fshard.mesh.runtimes.watch import watching
from fshard.mesh.scope import Scope, enter, entered, here, require
from fshard.mesh.valueless import Valueless
from fshard.source import call_site

Result = TypeVar("Result")


def inside(mesh: Mesh) -> Scope | None:
    """Return the scope in which the caller is a device of `mesh`, None if it stands outside."""
    scope = here()
    same = scope is not None and scope.mesh.runtime == mesh.runtime and scope.mesh.root_size == mesh.root_size
    return scope if same else None


def standing(mesh: Mesh) -> Mesh:
    """Return the mesh to run on.

    Where no axis is mapped yet, a mesh of some axes stands for the whole mesh, with the other axes left free: all rows
    do the same.  Inside a `shard_map` it is the caller's own row.
    """
    scope = inside(mesh)
    if mesh.parent is None or (scope is not None and scope.mapped):
        return mesh
    return Mesh(mesh.parent, mesh.runtime, mesh.device_type, None, mesh.ranks)


def is_outside(mesh: Mesh) -> bool:
    """Return whether the caller stands for all devices of a virtual mesh, and so holds all shards."""
    return mesh.runtime == "virtual" and inside(mesh) is None


def device_of(mesh: Mesh) -> int:
    """Return the number, in the mesh that `mesh` was cut from, of the one device that the caller is."""
    scope = inside(mesh)
    if scope is not None:
        return scope.device
    return ProcessWorld.of(mesh).device(mesh) if mesh.runtime == "process" else 0


def held(mesh: Mesh) -> tuple[int, ...]:
    """Return the numbers, in `mesh`, of the devices whose shards the caller holds."""
    return tuple(range(mesh.size)) if is_outside(mesh) else (mesh.local_index(device_of(mesh)),)


def fills(mesh: Mesh) -> bool:
    """Return whether what is gathered on a mesh comes into the memory that is given for it: see `World.start`."""
    return mesh.runtime == "process" and mesh.device_type == "cpu" and ProcessWorld.of(mesh).is_near(mesh)


def agree(mesh: Mesh, call: str) -> None:
    """Under `FSHARD_CHECK=1`, raise on all processes of a mesh unless all make this call."""
    if mesh.runtime == "process" and watching():
        site, axes = call_site(), mesh.axis_names
        everywhere(mesh, lambda device: ProcessWorld.of(mesh).agree(call, require(call).group(axes, call), site))


def everywhere(
    mesh: Mesh,
    body: Callable[[int], Result],
    *,
    mapped: tuple[str, ...] = (),
    checked: bool = False,
    random: Tensor | None = None,
    keep: bool = True,
) -> list[Result]:
    """Run `body(device)` on every device that the caller stands for, each in its scope; return their results.

    `random` is the random state that the devices of a virtual mesh begin with, if not the caller's.  With `keep`, idle threads
    wait for the next run.
    """
    if is_outside(mesh):
        alone = mesh if mesh.parent is None else Mesh(mesh.axes, mesh.runtime, mesh.device_type)
        virtual = VirtualWorld(alone)

        def on_thread(device: int) -> Any:
            mark(device)
            before = enter(Scope(virtual, alone, device, mapped=mapped, checked=checked))
            try:
                return body(device)
            finally:
                enter(before)

        return virtual.run(on_thread, random, keep=keep)
    outer = inside(mesh)
    scope = _scope(mesh, outer, mapped, checked)
    with entered(scope), Valueless() if mesh.runtime == "abstract" and outer is None else nullcontext():
        return [body(mesh.local_index(scope.device))]


def _scope(mesh: Mesh, outer: Scope | None, mapped: tuple[str, ...], checked: bool) -> Scope:
    """Return the scope of the one device that the caller is, made once for each world or outer scope."""
    if outer is not None:
        world, scopes = outer.world, outer.inner
    else:
        world = ProcessWorld.of(mesh) if mesh.runtime == "process" else _ABSTRACT
        scopes = world.scopes
    key = mesh, mapped, checked
    found = scopes.get(key)
    if found is None:
        if len(scopes) >= 512:
            scopes.clear()
        found = scopes[key] = Scope(world, mesh, device_of(mesh), outer, mapped=mapped, checked=checked)
    return found


_ABSTRACT = AbstractWorld()
