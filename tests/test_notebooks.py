"""Every notebook runs from top to bottom, in a namespace of its own.

A start of Python with torch takes longer than the cells of most notebooks: the notebooks of one
worker of pytest share a kernel, and its names are deleted in between.  As a script, this file
writes the outputs back, each from a fresh kernel.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import pytest
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

from fshard.testing.exercises import TOPICS, exercises

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(notebook, folder, kernel=None):
    """Run all cells in `folder`, in a kernel that runs or in a fresh one; store their outputs.

    A cell may fail only if it is tagged `raises-exception`.
    """
    client = NotebookClient(
        notebook,
        km=kernel,
        timeout=300,
        record_timing=False,  # so that running a notebook again changes only what it prints
        coalesce_streams=True,
        resources={"metadata": {"path": folder}},
    )
    try:
        client.execute()
    finally:
        if kernel is not None:  # which the client leaves running, with its own sockets open
            client.kc.stop_channels()


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelManager]:
    """A kernel for all notebooks of this worker."""
    manager, client = start_new_kernel(kernel_name="python3")
    client.stop_channels()
    yield manager
    manager.shutdown_kernel(now=True)


def forget(kernel, folder):
    """Delete the names of the notebook before, and go to the folder of the next."""
    source = f"""
        %reset -f
        %xmode Context
        import os
        os.chdir({str(folder)!r})
        del os
        __spec__ = None  # as in a fresh kernel: who pickles a function of a cell looks for it
    """
    cell = nbformat.v4.new_code_cell(source)
    execute(nbformat.v4.new_notebook(cells=[cell]), folder, kernel)


def tame_cells(notebook):
    """Find the cells that are tagged `raises-exception` and raise none."""
    tagged = [
        cell for cell in notebook.cells if "raises-exception" in cell.metadata.get("tags", [])
    ]
    return [
        cell.source
        for cell in tagged
        if all(output.output_type != "error" for output in cell.outputs)
    ]


def test_notebooks_exist():
    assert NOTEBOOKS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, kernel):
    notebook = nbformat.read(path, as_version=4)
    forget(kernel, tmp_path)

    execute(notebook, tmp_path, kernel)

    assert not tame_cells(notebook), "these cells promise an error that does not come"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_opens_with_a_question_and_a_picture_that_installs(path):
    question, install, picture, intro = nbformat.read(path, as_version=4).cells[:4]

    assert re.fullmatch(r"# .+\n\n\*\*.+\?\*\*", question.source)
    assert '%pip install -q "fshard[notebooks]"' in install.source
    assert picture.source.startswith("import fshard as fs\n")
    assert re.search(r"\*\d+ minutes .+ Afterwards you can .+\.\*$", intro.source)


@pytest.mark.parametrize(
    ("path", "topic"),
    list(zip(NOTEBOOKS, TOPICS, strict=True)),
    ids=TOPICS,
)
def test_notebook_has_the_exercises_of_its_topic_in_order(path, topic):
    cells = nbformat.read(path, as_version=4).cells
    source = "\n".join(cell.source for cell in cells if cell.cell_type == "code")

    names = re.findall(r'fs\.testing\.exercise\("([a-z_.]+)"\)', source)

    assert names == [one.name for one in exercises(topic)]
    assert 3 <= len(names) <= 5
    assert source.count("exercise.check(") == len(names)


def test_path_of_the_docs_has_the_minutes_of_all_notebooks():
    page = (ROOT / "docs" / "learn.md").read_text()
    path = page.partition("## Then")[0]
    row = re.compile(r"\(\.\./notebooks/(\w+)\.ipynb\) \| (\d+) \|")
    minutes = {name: int(number) for name, number in row.findall(page)}

    for notebook in NOTEBOOKS:
        source = notebook.read_text()
        assert f"*{minutes[notebook.stem]} minutes with the exercises" in source, notebook.stem
    assert sum(map(int, re.findall(r"\| (\d+) \|", path))) == 180
    assert len(minutes) == len(NOTEBOOKS)


def anonymous(text):
    """Cut off where this machine keeps the repository and Python: tracebacks name their files."""
    for folder in (str(ROOT), sys.base_prefix):
        for form in (folder, folder.replace(str(Path.home()), "~")):
            text = text.replace(f"{form}/", "")
    return text


if __name__ == "__main__":
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        with TemporaryDirectory() as folder:
            execute(notebook, folder)
        path.write_text(anonymous(nbformat.writes(notebook)) + "\n", encoding="utf-8")
