"""`fs.run`: functions whose call runs nothing raise, here, in `shard_map` and in `launch`."""

from functools import partial

import pytest
import torch

import fshard as fs
from fshard import P

MESH = fs.make_mesh({"data": 2})


def generator(x=None):
    yield x


async def coroutine(x=None):
    return x


async def asynchronous_generator(x=None):
    yield x


class Caller:
    def __call__(self, x=None):
        yield x

    async def method(self, x=None):
        return x


DEFERRED = {
    "generator": (generator, "generator, a generator function"),
    "coroutine": (coroutine, "coroutine, a coroutine function"),
    "asynchronous generator": (asynchronous_generator, "asynchronous_generator, a generator"),
    "partial": (partial(generator, 1), "generator, a generator function"),
    "method": (Caller().method, "Caller.method, a coroutine function"),
    "object": (Caller(), "Caller, a generator function"),
}
CALLS = {
    "run": (lambda f: fs.run(f, mesh=MESH), TypeError),
    "shard_map": (lambda f: fs.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P()), TypeError),
    "launch": (lambda f: fs.launch(f, processes=1), ValueError),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", DEFERRED)
def test_function_whose_call_runs_nothing_raises(name, call):
    f, words = DEFERRED[name]
    run, kind = CALLS[call]
    with pytest.raises(kind, match=f"must be a function that returns its result; got .*{words}"):
        run(f)


@pytest.mark.parametrize("f", [generator, coroutine, asynchronous_generator])
def test_result_that_has_not_run_raises(f):
    """A function that Python does not know to be one: here a lambda, often a decorator."""
    with pytest.raises(TypeError, match="main must return values; got a"):
        fs.run(lambda: f(1), mesh=MESH)


def test_class_and_method_that_return_are_run():
    assert fs.run(dict, mesh=MESH, a=1) == [{"a": 1}] * 2
    assert fs.run(torch.ones(2).sum, mesh=MESH) == [torch.tensor(2.0)] * 2
