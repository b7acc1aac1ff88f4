"""Training with state in some memory, for tests: a table of optimizers, and runs of them."""

import optree
import torch

import fshard as fs
from fshard import P, optim
from fshard.mesh.layout.kinds import memory_of
from fshard.optim.leaves import Leaves, shards_of


def plain_init(params):
    return {"sum": optree.tree_map(torch.zeros_like, params), "count": torch.tensor(0)}


def plain_update(grads, state, params):
    sums = optree.tree_map(lambda s, g: s + g * g, state["sum"], grads)
    updates = optree.tree_map(lambda g, s: -0.1 * g / (s.sqrt() + 1e-6), grads, sums)
    return updates, {"sum": sums, "count": state["count"] + 1}


PLAIN = optim.Optimizer(plain_init, plain_update, sharding="flat")
OPTIMIZERS = {
    "adamw": optim.adamw(0.05, amsgrad=True, fused=False),
    "fused adamw": optim.adamw(0.01),
    "lamb": optim.lamb(0.1, weight_decay=0.1),
    "shampoo": optim.shampoo(0.1, momentum=0.9),
    "masters": optim.with_master_weights(optim.adamw(0.1, fused=False)),
    "masters of a chain": optim.with_master_weights(
        optim.chain(optim.add_decayed_weights(0.1), optim.adamw(0.1), optim.scale(0.5))
    ),
    "ema of masters": optim.ema(
        optim.chain(optim.clip_by_value(1.0), optim.with_master_weights(optim.adamw(0.1))), 0.5
    ),
    "plain": PLAIN,
    "masters of plain": optim.with_master_weights(PLAIN),
    "chain of plain": optim.chain(PLAIN, optim.scale(0.5), optim.sgd(0.1, momentum=0.9)),
    "class of torch": optim.from_torch(torch.optim.RMSprop, lr=0.05, momentum=0.5, centered=True),
}
CASE = {
    "name": "adamw",
    "n": 2,
    "stage": 3,
    "half": False,
    "clips": False,
    "fp16": False,
    "microbatches": 1,
}


def loss_fn(params, x):
    first, *others = params["layers"]
    for layer in others:
        x = torch.tanh(x @ first.to(x.dtype)) @ layer.to(x.dtype) + params["bias"].to(x.dtype)
    return (x * params["scale"].to(x.dtype)).square().mean()


def trained(
    memory="device",
    update_on="device",
    *,
    name,
    n,
    stage,
    half,
    clips,
    fp16,
    microbatches,
    steps=3,
    donate=True,
):
    """Return the results of some steps: parameters, state, metrics; and the ledger."""
    generator = torch.Generator().manual_seed(1)
    mesh = fs.make_mesh({"data": n})

    def weight(*shape):
        return torch.randn(shape, generator=generator).to(torch.bfloat16 if half else torch.float32)

    params = {"layers": [weight(5, 5) for _ in range(5)], "bias": weight(5), "scale": weight(1)}
    params["layers"].append(params["layers"][1])  # tied
    params = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = OPTIMIZERS[name]
    opt = optim.chain(optim.clip_by_global_norm(0.1), opt) if clips else opt
    opt = optim.loss_scaled(opt, initial=64.0) if fp16 else opt
    opt = fs.partition_optimizer(
        opt, mesh=mesh, axis="data", stage=stage, state_memory=memory, update_on=update_on
    )
    step = fs.train_step(
        loss_fn,
        opt,
        mesh=mesh,
        batch=P("data"),
        donate=donate,
        accumulate=microbatches,
        precision="fp16" if fp16 else None,
    )
    state = opt.init(params)
    metrics = []
    with fs.ledger() as comm:
        for _ in range(steps):
            params, state, seen = step(params, state, torch.randn(24, 5, generator=generator))
            metrics += [seen["loss"], seen["grad_norm"]]
    return params, state, metrics, comm


def away(tree, memory):
    """Return the bytes of a tree's local shards that are in a memory."""
    return sum(
        x.nbytes
        for leaf in Leaves.of(tree).leaves
        for x in shards_of(leaf)
        if x.ndim and memory_of(x) == memory
    )


def bits(tree):
    return [x.detach().clone() for leaf in Leaves.of(tree).leaves for x in shards_of(leaf)]


def same_bits(result, expected):
    pairs = [
        pair for i in range(3) for pair in zip(bits(result[i]), bits(expected[i]), strict=True)
    ]
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)
