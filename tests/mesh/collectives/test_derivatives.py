"""Derivatives of any kind and order, inside device functions and through `shard_map`, equal the serial ones."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import functional
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from fshard.testing.oracles import ORACLES
from tests.mesh.collectives.cases import options_of

# torch itself uses torch.jit.script in its first jvp
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

B, D = 12, 4  # batch, features: every mesh here divides both


def data():
    generator = torch.Generator().manual_seed(0)
    w, v, u = (torch.randn(D, D, generator=generator, dtype=torch.float64) for _ in range(3))
    return w, torch.randn(B, D, generator=generator, dtype=torch.float64), v, u


def serial_loss(w, x):
    return ((x @ w).tanh() ** 2).sum() + (w**3).sum()


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


# -- inside a device function -------------------------------------------------------------------------------------
#
# A kind of derivative is a function of (loss, w, x): the loss is the serial one, or the one of a device with its own
# rows of x, whose gradients at the replicated w are complete on every device.


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
    def kind(loss, w, x, v):
        w = w.detach().requires_grad_()
        y = checkpoint(lambda w, x: checkpoint(loss, w, x, use_reentrant=reentrant), w, x, use_reentrant=reentrant)
        y.backward()  # a reentrant one knows no autograd.grad
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


KINDS = {
    "backward": backward,
    "autograd.grad": lambda loss, w, x, v: torch.autograd.grad(loss(w.requires_grad_(), x), w)[0],
    "double backward": hvp_reverse,
    "triple backward": third,
    "func.grad": lambda loss, w, x, v: grad(loss)(w, x),
    "func.vjp": lambda loss, w, x, v: vjp(loss, w, x)[1](torch.tensor(2.0, dtype=w.dtype))[0],
    "func.jvp": lambda loss, w, x, v: jvp(lambda w: loss(w, x), (w,), (v,))[1],
    "dual numbers": dual,
    "jacrev": lambda loss, w, x, v: jacrev(loss)(w, x),
    "jacfwd": lambda loss, w, x, v: jacfwd(loss)(w, x),
    "hessian": lambda loss, w, x, v: hessian(loss)(w, x),
    "hessian reverse over reverse": lambda loss, w, x, v: jacrev(jacrev(loss))(w, x),
    "hessian forward over forward": lambda loss, w, x, v: jacfwd(jacfwd(loss))(w, x),
    "hvp forward over reverse": lambda loss, w, x, v: jvp(lambda w: grad(loss)(w, x), (w,), (v,))[1],
    "hvp reverse over forward": lambda loss, w, x, v: grad(lambda w: jvp(lambda w: loss(w, x), (w,), (v,))[1])(w),
    "grad of grad": lambda loss, w, x, v: grad(lambda w: (grad(loss)(w, x) * v).sum())(w),
    "vmap over weights": lambda loss, w, x, v: vmap(lambda w: loss(w, x))(torch.stack([w, v, w + v])),
    "vmap of grad": lambda loss, w, x, v: vmap(lambda w: grad(loss)(w, x))(torch.stack([w, v])),
    "grad of vmap": lambda loss, w, x, v: grad(lambda w: vmap(lambda s: loss(w * s, x))(torch.arange(3.0)).sum())(w),
    "gradients batched": batched_gradients,
    "jacrev of jvp": lambda loss, w, x, v: jacrev(lambda w: jvp(lambda w: loss(w, x), (w,), (w**2,))[1])(w),
    "jacfwd of vmap": lambda loss, w, x, v: jacfwd(vmap(lambda w: loss(w, x)))(torch.stack([w, v])),
    "hessian vectorized": lambda loss, w, x, v: functional.hessian(lambda w: loss(w, x), w.detach(), vectorize=True),
    "hessian forward vectorized": lambda loss, w, x, v: functional.hessian(
        lambda w: loss(w, x), w.detach(), vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "jacobian forward vectorized": lambda loss, w, x, v: functional.jacobian(
        lambda w: loss(w, x), w.detach(), vectorize=True, strategy="forward-mode"
    ),
    "checkpoint": checkpointed(False),
    "checkpoint reentrant": checkpointed(True),
}


def data_parallel(w, x):
    """The sum over all rows, from the own ones; each term of w counts once."""
    own = ((x @ fs.pvary(w, "data")).tanh() ** 2).sum()
    return fs.psum(own, "data") + (w**3).sum()


def own_rows(x):
    each = x.shape[0] // fs.axis_size("data")
    return x.narrow(0, fs.axis_index("data") * each, each)


def inside(name):
    w, x, v, _ = data()
    return KINDS[name](data_parallel, w, own_rows(x), v)


# Raw dual numbers have one level for the whole process, which the threads share: inside them, use torch.func.
DUAL = ("dual numbers", "jacobian forward vectorized", "hessian forward vectorized")
IN_THREADS = [name for name in KINDS if name not in DUAL]


def inside_all(n):
    mesh = fs.make_mesh({"data": n})
    return {name: fs.run(inside, name, mesh=mesh)[0] for name in KINDS}


def serial(name):
    w, x, v, _ = data()
    return KINDS[name](serial_loss, w, x, v)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", IN_THREADS)
def test_derivatives_inside_run_equal_oracle(name, n):
    for got in fs.run(inside, name, mesh=fs.make_mesh({"data": n})):
        close(got, serial(name))


@pytest.mark.parametrize("name", IN_THREADS)
def test_derivatives_inside_shard_map_equal_oracle(name):
    w, x, v, _ = data()
    mapped = fs.shard_map(
        lambda w, x, v: KINDS[name](data_parallel, w, x, v),
        mesh=fs.make_mesh({"data": 2}),
        in_specs=(P(), P("data"), P()),
        out_specs=P(),
        check=True,
    )
    close(fs.unshard(mapped(w, x, v)), serial(name))


def test_derivatives_inside_processes_equal_oracle(two):
    expected = {name: serial(name) for name in KINDS}
    for found in two.run(inside_all, 2):
        for name, got in found.items():
            close(got, expected[name])


def per_sample():
    w, x, _, _ = data()
    x = own_rows(x)

    def loss(w, row):
        """The loss of one row per device, summed over the devices: row by row, what a global loss does."""
        return fs.psum((fs.pvary(w, "data") @ row).tanh().sum(), "data")

    return vmap(grad(loss), in_dims=(None, 0))(w, x), vmap(grad(lambda w, row: (w @ row).tanh().sum()), (None, 0))(w, x)


def run_per_sample(n):
    return fs.run(per_sample, mesh=fs.make_mesh({"data": n}))


def check_per_sample(found):
    """A row of a batch is now a row on every device: the gradients are summed over the devices."""
    expected = sum(own for _, own in found)
    for got, _ in found:
        close(got, expected)


def test_per_sample_gradients_equal_serial(two):
    check_per_sample(run_per_sample(3))
    check_per_sample([one for (one,) in two.run(run_per_sample, 2)])


# -- every collective ---------------------------------------------------------------------------------------------

LINEAR = [
    (name, tuple(options.items()))
    for name, oracle in ORACLES.items()
    if name not in ("pmax", "pmin", "send_recv")
    for options in options_of(name, 2)
]


def linear_identities(name, options):
    """Check of a linear map: jvp is the map itself, the transpose of the transpose too, and vmap is a loop."""
    torch.manual_seed(fs.axis_index("a"))

    def f(x):
        return getattr(fs, name)(x, "a", **dict(options))

    x, t = torch.randn(2, 4, 2, dtype=torch.float64)[None].repeat(2, 1, 1, 1)
    t = torch.randn_like(t)
    assert torch.equal(jvp(f, (x,), (t,))[1], f(t))
    y, pull = vjp(f, x)
    (back,) = pull(torch.ones_like(y))
    g = torch.ones_like(y, requires_grad=True)
    z = x.clone().requires_grad_()
    (gx,) = torch.autograd.grad(f(z), z, g, create_graph=True)
    assert torch.equal(gx, back)
    assert torch.equal(torch.autograd.grad(gx, g, t)[0], f(t))
    for dim in range(3):
        xs = torch.stack([x, t, x + t], dim)
        assert torch.equal(vmap(f, in_dims=dim)(xs), torch.stack([f(x), f(t), f(x + t)]))
        pulled = vmap(lambda x: vjp(f, x)[1](torch.ones_like(y))[0], in_dims=dim)(xs)
        assert torch.equal(pulled, torch.stack([back] * 3))
    return True


def run_linear(cases):
    mesh = fs.make_mesh({"a": 2})
    return [fs.run(linear_identities, name, options, mesh=mesh) for name, options in cases]


@pytest.mark.parametrize(("name", "options"), LINEAR, ids=lambda part: str(part) if isinstance(part, tuple) else part)
def test_linear_collective_is_its_own_derivative(name, options):
    run_linear([(name, options)])


def test_linear_collective_derivative_between_processes(two):
    two.run(run_linear, LINEAR)


FORWARD = {
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "functional, dual": lambda f, x: functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
}
REVERSE = {
    "jacrev": lambda f, x: jacrev(f)(x),
    "functional": lambda f, x: functional.jacobian(f, x),
    "functional vectorized": lambda f, x: functional.jacobian(f, x, vectorize=True),
}
HESSIANS = {
    "hessian": lambda f, x: hessian(lambda x: (f(x) ** 3).sum())(x),
    "reverse over reverse": lambda f, x: jacrev(jacrev(lambda x: (f(x) ** 3).sum()))(x),
    "functional vectorized": lambda f, x: functional.hessian(lambda x: (f(x) ** 3).sum(), x, vectorize=True),
    "functional, dual": lambda f, x: functional.hessian(
        lambda x: (f(x) ** 3).sum(), x, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
}


def jacobians_of(name, options, started, dual):
    """Return the Jacobians of a collective, forward and reverse, and the Hessians of its cubed results, of every kind."""

    def f(x):
        collective = getattr(fs, name)
        return collective.start(x, "a", **options).wait() if started else collective(x, "a", **options)

    x = pieces()[fs.axis_index("a")]
    tables = FORWARD, REVERSE, HESSIANS
    return [{kind: of(f, x) for kind, of in table.items() if dual or "dual" not in kind} for table in tables]


def pieces():
    return [torch.arange(8.0, dtype=torch.float64).reshape(2, 4) * (1 - 3 * place) / 4 for place in range(2)]


def jacobians_by_oracle(name, options):
    """Return the same per device: all devices differentiate along the same element of theirs at once."""
    oracle, xs = ORACLES[name], pieces()
    ys = oracle.forward(xs, **options)

    def ones(like):
        return [[one.reshape(like.shape)] * 2 for one in torch.eye(like.numel(), dtype=like.dtype)]

    forward = [oracle.forward(ts, **options) for ts in ones(xs[0])]
    reverse = [oracle.backward(gs, xs, **options) for gs in ones(ys[0])]
    hessian = [oracle.backward([6 * y * dy for y, dy in zip(ys, dys, strict=True)], xs, **options) for dys in forward]
    return [
        [
            torch.stack([row[device] for row in forward], -1).unflatten(-1, xs[0].shape),
            torch.stack([row[device] for row in reverse]).unflatten(0, ys[0].shape),
            torch.stack([row[device] for row in hessian], -1).unflatten(-1, xs[0].shape),
        ]
        for device in range(2)
    ]


def run_jacobians(dual):
    """Try every collective with its options, called and started by turns."""
    mesh, calls = fs.make_mesh({"a": 2}), enumerate(LINEAR)
    return [
        fs.run(jacobians_of, name, dict(options), place % 2 == 1, dual, mesh=mesh) for place, (name, options) in calls
    ]


def test_jacobians_and_hessians_of_every_collective(two):
    in_processes = zip(*two.run(run_jacobians, True), strict=True)
    for (name, options), threads, processes in zip(LINEAR, run_jacobians(False), in_processes, strict=True):
        wanted = jacobians_by_oracle(name, dict(options))
        for device, found in [*enumerate(threads), *((rank, found) for rank, (found,) in enumerate(processes))]:
            for table, want in zip(found, wanted[device], strict=True):
                assert table and [kind for kind, got in table.items() if not torch.equal(got, want)] == [], name


@pytest.mark.parametrize("name", DUAL)
def test_dual_numbers_in_threads_raise_clear_error(name):
    with pytest.raises(RuntimeError, match="Nested forward mode AD") as raised:
        fs.run(inside, name, mesh=fs.make_mesh({"data": 2}))
    assert any("use torch.func.jvp, jacfwd or hessian" in note for note in raised.value.__notes__)


def extremes():
    torch.manual_seed(fs.axis_index("a"))
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    gathered = fs.all_gather(x.detach()[None], "a").requires_grad_()  # all devices' x, as one tensor
    weight = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    mine = fs.axis_index("a")
    for collective, serial_extreme in ((fs.pmax, torch.amax), (fs.pmin, torch.amin)):

        def f(x, collective=collective):
            return (collective(x, "a").exp() * weight).sum()

        def reference(xs, extreme=serial_extreme):
            return (extreme(xs, 0).exp() * weight).sum()

        close(torch.autograd.grad(f(x), x)[0], grad(reference)(gathered.detach())[mine])
        close(grad(f)(x.detach()), grad(reference)(gathered.detach())[mine])
        t = torch.ones_like(x)
        close(jvp(f, (x.detach(),), (t,))[1], jvp(reference, (gathered.detach(),), (torch.ones_like(gathered),))[1])
        stacked = torch.stack([x.detach(), -x.detach()])
        each = vmap(f)(stacked)
        close(each, torch.stack([f(x.detach()), f(-x.detach())]))
        close(vmap(grad(f))(stacked), torch.stack([grad(f)(x.detach()), grad(f)(-x.detach())]))
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        second = torch.autograd.grad((g * t).sum(), x)[0]
        close(second, grad(lambda xs: grad(reference)(xs)[mine].sum())(gathered.detach())[mine])
    return True


def run_extremes(n):
    return fs.run(extremes, mesh=fs.make_mesh({"a": n}))


def test_pmax_and_pmin_derivatives_equal_oracle(two):
    assert all(run_extremes(3))
    two.run(run_extremes, 2)


def test_pmax_ties_share_cotangent():
    def body():
        x = torch.tensor([1.0, float(fs.axis_index("a") == 2), 5.0], requires_grad=True)
        return torch.autograd.grad(fs.pmax(x, "a"), x, torch.tensor([3.0, 6.0, 9.0]))[0].tolist()

    assert fs.run(body, mesh=fs.make_mesh({"a": 3})) == [[1, 0, 3], [1, 0, 3], [1, 6, 3]]


# -- through shard_map, from outside ------------------------------------------------------------------------------


def on_mesh(mesh, check=True):
    mapped = fs.shard_map(data_parallel, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check=check)
    return lambda w, x: fs.unshard(mapped(w, x))


@pytest.mark.parametrize("shape", [{"data": 1}, {"data": 3}, {"data": 2, "other": 2}], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_derivatives_through_shard_map_equal_serial(name, shape):
    w, x, v, _ = data()
    close(KINDS[name](on_mesh(fs.make_mesh(shape)), w, x, v), serial(name))


@pytest.mark.parametrize("name", KINDS)
def test_gradient_of_sharded_argument_through_shard_map(name):
    """The other way round: the derivative at x, whose rows lie on the devices."""
    w, x, _, _ = data()
    v = x.sin()
    loss = on_mesh(fs.make_mesh({"data": 3}))
    close(KINDS[name](lambda x, w: loss(w, x), x, w, v), KINDS[name](lambda x, w: serial_loss(w, x), x, w, v))


def test_gradients_at_local_shards():
    w, x, _, _ = data()
    mesh = fs.make_mesh({"data": 4})
    sharded = fs.device_put(x, fs.Layout(mesh, P("data")))
    shards = [shard.detach().requires_grad_() for shard in sharded.shards]
    leaves = fs.Sharded(sharded.shape, sharded.layout, tuple(shards))
    w.requires_grad_()
    mapped = fs.shard_map(
        lambda w, x: (x @ fs.pvary(w, "data")).tanh(), mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    gw, *gx = torch.autograd.grad(fs.unshard(mapped(w, leaves)).sum(), [w, *shards], create_graph=True)
    x.requires_grad_()
    expected = torch.autograd.grad((x @ w).tanh().sum(), [w, x], create_graph=True)
    close((gw, torch.cat(gx)), expected)
    seconds = torch.autograd.grad((gw**2).sum() + sum((g**2).sum() for g in gx), [w, *shards])
    close((seconds[0], torch.cat(seconds[1:])), torch.autograd.grad(sum((g**2).sum() for g in expected), [w, x]))


def test_backward_twice_through_retained_graph():
    w, x, _, _ = data()
    w.requires_grad_()
    loss = on_mesh(fs.make_mesh({"data": 2}))(w, x)
    first = torch.autograd.grad(loss, w, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, w)[0], first)
    close(first, serial("autograd.grad"))


def test_gradient_through_chained_shard_maps():
    w, x, _, u = data()
    mesh = fs.make_mesh({"data": 2, "model": 2})
    column = fs.shard_map(lambda x, w: (fs.pvary(x, "model") @ fs.pvary(w, "data")).tanh(), mesh=mesh,
                          in_specs=(P("data"), P(None, "model")), out_specs=P("data", "model"))  # fmt: skip
    row = fs.shard_map(lambda h, w: fs.psum(h @ fs.pvary(w, "data"), "model"), mesh=mesh,
                       in_specs=(P("data", "model"), P("model")), out_specs=P("data"))  # fmt: skip

    def loss(w, u, x):
        return (fs.unshard(row(column(x, w), u)) ** 2).sum()

    def reference(w, u, x):
        return (((x @ w).tanh() @ u) ** 2).sum()

    close(grad(loss, argnums=(0, 1, 2))(w, u, x), grad(reference, argnums=(0, 1, 2))(w, u, x))
    close(jacfwd(grad(loss))(w, u, x), jacfwd(grad(reference))(w, u, x))
    leaves = [leaf.requires_grad_() for leaf in (w, u, x)]
    close(torch.autograd.grad(loss(*leaves), leaves), torch.autograd.grad(reference(*leaves), leaves))


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


# -- transparency -------------------------------------------------------------------------------------------------


def mlp(params, x):
    for w, b in params[:-1]:
        x = (x @ w + b).tanh()
    w, b = params[-1]
    return x @ w + b


def sharded_mlp(params, x, kinds):
    """Each layer whole, cut by columns, or by rows; a layer cut by rows follows one cut by columns."""
    params = fs.pvary(params, "data")
    for (w, b), kind, last in zip(params, kinds, [False] * (len(params) - 1) + [True], strict=True):
        if kind == "columns":
            x = fs.pvary(x, "model") @ w + b
        elif kind == "rows":
            x = fs.psum(x @ w, "model") + b
        else:
            x = x @ w + b
        x = x if last else x.tanh()
    return x


SPECS = {
    "whole": (P(), P()),
    "columns": (P(None, "model"), P("model")),
    "rows": (P("model", None), P()),
}


@st.composite
def layers(draw):
    """Draw how the layers of an MLP are cut: whole ones, and pairs of columns and rows."""
    blocks = draw(st.lists(st.sampled_from([("whole",), ("columns", "rows")]), min_size=1, max_size=3))
    return [kind for block in blocks for kind in block]


@settings(max_examples=60)
@given(
    shape=st.sampled_from([{"data": d, "model": m} for d in (1, 2, 3) for m in (1, 2, 3)]),
    swapped=st.booleans(),
    kinds=layers(),
    width=st.integers(1, 3),
    seed=st.integers(0, 2**20),
    mode=st.sampled_from(["inside", "outside", "outside func"]),
)
def test_gradients_equal_serial_program(shape, swapped, kinds, width, seed, mode):
    mesh = fs.make_mesh(dict(reversed(shape.items())) if swapped else shape)
    torch.manual_seed(seed)
    features, batch = 6 * width, 6
    params = [
        (
            torch.randn(features, features, dtype=torch.float64) / features**0.5,
            torch.randn(features, dtype=torch.float64),
        )
        for _ in kinds
    ]
    x = torch.randn(batch, features, dtype=torch.float64)
    specs = [SPECS[kind] for kind in kinds]

    def loss(params, x):
        return fs.pmean((sharded_mlp(params, x, kinds) ** 2).mean(), "data")

    if mode == "inside":
        step = fs.shard_map(grad(loss), mesh=mesh, in_specs=(specs, P("data")), out_specs=specs, check=True)
        got = [tuple(map(fs.unshard, pair)) for pair in step(params, x)]
    else:
        mapped = fs.shard_map(loss, mesh=mesh, in_specs=(specs, P("data")), out_specs=P(), check=True)
        if mode == "outside func":
            got = grad(lambda params: fs.unshard(mapped(params, x)))(params)
        else:
            leaves = [leaf.requires_grad_() for pair in params for leaf in pair]
            flat = iter(torch.autograd.grad(fs.unshard(mapped(params, x)), leaves))
            got = list(zip(flat, flat, strict=True))
    close(got, grad(lambda params: (mlp(params, x) ** 2).mean())([tuple(p.detach() for p in pair) for pair in params]))


# -- broken promises ----------------------------------------------------------------------------------------------


def promise_error(f, *args, in_specs, out_specs, shape=None, gradient=True):
    mapped = fs.shard_map(
        f, mesh=fs.make_mesh(shape or {"data": 4}), in_specs=in_specs, out_specs=out_specs, check=True
    )

    def program():
        out = mapped(*args)
        if gradient:
            fs.unshard(out).sum().backward()

    with pytest.raises(fs.errors.PromiseError) as caught:
        program()
    return re.sub(r"at \S+:\d+ in \w+", "at HERE", str(caught.value).split("\nraised")[0])


def test_missing_pvary_error_names_argument():
    w, x, _, _ = data()

    def model(params, x):
        return fs.psum(((x @ params["w"]) ** 2).sum(), "data")

    assert promise_error(model, {"w": w.requires_grad_()}, x, in_specs=(P(), P("data")), out_specs=P()) == (
        'A promise of equality is broken: argument params["w"] of model, with spec P(), is equal along "data", so its gradient '
        'must be; but it was used with each device\'s own data. Write params["w"] = fs.pvary(params["w"], "data") before '
        "that "
        "use.\n  at HERE: indices 1, 2, 3 along data differ from index 0"
    )


def test_missing_psum_error_names_result():
    x = torch.arange(4.0)

    def model(x):
        return {"loss": (x**2).sum()}

    assert promise_error(model, x, in_specs=P("data"), out_specs=P(), gradient=False) == (
        'A promise of equality is broken: result["loss"] of model, with out_spec P(), must be equal along "data", but its '
        "values differ. Reduce it with fs.psum or fs.pmean (if it is a gradient: mark the argument with fs.pvary where its "
        "use begins), or shard it in its out_spec. fs.replicated declares a result that is equal by construction.\n"
        "  at HERE: indices 1, 2, 3 along data differ from index 0"
    )


def test_missing_pvary_after_psum_error_names_collective():
    x = torch.arange(1.0, 5.0, requires_grad=True)

    def model(x):
        return x * fs.psum(x, "data")

    assert promise_error(model, x, in_specs=P("data"), out_specs=P("data")) == (
        'A promise of equality is broken: the result of fs.psum over "data" is equal on all devices, so its gradient must '
        "be; "
        'but it was used with each device\'s own data. Put fs.pvary(x, "data") around the result where that use begins.\n'
        "  at HERE: indices 1, 2, 3 along data differ from index 0"
    )


def test_unequal_argument_error_names_it():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    pieces = fs.from_local(lambda data, model: torch.zeros(1), fs.Layout(mesh, P()))
    for device in (1, 3):
        pieces.shards[device].add_(1)  # from_local compares its shards
    mapped = fs.shard_map(lambda weight: weight * 2, mesh=mesh, in_specs=P(), out_specs=P(), check=True)
    with pytest.raises(
        fs.errors.PromiseError,
        match=r"(?s)argument weight of <lambda>, with spec P\(\), must be equal .*indices 1, 3 .*differ from indices 0, 2",
    ):
        mapped(pieces)


@pytest.mark.parametrize("name", ["pmax", "pmean", "broadcast", "all_gather"])
def test_replicated_result_of_collective_is_checked(name):
    options = {"to": "replicated"} if name == "all_gather" else {}

    def model(x):
        return (x[:, None] * getattr(fs, name)(x, "data", **options)).sum(1)

    text = promise_error(model, torch.arange(1.0, 5.0, requires_grad=True), in_specs=P("data"), out_specs=P("data"))
    assert f"the result of fs.{name}" in text


def test_check_under_torch_func_raises():
    w, x, _, _ = data()
    mapped = fs.shard_map(
        grad(lambda w, x: fs.psum((x @ w).tanh().sum(), "data")), mesh=fs.make_mesh({"data": 2}),
        in_specs=(P(), P("data")), out_specs=P(), check=True,
    )  # fmt: skip
    with pytest.raises(fs.errors.PromiseError, match="must be equal"):
        mapped(w, x)


def test_captured_tensor_requiring_grad_raises():
    w, x, _, _ = data()
    w.requires_grad_()
    mesh = fs.make_mesh({"data": 2})
    mapped = fs.shard_map(lambda x: x @ w, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(fs.errors.LayoutError) as caught:
        mapped(x)
    assert str(caught.value) == (
        "A result of the function depends on a tensor that requires grad (shape (4, 4), torch.float64) and is not one of "
        "its arguments, so its gradient on Mesh(data=2; virtual, cpu) would be lost. Pass it as an argument with a spec; if "
        "it was made inside, detach the result."
    )
    with torch.no_grad():
        close(fs.unshard(mapped(x)), x @ w)


@pytest.mark.parametrize("memory", ["device", "host"])
def test_torch_func_through_device_put_and_reshard(memory):
    mesh = fs.make_mesh({"data": 2, "model": 2})
    x, v = torch.arange(16.0).reshape(4, 4), torch.ones(4, 4)

    def squares(x):
        y = fs.device_put(x, fs.Layout(mesh, P("data"), memory))
        return fs.unshard(fs.reshard(y, fs.Layout(mesh, P(None, "model"), memory))).pow(2).sum()

    assert torch.equal(torch.func.grad(squares)(x), 2 * x)
    assert torch.equal(torch.func.jvp(squares, (x,), (v,))[1], 2 * x.sum())
    assert torch.equal(torch.func.jvp(torch.func.grad(squares), (x,), (v,))[1], 2 * v)
    assert torch.equal(torch.func.vmap(torch.func.grad(squares))(torch.stack([x, v])), torch.stack([2 * x, 2 * v]))


@pytest.mark.parametrize(
    "use", [lambda x: x.T, lambda x: x.sum(), lambda x: x[0], lambda x: torch.zeros(4, 4).copy_(x)]
)
def test_captured_torch_func_tensor_raises(use):
    mesh = fs.make_mesh({"data": 2})

    def f(x):
        return fs.unshard(
            fs.shard_map(lambda y: y + use(x).sum(), mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)
        ).sum()

    with pytest.raises(fs.errors.LayoutError, match="its derivative would be lost"):
        torch.func.grad(f)(torch.ones(4, 4))
