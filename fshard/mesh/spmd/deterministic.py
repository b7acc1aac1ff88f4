"""`deterministic`: the context of reproducible mode.

Sums have one order, and kernels are deterministic. On CUDA the settings that kernels need belong to
the process, and one must precede the first CUDA operation. So they are required, not set.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from operator import attrgetter

import torch

from fshard.mesh.layout.mesh import fixed_order

_SETTINGS = {
    "backends.cudnn.benchmark": False,
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": False,
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": False,
    "backends.cuda.matmul.fp32_precision": "ieee",
    "backends.cudnn.conv.fp32_precision": "ieee",
    "backends.cudnn.rnn.fp32_precision": "ieee",
}


@contextmanager
def deterministic(wanted: bool, device_type: str) -> Generator[None]:
    """Compute with one intra-op thread, and sum over devices in the fixed tree.

    torch splits large sums among threads, whose number changes bits; NCCL adds in an order of its
    own. Raise if CUDA kernels may vary.
    """
    if not wanted:
        yield
        return
    lines = missing_cuda_settings() if device_type == "cuda" else []
    if lines:
        raise ValueError(
            "reproducible=True: CUDA kernels must be deterministic and add in full precision; got "
            "settings by which bits may vary. Begin the program with:\n    " + "\n    ".join(lines)
        )

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with fixed_order():
            yield
    finally:
        torch.set_num_threads(threads)


def missing_cuda_settings() -> list[str]:
    """List the lines that a program needs, in order, so that its kernels are deterministic."""
    lines: list[str] = []
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        setting = 'os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"'
        lines.append(f"{setting}  # before the first CUDA operation")
    if torch.get_deterministic_debug_mode() < 2:  # 1: torch only warns
        lines.append("torch.use_deterministic_algorithms(True)")
    for name, value in _SETTINGS.items():
        if attrgetter(name)(torch) != value:
            lines.append(f"torch.{name} = {value!r}")
    return lines
