"""The pictures of schedules: in text, in colours, as SVG."""

from fractions import Fraction
from xml.etree import ElementTree

from fshard.pipeline.schedule.actions import Action
from fshard.pipeline.schedule.builders import pipeline_schedule
from fshard.pipeline.schedule.communication import with_messages, with_units
from fshard.pipeline.schedule.simulate import simulate
from fshard.pipeline.schedule.trace import Event, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def titles(svg):
    return [title.text for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]


def boxes(svg):
    """Return the title of each box with its edges."""
    groups = [
        (g.find(f"{SVG}title"), g.find(f"{SVG}rect"))
        for g in ElementTree.fromstring(svg).iter(f"{SVG}g")
    ]
    return {
        title.text: {key: float(box.get(key)) for key in ("x", "y", "width", "height")}
        for title, box in groups
    }


def test_schedule_prints_as_a_timeline():
    schedule = pipeline_schedule("1f1b", stages=3, microbatches=4)
    assert (
        f"{schedule}\n"
        == """\
1f1b: 4 microbatches, 3 stages on 3 devices
device 0 │ F0 F1 F2 ·  ·  ·  ·  B0─── F3 B1─── ·  B2─── ·  B3───
device 1 │ ·  F0 F1 ·  ·  B0─── F2 B1─── F3 B2─── ·  B3─── ·  ·
device 2 │ ·  ·  F0 B0─── F1 B1─── F2 B2─── F3 B3─── ·  ·  ·  ·
time 18, bubble 1/3, at most 3 activations on a device
"""
    )
    assert str(with_units(with_messages(schedule))) == str(schedule)


def test_timeline_in_a_notebook_is_one_short_line():
    events = [Event(device, Action.parse("0F1"), 2.0 + device, 3.5 + device) for device in (0, 1)]

    assert repr(Timeline(events * 500)) == "Timeline(events=1000, devices=2, seconds=2.5)"
    assert repr(Timeline()) == "Timeline(no events)"


def test_simulation_is_drawn_to_scale_of_shortest_action():
    actual = simulate(
        pipeline_schedule("gpipe", stages=2, microbatches=2), forward=[Fraction(1, 2), 1], send=1
    )
    assert str(actual) == (
        """gpipe: 2 microbatches, 2 stages on 2 devices
device 0 │ F0 F1 ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  B0───────── B1─────────
device 1 │ ·  ·  ·  F0─── F1─── B0───────── B1───────── ·  ·  ·  ·  ·  ·
time 21/2, bubble 10/21, at most 2 activations on a device"""
    )


def test_long_schedule_is_truncated():
    schedule = pipeline_schedule("1f1b", stages=2, microbatches=900)
    lines = str(schedule).splitlines()
    assert (
        lines[1].endswith("…")
        and len(lines[1]) < 256 * 6
        and lines[-1].startswith("time 2703, bubble 1/901")
    )
    svg = simulate(schedule).to_svg()
    assert 300 < len(titles(svg)) < 400 and len(svg) < 100_000 and "; drawn up to 256<" in svg


def test_svg_has_a_box_per_action_at_its_time():
    actual = simulate(pipeline_schedule("zbv", stages=4, microbatches=3), send=1)
    drawn = boxes(actual.to_svg())
    events = [event for row in actual.events for event in row]
    assert len(drawn) == len(events)
    words = {"F": "forward", "I": "input gradient", "W": "weight gradient"}
    first = drawn["0F0: forward, 0 to 1, device 0"]
    for event in events:
        word = words[event.action.kind]
        when = f"{event.start} to {event.end}"
        box = drawn[f"{event.action}: {word}, {when}, device {event.device}"]
        left = (box["x"] - first["x"]) / (first["width"] + 1)
        assert abs(left - float(event.start)) < 1e-3 and (box["y"] == first["y"]) == (
            event.device == 0
        )


def test_svg_draws_communication_below_computation():
    schedule = with_units(with_messages(pipeline_schedule("1f1b", stages=2, microbatches=2)))
    actual = simulate(schedule, send=1, gather=2, reduce=1)
    svg = actual.to_svg()
    high = {title.split(":")[0]: box["height"] for title, box in boxes(svg).items()}
    assert high["0F0"] > 20 and high["0UNSHARD"] == high["1RECV_F0"] == high["1REDUCE_GRAD"] == 5
    assert len(high) == sum(len(row) for row in actual.events) - 2  # freeing takes no time
    assert all(
        word in svg for word in (">forward<", ">backward<", ">message<", ">unshard<", ">reduce<")
    )
    assert ">unshard<" not in simulate(schedule).to_svg()
