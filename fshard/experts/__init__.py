"""Experts: a router sends each token to some of many feed-forward networks.

An axis of the mesh shards these:

    tokens ─ route ─> their experts and weights ─ sort ─> rows by expert ─ all_to_all ─┐
                                                                                       │
    y <─ weighted sum ─ rows by token <─ all_to_all back ─ grouped_matmul <────────────┘
                                                           of this device's experts

One mesh has two kinds of leaves: experts are sharded along the axis, dense leaves are replicated
along it. The axis shards the batch too, and is `local` in a step:

    mesh = fs.make_mesh({"data": 2, "expert": 4})
    rules = {"experts.*": P("expert"), "**": P()}
    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P(("data", "expert")), local="expert")

For ZeRO-3 the rules are `fs.fsdp(("data", "expert"), within=rules)`. `fs.nn.MoE` is the layer as a
module.
"""

from fshard.experts.dispatch import MoEStats, moe
from fshard.experts.grouped import grouped_matmul, swiglu
from fshard.experts.routing import Routing, balance_loss, route, z_loss
from fshard.experts.transformers import expert_rules

__all__ = [
    "MoEStats",
    "Routing",
    "balance_loss",
    "expert_rules",
    "grouped_matmul",
    "moe",
    "route",
    "swiglu",
    "z_loss",
]
