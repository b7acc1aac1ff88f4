"""The facts that a block sets hold in its backwards, where autograd would run them in a thread of its own.

Oracle: the same backward in the calling thread.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from tests.helpers.foreign_backward import foreign_backward

MESH = fs.make_mesh({"data": 2})


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def array_of(x):
    return fs.device_put(x, fs.Layout(MESH, P("data"))).requires_grad_()


def mapped(x):
    total = fs.shard_map(
        lambda x: fs.psum(x.sin(), "data"), mesh=x.mesh, in_specs=P("data"), out_specs=P()
    )
    return fs.unshard(total(x)).cos().sum()


def limit_of_plain_tensors():
    x = draw(8, 8).requires_grad_()
    with fs.memory.limit() as usage:
        (x.sin() @ x).square().mean().backward()
    return usage.peak()


def limit_of_arrays():
    x = array_of(draw(4, 6))
    with fs.memory.limit() as usage:
        fs.unshard((x @ x.T).sin().sum()).backward()
    return usage.peak()


def limit_of_a_mapped_function():
    x = array_of(draw(4))
    with fs.memory.limit() as usage:
        mapped(x).backward()
    return usage.peak()


def exceeded_limit():
    x = draw(64, 64).requires_grad_()
    with fs.memory.limit(device=2 * x.nbytes), pytest.raises(fs.errors.MemoryLimitError):
        x.sin().sum().backward()


def ledger():
    x = array_of(draw(4))
    with fs.ledger() as sent:
        mapped(x).backward()
    return sent.calls(), float(sent.bytes())


def ledger_of_the_backward():
    loss = mapped(array_of(draw(4)))
    with fs.ledger() as sent:
        loss.backward()
    return sent.calls(), float(sent.bytes())


def mesh_of_a_function_that_runs_again():
    def function(x):
        total = fs.shard_map(lambda x: fs.psum(x.sin(), "data"), in_specs=P("data"), out_specs=P())
        return fs.unshard(total(x)).sin()

    x = draw(4).requires_grad_()
    with fs.use_mesh(MESH):
        checkpoint(function, x, use_reentrant=False).sum().backward()
    return x.grad


def equal_tensors_of_a_function_that_runs_again():
    def function(x):
        return fs.unshard((x + torch.arange(4.0)).sin() * x).sum()

    x = array_of(draw(4))
    with fs.array.equal_tensors():
        checkpoint(function, x, use_reentrant=False).backward()
    return fs.unshard(x.grad)


def explicit_communication_of_a_function_that_runs_again():
    """The forward may communicate; the second run, in the backward, may not."""
    x = array_of(draw(4, 4))
    y = checkpoint(lambda x: fs.unshard((x + x.T).sin().sum()), x, use_reentrant=False)
    with fs.array.explicit(), pytest.raises(fs.errors.LayoutError, match="explicit"):
        y.backward()


PROGRAMS = [
    limit_of_plain_tensors,
    limit_of_arrays,
    limit_of_a_mapped_function,
    exceeded_limit,
    ledger,
    ledger_of_the_backward,
    mesh_of_a_function_that_runs_again,
    equal_tensors_of_a_function_that_runs_again,
    explicit_communication_of_a_function_that_runs_again,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_facts_of_a_block_hold_in_its_backwards(program):
    program()  # operations on arrays are planned once, which takes memory
    expected = program()
    with foreign_backward() as engine:
        actual = program()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert engine.backwards == 0


def test_backward_after_a_block_runs_where_autograd_runs_it():
    x = draw(4).requires_grad_()
    with foreign_backward() as engine:
        with fs.ledger(), fs.use_mesh(MESH):
            loss = x.sin().sum()
        loss.backward()
    assert engine.backwards == 1
