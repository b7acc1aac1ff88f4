"""The pages that a stranger meets first agree with the code, and their links lead somewhere.

The oracles are `__all__` of the packages, the files of the tree, and the schemas of what others read.
"""

import ast
import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import fshard as fs

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (.+?) \| (stable|settling|open) \| (.*?)\|$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)")


# -- links ------------------------------------------------------------------------------

PLACES = (
    "*.md",
    "docs/**/*.md",
    "notebooks/*.ipynb",
    "examples/**/*.md",
    "fshard/**/*.md",
    ".github/**/*.md",
)


def pages():
    """Return the pages of the tree, without the copies of notebooks that a build of the site makes."""
    found = []
    for place in PLACES:
        found += ROOT.glob(place)
    return [path for path in sorted(found) if path.parent != ROOT / "docs/notebooks"]


def texts_of(path):
    """Return the texts with links of a Markdown file or a notebook."""
    if path.suffix != ".ipynb":
        return [path.read_text(encoding="utf-8")]
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]


def anchors_of(path):
    """Return the anchors of the headings of a page, as GitHub and Sphinx make them."""
    text = path.read_text(encoding="utf-8")
    anchors = {*re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE)}  # named by the page
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower().strip("`"))
        anchors.add(words.replace(" ", "-"))
    return anchors


def broken_links(page):
    """Return the local links of a page that lead to no file, or to no heading."""
    broken = []
    for text in texts_of(page):
        for link in LINK.findall(CODE.sub("", text)):
            if re.match(r"\w+:", link):
                continue
            file, _, anchor = link.partition("#")
            target = (page.parent / file) if file else page
            is_heading = target.suffix == ".md" and anchor
            if not target.exists() or (is_heading and anchor not in anchors_of(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    return broken


def test_local_links_lead_to_files_and_headings():
    broken = []
    for page in pages():
        broken += broken_links(page)
    assert broken == []


# -- what is stable, what the environment decides ---------------------------------------


def rows_of_stable():
    """Return {name of the first column: names that are exceptions} of the page."""
    text = (ROOT / "docs/stable.md").read_text(encoding="utf-8")
    return {first: re.findall(r"`(\w+)`", third) for first, _, third in ROW.findall(text)}


def test_page_of_what_is_stable_has_each_public_package_and_its_names():
    rows = rows_of_stable()
    modules = {name for name in fs.__all__ if isinstance(getattr(fs, name), ModuleType)}
    packages = modules | {"plan", "testing"}
    assert {row for row in rows if row.startswith("`")} == {f"`fs.{name}`" for name in packages}
    for name in packages:
        public = importlib.import_module(f"fshard.{name}").__all__
        assert [x for x in rows[f"`fs.{name}`"] if x not in public] == [], name


def test_page_of_what_is_stable_has_each_group_of_public_names():
    source = (ROOT / "fshard/__init__.py").read_text(encoding="utf-8")
    groups = {}
    for line in source.partition("__all__ = [")[2].partition("]")[0].splitlines():
        words = line.strip()
        if words.startswith("# "):
            group = groups.setdefault(words[2:], [])
        elif words:
            group.append(ast.literal_eval(words.rstrip(",")))
    rows = rows_of_stable()
    assert [row for row in rows if not row.startswith("`")] == list(groups)
    for name, public in groups.items():
        assert [x for x in rows[name] if x not in public] == [], name


def test_page_of_environment_variables_has_those_that_the_library_reads():
    read = set()
    for path in (ROOT / "fshard").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        read |= set(re.findall(r"environ(?:\.get\(|\[)\"(FSHARD_\w+)", source))
    page = (ROOT / "docs/environment.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(FSHARD_\w+)`", page, re.MULTILINE)) == read


# -- the moving picture -----------------------------------------------------------------


def test_moving_picture_is_that_of_a_step_that_runs():
    """`python docs/images/step.py` writes it again."""
    names = {"__name__": "step", "__file__": str(ROOT / "docs/images/step.py")}
    source = (ROOT / "docs/images/step.py").read_text(encoding="utf-8")
    exec(compile(source, "step.py", "exec", dont_inherit=True), names)
    assert (ROOT / "docs/images/step.svg").read_text(encoding="utf-8") == names["picture"]()
