"""Corrupt files are detected, and no index makes `restore` read or allocate what is not there.

Corruptions are drawn; the oracle is the tree that was saved, or an error of checkpoints.
"""

import copy
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.checkpoint.files import BLOCK, digest
from fshard.checkpoint.index import as_text, read_sealed, sealed
from fshard.errors import CheckpointError


def tree():
    """Return arrays in rows, replicated and flat, a tie, and plain values."""
    mesh = fs.make_mesh({"data": 2})
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, generator=generator)
    y = torch.randn(7, generator=generator)
    return {
        "a": fs.device_put(x.view(12, 8), fs.Layout(mesh, P("data"))),
        "b": fs.device_put(y, fs.Layout(mesh)),
        "c": fs.device_put(y.bfloat16(), fs.Layout(mesh, P.flat("data"))),
        "tie": None,
        "steps": 5,
        "list": [1.5, "text"],
    }


def whole():
    target = tree()
    return {**target, "tie": target["a"]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The names and bytes of the files of a checkpoint, and what it has."""
    path = tmp_path_factory.mktemp("saved")
    fs.save(path, whole(), metrics={"loss": 0.5})
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}, flat(fs.restore(path))


def flat(restored):
    """Return the bytes of tensors as lists, and other values as they are."""
    values = {}
    for name, x in restored.items():
        if isinstance(x, torch.Tensor):
            x = x.view(torch.uint8).flatten().tolist()
        values[name] = x
    return values


def written(path, contents):
    path.mkdir(exist_ok=True)
    for name, data in contents.items():
        (path / name).write_bytes(data)
    return path


def outcome(path):
    """Return the restored tree; None if it is refused."""
    try:
        return flat(fs.restore(path))
    except CheckpointError as error:
        text = str(error)
    assert len(text) > 20 and str(path) in text
    return None


def corrupted(data, chance):
    """Flip a bit, cut the end, swap two ranges, repeat or remove a range."""
    size = len(data)
    kind = chance.randrange(5)
    start, second_start = sorted(chance.sample(range(size), 2))
    length = chance.randint(1, max(1, min(64, second_start - start, size - second_start)))
    stop = start + length

    if kind == 0:
        flipped = data[start] ^ 1 << chance.randrange(8)
        return data[:start] + bytes([flipped]) + data[start + 1 :]
    if kind == 1:
        return data[:start]
    if kind == 2:
        second_stop = second_start + length
        first = data[start:stop]
        second = data[second_start:second_stop]
        between = data[stop:second_start]
        return data[:start] + second + between + first + data[second_stop:]
    if kind == 3:
        return data + data[start:stop]
    return data[:start] + data[stop:]


@pytest.mark.parametrize("seed", range(4))
def test_250_corruptions_of_any_file_are_detected(seed, saved, tmp_path):
    contents, _ = saved
    chance = random.Random(seed)
    count = 0
    written(tmp_path, contents)
    while count < 250:
        name = chance.choice([*contents])
        data = corrupted(contents[name], chance)
        if data == contents[name]:
            continue
        (tmp_path / name).write_bytes(data)
        assert outcome(tmp_path) is None, (name, len(data))
        (tmp_path / name).write_bytes(contents[name])
        count += 1


def test_swapped_and_missing_files_are_detected(saved, tmp_path):
    contents, expected = saved
    assert outcome(written(tmp_path / "as is", contents)) == expected

    for first in contents:
        others = {name: data for name, data in contents.items() if name != first}
        path = written(tmp_path / f"no {first}", others)
        assert outcome(path) is None, first

    for first, second in itertools.permutations(contents, 2):
        if contents[first] != contents[second]:
            swapped = {**contents, first: contents[second], second: contents[first]}
            path = written(tmp_path / f"{first} {second}", swapped)
            assert outcome(path) is None, (first, second)


def test_all_incomplete_files_are_named(saved, tmp_path):
    path = written(tmp_path, saved[0])
    data = sorted(path.glob("*.safetensors"))
    data[0].unlink()
    data[1].write_bytes(data[1].read_bytes() + b"x")
    manifest = next(path.glob("*-0.json"))
    manifest.unlink()
    with pytest.raises(CheckpointError) as error:
        fs.restore(path)
    assert all(file.name in str(error.value) for file in [*data, manifest])


def test_all_corrupt_files_are_named_with_their_bytes(tmp_path):
    mesh = fs.make_mesh({"data": 3})
    x = torch.arange(3 * BLOCK // 4 * 2)
    fs.save(tmp_path, {"x": fs.device_put(x, fs.Layout(mesh, P("data")))})
    sound, *corrupt = sorted(tmp_path.glob("*.safetensors"))
    for file in corrupt:
        with file.open("r+b") as opened:
            opened.seek(BLOCK + 5)
            opened.write(b"\xff")

    with pytest.raises(CheckpointError) as error:
        fs.restore(tmp_path)

    text = str(error.value)
    assert sound.name not in text
    assert all(file.name in text for file in corrupt)
    assert text.count(f"bytes {BLOCK} to {2 * BLOCK} are not") == 2


# -- a manipulated index, with a valid digest ------------------------------------------------------


def manipulated(path, contents, change):
    """Write a checkpoint whose index is changed, and sealed again."""
    written(path, contents)
    index = read_sealed(path / "index.json")
    index = change(index) or index
    (path / "index.json").write_bytes(sealed(as_text(index)))
    return path


def renamed(field, name):
    def change(index):
        index["writers"][0][field] = name

    return change


def resized(*shape):
    def change(index):
        index["arrays"][0][1] = [*shape]

    return change


def divided(*blocks):
    """Store the array of shape (12, 8) as parts: the shape and offset of each."""

    def change(index):
        path, _, dtype, layout = index["arrays"][0]
        parts = [[path, shape, dtype, layout, offset, [12, 8]] for shape, offset in blocks]
        index["arrays"][:1] = parts

    return change


def fused(index):
    index["arrays"][0] += [[0, 0], [1 << 20, 1 << 20]]


def grown(index):
    index["arrays"][0][1] = [1 << 40, 8]
    for writer in index["writers"]:
        writer[1] += (1 << 44) - 192


OUTSIDE = (
    "../secret.safetensors",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a/../../b.json",
    "A-0.safetensors\n",
)
WRONG_SHAPES = [(1 << 40, 8), (1 << 70, 0), (-12, -8), (12.0, 8), ()]
FIRST_HALF = ([6, 8], [0, 0])
FIRST_THIRD = ([4, 8], [0, 0])
MANIPULATIONS = [
    *[(renamed(0, name), "names of files") for name in OUTSIDE],
    *[(renamed(3, name), "names of files") for name in OUTSIDE],
    *[(resized(*shape), "is not what fs.save writes") for shape in WRONG_SHAPES],
    (fused, "wrong parts"),
    (grown, "is not complete"),
    (divided(FIRST_HALF, ([6, 8], [0, 0])), "wrong parts"),
    (divided(FIRST_HALF, ([6, 8], [5, 0])), "wrong parts"),
    (divided(FIRST_HALF, ([6, 8], [7, 0])), "wrong parts"),
    (divided(FIRST_HALF, ([4, 8], [6, 0])), "wrong parts"),
    (divided(FIRST_THIRD, FIRST_THIRD, ([4, 8], [8, 0])), "wrong parts"),
]


@pytest.mark.parametrize(("change", "text"), MANIPULATIONS)
def test_manipulated_index_raises_and_allocates_no_more_than_files_hold(
    change, text, saved, tmp_path, monkeypatch
):
    empty = torch.empty

    def small(*shape, **options):
        x = empty(*shape, **{**options, "device": "meta"})
        assert x.numel() < 1000
        return empty(*shape, **options)

    path = manipulated(tmp_path, saved[0], change)
    mesh = fs.make_mesh({"data": 2})
    target = whole()
    monkeypatch.setattr(torch, "empty", small)
    for options in ({}, {"target": fs.fsdp("data"), "mesh": mesh}, {"target": target}):
        with pytest.raises(CheckpointError, match=text):
            fs.restore(path, **options)


@pytest.mark.parametrize("depth", [900, 100_000])
@pytest.mark.parametrize("key", ["all", "values", "value", "path", "layouts", "version", "metrics"])
def test_index_that_is_nested_deep_is_refused(key, depth, saved, tmp_path):
    """Deeper than Python's limit of calls, in what is read as JSON or in the tree of values."""
    path = written(tmp_path, saved[0])
    index = read_sealed(path / "index.json")
    hole = "@"
    if key == "all":
        document = hole
    elif key == "value":
        document = {**index, "values": [[["n"], hole]]}
    elif key == "path":
        document = {**index, "values": [[["a"] * depth, 1]]}
    else:
        document = {**index, key: hole}
    deep = "[" * depth + "]" * depth
    text = as_text(document).replace(f'"{hole}"', deep)
    (path / "index.json").write_bytes(sealed(text))

    with pytest.raises(CheckpointError):
        fs.restore(path)


def test_tree_that_is_nested_too_deep_is_not_saved(tmp_path):
    tree = 1
    for _ in range(5000):
        tree = {"a": tree}
    with pytest.raises(CheckpointError, match="nested less deep"):
        fs.save(tmp_path / "deep", tree)
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_json_of_other_formats_that_is_nested_deep_is_refused(name, tmp_path):
    deep = b"[" * 100_000 + b"]" * 100_000
    is_header = name == "model.safetensors"
    (tmp_path / name).write_bytes(len(deep).to_bytes(8, "little") + deep if is_header else deep)
    with pytest.raises(CheckpointError, match="cannot be read"):
        fs.restore(tmp_path)


def test_manifest_of_another_size_is_refused(saved, tmp_path):
    path = written(tmp_path, saved[0])
    manifest = next(path.glob("*-1.json"))
    for change in ({"digests": []}, {"digests": "x"}, {"size": 1}, {"digests": [[]]}):
        content = {**read_sealed(manifest), **change}
        (path / manifest.name).write_bytes(sealed(as_text(content)))
        index = read_sealed(path / "index.json")
        index["writers"][1][4] = digest(as_text(content).encode())
        (path / "index.json").write_bytes(sealed(as_text(index)))
        with pytest.raises(CheckpointError, match=f"{manifest.name} is not what fs.save writes"):
            fs.restore(path)
        written(path, saved[0])


numbers = st.integers(-(2**70), 2**70) | st.floats()
scalars = st.none() | st.booleans() | numbers | st.text(max_size=5)


def containers(inner):
    dicts = st.dictionaries(st.text(max_size=3), inner, max_size=2)
    return st.lists(inner, max_size=3) | dicts


anything = st.recursive(scalars, containers, max_leaves=4)


def places(node, path=()):
    """All places in a tree of JSON."""
    yield path
    for key, inner in (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    ):
        yield from places(inner, (*path, key))


def change_a_place(data, document):
    """Replace, vary, remove or repeat one value of a JSON document."""
    path = ("all", *data.draw(st.sampled_from([*places(document["all"])])))
    *parents, last = path
    node = document
    for key in parents:
        node = node[key]

    kind = data.draw(st.sampled_from(["replace", "near", "remove", "repeat"]))
    if kind == "replace" or last == "all":
        node[last] = data.draw(anything)
    elif kind == "near" and type(node[last]) in (int, str, list):
        step = {int: 1, str: "0", list: [0]}[type(node[last])]
        node[last] = node[last] + step
    elif kind == "repeat" and isinstance(node, list):
        node.append(copy.deepcopy(node[last]))
    else:
        del node[last]


@given(data=st.data())
@settings(max_examples=100)
def test_fuzzed_index_is_refused_or_restores(data, saved, tmp_path_factory):
    """One or two places of the JSON are changed: a clear error, or a tree; no other error."""
    contents, _ = saved
    name = data.draw(st.sampled_from([file for file in contents if file.endswith(".json")]))
    path = written(tmp_path_factory.mktemp("fuzz"), contents)
    document = {"all": read_sealed(path / name)}
    for _ in range(data.draw(st.integers(1, 2))):
        change_a_place(data, document)
        if not isinstance(document.get("all"), dict):
            break
    (path / name).write_bytes(sealed(as_text(document["all"])))

    for target in ({}, {"target": whole()}):
        try:
            fs.restore(path, **target)
        except CheckpointError as error:
            text = str(error)
            assert str(path) in text or "a container of others" in text


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, "5", "null", "[]", '{"version":1}', '{"version":2}', "1" * 5000],
)
def test_other_json_is_refused(text, saved, tmp_path):
    path = written(tmp_path, saved[0])
    (path / "index.json").write_bytes(sealed(text))
    with pytest.raises(
        CheckpointError,
        match="version 2 must be 1" if text == '{"version":2}' else "is not what fs.save writes",
    ):
        fs.restore(path)
    (path / "index.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not as it was written"):
        fs.restore(path)


# -- the target of a restore that fails ------------------------------------------------------------


def dcp_folder(path, x):
    fs.export(path, {"a": x, "b": 2 * x}, to="dcp")
    with next(path.glob("*.distcp")).open("r+b") as file:
        file.seek(-x.nbytes, 2)
        file.write(bytes(x.nbytes))


def own_folder(path, x):
    fs.save(path, {"a": x, "b": 2 * x})
    with next(path.glob("*.safetensors")).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")


@pytest.mark.parametrize("write", [own_folder, dcp_folder])
@pytest.mark.parametrize("runtime", ["plain", "virtual"])
def test_a_failed_restore_leaves_the_target_as_it_was(write, runtime, tmp_path):
    """Also the arrays whose bytes are right: the corrupt ones come last."""
    x = torch.randn(BLOCK // 4)
    write(tmp_path / "7", x)
    layout = fs.Layout(fs.make_mesh({"data": 2}), P("data"))
    target = {name: torch.zeros(len(x)) for name in "ab"}
    if runtime == "virtual":
        target = fs.device_put(target, layout)
    with pytest.raises(CheckpointError):
        fs.restore(tmp_path / "7", target, trust=True)
    assert all(not fs.unshard(x).any() for x in target.values())
