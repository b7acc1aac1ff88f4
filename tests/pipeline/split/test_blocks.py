"""A module is cut between its blocks, whatever else its forward does, and trains as it does whole."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import fshard as fs
from fshard.mesh.spmd.deterministic import deterministic
from fshard.transforms.stages.functions import stage_functions
from tests.transforms.module import hugging_face

WORDS, WIDTH, BLOCKS = 11, 8, 4
NO_SHRINK = [Phase.explicit, Phase.generate]


class Block(nn.Module):
    def __init__(self, index, drop):
        super().__init__()
        self.index = index
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)
        self.register_buffer("bias", torch.full((WIDTH,), index / 8))

    def forward(self, x, mask=None, *, turns, scale=None):
        q, k, v = (self.qkv(x) + self.bias.repeat(3)).chunk(3, -1)
        scores = (q * turns) @ (k * turns).mT
        scores = scores if mask is None else scores.masked_fill(~mask, -1e9)
        x = x + self.drop(scores.softmax(-1) @ v)
        x = x + F.relu(self.up(x), inplace=True)
        return (x if scale is None else x * scale,)


class Decoder(nn.Module):
    """Has two masks that blocks take in turns, one of which looks at values; weights before, between and after; a tied head."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.memory = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block(index, drop) for index in range(BLOCKS))
        self.scales, self.between, self.unused = (
            nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)) for _ in range(3)
        )
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("speeds", torch.linspace(0, 1, WIDTH), persistent=False)
        self.head.weight = self.words.weight

    def forward(self, tokens, targets=None, *, pause=0, masked=True):
        x = self.words(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = x + self.memory(x)[0] * self.frozen
        causal = places[:, None] >= places
        near = causal & (places[:, None] - places < 2) if masked and causal.any() else None
        turns = torch.cos(places.to(x.dtype)[:, None] * self.speeds).to(x.device)
        for index, block in enumerate(self.blocks):
            more = {"scale": self.scales} if block.index % 2 else {}
            (x,) = block(x, near if index in (1, 2) else causal, turns=turns, **more)
            if index == 1:
                x = x * self.between
        logits = self.head(self.norm(x))
        kept = tokens != pause
        return logits if targets is None else F.cross_entropy(logits[kept], targets[kept])


def tokens(rows, length, seed):
    return torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def functions(stages):
    made = [fs.functionalize(stage) for stage in stages]
    return [lambda p, x, apply=apply, b=b: apply(p, b, x)[0] for apply, _, b in made], [
        params for _, params, _ in made
    ]


def gradients(model, loss):
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    return dict(
        zip(trained, torch.autograd.grad(loss, [*trained.values()], allow_unused=True), strict=True)
    )


def summed(found):
    """Add the gradients of tied parameters, those of later stages first as one backward does."""
    total = {}
    for own in reversed(found):
        for name, g in own.items():
            total[name] = (
                g if total.get(name) is None else total[name] if g is None else total[name] + g
            )
    return total


def check_bits(model, stages, batch, loss_of, name="1f1b"):
    """Hold a pipeline of one microbatch to one backward of the whole, and its weights to be there once."""
    fns, params = functions(stages)
    schedule = fs.pipeline_schedule(name, stages=len(stages), microbatches=1)
    mesh = fs.make_mesh({"pipe": schedule.devices})
    step = fs.pipeline.pipelined(
        fns, schedule, lambda y, _: loss_of(y), mesh=mesh, reproducible=True
    )
    actual = step(params, [batch], weights=[1])
    with deterministic(True, "cpu"):
        loss = loss_of(model(**batch))
        expected = gradients(model, loss)
    assert torch.equal(
        actual.loss, loss.detach().float() if loss.dtype != torch.float64 else loss.detach()
    )
    for name, g in summed(actual.gradients).items():
        if expected.get(name) is None:
            assert g is None, name
        else:
            assert torch.equal(g, expected[name]), name
    names = {id(x): key for key, x in (*model.named_parameters(), *model.named_buffers())}
    held = [{id(x) for x in (*stage.parameters(), *stage.buffers())} for stage in stages]
    assert set().union(*held) == names.keys()
    assert all(
        names[id(x)] == key
        for s in stages
        for key, x in (*s.named_parameters(), *s.named_buffers())
        if id(x) in names
    )
    return [{names[key] for key in keys} for keys in held]


@settings(max_examples=12, phases=NO_SHRINK)
@given(st.integers(1, BLOCKS), st.data())
def test_block_stages_of_any_split_equal_the_model_bitwise(n, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, BLOCKS - 1), min_size=n - 1, max_size=n - 1)))
    sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, BLOCKS], strict=True)]
    torch.manual_seed(0)
    model = Decoder().double()
    stages = fs.pipeline.split_stages(
        model,
        n,
        sizes,
        sample={"tokens": tokens(1, 3, 0), "targets": tokens(1, 3, 0)},
        blocks="blocks",
    )
    rows = data.draw(st.integers(1, 2))
    length = data.draw(st.integers(1, 5))
    batch = {"tokens": tokens(rows, length, 1).clamp(min=1), "targets": tokens(rows, length, 2)}
    batch |= data.draw(st.sampled_from([{}, {"pause": 1, "masked": False}]))
    batch["tokens"][0, 0] = 2
    held = check_bits(
        model, stages, batch, lambda y: y, data.draw(st.sampled_from(["1f1b", "zb-h1"]))
    )
    shared = {name for own in held for name in own if sum(name in other for other in held) > 1}
    assert shared <= {"words.weight", "scales"}


class Down(nn.Linear):
    def forward(self, x):
        x = super().forward(x).tanh()
        return x, (x.sin(), x)


class Up(nn.Linear):
    def forward(self, x, skips):
        return super().forward(x + sum(skips))


class Skipping(nn.Module):
    """Later blocks, and the code after them, use arguments and results of earlier ones."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.downs, self.ups = (
            nn.ModuleList(kind(WIDTH, WIDTH) for _ in range(3)) for kind in (Down, Up)
        )

    def forward(self, tokens):
        x = first = self.words(tokens)
        skips = (x,)
        for down in self.downs:
            x, after = down(x)
            skips += after
        for index, up in enumerate(self.ups):
            x = up(x, skips[-2:])
            skips = skips[:-2]
            x = x * first if index == 1 else x
        return {"logits": self.head(x + skips[0]), "middle": after[0]}


@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_skips_between_stages_equal_the_model_bitwise(n, schedule):
    model = Skipping().double()
    batch = {"tokens": tokens(2, 3, 0)}
    stages = fs.pipeline.split_stages(model, n, sample=batch, blocks=["downs", "ups"])
    check_bits(
        model, stages, batch, lambda y: y["logits"].square().sum() + y["middle"].sum(), schedule
    )


def test_stage_sends_tensors_that_depend_on_weights_once():
    """The input of the next block and the turns, which a buffer changes; no mask, which is computed from integers."""
    stages = fs.pipeline.split_stages(Decoder(), 2, sample=tokens(1, 2, 0), blocks="blocks")
    assert len(stages[0](tokens(2, 3, 0)).values) == 2


class HeadOfBlock(Skipping):
    """Uses weights of a block after the blocks."""

    def forward(self, tokens):
        return {"logits": self.downs[0].weight @ super().forward(tokens)["middle"][0].mT}


def test_weights_of_a_block_used_by_another_stage_raise_with_the_line():
    batch = {"tokens": tokens(1, 3, 0)}
    first, second = fs.pipeline.split_stages(
        HeadOfBlock(), 2, sample=batch, blocks=["downs", "ups"]
    )
    with pytest.raises(
        ValueError, match=r"HeadOfBlock \(test_blocks.py:\d+\): matmul must be given values"
    ):
        second(first(batch))


def test_stage_has_only_the_weights_it_uses():
    model = Decoder()
    stages = fs.pipeline.split_stages(model, 2, sample=tokens(1, 2, 0), blocks="blocks")
    before, after = (
        {name.partition(".")[0] for name, _ in stage.named_parameters()} for stage in stages
    )
    assert before == {"words", "memory", "frozen", "unused", "scales", "between", "blocks"}
    assert after == {"words", "norm", "scales", "blocks"}  # the head is the embedding
    assert [name for name, _ in stages[1].named_buffers()] == ["blocks.2.bias", "blocks.3.bias"]
    assert stages[1].get_parameter("blocks.3.up.weight") is model.blocks[3].up.weight
    assert type(model.blocks[3]) is Block and isinstance(stages[1], Decoder)


def test_dropout_in_stages_equals_the_model():
    torch.manual_seed(0)
    model = Decoder(drop=0.5)
    x = tokens(2, 4, 0)
    apply, params, buffers = fs.functionalize(model)
    fns, own = functions(fs.pipeline.split_stages(model, 3, sample=x, blocks="blocks"))
    before = torch.get_rng_state()
    with fs.keyed_random(7):
        expected = apply(params, buffers, x)[0]
    for fn, params in zip(fns, own, strict=True):
        with fs.keyed_random(7):
            x = fn(params, x)
    assert torch.equal(x, expected) and torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(x, model.eval()(tokens(2, 4, 0)))


def test_block_stages_of_microbatches_equal_the_model():
    """Of two lengths, in stages of which each device has two."""
    torch.manual_seed(0)
    model = Decoder().double()
    batches = [
        {"tokens": tokens(2, length, 1).clamp(min=1), "targets": tokens(2, length, 2)}
        for length in (3, 5, 3)
    ]
    stages = fs.pipeline.split_stages(model, 4, sample=batches[0], blocks="blocks")
    fns, params = functions(stages)
    schedule = fs.pipeline_schedule("interleaved", stages=4, microbatches=3)
    step = fs.pipeline.pipelined(fns, schedule, lambda y, _: y, mesh=fs.make_mesh({"pipe": 2}))
    expected = gradients(model, sum(model(**batch) for batch in batches) / 3)
    for _ in range(2):
        actual = summed(step(params, batches).gradients)
        torch.testing.assert_close(actual, {name: expected.get(name) for name in actual})


@pytest.mark.filterwarnings("ignore")  # of transformers' own
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("make", hugging_face.MODELS)
def test_hugging_face_models_split_with_equal_bits(make, n):
    model = hugging_face.built(make, 0.0)
    batch = {"input_ids": hugging_face.batch_of(0), "labels": hugging_face.batch_of(1)}
    path = hugging_face.MODELS[make][0].removesuffix("[*]")
    stages = fs.pipeline.split_stages(model, n, sample=batch, blocks=path)
    check_bits(model, stages, batch, lambda y: y.loss)
    if n == 2:
        assert not any(f"{path}.1." in name for name, _ in stages[0].named_parameters())


def test_balance_counts_code_outside_the_blocks():
    model = Decoder()
    sample = tokens(1, 2, 0)

    def sizes(balance):
        before = {name: x.clone() for name, x in model.state_dict().items()}
        stages = fs.pipeline.split_stages(model, 2, balance, sample=sample, blocks="blocks")
        assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
        return [sum(type(part).__name__ == "Block" for part in stage.modules()) for stage in stages]

    assert [sizes(balance) for balance in ("uniform", "parameters", "type:block", [3, 1])] == [
        [2, 2],
        [1, 3],
        [2, 2],
        [3, 1],
    ]
    assert sum(sizes("time")) == sum(sizes("memory")) == BLOCKS


# -- what is around the blocks, and who calls them ------------------------------------------------------------------


class Layers(nn.Module):
    """Four blocks between an embedding and a head, called by `body`, which each case replaces."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.body = body

    def forward(self, x, noise=None):
        y = self.head(self.body(self, self.embed(x)))
        return y if noise is None else y - noise


def residual(model, x):
    for layer in model.layers:
        x = x * 0.5 + layer(x)
    return x


def sum_of_results(model, x):
    return sum(layer(x) for layer in model.layers)


def in_place_residual(model, x):
    total = x.clone()
    for layer in model.layers:
        total += layer(total.clone())
    return total


def embedding_for_each_block(model, x):
    time = torch.sin(x) * model.scale
    for layer in model.layers:
        x = layer(x + F.silu(time))
    return x * time


def detached_between(model, x):
    for number, layer in enumerate(model.layers):
        x = layer(x.detach() if number == 2 else x)
    return x


def detached_beside(model, x):
    for layer in model.layers:
        x = x.detach() + layer(x)
    return x


def frozen_blocks(model, x):
    y = x
    with torch.no_grad():
        for layer in model.layers:
            y = layer(y)
    return x + y


def checkpointed(model, x):
    for layer in model.layers:
        x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    return x


def backwards(model, x):
    for layer in reversed(model.layers):
        x = layer(x)
    return x


def hooked(model, x):
    for layer in model.layers:
        x = layer(x)
        if x.requires_grad:
            x.register_hook(lambda g: 2 * g)
    return x


def by_requires_grad(model, x):
    for layer in model.layers:
        x = layer(x) if x.requires_grad else 2 * layer(x)
    return x


def skip_to_two_stages(model, x):
    first = torch.cos(x)
    for number, layer in enumerate(model.layers):
        x = layer(x) + first * number
    return x + first


class Written:
    """An argument with a state, as a cache is: each block leaves its result there."""

    def __init__(self):
        self.results = []


RIGHT = [
    residual, sum_of_results, in_place_residual, embedding_for_each_block, detached_between, detached_beside,
    frozen_blocks, checkpointed, backwards, hooked, by_requires_grad, skip_to_two_stages,
]  # fmt: skip


def sample_of(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64)


def trained_in_stages(model, batch, *, n=2, blocks="layers", schedule="1f1b"):
    """Return the model's state after a step of SGD by a pipeline, or on one device if n is 1."""
    x, y = batch
    if n == 1:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        output = model(*x) if isinstance(x, tuple) else model(x)
        F.mse_loss(output, y).backward()
        optimizer.step()
        return model.state_dict()
    sample = tuple([t[:2] for t in x]) if isinstance(x, tuple) else x[:2]
    plugin = fs.HybridParallelPlugin(
        pipeline=n, microbatches=2, schedule=schedule, blocks=blocks, sample=sample
    )

    def main():
        own_model = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own_model.parameters(), lr=0.5)
        booster = fs.Booster(plugin)
        staged, optimizer, *_ = booster.boost(own_model, optimizer)
        booster.execute_pipeline(iter([batch]), staged, F.mse_loss, optimizer)
        optimizer.step()
        return staged.unwrap().state_dict()

    return fs.run(main, mesh=fs.make_mesh({"all": n}))[0]


def check_training(make, batch, **options):
    expected = trained_in_stages(make().double(), batch, n=1)
    state = trained_in_stages(make().double(), batch, **options)
    torch.testing.assert_close(state, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("body", RIGHT)
def test_code_around_blocks_trains_as_on_one_device(body):
    check_training(lambda: Layers(body), (sample_of(4), sample_of(4, 1)), n=4)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_float_input_used_after_the_blocks_trains_as_on_one_device(schedule):
    batch = (sample_of(4), sample_of(4, 2)), sample_of(4, 1)
    check_training(lambda: Layers(residual), batch, schedule=schedule)


class WithState(Layers):
    """Passes a cache to each block."""

    def __init__(self):
        super().__init__(None)
        for layer in self.layers:
            layer.forward = partial(self.call, layer)

    @staticmethod
    def call(layer, x, cache):
        cache.results.append(x)
        return nn.Sequential.forward(layer, x)

    def forward(self, x):
        x = self.embed(x)
        cache = Written()
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(x)


class Pairs(nn.Module):
    """A list of lists of blocks, and a result that nothing reads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]) for _ in range(2)
        )
        self.unread = nn.Linear(3, 3)

    def forward(self, x):
        for first, second in self.layers:
            x = x + first(x)
            self.unread(x)
            x = x + second(x).tanh()
        return x


def test_lists_of_lists_of_blocks_train_as_on_one_device():
    check_training(Pairs, (sample_of(4), sample_of(4, 1)))
    stages = fs.pipeline.split_stages(Pairs(), 4, sample=sample_of(2).float(), blocks="layers")
    assert [{name.rpartition(".")[0] for name, _ in x.named_parameters()} for x in stages] == [
        {"layers.0.0", "unread"}, {"layers.0.1"}, {"layers.1.0", "unread"}, {"layers.1.1"},
    ]  # fmt: skip


class Reversible(torch.autograd.Function):
    """Calls layers without a graph, and again in the backward."""

    @staticmethod
    def forward(ctx, x, layers):
        ctx.layers, ctx.inputs = layers, []
        for layer in layers:
            ctx.inputs.append(x.detach())
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx, g):
        for layer, x in zip(reversed(ctx.layers), reversed(ctx.inputs), strict=True):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                torch.autograd.backward(layer(x), g)
            g = x.grad
        return g, None


def in_a_function(model, x):
    return Reversible.apply(x, [*model.layers])


def in_functions(model, x):
    for layer in model.layers:
        x = Reversible.apply(x, [layer])
    return x


def in_a_reentrant_checkpoint(model, x):
    for layer in model.layers:
        x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
    return x


def in_sequence(model, x):
    for layer in model.layers:
        x = layer(x)
    return x


def in_a_checkpoint_of_all(model, x):
    return torch.utils.checkpoint.checkpoint(in_sequence, model, x, use_reentrant=False)


def in_vmap(model, x):
    for layer in model.layers:
        x = torch.func.vmap(layer)(x)
    return x


def in_jvp(model, x):
    return torch.func.jvp(partial(in_sequence, model), (x,), (torch.ones_like(x),))[1]


def in_grad(model, x):
    return torch.func.grad(lambda x: in_sequence(model, x).sum())(x)


def in_a_dual_level(model, x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(in_sequence(model, dual)).tangent


def called_twice(model, x):
    return in_sequence(model, in_sequence(model, x))


def early_exit(model, x):
    for layer in model.layers[:3]:
        x = layer(x)
    return x


def written_into_a_tensor(model, x):
    results = torch.zeros(4, *x.shape, dtype=x.dtype)
    for number, layer in enumerate(model.layers):
        x = layer(x)
        results[number] = x
    return results.mean(0)


def differentiated(model, x):
    (g,) = torch.autograd.grad(in_sequence(model, x).sum(), x, create_graph=True)
    return g


REFUSED = {
    in_a_function: r"Layers \(test_blocks.py:\d+\): .*layers.0 inside of Reversible.apply.*pipeline=1",
    in_functions: "layers.0 inside of Reversible.apply",
    in_a_reentrant_checkpoint: "inside of CheckpointFunction.apply.*use_reentrant=False",
    in_a_checkpoint_of_all: "a checkpoint must have blocks of one stage.*recompute=1",
    in_vmap: r"test_blocks.py:\d+\): .*layers.0 inside of vmap, grad",
    in_jvp: "inside of vmap, grad",
    in_grad: "inside of vmap, grad",
    in_a_dual_level: "inside of vmap, grad|Nested forward mode",  # one level for all virtual devices
    called_twice: "calls once; got the calls layers.0, layers.1, layers.2, layers.3, layers.0",
    early_exit: "calls once; got the calls layers.0, layers.1, layers.2",
    written_into_a_tensor: r"test_blocks.py:\d+\): __setitem__ must be given values; .*torch.stack",
    differentiated: r"Layers \(test_blocks.py:\d+\): grad must be given values",
}


@pytest.mark.filterwarnings("ignore")  # of torch's checkpoint and jvp
@pytest.mark.parametrize("body", REFUSED)
def test_blocks_without_gradients_raise_with_line_and_way_out(body):
    with pytest.raises(ValueError, match=REFUSED[body]):
        check_training(lambda: Layers(body), (sample_of(4), sample_of(4, 1)))


def test_blocks_that_are_skipped_later_raise():
    skips = [False]

    def dropping(model, x):
        for number, layer in enumerate(model.layers):
            x = x if skips[0] and number == 1 else layer(x)
        return x

    stages = fs.pipeline.split_stages(
        Layers(dropping), 2, sample=sample_of(2).float(), blocks="layers"
    )
    skips[0] = True
    with pytest.raises(ValueError, match=r"it calls layers.2 instead of layers.1\. .*pipeline=1"):
        stages[0](sample_of(2).float())


def test_objects_with_state_are_made_by_each_stage():
    check_training(WithState, (sample_of(4), sample_of(4, 1)))


def test_recomputed_block_refuses_objects_with_state():
    model = WithState()
    x = sample_of(2).float()
    stages = fs.pipeline.split_stages(model, 2, sample=x, blocks="layers")
    functions, params = stage_functions(stages, 1)
    with pytest.raises(ValueError, match="must be called with tensors and plain .*: Written"):
        functions[0](params[0], x)
