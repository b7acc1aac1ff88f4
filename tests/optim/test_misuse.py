"""Wrong arguments, layouts and classes of optimizers raise where they are passed.

One error names all of them, and the fix. A row of a table is a call, and a text of the error.
"""

import re
from dataclasses import replace

import pytest
import torch
from optree import tree_map
from torch import nn

import fshard as fs
from fshard import P, optim
from fshard.errors import FshardError
from fshard.optim import schedules
from tests.optim.helpers.optimizers import WHOLE, WRAPPERS, put_tree
from tests.optim.helpers.per_device_rules import ROWS, momentum_init
from tests.optim.helpers.torch_classes import Lars, groups_of, net

NAN = float("nan")
INF = float("inf")
MESH = fs.make_mesh({"data": 2})
LABELS = {"w": "fast", "b": "slow"}
SGDS = {"fast": optim.sgd(0.5), "slow": optim.sgd(0.25)}
OF_LABELS = ("by_label: labels", "labels of parameters", "by_label(opts, labels).")
OF_MASK = ("masked: mask", "bools of parameters", "masked(opt, mask).")
RANGES = [
    (
        lambda: optim.adam(-1.0, eps=-1.0),
        "adam: lr must be in [0, inf); got -1.0. eps must be in [0, inf); got -1.0.",
    ),
    (
        lambda: optim.sgd(NAN, momentum=-1.0),
        "lr must be in [0, inf); got nan. momentum must be in [0, inf); got -1.0.",
    ),
    (lambda: optim.adamw(betas=(2.0, 0.9)), "adamw: betas must be in [0, 1); got (2.0, 0.9)."),
    (lambda: optim.lion(betas=(0.9, 1.0)), "lion: betas must be in [0, 1); got (0.9, 1.0)."),
    (lambda: optim.lamb(weight_decay=-0.1), "lamb: weight_decay must be in [0, inf); got -0.1."),
    (lambda: optim.shampoo(eps=-1.0), "shampoo: eps must be in [0, inf); got -1.0."),
    (lambda: optim.clip_by_value(-1.0), "clip_by_value: limit must be in [0, inf]; got -1.0."),
    (
        lambda: optim.clip_by_global_norm(1.0, 0),
        "clip_by_global_norm: order must be in (0, inf]; got 0.",
    ),
    (lambda: optim.ema(optim.sgd(), 1.5), "ema: decay must be in [0, 1]; got 1.5."),
    (lambda: optim.accumulate(optim.sgd(), 0), "accumulate: every must be in [1, inf); got 0."),
    (lambda: optim.scale(NAN), "scale: factor must be in (-inf, inf); got nan."),
    (
        lambda: optim.add_decayed_weights(INF),
        "add_decayed_weights: decay must be in (-inf, inf); got inf.",
    ),
    (
        lambda: optim.loss_scaled(optim.sgd(), growth=1.0, interval=0, initial=0.5),
        "loss_scaled: growth must be in (1, inf); got 1.0. interval must be in [1, inf); got 0. "
        "smallest <= initial <= largest must hold, above 0; got 1.0, 0.5, 16777216.0.",
    ),
    (
        lambda: schedules.polynomial(1.0, 0.0, -1, power=-1.0),
        "[1, inf); got -1. power must be in [0, inf); got -1.0.",
    ),
    (lambda: schedules.cosine(1.0, 0.0, 0), "schedules.cosine: steps must be in [1, inf); got 0."),
    (
        lambda: schedules.step(1.0, every=0, factor=NAN),
        "(-inf, inf); got nan. every must be in [1, inf); got 0.",
    ),
    (
        lambda: schedules.warmup_cosine(1.0, warmup=5, steps=3),
        "warmup_cosine: warmup must be in [0, 3]; got 5.",
    ),
    (
        lambda: schedules.warmup_cosine(1.0, warmup=-1, steps=0),
        "got -1. steps must be in [1, inf); got 0.",
    ),
    (
        lambda: schedules.linear(1.0, INF, INF),
        "end must be in (-inf, inf); got inf. steps must be in [1, inf); got inf",
    ),
    (
        lambda: schedules.inverse_sqrt(1.0, warmup=-1),
        "schedules.inverse_sqrt: warmup must be in [0, inf); got -1.",
    ),
    (
        lambda: schedules.one_cycle(1.0, steps=3, rise=1.5, end_divisor=0),
        "[0, 1]; got 1.5. end_divisor must be in (0",
    ),
]

TYPES = [
    (lambda: optim.lion("0.1"), "lr must be a number; got '0.1'."),
    (lambda: optim.adam(betas=0.9), "betas must be two numbers; got 0.9."),
    (lambda: optim.lamb(betas=(0.9,)), "betas must be two numbers; got (0.9,)."),
    (lambda: optim.accumulate(optim.sgd(), 2.5), "every must be an integer; got 2.5."),
    (lambda: schedules.step(1.0, every=None), "every must be a number; got None."),
    (
        lambda: optim.by_label([optim.sgd()], 0),
        "by_label: opts must be a dict of optimizers by label; got list.",
    ),
    *[
        (call, f"{name} must be {kind}; got an optimizer. The order is {order}")
        for call, name, kind, order in [
            (lambda: optim.by_label(LABELS, SGDS), *OF_LABELS),
            (lambda: optim.by_label(lambda path, leaf: "fast", SGDS), *OF_LABELS),
            (lambda: optim.by_label("fast", SGDS), *OF_LABELS),
            (lambda: optim.by_label(SGDS, SGDS), *OF_LABELS),
            (lambda: optim.by_label(SGDS, {"w": [SGDS["fast"]]}), *OF_LABELS),
            (lambda: optim.by_label(SGDS, SGDS["fast"]), *OF_LABELS),
            (lambda: optim.masked({"w": True, "b": False}, optim.sgd()), *OF_MASK),
            (lambda: optim.masked(lambda path, leaf: True, optim.sgd()), *OF_MASK),
            (lambda: optim.masked(optim.sgd(), optim.sgd()), *OF_MASK),
        ]
    ],
]
ARGUMENTS = [*RANGES, *TYPES]


WORDS_OF_TYPES = ("a number", "two numbers", "an integer", "a dict")


@pytest.mark.parametrize(("call", "text"), ARGUMENTS, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments_raise_with_all(call, text):
    is_type = any(words in text for words in WORDS_OF_TYPES)
    error = TypeError if is_type else optim.OptimizerError

    with pytest.raises(error, match=re.escape(text)):
        call()


def test_schedules_and_tensors_are_not_validated():
    for lr in (lambda count: -1.0, torch.tensor(-1.0)):
        opt = optim.sgd(lr, fused=False)
        params = [torch.ones(1)]

        after, _ = opt.step([torch.ones(1)], opt.init(params), params)

        assert after[0].item() == 2.0


# -- layouts, ties and classes ---------------------------------------------------------------------


def steps_on_halves():
    params = [torch.ones(64, dtype=torch.bfloat16)]
    opt = optim.sgd(0.1, fused=True)
    opt.step(params, opt.init(params), params)


def tied(opt):
    x = torch.ones(1)
    fixed = nn.Parameter(torch.ones(1), requires_grad=False)
    opt.init({"emb": x, "fixed": fixed, "head": [x, fixed]})


def two_gradients():
    w = torch.ones(2)
    params = {"a": w, "b": w}
    grads = {"a": torch.ones(2), "b": torch.ones(2)}
    opt = optim.sgd(0.1)
    opt.update(grads, opt.init(params), params)


def norm_of_unreduced():
    unreduced = fs.Layout(MESH, P(unreduced="data"))
    optim.global_norm({"w": fs.device_put(torch.ones(2), unreduced)})


def norm_of_two_meshes():
    on_data = fs.Layout(MESH, P("data"))
    on_model = fs.Layout(fs.make_mesh({"model": 2}), P("model"))
    x = torch.ones(2)
    optim.global_norm([fs.device_put(x, on_data), fs.device_put(x, on_model)])


def shards_for(name):
    flat = fs.Layout(MESH, P.flat("data"))
    WHOLE[name].init(put_tree({"a": torch.ones(3, 2)}, flat))


def pair(init, update, **options):
    """Take a step of a pair of functions, at owners."""
    full = {"a": torch.ones(4, 2), "b": torch.ones(3), "c": torch.ones(1)}
    params = fs.shard_params(full, P(), mesh=MESH)
    opt = optim.Optimizer(init, update, **options)
    opt = fs.partition_optimizer(opt, mesh=MESH, axis="data", stage=1)
    grads = {}
    for name, x in params.items():
        grads[name] = fs.device_put(full[name], opt.gradients(x.layout))
    opt.update(grads, opt.init(params), params)


def unchanged(grads, state, params):
    return grads, state


def list_of_leaves(params):
    return [x for x in params.values() if x is not None]


def updates_in_a_list(grads, state, params):
    return [*grads.values()], state


def another_state(grads, state, params):
    return grads, {"m": state}


def state_of_another_shape(grads, state, params):
    return grads, tree_map(lambda x: torch.cat([x, x]), state)


def rows_on_shards(opt):
    params = fs.shard_params({"w": torch.ones(4, 2)}, P("data"), mesh=MESH)
    optim.chain(opt).init(params)


def boosted(opt_of, prepare=lambda opt: None, times=1):
    """Boost an optimizer with a model, on one device; with `times`, also with other models."""

    def main():
        model = net()
        opt = opt_of(groups_of(model))
        prepare(opt)
        fs.Booster().boost(model, opt)
        for _ in range(times - 1):
            fs.Booster().boost(net(), opt)

    fs.run(main, mesh=fs.make_mesh({"data": 1}))


def sgd_with_a_hook():
    def register(opt):
        opt.register_step_pre_hook(lambda *_: None)

    boosted(lambda groups: torch.optim.SGD(groups, lr=0.1), register)


def outside_of_run():
    model = net()
    booster = fs.Booster(plugin=fs.ZeroPlugin(stage=1, mesh=MESH))
    booster.init(model, Lars(groups_of(model)), lambda y, _: y.square().mean())


BY_TIES = optim.by_label(
    {True: optim.sgd(), False: optim.adamw()}, {"emb": True, "fixed": True, "head": False}
)
MASK_OF_TIES = optim.masked(optim.scale(2.0), lambda path, x: "head" not in path)
NEEDS_FULL_MATRICES = (
    r"{} needs full matrices(?s:.)*params\[\"a\"\] is Sharded.*\nGive each matrix to one device"
)
CLASSES_AND_LAYOUTS = {
    "a rate of torch's": (lambda: optim.muon(-1), "Learning rate should be >= 0 but is: -1"),
    "an option of torch's": (
        lambda: optim.from_torch(torch.optim.SGD, lr=-1.0),
        "Invalid learning rate",
    ),
    "LBFGS": (lambda: optim.from_torch(torch.optim.LBFGS), "calls the loss function several times"),
    "SparseAdam": (lambda: optim.from_torch(torch.optim.SparseAdam), "sparse gradients"),
    "an instance": (
        lambda: optim.from_torch(torch.optim.SGD([torch.ones(1)])),
        "must be given a class of torch.optim",
    ),
    "a class of one's own": (
        lambda: optim.from_torch(Lars),
        r"from_torch\(Lars\) must be given a class",
    ),
    "nesterov": (lambda: optim.sgd(0.1, nesterov=True), "nesterov needs momentum"),
    "a fused kernel": (
        steps_on_halves,
        "fused=True needs contiguous parameters of a dtype that .*; got torch.bfloat16 on cpu. "
        "Leave",
    ),
    "labels of ties": (
        lambda: tied(BY_TIES),
        r'params\["emb"\] and params\["head"\]\[0\] are one \(tied\), labelled True and False',
    ),
    "a mask of ties": (
        lambda: tied(MASK_OF_TIES),
        "are one",
    ),
    "gradients of ties": (two_gradients, r'params\["a"\] and params\["b"\]'),
    "an unreduced norm": (
        norm_of_unreduced,
        r"sums that are not made yet would be wrong: w is Sharded f32",
    ),
    "a norm of two meshes": (norm_of_two_meshes, "must be on one mesh"),
    "vectors": (
        lambda: optim.muon().init({"a": torch.ones(2, 2), "b": torch.ones(2)}),
        r'params\["b"\]: it has 1 dims, not 2',
    ),
    "no parts": (lambda: optim.muon(parts=(4, 0)), "parts must be positive"),
    "a dim of parts": (lambda: optim.muon(parts_dim=2), "parts must be positive"),
    "parts": (
        lambda: optim.muon(parts=5).init({"qkv": torch.ones(12, 4)}),
        r'params\["qkv"\]: its dim 0 has 12 elements',
    ),
    "shards for adafactor": (
        lambda: shards_for("adafactor"),
        NEEDS_FULL_MATRICES.format("adafactor"),
    ),
    "shards for shampoo": (
        lambda: shards_for("shampoo"),
        NEEDS_FULL_MATRICES.format("shampoo"),
    ),
    "shards for muon": (lambda: shards_for("muon"), NEEDS_FULL_MATRICES.format("muon")),
}

PAIRS = {
    "a state of a list": (
        lambda: pair(list_of_leaves, unchanged),
        "init must make the same state on all devices",
    ),
    "a state of a vector": (
        lambda: pair(lambda params: torch.zeros(3), unchanged),
        "must be numbers, but for subtrees",
    ),
    "updates in a list": (
        lambda: pair(momentum_init, updates_in_a_list),
        "updates must be a tree of the structure of params",
    ),
    "another state": (
        lambda: pair(momentum_init, another_state),
        "state must be a tree of the structure of params",
    ),
    "another shape": (
        lambda: pair(momentum_init, state_of_another_shape),
        "state of a parameter must keep their shape",
    ),
    "shards": (lambda: rows_on_shards(ROWS), 'without sharding="flat" needs full matrices'),
    "rows of shards": (
        lambda: rows_on_shards(replace(ROWS, sharding="flat")),
        "state of an elementwise optimizer must have the shape",
    ),
}

INSTANCES = {
    "outside of fs.run": (
        outside_of_run,
        "Lars, an optimizer of your own class, must step on one device; got",
    ),
    "hooks": (
        sgd_with_a_hook,
        "SGD: hooks of its steps are not called",
    ),
    "boosted twice": (
        lambda: boosted(Lars, times=2),
        "tensors that are no parameters of the model",
    ),
}
MISUSE = {**CLASSES_AND_LAYOUTS, **PAIRS, **INSTANCES}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_raises_and_names_the_fix(name):
    call, words = MISUSE[name]
    with pytest.raises((FshardError, ValueError), match=words):
        call()


@pytest.mark.parametrize("name", [*WRAPPERS, "partition_optimizer"])
def test_nested_partitioned_or_scaled_optimizer_raises(name):
    def partition(opt):
        return fs.partition_optimizer(opt, mesh=MESH, axis="data", stage=3)

    wrap = WRAPPERS.get(name, partition)

    message = f"{name}: a partitioned optimizer must not be nested, since "
    with pytest.raises(optim.OptimizerError, match=message):
        wrap(partition(optim.sgd(0.1)))
    with pytest.raises(optim.OptimizerError, match=f"{name}: SGD is no pair of init and update"):
        wrap(torch.optim.SGD)
    if name in WRAPPERS:
        message = f"{name}: loss_scaled must not be nested, since .*Put one"
        with pytest.raises(optim.OptimizerError, match=message):
            wrap(optim.loss_scaled(optim.sgd(0.5)))
