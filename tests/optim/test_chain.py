"""Transformations of gradients launch as many kernels for many leaves as for few, and give each the
bits of its own formula.

The oracle is the formula, leaf by leaf; kernels are torch's operations on the caller's thread,
views left out.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import P, optim
from fshard.mesh.layout.sharded import Sharded
from fshard.optim.chain import clipped

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


class Kernels(TorchDispatchMode):
    """Lists operations that are no views and read no number."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        launches = not func.is_view and not name.startswith(("empty", "_local_scalar"))
        if launches:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def draws(count, dtypes=(torch.float32,)):
    """Return leaves of some shapes: 0-d, empty, contiguous and transposed."""
    generator = torch.Generator().manual_seed(0)
    leaves = []
    for index in range(count):
        shape = [(), (0,), (3, 5), (7,)][index % 4]
        leaf = torch.randn(shape, dtype=torch.float64, generator=generator) * 3
        leaf = leaf.to(dtypes[index % len(dtypes)])
        leaves.append(leaf.mT if leaf.ndim == 2 else leaf)
    return leaves


def by_norm(grads):
    return optim.clip_by_global_norm(0.5).update(grads, (), None)[0]


def by_value(grads):
    return optim.clip_by_value(0.5).update(grads, (), None)[0]


def by_factor(grads):
    opt = optim.scale(0.3)
    return opt.update(grads, opt.init(grads), None)[0]


def of_scaled_loss(grads):
    opt = optim.loss_scaled(optim.scale(-1.0), initial=16.0)
    return opt.update(grads, opt.init(grads), grads)[0]


def norm_formula(grads):
    norm = optim.global_norm(grads)
    return [grad * (0.5 / (norm + 1e-6)).to(grad.dtype) for grad in grads]


def value_formula(grads):
    def of(grad):
        if grad.is_complex():
            return torch.complex(of(grad.real), of(grad.imag))
        return grad.clamp(-0.5, 0.5)

    return [of(grad) for grad in grads]


def scaled_loss_formula(grads):
    wide = [grad.float() if grad.dtype.itemsize == 2 else grad for grad in grads]
    return [grad / 16 * -1 for grad in wide]


CASES = {
    "norm": (by_norm, norm_formula),
    "value": (by_value, value_formula),
    "factor": (by_factor, lambda grads: [grad * 0.3 for grad in grads]),
    "scaled loss": (of_scaled_loss, scaled_loss_formula),
}


@pytest.mark.parametrize("name", CASES)
def test_transformation_of_many_leaves_launches_as_many_kernels_as_of_four(name):
    transform, _ = CASES[name]
    counts = []
    for count in (4, 40):
        grads = draws(count)
        with Kernels() as kernels:
            transform(grads)
        counts.append(len(kernels.names))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", CASES)
def test_transformation_of_any_dtypes_has_the_bits_of_its_formula(name):
    transform, formula = CASES[name]
    grads = draws(4 * len(DTYPES), DTYPES)
    before = [grad.clone() for grad in grads]
    actual = transform([*grads, None, grads[2]])
    expected = formula(grads)
    for result, leaf, grad, copy in zip(actual, expected, grads, before, strict=False):
        assert result.dtype == leaf.dtype and torch.equal(result, leaf)
        assert torch.equal(grad, copy)  # arguments are not modified
    assert actual[-2] is None and actual[-1] is actual[2]  # ties stay ties


def test_clipping_by_value_keeps_what_is_not_finite():
    nan, inf = torch.nan, torch.inf
    (plain,) = by_value([torch.tensor([nan, inf, -inf, 0.2])])
    assert plain[0].isnan() and plain[1:].tolist() == [0.5, -0.5, torch.tensor(0.2).item()]
    (kept,) = clipped([torch.tensor([inf, -inf, 3.0])], 0.5, keep_infinite=True)
    assert kept.tolist() == [inf, -inf, 0.5]


def test_gradients_that_devices_share_are_scaled_once():
    """Virtual devices share the result of a sum: in place it would be scaled once by each."""
    shared = torch.full((2,), 3.0)
    array = Sharded((2,), fs.Layout(fs.make_mesh({"data": 4})), (shared,) * 4)
    (clipped_array,) = by_norm([array])
    factor = 0.5 / (torch.tensor(18.0, dtype=torch.float64).sqrt() + 1e-6)
    assert all(torch.equal(x, shared * factor.float()) for x in clipped_array.shards)


# -- the norm of a step's metrics ------------------------------------------------------------------


def trained(opt, *, stage=3, n=2, **options):
    """Take a step; return the parameters, the metrics, and the kernels and sums of its update."""
    mesh = fs.make_mesh({"data": n})
    weights = {"w": torch.arange(6.0).view(3, 2) / 7, "b": torch.ones(2)}
    params = fs.shard_params(weights, fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    opt = fs.partition_optimizer(opt, mesh=mesh, axis="data", stage=stage)

    def loss_fn(params, x):
        return (x @ params["w"] + params["b"]).square().mean()

    step = fs.train_step(loss_fn, opt, mesh=mesh, batch=P("data"), **options)
    x = torch.arange(12.0).view(4, 3) / 5
    state = step.init(params)
    with fs.ledger() as comm, Kernels() as kernels:
        params, _, metrics = step(params, state, x)
    return fs.unshard(params), metrics, kernels.names, comm.calls()


CLIP = optim.clip_by_global_norm(0.1)
SGD = optim.sgd(0.5, fused=False)
CLIPPERS = {
    "chain": optim.chain(CLIP, SGD),
    "nested": optim.chain(optim.chain(CLIP, optim.scale(1.0)), SGD),
    "skipping": optim.skip_if_not_finite(optim.chain(CLIP, SGD)),
}


@pytest.mark.parametrize("options", [{}, {"reproducible": True}], ids=["plain", "reproducible"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", CLIPPERS)
def test_norm_of_a_step_that_clips_is_computed_once(name, stage, options):
    """A user's `update` that clips by its own call cannot be known, so it pays for a norm of its
    own.
    """
    opt = CLIPPERS[name]
    unclipped = optim.skip_if_not_finite(SGD) if name == "skipping" else SGD
    _, plain_metrics, plain_names, plain_calls = trained(unclipped, stage=stage, **options)
    params, metrics, names, calls = trained(opt, stage=stage, **options)
    assert names.count("_foreach_norm") == plain_names.count("_foreach_norm")
    assert calls == plain_calls

    torch.testing.assert_close(metrics["grad_norm"], plain_metrics["grad_norm"])
    alone = optim.chain(optim.scale(1.0), CLIP, SGD)  # the norm is that of other tensors
    if name == "skipping":
        alone = optim.skip_if_not_finite(alone)
    expected, _, _, more_calls = trained(alone, stage=stage, **options)
    assert all(torch.equal(params[key], expected[key]) for key in params)
    assert more_calls == calls + (stage == 3)
