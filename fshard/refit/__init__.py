"""Send weights to an engine with another layout, by a map that is learned from its own loader.

Refit          sends versions of arrays to an engine on another mesh: all of a version or nothing
trace          finds the origin of each element of an engine's parameters: a `Trace`
check_ranks    raises unless every element reaches a rank
stream         yields full tensors one by one, with the names of a checkpoint
"""

from fshard.refit.origins import Origins, SourceBox
from fshard.refit.plan import RefitPlan
from fshard.refit.send import Refit
from fshard.refit.stream import stream
from fshard.refit.trace import TargetLeaf, Trace, check_ranks, trace

__all__ = [
    "Origins",
    "Refit",
    "RefitPlan",
    "SourceBox",
    "TargetLeaf",
    "Trace",
    "check_ranks",
    "stream",
    "trace",
]
