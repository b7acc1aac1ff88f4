"""`certify_script`: training scripts as their users have them, for GPUs and NCCL, are accepted
without an edit, and a mistake in each is found with its cause.
"""

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
