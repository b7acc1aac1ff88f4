"""Vocabulary-parallel cross-entropy against torch's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import fshard as fs
from fshard import P
from tests.tensor.serial import (
    GRIDS,
    assert_equal_to_serial,
    examples,
    mapped,
    mode_of,
    randn,
    shard_of,
    units,
)

T = fs.tensor
OPTIONS = st.fixed_dictionaries(
    {
        "ignore_index": st.sampled_from([-100, 1]),
        "label_smoothing": st.sampled_from([0.0, 0.2]),
        "reduction": st.sampled_from(["mean", "sum", "none"]),
    }
)


@pytest.mark.parametrize("name", GRIDS)
def test_cross_entropy_equals_serial_to_the_second_derivative(name):
    """Labels of the tokens of the layer before; any vocabulary, also one that the devices do not
    divide.
    """
    before, mesh = mode_of(name)
    mode = before.next
    batch = units(before)[0]
    n = mode.size()

    @settings(max_examples=2 * examples(name))
    @given(st.integers(2 * n, 6 * n), st.booleans(), st.integers(0, 99), OPTIONS)
    def check(classes, weighted, seed, options):
        if len(torch.empty(classes).chunk(n)) < n:
            return  # a shard is empty
        labels = torch.randint(
            classes, (2 * batch, 3), generator=torch.Generator().manual_seed(seed)
        )
        labels[seed % len(labels)] = options["ignore_index"]
        weight = randn(classes).exp() if weighted else None

        def on_shards(z, labels):
            z = shard_of(fs.pvary(z, mesh.axis_names), mode.activation(3))
            return T.cross_entropy(
                z, T.to_next(labels, before), mode, weight, vocabulary=classes, **options
            )

        def serial(z):
            return F.cross_entropy(z.movedim(-1, 1), labels, weight, **options)

        out = P(mode.tokens) if options["reduction"] == "none" else P()
        f = mapped(on_shards, mesh, (P(), P(before.tokens)), out)
        assert_equal_to_serial(lambda z: f(z, labels), serial, (3 * randn(2 * batch, 3, classes),))

    check()


def test_means_count_tokens_of_more_axes():
    mesh = fs.make_mesh({"seq": 2, "model": 2})
    mode = T.mode("1d", "model", mesh).next
    labels = torch.tensor([[0, 1, 2, -100], [3, -100, -100, -100]])
    specs = P(None, "seq", "model"), P(None, "seq")
    f = mapped(lambda z, y: T.cross_entropy(z, y, mode, also="seq"), mesh, specs, P())
    assert_equal_to_serial(
        lambda z: f(z, labels), lambda z: F.cross_entropy(z.mT, labels), (randn(2, 4, 6),)
    )


def test_logits_in_bfloat16_are_summed_in_float32_and_large_ones_stay_finite():
    mode, mesh = mode_of("1d-2")
    z = (1e4 * randn(3, 8)).bfloat16()
    labels = torch.tensor([1, 5, 7])
    loss = mapped(lambda z: T.cross_entropy(z, labels, mode.next), mesh, P(None, "a"), P())(z)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(z.float(), labels))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_of_an_ignored_token_may_be_not_finite(label_smoothing):
    mode, mesh = mode_of("1d-2")
    logits = randn(3, 4)
    logits[1] = torch.nan
    options = {"label_smoothing": label_smoothing, "ignore_index": -100}
    labels = torch.tensor([1, -100, 2])
    f = mapped(lambda z: T.cross_entropy(z, labels, mode.next, **options), mesh, P(None, "a"), P())
    torch.testing.assert_close(f(logits), F.cross_entropy(logits, labels, **options))


def test_logits_are_never_gathered():
    """Each device sends three numbers per token, and as many in the backward at most."""
    mode, mesh = mode_of("1d-2")
    labels = torch.zeros(5, dtype=torch.long)

    def step(z):
        return torch.autograd.grad(
            T.cross_entropy(z.requires_grad_(), labels, mode.next, label_smoothing=0.1), z
        )[0]

    with fs.ledger() as comm:
        fs.shard_map(step, mesh=mesh, in_specs=P(None, "a"), out_specs=P(None, "a"), check=False)(
            torch.ones(5, 4000)
        )
    assert comm.bytes() / 4 == 5 + 3 * 5  # the largest, and the sums
    assert comm.calls() == 2


def test_wrong_arguments_raise():
    mode, mesh = mode_of("1d-2")
    labels = torch.zeros(1, dtype=torch.long)
    for wrong, message in (
        ({"reduction": "max"}, 'reduction must be "mean", "sum" or "none"'),
        ({"label_smoothing": 2.0}, "label_smoothing must be between 0 and 1; got 2.0"),
        ({"vocabulary": 5}, "vocabulary must be the global size"),
    ):
        with pytest.raises(ValueError, match=message):
            fs.run(
                lambda w=wrong: T.cross_entropy(torch.ones(1, 2), labels, mode.next, **w), mesh=mesh
            )
