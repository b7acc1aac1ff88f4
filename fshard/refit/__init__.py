"""Send weights to an engine with another layout, by a map that is learned from its own loader.

trace          where each element of an engine's parameters comes from: a `Trace`
check_ranks    raises unless every element reaches a rank
"""

from fshard.refit.origins import Box, Origins
from fshard.refit.trace import TargetLeaf, Trace, check_ranks, trace

__all__ = ["Box", "Origins", "TargetLeaf", "Trace", "check_ranks", "trace"]
