"""Derivatives of any kind and order, inside device functions and through `shard_map`, equal the serial ones."""

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

# torch itself uses torch.jit.script in its first jvp
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

B, D = 12, 4  # batch, features: every mesh here divides both


def data():
    generator = torch.Generator().manual_seed(0)
    w, v, u = (torch.randn(D, D, generator=generator, dtype=torch.float64) for _ in range(3))
    return w, torch.randn(B, D, generator=generator, dtype=torch.float64), v, u


def serial_loss(w, x):
    return ((x @ w).tanh() ** 2).sum() + (w**3).sum()


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


# -- kinds of derivatives ---------------------------------------------------------------------------------------
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
        y = checkpoint(
            lambda w, x: checkpoint(loss, w, x, use_reentrant=reentrant),
            w,
            x,
            use_reentrant=reentrant,
        )
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
    "hvp forward over reverse": lambda loss, w, x, v: jvp(lambda w: grad(loss)(w, x), (w,), (v,))[
        1
    ],
    "hvp reverse over forward": lambda loss, w, x, v: grad(
        lambda w: jvp(lambda w: loss(w, x), (w,), (v,))[1]
    )(w),
    "grad of grad": lambda loss, w, x, v: grad(lambda w: (grad(loss)(w, x) * v).sum())(w),
    "vmap over weights": lambda loss, w, x, v: vmap(lambda w: loss(w, x))(
        torch.stack([w, v, w + v])
    ),
    "vmap of grad": lambda loss, w, x, v: vmap(lambda w: grad(loss)(w, x))(torch.stack([w, v])),
    "grad of vmap": lambda loss, w, x, v: grad(
        lambda w: vmap(lambda s: loss(w * s, x))(torch.arange(3.0)).sum()
    )(w),
    "gradients batched": batched_gradients,
    "jacrev of jvp": lambda loss, w, x, v: jacrev(
        lambda w: jvp(lambda w: loss(w, x), (w,), (w**2,))[1]
    )(w),
    "jacfwd of vmap": lambda loss, w, x, v: jacfwd(vmap(lambda w: loss(w, x)))(torch.stack([w, v])),
    "hessian vectorized": lambda loss, w, x, v: functional.hessian(
        lambda w: loss(w, x), w.detach(), vectorize=True
    ),
    "hessian forward vectorized": lambda loss, w, x, v: functional.hessian(
        lambda w: loss(w, x), w.detach(), vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "jacobian forward vectorized": lambda loss, w, x, v: functional.jacobian(
        lambda w: loss(w, x), w.detach(), vectorize=True, strategy="forward-mode"
    ),
    "checkpoint": checkpointed(False),
    "checkpoint reentrant": checkpointed(True),
}


# Raw dual numbers have one level for the process, which the threads of devices share: inside, use torch.func.
DUAL = ("dual numbers", "jacobian forward vectorized", "hessian forward vectorized")


def data_parallel(w, x):
    """The sum over all rows, from a device's own; each term of w counts once."""
    rows = ((x @ fs.pvary(w, "data")).tanh() ** 2).sum()
    return fs.psum(rows, "data") + (w**3).sum()


def shard_of_rows(x):
    each = x.shape[0] // fs.axis_size("data")
    return x.narrow(0, fs.axis_index("data") * each, each)


def on_device(kind):
    w, x, v, _ = data()
    return KINDS[kind](data_parallel, w, shard_of_rows(x), v)


def in_run(kind, n):
    return fs.run(on_device, kind, mesh=fs.make_mesh({"data": n}))


def in_shard_map(kind):
    specs = {"in_specs": (P(), P("data"), P()), "out_specs": P()}
    mesh = fs.make_mesh({"data": 2})
    mapped = fs.shard_map(
        lambda w, x, v: KINDS[kind](data_parallel, w, x, v), mesh=mesh, **specs, check=True
    )
    return [fs.unshard(mapped(*data()[:3]))]


def on_mesh(mesh):
    mapped = fs.shard_map(
        data_parallel, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check=True
    )
    return lambda w, x: fs.unshard(mapped(w, x))


def of_shard_map(kind, **axes):
    return [KINDS[kind](on_mesh(fs.make_mesh(axes)), *data()[:3])]


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
CASES = [(kind, mode) for mode in INSIDE for kind in KINDS if kind not in DUAL]
CASES += [(kind, mode) for mode in OUTSIDE for kind in KINDS]


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_derivative_equals_serial(kind, mode):
    w, x, v, _ = data()
    expected = KINDS[kind](serial_loss, w, x, v)
    for result in {**INSIDE, **OUTSIDE}[mode](kind):
        close(result, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_derivative_at_sharded_argument_equals_serial(kind):
    w, x, _, _ = data()
    loss = on_mesh(fs.make_mesh({"data": 3}))
    derivatives = [
        KINDS[kind](lambda x, w, f=f: f(w, x), x, w, x.sin()) for f in (loss, serial_loss)
    ]
    close(*derivatives)


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
    for derivatives in two.run(in_processes):
        close(derivatives, expected)


# -- every collective ---------------------------------------------------------------------------------------------

LINEAR = [
    (name, options)
    for name, oracle in ORACLES.items()
    if name not in ("pmax", "pmin", "send_recv")
    for options in options_of(name, 2)
]


def basis(x, dim):
    """The unit tensors of a shape, stacked along `dim`."""
    return torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape).movedim(0, dim)


def forward_mapped(f, x, dim):
    return vmap(f, in_dims=dim, out_dims=-1)(basis(x, dim)).unflatten(-1, x.shape)  # f is linear


def reverse_mapped(f, x, dim):
    y = f(x)
    return vmap(lambda g: vjp(f, x)[1](g)[0], in_dims=dim)(basis(y, dim)).unflatten(0, y.shape)


FORWARD = {
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "functional, dual": lambda f, x: functional.jacobian(
        f, x, vectorize=True, strategy="forward-mode"
    ),
    **{f"vmap over dim {dim}": partial(forward_mapped, dim=dim) for dim in range(3)},
}
REVERSE = {
    "jacrev": lambda f, x: jacrev(f)(x),
    "functional": lambda f, x: functional.jacobian(f, x),
    "functional vectorized": lambda f, x: functional.jacobian(f, x, vectorize=True),
    **{f"vmap over dim {dim}": partial(reverse_mapped, dim=dim) for dim in range(3)},
}
HESSIANS = {
    "hessian": lambda f, x: hessian(lambda x: (f(x) ** 3).sum())(x),
    "reverse over reverse": lambda f, x: jacrev(jacrev(lambda x: (f(x) ** 3).sum()))(x),
    "functional": lambda f, x: functional.hessian(lambda x: (f(x) ** 3).sum(), x),
    "functional vectorized": lambda f, x: functional.hessian(
        lambda x: (f(x) ** 3).sum(), x, vectorize=True
    ),
    "functional, dual": lambda f, x: functional.hessian(
        lambda x: (f(x) ** 3).sum(), x, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
}


def shards():
    return [
        torch.arange(8.0, dtype=torch.float64).reshape(2, 4) * (1 - 3 * index) / 4
        for index in range(2)
    ]


def jacobians_of(name, options, started, dual):
    """Return the Jacobians of a collective, forward and reverse, and the Hessians of its cubed results."""

    def f(x):
        collective = getattr(fs, name)
        return (
            collective.start(x, "a", **options).wait() if started else collective(x, "a", **options)
        )

    x = shards()[fs.axis_index("a")]
    tables = (FORWARD, REVERSE, HESSIANS)
    return [
        {kind: of(f, x) for kind, of in table.items() if dual or "dual" not in kind}
        for table in tables
    ]


def jacobians_by_oracle(name, options):
    """Return the same per device: all devices differentiate along the same element of theirs at once."""
    oracle = ORACLES[name]
    xs = shards()
    ys = oracle.forward(xs, **options)
    forward = [oracle.forward([t, t], **options) for t in basis(xs[0], 0)]
    reverse = [oracle.backward([g, g], xs, **options) for g in basis(ys[0], 0)]
    hessian = [
        oracle.backward([6 * y * dy for y, dy in zip(ys, dys, strict=True)], xs, **options)
        for dys in forward
    ]
    return [
        [
            torch.stack([row[device] for row in forward], -1).unflatten(-1, xs[0].shape),
            torch.stack([row[device] for row in reverse]).unflatten(0, ys[0].shape),
            torch.stack([row[device] for row in hessian], -1).unflatten(-1, xs[0].shape),
        ]
        for device in range(2)
    ]


def run_jacobians(dual):
    """Try every collective with its options: started where dual numbers can be, else called and started by turns."""
    mesh = fs.make_mesh({"a": 2})
    runs = []
    for index, (name, options) in enumerate(LINEAR):
        runs.append(fs.run(jacobians_of, name, options, dual or index % 2 == 1, dual, mesh=mesh))
    return runs


def test_jacobians_and_hessians_of_every_collective(two):
    in_processes = zip(*two.run(run_jacobians, True), strict=True)
    for (name, options), threads, processes in zip(
        LINEAR, run_jacobians(False), in_processes, strict=True
    ):
        expected = jacobians_by_oracle(name, options)
        for device, tables in [
            *enumerate(threads),
            *((rank, tables) for rank, (tables,) in enumerate(processes)),
        ]:
            for table, jacobian in zip(tables, expected[device], strict=True):
                wrong = [
                    kind for kind, result in table.items() if not torch.equal(result, jacobian)
                ]
                assert table and wrong == [], (name, options)


def extremes():
    """Compare derivatives of pmax and pmin with those of the maximum and minimum of all devices' tensors."""
    index = fs.axis_index("a")
    n = fs.axis_size("a")
    xs = torch.randn(n, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = xs[index]
    t = torch.ones_like(xs[0])
    weight = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    for collective, extreme in ((fs.pmax, torch.amax), (fs.pmin, torch.amin)):
        f = lambda x, collective=collective: (collective(x, "a").exp() * weight).sum()  # noqa: E731
        serial = lambda xs, extreme=extreme: (extreme(xs, 0).exp() * weight).sum()  # noqa: E731
        close(grad(f)(x), grad(serial)(xs)[index])
        close(jvp(f, (x,), (t,))[1], jvp(serial, (xs,), (torch.ones_like(xs),))[1])
        close(vmap(f)(torch.stack([x, -x])), torch.stack([f(x), f(-x)]))
        close(vmap(grad(f))(torch.stack([x, -x])), torch.stack([grad(f)(x), grad(f)(-x)]))
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
        close(g.detach(), grad(serial)(xs)[index])
        second = grad(lambda xs, serial=serial: grad(serial)(xs)[index].sum())(xs)[index]
        close(torch.autograd.grad((g * t).sum(), leaf)[0], second)
    ties = torch.tensor([1.0, float(index == 1), 5.0], requires_grad=True)
    share = 3.0 / n
    g = torch.autograd.grad(fs.pmax(ties, "a"), ties, torch.tensor([3.0, 6.0, 3.0]))[0]
    assert torch.equal(g, torch.tensor([share, 6.0 * (index == 1), share]))
    return True


def run_extremes(n):
    return fs.run(extremes, mesh=fs.make_mesh({"a": n}))


def test_pmax_and_pmin_derivatives_equal_oracle_and_ties_share(two):
    assert all(run_extremes(3))
    two.run(run_extremes, 2)


# -- through shard_map, from outside ------------------------------------------------------------------------------


def test_gradients_at_local_shards():
    w, x, _, _ = data()
    mesh = fs.make_mesh({"data": 4})
    sharded = fs.device_put(x, fs.Layout(mesh, P("data")))
    shards = [shard.detach().requires_grad_() for shard in sharded.shards]
    leaves = fs.Sharded(sharded.shape, sharded.layout, tuple(shards))
    w.requires_grad_()
    mapped = fs.shard_map(
        lambda w, x: (x @ fs.pvary(w, "data")).tanh(),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
    )
    gw, *gx = torch.autograd.grad(
        fs.unshard(mapped(w, leaves)).sum(), [w, *shards], create_graph=True
    )
    x.requires_grad_()
    expected = torch.autograd.grad((x @ w).tanh().sum(), [w, x], create_graph=True)
    close((gw, torch.cat(gx)), expected)
    seconds = torch.autograd.grad((gw**2).sum() + sum((g**2).sum() for g in gx), [w, *shards])
    close(
        (seconds[0], torch.cat(seconds[1:])),
        torch.autograd.grad(sum((g**2).sum() for g in expected), [w, x]),
    )


def test_backward_twice_through_retained_graph():
    w, x, v, _ = data()
    loss = on_mesh(fs.make_mesh({"data": 2}))(w.requires_grad_(), x)
    first = torch.autograd.grad(loss, w, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, w)[0], first)
    close(first, backward(serial_loss, w, x, v))


def test_gradient_through_chained_shard_maps():
    w, x, _, u = data()
    mesh = fs.make_mesh({"data": 2, "model": 2})
    column = fs.shard_map(lambda x, w: (fs.pvary(x, "model") @ fs.pvary(w, "data")).tanh(), mesh=mesh,
                          in_specs=(P("data"), P(None, "model")), out_specs=P("data", "model"))  # fmt: skip
    row = fs.shard_map(lambda h, w: fs.psum(h @ fs.pvary(w, "data"), "model"), mesh=mesh,
                       in_specs=(P("data", "model"), P("model")), out_specs=P("data"))  # fmt: skip
    loss = lambda w, u, x: (fs.unshard(row(column(x, w), u)) ** 2).sum()  # noqa: E731
    serial = lambda w, u, x: (((x @ w).tanh() @ u) ** 2).sum()  # noqa: E731
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


# -- transparency -------------------------------------------------------------------------------------------------


def mlp(params, x, kinds):
    """Each layer replicated, sharded by columns, or by rows after one by columns; without kinds, the serial MLP."""
    for index, ((w, b), kind) in enumerate(zip(params, kinds, strict=True)):
        y = (fs.pvary(x, "model") if kind == "columns" else x) @ w
        x = (fs.psum(y, "model") if kind == "rows" else y) + b
        x = x if index == len(kinds) - 1 else x.tanh()
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
    mesh = fs.make_mesh(
        {"model": model, "data": data} if swapped else {"data": data, "model": model}
    )
    generator = torch.Generator().manual_seed(seed)
    kinds = sum(blocks, ())
    features = 6 * width
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    params = [(draw(features, features) / features**0.5, draw(features)) for _ in kinds]
    x = draw(6, features)
    specs = [SPECS[kind] for kind in kinds]
    expected = grad(lambda params: (mlp(params, x, [None] * len(kinds)) ** 2).mean())(params)

    def loss(params, x):
        return fs.pmean((mlp(fs.pvary(params, "data"), x, kinds) ** 2).mean(), "data")

    if mode == "inside":
        step = fs.shard_map(
            grad(loss), mesh=mesh, in_specs=(specs, P("data")), out_specs=specs, check=True
        )
        close([tuple(map(fs.unshard, pair)) for pair in step(params, x)], expected)
        return
    mapped = fs.shard_map(loss, mesh=mesh, in_specs=(specs, P("data")), out_specs=P(), check=True)
    if mode == "outside func":
        close(grad(lambda params: fs.unshard(mapped(params, x)))(params), expected)
        return
    leaves = [leaf.requires_grad_() for pair in params for leaf in pair]
    gradients = iter(torch.autograd.grad(fs.unshard(mapped(params, x)), leaves))
    close(list(zip(gradients, gradients, strict=True)), expected)


# -- adjoints ---------------------------------------------------------------------------------------------------

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
    """The products of all devices' values with their cotangents are equal before and after, for any cotangents."""
    generator = torch.Generator().manual_seed(0)

    def draw(likes):
        return [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in likes]

    def product(xs, ys):
        return sum((x * y).sum() for x, y in zip(xs, ys, strict=True))

    xs = draw([torch.empty(3, 6)] * 3)
    results = move.meaning(xs)
    cotangents = draw(results)
    close(product(results, cotangents), product(xs, move.adjoint().meaning(cotangents)))


@pytest.mark.parametrize("move", [moves.Broadcast(1), moves.Take(0)], ids=moves.describe)
def test_the_adjoint_of_a_move_without_one_raises(move):
    with pytest.raises(ValueError, match=r"Take it from fs.all_gather\(x, axis\)"):
        move.adjoint()
