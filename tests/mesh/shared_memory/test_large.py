"""Many tensors in shared memory: collectives read them in place, and go on before anyone waits.

The oracle is the same collective on virtual devices, by bits.
"""

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard.mesh.layout import flatten
from fshard.mesh.shared_memory import meet, peers
from tests.helpers.processes import run_processes, sums_in_order

LENGTHS = (120_000, 4, 0, 300_000, 8, 70_000, 16)


def started_together(xs):
    """Wait for two collectives in the reverse order."""
    first = fs.psum.start(xs, "d")
    second = fs.psum_scatter.start(xs, "d")
    second_result = second.wait()
    return [second_result, first.wait()]


def rows_that_leave_as_copies(xs):
    """Wait for two collectives of one tensor in the reverse order."""
    first = fs.psum_scatter.start(xs[3].view(4, -1), "d")
    second = fs.psum_scatter.start(xs[5], "d")
    second_result = second.wait()
    return [second_result, first.wait()]


COLLECTIVES = {
    "psum": lambda xs: fs.psum(xs, "d"),
    "pmax": lambda xs: fs.pmax(xs, "d"),
    "psum_scatter": lambda xs: fs.psum_scatter(xs, "d"),
    "all_gather": lambda xs: fs.all_gather(xs, "d"),
    "along columns": lambda xs: fs.psum_scatter([x.view(-1, 4) for x in xs], "d", dim=1),
    "of a transposed": lambda xs: fs.psum([*xs[:2], xs[3].view(-1, 4).t()], "d"),
    "with odd ends": lambda xs: fs.psum([x[1:] for x in xs], "d"),
    "of a conjugate": lambda xs: fs.psum([torch.complex(x, x).conj() for x in xs], "d"),
    "one large, many small": lambda xs: fs.psum([xs[3], *(xs[1] + k for k in range(5))], "d"),
    "at once": started_together,
    "rows that leave the ring as copies": rows_that_leave_as_copies,
}


def storages(tree):
    return {x.untyped_storage().data_ptr() for x in flatten(tree)[0] if x.numel()}


def collected(n, name, dtype):
    """Return the results of a collective on more tensors than one buffer has.

    The arguments stay as they are, and no result has their memory.
    """

    def main():
        draw = torch.Generator().manual_seed(fs.axis_index("d"))
        xs = [(torch.randn(length, generator=draw) * 9).to(dtype) for length in LENGTHS]
        copies = [x.clone() for x in xs]
        with sums_in_order():
            ys = COLLECTIVES[name](xs)
        assert all(map(torch.equal, xs, copies))
        assert storages(xs).isdisjoint(storages(ys))
        return ys

    return fs.run(main, mesh=fs.make_mesh({"d": n}))


KINDS = [(name, torch.float32) for name in COLLECTIVES]
for dtype_of_kind in (torch.bfloat16, torch.int16, torch.float64):
    KINDS += [("psum", dtype_of_kind), ("psum_scatter", dtype_of_kind)]


@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=str)
def test_many_tensors_collectives_equal_virtual_bits(two, four, name, dtype):
    for processes, n in ((two, 2), (four, 4)):
        expected = collected(n, name, dtype)
        for rank, (actual,) in enumerate(processes.run(collected, n, name, dtype)):
            pairs = zip(flatten(actual)[0], flatten(expected[rank])[0], strict=True)
            assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in pairs)


def in_many_parts():
    peers.MAX_SPANS = 2
    return collected(2, "all_gather", torch.float32)


@pytest.mark.skipif(
    meet._libc() is None, reason="this system does not read other processes' memory"
)
def test_more_spans_than_one_call_reads_equal_virtual():
    for (actual,), expected in zip(
        run_processes(in_many_parts, 2), collected(2, "all_gather", torch.float32), strict=True
    ):
        assert all(map(torch.equal, actual, expected))


def one_does_something_else():
    """Process 1 comes second, so all is there when it starts.

    Then it is away until process 0 has its result.
    """

    def main():
        first = fs.axis_index("d") == 0
        x = torch.full((1 << 20,), 1.0 + fs.axis_index("d"))
        if first:
            handle = fs.psum_scatter.start(x, "d")
        dist.barrier()
        if not first:
            handle = fs.psum_scatter.start(x, "d")
            dist.barrier()
        result = handle.wait()
        if first:
            dist.barrier()
        return result[0].item()

    return fs.run(main, mesh=fs.make_mesh({"d": 2}, timeout=20))[0]


@pytest.mark.skipif(
    meet._libc() is None, reason="this system does not read other processes' memory"
)
def test_started_collective_of_a_late_process_does_not_block():
    assert run_processes(one_does_something_else, 2, environment={"FSHARD_LINES": "0"}) == [
        3.0,
        3.0,
    ]
