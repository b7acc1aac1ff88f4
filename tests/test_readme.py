"""The blocks of the README run as they stand there: on virtual devices, and the same text in
processes.
"""

from pathlib import Path

from tests.helpers.examples import python_blocks
from tests.helpers.processes import run_processes

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = python_blocks(README.read_text())


def ends_of(*blocks):
    """Run blocks one after the other, each seeing the names of those before; return what the last
    ones made.
    """
    import torch

    torch.manual_seed(0)
    names = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    return {name: names[name] for name in ("y", "metrics") if name in names}


def plain_ends_of(*blocks):
    import fshard as fs

    ends = ends_of(*blocks)
    return {
        name: fs.unshard(value) if isinstance(value, fs.Sharded) else value
        for name, value in ends.items()
    }


def test_the_first_block_prints_what_it_says(capsys):
    first = plain_ends_of(BLOCKS[0])
    printed = capsys.readouterr().out
    assert printed.startswith("f32[8@data, 6@model]\n")
    assert "psum" in printed and "README.md" in printed
    assert first["y"].shape == (8, 3)


def test_training_ends_with_a_loss(capsys):
    metrics = ends_of(*BLOCKS)["metrics"]
    assert {"loss", "grad_norm", "samples", "finite"} <= metrics.keys()
    assert metrics["samples"] == 32 and metrics["finite"] and 0 < metrics["loss"] < 10


def test_eight_processes_print_the_same_numbers():
    there = run_processes(plain_ends_of, 8, BLOCKS[0])
    here = plain_ends_of(BLOCKS[0])["y"]
    assert all(one["y"].equal(here) for one in there)
