"""The page of a plan: its numbers are those of the report, and what clicks in a browser show."""

import json
import re
import sys
from html import unescape
from types import SimpleNamespace

import pytest

import fshard as fs
from fshard.explore.page import bundled, document, page
from fshard.mesh.layout import flatten
from fshard.plan.trace import CollectiveStart, MessageSend
from tests.explore.browser import BROWSER, shown_by
from tests.explore.reports import staged, zero

LANE, START, END, SECONDS, NAME, BYTES, FLOPS, CALLS, ROW, UNIT = range(10)


REPORTS = {"stage 3": zero, "stage 1": lambda: zero(1), "stages": staged}


@pytest.mark.parametrize("limit", [3000, 0])
@pytest.mark.parametrize("name", REPORTS)
def test_numbers_are_those_of_the_report(name, limit, monkeypatch):
    """Beyond a limit thin events are merged."""
    monkeypatch.setattr(sys.modules["fshard.explore.page"], "EVENTS", limit)
    report = REPORTS[name]()
    (plan,) = document(report)["plans"]
    actual = [plan["numbers"][key] for key in ("seconds", "peak", "sent")]
    assert actual == [report.seconds, report.peak(), float(report.sent())]
    for shown, device in zip(plan["devices"], report.devices.values(), strict=True):
        operations = device.operations
        for lane in (0, shown["lanes"].index("compute")):  # units, and their operations
            sums = [
                sum(event[key] for event in shown["events"] if event[LANE] == lane)
                for key in range(CALLS + 1)
            ]
            assert sums[SECONDS] == pytest.approx(device.times.compute)
            assert (sums[FLOPS], sums[CALLS]) == (sum(x.flops for x in operations), len(operations))
        sent = sum(
            event.sent
            for event in device.events
            if isinstance(event, CollectiveStart | MessageSend)
        )
        assert sum(event[BYTES] for event in shown["events"] if event[ROW] >= 0) == pytest.approx(
            sent
        )
        assert max(sum(sample[1:]) for sample in shown["memory"]) == max(
            sum(x.memory) for x in operations
        )
        assert shown["peak"] == device.used.peak()


@pytest.mark.parametrize("name", REPORTS)
def test_shards_are_those_of_the_layouts(name):
    report = REPORTS[name]()
    mesh, (plan,) = report.mesh, document(report)["plans"]
    arrays = [x for tree in report.arguments for x in flatten(tree)[0] if isinstance(x, fs.Sharded)]
    for leaf, x in zip(
        [leaf for leaf in plan["leaves"] if leaf["layout"] >= 0], arrays, strict=True
    ):
        row = plan["layouts"][leaf["layout"]]
        local = [shape for count, shape in row["shapes"] for _ in range(count)]
        for device in range(mesh.size):
            point, shard = [*mesh.coordinates(device).values()], 0
            for axis in row["axes"]:
                shard = shard * mesh.axes[axis][1] + point[axis]
            has_any = all(point[axis] == index for axis, index in row["place"])
            expected = x.layout.local_shape(x.shape, device)
            assert local[shard] == expected if has_any else 0 in expected, (leaf["path"], device)


def test_units_are_used_after_their_all_gather():
    """Prefetched units are marked ahead of their use."""
    (plan,) = document(zero())["plans"]
    gather = next(
        number for number, row in enumerate(plan["rows"]) if row["collective"] == "all_gather"
    )
    units = [
        (event[LANE], event[ROW], plan["names"][event[UNIT]])
        for event in plan["devices"][0]["events"]
    ]
    assert [unit for lane, _, unit in units if lane == 0] == ["begin", "0", "1", "2", "update"]
    assert [unit for _, row, unit in units if row == gather] == ["0", "1", "2"]


def test_page_is_one_file_without_resources(tmp_path):
    text = page(zero(), tmp_path / "step.html", compare=staged()).read_text(encoding="utf-8")
    assert page(zero(), compare=staged()) == text
    assert not re.search(r"https?:|\bsrc=|<link|@import|url\(", text)


@pytest.mark.parametrize(
    ("package", "name"),
    [("explore", "window.js"), ("laboratory", "window.js"), ("laboratory", "widget.js")],
)
def test_bundled_module_has_each_import_once(package, name):
    text = bundled(f"fshard.{package}", name)
    assert not re.search(r"^import ", text, re.MULTILINE)
    names = re.findall(r"^(?:export )?(?:async )?(?:function|const|let) (\w+)", text, re.MULTILINE)
    assert {"chosen", "drawMesh"} < {*names} and len(names) == len({*names})


def test_visualize_shows_the_page_in_a_notebook(monkeypatch):
    shown = []
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    display = SimpleNamespace(display=lambda x, raw=False: shown.append(x))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    fs.visualize(zero())
    assert shown[0]["text/plain"] == str(zero())
    assert unescape(re.search(r'srcdoc="(.*?)"', shown[0]["text/html"], re.DOTALL)[1]) == page(
        zero()
    )


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_clicks_show_devices_leaves_and_rows(tmp_path):
    script = """
    click(get("mesh"), page.cells.x[5] + 3, page.cells.y[5] + 3); note("details");
    const leaf = chosen(page).leaves.findIndex(({ path }) => path === "params[1][0]");
    click(get("leaves").querySelector(`[data-leaf="${leaf}"]`)); note("mesh-legend"); note("details");
    click([...get("ledger").querySelectorAll("tr")].find((tr) => tr.textContent.startsWith("send"))); note("ledger-note");
    notes.push(location.hash);
    strike(get("ledger"), "Escape"); strike(get("time"), "+"); strike(get("mesh"), "ArrowLeft"); notes.push(location.hash);
    get("filter").value = "exp_avg_sq"; get("filter").dispatchEvent(new Event("input")); note("leaves-note");
    notes.push(ledgerCsv(chosen(page)), traceJson(page));
    click(document.querySelector("[data-plan='1']")); note("mesh-note");
    """
    rows = [row.collective for row, *_ in staged().comm.rows()]
    notes, _ = shown_by(page(staged(), compare=zero()), script, tmp_path)
    device, legend, leaf, ledger, chosen, moved, leaves, csv, trace, plan = notes
    assert "Device 5 pipe 1 · data 2" in device and "state" in device
    assert legend == "params[1][0]: 3 shards along data, each on 1 devicehas none"
    assert "[20], 80 B on device 5" in leaf and "gathered along data" in leaf and "updated" in leaf
    assert ledger.startswith("send along pipe: ") and ledger.endswith("from each device of 2")
    assert (chosen, moved) == (f"#device=5&row={rows.index('send')}", "#device=4&zoom=0.2-0.8")
    assert leaves.startswith("2 of ") and csv.count("\n") == 1 + len(rows)
    assert {event["ph"] for event in json.loads(trace)["traceEvents"]} == {"M", "X", "C"}
    assert plan == "8 devices · across: data 4 · down: model 2"


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_bar_that_ends_at_the_left_edge_is_drawn(tmp_path):
    """There is no room for its name, not even for an empty one."""
    script = """
    const event = chosen(page).devices[0].events.find((e) => e[LANE] && e[END] > e[START]);
    const length = (event[END] - event[START]) / page.longest * timeWidth(page) / 40;
    const start = event[END] / page.longest - 3 / timeWidth(page) * length;
    zoomTo(page, start, start + length); note("leaves-note");
    """
    (leaves,), _ = shown_by(page(staged()), script, tmp_path)
    assert "of" in leaves


FITTING_NUMBERS = """{
const tiles = [...get("numbers").children];
get("page").style.width = "%dpx";
const isCut = tiles.some((tile) => tile.scrollWidth > tile.clientWidth);
const lines = tiles.map((tile) => [...tile.querySelectorAll("em")].map((em) => em.getClientRects().length));
notes.push([isCut, Math.max(...lines.flat())]);
}"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
@pytest.mark.parametrize("is_pair", [False, True], ids=["one plan", "two plans"])
def test_numbers_fit_their_tiles_and_changes_do_not_wrap(is_pair, tmp_path):
    compare = zero(1) if is_pair else None
    widths = (800, 900, 1000, 1280)
    script = "".join([FITTING_NUMBERS % width for width in widths])

    notes, _ = shown_by(page(zero(), compare=compare), script, tmp_path)

    assert notes == ["false,1"] * len(widths)


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_16384_devices_are_drawn_within_a_second(tmp_path):
    (note,), milliseconds = shown_by(page(zero(devices=8192)), 'note("mesh-note")', tmp_path)
    assert note.startswith("16,384 devices") and milliseconds < 1000
