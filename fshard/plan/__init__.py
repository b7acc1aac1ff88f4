"""Plans: the needs of a training step on a mesh, and how long it takes, without its devices.

`cost` runs the step itself on the abstract mesh, so operations, bytes and peaks of memory are exact, on any number of devices;
time is a model with the numbers of a machine, a `Cluster`. `fshard calibrate` measures those of this one. `search` ranks meshes
and options of a program.
"""

from fshard.plan.calibrate import calibrate
from fshard.plan.cluster import Cluster, Efficiency, NetworkLink, cluster
from fshard.plan.cost import Cost, OperationCost, cost
from fshard.plan.search import RankedPlan, Ranking, search
from fshard.plan.timing import Times

__all__ = [
    "Cluster",
    "Cost",
    "Efficiency",
    "NetworkLink",
    "OperationCost",
    "RankedPlan",
    "Ranking",
    "Times",
    "calibrate",
    "cluster",
    "cost",
    "search",
]
