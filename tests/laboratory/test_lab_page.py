"""The page of the lab in chromium: the oracle is what the engine answers to the state of the link."""

import json
import threading
from urllib.parse import parse_qs, urlsplit

import pytest

from fshard.laboratory.engine import Engine
from fshard.laboratory.page import widget_module
from fshard.laboratory.server import LabServer
from fshard.laboratory.state import LabState
from fshard.laboratory.subject import Subject
from fshard.parallelism.value import Parallelism
from fshard.plan.models import Transformer
from tests.laboratory.chromium import CHROMIUM, Tab

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

SIZES = {"layers": 2, "hidden": 16, "ffn": 32, "heads": 4, "kv_heads": 4, "vocab": 32}
MODEL = Transformer(**SIZES, sequence=8, gated=False)
STATE = LabState(model=MODEL, devices=4, plan=Parallelism(zero_stage=3))

ANSWERED = "document.getElementById('page').dataset.state === 'answered'"


def by_id(name):
    return f"document.getElementById('{name}')"


def row(pattern):
    return f"document.querySelector('#layouts [data-pattern=\"{pattern}\"]')"


def chip(pattern, axis):
    return f"{row(pattern)}.querySelector('[data-axis={axis}]')"


def dim(pattern, number):
    return f"{row(pattern)}.querySelector('[data-dim=\"{number}\"]')"


def choice(field, number):
    """The label of a choice that is beside others."""
    name = field.replace(".", "-")
    identifier = f"control-{name}-{number}" if number else f"control-{name}"
    return f"document.querySelector('#{identifier} + label')"


@pytest.fixture(scope="module")
def server():
    with LabServer(Engine(Subject(), STATE)) as server:
        server.engine.send = None  # no proofs: they would take the cores of the tests
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    tab = Tab(tmp_path_factory.mktemp("chromium"))
    yield tab
    tab.close()


@pytest.fixture
def tab(server, browser):
    """A page that has just been loaded; after a test its console has no errors."""
    browser.errors.clear()
    load(browser, server.address)
    yield browser
    assert browser.errors == []


def load(tab, address):
    tab.open(address)
    tab.wait(f"{by_id('answer')}.hidden === false && {ANSWERED}")


def settle(tab):
    tab.wait(ANSWERED)


def state_in_link(tab, slot="A"):
    parts = parse_qs(urlsplit(tab.get("location.href")).fragment)
    return LabState.from_json(parts[slot][0]) if slot in parts else None


def text_of(tab, name):
    return tab.get(f"{by_id(name)}.textContent")


# -- controls --------------------------------------------------------------------------------------


def test_control_that_is_changed_shows_the_answer_of_its_state(tab, server):
    tab.click(choice("plan.zero_stage", 1))
    settle(tab)

    state = state_in_link(tab)
    assert state.parallelism == Parallelism(data=4, zero_stage=1)
    answer = server.engine.reply({"id": 10**6, "slot": "oracle", "state": state.to_json()})
    assert text_of(tab, "code") == answer["code"]
    (plan,) = answer["document"]["plans"]
    assert f"{plan['numbers']['peak'] / 1000:.1f} kB" in text_of(tab, "numbers")
    assert all(leaf["path"] in text_of(tab, "leaves") for leaf in plan["leaves"])
    assert text_of(tab, "words").startswith("the last change: the step ")


def test_number_is_stepped_by_keys_and_keeps_the_focus(tab):
    tab.get(f"{by_id('control-plan-rows')}.focus()")
    tab.press("ArrowUp")
    settle(tab)
    assert state_in_link(tab).parallelism.rows == 2
    assert tab.get("document.activeElement.id") == "control-plan-rows"


def test_contradiction_stands_beside_its_control_and_the_answer_stays(tab):
    code = text_of(tab, "code")
    tab.click(choice("plan.pipeline", 2))  # 4 stages of 2 layers
    settle(tab)

    plan = Parallelism(pipeline=4, zero_stage=3)
    reason = plan.misfit(devices=4, layers=2)
    beside = "document.querySelector('[data-of=\"plan.pipeline\"] .error').textContent"
    assert reason in tab.get(beside)
    assert tab.get(f"{by_id('answer')}.classList.contains('stale')")
    assert text_of(tab, "code") == code and text_of(tab, "status") == "not possible"

    tab.click(choice("plan.pipeline", 0))
    settle(tab)
    assert not tab.get(f"{by_id('answer')}.classList.contains('stale')")
    assert tab.get(beside) == ""


# -- waiting ---------------------------------------------------------------------------------------


@pytest.fixture
def gate(server, monkeypatch):
    """An event that the engine waits for before each answer."""
    opened = threading.Event()
    reply = server.engine.reply

    def reply_late(message):
        opened.wait(60)
        return reply(message)

    monkeypatch.setattr(server.engine, "reply", reply_late)
    yield opened
    opened.set()


def test_page_without_an_answer_shows_that_it_computes(server, browser, gate):
    browser.errors.clear()
    browser.open(server.address)
    assert browser.get(f"{by_id('first')}.offsetHeight") > 0
    assert text_of(browser, "first") == "computing the first answer …"

    gate.set()
    browser.wait(f"{by_id('answer')}.hidden === false && {ANSWERED}")
    assert browser.get(f"{by_id('first')}.offsetHeight") == 0
    assert browser.errors == []


def test_answer_is_grey_while_a_slow_change_is_computed(tab, gate):
    is_grey = f"{by_id('answer')}.classList.contains('stale')"
    tab.click(choice("plan.zero_stage", 1))
    tab.wait(is_grey)
    assert text_of(tab, "status") == "computing …"

    gate.set()
    settle(tab)
    assert not tab.get(is_grey)
    assert text_of(tab, "status") != "computing …"


# -- dragging --------------------------------------------------------------------------------------

QUERY = "layers.*.q.weight"


def test_axis_that_is_dragged_by_the_mouse_is_an_override(tab, server):
    tab.drag(chip(QUERY, "data"), dim(QUERY, 1))
    settle(tab)

    state = state_in_link(tab)
    assert {pattern: dict(dims) for pattern, dims in state.overrides.items()} == {
        QUERY: {"data": 1}
    }
    leaves = server.engine.answer(state).layouts()["leaves"]
    shown = tab.get(f"{row(QUERY)}.querySelector('span').title").partition("\n")[0]
    assert shown == next(leaf["type"] for leaf in leaves if leaf["pattern"] == QUERY)
    assert tab.get(f"{dim(QUERY, 1)}.contains({chip(QUERY, 'data')})")

    tab.click(f"{row(QUERY)}.querySelector('.reset')")
    settle(tab)
    assert not state_in_link(tab).overrides
    assert tab.get(f"{dim(QUERY, 'flat')}.contains({chip(QUERY, 'data')})")


def test_axis_that_is_moved_by_keys_is_an_override(tab):
    tab.get(f"{chip(QUERY, 'data')}.focus()")
    tab.press("Enter")
    assert "is picked up" in text_of(tab, "spoken")
    tab.press("ArrowLeft")
    tab.press("ArrowLeft")
    assert text_of(tab, "spoken") == "dim 0 of 16"
    tab.press("Enter")
    settle(tab)
    assert dict(state_in_link(tab).overrides[QUERY]) == {"data": 0}
    assert tab.get(f"document.activeElement === {chip(QUERY, 'data')}")


@pytest.mark.parametrize("ending", ["Escape", "Tab"])
def test_axis_that_is_not_dropped_stays(ending, tab):
    tab.get(f"{chip('norm.weight', 'data')}.focus()")
    for key in ("Enter", "ArrowLeft", ending):
        tab.press(key)
    assert not state_in_link(tab).overrides
    assert tab.get(f"{dim('norm.weight', 'flat')}.contains({chip('norm.weight', 'data')})")


def test_leaf_that_is_chosen_shows_its_shards(tab, server):
    tab.click(f"{row('head.weight')}.querySelector('td')")
    tab.wait(f"{by_id('shards')}.textContent.includes('head.weight')")
    svg = server.engine.answer(STATE).shards("head.weight")["svg"]
    expected = tab.get(
        f"new DOMParser().parseFromString({json.dumps(svg)}, 'text/html').body.textContent"
    )
    assert expected in text_of(tab, "shards")
    assert "4 shards along data" in text_of(tab, "mesh-legend")


# -- undo, link, two layouts -----------------------------------------------------------------------


def test_undo_and_redo_restore_states(tab):
    for number in (1, 2):
        tab.click(choice("plan.zero_stage", number))
        settle(tab)
    stages = []
    for shift in (False, False, True):
        tab.press("z", control=True, shift=shift)
        settle(tab)
        stages.append(state_in_link(tab).parallelism.zero_stage)
    assert stages == [1, 3, 1]
    assert tab.get(f"{by_id('control-plan-zero_stage-1')}.checked")
    assert tab.get(f"[{by_id('undo')}.disabled, {by_id('redo')}.disabled]") == [False, False]


def test_link_restores_both_layouts(tab):
    tab.click(by_id("compare"))
    settle(tab)
    tab.click(choice("plan.zero_stage", 2))
    settle(tab)
    states = state_in_link(tab, "A"), state_in_link(tab, "B")
    assert [state.parallelism.zero_stage for state in states] == [3, 2]
    address = tab.get("location.href")

    load(tab, address)
    tab.wait(f"{by_id('plans')}.children.length === 2 && {ANSWERED}")
    assert (state_in_link(tab, "A"), state_in_link(tab, "B")) == states
    assert tab.get(f"{by_id('control-plan-zero_stage-2')}.checked")  # B was active


def test_two_layouts_are_compared_in_words(tab):
    tab.click(by_id("compare"))
    settle(tab)
    assert text_of(tab, "words") == "B against A: the step = · peak memory = · sent ="
    tab.click(choice("plan.zero_stage", 0))
    settle(tab)
    assert "peak memory +" in text_of(tab, "words") and text_of(tab, "why-title") == "Differences"
    assert "memory: parameters" in tab.get(f"{by_id('why-panel')}.innerText")
    tab.click("document.querySelector('#plans [data-plan=\"0\"]')")
    assert tab.get(f"{by_id('control-plan-zero_stage-3')}.checked")
    tab.click(by_id("compare"))
    assert state_in_link(tab, "B") is None and text_of(tab, "compare") == "Compare"


def test_fields_that_differ_are_named(tab):
    tab.click(by_id("compare"))
    settle(tab)
    assert text_of(tab, "differences").startswith("B: a copy of A")
    assert text_of(tab, "status") == ""  # the answer of A was kept

    tab.click(choice("plan.zero_stage", 1))
    settle(tab)
    tab.click(choice("plan.tensor", 1))
    settle(tab)
    assert text_of(tab, "differences") == "B: tensor 2 instead of 1, ZeRO 1 instead of 3"

    for _ in range(2):
        tab.press("z", control=True)
        settle(tab)
    tab.drag(chip(QUERY, "data"), dim(QUERY, 1))
    settle(tab)
    expected = f"B: data of {QUERY} on dim 1 instead of as by the rules"
    assert text_of(tab, "differences") == expected
    tab.click(by_id("compare"))
    assert text_of(tab, "differences") == ""


def test_axis_that_cannot_be_dragged_says_why(tab):
    tab.click(choice("plan.tensor", 1))
    settle(tab)
    chips = f"[...{by_id('layouts')}.querySelectorAll('.chip.fixed')].map((x) => x.title)"
    assert all(tab.get(chips))
    title = tab.get(f"{row(QUERY)}.querySelector('.chip.fixed').title")
    assert title == "beside axes of layers, tokens or experts ZeRO shards flattened leaves only"


# -- look ------------------------------------------------------------------------------------------


def test_no_width_scrolls_sideways(tab):
    for width in (800, 1000, 1280, 1600):
        tab.resize(width)
        tab.wait(f"{by_id('mesh')}.clientWidth > 0")
        assert tab.get("document.documentElement.scrollWidth") == width
    tab.resize(1280)


def test_numbers_and_shards_fit_their_panels(tab):
    tab.click(by_id("compare"))
    settle(tab)
    boxes = "[...document.querySelectorAll('#numbers div, #shards')]"
    for width in (800, 1000, 1280, 1600):
        tab.resize(width)
        tab.wait(f"{by_id('mesh')}.clientWidth > 0")
        assert tab.get(f"{boxes}.filter((x) => x.scrollWidth > x.clientWidth).length") == 0
        lines = (
            "[...document.querySelectorAll('#numbers em')].map((x) => x.getClientRects().length)"
        )
        assert set(tab.get(lines)) == {1}
    tab.resize(1280)


def test_drawing_of_8_by_8_shards_has_legible_letters(tab):
    """It is 744 pixels wide with letters of 12 pixels; a narrower panel shrinks it."""
    for width in (900, 1000, 1280, 1440, 1600):
        tab.resize(width)
        tab.wait(f"{by_id('mesh')}.clientWidth > 0")
        assert 12 * tab.get(f"{by_id('shards')}.clientWidth") / 744 >= 7.9
    tab.resize(1280)


def test_answer_moves_no_panel(tab):
    tops = (
        "[...document.querySelectorAll('#answer .panel')].map((x) => x.getBoundingClientRect().top)"
    )
    tab.get("scrollTo(0, 0)")
    before = tab.get(tops)
    for number in (1, 0):
        tab.get(f"{choice('plan.zero_stage', number)}.click()")
        settle(tab)
    tab.get("scrollTo(0, 0)")
    assert tab.get(tops) == before


def test_dark_theme_follows_the_system(tab):
    back = "getComputedStyle(document.body).backgroundColor"
    light = tab.get(back)
    tab.use_dark()
    tab.wait("document.documentElement.dataset.theme === 'dark'")
    dark = tab.get(back)
    tab.use_dark(False)
    tab.wait("document.documentElement.dataset.theme === 'light'")
    assert tab.get(back) == light != dark


def test_all_that_can_be_clicked_has_a_name_and_takes_the_focus(tab):
    """Except the signs of a number, whose keys are arrows."""
    elements = (
        "button:not([data-factor]), input, select, summary, tr[data-leaf], canvas[role], #time"
    )
    unreachable = tab.get(f"""[...document.querySelectorAll({json.dumps(elements)})]
        .filter((x) => x.tabIndex < 0 && !x.disabled).map((x) => x.outerHTML)""")
    unnamed = tab.get("""[...document.querySelectorAll("button, input, select")]
        .filter((x) => !(x.textContent.trim() || x.ariaLabel || x.labels?.length))
        .map((x) => x.outerHTML)""")
    assert (unreachable, unnamed) == ([], [])


def test_page_is_drawn_within_a_second_without_resources(tab):
    loaded = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    assert tab.get(loaded) < 1000
    assert int(tab.get(f"{by_id('page')}.dataset.drawn")) < 1000
    others = tab.get(
        "performance.getEntriesByType('resource').map((x) => new URL(x.name)).filter("
        "(x) => x.origin !== location.origin).length"
    )
    assert others == 0


# -- widget ----------------------------------------------------------------------------------------

# A model of anywidget whose messages are answered by the test.
MODEL_OF_WIDGET = """
globalThis.sent = [];
globalThis.model = {
  send: (message) => sent.push(message),
  on: (_, take) => { model.take = take; },
  off: () => { model.take = null; },
};
const url = URL.createObjectURL(new Blob([%s], { type: "text/javascript" }));
import(url).then(async ({ default: widget }) => {
  document.body.innerHTML = "<style>button { color: rgb(1, 2, 3); }</style><div id='cell'></div>";
  globalThis.end = await widget.render({ model, el: document.getElementById("cell") });
});
"""


def test_widget_is_the_same_page_in_a_shadow_root(browser):
    browser.errors.clear()
    browser.open("about:blank")
    browser.get(MODEL_OF_WIDGET % json.dumps(widget_module()))
    engine = Engine(Subject(), STATE)

    def reply():
        browser.wait("sent.length")
        message = browser.get("sent.shift()")
        browser.get(f"model.take({json.dumps(engine.reply(message))})")
        return message

    reply()
    root = "document.getElementById('cell').shadowRoot"
    assert browser.get(f"{root}.getElementById('code').textContent") == engine.code(STATE)
    browser.get("sent.length = 0")
    browser.get(f"{root}.getElementById('control-plan-zero_stage-1').click()")
    last = reply()
    assert "ZeRO-1" in browser.get(f"{root}.getElementById('code').textContent")

    # A proof is of an answer: one of an older state is not shown.
    text_of_proof = f"{root}.getElementById('proof').textContent"
    proof = {"slot": "A", "kind": "proof", "verdict": "differs", "text": "head.weight differs"}
    browser.get(f"model.take({json.dumps({**proof, 'id': last['id'] - 1})})")
    assert "comparing" in browser.get(text_of_proof)
    browser.get(f"model.take({json.dumps({**proof, 'id': last['id'], 'page': last['page']})})")
    assert "head.weight differs" in browser.get(text_of_proof)

    # Neither style is that of the other side, and the theme is JupyterLab's.
    colour = "getComputedStyle(%s).color"
    assert browser.get(colour % f"{root}.getElementById('link')") != "rgb(1, 2, 3)"
    browser.get("document.body.dataset.jpThemeLight = 'false'")
    browser.wait("document.getElementById('cell').dataset.theme === 'dark'")
    browser.get("end()")
    assert browser.get("model.take") is None and browser.errors == []
