"""Loaders: what they hand out trains every sample, in a loop or by functional steps, and a position always leads on."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
    next(iter(loader))
    loader.set_epoch(0)
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
def test_functional_steps_train_all_samples_of_a_prepared_loader(plugin, n):
    found = everywhere(n, plugin)
    assert_all_trained(found)
    if plugin == "reproducible":
        alone, _ = stepped(plugin, mesh=fs.make_mesh({"data": 1}))
        assert all(torch.equal(x, alone[name]) for params, _ in found for name, x in params.items())


@pytest.mark.parametrize("feed", FEEDS)
def test_a_step_knows_a_loaders_part_whatever_has_become_of_it(feed):
    assert_all_trained(everywhere(2, "zero 1", feed))


@pytest.mark.parametrize("feed", ["each in its turn", "copied in its turn"])
@pytest.mark.parametrize("plugin", ["zero 1", "reproducible"])
def test_functional_steps_of_processes_train_all_samples_too(two, plugin, feed):
    assert_all_trained(two.run(stepped, plugin, feed))


@pytest.mark.parametrize("plugin", ["zero 1", "fsdp"])
def test_a_loop_and_a_step_on_one_loader_train_the_same(plugin):
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


def test_batches_that_were_copied_when_the_epoch_was_over_are_one_error():
    def main():
        booster = fs.Booster()
        batches = [copied(*batch) for batch in booster.prepare_dataloader(samples(), batch_size=SIZE)]
        booster.step(booster.init(*start(), nn.CrossEntropyLoss()), batches[0])

    with pytest.raises(fs.MismatchError, match="devices were given different batches"):
        fs.run(main, mesh=fs.make_mesh({"data": 2}))


def test_what_has_no_row_for_each_sample_of_a_part_is_named():
    def main():
        booster = fs.Booster()
        state = booster.init(*start(), nn.CrossEntropyLoss())
        for x, y in booster.prepare_dataloader(samples(), batch_size=SIZE):
            booster.step(state, (x.repeat(2, 1), y))

    with pytest.raises(fs.LayoutError, match=r"has 4 of the batch's 8 samples, .* but \[0\] is 8 long"):
        fs.run(main, mesh=fs.make_mesh({"data": 2}))


def test_a_batch_that_no_loader_has_told_is_whole_in_the_midst_of_an_epoch():
    def main(whole):
        booster = fs.Booster(fs.ZeroPlugin(stage=1))
        state, taken = booster.init(*start(), nn.CrossEntropyLoss()), []
        for _ in booster.prepare_dataloader(samples(), batch_size=SIZE):
            state, metrics = booster.step(state, whole)
            taken.append(int(metrics["samples"]))
        return taken

    for taken in fs.run(main, samples(6).tensors, mesh=fs.make_mesh({"data": 2})):
        assert taken == [6, 6, 6]


def test_virtual_devices_compare_whole_batches_as_processes_do():
    def main():
        booster = fs.Booster()
        state = booster.init(*start(), nn.CrossEntropyLoss())
        x, y = samples(4).tensors
        booster.step(state, (x + fs.axis_index("data"), y))

    with pytest.raises(fs.MismatchError, match=r"devices were given different batches, of the same shapes"):
        fs.run(main, mesh=fs.make_mesh({"data": 2}))


def test_a_loader_that_was_made_for_all_devices_is_not_one_devices():
    mesh = fs.make_mesh({"data": 2})
    loader = fs.Booster(fs.DDPPlugin(mesh=mesh)).prepare_dataloader(samples(), batch_size=SIZE)
    with pytest.raises(fs.ScopeError, match=r"made outside of fs.run and used inside"):
        fs.run(lambda: next(iter(loader)), mesh=mesh)


# -- positions ----------------------------------------------------------------------------------------------------------


def alone(body):
    """Return what a device alone finds."""
    (found,) = fs.run(body, mesh=fs.make_mesh({"data": 1}))
    return found


def test_a_position_of_which_nothing_is_left_leads_to_the_next_epoch():
    def main():
        booster = fs.Booster()
        small = booster.prepare_dataloader(samples(22), 4, drop_last=True, shuffle=True)
        batches = iter(small)
        for _ in range(4):
            next(batches)
        large = booster.prepare_dataloader(samples(22), 8, drop_last=True, shuffle=True)
        large.load_state_dict(small.state_dict())  # 6 samples are left, of which there is no batch
        found = [len(list(large)) for _ in range(2)]
        return small.state_dict()["sample"], found, large.state_dict()["epoch"]

    assert alone(main) == (16, [2, 2], 3)


def test_a_position_at_the_end_of_the_samples_leads_to_the_next_epoch():
    def main():
        loader = fs.Booster().prepare_dataloader(samples(22), 4)
        loader.load_state_dict({"epoch": 4, "sample": 22, "seed": 1})
        return [len(list(loader)) for _ in range(2)], loader.state_dict()

    assert alone(main) == ([6, 6], {"epoch": 7, "sample": 0, "seed": 1})


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (
            {"epoch": -1, "sample": 9999, "seed": "x"},
            "load_state_dict: epoch is a whole number from 0 on, not -1; seed is a whole number from 0 on, not 'x'.",
        ),
        ({"epoch": 1}, "load_state_dict: sample is missing; seed is missing."),
        ({"epoch": 1, "sample": 20, "seed": 0}, "load_state_dict: sample is 20, but the dataset has 19."),
    ],
)
def test_a_position_that_is_none_is_one_error(position, message):
    with pytest.raises(fs.LayoutError) as found:
        alone(lambda: fs.Booster().prepare_dataloader(samples(), SIZE).load_state_dict(position))
    assert str(found.value) == message


# -- what torch's loaders are asked for ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"shuffle": True}, {"drop_last": True}, {"batch_size": 3}])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_loaders_sampler_has_the_samples_that_its_device_gets(n, how):
    def main():
        count = torch.arange(COUNT)
        loader = fs.Booster().prepare_dataloader(TensorDataset(count), **{"batch_size": SIZE, **how})
        for epoch in range(2):
            loader.sampler.set_epoch(epoch + 5)
            assert loader.sampler.epoch == loader.epoch == epoch + 5
            own = list(loader.sampler)
            got = [x for (x,) in loader for x in x[: loader.samples].tolist()]
            assert own == got and len(loader.sampler) == len(own)
        return own

    parts = fs.run(main, mesh=fs.make_mesh({"data": n}))
    taken = COUNT // SIZE * SIZE if "drop_last" in how else COUNT
    found = sorted(x for part in parts for x in part)
    assert len(found) == len({*found}) == taken and ("drop_last" in how or found == list(range(COUNT)))


def test_a_sampler_begins_the_epoch_anew_as_its_loader_does_and_takes_nothing_by_itself():
    def main():
        loader = fs.Booster().prepare_dataloader(samples(), SIZE, shuffle=True)
        next(iter(loader))
        before = loader.state_dict()
        first = list(loader.sampler), list(loader.sampler)
        assert loader.state_dict() == before
        loader.sampler.set_epoch(1)
        return first[0] == first[1], first[0] == list(loader.sampler), loader.state_dict()["sample"]

    assert alone(main) == (True, False, 0)


def test_outside_of_run_a_sampler_has_all_samples():
    loader = fs.Booster(fs.DDPPlugin(mesh=fs.make_mesh({"data": 4}))).prepare_dataloader(samples(), SIZE)
    assert list(loader.sampler) == list(range(COUNT)) and len(loader.sampler) == COUNT


def test_a_loader_tells_what_torchs_was_given():
    def together(rows):
        return torch.stack([x for x, _ in rows])

    given = DataLoader(samples(), 4, num_workers=1, collate_fn=together, drop_last=True, timeout=3, prefetch_factor=3)

    def main():
        *_, loader, _ = fs.Booster().boost(start()[0], dataloader=given)
        same = (
            "dataset",
            "batch_size",
            "num_workers",
            "collate_fn",
            "pin_memory",
            "drop_last",
            "timeout",
            "worker_init_fn",
        )
        same = (*same, "prefetch_factor", "persistent_workers", "multiprocessing_context", "in_order")
        assert all(getattr(loader, name) == getattr(given, name) for name in same)
        with pytest.raises(AttributeError):
            loader.num_workers = 0  # which nobody would ask

    alone(main)


# -- what a loader is given ---------------------------------------------------------------------------------------------

WRONG = {
    "batch_size": (0, "batch_size is a whole number from 1 on, not 0"),
    "shuffle": ("yes", "shuffle is True or False, not 'yes'"),
    "seed": (1.5, "seed is a whole number from 0 on, not 1.5"),
    "drop_last": ("no", "drop_last is True or False, not 'no'"),
    "pin_memory": (1, "pin_memory is True or False, not 1"),
    "num_workers": (-2, "num_workers is a whole number from 0 on, not -2"),
    "timeout": ("long", "timeout is a number, not 'long'"),
    "sampler": ([3], "sampler= is decided here"),
    "shufle": (True, "torch's DataLoader has no option shufle"),
}


def test_all_that_is_wrong_with_a_loader_is_named_at_once():
    given = {name: x for name, (x, _) in WRONG.items()}
    with pytest.raises(fs.LayoutError) as found:
        alone(lambda: fs.Booster().prepare_dataloader(samples(), **given))
    assert str(found.value) == f"prepare_dataloader: {'; '.join(told for _, told in WRONG.values())}."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": None}, "seed is a whole number from 0 on, not None"),
        (
            {"prefetch_factor": 2, "persistent_workers": True},
            "prefetch_factor=, persistent_workers= has no meaning without workers: num_workers=1",
        ),
        ({"timeout": -1}, "torch's DataLoader refused what it was given: timeout option should be non-negative"),
    ],
)
def test_what_torch_would_refuse_late_is_refused_at_once(options, message):
    with pytest.raises(fs.LayoutError, match=message):
        alone(lambda: fs.Booster().prepare_dataloader(samples(), SIZE, **options))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Mixing(DataLoader):
    def __iter__(self):
        return (batch for batch in super().__iter__())


class Longer(DataLoader):
    def __len__(self):
        return super().__len__() + 1


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: Mixing(samples(), 2), "Mixing has __iter__ of its own, which would not be asked.* collate_fn"),
        (lambda: Longer(samples(), 2), "Longer has __len__ of its own"),
        (lambda: DataLoader(Stream(), 2), "an IterableDataset has no indices; .* Iterate it yourself, a part on each"),
        (lambda: DataLoader(samples(), batch_sampler=[[1], [2]]), "the dataloader draws by list"),
        (lambda: DataLoader(samples(), batch_size=None), "the dataloader makes no batches"),
    ],
)
def test_a_loader_of_torch_that_cannot_be_cut_is_told_what_can(loader, message):
    with pytest.raises(fs.LayoutError, match=message):
        alone(lambda: fs.Booster().boost(start()[0], dataloader=loader()))


# -- loops over one loader ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the first batch of epoch 0 was taken before this loop")
@pytest.mark.parametrize(
    "both", [lambda x: [(a, [*x]) for a in x], lambda x: [*zip(x, x, strict=True)]], ids=["nested", "zip"]
)
def test_loops_that_take_batches_from_each_other_are_refused(both):
    with pytest.raises(fs.LayoutError, match="has one position, and another loop over it has begun"):
        alone(lambda: both(fs.Booster().prepare_dataloader(samples(), SIZE)))


def test_a_loop_may_begin_when_another_was_left_or_has_ended():
    def main():
        loader = fs.Booster().prepare_dataloader(samples(), SIZE)
        first = iter(loader)
        taken = [next(first), next(first)]
        rest = [*loader]
        again = [*loader]
        return [x.tolist() for x, _ in taken + rest], [x.tolist() for x, _ in again]

    one, other = alone(main)
    assert one == other


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_first_batch_that_was_only_looked_at_is_told(shuffle):
    def main(back):
        loader = fs.Booster().prepare_dataloader(samples(), SIZE, shuffle=shuffle)
        first = next(iter(loader))
        if back:
            loader.set_epoch(0)
        return first[0].tolist(), [x.tolist() for x, _ in loader]

    with pytest.warns(UserWarning, match=r"first batch of epoch 0 was taken before this loop.* loader.set_epoch\(0\)"):
        first, others = alone(lambda: main(False))
    again, every = alone(lambda: main(True))
    assert first == again
    assert every == [first, *others]


class Pids(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, at):
        return torch.tensor([at, torch.utils.data.get_worker_info().seed])


def test_workers_that_persist_stay_from_epoch_to_epoch():
    def main(persistent):
        given = DataLoader(Pids(), 2, num_workers=1, persistent_workers=persistent)
        *_, loader, _ = fs.Booster().boost(start()[0], dataloader=given)
        epochs = [torch.cat([*loader]) for _ in range(2)]
        assert all(epoch[:, 0].tolist() == [0, 1, 2, 3] for epoch in epochs)
        return len({seed for epoch in epochs for seed in epoch[:, 1].tolist()})

    assert alone(lambda: main(True)) == 1
    assert alone(lambda: main(False)) == 2
