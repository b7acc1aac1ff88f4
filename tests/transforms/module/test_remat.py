"""A rematerialised function is the function: values, derivatives of every kind, draws, collectives.

The oracle is the function itself. What is recomputed is counted by torch's dispatcher.
"""

from itertools import product

import pytest
import torch
from torch import nn
from torch.func import grad, jacrev, jvp, vmap
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import fshard as fs
from fshard import P
from fshard.randomness import keyed_random
from fshard.transforms.module.remat import PolicyError, checkpoint_name, offload, remat, save_names

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

D = 4
POLICIES = [
    "everything",
    "nothing",
    "dots",
    save_names("hidden"),
    offload("everything"),
    offload("dots"),
]
POLICIES += [offload(save_names("hidden"))]
NAMES = [
    "everything",
    "nothing",
    "dots",
    "names",
    "offload everything",
    "offload dots",
    "offload names",
]
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=NAMES)


def values(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def mlp(w, v, x):
    h = checkpoint_name((x @ w).relu_(), "hidden")  # in place: what is kept must notice
    return (torch.nn.functional.dropout(h.sin(), 0.3) @ v).tanh()


def loss(f, w, v, x):
    with keyed_random(0):
        return (f(w, v, x) ** 2).sum()


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def gradients(f, *arguments):
    """Return the gradients of the sum of the results by all arguments."""
    return torch.autograd.grad(f(*arguments).sum(), arguments)


@each_policy
def test_remat_gradients_equal_the_function(policy):
    w, v, x = values((D, D), (D, D), (3, D))
    expected = torch.autograd.grad(loss(mlp, w, v, x), (w, v, x))
    again = remat(mlp, policy)
    close(torch.autograd.grad(loss(again, w, v, x), (w, v, x)), expected)
    y = loss(again, w, v, x)
    for _ in range(2):  # a graph that is kept can be gone through again
        close(torch.autograd.grad(y, (w, v, x), retain_graph=True), expected)


@each_policy
def test_remat_of_results_that_are_written_to(policy):
    """Unlike relu, sin gives something else if it runs twice."""
    w, x = values((D, D), (3, D))

    def f(w, x):
        return checkpoint_name((x @ w).sin_(), "hidden").exp().sum()

    close(gradients(remat(f, policy), w, x), gradients(f, w, x))


@each_policy
def test_remat_supports_double_backward(policy):
    w, v, x = values((D, D), (D, D), (3, D))

    def second(f):
        (g,) = torch.autograd.grad(loss(f, w, v, x), w, create_graph=True)
        return torch.autograd.grad((g**2).sum(), (w, v, x))

    close(second(remat(mlp, policy)), second(mlp))


@each_policy
@pytest.mark.parametrize("inner", POLICIES, ids=NAMES)
def test_remat_nested_has_equal_gradients(policy, inner):
    w, v, x = values((D, D), (D, D), (3, D))

    def twice(f):
        def call(w, v, x):
            h = checkpoint_name(f(w, v, x).exp(), "hidden")
            return f(w, v, h * 2)

        return call

    nested = remat(twice(remat(mlp, inner)), policy)
    actual = torch.autograd.grad(loss(nested, w, v, x), (w, v, x))
    expected = torch.autograd.grad(loss(twice(mlp), w, v, x), (w, v, x))
    close(actual, expected)


def grad_of_grad(f, w, v, x):
    first = grad(lambda w: loss(f, w, v, x))
    return grad(lambda w: first(w).square().sum())(w)


def vmap_of_grad(f, w, v, x):
    per_row = grad(lambda w, x: loss(f, w, v, x))
    return vmap(per_row, (None, 0), randomness="same")(w, x)


TRANSFORMS = {
    "grad": lambda f, w, v, x: grad(lambda w, v: loss(f, w, v, x), argnums=(0, 1))(w, v),
    "grad of grad": grad_of_grad,
    "jvp": lambda f, w, v, x: jvp(lambda w: loss(f, w, v, x), (w,), (v,)),
    "hessian": lambda f, w, v, x: jacrev(grad(lambda w: loss(f, w, v, x)))(w),
    "vmap of grad": vmap_of_grad,
}


@pytest.mark.parametrize("policy", ["nothing", offload("dots")], ids=str)
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_torch_func_transforms_apply_to_the_function(kind, policy):
    transform = TRANSFORMS[kind]
    w, v, x = (t.detach() for t in values((D, D), (D, D), (3, D)))

    with keyed_random(1):
        expected = transform(mlp_out_of_place, w, v, x)
    with keyed_random(1):
        actual = transform(remat(mlp_out_of_place, policy), w, v, x)

    close(actual, expected)


def mlp_out_of_place(w, v, x):
    hidden = checkpoint_name((x @ w).sigmoid(), "hidden").sin()
    return (torch.nn.functional.dropout(hidden, 0.3) @ v).tanh()


# -- what is kept, and what runs again -------------------------------------------------------------


def count(f, policy, *args, operations=("mm", "sin", "exp")):
    """Return how often each operation ran, forward and backward together."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = dict.fromkeys(operations, 0)

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            op = func.overloadpacket.__name__
            if op in seen:
                seen[op] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        remat(f, policy)(*args).sum().backward()
    return seen


def three(x, w):
    return checkpoint_name((x @ w).sin(), "s").exp().square()


@pytest.mark.parametrize(
    ("policy", "mm", "sin", "exp"),
    [
        ("everything", 1, 1, 1),
        ("nothing", 2, 2, 2),
        ("dots", 1, 2, 2),
        (save_names("s"), 2, 1, 2),
        (save_names("other"), 2, 2, 2),
    ],
    ids=["everything", "nothing", "dots", "names", "other names"],
)
def test_remat_recomputes_what_the_policy_drops(policy, mm, sin, exp):
    w, x = values((D, D), (3, D))
    x = x.detach()
    with_backward = {"mm": mm + 1, "sin": sin, "exp": exp}  # the product's own backward is one more
    assert count(three, policy, x, w) == with_backward


def test_checkpoint_name_on_view_keeps_its_base():
    w, x = values((D, D), (3, D))
    policy = save_names("s")

    def f(x, w):
        view = (x @ w).sin().view(-1)[2:].reshape(2, 5)
        return checkpoint_name(view, "s").exp().square()

    assert count(f, policy, x.detach(), w)["sin"] == 1
    close(gradients(remat(f, policy), x, w), gradients(f, x, w))


def causal_attention(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


MULTIPLE = {
    "_scaled_dot_product_flash_attention_for_cpu": causal_attention,
    "native_layer_norm": lambda x: F.layer_norm(x, (D,)),
    "max_pool2d_with_indices": lambda x: F.max_pool2d(x, 2),
}


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("operation", MULTIPLE)
def test_a_named_result_is_kept_with_the_others_of_its_operation(operation, host):
    """As the sums of attention, which its backward needs."""
    w, x = values((D, D), (2, 2, 4, D))
    policy = save_names(offload="a") if host else save_names("a")

    def f(x, w):
        return checkpoint_name(MULTIPLE[operation](x @ w), "a").exp().square()

    counts = count(f, policy, x.detach(), w, operations=(operation, "exp"))
    assert counts == {operation: 1, "exp": 2}
    close(gradients(remat(f, policy), x, w), gradients(f, x, w))


def kept_bytes(f, *args):
    """Return how many bytes autograd keeps for backward, the arguments apart."""
    seen = {}

    def pack(x):
        seen[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    own = {x.untyped_storage()._cdata for x in args}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = f(*args)
    return sum(size for memory, size in seen.items() if memory not in own), y


def test_nested_remat_keeps_outermost_inputs_only():
    (x,) = values((1000,))
    inner = remat(lambda x: x.sin().exp())
    size, _ = kept_bytes(remat(lambda x: inner(inner(x).sin())), x)
    assert size == 0


# -- arguments and results -------------------------------------------------------------------------


def test_remat_of_module_trains_its_parameters():
    layer = nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(D, 1))
    params = list(layer.parameters())
    x = torch.randn(3, D)

    with keyed_random(3):
        expected = torch.autograd.grad(layer(x).sum(), params)
    with keyed_random(3):
        y = remat(layer, "dots")(x).sum()

    close(torch.autograd.grad(y, params), expected)


def test_remat_without_grad_keeps_nothing():
    x = torch.ones(2)
    with torch.no_grad():
        assert torch.equal(remat(torch.sin)(x), x.sin())


def test_remat_with_unknown_policy_raises():
    with pytest.raises(PolicyError, match='policy must be "everything", "nothing", "dots", '):
        remat(torch.sin, "some")


# -- on devices ------------------------------------------------------------------------------------


def block(w, x):
    """Column-parallel, then row-parallel: a gather, dropout, and a sum in the middle."""
    w = fs.all_gather(fs.pvary(w, "model"), "data")
    h = checkpoint_name((fs.pvary(x, "model") @ w).sin(), "hidden")
    h = torch.nn.functional.dropout(h, 0.3)
    y = fs.psum((h * (1 + fs.axis_index("model"))).exp(), "model")
    return checkpoint_name(y, "hidden").sin()


@each_policy
@pytest.mark.parametrize("transform", ["autograd", "func"])
def test_remat_repeats_collectives_and_dropout(policy, transform):
    mesh = fs.make_mesh({"data": 2, "model": 2})
    w, x = (t.detach() for t in values((D, D), (6, D)))

    def step(f):
        def total(w, x):
            y = f(w, f(w, x)).square().sum()
            return fs.psum(y, "data")

        def device(w, x):
            if transform == "func":
                return grad(total)(w, x)
            w = w.requires_grad_()
            return torch.autograd.grad(total(w, x), w)[0]

        torch.manual_seed(0)
        run = fs.shard_map(device, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
        return fs.unshard(run(w, x))

    close(step(remat(block, policy)), step(block))


@each_policy
def test_remat_of_shard_map_has_equal_gradients(policy):
    mesh = fs.make_mesh({"data": 4})
    w, x = values((D, D), (8, D))

    def on_device(w, x):
        return (fs.pvary(w, "data").sin().T @ x.T).T

    def f(w, x):
        mapped = fs.shard_map(on_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
        return checkpoint_name(fs.unshard(mapped(w, x)), "hidden").sin()

    close(gradients(remat(f, policy), w, x), gradients(f, w, x))


def gradient_and_ledger(policy, x, runtime=None):
    """Return the gradient of a block on a mesh, and its numbers of collectives."""
    mesh = fs.make_mesh({"data": 2, "model": 2}, runtime=runtime)
    w = torch.linspace(-1, 1, D * D, dtype=torch.float64).reshape(D, D).to(x.device)

    def device(w, x):
        w = w.requires_grad_()
        y = remat(block, policy)(w, x)
        return torch.autograd.grad(y.sum(), w)[0]

    specs = {"in_specs": (P("data"), P("data")), "out_specs": P("data")}
    step = fs.shard_map(device, mesh=mesh, **specs, check=False)
    torch.manual_seed(0)
    with fs.ledger() as comm:
        result = step(w, x)
    return result, {name: comm.calls(collective=name) for name in ("all_gather", "psum")}


@each_policy
def test_remat_repeats_collectives_on_any_mesh(policy):
    """One gather and one sum in forward.

    Backward sums for a pvary of each argument that needs it.
    """
    again = policy != "everything" and policy != offload("everything")
    expected = {"all_gather": 1 + again, "psum": 2 + again}
    for runtime, device in (("virtual", "cpu"), ("abstract", "meta")):
        _, calls = gradient_and_ledger(
            policy, torch.ones(6, D, dtype=torch.float64, device=device), runtime
        )
        assert calls == expected, runtime


def sum_of(f):
    return lambda x: f(x).sum()


def grad_of_grad_inside(f, x):
    first = grad(sum_of(f))
    return grad(lambda x: first(x).square().sum())(x)


def vjp_inside(f, x):
    _, pull = torch.func.vjp(f, x)
    return pull(x)[0]


def jacrev_inside(f, x):
    jacobian = jacrev(lambda x: f(x).sum(0))(x)
    return jacobian.sum((0, 1)).reshape(1, -1)


def hessian_inside(f, x):
    return torch.func.hessian(sum_of(f))(x[0]).sum(0, keepdim=True)


INSIDE = {
    "grad": lambda f, x: grad(sum_of(f))(x),
    "grad of grad": grad_of_grad_inside,
    "vjp": vjp_inside,
    "jacrev": jacrev_inside,
    "hessian": hessian_inside,
    "vmap of grad": lambda f, x: vmap(grad(sum_of(f)))(x),
    "jvp": lambda f, x: jvp(f, (x,), (x,))[1],
}


def transforming(kind):
    """Return a function with a transform of torch.func between two dropouts."""

    def f(w, v, x):
        dropped = torch.nn.functional.dropout((x @ w).sigmoid(), 0.3)
        h = checkpoint_name(dropped, "hidden").exp()
        transform = fs.with_unsharded_params(INSIDE[kind], keep=True)
        g = transform(lambda h: (h @ v).tanh() ** 2, h)
        return (torch.nn.functional.dropout(g, 0.3) @ w).sin() + h.sum()

    return f


@pytest.mark.parametrize(
    ("kind", "policy"),
    [*product(["grad"], POLICIES), *product([*INSIDE][1:], ["nothing"])],
    ids=[*NAMES, *[*INSIDE][1:]],
)
def test_remat_with_torch_func_inside_has_equal_gradients(kind, policy):
    w, v, x = values((D, D), (D, D), (3, D))
    f = transforming(kind)
    recomputed = remat(f, policy)

    def derivatives(f):
        """Return the loss, its gradients, second derivatives, and the state of the generator."""
        with keyed_random(0):
            y = f(w, v, x).square().sum()
            state = torch.get_rng_state()
        (first,) = torch.autograd.grad(y, w, create_graph=True)
        grads = torch.autograd.grad(y, (w, v, x), retain_graph=True)
        seconds = torch.autograd.grad(first.sin().sum(), (w, v, x))
        return [y, *grads, *seconds, state]

    for _ in range(2):
        for actual, expected in zip(derivatives(recomputed), derivatives(f), strict=True):
            close(actual, expected)

    def twice(f, g):
        return lambda w, v, x: f(w, v, g(w, v, x))

    nested = remat(twice(recomputed, remat(f, policy)), policy)
    for actual, expected in zip(derivatives(nested), derivatives(twice(f, f)), strict=True):
        close(actual, expected)


class Residual(nn.Module):
    """Two square layers: a result in the place of another one would have the right shape."""

    def __init__(self, policy):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)
        self.policy = policy

    def residual(self, x):
        hidden = checkpoint_name(self.up(x), "hidden")
        return x + self.down(torch.sin(hidden))

    def forward(self, x):
        layer = remat(self.residual, self.policy)
        return layer(layer(x))


@each_policy
def test_remat_of_sharded_layers_has_equal_gradients(policy):
    """The first step finds how results are sharded.

    The operations for this are not those of the function.
    """
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.manual_seed(0))
    results = []
    for kept in ("everything", policy):
        torch.manual_seed(1)
        model = Residual(kept).double()
        plan = fs.tensor_parallel(model, axis="model", sample=x, check=False)
        apply, params, buffers = fs.functionalize(model, plan=plan)
        params = fs.shard_params(params, plan.rules, mesh=fs.make_mesh({"model": 2}))

        def loss(params, x, apply=apply, buffers=buffers, plan=plan):
            return plan.full(apply(params, buffers, x)[0]).square().mean()

        gradient = fs.value_and_grad(
            loss, mesh=fs.make_mesh({"model": 2}), batch=P(), local="model"
        )
        results.append([*map(fs.unshard, gradient(params, x)[1].values())])
    close(*results)


def test_remat_with_a_policy_inside_remat_keeps_no_results():
    """The outer function runs again, and its products with it."""
    storages = []

    def product(x):
        y = x @ x
        storages.append(StorageWeakRef(y.untyped_storage()))
        return y.sin()

    x = torch.eye(3, requires_grad=True)
    y = remat(lambda x: remat(product, "dots")(x).cos())(x)
    assert storages[0].expired()
    (actual,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad((x @ x).sin().cos().sum(), x)
    torch.testing.assert_close(actual, expected)
