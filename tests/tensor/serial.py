"""The meshes of all modes, and the comparison of a function on shards with the serial float64
operation.
"""

import torch

import fshard as fs

GRIDS = {
    "1d-2": ("1d", (2,)),
    "1d-4": ("1d", (4,)),
    "2d-2x2": ("2d", (2, 2)),
    "2d-3x3": ("2d", (3, 3)),
    "2.5d-2x2x2": ("2.5d", (2, 2, 2)),
    "2.5d-2x3x3": ("2.5d", (2, 3, 3)),
    "3d-2x2x2": ("3d", (2, 2, 2)),
    "3d-3x3x3": ("3d", (3, 3, 3)),
}
SMALL = [name for name in GRIDS if "3x3" not in name and name != "1d-4"]


def mode_of(name, runtime="virtual"):
    kind, sizes = GRIDS[name]
    axes = dict(zip("abc", sizes, strict=False))
    mesh = fs.make_mesh(axes, runtime=runtime)
    return fs.tensor.mode(kind, tuple(axes), mesh), mesh


def units(mode):
    """Return the batch and the features that the devices divide, at least."""
    n = mode.next.size()
    return mode.size(mode.tokens), n * n if mode.kind == "3d" else n


def randn(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def derivatives(f, arguments, order=2):
    """Return the value, the gradient and a derivative of the gradient along a random direction."""
    given = [x.detach().requires_grad_() for x in arguments]
    value = f(*given)
    actual = [value.detach()]
    for _ in range(order):
        if value.requires_grad:
            options = {"create_graph": True, "materialize_grads": True}
            first = torch.autograd.grad(
                (value * randn(*value.shape, seed=len(actual))).sum(), given, **options
            )
        else:
            first = [torch.zeros_like(x) for x in given]
        actual += [x.detach() for x in first]
        value = sum((x * randn(*x.shape, seed=3)).sum() for x in first)
    return actual


def assert_equal_to_serial(sharded, serial, arguments, order=2):
    for a, b in zip(
        derivatives(sharded, arguments, order), derivatives(serial, arguments, order), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def mapped(f, mesh, in_specs, out_specs):
    """Return a function of global tensors that runs `f` on shards."""
    on_mesh = fs.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return lambda *arguments: fs.unshard(on_mesh(*arguments))


def examples(name):
    """Return how many examples of hypothesis a grid takes: many devices take longer."""
    return {27: 1, 18: 2}.get(torch.Size(GRIDS[name][1]).numel(), 4)


def dropped(mode, mesh, x, p=0.3, seed=7):
    """Return `x` after the dropout of a seed."""
    at = mode.activation(x.ndim)

    def on_device(x):
        with fs.keyed_random(seed):  # devices of a mapped function draw differently else
            return fs.tensor.dropout(x, p, mode)

    return mapped(on_device, mesh, at, at)(x)


def attend(q, k, v, causal):
    """Attention that can be differentiated twice."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    later = (
        torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) if causal else torch.tensor(False)
    )
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def shard_of(x, spec):
    """Return this device's shard of a full tensor, for parameters that arrive unsharded."""
    for dim, axes in enumerate(spec.dims(x.ndim)):
        if axes:
            x = x.chunk(fs.axis_size(axes), dim)[fs.axis_index(axes)]
    return x
