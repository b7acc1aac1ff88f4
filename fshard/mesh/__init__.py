"""The ground floor: meshes, layouts, `shard_map` and collectives on three runtimes."""
