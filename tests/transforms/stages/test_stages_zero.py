"""Training in stages beside data parallelism equals `train_step` on the full model.

The oracle is the same model without stages (`serial`): equal losses, gradients and metrics, and in
reproducible mode equal bits. Memory and bytes are compared with the theory of ZeRO.
"""

import os
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

import fshard as fs
from fshard import P
from fshard.pipeline.schedule.builders import BUILDERS
from tests.helpers.processes import not_under_rules, run_processes
from tests.helpers.sampled import examples
from tests.transforms.stages.head import Head

# -- a model: a small GPT as layers, with dropout and tied embeddings ------------------------------

WORDS, WIDTH, LENGTH = 13, 6, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH), nn.Dropout(0.1)
        )
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=self.mask, need_weights=False)[0]
        return x + self.mlp(x)


def with_tied_head(make_layer, blocks, seed=0):
    """Return layers between an embedding and a head that shares its weight."""
    torch.manual_seed(seed)
    embedding = nn.Embedding(WORDS, WIDTH)
    layers = [make_layer() for _ in range(blocks)]
    return nn.Sequential(embedding, *layers, Head(embedding.weight))


def gpt(blocks, seed=0):
    return with_tied_head(Block, blocks, seed)


def tokens(size, seed=1):
    """Draw a batch: words, and the words that follow them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, WORDS, (size, LENGTH + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def entropy(y, batch):
    return F.cross_entropy(y.flatten(0, 1), batch[1].flatten())


def of_words(y, batch):
    """Return the mean over the words that are not 0, and metrics.

    Metrics are a mean, a count and rows of samples.
    """
    losses = F.cross_entropy(y.transpose(1, 2), batch[1], reduction="none", ignore_index=0)
    best = y.argmax(-1)
    metrics = {
        "sure": y.softmax(-1).amax(-1).mean(),
        "right": (best == batch[1]).sum(),
        "best": best,
        "last": y[:, -1],
    }
    return losses.sum() / words(batch), metrics


AUX = {"sure": "mean", "right": "sum", "best": "rows", "last": "rows"}


def words(batch):
    return (batch[1] != 0).sum()


class Convolution(nn.Module):
    """A product of weights, a convolution with groups, and a frozen parameter."""

    def __init__(self, number):
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(2))
        self.mixed = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=1 + number % 2)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1, WIDTH), requires_grad=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        dropped = self.drop(x @ (self.left @ self.right))
        x = x + dropped.tanh() * self.frozen
        return x + F.gelu(self.mixed(x.mT)).mT


class Recurrent(nn.Module):
    """A recurrent layer, whose weights are used once for each word."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)
        self.recurrence = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        states, _ = self.recurrence(self.norm(x.mT).mT)
        return x + states


class OfExperts(nn.Module):
    """A layer of experts, without a norm: in float16 some gradients overflow."""

    def __init__(self):
        super().__init__()
        self.experts = fs.nn.MoE(WIDTH, 9, experts=3, top_k=2, shared=4)

    def forward(self, x):
        return x + self.experts(x)


def convolutional(blocks, seed=0):
    torch.manual_seed(seed)
    layers = [Convolution(number) for number in range(blocks)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))


MODELS = {
    "gpt": gpt,
    "convolutional": convolutional,
    "recurrent": partial(with_tied_head, Recurrent),
    "mixture of experts": partial(with_tied_head, OfExperts),
}


# -- training --------------------------------------------------------------------------------------


def optimizer(opt, mesh, zero):
    if zero is None:
        return opt
    return fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=zero)


def rules_of(zero):
    """Return the layout of parameters between steps."""
    return fs.fsdp("data") if zero == 3 else P()


class Trained(NamedTuple):
    """Parameters and buffers by their names in the model, and the metrics of each step as lists."""

    params: dict[str, torch.Tensor]
    metrics: list[list[torch.Tensor]]
    buffers: dict[str, torch.Tensor]


def serial(model, batches, opt, data, zero=None, loss=entropy, has_buffers=False, **options):
    """Train the full model, without stages."""
    mesh = fs.make_mesh({"data": data}, runtime="virtual")
    apply, params, buffers = fs.functionalize(model)
    params = fs.shard_params(params, rules_of(zero), mesh=mesh)
    opt = optimizer(opt, mesh, zero)

    def loss_with_buffers(params, buffers, batch):
        y, buffers = apply(params, buffers, batch[0])
        return loss(y, batch), buffers

    def loss_alone(params, batch):
        y, _ = apply(params, buffers, batch[0])
        return loss(y, batch)

    options |= {"mesh": mesh, "batch": P("data"), "has_buffers": has_buffers}
    if has_buffers:
        step = fs.train_step(loss_with_buffers, opt, **options)
        return trained(step, params, opt, batches, buffers)
    return trained(fs.train_step(loss_alone, opt, **options), params, opt, batches)


def in_stages(
    model, batches, opt, data, schedule, zero=None, loss=entropy, make=fs.train_step, **options
):
    """Train the model in stages; return what `serial` does."""
    mesh = fs.make_mesh({"pipe": schedule.devices, "data": data})
    stages = fs.pipeline.split_stages(model, schedule.stages, "uniform")
    params = fs.shard_stages(stages, rules_of(zero), mesh=mesh, schedule=schedule)
    opt = optimizer(opt, mesh, zero)
    buffers = None
    if options.get("has_buffers"):
        buffer_trees = [dict(stage.named_buffers()) for stage in stages]
        buffers = fs.shard_stages(buffer_trees, mesh=mesh, schedule=schedule)

    step = make(stages, opt, mesh=mesh, batch=P("data"), schedule=schedule, loss=loss, **options)
    results = trained(step, params, opt, batches, buffers)

    params = merged(results.params)
    assert_ties_are_equal(params, model)
    by_name = {name: params[name] for name, _ in model.named_parameters()}
    return Trained(by_name, results.metrics, merged(results.buffers))


def merged(trees):
    """Return one tree of the trees of all stages."""
    result = {}
    for tree in trees:
        result |= tree
    return result


def assert_ties_are_equal(params, model):
    """Assert that names of one parameter have one value, and that no parameter is missing."""
    full = dict(model.named_parameters(remove_duplicate=False))
    first_names = {id(x): name for name, x in reversed(full.items())}
    assert {first_names[id(full[name])] for name in params} == {*first_names.values()}
    for name, x in params.items():
        assert torch.equal(x, params[first_names[id(full[name])]])


def by_hand(stages, opt, *, precision=None, donate=False, aux=None, **options):
    """Return a step of a gradient and an update.

    Its only metrics are the loss and the auxiliary values.
    """
    if precision is not None:
        options["compute"] = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        options["reduce"] = {"bf16": None, "fp16": torch.float32}[precision]
    options["gradients"] = getattr(opt, "gradients", None)
    gradient = fs.value_and_grad(stages, aux=aux, **options)

    def step(params, state, batch):
        scale = None if opt.loss_scale is None else opt.loss_scale(state)
        metrics, grads = gradient(params, batch, scale=scale)
        updates, state = opt.update(grads, state, params)
        return fs.optim.apply_updates(params, updates), state, metrics

    return step


def at_once(stages, opt, **options):
    """Return `fs.train_step`, with the metrics that `by_hand` has."""
    full = fs.train_step(stages, opt, **options)

    def step(*arguments):
        params, state, metrics = full(*arguments)
        if "aux" in metrics:
            return params, state, (metrics["loss"], metrics["aux"])
        return params, state, metrics["loss"]

    return step


def trained(step, params, opt, batches, buffers=None):
    torch.manual_seed(7)
    state = opt.init(params)
    metrics_of_steps = []
    for batch in batches:
        if buffers is None:
            params, state, metrics = step(params, state, batch)
        else:
            params, state, buffers, metrics = step(params, state, buffers, batch)
        metrics_of_steps.append(tree_leaves(fs.unshard(metrics)))
    return Trained(fs.unshard(params), metrics_of_steps, fs.unshard(buffers or {}))


def assert_same(actual, expected, tolerance=0.0, **options):
    limits = {"rtol": tolerance, "atol": tolerance / 10}
    torch.testing.assert_close(actual, expected, **limits, **options)


# -- equal bits ------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": fs.optim.sgd(0.1, momentum=0.9),
    "adamw": fs.optim.adamw(0.01),
    "clipped": fs.optim.chain(fs.optim.clip_by_global_norm(0.1), fs.optim.adam(0.01)),
    "scaled": fs.optim.loss_scaled(fs.optim.adam(0.01, eps=1e-4), initial=2.0**14),  # fp16
    "careful": fs.optim.skip_if_not_finite(fs.optim.sgd(0.1)),
    "muon": fs.optim.by_label(
        {True: fs.optim.muon(0.01), False: fs.optim.adam(0.01)},
        lambda path, x: x.ndim == 2,
    ),
}
WITH_AUX = {"loss": of_words, "weight": words, "aux": AUX}
OPTIONS = [{}, {"precision": "bf16"}, {"donate": True}, WITH_AUX]


class Drawn:
    """A model, its layout, schedule, optimizer and options, all of which are drawn."""

    def __init__(self, choose):
        self.data = choose((1, 2, 3, 4))
        self.zero = choose((None, 0, 1, 2, 3))
        name = choose(sorted(BUILDERS))
        stages = choose((1, 2, 3))
        if name not in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
            stages *= 2  # the others have two stages a device

        # Microbatches are the branches of a fixed tree: with other devices a power of two.
        self.microbatches = choose([1, 2, 3, 4, 6] if self.data == 1 else [1, 2, 4])
        self.schedule = fs.pipeline_schedule(name, stages=stages, microbatches=self.microbatches)

        self.model = choose(sorted(MODELS))
        self.blocks = max(stages - 2, choose([0, 1, 2, 3]))
        self.size = choose([1, 5, 8, 12, 13])
        self.opt = choose(sorted(OPTIMIZERS))
        self.options = choose(OPTIONS)
        if self.opt == "scaled":
            self.options = {"precision": "fp16"}
        self.recompute = choose(["never", "never", "always", "except_last", 1])

    def __repr__(self):
        return f"Drawn({self.__dict__})"

    def drawn_model(self):
        return MODELS[self.model](self.blocks)

    def batches(self):
        return [tokens(self.size, seed) for seed in (1, 2)]

    def staged(self, model, opt, **options):
        return in_stages(
            model,
            self.batches(),
            opt,
            self.data,
            self.schedule,
            self.zero,
            recompute=self.recompute,
            **options,
        )

    def check_bits(self):
        """Compare stages with one device that computes the same slices in turn."""
        model = self.drawn_model().train()
        opt = OPTIMIZERS[self.opt]
        options = {**self.options, "reproducible": True}
        slices = self.microbatches * self.data

        expected = serial(model, self.batches(), opt, 1, self.zero, slices=slices, **options)
        actual = self.staged(model, opt, **options)

        assert_same(actual.params, expected.params)
        assert_same(actual.buffers, expected.buffers)
        # In float16 gradients may overflow, as torch's do. The step is skipped, its norm may be
        # NaN.
        may_overflow = self.opt == "scaled"
        assert_same(actual.metrics, expected.metrics, equal_nan=may_overflow)

    def check_closeness(self):
        """Compare stages with as many devices along data; random draws are not the same there."""
        model = self.drawn_model().eval()
        opt = OPTIMIZERS["sgd"]
        options = {name: x for name, x in self.options.items() if name != "precision"}
        accumulate = self.microbatches

        expected = serial(
            model, self.batches(), opt, self.data, self.zero, accumulate=accumulate, **options
        )
        actual = self.staged(model, opt, **options)

        assert_same(actual, expected, 1e-4)

    def check_pieces(self):
        """Compare a gradient and an update with the step."""
        model = self.drawn_model()
        opt = OPTIMIZERS[self.opt]
        options = {**self.options, "reproducible": True}

        actual = self.staged(model, opt, make=by_hand, **options)
        expected = self.staged(model, opt, make=at_once, **options)

        assert_same(actual, expected)


@settings(max_examples=examples(4))
@given(st.randoms(use_true_random=False))
def test_staged_training_has_bits_of_the_full_model(source):
    Drawn(source.choice).check_bits()


@settings(max_examples=examples(6))
@given(st.randoms(use_true_random=False))
def test_staged_training_equals_the_full_model(source):
    Drawn(source.choice).check_closeness()


@settings(max_examples=examples(4))
@given(st.randoms(use_true_random=False))
def test_staged_gradient_and_update_equal_the_step(source):
    Drawn(source.choice).check_pieces()


def gradient_in_stages(stages, trees, batch, schedule, *, data=1, zero=0, **options):
    """Return the unsharded gradients of stages whose loss is the mean of the last result."""
    mesh = fs.make_mesh({"pipe": schedule.devices, "data": data})
    params = fs.shard_stages(trees, rules_of(zero), mesh=mesh, schedule=schedule)
    gradient = fs.value_and_grad(
        stages,
        mesh=mesh,
        batch=P("data"),
        schedule=schedule,
        loss=lambda y, _: y.mean(),
        inputs=lambda batch: batch,
        **options,
    )
    _, grads = gradient(params, batch)
    return fs.unshard(grads)


def test_tied_weights_of_16_bits_are_summed_in_32_bits():
    """In each stage one microbatch has a gradient of 256, and 15 have 1: in 16 bits, 256 + 1 is
    256.
    """
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=16)
    w = torch.ones((), dtype=torch.bfloat16)
    x = torch.ones(16, 1, dtype=torch.bfloat16)
    x[0] = 256
    stages = [lambda w, x: (x * w, x), lambda w, pair: pair[0] + pair[1] * w]

    first, second = gradient_in_stages(stages, [w, w], 16 * x, schedule)

    expected = torch.tensor(2 * (256.0 + 15)).bfloat16()
    assert first.item() == expected.item()
    assert second.item() == expected.item()


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "v-min"])
@pytest.mark.parametrize("live_units", [1, 2])
def test_late_weight_gradients_wait_for_their_all_gather(name, live_units):
    """The gradient of a product of weights needs both when W runs, after the units were freed."""
    stages = 2 if name == "zb-h1" else 4
    schedule = fs.pipeline_schedule(name, stages=stages, microbatches=4)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def stage(w, x):
        return x @ (w["a"] @ w["b"])

    trees = [{"a": drawn(6, 3), "b": drawn(3, 6)} for _ in range(stages)]
    x = drawn(8, 6)

    options = {"data": 2, "zero": 3, "live_units": live_units}
    gradients = gradient_in_stages([stage] * stages, trees, x, schedule, **options)

    leaves = []
    y = x
    for tree in trees:
        leaves.append({key: w.clone().requires_grad_() for key, w in tree.items()})
        y = stage(leaves[-1], y)
    y.mean().backward()
    expected = [{key: w.grad for key, w in tree.items()} for tree in leaves]
    torch.testing.assert_close(gradients, expected)


# -- what is held and sent -------------------------------------------------------------------------


def linear(w, x):
    return x @ w["w"] + w["b"]


def mean_square(y, batch):
    return y.square().mean()


def weights(stages, width=6):
    draw = torch.Generator().manual_seed(0)
    trees = []
    for _ in range(stages):
        w = torch.randn(width, width, generator=draw) / 2
        b = torch.randn(width, generator=draw)
        trees.append({"w": w, "b": b})
    return trees


def chunk(size, devices):
    """Return the numbers of a full shard of flattened leaves: the last ones may be shorter."""
    return -(-size // devices)


def shard_size(size, devices, index):
    """Return the numbers of a shard of a flattened leaf."""
    start = index * chunk(size, devices)
    return max(min(chunk(size, devices), size - start), 0)


def numbers_on(device, trees):
    return sum(x.shards[device].numel() for tree in trees for x in tree.values())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("name", "gathers"), [("1f1b", [1, 1]), ("bfs", [2, 2, 1, 1])])
def test_staged_memory_and_bytes_equal_theory(name, gathers, zero):
    """Of each stage a device stores 1/D, gathers the rest at each use anew, and sends its sums.

    `gathers` has the number of uses of each stage, such that it was freed before.
    """
    data = 4
    stages = len(gathers)
    schedule = fs.pipeline_schedule(name, stages=stages, microbatches=3)
    mesh = fs.make_mesh({"pipe": 2, "data": data})
    params = fs.shard_stages(weights(stages), rules_of(zero), mesh=mesh, schedule=schedule)
    opt = optimizer(fs.optim.adam(0.1), mesh, zero)
    state = opt.init(params)
    unsharded = []

    def watched(w, x):
        unsharded.append(w["w"])
        return linear(w, x)

    step = fs.train_step(
        [watched] * stages,
        opt,
        mesh=mesh,
        batch=P("data"),
        schedule=schedule,
        loss=mean_square,
        live_units=1,
    )
    batch = torch.ones(12 * data, 6)
    step(params, state, batch)  # shapes of messages are sent in the first step only
    with fs.ledger() as comm:
        params, state, _ = step(params, state, batch)

    sizes = [36, 6]  # of w and b
    full = sum(sizes)
    received = sum(chunk(size, data) for size in sizes) * (data - 1)
    for device in range(mesh.size):
        coordinates = mesh.coordinates(device)
        sharded = sum(shard_size(size, data, coordinates["data"]) for size in sizes)
        own = [stage for stage in range(stages) if schedule.placement[stage] == coordinates["pipe"]]
        count = len(own)

        # Memory
        assert numbers_on(device, params) == count * (sharded if zero == 3 else full)
        assert numbers_on(device, state["exp_avg"]) == count * (sharded if zero else full)

        # Communication, in numbers
        all_gathers = {0: 0, 1: count, 2: count, 3: sum(gathers[stage] for stage in own)}[zero]
        reduce_scatters = count if zero else 0
        assert comm.bytes(device, collective="all_gather") / 4 == all_gathers * received
        assert comm.bytes(device, collective="psum_scatter") / 4 == reduce_scatters * received
        if zero == 0:
            all_reduced = comm.bytes(device, collective="psum") / 4
            assert all_reduced > count * 2 * (data - 1) * full / data

    # In stage 3 unsharded parameters are freed in the end.
    is_stored = [x.untyped_storage().nbytes() > 0 for x in unsharded]
    assert is_stored == [zero != 3] * len(unsharded)


def test_live_units_bound_unsharded_stages():
    schedule = fs.pipeline_schedule("interleaved", stages=6, devices=2, microbatches=4)
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    params = fs.shard_stages(weights(6), fs.fsdp("data"), mesh=mesh, schedule=schedule)
    opt = fs.partition_optimizer(fs.optim.sgd(0.1), mesh=mesh, axis="data", stage=3)

    def most_unsharded(live_units):
        """Return the largest number of unsharded weights at a loss."""
        unsharded = []
        most = 0

        def watched(w, x):
            unsharded.append(w["w"])
            return linear(w, x)

        def loss(y, batch):
            nonlocal most
            stored = {x.data_ptr() for x in unsharded if x.untyped_storage().nbytes()}
            most = max(most, len(stored))
            return y.square().mean()

        options = {"mesh": mesh, "batch": P("data"), "schedule": schedule, "loss": loss}
        step = fs.train_step([watched] * 6, opt, **options, live_units=live_units)
        step(params, opt.init(params), torch.ones(16, 6))
        return most

    most = {live_units: most_unsharded(live_units) for live_units in (1, 2, 3)}

    assert most[1] <= 4
    assert most[1] < most[3]


@pytest.mark.parametrize("axes", [{}, {"data": 2}])
def test_replicated_batch_splits_into_microbatches(axes):
    """On a mesh that has nothing but the pipeline, for example."""
    model = gpt(3).eval()
    batch = tokens(7)
    schedule = fs.pipeline_schedule("zb-h1", stages=3, microbatches=2)
    mesh = fs.make_mesh({"pipe": 3, **axes})
    stages = fs.pipeline.split_stages(model, 3)
    rules = P.flat(*axes) if axes else None
    params = fs.shard_stages(stages, rules, mesh=mesh, schedule=schedule)
    opt = fs.optim.sgd(1.0)

    step = fs.train_step(stages, opt, mesh=mesh, batch=P(), schedule=schedule, loss=entropy)
    after, _, metrics = step(params, opt.init(params), batch)

    loss = entropy(model(batch[0]), batch)
    loss.backward()
    torch.testing.assert_close(metrics["loss"], loss.detach())
    assert metrics["samples"] == 7
    actual = merged(fs.unshard(after))
    for name, x in model.named_parameters():
        torch.testing.assert_close(actual[name], x.detach() - x.grad, rtol=1e-5, atol=1e-6)


def test_nonfinite_step_is_skipped_by_all_stages():
    model = gpt(2)
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)

    def infinite_if_first_word_is_0(y, batch):
        factor = torch.where(batch[1][0, 0] == 0, torch.inf, 0.0)
        return entropy(y, batch) + factor * y.sum()

    batches = [tokens(4, seed) for seed in range(3)]
    batches[0][1][:, 0] = 1
    batches[1][1][0, 0] = 0
    batches[2][1][:, 0] = 1
    sgd = fs.optim.sgd(0.1)
    for opt in (fs.optim.skip_if_not_finite(sgd), fs.optim.loss_scaled(sgd)):
        options = {"loss": infinite_if_first_word_is_0, "reproducible": True}
        expected = serial(model, batches, opt, 2, zero=3, slices=4, **options)
        actual = in_stages(model, batches, opt, 2, schedule, zero=3, **options)

        is_finite = [bool(metrics[2]) for metrics in actual.metrics]
        assert is_finite == [True, False, True]
        assert_same(actual.params, expected.params)


@pytest.mark.parametrize("reproducible", [False, True])
def test_microbatch_of_weight_zero_adds_nothing(reproducible):
    model = gpt(2).train(reproducible)
    schedule = fs.pipeline_schedule("zb-h1", stages=2, microbatches=4)
    batch = tokens(4)
    batch[1][1:3] = 0

    def mean_over_words(y, batch):
        """Return the mean over the words that are not 0.

        If there are none, the mean and its gradient are NaN.
        """
        losses = F.cross_entropy(y.transpose(1, 2), batch[1], reduction="none")
        return (losses * (batch[1] != 0)).sum() / words(batch)

    options = {"loss": mean_over_words, "weight": words, "reproducible": reproducible}
    slices = {"slices": 4} if reproducible else {"accumulate": 4}
    expected = serial(model, [batch], fs.optim.sgd(0.1), 1, **slices, **options)
    actual = in_stages(model, [batch], fs.optim.sgd(0.1), 1, schedule, **options)

    assert_same(actual, expected, 0.0 if reproducible else 1e-4)
    is_finite = expected.metrics[0][2]
    assert is_finite


# -- other forms -----------------------------------------------------------------------------------


def test_function_stages_accept_skips_and_any_batch():
    mesh = fs.make_mesh({"pipe": 3, "data": 2})
    schedule = fs.pipeline_schedule("gpipe", stages=3, microbatches=2)

    def first(w, x):
        return x["x"] * w, {"far": {"x": x["x"], "n": x["n"]}}

    def middle(w, y):
        return y

    def last(w, y, far):
        return y * w + far["x"] * far["n"][:, None]

    trees = [torch.tensor(2.0), None, torch.tensor(3.0)]
    params = fs.shard_stages(trees, mesh=mesh, schedule=schedule)
    opt = fs.optim.sgd(0.1)
    step = fs.train_step(
        [first, middle, last],
        opt,
        mesh=mesh,
        batch={"in": P("data"), "goal": P("data"), "scale": P()},
        schedule=schedule,
        loss=lambda y, batch: (y - batch["goal"]).mean() * batch["scale"],
        inputs=lambda batch: batch["in"],
        skips={"far": (0, 2)},
        frozen="[2]",
    )
    x = torch.arange(10.0).view(5, 2)
    n = torch.arange(5)
    batch = {"in": {"x": x, "n": n}, "goal": torch.ones(5, 2), "scale": torch.tensor(2.0)}

    after, _, metrics = step(params, opt.init(params), batch)

    # y = x * 2 * 3 + x * n, so that the gradient of the first weight is 2 * mean(3 x).
    loss = 2 * (6 * x + x * n[:, None] - 1).mean()
    torch.testing.assert_close(metrics["loss"], loss)
    torch.testing.assert_close(fs.unshard(after[0]), 2 - 0.1 * 2 * 3 * x.mean())
    assert after[1] is None
    assert fs.unshard(after[2]) == 3.0


def test_unused_stage_parameters_stay_unchanged():
    """Weight decay does not change a parameter without a gradient."""
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    first = {"w": torch.tensor(2.0), "idle": torch.ones(3), "n": torch.tensor(4)}
    last = {"w": torch.tensor(3.0)}
    params = fs.shard_stages([first, last], fs.fsdp("data"), mesh=mesh, schedule=schedule)
    adamw = fs.optim.adamw(0.1, weight_decay=0.5)
    opt = fs.partition_optimizer(adamw, mesh=mesh, axis="data", stage=3)
    stages = [lambda w, x: x * w["w"] * w["n"], lambda w, x: x * w["w"]]
    options = {"mesh": mesh, "batch": P("data"), "schedule": schedule, "loss": mean_square}
    step = fs.train_step(stages, opt, **options)

    after, _, _ = step(params, opt.init(params), torch.ones(4, 1))

    assert torch.equal(fs.unshard(after[0]["idle"]), torch.ones(3))
    assert fs.unshard(after[0]["n"]) == 4
    assert fs.unshard(after[0]["w"]) < 2.0


def normalised(seed=0):
    torch.manual_seed(seed)
    layers = [
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.Tanh(),
        nn.Linear(6, 6),
        nn.BatchNorm1d(6, momentum=None),
    ]
    return nn.Sequential(*layers).double()


def images(samples, seed):
    """Draw a batch for `normalised`: a tuple of one tensor."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(samples, 4, dtype=torch.float64, generator=draw),)


@pytest.mark.parametrize("recompute", ["never", "always", 1])
def test_stage_buffers_are_means_over_microbatches(recompute):
    """In reproducible mode, they have the bits of a run without stages."""
    model = normalised()
    schedule = fs.pipeline_schedule("zbv", stages=4, microbatches=2)
    batches = [images(12, 1), images(12, 2)]
    sgd = fs.optim.sgd(0.1)
    options = {"loss": mean_square, "has_buffers": True, "reproducible": True}

    expected = serial(model, batches, sgd, 2, slices=4, **options)
    options |= {"recompute": recompute, "inputs": lambda batch: batch[0]}
    actual = in_stages(model, batches, sgd, 2, schedule, **options)

    assert_same(actual.params, expected.params)
    assert_same(actual.buffers, expected.buffers)


def running_statistics(data, microbatches, momentum=0.1, sync=None, samples=12):
    """Train two steps in stages, of which the first is a BatchNorm.

    Return its buffers, and those of torch's layer on full batches.
    """
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=microbatches)
    mesh = fs.make_mesh({"pipe": 2, "data": data})
    layer = nn.BatchNorm2d(3, momentum=momentum).double()
    apply, params, buffers = fs.functionalize(layer, sync_batchnorm=sync)

    def normalise(params, buffers, x):
        return apply(params, buffers, x)

    def identity(params, buffers, x):
        return x, buffers

    params = fs.shard_stages([params, {}], mesh=mesh, schedule=schedule)
    buffers = fs.shard_stages([buffers, {}], mesh=mesh, schedule=schedule)
    opt = fs.optim.sgd(0.1)
    step = fs.train_step(
        [normalise, identity],
        opt,
        mesh=mesh,
        batch=P("data"),
        schedule=schedule,
        loss=mean_square,
        has_buffers=True,
    )
    state = opt.init(params)
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        x = torch.randn(samples, 3, 2, 2, dtype=torch.float64, generator=draw)
        x += 10 * torch.arange(samples)[:, None, None, None]  # samples have unlike means
        layer(x)
        params, state, buffers, _ = step(params, state, buffers, x)
    return fs.unshard(buffers[0]), dict(layer.named_buffers())


@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"sync": "data"}, {"samples": 7, "sync": "data"}], ids=str
)
def test_stage_batchnorm_has_running_statistics_of_the_batch(options):
    for data, microbatches in [(1, 1), (1, 4), (2, 2)]:
        actual, expected = running_statistics(data, microbatches, **options)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("zero", [0, 3])
def test_evaluate_runs_stages_forward_only(zero):
    model = gpt(3).eval()
    batch = tokens(7)
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule("zbv", stages=4, microbatches=2)
    stages = fs.pipeline.split_stages(model, 4)
    params = fs.shard_stages(stages, rules_of(zero), mesh=mesh, schedule=schedule)
    evaluate = fs.evaluate(stages, mesh=mesh, batch=P("data"), schedule=schedule, **WITH_AUX)

    with fs.ledger() as comm, torch.inference_mode():
        loss, aux = evaluate(params, batch)

    expected, metrics = of_words(model(batch[0]), batch)
    torch.testing.assert_close(loss, expected.detach())
    assert torch.equal(fs.unshard(aux["best"]), metrics["best"])
    assert aux["right"] == metrics["right"]
    assert comm.bytes(collective="psum_scatter") == 0


def lazily(count, built=None):
    """Return stages of one lazy layer each; `built` gets an element for each layer with values."""

    def layer():
        has_values = torch.empty(()).device.type != "meta"
        if built is not None and has_values:
            built.append(1)
        return nn.Linear(6, 6)

    return fs.pipeline.split_stages([fs.lazy(layer) for _ in range(count)], count)


def of_lazy_layers():
    """Return the unsharded parameters, and the number of layers that were built here."""
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule("interleaved", stages=4, devices=2, microbatches=1)
    built = []
    stages = lazily(4, built)
    params = fs.shard_stages(stages, fs.fsdp("data"), mesh=mesh, schedule=schedule, seed=3)
    count = len(built)
    full = fs.unshard(params)

    opt = fs.optim.sgd(0.1)
    options = {"mesh": mesh, "batch": P("data"), "schedule": schedule, "loss": mean_square}
    step = fs.train_step(stages, opt, **options)
    step(params, opt.init(params), torch.ones(4, 6))
    return full, count


def test_lazy_layers_are_built_on_their_stage_only(four):
    expected = [dict(fs.nn.materialize(stage, seed=3).named_parameters()) for stage in lazily(4)]

    virtual = of_lazy_layers()
    of_processes = four.run(of_lazy_layers)

    for full, _ in (virtual, *of_processes):
        for tree, expected_tree in zip(full, expected, strict=True):
            for name, x in expected_tree.items():
                assert torch.equal(tree[name], x)
    assert virtual[1] == 4
    assert [count for _, count in of_processes] == [2] * 4


# -- a process that fails --------------------------------------------------------------------------


def fail_and_go_on(failing_rank):
    """One process fails in its stage, and takes another step; return the errors of this process."""
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=4)
    calls = []

    def failing(w, x):
        calls.append(1)
        if len(calls) == 3 and int(os.environ["RANK"]) == failing_rank:
            raise KeyError("mine")
        return linear(w, x)

    params = fs.shard_stages(weights(2), fs.fsdp("data"), mesh=mesh, schedule=schedule)
    options = {"mesh": mesh, "batch": P("data"), "schedule": schedule, "loss": mean_square}
    gradient = fs.value_and_grad([failing] * 2, **options)
    errors = []
    for _ in range(2):
        try:
            gradient(params, torch.ones(16, 6))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


@not_under_rules("agreements, which find it, have no link of their own; on a GPU that is gloo")
@pytest.mark.parametrize("who", [0, 3])
def test_failed_process_is_named_by_waiting_processes(who):
    errors = run_processes(fail_and_go_on, 4, who, timeout=60)

    for rank, (first, second) in enumerate(errors):
        if rank == who:
            assert "KeyError: 'mine'" in first
            assert "MismatchError" in second
            assert f"process {who} has failed: KeyError: 'mine'" in second
        else:
            assert first.startswith("LostProcessError")
            assert "another process of the group has failed" in first
            assert second.startswith("LostProcessError")


# -- misuse ----------------------------------------------------------------------------------------

# Virtual, because the module is imported in processes too.
MESH = fs.make_mesh({"pipe": 2, "data": 2}, runtime="virtual")
GPIPE = fs.pipeline_schedule("gpipe", stages=3, microbatches=1)
ONE_F = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)


def train_step_of(stages, **options):
    return fs.train_step(stages, fs.optim.sgd(0.1), **options)


CALLERS = {
    "train_step": train_step_of,
    "value_and_grad": fs.value_and_grad,
    "evaluate": fs.evaluate,
}


def prepare(stages, caller="train_step", **options):
    defaults = {"mesh": MESH, "batch": P("data"), "loss": mean_square}
    return CALLERS[caller](stages, **{**defaults, **options})


def placed(trees):
    return fs.shard_stages(trees, mesh=MESH, schedule=ONE_F)


def take_step(params=None, stages=(linear, linear), **options):
    """Take a step of two stages, with parameters that may not suit them."""
    right_params = placed(weights(2))
    step = prepare([*stages], schedule=ONE_F, **options)
    state = fs.optim.sgd(0.1).init(right_params)
    return step(right_params if params is None else params, state, torch.ones(8, 6))


def misplaced():
    _, last = placed(weights(2))
    return [last, {**last, "w": fs.shard_params(torch.ones(6, 6), P(), mesh=MESH)}]


def with_axis_of_stages(w, x):
    return linear(w, x) * fs.axis_index("pipe")


def several_mistakes():
    prepare([linear, 3], batch=P("pipe"), schedule=GPIPE, loss=None)


def options_of_losses():
    prepare([linear] * 3, schedule=GPIPE, accumulate=2, slices=4, bucket=1)


def without_a_schedule(caller):
    prepare(nn.ModuleList([nn.Linear(6, 6)] * 3), caller)


def batch_along_a_missing_axis(caller):
    prepare([linear] * 3, caller, batch={"y": P(("pipe", "dat"))}, schedule=GPIPE)


def without_a_mesh():
    prepare([linear] * 2, mesh=None, schedule=ONE_F)


def fewer_stages_than_the_schedule():
    fs.shard_stages(weights(1), mesh=MESH, schedule=GPIPE)


def lazy_layers_without_a_seed():
    fs.shard_stages(lazily(2), mesh=MESH, schedule=ONE_F)


def one_plain_tree():
    take_step([placed(weights(2))[0], weights(2)[1]])


def without_a_batch():
    step = prepare([linear] * 2, schedule=ONE_F)
    step(placed(weights(2)), ())


def gradients_on_other_devices():
    take_step(gradients=lambda layout: layout.with_spec(P()))


def with_buffers():
    norms = [nn.BatchNorm1d(6), nn.BatchNorm1d(6)]
    return take_step(placed(norms), norms)


NO_SCHEDULE = "{} has no option loss. .*For stages give schedule="
NO_AXIS = r'{}\(batch=\): .* has no axis "dat". Its axes are "pipe", "data"'
MISUSE = {
    "all at once": (
        several_mistakes,
        "train_step: stage 1 is int, which is not called; the last stage returns no loss: "
        "give loss=, a function of its result and the microbatch; the batch is sharded along pipe, "
        "the axis of the stages: all of them need the same samples; the schedule gpipe has "
        "3 stages, 2 are given; the schedule gpipe is for 3 devices, axis pipe has 2.",
    ),
    "options of losses": (
        options_of_losses,
        "^train_step has no option accumulate, slices, bucket. With a schedule it has: .*loss,",
    ),
    "no schedule of train_step": (
        partial(without_a_schedule, "train_step"),
        NO_SCHEDULE.format("train_step"),
    ),
    "no schedule of value_and_grad": (
        partial(without_a_schedule, "value_and_grad"),
        NO_SCHEDULE.format("value_and_grad"),
    ),
    "no schedule of evaluate": (
        partial(without_a_schedule, "evaluate"),
        NO_SCHEDULE.format("evaluate"),
    ),
    "an axis of train_step": (
        partial(batch_along_a_missing_axis, "train_step"),
        NO_AXIS.format("train_step"),
    ),
    "an axis of value_and_grad": (
        partial(batch_along_a_missing_axis, "value_and_grad"),
        NO_AXIS.format("value_and_grad"),
    ),
    "an axis of evaluate": (
        partial(batch_along_a_missing_axis, "evaluate"),
        NO_AXIS.format("evaluate"),
    ),
    "no mesh": (without_a_mesh, "train_step: mesh must be a Mesh, .* got NoneType"),
    "stages of a schedule": (
        fewer_stages_than_the_schedule,
        r"shard_stages: .* 3 stages, 1 are given; .* 3 devices, axis pipe has 2",
    ),
    "lazy layers": (lazy_layers_without_a_seed, "a meta tensor .* has no values.*seed=0"),
    "other stages": (
        lambda: take_step(misplaced()),
        r"parameters must be on the devices of their stages, along pipe: 0.b has P\(at=.*\), "
        r"its stage the coordinate 0; 0.w has .*; 1.w has P\(\), its stage the coordinate 1. "
        r"Put them there: fs.shard_stages",
    ),
    "one tree": (
        lambda: take_step(placed(weights(2))[:1]),
        "2 stages have a list of as many trees of parameters; 1 are given",
    ),
    "plain tensors": (
        one_plain_tree,
        r"train_step on .*: \[1\].b is Tensor; \[1\].w is Tensor. Put .* that mesh: fs.shard_stages",
    ),
    "no batch": (without_a_batch, r"a step takes \(params, state, batch\), 2 are given"),
    "an axis of stages": (
        lambda: take_step(stages=[with_axis_of_stages] * 2),
        r"fs.axis_index over pipe in a stage, at .*: stages of a pipeline may communicate only",
    ),
    "layouts of gradients": (
        gradients_on_other_devices,
        r"gradients= gives that of \[0\].b the layout P\(\), not on the devices of the parameter",
    ),
    "buffers": (
        with_buffers,
        "stage 0 changes its buffers running_mean, running_var, num.*has_buffers=True",
    ),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_of_stages_raises_all(name):
    call, words = MISUSE[name]
    with pytest.raises((fs.errors.FshardError, ValueError, TypeError), match=words):
        call()
