"""The testing kit: for fshard's own tests, and for programs and runtimes built with it.

certify        compares a sharded training run with one on one device: of loss functions, modules
               and optimizers
programs       certifies a program of plain torch.distributed: `certify_program`
scripts        certifies a training script as it is: `certify_script`
exercises      of the notebooks, graded by the program: `exercise`
kill           kills devices at chosen moments: `kill`, `moments`
processes      runs a function in several processes: `run_processes(fn, n)`
plugin         for pytest: the `mesh` fixture and marker
strategies     draws meshes, layouts, tensors and trees for hypothesis
oracles        defines every collective on a plain list of tensors
gpt            a small GPT as plain functions
"""

from importlib import import_module
from typing import Any

from fshard.testing.certify import (
    Certificate,
    certify,
    certify_module,
    check_elementwise,
    dyadic_like,
)
from fshard.testing.exercises import exercise
from fshard.testing.grading import Exercise
from fshard.testing.kill import kill, moments
from fshard.testing.processes import Processes, run_processes
from fshard.testing.programs import certify_program
from fshard.testing.scripts import certify_script


def __getattr__(name: str) -> Any:
    """Import a module at its first use: not all need the same packages."""
    if name in ("oracles", "strategies"):
        return import_module(f"fshard.testing.{name}")
    raise AttributeError(f"module 'fshard.testing' has no attribute {name!r}")


__all__ = [
    "Certificate",
    "Exercise",
    "Processes",
    "certify",
    "certify_module",
    "certify_program",
    "certify_script",
    "check_elementwise",
    "dyadic_like",
    "exercise",
    "kill",
    "moments",
    "run_processes",
]
