"""Pictures say what layouts say; expected pictures are drawn as a person would draw them."""

import contextlib
import io
import re
import sys
import time
import types
from math import prod
from textwrap import dedent
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.explore.grid import plan_grid
from fshard.explore.inventory import take_stock
from fshard.explore.picture import picture, visualize
from fshard.mesh.layout import Mesh, ShardType

AXES = ("pipe", "data", "model")


@st.composite
def layouts(draw, flat=None):
    """Return a layout on a mesh of up to 27 devices, and a shape that lies like it; all of it is
    drawn.
    """
    names = draw(st.lists(st.sampled_from(AXES), min_size=1, unique=True))
    mesh = fs.make_mesh({name: draw(st.integers(1, 3)) for name in names}, runtime="abstract")
    places = {
        name: draw(st.sampled_from(["cut", "copied", "unreduced", "placed"])) for name in names
    }
    cutting = draw(st.permutations([name for name in names if places[name] == "cut"]))
    unreduced = tuple(name for name in names if places[name] == "unreduced")
    on = {
        name: draw(st.integers(0, mesh.shape[name] - 1))
        for name in names
        if places[name] == "placed"
    }
    assume(prod(mesh.shape[name] for name in on) <= 8)
    if cutting and (draw(st.booleans()) if flat is None else flat):
        assume(prod(mesh.shape[name] for name in cutting) <= 8)
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        return fs.Layout(mesh, P.flat(*cutting, unreduced=unreduced, at=on)), tuple(shape)
    ndim = draw(st.integers(0 if not cutting else 1, 4))
    entries = [[] for _ in range(ndim)]
    for name in cutting:
        entries[draw(st.integers(0, ndim - 1))].append(name)
    parts = [prod(mesh.shape[name] for name in entry) for entry in entries]
    assume(all(count <= 4 for count in parts))
    shape = [draw(st.integers(0, 2)) * count for count in parts]
    return fs.Layout(mesh, P(*map(tuple, entries), unreduced=unreduced, at=on)), tuple(shape)


def grid_of(layout, shape):
    return plan_grid(ShardType(torch.float32, shape, layout.spec, layout.memory), layout.mesh)


@given(layouts())
def test_grid_cells_cover_every_element_once(case):
    layout, shape = case
    count = torch.zeros((prod(shape),) if layout.spec.is_flat else shape, dtype=torch.int64)
    for cell in grid_of(layout, shape).cells:
        count[tuple(slice(*place) for place in cell.ranges)] += 1
    assert (count == 1).all()


@given(layouts())
def test_grid_cells_have_the_devices_of_the_layout(case):
    layout, shape = case
    cells = grid_of(layout, shape).cells
    drawn = [(device, cell.ranges) for cell in cells for copy in cell.holders() for device in copy]
    devices = filter(layout.has_any, range(layout.mesh.size))
    assert sorted(drawn) == [(device, layout.ranges(shape, device)) for device in devices]


@given(layouts())
def test_grid_summands_differ_along_unreduced_axes_only(case):
    layout, shape = case
    summands = prod(layout.mesh.shape[name] for name in layout.spec.unreduced)
    for cell in grid_of(layout, shape).cells:
        for copy in cell.holders():
            at = [layout.mesh.coordinates(device) for device in copy]
            kept = [
                {name: place for name, place in one.items() if name not in layout.spec.unreduced}
                for one in at
            ]
            assert len(copy) == summands and all(one == kept[0] for one in kept)


@given(layouts())
def test_picture_of_any_layout_is_drawn(case):
    layout, shape = case
    shown = picture(shape, layout=layout)
    assert str(shown).startswith(f"{grid_of(layout, shape).type} on {layout.mesh}\n")
    drawing = ElementTree.fromstring(shown.svg)
    tips = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert len(tips) == len(set(tips)) or 0 in shape or prod(shape) < layout.mesh.size


@st.composite
def small_layouts(draw):
    """Return a layout of a tensor of up to 5 dims on a mesh of up to 4 axes, 16 devices at most: on more some are omitted."""
    count = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    assume(prod(sizes) <= 16)
    mesh = fs.make_mesh(dict(zip("abcd", sizes, strict=False)), runtime="abstract")
    dims = draw(st.integers(1, 5))
    lengths = st.sampled_from([2, 4, 6, 12])
    shape = tuple(draw(st.lists(lengths, min_size=dims, max_size=dims)))
    return fs.Layout(mesh, draw(fs.testing.strategies.specs(mesh, shape))), shape


def devices_at(text, mesh):
    """Return the devices at coordinates such as "a=0, b=*"."""
    coordinates = dict(entry.split("=") for entry in text.split(", "))
    devices = []
    for device in range(mesh.size):
        own = mesh.coordinates(device)
        if all(place in ("*", str(own[axis])) for axis, place in coordinates.items()):
            devices.append(device)
    return devices


TIP = re.compile(r"\[(?P<ranges>.*)\] on .* \((?P<coordinates>.*)\)")


@given(small_layouts())
def test_picture_has_each_shard_of_each_device_once(case):
    """Read back from the SVG: no sharded dim is hidden, flat ones within dims neither."""
    layout, shape = case

    drawing = ElementTree.fromstring(picture(shape, layout=layout).svg)

    drawn = []
    for tip in drawing.iter("{http://www.w3.org/2000/svg}title"):
        found = TIP.fullmatch(tip.text)
        for device in devices_at(found["coordinates"], layout.mesh):
            drawn.append((device, found["ranges"]))
    expected = []
    for device in filter(layout.has_any, range(layout.mesh.size)):
        ranges = written(layout.ranges(shape, device))
        is_flat_within_dims = layout.spec.is_flat and any(
            prod(layout.mesh.shape[axis] for axis in axes) > 1
            for axes in layout.spec.dims(len(shape))
        )
        if is_flat_within_dims:
            ranges = f"{written(layout.block(shape, device))}, flat {ranges}"
        expected.append((device, ranges))
    assert sorted(drawn) == expected


def written(ranges):
    return ", ".join(f"{start}:{stop}" for start, stop in ranges)


@given(small_layouts())
def test_picture_as_text_has_each_device_of_a_small_mesh_once(case):
    """Read back from the cells, where none lists some devices alone."""
    layout, shape = case
    assume(not layout.spec.unreduced)

    _, _, *drawn = str(picture(shape, layout=layout)).split("\n")

    devices = []
    for line in drawn:
        for cell in re.findall(r"(?<=│) *([\d,…-]+)(?: \(empty\))? *(?=│)", line):
            assume("…" not in cell)
            for run in cell.split(","):
                first, _, last = run.partition("-")
                devices += range(int(first), int(last or first) + 1)
    assert sorted(devices) == [*filter(layout.has_any, range(layout.mesh.size))]


class Case(NamedTuple):
    shape: tuple
    mesh: dict
    layout: tuple  # of fs.Layout, after the mesh
    drawn: str


CASES = {
    "two dims": Case(
        (8, 6),
        {"data": 4, "model": 2},
        (P("data", "model"),),
        """
        f32[8@data, 6@model] on Mesh(data=4, model=2; virtual, cpu)
        192 B, 24 B on each of 8 devices

                    dim 1@model
                     0:3   3:6
        dim 0@data ┌─────┬─────┐
               0:2 │  0  │  1  │
                   ├─────┼─────┤
               2:4 │  2  │  3  │
                   ├─────┼─────┤
               4:6 │  4  │  5  │
                   ├─────┼─────┤
               6:8 │  6  │  7  │
                   └─────┴─────┘
        """,
    ),
    "flat, the last range shorter": Case(
        (5, 2),
        {"data": 4},
        (P.flat("data"),),
        """
        f32[5, 2]{flat:data} on Mesh(data=4; virtual, cpu)
        40 B, at most 12 B on each of 4 devices

         flat@data
          0:3   3:6   6:9   9:10
        ┌─────┬─────┬─────┬──────┐
        │  0  │  1  │  2  │  3   │
        └─────┴─────┴─────┴──────┘
        """,
    ),
    "replicated along the first axis": Case(
        (6,),
        {"data": 2, "model": 3},
        (P("model"),),
        """
        f32[6@model] on Mesh(data=2, model=3; virtual, cpu)
        24 B, 8 B on each of 6 devices

         dim 0@model
          0:2   2:4   4:6
        ┌─────┬─────┬─────┐
        │ 0,3 │ 1,4 │ 2,5 │
        └─────┴─────┴─────┘

        equal copies along data
        """,
    ),
    "unreduced": Case(
        (4, 6),
        {"data": 2, "model": 2},
        (P("data", unreduced="model"),),
        """
        f32[4@data, 6]{U:model} on Mesh(data=2, model=2; virtual, cpu)
        96 B, 48 B on each of 4 devices

                    dim 1
                      0:6
        dim 0@data ┌───────┐
               0:2 │ Σ 0+1 │
                   ├───────┤
               2:4 │ Σ 2+3 │
                   └───────┘

        Σ: still to be summed, over model
        """,
    ),
    "host": Case(
        (4,),
        {"data": 2},
        (P("data"), "host"),
        """
        f32[4@data]{host} on Mesh(data=2; virtual, cpu)
        16 B, 8 B on each of 2 devices

         dim 0@data
           0:2      2:4
        ┌────────┬────────┐
        │ host 0 │ host 1 │
        └────────┴────────┘

        in the memory of the host
        """,
    ),
    "three axes, two of them on one dim, minor first": Case(
        (8, 3),
        {"pipe": 2, "data": 2, "model": 2},
        (P(("model", "data")),),
        """
        f32[8@model+data, 3] on Mesh(pipe=2, data=2, model=2; virtual, cpu)
        96 B, 24 B on each of 8 devices

                          dim 1
                           0:3
        dim 0@model+data ┌─────┐
                     0:2 │ 0,4 │
                         ├─────┤
                     2:4 │ 2,6 │
                         ├─────┤
                     4:6 │ 1,5 │
                         ├─────┤
                     6:8 │ 3,7 │
                         └─────┘

        equal copies along pipe
        """,
    ),
    "four dims, three of them cut": Case(
        (4, 3, 6, 2),
        {"pipe": 2, "data": 2, "model": 2},
        (P("data", None, "model", "pipe"),),
        """
        f32[4@data, 3, 6@model, 2@pipe] on Mesh(pipe=2, data=2, model=2; virtual, cpu)
        576 B, 72 B on each of 8 devices

        dim 0@data 0:2              dim 0@data 2:4
                     dim 3@pipe                  dim 3@pipe
                      0:1   1:2                   0:1   1:2
        dim 2@model ┌─────┬─────┐   dim 2@model ┌─────┬─────┐
                0:3 │  0  │  4  │           0:3 │  2  │  6  │
                    ├─────┼─────┤               ├─────┼─────┤
                3:6 │  1  │  5  │           3:6 │  3  │  7  │
                    └─────┴─────┘               └─────┴─────┘

        not drawn, unsharded: dim 1 (3)
        """,
    ),
    "four dims on four axes": Case(
        (4, 6, 2, 8),
        {"a": 2, "b": 2, "c": 2, "d": 2},
        (P("b", "c", "a", "d"),),
        """
        f32[4@b, 6@c, 2@a, 8@d] on Mesh(a=2, b=2, c=2, d=2; virtual, cpu)
        1.5 KiB, 96 B on each of 16 devices

        dim 0@b 0:2, dim 1@c 0:3   dim 0@b 0:2, dim 1@c 3:6
                 dim 3@d                    dim 3@d
                  0:4   4:8                  0:4   4:8
        dim 2@a ┌─────┬─────┐      dim 2@a ┌─────┬─────┐
            0:1 │  0  │  1  │          0:1 │  2  │  3  │
                ├─────┼─────┤              ├─────┼─────┤
            1:2 │  8  │  9  │          1:2 │ 10  │ 11  │
                └─────┴─────┘              └─────┴─────┘

        dim 0@b 2:4, dim 1@c 0:3   dim 0@b 2:4, dim 1@c 3:6
                 dim 3@d                    dim 3@d
                  0:4   4:8                  0:4   4:8
        dim 2@a ┌─────┬─────┐      dim 2@a ┌─────┬─────┐
            0:1 │  4  │  5  │          0:1 │  6  │  7  │
                ├─────┼─────┤              ├─────┼─────┤
            1:2 │ 12  │ 13  │          1:2 │ 14  │ 15  │
                └─────┴─────┘              └─────┴─────┘
        """,
    ),
    "flat within the shards of a dim": Case(
        (4, 6),
        {"a": 2, "b": 2},
        (P("b", flat=("a",)),),
        """
        f32[4@b, 6]{flat:a} on Mesh(a=2, b=2; virtual, cpu)
        96 B, 24 B on each of 4 devices

                 flat@a
                  0:6   6:12
        dim 0@b ┌─────┬──────┐
            0:2 │  0  │  2   │
                ├─────┼──────┤
            2:4 │  1  │  3   │
                └─────┴──────┘
        """,
    ),
}


def lines(text):
    return dedent(text).strip().split("\n")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_picture_as_text(case):
    x = fs.device_put(torch.ones(case.shape), fs.Layout(fs.make_mesh(case.mesh), *case.layout))
    assert str(picture(x)).split("\n") == lines(case.drawn)


def test_picture_of_65536_devices_is_elided():
    mesh = fs.make_mesh({"data": 4096, "model": 16}, runtime="abstract")
    start = time.process_time()
    text = str(picture((131072, 1024), layout=fs.Layout(mesh, P("data", "model"))))
    assert time.process_time() - start < 1
    assert text.split("\n") == lines(
        """
        f32[131072@data, 1024@model] on Mesh(data=4096, model=16; abstract, meta)
        512.0 MiB, 8.0 KiB on each of 65,536 devices

                                 dim 1@model, 16 parts
                                  0:64    64:128   128:192   192:256   …   960:1024
        dim 0@data, 4,096 parts ┌───────┬────────┬─────────┬─────────┬───┬──────────┐
                           0:32 │   0   │   1    │    2    │    3    │ … │    15    │
                                ├───────┼────────┼─────────┼─────────┼───┼──────────┤
                          32:64 │  16   │   17   │   18    │   19    │ … │    31    │
                                ├───────┼────────┼─────────┼─────────┼───┼──────────┤
                          64:96 │  32   │   33   │   34    │   35    │ … │    47    │
                                ├───────┼────────┼─────────┼─────────┼───┼──────────┤
                         96:128 │  48   │   49   │   50    │   51    │ … │    63    │
                                ├───────┼────────┼─────────┼─────────┼───┼──────────┤
                              … │   …   │   …    │    …    │    …    │ … │    …     │
                                ├───────┼────────┼─────────┼─────────┼───┼──────────┤
                  131040:131072 │ 65520 │ 65521  │  65522  │  65523  │ … │  65535   │
                                └───────┴────────┴─────────┴─────────┴───┴──────────┘
        """
    )


@pytest.mark.parametrize(
    ("spec", "cell"),
    [
        (P(), "0-65535"),
        (P("data"), "0-15"),
        (P("model"), "0,16,…,65520"),
        (P(unreduced=("data", "model")), "Σ 0+1+…+65535"),
        (P(unreduced="data"), "Σ 0+16+…+65520, 1+17+…+65521, …, 15+31+…+65535"),
        (P.flat("data", "model"), "0"),
    ],
)
def test_picture_elides_many_devices_of_a_cell(spec, cell):
    mesh = fs.make_mesh({"data": 4096, "model": 16}, runtime="abstract")
    text = str(picture((8192, 4), layout=fs.Layout(mesh, spec)))
    assert f" {cell} " in text
    assert len(text) < 2000


@pytest.mark.parametrize("runtime", ["abstract", "virtual"])
def test_picture_is_equal_on_all_runtimes(runtime):
    mesh = fs.make_mesh({"data": 2, "model": 2}, runtime=runtime)
    x = fs.device_put(torch.ones(4, 4), fs.Layout(mesh, P("model")))
    alone = fs.Sharded(x.shape, x.layout, x.shards[:1])  # as on a process mesh
    processes = fs.Layout(Mesh(mesh.axes, "process", "cpu"), P("model"))
    texts = [
        str(one).split("\n", 1)[1]
        for one in (picture(x), picture(alone), picture((4, 4), layout=processes))
    ]
    assert texts[0] == texts[1] == texts[2]


# Showing.


def test_visualize_in_a_terminal_has_colours(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert visualize((4,), layout=fs.Layout(fs.make_mesh({"data": 2}), P("data"))) is None
    assert "\x1b[38;2;22;25;29;48;2;124;183;232m" in out.getvalue()


def test_visualize_prints_on_the_first_device_only(capsys):
    def main():
        visualize(fs.device_put(torch.ones(4), fs.Layout(fs.make_mesh({"data": 4}), P("data"))))

    mesh = fs.make_mesh({"data": 4})
    fs.run(main, mesh=mesh)
    assert capsys.readouterr().out.count("f32[4@data]") == 1
    fs.shard_map(lambda x: visualize([x]) or x, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(
        torch.ones(4)
    )
    assert capsys.readouterr().out.count("f32[1]") == 1


def test_visualize_shows_schedules_timelines_and_tables(capsys):
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=3)
    for value in (schedule, schedule.simulate(send=1), fs.plan.cluster("h100")):
        visualize(value)
        assert capsys.readouterr().out.rstrip() == str(value)


def test_visualize_in_a_notebook_displays_once(monkeypatch, capsys):
    shown = []
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=shown.append))
    assert visualize((4,), layout=fs.Layout(fs.make_mesh({"data": 2}), P("data"))) is None
    assert len(shown) == 1 and "<svg" in shown[0]._repr_html_()
    assert capsys.readouterr().out == ""


def test_picture_layout_argument_replaces_that_of_the_array():
    mesh = fs.make_mesh({"data": 2})
    x = fs.device_put(torch.ones(4), fs.Layout(mesh, P("data")))
    assert str(picture(x, layout=fs.Layout(mesh, P()))).startswith("f32[4] on")
    assert str(picture(torch.ones(4).bfloat16(), layout=x.layout)).startswith("bf16[4@data] on")
    assert str(picture([4, 2], layout=x.layout, dtype=torch.int8)).startswith("i8[4@data, 2] on")


def test_svg_marks_unreduced_and_host_memory():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    marked = picture((4,), layout=fs.Layout(mesh, P(unreduced="model"), "host")).svg
    assert "url(#fshard-sum)" in marked and "stroke-dasharray" in marked
    plain = picture((4,), layout=fs.Layout(mesh, P(("data", "model")))).svg
    assert "url(#fshard-sum)" not in plain and "stroke-dasharray" not in plain
    assert "[1:2] on 1" in plain


# Trees.


def blocks(mesh, count):
    cut = fs.Layout(mesh, P("data"))
    total = fs.Layout(mesh, P())
    block = {"w": fs.device_put(torch.ones(8, 6), cut), "b": fs.device_put(torch.ones(6), total)}
    return {
        "blocks": [dict(block) for _ in range(count)],
        "head": fs.device_put(torch.ones(8), fs.Layout(mesh, P.flat("data"), "host")),
    }


class State(NamedTuple):
    step: int
    moments: tuple


def test_tree_as_text():
    params = blocks(fs.make_mesh({"data": 4}), 12)
    tree = State(3, ({"params": params, "mask": torch.ones(3), "none": None},))
    assert str(picture(tree)).split("\n") == lines(
        """
        State, in all 2.6 KiB, 864 B per device, 8 B per device in host memory, 12 B on no mesh · Mesh(data=4; virtual, cpu)
        ├── step  3
        └── moments  tuple  2.6 KiB, 864 B per device, 8 B per device in host memory, 12 B on no mesh
            └── [0]  dict  2.6 KiB, 864 B per device, 8 B per device in host memory, 12 B on no mesh
                ├── mask  f32[3]  12 B, on no mesh
                ├── none  None
                └── params  dict  2.6 KiB, 864 B per device, 8 B per device in host memory
                    ├── blocks  list  2.5 KiB, 864 B per device
                    │   └── [0..11] 12 x  dict  216 B, 72 B per device
                    │       ├── b  f32[6]  24 B, 24 B per device
                    │       └── w  f32[8@data, 6]  192 B, 48 B per device
                    └── head  f32[8]{flat:data, host}  32 B, 8 B per device in host memory
        """
    )


def test_tree_folds_equal_neighbours_of_lists_only():
    a = torch.ones(2)
    b = torch.ones(3)
    assert [(entry.name, entry.count) for entry in take_stock([a, a, b, a]).entries] == [
        ("[0..1]", 2),
        ("[2]", 1),
        ("[3]", 1),
    ]
    assert [entry.name for entry in take_stock({"x": a, "y": a}).entries] == ["x", "y"]


def test_tree_as_html_has_pictures_of_leaves():
    html = picture(blocks(fs.make_mesh({"data": 4}), 3))._repr_html_()
    assert html.count("<svg") == 3  # of the folded block's two leaves, and of the head
    assert "[0..2] 3 x" in html and "f32[8@data, 6]" in html
    ElementTree.fromstring(html.replace("<details open", "<details"))


@pytest.mark.parametrize(("x", "layout"), [({"a": torch.ones(2)}, "mesh"), ((4,), "spec")])
def test_picture_layout_of_a_tree_or_no_layout_raises(x, layout):
    mesh = fs.make_mesh({"data": 2})
    with pytest.raises(
        TypeError, match="layout must (be a Layout of a tensor or a shape|have a mesh)"
    ):
        picture(x, layout=fs.Layout(mesh, P()) if layout == "mesh" else P())


def shown_on_some_devices():
    mesh = fs.make_mesh({"model": 2}, devices=(3, 1))
    fs.visualize(fs.device_put(torch.zeros(4), fs.Layout(mesh, P("model"))))


def test_picture_of_some_devices_has_their_numbers_and_is_shown_once(capsys):
    mesh = fs.make_mesh({"model": 2}, devices=(3, 1))
    summands = str(picture((4,), layout=fs.Layout(mesh, P(unreduced="model"))))
    assert "Σ 3+1" in summands

    fs.run(shown_on_some_devices, mesh=fs.make_mesh({"device": 4}))
    shown = capsys.readouterr().out
    assert shown.count("model=2 on 3, 1") == 1
    assert "│  3  │  1  │" in shown
