"""Loaders take every sample once, in a loop or by functional steps, and resume at any position on
any mesh.
"""

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
from tests.helpers.training import momentum

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


# -- batches of a loop, and of functional steps ----------------------------------------------------


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
    model = mlp()
    booster = fs.Booster(plugin)
    state = booster.init(model, momentum(model), nn.CrossEntropyLoss())
    counts = []
    for batch in batches_of(loader_of(booster)):
        state, metrics = booster.step(state, batch)
        counts.append(int(metrics["samples"]))
    return fs.unshard(state.params), counts


def everywhere(form, plugin, n, fetch, count, size, epochs):
    """Return what each device of a form has learnt, or all outside of `fs.run`, and the samples of
    each step.
    """
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
    """Of batches of two sizes of which a device has as many rows each must be used before the next
    is fetched.
    """
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
    """Of 7 samples and of 8, most of four devices have two rows: the last one alone sees that it is
    not the last batch.
    """
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


# -- positions -------------------------------------------------------------------------------------


def alone(body):
    """Return what a device alone returns."""
    (result,) = fs.run(body, mesh=fs.make_mesh({"data": 1}))
    return result


def taken(n, count=11, size=4, state=None, stop=100, **options):
    """Return the samples of each batch, joined from all devices, and the position after a number of
    batches.
    """

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
    size = options["size"]
    full = COUNT // options["size"] * options["size"]
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
        before = torch.get_rng_state()
        first = loader.peek()[0]
        state = loader.state_dict()
        same = torch.equal(before, torch.get_rng_state())
        pairs, last = [], first
        for (x,) in loader:
            pairs.append(torch.equal(x, last))
            last = loader.peek()[0]
        return same, state["sample"], pairs, torch.equal(last, next(iter(loader))[0])

    assert fs.run(main, mesh=fs.make_mesh({"data": 2})) == [(True, 0, [True] * 3, True)] * 2


# -- torch's loaders -------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Samples in order, starting elsewhere in each epoch."""

    def __init__(self, count=COUNT, has_length=True):
        self.count, self.epoch = count, 0
        if has_length:
            self.__class__ = Counted

    def __iter__(self):
        rows = [*zip(*samples(self.count).tensors, strict=True)]
        return iter(rows[self.epoch :] + rows[: self.epoch])

    def set_epoch(self, epoch):
        self.epoch = epoch


class Counted(Stream):
    def __len__(self):
        return self.count


class ByLength:
    """Yields batches of several sizes, which it shuffles by the epoch."""

    def __iter__(self):
        batches = [[0, 5, 6], [1], [2, 3, 4, 7], [8, 9]]
        return iter([batches[i] for i in torch.randperm(4)])

    def __len__(self):
        return 4


def weighted():
    weights = torch.arange(1.0, COUNT + 1)
    return torch.utils.data.WeightedRandomSampler(weights, 14)


SOURCES = {
    "a stream": lambda: DataLoader(Stream(), SIZE),
    "a stream without a length": lambda: DataLoader(Stream(has_length=False), SIZE),
    "a stream by a worker": lambda: DataLoader(Stream(), SIZE, num_workers=1),
    "whole batches only": lambda: DataLoader(Stream(), SIZE, drop_last=True),
    "a batch sampler": lambda: DataLoader(samples(), batch_sampler=ByLength()),
    "torch's batch sampler": lambda: DataLoader(
        samples(), batch_sampler=torch.utils.data.BatchSampler(weighted(), 4, drop_last=False)
    ),
    "a list": lambda: DataLoader(samples(), 2, sampler=[3, 4, 9]),
    "weights": lambda: DataLoader(samples(), SIZE, sampler=weighted()),
    "replacement": lambda: DataLoader(
        samples(), SIZE, sampler=RandomSampler(samples(), replacement=True)
    ),
    "a generator": lambda: DataLoader(
        samples(), SIZE, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
}


def trained_on(source, plugin, epochs, stop=None, position=None):
    """Return the state after some batches of a source, its position, and the labels that this
    device has had.
    """
    loop = Loop(mlp, plugin, loader=source())
    if position is not None:
        loop.loader.load_state_dict(position)
    labels = []
    for batch in islice(chain.from_iterable(loop.loader for _ in range(epochs)), stop):
        loop.step(*batch)
        labels += batch[1].tolist()[: loop.loader.samples]
    return loop.state(), loop.loader.state_dict(), labels


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", SOURCES)
def test_samples_of_any_source_are_those_of_one_device(name, n):
    ((expected, position, labels),) = fs.run(
        lambda: trained_on(SOURCES[name], fs.FSDPPlugin(), 2), mesh=fs.make_mesh({"data": 1})
    )
    results = fs.run(
        lambda: trained_on(SOURCES[name], fs.FSDPPlugin(), 2), mesh=fs.make_mesh({"data": n})
    )
    assert_close([state for state, _, _ in results], expected)
    assert [each for _, each, _ in results] == [position] * n
    assert sorted(chain(*(each for _, _, each in results))) == sorted(labels)


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "a list"])
def test_a_position_in_any_source_is_resumed_on_another_mesh(name):
    """Two epochs' labels are those of a loop that stops within an epoch, and of one that continues."""

    def run(n, stop, position):
        mesh = fs.make_mesh({"data": n})
        return fs.run(
            lambda: trained_on(SOURCES[name], fs.DDPPlugin(), 2, stop, position), mesh=mesh
        )

    ((_, _, everything),) = run(1, 4, None)
    before = run(2, 1, None)
    after = run(4, 3, before[0][1])
    labels = chain(*(each for _, _, each in before + after))
    assert sorted(labels) == sorted(everything)


@pytest.mark.parametrize("is_stream", [False, True])
def test_items_without_batches_go_to_devices_in_turn(is_stream):
    """Of seven batches made by the dataset, four devices take one each; in the second step one
    device has none.
    """
    items = [
        (x, y)
        for x, y in zip(
            samples(28).tensors[0].split(4), samples(28).tensors[1].split(4), strict=True
        )
    ]

    class Items(IterableDataset):
        def __iter__(self):
            return iter(items)

    def main():
        dataset = Items() if is_stream else items
        loop = Loop(mlp, fs.FSDPPlugin(), loader=DataLoader(dataset, batch_size=None))
        counts = []
        for x, y in loop.loader:
            loop.step(x, y)
            counts.append(loop.loader.samples)
        return loop.state(), counts

    expected = Loop(mlp)
    for part in (items[:4], items[4:]):
        expected.step(*[torch.cat(column) for column in zip(*part, strict=True)])
    results = fs.run(main, mesh=fs.make_mesh({"data": 4}))
    assert_close([state for state, _ in results], expected.state())
    assert sorted(counts for _, counts in results) == [[1, 0], [1, 1], [1, 1], [1, 1]]


def test_loader_length_of_a_stream_without_one_raises():
    def main():
        return len(fs.Booster().boost(mlp(), dataloader=SOURCES["a stream without a length"]())[3])

    with pytest.raises(TypeError, match="has no len"):
        alone(main)


def test_peek_at_a_stream_takes_nothing():
    def main():
        loader = fs.Booster().boost(mlp(), dataloader=SOURCES["a stream"]())[3]
        first = loader.peek()[1]
        return torch.equal(first, next(iter(loader))[1]), len(loader), loader.sample

    assert fs.run(main, mesh=fs.make_mesh({"data": 2})) == [(True, 2, SIZE)] * 2


class Apart:
    """Chooses other samples on each device."""

    def __iter__(self):
        return iter([fs.axis_index("data"), 4])


def test_sampler_that_differs_between_devices_raises():
    with pytest.raises(MismatchError, match="the sampler of a loader must choose the same"):
        fs.run(
            lambda: trained_on(
                lambda: DataLoader(samples(), 2, sampler=Apart()), fs.DDPPlugin(), 1
            ),
            mesh=fs.make_mesh({"data": 2}),
        )


def test_distributed_sampler_raises():
    sampler = torch.utils.data.DistributedSampler(samples(), 2, 0)
    with pytest.raises(ValueError, match=r"got a DistributedSampler. Leave it out"):
        alone(lambda: fs.Booster().boost(mlp(), dataloader=DataLoader(samples(), sampler=sampler)))


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


def test_loader_length_of_a_stream_stays_during_a_loop():
    """As of a dataset with an index: a progress bar reads it in every step."""

    def main():
        loader = fs.Booster().boost(mlp(), dataloader=SOURCES["a stream"]())[3]
        before = len(loader)
        return before, [len(loader) for _ in loader], len(loader)

    for before, during, after in fs.run(main, mesh=fs.make_mesh({"data": 2})):
        assert during == [before] * before
        assert after == before


def test_loader_length_after_loading_is_what_is_left():
    """Also where the iterator of an earlier loop is still referred to; that one raises."""

    def main():
        loader = fs.Booster().prepare_dataloader(samples(20), 4)
        earlier = iter(loader)
        next(earlier)
        loader.load_state_dict(loader.state_dict())
        lengths = len(loader), len(list(loader))
        with pytest.raises(ValueError, match="or its position was loaded"):
            next(earlier)
        return lengths

    assert alone(main) == (4, 4)
