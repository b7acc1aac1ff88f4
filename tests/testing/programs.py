"""Small programs of torch.distributed for `certify_program`: right ones, some of which look wrong, and
ones with published mistakes.
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
        torch.manual_seed(9)  # no expert is empty, except for a rank
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


# -- what a loss may return, and what a batch may be ------------------------------------------------


def tiny_config(family):
    """The config of a Hugging Face model, without dropout."""
    import transformers

    wide = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    if family == "llama":
        return transformers.LlamaConfig(**wide, intermediate_size=24, num_key_value_heads=2)
    if family == "mixtral":
        return transformers.MixtralConfig(
            **wide, intermediate_size=24, num_key_value_heads=2, num_local_experts=4
        )
    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=32, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    if family == "bert":
        return transformers.BertConfig(
            **wide, intermediate_size=24, hidden_dropout_prob=0, attention_probs_dropout_prob=0
        )
    return transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        dropout_rate=0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )


def hugging_face(family):
    import transformers

    kinds = {
        "llama": transformers.LlamaForCausalLM,
        "mixtral": transformers.MixtralForCausalLM,
        "gpt2": transformers.GPT2LMHeadModel,
        "bert": transformers.BertForMaskedLM,
        "t5": transformers.T5ForConditionalGeneration,
    }
    torch.manual_seed(0)
    return kinds[family](tiny_config(family))


def tokens_of(rank, world, width=6):
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (8, width), generator=draw).chunk(world)[rank]
    return {"input_ids": ids, "labels": ids}


RETURNS = {
    "object": lambda out: out,
    "loss": lambda out: out.loss,
    "dict": lambda out: {"loss": out.loss, "logits": out.logits},
    "tuple": lambda out: (out.loss, out.logits),
}


def transformer(rank, world, *, family="llama", by="ddp", returns="object"):
    model = hugging_face(family)
    if by == "ddp":
        model = DDP(model)
    elif by == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        layers = ("LlamaDecoderLayer", "MixtralDecoderLayer", "GPT2Block", "BertLayer", "T5Block")
        for module in model.modules():
            if type(module).__name__ in layers:
                fully_shard(module, mesh=world.mesh)
        fully_shard(model, mesh=world.mesh)

    def loss(model, batch):
        return RETURNS[returns](model(**batch))

    return model, loss, tokens_of(rank, world), updates(model)


class Rows(torch.utils.data.Dataset):
    """The rows of `data()`."""

    def __init__(self, rows):
        self.x, self.y = data(rows)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def by_loader(rank, world, *, rows=24, sampled=True):
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    model = DDP(mlp())
    rows = Rows(rows)
    sampler = DistributedSampler(rows, world, rank, shuffle=False) if sampled else None
    loader = DataLoader(rows, batch_size=4, sampler=sampler, num_workers=2)
    return model, square, loader, updates(model)


def by_dict_that_is_emptied(rank, world):
    model = DDP(mlp())
    x, y = rows_of(world.mesh)

    def loss(model, batch):
        y = batch.pop("y")
        return {"loss": (model(batch["x"]) - y).square().mean()}

    return model, loss, {"x": x, "y": y}, updates(model)


# -- right ones that look wrong --------------------------------------------------------------------


def zero_in_the_loss(rank, world):
    """Gradients are set to zero where the next ones are taken."""
    model = DDP(mlp())
    opt = torch.optim.AdamW(model.parameters(), 0.05)

    def loss(model, batch):
        value = square(model, batch)
        opt.zero_grad()
        value.backward()
        return value

    return model, loss, rows_of(world.mesh), opt.step


def reduced_in_step(rank, world, *, divides=True):
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), 0.05)

    def step():
        reduced(model, world if divides else 1)
        opt.step()
        opt.zero_grad()

    return model, square, rows_of(world.mesh), step


def averaged_parameters(rank, world, *, optimizer=torch.optim.SGD):
    """Each process steps by its own gradient; parameters are averaged. That is right for SGD alone."""
    model = mlp()
    opt = optimizer(model.parameters(), 0.05)

    def step():
        opt.step()
        opt.zero_grad()
        for x in model.parameters():
            dist.all_reduce(x.data)
            x.data /= world

    return model, square, rows_of(world.mesh), step


def share_of_the_mean(rank, world):
    """Each process has the sum over its elements by the number of all; gradients are summed."""
    model = mlp()
    x, y = rows_of(world.mesh)

    def loss(model, batch):
        x, y = batch
        value = (model(x) - y).square().sum() / (y.numel() * world)
        value.backward()
        reduced(model, 1)
        return value

    return model, loss, (x, y), updates(model)


def weighted_by_tokens(rank, world, *, by_ranks=False):
    """A mean over tokens that are no padding, of which processes have other numbers."""
    model = DDP(mlp())
    x, y = rows_of(world.mesh)
    mask = (torch.arange(8) % 3 > 0).double().chunk(world)[rank]

    def loss(model, batch):
        x, y, mask = batch
        total = mask.sum()
        if by_ranks:
            return ((model(x) - y).square().mean(1) * mask).sum() / total
        dist.all_reduce(total)
        return ((model(x) - y).square().mean(1) * mask).sum() / total * world

    return model, loss, (x, y, mask), updates(model)


def context_parallel(rank, world, *, zigzag=False, forgets=False):
    """Each process has a chunk of the sequence; keys and values are gathered."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(16, 4), "head": nn.Linear(4, 16)})
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 16, (2, 8), generator=draw)
    places = torch.arange(8)
    if zigzag:
        chunks = places.chunk(2 * world)
        own = torch.cat([chunks[rank], chunks[2 * int(world) - 1 - rank]])
    else:
        own = places.chunk(world)[rank]

    def loss(model, batch):
        ids, places = batch
        q = model["embed"](ids)
        k = GatherRows.apply(q.transpose(0, 1)).transpose(0, 1)
        positions = [torch.empty_like(places) for _ in range(world)]
        dist.all_gather(positions, places)
        is_seen = places[:, None] >= torch.cat(positions)
        weights = (q @ k.transpose(1, 2)).masked_fill(~is_seen, -torch.inf).softmax(-1)
        value = nn.functional.cross_entropy(model["head"](weights @ k).flatten(0, 1), ids.flatten())
        value.backward()
        if not forgets:
            reduced(model, world)
        return value

    return model, loss, (ids[:, own], own), updates(model)


def other_columns(rank, world):
    """Each process draws its own columns, so the program in one process has those of one."""
    model = mlp()
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 2, 4, generator=draw)

    def loss(model, x):
        total = AddOver.apply(model(x).sum(1))
        value = total.square().mean()
        value.backward()
        reduced(model, 1)
        return value

    return model, loss, x, updates(model, torch.optim.SGD)


def tied_stages(rank, world, *, forgets=False):
    """The embedding is on the first stage, its transpose on the last; their gradients are summed."""
    torch.manual_seed(0)
    n = int(world)
    weight = torch.randn(8, 4)
    middle = nn.Linear(4, 4)
    embed = nn.Embedding(8, 4, _weight=weight.clone())
    head = nn.Linear(4, 8, bias=False)
    head.weight = embed.weight if n == 1 else nn.Parameter(weight.clone())
    parts = {"embed": embed, "middle": middle, "head": head}
    names = [["embed"], ["middle", "head"]][rank] if n > 1 else [*parts]
    model = nn.ModuleDict({name: parts[name] for name in names})
    ids = torch.arange(8)

    def loss(model, ids):
        if n == 1:
            return nn.functional.cross_entropy(head(middle(embed(ids))), ids.flip(0))
        if rank == 0:
            inner = embed(ids)
            dist.send(inner.detach(), 1)
            g = torch.empty_like(inner)
            dist.recv(g, 1)
            inner.backward(g)
            value = None
        else:
            inner = torch.empty(8, 4)
            dist.recv(inner, 0)
            inner.requires_grad_()
            value = nn.functional.cross_entropy(head(middle(inner)), ids.flip(0))
            value.backward()
            dist.send(inner.grad, 0)
        if not forgets:
            dist.all_reduce(embed.weight.grad if rank == 0 else head.weight.grad)
        return value

    return model, loss, ids, updates(model)


def fused_columns(rank, world, *, starts_at_zero=False, sizes=(8, 4, 4)):
    """A weight of three parts, each divided along the axis, as a plain tensor."""
    torch.manual_seed(0)
    full = torch.zeros(sum(sizes)) if starts_at_zero else torch.randn(sum(sizes))
    own = torch.cat([part.chunk(world)[rank] for part in full.split(sizes)])
    scale = torch.cat(
        [x.chunk(world)[rank] for x in torch.arange(1.0, 1 + sum(sizes)).split(sizes)]
    )
    params = {"qkv.bias": own.clone().requires_grad_()}

    def loss(params, x):
        y = ((params["qkv.bias"] - scale).square() * x).sum()
        return AddOver.apply(y)

    opt = torch.optim.SGD([*params.values()], 0.1)
    return params, loss, torch.ones(1), lambda: (opt.step(), opt.zero_grad())


def experts_in_columns(rank, world):
    """Experts along one axis, the columns of each along the other."""
    torch.manual_seed(0)
    mesh = world.mesh
    full = torch.randn(4, 6, 3)
    own = full.chunk(mesh["expert"].size())[mesh["expert"].get_local_rank()]
    own = own.chunk(mesh["tensor"].size(), 1)[mesh["tensor"].get_local_rank()]
    params = {"experts": own.clone().requires_grad_()}
    opt = torch.optim.SGD([*params.values()], 0.1)

    def loss(params, x):
        return AddOver.apply((params["experts"].square().sum() * x).sum())

    return params, loss, torch.ones(1), lambda: (opt.step(), opt.zero_grad())


def shard_of_zeros(rank, world):
    """A bias that begins at 0 and is sharded along the second of two axes of equal sizes."""
    mesh = world.mesh
    n = mesh["model"].size()
    index = mesh["model"].get_local_rank()
    scale = torch.arange(1.0, 5).chunk(n)[index]
    params = {"bias": torch.zeros(4).chunk(n)[index].clone().requires_grad_()}
    x = torch.arange(1.0, 9).chunk(mesh["data"].size())[mesh["data"].get_local_rank()]
    opt = torch.optim.SGD([*params.values()], 0.1)

    def loss(params, x):
        part = (params["bias"] - scale).square().sum()
        value = part * x.mean()
        value.backward()
        for name in ("data",):
            dist.all_reduce(params["bias"].grad, group=mesh[name].get_group())
        params["bias"].grad /= mesh["data"].size()
        total = value.detach()
        dist.all_reduce(total, group=mesh["model"].get_group())
        return total

    return params, loss, x, lambda: (opt.step(), opt.zero_grad())


def orthogonalized(rank, world):
    """An update that computes in bfloat16, as Muon's."""
    model = DDP(mlp())

    def step():
        for x in model.parameters():
            g = x.grad.bfloat16()
            x.data -= 0.01 * (g / (g.float().norm() + 1e-6).bfloat16()).to(x.dtype)
            x.grad = None

    return model, square, rows_of(world.mesh), step


def zero_gradient(rank, world):
    """A bias below a softmax has a gradient of rounding, of which Adam makes a step."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    shift = nn.Parameter(torch.zeros(1))
    model.module.register_parameter("shift", shift)

    def loss(model, batch):
        x, y = batch
        scores = (model(x) + 1e3 * shift).log_softmax(-1)
        return -(scores * y.softmax(-1)).sum(-1).mean()

    opt = torch.optim.Adam(model.parameters(), 0.05, eps=1e-30)
    model = DDP(model.module)
    return model, loss, rows_of(world.mesh), lambda: (opt.step(), opt.zero_grad())


# -- wrong ones, by their causes -------------------------------------------------------------------


def keeps_gradients(rank, world):
    model = DDP(mlp())
    opt = torch.optim.SGD(model.parameters(), 0.05)
    return model, square, rows_of(world.mesh), opt.step


def keeps_and_detaches(rank, world):
    """The loss has no gradient after the first step, so those of the first one stay."""
    model = DDP(mlp())
    opt = torch.optim.SGD(model.parameters(), 0.05)
    count = 0

    def loss(model, batch):
        nonlocal count
        count += 1
        value = square(model, batch)
        return value if count == 1 else value.detach()

    return model, loss, rows_of(world.mesh), opt.step


def sent_in_bfloat16(rank, world, *, by="hand"):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    if by == "hook":
        model = DDP(mlp())
        model.register_comm_hook(None, bf16_compress_hook)
        return model, square, rows_of(world.mesh), updates(model, torch.optim.SGD)
    if by == "policy":
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        return by_fully_shard(rank, world, policy=policy, optimizer=torch.optim.SGD)
    model = mlp()

    def loss(model, batch):
        value = square(model, batch)
        value.backward()
        for x in model.parameters():
            g = x.grad.bfloat16()
            dist.all_reduce(g)
            x.grad = g.to(x.dtype) / world
        return value

    return model, loss, rows_of(world.mesh), updates(model, torch.optim.SGD)


def frozen_on_one(rank, world):
    """One process forgets to train a parameter."""
    model = mlp()
    if rank == 1:
        model[0].bias.requires_grad_(False)

    def loss(model, batch):
        value = square(model, batch)
        value.backward()
        for x in model.parameters():
            if x.grad is None:
                x.grad = torch.zeros_like(x)
            dist.all_reduce(x.grad)
            x.grad /= world
        return value

    return model, loss, rows_of(world.mesh), updates(model, torch.optim.SGD)


def moves_nothing(rank, world):
    """The optimizer has the parameters from before they were sharded."""
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), 0.05)
    fully_shard(model, mesh=world.mesh)
    return model, square, rows_of(world.mesh), lambda: (opt.step(), model.zero_grad())


def numbers_of_ranks(rank, world):
    model = DDP(mlp())

    def loss(model, batch):
        x, y, scale = batch
        return scale * square(model, (x, y))

    return model, loss, (*rows_of(world.mesh), 1.0 + rank), updates(model)


def other_start(rank, world):
    model = mlp()
    model[0].bias.data += rank
    opt = torch.optim.SGD(model.parameters(), 0.05)

    def step():
        reduced(model, world)
        opt.step()
        opt.zero_grad()

    return model, square, rows_of(world.mesh), step


def lost_layer(rank, world):
    """No process has a parameter that one process trains."""
    params = {"w": torch.ones(2, 2).requires_grad_(), "lost": torch.ones(2).requires_grad_()}
    if world > 1:
        del params["lost"]
    opt = torch.optim.SGD([*params.values()], 0.1)
    loss = lambda params, x: sum((p * x).square().sum() for p in params.values())  # noqa: E731
    return params, loss, torch.ones(1), lambda: (opt.step(), opt.zero_grad())


def unlike_shards(rank, world):
    """Shards that no layout has."""
    torch.manual_seed(0)
    full = torch.randn(4, 3)
    params = {"w": (full if world == 1 else full.chunk(world)[rank] + 1).clone().requires_grad_()}
    opt = torch.optim.SGD([*params.values()], 0.1)
    loss = lambda params, x: (params["w"].square().sum() * x).sum()  # noqa: E731
    return params, loss, torch.ones(1), lambda: (opt.step(), opt.zero_grad())


def half_a_parameter(rank, world):
    """Both processes have the same half of the columns."""
    torch.manual_seed(0)
    full = torch.randn(4, 3)
    params = {"w": (full if world == 1 else full[:2]).clone().requires_grad_()}
    opt = torch.optim.SGD([*params.values()], 0.1)
    loss = lambda params, x: (params["w"].square().sum() * x).sum()  # noqa: E731
    return params, loss, torch.ones(1), lambda: (opt.step(), opt.zero_grad())


def times_of_rank(rank, world):
    """Rank 1 has twice the gradient."""
    return 1 + rank


def times_all(rank, world):
    """The number of all processes."""
    return int(world)


def times_third(rank, world):
    """A number that decimals do not show."""
    return 1 / 3 if world > 1 else 1


def times_little(rank, world):
    """A number that six digits do not show."""
    return 1 + 1e-7 if world > 1 else 1


def scaled(rank, world, *, by, optimizer=torch.optim.AdamW):
    """Gradients are multiplied by a number before the step."""
    model = DDP(mlp())

    def loss(model, batch):
        value = square(model, batch)
        value.backward()
        for x in model.parameters():
            x.grad *= by(rank, world)
        return value

    axes = world.mesh if world.mesh.ndim == 1 else world.mesh._flatten("all")
    return model, loss, rows_of(axes), updates(model, optimizer)


def not_divided_by_accumulation(rank, world):
    model = DDP(mlp())

    def loss(model, batch):
        for part in zip(*(x.chunk(4 // world) for x in batch), strict=True):
            scale = 4 if world == 1 else 1
            (square(model, part) / scale).backward()

    return model, loss, rows_of(world.mesh), updates(model)


def tiny_and_wrong(rank, world):
    """A gradient of 1e-13 of the others is twice as large, of which Adam makes another update."""
    torch.manual_seed(0)
    model = nn.ParameterDict({"large": torch.ones(3), "tiny": torch.ones(3)})
    x = torch.arange(1.0, 9).chunk(world)[rank]
    opt = torch.optim.AdamW(model.parameters(), 0.05, eps=1e-13)

    def loss(model, x):
        weights = torch.arange(1.0, 4)
        return x.mean() * (
            (model["large"] * weights).sum() + 1e-13 * (model["tiny"] * weights).sum()
        )

    def whole(model, x):
        value = loss(model, x)
        value.backward()
        reduced(model, world)
        if world > 1:
            model["tiny"].grad *= 2
        return value

    return model, whole, x, lambda: (opt.step(), opt.zero_grad())


def off_by_little(rank, world):
    """An element is another in the eighth digit."""
    model = DDP(mlp())

    def loss(model, batch):
        value = square(model, batch)
        value.backward()
        model.module[2].bias.grad[0] *= times_little(rank, world)
        return value

    return model, loss, rows_of(world.mesh), updates(model)


def local_clipping(rank, world):
    """Adam does not see the length of a gradient, which is clipped by a norm of other elements."""
    model = DDP(mlp())
    opt = torch.optim.Adam(model.parameters(), 0.05)

    def step():
        params = [*model.parameters()][: 4 if world == 1 else 2]
        norm = torch.stack([x.grad.square().sum() for x in params]).sum().sqrt()
        for x in model.parameters():
            x.grad *= 0.1 / norm
        opt.step()
        opt.zero_grad()

    return model, square, rows_of(world.mesh), step


def one_steps_not(rank, world):
    model = DDP(mlp())
    opt = torch.optim.SGD(model.parameters(), 0.05)

    def step():
        if rank == 0:
            opt.step()
        opt.zero_grad()

    return model, square, rows_of(world.mesh), step


def not_zeroed_on_one(rank, world):
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), 0.05)

    def step():
        reduced(model, world)
        opt.step()
        if rank == 0:
            opt.zero_grad()

    return model, square, rows_of(world.mesh), step


def flat_parameters(rank, world):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model = mlp()
    model[0] = FSDP(model[0], device_id=torch.device("cpu"))
    model = FSDP(model, device_id=torch.device("cpu"))
    return model, square, rows_of(world.mesh), updates(model)


def loss_scale(rank, world):
    model = DDP(mlp())
    opt = torch.optim.AdamW(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loss(model, batch):
        value = square(model, batch)
        scaler.scale(value).backward()
        return value

    def step():
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    return model, loss, rows_of(world.mesh), step


def sparse_gradients(rank, world):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 3)))
    ids = torch.arange(8).chunk(world)[rank]
    opt = torch.optim.SGD(model.parameters(), 0.1)
    loss = lambda model, ids: model(ids).square().mean()  # noqa: E731
    return model, loss, ids, lambda: (opt.step(), opt.zero_grad())


# -- gradients that are not reduced, which changes do not show -------------------------------------


class BySigns(torch.optim.Optimizer):
    """Changes each element by the rate, whatever the size of its gradient."""

    def __init__(self, params, sends):
        super().__init__(params, {})
        self.sends = sends

    def step(self):
        for p in self.param_groups[0]["params"]:
            self.sends(p.grad)
            p.data -= 1e-3 * p.grad.sign()


def sends_a_number(grad):
    dist.all_reduce(torch.ones(1))


def adam(params):
    return torch.optim.Adam(params, lr=1e-3)


def large_gradients(rank, world, *, optimizer=adam, width=6, then=None, mode="plain"):
    """Gradients of one sign and about one size on all ranks: Adam makes equal changes of them."""
    torch.manual_seed(0)
    model = nn.Linear(width, 1, bias=False)
    x = (torch.rand(8, width) + 0.1).chunk(world)[rank]
    opt = optimizer(model.parameters())
    wrapped = model if mode == "plain" else DDP(model)

    def loss(_, x):
        if mode != "no_sync":
            return (model(x) - 1e6).square().mean()
        with wrapped.no_sync():
            value = (wrapped(x) - 1e6).square().mean()
            value.backward()
        return value

    def step():
        opt.step()
        opt.zero_grad()
        if then is not None:
            then(model, world)

    return wrapped, loss, x, step


def sends_its_loss(model, world):
    dist.all_reduce(torch.ones(1))


def averages_parameters(model, world):
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= world


def zero_of_adam(params):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=1e-3)


def never_synchronized(rank, world):
    """A root of fully_shard that never reduces, beside a layer that does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    fully_shard(model[0], mesh=world.mesh)
    fully_shard(model, mesh=world.mesh)
    model.set_requires_gradient_sync(False, recurse=False)
    return model, square, rows_of(world.mesh), updates(model)


class _SumOverModel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Columns(nn.Module):
    """Columns and rows of two layers along model, without the sum in the backward."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        up, down = torch.randn(8, 6), torch.randn(3, 8)
        rank = mesh.get_local_rank()
        self.up = nn.Parameter(up.chunk(mesh.size(), 0)[rank].clone())
        self.down = nn.Parameter(down.chunk(mesh.size(), 1)[rank].clone())

    def forward(self, x):
        hidden = torch.tanh(self.first(x) @ self.up.T) @ self.down.T
        return _SumOverModel.apply(hidden, self.mesh.get_group())


def no_sum_over_model(rank, world, *, is_averaged=True):
    model = _Columns(world.mesh["model"])
    data_mesh = world.mesh["data"]
    wrapped = DDP(model, process_group=data_mesh.get_group()) if is_averaged else model
    return wrapped, square, rows_of(data_mesh), updates(model, torch.optim.SGD)


def clipped_by_own_norms(rank, world):
    """Each rank divides all gradients by a number of its own."""
    model = DDP(mlp())
    step = updates(model)

    def divided():
        for p in model.parameters():
            p.grad *= 1 - 0.002 * rank
        step()

    return model, square, rows_of(world.mesh), divided


def padded(rank, world):
    """A mean over the tokens of each rank, of which they have different numbers."""
    model = DDP(mlp())
    x, y = data()
    weights = torch.ones(8)
    weights[5:] = 0.0
    batch = tuple(each.chunk(world)[rank] for each in (x, y, weights))

    def loss(model, batch):
        x, y, weights = batch
        return (weights * (model(x) - y).square().mean(1)).sum() / weights.sum()

    return model, loss, batch, updates(model)


def larger_loss(rank, world):
    """Other losses on ranks, each of them 1.5 times as large."""
    model, loss, batch, step = ddp(rank, world)
    factor = 1.5 if world > 1 else 1.0
    return model, lambda model, batch: factor * loss(model, batch), batch, step


def uneven_last_batch(rank, world):
    """A sum over rows, divided by the number of all, where the last batches have 4 and 3 rows."""
    model = DDP(mlp())
    rows = torch.utils.data.Subset(Rows(23), range(rank, 23, world))
    loader = torch.utils.data.DataLoader(rows, batch_size=8 // world)

    def loss(model, batch):
        x, y = batch
        count = torch.tensor(len(x))
        dist.all_reduce(count)
        return (model(x) - y).square().mean(1).sum() * world / count

    return model, loss, loader, updates(model)


def unlike_rows(rank, world):
    """A mean over the rows of each rank, of which they have 5 and 3."""
    model = DDP(mlp())
    batch = tuple(x.split([5, 3])[rank] for x in data()) if world > 1 else data()
    return model, square, batch, updates(model)


def local_statistics(rank, world):
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    model = DDP(nn.Sequential(*layers))
    return model, square, rows_of(world.mesh), updates(model)


def regularised_on_one(rank, world):
    """A decay in the loss of rank 0 alone, whose gradient the mean over ranks halves."""

    def loss(model, batch):
        decay = sum(p.square().sum() for p in model.parameters())
        return square(model, batch) + (0.01 * decay if rank == 0 else 0.0)

    return ddp(rank, world, loss=loss)


def clipped_by_shards(rank, world):
    """Each rank clips its shards by their own norm."""
    model, loss, batch, then = by_fully_shard(rank, world)

    def step():
        grads = [p.grad.to_local() for p in model.parameters()]
        norm = torch.stack([x.square().sum() for x in grads]).sum().sqrt()
        for x in grads:
            x *= 0.1 / norm
        then()

    return model, loss, batch, step


def equal_rows(rank, world, *, axis):
    model = DDP(mlp())
    return model, square, data(), updates(model)


UNREDUCED = {
    "Adam": {},
    "AdamW": {"optimizer": partial(torch.optim.AdamW, lr=1e-3)},
    "one element": {"width": 1},
    "the model inside of DistributedDataParallel": {"mode": "inside"},
    "no_sync": {"mode": "no_sync"},
    "step() sends a number": {"then": sends_its_loss},
    "parameters are averaged": {"then": averages_parameters},
    "ZeroRedundancyOptimizer alone": {"optimizer": zero_of_adam},
    "an optimizer sends a number": {"optimizer": partial(BySigns, sends=sends_a_number)},
}


RIGHT = {
    "reduced by an optimizer of its own": (
        partial(large_gradients, optimizer=partial(BySigns, sends=dist.all_reduce)),
        {"data": 2},
        {},
    ),
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
        {},
    ),
    "fully_shard, accumulation": (fully_shard_accumulation, {"data": 2}, {}),
    "hybrid shard": (by_fully_shard, {"replica": 2, "data": 2}, {}),
    "tensor parallel": (tensor_parallel, {"model": 2}, {}),
    "tensor parallel and fully_shard": (
        tensor_parallel_and_fully_shard,
        {"data": 2, "model": 2},
        {},
    ),
    "dtensors": (dtensors, {"data": 2}, {"same": ("data",)}),
    "by hand": (by_hand, {"data": 2}, {}),
    "columns and rows by hand": (megatron, {"model": 2}, {}),
    "pipeline by hand": (pipeline, {"pipe": 2}, {}),
    "experts": (experts, {"expert": 2}, {}),
    "experts of 4, clipped": (partial(experts, clip=0.1), {"expert": 4}, {}),
    **{
        f"{family}, {by}": (partial(transformer, family=family, by=by), {"data": 2}, {})
        for family, by in (
            ("llama", "ddp"),
            ("gpt2", "fully_shard"),
            ("bert", "ddp"),
            ("t5", "fully_shard"),
            ("mixtral", "fully_shard"),
            ("llama", "fsdp1"),
        )
    },
    **{
        f"returns {name}": (partial(transformer, returns=name), {"data": 2}, {}) for name in RETURNS
    },
    "flat parameters": (flat_parameters, {"data": 2}, {}),
    "loader": (by_loader, {"data": 2}, {}),
    "uneven last batch": (uneven_last_batch, {"data": 2}, {}),
    "dict that is emptied": (by_dict_that_is_emptied, {"data": 2}, {}),
    "zero_grad in the loss": (zero_in_the_loss, {"data": 2}, {}),
    "reduced in step": (reduced_in_step, {"data": 2}, {}),
    "averaged parameters": (averaged_parameters, {"data": 2}, {}),
    "share of the mean": (share_of_the_mean, {"data": 2}, {}),
    "weighted by tokens": (weighted_by_tokens, {"data": 2}, {}),
    "context parallel": (context_parallel, {"context": 2}, {}),
    "context parallel, zigzag": (partial(context_parallel, zigzag=True), {"context": 2}, {}),
    "declared split": (other_columns, {"columns": 2}, {"splits": {"columns": 1}}),
    "tied stages": (tied_stages, {"pipe": 2}, {}),
    "fused columns": (fused_columns, {"model": 2}, {}),
    "fused columns of equal sizes": (partial(fused_columns, sizes=(4, 4, 4)), {"model": 2}, {}),
    "declared parts": (
        partial(fused_columns, starts_at_zero=True),
        {"model": 2},
        {"parts": {"*.bias": (8, 4, 4)}},
    ),
    "experts in columns": (experts_in_columns, {"expert": 2, "tensor": 2}, {}),
    "shard of zeros": (shard_of_zeros, {"data": 2, "model": 2}, {}),
    "update in bfloat16": (orthogonalized, {"data": 2}, {}),
    "gradient of rounding": (zero_gradient, {"data": 2}, {}),
    "declared dtype": (sent_in_bfloat16, {"data": 2}, {"dtype": torch.bfloat16}),
    "loss scale": (loss_scale, {"data": 2}, {}),
    "sparse gradients": (sparse_gradients, {"data": 2}, {}),
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
        "router.weight",
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
    **{
        f"sent in bfloat16 by {by}": (
            partial(sent_in_bfloat16, by=by),
            {"data": 2},
            "reductions",
            "in bfloat16",
        )
        for by in ("hand", "hook", "policy")
    },
    "frozen on one": (frozen_on_one, {"data": 2}, "0.bias", "the gradient"),
    "times the rank": (
        partial(scaled, by=times_of_rank),
        {"data": 2},
        "2.weight",
        "the gradient is that of one device, but times 2 on rank 1",
    ),
    "times all axes": (
        partial(scaled, by=times_all),
        {"data": 2, "replica": 2},
        "2.weight",
        "the gradient is 4 times that of one device: the size of data x replica",
    ),
    "times a third": (
        partial(scaled, by=times_third),
        {"data": 2},
        "2.weight",
        "the gradient is 0.333333 (1/3) times",
    ),
    "accumulation": (
        not_divided_by_accumulation,
        {"data": 2},
        "2.weight",
        "is 2 times that of one device: the size of data or the number of backward calls in a step",
    ),
    "tiny gradient": (tiny_and_wrong, {"data": 2}, "tiny", "the gradient is 2 times"),
    "off by little": (off_by_little, {"data": 2}, "2.bias", "the gradient first differs at [0]"),
    "local clipping": (
        local_clipping,
        {"data": 2},
        "2.weight",
        "the gradient that the optimizer is given is",
    ),
    "one steps not": (
        one_steps_not,
        {"data": 2},
        "2.weight",
        "the change of the parameter is that of one device, but times 0 on rank 1",
    ),
    "summed in step": (
        partial(reduced_in_step, divides=False),
        {"data": 2},
        "2.weight",
        "the gradient that the optimizer is given is 2 times",
    ),
    "parameters averaged after Adam": (
        partial(averaged_parameters, optimizer=torch.optim.Adam),
        {"data": 2},
        "2.weight",
        "differs along data, where the mean over data is that of one process: it is not reduced",
    ),
    "weighted by ranks": (
        partial(weighted_by_tokens, by_ranks=True),
        {"data": 2},
        "loss",
        "the loss is",
    ),
    "context not reduced": (
        partial(context_parallel, forgets=True),
        {"context": 2},
        "head.weight",
        "it is not reduced",
    ),
    "tied stages not summed": (
        partial(tied_stages, forgets=True),
        {"pipe": 2},
        "head.weight",
        "the gradient",
    ),
    "half of a parameter": (
        half_a_parameter,
        {"model": 2},
        "w",
        "has indices of dim 0 that no rank has",
    ),
    "other start": (other_start, {"data": 2}, "0.bias", "begins with other values on rank 1"),
    "lost layer": (lost_layer, {"pipe": 2}, "lost", "is on no rank"),
    "mean over unlike rows": (
        unlike_rows,
        {"data": 2},
        "2.weight",
        "a mean of means? Ranks have 5, 3 rows",
    ),
    "statistics of each rank": (
        local_statistics,
        {"data": 2},
        "loss",
        "; BatchNorm '1' takes the mean and variance of the rows of each rank",
    ),
    "regulariser on one rank": (
        regularised_on_one,
        {"data": 2},
        "2.weight",
        "the difference is -0.01 times the parameter",
    ),
    "clipped by norms of shards": (
        clipped_by_shards,
        {"data": 2},
        "0.weight",
        "in shard 1 of its rows along data: does the norm for",
    ),
    "loss by the rank's number": (numbers_of_ranks, {"data": 2}, "loss", "the loss is"),
}
