"""Colours of shards: eleven fills with contrast to dark text, to white and to black.

Eleven is a prime that hardly any mesh is a multiple of, so a shard and its neighbour below differ
in colour at any width of the grid.
"""

from __future__ import annotations

FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
INK = "#16191d"
MUTED = 0.75  # opacity of the page's text colour, for words outside the cells
_FILLS = (
    "#7cb7e8",  # blue
    "#f4b06a",  # orange
    "#86cf91",  # green
    "#ee9aa7",  # rose
    "#b9a4ea",  # violet
    "#e3cf62",  # yellow
    "#6fcdc6",  # teal
    "#e39bd3",  # pink
    "#c3b091",  # sand
    "#a8d05f",  # lime
    "#a9b8c6",  # steel
)


def fill(shard: int) -> str:
    """Return the colour of a shard.

    >>> fill(0), fill(11) == fill(0)
    ('#7cb7e8', True)
    """
    return _FILLS[shard % len(_FILLS)]
