"""Whether what a step is given lies where it is called: for all devices outside of `fs.run`, for one inside.

                     a virtual mesh holds         a process holds
outside of fs.run    a shard for every device     its own
inside               the calling device's own     its own
"""

from __future__ import annotations

from fshard.errors import LayoutError
from fshard.mesh.mesh import Mesh
from fshard.mesh.sharded import Sharded
from fshard.mesh.spmd import held
from fshard.mesh.tree import PyTree, flatten_with_paths
from fshard.transforms.rules import named, parts_of


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
    wrong, inside = list[str](), False
    for name, tree in trees.items():
        paths, leaves, _ = flatten_with_paths(tree, sharded_is_leaf=True)
        for path, x in zip(paths, leaves, strict=True):
            if isinstance(x, Sharded) and len(x.shards) != len(held(x.mesh)):
                wrong.append(".".join((name, *filter(None, [named(parts_of(path))]))))
                inside = len(x.shards) > 1
    if wrong:
        where = "outside of fs.run and used inside" if inside else "inside of fs.run and used outside"
        raise LayoutError(f"{what}: laid out {where}: {', '.join(wrong)}. Lay out everything where the step is called.")
