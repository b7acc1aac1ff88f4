"""Every notebook runs from top to bottom. As a script, this file also writes the outputs back."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(notebook, folder):
    """Run all cells in place, in `folder`; a cell may fail only if it is tagged `raises-exception`."""
    # Without time stamps, so that running a notebook again changes only what it prints.
    place = {"metadata": {"path": folder}}
    NotebookClient(
        notebook, timeout=300, record_timing=False, coalesce_streams=True, resources=place
    ).execute()


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
def test_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    execute(notebook, tmp_path)
    assert not tame_cells(notebook), "these cells promise an error that does not come"


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
