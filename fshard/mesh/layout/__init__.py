"""Meshes, specs, layouts, sharded arrays and trees of them."""

from fshard.mesh.layout.counting import Memory
from fshard.mesh.layout.layout import (
    Layout,
    ShardType,
    as_layout,
    dtype_name,
    holders,
    is_dense,
    no_dense,
)
from fshard.mesh.layout.mesh import Mesh, Runtime, require_mesh, shortened, use_mesh
from fshard.mesh.layout.spec import Axes, P, as_axes, as_written
from fshard.mesh.layout.tree import (
    NAMESPACE,
    PyTree,
    Structure,
    broadcast_prefix,
    collected,
    flatten,
    flatten_with_paths,
    map_leaves,
    path_text,
    paths_of,
    unflatten,
)

__all__ = [
    "Axes",
    "Layout",
    "Memory",
    "Mesh",
    "NAMESPACE",
    "P",
    "PyTree",
    "Runtime",
    "ShardType",
    "Structure",
    "as_axes",
    "as_layout",
    "as_written",
    "broadcast_prefix",
    "collected",
    "dtype_name",
    "flatten",
    "flatten_with_paths",
    "holders",
    "is_dense",
    "map_leaves",
    "no_dense",
    "path_text",
    "paths_of",
    "require_mesh",
    "shortened",
    "unflatten",
    "use_mesh",
]
