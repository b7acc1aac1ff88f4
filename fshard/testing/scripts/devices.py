"""A run without GPUs: `OnCpu`, and what torch's names of GPUs are meanwhile.

x.to("cuda:1")              x on the CPU
torch.cuda.set_device(1)    nothing
torch.cuda.Stream()         a stream on which all is done in order
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fshard.testing.programs.precision import InFloat64

ACCELERATORS = ("cuda", "mps", "xpu")


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
            options["device"] = device_or_index_on_cpu(options["device"])
        if "pin_memory" in options:
            options["pin_memory"] = False
        if func is Tensor.to and len(args) > 1:
            args = [args[0], device_or_index_on_cpu(args[1]), *args[2:]]
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


def device_or_index_on_cpu(x: Any) -> Any:
    """Return the CPU also for the index of a GPU."""
    is_index = isinstance(x, int) and not isinstance(x, bool)
    return torch.device("cpu") if is_index else on_cpu(x)


def generator_on_cpu(original: Any) -> Any:
    """Return a class whose calls make torch's own generators, of the CPU."""
    kind: Any = type(original)

    class OnCpuOnly(kind):
        def __call__(self, device: Any = "cpu") -> Any:
            return original(device=device_or_index_on_cpu(device))

        def __instancecheck__(self, x: Any) -> bool:
            return isinstance(x, original)

    class Generator(original, metaclass=OnCpuOnly):
        pass

    return Generator


class StreamInOrder:
    """A stream or an event of a GPU, where all is done in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> StreamInOrder:
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


def functions_of_cuda(rank: int, size: int) -> dict[str, Any]:
    """Return the values of functions of torch.cuda that raise without a GPU, by their names."""
    values: dict[str, Any] = {
        "device_count": size,
        "current_device": rank,
        "is_bf16_supported": True,
        "get_device_name": "cpu",
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(
            name="cpu", total_memory=1 << 36, major=9, minor=0, multi_processor_count=1
        ),
        "mem_get_info": (1 << 36, 1 << 36),
        "memory_stats": defaultdict[str, int](int),
        "memory_summary": "",
        "device": nullcontext(),
        "stream": nullcontext(),
        "current_stream": StreamInOrder(),
        "default_stream": StreamInOrder(),
    }
    without_result = (
        "init",
        "set_device",
        "synchronize",
        "ipc_collect",
        "reset_peak_memory_stats",
        "reset_max_memory_allocated",
        "set_per_process_memory_fraction",
    )
    values.update(dict.fromkeys(without_result))
    return values
