"""Write the version and the address of the repository where texts repeat them.

    python .ci/release.py             after a change of `version` or `[project.urls]` in pyproject.toml

Both stand in pyproject.toml alone. CITATION.cff repeats the version and the address; each notebook
gets a link that opens it in Colab, of the tag of the release. Without an address there is none.
"""

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLAB = "https://colab.research.google.com/github"


def main() -> None:
    """Write the files."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    repository = project.get("urls", {}).get("Repository", "")
    citation = ROOT / "CITATION.cff"
    text = citation.read_text(encoding="utf-8")
    citation.write_text(cited(text, project["version"], repository), encoding="utf-8")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        first = notebook["cells"][0]
        opened = with_button(first["source"], path.name, project["version"], repository)
        if first["cell_type"] == "markdown" and opened != first["source"]:
            first["source"] = opened
            text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
            path.write_text(text, encoding="utf-8")


def cited(text: str, version: str, repository: str) -> str:
    """Return the text of CITATION.cff with a version and an address.

    >>> cited("version: 0.1.0\\n", "0.2.0", "https://example.org/a/b")
    'version: 0.2.0\\nrepository-code: https://example.org/a/b\\n'
    """
    text = re.sub(r"^repository-code: .*\n", "", text, flags=re.MULTILINE)
    lines = f"version: {version}\n"
    if repository:
        lines += f"repository-code: {repository}\n"
    return re.sub(r"^version: .*\n", lines, text, flags=re.MULTILINE)


def with_button(source: list[str], name: str, version: str, repository: str) -> list[str]:
    """Return the lines of a notebook's first cell, with a link to Colab above them.

    >>> with_button(["# Meshes"], "01.ipynb", "0.1.0", "https://github.com/a/b")[0]
    '[Open in Colab](https://colab.research.google.com/github/a/b/blob/v0.1.0/notebooks/01.ipynb)\\n'
    >>> with_button(["[Open in Colab](...)\\n", "\\n", "# Meshes"], "01.ipynb", "0.1.0", "")
    ['# Meshes']
    """
    lines = [*source]
    if lines and lines[0].startswith("[Open in Colab]"):
        lines = lines[2:]
    host = "https://github.com/"
    if not repository.startswith(host):
        return lines
    path = f"{repository.removeprefix(host)}/blob/v{version}/notebooks/{name}"
    return [f"[Open in Colab]({COLAB}/{path})\n", "\n", *lines]


if __name__ == "__main__":
    main()
