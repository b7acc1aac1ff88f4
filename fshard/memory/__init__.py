"""Memory: kinds, and limits on what a program may use of each.

kinds       "device", "host" and "disk" of layouts, and the purposes that storages are made for
limit       count every storage of every device by kind and purpose, and raise beyond a limit
snapshot    write what was counted for torch's memory viewer
"""

from fshard.memory.kinds import memory_of

__all__ = ["memory_of"]
