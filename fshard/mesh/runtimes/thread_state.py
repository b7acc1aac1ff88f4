"""Copy torch's thread-local state from the caller to a device's thread.

A thread starts with torch's defaults, or with the state of its last run. A device's thread needs
the caller's: grad mode, autocast, modes and hooks. Some state is different on purpose: one intra-op
thread (bits depend on the number), and backwards run in the calling thread (a collective in a
shared backward thread would deadlock).

Forward mode is the one state that torch keeps per *process*: its level and, in torch.func, a count
of nested jvps. `process_wide_state` enters a level before the threads start, so that all of them
are nested in it and share it. Tangents are stored on tensors, so devices do not see those of
others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.eager_transforms as functorch  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,  # pyright: ignore[reportPrivateUsage]
    _pop_mode,  # pyright: ignore[reportPrivateUsage]
    _push_mode,  # pyright: ignore[reportPrivateUsage]
)

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True)
class ThreadState:
    """The caller's per-thread settings, read by `capture`, put in force by `set`.

    Args:
        is_grad: of grad mode.
        is_inference: of inference mode.
        is_forward_grad: of forward-mode gradients.
        autocast: the dtype of each kind of device, None where autocast is off.
        is_autocast_cached: of autocast's cache.
        function_modes: the stack of modes of torch functions.
        dispatch_modes: the stack of modes of operations.
        is_torch_function: of `__torch_function__` of tensor subclasses.
        is_torch_function_off: of `__torch_function__` at all, modes included.
        saved_hooks: hooks of saved tensors, if any.
        cuda: the device and stream, on CUDA.
        vmap_depth: the nesting depth of autograd's own vmap (`is_grads_batched`, `vectorize`).
    """

    is_grad: bool
    is_inference: bool
    is_forward_grad: bool
    autocast: dict[str, torch.dtype | None]
    is_autocast_cached: bool
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    is_torch_function: bool
    is_torch_function_off: bool
    saved_hooks: tuple[Any, Any] | None
    cuda: tuple[int, Any] | None
    vmap_depth: int

    @classmethod
    def capture(cls, device_type: str) -> ThreadState:
        """Read the calling thread's settings."""
        autocast: dict[str, torch.dtype | None] = {}
        for kind in {"cpu", device_type} - {"meta"}:
            is_on = torch.is_autocast_enabled(kind)
            autocast[kind] = torch.get_autocast_dtype(kind) if is_on else None
        cuda = None
        if device_type == "cuda":
            cuda = (torch.cuda.current_device(), torch.cuda.current_stream())
        return cls(
            is_grad=torch.is_grad_enabled(),
            is_inference=torch.is_inference_mode_enabled(),
            is_forward_grad=_C._is_fwd_grad_enabled(),
            autocast=autocast,
            is_autocast_cached=torch.is_autocast_cache_enabled(),
            function_modes=tuple(_get_current_function_mode_stack()),
            dispatch_modes=tuple(_get_current_dispatch_mode_stack()),
            is_torch_function=_C._is_torch_function_enabled(),
            is_torch_function_off=_C._is_torch_function_all_disabled(),
            saved_hooks=_C._autograd._top_saved_tensors_default_hooks(True),
            cuda=cuda,
            vmap_depth=batches_nested(),
        )

    def set(self) -> Callable[[], None]:
        """Apply the settings to the calling thread; return the function that undoes nested ones."""
        torch.set_num_threads(1)
        stack = ExitStack()
        if self.is_inference:
            stack.enter_context(torch.inference_mode())
        _C._set_grad_enabled(self.is_grad)  # after inference mode, which clears it
        _C._set_fwd_grad_enabled(self.is_forward_grad)
        _C._set_multithreading_enabled(False)
        if self.cuda is not None:
            device, stream = self.cuda
            torch.cuda.set_device(device)
            torch.cuda.set_stream(stream)
        for kind, dtype in self.autocast.items():
            torch.set_autocast_enabled(kind, False)  # a thread may have it from its last run
            if dtype is not None:
                autocast = torch.autocast(kind, dtype, cache_enabled=self.is_autocast_cached)
                stack.enter_context(autocast)

        for _ in range(self.vmap_depth):
            _C._vmapmode_increment_nesting()
            stack.callback(_C._vmapmode_decrement_nesting)
        if self.saved_hooks is not None:
            stack.enter_context(saved_tensors_hooks(*self.saved_hooks))
        for mode in self.dispatch_modes:
            _push_mode(mode)
            stack.callback(_pop_mode)
        for mode in self.function_modes:  # last: from here on torch calls go through them
            _C._push_on_torch_function_stack(mode)
            stack.callback(_C._pop_torch_function_stack)
        if self.is_torch_function_off:
            stack.enter_context(_C.DisableTorchFunction())
        elif not self.is_torch_function:
            stack.enter_context(_C.DisableTorchFunctionSubclass())
        return stack.close


def has_open_modes() -> bool:
    """Return True if the calling thread has modes that a run did not undo.

    Such as a default device that the program has set.
    """
    return bool(_C._len_torch_function_stack() or _C._len_torch_dispatch_stack())


def batches_nested() -> int:
    """Return the nesting depth of autograd's own vmap in the calling thread.

    torch has no query for it, but each change returns the new depth.
    """
    _C._vmapmode_increment_nesting()
    return _C._vmapmode_decrement_nesting()


class _ProcessWideState:
    """Keep one forward-mode level open for all device threads.

    Also restore the default number of threads after the last run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0  # nested ones, and those of several Python threads
        self._jvp_nesting = 0
        self._threads = 0
        self._level = -1

    def __enter__(self) -> None:
        with self._lock:
            if self._runs == 0:
                self._threads = torch.get_num_threads()
                self._jvp_nesting = functorch.JVP_NESTING
                is_outside = forward_ad._current_level < 0  # pyright: ignore[reportPrivateUsage]
                self._level = forward_ad.enter_dual_level() if is_outside else -1
                functorch.JVP_NESTING += 1
            self._runs += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._runs -= 1
            if self._runs == 0:
                functorch.JVP_NESTING = self._jvp_nesting
                if self._level >= 0:
                    forward_ad.exit_dual_level(level=self._level)
                torch.set_num_threads(self._threads)


process_wide_state = _ProcessWideState()


def random_state(device_type: str) -> Tensor:
    """Return the state of the default generator of the device."""
    if device_type == "cuda":
        return torch.cuda.get_rng_state()
    return torch.default_generator.get_state()


def set_random_state(device_type: str, state: Tensor) -> None:
    """Set the state of the default generator of the device."""
    if device_type == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.default_generator.set_state(state)
