"""Whatever the tree of parameters, the mesh, the stage, the optimizer and the options are: a
sharded run is the run on one device.
"""

from functools import partial
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten
from fshard.mesh.layout.arithmetic import ravel
from fshard.optim.leaves import trainable
from fshard.testing import certify
from fshard.testing.strategies import axis_subsets, meshes
from tests.helpers.sampled import examples
from tests.optim.helpers.optimizers import optimizers
from tests.transforms.helpers.models import FLOATS, models

STAGES = st.sampled_from((0, 1, 2, 3))
HALVES = (torch.bfloat16, torch.float16)
COMPLEX = (*FLOATS, torch.complex64, torch.complex128)
SGD = fs.optim.sgd(0.5, fused=False)
HOW = {
    "unit": st.sampled_from((None, "**", 1, 64)),
    "accumulate": st.sampled_from((1, 2)),
    "reduce_once": st.booleans(),
    "donate": st.booleans(),
    "reshard_after_forward": st.booleans(),
    "live_units": st.integers(1, 3),
    "prefetch": st.integers(0, 2),
    "in_flight": st.integers(0, 2),
    "bucket": st.sampled_from((0, 64, 1 << 20)),
}
"""What may not change a result."""


@st.composite
def runs(draw, powers=True):
    """A call of `certify` with everything but model and optimizer: a stage, a mesh, its axes in any
    order, and options.
    """
    mesh = draw(
        meshes().filter(lambda mesh: not powers or set(mesh.shape.values()) <= {1, 2, 4, 8})
    )
    names = draw(st.lists(st.sampled_from(sorted(HOW)), unique=True))
    options = {name: draw(HOW[name]) for name in names}
    cut = draw(axis_subsets(mesh))
    axis = draw(axis_subsets(mesh))
    return partial(
        certify, mesh=mesh, axis=axis, batch_spec=P(cut), stages=[draw(STAGES)], steps=2, **options
    )


def verdicts(certificate):
    return {row.verdict for row in certificate.check().rows}


@settings(max_examples=examples(20))
@given(models(COMPLEX, samples=st.integers(8, 12)), optimizers(), runs(powers=False))
def test_any_tree_trains_within_error_bounds(model, opt, run):
    run(model.loss_fn, model.params, model.batch, opt).check()


@settings(max_examples=examples(20))
@given(
    models(COMPLEX, samples=st.integers(8, 12)),
    optimizers(),
    runs(),
    st.sampled_from([None, "bf16"]),
)
def test_any_tree_has_equal_bits_in_reproducible_mode(model, opt, run, precision):
    actual = run(
        model.loss_fn,
        model.params,
        model.batch,
        opt,
        reproducible=True,
        slices=16,
        precision=precision,
    )
    assert verdicts(actual) == {"EXACT"}


@settings(max_examples=examples(15))
@given(models((torch.float32, torch.float64), samples=16, linear=True), runs())
def test_linear_training_has_equal_bits_in_any_layout(model, run):
    assert verdicts(run(model.loss_fn, model.params, model.batch, SGD)) == {"EXACT"}


# -- memory ----------------------------------------------------------------------------------------


def held(tree, place):
    """The bytes of all memory that one device holds of a tree, however many leaves lie in it."""
    leaves = [leaf for leaf in flatten(tree)[0] if isinstance(leaf, fs.Sharded)]
    memory = [leaf.shards[place].untyped_storage() for leaf in leaves]
    return sum({one._cdata: one.nbytes() for one in memory}.values())


def share(x, parts, index):
    """How many elements of a tensor are in one of so many even ranges, the last of them shorter or
    empty.
    """
    each = -(-x.numel() // parts)
    return max(0, min(x.numel() - index * each, each))


@settings(max_examples=examples(20))
@given(
    models(COMPLEX),
    meshes(),
    st.data(),
    STAGES,
    st.sampled_from([{}, {"donate": True}, {"accumulate": 2}]),
    st.sampled_from([False, True]),
)
def test_memory_of_any_tree_equals_theory(model, mesh, data, stage, options, masters):
    """Ties count once, what is frozen has no state, 16 bits may have masters and moments of 32,
    ranges need not be even.
    """
    axis = data.draw(axis_subsets(mesh))
    opt = fs.optim.adamw(0.1, fused=False)
    opt = fs.partition_optimizer(
        fs.optim.with_master_weights(opt) if masters else opt, mesh=mesh, axis=axis, stage=stage
    )
    params = fs.shard_params(model.params, fs.fsdp(axis) if stage == 3 else P(), mesh=mesh)
    state = opt.init(params)
    distinct = {id(x): x for x in flatten(model.params)[0]}.values()
    trained = [x for x in distinct if trainable(x)]
    step = fs.train_step(model.loss_fn, opt, mesh=mesh, batch=P(axis), **options)
    for _ in range(3):
        for device in range(mesh.size):
            at = mesh.coordinates(device)
            sizes = [mesh.shape[name] for name in axis]
            own = partial(share, parts=prod(sizes), index=ravel([at[name] for name in axis], sizes))
            lying = own if stage == 3 else torch.Tensor.numel
            worked_on = own if stage else torch.Tensor.numel
            assert held(params, device) == sum(lying(x) * x.itemsize for x in distinct)
            assert held(state, device) == sum(
                worked_on(x) * (12 if masters and x.dtype in HALVES else 2 * x.itemsize)
                for x in trained
            )
        params, state, _ = step(params, state, model.batch)
