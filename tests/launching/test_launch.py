"""fs.launch: results in order, errors as they are, whole lines, and no process that outlives the
call.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest
import torch

import fshard as fs
from fshard.launching import travel
from tests.helpers.ended import gone
from tests.helpers.processes import wrapped


def total(scale, add=0.0):
    mesh = fs.make_mesh({"data": fs.mesh.process_count()})
    return fs.run(lambda: fs.psum(torch.tensor(scale), "data") + add, mesh=mesh)[
        0
    ].item(), fs.mesh.process_index()


def test_launch_returns_results_in_rank_order():
    fs.run(
        lambda: fs.psum(torch.randn(200, 200) @ torch.randn(200, 200), "data"),
        mesh=fs.make_mesh({"data": 4}),
    )
    assert fs.launch(wrapped(total), 0.5, processes=3, add=1.0) == [(2.5, 0), (2.5, 1), (2.5, 2)]
    assert fs.launch(wrapped(total), 0.5, processes=1, device="cpu") == [(0.5, 0)]
    assert fs.make_mesh({"data": 4}).runtime == "virtual"


def addresses_of_store():
    """Return the local addresses that listen on the port of the store."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    return [address for address, port in places if int(port, 16) == int(os.environ["MASTER_PORT"])]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_launch_store_listens_on_this_machine_only():
    assert fs.launch(addresses_of_store, processes=1) == [["0100007F"]]


def test_launch_pickles_closures_and_classes_by_value():
    class Unheard(Exception):
        pass

    scale = torch.arange(3.0)

    def scaled(x):
        if x is None:
            raise Unheard("of")
        return [x * scale, Unheard]

    for product, kind in fs.launch(scaled, 2.0, processes=2):
        assert product.equal(2 * scale) and kind is Unheard
    with pytest.raises(Unheard, match="of") as error:
        fs.launch(scaled, None, processes=2)
    assert "in scaled\n    raise Unheard" in error.value.__notes__[0]
    assert fs.launch(lambda: os.environ["OMP_NUM_THREADS"], processes=1) == [
        os.environ.get("OMP_NUM_THREADS", "1")
    ]


def test_launch_without_cloudpickle_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(
        ImportError, match=r"<lambda>.* Install cloudpickle \(pip install cloudpickle"
    ):
        fs.launch(lambda: None, processes=2)
    assert fs.launch(os.getenv, "RANK", processes=2) == ["0", "1"]


def test_launch_pickles_functions_of_the_script_by_value(monkeypatch):
    monkeypatch.setattr(total, "__module__", "__main__")
    assert b"cloudpickle" in travel.by_value((total, (1.0,)))
    assert b"cloudpickle" not in travel.by_value((gone, (1.0,)))


def fail(who, pids):
    mesh = fs.make_mesh({"data": 2})
    Path(pids, str(os.getpid())).touch()
    fs.run(lambda: fs.psum(torch.ones(2), "data"), mesh=mesh)
    if fs.mesh.process_index() == who:
        raise KeyError("mine")
    fs.run(lambda: fs.psum(torch.ones(2), "data"), mesh=mesh)


def test_launch_error_is_raised_and_processes_end(tmp_path):
    with pytest.raises(KeyError, match="mine") as error:
        fs.launch(wrapped(fail), 1, tmp_path, processes=2)
    assert 'in fail\n    raise KeyError("mine")' in error.value.__notes__[0]
    assert any("then process 0 failed:\nLostProcessError" in note for note in error.value.__notes__)
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert len(pids) == 2 and all(map(gone, pids))


# -- what is written -------------------------------------------------------------------------------


def write():
    for number in range(50):
        sys.stdout.write(f"{fs.mesh.process_index()} writes")
        sys.stdout.flush()
        sys.stdout.write(f" {number}\n")
    sys.stderr.write("alas")
    os.write(1, b"from below\n")
    subprocess.run(["echo", "from a child"], check=True)
    sys.stdout.write("long " * 100_000)


def test_launch_output_has_unbroken_lines(capsys):
    fs.launch(write, processes=2)
    said, alas = capsys.readouterr()
    lines = [line for line in said.splitlines() if not line.startswith("long")]
    for index in range(2):
        assert [line for line in lines if line.startswith(str(index))] == [
            f"{index} writes {n}" for n in range(50)
        ]
    assert lines.count("from below") == lines.count("from a child") == 2 and len(lines) == 104
    assert said.count("long ") == 200_000
    assert alas == "alas\nalas\n"


def show_progress():
    sys.stdout.write("half\r")
    sys.stdout.flush()
    time.sleep(0.5)
    return time.monotonic()


def test_launch_output_with_carriage_return_appears_at_once(monkeypatch):
    came = []
    monkeypatch.setattr(sys.stdout, "write", lambda text: came.append((text, time.monotonic())))
    (ended,) = fs.launch(show_progress, processes=1)
    ((text, when),) = came
    assert text == "half\r" and when < ended


# -- where it cannot start -------------------------------------------------------------------------


def nested():
    return fs.launch(total, 1.0, processes=2)


MISUSE = {
    "processes": (
        lambda: fs.launch(nested, processes=2),
        r"this is process \d of 2 .* make the mesh here.*__main__",
    ),
    "devices": (
        lambda: fs.run(nested, mesh=fs.make_mesh({"data": 2})),
        "this code runs on a device of a mesh",
    ),
    "arguments": (
        lambda: fs.launch(3, processes=0, device="tpu", timeout=-1),
        "fn must be a function; got 3; processes must be an integer >= 1; got 0; device must be .*tpu'; timeout must .* -1.",
    ),
}


@pytest.mark.parametrize("name", MISUSE)
def test_launch_misuse_raises(name):
    call, words = MISUSE[name]
    with pytest.raises(fs.errors.MeshError, match=words):
        call()


def square(x):
    return x * x


def with_children():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(square, [1, 2])


def test_launch_processes_may_have_children():
    assert fs.launch(with_children, processes=1) == [[1, 4]]


# -- whole programs --------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
import torch
import fshard as fs

SCALE = torch.full((), 2.0)  # goes along with the function that uses it
print("the script runs")

def main(wait):
    total = fs.run(lambda: fs.psum(SCALE, "data"), mesh=fs.make_mesh({"data": 2}))[0].item()
    print("pid", os.getpid())
    time.sleep(wait)
    return total

fs.run(lambda: fs.psum(SCALE, "data"), mesh=fs.make_mesh({"data": 2}))
print(fs.launch(main, 0, processes=2), flush=True)
fs.launch(main, 1000, processes=2)
"""
ENDS = (signal.SIGINT, signal.SIGKILL)


def test_launch_processes_end_with_the_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    temporary = (
        tempfile.mkdtemp()
    )  # short: it has sockets, whose paths are limited to 107 characters
    command, pipes = (
        [sys.executable, script],
        {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL},
    )
    pipes["env"] = {**os.environ, "TMPDIR": temporary}
    with ExitStack() as stack:
        programs = [
            stack.enter_context(subprocess.Popen(command, text=True, **pipes)) for _ in ENDS
        ]
        stack.callback(
            lambda: [program.kill() for program in programs]
        )  # before they are waited for
        said = [list(islice(program.stdout, 6)) for program in programs]
        for program, how in zip(programs, ENDS, strict=True):
            program.send_signal(how)
            program.wait(60)
    pids = [int(line.split()[1]) for lines in said for line in lines if line.startswith("pid")]
    for program, how, lines in zip(programs, ENDS, said, strict=True):
        assert program.returncode == -how
        assert lines[0] == "the script runs\n" and lines[3] == "[4.0, 4.0]\n"
    until = time.monotonic() + 60
    while not all(map(gone, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(pids) == 8 and all(map(gone, pids))
    os.rmdir(temporary)  # nothing is left in it


CELLS = [
    "import torch, fshard as fs\nscale = torch.ones(3)",
    """
def total(add):
    print("process", fs.mesh.process_index())
    return fs.run(lambda: fs.psum(scale, "data") + add, mesh=fs.make_mesh({"data": 2}))[0].tolist()

fs.launch(total, 1.0, processes=2)
""",
    "import json\njson.dumps(fs.launch(lambda: fs.mesh.process_index(), processes=2))",
]


def test_launch_in_a_notebook_shows_output(tmp_path):
    # Processes import this file, too, and these packages take them longer than all else.
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    place = {"metadata": {"path": tmp_path}}
    NotebookClient(notebook, timeout=120, coalesce_streams=True, resources=place).execute()
    _, launching, again = notebook.cells
    shown = [output.text for output in launching.outputs if output.output_type == "stream"]
    assert sorted("".join(shown).splitlines()) == ["process 0", "process 1"]
    (result,) = [output for output in launching.outputs if output.output_type == "execute_result"]
    assert json.loads(result.data["text/plain"]) == [[3.0, 3.0, 3.0]] * 2
    assert again.outputs[0].data["text/plain"] == "'[0, 1]'"
