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

# Colours of a timeline and of the memory below. Those of one chart are at least 20 units of CIE Lab
# apart, and no colour is in both, also as seen with one kind of cones less; all
# contrast with a light and a dark page: tests/explore/test_palette.py.
COMPUTE = ("#0072b2", "#56b4e9")
"""Matrix products, and other operations."""
NETWORKS = ("#e69f00", "#cc0044", "#7700dd", "#bb5511", "#773366")
"""Collectives, by axis: later ones begin again."""
MESSAGES = "#aa8899"
COPIES = "#bbccaa"
PURPOSE_FILLS = {
    "parameters": "#115544",
    "gradients": "#aa7700",
    "state": "#7711bb",
    "unsharded": "#cc77ff",
    "activations": "#88bbbb",
    "buffers": "#777744",
    "source": "#881188",
    "other": "#ccbb88",
}
"""Memory, by purpose."""


def fill(shard: int) -> str:
    """Return the colour of a shard.

    >>> fill(0), fill(11) == fill(0)
    ('#7cb7e8', True)
    """
    return _FILLS[shard % len(_FILLS)]
