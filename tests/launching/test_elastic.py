"""Processes that do not end with each other, of `fshard run --elastic` and `fs.launch(elastic=True)`:
small programs whose ends are known; what is shown, returned, and left is compared with these ends.
"""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import fshard as fs
from fshard.command import main
from fshard.errors import LostProcessError, MeshError
from fshard.launching.ends import End, first_failure, in_words
from fshard.launching.pool import Processes
from fshard.launching.program import run_program
from tests.helpers.ended import gone, wait_until
from tests.helpers.processes import wrapped

# -- what a run is that has lost processes ---------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "failure"),
    [
        # The codes in the order of the ends: process 0 ends first.
        ([0, 0], None),
        ([-9, 0], None),
        ([3, 0], None),
        ([0, -9], None),
        ([0, 3], 1),
        ([1, 0, -9, 3], 3),
        ([1, 3, 0, -15], None),
        ([-9, 3], 0),
        ([3], 0),
    ],
)
def test_run_with_losses_is_a_failure_if_an_error_comes_last(codes, failure):
    ends = [End(rank, float(rank), code) for rank, code in enumerate(codes)]
    found = first_failure(ends[::-1])
    assert (None if found is None else found.rank) == failure


def test_error_at_the_time_of_the_last_success_is_a_failure():
    assert first_failure([End(0, 1.0), End(1, 1.0, 3)]) == End(1, 1.0, 3)


def test_exit_code_of_a_signal_without_a_name_has_its_number():
    nameless = next(n for n in range(1, 65) if n not in [*signal.Signals])
    assert in_words(-nameless) == f"was killed by signal {nameless}"
    assert End(0, 0.0, -nameless).shell_code == 128 + nameless


# -- programs --------------------------------------------------------------------------------------

# The arguments are a folder, and for each process how it ends. Every process waits for all, so
# none ends before the others have started.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path

rank, folder, ends = int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2:]

def wait_until(happened):
    while not happened():
        time.sleep(0.005)

def pid(rank):
    path = folder / str(rank)
    return int(path.read_text()) if path.exists() else 0

def is_gone(rank):
    "The parent has seen its end."
    try:
        os.kill(pid(rank), 0)
    except ProcessLookupError:
        return True
    return False

def ended(which):
    return all(is_gone(other) for other, end in enumerate(ends) if which(end))

def obey(number, frame):
    print("obeys", flush=True)
    sys.exit(0)

if "obey" in ends[rank]:
    signal.signal(signal.SIGTERM, obey)
if "ignore" in ends[rank]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"{rank}.new").write_text(str(os.getpid()))
os.rename(folder / f"{rank}.new", folder / str(rank))
wait_until(lambda: all(pid(other) for other in range(len(ends))))
print("has started", flush=True)
match ends[rank]:
    case "return":
        wait_until(lambda: ended(lambda end: end in ("kill", "exit", "raise")))
    case "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    case "exit":
        sys.exit(3)
    case "raise":
        raise ValueError("of the program")
    case "exit last":
        wait_until(lambda: ended(lambda end: end == "return"))
        sys.exit(3)
    case "kill last":
        wait_until(lambda: ended(lambda end: end == "return"))
        os.kill(os.getpid(), signal.SIGKILL)
    case _:
        time.sleep(1000)
print("returns")
"""


def started(folder, n):
    """Return the numbers of processes of a program, or nothing as long as one is not there."""
    files = [Path(folder, str(rank)) for rank in range(n)]
    if not all(file.exists() for file in files):
        return []
    return [int(file.read_text()) for file in files]


def run(folder, ends):
    script = Path(folder, "program.py")
    script.write_text(PROGRAM)
    count = str(len(ends))
    return main(["run", "--elastic", "--processes", count, str(script), str(folder), *ends])


def test_run_elastic_others_go_on_when_processes_end(tmp_path, capsys):
    assert run(tmp_path, ["return", "kill", "exit", "raise"]) == 0
    said, alas = capsys.readouterr()
    lines = [f"[{rank}] has started" for rank in range(4)]
    assert sorted(said.splitlines()) == sorted([*lines, "[0] returns"])
    assert re.search(r"^process 1 of 4 was killed by SIGKILL; \d (is|are) running\.$", alas, re.M)
    assert re.search(r"^process 2 of 4 ended with exit code 3; \d (is|are) running\.$", alas, re.M)
    assert re.search(r"^process 3 of 4 ended with exit code 1; \d (is|are) running\.$", alas, re.M)
    assert "[3] ValueError: of the program\n" in alas and alas.count("process ") == 3
    assert all(map(gone, started(tmp_path, 4)))


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (["return", "return"], 0),
        (["return", "exit last"], 3),
        (["return", "kill last"], 0),
        (["kill", "kill"], 128 + 9),
        (["exit"], 3),
    ],
)
def test_run_elastic_exit_code_is_of_the_end_that_matters(tmp_path, ends, code):
    assert run(tmp_path, ends) == code


def test_run_elastic_sets_the_variables_of_torchrun(tmp_path, capsys, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(
        "import os, sys\n"
        'names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",\n'
        '         "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS")\n'
        'print(*[os.environ[name] for name in names], int(os.environ["MASTER_PORT"]) > 0, '
        "*sys.argv[1:])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    words = ["run", "--elastic", "--processes", "2", "-m", "package.module", "--processes", "9"]
    assert main(words) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"[{rank}] {rank} 2 {rank} 2 127.0.0.1 True 3 True --processes 9" for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--max-restarts 3 --nnodes 2 f.py",
            "no options but --processes and -m; got --nnodes, --m",
        ),
        ("--processes 0 f.py", "--processes must be an integer >= 1; got 0"),
        ("--processes two f.py", "--processes must be an integer >= 1; got two"),
    ],
)
def test_run_elastic_misuse_names_the_option(words, message, capsys):
    assert main(["run", "--elastic", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_run_elastic_whose_program_is_missing_has_its_exit_code(tmp_path, capsys):
    assert main(["run", "--elastic", "--processes", "2", str(tmp_path / "none.py")]) == 2
    assert "[1] " in capsys.readouterr().err


ELASTIC_PROGRAM = """
import atexit, os, sys, time
from pathlib import Path
import torch, fshard as fs

pids = Path(sys.argv[1])

def wait_for_the_other():
    "The interpreter of a process that fails ends after that of the survivor."
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if pids.exists() and not Path("/proc", pids.read_text()).exists():
            break
        time.sleep(0.005)

def train(run):
    if fs.mesh.process_count() == 1:
        pids.with_suffix(".new").write_text(str(os.getpid()))
        pids.with_suffix(".new").rename(pids)
    elif fs.mesh.process_index() == 1:
        atexit.register(wait_for_the_other)
        sys.exit(3)
    else:
        fs.run(lambda: fs.psum(torch.ones(1), "data"), mesh=run.mesh)

fs.elastic(lambda devices: fs.make_mesh({"data": len(devices)}, devices=devices))(train)()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elastic runs need /proc")
def test_run_elastic_is_well_if_a_lost_process_ends_after_the_others(tmp_path, capfd):
    script = tmp_path / "program.py"
    script.write_text(ELASTIC_PROGRAM)
    words = ["--processes", "2", str(script), str(tmp_path / "survivor")]
    assert main(["run", "--elastic", *words]) == 0, capfd.readouterr().err
    assert "process 1 of 2 ended with exit code 3; 0 are running" in capfd.readouterr().err


def send_when_started(folder, n, *numbers):
    """Send signals to this process, which runs a program, as soon as that has started."""

    def send():
        wait_until(lambda: started(folder, n))
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)  # two that are there at the same time are one

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("ends", "numbers", "code"),
    [
        (["stay", "stay"], [signal.SIGINT], 128 + 2),
        (["stay", "stay"], [signal.SIGTERM], 128 + 15),
        (["obey", "obey"], [signal.SIGTERM], 0),
        (["obey", "stay"], [signal.SIGTERM], 128 + 15),
        (["ignore", "obey"], [signal.SIGTERM, signal.SIGTERM], 128 + 15),
    ],
)
def test_run_elastic_passes_signals_on(tmp_path, capsys, ends, numbers, code):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    thread = send_when_started(tmp_path, len(ends), *numbers)
    assert run(tmp_path, ends) == code
    thread.join()
    assert all(map(gone, started(tmp_path, len(ends))))
    assert capsys.readouterr().out.count("obeys") == ends.count("obey")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def die_while_running(folder):
    """Be killed while a program runs."""
    thread = send_when_started(folder, 2, signal.SIGKILL)
    run(folder, ["stay", "ignore"])
    thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends the processes")
def test_run_elastic_processes_end_with_the_parent(tmp_path):
    with Processes(1) as pool, pytest.raises(RuntimeError, match="killed by SIGKILL"):
        pool.run(die_while_running, tmp_path)
    wait_until(lambda: all(map(gone, started(tmp_path, 2))))


def test_run_elastic_does_not_wait_for_children_of_a_process(tmp_path, capsys):
    script = tmp_path / "with_child.py"
    script.write_text(
        'import subprocess, sys\nchild = subprocess.Popen(["sleep", "1000"])\nprint(child.pid)\n'
    )
    assert run_program([sys.executable, str(script)], 1) == 0
    child = int(capsys.readouterr().out.split()[-1])
    assert not gone(child)
    os.kill(child, signal.SIGKILL)


# -- functions -------------------------------------------------------------------------------------


def end_as(ends, folder):
    """End as the word of this process says, and return after all that are lost."""
    rank = fs.mesh.process_index()
    Path(folder, f"{rank}.new").write_text(str(os.getpid()))
    os.rename(Path(folder, f"{rank}.new"), Path(folder, str(rank)))
    wait_until(lambda: started(folder, len(ends)))
    pids = dict(zip(range(len(ends)), started(folder, len(ends)), strict=True))
    match ends[rank]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(0)
        case "raise":
            raise KeyError("mine")
        case "raise last":
            # Those that have returned still live: they wait for the end of the call.
            time.sleep(0.5)
            raise KeyError("mine")
        case "stay":
            time.sleep(1000)
        case "wait":
            lost = [pids[other] for other, end in enumerate(ends) if end not in ("wait", "stay")]
            wait_until(lambda: all(map(gone, lost)))
    return rank


def test_launch_elastic_returns_the_results_of_those_that_returned(tmp_path, capsys):
    ends = ["kill", "wait", "raise", "exit", "wait"]
    assert fs.launch(wrapped(end_as), ends, tmp_path, processes=5, elastic=True) == [1, 4]
    alas = capsys.readouterr().err
    assert re.search(r"^process 0 of 5 was killed by SIGKILL, .*; \d are running\.$", alas, re.M)
    assert re.search(r"^process 2 of 5 failed with this error; \d are running\.$", alas, re.M)
    assert re.search(r"^process 3 of 5 ended with exit code 0, before .*; \d", alas, re.M)
    assert "    raise KeyError" in alas and alas.count("running") == 3
    assert all(map(gone, started(tmp_path, 5)))


def test_launch_elastic_raises_what_ended_it(tmp_path):
    (first := tmp_path / "first").mkdir()
    with pytest.raises(RuntimeError, match=r"process \d of 2 was killed by SIGKILL"):
        fs.launch(wrapped(end_as), ["kill", "kill"], first, processes=2, elastic=True)
    (second := tmp_path / "second").mkdir()
    with pytest.raises(KeyError, match="mine"):
        fs.launch(wrapped(end_as), ["", "raise last"], second, processes=2, elastic=True)


def test_launch_elastic_is_late_if_a_survivor_does_not_finish(tmp_path):
    with pytest.raises(RuntimeError, match=r"^process 0 of 2 did not finish .* within 2 s"):
        fs.launch(wrapped(end_as), ["stay", "kill"], tmp_path, processes=2, elastic=True, timeout=2)


def lose_the_last():
    """Wait for process 2, which is killed; return the name of the error."""
    mesh = fs.make_mesh({"data": 3})
    if fs.mesh.process_index() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(LostProcessError) as error:
        fs.run(lambda: fs.psum(torch.ones(2), "data"), mesh=mesh)
    return error.typename


def count_processes():
    mesh = fs.make_mesh({"data": 3})
    return fs.run(lambda: fs.psum(torch.tensor(1), "data"), mesh=mesh)[0].item()


def test_elastic_pool_has_all_processes_again_in_the_next_call():
    with Processes(3, elastic=True) as pool:
        assert pool.run(lose_the_last) == ["LostProcessError"] * 2
        assert pool.run(count_processes) == [3] * 3
        assert pool.run_last(lose_the_last) == ["LostProcessError"] * 2


def test_launch_elastic_misuse_raises():
    with pytest.raises(MeshError, match="elastic must be True or False; got 3"):
        fs.launch(count_processes, processes=3, elastic=3)
