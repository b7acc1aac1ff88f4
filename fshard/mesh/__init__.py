"""The ground floor: meshes, layouts, `shard_map` and collectives on three runtimes."""

from fshard.mesh.collectives.ledger import Ledger
from fshard.mesh.collectives.on_trees import Handle
from fshard.mesh.layout import ShardType
from fshard.mesh.layout.dtensor import from_dtensor, to_dtensor
from fshard.mesh.layout.make import from_device_mesh, to_device_mesh
from fshard.mesh.reshard.device_put import layouts
from fshard.mesh.runtimes.launchers import process_count, process_index

__all__ = [
    "Handle",
    "Ledger",
    "ShardType",
    "from_device_mesh",
    "from_dtensor",
    "layouts",
    "process_count",
    "process_index",
    "to_device_mesh",
    "to_dtensor",
]
