"""Derivatives of any kind and order through collectives equal those of the serial program.

The oracles are torch's own derivatives of the same function on one tensor in float64, and, for each
collective alone, lists of tensors (`fshard.testing.oracles`). Derivatives are taken inside device
functions (`fs.run`), and from outside through `fs.shard_map`.
"""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import functional
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from fshard.mesh.collectives import moves
from fshard.testing.oracles import ORACLES, options_of
from tests.helpers.processes import ONE_LINK

# torch itself uses torch.jit.script in its first jvp
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

B, D = 12, 4  # batch, features: every mesh here divides both


def data():
    """Return weights, rows, and two directions of the shape of the weights."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    w = drawn(D, D)
    v = drawn(D, D)
    u = drawn(D, D)
    x = drawn(B, D)
    return w, x, v, u


def serial_loss(w, x):
    return ((x @ w).tanh() ** 2).sum() + (w**3).sum()


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


# -- kinds of derivatives --------------------------------------------------------------------------
#
# A kind of derivative is a function of (loss, w, x): the loss is the serial one, or the one of a
# device with its own rows of x, whose gradients at the replicated w are complete on every device.


def hvp_reverse(loss, w, x, v):
    w = w.detach().requires_grad_()
    (g,) = torch.autograd.grad(loss(w, x), w, create_graph=True)
    return torch.autograd.grad(g, w, v)[0]


def third(loss, w, x, v):
    w = w.detach().requires_grad_()
    (g,) = torch.autograd.grad(loss(w, x), w, create_graph=True)
    (h,) = torch.autograd.grad((g * v).sum(), w, create_graph=True)
    return torch.autograd.grad((h * v).sum(), w)[0]


def backward(loss, w, x, v):
    w = w.detach().requires_grad_()
    loss(w, x).backward()
    return w.grad


def checkpointed(reentrant):
    """Return the gradient through two nested checkpoints."""

    def kind(loss, w, x, v):
        w = w.detach().requires_grad_()

        def inner(w, x):
            return checkpoint(loss, w, x, use_reentrant=reentrant)

        y = checkpoint(inner, w, x, use_reentrant=reentrant)
        y.backward()  # a reentrant checkpoint has no autograd.grad
        return w.grad

    return kind


def dual(loss, w, x, v):
    with torch.autograd.forward_ad.dual_level():
        y = loss(torch.autograd.forward_ad.make_dual(w, v), x)
        return torch.autograd.forward_ad.unpack_dual(y).tangent


def batched_gradients(loss, w, x, v):
    w = w.detach().requires_grad_()
    values = torch.stack([loss(w, x), loss(w * 2, x)])
    return torch.autograd.grad(values, w, torch.eye(2, dtype=w.dtype), is_grads_batched=True)[0]


def autograd_grad(loss, w, x, v):
    return torch.autograd.grad(loss(w.requires_grad_(), x), w)[0]


def func_grad(loss, w, x, v):
    return grad(loss)(w, x)


def func_vjp(loss, w, x, v):
    _, pullback = vjp(loss, w, x)
    return pullback(torch.tensor(2.0, dtype=w.dtype))[0]


def func_jvp(loss, w, x, v):
    return jvp(lambda w: loss(w, x), (w,), (v,))[1]


def hvp_forward_over_reverse(loss, w, x, v):
    return jvp(lambda w: grad(loss)(w, x), (w,), (v,))[1]


def hvp_reverse_over_forward(loss, w, x, v):
    return grad(lambda w: func_jvp(loss, w, x, v))(w)


def grad_of_grad(loss, w, x, v):
    return grad(lambda w: (grad(loss)(w, x) * v).sum())(w)


def vmap_over_weights(loss, w, x, v):
    weights = torch.stack([w, v, w + v])
    return vmap(lambda w: loss(w, x))(weights)


def vmap_of_grad(loss, w, x, v):
    weights = torch.stack([w, v])
    return vmap(lambda w: grad(loss)(w, x))(weights)


def grad_of_vmap(loss, w, x, v):
    factors = torch.arange(3.0)

    def summed(w):
        return vmap(lambda factor: loss(w * factor, x))(factors).sum()

    return grad(summed)(w)


def jacrev_of_jvp(loss, w, x, v):
    def squared_direction(w):
        return jvp(lambda w: loss(w, x), (w,), (w**2,))[1]

    return jacrev(squared_direction)(w)


def jacfwd_of_vmap(loss, w, x, v):
    weights = torch.stack([w, v])
    return jacfwd(vmap(lambda w: loss(w, x)))(weights)


def hessian_vectorized(loss, w, x, v, **options):
    return functional.hessian(lambda w: loss(w, x), w.detach(), vectorize=True, **options)


def jacobian_forward_vectorized(loss, w, x, v):
    options = {"vectorize": True, "strategy": "forward-mode"}
    return functional.jacobian(lambda w: loss(w, x), w.detach(), **options)


KINDS = {
    "backward": backward,
    "autograd.grad": autograd_grad,
    "double backward": hvp_reverse,
    "triple backward": third,
    "func.grad": func_grad,
    "func.vjp": func_vjp,
    "func.jvp": func_jvp,
    "dual numbers": dual,
    "jacrev": lambda loss, w, x, v: jacrev(loss)(w, x),
    "jacfwd": lambda loss, w, x, v: jacfwd(loss)(w, x),
    "hessian": lambda loss, w, x, v: hessian(loss)(w, x),
    "hessian reverse over reverse": lambda loss, w, x, v: jacrev(jacrev(loss))(w, x),
    "hessian forward over forward": lambda loss, w, x, v: jacfwd(jacfwd(loss))(w, x),
    "hvp forward over reverse": hvp_forward_over_reverse,
    "hvp reverse over forward": hvp_reverse_over_forward,
    "grad of grad": grad_of_grad,
    "vmap over weights": vmap_over_weights,
    "vmap of grad": vmap_of_grad,
    "grad of vmap": grad_of_vmap,
    "gradients batched": batched_gradients,
    "jacrev of jvp": jacrev_of_jvp,
    "jacfwd of vmap": jacfwd_of_vmap,
    "hessian vectorized": hessian_vectorized,
    "hessian forward vectorized": partial(
        hessian_vectorized, outer_jacobian_strategy="forward-mode"
    ),
    "jacobian forward vectorized": jacobian_forward_vectorized,
    "checkpoint": checkpointed(False),
    "checkpoint reentrant": checkpointed(True),
}


# Raw dual numbers have one level for the process, which the threads of devices share: inside, use
# torch.func.
DUAL = ("dual numbers", "jacobian forward vectorized", "hessian forward vectorized")


def data_parallel(w, x):
    """Return the sum over the rows of all devices, from a device's own.

    Each term of w counts once.
    """
    rows = ((x @ fs.pvary(w, "data")).tanh() ** 2).sum()
    return fs.psum(rows, "data") + (w**3).sum()


def shard_of_rows(x):
    count = x.shape[0] // fs.axis_size("data")
    return x.narrow(0, fs.axis_index("data") * count, count)


def on_device(kind):
    w, x, v, _ = data()
    return KINDS[kind](data_parallel, w, shard_of_rows(x), v)


def in_run(kind, n):
    return fs.run(on_device, kind, mesh=fs.make_mesh({"data": n}))


def in_shard_map(kind):
    def device_function(w, x, v):
        return KINDS[kind](data_parallel, w, x, v)

    mesh = fs.make_mesh({"data": 2})
    specs = {"in_specs": (P(), P("data"), P()), "out_specs": P()}
    mapped = fs.shard_map(device_function, mesh=mesh, **specs, check=True)
    w, x, v, _ = data()
    return [fs.unshard(mapped(w, x, v))]


def on_mesh(mesh):
    """Return the loss as a function of unsharded tensors, which a mesh computes."""
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    mapped = fs.shard_map(data_parallel, mesh=mesh, **specs, check=True)
    return lambda w, x: fs.unshard(mapped(w, x))


def of_shard_map(kind, **axes):
    loss = on_mesh(fs.make_mesh(axes))
    w, x, v, _ = data()
    return [KINDS[kind](loss, w, x, v)]


INSIDE = {
    "in run, 1": partial(in_run, n=1),
    "in run, 3": partial(in_run, n=3),
    "in shard_map": in_shard_map,
}
OUTSIDE = {
    "of shard_map, 1": partial(of_shard_map, data=1),
    "of shard_map, 3": partial(of_shard_map, data=3),
    "of shard_map, 2 x 2": partial(of_shard_map, data=2, other=2),
}
MODES = {**INSIDE, **OUTSIDE}
CASES = []
for inside in INSIDE:
    CASES += [(kind, inside) for kind in KINDS if kind not in DUAL]
for outside in OUTSIDE:
    CASES += [(kind, outside) for kind in KINDS]


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_derivative_equals_serial(kind, mode):
    w, x, v, _ = data()
    expected = KINDS[kind](serial_loss, w, x, v)

    results = MODES[mode](kind)

    for result in results:
        close(result, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_derivative_at_sharded_argument_equals_serial(kind):
    w, x, _, _ = data()
    derivative = KINDS[kind]
    sharded_loss = on_mesh(fs.make_mesh({"data": 3}))

    actual = derivative(lambda x, w: sharded_loss(w, x), x, w, x.sin())

    expected = derivative(lambda x, w: serial_loss(w, x), x, w, x.sin())
    close(actual, expected)


@pytest.mark.parametrize("kind", DUAL)
def test_dual_numbers_in_threads_raise_clear_error(kind):
    with pytest.raises(RuntimeError, match="Nested forward mode AD") as raised:
        in_run(kind, 2)
    assert any("use torch.func.jvp, jacfwd or hessian" in note for note in raised.value.__notes__)


def in_processes():
    mesh = fs.make_mesh({"data": 2})
    return {kind: fs.run(on_device, kind, mesh=mesh)[0] for kind in KINDS}


def test_derivatives_in_processes_equal_serial(two):
    w, x, v, _ = data()
    expected = {kind: of_kind(serial_loss, w, x, v) for kind, of_kind in KINDS.items()}

    results = two.run(in_processes)

    for derivatives in results:
        close(derivatives, expected)


# -- every collective ------------------------------------------------------------------------------

LINEAR = []
for collective_name in ORACLES:
    if collective_name not in ("pmax", "pmin", "send_recv"):
        LINEAR += [(collective_name, options) for options in options_of(collective_name, 2)]


def basis(x, dim):
    """The unit tensors of a shape, stacked along `dim`."""
    return torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape).movedim(0, dim)


def forward_mapped(f, x, dim):
    """Return the Jacobian of a linear function: its values at the unit tensors."""
    columns = vmap(f, in_dims=dim, out_dims=-1)(basis(x, dim))
    return columns.unflatten(-1, x.shape)


def reverse_mapped(f, x, dim):
    y = f(x)
    rows = vmap(lambda g: vjp(f, x)[1](g)[0], in_dims=dim)(basis(y, dim))
    return rows.unflatten(0, y.shape)


def functional_dual(f, x):
    return functional.jacobian(f, x, vectorize=True, strategy="forward-mode")


def cubed(f):
    """Return the sum of the cubed results, whose Hessian is not zero."""
    return lambda x: (f(x) ** 3).sum()


def hessian_functional(f, x, **options):
    return functional.hessian(cubed(f), x, **options)


FORWARD = {
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "functional, dual": functional_dual,
    "vmap over dim 0": partial(forward_mapped, dim=0),
    "vmap over dim 1": partial(forward_mapped, dim=1),
    "vmap over dim 2": partial(forward_mapped, dim=2),
}
REVERSE = {
    "jacrev": lambda f, x: jacrev(f)(x),
    "functional": functional.jacobian,
    "functional vectorized": partial(functional.jacobian, vectorize=True),
    "vmap over dim 0": partial(reverse_mapped, dim=0),
    "vmap over dim 1": partial(reverse_mapped, dim=1),
    "vmap over dim 2": partial(reverse_mapped, dim=2),
}
HESSIANS = {
    "hessian": lambda f, x: hessian(cubed(f))(x),
    "reverse over reverse": lambda f, x: jacrev(jacrev(cubed(f)))(x),
    "functional": hessian_functional,
    "functional vectorized": partial(hessian_functional, vectorize=True),
    "functional, dual": partial(
        hessian_functional, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
}


def shards():
    """Return the tensors of two devices, whose sums and products have no roundings."""
    numbers = torch.arange(8.0, dtype=torch.float64).reshape(2, 4)
    return [numbers / 4, numbers * -2 / 4]


def jacobians_of(name, options, is_started, has_dual):
    """Return the Jacobians of a collective by each kind, forward and reverse, and its Hessians.

    The Hessians are those of the sum of its cubed results.
    """
    collective = getattr(fs, name)

    def f(x):
        if is_started:
            return collective.start(x, "a", **options).wait()
        return collective(x, "a", **options)

    x = shards()[fs.axis_index("a")]
    results = []
    for table in (FORWARD, REVERSE, HESSIANS):
        kinds = [kind for kind in table if has_dual or "dual" not in kind]
        results.append({kind: table[kind](f, x) for kind in kinds})
    return results


def jacobians_by_oracle(name, options):
    """Return the Jacobians, forward and reverse, and the Hessian of each device.

    All devices differentiate along the same element of their tensors at once.
    """
    oracle = ORACLES[name]
    xs = shards()
    ys = oracle.forward(xs, **options)

    forward = [oracle.forward([t, t], **options) for t in basis(xs[0], 0)]
    reverse = [oracle.backward([g, g], xs, **options) for g in basis(ys[0], 0)]
    hessian = []
    for tangents in forward:
        # The gradient of y^3 is 3 y^2, and its derivative along dy is 6 y dy.
        cotangents = [6 * y * dy for y, dy in zip(ys, tangents, strict=True)]
        hessian.append(oracle.backward(cotangents, xs, **options))

    results = []
    for device in range(2):
        columns = torch.stack([row[device] for row in forward], -1)
        rows = torch.stack([row[device] for row in reverse])
        seconds = torch.stack([row[device] for row in hessian], -1)
        results.append(
            [
                columns.unflatten(-1, xs[0].shape),
                rows.unflatten(0, ys[0].shape),
                seconds.unflatten(-1, xs[0].shape),
            ]
        )
    return results


def run_jacobians(has_dual):
    """Differentiate every collective with its options.

    It is started where there can be dual numbers; else it is called and started by turns.
    """
    mesh = fs.make_mesh({"a": 2})
    runs = []
    for index, (name, options) in enumerate(LINEAR):
        is_started = has_dual or index % 2 == 1
        runs.append(fs.run(jacobians_of, name, options, is_started, has_dual, mesh=mesh))
    return runs


def assert_jacobians_equal(tables, expected, case):
    for table, jacobian in zip(tables, expected, strict=True):
        wrong = [kind for kind, result in table.items() if not torch.equal(result, jacobian)]
        assert table, case
        assert wrong == [], case


@ONE_LINK
def test_jacobians_and_hessians_of_every_collective(two):
    in_threads = run_jacobians(False)
    first_process, second_process = two.run(run_jacobians, True)

    for index, (name, options) in enumerate(LINEAR):
        expected = jacobians_by_oracle(name, options)
        for device in range(2):
            assert_jacobians_equal(in_threads[index][device], expected[device], (name, options))

        # A process has the results of its own device.
        (first,) = first_process[index]
        (second,) = second_process[index]
        assert_jacobians_equal(first, expected[0], (name, options))
        assert_jacobians_equal(second, expected[1], (name, options))


def check_extreme(collective, extreme):
    """Compare derivatives of pmax or pmin with those of torch's amax or amin of all tensors."""
    index = fs.axis_index("a")
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(fs.axis_size("a"), 3, 4, generator=generator, dtype=torch.float64)
    x = xs[index]
    ones = torch.ones_like(x)
    weight = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)

    def f(x):
        return (collective(x, "a").exp() * weight).sum()

    def serial(xs):
        return (extreme(xs, 0).exp() * weight).sum()

    # First derivatives, reverse and forward.
    expected = grad(serial)(xs)[index]
    close(grad(f)(x), expected)
    close(jvp(f, (x,), (ones,))[1], jvp(serial, (xs,), (torch.ones_like(xs),))[1])

    # Two values at once.
    both = torch.stack([x, -x])
    close(vmap(f)(both), torch.stack([f(x), f(-x)]))
    close(vmap(grad(f))(both), torch.stack([grad(f)(x), grad(f)(-x)]))

    # The gradient of the gradient's sum.
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    close(g.detach(), expected)
    second = grad(lambda xs: grad(serial)(xs)[index].sum())(xs)[index]
    close(torch.autograd.grad(g.sum(), leaf)[0], second)


def extremes():
    check_extreme(fs.pmax, torch.amax)
    check_extreme(fs.pmin, torch.amin)

    # Equal maxima share the gradient: of the elements 0 and 2 all devices have the largest.
    is_largest = float(fs.axis_index("a") == 1)
    x = torch.tensor([1.0, is_largest, 5.0], requires_grad=True)
    (g,) = torch.autograd.grad(fs.pmax(x, "a"), x, torch.tensor([3.0, 6.0, 3.0]))
    share = 3.0 / fs.axis_size("a")
    assert torch.equal(g, torch.tensor([share, 6.0 * is_largest, share]))
    return True


def run_extremes(n):
    return fs.run(extremes, mesh=fs.make_mesh({"a": n}))


def test_pmax_and_pmin_derivatives_equal_oracle_and_ties_share(two):
    assert all(run_extremes(3))
    two.run(run_extremes, 2)


# -- through shard_map, from outside ---------------------------------------------------------------


def test_gradients_at_local_shards():
    """Shards are leaves of their own: gradients at them are the rows of the serial gradient."""
    w, x, _, _ = data()
    mesh = fs.make_mesh({"data": 4})
    array = fs.device_put(x, fs.Layout(mesh, P("data")))
    shards = [shard.detach().requires_grad_() for shard in array.shards]
    leaves = fs.Sharded(array.shape, array.layout, tuple(shards))
    w.requires_grad_()
    x.requires_grad_()
    mapped = fs.shard_map(
        lambda w, x: (x @ fs.pvary(w, "data")).tanh(),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
    )

    total = fs.unshard(mapped(w, leaves)).sum()
    gw, *gx = torch.autograd.grad(total, [w, *shards], create_graph=True)
    expected = torch.autograd.grad((x @ w).tanh().sum(), [w, x], create_graph=True)
    close((gw, torch.cat(gx)), expected)

    squares = (gw**2).sum() + sum((g**2).sum() for g in gx)
    ggw, *ggx = torch.autograd.grad(squares, [w, *shards])
    expected_squares = sum((g**2).sum() for g in expected)
    close((ggw, torch.cat(ggx)), torch.autograd.grad(expected_squares, [w, x]))


def test_backward_twice_through_retained_graph():
    w, x, v, _ = data()
    loss = on_mesh(fs.make_mesh({"data": 2}))(w.requires_grad_(), x)
    first = torch.autograd.grad(loss, w, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, w)[0], first)
    close(first, backward(serial_loss, w, x, v))


def test_gradient_through_chained_shard_maps():
    w, x, _, u = data()
    mesh = fs.make_mesh({"data": 2, "model": 2})
    column = fs.shard_map(
        lambda x, w: (fs.pvary(x, "model") @ fs.pvary(w, "data")).tanh(),
        mesh=mesh,
        in_specs=(P("data"), P(None, "model")),
        out_specs=P("data", "model"),
    )
    row = fs.shard_map(
        lambda h, w: fs.psum(h @ fs.pvary(w, "data"), "model"),
        mesh=mesh,
        in_specs=(P("data", "model"), P("model")),
        out_specs=P("data"),
    )

    def loss(w, u, x):
        return (fs.unshard(row(column(x, w), u)) ** 2).sum()

    def serial(w, u, x):
        return (((x @ w).tanh() @ u) ** 2).sum()

    close(grad(loss, argnums=(0, 1, 2))(w, u, x), grad(serial, argnums=(0, 1, 2))(w, u, x))
    close(jacfwd(grad(loss))(w, u, x), jacfwd(grad(serial))(w, u, x))
    leaves = [leaf.requires_grad_() for leaf in (w, u, x)]
    close(torch.autograd.grad(loss(*leaves), leaves), torch.autograd.grad(serial(*leaves), leaves))


def test_shard_map_under_no_grad_records_nothing():
    w, x, _, _ = data()
    loss = on_mesh(fs.make_mesh({"data": 2}))
    w.requires_grad_()
    with torch.no_grad():
        assert not loss(w, x).requires_grad
    assert loss(w, x).requires_grad
    assert not loss(w.detach(), x).requires_grad
    with torch.inference_mode():
        close(loss(w, x).clone(), serial_loss(w, x))


@pytest.mark.parametrize("memory", ["device", "host"])
def test_torch_func_through_device_put_and_reshard(memory):
    mesh = fs.make_mesh({"data": 2, "model": 2})
    x = torch.arange(16.0).reshape(4, 4)
    v = torch.ones(4, 4)

    def squares(x):
        y = fs.device_put(x, fs.Layout(mesh, P("data"), memory))
        return fs.unshard(fs.reshard(y, fs.Layout(mesh, P(None, "model"), memory))).pow(2).sum()

    assert torch.equal(grad(squares)(x), 2 * x)
    assert torch.equal(jvp(squares, (x,), (v,))[1], 2 * x.sum())
    assert torch.equal(jvp(grad(squares), (x,), (v,))[1], 2 * v)
    assert torch.equal(vmap(grad(squares))(torch.stack([x, v])), torch.stack([2 * x, 2 * v]))


# -- transparency ----------------------------------------------------------------------------------


def mlp(params, x, kinds):
    """Return the result of layers that are replicated, or sharded by columns and then by rows.

    With kinds of None, it is the serial MLP.
    """
    for index, ((w, b), kind) in enumerate(zip(params, kinds, strict=True)):
        if kind == "columns":
            x = fs.pvary(x, "model")
        y = x @ w
        if kind == "rows":
            y = fs.psum(y, "model")

        x = y + b
        if index < len(kinds) - 1:
            x = x.tanh()
    return x


SPECS = {
    "replicated": (P(), P()),
    "columns": (P(None, "model"), P("model")),
    "rows": (P("model", None), P()),
}


@settings(max_examples=60)
@given(
    data=st.sampled_from([1, 2, 3]),
    model=st.sampled_from([1, 2, 3]),
    swapped=st.booleans(),
    blocks=st.lists(
        st.sampled_from([("replicated",), ("columns", "rows")]), min_size=1, max_size=3
    ),
    width=st.integers(1, 3),
    seed=st.integers(0, 2**20),
    mode=st.sampled_from(["inside", "outside", "outside func"]),
)
def test_gradients_equal_serial_program(data, model, swapped, blocks, width, seed, mode):
    """Gradients are taken inside of the mapped function, or outside by autograd or torch.func."""
    sizes = {"data": data, "model": model}
    if swapped:
        sizes = {"model": model, "data": data}
    mesh = fs.make_mesh(sizes)
    kinds = sum(blocks, ())
    specs = [SPECS[kind] for kind in kinds]

    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    features = 6 * width
    params = [(draw(features, features) / features**0.5, draw(features)) for _ in kinds]
    x = draw(6, features)

    def serial(params):
        return (mlp(params, x, [None] * len(kinds)) ** 2).mean()

    def loss(params, x):
        y = mlp(fs.pvary(params, "data"), x, kinds)
        return fs.pmean((y**2).mean(), "data")

    def mapped(f, out_specs):
        in_specs = (specs, P("data"))
        return fs.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=True)

    if mode == "inside":
        gradients = mapped(grad(loss), specs)(params, x)
        actual = [(fs.unshard(w), fs.unshard(b)) for w, b in gradients]
    elif mode == "outside func":
        mapped_loss = mapped(loss, P())
        actual = grad(lambda params: fs.unshard(mapped_loss(params, x)))(params)
    else:
        leaves = [(w.clone().requires_grad_(), b.clone().requires_grad_()) for w, b in params]
        value = fs.unshard(mapped(loss, P())(leaves, x))
        gradients = torch.autograd.grad(value, [leaf for pair in leaves for leaf in pair])
        actual = [*zip(gradients[::2], gradients[1::2], strict=True)]

    close(actual, grad(serial)(params))


# -- adjoints --------------------------------------------------------------------------------------

MOVES = [
    moves.Psum(),
    moves.Pvary(),
    moves.AllGather(0),
    moves.AllGather(0, replicated=True),
    moves.PsumScatter(0),
    moves.AllToAll(0, 1),
    moves.Permute(((0, 1), (1, 2))),
    moves.Pick(1),
    moves.Summand(),
    moves.Same(),
]


@pytest.mark.parametrize("move", MOVES, ids=moves.describe)
def test_the_adjoint_of_a_move_is_the_transpose_of_its_meaning(move):
    """<A x, g> = <x, A* g> for any values and cotangents of all devices."""
    generator = torch.Generator().manual_seed(0)

    def drawn_like(tensors):
        drawn = partial(torch.randn, generator=generator, dtype=torch.float64)
        return [drawn(x.shape) for x in tensors]

    def product(xs, ys):
        return sum((x * y).sum() for x, y in zip(xs, ys, strict=True))

    xs = drawn_like([torch.empty(3, 6)] * 3)
    results = move.meaning(xs)
    cotangents = drawn_like(results)

    transposed = move.adjoint().meaning(cotangents)

    close(product(results, cotangents), product(xs, transposed))


@pytest.mark.parametrize("move", [moves.Broadcast(1), moves.Take(0)], ids=moves.describe)
def test_the_adjoint_of_a_move_without_one_raises(move):
    with pytest.raises(ValueError, match=r"Take it from fs.all_gather\(x, axis\)"):
        move.adjoint()
