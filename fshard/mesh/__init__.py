"""The ground floor: meshes, layouts, `shard_map` and collectives on three runtimes."""

from fshard.mesh.collectives.ledger import Ledger
from fshard.mesh.collectives.on_trees import Handle
from fshard.mesh.layout import Layout, Mesh, P, ShardType
from fshard.mesh.layout.dtensor import from_dtensor, to_dtensor
from fshard.mesh.layout.make import from_device_mesh, to_device_mesh
from fshard.mesh.layout.sharded import Sharded, flatten_shards
from fshard.mesh.layout.spmd_type import from_spmd_type, to_spmd_type
from fshard.mesh.reshard.device_put import layouts
from fshard.mesh.runtimes.launchers import process_count, process_index

SAFE_GLOBALS = [Sharded, Layout, Mesh, P]
"""The classes in a saved `Sharded`, for `torch.load`:
`with torch.serialization.safe_globals(fs.mesh.SAFE_GLOBALS): ...`."""

__all__ = [
    "SAFE_GLOBALS",
    "Handle",
    "Ledger",
    "ShardType",
    "flatten_shards",
    "from_device_mesh",
    "from_dtensor",
    "from_spmd_type",
    "layouts",
    "process_count",
    "process_index",
    "to_device_mesh",
    "to_dtensor",
    "to_spmd_type",
]
