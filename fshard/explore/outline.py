"""A tree as an outline: in a terminal by rich, in a notebook as lists that open, with a picture of every leaf.

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
from fshard.explore.words import size

_MOST = 40  # children of one branch that are listed
_STYLE = f"font-family:{FONT};font-size:12px;line-height:1.6;overflow-x:auto;white-space:nowrap"


def tree_of(root: Branch) -> Tree:
    """Draw a tree for a terminal."""
    tree = Tree(Text(total(root), "bold"), guide_style="dim")
    _grow(tree, root)
    return tree


def _grow(tree: Tree, branch: Branch) -> None:
    for entry in branch.entries[:_MOST]:
        style = "cyan" if isinstance(entry.node, Leaf) else "dim"
        parts = [
            (_name(entry), "bold"),
            (_type_name(entry.node), style),
            (amount(bytes_of(entry.node)), ""),
        ]
        child = tree.add(Text("  ").join(Text(text, style) for text, style in parts if text))
        if isinstance(entry.node, Branch):
            _grow(child, entry.node)
    if more := _more(branch):
        tree.add(Text(more, "dim"))


def outline_of(root: Branch) -> str:
    """Draw a tree for a notebook, as HTML."""
    return f'<div style="{_STYLE}">{_opened(f"<b>{escape(total(root))}</b>", _inside(root), indent=0.0)}</div>'


def _inside(branch: Branch) -> str:
    items = list[str]()
    for entry in branch.entries[:_MOST]:
        node = entry.node
        words = (
            f"<b>{escape(_name(entry))}</b> <span>{escape(_type_name(node))}</span> "
            f'<span style="opacity:{MUTED}">{escape(amount(bytes_of(node)))}</span>'
        )
        if isinstance(node, Branch):
            items.append(_opened(words, _inside(node), indent=1.2))
        elif node.type is None or node.layout is None:
            items.append(f'<div style="margin-left:2.4em">{words}</div>')
        else:
            drawn = html_of(plan_grid(node.type, node.layout.mesh))
            items.append(
                f'<details style="margin-left:1.2em"><summary>{words}</summary>{drawn}</details>'
            )
    if more := _more(branch):
        items.append(f'<div style="margin-left:2.4em;opacity:{MUTED}">{escape(more)}</div>')
    return "".join(items)


def _opened(summary: str, inside: str, *, indent: float) -> str:
    return f'<details open style="margin-left:{indent:g}em"><summary>{summary}</summary>{inside}</details>'


def _name(entry: TreeEntry) -> str:
    return entry.name if entry.count == 1 else f"{entry.name} {entry.count} x"


def _type_name(node: Leaf | Branch) -> str:
    if isinstance(node, Branch):
        return node.kind
    return str(node.type) if node.type is not None else node.text


def _more(branch: Branch) -> str:
    hidden_entries = branch.entries[_MOST:]
    hidden = Branch(branch.kind, hidden_entries)
    return f"… {len(hidden_entries):,} more  {amount(bytes_of(hidden))}" if hidden_entries else ""


def total(root: Branch) -> str:
    """Return the line above a tree: its bytes and mesh."""
    meshes = meshes_of(root)
    where = f" · {' and '.join(map(str, meshes))}" if meshes else ""
    return f"{root.kind}, in all {amount(bytes_of(root)) or '0 B'}{where}"


def amount(held: Bytes) -> str:
    """Print the bytes of a subtree, on the fullest device.

    >>> amount(Bytes(total=4096, device=1024)), amount(Bytes(total=12, unplaced=12))
    ('4.0 KiB, 1.0 KiB per device', '12 B, on no mesh')
    """
    if not held.total:
        return ""
    parts = [size(held.total)]
    parts += [f"{size(held.device)} per device"] if held.device else []
    parts += [f"{size(held.host)} per device in host memory"] if held.host else []
    parts += [f"{size(held.disk)} per device on disk"] if held.disk else []
    if held.unplaced:
        parts.append(
            "on no mesh" if held.unplaced == held.total else f"{size(held.unplaced)} on no mesh"
        )
    return ", ".join(parts)
