"""The testing kit, public: what holds fshard to its word can be used on what is built with it.

oracles       what every collective means, on a plain list of tensors
conformance   every collective × dtype × axes held to its oracle: `check_runtime(mesh)`, on any runtime
cases         what is tried there: the whole table; `drawn` has a hypothesis strategy for any case
processes     a function in real processes: `run_processes(fn, n)`
strategies    meshes, layouts, tensors and trees for hypothesis
models        parameters with all that makes trees awkward, for hypothesis too, and a loss that uses some of them
certify       a sharded training run held to the run on one device, and optimizers to what they say of themselves
plugin        for pytest: the `mesh` fixture and marker
"""

from importlib import import_module
from typing import Any

from fshard.testing.certify import Certificate, certify, check_elementwise, dyadic
from fshard.testing.processes import Processes, run_processes


def __getattr__(name: str) -> Any:
    """Import a part when it is first asked for: not all need the same packages."""
    if name in ("conformance", "oracles", "strategies"):
        return import_module(f"fshard.testing.{name}")
    raise AttributeError(f"module 'fshard.testing' has no attribute {name!r}")


__all__ = ["Certificate", "Processes", "certify", "check_elementwise", "dyadic", "run_processes"]
