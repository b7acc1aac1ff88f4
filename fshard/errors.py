"""Every error that fshard raises on purpose.

One root, `FshardError`, and below it a class per kind of mistake.  Each class is also a `ValueError` (the call was
wrong) or a `RuntimeError` (the run went wrong), so that code which knows nothing of fshard can still catch it.
"""

__all__ = [
    "CollectiveTimeoutError",
    "DeadlockError",
    "FshardError",
    "LayoutError",
    "LostProcessError",
    "MeshError",
    "MismatchError",
    "ModuleError",
    "OptimizerError",
    "PolicyError",
    "PromiseError",
    "ScheduleError",
    "ScopeError",
]


class FshardError(Exception):
    """The root of all errors that fshard raises on purpose."""


class MeshError(FshardError, ValueError):
    """A mesh that cannot be: a size of 0, a repeated or unknown axis, a world of another size."""


class LayoutError(FshardError, ValueError):
    """A tensor that cannot lie on the mesh as asked: a dim that does not divide, a spec of the wrong length."""


class ScopeError(FshardError, RuntimeError):
    """A collective called where its axis is not known: outside `shard_map` and `run`."""


class DeadlockError(FshardError, RuntimeError):
    """No device can go on: each waits for another, or for one that has finished."""


class MismatchError(FshardError, RuntimeError):
    """Devices met in one collective with different operations, shapes, dtypes or trees.

    Virtual devices may be run again.  Processes have parted for good: their group is lost, and what is called on it
    says so.
    """


class PromiseError(FshardError, RuntimeError):
    """Values that were promised to be equal on all devices are not (`check=True`)."""


class CollectiveTimeoutError(FshardError, RuntimeError):
    """A collective between processes did not end in time."""


class LostProcessError(FshardError, RuntimeError):
    """Another process of the group is gone: it failed, or it ended too early."""


class OptimizerError(FshardError, ValueError):
    """An optimizer that cannot be made as asked, or was given what it cannot work on."""


class PolicyError(FshardError, ValueError):
    """A policy of rematerialisation that there is not."""


class ModuleError(FshardError, ValueError):
    """A module that cannot be made a function, or tensors that are not the module's."""


class ScheduleError(FshardError, ValueError):
    """A pipeline schedule that cannot be made as asked, or text that is none."""
