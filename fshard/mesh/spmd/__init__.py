"""`shard_map` and `run`: functions that run once on each device."""
