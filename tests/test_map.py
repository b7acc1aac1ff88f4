"""The map of `fshard/README.md` and the walk of CONTRIBUTING name what is there, where it is.

The oracle is the syntax tree of the files that they name.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fshard"
ROW = re.compile(r"^\| \[(\w+)\]\((\S+)\) \| (.+?) \| (.+?) \| `(\S+)` \|$", re.MULTILINE)
LINK = re.compile(r"\[`([\w.]+)`\]\((fshard/[\w/]+\.py)#L(\d+)\)")


def rows_of_map():
    """Return (package, link, main names, file to read first) of each row of the map."""
    text = (PACKAGE / "README.md").read_text()
    rows = []
    for package, link, _, names, first in ROW.findall(text):
        rows.append((package, link, re.findall(r"`(\w+)`", names), first))
    return rows


def lines_of_definitions(path):
    """Return the line of each function and class of a file, by its qualified name."""
    lines = {}

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                lines[prefix + child.name] = child.lineno
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(path.read_text()), "")
    return lines


def test_map_has_each_package_once():
    packages = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert sorted(package for package, *_ in rows_of_map()) == sorted(packages)


@pytest.mark.parametrize(("package", "link", "names", "first"), rows_of_map())
def test_map_names_what_a_package_defines(package, link, names, first):
    assert (PACKAGE / link).exists() and first.startswith(f"{package}/")
    assert (PACKAGE / first).exists()
    defined = set()
    for path in (PACKAGE / package).rglob("*.py"):
        defined |= lines_of_definitions(path).keys()
    assert 2 <= len(names) <= 3 and set(names) <= defined


def test_first_hour_links_lead_to_the_lines_of_their_names():
    """A file that was edited above a link moves it: `python tests/test_map.py` rewrites them."""
    links = LINK.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert links, "CONTRIBUTING has a walk with links"
    wrong = []
    for name, path, line in links:
        expected = lines_of_definitions(ROOT / path).get(name)
        if expected != int(line):
            wrong.append(f"{path}#L{line}: {name} is at line {expected}")
    assert not wrong, "\n".join(wrong)


def test_first_hour_has_at_most_12_files():
    files = {path for _, path, _ in LINK.findall((ROOT / "CONTRIBUTING.md").read_text())}
    assert len(files) <= 12


def test_notes_that_are_cited_exist_once():
    """A law stands in one place, `# Note [Title]`, above the code that must obey it."""
    defined = []
    cited = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        defined += re.findall(r"^ *# Note \[(.+)\]$", text, re.MULTILINE)
        in_one_line = re.sub(r"\n\s*#? *", " ", text)
        cited |= set(re.findall(r"Note \[([^\]]+)\]", in_one_line))
    assert len(defined) == len(set(defined))
    assert cited == set(defined)


def write_lines():
    """Rewrite the lines of the links of CONTRIBUTING."""

    def with_line(link):
        name, path, _ = link.groups()
        return f"[`{name}`]({path}#L{lines_of_definitions(ROOT / path)[name]})"

    page = ROOT / "CONTRIBUTING.md"
    page.write_text(LINK.sub(with_line, page.read_text()))


if __name__ == "__main__":
    write_lines()
