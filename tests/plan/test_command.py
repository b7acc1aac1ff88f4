"""`fshard plan` and its neighbours answer wrong files and numbers with one line and exit code 2; what
they print is what the plans of Python have.
"""

import json
from importlib import import_module

import pytest

from fshard.command import main
from fshard.parallelism import Parallelism
from tests.helpers.sampled import thorough

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 100,
    "max_position_embeddings": 32,
}
NARROW = ["--rows", "2", "--schedule", "1f1b", "--recompute", "never"]


@pytest.fixture
def without_programs(monkeypatch):
    """Rank by the formulas alone, which is faster."""
    monkeypatch.setattr(import_module("fshard.plan.search"), "PROGRAMS", 0)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def run(capsys, *words):
    """Return the exit status, and what was printed, of a command."""
    status = main([*map(str, words)])
    return status, *capsys.readouterr()


def plan(capsys, config, *words, devices="4", batch="16"):
    options = ["--devices", devices, "--gpu", "h100", "--global-batch", batch]
    return run(capsys, "plan", config, *options, *words)


# -- what is printed -------------------------------------------------------------------------------


def test_plan_prints_model_memory_speed_days_and_cost(capsys, config, tmp_path):
    out = tmp_path / "plans.json"
    words = ["--tokens", "1T", "--price", "2.5", "--pipeline", "1", "--zero-stage", "3"]
    words += ["--tensor", "1", "--sequence-devices", "1", "--json", out, *NARROW]
    status, text, _ = plan(capsys, config, *words)
    assert status == 0
    assert "h100 with 84 GB" in text and "16 samples of 32 tokens a step" in text

    numbers = json.loads(out.read_text())
    best = numbers["plans"][0]
    assert f"{numbers['model']['parameters']:,} parameters on 4 x" in text
    speed = 16 * 32 / best["seconds"]
    assert best["tokens_per_second"] == pytest.approx(speed)
    assert best["days"] == pytest.approx(1e12 / speed / 86_400)
    assert best["cost"] == pytest.approx(best["days"] * 24 * 4 * 2.5)
    peak = numbers["machine"]["peak"] * 4 * best["seconds"]
    assert best["mfu"] == pytest.approx(numbers["model"]["flops_of_a_step"] / peak)
    assert sum(best["bytes_by_purpose"].values()) == best["peak"]
    assert sum(best["seconds_by_term"].values()) == pytest.approx(best["seconds"])


@pytest.mark.usefixtures("without_programs")
def test_plan_on_several_numbers_of_devices_prints_the_best_of_each(capsys, config, tmp_path):
    out, numbers = tmp_path / "plan.toml", tmp_path / "plans.json"
    words = ["--goal", "cost", "--pipeline", "1", "--zero-stage", "3", "-o", out]
    words += ["--json", numbers, *NARROW]
    status, text, _ = plan(capsys, config, *words, devices="2,4,8")
    assert status == 0
    rows = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert [row for row in rows if row] == ["2", "4", "8"]
    plans = json.loads(numbers.read_text())["plans"]
    cheapest = min(plans, key=lambda plan: plan["seconds"] * plan["devices"])
    assert Parallelism.load(out).devices == cheapest["devices"]


@pytest.mark.usefixtures("without_programs")
def test_plan_with_constraints_has_no_other_layouts(capsys, config, tmp_path):
    out = tmp_path / "plans.json"
    words = ["--tensor", "1,2", "--zero-stage", "1", "--recompute", "full,except attention, mlp"]
    status, _, _ = plan(capsys, config, *words, "--rows", "2", "--pipeline", "1", "--json", out)
    assert status == 0
    layouts = [plan["layout"] for plan in json.loads(out.read_text())["plans"]]
    assert {layout["tensor"] for layout in layouts} == {1, 2}
    assert {layout["zero_stage"] for layout in layouts} <= {0, 1}
    recompute = {layout["recompute"] for layout in layouts}
    assert recompute == {"full", "except attention, mlp"}
    assert {layout["rows"] for layout in layouts} == {2}


WHY = [
    ("tensor=2,rows=2", "times as long as the best plan: "),
    ("model=2 data=2", "layers  "),
    ("data=3", "is rejected: data * pipeline * experts * sequence * tensor must be the number"),
    ("pipeline=4,schedule=interleaved,chunks=8", "must be at most the number of layers, 4"),
    ("rows=3", "must divide the samples of a step, 16"),
    ("recompute=except queries,rows=2", "must except names of fs.nn.checkpoint_name"),
    ("rows=4,microbatches=3", "no plan of 4 devices and 16 samples has rows=4, microbatches=3"),
]


@pytest.mark.usefixtures("without_programs")
def test_why_names_the_terms_or_the_reason(capsys, config):
    words = []
    for layout, _ in WHY:
        words += ["--why", layout]
    status, printed, _ = plan(capsys, config, *NARROW, "--zero-stage", "3", *words)
    assert status == 0
    _, *reasons = printed.split("\n\n")
    texts = [reason for reason in reasons if "Rejected:" not in reason]
    assert len(texts) == len(WHY)
    for (_, expected), text in zip(WHY, texts, strict=True):
        assert expected in text


@pytest.mark.usefixtures("without_programs")
@pytest.mark.parametrize("goal", ["time", thorough("memory")])
def test_numbers_of_why_are_the_terms_of_both_plans_and_sum_to_the_whole(
    capsys, config, tmp_path, goal
):
    out = tmp_path / "plans.json"
    words = ["--why", "tensor=4,zero_stage=0", "--why", "zero_stage=3,tensor=1,recompute=full"]
    options = ["--rows", "2", "--pipeline", "1", "--goal", goal, "--json", out]
    status, text, _ = plan(capsys, config, *options, *words)
    assert status == 0
    for why in json.loads(out.read_text())["why"]:
        assert why["text"] in text
        for unit, whole in (("ms", "step"), ("GB", "peak")):
            *terms, total = [row for row in why["numbers"] if row["unit"] == unit]
            assert total["name"] == whole
            for side in ("best", "other"):
                assert sum([row[side] for row in terms]) == pytest.approx(total[side])
        for row in why["numbers"]:
            assert f"\n{row['name']:22}" in why["text"]


@pytest.mark.usefixtures("without_programs")
def test_why_of_a_layout_that_does_not_fit_has_its_bytes(capsys, tmp_path):
    large = {**CONFIG, "hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 32}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**large, "vocab_size": 32000}))
    status, printed, _ = plan(
        capsys, path, "--why", "data=16,zero_stage=0", *NARROW, devices="16", batch="32"
    )
    assert status == 0
    assert "data=16, ZeRO-" in printed and "GB over the memory" in printed
    assert "memory of a device" in printed


# -- what is wrong ---------------------------------------------------------------------------------

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 9}


def test_more_tokens_than_positions_are_one_line(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GPT2, "n_positions": 8}))
    result = plan(capsys, path, "--sequence", "16")
    _assert_one_line(result)
    assert "at most 8, the positions that have an embedding; got 16" in result[2]


def test_numbers_of_plans_are_no_recording(capsys, tmp_path):
    path = tmp_path / "plans.json"
    path.write_text(json.dumps({"plans": []}))
    result = run(capsys, "explore", path, "-o", tmp_path / "plan.html")
    _assert_one_line(result)
    assert "fshard plan -o" in result[2]


CONFIGS = {
    "nothing": "",
    "brace": "{",
    "empty object": "{}",
    "list": "[1]",
    "text": '"llama"',
    "number": "3",
    "null": "null",
    "not a number": json.dumps({**CONFIG, "hidden_size": float("nan")}),
    "infinite": json.dumps({**CONFIG, "vocab_size": float("inf")}),
    "deep": "[" * 100_000,
    "text for a number": json.dumps({**CONFIG, "hidden_size": "64"}),
    "list for a number": json.dumps({**CONFIG, "num_hidden_layers": [4]}),
    "object for a number": json.dumps({**CONFIG, "vocab_size": {}}),
    "true for a number": json.dumps({**CONFIG, "vocab_size": True}),
    "fraction": json.dumps({**CONFIG, "num_attention_heads": 4.5}),
    "zero": json.dumps({**CONFIG, "num_attention_heads": 0}),
    "negative": json.dumps({**CONFIG, "num_hidden_layers": -4}),
    "huge": json.dumps({**CONFIG, "hidden_size": 10**30}),
    "large layers": json.dumps({**CONFIG, "num_hidden_layers": 10**9}),
    "large hidden": json.dumps({**CONFIG, "hidden_size": 4 * 10**9}),
    "heads": json.dumps({**CONFIG, "num_attention_heads": 5}),
    "heads of keys": json.dumps({**CONFIG, "num_key_value_heads": 3}),
    "activation": json.dumps({**CONFIG, "hidden_act": 3}),
    "type": json.dumps({**CONFIG, "model_type": "nothing"}),
    "type that is a list": json.dumps({**CONFIG, "model_type": ["llama"]}),
    "encoder": json.dumps({**CONFIG, "model_type": "t5"}),
    "recurrent": json.dumps({**CONFIG, "model_type": "mamba"}),
    "text_config": json.dumps({**CONFIG, "text_config": 3}),
    "flag": json.dumps({**CONFIG, "tie_word_embeddings": "yes"}),
    "experts": json.dumps({**CONFIG, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}),
    "no experts": json.dumps({**CONFIG, "model_type": "qwen3_moe"}),
    "dropout": json.dumps({**CONFIG, "model_type": "gpt2", "resid_pdrop": 2}),
    "compressed": json.dumps({**{name: x for name, x in CONFIG.items() if name != "model_type"}, "kv_lora_rank": 8}),
    "other layers": json.dumps({**CONFIG, "model_type": "glm4", "num_attention_heads": "x"}),
}  # fmt: skip


@pytest.mark.parametrize("content", CONFIGS.values(), ids=CONFIGS.keys())
def test_wrong_configs_are_one_line(capsys, tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    _assert_one_line(plan(capsys, path, *NARROW))


def test_bytes_that_are_no_text_are_one_line(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    _assert_one_line(plan(capsys, path))


@pytest.mark.parametrize(
    "words",
    [
        ["--devices", "0"],
        ["--devices", "-4"],
        ["--devices", "four"],
        ["--devices", "4,"],
        ["--devices", "1e3"],
        ["--devices", "10000000000000"],
        ["--devices", "7", "--tensor", "2"],
        ["--global-batch", "0"],
        ["--global-batch", "1.5"],
        ["--global-batch", "99999999999999999999999"],
        ["--global-batch", "7", "--data", "4"],
        ["--sequence", "0"],
        ["--sequence", "-1"],
        ["--sequence", "nan"],
        ["--sequence", "100000000000"],
        ["--gpu", "H100"],
        ["--gpu", ""],
        ["--gpu", "nowhere.toml"],
        ["--node", "0"],
        ["--node", "eight"],
        ["--gpu", "cpu", "--node", "8"],
        ["--tokens", "0"],
        ["--tokens", "nan"],
        ["--tokens", "inf"],
        ["--tokens", "many"],
        ["--tokens", "T"],
        ["--price", "2"],
        ["--tokens", "1T", "--price", "-2"],
        ["--goal", "speed"],
        ["--tensor", "0"],
        ["--tensor", "two"],
        ["--tensor", ""],
        ["--tensor", "1,,2"],
        ["--zero-stage", "4"],
        ["--recompute", "names"],
        ["--schedule", "1f2b"],
        ["--state-memory", "disk"],
        ["--experts", "2"],
        ["--pipeline", "64"],
        ["--why", "tensor"],
        ["--why", "speed=2"],
        ["--why", "tensor=two"],
        ["--why", "tensor=2,tensor=4"],
        ["--why", ""],
        ["--why", "pipeline=2,replicas=2"],
        ["--why", "tensor_mode=2d,tensor=4"],
        ["-o", "/nowhere/plan.toml"],
        ["-o", "."],
        ["--json", "/nowhere/plan.json"],
        ["--speed", "3"],
        ["--batch", "3"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_one_line(capsys, config, words):
    _assert_one_line(plan(capsys, config, *NARROW, *words))


@pytest.mark.parametrize("path", ["nowhere", "nowhere/config.json", "", "a\0b"])
def test_paths_that_are_not_there_are_one_line(capsys, tmp_path, path):
    _assert_one_line(plan(capsys, f"{tmp_path}/{path}"))


MACHINES = {
    "empty": "",
    "no TOML": "memory = ",
    "text": 'name = "x"\nmemory = "80"',
    "flops": 'name = "x"\nflops = 3',
    "links": 'name = "x"\nlinks = 3',
    "link": 'name = "x"\nlinks = [3]',
    "efficiency": 'name = "x"\nefficiency = 3',
}


@pytest.mark.parametrize("content", MACHINES.values(), ids=MACHINES.keys())
def test_wrong_machines_are_one_line(capsys, config, tmp_path, content):
    path = tmp_path / "machine.toml"
    path.write_text(content)
    _assert_one_line(plan(capsys, config, "--gpu", path))


def _written(config, **changes):
    run_table = {"config": config, "gpu": "h100", **changes}
    lines = [f"{name} = {json.dumps(value)}" for name, value in run_table.items()]
    return "\n".join(["data = 2", "[run]", *lines])


PLANS = {
    "empty": lambda config: "",
    "no TOML": lambda config: "data = ",
    "no run": lambda config: "data = 2",
    "run": lambda config: "run = 3",
    "config": lambda config: _written(3),
    "missing config": lambda config: _written(config + "x"),
    "gpu": lambda config: _written(config, gpu="none"),
    "gpu of another type": lambda config: _written(config, gpu=3),
    "node": lambda config: _written(config, node=0),
    "node of another type": lambda config: _written(config, node="8"),
    "sequence": lambda config: _written(config, sequence=-3),
    "unknown in run": lambda config: _written(config, speed=3),
    "unknown field": lambda config: "speed = 3\n" + _written(config),
    "no data": lambda config: _written(config).replace("data = 2", "tensor = 2\nzero_stage = 0\nrows = 1"),
    "data": lambda config: _written(config).replace("data = 2", 'data = "2"'),
    "tensor": lambda config: "tensor = {size = 3, mode = 4}\n" + _written(config),
    "heads": lambda config: _written(config).replace("data = 2", "data = 1\npipeline = 64\nrows = 1\nzero_stage = 0"),
}  # fmt: skip


@pytest.mark.parametrize("content", PLANS.values(), ids=PLANS.keys())
def test_wrong_plans_of_explore_are_one_line(capsys, config, tmp_path, content):
    path = tmp_path / "plan.toml"
    path.write_text(content(config))
    _assert_one_line(run(capsys, "explore", path, "-o", tmp_path / "plan.html"))


@pytest.mark.parametrize(
    "words",
    [
        ["explore"],
        ["explore", "nowhere.toml"],
        ["explore", "."],
        ["explore", "plan.py"],
        ["explore", "nowhere.toml", "--speed"],
        ["calibrate", "--processes", "0"],
        ["calibrate", "--processes", "two"],
        ["calibrate", "-o", "/nowhere/here.toml"],
        ["calibrate", "--speed"],
        ["calibrate", "more"],
        ["plan"],
        ["plan", "config.json"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line(capsys, words):
    _assert_one_line(run(capsys, *words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "4090"], "argument --gpu: must be one of a100, h100"),
        (["--zero-stage", "2", "3"], "joined by commas: --zero-stage 2,3"),
        (["--experts", "2"], "experts must be 1, since the layers have none; got 2."),
        (["--tensor", "3", "--data", "1,2"], "no plan with data=1 or 2, tensor=3, rows=2, schedule=1f1b"),
    ],
    ids=["gpu", "several values", "experts", "sizes"],
)  # fmt: skip
def test_wrong_argument_is_named_with_the_form_it_must_have(capsys, config, words, message):
    result = plan(capsys, config, *NARROW, *words)
    _assert_one_line(result)
    assert message in result[2]


def test_misspelled_key_of_a_config_is_named_with_the_right_one(capsys, tmp_path):
    """Without it the model would have as many heads of keys as of queries."""
    path = tmp_path / "config.json"
    sizes = {name: value for name, value in CONFIG.items() if name != "num_key_value_heads"}
    path.write_text(json.dumps({**sizes, "num_key_value_head": 2}))
    result = plan(capsys, path, *NARROW)
    _assert_one_line(result)
    assert "num_key_value_head is no key" in result[2] and "to num_key_value_heads" in result[2]


def _assert_one_line(result):
    status, printed, error = result
    assert status == 2 and printed == ""
    # A slow machine prints what it does before it finds the mistake.
    lines = [line for line in error.splitlines() if not line.endswith(" ...")]
    assert len(lines) == 1 and len(lines[0]) > 20, error
    assert "Traceback" not in error
