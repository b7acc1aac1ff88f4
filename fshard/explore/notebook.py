"""Pictures of a bare `Sharded` or `Mesh` at the end of a notebook's cell."""

from __future__ import annotations

import sys
from typing import Any

from fshard.explore.picture import picture
from fshard.mesh.layout import Mesh
from fshard.mesh.layout.sharded import Sharded


def register() -> None:
    """Let the IPython shell that runs, if any, show fshard's values as pictures. IPython is never imported."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    html = shell.display_formatter.formatters["text/html"]
    for kind in (Sharded, Mesh):
        html.for_type(kind, lambda x: picture(x)._repr_html_())  # pyright: ignore[reportPrivateUsage]
