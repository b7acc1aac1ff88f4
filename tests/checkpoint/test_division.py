"""Who writes and reads which bytes: against element-by-element oracles."""

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
from fshard.checkpoint.division import ArrayEntry, Division, shards_of
from fshard.checkpoint.files import BLOCK, DTYPES
from fshard.checkpoint.index import storable
from fshard.checkpoint.restore import span_of
from fshard.checkpoint.source import OwnFolder, Target
from fshard.testing.strategies import meshes, shapes_for, specs


def block_elements(block, shape):
    """The numbers of the elements of a block, flattened, in the flattened array."""
    numbers = np.arange(prod(shape)).reshape(shape or (1,))
    return numbers[tuple(slice(*one) for one in block)].reshape(-1)


def held(layout, shape, device):
    """The numbers of the elements that a device stores, by `Layout.ranges`."""
    if not layout.has_any(device):
        return np.arange(0)
    block = block_elements(layout.block(shape, device), shape)
    return block[slice(*layout.ranges(shape, device)[0])] if layout.spec.is_flat else block


@st.composite
def entries(draw, mesh):
    """Arrays in any storable layout, of even and uneven shapes."""
    found = []
    for number in range(draw(st.integers(0, 4))):
        shape = draw(shapes_for(mesh) | st.lists(st.integers(0, 7), max_size=3).map(tuple))
        spec = draw(specs(mesh, shape, unreduced=False))
        layout = storable(fs.Layout(mesh, spec, unit="u"))
        found.append(
            ArrayEntry(
                str(number), (str(number),), shape, draw(st.sampled_from([*DTYPES])), layout, (0,) * len(shape), shape
            )
        )
    return found


@st.composite
def divisions(draw):
    mesh = draw(meshes())
    return Division(draw(entries(mesh)), mesh.size)


@given(divisions())
def test_every_element_is_written_exactly_once(division):
    for number, one in enumerate(division.arrays):
        count = np.zeros(prod(one.shape), int)
        for device in range(division.devices):
            block = block_elements(shards_of(one.layout, one.shape)[0][device], one.shape)
            mine = block[division.starts[number, device] : division.stops[number, device]]
            assert np.isin(mine, held(one.layout, one.shape, device)).all()
            count[mine] += 1
        assert (count == 1).all()


@given(divisions())
def test_places_fill_each_file_without_gaps_and_aligned(division):
    for device in range(division.devices):
        end, sizes = 0, []
        for number in division.order.tolist():
            one = division.arrays[number]
            assert division.places[number, device] == end
            size = (division.stops[number, device] - division.starts[number, device]) * one.itemsize
            assert end % one.itemsize == 0
            end += size
            sizes.append(one.itemsize)
        assert division.sizes[device] == end and sizes == sorted(sizes, reverse=True)


@given(divisions())
def test_replicas_divide_their_bytes_evenly(division):
    """The bytes of replicas differ by less than two elements for each set of axes that arrays are replicated over."""
    groups = {}
    for number, one in enumerate(division.arrays):
        groups.setdefault(one.layout.replicated_axes, []).append(number)
    for axes, members in groups.items():
        each = np.array([division.arrays[number].itemsize for number in members])[:, None]
        written = ((division.stops - division.starts)[members] * each).sum(0)
        mesh = division.arrays[members[0]].layout.mesh
        for device in range(division.devices):
            same = mesh.coordinates(device)
            alike = [
                other
                for other in range(division.devices)
                if all(at == same[axis] for axis, at in mesh.coordinates(other).items() if axis not in axes)
            ]
            assert np.ptp(written[alike]) <= 2 * each.max()


def test_replicated_leaves_are_divided_over_all_devices():
    """Many small leaves, not one of which could be divided: bytes still differ by less than two elements."""
    layout = storable(fs.Layout(fs.make_mesh({"data": 8}), P()))
    arrays = [ArrayEntry(str(n), (n,), (3,), torch.float32, layout, (0,), (3,)) for n in range(100)]
    sizes = Division(arrays, 8).sizes
    assert sizes.sum() == 1200 and np.ptp(sizes) <= 8


@st.composite
def spans(draw, shape):
    block = tuple(tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)
    size = prod(stop - start for start, stop in block)
    return Span(block, *sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))))


@st.composite
def pairs(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
    one = draw(spans(shape))
    other = draw(spans(shape) | st.just(one))
    return shape, one, other


def elements(shape, span):
    return block_elements(span.block, shape)[span.start : span.stop]


@given(pairs())
def test_boxes_are_the_elements_of_a_span_in_order(pair):
    shape, span, _ = pair
    boxes = [box for box in span.boxes if all(start < stop for start, stop in box)]
    found = [block_elements(box, shape) for box in boxes]
    assert np.array_equal(np.concatenate([np.arange(0), *found]), elements(shape, span))
    for box, numbers in zip(boxes, found, strict=True):
        assert elements(shape, span)[span.at(box)] == numbers[0]


@given(pairs())
def test_overlap_is_the_smallest_range_with_all_common_elements(pair):
    shape, a, b = pair
    common = np.flatnonzero(
        np.isin(block_elements(a.block, shape), np.intersect1d(elements(shape, a), elements(shape, b)))
    )
    common = common[(common >= a.start) & (common < a.stop)]
    assert overlap(a, b) == ((common[0], common[-1] + 1) if len(common) else (0, 0))


@given(pairs(), st.integers(0, 3))
def test_copy_writes_the_common_elements_only(pair, offset):
    shape, source, target = pair
    numbers, places = elements(shape, source), elements(shape, target)
    room = torch.full((offset + len(places),), -1)
    copy(source, torch.from_numpy(numbers), target, room[offset:])
    expected = np.where(np.isin(places, numbers), places, -1)
    assert room[offset:].tolist() == expected.tolist() and (room[:offset] == -1).all()


@given(st.data())
def test_spans_of_devices_are_what_layouts_store(data):
    mesh = data.draw(meshes())
    shape = data.draw(shapes_for(mesh) | st.lists(st.integers(0, 7), max_size=3).map(tuple))
    layout = fs.Layout(mesh, data.draw(specs(mesh, shape, unreduced=False)), unit="u")
    for device in range(mesh.size):
        assert np.array_equal(elements(shape, span_of(layout, shape, device)), held(layout, shape, device))


# -- what is read -----------------------------------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch):
    """The bytes of blocks that were read, by file."""
    found, original = {}, source.read_blocks

    def spied(path, size, digests, wanted):
        for number, block in original(path, size, digests, wanted):
            found[path.name, number] = len(block)
            yield number, block

    monkeypatch.setattr(source, "read_blocks", spied)
    return found


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
    """An array of 64 MiB, on four devices: each reads 16 MiB, and in each file a block at either end of a range more."""
    x = torch.arange(16 << 20, dtype=torch.int32).view(1024, -1)
    fs.save(tmp_path, {"x": fs.device_put(x, fs.Layout(fs.make_mesh({"data": 4}), saved))})
    mesh = fs.make_mesh({"data": 4})
    own = fs.Layout(mesh, target).local_shape(tuple(x.shape), 2)
    into = torch.empty(prod(own), dtype=x.dtype)
    span = span_of(fs.Layout(mesh, target), tuple(x.shape), 2)
    read.clear()
    OwnFolder(tmp_path).read([Target("x", span, into)])
    assert torch.equal(into, fs.device_put(x, fs.Layout(mesh, target)).shards[2].view(-1))
    assert len({name for name, _ in read}) == files
    assert sum(read.values()) <= into.nbytes + 2 * BLOCK * files


def test_range_of_flat_array_reads_its_blocks_only(tmp_path, read):
    x = torch.arange(
        12 << 20, dtype=torch.int32
    )  # 48 MiB: 12 blocks in one file, which begin 112 bytes after the array
    fs.save(tmp_path, {"x": x})
    folder = OwnFolder(tmp_path)
    header = folder.index.writers[0].header
    part = BLOCK // 4
    into = torch.empty(part, dtype=x.dtype)
    folder.read([Target("x", Span(((0, len(x)),), 5 * part - header // 4, 6 * part - header // 4), into)])
    assert [number for _, number in read] == [5]
    assert torch.equal(into, x[5 * part - header // 4 : 6 * part - header // 4])
