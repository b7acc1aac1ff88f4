"""`partition_optimizer`: ZeRO for any optimizer.

How an optimizer may be sharded is a value of it (`sharding.py`). `sharded/layouts.py` makes a table
of layouts of that, and `sharded/optimizer.py` runs the optimizer on these shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from fshard.errors import OptimizerError
from fshard.foreign_names import renamed_keywords
from fshard.memory.state import UpdateOn
from fshard.mesh.layout import Memory, Mesh
from fshard.optim.contract import Optimizer
from fshard.optim.nesting import check_not_sharded
from fshard.optim.per_device.run import on_arrays
from fshard.optim.sharded.compression import Compression
from fshard.optim.sharded.layouts import ShardLayouts, Stage
from fshard.optim.sharded.offload import StateMemory
from fshard.optim.sharded.optimizer import ShardedOptimizer
from fshard.optim.sharding import ShardKind, is_flat


@renamed_keywords(unit='sharding="flat" in place of "elementwise", sharding="owners" of "matrix"')
def partition_optimizer(
    opt: Optimizer,
    *,
    mesh: Mesh,
    axis: str | tuple[str, ...],
    stage: Stage,
    sharding: ShardKind | None = None,
    compress: Mapping[str, Any] | None = None,
    state_memory: Memory = "device",
    update_on: UpdateOn = "device",
) -> ShardedOptimizer:
    """Shard an optimizer's state and work over the devices along `axis`.

    Args:
        opt: any pair of init and update.
        mesh: the devices of the parameters.
        axis: an axis, or several, along which the parameters are replicated (stages 0 to 2) or
            sharded (stage 3).
        stage: of ZeRO: 0 shards nothing, 1 and 2 state and gradients, 3 parameters as well.
            Parameters keep the layouts of `shard_params`: one that is replicated along `axis` is
            treated in stage 3 as in 2.
        sharding: every leaf as flat ranges ("flat"), or the leaves in full at owners of about equal
            total size ("owners"). None: as `opt.sharding` is: in `by_label` leaf by leaf.
        compress: by axis, along which the parameters are replicated, a compressor of `fs.comm`: it
            reduces the gradients there. Then the state is {"compress", "inner"}.
        state_memory: where the state is: on the "device", the "host", or "disk", in unlinked files
            in the folder that the environment names as FSHARD_DISK. State on disk is updated in
            place: `train_step(..., donate=True)`.
        update_on: the "device", to which state elsewhere is moved in groups of leaves and back; or
            the "host", to which gradients and parameters are sent, and parameters back. Gradients
            for flat shards are sent when they are reduced, and those of several microbatches are
            added there.

    In stages 1 to 3 an own `update` of plain tensors sees the device's shards or the leaves that it
    owns, so a norm of its gradients would be wrong: `fs.optim.global_norm(grads)` there is that of
    all. `fs.testing.check_elementwise` tests it. `torch.randn_like(grad)` there has the elements of
    one device's draw, as have draws like any tensor of one leaf. Other draws there must be one
    number.

    `update` and `step` send an all_gather of the parameters in stages 1 and 2; and for leaves at
    owners an all_to_all of the device's gradient shards, one of the parameters after the update,
    and in stage 3 one before.

    >>> import torch, fshard as fs
    >>> from fshard import P
    >>> mesh = fs.make_mesh({"data": 2})
    >>> params = fs.shard_params({"w": torch.ones(4)}, P(), mesh=mesh)
    >>> opt = fs.optim.sgd(1.0, momentum=0.9)
    >>> opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=1)
    >>> grads = fs.device_put({"w": torch.arange(4.0)}, fs.Layout(mesh, P.flat("data")))
    >>> params, state = opt.step(grads, opt.init(params), params)
    >>> fs.typeof(params["w"]), fs.unshard(params["w"])
    (f32[4], tensor([ 1.,  0., -1., -2.]))

    >>> opt = fs.partition_optimizer(fs.optim.muon(0.1), mesh=mesh, axis="data", stage=1)
    >>> shapes = [(4, 3), (2, 3), (2, 3)]
    >>> params = fs.shard_params([torch.ones(shape) for shape in shapes], P(), mesh=mesh)
    >>> [fs.typeof(x) for x in opt.init(params)["momentum_buffer"]]
    [f32[4, 3]{at:data=0}, f32[2, 3]{at:data=1}, f32[2, 3]{at:data=1}]
    """
    axes = mesh.check_axes(axis, "partition_optimizer(axis=)")
    check_not_sharded(opt, "partition_optimizer")
    arrays = on_arrays(opt, "partition_optimizer")
    _validate(arrays, stage, sharding)
    memory = StateMemory(state_memory, update_on)
    kind = arrays.sharding if sharding is None else sharding
    # Flat gradients go to the host as soon as they are reduced. Owners first collect them, by
    # collectives, which run in the devices' memory.
    are_sent = update_on == "host" and is_flat(kind)
    layouts = ShardLayouts(mesh, axes, stage, kind, "host" if are_sent else "device")
    compression = None
    if compress is not None:
        sharded_axes = axes if layouts.is_divided else ()
        others = tuple([axis for axis in sharded_axes if axis not in compress])
        compression = Compression(compress, mesh, others, arrays.loss_scale)
    return ShardedOptimizer(arrays, layouts, memory, compression=compression)


def as_sharded(opt: Any, mesh: Mesh, caller: str) -> ShardedOptimizer:
    """Return a sharded optimizer itself; another one with its state like the parameters."""
    if isinstance(opt, ShardedOptimizer):
        return opt
    arrays = on_arrays(opt, caller)
    return ShardedOptimizer(arrays, ShardLayouts(mesh, (), 0, arrays.sharding))


def _validate(opt: Optimizer, stage: Stage, sharding: ShardKind | None) -> None:
    if stage not in get_args(Stage) or isinstance(stage, bool):
        raise OptimizerError(
            f"partition_optimizer: stage must be 0, 1, 2 or 3, as in ZeRO; got {stage!r}."
        )
    if sharding not in (None, *get_args(ShardKind)):
        raise OptimizerError(
            f'partition_optimizer: sharding must be "flat", "owners" or None; got {sharding!r}.'
        )
    is_forced_flat = sharding is not None and is_flat(sharding) and not is_flat(opt.sharding)
    if stage > 0 and is_forced_flat:
        raise OptimizerError(
            f'partition_optimizer(stage={stage}, sharding="flat"): this optimizer is not '
            "elementwise, so shards of parameters would give other results. Use "
            'sharding="owners", which gives each full parameter to one device, or leave it to the '
            "optimizer: sharding=None."
        )
