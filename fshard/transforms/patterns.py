"""Paths of leaves in a tree, patterns of paths, and the units that they form.

blocks[3].attn.w        a path; `blocks.3.attn.w` as modules name it and `["blocks"][3]["attn"]["w"]` are the same
blocks[*].attn.w        a pattern, anchored at both ends
**.w                    any number of components, and then w
blocks[3]               the default unit of blocks[3].attn.w
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

Choice = str | Sequence[str] | Callable[[str], bool] | None
"""Some of the parameters: a path pattern, several, a function of the path; None of them."""


@lru_cache(maxsize=65536)
def parts_of(path: str) -> tuple[str, ...]:
    """Return the parts of a path or pattern: `["blocks"][3]["w"]`, `blocks[3].w` and `blocks.3.w` are one.

    >>> parts_of('["blocks"][3]["attn.w"]')
    ('blocks', '3', 'attn', 'w')
    """
    return tuple(component for component in re.split(r"[\[\].\"']+", path) if component)


def named(parts: Sequence[str]) -> str:
    """Return parts as a path that reads well.

    >>> named(("blocks", "3", "attn", "w")), named(("0", "weight"))
    ('blocks[3].attn.w', '0.weight')
    """
    return "".join(
        f"[{component}]" if index and component.isdigit() else f".{component}"
        for index, component in enumerate(parts)
    )[1:]


def titled(path: str, subject: str = "the parameter") -> str:
    """Return the name of a leaf for a message: `subject` where the tree is that leaf, which has no name.

    >>> titled('["blocks"][3]["w"]'), titled("")
    ('blocks[3].w', 'the parameter')
    """
    return named(parts_of(path)) or subject


@lru_cache(maxsize=65536)
def matches(pattern: str, path: str) -> bool:
    """Return True if a pattern matches a path: `*` matches anything within a component, `**` any number of
    components.

    >>> matches("blocks[*].attn.w", '["blocks"][3]["attn"]["w"]'), matches("blocks[*]", '["blocks"][3]["w"]')
    (True, False)
    """
    return matches_parts(parts_of(pattern), parts_of(path))


def matches_parts(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Return True if the components of a pattern match those of a path."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(matches_parts(pattern[1:], path[start:]) for start in range(len(path) + 1))
    is_match = bool(path) and re.fullmatch(
        ".*".join(map(re.escape, pattern[0].split("*"))), path[0]
    )
    return bool(is_match) and matches_parts(pattern[1:], path[1:])


def unit_of(path: str) -> str:
    """Return the default unit of a leaf: its repeated block, or its first component.

    >>> unit_of('["blocks"][3]["attn"]["w"]'), unit_of('["head"]["w"]')
    ('blocks[3]', 'head')
    """
    parts = parts_of(path)
    index = next(iter(_digit_positions(parts)), 0)
    return named(parts[: index + 1]) or "all"


def default_units(paths: Sequence[str]) -> list[str]:
    """Return the default unit of every leaf: by the first index in its path that counts similar entries (blocks).

    >>> default_units(["[0]", "[1][0].w", "[1][1].w", "[1][2].w", "[2]"])
    ['0', '1[0]', '1[1]', '1[2]', '2']
    """
    leaves_of: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for parts in map(parts_of, paths):
        for index in _digit_positions(parts):
            leaves_of.setdefault(parts[: index + 1], set()).add(parts[index + 1 :])
    alike = Counter((block[:-1], frozenset(leaves)) for block, leaves in leaves_of.items())

    def unit(path: str) -> str:
        parts = parts_of(path)
        blocks = [parts[: index + 1] for index in _digit_positions(parts)]
        return next(
            (
                named(block)
                for block in blocks
                if alike[block[:-1], frozenset(leaves_of[block])] > 1
            ),
            unit_of(path),
        )

    return list(map(unit, paths))


def _digit_positions(parts: Sequence[str]) -> list[int]:
    return [index for index, component in enumerate(parts) if component.isdigit()]


def chosen(choice: Choice, paths: Sequence[str], name: str) -> list[bool]:
    """Return which paths are chosen, or raise naming all patterns that are for none.

    >>> chosen(["0.*", "head"], ['["0.weight"]', '["0.bias"]', '["head"]', '["1.weight"]'], "frozen")
    [True, True, True, False]
    """
    if callable(choice):
        return [bool(choice(named(parts_of(path)))) for path in paths]
    patterns = [choice] if isinstance(choice, str) else [*(choice or ())]
    invalid = [repr(pattern) for pattern in patterns if not isinstance(pattern, str)]  # pyright: ignore[reportUnnecessaryIsInstance]
    if invalid:
        raise ValueError(
            f"{name}: {', '.join(invalid)} is no path pattern. Give patterns, or a function of the path."
        )
    unused = [pattern for pattern in patterns if not any(matches(pattern, path) for path in paths)]
    if unused:
        unmatched = ", ".join(f'"{pattern}"' for pattern in unused)
        raise ValueError(f"{name}: no leaf is for {unmatched}. {listed(paths)}.")
    return [any(matches(pattern, path) for pattern in patterns) for path in paths]


def listed(paths: Sequence[str]) -> str:
    """Return the first paths in words, for messages."""
    shown = ", ".join([titled(path, "one without a name") for path in list(paths)[:8]])
    return f"The leaves are {shown}{', ...' if len(paths) > 8 else ''}"
