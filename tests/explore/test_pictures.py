"""Pictures in browsers: they have a size, nothing overflows, and every word is legible."""

import json
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P
from fshard.explore.palette import _FILLS, INK, MUTED
from fshard.explore.picture import picture

ROOT = Path(__file__).parents[2]
NOTEBOOKS = {
    "01_meshes_and_layouts": 10,
    "02_zero_is_a_table": 4,
    "03_pipelines": 6,
    "05_tensor_parallelism": 10,
}
"""Notebooks with pictures, and how many at least."""
SVG = "{http://www.w3.org/2000/svg}"
LETTER = 7.3


def svgs(html):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def extents(element, x=0.0, y=0.0):
    """Yield the left, top, right and bottom of each box and text."""
    if element.tag in (f"{SVG}defs", f"{SVG}title", f"{SVG}style"):
        return
    if move := re.match(r"translate\((\S+) (\S+)\)", element.get("transform", "")):
        x = x + float(move[1])
        y = y + float(move[2])
    left = x + float(element.get("x", 0))
    top = y + float(element.get("y", 0))
    if element.tag == f"{SVG}rect":
        yield left, top, left + float(element.get("width")), top + float(element.get("height"))
    if element.tag == f"{SVG}text":
        width = LETTER * len(element.text)
        left -= {"start": 0, "middle": 0.5, "end": 1}[element.get("text-anchor", "start")] * width
        yield left, top - 10, left + width, top + 3
    for child in element:
        yield from extents(child, x, y)


def check_svg(svg):
    """Check that a picture is sized, shrinks to its column, and that nothing leaves its box."""
    left, top, width, height = map(float, svg.get("viewBox").split())
    assert (float(svg.get("width")), float(svg.get("height"))) == (width, height)
    assert (
        20 < width < 4000
        and 20 < height < 4000
        and svg.get("style") == "max-width:100%;height:auto"
    )
    for a, b, c, d in extents(svg):
        assert left - 1 <= a <= c <= left + width + 1 and top - 1 <= b <= d <= top + height + 1


@pytest.mark.parametrize(("name", "least"), NOTEBOOKS.items())
def test_stored_notebook_pictures_are_sized_without_overflow(name, least):
    cells = json.loads((ROOT / f"notebooks/{name}.ipynb").read_text(encoding="utf-8"))["cells"]

    pictures = []
    for cell in cells:
        for output in cell.get("outputs", []):
            html = output.get("data", {}).get("text/html", "")
            pictures += svgs("".join(html))

    assert len(pictures) >= least
    for svg in pictures:
        check_svg(svg)


def wide(spec, **axes):
    return picture((256, 4096), layout=fs.Layout(fs.make_mesh(axes, runtime="abstract"), spec))


@pytest.mark.parametrize(
    "shown",
    [
        picture(fs.make_mesh({"a": 4096, "b": 16}, runtime="abstract")),
        wide(P("a", "b"), a=64, b=64),
        wide(P.flat("a", at={"b": 1}), a=8, b=2),
        wide(P(unreduced=("a", "b")), a=2, b=64),
        fs.pipeline_schedule("zbv", stages=8, microbatches=16),
        fs.pipeline_schedule("1f1b", stages=4, microbatches=100).simulate(send=1),
    ],
    ids=["mesh", "grid", "flat", "unreduced", "schedule", "timeline"],
)
def test_html_of_wide_pictures_scales_to_its_column(shown):
    (svg,) = svgs(shown._repr_html_())
    check_svg(svg)


def test_columns_that_are_far_too_wide_for_a_notebook_continue_below():
    mesh = fs.make_mesh({"data": 16}, runtime="abstract")
    drawn = picture((8192, 28672), layout=fs.Layout(mesh, P(None, "data")))

    (svg,) = svgs(drawn._repr_html_())

    check_svg(svg)
    assert float(svg.get("width")) < 800
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert [text for text in texts if text.isdigit()] == [str(device) for device in range(16)]
    assert texts.count("0:8192") == 3  # the row is named on each line


def test_flat_picture_at_a_coordinate_has_ordinary_width():
    (svg,) = svgs(wide(P.flat("data", at={"pipe": 1}), data=2, pipe=2).svg)
    assert float(svg.get("width")) < 800


def test_picture_in_the_docs_is_that_of_the_code():
    mesh = fs.make_mesh({"data": 4, "model": 2})
    drawn = picture((8, 6), layout=fs.Layout(mesh, P("data", "model"))).svg
    assert (ROOT / "docs/images/layout.svg").read_text(encoding="utf-8") == drawn + "\n"


# -- colours ---------------------------------------------------------------------------------------


def channels(colour):
    """Return red, green and blue of `#rrggbb`, from 0 to 255."""
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def linear(channel):
    """Return the light of a channel of sRGB, from 0 to 1."""
    value = channel / 255
    if value <= 0.04045:
        return value / 12.92
    return ((value + 0.055) / 1.055) ** 2.4


def luminance(colour):
    red, green, blue = map(linear, channels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def mixed(front, back, opacity):
    """Return the colour of a translucent front on a back."""
    colour = "#"
    for upper, lower in zip(channels(front), channels(back), strict=True):
        colour += f"{round(opacity * upper + (1 - opacity) * lower):02x}"
    return colour


@pytest.mark.parametrize(
    ("page", "text"), [("#ffffff", "#000000"), ("#111111", "#ffffff")], ids=["light", "dark"]
)
def test_words_have_contrast_on_light_and_dark_pages(page, text):
    """Jupyter's text has an opacity of 0.87, of which words beside the cells have three quarters."""
    assert contrast(mixed(text, page, 0.87 * MUTED), page) > 4.5
    assert min(contrast(INK, fill) for fill in _FILLS) > 4.5


def test_words_outside_of_cells_have_the_colour_of_the_page():
    schedule = fs.pipeline_schedule("zbv", stages=8, microbatches=4)
    for shown, (svg,) in ((x, svgs(x._repr_html_())) for x in (wide(P("a"), a=2), schedule)):
        colours = {element.get("fill") for element in svg.iter(f"{SVG}text")}
        assert colours == {"currentColor", INK}, shown
        assert not any(
            element.get("fill-opacity") for element in svg.iter(f"{SVG}rect")
        )  # a dark page shone through


# -- what is shown ---------------------------------------------------------------------------------


def test_hover_of_a_cell_has_devices_and_coordinates():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    (svg,) = svgs(picture((4, 6), layout=fs.Layout(mesh, P("model"))).svg)
    titles = [title.text for title in svg.iter(f"{SVG}title")]
    assert titles == ["[0:2, 0:6] on 0,2 (data=*, model=0)", "[2:4, 0:6] on 1,3 (data=*, model=1)"]


def test_mesh_picture_has_devices_at_their_coordinates():
    lines = str(picture(fs.make_mesh({"data": 2, "model": 3}))).split("\n")
    assert lines[:2] == ["Mesh(data=2, model=3; virtual, cpu)", "6 devices"]
    assert lines[6] == "   0 │ 0 │ 1 │ 2 │" and lines[8] == "   1 │ 3 │ 4 │ 5 │"


def test_bare_arrays_meshes_and_layouts_are_pictures_in_notebooks():
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactive.InteractiveShell()
    mesh = fs.make_mesh({"data": 2})
    layout = fs.Layout(mesh, P("data"))
    for x in (mesh, layout, fs.device_put(torch.ones(4), layout)):
        shown, _ = shell.display_formatter.format(x)
        assert "<svg" in shown["text/html"] and shown["text/plain"] == repr(x)


def test_html_of_values_is_their_picture_without_ipython():
    mesh = fs.make_mesh({"data": 2, "model": 2})
    layout = fs.Layout(mesh, P("data", unreduced="model"), unit="<b>")
    x = fs.device_put(torch.ones(4), fs.Layout(mesh, P("data")))
    assert x._repr_html_() == picture(x)._repr_html_()
    assert mesh._repr_html_() == picture(mesh)._repr_html_()
    assert escape(repr(layout)) in layout._repr_html_()
    assert "<b>" not in layout._repr_html_()


def test_pictures_escape_names_of_users():
    name = '<script>alert("x")</script>'
    graph = fs.comm.from_matrix([[0.5, 0.5], [0.5, 0.5]], name=name)
    layout = fs.Layout(fs.make_mesh({"data": 2}), P("data"))
    tree = {name: fs.device_put(torch.ones(4), layout), "other": name}
    schedule = fs.pipeline_schedule("1f1b", stages=2, microbatches=2)
    schedule = replace(schedule, name=name)
    for text in (
        graph._repr_svg_(),
        picture(tree)._repr_html_(),
        schedule._repr_html_(),
    ):
        assert "<script" not in text
        assert "&lt;script" in text


def test_tree_of_stages_totals_the_fullest_device():
    mesh = fs.make_mesh({"pipe": 2, "data": 2})

    def at(stage, shape):
        return fs.device_put(torch.ones(shape), fs.Layout(mesh, P("data", at={"pipe": stage})))

    tree = {
        "a": at(0, 8),
        "b": at(0, 4),
        "c": at(1, 10),
        "d": fs.device_put(torch.ones(2), fs.Layout(mesh, P())),
    }
    assert str(picture(tree)).startswith(
        "dict, in all 96 B, 32 B per device"
    )  # 8 and 4 of 2 devices, and 2


def test_shard_stages_tree_totals_the_fullest_device():
    mesh = fs.make_mesh({"pipe": 2, "data": 2})
    params = [{"w": torch.ones(16)}, {"w": torch.ones(8)}]
    schedule = fs.pipeline_schedule("gpipe", stages=2, microbatches=2)
    tree = fs.shard_stages(params, fs.fsdp("data"), mesh=mesh, schedule=schedule)
    assert "in all 96 B, 32 B per device" in str(picture(tree))


def test_tree_of_dotted_names_folds_into_blocks():
    blocks = nn.ModuleDict(
        {"blocks": nn.ModuleList(nn.Linear(2, 2) for _ in range(12)), "head": nn.Linear(2, 1)}
    )
    mesh = fs.make_mesh({"data": 2})
    params = fs.shard_params(dict(blocks.named_parameters()), fs.fsdp("data"), mesh=mesh)
    names = [
        line.strip("│├└─ \u00a0").split("  ")[0] for line in str(picture(params)).split("\n")[1:]
    ]
    assert names == ["blocks", "[0..11] 12 x", "bias", "weight", "head", "bias", "weight"]


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a")])
def test_tree_with_a_name_that_begins_another_stays_flat(names):
    entries = str(picture(dict.fromkeys(names, torch.ones(2)))).split("\n")[1:]
    assert [entry.split()[1] for entry in entries] == sorted(names)
