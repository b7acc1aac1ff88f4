"""Pictures of a bare `Sharded`, `Mesh` or `Layout` at the end of a notebook's cell."""

from __future__ import annotations

from html import escape
from typing import Any

from fshard.explore.picture import picture
from fshard.mesh.layout import Layout, Mesh
from fshard.mesh.layout.sharded import Sharded


def register() -> None:
    """Give fshard's values the method by which notebooks show a picture.

    IPython is never imported.
    """
    methods: dict[Any, Any] = {
        Sharded: _picture_of,
        Mesh: _picture_of,
        Layout: _picture_of_layout,
    }
    for kind, method in methods.items():
        kind._repr_html_ = method


def _picture_of(x: Sharded | Mesh) -> str:
    return picture(x)._repr_html_()  # pyright: ignore[reportPrivateUsage]


def _picture_of_layout(layout: Layout) -> str:
    """Return the layout in words, and the picture of its mesh: a layout has no shape."""
    return f"<div><code>{escape(repr(layout))}</code></div>{_picture_of(layout.mesh)}"
