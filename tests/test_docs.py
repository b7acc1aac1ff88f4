"""The blocks of every guide run in order, and print what the guide shows.

As a script, this file writes the outputs.

READMEs of folders name what exists; code on pages fits a column.
"""

import json
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.helpers.examples import python_blocks, run_block

ROOT = Path(__file__).resolve().parents[1]
GUIDES = [ROOT / "docs/index.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
FOLDERS = sorted((ROOT / "fshard").glob("*/README.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *FOLDERS,
    *sorted((ROOT / "docs").glob("**/*.md")),
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
# A Python block, and the text block that follows it directly.
SHOWN = re.compile(
    r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", flags=re.MULTILINE | re.DOTALL
)


def outputs(guide):
    """Run the blocks of a guide; return what each prints and what the guide shows."""
    torch.manual_seed(0)
    text = guide.read_text()
    names = {"__name__": "guide"}
    actual = SHOWN.findall(text)
    assert [block for block, _ in actual] == python_blocks(text)
    with mock.patch.dict(os.environ):
        return [(run_block(block, names, guide), shown) for block, shown in actual]


def without_trailing_spaces(text):
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch itself uses it in its first jvp
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # read by Dynamo
@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_guide_prints_what_it_shows(guide):
    for printed, shown in outputs(guide):
        assert without_trailing_spaces(printed) == without_trailing_spaces(shown)


def test_code_of_pages_is_at_most_92_columns_wide():
    blocks = [(page.name, *block) for page in PAGES for block in FENCED.findall(page.read_text())]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                blocks.append((path.name, "python", "".join(cell["source"])))
    wide = []
    for name, kind, block in blocks:
        if kind != "text":
            wide += [(name, line) for line in block.splitlines() if len(line) > 92]
    assert wide == []


@pytest.mark.parametrize("page", FOLDERS, ids=lambda page: page.parent.name)
def test_readme_of_a_folder_names_files_and_names_that_exist(page):
    text = page.read_text()
    assert text.count("\n") <= 40

    for file in re.findall(r"`((?:\.\./)*[a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", text):
        assert (page.parent / file).exists() or (ROOT / "fshard" / file).exists(), file

    source = "\n".join(path.read_text() for path in (ROOT / "fshard").rglob("*.py"))
    for dotted_name in re.findall(r"`([A-Za-z_.]+)`", text):
        if "py" not in dotted_name:
            for name in dotted_name.split("."):
                assert re.search(rf"\b{name}\b", source), name

    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


if __name__ == "__main__":
    for guide in GUIDES:
        printed = iter(without_trailing_spaces(text) for text, _ in outputs(guide))

        def with_output(match, printed=printed):
            text = next(printed)
            return f"```python\n{match[1]}```\n" + (f"\n```text\n{text}\n```\n" if text else "")

        guide.write_text(SHOWN.sub(with_output, guide.read_text()), encoding="utf-8")
