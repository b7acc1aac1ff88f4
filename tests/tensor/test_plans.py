"""Planned models equal those of one device: models of transformers, in all modes, over sequences.

The oracle is the planned function on plain tensors, where no axis is bound: loss and gradients.
Bytes are those of Megatron's formula.
"""

from typing import NamedTuple, get_args

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fshard as fs
from fshard import P
from fshard.errors import LayoutError
from fshard.tensor.sequence import Algorithm
from tests.tensor.hugging_face import MODELS, block_weights, inputs_of, model_of
from tests.tensor.small_gpt import Layer, Words, token_ids

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own
F64 = torch.float64


class Step(NamedTuple):
    """A loss and its gradients."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor]


def detached(x):
    """Detach a parameter, which is a tuple of tensors if it is divided."""
    if isinstance(x, tuple):
        return tuple(y.detach() for y in x)
    return x.detach()


def gradients(name, plan, mesh, rules=None, model=None, **more):
    """Return the step of a planned model on a mesh, that of one device, and the ledger.

    The loss is the model's own, if `more` has labels. Tensors of `more` are sharded with the batch.
    """
    apply, params, buffers = fs.functionalize(model or model_of(name), plan=plan)
    inputs, labels = inputs_of(name)
    options = {key: x for key, x in more.items() if not isinstance(x, torch.Tensor)}
    tensors = {key: x for key, x in more.items() if isinstance(x, torch.Tensor)}
    batch = {"inputs": {**inputs, **tensors}, "labels": labels}

    def loss_fn(params, batch):
        output, _ = apply(params, buffers, **batch["inputs"], **options)
        if "labels" in more:
            return plan.full(output.loss)
        return plan.cross_entropy(output.logits, batch["labels"])

    plain = {key: detached(x) for key, x in params.items()}
    expected_grads, expected_loss = torch.func.grad_and_value(loss_fn)(plain, batch)

    rules = rules or fs.fsdp("data", within=plan.rules)
    arrays = fs.shard_params(params, rules, mesh=mesh)
    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), local=plan.axes)
    with fs.ledger() as comm:
        loss, grads = run(arrays, batch)
    return Step(loss, fs.unshard(grads)), Step(expected_loss, expected_grads), comm


def assert_planned(name, plan, mesh, tolerance=1e-6, **options):
    actual, expected, comm = gradients(name, plan, mesh, **options)
    bounds = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(actual.loss, expected.loss, check_dtype=False, **bounds)
    torch.testing.assert_close(actual.grads, expected.grads, **bounds)
    return comm


@pytest.mark.parametrize("name", MODELS)
def test_models_are_sharded_and_exact(name):
    model = model_of(name)
    plan = fs.tensor_parallel(model, axis="model", sample=inputs_of(name)[0])

    sizes = {weight: model.get_parameter(weight).numel() for weight in block_weights(model)}
    sharded = sum(size for weight, size in sizes.items() if weight in plan.layers)
    assert sharded >= 0.95 * sum(sizes.values())
    assert_planned(name, plan, fs.make_mesh({"data": 2, "model": 2}))


SQUARE = {"data": 2, "i": 2, "j": 2}
TOKENS = {"data": 1, "seq": 2, "model": 2}
MODES = {
    "2d": ({"axis": ("i", "j"), "mode": "2d"}, SQUARE),
    "2.5d": ({"axis": ("d", "i", "j"), "mode": "2.5d"}, {**SQUARE, "data": 1, "d": 2}),
    "3d": ({"axis": ("a", "b", "c"), "mode": "3d"}, {"data": 1, "a": 2, "b": 2, "c": 2}),
}
for algorithm in get_args(Algorithm):
    over_tokens = {"axis": "model", "sequence": "seq", "sequence_mode": algorithm}
    MODES[algorithm] = (over_tokens, TOKENS)

NO_CACHE = {"use_cache": False}
POSITIONS = {"position_ids": torch.arange(8).expand(4, -1)}
WITH_LABELS = {"labels": inputs_of("Llama")[1]}
ROWS = [  # a model, a mode, and more arguments of the model
    ("Llama", "2d", {}),
    ("Llama", "2.5d", {}),
    ("Llama", "3d", {}),
    ("ViT", "2d", {}),
    ("ViT", "2.5d", {}),
    ("ViT", "3d", {}),
    *[("Llama", algorithm, {}) for algorithm in get_args(Algorithm)],
    # Tokens are in their order for the model: its masks, positions and loss are those of one
    # device.
    ("Llama", "ring", NO_CACHE),
    ("Llama", "ring", NO_CACHE | POSITIONS),
    ("Llama", "ring", WITH_LABELS),
    ("Llama", "zigzag", NO_CACHE),
    ("Llama", "zigzag", NO_CACHE | POSITIONS),
    ("Llama", "zigzag", WITH_LABELS),
    ("GPT-2", "zigzag", {}),
    ("T5", "gather", {}),  # masked attention
    ("BERT", "gather", {}),
]


@pytest.mark.parametrize(
    ("name", "mode", "more"), ROWS, ids=lambda x: "-".join(x) if isinstance(x, dict) else x
)
def test_other_modes_and_sequences_are_exact(name, mode, more):
    options, sizes = MODES[mode]
    sample = {**inputs_of(name)[0], **more}
    plan = fs.tensor_parallel(model_of(name), sample=sample, check=False, **options)

    comm = assert_planned(name, plan, fs.make_mesh(sizes), **more)

    if more == NO_CACHE:
        along_tokens = {kind for kind, axes in comm.by_collective() if axes == ("seq",)}
        assert along_tokens == {"ppermute", "psum"}


@pytest.mark.parametrize(
    "options", [{}, {"sequence": "seq", "sequence_mode": "zigzag"}], ids=["layers", "tokens"]
)
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT"])
def test_uneven_vocabularies_are_sharded_and_exact(name, options):
    """67 words, which neither two nor three devices divide, are not padded, and not gathered."""
    model = model_of(name, vocab_size=67)
    inputs, labels = inputs_of(name)
    sample = {**inputs, "labels": labels}
    plan = fs.tensor_parallel(
        model, axis="model", size=2, sample=sample, check=not options, **options
    )
    tables = [path for path, x in model.named_parameters() if x.ndim == 2 and len(x) == 67]
    assert {plan.layers[path].style for path in tables} == {"words"}

    sizes = {"data": 1, "seq": 2, "model": 2} if options else {"data": 2, "model": 2}
    mesh = fs.make_mesh(sizes)
    for more in ({}, {"labels": labels}):
        comm = assert_planned(name, plan, mesh, model=model, **more)
        assert "all_gather" not in bytes_along_model(comm)
    with pytest.raises(LayoutError, match="shared by at most 67"):
        plan.check_sizes(fs.make_mesh({"model": 40}))


def bytes_along_model(comm):
    """Return the bytes of each collective along "model"."""
    result = {}
    for (kind, axes), (_, sent) in comm.by_collective().items():
        if axes == ("model",):
            result[kind] = sent
    return result


def test_pairs_of_layers_send_what_megatron_sends():
    """Each way, there are two reductions of activations a block, and one of the table of words.

    Megatron's sequence parallelism sends as much. The rest is the loss over the words, and
    gradients of replicated norms.
    """
    mesh = fs.make_mesh({"data": 1, "model": 2})
    options = {"axis": "model", "sample": inputs_of("Llama")[0], "check": False}
    activation = 4 * 8 * 32 * 8  # bytes
    blocks = 2
    expected = 2 * (2 * blocks + 1) * activation

    plan = fs.tensor_parallel(model_of("Llama"), **options)
    sent = bytes_along_model(assert_planned("Llama", plan, mesh))
    assert expected <= sent["psum"] <= 1.1 * expected
    assert "all_gather" not in sent

    options |= {"sequence": "model", "sequence_mode": "megatron"}
    plan = fs.tensor_parallel(model_of("Llama"), **options)
    sent = bytes_along_model(assert_planned("Llama", plan, mesh))
    assert expected <= sent["psum_scatter"] + sent["all_gather"] <= 1.1 * expected


@pytest.mark.parametrize("options", [{}, {"sequence": "seq", "sequence_mode": "zigzag"}])
def test_bytes_on_an_abstract_mesh_are_those_that_are_sent(options):
    inputs, labels = inputs_of("Llama")
    plan = fs.tensor_parallel(
        model_of("Llama"), axis="model", sample=inputs, check=False, **options
    )
    apply, params, buffers = fs.functionalize(model_of("Llama"), plan=plan)

    def loss_fn(params, ids):
        output, _ = apply(params, buffers, input_ids=ids)
        return plan.cross_entropy(output.logits, ids)

    def sent(runtime):
        mesh = fs.make_mesh({"data": 2, "seq": 2, "model": 2}, runtime=runtime)
        arrays = fs.shard_params(params, fs.fsdp("data", within=plan.rules), mesh=mesh)
        step = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), local=plan.axes)
        with fs.ledger() as comm:
            step(arrays, labels)
        return comm.by_collective(device=0)

    assert sent("abstract") == sent("virtual")


class Block(nn.Module):
    """Layers as people write them.

    They are a fused product that is chunked, a chain, and a norm of a product.
    """

    def __init__(self):
        super().__init__()
        self.fused = nn.Linear(8, 24)
        self.down = nn.Linear(12, 8)
        self.one = nn.Linear(8, 16)
        self.two = nn.Linear(16, 16)
        self.three = nn.Linear(16, 8)
        self.normed = nn.Linear(8, 6)
        self.after = nn.Linear(6, 8)

    def forward(self, x):
        a, b = self.fused(x).chunk(2, -1)
        x = x + self.down(F.silu(a) * b)
        x = x + self.three(self.two(self.one(x).relu()).relu())
        return (x + self.after(F.layer_norm(self.normed(x), (6,)))).softmax(-1)


def test_plan_of_a_module():
    model = Block().to(F64)
    plan = fs.tensor_parallel(model, axis="model", sample=torch.randn(4, 8, dtype=F64))
    styles = {name.removesuffix(".weight"): layer.style for name, layer in plan.layers.items()}
    assert styles == {"fused": "column", "down": "row", "one": "column", "two": "row"}
    assert plan.layers["fused.weight"].parts == (12, 12)
    assert plan.rules["fused.bias"] == plan.rules["one.weight"] == P("model")
    assert (plan.rules["down.weight"], plan.rules["down.bias"]) == (P(None, "model"), P())
    text = str(plan)
    assert "fused.weight   column  12 + 12  down sums over what it produces" in text
    assert "normed.weight                   layer_norm needs all that it produces" in text


class Places(nn.Module):
    """As many positions as words."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.places = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8)

    def forward(self, ids):
        return self.head(
            F.layer_norm(self.words(ids) + self.places(torch.arange(ids.shape[1])), (4,))
        )


def test_a_table_of_positions_is_no_table_of_words():
    sample = torch.arange(8).view(2, 4)
    plan = fs.tensor_parallel(Places(), axis="model", sample=sample, sequence="seq")
    assert [*plan.layers] == ["head.weight", "words.weight"]
    assert '1d over "model", tokens over "seq" (gather)' in str(plan)


def test_frozen_parameters_are_checked_too():
    model = Block().to(F64)
    model.one.requires_grad_(False)
    plan = fs.tensor_parallel(model, axis="model", sample=torch.randn(4, 8, dtype=F64))
    assert plan.layers["one.weight"].style == "column"
    assert not model.one.weight.requires_grad


def test_rules_replace_what_is_found():
    model = Block().to(F64)
    x = torch.randn(4, 8, dtype=F64)
    rules = {
        "t*.weight": "row",
        "three.weight": "row",
        "fused.weight": "replicated",
        "down.weight": "replicated",
    }

    plan = fs.tensor_parallel(model, axis="model", sample=x, rules=rules)

    styles = {name.removesuffix(".weight"): layer.style for name, layer in plan.layers.items()}
    assert styles == {"one": "column", "two": "row", "three": "row"}
    assert plan.replicated["fused.weight"] == "named by rules"

    wrong = {**rules, "t*.weight": "column", "four*": "row", "one.weight": "colum"}
    with pytest.raises(ValueError) as raised:
        fs.tensor_parallel(model, axis="model", sample=x, rules=wrong)
    message = str(raised.value)
    assert "'four*' matches no weight of a layer" in message
    assert "'one.weight' must be one of column, row, words, replicated; got 'colum'" in message
    assert "three.weight is column and row by several" in message


# -- misuse ----------------------------------------------------------------------------------------


def plan_of(name="Llama", **options):
    inputs, _ = inputs_of(name)
    return fs.tensor_parallel(model_of(name), axis="model", sample=inputs, check=False, **options)


def plan_linear(**options):
    """Plan a linear layer."""
    return fs.tensor_parallel(nn.Linear(2, 2), sample=torch.ones(2), **{"axis": "model", **options})


def step(plan, sizes, name="Llama"):
    return gradients(name, plan, fs.make_mesh({"data": 1, **sizes}))


def three_devices_for_zigzag():
    plan = plan_of(sequence="seq", sequence_mode="zigzag")
    step(plan, {"seq": 3, "model": 2})


def mask_in_a_ring():
    plan = plan_of("T5", sequence="seq", sequence_mode="ring")
    step(plan, {"seq": 2, "model": 2}, "T5")


def step_without_local():
    plan = plan_of()
    mesh = fs.make_mesh({"model": 2})
    apply, params, buffers = fs.functionalize(model_of("Llama"), plan=plan)

    def loss_fn(params, ids):
        output, _ = apply(params, buffers, input_ids=ids)
        return plan.full(output.logits.mean())

    gradient = fs.grad(loss_fn, mesh=mesh, batch=P())
    gradient(fs.shard_params(params, P(), mesh=mesh), inputs_of("Llama")[1])


MISUSE = {
    "devices": (
        lambda: step(plan_of(), {"model": 4}),
        r'4 devices along "model" must divide .*k_proj.weight is shared by at most 2',
    ),
    "tokens": (
        three_devices_for_zigzag,
        r"input_ids.*: .* 8 elements, which must be a multiple of 6",
    ),
    "masks": (mask_in_a_ring, "got a mask"),
    "another model": (
        lambda: fs.functionalize(nn.Linear(2, 2), plan=plan_of()),
        "one of another model",
    ),
    "no local=": (
        step_without_local,
        r"must have the shapes of a device.s shards; .*weight has .* give the step local=",
    ),
    "megatron": (
        lambda: plan_linear(sequence="seq", sequence_mode="megatron"),
        'sequence must be one of "model"',
    ),
    "ring": (
        lambda: plan_linear(sequence="model", sequence_mode="ring"),
        "sequence must be another axis",
    ),
    "no tokens": (lambda: plan_linear(sequence_mode="ring"), "must have an axis of tokens"),
    "axes": (lambda: plan_linear(mode="2d"), '"2d" with 2 axes'),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_of_plans_raises(name):
    call, words = MISUSE[name]
    with pytest.raises((LayoutError, ValueError), match=words):
        call()


def test_layers_that_devices_do_not_divide_are_replicated():
    plan = plan_of(size=4)
    assert "4 devices do not divide 2" in str(plan)
    assert_planned("Llama", plan, fs.make_mesh({"data": 1, "model": 4}))


def test_a_wrong_plan_does_not_pass_its_check(monkeypatch):
    """Results are not summed, and the backward of a psum is left out."""
    x = torch.randn(4, 8, dtype=F64)
    plan = fs.tensor_parallel(Block().to(F64), axis="model", sample=x)

    def first_shard(self, x):
        return x.shards[0] if isinstance(x, fs.Sharded) else x

    monkeypatch.setattr(type(plan), "full", first_shard)
    monkeypatch.setattr("fshard.array.communicate.Psum", type("Other", (), {}))

    with pytest.raises(LayoutError, match="the plan must compute what the model does"):
        plan.check(torch.randn(4, 8, dtype=F64))


# -- dropout and ignored labels --------------------------------------------------------------------

IGNORED = -100
PLANS = {
    "1d": ({"axis": "model"}, {"model": 2}),
    "2.5d": ({"axis": ("d", "i", "j"), "mode": "2.5d"}, {"d": 2, "i": 2, "j": 2}),
    "ring": ({"axis": "model", "sequence": "seq", "sequence_mode": "ring"}, {"seq": 2, "model": 2}),
}


def gradients_with_dropout(name):
    """Return loss and gradients of a planned model with dropout, by a row of `PLANS`.

    Without a name, it runs on one device.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Words(), Layer(dropout=0.3), nn.Linear(8, 12)).double()
    ids = token_ids(4)
    ignored_words = torch.tensor([[2], [0], [1], [2]])
    labels = ids.roll(-1, 1).masked_fill(torch.arange(4) < ignored_words, IGNORED)
    options, sizes = PLANS[name or "1d"]
    plan = fs.tensor_parallel(model, sample=ids, check=False, **options)
    apply, params, buffers = fs.functionalize(model, plan=plan)

    def loss_fn(params, batch):
        logits, _ = apply(params, buffers, batch[0])
        return plan.cross_entropy(logits, batch[1])

    if name is None:
        mesh = fs.make_mesh({"data": 1})
        arrays = fs.shard_params(params, P(), mesh=mesh)
        run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P())
    else:
        mesh = fs.make_mesh(sizes)
        arrays = fs.shard_params(params, plan.rules, mesh=mesh)
        run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P(), local=plan.axes)
    torch.manual_seed(1)
    loss, grads = run(arrays, (ids, labels))
    return loss, fs.unshard(grads)


@pytest.mark.parametrize("name", PLANS)
def test_planned_model_with_dropout_and_ignored_labels_equals_one_device(name):
    actual = gradients_with_dropout(name)

    expected = gradients_with_dropout(None)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


class FusedAttention(nn.Module):
    """A layer of a fused weight; `use` names what else is done with the product."""

    def __init__(self, use):
        super().__init__()
        self.use = use
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 4)
        self.gate = nn.Linear(12, 4)

    def forward(self, x):
        if self.use == "keywords":
            y = F.linear(input=x, weight=self.qkv.weight, bias=self.qkv.bias)
        else:
            y = self.qkv(x)
        if self.use == "operator":
            y = 2 * y + 1
        if self.use == "split last dim":
            y = y.reshape(*y.shape[:-1], 3, 4).flatten(-2)
        q, k, v = y.chunk(3, -1)
        result = self.out(q.relu() * k + v)
        if self.use == "other layer":
            result = result * self.gate(y).relu()
        if self.use == "length and dims":
            result = result * len(y) * y.dim()
        return result


@pytest.mark.parametrize(
    "use",
    ["keywords", "operator", "split last dim", "other layer", "length and dims"],
)
def test_uses_of_a_fused_product_are_exact(use):
    torch.manual_seed(0)
    plan = fs.tensor_parallel(FusedAttention(use), axis="model", sample=torch.randn(2, 3, 4))
    assert plan.layers["qkv.weight"].parts == (4, 4, 4)


def test_fused_weight_that_is_changed_in_place_raises():
    class Changed(FusedAttention):
        def forward(self, x):
            y = self.qkv(x)
            if not self.training:  # a plan follows the model in evaluation mode at last
                y.add_(1)
            q, k, v = y.chunk(3, -1)
            return self.out(q.relu() * k + v)

    model = Changed("").eval()
    with pytest.raises(LayoutError, match="add_ must not change a fused weight"):
        fs.tensor_parallel(model, axis="model", sample=torch.randn(2, 3, 4))


def test_plan_made_by_each_device_of_a_run_is_that_of_one_outside():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    sample = torch.randn(2, 4)

    def plan():
        return str(fs.tensor_parallel(model, axis="model", sample=sample))

    mesh = fs.make_mesh({"data": 2, "model": 2})
    assert fs.run(plan, mesh=mesh) == [plan()] * 4
