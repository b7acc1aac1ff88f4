"""`certify_script`: training scripts as their users have them, for GPUs and NCCL, are accepted
without an edit, and a mistake in each is found with its cause.
"""

import json
from pathlib import Path

import pytest

from fshard.command import main
from fshard.errors import PromiseError
from fshard.testing import certify_script

SCRIPTS = Path(__file__).parent / "scripts"
DATA = {"data": 2}
NOT_REDUCED = "not reduced"

# By script: the mesh, and the arguments in one process.
RIGHT = {
    "ddp": (DATA, None),
    "ddp_spawn": (DATA, None),
    "fsdp2": (DATA, None),
    "accelerated": (DATA, None),
    "trainer": (DATA, None),
    "fabric": (DATA, None),
    "get_batch": (DATA, None),
    "tensor_parallel": ({"dp": 2, "tp": 2}, ["--tp", "1"]),
    "two_optimizers": (DATA, None),
}
# By script and arguments: the first leaf that diverges, and its reason.
WRONG = {
    "ddp --bug scaled": "2 times that of one device: the size of data",
    "ddp --bug unwrapped": "begins differently on ranks 0 and 1",
    "ddp_spawn sync": NOT_REDUCED,
    "fsdp2 --bug tokens": "the gradient first differs at",
    "accelerated --bug unwrapped": NOT_REDUCED,
    "trainer --bug": "the gradient first differs at",
    "fabric sync": NOT_REDUCED,
    "get_batch sync": "the gradient",
    "two_optimizers --kept": "call zero_grad() in each step",
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", RIGHT)
def test_scripts_are_accepted_without_an_edit(name):
    axes, alone = RIGHT[name]
    certificate = certify_script(SCRIPTS / f"{name}.py", axes, alone=alone, timeout=300)
    assert certificate.check().steps == 2 and len(certificate.rows) > 2
    assert "The script ran on CPUs over gloo, in float64" in certificate.unseen


@pytest.mark.timeout(400)
@pytest.mark.parametrize("command", WRONG)
def test_mistakes_of_scripts_are_found_with_their_cause(command):
    name, *arguments = command.split()
    certificate = certify_script(SCRIPTS / f"{name}.py", DATA, arguments, timeout=300)
    assert certificate.first is not None
    reasons = [row.reason for row in certificate.rows if row.verdict == "DIVERGENT"]
    assert any(WRONG[command] in reason for reason in reasons), certificate


@pytest.mark.timeout(400)
def test_debug_model_of_torchtitan_is_accepted():
    pytest.importorskip("torchtitan")
    arguments = ["--tp", "2"]
    axes = {"data": 2, "tp": 2}
    certify_script(SCRIPTS / "titan.py", axes, arguments, alone=["--tp", "1"], timeout=300).check()


# -- errors ----------------------------------------------------------------------------------------

LINEAR = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.rand_like(x))
dist.init_process_group("nccl")
model = DistributedDataParallel(nn.Linear(3, 1).cuda(), device_ids=[0])
opt = torch.optim.SGD(model.parameters(), 0.1)
x = torch.rand(4, 3) if "--seed" not in sys.argv else torch.ones(4, 3)
"""
STEP = "model(x).sum().backward()\nopt.step()"
ERRORS = {
    "no step": (LINEAR, "must step an optimizer of torch.optim; got no step"),
    "raises": (
        LINEAR + "raise KeyError('no data')",
        r"train.py:14 raised in rank \d of 2: KeyError",
    ),
    "draws": (
        LINEAR.replace("nn.Linear(3, 1)", "Noisy(3, 1)") + STEP,
        "must draw nothing in its steps",
    ),
    "exits": (LINEAR + "sys.exit(3)", "raised in rank . of 2: SystemExit: 3"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_scripts_that_cannot_be_judged_raise_one_line(tmp_path, name):
    text, message = ERRORS[name]
    file = tmp_path / "train.py"
    file.write_text(text)
    with pytest.raises(PromiseError, match=message):
        certify_script(file, DATA)


def test_command_runs_a_script_with_its_arguments(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text(LINEAR + "assert sys.argv[1:] == ['--seed', '1']\n" + STEP)
    out = tmp_path / "out.json"
    words = ["certify", "--run", str(file), "--mesh", "data=2", "--steps", "1", "--json", str(out)]
    assert main([*words, "--", "--seed", "1"]) == 0
    shown = capsys.readouterr().out
    assert "EXACT" in shown and "WARNING" in shown
    assert json.loads(out.read_text())["ok"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([__file__], "certify the script as it is: --run test_scripts.py"),
        (["absent.py:program"], "got no file 'absent.py'"),
        (["--run", "absent.py"], "--run must name a script; got no file 'absent.py'"),
        ([], "must be FILE:NAME or --run FILE; got neither"),
        (["a.py:f", "--run", "b.py"], "got a.py:f and b.py"),
        ([f"{__file__}:" + "absent" * 2], "got no function 'absentabsent'"),
        ([f"{__file__}:one_argument"], "got one_argument(rank)"),
        (["--run", __file__, "--steps", "0"], "--steps must be >= 1; got 0"),
        ([f"{__file__}:one_argument", "--", "--lr", "1"], "arguments of a script need --run"),
        (["--run", __file__, "--split", "context"], "a split must be like context=1"),
    ],
)
def test_command_lines_that_say_nothing_end_with_one_line(capsys, words, message):
    index = words.index("--") if "--" in words else len(words)
    assert main(["certify", *words[:index], "--mesh", "data=2", *words[index:]]) == 2
    written = capsys.readouterr().err
    assert message in written and written.count("\n") == 1


def one_argument(rank):
    """No program: it takes no world."""
