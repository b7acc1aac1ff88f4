"""Files with digests: written in any portions and read in any views, they are the bytes; headers
are those of safetensors.
"""

import json

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fshard.checkpoint import files
from fshard.errors import CheckpointError


@pytest.fixture(scope="module", autouse=True)
def small():
    """Blocks of 64 bytes, and a disk that writes at most 13 at a time."""
    patch = pytest.MonkeyPatch()
    patch.setattr(files, "BLOCK", 64)
    patch.setattr(files, "_SMALL", 16)
    write = files.Disk.write
    patch.setattr(files.Disk, "write", lambda self, file, data: write(self, file, data[:13]))
    yield
    patch.undo()


def digests(data):
    return [xxhash.xxh3_64_hexdigest(data[start : start + 64]) for start in range(0, len(data), 64)]


def written(path, parts):
    file = files.DigestWriter(path)
    for chunk in parts:
        file.write(chunk)
    file.close()
    return file


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_digests_are_of_each_block_however_it_is_written(tmp_path_factory, parts):
    path = tmp_path_factory.mktemp("a") / "x"
    data = b"".join(parts)
    file = written(path, parts)
    assert path.read_bytes() == data and file.size == len(data) and file.digests == digests(data)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_reader_maps_and_verifies_a_block(tmp_path_factory, data, draw):
    path = tmp_path_factory.mktemp("a") / "x"
    written(path, [data])
    reader = files.BlockReader(path, len(data), digests(data))
    number = draw.draw(st.integers(0, (len(data) - 1) // 64))
    reader.verify(number)
    assert reader.block(number) == data[number * 64 : number * 64 + 64]
    changed = bytearray(data)
    changed[number * 64] ^= 1
    path.write_bytes(changed)
    with pytest.raises(
        CheckpointError,
        match=f"bytes {number * 64} to {min(number * 64 + 64, len(data))} are not those",
    ):
        reader.verify(number)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="became shorter"):
        reader.block(number)
    reader.close()
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=f"must have {len(data)} bytes; got {len(data) - 1}"):
        files.BlockReader(path, len(data), digests(data))


@given(
    st.lists(
        st.tuples(st.sampled_from([*files.DTYPES]), st.lists(st.integers(0, 5), max_size=3)),
        max_size=5,
    )
)
def test_header_has_ranges_of_all_tensors_and_is_aligned(kinds):
    header = files.header_of(
        [(f"é{number}", dtype, shape) for number, (dtype, shape) in enumerate(kinds)]
    )
    size = int.from_bytes(header[:8], "little")
    assert len(header) == 8 + size and len(header) % 16 == 0
    end = 0
    for (name, entry), (number, (dtype, shape)) in zip(
        json.loads(header[8:]).items(), enumerate(kinds), strict=True
    ):
        size = torch.Size(shape).numel() * dtype.itemsize
        assert name == f"é{number}" and entry["data_offsets"] == [end, end + size]
        assert entry["shape"] == [*shape, *([2] if dtype.is_complex else [])]
        end += size


def test_small_file_is_replaced_at_once(tmp_path):
    path = tmp_path / "x"
    for data in (b"a" * 100, b""):
        files.write_file(path, data)
        assert path.read_bytes() == data and [file.name for file in tmp_path.iterdir()] == ["x"]


@given(st.binary(min_size=2, max_size=200), st.data())
def test_weighted_sums_change_with_any_byte_and_with_the_order(data, draw):
    """The digest of a GPU's tensors, here of a CPU's."""
    x = torch.tensor([*data], dtype=torch.uint8)
    first, second = draw.draw(st.permutations(range(len(x))))[:2]
    sums = files._weighted_sums(x)
    changed = x.clone()
    swapped = x.clone()
    changed[first] += draw.draw(st.integers(1, 255))
    swapped[[first, second]] = x[[second, first]]
    assert not torch.equal(files._weighted_sums(changed), sums)
    assert torch.equal(files._weighted_sums(swapped), sums) == (data[first] == data[second])


def test_digests_are_of_the_elements_in_order():
    x = torch.arange(24.0).view(4, 6)
    empty = torch.empty(0, 2)
    assert files.digest_of(x.t()) == files.digest_of(x.t().contiguous()) != files.digest_of(x)
    assert (
        files.digest_of(empty) == files.digest_of(empty.t())
        and len(files._weighted_sums(empty.view(-1))) == 1
    )
