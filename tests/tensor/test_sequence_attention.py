"""Attention over a sharded sequence equals attention on one device, in every algorithm."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import fshard as fs
from fshard.tensor import blocks, kernels
from fshard.tensor.kernels import EfficientAttention, FlashAttention, FusedAttention
from tests.helpers.sampled import examples
from tests.tensor import cuda_attention
from tests.tensor.attention_oracle import HOWS, derivatives, serial, sharded
from tests.tensor.cuda_attention import operations_of_cuda

MASKS = ("none", "padding", "documents", "both")


def inputs(
    n,
    *,
    batch=2,
    heads=None,
    kv_heads=None,
    chunk=2,
    dim=4,
    masks="none",
    seed=0,
    dtype=torch.float64,
):
    """Return q, k, v, weights of the outputs, and masks in which some rows see no key."""
    draw = torch.Generator().manual_seed(seed)
    heads = heads or 2 * n
    tokens = 2 * n * chunk
    kv_heads = kv_heads or heads
    shapes = [(batch, count, tokens, dim) for count in (heads, kv_heads, kv_heads, heads)]
    actual = {}
    if masks in ("padding", "both"):
        actual["key_mask"] = torch.rand(batch, tokens, generator=draw) > 0.4
        actual["key_mask"][:, 0] = False
    if masks in ("documents", "both"):
        actual["document_ids"] = torch.randint(0, 3, (batch, tokens), generator=draw).sort(1)[0]
    return [
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes
    ], actual


def choose(operation, bias, causal, scale):
    """Return an operation, or the one that takes a bias; None for None."""
    takes_bias = (
        EfficientAttention if operation is FlashAttention and bias is not None else operation
    )
    return takes_bias and takes_bias(bias, causal, scale)


def check(mesh, how, values, causal=False, masks=None, second=True, **options):
    """Compare output, first and second derivatives with the serial run in float64."""
    options = {**options, **(masks or {}), "causal": causal}
    expected = derivatives(lambda *xs: serial(*xs, **options), *values, second)
    actual = derivatives(lambda *xs: sharded(mesh, how, *xs, **options), *values, second)
    for want, own in zip(expected, actual, strict=True):
        torch.testing.assert_close(own, want, rtol=1e-9, atol=1e-11)


@settings(max_examples=examples(16))
@given(st.data())
def test_equals_serial_attention_and_derivatives(data):
    n = data.draw(st.sampled_from((2, 3, 4, 8)))
    how = data.draw(st.sampled_from(HOWS))
    group = data.draw(st.sampled_from((1, 2, 3)))
    kv_heads = data.draw(st.integers(1, 4))
    if how == "ulysses" and group * kv_heads % n:
        group *= n
    sizes = {
        "batch": st.integers(1, 2),
        "chunk": st.integers(1, 3),
        "dim": st.integers(1, 5),
        "seed": st.integers(0, 99),
    }
    sizes = {name: data.draw(size) for name, size in sizes.items()}
    masks = data.draw(st.sampled_from(MASKS))
    values, masks = inputs(n, heads=group * kv_heads, kv_heads=kv_heads, masks=masks, **sizes)
    scale = data.draw(st.sampled_from((None, 0.3)))
    check(fs.make_mesh({"seq": n}), how, values, data.draw(st.booleans()), masks, scale=scale)


@pytest.mark.parametrize("masks", ["none", "both"])
@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        (FusedAttention, torch.float32), (FusedAttention, torch.bfloat16), (EfficientAttention, torch.float32), (EfficientAttention, torch.float16),
        (FlashAttention, torch.bfloat16), (None, torch.bfloat16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", HOWS)
def test_error_is_at_most_four_times_that_of_torch(how, operation, dtype, masks, monkeypatch):
    """With the operations of CUDA too, under the rules that their source states."""
    monkeypatch.setattr(
        blocks, "fused_attention", lambda q, k, v, *options: choose(operation, *options)
    )
    values, masks = inputs(4, heads=8, kv_heads=4, chunk=7, dim=8, masks=masks, dtype=dtype)
    check_in_low_precision(how, values, masks)


def check_in_low_precision(how, values, masks):
    """Compare the error of the output and the gradients with four times that of torch's function."""

    def results(attend, xs, **options):
        return derivatives(
            lambda *xs: attend(*xs, **masks, causal=True, **options), *xs, second=False
        )

    exact = results(serial, [x.double() for x in values])
    alone = results(serial, values, torchs=True)
    with operations_of_cuda():
        actual = results(
            lambda *xs, **options: sharded(fs.make_mesh({"seq": 4}), how, *xs, **options), values
        )
    for want, rough, own in zip(exact, alone, actual, strict=True):
        assert own.dtype == values[0].dtype
        assert (own - want).norm() <= 4 * (rough - want).norm()


@pytest.mark.parametrize(
    ("dtype", "dim", "masks", "names"),
    [
        (torch.bfloat16, 20, "none", {"flash"}), (torch.float16, 5, "none", {"flash"}), (torch.bfloat16, 16, "both", {"efficient"}),
        (torch.bfloat16, 20, "both", set()), (torch.float32, 20, "none", {"efficient"}), (torch.float32, 5, "none", set()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["ring", "ulysses"])
def test_dims_of_heads_that_kernels_of_cuda_refuse(how, dtype, dim, masks, names, monkeypatch):
    """Torch allows flash attention for dims that are no multiple of 8, and pads them before its
    operation.
    """
    used = called_on_cuda(monkeypatch)
    values, masks = inputs(4, heads=8, kv_heads=4, chunk=3, dim=dim, masks=masks, dtype=dtype)
    check_in_low_precision(how, values, masks)
    assert set(used) == {f"{name}{way}" for name in names for way in ("", "_backward")}


@pytest.mark.parametrize(("masks", "calls"), [("none", 1), ("both", 3)])
def test_kernel_of_cuda_is_called_once_for_all_groups(masks, calls, monkeypatch):
    """Flash attention takes fewer kv heads; with masks there is a call for each of 3 query heads."""
    used = called_on_cuda(monkeypatch)
    values, masks = inputs(1, heads=6, kv_heads=2, dim=8, masks=masks, dtype=torch.bfloat16)
    with operations_of_cuda():
        derivatives(
            lambda *xs: sharded(fs.make_mesh({"seq": 1}), "ring", *xs, **masks), *values, False
        )
    assert [*used.values()] == [calls, calls]


def called_on_cuda(monkeypatch):
    """Choose kernels as on CUDA, by torch's rules; return how often each is called."""
    used = Counter()

    def counted(name, function):
        def call(*args, **kwargs):
            used[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(blocks, "fused_attention", kernels.fused_attention_of_cuda)
    monkeypatch.setattr(kernels.cuda, "can_use_flash_attention", cuda_attention.can_use_flash)
    monkeypatch.setattr(
        kernels.cuda, "can_use_efficient_attention", cuda_attention.can_use_efficient
    )
    for name in ("flash", "flash_backward", "efficient", "efficient_backward"):
        monkeypatch.setattr(cuda_attention, name, counted(name, getattr(cuda_attention, name)))
    return used


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("how", HOWS)
def test_formula_of_devices_without_kernel(how, masks, monkeypatch):
    monkeypatch.setattr(blocks, "fused_attention", lambda *args: None)
    values, masks = inputs(2, heads=4, kv_heads=2, masks=masks)
    for second in (True, False):  # which has a backward of its own
        check(fs.make_mesh({"seq": 2}), how, values, True, masks, second=second, scale=0.3)


@pytest.mark.parametrize("how", HOWS)
def test_cross_attention_and_frozen_keys(how):
    (q, _, _, weights), _ = inputs(2)
    _, k, v, _ = inputs(2, chunk=3)[0]
    mesh = fs.make_mesh({"seq": 2})
    check(mesh, how, (q, k, v, weights))
    q.requires_grad_()
    actual = [
        torch.autograd.grad((attend(q) * weights).sum(), q, create_graph=True)[0]
        for attend in (lambda q: sharded(mesh, how, q, k, v), lambda q: serial(q, k, v))
    ]
    torch.testing.assert_close(*actual)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), q)[0] for x in actual))


@pytest.mark.parametrize("how", HOWS)
def test_strided_tensors_and_cotangents(how):
    """The kernel reads rows: tensors whose last dim is strided, or expanded as the cotangent of a
    sum, are copied.
    """
    strided = [x.mT.contiguous().mT for x in inputs(1, heads=4, kv_heads=2)[0][:3]]

    def local():
        own = [x.detach().requires_grad_() for x in strided]
        return torch.autograd.grad(fs.tensor.attention(*own, "seq", how, causal=True).sum(), own)

    xs = [x.requires_grad_() for x in strided]
    (actual,) = fs.run(local, mesh=fs.make_mesh({"seq": 1}))
    torch.testing.assert_close(actual, torch.autograd.grad(serial(*xs, causal=True).sum(), xs))


def test_self_attention_of_one_tensor_has_partial_second_derivatives():
    """q, k, v depend on one tensor, and k on q: the second derivative counts each path once."""
    mesh, ((x, _, _, weights), _) = fs.make_mesh({"seq": 2}), inputs(2)
    results = []
    for attend in (
        lambda *xs: sharded(mesh, "zigzag", *xs, causal=True),
        lambda *xs: serial(*xs, causal=True),
    ):
        own = x.clone().requires_grad_()
        q = own.sin()
        (first,) = torch.autograd.grad(
            (attend(q, q * own, own) * weights).sum(), own, create_graph=True
        )
        results.append((first, *torch.autograd.grad(first.square().sum(), own)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("how", HOWS)
def test_transforms_of_torch_func(how):
    (q, k, v, weights), masks = inputs(2, batch=1, heads=2, chunk=1, dim=2, masks="both")
    mesh = fs.make_mesh({"seq": 2})
    at = slice(None)

    def losses(attend):
        return lambda q: (attend(q, k, v, causal=True, **masks) * weights)[at].sum()

    one = losses(lambda *xs, **options: sharded(mesh, how, *xs, **options))
    other = losses(serial)
    torch.testing.assert_close(torch.func.hessian(one)(q), torch.func.hessian(other)(q))
    tangent = torch.randn_like(q)
    torch.testing.assert_close(
        torch.func.jvp(one, (q,), (tangent,)), torch.func.jvp(other, (q,), (tangent,))
    )
    many = torch.stack([q, 2 * q])
    torch.testing.assert_close(torch.func.vmap(one)(many), torch.func.vmap(other)(many))


# -- cost ------------------------------------------------------------------------------------------


def saved_bytes(attend, *xs):
    """Return the bytes that autograd saves; a tensor that is saved twice counts once."""
    seen = {}

    def pack(x):
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attend(*[x.clone().requires_grad_() for x in xs])
    return sum(seen.values()) + 0 * out.numel()


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("how", HOWS)
def test_saved_bytes_are_those_of_the_own_tokens(how, n):
    (q, k, v, _), _ = inputs(n, heads=8, chunk=4, dim=16, dtype=torch.float32)
    alone = saved_bytes(lambda *xs: F.scaled_dot_product_attention(*xs, is_causal=True), q, k, v)
    attend = lambda *xs: fs.tensor.attention(*xs, "seq", how, causal=True)  # noqa: E731
    own = [x.chunk(n, 2)[0] for x in (q, k, v)]
    for actual in fs.run(lambda: saved_bytes(attend, *own), mesh=fs.make_mesh({"seq": n})):
        assert actual <= 1.15 / n * alone


def computed_scores(how, n, monkeypatch):
    """Return how many scores each device computes in a causal forward and its backward."""
    counts = dict.fromkeys(range(n), 0)

    def counting(function):
        def counted(rows, k, *others):
            counts[fs.axis_index("seq")] += (
                rows if isinstance(rows, torch.Tensor) else rows[0]
            ).shape[-2] * k.shape[-2]
            return function(rows, k, *others)

        return counted

    (q, k, v, _), _ = inputs(n)

    def step():
        xs = [x.chunk(n, 2)[0].clone().requires_grad_() for x in (q, k, v)]
        fs.tensor.attention(*xs, "seq", how, causal=True).sum().backward()

    with monkeypatch.context() as patch:
        for name in ("_attend", "_attend_backward"):
            patch.setattr(blocks, name, counting(getattr(blocks, name)))
        fs.run(step, mesh=fs.make_mesh({"seq": n}))
    block = (q.shape[2] // n) ** 2
    return [count / (2 * block) for count in counts.values()]


def test_masked_blocks_are_skipped_and_zigzag_is_balanced(monkeypatch):
    """In blocks: a diagonal block and half of each other one in zigzag order."""
    assert computed_scores("ring", 4, monkeypatch) == [1, 2, 3, 4]
    assert computed_scores("zigzag", 4, monkeypatch) == [2.5] * 4


def test_next_block_is_sent_before_the_block_is_used(monkeypatch):
    events, start, attend = [], blocks.BlockPlan.send_on, blocks._attend
    is_first = lambda: fs.axis_index("seq") == 0  # noqa: E731
    monkeypatch.setattr(
        blocks.BlockPlan, "send_on", lambda *a: (is_first() and events.append("send"), start(*a))[1]
    )
    monkeypatch.setattr(
        blocks, "_attend", lambda *a: (is_first() and events.append("use"), attend(*a))[1]
    )
    sharded(fs.make_mesh({"seq": 3}), "ring", *inputs(3)[0][:3])
    assert events == ["send", "use", "send", "use", "use"]


@pytest.mark.parametrize("how", HOWS)
def test_bytes_on_an_abstract_mesh_equal_the_sent_ones(how):
    def sent(runtime, device):
        (q, k, v, _), masks = inputs(4, masks="both")
        own = [x.chunk(4, 2)[0].to(device) for x in (q, k, v)]
        masks = {name: x.chunk(4, 1)[0].to(device) for name, x in masks.items()}

        def step():
            xs = [x.clone().requires_grad_() for x in own]
            torch.autograd.grad(
                fs.tensor.attention(*xs, "seq", how, causal=True, **masks).sum(), xs
            )

        with fs.ledger() as comm:
            fs.run(step, mesh=fs.make_mesh({"seq": 4}, runtime=runtime))
        return {name: row for (name, _), row in comm.by_collective().items()}

    assert sent("virtual", "cpu") == sent("abstract", "meta")


@pytest.mark.parametrize(("masks", "messages"), [("none", 2 + 2 + 3), ("documents", 4 + 4 + 3)])
def test_keys_and_values_of_a_ring_travel_in_one_message(masks, messages):
    """Twice around 3 devices; the gradients go on to their own device.

    Ids of documents have another dtype.
    """
    (q, k, v, _), masks = inputs(3, masks=masks)
    own = [x.chunk(3, 2)[0] for x in (q, k, v)]
    masks = {name: x.chunk(3, 1)[0] for name, x in masks.items()}

    def step():
        xs = [x.clone().requires_grad_() for x in own]
        fs.tensor.attention(*xs, "seq", "ring", **masks).sum().backward()

    with fs.ledger() as comm:
        fs.run(step, mesh=fs.make_mesh({"seq": 3}))
    ((_, (calls, _)),) = comm.by_collective(device=0).items()
    assert calls == messages


# -- processes and errors --------------------------------------------------------------------------


def test_errors_name_all_offenders_and_legal_sizes():
    (q, k, v, _), _ = inputs(2, heads=5, kv_heads=2)
    options = {"key_mask": torch.ones(2, 3), "causal": True}

    def call(how, q, k, v, **options):
        fs.run(
            lambda: fs.tensor.attention(q, k, v, "seq", how, **options),
            mesh=fs.make_mesh({"seq": 2}),
        )

    with pytest.raises(ValueError) as error:
        call("ulysses", q, k[:, :, :-1], v.float(), **options)
    for part in (
        "v must be (2, 2, 7, 4); got (2, 2, 8, 4)",
        "one floating dtype",
        "key_mask must be (2, 7); got (2, 3)",
        "as many queries as keys; got 8 and 7",
        "kv heads; got 5 and 2. Use 4 or 6",
        "heads must be a multiple of 2 devices; got 5. Use 4 or 6",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="tokens must be a multiple of 4; got 2 x 7. Use 12 or 16"):
        call("zigzag", *(x[:, :4, :7] for x in (q, k, v)))
    with pytest.raises(ValueError, match="how must be one of"):
        call("tree", q[:, :4], k, v)
    with pytest.raises(ValueError, match="4 dims"):
        call("ring", q[0], k, v)
