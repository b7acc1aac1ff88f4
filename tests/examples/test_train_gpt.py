"""The example trains as it says: under any stage on virtual devices, and as two processes, with
equal losses.
"""

import json
import re

import pytest

from tests.helpers.examples import printed
from tests.helpers.processes import run_processes

STEPS = 3


def gpt(*options):
    return printed(
        "train_gpt.py", "--steps", str(STEPS), "--batch", "8", "--letters", "9", *options
    )


def losses(file):
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()]


def test_two_processes_have_the_losses_of_virtual_devices(tmp_path):
    first, second = run_processes(gpt, 2, "--reproducible", "--log", str(tmp_path / "two"))
    here = gpt("--reproducible", "--devices", "4", "--stage", "1", "--log", str(tmp_path / "four"))
    assert (
        "ZeRO-3 on Mesh(data=2; process, cpu)" in first
        and "ZeRO-1 on Mesh(data=4; virtual, cpu)" in here
    )
    assert (
        losses(tmp_path / "two") == losses(tmp_path / "four")
        and len({*losses(tmp_path / "two")}) == STEPS
    )
    assert not second.strip()
    for text in (first, here):
        assert re.search(r"step 3 of 3  loss 2\.\d+  grad_norm .* samples/s", text)
        assert (
            re.search(r"It writes, \d+ of \d+ sentences", text)
            and "A step sends" in text
            and "train_gpt.py" in text
        )
        rows = re.findall(
            r"│ (?:parameters|gradients, reduced|optimizer state) +│ +(\S+) │ (?:2 )?P[ /\d]* +│ +(\S+) │",
            text,
        )
        assert len(rows) == 3 and all(held == formula for held, formula in rows)
        assert "EXACT" in text and "BOUNDED" not in text and "fshard run --processes 2" in text


def test_what_is_sent_is_what_theory_says_and_other_options_train_nearly_the_same(tmp_path):
    for how in (
        ["--devices", "3", "--stage", "0"],
        ["--devices", "4", "--log", str(tmp_path / "plain")],
    ):
        text = gpt(*how)
        (theory,), (counted,) = (
            re.findall(r"= ([\d,]+) bytes, to", text),
            re.findall(r"Counted: ([\d,]+)", text),
        )
        assert (
            0 < int(counted.replace(",", "")) - int(theory.replace(",", "")) < 600
        )  # losses and norms
    text = gpt(
        "--devices",
        "2",
        "--accumulate",
        "2",
        "--precision",
        "bf16",
        "--log",
        str(tmp_path / "half"),
    )
    plain = losses(tmp_path / "plain")
    half = losses(tmp_path / "half")
    assert half == pytest.approx(plain, abs=0.03) and half != plain
    assert "By theory" not in text
