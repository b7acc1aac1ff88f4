"""`deterministic`: the context of reproducible mode. Sums have one order, and kernels are deterministic.

On CUDA the settings that kernels need belong to the process, and one must precede the first CUDA operation. So they
are required, not set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from fshard.mesh.runtimes.native import fixed_order

_matmul: Any = torch.backends.cuda.matmul
_cudnn: Any = torch.backends.cudnn

CUDA_SETTINGS: dict[str, Callable[[], bool]] = {
    'os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before the first CUDA operation': lambda: (
        os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
    ),
    "torch.use_deterministic_algorithms(True)": lambda: torch.get_deterministic_debug_mode() == 2,  # 1: it only warns
    "torch.backends.cudnn.benchmark = False": lambda: not _cudnn.benchmark,
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False": lambda: (
        not _matmul.allow_bf16_reduced_precision_reduction
    ),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False": lambda: (
        not _matmul.allow_fp16_reduced_precision_reduction
    ),
    'torch.backends.cuda.matmul.fp32_precision = "ieee"': lambda: _matmul.fp32_precision != "tf32",
    'torch.backends.cudnn.conv.fp32_precision = "ieee"': lambda: _cudnn.conv.fp32_precision != "tf32",
    'torch.backends.cudnn.rnn.fp32_precision = "ieee"': lambda: _cudnn.rnn.fp32_precision != "tf32",
}
"""Lines of a program, and whether the process is in the state that they leave."""


@contextmanager
def deterministic(wanted: bool, device_type: str) -> Generator[None]:
    """Compute with one intra-op thread, and sum over devices in the fixed tree; raise if CUDA kernels may vary.

    torch splits large sums among threads, whose number changes bits; NCCL adds in an order of its own.
    """
    if not wanted:
        yield
        return
    _validate_settings(device_type)
    threads, token = torch.get_num_threads(), fixed_order.set(True)
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        fixed_order.reset(token)
        if threads > 1:
            torch.set_num_threads(threads)


def _validate_settings(device_type: str) -> None:
    lines = [line for line, is_set in CUDA_SETTINGS.items() if not is_set()] if device_type == "cuda" else []
    if lines:
        raise ValueError(
            "reproducible=True: CUDA kernels must be deterministic and add in full precision; got settings by which bits vary "
            "between runs, shapes and cards. Begin the program with:\n    " + "\n    ".join(lines)
        )
