"""Links from documents to files of the repository: to notebooks as to their copies, to others as the file's path."""

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r'(?<!!)\[([^\]\n"]*)\]\(((?!\w+:|#|/)[^)\s#"]+)(#[^)\s"]*)?\)')


def replace_links(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace links to existing files outside the site by their text; pages link to notebooks where the site has them.

    A link to a file that does not exist stays, so that the build reports it.
    """
    origin = "notebooks" if docname.startswith("notebooks/") else f"docs/{docname}"
    folder = ROOT / origin if origin == "notebooks" else (ROOT / origin).parent

    def replace(match: re.Match[str]) -> str:
        text, target, _ = match.groups()
        path = (folder / target).resolve()
        is_notebook = path.parent == ROOT / "notebooks"
        if is_notebook and origin != "notebooks":
            return match[0].replace(target, f"/notebooks/{path.name}")
        outside = (
            path.exists() and not path.is_relative_to(ROOT / "docs") and not is_notebook
        )
        return text if outside else match[0]

    source[0] = LINK.sub(replace, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", replace_links)
    return {"parallel_read_safe": True}
