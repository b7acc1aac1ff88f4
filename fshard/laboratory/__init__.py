"""The lab: a page on which a mesh and layouts are changed, and what a step then does is seen.

    state ─> subject ─> answer ┬─> engine ─┬─> widget   fs.lab(...), in a notebook
    controls, leaves, code ────┤           └─> server   fshard lab, in a browser
    proof ─────────────────────┘

state.py      all that is chosen, as one value
subject.py    the model, with what is cached of it; overrides of layouts
answer.py     the cost of a state's program: in full if it is short, else of a part
controls.py   the controls, from the fields of `Parallelism` and `Transformer`
leaves.py     the leaves, with the axes on their dims
code.py       the program of a state as text
proof.py      equality with one device, by `certify`
engine.py     messages of a page in, answers out
"""

from fshard.laboratory.widget import Lab, lab

__all__ = ["Lab", "lab"]
