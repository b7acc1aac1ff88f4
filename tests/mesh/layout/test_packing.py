"""Tensors are cast, joined, split and padded together; the oracle does it one by one, by torch's
own operations.
"""

from collections import Counter

import pytest
import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import P
from fshard.mesh.layout.packing import cast, copy_into, join_into, padded, split
from fshard.mesh.reshard.execute import plan_reshard, start_reshard
from fshard.mesh.runtimes import nccl
from fshard.mesh.runtimes.transport import joined
from fshard.source import call_site
from tests.mesh.runtimes import echo

NARROW = torch.bfloat16


class Kernels(TorchDispatchMode):
    """Counts operations that are neither views nor allocations, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def drawn():
    """Return tensors as units have them: of no elements, of no dims, transposed, strided."""
    torch.manual_seed(0)
    return [
        torch.randn(3, 4),
        torch.randn(0, 3),
        torch.randn(()),
        torch.randn(4, 5).t(),
        torch.randn(6)[::2],
        torch.randn(5, dtype=torch.float64),
    ]


@pytest.mark.parametrize("dtype", [NARROW, torch.float32, torch.float64])
def test_cast_equals_that_of_each_tensor(dtype):
    xs = [*drawn(), None]
    results = cast(xs, [dtype] * len(xs))
    assert results.pop() is None
    for x, result in zip(xs, results, strict=False):
        expected = x.to(dtype)
        assert torch.equal(result, expected) and result.stride() == expected.stride()
        assert (result is x) == (x.dtype is dtype)


def test_cast_is_one_operation_for_each_pair_of_dtypes():
    xs = drawn()
    with Kernels() as kernels:
        cast(xs, [NARROW] * len(xs))
    assert kernels.counts == {"_foreach_copy_": 2}


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
@pytest.mark.parametrize("dtype", [NARROW, torch.float32])
def test_join_casts_and_concatenates_in_one_operation(shape, dtype):
    xs = [torch.randn(*shape[:-1], width) for width in (3, 1, 2)]
    with Kernels() as kernels:
        buffer = joined(xs, dtype)
    assert kernels.counts.total() == 1
    assert torch.equal(buffer, torch.cat(xs, -1).to(dtype)) and buffer.is_contiguous()

    row = torch.zeros(2, buffer.shape[-1], dtype=dtype)[1]
    if buffer.ndim == 1:
        join_into(row, xs)
        assert torch.equal(row, buffer)


def test_split_is_contiguous_in_new_or_given_memory():
    rows = torch.arange(18.0).view(3, 6)
    given = [torch.empty(3), torch.empty(4), torch.empty(0), torch.empty(3, 3)]
    with Kernels() as kernels:
        parts = split(rows, [1, 2, 0, 3], given)
    assert kernels.counts == {"split_with_sizes_copy": 1}
    for part, expected in zip(parts, rows.split([1, 2, 0, 3], 1), strict=True):
        assert torch.equal(part, expected) and part.is_contiguous()
    assert torch.equal(given[0], rows[:, 0]) and torch.equal(given[3], rows[:, 3:])
    # The second has another number of elements: new memory.
    assert parts[1].untyped_storage().nbytes() == parts[1].nbytes


def test_padded_equals_that_of_each_tensor():
    xs = [torch.randn(3), torch.randn(0), torch.randn(4)]
    with Kernels() as kernels:
        results = padded(xs, [5, 2, 4], torch.float32)
    assert kernels.counts == {"new_zeros": 1, "_foreach_copy_": 1}
    assert results[2] is xs[2]
    for x, result, length in zip(xs, results, [5, 2, 4], strict=True):
        assert torch.equal(result, pad(x, (0, length - len(x))))


def test_copy_into_leaves_out_the_same_memory():
    xs = [torch.ones(2), torch.ones(3)]
    targets = [xs[0].view(2), torch.zeros(3)]
    version = targets[0]._version
    copy_into(targets, xs)
    assert torch.equal(targets[1], xs[1]) and targets[0]._version == version


# -- a unit: of rank 0 of four, all of which have the same shards ----------------------------------

SHAPES = [(8, 4), (4,), (5,), (), (4, 3)]
"""Even, one element for each rank, uneven, a number, and even again."""


def gathered(dtype, into=None):
    """Gather a unit on a mesh of processes; return results, what they shall be, and operations."""
    with echo.echoing(4):
        mesh = fs.make_mesh({"data": 4}, runtime="process", device="cpu")

        def main():
            layout = fs.Layout(mesh, P.flat("data"))
            shards = [torch.randn(layout.local_shape(shape, 0)) for shape in SHAPES]
            plans = [plan_reshard(layout, fs.Layout(mesh, P()), shape) for shape in SHAPES]
            with torch.no_grad(), Kernels() as kernels:
                dtypes = [dtype] * len(SHAPES)
                reshard = start_reshard(shards, plans, call_site(), ahead=True, dtypes=dtypes)
                results = reshard.wait(into)
            expected = []
            for shard, shape in zip(shards, SHAPES, strict=True):
                flat = shard.to(dtype).repeat(4)[: torch.Size(shape).numel()]
                expected.append(flat.view(shape))
            return results, expected, kernels.counts

        (result,) = fs.run(main, mesh=mesh)
        return result


@pytest.mark.parametrize("dtype", [NARROW, torch.float32])
def test_unit_is_gathered_by_one_copy_in_and_one_out(dtype):
    results, expected, operations = gathered(dtype)
    pack = "cat" if dtype is torch.float32 else "_foreach_copy_"
    assert operations == {pack: 1, "split_with_sizes_copy": 1}
    for result, x in zip(results, expected, strict=True):
        assert torch.equal(result, x) and result.dtype is dtype and result.is_contiguous()
        assert result.storage_offset() == 0


def test_unit_is_unpacked_into_given_memory():
    memory = [torch.full(shape, torch.nan) for shape in SHAPES]
    results, expected, operations = gathered(torch.float32, memory)
    # Uneven leaves have padding, and are copied without it.
    assert operations == {"cat": 1, "split_with_sizes_copy": 1, "_foreach_copy_": 1}
    for result, target, x in zip(results, memory, expected, strict=True):
        assert torch.equal(target, x)
        is_even = x.numel() % 4 == 0
        assert (result.data_ptr() == target.data_ptr()) == is_even


@pytest.mark.parametrize("before", [P.flat("data"), P("data"), P(None, "data")], ids=str)
def test_reshard_casts_and_fills_given_memory_on_virtual_devices(before):
    mesh = fs.make_mesh({"data": 2})
    x = torch.randn(4, 6)
    array = fs.device_put(x, fs.Layout(mesh, before))
    plan = plan_reshard(array.layout, fs.Layout(mesh, P()), (4, 6))

    def main():
        shard = array.shards[fs.axis_index("data")]
        reshard = start_reshard([shard], [plan], call_site(), ahead=True, dtypes=[NARROW])
        memory = torch.zeros(4, 6, dtype=NARROW)
        with torch.no_grad():
            (result,) = reshard.wait([memory])
        return result, memory

    for result, memory in fs.run(main, mesh=mesh):
        assert torch.equal(result, x.to(NARROW)) and torch.equal(memory, result)


@pytest.mark.parametrize("dtype", [NARROW, torch.float32])
def test_rows_of_a_gather_begin_at_multiples_of_16_bytes(dtype, monkeypatch):
    rows = []
    gather = nccl._all_gather

    def recorded(result, row, *rest, **options):
        rows.append((result, row))
        return gather(result, row, *rest, **options)

    monkeypatch.setattr(nccl, "_all_gather", recorded)
    gathered(dtype)
    ((result, row),) = rows
    assert row.numel() % 16 == 0 and result.numel() == 4 * row.numel()
    assert row.data_ptr() == result.data_ptr()  # rank 0 gathers in place
