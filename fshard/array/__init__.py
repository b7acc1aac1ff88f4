"""Arrays that compute: torch's operations on `Sharded`, by one table of rules.

`explicit` forbids implicit communication, `constrain` pins a layout, `shard_module` puts a module's parameters on a
mesh and `inspect` shows them; `zeros`, `ones`, `full`, `rand` and `randn` make arrays.
"""

from functools import partial

from torch.nn.utils import clip_grad

from fshard.array import algebra as _algebra
from fshard.array import along as _along
from fshard.array import autograd as _autograd
from fshard.array import functional as _functional
from fshard.array import views as _views
from fshard.array.create import full, ones, rand, randn, zeros
from fshard.array.dispatch import constrain, explicit, operate
from fshard.array.modules import inspect, register_trees, shard_module
from fshard.mesh.layout.sharded import Sharded

_ROWS = (_algebra, _along, _autograd, _functional, _views)  # each adds its rows
Sharded.operations = staticmethod(operate)
_GROUP = "_group_tensors_by_device_and_dtype"  # the only function of torch's clipping that would not take arrays
setattr(clip_grad, _GROUP, partial(_autograd.group_gradients, getattr(clip_grad, _GROUP)))
register_trees()

__all__ = ["constrain", "explicit", "full", "inspect", "ones", "rand", "randn", "shard_module", "zeros"]
