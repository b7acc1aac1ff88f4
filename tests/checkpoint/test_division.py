"""The bytes that each device writes and reads, against element-by-element oracles."""

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
import fshard.checkpoint.source as source
from fshard import P
from fshard.checkpoint.copying import Span, copy, overlap
from fshard.checkpoint.division import ArrayEntry, Division, span_of
from fshard.checkpoint.files import BLOCK, DTYPES
from fshard.checkpoint.index import storable
from fshard.checkpoint.source import SavedFolder, Target
from fshard.testing.strategies import meshes, shapes_for, specs


def block_elements(block, shape):
    """The numbers of the elements of a block, flattened, in the flattened array."""
    numbers = np.arange(prod(shape)).reshape(shape or (1,))
    return numbers[tuple(slice(*bounds) for bounds in block)].reshape(-1)


def held(layout, shape, device):
    """The numbers of the elements that a device stores, by `Layout.ranges`."""
    if not layout.has_any(device):
        return np.arange(0)
    block = block_elements(layout.block(shape, device), shape)
    return block[slice(*layout.ranges(shape, device)[0])] if layout.spec.is_flat else block


@st.composite
def entries(draw, mesh):
    """Arrays in any storable layout, of even and uneven shapes."""
    result = []
    for number in range(draw(st.integers(0, 4))):
        shape = draw(shapes_for(mesh) | st.lists(st.integers(0, 7), max_size=3).map(tuple))
        spec = draw(specs(mesh, shape, unreduced=False))
        layout = storable(fs.Layout(mesh, spec, unit="u"))
        result.append(
            ArrayEntry(
                str(number),
                (str(number),),
                shape,
                draw(st.sampled_from([*DTYPES])),
                layout,
                (0,) * len(shape),
                shape,
            )
        )
    return result


@st.composite
def divisions(draw):
    mesh = draw(meshes())
    division = Division(draw(entries(mesh)))
    return division, [division.column(device) for device in range(mesh.size)]


def written(division, columns, number, device):
    """The numbers of the elements that a device writes of an array."""
    entry = division.arrays[number]
    column = columns[device]
    block = block_elements(span_of(entry.layout, entry.shape, device).block, entry.shape)
    return block[column.starts[number] : column.stops[number]]


@given(divisions())
def test_every_element_is_written_exactly_once(division):
    arrays = division[0].arrays
    for number, entry in enumerate(arrays):
        by_device = [written(*division, number, device) for device in range(len(division[1]))]
        assert sorted(np.concatenate(by_device).tolist()) == [*range(prod(entry.shape))]
        for device, numbers in enumerate(by_device):
            assert np.isin(numbers, held(entry.layout, entry.shape, device)).all()


@given(divisions())
def test_places_fill_each_file_without_gaps_and_aligned(division):
    arrays = division[0].arrays
    order = division[0].order.tolist()
    sizes = [arrays[number].itemsize for number in order]
    assert sizes == sorted(sizes, reverse=True) and sorted(order) == [*range(len(arrays))]
    for column in division[1]:
        end = 0
        for number, size in zip(order, sizes, strict=True):
            assert column.bytes_before[number] == end and end % size == 0
            end += (column.stops[number] - column.starts[number]) * size


@given(divisions())
def test_replicas_divide_their_bytes_evenly(division):
    """The bytes of replicas differ by less than two elements, for each set of axes that arrays are
    replicated over.
    """
    arrays = division[0].arrays
    columns = division[1]
    groups = {}
    for number, entry in enumerate(arrays):
        groups.setdefault(entry.layout.replicated_axes, []).append(number)
    for axes, members in groups.items():
        mesh, totals = arrays[members[0]].layout.mesh, {}
        for device, column in enumerate(columns):
            group = tuple(
                index for axis, index in mesh.coordinates(device).items() if axis not in axes
            )
            size = sum((column.stops[n] - column.starts[n]) * arrays[n].itemsize for n in members)
            totals.setdefault(group, []).append(size)
        largest = max(arrays[number].itemsize for number in members)
        assert all(max(sizes) - min(sizes) < 2 * largest for sizes in totals.values())


@given(divisions(), st.data())
def test_pieces_have_every_element_of_a_range_once(division, data):
    """Also for an array that is a part of a fused one: at an offset there."""
    arrays = division[0].arrays
    columns = division[1]
    if not arrays:
        return
    number = data.draw(st.integers(0, len(arrays) - 1))
    entry = arrays[number]
    offset = tuple(data.draw(st.integers(0, 2)) for _ in entry.shape)
    full = tuple(
        length + start + data.draw(st.integers(0, 2))
        for length, start in zip(entry.shape, offset, strict=True)
    )
    arrays[number] = entry._replace(offset=offset, full_shape=full)
    wanted = data.draw(spans(full or (1,)))
    inside = block_elements(
        tuple((start, start + n) for start, n in zip(offset, entry.shape, strict=True))
        or ((0, 1),),
        full,
    )
    expected = np.intersect1d(elements(full, wanted), inside)
    covered = []
    for device, byte, span in division[0].ranges(number, wanted):
        written_elements = inside[written(*division, number, device)]
        first = (byte - columns[device].bytes_before[number]) // entry.itemsize
        numbers = elements(full, span)
        assert np.array_equal(written_elements[first : first + len(numbers)], numbers)
        covered.append(np.intersect1d(numbers, expected))
    assert np.array_equal(np.sort(np.concatenate([np.arange(0), *covered])), expected)


@st.composite
def spans(draw, shape):
    block = tuple(
        tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape
    )
    size = prod(stop - start for start, stop in block)
    return Span(block, *sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))))


@st.composite
def pairs(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
    first = draw(spans(shape))
    second = draw(spans(shape) | st.just(first))
    return shape, first, second


def elements(shape, span):
    return block_elements(span.block, shape)[span.start : span.stop]


@given(pairs())
def test_boxes_are_the_elements_of_a_span_in_order(pair):
    shape, span, _ = pair
    boxes = [box for box in span.boxes if all(start < stop for start, stop in box)]
    box_elements = [block_elements(box, shape) for box in boxes]
    assert np.array_equal(np.concatenate([np.arange(0), *box_elements]), elements(shape, span))
    for box, numbers in zip(boxes, box_elements, strict=True):
        assert elements(shape, span)[span.index(box)] == numbers[0]


@given(pairs())
def test_overlap_is_the_smallest_range_with_all_common_elements(pair):
    shape, a, b = pair
    common = np.flatnonzero(
        np.isin(
            block_elements(a.block, shape), np.intersect1d(elements(shape, a), elements(shape, b))
        )
    )
    common = common[(common >= a.start) & (common < a.stop)]
    assert overlap(a, b) == ((common[0], common[-1] + 1) if len(common) else (0, 0))


@given(pairs(), st.integers(0, 3))
def test_copy_writes_the_common_elements_only(pair, offset):
    shape, source, target = pair
    numbers = elements(shape, source)
    target_elements = elements(shape, target)
    room = torch.full((offset + len(target_elements),), -1)
    copy(source, torch.from_numpy(numbers), target, room[offset:])
    expected = np.where(np.isin(target_elements, numbers), target_elements, -1)
    assert room[offset:].tolist() == expected.tolist() and (room[:offset] == -1).all()


@given(st.data())
def test_spans_of_devices_are_what_layouts_store(data):
    mesh = data.draw(meshes())
    shape = data.draw(shapes_for(mesh) | st.lists(st.integers(0, 7), max_size=3).map(tuple))
    layout = fs.Layout(mesh, data.draw(specs(mesh, shape, unreduced=False)), unit="u")
    for device in range(mesh.size):
        assert np.array_equal(
            elements(shape, span_of(layout, shape, device)), held(layout, shape, device)
        )


# -- what is read ----------------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch):
    """The bytes of blocks that were read, by file."""
    blocks, original = {}, source.BlockReader.block

    def spied(reader, number):
        block = original(reader, number)
        blocks[reader.path.name, number] = len(block)
        return block

    monkeypatch.setattr(source.BlockReader, "block", spied)
    return blocks


@pytest.mark.parametrize(
    ("saved", "target", "files"),
    [
        (P("data"), P("data"), 1),
        (P("data"), P.flat("data"), 1),
        (P.flat("data"), P("data"), 1),
        (P(), P("data"), 1),
        (P(at={"data": 1}), P("data"), 1),
        (P(None, "data"), P("data"), 4),
    ],
    ids=str,
)
def test_device_reads_what_it_needs_and_blocks_at_most(saved, target, files, tmp_path, read):
    """An array of 64 MiB, on four devices: each reads 16 MiB, and in each file a block at either
    end of a range more.
    """
    x = torch.arange(16 << 20, dtype=torch.int32).view(1024, -1)
    fs.save(tmp_path, {"x": fs.device_put(x, fs.Layout(fs.make_mesh({"data": 4}), saved))})
    mesh = fs.make_mesh({"data": 4})
    shape = fs.Layout(mesh, target).local_shape(tuple(x.shape), 2)
    into = torch.empty(prod(shape), dtype=x.dtype)
    span = span_of(fs.Layout(mesh, target), tuple(x.shape), 2)
    read.clear()
    SavedFolder(tmp_path).read([Target("x", span, into)])
    assert torch.equal(into, fs.device_put(x, fs.Layout(mesh, target)).shards[2].view(-1))
    assert len({name for name, _ in read}) == files
    assert sum(read.values()) <= into.nbytes + 2 * BLOCK * files
