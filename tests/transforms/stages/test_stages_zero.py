"""Training in stages beside data: the loss, gradients, metrics and bits of `train_step` on the whole model."""

import os
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
from tests.helpers.processes import run_processes
from tests.transforms.stages.head import Head

# -- a model: a small GPT as layers, with dropout and tied embeddings -------------------------------------------------

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


def gpt(blocks, seed=0):
    torch.manual_seed(seed)
    embedding = nn.Embedding(WORDS, WIDTH)
    return nn.Sequential(embedding, *(Block() for _ in range(blocks)), Head(embedding.weight))


def tokens(size, seed=1):
    actual = torch.randint(
        0, WORDS, (size, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    )
    return actual[:, :-1], actual[:, 1:]


def entropy(y, batch):
    return F.cross_entropy(y.flatten(0, 1), batch[1].flatten())


def of_words(y, batch):
    """The mean over the words that are not 0, and what there is beside it: a mean, a count, a row for each sample."""
    losses = F.cross_entropy(y.transpose(1, 2), batch[1], reduction="none", ignore_index=0)
    best = y.argmax(-1)
    beside = {
        "sure": y.softmax(-1).amax(-1).mean(),
        "right": (best == batch[1]).sum(),
        "best": best,
        "last": y[:, -1],
    }
    return losses.sum() / words(batch), beside


AUX = {"sure": "mean", "right": "sum", "best": "rows", "last": "rows"}


def words(batch):
    return (batch[1] != 0).sum()


class Recurrent(nn.Module):
    """A layer of other operations than those of a GPT: a product of weights, a convolution, a frozen parameter."""

    def __init__(self, number):
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(2))
        self.mixed = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=1 + number % 2)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1, WIDTH), requires_grad=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(x @ (self.left @ self.right)).tanh() * self.frozen
        return x + F.gelu(self.mixed(x.mT)).mT


def recurrent(blocks, seed=0):
    torch.manual_seed(seed)
    layers = [Recurrent(number) for number in range(blocks)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))


MODELS = {"gpt": gpt, "recurrent": recurrent}


# -- training -----------------------------------------------------------------------------------------------------


def optimizer(opt, mesh, zero):
    return opt if zero is None else fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=zero)


def at_rest(zero):
    return fs.fsdp("data") if zero == 3 else P()


class Trained(NamedTuple):
    """Parameters and buffers by their names in the model, and the metrics of each step as lists."""

    params: dict[str, torch.Tensor]
    metrics: list[list[torch.Tensor]]
    buffers: dict[str, torch.Tensor]


def serial(model, batches, opt, data, zero=None, loss=entropy, has_buffers=False, **options):
    """Train the whole model, without stages."""
    mesh = fs.make_mesh({"data": data}, runtime="virtual")
    apply, params, buffers = fs.functionalize(model)
    params = fs.shard_params(params, at_rest(zero), mesh=mesh)
    opt = optimizer(opt, mesh, zero)

    def loss_fn(params, *inputs):
        y, after = apply(params, inputs[0] if has_buffers else buffers, inputs[-1][0])
        return (loss(y, inputs[-1]), after) if has_buffers else loss(y, inputs[-1])

    step = fs.train_step(
        loss_fn, opt, mesh=mesh, batch=P("data"), has_buffers=has_buffers, **options
    )
    return trained(step, params, opt, batches, buffers if has_buffers else None)


def in_stages(
    model, batches, opt, data, schedule, zero=None, loss=entropy, make=fs.train_step, **options
):
    """Train it in stages; return what `serial` does."""
    mesh = fs.make_mesh({"pipe": schedule.devices, "data": data})
    stages = fs.pipeline.split_stages(model, schedule.stages, "uniform")
    buffers = None
    params = fs.shard_stages(stages, at_rest(zero), mesh=mesh, schedule=schedule)
    opt = optimizer(opt, mesh, zero)
    if options.get("has_buffers"):
        trees = [dict(stage.named_buffers()) for stage in stages]
        buffers = fs.shard_stages(trees, mesh=mesh, schedule=schedule)
    step = make(stages, opt, mesh=mesh, batch=P("data"), schedule=schedule, loss=loss, **options)
    trees, metrics, buffers = trained(step, params, opt, batches, buffers)
    params, buffers = (
        {name: x for tree in part for name, x in tree.items()} for part in (trees, buffers)
    )
    names = dict(model.named_parameters(remove_duplicate=False))
    ties = {id(x): name for name, x in reversed(names.items())}
    assert {ties[id(names[name])] for name in params} == {*ties.values()}
    for name, x in params.items():
        assert torch.equal(x, params[ties[id(names[name])]])
    return Trained({name: params[name] for name, _ in model.named_parameters()}, metrics, buffers)


def by_hand(stages, opt, *, precision=None, donate=False, aux=None, **options):
    """Return what `fs.train_step` does, of its pieces; the only metrics are the loss, and what there is beside it."""
    if precision is not None:
        options["compute"] = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        options["reduce"] = {"bf16": None, "fp16": torch.float32}[precision]
    gradient = fs.value_and_grad(
        stages, aux=aux, gradients=getattr(opt, "gradients", None), **options
    )

    def step(params, state, batch):
        scale = None if opt.loss_scale is None else opt.loss_scale(state)
        actual, grads = gradient(params, batch, scale=scale)
        updates, state = opt.update(grads, state, params)
        return fs.optim.apply_updates(params, updates), state, actual

    return step


def at_once(stages, opt, **options):
    """Return `fs.train_step`, of whose metrics it keeps those that `by_hand` has."""
    full = fs.train_step(stages, opt, **options)

    def step(*given):
        params, state, metrics = full(*given)
        return (
            params,
            state,
            (metrics["loss"], metrics["aux"]) if "aux" in metrics else metrics["loss"],
        )

    return step


def trained(step, params, opt, batches, buffers=None):
    torch.manual_seed(7)
    state = opt.init(params)
    seen = []
    rest = [] if buffers is None else [buffers]
    for batch in batches:
        params, state, *rest, metrics = step(params, state, *rest, batch)
        seen.append(tree_leaves(fs.unshard(metrics)))
    return Trained(fs.unshard(params), seen, fs.unshard(rest[0]) if rest else {})


def assert_same(found, expected, tolerance=0.0):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 10)


# -- equal bits ---------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": fs.optim.sgd(0.1, momentum=0.9),
    "adamw": fs.optim.adamw(0.01),
    "clipped": fs.optim.chain(fs.optim.clip_by_global_norm(0.1), fs.optim.adam(0.01)),
    "scaled": fs.optim.loss_scaled(
        fs.optim.adam(0.01, eps=1e-4), initial=2.0**14
    ),  # with precision="fp16"
    "careful": fs.optim.skip_if_not_finite(fs.optim.sgd(0.1)),
    "muon": fs.optim.by_label(
        {"muon": fs.optim.muon(0.01), "adam": fs.optim.adam(0.01)},
        lambda path, x: "muon" if x.ndim == 2 else "adam",
    ),
}


class Drawn:
    """A training, all of which is drawn."""

    def __init__(self, choose, devices=(1, 2, 3), datas=(1, 2, 3, 4), zeros=(None, 0, 1, 2, 3)):
        self.data = choose(datas)
        self.zero = choose(zeros)
        name = choose(sorted(BUILDERS))
        count = choose(devices)
        stages = count * (1 if name in ("gpipe", "1f1b", "zb-h1", "zb-h2") else 2)
        self.microbatches = choose(
            [1, 2, 3, 4, 6] if self.data == 1 else [1, 2, 4]
        )  # so many make a branch of a tree
        self.model = choose(sorted(MODELS))
        self.opt = choose(sorted(OPTIMIZERS))
        self.schedule = fs.pipeline_schedule(name, stages=stages, microbatches=self.microbatches)
        self.options = choose(
            [
                {},
                {"precision": "bf16"},
                {"donate": True},
                {"loss": of_words, "weight": words, "aux": AUX},
            ]
        )
        self.recompute = choose(["never", "never", "always", "except_last", 1])
        self.options = {"precision": "fp16"} if self.opt == "scaled" else self.options
        self.blocks = max(stages - 2, choose([0, 1, 2, 3]))
        self.size = choose([1, 5, 8, 12, 13])

    def __repr__(self):
        return f"Drawn({self.__dict__})"

    def check(self, reproducible):
        model = MODELS[self.model](self.blocks)
        batches = [tokens(self.size, seed) for seed in (1, 2)]
        options = {**self.options}
        if reproducible:
            options |= {"reproducible": True, "slices": self.microbatches * self.data}
        else:
            options.pop("precision", None)
            options["accumulate"] = self.microbatches
        model.train(reproducible)  # draws are the same only there
        opt = OPTIMIZERS[self.opt if reproducible else "sgd"]
        expected = serial(
            model, batches, opt, 1 if reproducible else self.data, self.zero, **options
        )
        options = {name: x for name, x in options.items() if name not in ("slices", "accumulate")}
        actual = in_stages(
            model,
            batches,
            opt,
            self.data,
            self.schedule,
            self.zero,
            recompute=self.recompute,
            **options,
        )
        assert_same(actual, expected, 0.0 if reproducible else 1e-4)

    def check_pieces(self):
        model = MODELS[self.model](self.blocks)
        batches = [tokens(self.size, seed) for seed in (1, 2)]
        options = {"recompute": self.recompute, "reproducible": True, **self.options}
        actual, full = (
            in_stages(
                model,
                batches,
                OPTIMIZERS[self.opt],
                self.data,
                self.schedule,
                self.zero,
                make=make,
                **options,
            )
            for make in (by_hand, at_once)
        )
        assert_same(actual, full)


@settings(max_examples=12)
@given(st.randoms(use_true_random=False))
def test_staged_training_has_bits_of_the_full_model(source):
    Drawn(source.choice).check(reproducible=True)


@settings(max_examples=8)
@given(st.randoms(use_true_random=False))
def test_staged_training_equals_the_full_model(source):
    Drawn(source.choice).check(reproducible=False)


@settings(max_examples=6)
@given(st.randoms(use_true_random=False))
def test_staged_gradient_and_update_equal_the_step(source):
    Drawn(source.choice).check_pieces()


def gradient_in_stages(stages, trees, batch, schedule, *, data=1, zero=0, **options):
    """Return the unsharded gradients of functions as stages, whose loss is the mean of the last result."""
    mesh = fs.make_mesh({"pipe": schedule.devices, "data": data})
    params = fs.shard_stages(trees, at_rest(zero), mesh=mesh, schedule=schedule)
    gradient = fs.value_and_grad(
        stages,
        mesh=mesh,
        batch=P("data"),
        schedule=schedule,
        loss=lambda y, _: y.mean(),
        inputs=lambda batch: batch,
        **options,
    )
    return fs.unshard(gradient(params, batch)[1])


def test_tied_weights_of_16_bits_are_summed_in_32_bits():
    """One microbatch has a gradient of 256 in each stage, and 15 others of 1, which 256 in 16 bits does not notice."""
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=16)
    w = torch.ones((), dtype=torch.bfloat16)
    x = torch.ones(16, 1, dtype=torch.bfloat16)
    x[0] = 256
    stages = [lambda w, x: (x * w, x), lambda w, pair: pair[0] + pair[1] * w]
    first, second = gradient_in_stages(stages, [w, w], 16 * x, schedule)
    assert first.item() == second.item() == torch.tensor(2 * (256.0 + 15)).bfloat16().item()


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "v-min"])
@pytest.mark.parametrize("live_units", [1, 2])
def test_late_weight_gradients_wait_for_their_all_gather(name, live_units):
    """The gradients of a product of weights need both of them when W runs, after the units were freed."""
    stages = 2 if name == "zb-h1" else 4
    schedule = fs.pipeline_schedule(name, stages=stages, microbatches=4)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    trees = [{"a": drawn(6, 3), "b": drawn(3, 6)} for _ in range(stages)]
    x = drawn(8, 6)

    def stage(w, x):
        return x @ (w["a"] @ w["b"])

    gradients = gradient_in_stages(
        [stage] * stages, trees, x, schedule, data=2, zero=3, live_units=live_units
    )
    leaves = [{key: w.clone().requires_grad_() for key, w in tree.items()} for tree in trees]
    y = x
    for tree in leaves:
        y = stage(tree, y)
    y.mean().backward()
    expected = [{key: w.grad for key, w in tree.items()} for tree in leaves]
    torch.testing.assert_close(gradients, expected)


# -- what is held and sent ----------------------------------------------------------------------------------------


def linear(w, x):
    return x @ w["w"] + w["b"]


def mean_square(y, batch):
    return y.square().mean()


def weights(stages, width=6):
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "w": torch.randn(width, width, generator=draw) / 2,
            "b": torch.randn(width, generator=draw),
        }
        for _ in range(stages)
    ]


def chunk(numbers, devices):
    return -(-numbers // devices)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("name", "gathers"), [("1f1b", [1, 1]), ("bfs", [2, 2, 1, 1])])
def test_staged_memory_and_bytes_equal_theory(name, gathers, zero):
    """Of each stage D devices hold 1/D, gather the rest once for each time that it is used anew, and send their sums."""
    data = 4
    microbatches = 3
    stages = len(gathers)
    schedule = fs.pipeline_schedule(name, stages=stages, microbatches=microbatches)
    mesh = fs.make_mesh({"pipe": 2, "data": data})
    params = fs.shard_stages(weights(stages), at_rest(zero), mesh=mesh, schedule=schedule)
    opt = optimizer(fs.optim.adam(0.1), mesh, zero)
    state = opt.init(params)
    sizes = [36, 6]
    full = sum(sizes)
    seen = []

    def watched(w, x):
        seen.append(w["w"])
        return linear(w, x)

    options = {"loss": mean_square, "live_units": 1}
    step = fs.train_step(
        [watched] * stages, opt, mesh=mesh, batch=P("data"), schedule=schedule, **options
    )
    batch = torch.ones(12 * data, 6)
    step(params, state, batch)
    with fs.ledger() as comm:
        params, state, _ = step(params, state, batch)
    for device in range(mesh.size):
        at = mesh.coordinates(device)
        own = [stage for stage, place in enumerate(schedule.placement) if place == at["pipe"]]
        pieces = sum(
            max(min(chunk(size, data), size - at["data"] * chunk(size, data)), 0) for size in sizes
        )
        held = sum(x.shards[device].numel() for tree in params for x in tree.values())
        assert held == len(own) * (pieces if zero == 3 else full)
        moments = sum(x.shards[device].numel() for tree in state["exp_avg"] for x in tree.values())
        assert moments == len(own) * (pieces if zero else full)
        sent = {
            what: comm.bytes(device, collective=what) / 4
            for what in ("all_gather", "psum_scatter", "psum")
        }
        others = sum(chunk(size, data) for size in sizes) * (data - 1)
        gathered = sum(gathers[stage] for stage in own) if zero == 3 else len(own) if zero else 0
        assert sent["all_gather"] == gathered * others
        assert sent["psum_scatter"] == (len(own) * others if zero else 0)
        if zero == 0:
            assert sent["psum"] > len(own) * 2 * (data - 1) * full / data
    assert all(
        bool(x.untyped_storage().nbytes()) == (zero != 3) for x in seen
    )  # let go at last, if it was gathered


def test_live_units_bound_unsharded_stages():
    schedule = fs.pipeline_schedule("interleaved", stages=6, devices=2, microbatches=4)
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    most = {}
    seen = []
    params = fs.shard_stages(weights(6), fs.fsdp("data"), mesh=mesh, schedule=schedule)

    def watched(w, x):
        seen.append(w["w"])
        return linear(w, x)

    for live in (1, 2, 3):
        opt = fs.partition_optimizer(fs.optim.sgd(0.1), mesh=mesh, axis="data", stage=3)

        def count(y, batch, live=live):
            full = {x.data_ptr() for x in seen if x.untyped_storage().nbytes()}
            most[live] = max(most.get(live, 0), len(full))
            return y.square().mean()

        options = {"loss": count, "live_units": live}
        step = fs.train_step(
            [watched] * 6, opt, mesh=mesh, batch=P("data"), schedule=schedule, **options
        )
        step(params, opt.init(params), torch.ones(16, 6))
        seen.clear()
    assert most[1] <= 4 and most[1] < most[3]


@pytest.mark.parametrize("axes", [{}, {"data": 2}])
def test_replicated_batch_splits_into_microbatches(axes):
    """On a mesh that has nothing but the pipeline, say."""
    model = gpt(3).eval()
    batch = tokens(7)
    schedule = fs.pipeline_schedule("zb-h1", stages=3, microbatches=2)
    mesh = fs.make_mesh({"pipe": 3, **axes})
    stages = fs.pipeline.split_stages(model, 3)
    params = fs.shard_stages(stages, P.flat(*axes) if axes else None, mesh=mesh, schedule=schedule)
    opt = fs.optim.sgd(1.0)
    step = fs.train_step(stages, opt, mesh=mesh, batch=P(), schedule=schedule, loss=entropy)
    after, _, metrics = step(params, opt.init(params), batch)
    loss = entropy(model(batch[0]), batch)
    loss.backward()
    torch.testing.assert_close(metrics["loss"], loss.detach())
    assert metrics["samples"] == 7
    actual = {name: x for tree in fs.unshard(after) for name, x in tree.items()}
    for name, x in model.named_parameters():
        torch.testing.assert_close(actual[name], x.detach() - x.grad, rtol=1e-5, atol=1e-6)


def test_nonfinite_step_is_skipped_by_all_stages():
    model = gpt(2)
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)

    def burst(y, batch):
        return entropy(y, batch) + torch.where(batch[1][0, 0] == 0, torch.inf, 0.0) * y.sum()

    batches = [tokens(4, seed) for seed in range(3)]
    batches[1][1][0, 0], batches[0][1][:, 0], batches[2][1][:, 0] = 0, 1, 1
    for opt in (
        fs.optim.skip_if_not_finite(fs.optim.sgd(0.1)),
        fs.optim.loss_scaled(fs.optim.sgd(0.1)),
    ):
        expected = serial(model, batches, opt, 2, 3, burst, reproducible=True, slices=4)
        actual = in_stages(model, batches, opt, 2, schedule, 3, burst, reproducible=True)
        assert [bool(finite) for _, _, finite, *_ in actual.metrics] == [True, False, True]
        assert_same(actual.params, expected.params)


@pytest.mark.parametrize("reproducible", [False, True])
def test_microbatch_of_weight_zero_adds_nothing(reproducible):
    model = gpt(2)
    schedule = fs.pipeline_schedule("zb-h1", stages=2, microbatches=4)

    def of_words_alone(y, batch):
        """A mean over the words that are not 0; without any, neither it nor its gradient is a number."""
        losses = F.cross_entropy(y.transpose(1, 2), batch[1], reduction="none")
        return (losses * (batch[1] != 0)).sum() / words(batch)

    batch = tokens(4)
    batch[1][1:3] = 0
    options = {"loss": of_words_alone, "weight": words, "reproducible": reproducible}
    model.train(reproducible)
    slices = {"slices": 4} if reproducible else {"accumulate": 4}
    expected = serial(model, [batch], fs.optim.sgd(0.1), 1, **slices, **options)
    actual = in_stages(model, [batch], fs.optim.sgd(0.1), 1, schedule, **options)
    assert_same(actual, expected, 0.0 if reproducible else 1e-4)
    assert expected.metrics[0][2]  # finite


# -- other forms --------------------------------------------------------------------------------------------------


def test_function_stages_accept_skips_and_any_batch():
    mesh = fs.make_mesh({"pipe": 3, "data": 2})
    schedule = fs.pipeline_schedule("gpipe", stages=3, microbatches=2)

    def first(w, x):
        return x["x"] * w, {"far": {"x": x["x"], "n": x["n"]}}

    def last(w, y, far):
        return y * w + far["x"] * far["n"][:, None]

    trees = [torch.tensor(2.0), None, torch.tensor(3.0)]
    params = fs.shard_stages(trees, mesh=mesh, schedule=schedule)
    step = fs.train_step(
        [first, lambda _, y: y, last],
        fs.optim.sgd(0.1),
        mesh=mesh,
        batch={"in": P("data"), "goal": P("data"), "scale": P()},
        schedule=schedule,
        loss=lambda y, batch: (y - batch["goal"]).mean() * batch["scale"],
        inputs=lambda batch: batch["in"],
        skips={"far": (0, 2)},
        frozen="[2]",
    )
    x = torch.arange(10.0).view(5, 2)
    batch = {
        "in": {"x": x, "n": torch.arange(5)},
        "goal": torch.ones(5, 2),
        "scale": torch.tensor(2.0),
    }
    after, _, metrics = step(params, fs.optim.sgd(0.1).init(params), batch)
    loss = 2 * (6 * x + x * torch.arange(5)[:, None] - 1).mean()
    torch.testing.assert_close(metrics["loss"], loss)
    torch.testing.assert_close(fs.unshard(after[0]), 2 - 0.1 * 2 * 3 * x.mean())
    assert after[1] is None and fs.unshard(after[2]) == 3.0


def test_unused_stage_parameters_stay_unchanged():
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    trees = [
        {"w": torch.tensor(2.0), "idle": torch.ones(3), "n": torch.tensor(4)},
        {"w": torch.tensor(3.0)},
    ]
    params = fs.shard_stages(trees, fs.fsdp("data"), mesh=mesh, schedule=schedule)
    opt = fs.partition_optimizer(
        fs.optim.adamw(0.1, weight_decay=0.5), mesh=mesh, axis="data", stage=3
    )
    stages = [lambda w, x: x * w["w"] * w["n"], lambda w, x: x * w["w"]]
    step = fs.train_step(
        stages, opt, mesh=mesh, batch=P("data"), schedule=schedule, loss=mean_square
    )
    after, _, _ = step(params, opt.init(params), torch.ones(4, 1))
    assert (
        torch.equal(fs.unshard(after[0]["idle"]), torch.ones(3)) and fs.unshard(after[0]["n"]) == 4
    )
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


@pytest.mark.parametrize("recompute", ["never", "always", 1])
def test_stage_buffers_are_means_over_microbatches(recompute):
    """In reproducible mode: as without stages, to the bit; two steps."""
    model = normalised()
    schedule = fs.pipeline_schedule("zbv", stages=4, microbatches=2)
    batches = [
        (torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)),)
        for n in (1, 2)
    ]
    options = {"loss": mean_square, "has_buffers": True, "reproducible": True}
    expected = serial(model, batches, fs.optim.sgd(0.1), 2, slices=4, **options)
    actual = in_stages(
        model,
        batches,
        fs.optim.sgd(0.1),
        2,
        schedule,
        recompute=recompute,
        inputs=lambda batch: batch[0],
        **options,
    )
    assert_same((actual.params, actual.buffers), (expected.params, expected.buffers))


def running_statistics(data, microbatches, momentum=0.1, sync=None, samples=12):
    """Train two steps in stages, of which the first is a BatchNorm; return its buffers, and those of torch's."""
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=microbatches)
    mesh = fs.make_mesh({"pipe": 2, "data": data})
    layer = nn.BatchNorm2d(3, momentum=momentum).double()
    apply, params, buffers = fs.functionalize(layer, sync_batchnorm=sync)
    trees = [
        fs.shard_stages([tree, {}], mesh=mesh, schedule=schedule) for tree in (params, buffers)
    ]
    stages = [
        lambda params, buffers, x: apply(params, buffers, x),
        lambda params, buffers, x: (x, buffers),
    ]
    options = {
        "batch": P("data"),
        "mesh": mesh,
        "schedule": schedule,
        "loss": mean_square,
        "has_buffers": True,
    }
    step = fs.train_step(stages, fs.optim.sgd(0.1), **options)
    state = fs.optim.sgd(0.1).init(trees[0])
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        x = torch.randn(samples, 3, 2, 2, dtype=torch.float64, generator=draw)
        x += 10 * torch.arange(samples)[:, None, None, None]
        layer(x)
        trees[0], state, trees[1], _ = step(trees[0], state, trees[1], x)
    return fs.unshard(trees[1][0]), dict(layer.named_buffers())


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
    params = fs.shard_stages(stages, at_rest(zero), mesh=mesh, schedule=schedule)
    options = {
        "mesh": mesh,
        "batch": P("data"),
        "schedule": schedule,
        "loss": of_words,
        "weight": words,
        "aux": AUX,
    }
    with fs.ledger() as comm, torch.inference_mode():
        loss, aux = fs.evaluate(stages, **options)(params, batch)
    expected, beside = of_words(model(batch[0]), batch)
    torch.testing.assert_close(loss, expected.detach())
    assert torch.equal(fs.unshard(aux["best"]), beside["best"]) and aux["right"] == beside["right"]
    assert comm.bytes(collective="psum_scatter") == 0


def lazily(count, made=None):
    def layer():
        if made is not None and torch.empty(()).device.type != "meta":
            made.append(1)
        return nn.Linear(6, 6)

    return fs.pipeline.split_stages([fs.lazy(layer) for _ in range(count)], count)


def of_lazy_layers():
    """Return the whole of the parameters, and how many layers have been built here."""
    made, devices = [], 2
    mesh = fs.make_mesh({"pipe": devices, "data": 2})
    schedule = fs.pipeline_schedule("interleaved", stages=4, devices=devices, microbatches=1)
    stages = lazily(4, made)
    params = fs.shard_stages(stages, fs.fsdp("data"), mesh=mesh, schedule=schedule, seed=3)
    built = len(made)
    step = fs.train_step(
        stages, fs.optim.sgd(0.1), mesh=mesh, batch=P("data"), schedule=schedule, loss=mean_square
    )
    full = fs.unshard(params)
    step(params, fs.optim.sgd(0.1).init(params), torch.ones(4, 6))
    return full, built


def test_lazy_layers_are_built_on_their_stage_only(four):
    expected = [dict(fs.nn.materialize(stage, seed=3).named_parameters()) for stage in lazily(4)]
    for full, built in (of_lazy_layers(), *four.run(of_lazy_layers)):
        assert all(
            torch.equal(one[name], x)
            for one, tree in zip(full, expected, strict=True)
            for name, x in tree.items()
        )
        assert built in (2, 4)
    assert built == 2  # of a process


# -- a process that fails ------------------------------------------------------------------------------------------


def fail_and_go_on(who):
    """One process fails in its stage, and takes another step as if nothing had been; return what everybody is told."""
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=4)
    turns, told = [], []

    def failing(w, x):
        turns.append(1)
        if len(turns) == 3 and int(os.environ["RANK"]) == who:
            raise KeyError("mine")
        return linear(w, x)

    params = fs.shard_stages(weights(2), fs.fsdp("data"), mesh=mesh, schedule=schedule)
    gradient = fs.value_and_grad(
        [failing] * 2, mesh=mesh, batch=P("data"), schedule=schedule, loss=mean_square
    )
    for _ in range(2):
        try:
            gradient(params, torch.ones(16, 6))
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


@pytest.mark.parametrize("who", [0, 3])
def test_failed_process_is_named_by_waiting_processes(who):
    for rank, (first, second) in enumerate(run_processes(fail_and_go_on, 4, who, timeout=60)):
        if rank == who:
            assert "KeyError: 'mine'" in first
            assert (
                "MismatchError" in second
                and f"process {who} has failed: KeyError: 'mine'" in second
            )
        else:
            assert (
                first.startswith("LostProcessError")
                and "another process of the group has failed" in first
            )
            assert second.startswith("LostProcessError")


# -- misuse -------------------------------------------------------------------------------------------------------

MESH = fs.make_mesh(
    {"pipe": 2, "data": 2}, runtime="virtual"
)  # the module is imported in processes too
GPIPE = fs.pipeline_schedule("gpipe", stages=3, microbatches=1)
ONE_F = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
ENTRANCES = {
    "train_step": lambda given, **options: fs.train_step(given, fs.optim.sgd(0.1), **options),
    "value_and_grad": fs.value_and_grad,
    "evaluate": fs.evaluate,
}


def prepare(stages, caller="train_step", **options):
    return ENTRANCES[caller](
        stages, **{"mesh": MESH, "batch": P("data"), "loss": mean_square, **options}
    )


def placed(trees):
    return fs.shard_stages(trees, mesh=MESH, schedule=ONE_F)


def take_step(params=None, stages=(linear, linear), **options):
    """Take a step of two stages, with parameters that may not suit them."""
    params = placed(weights(2)) if params is None else params
    step = prepare([*stages], schedule=ONE_F, **options)
    return step(params, fs.optim.sgd(0.1).init(placed(weights(2))), torch.ones(8, 6))


def misplaced():
    _, last = placed(weights(2))
    return [last, {**last, "w": fs.shard_params(torch.ones(6, 6), P(), mesh=MESH)}]


def asking(w, x):
    return linear(w, x) * fs.axis_index("pipe")


def with_buffers():
    norms = [nn.BatchNorm1d(6), nn.BatchNorm1d(6)]
    return take_step(placed(norms), norms)


MISUSE = {
    "all at once": (
        lambda: prepare([linear, 3], batch=P("pipe"), schedule=GPIPE, loss=None),
        "train_step: stage 1 is int, which is not called; the last stage returns no loss: give loss=, a function of its "
        "result and the microbatch; the batch is sharded along pipe, the axis of the stages: all of them need the same "
        "samples; the schedule gpipe has 3 stages, 2 are given; the schedule "
        "gpipe is for 3 devices, axis pipe has 2.",
    ),
    "options of losses": (
        lambda: prepare([linear] * 3, schedule=GPIPE, accumulate=2, slices=4, bucket=1),
        "^train_step has no option accumulate, slices, bucket. With a schedule it has: .*loss,",
    ),
    **{
        f"no schedule of {name}": (
            lambda name=name: prepare(nn.ModuleList([nn.Linear(6, 6)] * 3), name),
            f"{name} has no option loss. .*For stages give schedule=",
        )
        for name in ENTRANCES
    },
    **{
        f"an axis of {name}": (
            lambda name=name: prepare(
                [linear] * 3, name, batch={"y": P(("pipe", "dat"))}, schedule=GPIPE
            ),
            rf'{name}\(batch=\): .* has no axis "dat". Its axes are "pipe", "data"',
        )
        for name in ENTRANCES
    },
    "no mesh": (
        lambda: prepare([linear] * 2, mesh=None, schedule=ONE_F),
        "train_step: mesh must be a Mesh, .* got NoneType",
    ),
    "stages of a schedule": (
        lambda: fs.shard_stages(weights(1), mesh=MESH, schedule=GPIPE),
        r"shard_stages: .* 3 stages, 1 are given; .* 3 devices, axis pipe has 2",
    ),
    "lazy layers": (
        lambda: fs.shard_stages(lazily(2), mesh=MESH, schedule=ONE_F),
        "a meta tensor .* has no values.*seed=0",
    ),
    "other stages": (
        lambda: take_step(misplaced()),
        r"parameters must be on the devices of their stages, along pipe: 0.b has P\(at=.*\), its stage the coordinate 0; "
        r"0.w has .*; 1.w has P\(\), its stage the coordinate 1. Put them there: fs.shard_stages",
    ),
    "one tree": (
        lambda: take_step(placed(weights(2))[:1]),
        "2 stages have a list of as many trees of parameters; 1 are given",
    ),
    "plain tensors": (
        lambda: take_step([placed(weights(2))[0], weights(2)[1]]),
        r"train_step on .*: 1.b is Tensor; 1.w is Tensor. Put .* that mesh: fs.shard_stages",
    ),
    "no batch": (
        lambda: prepare([linear] * 2, schedule=ONE_F)(placed(weights(2)), ()),
        r"a step takes \(params, state, batch\), 2 are given",
    ),
    "an axis of stages": (
        lambda: take_step(stages=[asking] * 2),
        r"fs.axis_index over pipe in a stage, at .*: stages of a pipeline may communicate only",
    ),
    "layouts of gradients": (
        lambda: take_step(gradients=lambda layout: layout.with_spec(P())),
        r"gradients= gives that of 0.b the layout P\(\), not on the devices of the parameter",
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
