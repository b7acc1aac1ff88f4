"""Answers to the exercises of collectives: the right ones, and wrong ones by their hint."""

import fshard as fs


def mean(values):
    return fs.psum(values.sum(), "data") / fs.psum(len(values) * values.new_ones(()), "data")


def scatter(x):
    n = fs.axis_size("data")
    return fs.all_to_all(x, "data").view(n, -1).sum(0)


def scatter_by_psum(x):
    return fs.psum(x, "data").chunk(fs.axis_size("data"))[fs.axis_index("data")]


def shifted(x, by=1, closed=True):
    n = fs.axis_size("data")
    pairs = [(i, (i + by) % n) for i in range(n) if closed or i + by < n]
    return fs.ppermute(x, "data", pairs)


def only_odd(values):
    if fs.axis_index("data") % 2:
        return fs.pmean(values.mean(), "data")
    return values.mean()


SOLUTIONS = {
    "collectives.bytes": lambda n, numbers: 2 * (n - 1) / n * 4 * numbers,
    "collectives.mean": mean,
    "collectives.scatter": scatter,
    "collectives.gathered": lambda n: n * (n + 1) // 2,
    "collectives.shift": lambda x: shifted(x),
}

WRONG = {
    "collectives.bytes": {
        "one half": lambda n, numbers: (n - 1) / n * 4 * numbers,
        "everyone": lambda n, numbers: (n - 1) * 4 * numbers,
        "A float32": lambda n, numbers: 2 * (n - 1) / n * numbers,
        "keeps its own": lambda n, numbers: 8 * numbers,
    },
    "collectives.mean": {
        "mean of the devices' means": lambda values: fs.pmean(values.mean(), "data"),
        "sum of the devices' means": lambda values: fs.psum(values.mean(), "data"),
        "No collective": lambda values: values.mean(),
        "sum of all": lambda values: fs.psum(values.sum(), "data"),
        "different calls": lambda values: fs.psum(values, "data").mean(),
        "never call": only_odd,
    },
    "collectives.scatter": {
        "to be built": lambda x: fs.psum_scatter(x, "data"),
        "thrown away": scatter_by_psum,
        "still be added": lambda x: fs.all_to_all(x, "data"),
        "Exchange before": lambda x: x.view(fs.axis_size("data"), -1).sum(0),
        "shard alone": lambda x: fs.psum(x, "data"),
        "added within": lambda x: fs.all_to_all(x, "data").view(-1, fs.axis_size("data")).sum(1),
    },
    "collectives.gathered": {
        "device 0 alone": lambda n: 1,
        "not with the factor 1": lambda n: n,
        "begin at 0": lambda n: n * (n - 1) // 2,
        "not averaged": lambda n: (n + 1) / 2,
    },
    "collectives.shift": {
        "other direction": lambda x: shifted(x, by=-1),
        "gets zeros": lambda x: shifted(x, closed=False),
        "nothing has moved": lambda x: x,
        "raises": lambda x: fs.ppermute(x, "data", [(0, 1), (1, 2), (2, 3), (3, 0)]),
    },
}
