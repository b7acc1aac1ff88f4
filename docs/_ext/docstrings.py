"""Docstrings of fshard as reStructuredText, and references between public names.

A docstring is plain text: paragraphs, code in single backticks, doctests, and aligned tables. A paragraph with aligned
columns or an indent becomes a literal block; markup characters outside backticks are escaped.
"""

import importlib
import re
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

NAMESPACES = [
    "",
    ".errors",
    ".explore",
    ".mesh",
    ".nn",
    ".optim",
    ".pipeline",
    ".report",
    ".tensor",
    ".testing",
]
COLUMNS = re.compile(r"\S {2,}(?=\S)")
SENTENCE = re.compile(r"([.:;!?]) {2,}")
LISTED = re.compile(r"\s*([-*]|\d+\.) ")


def public_names() -> dict[str, str]:
    """Return the documented full name of each public name, the shortest of several."""
    found: dict[str, str] = {}
    for namespace in reversed(NAMESPACES):
        module = importlib.import_module(f"fshard{namespace}")
        found |= {name: f"{module.__name__}.{name}" for name in module.__all__}
    return found


def convert_inline(text: str) -> str:
    """Escape markup characters outside backticks and double the backticks around code."""
    parts = re.split(r"(`+[^`]+`+)", text)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f"``{part.strip('`')}``"
            if i + 1 < len(parts) and re.match(r"\w", parts[i + 1]):
                parts[i] += "\\ "  # `f`s
        else:
            parts[i] = re.sub(r"([*|\\]|_(?=\W|$))", r"\\\1", part)
    return "".join(parts)


def convert_paragraph(lines: list[str]) -> list[str]:
    """Convert lines between two blank lines."""
    if lines[0].lstrip().startswith(">>>"):
        return lines
    if lines[0].rstrip() in ("Args:", "Returns:", "Raises:", "Yields:"):  # for napoleon
        return [convert_inline(line) for line in lines]
    aligned = any(COLUMNS.search(SENTENCE.sub(r"\1 ", line.strip())) for line in lines)
    if not LISTED.match(lines[0]) and (
        aligned or any(line.startswith(" ") for line in lines)
    ):
        return ["::", "", *(f"    {line}" for line in lines)]
    if LISTED.match(lines[0]):
        return [convert_inline(line) if not LISTED.match(line) else line for line in lines]
    return [convert_inline(line) for line in lines]


def convert(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Convert a docstring in place."""
    converted: list[str] = []
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            converted += [*convert_paragraph(paragraph), ""]
            paragraph = []
    lines[:] = converted


def exists(target: str) -> bool:
    """Return True if a dotted name can be imported, or is the last part of one: an annotation."""
    if not target.startswith("fshard."):
        return True  # torch, typing, collections.abc: their inventories are not available offline
    module, _, name = target.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element
) -> nodes.Node | None:
    """Link a type in an annotation to the public name of its class; leave other existing types as text."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    public = public_names().get(target.rpartition(".")[2])
    objects = env.domains["py"].data["objects"]
    if public in objects and (target.startswith("fshard.") or "." not in target):
        entry = objects[public]
        return make_refnode(
            app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, public
        )
    return contnode if exists(target) else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("autodoc-process-docstring", convert, priority=400)  # before napoleon
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
