"""A module is cut between its blocks, whatever else its forward does, and trains as the full model.

The oracle is one backward of the full model, by bits, or a step of torch's SGD on one device.
"""

import copy
from collections import Counter
from functools import partial
from itertools import pairwise

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
    """A decoder with all kinds of code around its blocks.

    Blocks take two masks in turns, one of which depends on values. Weights are used before, between
    and after the blocks, and the head is tied to the embedding.
    """

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
        x = x + self.memory(x)[0] * self.frozen

        places = torch.arange(tokens.shape[1], device=tokens.device)
        distances = places[:, None] - places
        causal = distances >= 0
        near = None
        if masked and causal.any():
            near = causal & (distances < 2)

        turns = torch.cos(places.to(x.dtype)[:, None] * self.speeds).to(x.device)
        for index, block in enumerate(self.blocks):
            mask = near if index in (1, 2) else causal
            more = {"scale": self.scales} if block.index % 2 else {}
            (x,) = block(x, mask, turns=turns, **more)
            if index == 1:
                x = x * self.between

        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        is_used = tokens != pause
        return F.cross_entropy(logits[is_used], targets[is_used])


def tokens(rows, length, seed):
    return torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def functions(stages):
    """Return the stages as functions of parameters and an input, and their parameters."""

    def function_of(apply, buffers):
        return lambda params, x: apply(params, buffers, x)[0]

    stage_functions = []
    trees = []
    for stage in stages:
        apply, params, buffers = fs.functionalize(stage)
        stage_functions.append(function_of(apply, buffers))
        trees.append(params)
    return stage_functions, trees


def gradients(model, loss):
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    grads = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
    return dict(zip(trained, grads, strict=True))


def summed(gradients_of_stages):
    """Add the gradients of tied parameters, those of later stages first as one backward does."""
    total = {}
    for grads in reversed(gradients_of_stages):
        for name, g in grads.items():
            if total.get(name) is None:
                total[name] = g
            elif g is not None:
                total[name] = total[name] + g
    return total


def tensors_of(module):
    """Return parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def names_in_stages(model, stages):
    """Return the model's names of the tensors of each stage.

    Stages have the model's own tensors, all of them, under their names.
    """
    names = {id(x): name for name, x in tensors_of(model).items()}
    result = []
    for stage in stages:
        result.append({names[id(x)] for x in (*stage.parameters(), *stage.buffers())})
        for name, x in tensors_of(stage).items():
            assert names.get(id(x), name) == name
    assert set().union(*result) == {*names.values()}
    return result


def check_bits(model, stages, batch, loss_of, name="1f1b"):
    """Compare a pipeline of one microbatch with one backward of the model, by bits.

    Return the names of the tensors of each stage.
    """
    stage_functions, params = functions(stages)
    schedule = fs.pipeline_schedule(name, stages=len(stages), microbatches=1)
    mesh = fs.make_mesh({"pipe": schedule.devices})
    step = fs.pipeline.pipelined(
        stage_functions, schedule, lambda y, _: loss_of(y), mesh=mesh, reproducible=True
    )
    actual = step(params, [batch], weights=[1])

    with deterministic(True, "cpu"):
        loss = loss_of(model(**batch))
        expected = gradients(model, loss)
    loss = loss.detach()
    if loss.dtype != torch.float64:
        loss = loss.float()

    assert torch.equal(actual.loss, loss)
    for parameter, g in summed(actual.gradients).items():
        expected_g = expected.get(parameter)
        if expected_g is None:
            assert g is None, parameter
        else:
            assert torch.equal(g, expected_g), parameter
    return names_in_stages(model, stages)


@settings(max_examples=12, phases=NO_SHRINK)
@given(st.integers(1, BLOCKS), st.data())
def test_block_stages_of_any_split_equal_the_model_bitwise(n, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, BLOCKS - 1), min_size=n - 1, max_size=n - 1)))
    sizes = [end - begin for begin, end in pairwise([0, *cuts, BLOCKS])]
    rows = data.draw(st.integers(1, 2))
    length = data.draw(st.integers(1, 5))
    options = data.draw(st.sampled_from([{}, {"pause": 1, "masked": False}]))
    schedule = data.draw(st.sampled_from(["1f1b", "zb-h1"]))

    torch.manual_seed(0)
    model = Decoder().double()
    sample = {"tokens": tokens(1, 3, 0), "targets": tokens(1, 3, 0)}
    stages = fs.pipeline.split_stages(model, n, sizes, sample=sample, blocks="blocks")
    batch = {"tokens": tokens(rows, length, 1).clamp(min=1), "targets": tokens(rows, length, 2)}
    batch["tokens"][0, 0] = 2  # there is a word that is used
    names = check_bits(model, stages, {**batch, **options}, lambda y: y, schedule)

    counts = Counter(name for of_stage in names for name in of_stage)
    shared = {name for name, count in counts.items() if count > 1}
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
        self.downs = nn.ModuleList(Down(WIDTH, WIDTH) for _ in range(3))
        self.ups = nn.ModuleList(Up(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens):
        first = self.words(tokens)
        x = first
        skips = (x,)
        for down in self.downs:
            x, after = down(x)
            skips += after
        for index, up in enumerate(self.ups):
            x = up(x, skips[-2:])
            skips = skips[:-2]
            if index == 1:
                x = x * first
        return {"logits": self.head(x + skips[0]), "middle": after[0]}


@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_skips_between_stages_equal_the_model_bitwise(n, schedule):
    model = Skipping().double()
    batch = {"tokens": tokens(2, 3, 0)}
    stages = fs.pipeline.split_stages(model, n, sample=batch, blocks=["downs", "ups"])

    def loss_of(y):
        return y["logits"].square().sum() + y["middle"].sum()

    check_bits(model, stages, batch, loss_of, schedule)


def test_stage_sends_tensors_that_depend_on_weights_once():
    """They are the input of the next block, and the turns, which a buffer changes.

    Masks are computed from integers.
    """
    stages = fs.pipeline.split_stages(Decoder(), 2, sample=tokens(1, 2, 0), blocks="blocks")
    assert len(stages[0](tokens(2, 3, 0)).values) == 2


class HeadOfBlock(Skipping):
    """Uses weights of a block after the blocks."""

    def forward(self, tokens):
        return {"logits": self.downs[0].weight @ super().forward(tokens)["middle"][0].mT}


def test_weights_of_a_block_used_by_another_stage_raise_with_the_line():
    batch = {"tokens": tokens(1, 3, 0)}
    options = {"sample": batch, "blocks": ["downs", "ups"]}
    first, second = fs.pipeline.split_stages(HeadOfBlock(), 2, **options)

    message = r"HeadOfBlock \(test_blocks.py:\d+\): matmul must be given values"
    with pytest.raises(ValueError, match=message):
        second(first(batch))


def test_stage_has_only_the_weights_it_uses():
    model = Decoder()

    first, last = fs.pipeline.split_stages(model, 2, sample=tokens(1, 2, 0), blocks="blocks")

    def children(stage):
        return {name.partition(".")[0] for name, _ in stage.named_parameters()}

    used_before = {"words", "memory", "frozen", "scales", "between", "blocks"}
    assert children(first) == {*used_before, "unused"}
    assert children(last) == {"words", "norm", "scales", "blocks"}  # the head is the embedding
    assert [name for name, _ in last.named_buffers()] == ["blocks.2.bias", "blocks.3.bias"]
    assert last.get_parameter("blocks.3.up.weight") is model.blocks[3].up.weight
    assert type(model.blocks[3]) is Block
    assert isinstance(last, Decoder)


def test_dropout_in_stages_equals_the_model():
    torch.manual_seed(0)
    model = Decoder(drop=0.5)
    ids = tokens(2, 4, 0)
    apply, params, buffers = fs.functionalize(model)
    stages = fs.pipeline.split_stages(model, 3, sample=ids, blocks="blocks")
    stage_functions, trees = functions(stages)
    before = torch.get_rng_state()

    x = ids
    for stage, tree in zip(stage_functions, trees, strict=True):
        with fs.keyed_random(7):
            x = stage(tree, x)

    with fs.keyed_random(7):
        expected, _ = apply(params, buffers, ids)
    assert torch.equal(x, expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(x, model.eval()(ids))


def test_block_stages_of_microbatches_equal_the_model():
    """Microbatches have two lengths, and each device has two stages."""
    torch.manual_seed(0)
    model = Decoder().double()
    batches = []
    for length in (3, 5, 3):
        ids = tokens(2, length, 1).clamp(min=1)
        batches.append({"tokens": ids, "targets": tokens(2, length, 2)})
    stages = fs.pipeline.split_stages(model, 4, sample=batches[0], blocks="blocks")
    stage_functions, params = functions(stages)
    schedule = fs.pipeline_schedule("interleaved", stages=4, microbatches=3)
    mesh = fs.make_mesh({"pipe": 2})
    step = fs.pipeline.pipelined(stage_functions, schedule, lambda y, _: y, mesh=mesh)

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
    before = {name: x.clone() for name, x in model.state_dict().items()}

    def sizes(balance):
        """Return the number of blocks of each stage; measuring does not change the model."""
        stages = fs.pipeline.split_stages(model, 2, balance, sample=sample, blocks="blocks")
        for name, x in model.state_dict().items():
            assert torch.equal(before[name], x)
        counts = []
        for stage in stages:
            counts.append(sum(type(module).__name__ == "Block" for module in stage.modules()))
        return counts

    assert sizes("uniform") == [2, 2]
    assert sizes("parameters") == [1, 3]
    assert sizes("type:block") == [2, 2]
    assert sizes([3, 1]) == [3, 1]
    assert sum(sizes("time")) == BLOCKS
    assert sum(sizes("memory")) == BLOCKS


# -- what is around the blocks, and who calls them -------------------------------------------------


class Layers(nn.Module):
    """Four blocks between an embedding and a head, called by `body`, which each case replaces."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        self.layers = nn.ModuleList(blocks)
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
    residual,
    sum_of_results,
    in_place_residual,
    embedding_for_each_block,
    detached_between,
    detached_beside,
    frozen_blocks,
    checkpointed,
    backwards,
    hooked,
    by_requires_grad,
    skip_to_two_stages,
]


def sample_of(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64)


def trained_on_one_device(model, batch):
    """Return the model's state after a step of SGD."""
    x, y = batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    output = model(*x) if isinstance(x, tuple) else model(x)
    F.mse_loss(output, y).backward()
    optimizer.step()
    return model.state_dict()


def trained_in_stages(model, batch, *, n=2, blocks="layers", schedule="1f1b"):
    """Return the model's state after a step of SGD by a pipeline."""
    x, _ = batch
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
    expected = trained_on_one_device(make().double(), batch)
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
        first = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        second = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.layers = nn.ModuleList([first, second])
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
    layers = []
    for stage in stages:
        layers.append({name.rpartition(".")[0] for name, _ in stage.named_parameters()})
    assert layers == [
        {"layers.0.0", "unread"},
        {"layers.0.1"},
        {"layers.1.0", "unread"},
        {"layers.1.1"},
    ]


class Reversible(torch.autograd.Function):
    """Calls layers without a graph, and again in the backward."""

    @staticmethod
    def forward(ctx, x, layers):
        ctx.layers = layers
        ctx.inputs = []
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


LINE = r"test_blocks.py:\d+\)"
REFUSED = {
    in_a_function: rf"Layers \({LINE}: .*layers.0 inside of Reversible.apply.*pipeline=1",
    in_functions: "layers.0 inside of Reversible.apply",
    in_a_reentrant_checkpoint: "inside of CheckpointFunction.apply.*use_reentrant=False",
    in_a_checkpoint_of_all: "a checkpoint must have blocks of one stage.*recompute=1",
    in_vmap: rf"{LINE}: .*layers.0 inside of vmap, grad",
    in_jvp: "inside of vmap, grad",
    in_grad: "inside of vmap, grad",
    in_a_dual_level: "inside of vmap, grad|Nested forward mode",  # one level for all virtual devices
    called_twice: "calls once; got the calls layers.0, layers.1, layers.2, layers.3, layers.0",
    early_exit: "calls once; got the calls layers.0, layers.1, layers.2",
    written_into_a_tensor: rf"{LINE}: __setitem__ must be given values; .*torch.stack",
    differentiated: rf"Layers \({LINE}: grad must be given values",
}


@pytest.mark.filterwarnings("ignore")  # of torch's checkpoint and jvp
@pytest.mark.parametrize("body", REFUSED)
def test_blocks_without_gradients_raise_with_line_and_way_out(body):
    with pytest.raises(ValueError, match=REFUSED[body]):
        check_training(lambda: Layers(body), (sample_of(4), sample_of(4, 1)))


def test_blocks_that_are_skipped_later_raise():
    skipped = set()

    def dropping(model, x):
        for number, layer in enumerate(model.layers):
            if number not in skipped:
                x = layer(x)
        return x

    sample = sample_of(2).float()
    stages = fs.pipeline.split_stages(Layers(dropping), 2, sample=sample, blocks="layers")
    skipped.add(1)

    with pytest.raises(ValueError, match=r"it calls layers.2 instead of layers.1\. .*pipeline=1"):
        stages[0](sample)


def test_objects_with_state_are_made_by_each_stage():
    check_training(WithState, (sample_of(4), sample_of(4, 1)))


def test_recomputed_block_refuses_objects_with_state():
    model = WithState()
    x = sample_of(2).float()
    stages = fs.pipeline.split_stages(model, 2, sample=x, blocks="layers")
    functions, params = stage_functions(stages, 1)
    with pytest.raises(ValueError, match="must be called with tensors and plain .*: Written"):
        functions[0](params[0], x)
