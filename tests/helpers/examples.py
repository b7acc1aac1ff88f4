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
    file = str(EXAMPLES / example)
    before, sys.argv = sys.argv, [file, *options]
    try:
        with redirect_stdout(io.StringIO()) as out:
            runpy.run_path(file, run_name="__main__")
    finally:
        sys.argv = before
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
