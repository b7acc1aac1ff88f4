"""Paths of leaves in a tree, patterns of paths, and the units that they form.

blocks[3].attn.w    a path; `blocks.3.attn.w`, as modules write it, and
                    `["blocks"][3]["attn"]["w"]` are the same
blocks[*].attn.w    a pattern, anchored at both ends
**.w                any number of components, and then w
blocks[3]           the default unit of blocks[3].attn.w
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

from fshard.mesh.layout import path_text

Choice = str | Sequence[str] | Callable[[str], bool] | None
"""Some of the parameters: a path pattern, several, a function of the path; None of them."""

_MOST_LISTED = 8
"""The number of paths that an error names, so that its text stays readable for a large model."""


@lru_cache(maxsize=65536)
def parts_of(path: str) -> tuple[str, ...]:
    """Return the components of a path or pattern, whichever notation it has.

    >>> parts_of('["blocks"][3]["attn.w"]')
    ('blocks', '3', 'attn', 'w')
    """
    return tuple(component for component in re.split(r"[\[\].\"']+", path) if component)


def named(parts: Sequence[str]) -> str:
    """Join components to a path that reads well.

    >>> named(("blocks", "3", "attn", "w")), named(("0", "weight"))
    ('blocks[3].attn.w', '0.weight')
    """
    text = ""
    for index, component in enumerate(parts):
        if index == 0:
            text += component
        elif component.isdigit():
            text += f"[{component}]"
        else:
            text += f".{component}"
    return text


def titled(path: str, subject: str = "the parameter") -> str:
    """Return the name of a leaf for a message, as the user has written it.

    A tree that is one leaf has no path to it: `subject` then.

    >>> titled('["blocks"][3]["w"]'), titled('["blocks.3.w"]'), titled("")
    ('blocks[3].w', 'blocks.3.w', 'the parameter')
    """
    return path_text(path) or subject


@lru_cache(maxsize=65536)
def matches(pattern: str, path: str) -> bool:
    """Return True if a pattern matches a path.

    `*` matches anything within a component, `**` any number of components.

    >>> path = '["blocks"][3]["attn"]["w"]'
    >>> matches("blocks[*].attn.w", path), matches("blocks[*]", path)
    (True, False)
    """
    return matches_parts(parts_of(pattern), parts_of(path))


def matches_parts(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Return True if the components of a pattern match those of a path."""
    if not pattern:
        return not path
    first = pattern[0]
    others = pattern[1:]
    if first == "**":
        starts = range(len(path) + 1)
        return any(matches_parts(others, path[start:]) for start in starts)
    if not path:
        return False
    texts = [re.escape(text) for text in first.split("*")]
    if not re.fullmatch(".*".join(texts), path[0]):
        return False
    return matches_parts(others, path[1:])


def unit_of(path: str) -> str:
    """Return the default unit of a leaf: its repeated block, or its first component.

    >>> unit_of('["blocks"][3]["attn"]["w"]'), unit_of('["head"]["w"]')
    ('blocks[3]', 'head')
    """
    parts = parts_of(path)
    ends = _index_ends(parts) or [1]
    return named(parts[: ends[0]]) or "all"


# An index in a path may count blocks, which are units, or children of other kinds, as in
# nn.Sequential(embedding, blocks, head). Blocks have the same leaves inside. Of the paths below,
# [1] is no block, since no sibling has its leaves; [1][0] is one, since [1][1] has a leaf `w` too.
def default_units(paths: Sequence[str]) -> list[str]:
    """Return the default unit of every leaf: the outermost block in its path with siblings alike.

    >>> default_units(["[0]", "[1][0].w", "[1][1].w", "[1][2].w", "[2]"])
    ['0', '1[0]', '1[1]', '1[2]', '2']
    """
    leaves_of: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for path in paths:
        parts = parts_of(path)
        for end in _index_ends(parts):
            leaves_of.setdefault(parts[:end], set()).add(parts[end:])

    # A kind of block: the list that it is in, and the paths of its leaves.
    kinds = {block: (block[:-1], frozenset(leaves)) for block, leaves in leaves_of.items()}
    counts = Counter(kinds.values())

    units: list[str] = []
    for path in paths:
        parts = parts_of(path)
        blocks = [parts[:end] for end in _index_ends(parts)]
        repeated = [block for block in blocks if counts[kinds[block]] > 1]
        units.append(named(repeated[0]) if repeated else unit_of(path))
    return units


def _index_ends(parts: Sequence[str]) -> list[int]:
    """Return the lengths of the beginnings of a path that end in a number."""
    return [position + 1 for position, component in enumerate(parts) if component.isdigit()]


def chosen(choice: Choice, paths: Sequence[str], name: str) -> list[bool]:
    """Return which paths are chosen, or raise naming the patterns that match none.

    >>> paths = ['["0.weight"]', '["0.bias"]', '["head"]', '["1.weight"]']
    >>> chosen(["0.*", "head"], paths, "frozen")
    [True, True, True, False]
    """
    if callable(choice):
        return [bool(choice(named(parts_of(path)))) for path in paths]
    patterns = [choice] if isinstance(choice, str) else [*(choice or ())]

    invalid = [repr(pattern) for pattern in patterns if not isinstance(pattern, str)]  # pyright: ignore[reportUnnecessaryIsInstance]
    if invalid:
        raise ValueError(
            f"{name}: {', '.join(invalid)} is no path pattern. "
            "Give patterns, or a function of the path."
        )

    are_chosen = [False] * len(paths)
    unused: list[str] = []
    for pattern in patterns:
        matched = [index for index, path in enumerate(paths) if matches(pattern, path)]
        if not matched:
            unused.append(f'"{pattern}"')
        for index in matched:
            are_chosen[index] = True
    if unused:
        raise ValueError(f"{name}: no leaf is for {', '.join(unused)}. {listed(paths)}.")
    return are_chosen


def listed(paths: Sequence[str]) -> str:
    """Return the first paths in words, for messages."""
    titles = [titled(path, "one without a name") for path in paths[:_MOST_LISTED]]
    if len(paths) > _MOST_LISTED:
        titles.append("...")
    return f"The leaves are {', '.join(titles)}"
