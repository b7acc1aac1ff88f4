"""Loaders take every sample once, in a loop or by functional steps, and resume at any position on any mesh."""

from functools import partial
from itertools import chain, islice

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import fshard as fs

PLUGINS = {
    "ddp": fs.DDPPlugin,
    "zero 1": partial(fs.ZeroPlugin, stage=1),
    "fsdp": fs.FSDPPlugin,
    "reproducible": partial(fs.FSDPPlugin, reproducible=True),
}
COUNT, SIZE = 19, 8  # the last batch has 3: for four devices one each, and none


def samples(count=COUNT):
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 3, generator=draw).double(), torch.randint(4, (count,), generator=draw))


def start():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_torch(count=COUNT, size=SIZE):
    model, opt = start()
    for _ in range(2):
        for x, y in DataLoader(samples(count), batch_size=size):
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step(), opt.zero_grad()
    return dict(model.named_parameters())


def kept(x, y):
    return x, y


def copied(x, y):
    return x.clone(), y.clone()


def half_copied(x, y):
    return x + 0.0, y


def after_a_look(loader):
    loader.peek()
    for batch in loader:
        yield copied(*batch)


FEEDS = {
    "each in its turn": lambda loader: (kept(*batch) for batch in loader),
    "copied in its turn": lambda loader: (copied(*batch) for batch in loader),
    "one of two copied": lambda loader: (half_copied(*batch) for batch in loader),
    "copied after a look": after_a_look,
    "fetched ahead": list,
}


def stepped(plugin, feed="each in its turn", mesh=None, size=SIZE, count=COUNT):
    """Return the parameters after two epochs of functional steps, and how many samples each has taken."""
    booster = fs.Booster(PLUGINS[plugin](mesh=mesh))
    loader = booster.prepare_dataloader(samples(count), batch_size=size)
    state, taken = booster.init(*start(), nn.CrossEntropyLoss()), []
    for _ in range(2):
        for batch in FEEDS[feed](loader):
            state, metrics = booster.step(state, batch)
            taken.append(int(metrics["samples"]))
    return fs.unshard(state.params), taken


def everywhere(n, *args, **options):
    """Return what `stepped` gives outside of `fs.run`, and on each device inside."""
    mesh = fs.make_mesh({"data": n})
    return [stepped(*args, mesh=mesh, **options), *fs.run(lambda: stepped(*args, **options), mesh=mesh)]


def assert_all_trained(found, count=COUNT, size=SIZE):
    expected = by_torch(count, size)
    sizes = [size] * (count // size) + [count % size] * (count % size > 0)
    for params, taken in found:
        assert taken == sizes * 2
        torch.testing.assert_close(params, {name: x.detach() for name, x in expected.items()})


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_functional_step_trains_all_samples_of_loader(plugin, n):
    found = everywhere(n, plugin)
    assert_all_trained(found)
    if plugin == "reproducible":
        alone, _ = stepped(plugin, mesh=fs.make_mesh({"data": 1}))
        assert all(torch.equal(x, alone[name]) for params, _ in found for name, x in params.items())


@pytest.mark.parametrize("feed", FEEDS)
def test_functional_step_recognises_copied_or_prefetched_batches(feed):
    assert_all_trained(everywhere(2, "zero 1", feed))


@pytest.mark.parametrize("feed", ["each in its turn", "copied in its turn"])
@pytest.mark.parametrize("plugin", ["zero 1", "reproducible"])
def test_functional_step_of_processes_trains_all_samples(two, plugin, feed):
    assert_all_trained(two.run(stepped, plugin, feed))


@pytest.mark.parametrize("plugin", ["zero 1", "fsdp"])
def test_loop_and_functional_step_train_equally(plugin):
    def loop():
        booster = fs.Booster(PLUGINS[plugin]())
        loader = booster.prepare_dataloader(samples(), batch_size=SIZE)
        model, opt, criterion, *_ = booster.boost(*start(), nn.CrossEntropyLoss())
        for _ in range(2):
            for x, y in loader:
                booster.backward(criterion(model(x), y), opt)
                opt.step(), opt.zero_grad()
        return {name: x.detach() for name, x in model.unwrap().named_parameters()}

    for n in (2, 4):
        mesh = fs.make_mesh({"data": n})
        for by_loop, (by_step, _) in zip(fs.run(loop, mesh=mesh), fs.run(stepped, plugin, mesh=mesh), strict=True):
            torch.testing.assert_close(by_loop, by_step)


def test_prefetched_batch_of_ambiguous_size_raises():
    """Of 7 samples and of 8, most of four devices have two rows: the last one alone sees that it is not the last batch."""

    def step():
        booster = fs.Booster()
        batches = list(booster.prepare_dataloader(samples(15), batch_size=8))
        booster.step(booster.init(*start(), nn.CrossEntropyLoss()), batches[0])

    def loop():
        booster = fs.Booster()
        loader = booster.prepare_dataloader(samples(15), batch_size=8)
        model, opt, criterion, *_ = booster.boost(*start(), nn.CrossEntropyLoss())
        (x, y), *_ = list(loader)
        booster.backward(criterion(model(x), y), opt)
        opt.step()

    for main in (step, loop):
        with pytest.raises(fs.errors.MismatchError):
            fs.run(main, mesh=fs.make_mesh({"data": 4}))


def test_different_global_batches_on_devices_raise():
    def main():
        booster = fs.Booster()
        state = booster.init(*start(), nn.CrossEntropyLoss())
        x, y = samples(4).tensors
        booster.step(state, (x + fs.axis_index("data"), y))

    with pytest.raises(fs.errors.MismatchError, match=r"devices were given different batches, of the same shapes"):
        fs.run(main, mesh=fs.make_mesh({"data": 2}))


def test_loader_made_outside_and_used_inside_raises():
    mesh = fs.make_mesh({"data": 2})
    loader = fs.Booster(fs.DDPPlugin(mesh=mesh)).prepare_dataloader(samples(), batch_size=SIZE)
    with pytest.raises(fs.errors.ScopeError, match=r"made outside of fs.run and used inside"):
        fs.run(lambda: next(iter(loader)), mesh=mesh)


# -- positions ----------------------------------------------------------------------------------------------------------


def alone(body):
    """Return what a device alone finds."""
    (found,) = fs.run(body, mesh=fs.make_mesh({"data": 1}))
    return found


def taken(n, state=None, batches=100):
    """Return which samples each device has had, batch by batch, and the position after so many batches."""

    def main():
        loader = fs.Booster().prepare_dataloader(TensorDataset(torch.arange(11)), 4, shuffle=True, seed=5)
        if state is not None:
            loader.load_state_dict(state)
        found = [x.tolist() for (x,) in islice(loader, batches)]
        return found, loader.state_dict()

    return fs.run(main, mesh=fs.make_mesh({"data": n}))


def test_loader_resumes_at_any_position_on_other_meshes():
    def joined(parts):
        return [*chain.from_iterable(parts)]

    ((alone, end),) = taken(1)
    assert [len(batch) for batch in alone] == [4, 4, 3] and sorted(joined(alone)) == list(range(11))
    assert end == {"epoch": 1, "sample": 0, "seed": 5}
    for n in (2, 3):
        found = [batches for batches, _ in taken(n)]
        assert [joined(parts) for parts in zip(*found, strict=True)] == alone
    _, position = taken(2, batches=2)[0]
    assert position == {"epoch": 0, "sample": 8, "seed": 5}
    rest = [batches for batches, _ in taken(3, position)]
    assert [joined(parts) for parts in zip(*rest, strict=True)] == alone[2:]
    ((second, _),) = taken(1, end)
    assert second != alone and sorted(joined(second)) == list(range(11))


def test_loader_position_at_end_starts_next_epoch():
    def main():
        loader = fs.Booster().prepare_dataloader(samples(22), 4)
        loader.load_state_dict({"epoch": 4, "sample": 22, "seed": 1})
        return [len(list(loader)) for _ in range(2)], loader.state_dict()

    assert alone(main) == ([6, 6], {"epoch": 7, "sample": 0, "seed": 1})


def joined(devices):
    """Put the parts of each batch together that devices have."""
    return [[*chain(*parts)] for parts in zip(*devices, strict=True)]


@pytest.mark.parametrize("how", [{}, {"shuffle": True}, {"drop_last": True}, {"batch_size": 3}], ids=str)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_loader_takes_each_sample_once_on_any_mesh(n, how):
    def main():
        loader = fs.Booster().prepare_dataloader(TensorDataset(torch.arange(COUNT)), **{"batch_size": SIZE, **how})
        loader.set_epoch(5)
        return [x[: loader.samples].tolist() for (x,) in loader], loader.epoch

    found = fs.run(main, mesh=fs.make_mesh({"data": n}))
    batches = joined([batches for batches, _ in found])
    taken = [x for batch in batches for x in batch]
    assert len(taken) == len({*taken}) == (COUNT // SIZE * SIZE if "drop_last" in how else COUNT)
    size = how.get("batch_size", SIZE)
    assert [len(batch) for batch in batches][:-1] == [size] * (len(batches) - 1)
    assert (sorted(taken) == taken) == ("shuffle" not in how) and {epoch for _, epoch in found} == {6}
    (alone, _), *_ = fs.run(main, mesh=fs.make_mesh({"data": 1}))
    assert batches == alone


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_with_workers_resumes_on_another_mesh(workers):
    def batches(state, stop):
        options = {"shuffle": True, "num_workers": workers}
        loader = fs.Booster().prepare_dataloader(TensorDataset(torch.arange(COUNT)), 4, **options)
        loader.load_state_dict(state or loader.state_dict())
        found = []
        for _, (x,) in zip(range(stop), loader, strict=False):
            found.append(x[: loader.samples].tolist())
        return found, loader.state_dict()

    def on(n, *args):
        parts = fs.run(batches, *args, mesh=fs.make_mesh({"data": n}))
        return joined([part for part, _ in parts]), parts[0][1]

    whole, end = on(1, None, 5)
    first, state = on(2, None, 2)
    rest, after = on(4, state, 3)
    assert first + rest == whole and after == end and state["sample"] == 8


# -- what a loader is given ---------------------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(Stream(), 2),
        lambda: DataLoader(samples(), batch_sampler=[[1], [2]]),
        lambda: DataLoader(samples(), batch_size=None),
        lambda: DataLoader(samples(), 2, sampler=[3, 4]),
        lambda: DataLoader(samples(), 2, sampler=RandomSampler(samples(), replacement=True)),
        lambda: DataLoader(samples(), 2, shuffle=True, generator=torch.Generator()),
    ],
)
def test_torch_loader_with_own_sampling_raises(loader):
    with pytest.raises(ValueError, match="dataloader must take each sample once, .* Leave these out"):
        alone(lambda: fs.Booster().boost(start()[0], dataloader=loader()))


def test_torch_loader_keeps_its_options():
    def together(rows):
        return torch.stack([x for x, _ in rows])

    given = DataLoader(samples(), 4, num_workers=1, collate_fn=together, drop_last=True, timeout=30, prefetch_factor=3)

    def main():
        *_, loader, _ = fs.Booster().boost(start()[0], dataloader=given)
        return len(loader), [tuple(x.shape) for x in loader]

    assert alone(main) == (4, [(4, 3)] * 4)


@pytest.mark.parametrize("how", [{}, {"drop_last": True}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_loader_length_is_that_of_its_loop(how):
    """An iterator that yields nothing more has yielded as many batches as `len` has said."""

    def main():
        loader = fs.Booster().prepare_dataloader(samples(22), 4, **how)
        count, found = (5 if "drop_last" in how else 6), [len(loader)]
        next(iter(loader))
        found.append(len(loader))
        loop = iter(loader)
        next(loop)
        found += [len(loader), 1 + sum(len(loader) == count - 1 for _ in loop), loader.epoch, len(loader)]
        loader.load_state_dict({"epoch": 1, "sample": 20, "seed": 1024})
        return found == [count, count - 1, count - 1, count - 1, 1, count], len(loader), len(list(loader))

    assert alone(main) == (True, *([5, 5] if "drop_last" in how else [1, 1]))


def test_peek_returns_next_batch_and_takes_nothing():
    def main():
        loader = fs.Booster().prepare_dataloader(TensorDataset(torch.arange(11)), 4, shuffle=True, num_workers=1)
        torch.manual_seed(0)
        before, first, state = torch.get_rng_state(), loader.peek()[0], loader.state_dict()
        same = torch.equal(before, torch.get_rng_state())
        pairs, last = [], first
        for (x,) in loader:
            pairs.append(torch.equal(x, last))
            last = loader.peek()[0]
        return same, state["sample"], pairs, torch.equal(last, next(iter(loader))[0])

    assert fs.run(main, mesh=fs.make_mesh({"data": 2})) == [(True, 0, [True] * 3, True)] * 2


def test_set_epoch_of_present_epoch_keeps_resumed_position():
    def main():
        loader = fs.Booster().prepare_dataloader(samples(22), 4)
        loader.load_state_dict({"epoch": 3, "sample": 8, "seed": 1024})
        counts = []
        for epoch in (3, 4, 4):
            loader.set_epoch(epoch)
            counts.append(len(list(loader)))
        loader.set_epoch(7)
        next(iter(loader))
        loader.sample = 0
        return counts, len(loader)

    assert alone(main) == ([4, 6, 6], 6)


def test_interrupted_loop_is_continued_by_next():
    def main():
        loader = fs.Booster().prepare_dataloader(samples(), SIZE)
        first = next(iter(loader))
        return [x.tolist() for x, _ in (first, *loader)], [x.tolist() for x, _ in loader]

    one, other = alone(main)
    assert one == other


def test_loop_continued_after_another_began_raises():
    def main():
        loader = fs.Booster().prepare_dataloader(samples(22), 4)
        for _ in loader:
            list(loader)

    with pytest.raises(ValueError, match="continued after another had begun"):
        alone(main)
