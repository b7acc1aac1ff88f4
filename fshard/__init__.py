"""fshard: JAX's sharding model for PyTorch.

A named mesh of devices, layouts as values, and pure functions on shards; one program on virtual
devices (threads of this process), on real ones (torch.distributed) and on none (shapes only).
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fshard import array, errors, experts, explore, memory, mesh, nn, optim, pipeline, tensor
from fshard.explore.picture import visualize
from fshard.foreign_names import hint
from fshard.mesh.collectives.api import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    broadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    pvary,
    replicated,
)
from fshard.mesh.collectives.ledger import ledger
from fshard.mesh.collectives.send_recv import recv, send
from fshard.mesh.layout import Layout, Mesh, P, use_mesh
from fshard.mesh.layout.make import make_mesh
from fshard.mesh.layout.sharded import Sharded, from_local, typeof
from fshard.mesh.reshard.broadcast_to import broadcast_to
from fshard.mesh.reshard.device_put import device_put, reshard, unshard
from fshard.mesh.spmd.run import run
from fshard.mesh.spmd.shard_map import shard_map
from fshard.optim.partition import partition_optimizer
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.randomness import keyed_random
from fshard.tensor.plan import tensor_parallel
from fshard.transforms.evaluate import evaluate
from fshard.transforms.fsdp.param_runtime import with_unsharded_params
from fshard.transforms.module.functionalize import functionalize
from fshard.transforms.module.lazy import lazy
from fshard.transforms.module.remat import remat
from fshard.transforms.shard_params import fsdp, shard_params
from fshard.transforms.stages.plan import shard_stages
from fshard.transforms.train_step import train_step
from fshard.transforms.value_and_grad import grad, value_and_grad

if TYPE_CHECKING:
    from fshard import comm, refit, report
    from fshard.auditing.audit import audit
    from fshard.auditing.replay import replay
    from fshard.booster.booster import Booster
    from fshard.booster.gemini import GeminiPlugin
    from fshard.booster.hybrid import HybridParallelPlugin
    from fshard.booster.parallel import parallel
    from fshard.booster.plugins import DDPPlugin, FSDPPlugin, ZeroPlugin
    from fshard.checkpoint.folder import Checkpoints
    from fshard.checkpoint.foreign.export import export
    from fshard.checkpoint.random import RandomState
    from fshard.checkpoint.restore import restore
    from fshard.checkpoint.save import save
    from fshard.launching.launch import launch
    from fshard.parallelism.value import Parallelism
    from fshard.recovery.elastic import elastic

# Packages on top of the core are imported when a name of theirs is first used: a program uses few
# of them. What changes torch's operations on arrays, or how values are shown, is imported above.
_NAMESPACES = ("comm", "plan", "refit", "report", "testing")
_MODULES = {
    "audit": "fshard.auditing.audit",
    "replay": "fshard.auditing.replay",
    "Booster": "fshard.booster.booster",
    "GeminiPlugin": "fshard.booster.gemini",
    "HybridParallelPlugin": "fshard.booster.hybrid",
    "parallel": "fshard.booster.parallel",
    "DDPPlugin": "fshard.booster.plugins",
    "FSDPPlugin": "fshard.booster.plugins",
    "ZeroPlugin": "fshard.booster.plugins",
    "Checkpoints": "fshard.checkpoint.folder",
    "export": "fshard.checkpoint.foreign.export",
    "RandomState": "fshard.checkpoint.random",
    "restore": "fshard.checkpoint.restore",
    "save": "fshard.checkpoint.save",
    "launch": "fshard.launching.launch",
    "Parallelism": "fshard.parallelism.value",
    "elastic": "fshard.recovery.elastic",
}


def __getattr__(name: str) -> Any:
    """Import a package, or a name of one, when it is first used.

    Also read the version, and hint at fshard's word for a name of another library.
    """
    if name in _NAMESPACES:
        return import_module(f"fshard.{name}")
    if name == "lab":  # it is above `fshard.testing`, which imports this module
        return import_module("fshard.laboratory").lab
    if name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value
    if name == "__version__":
        return version("fshard")
    raise AttributeError(f"module 'fshard' has no attribute {name!r}.{hint(name)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    # meshes and layouts
    "make_mesh",
    "use_mesh",
    "Mesh",
    "P",
    "Layout",
    "Sharded",
    "device_put",
    "reshard",
    "unshard",
    "broadcast_to",
    "from_local",
    "typeof",
    "visualize",
    # programs on all devices
    "shard_map",
    "run",
    "launch",
    "ledger",
    # collectives
    "axis_index",
    "axis_size",
    "psum",
    "pmean",
    "pmax",
    "pmin",
    "all_gather",
    "psum_scatter",
    "all_to_all",
    "ppermute",
    "broadcast",
    "pvary",
    "replicated",
    "send",
    "recv",
    # training
    "functionalize",
    "shard_params",
    "fsdp",
    "partition_optimizer",
    "train_step",
    "value_and_grad",
    "grad",
    "evaluate",
    "lazy",
    "with_unsharded_params",
    "remat",
    "keyed_random",
    "audit",
    "replay",
    "tensor_parallel",
    # checkpoints
    "save",
    "restore",
    "export",
    "Checkpoints",
    "RandomState",
    "elastic",
    # pipelines
    "pipeline_schedule",
    "shard_stages",
    # torch's loop
    "Parallelism",
    "Booster",
    "DDPPlugin",
    "ZeroPlugin",
    "FSDPPlugin",
    "GeminiPlugin",
    "HybridParallelPlugin",
    "parallel",
    # namespaces
    "array",
    "comm",
    "errors",
    "experts",
    "explore",
    "memory",
    "mesh",
    "nn",
    "optim",
    "pipeline",
    "refit",
    "report",
    "tensor",
]
