"""Memory: kinds, and limits on what a program may use of each.

A layout names the kind of memory that its shards are in: "device", "host" or "disk". `limit` counts
the storages of every device by kind and purpose, on every runtime, and raises beyond a limit.
"""

from fshard.memory.kinds import claim, purpose
from fshard.memory.limit import limit
from fshard.memory.placement import Placement, Rates, place
from fshard.memory.usage import Holder, MemoryUsage
from fshard.mesh.layout.kinds import memory_of

__all__ = [
    "Holder",
    "MemoryUsage",
    "Placement",
    "Rates",
    "claim",
    "limit",
    "memory_of",
    "place",
    "purpose",
]
