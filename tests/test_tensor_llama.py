"""The example trains on any mesh as on one device, on virtual devices and in processes."""

import re

import pytest

from fshard.testing.processes import run_processes
from tests.examples import losses, printed


def llama(*options):
    return printed("tensor_llama.py", "--steps", "2", "--batch", "8", *options)


@pytest.mark.filterwarnings("ignore")  # of transformers' own
def test_meshes_print_the_losses_of_one_device():
    pytest.importorskip("transformers")
    here, staged = llama(), llama("--pipeline", "2")
    first, second = run_processes(llama, 2, "--model", "1", timeout=170)
    alone = [*map(float, losses(llama("--devices", "1", "--seq", "1", "--model", "1")))]
    assert "Mesh(pipe=1, data=2, seq=2, model=2; virtual" in here and "Mesh(pipe=2, data=1, seq=2" in staged
    assert "Mesh(pipe=1, data=1, seq=2, model=1; process" in first
    for text in (here, staged, first):
        assert [*map(float, losses(text))] == pytest.approx(alone, abs=2e-4)
    assert len(alone) == 2 and not second and "at:pipe=1" in staged
    sent = dict(re.findall(r"^(\S+) +(?:psum|ppermute|all_gather) +([\d,]+)$", here, flags=re.MULTILINE))
    assert {"data", "seq", "model"} <= sent.keys()
