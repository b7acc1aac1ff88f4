"""Answers to the stops of ZeRO from nothing: the right ones, and wrong ones by their hint."""

import torch

import fshard as fs


def local_gradient(params, x, y, loss_of):
    grads, loss = torch.func.grad_and_value(loss_of)(params, x, y)
    return loss, grads


def reduce(params, x, y, loss_of):
    return fs.pmean(local_gradient(params, x, y, loss_of), "data")


def reduce_each(params, x, y, loss_of):
    loss, grads = local_gradient(params, x, y, loss_of)
    return fs.pmean(loss, "data"), [fs.pmean(g, "data") for g in grads]


def reduce_on_first(params, x, y, loss_of):
    loss, grads = local_gradient(params, x, y, loss_of)
    if fs.axis_index("data") == 0:
        grads = fs.pmean(grads, "data")
    return loss, grads


def state(params, moments, grads, mean=True, gather=True, by_psum=False):
    n = fs.axis_size("data")
    i = fs.axis_index("data")
    if by_psum:
        grads = [g.chunk(n)[i] for g in fs.psum(grads, "data")]
    else:
        grads = fs.psum_scatter(grads, "data")
    if mean:
        grads = [g / n for g in grads]
    moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
    rows = [w.chunk(n)[i] - 0.1 * m for w, m in zip(params, moments, strict=True)]
    return (fs.all_gather(rows, "data") if gather else rows), moments


def own_gradient(params, moments, grads):
    n = fs.axis_size("data")
    i = fs.axis_index("data")
    moments = [0.9 * m + g.chunk(n)[i] for m, g in zip(moments, grads, strict=True)]
    rows = [w.chunk(n)[i] - 0.1 * m for w, m in zip(params, moments, strict=True)]
    return fs.all_gather(rows, "data"), moments


def params_loss(shards, x, y, to="varying", reduce=fs.pmean):
    for shard in shards:
        x = torch.tanh(x @ fs.all_gather(shard, "data", to=to))
    loss = (x - y).square().mean()
    return reduce(loss, "data") if reduce else loss


def gathered_at_once(shards, x, y):
    for w in fs.all_gather(shards, "data"):
        x = torch.tanh(x @ w)
    return fs.pmean((x - y).square().mean(), "data")


def prefetch(shards, x, start, layer):
    handle = start(shards[0])
    for number in range(len(shards)):
        w = handle.wait()
        if number + 1 < len(shards):
            handle = start(shards[number + 1])
        x = layer(w, x)
    return x


def one_by_one(shards, x, start, layer):
    for shard in shards:
        x = layer(start(shard).wait(), x)
    return x


def all_started(shards, x, start, layer):
    for handle in [start(shard) for shard in shards]:
        x = layer(handle.wait(), x)
    return x


def unawaited(shards, x, start, layer):
    for shard in shards:
        x = layer(start(shard), x)
    return x


def not_gathered(shards, x, start, layer):
    handles = [start(shard) for shard in shards]
    for shard, _ in zip(shards, handles, strict=True):
        x = layer(shard, x)
    return x


def past_the_end(shards, x, start, layer):
    handle = start(shards[0])
    for number in range(len(shards)):
        w = handle.wait()
        handle = start(shards[number + 1])
        x = layer(w, x)
    return x


def own_step(shards, moments, x, y, loss_fn=params_loss, moved=True):
    grads, loss = torch.func.grad_and_value(loss_fn)(shards, x, y)
    moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
    moves = moments if moved else grads
    return [w - 0.1 * m for w, m in zip(shards, moves, strict=True)], moments, loss


def replicated(shards, x, y):
    return params_loss(shards, x, y, to="replicated")


def summed(shards, x, y):
    return params_loss(shards, x, y, reduce=fs.psum)


def local(shards, x, y):
    return params_loss(shards, x, y, reduce=None)


def step_in_place(shards, moments, x, y):
    grads, loss = torch.func.grad_and_value(params_loss)(shards, x, y)
    for w, m, g in zip(shards, moments, grads, strict=True):
        m.mul_(0.9).add_(g)
        w.sub_(0.1 * m)
    return shards, moments, loss


SOLUTIONS = {
    "from_nothing.reduce": reduce,
    "from_nothing.state": lambda params, moments, grads: state(params, moments, grads),
    "from_nothing.params": lambda shards, x, y: params_loss(shards, x, y),
    "from_nothing.prefetch": prefetch,
    "from_nothing.step": lambda shards, moments, x, y: own_step(shards, moments, x, y),
}

WRONG = {
    "from_nothing.reduce": {
        "drift apart": local_gradient,
        "learning rate": lambda p, x, y, f: fs.psum(local_gradient(p, x, y, f), "data"),
        "by 4 collectives": reduce_each,
        "order is": lambda p, x, y, f: reduce(p, x, y, f)[::-1],
        "never call": reduce_on_first,
    },
    "from_nothing.state": {
        "gather them": lambda p, m, g: state(p, m, g, gather=False),
        "not averaged": lambda p, m, g: state(p, m, g, mean=False),
        "device's own gradient": own_gradient,
        "are enough": lambda p, m, g: state(p, m, g, by_psum=True),
    },
    "from_nothing.params": {
        "promises": replicated,
        "n times too large: take": summed,
        "is not averaged": local,
        "gathered at once": gathered_at_once,
        "with its gradient": lambda shards, x, y: params_loss([w.detach() for w in shards], x, y),
    },
    "from_nothing.prefetch": {
        "nothing is on its way": one_by_one,
        "in memory again": all_started,
        "handle.wait()": unawaited,
        "with a shard": not_gathered,
        "IndexError": past_the_end,
    },
    "from_nothing.step": {
        "own rows alone": lambda s, m, x, y: own_step(s, m, x, y, replicated),
        "average it": lambda s, m, x, y: own_step(s, m, x, y, summed),
        "own rows, and gradients": lambda s, m, x, y: own_step(s, m, x, y, local),
        "not used": lambda s, m, x, y: own_step(s, m, x, y, moved=False),
        "in place": step_in_place,
        "(shards, moments, loss)": lambda s, m, x, y: params_loss(s, x, y),
    },
}
