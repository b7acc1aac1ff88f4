"""`run`: a whole script function, once per device.

`main` is what torchrun would run: it makes its meshes, lays out its data, calls `shard_map` and collectives, as one of
the devices.  On a virtual mesh the devices are threads; under torchrun each process is one already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fshard.errors import MeshError
from fshard.mesh.mesh import Mesh, refuse_no_mesh
from fshard.mesh.spmd import everywhere, standing


def run(main: Callable[..., Any], *args: Any, mesh: Mesh, check: bool = False, **kwargs: Any) -> list[Any]:
    """Run `main(*args, **kwargs)` as each device of the mesh; return the results of the devices held here.

    On a virtual mesh that is a result for every device, on a process mesh the process's own.  A mesh of some axes stands
    for the whole mesh.  With `check`, what collectives promise to be equal is compared by value.

    >>> import fshard as fs
    >>> def main(greeting):
    ...     return f"{greeting} from {fs.axis_index('data')} of {fs.axis_size('data')}"
    >>> run(main, "hello", mesh=fs.make_mesh({"data": 2}))
    ['hello from 0 of 2', 'hello from 1 of 2']
    """
    refuse_no_mesh("fs.run", mesh)
    if not callable(main):
        raise MeshError(f"fs.run takes a function, to be called as each device, found {type(main).__name__}.")
    return everywhere(standing(mesh), lambda device: main(*args, **kwargs), checked=check, keep=False)
