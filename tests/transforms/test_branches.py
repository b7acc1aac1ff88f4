"""Branches that depend on the data: devices that use different parameters, or the same in another
order.
"""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from tests.helpers.processes import run_processes

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
    tree = torch.utils._pytree.tree_unflatten(leaves, structure)
    total = 0
    for first in range(0, 2 * len(codes), 2):
        total = total + loss_fn(tree, {name: x[first : first + 2] for name, x in batch.items()})
    loss = total / len(codes)
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def gradients(stage, n, steps, loss_fn=routed, **options):
    """Return the gradients of several steps of one function."""
    mesh = fs.make_mesh({"data": n})
    opt = fs.partition_optimizer(fs.optim.sgd(1.0), mesh=mesh, axis="data", stage=stage)
    own = fs.shard_params(
        experts(), fs.fsdp("data", unit="experts[*]") if stage == 3 else P(), mesh=mesh
    )
    run = fs.value_and_grad(loss_fn, mesh=mesh, batch=P("data"), gradients=opt.gradients, **options)
    results = []
    for codes in steps:
        _, grads = run(own, batch_of(codes))
        leaves = torch.utils._pytree.tree_leaves(grads, is_leaf=is_gradient)
        results.append([None if g is None else fs.unshard(g) for g in leaves])
    return results


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
    steps=st.lists(
        st.lists(st.integers(0, 2 << EXPERTS), min_size=4, max_size=4), min_size=1, max_size=4
    ),
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
    actual = [
        gradients(stage, n, [codes], reproducible=True, slices=8, accumulate=accumulate)[0]
        for n in (1, 2, 4)
    ]
    for first, *others in zip(*actual, strict=True):
        for g in others:
            assert (g is None) == (first is None)
            assert g is None or bits(g) == bits(first)


def bits(x):
    return x.numpy().tobytes()


@pytest.mark.parametrize(
    "options", [{"compute": torch.bfloat16}, {"reduce": torch.float64}], ids=str
)
def test_missing_gradient_is_sent_as_zeros_of_equal_dtype(options):
    (actual,) = gradients(2, 2, [[0b0001, 0b0000]], **options)
    assert [g is None for g in actual] == [False, False, *[True] * 6, False]


def test_reductions_start_during_the_backward(monkeypatch):
    from fshard.transforms.fsdp.reductions import AgreedReductions

    began: list[list[int]] = []
    reduce, end = AgreedReductions.reduce, AgreedReductions.end

    def watched(self, unit, gs):
        began[-1].append(unit.number)
        reduce(self, unit, gs)

    def ended(self):
        began.append([])
        end(self)

    monkeypatch.setattr(AgreedReductions, "reduce", watched)
    monkeypatch.setattr(AgreedReductions, "end", ended)
    began.append([])
    gradients(2, 2, [[0b1111] * 2, [0b1111] * 2])
    assert began == [[3, 2, 1, 0, 4]] * 4 + [
        []
    ]  # each backward of both devices, and after it nothing is left


# -- stage 3 ---------------------------------------------------------------------------------------


ROOT = "(data={}) has gathered root (root)"
EXPERT = ", then experts[{0}] (experts[{0}].b, experts[{0}].w)"
CODES = {"another": [0b0001, 0b0010], "skipped": [0b0001, 0b0000]}
GATHERED = {
    "skipped": [ROOT.format(0) + EXPERT.format(0), ROOT.format(1)],
    "another": [ROOT.format(device) + EXPERT.format(device) for device in (0, 1)],
}


def refused(codes, steps=()):
    """Return the error of the step with these codes, after others."""
    try:
        gradients(3, 2, [*steps, codes])
    except fs.errors.FshardError as error:
        return type(error).__name__, "\n".join(error.__notes__)


@pytest.mark.parametrize("name", CODES)
def test_partial_all_gather_on_devices_raises_and_names_units(name):
    kind, notes = refused(CODES[name])
    assert kind in ("MismatchError", "DeadlockError")
    assert (
        f"value_and_grad: {'; '.join(GATHERED[name])}. An all-gather needs all devices. Let each of them"
        in notes
    )


@pytest.mark.parametrize(
    "codes", [[0b0100, 0b1000], [0b0001, 0b1111], [0b0110, 0b0010 | 1 << EXPERTS]], ids=str
)
def test_partial_all_gather_after_prefetches_raises_and_names_units(codes):
    kind, notes = refused(codes, steps=[[0b1111, 0b1111]] * 2)
    assert (
        kind in ("MismatchError", "DeadlockError") and "An all-gather needs all devices." in notes
    )


def marked(params, batch):
    """The same, as the error advises: all devices gather every expert, and branch inside."""
    y = batch["x"] @ params["root"]
    code = int(batch["code"][0])
    for place in range(EXPERTS):
        chosen = bool(code >> place & 1)

        def part(w, y, chosen=chosen):
            return torch.tanh(y @ w["w"] + w["b"]) if chosen else y

        y = fs.with_unsharded_params(part, keep=True)(params["experts"][place], y)
    return y.square().mean()


@pytest.mark.parametrize("options", [{}, {"live_units": 1}, {"accumulate": 2}], ids=str)
def test_partial_all_gather_fix_from_the_error_works(options):
    steps = [[1, 0], [1, 2], [5, 15]]
    if "accumulate" in options:
        steps = [2 * codes for codes in steps]
    assert_serial(gradients(3, 2, steps, marked, **options), steps, marked)


SKIPPED = 1 << EXPERTS
TWICE = 2 << EXPERTS


def reused(params, batch):
    """Use the first expert twice for some codes, the first time without a gradient; skip the third
    for others.
    """
    y = batch["x"] @ params["root"]
    code = int(batch["code"][0])
    for place, expert in enumerate(params["experts"]):
        if place == 0 and code & TWICE:
            with torch.no_grad():
                actual = y @ expert["w"]
            y = y + actual
        if place != 2 or not code & SKIPPED:
            y = torch.tanh(y @ expert["w"] + expert["b"])
    return y.square().mean()


REUSED = [[0, 0], [0, TWICE], [SKIPPED, SKIPPED | TWICE], [0, 0]]
PREFETCHES = [{}, {"prefetch": 0}, {"prefetch": 2}, {"live_units": 1}, {"live_units": 3}]


def reused_on_processes():
    return [gradients(3, 2, REUSED, reused, **options) for options in PREFETCHES[:3]]


@pytest.mark.parametrize("options", PREFETCHES, ids=str)
def test_use_of_an_unsharded_unit_on_one_device_keeps_the_prefetches_of_all(options):
    """Such a use needs no communication, so it may depend on the data."""
    assert_serial(gradients(3, 2, REUSED, reused, **options), REUSED, reused)


def by_order(steps):
    """Run steps on a transport that pairs collectives by their order alone; return the errors of
    wrong ones.
    """
    importlib.import_module("tests.mesh.runtimes.nccl_rules")
    actual = reused_on_processes()
    return actual, [refused(codes, [[0b1111, 0b1111]] * 2) for codes in steps]


WRONG = {"0": [[0b0100, 0b1000]], "1": [[0b0100, 0b1000], [0b0001, 0b1111]]}
"""Codes of wrong steps by FSHARD_CHECK.

Without it the second, where sizes differ, would wait for the time-out.
"""


@pytest.mark.parametrize("check", WRONG)
def test_branches_on_a_transport_without_tags_are_equal_or_raise(check):
    environment = {"FSHARD_BACKEND": "nccl_rules", "FSHARD_CHECK": check}
    for actual, errors in run_processes(by_order, 2, WRONG[check], environment=environment):
        for steps in actual:
            assert_serial(steps, REUSED, reused)
        assert len(errors) == len(WRONG[check])
        for kind, notes in errors:
            assert kind == "MismatchError" and "An all-gather needs all devices." in notes
