"""Plans: the needs of a training step on a mesh, and how long it takes, without its devices.

`cost` runs the step itself on the abstract mesh, so operations, bytes and peaks of memory are exact, on any number of
devices; time is a model with the numbers of a machine, a `Cluster`. `fshard calibrate` measures those of this one. `search`
ranks layouts of a model with repeated layers; `rank` meshes and options of any program.
"""

from fshard.foreign_names import hint
from fshard.plan.calibrate import calibrate
from fshard.plan.cluster import Cluster, Efficiency, NetworkLink, cluster
from fshard.plan.cost import Cost, OperationCost, cost
from fshard.plan.estimate import PlanEstimate
from fshard.plan.hugging_face.modules import model_of_config
from fshard.plan.models import Transformer
from fshard.plan.rank import RankedPlan, Ranking, rank
from fshard.plan.search import Plans, search
from fshard.plan.timing import Times


def __getattr__(name: str) -> object:
    """Raise, naming the new word for a name that was renamed."""
    raise AttributeError(f"module 'fshard.plan' has no attribute {name!r}.{hint(name)}")


__all__ = [
    "Cluster",
    "Cost",
    "Efficiency",
    "NetworkLink",
    "OperationCost",
    "PlanEstimate",
    "Plans",
    "RankedPlan",
    "Ranking",
    "Times",
    "Transformer",
    "calibrate",
    "cluster",
    "cost",
    "model_of_config",
    "rank",
    "search",
]
