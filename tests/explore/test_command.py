"""`fshard explore`: the page says which plan it shows, of two what differs; wrong files are one line."""

import json
import re
from functools import cache

import pytest

import fshard as fs
from fshard import optim
from fshard.command import main
from fshard.errors import PlanError
from fshard.explore import DescribedPlan, describe, page
from fshard.explore.page import document
from fshard.torch_collectives import FORMAT, RecordedCall, Recording
from tests.explore.browser import BROWSER, shown_by
from tests.explore.reports import zero

SIZES = {"hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "vocab": 100, "sequence": 32}
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 100,
    "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
MODEL = fs.plan.Transformer(layers=2, **SIZES)
H100 = fs.plan.cluster("h100")


@cache
def plans():
    return fs.plan.search(
        MODEL,
        devices=4,
        cluster=H100,
        global_batch=8,
        optimizer=optim.adamw(0.1),
        pipeline=1,
        tensor=(1, 2),
        zero_stage=(1, 3),
        rows=(1, 2),
        recompute="never",
    )


@cache
def described(number=0):
    return describe(plans()[number], MODEL, plans=plans())


@cache
def with_tensor():
    return next(n for n, estimate in enumerate(plans()) if estimate.plan.tensor == 2)


@pytest.fixture
def saved(tmp_path, capsys):
    """Return the file of a plan of `fshard plan -o`."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = ["--devices", "2", "--gpu", "h100", "--global-batch", "4", "--tensor", "1"]
    out = tmp_path / "plan.toml"
    assert main(["plan", str(folder), *words, "--pipeline", "1", "-o", str(out)]) == 0
    capsys.readouterr()
    return out


# -- which plan it is ------------------------------------------------------------------------------


def test_page_says_which_plan_it_shows():
    plan = plans()[0].plan
    (shown,) = document(described())["plans"]
    facts = shown["facts"]
    parameters = sum(x.numel() for x in MODEL.build().parameters())
    count = f"{parameters / 1e3:.1f} k parameters"
    assert facts["model"] == f"{count}, 2 layers, 32 tokens a sample"
    assert facts["layout"] == f"data={plan.data}" and facts["ZeRO"].startswith(str(plan.zero_stage))
    assert facts["microbatches"].startswith(f"{plan.microbatches} of {plan.rows} sample")
    assert facts["cluster"].startswith("4 × h100, 84 GB each")


def test_mfu_of_a_page_is_that_of_the_table():
    """The operations of the model, none recomputed, of the peak: of the program's seconds."""
    (shown,) = document(described())["plans"]
    numbers, estimate = shown["numbers"], plans()[0]
    expected = estimate.utilization() * estimate.seconds / numbers["seconds"]
    assert numbers["mfu"] == pytest.approx(expected) and "utilization" not in numbers
    assert numbers["tokens"] == pytest.approx(8 * 32 / numbers["seconds"])


def test_page_says_why_the_plan_is_the_best():
    (shown,) = document(described())["plans"]
    others = shown["others"]
    assert [other["seconds"] for other in others] == [x.seconds for x in plans()][:10]
    assert [other["reason"] for other in others] == [plans().slower(x) for x in plans()][:10]
    assert shown["tried"] == plans().tried


def test_source_lines_are_those_of_layers():
    """Memory at the peak, and collectives along an axis of layers."""
    shown = document(described(with_tensor()))["plans"][0]
    lines = {row["site"] for row in shown["rows"] if "model" in row["axes"]}
    layers = {line for line in lines if "models.py" in line}
    assert any("_attend" in line for line in layers) and any("_mlp" in line for line in layers)
    holders = shown["devices"][0]["holders"]
    of_activations = {line for _, purpose, line in holders if purpose == "activations"}
    assert any("_projected" in line for line in of_activations)


def test_lines_of_the_step_itself_are_its_units(saved, tmp_path):
    """The command has no line of a program that calls the step."""
    out = tmp_path / "plan.html"
    assert main(["explore", str(saved), "-o", str(out)]) == 0
    data = json.loads(re.search(r'id="data">(.*?)</script>', out.read_text())[1])
    rows = data["plans"][0]["rows"]
    assert rows and all("abstract.py" not in row["site"] for row in rows)
    (plan,) = data["plans"]
    assert plan["facts"]["model"].startswith("tiny: ") and plan["others"] and plan["tried"]


def test_two_plans_are_compared(tmp_path):
    first, second = document(described(), described(with_tensor()))["plans"]
    assert first["facts"]["layout"] != second["facts"]["layout"]
    assert first["facts"]["model"] == second["facts"]["model"]
    purposes = {device["number"]: device["purposes"] for device in second["devices"]}
    assert sum(purposes[0].values()) == second["devices"][0]["peak"]


# -- in a browser ----------------------------------------------------------------------------------


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_page_marks_what_differs(tmp_path):
    script = """
    note("facts"); note("why-title");
    notes.push([...document.querySelectorAll("#facts .differs td:first-child")].map((x) => x.textContent).join());
    notes.push([...document.querySelectorAll("#why .differs td:first-child")].map((x) => x.textContent).join());
    """
    text = page(described(), compare=described(with_tensor()))
    (facts, title, marked, numbers), _ = shown_by(text, script, tmp_path)
    assert "data=4" in facts and "data=2 tensor=2" in facts and title == "Differences"
    assert "layout" in marked.split(",") and "model" not in marked.split(",")
    assert "computation" in numbers.split(",")


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_page_lists_the_next_best_plans(tmp_path):
    (numbers, title, rows), _ = shown_by(
        page(described()), 'note("numbers"); note("why-title"); note("why");', tmp_path
    )
    assert "MFU" in numbers and "tokens a second" in numbers and "of peak FLOP/s" not in numbers
    assert (
        title == f"Why this plan of {plans().tried} plans that were compared" or "program" in title
    )
    assert "the best" in rows and " ms: other +" in rows


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_large_meshes_are_groups_that_zoom_in(tmp_path):
    script = """
    note("mesh-note"); notes.push(page.cells.x.length);
    click(get("mesh"), page.cells.x[5] + 1, page.cells.y[5] + 1); note("mesh-note"); note("trail"); notes.push(location.hash);
    strike(get("mesh"), "Enter"); note("mesh-note"); notes.push(page.cells.x.length);
    strike(get("mesh"), "Backspace"); strike(get("mesh"), "Backspace"); note("mesh-note");
    choose(page, { row: chosen(page).rows.findIndex(({ axes }) => axes.includes("data")) }); note("ledger-note");
    """
    notes, _ = shown_by(page(zero(devices=8192)), script, tmp_path)
    first, count, second, trail, fragment, third, most, back, ledger = notes
    assert first.startswith("16,384 devices · 256 groups of 64") and count == "256"
    assert second.startswith("16,384 devices · data 160–191") and "data 160–191" in trail
    assert "within=5" in fragment and "device=320" in fragment
    assert third == second and most == "64"
    assert back == first and ledger.endswith("from each device of 8,192")


# -- recordings ------------------------------------------------------------------------------------


def calls_of_rank(rank):
    model = (0, 1) if rank < 2 else (2, 3)
    data = (rank % 2, rank % 2 + 2)
    return [
        RecordedCall("all_gather", model, 100, "train.py:7 in forward"),
        RecordedCall("all_reduce", data, 4096, "train.py:31 in step"),
        RecordedCall("all_reduce", (0, 1, 2, 3), 8, "train.py:33 in step"),
    ]


RECORDING = Recording("train.py", [calls_of_rank(rank) for rank in range(4)], {"data": 2, "tp": 2})


def test_recordings_are_shown_by_axis_and_line():
    (shown,) = document(RECORDING)["plans"]
    rows = [
        (row["collective"], row["axes"], row["calls"], row["sent"], row["site"])
        for row in shown["rows"]
    ]
    assert rows == [
        ("all_gather", ("tp",), 1, 100, "train.py:7 in forward"),
        ("all_reduce", ("data",), 1, 4096, "train.py:31 in step"),
        ("all_reduce", ("data", "tp"), 1, 12, "train.py:33 in step"),
    ]
    assert shown["numbers"] == {"calls": 3, "sent": 100 + 4096 + 12}
    assert [device["lanes"] for device in shown["devices"]] == [
        ["lines", "network: tp", "network: data", "network: data+tp"]
    ] * 4
    assert "differs" not in shown["facts"]


def test_ranks_that_call_other_collectives_are_named():
    calls = [calls_of_rank(rank) for rank in range(4)]
    calls[3][1] = RecordedCall("broadcast", (1, 3), 4096, "train.py:30 in step")
    recording = Recording("train.py", calls, {"data": 2, "tp": 2})
    (shown,) = document(recording)["plans"]
    assert shown["facts"]["differs"] == (
        "Call 1 of the group 1, 3 differs: rank 1 has all_reduce of 4,096 bytes at train.py:31 in "
        "step, rank 3 has broadcast at train.py:30 in step."
    )


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_recordings_are_drawn(tmp_path, capsys):
    path, out = tmp_path / "calls.json", tmp_path / "calls.html"
    RECORDING.save(path)
    assert main(["explore", str(path), "-o", str(out)]) == 0
    script = """
    note("numbers"); click(get("mesh"), page.cells.x[2] + 3, page.cells.y[2] + 3); note("details"); note("ledger");
    notes.push([get("memory"), get("leaves-panel")].every((x) => x.hidden));
    """
    (numbers, details, ledger, is_hidden), _ = shown_by(out.read_text(), script, tmp_path)
    assert "calls of a rank3" in numbers and "Rank 2 data 1 · tp 0 · 3 calls" in details
    assert "train.py:31 in step" in ledger and is_hidden == "true"


# -- wrong files -----------------------------------------------------------------------------------

CALL = {"collective": "all_reduce", "group": [0, 1], "bytes": 8, "line": "a.py:1 in f"}


def recording_with(**changes):
    return json.dumps({"format": FORMAT, "axes": {"data": 2}, "ranks": [[CALL], []], **changes})


WRONG = {
    "missing.toml": (None, "No such file"),
    "folder.toml": ("folder", "must be a TOML file"),
    "empty.toml": ("", "must be a file of `fshard plan -o`"),
    "text.toml": ("a plan", "must be a TOML file"),
    "page.html": ("<html>", "must be a TOML file"),
    "script.py": ("x = 1", "must be a dict or a file of TOML"),
    "binary.toml": (b"\xff\xfe\x00", "must be a TOML file"),
    "run.toml": ("run = 3", "must be a file of `fshard plan -o`"),
    "gpu.toml": ('[run]\nconfig = "x"\ngpu = 3', "got another gpu"),
    "unknown.toml": ('[run]\nconfig = "x"\ngpu = "abacus"', "abacus"),
    "config.toml": ('data = 1\n[run]\nconfig = "nowhere.json"\ngpu = "h100"', "nowhere.json"),
    "plans.toml": ('[run]\nconfig = "x"\ngpu = "h100"\nplans = [{plan = 3}]', "got another plans"),
    "missing.json": (None, "No such file"),
    "empty.json": ("", "must be a file of JSON"),
    "list.json": ("[]", f'"format": "{FORMAT}"'),
    "other.json": ('{"format": 1}', f'"format": "{FORMAT}"'),
    "ranks.json": (recording_with(ranks=[]), "ranks must be a list"),
    "rank.json": (recording_with(ranks=[3, []]), "rank 0 must have a list of calls"),
    "axes.json": (recording_with(axes={"data": "2"}), "axes must be sizes by name"),
    "sizes.json": (recording_with(axes={"data": 3}), "axes must have a product of 2"),
    "call.json": (recording_with(ranks=[[3], []]), "a call of rank 0"),
    "group.json": (recording_with(ranks=[[{**CALL, "group": [2]}], []]), "ranks below 2"),
    "bytes.json": (recording_with(ranks=[[{**CALL, "bytes": -1}], []]), "a call of rank 0"),
    "huge.json": (recording_with(ranks=[[{**CALL, "bytes": 10**400}], []]), "a call of rank 0"),
    "nan.json": (recording_with(ranks=[[{**CALL, "bytes": float("nan")}], []]), "a call of rank 0"),
}


def assert_one_line(words, message, capsys):
    assert main(["explore", *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_one_line(name, tmp_path, capsys):
    content, message = WRONG[name]
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content)
    assert_one_line([path, "-o", tmp_path / "page.html"], message, capsys)


def test_wrong_arguments_are_one_line(saved, tmp_path, capsys):
    recording = tmp_path / "calls.json"
    RECORDING.save(recording)
    assert_one_line([], "file", capsys)
    assert_one_line([saved, saved, saved], "one or two files are needed; got 3", capsys)
    assert_one_line([saved, "-o", tmp_path / "nowhere" / "page.html"], "nowhere", capsys)
    assert_one_line([recording, "-o", tmp_path], str(tmp_path), capsys)
    assert_one_line([saved, recording], "both must be plans or both recordings", capsys)
    wrong = tmp_path / "stages.toml"
    wrong.write_text(saved.read_text().replace("pipeline = 1", "pipeline = 4"))
    assert_one_line([wrong], "must have a program", capsys)


def test_pages_of_a_plan_and_a_recording_raise():
    with pytest.raises(PlanError, match="both must be plans or both recordings"):
        page(described(), compare=RECORDING)
    assert isinstance(described(), DescribedPlan)
