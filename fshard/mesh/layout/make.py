"""Make meshes: `make_mesh`, and conversion to and from torch's `DeviceMesh`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from numbers import Integral
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fshard.errors import MeshError
from fshard.mesh.layout.mesh import Mesh, Runtime, require_mesh
from fshard.mesh.runtimes import process
from fshard.mesh.runtimes.launchers import launched, process_count
from fshard.mesh.spmd.scope import Scope, here


def make_mesh(
    axes: Mapping[str, int] | Sequence[tuple[str, int]] | Sequence[int],
    names: Sequence[str] | None = None,
    *,
    devices: Iterable[int] | None = None,
    runtime: Runtime | None = None,
    device: str | torch.device | None = None,
    timeout: float | None = None,
) -> Mesh:
    """Make a mesh of named axes, major to minor.

    Args:
        axes: {"name": size, ...}; or the sizes alone, with `names`. One size may be -1: all other
            processes, or, inside of `fs.run`, devices.
        names: of the axes, as in JAX: `make_mesh((4, 2), ("data", "model"))`.
        devices: the numbers of its devices, in mesh order: of some processes, or of some virtual
            devices. All processes must make it, or all devices of a run. On one that is not among
            the devices, arrays have types and no values, and `mesh.is_member` is False. Default:
            all devices.
        runtime: "virtual" (devices are threads of this process), "process" (devices are processes,
            over gloo or NCCL) or "abstract" (shapes only). By default: process under torchrun,
            srun, mpirun and `fs.launch`, else virtual; inside `fs.run`, the run's own.
        device: "cpu" or "cuda". By default: "cuda" on a process mesh if there are GPUs, else
            torch's default device.
        timeout: seconds until a collective between processes fails (process meshes); `inf` for no
            limit. Default: the environment variable FSHARD_TIMEOUT, or 600.

    >>> make_mesh({"data": 4, "model": 2})
    Mesh(data=4, model=2; 8 devices, virtual, cpu)
    >>> make_mesh({"model": 2}, devices=range(4, 6))
    Mesh(model=2 on 4, 5; 2 devices, virtual, cpu)
    """
    scope = here()
    if runtime is None:
        runtime = _default_runtime(scope)
    if devices is None:
        numbers = None
        count = _count_devices(runtime, scope)
    else:
        numbers = _as_numbers(devices)
        count = len(numbers)
    pairs = _fill_size(_axes_with_sizes(axes, names), count)
    if isinstance(device, torch.device):
        device = device.type
    mesh = Mesh(pairs, runtime, choose_device_type(runtime, device), None, numbers)
    if runtime == "process":
        mesh = replace(mesh, world=process.world_number())

    if timeout is not None and runtime != "process":
        raise MeshError(
            f"timeout={timeout} has no meaning on {mesh}: only processes can be waited for in vain."
        )
    if numbers is not None:
        return _mesh_of_some(mesh, scope, timeout)
    is_in_run = scope is not None and runtime == scope.mesh.runtime
    if scope is not None and is_in_run and mesh.size != scope.mesh.root_size:
        raise MeshError(
            f"{mesh} has {mesh.size} devices, but this code runs on one of "
            f"{scope.mesh.root_size}, of {scope.mesh}. For some of them, name their numbers: "
            f"devices=range({mesh.size})."
        )
    if runtime == "process":
        _join_processes(mesh, timeout)
    return mesh


def _as_numbers(devices: Any) -> tuple[int, ...]:
    """Return numbers of devices as a tuple."""
    numbers: list[Any] = []
    is_iterable = isinstance(devices, Iterable) and not isinstance(devices, str)
    if is_iterable:
        numbers = [_as_size(number) for number in cast("Any", devices)]
    are_integers = all(isinstance(number, int) for number in numbers)
    if numbers and are_integers:
        return tuple(numbers)
    raise MeshError(
        "make_mesh: devices must be the numbers of processes or virtual devices, such as "
        f"range(4, 6); got {devices!r}."
    )


def _mesh_of_some(mesh: Mesh, scope: Scope | None, timeout: float | None) -> Mesh:
    """Return the caller's side of a mesh of some devices: see Note [Outside of a mesh].

    No device waits: groups of processes are made by their members, when they first communicate.
    """
    if mesh.runtime == "process":
        world = process.join(mesh.device_type, timeout)
        caller = world.rank
        known: Sequence[int] = range(dist.get_world_size())
        kind = "processes"
    elif scope is not None and scope.mesh.runtime == mesh.runtime == "virtual":
        caller = scope.number
        known = scope.mesh.devices
        kind = f"devices of {scope.mesh}"
    else:
        return mesh  # the caller has all virtual devices, or shapes alone

    missing = sorted({*mesh.devices} - {*known})
    if missing:
        raise MeshError(
            f"make_mesh: devices must be numbers of the {len(known)} {kind}, "
            f"{known[0]} to {known[-1]}; got {missing[0]}."
        )
    is_of_all = mesh.devices == tuple(known)
    if is_of_all and mesh.runtime == "process":
        # One value for one mesh: arrays of the two would else be on different meshes.
        mesh = replace(mesh, numbers=None)
        process.device_mesh(mesh)
        return mesh
    if caller in mesh.devices:
        return mesh
    return _without_caller(mesh)


def _without_caller(mesh: Mesh) -> Mesh:
    """Return the abstract twin of a mesh that the caller is no device of."""
    return replace(mesh, runtime="abstract", device_type="meta", is_member=False)


def _default_runtime(scope: Scope | None) -> Runtime:
    if scope is not None:
        return scope.mesh.runtime
    return "process" if launched() else "virtual"


def _join_processes(mesh: Mesh, timeout: float | None) -> None:
    """Join the world of processes, and make the groups of a mesh."""
    process.join(mesh.device_type, timeout)
    world = dist.get_world_size()  # it is known only now
    if mesh.size != world:
        count = str(mesh.size)
        if len(mesh.axes) > 1:
            sizes = " x ".join([str(size) for _, size in mesh.axes])
            count = f"{sizes} = {mesh.size}"
        fixes = f"Start it with torchrun --nproc-per-node {mesh.size}, or change a size"
        if mesh.size < world:
            fixes += f", or name some of them: devices=range({mesh.size})"
        raise MeshError(f"{mesh} has {count} devices, but there are {world} processes. {fixes}.")
    process.device_mesh(mesh)


def _axes_with_sizes(axes: Any, names: Any) -> tuple[tuple[str, int], ...]:
    """Return names and sizes, of sizes alone with `names`, as in JAX's make_mesh."""
    pairs: Any = axes
    if names is not None:
        if not _is_list(axes) or not _is_list(names) or len(axes) != len(names):
            raise MeshError(
                "make_mesh: with names, axes must be as many sizes; "
                f"got axes={axes!r}, names={names!r}."
            )
        pairs = [*zip(names, axes, strict=True)]  # no dict: `Mesh` refuses a name that is repeated
    elif isinstance(axes, Mapping):
        pairs = [*axes.items()]

    if not _is_list(pairs) or not all(_is_pair(pair) for pair in pairs):
        raise MeshError(
            f'make_mesh: axes must be names with sizes, {{"data": 4, "model": 2}}; got {axes!r}.'
        )
    return tuple((name, _as_size(size)) for name, size in pairs)


def _is_list(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)


def _is_pair(x: Any) -> bool:
    return isinstance(x, tuple | list) and len(cast("Any", x)) == 2


def _as_size(size: Any) -> Any:
    """Return an integer of another library as an int; what is no integer, for `Mesh` to refuse."""
    is_integer = isinstance(size, Integral) and not isinstance(size, bool)
    return int(size) if is_integer else size


def _count_devices(runtime: Runtime, scope: Scope | None) -> int | None:
    """Return the number of devices that a mesh must have; None if any number can be made."""
    if scope is not None and runtime == scope.mesh.runtime:
        return scope.mesh.root_size
    return process_count() if runtime == "process" else None


def _fill_size(
    pairs: tuple[tuple[str, int], ...], devices: int | None
) -> tuple[tuple[str, int], ...]:
    """Replace the size -1 of an axis by the number of devices over the product of other sizes."""
    unknown = [name for name, size in pairs if size == -1]
    if not unknown:
        return pairs
    if len(unknown) > 1:
        raise MeshError(
            f"make_mesh: one size at most may be -1; got {dict(pairs)}. "
            f"Give the size of {unknown[0]}."
        )
    if devices is None:
        raise MeshError(
            f"make_mesh: the size of {unknown[0]} must be a number here, since no processes were "
            "started together; got -1. fs.mesh.process_count(default=8) is their number under "
            "torchrun, and 8 elsewhere."
        )

    product = prod([size for _, size in pairs if size != -1])
    if product <= 0:
        return pairs  # `Mesh` raises for these sizes
    size_left, remainder = divmod(devices, product)
    if remainder:
        raise MeshError(
            "make_mesh: the sizes beside -1 must divide the number of devices, "
            f"{devices}; got {dict(pairs)}. Change one."
        )
    return tuple((name, size_left if size == -1 else size) for name, size in pairs)


def choose_device_type(runtime: Runtime, device: str | None) -> str:
    """Return the type of a mesh's devices; raise if there are none of a required type."""
    if runtime == "abstract":
        if device not in (None, "meta"):
            raise MeshError(
                f"an abstract mesh has no device, but device={device!r} was given. Leave it out."
            )
        return "meta"

    kind = device
    if kind is None:
        prefers_gpu = runtime == "process" and torch.cuda.is_available()
        is_gpu_default = torch.get_default_device().type == "cuda"
        kind = "cuda" if prefers_gpu or is_gpu_default else "cpu"
    if kind not in ("cpu", "cuda"):
        raise MeshError(f'device={kind!r} is neither "cpu" nor "cuda".')
    if kind == "cuda" and not torch.cuda.is_available():
        raise MeshError(
            'device="cuda" needs a GPU, but torch sees none. Leave it out, or write device="cpu".'
        )
    return kind


def to_device_mesh(mesh: Mesh) -> DeviceMesh:
    """Return torch's DeviceMesh for a process mesh, for torch's own code.

    It has the same processes, axes and groups.
    """
    mesh = require_mesh("to_device_mesh", mesh)
    if mesh.runtime != "process":
        raise MeshError(
            f'{mesh} is {mesh.runtime}: a DeviceMesh is made of processes. Take runtime="process".'
        )
    return process.device_mesh(mesh)


def from_device_mesh(device_mesh: DeviceMesh) -> Mesh:
    """Return the mesh for a torch DeviceMesh, with its groups.

    The axes need names (`mesh_dim_names=`).
    """
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(
            "from_device_mesh: device_mesh must be a torch DeviceMesh; "
            f"got {type(device_mesh).__name__}."
        )
    names = device_mesh.mesh_dim_names
    if names is None:
        raise MeshError(
            "This DeviceMesh has no axis names. Give init_device_mesh(..., mesh_dim_names=(...))."
        )
    process.join(device_mesh.device_type, None)
    ranks = tuple(int(rank) for rank in device_mesh.mesh.flatten().tolist())
    axes = tuple(zip(names, device_mesh.mesh.shape, strict=True))
    is_ordered = ranks == tuple(range(dist.get_world_size()))
    numbers = None if is_ordered else ranks
    world = process.world_number()
    mesh = Mesh(axes, "process", device_mesh.device_type, None, numbers, world=world)
    if dist.get_rank() not in ranks:
        return _without_caller(mesh)
    process.use_groups(mesh, device_mesh)
    return mesh
