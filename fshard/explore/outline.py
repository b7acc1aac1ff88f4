"""A tree as an outline: in a terminal by rich, in a notebook as lists with pictures of the leaves.

Every line is a name, a type or a class, and bytes. Both formats have the same plan and text.
"""

from __future__ import annotations

from html import escape

from rich.text import Text
from rich.tree import Tree

from fshard.explore.grid import plan_grid
from fshard.explore.inventory import Branch, Bytes, Leaf, TreeEntry, bytes_of, meshes_of
from fshard.explore.palette import FONT, MUTED
from fshard.explore.svg import html_of
from fshard.tables import byte_text

_MOST = 40  # children of one branch that are listed
_STYLE = f"font-family:{FONT};font-size:12px;line-height:1.6;overflow-x:auto;white-space:nowrap"


def tree_of(root: Branch) -> Tree:
    """Draw a tree for a terminal."""
    tree = Tree(Text(total(root), "bold"), guide_style="dim")
    _grow(tree, root)
    return tree


def _grow(tree: Tree, branch: Branch) -> None:
    for entry in branch.entries[:_MOST]:
        style_of_type = "cyan" if isinstance(entry.node, Leaf) else "dim"
        texts = [
            Text(_name(entry), "bold"),
            Text(_type_name(entry.node), style_of_type),
            Text(amount(bytes_of(entry.node))),
        ]
        child = tree.add(Text("  ").join(text for text in texts if text))
        if isinstance(entry.node, Branch):
            _grow(child, entry.node)
    more = _more(branch)
    if more:
        tree.add(Text(more, "dim"))


def outline_of(root: Branch) -> str:
    """Draw a tree for a notebook, as HTML."""
    summary = f"<b>{escape(total(root))}</b>"
    return f'<div style="{_STYLE}">{_opened(summary, _inside(root), indent=0.0)}</div>'


def _inside(branch: Branch) -> str:
    items: list[str] = []
    for entry in branch.entries[:_MOST]:
        node = entry.node
        held = escape(amount(bytes_of(node)))
        words = (
            f"<b>{escape(_name(entry))}</b> <span>{escape(_type_name(node))}</span> "
            f'<span style="opacity:{MUTED}">{held}</span>'
        )
        if isinstance(node, Branch):
            items.append(_opened(words, _inside(node), indent=1.2))
        elif node.type is None or node.layout is None:
            items.append(f'<div style="margin-left:2.4em">{words}</div>')
        else:
            drawn = html_of(plan_grid(node.type, node.layout.mesh))
            closed = f"<summary>{words}</summary>{drawn}"
            items.append(f'<details style="margin-left:1.2em">{closed}</details>')
    more = _more(branch)
    if more:
        items.append(f'<div style="margin-left:2.4em;opacity:{MUTED}">{escape(more)}</div>')
    return "".join(items)


def _opened(summary: str, inside: str, *, indent: float) -> str:
    style = f"margin-left:{indent:g}em"
    return f'<details open style="{style}"><summary>{summary}</summary>{inside}</details>'


def _name(entry: TreeEntry) -> str:
    return entry.name if entry.count == 1 else f"{entry.name} {entry.count} x"


def _type_name(node: Leaf | Branch) -> str:
    if isinstance(node, Branch):
        return node.kind
    return node.text if node.type is None else str(node.type)


def _more(branch: Branch) -> str:
    """Return the line of the children that are not listed; "" if all are."""
    hidden_entries = branch.entries[_MOST:]
    if not hidden_entries:
        return ""
    hidden = Branch(branch.kind, hidden_entries)
    return f"… {len(hidden_entries):,} more  {amount(bytes_of(hidden))}"


def total(root: Branch) -> str:
    """Return the line above a tree: its bytes and mesh."""
    held = amount(bytes_of(root)) or "0 B"
    line = f"{root.kind}, in all {held}"
    meshes = meshes_of(root)
    if meshes:
        line += f" · {' and '.join(map(str, meshes))}"
    return line


def amount(held: Bytes) -> str:
    """Print the bytes of a subtree, on the fullest device.

    >>> amount(Bytes(total=4096, device=1024)), amount(Bytes(total=12, unplaced=12))
    ('4.0 KiB, 1.0 KiB per device', '12 B, on no mesh')
    """
    if not held.total:
        return ""
    texts = [byte_text(held.total)]
    if held.device:
        texts.append(f"{byte_text(held.device)} per device")
    if held.host:
        texts.append(f"{byte_text(held.host)} per device in host memory")
    if held.disk:
        texts.append(f"{byte_text(held.disk)} per device on disk")
    if held.unplaced == held.total:
        texts.append("on no mesh")
    elif held.unplaced:
        texts.append(f"{byte_text(held.unplaced)} on no mesh")
    return ", ".join(texts)
