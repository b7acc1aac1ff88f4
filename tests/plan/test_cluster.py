"""Machines: TOML files, their errors, and the calibration of this one."""

import pytest
import torch

import fshard as fs
from fshard.command import main
from fshard.errors import PlanError
from fshard.plan import calibrate, cluster
from fshard.plan.cluster import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_files_keep_a_machine(name, tmp_path):
    machine = cluster(name)
    machine.save(tmp_path / "machine.toml")
    assert cluster(tmp_path / "machine.toml") == machine


def test_nodes_have_another_size():
    assert [link.devices for link in cluster("h100", node=4).links] == [4, 0]
    with pytest.raises(
        PlanError, match="node must be >= 1, of a machine with links in a node; got 2"
    ):
        cluster("cpu", node=2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory = 80e9", "memory = 0", "memory must be > 0; got 0"),
        ("memory = 80e9", 'memory = "80 GB"', "memory must be a number; got '80 GB'"),
        (
            "memory = 80e9",
            "ram = 80e9",
            "ram is unknown; the keys are name, flops, .*; memory is missing",
        ),
        (
            "devices = 0",
            "devices = 4",
            r"links must go from small groups to devices=0, .*; got \[8, 4\]",
        ),
        ("f32 = ", "fp32 = ", 'flops must have "f32"'),
        (
            "latency = 15e-6",
            "delay = 1",
            r"links\[1\].delay is unknown; .*; links\[1\].latency is missing",
        ),
        ("[flops]", "[flops", "the file must be TOML"),
        ("bf16 = ", 'bf16 = "fast" #', "flops.bf16 must be a number; got 'fast'"),
    ],
)
def test_wrong_files_raise_with_the_key(old, new, message, tmp_path):
    cluster("h100").save(path := tmp_path / "h.toml")
    text = path.read_text().replace("80000000000.0", "80e9").replace("1.5e-05", "15e-6")
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(PlanError, match=message):
        cluster(path)


def test_files_whose_links_are_no_tables_raise(tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(
        'name = "x"\nmemory = 1\nbandwidth = 1\nhost = 1\ndisk = 1\nlinks = 3\n[flops]\nf32 = 1\n'
    )
    with pytest.raises(PlanError, match=r"links must be tables \[\[links\]\]; got 3"):
        cluster(path)


def test_unknown_names_raise_with_the_known_ones():
    with pytest.raises(
        PlanError,
        match="must be one of a100, h100, h200, b200, cpu, or the path of a .toml file; got 'h1000'",
    ):
        cluster("h1000")


def test_calibration_predicts_a_product_of_another_size():
    """Rates of this machine are positive, and a product that was not measured takes about as long as they say."""
    machine = calibrate(fs.make_mesh({"all": 1}))
    assert (
        machine.efficiency.overlap == 0 and machine.flops["f32"] > 1e8 and machine.bandwidth > 1e8
    )
    assert 0 < machine.seconds_of_operation("mm", "f32", 2 * 512**3, 3 * 4 * 512**2) < 10
    assert machine.peak("i64") == machine.flops["f32"]


def test_the_command_writes_a_file(tmp_path, capsys):
    assert main(["calibrate", "--processes", "1", "-o", str(tmp_path / "here.toml")]) == 0
    assert cluster(tmp_path / "here.toml").name == "cpu" or torch.cuda.is_available()
    assert "here.toml" in capsys.readouterr().out
