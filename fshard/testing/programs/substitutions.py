"""The replacements that a script has for GPUs, NCCL, compilers and child processes while it runs.

    torch.distributed.init_process_group("nccl")    gloo, in the store of this run
    torch.cuda.set_device(1)                        nothing
    DDP(model, device_ids=[1])                      DDP(model)

Each row of the table has its reason. Nothing else in torch is another, and all of it is undone
when the script has ended.
"""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from fshard.testing.programs.precision import InFloat64

ACCELERATORS = ("cuda", "mps", "xpu")


class Place(NamedTuple):
    """The process in which a script runs.

    Args:
        rank: of this process.
        size: the number of processes.
        store: in which they meet.
        seed_shift: is added to the seeds that the script sets.
    """

    rank: int
    size: int
    store: Any
    seed_shift: int = 0

    @property
    def is_alone(self) -> bool:
        """True in the run in one process."""
        return self.size == 1


class Substitution(NamedTuple):
    """A name of a module, and what makes the replacement of its value."""

    name: str
    replace: Callable[[Any], Any]
    reason: str


# -- devices ---------------------------------------------------------------------------------------


def on_cpu(x: Any) -> Any:
    """Return the CPU for a GPU; anything else as it is.

    >>> on_cpu("cuda:1"), on_cpu(torch.device("meta"))
    ('cpu', device(type='meta'))
    """
    if isinstance(x, torch.device) and x.type in ACCELERATORS:
        return torch.device("cpu")
    if isinstance(x, str) and x.partition(":")[0] in ACCELERATORS:
        return "cpu"
    return x


def _device_or_index_on_cpu(x: Any) -> Any:
    """Return the CPU also for the index of a GPU."""
    is_index = isinstance(x, int) and not isinstance(x, bool)
    return torch.device("cpu") if is_index else on_cpu(x)


class OnCpu(InFloat64):
    """Gives functions of torch the CPU for a GPU, and float64 for float32.

    Autocast leaves float64 as it is, and what a program has cast for it is float64 again.

    Args:
        before_backward: is called with the loss of a backward, and whether it adds to gradients.
        after_backward: is called when it has ended, with the latter.
        before_function: returns the arguments that a function of torch gets instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before_backward: Callable[[Any, bool], None] = lambda loss, is_backward: None
        self.after_backward: Callable[[bool], None] = lambda is_backward: None
        self.before_function: Callable[[Any, Sequence[Any], dict[str, Any]], Any] | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        options = dict(kwargs or {})
        if func is Tensor.cuda or func is Tensor.pin_memory:
            return args[0]

        if "device" in options:
            options["device"] = _device_or_index_on_cpu(options["device"])
        if "pin_memory" in options:
            options["pin_memory"] = False
        if func is Tensor.to and len(args) > 1:
            args = [args[0], _device_or_index_on_cpu(args[1]), *args[2:]]
        if self.before_function is not None:
            args, options = self.before_function(func, args, options)
        return super().__torch_function__(func, types, args, options)

    def argument(self, x: Any) -> Any:
        """Return what a function of torch is given for an argument."""
        is_low = type(x) is Tensor and x.dtype in (torch.bfloat16, torch.float16)
        if is_low and torch.is_autocast_enabled("cpu"):
            return x.double()
        return on_cpu(super().argument(x))

    def _run_backward(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        is_backward = func is not torch.autograd.grad  # which adds to no gradient
        self.before_backward(args[0] if args else None, is_backward)
        try:
            return super()._run_backward(func, args, kwargs)
        finally:
            self.after_backward(is_backward)


def _generator(original: Any) -> Any:
    """Return a class whose calls make torch's own generators, of the CPU."""
    kind: Any = type(original)

    class OnCpuOnly(kind):
        def __call__(self, device: Any = "cpu") -> Any:
            return original(device=_device_or_index_on_cpu(device))

        def __instancecheck__(self, x: Any) -> bool:
            return isinstance(x, original)

    class Generator(original, metaclass=OnCpuOnly):
        pass

    return Generator


def _with(**replaced: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what makes a function whose named arguments, if they are given, are replaced."""

    def replace(function: Any) -> Any:
        signature = inspect.signature(function)

        def called(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            for name, change in replaced.items():
                if name in given.arguments:
                    given.arguments[name] = change(given.arguments[name])
            return function(*given.args, **given.kwargs)

        return called

    return replace


def _no_dropout(original: Any) -> Any:
    return lambda input, *args, **kwargs: input


def _always(value: Any) -> Callable[[Any], Any]:
    """Return what makes a function that returns a value."""
    return lambda function: lambda *args, **kwargs: value


def _nothing(x: Any) -> None:
    """Return None, whatever was given."""


class _Stream:
    """A stream or an event of a GPU, where all is done in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = synchronize = wait = wait_stream = wait_event = record_event = _ignore

    def query(self) -> bool:
        """Return that all is done."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """Return milliseconds."""
        return 0.0


_PROPERTIES = SimpleNamespace(
    name="cpu", total_memory=1 << 36, major=9, minor=0, multi_processor_count=1
)


def _of_cuda(place: Place) -> dict[str, Any]:
    """Return the values of functions of torch.cuda."""
    no_value = (
        "init set_device synchronize empty_cache ipc_collect reset_peak_memory_stats "
        "reset_max_memory_allocated manual_seed manual_seed_all set_per_process_memory_fraction"
    )
    no_bytes = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    values: dict[str, Any] = dict.fromkeys(no_value.split())
    values.update(dict.fromkeys(no_bytes.split(), 0))
    values.update(
        device_count=place.size,
        current_device=place.rank,
        get_device_name="cpu",
        get_device_capability=(9, 0),
        get_device_properties=_PROPERTIES,
        is_bf16_supported=True,
        mem_get_info=(1 << 36, 1 << 36),
        memory_stats=defaultdict[str, int](int),
        memory_summary="",
        stream=nullcontext(),
        device=nullcontext(),
        current_stream=_Stream(),
        default_stream=_Stream(),
    )
    return values


# -- processes -------------------------------------------------------------------------------------


def _init_process_group(place: Place) -> Callable[[Any], Any]:
    """Return what makes `init_process_group` of this run's processes."""
    count = 0

    def replace(original: Any) -> Any:
        def init_process_group(*args: Any, timeout: Any = None, **kwargs: Any) -> None:
            nonlocal count
            if dist.is_initialized():
                raise ValueError("trying to initialize the default process group twice!")
            count += 1
            # A program may leave the group and join again: the old addresses are under other names.
            store = PrefixStore(f"group {count}", place.store)
            original("gloo", store=store, rank=place.rank, world_size=place.size, timeout=timeout)

        return init_process_group

    return replace


def _new_group(place: Place) -> Callable[[Any], Any]:
    def replace(original: Any) -> Any:
        signature = inspect.signature(original)

        def new_group(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            for name in ("backend", "pg_options", "device_id"):
                given.pop(name, None)
            if place.is_alone:
                given["ranks"] = None
            return original(**given)

        return new_group

    return replace


def _mesh_shape(place: Place) -> Callable[[Any], Any]:
    """Return what gives each axis of a mesh one device in the run in one process."""

    def change(shape: Any) -> Any:
        return tuple(1 for _ in shape) if place.is_alone else shape

    return change


def _mesh(place: Place) -> Callable[[Any], Any]:
    def change(mesh: Any) -> Any:
        if mesh is None or not place.is_alone:
            return mesh
        ndim = torch.as_tensor(mesh).ndim
        return torch.zeros([1] * ndim, dtype=torch.int)

    return change


def _spawn(place: Place) -> Callable[[Any], Any]:
    def replace(original: Any) -> Any:
        def spawn(fn: Any, args: Any = (), *_: Any, **__: Any) -> None:
            fn(place.rank, *args)

        return spawn

    return replace


def _compile(original: Any) -> Any:
    def compile(model: Any = None, **_: Any) -> Any:
        return (lambda function: function) if model is None else model

    return compile


def _attention(original: Any) -> Any:
    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs.pop("dropout_p", None)
        if args:
            kwargs["is_causal"] = args[1] if len(args) > 1 else False
        return original(query, key, value, attn_mask, **kwargs)

    return attention


def _module_to(original: Any) -> Any:
    def to(module: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_device_or_index_on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _device_or_index_on_cpu(kwargs["device"])
        return original(module, *args, **kwargs)

    return to


def _module_cuda(original: Any) -> Any:
    return lambda module, device=None: module


def _loader_init(original: Any) -> Any:
    """Return the constructor of a loader without processes of its own."""
    signature = inspect.signature(original)
    of_workers = [
        "num_workers",
        "pin_memory",
        "prefetch_factor",
        "persistent_workers",
        "multiprocessing_context",
        "timeout",
        "pin_memory_device",
        "worker_init_fn",
    ]

    def init(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        for name in of_workers:
            given.arguments.pop(name, None)
        positional = [*given.arguments.values()][:2]
        named = dict([*given.arguments.items()][2:])
        original(*positional, **named)

    return init


def _shifted(place: Place) -> Callable[[Any], Any]:
    def replace(original: Any) -> Any:
        def seed(value: Any = None, *args: Any, **kwargs: Any) -> Any:
            if isinstance(value, int):
                value = value + place.seed_shift
            return original(value, *args, **kwargs)

        return seed

    return replace


def _fabric_init(place: Place) -> Callable[[Any], Any]:
    replace = _with(
        accelerator=lambda _: "cpu",
        devices=lambda _: place.size,
        num_nodes=lambda _: 1,
        precision=lambda _: "32-true",
    )

    def replaced(original: Any) -> Any:
        init = replace(original)
        signature = inspect.signature(original)

        def called(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            given.setdefault("accelerator", "cpu")
            given.setdefault("devices", place.size)
            plugins = given.pop("kwargs", {})
            init(**given, **plugins)

        return called

    return replaced


def _policy_init(original: Any) -> Any:
    """Return the constructor of a policy of fully_shard that computes in float64.

    Gradients that are reduced in less than the program computes in stay so: that may be a mistake.
    """

    def init(policy: Any, param_dtype: Any = None, reduce_dtype: Any = None, **others: Any) -> None:
        computed = param_dtype or torch.float32
        is_lower = reduce_dtype is not None and reduce_dtype.itemsize < computed.itemsize
        others.pop("output_dtype", None)
        original(policy, None, reduce_dtype if is_lower else None, **others)

    return init


def _set_divide_factor(original: Any) -> Any:
    """Return the setter of a factor of gradients that is applied without NCCL's premultiplied sum."""

    def set_gradient_divide_factor(module: Any, factor: float) -> None:
        original(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    return set_gradient_divide_factor


def _without_mixed_precision(original: Any) -> Any:
    """Return a check of arguments of Hugging Face's Trainer that needs no GPU."""

    def check(arguments: Any) -> None:
        arguments.bf16 = False
        arguments.fp16 = False
        arguments.tf32 = None
        original(arguments)

    return check


def table(place: Place) -> list[Substitution]:
    """Return what is substituted while a script runs."""
    join = _init_process_group(place)
    to_cpu = on_cpu
    rows = [
        Substitution(f"{module}:init_process_group", join, "gloo: there are no GPUs")
        for module in (
            "torch.distributed",
            "torch.distributed.distributed_c10d",
            "torch.distributed.device_mesh",
        )
    ]
    for module in ("torch.distributed", "torch.distributed.distributed_c10d"):
        rows.append(Substitution(f"{module}:new_group", _new_group(place), "gloo, of this run"))
    for module in ("torch.distributed", "torch.distributed.device_mesh"):
        replace = _with(device_type=to_cpu, mesh_shape=_mesh_shape(place))
        rows.append(Substitution(f"{module}:init_device_mesh", replace, "a mesh of CPUs"))

    seeds = _shifted(place)
    rows += [
        Substitution(
            "torch.distributed.device_mesh:DeviceMesh.__init__",
            _with(device_type=to_cpu, mesh=_mesh(place)),
            "a mesh of CPUs",
        ),
        Substitution("torch.multiprocessing:spawn", _spawn(place), "the processes are there"),
        Substitution(
            "torch.nn.parallel:DistributedDataParallel.__init__",
            _with(device_ids=_nothing, output_device=_nothing),
            "the module is on the CPU",
        ),
        Substitution(
            "torch.distributed.fsdp:FullyShardedDataParallel.__init__",
            _with(device_id=_nothing),
            "the module is on the CPU",
        ),
        Substitution("torch:Generator", _generator, "it is a class, whose calls no mode sees"),
        Substitution("torch:compile", _compile, "the compiler is not what is certified"),
        Substitution("torch.nn:Module.compile", _always(None), "as torch.compile"),
        Substitution("torch.nn:Module.to", _module_to, "the index of a GPU is a device"),
        Substitution("torch.nn:Module.cuda", _module_cuda, "there are no GPUs"),
        Substitution(
            "torch.utils._device:DeviceContext.__init__",
            _with(device=to_cpu),
            "`with torch.device(...)` and set_default_device stand below all other modes",
        ),
        Substitution(
            "torch:load", _with(map_location=lambda _: "cpu"), "a checkpoint is read to a GPU"
        ),
        Substitution(
            "torch.utils.data:DataLoader.__init__", _loader_init, "its workers would be processes"
        ),
        Substitution(
            "torchdata.stateful_dataloader:StatefulDataLoader.__init__",
            _loader_init,
            "its workers would be processes",
        ),
        Substitution("torch.cuda:Stream", lambda _: _Stream, "there are no streams"),
        Substitution("torch.cuda:Event", lambda _: _Stream, "there are no streams"),
        Substitution("torch.cuda.nvtx:range_push", _always(0), "there is no profiler"),
        Substitution("torch.cuda.nvtx:range_pop", _always(0), "there is no profiler"),
    ]
    no_dropout = "another draw in each process"
    for name in [
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
    ]:
        rows.append(Substitution(f"torch.nn.functional:{name}", _no_dropout, no_dropout))
    for name in ["dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"]:
        rows.append(Substitution(f"torch:{name}", _no_dropout, no_dropout))
    rows += [
        Substitution("torch.nn.functional:scaled_dot_product_attention", _attention, no_dropout),
        Substitution("torch.nn:RNNBase.__init__", _with(dropout=lambda _: 0.0), no_dropout),
        Substitution(
            "torch.amp.autocast_mode:autocast.__init__", _with(device_type=to_cpu), "as on a GPU"
        ),
        Substitution(
            "accelerate.accelerator:Accelerator.__init__",
            _with(mixed_precision=lambda _: "no"),
            "some need a GPU, and none changes float64",
        ),
        Substitution(
            "transformers.training_args:TrainingArguments.__post_init__",
            _without_mixed_precision,
            "some need a GPU, and none changes float64",
        ),
    ]
    rows.append(
        Substitution(
            "torch.distributed.fsdp:MixedPrecisionPolicy.__init__",
            _policy_init,
            "rounding in bf16 would explain too much",
        )
    )
    rows.append(
        Substitution(
            "torch.distributed.fsdp:FSDPModule.set_gradient_divide_factor",
            _set_divide_factor,
            "gloo has no premultiplied sum",
        )
    )
    rows.append(
        Substitution(
            "torch.nn.attention.flex_attention:_validate_device",
            _always(None),
            "it refuses gradients on the CPU, since the compiler has none there",
        )
    )
    for package in ("lightning_fabric", "lightning.fabric"):
        name = f"{package}.fabric:Fabric.__init__"
        rows.append(Substitution(name, _fabric_init(place), "it counts GPUs"))
    for name, value in _of_cuda(place).items():
        rows.append(Substitution(f"torch.cuda:{name}", _always(value), "there are no GPUs"))
    if place.seed_shift:
        reason = "what is drawn otherwise, changes the loss"
        for name in ("torch:manual_seed", "torch.random:manual_seed", "random:seed"):
            rows.append(Substitution(name, seeds, reason))
        rows.append(Substitution("numpy.random:seed", seeds, reason))
    return rows


# -- their place -----------------------------------------------------------------------------------


@contextmanager
def substituted(rows: Sequence[Substitution]) -> Generator[None]:
    """Replace values in the block: now, or when their module is imported."""
    later: dict[str, list[Substitution]] = {}
    with ExitStack() as stack:
        for row in rows:
            module = row.name.partition(":")[0]
            if module in sys.modules:
                stack.callback(_replace(importlib.import_module(module), row))
            else:
                later.setdefault(module, []).append(row)
        finder = _AfterImport(later, stack)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


def _replace(module: ModuleType, row: Substitution) -> Callable[[], None]:
    """Replace a value; return what undoes it."""
    owner: Any = module
    *path, name = row.name.partition(":")[2].split(".")
    for part in path:
        owner = getattr(owner, part)
    is_inherited = name not in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, row.replace(original))

    def undo() -> None:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    return undo


class _AfterImport(MetaPathFinder):
    """Replaces values of modules as soon as a script imports them."""

    def __init__(self, rows: Mapping[str, Sequence[Substitution]], stack: ExitStack) -> None:
        self._rows = rows
        self._stack = stack
        self._searched = set[str]()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find a module as all others do, and let its import end with the replacements."""
        if fullname not in self._rows or fullname in self._searched:
            return None
        self._searched.add(fullname)  # the search below calls this again
        spec = find_spec(fullname)
        self._searched.discard(fullname)
        if spec is None or spec.loader is None:
            return None

        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for row in self._rows[fullname]:
                self._stack.callback(_replace(module, row))

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010, a loader's own attribute
        return spec


def seed(value: int) -> None:
    """Seed the generators that scripts draw from."""
    import numpy as np

    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)
