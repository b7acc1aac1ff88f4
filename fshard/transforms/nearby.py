"""Whether what a step is given lies where it is called: on its mesh, and for all devices outside of `fs.run`, for one inside.

                     a virtual mesh holds         a process holds
outside of fs.run    a shard for every device     its own
inside               the calling device's own     its own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fshard.errors import LayoutError
from fshard.mesh.mesh import Mesh
from fshard.mesh.sharded import Sharded
from fshard.mesh.spmd import held
from fshard.mesh.tree import PyTree, flatten, flatten_with_paths
from fshard.transforms.patterns import named, parts_of


def refuse_distant(mesh: Mesh, what: str, **trees: PyTree) -> None:
    """Raise naming what was laid out outside of `fs.run` and is used inside, or the other way round.

    >>> import torch, fshard as fs
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = fs.shard_params({"w": torch.ones(4)}, fs.fsdp("data"), mesh=mesh)
    >>> refuse_distant(mesh, "step", params=params)
    >>> fs.run(lambda: refuse_distant(mesh, "step", params=params), mesh=mesh)
    Traceback (most recent call last):
    fshard.errors.LayoutError: step: laid out outside of fs.run and used inside: params.w. Lay out everything where the ...
    """
    if mesh.runtime != "virtual":
        return
    counts = dict[int, int]()  # by mesh

    def distant(x: Any) -> bool:
        if not isinstance(x, Sharded):
            return False
        lies_on = x.layout.mesh
        if id(lies_on) not in counts:
            counts[id(lies_on)] = len(held(lies_on))
        return len(x.shards) != counts[id(lies_on)]

    found = [x for x in flatten(list(trees.values()), sharded_is_leaf=True)[0] if distant(x)]
    if not found:
        return
    where = "outside of fs.run and used inside" if len(found[0].shards) > 1 else "inside of fs.run and used outside"
    names = [
        ".".join((name, *filter(None, [named(parts_of(path))])))
        for name, tree in trees.items()
        for path, x in zip(*flatten_with_paths(tree, sharded_is_leaf=True)[:2], strict=True)
        if distant(x)
    ]
    raise LayoutError(f"{what}: laid out {where}: {', '.join(names)}. Lay out everything where the step is called.")


WHOLE_OR_FSDP = 'fs.shard_params(params, P(), mesh=mesh), or fs.fsdp("data") for ZeRO-3'


def refuse_unplaced(
    paths: Sequence[str], leaves: Sequence[Any], mesh: Mesh, what: str = "value_and_grad", cure: str = WHOLE_OR_FSDP
) -> None:
    """Raise naming parameters that do not lie on a mesh."""
    wrong = [
        f"{named(parts_of(path)) or 'the parameter'} is {type(x).__name__ if not isinstance(x, Sharded) else f'on {x.mesh}'}"
        for path, x in zip(paths, leaves, strict=True)
        if not isinstance(x, Sharded) or (x.mesh is not mesh and x.mesh != mesh)
    ]
    if wrong:
        raise LayoutError(f"{what} on {mesh}: {'; '.join(wrong)}. Lay the parameters on that mesh: {cure}.")
