"""The blocks of every guide run in order, and print what the guide shows. As a script, this file writes the outputs."""

import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.examples import python_blocks, run_block

GUIDES = sorted((Path(__file__).resolve().parents[1] / "docs" / "guides").glob("*.md"))
# A Python block, and the text block that follows it directly.
SHOWN = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", flags=re.MULTILINE | re.DOTALL)


def outputs(guide):
    """Run the blocks of a guide; return what each prints and what the guide shows."""
    torch.manual_seed(0)
    text, names = guide.read_text(), {"__name__": "guide"}
    found = SHOWN.findall(text)
    assert [block for block, _ in found] == python_blocks(text)
    with mock.patch.dict(os.environ):
        return [(run_block(block, names, guide), shown) for block, shown in found]


def without_trailing_spaces(text):
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch itself uses it in its first jvp
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by Dynamo
@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_guide_prints_what_it_shows(guide):
    for printed, shown in outputs(guide):
        assert without_trailing_spaces(printed) == without_trailing_spaces(shown)


if __name__ == "__main__":
    for guide in GUIDES:
        printed = iter(without_trailing_spaces(text) for text, _ in outputs(guide))

        def with_output(match, printed=printed):
            text = next(printed)
            return f"```python\n{match[1]}```\n" + (f"\n```text\n{text}\n```\n" if text else "")

        guide.write_text(SHOWN.sub(with_output, guide.read_text()), encoding="utf-8")
