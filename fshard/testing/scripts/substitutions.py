"""The substitutions for GPUs, NCCL, compilers and child processes while a script runs.

    torch.distributed.init_process_group("nccl")    gloo, in the store of this run
    torch.cuda.set_device(1)                        nothing
    DDP(model, device_ids=[1])                      DDP(model)

Nothing else in torch is another, and all of it is undone when the script has ended.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from fshard.testing.scripts.devices import (
    StreamInOrder,
    device_or_index_on_cpu,
    functions_of_cuda,
    generator_on_cpu,
    on_cpu,
)
from fshard.testing.scripts.replacing import MakeReplacement, Replacements


class Place(NamedTuple):
    """The process in which a script runs.

    Args:
        rank: of this process.
        size: the number of processes.
        store: in which they meet.
        patience: seconds that one waits for another in a collective.
    """

    rank: int
    size: int
    store: Any
    patience: float

    @property
    def is_alone(self) -> bool:
        """True in the run in one process."""
        return self.size == 1


def table(place: Place) -> Replacements:
    """Return what is substituted while a script runs."""
    return {
        **_processes(place),
        **_meshes(place),
        **_devices(place),
        **_loaders(),
        **_precision(),
        **_compilers(),
        **_dropout(),
        **_batch_norm(),
        **_libraries(place),
    }


# -- makers of functions with other arguments ------------------------------------------------------


def _setting(**values: Any) -> MakeReplacement:
    """Return what makes a function whose arguments of these names have other values, given or not.

    Names that a function does not have are left out: they are of another version of it.
    """

    def make(function: Any) -> Any:
        signature = inspect.signature(function)
        known = {name: value for name, value in values.items() if name in signature.parameters}

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.arguments.update(known)
            return function(*given.args, **given.kwargs)

        return called

    return make


def _changing(**changes: Callable[[Any], Any]) -> MakeReplacement:
    """Return what makes a function of which some arguments, if they are given, are changed."""

    def make(function: Any) -> Any:
        signature = inspect.signature(function)

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            for name, change in changes.items():
                if name in given.arguments:
                    given.arguments[name] = change(given.arguments[name])
            return function(*given.args, **given.kwargs)

        return called

    return make


def _returning(value: Any) -> MakeReplacement:
    """Return what makes a function that returns a value, whatever it is given."""
    return lambda function: lambda *args, **kwargs: value


# -- processes -------------------------------------------------------------------------------------


def _processes(place: Place) -> Replacements:
    join = _init_process_group(place)
    without_nccl: dict[str, Any] = {"backend": None, "pg_options": None, "device_id": None}
    without_nccl["timeout"] = timedelta(seconds=place.patience)
    if place.is_alone:
        without_nccl["ranks"] = None  # the script names the ranks of all processes
    new_group = _setting(**without_nccl)
    return {
        "torch.distributed:init_process_group": join,
        "torch.distributed.distributed_c10d:init_process_group": join,
        "torch.distributed.device_mesh:init_process_group": join,
        "torch.distributed:new_group": new_group,
        "torch.distributed.distributed_c10d:new_group": new_group,
        "torch.multiprocessing:spawn": _spawn(place),
    }


def _init_process_group(place: Place) -> MakeReplacement:
    """Return what makes `init_process_group` of this run's processes, over gloo."""
    count = 0

    def make(original: Any) -> Any:
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            nonlocal count
            if dist.is_initialized():
                raise ValueError("trying to initialize the default process group twice!")
            count += 1
            # A program may leave the group and join again: the old addresses are under other names.
            store = PrefixStore(f"group {count}", place.store)
            patience = timedelta(seconds=place.patience)
            original("gloo", store=store, rank=place.rank, world_size=place.size, timeout=patience)

        return init_process_group

    return make


def _spawn(place: Place) -> MakeReplacement:
    """Return what makes `spawn(fn, args)`, where the processes are there already."""

    def make(original: Any) -> Any:
        def spawn(fn: Any, args: Any = (), *_: Any, **__: Any) -> None:
            fn(place.rank, *args)

        return spawn

    return make


# -- meshes ----------------------------------------------------------------------------------------


def _meshes(place: Place) -> Replacements:
    """Return the substitutions of meshes: of CPUs, and of size 1 in the run in one process."""
    init_device_mesh = _changing(device_type=on_cpu, mesh_shape=_shape(place))
    return {
        "torch.distributed:init_device_mesh": init_device_mesh,
        "torch.distributed.device_mesh:init_device_mesh": init_device_mesh,
        "torch.distributed.device_mesh:DeviceMesh.__init__": _changing(
            device_type=on_cpu, mesh=_ranks(place)
        ),
    }


def _shape(place: Place) -> Callable[[Any], Any]:
    """Return what changes the shape of a mesh."""

    def change(shape: Any) -> Any:
        return (1,) * len(shape) if place.is_alone else shape

    return change


def _ranks(place: Place) -> Callable[[Any], Any]:
    """Return what changes the ranks of a mesh."""

    def change(ranks: Any) -> Any:
        if ranks is None or not place.is_alone:
            return ranks
        ndim = torch.as_tensor(ranks).ndim
        return torch.zeros([1] * ndim, dtype=torch.int)

    return change


# -- devices ---------------------------------------------------------------------------------------


def _devices(place: Place) -> Replacements:
    """Return the substitutions of what `OnCpu` does not see: it sees functions of tensors alone."""
    rows: dict[str, MakeReplacement] = {
        "torch:Generator": generator_on_cpu,
        "torch.nn:Module.to": _module_to,
        # `with torch.device(...)` and set_default_device are modes below all others.
        "torch.utils._device:DeviceContext.__init__": _changing(device=on_cpu),
        # A checkpoint has the device on which each tensor was.
        "torch:load": _setting(map_location="cpu"),
        "torch.nn.parallel:DistributedDataParallel.__init__": _setting(
            device_ids=None, output_device=None
        ),
        "torch.distributed.fsdp:FullyShardedDataParallel.__init__": _fully_sharded_init,
        "torch.amp.autocast_mode:autocast.__init__": _changing(device_type=on_cpu),
        "torch.cuda:Stream": lambda _: StreamInOrder,
        "torch.cuda:Event": lambda _: StreamInOrder,
        "torch.cuda.nvtx:range_push": _returning(0),
        "torch.cuda.nvtx:range_pop": _returning(0),
    }
    for name, value in functions_of_cuda(place.rank, place.size).items():
        rows[f"torch.cuda:{name}"] = _returning(value)
    return rows


def _fully_sharded_init(original: Any) -> Any:
    # Without a device it takes the accelerator, of which there is none.
    with_device = _setting(device_id=torch.device("cpu"))(original)
    return _changing(mixed_precision=_mixed_precision_in_float64)(with_device)


def _module_to(original: Any) -> Any:
    def to(module: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (device_or_index_on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = device_or_index_on_cpu(kwargs["device"])
        return original(module, *args, **kwargs)

    return to


# -- loaders ---------------------------------------------------------------------------------------


def _loaders() -> Replacements:
    """Return loaders without workers: these would be processes of a process, and pin memory."""
    init = _setting(
        num_workers=0,
        worker_init_fn=None,
        multiprocessing_context=None,
        prefetch_factor=None,
        persistent_workers=False,
        timeout=0,
        pin_memory=False,
        pin_memory_device="",
    )
    return {
        "torch.utils.data:DataLoader.__init__": init,
        "torchdata.stateful_dataloader:StatefulDataLoader.__init__": init,
    }


# -- precision -------------------------------------------------------------------------------------


def _precision() -> Replacements:
    return {
        "torch.distributed.fsdp:MixedPrecisionPolicy.__init__": _policy_init,
        "torch.distributed.fsdp:FSDPModule.set_gradient_divide_factor": _set_divide_factor,
    }


def _policy_init(original: Any) -> Any:
    """Return the constructor of a policy of fully_shard that computes in float64.

    Rounding in bfloat16 would explain too much. Gradients that are reduced in less than the program
    computes in stay so: that may be a mistake.
    """

    def init(policy: Any, param_dtype: Any = None, reduce_dtype: Any = None, **others: Any) -> None:
        others.pop("output_dtype", None)
        original(policy, None, _lower_reduce_dtype(param_dtype, reduce_dtype), **others)

    return init


def _mixed_precision_in_float64(policy: Any) -> Any:
    """Return the same for FullyShardedDataParallel, whose policies are made before their use."""
    if policy is None:
        return None
    reduce_dtype = _lower_reduce_dtype(policy.param_dtype, policy.reduce_dtype)
    return replace(policy, param_dtype=None, reduce_dtype=reduce_dtype, buffer_dtype=None)


def _lower_reduce_dtype(param_dtype: Any, reduce_dtype: Any) -> Any:
    """Return a dtype in which gradients are reduced, if it is lower than what is computed in."""
    computed = param_dtype or torch.float32
    is_lower = reduce_dtype is not None and reduce_dtype.itemsize < computed.itemsize
    return reduce_dtype if is_lower else None


def _set_divide_factor(original: Any) -> Any:
    """Return the setter of a factor of gradients that needs no premultiplied sum: gloo has none."""

    def set_gradient_divide_factor(module: Any, factor: float) -> None:
        original(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    return set_gradient_divide_factor


# -- compilers -------------------------------------------------------------------------------------


def _compilers() -> Replacements:
    return {
        "torch:compile": _compile,
        "torch.nn:Module.compile": _returning(None),
        # It refuses gradients on the CPU, since the compiler has none there.
        "torch.nn.attention.flex_attention:_validate_device": _returning(None),
    }


def _compile(original: Any) -> Any:
    def compile(model: Any = None, **_: Any) -> Any:
        return (lambda function: function) if model is None else model

    return compile


# -- dropout ---------------------------------------------------------------------------------------


def _dropout() -> Replacements:
    """Return functions without dropout, which each process draws otherwise."""
    rows: dict[str, MakeReplacement] = {
        "torch.nn.functional:scaled_dot_product_attention": _attention,
        "torch.nn:RNNBase.__init__": _setting(dropout=0.0),
    }
    for name in (
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
    ):
        rows[f"torch.nn.functional:{name}"] = _no_dropout
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"):
        rows[f"torch:{name}"] = _no_dropout
    return rows


def _no_dropout(original: Any) -> Any:
    return lambda input, *args, **kwargs: input


def _attention(original: Any) -> Any:
    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return original(query, key, value, attn_mask, 0.0, *args, **kwargs)

    return attention


# -- BatchNorm -------------------------------------------------------------------------------------


def _batch_norm() -> Replacements:
    """Return SyncBatchNorm on CPUs, which torch has for GPUs alone, and refuses in its wrapper."""
    return {
        "torch.nn:SyncBatchNorm.forward": _sync_batch_norm,
        "torch.nn.parallel:DistributedDataParallel._passing_sync_batchnorm_handle": _returning(
            None
        ),
    }


def _sync_batch_norm(original: Any) -> Any:
    from torch.distributed.nn.functional import all_reduce

    def forward(module: Any, x: Any) -> Any:
        group: Any = module.process_group or dist.group.WORLD
        is_synchronized = module.training and dist.is_initialized() and group.size() > 1
        if not is_synchronized:
            return torch.nn.BatchNorm2d.forward(module, x)  # that of any number of dims

        dims = [0, *range(2, x.ndim)]
        shape = [1, -1] + [1] * (x.ndim - 2)
        count = x.new_tensor(x.numel() // x.shape[1])
        dist.all_reduce(count, group=group)
        # The gradient of the all-reduce is the sum over ranks: each loss depends on all statistics.
        mean = all_reduce(x.sum(dims), group=group) / count
        centered = x - mean.view(shape)
        variance = all_reduce(centered.square().sum(dims), group=group) / count
        _update_running_statistics(module, mean.detach(), variance.detach() * count / (count - 1))
        out = centered / (variance + module.eps).sqrt().view(shape)
        if module.affine:
            out = out * module.weight.view(shape) + module.bias.view(shape)
        return out

    return forward


def _update_running_statistics(module: Any, mean: Tensor, variance: Tensor) -> None:
    if not module.track_running_stats:
        return
    module.num_batches_tracked += 1
    momentum = module.momentum
    if momentum is None:
        momentum = 1 / float(module.num_batches_tracked)  # the mean of all batches
    module.running_mean.lerp_(mean, momentum)
    module.running_var.lerp_(variance, momentum)


# -- libraries -------------------------------------------------------------------------------------


def _libraries(place: Place) -> Replacements:
    """Return constructors that count no GPUs, and no mixed precision: it may need a GPU."""
    fabric = _setting(accelerator="cpu", devices=place.size, num_nodes=1, precision="32-true")
    return {
        "accelerate.accelerator:Accelerator.__init__": _setting(mixed_precision="no"),
        "transformers.training_args:TrainingArguments.__post_init__": _without_mixed_precision,
        "lightning_fabric.fabric:Fabric.__init__": fabric,
        "lightning.fabric.fabric:Fabric.__init__": fabric,
    }


def _without_mixed_precision(original: Any) -> Any:
    """Return a check of arguments of Hugging Face's Trainer that needs no GPU."""

    def check(arguments: Any) -> None:
        arguments.bf16 = False
        arguments.fp16 = False
        arguments.tf32 = None
        original(arguments)

    return check
