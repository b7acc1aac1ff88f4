"""Small programs of torch.distributed, right ones and ones with published mistakes, for
`certify_program`.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

import fshard as fs
from fshard import P


def data(rows=8, width=4):
    draw = torch.Generator().manual_seed(3)
    return torch.randn(rows, width, generator=draw), torch.randn(rows, 3, generator=draw)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def square(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def rows_of(mesh):
    """The rows of this process along an axis, or of all along that of another process mesh."""
    return tuple(x.chunk(mesh.size())[mesh.get_local_rank()] for x in data())


def updates(model, optimizer=torch.optim.AdamW, clip=None, **options):
    opt = optimizer(model.parameters(), lr=0.05, **options)

    def step():
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()

    return step


def ddp(rank, world, *, loss=square, **options):
    model = DDP(mlp())
    return model, loss, rows_of(world.mesh), updates(model, **options)


# -- right ones of torch ---------------------------------------------------------------------------


def accumulated(model, batch):
    """Two microbatches, of which the last one communicates."""
    x, y = batch
    halves = [*zip(x.chunk(2), y.chunk(2), strict=True)]
    with model.no_sync():
        (square(model, halves[0]) / 2).backward()
    (square(model, halves[1]) / 2).backward()


def ddp_accumulation(rank, world):
    model = DDP(mlp())
    return model, accumulated, rows_of(world.mesh), updates(model)


def ddp_shared_and_frozen(rank, world):
    model = mlp()
    model.append(nn.Linear(3, 3))
    model[0].bias.requires_grad_(False)
    model.append(nn.Linear(3, 3, bias=False))
    model[4].weight = model[3].weight
    return DDP(model), square, rows_of(world.mesh), updates(model)


def zero_redundancy(rank, world):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(mlp())
    return (
        model,
        square,
        rows_of(world.mesh),
        updates(model, partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)),
    )


def by_fully_shard(rank, world, *, policy=None, reshard=True, **options):
    model = mlp()
    mesh = world.mesh
    for module in (model[0], model[2], model):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=policy or MixedPrecisionPolicy(),
        )
    batch = rows_of(mesh if mesh.ndim == 1 else mesh._flatten("all"))
    return model, square, batch, updates(model, **options)


def fully_shard_accumulation(rank, world):
    model, _, batch, step = by_fully_shard(rank, world)

    def loss(model, batch):
        for i, half in enumerate(zip(*(x.chunk(2) for x in batch), strict=True)):
            model.set_requires_gradient_sync(i == 1)
            (square(model, half) / 2).backward()

    return model, loss, batch, step


PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def tensor_parallel(rank, world):
    model = parallelize_module(mlp(), world.mesh, PLAN)
    return model, square, data(), updates(model, foreach=False)


def tensor_parallel_and_fully_shard(rank, world):
    model = parallelize_module(mlp(), world.mesh["model"], PLAN)
    fully_shard(model, mesh=world.mesh["data"])
    return model, square, rows_of(world.mesh["data"]), updates(model, foreach=False)


def dtensors(rank, world):
    torch.manual_seed(0)
    mesh = world.mesh
    w, v = (
        distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).detach().requires_grad_()
        for _ in range(2)
    )

    def loss(params, batch):
        x = distribute_tensor(batch[0], mesh, [Replicate()])
        y = (torch.tanh(x @ params["w"]) @ params["v"]).square().mean()
        return y.full_tensor()

    opt = torch.optim.SGD([w, v], 0.1, foreach=False)
    return {"w": w, "v": v}, loss, data(), lambda: (opt.step(), opt.zero_grad())


# -- right ones by hand ----------------------------------------------------------------------------


def reduced(model, n):
    """Average gradients over all processes."""
    for x in model.parameters():
        dist.all_reduce(x.grad)
        x.grad /= n


def by_hand(rank, world):
    model = mlp()

    def loss(model, batch):
        value = square(model, batch)
        value.backward()
        reduced(model, world)
        return value

    return model, loss, rows_of(world.mesh), updates(model, torch.optim.SGD)


class AddOver(torch.autograd.Function):
    """Sums in the forward; its gradient passes, and that of its input is summed by `CopyTo`."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g


class CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


def megatron(rank, world, *, bias_everywhere=False):
    """Columns of the first layer and rows of the second on each process, as plain tensors."""
    full = mlp()
    mesh = world.mesh
    index = mesh.get_local_rank()
    n = mesh.size()
    params = {
        "up.weight": full[0].weight.chunk(n, 0)[index],
        "up.bias": full[0].bias.chunk(n, 0)[index],
        "down.weight": full[2].weight.chunk(n, 1)[index],
        "down.bias": full[2].bias,
    }
    params = {name: x.detach().clone().requires_grad_() for name, x in params.items()}

    def loss(p, batch):
        x, y = batch
        inner = torch.tanh(nn.functional.linear(CopyTo.apply(x), p["up.weight"], p["up.bias"]))
        bias = p["down.bias"]
        if bias_everywhere:
            out = AddOver.apply(nn.functional.linear(inner, p["down.weight"], bias))
        else:
            out = AddOver.apply(inner @ p["down.weight"].T) + bias
        return (out - y).square().mean()

    opt = torch.optim.SGD([*params.values()], 0.1)
    return params, loss, data(), lambda: (opt.step(), opt.zero_grad())


def pipeline(rank, world, *, scales_twice=False, microbatches=2):
    """Two stages by hand; one process has both."""
    full = mlp()
    n = int(world)
    parts = {"first": nn.Sequential(full[0], full[1]), "second": full[2]}
    mine = [*parts] if n == 1 else [[*parts][rank]]
    model = nn.ModuleDict({name: parts[name] for name in mine})

    def loss(model, batch):
        total = 0.0
        for x, y in zip(batch[0].chunk(microbatches), batch[1].chunk(microbatches), strict=True):
            if n == 1:
                part = (model["second"](model["first"](x)) - y).square().mean() / microbatches
                part.backward()
                total += part.detach()
            elif rank == 0:
                inner = model["first"](x)
                dist.send(inner.detach(), 1)
                g = torch.empty_like(inner)
                dist.recv(g, 1)
                inner.backward(g / microbatches if scales_twice else g)
            else:
                inner = torch.empty(len(x), 8)
                dist.recv(inner, 0)
                inner.requires_grad_()
                part = (model["second"](inner) - y).square().mean() / microbatches
                part.backward()
                dist.send(inner.grad, 0)
                total += part.detach()
        return torch.as_tensor(total) if n == 1 or rank else None

    return model, loss, data(), updates(model, torch.optim.SGD)


# -- experts ---------------------------------------------------------------------------------------


class GatherRows(torch.autograd.Function):
    """All rows; its gradient is summed and split again."""

    @staticmethod
    def forward(ctx, x):
        rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, x.contiguous())
        return torch.cat(rows)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g.chunk(dist.get_world_size())[dist.get_rank()]


class SumRows(torch.autograd.Function):
    """The sum of all processes' rows, of which each gets its part."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size())[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, g):
        rows = [torch.empty_like(g) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, g.contiguous())
        return torch.cat(rows)


EXPERTS = 4


class Experts(nn.Module):
    """A router, and the experts of this process by their names; all rows go to all processes."""

    def __init__(self, rank, world, mistake=None):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(4, EXPERTS)
        self.mistake = mistake
        self.n = int(world)
        full = [torch.randn(4, 3) for _ in range(EXPERTS)]
        self.local = torch.arange(EXPERTS).chunk(world)[rank].tolist()
        self.experts = nn.ParameterDict({str(i): nn.Parameter(full[i]) for i in self.local})

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        top, index = scores.topk(2, -1)
        if self.mistake == "detached" and self.n > 1:
            top = top.detach()
        gates = torch.zeros_like(scores).scatter(-1, index, top)
        rows = GatherRows.apply(x)
        weights = GatherRows.apply(gates)
        self.auxiliary = self.balance(gates, scores)
        out = sum(weights[:, i : i + 1] * (rows @ self.experts[str(i)]) for i in self.local)
        return SumRows.apply(out)

    def balance(self, gates, scores):
        """The product of mean load and mean score: of all rows, or of this process's."""
        load = (gates > 0).to(scores.dtype).mean(0)
        score = scores.mean(0)
        if self.mistake == "empty":
            chosen = gates > 0
            return sum((scores[:, i][chosen[:, i]]).mean() for i in range(EXPERTS)) / EXPERTS
        if self.mistake != "mean of means":
            load, score = (GatherRows.apply(x[None]).mean(0) * 1.0 for x in (load, score))
        return (load * score).sum()


def experts(rank, world, *, mistake=None, clip=None):
    model = Experts(rank, world, mistake)
    n = int(world)
    dense, own = [*model.router.parameters()], [*model.experts.values()]

    def loss(model, batch):
        value = (model(batch[0]) - batch[1]).square().mean() + 0.1 * model.auxiliary
        value.backward()
        for x in dense:
            if x.grad is None:
                x.grad = torch.zeros_like(x)
            dist.all_reduce(x.grad)
            x.grad /= 1 if mistake == "router summed" else n
        for x in own:
            x.grad /= 1 if mistake == "times experts' axis" else n
        if mistake == "swapped" and n > 1:
            own[0].grad, own[1].grad = own[1].grad, own[0].grad
        return value

    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        if clip is not None:
            squares = sum(x.grad.square().sum() for x in own)
            dist.all_reduce(squares)
            norm = sum(
                (x.grad.square().sum() for x in dense), squares * (mistake != "norm" or n == 1)
            ).sqrt()
            for x in model.parameters():
                x.grad *= clip / norm
        opt.step()
        opt.zero_grad()

    return model, loss, rows_of(world.mesh), step


def lost_microbatch(rank, world):
    """Gradients of microbatches are reduced into one buffer, which keeps the last one."""
    model = mlp()

    def loss(model, batch):
        params = [*model.parameters()]
        for half in zip(*(x.chunk(2) for x in batch), strict=True):
            for x, g in zip(
                params, torch.autograd.grad(square(model, half) / 2, params), strict=True
            ):
                dist.all_reduce(g)
                x.grad = g / world if x.grad is None or world > 1 else x.grad + g / world

    return model, loss, rows_of(world.mesh), updates(model, torch.optim.SGD)


def by_fshard(rank, world, *, stage=3):
    """Ours: arrays are copied to tensors, which are compared."""
    mesh = fs.make_mesh({"data": int(world)})
    apply, params, buffers = fs.functionalize(mlp())
    model = {name: x.detach().clone().requires_grad_() for name, x in params.items()}
    params = fs.shard_params(params, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(fs.optim.adamw(0.05), mesh=mesh, axis="data", stage=stage)
    gradient = fs.value_and_grad(
        lambda p, batch: square(lambda x: apply(p, buffers, x)[0], batch),
        mesh=mesh,
        batch=P("data"),
        gradients=opt.gradients,
    )
    state = opt.init(params)
    grads = None

    def loss(model, batch):
        nonlocal grads
        arrays = tuple(fs.from_local(x, fs.Layout(mesh, P("data"))) for x in batch)
        value, grads = gradient(params, arrays)
        for name, g in grads.items():
            model[name].grad = fs.unshard(g)
        return value

    def step():
        nonlocal params, state
        params, state = opt.step(grads, state, params)
        for name, x in params.items():
            model[name].data.copy_(fs.unshard(x))
            model[name].grad = None

    return model, loss, rows_of(world.mesh), step


RIGHT = {
    "fshard 1": (partial(by_fshard, stage=1), {"data": 2}, {}),
    "fshard 3": (by_fshard, {"data": 4}, {}),
    "ddp": (ddp, {"data": 2}, {}),
    "ddp of 4": (ddp, {"data": 4}, {}),
    "ddp, clipped": (partial(ddp, clip=0.1, optimizer=torch.optim.SGD), {"data": 2}, {}),
    "ddp, accumulation": (ddp_accumulation, {"data": 2}, {}),
    "ddp, shared and frozen": (ddp_shared_and_frozen, {"data": 2}, {}),
    "zero redundancy": (zero_redundancy, {"data": 2}, {}),
    "fully_shard": (by_fully_shard, {"data": 2}, {}),
    "fully_shard, clipped": (partial(by_fully_shard, clip=0.1), {"data": 4}, {}),
    "fully_shard, kept": (partial(by_fully_shard, reshard=False), {"data": 2}, {}),
    "fully_shard, bf16": (
        partial(
            by_fully_shard,
            policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            optimizer=torch.optim.SGD,
        ),
        {"data": 2},
        {"dtype": torch.bfloat16},
    ),
    "fully_shard, accumulation": (fully_shard_accumulation, {"data": 2}, {}),
    "hybrid shard": (by_fully_shard, {"replica": 2, "data": 2}, {}),
    "tensor parallel": (tensor_parallel, {"model": 2}, {}),
    "tensor parallel and fully_shard": (
        tensor_parallel_and_fully_shard,
        {"data": 2, "model": 2},
        {},
    ),
    "dtensors": (dtensors, {"data": 2}, {}),
    "by hand": (by_hand, {"data": 2}, {}),
    "columns and rows by hand": (megatron, {"model": 2}, {}),
    "pipeline by hand": (pipeline, {"pipe": 2}, {}),
    "experts": (experts, {"expert": 2}, {}),
    "experts of 4, clipped": (partial(experts, clip=0.1), {"expert": 4}, {}),
}
WRONG = {  # program, axes, a leaf that diverges, a part of its reason
    "times experts' axis": (
        partial(experts, mistake="times experts' axis"),
        {"expert": 2},
        "experts.0",
        "is 2 times",
    ),
    "not divided": (
        partial(experts, mistake="router summed"),
        {"expert": 4},
        "router.weight",
        "is 4 times",
    ),
    "norm without experts": (
        partial(experts, mistake="norm", clip=0.1),
        {"expert": 2},
        "experts.3",
        "times that of one device",
    ),
    "detached router": (
        partial(experts, mistake="detached"),
        {"expert": 2},
        "router.weight",
        "the gradient",
    ),
    "swapped": (
        partial(experts, mistake="swapped"),
        {"expert": 2},
        "experts.0",
        "is that of experts.1",
    ),
    "bias on each": (partial(megatron, bias_everywhere=True), {"model": 2}, "down.bias", "the"),
    "empty expert": (partial(experts, mistake="empty"), {"expert": 4}, "loss", "is not finite"),
    "mean of means": (
        partial(experts, mistake="mean of means"),
        {"expert": 2},
        "loss",
        "instead of",
    ),
    "lost microbatch": (lost_microbatch, {"data": 2}, "0.weight", "instead of"),
    "scaled twice": (
        partial(pipeline, scales_twice=True),
        {"pipe": 2},
        "first.0.weight",
        "is 0.5 times",
    ),
}
