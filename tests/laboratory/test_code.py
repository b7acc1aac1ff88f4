"""The program that the lab shows runs, and sends the bytes of the answer.

Oracles: the ledger of the program on virtual devices, against that of the answer; the formatter.
"""

import io
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import fshard as fs
from fshard.laboratory.answer import Answer
from fshard.laboratory.code import program_code
from fshard.laboratory.state import LabState
from fshard.laboratory.subject import Subject
from fshard.plan.models import Transformer

SIZES = {
    "layers": 2,
    "hidden": 32,
    "ffn": 64,
    "heads": 4,
    "kv_heads": 4,
    "vocab": 64,
    "sequence": 16,
}
TINY = Transformer(**SIZES, gated=False)
EXPERTS = Transformer(**SIZES, experts=4, top_k=2, expert_ffn=16)
SUBJECT = Subject()
Q = "layers.*.q.weight"

STATES = {
    "one": {"devices": 1},
    "data": {"devices": 2},
    "zero 3, a dim": {"plan": {"zero_stage": 3}, "overrides": {Q: {"data": 1}}},
    "layers": {"plan": {"tensor": 2, "zero_stage": 3}, "overrides": {Q: {"model": 1}}},
    "experts": {"model": EXPERTS, "plan": {"experts": 2, "zero_stage": 3}},
    "stages": {"plan": {"pipeline": 2, "tensor": 2, "zero_stage": 1}},
}
MORE_STATES = {
    "zero 1, replicas": {"plan": {"zero_stage": 1, "replicas": 2}},
    "zero 2, microbatches": {"plan": {"zero_stage": 2, "microbatches": 2, "recompute": "full"}},
    "zero 2, a dim": {"plan": {"zero_stage": 2}, "overrides": {Q: {"data": 0}}},
    "zero 3, off": {"plan": {"zero_stage": 3}, "overrides": {Q: {"data": None}}},
    "recomputed": {"plan": {"tensor": 2, "recompute": "except attention"}},
    "tokens": {"plan": {"sequence": 2, "sequence_mode": "ring", "zero_stage": 3}},
    "tokens of layers": {"plan": {"tensor": 2, "sequence_mode": "megatron"}},
    "a square": {"plan": {"tensor": 4, "tensor_mode": "2d", "rows": 2}},
    "experts and layers": {"model": EXPERTS, "plan": {"experts": 2, "tensor": 2}},
    "experts on all": {"model": EXPERTS, "plan": {"zero_stage": 1}},
    "zbv": {
        "model": Transformer(**{**SIZES, "layers": 4}),
        "plan": {"pipeline": 2, "schedule": "zbv"},
    },
    "host": {"plan": {"zero_stage": 1, "state_memory": "host"}, "optimizer": "adamw-master"},
    "lion": {"plan": {"zero_stage": 2}, "optimizer": "lion"},
}
CASES = [
    *STATES,
    *[pytest.param(name, marks=pytest.mark.thorough) for name in MORE_STATES],
]


@pytest.mark.parametrize("name", CASES)
def test_code_of_a_state_trains_and_sends_what_the_answer_shows(name, tmp_path):
    fields = {"model": TINY, "devices": 4, **{**STATES, **MORE_STATES}[name]}
    answer = Answer(LabState(**fields), SUBJECT)
    code = program_code(answer.state, answer.model)
    names = {"__name__": "program"}

    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "program", "exec"), names)

    losses = [float(text) for text in printed.getvalue().split()]
    assert len(losses) == 3
    assert all([3 < loss < 6 for loss in losses])
    # With values devices also compare their arguments, and count the tokens of experts.
    small_sums = 1500
    shown = answer.run.cost
    assert abs(bytes_of_one_more_step(names) - shown.sent()) < small_sums
    if not answer.plan.in_stages:
        arguments = [names[name] for name in ("params", "state", "batch")]
        cost = fs.plan.cost(names["step"], *arguments, cluster=shown.cluster)
        expected = (shown.sent(), shown.seconds, shown.peak())
        assert (cost.sent(), cost.seconds, cost.peak()) == expected
    assert is_formatted(code, tmp_path)


def bytes_of_one_more_step(names):
    """Take another step with the names that a program has assigned; return the bytes that it sends."""
    with fs.ledger() as comm:
        if "booster" in names:
            names["state"], _ = names["booster"].step(
                names["state"], (names["batch"][0], names["batch"])
            )
        else:
            arguments = [names[name] for name in ("params", "state", "batch")]
            names["params"], names["state"], _ = names["step"](*arguments)
    return comm.bytes()


def test_code_imports_public_names_alone():
    for fields in {**STATES, **MORE_STATES}.values():
        state = LabState(**{"model": TINY, "devices": 4, **fields})
        code = program_code(state, SUBJECT.overridden(state))
        imports = [line for line in code.splitlines() if "import" in line and "fshard" in line]
        assert {*imports} <= {"import fshard as fs", "from fshard import P"}


def is_formatted(code, folder):
    """Return True if the formatter changes nothing."""
    path = folder / "program.py"
    path.write_text(code, encoding="utf-8")
    formatter = Path(sys.executable).parent / "ruff"
    command = [formatter, "format", "--isolated", "--line-length", "100", "--diff", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return True
