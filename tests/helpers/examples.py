"""Examples, run as a user would, and what they print."""

import io
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def printed(example, *options):
    """Run an example; return what it prints."""
    file = EXAMPLES / example
    before = sys.argv, sys.path
    sys.argv = [str(file), *options]
    sys.path = [str(file.parent), *sys.path]  # as Python does, for the modules beside a program
    try:
        with redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(file), run_name="__main__")
    finally:
        sys.argv, sys.path = before
    return out.getvalue()


def losses(text):
    """Return the losses of the steps that are shown, as they stand there."""
    return re.findall(r"step +\d+ +loss (\S+)", text)


def python_blocks(text):
    """Return the Python blocks of a Markdown text."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def run_block(block, names, file):
    """Run a block with the names of those before it; return what it prints."""
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(block, str(file), "exec"), names)
    return out.getvalue()
