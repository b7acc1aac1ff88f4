"""Parameters and optimizers placed for a stage of ZeRO."""

import fshard as fs
from fshard import P


def placed(params, stage, mesh):
    """Shard parameters; small units stay apart where leaves of blocks are."""
    has_blocks = isinstance(params, dict) and "blocks" in params
    rules = fs.fsdp("data", unit="blocks[*]" if has_blocks else 1)
    return fs.shard_params(params, rules if stage == 3 else P(), mesh=mesh)
