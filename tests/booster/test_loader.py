"""Loaders take every sample once, in a loop or by functional steps, and resume at any position on any mesh."""

from functools import partial
from itertools import chain, islice

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import fshard as fs
from fshard.errors import MismatchError, ScopeError
from fshard.mesh.layout.arithmetic import balanced_range
from tests.booster.loops import PLUGINS, Loop, assert_close, unequal_bits
from tests.training import momentum

COUNT, SIZE = 19, 8  # the last batch has 3: for four devices one each, and none
REPRODUCIBLE = {"reproducible": partial(fs.FSDPPlugin, reproducible=True)}


def samples(count=COUNT):
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 3, generator=draw).double(), torch.randint(4, (count,), generator=draw)
    )


def mlp():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def by_torch(count, size, epochs):
    loop = Loop(mlp)
    for batch in [*DataLoader(samples(count), size)] * epochs:
        loop.step(*batch)
    return loop.state()


# -- batches of a loop, and of functional steps -------------------------------------------------------------------------


def copied(batches):
    """Copy each batch, as on its way to an accelerator."""
    for x, y in batches:
        yield x.clone(), y.clone()


def half_copied(batches):
    for x, y in batches:
        yield x + 0.0, y


def one_ahead(loader):
    """Copy each batch while the one before is used."""
    before = None
    for batch in copied(loader):
        if before is not None:
            yield before
        before = batch
    yield before


def after_peek(loader):
    loader.peek()
    yield from copied(loader)


FETCHES = {"in turn": iter, "ahead": list} | {
    f.__name__: f for f in (copied, half_copied, one_ahead, after_peek)
}


def looped(plugin, loader_of, batches_of, *, sync=True):
    """Train by a loop, as one device."""
    loop = Loop(mlp, plugin)
    for x, y in batches_of(loader_of(loop.booster)):
        loop.backward(loop.criterion(loop.model(x), y), sync=sync)
        loop.step()
    return loop.state(), []


def stepped(plugin, loader_of, batches_of):
    """Train by functional steps; return the parameters, and the number of samples of each step."""
    torch.manual_seed(1)
    model, booster = mlp(), fs.Booster(plugin)
    state, counts = booster.init(model, momentum(model), nn.CrossEntropyLoss()), []
    for batch in batches_of(loader_of(booster)):
        state, metrics = booster.step(state, batch)
        counts.append(int(metrics["samples"]))
    return fs.unshard(state.params), counts


def everywhere(form, plugin, n, fetch, count, size, epochs):
    """Return what each device of a form has learnt, or all outside of `fs.run`, and the samples of each step."""
    mesh = fs.make_mesh({"data": n})
    make = partial((PLUGINS | REPRODUCIBLE)[plugin], mesh=mesh)

    def loader_of(booster):
        return booster.prepare_dataloader(samples(count), batch_size=size)

    def batches_of(loader):
        return chain.from_iterable(FETCHES[fetch](loader) for _ in range(epochs))

    if form == "step outside":
        return [stepped(make(), loader_of, batches_of)]
    trains = {"loop": looped, "loop without sync": partial(looped, sync=False), "step": stepped}[
        form
    ]
    return fs.run(lambda: trains(make(), loader_of, batches_of), mesh=mesh)


def rows_on(n, size):
    return [max(len(range(*balanced_range(size, n, i))), 1) for i in range(n)]


FORMS = ("loop", "loop without sync", "step", "step outside")


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    fetch=st.sampled_from([*FETCHES]),
    plugin=st.sampled_from(["ddp", "zero 1", "zero 2", "fsdp", "reproducible"]),
    n=st.integers(1, 4),
    count=st.integers(1, 14),
    size=st.integers(1, 9),
    epochs=st.integers(1, 2),
)
@example("loop", "one_ahead", "ddp", 2, 8, 5, 2)  # 3 and 2 rows, then 2 and 1
@example("step", "ahead", "zero 1", 2, 8, 5, 2)
@example("step", "in turn", "fsdp", 4, COUNT, SIZE, 2)  # a device without samples
@example("loop", "in turn", "zero 1", 4, COUNT, SIZE, 2)
@example("step outside", "half_copied", "reproducible", 4, COUNT, SIZE, 1)
def test_batches_in_turn_copied_or_ahead_train_as_torch(
    form, fetch, plugin, n, count, size, epochs
):
    """Of batches of two sizes of which a device has as many rows each must be used before the next is fetched."""
    assume(plugin != "reproducible" or n != 3)  # which do not share 8 slices
    sizes = [min(size, count - start) for start in range(0, count, size)] * epochs
    columns = zip(*(rows_on(n, length) for length in {*sizes}), strict=True)
    assume(
        "outside" in form
        or fetch in ("in turn", "copied")
        or all(len({*x}) == len({*sizes}) for x in columns)
    )
    results = everywhere(form, plugin, n, fetch, count, size, epochs)
    assert_close([state for state, _ in results], by_torch(count, size, epochs))
    assert all(counts == sizes for _, counts in results if "step" in form)


@pytest.mark.parametrize(
    ("form", "alone"), [("loop", "loop"), ("step", "step outside"), ("step outside", "step")]
)
def test_reproducible_batches_have_equal_bits(form, alone):
    ((expected, _),) = everywhere(alone, "reproducible", 1, "in turn", COUNT, SIZE, 2)
    for state, _ in everywhere(form, "reproducible", 4, "in turn", COUNT, SIZE, 2):
        assert not unequal_bits(state, expected)


@pytest.mark.parametrize("form", ["loop", "step"])
def test_prefetched_batch_of_ambiguous_size_raises(form):
    """Of 7 samples and of 8, most of four devices have two rows: the last one alone sees that it is not the last batch."""
    with pytest.raises(MismatchError):
        everywhere(form, "ddp", 4, "ahead", 15, 8, 1)


def test_different_global_batches_on_devices_raise():
    def batches_of(loader):
        x, y = samples(4).tensors
        return [(x + fs.axis_index("data"), y)]

    with pytest.raises(
        MismatchError, match=r"devices were given different batches, of the same shapes"
    ):
        fs.run(
            lambda: stepped(fs.DDPPlugin(), lambda booster: None, batches_of),
            mesh=fs.make_mesh({"data": 2}),
        )


def test_loader_made_outside_and_used_inside_raises():
    mesh = fs.make_mesh({"data": 2})
    loader = fs.Booster(fs.DDPPlugin(mesh=mesh)).prepare_dataloader(samples(), batch_size=SIZE)
    with pytest.raises(ScopeError, match=r"made outside of fs.run and used inside"):
        fs.run(lambda: next(iter(loader)), mesh=mesh)


# -- positions ----------------------------------------------------------------------------------------------------------


def alone(body):
    """Return what a device alone returns."""
    (result,) = fs.run(body, mesh=fs.make_mesh({"data": 1}))
    return result


def taken(n, count=11, size=4, state=None, stop=100, **options):
    """Return the samples of each batch, joined from all devices, and the position after a number of batches."""

    def main():
        loader = fs.Booster().prepare_dataloader(
            TensorDataset(torch.arange(count)), size, **options
        )
        loader.load_state_dict(state or loader.state_dict())
        batches = [x[: loader.samples].tolist() for (x,) in islice(loader, stop)]
        return batches, loader.state_dict()

    results = fs.run(main, mesh=fs.make_mesh({"data": n}))
    return [
        [*chain(*shards)] for shards in zip(*(batches for batches, _ in results), strict=True)
    ], results[0][1]


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True}, {"drop_last": True}, {"size": 3}], ids=str
)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_loader_takes_each_sample_once_on_any_mesh(n, options):
    options = {
        "count": COUNT,
        "size": SIZE,
        "state": {"epoch": 5, "sample": 0, "seed": 3},
        **options,
    }
    size, full = options["size"], COUNT // options["size"] * options["size"]
    batches, end = taken(n, **options)
    order = [*chain(*batches)]
    assert len(order) == len({*order}) == (full if "drop_last" in options else COUNT)
    assert [len(batch) for batch in batches][:-1] == [size] * (len(batches) - 1)
    assert (sorted(order) == order) == ("shuffle" not in options) and end == {
        "epoch": 6,
        "sample": 0,
        "seed": 3,
    }
    assert batches == taken(1, **options)[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_resumes_at_any_position_on_other_meshes(workers):
    options = {"shuffle": True, "seed": 5, "num_workers": workers}
    batches, end = taken(1, **options)
    assert [len(batch) for batch in batches] == [4, 4, 3] and end == {
        "epoch": 1,
        "sample": 0,
        "seed": 5,
    }
    first, state = taken(2, stop=2, **options)
    rest, last = taken(3, state=state, **options)
    assert first + rest == batches and last == end and state == {"epoch": 0, "sample": 8, "seed": 5}
    second, _ = taken(1, state=end, **options)
    assert second != batches and sorted(chain(*second)) == list(range(11))


def test_epochs_and_positions_that_are_set():
    """A position at the end means the next epoch; setting the present epoch keeps the position."""

    def main():
        loader = fs.Booster().prepare_dataloader(samples(22), 4)
        loader.load_state_dict({"epoch": 4, "sample": 22, "seed": 1})
        counts = [len(list(loader)) for _ in range(2)]
        end = loader.state_dict()
        loader.load_state_dict({"epoch": 3, "sample": 8, "seed": 1024})
        for epoch in (3, 4, 4):
            loader.set_epoch(epoch)
            counts.append(len(list(loader)))
        loader.set_epoch(7)
        next(iter(loader))
        loader.sample = 0
        return counts, end, len(loader)

    assert alone(main) == ([6, 6, 4, 6, 6], {"epoch": 7, "sample": 0, "seed": 1}, 6)


def test_interrupted_loop_is_continued_by_next():
    def main():
        loader = fs.Booster().prepare_dataloader(samples(), SIZE)
        first = next(iter(loader))
        return [x.tolist() for x, _ in (first, *loader)] == [x.tolist() for x, _ in loader]

    assert alone(main)


def test_loop_continued_after_another_began_raises():
    def main():
        loader = fs.Booster().prepare_dataloader(samples(22), 4)
        for _ in loader:
            list(loader)

    with pytest.raises(ValueError, match="continued after another had begun"):
        alone(main)


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 6), ({"drop_last": True}, 5), ({"num_workers": 1, "persistent_workers": True}, 6)],
    ids=str,
)
def test_loader_length_is_that_of_its_loop(options, count):
    """An iterator that yields nothing more has yielded as many batches as `len` has said."""

    def main():
        loader = fs.Booster().prepare_dataloader(samples(22), 4, **options)
        lengths = [len(loader)]
        next(iter(loader))
        lengths.append(len(loader))
        loop = iter(loader)
        next(loop)
        lengths += [
            len(loader),
            1 + sum(len(loader) == count - 1 for _ in loop),
            loader.epoch,
            len(loader),
        ]
        loader.load_state_dict({"epoch": 1, "sample": 20, "seed": 1024})
        return [*lengths, len(loader), len(list(loader))]

    rest = 5 if "drop_last" in options else 1
    assert alone(main) == [count, count - 1, count - 1, count - 1, 1, count, rest, rest]


def test_peek_returns_next_batch_and_takes_nothing():
    def main():
        loader = fs.Booster().prepare_dataloader(
            TensorDataset(torch.arange(11)), 4, shuffle=True, num_workers=1
        )
        torch.manual_seed(0)
        before, first, state = torch.get_rng_state(), loader.peek()[0], loader.state_dict()
        same = torch.equal(before, torch.get_rng_state())
        pairs, last = [], first
        for (x,) in loader:
            pairs.append(torch.equal(x, last))
            last = loader.peek()[0]
        return same, state["sample"], pairs, torch.equal(last, next(iter(loader))[0])

    assert fs.run(main, mesh=fs.make_mesh({"data": 2})) == [(True, 0, [True] * 3, True)] * 2


# -- torch's loaders ----------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


INVALID = {
    "a stream": lambda: DataLoader(Stream(), 2),
    "a batch sampler": lambda: DataLoader(samples(), batch_sampler=[[1], [2]]),
    "no batches": lambda: DataLoader(samples(), batch_size=None),
    "a sampler": lambda: DataLoader(samples(), 2, sampler=[3, 4]),
    "replacement": lambda: DataLoader(
        samples(), 2, sampler=RandomSampler(samples(), replacement=True)
    ),
    "a generator": lambda: DataLoader(samples(), 2, shuffle=True, generator=torch.Generator()),
}


@pytest.mark.parametrize("name", INVALID)
def test_torch_loader_that_chooses_samples_raises(name):
    reason = "got one with an IterableDataset" if name == "a stream" else "Leave these out"
    with pytest.raises(ValueError, match=f"dataloader must take each sample once, .*{reason}"):
        alone(lambda: fs.Booster().boost(mlp(), dataloader=INVALID[name]()))


def test_torch_loader_keeps_its_options():
    def together(rows):
        return torch.stack([x for x, _ in rows])

    options = {
        "collate_fn": together,
        "drop_last": True,
        "num_workers": 1,
        "timeout": 30,
        "prefetch_factor": 3,
    }
    given_loader = DataLoader(samples(), 4, **options)

    def main():
        *_, loader, _ = fs.Booster().boost(mlp(), dataloader=given_loader)
        return len(loader), [tuple(x.shape) for x in loader]

    assert alone(main) == (4, [(4, 3)] * 4)
