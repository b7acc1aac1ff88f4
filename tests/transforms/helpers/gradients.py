"""The oracle of gradients: torch's on one device and the whole batch, and those of `value_and_grad`
on a mesh.
"""

import torch

import fshard as fs
from fshard import P
from fshard.mesh.layout import flatten, unflatten

DATA = P("data")


def serial(loss_fn, params, batch):
    """Return the mean loss, and its gradient by each leaf, None for those that it does not use."""
    leaves, structure = flatten(params)
    leaves = [x.clone().requires_grad_() for x in leaves]
    loss = loss_fn(unflatten(structure, leaves), batch).mean()
    return loss.detach(), torch.autograd.grad(loss, leaves, allow_unused=True)


def sharded(loss_fn, params, batch, sizes, stage=0, rules=None, spec=DATA, **options):
    """Return the same on a mesh of these sizes, in a stage of ZeRO; replicated gradients have the
    same bits on all devices.
    """
    mesh = fs.make_mesh(sizes)
    rules = (fs.fsdp("data") if stage == 3 else P()) if rules is None else rules
    arrays = fs.shard_params(params, rules, mesh=mesh)
    gradients = fs.partition_optimizer(
        fs.optim.sgd(1.0), mesh=mesh, axis="data", stage=stage
    ).gradients
    loss, grads = fs.value_and_grad(loss_fn, mesh=mesh, batch=spec, gradients=gradients, **options)(
        arrays, batch
    )
    grads, _ = flatten(grads, none_is_leaf=True)
    for g in grads:
        assert (
            g is None or g.spec != P() or all(torch.equal(shard, g.shards[0]) for shard in g.shards)
        )
    return loss, [None if g is None else fs.unshard(g) for g in grads]


def assert_equal(found, expected, tolerance=1e-11):
    """Compare losses and gradients in float64."""
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


class Product(torch.autograd.Function):
    """A Function of the user's, which torch calls without asking what class its arguments are of."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g
