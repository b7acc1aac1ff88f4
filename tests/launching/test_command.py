"""The command: `fshard run` is torchrun's, `fshard doctor` says what is wrong."""

import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import pytest
import torch

import fshard as fs
from fshard.command import main
from fshard.doctor import check
from fshard.doctor.check import Trial
from fshard.doctor.examine import Findings, Speed, machine
from fshard.doctor.left_over import left_over_files
from fshard.doctor.visit import judge
from fshard.launching.torchrun import command
from fshard.testing.oracles import ORACLES
from tests.helpers.processes import not_under_rules, run_processes

# -- run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--processes 4 file.py", "--standalone --nproc-per-node 4 file.py"),
        ("--processes 4 -m a.b --nodes 3", "--standalone --nproc-per-node 4 -m a.b --nodes 3"),
        ("--max-restarts 3 --processes=2 file.py -x --processes 9",
         "--standalone --max-restarts 3 --nproc-per-node=2 file.py -x --processes 9"),
        ("--nproc-per-node 3 file.py", "--standalone --nproc-per-node 3 file.py"),
        ("--processes 2 --rdzv-backend c10d --rdzv-endpoint h:1 file.py",
         "--nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint h:1 file.py"),
    ],
)  # fmt: skip
def test_run_becomes_a_command_line_of_torchrun(given, expected):
    assert command(given.split()) == [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *expected.split(),
    ]


def test_run_without_options_starts_a_process_per_gpu_or_two(monkeypatch):
    for gpus, count in ((0, "2"), (3, "3")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert command(["file.py"])[3:] == ["--standalone", "--nproc-per-node", count, "file.py"]


def test_run_starts_the_file_in_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, fshard as fs\n"
        'mesh = fs.make_mesh({"data": fs.mesh.process_count(default=5)})\n'
        'total = fs.run(lambda: fs.psum(torch.ones(()), "data"), mesh=mesh)[0].item()\n'
        "if fs.mesh.process_index() == 0:\n"
        "    print(mesh, total, sys.argv[1:])\n"
    )
    words = [sys.executable, "-m", "fshard", "run", "--processes", "2", script, "--processes", "7"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "Mesh(data=2; process, cpu) 2.0 ['--processes', '7']\n", done.stderr


def test_command_prints_usage_and_version(capsys):
    assert main([]) == 2 and capsys.readouterr().err.startswith("usage: fshard run")
    assert main(["--help"]) == 0 and "fshard doctor" in capsys.readouterr().out
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"fshard {fs.__version__}\n"


# -- doctor ----------------------------------------------------------------------------------------


def test_doctor_examines_processes_that_it_starts(capsys):
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    transport = told["processes"][0]["transport"]
    assert (
        told["well"]
        and told["sentence"] == f"All well: 2 processes over {transport}, 11 collectives right."
    )
    assert [one["rank"] for one in told["processes"]] == [0, 1]
    for one in told["processes"]:
        assert [trial["collective"] for trial in one["trials"]] == list(ORACLES)
        assert all(trial["cases"] > 4 and not trial["complaints"] for trial in one["trials"])
        assert {speed["held"] for speed in one["speeds"]} == {1 << 10, 1 << 20, 1 << 24}
        assert all(speed["seconds"] > 0 and speed["sent"] > 0 for speed in one["speeds"])


def doctored(*words):
    """Be one of the processes that are looked at."""
    with redirect_stdout(StringIO()) as said:
        return main(["doctor", *words]), said.getvalue()


@not_under_rules("it describes gloo")
def test_doctor_under_a_launcher_examines_its_processes():
    (status, said), (other, silence) = run_processes(
        doctored, 2, environment={"FSHARD_DIRECT": "0"}, timeout=100
    )
    assert status == other == 0 and silence == ""
    lines = [line.rstrip() for line in said.splitlines()]
    for heading in ("Machine", "Processes", "Speed", "Collectives", "Verdict"):
        assert heading in lines
    assert "  All well: 2 processes over gloo, 11 collectives right." in lines
    assert "  started by  torchrun" in lines and "no FSHARD_DIRECT=0" in " ".join(said.split())
    assert any(line.startswith("  psum          right   ") for line in lines)
    assert [line.split()[0] for line in lines if line.count("GiB/s") == 2] == [
        "psum",
        "all_gather",
        "psum_scatter",
        "ppermute",
    ]
    assert max(map(len, lines)) <= 80 and "\x1b" not in said


def test_doctor_measures_transfers_to_a_disk(capsys, request, monkeypatch):
    folder = request.config.rootpath / "build" / "disk"  # /tmp may be memory
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("FSHARD_DISK", str(folder))
    assert main(["doctor", "--device", "cpu", "--processes", "1"]) == 0
    row = r"^  (host to disk|disk to host)  64 MiB (\d+\.\d\d) GiB/s *$"
    rates = dict(re.findall(row, capsys.readouterr().out, re.MULTILINE))
    assert [*rates] == ["host to disk", "disk to host"] and all(
        0 < float(rate) < 100 for rate in rates.values()
    )
    monkeypatch.setenv("FSHARD_DISK", "/proc")
    assert main(["doctor", "--device", "cpu", "--processes", "1"]) == 1
    assert "DiskError: FSHARD_DISK=/proc must be a writable folder" in " ".join(
        capsys.readouterr().out.split()
    )


def doctored_where_sums_are_wrong():
    """Look at two collectives, of which one adds 1."""
    psum = fs.psum

    def off_by_one(x, axis):
        total = psum(x, axis)
        return total + 1 if isinstance(total, torch.Tensor) and total.is_floating_point() else total

    off_by_one.start = psum.start
    fs.psum, check.ORACLES = off_by_one, {name: ORACLES[name] for name in ("psum", "pmean")}
    return doctored("--json")


def test_doctor_finds_a_wrong_collective():
    (status, said), (other, _) = run_processes(doctored_where_sums_are_wrong, 2, timeout=100)
    told = json.loads(said)
    assert status == other == 1 and not told["well"]
    assert (
        told["sentence"].startswith("Not well: psum wrong in ")
        and "values differ, first" in told["sentence"]
    )
    assert "FSHARD_DIRECT=0" in told["advice"][0] or told["processes"][0]["transport"] == "gloo"
    for one in told["processes"]:
        assert [trial["collective"] for trial in one["trials"] if trial["complaints"]] == ["psum"]


def findings(rank, **changes):
    speeds, tried = (Speed("psum", 1024, 1024, 1e-5),), (Trial("psum", 3), Trial("send_recv", 4))
    return replace(Findings(rank, "SLURM", "cpu", "gloo", machine(), speeds, tried), **changes)


def test_doctor_verdict_names_causes_and_fixes():
    here = replace(machine(), processors=64, left_over="")
    assert (
        judge([findings(0, machine=here)]).sentence == "All well: 1 process, 2 collectives right."
    )
    apart = [findings(rank, machine=replace(here, host=f"n{rank}", gpus=())) for rank in range(2)]
    assert (
        judge(apart).sentence == "All well: 2 processes over gloo, 2 collectives right."
        and not judge(apart).advice
    )
    older = [*apart, findings(2, machine=replace(here, torch="2.11.0"))]
    assert (
        "different versions" in judge(older).sentence
        and "process 2 has Python" in judge(older).sentence
    )
    broken = findings(
        1,
        trials=(Trial("psum", 3), Trial("send_recv", 4, ("off", "off"))),
        transport="nccl",
        device="cuda",
    )
    verdict = judge([findings(0, transport="nccl", device="cuda"), broken])
    assert (
        verdict.sentence == "Not well: send_recv wrong in 2 of 8 results, off."
        and "NCCL_P2P" in verdict.advice[0]
    )
    crowd = [
        findings(rank, machine=replace(here, processors=2, gpus=("H100",)), transport="direct")
        for rank in range(4)
    ]
    assert "4 processes share 2 processors" in judge(crowd).advice[0]


def test_doctor_names_files_of_processes_that_have_ended(tmp_path):
    assert left_over_files(tmp_path) == ""
    for name in ("fshard-1a-decision", "fshard-2b-decision of (1,)", "fshard-3c-new", "another"):
        (tmp_path / name).touch()
        if "new" not in name:
            os.utime(tmp_path / name, (1e9, 1e9))  # long before this process has started
    found = left_over_files(tmp_path)
    assert found.startswith(f"2 files in {tmp_path} are") and "such as fshard-1a-decision." in found
    twins = [findings(n, machine=replace(machine(), left_over=found, host="h")) for n in (0, 1)]
    assert judge(twins).well and f"h: {found}" in judge(twins).advice
    assert sum(found in advice for advice in judge(twins).advice) == 1

    subprocess.run(found.split("remove them: ")[1], shell=True, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "fshard-3c-new"]
    assert left_over_files(tmp_path) == ""


BARE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hypothesis", "pytest", "cloudpickle"):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
import fshard as fs
from fshard.doctor.examine import examine
from fshard.doctor.check import check_collectives
print(sum(len(trial.complaints) for trial in check_collectives(fs.make_mesh({"data": 2}))))
"""


def test_doctor_imports_without_test_packages():
    done = subprocess.run(
        [sys.executable, "-c", BARE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "0\n", done.stderr
    assert os.environ.get("RANK") is None
