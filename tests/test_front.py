"""The pages that a stranger meets first agree with the code, and their links lead somewhere.

The oracles are `__all__` of the packages, the files of the tree, and the schemas of what others read.
"""

import ast
import importlib
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

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


# -- code in lines of text --------------------------------------------------------------


def expressions_of(page):
    """Return the code in a page's lines of text that is a call with names of the library alone."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = []
    for code in re.findall(r"`([^`]+)`", text):
        try:
            tree = ast.parse(code, mode="eval")
        except SyntaxError:
            continue
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if isinstance(tree.body, ast.Call) and names <= {"fs", "P"}:
            found.append(code)
    return found


def test_calls_in_the_text_of_the_readme_run():
    found = expressions_of(ROOT / "README.md")
    assert "fs.Booster(plugin=fs.FSDPPlugin())" in found
    for code in found:
        eval(code, {"fs": fs, "P": fs.P})  # raises if the call is not legal


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


# -- what other programs read -----------------------------------------------------------


def read_yaml(path):
    yaml = pytest.importorskip("yaml")  # comes with the extra `docs`
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_citation_is_valid_and_of_this_version():
    """The keys and values that the format 1.2.0 requires; `python .ci/release.py` writes others."""
    citation = read_yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert all(set(author) == {"name"} for author in citation["authors"])
    assert str(citation["version"]) == project()["version"]
    assert citation["license"] == project()["license"]
    repository = project().get("urls", {}).get("Repository")
    assert citation.get("repository-code") == repository


@pytest.mark.parametrize("name", ["ci", "nightly"])
def test_workflow_runs_commands_that_exist(name):
    workflow = read_yaml(f".github/workflows/{name}.yml")
    triggers = workflow[True]  # YAML 1.1 reads `on` as true
    assert triggers.keys() <= {"push", "pull_request", "schedule", "workflow_dispatch"}
    commands = []
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] and job["runs-on"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            commands += step.get("run", "").splitlines()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in commands:
        if match := re.search(r"\bmake ([\w-]+)", command):
            assert match[1] in targets
        if command.startswith(".ci/"):
            assert (ROOT / command).exists()


def test_workflow_tests_the_pythons_that_the_package_allows():
    matrix = read_yaml(".github/workflows/ci.yml")["jobs"]["run"]["strategy"]["matrix"]
    assert f">={matrix['python'][0]}" == project()["requires-python"]


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_form_has_fields_with_names_of_their_own(name):
    form = read_yaml(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert form["name"] and form["description"]
    kinds = {field["type"] for field in form["body"]}
    assert kinds <= {"markdown", "input", "textarea", "dropdown", "checkboxes"}
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names))
    assert all(field["attributes"]["label"] for field in form["body"])


def test_bug_form_asks_for_the_doctor_and_a_program():
    form = read_yaml(".github/ISSUE_TEMPLATE/bug.yml")
    required = {x["id"] for x in form["body"] if x.get("validations", {}).get("required")}
    assert {"doctor", "program"} <= required
