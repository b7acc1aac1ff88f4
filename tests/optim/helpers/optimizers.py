"""What the tests of optimizers share: tables of optimizers, trees of parameters with gradients, and runs."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st

import fshard as fs
from fshard import optim
from fshard.mesh.layout import flatten
from fshard.optim.contract import copied


class Layer(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor


WHEN = optim.schedules.warmup_cosine(0.1, warmup=2, steps=6)

# name -> (how ours is made, torch's class, the options of both)
TWINS = {
    "sgd": (optim.sgd, torch.optim.SGD, {"lr": 0.1}),
    "sgd, decay": (optim.sgd, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd, momentum": (
        optim.sgd,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "maximize": True},
    ),
    "sgd, nesterov": (
        optim.sgd,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True},
    ),
    "adam": (optim.adam, torch.optim.Adam, {"lr": 0.01}),
    "adam, decay": (
        optim.adam,
        torch.optim.Adam,
        {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.1, "maximize": True},
    ),
    "adam, amsgrad": (optim.adam, torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (optim.adamw, torch.optim.AdamW, {"lr": 0.01}),
    "adamw, amsgrad": (
        optim.adamw,
        torch.optim.AdamW,
        {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "maximize": True},
    ),
    "adafactor": (optim.adafactor, torch.optim.Adafactor, {"lr": 0.01}),
    "adafactor, decay": (
        optim.adafactor,
        torch.optim.Adafactor,
        {
            "lr": 0.1,
            "beta2_decay": -0.5,
            "eps": (1e-6, 1e-2),
            "d": 1.5,
            "weight_decay": 0.1,
            "maximize": True,
        },
    ),
    "muon": (optim.muon, torch.optim.Muon, {"lr": 0.01}),
    "muon, plain": (
        optim.muon,
        torch.optim.Muon,
        {"lr": 0.1, "nesterov": False, "momentum": 0.9, "weight_decay": 0.0},
    ),
}
FUSED = (optim.sgd, optim.adam, optim.adamw)
FOREIGN = {
    torch.optim.Adadelta: {},
    torch.optim.Adagrad: {"initial_accumulator_value": 0.5, "lr_decay": 0.1},
    torch.optim.Adam: {"foreach": True, "amsgrad": True},
    torch.optim.AdamW: {"fused": True},
    torch.optim.Adamax: {},
    torch.optim.ASGD: {"t0": 2},
    torch.optim.NAdam: {},
    torch.optim.RAdam: {"lr": 0.05},
    torch.optim.RMSprop: {"momentum": 0.5, "centered": True},
    torch.optim.Rprop: {},
    torch.optim.SGD: {
        "momentum": 0.9,
        "dampening": 0.5,
        "lr": 0.1,
        "foreach": True,
        "nesterov": False,
    },
}

# Every optimizer and combinator: name -> optimizer. What holds for all is tested by walking this table.
ELEMENTWISE = {
    "sgd": optim.sgd(0.1, fused=False),
    "sgd, nesterov": optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=False),
    "adam": optim.adam(WHEN, weight_decay=0.1, fused=False),
    "adamw": optim.adamw(WHEN, amsgrad=True, fused=False),
    "lion": optim.lion(0.01, weight_decay=0.1),
    "scale": optim.scale(WHEN),
    "clip_by_value": optim.clip_by_value(0.5),
    "add_decayed_weights": optim.add_decayed_weights(0.1),
    "chain": optim.chain(
        optim.clip_by_value(0.5), optim.add_decayed_weights(0.1), optim.sgd(0.1, fused=False)
    ),
    "chain of transformations": optim.chain(optim.adamw(0.1), optim.scale(0.5)),
    "masked": optim.masked(optim.adamw(0.1, fused=False), lambda path, leaf: leaf.ndim > 1),
    "masked transformation": optim.masked(optim.scale(-1.0), lambda path, leaf: leaf.ndim > 1),
    "by_label": optim.by_label(
        {"a": optim.adam(0.1, fused=False), "b": optim.sgd(0.1)},
        lambda path, leaf: "a" if leaf.ndim > 1 else "b",  # ties must have one label
        every=False,
    ),
    "skip_if_not_finite": optim.skip_if_not_finite(optim.adamw(0.1, fused=False)),
    "accumulate": optim.accumulate(optim.adamw(0.1, fused=False), every=2),
    "ema": optim.ema(optim.adamw(0.1, fused=False), 0.9),
    "with_master_weights": optim.with_master_weights(optim.adamw(0.1, fused=False)),
    "from_torch": optim.from_torch(torch.optim.NAdam, lr=WHEN, foreach=False),
    "nested": optim.ema(
        optim.skip_if_not_finite(
            optim.accumulate(
                optim.with_master_weights(
                    optim.chain(optim.clip_by_value(1.0), optim.adam(0.1, fused=False))
                ),
                2,
            )
        ),
        0.5,
    ),
}
WHOLE = {
    "clip_by_global_norm": optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(0.1, fused=False)
    ),
    "lamb": optim.lamb(0.1, weight_decay=0.1),
    "adafactor": optim.adafactor(0.1),
    "muon": optim.by_label(
        {"muon": optim.muon(0.1), "adamw": optim.adamw(0.1, fused=False)},
        lambda path, leaf: "muon" if leaf.ndim == 2 else "adamw",
        every=False,
    ),
    "shampoo": optim.shampoo(0.1, momentum=0.9),
}
ALL = {**ELEMENTWISE, **WHOLE}
# Everything that takes an optimizer inside: name -> wrapped
WRAPPERS = {
    "chain": lambda opt: optim.chain(
        optim.add_decayed_weights(0.1), optim.clip_by_value(0.25), opt
    ),
    "masked": lambda opt: optim.masked(opt, lambda path, leaf: leaf.ndim > 0),
    "by_label": lambda opt: optim.by_label(
        {"own": opt, "other": optim.sgd(0.1, fused=False)},
        lambda path, leaf: "other" if leaf.ndim == 1 else "own",
        every=False,
    ),
    "accumulate": lambda opt: optim.accumulate(opt, 2),
    "skip_if_not_finite": optim.skip_if_not_finite,
    "loss_scaled": optim.loss_scaled,
    "ema": lambda opt: optim.ema(opt, 0.5),
    "with_master_weights": optim.with_master_weights,
}


# -- trees --------------------------------------------------------------------------------------------------------

SHAPES = [(), (0,), (1,), (3,), (5,), (2, 3), (0, 2), (7, 5), (17,), (2, 2, 3)]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def tensor(shape, dtype, seed):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@st.composite
def trees(draw, dtypes=FLOATS):
    """A nest of containers over tensors, and a gradient for each, sometimes None, for each of three steps."""
    seeds = st.integers(0, 2**20)
    one = st.builds(tensor, st.sampled_from(SHAPES), st.sampled_from(dtypes), seeds)
    params = draw(
        st.recursive(
            one,
            lambda inner: st.one_of(
                st.lists(inner, min_size=1, max_size=3),
                st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
                st.builds(Layer, inner, inner),
                st.tuples(inner),
            ),
            max_leaves=5,
        )
    )
    at = optim.leaves.Leaves.of(params)
    steps = [
        at.rebuild(
            [
                None if draw(st.integers(0, 4)) == 0 else tensor(x.shape, x.dtype, draw(seeds))
                for x in at.leaves
            ]
        )
        for _ in range(3)
    ]
    return params, steps


def example(dtype=torch.float32):
    """A fixed tree: nested, 0-d, empty, odd sizes; five gradients, some of them None."""
    params = {
        "a": [tensor((7, 5), dtype, 0), Layer(tensor((33, 17), dtype, 1), tensor((17,), dtype, 2))],
        "b": (tensor((), dtype, 3), tensor((0, 3), dtype, 4)),
        "c": {"d": tensor((5,), dtype, 5)},
    }
    at = optim.leaves.Leaves.of(params)
    steps = [
        at.rebuild([tensor(x.shape, dtype, 10 * t + i) for i, x in enumerate(at.leaves)])
        for t in range(1, 6)
    ]
    return params, steps


def leaves_of(tree):
    return flatten(tree)[0]


def same(one, other):
    """Whether two trees have the same structure, types, dtypes and bits (NaN equals NaN)."""
    (a, at), (b, bt) = flatten(one), flatten(other)
    return at == bt and all(
        x.dtype == y.dtype
        and x.shape == y.shape
        and bool(((x == y) | (x.isnan() & y.isnan())).all())
        for x, y in zip(a, b, strict=True)
    )


def by_update(opt, params, steps):
    state = opt.init(params)
    for grads in steps:
        updates, state = opt.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def by_step(opt, params, steps):
    params = copied(params)
    state = opt.init(params)
    for grads in steps:
        params, state = optim.step_of(opt)(copied(grads), state, params)
    return params, state


def by_torch(cls, params, steps, schedule=None, **options):
    params = copied(params)
    own = [torch.nn.Parameter(x) for x in leaves_of(params)]
    optimizer = cls(own, **options)
    for count, grads in enumerate(steps):
        if schedule:
            optimizer.param_groups[0]["lr"] = schedule(count)
        for p, g in zip(own, optim.leaves.Leaves.of(grads).leaves, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()
    return [p.detach() for p in own]


def flat_tree(seed=0, dtype=torch.float32):
    shapes = {"a": (7, 5), "b": (), "c": (0, 3), "d": (9,)}
    return {name: tensor(shape, dtype, seed + i) for i, (name, shape) in enumerate(shapes.items())}


def put_tree(tree, layout):
    at = optim.leaves.Leaves.of(tree)
    return at.rebuild([x if x is None else fs.device_put(x, layout) for x in at.leaves])


def skeleton(tree):
    leaves, structure = flatten(tree)
    return structure, [(type(x), x.dtype, x.shape) for x in leaves]


def suited(make, params, steps):
    """Leave out what torch's class does not take."""
    if make is optim.muon:
        return params["a"][0], [grads["a"][0] for grads in steps]
    if make is optim.adafactor:
        return {**params, "b": params["b"][:1]}, [{**grads, "b": grads["b"][:1]} for grads in steps]
    return params, steps


# -- optimizers drawn at random ---------------------------------------------------------------------------------------

WRITERS = {name: opt for name, opt in ALL.items() if opt.step is not None} | {
    cls.__name__: optim.from_torch(cls, **options)
    for cls, options in FOREIGN.items()
    # eta and mu_product of these two are of float32, also for float64 parameters
    if not options.get("fused") and cls not in (torch.optim.ASGD, torch.optim.NAdam)
}
AROUND = {
    "clip_by_global_norm": lambda opt: optim.chain(optim.clip_by_global_norm(0.5), opt),
    **{
        name: wrap for name, wrap in WRAPPERS.items() if name != "loss_scaled"
    },  # must be the outermost
}


@st.composite
def optimizers(draw):
    """An optimizer of the tables that takes leaves of any dtype, with up to three combinators around it."""
    name = draw(st.sampled_from(sorted(WRITERS)))
    opt = optim.by_label(
        {
            "own": WRITERS[name],
            "half": optim.with_master_weights(WRITERS[name]),  # in float16 an eps of 1e-8 is 0
            "complex": WRITERS[name if name in ELEMENTWISE else "sgd"],
        },
        lambda path, leaf: (
            "complex" if leaf.dtype.is_complex else "half" if leaf.dtype == torch.float16 else "own"
        ),
        every=False,
    )
    for wrap in draw(st.lists(st.sampled_from(sorted(AROUND)), max_size=3)):
        opt = AROUND[wrap](opt)
    return opt
