"""Branches that depend on the data: devices that use different parameters, or the same in another order."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.testing.processes import Processes

EXPERTS = 4


def experts():
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(EXPERTS, 3, 3, dtype=torch.float64, generator=generator)
    return {"experts": [{"w": w, "b": w[0] * 1} for w in draw], "root": draw[0] * 0.5}


def routed(params, batch):
    """Send every sample through the experts that its code names; codes are equal in a slice."""
    y = batch["x"] @ params["root"]
    code = int(batch["code"][0])
    for place in range(EXPERTS) if code < 1 << EXPERTS else reversed(range(EXPERTS)):
        if code >> place & 1:
            y = torch.tanh(y @ params["experts"][place]["w"] + params["experts"][place]["b"])
    return y.square().mean()


def batch_of(codes):
    """Return a batch of two samples for each code."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * len(codes), 3, dtype=torch.float64, generator=generator)
    return {"x": x, "code": torch.tensor(codes).repeat_interleave(2)}


def serial(loss_fn, params, codes):
    leaves, structure = torch.utils._pytree.tree_flatten(params)
    leaves = [x.clone().requires_grad_() for x in leaves]
    batch = batch_of(codes)
    parts = [{name: x[2 * at : 2 * at + 2] for name, x in batch.items()} for at in range(len(codes))]
    tree = torch.utils._pytree.tree_unflatten(leaves, structure)
    loss = sum(loss_fn(tree, part) for part in parts) / len(codes)
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def gradients(stage, n, steps, loss_fn=routed, **options):
    """Return the gradients of several steps of one function."""
    mesh = fs.make_mesh({"data": n})
    opt = fs.partition_optimizer(fs.optim.sgd(1.0), mesh=mesh, axis="data", stage=stage)
    own = fs.shard_params(experts(), fs.fsdp("data") if stage == 3 else P(), mesh=mesh)
    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), gradients=opt.gradients, **options)
    found = [run(own, batch_of(codes))[1] for codes in steps]
    return [
        [None if g is None else fs.unshard(g) for g in torch.utils._pytree.tree_leaves(step, is_leaf=is_gradient)]
        for step in found
    ]


def is_gradient(x):
    return x is None or isinstance(x, fs.Sharded)


def assert_serial(found, steps, loss_fn=routed):
    for grads, codes in zip(found, steps, strict=True):
        for ours, g in zip(grads, serial(loss_fn, experts(), codes), strict=True):
            assert (ours is None) == (g is None)
            if g is not None:
                torch.testing.assert_close(ours, g, rtol=1e-10, atol=1e-12)


OPTIONS = [
    {},
    {"bucket": 0},
    {"bucket": 100, "in_flight": 0},
    {"accumulate": 2},
    {"accumulate": 2, "reduce_once": False},
    {"reproducible": True, "slices": 4},
]


@settings(max_examples=60)
@given(
    steps=st.lists(st.lists(st.integers(0, 2 << EXPERTS), min_size=4, max_size=4), min_size=1, max_size=4),
    stage=st.sampled_from([0, 1, 2]),
    options=st.sampled_from(OPTIONS),
)
def test_branches_have_gradients_of_one_device(steps, stage, options):
    n = 4 if not options or "bucket" in options else 2
    assert_serial(gradients(stage, n, steps, **options), steps)


@settings(max_examples=30)
@given(
    codes=st.lists(st.integers(0, 2 << EXPERTS), min_size=8, max_size=8),
    stage=st.sampled_from([0, 2]),
    accumulate=st.sampled_from([1, 2]),
)
def test_branches_in_reproducible_mode_have_equal_bits(codes, stage, accumulate):
    found = [gradients(stage, n, [codes], reproducible=True, slices=8, accumulate=accumulate)[0] for n in (1, 2, 4)]
    for first, *others in zip(*found, strict=True):
        assert all(first is None if g is None else bits(g) == bits(first) for g in others)


def bits(x):
    return x.numpy().tobytes()


STEPS = [[0b0011, 0b0101], [0b0011, 0b0101], [0b1000, 0b0000], [0b0110 + 16, 0b0110], [0b1111, 0b1111]]


def on_processes(stage, options):
    return gradients(stage, 2, STEPS, **options)


@pytest.mark.parametrize("stage", [0, 2])
def test_branches_on_processes_have_gradients_of_one_device(two, stage):
    for found in two.run(on_processes, stage, {}):
        assert_serial(found, STEPS)


@pytest.mark.parametrize("options", [{"compute": torch.bfloat16}, {"reduce": torch.float64}], ids=str)
def test_missing_gradient_is_sent_as_zeros_of_equal_dtype(options):
    (found,) = gradients(2, 2, [[0b0001, 0b0000]], **options)
    assert [g is None for g in found] == [False, False, *[True] * 6, False]


def test_reductions_start_during_the_backward(monkeypatch):
    from fshard.transforms.fsdp.reductions import Reductions

    began: list[list[int]] = []
    reduce, end = Reductions.reduce, Reductions.end

    def watched(self, unit, gs):
        began[-1].append(unit.number)
        reduce(self, unit, gs)

    def ended(self):
        began.append([])
        end(self)

    monkeypatch.setattr(Reductions, "reduce", watched)
    monkeypatch.setattr(Reductions, "end", ended)
    began.append([])
    gradients(2, 2, [[0b1111] * 2, [0b1111] * 2])
    assert began == [[3, 2, 1, 0, 4]] * 4 + [[]]  # each backward of both devices, and after it nothing is left


# -- stage 3 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "known"),
    [
        ([0b0001, 0b0000], "(data=0) has gathered experts[0] (experts[0].b, experts[0].w), (data=1) has not. "),
        (
            [0b0001, 0b0010],
            "(data=0) has gathered experts[0] (experts[0].b, experts[0].w), "
            "(data=1) has gathered experts[1] (experts[1].b, experts[1].w). ",
        ),
    ],
    ids=["skipped", "another"],
)
def test_partial_all_gather_on_devices_raises_and_names_unit(codes, known):
    with pytest.raises(fs.errors.MismatchError) as error:
        gradients(3, 2, [codes])
    cure = "An all-gather needs all devices. Let each of them call the part with the parameters, and branch inside: "
    assert known + cure in str(error.value)


def refused(codes):
    try:
        gradients(3, 2, [codes])
    except fs.errors.MismatchError as error:
        return str(error)


def test_partial_all_gather_on_processes_raises_and_names_unit():
    with Processes(2) as two:
        for found in two.run(refused, [0b0001, 0b0010]):
            assert re.search(r"\(data=0\) has gathered experts\[0\] .*, \(data=1\) has gathered experts\[1\] ", found)
            assert found.count("An all-gather needs all devices") == 1
        first, second = two.run(refused, [0b0001, 0b0000])
    assert (
        "(data=0) has gathered root (root), then experts[0] (experts[0].b, experts[0].w). An all-gather needs" in first
    )
    assert "(data=1) has gathered root (root). An all-gather needs all devices." in second


def marked(params, batch):
    """The same, as the error advises: all devices gather every expert, and branch inside."""
    y, code = batch["x"] @ params["root"], int(batch["code"][0])
    for place in range(EXPERTS):
        chosen = bool(code >> place & 1)

        def part(w, y, chosen=chosen):
            return torch.tanh(y @ w["w"] + w["b"]) if chosen else y

        y = fs.with_unsharded_params(part, keep=True)(params["experts"][place], y)
    return y.square().mean()


@pytest.mark.parametrize("options", [{}, {"live_units": 1}, {"accumulate": 2}], ids=str)
def test_partial_all_gather_fix_from_the_error_works(options):
    steps = [codes * (1 + (len(options) and "accumulate" in options)) for codes in ([1, 0], [1, 2], [5, 15])]
    assert_serial(gradients(3, 2, steps, marked, **options), steps, marked)
