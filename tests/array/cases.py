"""Operations to test: a name, a function and float64 arguments."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

F64 = torch.float64
_draw = torch.Generator().manual_seed(0)
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {}
FIRST_ORDER = {"norm0", "mmargin", "sdpa", "sdpac", "sdpag", "sdpam", "cdist"}
"""Torch has no second derivative of these, or none that is defined."""


def R(*shape):
    return torch.randn(*shape, dtype=F64, generator=_draw)


def U(*shape):
    return torch.rand(*shape, dtype=F64, generator=_draw) * 0.8 + 0.1


def I(n, *shape):  # noqa: E743
    return torch.randint(0, n, shape, generator=_draw)


def c(name, f, *xs):
    CASES[name] = f, xs


def set_rows(a, b):
    y = a.clone()
    y[2:4] = b
    return y


def set_numbers(a):
    y = a.clone()
    y[:, 1] = 0.0
    y[0] = 3.0
    return y


def in_place(a, b):
    y = a.clone()
    y += b
    y.mul_(2).relu_()
    return y


def change(f):
    """Return the function that changes a clone of its first argument in place."""

    def changed(a, *others):
        y = a.clone()
        f(y, *others)
        return y

    return changed


def scale_columns(y):
    y[:, 1:3] *= 2


def scale_rows(y, i):
    y[i] *= 2


def change_views(y):
    view = y[1:][0]
    view *= 3
    view[1] = view.sum()
    view[..., 2].fill_(1)
    y.detach()[0].mul_(1)


def positive(a):
    """Return positive definite matrices."""
    return a @ a.mT + a.new_tensor(torch.eye(a.shape[-2]).tolist())


for n in "neg abs exp sin tanh sigmoid relu gelu silu sqrt log rsqrt square erf".split():  # noqa: SIM905
    c(n, getattr(torch, n) if hasattr(torch, n) else getattr(F, n), U(8, 4))
c("add", lambda a, b: a + b, R(8, 4), R(8, 4))
c("sub", lambda a, b: a - b, R(8, 4), R(8, 4))
c("mul", lambda a, b: a * b, R(8, 4), R(8, 4))
c("div", lambda a, b: a / b, R(8, 4), U(8, 4))
c("pow", lambda a, b: a**b, U(8, 4), U(8, 4))
c("addb", lambda a, b: a + b, R(8, 4), R(4))
c("addn", lambda a, b: (a + 1) * (2 - b), R(8, 4), R(8, 1))
c("rdiv", lambda a: 3 / a + 2**a, U(8, 4))
c("sub0", lambda a, b: a - b, R(8, 4), R(8, 4)[0, 0])
c("lerp", lambda a, b: a.lerp(b, 0.3), R(8, 4), R(8, 4))
c("where", lambda a, b: torch.where(a > 0, a, b), R(8, 4), R(8, 4))
c("where0", lambda a: torch.where(a > 0, a, 0.0), R(8, 4))
c("wherem", lambda a, b: a.where(a > 0, b), R(8, 4), R(8, 4))
c("toarray", lambda a, b: a.to(b) + a.type_as(b), R(4), R(8, 4))
c("mf", lambda a: a.masked_fill(a > 0, 0.0), R(8, 4))
c("mf1", lambda a: a.masked_fill(a > 0, 1.0), R(8, 4))
c("clamp", lambda a: a.clamp(-0.5, 0.5), R(8, 4))
c("to", lambda a: a.float().double(), R(8, 4))
c("max2", torch.maximum, R(8, 4), R(8, 4))
c("maxm", torch.max, R(8, 4), R(8, 4))
c("atan2", torch.atan2, R(8, 4), R(8, 4))
c("addcmul", lambda a, b: torch.addcmul(a, a, b, value=0.5), R(8, 4), R(8, 4))
c("matmul", lambda a, b: a @ b, R(8, 4), R(4, 12))
c("bmm", lambda a, b: a @ b, R(4, 8, 4), R(4, 4, 2))
c("bmmb", lambda a, b: a @ b, R(2, 4, 8, 4), R(4, 4, 2))
c("mv", lambda a, b: a @ b, R(8, 4), R(4))
c("dot", lambda a, b: a @ b, R(8), R(8))
c("vm", lambda a, b: a @ b, R(8), R(8, 4))
c("v3", lambda a, b: a @ b, R(8), R(4, 8, 4))
c("m3", lambda a, b: a @ b, R(4, 2, 8), R(8))
c("linear", lambda a, w, b: F.linear(a, w, b), R(8, 4), R(12, 4), R(12))
c("linear3", lambda a, w: F.linear(a, w), R(2, 8, 4), R(12, 4))
c("addmm", lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2.0), R(12), R(8, 4), R(4, 12))
c("addmm2", lambda b, x, w: torch.addmm(b, x, w), R(8, 12), R(8, 4), R(4, 12))
c("baddbmm", lambda b, x, w: torch.baddbmm(b, x, w), R(2, 8, 4), R(2, 8, 4), R(2, 4, 4))
c("outer", torch.outer, R(8), R(4))
c("einsum", lambda a, b: torch.einsum("bij,bkj->bki", a, b), R(2, 4, 8), R(2, 4, 8))
c("einsum2", lambda a, b: torch.einsum("...i,ij->...j", a, b), R(2, 4, 8), R(8, 4))
c("einsumd", lambda a: torch.einsum("ii->i", a), R(4, 4))
c("einsumi", lambda a, b: torch.einsum("ij,jk", a, b), R(4, 8), R(8, 4))
c("tensordot", lambda a, b: torch.tensordot(a, b, 2), R(2, 4, 8), R(4, 8, 2))
c("tensordot2", lambda a, b: torch.tensordot(a, b, ([0, 1], [1, 0])), R(8, 4, 2), R(4, 8, 2))
c("bilinear", lambda x, y, w, b: F.bilinear(x, y, w, b), R(8, 4), R(8, 2), R(4, 4, 2), R(4))
for n in ["sum", "mean", "amax", "amin", "logsumexp", "var", "std", "prod"]:
    f = getattr(torch, n)
    c(n + "0", lambda a, f=f: f(a, 0), R(8, 4))
    c(n + "1k", lambda a, f=f: f(a, 1, keepdim=True), R(8, 4))
    if n != "prod":
        c(n + "a", (lambda a, f=f: f(a, (0, 1))), R(8, 4))
for n in ["sum", "mean", "max", "min", "prod", "var", "std", "norm", "all", "any"]:
    c(n + "_all", lambda a, n=n: getattr(torch, n)(a), R(8, 4))
c("var0", lambda a: a.var(1, unbiased=False), R(8, 4))
c("var2", lambda a: a.var(1, correction=2), R(8, 4))
c("norm2", lambda a: a.norm(2, 1), R(8, 4))
c("norm1", lambda a: torch.linalg.vector_norm(a, 1, 0), R(8, 4))
c("norminf", lambda a: torch.linalg.vector_norm(a, float("inf"), 0), R(8, 4))
c("norm3", lambda a: torch.linalg.vector_norm(a, 3, dim=0), R(8, 4))
c("norm0", lambda a: (a * 0).norm(dim=1) + (a * 0).std(1), R(8, 4))
c("maxd", lambda a: torch.max(a, 1), R(8, 4))
c("mind", lambda a: a.min(0, keepdim=True), R(8, 4))
c("argmax", lambda a: a.argmax(1), R(8, 4))
c("argmaxa", lambda a: a.argmax(), R(8, 4))
c("anyd", lambda a: (a > 1).any(0), R(8, 4))
c("alld", lambda a: (a > -1).all(1), R(8, 4))
c("cnz", lambda a: (a > 0).count_nonzero(0), R(8, 4))
c("sumb", lambda a: (a > 0).sum(), R(8, 4))
c("varmean", lambda a: torch.var_mean(a, 1), R(8, 4))
c("nansum", lambda a: torch.nansum(a, 0), R(8, 4))
c("median", lambda a: a.median(0), R(8, 4))
c("ties", lambda a: (a * 0).amax(1) + (a.round()).amax(0)[:4].sum() + a.round().max(), R(8, 4))
for n in [
    "cumsum",
    "cumprod",
    "softmax",
    "log_softmax",
    "sort",
    "argsort",
    "logcumsumexp",
    "cummax",
]:
    f = getattr(torch, n)
    c(n + "0", lambda a, f=f: f(a, 0), R(8, 4))
    c(n + "1", lambda a, f=f: f(a, -1), R(8, 4))
c("Fsoftmax", lambda a: F.softmax(a, dim=1), R(8, 4))
c("topk", lambda a: a.topk(2, 1), R(8, 4))
c("flip", lambda a: a.flip(0), R(8, 4))
c("roll", lambda a: a.roll(1, 1), R(8, 4))
c("glu", lambda a: F.glu(a), R(8, 4))
c("normalize", lambda a: F.normalize(a), R(8, 4))
c("diff", lambda a: a.diff(dim=0), R(8, 4))
c("kth", lambda a: a.kthvalue(2, 1), R(8, 4))
c("tril", lambda a: a.tril(), R(8, 4))
c("tril3", lambda a: a.triu(1), R(2, 8, 4))
c("reshape", lambda a: a.reshape(2, 4, 4), R(8, 4))
c("reshape2", lambda a: a.reshape(32), R(8, 4))
c("reshape3", lambda a: a.view(4, 8), R(8, 4))
c("flatten", lambda a: a.flatten(1), R(8, 4, 2))
c("unflatten", lambda a: a.unflatten(0, (2, -1)), R(8, 4))
c("permute", lambda a: a.permute(2, 0, 1), R(2, 8, 4))
c("T", lambda a: a.T, R(8, 4))
c("mT", lambda a: a.mT, R(2, 8, 4))
c("transpose", lambda a: a.transpose(0, 1), R(8, 4))
c("squeeze", lambda a: a.unsqueeze(1).squeeze(), R(8, 4))
c("expand", lambda a: a.expand(2, 8, 4), R(8, 4))
c("expand1", lambda a: a.expand(8, 4), R(8, 1))
c("expandm", lambda a: a.expand(-1, 4), R(8, 1))
c("split", lambda a: a.split(2, 0), R(8, 4))
c("split1", lambda a: torch.split(a, [1, 3], 1), R(8, 4))
c("chunk", lambda a: a.chunk(2, 1), R(8, 4))
c("unbind", lambda a: a.unbind(1), R(8, 4))
c("cat", lambda a, b: torch.cat([a, b], 1), R(8, 4), R(8, 2))
c("cat0", lambda a, b: torch.cat((a, b)), R(8, 4), R(4, 4))
c("stack", lambda a, b: torch.stack([a, b], 1), R(8, 4), R(8, 4))
c("repeat", lambda a: a.repeat(2, 1, 3), R(8, 4))
c("repi", lambda a: a.repeat_interleave(2, 1), R(8, 4))
c("repi0", lambda a: a.repeat_interleave(2), R(8, 4))
c("pad", lambda a: F.pad(a, (1, 2)), R(8, 4))
c("pad1", lambda a: F.pad(a, (1, 0, 0, 2), value=1.0), R(8, 4))
c("narrow", lambda a: a.narrow(0, 0, 8), R(8, 4))
c("unfold", lambda a: a.unfold(0, 8, 1), R(8, 4))
c("diagonal", lambda a: a.diagonal(), R(8, 4))
c("select", lambda a: a.select(1, 2), R(8, 4))
c("movedim", lambda a: a.movedim(0, 2), R(8, 4, 2))
c("broadcast_to", lambda a: torch.broadcast_to(a, (2, 8, 4)), R(8, 4))
c("btensors", lambda a, b: torch.broadcast_tensors(a, b), R(8, 4), R(8, 1))
c("idx0", lambda a: a[0], R(8, 4))
c("idxs", lambda a: a[2:5, 1:], R(8, 4))
c("idxn", lambda a: a[:, None, ..., ::2], R(8, 4))
c("idxf", lambda a: a[0:8, -4:], R(8, 4))
c("idxm", lambda a: a[-1, ...], R(8, 4))
c("idxt", lambda a, i: a[i], R(8, 4), I(8, 6))
c("idxt2", lambda a, i: a[:, i], R(8, 4), I(4, 2, 2))
c("idxt3", lambda a, i, j: a[i, j], R(8, 4), I(8, 4), I(4, 4))
c("idxt4", lambda a, i, j: a[i, :, j], R(8, 2, 4), I(8, 4), I(4, 4))
c("idxt5", lambda a, i: a[..., i, None], R(8, 4), I(4, 4))
c("idxt6", lambda a, i: a[1, :, i], R(8, 2, 4), I(4, 4))
c("idxt7", lambda a, i: a[:, 1, i], R(8, 2, 4), I(4, 4))
c("idxl", lambda a: (a[[0, 2]], a[..., [-1], :], a[:, [0, -1]], a[[1, 2], [0, 3]], a[[]]), R(8, 4))
c("idx0d", lambda a, i: a[i.sum(), 1:], R(8, 4), I(2, 2))
c(
    "idxmask",
    lambda a: (a[a > 0], a[:, a[0] > 0], a[None, a[:, 0] > 0, 1], a.masked_select(a[0] > 0)),
    R(8, 4),
)
c("setl", change(lambda y, b: y.__setitem__([0, -1], b)), R(8, 4), R(4))
c(
    "seti",
    change(lambda y, i, b: y.__setitem__((slice(1, 7), i), b)),
    R(8, 4),
    torch.tensor([2, 0]),
    R(6, 1),
)
c(
    "seti2",
    change(lambda y, i, b: y.__setitem__((i, ..., [1]), b)),
    R(8, 2, 4),
    torch.tensor([[2], [5]]),
    R(1, 2, 1, 2),
)
c("setm", change(lambda y, b: y.__setitem__(y > 0, b.sum())), R(8, 4), R(4))
c("setm2", change(lambda y, b: y.__setitem__((slice(None), y[0] > 0), b)), R(8, 4), R(8, 1))
c("augs", change(scale_columns), R(8, 4))
c("augi", change(scale_rows), R(8, 4), I(8, 3))
c("views", change(change_views), R(8, 4))
c("fill", change(lambda y, b: (y[0].fill_(b.sum()), y[1].copy_(b), y[:, 0].zero_())), R(8, 4), R(4))
c("inplace2", change(lambda y: y.__ipow__(2).__imod__(0.7)), U(8, 4))
c(
    "new",
    lambda a: (
        a.new_zeros(a.shape) + a,
        a.new_ones(2, 3),
        a.new_full((4,), 2),
        a.new_tensor([1, 2]),
    ),
    R(8, 4),
)
c("new_empty", lambda a: a.new_empty((8, 4), dtype=torch.float32).fill_(1), R(8, 4))
c(
    "discrete",
    lambda a: ((a > 0).nonzero(), (a > 0).nonzero(as_tuple=True), (a > 0).argwhere(), a.histc(4)),
    R(8, 4),
)
c("bincount", lambda i: (i.bincount(), i.bincount(i * 2.0, minlength=9), i.unique()), I(5, 8))
for n in "cholesky det eigvalsh inv matrix_exp slogdet svdvals".split():  # noqa: SIM905
    c(n, lambda a, n=n: getattr(torch.linalg, n)(positive(a) / 9), R(2, 4, 4))
c("solve", lambda a, b: torch.linalg.solve(positive(a), b), R(4, 4), R(4, 2))
c(
    "linalg",
    lambda a: (torch.linalg.multi_dot([a, a.T, a]), torch.inverse(positive(a)), a.diag()),
    R(4, 4),
)
c(
    "linnorm",
    lambda a: (torch.linalg.norm(a), torch.linalg.norm(a, dim=0), torch.linalg.matrix_norm(a, 1)),
    R(8, 4),
)
c("set", set_rows, R(8, 4), R(2, 4))
c("setb", set_rows, R(8, 4), R(4))
c("setn", set_numbers, R(8, 4))
c("inplace", in_place, R(8, 4), R(8, 4))
c("gather", lambda a, i: a.gather(1, i), R(8, 4), I(4, 8, 2))
c("gather0", lambda a, i: a.gather(0, i), R(8, 4), I(8, 6, 2))
c("scatter_add", lambda a, i, b: a.scatter_add(1, i, b), R(8, 4), I(4, 8, 2), R(8, 2))
c("scatter", lambda a, b: a.scatter(1, torch.argsort(b, 1), b), R(8, 4), R(8, 4))
c("index_select", lambda a, i: a.index_select(0, i), R(8, 4), I(8, 6))
c("index_add", lambda a, i, b: a.index_add(0, i, b), R(8, 4), I(8, 6), R(6, 4))
c("tad", lambda a, i: torch.take_along_dim(a, i, 1), R(8, 4), I(4, 8, 2))
c("one_hot", lambda i: F.one_hot(i, 5), I(5, 8))
c("isin", torch.isin, I(5, 8, 4), I(5, 3))
c(
    "isin_keywords",
    lambda i, j: torch.isin(test_elements=j, elements=i, invert=True),
    I(5, 8, 4),
    I(5, 2, 2),
)
c("isin_number", lambda i: torch.isin(3, i), I(5, 8))
c("isin_numbers", lambda i: torch.isin(i, 3), I(5, 8))
c("multinomial", lambda a: torch.multinomial(a, 1), U(8, 4))
c("multinomial_of_one_row", lambda a: torch.multinomial(a, 8), U(8))
c("multinomial_replaced", lambda a: torch.multinomial(a, 6, replacement=True), U(8, 4))
c("gather_keywords", lambda a, i: torch.gather(input=a, dim=1, index=i), R(8, 4), I(4, 8, 2))
c("slice_to_array", lambda a, i: a[:, : i.max() + 1], R(8, 4), torch.tensor([1, 2]))
c("one_hot_max", lambda i: F.one_hot(i), I(5, 8))
c("embedding", lambda i, w: F.embedding(i, w), I(8, 4, 2), R(8, 4))
c("embp", lambda i, w: F.embedding(i, w, padding_idx=1), I(8, 4, 2), R(8, 4))
for n in ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"]:
    for r in ("mean", "sum", "none"):
        c(n + r, lambda a, b, n=n, r=r: getattr(F, n)(a, b, reduction=r), R(8, 4), R(8, 4))
c("soft_margin", lambda a, b: F.soft_margin_loss(a, b.detach().sign()), R(8, 4), R(8, 4))
c("bce", lambda a, b: F.binary_cross_entropy(a, b), U(8, 4), U(8, 4))
c("bcel", lambda a, b: F.binary_cross_entropy_with_logits(a, b), R(8, 4), U(8, 4))
c("kl", lambda a, b: F.kl_div(a, b, reduction="batchmean"), R(8, 4), U(8, 4))
c("klm", lambda a, b: F.kl_div(a, b), R(8, 4), U(8, 4))
c("ce", lambda a, t: F.cross_entropy(a, t), R(8, 4), I(4, 8))
c("cei", lambda a, t: F.cross_entropy(a, t, ignore_index=1), R(8, 4), I(4, 8))
c(
    "cew",
    lambda a, t, w: F.cross_entropy(a, t, w.detach(), label_smoothing=0.1),
    R(8, 4),
    I(4, 8),
    U(4),
)
c("ce2", lambda a, t: F.cross_entropy(a, t, reduction="none"), R(8, 4, 2), I(4, 8, 2))
c("cep", lambda a, t: F.cross_entropy(a, t.softmax(1), label_smoothing=0.1), R(8, 4), R(8, 4))
c("nll", lambda a, t: F.nll_loss(a, t), R(8, 4), I(4, 8))
c("poisson", lambda a, b: F.poisson_nll_loss(a, b), R(8, 4), U(8, 4))
c("gauss", lambda a, b, v: F.gaussian_nll_loss(a, b, v), R(8, 4), R(8, 4), U(8, 4))
c("hinge", lambda a, b: F.hinge_embedding_loss(a, b.detach().sign()), R(8, 4), R(8, 4))
c(
    "cosemb",
    lambda a, b, t: F.cosine_embedding_loss(a, b, t.detach().sign()),
    R(8, 4),
    R(8, 4),
    R(8),
)
c("triplet", lambda a, b, n: F.triplet_margin_loss(a, b, n), R(8, 4), R(8, 4), R(8, 4))
c("mrank", lambda a, b, t: F.margin_ranking_loss(a, b, t.detach().sign()), R(8), R(8), R(8))
c("mmargin", lambda a, t: F.multi_margin_loss(a, t), R(8, 4), I(4, 8))
c("mlsm", lambda a, b: F.multilabel_soft_margin_loss(a, (b > 0).double()), R(8, 4), R(8, 4))
WEIGHED = {"label_smoothing": 0.1, "reduction": "none"}
c("cew2", lambda a, t, w: F.cross_entropy(a, t, w.detach(), **WEIGHED), R(8, 4), I(4, 8), U(4))
c("ce1", lambda a, t: F.cross_entropy(a, t), R(8), I(8))
c("ln", lambda x, w, b: F.layer_norm(x, (4,), w, b), R(8, 4), R(4), R(4))
c("ln2", lambda x: F.layer_norm(x, (8, 4)), R(2, 8, 4))
c("rms", lambda x, w: F.rms_norm(x, (4,), w), R(8, 4), R(4))
c("gn", lambda x, w: F.group_norm(x, 2, w), R(8, 4, 2), R(4))
c("bn", lambda x, w: F.batch_norm(x, None, None, w, training=True), R(8, 4, 2), R(4))
c("bne", lambda x, m, v: F.batch_norm(x, m.detach(), v.detach()), R(8, 4), R(4), U(4))
c("in", lambda x: F.instance_norm(x), R(8, 4, 6))
c("dropout", lambda x: F.dropout(x, 0.3), R(8, 4))
c("dropout2", lambda x: F.dropout2d(x, 0.3), R(4, 4, 2, 2))


def attention_of_module(x, w, b, o, m):
    options = {"key_padding_mask": x[:, :, 0].T, "attn_mask": m}
    return F.multi_head_attention_forward(
        x, x, x, 4, 2, w, b, None, None, False, 0.0, o, None, **options
    )


attend = F.scaled_dot_product_attention
c("sdpa", attend, R(4, 2, 8, 4), R(4, 2, 4, 4), R(4, 2, 4, 4))
c("sdpac", partial(attend, is_causal=True), R(4, 2, 8, 4), R(4, 2, 8, 4), R(4, 2, 8, 4))
c("sdpam", attend, R(4, 2, 8, 4), R(4, 2, 4, 4), R(4, 2, 4, 4), R(8, 4))
c("sdpag", partial(attend, enable_gqa=True), R(2, 4, 8, 4), R(2, 2, 8, 4), R(2, 2, 8, 4))
c("mha", attention_of_module, R(6, 2, 4), R(12, 4), R(12), R(4, 4), R(6, 6))
c("conv1", lambda x, w, b: F.conv1d(x, w, b, padding=1), R(4, 2, 8), R(4, 2, 3), R(4))
c("conv2", lambda x, w: F.conv2d(x, w, stride=2), R(4, 2, 4, 4), R(4, 2, 2, 2))
c("convt", lambda x, w: F.conv_transpose2d(x, w), R(4, 2, 4, 4), R(2, 4, 2, 2))
c("convg", lambda x, w: F.conv1d(x, w, groups=2), R(4, 2, 8), R(4, 1, 3))
c("maxpool", lambda x: F.max_pool2d(x, 2), R(4, 2, 4, 4))
c("avgpool", lambda x: F.avg_pool2d(x, 2), R(4, 2, 4, 4))
c("aap", lambda x: F.adaptive_avg_pool2d(x, 1), R(4, 2, 4, 4))
c("interp", lambda x: F.interpolate(x, scale_factor=2), R(4, 2, 4))
c("cossim", lambda a, b: F.cosine_similarity(a, b), R(8, 4), R(8, 4))
c("cdist", lambda a, b: torch.cdist(a, b), R(8, 4), R(4, 4))
c("pshuffle", lambda x: F.pixel_shuffle(x, 2), R(2, 4, 2, 2))
c("zeros_like", lambda a: torch.zeros_like(a) + a, R(8, 4))
c("detach", lambda a: a.detach() * a, R(8, 4))
c("cmp", lambda a, b: (a == b, a < b, a != 1), R(8, 4), R(8, 4))
c("logical", lambda a, b: (a > 0) & ~(b > 0) | (a > 1), R(8, 4), R(8, 4))
