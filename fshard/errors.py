"""The errors of fshard's own domains; other wrong arguments raise a `ValueError` or `TypeError`.

One root, `FshardError`, and below it a class per domain. Each class is also a `ValueError` (a wrong
call) or a `RuntimeError` (a failed run), so that code without fshard's classes can catch it.
"""

__all__ = [
    "AuditError",
    "CheckpointError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "DiskError",
    "FshardError",
    "LayoutError",
    "LostProcessError",
    "LostStateError",
    "MemoryLimitError",
    "MeshError",
    "MismatchError",
    "ModuleError",
    "OptimizerError",
    "PlanError",
    "PolicyError",
    "PromiseError",
    "RefitError",
    "ScheduleError",
    "ScopeError",
]


class FshardError(Exception):
    """The root of the errors of layouts, meshes, schedules, collectives and other domains."""


class MeshError(FshardError, ValueError):
    """A mesh that cannot be: a size of 0, a repeated or unknown axis, a world of another size."""


class LayoutError(FshardError, ValueError):
    """A tensor that cannot have the layout: a dim that is not divisible, a wrong spec."""


class ScopeError(FshardError, RuntimeError):
    """A collective outside `shard_map` and `run`, or over an axis that is not mapped there."""


class DeadlockError(FshardError, RuntimeError):
    """No device can go on: each waits for another, or for one that has finished."""


class DiskError(FshardError, RuntimeError):
    """A folder that cannot have tensors on disk, a full disk, or a read or write that failed."""


class MismatchError(FshardError, RuntimeError):
    """Devices called one collective with different operations, shapes, dtypes or trees.

    Virtual devices may be run again. The group of processes is broken: later calls on it raise.
    """


class PromiseError(FshardError, RuntimeError):
    """Values promised to be equal on all devices are not, or a gradient has a wrong type."""


class RefitError(FshardError, ValueError):
    """Weights that cannot be sent to a target: a loader that computes, a missing leaf."""


class CollectiveTimeoutError(FshardError, RuntimeError):
    """A collective between processes did not end in time."""


class LostProcessError(FshardError, RuntimeError):
    """Another process of the group is gone: it failed, or it ended too early.

    `lost` are the numbers in the world of the devices that are known to be gone.
    """

    def __init__(self, *args: object, lost: tuple[int, ...] = ()) -> None:
        super().__init__(*args)
        self.lost = lost


class LostStateError(FshardError, RuntimeError):
    """More devices of an elastic run were lost at once than its copies outlive."""


class OptimizerError(FshardError, ValueError):
    """An optimizer with invalid arguments or inputs."""


class MemoryLimitError(FshardError, RuntimeError):
    """An allocation beyond a limit of `fs.memory.limit`, or beyond the memory of the host."""


class PlanError(FshardError, ValueError):
    """A machine or a program cannot be planned."""


class PolicyError(FshardError, ValueError):
    """A policy of rematerialisation that there is not."""


class ModuleError(FshardError, ValueError):
    """A module that cannot be made a function, or tensors that are not the module's."""


class ScheduleError(FshardError, ValueError):
    """A pipeline schedule with invalid arguments, or text that is not a schedule."""


class CheckpointError(FshardError, RuntimeError):
    """A checkpoint that cannot be written, or is not what is to be restored.

    Also a file that is not as it was written.
    """


class AuditError(FshardError, RuntimeError):
    """A step that gave other numbers in another layout, or replicas that differ: see `fs.audit`."""
