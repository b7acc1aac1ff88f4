"""Arrays that compute: torch's operations on `Sharded`, by one table of rules.

`explicit` forbids implicit communication, `equal_tensors` takes plain tensors for replicated,
`constrain` pins a layout, `shard_module` puts a module's parameters on a mesh, `inspect` shows them
and `clip_grad_norm_` clips their gradients; `lift` is for torch.func, `custom_function` for
gradients of your own; `zeros`, `ones`, `full`, `rand` and `randn` make arrays.
"""

from fshard.array import algebra as _algebra
from fshard.array import along as _along
from fshard.array import autograd as _autograd
from fshard.array import functional as _functional
from fshard.array import views as _views
from fshard.array.create import full, ones, rand, randn, zeros
from fshard.array.custom_function import custom_function
from fshard.array.dispatch import constrain, operate
from fshard.array.mode import equal_tensors, explicit
from fshard.array.modules import clip_grad_norm_, inspect, lift, shard_module
from fshard.mesh.layout.sharded import Sharded

_ROWS = (_algebra, _along, _autograd, _functional, _views)  # each adds its rows
Sharded.operations = staticmethod(operate)

__all__ = [
    "clip_grad_norm_",
    "constrain",
    "custom_function",
    "equal_tensors",
    "explicit",
    "full",
    "inspect",
    "lift",
    "ones",
    "rand",
    "randn",
    "shard_module",
    "zeros",
]
