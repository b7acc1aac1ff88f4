"""Tables of optimizers, trees of parameters with gradients, and runs that the tests compare.

`by_update` and `by_step` are the two ways to run an optimizer, `by_torch` is the oracle.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

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


class Options(NamedTuple):
    """An optimizer and torch's class, which are equal with these options."""

    make: Callable
    torch_class: type
    options: dict[str, Any]


def sgd(**options):
    return Options(optim.sgd, torch.optim.SGD, options)


def adam(**options):
    return Options(optim.adam, torch.optim.Adam, options)


def adamw(**options):
    return Options(optim.adamw, torch.optim.AdamW, options)


def adafactor(**options):
    return Options(optim.adafactor, torch.optim.Adafactor, options)


def muon(**options):
    return Options(optim.muon, torch.optim.Muon, options)


TWINS = {
    "sgd": sgd(lr=0.1),
    "sgd, decay": sgd(lr=0.1, weight_decay=0.1),
    "sgd, momentum": sgd(lr=0.1, momentum=0.9, dampening=0.2, maximize=True),
    "sgd, nesterov": sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, maximize=True),
    "adam": adam(lr=0.01),
    "adam, decay": adam(lr=0.01, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.1, maximize=True),
    "adam, amsgrad": adam(lr=0.01, amsgrad=True),
    "adamw": adamw(lr=0.01),
    "adamw, amsgrad": adamw(lr=0.01, weight_decay=0.1, amsgrad=True, maximize=True),
    "adafactor": adafactor(lr=0.01),
    "adafactor, decay": adafactor(
        lr=0.1, beta2_decay=-0.5, eps=(1e-6, 1e-2), d=1.5, weight_decay=0.1, maximize=True
    ),
    "muon": muon(lr=0.01),
    "muon, plain": muon(lr=0.1, nesterov=False, momentum=0.9, weight_decay=0.0),
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


# Every optimizer and combinator: name -> optimizer. What holds for all is tested by walking this
# table.
def is_matrix(path, leaf):
    return leaf.ndim == 2


def has_rows(path, leaf):
    return leaf.ndim > 1


PLAIN_SGD = optim.sgd(0.1, fused=False)
PLAIN_ADAM = optim.adam(0.1, fused=False)
PLAIN_ADAMW = optim.adamw(0.1, fused=False)


def nested():
    """Return five wrappers around each other."""
    opt = optim.chain(optim.clip_by_value(1.0), PLAIN_ADAM)
    opt = optim.with_master_weights(opt)
    opt = optim.accumulate(opt, 2)
    opt = optim.skip_if_not_finite(opt)
    return optim.ema(opt, 0.5)


ELEMENTWISE = {
    "sgd": PLAIN_SGD,
    "sgd, nesterov": optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=False),
    "adam": optim.adam(WHEN, weight_decay=0.1, fused=False),
    "adamw": optim.adamw(WHEN, amsgrad=True, fused=False),
    "lion": optim.lion(0.01, weight_decay=0.1),
    "scale": optim.scale(WHEN),
    "clip_by_value": optim.clip_by_value(0.5),
    "add_decayed_weights": optim.add_decayed_weights(0.1),
    "chain": optim.chain(optim.clip_by_value(0.5), optim.add_decayed_weights(0.1), PLAIN_SGD),
    "chain of transformations": optim.chain(optim.adamw(0.1), optim.scale(0.5)),
    "masked": optim.masked(PLAIN_ADAMW, has_rows),
    "masked transformation": optim.masked(optim.scale(-1.0), has_rows),
    # every=False: ties must have one label
    "by_label": optim.by_label({True: PLAIN_ADAM, False: optim.sgd(0.1)}, has_rows, every=False),
    "skip_if_not_finite": optim.skip_if_not_finite(PLAIN_ADAMW),
    "accumulate": optim.accumulate(PLAIN_ADAMW, every=2),
    "ema": optim.ema(PLAIN_ADAMW, 0.9),
    "with_master_weights": optim.with_master_weights(PLAIN_ADAMW),
    "from_torch": optim.from_torch(torch.optim.NAdam, lr=WHEN, foreach=False),
    "nested": nested(),
}
WHOLE = {
    "clip_by_global_norm": optim.chain(optim.clip_by_global_norm(1.0), PLAIN_ADAMW),
    "lamb": optim.lamb(0.1, weight_decay=0.1),
    "adafactor": optim.adafactor(0.1),
    "muon": optim.by_label({True: optim.muon(0.1), False: PLAIN_ADAMW}, is_matrix, every=False),
    "shampoo": optim.shampoo(0.1, momentum=0.9),
}
ALL = {**ELEMENTWISE, **WHOLE}


def in_chain(opt):
    return optim.chain(optim.add_decayed_weights(0.1), optim.clip_by_value(0.25), opt)


def except_for_vectors(opt):
    opts = {True: PLAIN_SGD, False: opt}
    return optim.by_label(opts, lambda path, leaf: leaf.ndim == 1, every=False)


# Everything that takes an optimizer inside: name -> wrapped
WRAPPERS = {
    "chain": in_chain,
    "masked": lambda opt: optim.masked(opt, lambda path, leaf: leaf.ndim > 0),
    "by_label": except_for_vectors,
    "accumulate": lambda opt: optim.accumulate(opt, 2),
    "skip_if_not_finite": optim.skip_if_not_finite,
    "loss_scaled": optim.loss_scaled,
    "ema": lambda opt: optim.ema(opt, 0.5),
    "with_master_weights": optim.with_master_weights,
}


# -- trees -----------------------------------------------------------------------------------------

SHAPES = [(), (0,), (1,), (3,), (5,), (2, 3), (0, 2), (7, 5), (17,), (2, 2, 3)]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def tensor(shape, dtype, seed):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@st.composite
def trees(draw, dtypes=FLOATS):
    """Draw a nest of containers over tensors, and for three steps a gradient of each, or None."""
    seeds = st.integers(0, 2**20)
    leaf = st.builds(tensor, st.sampled_from(SHAPES), st.sampled_from(dtypes), seeds)

    def containers(inner):
        lists = st.lists(inner, min_size=1, max_size=3)
        dicts = st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
        return st.one_of(lists, dicts, st.builds(Layer, inner, inner), st.tuples(inner))

    params = draw(st.recursive(leaf, containers, max_leaves=5))
    nest = optim.leaves.Leaves.of(params)
    steps = []
    for _ in range(3):
        grads = []
        for x in nest.leaves:
            has_gradient = draw(st.integers(0, 4)) > 0
            grads.append(tensor(x.shape, x.dtype, draw(seeds)) if has_gradient else None)
        steps.append(nest.rebuild(grads))
    return params, steps


def example(dtype=torch.float32):
    """Return a fixed tree and five gradients: nested, with 0-d, empty and odd tensors."""
    layer = Layer(tensor((33, 17), dtype, 1), tensor((17,), dtype, 2))
    params = {
        "a": [tensor((7, 5), dtype, 0), layer],
        "b": (tensor((), dtype, 3), tensor((0, 3), dtype, 4)),
        "c": {"d": tensor((5,), dtype, 5)},
    }
    nest = optim.leaves.Leaves.of(params)
    steps = []
    for step in range(1, 6):
        grads = [tensor(x.shape, dtype, 10 * step + i) for i, x in enumerate(nest.leaves)]
        steps.append(nest.rebuild(grads))
    return params, steps


def leaves_of(tree):
    return flatten(tree)[0]


def same(one, other):
    """Return whether two trees have equal structures, dtypes and bits. NaN equals NaN."""
    xs, structure = flatten(one)
    ys, other_structure = flatten(other)
    if structure != other_structure:
        return False

    for x, y in zip(xs, ys, strict=True):
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        is_equal = (x == y) | (x.isnan() & y.isnan())
        if not is_equal.all():
            return False
    return True


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
    """Step with torch's class, on clones; return the leaves."""
    leaves = [torch.nn.Parameter(x) for x in leaves_of(copied(params))]
    optimizer = cls(leaves, **options)
    for count, grads in enumerate(steps):
        if schedule:
            optimizer.param_groups[0]["lr"] = schedule(count)
        for p, g in zip(leaves, optim.leaves.Leaves.of(grads).leaves, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()
    return [p.detach() for p in leaves]


def flat_tree(seed=0, dtype=torch.float32):
    return {
        "a": tensor((7, 5), dtype, seed),
        "b": tensor((), dtype, seed + 1),
        "c": tensor((0, 3), dtype, seed + 2),
        "d": tensor((9,), dtype, seed + 3),
    }


def put_tree(tree, layout):
    nest = optim.leaves.Leaves.of(tree)
    arrays = [x if x is None else fs.device_put(x, layout) for x in nest.leaves]
    return nest.rebuild(arrays)


def skeleton(tree):
    leaves, structure = flatten(tree)
    return structure, [(type(x), x.dtype, x.shape) for x in leaves]


def suited(make, params, steps):
    """Leave out what torch's class does not take."""
    if make is optim.muon:
        return params["a"][0], [grads["a"][0] for grads in steps]
    if make is optim.adafactor:
        params = {**params, "b": params["b"][:1]}
        return params, [{**grads, "b": grads["b"][:1]} for grads in steps]
    return params, steps


# -- optimizers drawn at random --------------------------------------------------------------------

WRITERS = {name: opt for name, opt in ALL.items() if opt.step is not None}
for torch_class, torch_options in FOREIGN.items():
    # eta and mu_product of these two are of float32, also for float64 parameters
    has_float32_state = torch_class in (torch.optim.ASGD, torch.optim.NAdam)
    if not torch_options.get("fused") and not has_float32_state:
        WRITERS[torch_class.__name__] = optim.from_torch(torch_class, **torch_options)

AROUND = {"clip_by_global_norm": lambda opt: optim.chain(optim.clip_by_global_norm(0.5), opt)}
AROUND |= {name: wrap for name, wrap in WRAPPERS.items() if name != "loss_scaled"}  # outermost only


def kind_of(path, leaf):
    if leaf.dtype.is_complex:
        return "complex"
    return "half" if leaf.dtype == torch.float16 else "real"


@st.composite
def optimizers(draw):
    """Draw an optimizer of the tables for leaves of any dtype, in up to three wrappers."""
    name = draw(st.sampled_from(sorted(WRITERS)))
    opts = {
        "real": WRITERS[name],
        "half": optim.with_master_weights(WRITERS[name]),  # in float16 an eps of 1e-8 is 0
        "complex": WRITERS[name if name in ELEMENTWISE else "sgd"],
    }
    opt = optim.by_label(opts, kind_of, every=False)
    for wrapper in draw(st.lists(st.sampled_from(sorted(AROUND)), max_size=3)):
        opt = AROUND[wrapper](opt)
    return opt
