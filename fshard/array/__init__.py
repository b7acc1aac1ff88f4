"""Arrays that compute: torch's operations on `Sharded`, by one table of rules.

`explicit` forbids implicit communication, `constrain` pins a layout, `shard_module` puts a module's parameters on a
mesh; `zeros`, `ones`, `full`, `rand` and `randn` make arrays.
"""

from fshard.array import autograd as _autograd
from fshard.array import contractions as _contractions
from fshard.array import functional as _functional
from fshard.array import indexing as _indexing
from fshard.array import pointwise as _pointwise
from fshard.array import reductions as _reductions
from fshard.array import views as _views
from fshard.array.create import full, ones, rand, randn, zeros
from fshard.array.dispatch import constrain, explicit, operate
from fshard.array.modules import register_trees, shard_module
from fshard.mesh.layout.sharded import Sharded

_ROWS = (_autograd, _contractions, _functional, _indexing, _pointwise, _reductions, _views)  # each adds its rows
Sharded.operations = staticmethod(operate)
register_trees()

__all__ = ["constrain", "explicit", "full", "ones", "rand", "randn", "shard_module", "zeros"]
